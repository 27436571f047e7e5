/*
 * Room: gets a request the frames it needs, from the first that can give them.
 *
 *   free frames  ->  new frames, within limit and headroom  ->  free frames of the other size,
 *   released to make new ones  ->  what holders give up, cheapest first
 *
 * Victims are chosen for the whole deficit at once, from the bottom of the order. Those that can go
 * at once go; if that is not enough the rest are waited for, each alone. What a victim leaves is a
 * free frame, so every round begins at the top again; a round in which nothing came free is the last.
 * In a round that waits the lock is dropped: others may take what came free, and the next round
 * finds out.
 */
#include "internal.h"

/* Victims in flight for one request at a time. */
enum { VICTIMS = 64 };

static bool satisfied(const ebb__request *request)
{
    return !request->need[EBB__LARGE] && !request->need[EBB__SMALL];
}

static void got(ebb__request *request, ebb__frame *frame)
{
    frame->next = request->hand[frame->kind];
    request->hand[frame->kind] = frame;
    request->need[frame->kind]--;
}

static uint64_t missing_bytes(const ebb__device *device, const ebb__request *request)
{
    return request->need[EBB__LARGE] * device->frame_bytes[EBB__LARGE] +
           request->need[EBB__SMALL] * device->frame_bytes[EBB__SMALL];
}

static void take_free_locked(ebb__device *device, ebb__request *request) EBB__LOCKED
{
    for (int kind = 0; kind < EBB__KINDS; kind++)
        while (request->need[kind] && device->frames[kind])
            got(request, ebb__frame_take_locked(device, (ebb__kind)kind, EBB__OF_REQUEST));
}

/* New frames, as many as are needed, allowed, and to be had. Bytes of room that are left. */
static uint64_t grow_locked(ebb__device *device, ebb__request *request) EBB__LOCKED
{
    uint64_t room = ebb__frames_room_locked(device);
    for (int kind = 0; kind < EBB__KINDS; kind++) {
        while (request->need[kind] && room >= device->frame_bytes[kind]) {
            ebb__frame *frame = ebb__frame_create_locked(device, (ebb__kind)kind, EBB__OF_REQUEST);
            if (!frame)
                return 0;
            room -= device->frame_bytes[kind];
            got(request, frame);
        }
    }
    return room;
}

/* Free frames of a size that nobody asks for become room for the other. */
static bool convert_locked(ebb__device *device, const ebb__request *request) EBB__LOCKED
{
    uint64_t freed = 0;
    if (!request->need[EBB__LARGE] && request->need[EBB__SMALL])
        freed = ebb__frames_trim_locked(device, EBB__LARGE, missing_bytes(device, request));
    else if (request->need[EBB__LARGE] && !request->need[EBB__SMALL])
        freed = ebb__frames_trim_locked(device, EBB__SMALL, missing_bytes(device, request));
    return freed > 0;
}

/* Ask every holder for its best; policy picks. */
static bool choose_locked(ebb__device *device, const ebb__request *request,
                          ebb__candidate *candidate) EBB__LOCKED
{
    ebb__candidate shown[EBB__HOLDERS];
    unsigned count = 0;
    for (unsigned i = 0; i < EBB__HOLDERS; i++)
        if (device->holders[i].best && device->holders[i].best(device, request, &shown[count]))
            count++;
    if (!count)
        return false;
    *candidate = shown[ebb__policy_pick(shown, count)];
    return true;
}

/* Take victims out of use until they are worth `bytes`. How many there are, and *worth: their bytes. */
static unsigned begin_locked(ebb__device *device, const ebb__request *request, uint64_t bytes,
                             ebb__candidate *victims, uint64_t *worth) EBB__LOCKED
{
    unsigned count = 0;
    uint64_t sum = 0;
    while (count < VICTIMS && sum < bytes && choose_locked(device, request, &victims[count])) {
        const ebb__holder *holder = &device->holders[victims[count].owner];
        if (!holder->begin(device, &victims[count]))
            continue; /* somebody has just begun to use it, and it is no candidate any more */
        sum += victims[count].bytes;
        count++;
    }
    *worth = sum;
    return count;
}

/* A victim's frame, if the driver lets it go. If not, it is no candidate any more. */
static uint64_t finish_locked(ebb__device *device, const ebb__request *request,
                              const ebb__candidate *victim) EBB__LOCKED
{
    const ebb__holder *holder = &device->holders[victim->owner];
    bool gone = holder->finish(device, victim, request->reason);
    return gone ? victim->bytes : 0;
}

/*
 * Make victims worth `bytes` give up their frames; with `whole`, only if there are that many. false:
 * it is of no use to ask again, because nothing came free and no candidate fell out.
 */
static bool evict_locked(ebb__device *device, ebb__request *request, uint64_t bytes,
                         bool whole) EBB__LOCKED
{
    ebb__candidate victims[VICTIMS];
    uint64_t freed = 0, worth = 0;
    unsigned count = begin_locked(device, request, bytes, victims, &worth);
    unsigned waiting = 0, finished = 0;
    if (whole && worth < bytes && count < VICTIMS) {
        for (unsigned i = 0; i < count; i++)
            device->holders[victims[i].owner].undo(device, &victims[i]);
        request->lacking = bytes - worth;
        return false;
    }
    for (unsigned i = 0; i < count; i++) {
        if (!device->holders[victims[i].owner].settled(device, &victims[i])) {
            victims[waiting++] = victims[i];
        } else {
            freed += finish_locked(device, request, &victims[i]);
            finished++;
        }
    }
    for (unsigned i = 0; i < waiting; i++) {
        const ebb__holder *holder = &device->holders[victims[i].owner];
        if (!request->may_wait || freed >= bytes) {
            holder->undo(device, &victims[i]);
        } else if (holder->settle(device, &victims[i])) {
            freed += finish_locked(device, request, &victims[i]);
            finished++;
        }
    }
    return finished > 0;
}

static void put_back_locked(ebb__device *device, ebb__request *request) EBB__LOCKED
{
    for (int kind = 0; kind < EBB__KINDS; kind++) {
        while (request->hand[kind]) {
            ebb__frame *frame = request->hand[kind];
            request->hand[kind] = frame->next;
            request->need[kind]++;
            ebb__frame_put_locked(device, frame);
        }
    }
}

bool ebb__room_make_locked(ebb__device *device, ebb__request *request)
{
    request->lacking = 0;
    /* What can never be met must not cost anybody a page. And under a limit that was lowered below
       what is in use, nothing is used again before enough has been given back. */
    bool possible = missing_bytes(device, request) <= device->limit;
    if (possible && ebb__frames_held_locked(device) > device->limit &&
        !ebb__room_shrink_locked(device, device->limit, EBB_FOR_LIMIT, request->may_wait,
                                 request->may_call)) {
        uint64_t held = ebb__frames_held_locked(device); /* by then it may be within the limit */
        uint64_t over = held > device->limit ? held - device->limit : 0;
        request->lacking = over + missing_bytes(device, request);
        possible = false;
    }
    while (possible) {
        take_free_locked(device, request);
        if (satisfied(request))
            return true;
        uint64_t room = grow_locked(device, request);
        if (satisfied(request))
            return true;
        if (convert_locked(device, request))
            continue;
        /* What is left of the room is too little for a frame, and counts all the same. */
        uint64_t missing = missing_bytes(device, request);
        possible = evict_locked(device, request, missing > room ? missing - room : 1, true);
    }
    put_back_locked(device, request);
    return false;
}

bool ebb__room_shrink_locked(ebb__device *device, uint64_t bytes, ebb_reason reason, bool may_wait,
                             bool may_call)
{
    ebb__request request = {
        .rank = EBB__RANK_ALL, .reason = reason, .may_wait = may_wait, .may_call = may_call};
    for (;;) {
        uint64_t held = ebb__frames_held_locked(device);
        for (int kind = 0; kind < EBB__KINDS && held > bytes; kind++) {
            ebb__frames_trim_locked(device, (ebb__kind)kind, held - bytes);
            held = ebb__frames_held_locked(device);
        }
        if (held <= bytes)
            return true;
        if (!evict_locked(device, &request, held - bytes, false))
            return false;
    }
}

/* ---- those who pin, and can do with less ----------------------------------------------------------- */

static uint64_t ask_locked(ebb__device *device, ebb__giver *giver, uint64_t bytes) EBB__LOCKED
{
    giver->calls++;
    ebb__drop(device);
    uint64_t given = giver->give(giver, bytes);
    ebb__retake(device);
    giver->calls--;
    ebb__os_wake_all(&device->changed);
    return given;
}

bool ebb__room_beg_locked(ebb__device *device, uint64_t bytes)
{
    uint64_t could = 0, given = 0;
    for (ebb__giver *giver = device->givers; giver; giver = giver->next)
        could += ask_locked(device, giver, 0);
    /* What is too little in the end must not cost anybody a page. */
    if (could < bytes)
        return false;
    for (ebb__giver *giver = device->givers; giver && given < bytes; giver = giver->next)
        given += ask_locked(device, giver, bytes - given);
    return given > 0;
}

void ebb__giver_add_locked(ebb__device *device, ebb__giver *giver)
{
    giver->next = device->givers;
    device->givers = giver;
}

void ebb__giver_remove_locked(ebb__device *device, ebb__giver *giver)
{
    while (giver->calls)
        ebb__await(device);
    ebb__giver **at = &device->givers;
    while (*at && *at != giver)
        at = &(*at)->next;
    if (*at)
        *at = giver->next;
}

/*
 * Segments: PyTorch's cudaMalloc and cudaFree over frames.
 *
 * Allocating is the ordinary way of room.c, with a rank above every weight's: what PyTorch wants,
 * weights give way to. Before that, PyTorch itself is asked: the request is refused once, and PyTorch
 * then frees the segments it caches and does not use, and asks again. That is worth it when they are
 * left-overs of other sizes, and a waste when they are needed again in the next iteration, so refusals
 * back off when they turn out to be the latter (policy.c). Last of all, when it has been asked and not even
 * all weights are enough, those give way who keep room for weights on their way.
 *
 * Freeing: PyTorch frees segments that the GPU still works on, and relies on cudaFree to wait for all
 * work. We do not wait. A freed segment is parked, still mapped, behind a ticket of the whole context,
 * and its frames are taken, or the whole of it used again, only when that has passed:
 *
 *   LIVE --free--> PARKED --(ticket passed)--> frames free, addresses given back
 *                     \---(ticket passed, the same size is asked for)--> LIVE
 *
 * While a capture is open no event of the context can be recorded; parked segments then wait.
 */
#include "segment.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"

typedef struct segment {
    struct segment *next;     /* in its place of the table, or in the queue of parked ones */
    struct segment *previous; /* in the queue */
    CUdeviceptr base;
    uint64_t bytes; /* a multiple of the granularity */
    uint64_t ticket;
    ebb__frame *frames; /* in the order of their addresses */
} segment;

enum { PLACES = 4096 };

/* Refusals, and whether they helped. */
typedef struct asking {
    uint64_t thread, bytes; /* who was refused what, and is expected to ask again; 0: nobody */
    uint64_t parked_before; /* device's count of bytes ever parked at that moment */
    uint64_t flushed;       /* bytes that the last refusal brought back */
    uint64_t wanted_since;  /* bytes asked for since then */
    uint64_t pressures;     /* times that weights would have had to give way since then */
    unsigned setbacks;      /* refusals in a row that did not help */
} asking;

typedef struct ebb__segments {
    segment *live[PLACES];    /* by address */
    segment *oldest, *newest; /* parked */
    uint64_t live_count, live_bytes, parked_count, parked_bytes, parked_ever;
    asking ask;
    unsigned pools; /* of PyTorch's that are open: a refusal would be final */
    unsigned busy;  /* threads in a call that may have dropped the lock */
    uint64_t refusals, reused;
} ebb__segments;

static size_t place_of(CUdeviceptr base)
{
    return (size_t)((base >> 21) * 0x9E3779B97F4A7C15u >> 52) % PLACES;
}

/* ---- the two places a segment can be in --------------------------------------------------------- */

static void live_add_locked(ebb__segments *all, segment *s) EBB__LOCKED
{
    segment **place = &all->live[place_of(s->base)];
    s->next = *place;
    *place = s;
    all->live_count++;
    all->live_bytes += s->bytes;
}

static segment *live_take_locked(ebb__segments *all, CUdeviceptr base) EBB__LOCKED
{
    for (segment **at = &all->live[place_of(base)]; *at; at = &(*at)->next) {
        segment *s = *at;
        if (s->base != base)
            continue;
        *at = s->next;
        s->next = NULL;
        all->live_count--;
        all->live_bytes -= s->bytes;
        return s;
    }
    return NULL;
}

/* Parked segments are in the order of their tickets: mostly, this one's is the newest. */
static void park_locked(ebb__segments *all, segment *s) EBB__LOCKED
{
    s->previous = all->newest;
    while (s->previous && s->previous->ticket > s->ticket)
        s->previous = s->previous->previous;
    s->next = s->previous ? s->previous->next : all->oldest;
    if (s->next)
        s->next->previous = s;
    else
        all->newest = s;
    if (s->previous)
        s->previous->next = s;
    else
        all->oldest = s;
    all->parked_count++;
    all->parked_bytes += s->bytes;
}

static void unpark_locked(ebb__segments *all, segment *s) EBB__LOCKED
{
    if (s == all->oldest)
        all->oldest = s->next;
    else
        s->previous->next = s->next;
    if (s->next)
        s->next->previous = s->previous;
    else
        all->newest = s->previous;
    s->next = s->previous = NULL;
    all->parked_count--;
    all->parked_bytes -= s->bytes;
}

/* ---- mapping ------------------------------------------------------------------------------------- */

/* Unmap a segment's frames and give its addresses back. What the driver will not unmap stays, as
   poison, and the addresses with it. */
static bool dissolve_locked(ebb__device *device, segment *s) EBB__LOCKED
{
    CUdeviceptr at = s->base;
    ebb__frame **link = &s->frames;
    bool whole = true;
    while (*link) {
        ebb__frame *frame = *link;
        uint64_t bytes = device->frame_bytes[frame->kind];
        if (ebb__frame_unmap_locked(device, frame, at) == EBB_OK) {
            *link = frame->next;
            ebb__frame_put_locked(device, frame);
        } else {
            whole = false;
            ebb__frame_lose_locked(device, frame, link);
        }
        at += bytes;
    }
    if (whole)
        whole = device->driver.cuMemAddressFree(s->base, s->bytes) == CUDA_SUCCESS;
    free(s);
    return whole;
}

/* Map the frames in hand, the large ones first, at new addresses. */
static segment *build_locked(ebb__device *device, ebb__request *request, uint64_t bytes) EBB__LOCKED
{
    segment *s = calloc(1, sizeof *s);
    CUresult code = CUDA_ERROR_OUT_OF_MEMORY;
    if (s)
        code = device->driver.cuMemAddressReserve(&s->base, bytes, 0, 0, 0);
    if (code != CUDA_SUCCESS) {
        if (s)
            ebb__failed_locked(device, "cuMemAddressReserve", code);
        free(s);
        return NULL;
    }
    s->bytes = bytes;
    CUdeviceptr at = s->base;
    ebb__frame **link = &s->frames;
    for (int kind = 0; kind < EBB__KINDS; kind++) {
        while (request->hand[kind]) {
            ebb__frame *frame = request->hand[kind];
            request->hand[kind] = frame->next;
            bool stuck;
            if (ebb__frame_map_locked(device, frame, at, &stuck) != EBB_OK) {
                frame->next = NULL;
                if (stuck)
                    ebb__frame_lose_locked(device, frame, NULL);
                else
                    ebb__frame_put_locked(device, frame);
                dissolve_locked(device, s);
                return NULL;
            }
            ebb__frame_own_locked(device, frame, EBB__OF_SEGMENT);
            frame->next = NULL;
            *link = frame;
            link = &frame->next;
            at += device->frame_bytes[kind];
        }
    }
    return s;
}

static void hand_back_locked(ebb__device *device, ebb__request *request) EBB__LOCKED
{
    for (int kind = 0; kind < EBB__KINDS; kind++) {
        while (request->hand[kind]) {
            ebb__frame *frame = request->hand[kind];
            request->hand[kind] = frame->next;
            ebb__frame_put_locked(device, frame);
        }
    }
}

/* ---- parked segments as holders of frames ---------------------------------------------------------- */

/* The oldest parked one: nothing to do for it if its ticket has passed, a wait if not. Tickets are in
   the order of parking, so if that one has not passed, none has. */
static bool best(ebb__device *device, const ebb__request *request,
                 ebb__candidate *candidate) EBB__LOCKED
{
    segment *s = device->segments->oldest;
    if (!s)
        return false;
    ebb__fence_state state = ebb__ticket_state_locked(device, s->ticket);
    if (state == EBB__UNKNOWN || (state == EBB__PENDING && !request->may_wait))
        return false;
    *candidate = (ebb__candidate){.owner = EBB__SEGMENT_HOLDER,
                                  .cost = state == EBB__PASSED ? 0 : 4,
                                  .bytes = s->bytes,
                                  .object = s};
    return true;
}

static bool begin(ebb__device *device, ebb__candidate *candidate) EBB__LOCKED
{
    unpark_locked(device->segments, candidate->object);
    return true;
}

static bool settled(ebb__device *device, const ebb__candidate *candidate) EBB__LOCKED
{
    const segment *s = candidate->object;
    return ebb__ticket_state_locked(device, s->ticket) == EBB__PASSED;
}

static void undo(ebb__device *device, const ebb__candidate *candidate) EBB__LOCKED
{
    park_locked(device->segments, candidate->object);
}

static bool settle(ebb__device *device, const ebb__candidate *candidate) EBB__LOCKED
{
    const segment *s = candidate->object;
    if (ebb__ticket_wait_locked(device, s->ticket))
        return true;
    undo(device, candidate);
    return false;
}

static bool finish(ebb__device *device, const ebb__candidate *candidate,
                   ebb_reason reason) EBB__LOCKED
{
    (void)reason;
    return dissolve_locked(device, candidate->object);
}

static const ebb__holder parked_holder = {best, begin, settled, settle, finish, undo};

/* ---- asking PyTorch first --------------------------------------------------------------------------- */

/* Is this the request that was refused? Then see what that has brought. */
static bool back_locked(ebb__segments *all, uint64_t bytes) EBB__LOCKED
{
    asking *ask = &all->ask;
    if (ask->thread != ebb__os_thread() || ask->bytes != bytes)
        return false;
    ask->thread = 0;
    ask->flushed = all->parked_ever - ask->parked_before;
    ask->wanted_since = 0;
    if (!ask->flushed)
        ask->setbacks++;
    return true;
}

/* Whether PyTorch, refused, would give back what it does not use, and ask again. */
static bool may_ask_locked(const ebb__segments *all) EBB__LOCKED
{
    return !all->pools && !atomic_load(&ebb__captures);
}

static void ask_locked(ebb__segments *all, uint64_t bytes) EBB__LOCKED
{
    all->ask = (asking){.thread = ebb__os_thread(),
                        .bytes = bytes,
                        .parked_before = all->parked_ever,
                        .setbacks = all->ask.setbacks};
    all->refusals++;
}

/* Weights would have to give way for this: is PyTorch to be asked for what it does not use? */
static bool refuse_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED
{
    ebb__segments *all = device->segments;
    asking *ask = &all->ask;
    ask->pressures++;
    if (!may_ask_locked(all))
        return false;
    /* What was brought back last time has been asked for again since: it was in use after all. */
    if (ask->flushed && ask->wanted_since >= ask->flushed / 2) {
        ask->setbacks++;
        ask->flushed = 0;
    }
    if (!ebb__policy_may_ask(ask->pressures, ask->setbacks))
        return false;
    if (ask->flushed)
        ask->setbacks = 0;
    ask_locked(all, bytes);
    return true;
}

/* Not even all weights are enough. Once more with what givers let go, if PyTorch has been asked before. */
static bool beg_locked(ebb__device *device, ebb__request *request, uint64_t bytes,
                       bool asked) EBB__LOCKED
{
    ebb__segments *all = device->segments;
    if (!request->lacking || !device->givers)
        return false;
    if (!asked && may_ask_locked(all)) {
        ask_locked(all, bytes);
        return false;
    }
    while (request->lacking && ebb__room_beg_locked(device, request->lacking))
        if (ebb__room_make_locked(device, request))
            return true;
    return false;
}

/* ---- the two functions ------------------------------------------------------------------------------ */

/* A parked segment of this very size that nobody works on any more: no need to map anything. */
static segment *reuse_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED
{
    ebb__segments *all = device->segments;
    for (segment *s = all->oldest; s; s = s->next) {
        if (s->bytes != bytes)
            continue;
        if (ebb__ticket_state_locked(device, s->ticket) != EBB__PASSED)
            return NULL;
        unpark_locked(all, s);
        all->reused++;
        return s;
    }
    return NULL;
}

static segment *obtain_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED
{
    uint64_t large = bytes >> EBB__LARGE_SHIFT;
    uint64_t small = (bytes - (large << EBB__LARGE_SHIFT)) >> device->small_shift;
    ebb__request request = {.need = {large, small}, .rank = INT64_MIN, .reason = EBB_FOR_TENSOR};
    if (device->limit >= ebb__frames_held_locked(device)) {
        segment *again = reuse_locked(device, bytes);
        if (again)
            return again;
    }
    /* First what costs nobody anything, then PyTorch's own, then weights. */
    if (!ebb__room_make_locked(device, &request)) {
        bool asked = back_locked(device->segments, bytes);
        if (!asked && refuse_locked(device, bytes))
            return NULL;
        request.rank = EBB__RANK_ALL;
        request.may_wait = true;
        if (!ebb__room_make_locked(device, &request) && !beg_locked(device, &request, bytes, asked))
            return NULL;
    }
    segment *s = build_locked(device, &request, bytes);
    hand_back_locked(device, &request);
    return s;
}

static ebb__device *enter(ebb_device handle, ebb__scope *scope, ebb_status *status) EBB__TRIES;

EBB__UNCHECKED static ebb__device *enter(ebb_device handle, ebb__scope *scope, ebb_status *status)
{
    ebb__device *device = ebb__device_find(handle, status);
    if (!device)
        return NULL;
    ebb__enter(device, scope);
    if (atomic_load(&device->id) == handle.id && device->segments)
        return device;
    ebb__leave(device, scope);
    *status = EBB_GONE;
    return NULL;
}

ebb_status ebb__segment_alloc(ebb_device handle, uint64_t bytes, uint64_t *address)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return status;
    uint64_t grain = device->frame_bytes[EBB__SMALL];
    segment *s = NULL;
    if (scope.ready && bytes && bytes <= UINT64_MAX / 2) {
        bytes = (bytes + grain - 1) / grain * grain;
        device->segments->busy++;
        s = obtain_locked(device, bytes);
        device->segments->busy--;
    }
    if (s) {
        live_add_locked(device->segments, s);
        if (!back_locked(device->segments, bytes))
            device->segments->ask.wanted_since += bytes;
        *address = s->base;
    }
    ebb__leave(device, &scope);
    return s ? EBB_OK : EBB_FULL;
}

ebb_status ebb__segment_free(ebb_device handle, uint64_t address)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return status;
    segment *s = live_take_locked(device->segments, address);
    if (s) {
        /* All work so far. The event is recorded when somebody needs to know, for all at once. */
        s->ticket = ebb__ticket_locked(device, EBB__CONTEXT_SLOT);
        park_locked(device->segments, s);
        device->segments->parked_ever += s->bytes;
    }
    /* A limit that was lowered takes its due as memory is given back. */
    if (s && scope.ready && ebb__frames_held_locked(device) > device->limit)
        ebb__room_shrink_locked(device, device->limit, EBB_FOR_LIMIT, false, false);
    ebb__leave(device, &scope);
    return s ? EBB_OK : EBB_INVALID;
}

/* ---- the door --------------------------------------------------------------------------------------- */

ebb_status ebb__segments_open(ebb_device handle)
{
    ebb_status status;
    ebb__device *device = ebb__device_find(handle, &status);
    if (!device)
        return status;
    ebb__scope scope;
    ebb__enter(device, &scope);
    if (!device->driver.cuCtxRecordEvent) {
        status = EBB_DRIVER_TOO_OLD;
    } else if (!device->segments) {
        device->segments = calloc(1, sizeof *device->segments);
        if (device->segments)
            device->holders[EBB__SEGMENT_HOLDER] = parked_holder;
        else
            status = EBB_NO_HOST_MEMORY;
    }
    ebb__leave(device, &scope);
    return status;
}

ebb_status ebb__segments_close(ebb_device handle)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return status;
    ebb__segments *all = device->segments;
    all->busy++;
    while (scope.ready && all->oldest && !all->live_count) {
        segment *s = all->oldest;
        if (ebb__ticket_state_locked(device, s->ticket) == EBB__PASSED) {
            unpark_locked(all, s);
            dissolve_locked(device, s);
        } else if (!ebb__ticket_wait_locked(device, s->ticket)) {
            break;
        }
    }
    all->busy--;
    if (all->live_count || all->parked_count || all->busy) {
        status = EBB_BUSY;
    } else {
        device->holders[EBB__SEGMENT_HOLDER] = (ebb__holder){0};
        device->segments = NULL;
        free(all);
    }
    ebb__leave(device, &scope);
    return status;
}

void ebb__segments_before(ebb_device handle, int64_t change)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return;
    device->before += (uint64_t)change;
    ebb__leave(device, &scope);
}

/* Let as many bytes go as that, or as there are. Bytes that went. */
static uint64_t yield_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED
{
    uint64_t held = ebb__frames_held_locked(device);
    ebb__segments *all = device->segments;
    all->busy++;
    ebb__room_shrink_locked(device, held > bytes ? held - bytes : 0, EBB_FOR_TENSOR, true, false);
    all->busy--;
    uint64_t left = ebb__frames_held_locked(device);
    return held > left ? held - left : 0;
}

ebb_status ebb__segments_press(ebb_device handle, uint64_t bytes)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return status;
    status = EBB_FULL;
    /* What can never be met must not cost anybody a page. */
    bool possible =
        scope.ready &&
        (!bytes || (device->before <= device->limit && bytes <= device->limit - device->before));
    while (possible && status == EBB_FULL) {
        uint64_t held = ebb__frames_held_locked(device);
        uint64_t over = held > device->limit ? held - device->limit : 0;
        uint64_t room = over || !bytes ? 0 : ebb__frames_room_locked(device);
        if (!over && room >= bytes)
            status = EBB_OK;
        else if (!yield_locked(device, over + bytes - room))
            break;
    }
    ebb__leave(device, &scope);
    return status;
}

ebb_status ebb__segments_yield(ebb_device handle, uint64_t bytes)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return status;
    status = scope.ready && yield_locked(device, bytes) ? EBB_OK : EBB_FULL;
    ebb__leave(device, &scope);
    return status;
}

bool ebb__segment_holds(ebb_device handle, uint64_t address)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return false;
    bool held = false;
    for (size_t i = 0; i < PLACES && !held; i++)
        for (const segment *s = device->segments->live[i]; s && !held; s = s->next)
            held = address >= s->base && address - s->base < s->bytes;
    for (uint32_t i = 0; i < device->vbar_high && !held; i++) {
        const ebb__vbar *vbar = ebb__vbar_number(device, i);
        held = atomic_load(&vbar->id) && address >= vbar->base &&
               address - vbar->base < atomic_load(&vbar->bytes);
    }
    ebb__leave(device, &scope);
    return held;
}

ebb_status ebb__segments_stats(ebb_device handle, ebb_segment_stats *stats)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return status;
    const ebb__segments *all = device->segments;
    *stats = (ebb_segment_stats){
        .size = stats->size,
        .segments = all->live_count,
        .bytes = all->live_bytes,
        .parked = all->parked_count,
        .parked_bytes = all->parked_bytes,
        .before = device->before,
        .reused = all->reused,
        .refusals = all->refusals,
    };
    ebb__leave(device, &scope);
    return EBB_OK;
}

void ebb__segments_pass(ebb_device handle)
{
    ebb_status status;
    ebb__device *device = ebb__device_find(handle, &status);
    if (!device)
        return;
    ebb__retake(device);
    ebb__drop(device);
}

void ebb__segments_open_pool(ebb_device handle, int change)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = enter(handle, &scope, &status);
    if (!device)
        return;
    ebb__segments *all = device->segments;
    if (!change)
        all->pools = 0;
    else if (change > 0 || all->pools) /* one that was open before is closed, too */
        all->pools += (unsigned)change;
    ebb__leave(device, &scope);
}

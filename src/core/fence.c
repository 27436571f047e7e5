/*
 * Fences: what the GPU may still be doing with a page.
 *
 * Unpinning must cost next to nothing, and recording an event is not nothing. So an unpin only notes
 * a ticket on the page: which stream, and the stream's epoch. An event is recorded when somebody
 * needs to know (a victim is sought, another stream faults), and now and then; it ends the epoch, and
 * covers every ticket up to it:
 *
 *   stream   --- work --- work --- [mark: epochs <= 7] --- work --- work ---> queued so far
 *   tickets      7        7                                8        8         epoch is 8
 *
 * The epoch is ended before the event is recorded. A thread that reads epoch 7 did so before that,
 * and its work was queued before it read: the event comes after its work.
 *
 * This works for streams that are promised to last. Of any other it is not known whether it lives
 * when the event is needed, or whether its handle is another stream by then, so a mark is recorded
 * with each unpin, marks pass one by one, and being on the same handle proves no order.
 *
 * While a stream captures, nothing can be recorded on it, and to ask for an event of it would kill
 * the capture: such a fence is unknown for the time being. So everything here asks first, also of a
 * stream that was promised never to capture: only unpins without the lock rely on that promise.
 *
 * Of the whole context an event can be recorded since CUDA 12.5. On an older driver nobody may take a
 * ticket of it: to gather the streams that are known would miss those that are not.
 */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

_Static_assert(EBB__STREAM_HASH == 1 << 12, "as many places as the hash has values");

_Atomic unsigned ebb__captures;

static bool poll_locked(ebb__device *device, ebb__stream *stream) EBB__LOCKED;

/*
 * A slot to use again: of a stream that made no promise and of which everything has passed. Its old
 * tickets stay below `passed`, and its place in the hash is found by its new handle only if the two
 * collide, so the place is given up to the new handle's search: the whole hash is made anew.
 */
static unsigned recycle_slot_locked(ebb__device *device) EBB__LOCKED
{
    for (unsigned slot = EBB__CONTEXT_SLOT + 1; slot < EBB__STREAMS; slot++) {
        ebb__stream *s = &device->streams[slot];
        if (!s->used || s->kept || atomic_load(&s->lasting))
            continue;
        poll_locked(device, s); /* nobody else may ever ask what became of it */
        if (!s->mark_count && s->passed + 1 == atomic_load(&s->epoch)) {
            s->used = false;
            atomic_store(&s->handle, NULL);
            return slot;
        }
    }
    return 0;
}

static void rehash_locked(ebb__device *device) EBB__LOCKED
{
    /* A reader meanwhile may miss a stream that is there, and takes the slow path, under the lock. */
    for (unsigned at = 0; at < EBB__STREAM_HASH; at++)
        atomic_store(&device->stream_hash[at], 0);
    for (unsigned slot = EBB__CONTEXT_SLOT + 1; slot < EBB__STREAMS; slot++) {
        if (!device->streams[slot].used)
            continue;
        unsigned at = ebb__stream_hash(atomic_load(&device->streams[slot].handle));
        while (atomic_load(&device->stream_hash[at % EBB__STREAM_HASH]))
            at++;
        atomic_store(&device->stream_hash[at % EBB__STREAM_HASH], (uint16_t)slot);
    }
}

unsigned ebb__stream_get_locked(ebb__device *device, ebb_stream stream)
{
    stream = ebb__stream_plain(stream);
    unsigned slot = ebb__stream_find(device, stream);
    if (slot)
        return slot;
    bool again = false;
    for (slot = EBB__CONTEXT_SLOT + 1; slot < EBB__STREAMS && device->streams[slot].used;)
        slot++;
    if (slot == EBB__STREAMS) {
        slot = recycle_slot_locked(device);
        again = true;
    }
    if (!slot)
        return 0;
    ebb__stream *s = &device->streams[slot];
    s->used = true;
    atomic_store(&s->never_captures, false);
    atomic_store(&s->lasting, false);
    if (!atomic_load(&s->epoch))
        atomic_store(&s->epoch, 1);
    atomic_store(&s->handle, stream);
    if (again) {
        rehash_locked(device);
    } else {
        unsigned at = ebb__stream_hash(stream);
        while (atomic_load(&device->stream_hash[at % EBB__STREAM_HASH]))
            at++;
        atomic_store(&device->stream_hash[at % EBB__STREAM_HASH], (uint16_t)slot);
    }
    return slot;
}

void ebb__fence_open_locked(ebb__device *device)
{
    for (unsigned slot = EBB__LEGACY_SLOT; slot <= EBB__CONTEXT_SLOT; slot++) {
        ebb__stream *s = &device->streams[slot];
        s->used = true;
        atomic_store(&s->never_captures, slot == EBB__LEGACY_SLOT);
        atomic_store(&s->lasting, true);
        atomic_store(&s->epoch, 1);
    }
}

ebb__capture ebb__stream_ask_locked(ebb__device *device, ebb_stream stream)
{
    ebb__capture capture = ebb__stream_capture(device, stream);
    if (capture != EBB__CAPTURING)
        return capture;
    ebb__stream *s = &device->streams[ebb__stream_find(device, stream)];
    if (atomic_exchange(&s->never_captures, false)) {
        device->broken_promises++;
        ebb__detail(device->failure, sizeof device->failure,
                    "a stream captures that was promised never to capture");
    }
    return capture;
}

/* ---- marks ---------------------------------------------------------------------------------- */

static CUevent event_take_locked(ebb__device *device) EBB__LOCKED
{
    if (device->event_count)
        return device->events[--device->event_count];
    CUevent event = NULL;
    CUresult code = device->driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (code != CUDA_SUCCESS)
        ebb__failed_locked(device, "cuEventCreate", code);
    return code == CUDA_SUCCESS ? event : NULL;
}

static void event_put_locked(ebb__device *device, CUevent event) EBB__LOCKED
{
    if (device->event_count == device->event_room) {
        unsigned room = device->event_room ? 2 * device->event_room : 64;
        CUevent *events = realloc(device->events, room * sizeof *events);
        if (!events) {
            device->driver.cuEventDestroy(event);
            return;
        }
        device->events = events;
        device->event_room = room;
    }
    device->events[device->event_count++] = event;
}

/* All up to an epoch has passed: forget the marks of it, but for those that are still waited for. */
static void pass_locked(ebb__device *device, ebb__stream *stream, uint64_t epoch) EBB__LOCKED
{
    unsigned kept = 0;
    stream->passed = epoch > stream->passed ? epoch : stream->passed;
    for (unsigned i = 0; i < stream->mark_count; i++) {
        if (stream->marks[i].epoch <= stream->passed && !stream->marks[i].waiters)
            event_put_locked(device, stream->marks[i].event);
        else
            stream->marks[kept++] = stream->marks[i];
    }
    stream->mark_count = kept;
}

/*
 * A capture may begin between the question whether a stream captures and the event's record, which
 * then belongs to the graph. Such a mark covers nothing, and must not be asked for: it is taken away,
 * and its tickets are covered by the next. Nobody waits for it.
 */
static void lose_locked(ebb__device *device, ebb__stream *stream, unsigned which) EBB__LOCKED
{
    event_put_locked(device, stream->marks[which].event); /* as good as new when recorded again */
    stream->mark_count--;
    memmove(&stream->marks[which], &stream->marks[which + 1],
            (stream->mark_count - which) * sizeof *stream->marks);
}

/* What the driver says of an event that was recorded into a capture. */
static bool captured(const ebb__stream *stream, CUresult code)
{
    return atomic_load(&stream->lasting) &&
           (code == CUDA_ERROR_CAPTURED_EVENT || code == CUDA_ERROR_INVALID_VALUE);
}

/* See which marks have passed. false: the driver could not say. */
static bool poll_locked(ebb__device *device, ebb__stream *stream) EBB__LOCKED
{
    while (stream->mark_count && !stream->marks[0].waiters) {
        CUresult code = device->driver.cuEventQuery(stream->marks[0].event);
        if (code == CUDA_ERROR_NOT_READY)
            return true;
        if (captured(stream, code)) {
            lose_locked(device, stream, 0);
            continue;
        }
        if (code != CUDA_SUCCESS) {
            ebb__failed_locked(device, "cuEventQuery", code);
            return false;
        }
        pass_locked(device, stream, stream->marks[0].epoch);
    }
    return true;
}

/* Room for one more mark: false if there is none, then the newest is recorded again. */
static bool mark_room_locked(ebb__device *device, ebb__stream *stream) EBB__LOCKED
{
    bool lasting = atomic_load(&stream->lasting);
    if (stream->mark_count >= EBB__MARKS)
        poll_locked(device, stream);
    /* Marks of one lasting stream are in order, so a later one can stand for an earlier. */
    if (lasting && stream->mark_count >= EBB__MARKS &&
        !stream->marks[stream->mark_count - 1].waiters)
        return false;
    if (stream->mark_count == stream->mark_room) {
        unsigned room = stream->mark_room ? 2 * stream->mark_room : EBB__MARKS;
        ebb__mark *marks = realloc(stream->marks, room * sizeof *marks);
        if (!marks)
            return false;
        stream->marks = marks;
        stream->mark_room = room;
    }
    return true;
}

static CUresult record_locked(ebb__device *device, unsigned slot, CUevent event) EBB__LOCKED
{
    if (slot == EBB__CONTEXT_SLOT)
        return device->driver.cuCtxRecordEvent(device->context, event);
    return device->driver.cuEventRecord(event, atomic_load(&device->streams[slot].handle));
}

ebb_status ebb__mark_locked(ebb__device *device, unsigned slot)
{
    ebb__stream *stream = &device->streams[slot];
    bool fresh = mark_room_locked(device, stream);
    if (!fresh && (!stream->mark_count || !atomic_load(&stream->lasting)))
        return EBB_NO_HOST_MEMORY;
    CUevent event = fresh ? event_take_locked(device) : stream->marks[stream->mark_count - 1].event;
    if (!event)
        return EBB_DRIVER_FAILED;

    /* First the epoch, then the event: see the top of this file. */
    uint64_t epoch = atomic_fetch_add(&stream->epoch, 1);
    atomic_store_explicit(&stream->unpins, 0, memory_order_relaxed);
    CUresult code = record_locked(device, slot, event);
    if (code != CUDA_SUCCESS) {
        if (fresh)
            event_put_locked(device, event);
        /* An event that failed to be recorded again still covers what it did. */
        return ebb__failed_locked(device, "cuEventRecord", code);
    }
    device->marks++;
    if (fresh)
        stream->marks[stream->mark_count++] = (ebb__mark){.event = event, .epoch = epoch};
    else
        stream->marks[stream->mark_count - 1].epoch = epoch;
    if (atomic_load(&stream->lasting) && slot != EBB__LEGACY_SLOT &&
        ebb__stream_ask_locked(device, atomic_load(&stream->handle)) != EBB__NOT_CAPTURING) {
        lose_locked(device, stream, stream->mark_count - 1);
        return EBB_BUSY;
    }
    return EBB_OK;
}

void ebb__mark_in_passing(ebb__device *device, unsigned slot)
{
    ebb__stream *stream = &device->streams[slot];
    /*
     * To ask a stream, and to record on it if it does not capture, needs neither the context nor the
     * thread's capture mode, so mostly both are left alone. Making an event needs the one, seeing
     * which marks have passed the other, and the legacy stream both.
     */
    ebb__retake(device);
    /* Only while it lasts: the device may have been closed since the unpin, or the stream be gone. */
    bool may = atomic_load(&stream->lasting) &&
               ebb__stream_ask_locked(device, atomic_load(&stream->handle)) == EBB__NOT_CAPTURING;
    bool light =
        may && slot != EBB__LEGACY_SLOT && device->event_count && stream->mark_count < EBB__MARKS;
    if (light)
        ebb__mark_locked(device, slot);
    ebb__drop(device);
    if (light || !may)
        return;
    ebb__scope scope;
    ebb__enter(device, &scope);
    if (atomic_load(&stream->lasting))
        ebb__mark_locked(device, slot);
    ebb__leave(device, &scope);
}

/* What of the stream has no mark is over: let it pass with the marks there are. */
static void cover_locked(ebb__stream *stream) EBB__LOCKED
{
    uint64_t last = atomic_load(&stream->epoch) - 1;
    uint64_t *covered =
        stream->mark_count ? &stream->marks[stream->mark_count - 1].epoch : &stream->passed;
    if (*covered < last)
        *covered = last;
}

bool ebb__fence_seal_locked(ebb__device *device, unsigned slot)
{
    ebb__stream *stream = &device->streams[slot];
    uint64_t epoch = atomic_load(&stream->epoch);
    if (atomic_load(&stream->lasting) || ebb__mark_locked(device, slot) == EBB_OK)
        return true;
    /* No mark: then the stream is waited for, while it is certain to be there. */
    if (atomic_load(&stream->epoch) == epoch)
        atomic_fetch_add(&stream->epoch, 1);
    stream->drains++;
    bool over = ebb__stream_drain_locked(device, atomic_load(&stream->handle));
    stream->drains--;
    if (over && !stream->drains)
        cover_locked(stream);
    return over;
}

/* Whether recording on a stream, or of the whole context, would disturb a capture. */
static bool captures_locked(ebb__device *device, unsigned slot) EBB__LOCKED
{
    if (slot != EBB__CONTEXT_SLOT)
        return ebb__stream_ask_locked(device, atomic_load(&device->streams[slot].handle)) !=
               EBB__NOT_CAPTURING;
    if (atomic_load(&ebb__captures))
        return true;
    /* Streams that may be gone must not be asked. */
    for (unsigned i = 1; i < EBB__STREAMS; i++) {
        const ebb__stream *stream = &device->streams[i];
        if (i != EBB__CONTEXT_SLOT && stream->used && atomic_load(&stream->lasting) &&
            ebb__stream_ask_locked(device, atomic_load(&stream->handle)) != EBB__NOT_CAPTURING)
            return true;
    }
    return false;
}

/* The oldest mark that covers an epoch; made if there is none. NULL: not to be had now. */
static ebb__mark *mark_for_locked(ebb__device *device, unsigned slot, uint64_t epoch) EBB__LOCKED
{
    ebb__stream *stream = &device->streams[slot];
    if (!stream->mark_count || stream->marks[stream->mark_count - 1].epoch < epoch) {
        /* Only a lasting stream may be touched now. Of others, the mark was made with the unpin. */
        if (!atomic_load(&stream->lasting) || captures_locked(device, slot) ||
            ebb__mark_locked(device, slot) != EBB_OK)
            return NULL;
    }
    for (unsigned i = 0; i < stream->mark_count; i++)
        if (stream->marks[i].epoch >= epoch)
            return &stream->marks[i];
    return NULL;
}

ebb__fence_state ebb__ticket_state_locked(ebb__device *device, uint64_t ticket)
{
    unsigned slot = EBB__TICKET_SLOT(ticket);
    uint64_t epoch = ticket & EBB__TICKET_EPOCH;
    ebb__stream *stream = &device->streams[slot];
    if (!slot || stream->passed >= epoch)
        return EBB__PASSED;
    if (!mark_for_locked(device, slot, epoch) || !poll_locked(device, stream))
        return EBB__UNKNOWN;
    return stream->passed >= epoch ? EBB__PASSED : EBB__PENDING;
}

/* Wait for one ticket, with the lock dropped meanwhile. false: cannot be known. */
bool ebb__ticket_wait_locked(ebb__device *device, uint64_t ticket)
{
    unsigned slot = EBB__TICKET_SLOT(ticket);
    uint64_t epoch = ticket & EBB__TICKET_EPOCH;
    ebb__stream *stream = &device->streams[slot];
    while (stream->passed < epoch) {
        if (!mark_for_locked(device, slot, epoch))
            return false;
        /* The oldest mark that has not passed first: each tells of others' tickets too. One that has
           passed may still be there, for threads that have not woken yet. */
        ebb__mark *mark = stream->marks;
        while (mark->epoch <= stream->passed)
            mark++;
        CUevent event = mark->event;
        mark->waiters++;
        uint64_t begin = ebb__os_now();
        ebb__drop(device);
        CUresult code = device->driver.cuEventSynchronize(event);
        ebb__retake(device);
        device->waits++;
        device->wait_ns += ebb__os_now() - begin;

        /* Marks may have moved; one that is waited for is still among them. */
        mark = stream->marks;
        while (mark->event != event)
            mark++;
        mark->waiters--;
        uint64_t covers = mark->epoch;
        if (captured(stream, code)) {
            if (!mark->waiters)
                lose_locked(device, stream, (unsigned)(mark - stream->marks));
            continue;
        }
        if (code != CUDA_SUCCESS) {
            ebb__failed_locked(device, "cuEventSynchronize", code);
            return false;
        }
        pass_locked(device, stream, covers);
    }
    return true;
}

uint64_t ebb__ticket_locked(ebb__device *device, unsigned slot)
{
    return (uint64_t)slot << 48 | atomic_load(&device->streams[slot].epoch);
}

/* ---- pages ---------------------------------------------------------------------------------- */

static void set_more_locked(ebb__page *page, ebb__more *more)
{
    page->more = more;
    uint64_t ticket = atomic_load(&page->ticket), changed;
    do {
        changed = more ? ticket | EBB__TICKET_MORE : ticket & ~EBB__TICKET_MORE;
    } while (!atomic_compare_exchange_weak(&page->ticket, &ticket, changed));
}

/* Forget the other streams' tickets that have passed, and those of `slot`. */
static void prune_locked(ebb__device *device, ebb__page *page, unsigned slot) EBB__LOCKED
{
    ebb__more **at = &page->more;
    while (*at) {
        ebb__more *more = *at;
        unsigned its = EBB__TICKET_SLOT(more->ticket);
        if (its == slot || device->streams[its].passed >= (more->ticket & EBB__TICKET_EPOCH)) {
            *at = more->next;
            free(more);
        } else {
            at = &more->next;
        }
    }
    set_more_locked(page, page->more);
}

bool ebb__fence_note_locked(ebb__device *device, ebb__page *page, unsigned slot)
{
    for (;;) {
        uint64_t old = atomic_load(&page->ticket);
        uint64_t now = (uint64_t)slot << 48 | atomic_load(&device->streams[slot].epoch);
        unsigned its = EBB__TICKET_SLOT(old);
        bool over = device->streams[its].passed >= (old & EBB__TICKET_EPOCH);
        if (!its || its == slot || over) {
            /* Alone, or in the place of one that is over. A lock-free unpin may be faster: again. */
            if (!atomic_compare_exchange_strong(&page->ticket, &old,
                                                now | (old & EBB__TICKET_MORE)))
                continue;
            prune_locked(device, page, slot);
            return true;
        }
        ebb__more *more = malloc(sizeof *more);
        if (!more) {
            /* Nowhere to keep both: wait until the older one is over. The page is pinned. */
            if (ebb__ticket_wait_locked(device, old))
                continue;
            return false;
        }
        if (!atomic_compare_exchange_strong(&page->ticket, &old, now | EBB__TICKET_MORE)) {
            free(more);
            continue;
        }
        prune_locked(device, page, slot);
        *more = (ebb__more){.next = page->more, .ticket = old & ~EBB__TICKET_MORE};
        set_more_locked(page, more);
        return true;
    }
}

ebb__fence_state ebb__fence_state_locked(ebb__device *device, ebb__page *page)
{
    ebb__fence_state state = ebb__ticket_state_locked(device, atomic_load(&page->ticket));
    for (ebb__more *more = page->more; more; more = more->next) {
        ebb__fence_state its = ebb__ticket_state_locked(device, more->ticket);
        state = its > state ? its : state;
    }
    prune_locked(device, page, 0);
    return state;
}

bool ebb__fence_wait_locked(ebb__device *device, ebb__page *page)
{
    /* The lock is dropped in each wait, so the list is looked at anew after it. */
    for (;;) {
        uint64_t ticket = atomic_load(&page->ticket);
        ebb__fence_state state = ebb__ticket_state_locked(device, ticket);
        for (ebb__more *more = page->more; more && state == EBB__PASSED; more = more->next) {
            ticket = more->ticket;
            state = ebb__ticket_state_locked(device, ticket);
        }
        if (state == EBB__PASSED)
            return true;
        if (state == EBB__UNKNOWN || !ebb__ticket_wait_locked(device, ticket))
            return false;
    }
}

/* One ticket: is it of another stream, or one that proves no order, and not over? */
static bool foreign_locked(ebb__device *device, uint64_t ticket, unsigned slot) EBB__LOCKED
{
    unsigned its = EBB__TICKET_SLOT(ticket);
    if (!its || (its == slot && atomic_load(&device->streams[its].lasting)))
        return false;
    return device->streams[its].passed < (ticket & EBB__TICKET_EPOCH);
}

static bool order_locked(ebb__device *device, uint64_t ticket, ebb_stream stream) EBB__LOCKED
{
    /* Over meanwhile? Nobody else may ask, and then every hit would be ordered after it. */
    if (ebb__ticket_state_locked(device, ticket) == EBB__PASSED)
        return true;
    ebb__mark *mark = mark_for_locked(device, EBB__TICKET_SLOT(ticket), ticket & EBB__TICKET_EPOCH);
    if (!mark)
        return false;
    CUresult code = device->driver.cuStreamWaitEvent(stream, mark->event, 0);
    if (code != CUDA_SUCCESS) {
        ebb__failed_locked(device, "cuStreamWaitEvent", code);
        return false;
    }
    device->orders++;
    return true;
}

/* A ticket of the page that `slot`'s work is not ordered after by itself; 0: none. */
static uint64_t next_foreign_locked(ebb__device *device, const ebb__page *page,
                                    unsigned slot) EBB__LOCKED
{
    uint64_t ticket = atomic_load(&page->ticket);
    if (foreign_locked(device, ticket, slot))
        return ticket;
    for (const ebb__more *more = page->more; more; more = more->next)
        if (foreign_locked(device, more->ticket, slot))
            return more->ticket;
    return 0;
}

bool ebb__fence_order_locked(ebb__device *device, ebb__page *page, unsigned slot, ebb_stream stream)
{
    uint64_t ticket = next_foreign_locked(device, page, slot);
    if (!ticket) {
        /* What is over must not make the next hit slow again. */
        if (page->more)
            prune_locked(device, page, 0);
        return true;
    }
    /* Nothing outside a capture can be waited for inside it: there the host waits. */
    ebb__capture capture = ebb__stream_ask_locked(device, stream);
    if (capture == EBB__UNTOLD)
        return false;
    if (capture != EBB__NOT_CAPTURING) {
        for (; ticket; ticket = next_foreign_locked(device, page, slot))
            if (!ebb__ticket_wait_locked(device, ticket))
                return false;
        return true;
    }
    ticket = atomic_load(&page->ticket);
    if (foreign_locked(device, ticket, slot) && !order_locked(device, ticket, stream))
        return false;
    for (ebb__more *more = page->more; more; more = more->next)
        if (foreign_locked(device, more->ticket, slot) &&
            !order_locked(device, more->ticket, stream))
            return false;
    prune_locked(device, page, 0);
    return true;
}

void ebb__fence_clear_locked(ebb__device *device, ebb__page *page)
{
    (void)device;
    atomic_store(&page->ticket, 0);
    while (page->more) {
        ebb__more *more = page->more;
        page->more = more->next;
        free(more);
    }
}

bool ebb__stream_drain_locked(ebb__device *device, ebb_stream stream)
{
    ebb__drop(device);
    CUresult code = device->driver.cuStreamSynchronize(stream);
    ebb__retake(device);
    if (code != CUDA_SUCCESS)
        ebb__failed_locked(device, "cuStreamSynchronize", code);
    return code == CUDA_SUCCESS;
}

ebb_status ebb__fence_close_locked(ebb__device *device)
{
    for (unsigned slot = 1; slot < EBB__STREAMS; slot++) {
        ebb__stream *stream = &device->streams[slot];
        for (unsigned i = 0; i < stream->mark_count; i++)
            event_put_locked(device, stream->marks[i].event);
        free(stream->marks);
        stream->marks = NULL;
        stream->mark_count = stream->mark_room = 0;
        stream->used = stream->kept = false;
        stream->passed = 0;
        atomic_store(&stream->handle, NULL);
        atomic_store(&stream->never_captures, false);
        atomic_store(&stream->lasting, false);
        atomic_store(&stream->epoch, 0);
    }
    for (unsigned at = 0; at < EBB__STREAM_HASH; at++)
        atomic_store(&device->stream_hash[at], 0);
    for (; device->event_count; device->event_count--) {
        CUresult code = device->driver.cuEventDestroy(device->events[device->event_count - 1]);
        if (code != CUDA_SUCCESS)
            return ebb__failed_locked(device, "cuEventDestroy", code);
    }
    free(device->events);
    device->events = NULL;
    device->event_room = 0;
    return EBB_OK;
}

ebb_status ebb__stream_keep_locked(ebb__device *device, ebb_stream stream, unsigned promises)
{
    unsigned slot = ebb__stream_get_locked(device, stream);
    if (!slot)
        return EBB_NO_HOST_MEMORY;
    if (slot == EBB__LEGACY_SLOT)
        return EBB_OK;
    if (promises & EBB_NEVER_CAPTURES) {
        ebb__capture capture = ebb__stream_ask_locked(device, stream);
        if (capture == EBB__UNTOLD)
            return ebb__failed_locked(device, "cuStreamIsCapturing", CUDA_ERROR_UNKNOWN);
        if (capture != EBB__NOT_CAPTURING)
            return EBB_BUSY;
    }
    /* What an earlier stream of the same handle did is in no order with this one: see it over. */
    ebb__stream *s = &device->streams[slot];
    uint64_t last = atomic_load(&s->epoch) - 1;
    if (!atomic_load(&s->lasting) && last > s->passed &&
        !ebb__ticket_wait_locked(device, (uint64_t)slot << 48 | last))
        return EBB_DRIVER_FAILED;
    s->kept = true;
    atomic_store(&s->never_captures, (promises & EBB_NEVER_CAPTURES) != 0);
    atomic_store(&s->lasting, true);
    return EBB_OK;
}

void ebb__stream_part_locked(ebb__device *device, ebb_stream stream)
{
    unsigned slot = ebb__stream_find(device, stream);
    if (slot <= EBB__CONTEXT_SLOT)
        return;
    /* A thread without the lock may have read the promise a moment ago, so the slot stays with this
       handle: a stream that gets the handle again is one that made no promise. */
    ebb__stream *s = &device->streams[slot];
    atomic_store(&s->never_captures, false);
    atomic_store(&s->lasting, false);
    pass_locked(device, s, atomic_fetch_add(&s->epoch, 1));
}

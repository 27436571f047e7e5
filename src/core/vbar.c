/*
 * Fault and unpin: the way every weight goes, every time it is used.
 *
 * A hit, and its unpin, take no lock. They change a page's word by compare-and-swap, and look at its
 * ticket afterwards: if any stream but the caller's may still be using the page, the slow way orders
 * the two. What makes that safe:
 *
 *   - A page with a pin cannot leave (pages.c), nor its VBAR be destroyed, so whatever is read after
 *     the pin is of this page and stays so. An old handle is found out by looking at the id again:
 *     once where the pages are known, so that none is touched that is not of the table, and once
 *     where they are pinned, because the table may have become another VBAR's in between.
 *   - The ticket is noted before the pin is taken back: who finds the page unpinned finds the ticket.
 *   - The ticket is read after the pin is made: work that was noted before is seen.
 *
 * Everything else, every miss included, is under the lock.
 */
#include <stdlib.h>

#include "fast.h"
#include "internal.h"

/* Most ranges are of one page. So what hits and unpins do is made twice: inlined, with a count of one,
   which leaves no loops and little to remember; and, for more, out of the way. */
#define INLINED static inline __attribute__((always_inline))
#define APART static __attribute__((noinline))

/* The pages of a range: false if it is none of this VBAR. */
INLINED bool span(const ebb__vbar *vbar, uint64_t offset, uint64_t bytes, uint64_t *first,
                  uint64_t *last)
{
    uint64_t size = atomic_load_explicit(&vbar->bytes, memory_order_acquire);
    if (!bytes || offset > size || bytes > size - offset)
        return false;
    uint64_t large = atomic_load_explicit(&vbar->large_bytes, memory_order_acquire);
    uint64_t end = offset + bytes - 1;
    unsigned shift = vbar->device->small_shift;
    uint64_t large_count = large >> EBB__LARGE_SHIFT;
    *first =
        offset < large ? offset >> EBB__LARGE_SHIFT : large_count + ((offset - large) >> shift);
    *last = end < large ? end >> EBB__LARGE_SHIFT : large_count + ((end - large) >> shift);
    return true;
}

/* ---- without the lock ------------------------------------------------------------------------- */

/*
 * The slot of a page's last use, if that was on this stream, the stream is one that lasts, and no
 * other stream's unfinished use is known; else 0. From the page to the stream, not the other way
 * round: that is one load instead of a search.
 */
static unsigned own(ebb__device *device, uint64_t ticket, ebb_stream stream)
{
    unsigned slot = EBB__TICKET_SLOT(ticket);
    const ebb__stream *s = &device->streams[slot];
    /* A lasting stream keeps its slot. Before that the slot may have been another's: so in this order. */
    if (!slot || ticket & EBB__TICKET_MORE ||
        !atomic_load_explicit(&s->lasting, memory_order_acquire) ||
        atomic_load_explicit(&s->handle, memory_order_relaxed) != ebb__stream_plain(stream))
        return 0;
    return slot;
}

static bool pin(ebb__page *page, uint64_t more)
{
    uint64_t word = atomic_load_explicit(&page->word, memory_order_relaxed);
    do {
        if (EBB__STATE(word) != EBB__RESIDENT || (word & EBB__PINS) == EBB__PINS)
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&page->word, &word, word + more,
                                                    memory_order_acquire, memory_order_relaxed));
    return true;
}

/* Take a pin back: false if there is none, or if it is the last of a NOTED page. */
static bool unpin(ebb__page *page)
{
    uint64_t word = atomic_load_explicit(&page->word, memory_order_relaxed);
    do {
        uint64_t pins = word & EBB__PINS;
        if (!pins || (pins == EBB__PIN && word & EBB__NOTED))
            return false;
    } while (!atomic_compare_exchange_weak_explicit(&page->word, &word, word - EBB__PIN,
                                                    memory_order_release, memory_order_relaxed));
    return true;
}

/* Whose table this is now: a pin through an old handle may have been of another VBAR's page. */
static ebb__vbar *owner_locked(ebb__vbar *vbar, const ebb__page *pages) EBB__LOCKED
{
    const ebb__device *device = vbar->device;
    for (uint32_t i = 0; atomic_load(&vbar->pages) != pages && i < device->vbar_high; i++) {
        ebb__vbar *other = ebb__vbar_number(device, i);
        if (atomic_load(&other->id) && atomic_load(&other->pages) == pages)
            return other;
    }
    return vbar;
}

APART void unpin_slowly(ebb__vbar *vbar, ebb__page *pages, uint64_t page)
{
    ebb__scope scope;
    ebb__enter(vbar->device, &scope);
    ebb__page_unpin_locked(owner_locked(vbar, pages), page);
    ebb__leave(vbar->device, &scope);
}

/* Take pins back, and the hit that was counted with the first. */
APART void take_hit_back(ebb__vbar *vbar, ebb__page *pages, uint64_t first, uint64_t count)
{
    atomic_fetch_sub(&pages[first].word, EBB__HIT);
    for (uint64_t page = first; page < first + count; page++)
        if (!unpin(&pages[page]))
            unpin_slowly(vbar, pages, page);
}

/* The pages of a range of the VBAR that a handle names: NULL if it is gone, or has no such range. */
INLINED ebb__page *look(const ebb__vbar *vbar, ebb_vbar handle, uint64_t offset, uint64_t bytes,
                        uint64_t *first, uint64_t *last)
{
    if (!span(vbar, offset, bytes, first, last))
        return NULL;
    ebb__page *pages = atomic_load_explicit(&vbar->pages, memory_order_acquire);
    /* Read last: if the id is still the handle's, so is all that was read before it. */
    return atomic_load(&vbar->id) == handle.id ? pages : NULL;
}

/* Pin `count` pages from `first` on, if all are there and this stream's. Their signature; 0: it is
   not so. */
INLINED uint64_t hit_pages(ebb__vbar *vbar, ebb_vbar handle, ebb__page *pages, uint64_t first,
                           uint64_t count, ebb_stream stream)
{
    ebb__device *device = vbar->device;
    uint64_t signature = 0, done = 0; /* pinned so far */
    bool whole = true;
    while (whole && done < count) {
        ebb__page *page = &pages[first + done];
        /* The hit is counted on the first page, in the same swap. */
        whole = pin(page, done ? EBB__PIN : EBB__PIN + EBB__HIT);
        if (!whole)
            break;
        done++;
        uint64_t its = atomic_load_explicit(&page->generation, memory_order_relaxed);
        signature = its > signature ? its : signature;
        whole = own(device, atomic_load(&page->ticket), stream) != 0;
    }
    if (whole && atomic_load(&vbar->id) == handle.id)
        return signature;
    if (done)
        take_hit_back(vbar, pages, first, done);
    return 0;
}

/* A compare-and-swap waits for its line of memory, and what comes after waits for it: so all lines are
   asked for first. */
static void ask_for(const ebb__page *pages, uint64_t first, uint64_t last)
{
    for (uint64_t page = first; page <= last; page++)
        __builtin_prefetch(&pages[page], 1);
}

APART uint64_t hit_many(ebb__vbar *vbar, ebb_vbar handle, ebb__page *pages, uint64_t first,
                        uint64_t last, ebb_stream stream)
{
    ask_for(pages, first, last);
    return hit_pages(vbar, handle, pages, first, last - first + 1, stream);
}

/* The same of a range. */
INLINED uint64_t hit(ebb__vbar *vbar, ebb_vbar handle, uint64_t offset, uint64_t bytes,
                     ebb_stream stream)
{
    uint64_t first, last;
    ebb__page *pages = look(vbar, handle, offset, bytes, &first, &last);
    if (!pages)
        return 0;
    return first == last ? hit_pages(vbar, handle, pages, first, 1, stream)
                         : hit_many(vbar, handle, pages, first, last, stream);
}

/* Note a stream's epoch on a page whose last user it is: false if it is not any more. */
static bool note(ebb__page *page, const ebb__stream *stream, unsigned slot)
{
    uint64_t ticket = atomic_load(&page->ticket);
    uint64_t epoch = atomic_load(&stream->epoch);
    while (EBB__TICKET_SLOT(ticket) == slot) {
        if ((ticket & EBB__TICKET_EPOCH) >= epoch)
            return true;
        uint64_t now = (ticket & ~EBB__TICKET_EPOCH) | epoch;
        if (atomic_compare_exchange_weak(&page->ticket, &ticket, now))
            return true;
    }
    return false;
}

/* Whether a page has a pin that can be taken back without the lock. */
static bool loose(ebb__page *page)
{
    uint64_t word = atomic_load_explicit(&page->word, memory_order_relaxed);
    return word & EBB__PINS && !(word & EBB__NOTED);
}

/* Unpin `count` pages from `first` on, on the stream that used them last. false: nothing was done. */
INLINED bool part_pages(ebb__vbar *vbar, ebb__page *pages, uint64_t first, uint64_t count,
                        ebb_stream stream)
{
    ebb__device *device = vbar->device;
    unsigned slot = own(device, atomic_load(&pages[first].ticket) & ~EBB__TICKET_MORE, stream);
    if (!slot)
        return false;
    for (uint64_t i = 0; i < count; i++)
        if (!loose(&pages[first + i]))
            return false;
    /* Pinned, so the device is open and the driver there to be asked, which is half of what a hit
       costs. */
    ebb__stream *s = &device->streams[slot];
    if (!atomic_load_explicit(&s->never_captures, memory_order_relaxed) &&
        ebb__stream_capture(device, stream) != EBB__NOT_CAPTURING)
        return false;
    for (uint64_t i = 0; i < count; i++)
        if (!note(&pages[first + i], s, slot))
            return false;
    for (uint64_t i = 0; i < count; i++)
        if (!unpin(&pages[first + i]))
            unpin_slowly(vbar, pages, first + i);
    /* Roughly: two threads may count one. */
    unsigned unpins = atomic_load_explicit(&s->unpins, memory_order_relaxed) + 1;
    atomic_store_explicit(&s->unpins, unpins, memory_order_relaxed);
    if (unpins >= EBB__UNPINS_A_MARK)
        ebb__mark_in_passing(device, slot);
    return true;
}

APART bool part_many(ebb__vbar *vbar, ebb__page *pages, uint64_t first, uint64_t last,
                     ebb_stream stream)
{
    ask_for(pages, first, last);
    return part_pages(vbar, pages, first, last - first + 1, stream);
}

/* The same of a range. */
INLINED bool part(ebb__vbar *vbar, ebb_vbar handle, uint64_t offset, uint64_t bytes,
                  ebb_stream stream)
{
    uint64_t first = 0, last = 0;
    ebb__page *pages = look(vbar, handle, offset, bytes, &first, &last);
    if (!pages)
        return false;
    return first == last ? part_pages(vbar, pages, first, 1, stream)
                         : part_many(vbar, pages, first, last, stream);
}

/* ---- under the lock --------------------------------------------------------------------------- */

/* The pages of all ranges of a call, one after another: `at` counts them. */
typedef struct walk {
    ebb__vbar *vbar;
    const ebb_range *ranges;
    size_t count;
    size_t range;
    uint64_t page, last;
    size_t at;
} walk;

static void walk_begin(walk *w, ebb__vbar *vbar, const ebb_range *ranges, size_t count)
{
    *w = (walk){.vbar = vbar, .ranges = ranges, .count = count};
    span(vbar, ranges[0].offset, ranges[0].bytes, &w->page, &w->last);
}

static bool walk_more(const walk *w)
{
    return w->range < w->count;
}

static void walk_next(walk *w)
{
    w->at++;
    if (w->page++ < w->last || ++w->range == w->count)
        return;
    span(w->vbar, w->ranges[w->range].offset, w->ranges[w->range].bytes, &w->page, &w->last);
}

static ebb__page *walk_page(const walk *w)
{
    return &atomic_load_explicit(&w->vbar->pages, memory_order_relaxed)[w->page];
}

/* What a fault under the lock works with. */
typedef struct call {
    ebb__vbar *vbar;
    const ebb_range *ranges;
    size_t count;
    ebb_stream stream;
    size_t pages; /* of all ranges together */
    bool *pinned; /* of each, whether this call has pinned it */
} call;

static void unpin_all_locked(call *c) EBB__LOCKED
{
    walk w;
    for (walk_begin(&w, c->vbar, c->ranges, c->count); walk_more(&w); walk_next(&w)) {
        if (c->pinned[w.at])
            ebb__page_unpin_locked(c->vbar, w.page);
        c->pinned[w.at] = false;
    }
}

/* Bytes of pages without a frame from page `from` to before `end`. */
static uint64_t absent_locked(const ebb__vbar *vbar, uint64_t from, uint64_t end) EBB__LOCKED
{
    uint64_t bytes = ebb__page_offset_locked(vbar, end) - ebb__page_offset_locked(vbar, from);
    for (uint64_t page = end;
         (page = ebb__bits_last(&vbar->resident, page)) != EBB__NONE && page >= from;)
        bytes -= vbar->device->frame_bytes[ebb__page_kind_locked(vbar, page)];
    return bytes;
}

/*
 * Let the watermark rise over `page`, if it is to rise by itself and there is room to spare: for
 * `bytes`, and for every page over which it rises.
 */
static bool rise_locked(ebb__vbar *vbar, uint64_t page, uint64_t bytes) EBB__LOCKED
{
    ebb__device *device = vbar->device;
    if (!vbar->rise || page >= vbar->watermark_limit)
        return false;
    bytes += absent_locked(vbar, vbar->watermark, page + 1);
    uint64_t spare = 0;
    for (int kind = 0; kind < EBB__KINDS; kind++)
        spare += device->frame_count[EBB__OF_NOBODY][kind] * device->frame_bytes[kind];
    uint64_t quiet = device->faults - vbar->quiet_since;
    uint64_t limit = device->limit < device->total ? device->limit : device->total;
    /* The driver is asked only if the rest of the answer could be yes. */
    if (!ebb__policy_may_rise(bytes, UINT64_MAX, limit, quiet, vbar->setbacks))
        return false;
    /* A segment that PyTorch has freed, and that nobody works on any more, is as good as free. */
    const ebb__holder *segments = &device->holders[EBB__SEGMENT_HOLDER];
    ebb__request nothing = {.may_wait = false};
    ebb__candidate freed;
    if (segments->best && segments->best(device, &nothing, &freed) && !freed.cost)
        spare += freed.bytes;
    if (!ebb__policy_may_rise(bytes, spare + ebb__frames_room_locked(device), limit, quiet,
                              vbar->setbacks))
        return false;
    vbar->watermark = page + 1;
    vbar->risen = true;
    return true;
}

/*
 * Pin every page that is there, and count the frames that the others need. EBB_OFFLOADED: one of
 * them is not to be loaded. EBB_BUSY: one is being saved; ask again when that is over.
 */
static ebb_status survey_locked(call *c, ebb__request *request) EBB__LOCKED
{
    ebb__vbar *vbar = c->vbar;
    uint64_t stamp = ++vbar->device->departures, needed = 0;
    walk w;
    for (walk_begin(&w, vbar, c->ranges, c->count); walk_more(&w); walk_next(&w)) {
        if (ebb__page_pin_locked(vbar, w.page)) {
            c->pinned[w.at] = true;
            continue;
        }
        uint64_t word = atomic_load(&walk_page(&w)->word);
        if (word & EBB__SAVING)
            return EBB_BUSY;
        if (EBB__STATE(word) != EBB__ABSENT)
            return EBB_OFFLOADED; /* poisoned, or pinned beyond counting */
        if (w.page >= vbar->watermark && !rise_locked(vbar, w.page, needed))
            return EBB_OFFLOADED;
        if (w.page + 1 > request->above)
            request->above = w.page + 1;
        /* A page that two ranges share needs one frame: an absent page has no departure to keep. */
        if (walk_page(&w)->departure == stamp)
            continue;
        walk_page(&w)->departure = stamp;
        ebb__kind kind = ebb__page_kind_locked(vbar, w.page);
        request->need[kind]++;
        needed += vbar->device->frame_bytes[kind];
    }
    return EBB_OK;
}

/* Put the frames in hand behind the pages that are still absent; pin the rest, if they have come. */
static ebb_status load_locked(call *c, ebb__request *request) EBB__LOCKED
{
    ebb__device *device = c->vbar->device;
    ebb_status status = EBB_OK;
    walk w;
    for (walk_begin(&w, c->vbar, c->ranges, c->count); walk_more(&w) && status == EBB_OK;
         walk_next(&w)) {
        if (c->pinned[w.at])
            continue;
        if (ebb__page_pin_locked(c->vbar, w.page)) {
            c->pinned[w.at] = true;
            continue;
        }
        ebb__kind kind = ebb__page_kind_locked(c->vbar, w.page);
        ebb__frame *frame = request->hand[kind];
        if (EBB__STATE(atomic_load(&walk_page(&w)->word)) != EBB__ABSENT || !frame) {
            status = EBB_OFFLOADED;
            break;
        }
        request->hand[kind] = frame->next;
        status = ebb__page_load_locked(c->vbar, w.page, frame);
        c->pinned[w.at] = status == EBB_OK;
    }
    for (int kind = 0; kind < EBB__KINDS; kind++) {
        while (request->hand[kind]) {
            ebb__frame *frame = request->hand[kind];
            request->hand[kind] = frame->next;
            ebb__frame_put_locked(device, frame);
        }
    }
    return status;
}

/* Order the stream after every other stream's use of the pages. */
static bool order_locked(call *c) EBB__LOCKED
{
    ebb__device *device = c->vbar->device;
    unsigned slot = ebb__stream_get_locked(device, c->stream);
    walk w;
    for (walk_begin(&w, c->vbar, c->ranges, c->count); walk_more(&w); walk_next(&w))
        if (!ebb__fence_order_locked(device, walk_page(&w), slot, c->stream))
            return false;
    return true;
}

static void sign_locked(const call *c, uint64_t *signatures) EBB__LOCKED
{
    for (size_t i = 0; i < c->count; i++)
        signatures[i] = 0;
    walk w;
    for (walk_begin(&w, c->vbar, c->ranges, c->count); walk_more(&w); walk_next(&w)) {
        uint64_t its = atomic_load(&walk_page(&w)->generation);
        if (its > signatures[w.range])
            signatures[w.range] = its;
    }
}

static ebb_status fault_locked(call *c, uint64_t *signatures) EBB__LOCKED
{
    ebb__vbar *vbar = c->vbar;
    ebb__device *device = vbar->device;
    ebb_status status;
    ebb__request request;
    device->faults++;
    for (;;) {
        request = (ebb__request){
            .rank = vbar->rank, .reason = EBB_FOR_WEIGHT, .may_wait = true, .may_call = true};
        status = survey_locked(c, &request);
        if (status != EBB_BUSY)
            break;
        unpin_all_locked(c);
        if (ebb__page_saver_locked(device))
            break; /* a page-out function itself: it may be waiting for another, and so on, in a circle */
        ebb__await(device);
    }
    bool missing = request.need[EBB__LARGE] + request.need[EBB__SMALL] > 0;
    if (status == EBB_OK && missing) {
        if (ebb__room_make_locked(device, &request))
            status = load_locked(c, &request);
        else
            status = EBB_OFFLOADED;
    }
    if (status == EBB_OK && !order_locked(c))
        status = EBB_OFFLOADED;
    if (status == EBB_OK) {
        sign_locked(c, signatures);
        vbar->hits += missing ? 0 : c->count;
        vbar->misses += missing ? c->count : 0;
    } else {
        unpin_all_locked(c);
        vbar->offloaded += status == EBB_OFFLOADED ? c->count : 0;
    }
    return status;
}

/* How many pages the ranges have in all: 0 if one of them is none of this VBAR. */
static size_t count_pages(const ebb__vbar *vbar, const ebb_range *ranges, size_t count)
{
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t first, last;
        if (!span(vbar, ranges[i].offset, ranges[i].bytes, &first, &last))
            return 0;
        sum += (size_t)(last - first + 1);
    }
    return sum;
}

APART ebb_status fault_slow(ebb_vbar handle, const ebb_range *ranges, size_t count,
                            ebb_stream stream, uint64_t *signatures)
{
    ebb__vbar *vbar = ebb__vbar_find(handle);
    if (!vbar)
        return ebb__vbar_missing(handle);
    call c = {.vbar = vbar, .ranges = ranges, .count = count, .stream = stream};
    c.pages = count_pages(vbar, ranges, count);
    if (!c.pages)
        return atomic_load(&vbar->id) == handle.id ? EBB_INVALID : ebb__vbar_missing(handle);
    bool few[256] = {false};
    c.pinned = c.pages <= sizeof few ? few : calloc(c.pages, sizeof *c.pinned);
    if (!c.pinned)
        return EBB_NO_HOST_MEMORY;

    ebb__scope scope;
    ebb__enter(vbar->device, &scope);
    /* The handle may have become another's between the look and the lock. */
    ebb_status status = EBB_GONE;
    bool there = atomic_load(&vbar->id) == handle.id;
    if (there && !scope.ready) {
        status = EBB_DRIVER_FAILED;
    } else if (there && count_pages(vbar, ranges, count) == c.pages) {
        vbar->busy++;
        status = fault_locked(&c, signatures);
        vbar->busy--;
    }
    ebb__leave(vbar->device, &scope);
    if (c.pinned != few)
        free(c.pinned);
    return status;
}

INLINED uint64_t find_and_hit(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    ebb__vbar *vbar = ebb__vbar_place(handle);
    return vbar ? hit(vbar, handle, offset, bytes, stream) : 0;
}

uint64_t ebb__vbar_hit(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    return find_and_hit(handle, offset, bytes, stream);
}

uint64_t ebb__vbar_peek(ebb_vbar handle, uint64_t offset, uint64_t bytes)
{
    const ebb__vbar *vbar = ebb__vbar_find(handle);
    uint64_t first, last, signature = 0;
    ebb__page *pages = vbar ? look(vbar, handle, offset, bytes, &first, &last) : NULL;
    if (!pages)
        return 0;
    for (uint64_t page = first; page <= last; page++) {
        /* The state first: a page that has gone and come back meanwhile has another generation. */
        if (EBB__STATE(atomic_load(&pages[page].word)) != EBB__RESIDENT)
            return 0;
        uint64_t its = atomic_load(&pages[page].generation);
        signature = its > signature ? its : signature;
    }
    return atomic_load(&vbar->id) == handle.id ? signature : 0;
}

ebb_status ebb_vbar_fault(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream,
                          uint64_t *signature)
{
    if (!signature)
        return EBB_INVALID;
    uint64_t found = find_and_hit(handle, offset, bytes, stream);
    if (found) {
        *signature = found;
        return EBB_OK;
    }
    ebb_range range = {offset, bytes};
    return fault_slow(handle, &range, 1, stream, signature);
}

ebb_status ebb_vbar_fault_many(ebb_vbar handle, const ebb_range *ranges, size_t count,
                               ebb_stream stream, uint64_t *signatures)
{
    if (!ranges || !count || !signatures)
        return EBB_INVALID;
    ebb__vbar *vbar = ebb__vbar_find(handle);
    size_t done = 0;
    while (vbar && done < count) {
        signatures[done] = hit(vbar, handle, ranges[done].offset, ranges[done].bytes, stream);
        if (!signatures[done])
            break;
        done++;
    }
    if (done == count)
        return EBB_OK;
    /* Not all: what was pinned is taken back, and the whole is asked for at once. */
    for (size_t i = 0; i < done; i++) {
        uint64_t first = 0, last = 0; /* pinned, so there is such a range */
        span(vbar, ranges[i].offset, ranges[i].bytes, &first, &last);
        ebb__page *pages = atomic_load(&vbar->pages);
        take_hit_back(vbar, pages, first, last - first + 1);
    }
    return fault_slow(handle, ranges, count, stream, signatures);
}

/* ---- the end of a use ------------------------------------------------------------------------- */

static bool all_pinned(ebb__vbar *vbar, const ebb_range *ranges, size_t count)
{
    walk w;
    for (walk_begin(&w, vbar, ranges, count); walk_more(&w); walk_next(&w))
        if (!(atomic_load(&walk_page(&w)->word) & EBB__PINS))
            return false;
    return true;
}

/* Has every page a pin for each time that it is named? For ranges in rising order: no, of others. */
static bool all_pinned_enough(ebb__vbar *vbar, ebb_vbar handle, const ebb_range *ranges,
                              size_t count)
{
    uint64_t first, last, before = 0, times = 0;
    for (size_t i = 0; i < count; i++) {
        ebb__page *pages = look(vbar, handle, ranges[i].offset, ranges[i].bytes, &first, &last);
        if (!pages || (i && first < before))
            return false;
        for (uint64_t page = first; page <= last; page++) {
            times = i && page == before ? times + 1 : 1;
            if ((atomic_load(&pages[page].word) & EBB__PINS) < times * EBB__PIN)
                return false;
            before = page;
        }
    }
    return true;
}

/* Take back a pin for each time that a page is named; if one has too few, none. */
static ebb_status unpin_ranges_locked(ebb__vbar *vbar, const ebb_range *ranges,
                                      size_t count) EBB__LOCKED
{
    walk w, again;
    for (walk_begin(&w, vbar, ranges, count); walk_more(&w); walk_next(&w)) {
        if (ebb__page_unpin_locked(vbar, w.page))
            continue;
        for (walk_begin(&again, vbar, ranges, count); again.at < w.at; walk_next(&again))
            ebb__page_pin_locked(vbar, again.page);
        return EBB_NOT_PINNED;
    }
    return EBB_OK;
}

/*
 * Note the stream's work on the pages: as a ticket, with a mark at once if the stream may not last;
 * for as long as a graph may run, if it is capturing. Pages are pinned. The lock may be dropped.
 * EBB_DRIVER_FAILED: it cannot be known when that work is over, so the pins must stay.
 */
static ebb_status note_all_locked(ebb__vbar *vbar, const ebb_range *ranges, size_t count,
                                  ebb_stream stream) EBB__LOCKED
{
    ebb__device *device = vbar->device;
    ebb__capture capture = ebb__stream_ask_locked(device, stream);
    if (capture == EBB__UNTOLD)
        return ebb__failed_locked(device, "cuStreamIsCapturing", CUDA_ERROR_UNKNOWN);
    unsigned slot = capture == EBB__CAPTURING ? 0 : ebb__stream_get_locked(device, stream);
    /* More streams than can be told apart: see this one over, then there is nothing to note. */
    if (!slot && capture != EBB__CAPTURING)
        return ebb__stream_drain_locked(device, stream) ? EBB_OK : EBB_DRIVER_FAILED;
    walk w;
    for (walk_begin(&w, vbar, ranges, count); walk_more(&w); walk_next(&w))
        if (!slot || !ebb__fence_note_locked(device, walk_page(&w), slot))
            ebb__page_hold_locked(vbar, w.page);
    if (slot && !ebb__fence_seal_locked(device, slot))
        return EBB_DRIVER_FAILED;
    return EBB_OK;
}

APART ebb_status end_slow(ebb_vbar handle, const ebb_range *ranges, size_t count, ebb_stream stream,
                          bool unpins)
{
    ebb__vbar *vbar = ebb__vbar_find(handle);
    if (!vbar)
        return ebb__vbar_missing(handle);
    ebb__device *device = vbar->device;
    ebb__scope scope;
    ebb__enter(device, &scope);
    ebb_status status = EBB_OK;
    if (atomic_load(&vbar->id) != handle.id)
        status = EBB_GONE;
    else if (!scope.ready)
        status = EBB_DRIVER_FAILED;
    else if (!count_pages(vbar, ranges, count))
        status = EBB_INVALID;
    else if (!all_pinned(vbar, ranges, count))
        status = EBB_NOT_PINNED;
    if (status == EBB_OK) {
        vbar->busy++;
        status = note_all_locked(vbar, ranges, count, stream);
        vbar->busy--;
        if (unpins && status == EBB_OK)
            status = unpin_ranges_locked(vbar, ranges, count);
        /* A limit that was lowered below what was pinned takes its due as pins go. */
        if (ebb__frames_held_locked(device) > device->limit)
            ebb__room_shrink_locked(device, device->limit, EBB_FOR_LIMIT, false, false);
    }
    ebb__leave(device, &scope);
    return status;
}

INLINED bool find_and_part(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    ebb__vbar *vbar = ebb__vbar_place(handle);
    return vbar && part(vbar, handle, offset, bytes, stream);
}

bool ebb__vbar_part(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    return find_and_part(handle, offset, bytes, stream);
}

ebb_status ebb_vbar_unpin(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    if (find_and_part(handle, offset, bytes, stream))
        return EBB_OK;
    ebb_range range = {offset, bytes};
    return end_slow(handle, &range, 1, stream, true);
}

ebb_status ebb_vbar_unpin_many(ebb_vbar handle, const ebb_range *ranges, size_t count,
                               ebb_stream stream)
{
    if (!ranges || !count)
        return EBB_INVALID;
    ebb__vbar *vbar = ebb__vbar_find(handle);
    if (!vbar)
        return ebb__vbar_missing(handle);
    /* One by one without the lock only if none can turn out to lack a pin half-way. */
    bool enough = all_pinned_enough(vbar, handle, ranges, count);
    size_t done = 0;
    while (enough && done < count &&
           part(vbar, handle, ranges[done].offset, ranges[done].bytes, stream))
        done++;
    if (done == count)
        return EBB_OK;
    return end_slow(handle, ranges + done, count - done, stream, true);
}

ebb_status ebb_vbar_filled(ebb_vbar handle, uint64_t offset, uint64_t bytes, ebb_stream stream)
{
    ebb_range range = {offset, bytes};
    return end_slow(handle, &range, 1, stream, false);
}

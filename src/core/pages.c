/*
 * Pages: their states, and how one is given up.
 *
 * A page's word says who may do what with it, and is changed by compare-and-swap, because a hit and
 * its unpin take no lock (vbar.c). Everything else about a page changes under the lock: its frame,
 * and whether it is in the sets `resident` and `evictable`. The swap from RESIDENT to LEAVING is the
 * moment in which the two meet: it fails if there is a pin, and after it nobody can pin without the
 * lock.
 */
#include "internal.h"

uint64_t ebb__page_at_locked(const ebb__vbar *vbar, uint64_t offset)
{
    uint64_t large = vbar->large_count << EBB__LARGE_SHIFT;
    if (offset < large)
        return offset >> EBB__LARGE_SHIFT;
    return vbar->large_count + ((offset - large) >> vbar->device->small_shift);
}

uint64_t ebb__page_offset_locked(const ebb__vbar *vbar, uint64_t page)
{
    if (page <= vbar->large_count)
        return page << EBB__LARGE_SHIFT;
    return (vbar->large_count << EBB__LARGE_SHIFT) +
           ((page - vbar->large_count) << vbar->device->small_shift);
}

ebb__kind ebb__page_kind_locked(const ebb__vbar *vbar, uint64_t page)
{
    return page < vbar->large_count ? EBB__LARGE : EBB__SMALL;
}

static ebb__page *page_of(const ebb__vbar *vbar, uint64_t page)
{
    return &atomic_load_explicit(&vbar->pages, memory_order_relaxed)[page];
}

/* In and out of the set of those that may be given up; the VBAR is in the order while it has any. */
static void offer_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED
{
    if (!vbar->evictable.members)
        ebb__order_add(&vbar->device->order, vbar);
    ebb__bits_add(&vbar->evictable, page);
}

static void withdraw_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED
{
    if (!ebb__bits_has(&vbar->evictable, page))
        return;
    ebb__bits_remove(&vbar->evictable, page);
    if (!vbar->evictable.members)
        ebb__order_remove(&vbar->device->order, vbar);
}

/* ---- pins ------------------------------------------------------------------------------------ */

bool ebb__page_pin_locked(ebb__vbar *vbar, uint64_t page)
{
    ebb__page *p = page_of(vbar, page);
    uint64_t word = atomic_load(&p->word), pinned;
    do {
        ebb__state state = EBB__STATE(word);
        if ((state != EBB__RESIDENT && state != EBB__LEAVING) || word & EBB__SAVING ||
            (word & EBB__PINS) == EBB__PINS)
            return false;
        pinned = (word & ~UINT64_C(7)) + EBB__RESIDENT + EBB__PIN;
    } while (!atomic_compare_exchange_weak(&p->word, &word, pinned));
    if (EBB__STATE(word) == EBB__LEAVING)
        offer_locked(vbar, page); /* taken back */
    return true;
}

bool ebb__page_unpin_locked(ebb__vbar *vbar, uint64_t page)
{
    ebb__page *p = page_of(vbar, page);
    uint64_t word = atomic_load(&p->word), without;
    bool last;
    do {
        if (!(word & EBB__PINS))
            return false;
        without = word - EBB__PIN;
        last = !(without & EBB__PINS);
        if (last)
            without &= ~EBB__NOTED;
    } while (!atomic_compare_exchange_weak(&p->word, &word, without));
    if (last && word & EBB__NOTED && !(word & EBB__HELD))
        offer_locked(vbar, page);
    return true;
}

void ebb__page_hold_locked(ebb__vbar *vbar, uint64_t page)
{
    atomic_fetch_or(&page_of(vbar, page)->word, EBB__HELD);
    withdraw_locked(vbar, page);
}

void ebb__page_release_locked(ebb__vbar *vbar, uint64_t page)
{
    uint64_t word = atomic_fetch_and(&page_of(vbar, page)->word, ~EBB__HELD);
    if (word & EBB__HELD && EBB__STATE(word) == EBB__RESIDENT && !(word & EBB__NOTED))
        offer_locked(vbar, page);
}

/* ---- coming and going ------------------------------------------------------------------------- */

ebb_status ebb__page_load_locked(ebb__vbar *vbar, uint64_t page, ebb__frame *frame)
{
    ebb__device *device = vbar->device;
    ebb__page *p = page_of(vbar, page);
    bool stuck;
    ebb_status status = ebb__frame_map_locked(
        device, frame, vbar->base + ebb__page_offset_locked(vbar, page), &stuck);
    if (status != EBB_OK && !stuck) {
        ebb__frame_put_locked(device, frame);
        return status;
    }
    p->frame = frame;
    ebb__bits_add(&vbar->resident, page);
    if (stuck) {
        /* Mapped, without access, and the driver will not unmap it: nobody may use it. */
        ebb__frame_own_locked(device, frame, EBB__OF_POISON);
        atomic_store(&p->word, EBB__POISONED);
        return status;
    }
    ebb__frame_own_locked(device, frame, EBB__OF_VBAR);
    atomic_store(&p->generation, ++device->generation);
    offer_locked(vbar, page);
    vbar->loads++;
    atomic_store(&p->word, EBB__RESIDENT + EBB__PIN);
    return EBB_OK;
}

bool ebb__page_leave_locked(ebb__vbar *vbar, uint64_t page)
{
    ebb__page *p = page_of(vbar, page);
    uint64_t word = atomic_load(&p->word), changed;
    do {
        if (EBB__STATE(word) != EBB__RESIDENT || word & EBB__HELD)
            return false;
        /* In use: remember that, so that nobody looks here again until the last unpin. */
        changed = word & EBB__PINS ? word | EBB__NOTED : (word & ~(EBB__NOTED | 7)) + EBB__LEAVING;
    } while (!atomic_compare_exchange_weak(&p->word, &word, changed));
    withdraw_locked(vbar, page);
    if (EBB__STATE(changed) != EBB__LEAVING)
        return false;
    p->departure = ++vbar->device->departures;
    return true;
}

void ebb__page_back_locked(ebb__vbar *vbar, uint64_t page)
{
    ebb__page *p = page_of(vbar, page);
    uint64_t word = atomic_load(&p->word), changed;
    do {
        if (EBB__STATE(word) != EBB__LEAVING)
            return;
        changed = (word & ~(EBB__SAVING | 7)) + EBB__RESIDENT;
    } while (!atomic_compare_exchange_weak(&p->word, &word, changed));
    offer_locked(vbar, page);
}

ebb_status ebb__page_drop_locked(ebb__vbar *vbar, uint64_t page)
{
    ebb__device *device = vbar->device;
    ebb__page *p = page_of(vbar, page);
    ebb_status status =
        ebb__frame_unmap_locked(device, p->frame, vbar->base + ebb__page_offset_locked(vbar, page));
    uint64_t word = atomic_load(&p->word);
    vbar->hits += EBB__HITS(word);
    if (status != EBB_OK) {
        ebb__frame_own_locked(device, p->frame, EBB__OF_POISON);
        atomic_store(&p->word, EBB__POISONED);
        return status;
    }
    ebb__frame_put_locked(device, p->frame);
    p->frame = NULL;
    ebb__fence_clear_locked(device, p);
    ebb__bits_remove(&vbar->resident, page);
    atomic_store(&p->word, EBB__ABSENT);
    return EBB_OK;
}

/* Still the same departure, not taken back meanwhile? Taken back, the VBAR may be another by now. */
static bool leaving_locked(const ebb__vbar *vbar, uint64_t page, uint64_t departure) EBB__LOCKED
{
    const ebb__page *p = page_of(vbar, page);
    return page < vbar->page_count && EBB__STATE(atomic_load(&p->word)) == EBB__LEAVING &&
           p->departure == departure;
}

/* Have a page's contents saved, without the lock. The fault that wants it back waits meanwhile. */
static bool save_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED
{
    ebb__device *device = vbar->device;
    ebb__page *p = page_of(vbar, page);
    uint64_t offset = ebb__page_offset_locked(vbar, page);
    uint64_t bytes = device->frame_bytes[ebb__page_kind_locked(vbar, page)];
    ebb_page_out page_out = vbar->page_out;
    void *user = vbar->user;
    atomic_fetch_or(&p->word, EBB__SAVING);
    device->page_outs++;
    ebb__saver self = {.next = device->savers, .thread = ebb__os_thread()};
    device->savers = &self;
    ebb__drop(device);
    int refused = page_out(user, offset, bytes);
    ebb__retake(device);
    ebb__saver **at = &device->savers;
    while (*at != &self)
        at = &(*at)->next;
    *at = self.next;
    atomic_fetch_and(&p->word, ~EBB__SAVING);
    ebb__os_wake_all(&device->changed);
    return refused == 0;
}

bool ebb__page_saver_locked(const ebb__device *device)
{
    uint64_t thread = ebb__os_thread();
    for (const ebb__saver *saver = device->savers; saver; saver = saver->next)
        if (saver->thread == thread)
            return true;
    return false;
}

bool ebb__page_settle_locked(ebb__vbar *vbar, uint64_t page, uint64_t departure, bool save)
{
    ebb__device *device = vbar->device;
    if (!leaving_locked(vbar, page, departure))
        return false;
    vbar->busy++;
    bool may_go = ebb__fence_wait_locked(device, page_of(vbar, page)) &&
                  leaving_locked(vbar, page, departure);
    if (may_go && save && vbar->page_out)
        may_go = save_locked(vbar, page) && leaving_locked(vbar, page, departure);
    if (!may_go && leaving_locked(vbar, page, departure))
        ebb__page_back_locked(vbar, page);
    vbar->busy--;
    return may_go;
}

bool ebb__page_evict_locked(ebb__vbar *vbar, uint64_t page, ebb_reason reason)
{
    if (ebb__page_drop_locked(vbar, page) != EBB_OK)
        return false;
    if (page < vbar->watermark)
        vbar->watermark = page;
    vbar->evictions[reason]++;
    vbar->setbacks += vbar->risen;
    vbar->risen = false;
    vbar->quiet_since = vbar->device->faults;
    return true;
}

/* ---- VBARs as holders of frames ---------------------------------------------------------------- */

/*
 * From the least important VBAR up, in each from the top page down. Pages that turn out to be in use
 * leave the set as they are met, so that each is met once; VBARs that may not be asked now, and
 * fences that cannot be known now, are passed over.
 */
static bool best(ebb__device *device, const ebb__request *request,
                 ebb__candidate *candidate) EBB__LOCKED
{
    ebb__vbar *next;
    for (ebb__vbar *vbar = ebb__order_first(device->order); vbar; vbar = next) {
        next = ebb__order_next(vbar);
        if (vbar->rank > request->rank)
            return false;
        if (vbar->page_out && !request->may_call)
            continue;
        uint64_t floor = vbar->rank == request->rank ? request->above : 0;
        for (uint64_t page = ebb__bits_last(&vbar->evictable, EBB__NONE);
             page != EBB__NONE && page >= floor; page = ebb__bits_last(&vbar->evictable, page)) {
            ebb__page *p = page_of(vbar, page);
            if (atomic_load(&p->word) & EBB__PINS) {
                if (!ebb__page_leave_locked(vbar, page)) /* notes it */
                    continue;
                ebb__page_back_locked(vbar, page); /* unpinned just now */
            }
            if (ebb__fence_state_locked(device, p) == EBB__UNKNOWN)
                continue;
            *candidate =
                (ebb__candidate){.owner = EBB__VBAR_HOLDER,
                                 .cost = 5,
                                 .bytes = device->frame_bytes[ebb__page_kind_locked(vbar, page)],
                                 .object = vbar,
                                 .place = page};
            return true;
        }
    }
    return false;
}

static bool begin(ebb__device *device, ebb__candidate *candidate) EBB__LOCKED
{
    (void)device;
    ebb__vbar *vbar = candidate->object;
    if (!ebb__page_leave_locked(vbar, candidate->place))
        return false;
    candidate->departure = page_of(vbar, candidate->place)->departure;
    return true;
}

static bool settled(ebb__device *device, const ebb__candidate *candidate) EBB__LOCKED
{
    ebb__vbar *vbar = candidate->object;
    return !vbar->page_out &&
           ebb__fence_state_locked(device, page_of(vbar, candidate->place)) == EBB__PASSED;
}

static bool settle(ebb__device *device, const ebb__candidate *candidate) EBB__LOCKED
{
    (void)device;
    return ebb__page_settle_locked(candidate->object, candidate->place, candidate->departure, true);
}

static bool finish(ebb__device *device, const ebb__candidate *candidate,
                   ebb_reason reason) EBB__LOCKED
{
    (void)device;
    return ebb__page_evict_locked(candidate->object, candidate->place, reason);
}

static void undo(ebb__device *device, const ebb__candidate *candidate) EBB__LOCKED
{
    (void)device;
    ebb__vbar *vbar = candidate->object;
    if (leaving_locked(vbar, candidate->place, candidate->departure))
        ebb__page_back_locked(vbar, candidate->place);
}

const ebb__holder ebb__vbar_holder = {best, begin, settled, settle, finish, undo};

/*
 * Giving way: the ring loses an end, or both, in the middle of whatever goes on, because PyTorch would have
 * to do without.
 *
 *   low                                        bytes
 *   |  dropped  |  in use  | ... |  in use  |  dropped  |
 *   |-- given --|                       |---- given ----|
 *
 * What a cargo in use lies on, or lies between two of them, stays. Cargoes that nobody uses yet are dropped,
 * the newest first, and whoever comes for them finds them gone and fetches them again. A page is unpinned
 * with a ticket of the copy stream, which has been ordered behind all who have read there: so the core
 * takes it when that has passed, as it takes any weight's.
 */
#include "internal.h"
#include "move.h"

/* How large the page is that begins at, or holds, a place in the ring's VBAR. */
static uint64_t page_bytes(const ebb__device *device, const ebb__vbar *vbar, uint64_t place)
{
    bool large = place < atomic_load(&vbar->large_bytes);
    return device->frame_bytes[large ? EBB__LARGE : EBB__SMALL]; /* never changes */
}

/* Where the ring would begin, and end, if it lost a page there. false: the page is in use. */
static bool lower_end(const ebb__device *device, const ebb__vbar *vbar, uint64_t low, uint64_t from,
                      uint64_t *end)
{
    *end = low + page_bytes(device, vbar, low);
    return *end <= from;
}

static bool upper_end(const ebb__device *device, const ebb__vbar *vbar, uint64_t high, uint64_t to,
                      uint64_t *end)
{
    *end = high > to ? high - page_bytes(device, vbar, high - 1) : high;
    return *end < high && *end >= to;
}

/* How much of the ring could be given up. */
static uint64_t could_give(const ebb_mover *mover, const ebb__device *device, const ebb__vbar *vbar)
{
    uint64_t low = mover->ring.low, high = mover->ring.bytes, from, to, end;
    ebb__ring_in_use(&mover->ring, &from, &to);
    if (from >= to)
        return high - low;
    while (lower_end(device, vbar, low, from, &end))
        low = end;
    while (upper_end(device, vbar, high, to, &end))
        high = end;
    return ebb__ring_size(&mover->ring) - (high - low);
}

/* Give up one page, at an end of the ring. If the driver fails it stays a part of the ring; what was
   dropped stays dropped. */
static bool give_page(ebb_mover *mover, ebb__device *device, uint64_t start, uint64_t end)
{
    ebb__ring *ring = &mover->ring;
    ebb__cargo *read;
    uint64_t unused;
    while ((unused = ebb__ring_unused(ring, start, end)))
        ebb__mover_lower(mover, ebb__ring_over(ring, ebb__ring_find(ring, unused)));
    ebb_status status = ebb__mover_follow(mover, device, start, end);
    while (status == EBB_OK && (read = ebb__ring_read(ring, start, end)))
        status = ebb__mover_await(mover, device, read);
    if (status == EBB_OK)
        status = ebb_vbar_unpin(mover->vbar, start, end - start, mover->stream);
    if (status != EBB_OK)
        return false;
    mover->given_up += end - start;
    ebb__ring_narrow(ring, start == ring->low ? end : ring->low,
                     start == ring->low ? ring->bytes : start);
    return true;
}

/* From the end where less is lost: nothing that is out, or what is needed last. */
static uint64_t give(ebb_mover *mover, ebb__device *device, const ebb__vbar *vbar, uint64_t bytes)
{
    const ebb__ring *ring = &mover->ring;
    uint64_t given = 0, from, to, up, down;
    while (given < bytes) {
        ebb__ring_in_use(ring, &from, &to);
        bool below = lower_end(device, vbar, ring->low, from, &up);
        bool above = upper_end(device, vbar, ring->bytes, to, &down);
        if (below && above) {
            uint64_t lost_below = ebb__ring_unused(ring, ring->low, up);
            uint64_t lost_above = ebb__ring_unused(ring, down, ring->bytes);
            below = lost_above && (!lost_below || lost_below > lost_above);
        }
        uint64_t start = below ? ring->low : down, end = below ? up : ring->bytes;
        if ((!below && !above) || !give_page(mover, device, start, end))
            break;
        given += end - start;
    }
    return given;
}

uint64_t ebb__mover_give(ebb__giver *giver, uint64_t bytes)
{
    ebb_mover *mover = (ebb_mover *)((char *)giver - offsetof(ebb_mover, giver));
    uint64_t given = 0;
    ebb__os_lock(&mover->mu);
    /* Who changes the ring has it for himself. */
    if (!mover->changing && mover->pinned && ebb__ring_size(&mover->ring)) {
        ebb__scope scope;
        ebb_status status;
        const ebb__vbar *vbar = ebb__vbar_find(mover->vbar); /* pinned, so it is there */
        ebb__device *device = ebb__mover_reach(mover, &scope, &status);
        if (device) {
            given = bytes ? give(mover, device, vbar, bytes) : could_give(mover, device, vbar);
            ebb__mover_leave(device, &scope);
        }
    }
    ebb__os_unlock(&mover->mu);
    return given;
}

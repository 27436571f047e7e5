/*
 * Giving way: the ring loses pages, in the middle of whatever goes on, because PyTorch would have to do
 * without.
 *
 *   |  given  |  in use  |  unused  |  given  |  in use  |
 *
 * What a cargo in use lies on stays. Cargoes that nobody uses yet are dropped, the newest first, and whoever
 * comes for them finds them gone and fetches them again. The ring loses its ends before it falls into
 * pieces, which have less room for cargoes than they have bytes. A page is unpinned with a ticket of the
 * copy stream, which has been ordered behind all who have read there: so the core takes it when that has
 * passed, as it takes any weight's.
 */
#include "internal.h"
#include "move.h"

/* The page that begins at a place in the ring. */
static ebb__span page_at(const ebb__device *device, const ebb__vbar *vbar, uint64_t start)
{
    bool large = start < atomic_load(&vbar->large_bytes);
    uint64_t bytes = device->frame_bytes[large ? EBB__LARGE : EBB__SMALL]; /* never changes */
    return (ebb__span){.start = start, .end = start + bytes};
}

/* How much of the ring could be given up. If as many cargoes are in use, each apart, that more pieces would be
   left of it than there may be, then only what is at the ends of those that there are. */
static uint64_t could_give(const ebb_mover *mover, const ebb__device *device, const ebb__vbar *vbar)
{
    const ebb__ring *ring = &mover->ring;
    uint64_t all = 0, at_ends = 0;
    size_t pieces = 0;
    for (size_t i = 0; i < ring->piece_count; i++) {
        uint64_t unused = 0; /* since the last page that is in use */
        bool any = false, before = false;
        for (ebb__span page = {.end = ring->pieces[i].start}; page.end < ring->pieces[i].end;) {
            page = page_at(device, vbar, page.end);
            bool used = ebb__ring_in_use(ring, page.start, page.end);
            all += used ? 0 : page.end - page.start;
            unused += used ? 0 : page.end - page.start;
            if (used && !any)
                at_ends += unused;
            if (used)
                unused = 0;
            pieces += used && !before;
            before = used;
            any = any || used;
        }
        at_ends += unused;
    }
    return pieces > EBB__PIECES ? at_ends : all;
}

/* Whether it is better to lose one page than another, whose oldest unused cargo is `than`; 0: it has none. */
static bool better(uint64_t oldest, uint64_t than)
{
    return than && (!oldest || oldest > than);
}

/*
 * The page that is given up next: with nothing on it, or with what is needed last; the upper one of two that
 * are as good. One at an end of a piece, as long as there is one.
 */
static bool choose(const ebb_mover *mover, const ebb__device *device, const ebb__vbar *vbar,
                   ebb__span *page)
{
    const ebb__ring *ring = &mover->ring;
    bool found = false, at_end = false;
    uint64_t least = 0;
    for (size_t i = 0; i < ring->piece_count; i++) {
        const ebb__span piece = ring->pieces[i];
        ebb__span it = {.end = piece.start};
        while (it.end < piece.end) {
            it = page_at(device, vbar, it.end);
            bool end = it.start == piece.start || it.end == piece.end;
            if ((at_end && !end) || (!end && ring->piece_count == EBB__PIECES) ||
                ebb__ring_in_use(ring, it.start, it.end))
                continue;
            uint64_t oldest = ebb__ring_unused(ring, it.start, it.end);
            if (found && end == at_end && better(least, oldest))
                continue;
            found = true;
            at_end = end;
            least = oldest;
            *page = it;
        }
    }
    return found;
}

/* Give up one page. If the driver fails it stays a part of the ring; what was dropped stays dropped. */
static bool give_page(ebb_mover *mover, ebb__device *device, ebb__span page)
{
    ebb__ring *ring = &mover->ring;
    ebb__cargo *read;
    uint64_t unused;
    while ((unused = ebb__ring_unused(ring, page.start, page.end)))
        ebb__mover_lower(mover, ebb__ring_over(ring, ebb__ring_find(ring, unused)));
    ebb_status status = ebb__mover_follow(mover, device, page.start, page.end);
    while (status == EBB_OK && (read = ebb__ring_read(ring, page.start, page.end)))
        status = ebb__mover_await(mover, device, read);
    if (status == EBB_OK)
        status = ebb_vbar_unpin(mover->vbar, page.start, page.end - page.start, mover->stream);
    if (status != EBB_OK)
        return false;
    mover->given_up += page.end - page.start;
    ebb__ring_cut(ring, page.start, page.end);
    return true;
}

static uint64_t give(ebb_mover *mover, ebb__device *device, const ebb__vbar *vbar, uint64_t bytes)
{
    uint64_t given = 0;
    ebb__span page;
    while (given < bytes && choose(mover, device, vbar, &page) && give_page(mover, device, page))
        given += page.end - page.start;
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

/* The checker: every invariant of internal.h, by its number. */
#include "internal.h"

typedef struct report {
    char *detail;
    size_t length;
    bool broken;
} report;

#define EXPECT(number, condition, ...)                                                             \
    do {                                                                                           \
        if (!(condition) && !r->broken) {                                                          \
            r->broken = true;                                                                      \
            ebb__detail(r->detail, r->length, "invariant " #number ": " __VA_ARGS__);              \
        }                                                                                          \
    } while (0)

typedef unsigned long long number;

/* What the pages of all VBARs add up to. */
typedef struct sums {
    uint64_t frames[EBB__KINDS], poisoned[EBB__KINDS];
    uint64_t listed;
} sums;

static void check_ticket_locked(const ebb__device *device, uint64_t ticket, report *r) EBB__LOCKED
{
    unsigned slot = EBB__TICKET_SLOT(ticket);
    if (!slot)
        return;
    EXPECT(8, slot < EBB__STREAMS && device->streams[slot].used, "a ticket of no stream, slot %u",
           slot);
    if (!r->broken)
        EXPECT(8, (ticket & EBB__TICKET_EPOCH) <= atomic_load(&device->streams[slot].epoch),
               "a ticket ahead of its stream");
}

static void check_page_locked(const ebb__vbar *vbar, uint64_t page, sums *sum,
                              report *r) EBB__LOCKED
{
    const ebb__page *p = &vbar->pages[page];
    uint64_t word = atomic_load(&p->word);
    ebb__state state = EBB__STATE(word);
    bool has = state != EBB__ABSENT;
    EXPECT(2, has == (p->frame != NULL), "page %llu, state %d, frame %p", (number)page, (int)state,
           (void *)p->frame);
    EXPECT(3, has == ebb__bits_has(&vbar->resident, page), "page %llu, state %d", (number)page,
           (int)state);
    bool offered = ebb__bits_has(&vbar->evictable, page);
    bool free_to_go = state == EBB__RESIDENT && !(word & (EBB__NOTED | EBB__HELD));
    EXPECT(4, offered == free_to_go, "page %llu, word %llx, offered %d", (number)page, (number)word,
           (int)offered);
    EXPECT(6, !(word & EBB__PINS) || state == EBB__RESIDENT, "page %llu is pinned, state %d",
           (number)page, (int)state);
    if (!has) {
        EXPECT(8, !atomic_load(&p->ticket) && !p->more, "page %llu is absent and has a ticket",
               (number)page);
        return;
    }
    if (r->broken)
        return;
    uint64_t generation = atomic_load(&p->generation);
    if (state != EBB__POISONED)
        EXPECT(7, generation && generation <= vbar->device->generation, "page %llu, %llu",
               (number)page, (number)generation);
    ebb__kind kind = ebb__page_kind_locked(vbar, page);
    ebb__owner owner = state == EBB__POISONED ? EBB__OF_POISON : EBB__OF_VBAR;
    EXPECT(1, p->frame->kind == kind && p->frame->owner == owner,
           "page %llu's frame is of kind %d, owner %d", (number)page, (int)p->frame->kind,
           (int)p->frame->owner);
    (state == EBB__POISONED ? sum->poisoned : sum->frames)[kind]++;
    uint64_t ticket = atomic_load(&p->ticket);
    check_ticket_locked(vbar->device, ticket, r);
    EXPECT(8, !(ticket & EBB__TICKET_MORE) == !p->more, "page %llu hides tickets", (number)page);
    for (const ebb__more *a = p->more; a; a = a->next) {
        check_ticket_locked(vbar->device, a->ticket, r);
        EXPECT(8, EBB__TICKET_SLOT(a->ticket) != EBB__TICKET_SLOT(ticket),
               "page %llu has two tickets of one stream", (number)page);
        for (const ebb__more *b = a->next; b; b = b->next)
            EXPECT(8, EBB__TICKET_SLOT(a->ticket) != EBB__TICKET_SLOT(b->ticket),
                   "page %llu has two tickets of one stream", (number)page);
    }
}

static void check_vbar_locked(const ebb__vbar *vbar, sums *sum, report *r) EBB__LOCKED
{
    uint64_t before = sum->frames[0] + sum->frames[1] + sum->poisoned[0] + sum->poisoned[1];
    EXPECT(11,
           vbar->watermark <= vbar->watermark_limit && vbar->watermark_limit <= vbar->page_count,
           "watermark %llu, limit %llu, pages %llu", (number)vbar->watermark,
           (number)vbar->watermark_limit, (number)vbar->page_count);
    uint64_t offered = 0;
    for (uint64_t page = 0; page < vbar->page_count && !r->broken; page++) {
        check_page_locked(vbar, page, sum, r);
        offered += ebb__bits_has(&vbar->evictable, page);
    }
    uint64_t after = sum->frames[0] + sum->frames[1] + sum->poisoned[0] + sum->poisoned[1];
    EXPECT(3, after - before == vbar->resident.members, "%llu pages with frames, %llu in the set",
           (number)(after - before), (number)vbar->resident.members);
    EXPECT(4, offered == vbar->evictable.members, "%llu pages offered, %llu in the set",
           (number)offered, (number)vbar->evictable.members);
    sum->listed += offered > 0;
}

static void check_order_locked(const ebb__device *device, uint64_t expected, report *r) EBB__LOCKED
{
    uint64_t count = 0;
    const ebb__vbar *before = NULL;
    for (ebb__vbar *vbar = ebb__order_first(device->order); vbar && !r->broken;
         vbar = ebb__order_next(vbar)) {
        count++;
        EXPECT(10, !before || before->rank < vbar->rank, "rank %lld after %lld",
               (long long)vbar->rank, (long long)(before ? before->rank : 0));
        EXPECT(10,
               (!vbar->left || vbar->left->up == vbar) && (!vbar->right || vbar->right->up == vbar),
               "a child does not know its parent");
        EXPECT(10,
               (!vbar->left || vbar->left->chance <= vbar->chance) &&
                   (!vbar->right || vbar->right->chance <= vbar->chance),
               "a child above its parent");
        EXPECT(5, vbar->evictable.members && atomic_load(&vbar->id),
               "a VBAR without a page to give up is in the order");
        before = vbar;
    }
    EXPECT(5, count == expected, "%llu VBARs in the order, %llu have pages to give up",
           (number)count, (number)expected);
}

static void check_streams_locked(const ebb__device *device, report *r) EBB__LOCKED
{
    for (unsigned slot = 1; slot < EBB__STREAMS; slot++) {
        const ebb__stream *stream = &device->streams[slot];
        uint64_t last = 0;
        for (unsigned i = 0; i < stream->mark_count; i++) {
            const ebb__mark *mark = &stream->marks[i];
            /* One that is waited for stays until its last waiter has woken. */
            EXPECT(9, mark->epoch > last && (mark->waiters || mark->epoch > stream->passed),
                   "stream %u, mark %u: epoch %llu, passed %llu", slot, i, (number)mark->epoch,
                   (number)stream->passed);
            last = mark->epoch;
        }
        EXPECT(9, !stream->used || last < atomic_load(&stream->epoch), "stream %u's epoch", slot);
    }
}

static void check_frames_locked(const ebb__device *device, const sums *sum, report *r) EBB__LOCKED
{
    uint64_t stuck[EBB__KINDS] = {0};
    for (const ebb__frame *frame = device->stuck; frame; frame = frame->next)
        stuck[frame->kind]++;
    for (const ebb__frame *frame = device->lost; frame; frame = frame->next)
        stuck[frame->kind]++;
    for (int kind = 0; kind < EBB__KINDS; kind++) {
        uint64_t free = 0;
        for (const ebb__frame *frame = device->frames[kind]; frame; frame = frame->next) {
            EXPECT(1, frame->owner == EBB__OF_NOBODY && (int)frame->kind == kind,
                   "a free frame of kind %d belongs to %d", (int)frame->kind, (int)frame->owner);
            free++;
        }
        const uint64_t(*count)[EBB__KINDS] = device->frame_count;
        EXPECT(1, free == count[EBB__OF_NOBODY][kind], "%llu free frames of kind %d, counted %llu",
               (number)free, kind, (number)count[EBB__OF_NOBODY][kind]);
        EXPECT(12, sum->frames[kind] == count[EBB__OF_VBAR][kind],
               "%llu pages with frames of kind %d, counted %llu", (number)sum->frames[kind], kind,
               (number)count[EBB__OF_VBAR][kind]);
        EXPECT(1, sum->poisoned[kind] + stuck[kind] == count[EBB__OF_POISON][kind],
               "%llu frames of kind %d lost, counted %llu",
               (number)(sum->poisoned[kind] + stuck[kind]), kind,
               (number)count[EBB__OF_POISON][kind]);
        /* A request in another thread that waits may have some in its hand. */
        uint64_t busy = 0;
        for (uint32_t i = 0; i < device->vbar_high; i++)
            busy += ebb__vbar_number(device, i)->busy;
        EXPECT(13, busy || !count[EBB__OF_REQUEST][kind], "%llu frames in nobody's hand",
               (number)count[EBB__OF_REQUEST][kind]);
    }
}

ebb_status ebb_check(ebb_device handle, char *detail, size_t length)
{
    ebb__scope scope;
    ebb_status status;
    ebb__device *device = ebb__device_enter(handle, &scope, &status);
    if (!device)
        return status;
    report whole = {.detail = detail, .length = length}, *r = &whole;
    sums sum = {{0}, {0}, 0};
    uint64_t vbars = 0;
    for (uint32_t i = 0; i < device->vbar_high && !r->broken; i++) {
        const ebb__vbar *vbar = ebb__vbar_number(device, i);
        if (!atomic_load(&vbar->id))
            continue;
        vbars++;
        check_vbar_locked(vbar, &sum, r);
    }
    EXPECT(5, vbars == device->vbar_count, "%llu VBARs, counted %u", (number)vbars,
           device->vbar_count);
    check_order_locked(device, sum.listed, r);
    check_streams_locked(device, r);
    check_frames_locked(device, &sum, r);
    ebb__leave(device, &scope);
    return r->broken ? EBB_BROKEN : EBB_OK;
}

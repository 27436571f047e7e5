/* The operations of the core's model test: each asks the model, then the core, and compares. */
#include "core_world.h"

/* Call the core and the model; before that, see the GPU's work over if the outcome depends on it. */
#define SETTLE(w, call_on_copy)                                                                    \
    do {                                                                                           \
        model then = (w)->m, *m = &then;                                                           \
        then.depends = false;                                                                      \
        (void)(call_on_copy);                                                                      \
        world_settle(w, m);                                                                        \
    } while (0)

/* ---- VBARs --------------------------------------------------------------------------------------- */

void op_create(world *w)
{
    unsigned b = 0;
    while (b < MODEL_BARS && w->m.bars[b].alive)
        b++;
    if (b == MODEL_BARS)
        return;
    uint64_t bytes = 1 + throw_dice(&w->d) % (below(&w->d, 3) ? 100 * (uint64_t)MIB : 9 * MIB);
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes};
    EXPECT(w, ebb_vbar_create(w->device, &options, &w->bars[b].handle), EBB_OK);
    model_create(&w->m, b, bytes);
    ebb_vbar_stats s = {.size = sizeof s};
    EXPECT(w, ebb_vbar_get_stats(w->bars[b].handle, &s), EBB_OK);
    w->bars[b].address = s.address;
    w->bars[b].serial = ++w->serials;
    w->bars[b].weight_count = 0;
    world_compare(w, b);
}

void op_destroy(world *w)
{
    int b = world_any_bar(w);
    if (b < 0)
        return;
    ebb_status expected = model_destroy(&w->m, (unsigned)b);
    EXPECT(w, ebb_vbar_destroy(w->bars[b].handle), expected);
    if (expected == EBB_OK) {
        w->stale = w->bars[b].handle;
        EXPECT(w, ebb_vbar_destroy(w->stale), EBB_GONE);
    }
    world_compare(w, (unsigned)b);
}

void op_alloc(world *w)
{
    int b = world_any_bar(w);
    if (b < 0 || w->bars[b].weight_count == WEIGHTS)
        return;
    static const uint64_t most[] = {4096, 3 * MIB, 40 * MIB, 200 * MIB};
    uint64_t bytes = throw_dice(&w->d) % most[below(&w->d, 4)], offset = 0, its = 0;
    ebb_status expected = model_alloc(&w->m, (unsigned)b, bytes, &offset);
    EXPECT(w, ebb_vbar_alloc(w->bars[b].handle, bytes, &its), expected);
    if (expected != EBB_OK)
        return;
    EXPECT(w, its, offset);
    if (bytes >= 16) /* room for a stamp */
        w->bars[b].weights[w->bars[b].weight_count++] = (weight){.offset = offset, .bytes = bytes};
}

void op_prioritize(world *w)
{
    int b = world_any_bar(w);
    if (b < 0)
        return;
    model_prioritize(&w->m, (unsigned)b);
    EXPECT(w, ebb_vbar_prioritize(w->bars[b].handle), EBB_OK);
    world_compare(w, (unsigned)b);
}

void op_deprioritize(world *w)
{
    int b = world_any_bar(w);
    if (b < 0)
        return;
    model_deprioritize(&w->m, (unsigned)b);
    EXPECT(w, ebb_vbar_deprioritize(w->bars[b].handle), EBB_OK);
    world_compare(w, (unsigned)b);
}

void op_trade(world *w)
{
    int a = world_any_bar(w), b = world_any_bar(w);
    if (a < 0)
        return;
    model_trade(&w->m, (unsigned)a, (unsigned)b);
    EXPECT(w, ebb_vbar_trade(w->bars[a].handle, w->bars[b].handle), EBB_OK);
    world_compare(w, (unsigned)a);
    world_compare(w, (unsigned)b);
}

void op_free_memory(world *w)
{
    int b = world_any_bar(w);
    if (b < 0)
        return;
    uint64_t bytes = throw_dice(&w->d) % (70 * MIB), freed = 0;
    uint64_t expected = model_free_memory(&w->m, (unsigned)b, bytes);
    EXPECT(w, ebb_vbar_free_memory(w->bars[b].handle, bytes, &freed), EBB_OK);
    EXPECT(w, freed, expected);
    world_compare(w, (unsigned)b);
}

void op_watermark(world *w)
{
    int b = world_any_bar(w);
    if (b < 0)
        return;
    uint64_t bytes = throw_dice(&w->d) % (120 * MIB);
    model_set_watermark(&w->m, (unsigned)b, bytes);
    EXPECT(w, ebb_vbar_set_watermark(w->bars[b].handle, bytes), EBB_OK);
    world_compare(w, (unsigned)b);
}

void op_watermark_limit(world *w)
{
    int b = world_any_bar(w);
    if (b < 0)
        return;
    uint64_t bytes = below(&w->d, 3) ? UINT64_MAX : throw_dice(&w->d) % (120 * MIB);
    model_set_watermark_limit(&w->m, (unsigned)b, bytes);
    EXPECT(w, ebb_vbar_set_watermark_limit(w->bars[b].handle, bytes), EBB_OK);
    world_compare(w, (unsigned)b);
}

/* ---- use ----------------------------------------------------------------------------------------- */

/* A weight, or now and then any range; which weight it is, or -1. */
static int any_range(world *w, unsigned b, ebb_range *range)
{
    const shelf *bar = &w->bars[b];
    if (bar->weight_count && below(&w->d, 10)) {
        unsigned which = below(&w->d, bar->weight_count);
        *range = (ebb_range){bar->weights[which].offset, bar->weights[which].bytes};
        return (int)which;
    }
    uint64_t bytes = w->m.bars[b].bytes;
    range->offset = throw_dice(&w->d) % bytes;
    range->bytes = 1 + throw_dice(&w->d) % (bytes - range->offset);
    return -1;
}

/* The weight is pinned: fill it if it is new, use it. Whether its bytes are right afterwards. */
static bool use_weight(world *w, unsigned b, int which, uint64_t signature, CUstream stream)
{
    weight *its = &w->bars[b].weights[which];
    if (its->signature != signature) {
        if (!below(&w->d, 8))
            return false; /* the application thinks again */
        its->signature = signature;
        its->version++;
        world_use(w, b, which, true, stream);
        ebb_range range = {its->offset, its->bytes};
        SETTLE(w, model_filled(m, b, range));
        EXPECT(w, ebb_vbar_filled(w->bars[b].handle, its->offset, its->bytes, stream),
               model_filled(&w->m, b, range));
    }
    if (below(&w->d, 4))
        world_use(w, b, which, false, stream);
    return true;
}

static void fault(world *w, unsigned count)
{
    int b = world_any_bar(w);
    unsigned at = 0;
    while (at < PINS && w->pins[at].used)
        at++;
    if (b < 0)
        return;
    if (at == PINS) {
        world_unpin(w, &w->pins[below(&w->d, PINS)]);
        return;
    }
    pin *p = &w->pins[at];
    *p = (pin){.bar = (unsigned)b, .count = count, .lane = world_any_lane(w)};
    CUstream stream = w->lanes[p->lane].handle;
    for (unsigned i = 0; i < count; i++)
        p->weights[i] = any_range(w, p->bar, &p->ranges[i]);
    uint64_t signatures[BATCH] = {0}, expected[BATCH] = {0};
    SETTLE(w, model_fault(m, p->bar, p->ranges, count, expected));
    ebb_status status = model_fault(&w->m, p->bar, p->ranges, count, expected);
    if (count == 1)
        EXPECT(w,
               ebb_vbar_fault(w->bars[b].handle, p->ranges[0].offset, p->ranges[0].bytes, stream,
                              signatures),
               status);
    else
        EXPECT(w, ebb_vbar_fault_many(w->bars[b].handle, p->ranges, count, stream, signatures),
               status);
    world_compare(w, p->bar);
    if (status != EBB_OK || w->failures)
        return;
    p->used = true;
    for (unsigned i = 0; i < count; i++) {
        EXPECT(w, signatures[i], expected[i]);
        if (p->weights[i] >= 0 && !use_weight(w, p->bar, p->weights[i], signatures[i], stream))
            p->weights[i] = -1;
    }
    if (below(&w->d, 2))
        world_unpin(w, p);
}

void op_fault(world *w)
{
    fault(w, 1);
}

void op_fault_many(world *w)
{
    fault(w, 1 + below(&w->d, BATCH));
}

void world_unpin(world *w, pin *p)
{
    CUstream stream = w->lanes[p->lane].handle;
    ebb_vbar vbar = w->bars[p->bar].handle;
    SETTLE(w, model_unpin(m, p->bar, p->ranges, p->count));
    ebb_status expected = model_unpin(&w->m, p->bar, p->ranges, p->count);
    if (p->count == 1)
        EXPECT(w, ebb_vbar_unpin(vbar, p->ranges[0].offset, p->ranges[0].bytes, stream), expected);
    else
        EXPECT(w, ebb_vbar_unpin_many(vbar, p->ranges, p->count, stream), expected);
    p->used = false;
    world_compare(w, p->bar);
}

static pin *any_pin(world *w)
{
    unsigned start = below(&w->d, PINS);
    for (unsigned i = 0; i < PINS; i++)
        if (w->pins[(start + i) % PINS].used)
            return &w->pins[(start + i) % PINS];
    return NULL;
}

void op_unpin(world *w)
{
    pin *p = any_pin(w);
    if (p)
        world_unpin(w, p);
}

/* More work with what is pinned. */
void op_work(world *w)
{
    const pin *p = any_pin(w);
    for (unsigned i = 0; p && i < p->count; i++)
        if (p->weights[i] >= 0)
            world_use(w, p->bar, p->weights[i], false, w->lanes[p->lane].handle);
}

/* ---- the device ---------------------------------------------------------------------------------- */

void op_limit(world *w)
{
    uint64_t bytes = below(&w->d, 4) ? throw_dice(&w->d) % (260 * MIB) : EBB_DEFAULT;
    SETTLE(w, model_set_limit(m, bytes));
    EXPECT(w, ebb_device_set_limit(w->device, bytes), model_set_limit(&w->m, bytes));
}

void op_headroom(world *w)
{
    w->m.headroom = below(&w->d, 2) ? 0 : throw_dice(&w->d) % (40 * MIB);
    EXPECT(w, ebb_device_set_headroom(w->device, w->m.headroom), EBB_OK);
}

void op_trim(world *w)
{
    uint64_t freed = 0;
    EXPECT(w, ebb_device_trim(w->device, &freed), EBB_OK);
    EXPECT(w, freed, model_trim(&w->m));
}

/* A stream that makes no promise comes or goes, with its work unfinished. */
void op_stream(world *w)
{
    unsigned at = LASTING + below(&w->d, STREAMS - LASTING);
    lane *l = &w->lanes[at];
    if (!l->alive) {
        OK(w->cu.cuStreamCreate(&l->handle, CU_STREAM_NON_BLOCKING));
        *l = (lane){.handle = l->handle, .alive = true};
        return;
    }
    for (unsigned i = 0; i < PINS; i++)
        if (w->pins[i].used && w->pins[i].lane == at)
            return;
    if (l->lasting)
        return;
    OK(w->cu.cuStreamDestroy(l->handle));
    l->alive = false;
}

void op_keep(world *w)
{
    lane *l = &w->lanes[world_any_lane(w)];
    unsigned lasting = 0;
    for (unsigned i = 0; i < STREAMS; i++)
        lasting += w->lanes[i].alive && w->lanes[i].lasting;
    if (lasting >= STREAMS - 3 && !l->lasting)
        return;
    EXPECT(w, ebb_device_keep_stream(w->device, l->handle, world_promises(w)), EBB_OK);
    l->lasting = true;
}

void op_foreign(world *w)
{
    w->m.foreign = below(&w->d, 2) ? 0 : throw_dice(&w->d) % (220 * MIB);
    OK(ebbsim_foreign_use(0, w->m.foreign));
}

void op_pass(world *w)
{
    ebbsim_pass(throw_dice(&w->d) % 5000000);
}

/* ---- what must be refused, and change nothing ------------------------------------------------------ */

static void wrong_handle(world *w)
{
    ebb_range range = {0, 1};
    uint64_t out = 0;
    if (!w->stale.id)
        return;
    EXPECT(w, ebb_vbar_fault(w->stale, 0, 1, NULL, &out), EBB_GONE);
    EXPECT(w, ebb_vbar_fault_many(w->stale, &range, 1, NULL, &out), EBB_GONE);
    EXPECT(w, ebb_vbar_unpin(w->stale, 0, 1, NULL), EBB_GONE);
    EXPECT(w, ebb_vbar_unpin_many(w->stale, &range, 1, NULL), EBB_GONE);
    EXPECT(w, ebb_vbar_filled(w->stale, 0, 1, NULL), EBB_GONE);
    EXPECT(w, ebb_vbar_prioritize(w->stale), EBB_GONE);
    EXPECT(w, ebb_vbar_trade(w->stale, w->stale), EBB_GONE);
    EXPECT(w, ebb_vbar_free_memory(w->stale, 1, &out), EBB_GONE);
}

void op_wrong(world *w)
{
    int b = world_any_bar(w);
    if (b < 0 || below(&w->d, 8) == 0) {
        wrong_handle(w);
        return;
    }
    ebb_vbar vbar = w->bars[b].handle;
    CUstream stream = w->lanes[world_any_lane(w)].handle;
    uint64_t bytes = w->m.bars[b].bytes, out[BATCH];
    ebb_range ranges[BATCH];
    unsigned count = 2 + below(&w->d, BATCH - 1);
    for (unsigned i = 0; i < count; i++)
        any_range(w, (unsigned)b, &ranges[i]);
    switch (below(&w->d, 6)) {
    case 0:
        EXPECT(w, ebb_vbar_fault(vbar, bytes, 1, stream, out), EBB_INVALID);
        break;
    case 1:
        EXPECT(w, ebb_vbar_fault(vbar, 0, 0, stream, out), EBB_INVALID);
        break;
    case 2:
        ranges[below(&w->d, count)].bytes = UINT64_MAX - below(&w->d, 5);
        EXPECT(w, ebb_vbar_fault_many(vbar, ranges, count, stream, out), EBB_INVALID);
        break;
    case 3:
        ranges[below(&w->d, count)].bytes = bytes + 1;
        EXPECT(w, ebb_vbar_unpin_many(vbar, ranges, count, stream), EBB_INVALID);
        break;
    default: {
        /* Unpinned too often, by one of several ranges or by one too many. */
        model then = w->m;
        ebb_status expected = model_unpin(&then, (unsigned)b, ranges, count);
        if (expected == EBB_NOT_PINNED)
            EXPECT(w, ebb_vbar_unpin_many(vbar, ranges, count, stream), expected);
    }
    }
    world_compare(w, (unsigned)b);
}

/*
 * The core against a naive model: a million random operations; every status, every page, every
 * counter, every byte; the books right after every step; not one hazard on the simulated GPU; and
 * nothing left at the end.
 *
 *   argv[1]   number of operations for each seed
 *   argv[2]   the one seed to play
 */
#include "core_world.h"
#include "scale.h"

static const struct {
    operation *play;
    const char *name;
    unsigned share;
} operations[] = {
#define OPERATION(name, share)                                                                     \
    {                                                                                              \
        op_##name, #name, share                                                                    \
    }
    OPERATION(create, 6),          OPERATION(destroy, 4),
    OPERATION(alloc, 24),          OPERATION(fault, 100),
    OPERATION(fault_many, 40),     OPERATION(unpin, 80),
    OPERATION(work, 20),           OPERATION(prioritize, 16),
    OPERATION(deprioritize, 3),    OPERATION(trade, 6),
    OPERATION(free_memory, 4),     OPERATION(watermark, 4),
    OPERATION(watermark_limit, 3), OPERATION(limit, 5),
    OPERATION(headroom, 2),        OPERATION(trim, 3),
    OPERATION(stream, 8),          OPERATION(keep, 1),
    OPERATION(foreign, 4),         OPERATION(pass, 10),
    OPERATION(wrong, 10),
};

static void start(world *w, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->d.state = seed * 0x632BE59BD9B4E019u;
    w->doing = "start";
    w->m.memory = 256 * (uint64_t)MIB;
    w->m.limit = (64 + below(&w->d, 200)) * (uint64_t)MIB;
    ebbsim_reset();
    ebbsim_card card;
    ebbsim_card_default(&card, w->m.memory);
    card.context = 0;
    OK(ebbsim_card_add(&card, NULL));
    ebbsim_clock_virtual(1);
    ebbsim_on_hazard(EBBSIM_QUIET);
    ebb_device_options options = {
        .size = sizeof options, .library = SIM_LIBRARY, .limit = w->m.limit, .headroom = 0};
    char why[256];
    OK(ebb_device_open(&options, &w->device, why, sizeof why));
    OK(ebb__driver_open(&w->cu, SIM_LIBRARY, why, sizeof why));
    CUcontext context;
    OK(w->cu.cuDevicePrimaryCtxRetain(&context, 0));
    OK(w->cu.cuCtxSetCurrent(context));
    w->lanes[0] = (lane){.alive = true, .lasting = true}; /* the legacy default stream */
    for (unsigned i = 1; i < LASTING; i++) {
        OK(w->cu.cuStreamCreate(&w->lanes[i].handle, CU_STREAM_NON_BLOCKING));
        OK(ebb_device_keep_stream(w->device, w->lanes[i].handle, world_promises(w)));
        w->lanes[i].alive = w->lanes[i].lasting = true;
    }
}

static void check(world *w)
{
    char why[256];
    if (ebb_check(w->device, why, sizeof why) != EBB_OK)
        WORLD_FAIL(w, "%s", why);
    ebbsim_hazard h;
    if (ebbsim_hazard_get(0, &h) == 0)
        WORLD_FAIL(w, "%s", h.text);
    if (w->step % 16 == 0)
        for (unsigned b = 0; b < MODEL_BARS; b++)
            world_compare(w, b);
}

static void step(world *w)
{
    enum { COUNT = sizeof operations / sizeof *operations };
    unsigned total = 0, which = 0;
    for (unsigned i = 0; i < COUNT; i++)
        total += operations[i].share;
    unsigned thrown = below(&w->d, total);
    while (thrown >= operations[which].share)
        thrown -= operations[which++].share;
    w->doing = operations[which].name;
    unsigned long calls = ebbsim_calls(NULL);
    operations[which].play(w);
    w->step += ebbsim_calls(NULL) != calls; /* else there was nothing to do it to */
    check(w);
}

/* Give everything back: nothing must be left. */
static void finish(world *w)
{
    w->doing = "finish";
    for (unsigned i = 0; i < PINS; i++)
        if (w->pins[i].used)
            world_unpin(w, &w->pins[i]);
    for (unsigned b = 0; b < MODEL_BARS; b++)
        world_compare(w, b);
    EXPECT(w, ebb_device_close(w->device), EBB_OK);
    EXPECT(w, ebb_device_close(w->device), EBB_GONE);
    for (unsigned i = 0; i < STREAMS; i++) {
        if (w->lanes[i].alive)
            OK(w->cu.cuStreamSynchronize(w->lanes[i].handle));
        if (w->lanes[i].alive && w->lanes[i].handle)
            OK(w->cu.cuStreamDestroy(w->lanes[i].handle));
    }
    OK(w->cu.cuDevicePrimaryCtxRelease(0));
    ebbsim_census c = {.size = sizeof c}, nothing = {.size = sizeof c};
    ebbsim_census_take(&c);
    if (memcmp(&c, &nothing, sizeof c) != 0)
        WORLD_FAIL(w,
                   "left: %llu reservations, %llu handles, %llu mappings, %llu streams, %llu "
                   "events, %llu contexts, %llu works",
                   (unsigned long long)c.reservations, (unsigned long long)c.handles,
                   (unsigned long long)c.mappings, (unsigned long long)c.streams,
                   (unsigned long long)c.events, (unsigned long long)c.contexts,
                   (unsigned long long)c.pending_works);
    EXPECT(w, w->late, 0);
    EXPECT(w, ebbsim_hazards(), 0);
    ebb__driver_close(&w->cu);
}

int main(int argc, char **argv)
{
    static world w;
    enum { SEEDS = 20 };
    unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 10) : SCALED(50000, 5000);
    unsigned plays = argc > 2 ? 1 : SEEDS;
    for (unsigned i = 1; i <= plays && harness_failures == 0; i++) {
        start(&w, argc > 2 ? strtoull(argv[2], NULL, 10) : i);
        while (w.step < count && w.failures == 0)
            step(&w);
        if (w.failures == 0)
            finish(&w);
        harness_tests++;
        harness_failures += w.failures;
        printf("%s seed %llu: %lu operations, %llu hits, %llu misses, %llu offloaded\n",
               w.failures == 0 ? "ok    " : "FAILED", (unsigned long long)w.seed, w.step,
               (unsigned long long)w.m.hits, (unsigned long long)w.m.misses,
               (unsigned long long)w.m.offloaded);
        if (w.failures)
            printf("again: %s %lu %llu\n", argv[0], w.step + 1, (unsigned long long)w.seed);
    }
    return REPORT();
}

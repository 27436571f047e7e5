/* Movers: what arrives, what overlaps, what it costs, and what is refused. */
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "haul.h"
#include "scale.h"

/* ---- contents -------------------------------------------------------------------------------------- */

static void what_has_room_is_filled_and_what_has_none_is_staged(void)
{
    haul h;
    haul_open(&h, 3 * LARGE, LARGE, 4 * LARGE);
    enum { BYTES = 5 << 20 };
    ebb_load loads[4];
    uint64_t cargo, signature;
    for (uint64_t i = 0; i < 4; i++)
        loads[i] = haul_load(&h, i * LARGE + 512 * i, BYTES - 100 * i);
    CHECK_EQ(ebb_vbar_set_watermark(h.vbar, 2 * LARGE), EBB_OK);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 4, NULL, &cargo), EBB_OK);
    haul_check(&h);
    CHECK(cargo);
    CHECK(!loads[0].staged && !loads[1].staged && loads[2].staged && loads[3].staged);
    CHECK(loads[0].signature && loads[1].signature && !loads[2].signature);
    CHECK_EQ(loads[3].staged - loads[2].staged, (loads[2].bytes + 511) / 512 * 512);
    CHECK_EQ(haul_stats(&h).staged, loads[2].bytes + loads[3].bytes);
    CHECK_EQ(haul_stats(&h).filled, loads[0].bytes + loads[1].bytes);
    CHECK_EQ(haul_stats(&h).cargoes, 1);
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    for (int i = 2; i < 4; i++)
        CHECK(haul_right(&h, loads[i].staged, loads[i].offset, loads[i].bytes, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    for (int i = 0; i < 2; i++) {
        uint64_t at = loads[i].offset, bytes = loads[i].bytes;
        CHECK_EQ(ebb_vbar_fault(h.vbar, at, bytes, h.compute, &signature), EBB_OK);
        CHECK_EQ(signature, loads[i].signature);
        CHECK(haul_right(&h, core_stats(h.vbar).address + at, at, bytes, h.compute));
        CHECK_EQ(ebb_vbar_unpin(h.vbar, at, bytes, h.compute), EBB_OK);
    }
    haul_shut(&h);
}

static void what_is_resident_costs_a_look(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    ebb_load loads[8];
    uint64_t cargo = 5;
    for (uint64_t i = 0; i < 8; i++)
        loads[i] = haul_load(&h, i * 8 * MIB, 7 * MIB);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 8, NULL, &cargo), EBB_OK);
    CHECK_EQ(cargo, 0);
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo), EBB_OK);
    unsigned long calls = h.c.sim ? ebbsim_calls(NULL) : 0;
    for (int i = 0; i < 10; i++)
        CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 8, NULL, &cargo), EBB_OK);
    if (h.c.sim)
        CHECK_EQ(ebbsim_calls(NULL), calls);
    CHECK_EQ(haul_stats(&h).filled, UINT64_C(8) * 7 * MIB);
    CHECK_EQ(core_device_stats(&h.c).pinned, LARGE); /* the ring; fetch keeps no pin */
    /* It goes, comes back, and is filled again. */
    uint64_t before = loads[7].signature;
    CHECK_EQ(ebb_vbar_free_memory(h.vbar, LARGE, NULL), EBB_OK);
    CHECK_EQ(ebb_vbar_prioritize(h.vbar), EBB_OK);
    const ebb_fetch staged = {.stage = 1}; /* but not if it is not to */
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 8, &staged, &cargo), EBB_OK);
    CHECK(cargo && loads[7].staged && !loads[0].staged && loads[7].signature == before);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo), EBB_OK);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 8, NULL, &cargo), EBB_OK);
    CHECK_EQ(cargo, 0);
    CHECK(loads[7].signature != before);
    CHECK_EQ(haul_stats(&h).filled, UINT64_C(12) * 7 * MIB);
    uint64_t signature, at = loads[7].offset;
    CHECK_EQ(ebb_vbar_fault(h.vbar, at, 7 * MIB, h.compute, &signature), EBB_OK);
    CHECK_EQ(signature, loads[7].signature);
    CHECK(haul_right(&h, core_stats(h.vbar).address + at, at, 7 * MIB, h.compute));
    CHECK_EQ(ebb_vbar_unpin(h.vbar, at, 7 * MIB, h.compute), EBB_OK);
    haul_shut(&h);
}

static void a_fill_that_fails_is_made_again(void)
{
    NEEDS_SIM("a copy must fail");
    haul h;
    haul_open(&h, 4 * LARGE, 0, 2 * LARGE);
    ebb_load load = haul_load(&h, 512, LARGE);
    uint64_t cargo, signature;
    MUST(ebbsim_fail("cuMemcpyHtoDAsync", 1, 1));
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &load, 1, NULL, &cargo), EBB_DRIVER_FAILED);
    CHECK_EQ(load.signature, 0);
    CHECK_EQ(core_device_stats(&h.c).pinned, 0);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &load, 1, NULL, &cargo), EBB_OK);
    CHECK(load.signature);
    CHECK_EQ(ebb_vbar_fault(h.vbar, 512, LARGE, h.compute, &signature), EBB_OK);
    CHECK_EQ(signature, load.signature);
    CHECK(haul_right(&h, core_stats(h.vbar).address + 512, 512, LARGE, h.compute));
    CHECK_EQ(ebb_vbar_unpin(h.vbar, 512, LARGE, h.compute), EBB_OK);
    haul_shut(&h);
}

static void neighbours_are_one_copy(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    haul_stage_all(&h);
    /* a, b and c follow each other; c is not a multiple of 512; e comes after a gap. */
    ebb_load loads[5] = {haul_load(&h, 0, 1024), haul_load(&h, 1024, 512), haul_load(&h, 1536, 700),
                         haul_load(&h, 1536 + 700, 100), haul_load(&h, 8192, 512)};
    uint64_t cargo;
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 5, NULL, &cargo), EBB_OK);
    CHECK_EQ(haul_stats(&h).copies, 3);
    CHECK_EQ(haul_stats(&h).ring_used, 1024 + 512 + 1024 + 512 + 512);
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    for (int i = 0; i < 5; i++)
        CHECK(haul_right(&h, loads[i].staged, loads[i].offset, loads[i].bytes, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    haul_shut(&h);
}

static void neighbours_pinned_each_by_itself_are_not(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    haul_stage_all(&h);
    unsigned char *heap =
        mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(heap != MAP_FAILED);
    memcpy(heap, h.host, 65536);
    ebb_load loads[4];
    for (uint64_t i = 0; i < 4; i++) {
        const void *from = NULL;
        CHECK_EQ(ebb_host_borrow(h.c.device, heap + 512 + i * 512, 512, NULL, &from), EBB_OK);
        CHECK(from == heap + 512 + i * 512);
        loads[i] = (ebb_load){.offset = 512 + i * 512, .bytes = 512, .host = from};
    }
    uint64_t cargo;
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 4, NULL, &cargo), EBB_OK);
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    for (int i = 0; i < 4; i++)
        CHECK(haul_right(&h, loads[i].staged, loads[i].offset, 512, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    for (uint64_t i = 0; i < 4; i++)
        CHECK_EQ(ebb_host_return(h.c.device, heap + 512 + i * 512, 512), EBB_OK);
    munmap(heap, 65536);
    haul_shut(&h);
}

/* ---- time ------------------------------------------------------------------------------------------ */

/* A model of `units` staged units of LARGE, the next always on its way: how long it takes. */
static uint64_t model_time(haul *h, uint64_t units, uint64_t kernel)
{
    ebb_load load[2];
    uint64_t cargo[2], begin = rig_now();
    cargo[0] = haul_fetch(h, &load[0], 0, LARGE);
    for (uint64_t i = 0; i < units; i++) {
        if (i + 1 < units)
            cargo[(i + 1) % 2] = haul_fetch(h, &load[(i + 1) % 2], (i + 1) % 4 * LARGE, LARGE);
        haul_use(h, cargo[i % 2], &load[i % 2], kernel, h->compute);
    }
    MUST(h->c.driver.cuStreamSynchronize(h->compute));
    return rig_now() - begin;
}

static void copies_go_on_while_kernels_run(void)
{
    NEEDS_SIM("a clock is needed that is the same in every run");
    haul h;
    haul_open(&h, 8 * LARGE, 3 * LARGE, 4 * LARGE);
    haul_stage_all(&h);
    const uint64_t units = 20;
    ebbsim_card card = {.size = sizeof card};
    MUST(ebbsim_card_get(0, &card));
    uint64_t copy = (uint64_t)((double)LARGE / card.h2d_rate * 1e9);
    uint64_t slack = 20000 * units; /* the calls themselves */
    /* The kernels take longer: they alone count, but for the first copy. */
    uint64_t took = model_time(&h, units, 2 * copy);
    CHECK(took > units * 2 * copy && took < units * 2 * copy + copy + slack);
    /* The copies do: then only they count, but for the last kernel. */
    took = model_time(&h, units, copy / 4);
    CHECK(took > units * copy && took < units * copy + copy / 4 + slack);
    haul_shut(&h);
}

static void nothing_is_made_and_nothing_waited_for_in_the_steady_state(void)
{
    NEEDS_SIM("only a simulated GPU counts the driver's calls");
    static const char *const never[] = {
        "cuEventCreate",       "cuEventDestroy",      "cuEventSynchronize", "cuEventQuery",
        "cuStreamSynchronize", "cuCtxSynchronize",    "cuMemCreate",        "cuMemMap",
        "cuMemUnmap",          "cuMemSetAccess",      "cuMemHostRegister",  "cuMemHostAlloc",
        "cuMemAlloc",          "cuMemAddressReserve",
    };
    enum { NEVER = sizeof never / sizeof *never };
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    haul_stage_all(&h);
    unsigned long calls[NEVER];
    for (int round = 0; round < SCALED(200, 60); round++) {
        ebb_load load[2];
        uint64_t cargo[2];
        for (uint64_t i = 0; i < 2; i++)
            cargo[i] = haul_fetch(&h, &load[i], i * 8 * MIB, 7 * MIB);
        for (int i = 0; i < 2; i++)
            haul_use(&h, cargo[i], &load[i], MILLISECOND, h.compute);
        for (int i = 0; i < NEVER && round == 20; i++)
            calls[i] = ebbsim_calls(never[i]);
    }
    for (int i = 0; i < NEVER; i++)
        if (ebbsim_calls(never[i]) != calls[i])
            FAIL("%s was called", never[i]);
    haul_shut(&h);
}

/* ---- what is refused -------------------------------------------------------------------------------- */

static void nonsense_is_refused(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, SMALL, 2 * LARGE);
    ebb_load load = haul_load(&h, 0, 4096), bad;
    ebb_mover_stats stats = {.size = 8};
    uint64_t cargo = 3;
    CHECK_EQ(ebb_mover_fetch(NULL, h.vbar, &load, 1, NULL, &cargo), EBB_INVALID);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, NULL, 1, NULL, &cargo), EBB_INVALID);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &load, 0, NULL, &cargo), EBB_INVALID);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &load, 1, NULL, NULL), EBB_INVALID);
    CHECK_EQ(ebb_mover_fetch(h.mover, (ebb_vbar){0}, &load, 1, NULL, &cargo), EBB_INVALID);
    CHECK_EQ(ebb_mover_fetch(h.mover, (ebb_vbar){h.vbar.id + 1}, &load, 1, NULL, &cargo), EBB_GONE);
    CHECK_EQ(cargo, 0);
    bad = load, bad.host = NULL;
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &bad, 1, NULL, &cargo), EBB_INVALID);
    bad = load, bad.bytes = 0;
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &bad, 1, NULL, &cargo), EBB_INVALID);
    bad = load, bad.offset = 2 * LARGE;
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &bad, 1, NULL, &cargo), EBB_INVALID);
    CHECK_EQ(ebb_mover_use(h.mover, 77, h.compute), EBB_GONE);
    CHECK_EQ(ebb_mover_done(h.mover, 77, h.compute), EBB_GONE);
    CHECK_EQ(ebb_mover_drop(h.mover, 77), EBB_GONE);
    CHECK_EQ(ebb_mover_use(NULL, 1, h.compute), EBB_INVALID);
    CHECK_EQ(ebb_mover_get_stats(h.mover, &stats), EBB_INVALID);
    CHECK_EQ(ebb_mover_get_stats(h.mover, NULL), EBB_INVALID);
    CHECK_EQ(ebb_mover_create(h.c.device, NULL), EBB_INVALID);
    CHECK_EQ(ebb_mover_set_ring(NULL, 1), EBB_INVALID);
    CHECK_EQ(ebb_mover_set_ring(h.mover, UINT64_MAX), EBB_INVALID);
    CHECK_EQ(haul_stats(&h).ring, SMALL); /* as it was */
    CHECK_EQ(ebb_mover_destroy(NULL), EBB_OK);
    CHECK(!ebb_mover_stream(NULL));
    ebb_mover *other;
    CHECK_EQ(ebb_mover_create((ebb_device){0}, &other), EBB_GONE);
    haul_shut(&h);
}

static void a_device_with_a_mover_is_not_closed(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_mover *mover;
    MUST(ebb_mover_create(c.device, &mover));
    CHECK_EQ(ebb_device_close(c.device), EBB_BUSY);
    CHECK_EQ(ebb_mover_destroy(mover), EBB_OK);
    core_close(&c);
}

static void a_capture_is_left_alone(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    haul_stage_all(&h);
    CUstream s = core_lasting(&h.c), blocking;
    CUgraph graph;
    ebb_load load, other;
    uint64_t cargo = haul_fetch(&h, &load, 0, MIB), next;
    MUST(h.c.driver.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK_EQ(ebb_mover_use(h.mover, cargo, s), EBB_BUSY);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo), EBB_OK); /* it is not in use */
    cargo = haul_fetch(&h, &load, MIB, MIB);          /* and copies go on */
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    CHECK_EQ(ebb_mover_done(h.mover, cargo, s), EBB_BUSY);
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    CHECK_EQ(h.c.driver.cuStreamEndCapture(s, &graph), CUDA_SUCCESS); /* it has survived */
    MUST(h.c.driver.cuGraphDestroy(graph));
    /* The legacy stream, while one that waits for it captures. */
    MUST(h.c.driver.cuStreamCreate(&blocking, CU_STREAM_DEFAULT));
    next = haul_fetch(&h, &other, 2 * MIB, MIB);
    MUST(h.c.driver.cuStreamBeginCapture(blocking, CU_STREAM_CAPTURE_MODE_RELAXED));
    CHECK_EQ(ebb_mover_use(h.mover, next, NULL), EBB_BUSY);
    CHECK_EQ(h.c.driver.cuStreamEndCapture(blocking, &graph), CUDA_SUCCESS);
    MUST(h.c.driver.cuGraphDestroy(graph));
    haul_use(&h, next, &other, 1000, NULL);
    MUST(h.c.driver.cuStreamDestroy(blocking));
    haul_shut(&h);
}

static void a_fork_has_no_mover(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    ebb_load load = haul_load(&h, 0, 4096);
    uint64_t cargo;
    pid_t child = fork();
    if (!child) {
        bool right = ebb_mover_fetch(h.mover, h.vbar, &load, 1, NULL, &cargo) == EBB_FORKED &&
                     ebb_mover_use(h.mover, 1, NULL) == EBB_FORKED &&
                     ebb_mover_destroy(h.mover) == EBB_FORKED &&
                     ebb_host_free(h.c.device, h.host) == EBB_FORKED;
        _exit(right ? 0 : 1);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_EQ(status, 0);
    haul_shut(&h);
}

/* ---- the ring, and the end ---------------------------------------------------------------------------- */

static void the_ring_counts_and_weights_make_room_for_it(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, 0, 4 * LARGE);
    ebb_load loads[4], load;
    uint64_t cargo;
    for (uint64_t i = 0; i < 4; i++)
        loads[i] = haul_load(&h, i * LARGE, LARGE);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 4, NULL, &cargo), EBB_OK);
    CHECK_EQ(core_stats(h.vbar).resident, 4 * LARGE);
    CHECK_EQ(ebb_mover_set_ring(h.mover, LARGE + 1), EBB_OK);
    CHECK_EQ(haul_stats(&h).ring, LARGE + SMALL);
    CHECK_EQ(core_stats(h.vbar).resident, 2 * LARGE);
    CHECK(core_device_stats(&h.c).held <= 4 * LARGE);
    CHECK_EQ(core_device_stats(&h.c).pinned, LARGE + SMALL);
    /* Four loads: two are there, two pass through the ring, one after the other. */
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 4, NULL, &cargo), EBB_OFFLOADED);
    CHECK_EQ(haul_stats(&h).no_room, 1);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 3, NULL, &cargo), EBB_OK);
    CHECK(loads[2].staged && !loads[3].staged);
    CHECK_EQ(ebb_mover_set_ring(h.mover, LARGE), EBB_BUSY);
    CHECK_EQ(ebb_mover_destroy(h.mover), EBB_BUSY);
    haul_use(&h, cargo, &loads[2], rig_length(10), h.compute);
    /* More than there is: it is as it was, and works. */
    CHECK_EQ(ebb_mover_set_ring(h.mover, 5 * LARGE), EBB_OFFLOADED);
    CHECK_EQ(haul_stats(&h).ring, LARGE + SMALL);
    cargo = haul_fetch(&h, &load, 3 * LARGE, LARGE);
    CHECK_EQ(ebb_mover_use(h.mover, cargo, h.compute), EBB_OK);
    CHECK(haul_right(&h, load.staged, 3 * LARGE, LARGE, h.compute));
    CHECK_EQ(ebb_mover_done(h.mover, cargo, h.compute), EBB_OK);
    uint64_t loaded = core_device_stats(&h.c).frames_recycled;
    CHECK_EQ(ebb_mover_set_ring(h.mover, LARGE + SMALL - 5), EBB_OK); /* the same */
    CHECK_EQ(core_device_stats(&h.c).frames_recycled, loaded);
    CHECK_EQ(ebb_mover_set_ring(h.mover, 0), EBB_OK);
    CHECK_EQ(core_device_stats(&h.c).pinned, 0);
    CHECK_EQ(core_device_stats(&h.c).vbars, 1);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, loads, 4, NULL, &cargo), EBB_OFFLOADED);
    haul_shut(&h);
}

static void a_ring_is_given_back_behind_the_work_on_it_and_nothing_else(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, SMALL, 2 * LARGE);
    haul_stage_all(&h);
    CUstream s = core_lasting(&h.c), other = core_lasting(&h.c);
    for (int i = 0; i < 2; i++) {
        ebb_load load;
        uint64_t length = rig_length(20), cargo = haul_fetch(&h, &load, 0, MIB);
        uint64_t begin = rig_now();
        haul_use(&h, cargo, &load, length, s);
        CHECK_EQ(rig_kernel("long", 0, 0, 0, rig_forever(), other), 0);
        CHECK_EQ(ebb_mover_set_ring(h.mover, i ? 0 : 2 * SMALL), EBB_OK);
        CHECK(rig_took(rig_now() - begin, length));
        CHECK_EQ(h.c.driver.cuStreamQuery(s), CUDA_SUCCESS);
        CHECK_EQ(h.c.driver.cuStreamQuery(other), CUDA_ERROR_NOT_READY);
        MUST(h.c.driver.cuStreamSynchronize(other));
    }
    haul_shut(&h);
}

static void movers_come_and_go(void)
{
    haul h;
    haul_open(&h, 3 * LARGE, SMALL, 4 * LARGE);
    ebb_vbar rival = core_vbar(&h.c, 2 * LARGE);
    ebb_load loads[4];
    uint64_t cargo;
    for (uint64_t i = 0; i < 4; i++)
        loads[i] = haul_load(&h, i * LARGE, 4 * MIB);
    for (int round = 0; round < 20; round++) {
        /* Filled by a stream that is gone, or used by one with its handle, and then taken away. */
        ebb_mover *mover = NULL;
        CUstream s;
        MUST(ebb_mover_create(h.c.device, &mover));
        CHECK_EQ(ebb_vbar_prioritize(h.vbar), EBB_OK);
        CHECK_EQ(ebb_mover_fetch(mover, h.vbar, loads, 2, NULL, &cargo), EBB_OK);
        CHECK_EQ(ebb_mover_destroy(mover), EBB_OK);
        MUST(h.c.driver.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        rig_busy(&h.c, h.vbar, 0, 4 * MIB, 1000, s);
        haul_check(&h);
        CHECK_EQ(ebb_vbar_prioritize(rival), EBB_OK);
        CHECK_EQ(rig_touch(rival, 0, 2 * LARGE, h.compute), EBB_OK);
        MUST(h.c.driver.cuStreamDestroy(s));
        haul_check(&h);
    }
    haul_shut(&h);
}

int main(void)
{
    RUN(what_has_room_is_filled_and_what_has_none_is_staged);
    RUN(what_is_resident_costs_a_look);
    RUN(a_fill_that_fails_is_made_again);
    RUN(neighbours_are_one_copy);
    RUN(neighbours_pinned_each_by_itself_are_not);
    RUN(copies_go_on_while_kernels_run);
    RUN(nothing_is_made_and_nothing_waited_for_in_the_steady_state);
    RUN(nonsense_is_refused);
    RUN(a_device_with_a_mover_is_not_closed);
    RUN(a_capture_is_left_alone);
    RUN(a_fork_has_no_mover);
    RUN(the_ring_counts_and_weights_make_room_for_it);
    RUN(a_ring_is_given_back_behind_the_work_on_it_and_nothing_else);
    RUN(movers_come_and_go);
    return REPORT();
}

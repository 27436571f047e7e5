/* Marks: how long the GPU takes, without a wait. */
#include "haul.h"

static void the_gpu_s_time_is_told_when_it_has_passed(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    uint32_t first, last, later;
    double took = 1;
    uint64_t length = rig_length(20);
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &first), EBB_OK);
    CHECK_EQ(rig_kernel("long", 0, 0, 0, length, h.compute), 0);
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &last), EBB_OK);
    CHECK(first && last && first != last);
    CHECK_EQ(ebb_mover_between(h.mover, first, last, &took), EBB_BUSY);
    CHECK(took == 0);
    MUST(h.c.driver.cuStreamSynchronize(h.compute));
    CHECK_EQ(ebb_mover_between(h.mover, first, last, &took), EBB_OK);
    CHECK(rig_took((uint64_t)(took * 1e6), length));
    CHECK_EQ(ebb_mover_between(h.mover, first, first, &took), EBB_OK);
    CHECK(took == 0);
    /* What was given back is set again, and not to be asked for before. */
    ebb_mover_unmark(h.mover, first);
    CHECK_EQ(ebb_mover_between(h.mover, first, last, &took), EBB_INVALID);
    CHECK_EQ(ebb_mover_mark(h.mover, ebb_mover_stream(h.mover), &later), EBB_OK);
    CHECK_EQ(later, first);
    haul_shut(&h);
}

static void a_few_events_serve_for_ever(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    enum { MANY = 200 };
    uint32_t marks[MANY];
    unsigned long made = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < MANY; i++)
            CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &marks[i]), EBB_OK);
        for (int i = 0; i < MANY; i++)
            ebb_mover_unmark(h.mover, marks[i]);
        if (h.c.sim && round)
            CHECK_EQ(ebbsim_calls("cuEventCreate"), made);
        made = h.c.sim ? ebbsim_calls("cuEventCreate") : 0;
    }
    haul_shut(&h);
}

static void a_capture_is_left_alone(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    CUstream s = core_lasting(&h.c);
    CUgraph graph;
    uint32_t first, last, none = 7;
    double took;
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &first), EBB_OK);
    MUST(h.c.driver.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL));
    CHECK_EQ(ebb_mover_mark(h.mover, s, &none), EBB_BUSY);
    CHECK_EQ(none, 0);
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &last), EBB_OK); /* others can be marked, */
    ebb_status status = ebb_mover_between(h.mover, first, last, &took);
    CHECK(status == EBB_OK || status == EBB_BUSY);                    /* and asked for */
    CHECK_EQ(h.c.driver.cuStreamEndCapture(s, &graph), CUDA_SUCCESS); /* it has survived */
    MUST(h.c.driver.cuGraphDestroy(graph));
    haul_shut(&h);
}

static void nonsense_is_refused(void)
{
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    uint32_t mark;
    double took;
    CHECK_EQ(ebb_mover_mark(NULL, h.compute, &mark), EBB_INVALID);
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, NULL), EBB_INVALID);
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &mark), EBB_OK);
    CHECK_EQ(ebb_mover_between(NULL, mark, mark, &took), EBB_INVALID);
    CHECK_EQ(ebb_mover_between(h.mover, mark, mark, NULL), EBB_INVALID);
    CHECK_EQ(ebb_mover_between(h.mover, 0, mark, &took), EBB_INVALID);
    CHECK_EQ(ebb_mover_between(h.mover, mark, 99, &took), EBB_INVALID);
    ebb_mover_unmark(NULL, mark);
    ebb_mover_unmark(h.mover, 0);
    ebb_mover_unmark(h.mover, 99);
    haul_shut(&h);
}

static void a_failure_leaves_all_as_it_was(void)
{
    NEEDS_SIM("calls must fail");
    haul h;
    haul_open(&h, 4 * LARGE, LARGE, 2 * LARGE);
    uint32_t first, last, lost;
    double took;
    static const char *const calls[] = {"cuEventCreate", "cuEventRecord"};
    for (int i = 0; i < 2; i++) {
        MUST(ebbsim_fail(calls[i], 1, 999));
        CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &lost), EBB_DRIVER_FAILED);
        CHECK_EQ(lost, 0);
        ebbsim_fail_clear();
    }
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &first), EBB_OK);
    CHECK_EQ(first, 1);
    CHECK_EQ(ebb_mover_mark(h.mover, h.compute, &last), EBB_OK);
    MUST(h.c.driver.cuStreamSynchronize(h.compute));
    MUST(ebbsim_fail("cuEventElapsedTime", 1, 999));
    CHECK_EQ(ebb_mover_between(h.mover, first, last, &took), EBB_DRIVER_FAILED);
    ebbsim_fail_clear();
    CHECK_EQ(ebb_mover_between(h.mover, first, last, &took), EBB_OK);
    /* The mover can go on if one of them cannot be given back, and goes when it is asked again. */
    uint64_t flags = h.mover->flag_count + !h.mover->flag_count; /* the end takes one, if need be */
    MUST(ebbsim_fail("cuEventDestroy", (unsigned long)flags + 2, 999));
    CHECK_EQ(ebb_mover_destroy(h.mover), EBB_DRIVER_FAILED);
    CHECK_EQ(h.mover->mark_count, 1);
    ebbsim_fail_clear();
    haul_shut(&h);
}

int main(void)
{
    RUN(the_gpu_s_time_is_told_when_it_has_passed);
    RUN(a_few_events_serve_for_ever);
    RUN(a_capture_is_left_alone);
    RUN(nonsense_is_refused);
    RUN(a_failure_leaves_all_as_it_was);
    return REPORT();
}

/* Fences: what is waited for, exactly; what is not; and in which order streams use a page. */
#include "rig.h"

/* A device of one page, on a virtual clock; two models that take it from each other. */
static void one_page(core *c, ebb_vbar *old, ebb_vbar *new)
{
    core_open(c, 512 * MIB, LARGE);
    rig_clock();
    *old = core_vbar(c, LARGE);
    *new = core_vbar(c, LARGE);
}

/* Nanoseconds a fault of the newer one takes. */
static uint64_t fault_time(ebb_vbar new, CUstream stream)
{
    uint64_t begin = rig_now(), signature;
    CHECK_EQ(ebb_vbar_fault(new, 0, LARGE, stream, &signature), EBB_OK);
    uint64_t end = rig_now();
    CHECK_EQ(ebb_vbar_unpin(new, 0, LARGE, stream), EBB_OK);
    return end - begin;
}

static void eviction_waits_for_the_victims_stream_exactly(void)
{
    core c;
    ebb_vbar old, new;
    one_page(&c, &old, &new);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    rig_busy(&c, old, 0, LARGE, rig_length(50), s);
    uint64_t queued = rig_now(), signature;
    CHECK_EQ(ebb_vbar_fault(new, 0, LARGE, t, &signature), EBB_OK);
    CHECK(rig_took(rig_now() - queued, rig_length(50)));
    CHECK_EQ(c.driver.cuStreamQuery(s), CUDA_SUCCESS);
    CHECK_EQ(core_device_stats(&c).waits, 1);
    CHECK_EQ(ebb_vbar_unpin(new, 0, LARGE, t), EBB_OK);
    core_close(&c);
}

static void eviction_waits_for_nobody_else(void)
{
    core c;
    ebb_vbar old, new;
    one_page(&c, &old, &new);
    CUstream s = core_lasting(&c), t = core_lasting(&c), other = core_lasting(&c);
    rig_busy(&c, old, 0, LARGE, 1000, s);
    CHECK_EQ(rig_kernel("long", 0, 0, 0, rig_forever(), other), 0);
    CHECK_EQ(rig_kernel("long", 0, 0, 0, rig_forever(), t), 0);
    CHECK(rig_took(fault_time(new, t), 0));
    CHECK_EQ(c.driver.cuStreamQuery(other), CUDA_ERROR_NOT_READY);
    CHECK_EQ(c.driver.cuStreamQuery(t), CUDA_ERROR_NOT_READY);
    core_check(&c);
    core_close(&c);
}

static void what_is_queued_after_the_unpin_is_not_waited_for_if_a_mark_was_made(void)
{
    core c;
    ebb_vbar old, new;
    one_page(&c, &old, &new);
    CUstream s = core_stream(&c), t = core_lasting(&c); /* not lasting: marked at the unpin */
    rig_busy(&c, old, 0, LARGE, rig_length(10), s);
    CHECK_EQ(rig_kernel("later", 0, 0, 0, rig_forever(), s), 0);
    CHECK(rig_took(fault_time(new, t), rig_length(10)));
    CHECK_EQ(c.driver.cuStreamQuery(s), CUDA_ERROR_NOT_READY);
    core_close(&c);
}

static void a_page_used_by_several_streams_waits_for_all_of_them(void)
{
    core c;
    ebb_vbar old, new;
    one_page(&c, &old, &new);
    CUstream s[5], t = core_lasting(&c);
    for (int i = 0; i < 5; i++)
        s[i] = i % 2 ? core_stream(&c) : i == 2 ? core_promised(&c) : core_lasting(&c);
    for (int i = 0; i < 5; i++)
        rig_busy(&c, old, 0, LARGE, rig_length((uint64_t)(i == 2 ? 40 : 1 + i)), s[i]);
    core_check(&c);
    uint64_t took = fault_time(new, t);
    CHECK(took > rig_length(40) / 2);
    for (int i = 0; i < 5; i++)
        CHECK_EQ(c.driver.cuStreamQuery(s[i]), CUDA_SUCCESS);
    core_close(&c);
}

static void importance_comes_before_speed(void)
{
    core c;
    core_open(&c, 512 * MIB, 2 * LARGE);
    rig_clock();
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, 2 * LARGE), new = core_vbar(&c, LARGE);
    rig_busy(&c, old, 0, LARGE, 1000, s);
    rig_busy(&c, old, LARGE, LARGE, rig_length(30), t);
    /* The top one is the victim, whatever that costs: importance comes first. */
    CHECK(rig_took(fault_time(new, s), rig_length(30)));
    CHECK_EQ(rig_page(old, 0), EBB_PAGE_RESIDENT);
    core_close(&c);
}

/* ---- order between streams ------------------------------------------------------------------------ */

static void a_hit_on_another_stream_comes_after_the_fill(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s[4] = {core_lasting(&c), core_stream(&c), core_lasting(&c), NULL};
    for (int from = 0; from < 4; from++)
        for (int to = 0; to < 4; to++) {
            ebb_vbar v = core_vbar(&c, LARGE);
            uint64_t filled, found;
            CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s[from], &filled), EBB_OK);
            if (!c.sim) /* without an order the fill would come too late */
                CHECK_EQ(rig_hold(20 * MILLISECOND, s[from]), 0);
            core_fill(&c, v, 0, LARGE, 10 + 4 * from + to, s[from]);
            CHECK_EQ(ebb_vbar_filled(v, 0, LARGE, s[from]), EBB_OK);
            /* The filler still has its pin. */
            CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s[to], &found), EBB_OK);
            CHECK_EQ(found, filled);
            CHECK_EQ(core_read(&c, v, 5 * MIB, s[to]), 10 + 4 * from + to);
            CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s[to]), EBB_OK);
            CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s[from]), EBB_OK);
            core_check(&c);
            CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
        }
    core_close(&c);
}

static void a_write_on_another_stream_comes_after_every_earlier_use(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s[5] = {core_lasting(&c), core_stream(&c), core_promised(&c), core_stream(&c), NULL};
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t signature, address = core_stats(v).address;
    unsigned char now = 0, seen[200] = {0}; /* what is there, by the order of the calls */
    for (int round = 0; round < 40; round++)
        for (int i = 0; i < 5; i++) {
            CUstream stream = s[(i * 3 + round) % 5];
            int use = 5 * round + i;
            CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, stream, &signature), EBB_OK);
            int access = use && (i + round) % 3 ? EBBSIM_READ : EBBSIM_WRITE;
            if (!c.sim) /* without an order the next one would overtake this one */
                CHECK_EQ(rig_hold(3 * MILLISECOND, stream), 0);
            if (c.sim)
                CHECK_EQ(rig_kernel("use", address, LARGE, access, 10000, stream), 0);
            else if (access == EBBSIM_WRITE)
                core_fill(&c, v, 0, LARGE, now = (unsigned char)(use + 1), stream);
            else
                MUST(c.driver.cuMemcpyDtoHAsync(c.host + use, address + LARGE - 1, 1, stream));
            seen[use] = access == EBBSIM_READ ? now : 0;
            if (access == EBBSIM_WRITE && round % 2)
                CHECK_EQ(ebb_vbar_filled(v, 0, LARGE, stream), EBB_OK);
            CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, stream), EBB_OK);
            core_check(&c);
        }
    for (int i = 0; i < 5; i++)
        MUST(c.driver.cuStreamSynchronize(s[i]));
    for (int use = 0; use < 200; use++)
        if (seen[use] && !c.sim)
            CHECK_EQ(c.host[use], seen[use]);
    core_close(&c);
}

static void once_the_other_stream_is_over_hits_cost_nothing_again(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 3 * LARGE);
    rig_busy(&c, v, 0, 3 * LARGE, 20000000, s); /* still busy when the other comes */
    rig_busy(&c, v, 0, 3 * LARGE, 1000, t);
    MUST(c.driver.cuStreamSynchronize(s));
    MUST(c.driver.cuStreamSynchronize(t));
    CHECK_EQ(rig_touch(v, 0, 3 * LARGE, t), EBB_OK); /* finds out, of all pages */
    ebb_device_stats first = core_device_stats(&c);
    unsigned long before = c.sim ? ebbsim_calls(NULL) : 0;
    unsigned long asked = c.sim ? ebbsim_calls("cuStreamIsCapturing") : 0;
    for (int i = 0; i < 50; i++)
        CHECK_EQ(rig_touch(v, 0, 3 * LARGE, t), EBB_OK);
    if (c.sim) {
        CHECK_EQ(ebbsim_calls("cuStreamIsCapturing") - asked, 50);
        CHECK_EQ(ebbsim_calls(NULL) - before, 50);
    }
    CHECK_EQ(core_device_stats(&c).orders, first.orders);
    CHECK_EQ(core_device_stats(&c).marks, first.marks);
    core_close(&c);
}

static void a_hit_on_its_own_stream_calls_no_driver(void)
{
    NEEDS_SIM("only a simulated GPU counts the driver's calls");
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 2 * LARGE);
    CHECK_EQ(rig_touch(v, 0, 2 * LARGE, s), EBB_OK);
    uint64_t signature;
    unsigned long before = ebbsim_calls(NULL);
    CHECK_EQ(ebb_vbar_fault(v, 0, 2 * LARGE, s, &signature), EBB_OK);
    CHECK_EQ(ebbsim_calls(NULL), before);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 2 * LARGE, s), EBB_OK);
    CHECK_EQ(ebbsim_calls(NULL), before + 1); /* whether it captures */
    core_close(&c);
}

/* ---- streams that come and go --------------------------------------------------------------------- */

static void a_stream_may_die_right_after_the_unpin(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    ebb_vbar v[2] = {core_vbar(&c, LARGE), core_vbar(&c, LARGE)};
    for (int i = 0; i < 60; i++) {
        CUstream s;
        MUST(c.driver.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
        ebb_vbar it = v[i % 2];
        uint64_t signature;
        CHECK_EQ(ebb_vbar_prioritize(it), EBB_OK);
        CHECK_EQ(ebb_vbar_fault(it, 0, LARGE, s, &signature), EBB_OK);
        CHECK_EQ(rig_kernel("write", core_stats(it).address, LARGE, EBBSIM_WRITE, rig_length(1), s),
                 0);
        CHECK_EQ(ebb_vbar_unpin(it, 0, LARGE, s), EBB_OK);
        MUST(c.driver.cuStreamDestroy(s));
        if (i % 3 == 0) { /* and again by a stream that may have the dead one's handle */
            MUST(c.driver.cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
            CHECK_EQ(ebb_vbar_fault(it, 0, LARGE, s, &signature), EBB_OK);
            CHECK_EQ(
                rig_kernel("write", core_stats(it).address, LARGE, EBBSIM_WRITE, rig_length(1), s),
                0);
            CHECK_EQ(ebb_vbar_unpin(it, 0, LARGE, s), EBB_OK);
            MUST(c.driver.cuStreamDestroy(s));
        }
        core_check(&c);
    }
    core_close(&c);
}

static void default_streams_are_streams_too(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    rig_clock();
    CUstream kinds[] = {NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD};
    CUstream t = core_lasting(&c);
    for (int i = 0; i < 3; i++) {
        ebb_vbar old = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
        rig_busy(&c, old, 0, LARGE, rig_length(20), kinds[i]);
        CHECK(rig_took(fault_time(new, t), rig_length(20)));
        core_check(&c);
        CHECK_EQ(ebb_vbar_destroy(old), EBB_OK);
        CHECK_EQ(ebb_vbar_destroy(new), EBB_OK);
    }
    /* The two names of the legacy stream are one stream: nothing to order. */
    ebb_vbar v = core_vbar(&c, LARGE);
    rig_busy(&c, v, 0, LARGE, 1000, NULL);
    uint64_t orders = core_device_stats(&c).orders;
    rig_busy(&c, v, 0, LARGE, 1000, CU_STREAM_LEGACY);
    CHECK_EQ(core_device_stats(&c).orders, orders);
    core_close(&c);
}

static void more_streams_than_can_be_told_apart(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    rig_clock();
    enum { STREAMS = 3000 };
    static CUstream streams[STREAMS];
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t signature, address = core_stats(v).address;
    for (int i = 0; i < STREAMS; i++) {
        MUST(c.driver.cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
        CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, streams[i], &signature), EBB_OK);
        CHECK_EQ(rig_kernel("write", address, LARGE, EBBSIM_WRITE, 1000, streams[i]), 0);
        CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, streams[i]), EBB_OK);
        if (i % 100 == 0)
            core_check(&c);
    }
    core_check(&c);
    if (c.sim)
        CHECK_EQ(ebbsim_calls("cuStreamSynchronize"), 0); /* slots are used again instead */
    /* A stream in a slot used again can be promised to last, and is told from the one before. */
    CHECK_EQ(ebb_device_keep_stream(c.device, streams[STREAMS - 1], 0), EBB_OK);
    rig_busy(&c, v, 0, LARGE, 1000, streams[STREAMS - 1]);
    rig_busy(&c, v, 0, LARGE, 1000, streams[0]);
    for (int i = 0; i < STREAMS; i++)
        MUST(c.driver.cuStreamDestroy(streams[i]));
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    core_close(&c);
}

static void more_busy_streams_than_can_be_told_apart_are_waited_for(void)
{
    core c;
    core_open(&c, 8192 * MIB, 8192 * MIB);
    rig_clock();
    enum { STREAMS = 2100, PAGES = 15 };
    static CUstream streams[STREAMS];
    ebb_vbar v[STREAMS / PAGES]; /* a page for each stream, so that there is nothing to order */
    CUstream first = core_stream(&c);
    CUevent over;
    MUST(c.driver.cuEventCreate(&over, CU_EVENT_DISABLE_TIMING));
    if (!c.sim) { /* one gate for all of them */
        CHECK_EQ(rig_kernel("long", 0, 0, 0, rig_forever(), first), 0);
        MUST(c.driver.cuEventRecord(over, first));
    }
    for (int i = 0; i < STREAMS; i++) {
        MUST(c.driver.cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
        MUST(c.driver.cuStreamWaitEvent(streams[i], over, 0));
        if (i % PAGES == 0)
            v[i / PAGES] = core_vbar(&c, PAGES * SMALL);
        rig_busy(&c, v[i / PAGES], (uint64_t)(i % PAGES) * SMALL, SMALL,
                 c.sim ? UINT64_C(1000) * MILLISECOND : 1000, streams[i]);
    }
    if (c.sim)
        CHECK(ebbsim_calls("cuStreamSynchronize") > 0);
    core_check(&c);
    for (int i = 0; i < STREAMS / PAGES; i++)
        CHECK_EQ(ebb_vbar_destroy(v[i]), EBB_OK);
    for (int i = 0; i < STREAMS; i++)
        MUST(c.driver.cuStreamDestroy(streams[i]));
    MUST(c.driver.cuEventDestroy(over));
    core_close(&c);
}

static void a_promise_made_late_counts_from_then_on(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_stream(&c);
    ebb_vbar v = core_vbar(&c, LARGE);
    rig_busy(&c, v, 0, LARGE, 100000, s);
    rig_busy(&c, v, 0, LARGE, 100000, s);
    uint64_t marks = core_device_stats(&c).marks;
    CHECK_EQ(marks, 2);
    CHECK_EQ(ebb_device_keep_stream(c.device, s, 0), EBB_OK);
    CHECK_EQ(ebb_device_keep_stream(c.device, s, 0), EBB_OK);
    for (int i = 0; i < 20; i++)
        rig_busy(&c, v, 0, LARGE, 1000, s);
    CHECK_EQ(core_device_stats(&c).marks, marks);
    CHECK_EQ(ebb_device_keep_stream(c.device, CU_STREAM_PER_THREAD, 0), EBB_INVALID);
    CHECK_EQ(ebb_device_keep_stream(c.device, NULL, 0), EBB_OK);
    core_close(&c);
}

static void a_mark_is_made_now_and_then(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, LARGE);
    for (int i = 0; i < 5000; i++)
        CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
    uint64_t marks = core_device_stats(&c).marks;
    CHECK(marks >= 5000 / 128 - 1 && marks <= 5000 / 64);
    core_check(&c);
    core_close(&c);
}

static void the_context_is_never_synchronised_and_nothing_is_freed_the_old_way(void)
{
    if (!core_sim())
        return;
    CHECK_EQ(ebbsim_calls("cuCtxSynchronize"), 0);
    CHECK_EQ(ebbsim_calls("cuMemFree"), 0);
    CHECK_EQ(ebbsim_calls("cuMemAlloc"), 0);
}

/* Every test of this file also shows that. */
#define RUN_QUIETLY(test)                                                                          \
    do {                                                                                           \
        RUN(test);                                                                                 \
        the_context_is_never_synchronised_and_nothing_is_freed_the_old_way();                      \
    } while (0)

int main(void)
{
    RUN_QUIETLY(eviction_waits_for_the_victims_stream_exactly);
    RUN_QUIETLY(eviction_waits_for_nobody_else);
    RUN_QUIETLY(what_is_queued_after_the_unpin_is_not_waited_for_if_a_mark_was_made);
    RUN_QUIETLY(a_page_used_by_several_streams_waits_for_all_of_them);
    RUN_QUIETLY(importance_comes_before_speed);
    RUN_QUIETLY(a_hit_on_another_stream_comes_after_the_fill);
    RUN_QUIETLY(a_write_on_another_stream_comes_after_every_earlier_use);
    RUN_QUIETLY(once_the_other_stream_is_over_hits_cost_nothing_again);
    RUN_QUIETLY(a_hit_on_its_own_stream_calls_no_driver);
    RUN_QUIETLY(a_stream_may_die_right_after_the_unpin);
    RUN_QUIETLY(default_streams_are_streams_too);
    RUN_QUIETLY(more_streams_than_can_be_told_apart);
    RUN_QUIETLY(more_busy_streams_than_can_be_told_apart_are_waited_for);
    RUN_QUIETLY(a_promise_made_late_counts_from_then_on);
    RUN_QUIETLY(a_mark_is_made_now_and_then);
    return REPORT();
}

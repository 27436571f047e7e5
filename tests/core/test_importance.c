/* Who gives way to whom: ranks, watermarks, giving up on request, and rising again. */
#include "rig.h"

/* Five models of two pages each, all resident, in a device that holds no more. */
static void five(core *c, ebb_vbar v[5], CUstream *s)
{
    core_open(c, 1024 * MIB, 10 * LARGE);
    *s = core_lasting(c);
    for (int i = 0; i < 5; i++) {
        v[i] = core_vbar(c, 2 * LARGE);
        CHECK_EQ(rig_touch(v[i], 0, 2 * LARGE, *s), EBB_OK);
    }
}

/* Which page is the next to go? As 10 * VBAR + page. */
static int victim(core *c, const ebb_vbar v[5], uint64_t limit)
{
    uint64_t before[5];
    for (int i = 0; i < 5; i++)
        before[i] = core_stats(v[i]).resident;
    CHECK_EQ(ebb_device_set_limit(c->device, limit), EBB_OK);
    for (int i = 0; i < 5; i++)
        if (core_stats(v[i]).resident != before[i])
            return 10 * i + (core_stats(v[i]).resident ? 1 : 0);
    return -1;
}

static void victims_go_least_important_first_top_down(void)
{
    core c;
    ebb_vbar v[5];
    CUstream s;
    five(&c, v, &s);
    CHECK_EQ(ebb_vbar_prioritize(v[1]), EBB_OK);
    CHECK_EQ(ebb_vbar_deprioritize(v[3]), EBB_OK);
    CHECK_EQ(ebb_vbar_deprioritize(v[4]), EBB_OK);
    CHECK_EQ(ebb_vbar_prioritize(v[0]), EBB_OK);
    static const int order[] = {41, 40, 31, 30, 21, 20, 11, 10, 1, 0};
    for (uint64_t i = 0; i < 10; i++) {
        CHECK_EQ(victim(&c, v, (9 - i) * LARGE), order[i]);
        core_check(&c);
    }
    for (int i = 0; i < 5; i++)
        CHECK_EQ(core_stats(v[i]).watermark, 0);
    CHECK(core_stats(v[0]).rank > core_stats(v[1]).rank);
    CHECK(core_stats(v[1]).rank > core_stats(v[2]).rank);
    CHECK(core_stats(v[2]).rank > core_stats(v[3]).rank);
    CHECK(core_stats(v[3]).rank > core_stats(v[4]).rank);
    core_close(&c);
}

static void two_that_trade_importance_change_nothing_else(void)
{
    core c;
    ebb_vbar v[5];
    CUstream s;
    five(&c, v, &s);
    CHECK_EQ(ebb_vbar_set_watermark(v[0], LARGE), EBB_OK);
    int64_t rank = core_stats(v[1]).rank;
    CHECK_EQ(ebb_vbar_trade(v[0], v[4]), EBB_OK);
    CHECK_EQ(ebb_vbar_trade(v[2], v[1]), EBB_OK);
    CHECK_EQ(ebb_vbar_trade(v[3], v[3]), EBB_OK);
    CHECK_EQ(core_stats(v[2]).rank, rank);
    CHECK_EQ(core_stats(v[0]).watermark, LARGE);
    core_check(&c);
    /* One without pages is in nobody's way, and has its importance all the same. */
    ebb_vbar made = core_vbar(&c, 2 * LARGE);
    CHECK_EQ(ebb_vbar_trade(made, v[4]), EBB_OK);
    CHECK_EQ(ebb_vbar_trade(v[4], made), EBB_OK);
    static const int order[] = {41, 40, 21, 20, 11, 10, 31, 30, 1, 0};
    for (uint64_t i = 0; i < 10; i++) {
        CHECK_EQ(victim(&c, v, (9 - i) * LARGE), order[i]);
        core_check(&c);
    }
    CHECK_EQ(ebb_vbar_destroy(made), EBB_OK);
    CHECK_EQ(ebb_vbar_trade(v[0], made), EBB_GONE);
    CHECK_EQ(ebb_vbar_trade(made, v[0]), EBB_GONE);
    core_close(&c);
}

static void a_weight_takes_from_less_important_ones_only(void)
{
    core c;
    ebb_vbar v[5];
    CUstream s;
    five(&c, v, &s);
    uint64_t freed;
    CHECK_EQ(ebb_vbar_free_memory(v[2], 2 * LARGE, &freed), EBB_OK);
    CHECK_EQ(freed, 2 * LARGE);
    ebb_vbar last = core_vbar(&c, 4 * LARGE);
    CHECK_EQ(ebb_vbar_deprioritize(last), EBB_OK);
    CHECK_EQ(rig_touch(last, 0, 2 * LARGE, s), EBB_OK); /* what was free */
    CHECK_EQ(rig_touch(last, 2 * LARGE, LARGE, s), EBB_OFFLOADED);
    CHECK_EQ(core_stats(last).resident, 2 * LARGE);
    /* In itself a lower page displaces a higher one, not the reverse. */
    CHECK_EQ(ebb_vbar_free_memory(last, LARGE, &freed), EBB_OK);
    CHECK_EQ(core_stats(last).watermark, LARGE);
    CHECK_EQ(ebb_vbar_prioritize(last), EBB_OK);
    CHECK_EQ(ebb_vbar_deprioritize(last), EBB_OK);
    CHECK_EQ(rig_touch(last, 3 * LARGE, LARGE, s), EBB_OK);
    CHECK_EQ(rig_touch(last, LARGE, LARGE, s), EBB_OK);
    CHECK_EQ(rig_page(last, 3), 0);
    CHECK_EQ(core_stats(last).watermark, 3 * LARGE);
    for (int i = 0; i < 5; i++)
        CHECK_EQ(core_stats(v[i]).resident, i == 2 ? 0 : 2 * LARGE);
    core_close(&c);
}

static void pinned_pages_are_passed_over(void)
{
    core c;
    ebb_vbar v[5];
    CUstream s;
    five(&c, v, &s);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v[0], LARGE, LARGE, s, &signature), EBB_OK);
    CHECK_EQ(victim(&c, v, 9 * LARGE), 0 + 1); /* v[0] has a page left, the pinned one */
    CHECK_EQ(rig_page(v[0], 0), 0);
    CHECK_EQ(rig_page(v[0], 1), EBB_PAGE_RESIDENT | EBB_PAGE_PINNED);
    CHECK_EQ(core_stats(v[0]).watermark, 0);
    /* Above the watermark and still resident: a hit. */
    CHECK_EQ(rig_touch(v[0], LARGE, LARGE, s), EBB_OK);
    CHECK_EQ(victim(&c, v, 8 * LARGE), 10 + 1);
    core_check(&c);
    CHECK_EQ(ebb_vbar_unpin(v[0], LARGE, LARGE, s), EBB_OK);
    CHECK_EQ(victim(&c, v, 7 * LARGE), 0);
    core_close(&c);
}

static void the_watermark_and_its_limit(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 2 * LARGE + 2 * SMALL);
    CHECK_EQ(rig_touch(v, 0, 2 * LARGE + 2 * SMALL, s), EBB_OK);
    CHECK_EQ(ebb_vbar_set_watermark(v, LARGE), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    CHECK_EQ(core_stats(v).resident, 2 * LARGE + 2 * SMALL); /* nobody is thrown out */
    CHECK_EQ(rig_touch(v, LARGE, LARGE, s), EBB_OK);
    uint64_t freed;
    CHECK_EQ(ebb_vbar_free_memory(v, LARGE + 2 * SMALL, &freed), EBB_OK);
    CHECK_EQ(freed, LARGE + 2 * SMALL);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    CHECK_EQ(rig_touch(v, LARGE - 1, 2, s), EBB_OFFLOADED);
    CHECK_EQ(rig_touch(v, LARGE - 1, 1, s), EBB_OK);
    /* Between pages: the page that begins below it counts as below. */
    CHECK_EQ(ebb_vbar_set_watermark(v, LARGE + 1), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, 2 * LARGE);
    CHECK_EQ(ebb_vbar_set_watermark(v, 2 * LARGE + SMALL), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, 2 * LARGE + SMALL);
    CHECK_EQ(ebb_vbar_set_watermark(v, UINT64_MAX), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, 2 * LARGE + 2 * SMALL);
    CHECK_EQ(ebb_vbar_set_watermark_limit(v, LARGE), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    CHECK_EQ(ebb_vbar_set_watermark(v, UINT64_MAX), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    CHECK_EQ(ebb_vbar_set_watermark(v, 0), EBB_OK);
    CHECK_EQ(ebb_vbar_prioritize(v), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    CHECK_EQ(ebb_vbar_set_watermark_limit(v, UINT64_MAX), EBB_OK);
    CHECK_EQ(core_stats(v).watermark_limit, 2 * LARGE + 2 * SMALL);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    core_close(&c);
}

static void giving_up_on_request_returns_memory_to_the_driver(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 2 * LARGE + 2 * SMALL);
    CHECK_EQ(rig_touch(v, 0, 2 * LARGE + 2 * SMALL, s), EBB_OK);
    uint64_t before = core_device_stats(&c).free, freed;
    CHECK_EQ(ebb_vbar_free_memory(v, 1, &freed), EBB_OK);
    CHECK_EQ(freed, SMALL);
    CHECK_EQ(core_device_stats(&c).free, before + SMALL);
    CHECK_EQ(core_stats(v).watermark, 2 * LARGE + SMALL);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, LARGE, 1, s, &signature), EBB_OK);
    CHECK_EQ(ebb_vbar_free_memory(v, UINT64_MAX, NULL), EBB_OK);
    CHECK_EQ(core_stats(v).resident, LARGE);
    CHECK_EQ(core_stats(v).watermark, 0);
    CHECK_EQ(core_stats(v).evictions[EBB_FOR_ASKING], 3);
    CHECK_EQ(ebb_vbar_unpin(v, LARGE, 1, s), EBB_OK);
    core_close(&c);
}

/* ---- rising ------------------------------------------------------------------------------------- */

static void a_watermark_rises_again_when_memory_is_free(void)
{
    core c;
    core_open(&c, 1024 * MIB, EBB_DEFAULT);
    CUstream s = core_lasting(&c);
    ebb_vbar rising = rig_rising(&c, 4 * LARGE), still = core_vbar(&c, 4 * LARGE);
    CHECK_EQ(rig_touch(rising, 0, 4 * LARGE, s), EBB_OK);
    CHECK_EQ(rig_touch(still, 0, 4 * LARGE, s), EBB_OK);
    CHECK_EQ(ebb_device_set_limit(c.device, 0), EBB_OK);
    CHECK_EQ(rig_touch(rising, 0, LARGE, s), EBB_OFFLOADED);
    CHECK_EQ(ebb_device_set_limit(c.device, EBB_DEFAULT), EBB_OK);
    int rounds = 0;
    while (core_stats(rising).resident < 4 * LARGE && rounds++ < 200)
        for (uint64_t i = 0; i < 4; i++) {
            rig_touch(rising, i * LARGE, LARGE, s);
            CHECK_EQ(rig_touch(still, i * LARGE, LARGE, s), EBB_OFFLOADED);
        }
    CHECK(rounds < 20);
    CHECK_EQ(core_stats(rising).watermark, 4 * LARGE);
    core_check(&c);
    core_close(&c);
}

static void a_rise_leaves_a_margin_and_takes_from_nobody(void)
{
    core c;
    core_open(&c, 1024 * MIB, 8 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar other = core_vbar(&c, 4 * LARGE), rising = rig_rising(&c, 8 * LARGE);
    CHECK_EQ(rig_touch(other, 0, 4 * LARGE, s), EBB_OK);
    CHECK_EQ(ebb_vbar_set_watermark(rising, 0), EBB_OK);
    for (int round = 0; round < 100; round++) {
        /* One by one, and all at once: neither may count on the same free memory twice. */
        ebb_range ranges[3] = {{0, LARGE}, {LARGE, LARGE}, {2 * LARGE, 5 * LARGE}};
        uint64_t signatures[3];
        if (ebb_vbar_fault_many(rising, ranges, 3, s, signatures) == EBB_OK)
            CHECK_EQ(ebb_vbar_unpin_many(rising, ranges, 3, s), EBB_OK);
        for (uint64_t i = 0; i < 8; i++)
            rig_touch(rising, i * LARGE, LARGE, s);
    }
    CHECK(core_stats(rising).resident >= 2 * LARGE);
    CHECK(core_stats(rising).resident < 4 * LARGE);
    CHECK_EQ(core_stats(other).resident, 4 * LARGE);
    core_close(&c);
}

static void alternating_pressure_does_not_make_it_thrash(void)
{
    core c;
    core_open(&c, 1024 * MIB, EBB_DEFAULT);
    CUstream s = core_lasting(&c);
    ebb_vbar v = rig_rising(&c, 8 * LARGE);
    CHECK_EQ(rig_touch(v, 0, 8 * LARGE, s), EBB_OK);
    for (int round = 0; round < 500; round++) {
        CHECK_EQ(ebb_device_set_limit(c.device, 4 * LARGE), EBB_OK);
        for (uint64_t i = 0; i < 8; i++)
            rig_touch(v, i * LARGE, LARGE, s);
        CHECK_EQ(ebb_device_set_limit(c.device, EBB_DEFAULT), EBB_OK);
        for (uint64_t i = 0; i < 8; i++)
            rig_touch(v, i * LARGE, LARGE, s);
    }
    /* Doing as the pressure does would be 2,000 evictions. */
    uint64_t evictions = core_stats(v).evictions[EBB_FOR_LIMIT];
    CHECK(evictions >= 4 && evictions <= 4 * 10);
    /* And when the pressure is over for good, it comes back all the same. */
    for (int round = 0; round < 5000 && core_stats(v).resident < 8 * LARGE; round++)
        for (uint64_t i = 0; i < 8; i++)
            rig_touch(v, i * LARGE, LARGE, s);
    CHECK_EQ(core_stats(v).resident, 8 * LARGE);
    core_close(&c);
}

int main(void)
{
    RUN(victims_go_least_important_first_top_down);
    RUN(two_that_trade_importance_change_nothing_else);
    RUN(a_weight_takes_from_less_important_ones_only);
    RUN(pinned_pages_are_passed_over);
    RUN(the_watermark_and_its_limit);
    RUN(giving_up_on_request_returns_memory_to_the_driver);
    RUN(a_watermark_rises_again_when_memory_is_free);
    RUN(a_rise_leaves_a_margin_and_takes_from_nobody);
    RUN(alternating_pressure_does_not_make_it_thrash);
    return REPORT();
}

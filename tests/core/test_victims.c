/* Which of several victims goes: those that can at once, if that is enough. */
#include "kit.h"

static void a_page_the_gpu_still_uses_stays_if_another_is_enough(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE + SMALL);
    if (!c.sim)
        SKIP("how long work takes is said to the simulated GPU");
    ebbsim_clock_virtual(1);
    CUstream s = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, LARGE + SMALL);
    uint64_t of_old[2] = {0}, signature;
    CHECK_EQ(core_use(&c, old, 0, 1, &of_old[0], 1, NULL), EBB_OK);
    MUST(c.driver.cuStreamSynchronize(NULL));
    /* The small page on top would go first, and is in use for a second. */
    CHECK_EQ(ebb_vbar_fault(old, LARGE, 1, s, &of_old[1]), EBB_OK);
    ebbsim_range range = {core_stats(old).address + LARGE, 1, EBBSIM_READ};
    ebbsim_work work = {.size = sizeof work,
                        .name = "long",
                        .ranges = &range,
                        .range_count = 1,
                        .nanoseconds = 1000000000};
    MUST(ebbsim_launch(&work, s));
    CHECK_EQ(ebb_vbar_unpin(old, LARGE, 1, s), EBB_OK);

    /* Two small pages: the small one and the large one are chosen, the large one is enough. */
    ebb_vbar new = core_vbar(&c, 2 * SMALL);
    uint64_t before = ebbsim_now();
    CHECK_EQ(ebb_vbar_fault(new, 0, 2 * SMALL, NULL, &signature), EBB_OK);
    CHECK(ebbsim_now() - before < 500000000);
    uint8_t map[2];
    CHECK_EQ(ebb_vbar_residency(old, map, 2), EBB_OK);
    CHECK(!map[0] && map[1] == EBB_PAGE_RESIDENT);
    CHECK_EQ(core_device_stats(&c).waits, 0);
    CHECK_EQ(ebb_vbar_fault(old, LARGE, 1, s, &signature), EBB_OK);
    CHECK_EQ(signature, of_old[1]);
    CHECK_EQ(ebb_vbar_unpin(old, LARGE, 1, s), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin(new, 0, 2 * SMALL, NULL), EBB_OK);
    core_close(&c);
}

int main(void)
{
    RUN(a_page_the_gpu_still_uses_stays_if_another_is_enough);
    return REPORT();
}

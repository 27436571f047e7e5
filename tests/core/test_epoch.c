/*
 * An epoch ends before its event is recorded: whoever unpins between the two, without the lock, is
 * not taken to be covered by the event. The driver is made to let a user in at that very moment.
 */
#include <dlfcn.h>

#include "rig.h"

static core c;
static ebb_vbar in_between;
static CUstream stream;
static unsigned long unpins;

static uint64_t address;

/* As another thread would: work, then an unpin, neither of which takes a lock. */
static void late_work(void)
{
    unpins++;
    CHECK_EQ(rig_kernel("late", address, LARGE, EBBSIM_READ, 5 * MILLISECOND, stream), 0);
    CHECK_EQ(ebb_vbar_unpin(in_between, 0, LARGE, stream), EBB_OK);
}

static void an_unpin_after_the_event_is_not_covered_by_it(void)
{
    void *library = dlopen(HOOK_LIBRARY, RTLD_NOW);
    void *sim = dlopen(SIM_LIBRARY, RTLD_NOW);
    REQUIRE(library && sim);
    void (*over)(void *) = (void (*)(void *))dlsym(library, "hook_over");
    over(dlsym(sim, "cuGetProcAddress_v2"));
    void (**hook)(void) = dlsym(library, "hook_after_record");

    rig_cards(1, 512 * MIB, 1);
    ebb_device_options options = {
        .size = sizeof options, .library = HOOK_LIBRARY, .limit = 2 * LARGE};
    MUST(ebb_device_open(&options, &c.device, NULL, 0));
    c.sim = true;
    core_driver(&c);
    stream = core_lasting(&c);
    ebb_vbar other = core_vbar(&c, LARGE);
    in_between = core_vbar(&c, LARGE);
    address = core_stats(in_between).address;
    uint64_t signature;
    rig_busy(&c, other, 0, LARGE, 1000, stream);
    rig_busy(&c, in_between, 0, LARGE, 1000, stream);
    CHECK_EQ(ebb_vbar_fault(in_between, 0, LARGE, stream, &signature), EBB_OK);

    *hook = late_work; /* when the other's fence is marked, in_between is used and unpinned */
    CHECK_EQ(ebb_vbar_free_memory(other, LARGE, NULL), EBB_OK);
    *hook = NULL;
    CHECK_EQ(unpins, 1);
    CHECK_EQ(core_stats(in_between).pinned, 0);
    CHECK_EQ(ebb_vbar_free_memory(in_between, LARGE, NULL), EBB_OK);
    CHECK_EQ(core_stats(in_between).resident, 0);
    CHECK_EQ(ebbsim_hazards(), 0);
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    MUST(c.driver.cuStreamDestroy(stream));
    MUST(c.driver.cuDevicePrimaryCtxRelease(0));
    CHECK_EQ(rig_left(), 0);
}

int main(void)
{
    if (getenv("EBBTIDE_TEST_GPU"))
        SKIP("the driver is the simulated GPU's");
    RUN(an_unpin_after_the_event_is_not_covered_by_it);
    return REPORT();
}

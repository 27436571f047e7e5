/*
 * An epoch ends before its event is recorded: whoever unpins between the two, without the lock, is
 * not taken to be covered by the event. The driver is made to let a user in at that very moment.
 */
#include <dlfcn.h>
#include <pthread.h>

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
    CHECK_EQ(rig_kernel("late", address, LARGE, EBBSIM_READ, rig_length(60), stream), 0);
    CHECK_EQ(ebb_vbar_unpin(in_between, 0, LARGE, stream), EBB_OK);
}

/* Set: called after each question whether a stream captures. */
static void (**asked)(void);

/* The stream's owner captures for a while. */
static void *begin(void *data)
{
    (void)data;
    MUST(c.driver.cuCtxSetCurrent(c.context));
    MUST(c.driver.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
    rig_sleep(50 * MILLISECOND);
    CUgraph graph = NULL;
    CHECK_EQ(c.driver.cuStreamEndCapture(stream, &graph), CUDA_SUCCESS);
    if (graph)
        c.driver.cuGraphDestroy(graph);
    return NULL;
}
static pthread_t thread;
static void start(void)
{
    *asked = NULL;
    pthread_create(&thread, NULL, begin, NULL);
    rig_sleep(20 * MILLISECOND);
}

static void a_capture_that_begins_between_question_and_record_survives(void)
{
    if (getenv("EBBTIDE_TEST_GPU"))
        SKIP_TEST("the moment is found in the simulator only");
    void *library = dlopen(HOOK_LIBRARY, RTLD_NOW), *sim = dlopen(SIM_LIBRARY, RTLD_NOW);
    REQUIRE(library && sim);
    void (*over)(void *) = (void (*)(void *))dlsym(library, "hook_over");
    over(dlsym(sim, "cuGetProcAddress_v2"));
    asked = dlsym(library, "hook_after_asking");
    rig_cards(1, 512 * MIB, 1);
    ebb_device_options options = {.size = sizeof options, .library = HOOK_LIBRARY, .limit = LARGE};
    MUST(ebb_device_open(&options, &c.device, NULL, 0));
    core_driver(&c);
    stream = core_lasting(&c);
    CUstream t = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
    rig_busy(&c, old, 0, LARGE, 1000, stream);
    *asked = start;
    /* The mark went into the capture, which nobody may disturb: the page cannot be had now. */
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OFFLOADED);
    pthread_join(thread, NULL);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
    CHECK_EQ(ebbsim_hazards(), 0);
    core_check(&c);
    CHECK_EQ(ebb_vbar_destroy(old), EBB_OK);
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    while (c.stream_count)
        MUST(c.driver.cuStreamDestroy(c.streams[--c.stream_count]));
    MUST(c.driver.cuDevicePrimaryCtxRelease(0));
    ebb__driver_close(&c.driver);
    c = (core){0};
}

static void an_unpin_after_the_event_is_not_covered_by_it(void)
{
    void *library = dlopen(HOOK_LIBRARY, RTLD_NOW);
    const char *named = core_sim() ? SIM_LIBRARY : getenv("EBBTIDE_DRIVER");
    void *driver = dlopen(named ? named : "libcuda.so.1", RTLD_NOW);
    REQUIRE(library && driver);
    void (*over)(void *) = (void (*)(void *))dlsym(library, "hook_over");
    over(dlsym(driver, "cuGetProcAddress_v2"));
    void (**hook)(void) = dlsym(library, "hook_after_record");

    rig_cards(1, 512 * MIB, 1);
    ebb_device_options options = {
        .size = sizeof options, .library = HOOK_LIBRARY, .limit = 2 * LARGE};
    MUST(ebb_device_open(&options, &c.device, NULL, 0));
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
    CHECK_EQ(c.driver.cuStreamQuery(stream), CUDA_SUCCESS);
    if (c.sim)
        CHECK_EQ(ebbsim_hazards(), 0);
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    MUST(c.driver.cuStreamDestroy(stream));
    core_release(&c);
    CHECK_EQ(rig_left(), 0);
}

int main(void)
{
    RUN(a_capture_that_begins_between_question_and_record_survives);
    RUN(an_unpin_after_the_event_is_not_covered_by_it);
    return REPORT();
}

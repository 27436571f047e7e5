/* Frames: recycled, converted, trimmed, exportable, for peers; and what the driver will not take. */
#include <unistd.h>

#include "rig.h"

static void frames_are_recycled_and_trimmed(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar a = core_vbar(&c, 64 * MIB);
    CHECK_EQ(rig_touch(a, 0, 64 * MIB, s), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(a), EBB_OK);
    CHECK_EQ(core_device_stats(&c).unused, 64 * MIB);
    ebb_vbar b = core_vbar(&c, 96 * MIB);
    CHECK_EQ(rig_touch(b, 0, 96 * MIB, s), EBB_OK);
    CHECK_EQ(core_device_stats(&c).frames_created, 3);
    CHECK_EQ(core_device_stats(&c).frames_recycled, 2);
    CHECK_EQ(ebb_vbar_destroy(b), EBB_OK);
    uint64_t freed;
    CHECK_EQ(ebb_device_trim(c.device, &freed), EBB_OK);
    CHECK_EQ(freed, 96 * MIB);
    CHECK_EQ(ebb_device_trim(c.device, &freed), EBB_OK);
    CHECK_EQ(freed, 0);
    CHECK_EQ(core_device_stats(&c).held, 0);
    CHECK_EQ(core_device_stats(&c).frames_released, 3);
    core_close(&c);
}

static void one_size_becomes_the_other_under_the_limit(void)
{
    core c;
    core_open(&c, 512 * MIB, 64 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar small = core_vbar(&c, 30 * MIB), large = core_vbar(&c, 64 * MIB);
    /* Free small frames make a large one... */
    CHECK_EQ(rig_touch(small, 0, 30 * MIB, s), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(small), EBB_OK);
    CHECK_EQ(core_device_stats(&c).unused, 30 * MIB);
    CHECK_EQ(rig_touch(large, 0, 64 * MIB, s), EBB_OK);
    CHECK_EQ(core_device_stats(&c).held, 64 * MIB);
    /* ...and one large victim makes many small ones, one victim being enough. */
    ebb_vbar newer = core_vbar(&c, 30 * MIB);
    CHECK_EQ(rig_touch(newer, 0, 30 * MIB, s), EBB_OK);
    CHECK_EQ(core_stats(large).resident, 32 * MIB);
    CHECK_EQ(core_stats(newer).resident, 30 * MIB);
    CHECK_EQ(core_device_stats(&c).held, 62 * MIB);
    core_check(&c);
    /* Small victims for a large page: as many as it takes, no more. */
    CHECK_EQ(ebb_vbar_prioritize(large), EBB_OK);
    CHECK_EQ(rig_touch(large, 0, 64 * MIB, s), EBB_OK);
    CHECK_EQ(core_stats(newer).resident, 0);
    core_close(&c);
}

static void small_victims_make_a_large_frame_and_the_rest_stay(void)
{
    core c;
    core_open(&c, 512 * MIB, 60 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar a = core_vbar(&c, 30 * MIB), b = core_vbar(&c, 30 * MIB), large = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(a, 0, 30 * MIB, s), EBB_OK);
    CHECK_EQ(rig_touch(b, 0, 30 * MIB, s), EBB_OK);
    CHECK_EQ(rig_touch(large, 0, LARGE, s), EBB_OK);
    CHECK_EQ(core_stats(a).resident, 0);
    CHECK_EQ(core_stats(b).resident, 28 * MIB);
    CHECK_EQ(core_device_stats(&c).held, 60 * MIB);
    core_close(&c);
}

static void a_page_can_be_exported(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, 34 * MIB);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, 0, 34 * MIB, NULL, &signature), EBB_OK);
    for (int i = 0; i < 2; i++) {
        CUmemGenericAllocationHandle handle;
        CUdeviceptr address = core_stats(v).address + (i ? LARGE : 0);
        MUST(c.driver.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address));
        CUmemAllocationProp properties;
        MUST(c.driver.cuMemGetAllocationPropertiesFromHandle(&properties, handle));
        CHECK_EQ(properties.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        CHECK_EQ(properties.location.id, 0);
        int file = -1;
        CHECK_EQ(c.driver.cuMemExportToShareableHandle(&file, handle,
                                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 CUDA_SUCCESS);
        CHECK(file >= 0);
        close(file);
        MUST(c.driver.cuMemRelease(handle));
    }
    CHECK_EQ(ebb_vbar_unpin(v, 0, 34 * MIB, NULL), EBB_OK);
    core_close(&c);
}

static void a_peer_may_work_on_a_page(void)
{
    rig_cards(2, 256 * MIB, 1);
    core c = {.sim = true};
    MUST(rig_device(0, 128 * MIB, &c.device, NULL, 0));
    core_driver(&c);
    ebb_vbar v = core_vbar(&c, 34 * MIB);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, 0, 34 * MIB, NULL, &signature), EBB_OK);
    CUcontext peer;
    CUstream stream;
    MUST(c.driver.cuDevicePrimaryCtxRetain(&peer, 1));
    MUST(c.driver.cuCtxPushCurrent(peer));
    MUST(c.driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CHECK_EQ(rig_kernel("peer", core_stats(v).address, 34 * MIB, EBBSIM_WRITE, 1000, stream), 0);
    MUST(c.driver.cuStreamSynchronize(stream));
    MUST(c.driver.cuStreamDestroy(stream));
    CUcontext popped;
    MUST(c.driver.cuCtxPopCurrent(&popped));
    CHECK_EQ(ebbsim_hazards(), 0);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 34 * MIB, NULL), EBB_OK);
    MUST(c.driver.cuDevicePrimaryCtxRelease(1));
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    MUST(c.driver.cuDevicePrimaryCtxRelease(0));
    CHECK_EQ(rig_left(), 0);
}

static void a_card_without_peers_gets_access_alone(void)
{
    rig_cards(2, 256 * MIB, 0);
    ebb_device device;
    MUST(rig_device(1, 128 * MIB, &device, NULL, 0));
    ebb_vbar_options options = {.size = sizeof options, .bytes = LARGE};
    ebb_vbar v;
    MUST(ebb_vbar_create(device, &options, &v));
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    CHECK_EQ(ebb_device_close(device), EBB_OK);
    CHECK_EQ(rig_left(), 0);
}

/* ---- a driver in a bad mood ----------------------------------------------------------------------- */

static void a_driver_that_is_not_ready_is_asked_again(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    for (unsigned long i = 1; i <= 3; i++)
        MUST(ebbsim_fail("cuMemSetAccess", i, 600));
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    CHECK_EQ(ebbsim_failures(), 3);
    CHECK_EQ(core_device_stats(&c).retries, 1); /* one call, that passed when tried again */
    core_close(&c);
}

static void a_driver_that_is_never_ready_is_given_up(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    for (unsigned long i = 1; i <= 5000; i++)
        MUST(ebbsim_fail("cuMemSetAccess", i, 600));
    unsigned long before = ebbsim_calls("cuMemSetAccess");
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_DRIVER_FAILED);
    CHECK(ebbsim_calls("cuMemSetAccess") - before <= 1000);
    CHECK_EQ(core_device_stats(&c).retries, 0);
    char why[200];
    CHECK_EQ(ebb_device_failure(c.device, why, sizeof why), EBB_OK);
    CHECK_HAS(why, "cuMemSetAccess");
    CHECK_EQ(rig_page(v, 0), 0);
    CHECK_EQ(core_device_stats(&c).unused, LARGE);
    core_check(&c);
    ebbsim_fail_clear();
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    core_close(&c);
}

static void a_page_that_cannot_be_unmapped_is_poisoned_and_goes_later(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    CHECK_EQ(rig_touch(v, 0, 64 * MIB, s), EBB_OK);
    MUST(ebbsim_fail("cuMemUnmap", 1, 999));
    uint64_t freed = 0;
    CHECK_EQ(ebb_vbar_free_memory(v, LARGE, &freed), EBB_OK);
    CHECK_EQ(freed, LARGE); /* the next one */
    CHECK_EQ(rig_page(v, 1), EBB_PAGE_POISONED);
    CHECK_EQ(rig_page(v, 0), 0);
    CHECK_EQ(core_device_stats(&c).poisoned, LARGE);
    CHECK_EQ(core_device_stats(&c).held, LARGE);
    CHECK_EQ(core_device_stats(&c).resident, 0);
    core_check(&c);
    CHECK_EQ(ebb_vbar_prioritize(v), EBB_OK);
    CHECK_EQ(rig_touch(v, LARGE, LARGE, s), EBB_OFFLOADED);
    CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);

    MUST(ebbsim_fail("cuMemUnmap", 1, 999));
    CHECK_EQ(ebb_vbar_destroy(v), EBB_DRIVER_FAILED);
    core_check(&c);
    CHECK_EQ(core_stats(v).pages, 2); /* still there */
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    CHECK_EQ(core_device_stats(&c).poisoned, 0);
    core_close(&c);
}

static void a_page_that_got_stuck_half_mapped_is_poisoned_too(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    MUST(ebbsim_fail("cuMemSetAccess", 1, 1));
    MUST(ebbsim_fail("cuMemUnmap", 1, 1));
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_DRIVER_FAILED);
    CHECK_EQ(rig_page(v, 0), EBB_PAGE_POISONED);
    CHECK_EQ(core_device_stats(&c).poisoned, LARGE);
    core_check(&c);
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OFFLOADED);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    CHECK_EQ(core_device_stats(&c).unused, LARGE);
    core_close(&c);
}

static void a_victim_that_will_not_go_is_not_the_last_one_asked(void)
{
    core c;
    core_open(&c, 256 * MIB, 64 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 64 * MIB);
    CHECK_EQ(rig_touch(v, 0, 64 * MIB, s), EBB_OK);
    ebb_vbar new = core_vbar(&c, LARGE);
    MUST(ebbsim_fail("cuMemUnmap", 1, 999));
    CHECK_EQ(rig_touch(new, 0, LARGE, s), EBB_OK);
    CHECK_EQ(rig_page(v, 1), EBB_PAGE_POISONED);
    CHECK_EQ(rig_page(v, 0), 0);
    core_close(&c);
}

static void a_frame_that_cannot_be_released_is_counted_and_tried_again(void)
{
    core c;
    core_open(&c, 256 * MIB, 64 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    MUST(ebbsim_fail("cuMemRelease", 1, 999));
    MUST(ebbsim_fail("cuMemRelease", 2, 999)); /* trimming the other size tries again */
    uint64_t freed;
    CHECK_EQ(ebb_device_trim(c.device, &freed), EBB_OK);
    CHECK_EQ(freed, 0);
    CHECK_EQ(core_device_stats(&c).poisoned, LARGE);
    CHECK_EQ(core_device_stats(&c).held, LARGE);
    core_check(&c);
    CHECK_EQ(ebb_device_trim(c.device, &freed), EBB_OK);
    CHECK_EQ(freed, LARGE);
    CHECK_EQ(core_device_stats(&c).held, 0);
    core_close(&c);
}

static void closing_gives_everything_back_or_can_be_tried_again(void)
{
    static const char *const calls[] = {"cuMemRelease", "cuEventDestroy", "cuMemUnmap",
                                        "cuMemAddressFree", "cuDevicePrimaryCtxRelease"};
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        rig_cards(1, 256 * MIB, 1);
        ebb_device device;
        MUST(rig_device(0, 128 * MIB, &device, NULL, 0));
        ebb_vbar_options options = {.size = sizeof options, .bytes = 2 * MIB};
        ebb_vbar v;
        MUST(ebb_vbar_create(device, &options, &v));
        CHECK_EQ(rig_touch(v, 0, 1, NULL), EBB_OK);
        MUST(ebbsim_fail(calls[i], 1, 999));
        CHECK_EQ(ebb_device_close(device), EBB_DRIVER_FAILED);
        CHECK_EQ(ebbsim_failures(), 1);
        char why[200];
        CHECK_EQ(ebb_device_failure(device, why, sizeof why), EBB_OK);
        CHECK_HAS(why, calls[i]);
        CHECK_EQ(ebb_check(device, NULL, 0), EBB_OK);
        CHECK_EQ(ebb_device_close(device), EBB_OK);
        CHECK_EQ(rig_left(), 0);
    }
}

int main(void)
{
    if (getenv("EBBTIDE_TEST_GPU"))
        SKIP("only a simulated GPU can be made to fail");
    RUN(frames_are_recycled_and_trimmed);
    RUN(one_size_becomes_the_other_under_the_limit);
    RUN(small_victims_make_a_large_frame_and_the_rest_stay);
    RUN(a_page_can_be_exported);
    RUN(a_peer_may_work_on_a_page);
    RUN(a_card_without_peers_gets_access_alone);
    RUN(a_driver_that_is_not_ready_is_asked_again);
    RUN(a_driver_that_is_never_ready_is_given_up);
    RUN(a_page_that_cannot_be_unmapped_is_poisoned_and_goes_later);
    RUN(a_page_that_got_stuck_half_mapped_is_poisoned_too);
    RUN(a_victim_that_will_not_go_is_not_the_last_one_asked);
    RUN(a_frame_that_cannot_be_released_is_counted_and_tried_again);
    RUN(closing_gives_everything_back_or_can_be_tried_again);
    return REPORT();
}

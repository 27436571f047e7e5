/* Devices: opened, opened again, limited while running, closed; and what is said when they cannot. */
#include "rig.h"

static void the_same_gpu_twice_is_one_device(void)
{
    rig_cards(2, 256 * MIB, 1);
    ebb_device a, b, other;
    CHECK_EQ(rig_device(0, 64 * MIB, &a, NULL, 0), EBB_OK);
    CHECK_EQ(rig_device(0, 32 * MIB, &b, NULL, 0), EBB_OK);
    CHECK_EQ(a.id, b.id);
    ebb_device_stats stats = {.size = sizeof stats};
    CHECK_EQ(ebb_device_get_stats(b, &stats), EBB_OK);
    CHECK_EQ(stats.limit, 64 * MIB);
    CHECK_EQ(rig_device(1, EBB_DEFAULT, &other, NULL, 0), EBB_OK);
    CHECK(other.id != a.id);
    CHECK_EQ(ebb_device_close(a), EBB_OK);
    CHECK_EQ(ebb_device_get_stats(a, &stats), EBB_OK);
    CHECK_EQ(ebb_device_close(b), EBB_OK);
    CHECK_EQ(ebb_device_get_stats(a, &stats), EBB_GONE);
    CHECK_EQ(ebb_device_close(other), EBB_OK);
    CHECK_EQ(rig_left(), 0);
}

static void closing_frees_everything(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c), t = core_stream(&c);
    ebb_vbar v[3];
    for (int i = 0; i < 3; i++) {
        v[i] = core_vbar(&c, 40 * MIB);
        rig_busy(&c, v[i], 0, 40 * MIB, 5 * MILLISECOND, i == 1 ? t : s);
    }
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v[1], 0, 1, s, &signature), EBB_OK);
    CHECK_EQ(ebb_device_close(c.device), EBB_BUSY);
    CHECK_EQ(core_device_stats(&c).vbars, 3);
    CHECK_EQ(core_stats(v[0]).resident, 40 * MIB); /* a refusal has changed nothing */
    CHECK_EQ(core_stats(v[2]).resident, 40 * MIB);
    CHECK_EQ(ebb_vbar_unpin(v[1], 0, 1, s), EBB_OK);
    core_close(&c);
    ebb_vbar_stats stats = {.size = sizeof stats};
    for (int i = 0; i < 3; i++)
        CHECK_EQ(ebb_vbar_get_stats(v[i], &stats), EBB_GONE);
    CHECK_EQ(rig_left(), 0);
}

static void a_hundred_lives_leave_nothing(void)
{
    rig_cards(1, 256 * MIB, 1);
    uint32_t before = 0;
    for (int i = 0; i < 100; i++) {
        ebb_device device;
        MUST(rig_device(0, 128 * MIB, &device, NULL, 0));
        CHECK(device.id != before);
        before = device.id;
        ebb_vbar_options options = {.size = sizeof options, .bytes = 34 * MIB};
        ebb_vbar vbar;
        MUST(ebb_vbar_create(device, &options, &vbar));
        uint64_t signature;
        CHECK_EQ(ebb_vbar_fault(vbar, 0, 34 * MIB, NULL, &signature), EBB_OK);
        CHECK_EQ(signature, 2); /* counted anew in each life */
        CHECK_EQ(ebb_vbar_unpin(vbar, 0, 34 * MIB, NULL), EBB_OK);
        ebb_device_stats stats = {.size = sizeof stats};
        CHECK_EQ(ebb_device_get_stats(device, &stats), EBB_OK);
        CHECK_EQ(stats.misses, 1);
        CHECK_EQ(stats.frames_created, 2);
        char why[200];
        CHECK_EQ(ebb_device_failure(device, why, sizeof why), EBB_OK);
        CHECK_STR(why, "");
        CHECK_EQ(ebb_check(device, NULL, 0), EBB_OK);
        CHECK_EQ(ebb_device_close(device), EBB_OK);
        CHECK_EQ(rig_left(), 0);
    }
}

static void a_lower_limit_gives_back_at_once_least_important_first(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, 128 * MIB), new = core_vbar(&c, 64 * MIB);
    CHECK_EQ(rig_touch(old, 0, 128 * MIB, s), EBB_OK);
    CHECK_EQ(rig_touch(new, 0, 64 * MIB, s), EBB_OK);
    uint64_t freed;
    CHECK_EQ(ebb_vbar_free_memory(new, 0, &freed), EBB_OK);
    CHECK_EQ(freed, 0);
    CHECK_EQ(ebb_device_set_limit(c.device, 128 * MIB), EBB_OK);
    CHECK_EQ(core_device_stats(&c).held, 128 * MIB);
    CHECK_EQ(core_stats(old).resident, 64 * MIB);
    CHECK_EQ(core_stats(new).resident, 64 * MIB);
    CHECK_EQ(core_stats(old).evictions[EBB_FOR_LIMIT], 2);
    CHECK_EQ(core_stats(old).watermark, 64 * MIB);
    /* Not even a frame more than was asked for, and none at all below zero. */
    CHECK_EQ(ebb_device_set_limit(c.device, 0), EBB_OK);
    CHECK_EQ(core_device_stats(&c).held, 0);
    CHECK_EQ(rig_touch(new, 0, 1, s), EBB_OFFLOADED);
    CHECK_EQ(ebb_device_set_limit(c.device, EBB_DEFAULT), EBB_OK);
    CHECK_EQ(core_device_stats(&c).limit, 512 * MIB);
    CHECK_EQ(ebb_vbar_prioritize(new), EBB_OK);
    CHECK_EQ(rig_touch(new, 0, 64 * MIB, s), EBB_OK);
    core_close(&c);
}

static void a_limit_below_what_is_pinned_takes_its_due_later(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 128 * MIB);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, 0, 128 * MIB, s, &signature), EBB_OK);
    CHECK_EQ(ebb_device_set_limit(c.device, 32 * MIB), EBB_BUSY);
    CHECK_EQ(core_device_stats(&c).limit, 32 * MIB);
    CHECK_EQ(core_device_stats(&c).held, 128 * MIB);
    core_check(&c);
    CHECK_EQ(ebb_vbar_unpin(v, 0, 128 * MIB, s), EBB_OK); /* nothing queued: it can go now */
    CHECK_EQ(core_device_stats(&c).held, 32 * MIB);
    CHECK_EQ(core_stats(v).resident, 32 * MIB);
    core_close(&c);
}

static void headroom_is_left_to_others(void)
{
    core c;
    core_open(&c, 256 * MIB, EBB_DEFAULT);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 256 * MIB);
    CHECK_EQ(ebb_device_set_headroom(c.device, 64 * MIB), EBB_OK);
    for (uint64_t i = 0; i < 8; i++)
        CHECK_EQ(rig_touch(v, i * LARGE, LARGE, s), i < 6 ? EBB_OK : EBB_OFFLOADED);
    CHECK_EQ(core_device_stats(&c).free, 64 * MIB);
    /* What another process takes counts at the next growth. */
    uint64_t freed;
    CHECK_EQ(ebb_vbar_free_memory(v, LARGE, &freed), EBB_OK);
    CHECK_EQ(freed, LARGE);
    MUST(ebbsim_foreign_use(0, 32 * MIB));
    CHECK_EQ(ebb_vbar_prioritize(v), EBB_OK);
    CHECK_EQ(rig_touch(v, 5 * LARGE, LARGE, s), EBB_OFFLOADED);
    CHECK_EQ(ebb_device_set_headroom(c.device, 0), EBB_OK);
    CHECK_EQ(rig_touch(v, 5 * LARGE, LARGE, s), EBB_OK);
    core_close(&c);
}

static void the_default_headroom_can_be_asked_for_again(void)
{
    core c;
    core_open(&c, 256 * MIB, EBB_DEFAULT);
    CHECK_EQ(ebb_device_set_headroom(c.device, EBB_DEFAULT), EBB_OK);
    CHECK_EQ(core_device_stats(&c).headroom, 4 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    core_close(&c);
}

/* ---- when it cannot be opened --------------------------------------------------------------------- */

static void refused(int index, ebb_status status, const char *word)
{
    ebb_device device = {77};
    char why[256] = "";
    CHECK_EQ(rig_device(index, EBB_DEFAULT, &device, why, sizeof why), status);
    CHECK_HAS(why, word);
    CHECK_EQ(device.id, 77);
    CHECK_EQ(rig_left(), 0);
    ebb_device ignored;
    CHECK_EQ(rig_device(index, EBB_DEFAULT, &ignored, NULL, 0), status);
}

static void an_old_driver_is_named_as_such(void)
{
    rig_cards(1, 64 * MIB, 1);
    ebbsim_driver_version(11080);
    refused(0, EBB_DRIVER_TOO_OLD, "11.8");
}

static void every_function_that_is_missing_is_named(void)
{
    static const char *const needed[] = {"cuMemMap",
                                         "cuMemSetAccess",
                                         "cuEventRecord",
                                         "cuStreamWaitEvent",
                                         "cuThreadExchangeStreamCaptureMode",
                                         "cuMemGetInfo",
                                         "cuDevicePrimaryCtxRetain"};
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        rig_cards(1, 64 * MIB, 1);
        ebbsim_driver_hide(needed[i]);
        refused(0, EBB_DRIVER_INCOMPLETE, needed[i]);
    }
}

static void a_function_one_can_do_without_may_be_missing(void)
{
    rig_cards(1, 64 * MIB, 1);
    ebbsim_driver_hide("cuCtxRecordEvent");
    ebb_device device;
    CHECK_EQ(rig_device(0, EBB_DEFAULT, &device, NULL, 0), EBB_OK);
    CHECK_EQ(ebb_device_close(device), EBB_OK);
    CHECK_EQ(rig_left(), 0);
}

static void no_vmm_no_gpu_no_library(void)
{
    ebbsim_reset();
    ebbsim_card card;
    ebbsim_card_default(&card, 64 * MIB);
    card.vmm = 0;
    MUST(ebbsim_card_add(&card, NULL));
    refused(0, EBB_NO_VMM, "virtual memory management");
    refused(1, EBB_NO_DEVICE, "there is no GPU 1");
    refused(-1, EBB_INVALID, "GPU -1");

    ebb_device_options options = {.size = sizeof options, .library = "/nowhere/libcuda.so"};
    ebb_device device;
    char why[256] = "";
    CHECK_EQ(ebb_device_open(&options, &device, why, sizeof why), EBB_NO_DRIVER);
    CHECK_HAS(why, "/nowhere/libcuda.so");
    CHECK_EQ(rig_left(), 0);
}

static void the_words_of_a_failure_are_kept_and_a_failed_open_can_be_repeated(void)
{
    rig_cards(1, 64 * MIB, 1);
    ebb_device device;
    char why[256] = "";
    MUST(ebbsim_fail("cuDevicePrimaryCtxRetain", 1, 2));
    CHECK_EQ(rig_device(0, EBB_DEFAULT, &device, why, sizeof why), EBB_DRIVER_FAILED);
    CHECK_HAS(why, "cuDevicePrimaryCtxRetain");
    CHECK_HAS(why, "(2)");
    CHECK_EQ(rig_left(), 0);
    CHECK_EQ(rig_device(0, EBB_DEFAULT, &device, why, sizeof why), EBB_OK);
    CHECK_EQ(ebb_device_close(device), EBB_OK);
}

int main(void)
{
    if (getenv("EBBTIDE_TEST_GPU"))
        SKIP("only a simulated GPU can be made to fail");
    RUN(the_same_gpu_twice_is_one_device);
    RUN(closing_frees_everything);
    RUN(a_hundred_lives_leave_nothing);
    RUN(a_lower_limit_gives_back_at_once_least_important_first);
    RUN(a_limit_below_what_is_pinned_takes_its_due_later);
    RUN(headroom_is_left_to_others);
    RUN(the_default_headroom_can_be_asked_for_again);
    RUN(an_old_driver_is_named_as_such);
    RUN(every_function_that_is_missing_is_named);
    RUN(a_function_one_can_do_without_may_be_missing);
    RUN(no_vmm_no_gpu_no_library);
    RUN(the_words_of_a_failure_are_kept_and_a_failed_open_can_be_repeated);
    return REPORT();
}

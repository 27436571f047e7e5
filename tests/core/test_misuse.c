/* Everything that makes no sense is answered, by the right status, and changes nothing. */
#include <sys/wait.h>
#include <unistd.h>

#include "rig.h"

/* Every function that takes a VBAR, with sensible arguments otherwise. */
static int answers_of_vbar(ebb_vbar v, ebb_status expected)
{
    ebb_vbar_stats stats = {.size = sizeof stats};
    ebb_range range = {0, 1};
    uint64_t n;
    uint8_t flag;
    ebb_status got[] = {ebb_vbar_destroy(v),
                        ebb_vbar_alloc(v, 1, &n),
                        ebb_vbar_fault(v, 0, 1, NULL, &n),
                        ebb_vbar_fault_many(v, &range, 1, NULL, &n),
                        ebb_vbar_filled(v, 0, 1, NULL),
                        ebb_vbar_unpin(v, 0, 1, NULL),
                        ebb_vbar_unpin_many(v, &range, 1, NULL),
                        ebb_vbar_graphs_gone(v, NULL),
                        ebb_vbar_prioritize(v),
                        ebb_vbar_deprioritize(v),
                        ebb_vbar_trade(v, v),
                        ebb_vbar_free_memory(v, 1, &n),
                        ebb_vbar_set_watermark(v, 0),
                        ebb_vbar_set_watermark_limit(v, 0),
                        ebb_vbar_get_stats(v, &stats),
                        ebb_vbar_residency(v, &flag, 1),
                        ebb_vbar_page(v, 0, &range)};
    int wrong = 0;
    for (size_t i = 0; i < sizeof got / sizeof *got; i++)
        if (got[i] != expected) {
            FAIL("function %zu: %s, not %s", i, ebb_status_name(got[i]), ebb_status_name(expected));
            wrong++;
        }
    return wrong;
}

/* Every function that takes a device. */
static int answers_of_device(ebb_device d, ebb_status expected)
{
    ebb_device_stats stats = {.size = sizeof stats};
    ebb_vbar_options options = {.size = sizeof options, .bytes = 1};
    ebb_vbar vbar;
    uint64_t n;
    char text[100];
    ebb_status got[] = {ebb_device_set_limit(d, 1),
                        ebb_device_set_headroom(d, 1),
                        ebb_device_trim(d, &n),
                        ebb_device_keep_stream(d, NULL, 0),
                        ebb_device_keep_stream(d, NULL, EBB_NEVER_CAPTURES),
                        ebb_device_get_stats(d, &stats),
                        ebb_check(d, text, sizeof text),
                        ebb_device_failure(d, text, sizeof text),
                        ebb_vbar_create(d, &options, &vbar),
                        ebb_device_close(d)};
    int wrong = 0;
    for (size_t i = 0; i < sizeof got / sizeof *got; i++)
        if (got[i] != expected) {
            FAIL("function %zu: %s, not %s", i, ebb_status_name(got[i]), ebb_status_name(expected));
            wrong++;
        }
    return wrong;
}

static void handles_that_never_were_are_gone(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t made_up[] = {0,
                          1,
                          UINT64_MAX,
                          v.id ^ UINT64_C(1) << 24, /* another generation */
                          v.id + 1,                 /* another place */
                          v.id + 0xffffff,
                          v.id + (UINT64_C(1) << 56),
                          v.id & 0xffffff,
                          UINT64_C(33) << 56,
                          v.id | 0xffffff};
    for (size_t i = 0; i < sizeof made_up / sizeof *made_up; i++)
        CHECK_EQ(answers_of_vbar((ebb_vbar){made_up[i]}, EBB_GONE), 0);
    uint32_t devices[] = {
        0, 1, 0xff, UINT32_MAX, c.device.id + 1, c.device.id + 0x100, c.device.id & 0xff};
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        CHECK_EQ(answers_of_device((ebb_device){devices[i]}, EBB_GONE), 0);
    core_check(&c);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    core_close(&c);
}

static void handles_that_were_are_gone(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    CHECK_EQ(answers_of_vbar(v, EBB_GONE), 0);
    ebb_vbar next = core_vbar(&c, LARGE); /* in the same place */
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(next, 0, 1, NULL, &signature), EBB_OK);
    CHECK_EQ(answers_of_vbar(v, EBB_GONE), 0);
    CHECK_EQ(core_stats(next).pinned, LARGE);
    CHECK_EQ(ebb_vbar_unpin(next, 0, 1, NULL), EBB_OK);
    ebb_device gone = c.device;
    core_close(&c);
    CHECK_EQ(answers_of_device(gone, EBB_GONE), 0);
    CHECK_EQ(answers_of_vbar(next, EBB_GONE), 0);
    core_open(&c, 256 * MIB, 128 * MIB);
    CHECK_EQ(answers_of_device(gone, EBB_GONE), 0);
    CHECK_EQ(answers_of_vbar(next, EBB_GONE), 0);
    core_close(&c);
}

static void nulls_and_wrong_sizes_are_invalid(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE), w;
    ebb_range range = {0, 1};
    uint64_t n;
    CHECK_EQ(ebb_vbar_alloc(v, 1, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_alloc(v, 0, &n), EBB_INVALID);
    CHECK_EQ(ebb_vbar_fault(v, 0, 1, NULL, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_fault_many(v, NULL, 1, NULL, &n), EBB_INVALID);
    CHECK_EQ(ebb_vbar_fault_many(v, &range, 0, NULL, &n), EBB_INVALID);
    CHECK_EQ(ebb_vbar_fault_many(v, &range, 1, NULL, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_unpin_many(v, NULL, 1, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_unpin_many(v, &range, 0, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_residency(v, NULL, 1), EBB_INVALID);
    CHECK_EQ(ebb_vbar_residency(v, NULL, 0), EBB_OK);
    uint8_t flags[2];
    CHECK_EQ(ebb_vbar_residency(v, flags, 2), EBB_INVALID);
    CHECK_EQ(ebb_vbar_page(v, 0, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_page(v, UINT64_MAX, &range), EBB_INVALID);
    CHECK_EQ(ebb_vbar_get_stats(v, NULL), EBB_INVALID);
    ebb_vbar_stats vbar_stats = {.size = sizeof vbar_stats - 1};
    CHECK_EQ(ebb_vbar_get_stats(v, &vbar_stats), EBB_INVALID);
    CHECK_EQ(ebb_device_get_stats(c.device, NULL), EBB_INVALID);
    ebb_device_stats stats = {.size = 0};
    CHECK_EQ(ebb_device_get_stats(c.device, &stats), EBB_INVALID);
    ebb_vbar_options options = {.size = sizeof options, .bytes = 0};
    CHECK_EQ(ebb_vbar_create(c.device, &options, &w), EBB_INVALID);
    options.bytes = 1;
    CHECK_EQ(ebb_vbar_create(c.device, &options, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_create(c.device, NULL, &w), EBB_INVALID);
    options.size--;
    CHECK_EQ(ebb_vbar_create(c.device, &options, &w), EBB_INVALID);
    ebb_device d;
    ebb_device_options open = {.size = sizeof open - 1, .library = core_library()};
    CHECK_EQ(ebb_device_open(&open, &d, NULL, 0), EBB_INVALID);
    CHECK_EQ(ebb_device_open(NULL, &d, NULL, 0), EBB_INVALID);
    open.size++;
    CHECK_EQ(ebb_device_open(&open, NULL, NULL, 0), EBB_INVALID);
    CHECK_EQ(ebb_vbar_free_memory(v, 1, NULL), EBB_OK);
    CHECK_EQ(ebb_device_trim(c.device, NULL), EBB_OK);
    CHECK_EQ(ebb_check(c.device, NULL, 0), EBB_OK);
    CHECK_EQ(ebb_device_failure(c.device, NULL, 0), EBB_OK);
    core_close(&c);
}

static void ranges_past_the_end_are_invalid(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    CUstream streams[] = {core_lasting(&c), core_stream(&c), NULL};
    ebb_vbar v = core_vbar(&c, LARGE);
    static const ebb_range bad[] = {{0, 0},
                                    {LARGE, 1},
                                    {LARGE - 1, 2},
                                    {0, LARGE + 1},
                                    {UINT64_MAX, 1},
                                    {1, UINT64_MAX},
                                    {UINT64_MAX, UINT64_MAX},
                                    {LARGE / 2, UINT64_MAX - LARGE / 2 + 1}};
    for (int s = 0; s < 3; s++)
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            uint64_t n[2], offset = bad[i].offset, bytes = bad[i].bytes;
            ebb_range two[2] = {{0, 1}, bad[i]};
            CHECK_EQ(ebb_vbar_fault(v, offset, bytes, streams[s], n), EBB_INVALID);
            CHECK_EQ(ebb_vbar_fault_many(v, two, 2, streams[s], n), EBB_INVALID);
            CHECK_EQ(ebb_vbar_fault(v, 0, 1, streams[s], n), EBB_OK);
            CHECK_EQ(ebb_vbar_unpin(v, offset, bytes, streams[s]), EBB_INVALID);
            CHECK_EQ(ebb_vbar_unpin_many(v, two, 2, streams[s]), EBB_INVALID);
            CHECK_EQ(ebb_vbar_filled(v, offset, bytes, streams[s]), EBB_INVALID);
            CHECK_EQ(core_stats(v).pinned, LARGE);
            CHECK_EQ(ebb_vbar_unpin(v, 0, 1, streams[s]), EBB_OK);
        }
    core_check(&c);
    core_close(&c);
}

static void what_is_not_pinned_cannot_be_unpinned_or_filled(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    CUstream streams[] = {core_lasting(&c), core_stream(&c), NULL};
    ebb_vbar v = core_vbar(&c, 2 * LARGE);
    for (int s = 0; s < 3; s++) {
        CHECK_EQ(ebb_vbar_unpin(v, 0, 1, streams[s]), EBB_NOT_PINNED);
        CHECK_EQ(ebb_vbar_filled(v, 0, 1, streams[s]), EBB_NOT_PINNED);
        CHECK_EQ(rig_touch(v, 0, LARGE, streams[s]), EBB_OK);
        CHECK_EQ(ebb_vbar_unpin(v, 0, 1, streams[s]), EBB_NOT_PINNED);
        CHECK_EQ(ebb_vbar_filled(v, 0, 1, streams[s]), EBB_NOT_PINNED);
        uint64_t n;
        CHECK_EQ(ebb_vbar_fault(v, 0, 1, streams[s], &n), EBB_OK);
        CHECK_EQ(ebb_vbar_unpin(v, 0, 2 * LARGE, streams[s]), EBB_NOT_PINNED);
        CHECK_EQ(ebb_vbar_filled(v, 0, 2 * LARGE, streams[s]), EBB_NOT_PINNED);
        CHECK_EQ(ebb_vbar_unpin(v, 0, 1, streams[s]), EBB_OK);
        CHECK_EQ(ebb_vbar_free_memory(v, UINT64_MAX, NULL), EBB_OK);
        CHECK_EQ(ebb_vbar_prioritize(v), EBB_OK);
        core_check(&c);
    }
    core_close(&c);
}

/* More pins than can be counted are refused, and none is lost. */
static void pins_beyond_counting_are_refused(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t n;
    enum { MOST = (1 << 18) - 1 };
    for (int i = 0; i < MOST; i++)
        if (ebb_vbar_fault(v, 0, 1, s, &n) != EBB_OK) {
            FAIL("pin %d", i);
            break;
        }
    CHECK_EQ(ebb_vbar_fault(v, 0, 1, s, &n), EBB_OFFLOADED);
    core_check(&c);
    for (int i = 0; i < MOST; i++)
        if (ebb_vbar_unpin(v, 0, 1, s) != EBB_OK) {
            FAIL("unpin %d", i);
            break;
        }
    CHECK_EQ(ebb_vbar_unpin(v, 0, 1, s), EBB_NOT_PINNED);
    core_close(&c);
}

static void a_fork_is_told_and_its_parent_goes_on(void)
{
    core c;
    core_open(&c, 256 * MIB, 128 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t signature = 0;
    CHECK_EQ(core_use(&c, v, 0, LARGE, &signature, 6, NULL), EBB_OK);
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        int wrong = answers_of_vbar(v, EBB_FORKED) + answers_of_device(c.device, EBB_FORKED);
        ebb_device d;
        char why[256] = "";
        wrong += rig_device(0, EBB_DEFAULT, &d, why, sizeof why) != EBB_FORKED;
        wrong += !strstr(why, "forked");
        _exit(wrong);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    uint64_t again;
    CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, NULL, &again), EBB_OK);
    CHECK_EQ(again, signature);
    CHECK_EQ(core_read(&c, v, 9, NULL), 6);
    CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, NULL), EBB_OK);
    core_close(&c);
}

static void the_threads_own_context_is_as_it_was(void)
{
    int cards = rig_cards(2, 256 * MIB, 1);
    core c = {0};
    MUST(rig_device(0, 128 * MIB, &c.device, NULL, 0));
    core_driver(&c);
    CUcontext other = NULL, now; /* another card's, or none at all */
    if (cards > 1)
        MUST(c.driver.cuDevicePrimaryCtxRetain(&other, 1));
    MUST(c.driver.cuCtxSetCurrent(other));
    ebb_vbar v = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(v, 0, LARGE, NULL), EBB_OK);
    CHECK_EQ(rig_touch(v, LARGE, 1, NULL), EBB_INVALID);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    CHECK_EQ(answers_of_vbar(v, EBB_GONE), 0);
    MUST(c.driver.cuCtxGetCurrent(&now));
    CHECK(now == other);
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    MUST(c.driver.cuCtxGetCurrent(&now));
    CHECK(now == other);
    core_release(&c);
    if (cards > 1)
        MUST(c.driver.cuDevicePrimaryCtxRelease(1));
    CHECK_EQ(rig_left(), 0);
}

static void on_the_wrong_context_nothing_is_done(void)
{
    NEEDS_SIM("only a simulated GPU can be made to fail");
    rig_cards(2, 256 * MIB, 1);
    core c = {0};
    MUST(rig_device(0, LARGE, &c.device, NULL, 0));
    core_driver(&c);
    CUcontext other;
    MUST(c.driver.cuDevicePrimaryCtxRetain(&other, 1));
    ebb_vbar v = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
    static const char *const calls[] = {"cuCtxPushCurrent", "cuThreadExchangeStreamCaptureMode"};
    for (int i = 0; i < 2; i++) {
        uint64_t n;
        CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, NULL, &n), EBB_OK);
        CHECK_EQ(rig_kernel("reader", core_stats(v).address, LARGE, EBBSIM_READ, MILLISECOND, NULL),
                 0);
        MUST(c.driver.cuCtxSetCurrent(other));
        MUST(ebbsim_fail(calls[i], 1, 1));
        CHECK_EQ(ebb_vbar_filled(v, 0, LARGE, NULL), EBB_DRIVER_FAILED);
        char why[200];
        CHECK_EQ(ebb_device_failure(c.device, why, sizeof why), EBB_OK);
        CHECK_HAS(why, calls[i]);
        CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, NULL), EBB_OK);
        /* The fence would be looked for on the other card. */
        MUST(ebbsim_fail(calls[i], 1, 1));
        CHECK_EQ(ebb_vbar_fault(new, 0, LARGE, NULL, &n), EBB_DRIVER_FAILED);
        CHECK_EQ(ebbsim_failures(), 2 * i + 2);
        CHECK_EQ(ebbsim_hazards(), 0);
        MUST(c.driver.cuCtxSetCurrent(c.context));
    }
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    core_release(&c);
    MUST(c.driver.cuDevicePrimaryCtxRelease(1));
    CHECK_EQ(rig_left(), 0);
}

int main(void)
{
    RUN(handles_that_never_were_are_gone);
    RUN(handles_that_were_are_gone);
    RUN(nulls_and_wrong_sizes_are_invalid);
    RUN(ranges_past_the_end_are_invalid);
    RUN(what_is_not_pinned_cannot_be_unpinned_or_filled);
    RUN(pins_beyond_counting_are_refused);
    RUN(a_fork_is_told_and_its_parent_goes_on);
    RUN(the_threads_own_context_is_as_it_was);
    RUN(on_the_wrong_context_nothing_is_done);
    return REPORT();
}

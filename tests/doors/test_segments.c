/* Segments: memory for PyTorch over frames, without PyTorch. */
#include "segment.h"

#include "core/rig.h"
#include "internal.h"

static void segments_open(core *c, uint64_t memory, uint64_t limit)
{
    core_open(c, memory, limit);
    MUST(ebb__segments_open(c->device));
}

static ebb_segment_stats segments(core *c)
{
    ebb_segment_stats stats = {.size = sizeof stats};
    MUST(ebb__segments_stats(c->device, &stats));
    return stats;
}

static void segments_shut(core *c)
{
    CHECK_EQ(segments(c).segments, 0);
    CHECK_EQ(ebb__segments_close(c->device), EBB_OK);
    core_close(c);
}

/* As PyTorch asks: a second time when it is refused. 0: there is none. */
static uint64_t ask(core *c, uint64_t bytes)
{
    uint64_t address = 0;
    for (int i = 0; i < 2; i++)
        if (ebb__segment_alloc(c->device, bytes, &address) == EBB_OK)
            return address;
    return 0;
}

static void give(core *c, uint64_t address)
{
    CHECK_EQ(ebb__segment_free(c->device, address), EBB_OK);
}

static void freed_memory_is_used_again_only_when_the_work_on_it_is_over(void)
{
    core c;
    segments_open(&c, 256 * MIB, 64 * MIB);
    rig_clock();
    CUstream s = core_stream(&c); /* one that Ebbtide has never heard of */
    uint64_t length = rig_length(20);
    uint64_t first = ask(&c, 40 * MIB);
    REQUIRE(first);
    CHECK_EQ(rig_kernel("writer", first, 40 * MIB, EBBSIM_WRITE, length, s), 0);
    uint64_t begin = rig_now();
    give(&c, first);
    CHECK(rig_now() - begin < length / 2); /* freeing does not wait */
    CHECK_EQ(segments(&c).parked, 1);
    uint64_t free_one = ask(&c, 24 * MIB); /* nor does what finds room elsewhere */
    CHECK(free_one && rig_now() - begin < length / 2);
    uint64_t second = ask(&c, 40 * MIB);
    CHECK(second && rig_took(rig_now() - begin, length));
    CHECK_EQ(rig_kernel("writer", second, 40 * MIB, EBBSIM_WRITE, 1000, NULL), 0);
    give(&c, second);
    give(&c, free_one);
    CHECK_EQ(ebb__segment_free(c.device, first + 4096), EBB_INVALID);
    MUST(c.driver.cuCtxSynchronize());
    /* The same size again: the whole of it, as it is. */
    uint64_t third = ask(&c, 40 * MIB);
    CHECK_EQ(third, second);
    CHECK_EQ(segments(&c).reused, 1);
    give(&c, third);
    segments_shut(&c);
}

static void an_old_driver_is_refused(void)
{
    NEEDS_SIM("a driver before 12.5 is needed");
    core c = {.sim = true};
    rig_cards(1, 256 * MIB, 1);
    ebbsim_driver_hide("cuCtxRecordEvent");
    char why[256];
    MUST(rig_device(0, 64 * MIB, &c.device, why, sizeof why));
    core_driver(&c);
    void *host;
    MUST(c.driver.cuMemHostAlloc(&host, KIT_HOST, 0));
    c.host = host;
    CHECK_EQ(ebb__segments_open(c.device), EBB_DRIVER_TOO_OLD);
    uint64_t address;
    CHECK_EQ(ebb__segment_alloc(c.device, MIB, &address), EBB_GONE);
    core_close(&c);
}

static void what_is_freed_during_a_capture_waits_for_its_end(void)
{
    core c;
    segments_open(&c, 256 * MIB, 64 * MIB);
    CUstream capturing = core_stream(&c);
    uint64_t a = ask(&c, 20 * MIB), b = ask(&c, 40 * MIB);
    REQUIRE(a && b);
    atomic_fetch_add(&ebb__captures, 1);
    MUST(c.driver.cuStreamBeginCapture(capturing, CU_STREAM_CAPTURE_MODE_GLOBAL));
    give(&c, b);
    give(&c, a);
    CHECK_EQ(segments(&c).parked, 2);
    uint64_t refusals = segments(&c).refusals;
    CHECK_EQ(ask(&c, 30 * MIB), 0);
    CHECK_EQ(ask(&c, 40 * MIB), 0); /* not as it is, either */
    CHECK_EQ(segments(&c).refusals, refusals);
    CHECK_EQ(ebb__segments_close(c.device), EBB_BUSY);
    CUgraph graph;
    CHECK_EQ(c.driver.cuStreamEndCapture(capturing, &graph), CUDA_SUCCESS); /* it has survived */
    atomic_fetch_sub(&ebb__captures, 1);
    MUST(c.driver.cuGraphDestroy(graph));
    uint64_t d = ask(&c, 60 * MIB);
    CHECK(d);
    give(&c, d);
    segments_shut(&c);
}

static void pytorch_is_asked_first_then_weights_go_and_never_in_a_pool(void)
{
    core c;
    segments_open(&c, 512 * MIB, 4 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 3 * LARGE);
    CHECK_EQ(rig_touch(v, 0, 3 * LARGE, s), EBB_OK);
    uint64_t a, b = 0;
    CHECK_EQ(ebb__segment_alloc(c.device, LARGE, &a), EBB_OK);
    CHECK_EQ(ebb__segment_alloc(c.device, LARGE, &b), EBB_FULL); /* has it something to give? */
    CHECK_EQ(segments(&c).refusals, 1);
    CHECK_EQ(core_stats(v).resident, 3 * LARGE);
    CHECK_EQ(ebb__segment_alloc(c.device, LARGE, &b), EBB_OK); /* it has not */
    CHECK_EQ(core_stats(v).resident, 2 * LARGE);
    give(&c, b);
    MUST(c.driver.cuCtxSynchronize());
    CHECK_EQ(ebb_vbar_prioritize(v), EBB_OK);
    CHECK_EQ(rig_touch(v, 0, 3 * LARGE, s), EBB_OK);           /* parked memory is anybody's */
    CHECK_EQ(ebb__segment_alloc(c.device, LARGE, &b), EBB_OK); /* it was asked a moment ago */
    CHECK_EQ(segments(&c).refusals, 1);
    ebb__segments_open_pool(c.device, -1); /* of one that was open before */
    ebb__segments_open_pool(c.device, 1);
    give(&c, a);
    give(&c, b);
    MUST(c.driver.cuCtxSynchronize());
    CHECK_EQ(ebb__segment_alloc(c.device, 3 * LARGE, &a), EBB_OK);
    ebb__segments_open_pool(c.device, -1);
    /* What can never be had costs nobody anything. */
    uint64_t resident = core_stats(v).resident;
    CHECK_EQ(ask(&c, 5 * LARGE), 0);
    CHECK_EQ(ask(&c, UINT64_MAX), 0);
    CHECK_EQ(ask(&c, 0), 0);
    CHECK_EQ(core_stats(v).resident, resident);
    give(&c, a);
    segments_shut(&c);
}

static void memory_from_elsewhere_presses_too(void)
{
    core c;
    segments_open(&c, 512 * MIB, 4 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 4 * LARGE);
    CHECK_EQ(rig_touch(v, 0, 4 * LARGE, s), EBB_OK);
    CHECK_EQ(ebb__segments_press(c.device, 0), EBB_OK);
    CHECK_EQ(core_stats(v).resident, 4 * LARGE);
    CHECK_EQ(ebb__segments_press(c.device, 40 * MIB), EBB_OK);
    CHECK_EQ(core_stats(v).resident, 2 * LARGE);
    CHECK_EQ(core_device_stats(&c).held, 2 * LARGE); /* the driver has them back */
    ebb__segments_before(c.device, 64 * (int64_t)MIB);
    CHECK_EQ(ebb__segments_press(c.device, 65 * MIB), EBB_FULL); /* never, so nobody gives way */
    CHECK_EQ(core_stats(v).resident, 2 * LARGE);
    ebb__segments_before(c.device, 10 * (int64_t)MIB); /* it grew without asking */
    CHECK_EQ(ebb__segments_press(c.device, 0), EBB_OK);
    CHECK_EQ(core_stats(v).resident, LARGE);
    CHECK_EQ(ebb__segments_yield(c.device, MIB), EBB_OK);
    CHECK_EQ(core_stats(v).resident, 0);
    CHECK_EQ(ebb__segments_yield(c.device, MIB), EBB_FULL);
    ebb__segments_before(c.device, -74 * (int64_t)MIB);
    segments_shut(&c);
}

/* ---- every call fails once ------------------------------------------------------------------------ */

/* The books, unless it is this question's own call that has just failed. */
static void look(core *c)
{
    unsigned long before = ebbsim_failures();
    char why[256];
    if (ebb_check(c->device, why, sizeof why) != EBB_OK && ebbsim_failures() == before)
        FAIL("%s", why);
    ebb_device_stats stats = {.size = sizeof stats};
    if (ebb_device_get_stats(c->device, &stats) == EBB_OK)
        CHECK(stats.held <= 4 * LARGE);
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* Allocating, freeing under work, reuse, weights that give way, a lower limit. */
static void story(core *c)
{
    CUstream s = core_stream(c);
    if (ebb_device_keep_stream(c->device, s, 0) != EBB_OK)
        CHECK(ebbsim_failures() > 0);
    uint64_t live[6] = {0};
    static const uint64_t sizes[6] = {2, 20, 34, 64, 20, 6};
    ebb_vbar_options options = {.size = sizeof options, .bytes = 3 * LARGE};
    ebb_vbar v = {0};
    bool there = ebb_vbar_create(c->device, &options, &v) == EBB_OK;
    for (int round = 0; round < 3; round++) {
        for (uint64_t page = 0; there && page < 3; page++) {
            uint64_t signature;
            if (ebb_vbar_fault(v, page * LARGE, LARGE, s, &signature) == EBB_OK &&
                ebb_vbar_unpin(v, page * LARGE, LARGE, s) != EBB_OK)
                ebb_vbar_unpin(v, page * LARGE, LARGE, s);
            look(c);
        }
        for (int i = 0; i < 6; i++) {
            if (!live[i])
                live[i] = ask(c, sizes[i] * MIB);
            look(c);
            if (live[i])
                rig_kernel("writer", live[i], sizes[i] * MIB, EBBSIM_WRITE, MILLISECOND, s);
        }
        for (int i = round & 1; i < 6; i += 2) {
            if (live[i] && ebb__segment_free(c->device, live[i]) != EBB_OK)
                FAIL("a segment is not taken back");
            live[i] = 0;
            look(c);
        }
        if (there)
            ebb_vbar_prioritize(v);
    }
    ebb_device_set_limit(c->device, LARGE);
    for (int i = 0; i < 6; i++)
        if (live[i])
            give(c, live[i]);
    look(c);
    ebb_device_set_limit(c->device, 4 * LARGE);
    uint64_t last = ask(c, 64 * MIB);
    if (last)
        give(c, last);
}

static void every_call_fails_once_and_the_books_are_right(void)
{
    NEEDS_SIM("calls must fail");
    static const struct {
        const char *name;
        int code;
        bool keeps; /* the driver has kept something that nobody can take from it */
    } calls[] = {
        {"cuMemCreate", 2, false},          {"cuMemCreate", 999, false},
        {"cuMemAddressReserve", 2, false},  {"cuMemMap", 999, false},
        {"cuMemSetAccess", 999, false},     {"cuMemSetAccess", 600, false},
        {"cuMemUnmap", 999, true},          {"cuMemRelease", 999, true},
        {"cuMemAddressFree", 999, true},    {"cuMemGetInfo", 999, false},
        {"cuCtxRecordEvent", 999, false},   {"cuEventCreate", 2, false},
        {"cuEventRecord", 999, false},      {"cuEventQuery", 999, false},
        {"cuEventSynchronize", 999, false}, {"cuStreamIsCapturing", 999, false},
        {"cuCtxPushCurrent", 999, false},   {"cuThreadExchangeStreamCaptureMode", 999, false},
    };
    unsigned runs = 0;
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        for (unsigned long nth = 1; nth < 400; nth++) {
            core c;
            int before = harness_failures;
            segments_open(&c, 512 * MIB, 4 * LARGE);
            rig_clock();
            MUST(ebbsim_fail(calls[i].name, nth, calls[i].code));
            story(&c);
            bool happened = ebbsim_failures() > 0;
            ebbsim_fail_clear();
            core_check(&c);
            CHECK_EQ(segments(&c).segments, 0);
            CHECK_EQ(ebb__segments_close(c.device), EBB_OK);
            if (calls[i].keeps) {
                MUST(c.driver.cuMemFreeHost(c.host));
                CHECK_EQ(ebb_device_close(c.device), EBB_OK);
                core_release(&c);
                ebb__driver_close(&c.driver);
            } else {
                core_close(&c);
            }
            runs++;
            if (harness_failures != before) {
                FAIL("that was with call %lu of %s failing with %d", nth, calls[i].name,
                     calls[i].code);
                return;
            }
            if (!happened)
                break;
        }
    }
    printf("       %u runs\n", runs);
}

/* ---- threads -------------------------------------------------------------------------------------- */

typedef struct actor {
    core *c;
    unsigned number, seed;
    CUstream stream;
    ebb_vbar vbar;
    unsigned char *host;
    int wrong;
} actor;

static void *act(void *data)
{
    actor *a = data;
    core *c = a->c;
    uint64_t live[8] = {0}, bytes[8] = {0};
    MUST(c->driver.cuCtxSetCurrent(c->context));
    for (unsigned step = 0; step < 150; step++) {
        unsigned at = (unsigned)rand_r(&a->seed) % 8;
        unsigned char value = (unsigned char)(a->number * 8 + at + 1);
        if (live[at]) {
            /* It holds what was written, and the free comes with work still queued. */
            a->host[0] = a->host[1] = 0;
            MUST(c->driver.cuMemcpyDtoHAsync(a->host, live[at], 1, a->stream));
            MUST(c->driver.cuMemcpyDtoHAsync(a->host + 1, live[at] + bytes[at] - 1, 1, a->stream));
            MUST(c->driver.cuStreamSynchronize(a->stream));
            a->wrong += a->host[0] != value || a->host[1] != value;
            MUST(rig_kernel("writer", live[at], bytes[at], EBBSIM_WRITE, 100000, a->stream));
            a->wrong += ebb__segment_free(c->device, live[at]) != EBB_OK;
            live[at] = 0;
        } else {
            bytes[at] = (1 + (unsigned)rand_r(&a->seed) % 20) * SMALL;
            live[at] = ask(c, bytes[at]);
            if (live[at])
                MUST(c->driver.cuMemsetD8Async(live[at], value, bytes[at], a->stream));
        }
        if (rand_r(&a->seed) % 4 == 0) {
            uint64_t signature, page = (uint64_t)(rand_r(&a->seed) % 3) * LARGE;
            if (ebb_vbar_fault(a->vbar, page, LARGE, a->stream, &signature) == EBB_OK)
                MUST(ebb_vbar_unpin(a->vbar, page, LARGE, a->stream));
            else
                MUST(ebb_vbar_prioritize(a->vbar));
        }
    }
    for (unsigned at = 0; at < 8; at++)
        if (live[at])
            a->wrong += ebb__segment_free(c->device, live[at]) != EBB_OK;
    return NULL;
}

static void four_threads_with_weights(void)
{
    core c;
    segments_open(&c, 1024 * MIB, 256 * MIB);
    actor actors[4];
    pthread_t threads[4];
    for (unsigned i = 0; i < 4; i++) {
        actors[i] = (actor){.c = &c,
                            .number = i,
                            .seed = i + 1,
                            .stream = i & 1 ? core_lasting(&c) : core_stream(&c),
                            .vbar = core_vbar(&c, 3 * LARGE),
                            .host = c.host + (size_t)64 * i};
    }
    for (unsigned i = 0; i < 4; i++)
        MUST(pthread_create(&threads[i], NULL, act, &actors[i]));
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(actors[i].wrong, 0);
    }
    CHECK(core_device_stats(&c).held <= 256 * MIB);
    segments_shut(&c);
}

int main(void)
{
    RUN(freed_memory_is_used_again_only_when_the_work_on_it_is_over);
    RUN(an_old_driver_is_refused);
    RUN(what_is_freed_during_a_capture_waits_for_its_end);
    RUN(pytorch_is_asked_first_then_weights_go_and_never_in_a_pool);
    RUN(memory_from_elsewhere_presses_too);
    RUN(every_call_fails_once_and_the_books_are_right);
    RUN(four_threads_with_weights);
    return REPORT();
}

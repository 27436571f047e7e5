/*
 * Modelled time. On a virtual clock every end is exact and the same in every run; on the real one a
 * wait sleeps about as long as it should.
 *
 * The card's figures are round, so that the expected times can be read: a byte a nanosecond either
 * way, half of that while both ways are busy.
 */
#include <time.h>

#include "sim_kit.h"

enum { LATENCY = 1000, LAUNCH = 500, MS = 1000000, BYTES = MIB };

typedef struct scene {
    kit k;
    CUstream a, b;
    CUdeviceptr page, other;
    unsigned char *pinned, *second;
} scene;

static void set(scene *s, int virtual_clock)
{
    ebbsim_card card;
    ebbsim_card_default(&card, 256 * (uint64_t)MIB);
    card.h2d_rate = 1e9;
    card.d2h_rate = 2e9;
    card.duplex_rate = 0.5e9;
    card.pageable_rate = 0.25e9;
    card.memory_rate = 4e9;
    card.flops = 1e12;
    card.copy_latency = LATENCY;
    card.kernel_latency = LAUNCH;
    kit_start_cards(&s->k, 1, &card, virtual_clock);
    s->page = kit_page(&s->k, 0);
    s->other = kit_page(&s->k, 1);
    s->a = kit_stream(&s->k);
    s->b = kit_stream(&s->k);
    s->pinned = kit_host(&s->k, BYTES, 1);
    s->second = kit_host(&s->k, BYTES, 2);
}

static void kernel_of(CUstream stream, uint64_t nanoseconds)
{
    ebbsim_work work = {.size = sizeof work, .nanoseconds = nanoseconds};
    OK(ebbsim_launch(&work, stream));
}

static CUevent mark(scene *s, CUstream stream)
{
    CUevent event = NULL;
    OK(s->k.driver.cuEventCreate(&event, CU_EVENT_DEFAULT));
    OK(s->k.driver.cuEventRecord(event, stream));
    return event;
}

/* Nanoseconds from one event to another, as the driver tells. */
static long long between(scene *s, CUevent from, CUevent to)
{
    float milliseconds = -1;
    OK(s->k.driver.cuEventSynchronize(to));
    OK(s->k.driver.cuEventElapsedTime(&milliseconds, from, to));
    return (long long)((double)milliseconds * MS + (milliseconds < 0 ? -0.5 : 0.5));
}

/* To the nanosecond, but for what a float of milliseconds and a division of doubles round away. */
#define CHECK_NS(got, expected)                                                                    \
    do {                                                                                           \
        long long ns_ = (long long)(got), want_ = (long long)(expected);                           \
        if (ns_ < want_ - 2 || ns_ > want_ + 2)                                                    \
            FAIL("%s is %lld ns, not %s (%lld)", #got, ns_, #expected, want_);                     \
    } while (0)

/* ---- how long works take ----------------------------------------------------------------------- */

static void copies_take_their_latency_and_bytes_by_rate(void)
{
    scene s;
    set(&s, 1);
    CUevent e[6];
    unsigned char *pageable = malloc(BYTES);
    REQUIRE(pageable != NULL);
    memset(pageable, 3, BYTES);
    kernel_of(s.a, MS); /* a head start: what is queued behind it starts when it ends */
    e[0] = mark(&s, s.a);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    e[1] = mark(&s, s.a);
    OK(s.k.driver.cuMemcpyDtoHAsync(s.second, s.page, BYTES, s.a));
    e[2] = mark(&s, s.a);
    OK(s.k.driver.cuMemcpyDtoDAsync(s.other, s.page, BYTES, s.a));
    e[3] = mark(&s, s.a);
    OK(s.k.driver.cuMemsetD8Async(s.other, 1, BYTES, s.a));
    e[4] = mark(&s, s.a);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, pageable, BYTES, s.a));
    e[5] = mark(&s, s.a);
    CHECK_NS(between(&s, e[0], e[1]), LATENCY + BYTES);
    CHECK_NS(between(&s, e[1], e[2]), LATENCY + BYTES / 2);
    CHECK_NS(between(&s, e[2], e[3]), LAUNCH + BYTES * 2 / 4); /* read and written */
    CHECK_NS(between(&s, e[3], e[4]), LAUNCH + BYTES / 4);
    CHECK_NS(between(&s, e[4], e[5]), LATENCY + BYTES * 4);
    free(pageable);
}

static void kernels_take_what_they_say_or_what_they_touch_or_compute(void)
{
    scene s;
    set(&s, 1);
    ebbsim_range range = {s.page, BYTES, EBBSIM_READ};
    ebbsim_work says = {
        .size = sizeof says, .ranges = &range, .range_count = 1, .nanoseconds = 12345};
    ebbsim_work touches = {.size = sizeof touches, .ranges = &range, .range_count = 1};
    ebbsim_work computes = {
        .size = sizeof computes, .ranges = &range, .range_count = 1, .flops = 1e9};
    kernel_of(s.a, MS);
    CUevent e[4] = {mark(&s, s.a)};
    OK(ebbsim_launch(&says, s.a));
    e[1] = mark(&s, s.a);
    OK(ebbsim_launch(&touches, s.a));
    e[2] = mark(&s, s.a);
    OK(ebbsim_launch(&computes, s.a));
    e[3] = mark(&s, s.a);
    CHECK_NS(between(&s, e[0], e[1]), 12345);
    CHECK_NS(between(&s, e[1], e[2]), LAUNCH + BYTES / 4);
    CHECK_NS(between(&s, e[2], e[3]), LAUNCH + MS);
}

/* ---- what runs beside what --------------------------------------------------------------------- */

static void one_engine_does_one_thing_after_another(void)
{
    scene s;
    set(&s, 1);
    kernel_of(s.a, MS); /* the copy engine is free, the stream is not */
    CUevent start = mark(&s, s.a);
    OK(s.k.driver.cuStreamWaitEvent(s.b, start, 0));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.other, s.second, BYTES, s.b));
    CUevent first = mark(&s, s.a), second = mark(&s, s.b);
    CHECK_NS(between(&s, start, first), LATENCY + BYTES);
    CHECK_NS(between(&s, start, second), 2 * (LATENCY + BYTES));
    kernel_of(s.a, 3 * MS);
    kernel_of(s.b, MS);
    CUevent third = mark(&s, s.a), fourth = mark(&s, s.b);
    CHECK_NS(between(&s, third, fourth), MS);
}

static void a_copy_runs_beside_a_kernel(void)
{
    scene s;
    set(&s, 1);
    kernel_of(s.a, MS);
    CUevent start = mark(&s, s.a);
    OK(s.k.driver.cuStreamWaitEvent(s.b, start, 0));
    kernel_of(s.a, 5 * MS);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.b));
    CUevent kernel = mark(&s, s.a), copy = mark(&s, s.b);
    CHECK_NS(between(&s, start, kernel), 5 * MS);
    CHECK_NS(between(&s, start, copy), LATENCY + BYTES);
}

/* The way in is busy for LATENCY + BYTES. The way out, beside it, runs at the duplex rate for as long
   and at its own rate for the rest. */
static void both_ways_at_once_run_at_the_duplex_rate(void)
{
    scene s;
    set(&s, 1);
    kernel_of(s.a, MS);
    CUevent start = mark(&s, s.a);
    OK(s.k.driver.cuStreamWaitEvent(s.b, start, 0));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    OK(s.k.driver.cuMemcpyDtoHAsync(s.second, s.other, BYTES, s.b));
    CUevent in = mark(&s, s.a), out = mark(&s, s.b);
    long long shared = LATENCY + BYTES, moved = shared / 2;
    CHECK_NS(between(&s, start, in), LATENCY + BYTES);
    CHECK_NS(between(&s, start, out), LATENCY + shared + (BYTES - moved) / 2);
}

static void pageable_copies_are_too_slow_to_notice_the_other_way(void)
{
    scene s;
    set(&s, 1);
    static unsigned char pageable[4096];
    kernel_of(s.a, MS);
    CUevent start = mark(&s, s.a);
    OK(s.k.driver.cuStreamWaitEvent(s.b, start, 0));
    OK(s.k.driver.cuMemcpyDtoHAsync(s.second, s.other, BYTES, s.b));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, pageable, sizeof pageable, s.a));
    CUevent in = mark(&s, s.a);
    CHECK_NS(between(&s, start, in), LATENCY + 4 * (long long)sizeof pageable);
}

static void a_stream_that_waits_starts_when_the_other_is_there(void)
{
    scene s;
    set(&s, 1);
    kernel_of(s.a, MS);
    CUevent start = mark(&s, s.a);
    kernel_of(s.a, 4 * MS);
    CUevent done = mark(&s, s.a);
    OK(s.k.driver.cuStreamWaitEvent(s.b, done, 0));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.b));
    CUevent copied = mark(&s, s.b);
    CHECK_NS(between(&s, start, copied), 4 * MS + LATENCY + BYTES);
    CHECK_NS(between(&s, copied, start), -(4 * MS + LATENCY + BYTES));
}

static void a_context_event_is_there_when_all_streams_are(void)
{
    scene s;
    set(&s, 1);
    CUevent start = mark(&s, s.a), all = NULL;
    OK(s.k.driver.cuEventCreate(&all, CU_EVENT_DEFAULT));
    kernel_of(s.a, MS);
    kernel_of(s.b, 2 * MS);
    CUevent last = mark(&s, s.b);
    OK(s.k.driver.cuCtxRecordEvent(s.k.context[0], all));
    kernel_of(s.a, 7 * MS); /* queued later: not waited for */
    CHECK_NS(between(&s, start, all), between(&s, start, last));
    CHECK(ebbsim_now() < 5 * MS);
}

/* ---- the virtual clock ------------------------------------------------------------------------- */

#define COST(expected, call)                                                                       \
    do {                                                                                           \
        uint64_t before_ = ebbsim_now();                                                           \
        OK(call);                                                                                  \
        if (ebbsim_now() - before_ != (expected))                                                  \
            FAIL("%s cost %llu ns, not %d", #call, (unsigned long long)(ebbsim_now() - before_),   \
                 (expected));                                                                      \
    } while (0)

static void every_call_adds_what_it_costs(void)
{
    scene s;
    set(&s, 1);
    const ebb__driver *cu = &s.k.driver;
    CUevent event = NULL;
    CUstream stream = NULL;
    size_t free_bytes, total;
    CUmemGenericAllocationHandle frame = kit_frame(&s.k, 0);
    CUdeviceptr at = s.k.base + 7 * (CUdeviceptr)PAGE;
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    COST(1200, cu->cuMemMap(at, PAGE, 0, frame, 0));
    COST(30000, cu->cuMemSetAccess(at, PAGE, &access, 1));
    COST(20000, cu->cuMemUnmap(at, PAGE));
    COST(35000, cu->cuMemRelease(frame));
    COST(5900, cu->cuMemGetInfo(&free_bytes, &total));
    COST(5000, cu->cuStreamCreate(&stream, 0));
    COST(330, cu->cuEventCreate(&event, 0));
    COST(263, cu->cuEventRecord(event, stream));
    COST(140, cu->cuStreamWaitEvent(s.a, event, 0));
    COST(230, cu->cuEventQuery(event));
    COST(500, cu->cuStreamSynchronize(s.a)); /* nothing to wait for */
    uint64_t before = ebbsim_now();
    CHECK_EQ(cu->cuMemRelease(frame), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(ebbsim_now() - before, 35000); /* a refusal takes its time too */
    CHECK_EQ(ebbsim_now(), ebbsim_now());
}

/* Ten kernels of 3 us: a launch costs the host 2 us, or with what its program needs for it 12. */
static void a_host_that_needs_long_for_a_launch_lets_the_card_wait(void)
{
    scene s;
    set(&s, 1);
    for (int slow = 0; slow < 2; slow++) {
        OK(ebbsim_host_time("ebbsim_launch", slow ? 10000 : 0));
        OK(s.k.driver.cuCtxSynchronize());
        kernel_of(s.a, 3000);
        CUevent from = mark(&s, s.a);
        for (int i = 0; i < 10; i++) {
            kernel_of(s.a, 3000);
        }
        long long took = between(&s, from, mark(&s, s.a));
        /* Both begin with the first kernel. The host makes two calls for the event, then the ten. */
        CHECK_NS(took, slow ? 10 * 12000 + 330 + 263 : 10 * 3000);
    }
    COST(500, s.k.driver.cuStreamSynchronize(s.b)); /* other calls are as they were */
    CHECK_EQ(ebbsim_host_time("cuNothing", 1), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(ebbsim_host_time(NULL, 1), CUDA_ERROR_NOT_FOUND);
    ebbsim_reset();
    set(&s, 1);
    ebbsim_work work = {.size = sizeof work, .nanoseconds = 1};
    COST(2000, ebbsim_launch(&work, s.a)); /* and so is this one, after a reset */
}

static void a_wait_moves_the_clock_to_the_end_and_not_beyond(void)
{
    scene s;
    set(&s, 1);
    uint64_t start = ebbsim_now();
    kernel_of(s.a, 1000 * (uint64_t)MS);
    uint64_t queued = ebbsim_now();
    CHECK_EQ(queued - start, 2000);
    CHECK_EQ(s.k.driver.cuStreamQuery(s.a), CUDA_ERROR_NOT_READY);
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK_EQ(ebbsim_now(), queued + 1000 * (uint64_t)MS);
    OK(s.k.driver.cuStreamQuery(s.a));
    OK(s.k.driver.cuCtxSynchronize());
    CHECK_EQ(ebbsim_now(), queued + 1000 * (uint64_t)MS + 230 + 500);
}

static void work_is_over_when_its_time_has_passed_and_not_before(void)
{
    scene s;
    set(&s, 1);
    kernel_of(s.a, MS);
    uint64_t end = ebbsim_now() + MS;
    CUevent event = mark(&s, s.a);
    ebbsim_pass(end - ebbsim_now() - 231); /* the query itself takes 230 */
    CHECK_EQ(s.k.driver.cuEventQuery(event), CUDA_ERROR_NOT_READY);
    CHECK_EQ(ebbsim_now(), end - 1);
    CHECK_EQ(s.k.driver.cuEventQuery(event), CUDA_SUCCESS);
    float unused;
    CUevent again = mark(&s, s.a);
    kernel_of(s.a, MS);
    CUevent pending = mark(&s, s.a);
    CHECK_EQ(s.k.driver.cuEventElapsedTime(&unused, again, pending), CUDA_ERROR_NOT_READY);
}

static void set_flag(void *flag)
{
    __atomic_store_n((int *)flag, 1, __ATOMIC_RELEASE);
}

/* When the driver's own thread gets round to it is nobody's business on a virtual clock. */
static void host_functions_take_no_virtual_time(void)
{
    for (int i = 0; i < 30; i++) {
        scene s;
        int flag = 0;
        set(&s, 1);
        kernel_of(s.a, MS);
        CUevent start = mark(&s, s.a);
        OK(s.k.driver.cuLaunchHostFunc(s.a, set_flag, &flag));
        CUevent end = mark(&s, s.a);
        ebbsim_pass(20 * (uint64_t)MS);
        CHECK_NS(between(&s, start, end), 0);
        CHECK(__atomic_load_n(&flag, __ATOMIC_ACQUIRE));
    }
}

/* A program with a bit of everything, on dice: its timings, added up in a way that minds order. */
static uint64_t timings(uint64_t seed)
{
    scene s;
    dice d = {seed};
    uint64_t sum = 0;
    set(&s, 1);
    CUevent first = mark(&s, s.a);
    uint64_t start = ebbsim_now();
    for (int i = 0; i < 200; i++) {
        CUstream stream = below(&d, 2) == 0 ? s.a : s.b;
        CUstream other = stream == s.a ? s.b : s.a;
        size_t bytes = 1 + below(&d, BYTES);
        kit_order(&s.k, other, stream);
        switch (below(&d, 5)) {
        case 0:
            OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, bytes, stream));
            break;
        case 1:
            OK(s.k.driver.cuMemcpyDtoHAsync(s.second, s.page, bytes, stream));
            break;
        case 2:
            kernel_of(stream, 1 + below(&d, MS));
            break;
        case 3:
            ebbsim_pass(below(&d, MS));
            break;
        default:
            sum = sum * 31 + (uint64_t)between(&s, first, mark(&s, stream));
        }
        sum = sum * 31 + ebbsim_now() - start;
    }
    CHECK_EQ(ebbsim_hazards(), 0);
    return sum;
}

static void timings_are_the_same_in_every_run(void)
{
    for (uint64_t seed = 1; seed <= 5; seed++) {
        CHECK_EQ(timings(seed), timings(seed));
        CHECK(timings(seed) != timings(seed + 100));
    }
}

static void time_never_runs_backwards_when_the_clock_is_changed(void)
{
    scene s;
    set(&s, 0);
    uint64_t real = ebbsim_now();
    ebbsim_clock_virtual(1);
    uint64_t virtual_start = ebbsim_now();
    CHECK(virtual_start >= real);
    CHECK_EQ(ebbsim_now(), virtual_start); /* it stands still */
    ebbsim_pass(3600 * (uint64_t)1000 * MS);
    uint64_t an_hour_later = ebbsim_now();
    CHECK_EQ(an_hour_later - virtual_start, 3600 * (uint64_t)1000 * MS);
    ebbsim_clock_virtual(0);
    CHECK(ebbsim_now() >= an_hour_later);
    CHECK(ebbsim_now() < an_hour_later + 10 * (uint64_t)1000 * MS);
}

/* ---- the real clock ---------------------------------------------------------------------------- */

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void a_wait_sleeps_on_the_real_clock(void)
{
    scene s;
    set(&s, 0);
    double start = seconds();
    kernel_of(s.a, 30 * MS);
    CHECK(seconds() - start < 0.025); /* queueing does not wait */
    CHECK_EQ(s.k.driver.cuStreamQuery(s.a), CUDA_ERROR_NOT_READY);
    OK(s.k.driver.cuStreamSynchronize(s.a));
    double took = seconds() - start;
    CHECK(took >= 0.030 && took < 0.5);
    OK(s.k.driver.cuStreamQuery(s.a));
    start = seconds();
    ebbsim_pass(20 * MS);
    took = seconds() - start;
    CHECK(took >= 0.020 && took < 0.5);
}

/* Copies beside a kernel of so many milliseconds: whether it was still at work when they were over. */
static bool overlap_on_the_real_clock(uint64_t milliseconds)
{
    scene s;
    set(&s, 0);
    double start = seconds();
    kernel_of(s.a, milliseconds * MS);
    for (int i = 0; i < 20; i++) { /* 20 ms of them */
        OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.b));
    }
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK(seconds() - start >= 0.020);
    bool at_work = s.k.driver.cuStreamQuery(s.a) == CUDA_ERROR_NOT_READY;
    OK(s.k.driver.cuCtxSynchronize());
    CHECK(seconds() - start >= (double)milliseconds / 1000);
    return at_work;
}

static void works_overlap_on_the_real_clock(void)
{
    bool overlapped = false;
    /* A machine that is busy takes its time, too. */
    for (uint64_t milliseconds = 100; milliseconds <= 3200 && !overlapped; milliseconds *= 2)
        overlapped = overlap_on_the_real_clock(milliseconds);
    CHECK(overlapped);
}

int main(void)
{
    RUN(copies_take_their_latency_and_bytes_by_rate);
    RUN(kernels_take_what_they_say_or_what_they_touch_or_compute);
    RUN(one_engine_does_one_thing_after_another);
    RUN(a_copy_runs_beside_a_kernel);
    RUN(both_ways_at_once_run_at_the_duplex_rate);
    RUN(pageable_copies_are_too_slow_to_notice_the_other_way);
    RUN(a_stream_that_waits_starts_when_the_other_is_there);
    RUN(a_context_event_is_there_when_all_streams_are);
    RUN(every_call_adds_what_it_costs);
    RUN(a_host_that_needs_long_for_a_launch_lets_the_card_wait);
    RUN(a_wait_moves_the_clock_to_the_end_and_not_beyond);
    RUN(work_is_over_when_its_time_has_passed_and_not_before);
    RUN(host_functions_take_no_virtual_time);
    RUN(timings_are_the_same_in_every_run);
    RUN(time_never_runs_backwards_when_the_clock_is_changed);
    RUN(a_wait_sleeps_on_the_real_clock);
    RUN(works_overlap_on_the_real_clock);
    ebbsim_reset();
    return REPORT();
}

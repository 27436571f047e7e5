/*
 * What a VBAR costs: a hit, a miss, an eviction; whether that stays so with many pages; whether the
 * fence holds; and which driver calls it took.
 *
 *   vbar [--json]
 *
 * A hit is fault + compare + unpin of a resident weight, on a real stream, the one that used it last:
 * `hit` on one that was promised to last, `hit_never_captures` on one promised never to capture, too.
 */
#include "bench.h"
#include "internal.h"

#define MIB UINT64_C(1048576)
#define PAGE (32 * MIB)

enum { WEIGHTS = 1000, ROUNDS = 10000, PAGES = 64, REPEATS = 24 };

static bench b;
static ebb_device device;
static ebb__device *inside;
static CUstream stream, other, promised;

static void must(int status, const char *call)
{
    if (status == 0)
        return;
    char why[256] = "";
    ebb_device_failure(device, why, sizeof why);
    fprintf(stderr, "%s gave %d %s\n", call, status, why);
    exit(1);
}
#define MUST(call) must((int)(call), #call)

/* ---- driver calls, counted ------------------------------------------------------------------------ */

/* X(function, parameters, arguments): those whose number is of interest. */
#define COUNTED(X)                                                                                 \
    X(cuCtxSynchronize, (void), ())                                                                \
    X(cuStreamSynchronize, (CUstream a), (a))                                                      \
    X(cuMemFree, (CUdeviceptr a), (a))                                                             \
    X(cuMemCreate,                                                                                 \
      (CUmemGenericAllocationHandle * a, size_t n, const CUmemAllocationProp *p,                   \
       unsigned long long f),                                                                      \
      (a, n, p, f))                                                                                \
    X(cuMemRelease, (CUmemGenericAllocationHandle a), (a))                                         \
    X(cuMemMap,                                                                                    \
      (CUdeviceptr a, size_t n, size_t o, CUmemGenericAllocationHandle h, unsigned long long f),   \
      (a, n, o, h, f))                                                                             \
    X(cuMemUnmap, (CUdeviceptr a, size_t n), (a, n))                                               \
    X(cuMemSetAccess, (CUdeviceptr a, size_t n, const CUmemAccessDesc *d, size_t c), (a, n, d, c)) \
    X(cuMemGetInfo, (size_t * a, size_t * c), (a, c))                                              \
    X(cuEventRecord, (CUevent a, CUstream s), (a, s))                                              \
    X(cuEventQuery, (CUevent a), (a))                                                              \
    X(cuEventSynchronize, (CUevent a), (a))                                                        \
    X(cuStreamWaitEvent, (CUstream a, CUevent e, unsigned f), (a, e, f))                           \
    X(cuStreamIsCapturing, (CUstream a, CUstreamCaptureStatus * s), (a, s))

static ebb__driver real;
typedef struct counts {
#define MEMBER(name, parameters, arguments) unsigned long name;
    COUNTED(MEMBER)
} counts;
static counts calls;

#define WRAPPER(name, parameters, arguments)                                                       \
    static CUresult count_##name parameters                                                        \
    {                                                                                              \
        calls.name++;                                                                              \
        return real.name arguments;                                                                \
    }
COUNTED(WRAPPER)

static void count_calls(bool on)
{
#define REPLACE(name, parameters, arguments) inside->driver.name = on ? count_##name : real.name;
    COUNTED(REPLACE)
    calls = (counts){0};
}

/* ---- pieces --------------------------------------------------------------------------------------- */

static ebb_vbar make(uint64_t bytes)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes};
    ebb_vbar vbar;
    MUST(ebb_vbar_create(device, &options, &vbar));
    return vbar;
}

static void touch(ebb_vbar vbar, uint64_t offset, uint64_t bytes, CUstream on)
{
    uint64_t signature;
    MUST(ebb_vbar_fault(vbar, offset, bytes, on, &signature));
    MUST(ebb_vbar_unpin(vbar, offset, bytes, on));
}

/* Weights of 1 MiB, resident, used once on a stream. */
static ebb_vbar weights(uint64_t *signatures, CUstream on)
{
    ebb_vbar vbar = make(WEIGHTS * MIB);
    for (uint64_t i = 0; i < WEIGHTS; i++) {
        uint64_t offset;
        MUST(ebb_vbar_alloc(vbar, MIB, &offset));
        MUST(ebb_vbar_fault(vbar, offset, MIB, on, &signatures[i]));
        MUST(ebb_vbar_unpin(vbar, offset, MIB, on));
    }
    return vbar;
}

/* What no hit can do without: two swaps, and the driver's answer whether the stream captures, unless
   it never does. */
static double floor_of_a_hit(CUstream on)
{
    static _Atomic uint64_t word;
    enum { TIMES = 200 };
    const bool asks = on != promised;
    double start = bench_now();
    for (unsigned i = 0; i < TIMES; i++) {
        CUstreamCaptureStatus status;
        uint64_t was = atomic_load_explicit(&word, memory_order_relaxed);
        MUST(!atomic_compare_exchange_strong(&word, &was, was + 1));
        if (asks)
            MUST(real.cuStreamIsCapturing(on, &status));
        was = atomic_load_explicit(&word, memory_order_relaxed);
        MUST(!atomic_compare_exchange_strong(&word, &was, was - 1));
    }
    return (bench_now() - start) * 1e9 / TIMES;
}

static double one_round_of_hits(ebb_vbar vbar, const uint64_t *signatures, CUstream on)
{
    unsigned long changed = 0;
    double start = bench_now();
    for (uint64_t i = 0; i < WEIGHTS; i++) {
        uint64_t found;
        MUST(ebb_vbar_fault(vbar, i * MIB, MIB, on, &found));
        changed += found != signatures[i];
        MUST(ebb_vbar_unpin(vbar, i * MIB, MIB, on));
    }
    double took = (bench_now() - start) * 1e9 / WEIGHTS;
    MUST(changed > 0);
    return took;
}

/*
 * Nanoseconds of a hit over all weights, median of many rounds. Beside each round the floor is
 * measured: a processor whose other half, or clock, is somebody else's makes both slower, by half and
 * more and for seconds. So there is a second figure, of those rounds in which the floor took about
 * what it takes at best.
 */
static void hits(ebb_vbar vbar, const uint64_t *signatures, const char *metric, CUstream on)
{
    static double took[ROUNDS], floors[ROUNDS], sorted[ROUNDS], quiet[ROUNDS];
    for (unsigned round = 0; round < ROUNDS; round++) {
        double before = floor_of_a_hit(on);
        took[round] = one_round_of_hits(vbar, signatures, on);
        double after = floor_of_a_hit(on);
        floors[round] = sorted[round] = before > after ? before : after;
    }
    char name[128];
    snprintf(name, sizeof name, on == promised ? "%s_floor_two_swaps" : "%s_floor", metric);
    bench_spread(&b, name, sorted, ROUNDS, "ns");
    double best = sorted[ROUNDS / 50];
    size_t count = 0;
    for (unsigned round = 0; round < ROUNDS; round++)
        if (floors[round] <= 1.15 * best)
            quiet[count++] = took[round];
    snprintf(name, sizeof name, "%s_undisturbed", metric);
    bench_spread(&b, name, quiet, count, "ns");
    snprintf(name, sizeof name, "%s_undisturbed_rounds", metric);
    bench_print(&b, name, 100.0 * (double)count / ROUNDS, "%");
    bench_spread(&b, metric, took, ROUNDS, "ns");
}

/* ---- measurements ------------------------------------------------------------------------------------ */

static void print_per_unpin(const char *metric, const char *what, unsigned long times,
                            const char *unit)
{
    char name[128];
    snprintf(name, sizeof name, "%s_%s_per_unpin", metric, what);
    bench_print(&b, name, (double)times / (10 * WEIGHTS), unit);
}

/* Hits on a stream: how long, and which driver calls they took. */
static void hits_and_calls(ebb_vbar vbar, const uint64_t *signatures, const char *metric,
                           CUstream on)
{
    /* A processor that has been idle is slow for a while. */
    for (double start = bench_now(); bench_now() - start < 2;)
        touch(vbar, 0, MIB, on);
    hits(vbar, signatures, metric, on);
    count_calls(true);
    for (uint64_t i = 0; i < UINT64_C(10) * WEIGHTS; i++)
        touch(vbar, i % WEIGHTS * MIB, MIB, on);
    print_per_unpin(metric, "events_recorded", calls.cuEventRecord, "events");
    print_per_unpin(metric, "capture_questions", calls.cuStreamIsCapturing, "calls");
    count_calls(false);
}

static double median_of_hits(ebb_vbar vbar, const uint64_t *signatures)
{
    enum { TIMES = 300 };
    double took[TIMES];
    for (unsigned round = 0; round < TIMES; round++)
        took[round] = one_round_of_hits(vbar, signatures, stream);
    qsort(took, TIMES, sizeof *took, bench_compare);
    return took[TIMES / 2];
}

/*
 * The same hits beside 10,000 other VBARs with 100 pages each, and without, by turns. A processor that is
 * somebody else's, too, is slower by half for seconds, and that is not to be blamed on them: so the best
 * turn with them is compared with the best without. The other ratio is the median of turns, each compared
 * with the times before and after it.
 */
static void measure_crowd(ebb_vbar vbar, const uint64_t *signatures)
{
    enum { OTHERS = 10000, TURNS = 11 };
    static ebb_vbar others[OTHERS];
    double alone = median_of_hits(vbar, signatures), best = alone, beside[TURNS], ratios[TURNS];
    for (unsigned turn = 0; turn < TURNS; turn++) {
        for (unsigned i = 0; i < OTHERS; i++)
            others[i] = make(100 * PAGE);
        beside[turn] = median_of_hits(vbar, signatures);
        for (unsigned i = 0; i < OTHERS; i++)
            MUST(ebb_vbar_destroy(others[i]));
        double after = median_of_hits(vbar, signatures);
        ratios[turn] = 2 * beside[turn] / (alone + after);
        alone = after;
        best = after < best ? after : best;
    }
    bench_spread(&b, "hit_beside_1000000_pages", beside, TURNS, "ns"); /* sorts them */
    bench_spread(&b, "hit_beside_1000000_pages_ratio_of_turns", ratios, TURNS, "x");
    bench_print(&b, "hit_beside_1000000_pages_ratio", beside[0] / best, "x");
}

static void measure_hit(void)
{
    static uint64_t signatures[WEIGHTS];
    ebb_vbar vbar = weights(signatures, stream);
    hits_and_calls(vbar, signatures, "hit", stream);

    static double took[ROUNDS];
    for (unsigned round = 0; round < ROUNDS; round++) {
        double start = bench_now();
        for (unsigned i = 0; i < 5; i++) {
            touch(vbar, 0, MIB, other);
            touch(vbar, 0, MIB, stream);
        }
        took[round] = (bench_now() - start) * 1e9 / 10;
    }
    bench_spread(&b, "hit_on_alternating_streams", took, ROUNDS, "ns");

    measure_crowd(vbar, signatures);
    MUST(ebb_vbar_destroy(vbar));
}

static void measure_hit_never_captures(void)
{
    static uint64_t signatures[WEIGHTS];
    ebb_vbar vbar = weights(signatures, promised);
    hits_and_calls(vbar, signatures, "hit_never_captures", promised);
    MUST(ebb_vbar_destroy(vbar));
}

/* Misses that find a free frame: of a VBAR that was destroyed a moment ago. */
static double measure_miss(void)
{
    static double took[PAGES * REPEATS], destroyed[REPEATS];
    MUST(ebb_device_set_limit(device, PAGES * PAGE));
    for (unsigned round = 0; round < REPEATS + 1; round++) {
        ebb_vbar vbar = make(PAGES * PAGE);
        for (unsigned i = 0; i < PAGES; i++) {
            uint64_t signature;
            double start = bench_now();
            MUST(ebb_vbar_fault(vbar, i * PAGE, PAGE, stream, &signature));
            if (round)
                took[(round - 1) * PAGES + i] = (bench_now() - start) * 1e6;
            MUST(ebb_vbar_unpin(vbar, i * PAGE, PAGE, stream));
        }
        double start = bench_now();
        MUST(ebb_vbar_destroy(vbar));
        if (round)
            destroyed[round - 1] = (bench_now() - start) * 1e6 / PAGES;
    }
    double median =
        bench_spread(&b, "miss_32_mib_recycled_frame", took, (size_t)PAGES * REPEATS, "us");
    bench_spread(&b, "destroy_per_32_mib_page", destroyed, REPEATS, "us");
    return median;
}

/* How long it takes to find whom to take a page from, nothing else. */
static double choosing(const char *metric)
{
    static double took[ROUNDS];
    const ebb__request request = {.rank = EBB__RANK_ALL, .may_wait = true, .may_call = true};
    ebb__candidate candidate;
    ebb__scope scope;
    ebb__enter(inside, &scope);
    for (unsigned round = 0; round < ROUNDS; round++) {
        double start = bench_now();
        for (unsigned i = 0; i < 100; i++)
            MUST(!ebb__vbar_holder.best(inside, &request, &candidate));
        took[round] = (bench_now() - start) * 1e9 / 100;
    }
    ebb__leave(inside, &scope);
    return bench_spread(&b, metric, took, ROUNDS, "ns");
}

/* Misses that take a page from another VBAR. `resident` pages are candidates. */
static double measure_eviction(unsigned resident, const char *metric, const char *choice_metric,
                               double *choice)
{
    static double took[PAGES * REPEATS];
    MUST(ebb_device_set_limit(device, resident * PAGE));
    ebb_vbar two[2] = {make(resident * PAGE), make(resident * PAGE)};
    for (unsigned i = 0; i < resident; i++)
        touch(two[0], i * PAGE, PAGE, stream);
    MUST(real.cuStreamSynchronize(stream));
    size_t n = 0;
    for (unsigned round = 0; n < sizeof took / sizeof *took; round++) {
        ebb_vbar winner = two[(round + 1) % 2];
        MUST(ebb_vbar_prioritize(winner));
        for (unsigned i = 0; i < resident && n < sizeof took / sizeof *took; i++) {
            uint64_t signature;
            double start = bench_now();
            MUST(ebb_vbar_fault(winner, i * PAGE, PAGE, stream, &signature));
            took[n++] = (bench_now() - start) * 1e6;
            MUST(ebb_vbar_unpin(winner, i * PAGE, PAGE, stream));
        }
    }
    double median = bench_spread(&b, metric, took, n, "us");
    *choice = choosing(choice_metric);
    MUST(ebb_vbar_destroy(two[0]));
    MUST(ebb_vbar_destroy(two[1]));
    return median;
}

/* Keeps a stream busy for 20 ms. */
static void nap(void *unused)
{
    (void)unused;
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
}

/* Work on a page, unpinned while it runs, and then the page is wanted by another. */
static void show_fence(void)
{
    MUST(ebb_device_set_limit(device, PAGE));
    ebb_vbar old = make(PAGE), new = make(PAGE);
    ebb_vbar_stats where = {.size = sizeof where};
    MUST(ebb_vbar_get_stats(old, &where));
    uint64_t signature;
    MUST(ebb_vbar_fault(old, 0, PAGE, stream, &signature));
    MUST(real.cuMemsetD8Async(where.address, 1, PAGE, stream));
    MUST(real.cuLaunchHostFunc(stream, nap, NULL));
    MUST(real.cuMemsetD8Async(where.address, 2, PAGE, stream));
    MUST(ebb_vbar_unpin(old, 0, PAGE, stream));
    bool busy = real.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
    count_calls(true);
    double start = bench_now();
    MUST(ebb_vbar_fault(new, 0, PAGE, other, &signature));
    double took = (bench_now() - start) * 1e3;
    bool over = real.cuStreamQuery(stream) == CUDA_SUCCESS;
    bench_print(&b, "fence_work_ran_when_victim_was_sought", busy, "yes");
    bench_print(&b, "fence_work_over_when_it_was_taken", over, "yes");
    bench_print(&b, "fence_waited", took, "ms");
    bench_print(&b, "fence_context_synchronisations", (double)calls.cuCtxSynchronize, "calls");
    count_calls(false);
    MUST(!busy || !over);
    MUST(ebb_vbar_unpin(new, 0, PAGE, other));
    MUST(ebb_vbar_destroy(new));
    MUST(ebb_vbar_destroy(old));
}

static void print_calls(void)
{
#define PRINT(name, parameters, arguments)                                                         \
    bench_print(&b, "calls_" #name, (double)calls.name, "calls");
    COUNTED(PRINT)
}

int main(int argc, char **argv)
{
    b = bench_begin("vbar", argc, argv);
    ebb_device_options options = {
        .size = sizeof options, .limit = EBB_DEFAULT, .headroom = EBB_DEFAULT};
    char why[256];
    if (ebb_device_open(&options, &device, why, sizeof why) != EBB_OK) {
        fprintf(stderr, "%s\n", why);
        return 1;
    }
    ebb_status status;
    inside = ebb__device_find(device, &status);
    real = inside->driver;
    MUST(real.cuCtxSetCurrent(inside->context));
    MUST(real.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    MUST(real.cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    MUST(real.cuStreamCreate(&promised, CU_STREAM_NON_BLOCKING));
    MUST(ebb_device_keep_stream(device, stream, 0));
    MUST(ebb_device_keep_stream(device, other, 0));
    MUST(ebb_device_keep_stream(device, promised, EBB_NEVER_CAPTURES));

    measure_hit();
    measure_hit_never_captures();
    double miss = measure_miss(), choice, among_many;
    count_calls(true);
    double few = measure_eviction(PAGES, "miss_32_mib_with_eviction", "choice_among_64", &choice);
    print_calls();
    count_calls(false);
    bench_print(&b, "eviction_alone", few - miss, "us");
    ebb_device_stats stats = {.size = sizeof stats};
    MUST(ebb_device_get_stats(device, &stats));
    unsigned many = (unsigned)(stats.free / PAGE * 3 / 4);
    many = many < 3000 ? many : 3000;
    double lots =
        measure_eviction(many, "miss_with_eviction_among_many", "choice_among_many", &among_many);
    bench_print(&b, "many_pages", many, "pages");
    bench_print(&b, "choice_among_many_ratio", among_many / choice, "x");
    bench_print(&b, "miss_with_eviction_among_many_ratio", lots / few, "x");
    show_fence();

    MUST(ebb_device_close(device));
    return 0;
}

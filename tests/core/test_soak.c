/*
 * Everything at once, for a while: threads that use, write, capture, make and destroy, on streams that
 * last and streams that do not, while the limit moves. Every fill writes a value of its own, and what
 * is read back, byte for byte, is what was written last.
 *
 *   argv[1], EBBTIDE_SOAK_SECONDS   how long (default: 3)
 *   argv[2], EBBTIDE_SOAK_SEED      which dice (default: 1). One seed throws the same dice in each
 *                                   thread; how the threads meet is up to the machine.
 */
#include "rig.h"

enum {
    THREADS = 4,
    SHARED = 3,
    WEIGHTS = 24,
    OPERATIONS = 250, /* of each thread in a round */
    SAVED = 3,        /* pages of what is saved before it goes */
    LOOKS = 64,
    LOOK_BYTES = 16384
};

static atomic_int wrong; /* the harness counts on one thread only */

#define WRONG(...)                                                                                 \
    do {                                                                                           \
        if (atomic_fetch_add(&wrong, 1) < 20) {                                                    \
            fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                        \
            fprintf(stderr, __VA_ARGS__);                                                          \
            fputc('\n', stderr);                                                                   \
        }                                                                                          \
    } while (0)

#define EXPECT(got, expected)                                                                      \
    do {                                                                                           \
        long long got_ = (long long)(got);                                                         \
        if (got_ != (long long)(expected))                                                         \
            WRONG("%s gave %lld", #got, got_);                                                     \
    } while (0)

typedef struct weight {
    uint64_t offset, bytes;
    _Atomic uint64_t filled; /* the signature under which it holds `value` */
    uint32_t value;          /* under mu, and of whoever has seen `filled` */
    pthread_mutex_t mu;      /* of who fills it */
} weight;

typedef struct bar {
    ebb_vbar vbar;
    uint64_t address;
    weight weights[WEIGHTS];
} bar;

/* Pages that are written, and saved before they go. */
typedef struct book {
    core *c;
    ebb_vbar vbar;
    uint64_t address;
    CUstream stream; /* of the saving */
    unsigned char *backing;
    pthread_mutex_t mu;
    unsigned refusals;
    atomic_bool saved[SAVED];
    uint64_t signature[SAVED]; /* these two: of the owner */
    uint32_t value[SAVED];
} book;

typedef struct look {
    uint32_t *found;
    size_t words;
    uint32_t expected;
} look;

typedef struct self {
    core *c;
    bar *shared;
    uint64_t dice;
    pthread_t thread;
    CUstream lasting, other;
    CUevent last; /* of streams that are gone */
    bar mine;     /* of this thread alone */
    book book;
    look looks[LOOKS];
    unsigned look_count;
    unsigned char *host; /* pinned, LOOKS * LOOK_BYTES */
} self;

static struct {
    atomic_uint values;
    atomic_ulong uses, fills, saves, graphs, offloaded, bytes;
} count;

static unsigned below(uint64_t *dice, unsigned n)
{
    *dice = *dice * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((*dice >> 33) % n);
}

static uint32_t new_value(void)
{
    return atomic_fetch_add(&count.values, 1) * 2654435761u; /* told apart in every byte */
}

/* ---- reading back --------------------------------------------------------------------------------- */

/* Wait for all that this thread has queued, and look at what it has copied. */
static void look_at_all(self *me)
{
    const ebb__driver *cu = &me->c->driver;
    EXPECT(cu->cuStreamSynchronize(me->lasting), 0);
    EXPECT(cu->cuStreamSynchronize(me->other), 0);
    EXPECT(cu->cuEventSynchronize(me->last), 0);
    EXPECT(cu->cuStreamSynchronize(NULL), 0);
    for (unsigned i = 0; i < me->look_count; i++) {
        const look *l = &me->looks[i];
        for (size_t k = 0; k < l->words; k++)
            if (l->found[k] != l->expected) {
                WRONG("word %zu of %zu is %08x, not %08x", k, l->words, l->found[k], l->expected);
                break;
            }
        atomic_fetch_add(&count.bytes, 4 * l->words);
    }
    me->look_count = 0;
}

/* Copy a piece of what holds `value`, to be looked at later. */
static void look_later(self *me, uint64_t address, uint64_t bytes, uint32_t value, CUstream stream)
{
    uint64_t most = bytes < LOOK_BYTES ? bytes : LOOK_BYTES;
    uint64_t size = (1 + below(&me->dice, (unsigned)(most / 4))) * UINT64_C(4);
    uint64_t at = below(&me->dice, (unsigned)((bytes - size) / 4 + 1)) * UINT64_C(4);
    look *l = &me->looks[me->look_count];
    *l = (look){(void *)(me->host + (size_t)me->look_count * LOOK_BYTES), size / 4, value};
    me->look_count++;
    EXPECT(me->c->driver.cuMemcpyDtoHAsync(l->found, address + at, size, stream), 0);
}

/* ---- streams -------------------------------------------------------------------------------------- */

static CUstream stream_new(self *me)
{
    CUstream stream = NULL;
    MUST(me->c->driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

/* It goes before its work is over. */
static void stream_drop(self *me, CUstream stream)
{
    const ebb__driver *cu = &me->c->driver;
    EXPECT(cu->cuStreamWaitEvent(stream, me->last, 0), 0);
    EXPECT(cu->cuEventRecord(me->last, stream), 0);
    EXPECT(cu->cuStreamDestroy(stream), 0);
}

/* ---- weights -------------------------------------------------------------------------------------- */

static void bar_make(core *c, uint64_t *dice, bar *b)
{
    uint64_t bytes = 0, sizes[WEIGHTS];
    unsigned most = 1u << (8 + below(dice, 5));
    for (unsigned i = 0; i < WEIGHTS; i++)
        bytes += sizes[i] = (1 + below(dice, most)) * UINT64_C(512);
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes, .rise = !below(dice, 3)};
    MUST(ebb_vbar_create(c->device, &options, &b->vbar));
    b->address = core_stats(b->vbar).address;
    for (unsigned i = 0; i < WEIGHTS; i++) {
        MUST(ebb_vbar_alloc(b->vbar, sizes[i], &b->weights[i].offset));
        b->weights[i].bytes = sizes[i];
        atomic_store(&b->weights[i].filled, 0);
    }
}

/* A range that is pinned: fill it if that is to do, and look at it. */
static void use_pinned(self *me, bar *b, weight *w, uint64_t before, uint64_t signature,
                       CUstream stream)
{
    bool right = before == signature;
    if (!right) {
        pthread_mutex_lock(&w->mu);
        if (atomic_load(&w->filled) != signature) {
            w->value = new_value();
            EXPECT(me->c->driver.cuMemsetD32Async(b->address + w->offset, w->value, w->bytes / 4,
                                                  stream),
                   0);
            EXPECT(ebb_vbar_filled(b->vbar, w->offset, w->bytes, stream), EBB_OK);
            atomic_store(&w->filled, signature);
            atomic_fetch_add(&count.fills, 1);
            right = true;
        } /* else somebody filled it after our fault: nothing orders us after that */
        pthread_mutex_unlock(&w->mu);
    }
    if (right)
        look_later(me, b->address + w->offset, w->bytes, w->value, stream);
    atomic_fetch_add(&count.uses, 1);
}

static void use(self *me, bar *b, CUstream stream)
{
    unsigned first = below(&me->dice, WEIGHTS), n = 1 + below(&me->dice, 3);
    if (first + n > WEIGHTS)
        n = WEIGHTS - first;
    ebb_range ranges[3];
    uint64_t before[3], signatures[3] = {0};
    for (unsigned i = 0; i < n; i++) {
        weight *w = &b->weights[first + i];
        ranges[i] = (ebb_range){w->offset, w->bytes};
        before[i] = atomic_load(&w->filled);
    }
    bool one = n == 1 && below(&me->dice, 2);
    ebb_status status =
        one ? ebb_vbar_fault(b->vbar, ranges[0].offset, ranges[0].bytes, stream, signatures)
            : ebb_vbar_fault_many(b->vbar, ranges, n, stream, signatures);
    if (status == EBB_OFFLOADED) {
        atomic_fetch_add(&count.offloaded, 1);
        return;
    }
    EXPECT(status, EBB_OK);
    if (status != EBB_OK)
        return;
    for (unsigned i = 0; i < n; i++)
        use_pinned(me, b, &b->weights[first + i], before[i], signatures[i], stream);
    if (one)
        EXPECT(ebb_vbar_unpin(b->vbar, ranges[0].offset, ranges[0].bytes, stream), EBB_OK);
    else
        EXPECT(ebb_vbar_unpin_many(b->vbar, ranges, n, stream), EBB_OK);
}

/* ---- pages that are saved ------------------------------------------------------------------------- */

static int save(void *user, uint64_t offset, uint64_t bytes)
{
    book *b = user;
    const ebb__driver *cu = &b->c->driver;
    CUcontext popped;
    pthread_mutex_lock(&b->mu);
    int refuses = b->refusals++ % 8 == 7;
    if (!refuses) {
        EXPECT(cu->cuCtxPushCurrent(b->c->context), 0);
        EXPECT(cu->cuMemcpyDtoHAsync(b->backing + offset, b->address + offset, bytes, b->stream),
               0);
        EXPECT(cu->cuStreamSynchronize(b->stream), 0);
        EXPECT(cu->cuCtxPopCurrent(&popped), 0);
        atomic_store(&b->saved[offset / SMALL], true);
        atomic_fetch_add(&count.saves, 1);
    }
    pthread_mutex_unlock(&b->mu);
    return refuses;
}

static void read_or_write(self *me, CUstream stream)
{
    const ebb__driver *cu = &me->c->driver;
    book *b = &me->book;
    unsigned page = below(&me->dice, SAVED);
    uint64_t offset = page * SMALL, signature = 0;
    ebb_status status = ebb_vbar_fault(b->vbar, offset, SMALL, stream, &signature);
    if (status == EBB_OFFLOADED) {
        EXPECT(ebb_vbar_prioritize(b->vbar), EBB_OK);
        return;
    }
    EXPECT(status, EBB_OK);
    if (status != EBB_OK)
        return;
    bool empty = !b->signature[page];
    if (signature != b->signature[page] && !empty) {
        if (!atomic_load(&b->saved[page]))
            WRONG("page %u went without being saved", page);
        EXPECT(
            cu->cuMemcpyHtoDAsync(b->address + offset, b->backing + offset, (size_t)SMALL, stream),
            0);
        look_later(me, b->address + offset, SMALL, b->value[page], stream);
    }
    if (empty || below(&me->dice, 3) == 0) {
        b->value[page] = new_value();
        EXPECT(cu->cuMemsetD32Async(b->address + offset, b->value[page], SMALL / 4, stream), 0);
        atomic_store(&b->saved[page], false);
    }
    EXPECT(ebb_vbar_filled(b->vbar, offset, SMALL, stream), EBB_OK);
    b->signature[page] = signature;
    look_later(me, b->address + offset, SMALL, b->value[page], stream);
    EXPECT(ebb_vbar_unpin(b->vbar, offset, SMALL, stream), EBB_OK);
}

/* ---- graphs --------------------------------------------------------------------------------------- */

/* Read a weight of our own by a graph. */
static void by_graph(self *me)
{
    const ebb__driver *cu = &me->c->driver;
    bar *b = &me->mine;
    weight *w = &b->weights[below(&me->dice, WEIGHTS)];
    CUstream stream = below(&me->dice, 2) ? me->lasting : me->other;
    uint64_t signature = 0;
    if (stream == me->lasting)
        EXPECT(ebb_device_keep_stream(me->c->device, stream, 0), EBB_OK);
    EXPECT(cu->cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), 0);
    ebb_status status = ebb_vbar_fault(b->vbar, w->offset, w->bytes, stream, &signature);
    if (status == EBB_OK) {
        if (signature == atomic_load(&w->filled))
            look_later(me, b->address + w->offset, w->bytes, w->value, stream);
        EXPECT(ebb_vbar_unpin(b->vbar, w->offset, w->bytes, stream), EBB_OK);
    } else {
        EXPECT(status, EBB_OFFLOADED);
    }
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    EXPECT(cu->cuStreamEndCapture(stream, &graph), 0);
    /* A promise until the next one. */
    if (stream == me->lasting && below(&me->dice, 2))
        EXPECT(ebb_device_keep_stream(me->c->device, stream, EBB_NEVER_CAPTURES), EBB_OK);
    if (graph) {
        EXPECT(cu->cuGraphInstantiateWithFlags(&exec, graph, 0), 0);
        EXPECT(cu->cuGraphDestroy(graph), 0);
    }
    if (exec) {
        EXPECT(cu->cuGraphLaunch(exec, stream), 0);
        EXPECT(cu->cuGraphExecDestroy(exec), 0);
        atomic_fetch_add(&count.graphs, 1);
    }
    EXPECT(ebb_vbar_graphs_gone(b->vbar, stream), EBB_OK);
}

/* ---- all together --------------------------------------------------------------------------------- */

static void manage(self *me)
{
    ebb_device device = me->c->device;
    unsigned which = below(&me->dice, SHARED + 1);
    ebb_vbar vbar = which < SHARED ? me->shared[which].vbar : me->mine.vbar;
    ebb_device_stats stats = {.size = sizeof stats};
    ebb_status status;
    char why[256] = "";
    switch (below(&me->dice, 10)) {
    case 0:
    case 1:
    case 2:
        EXPECT(ebb_vbar_prioritize(vbar), EBB_OK);
        break;
    case 3:
        EXPECT(ebb_vbar_deprioritize(vbar), EBB_OK);
        break;
    case 4:
        EXPECT(ebb_vbar_free_memory(vbar, below(&me->dice, 40) * MIB, NULL), EBB_OK);
        break;
    case 5:
        status = ebb_device_set_limit(device, (48 + below(&me->dice, 144)) * MIB);
        if (status != EBB_OK && status != EBB_BUSY)
            WRONG("set_limit gave %d", (int)status);
        break;
    case 6:
        EXPECT(ebb_device_trim(device, NULL), EBB_OK);
        break;
    case 7:
        status = ebb_check(device, why, sizeof why);
        if (status != EBB_OK)
            WRONG("%s", why);
        break;
    case 8:
        EXPECT(ebb_vbar_set_watermark(vbar, below(&me->dice, 64) * MIB), EBB_OK);
        break;
    default:
        EXPECT(ebb_device_get_stats(device, &stats), EBB_OK);
    }
}

static void operate(self *me)
{
    bar *b = below(&me->dice, 2) ? &me->shared[below(&me->dice, SHARED)] : &me->mine;
    unsigned thrown = below(&me->dice, 100);
    if (me->look_count + 4 > LOOKS)
        look_at_all(me);
    if (thrown < 50) {
        use(me, b, me->lasting);
    } else if (thrown < 58) {
        use(me, b, me->other);
    } else if (thrown < 62) {
        use(me, b, NULL);
    } else if (thrown < 68) { /* a stream for this alone */
        CUstream stream = stream_new(me);
        use(me, b, stream);
        stream_drop(me, stream);
    } else if (thrown < 70) {
        stream_drop(me, me->other);
        me->other = stream_new(me);
    } else if (thrown < 80) {
        read_or_write(me, below(&me->dice, 3) ? me->lasting : me->other);
    } else if (thrown < 86) {
        by_graph(me);
    } else if (thrown < 90) {
        ebb_status status = ebb_vbar_destroy(me->mine.vbar); /* somebody may be taking a page */
        if (status == EBB_OK)
            bar_make(me->c, &me->dice, &me->mine);
        else
            EXPECT(status, EBB_BUSY);
    } else {
        manage(me);
    }
}

static void *round_of(void *data)
{
    self *me = data;
    MUST(me->c->driver.cuCtxSetCurrent(me->c->context));
    for (int i = 0; i < OPERATIONS && !atomic_load(&wrong); i++)
        operate(me);
    look_at_all(me);
    return NULL;
}

/* ---- from the beginning to the end ---------------------------------------------------------------- */

static double seconds;
static uint64_t seed;

static double wall(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void self_make(core *c, self *me, bar *shared, unsigned number)
{
    void *host;
    me->c = c;
    me->shared = shared;
    me->dice = seed * 7919 + number * 104729 + 1;
    me->lasting = number % 2 ? core_promised(c) : core_lasting(c);
    me->other = stream_new(me);
    MUST(c->driver.cuEventCreate(&me->last, CU_EVENT_DISABLE_TIMING));
    MUST(c->driver.cuMemHostAlloc(&host, (size_t)LOOKS * LOOK_BYTES, 0));
    me->host = host;
    MUST(c->driver.cuMemHostAlloc(&host, SAVED * SMALL, 0));
    me->book = (book){.c = c, .backing = host, .stream = core_stream(c)};
    pthread_mutex_init(&me->book.mu, NULL);
    for (unsigned i = 0; i < WEIGHTS; i++)
        pthread_mutex_init(&me->mine.weights[i].mu, NULL);
}

static void vbars_make(core *c, self *me)
{
    ebb_vbar_options options = {
        .size = sizeof options, .bytes = SAVED * SMALL, .page_out = save, .user = &me->book};
    MUST(ebb_vbar_create(c->device, &options, &me->book.vbar));
    me->book.address = core_stats(me->book.vbar).address;
    bar_make(c, &me->dice, &me->mine);
}

static uint64_t free_bytes(core *c)
{
    size_t free_now = 0, total;
    MUST(c->driver.cuMemGetInfo(&free_now, &total));
    return free_now;
}

static void what_was_written_is_read_and_nothing_is_left(void)
{
    static core c;
    static bar shared[SHARED];
    static self all[THREADS];
    double begin = wall();
    unsigned long rounds = 0;
    uint64_t dice = seed;
    core_open(&c, 1024 * MIB, 128 * MIB);
    rig_clock();
    for (unsigned i = 0; i < THREADS; i++)
        self_make(&c, &all[i], shared, i);
    uint64_t before = free_bytes(&c);
    for (unsigned i = 0; i < SHARED; i++) {
        for (unsigned k = 0; k < WEIGHTS; k++)
            pthread_mutex_init(&shared[i].weights[k].mu, NULL);
        bar_make(&c, &dice, &shared[i]);
    }
    for (unsigned i = 0; i < THREADS; i++)
        vbars_make(&c, &all[i]);

    do {
        for (unsigned i = 0; i < THREADS; i++)
            REQUIRE(pthread_create(&all[i].thread, NULL, round_of, &all[i]) == 0);
        for (unsigned i = 0; i < THREADS; i++)
            pthread_join(all[i].thread, NULL);
        core_check(&c);
        CHECK_EQ(core_device_stats(&c).pinned, 0);
        CHECK_EQ(core_device_stats(&c).poisoned, 0);
        /* One of the shared ones makes room for another. */
        bar *old = &shared[below(&dice, SHARED)];
        CHECK_EQ(ebb_vbar_destroy(old->vbar), EBB_OK);
        bar_make(&c, &dice, old);
        rounds++;
    } while (wall() - begin < seconds && !atomic_load(&wrong) && !harness_failures);
    CHECK_EQ(atomic_load(&wrong), 0);
    printf(
        "       %lu rounds in %.1f s: %lu uses, %lu fills, %lu offloaded, %lu saved, %lu graphs, "
        "%lu MiB read back\n",
        rounds, wall() - begin, atomic_load(&count.uses), atomic_load(&count.fills),
        atomic_load(&count.offloaded), atomic_load(&count.saves), atomic_load(&count.graphs),
        (unsigned long)(atomic_load(&count.bytes) / MIB));
    CHECK(atomic_load(&count.uses) > atomic_load(&count.fills));

    for (unsigned i = 0; i < SHARED; i++)
        CHECK_EQ(ebb_vbar_destroy(shared[i].vbar), EBB_OK);
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK_EQ(ebb_vbar_destroy(all[i].mine.vbar), EBB_OK);
        CHECK_EQ(ebb_vbar_destroy(all[i].book.vbar), EBB_OK);
    }
    CHECK_EQ(ebb_device_trim(c.device, NULL), EBB_OK);
    ebb_device_stats stats = core_device_stats(&c);
    CHECK_EQ(stats.held, 0);
    CHECK_EQ(stats.resident + stats.unused + stats.poisoned, 0);
    CHECK_EQ(stats.vbars, 0);
    CHECK_EQ(stats.frames_created, stats.frames_released);
    /* A real driver keeps something for streams and graphs. */
    uint64_t after = free_bytes(&c), tolerance = c.sim ? 0 : 128 * MIB;
    if (after + tolerance < before)
        FAIL("%llu MiB are free, %llu MiB were", (unsigned long long)(after / MIB),
             (unsigned long long)(before / MIB));
    for (unsigned i = 0; i < THREADS; i++) {
        MUST(c.driver.cuStreamDestroy(all[i].other));
        MUST(c.driver.cuEventDestroy(all[i].last));
        MUST(c.driver.cuMemFreeHost(all[i].host));
        MUST(c.driver.cuMemFreeHost(all[i].book.backing));
    }
    core_close(&c);
}

int main(int argc, char **argv)
{
    const char *for_seconds = argc > 1 ? argv[1] : getenv("EBBTIDE_SOAK_SECONDS");
    const char *of_seed = argc > 2 ? argv[2] : getenv("EBBTIDE_SOAK_SEED");
    seconds = for_seconds ? strtod(for_seconds, NULL) : 3;
    seed = of_seed ? strtoull(of_seed, NULL, 10) : 1;
    printf("       seed %llu\n", (unsigned long long)seed);
    RUN(what_was_written_is_read_and_nothing_is_left);
    return REPORT();
}

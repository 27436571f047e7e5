/*
 * Many threads at once. A hit and its unpin take no lock: this is the proof that they need none, run
 * under the thread sanitizer as well.
 *
 *   argv[1]   rounds for each thread (default: as many as a test should take)
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "rig.h"
#include "scale.h"

enum { THREADS = 8, BARS = 3, WEIGHTS = 24, SLOTS = 3, LOOKS = 128 };

static unsigned long rounds;
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

/* A weight that every thread uses. Its contents are right under `filled`, and only then. */
typedef struct weight {
    uint64_t offset, bytes;
    _Atomic uint64_t filled;
    pthread_mutex_t mu; /* of who fills it */
    uint64_t version;   /* under mu, and of whoever has seen `filled` */
} weight;

typedef struct shared {
    core c;
    ebb_vbar bars[BARS];
    uint64_t address[BARS];
    weight weights[BARS][WEIGHTS];
    struct slot { /* a VBAR that comes and goes */
        pthread_mutex_t mu;
        ebb_vbar vbar;
        uint64_t bytes, address;
    } slots[SLOTS];
    atomic_ulong uses, fills, gone, page_outs;
} shared;

typedef struct self {
    shared *s;
    uint64_t dice;
    CUstream lasting, other;
    pthread_t thread;
    /* On a real GPU: what was copied to pinned memory, to be looked at once it is there. */
    CUevent last; /* of the streams before `other` */
    unsigned looks;
    uint32_t expected[LOOKS], *found;
} self;

static unsigned below(self *me, unsigned n)
{
    me->dice = me->dice * 6364136223846793005u + 1442695040888963407u;
    return (unsigned)((me->dice >> 33) % n);
}

/* ---- contents ------------------------------------------------------------------------------------ */

typedef struct job {
    uint64_t *first, *last, value; /* the first and last word of a weight */
    bool write;
} job;

static void run_job(void *data)
{
    job *j = data;
    if (j->write)
        *j->first = *j->last = j->value;
    else if (*j->first != j->value || *j->last != j->value)
        WRONG("a weight holds %llx and %llx, not %llx", (unsigned long long)*j->first,
              (unsigned long long)*j->last, (unsigned long long)j->value);
    free(j);
}

/* Wait for all that this thread has queued, and look at what it has copied. */
static void look(self *me)
{
    const ebb__driver *cu = &me->s->c.driver;
    EXPECT(cu->cuStreamSynchronize(me->lasting), 0);
    if (me->s->c.sim)
        return;
    EXPECT(cu->cuStreamSynchronize(me->other), 0);
    EXPECT(cu->cuEventSynchronize(me->last), 0);
    for (unsigned i = 0; i < me->looks; i++)
        if (me->found[2 * i] != me->expected[i] || me->found[2 * i + 1] != me->expected[i])
            WRONG("a weight holds %x and %x, not %x", me->found[2 * i], me->found[2 * i + 1],
                  me->expected[i]);
    me->looks = 0;
}

/* The same by copies and memsets. */
static void real_work(self *me, unsigned bar, weight *w, bool write, CUstream stream)
{
    const ebb__driver *cu = &me->s->c.driver;
    uint64_t at = me->s->address[bar] + w->offset, end = at + w->bytes - 4;
    uint32_t value = (uint32_t)(w->version << 17 | w->offset >> 9);
    if (write) {
        EXPECT(cu->cuMemsetD32Async(at, value, w->bytes / 4, stream), 0);
        return;
    }
    if (me->looks == LOOKS)
        look(me);
    me->expected[me->looks] = value;
    EXPECT(cu->cuMemcpyDtoHAsync(me->found + (size_t)2 * me->looks, at, 4, stream), 0);
    EXPECT(cu->cuMemcpyDtoHAsync(me->found + (size_t)2 * me->looks + 1, end, 4, stream), 0);
    me->looks++;
}

static void work(self *me, unsigned bar, weight *w, bool write, CUstream stream)
{
    shared *s = me->s;
    if (!s->c.sim) {
        real_work(me, bar, w, write, stream);
        return;
    }
    job *j = malloc(sizeof *j);
    uint64_t at = s->address[bar] + w->offset, end = at + w->bytes - 8;
    *j = (job){(void *)(uintptr_t)at, (void *)(uintptr_t)end, w->version << 16 | w->offset >> 9,
               write};
    int access = write ? EBBSIM_WRITE : EBBSIM_READ;
    ebbsim_range ranges[] = {{at, 8, access}, {end, 8, access}};
    ebbsim_work launch = {.size = sizeof launch,
                          .name = write ? "fill" : "use",
                          .ranges = ranges,
                          .range_count = 2,
                          .nanoseconds = 20000,
                          .function = run_job,
                          .data = j};
    EXPECT(ebbsim_launch(&launch, stream), 0);
}

static void use(self *me, CUstream stream)
{
    shared *s = me->s;
    unsigned bar = below(me, BARS);
    weight *w = &s->weights[bar][below(me, WEIGHTS)];
    /* Only what was filled before the fault is ordered before what follows it. */
    uint64_t filled = atomic_load(&w->filled), signature = 0;
    ebb_status status = ebb_vbar_fault(s->bars[bar], w->offset, w->bytes, stream, &signature);
    if (status == EBB_OFFLOADED)
        return;
    EXPECT(status, EBB_OK);
    if (status != EBB_OK)
        return;
    bool right = signature == filled;
    if (!right) {
        pthread_mutex_lock(&w->mu);
        if (atomic_load(&w->filled) != signature) {
            w->version++;
            work(me, bar, w, true, stream);
            EXPECT(ebb_vbar_filled(s->bars[bar], w->offset, w->bytes, stream), EBB_OK);
            atomic_store(&w->filled, signature);
            atomic_fetch_add(&s->fills, 1);
            right = true;
        }
        pthread_mutex_unlock(&w->mu);
    }
    if (right)
        work(me, bar, w, false, stream);
    EXPECT(ebb_vbar_unpin(s->bars[bar], w->offset, w->bytes, stream), EBB_OK);
    atomic_fetch_add(&s->uses, 1);
}

/* ---- VBARs that come and go ---------------------------------------------------------------------- */

static void make(self *me, struct slot *slot)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = (1 + below(me, 60)) * MIB};
    ebb_vbar vbar = {0};
    EXPECT(ebb_vbar_create(me->s->c.device, &options, &vbar), EBB_OK);
    uint64_t address = core_stats(vbar).address; /* nobody else knows it yet */
    pthread_mutex_lock(&slot->mu);
    slot->vbar = vbar;
    slot->bytes = options.bytes;
    slot->address = address;
    pthread_mutex_unlock(&slot->mu);
}

static void replace(self *me)
{
    struct slot *slot = &me->s->slots[below(me, SLOTS)];
    pthread_mutex_lock(&slot->mu);
    ebb_vbar vbar = slot->vbar;
    pthread_mutex_unlock(&slot->mu);
    ebb_status status = ebb_vbar_destroy(vbar);
    if (status == EBB_OK) {
        make(me, slot);
    } else if (status != EBB_BUSY && status != EBB_GONE) {
        WRONG("destroy gave %d", (int)status);
    }
}

/* Use a range of a VBAR that may be destroyed this moment. */
static void visit(self *me)
{
    shared *s = me->s;
    struct slot *slot = &s->slots[below(me, SLOTS)];
    pthread_mutex_lock(&slot->mu);
    ebb_vbar vbar = slot->vbar;
    uint64_t size = slot->bytes, address = slot->address;
    pthread_mutex_unlock(&slot->mu);
    unsigned count = 1 + below(me, 3);
    ebb_range ranges[3];
    uint64_t signatures[3] = {0};
    for (unsigned i = 0; i < count; i++) {
        ranges[i].offset = (uint64_t)below(me, (unsigned)(size / 512)) * 512;
        ranges[i].bytes = 1 + below(me, (unsigned)(size - ranges[i].offset));
    }
    ebb_status status =
        count == 1
            ? ebb_vbar_fault(vbar, ranges[0].offset, ranges[0].bytes, me->lasting, signatures)
            : ebb_vbar_fault_many(vbar, ranges, count, me->lasting, signatures);
    if (status == EBB_OK) {
        EXPECT(signatures[0] != 0, true);
        EXPECT(rig_kernel("visit", address + ranges[0].offset, 1, EBBSIM_READ, 50000, me->lasting),
               0);
        /* It cannot go while it is pinned. */
        EXPECT(ebb_vbar_unpin_many(vbar, ranges, count, me->lasting), EBB_OK);
    } else if (status == EBB_GONE) {
        atomic_fetch_add(&s->gone, 1);
    } else if (status != EBB_OFFLOADED) {
        WRONG("fault gave %d", (int)status);
    }
}

/* ---- all together -------------------------------------------------------------------------------- */

static int save(void *user, uint64_t offset, uint64_t bytes)
{
    shared *s = user;
    (void)bytes;
    return atomic_fetch_add(&s->page_outs, 1) % 8 == 7 && offset; /* keeps some */
}

static void manage(self *me)
{
    shared *s = me->s;
    ebb_vbar bar = s->bars[below(me, BARS)];
    char why[256] = "";
    ebb_status status;
    ebb_device_stats stats = {.size = sizeof stats};
    switch (below(me, 10)) {
    case 0:
    case 1:
    case 2:
        EXPECT(ebb_vbar_prioritize(bar), EBB_OK);
        break;
    case 3:
        EXPECT(ebb_vbar_deprioritize(bar), EBB_OK);
        break;
    case 4:
        EXPECT(ebb_vbar_free_memory(bar, below(me, 40) * MIB, NULL), EBB_OK);
        break;
    case 5:
        status = ebb_device_set_limit(s->c.device, (64 + below(me, 128)) * MIB);
        if (status != EBB_OK && status != EBB_BUSY)
            WRONG("set_limit gave %d", (int)status);
        break;
    case 6:
        EXPECT(ebb_device_trim(s->c.device, NULL), EBB_OK);
        break;
    case 7:
        status = ebb_check(s->c.device, why, sizeof why);
        if (status != EBB_OK)
            WRONG("%s", why);
        break;
    case 8: /* nothing is captured here: both are true */
        EXPECT(
            ebb_device_keep_stream(s->c.device, me->lasting, below(me, 2) ? EBB_NEVER_CAPTURES : 0),
            EBB_OK);
        break;
    default:
        EXPECT(ebb_device_get_stats(s->c.device, &stats), EBB_OK);
    }
}

static void renew_stream(self *me)
{
    const ebb__driver *cu = &me->s->c.driver;
    if (!me->s->c.sim) { /* it may go before its work is over */
        EXPECT(cu->cuStreamWaitEvent(me->other, me->last, 0), 0);
        EXPECT(cu->cuEventRecord(me->last, me->other), 0);
    }
    EXPECT(cu->cuStreamDestroy(me->other), 0);
    EXPECT(cu->cuStreamCreate(&me->other, CU_STREAM_NON_BLOCKING), 0);
}

static void *hammer(void *data)
{
    self *me = data;
    MUST(me->s->c.driver.cuCtxSetCurrent(me->s->c.context));
    for (unsigned long i = 0; i < rounds && !atomic_load(&wrong); i++) {
        unsigned thrown = below(me, 100);
        if (thrown < 60)
            use(me, me->lasting);
        else if (thrown < 65)
            use(me, me->other);
        else if (thrown < 66)
            renew_stream(me);
        else if (thrown < 80)
            visit(me);
        else if (thrown < 88)
            replace(me);
        else
            manage(me);
        if (i % 64 == 63)
            look(me);
    }
    look(me);
    return NULL;
}

static void start_shared(shared *s)
{
    core_open(&s->c, 512 * MIB, 160 * MIB);
    rig_clock();
    for (unsigned b = 0; b < BARS; b++) {
        ebb_vbar_options options = {.size = sizeof options,
                                    .bytes = (40 + 22 * b) * MIB,
                                    .rise = b == 1,
                                    .page_out = b == 2 ? save : NULL,
                                    .user = s};
        MUST(ebb_vbar_create(s->c.device, &options, &s->bars[b]));
        s->address[b] = core_stats(s->bars[b]).address;
        for (unsigned i = 0; i < WEIGHTS; i++) {
            weight *w = &s->weights[b][i];
            w->bytes = options.bytes / WEIGHTS / 512 * 512 - 512 * (i % 3);
            MUST(ebb_vbar_alloc(s->bars[b], w->bytes, &w->offset));
            pthread_mutex_init(&w->mu, NULL);
        }
    }
}

static void run(shared *s, self *all, void *(*function)(void *))
{
    for (unsigned i = 0; i < THREADS; i++) {
        all[i] = (self){.s = s, .dice = i * 7919 + 1};
        all[i].lasting = i % 2 ? core_promised(&s->c) : core_lasting(&s->c);
        MUST(s->c.driver.cuStreamCreate(&all[i].other, CU_STREAM_NON_BLOCKING));
        MUST(s->c.driver.cuEventCreate(&all[i].last, CU_EVENT_DISABLE_TIMING));
        all[i].found = (uint32_t *)(void *)s->c.host + (size_t)2 * LOOKS * i;
    }
    for (unsigned i = 0; i < SLOTS; i++) {
        pthread_mutex_init(&s->slots[i].mu, NULL);
        make(&all[0], &s->slots[i]);
    }
    for (unsigned i = 0; i < THREADS; i++)
        REQUIRE(pthread_create(&all[i].thread, NULL, function, &all[i]) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(all[i].thread, NULL);
    for (unsigned i = 0; i < THREADS; i++) {
        MUST(s->c.driver.cuStreamDestroy(all[i].other));
        MUST(s->c.driver.cuEventDestroy(all[i].last));
    }
    CHECK_EQ(atomic_load(&wrong), 0);
}

static void eight_threads_share_weights_and_find_what_they_filled(void)
{
    static shared s;
    static self all[THREADS];
    start_shared(&s);
    run(&s, all, hammer);
    CHECK_EQ(core_device_stats(&s.c).pinned, 0);
    CHECK(atomic_load(&s.fills) > 0 && atomic_load(&s.fills) < atomic_load(&s.uses));
    printf("%lu uses, %lu fills, %lu page-outs, %lu found it gone\n", atomic_load(&s.uses),
           atomic_load(&s.fills), atomic_load(&s.page_outs), atomic_load(&s.gone));
    core_close(&s.c);
}

/* ---- destroy against fault ----------------------------------------------------------------------- */

static void *visit_or_replace(void *data)
{
    self *me = data;
    bool destroys = (me->dice / 7919) % 4 == 0;
    MUST(me->s->c.driver.cuCtxSetCurrent(me->s->c.context));
    for (unsigned long i = 0; i < rounds && !atomic_load(&wrong); i++) {
        if (destroys)
            replace(me);
        else
            visit(me);
        if (i % 64 == 63) /* so that the simulator has not too much to remember */
            EXPECT(me->s->c.driver.cuStreamSynchronize(me->lasting), 0);
    }
    return NULL;
}

static void a_fault_that_meets_a_destroy_finds_it_gone_or_holds_it(void)
{
    static shared s;
    static self all[THREADS];
    core_open(&s.c, 512 * MIB, 256 * MIB);
    rig_clock();
    run(&s, all, visit_or_replace);
    CHECK_EQ(core_device_stats(&s.c).pinned, 0);
    core_close(&s.c);
}

static void *destroy(void *data)
{
    ebb_vbar *vbar = data;
    return (void *)(intptr_t)ebb_vbar_destroy(*vbar);
}

static void a_destroy_that_is_overtaken_by_a_fault_gives_up(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, 2 * SMALL);
    uint64_t signature, again;
    /* The lower page is in use by the GPU for a while: destroy drops the upper one and waits. */
    CHECK_EQ(ebb_vbar_fault(v, SMALL, SMALL, NULL, &signature), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin(v, SMALL, SMALL, NULL), EBB_OK);
    CHECK_EQ(ebb_vbar_fault(v, 0, SMALL, s, &signature), EBB_OK);
    MUST(rig_kernel("long", core_stats(v).address, 1, EBBSIM_READ, 300 * MILLISECOND, s));
    CHECK_EQ(ebb_vbar_unpin(v, 0, SMALL, s), EBB_OK);
    pthread_t thread;
    void *result;
    REQUIRE(pthread_create(&thread, NULL, destroy, &v) == 0);
    uint8_t flags[2] = {0, 1};
    while (flags[1] && ebb_vbar_residency(v, flags, 2) == EBB_OK)
        sched_yield();
    CHECK_EQ(ebb_vbar_fault(v, SMALL, SMALL, NULL, &again), EBB_OK);
    pthread_join(thread, &result);
    CHECK_EQ((intptr_t)result, EBB_BUSY);
    core_check(&c);
    CHECK_EQ(ebb_vbar_unpin(v, SMALL, SMALL, NULL), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    core_close(&c);
}

/* ---- open and close ------------------------------------------------------------------------------ */

static _Atomic uint64_t stray; /* a VBAR of somebody's, perhaps of a device that is closed by now */

static void *open_and_close(void *data)
{
    self *me = data;
    ebb_device_options options = {
        .size = sizeof options, .library = core_library(), .limit = EBB_DEFAULT, .headroom = 0};
    unsigned long lives = rounds / (core_sim() ? 40 : 400); /* a real context takes long to make */
    for (unsigned long i = 0; i < lives && !atomic_load(&wrong); i++) {
        ebb_device device = {0};
        ebb_vbar vbar = {0};
        uint64_t signature;
        EXPECT(ebb_device_open(&options, &device, NULL, 0), EBB_OK);
        ebb_vbar_options of = {.size = sizeof of, .bytes = (1 + below(me, 50)) * MIB};
        EXPECT(ebb_vbar_create(device, &of, &vbar), EBB_OK);
        ebb_status status = ebb_vbar_fault(vbar, 0, 1, NULL, &signature);
        if (status == EBB_OK)
            EXPECT(ebb_vbar_unpin(vbar, 0, 1, NULL), EBB_OK);
        else
            EXPECT(status, EBB_OFFLOADED); /* others' newer ones fill the card */
        atomic_store(&stray, vbar.id);
        if (below(me, 2))
            EXPECT(ebb_vbar_destroy(vbar), EBB_OK);
        ebb_vbar other = {atomic_load(&stray)};
        status = ebb_vbar_prioritize(other);
        if (status != EBB_OK && status != EBB_GONE)
            WRONG("prioritize gave %d", (int)status);
        ebb_check(device, NULL, 0);
        EXPECT(ebb_device_close(device), EBB_OK);
    }
    return NULL;
}

static void a_device_is_opened_and_closed_by_everybody(void)
{
    static shared s;
    static self all[THREADS];
    s.c.sim = core_sim();
    rig_cards(1, 1024 * MIB, 1);
    rig_clock();
    for (unsigned i = 0; i < THREADS; i++) {
        all[i] = (self){.s = &s, .dice = i * 7919 + 1};
        REQUIRE(pthread_create(&all[i].thread, NULL, open_and_close, &all[i]) == 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(all[i].thread, NULL);
    CHECK_EQ(atomic_load(&wrong), 0);
    if (s.c.sim) {
        ebbsim_census n = {.size = sizeof n};
        ebbsim_census_take(&n);
        CHECK_EQ(n.reservations + n.handles + n.mappings + n.events + n.contexts, 0);
        CHECK_EQ(ebbsim_hazards(), 0);
    }
}

int main(int argc, char **argv)
{
    rounds = argc > 1 ? strtoul(argv[1], NULL, 10) : SCALED(core_sim() ? 20000 : 2000, 3000);
    RUN(eight_threads_share_weights_and_find_what_they_filled);
    RUN(a_fault_that_meets_a_destroy_finds_it_gone_or_holds_it);
    RUN(a_destroy_that_is_overtaken_by_a_fault_gives_up);
    RUN(a_device_is_opened_and_closed_by_everybody);
    return REPORT();
}

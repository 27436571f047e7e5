/* A mover in trouble: whatever fails, and threads. */
#include "haul.h"
#include "scale.h"

/* ---- whatever fails ------------------------------------------------------------------------------------- */

static void see_over(haul *h)
{
    for (int i = 0; h->mover && i < 20; i++)
        if (h->c.driver.cuStreamSynchronize(ebb_mover_stream(h->mover)) == CUDA_SUCCESS)
            return;
}

/* One unit: fetch, use on two streams, done; what fails is made up for. */
static void unit(haul *h, ebb_load *loads, size_t count, CUstream other)
{
    uint64_t cargo;
    if (ebb_mover_fetch(h->mover, h->vbar, loads, count, NULL, &cargo) != EBB_OK || !cargo)
        return;
    CUstream streams[2] = {h->compute, other};
    unsigned used = 0;
    for (int i = 0; i < 2; i++)
        if (ebb_mover_use(h->mover, cargo, streams[i]) == EBB_OK)
            streams[used++] = streams[i];
    for (unsigned i = 0; i < used; i++) {
        for (size_t k = 0; k < count; k++)
            if (loads[k].staged)
                rig_kernel("reads", loads[k].staged, loads[k].bytes, EBBSIM_READ, 100000,
                           streams[i]);
        for (int tries = 0; ebb_mover_done(h->mover, cargo, streams[i]) != EBB_OK; tries++)
            if (tries > 20) {
                FAIL("a cargo is never done");
                return;
            }
    }
    if (!used)
        CHECK_EQ(ebb_mover_drop(h->mover, cargo), EBB_OK);
    CHECK_EQ(ebb__mover_check(h->mover), 0);
}

static void life(haul *h, CUstream other)
{
    ebb_load loads[4];
    for (uint64_t i = 0; i < 4; i++)
        loads[i] = (ebb_load){i * LARGE, 600000, h->host + i * 600000, 0, 0};
    if (ebb_mover_create(h->c.device, &h->mover) != EBB_OK) {
        h->mover = NULL;
        return;
    }
    ebb_mover_set_ring(h->mover, SMALL);
    for (int i = 0; i < 4; i++)
        unit(h, loads, 4, other);
    ebb_mover_set_ring(h->mover, 2 * SMALL);
    unit(h, loads, 4, other);
    ebb_mover_set_ring(h->mover, 100 * LARGE);
    unit(h, loads, 4, other);
    if (ebb_mover_destroy(h->mover) == EBB_OK)
        h->mover = NULL;
}

/* 0: nothing failed any more. */
static unsigned long fail_one(unsigned long n, unsigned row, int code)
{
    haul h = {0};
    core_open(&h.c, 512 * MIB, 3 * LARGE);
    rig_clock();
    h.compute = core_lasting(&h.c);
    CUstream other = core_stream(&h.c);
    h.vbar = core_vbar(&h.c, 4 * LARGE);
    void *host;
    MUST(ebb_host_alloc(h.c.device, UINT64_C(4) * 600000, &host));
    h.host = host;
    for (unsigned i = 0; i < row; i++)
        MUST(ebbsim_fail(NULL, n + i, code));
    life(&h, other);
    unsigned long fired = ebbsim_failures();
    ebbsim_fail_clear();
    core_check(&h.c);
    if (h.mover) {
        CHECK_EQ(ebb__mover_check(h.mover), 0);
        CHECK_EQ(haul_stats(&h).cargoes_out, 0);
        see_over(&h);
        CHECK_EQ(ebb_mover_destroy(h.mover), EBB_OK);
    }
    CHECK_EQ(core_stats(h.vbar).pinned, 0);
    CHECK_EQ(core_device_stats(&h.c).vbars, 1);
    CHECK_EQ(ebb_host_free(h.c.device, h.host), EBB_OK);
    core_close(&h.c);
    CHECK_EQ(rig_left(), 0); /* streams, too */
    return fired;
}

static void fail_every(unsigned row, int code)
{
    unsigned long n = 1;
    for (unsigned long step = SCALED(1, 7); n < 3000; n += step) {
        int before = harness_failures;
        unsigned long fired = fail_one(n, row, code);
        if (harness_failures != before) {
            FAIL("that was with call %lu failing with %d, %u in a row", n, code, row);
            return;
        }
        if (!fired)
            break;
    }
    CHECK(n < 3000);
    printf("       %lu calls\n", n - 1);
}

static void every_call_may_fail(void)
{
    NEEDS_SIM("calls must fail");
    fail_every(1, 999);
    fail_every(1, 1);
}

static void every_few_calls_in_a_row_may_fail(void)
{
    NEEDS_SIM("calls must fail");
    fail_every(3, 999);
    fail_every(8, 999); /* pins that are owed */
}

/* ---- threads ---------------------------------------------------------------------------------------------- */

static void *change(void *data)
{
    haul *h = data;
    MUST(h->c.driver.cuCtxSetCurrent(h->c.context));
    CHECK_EQ(ebb_mover_set_ring(h->mover, 3 * SMALL), EBB_OK);
    return NULL;
}

static void while_the_ring_changes_nobody_has_it(void)
{
    haul h;
    haul_open(&h, 8 * LARGE, SMALL, LARGE);
    haul_stage_all(&h);
    if (h.c.sim)
        ebbsim_clock_virtual(0); /* the change is to take its time */
    ebb_load load, more = haul_load(&h, 0, 4096);
    uint64_t cargo = haul_fetch(&h, &load, 0, SMALL / 2);
    haul_use(&h, cargo, &load, UINT64_C(400) * MILLISECOND, h.compute);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, change, &h));
    rig_sleep(UINT64_C(100) * MILLISECOND);
    CHECK_EQ(ebb_mover_fetch(h.mover, h.vbar, &more, 1, NULL, &cargo), EBB_OFFLOADED);
    CHECK_EQ(ebb_mover_set_ring(h.mover, 2 * SMALL), EBB_BUSY);
    CHECK_EQ(ebb_mover_destroy(h.mover), EBB_BUSY);
    CHECK_EQ(h.c.driver.cuStreamQuery(h.compute), CUDA_ERROR_NOT_READY); /* it was so meanwhile */
    pthread_join(thread, NULL);
    CHECK_EQ(haul_stats(&h).ring, 3 * SMALL);
    cargo = haul_fetch(&h, &load, 0, 3 * SMALL);
    CHECK_EQ(ebb_mover_drop(h.mover, cargo), EBB_OK);
    haul_shut(&h);
}

typedef struct actor {
    haul *h;
    unsigned number, seed;
    CUstream stream;
    unsigned char *cells;
    int wrong;
    unsigned cargoes, resident;
} actor;

static void *act(void *data)
{
    actor *a = data;
    haul *h = a->h;
    ebb_load weights[8]; /* each thread has its own part of the VBAR */
    MUST(h->c.driver.cuCtxSetCurrent(h->c.context));
    for (uint64_t i = 0; i < 8; i++)
        weights[i] = haul_load(h, a->number * LARGE + i * 4 * MIB, 200000 + 10000 * i);
    for (int step = 0; step < SCALED(300, 100); step++) {
        size_t first = (unsigned)rand_r(&a->seed) % 6, count = 1 + (unsigned)rand_r(&a->seed) % 3;
        ebb_load *w = &weights[first];
        uint64_t cargo, signature, base = core_stats(h->vbar).address;
        ebb_status status = ebb_mover_fetch(h->mover, h->vbar, w, count, NULL, &cargo);
        if (status != EBB_OK) {
            a->wrong += status != EBB_OFFLOADED;
            continue;
        }
        a->wrong += ebb_mover_use(h->mover, cargo, a->stream) != EBB_OK;
        for (size_t i = 0; i < count; i++) {
            bool there = false;
            if (!w[i].staged)
                there = ebb_vbar_fault(h->vbar, w[i].offset, w[i].bytes, a->stream, &signature) ==
                        EBB_OK;
            uint64_t at = w[i].staged ? w[i].staged : base + w[i].offset;
            if (w[i].staged || (there && signature == w[i].signature)) {
                MUST(h->c.driver.cuMemcpyDtoHAsync(a->cells, at, 1, a->stream));
                MUST(
                    h->c.driver.cuMemcpyDtoHAsync(a->cells + 1, at + w[i].bytes - 1, 1, a->stream));
                MUST(h->c.driver.cuStreamSynchronize(a->stream));
                a->wrong += a->cells[0] != haul_value(w[i].offset);
                a->wrong += a->cells[1] != haul_value(w[i].offset + w[i].bytes - 1);
                a->cargoes += w[i].staged != 0;
                a->resident += there;
            }
            if (there)
                MUST(ebb_vbar_unpin(h->vbar, w[i].offset, w[i].bytes, a->stream));
        }
        a->wrong += ebb_mover_done(h->mover, cargo, a->stream) != EBB_OK;
        a->wrong += ebb__mover_check(h->mover) != 0;
        if (rand_r(&a->seed) % 16 == 0)
            MUST(ebb_vbar_free_memory(h->vbar, LARGE, NULL));
        if (rand_r(&a->seed) % 16 == 0)
            MUST(ebb_vbar_prioritize(h->vbar));
        if (rand_r(&a->seed) % 32 == 0) {
            status = ebb_mover_set_ring(h->mover, (1 + (unsigned)rand_r(&a->seed) % 3) * SMALL);
            a->wrong += status != EBB_OK && status != EBB_BUSY && status != EBB_OFFLOADED;
        }
    }
    return NULL;
}

static void four_threads_on_one_mover(void)
{
    haul h;
    haul_open(&h, 3 * LARGE, 2 * SMALL, 4 * LARGE);
    if (h.c.sim)
        ebbsim_clock_virtual(0);
    actor actors[4];
    pthread_t threads[4];
    unsigned cargoes = 0, resident = 0;
    for (unsigned i = 0; i < 4; i++)
        actors[i] = (actor){.h = &h,
                            .number = i,
                            .seed = i + 1,
                            .stream = i & 1 ? core_lasting(&h.c) : core_stream(&h.c),
                            .cells = h.c.host + (size_t)64 * i};
    for (unsigned i = 0; i < 4; i++)
        MUST(pthread_create(&threads[i], NULL, act, &actors[i]));
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        CHECK_EQ(actors[i].wrong, 0);
        cargoes += actors[i].cargoes;
        resident += actors[i].resident;
    }
    CHECK(cargoes > 20 && resident > 20);
    CHECK(core_device_stats(&h.c).held <= 3 * LARGE);
    haul_shut(&h);
}

int main(void)
{
    RUN(every_call_may_fail);
    RUN(every_few_calls_in_a_row_may_fail);
    RUN(while_the_ring_changes_nobody_has_it);
    RUN(four_threads_on_one_mover);
    return REPORT();
}

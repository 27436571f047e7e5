/*
 * Threads stopped at any instruction. A hit and its unpin take no lock, so what matters is the order
 * of single instructions: to note a ticket before the pin goes, to end an epoch before its event. A
 * signal that comes a thousand times a second and sleeps makes every gap between two of them as wide
 * as an eviction takes.
 */
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#include <unistd.h>

#include "rig.h"

typedef struct stage {
    core *c;
    ebb_vbar vbar;
    CUstream stream;
    atomic_bool stop;
    atomic_ulong uses, evictions;
} stage;

static void doze(int number)
{
    (void)number;
    nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
}

/* Uses both pages on one lasting stream, as fast as it can. */
static void *user(void *data)
{
    stage *g = data;
    MUST(g->c->driver.cuCtxSetCurrent(g->c->context));
    uint64_t address = core_stats(g->vbar).address;
    for (uint64_t i = 0; !atomic_load(&g->stop); i++) {
        uint64_t offset = i % 2 * SMALL, signature;
        if (ebb_vbar_fault(g->vbar, offset, SMALL, g->stream, &signature) != EBB_OK)
            continue;
        CHECK_EQ(rig_kernel("use", address + offset, SMALL, EBBSIM_READ, 1, g->stream), 0);
        CHECK_EQ(ebb_vbar_unpin(g->vbar, offset, SMALL, g->stream), EBB_OK);
        atomic_fetch_add(&g->uses, 1);
        if (!g->c->sim && i % 8 == 7) /* real work takes longer than queueing it */
            CHECK_EQ(g->c->driver.cuStreamSynchronize(g->stream), 0);
    }
    return NULL;
}

/* Takes the pages away, over and over: each time ends an epoch of the stream. */
static void *taker(void *data)
{
    stage *g = data;
    while (!atomic_load(&g->stop)) {
        uint64_t freed = 0;
        CHECK_EQ(ebb_vbar_free_memory(g->vbar, 2 * SMALL, &freed), EBB_OK);
        CHECK_EQ(ebb_vbar_prioritize(g->vbar), EBB_OK);
        atomic_fetch_add(&g->evictions, freed / SMALL);
        sched_yield();
    }
    return NULL;
}

static void run(bool of_user, bool promised)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    stage g = {.c = &c,
               .vbar = core_vbar(&c, 2 * SMALL),
               .stream = promised ? core_promised(&c) : core_lasting(&c)};
    struct sigaction action = {.sa_handler = doze, .sa_flags = SA_RESTART};
    sigaction(SIGUSR1, &action, NULL);
    pthread_t threads[2];
    MUST(pthread_create(&threads[0], NULL, user, &g));
    MUST(pthread_create(&threads[1], NULL, taker, &g));
    for (int i = 0; i < 2000; i++) {
        usleep(500); /* longer than a doze: it has to get on, too */
        pthread_kill(threads[of_user ? 0 : 1], SIGUSR1);
    }
    atomic_store(&g.stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    printf("       %lu uses, %lu evictions\n", atomic_load(&g.uses), atomic_load(&g.evictions));
    CHECK(atomic_load(&g.uses) > 100);
    CHECK(atomic_load(&g.evictions) > 10);
    core_close(&c);
}

static void a_user_may_be_stopped_anywhere(void)
{
    run(true, false);
}

static void so_may_one_whose_stream_never_captures(void)
{
    run(true, true);
}

static void a_thread_that_takes_pages_may_be_stopped_anywhere(void)
{
    run(false, false);
}

int main(void)
{
    RUN(a_user_may_be_stopped_anywhere);
    RUN(so_may_one_whose_stream_never_captures);
    RUN(a_thread_that_takes_pages_may_be_stopped_anywhere);
    return REPORT();
}

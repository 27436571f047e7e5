/*
 * Gates and threads of the driver suite: holding a stream busy for as long as a case wants, on a
 * GPU and on the simulated one alike, and knowing whether a call returned before or after.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "suite.h"

enum { GATES = 64, GATE_STRIDE = 16 };

/* All words lie in one pinned page, so that making a gate later calls no driver function. */
static _Atomic uint32_t *gate_page;
static _Atomic int gates_made;

struct gate_timer {
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t changed;
    bool cancelled;
    int milliseconds;
    _Atomic uint32_t *word;
};

gate gate_make(void)
{
    if (!gate_page) {
        void *page = NULL;
        REQUIRE(cu.cuMemHostAlloc(&page, 4096, CU_MEMHOSTALLOC_PORTABLE));
        gate_page = page;
    }
    int index = atomic_fetch_add(&gates_made, 1);
    if (index >= GATES) {
        abort();
    }
    gate made = {.word = gate_page + (size_t)index * GATE_STRIDE};
    atomic_store(made.word, 0);
    return made;
}

void gate_hold(gate *closed, CUstream stream)
{
    /* Unified addresses: pinned memory is at the same address for the GPU. */
    REQUIRE(cu.cuStreamWaitValue32(stream, (CUdeviceptr)(uintptr_t)closed->word, 1,
                                   CU_STREAM_WAIT_VALUE_GEQ));
}

void gate_open(gate *closed)
{
    atomic_store_explicit(closed->word, 1, memory_order_release);
}

bool gate_is_open(const gate *closed)
{
    return atomic_load_explicit(closed->word, memory_order_acquire) != 0;
}

void gate_open_all(void)
{
    int made = atomic_load(&gates_made);
    for (int i = 0; i < made && i < GATES; i++) {
        atomic_store_explicit(gate_page + (size_t)i * GATE_STRIDE, 1, memory_order_release);
    }
}

static void *timer_thread(void *data)
{
    struct gate_timer *timer = data;
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    long long nanoseconds = end.tv_nsec + (long long)timer->milliseconds * 1000000;
    end.tv_sec += (time_t)(nanoseconds / 1000000000);
    end.tv_nsec = (long)(nanoseconds % 1000000000);
    pthread_mutex_lock(&timer->mu);
    int rc = 0;
    while (!timer->cancelled && rc == 0) {
        rc = pthread_cond_timedwait(&timer->changed, &timer->mu, &end);
    }
    if (!timer->cancelled) {
        atomic_store_explicit(timer->word, 1, memory_order_release);
    }
    pthread_mutex_unlock(&timer->mu);
    return NULL;
}

void gate_open_later(gate *closed, int milliseconds)
{
    struct gate_timer *timer = calloc(1, sizeof *timer);
    if (!timer) {
        abort();
    }
    pthread_mutex_init(&timer->mu, NULL);
    pthread_cond_init(&timer->changed, NULL);
    timer->milliseconds = milliseconds;
    timer->word = closed->word;
    closed->timer = timer;
    if (pthread_create(&timer->thread, NULL, timer_thread, timer) != 0) {
        abort();
    }
}

void gate_cancel(gate *closed)
{
    struct gate_timer *timer = closed->timer;
    if (!timer) {
        return;
    }
    pthread_mutex_lock(&timer->mu);
    timer->cancelled = true;
    pthread_cond_signal(&timer->changed);
    pthread_mutex_unlock(&timer->mu);
    pthread_join(timer->thread, NULL);
    pthread_cond_destroy(&timer->changed);
    pthread_mutex_destroy(&timer->mu);
    free(timer);
    closed->timer = NULL;
}

static void host_gate_wait(void *data)
{
    host_gate *held = data;
    sem_post(&held->entered);
    while (sem_wait(&held->leave) != 0) {
        /* interrupted by a signal: wait on */
    }
}

void host_gate_hold(host_gate *held, CUstream stream)
{
    sem_init(&held->entered, 0, 0);
    sem_init(&held->leave, 0, 0);
    REQUIRE(cu.cuLaunchHostFunc(stream, host_gate_wait, held));
}

void host_gate_open(host_gate *held)
{
    sem_post(&held->leave);
}

struct errand {
    void (*function)(void *data);
    void *data;
    bool with_context;
};

static void *errand_thread(void *data)
{
    struct errand *errand = data;
    if (errand->with_context) {
        REQUIRE(cu.cuCtxSetCurrent(context));
    }
    errand->function(errand->data);
    return NULL;
}

static void run_errand(struct errand errand)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, errand_thread, &errand) != 0) {
        abort();
    }
    pthread_join(thread, NULL);
}

void in_thread(void (*function)(void *data), void *data)
{
    run_errand((struct errand){.function = function, .data = data, .with_context = false});
}

void in_thread_with_context(void (*function)(void *data), void *data)
{
    run_errand((struct errand){.function = function, .data = data, .with_context = true});
}

void pass_milliseconds(int milliseconds)
{
    struct timespec pause = {.tv_sec = milliseconds / 1000,
                             .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    nanosleep(&pause, NULL);
}

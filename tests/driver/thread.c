/*
 * Threads: one context in several, and calls at the same time. Forks: matrix.c.
 */
#include <pthread.h>

#include "suite.h"

struct shared_work {
    CUstream stream;
    CUevent event;
    CUdeviceptr memory;
};

static void use_what_another_thread_made(void *data)
{
    struct shared_work *work = data;
    EXPECT(OK, cu.cuMemsetD8Async(work->memory, 9, 4096, work->stream));
    EXPECT(OK, cu.cuEventRecord(work->event, work->stream));
    EXPECT(OK, cu.cuEventSynchronize(work->event));
    EXPECT(OK, cu.cuStreamSynchronize(work->stream));
}

static void streams_belong_to_the_context_not_the_thread(void)
{
    struct shared_work work = {make_stream(), make_event(), make_memory(4096)};
    in_thread_with_context(use_what_another_thread_made, &work);
    CHECK(holds(work.memory, 9, 4096));
    EXPECT(OK, cu.cuEventQuery(work.event));
}

static void destroy_what_another_thread_made(void *data)
{
    struct shared_work *work = data;
    EXPECT(OK, cu.cuEventDestroy(work->event));
    EXPECT(OK, cu.cuStreamDestroy(work->stream));
    EXPECT(OK, cu.cuMemFree(work->memory));
}

static void things_are_destroyed_in_another_thread(void)
{
    struct shared_work work = {make_stream(), make_event(), make_memory(4096)};
    in_thread_with_context(destroy_what_another_thread_made, &work);
}

/* Stream 0 is one for all threads; the per-thread stream is one for each. */
static void hold_the_per_thread_stream(void *data)
{
    gate_hold(data, CU_STREAM_PER_THREAD);
    EXPECT(NOT_READY, cu.cuStreamQuery(CU_STREAM_PER_THREAD));
}

static void each_thread_has_its_own_per_thread_stream(void)
{
    gate busy = gate_make();
    in_thread_with_context(hold_the_per_thread_stream, &busy);
    EXPECT(OK, cu.cuStreamQuery(CU_STREAM_PER_THREAD));
    EXPECT(OK, cu.cuStreamSynchronize(CU_STREAM_PER_THREAD));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void hold_the_default_stream(void *data)
{
    gate_hold(data, NULL);
}

static void all_threads_share_the_default_stream(void)
{
    gate busy = gate_make();
    in_thread_with_context(hold_the_default_stream, &busy);
    EXPECT(NOT_READY, cu.cuStreamQuery(NULL));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(NULL));
}

/* One thread waits, the others go on. */
struct waiter {
    CUevent event;
    CUresult code;
    _Atomic int over;
};

static void *wait_for_the_event(void *data)
{
    struct waiter *waiter = data;
    REQUIRE(cu.cuCtxSetCurrent(context));
    waiter->code = cu.cuEventSynchronize(waiter->event);
    atomic_store(&waiter->over, 1);
    return NULL;
}

static void a_waiting_thread_holds_up_nobody(void)
{
    static struct waiter waiter;
    gate busy = gate_make();
    CUstream stream = make_stream(), other = make_stream();
    CUdeviceptr range = reserve(FRAME), memory = make_memory(4096);
    pthread_t thread;
    waiter.event = make_event();
    gate_hold(&busy, stream);
    REQUIRE(cu.cuEventRecord(waiter.event, stream));
    pthread_create(&thread, NULL, wait_for_the_event, &waiter);
    pass_milliseconds(50);
    EXPECT_INT(0, atomic_load(&waiter.over));
    map_released_frame(range, FRAME);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemUnmap(range, FRAME));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemsetD8Async(memory, 1, 4096, other));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(other));
    EXPECT_INT(0, atomic_load(&waiter.over));
    gate_open(&busy);
    pthread_join(thread, NULL);
    EXPECT(OK, waiter.code);
}

enum { THREADS = 4, ROUNDS = 200 };

struct worker {
    pthread_t thread;
    CUdeviceptr range;
    unsigned failed;
    unsigned char value;
};

/* Map, fill, read back, unmap: each thread in its own addresses. */
static void *map_and_unmap(void *data)
{
    struct worker *worker = data;
    CUstream stream = NULL;
    CUmemAllocationProp properties = plain_properties();
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    unsigned char back[64];
    worker->failed += cu.cuCtxSetCurrent(context) != CUDA_SUCCESS;
    worker->failed += cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS;
    for (unsigned i = 0; i < ROUNDS; i++) {
        CUdeviceptr address = worker->range + (i % 4) * FRAME;
        CUmemGenericAllocationHandle handle = 0;
        worker->failed += cu.cuMemCreate(&handle, FRAME, &properties, 0) != CUDA_SUCCESS;
        worker->failed += cu.cuMemMap(address, FRAME, 0, handle, 0) != CUDA_SUCCESS;
        worker->failed += cu.cuMemSetAccess(address, FRAME, &access, 1) != CUDA_SUCCESS;
        worker->failed += cu.cuMemRelease(handle) != CUDA_SUCCESS;
        worker->failed += cu.cuMemsetD8Async(address, worker->value, 64, stream) != CUDA_SUCCESS;
        worker->failed += cu.cuMemcpyDtoHAsync(back, address, 64, stream) != CUDA_SUCCESS;
        worker->failed += cu.cuStreamSynchronize(stream) != CUDA_SUCCESS;
        worker->failed += !all_bytes(back, worker->value, 64);
        worker->failed += cu.cuMemUnmap(address, FRAME) != CUDA_SUCCESS;
    }
    return NULL;
}

static void threads_map_and_unmap_at_the_same_time(void)
{
    static struct worker workers[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i].range = reserve(4 * FRAME);
        workers[i].value = (unsigned char)(i + 1);
        pthread_create(&workers[i].thread, NULL, map_and_unmap, &workers[i]);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        EXPECT_INT(0, workers[i].failed);
        EXPECT(OK, cu.cuMemAddressFree(workers[i].range, 4 * FRAME));
    }
}

static void *record_and_wait(void *data)
{
    struct worker *worker = data;
    CUstream stream = NULL;
    CUevent event = NULL;
    worker->failed += cu.cuCtxSetCurrent(context) != CUDA_SUCCESS;
    for (unsigned i = 0; i < ROUNDS; i++) {
        worker->failed += cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS;
        worker->failed += cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS;
        worker->failed += cu.cuMemsetD8Async(worker->range, 1, 64, stream) != CUDA_SUCCESS;
        worker->failed += cu.cuEventRecord(event, stream) != CUDA_SUCCESS;
        worker->failed += cu.cuStreamDestroy(stream) != CUDA_SUCCESS;
        worker->failed += cu.cuEventSynchronize(event) != CUDA_SUCCESS;
        worker->failed += cu.cuEventDestroy(event) != CUDA_SUCCESS;
    }
    return NULL;
}

static void threads_make_and_destroy_streams_at_the_same_time(void)
{
    static struct worker workers[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        workers[i].range = make_memory(64);
        pthread_create(&workers[i].thread, NULL, record_and_wait, &workers[i]);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
        EXPECT_INT(0, workers[i].failed);
    }
}

const suite_case thread_cases[] = {
    CASE(streams_belong_to_the_context_not_the_thread),
    CASE(things_are_destroyed_in_another_thread),
    CASE(each_thread_has_its_own_per_thread_stream),
    CASE(all_threads_share_the_default_stream),
    CASE(a_waiting_thread_holds_up_nobody),
    CASE(threads_map_and_unmap_at_the_same_time),
    CASE(threads_make_and_destroy_streams_at_the_same_time),
    CASE_END,
};

/*
 * Streams: making, asking, waiting, order among them and with the default stream.
 */
#include "suite.h"

static void bad_streams_are_not_made(void)
{
    CUstream stream = NULL;
    EXPECT(INVALID_VALUE, cu.cuStreamCreate(NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuStreamCreate(&stream, 2));
    EXPECT(INVALID_VALUE, cu.cuStreamCreate(&stream, 0x100));
    EXPECT(INVALID_VALUE, cu.cuStreamCreateWithPriority(NULL, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuStreamCreateWithPriority(&stream, 2, 0));
}

/* A priority out of range is clamped, not refused. */
static void priorities_out_of_range_are_clamped(void)
{
    static const int priorities[] = {-1000, -5, -1, 0, 1, 1000};
    for (size_t i = 0; i < sizeof priorities / sizeof *priorities; i++) {
        CUstream stream = NULL;
        if (EXPECT(OK, cu.cuStreamCreateWithPriority(&stream, 1, priorities[i])) == OK) {
            EXPECT(OK, cu.cuStreamDestroy(stream));
        }
    }
}

static void the_default_stream_is_not_destroyed(void)
{
    EXPECT(INVALID_HANDLE, cu.cuStreamDestroy(NULL));
    EXPECT(INVALID_HANDLE, cu.cuStreamDestroy(CU_STREAM_LEGACY));
    EXPECT(INVALID_HANDLE, cu.cuStreamDestroy(CU_STREAM_PER_THREAD));
}

static void default_streams_can_be_named(void)
{
    EXPECT(OK, cu.cuStreamQuery(NULL));
    EXPECT(OK, cu.cuStreamQuery(CU_STREAM_LEGACY));
    EXPECT(OK, cu.cuStreamQuery(CU_STREAM_PER_THREAD));
    EXPECT(OK, cu.cuStreamSynchronize(NULL));
    EXPECT(OK, cu.cuStreamSynchronize(CU_STREAM_LEGACY));
    EXPECT(OK, cu.cuStreamSynchronize(CU_STREAM_PER_THREAD));
    CUdeviceptr memory = make_memory(4096);
    EXPECT(OK, cu.cuMemsetD8Async(memory, 1, 4096, CU_STREAM_LEGACY));
    EXPECT(OK, cu.cuMemsetD8Async(memory, 2, 4096, CU_STREAM_PER_THREAD));
    EXPECT(OK, cu.cuCtxSynchronize());
    CUevent event = make_event();
    EXPECT(OK, cu.cuEventRecord(event, CU_STREAM_LEGACY));
    EXPECT(OK, cu.cuEventRecord(event, CU_STREAM_PER_THREAD));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void a_stream_knows_its_context(void)
{
    CUcontext found = NULL;
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuStreamGetCtx(stream, &found));
    CHECK(found == context);
    found = NULL;
    EXPECT(OK, cu.cuStreamGetCtx(NULL, &found));
    CHECK(found == context);
    EXPECT(OK, cu.cuStreamGetCtx(CU_STREAM_LEGACY, &found));
    EXPECT(INVALID_VALUE, cu.cuStreamGetCtx(stream, NULL));
}

static void a_stream_is_idle_or_busy(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuStreamQuery(stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    gate_hold(&busy, stream);
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(stream));
    EXPECT(OK, cu.cuStreamQuery(stream));
}

static void streams_are_independent(void)
{
    gate busy = gate_make();
    CUstream first = make_stream(), second = make_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, first);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, second));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(second));
    EXPECT(NOT_READY, cu.cuStreamQuery(first));
    EXPECT_WAITS(&busy, OK, cu.cuCtxSynchronize());
    EXPECT(OK, cu.cuStreamQuery(first));
}

static void a_context_waits_for_non_blocking_streams(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    gate_hold(&busy, stream);
    EXPECT_WAITS(&busy, OK, cu.cuCtxSynchronize());
}

static void a_destroyed_stream_finishes_its_work(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUevent event = make_event();
    fill(memory, 0, 4096);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 0x3d, 4096, stream));
    REQUIRE(cu.cuEventRecord(event, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamDestroy(stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    CHECK(holds(memory, 0x3d, 4096));
}

static void a_context_waits_for_destroyed_streams(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 0x3e, 4096, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamDestroy(stream));
    EXPECT_WAITS(&busy, OK, cu.cuCtxSynchronize());
    CHECK(holds(memory, 0x3e, 4096));
}

/* ---- the legacy default stream --------------------------------------------------------------- */

static void the_default_stream_waits_for_blocking_streams(void)
{
    gate busy = gate_make();
    CUstream stream = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    CUevent event = make_event();
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, NULL));
    REQUIRE(cu.cuEventRecord(event, NULL));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT(NOT_READY, cu.cuStreamQuery(NULL));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(NULL));
    EXPECT(OK, cu.cuEventQuery(event));
}

static void blocking_streams_wait_for_the_default_stream(void)
{
    gate busy = gate_make();
    CUstream stream = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, NULL);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(stream));
}

static void the_default_stream_orders_two_blocking_streams(void)
{
    gate busy = gate_make();
    CUstream first = make_blocking_stream(), second = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, first);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, NULL));
    REQUIRE(cu.cuMemsetD8Async(memory, 2, 4096, second));
    EXPECT(NOT_READY, cu.cuStreamQuery(second));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(second));
    EXPECT(OK, cu.cuStreamQuery(first));
    CHECK(holds(memory, 2, 4096));
}

static void two_blocking_streams_alone_are_independent(void)
{
    gate busy = gate_make();
    CUstream first = make_blocking_stream(), second = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, first);
    REQUIRE(cu.cuMemsetD8Async(memory, 2, 4096, second));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(second));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void non_blocking_streams_ignore_the_default_stream(void)
{
    gate busy = gate_make(), other = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, NULL);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(NULL));
    gate_hold(&other, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, NULL));
    EXPECT_AT_ONCE(&other, OK, cu.cuStreamSynchronize(NULL));
    gate_open(&other);
    EXPECT(OK, cu.cuCtxSynchronize());
}

/* An event on stream 0 follows what blocking streams did before, even with no work in between. */
static void an_event_on_the_default_stream_covers_blocking_streams(void)
{
    gate busy = gate_make();
    CUstream stream = make_blocking_stream();
    CUevent event = make_event();
    gate_hold(&busy, stream);
    REQUIRE(cu.cuEventRecord(event, NULL));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

static void an_event_on_the_default_stream_ignores_non_blocking_streams(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUevent event = make_event();
    gate_hold(&busy, stream);
    REQUIRE(cu.cuEventRecord(event, NULL));
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventSynchronize(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

/* ---- values ---------------------------------------------------------------------------------- */

static void values_are_waited_for_and_written(void)
{
    uint32_t *words = make_pinned(4096);
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)words;
    CUstream waiting = make_stream(), writing = make_stream();
    EXPECT(OK, cu.cuStreamWaitValue32(waiting, address, 5, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT(OK, cu.cuStreamWaitValue32(waiting, address, 6, CU_STREAM_WAIT_VALUE_EQ));
    EXPECT(OK, cu.cuStreamWriteValue32(waiting, address + 4, 9, 0));
    EXPECT(NOT_READY, cu.cuStreamQuery(waiting));
    EXPECT(OK, cu.cuStreamWriteValue32(writing, address, 5, 0));
    EXPECT(OK, cu.cuStreamSynchronize(writing));
    pass_milliseconds(20);
    EXPECT(NOT_READY, cu.cuStreamQuery(waiting));
    EXPECT(OK, cu.cuStreamWriteValue32(writing, address, 6, 0));
    EXPECT(OK, cu.cuStreamSynchronize(waiting));
    EXPECT_INT(6, words[0]);
    EXPECT_INT(9, words[1]);
}

/* "Greater or equal" is by the difference's sign, so that counters may wrap. */
static void greater_or_equal_is_cyclic(void)
{
    uint32_t *words = make_pinned(4096);
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)words;
    CUstream stream = make_stream();
    words[0] = 2;
    EXPECT(OK, cu.cuStreamWaitValue32(stream, address, 0xfffffff0u, CU_STREAM_WAIT_VALUE_GEQ));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void values_live_in_device_memory_too(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096), range = reserve(FRAME);
    map_released_frame(range, FRAME);
    fill(memory, 0, 4096);
    EXPECT(OK, cu.cuStreamWriteValue32(stream, memory, 0x01010101, 0));
    EXPECT(OK, cu.cuStreamWaitValue32(stream, memory, 0x01010101, CU_STREAM_WAIT_VALUE_EQ));
    EXPECT(OK, cu.cuStreamWriteValue32(stream, range, 0x01010101, 0));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 1, 4));
    CHECK(holds(range, 1, 4));
}

static void values_refuse_nonsense(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)make_pinned(4096);
    CUdeviceptr pages = (CUdeviceptr)(uintptr_t)make_pages(4096);
    EXPECT(INVALID_VALUE, cu.cuStreamWaitValue32(stream, 0, 1, 0));
    EXPECT(INVALID_VALUE, cu.cuStreamWriteValue32(stream, 0, 1, 0));
    EXPECT(INVALID_VALUE, cu.cuStreamWaitValue32(stream, address + 2, 1, 0));
    EXPECT(INVALID_VALUE, cu.cuStreamWriteValue32(stream, address + 1, 1, 0));
    EXPECT(INVALID_VALUE, cu.cuStreamWaitValue32(stream, address, 1, 0x100));
    EXPECT(INVALID_VALUE, cu.cuStreamWriteValue32(stream, address, 1, 0x100));
    EXPECT(INVALID_VALUE, cu.cuStreamWriteValue32(stream, pages, 1, 0));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

/* ---- host functions -------------------------------------------------------------------------- */

static void count_up(void *data)
{
    atomic_fetch_add((_Atomic int *)data, 1);
}

static void host_functions_run_in_order(void)
{
    static _Atomic int counter;
    gate busy = gate_make();
    CUstream stream = make_stream();
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuLaunchHostFunc(stream, count_up, (void *)&counter));
    EXPECT_INT(0, atomic_load(&counter));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT_INT(1, atomic_load(&counter));
    EXPECT(OK, cu.cuLaunchHostFunc(NULL, count_up, (void *)&counter));
    EXPECT(OK, cu.cuStreamSynchronize(NULL));
    EXPECT_INT(2, atomic_load(&counter));
    EXPECT(INVALID_VALUE, cu.cuLaunchHostFunc(stream, NULL, NULL));
}

static void a_host_function_holds_its_stream(void)
{
    static host_gate held;
    CUstream stream = make_stream(), other = make_stream();
    CUdeviceptr memory = make_memory(4096);
    fill(memory, 0, 4096);
    host_gate_hold(&held, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 6, 4096, stream));
    sem_wait(&held.entered);
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    EXPECT(OK, cu.cuStreamSynchronize(other));
    host_gate_open(&held);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 6, 4096));
}

static void ask_the_driver(void *data)
{
    size_t bytes, total;
    *(CUresult *)data = cu.cuMemGetInfo(&bytes, &total);
}

static void a_host_function_must_not_call_the_driver(void)
{
    static CUresult code = CUDA_SUCCESS;
    CUstream stream = make_stream();
    REQUIRE(cu.cuLaunchHostFunc(stream, ask_the_driver, &code));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(NOT_PERMITTED, code);
}

const suite_case stream_cases[] = {
    CASE(bad_streams_are_not_made),
    CASE(priorities_out_of_range_are_clamped),
    CASE(the_default_stream_is_not_destroyed),
    CASE(default_streams_can_be_named),
    CASE(a_stream_knows_its_context),
    CASE(a_stream_is_idle_or_busy),
    CASE(streams_are_independent),
    CASE(a_context_waits_for_non_blocking_streams),
    CASE(a_destroyed_stream_finishes_its_work),
    CASE(a_context_waits_for_destroyed_streams),
    CASE(the_default_stream_waits_for_blocking_streams),
    CASE(blocking_streams_wait_for_the_default_stream),
    CASE(the_default_stream_orders_two_blocking_streams),
    CASE(two_blocking_streams_alone_are_independent),
    CASE(non_blocking_streams_ignore_the_default_stream),
    CASE(an_event_on_the_default_stream_covers_blocking_streams),
    CASE(an_event_on_the_default_stream_ignores_non_blocking_streams),
    CASE(values_are_waited_for_and_written),
    CASE(greater_or_equal_is_cyclic),
    CASE(values_live_in_device_memory_too),
    CASE(values_refuse_nonsense),
    CASE(host_functions_run_in_order),
    CASE(a_host_function_holds_its_stream),
    CASE(a_host_function_must_not_call_the_driver),
    CASE_END,
};

/*
 * Captures: what is captured, what runs, how they end. Events in captures: capture_event.c. What
 * each call does to a capture: matrix.c.
 */
#include <string.h>

#include "suite.h"

static const CUstreamCaptureMode GLOBAL = CU_STREAM_CAPTURE_MODE_GLOBAL;
static const CUstreamCaptureMode LOCAL = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
static const CUstreamCaptureMode RELAXED = CU_STREAM_CAPTURE_MODE_RELAXED;

static int status_of(CUstream stream)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    REQUIRE(cu.cuStreamIsCapturing(stream, &status));
    return (int)status;
}

static void an_empty_capture_gives_an_empty_graph(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(stream));
    EXPECT(OK, cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(stream));
    CHECK(graph != NULL);
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(OK, cu.cuGraphExecDestroy(exec));
    EXPECT(OK, cu.cuGraphDestroy(graph));
}

static void captured_work_runs_when_launched(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    char *pinned = make_pinned(4096);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    memset(pinned, 2, 4096);
    fill(memory, 1, 8192);
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pinned, 4096, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory + 4096, memory, 4096, stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 1, 8192)); /* nothing ran */
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    CHECK(holds(memory, 1, 8192));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 2, 8192));
}

static void a_graph_reads_its_source_at_each_launch(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    char *pinned = make_pinned(4096);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuMemcpyHtoDAsync(memory, pinned, 4096, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphDestroy(graph)); /* the executable graph does not need it */
    for (unsigned char value = 1; value < 4; value++) {
        memset(pinned, value, 4096);
        EXPECT(OK, cu.cuGraphLaunch(exec, stream));
        EXPECT(OK, cu.cuStreamSynchronize(stream));
        CHECK(holds(memory, value, 4096));
    }
}

static void a_graph_launch_is_ordered_in_its_stream(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(memory, 5, 2048, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 4, 4096, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 5, 2048));
    CHECK(holds(memory + 2048, 4, 2048));
}

static void a_graph_is_launched_twice_in_a_row(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(memory, 5, 4096, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuGraphLaunch(exec, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuGraphLaunch(exec, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuGraphExecDestroy(exec)); /* while launches are pending */
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 5, 4096));
}

static void count_up(void *data)
{
    atomic_fetch_add((_Atomic int *)data, 1);
}

static void a_captured_host_function_runs_at_each_launch(void)
{
    static _Atomic int counter;
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuLaunchHostFunc(stream, count_up, (void *)&counter));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(0, atomic_load(&counter));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 1; i < 4; i++) {
        EXPECT(OK, cu.cuGraphLaunch(exec, stream));
        EXPECT(OK, cu.cuStreamSynchronize(stream));
        EXPECT_INT(i, atomic_load(&counter));
    }
}

static void captures_refuse_nonsense(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    EXPECT(INVALID_VALUE, cu.cuStreamBeginCapture(stream, (CUstreamCaptureMode)77));
    EXPECT(INVALID_VALUE, cu.cuStreamIsCapturing(stream, NULL));
    CUstreamCaptureMode mode = (CUstreamCaptureMode)77;
    EXPECT(OK, cu.cuThreadExchangeStreamCaptureMode(&mode)); /* it does not look */
    EXPECT(INVALID_VALUE, cu.cuGraphInstantiateWithFlags(&exec, NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuGraphLaunch(NULL, stream));
    EXPECT(INVALID_VALUE, cu.cuGraphDestroy(NULL));
    EXPECT(INVALID_VALUE, cu.cuGraphExecDestroy(NULL));
    EXPECT(ILLEGAL_STATE, cu.cuStreamEndCapture(stream, &graph));
}

static void a_capture_ended_into_nothing_is_over(void)
{
    CUstream stream = make_stream();
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuStreamEndCapture(stream, NULL));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(stream));
}

static void the_default_stream_is_not_captured(void)
{
    CUgraph graph = NULL;
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamBeginCapture(NULL, GLOBAL));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamBeginCapture(CU_STREAM_LEGACY, RELAXED));
    EXPECT(OK, cu.cuStreamIsCapturing(NULL, &status));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status);
    EXPECT(ILLEGAL_STATE, cu.cuStreamEndCapture(NULL, &graph));
}

static void the_per_thread_stream_is_captured(void)
{
    CUgraph graph = NULL;
    EXPECT(OK, cu.cuStreamBeginCapture(CU_STREAM_PER_THREAD, GLOBAL));
    EXPECT(OK, cu.cuStreamEndCapture(CU_STREAM_PER_THREAD, &graph));
}

static void a_capture_is_begun_once(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(ILLEGAL_STATE, cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void a_busy_stream_can_be_captured(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_capture_invalidated_ends_with_901(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = (CUgraph)&graph;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamQuery(stream));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamQuery(stream));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
    CHECK(graph == NULL);
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(stream));
    EXPECT(OK, cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

/* ---- threads --------------------------------------------------------------------------------- */

struct ending {
    CUstream stream;
    CUgraph graph;
    CUresult code;
};

static void end_the_capture(void *data)
{
    struct ending *ending = data;
    ending->code = cu.cuStreamEndCapture(ending->stream, &ending->graph);
}

/* The wrong thread is told so, but the capture is over all the same. */
static void a_global_capture_ended_by_another_thread_is_lost(void)
{
    struct ending ending = {.stream = make_stream()};
    REQUIRE(cu.cuStreamBeginCapture(ending.stream, GLOBAL));
    in_thread_with_context(end_the_capture, &ending);
    EXPECT(CAPTURE_WRONG_THREAD, ending.code);
    CHECK(ending.graph == NULL);
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(ending.stream));
    EXPECT(ILLEGAL_STATE, cu.cuStreamEndCapture(ending.stream, &ending.graph));
    EXPECT(OK, cu.cuStreamSynchronize(ending.stream));
}

static void a_thread_local_capture_ended_by_another_thread_is_lost(void)
{
    struct ending ending = {.stream = make_stream()};
    REQUIRE(cu.cuStreamBeginCapture(ending.stream, LOCAL));
    in_thread_with_context(end_the_capture, &ending);
    EXPECT(CAPTURE_WRONG_THREAD, ending.code);
    EXPECT(ILLEGAL_STATE, cu.cuStreamEndCapture(ending.stream, &ending.graph));
}

static void a_relaxed_capture_is_ended_by_any_thread(void)
{
    struct ending ending = {.stream = make_stream()};
    REQUIRE(cu.cuStreamBeginCapture(ending.stream, RELAXED));
    in_thread_with_context(end_the_capture, &ending);
    EXPECT(OK, ending.code);
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(ending.stream));
}

static void look_at_the_mode(void *data)
{
    CUstreamCaptureMode mode = LOCAL;
    REQUIRE(cu.cuThreadExchangeStreamCaptureMode(&mode));
    *(int *)data = (int)mode;
}

static void each_thread_has_its_own_mode(void)
{
    CUstreamCaptureMode mode = RELAXED;
    int theirs = 77;
    EXPECT(OK, cu.cuThreadExchangeStreamCaptureMode(&mode));
    EXPECT_INT(GLOBAL, mode);
    in_thread(look_at_the_mode, &theirs);
    EXPECT_INT(GLOBAL, theirs);
    EXPECT(OK, cu.cuThreadExchangeStreamCaptureMode(&mode));
    EXPECT_INT(RELAXED, mode);
}

/* A forbidden call invalidates every capture that forbids it. */
static void a_forbidden_call_invalidates_all_captures(void)
{
    CUstream first = make_stream(), second = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(first, GLOBAL));
    REQUIRE(cu.cuStreamBeginCapture(second, RELAXED));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuEventQuery(event));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(first));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(second));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(first, &graph));
    EXPECT(OK, cu.cuStreamEndCapture(second, &graph));
}

/* After the invalidation, before the end: is the next forbidden call forbidden still? */
static void calls_while_a_capture_is_invalidated(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUevent event = make_event();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    REQUIRE(cu.cuEventRecord(event, other));
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuEventQuery(event));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuEventQuery(event));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuCtxSynchronize());
    EXPECT(OK, cu.cuMemsetD8Async(memory, 1, 4096, other));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, cu.cuEventQuery(event));
}

/* ---- streams --------------------------------------------------------------------------------- */

/* Work on the default stream would have to wait for a blocking stream that captures. */
static void the_default_stream_beside_a_captured_blocking_stream(void)
{
    CUstream stream = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_IMPLICIT, cu.cuMemsetD8Async(memory, 1, 4096, NULL));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void an_event_on_the_default_stream_beside_a_captured_blocking_stream(void)
{
    CUstream stream = make_blocking_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_IMPLICIT, cu.cuEventRecord(event, NULL));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void the_default_stream_beside_a_relaxed_capture_of_a_blocking_stream(void)
{
    CUstream stream = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, RELAXED));
    EXPECT(CAPTURE_IMPLICIT, cu.cuMemsetD8Async(memory, 1, 4096, NULL));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void asking_whether_the_default_stream_captures(void)
{
    CUstream stream = make_blocking_stream();
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_IMPLICIT, cu.cuStreamIsCapturing(NULL, &status));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph)); /* asking did no harm */
}

static void a_capturing_stream_is_destroyed(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUevent event = make_event();
    CUdeviceptr memory = make_memory(4096);
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT(OK, cu.cuStreamDestroy(stream));
    /* Its capture went with it: nothing is forbidden any more. */
    EXPECT(OK, cu.cuEventRecord(event, other));
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void two_captures_at_once(void)
{
    CUstream first = make_stream(), second = make_stream();
    CUgraph one = NULL, two = NULL;
    EXPECT(OK, cu.cuStreamBeginCapture(first, GLOBAL));
    EXPECT(OK, cu.cuStreamBeginCapture(second, GLOBAL));
    EXPECT(OK, cu.cuStreamEndCapture(first, &one));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(second));
    EXPECT(OK, cu.cuStreamEndCapture(second, &two));
    CHECK(one != two);
}

static void a_graph_over_memory_that_moved(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(2 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(range, 8, FRAME, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    /* Addresses are what a graph keeps: another frame at the same place serves as well. */
    REQUIRE(cu.cuMemUnmap(range, FRAME));
    REQUIRE(cu.cuMemRelease(handle));
    map_released_frame(range, FRAME);
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(range, 8, FRAME));
}

const suite_case capture_cases[] = {
    CASE(an_empty_capture_gives_an_empty_graph),
    CASE(captured_work_runs_when_launched),
    CASE(a_graph_reads_its_source_at_each_launch),
    CASE(a_graph_launch_is_ordered_in_its_stream),
    CASE(a_graph_is_launched_twice_in_a_row),
    CASE(a_captured_host_function_runs_at_each_launch),
    CASE(captures_refuse_nonsense),
    CASE(a_capture_ended_into_nothing_is_over),
    CASE(the_default_stream_is_not_captured),
    CASE(the_per_thread_stream_is_captured),
    CASE(a_capture_is_begun_once),
    CASE(a_busy_stream_can_be_captured),
    CASE(a_capture_invalidated_ends_with_901),
    CASE(a_global_capture_ended_by_another_thread_is_lost),
    CASE(a_thread_local_capture_ended_by_another_thread_is_lost),
    CASE(a_relaxed_capture_is_ended_by_any_thread),
    CASE(each_thread_has_its_own_mode),
    CASE(a_forbidden_call_invalidates_all_captures),
    CASE(calls_while_a_capture_is_invalidated),
    CASE(the_default_stream_beside_a_captured_blocking_stream),
    CASE(an_event_on_the_default_stream_beside_a_captured_blocking_stream),
    CASE(the_default_stream_beside_a_relaxed_capture_of_a_blocking_stream),
    CASE(asking_whether_the_default_stream_captures),
    CASE(a_capturing_stream_is_destroyed),
    CASE(two_captures_at_once),
    CASE(a_graph_over_memory_that_moved),
    CASE_END,
};

/*
 * Events and captures: events recorded while capturing, captures that fork and join.
 */
#include "suite.h"

static const CUstreamCaptureMode GLOBAL = CU_STREAM_CAPTURE_MODE_GLOBAL;

static int status_of(CUstream stream)
{
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    REQUIRE(cu.cuStreamIsCapturing(stream, &status));
    return (int)status;
}

static void query_of_a_captured_event_kills_the_capture(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(CAPTURED_EVENT, cu.cuEventQuery(event));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(INVALID_VALUE, cu.cuEventQuery(event));
    EXPECT(INVALID_VALUE, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void synchronizing_a_captured_event_kills_the_capture(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(CAPTURED_EVENT, cu.cuEventSynchronize(event));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

/* As a fence it never passes: only a new record makes it an ordinary event again. */
static void a_captured_event_after_the_capture(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    EXPECT(INVALID_VALUE, cu.cuEventQuery(event));
    EXPECT(INVALID_VALUE, cu.cuEventSynchronize(event));
    EXPECT(INVALID_VALUE, cu.cuStreamWaitEvent(other, event, 0));
    REQUIRE(cu.cuGraphDestroy(graph));
    EXPECT(INVALID_VALUE, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventRecord(event, other));
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, event, 0));
}

static void a_captured_event_after_launch(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(event, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(INVALID_VALUE, cu.cuEventQuery(event));
}

/* An event that was pending outside is captured over, and recorded outside again meanwhile. */
static void a_captured_event_recorded_again_outside(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuEventRecord(event, other));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void time_with_a_captured_event(void)
{
    CUstream stream = make_stream();
    CUevent start = NULL, end = NULL;
    CUgraph graph = NULL;
    float milliseconds = 0;
    REQUIRE(cu.cuEventCreate(&start, 0));
    REQUIRE(cu.cuEventCreate(&end, 0));
    REQUIRE(cu.cuEventRecord(start, stream));
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(end, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    EXPECT(INVALID_VALUE, cu.cuEventElapsedTime(&milliseconds, start, end));
}

static void a_captured_event_is_destroyed(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuEventDestroy(event));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

/* ---- waiting inside a capture ---------------------------------------------------------------- */

/* A capture must not depend on what is outside of it. */
static void a_capturing_stream_waits_for_an_outside_event(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuEventRecord(event, other));
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_ISOLATION, cu.cuStreamWaitEvent(stream, event, 0));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void a_capturing_stream_waits_for_its_own_earlier_event(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuEventRecord(event, stream));
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(CAPTURE_ISOLATION, cu.cuStreamWaitEvent(stream, event, 0));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void a_capturing_stream_waits_for_an_event_never_recorded(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, event, 0));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

/* ---- forking and joining --------------------------------------------------------------------- */

static void a_capture_forks_and_joins(void)
{
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event(), join = make_event();
    CUdeviceptr memory = make_memory(8192);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    fill(memory, 0, 8192);
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(fork, stream));
    EXPECT(OK, cu.cuStreamWaitEvent(side, fork, 0));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status_of(side));
    EXPECT(OK, cu.cuMemsetD8Async(memory, 1, 4096, side));
    EXPECT(OK, cu.cuMemsetD8Async(memory + 4096, 2, 4096, stream));
    EXPECT(OK, cu.cuEventRecord(join, side));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, join, 0));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(side));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 1, 4096));
    CHECK(holds(memory + 4096, 2, 4096));
}

static void a_fork_that_is_not_joined(void)
{
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = (CUgraph)&graph;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(fork, stream));
    REQUIRE(cu.cuStreamWaitEvent(side, fork, 0));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, side));
    EXPECT(CAPTURE_UNJOINED, cu.cuStreamEndCapture(stream, &graph));
    CHECK(graph == NULL);
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(stream));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(side));
    EXPECT(OK, cu.cuStreamSynchronize(side));
}

static void an_empty_fork_that_is_not_joined(void)
{
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    REQUIRE(cu.cuEventRecord(fork, stream));
    REQUIRE(cu.cuStreamWaitEvent(side, fork, 0));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_NONE, status_of(side));
}

static void a_capture_is_ended_where_it_began(void)
{
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(fork, stream));
    REQUIRE(cu.cuStreamWaitEvent(side, fork, 0));
    EXPECT(CAPTURE_UNMATCHED, cu.cuStreamEndCapture(side, &graph));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void two_captures_do_not_merge(void)
{
    CUstream first = make_stream(), second = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(first, GLOBAL));
    REQUIRE(cu.cuStreamBeginCapture(second, GLOBAL));
    REQUIRE(cu.cuEventRecord(event, first));
    EXPECT(CAPTURE_MERGE, cu.cuStreamWaitEvent(second, event, 0));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(first));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(second));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(first, &graph));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(second, &graph));
}

static void the_default_stream_does_not_join_a_capture(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(event, stream));
    EXPECT(CAPTURE_IMPLICIT, cu.cuStreamWaitEvent(NULL, event, 0));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void an_event_of_an_ended_capture_kills_the_next_one(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(event, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    EXPECT(INVALID_VALUE, cu.cuStreamWaitEvent(stream, event, 0));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

/* A shared stream is pulled in while it is busy: what it did before is not part of the capture. */
static void a_busy_stream_joins_a_capture(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event(), join = make_event();
    CUgraph graph = NULL;
    gate_hold(&busy, side);
    REQUIRE(cu.cuStreamBeginCapture(stream, GLOBAL));
    REQUIRE(cu.cuEventRecord(fork, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamWaitEvent(side, fork, 0));
    REQUIRE(cu.cuEventRecord(join, side));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, join, 0));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(NOT_READY, cu.cuStreamQuery(side));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(side));
}

/* ---- events of the whole context ------------------------------------------------------------- */

static void a_context_event_kills_captures(void)
{
    if (!cu.cuCtxRecordEvent) {
        SKIP("the driver has no cuCtxRecordEvent");
    }
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuCtxRecordEvent(context, event));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuCtxRecordEvent(context, event));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void a_context_wait_kills_captures(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuCtxSynchronize());
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_INVALIDATED, status_of(stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, cu.cuCtxSynchronize());
}

const suite_case capture_event_cases[] = {
    CASE(query_of_a_captured_event_kills_the_capture),
    CASE(synchronizing_a_captured_event_kills_the_capture),
    CASE(a_captured_event_after_the_capture),
    CASE(a_captured_event_after_launch),
    CASE(a_captured_event_recorded_again_outside),
    CASE(time_with_a_captured_event),
    CASE(a_captured_event_is_destroyed),
    CASE(a_capturing_stream_waits_for_an_outside_event),
    CASE(a_capturing_stream_waits_for_its_own_earlier_event),
    CASE(a_capturing_stream_waits_for_an_event_never_recorded),
    CASE(a_capture_forks_and_joins),
    CASE(a_fork_that_is_not_joined),
    CASE(an_empty_fork_that_is_not_joined),
    CASE(a_capture_is_ended_where_it_began),
    CASE(two_captures_do_not_merge),
    CASE(the_default_stream_does_not_join_a_capture),
    CASE(an_event_of_an_ended_capture_kills_the_next_one),
    CASE(a_busy_stream_joins_a_capture),
    CASE(a_context_event_kills_captures),
    CASE(a_context_wait_kills_captures),
    CASE_END,
};

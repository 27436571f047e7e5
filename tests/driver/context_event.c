/*
 * Events of a whole context (cuCtxRecordEvent, CUDA 12.5 and later).
 */
#include "suite.h"

static void need_context_events(void)
{
    if (!cu.cuCtxRecordEvent) {
        SKIP("the driver has no cuCtxRecordEvent");
    }
}

static void a_context_event_covers_non_blocking_streams(void)
{
    need_context_events();
    gate first = gate_make(), second = gate_make();
    CUstream one = make_stream(), two = make_stream();
    CUevent event = make_event();
    gate_hold(&first, one);
    gate_hold(&second, two);
    EXPECT_AT_ONCE(&first, OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&first);
    EXPECT(OK, cu.cuStreamSynchronize(one));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&second, OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
}

static void a_context_event_covers_the_default_stream(void)
{
    need_context_events();
    gate busy = gate_make();
    CUevent event = make_event();
    gate_hold(&busy, NULL);
    EXPECT_AT_ONCE(&busy, OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

static void a_context_event_ignores_later_work(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUevent event = make_event();
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

/* What is queued behind a busy stream after the event does not hold the event back either. */
static void a_context_event_ignores_later_work_of_busy_streams(void)
{
    need_context_events();
    gate first = gate_make(), second = gate_make();
    CUstream stream = make_stream();
    CUevent event = make_event();
    gate_hold(&first, stream);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    gate_hold(&second, stream);
    gate_open(&first);
    EXPECT_AT_ONCE(&second, OK, cu.cuEventSynchronize(event));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    gate_open(&second);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_context_event_covers_destroyed_streams(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUevent event = make_event();
    gate_hold(&busy, stream);
    REQUIRE(cu.cuStreamDestroy(stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

/* Recording for the context delays no stream: it is no barrier for what comes later. */
static void a_context_event_is_no_barrier(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream first = make_stream(), second = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUevent event = make_event();
    gate_hold(&busy, first);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, second));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(second));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void a_stream_waits_for_a_context_event(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream first = make_stream(), second = make_stream();
    CUevent event = make_event();
    gate_hold(&busy, first);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamWaitEvent(second, event, 0));
    EXPECT(NOT_READY, cu.cuStreamQuery(second));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(second));
}

static void time_of_context_events(void)
{
    need_context_events();
    CUevent start = NULL, end = NULL;
    float milliseconds = -1;
    REQUIRE(cu.cuEventCreate(&start, CU_EVENT_DEFAULT));
    REQUIRE(cu.cuEventCreate(&end, CU_EVENT_DEFAULT));
    EXPECT(OK, cu.cuCtxRecordEvent(context, start));
    EXPECT(OK, cu.cuEventRecord(end, NULL));
    EXPECT(OK, cu.cuCtxSynchronize());
    EXPECT(OK, cu.cuEventElapsedTime(&milliseconds, start, end));
}

static void a_context_event_refuses_nonsense(void)
{
    need_context_events();
    CUevent event = make_event();
    EXPECT(INVALID_HANDLE, cu.cuCtxRecordEvent(context, NULL));
    EXPECT(INVALID_CONTEXT, cu.cuCtxRecordEvent(NULL, event)); /* not the current one */
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void without_a_current_context(void *data)
{
    CUevent event = *(CUevent *)data;
    EXPECT(INVALID_CONTEXT, cu.cuCtxRecordEvent(NULL, event));
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void a_context_event_needs_no_current_context(void)
{
    need_context_events();
    CUevent event = make_event();
    in_thread(without_a_current_context, &event);
}

static void a_context_event_is_recorded_as_any_other_afterwards(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream first = make_stream(), second = make_stream();
    CUevent event = make_event();
    gate_hold(&busy, first);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(OK, cu.cuEventRecord(event, second));
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void a_context_event_is_destroyed_while_pending(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUevent event = make_event();
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventDestroy(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void seer(int socket)
{
    open_driver();
    open_context();
    CUipcEventHandle handle;
    CUevent event = NULL;
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, cu.cuIpcOpenEventHandle(&event, handle));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    send_turn(socket);
    EXPECT(OK, cu.cuEventSynchronize(event));
    send_turn(socket);
}

static void a_context_event_is_seen_from_another_process(void)
{
    partner other = partner_start(seer);
    open_driver();
    open_context();
    need_context_events();
    CUipcEventHandle handle;
    CUevent event = NULL;
    REQUIRE(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    REQUIRE(cu.cuIpcGetEventHandle(&handle, event));
    gate busy = gate_make();
    CUstream stream = make_stream();
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    pass_milliseconds(50);
    gate_open(&busy);
    receive_turn(other.socket);
    REQUIRE(cu.cuEventSynchronize(event));
    partner_end(&other);
}

/* While any stream of the context captures, and in whatever mode. */
static void a_context_event_kills_captures(void)
{
    need_context_events();
    static const CUstreamCaptureMode modes[] = {CU_STREAM_CAPTURE_MODE_GLOBAL,
                                                CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
                                                CU_STREAM_CAPTURE_MODE_RELAXED};
    CUevent event = make_event();
    for (int i = 0; i < 3; i++) {
        CUstream stream = make_stream();
        CUgraph graph = NULL;
        REQUIRE(cu.cuStreamBeginCapture(stream, modes[i]));
        EXPECT(CAPTURE_UNSUPPORTED, cu.cuCtxRecordEvent(context, event));
        EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
        EXPECT(OK, cu.cuCtxRecordEvent(context, event));
        EXPECT(OK, cu.cuEventSynchronize(event));
    }
}

/* The event keeps what it stood for when recording it anew fails. */
static void a_context_event_that_fails_changes_nothing(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream stream = make_stream(), other = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    REQUIRE(cu.cuStreamBeginCapture(other, CU_STREAM_CAPTURE_MODE_RELAXED));
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuCtxRecordEvent(context, event));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(other, &graph));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

/* It covers what host functions and words hold up, and per-thread streams. */
static void a_context_event_covers_every_kind_of_work(void)
{
    need_context_events();
    gate busy = gate_make();
    CUstream stream = make_blocking_stream();
    CUevent event = make_event();
    host_gate held;
    host_gate_hold(&held, stream);
    gate_hold(&busy, CU_STREAM_PER_THREAD);
    EXPECT(OK, cu.cuCtxRecordEvent(context, event));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    host_gate_open(&held);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

const suite_case context_event_cases[] = {
    CASE(a_context_event_covers_non_blocking_streams),
    CASE(a_context_event_covers_the_default_stream),
    CASE(a_context_event_ignores_later_work),
    CASE(a_context_event_ignores_later_work_of_busy_streams),
    CASE(a_context_event_covers_destroyed_streams),
    CASE(a_context_event_is_no_barrier),
    CASE(a_stream_waits_for_a_context_event),
    CASE(time_of_context_events),
    CASE(a_context_event_refuses_nonsense),
    CASE(a_context_event_needs_no_current_context),
    CASE(a_context_event_is_recorded_as_any_other_afterwards),
    CASE(a_context_event_is_destroyed_while_pending),
    CASE_FROM(a_context_event_is_seen_from_another_process, WITHOUT_DRIVER),
    CASE(a_context_event_kills_captures),
    CASE(a_context_event_that_fails_changes_nothing),
    CASE(a_context_event_covers_every_kind_of_work),
    CASE_END,
};

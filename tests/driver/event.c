/*
 * Events: before and after they are recorded, times, waits, and what outlives what.
 */
#include <string.h>

#include "suite.h"

static CUevent make_timed(void)
{
    CUevent event = NULL;
    REQUIRE(cu.cuEventCreate(&event, CU_EVENT_DEFAULT));
    return event;
}

static void bad_events_are_not_made(void)
{
    CUevent event = NULL;
    EXPECT(INVALID_VALUE, cu.cuEventCreate(NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuEventCreate(&event, 8));
    EXPECT(INVALID_VALUE, cu.cuEventCreate(&event, 0x100));
    for (unsigned flags = 0; flags < 4; flags++) {
        if (EXPECT(OK, cu.cuEventCreate(&event, flags)) == OK) {
            EXPECT(OK, cu.cuEventDestroy(event));
        }
    }
}

static void null_events_are_refused(void)
{
    CUstream stream = make_stream();
    float milliseconds = 0;
    CUevent event = make_timed();
    EXPECT(INVALID_HANDLE, cu.cuEventQuery(NULL));
    EXPECT(INVALID_HANDLE, cu.cuEventSynchronize(NULL));
    EXPECT(INVALID_HANDLE, cu.cuEventRecord(NULL, stream));
    EXPECT(INVALID_HANDLE, cu.cuEventDestroy(NULL));
    EXPECT(INVALID_HANDLE, cu.cuStreamWaitEvent(stream, NULL, 0));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, NULL, event));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, event, NULL));
    EXPECT(INVALID_VALUE, cu.cuStreamWaitEvent(stream, event, 0x100));
}

static void an_event_not_recorded_is_over(void)
{
    CUevent event = make_event();
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, event, 0));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void an_event_follows_its_stream(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream stream = make_stream();
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
}

static void an_event_is_recorded_before_later_work(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuEventRecord(event, stream));
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_blocking_event_waits_like_any_other(void)
{
    gate busy = gate_make();
    CUevent event = NULL;
    CUstream stream = make_stream();
    REQUIRE(cu.cuEventCreate(&event, CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING));
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

static void an_event_waits_for_its_stream_only(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream first = make_stream(), second = make_stream();
    gate_hold(&busy, first);
    EXPECT(OK, cu.cuEventRecord(event, second));
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventSynchronize(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void a_query_is_about_the_latest_record(void)
{
    gate first = gate_make(), second = gate_make();
    CUevent event = make_event();
    CUstream one = make_stream(), two = make_stream();
    gate_hold(&first, one);
    gate_hold(&second, two);
    EXPECT(OK, cu.cuEventRecord(event, one));
    EXPECT(OK, cu.cuEventRecord(event, two));
    gate_open(&first);
    EXPECT(OK, cu.cuStreamSynchronize(one));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&second);
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuEventQuery(event));
}

static void the_latest_record_counts_even_if_it_is_over_first(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream one = make_stream(), two = make_stream();
    gate_hold(&busy, one);
    EXPECT(OK, cu.cuEventRecord(event, one));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventRecord(event, two));
    EXPECT(OK, cu.cuStreamSynchronize(two));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventSynchronize(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void an_event_becomes_busy_again(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuEventSynchronize(event));
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    gate_open(&busy);
    EXPECT(OK, cu.cuEventSynchronize(event));
}

/* ---- times ----------------------------------------------------------------------------------- */

static void time_between_events(void)
{
    CUevent start = make_timed(), end = make_timed();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(64 * MiB);
    float milliseconds = -1, back = 1;
    EXPECT(OK, cu.cuEventRecord(start, stream));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 64 * MiB, stream));
    EXPECT(OK, cu.cuEventRecord(end, stream));
    EXPECT(OK, cu.cuEventSynchronize(end));
    EXPECT(OK, cu.cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds > 0 && milliseconds < 10000);
    EXPECT(OK, cu.cuEventElapsedTime(&back, end, start));
    CHECK(back < 0 && back == -milliseconds);
    EXPECT(OK, cu.cuEventElapsedTime(&milliseconds, start, start));
    CHECK(milliseconds == 0);
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(NULL, start, end));
}

static void time_of_events_not_recorded(void)
{
    CUevent start = make_timed(), end = make_timed();
    CUstream stream = make_stream();
    float milliseconds = -1;
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, start, end));
    EXPECT(OK, cu.cuEventRecord(start, stream));
    EXPECT(OK, cu.cuEventSynchronize(start));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, start, end));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, end, start));
}

static void time_of_events_without_timing(void)
{
    CUevent start = make_event(), end = make_event(), timed = make_timed();
    CUstream stream = make_stream();
    float milliseconds = -1;
    REQUIRE(cu.cuEventRecord(start, stream));
    REQUIRE(cu.cuEventRecord(end, stream));
    REQUIRE(cu.cuEventRecord(timed, stream));
    REQUIRE(cu.cuStreamSynchronize(stream));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, start, end));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, start, timed));
    EXPECT(INVALID_HANDLE, cu.cuEventElapsedTime(&milliseconds, timed, end));
}

static void time_of_events_not_over(void)
{
    gate busy = gate_make();
    CUevent start = make_timed(), end = make_timed();
    CUstream stream = make_stream();
    float milliseconds = -1;
    REQUIRE(cu.cuEventRecord(start, stream));
    REQUIRE(cu.cuEventSynchronize(start));
    gate_hold(&busy, stream);
    REQUIRE(cu.cuEventRecord(end, stream));
    EXPECT_AT_ONCE(&busy, NOT_READY, cu.cuEventElapsedTime(&milliseconds, start, end));
    gate_open(&busy);
    EXPECT(OK, cu.cuEventSynchronize(end));
    EXPECT(OK, cu.cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds > 0);
}

/* A gate that is held for 50 ms takes 50 ms of the stream's time. */
static void a_held_stream_takes_time(void)
{
    gate busy = gate_make();
    CUevent start = make_timed(), end = make_timed();
    CUstream stream = make_stream();
    float milliseconds = -1;
    REQUIRE(cu.cuEventRecord(start, stream));
    gate_hold(&busy, stream);
    REQUIRE(cu.cuEventRecord(end, stream));
    pass_milliseconds(50);
    gate_open(&busy);
    EXPECT(OK, cu.cuEventSynchronize(end));
    EXPECT(OK, cu.cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds > 30 && milliseconds < 5000);
}

/* ---- waits between streams ------------------------------------------------------------------- */

static void a_stream_waits_for_another(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream first = make_stream(), second = make_stream();
    CUdeviceptr memory = make_memory(4096);
    gate_hold(&busy, first);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, first));
    EXPECT(OK, cu.cuEventRecord(event, first));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamWaitEvent(second, event, 0));
    REQUIRE(cu.cuMemsetD8Async(memory, 2, 2048, second));
    EXPECT(NOT_READY, cu.cuStreamQuery(second));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(second));
    EXPECT(OK, cu.cuStreamQuery(first));
    CHECK(holds(memory, 2, 2048));
    CHECK(holds(memory + 2048, 1, 2048));
}

/* The record at the time of the wait counts: one made later delays nothing. */
static void a_wait_is_for_the_record_before_it(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream first = make_stream(), second = make_stream(), third = make_stream();
    EXPECT(OK, cu.cuEventRecord(event, first));
    EXPECT(OK, cu.cuStreamWaitEvent(second, event, 0));
    gate_hold(&busy, third);
    EXPECT(OK, cu.cuEventRecord(event, third));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(second));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

/* ... and one made later does not release it either. */
static void a_wait_is_not_released_by_a_later_record(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream first = make_stream(), second = make_stream(), third = make_stream();
    gate_hold(&busy, first);
    EXPECT(OK, cu.cuEventRecord(event, first));
    EXPECT(OK, cu.cuStreamWaitEvent(second, event, 0));
    EXPECT(OK, cu.cuEventRecord(event, third));
    EXPECT(OK, cu.cuEventSynchronize(event));
    EXPECT(NOT_READY, cu.cuStreamQuery(second));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(second));
}

static void a_wait_for_an_event_of_the_same_stream(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream stream = make_stream();
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuStreamWaitEvent(stream, event, 0));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void the_default_stream_waits_for_an_event(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream stream = make_stream();
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuStreamWaitEvent(NULL, event, 0));
    EXPECT(NOT_READY, cu.cuStreamQuery(NULL));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(NULL));
}

/* ---- what outlives what ---------------------------------------------------------------------- */

static void an_event_is_destroyed_while_pending(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream first = make_stream(), second = make_stream();
    gate_hold(&busy, first);
    EXPECT(OK, cu.cuEventRecord(event, first));
    EXPECT(OK, cu.cuStreamWaitEvent(second, event, 0));
    EXPECT_AT_ONCE(&busy, OK, cu.cuEventDestroy(event));
    EXPECT(NOT_READY, cu.cuStreamQuery(second)); /* the wait stays */
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(second));
}

static void an_event_outlives_its_stream(void)
{
    gate busy = gate_make();
    CUevent event = make_event();
    CUstream stream = make_stream(), other = make_stream();
    gate_hold(&busy, stream);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamDestroy(stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuStreamWaitEvent(other, event, 0));
    EXPECT(NOT_READY, cu.cuStreamQuery(other));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
    EXPECT(OK, cu.cuStreamSynchronize(other));
    EXPECT(OK, cu.cuEventRecord(event, other));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void an_event_of_a_destroyed_idle_stream_is_over(void)
{
    CUevent event = make_event();
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(OK, cu.cuStreamDestroy(stream));
    EXPECT(OK, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuEventSynchronize(event));
}

static void a_thousand_events_of_one_stream(void)
{
    static CUevent events[1000];
    gate busy = gate_make();
    CUstream stream = make_stream();
    unsigned failed = 0, ready = 0;
    gate_hold(&busy, stream);
    for (int i = 0; i < 1000; i++) {
        failed += cu.cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS;
        if (i < 500) { /* the queue of a stream is deep, not endless */
            failed += cu.cuEventRecord(events[i], stream) != CUDA_SUCCESS;
        }
    }
    for (int i = 0; i < 500; i++) {
        ready += cu.cuEventQuery(events[i]) == CUDA_SUCCESS;
    }
    EXPECT_INT(0, failed);
    EXPECT_INT(0, ready);
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    for (int i = 0; i < 1000; i++) {
        failed += cu.cuEventQuery(events[i]) != CUDA_SUCCESS;
        failed += cu.cuEventDestroy(events[i]) != CUDA_SUCCESS;
    }
    EXPECT_INT(0, failed);
}

const suite_case event_cases[] = {
    CASE(bad_events_are_not_made),
    CASE(null_events_are_refused),
    CASE(an_event_not_recorded_is_over),
    CASE(an_event_follows_its_stream),
    CASE(an_event_is_recorded_before_later_work),
    CASE(a_blocking_event_waits_like_any_other),
    CASE(an_event_waits_for_its_stream_only),
    CASE(a_query_is_about_the_latest_record),
    CASE(the_latest_record_counts_even_if_it_is_over_first),
    CASE(an_event_becomes_busy_again),
    CASE(time_between_events),
    CASE(time_of_events_not_recorded),
    CASE(time_of_events_without_timing),
    CASE(time_of_events_not_over),
    CASE(a_held_stream_takes_time),
    CASE(a_stream_waits_for_another),
    CASE(a_wait_is_for_the_record_before_it),
    CASE(a_wait_is_not_released_by_a_later_record),
    CASE(a_wait_for_an_event_of_the_same_stream),
    CASE(the_default_stream_waits_for_an_event),
    CASE(an_event_is_destroyed_while_pending),
    CASE(an_event_outlives_its_stream),
    CASE(an_event_of_a_destroyed_idle_stream_is_over),
    CASE(a_thousand_events_of_one_stream),
    CASE_END,
};

/*
 * Copies and memsets without a stream: on the default stream, and which of them the host waits for.
 */
#include <string.h>

#include "more.h"

static void copies_there_and_back(void)
{
    CUdeviceptr one = make_memory(MiB), two = make_memory(MiB);
    char *pages = make_pages(MiB), *pinned = make_pinned(MiB);
    memset(pages, 3, MiB);
    EXPECT(OK, more.cuMemcpyHtoD(one, pages, MiB));
    memset(pages, 0, MiB);
    EXPECT(OK, more.cuMemcpyDtoD(two, one, MiB));
    EXPECT(OK, more.cuMemcpyDtoH(pages, two, MiB));
    CHECK(all_bytes(pages, 3, MiB));
    EXPECT(OK, more.cuMemsetD8(one, 4, MiB));
    EXPECT(OK, more.cuMemcpyDtoH(pinned, one, MiB));
    CHECK(all_bytes(pinned, 4, MiB));
    EXPECT(OK, more.cuMemsetD32(one, 0x05050505, MiB / 4));
    EXPECT(OK, more.cuMemcpyDtoH(pinned, one, MiB));
    CHECK(all_bytes(pinned, 5, MiB));
}

/* cuMemcpy and cuMemcpyAsync find out by themselves where either side lies. */
static void copies_by_address_alone(void)
{
    CUdeviceptr memory = make_memory(MiB), other = make_memory(MiB);
    char *pages = make_pages(MiB), *pinned = make_pinned(MiB);
    CUdeviceptr far_pages = (CUdeviceptr)(uintptr_t)pages;
    CUdeviceptr far_pinned = (CUdeviceptr)(uintptr_t)pinned;
    CUstream stream = make_stream();
    memset(pages, 3, MiB);
    EXPECT(OK, more.cuMemcpy(memory, far_pages, MiB));
    EXPECT(OK, more.cuMemcpy(other, memory, MiB));
    EXPECT(OK, more.cuMemcpy(far_pinned, other, MiB));
    CHECK(all_bytes(pinned, 3, MiB));
    memset(pinned, 4, MiB);
    EXPECT(OK, more.cuMemcpyAsync(memory, far_pinned, MiB, stream));
    EXPECT(OK, more.cuMemcpyAsync(other, memory, MiB, stream));
    EXPECT(OK, more.cuMemcpyAsync(far_pages, other, MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(pages, 4, MiB));
    memset(pages, 5, MiB);
    EXPECT(OK, more.cuMemcpy(far_pinned, far_pages, MiB));
    CHECK(all_bytes(pinned, 5, MiB));
    char *more_pages = make_pages(MiB);
    EXPECT(OK, more.cuMemcpy((CUdeviceptr)(uintptr_t)more_pages, far_pages, MiB));
    CHECK(all_bytes(more_pages, 5, MiB));
}

static void copies_of_nothing_at_all(void)
{
    CUdeviceptr memory = make_memory(MiB);
    char *pages = make_pages(4096);
    CUstream stream = make_stream();
    EXPECT(OK, more.cuMemcpyHtoD(memory, pages, 0));
    EXPECT(OK, more.cuMemcpyDtoH(pages, memory, 0));
    EXPECT(OK, more.cuMemcpyDtoD(memory, memory, 0));
    EXPECT(OK, more.cuMemcpy(memory, memory, 0));
    EXPECT(OK, more.cuMemcpyAsync(memory, memory, 0, stream));
    EXPECT(OK, more.cuMemsetD8(memory, 0, 0));
    EXPECT(OK, more.cuMemsetD32(memory, 0, 0));
    EXPECT(OK, more.cuMemcpyHtoD(0, NULL, 0));
    EXPECT(OK, more.cuMemcpyDtoH(NULL, 0, 0));
}

static void copies_from_and_to_null(void)
{
    CUdeviceptr memory = make_memory(MiB);
    char *pages = make_pages(4096);
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, more.cuMemcpyHtoD(0, pages, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyHtoD(memory, NULL, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoH(NULL, memory, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoH(pages, 0, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoD(0, memory, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoD(memory, 0, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpy(0, memory, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpy(memory, 0, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyAsync(0, memory, 4096, stream));
    EXPECT(INVALID_VALUE, more.cuMemsetD8(0, 1, 4096));
    EXPECT(INVALID_VALUE, more.cuMemsetD32(0, 1, 1024));
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void copies_beyond_the_end(void)
{
    CUdeviceptr memory = make_memory(4 * MiB);
    char *pages = make_pages(8 * MiB);
    EXPECT(INVALID_VALUE, more.cuMemcpyHtoD(memory, pages, 4 * MiB + 1));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoH(pages, memory + MiB, 4 * MiB));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoD(memory + MiB, memory, 4 * MiB));
    EXPECT(INVALID_VALUE, more.cuMemcpy(memory, (CUdeviceptr)(uintptr_t)pages, 5 * MiB));
    EXPECT(INVALID_VALUE, more.cuMemsetD8(memory, 1, 4 * MiB + 1));
    EXPECT(INVALID_VALUE, more.cuMemsetD32(memory, 1, MiB + 1));
    EXPECT(INVALID_VALUE, more.cuMemsetD32(memory + 1, 1, 16));
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void copies_to_memory_that_is_gone(void)
{
    CUdeviceptr memory = make_memory(4 * MiB), range = reserve(FRAME);
    char *pages = make_pages(4096);
    REQUIRE(cu.cuMemFree(memory));
    EXPECT(INVALID_VALUE, more.cuMemcpyHtoD(memory, pages, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyDtoH(pages, memory, 4096));
    EXPECT(INVALID_VALUE, more.cuMemsetD8(range, 1, 4096));
    EXPECT(INVALID_VALUE, more.cuMemcpyHtoD(range, pages, 4096));
    EXPECT(OK, cu.cuCtxSynchronize());
}

/* ---- who waits ------------------------------------------------------------------------------ */

static void a_copy_in_waits_for_the_default_stream(void)
{
    CUdeviceptr memory = make_memory(MiB);
    char *pinned = make_pinned(MiB);
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_WAITS(&busy, OK, more.cuMemcpyHtoD(memory, pinned, MiB));
}

static void a_small_pageable_copy_in_waits_for_the_default_stream(void)
{
    CUdeviceptr memory = make_memory(MiB);
    char *pages = make_pages(4096);
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_WAITS(&busy, OK, more.cuMemcpyHtoD(memory, pages, 4096));
}

static void a_copy_out_waits_for_the_default_stream(void)
{
    CUdeviceptr memory = make_memory(MiB);
    char *pinned = make_pinned(MiB);
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_WAITS(&busy, OK, more.cuMemcpyDtoH(pinned, memory, MiB));
}

static void a_copy_waits_for_blocking_streams_but_not_for_others(void)
{
    CUdeviceptr memory = make_memory(MiB);
    char *pinned = make_pinned(MiB);
    CUstream blocking = make_blocking_stream(), other = make_stream();
    gate first = gate_make(), second = gate_make();
    gate_hold(&first, other);
    EXPECT_AT_ONCE(&first, OK, more.cuMemcpyDtoH(pinned, memory, MiB));
    gate_open(&first);
    gate_hold(&second, blocking);
    EXPECT_WAITS(&second, OK, more.cuMemcpyDtoH(pinned, memory, MiB));
}

static void nobody_waits_for_copies_within_the_device(void)
{
    CUdeviceptr one = make_memory(MiB), two = make_memory(MiB);
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_AT_ONCE(&busy, OK, more.cuMemcpyDtoD(two, one, MiB));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemcpy(two, one, MiB));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemcpyPeer(two, context, one, context, MiB));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemsetD8(one, 1, MiB));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemsetD32(one, 1, MiB / 4));
    EXPECT(NOT_READY, cu.cuStreamQuery(NULL));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void a_memset_of_pinned_memory_is_waited_for(void)
{
    char *pinned = make_pinned(MiB);
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_WAITS(&busy, OK, more.cuMemsetD8((CUdeviceptr)(uintptr_t)pinned, 1, MiB));
    EXPECT(OK, cu.cuCtxSynchronize());
    CHECK(all_bytes(pinned, 1, MiB));
}

/* ---- a busy default stream, and who asks about it ---------------------------------------------- */

/* A blocking stream without work of its own has nothing to wait for. */
static void a_blocking_stream_is_asked_while_the_default_stream_is_busy(void)
{
    CUstream stream = make_blocking_stream();
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT(OK, cu.cuStreamQuery(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
    EXPECT(OK, cu.cuStreamQuery(stream));
}

static void a_blocking_stream_is_waited_for_while_the_default_stream_is_busy(void)
{
    CUstream stream = make_blocking_stream();
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(stream));
}

/* The event waits for the default stream, but the stream itself does not. */
static void an_event_on_a_blocking_stream_while_the_default_stream_is_busy(void)
{
    CUstream stream = make_blocking_stream();
    CUevent event = make_event();
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT(OK, cu.cuEventRecord(event, stream));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT(OK, cu.cuStreamQuery(stream));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
}

/* Its own work is over before the default stream's began. */
static void a_blocking_stream_that_has_worked_is_asked(void)
{
    CUstream stream = make_blocking_stream();
    CUdeviceptr memory = make_memory(4096);
    gate busy = gate_make();
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    REQUIRE(cu.cuStreamSynchronize(stream));
    gate_hold(&busy, NULL);
    EXPECT(OK, cu.cuStreamQuery(stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(stream));
}

static void the_default_stream_is_asked_while_a_blocking_stream_is_busy(void)
{
    CUstream stream = make_blocking_stream();
    gate busy = gate_make();
    gate_hold(&busy, stream);
    EXPECT(NOT_READY, cu.cuStreamQuery(NULL));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(NULL));
}

static void a_host_function_keeps_the_default_stream_busy(void)
{
    CUstream stream = make_blocking_stream();
    host_gate held;
    host_gate_hold(&held, NULL);
    sem_wait(&held.entered);
    EXPECT(NOT_READY, cu.cuStreamQuery(NULL));
    EXPECT(OK, cu.cuStreamQuery(stream));
    host_gate_open(&held);
    EXPECT(OK, cu.cuCtxSynchronize());
    EXPECT(OK, cu.cuStreamQuery(stream));
}

/* ---- contexts and captures -------------------------------------------------------------------- */

static void copy_without_a_context(void *data)
{
    CUdeviceptr memory = *(CUdeviceptr *)data;
    char bytes[64] = {0};
    EXPECT(INVALID_CONTEXT, more.cuMemcpyHtoD(memory, bytes, 64));
    EXPECT(INVALID_CONTEXT, more.cuMemcpyDtoH(bytes, memory, 64));
    EXPECT(INVALID_CONTEXT, more.cuMemcpyDtoD(memory, memory + 64, 64));
    EXPECT(INVALID_CONTEXT, more.cuMemcpy(memory, memory + 64, 64));
    EXPECT(INVALID_CONTEXT, more.cuMemcpyPeer(memory, context, memory + 64, context, 64));
    EXPECT(INVALID_CONTEXT, more.cuMemsetD8(memory, 1, 64));
    EXPECT(INVALID_CONTEXT, more.cuMemsetD32(memory, 1, 16));
}

static void copies_without_a_stream_need_a_context(void)
{
    CUdeviceptr memory = make_memory(4096);
    in_thread(copy_without_a_context, &memory);
}

/* One call beside a global capture of `stream`: its code, and how the capture ends. */
#define BESIDE(code, end_code, call)                                                               \
    do {                                                                                           \
        CUgraph graph_ = NULL;                                                                     \
        REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));                   \
        EXPECT(code, call);                                                                        \
        EXPECT(end_code, cu.cuStreamEndCapture(stream, &graph_));                                  \
    } while (0)

static void copies_beside_the_capture_of_a_non_blocking_stream(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(MiB);
    char *pinned = make_pinned(4096);
    BESIDE(OK, OK, more.cuMemcpyHtoD(memory, pinned, 4096));
    BESIDE(OK, OK, more.cuMemcpyDtoH(pinned, memory, 4096));
    BESIDE(OK, OK, more.cuMemcpyDtoD(memory, memory + 4096, 4096));
    BESIDE(OK, OK, more.cuMemsetD8(memory, 1, 4096));
    BESIDE(OK, OK, more.cuMemsetD32(memory, 1, 1024));
}

static void copies_beside_the_capture_of_a_blocking_stream(void)
{
    CUstream stream = make_blocking_stream();
    CUdeviceptr memory = make_memory(MiB);
    char *pinned = make_pinned(4096);
    BESIDE(CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, more.cuMemcpyHtoD(memory, pinned, 4096));
    BESIDE(CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, more.cuMemcpyDtoH(pinned, memory, 4096));
    BESIDE(CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, more.cuMemcpyDtoD(memory, memory + 4096, 4096));
    BESIDE(CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, more.cuMemsetD8(memory, 1, 4096));
}

const suite_case copy_now_cases[] = {
    CASE(copies_there_and_back),
    CASE(copies_by_address_alone),
    CASE(copies_of_nothing_at_all),
    CASE(copies_from_and_to_null),
    CASE(copies_beyond_the_end),
    CASE(copies_to_memory_that_is_gone),
    CASE(a_copy_in_waits_for_the_default_stream),
    CASE(a_small_pageable_copy_in_waits_for_the_default_stream),
    CASE(a_copy_out_waits_for_the_default_stream),
    CASE(a_copy_waits_for_blocking_streams_but_not_for_others),
    CASE(nobody_waits_for_copies_within_the_device),
    CASE(a_memset_of_pinned_memory_is_waited_for),
    CASE(a_blocking_stream_is_asked_while_the_default_stream_is_busy),
    CASE(a_blocking_stream_is_waited_for_while_the_default_stream_is_busy),
    CASE(an_event_on_a_blocking_stream_while_the_default_stream_is_busy),
    CASE(a_blocking_stream_that_has_worked_is_asked),
    CASE(the_default_stream_is_asked_while_a_blocking_stream_is_busy),
    CASE(a_host_function_keeps_the_default_stream_busy),
    CASE(copies_without_a_stream_need_a_context),
    CASE(copies_beside_the_capture_of_a_non_blocking_stream),
    CASE(copies_beside_the_capture_of_a_blocking_stream),
    CASE_END,
};

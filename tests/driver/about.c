/*
 * What streams, contexts and devices say about themselves, and what they can be told.
 */
#include <stdio.h>
#include <string.h>

#include "more.h"

/* ---- streams -------------------------------------------------------------------------------- */

static void priorities_of_streams(void)
{
    static const int asked[] = {0, -1, -3, -5, -99, 1, 99};
    static const int expected[] = {0, -1, -3, -5, -5, 0, 0};
    int least = 77, greatest = 77, priority = 77;
    EXPECT(OK, more.cuCtxGetStreamPriorityRange(&least, &greatest));
    EXPECT_INT(0, least);
    EXPECT_INT(-5, greatest);
    EXPECT(OK, more.cuCtxGetStreamPriorityRange(NULL, &greatest));
    EXPECT(OK, more.cuCtxGetStreamPriorityRange(&least, NULL));
    EXPECT(OK, more.cuCtxGetStreamPriorityRange(NULL, NULL));
    for (size_t i = 0; i < sizeof asked / sizeof *asked; i++) {
        CUstream stream = NULL;
        REQUIRE(cu.cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, asked[i]));
        EXPECT(OK, more.cuStreamGetPriority(stream, &priority));
        EXPECT_INT(expected[i], priority);
    }
    EXPECT(OK, more.cuStreamGetPriority(make_stream(), &priority));
    EXPECT_INT(0, priority);
    EXPECT(OK, more.cuStreamGetPriority(NULL, &priority));
    EXPECT_INT(0, priority);
}

static void flags_of_streams(void)
{
    unsigned flags = 77;
    EXPECT(OK, more.cuStreamGetFlags(make_stream(), &flags));
    EXPECT_INT(CU_STREAM_NON_BLOCKING, flags);
    EXPECT(OK, more.cuStreamGetFlags(make_blocking_stream(), &flags));
    EXPECT_INT(CU_STREAM_DEFAULT, flags);
    EXPECT(OK, more.cuStreamGetFlags(NULL, &flags));
    EXPECT_INT(CU_STREAM_DEFAULT, flags);
    EXPECT(OK, more.cuStreamGetFlags(CU_STREAM_LEGACY, &flags));
    EXPECT_INT(CU_STREAM_DEFAULT, flags);
    EXPECT(OK, more.cuStreamGetFlags(CU_STREAM_PER_THREAD, &flags));
    EXPECT_INT(CU_STREAM_DEFAULT, flags);
}

static void every_stream_has_an_id(void)
{
    CUstream one = make_stream(), two = make_stream();
    unsigned long long first = 0, second = 0, again = 0, zero = 0, legacy = 0, own = 0;
    EXPECT(OK, more.cuStreamGetId(one, &first));
    EXPECT(OK, more.cuStreamGetId(two, &second));
    EXPECT(OK, more.cuStreamGetId(one, &again));
    CHECK(first == again && first != second);
    EXPECT(OK, more.cuStreamGetId(NULL, &zero));
    EXPECT(OK, more.cuStreamGetId(CU_STREAM_LEGACY, &legacy));
    EXPECT(OK, more.cuStreamGetId(CU_STREAM_PER_THREAD, &own));
    CHECK(zero == legacy);
    CHECK(own != legacy && own != first);
}

static void every_stream_has_a_device(void)
{
    NEED(cuStreamGetDevice);
    CUdevice device = -1;
    EXPECT(OK, more.cuStreamGetDevice(make_stream(), &device));
    EXPECT_INT(0, device);
    device = -1;
    EXPECT(OK, more.cuStreamGetDevice(NULL, &device));
    EXPECT_INT(0, device);
    EXPECT(INVALID_VALUE, more.cuStreamGetDevice(make_stream(), NULL));
}

static void streams_asked_into_nothing(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, more.cuStreamGetPriority(stream, NULL));
    EXPECT(INVALID_VALUE, more.cuStreamGetFlags(stream, NULL));
    EXPECT(INVALID_VALUE, more.cuStreamGetId(stream, NULL));
}

static void ask_without_a_context(void *data)
{
    CUstream stream = *(CUstream *)data;
    int priority = 77, least = 77, greatest = 77;
    unsigned flags = 77;
    unsigned long long id = 0;
    EXPECT(OK, more.cuStreamGetPriority(stream, &priority));
    EXPECT(OK, more.cuStreamGetFlags(stream, &flags));
    EXPECT(OK, more.cuStreamGetId(stream, &id));
    EXPECT(INVALID_CONTEXT, more.cuStreamGetPriority(NULL, &priority));
    EXPECT(INVALID_CONTEXT, more.cuStreamGetFlags(NULL, &flags));
    EXPECT(INVALID_CONTEXT, more.cuStreamGetId(NULL, &id));
    EXPECT(INVALID_CONTEXT, more.cuCtxGetStreamPriorityRange(&least, &greatest));
}

static void streams_are_asked_without_a_context(void)
{
    CUstream stream = make_stream();
    in_thread(ask_without_a_context, &stream);
}

static void a_capturing_stream_is_asked(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    int priority = 77;
    unsigned flags = 77;
    unsigned long long id = 0;
    CUcontext found = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, more.cuStreamGetPriority(stream, &priority));
    EXPECT(CAPTURE_UNSUPPORTED, more.cuStreamGetFlags(stream, &flags));
    EXPECT(CAPTURE_UNSUPPORTED, more.cuStreamGetId(stream, &id));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamGetCtx(stream, &found));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

/* ---- events --------------------------------------------------------------------------------- */

static void an_event_is_recorded_with_flags(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    gate busy = gate_make();
    gate_hold(&busy, stream);
    EXPECT(OK, more.cuEventRecordWithFlags(event, stream, CU_EVENT_RECORD_DEFAULT));
    EXPECT(NOT_READY, cu.cuEventQuery(event));
    EXPECT_WAITS(&busy, OK, cu.cuEventSynchronize(event));
    EXPECT(INVALID_VALUE, more.cuEventRecordWithFlags(event, stream, 2));
    EXPECT(INVALID_VALUE, more.cuEventRecordWithFlags(event, stream, 99));
    EXPECT(INVALID_HANDLE, more.cuEventRecordWithFlags(NULL, stream, 0));
}

/* External means: a node of the graph that is captured. Nothing is captured here. */
static void an_external_record_outside_a_capture(void)
{
    EXPECT(ILLEGAL_STATE,
           more.cuEventRecordWithFlags(make_event(), make_stream(), CU_EVENT_RECORD_EXTERNAL));
}

/* ---- contexts ------------------------------------------------------------------------------- */

static void limits_are_set_and_given_back(void)
{
    size_t value = 0;
    int most = 0;
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    EXPECT_INT(1024, value);
    EXPECT(OK, more.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    EXPECT_INT(4096, value);
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_MALLOC_HEAP_SIZE));
    EXPECT_INT(8 * MiB, value);
    EXPECT(OK, more.cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 16 * MiB));
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_MALLOC_HEAP_SIZE));
    EXPECT_INT(16 * MiB, value);
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_PRINTF_FIFO_SIZE));
    CHECK(value > 0);
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT));
    EXPECT_INT(2048, value);
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_MAX_L2_FETCH_GRANULARITY));
    EXPECT(OK, more.cuCtxSetLimit(CU_LIMIT_MAX_L2_FETCH_GRANULARITY, 64));
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_MAX_L2_FETCH_GRANULARITY));
    EXPECT_INT(64, value);
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_PERSISTING_L2_CACHE_SIZE));
    REQUIRE(
        cu.cuDeviceGetAttribute(&most, (CUdevice_attribute)108, 0)); /* that may persist there */
    EXPECT_INT(most / 10 * 3, value);
}

/* From compute capability 9.0 on, a kernel cannot wait for those it launched. */
static void a_limit_the_device_does_not_have(void)
{
    size_t value = 0;
    EXPECT(UNSUPPORTED_LIMIT, more.cuCtxGetLimit(&value, CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH));
    EXPECT(UNSUPPORTED_LIMIT, more.cuCtxSetLimit(CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH, 4));
}

static void limits_that_are_none(void)
{
    size_t value = 0;
    EXPECT(INVALID_VALUE, more.cuCtxGetLimit(&value, 99));
    EXPECT(INVALID_VALUE, more.cuCtxGetLimit(&value, -1));
    EXPECT(INVALID_VALUE, more.cuCtxSetLimit(99, 1));
    EXPECT(INVALID_VALUE, more.cuCtxGetLimit(NULL, CU_LIMIT_STACK_SIZE));
}

static void flags_of_a_context(void)
{
    unsigned flags = 77;
    EXPECT(OK, more.cuCtxGetFlags(&flags));
    EXPECT_INT(8, flags); /* pinned memory is mapped */
    EXPECT(INVALID_VALUE, more.cuCtxGetFlags(NULL));
}

static void the_cache_is_reset(void)
{
    EXPECT(OK, more.cuCtxResetPersistingL2Cache());
}

static void context_calls_without_one(void *data)
{
    (void)data;
    size_t value = 0;
    unsigned flags = 0;
    EXPECT(INVALID_CONTEXT, more.cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    EXPECT(INVALID_CONTEXT, more.cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 4096));
    EXPECT(INVALID_CONTEXT, more.cuCtxGetFlags(&flags));
    EXPECT(INVALID_CONTEXT, more.cuCtxResetPersistingL2Cache());
}

static void limits_need_a_context(void)
{
    in_thread(context_calls_without_one, NULL);
}

static void context_calls_during_a_capture(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    size_t value = 0;
    unsigned flags = 0;
    int least = 0, greatest = 0;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, more.cuCtxGetLimit(&value, CU_LIMIT_STACK_SIZE));
    EXPECT(OK, more.cuCtxGetFlags(&flags));
    EXPECT(OK, more.cuCtxGetStreamPriorityRange(&least, &greatest));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

/* ---- devices -------------------------------------------------------------------------------- */

static void a_device_is_found_by_its_bus_id(void)
{
    char text[32], exact[13];
    CUdevice device = -1;
    unsigned domain = 0, bus = 0, slot = 0, function = 99;
    memset(text, 'x', sizeof text);
    EXPECT(OK, more.cuDeviceGetPCIBusId(text, sizeof text, 0));
    EXPECT_INT(12, strlen(text));
    EXPECT_INT(4, sscanf(text, "%4x:%2x:%2x.%x", &domain, &bus, &slot, &function));
    EXPECT_INT(0, function);
    EXPECT(OK, more.cuDeviceGetPCIBusId(exact, sizeof exact, 0));
    CHECK(strcmp(text, exact) == 0);
    EXPECT(OK, more.cuDeviceGetByPCIBusId(&device, text));
    EXPECT_INT(0, device);
    snprintf(text, sizeof text, "%04x:%02x:%02x", domain, bus, slot);
    EXPECT(OK, more.cuDeviceGetByPCIBusId(&device, text));
}

static void bus_ids_that_are_none(void)
{
    char text[32];
    CUdevice device = -1;
    EXPECT(INVALID_DEVICE, more.cuDeviceGetPCIBusId(text, sizeof text, 99));
    EXPECT(INVALID_DEVICE, more.cuDeviceGetByPCIBusId(&device, "fffe:fe:1e.0"));
    EXPECT(INVALID_VALUE, more.cuDeviceGetByPCIBusId(&device, "nonsense"));
    EXPECT(INVALID_VALUE, more.cuDeviceGetByPCIBusId(&device, ""));
    EXPECT_INT(-1, device);
}

static void a_bus_id_that_does_not_fit(void)
{
    char text[32];
    memset(text, 'x', sizeof text);
    EXPECT(INVALID_VALUE, more.cuDeviceGetPCIBusId(text, 12, 0));
    EXPECT(INVALID_VALUE, more.cuDeviceGetPCIBusId(text, 5, 0));
    CHECK(text[12] == 'x');
}

static void bus_ids_and_null(void)
{
    CUdevice device = -1;
    EXPECT(INVALID_VALUE, more.cuDeviceGetPCIBusId(NULL, 32, 0));
    EXPECT(INVALID_VALUE, more.cuDeviceGetByPCIBusId(&device, NULL));
    EXPECT(INVALID_VALUE, more.cuDeviceGetByPCIBusId(NULL, "0000:01:00.0"));
}

const suite_case about_cases[] = {
    CASE(priorities_of_streams),
    CASE(flags_of_streams),
    CASE(every_stream_has_an_id),
    CASE(every_stream_has_a_device),
    CASE(streams_asked_into_nothing),
    CASE(streams_are_asked_without_a_context),
    CASE(a_capturing_stream_is_asked),
    CASE(an_event_is_recorded_with_flags),
    CASE(an_external_record_outside_a_capture),
    CASE(limits_are_set_and_given_back),
    CASE(a_limit_the_device_does_not_have),
    CASE(limits_that_are_none),
    CASE(flags_of_a_context),
    CASE(the_cache_is_reset),
    CASE(limits_need_a_context),
    CASE(context_calls_during_a_capture),
    CASE_FROM(a_device_is_found_by_its_bus_id, WITHOUT_CONTEXT),
    CASE_FROM(bus_ids_that_are_none, WITHOUT_CONTEXT),
    CASE_FROM(a_bus_id_that_does_not_fit, WITHOUT_CONTEXT),
    CASE_FROM(bus_ids_and_null, WITHOUT_CONTEXT),
    CASE_END,
};

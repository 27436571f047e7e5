/*
 * The table and the driver's start: every function once, and what the driver says before cuInit.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "suite.h"

/* ---- the walk: every function of the table, once, with valid arguments ---------------------- */

static void walk_devices(void)
{
    const char *text = NULL;
    EXPECT(OK, cu.cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK(text && strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY") == 0);
    EXPECT(OK, cu.cuGetErrorString(CUDA_ERROR_OUT_OF_MEMORY, &text));
    CHECK(text && strcmp(text, "out of memory") == 0);
    EXPECT(OK, cu.cuInit(0));
    int version = 0, count = 0, value = 0, active = 0;
    EXPECT(OK, cu.cuDriverGetVersion(&version));
    CHECK(version >= EBB__DRIVER_OLDEST && version == cu.version);
    EXPECT(OK, cu.cuDeviceGetCount(&count));
    CHECK(count >= 1);
    CUdevice device = -1;
    EXPECT(OK, cu.cuDeviceGet(&device, 0));
    EXPECT_INT(0, device);
    char name[64] = "";
    EXPECT(OK, cu.cuDeviceGetName(name, sizeof name, device));
    CHECK(strlen(name) > 0);
    CUuuid uuid, none;
    memset(&uuid, 0, sizeof uuid);
    memset(&none, 0, sizeof none);
    EXPECT(OK, cu.cuDeviceGetUuid(&uuid, device));
    CHECK(memcmp(&uuid, &none, sizeof uuid) != 0);
    size_t bytes = 0;
    EXPECT(OK, cu.cuDeviceTotalMem(&bytes, device));
    CHECK(bytes >= GiB);
    EXPECT(OK, cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, device));
    EXPECT_INT(1, value);
    EXPECT(OK, cu.cuDeviceCanAccessPeer(&value, device, device));
    unsigned flags = 99;
    EXPECT(OK, cu.cuDevicePrimaryCtxGetState(device, &flags, &active));
    EXPECT_INT(1, active);
}

static void walk_contexts(void)
{
    CUcontext found = NULL;
    CUdevice device = -1;
    EXPECT(OK, cu.cuDevicePrimaryCtxRetain(&found, 0));
    CHECK(found == context);
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    EXPECT(OK, cu.cuCtxPushCurrent(context));
    EXPECT(OK, cu.cuCtxPopCurrent(&found));
    CHECK(found == context);
    EXPECT(OK, cu.cuCtxSetCurrent(context));
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == context);
    EXPECT(OK, cu.cuCtxGetDevice(&device));
    EXPECT_INT(0, device);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void walk_memory(void)
{
    size_t bytes = 0, total = 0;
    EXPECT(OK, cu.cuMemGetInfo(&bytes, &total));
    CHECK(bytes > 0 && bytes <= total);
    CUmemAllocationProp properties = exportable_properties(), seen;
    size_t granularity = 0;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties,
                                                CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT_INT(FRAME, granularity);
    CUdeviceptr range = 0;
    CUmemGenericAllocationHandle handle = 0, again = 0, imported = 0;
    EXPECT(OK, cu.cuMemAddressReserve(&range, 2 * FRAME, 0, 0, 0));
    EXPECT(OK, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    EXPECT(OK, cu.cuMemMap(range, FRAME, 0, handle, 0));
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(OK, cu.cuMemSetAccess(range, FRAME, &access, 1));
    unsigned long long flags = 0;
    EXPECT(OK, cu.cuMemGetAccess(&flags, &access.location, range));
    EXPECT_INT(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, flags);
    EXPECT(OK, cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)range));
    EXPECT(OK, cu.cuMemRelease(again));
    memset(&seen, 0, sizeof seen);
    EXPECT(OK, cu.cuMemGetAllocationPropertiesFromHandle(&seen, handle));
    EXPECT_INT(CU_MEM_ALLOCATION_TYPE_PINNED, seen.type);
    int descriptor = -1;
    EXPECT(OK, cu.cuMemExportToShareableHandle(&descriptor, handle,
                                               CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    EXPECT(OK, cu.cuMemImportFromShareableHandle(&imported, (void *)(intptr_t)descriptor,
                                                 CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
    close(descriptor);
    EXPECT(OK, cu.cuMemRelease(imported));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemAddressFree(range, 2 * FRAME));
}

static void walk_copies(void)
{
    CUdeviceptr memory = 0;
    void *pinned = NULL;
    int type = 0;
    EXPECT(OK, cu.cuMemAlloc(&memory, 64 * KiB));
    EXPECT(OK, cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory));
    EXPECT_INT(CU_MEMORYTYPE_DEVICE, type);
    EXPECT(OK, cu.cuMemHostAlloc(&pinned, 64 * KiB, 0));
    memset(pinned, 1, 64 * KiB);
    void *pages = make_pages(64 * KiB);
    EXPECT(OK, cu.cuMemHostRegister(pages, 64 * KiB, 0));
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pinned, 16 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory + 16 * KiB, memory, 16 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyPeerAsync(memory + 32 * KiB, context, memory, context, 16 * KiB, stream));
    EXPECT(OK, cu.cuMemsetD8Async(memory + 48 * KiB, 1, 8 * KiB, stream));
    EXPECT(OK, cu.cuMemsetD32Async(memory + 56 * KiB, 0x01010101, 2 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyDtoHAsync(pages, memory, 64 * KiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(pages, 1, 64 * KiB));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemFreeHost(pinned));
    EXPECT(OK, cu.cuMemFree(memory));
    EXPECT(OK, cu.cuStreamDestroy(stream));
}

static void do_nothing(void *data)
{
    (void)data;
}

static void walk_streams(void)
{
    CUstream stream = NULL, other = NULL;
    CUevent start = NULL, end = NULL, shared = NULL;
    CUcontext found = NULL;
    float milliseconds = -1;
    uint32_t *word = make_pinned(4096);
    CUdeviceptr address = (CUdeviceptr)(uintptr_t)word;
    EXPECT(OK, cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    EXPECT(OK, cu.cuStreamCreateWithPriority(&other, CU_STREAM_NON_BLOCKING, 0));
    EXPECT(OK, cu.cuStreamGetCtx(stream, &found));
    CHECK(found == context);
    EXPECT(OK, cu.cuEventCreate(&start, CU_EVENT_DEFAULT));
    EXPECT(OK, cu.cuEventCreate(&end, CU_EVENT_DEFAULT));
    EXPECT(OK, cu.cuEventRecord(start, stream));
    EXPECT(OK, cu.cuStreamWriteValue32(stream, address, 7, 0));
    EXPECT(OK, cu.cuStreamWaitEvent(other, start, 0));
    EXPECT(OK, cu.cuStreamWaitValue32(other, address, 7, CU_STREAM_WAIT_VALUE_EQ));
    EXPECT(OK, cu.cuLaunchHostFunc(other, do_nothing, NULL));
    EXPECT(OK, cu.cuEventRecord(end, other));
    EXPECT(OK, cu.cuEventSynchronize(end));
    EXPECT(OK, cu.cuEventQuery(end));
    EXPECT(OK, cu.cuEventElapsedTime(&milliseconds, start, end));
    CHECK(milliseconds >= 0);
    EXPECT(OK, cu.cuStreamSynchronize(other));
    EXPECT(OK, cu.cuStreamQuery(other));
    if (cu.cuCtxRecordEvent) {
        EXPECT(OK, cu.cuCtxRecordEvent(context, end));
    }
    EXPECT(OK, cu.cuEventCreate(&shared, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    CUipcEventHandle handle;
    EXPECT(OK, cu.cuIpcGetEventHandle(&handle, shared));
    EXPECT(OK, cu.cuEventDestroy(shared));
    EXPECT(OK, cu.cuEventDestroy(start));
    EXPECT(OK, cu.cuEventDestroy(end));
    EXPECT(OK, cu.cuStreamDestroy(stream));
    EXPECT(OK, cu.cuStreamDestroy(other));
}

static void walk_captures(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    EXPECT(OK, cu.cuThreadExchangeStreamCaptureMode(&mode));
    EXPECT_INT(CU_STREAM_CAPTURE_MODE_GLOBAL, mode);
    EXPECT(OK, cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, cu.cuMemsetD8Async(memory, 5, 4096, stream));
    EXPECT(OK, cu.cuStreamIsCapturing(stream, &status));
    EXPECT_INT(CU_STREAM_CAPTURE_STATUS_ACTIVE, status);
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 5, 4096));
    EXPECT(OK, cu.cuGraphExecDestroy(exec));
    EXPECT(OK, cu.cuGraphDestroy(graph));
}

static void every_function_of_the_table_works(void)
{
    walk_devices();
    walk_contexts();
    walk_memory();
    walk_copies();
    walk_streams();
    walk_captures();
}

static void every_function_of_the_table_is_there(void)
{
#define THERE(need, name, since, parameters)                                                       \
    CHECK(cu.name != NULL || strcmp(#need, "OPTIONAL") == 0);
    EBB__DRIVER_FUNCTIONS(THERE)
#undef THERE
}

/* An event of another process cannot be opened in its own, so this one walks by itself. */
static void an_event_of_this_process_cannot_be_opened_here(void)
{
    CUevent shared = NULL, opened = NULL;
    CUipcEventHandle handle;
    REQUIRE(cu.cuEventCreate(&shared, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    REQUIRE(cu.cuIpcGetEventHandle(&handle, shared));
    EXPECT(INVALID_CONTEXT, cu.cuIpcOpenEventHandle(&opened, handle));
}

/* ---- the start ------------------------------------------------------------------------------ */

static void the_version_is_known_before_init(void)
{
    load_without_init(&cu);
    int version = 0;
    EXPECT(OK, cu.cuDriverGetVersion(&version));
    CHECK(version >= EBB__DRIVER_OLDEST);
    EXPECT(INVALID_VALUE, cu.cuDriverGetVersion(NULL));
}

static void error_names_are_known_before_init(void)
{
    load_without_init(&cu);
    const char *text = NULL;
    EXPECT(OK, cu.cuGetErrorName(CUDA_ERROR_NOT_READY, &text));
    CHECK(text && strcmp(text, "CUDA_ERROR_NOT_READY") == 0);
    EXPECT(OK, cu.cuGetErrorString(CUDA_ERROR_NOT_READY, &text));
    CHECK(text && strcmp(text, "device not ready") == 0);
}

static void devices_are_unknown_before_init(void)
{
    load_without_init(&cu);
    int count = -1;
    CUdevice device = -1;
    CUcontext found = NULL;
    EXPECT(NOT_INITIALIZED, cu.cuDeviceGetCount(&count));
    EXPECT(NOT_INITIALIZED, cu.cuDeviceGetCount(NULL));
    EXPECT(NOT_INITIALIZED, cu.cuDeviceGet(&device, 0));
    EXPECT(NOT_INITIALIZED, cu.cuDevicePrimaryCtxRetain(&found, 0));
    EXPECT(NOT_INITIALIZED, cu.cuCtxGetCurrent(&found));
    EXPECT(NOT_INITIALIZED, cu.cuCtxSetCurrent(NULL));
    EXPECT(OK, cu.cuInit(0));
    EXPECT(OK, cu.cuDeviceGetCount(&count));
    CHECK(count >= 1);
}

static void init_refuses_flags(void)
{
    load_without_init(&cu);
    int count = -1;
    EXPECT(INVALID_VALUE, cu.cuInit(1));
    EXPECT(NOT_INITIALIZED, cu.cuDeviceGetCount(&count));
    EXPECT(OK, cu.cuInit(0));
    EXPECT(OK, cu.cuInit(0));
    EXPECT(INVALID_VALUE, cu.cuInit(1));
    EXPECT(OK, cu.cuDeviceGetCount(&count));
}

static CUresult ask(const char *name, int version, void **function, int *status)
{
    CUdriverProcAddressQueryResult answer = CU_GET_PROC_ADDRESS_SUCCESS;
    CUresult code = suite_get_proc_address(name, function, version, 0, &answer);
    *status = (int)answer;
    return code;
}

/* What is not there is an answer, not an error: the status says why. */
static void functions_are_looked_up_by_name_and_version(void)
{
    load_without_init(&cu);
    void *function = NULL;
    int status = -1;
    EXPECT(OK, ask("cuMemCreate", 12000, &function, &status));
    CHECK(function != NULL);
    EXPECT_INT(CU_GET_PROC_ADDRESS_SUCCESS, status);
    function = &status;
    EXPECT(OK, ask("cuNoSuchFunction", 12000, &function, &status));
    CHECK(function == NULL);
    EXPECT_INT(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, status);
    function = &status;
    EXPECT(OK, ask("cuMemCreate", 10010, &function, &status));
    CHECK(function == NULL);
    EXPECT_INT(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT, status);
    /* cuMemcpyHtoDAsync_v2 is asked for by its plain name; the other spelling is not known. */
    EXPECT(OK, ask("cuMemcpyHtoDAsync_v2", 12000, &function, &status));
    EXPECT_INT(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND, status);
}

static void function_lookup_refuses_nonsense(void)
{
    load_without_init(&cu);
    void *function = NULL;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    EXPECT(INVALID_VALUE, suite_get_proc_address("cuInit", &function, 12000, 0xff00, &status));
    EXPECT(OK, suite_get_proc_address("", &function, 12000, 0, &status));
    CHECK(function == NULL);
    EXPECT(OK, suite_get_proc_address("cuInit", &function, 0, 0, &status));
    EXPECT(INVALID_VALUE, suite_get_proc_address("cuInit", &function, 99000, 0, &status));
    EXPECT(OK, suite_get_proc_address("cuInit", &function, -1, 0, &status));
    EXPECT(OK, suite_get_proc_address("cuInit", &function, 12000, 0, NULL));
    EXPECT(OK, suite_get_proc_address("cuGetProcAddress", &function, 12000, 0, NULL));
}

static void error_names_of_unknown_codes(void)
{
    const char *text = "untouched";
    EXPECT(INVALID_VALUE, cu.cuGetErrorName((CUresult)123456, &text));
    CHECK(text == NULL);
    text = "untouched";
    EXPECT(INVALID_VALUE, cu.cuGetErrorString((CUresult)-1, &text));
    CHECK(text == NULL);
}

static void every_code_has_its_name(void)
{
    const char *text;
#define NAMED(name, value)                                                                         \
    text = NULL;                                                                                   \
    EXPECT(OK, cu.cuGetErrorName((CUresult)(value), &text));                                       \
    suite_expect_text(HERE, "name of " #value, #name, text ? text : "NULL");
    CUDA_CODES(NAMED)
#undef NAMED
}

static void every_code_has_its_sentence(void)
{
    /* Whatever the sentences are, they are learned from the GPU and the same on the other. */
    static const struct {
        int code;
        const char *sentence;
    } known[] = {
        {OK, "no error"},
        {INVALID_VALUE, "invalid argument"},
        {OUT_OF_MEMORY, "out of memory"},
        {NOT_INITIALIZED, "initialization error"},
        {INVALID_DEVICE, "invalid device ordinal"},
        {INVALID_CONTEXT, "invalid device context"},
        {INVALID_HANDLE, "invalid resource handle"},
        {NOT_FOUND, "named symbol not found"},
        {NOT_READY, "device not ready"},
        {ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
        {ALREADY_REGISTERED, "part or all of the requested memory range is already mapped"},
        {NOT_REGISTERED, "pointer does not correspond to a registered memory region"},
        {NOT_PERMITTED, "operation not permitted"},
        {NOT_SUPPORTED, "operation not supported"},
        {CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
        {CAPTURE_INVALIDATED, "operation failed due to a previous error during capture"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const char *text = NULL;
        char what[32];
        snprintf(what, sizeof what, "sentence of %d", known[i].code);
        EXPECT(OK, cu.cuGetErrorString((CUresult)known[i].code, &text));
        suite_expect_text(HERE, what, known[i].sentence, text ? text : "NULL");
    }
}

const suite_case table_cases[] = {
    CASE(every_function_of_the_table_works),
    CASE_FROM(every_function_of_the_table_is_there, WITHOUT_CONTEXT),
    CASE(an_event_of_this_process_cannot_be_opened_here),
    CASE_FROM(the_version_is_known_before_init, WITHOUT_DRIVER),
    CASE_FROM(error_names_are_known_before_init, WITHOUT_DRIVER),
    CASE_FROM(devices_are_unknown_before_init, WITHOUT_DRIVER),
    CASE_FROM(init_refuses_flags, WITHOUT_DRIVER),
    CASE_FROM(functions_are_looked_up_by_name_and_version, WITHOUT_DRIVER),
    CASE_FROM(function_lookup_refuses_nonsense, WITHOUT_DRIVER),
    CASE_FROM(error_names_of_unknown_codes, WITHOUT_CONTEXT),
    CASE_FROM(every_code_has_its_name, WITHOUT_CONTEXT),
    CASE_FROM(every_code_has_its_sentence, WITHOUT_CONTEXT),
    CASE_END,
};

/*
 * The calls of ops.h, and what is expected of each in each situation. The columns are what the GPU
 * answers; a row is one call.
 */
#include "ops.h"

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- calls that need more than an expression ------------------------------------------------- */

static CUdeviceptr take_address(CUdeviceptr *address)
{
    CUdeviceptr taken = *address;
    *address = 0;
    return taken;
}

static CUmemGenericAllocationHandle take_frame(CUmemGenericAllocationHandle *handle)
{
    CUmemGenericAllocationHandle taken = *handle;
    *handle = 0;
    return taken;
}

static void *take_host(char **memory)
{
    void *taken = *memory;
    *memory = NULL;
    return taken;
}

static CUstream take_stream(CUstream *stream)
{
    CUstream taken = *stream;
    *stream = NULL;
    return taken;
}

static CUevent take_event(CUevent *event)
{
    CUevent taken = *event;
    *event = NULL;
    return taken;
}

static CUresult give_access(CUdeviceptr address)
{
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return cu.cuMemSetAccess(address, FRAME, &access, 1);
}

static CUresult see_access(CUdeviceptr address)
{
    unsigned long long flags = 0;
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    return cu.cuMemGetAccess(&flags, &location, address);
}

static CUresult ask_granularity(void)
{
    size_t granularity = 0;
    CUmemAllocationProp properties = plain_properties();
    return cu.cuMemGetAllocationGranularity(&granularity, &properties, 0);
}

static CUresult create_frame(CUmemGenericAllocationHandle *handle)
{
    CUmemAllocationProp properties = plain_properties();
    return cu.cuMemCreate(handle, FRAME, &properties, 0);
}

static CUresult import_frame(CUmemGenericAllocationHandle *handle, int descriptor)
{
    return cu.cuMemImportFromShareableHandle(handle, (void *)(intptr_t)descriptor,
                                             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

static CUresult export_frame(CUmemGenericAllocationHandle handle)
{
    int descriptor = -1;
    CUresult code = cu.cuMemExportToShareableHandle(&descriptor, handle,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
    if (code == CUDA_SUCCESS) {
        close(descriptor);
    }
    return code;
}

static CUresult capture_on(CUstream stream)
{
    CUgraph graph = NULL;
    CUresult code = cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    if (code == CUDA_SUCCESS && cu.cuStreamEndCapture(stream, &graph) == CUDA_SUCCESS) {
        cu.cuGraphDestroy(graph);
    }
    return code;
}

/* There and back, so that the thread goes on as it was. */
static CUresult exchange_mode(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult code = cu.cuThreadExchangeStreamCaptureMode(&mode);
    if (code == CUDA_SUCCESS) {
        code = cu.cuThreadExchangeStreamCaptureMode(&mode);
    }
    return code;
}

static CUresult push_and_pop(void)
{
    CUcontext found = NULL;
    CUresult code = cu.cuCtxPushCurrent(context);
    return code == CUDA_SUCCESS ? cu.cuCtxPopCurrent(&found) : code;
}

static CUresult retain_and_release(void)
{
    CUcontext found = NULL;
    CUresult code = cu.cuDevicePrimaryCtxRetain(&found, 0);
    return code == CUDA_SUCCESS ? cu.cuDevicePrimaryCtxRelease(0) : code;
}

static CUresult record_context(CUevent event)
{
    return cu.cuCtxRecordEvent ? cu.cuCtxRecordEvent(context, event) : CUDA_ERROR_NOT_FOUND;
}

static void do_nothing(void *data)
{
    (void)data;
}

/* Where answers go that nobody looks at. */
static _Thread_local struct {
    size_t size, total;
    int number;
    unsigned flags;
    float milliseconds;
    CUdeviceptr address;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties;
    CUcontext context;
    CUdevice device;
    CUstream stream;
    CUevent event;
    CUgraphExec exec;
    CUstreamCaptureStatus status;
    CUipcEventHandle ipc;
    void *host;
    const char *text;
} out;

/* ---- the table ------------------------------------------------------------------------------- */

/*
 * X(name, call, before init, no context, own thread, other thread, own relaxed, other relaxed)
 *
 * before init: without anything to call with, so where 3 might be, 400 or 1 may be instead.
 * own and other thread: while a global capture of a non-blocking stream is open. D is DEAD(900).
 */
#define D DEAD(900)
#define OPS(X)                                                                                     \
    X(error_name, cu.cuGetErrorName(CUDA_SUCCESS, &out.text), 0, 0, 0, 0, 0, 0)                    \
    X(init, cu.cuInit(0), 0, 0, 0, 0, 0, 0)                                                        \
    X(version, cu.cuDriverGetVersion(&out.number), 0, 0, 0, 0, 0, 0)                               \
    X(device_count, cu.cuDeviceGetCount(&out.number), 3, 0, 0, 0, 0, 0)                            \
    X(device, cu.cuDeviceGet(&out.device, 0), 3, 0, 0, 0, 0, 0)                                    \
    X(total, cu.cuDeviceTotalMem(&out.size, 0), 3, 0, 0, 0, 0, 0)                                  \
    X(attribute,                                                                                   \
      cu.cuDeviceGetAttribute(&out.number, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0), 3, 0, 0,  \
      0, 0, 0)                                                                                     \
    X(state, cu.cuDevicePrimaryCtxGetState(0, &out.flags, &out.number), 3, 0, 0, 0, 0, 0)          \
    X(retain, retain_and_release(), 3, 0, 0, 0, 0, 0)                                              \
    X(push, push_and_pop(), 3, 0, 0, 0, 0, 0)                                                      \
    X(current, cu.cuCtxGetCurrent(&out.context), 3, 0, 0, 0, 0, 0)                                 \
    X(ctx_device, cu.cuCtxGetDevice(&out.device), 3, 201, 0, 0, 0, 0)                              \
    X(ctx_sync, cu.cuCtxSynchronize(), 3, 201, D, D, D, D)                                         \
    X(ctx_record, record_context(t->fresh), 3, 0, D, D, D, D)                                      \
    X(info, cu.cuMemGetInfo(&out.size, &out.total), 3, 201, 0, 0, 0, 0)                            \
    X(granularity, ask_granularity(), 3, 0, 0, 0, 0, 0)                                            \
    X(reserve, cu.cuMemAddressReserve(&out.address, FRAME, 0, 0, 0), 3, 0, 0, 0, 0, 0)             \
    X(address_free, cu.cuMemAddressFree(take_address(&t->spare_range), FRAME), 3, 0, 0, 0, 0, 0)   \
    X(create, create_frame(&out.handle), 3, 0, 0, 0, 0, 0)                                         \
    X(release, cu.cuMemRelease(take_frame(&t->spare_frame)), 3, 0, 0, 0, 0, 0)                     \
    X(map, cu.cuMemMap(t->range + FRAME, FRAME, 0, t->spare_frame, 0), 3, 0, 0, 0, 0, 0)           \
    X(access, give_access(t->range), 3, 0, 0, 0, 0, 0)                                             \
    X(get_access, see_access(t->range), 3, 0, 0, 0, 0, 0)                                          \
    X(unmap, cu.cuMemUnmap(t->range, FRAME), 3, 0, 0, 0, 0, 0)                                     \
    X(retain_handle, cu.cuMemRetainAllocationHandle(&out.handle, (void *)(uintptr_t)t->range), 3,  \
      0, 0, 0, 0, 0)                                                                               \
    X(properties, cu.cuMemGetAllocationPropertiesFromHandle(&out.properties, t->frame), 3, 0, 0,   \
      0, 0, 0)                                                                                     \
    X(export, export_frame(t->frame), 3, 0, 0, 0, 0, 0)                                            \
    X(import, import_frame(&out.handle, t->descriptor), 3, 0, 0, 0, 0, 0)                          \
    X(alloc, cu.cuMemAlloc(&out.address, MiB), 3, 201, D, D, 0, 0)                                 \
    X(alloc_large, cu.cuMemAlloc(&out.address, 32 * MiB), 3, 201, D, D, 0, 0)                      \
    X(free, cu.cuMemFree(take_address(&t->spare_memory)), 3, 0, D, D, 0, 0)                        \
    X(pointer, cu.cuPointerGetAttribute(&out.number, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, t->memory), \
      3, 0, 0, 0, 0, 0)                                                                            \
    X(host_alloc, cu.cuMemHostAlloc(&out.host, MiB, 0), 3, 201, D, D, 0, 0)                        \
    X(host_free, cu.cuMemFreeHost(take_host(&t->spare_pinned)), 3, 0, D, D, 0, 0)                  \
    X(host_register, cu.cuMemHostRegister(t->pages, 64 * KiB, 0), 3, 201, D, D, 0, 0)              \
    X(host_unregister, cu.cuMemHostUnregister(take_host(&t->registered)), 3, 0, D, D, 0, 0)        \
    X(copy_in, cu.cuMemcpyHtoDAsync(t->memory, t->pinned, MiB, t->stream), 3, 0, 0, 0, 0, 0)       \
    X(copy_out, cu.cuMemcpyDtoHAsync(t->pinned, t->memory, MiB, t->stream), 3, 0, 0, 0, 0, 0)      \
    X(copy_in_pages, cu.cuMemcpyHtoDAsync(t->memory, t->pages, MiB, t->stream), 3, 0, 0, 0, 0, 0)  \
    X(copy_out_pages, cu.cuMemcpyDtoHAsync(t->pages, t->memory, MiB, t->stream), 3, 0, 0, 0, 0, 0) \
    X(copy_little, cu.cuMemcpyHtoDAsync(t->memory, t->pages, 16, t->stream), 3, 0, 0, 0, 0, 0)     \
    X(copy_device, cu.cuMemcpyDtoDAsync(t->memory, t->range, MiB, t->stream), 3, 0, 0, 0, 0, 0)    \
    X(set, cu.cuMemsetD8Async(t->memory, 1, MiB, t->stream), 3, 0, 0, 0, 0, 0)                     \
    X(copy_default, cu.cuMemcpyHtoDAsync(t->memory, t->pinned, MiB, NULL), 3, 201, 0, 0, 0, 0)     \
    X(copy_default_pages, cu.cuMemcpyHtoDAsync(t->memory, t->pages, MiB, NULL), 3, 201, 0, 0, 0,   \
      0)                                                                                           \
    X(set_default, cu.cuMemsetD8Async(t->memory, 1, MiB, NULL), 3, 201, 0, 0, 0, 0)                \
    X(stream_create, cu.cuStreamCreate(&out.stream, CU_STREAM_NON_BLOCKING), 3, 201, 0, 0, 0, 0)   \
    X(stream_create_priority, cu.cuStreamCreateWithPriority(&out.stream, 1, 0), 3, 201, 0, 0, 0,   \
      0)                                                                                           \
    X(stream_destroy, cu.cuStreamDestroy(take_stream(&t->spare_stream)), 400, 0, 0, 0, 0, 0)       \
    X(stream_query, cu.cuStreamQuery(t->stream), 3, 0, D, D, 0, 0)                                 \
    X(stream_sync, cu.cuStreamSynchronize(t->stream), 3, 0, D, D, 0, 0)                            \
    X(default_query, cu.cuStreamQuery(NULL), 3, 201, D, D, 0, 0)                                   \
    X(default_sync, cu.cuStreamSynchronize(NULL), 3, 201, D, D, 0, 0)                              \
    X(stream_wait, cu.cuStreamWaitEvent(t->stream, t->event, 0), 3, 0, 0, 0, 0, 0)                 \
    X(stream_wait_fresh, cu.cuStreamWaitEvent(t->stream, t->fresh, 0), 3, 0, 0, 0, 0, 0)           \
    X(stream_context, cu.cuStreamGetCtx(t->stream, &out.context), 3, 0, 0, 0, 0, 0)                \
    X(wait_value, cu.cuStreamWaitValue32(t->stream, (CUdeviceptr)(uintptr_t)t->pinned, 0, 0), 3,   \
      0, 0, 0, 0, 0)                                                                               \
    X(write_value, cu.cuStreamWriteValue32(t->stream, (CUdeviceptr)(uintptr_t)t->pinned, 0, 0), 3, \
      0, 0, 0, 0, 0)                                                                               \
    X(host_function, cu.cuLaunchHostFunc(t->stream, do_nothing, NULL), 3, 0, 0, 0, 0, 0)           \
    X(event_create, cu.cuEventCreate(&out.event, CU_EVENT_DISABLE_TIMING), 3, 201, 0, 0, 0, 0)     \
    X(event_destroy, cu.cuEventDestroy(take_event(&t->spare_event)), 400, 0, 0, 0, 0, 0)           \
    X(event_record, cu.cuEventRecord(t->event, t->stream), 3, 0, 0, 0, 0, 0)                       \
    X(event_record_default, cu.cuEventRecord(t->event, NULL), 3, 201, 0, 0, 0, 0)                  \
    X(event_query, cu.cuEventQuery(t->event), 400, 0, D, D, 0, 0)                                  \
    X(event_sync, cu.cuEventSynchronize(t->event), 400, 0, D, D, 0, 0)                             \
    X(event_query_fresh, cu.cuEventQuery(t->fresh), 400, 0, D, D, 0, 0)                            \
    X(event_time, cu.cuEventElapsedTime(&out.milliseconds, t->timed, t->timed), 400, 0, 0, 0, 0,   \
      0)                                                                                           \
    X(ipc_handle, cu.cuIpcGetEventHandle(&out.ipc, t->shared), 1, 201, 0, 0, 0, 0)                 \
    X(is_capturing, cu.cuStreamIsCapturing(t->stream, &out.status), 3, 0, 0, 0, 0, 0)              \
    X(exchange, exchange_mode(), 3, 0, 0, 0, 0, 0)                                                 \
    X(capture, capture_on(t->stream), 3, 0, 0, 0, 0, 0)                                            \
    X(instantiate, cu.cuGraphInstantiateWithFlags(&out.exec, t->graph, 0), 3, 201, D, D, 0, 0)     \
    X(launch, cu.cuGraphLaunch(t->exec, t->stream), 3, 0, 0, 0, 0, 0)                              \
    X(capturing_set, cu.cuMemsetD8Async(t->memory, 1, MiB, t->capturing), 3, 0, 0, 0, 0, 0)        \
    X(capturing_copy, cu.cuMemcpyHtoDAsync(t->memory, t->pinned, MiB, t->capturing), 3, 0, 0, 0,   \
      0, 0)                                                                                        \
    X(capturing_copy_pages, cu.cuMemcpyHtoDAsync(t->memory, t->pages, MiB, t->capturing), 3, 0, 0, \
      0, 0, 0)                                                                                     \
    X(capturing_copy_out_pages, cu.cuMemcpyDtoHAsync(t->pages, t->memory, MiB, t->capturing), 3,   \
      0, 0, 0, 0, 0)                                                                               \
    X(capturing_query, cu.cuStreamQuery(t->capturing), 3, 0, D, D, D, D)                           \
    X(capturing_sync, cu.cuStreamSynchronize(t->capturing), 3, 0, D, D, D, D)                      \
    X(capturing_record, cu.cuEventRecord(t->fresh, t->capturing), 3, 0, 0, 0, 0, 0)                \
    X(capturing_wait, cu.cuStreamWaitEvent(t->capturing, t->captured, 0), 3, 0, 0, 0, 0, 0)        \
    X(capturing_wait_fresh, cu.cuStreamWaitEvent(t->capturing, t->fresh, 0), 3, 0, 0, 0, 0, 0)     \
    X(capturing_function, cu.cuLaunchHostFunc(t->capturing, do_nothing, NULL), 3, 0, 0, 0, 0, 0)   \
    X(capturing_begin, cu.cuStreamBeginCapture(t->capturing, CU_STREAM_CAPTURE_MODE_RELAXED), 3,   \
      0, 401, 401, 401, 401)                                                                       \
    X(capturing_launch, cu.cuGraphLaunch(t->exec, t->capturing), 3, 0, D, D, D, D)                 \
    X(captured_query, cu.cuEventQuery(t->captured), 400, 0, DEAD(907), DEAD(907), DEAD(907),       \
      DEAD(907))                                                                                   \
    X(captured_sync, cu.cuEventSynchronize(t->captured), 400, 0, DEAD(907), DEAD(907), DEAD(907),  \
      DEAD(907))                                                                                   \
    X(captured_record, cu.cuEventRecord(t->captured, t->stream), 3, 0, 0, 0, 0, 0)                 \
    X(captured_destroy, cu.cuEventDestroy(take_event(&t->captured)), 400, 0, 0, 0, 0, 0)

#define OP_FUNCTION(name, call, ...)                                                               \
    static CUresult op_##name(struct things *t)                                                    \
    {                                                                                              \
        (void)t;                                                                                   \
        return call;                                                                               \
    }
OPS(OP_FUNCTION)
#undef OP_FUNCTION

#define OP_ROW(name, call, before, ...) {#call, op_##name, {__VA_ARGS__}, before},
const struct op ops[] = {OPS(OP_ROW)};
#undef OP_ROW

const size_t op_count = sizeof ops / sizeof *ops;

bool op_is_there(const struct op *op)
{
    return op->call != op_ctx_record || cu.cuCtxRecordEvent;
}

bool op_returns_after_fork(const struct op *op)
{
    for (size_t i = 0; i < op_count && ops[i].call != op_set; i++) {
        if (op == &ops[i]) {
            return true;
        }
    }
    return false;
}

void op_expect(const struct op *op, int expected, CUresult got)
{
    suite_expect(HERE, op->text, expected, (int)got);
}

void ops_after_fork(bool returning)
{
    static struct things things;
    things_make(&things);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        for (size_t i = 0; i < op_count; i++) {
            struct things copy = things;
            if (op_is_there(&ops[i]) && op_returns_after_fork(&ops[i]) == returning) {
                bool always = ops[i].before_init == OK && ops[i].call != op_init;
                op_expect(&ops[i], always ? OK : NOT_INITIALIZED, ops[i].call(&copy));
            }
        }
        fflush(stdout);
        _exit(suite_failed ? 1 : 0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_INT(0, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    /* The parent notices nothing. */
    EXPECT(OK, cu.cuStreamSynchronize(things.stream));
    fill(things.memory, 1, MiB);
    CHECK(holds(things.memory, 1, MiB));
}

/* ---- what the calls are made with ------------------------------------------------------------ */

static void make_events(struct things *t)
{
    t->event = make_event();
    t->fresh = make_event();
    t->captured = make_event();
    t->spare_event = make_event();
    REQUIRE(cu.cuEventCreate(&t->timed, CU_EVENT_DEFAULT));
    REQUIRE(cu.cuEventCreate(&t->shared, CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS));
    REQUIRE(cu.cuEventRecord(t->event, t->stream));
    REQUIRE(cu.cuEventRecord(t->timed, t->stream));
    REQUIRE(cu.cuEventRecord(t->captured, t->capturing));
    REQUIRE(cu.cuCtxSynchronize());
}

static void make_graph(struct things *t)
{
    REQUIRE(cu.cuStreamBeginCapture(t->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
    REQUIRE(cu.cuMemsetD8Async(t->memory, 1, MiB, t->stream));
    REQUIRE(cu.cuStreamEndCapture(t->stream, &t->graph));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&t->exec, t->graph, 0));
}

void things_make(struct things *t)
{
    memset(t, 0, sizeof *t);
    t->stream = make_stream();
    t->capturing = make_stream();
    t->spare_stream = make_stream();
    t->memory = make_memory(MiB);
    t->spare_memory = make_memory(MiB);
    t->range = reserve(8 * FRAME);
    t->spare_range = reserve(FRAME);
    t->frame = create_exportable(FRAME);
    t->spare_frame = create(FRAME);
    map(t->range, FRAME, t->frame);
    set_access(t->range, FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    REQUIRE(cu.cuMemExportToShareableHandle(&t->descriptor, t->frame,
                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    t->pinned = make_pinned(MiB);
    t->spare_pinned = make_pinned(MiB);
    t->pages = make_pages(MiB);
    t->registered = make_pages(64 * KiB);
    REQUIRE(cu.cuMemHostRegister(t->registered, 64 * KiB, 0));
    make_events(t);
    make_graph(t);
}

/* What a call took away, or left where nobody looks, is left to the end of the process. */
void things_drop(struct things *t)
{
    cu.cuCtxSynchronize();
    CUevent *events[] = {&t->event,       &t->fresh, &t->captured,
                         &t->spare_event, &t->timed, &t->shared};
    for (size_t i = 0; i < sizeof events / sizeof *events; i++) {
        if (*events[i]) {
            cu.cuEventDestroy(*events[i]);
        }
    }
    cu.cuGraphExecDestroy(t->exec);
    cu.cuGraphDestroy(t->graph);
    cu.cuStreamDestroy(t->stream);
    cu.cuStreamDestroy(t->capturing);
    if (t->spare_stream) {
        cu.cuStreamDestroy(t->spare_stream);
    }
    cu.cuMemFree(t->memory);
    cu.cuMemFree(t->spare_memory);
    cu.cuMemUnmap(t->range, FRAME);
    cu.cuMemUnmap(t->range + FRAME, FRAME);
    cu.cuMemAddressFree(t->range, 8 * FRAME);
    if (t->spare_range) {
        cu.cuMemAddressFree(t->spare_range, FRAME);
    }
    cu.cuMemRelease(t->frame);
    if (t->spare_frame) {
        cu.cuMemRelease(t->spare_frame);
    }
    close(t->descriptor);
    cu.cuMemFreeHost(t->pinned);
    cu.cuMemFreeHost(t->spare_pinned);
    cu.cuMemHostUnregister(t->pages);
    munmap(t->pages, MiB);
    if (t->registered) {
        cu.cuMemHostUnregister(t->registered);
        munmap(t->registered, 64 * KiB);
    }
}

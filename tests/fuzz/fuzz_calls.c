/*
 * The calls of the fuzz target, each with arguments from the input.
 */
#include <string.h>
#include <unistd.h>

#include "fuzz.h"

typedef void call(fuzz *f);

static int device(fuzz *f)
{
    uint8_t which = fuzz_byte(f);
    return which < 250 ? which % 2 : which == 255 ? -1 : (int)fuzz_number(f);
}

static CUevent event(fuzz *f)
{
    return (CUevent)(uintptr_t)fuzz_pick(f, &f->events);
}

static CUcontext context(fuzz *f)
{
    return (CUcontext)(uintptr_t)fuzz_pick(f, &f->contexts);
}

/* Keep what a call gave. */
static void keep(fuzz *f, pool *p, CUresult code, const void *out)
{
    if (code == CUDA_SUCCESS && out != NULL) {
        fuzz_keep(p, fuzz_got(f));
    }
}

/* ---- start, devices, contexts --------------------------------------------------------------------- */

static void call_init(fuzz *f)
{
    f->cu.cuInit(fuzz_byte(f) == 255);
}

static void call_device(fuzz *f)
{
    switch (fuzz_byte(f) % 8) {
    case 0:
        f->cu.cuDeviceGetCount(fuzz_out(f));
        break;
    case 1:
        f->cu.cuDeviceGet(fuzz_out(f), device(f));
        break;
    case 2:
        f->cu.cuDeviceGetName(fuzz_out(f), fuzz_byte(f) % 100, device(f));
        break;
    case 3:
        f->cu.cuDeviceGetUuid(fuzz_out(f), device(f));
        break;
    case 4:
        f->cu.cuDeviceTotalMem(fuzz_out(f), device(f));
        break;
    case 5:
        f->cu.cuDeviceGetAttribute(fuzz_out(f), (CUdevice_attribute)fuzz_byte(f), device(f));
        break;
    case 6:
        f->cu.cuDeviceCanAccessPeer(fuzz_out(f), device(f), device(f));
        break;
    default:
        f->cu.cuDevicePrimaryCtxGetState(device(f), fuzz_out(f), (int *)fuzz_out(f));
    }
}

static void call_context(fuzz *f)
{
    void *out = NULL;
    switch (fuzz_byte(f) % 7) {
    case 0:
        out = fuzz_out(f);
        keep(f, &f->contexts, f->cu.cuDevicePrimaryCtxRetain(out, device(f)), out);
        break;
    case 1:
        f->cu.cuCtxPushCurrent(context(f));
        break;
    case 2:
        f->cu.cuCtxPopCurrent(fuzz_out(f));
        break;
    case 3:
        f->cu.cuCtxGetCurrent(fuzz_out(f));
        break;
    case 4:
        f->cu.cuCtxGetDevice(fuzz_out(f));
        break;
    default:
        f->cu.cuCtxSetCurrent(context(f));
    }
}

static void call_context_release(fuzz *f)
{
    if (fuzz_byte(f) % 8 == 0) { /* what comes after it is not worth much */
        f->cu.cuDevicePrimaryCtxRelease(device(f));
    }
}

static void call_context_synchronize(fuzz *f)
{
    f->cu.cuCtxSynchronize();
}

/* ---- memory ---------------------------------------------------------------------------------------- */

static void call_info(fuzz *f)
{
    size_t total;
    f->cu.cuMemGetInfo(fuzz_out(f), &total);
}

static void call_reserve(fuzz *f)
{
    void *out = fuzz_out(f);
    uint64_t size = fuzz_size(f), alignment = fuzz_byte(f) < 200 ? 0 : fuzz_number(f);
    CUdeviceptr hint = fuzz_byte(f) < 200 ? 0 : fuzz_address(f);
    keep(f, &f->spaces, f->cu.cuMemAddressReserve(out, size, alignment, hint, 0), out);
}

static void call_unreserve(fuzz *f)
{
    CUdeviceptr address = fuzz_address(f);
    f->cu.cuMemAddressFree(address, fuzz_size(f));
}

static void call_create(fuzz *f)
{
    void *out = fuzz_out(f);
    CUmemAllocationProp properties = {.type = fuzz_byte(f) == 255 ? 7 : 1,
                                      .requestedHandleTypes = fuzz_byte(f) < 128,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device(f)}};
    keep(f, &f->handles, f->cu.cuMemCreate(out, fuzz_size(f), &properties, fuzz_byte(f) == 255),
         out);
}

static void call_release(fuzz *f)
{
    f->cu.cuMemRelease(fuzz_pick(f, &f->handles));
}

static void call_map(fuzz *f)
{
    CUdeviceptr address = fuzz_address(f);
    uint64_t size = fuzz_size(f), offset = fuzz_byte(f) < 250 ? 0 : fuzz_size(f);
    f->cu.cuMemMap(address, size, offset, fuzz_pick(f, &f->handles), 0);
}

static void call_unmap(fuzz *f)
{
    CUdeviceptr address = fuzz_address(f);
    f->cu.cuMemUnmap(address, fuzz_size(f));
}

static void call_set_access(fuzz *f)
{
    static const int flags[] = {3, 3, 3, 3, 1, 0, 2, 77};
    CUmemAccessDesc access[2];
    for (int i = 0; i < 2; i++) {
        access[i] =
            (CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, device(f)}, flags[fuzz_byte(f) % 8]};
    }
    CUdeviceptr address = fuzz_address(f);
    uint64_t size = fuzz_size(f);
    f->cu.cuMemSetAccess(address, size, access, fuzz_byte(f) % 3);
}

/* A page with memory and access, in one go: or too few inputs would get that far. */
static void call_page(fuzz *f)
{
    CUdeviceptr address = fuzz_address(f);
    CUmemGenericAllocationHandle handle = fuzz_pick(f, &f->handles);
    uint64_t size = (1 + fuzz_byte(f) % 2) * (uint64_t)PAGE;
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    f->cu.cuMemMap(address, size, 0, handle, 0);
    f->cu.cuMemSetAccess(address, size, &access, 1);
}

static void call_ask_memory(fuzz *f)
{
    void *out = fuzz_out(f);
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device(f)};
    CUmemAllocationProp properties = {.type = 1, .location = location};
    switch (fuzz_byte(f) % 5) {
    case 0:
        f->cu.cuMemGetAccess(out, &location, fuzz_address(f));
        break;
    case 1:
        f->cu.cuMemGetAllocationGranularity(out, &properties, fuzz_byte(f) % 3);
        break;
    case 2:
        keep(f, &f->handles,
             f->cu.cuMemRetainAllocationHandle(out, (void *)(uintptr_t)fuzz_address(f)), out);
        break;
    case 3:
        f->cu.cuMemGetAllocationPropertiesFromHandle(out, fuzz_pick(f, &f->handles));
        break;
    default:
        f->cu.cuPointerGetAttribute(out, (CUpointer_attribute)(fuzz_byte(f) % 20), fuzz_address(f));
    }
}

static void call_export(fuzz *f)
{
    int *file = &f->files[fuzz_byte(f) % POOL];
    if (*file > 0) {
        close(*file);
        *file = 0;
    }
    f->cu.cuMemExportToShareableHandle(file, fuzz_pick(f, &f->handles), fuzz_byte(f) < 250, 0);
}

static void call_import(fuzz *f)
{
    void *out = fuzz_out(f);
    uint8_t which = fuzz_byte(f);
    int file = which < 250 ? f->files[which % POOL] : (int)fuzz_number(f);
    keep(f, &f->handles, f->cu.cuMemImportFromShareableHandle(out, (void *)(intptr_t)file, 1), out);
}

static void call_alloc(fuzz *f)
{
    void *out = fuzz_out(f);
    keep(f, &f->allocations, f->cu.cuMemAlloc(out, fuzz_size(f)), out);
}

static void call_free(fuzz *f)
{
    f->cu.cuMemFree(fuzz_byte(f) < 200 ? fuzz_pick(f, &f->allocations) : fuzz_address(f));
}

static void call_host_alloc(fuzz *f)
{
    void *out = fuzz_out(f);
    uint64_t size = fuzz_size(f);
    keep(f, &f->blocks, f->cu.cuMemHostAlloc(out, size, fuzz_byte(f) % 9), out);
}

static void call_host_free(fuzz *f)
{
    f->cu.cuMemFreeHost(
        (void *)(uintptr_t)(fuzz_byte(f) < 200 ? fuzz_pick(f, &f->blocks) : fuzz_address(f)));
}

static void call_register(fuzz *f)
{
    uint64_t size;
    void *address = fuzz_spare(f, &size);
    f->cu.cuMemHostRegister(address, size, fuzz_byte(f) % 17);
}

static void call_unregister(fuzz *f)
{
    uint64_t size;
    f->cu.cuMemHostUnregister(fuzz_byte(f) < 200 ? fuzz_spare(f, &size)
                                                 : (void *)(uintptr_t)fuzz_address(f));
}

/* ---- work ------------------------------------------------------------------------------------------ */

static void call_copy(fuzz *f)
{
    uint64_t size;
    CUdeviceptr device_side = fuzz_address(f), other = fuzz_address(f);
    uint8_t kind = fuzz_byte(f) % 4;
    if (kind < 2) {
        void *host = fuzz_host(f, &size);
        if (kind == 0) {
            f->cu.cuMemcpyHtoDAsync(device_side, host, size, fuzz_stream(f));
        } else {
            f->cu.cuMemcpyDtoHAsync(host, device_side, size, fuzz_stream(f));
        }
        return;
    }
    size = fuzz_size(f);
    if (kind == 2) {
        f->cu.cuMemcpyDtoDAsync(device_side, other, size, fuzz_stream(f));
    } else {
        CUcontext to = context(f), from = context(f);
        f->cu.cuMemcpyPeerAsync(device_side, to, other, from, size, fuzz_stream(f));
    }
}

static void call_memset(fuzz *f)
{
    CUdeviceptr address = fuzz_address(f);
    uint64_t size = fuzz_size(f);
    if (fuzz_byte(f) < 128) {
        f->cu.cuMemsetD8Async(address, 1, size, fuzz_stream(f));
    } else {
        f->cu.cuMemsetD32Async(address & ~(CUdeviceptr)3, 1, size / 4, fuzz_stream(f));
    }
}

static void nothing(void *data)
{
    (void)data;
}

static void call_kernel(fuzz *f)
{
    ebbsim_range ranges[4];
    uint8_t kind = fuzz_byte(f);
    size_t count = kind % 5;
    for (size_t i = 0; i < count; i++) {
        ranges[i] = (ebbsim_range){fuzz_address(f), fuzz_size(f), fuzz_byte(f) % 4};
        unsigned type;
        if (kind < 250 && f->cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                                      ranges[i].address) != 0) {
            ranges[i].bytes = 0; /* a fault ends the context: not every time */
        }
    }
    ebbsim_work work = {.size = kind == 255 ? 1 : sizeof work,
                        .ranges = ranges,
                        .range_count = count,
                        .nanoseconds = fuzz_byte(f) * (uint64_t)100,
                        .function = kind % 3 == 0 ? nothing : NULL,
                        .now = kind % 7 == 0};
    if (work.now) {
        fuzz_release_words(); /* it waits for host functions that it is ordered after */
    }
    ebbsim_launch(&work, fuzz_stream(f));
}

static void call_wait_value(fuzz *f)
{
    unsigned flags = fuzz_byte(f) % 5;
    uint32_t value = 0;
    CUstream stream = fuzz_stream(f);
    const uint32_t *word = fuzz_word(f, flags, &value);
    f->cu.cuStreamWaitValue32(stream, (CUdeviceptr)(uintptr_t)word, value, flags);
}

static void call_write_value(fuzz *f)
{
    uint32_t unused;
    CUstream stream = fuzz_stream(f);
    if (fuzz_byte(f) < 128) {
        const uint32_t *word = fuzz_word(f, 1, &unused);
        f->cu.cuStreamWriteValue32(stream, (CUdeviceptr)(uintptr_t)word, 0x7FFFFFFF, 0);
    } else {
        CUdeviceptr address = fuzz_address(f);
        f->cu.cuStreamWriteValue32(stream, address, fuzz_byte(f), fuzz_byte(f) % 3);
    }
}

static void call_host_function(fuzz *f)
{
    CUstream stream = fuzz_stream(f);
    f->cu.cuLaunchHostFunc(stream, fuzz_byte(f) == 255 ? NULL : nothing, NULL);
}

/* ---- streams and events ---------------------------------------------------------------------------- */

static void call_stream_create(fuzz *f)
{
    void *out = fuzz_out(f);
    unsigned flags = fuzz_byte(f) % 3;
    keep(f, &f->streams,
         fuzz_byte(f) < 128 ? f->cu.cuStreamCreate(out, flags)
                            : f->cu.cuStreamCreateWithPriority(out, flags, (int)fuzz_byte(f) - 128),
         out);
}

static void call_stream_destroy(fuzz *f)
{
    f->cu.cuStreamDestroy(fuzz_stream(f));
}

static void call_stream_query(fuzz *f)
{
    f->cu.cuStreamQuery(fuzz_stream(f));
}

static void call_stream_synchronize(fuzz *f)
{
    f->cu.cuStreamSynchronize(fuzz_stream(f));
}

static void call_stream_context(fuzz *f)
{
    CUstream stream = fuzz_stream(f);
    if (fuzz_byte(f) < 128) {
        ebbsim_catch_up(stream);
    }
    f->cu.cuStreamGetCtx(stream, fuzz_out(f));
}

static void call_event_create(fuzz *f)
{
    void *out = fuzz_out(f);
    unsigned flags = fuzz_byte(f) % 9;
    f->travelling |= (flags & CU_EVENT_INTERPROCESS) != 0;
    keep(f, &f->events, f->cu.cuEventCreate(out, flags), out);
}

static void call_event_destroy(fuzz *f)
{
    f->cu.cuEventDestroy(event(f));
}

static void call_record(fuzz *f)
{
    CUevent e = event(f);
    if (f->travelling) {
        fuzz_release_words(); /* to record such an event waits for host functions before it */
    }
    if (fuzz_byte(f) < 200) {
        f->cu.cuEventRecord(e, fuzz_stream(f));
    } else {
        f->cu.cuCtxRecordEvent(context(f), e);
    }
}

static void call_wait(fuzz *f)
{
    CUstream stream = fuzz_stream(f);
    f->cu.cuStreamWaitEvent(stream, event(f), fuzz_byte(f) > 250);
}

static void call_event_query(fuzz *f)
{
    f->cu.cuEventQuery(event(f));
}

static void call_event_synchronize(fuzz *f)
{
    f->cu.cuEventSynchronize(event(f));
}

static void call_elapsed(fuzz *f)
{
    CUevent start = event(f);
    f->cu.cuEventElapsedTime((float *)fuzz_out(f), start, event(f));
}

static void call_ticket(fuzz *f)
{
    if (fuzz_byte(f) < 128) {
        f->cu.cuIpcGetEventHandle(&f->ticket, event(f));
        return;
    }
    void *out = fuzz_out(f);
    CUipcEventHandle ticket = f->ticket;
    ticket.reserved[fuzz_byte(f) % sizeof ticket.reserved] ^= (char)fuzz_byte(f);
    keep(f, &f->events, f->cu.cuIpcOpenEventHandle(out, ticket), out);
}

/* ---- captures --------------------------------------------------------------------------------------- */

static void call_capture(fuzz *f)
{
    void *out = NULL;
    switch (fuzz_byte(f) % 4) {
    case 0:
        f->cu.cuStreamBeginCapture(fuzz_stream(f), (CUstreamCaptureMode)(fuzz_byte(f) % 4));
        break;
    case 1:
        out = fuzz_out(f);
        keep(f, &f->graphs, f->cu.cuStreamEndCapture(fuzz_stream(f), out), out);
        break;
    case 2:
        out = fuzz_out(f);
        f->cu.cuStreamIsCapturing(fuzz_stream(f), out);
        break;
    default:
        f->out[0] = fuzz_byte(f) % 4;
        memset(f->out + 1, 0, 7);
        f->cu.cuThreadExchangeStreamCaptureMode((CUstreamCaptureMode *)(void *)f->out);
    }
}

static void call_graph(fuzz *f)
{
    void *out = NULL;
    uint64_t graph = fuzz_pick(f, &f->graphs), exec = fuzz_pick(f, &f->execs);
    switch (fuzz_byte(f) % 5) {
    case 0:
        f->cu.cuGraphDestroy((CUgraph)(uintptr_t)graph);
        break;
    case 1:
        f->cu.cuGraphExecDestroy((CUgraphExec)(uintptr_t)exec);
        break;
    case 2:
        f->cu.cuGraphLaunch((CUgraphExec)(uintptr_t)exec, fuzz_stream(f));
        break;
    default:
        out = fuzz_out(f);
        keep(f, &f->execs,
             f->cu.cuGraphInstantiateWithFlags(out, (CUgraph)(uintptr_t)graph, fuzz_byte(f) % 17),
             out);
    }
}

/* ---- control ----------------------------------------------------------------------------------------- */

static void call_control(fuzz *f)
{
    ebbsim_census census = {.size = sizeof census};
    ebbsim_hazard hazard;
    switch (fuzz_byte(f) % 6) {
    case 0:
        ebbsim_pass(fuzz_byte(f) * (uint64_t)10000);
        break;
    case 1:
        ebbsim_foreign_use(device(f), fuzz_size(f));
        break;
    case 2:
        ebbsim_fail(NULL, fuzz_byte(f) % 8, fuzz_byte(f));
        break;
    case 3:
        ebbsim_fail_clear();
        break;
    case 4:
        ebbsim_hazard_get(fuzz_byte(f), &hazard);
        break;
    default:
        census.size = fuzz_byte(f) % (sizeof census + 1);
        ebbsim_census_take(&census);
    }
}

void fuzz_call(fuzz *f)
{
    /* The first ones never wait, so that words may still be waited for while they are made. */
    static call *const calls[] = {
        call_reserve, call_create, call_page, call_page, call_kernel, call_kernel, call_memset,
        call_record, call_wait, call_stream_query, call_event_query, call_stream_create,
        call_stream_destroy, call_event_create, call_event_destroy, call_wait_value,
        call_write_value, call_host_function, call_set_access, call_unmap, call_map, call_release,
        call_capture, call_graph, call_control, call_ask_memory,
        /* and these may */
        call_copy, call_copy, call_copy, call_context, call_context_release,
        call_context_synchronize, call_info, call_unreserve, call_export, call_import, call_alloc,
        call_free, call_host_alloc, call_host_free, call_register, call_unregister,
        call_stream_synchronize, call_stream_context, call_event_synchronize, call_elapsed,
        call_ticket, call_init, call_device};
    enum { CALLS = sizeof calls / sizeof *calls, FIRST_THAT_WAITS = 26 };
    unsigned which = fuzz_byte(f) % CALLS;
    if (which >= FIRST_THAT_WAITS) {
        fuzz_release_words();
    }
    calls[which](f);
}

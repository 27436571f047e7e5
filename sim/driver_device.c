/*
 * The driver's face: start, devices, contexts.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "driver_face.h"
#include "sim.h"

/* ---- codes in words --------------------------------------------------------------------------- */

static const char *code_name(CUresult code)
{
    switch (code) {
#define CODE_NAME(name, value)                                                                     \
    case name:                                                                                     \
        return #name;
        CUDA_CODES(CODE_NAME)
#undef CODE_NAME
    }
    return NULL;
}

CUresult cuGetErrorName(CUresult code, const char **name)
{
    CUresult result = sim_enter(FN_cuGetErrorName);
    if (name != NULL) {
        *name = result == CUDA_SUCCESS ? code_name(code) : NULL;
    }
    if (result == CUDA_SUCCESS && (name == NULL || *name == NULL)) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    return sim_leave(result);
}

/* The driver's own sentences, as far as programs are known to look at them. */
static const char *code_text(CUresult code)
{
    switch (code) {
    case CUDA_SUCCESS:
        return "no error";
    case CUDA_ERROR_INVALID_VALUE:
        return "invalid argument";
    case CUDA_ERROR_OUT_OF_MEMORY:
        return "out of memory";
    case CUDA_ERROR_NOT_INITIALIZED:
        return "initialization error";
    case CUDA_ERROR_DEINITIALIZED:
        return "driver shutting down";
    case CUDA_ERROR_NO_DEVICE:
        return "no CUDA-capable device is detected";
    case CUDA_ERROR_INVALID_DEVICE:
        return "invalid device ordinal";
    case CUDA_ERROR_INVALID_CONTEXT:
        return "invalid device context";
    case CUDA_ERROR_NOT_PERMITTED:
        return "operation not permitted";
    case CUDA_ERROR_INVALID_HANDLE:
        return "invalid resource handle";
    case CUDA_ERROR_NOT_FOUND:
        return "named symbol not found";
    case CUDA_ERROR_NOT_READY:
        return "device not ready";
    case CUDA_ERROR_ILLEGAL_ADDRESS:
        return "an illegal memory access was encountered";
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
        return "part or all of the requested memory range is already mapped";
    case CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED:
        return "pointer does not correspond to a registered memory region";
    case CUDA_ERROR_NOT_SUPPORTED:
        return "operation not supported";
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
        return "operation not permitted when stream is capturing";
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
        return "operation failed due to a previous error during capture";
    default:
        return code_name(code);
    }
}

CUresult cuGetErrorString(CUresult code, const char **text)
{
    CUresult result = sim_enter(FN_cuGetErrorString);
    if (text != NULL) {
        *text = result == CUDA_SUCCESS ? code_text(code) : NULL;
    }
    if (result == CUDA_SUCCESS && (text == NULL || *text == NULL)) {
        result = CUDA_ERROR_INVALID_VALUE;
    }
    return sim_leave(result);
}

/* ---- start ------------------------------------------------------------------------------------ */

CUresult cuInit(unsigned flags)
{
    CUresult code = sim_enter(FN_cuInit);
    if (code == CUDA_SUCCESS && flags != 0) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && sim.forked) {
        code = CUDA_ERROR_NOT_INITIALIZED;
    }
    if (code == CUDA_SUCCESS && !sim.initialised) {
        code =
            sim_cards_ready() > 0 && sim_cards_choose() > 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
        sim.initialised = code == CUDA_SUCCESS;
    }
    return sim_leave(code);
}

CUresult cuDriverGetVersion(int *version)
{
    CUresult code = sim_enter(FN_cuDriverGetVersion);
    if (code == CUDA_SUCCESS && version == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *version = sim.driver_version;
    }
    return sim_leave(code);
}

/* ---- devices ---------------------------------------------------------------------------------- */

static bool is_device(CUdevice device)
{
    return device >= 0 && device < sim_card_count();
}

/* Enter, and check a result pointer and a device. */
static CUresult enter_device(function_id function, const void *result, CUdevice device)
{
    CUresult code = sim_enter(function);
    if (code == CUDA_SUCCESS && result == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && !is_device(device)) {
        code = CUDA_ERROR_INVALID_DEVICE;
    }
    return code;
}

CUresult cuDeviceGetCount(int *count)
{
    CUresult code = enter_device(FN_cuDeviceGetCount, count, 0);
    if (code == CUDA_SUCCESS) {
        *count = sim_card_count();
    }
    return sim_leave(code);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult code = enter_device(FN_cuDeviceGet, device, ordinal);
    if (code == CUDA_SUCCESS) {
        *device = ordinal;
    }
    return sim_leave(code);
}

CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult code = enter_device(FN_cuDeviceGetName, name, device);
    if (code == CUDA_SUCCESS && length <= 0) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        snprintf(name, (size_t)length, "%s", sim_card(device)->name);
    }
    return sim_leave(code);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    CUresult code = enter_device(FN_cuDeviceGetUuid_v2, uuid, device);
    if (code == CUDA_SUCCESS) {
        memcpy(uuid->bytes, "ebbtide-sim-gpu", 16);
        uuid->bytes[15] = (char)sim_place(device);
    }
    return sim_leave(code);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CUresult code = enter_device(FN_cuDeviceTotalMem_v2, bytes, device);
    if (code == CUDA_SUCCESS) {
        *bytes = sim_card(device)->memory;
    }
    return sim_leave(code);
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CUresult code = enter_device(FN_cuDeviceGetAttribute, value, device);
    if (code == CUDA_SUCCESS) {
        code = sim_attribute(device, (int)attribute, value);
    }
    return sim_leave(code);
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    CUresult code = enter_device(FN_cuDeviceCanAccessPeer, can, device);
    if (code == CUDA_SUCCESS && !is_device(peer)) {
        code = CUDA_ERROR_INVALID_DEVICE;
    }
    if (code == CUDA_SUCCESS) {
        *can = device != peer && sim_card(device)->peer && sim_card(peer)->peer;
    }
    return sim_leave(code);
}

/* 1: how well they are linked. 2: access. 3: atomics. 4: arrays. */
CUresult cuDeviceGetP2PAttribute(int *value, int attribute, CUdevice device, CUdevice peer)
{
    CUresult code = enter_device(FN_cuDeviceGetP2PAttribute, value, device);
    if (code == CUDA_SUCCESS && (!is_device(peer) || device == peer)) {
        code = CUDA_ERROR_INVALID_DEVICE;
    }
    if (code == CUDA_SUCCESS && (attribute < 1 || attribute > 4)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        bool peers = sim_card(device)->peer && sim_card(peer)->peer;
        *value = attribute == 2 && peers;
    }
    return sim_leave(code);
}

CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    CUresult code = enter_device(FN_cuDeviceGetPCIBusId, text, device);
    if (code == CUDA_SUCCESS && length < 13) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        snprintf(text, (size_t)length, "0000:%02X:00.0", (unsigned)sim_place(device) + 1);
    }
    return sim_leave(code);
}

CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    CUresult code = enter_device(FN_cuDeviceGetByPCIBusId, device, 0);
    unsigned domain = 0, bus = 0, slot = 0;
    if (code == CUDA_SUCCESS &&
        (text == NULL || (sscanf(text, "%x:%x:%x", &domain, &bus, &slot) != 3 &&
                          sscanf(text, "%x:%x", &bus, &slot) != 2))) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        code = CUDA_ERROR_INVALID_DEVICE;
        for (int i = 0; i < sim_card_count() && domain == 0 && slot == 0; i++) {
            if (sim_place(i) + 1 == (int)bus) {
                *device = i;
                code = CUDA_SUCCESS;
            }
        }
    }
    return sim_leave(code);
}

/* ---- contexts: one per device, the primary one ------------------------------------------------- */

context *sim_context_of(CUcontext handle)
{
    for (context *c = sim.contexts; c < sim.contexts + SIM_MAX_CARDS; c++) {
        if ((void *)handle == (void *)c) {
            return c;
        }
    }
    return NULL;
}

static CUresult activate(context *c, int device)
{
    CUresult code = sim_charge(device, sim_card(device)->context);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    stream *s = sim_stream_new(device, false, 0);
    if (s == NULL) {
        sim_uncharge(device, sim_card(device)->context);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim.streams_alive--; /* nobody made it, nobody destroys it */
    sim.next_stream_number--;
    s->number = 0;
    s->is_default = s->nobodys = true;
    memset(c, 0, sizeof *c);
    c->device = device;
    c->active = true;
    c->default_stream = s;
    return CUDA_SUCCESS;
}

static void deactivate(context *c)
{
    mark *m = sim_mark_context(c->device, -1);
    sim_mark_wait(m);
    sim_mark_unref(m);
    sim_stream_context_gone(c->device);
    sim_memory_context_gone(c->device);
    sim_host_context_gone(c->device);
    sim_uncharge(c->device, sim_card(c->device)->context);
    c->active = false;
    c->default_stream = NULL;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CUresult code = enter_device(FN_cuDevicePrimaryCtxRetain, out, device);
    if (code == CUDA_SUCCESS) {
        context *c = &sim.contexts[device];
        code = c->active ? CUDA_SUCCESS : activate(c, device);
        if (code == CUDA_SUCCESS) {
            c->retained++;
            *out = (CUcontext)(void *)c;
        }
    }
    return sim_leave(code);
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CUresult code = enter_device(FN_cuDevicePrimaryCtxRelease_v2, &device, device);
    if (code == CUDA_SUCCESS) {
        context *c = &sim.contexts[device];
        if (c->retained == 0) {
            code = CUDA_ERROR_INVALID_CONTEXT;
        } else if (--c->retained == 0) {
            deactivate(c);
        }
    }
    return sim_leave(code);
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    CUresult code = enter_device(FN_cuDevicePrimaryCtxGetState, flags, device);
    if (code == CUDA_SUCCESS && active == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *flags = 0;
        *active = sim.contexts[device].active;
    }
    return sim_leave(code);
}

CUresult cuCtxPushCurrent_v2(CUcontext handle)
{
    CUresult code = sim_enter(FN_cuCtxPushCurrent_v2);
    thread_state *t = sim_thread();
    context *c = sim_context_of(handle);
    if (code == CUDA_SUCCESS && c == NULL) {
        code = handle == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    }
    if (code == CUDA_SUCCESS && t->depth == (int)(sizeof t->stack / sizeof *t->stack)) {
        code = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (code == CUDA_SUCCESS) {
        t->stack[t->depth++] = c;
    }
    return sim_leave(code);
}

CUresult cuCtxPopCurrent_v2(CUcontext *out)
{
    CUresult code = sim_enter(FN_cuCtxPopCurrent_v2);
    thread_state *t = sim_thread();
    if (code == CUDA_SUCCESS && t->depth == 0) {
        code = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (code == CUDA_SUCCESS) {
        context *c = t->stack[--t->depth];
        if (out != NULL) {
            *out = (CUcontext)(void *)c;
        }
    }
    return sim_leave(code);
}

CUresult cuCtxGetCurrent(CUcontext *out)
{
    CUresult code = sim_enter(FN_cuCtxGetCurrent);
    if (code == CUDA_SUCCESS && out == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *out = (CUcontext)(void *)sim_current();
    }
    return sim_leave(code);
}

CUresult cuCtxSetCurrent(CUcontext handle)
{
    CUresult code = sim_enter(FN_cuCtxSetCurrent);
    thread_state *t = sim_thread();
    context *c = sim_context_of(handle);
    if (code == CUDA_SUCCESS && handle != NULL && c == NULL) {
        code = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (code == CUDA_SUCCESS && handle == NULL) {
        t->depth -= t->depth > 0;
    } else if (code == CUDA_SUCCESS) {
        t->depth += t->depth == 0;
        t->stack[t->depth - 1] = c;
    }
    return sim_leave(code);
}

CUresult cuCtxGetDevice(CUdevice *device)
{
    CUresult code = sim_enter(FN_cuCtxGetDevice);
    if (code == CUDA_SUCCESS && (device == NULL || sim_current() == NULL)) {
        code = device == NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    }
    if (code == CUDA_SUCCESS) { /* also of a context that was released */
        *device = sim_current()->device;
    }
    return sim_leave(code);
}

CUresult cuCtxSynchronize(void)
{
    CUresult code = sim_enter(FN_cuCtxSynchronize);
    if (code == CUDA_SUCCESS && sim_capture_any(sim_current()->device)) {
        sim_capture_invalidate_all(sim_current()->device);
        code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (code == CUDA_SUCCESS) {
        mark *m = sim_mark_context(sim_current()->device, -1);
        sim_mark_wait(m);
        sim_mark_unref(m);
    }
    return sim_leave(code);
}

/* ---- what a context can be told, and what it says ----------------------------------------------- */

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUresult code = sim_enter(FN_cuCtxGetStreamPriorityRange);
    if (code == CUDA_SUCCESS && least != NULL) {
        *least = 0;
    }
    if (code == CUDA_SUCCESS && greatest != NULL) {
        *greatest = -5;
    }
    return sim_leave(code);
}

enum { ATTRIBUTE_MAX_PERSISTING_CACHE = 108 };

/* From compute capability 9.0 on, a kernel cannot wait for those it launched. */
static bool has_limit(int limit)
{
    int major = 0;
    sim_attribute(sim_current()->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major);
    return limit >= 0 && limit < SIM_LIMITS &&
           (limit != CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH || major < 9);
}

static CUresult no_limit(int limit)
{
    bool known = limit >= 0 && limit < SIM_LIMITS;
    return known ? CUDA_ERROR_UNSUPPORTED_LIMIT : CUDA_ERROR_INVALID_VALUE;
}

/* What may persist in the second-level cache, where nothing else was said: three tenths of the most. */
static size_t persisting_cache(void)
{
    int most = 0;
    sim_attribute(sim_current()->device, ATTRIBUTE_MAX_PERSISTING_CACHE, &most);
    return (size_t)most * 3 / 10;
}

/* Limits are kept and given back; nothing here can run into one. */
CUresult cuCtxGetLimit(size_t *value, int limit)
{
    CUresult code = sim_enter(FN_cuCtxGetLimit);
    if (code == CUDA_SUCCESS && (value == NULL || !has_limit(limit))) {
        code = value == NULL ? CUDA_ERROR_INVALID_VALUE : no_limit(limit);
    }
    if (code == CUDA_SUCCESS) {
        static const size_t usual[SIM_LIMITS] = {1024, 6 << 20, 8 << 20, 2, 2048, 128, 0};
        const context *c = sim_current();
        *value = c->limits[limit] != 0                        ? c->limits[limit]
                 : limit == CU_LIMIT_PERSISTING_L2_CACHE_SIZE ? persisting_cache()
                                                              : usual[limit];
    }
    return sim_leave(code);
}

CUresult cuCtxSetLimit(int limit, size_t value)
{
    CUresult code = sim_enter(FN_cuCtxSetLimit);
    if (code == CUDA_SUCCESS && !has_limit(limit)) {
        code = no_limit(limit);
    }
    if (code == CUDA_SUCCESS) {
        sim_current()->limits[limit] = value;
    }
    return sim_leave(code);
}

enum { CTX_MAP_HOST = 8 };

CUresult cuCtxGetFlags(unsigned *flags)
{
    CUresult code = sim_enter(FN_cuCtxGetFlags);
    if (code == CUDA_SUCCESS && flags == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *flags = CTX_MAP_HOST;
    }
    return sim_leave(code);
}

CUresult cuCtxResetPersistingL2Cache(void)
{
    return sim_leave(sim_enter(FN_cuCtxResetPersistingL2Cache));
}

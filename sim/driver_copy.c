/*
 * The driver's face: copies and memsets.
 */
#define _GNU_SOURCE
#include "driver_face.h"
#include "sim.h"

/* ---- queued copies ---------------------------------------------------------------------------- */

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t size, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyHtoDAsync_v2, handle, &code);
    return sim_leave(s == NULL ? code
                               : sim_copy("cuMemcpyHtoDAsync", s, to, SIM_STREAMS_DEVICE,
                                          (uint64_t)(uintptr_t)from, SIM_HOST, size));
}

CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t size, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyDtoHAsync_v2, handle, &code);
    return sim_leave(s == NULL ? code
                               : sim_copy("cuMemcpyDtoHAsync", s, (uint64_t)(uintptr_t)to, SIM_HOST,
                                          from, SIM_STREAMS_DEVICE, size));
}

CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyDtoDAsync_v2, handle, &code);
    return sim_leave(s == NULL ? code
                               : sim_copy("cuMemcpyDtoDAsync", s, to, SIM_STREAMS_DEVICE, from,
                                          SIM_STREAMS_DEVICE, size));
}

static CUresult copy_peer(const char *call, stream *s, CUdeviceptr to, CUcontext to_context,
                          CUdeviceptr from, CUcontext from_context, size_t size)
{
    const context *target = sim_context_of(to_context), *source = sim_context_of(from_context);
    if ((target == NULL && to_context != NULL) || (source == NULL && from_context != NULL)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    int to_device = target == NULL ? s->device : target->device;
    int from_device = source == NULL ? s->device : source->device;
    return sim_copy(call, s, to, to_device, from, from_device, size);
}

CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                           CUcontext from_context, size_t size, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyPeerAsync, handle, &code);
    return sim_leave(
        s == NULL ? code
                  : copy_peer("cuMemcpyPeerAsync", s, to, to_context, from, from_context, size));
}

CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemsetD8Async, handle, &code);
    return sim_leave(s == NULL ? code : sim_set("cuMemsetD8Async", s, to, value, count, 1));
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemsetD32Async, handle, &code);
    return sim_leave(s == NULL ? code : sim_set("cuMemsetD32Async", s, to, value, count, 4));
}

/* Where both sides lie is found out from the addresses. */
CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyAsync, handle, &code);
    return sim_leave(s == NULL ? code
                               : sim_copy("cuMemcpyAsync", s, to, SIM_HOST, from, SIM_HOST, size));
}

/* ---- copies on the default stream, which the host waits for ------------------------------------ */

static CUresult wait_for(stream *s, CUresult code)
{
    if (code == CUDA_SUCCESS) {
        mark *m = sim_mark_stream(s, -1);
        sim_mark_wait(m);
        sim_mark_unref(m);
    }
    return code;
}

CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t size)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyHtoD_v2, NULL, &code);
    return sim_leave(s == NULL ? code
                               : wait_for(s, sim_copy("cuMemcpyHtoD", s, to, SIM_STREAMS_DEVICE,
                                                      (uint64_t)(uintptr_t)from, SIM_HOST, size)));
}

CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t size)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyDtoH_v2, NULL, &code);
    return sim_leave(s == NULL ? code
                               : wait_for(s, sim_copy("cuMemcpyDtoH", s, (uint64_t)(uintptr_t)to,
                                                      SIM_HOST, from, SIM_STREAMS_DEVICE, size)));
}

/* From device to device nobody waits: the default stream's order is enough. */
CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyDtoD_v2, NULL, &code);
    return sim_leave(s == NULL ? code
                               : sim_copy("cuMemcpyDtoD", s, to, SIM_STREAMS_DEVICE, from,
                                          SIM_STREAMS_DEVICE, size));
}

CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpy, NULL, &code);
    if (s == NULL) {
        return sim_leave(code);
    }
    bool on_devices = sim_mapping_at(to) != NULL && sim_mapping_at(from) != NULL;
    code = sim_copy("cuMemcpy", s, to, SIM_HOST, from, SIM_HOST, size);
    return sim_leave(on_devices ? code : wait_for(s, code));
}

CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_context, CUdeviceptr from,
                      CUcontext from_context, size_t size)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpyPeer, NULL, &code);
    return sim_leave(
        s == NULL ? code : copy_peer("cuMemcpyPeer", s, to, to_context, from, from_context, size));
}

/* Memory of the host is waited for. */
static CUresult set_now(const char *call, stream *s, CUdeviceptr to, unsigned value, size_t count,
                        unsigned width)
{
    bool hosts = sim_host_block_at(to) != NULL;
    CUresult code = sim_set(call, s, to, value, count, width);
    return hosts ? wait_for(s, code) : code;
}

CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemsetD8_v2, NULL, &code);
    return sim_leave(s == NULL ? code : set_now("cuMemsetD8", s, to, value, count, 1));
}

CUresult cuMemsetD32_v2(CUdeviceptr to, unsigned value, size_t count)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemsetD32_v2, NULL, &code);
    return sim_leave(s == NULL ? code : set_now("cuMemsetD32", s, to, value, count, 4));
}

/* ---- rectangles: row by row -------------------------------------------------------------------- */

typedef struct rectangle {
    uint64_t at;
    size_t pitch;
    int device; /* as sim_copy() takes it */
} rectangle;

static CUresult side_of(int type, uint64_t host, CUdeviceptr device, size_t x, size_t y,
                        size_t pitch, rectangle *side)
{
    if (type == CU_MEMORYTYPE_ARRAY || type < CU_MEMORYTYPE_HOST || type > CU_MEMORYTYPE_UNIFIED) {
        return type == CU_MEMORYTYPE_ARRAY ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    }
    side->at = (type == CU_MEMORYTYPE_HOST ? host : device) + y * pitch + x;
    side->pitch = pitch;
    side->device = type == CU_MEMORYTYPE_DEVICE ? SIM_STREAMS_DEVICE : SIM_HOST;
    return CUDA_SUCCESS;
}

static CUresult copy_rectangle(const char *call, stream *s, const CUDA_MEMCPY2D *c)
{
    rectangle to = {0}, from = {0};
    if (c == NULL || (c->dstPitch < c->WidthInBytes && c->Height > 1) ||
        (c->srcPitch < c->WidthInBytes && c->Height > 1)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUresult code = side_of(c->dstMemoryType, (uint64_t)(uintptr_t)c->dstHost, c->dstDevice,
                            c->dstXInBytes, c->dstY, c->dstPitch, &to);
    if (code == CUDA_SUCCESS) {
        code = side_of(c->srcMemoryType, (uint64_t)(uintptr_t)c->srcHost, c->srcDevice,
                       c->srcXInBytes, c->srcY, c->srcPitch, &from);
    }
    bool solid = to.pitch == c->WidthInBytes && from.pitch == c->WidthInBytes;
    size_t rows = solid && c->Height > 0 ? 1 : c->Height;
    size_t width = solid ? c->WidthInBytes * c->Height : c->WidthInBytes;
    for (size_t i = 0; code == CUDA_SUCCESS && i < rows; i++) {
        code = sim_copy(call, s, to.at + i * to.pitch, to.device, from.at + i * from.pitch,
                        from.device, width);
    }
    return code;
}

CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpy2DAsync_v2, handle, &code);
    return sim_leave(s == NULL ? code : copy_rectangle("cuMemcpy2DAsync", s, copy));
}

CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D *copy)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemcpy2D_v2, NULL, &code);
    if (s == NULL) {
        return sim_leave(code);
    }
    bool on_devices = copy != NULL && copy->srcMemoryType != CU_MEMORYTYPE_HOST &&
                      copy->dstMemoryType != CU_MEMORYTYPE_HOST &&
                      sim_mapping_at(copy->srcDevice) != NULL &&
                      sim_mapping_at(copy->dstDevice) != NULL;
    code = copy_rectangle("cuMemcpy2D", s, copy);
    return sim_leave(on_devices ? code : wait_for(s, code));
}

CUresult cuMemsetD2D8Async(CUdeviceptr to, size_t pitch, unsigned char value, size_t width,
                           size_t height, CUstream handle)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuMemsetD2D8Async, handle, &code);
    if (s != NULL && pitch < width && height > 1) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    for (size_t i = 0; s != NULL && code == CUDA_SUCCESS && i < height; i++) {
        code = sim_set("cuMemsetD2D8Async", s, to + i * pitch, value, width, 1);
    }
    return sim_leave(code);
}

/*
 * The runtime's face: copies and memsets.
 */
#define _GNU_SOURCE
#include "runtime.h"

static CUdeviceptr address_of(const void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

static cudaError_t copy_async(void *to, const void *from, size_t size, cudaMemcpyKind kind,
                              cudaStream_t stream)
{
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return RT_CALL(cuMemcpyHtoDAsync_v2, address_of(to), from, size, stream);
    case cudaMemcpyDeviceToHost:
        return RT_CALL(cuMemcpyDtoHAsync_v2, to, address_of(from), size, stream);
    case cudaMemcpyDeviceToDevice:
        return RT_CALL(cuMemcpyDtoDAsync_v2, address_of(to), address_of(from), size, stream);
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return RT_CALL(cuMemcpyAsync, address_of(to), address_of(from), size, stream);
    }
    return cudaErrorInvalidMemcpyDirection;
}

static cudaError_t copy(void *to, const void *from, size_t size, cudaMemcpyKind kind)
{
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return RT_CALL(cuMemcpyHtoD_v2, address_of(to), from, size);
    case cudaMemcpyDeviceToHost:
        return RT_CALL(cuMemcpyDtoH_v2, to, address_of(from), size);
    case cudaMemcpyDeviceToDevice:
        return RT_CALL(cuMemcpyDtoD_v2, address_of(to), address_of(from), size);
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return RT_CALL(cuMemcpy, address_of(to), address_of(from), size);
    }
    return cudaErrorInvalidMemcpyDirection;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    cudaError_t code = rt_context();
    return rt_leave(code != cudaSuccess ? code : copy_async(to, from, size, kind, stream));
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind)
{
    cudaError_t code = rt_context();
    return rt_leave(code != cudaSuccess ? code : copy(to, from, size, kind));
}

/* ---- between devices -------------------------------------------------------------------------- */

static cudaError_t both_contexts(int to, CUcontext *to_context, int from, CUcontext *from_context)
{
    cudaError_t code = rt_context();
    if (code == cudaSuccess) {
        code = rt_primary(to, to_context);
    }
    return code != cudaSuccess ? code : rt_primary(from, from_context);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                size_t size, cudaStream_t stream)
{
    CUcontext target = NULL, source = NULL;
    cudaError_t code = both_contexts(to_device, &target, from_device, &source);
    return rt_leave(code != cudaSuccess ? code
                                        : RT_CALL(cuMemcpyPeerAsync, address_of(to), target,
                                                  address_of(from), source, size, stream));
}

cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size)
{
    CUcontext target = NULL, source = NULL;
    cudaError_t code = both_contexts(to_device, &target, from_device, &source);
    return rt_leave(code != cudaSuccess ? code
                                        : RT_CALL(cuMemcpyPeer, address_of(to), target,
                                                  address_of(from), source, size));
}

/* ---- rectangles ------------------------------------------------------------------------------- */

static bool describe(CUDA_MEMCPY2D *c, void *to, size_t to_pitch, const void *from,
                     size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind)
{
    bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
    bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
    bool either = kind == cudaMemcpyDefault;
    *c = (CUDA_MEMCPY2D){
        .srcMemoryType = either      ? CU_MEMORYTYPE_UNIFIED
                         : from_host ? CU_MEMORYTYPE_HOST
                                     : CU_MEMORYTYPE_DEVICE,
        .srcHost = from,
        .srcDevice = address_of(from),
        .srcPitch = from_pitch,
        .dstMemoryType = either    ? CU_MEMORYTYPE_UNIFIED
                         : to_host ? CU_MEMORYTYPE_HOST
                                   : CU_MEMORYTYPE_DEVICE,
        .dstHost = to,
        .dstDevice = address_of(to),
        .dstPitch = to_pitch,
        .WidthInBytes = width,
        .Height = height,
    };
    return kind >= cudaMemcpyHostToHost && kind <= cudaMemcpyDefault;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream)
{
    CUDA_MEMCPY2D c;
    if (!describe(&c, to, to_pitch, from, from_pitch, width, height, kind)) {
        return rt_leave(cudaErrorInvalidMemcpyDirection);
    }
    if (width > to_pitch || width > from_pitch) {
        return rt_leave(cudaErrorInvalidPitchValue);
    }
    RT_WITH_CONTEXT(cuMemcpy2DAsync_v2, &c, stream);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                         size_t width, size_t height, cudaMemcpyKind kind)
{
    CUDA_MEMCPY2D c;
    if (!describe(&c, to, to_pitch, from, from_pitch, width, height, kind)) {
        return rt_leave(cudaErrorInvalidMemcpyDirection);
    }
    if (width > to_pitch || width > from_pitch) {
        return rt_leave(cudaErrorInvalidPitchValue);
    }
    RT_WITH_CONTEXT(cuMemcpy2D_v2, &c);
}

/* ---- memsets ---------------------------------------------------------------------------------- */

cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuMemsetD8Async, address_of(to), (unsigned char)value, size, stream);
}

cudaError_t cudaMemset(void *to, int value, size_t size)
{
    RT_WITH_CONTEXT(cuMemsetD8_v2, address_of(to), (unsigned char)value, size);
}

cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                              cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuMemsetD2D8Async, address_of(to), pitch, (unsigned char)value, width, height,
                    stream);
}

cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height)
{
    return cudaMemset2DAsync(to, pitch, value, width, height, NULL);
}

/*
 * The runtime's face: memory, pointers, pools, memory of other processes.
 */
#define _GNU_SOURCE
#include "runtime.h"

#include <string.h>

static CUdeviceptr address_of(const void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

/* ---- device memory ---------------------------------------------------------------------------- */

/* Make a call that gives an address, and turn that into a pointer. */
#define GIVE_POINTER(out, call)                                                                    \
    do {                                                                                           \
        CUdeviceptr address = 0;                                                                   \
        cudaError_t code_ = rt_context();                                                          \
        if (code_ == cudaSuccess) {                                                                \
            code_ = (call);                                                                        \
        }                                                                                          \
        if (code_ == cudaSuccess) {                                                                \
            *(out) = (void *)(uintptr_t)address;                                                   \
        }                                                                                          \
        return rt_leave(code_);                                                                    \
    } while (0)

cudaError_t cudaMalloc(void **out, size_t size)
{
    if (out == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *out = NULL;
    GIVE_POINTER(out, size == 0 ? cudaSuccess : RT_CALL(cuMemAlloc_v2, &address, size));
}

/* Memory of the current device, which the host can reach as it can all of it here. It stays there, and
   there is no more of it than the device has. */
cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags)
{
    if (flags != 1 && flags != 2) { /* cudaMemAttachGlobal, cudaMemAttachHost */
        return rt_leave(cudaErrorInvalidValue);
    }
    return size == 0 ? rt_leave(cudaErrorInvalidValue) : cudaMalloc(out, size);
}

cudaError_t cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height)
{
    if (out == NULL || pitch == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *pitch = (width + 511) / 512 * 512;
    return cudaMalloc(out, *pitch * height);
}

cudaError_t cudaFree(void *pointer)
{
    RT_WITH_CONTEXT(cuMemFree_v2, address_of(pointer));
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    RT_WITH_CONTEXT(cuMemGetInfo_v2, free_bytes, total);
}

/* ---- host memory ------------------------------------------------------------------------------ */

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags)
{
    RT_WITH_CONTEXT(cuMemHostAlloc, out, size, flags);
}

cudaError_t cudaMallocHost(void **out, size_t size)
{
    return cudaHostAlloc(out, size, 0);
}

cudaError_t cudaFreeHost(void *pointer)
{
    RT_WITH_CONTEXT(cuMemFreeHost, pointer);
}

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags)
{
    RT_WITH_CONTEXT(cuMemHostRegister_v2, pointer, size, flags);
}

cudaError_t cudaHostUnregister(void *pointer)
{
    RT_WITH_CONTEXT(cuMemHostUnregister, pointer);
}

cudaError_t cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags)
{
    if (out == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    GIVE_POINTER(out, RT_CALL(cuMemHostGetDevicePointer_v2, &address, pointer, flags));
}

cudaError_t cudaHostGetFlags(unsigned *flags, void *pointer)
{
    RT_WITH_CONTEXT(cuMemHostGetFlags, flags, pointer);
}

/* ---- pointers --------------------------------------------------------------------------------- */

/* Memory that CUDA does not know is "unregistered", and no error. */
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer)
{
    cudaError_t code = out == NULL ? cudaErrorInvalidValue : rt_ready();
    if (code != cudaSuccess) {
        return rt_leave(code);
    }
    unsigned type = 0;
    *out =
        (cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = cudaInvalidDeviceId};
    if (RT_CALL(cuPointerGetAttribute, &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                address_of(pointer)) != cudaSuccess) {
        return cudaSuccess;
    }
    RT_CALL(cuPointerGetAttribute, &out->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address_of(pointer));
    bool host = type == CU_MEMORYTYPE_HOST;
    out->type = host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->devicePointer = (void *)(uintptr_t)pointer;
    out->hostPointer = host ? (void *)(uintptr_t)pointer : NULL;
    return cudaSuccess;
}

/* ---- pools ------------------------------------------------------------------------------------ */

cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream)
{
    if (out == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *out = NULL;
    GIVE_POINTER(out, size == 0 ? cudaSuccess : RT_CALL(cuMemAllocAsync, &address, size, stream));
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t pool,
                                    cudaStream_t stream)
{
    if (out == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *out = NULL;
    GIVE_POINTER(out, size == 0 ? cudaSuccess
                                : RT_CALL(cuMemAllocFromPoolAsync, &address, size, pool, stream));
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuMemFreeAsync, address_of(pointer), stream);
}

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    RT_WITH_DRIVER(cuDeviceGetDefaultMemPool, pool, device);
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device)
{
    RT_WITH_DRIVER(cuDeviceGetMemPool, pool, device);
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool)
{
    RT_WITH_DRIVER(cuDeviceSetMemPool, device, pool);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *properties)
{
    RT_WITH_DRIVER(cuMemPoolCreate, pool, properties);
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
    RT_WITH_DRIVER(cuMemPoolDestroy, pool);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
    RT_WITH_DRIVER(cuMemPoolTrimTo, pool, keep);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void *value)
{
    RT_WITH_DRIVER(cuMemPoolGetAttribute, pool, (CUmemPool_attribute)attribute, value);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void *value)
{
    RT_WITH_DRIVER(cuMemPoolSetAttribute, pool, (CUmemPool_attribute)attribute, value);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc *access, size_t count)
{
    RT_WITH_DRIVER(cuMemPoolSetAccess, pool, access, count);
}

cudaError_t cudaMemPoolGetAccess(int *flags, cudaMemPool_t pool, cudaMemLocation *location)
{
    RT_WITH_DRIVER(cuMemPoolGetAccess, flags, pool, location);
}

/* ---- other processes -------------------------------------------------------------------------- */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer)
{
    RT_WITH_CONTEXT(cuIpcGetMemHandle, handle, address_of(pointer));
}

cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags)
{
    if (out == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    GIVE_POINTER(out, RT_CALL(cuIpcOpenMemHandle_v2, &address, handle, flags));
}

cudaError_t cudaIpcCloseMemHandle(void *pointer)
{
    RT_WITH_CONTEXT(cuIpcCloseMemHandle, address_of(pointer));
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event)
{
    RT_WITH_CONTEXT(cuIpcGetEventHandle, handle, event);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle)
{
    RT_WITH_CONTEXT(cuIpcOpenEventHandle, event, handle);
}

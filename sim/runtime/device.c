/*
 * The runtime's face: devices, their properties, limits, peers.
 */
#define _GNU_SOURCE
#include "runtime.h"

#include <pthread.h>
#include <string.h>

static unsigned device_flags[RT_MAX_DEVICES]; /* cudaSetDeviceFlags; they change nothing here */

cudaError_t cudaGetDeviceCount(int *count)
{
    if (count == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *count = 0;
    RT_WITH_DRIVER(cuDeviceGetCount, count);
}

cudaError_t cudaSetDevice(int device)
{
    cudaError_t code = rt_ready();
    if (code == cudaSuccess) {
        code = rt_use(device);
    }
    if (code == cudaSuccess) {
        rt_self()->device = device;
    }
    return rt_leave(code);
}

/* The device of the context that the thread has, by whatever means; else of the one it will get. */
cudaError_t cudaGetDevice(int *device)
{
    CUcontext current = NULL;
    cudaError_t code = device == NULL ? cudaErrorInvalidValue : rt_ready();
    if (code == cudaSuccess) {
        *device = rt_self()->device;
        if (RT_CALL(cuCtxGetCurrent, &current) == cudaSuccess && current != NULL) {
            code = RT_CALL(cuCtxGetDevice, device);
        }
    }
    return rt_leave(code);
}

cudaError_t cudaInitDevice(int device, unsigned flags_of_device, unsigned flags)
{
    (void)flags_of_device, (void)flags;
    CUcontext context = NULL;
    cudaError_t code = rt_ready();
    return rt_leave(code != cudaSuccess ? code : rt_primary(device, &context));
}

cudaError_t cudaChooseDevice(int *device, const cudaDeviceProp *wanted)
{
    if (device == NULL || wanted == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *device = 0;
    return cudaSuccess;
}

cudaError_t cudaSetValidDevices(int *devices, int count)
{
    (void)devices, (void)count;
    return rt_leave(rt_ready());
}

cudaError_t cudaSetDeviceFlags(unsigned flags)
{
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) {
        __atomic_store_n(&device_flags[device], flags, __ATOMIC_RELAXED);
    }
    return code;
}

cudaError_t cudaGetDeviceFlags(unsigned *flags)
{
    int device = 0;
    if (flags == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) {
        *flags = __atomic_load_n(&device_flags[device], __ATOMIC_RELAXED) | 8; /* can map host */
    }
    return code;
}

cudaError_t cudaDeviceSynchronize(void)
{
    RT_WITH_CONTEXT(cuCtxSynchronize, );
}

cudaError_t cudaDeviceReset(void)
{
    int device = 0;
    cudaError_t code = cudaGetDevice(&device);
    if (code == cudaSuccess) {
        code = rt_forget(device);
        rt_self()->last = cudaSuccess;
    }
    return rt_leave(code);
}

/* ---- properties ------------------------------------------------------------------------------- */

cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device)
{
    if (value == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    RT_WITH_DRIVER(cuDeviceGetAttribute, value, (CUdevice_attribute)attribute, device);
}

int rt_attribute(int attribute, int device)
{
    int value = 0;
    return RT_CALL(cuDeviceGetAttribute, &value, (CUdevice_attribute)attribute, device) ==
                   cudaSuccess
               ? value
               : 0;
}

/* X(field, attribute): whatever of the properties is an attribute with the same meaning. */
#define ATTRIBUTE_FIELDS(X)                                                                        \
    X(regsPerBlock, 12)                                                                            \
    X(warpSize, 10)                                                                                \
    X(maxThreadsPerBlock, 1)                                                                       \
    X(maxThreadsDim[0], 2)                                                                         \
    X(maxThreadsDim[1], 3)                                                                         \
    X(maxThreadsDim[2], 4)                                                                         \
    X(maxGridSize[0], 5)                                                                           \
    X(maxGridSize[1], 6)                                                                           \
    X(maxGridSize[2], 7)                                                                           \
    X(major, 75)                                                                                   \
    X(minor, 76)                                                                                   \
    X(multiProcessorCount, 16)                                                                     \
    X(integrated, 18)                                                                              \
    X(canMapHostMemory, 19)                                                                        \
    X(maxTexture1D, 21)                                                                            \
    X(maxTexture1DMipmap, 77)                                                                      \
    X(maxTexture2D[0], 22)                                                                         \
    X(maxTexture2D[1], 23)                                                                         \
    X(maxTexture2DMipmap[0], 73)                                                                   \
    X(maxTexture2DMipmap[1], 74)                                                                   \
    X(maxTexture2DLinear[0], 70)                                                                   \
    X(maxTexture2DLinear[1], 71)                                                                   \
    X(maxTexture2DLinear[2], 72)                                                                   \
    X(maxTexture3D[0], 24)                                                                         \
    X(maxTexture3D[1], 25)                                                                         \
    X(maxTexture3D[2], 26)                                                                         \
    X(concurrentKernels, 31)                                                                       \
    X(ECCEnabled, 32)                                                                              \
    X(pciBusID, 33)                                                                                \
    X(pciDeviceID, 34)                                                                             \
    X(pciDomainID, 50)                                                                             \
    X(tccDriver, 35)                                                                               \
    X(asyncEngineCount, 40)                                                                        \
    X(unifiedAddressing, 41)                                                                       \
    X(memoryBusWidth, 37)                                                                          \
    X(l2CacheSize, 38)                                                                             \
    X(persistingL2CacheMaxSize, 108)                                                               \
    X(maxThreadsPerMultiProcessor, 39)                                                             \
    X(streamPrioritiesSupported, 78)                                                               \
    X(globalL1CacheSupported, 79)                                                                  \
    X(localL1CacheSupported, 80)                                                                   \
    X(regsPerMultiprocessor, 82)                                                                   \
    X(managedMemory, 83)                                                                           \
    X(isMultiGpuBoard, 84)                                                                         \
    X(multiGpuBoardGroupID, 85)                                                                    \
    X(hostNativeAtomicSupported, 86)                                                               \
    X(pageableMemoryAccess, 88)                                                                    \
    X(concurrentManagedAccess, 89)                                                                 \
    X(computePreemptionSupported, 90)                                                              \
    X(canUseHostPointerForRegisteredMem, 91)                                                       \
    X(cooperativeLaunch, 95)                                                                       \
    X(pageableMemoryAccessUsesHostPageTables, 100)                                                 \
    X(directManagedMemAccessFromHost, 101)                                                         \
    X(maxBlocksPerMultiProcessor, 106)                                                             \
    X(accessPolicyMaxWindowSize, 109)                                                              \
    X(hostRegisterSupported, 99)                                                                   \
    X(sparseCudaArraySupported, 112)                                                               \
    X(hostRegisterReadOnlySupported, 113)                                                          \
    X(timelineSemaphoreInteropSupported, 114)                                                      \
    X(memoryPoolsSupported, 115)                                                                   \
    X(gpuDirectRDMASupported, 116)                                                                 \
    X(gpuDirectRDMAWritesOrdering, 118)                                                            \
    X(deferredMappingCudaArraySupported, 121)                                                      \
    X(ipcEventSupported, 125)                                                                      \
    X(clusterLaunch, 120)                                                                          \
    X(unifiedFunctionPointers, 129)

static void fill_version(cudaDeviceProp *p, int device)
{
#if EBB_CUDART == 12
    p->clockRate = rt_attribute(13, device);
    p->memoryClockRate = rt_attribute(36, device);
    p->deviceOverlap = rt_attribute(15, device);
    p->kernelExecTimeoutEnabled = rt_attribute(17, device);
    p->computeMode = rt_attribute(20, device);
    p->maxTexture1DLinear = rt_attribute(69, device);
    p->singleToDoublePrecisionPerfRatio = rt_attribute(87, device);
    p->cooperativeMultiDeviceLaunch = rt_attribute(96, device);
#else
    p->deviceNumaId = rt_attribute(131, device);
    p->hostNumaId = rt_attribute(134, device);
    p->gpuPciDeviceID = (unsigned)rt_attribute(139, device);
    p->gpuPciSubsystemID = (unsigned)rt_attribute(140, device);
#endif
}

static cudaError_t fill(cudaDeviceProp *p, int device)
{
    memset(p, 0, sizeof *p);
    cudaError_t code = RT_CALL(cuDeviceGetName, p->name, (int)sizeof p->name, device);
    if (code == cudaSuccess) {
        code = RT_CALL(cuDeviceGetUuid_v2, &p->uuid, device);
    }
    if (code == cudaSuccess) {
        code = RT_CALL(cuDeviceTotalMem_v2, &p->totalGlobalMem, device);
    }
#define ATTRIBUTE_FIELD(field, attribute) p->field = rt_attribute(attribute, device);
    ATTRIBUTE_FIELDS(ATTRIBUTE_FIELD)
#undef ATTRIBUTE_FIELD
    p->sharedMemPerBlock = (size_t)rt_attribute(8, device);
    p->memPitch = (size_t)rt_attribute(11, device);
    p->totalConstMem = (size_t)rt_attribute(9, device);
    p->textureAlignment = (size_t)rt_attribute(14, device);
    p->texturePitchAlignment = (size_t)rt_attribute(51, device);
    p->surfaceAlignment = (size_t)rt_attribute(30, device);
    p->sharedMemPerMultiprocessor = (size_t)rt_attribute(81, device);
    p->sharedMemPerBlockOptin = (size_t)rt_attribute(97, device);
    p->reservedSharedMemPerBlock = (size_t)rt_attribute(111, device);
    fill_version(p, device);
    return code;
}

static cudaError_t properties(cudaDeviceProp *p, int device)
{
    cudaError_t code = p == NULL ? cudaErrorInvalidValue : rt_ready();
    return rt_leave(code != cudaSuccess ? code : fill(p, device));
}

#if EBB_CUDART == 12
cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp *p, int device)
{
    return properties(p, device);
}

/* For programs built with CUDA 11, whose struct ends earlier. */
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    cudaDeviceProp all;
    if (p == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    cudaError_t code = properties(&all, device);
    if (code == cudaSuccess) {
        memcpy(p, &all, offsetof(cudaDeviceProp, hostRegisterSupported));
    }
    return code;
}
#else
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    return properties(p, device);
}
#endif

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    RT_WITH_DRIVER(cuDeviceGetPCIBusId, text, length, device);
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text)
{
    RT_WITH_DRIVER(cuDeviceGetByPCIBusId, device, text);
}

/* ---- limits and preferences ------------------------------------------------------------------- */

cudaError_t cudaDeviceSetLimit(int limit, size_t value)
{
    RT_WITH_CONTEXT(cuCtxSetLimit, limit, value);
}

cudaError_t cudaDeviceGetLimit(size_t *value, int limit)
{
    RT_WITH_CONTEXT(cuCtxGetLimit, value, limit);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    RT_WITH_CONTEXT(cuCtxGetStreamPriorityRange, least, greatest);
}

cudaError_t cudaCtxResetPersistingL2Cache(void)
{
    RT_WITH_CONTEXT(cuCtxResetPersistingL2Cache, );
}

cudaError_t cudaDeviceSetCacheConfig(int config)
{
    (void)config;
    return rt_leave(rt_context());
}

cudaError_t cudaDeviceGetCacheConfig(int *config)
{
    if (config == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *config = 0;
    return rt_leave(rt_context());
}

cudaError_t cudaDeviceSetSharedMemConfig(int config)
{
    return cudaDeviceSetCacheConfig(config);
}

cudaError_t cudaDeviceGetSharedMemConfig(int *config)
{
    return cudaDeviceGetCacheConfig(config);
}

/* ---- peers ------------------------------------------------------------------------------------ */

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    RT_WITH_DRIVER(cuDeviceCanAccessPeer, can, device, peer);
}

cudaError_t cudaDeviceGetP2PAttribute(int *value, int attribute, int device, int peer)
{
    RT_WITH_DRIVER(cuDeviceGetP2PAttribute, value, attribute, device, peer);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    CUcontext context = NULL;
    int device = 0;
    cudaError_t code = rt_context();
    if (code == cudaSuccess) {
        code = cudaGetDevice(&device);
    }
    if (code == cudaSuccess) {
        code = peer == device ? cudaErrorInvalidDevice : rt_primary(peer, &context);
    }
    return rt_leave(code != cudaSuccess ? code : RT_CALL(cuCtxEnablePeerAccess, context, flags));
}

cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    CUcontext context = NULL;
    cudaError_t code = rt_context();
    if (code == cudaSuccess) {
        code = rt_primary(peer, &context);
    }
    return rt_leave(code != cudaSuccess ? code : RT_CALL(cuCtxDisablePeerAccess, context));
}

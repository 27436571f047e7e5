/*
 * The part of the CUDA runtime's binary interface that its face needs: handles, structs, codes.
 *
 * Written by us from the documentation, so that building needs no CUDA SDK; names are NVIDIA's. The
 * layouts of versions 12 and 13 differ here and there; EBB_CUDART says which one is compiled.
 */
#ifndef EBB_RUNTIME_ABI_H
#define EBB_RUNTIME_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "driver_abi.h"
#include "error_codes.h"

#if !defined(EBB_CUDART) || (EBB_CUDART != 12 && EBB_CUDART != 13)
#error "EBB_CUDART is 12 or 13"
#endif

typedef enum cudaError_t {
#define RT_ERROR_ENUM(value, name, text) name = (value),
    RT_ERRORS(RT_ERROR_ENUM)
#undef RT_ERROR_ENUM
} cudaError_t;

/* The runtime's handles are the driver's. */
typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
typedef CUgraph cudaGraph_t;
typedef CUgraphExec cudaGraphExec_t;
typedef CUgraphNode cudaGraphNode_t;
typedef CUmemoryPool cudaMemPool_t;
typedef CUgraphEdgeData cudaGraphEdgeData;
typedef CUipcEventHandle cudaIpcEventHandle_t;
typedef CUipcMemHandle cudaIpcMemHandle_t;
typedef CUmemLocation cudaMemLocation;
typedef CUmemAccessDesc cudaMemAccessDesc;
typedef CUmemPoolProps cudaMemPoolProps;
typedef CUDA_GRAPH_INSTANTIATE_PARAMS cudaGraphInstantiateParams;
typedef CUhostFn cudaHostFn_t;
typedef const void *cudaKernel_t;
typedef void (*cudaStreamCallback_t)(cudaStream_t stream, cudaError_t status, void *data);

typedef struct dim3 {
    unsigned x, y, z;
} dim3;

typedef enum cudaMemcpyKind {
    cudaMemcpyHostToHost = 0,
    cudaMemcpyHostToDevice = 1,
    cudaMemcpyDeviceToHost = 2,
    cudaMemcpyDeviceToDevice = 3,
    cudaMemcpyDefault = 4
} cudaMemcpyKind;

enum {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaInvalidDeviceId = -2
};

typedef struct cudaPointerAttributes {
    int type;
    int device;
    void *devicePointer;
    void *hostPointer;
#if EBB_CUDART == 13
    long reserved[8];
#endif
} cudaPointerAttributes;

typedef struct cudaFuncAttributes {
    size_t sharedSizeBytes, constSizeBytes, localSizeBytes;
    int maxThreadsPerBlock, numRegs, ptxVersion, binaryVersion, cacheModeCA;
    int maxDynamicSharedSizeBytes, preferredShmemCarveout, clusterDimMustBeSet;
    int requiredClusterWidth, requiredClusterHeight, requiredClusterDepth;
    int clusterSchedulingPolicyPreference, nonPortableClusterSizeAllowed;
    int reserved[16];
} cudaFuncAttributes;

typedef struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    void *attrs;
    unsigned numAttrs;
} cudaLaunchConfig_t;

typedef struct cudaChannelFormatDesc {
    int x, y, z, w, f;
} cudaChannelFormatDesc;

typedef struct cudaDeviceProp {
    char name[256];
    CUuuid uuid;
    char luid[8];
    unsigned luidDeviceNodeMask;
    size_t totalGlobalMem, sharedMemPerBlock;
    int regsPerBlock, warpSize;
    size_t memPitch;
    int maxThreadsPerBlock, maxThreadsDim[3], maxGridSize[3];
#if EBB_CUDART == 12
    int clockRate;
#endif
    size_t totalConstMem;
    int major, minor;
    size_t textureAlignment, texturePitchAlignment;
#if EBB_CUDART == 12
    int deviceOverlap;
#endif
    int multiProcessorCount;
#if EBB_CUDART == 12
    int kernelExecTimeoutEnabled;
#endif
    int integrated, canMapHostMemory;
#if EBB_CUDART == 12
    int computeMode;
#endif
    int maxTexture1D, maxTexture1DMipmap;
#if EBB_CUDART == 12
    int maxTexture1DLinear;
#endif
    int maxTexture2D[2], maxTexture2DMipmap[2], maxTexture2DLinear[3], maxTexture2DGather[2];
    int maxTexture3D[3], maxTexture3DAlt[3], maxTextureCubemap, maxTexture1DLayered[2];
    int maxTexture2DLayered[3], maxTextureCubemapLayered[2];
    int maxSurface1D, maxSurface2D[2], maxSurface3D[3], maxSurface1DLayered[2];
    int maxSurface2DLayered[3], maxSurfaceCubemap, maxSurfaceCubemapLayered[2];
    size_t surfaceAlignment;
    int concurrentKernels, ECCEnabled, pciBusID, pciDeviceID, pciDomainID, tccDriver;
    int asyncEngineCount, unifiedAddressing;
#if EBB_CUDART == 12
    int memoryClockRate;
#endif
    int memoryBusWidth, l2CacheSize, persistingL2CacheMaxSize, maxThreadsPerMultiProcessor;
    int streamPrioritiesSupported, globalL1CacheSupported, localL1CacheSupported;
    size_t sharedMemPerMultiprocessor;
    int regsPerMultiprocessor, managedMemory, isMultiGpuBoard, multiGpuBoardGroupID;
    int hostNativeAtomicSupported;
#if EBB_CUDART == 12
    int singleToDoublePrecisionPerfRatio;
#endif
    int pageableMemoryAccess, concurrentManagedAccess, computePreemptionSupported;
    int canUseHostPointerForRegisteredMem, cooperativeLaunch;
#if EBB_CUDART == 12
    int cooperativeMultiDeviceLaunch;
#endif
    size_t sharedMemPerBlockOptin;
    int pageableMemoryAccessUsesHostPageTables, directManagedMemAccessFromHost;
    int maxBlocksPerMultiProcessor, accessPolicyMaxWindowSize;
    size_t reservedSharedMemPerBlock;
    int hostRegisterSupported, sparseCudaArraySupported, hostRegisterReadOnlySupported;
    int timelineSemaphoreInteropSupported, memoryPoolsSupported, gpuDirectRDMASupported;
    unsigned gpuDirectRDMAFlushWritesOptions;
    int gpuDirectRDMAWritesOrdering;
    unsigned memoryPoolSupportedHandleTypes;
    int deferredMappingCudaArraySupported, ipcEventSupported, clusterLaunch;
    int unifiedFunctionPointers;
#if EBB_CUDART == 12
    int reserved[63];
#else
    int deviceNumaConfig, deviceNumaId, mpsEnabled, hostNumaId;
    unsigned gpuPciDeviceID, gpuPciSubsystemID;
    int hostNumaMultinodeIpcSupported;
    int reserved[56];
#endif
} cudaDeviceProp;

/* X(field, in 12, in 13): where NVIDIA's headers have what they have not in the same place. */
#define RT_OFFSETS(X)                                                                              \
    X(multiProcessorCount, 388, 384)                                                               \
    X(maxTexture1D, 408, 396)                                                                      \
    X(maxTexture2D, 420, 404)                                                                      \
    X(surfaceAlignment, 568, 552)                                                                  \
    X(pciBusID, 584, 568)                                                                          \
    X(l2CacheSize, 616, 596)                                                                       \
    X(sharedMemPerMultiprocessor, 640, 624)                                                        \
    X(pageableMemoryAccess, 672, 652)                                                              \
    X(sharedMemPerBlockOptin, 696, 672)                                                            \
    X(reservedSharedMemPerBlock, 720, 696)                                                         \
    X(hostRegisterSupported, 728, 704)                                                             \
    X(memoryPoolsSupported, 744, 720)                                                              \
    X(unifiedFunctionPointers, 776, 752)
#define RT_OFFSET(field, in12, in13)                                                               \
    _Static_assert(offsetof(cudaDeviceProp, field) == (EBB_CUDART == 12 ? (in12) : (in13)),        \
                   "layout of cudaDeviceProp");
RT_OFFSETS(RT_OFFSET)
#undef RT_OFFSET
_Static_assert(offsetof(cudaDeviceProp, totalGlobalMem) == 288, "layout of cudaDeviceProp");
_Static_assert(offsetof(cudaDeviceProp, textureAlignment) == 368, "layout of cudaDeviceProp");
_Static_assert(sizeof(cudaDeviceProp) == (EBB_CUDART == 12 ? 1032 : 1008), "cudaDeviceProp");
_Static_assert(sizeof(cudaPointerAttributes) == (EBB_CUDART == 12 ? 24 : 88), "cudaPointer...");
_Static_assert(sizeof(cudaFuncAttributes) == 144, "layout of cudaFuncAttributes");
_Static_assert(sizeof(cudaLaunchConfig_t) == 56, "layout of cudaLaunchConfig_t");

#endif

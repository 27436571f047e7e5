/*
 * The runtime's functions, as the simulated GPU has them. Two libraries export them: names that
 * changed their meaning between versions 12 and 13 have the form of their version.
 */
#ifndef EBB_RUNTIME_FACE_H
#define EBB_RUNTIME_FACE_H

#include "runtime_abi.h"

#define RT_API __attribute__((visibility("default")))

/* ---- runtime.c: start, errors ---- */

RT_API cudaError_t cudaGetLastError(void);
RT_API cudaError_t cudaPeekAtLastError(void);
RT_API const char *cudaGetErrorName(cudaError_t code);
RT_API const char *cudaGetErrorString(cudaError_t code);
RT_API cudaError_t cudaDriverGetVersion(int *version);
RT_API cudaError_t cudaRuntimeGetVersion(int *version);
RT_API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function,
                                                    unsigned version, unsigned long long flags,
                                                    int *status);
RT_API cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function,
                                           unsigned long long flags, int *status);
RT_API cudaError_t cudaProfilerStart(void);
RT_API cudaError_t cudaProfilerStop(void);

/* ---- device.c: devices ---- */

RT_API cudaError_t cudaGetDeviceCount(int *count);
RT_API cudaError_t cudaSetDevice(int device);
RT_API cudaError_t cudaGetDevice(int *device);
RT_API cudaError_t cudaInitDevice(int device, unsigned flags_of_device, unsigned flags);
RT_API cudaError_t cudaChooseDevice(int *device, const cudaDeviceProp *wanted);
RT_API cudaError_t cudaSetValidDevices(int *devices, int count);
RT_API cudaError_t cudaSetDeviceFlags(unsigned flags);
RT_API cudaError_t cudaGetDeviceFlags(unsigned *flags);
RT_API cudaError_t cudaDeviceSynchronize(void);
RT_API cudaError_t cudaDeviceReset(void);
RT_API cudaError_t cudaDeviceGetAttribute(int *value, int attribute, int device);
#if EBB_CUDART == 12
RT_API cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp *p, int device);
RT_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
#else
RT_API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device);
#endif
RT_API cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device);
RT_API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *text);
RT_API cudaError_t cudaDeviceSetLimit(int limit, size_t value);
RT_API cudaError_t cudaDeviceGetLimit(size_t *value, int limit);
RT_API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest);
RT_API cudaError_t cudaCtxResetPersistingL2Cache(void);
RT_API cudaError_t cudaDeviceSetCacheConfig(int config);
RT_API cudaError_t cudaDeviceGetCacheConfig(int *config);
RT_API cudaError_t cudaDeviceSetSharedMemConfig(int config);
RT_API cudaError_t cudaDeviceGetSharedMemConfig(int *config);
RT_API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer);
RT_API cudaError_t cudaDeviceGetP2PAttribute(int *value, int attribute, int device, int peer);
RT_API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags);
RT_API cudaError_t cudaDeviceDisablePeerAccess(int peer);

/* ---- memory.c: memory ---- */

RT_API cudaError_t cudaMalloc(void **out, size_t size);
RT_API cudaError_t cudaMallocManaged(void **out, size_t size, unsigned flags);
RT_API cudaError_t cudaMallocPitch(void **out, size_t *pitch, size_t width, size_t height);
RT_API cudaError_t cudaFree(void *pointer);
RT_API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total);
RT_API cudaError_t cudaHostAlloc(void **out, size_t size, unsigned flags);
RT_API cudaError_t cudaMallocHost(void **out, size_t size);
RT_API cudaError_t cudaFreeHost(void *pointer);
RT_API cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags);
RT_API cudaError_t cudaHostUnregister(void *pointer);
RT_API cudaError_t cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags);
RT_API cudaError_t cudaHostGetFlags(unsigned *flags, void *pointer);
RT_API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *pointer);
RT_API cudaError_t cudaMallocAsync(void **out, size_t size, cudaStream_t stream);
RT_API cudaError_t cudaMallocFromPoolAsync(void **out, size_t size, cudaMemPool_t pool,
                                           cudaStream_t stream);
RT_API cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream);
RT_API cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device);
RT_API cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device);
RT_API cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool);
RT_API cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const cudaMemPoolProps *properties);
RT_API cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool);
RT_API cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep);
RT_API cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, int attribute, void *value);
RT_API cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, int attribute, void *value);
RT_API cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc *access,
                                        size_t count);
RT_API cudaError_t cudaMemPoolGetAccess(int *flags, cudaMemPool_t pool, cudaMemLocation *location);
RT_API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer);
RT_API cudaError_t cudaIpcOpenMemHandle(void **out, cudaIpcMemHandle_t handle, unsigned flags);
RT_API cudaError_t cudaIpcCloseMemHandle(void *pointer);
RT_API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event);
RT_API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle);

/* ---- copy.c: copies ---- */

RT_API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind,
                                   cudaStream_t stream);
RT_API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind);
RT_API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device,
                                       size_t size, cudaStream_t stream);
RT_API cudaError_t cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device,
                                  size_t size);
RT_API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream);
RT_API cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                                size_t width, size_t height, cudaMemcpyKind kind);
RT_API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream);
RT_API cudaError_t cudaMemset(void *to, int value, size_t size);
RT_API cudaError_t cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height,
                                     cudaStream_t stream);
RT_API cudaError_t cudaMemset2D(void *to, size_t pitch, int value, size_t width, size_t height);

/* ---- stream.c: streams, events, captures, graphs ---- */

RT_API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority);
RT_API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags);
RT_API cudaError_t cudaStreamCreate(cudaStream_t *stream);
RT_API cudaError_t cudaStreamDestroy(cudaStream_t stream);
RT_API cudaError_t cudaStreamQuery(cudaStream_t stream);
RT_API cudaError_t cudaStreamSynchronize(cudaStream_t stream);
RT_API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
RT_API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority);
RT_API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags);
RT_API cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id);
RT_API cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device);
RT_API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data);
RT_API cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function,
                                         void *data, unsigned flags);
RT_API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags);
RT_API cudaError_t cudaEventCreate(cudaEvent_t *event);
RT_API cudaError_t cudaEventDestroy(cudaEvent_t event);
RT_API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
RT_API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags);
RT_API cudaError_t cudaEventQuery(cudaEvent_t event);
RT_API cudaError_t cudaEventSynchronize(cudaEvent_t event);
RT_API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end);
#if EBB_CUDART == 12
RT_API cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t start, cudaEvent_t end);
#endif
RT_API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode);
RT_API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph);
RT_API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status);
RT_API cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode);
#if EBB_CUDART == 12
RT_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status,
                                            unsigned long long *id);
RT_API cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **nodes, size_t *count);
RT_API cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, int *status,
                                               unsigned long long *id, cudaGraph_t *graph,
                                               const cudaGraphNode_t **nodes,
                                               const cudaGraphEdgeData **edges, size_t *count);
RT_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                       size_t count, unsigned flags);
RT_API cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t stream,
                                                          cudaGraphNode_t *nodes,
                                                          const cudaGraphEdgeData *edges,
                                                          size_t count, unsigned flags);
RT_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                                size_t *count);
RT_API cudaError_t cudaGraphNodeGetDependencies_v2(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                                   cudaGraphEdgeData *edges, size_t *count);
#else
RT_API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status,
                                            unsigned long long *id, cudaGraph_t *graph,
                                            const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *count);
RT_API cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                       const cudaGraphEdgeData *edges, size_t count,
                                                       unsigned flags);
RT_API cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                                cudaGraphEdgeData *edges, size_t *count);
#endif
RT_API cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags);
RT_API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                                 unsigned long long flags);
RT_API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph,
                                        unsigned long long flags);
RT_API cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *exec, cudaGraph_t graph,
                                                  cudaGraphInstantiateParams *parameters);
RT_API cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream);
RT_API cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream);
RT_API cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t exec, unsigned long long *flags);
RT_API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec);
RT_API cudaError_t cudaGraphDestroy(cudaGraph_t graph);
RT_API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);
RT_API cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count);
RT_API cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, int *type);
RT_API cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags);

/* ---- launch.c: kernels and variables ---- */

RT_API void **__cudaRegisterFatBinary(void *binary);
RT_API void __cudaRegisterFatBinaryEnd(void **handle);
RT_API void __cudaUnregisterFatBinary(void **handle);
RT_API char __cudaInitModule(void **handle);
RT_API void __cudaRegisterFunction(void **handle, const char *function, char *device_function,
                                   const char *name, int thread_limit, void *thread, void *block,
                                   dim3 *block_dim, dim3 *grid_dim, int *warp);
RT_API void __cudaRegisterVar(void **handle, char *host, char *device_address, const char *name,
                              int external, size_t size, int constant, int global);
RT_API cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream);
RT_API cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                               void **arguments, size_t shared,
                                               cudaStream_t stream);
RT_API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                       void **arguments);
RT_API cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block,
                                      void **arguments, size_t shared, cudaStream_t stream);
RT_API cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t function, dim3 grid, dim3 block,
                                           void **arguments, size_t shared, cudaStream_t stream);
RT_API cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function);
RT_API cudaError_t cudaGetKernel(cudaKernel_t *out, const void *function);
RT_API cudaError_t cudaGetFuncBySymbol(cudaKernel_t *out, const void *function);
RT_API cudaError_t cudaFuncGetName(const char **name, const void *function);
RT_API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream);
RT_API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared,
                                              void *stream);
RT_API cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *function);
RT_API cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value);
RT_API cudaError_t cudaFuncSetCacheConfig(const void *function, int config);
RT_API cudaError_t cudaFuncSetSharedMemConfig(const void *function, int config);
RT_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                          const void *function,
                                                                          int block, size_t shared,
                                                                          unsigned flags);
RT_API cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                                 int block, size_t shared);
RT_API cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *function,
                                                             int blocks, int block);
RT_API cudaError_t cudaGetSymbolAddress(void **out, const void *symbol);
RT_API cudaError_t cudaGetSymbolSize(size_t *out, const void *symbol);
RT_API cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t count,
                                      size_t offset, cudaMemcpyKind kind);
RT_API cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t count,
                                           size_t offset, cudaMemcpyKind kind, cudaStream_t stream);
RT_API cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t count, size_t offset,
                                        cudaMemcpyKind kind);
RT_API cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t count,
                                             size_t offset, cudaMemcpyKind kind,
                                             cudaStream_t stream);

#endif

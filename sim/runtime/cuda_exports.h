/*
 * What libcuda.so.1's face exports: every function of the simulated driver, under the name the real
 * library has for it. X(name, parameters, arguments)
 */
#ifndef EBB_CUDA_EXPORTS_H
#define EBB_CUDA_EXPORTS_H

#define CUDA_EXPORTS(X)                                                                            \
    X(cuGetProcAddress_v2,                                                                         \
      (const char *symbol, void **function, int version, uint64_t flags,                           \
       CUdriverProcAddressQueryResult *status),                                                    \
      (symbol, function, version, flags, status))                                                  \
    X(cuGetErrorName, (CUresult code, const char **name), (code, name))                            \
    X(cuGetErrorString, (CUresult code, const char **text), (code, text))                          \
    X(cuInit, (unsigned flags), (flags))                                                           \
    X(cuDriverGetVersion, (int *version), (version))                                               \
    X(cuDeviceGetCount, (int *count), (count))                                                     \
    X(cuDeviceGet, (CUdevice * device, int ordinal), (device, ordinal))                            \
    X(cuDeviceGetName, (char *name, int length, CUdevice device), (name, length, device))          \
    X(cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice device), (uuid, device))                        \
    X(cuDeviceTotalMem_v2, (size_t * bytes, CUdevice device), (bytes, device))                     \
    X(cuDeviceGetAttribute, (int *value, CUdevice_attribute attribute, CUdevice device),           \
      (value, attribute, device))                                                                  \
    X(cuDeviceCanAccessPeer, (int *can, CUdevice device, CUdevice peer), (can, device, peer))      \
    X(cuDevicePrimaryCtxRetain, (CUcontext * context, CUdevice device), (context, device))         \
    X(cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device))                                   \
    X(cuDevicePrimaryCtxGetState, (CUdevice device, unsigned *flags, int *active),                 \
      (device, flags, active))                                                                     \
    X(cuCtxPushCurrent_v2, (CUcontext context), (context))                                         \
    X(cuCtxPopCurrent_v2, (CUcontext * context), (context))                                        \
    X(cuCtxGetCurrent, (CUcontext * context), (context))                                           \
    X(cuCtxSetCurrent, (CUcontext context), (context))                                             \
    X(cuCtxGetDevice, (CUdevice * device), (device))                                               \
    X(cuCtxSynchronize, (void), ())                                                                \
    X(cuCtxRecordEvent, (CUcontext context, CUevent event), (context, event))                      \
    X(cuMemGetInfo_v2, (size_t * free, size_t * total), (free, total))                             \
    X(cuMemAddressReserve,                                                                         \
      (CUdeviceptr * address, size_t size, size_t alignment, CUdeviceptr hint,                     \
       unsigned long long flags),                                                                  \
      (address, size, alignment, hint, flags))                                                     \
    X(cuMemAddressFree, (CUdeviceptr address, size_t size), (address, size))                       \
    X(cuMemCreate,                                                                                 \
      (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp *properties,  \
       unsigned long long flags),                                                                  \
      (handle, size, properties, flags))                                                           \
    X(cuMemRelease, (CUmemGenericAllocationHandle handle), (handle))                               \
    X(cuMemMap,                                                                                    \
      (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,       \
       unsigned long long flags),                                                                  \
      (address, size, offset, handle, flags))                                                      \
    X(cuMemUnmap, (CUdeviceptr address, size_t size), (address, size))                             \
    X(cuMemSetAccess,                                                                              \
      (CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count),             \
      (address, size, access, count))                                                              \
    X(cuMemGetAccess,                                                                              \
      (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address),             \
      (flags, location, address))                                                                  \
    X(cuMemGetAllocationGranularity,                                                               \
      (size_t * granularity, const CUmemAllocationProp *properties, int option),                   \
      (granularity, properties, option))                                                           \
    X(cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle * handle, void *address),         \
      (handle, address))                                                                           \
    X(cuMemGetAllocationPropertiesFromHandle,                                                      \
      (CUmemAllocationProp * properties, CUmemGenericAllocationHandle handle),                     \
      (properties, handle))                                                                        \
    X(cuMemExportToShareableHandle,                                                                \
      (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags),  \
      (shareable, handle, type, flags))                                                            \
    X(cuMemImportFromShareableHandle,                                                              \
      (CUmemGenericAllocationHandle * handle, void *shareable, int type),                          \
      (handle, shareable, type))                                                                   \
    X(cuMemAlloc_v2, (CUdeviceptr * address, size_t size), (address, size))                        \
    X(cuMemFree_v2, (CUdeviceptr address), (address))                                              \
    X(cuPointerGetAttribute, (void *value, CUpointer_attribute attribute, CUdeviceptr address),    \
      (value, attribute, address))                                                                 \
    X(cuMemHostAlloc, (void **address, size_t size, unsigned flags), (address, size, flags))       \
    X(cuMemFreeHost, (void *address), (address))                                                   \
    X(cuMemHostRegister_v2, (void *address, size_t size, unsigned flags), (address, size, flags))  \
    X(cuMemHostUnregister, (void *address), (address))                                             \
    X(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t size, CUstream stream),      \
      (to, from, size, stream))                                                                    \
    X(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t size, CUstream stream),            \
      (to, from, size, stream))                                                                    \
    X(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),      \
      (to, from, size, stream))                                                                    \
    X(cuMemcpyPeerAsync,                                                                           \
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,             \
       size_t size, CUstream stream),                                                              \
      (to, to_context, from, from_context, size, stream))                                          \
    X(cuMemsetD8Async, (CUdeviceptr to, unsigned char value, size_t count, CUstream stream),       \
      (to, value, count, stream))                                                                  \
    X(cuMemsetD32Async, (CUdeviceptr to, unsigned value, size_t count, CUstream stream),           \
      (to, value, count, stream))                                                                  \
    X(cuStreamCreate, (CUstream * stream, unsigned flags), (stream, flags))                        \
    X(cuStreamCreateWithPriority, (CUstream * stream, unsigned flags, int priority),               \
      (stream, flags, priority))                                                                   \
    X(cuStreamDestroy_v2, (CUstream stream), (stream))                                             \
    X(cuStreamQuery, (CUstream stream), (stream))                                                  \
    X(cuStreamSynchronize, (CUstream stream), (stream))                                            \
    X(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), (stream, event, flags)) \
    X(cuStreamGetCtx, (CUstream stream, CUcontext * context), (stream, context))                   \
    X(cuStreamWaitValue32_v2,                                                                      \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags),                      \
      (stream, address, value, flags))                                                             \
    X(cuStreamWriteValue32_v2,                                                                     \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags),                      \
      (stream, address, value, flags))                                                             \
    X(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data),                          \
      (stream, function, data))                                                                    \
    X(cuEventCreate, (CUevent * event, unsigned flags), (event, flags))                            \
    X(cuEventDestroy_v2, (CUevent event), (event))                                                 \
    X(cuEventRecord, (CUevent event, CUstream stream), (event, stream))                            \
    X(cuEventQuery, (CUevent event), (event))                                                      \
    X(cuEventSynchronize, (CUevent event), (event))                                                \
    X(cuEventElapsedTime, (float *milliseconds, CUevent start, CUevent end),                       \
      (milliseconds, start, end))                                                                  \
    X(cuIpcGetEventHandle, (CUipcEventHandle * handle, CUevent event), (handle, event))            \
    X(cuIpcOpenEventHandle, (CUevent * event, CUipcEventHandle handle), (event, handle))           \
    X(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))        \
    X(cuStreamEndCapture, (CUstream stream, CUgraph * graph), (stream, graph))                     \
    X(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus * status), (stream, status))    \
    X(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode * mode), (mode))                     \
    X(cuGraphInstantiateWithFlags, (CUgraphExec * exec, CUgraph graph, unsigned long long flags),  \
      (exec, graph, flags))                                                                        \
    X(cuGraphLaunch, (CUgraphExec exec, CUstream stream), (exec, stream))                          \
    X(cuGraphExecDestroy, (CUgraphExec exec), (exec))                                              \
    X(cuGraphDestroy, (CUgraph graph), (graph))                                                    \
    X(cuGetProcAddress, (const char *symbol, void **function, int version, uint64_t flags),        \
      (symbol, function, version, flags))                                                          \
    X(cuDeviceGetP2PAttribute, (int *value, int attribute, CUdevice device, CUdevice peer),        \
      (value, attribute, device, peer))                                                            \
    X(cuDeviceGetPCIBusId, (char *text, int length, CUdevice device), (text, length, device))      \
    X(cuDeviceGetByPCIBusId, (CUdevice * device, const char *text), (device, text))                \
    X(cuDeviceGetDefaultMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device))           \
    X(cuDeviceGetMemPool, (CUmemoryPool * pool, CUdevice device), (pool, device))                  \
    X(cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool), (device, pool))                    \
    X(cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest))                 \
    X(cuCtxGetLimit, (size_t * value, int limit), (value, limit))                                  \
    X(cuCtxSetLimit, (int limit, size_t value), (limit, value))                                    \
    X(cuCtxGetFlags, (unsigned *flags), (flags))                                                   \
    X(cuCtxResetPersistingL2Cache, (void), ())                                                     \
    X(cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags))                      \
    X(cuCtxDisablePeerAccess, (CUcontext peer), (peer))                                            \
    X(cuMemGetAddressRange_v2, (CUdeviceptr * base, size_t * size, CUdeviceptr address),           \
      (base, size, address))                                                                       \
    X(cuIpcGetMemHandle, (CUipcMemHandle * handle, CUdeviceptr address), (handle, address))        \
    X(cuIpcOpenMemHandle_v2, (CUdeviceptr * address, CUipcMemHandle handle, unsigned flags),       \
      (address, handle, flags))                                                                    \
    X(cuIpcCloseMemHandle, (CUdeviceptr address), (address))                                       \
    X(cuMemAllocAsync, (CUdeviceptr * address, size_t size, CUstream stream),                      \
      (address, size, stream))                                                                     \
    X(cuMemAllocFromPoolAsync,                                                                     \
      (CUdeviceptr * address, size_t size, CUmemoryPool pool, CUstream stream),                    \
      (address, size, pool, stream))                                                               \
    X(cuMemFreeAsync, (CUdeviceptr address, CUstream stream), (address, stream))                   \
    X(cuMemPoolCreate, (CUmemoryPool * pool, const CUmemPoolProps *properties),                    \
      (pool, properties))                                                                          \
    X(cuMemPoolDestroy, (CUmemoryPool pool), (pool))                                               \
    X(cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep))                             \
    X(cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value),      \
      (pool, attribute, value))                                                                    \
    X(cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value),      \
      (pool, attribute, value))                                                                    \
    X(cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count),        \
      (pool, access, count))                                                                       \
    X(cuMemPoolGetAccess, (int *flags, CUmemoryPool pool, CUmemLocation *location),                \
      (flags, pool, location))                                                                     \
    X(cuPointerGetAttributes,                                                                      \
      (unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr address),       \
      (count, attributes, values, address))                                                        \
    X(cuMemHostGetDevicePointer_v2, (CUdeviceptr * out, void *address, unsigned flags),            \
      (out, address, flags))                                                                       \
    X(cuMemHostGetFlags, (unsigned *flags, void *address), (flags, address))                       \
    X(cuMemcpyAsync, (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),             \
      (to, from, size, stream))                                                                    \
    X(cuMemcpyHtoD_v2, (CUdeviceptr to, const void *from, size_t size), (to, from, size))          \
    X(cuMemcpyDtoH_v2, (void *to, CUdeviceptr from, size_t size), (to, from, size))                \
    X(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t size), (to, from, size))          \
    X(cuMemcpy, (CUdeviceptr to, CUdeviceptr from, size_t size), (to, from, size))                 \
    X(cuMemcpyPeer,                                                                                \
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,             \
       size_t size),                                                                               \
      (to, to_context, from, from_context, size))                                                  \
    X(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *copy, CUstream stream), (copy, stream))            \
    X(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *copy), (copy))                                          \
    X(cuMemsetD8_v2, (CUdeviceptr to, unsigned char value, size_t count), (to, value, count))      \
    X(cuMemsetD32_v2, (CUdeviceptr to, unsigned value, size_t count), (to, value, count))          \
    X(cuMemsetD2D8Async,                                                                           \
      (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,             \
       CUstream stream),                                                                           \
      (to, pitch, value, width, height, stream))                                                   \
    X(cuStreamGetPriority, (CUstream stream, int *priority), (stream, priority))                   \
    X(cuStreamGetFlags, (CUstream stream, unsigned *flags), (stream, flags))                       \
    X(cuStreamGetId, (CUstream stream, unsigned long long *id), (stream, id))                      \
    X(cuStreamGetDevice, (CUstream stream, CUdevice * device), (stream, device))                   \
    X(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags),                    \
      (event, stream, flags))                                                                      \
    X(cuStreamGetCaptureInfo, (CUstream stream, CUstreamCaptureStatus * status, uint64_t * id),    \
      (stream, status, id))                                                                        \
    X(cuStreamGetCaptureInfo_v2,                                                                   \
      (CUstream stream, CUstreamCaptureStatus * status, uint64_t * id, CUgraph * graph,            \
       const CUgraphNode **nodes, size_t *count),                                                  \
      (stream, status, id, graph, nodes, count))                                                   \
    X(cuStreamGetCaptureInfo_v3,                                                                   \
      (CUstream stream, CUstreamCaptureStatus * status, uint64_t * id, CUgraph * graph,            \
       const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count),                   \
      (stream, status, id, graph, nodes, edges, count))                                            \
    X(cuStreamUpdateCaptureDependencies,                                                           \
      (CUstream stream, CUgraphNode * nodes, size_t count, unsigned flags),                        \
      (stream, nodes, count, flags))                                                               \
    X(cuStreamUpdateCaptureDependencies_v2,                                                        \
      (CUstream stream, CUgraphNode * nodes, const CUgraphEdgeData *edges, size_t count,           \
       unsigned flags),                                                                            \
      (stream, nodes, edges, count, flags))                                                        \
    X(cuGraphCreate, (CUgraph * graph, unsigned flags), (graph, flags))                            \
    X(cuGraphInstantiateWithParams,                                                                \
      (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS * parameters),             \
      (exec, graph, parameters))                                                                   \
    X(cuGraphUpload, (CUgraphExec exec, CUstream stream), (exec, stream))                          \
    X(cuGraphExecGetFlags, (CUgraphExec exec, unsigned long long *flags), (exec, flags))           \
    X(cuGraphGetNodes, (CUgraph graph, CUgraphNode * nodes, size_t * count),                       \
      (graph, nodes, count))                                                                       \
    X(cuGraphGetRootNodes, (CUgraph graph, CUgraphNode * nodes, size_t * count),                   \
      (graph, nodes, count))                                                                       \
    X(cuGraphNodeGetDependencies, (CUgraphNode node, CUgraphNode * nodes, size_t * count),         \
      (node, nodes, count))                                                                        \
    X(cuGraphNodeGetDependencies_v2,                                                               \
      (CUgraphNode node, CUgraphNode * nodes, CUgraphEdgeData * edges, size_t * count),            \
      (node, nodes, edges, count))                                                                 \
    X(cuGraphNodeGetType, (CUgraphNode node, int *type), (node, type))                             \
    X(cuGraphDebugDotPrint, (CUgraph graph, const char *path, unsigned flags), (graph, path, flags))

/*
 * Names without a version, that whoever looks a function up by dlsym asks for (PyTorch 2.6 does).
 * X(name, the function that it is today, parameters, arguments)
 */
#define CUDA_OLDER(X)                                                                              \
    X(cuStreamWaitValue32, cuStreamWaitValue32_v2,                                                 \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags),                      \
      (stream, address, value, flags))                                                             \
    X(cuStreamWriteValue32, cuStreamWriteValue32_v2,                                               \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags),                      \
      (stream, address, value, flags))

/* There by name only: nothing here runs device code. */
#define CUDA_UNSIMULATED(X)                                                                        \
    X(cuModuleLoad)                                                                                \
    X(cuModuleLoadData)                                                                            \
    X(cuModuleLoadDataEx)                                                                          \
    X(cuModuleLoadFatBinary)                                                                       \
    X(cuModuleUnload)                                                                              \
    X(cuModuleGetFunction)                                                                         \
    X(cuModuleGetGlobal_v2)                                                                        \
    X(cuModuleGetLoadingMode)                                                                      \
    X(cuLibraryLoadData)                                                                           \
    X(cuLibraryUnload)                                                                             \
    X(cuLibraryGetKernel)                                                                          \
    X(cuLibraryGetModule)                                                                          \
    X(cuKernelGetFunction)                                                                         \
    X(cuLaunchKernel)                                                                              \
    X(cuLaunchKernelEx)                                                                            \
    X(cuLaunchCooperativeKernel)                                                                   \
    X(cuLinkCreate_v2)                                                                             \
    X(cuLinkAddData_v2)                                                                            \
    X(cuLinkAddFile_v2)                                                                            \
    X(cuLinkComplete)                                                                              \
    X(cuLinkDestroy)                                                                               \
    X(cuFuncGetAttribute)                                                                          \
    X(cuFuncSetAttribute)                                                                          \
    X(cuFuncSetCacheConfig)                                                                        \
    X(cuFuncGetModule)                                                                             \
    X(cuFuncLoad)                                                                                  \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor)                                                 \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)                                        \
    X(cuOccupancyMaxActiveClusters)                                                                \
    X(cuOccupancyMaxPotentialBlockSize)                                                            \
    X(cuTensorMapEncodeTiled)                                                                      \
    X(cuTensorMapEncodeIm2col)                                                                     \
    X(cuGetExportTable)                                                                            \
    X(cuCtxCreate_v2)                                                                              \
    X(cuCtxDestroy_v2)                                                                             \
    X(cuMemAllocManaged)                                                                           \
    X(cuMemAllocPitch_v2)

#endif

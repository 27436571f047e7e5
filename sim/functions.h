/*
 * Every function the simulated driver has: the name cuGetProcAddress is asked for, the version that
 * brought this form, our symbol, what the call costs on an H200 in nanoseconds (for the virtual
 * clock), and what it needs:
 *
 *   ANY      nothing, not even cuInit
 *   INIT     cuInit. A call that names a stream takes the stream's context
 *   GUARDED  as INIT, and no capture that forbids it
 *   CTX      a current context that is well
 *   UNSAFE   as CTX, and no capture that forbids it
 */
#ifndef EBB_SIM_FUNCTIONS_H
#define EBB_SIM_FUNCTIONS_H

#define SIM_FUNCTIONS(X)                                                                           \
    X("cuGetErrorName", 6000, cuGetErrorName, 5, ANY)                                              \
    X("cuGetErrorString", 6000, cuGetErrorString, 5, ANY)                                          \
    X("cuGetProcAddress", 11030, cuGetProcAddress, 100, ANY)                                       \
    X("cuGetProcAddress", 12000, cuGetProcAddress_v2, 100, ANY)                                    \
    X("cuInit", 2000, cuInit, 1000, ANY)                                                           \
    X("cuDriverGetVersion", 2020, cuDriverGetVersion, 5, ANY)                                      \
    X("cuDeviceGetCount", 2000, cuDeviceGetCount, 5, INIT)                                         \
    X("cuDeviceGet", 2000, cuDeviceGet, 5, INIT)                                                   \
    X("cuDeviceGetName", 2000, cuDeviceGetName, 50, INIT)                                          \
    X("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2, 50, INIT)                                      \
    X("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2, 50, INIT)                                     \
    X("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute, 20, INIT)                                \
    X("cuDeviceCanAccessPeer", 4000, cuDeviceCanAccessPeer, 50, INIT)                              \
    X("cuDeviceGetP2PAttribute", 8000, cuDeviceGetP2PAttribute, 50, INIT)                          \
    X("cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId, 100, INIT)                                 \
    X("cuDeviceGetByPCIBusId", 4010, cuDeviceGetByPCIBusId, 100, INIT)                             \
    X("cuDeviceGetDefaultMemPool", 11020, cuDeviceGetDefaultMemPool, 100, INIT)                    \
    X("cuDeviceGetMemPool", 11020, cuDeviceGetMemPool, 100, INIT)                                  \
    X("cuDeviceSetMemPool", 11020, cuDeviceSetMemPool, 100, GUARDED)                               \
    X("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain, 60, INIT)                        \
    X("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2, 60, INIT)                  \
    X("cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState, 60, INIT)                    \
    X("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2, 32, INIT)                                     \
    X("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2, 31, INIT)                                       \
    X("cuCtxGetCurrent", 4000, cuCtxGetCurrent, 10, INIT)                                          \
    X("cuCtxSetCurrent", 4000, cuCtxSetCurrent, 32, INIT)                                          \
    X("cuCtxGetDevice", 2000, cuCtxGetDevice, 10, INIT)                                            \
    X("cuCtxSynchronize", 2000, cuCtxSynchronize, 500, CTX)                                        \
    X("cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange, 50, CTX)                   \
    X("cuCtxGetLimit", 3010, cuCtxGetLimit, 100, CTX)                                              \
    X("cuCtxSetLimit", 3010, cuCtxSetLimit, 10000, CTX)                                            \
    X("cuCtxGetFlags", 7000, cuCtxGetFlags, 50, CTX)                                               \
    X("cuCtxResetPersistingL2Cache", 11000, cuCtxResetPersistingL2Cache, 1000, CTX)                \
    X("cuCtxEnablePeerAccess", 4000, cuCtxEnablePeerAccess, 100000, UNSAFE)                        \
    X("cuCtxDisablePeerAccess", 4000, cuCtxDisablePeerAccess, 100000, UNSAFE)                      \
    X("cuCtxRecordEvent", 12050, cuCtxRecordEvent, 700, INIT)                                      \
    X("cuMemGetInfo", 3020, cuMemGetInfo_v2, 5900, CTX)                                            \
    X("cuMemAddressReserve", 10020, cuMemAddressReserve, 17000, INIT)                              \
    X("cuMemAddressFree", 10020, cuMemAddressFree, 5000, INIT)                                     \
    X("cuMemCreate", 10020, cuMemCreate, 14000, INIT)                                              \
    X("cuMemRelease", 10020, cuMemRelease, 35000, INIT)                                            \
    X("cuMemMap", 10020, cuMemMap, 1200, INIT)                                                     \
    X("cuMemUnmap", 10020, cuMemUnmap, 20000, INIT)                                                \
    X("cuMemSetAccess", 10020, cuMemSetAccess, 30000, INIT)                                        \
    X("cuMemGetAccess", 10020, cuMemGetAccess, 500, INIT)                                          \
    X("cuMemGetAllocationGranularity", 10020, cuMemGetAllocationGranularity, 100, INIT)            \
    X("cuMemRetainAllocationHandle", 11000, cuMemRetainAllocationHandle, 500, INIT)                \
    X("cuMemGetAllocationPropertiesFromHandle", 10020, cuMemGetAllocationPropertiesFromHandle,     \
      200, INIT)                                                                                   \
    X("cuMemExportToShareableHandle", 10020, cuMemExportToShareableHandle, 39000, INIT)            \
    X("cuMemImportFromShareableHandle", 10020, cuMemImportFromShareableHandle, 31000, INIT)        \
    X("cuMemAlloc", 3020, cuMemAlloc_v2, 60000, UNSAFE)                                            \
    X("cuMemFree", 3020, cuMemFree_v2, 100000, GUARDED)                                            \
    X("cuMemGetAddressRange", 3020, cuMemGetAddressRange_v2, 200, CTX)                             \
    X("cuIpcGetMemHandle", 4010, cuIpcGetMemHandle, 10000, CTX)                                    \
    X("cuIpcOpenMemHandle", 11000, cuIpcOpenMemHandle_v2, 100000, UNSAFE)                          \
    X("cuIpcCloseMemHandle", 4010, cuIpcCloseMemHandle, 100000, UNSAFE)                            \
    X("cuMemAllocAsync", 11020, cuMemAllocAsync, 1000, INIT)                                       \
    X("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync, 1000, INIT)                       \
    X("cuMemFreeAsync", 11020, cuMemFreeAsync, 800, INIT)                                          \
    X("cuMemPoolCreate", 11020, cuMemPoolCreate, 10000, GUARDED)                                   \
    X("cuMemPoolDestroy", 11020, cuMemPoolDestroy, 50000, GUARDED)                                 \
    X("cuMemPoolTrimTo", 11020, cuMemPoolTrimTo, 50000, GUARDED)                                   \
    X("cuMemPoolGetAttribute", 11020, cuMemPoolGetAttribute, 100, GUARDED)                         \
    X("cuMemPoolSetAttribute", 11020, cuMemPoolSetAttribute, 100, GUARDED)                         \
    X("cuMemPoolSetAccess", 11020, cuMemPoolSetAccess, 30000, GUARDED)                             \
    X("cuMemPoolGetAccess", 11020, cuMemPoolGetAccess, 100, GUARDED)                               \
    X("cuPointerGetAttribute", 4000, cuPointerGetAttribute, 200, INIT)                             \
    X("cuPointerGetAttributes", 7000, cuPointerGetAttributes, 100, INIT)                           \
    X("cuMemHostAlloc", 2020, cuMemHostAlloc, 50000, UNSAFE)                                       \
    X("cuMemFreeHost", 2000, cuMemFreeHost, 50000, GUARDED)                                        \
    X("cuMemHostRegister", 6050, cuMemHostRegister_v2, 50000, UNSAFE)                              \
    X("cuMemHostUnregister", 4000, cuMemHostUnregister, 50000, GUARDED)                            \
    X("cuMemHostGetDevicePointer", 3020, cuMemHostGetDevicePointer_v2, 200, CTX)                   \
    X("cuMemHostGetFlags", 2030, cuMemHostGetFlags, 200, CTX)                                      \
    X("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2, 1500, INIT)                                 \
    X("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2, 1500, INIT)                                 \
    X("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2, 1500, INIT)                                 \
    X("cuMemcpyPeerAsync", 4000, cuMemcpyPeerAsync, 1500, INIT)                                    \
    X("cuMemcpyAsync", 4000, cuMemcpyAsync, 1500, INIT)                                            \
    X("cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2, 1500, CTX)                                            \
    X("cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2, 1500, CTX)                                            \
    X("cuMemcpyDtoD", 3020, cuMemcpyDtoD_v2, 1500, CTX)                                            \
    X("cuMemcpy", 4000, cuMemcpy, 1500, CTX)                                                       \
    X("cuMemcpyPeer", 4000, cuMemcpyPeer, 1500, CTX)                                               \
    X("cuMemcpy2DAsync", 3020, cuMemcpy2DAsync_v2, 2000, INIT)                                     \
    X("cuMemcpy2D", 3020, cuMemcpy2D_v2, 2000, CTX)                                                \
    X("cuMemsetD8Async", 3020, cuMemsetD8Async, 1500, INIT)                                        \
    X("cuMemsetD32Async", 3020, cuMemsetD32Async, 1500, INIT)                                      \
    X("cuMemsetD8", 3020, cuMemsetD8_v2, 1500, CTX)                                                \
    X("cuMemsetD32", 3020, cuMemsetD32_v2, 1500, CTX)                                              \
    X("cuMemsetD2D8Async", 3020, cuMemsetD2D8Async, 1500, INIT)                                    \
    X("cuStreamCreate", 2000, cuStreamCreate, 5000, CTX)                                           \
    X("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority, 5000, CTX)                   \
    X("cuStreamDestroy", 4000, cuStreamDestroy_v2, 5000, INIT)                                     \
    X("cuStreamQuery", 2000, cuStreamQuery, 230, GUARDED)                                          \
    X("cuStreamSynchronize", 2000, cuStreamSynchronize, 500, GUARDED)                              \
    X("cuStreamWaitEvent", 3020, cuStreamWaitEvent, 140, INIT)                                     \
    X("cuStreamGetCtx", 9020, cuStreamGetCtx, 20, INIT)                                            \
    X("cuStreamGetPriority", 5050, cuStreamGetPriority, 20, INIT)                                  \
    X("cuStreamGetFlags", 5050, cuStreamGetFlags, 20, GUARDED)                                     \
    X("cuStreamGetId", 12000, cuStreamGetId, 20, GUARDED)                                          \
    X("cuStreamGetDevice", 12080, cuStreamGetDevice, 20, INIT)                                     \
    X("cuStreamWaitValue32", 11070, cuStreamWaitValue32_v2, 1000, INIT)                            \
    X("cuStreamWriteValue32", 11070, cuStreamWriteValue32_v2, 1000, INIT)                          \
    X("cuLaunchHostFunc", 10000, cuLaunchHostFunc, 1500, INIT)                                     \
    X("cuEventCreate", 2000, cuEventCreate, 330, CTX)                                              \
    X("cuEventDestroy", 4000, cuEventDestroy_v2, 300, INIT)                                        \
    X("cuEventRecord", 2000, cuEventRecord, 263, INIT)                                             \
    X("cuEventRecordWithFlags", 11010, cuEventRecordWithFlags, 263, INIT)                          \
    X("cuEventQuery", 2000, cuEventQuery, 230, GUARDED)                                            \
    X("cuEventSynchronize", 2000, cuEventSynchronize, 300, GUARDED)                                \
    X("cuEventElapsedTime", 2000, cuEventElapsedTime, 300, INIT)                                   \
    X("cuIpcGetEventHandle", 4010, cuIpcGetEventHandle, 1000, CTX)                                 \
    X("cuIpcOpenEventHandle", 4010, cuIpcOpenEventHandle, 10000, CTX)                              \
    X("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2, 500, INIT)                           \
    X("cuStreamEndCapture", 10000, cuStreamEndCapture, 500, INIT)                                  \
    X("cuStreamIsCapturing", 10000, cuStreamIsCapturing, 30, INIT)                                 \
    X("cuStreamGetCaptureInfo", 10010, cuStreamGetCaptureInfo, 50, INIT)                           \
    X("cuStreamGetCaptureInfo", 11030, cuStreamGetCaptureInfo_v2, 50, INIT)                        \
    X("cuStreamGetCaptureInfo", 12030, cuStreamGetCaptureInfo_v3, 50, INIT)                        \
    X("cuStreamUpdateCaptureDependencies", 11030, cuStreamUpdateCaptureDependencies, 200, INIT)    \
    X("cuStreamUpdateCaptureDependencies", 12030, cuStreamUpdateCaptureDependencies_v2, 200, INIT) \
    X("cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode, 20, INIT)     \
    X("cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags, 10000, UNSAFE)            \
    X("cuGraphLaunch", 10000, cuGraphLaunch, 5000, INIT)                                           \
    X("cuGraphExecDestroy", 10000, cuGraphExecDestroy, 1000, INIT)                                 \
    X("cuGraphDestroy", 10000, cuGraphDestroy, 1000, INIT)                                         \
    X("cuGraphCreate", 10000, cuGraphCreate, 1000, INIT)                                           \
    X("cuGraphInstantiateWithParams", 12000, cuGraphInstantiateWithParams, 10000, UNSAFE)          \
    X("cuGraphUpload", 11010, cuGraphUpload, 5000, INIT)                                           \
    X("cuGraphExecGetFlags", 12000, cuGraphExecGetFlags, 50, INIT)                                 \
    X("cuGraphGetNodes", 10000, cuGraphGetNodes, 500, INIT)                                        \
    X("cuGraphGetRootNodes", 10000, cuGraphGetRootNodes, 500, INIT)                                \
    X("cuGraphNodeGetDependencies", 10000, cuGraphNodeGetDependencies, 200, INIT)                  \
    X("cuGraphNodeGetDependencies", 12030, cuGraphNodeGetDependencies_v2, 200, INIT)               \
    X("cuGraphNodeGetType", 10000, cuGraphNodeGetType, 50, INIT)                                   \
    X("cuGraphDebugDotPrint", 11030, cuGraphDebugDotPrint, 100000, INIT)                           \
    X("ebbsim_launch", 0, ebbsim_launch, 2000, INIT)                                               \
    X("ebbsim_catch_up", 0, ebbsim_catch_up, 0, INIT)

#endif

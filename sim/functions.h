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
    X("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain, 60, INIT)                        \
    X("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2, 60, INIT)                  \
    X("cuDevicePrimaryCtxGetState", 7000, cuDevicePrimaryCtxGetState, 60, INIT)                    \
    X("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2, 32, INIT)                                     \
    X("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2, 31, INIT)                                       \
    X("cuCtxGetCurrent", 4000, cuCtxGetCurrent, 10, INIT)                                          \
    X("cuCtxSetCurrent", 4000, cuCtxSetCurrent, 32, INIT)                                          \
    X("cuCtxGetDevice", 2000, cuCtxGetDevice, 10, INIT)                                            \
    X("cuCtxSynchronize", 2000, cuCtxSynchronize, 500, CTX)                                        \
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
    X("cuPointerGetAttribute", 4000, cuPointerGetAttribute, 200, INIT)                             \
    X("cuMemHostAlloc", 2020, cuMemHostAlloc, 50000, UNSAFE)                                       \
    X("cuMemFreeHost", 2000, cuMemFreeHost, 50000, GUARDED)                                        \
    X("cuMemHostRegister", 6050, cuMemHostRegister_v2, 50000, UNSAFE)                              \
    X("cuMemHostUnregister", 4000, cuMemHostUnregister, 50000, GUARDED)                            \
    X("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2, 1500, INIT)                                 \
    X("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2, 1500, INIT)                                 \
    X("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2, 1500, INIT)                                 \
    X("cuMemcpyPeerAsync", 4000, cuMemcpyPeerAsync, 1500, INIT)                                    \
    X("cuMemsetD8Async", 3020, cuMemsetD8Async, 1500, INIT)                                        \
    X("cuMemsetD32Async", 3020, cuMemsetD32Async, 1500, INIT)                                      \
    X("cuStreamCreate", 2000, cuStreamCreate, 5000, CTX)                                           \
    X("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority, 5000, CTX)                   \
    X("cuStreamDestroy", 4000, cuStreamDestroy_v2, 5000, INIT)                                     \
    X("cuStreamQuery", 2000, cuStreamQuery, 230, GUARDED)                                          \
    X("cuStreamSynchronize", 2000, cuStreamSynchronize, 500, GUARDED)                              \
    X("cuStreamWaitEvent", 3020, cuStreamWaitEvent, 140, INIT)                                     \
    X("cuStreamGetCtx", 9020, cuStreamGetCtx, 20, INIT)                                            \
    X("cuStreamWaitValue32", 11070, cuStreamWaitValue32_v2, 1000, INIT)                            \
    X("cuStreamWriteValue32", 11070, cuStreamWriteValue32_v2, 1000, INIT)                          \
    X("cuLaunchHostFunc", 10000, cuLaunchHostFunc, 1500, INIT)                                     \
    X("cuEventCreate", 2000, cuEventCreate, 330, CTX)                                              \
    X("cuEventDestroy", 4000, cuEventDestroy_v2, 300, INIT)                                        \
    X("cuEventRecord", 2000, cuEventRecord, 263, INIT)                                             \
    X("cuEventQuery", 2000, cuEventQuery, 230, GUARDED)                                            \
    X("cuEventSynchronize", 2000, cuEventSynchronize, 300, GUARDED)                                \
    X("cuEventElapsedTime", 2000, cuEventElapsedTime, 300, INIT)                                   \
    X("cuIpcGetEventHandle", 4010, cuIpcGetEventHandle, 1000, CTX)                                 \
    X("cuIpcOpenEventHandle", 4010, cuIpcOpenEventHandle, 10000, CTX)                              \
    X("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2, 500, INIT)                           \
    X("cuStreamEndCapture", 10000, cuStreamEndCapture, 500, INIT)                                  \
    X("cuStreamIsCapturing", 10000, cuStreamIsCapturing, 30, INIT)                                 \
    X("cuThreadExchangeStreamCaptureMode", 10010, cuThreadExchangeStreamCaptureMode, 20, INIT)     \
    X("cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags, 10000, UNSAFE)            \
    X("cuGraphLaunch", 10000, cuGraphLaunch, 5000, INIT)                                           \
    X("cuGraphExecDestroy", 10000, cuGraphExecDestroy, 1000, INIT)                                 \
    X("cuGraphDestroy", 10000, cuGraphDestroy, 1000, INIT)                                         \
    X("ebbsim_launch", 0, ebbsim_launch, 2000, INIT)                                               \
    X("ebbsim_catch_up", 0, ebbsim_catch_up, 0, INIT)

#endif

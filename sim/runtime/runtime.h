/*
 * The runtime's face, inside: libcudart's functions over the simulated driver's.
 *
 * One source, two libraries (EBB_CUDART is 12 or 13). A function of the runtime is mostly one of the
 * driver: bind the thread to the primary context of its device, call, remember the error. Codes have
 * the same numbers on both sides. What the runtime adds is kept here: each thread's device and last
 * error, which contexts this library has retained, and the names of kernels and variables.
 *
 *    runtime.c    start, contexts, last error     device.c   devices, properties, limits
 *    memory.c     memory, pointers, pools, IPC    copy.c     copies, memsets
 *    stream.c     streams, events, captures, graphs
 *    launch.c     kernels and variables of the program: registered, never run
 *    variants.c   the per-thread default stream's forms    unsimulated.c   all the rest
 */
#ifndef EBB_RUNTIME_H
#define EBB_RUNTIME_H

#include <stdbool.h>

#include "driver_face.h"
#include "runtime_abi.h"
#include "runtime_face.h"

/* Which of the driver's functions are used. X(name to ask for, its form) */
#define RT_DRIVER(X)                                                                               \
    X("cuInit", cuInit)                                                                            \
    X("cuDriverGetVersion", cuDriverGetVersion)                                                    \
    X("cuDeviceGetCount", cuDeviceGetCount)                                                        \
    X("cuDeviceGetName", cuDeviceGetName)                                                          \
    X("cuDeviceGetUuid", cuDeviceGetUuid_v2)                                                       \
    X("cuDeviceTotalMem", cuDeviceTotalMem_v2)                                                     \
    X("cuDeviceGetAttribute", cuDeviceGetAttribute)                                                \
    X("cuDeviceCanAccessPeer", cuDeviceCanAccessPeer)                                              \
    X("cuDeviceGetP2PAttribute", cuDeviceGetP2PAttribute)                                          \
    X("cuDeviceGetPCIBusId", cuDeviceGetPCIBusId)                                                  \
    X("cuDeviceGetByPCIBusId", cuDeviceGetByPCIBusId)                                              \
    X("cuDeviceGetDefaultMemPool", cuDeviceGetDefaultMemPool)                                      \
    X("cuDeviceGetMemPool", cuDeviceGetMemPool)                                                    \
    X("cuDeviceSetMemPool", cuDeviceSetMemPool)                                                    \
    X("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain)                                        \
    X("cuDevicePrimaryCtxRelease", cuDevicePrimaryCtxRelease_v2)                                   \
    X("cuCtxGetCurrent", cuCtxGetCurrent)                                                          \
    X("cuCtxSetCurrent", cuCtxSetCurrent)                                                          \
    X("cuCtxGetDevice", cuCtxGetDevice)                                                            \
    X("cuCtxSynchronize", cuCtxSynchronize)                                                        \
    X("cuCtxGetStreamPriorityRange", cuCtxGetStreamPriorityRange)                                  \
    X("cuCtxGetLimit", cuCtxGetLimit)                                                              \
    X("cuCtxSetLimit", cuCtxSetLimit)                                                              \
    X("cuCtxResetPersistingL2Cache", cuCtxResetPersistingL2Cache)                                  \
    X("cuCtxEnablePeerAccess", cuCtxEnablePeerAccess)                                              \
    X("cuCtxDisablePeerAccess", cuCtxDisablePeerAccess)                                            \
    X("cuMemGetInfo", cuMemGetInfo_v2)                                                             \
    X("cuMemAlloc", cuMemAlloc_v2)                                                                 \
    X("cuMemFree", cuMemFree_v2)                                                                   \
    X("cuMemHostAlloc", cuMemHostAlloc)                                                            \
    X("cuMemFreeHost", cuMemFreeHost)                                                              \
    X("cuMemHostRegister", cuMemHostRegister_v2)                                                   \
    X("cuMemHostUnregister", cuMemHostUnregister)                                                  \
    X("cuMemHostGetDevicePointer", cuMemHostGetDevicePointer_v2)                                   \
    X("cuMemHostGetFlags", cuMemHostGetFlags)                                                      \
    X("cuPointerGetAttribute", cuPointerGetAttribute)                                              \
    X("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync_v2)                                                   \
    X("cuMemcpyDtoHAsync", cuMemcpyDtoHAsync_v2)                                                   \
    X("cuMemcpyDtoDAsync", cuMemcpyDtoDAsync_v2)                                                   \
    X("cuMemcpyAsync", cuMemcpyAsync)                                                              \
    X("cuMemcpyHtoD", cuMemcpyHtoD_v2)                                                             \
    X("cuMemcpyDtoH", cuMemcpyDtoH_v2)                                                             \
    X("cuMemcpyDtoD", cuMemcpyDtoD_v2)                                                             \
    X("cuMemcpy", cuMemcpy)                                                                        \
    X("cuMemcpyPeer", cuMemcpyPeer)                                                                \
    X("cuMemcpyPeerAsync", cuMemcpyPeerAsync)                                                      \
    X("cuMemcpy2D", cuMemcpy2D_v2)                                                                 \
    X("cuMemcpy2DAsync", cuMemcpy2DAsync_v2)                                                       \
    X("cuMemsetD8", cuMemsetD8_v2)                                                                 \
    X("cuMemsetD8Async", cuMemsetD8Async)                                                          \
    X("cuMemsetD2D8Async", cuMemsetD2D8Async)                                                      \
    X("cuMemAllocAsync", cuMemAllocAsync)                                                          \
    X("cuMemAllocFromPoolAsync", cuMemAllocFromPoolAsync)                                          \
    X("cuMemFreeAsync", cuMemFreeAsync)                                                            \
    X("cuMemPoolCreate", cuMemPoolCreate)                                                          \
    X("cuMemPoolDestroy", cuMemPoolDestroy)                                                        \
    X("cuMemPoolTrimTo", cuMemPoolTrimTo)                                                          \
    X("cuMemPoolGetAttribute", cuMemPoolGetAttribute)                                              \
    X("cuMemPoolSetAttribute", cuMemPoolSetAttribute)                                              \
    X("cuMemPoolSetAccess", cuMemPoolSetAccess)                                                    \
    X("cuMemPoolGetAccess", cuMemPoolGetAccess)                                                    \
    X("cuIpcGetMemHandle", cuIpcGetMemHandle)                                                      \
    X("cuIpcOpenMemHandle", cuIpcOpenMemHandle_v2)                                                 \
    X("cuIpcCloseMemHandle", cuIpcCloseMemHandle)                                                  \
    X("cuIpcGetEventHandle", cuIpcGetEventHandle)                                                  \
    X("cuIpcOpenEventHandle", cuIpcOpenEventHandle)                                                \
    X("cuStreamCreateWithPriority", cuStreamCreateWithPriority)                                    \
    X("cuStreamDestroy", cuStreamDestroy_v2)                                                       \
    X("cuStreamQuery", cuStreamQuery)                                                              \
    X("cuStreamSynchronize", cuStreamSynchronize)                                                  \
    X("cuStreamWaitEvent", cuStreamWaitEvent)                                                      \
    X("cuStreamGetPriority", cuStreamGetPriority)                                                  \
    X("cuStreamGetFlags", cuStreamGetFlags)                                                        \
    X("cuStreamGetId", cuStreamGetId)                                                              \
    X("cuStreamGetCtx", cuStreamGetCtx)                                                            \
    X("cuLaunchHostFunc", cuLaunchHostFunc)                                                        \
    X("cuEventCreate", cuEventCreate)                                                              \
    X("cuEventDestroy", cuEventDestroy_v2)                                                         \
    X("cuEventRecordWithFlags", cuEventRecordWithFlags)                                            \
    X("cuEventRecord", cuEventRecord)                                                              \
    X("cuEventQuery", cuEventQuery)                                                                \
    X("cuEventSynchronize", cuEventSynchronize)                                                    \
    X("cuEventElapsedTime", cuEventElapsedTime)                                                    \
    X("cuStreamBeginCapture", cuStreamBeginCapture_v2)                                             \
    X("cuStreamEndCapture", cuStreamEndCapture)                                                    \
    X("cuStreamIsCapturing", cuStreamIsCapturing)                                                  \
    X("cuStreamGetCaptureInfo", cuStreamGetCaptureInfo_v3)                                         \
    X("cuStreamUpdateCaptureDependencies", cuStreamUpdateCaptureDependencies_v2)                   \
    X("cuThreadExchangeStreamCaptureMode", cuThreadExchangeStreamCaptureMode)                      \
    X("cuGraphCreate", cuGraphCreate)                                                              \
    X("cuGraphInstantiateWithFlags", cuGraphInstantiateWithFlags)                                  \
    X("cuGraphInstantiateWithParams", cuGraphInstantiateWithParams)                                \
    X("cuGraphLaunch", cuGraphLaunch)                                                              \
    X("cuGraphUpload", cuGraphUpload)                                                              \
    X("cuGraphExecGetFlags", cuGraphExecGetFlags)                                                  \
    X("cuGraphExecDestroy", cuGraphExecDestroy)                                                    \
    X("cuGraphDestroy", cuGraphDestroy)                                                            \
    X("cuGraphGetNodes", cuGraphGetNodes)                                                          \
    X("cuGraphGetRootNodes", cuGraphGetRootNodes)                                                  \
    X("cuGraphNodeGetDependencies", cuGraphNodeGetDependencies_v2)                                 \
    X("cuGraphNodeGetType", cuGraphNodeGetType)                                                    \
    X("cuGraphDebugDotPrint", cuGraphDebugDotPrint)

typedef struct rt_driver {
#define RT_DRIVER_FIELD(name, form) __typeof__(form) *form;
    RT_DRIVER(RT_DRIVER_FIELD)
#undef RT_DRIVER_FIELD
} rt_driver;

extern rt_driver rt; /* filled by rt_ready() */

enum { RT_MAX_DEVICES = 16, RT_VERSION = EBB_CUDART == 12 ? 12040 : 13000 };

typedef struct rt_thread {
    int device;
    cudaError_t last;
    bool launched; /* `last` is of a launch, and `text` says which */
    char text[1024];
} rt_thread;

rt_thread *rt_self(void);
cudaError_t rt_ready(void);   /* the driver is loaded and started */
cudaError_t rt_context(void); /* and the thread has a context: its device's primary one, if none */
cudaError_t rt_leave(cudaError_t code); /* remember the error, if it is one, and return it */
cudaError_t rt_primary(int device, CUcontext *context); /* retained once for this library */
cudaError_t rt_use(int device);
cudaError_t rt_forget(int device); /* let go of its primary context */
cudaError_t rt_unsimulated(const char *name, bool *said);
int rt_attribute(int attribute, int device); /* 0 where it cannot be had */

/* Call a function of the driver, if it has it. */
#define RT_CALL(form, ...)                                                                         \
    (rt.form == NULL ? cudaErrorCallRequiresNewerDriver : (cudaError_t)rt.form(__VA_ARGS__))

/* The whole of most functions: with a context, or with the driver alone. */
#define RT_WITH_CONTEXT(form, ...)                                                                 \
    do {                                                                                           \
        cudaError_t ready_ = rt_context();                                                         \
        return rt_leave(ready_ != cudaSuccess ? ready_ : RT_CALL(form, __VA_ARGS__));              \
    } while (0)
#define RT_WITH_DRIVER(form, ...)                                                                  \
    do {                                                                                           \
        cudaError_t ready_ = rt_ready();                                                           \
        return rt_leave(ready_ != cudaSuccess ? ready_ : RT_CALL(form, __VA_ARGS__));              \
    } while (0)

#endif

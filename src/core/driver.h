/*
 * The driver table: every CUDA driver function Ebbtide calls, and nothing else of the driver.
 *
 * The table is filled at run time through the library's own cuGetProcAddress, from libcuda.so.1 or
 * from the simulated GPU (sim/). Nothing above this file knows which of the two it is. Every entry
 * asks for the version of the function whose parameters are written here, so a newer driver cannot
 * hand us one with others.
 *
 * A table is immutable once open and may be used by any thread.
 */
#ifndef EBB_DRIVER_H
#define EBB_DRIVER_H

#include "cuda_abi.h"
#include "ebbtide.h"

/* The oldest driver we work with: CUDA 12.0. */
#define EBB__DRIVER_OLDEST 12000

/*
 * X(need, name, since, parameters): `since` is the CUDA version that brought this form of the
 * function, `need` is REQUIRED, or OPTIONAL for what we can do without (the entry is NULL then).
 *
 * Grouped as the driver's documentation groups them. Formatted by hand: clang-format takes
 * "type *name" in here for a product.
 */
/* clang-format off */
#define EBB__DRIVER_FUNCTIONS(X)                                                                   \
    /* errors, start, devices */                                                                   \
    X(REQUIRED, cuGetErrorName, 6000, (CUresult code, const char **name))                          \
    X(REQUIRED, cuGetErrorString, 6000, (CUresult code, const char **text))                        \
    X(REQUIRED, cuInit, 2000, (unsigned flags))                                                    \
    X(REQUIRED, cuDriverGetVersion, 2020, (int *version))                                          \
    X(REQUIRED, cuDeviceGetCount, 2000, (int *count))                                              \
    X(REQUIRED, cuDeviceGet, 2000, (CUdevice *device, int ordinal))                                \
    X(REQUIRED, cuDeviceGetName, 2000, (char *name, int length, CUdevice device))                  \
    X(REQUIRED, cuDeviceGetUuid, 11040, (CUuuid *uuid, CUdevice device))                           \
    X(REQUIRED, cuDeviceTotalMem, 3020, (size_t *bytes, CUdevice device))                          \
    X(REQUIRED, cuDeviceGetAttribute, 2000,                                                        \
      (int *value, CUdevice_attribute attribute, CUdevice device))                                 \
    X(REQUIRED, cuDeviceCanAccessPeer, 4000, (int *can, CUdevice device, CUdevice peer))           \
    /* contexts */                                                                                 \
    X(REQUIRED, cuDevicePrimaryCtxRetain, 7000, (CUcontext *context, CUdevice device))             \
    X(REQUIRED, cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                               \
    X(REQUIRED, cuDevicePrimaryCtxGetState, 7000, (CUdevice device, unsigned *flags, int *active)) \
    X(REQUIRED, cuCtxPushCurrent, 4000, (CUcontext context))                                       \
    X(REQUIRED, cuCtxPopCurrent, 4000, (CUcontext *context))                                       \
    X(REQUIRED, cuCtxGetCurrent, 4000, (CUcontext *context))                                       \
    X(REQUIRED, cuCtxSetCurrent, 4000, (CUcontext context))                                        \
    X(REQUIRED, cuCtxGetDevice, 2000, (CUdevice *device))                                          \
    X(REQUIRED, cuCtxSynchronize, 2000, (void))                                                    \
    X(OPTIONAL, cuCtxRecordEvent, 12050, (CUcontext context, CUevent event))                       \
    /* addresses and physical memory */                                                            \
    X(REQUIRED, cuMemGetInfo, 3020, (size_t *free, size_t *total))                                 \
    X(REQUIRED, cuMemAddressReserve, 10020,                                                        \
      (CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,                      \
       unsigned long long flags))                                                                  \
    X(REQUIRED, cuMemAddressFree, 10020, (CUdeviceptr address, size_t size))                       \
    X(REQUIRED, cuMemCreate, 10020,                                                                \
      (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,   \
       unsigned long long flags))                                                                  \
    X(REQUIRED, cuMemRelease, 10020, (CUmemGenericAllocationHandle handle))                        \
    X(REQUIRED, cuMemMap, 10020,                                                                   \
      (CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,       \
       unsigned long long flags))                                                                  \
    X(REQUIRED, cuMemUnmap, 10020, (CUdeviceptr address, size_t size))                             \
    X(REQUIRED, cuMemSetAccess, 10020,                                                             \
      (CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count))             \
    X(REQUIRED, cuMemGetAccess, 10020,                                                             \
      (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address))             \
    X(REQUIRED, cuMemGetAllocationGranularity, 10020,                                              \
      (size_t *granularity, const CUmemAllocationProp *properties, int option))                    \
    X(REQUIRED, cuMemRetainAllocationHandle, 11000,                                                \
      (CUmemGenericAllocationHandle *handle, void *address))                                       \
    X(REQUIRED, cuMemGetAllocationPropertiesFromHandle, 10020,                                     \
      (CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle))                      \
    X(REQUIRED, cuMemExportToShareableHandle, 10020,                                               \
      (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))  \
    X(REQUIRED, cuMemImportFromShareableHandle, 10020,                                             \
      (CUmemGenericAllocationHandle *handle, void *shareable, int type))                           \
    X(REQUIRED, cuMemAlloc, 3020, (CUdeviceptr *address, size_t size))                             \
    X(REQUIRED, cuMemFree, 3020, (CUdeviceptr address))                                            \
    X(REQUIRED, cuPointerGetAttribute, 4000,                                                       \
      (void *value, CUpointer_attribute attribute, CUdeviceptr address))                           \
    /* host memory */                                                                              \
    X(REQUIRED, cuMemHostAlloc, 2020, (void **address, size_t size, unsigned flags))               \
    X(REQUIRED, cuMemFreeHost, 2000, (void *address))                                              \
    X(REQUIRED, cuMemHostRegister, 6050, (void *address, size_t size, unsigned flags))             \
    X(REQUIRED, cuMemHostUnregister, 4000, (void *address))                                        \
    /* copies */                                                                                   \
    X(REQUIRED, cuMemcpyHtoDAsync, 3020,                                                           \
      (CUdeviceptr to, const void *from, size_t size, CUstream stream))                            \
    X(REQUIRED, cuMemcpyDtoHAsync, 3020,                                                           \
      (void *to, CUdeviceptr from, size_t size, CUstream stream))                                  \
    X(REQUIRED, cuMemcpyDtoDAsync, 3020,                                                           \
      (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream))                            \
    X(REQUIRED, cuMemcpyPeerAsync, 4000,                                                           \
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,             \
       size_t size, CUstream stream))                                                              \
    X(REQUIRED, cuMemsetD8Async, 3020,                                                             \
      (CUdeviceptr to, unsigned char value, size_t count, CUstream stream))                        \
    X(REQUIRED, cuMemsetD32Async, 3020,                                                            \
      (CUdeviceptr to, unsigned value, size_t count, CUstream stream))                             \
    /* streams and events */                                                                       \
    X(REQUIRED, cuStreamCreate, 2000, (CUstream *stream, unsigned flags))                          \
    X(REQUIRED, cuStreamCreateWithPriority, 5050,                                                  \
      (CUstream *stream, unsigned flags, int priority))                                            \
    X(REQUIRED, cuStreamDestroy, 4000, (CUstream stream))                                          \
    X(REQUIRED, cuStreamQuery, 2000, (CUstream stream))                                            \
    X(REQUIRED, cuStreamSynchronize, 2000, (CUstream stream))                                      \
    X(REQUIRED, cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned flags))         \
    X(REQUIRED, cuStreamGetCtx, 9020, (CUstream stream, CUcontext *context))                       \
    X(REQUIRED, cuStreamWaitValue32, 11070,                                                        \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags))                      \
    X(REQUIRED, cuStreamWriteValue32, 11070,                                                       \
      (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags))                      \
    X(REQUIRED, cuLaunchHostFunc, 10000, (CUstream stream, CUhostFn function, void *data))         \
    X(REQUIRED, cuEventCreate, 2000, (CUevent *event, unsigned flags))                             \
    X(REQUIRED, cuEventDestroy, 4000, (CUevent event))                                             \
    X(REQUIRED, cuEventRecord, 2000, (CUevent event, CUstream stream))                             \
    X(REQUIRED, cuEventQuery, 2000, (CUevent event))                                               \
    X(REQUIRED, cuEventSynchronize, 2000, (CUevent event))                                         \
    X(REQUIRED, cuEventElapsedTime, 2000, (float *milliseconds, CUevent start, CUevent end))       \
    X(REQUIRED, cuIpcGetEventHandle, 4010, (CUipcEventHandle *handle, CUevent event))              \
    X(REQUIRED, cuIpcOpenEventHandle, 4010, (CUevent *event, CUipcEventHandle handle))             \
    /* captures */                                                                                 \
    X(REQUIRED, cuStreamBeginCapture, 10010, (CUstream stream, CUstreamCaptureMode mode))          \
    X(REQUIRED, cuStreamEndCapture, 10000, (CUstream stream, CUgraph *graph))                      \
    X(REQUIRED, cuStreamIsCapturing, 10000, (CUstream stream, CUstreamCaptureStatus *status))      \
    X(REQUIRED, cuThreadExchangeStreamCaptureMode, 10010, (CUstreamCaptureMode *mode))             \
    X(REQUIRED, cuGraphInstantiateWithFlags, 11040,                                                \
      (CUgraphExec *exec, CUgraph graph, unsigned long long flags))                                \
    X(REQUIRED, cuGraphLaunch, 10000, (CUgraphExec exec, CUstream stream))                         \
    X(REQUIRED, cuGraphExecDestroy, 10000, (CUgraphExec exec))                                     \
    X(REQUIRED, cuGraphDestroy, 10000, (CUgraph graph))
/* clang-format on */

typedef struct ebb__driver {
#define EBB__DRIVER_MEMBER(need, name, since, parameters) CUresult(*name) parameters;
    EBB__DRIVER_FUNCTIONS(EBB__DRIVER_MEMBER)
#undef EBB__DRIVER_MEMBER
    int version;   /* as cuDriverGetVersion gives it: 13000 for CUDA 13.0 */
    void *library; /* from ebb__os_library_open() */
} ebb__driver;

/*
 * Load the driver library at `path` (NULL: EBBTIDE_DRIVER if set, else the system's), fill the
 * table, and start the driver (cuInit). On failure nothing stays loaded, *driver is all zero, and
 * `detail`, of `length` bytes, says in words what was missing: the library, the version, the
 * function's name, the call and its code. `detail` may be NULL.
 *
 * EBB_OK, EBB_NO_DRIVER, EBB_DRIVER_TOO_OLD, EBB_DRIVER_INCOMPLETE, EBB_DRIVER_FAILED,
 * EBB_NO_DEVICE (the driver runs but shows no GPU). Blocks as long as cuInit does.
 */
ebb_status ebb__driver_open(ebb__driver *driver, const char *path, char *detail, size_t length);

/* Let go of the library. The table must not be used afterwards. Harmless on an all-zero table. */
void ebb__driver_close(ebb__driver *driver);

/*
 * Say in `detail`, of `length` bytes (may be NULL), that `call` failed with `code`, by name and by
 * number. Always EBB_DRIVER_FAILED, so that a caller can return it.
 */
ebb_status ebb__driver_failed(const ebb__driver *driver, const char *call, CUresult code,
                              char *detail, size_t length);

#endif

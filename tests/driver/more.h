/*
 * The driver's functions that Ebbtide itself does not call, but PyTorch does and the simulated GPU
 * has: tested the same way, through a second table.
 */
#ifndef EBB_DRIVER_MORE_H
#define EBB_DRIVER_MORE_H

#include "driver_abi.h"
#include "suite.h"

/* X(member, name, since, parameters), as in driver.h; a name that has several forms has several
   members. Formatted by hand: clang-format takes "type *name" in here for a product. */
/* clang-format off */
#define MORE_FUNCTIONS(X)                                                                          \
    X(cuDeviceGetP2PAttribute, "cuDeviceGetP2PAttribute", 8000,                                    \
      (int *value, int attribute, CUdevice device, CUdevice peer))                                 \
    X(cuDeviceGetPCIBusId, "cuDeviceGetPCIBusId", 4010,                                            \
      (char *text, int length, CUdevice device))                                                   \
    X(cuDeviceGetByPCIBusId, "cuDeviceGetByPCIBusId", 4010, (CUdevice *device, const char *text))  \
    X(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020,                               \
      (CUmemoryPool *pool, CUdevice device))                                                       \
    X(cuDeviceGetMemPool, "cuDeviceGetMemPool", 11020, (CUmemoryPool *pool, CUdevice device))      \
    X(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, (CUdevice device, CUmemoryPool pool))       \
    X(cuCtxGetStreamPriorityRange, "cuCtxGetStreamPriorityRange", 5050,                            \
      (int *least, int *greatest))                                                                 \
    X(cuCtxGetLimit, "cuCtxGetLimit", 3010, (size_t *value, int limit))                            \
    X(cuCtxSetLimit, "cuCtxSetLimit", 3010, (int limit, size_t value))                             \
    X(cuCtxGetFlags, "cuCtxGetFlags", 7000, (unsigned *flags))                                     \
    X(cuCtxResetPersistingL2Cache, "cuCtxResetPersistingL2Cache", 11000, (void))                   \
    X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", 4000, (CUcontext peer, unsigned flags))      \
    X(cuCtxDisablePeerAccess, "cuCtxDisablePeerAccess", 4000, (CUcontext peer))                    \
    X(cuMemGetAddressRange, "cuMemGetAddressRange", 3020,                                          \
      (CUdeviceptr *base, size_t *size, CUdeviceptr address))                                      \
    X(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010,                                                \
      (CUipcMemHandle *handle, CUdeviceptr address))                                               \
    X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle", 11000,                                             \
      (CUdeviceptr *address, CUipcMemHandle handle, unsigned flags))                               \
    X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, (CUdeviceptr address))                     \
    X(cuMemAllocAsync, "cuMemAllocAsync", 11020,                                                   \
      (CUdeviceptr *address, size_t size, CUstream stream))                                        \
    X(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020,                                   \
      (CUdeviceptr *address, size_t size, CUmemoryPool pool, CUstream stream))                     \
    X(cuMemFreeAsync, "cuMemFreeAsync", 11020, (CUdeviceptr address, CUstream stream))             \
    X(cuMemPoolCreate, "cuMemPoolCreate", 11020,                                                   \
      (CUmemoryPool *pool, const CUmemPoolProps *properties))                                      \
    X(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, (CUmemoryPool pool))                            \
    X(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, (CUmemoryPool pool, size_t keep))                 \
    X(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020,                                       \
      (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                             \
    X(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020,                                       \
      (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))                             \
    X(cuMemPoolSetAccess, "cuMemPoolSetAccess", 11020,                                             \
      (CUmemoryPool pool, const CUmemAccessDesc *access, size_t count))                            \
    X(cuMemPoolGetAccess, "cuMemPoolGetAccess", 11020,                                             \
      (int *flags, CUmemoryPool pool, CUmemLocation *location))                                    \
    X(cuPointerGetAttributes, "cuPointerGetAttributes", 7000,                                      \
      (unsigned count, CUpointer_attribute *attributes, void **values, CUdeviceptr address))       \
    X(cuMemHostGetDevicePointer, "cuMemHostGetDevicePointer", 3020,                                \
      (CUdeviceptr *out, void *address, unsigned flags))                                           \
    X(cuMemHostGetFlags, "cuMemHostGetFlags", 2030, (unsigned *flags, void *address))              \
    X(cuMemcpyAsync, "cuMemcpyAsync", 4000,                                                        \
      (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream))                            \
    X(cuMemcpyHtoD, "cuMemcpyHtoD", 3020, (CUdeviceptr to, const void *from, size_t size))         \
    X(cuMemcpyDtoH, "cuMemcpyDtoH", 3020, (void *to, CUdeviceptr from, size_t size))               \
    X(cuMemcpyDtoD, "cuMemcpyDtoD", 3020, (CUdeviceptr to, CUdeviceptr from, size_t size))         \
    X(cuMemcpy, "cuMemcpy", 4000, (CUdeviceptr to, CUdeviceptr from, size_t size))                 \
    X(cuMemcpyPeer, "cuMemcpyPeer", 4000,                                                          \
      (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,             \
       size_t size))                                                                               \
    X(cuMemcpy2DAsync, "cuMemcpy2DAsync", 3020, (const CUDA_MEMCPY2D *copy, CUstream stream))      \
    X(cuMemcpy2D, "cuMemcpy2D", 3020, (const CUDA_MEMCPY2D *copy))                                 \
    X(cuMemsetD8, "cuMemsetD8", 3020, (CUdeviceptr to, unsigned char value, size_t count))         \
    X(cuMemsetD32, "cuMemsetD32", 3020, (CUdeviceptr to, unsigned value, size_t count))            \
    X(cuMemsetD2D8Async, "cuMemsetD2D8Async", 3020,                                                \
      (CUdeviceptr to, size_t pitch, unsigned char value, size_t width, size_t height,             \
       CUstream stream))                                                                           \
    X(cuStreamGetPriority, "cuStreamGetPriority", 5050, (CUstream stream, int *priority))          \
    X(cuStreamGetFlags, "cuStreamGetFlags", 5050, (CUstream stream, unsigned *flags))              \
    X(cuStreamGetId, "cuStreamGetId", 12000, (CUstream stream, unsigned long long *id))            \
    X(cuStreamGetDevice, "cuStreamGetDevice", 12080, (CUstream stream, CUdevice *device))          \
    X(cuEventRecordWithFlags, "cuEventRecordWithFlags", 11010,                                     \
      (CUevent event, CUstream stream, unsigned flags))                                            \
    X(cuStreamGetCaptureInfo, "cuStreamGetCaptureInfo", 10010,                                     \
      (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id))                              \
    X(cuStreamGetCaptureInfo_v2, "cuStreamGetCaptureInfo", 11030,                                  \
      (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,               \
       const CUgraphNode **nodes, size_t *count))                                                  \
    X(cuStreamGetCaptureInfo_v3, "cuStreamGetCaptureInfo", 12030,                                  \
      (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,               \
       const CUgraphNode **nodes, const CUgraphEdgeData **edges, size_t *count))                   \
    X(cuStreamUpdateCaptureDependencies, "cuStreamUpdateCaptureDependencies", 11030,               \
      (CUstream stream, CUgraphNode *nodes, size_t count, unsigned flags))                         \
    X(cuStreamUpdateCaptureDependencies_v2, "cuStreamUpdateCaptureDependencies", 12030,            \
      (CUstream stream, CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,            \
       unsigned flags))                                                                            \
    X(cuGraphCreate, "cuGraphCreate", 10000, (CUgraph *graph, unsigned flags))                     \
    X(cuGraphInstantiateWithParams, "cuGraphInstantiateWithParams", 12000,                         \
      (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters))               \
    X(cuGraphUpload, "cuGraphUpload", 11010, (CUgraphExec exec, CUstream stream))                  \
    X(cuGraphExecGetFlags, "cuGraphExecGetFlags", 12000,                                           \
      (CUgraphExec exec, unsigned long long *flags))                                               \
    X(cuGraphGetNodes, "cuGraphGetNodes", 10000,                                                   \
      (CUgraph graph, CUgraphNode *nodes, size_t *count))                                          \
    X(cuGraphGetRootNodes, "cuGraphGetRootNodes", 10000,                                           \
      (CUgraph graph, CUgraphNode *nodes, size_t *count))                                          \
    X(cuGraphNodeGetDependencies, "cuGraphNodeGetDependencies", 10000,                             \
      (CUgraphNode node, CUgraphNode *nodes, size_t *count))                                       \
    X(cuGraphNodeGetDependencies_v2, "cuGraphNodeGetDependencies", 12030,                          \
      (CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges, size_t *count))               \
    X(cuGraphNodeGetType, "cuGraphNodeGetType", 10000, (CUgraphNode node, int *type))              \
    X(cuGraphDebugDotPrint, "cuGraphDebugDotPrint", 11030,                                         \
      (CUgraph graph, const char *path, unsigned flags))
/* clang-format on */

typedef struct more_functions {
#define MORE_MEMBER(member, name, since, parameters) CUresult(*member) parameters;
    MORE_FUNCTIONS(MORE_MEMBER)
#undef MORE_MEMBER
} more_functions;

/* Filled by open_driver(); what this driver does not have is NULL. */
extern more_functions more;

/* Leave the case, visibly, if the driver is too old to have this function. */
#define NEED(member)                                                                               \
    do {                                                                                           \
        if (!more.member) {                                                                        \
            SKIP("the driver has no " #member);                                                    \
        }                                                                                          \
    } while (0)

/* How many devices there are, for cases that need two. */
int device_count(void);

#endif

/*
 * The runtime's face: streams, events, captures, graphs.
 */
#define _GNU_SOURCE
#include "runtime.h"

#include <stdlib.h>

/* ---- streams ---------------------------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    RT_WITH_CONTEXT(cuStreamCreateWithPriority, stream, flags, priority);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuStreamDestroy_v2, stream);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuStreamQuery, stream);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuStreamSynchronize, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    RT_WITH_CONTEXT(cuStreamWaitEvent, stream, event, flags);
}

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    RT_WITH_CONTEXT(cuStreamGetPriority, stream, priority);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags)
{
    RT_WITH_CONTEXT(cuStreamGetFlags, stream, flags);
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    RT_WITH_CONTEXT(cuStreamGetId, stream, id);
}

cudaError_t cudaStreamGetDevice(cudaStream_t stream, int *device)
{
    CUcontext context = NULL, other = NULL;
    cudaError_t code = device == NULL ? cudaErrorInvalidValue : rt_context();
    int count = 0;
    if (code == cudaSuccess) {
        code = RT_CALL(cuStreamGetCtx, stream, &context);
    }
    if (code == cudaSuccess) {
        code = RT_CALL(cuDeviceGetCount, &count);
    }
    for (int i = 0; code == cudaSuccess && i < count; i++) {
        code = rt_primary(i, &other);
        if (code == cudaSuccess && other == context) {
            *device = i;
            return cudaSuccess;
        }
    }
    return rt_leave(code == cudaSuccess ? cudaErrorInvalidResourceHandle : code);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    RT_WITH_CONTEXT(cuLaunchHostFunc, stream, function, data);
}

typedef struct callback {
    cudaStream_t stream;
    cudaStreamCallback_t function;
    void *data;
} callback;

static void call_back(void *data)
{
    callback c = *(callback *)data;
    free(data);
    c.function(c.stream, cudaSuccess, c.data);
}

/* The older form of a host function. It cannot be captured: it is called once, and then gone. */
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data,
                                  unsigned flags)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    cudaError_t code = function == NULL || flags != 0 ? cudaErrorInvalidValue : rt_context();
    if (code == cudaSuccess) {
        code = RT_CALL(cuStreamIsCapturing, stream, &status);
    }
    if (code == cudaSuccess && status != CU_STREAM_CAPTURE_STATUS_NONE) {
        code = cudaErrorStreamCaptureUnsupported;
    }
    if (code != cudaSuccess) {
        return rt_leave(code);
    }
    callback *c = malloc(sizeof *c);
    if (c == NULL) {
        return rt_leave(cudaErrorMemoryAllocation);
    }
    *c = (callback){stream, function, data};
    code = RT_CALL(cuLaunchHostFunc, stream, call_back, c);
    if (code != cudaSuccess) {
        free(c);
    }
    return rt_leave(code);
}

/* ---- events ----------------------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags)
{
    RT_WITH_CONTEXT(cuEventCreate, event, flags);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, 0);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    RT_WITH_CONTEXT(cuEventDestroy_v2, event);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuEventRecord, event, stream);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    RT_WITH_CONTEXT(cuEventRecordWithFlags, event, stream, flags);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    RT_WITH_CONTEXT(cuEventQuery, event);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    RT_WITH_CONTEXT(cuEventSynchronize, event);
}

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    RT_WITH_CONTEXT(cuEventElapsedTime, milliseconds, start, end);
}

#if EBB_CUDART == 12
cudaError_t cudaEventElapsedTime_v2(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    return cudaEventElapsedTime(milliseconds, start, end);
}
#endif

/* ---- captures --------------------------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int mode)
{
    RT_WITH_CONTEXT(cuStreamBeginCapture_v2, stream, (CUstreamCaptureMode)mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    RT_WITH_CONTEXT(cuStreamEndCapture, stream, graph);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int *status)
{
    RT_WITH_CONTEXT(cuStreamIsCapturing, stream, (CUstreamCaptureStatus *)(void *)status);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(int *mode)
{
    RT_WITH_CONTEXT(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)(void *)mode);
}

static cudaError_t capture_info(cudaStream_t stream, int *status, unsigned long long *id,
                                cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                const cudaGraphEdgeData **edges, size_t *count)
{
    uint64_t number = 0;
    cudaError_t code = rt_context();
    if (code == cudaSuccess) {
        code = RT_CALL(cuStreamGetCaptureInfo_v3, stream, (CUstreamCaptureStatus *)(void *)status,
                       &number, graph, nodes, edges, count);
    }
    if (code == cudaSuccess && id != NULL && *status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        *id = number;
    }
    return rt_leave(code);
}

#if EBB_CUDART == 12
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id)
{
    return capture_info(stream, status, id, NULL, NULL, NULL, NULL);
}

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, int *status, unsigned long long *id,
                                        cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count)
{
    return capture_info(stream, status, id, graph, nodes, NULL, count);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, int *status, unsigned long long *id,
                                        cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        const cudaGraphEdgeData **edges, size_t *count)
{
    return capture_info(stream, status, id, graph, nodes, edges, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                size_t count, unsigned flags)
{
    RT_WITH_CONTEXT(cuStreamUpdateCaptureDependencies_v2, stream, nodes, NULL, count, flags);
}

cudaError_t cudaStreamUpdateCaptureDependencies_v2(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                   const cudaGraphEdgeData *edges, size_t count,
                                                   unsigned flags)
{
    RT_WITH_CONTEXT(cuStreamUpdateCaptureDependencies_v2, stream, nodes, edges, count, flags);
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                         size_t *count)
{
    RT_WITH_CONTEXT(cuGraphNodeGetDependencies_v2, node, nodes, NULL, count);
}

cudaError_t cudaGraphNodeGetDependencies_v2(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                            cudaGraphEdgeData *edges, size_t *count)
{
    RT_WITH_CONTEXT(cuGraphNodeGetDependencies_v2, node, nodes, edges, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
    return capture_info(stream, status, id, graph, nodes, edges, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *edges, size_t count,
                                                unsigned flags)
{
    RT_WITH_CONTEXT(cuStreamUpdateCaptureDependencies_v2, stream, nodes, edges, count, flags);
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes,
                                         cudaGraphEdgeData *edges, size_t *count)
{
    RT_WITH_CONTEXT(cuGraphNodeGetDependencies_v2, node, nodes, edges, count);
}
#endif

/* ---- graphs ----------------------------------------------------------------------------------- */

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned flags)
{
    RT_WITH_CONTEXT(cuGraphCreate, graph, flags);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph,
                                          unsigned long long flags)
{
    RT_WITH_CONTEXT(cuGraphInstantiateWithFlags, exec, graph, flags);
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    return cudaGraphInstantiateWithFlags(exec, graph, flags);
}

cudaError_t cudaGraphInstantiateWithParams(cudaGraphExec_t *exec, cudaGraph_t graph,
                                           cudaGraphInstantiateParams *parameters)
{
    RT_WITH_CONTEXT(cuGraphInstantiateWithParams, exec, graph, parameters);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuGraphLaunch, exec, stream);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    RT_WITH_CONTEXT(cuGraphUpload, exec, stream);
}

cudaError_t cudaGraphExecGetFlags(cudaGraphExec_t exec, unsigned long long *flags)
{
    RT_WITH_CONTEXT(cuGraphExecGetFlags, exec, flags);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    RT_WITH_CONTEXT(cuGraphExecDestroy, exec);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    RT_WITH_CONTEXT(cuGraphDestroy, graph);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    RT_WITH_CONTEXT(cuGraphGetNodes, graph, nodes, count);
}

cudaError_t cudaGraphGetRootNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    RT_WITH_CONTEXT(cuGraphGetRootNodes, graph, nodes, count);
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, int *type)
{
    RT_WITH_CONTEXT(cuGraphNodeGetType, node, type);
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags)
{
    RT_WITH_CONTEXT(cuGraphDebugDotPrint, graph, path, flags);
}

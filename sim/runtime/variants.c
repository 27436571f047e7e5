/*
 * The runtime's face: the forms for programs whose default stream is per thread (_ptsz, _ptds). They
 * are the same functions, and a stream of 0 means the thread's own.
 */
#define _GNU_SOURCE
#include "runtime.h"

static cudaStream_t own(cudaStream_t stream)
{
    return stream == NULL ? CU_STREAM_PER_THREAD : stream;
}

/* X(name, parameters, arguments): the stream is called `s` in both. */
#define PTSZ(X)                                                                                    \
    X(cudaMemcpyAsync, (void *a, const void *b, size_t c, cudaMemcpyKind k, cudaStream_t s),       \
      (a, b, c, k, own(s)))                                                                        \
    X(cudaMemcpy2DAsync,                                                                           \
      (void *a, size_t b, const void *c, size_t d, size_t e, size_t f, cudaMemcpyKind k,           \
       cudaStream_t s),                                                                            \
      (a, b, c, d, e, f, k, own(s)))                                                               \
    X(cudaMemsetAsync, (void *a, int b, size_t c, cudaStream_t s), (a, b, c, own(s)))              \
    X(cudaMemset2DAsync, (void *a, size_t b, int c, size_t d, size_t e, cudaStream_t s),           \
      (a, b, c, d, e, own(s)))                                                                     \
    X(cudaMemcpyToSymbolAsync,                                                                     \
      (const void *a, const void *b, size_t c, size_t d, cudaMemcpyKind k, cudaStream_t s),        \
      (a, b, c, d, k, own(s)))                                                                     \
    X(cudaMemcpyFromSymbolAsync,                                                                   \
      (void *a, const void *b, size_t c, size_t d, cudaMemcpyKind k, cudaStream_t s),              \
      (a, b, c, d, k, own(s)))                                                                     \
    X(cudaMallocAsync, (void **a, size_t b, cudaStream_t s), (a, b, own(s)))                       \
    X(cudaMallocFromPoolAsync, (void **a, size_t b, cudaMemPool_t c, cudaStream_t s),              \
      (a, b, c, own(s)))                                                                           \
    X(cudaFreeAsync, (void *a, cudaStream_t s), (a, own(s)))                                       \
    X(cudaEventRecord, (cudaEvent_t a, cudaStream_t s), (a, own(s)))                               \
    X(cudaEventRecordWithFlags, (cudaEvent_t a, cudaStream_t s, unsigned b), (a, own(s), b))       \
    X(cudaStreamQuery, (cudaStream_t s), (own(s)))                                                 \
    X(cudaStreamSynchronize, (cudaStream_t s), (own(s)))                                           \
    X(cudaStreamWaitEvent, (cudaStream_t s, cudaEvent_t a, unsigned b), (own(s), a, b))            \
    X(cudaStreamGetPriority, (cudaStream_t s, int *a), (own(s), a))                                \
    X(cudaStreamGetFlags, (cudaStream_t s, unsigned *a), (own(s), a))                              \
    X(cudaStreamGetId, (cudaStream_t s, unsigned long long *a), (own(s), a))                       \
    X(cudaStreamAddCallback, (cudaStream_t s, cudaStreamCallback_t a, void *b, unsigned c),        \
      (own(s), a, b, c))                                                                           \
    X(cudaStreamBeginCapture, (cudaStream_t s, int a), (own(s), a))                                \
    X(cudaStreamEndCapture, (cudaStream_t s, cudaGraph_t * a), (own(s), a))                        \
    X(cudaStreamIsCapturing, (cudaStream_t s, int *a), (own(s), a))                                \
    X(cudaLaunchHostFunc, (cudaStream_t s, cudaHostFn_t a, void *b), (own(s), a, b))               \
    X(cudaLaunchKernel, (const void *a, dim3 b, dim3 c, void **d, size_t e, cudaStream_t s),       \
      (a, b, c, d, e, own(s)))                                                                     \
    X(cudaLaunchCooperativeKernel,                                                                 \
      (const void *a, dim3 b, dim3 c, void **d, size_t e, cudaStream_t s),                         \
      (a, b, c, d, e, own(s)))                                                                     \
    X(cudaGraphLaunch, (cudaGraphExec_t a, cudaStream_t s), (a, own(s)))                           \
    X(cudaGraphUpload, (cudaGraphExec_t a, cudaStream_t s), (a, own(s)))                           \
    X(cudaGraphInstantiateWithParams,                                                              \
      (cudaGraphExec_t * a, cudaGraph_t b, cudaGraphInstantiateParams * c), (a, b, c))             \
    X(cudaGetDriverEntryPoint, (const char *a, void **b, unsigned long long c, int *d),            \
      (a, b, c, d))                                                                                \
    X(cudaStreamGetDevice, (cudaStream_t s, int *a), (own(s), a))                                  \
    X(cudaGetDriverEntryPointByVersion,                                                            \
      (const char *a, void **b, unsigned c, unsigned long long d, int *e), (a, b, c, d, e))

#if EBB_CUDART == 12
#define PTSZ_OF_VERSION(X)                                                                         \
    X(cudaStreamGetCaptureInfo, (cudaStream_t s, int *a, unsigned long long *b), (own(s), a, b))   \
    X(cudaStreamGetCaptureInfo_v2,                                                                 \
      (cudaStream_t s, int *a, unsigned long long *b, cudaGraph_t *c, const cudaGraphNode_t **d,   \
       size_t *e),                                                                                 \
      (own(s), a, b, c, d, e))                                                                     \
    X(cudaStreamGetCaptureInfo_v3,                                                                 \
      (cudaStream_t s, int *a, unsigned long long *b, cudaGraph_t *c, const cudaGraphNode_t **d,   \
       const cudaGraphEdgeData **e, size_t *f),                                                    \
      (own(s), a, b, c, d, e, f))                                                                  \
    X(cudaStreamUpdateCaptureDependencies,                                                         \
      (cudaStream_t s, cudaGraphNode_t * a, size_t b, unsigned c), (own(s), a, b, c))              \
    X(cudaStreamUpdateCaptureDependencies_v2,                                                      \
      (cudaStream_t s, cudaGraphNode_t * a, const cudaGraphEdgeData *b, size_t c, unsigned d),     \
      (own(s), a, b, c, d))
#else
#define PTSZ_OF_VERSION(X)                                                                         \
    X(cudaStreamGetCaptureInfo,                                                                    \
      (cudaStream_t s, int *a, unsigned long long *b, cudaGraph_t *c, const cudaGraphNode_t **d,   \
       const cudaGraphEdgeData **e, size_t *f),                                                    \
      (own(s), a, b, c, d, e, f))                                                                  \
    X(cudaStreamUpdateCaptureDependencies,                                                         \
      (cudaStream_t s, cudaGraphNode_t * a, const cudaGraphEdgeData *b, size_t c, unsigned d),     \
      (own(s), a, b, c, d))
#endif

#define DEFINE_PTSZ(name, parameters, arguments)                                                   \
    cudaError_t name##_ptsz parameters                                                             \
    {                                                                                              \
        return name arguments;                                                                     \
    }
#define DECLARE_PTSZ(name, parameters, arguments) RT_API cudaError_t name##_ptsz parameters;
PTSZ(DECLARE_PTSZ)
PTSZ_OF_VERSION(DECLARE_PTSZ)
PTSZ(DEFINE_PTSZ)
PTSZ_OF_VERSION(DEFINE_PTSZ)

RT_API cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *function,
                                            void **arguments);
cudaError_t cudaLaunchKernelExC_ptsz(const cudaLaunchConfig_t *config, const void *function,
                                     void **arguments)
{
    if (config == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    cudaLaunchConfig_t changed = *config;
    changed.stream = own(changed.stream);
    return cudaLaunchKernelExC(&changed, function, arguments);
}

/* ---- calls that wait: on the thread's own stream ------------------------------------------------ */

static cudaError_t and_wait(cudaError_t code)
{
    return code != cudaSuccess ? code : cudaStreamSynchronize(CU_STREAM_PER_THREAD);
}

/* X(name, asynchronous form, parameters, arguments) */
#define PTDS(X)                                                                                    \
    X(cudaMemcpy, cudaMemcpyAsync, (void *a, const void *b, size_t c, cudaMemcpyKind k),           \
      (a, b, c, k, CU_STREAM_PER_THREAD))                                                          \
    X(cudaMemcpy2D, cudaMemcpy2DAsync,                                                             \
      (void *a, size_t b, const void *c, size_t d, size_t e, size_t f, cudaMemcpyKind k),          \
      (a, b, c, d, e, f, k, CU_STREAM_PER_THREAD))                                                 \
    X(cudaMemset, cudaMemsetAsync, (void *a, int b, size_t c), (a, b, c, CU_STREAM_PER_THREAD))    \
    X(cudaMemset2D, cudaMemset2DAsync, (void *a, size_t b, int c, size_t d, size_t e),             \
      (a, b, c, d, e, CU_STREAM_PER_THREAD))                                                       \
    X(cudaMemcpyToSymbol, cudaMemcpyToSymbolAsync,                                                 \
      (const void *a, const void *b, size_t c, size_t d, cudaMemcpyKind k),                        \
      (a, b, c, d, k, CU_STREAM_PER_THREAD))                                                       \
    X(cudaMemcpyFromSymbol, cudaMemcpyFromSymbolAsync,                                             \
      (void *a, const void *b, size_t c, size_t d, cudaMemcpyKind k),                              \
      (a, b, c, d, k, CU_STREAM_PER_THREAD))

#define DECLARE_PTDS(name, form, parameters, arguments) RT_API cudaError_t name##_ptds parameters;
#define DEFINE_PTDS(name, form, parameters, arguments)                                             \
    cudaError_t name##_ptds parameters                                                             \
    {                                                                                              \
        return and_wait(form arguments);                                                           \
    }
PTDS(DECLARE_PTDS)
PTDS(DEFINE_PTDS)

/* ---- names of old ------------------------------------------------------------------------------ */

#if EBB_CUDART == 12
RT_API cudaError_t cudaThreadSynchronize(void);
cudaError_t cudaThreadSynchronize(void)
{
    return cudaDeviceSynchronize();
}

RT_API cudaError_t cudaThreadExit(void);
cudaError_t cudaThreadExit(void)
{
    return cudaDeviceReset();
}
#endif

RT_API cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, int format);
cudaChannelFormatDesc cudaCreateChannelDesc(int x, int y, int z, int w, int format)
{
    return (cudaChannelFormatDesc){x, y, z, w, format};
}

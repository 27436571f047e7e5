/*
 * A driver with a hole in it: what a test does right after an event has been recorded,
 * in the middle of whatever recorded it.
 */
#include "cuda_abi.h"
#include "ebbtide.h"

#include <string.h>

EBB_API void (*hook_after_record)(void);

EBB_API void hook_over(void *get);
EBB_API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                     uint64_t flags, CUdriverProcAddressQueryResult *result);

static CUresult (*real_get)(const char *, void **, int, uint64_t, CUdriverProcAddressQueryResult *);
static CUresult (*record)(CUevent event, CUstream stream);

/* And after each question whether a stream captures. */
EBB_API void (*hook_after_asking)(void);
static CUresult (*asking)(CUstream stream, CUstreamCaptureStatus *status);
static CUresult hooked_asking(CUstream stream, CUstreamCaptureStatus *status)
{
    CUresult code = asking(stream, status);
    if (hook_after_asking)
        hook_after_asking();
    return code;
}

static CUresult hooked_record(CUevent event, CUstream stream)
{
    CUresult code = record(event, stream);
    if (hook_after_record)
        hook_after_record();
    return code;
}

/* The test says where the real one is. */
void hook_over(void *get)
{
    memcpy(&real_get, &get, sizeof real_get);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             CUdriverProcAddressQueryResult *result)
{
    CUresult code = real_get(symbol, function, version, flags, result);
    if (code == CUDA_SUCCESS && strcmp(symbol, "cuEventRecord") == 0) {
        CUresult (*hooked)(CUevent, CUstream) = hooked_record;
        memcpy(&record, function, sizeof record);
        memcpy(function, &hooked, sizeof hooked);
    }
    if (code == CUDA_SUCCESS && strcmp(symbol, "cuStreamIsCapturing") == 0) {
        CUresult (*hooked)(CUstream, CUstreamCaptureStatus *) = hooked_asking;
        memcpy(&asking, function, sizeof asking);
        memcpy(function, &hooked, sizeof hooked);
    }
    return code;
}

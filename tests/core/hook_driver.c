/*
 * The simulated driver with a hole in it: what a test does right after an event has been recorded,
 * in the middle of whatever recorded it.
 */
#include "cuda_abi.h"
#include "ebbtide.h"

#include <string.h>

EBB_API void (*hook_after_record)(void);

EBB_API void hook_over(void *get);
EBB_API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                     uint64_t flags, CUdriverProcAddressQueryResult *result);

static CUresult (*sim_get)(const char *, void **, int, uint64_t, CUdriverProcAddressQueryResult *);
static CUresult (*record)(CUevent event, CUstream stream);

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
    memcpy(&sim_get, &get, sizeof sim_get);
}

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             CUdriverProcAddressQueryResult *result)
{
    CUresult code = sim_get(symbol, function, version, flags, result);
    if (code == CUDA_SUCCESS && strcmp(symbol, "cuEventRecord") == 0) {
        CUresult (*hooked)(CUevent, CUstream) = hooked_record;
        memcpy(&record, function, sizeof record);
        memcpy(function, &hooked, sizeof hooked);
    }
    return code;
}

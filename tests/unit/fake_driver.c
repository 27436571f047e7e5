/*
 * A driver that is wrong in one way, which the build chooses:
 *
 *   FAKE_ENTRY=0       no cuGetProcAddress_v2; with FAKE_EXPORTS_VERSION, cuDriverGetVersion is a
 *                      symbol of the library, as in drivers of CUDA 11
 *   FAKE_VERSION       what cuDriverGetVersion says
 *   FAKE_LACKS         a function it does not have
 *   FAKE_LACKS_QUIETLY it does not say so by a code either: success, and a NULL
 *   FAKE_INIT          what cuInit returns
 *   FAKE_SLOW          milliseconds that cuInit takes
 *   FAKE_VMM=0         its one GPU has no virtual memory management
 *
 * What the tests do not call is there, and aborts.
 */
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <time.h>

#include "driver.h"

#ifndef FAKE_ENTRY
#define FAKE_ENTRY 1
#endif
#ifndef FAKE_EXPORTS_VERSION
#define FAKE_EXPORTS_VERSION 0
#endif
#ifndef FAKE_VERSION
#define FAKE_VERSION 13000
#endif
#ifndef FAKE_LACKS
#define FAKE_LACKS ""
#endif
#ifndef FAKE_LACKS_QUIETLY
#define FAKE_LACKS_QUIETLY 0
#endif
#ifndef FAKE_INIT
#define FAKE_INIT 0
#endif
#ifndef FAKE_SLOW
#define FAKE_SLOW 0
#endif
#ifndef FAKE_VMM
#define FAKE_VMM 1
#endif

#define EXPORT __attribute__((visibility("default")))

#if FAKE_EXPORTS_VERSION
EXPORT CUresult cuDriverGetVersion(int *version);

EXPORT CUresult cuDriverGetVersion(int *version)
{
    *version = FAKE_VERSION;
    return CUDA_SUCCESS;
}
#endif

#if FAKE_ENTRY
static CUresult driver_version(int *version)
{
    *version = FAKE_VERSION;
    return CUDA_SUCCESS;
}

static CUresult error_name(CUresult code, const char **name)
{
    *name = code == CUDA_ERROR_NO_DEVICE ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR_UNKNOWN";
    return CUDA_SUCCESS;
}

static CUresult init(unsigned flags)
{
    thrd_sleep(&(struct timespec){.tv_nsec = FAKE_SLOW * 1000000L}, NULL);
    return flags ? CUDA_ERROR_INVALID_VALUE : (CUresult)FAKE_INIT;
}

static CUresult count(int *number)
{
    *number = 1;
    return CUDA_SUCCESS;
}

static CUresult device_get(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

static CUresult device_name(char *name, int length, CUdevice device)
{
    (void)device;
    strncpy(name, "A fake GPU", (size_t)length);
    return CUDA_SUCCESS;
}

static CUresult device_memory(size_t *bytes, CUdevice device)
{
    (void)device;
    *bytes = (size_t)8 << 30;
    return CUDA_SUCCESS;
}

static CUresult attribute(int *value, CUdevice_attribute which, CUdevice device)
{
    (void)device;
    *value = which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ? FAKE_VMM : 1;
    return CUDA_SUCCESS;
}

static CUresult granularity(size_t *bytes, const CUmemAllocationProp *properties, int option)
{
    (void)option;
    *bytes = (size_t)2 << 20;
    return properties->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

static CUresult nobody_calls_this(void)
{
    abort();
}

static const struct {
    const char *name;
    void *function;
} answers[] = {
    {"cuGetErrorName", (void *)error_name},
    {"cuInit", (void *)init},
    {"cuDriverGetVersion", (void *)driver_version},
    {"cuDeviceGetCount", (void *)count},
    {"cuDeviceGet", (void *)device_get},
    {"cuDeviceGetName", (void *)device_name},
    {"cuDeviceTotalMem", (void *)device_memory},
    {"cuDeviceGetAttribute", (void *)attribute},
    {"cuMemGetAllocationGranularity", (void *)granularity},
};

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                    uint64_t flags, CUdriverProcAddressQueryResult *result);

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                    uint64_t flags, CUdriverProcAddressQueryResult *result)
{
    (void)flags;
    *function = NULL;
    if (!strcmp(symbol, FAKE_LACKS)) {
        *result =
            FAKE_LACKS_QUIETLY ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
        return FAKE_LACKS_QUIETLY ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    }
    *function = (void *)nobody_calls_this;
    if (version > FAKE_VERSION) {
        /* As unhelpful as can be: a pointer all the same, only the result says not to use it. */
        *result = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        return CUDA_SUCCESS;
    }
    *result = CU_GET_PROC_ADDRESS_SUCCESS;
    for (size_t i = 0; i < sizeof answers / sizeof *answers; i++)
        if (!strcmp(symbol, answers[i].name))
            *function = answers[i].function;
    return CUDA_SUCCESS;
}
#endif

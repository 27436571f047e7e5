/* ebb_probe(): can Ebbtide work with this GPU, and if not, why. */
#include <string.h>

#include "driver.h"
#include "internal.h"

/* Makes the call; a code other than success is the answer of the function this stands in. */
#define TRY(call, ...)                                                                             \
    do {                                                                                           \
        CUresult code_ = driver->call(__VA_ARGS__);                                                \
        if (code_ != CUDA_SUCCESS)                                                                 \
            return ebb__driver_failed(driver, #call, code_, result->detail,                        \
                                      sizeof result->detail);                                      \
    } while (0)

static ebb_status look(const ebb__driver *driver, int index, ebb_probe_result *result)
{
    result->driver_version = driver->version;
    result->context_events = driver->cuCtxRecordEvent != NULL;
    TRY(cuDeviceGetCount, &result->device_count);
    if (index >= result->device_count) {
        ebb__detail(result->detail, sizeof result->detail,
                    "the driver shows %d GPUs, counted from 0: there is no GPU %d",
                    result->device_count, index);
        return EBB_NO_DEVICE;
    }

    CUdevice device;
    size_t total;
    int vmm;
    TRY(cuDeviceGet, &device, index);
    TRY(cuDeviceGetName, result->name, (int)sizeof result->name, device);
    TRY(cuDeviceTotalMem, &total, device);
    result->total_bytes = total;
    TRY(cuDeviceGetAttribute, &vmm, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        device);
    if (!vmm) {
        ebb__detail(result->detail, sizeof result->detail,
                    "GPU %d (%s) does not support virtual memory management", index, result->name);
        return EBB_NO_VMM;
    }
    TRY(cuDeviceGetAttribute, &result->exportable,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device);

    /* Asked for memory as frames will be made: exportable ones could be coarser. */
    CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
    };
    if (result->exportable)
        properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    TRY(cuMemGetAllocationGranularity, &result->granularity, &properties,
        CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    ebb__detail(result->detail, sizeof result->detail, "GPU %d (%s) can be used", index,
                result->name);
    return EBB_OK;
}

ebb_status ebb_probe(const char *library, int index, ebb_probe_result *result)
{
    if (!result || result->size < sizeof *result)
        return EBB_INVALID;
    if (index < 0) {
        ebb__detail(result->detail, sizeof result->detail, "GPU %d: a GPU's number is 0 or more",
                    index);
        return EBB_INVALID;
    }

    /* Found things are kept aside, so that of a failure only the detail reaches the caller. */
    ebb_probe_result found = {.size = result->size};
    ebb__driver driver;
    ebb_status status = ebb__driver_open(&driver, library, found.detail, sizeof found.detail);
    if (status == EBB_OK) {
        status = look(&driver, index, &found);
        ebb__driver_close(&driver);
    }
    if (status == EBB_OK)
        *result = found;
    else
        memcpy(result->detail, found.detail, sizeof found.detail);
    return status;
}

/*
 * Frames: physical memory of the GPU, and the only place that counts it.
 *
 * A frame is one allocation of the driver, of one of two sizes: the driver's cost is per frame and
 * hardly per byte, so what is large is made of large ones, and only tails of small ones. Frames are
 * exportable from birth where the device can, because that costs nothing and cannot be added later.
 * A frame whose owner lets go of it is kept for the next one that asks for its size: to map it again
 * costs a third of making a new one.
 *
 * What the driver will not take back is counted as poisoned, not forgotten: it is tried again when
 * frames are trimmed, and when the device closes.
 */
#include <stdlib.h>

#include "internal.h"

/* How often a call is tried again that the driver was "not ready" for: about 50 ms in all. */
enum { TRIES = 1000 };

ebb_status ebb__frames_open_locked(ebb__device *device)
{
    const ebb__driver *driver = &device->driver;
    int exportable = 0;
    CUresult code = driver->cuDeviceGetAttribute(
        &exportable, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        device->ordinal);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuDeviceGetAttribute", code);
    device->properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device->ordinal},
    };

    size_t granularity = 0;
    code = driver->cuMemGetAllocationGranularity(&granularity, &device->properties,
                                                 CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuMemGetAllocationGranularity", code);
    /* Offsets are split by shifting, and a large page must be a whole number of small ones. */
    if (!granularity || granularity & (granularity - 1) || granularity >> EBB__LARGE_SHIFT) {
        ebb__detail(device->failure, sizeof device->failure,
                    "the driver's granularity, %zu bytes, is none that Ebbtide can work with",
                    granularity);
        return EBB_DRIVER_FAILED;
    }
    device->frame_bytes[EBB__LARGE] = UINT64_C(1) << EBB__LARGE_SHIFT;
    device->frame_bytes[EBB__SMALL] = granularity;
    device->small_shift = (unsigned)__builtin_ctzll(granularity);

    int count = 0;
    code = driver->cuDeviceGetCount(&count);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuDeviceGetCount", code);
    device->access_count = 0;
    for (int i = 0; i < count && device->access_count < EBB__PEERS; i++) {
        CUdevice peer;
        int can = 0;
        if (driver->cuDeviceGet(&peer, i) != CUDA_SUCCESS)
            continue;
        /* A peer that cannot be asked is one that cannot have access; the device itself always. */
        if (peer != device->ordinal &&
            (driver->cuDeviceCanAccessPeer(&can, peer, device->ordinal) != CUDA_SUCCESS || !can))
            continue;
        device->access[device->access_count++] = (CUmemAccessDesc){
            {CU_MEM_LOCATION_TYPE_DEVICE, peer}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    }
    return EBB_OK;
}

uint64_t ebb__frames_held_locked(const ebb__device *device)
{
    uint64_t sum = device->before;
    for (int owner = 0; owner < EBB__OWNERS; owner++)
        for (int kind = 0; kind < EBB__KINDS; kind++)
            sum += device->frame_count[owner][kind] * device->frame_bytes[kind];
    return sum;
}

uint64_t ebb__frames_room_locked(ebb__device *device)
{
    uint64_t held = ebb__frames_held_locked(device);
    uint64_t within = device->limit > held ? device->limit - held : 0;
    if (!within)
        return 0;
    /* At every growth, not on a timer: what other processes took a moment ago counts. */
    size_t free = 0, total = 0;
    CUresult code = device->driver.cuMemGetInfo(&free, &total);
    if (code != CUDA_SUCCESS) {
        ebb__failed_locked(device, "cuMemGetInfo", code);
        return 0;
    }
    uint64_t leaves = free > device->headroom ? free - device->headroom : 0;
    return within < leaves ? within : leaves;
}

void ebb__frame_own_locked(ebb__device *device, ebb__frame *frame, ebb__owner owner)
{
    device->frame_count[frame->owner][frame->kind]--;
    frame->owner = owner;
    device->frame_count[owner][frame->kind]++;
}

ebb__frame *ebb__frame_take_locked(ebb__device *device, ebb__kind kind, ebb__owner owner)
{
    ebb__frame *frame = device->frames[kind];
    if (!frame)
        return NULL;
    device->frames[kind] = frame->next;
    frame->next = NULL;
    ebb__frame_own_locked(device, frame, owner);
    device->frames_recycled++;
    return frame;
}

void ebb__frame_put_locked(ebb__device *device, ebb__frame *frame)
{
    ebb__frame_own_locked(device, frame, EBB__OF_NOBODY);
    frame->next = device->frames[frame->kind];
    device->frames[frame->kind] = frame;
}

ebb__frame *ebb__frame_create_locked(ebb__device *device, ebb__kind kind, ebb__owner owner)
{
    ebb__frame *frame = calloc(1, sizeof *frame);
    if (!frame)
        return NULL;
    CUresult code = device->driver.cuMemCreate(&frame->handle, device->frame_bytes[kind],
                                               &device->properties, 0);
    if (code != CUDA_SUCCESS) {
        /* Out of memory is an answer: somebody was faster. Anything else is worth keeping. */
        if (code != CUDA_ERROR_OUT_OF_MEMORY)
            ebb__failed_locked(device, "cuMemCreate", code);
        free(frame);
        return NULL;
    }
    frame->kind = kind;
    frame->owner = owner;
    device->frame_count[owner][kind]++;
    device->frames_created++;
    return frame;
}

/* Give a frame back to the driver. One that it will not take is kept aside, still counted. */
static bool release_locked(ebb__device *device, ebb__frame *frame) EBB__LOCKED
{
    CUresult code = device->driver.cuMemRelease(frame->handle);
    if (code != CUDA_SUCCESS) {
        ebb__failed_locked(device, "cuMemRelease", code);
        ebb__frame_own_locked(device, frame, EBB__OF_POISON);
        frame->next = device->stuck;
        device->stuck = frame;
        return false;
    }
    device->frame_count[frame->owner][frame->kind]--;
    device->frames_released++;
    free(frame);
    return true;
}

static uint64_t retry_stuck_locked(ebb__device *device) EBB__LOCKED
{
    uint64_t freed = 0;
    ebb__frame *stuck = device->stuck;
    device->stuck = NULL;
    while (stuck) {
        ebb__frame *frame = stuck;
        uint64_t bytes = device->frame_bytes[frame->kind];
        stuck = frame->next;
        if (release_locked(device, frame))
            freed += bytes;
    }
    return freed;
}

uint64_t ebb__frames_trim_locked(ebb__device *device, ebb__kind kind, uint64_t bytes)
{
    uint64_t freed = device->stuck ? retry_stuck_locked(device) : 0;
    while (freed < bytes && device->frames[kind]) {
        ebb__frame *frame = device->frames[kind];
        device->frames[kind] = frame->next;
        if (release_locked(device, frame))
            freed += device->frame_bytes[kind];
    }
    return freed;
}

/* The driver is "not ready" for an access now and then, and is a moment later. */
static CUresult set_access_locked(ebb__device *device, CUdeviceptr address,
                                  size_t bytes) EBB__LOCKED
{
    CUresult code = CUDA_ERROR_NOT_READY;
    int tries = 0;
    for (; tries < TRIES && code == CUDA_ERROR_NOT_READY; tries++) {
        if (tries)
            ebb__os_pause();
        code = device->driver.cuMemSetAccess(address, bytes, device->access, device->access_count);
    }
    device->retries += code == CUDA_SUCCESS && tries > 1;
    return code;
}

ebb_status ebb__frame_map_locked(ebb__device *device, ebb__frame *frame, CUdeviceptr address,
                                 bool *stuck)
{
    *stuck = false;
    size_t bytes = device->frame_bytes[frame->kind];
    CUresult code = device->driver.cuMemMap(address, bytes, 0, frame->handle, 0);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuMemMap", code);
    code = set_access_locked(device, address, bytes);
    if (code == CUDA_SUCCESS)
        return EBB_OK;
    ebb__failed_locked(device, "cuMemSetAccess", code);
    *stuck = device->driver.cuMemUnmap(address, bytes) != CUDA_SUCCESS;
    return EBB_DRIVER_FAILED;
}

ebb_status ebb__frame_unmap_locked(ebb__device *device, ebb__frame *frame, CUdeviceptr address)
{
    CUresult code = device->driver.cuMemUnmap(address, device->frame_bytes[frame->kind]);
    return code == CUDA_SUCCESS ? EBB_OK : ebb__failed_locked(device, "cuMemUnmap", code);
}

void ebb__frame_lose_locked(ebb__device *device, ebb__frame *frame, ebb__frame **link)
{
    if (link)
        *link = frame->next;
    ebb__frame_own_locked(device, frame, EBB__OF_POISON);
    frame->next = device->lost;
    device->lost = frame;
}

ebb_status ebb__frames_close_locked(ebb__device *device)
{
    for (int kind = 0; kind < EBB__KINDS; kind++)
        ebb__frames_trim_locked(device, (ebb__kind)kind, UINT64_MAX);
    if (device->stuck)
        return EBB_DRIVER_FAILED;
    /* Nothing more can be done about these. */
    while (device->lost) {
        ebb__frame *frame = device->lost;
        device->lost = frame->next;
        device->frame_count[frame->owner][frame->kind]--;
        free(frame);
    }
    return EBB_OK;
}

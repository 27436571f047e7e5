/*
 * Devices: opened, found, limited, closed.
 *
 * The table of devices is the only state of the process. A device is found in it by its driver
 * library and its number there, so the same GPU opened twice is one device; a real and a simulated
 * GPU can be open side by side. Structures stay in the table when they are closed, and are used
 * again under another id.
 */
#include <string.h>

#include "fast.h"
#include "internal.h"

ebb__device ebb__devices[EBB__DEVICES];
#if defined(__clang__)
ebb__lock ebb__the_lock; /* a name for the compiler, nothing else */
#endif

/* Of the table itself: who opens or closes. Taken before a device's lock, never after. */
static ebb__mutex table_lock;
static atomic_int table_ready; /* 0 untouched, 1 being made, 2 ready */

/* In a child, every device that was open is its parent's: handles of it lead nowhere. */
static void forget_after_fork(void)
{
    ebb__os_mutex_init(&table_lock); /* a thread that held it is not in this process */
    for (uint32_t i = 0; i < EBB__DEVICES; i++) {
        ebb__device *device = &ebb__devices[i];
        if (!atomic_load(&device->id))
            continue;
        atomic_store(&device->forked, true);
        for (uint32_t k = 0; k < device->vbar_high; k++)
            atomic_store(&ebb__vbar_number(device, k)->id, 0);
    }
}

static void make_table(void)
{
    int untouched = 0;
    if (atomic_load(&table_ready) == 2)
        return;
    if (!atomic_compare_exchange_strong(&table_ready, &untouched, 1)) {
        while (atomic_load(&table_ready) != 2)
            ebb__os_pause();
        return;
    }
    ebb__os_mutex_init(&table_lock);
    for (uint32_t i = 0; i < EBB__DEVICES; i++) {
        ebb__os_mutex_init(&ebb__devices[i].mu);
        ebb__os_condition_init(&ebb__devices[i].changed);
        ebb__devices[i].number = i;
    }
    ebb__os_at_fork(forget_after_fork);
    atomic_store(&table_ready, 2);
}

/* ---- finding and entering ----------------------------------------------------------------------- */

ebb__device *ebb__device_find(ebb_device handle, ebb_status *status)
{
    uint32_t number = handle.id & 0xff;
    *status = EBB_GONE;
    if (!number || number > EBB__DEVICES)
        return NULL;
    ebb__device *device = &ebb__devices[number - 1];
    if (atomic_load(&device->id) != handle.id)
        return NULL;
    *status = atomic_load(&device->forked) ? EBB_FORKED : EBB_OK;
    return *status == EBB_OK ? device : NULL;
}

EBB__UNCHECKED void ebb__enter(ebb__device *device, ebb__scope *scope)
{
    const ebb__driver *driver = &device->driver;
    ebb__os_lock(&device->mu);
    *scope = (ebb__scope){.mode = CU_STREAM_CAPTURE_MODE_RELAXED};
    if (!driver->library)
        return; /* closed meanwhile: the caller looks at the id again */
    CUresult code = driver->cuThreadExchangeStreamCaptureMode(&scope->mode);
    scope->relaxed = code == CUDA_SUCCESS;
    if (!scope->relaxed) {
        ebb__failed_locked(device, "cuThreadExchangeStreamCaptureMode", code);
        return;
    }
    code = driver->cuCtxPushCurrent(device->context);
    scope->pushed = scope->ready = code == CUDA_SUCCESS;
    if (!scope->pushed)
        ebb__failed_locked(device, "cuCtxPushCurrent", code);
}

/* Give the thread back what it had. */
static void restore(ebb__device *device, const ebb__scope *scope)
{
    CUcontext popped;
    CUstreamCaptureMode mode = scope->mode;
    if (scope->pushed)
        device->driver.cuCtxPopCurrent(&popped);
    if (scope->relaxed)
        device->driver.cuThreadExchangeStreamCaptureMode(&mode);
}

EBB__UNCHECKED void ebb__leave(ebb__device *device, const ebb__scope *scope)
{
    restore(device, scope);
    ebb__os_unlock(&device->mu);
}

EBB__UNCHECKED void ebb__drop(ebb__device *device)
{
    ebb__os_unlock(&device->mu);
}

EBB__UNCHECKED void ebb__retake(ebb__device *device)
{
    ebb__os_lock(&device->mu);
}

void ebb__await(ebb__device *device)
{
    ebb__os_wait(&device->changed, &device->mu);
}

EBB__UNCHECKED ebb__device *ebb__device_enter(ebb_device handle, ebb__scope *scope,
                                              ebb_status *status)
{
    ebb__device *device = ebb__device_find(handle, status);
    if (!device)
        return NULL;
    ebb__enter(device, scope);
    bool there = atomic_load(&device->id) == handle.id;
    if (there && scope->ready)
        return device;
    ebb__leave(device, scope);
    *status = there ? EBB_DRIVER_FAILED : EBB_GONE;
    return NULL;
}

ebb_status ebb__failed_locked(ebb__device *device, const char *call, CUresult code)
{
    return ebb__driver_failed(&device->driver, call, code, device->failure, sizeof device->failure);
}

/* ---- opening ------------------------------------------------------------------------------------ */

/* Everything after the driver is there. The context comes last: a failure leaves nothing. */
static ebb_status start_locked(ebb__device *device) EBB__LOCKED
{
    const ebb__driver *driver = &device->driver;
    CUresult code = driver->cuDeviceGet(&device->ordinal, device->index);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuDeviceGet", code);
    size_t total = 0;
    code = driver->cuDeviceTotalMem(&total, device->ordinal);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuDeviceTotalMem", code);
    device->total = total;
    ebb_status status = ebb__frames_open_locked(device);
    if (status != EBB_OK)
        return status;
    code = driver->cuDevicePrimaryCtxRetain(&device->context, device->ordinal);
    if (code != CUDA_SUCCESS) {
        device->context = NULL;
        return ebb__failed_locked(device, "cuDevicePrimaryCtxRetain", code);
    }
    return EBB_OK;
}

static void set_limit_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED
{
    device->limit = bytes == EBB_DEFAULT ? device->total : bytes;
}

static void set_headroom_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED
{
    enum { MOST_HEADROOM = 128 << 20, SHARE = 64 };
    uint64_t share = device->total / SHARE;
    share = share < MOST_HEADROOM ? share : MOST_HEADROOM;
    device->headroom = bytes == EBB_DEFAULT ? share : bytes;
}

static void set_numbers_locked(ebb__device *device, const ebb_device_options *options) EBB__LOCKED
{
    set_limit_locked(device, options->limit);
    set_headroom_locked(device, options->headroom);
    device->before = 0;
    device->failure[0] = '\0';
    device->vbar_free = UINT32_MAX;
    for (uint32_t i = 0; i < device->vbar_high; i++) {
        ebb__vbar *vbar = ebb__vbar_number(device, i);
        vbar->next_free = device->vbar_free;
        device->vbar_free = i;
    }
    device->rank_top = device->rank_bottom = 0;
    device->generation = device->faults = device->departures = 0;
    device->frames_created = device->frames_recycled = device->frames_released = 0;
    device->retries = device->marks = device->orders = device->waits = device->wait_ns = 0;
    device->broken_promises = 0;
    device->page_outs = device->gone_hits = device->gone_misses = device->gone_offloaded = 0;
    memset(device->gone_evictions, 0, sizeof device->gone_evictions);
    device->holders[EBB__VBAR_HOLDER] = ebb__vbar_holder;
    ebb__fence_open_locked(device);
}

/* A free place for this driver and GPU, or the place where it is open already. */
static ebb__device *place(const ebb__driver *driver, int index)
{
    ebb__device *free = NULL;
    for (uint32_t i = 0; i < EBB__DEVICES; i++) {
        ebb__device *device = &ebb__devices[i];
        if (!atomic_load(&device->id))
            free = free ? free : device;
        else if (!atomic_load(&device->forked) && device->driver.library == driver->library &&
                 device->index == index)
            return device;
    }
    return free;
}

static ebb_status open_place(ebb__device *device, const ebb__driver *driver,
                             const ebb_device_options *options, char *detail, size_t length)
{
    ebb__retake(device);
    device->driver = *driver;
    device->index = options->index;
    ebb_status status = start_locked(device);
    if (status != EBB_OK) {
        ebb__detail(detail, length, "%s", device->failure);
        ebb__driver_close(&device->driver);
    } else {
        set_numbers_locked(device, options);
        device->opens = 1;
        device->generation_of_id = (device->generation_of_id + 1) & 0xffffff;
        device->generation_of_id += !device->generation_of_id;
        atomic_store(&device->id, device->generation_of_id << 8 | (device->number + 1));
    }
    ebb__drop(device);
    return status;
}

/* Is this a fork of a process that had a device open? The driver does not survive that. */
static bool forked(void)
{
    for (uint32_t i = 0; i < EBB__DEVICES; i++)
        if (atomic_load(&ebb__devices[i].forked))
            return true;
    return false;
}

ebb_status ebb_device_open(const ebb_device_options *options, ebb_device *handle, char *detail,
                           size_t length)
{
    if (!options || options->size < sizeof *options || !handle)
        return EBB_INVALID;
    /* The probe's answers are the right words for everything that can be missing. */
    ebb_probe_result found = {.size = sizeof found};
    ebb_status status = ebb_probe(options->library, options->index, &found);
    ebb__driver driver;
    if (status == EBB_OK)
        status = ebb__driver_open(&driver, options->library, found.detail, sizeof found.detail);
    if (status == EBB_DRIVER_FAILED && forked()) {
        ebb__detail(detail, length, "this process was forked after a GPU had been opened: %s",
                    found.detail);
        return EBB_FORKED;
    }
    if (status != EBB_OK) {
        ebb__detail(detail, length, "%s", found.detail);
        return status;
    }

    make_table();
    ebb__os_lock(&table_lock);
    ebb__device *device = place(&driver, options->index);
    if (!device) {
        ebb__detail(detail, length, "%d devices are open, which is as many as there can be",
                    (int)EBB__DEVICES);
        status = EBB_NO_HOST_MEMORY;
        ebb__driver_close(&driver);
    } else if (atomic_load(&device->id)) {
        ebb__driver_close(&driver); /* it has its own */
        device->opens++;
    } else {
        status = open_place(device, &driver, options, detail, length);
    }
    if (status == EBB_OK)
        handle->id = atomic_load(&device->id);
    ebb__os_unlock(&table_lock);
    return status;
}

/* ---- closing ------------------------------------------------------------------------------------ */

static ebb_status destroy_all_locked(ebb__device *device) EBB__LOCKED
{
    /* First whether it can be done at all, so that a refusal has changed nothing. */
    if (device->busy)
        return EBB_BUSY;
    for (uint32_t i = 0; i < device->vbar_high; i++) {
        const ebb__vbar *vbar = ebb__vbar_number(device, i);
        uint64_t hits, resident, pinned, held;
        if (!atomic_load(&vbar->id))
            continue;
        ebb__vbar_sums_locked(vbar, &hits, &resident, &pinned, &held);
        if (pinned || held || vbar->busy)
            return EBB_BUSY;
    }
    for (uint32_t i = 0; i < device->vbar_high; i++) {
        ebb__vbar *vbar = ebb__vbar_number(device, i);
        if (!atomic_load(&vbar->id))
            continue;
        ebb_status status = ebb__vbar_destroy_locked(vbar);
        if (status != EBB_OK)
            return status;
    }
    /* The lock was dropped where a fence was waited for, and another may have been made. */
    return device->vbar_count ? EBB_BUSY : EBB_OK;
}

/* The last step, after which there is no device. */
static ebb_status forget_locked(ebb__device *device) EBB__LOCKED
{
    CUresult code = device->driver.cuDevicePrimaryCtxRelease(device->ordinal);
    if (code != CUDA_SUCCESS)
        return ebb__failed_locked(device, "cuDevicePrimaryCtxRelease", code);
    device->context = NULL;
    atomic_store(&device->id, 0);
    ebb__driver_close(&device->driver);
    return EBB_OK;
}

ebb_status ebb_device_close(ebb_device handle)
{
    ebb_status status;
    ebb__device *device = ebb__device_find(handle, &status);
    if (!device)
        return status;
    ebb__os_lock(&table_lock);
    if (atomic_load(&device->id) != handle.id) {
        status = EBB_GONE;
    } else if (device->opens > 1) {
        device->opens--;
    } else {
        ebb__scope scope;
        ebb__enter(device, &scope);
        status = scope.ready ? destroy_all_locked(device) : EBB_DRIVER_FAILED;
        if (status == EBB_OK)
            status = ebb__frames_close_locked(device);
        if (status == EBB_OK)
            status = ebb__fence_close_locked(device);
        /* The thread's own state first, while there is a driver to restore it with. */
        restore(device, &scope);
        if (status == EBB_OK)
            status = forget_locked(device);
        ebb__drop(device);
    }
    ebb__os_unlock(&table_lock);
    return status;
}

/* ---- settings ----------------------------------------------------------------------------------- */

#define WITH_DEVICE(handle)                                                                        \
    ebb__scope scope;                                                                              \
    ebb_status status;                                                                             \
    ebb__device *device = ebb__device_enter(handle, &scope, &status);                              \
    if (!device)                                                                                   \
    return status

ebb_status ebb_device_set_limit(ebb_device handle, uint64_t bytes)
{
    WITH_DEVICE(handle);
    set_limit_locked(device, bytes);
    if (!ebb__room_shrink_locked(device, device->limit, EBB_FOR_LIMIT, true, true))
        status = EBB_BUSY;
    ebb__leave(device, &scope);
    return status;
}

ebb_status ebb_device_set_headroom(ebb_device handle, uint64_t bytes)
{
    WITH_DEVICE(handle);
    set_headroom_locked(device, bytes);
    ebb__leave(device, &scope);
    return status;
}

ebb_status ebb_device_trim(ebb_device handle, uint64_t *freed)
{
    WITH_DEVICE(handle);
    uint64_t sum = 0;
    for (int kind = 0; kind < EBB__KINDS; kind++)
        sum += ebb__frames_trim_locked(device, (ebb__kind)kind, UINT64_MAX);
    ebb__leave(device, &scope);
    if (freed)
        *freed = sum;
    return status;
}

ebb_status ebb_device_keep_stream(ebb_device handle, ebb_stream stream, unsigned promises)
{
    if (stream == CU_STREAM_PER_THREAD || promises & ~(unsigned)EBB_NEVER_CAPTURES)
        return EBB_INVALID;
    WITH_DEVICE(handle);
    device->busy++;
    status = ebb__stream_keep_locked(device, stream, promises);
    device->busy--;
    ebb__leave(device, &scope);
    return status;
}

bool ebb__stream_lasts(ebb_device handle, ebb_stream stream)
{
    ebb_status status;
    ebb__device *device = ebb__device_find(handle, &status);
    return device && atomic_load(&device->streams[ebb__stream_find(device, stream)].lasting);
}

ebb_status ebb_device_failure(ebb_device handle, char *detail, size_t length)
{
    ebb_status status;
    ebb__device *device = ebb__device_find(handle, &status);
    if (!device)
        return status;
    /* Without the driver: it may be the driver that is broken. */
    ebb__retake(device);
    if (atomic_load(&device->id) == handle.id)
        ebb__detail(detail, length, "%s", device->failure);
    else
        status = EBB_GONE;
    ebb__drop(device);
    return status;
}

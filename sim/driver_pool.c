/*
 * The driver's face: memory pools.
 */
#include <string.h>

#include "driver_face.h"
#include "sim.h"

static pool *pool_get(CUmemoryPool handle)
{
    pool *p = sim_ids_get(&sim.pool_ids, (uint64_t)(uintptr_t)handle);
    return p == NULL || p->dead ? NULL : p;
}

static CUmemoryPool handle_of(const pool *p)
{
    return (CUmemoryPool)(uintptr_t)p->id;
}

static bool is_device(int device)
{
    return device >= 0 && device < sim_card_count();
}

/* The pool that cuMemAllocAsync takes from. */
static pool *current_pool(int device)
{
    return sim.current_pools[device] != NULL ? sim.current_pools[device] : sim_pool_of(device);
}

/* `no_device` is the code where there is no such device. */
static CUresult give_pool(function_id function, CUmemoryPool *out, CUdevice device,
                          pool *(*which)(int), CUresult no_device)
{
    CUresult code = sim_enter(function);
    if (code == CUDA_SUCCESS && (out == NULL || !is_device(device))) {
        code = out == NULL ? CUDA_ERROR_INVALID_VALUE : no_device;
    }
    if (code == CUDA_SUCCESS) {
        const pool *p = which(device);
        code = p == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        *out = p == NULL ? NULL : handle_of(p);
    }
    return sim_leave(code);
}

CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device)
{
    return give_pool(FN_cuDeviceGetDefaultMemPool, out, device, sim_pool_of,
                     CUDA_ERROR_INVALID_DEVICE);
}

CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device)
{
    return give_pool(FN_cuDeviceGetMemPool, out, device, current_pool, CUDA_ERROR_INVALID_VALUE);
}

CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle)
{
    CUresult code = sim_enter(FN_cuDeviceSetMemPool);
    pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS && (!is_device(device) || p == NULL || p->device != device)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        sim.current_pools[device] = p;
    }
    return sim_leave(code);
}

CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *properties)
{
    CUresult code = sim_enter(FN_cuMemPoolCreate);
    if (code == CUDA_SUCCESS && (out == NULL || properties == NULL ||
                                 properties->allocType != CU_MEM_ALLOCATION_TYPE_PINNED ||
                                 properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
                                 !is_device(properties->location.id))) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && properties->handleTypes != 0) { /* no pool travels here */
        code = properties->handleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                   ? CUDA_ERROR_NOT_SUPPORTED
                   : CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        pool *p = sim_pool_new(properties->location.id);
        code = p == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        if (p != NULL) {
            p->most = properties->maxSize;
            *out = handle_of(p);
        }
    }
    return sim_leave(code);
}

CUresult cuMemPoolDestroy(CUmemoryPool handle)
{
    CUresult code = sim_enter(FN_cuMemPoolDestroy);
    pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS && (p == NULL || p->is_default)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        sim_pool_destroy(p);
    }
    return sim_leave(code);
}

CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep)
{
    CUresult code = sim_enter(FN_cuMemPoolTrimTo);
    pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS && p == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        sim_pool_trim(p, keep);
    }
    return sim_leave(code);
}

/* ---- attributes ------------------------------------------------------------------------------- */

static uint64_t *counter(pool *p, CUmemPool_attribute attribute)
{
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD:
        return &p->threshold;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT:
        return &p->reserved;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH:
        return &p->reserved_high;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT:
        return &p->used;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH:
        return &p->used_high;
    default:
        return NULL;
    }
}

static int *choice(pool *p, CUmemPool_attribute attribute)
{
    bool reuse = attribute >= CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES &&
                 attribute <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
    return reuse ? &p->reuse[attribute - CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES] : NULL;
}

CUresult cuMemPoolGetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    CUresult code = sim_enter(FN_cuMemPoolGetAttribute);
    pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS && (p == NULL || value == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    if (choice(p, attribute) != NULL) {
        *(int *)value = *choice(p, attribute);
    } else if (counter(p, attribute) != NULL) {
        memcpy(value, counter(p, attribute), sizeof(uint64_t));
    } else {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    return sim_leave(code);
}

/* High marks can only be set to 0, which means: to what is there now. */
static CUresult set_counter(pool *p, CUmemPool_attribute attribute, const void *value)
{
    uint64_t number = 0;
    memcpy(&number, value, sizeof number);
    if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) {
        p->threshold = number;
        return CUDA_SUCCESS;
    }
    if (number != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) {
        p->reserved_high = p->reserved;
        return CUDA_SUCCESS;
    }
    if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH) {
        p->used_high = p->used;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemPoolSetAttribute(CUmemoryPool handle, CUmemPool_attribute attribute, void *value)
{
    CUresult code = sim_enter(FN_cuMemPoolSetAttribute);
    pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS && (p == NULL || value == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    if (choice(p, attribute) != NULL) {
        *choice(p, attribute) = *(const int *)value != 0;
        return sim_leave(CUDA_SUCCESS);
    }
    return sim_leave(set_counter(p, attribute, value));
}

/* ---- access ----------------------------------------------------------------------------------- */

static CUresult may_access(const pool *p, const CUmemAccessDesc *access)
{
    int user = access->location.id;
    if (access->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
        access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        access->flags == CU_MEM_ACCESS_FLAGS_PROT_READ) {
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (!is_device(user)) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    if (user == p->device) { /* a device's own memory cannot be taken from it */
        return access->flags == CU_MEM_ACCESS_FLAGS_PROT_NONE ? CUDA_ERROR_INVALID_DEVICE
                                                              : CUDA_SUCCESS;
    }
    bool peers = sim_card(user)->peer && sim_card(p->device)->peer;
    return peers ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *access, size_t count)
{
    CUresult code = sim_enter(FN_cuMemPoolSetAccess);
    pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS && (p == NULL || (access == NULL && count > 0))) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; code == CUDA_SUCCESS && i < count; i++) {
        code = may_access(p, &access[i]);
    }
    for (size_t i = 0; code == CUDA_SUCCESS && i < count; i++) {
        sim_pool_set_access(p, access[i].location.id, access[i].flags);
    }
    return sim_leave(code);
}

CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool handle, CUmemLocation *location)
{
    CUresult code = sim_enter(FN_cuMemPoolGetAccess);
    const pool *p = pool_get(handle);
    if (code == CUDA_SUCCESS &&
        (p == NULL || flags == NULL || location == NULL ||
         location->type != CU_MEM_LOCATION_TYPE_DEVICE || !is_device(location->id))) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *flags = p->access[location->id];
    }
    return sim_leave(code);
}

/* ---- allocation ------------------------------------------------------------------------------- */

/* Enter a call that does its work on a stream: a node where that captures, and otherwise a call that
   captures forbid. */
static stream *enter(function_id function, CUstream handle, CUresult *code)
{
    stream *s = sim_enter_stream((int)function, handle, code);
    if (s != NULL && s->capture == NULL && sim_capture_forbids()) {
        *code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        return NULL;
    }
    return s;
}

static CUresult allocate(CUdeviceptr *address, size_t size, pool *p, stream *s)
{
    if (address == NULL || p == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (size == 0) { /* no memory, and no error */
        *address = 0;
        return CUDA_SUCCESS;
    }
    if (size > (uint64_t)1 << 46) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return sim_pool_alloc(p, size, s, address);
}

CUresult cuMemAllocAsync(CUdeviceptr *address, size_t size, CUstream handle)
{
    CUresult code;
    stream *s = enter(FN_cuMemAllocAsync, handle, &code);
    return sim_leave(s == NULL ? code : allocate(address, size, current_pool(s->device), s));
}

CUresult cuMemAllocFromPoolAsync(CUdeviceptr *address, size_t size, CUmemoryPool pool_handle,
                                 CUstream handle)
{
    CUresult code;
    stream *s = enter(FN_cuMemAllocFromPoolAsync, handle, &code);
    return sim_leave(s == NULL ? code : allocate(address, size, pool_get(pool_handle), s));
}

CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle)
{
    CUresult code;
    stream *s = enter(FN_cuMemFreeAsync, handle, &code);
    if (s == NULL || address == 0) {
        return sim_leave(code);
    }
    allocation *a = sim_allocation_at(address);
    if (a == NULL || a->node.start != address || a->opened > 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    return sim_leave(a->block == NULL ? sim_free_later(a, s) : sim_pool_free(a, s));
}

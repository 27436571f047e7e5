/*
 * The driver's face: addresses, physical memory, host memory. (Copies: driver_copy.c.)
 */
#define _GNU_SOURCE
#include <string.h>

#include "driver_face.h"
#include "sim.h"

/* ---- how much --------------------------------------------------------------------------------- */

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUresult code = sim_enter(FN_cuMemGetInfo_v2);
    if (code == CUDA_SUCCESS) {
        int device = sim_current()->device;
        sim_orphans_check();
        uint64_t used = sim_card_used(device), memory = sim_card(device)->memory;
        if (total != NULL) {
            *total = memory;
        }
        if (free_bytes != NULL) {
            *free_bytes = used < memory ? memory - used : 0;
        }
    }
    return sim_leave(code);
}

/* ---- addresses -------------------------------------------------------------------------------- */

static bool whole(uint64_t value)
{
    return value != 0 && value % SIM_GRANULARITY == 0;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags)
{
    CUresult code = sim_enter(FN_cuMemAddressReserve);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    if (address == NULL || !whole(size) || flags != 0 || (alignment & (alignment - 1)) != 0 ||
        hint % SIM_GRANULARITY != 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (size > (uint64_t)1 << 46 || alignment > (uint64_t)1 << 46) {
        return sim_leave(CUDA_ERROR_OUT_OF_MEMORY);
    }
    uint64_t aligned = alignment < SIM_GRANULARITY ? SIM_GRANULARITY : alignment;
    return sim_leave(sim_reserve(size, aligned, hint, address));
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size)
{
    CUresult code = sim_enter(FN_cuMemAddressFree);
    return sim_leave(code != CUDA_SUCCESS ? code : sim_unreserve(address, size));
}

/* ---- physical memory -------------------------------------------------------------------------- */

/* Handles of Windows, or of a fabric. Bits without a meaning are ignored, as the driver does. */
enum { FOREIGN_HANDLE_TYPES = 2 | 4 | 8 };

static CUresult check_properties(const CUmemAllocationProp *p)
{
    if (p == NULL || p->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
        p->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        (p->requestedHandleTypes & FOREIGN_HANDLE_TYPES) != 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (p->location.id < 0 || p->location.id >= sim_card_count()) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    const ebbsim_card *card = sim_card(p->location.id);
    bool supported = card->vmm && (p->requestedHandleTypes == 0 || card->exportable);
    return supported ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *properties,
                                       int option)
{
    CUresult code = sim_enter(FN_cuMemGetAllocationGranularity);
    if (code == CUDA_SUCCESS && (granularity == NULL || properties == NULL || option < 0 ||
                                 option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) { /* whatever the properties: the driver does not look */
        *granularity = SIM_GRANULARITY;
    }
    return sim_leave(code);
}

/* The program holds the handle (once more). */
static CUresult hand_out(frame_handle *h, CUmemGenericAllocationHandle *out)
{
    sim.handles += h->count == 0;
    h->count++;
    *out = h->id;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size,
                     const CUmemAllocationProp *properties, unsigned long long flags)
{
    CUresult code = sim_enter(FN_cuMemCreate);
    if (code == CUDA_SUCCESS && (out == NULL || flags != 0 || !whole(size))) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        code = check_properties(properties);
    }
    frame_handle *h = NULL;
    if (code == CUDA_SUCCESS) {
        sim_orphans_check();
        code = sim_frame_create(
            properties->location.id, size,
            properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &h);
    }
    return sim_leave(code != CUDA_SUCCESS ? code : hand_out(h, out));
}

static frame_handle *handle_get(CUmemGenericAllocationHandle id)
{
    return sim_ids_get(&sim.handle_ids, id);
}

CUresult cuMemRelease(CUmemGenericAllocationHandle id)
{
    CUresult code = sim_enter(FN_cuMemRelease);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    frame_handle *h = handle_get(id);
    if (h == NULL || h->count == 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    h->count--;
    sim.handles -= h->count == 0;
    sim_handle_settle(h);
    return sim_leave(CUDA_SUCCESS);
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *address)
{
    CUresult code = sim_enter(FN_cuMemRetainAllocationHandle);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const mapping *m = sim_mapping_at((uint64_t)(uintptr_t)address);
    if (out == NULL || m == NULL || m->chunk) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    return sim_leave(hand_out(m->handle, out));
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties,
                                                CUmemGenericAllocationHandle id)
{
    CUresult code = sim_enter(FN_cuMemGetAllocationPropertiesFromHandle);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const frame_handle *h = handle_get(id);
    if (properties == NULL || h == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    *properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = h->types,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = h->frame->device}};
    return sim_leave(CUDA_SUCCESS);
}

CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle id, int type,
                                      unsigned long long flags)
{
    CUresult code = sim_enter(FN_cuMemExportToShareableHandle);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    frame_handle *h = handle_get(id);
    if (shareable == NULL || h == NULL || flags != 0 ||
        type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || (h->types & type) == 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    return sim_leave(sim_handle_export(h, shareable));
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *shareable,
                                        int type)
{
    CUresult code = sim_enter(FN_cuMemImportFromShareableHandle);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    if (out == NULL || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        bool foreign = out != NULL && (type & FOREIGN_HANDLE_TYPES) != 0;
        return sim_leave(foreign ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE);
    }
    frame_handle *h = NULL;
    code = sim_handle_import((int)(intptr_t)shareable, &h);
    return sim_leave(code != CUDA_SUCCESS ? code : hand_out(h, out));
}

/* ---- mapping and access ----------------------------------------------------------------------- */

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle id,
                  unsigned long long flags)
{
    CUresult code = sim_enter(FN_cuMemMap);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    frame_handle *h = handle_get(id);
    if (h == NULL || flags != 0 || !whole(address) || size == 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (offset != 0 || size != h->frame->size) { /* only whole frames can be mapped */
        return sim_leave(CUDA_ERROR_NOT_SUPPORTED);
    }
    return sim_leave(sim_map(address, size, h));
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size)
{
    CUresult code = sim_enter(FN_cuMemUnmap);
    return sim_leave(code != CUDA_SUCCESS ? code : sim_unmap(address, size));
}

static CUresult check_access(const CUmemAccessDesc *access, size_t count)
{
    if (access == NULL || count == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        if (access[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
            (access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
             access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
             access[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        if (access[i].location.id < 0 || access[i].location.id >= sim_card_count()) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    return CUDA_SUCCESS;
}

/* A device may have access to another's memory only if both are peers. */
static CUresult check_peers(uint64_t address, size_t size, const CUmemAccessDesc *access,
                            size_t count)
{
    for (range *at = sim_ranges_after(&sim.mappings, address);
         at != NULL && at->start < address + size; at = sim_ranges_after(&sim.mappings, at->end)) {
        int owner = ((const mapping *)at)->frame->device;
        for (size_t i = 0; i < count; i++) {
            int user = access[i].location.id;
            if (owner != user && (!sim_card(owner)->peer || !sim_card(user)->peer)) {
                return CUDA_ERROR_INVALID_DEVICE;
            }
        }
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access,
                        size_t count)
{
    CUresult code = sim_enter(FN_cuMemSetAccess);
    if (code == CUDA_SUCCESS && (!whole(address) || size == 0)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        code = check_access(access, count);
    }
    if (code == CUDA_SUCCESS) {
        code = check_peers(address, size, access, count);
    }
    return sim_leave(code != CUDA_SUCCESS ? code : sim_set_access(address, size, access, count));
}

CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                        CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuMemGetAccess);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const mapping *m = sim_mapping_at(address);
    if (flags == NULL || location == NULL || m == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE || location->id < 0 ||
        location->id >= sim_card_count()) {
        return sim_leave(CUDA_ERROR_INVALID_DEVICE);
    }
    *flags = m->chunk ? CU_MEM_ACCESS_FLAGS_PROT_NONE : m->access[location->id];
    return sim_leave(CUDA_SUCCESS);
}

/* ---- cuMemAlloc ------------------------------------------------------------------------------- */

CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t size)
{
    CUresult code = sim_enter(FN_cuMemAlloc_v2);
    if (code == CUDA_SUCCESS && (address == NULL || size == 0)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && size > (uint64_t)1 << 46) {
        code = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return sim_leave(code != CUDA_SUCCESS ? code : sim_alloc(sim_current()->device, size, address));
}

/* Freeing waits for all work of the context that owns the memory; programs rely on it. (Only memory
   of a pool is not waited for.) */
void sim_wait_for_everything(int device)
{
    mark *m = sim_mark_context(device, -1);
    sim_mark_wait(m);
    sim_mark_unref(m);
}

CUresult cuMemFree_v2(CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuMemFree_v2);
    if (code != CUDA_SUCCESS || address == 0) {
        return sim_leave(code);
    }
    allocation *a = sim_allocation_at(address);
    if (a == NULL || a->node.start != address || a->opened > 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (a->block != NULL) {
        return sim_leave(sim_free_block(a));
    }
    sim_wait_for_everything(a->chunk->context);
    a = sim_allocation_at(address); /* the lock was dropped: somebody else may have freed it */
    if (a == NULL || a->node.start != address) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    sim_allocation_leave(a, "cuMemFree");
    sim_free(a);
    return sim_leave(CUDA_SUCCESS);
}

/* ---- pointers --------------------------------------------------------------------------------- */

static CUresult host_attribute(const host_block *b, CUpointer_attribute attribute,
                               CUdeviceptr address, void *value)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(void **)value = &sim.contexts[b->context];
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(CUdeviceptr *)value = address;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = b->context;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = b->node.start;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = b->node.end - b->node.start;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)value = 1;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* `whole` is what the address is a part of: an allocation, or a reservation. */
static CUresult device_attribute(const range *whole_range, const mapping *m,
                                 CUpointer_attribute attribute, CUdeviceptr address, void *value)
{
    int device = m->frame->device;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(void **)value = m->chunk && m->pool == NULL ? &sim.contexts[device] : NULL;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)value = CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        if (m->access[device] == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
            return CUDA_ERROR_INVALID_VALUE;
        }
        *(CUdeviceptr *)value = address;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = device;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)value = whole_range->start;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)value = whole_range->end - whole_range->start;
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)value = 1;
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuPointerGetAttribute);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const host_block *b = sim_host_block_at(address);
    const mapping *m = sim_mapping_at(address);
    const allocation *a = sim_allocation_at(address);
    if (value == NULL || (b == NULL && m == NULL) || (m != NULL && m->chunk && a == NULL)) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (b != NULL) {
        return sim_leave(host_attribute(b, attribute, address, value));
    }
    const range *part_of = a != NULL ? &a->node : sim_ranges_find(&sim.reservations, address);
    return sim_leave(device_attribute(part_of, m, attribute, address, value));
}

enum { LAST_POINTER_ATTRIBUTE = 21 }; /* CUDA 13.0 */

/* Asked for with others, what is not known is 0, and no error: so memory can be asked about that is
   not CUDA's. That is at its own address for the host, and of its range nothing is said. */
static void unknown_attribute(CUpointer_attribute attribute, CUdeviceptr address, void *value)
{
    bool ours = false;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        pthread_mutex_lock(&sim.mutex);
        ours = sim_mapping_at(address) != NULL;
        pthread_mutex_unlock(&sim.mutex);
        *(CUdeviceptr *)value = ours ? 0 : address;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)value = -2; /* CU_DEVICE_INVALID */
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
    case CU_POINTER_ATTRIBUTE_MAPPED:
        *(int *)value = 0;
        break;
    default:
        memset(value, 0, sizeof(void *));
    }
}

CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **values,
                                CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuPointerGetAttributes);
    if (code == CUDA_SUCCESS && (attributes == NULL || values == NULL || count == 0)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    for (unsigned i = 0; code == CUDA_SUCCESS && i < count; i++) {
        code = (unsigned)attributes[i] - 1 < LAST_POINTER_ATTRIBUTE ? CUDA_SUCCESS
                                                                    : CUDA_ERROR_INVALID_VALUE;
    }
    sim_leave(code);
    for (unsigned i = 0; code == CUDA_SUCCESS && i < count; i++) {
        if (cuPointerGetAttribute(values[i], attributes[i], address) != CUDA_SUCCESS) {
            unknown_attribute(attributes[i], address, values[i]);
        }
    }
    return code;
}

/* What an address is a part of: an allocation, what was mapped at once, or pinned memory. */
CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuMemGetAddressRange_v2);
    const mapping *m = sim_mapping_at(address);
    const allocation *a = sim_allocation_at(address);
    const host_block *b = sim_host_block_at(address);
    const range *whole_range = a != NULL                ? &a->node
                               : m != NULL && !m->chunk ? &m->node
                               : b != NULL              ? &b->node
                                                        : NULL;
    if (code == CUDA_SUCCESS && whole_range == NULL) {
        code = CUDA_ERROR_NOT_FOUND;
    }
    if (code == CUDA_SUCCESS && base != NULL) {
        *base = whole_range->start;
    }
    if (code == CUDA_SUCCESS && size != NULL) {
        *size = whole_range->end - whole_range->start;
    }
    return sim_leave(code);
}

/* ---- host memory ------------------------------------------------------------------------------ */

CUresult cuMemHostAlloc(void **address, size_t size, unsigned flags)
{
    CUresult code = sim_enter(FN_cuMemHostAlloc);
    if (code == CUDA_SUCCESS && (address == NULL || flags > 7)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && size == 0) { /* no memory, and no error */
        *address = NULL;
        return sim_leave(CUDA_SUCCESS);
    }
    return sim_leave(
        code != CUDA_SUCCESS ? code : sim_host_alloc(sim_current()->device, size, flags, address));
}

CUresult cuMemFreeHost(void *address)
{
    CUresult code = sim_enter(FN_cuMemFreeHost);
    if (code != CUDA_SUCCESS || address == NULL) {
        return sim_leave(code);
    }
    const host_block *b = sim_host_block_at((uint64_t)(uintptr_t)address);
    if (b != NULL) {
        sim_wait_for_everything(b->context);
    }
    return sim_leave(sim_host_free((uint64_t)(uintptr_t)address));
}

CUresult cuMemHostRegister_v2(void *address, size_t size, unsigned flags)
{
    CUresult code = sim_enter(FN_cuMemHostRegister_v2);
    if (code == CUDA_SUCCESS && (address == NULL || size == 0 || flags > 15)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    return sim_leave(
        code != CUDA_SUCCESS
            ? code
            : sim_host_register(sim_current()->device, (uint64_t)(uintptr_t)address, size, flags));
}

CUresult cuMemHostUnregister(void *address)
{
    CUresult code = sim_enter(FN_cuMemHostUnregister);
    if (code == CUDA_SUCCESS && address == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    const host_block *b = sim_host_block_at((uint64_t)(uintptr_t)address);
    if (code == CUDA_SUCCESS && b != NULL) {
        sim_wait_for_everything(b->context);
    }
    return sim_leave(code != CUDA_SUCCESS ? code
                                          : sim_host_unregister((uint64_t)(uintptr_t)address));
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *address, unsigned flags)
{
    CUresult code = sim_enter(FN_cuMemHostGetDevicePointer_v2);
    if (code == CUDA_SUCCESS &&
        (out == NULL || flags != 0 || sim_host_block_at((uint64_t)(uintptr_t)address) == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *out = (CUdeviceptr)(uintptr_t)address;
    }
    return sim_leave(code);
}

/* All pinned memory is mapped for the device and for every context; only how it is cached is kept. */
CUresult cuMemHostGetFlags(unsigned *flags, void *address)
{
    CUresult code = sim_enter(FN_cuMemHostGetFlags);
    const host_block *b = sim_host_block_at((uint64_t)(uintptr_t)address);
    if (code == CUDA_SUCCESS && (flags == NULL || b == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        unsigned combined = b->registered ? 0 : b->flags & CU_MEMHOSTALLOC_WRITECOMBINED;
        *flags = CU_MEMHOSTALLOC_DEVICEMAP | combined;
    }
    return sim_leave(code);
}

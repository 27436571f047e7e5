/*
 * Addresses and physical memory.
 *
 * A reservation is a PROT_NONE mapping, a frame is a memfd, and a frame with access is that memfd
 * mapped over its piece of the reservation: touching anything else is a real SIGSEGV, and a frame
 * can pass to another process as the file descriptor it is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim.h"

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

mapping *sim_mapping_at(uint64_t address)
{
    return (mapping *)sim_ranges_find(&sim.mappings, address);
}

/* ---- reservations ----------------------------------------------------------------------------- */

static uint64_t reserve_at(uint64_t hint, uint64_t size, uint64_t alignment)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (hint != 0 && hint % alignment == 0) {
        void *at = mmap(pointer(hint), size, PROT_NONE, flags | MAP_FIXED_NOREPLACE, -1, 0);
        if (at == pointer(hint)) {
            return hint;
        }
        if (at != MAP_FAILED) {
            munmap(at, size);
        }
    }
    char *at = mmap(NULL, size + alignment, PROT_NONE, flags, -1, 0);
    if (at == MAP_FAILED) {
        return 0;
    }
    uint64_t start = (uint64_t)(uintptr_t)at;
    uint64_t aligned = (start + alignment - 1) / alignment * alignment;
    if (aligned > start) {
        munmap(at, aligned - start);
    }
    uint64_t tail = start + alignment - aligned;
    if (tail > 0) {
        munmap(pointer(aligned + size), tail);
    }
    return aligned;
}

CUresult sim_reserve(uint64_t size, uint64_t alignment, uint64_t hint, CUdeviceptr *address)
{
    reservation *r = calloc(1, sizeof *r);
    uint64_t at = r == NULL ? 0 : reserve_at(hint, size, alignment);
    if (at == 0) {
        free(r);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    r->node.start = at;
    r->node.end = at + size;
    sim_ranges_insert(&sim.reservations, &r->node);
    sim.reserved_bytes += size;
    *address = at;
    return CUDA_SUCCESS;
}

static void forget_reservation(reservation *r)
{
    uint64_t size = r->node.end - r->node.start;
    munmap(pointer(r->node.start), size);
    sim_ranges_remove(&sim.reservations, &r->node);
    if (!r->allocation) {
        sim.reserved_bytes -= size;
    }
    free(r);
}

CUresult sim_unreserve(uint64_t address, uint64_t size)
{
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, address);
    if (r == NULL || r->allocation || r->node.start != address || r->node.end != address + size) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const range *inside = sim_ranges_after(&sim.mappings, address);
    if (inside != NULL && inside->start < r->node.end) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    forget_reservation(r);
    return CUDA_SUCCESS;
}

/* ---- frames ----------------------------------------------------------------------------------- */

static frame *frame_over(int fd, uint64_t size, int device)
{
    frame *f = calloc(1, sizeof *f);
    if (f != NULL) {
        f->fd = fd;
        f->size = size;
        f->device = device;
        f->shared = -1;
        sim.frames++;
        sim.frame_bytes += size;
    }
    return f;
}

CUresult sim_frame_create(int device, uint64_t size, int handle_types, frame **out)
{
    CUresult code = sim_charge(device, size);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    int fd = memfd_create("ebbtide-sim-frame", MFD_CLOEXEC);
    frame *f = NULL;
    if (fd >= 0 && ftruncate(fd, (off_t)size) == 0) {
        f = frame_over(fd, size, device);
    } else if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
        fprintf(stderr, "ebbtide sim: out of file descriptors after %llu frames (ulimit -n)\n",
                (unsigned long long)sim.frames);
    }
    if (f == NULL) {
        if (fd >= 0) {
            close(fd);
        }
        sim_uncharge(device, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    f->handle_types = handle_types;
    *out = f;
    return CUDA_SUCCESS;
}

void sim_frame_release(frame *f)
{
    if (f->handles > 0 || f->mappings > 0) {
        return;
    }
    sim_history_forget(&f->object);
    close(f->fd);
    sim.frames--;
    sim.frame_bytes -= f->size;
    if (f->shared >= 0) {
        sim.shared_frames[f->shared] = NULL;
        sim_unshare_frame(f->shared);
    } else {
        sim_uncharge(f->device, f->size);
    }
    free(f);
}

/* A new handle of the frame. */
CUresult sim_frame_handle(frame *f, CUmemGenericAllocationHandle *handle)
{
    uint64_t id = sim_ids_add(&sim.handle_ids, f);
    if (id == 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    f->handles++;
    *handle = id;
    return CUDA_SUCCESS;
}

static uint64_t inode_of(int fd)
{
    struct stat status;
    return fd >= 0 && fstat(fd, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

CUresult sim_frame_export(frame *f, int *fd)
{
    if (f->shared < 0) {
        f->shared = sim_share_frame(inode_of(f->fd), f->size, f->device);
        if (f->shared < 0) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        sim.shared_frames[f->shared] = f;
    }
    *fd = dup(f->fd);
    return *fd < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

CUresult sim_frame_import(int fd, frame **out)
{
    uint64_t inode = inode_of(fd);
    int index = inode == 0 ? -1 : sim_find_shared_frame(inode);
    if (index < 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    frame *f = sim.shared_frames[index];
    if (f == NULL) {
        int own = dup(fd);
        f = own < 0 ? NULL
                    : frame_over(own, sim.run->frames[index].bytes, sim.run->frames[index].device);
        if (f == NULL) {
            sim_unshare_frame(index);
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        f->shared = index;
        f->handle_types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        sim.shared_frames[index] = f;
    }
    *out = f;
    return CUDA_SUCCESS;
}

/* ---- mappings --------------------------------------------------------------------------------- */

CUresult sim_map(uint64_t address, uint64_t size, frame *f)
{
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, address);
    if (r == NULL || r->allocation || address + size > r->node.end || size != f->size) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const range *there = sim_ranges_after(&sim.mappings, address);
    if (there != NULL && there->start < address + size) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    mapping *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->node.start = address;
    m->node.end = address + size;
    m->frame = f;
    m->reservation = r;
    f->mappings++;
    sim_ranges_insert(&sim.mappings, &m->node);
    sim.mapped_bytes += size;
    return CUDA_SUCCESS;
}

/* Put the frame behind the address, or take the address's rights away, as the access says. */
static bool apply_access(mapping *m)
{
    bool any = false;
    for (int i = 0; i < SIM_MAX_CARDS; i++) {
        any |= m->access[i] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    uint64_t size = m->node.end - m->node.start;
    if (any && !m->touched) {
        void *at = mmap(pointer(m->node.start), size, PROT_READ | PROT_WRITE,
                        MAP_SHARED | MAP_FIXED, m->frame->fd, 0);
        m->touched = at != MAP_FAILED;
        return m->touched;
    }
    return !m->touched ||
           mprotect(pointer(m->node.start), size, any ? PROT_READ | PROT_WRITE : PROT_NONE) == 0;
}

static void unmap_one(mapping *m)
{
    uint64_t size = m->node.end - m->node.start;
    if (m->touched) {
        mmap(pointer(m->node.start), size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    }
    sim_ranges_remove(&sim.mappings, &m->node);
    sim.mapped_bytes -= size;
    m->frame->mappings--;
    sim_frame_release(m->frame);
    free(m);
}

/*
 * Whole mappings, side by side, from `address` to `address + size`? The driver does nothing by
 * halves: neither unmapping nor access may cut a mapping or cross a hole.
 */
static bool covered(uint64_t address, uint64_t size)
{
    uint64_t at = address;
    while (at < address + size) {
        const mapping *m = sim_mapping_at(at);
        if (m == NULL || m->node.start != at || m->reservation->allocation) {
            return false;
        }
        at = m->node.end;
    }
    return size > 0 && at == address + size;
}

CUresult sim_unmap(uint64_t address, uint64_t size)
{
    if (!covered(address, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (uint64_t at = address; at < address + size;) {
        mapping *m = sim_mapping_at(at);
        uint64_t end = m->node.end;
        sim_history_leave(&m->frame->object, "cuMemUnmap", at, end - at);
        unmap_one(m);
        at = end;
    }
    return CUDA_SUCCESS;
}

CUresult sim_set_access(uint64_t address, uint64_t size, const CUmemAccessDesc *access,
                        size_t count)
{
    if (!covered(address, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (uint64_t at = address; at < address + size;) {
        mapping *m = sim_mapping_at(at);
        bool less = false;
        for (size_t i = 0; i < count; i++) {
            uint8_t *rights = &m->access[access[i].location.id];
            less |= (*rights & ~access[i].flags) != 0;
            *rights = (uint8_t)access[i].flags;
        }
        if (less) {
            sim_history_leave(&m->frame->object, "cuMemSetAccess", at, m->node.end - at);
        }
        if (!apply_access(m)) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        at = m->node.end;
    }
    return CUDA_SUCCESS;
}

/* ---- cuMemAlloc: a frame mapped at an address of its own ---------------------------------------- */

CUresult sim_alloc(int device, uint64_t size, CUdeviceptr *address)
{
    uint64_t rounded = (size + SIM_GRANULARITY - 1) / SIM_GRANULARITY * SIM_GRANULARITY;
    frame *f = NULL;
    CUresult code = sim_frame_create(device, rounded, CU_MEM_HANDLE_TYPE_NONE, &f);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    CUdeviceptr at = 0;
    code = sim_reserve(rounded, SIM_GRANULARITY, 0, &at);
    if (code == CUDA_SUCCESS && (code = sim_map(at, rounded, f)) != CUDA_SUCCESS) {
        sim_unreserve(at, rounded);
    }
    if (code != CUDA_SUCCESS) {
        sim_frame_release(f);
        return code;
    }
    mapping *m = sim_mapping_at(at);
    m->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!apply_access(m)) {
        unmap_one(m);
        sim_unreserve(at, rounded);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->reservation->allocation = true;
    m->reservation->context = device;
    sim.reserved_bytes -= rounded;
    sim.allocations++;
    *address = at;
    return CUDA_SUCCESS;
}

static void free_allocation(mapping *m)
{
    reservation *r = m->reservation;
    unmap_one(m);
    forget_reservation(r);
    sim.allocations--;
}

CUresult sim_free(CUdeviceptr address, const char *call)
{
    mapping *m = sim_mapping_at(address);
    if (m == NULL || !m->reservation->allocation || m->node.start != address) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim_history_leave(&m->frame->object, call, address, m->node.end - m->node.start);
    free_allocation(m);
    return CUDA_SUCCESS;
}

/* ---- the end ---------------------------------------------------------------------------------- */

void sim_memory_context_gone(int device)
{
    for (range *at = sim_ranges_after(&sim.mappings, 0), *next; at != NULL; at = next) {
        mapping *m = (mapping *)at;
        next = sim_ranges_after(&sim.mappings, at->end);
        if (m->reservation->allocation && m->reservation->context == device) {
            free_allocation(m);
        }
    }
}

void sim_memory_reset(void)
{
    for (uint32_t i = 0; i < sim.handle_ids.capacity; i++) {
        frame *f = sim.handle_ids.objects[i];
        if (f != NULL) {
            f->handles--;
            sim_frame_release(f);
        }
    }
    while (sim.mappings.root != NULL) {
        mapping *m = (mapping *)sim.mappings.root;
        if (m->reservation->allocation) {
            free_allocation(m);
        } else {
            unmap_one(m);
        }
    }
    while (sim.reservations.root != NULL) {
        forget_reservation((reservation *)sim.reservations.root);
    }
}

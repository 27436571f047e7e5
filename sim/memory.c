/*
 * Addresses and physical memory.
 *
 * A reservation is a PROT_NONE mapping, a frame is a memfd, and a frame with access is that memfd
 * mapped over its piece of the reservation: touching anything else is a real SIGSEGV, and a frame
 * can pass to another process as the file descriptor it is.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
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

allocation *sim_allocation_at(uint64_t address)
{
    return (allocation *)sim_ranges_find(&sim.allocations, address);
}

/* ---- reservations ----------------------------------------------------------------------------- */

enum { RESERVE = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, MOST_TRIES = 64 };

/* At exactly this address, or 0. */
static uint64_t reserve_there(uint64_t address, uint64_t size)
{
    void *at = mmap(pointer(address), size, PROT_NONE, RESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (at == pointer(address)) {
        return address;
    }
    if (at != MAP_FAILED) {
        munmap(at, size);
    }
    return 0;
}

/* The lowest address to give out: the bottom of the largest free area of up to a tebibyte. Others' mappings
   come from its top. */
static uint64_t bottom(void)
{
    static uint64_t start;
    for (uint64_t area = (uint64_t)1 << 40; start == 0 && area >= SIM_GRANULARITY; area /= 2) {
        void *at = mmap(NULL, area, PROT_NONE, RESERVE, -1, 0);
        if (at != MAP_FAILED) {
            munmap(at, area);
            start = (uint64_t)(uintptr_t)at;
        }
    }
    return start;
}

static uint64_t align(uint64_t address, uint64_t alignment)
{
    return (address + alignment - 1) / alignment * alignment;
}

/*
 * Upwards, in the first gap that is large enough, as a GPU's driver gives addresses out. Programs depend on
 * it: of two free blocks of one size PyTorch's allocator takes the lower one, so the order of its segments
 * decides what fits where.
 */
static uint64_t reserve_upwards(uint64_t size)
{
    uint64_t at = align(bottom(), SIM_GRANULARITY);
    for (int tries = 0; tries < MOST_TRIES; tries++) {
        const range *next = sim_ranges_after(&sim.reservations, at);
        while (next != NULL && next->start < at + size) {
            at = align(next->end, SIM_GRANULARITY);
            next = sim_ranges_after(&sim.reservations, at);
        }
        if (reserve_there(at, size) != 0) {
            return at;
        }
        at = align(at + size, SIM_GRANULARITY); /* something of the process's own is there */
    }
    return 0;
}

static uint64_t reserve_anywhere(uint64_t size, uint64_t alignment)
{
    char *at = mmap(NULL, size + alignment, PROT_NONE, RESERVE, -1, 0);
    if (at == MAP_FAILED) {
        return 0;
    }
    uint64_t start = (uint64_t)(uintptr_t)at;
    uint64_t aligned = align(start, alignment);
    if (aligned > start) {
        munmap(at, aligned - start);
    }
    uint64_t tail = start + alignment - aligned;
    if (tail > 0) {
        munmap(pointer(aligned + size), tail);
    }
    return aligned;
}

static CUresult enter_reservation(uint64_t at, uint64_t size, CUdeviceptr *address)
{
    reservation *r = at == 0 ? NULL : calloc(1, sizeof *r);
    if (r == NULL) {
        if (at != 0) {
            munmap(pointer(at), size);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    r->node.start = at;
    r->node.end = at + size;
    sim_ranges_insert(&sim.reservations, &r->node);
    sim.reserved_bytes += size;
    *address = at;
    return CUDA_SUCCESS;
}

CUresult sim_reserve(uint64_t size, uint64_t alignment, uint64_t hint, CUdeviceptr *address)
{
    uint64_t at = hint != 0 && hint % alignment == 0 ? reserve_there(hint, size) : 0;
    return enter_reservation(at != 0 ? at : reserve_anywhere(size, alignment), size, address);
}

CUresult sim_reserve_chunk(uint64_t size, CUdeviceptr *address)
{
    uint64_t at = reserve_upwards(size);
    return enter_reservation(at != 0 ? at : reserve_anywhere(size, SIM_GRANULARITY), size, address);
}

void sim_forget_reservation(reservation *r)
{
    uint64_t size = r->node.end - r->node.start;
    munmap(pointer(r->node.start), size);
    sim_ranges_remove(&sim.reservations, &r->node);
    if (r->chunk) {
        sim.chunks--;
    } else {
        sim.reserved_bytes -= size;
    }
    free(r);
}

CUresult sim_unreserve(uint64_t address, uint64_t size)
{
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, address);
    if (r == NULL || r->chunk || r->node.start != address || r->node.end != address + size) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const range *inside = sim_ranges_after(&sim.mappings, address);
    if (inside != NULL && inside->start < r->node.end) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim_forget_reservation(r);
    return CUDA_SUCCESS;
}

/* ---- frames and handles ------------------------------------------------------------------------ */

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

static void frame_free(frame *f)
{
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

/*
 * Is an exported frame's file open anywhere else? A write lease is granted only if not. (For this the
 * frame's own descriptor and those handed out are opened anew at export: the kernel counts openings.)
 */
static bool held_elsewhere(const frame *f)
{
    if (fcntl(f->fd, F_SETLEASE, F_WRLCK) == 0) {
        fcntl(f->fd, F_SETLEASE, F_UNLCK);
        return false;
    }
    return errno == EAGAIN;
}

/* The last handle is gone. A file descriptor somewhere may still hold the memory, as on a GPU. */
static void frame_release(frame *f)
{
    if (f->shared >= 0 && held_elsewhere(f)) {
        f->next_orphan = sim.orphans;
        sim.orphans = f;
    } else {
        frame_free(f);
    }
}

void sim_orphans_check(void)
{
    for (frame **link = &sim.orphans; *link != NULL;) {
        frame *f = *link;
        if (f->handles == 0 && held_elsewhere(f)) {
            link = &f->next_orphan;
            continue;
        }
        *link = f->next_orphan;
        if (f->handles == 0) { /* else somebody imported it again */
            frame_free(f);
        }
    }
}

static frame_handle *handle_new(frame *f, int types)
{
    frame_handle *h = calloc(1, sizeof *h);
    uint64_t id = h == NULL ? 0 : sim_ids_add(&sim.handle_ids, h);
    if (id == 0) {
        free(h);
        return NULL;
    }
    *h = (frame_handle){.id = id, .frame = f, .types = types};
    f->handles++;
    return h;
}

void sim_handle_settle(frame_handle *h)
{
    if (h->count > 0 || h->mappings > 0) {
        return;
    }
    frame *f = h->frame;
    sim_ids_drop(&sim.handle_ids, h->id);
    free(h);
    if (--f->handles == 0) {
        frame_release(f);
    }
}

CUresult sim_frame_create(int device, uint64_t size, int types, frame_handle **out)
{
    CUresult code = sim_charge(device, size);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    int fd = memfd_create("ebbtide-sim-frame", MFD_CLOEXEC);
    if (fd < 0 && (errno == EMFILE || errno == ENFILE)) {
        fprintf(stderr, "ebbtide sim: out of file descriptors after %llu frames (ulimit -n)\n",
                (unsigned long long)sim.frames);
    }
    frame *f = fd >= 0 && ftruncate(fd, (off_t)size) == 0 ? frame_over(fd, size, device) : NULL;
    frame_handle *h = f == NULL ? NULL : handle_new(f, types);
    if (h != NULL) {
        *out = h;
        return CUDA_SUCCESS;
    }
    if (f != NULL) {
        frame_free(f);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (fd >= 0) {
        close(fd);
    }
    sim_uncharge(device, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* ---- export and import ------------------------------------------------------------------------ */

uint64_t sim_inode_of(int fd)
{
    struct stat status;
    return fd >= 0 && fstat(fd, &status) == 0 ? (uint64_t)status.st_ino : 0;
}

static int open_again(int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

CUresult sim_frame_share(frame *f)
{
    int own = open_again(f->fd);
    int index = own < 0 ? -1 : sim_share_frame(sim_inode_of(f->fd), f->size, f->device);
    if (index < 0) {
        if (own >= 0) {
            close(own);
        }
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    close(f->fd);
    f->fd = own;
    f->shared = index;
    sim.shared_frames[index] = f;
    return CUDA_SUCCESS;
}

CUresult sim_handle_export(frame_handle *h, int *fd)
{
    CUresult code = h->frame->shared < 0 ? sim_frame_share(h->frame) : CUDA_SUCCESS;
    if (code == CUDA_SUCCESS && (*fd = open_again(h->frame->fd)) < 0) {
        code = CUDA_ERROR_OPERATING_SYSTEM;
    }
    return code;
}

CUresult sim_handle_import(int fd, frame_handle **out)
{
    uint64_t inode = sim_inode_of(fd);
    int index = inode == 0 ? -1 : sim_find_shared_frame(inode);
    if (index < 0) {
        return CUDA_ERROR_UNKNOWN;
    }
    frame *f = sim.shared_frames[index]; /* ours already: one memory has one history */
    if (f == NULL) {
        int own = open_again(fd);
        const shared_frame *shared = &sim.run->frames[index];
        f = own < 0 ? NULL : frame_over(own, shared->bytes, shared->device);
        if (f == NULL) {
            sim_unshare_frame(index);
            return CUDA_ERROR_OPERATING_SYSTEM;
        }
        f->shared = index;
        sim.shared_frames[index] = f;
    }
    *out = handle_new(f, CU_MEM_HANDLE_TYPE_NONE);
    sim_orphans_check();
    return *out == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* ---- mappings --------------------------------------------------------------------------------- */

/* Every address of the range is reserved, by the program itself, in one reservation or several. */
static bool reserved(uint64_t address, uint64_t size)
{
    uint64_t at = address;
    while (at < address + size) {
        const reservation *r = (const reservation *)sim_ranges_find(&sim.reservations, at);
        if (r == NULL || r->chunk) {
            return false;
        }
        at = r->node.end;
    }
    return at > address; /* else the range ends behind the last address there is */
}

CUresult sim_map_frame(uint64_t address, uint64_t size, frame_handle *h)
{
    mapping *m = calloc(1, sizeof *m);
    if (m == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->node.start = address;
    m->node.end = address + size;
    m->handle = h;
    m->frame = h->frame;
    h->mappings++;
    sim_ranges_insert(&sim.mappings, &m->node);
    sim.mapped_bytes += size;
    return CUDA_SUCCESS;
}

CUresult sim_map(uint64_t address, uint64_t size, frame_handle *h)
{
    const range *there = sim_ranges_after(&sim.mappings, address);
    if (!reserved(address, size) || (there != NULL && there->start < address + size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return sim_map_frame(address, size, h);
}

static bool anybody_has_access(const mapping *m)
{
    bool any = false;
    for (int i = 0; i < SIM_MAX_CARDS; i++) {
        any |= m->access[i] != CU_MEM_ACCESS_FLAGS_PROT_NONE;
    }
    return any;
}

bool sim_reachable(uint64_t address, uint64_t bytes)
{
    uint64_t end = address + bytes;
    while (address < end) {
        const host_block *b = sim_host_block_at(address);
        const mapping *m = b != NULL ? NULL : sim_mapping_at(address);
        if (b == NULL && (m == NULL || !m->touched || !anybody_has_access(m))) {
            return false;
        }
        address = b != NULL ? b->node.end : m->node.end;
    }
    return true;
}

/* Put the frame behind the address, or take the address's rights away, as the access says. */
bool sim_apply_access(mapping *m)
{
    bool any = anybody_has_access(m);
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

void sim_unmap_one(mapping *m)
{
    uint64_t size = m->node.end - m->node.start;
    if (m->touched &&
        mmap(pointer(m->node.start), size, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED) {
        abort(); /* the frame would stay where nobody knows of it */
    }
    sim_history_forget_mapping(m);
    sim_ranges_remove(&sim.mappings, &m->node);
    sim.mapped_bytes -= size;
    m->handle->mappings--;
    sim_handle_settle(m->handle);
    free(m);
}

/* No mapping is cut by the ends of the range. (Holes between mappings do not matter.) */
static bool cuts_none(uint64_t address, uint64_t size)
{
    const range *first = sim_ranges_find(&sim.mappings, address);
    const range *last = sim_ranges_find(&sim.mappings, address + size - 1);
    return (first == NULL || first->start == address) &&
           (last == NULL || last->end <= address + size);
}

/* What is mapped in the range, holes or not; only its beginning need be reserved. */
CUresult sim_unmap(uint64_t address, uint64_t size)
{
    if (size == 0 || !reserved(address, 1) || !cuts_none(address, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim.calls_taking++;
    for (uint64_t at = address;;) {
        mapping *m = (mapping *)sim_ranges_after(&sim.mappings, at);
        if (m == NULL || m->node.start >= address + size) {
            return CUDA_SUCCESS;
        }
        at = m->node.end;
        if (m->chunk) {
            continue; /* cuMemAlloc's own */
        }
        sim_history_leave_mapping(m, "cuMemUnmap");
        sim_unmap_one(m);
    }
}

static bool set_access(mapping *m, const CUmemAccessDesc *access, size_t count)
{
    bool less = false;
    for (size_t i = 0; i < count; i++) {
        uint8_t *rights = &m->access[access[i].location.id];
        less |= (*rights & ~access[i].flags) != 0;
        *rights = (uint8_t)access[i].flags;
    }
    if (less) {
        sim_history_leave_mapping(m, "cuMemSetAccess");
    }
    return sim_apply_access(m);
}

CUresult sim_set_access(uint64_t address, uint64_t size, const CUmemAccessDesc *access,
                        size_t count)
{
    const mapping *first = sim_mapping_at(address), *last = sim_mapping_at(address + size - 1);
    if (first == NULL || last == NULL || first->chunk || last->chunk || !cuts_none(address, size)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim.calls_taking++;
    /* At a hole the driver stops, and says nothing: what is behind it has no access. */
    for (uint64_t at = address; at < address + size;) {
        mapping *m = sim_mapping_at(at);
        if (m == NULL) {
            break;
        }
        at = m->node.end;
        if (!set_access(m, access, count)) {
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    return CUDA_SUCCESS;
}

/* ---- the end ---------------------------------------------------------------------------------- */

void sim_memory_reset(void)
{
    while (sim.allocations.root != NULL) {
        sim_free((allocation *)sim.allocations.root);
    }
    sim_pools_reset();
    sim_leaving_reset();
    for (uint32_t i = 0; i < sim.handle_ids.capacity; i++) {
        frame_handle *h = sim.handle_ids.objects[i];
        if (h != NULL) {
            h->count = 0;
            sim_handle_settle(h);
        }
    }
    while (sim.mappings.root != NULL) {
        sim_unmap_one((mapping *)sim.mappings.root);
    }
    while (sim.reservations.root != NULL) {
        sim_forget_reservation((reservation *)sim.reservations.root);
    }
    while (sim.orphans != NULL) {
        frame *f = sim.orphans;
        sim.orphans = f->next_orphan;
        frame_free(f);
    }
    sim.handles = 0;
}

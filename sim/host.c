/*
 * Pinned host memory: allocated by the driver, or the program's own and registered.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim.h"

host_block *sim_host_block_at(uint64_t address)
{
    return (host_block *)sim_ranges_find(&sim.host_blocks, address);
}

static host_block *add_block(uint64_t address, uint64_t size, int device, unsigned flags)
{
    host_block *b = calloc(1, sizeof *b);
    if (b != NULL) {
        b->node.start = address;
        b->node.end = address + size;
        b->context = device;
        b->flags = flags;
        sim_ranges_insert(&sim.host_blocks, &b->node);
    }
    return b;
}

static void drop_block(host_block *b)
{
    sim_history_forget(&b->object);
    sim_ranges_remove(&sim.host_blocks, &b->node);
    if (!b->registered) {
        munmap((void *)(uintptr_t)b->node.start, b->mapped);
    }
    free(b);
}

CUresult sim_host_alloc(int device, uint64_t size, unsigned flags, void **address)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (size / page > (uint64_t)sysconf(_SC_PHYS_PAGES)) {
        return CUDA_ERROR_OUT_OF_MEMORY; /* what is pinned must be there, whatever mmap promises */
    }
    uint64_t rounded = (size + page - 1) / page * page;
    void *at = mmap(NULL, rounded, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    host_block *b = add_block((uint64_t)(uintptr_t)at, size, device, flags);
    if (b == NULL) {
        munmap(at, rounded);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    b->mapped = rounded;
    *address = at;
    return CUDA_SUCCESS;
}

CUresult sim_host_free(uint64_t address)
{
    host_block *b = sim_host_block_at(address);
    if (b == NULL || b->registered || b->node.start != address) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim_history_leave(&b->object, "cuMemFreeHost", address, b->node.end - address);
    drop_block(b);
    return CUDA_SUCCESS;
}

/* Is part of it a file on a disk that is mapped so: 's' and written through memory, or 'p'? */
static bool has_file(uint64_t start, uint64_t end, char sharing)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t room = 0;
    bool found = false;
    while (maps != NULL && !found && getline(&line, &room, maps) > 0) {
        unsigned long from, to, inode;
        char access[5], path[6] = "";
        if (sscanf(line, "%lx-%lx %4s %*s %*s %lu %5s", &from, &to, access, &inode, path) >= 4) {
            bool disk = inode != 0 && strcmp(path, "/dev/") != 0 && strcmp(path, "/memf") != 0;
            found = disk && access[3] == sharing && (access[1] == 'w' || sharing == 'p') &&
                    from < end && to > start;
        }
    }
    free(line);
    if (maps != NULL) {
        fclose(maps);
    }
    return found;
}

/* Is the program's memory there, and writable unless it is to be read only? Pins it in a way: the
   pages are brought in, as they are for a GPU. */
static bool can_be_pinned(uint64_t address, uint64_t size, unsigned flags)
{
    /* The system pins no pages of a shared file for writing: it could not tell when they change. */
    if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) == 0 && has_file(address, address + size, 's')) {
        return false;
    }
#if defined(MADV_POPULATE_READ) && defined(MADV_POPULATE_WRITE)
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t start = address / page * page, end = (address + size + page - 1) / page * page;
    void *at = (void *)(uintptr_t)start;
    bool readable = madvise(at, end - start, MADV_POPULATE_READ) == 0;
    if (!readable && errno == EINVAL) {
        return true; /* a kernel that cannot say: the benefit of the doubt */
    }
    return readable && ((flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0 ||
                        madvise(at, end - start, MADV_POPULATE_WRITE) == 0);
#else
    (void)address, (void)size, (void)flags;
    return true;
#endif
}

CUresult sim_host_register(int device, uint64_t address, uint64_t size, unsigned flags)
{
    const range *there = sim_ranges_after(&sim.host_blocks, address);
    if (there != NULL && there->start < address + size) {
        return ((const host_block *)there)->registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED
                                                       : CUDA_ERROR_INVALID_VALUE;
    }
    if (address + size < address || sim_ranges_find(&sim.reservations, address) != NULL ||
        !can_be_pinned(address, size, flags)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    host_block *b = add_block(address, size, device, flags);
    if (b == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    b->registered = true;
    if ((flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0 && has_file(address, address + size, 'p')) {
        sim_report_private("cuMemHostRegister", address, size);
    }
    return CUDA_SUCCESS;
}

CUresult sim_host_unregister(uint64_t address)
{
    host_block *b = sim_host_block_at(address);
    if (b == NULL) {
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    }
    if (!b->registered || b->node.start != address) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    sim_history_leave(&b->object, "cuMemHostUnregister", address, b->node.end - address);
    drop_block(b);
    return CUDA_SUCCESS;
}

void sim_host_context_gone(int device)
{
    for (range *at = sim_ranges_after(&sim.host_blocks, 0), *next; at != NULL; at = next) {
        host_block *b = (host_block *)at;
        next = sim_ranges_after(&sim.host_blocks, at->end);
        if (b->context == device) {
            sim_history_leave(&b->object, "cuDevicePrimaryCtxRelease", at->start,
                              at->end - at->start);
            drop_block(b);
        }
    }
}

void sim_host_reset(void)
{
    while (sim.host_blocks.root != NULL) {
        drop_block((host_block *)sim.host_blocks.root);
    }
}

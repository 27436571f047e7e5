/*
 * cuMemAlloc: pieces of chunks, each a frame mapped at an address of its own. Who may reach them
 * (peers), and memory of other processes, which is a chunk over an imported frame.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver_face.h"
#include "sim.h"

enum { SMALL = 1 << 20 }; /* below this, allocations share a chunk */

/* ---- chunks ----------------------------------------------------------------------------------- */

void sim_chunk_free(mapping *m)
{
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, m->node.start);
    sim_unmap_one(m);
    sim_forget_reservation(r);
}

/* The frame of a handle that nobody holds yet, mapped for `device` at an address of its own. */
static mapping *chunk_over(frame_handle *h, int device, CUresult *code)
{
    uint64_t size = h->frame->size;
    CUdeviceptr at = 0;
    *code = sim_reserve_chunk(size, &at);
    if (*code == CUDA_SUCCESS && (*code = sim_map_frame(at, size, h)) != CUDA_SUCCESS) {
        sim_unreserve(at, size);
    }
    if (*code != CUDA_SUCCESS) {
        sim_handle_settle(h);
        return NULL;
    }
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, at);
    r->chunk = true;
    sim.chunks++;
    sim.reserved_bytes -= size;
    mapping *m = sim_mapping_at(at);
    m->chunk = true;
    m->context = device;
    m->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!sim_apply_access(m)) {
        sim_chunk_free(m);
        *code = CUDA_ERROR_OUT_OF_MEMORY;
        return NULL;
    }
    return m;
}

mapping *sim_chunk_new(int device, uint64_t size, CUresult *code)
{
    frame_handle *h = NULL;
    *code = sim_frame_create(device, size, CU_MEM_HANDLE_TYPE_NONE, &h);
    return *code != CUDA_SUCCESS ? NULL : chunk_over(h, device, code);
}

static mapping *chunk_with_room(int device, uint64_t size)
{
    for (range *at = sim_ranges_after(&sim.mappings, 0); size < SMALL && at != NULL;
         at = sim_ranges_after(&sim.mappings, at->end)) {
        mapping *m = (mapping *)at;
        if (m->chunk && m->shared && m->context == device &&
            m->node.end - m->node.start - m->used >= size) {
            return m;
        }
    }
    return NULL;
}

/* ---- allocations ------------------------------------------------------------------------------ */

/*
 * Memory of cuMemAlloc that was freed in a stream's order (cuMemFreeAsync). The program cannot use it
 * any more; its chunk is let go of when the free is over, and the host waits for something.
 */
typedef struct leaving {
    mapping *chunk;
    mark *freed;
    struct leaving *next;
} leaving;

static leaving *leavings; /* under sim.mutex */

CUresult sim_alloc(int device, uint64_t size, CUdeviceptr *address)
{
    CUresult code = CUDA_SUCCESS;
    allocation *a = calloc(1, sizeof *a);
    mapping *m = a == NULL ? NULL : chunk_with_room(device, size);
    if (a != NULL && m == NULL) {
        uint64_t rounded = (size + SIM_GRANULARITY - 1) / SIM_GRANULARITY * SIM_GRANULARITY;
        m = sim_chunk_new(device, rounded, &code);
        if (m == NULL && leavings != NULL) {
            sim_leaving_release();
            m = sim_chunk_new(device, rounded, &code);
        }
        for (int i = 0; m != NULL && i < SIM_MAX_CARDS; i++) {
            m->access[i] |= sim.peers[i][device] ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
        }
    }
    if (m == NULL) {
        free(a);
        return code != CUDA_SUCCESS ? code : CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->shared = size < SMALL;
    a->chunk = m;
    a->node.start = m->node.start + m->used;
    a->node.end = a->node.start + size;
    m->used += (size + 511) / 512 * 512;
    m->live++;
    sim_ranges_insert(&sim.allocations, &a->node);
    *address = a->node.start;
    return CUDA_SUCCESS;
}

/* Its own context's work is over; another's may not be. */
void sim_allocation_leave(const allocation *a, const char *call)
{
    sim_history_leave(&a->chunk->frame->object, call, a->node.start, a->node.end - a->node.start);
}

void sim_free(allocation *a)
{
    mapping *m = a->chunk;
    pool_block *block = a->block;
    sim_ranges_remove(&sim.allocations, &a->node);
    free(a);
    if (block != NULL) {
        sim_pool_take_back(block, NULL);
    } else if (--m->live == 0) {
        sim_chunk_free(m);
    }
}

CUresult sim_free_later(allocation *a, stream *s)
{
    if (s->capture != NULL) {
        return CUDA_ERROR_INVALID_VALUE; /* a graph frees what it allocated, and nothing else */
    }
    leaving *l = calloc(1, sizeof *l);
    CUresult code = l == NULL ? CUDA_ERROR_OUT_OF_MEMORY
                              : sim_touch("cuMemFreeAsync", s, a->node.start,
                                          a->node.end - a->node.start, CU_GRAPH_NODE_TYPE_MEM_FREE);
    if (code != CUDA_SUCCESS) {
        free(l);
        return code;
    }
    *l = (leaving){.chunk = a->chunk, .freed = sim_mark_stream(s, -1), .next = leavings};
    leavings = l;
    sim_ranges_remove(&sim.allocations, &a->node);
    free(a);
    return CUDA_SUCCESS;
}

static bool has_left(const leaving *l)
{
    bool ran = sim_mark_reached(l->freed);
    for (uint32_t i = 0; ran && i < l->freed->order.count && i < sim.slots; i++) {
        ran = sim_run(i, l->freed->order.at[i]);
    }
    return ran;
}

void sim_leaving_release(void)
{
    for (leaving **link = &leavings; *link != NULL;) {
        leaving *l = *link;
        if (!has_left(l)) {
            link = &l->next;
            continue;
        }
        *link = l->next;
        if (--l->chunk->live == 0) {
            sim_chunk_free(l->chunk);
        }
        sim_mark_unref(l->freed);
        free(l);
    }
}

void sim_leaving_reset(void)
{
    while (leavings != NULL) {
        leaving *l = leavings;
        leavings = l->next;
        sim_mark_unref(l->freed);
        free(l);
    }
}

void sim_memory_context_gone(int device)
{
    sim_leaving_release(); /* its work is over */
    for (range *at = sim_ranges_after(&sim.allocations, 0), *next; at != NULL; at = next) {
        next = sim_ranges_after(&sim.allocations, at->end);
        allocation *a = (allocation *)at;
        if (a->chunk->context == device) {
            sim_allocation_leave(a, "cuDevicePrimaryCtxRelease");
            sim_free(a);
        }
    }
    sim_pools_context_gone(device);
    for (int i = 0; i < SIM_MAX_CARDS; i++) {
        sim.peers[device][i] = sim.peers[i][device] = false;
    }
}

/* ---- peers ------------------------------------------------------------------------------------ */

static void open_to(int user, int owner, bool on)
{
    sim.peers[user][owner] = on;
    for (range *at = sim_ranges_after(&sim.mappings, 0); at != NULL;
         at = sim_ranges_after(&sim.mappings, at->end)) {
        mapping *m = (mapping *)at;
        if (m->chunk && m->pool == NULL && m->context == owner) {
            m->access[user] =
                on ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
        }
    }
}

/* Let the current context reach what cuMemAlloc gave, and will give, in another. */
CUresult cuCtxEnablePeerAccess(CUcontext handle, unsigned flags)
{
    CUresult code = sim_enter(FN_cuCtxEnablePeerAccess);
    const context *peer = sim_context_of(handle);
    if (code == CUDA_SUCCESS && (peer == NULL || flags != 0)) {
        code = peer == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_INVALID_VALUE;
    }
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    int user = sim_current()->device, owner = peer->device;
    if (user == owner || !peer->active) {
        return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    if (!sim_card(user)->peer || !sim_card(owner)->peer) {
        return sim_leave(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    }
    if (sim.peers[user][owner]) {
        return sim_leave(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    }
    open_to(user, owner, true);
    return sim_leave(CUDA_SUCCESS);
}

CUresult cuCtxDisablePeerAccess(CUcontext handle)
{
    CUresult code = sim_enter(FN_cuCtxDisablePeerAccess);
    const context *peer = sim_context_of(handle);
    if (code == CUDA_SUCCESS && peer == NULL) {
        code = CUDA_ERROR_INVALID_CONTEXT;
    }
    if (code == CUDA_SUCCESS && !sim.peers[sim_current()->device][peer->device]) {
        code = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    }
    if (code == CUDA_SUCCESS) {
        open_to(sim_current()->device, peer->device, false);
    }
    return sim_leave(code);
}

/* ---- memory of other processes ---------------------------------------------------------------- */

typedef struct memory_ticket { /* what a CUipcMemHandle holds */
    char name[16];
    int pid, fd; /* the memfd, as the owner has it open */
    uint64_t inode, offset, size;
} memory_ticket;

static const char ticket_name[16] = "ebbtide-memory";

_Static_assert(sizeof(memory_ticket) <= sizeof(CUipcMemHandle), "a ticket fits its handle");

CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuIpcGetMemHandle);
    const allocation *a = sim_allocation_at(address);
    if (code == CUDA_SUCCESS && (out == NULL || a == NULL || a->block != NULL || a->opened > 0)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    frame *f = code == CUDA_SUCCESS ? a->chunk->frame : NULL;
    if (code == CUDA_SUCCESS && f->shared < 0) {
        code = sim_frame_share(f);
    }
    if (code == CUDA_SUCCESS) {
        memory_ticket t = {.pid = (int)getpid(),
                           .fd = f->fd,
                           .inode = sim_inode_of(f->fd),
                           .offset = a->node.start - a->chunk->node.start,
                           .size = a->node.end - a->node.start};
        memcpy(t.name, ticket_name, sizeof t.name);
        memset(out, 0, sizeof *out);
        memcpy(out, &t, sizeof t);
    }
    return sim_leave(code);
}

/* The memory of a ticket, if this process has it open. */
static allocation *opened_before(const memory_ticket *t)
{
    for (range *at = sim_ranges_after(&sim.allocations, 0); at != NULL;
         at = sim_ranges_after(&sim.allocations, at->end)) {
        allocation *a = (allocation *)at;
        if (a->opened > 0 && sim_inode_of(a->chunk->frame->fd) == t->inode &&
            at->start - a->chunk->node.start == t->offset) {
            return a;
        }
    }
    return NULL;
}

static CUresult import(const memory_ticket *t, frame_handle **out)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", t->pid, t->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CUresult code = fd >= 0 && sim_inode_of(fd) == t->inode ? sim_handle_import(fd, out)
                                                            : CUDA_ERROR_MAP_FAILED;
    if (fd >= 0) {
        close(fd);
    }
    return code == CUDA_SUCCESS ? code : CUDA_ERROR_MAP_FAILED;
}

static CUresult open_memory(const memory_ticket *t, CUdeviceptr *address)
{
    allocation *a = opened_before(t);
    if (a != NULL) {
        a->opened++;
        *address = a->node.start;
        return CUDA_SUCCESS;
    }
    frame_handle *h = NULL;
    CUresult code = import(t, &h);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    a = calloc(1, sizeof *a);
    mapping *m = a == NULL ? NULL : chunk_over(h, sim_current()->device, &code);
    if (m == NULL) {
        if (a == NULL) {
            sim_handle_settle(h);
        }
        free(a);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    m->access[m->frame->device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    m->live = 1;
    a->chunk = m;
    a->opened = 1;
    a->node.start = m->node.start + t->offset;
    a->node.end = a->node.start + t->size;
    sim_ranges_insert(&sim.allocations, &a->node);
    *address = a->node.start;
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *address, CUipcMemHandle handle, unsigned flags)
{
    CUresult code = sim_enter(FN_cuIpcOpenMemHandle_v2);
    memory_ticket t;
    memcpy(&t, &handle, sizeof t);
    if (code == CUDA_SUCCESS && (address == NULL || flags > CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && memcmp(t.name, ticket_name, sizeof t.name) != 0) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS && t.pid == (int)getpid()) {
        code = CUDA_ERROR_INVALID_CONTEXT;
    }
    return sim_leave(code != CUDA_SUCCESS ? code : open_memory(&t, address));
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address)
{
    CUresult code = sim_enter(FN_cuIpcCloseMemHandle);
    allocation *a = sim_allocation_at(address);
    if (code == CUDA_SUCCESS && (a == NULL || a->opened == 0 || a->node.start != address)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code != CUDA_SUCCESS || --a->opened > 0) {
        return sim_leave(code);
    }
    a->opened = 1; /* ours until the wait is over: the lock is dropped meanwhile */
    sim_wait_for_everything(a->chunk->context);
    a = sim_allocation_at(address);
    if (a == NULL || a->node.start != address || a->opened == 0) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (--a->opened == 0) {
        sim_allocation_leave(a, "cuIpcCloseMemHandle");
        sim_free(a);
    }
    return sim_leave(CUDA_SUCCESS);
}

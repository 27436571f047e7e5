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

static uint64_t end_of_addresses(const mapping *m)
{
    return sim_ranges_find(&sim.reservations, m->node.start)->end;
}

mapping *sim_chunk_last(const mapping *first)
{
    uint64_t limit = end_of_addresses(first);
    mapping *last = sim_mapping_at(first->node.start);
    for (mapping *next = last; next != NULL && next->node.start < limit;
         next = (mapping *)sim_ranges_after(&sim.mappings, last->node.end)) {
        last = next;
    }
    return last;
}

static void unmap_chunk(mapping *m)
{
    sim_unmap_one(m);
    sim.chunk_mappings--;
}

void sim_chunk_drop_last(mapping *first)
{
    unmap_chunk(sim_chunk_last(first));
}

void sim_chunk_free(mapping *first)
{
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, first->node.start);
    while (sim_chunk_last(first) != first) {
        sim_chunk_drop_last(first);
    }
    unmap_chunk(first);
    sim_forget_reservation(r);
}

/* A frame that nobody holds yet, mapped for `device` at addresses of a chunk. NULL: no memory, and
   the frame is gone. */
static mapping *map_chunk(uint64_t at, frame_handle *h, int device)
{
    if (sim_map_frame(at, h->frame->size, h) != CUDA_SUCCESS) {
        sim_handle_settle(h);
        return NULL;
    }
    mapping *m = sim_mapping_at(at);
    sim.chunk_mappings++;
    m->chunk = true;
    m->context = device;
    m->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!sim_apply_access(m)) {
        unmap_chunk(m);
        return NULL;
    }
    return m;
}

/* The frame of a handle that nobody holds yet, at an address of its own. */
static mapping *chunk_over(frame_handle *h, int device, uint64_t room, CUresult *code)
{
    uint64_t size = h->frame->size + room;
    CUdeviceptr at = 0;
    *code = sim_reserve_chunk(size, &at);
    if (*code != CUDA_SUCCESS && room > 0) {
        size = h->frame->size;
        *code = sim_reserve_chunk(size, &at);
    }
    if (*code != CUDA_SUCCESS) {
        sim_handle_settle(h);
        return NULL;
    }
    reservation *r = (reservation *)sim_ranges_find(&sim.reservations, at);
    r->chunk = true;
    sim.chunks++;
    sim.reserved_bytes -= size;
    mapping *m = map_chunk(at, h, device);
    if (m == NULL) {
        sim_forget_reservation(r);
        *code = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return m;
}

mapping *sim_chunk_new(int device, uint64_t size, uint64_t room, CUresult *code)
{
    frame_handle *h = NULL;
    *code = sim_frame_create(device, size, CU_MEM_HANDLE_TYPE_NONE, &h);
    return *code != CUDA_SUCCESS ? NULL : chunk_over(h, device, room, code);
}

bool sim_chunk_extend(const mapping *first, uint64_t size)
{
    uint64_t at = sim_chunk_last(first)->node.end;
    frame_handle *h = NULL;
    if (end_of_addresses(first) - at < size ||
        sim_frame_create(first->frame->device, size, CU_MEM_HANDLE_TYPE_NONE, &h) != CUDA_SUCCESS) {
        return false;
    }
    mapping *m = map_chunk(at, h, first->context);
    if (m != NULL) {
        m->pool = first->pool;
        memcpy(m->access, first->access, sizeof m->access);
    }
    return m != NULL;
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
 * Memory of cuMemAlloc that was freed in a stream's order (cuMemFreeAsync), and memory of a pool that
 * was freed in no order (cuMemFree). The program cannot use it any more; it is let go of when the
 * free is over, and the host waits for something.
 */
typedef struct leaving {
    mapping *chunk;
    pool_block *block; /* of a pool, or NULL */
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
        m = sim_chunk_new(device, rounded, 0, &code);
        if (m == NULL && leavings != NULL) {
            sim_leaving_release();
            m = sim_chunk_new(device, rounded, 0, &code);
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
    for (range *at = sim_ranges_after(&sim.mappings, a->node.start);
         at != NULL && at->start < a->node.end; at = sim_ranges_after(&sim.mappings, at->end)) {
        sim_history_leave(&((mapping *)at)->frame->object, call, a->node.start,
                          a->node.end - a->node.start);
    }
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

/* Nobody waits for what is done there; but it is nobody else's before all work of now is over. */
CUresult sim_free_block(allocation *a)
{
    leaving *l = calloc(1, sizeof *l);
    if (l == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *l = (leaving){
        .block = a->block, .freed = sim_mark_context(a->chunk->context, -1), .next = leavings};
    leavings = l;
    sim_ranges_remove(&sim.allocations, &a->node);
    free(a);
    sim_leaving_release(); /* at once, if nothing is going on */
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
        if (l->block != NULL) {
            sim_pool_take_back(l->block, NULL);
        } else if (--l->chunk->live == 0) {
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
    if (!peer->active) {
        return sim_leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    if (user == owner || !sim_card(user)->peer || !sim_card(owner)->peer) {
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
                                                            : CUDA_ERROR_INVALID_VALUE;
    if (fd >= 0) {
        close(fd);
    }
    return code == CUDA_SUCCESS ? code : CUDA_ERROR_INVALID_VALUE;
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
    mapping *m = a == NULL ? NULL : chunk_over(h, sim_current()->device, 0, &code);
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
    if (code == CUDA_SUCCESS && (address == NULL || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)) {
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

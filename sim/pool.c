/*
 * Memory pools: cuMemAllocAsync and cuMemFreeAsync.
 *
 * A pool holds chunks of memory, cut into blocks. A block that was freed carries a mark, the place of
 * the free in its stream, and may be handed out again on a stream that is ordered after it:
 *
 *    level   the mark is                                  then
 *    READY   none, or in the stream's order, or observed  taken as it is
 *    OVER    reached by the clock                         taken, and the stream waits for the mark
 *    LATER   still to come                                as OVER, but only where memory is short
 *
 * The wait at OVER costs no time; it is there because order is not time (sim.h), and what the new
 * owner does must come after what the old one did.
 *
 *    chunk  [ block | free, mark | block | free .............. ] addresses that follow
 *
 * Neighbours that are free become one, whose mark is both marks. A pool that grows takes up a chunk
 * that ends with free memory, as long as addresses follow there, and then a block may lie in several
 * mappings; else it gets a new chunk. Chunks that are free as a whole, and last mappings that are, go
 * back to the card when the host waits for something and the pool holds more than its threshold.
 */
#include <stdlib.h>
#include <string.h>

#include "driver_face.h"
#include "sim.h"

enum { UNIT = 512 };
#define CHUNK ((uint64_t)32 << 20) /* a pool grows by this at least, while the card has it */
#define ROOM ((uint64_t)4 << 30)   /* addresses that follow a new chunk */

struct pool_block {
    uint64_t start, size;
    uint64_t asked; /* in use: what the program asked for, to the byte */
    bool free;
    mark *freed; /* NULL: never in use, or known to be over */
    pool_chunk *chunk;
    struct pool_block *next, *previous; /* in its chunk, by address */
};

struct pool_chunk {
    mapping *mapping;
    pool *pool;
    pool_block *blocks;
    struct pool_chunk *next;
};

static pool *pools; /* all; under sim.mutex */

/* ---- pools ------------------------------------------------------------------------------------ */

pool *sim_pool_new(int device)
{
    pool *p = calloc(1, sizeof *p);
    uint64_t id = p == NULL ? 0 : sim_ids_add(&sim.pool_ids, p);
    if (id == 0) {
        free(p);
        return NULL;
    }
    p->id = id;
    p->device = device;
    p->reuse[0] = p->reuse[1] = p->reuse[2] = 1;
    p->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    p->next = pools;
    pools = p;
    return p;
}

pool *sim_pool_of(int device)
{
    pool **own = &sim.default_pools[device];
    if (*own == NULL && (*own = sim_pool_new(device)) != NULL) {
        (*own)->is_default = true;
    }
    return *own;
}

static void forget_pool(pool *p)
{
    for (pool **link = &pools; *link != NULL; link = &(*link)->next) {
        if (*link == p) {
            *link = p->next;
            break;
        }
    }
    for (int i = 0; i < SIM_MAX_CARDS; i++) {
        sim.default_pools[i] = sim.default_pools[i] == p ? NULL : sim.default_pools[i];
        sim.current_pools[i] = sim.current_pools[i] == p ? NULL : sim.current_pools[i];
    }
    sim_ids_drop(&sim.pool_ids, p->id);
    free(p);
}

/* ---- chunks and blocks ------------------------------------------------------------------------ */

static void clear_mark(pool_block *b)
{
    if (b->freed != NULL) {
        sim_mark_unref(b->freed);
        b->freed = NULL;
    }
}

static uint64_t bytes_of(const pool_chunk *c)
{
    return sim_chunk_last(c->mapping)->node.end - c->mapping->node.start;
}

static pool_block *last_block(const pool_chunk *c)
{
    pool_block *b = c->blocks;
    while (b->next != NULL) {
        b = b->next;
    }
    return b;
}

static void drop_chunk(pool_chunk *c)
{
    pool *p = c->pool;
    for (pool_chunk **link = &p->chunks; *link != NULL; link = &(*link)->next) {
        if (*link == c) {
            *link = c->next;
            break;
        }
    }
    for (pool_block *b = c->blocks, *next; b != NULL; b = next) {
        next = b->next;
        clear_mark(b);
        free(b);
    }
    p->reserved -= bytes_of(c);
    sim_chunk_free(c->mapping);
    free(c);
}

typedef enum level { READY, OVER, LATER, NEVER } level;

static level level_of(const pool_block *b, const stream *s);

static void count_reserved(pool *p, uint64_t bytes)
{
    p->reserved += bytes;
    p->reserved_high = p->reserved > p->reserved_high ? p->reserved : p->reserved_high;
}

/* The chunk with the most free memory at its end, which the stream may have as it is, takes as much
   as is missing. */
static bool grow_chunk(pool *p, uint64_t size, const stream *s)
{
    pool_chunk *best = NULL;
    uint64_t there = 0;
    for (pool_chunk *c = p->chunks; c != NULL; c = c->next) {
        const pool_block *b = last_block(c);
        if (b->free && b->size > there && level_of(b, s) == READY) {
            best = c;
            there = b->size;
        }
    }
    uint64_t missing = size > there ? (size - there + CHUNK - 1) / CHUNK * CHUNK : 0;
    if (best == NULL || missing == 0 || (p->most != 0 && p->reserved + missing > p->most) ||
        !sim_chunk_extend(best->mapping, missing)) {
        return false;
    }
    last_block(best)->size += missing;
    count_reserved(p, missing);
    return true;
}

static CUresult grow(pool *p, uint64_t size, const stream *s)
{
    if (grow_chunk(p, size, s)) {
        return CUDA_SUCCESS;
    }
    uint64_t least = (size + SIM_GRANULARITY - 1) / SIM_GRANULARITY * SIM_GRANULARITY;
    uint64_t wanted = (size + CHUNK - 1) / CHUNK * CHUNK;
    if (p->most != 0 && p->reserved + wanted > p->most) {
        wanted = least;
    }
    if (p->most != 0 && p->reserved + wanted > p->most) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool_chunk *c = calloc(1, sizeof *c);
    pool_block *b = calloc(1, sizeof *b);
    CUresult code = CUDA_ERROR_OUT_OF_MEMORY;
    mapping *m = c == NULL || b == NULL ? NULL : sim_chunk_new(p->device, wanted, ROOM, &code);
    if (m == NULL && c != NULL && b != NULL && wanted > least) {
        m = sim_chunk_new(p->device, least, ROOM, &code);
    }
    if (m == NULL) {
        free(c);
        free(b);
        return code;
    }
    m->pool = p;
    memcpy(m->access, p->access, sizeof m->access);
    uint64_t bytes = m->node.end - m->node.start;
    *b = (pool_block){.start = m->node.start, .size = bytes, .free = true, .chunk = c};
    *c = (pool_chunk){.mapping = m, .pool = p, .blocks = b, .next = p->chunks};
    p->chunks = c;
    count_reserved(p, bytes);
    return CUDA_SUCCESS;
}

/* Two free neighbours become one, if it is known by when both are over. */
static void merge_with_next(pool_block *b)
{
    pool_block *n = b->next;
    if (n == NULL || !b->free || !n->free || (b->freed != NULL && b->freed->pending > 0) ||
        (n->freed != NULL && n->freed->pending > 0)) {
        return;
    }
    if (b->freed == NULL) {
        b->freed = n->freed;
    } else if (n->freed != NULL) {
        mark *both = sim_mark_both(b->freed, n->freed);
        clear_mark(b);
        clear_mark(n);
        b->freed = both;
    }
    b->size += n->size;
    b->next = n->next;
    if (n->next != NULL) {
        n->next->previous = b;
    }
    free(n);
}

static void end_if_over(pool *p);

void sim_pool_take_back(pool_block *b, mark *freed)
{
    pool *p = b->chunk->pool;
    b->free = true;
    b->freed = freed;
    p->used -= b->asked;
    merge_with_next(b);
    if (b->previous != NULL) {
        merge_with_next(b->previous);
    }
    end_if_over(p);
}

/* ---- giving back to the card ------------------------------------------------------------------ */

static bool covers(const vclock *clock, const vclock *order)
{
    for (uint32_t i = 0; i < order->count; i++) {
        if (order->at[i] > sim_vclock_get(clock, i)) {
            return false;
        }
    }
    return true;
}

/* What was done there is over; then it has had its effect as well. */
static bool block_is_over(const pool_block *b)
{
    if (!b->free || (b->freed != NULL && !sim_mark_reached(b->freed))) {
        return false;
    }
    bool ran = true;
    for (uint32_t i = 0; b->freed != NULL && i < b->freed->order.count && i < sim.slots; i++) {
        ran = ran && sim_run(i, b->freed->order.at[i]);
    }
    return ran;
}

/* The chunk's last mapping goes, where nothing but (a part of) its last block is in it. */
static bool drop_last(pool_chunk *c, uint64_t keep)
{
    pool *p = c->pool;
    pool_block *b = last_block(c);
    const mapping *last = sim_chunk_last(c->mapping);
    uint64_t bytes = last->node.end - last->node.start;
    if (last == c->mapping || last->node.start < b->start || p->reserved < keep + bytes ||
        !block_is_over(b)) {
        return false;
    }
    sim_chunk_drop_last(c->mapping);
    p->reserved -= bytes;
    b->size -= bytes;
    if (b->size == 0) { /* not the first: the first mapping is still there */
        b->previous->next = NULL;
        clear_mark(b);
        free(b);
    }
    return true;
}

void sim_pool_trim(pool *p, uint64_t keep)
{
    for (pool_chunk *c = p->chunks, *next; c != NULL; c = next) {
        next = c->next;
        for (pool_block *b = c->blocks; b != NULL; b = b->next) {
            merge_with_next(b);
        }
        const pool_block *first = c->blocks;
        bool one = first != NULL && first->next == NULL;
        if (one && p->reserved >= keep + bytes_of(c) && block_is_over(first)) {
            drop_chunk(c);
            continue;
        }
        while (drop_last(c, keep)) {
        }
    }
}

/* A destroyed pool ends when nothing of it is in use and its frees are over. */
static void end_if_over(pool *p)
{
    if (p->dead && p->used == 0) {
        sim_pool_trim(p, 0);
        if (p->chunks == NULL) {
            forget_pool(p);
        }
    }
}

void sim_pools_release(void)
{
    sim_leaving_release();
    for (pool *p = pools, *next; p != NULL; p = next) {
        next = p->next;
        if (p->dead) {
            end_if_over(p);
        } else if (p->reserved > p->threshold) {
            sim_pool_trim(p, p->threshold);
        }
    }
}

/* ---- allocation ------------------------------------------------------------------------------- */

static level level_of(const pool_block *b, const stream *s)
{
    if (b->freed == NULL || covers(&sim.host, &b->freed->order)) {
        return READY;
    }
    const pool *p = b->chunk->pool;
    if (s->capture != NULL) {
        return NEVER; /* a graph can be replayed at any time: what it uses is nobody else's */
    }
    bool own = sim_vclock_get(&b->freed->order, s->slot) > 0;
    if ((own || p->reuse[0]) && covers(&s->order, &b->freed->order)) {
        return READY;
    }
    return p->reuse[1] && sim_mark_reached(b->freed) ? OVER : p->reuse[2] ? LATER : NEVER;
}

/* The smallest block that will do, of the lowest level up to `most`. */
static pool_block *find_block(const pool *p, uint64_t size, const stream *s, level most)
{
    pool_block *best = NULL;
    level best_level = NEVER;
    for (const pool_chunk *c = p->chunks; c != NULL; c = c->next) {
        for (pool_block *b = c->blocks; b != NULL; b = b->next) {
            if (!b->free || b->size < size) {
                continue;
            }
            level l = level_of(b, s);
            if (l <= most &&
                (best == NULL || l < best_level || (l == best_level && b->size < best->size))) {
                best = b;
                best_level = l;
            }
        }
    }
    return best;
}

static pool_block *find_or_grow(pool *p, uint64_t size, stream *s, CUresult *code)
{
    pool_block *b = find_block(p, size, s, OVER);
    if (b != NULL || (*code = grow(p, size, s)) == CUDA_SUCCESS) {
        return b != NULL ? b : find_block(p, size, s, READY);
    }
    for (pool *other = pools; other != NULL; other = other->next) {
        if (other->device == p->device) {
            sim_pool_trim(other, 0);
        }
    }
    if ((*code = grow(p, size, s)) == CUDA_SUCCESS) {
        return find_block(p, size, s, READY);
    }
    return find_block(p, size, s, LATER);
}

static bool split(pool_block *b, uint64_t size)
{
    if (b->size == size) {
        return true;
    }
    pool_block *rest = calloc(1, sizeof *rest);
    if (rest == NULL) {
        return false;
    }
    *rest = (pool_block){.start = b->start + size,
                         .size = b->size - size,
                         .free = true,
                         .freed = b->freed,
                         .chunk = b->chunk,
                         .next = b->next,
                         .previous = b};
    if (b->freed != NULL) {
        sim_mark_ref(b->freed);
    }
    if (b->next != NULL) {
        b->next->previous = rest;
    }
    b->next = rest;
    b->size = size;
    return true;
}

CUresult sim_pool_alloc(pool *p, uint64_t bytes, stream *s, CUdeviceptr *address)
{
    uint64_t size = (bytes + UNIT - 1) / UNIT * UNIT;
    CUresult code = CUDA_SUCCESS;
    pool_block *b = find_or_grow(p, size, s, &code);
    if (b == NULL && s->capture == NULL) { /* the last resort: wait until everything is over */
        uint64_t id = p->id;
        sim_wait_for_everything(p->device);
        p = sim_ids_get(&sim.pool_ids, id); /* the lock was dropped meanwhile */
        b = p == NULL ? NULL : find_or_grow(p, size, s, &code);
    }
    allocation *a = b == NULL ? NULL : calloc(1, sizeof *a);
    if (a == NULL || !split(b, size)) {
        free(a);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (b->freed != NULL && level_of(b, s) != READY) {
        sim_wait_mark(s, b->freed);
    }
    clear_mark(b);
    b->free = false;
    b->asked = bytes;
    p->used += bytes;
    p->used_high = p->used > p->used_high ? p->used : p->used_high;
    a->chunk = b->chunk->mapping;
    a->block = b;
    a->node.start = b->start;
    a->node.end = b->start + bytes;
    a->graphs = s->capture != NULL;
    sim_ranges_insert(&sim.allocations, &a->node);
    if (a->graphs) {
        code = sim_touch("cuMemAllocAsync", s, b->start, bytes, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    } else {
        code = CUDA_SUCCESS;
    }
    if (code != CUDA_SUCCESS) {
        sim_free(a);
        return code;
    }
    *address = b->start;
    return CUDA_SUCCESS;
}

/* The free is something the stream does to the memory: whoever uses it in no order with that, races.
   In a capture the block stays out of reach, because the graph may use it again. */
CUresult sim_pool_free(allocation *a, stream *s)
{
    pool_block *b = a->block;
    if (s->capture != NULL && !a->graphs) {
        return CUDA_ERROR_INVALID_VALUE; /* a graph frees what it allocated, and nothing else */
    }
    CUresult code = sim_touch("cuMemFreeAsync", s, a->node.start, a->node.end - a->node.start,
                              CU_GRAPH_NODE_TYPE_MEM_FREE);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    sim_ranges_remove(&sim.allocations, &a->node);
    free(a);
    if (s->capture == NULL) {
        sim_pool_take_back(b, sim_mark_stream(s, -1));
    }
    return CUDA_SUCCESS;
}

/* ---- access and the end ----------------------------------------------------------------------- */

void sim_pool_set_access(pool *p, int device, int flags)
{
    p->access[device] = (uint8_t)flags;
    for (pool_chunk *c = p->chunks; c != NULL; c = c->next) {
        uint64_t end = sim_chunk_last(c->mapping)->node.end;
        for (uint64_t at = c->mapping->node.start; at < end; at = sim_mapping_at(at)->node.end) {
            sim_mapping_at(at)->access[device] = (uint8_t)flags;
        }
    }
}

void sim_pool_destroy(pool *p)
{
    for (int i = 0; i < SIM_MAX_CARDS; i++) {
        sim.current_pools[i] = sim.current_pools[i] == p ? NULL : sim.current_pools[i];
    }
    p->dead = true;
    end_if_over(p); /* else with its last allocation, or its last free */
}

/* Its allocations have been freed, and its work is over. The pools themselves stay. */
void sim_pools_context_gone(int device)
{
    for (pool *p = pools; p != NULL; p = p->next) {
        while (p->device == device && p->chunks != NULL) {
            drop_chunk(p->chunks);
        }
        p->used = p->device == device ? 0 : p->used;
    }
}

void sim_pools_reset(void)
{
    while (pools != NULL) {
        while (pools->chunks != NULL) {
            drop_chunk(pools->chunks);
        }
        forget_pool(pools);
    }
}

/*
 * Work of the model: copies, memsets, kernels; and the host memory it goes to and comes from.
 */
#include "world.h"

static void random_bytes(world *w, unsigned char *bytes, uint64_t length)
{
    uint64_t seed = throw_dice(&w->d);
    for (uint64_t i = 0; i < length; i++) {
        bytes[i] = (unsigned char)(seed >> (i % 57)) ^ (unsigned char)(i * 7);
    }
}

static void *pointer(CUdeviceptr address)
{
    return (void *)(uintptr_t)address;
}

/* ---- host memory ------------------------------------------------------------------------------- */

static void block_start(world *w, block *b, void *address, uint64_t size, int device)
{
    b->address = address;
    b->device = device;
    object_start(&b->bytes, size);
    b->bytes.known = true;
    random_bytes(w, b->address, size);
    memcpy(b->bytes.shadow, b->address, size);
}

static block *free_block(world *w)
{
    for (block *b = w->blocks; b < w->blocks + BLOCKS; b++) {
        if (b->bytes.size == 0) {
            return b;
        }
    }
    return NULL;
}

void op_host_alloc(world *w)
{
    block *b = free_block(w);
    if (b != NULL) {
        void *address = NULL;
        uint64_t size = 1 + below(&w->d, 2 * WINDOW);
        int device = (int)below(&w->d, DEVICES);
        world_current(w, device);
        EXPECT(w, w->k.driver.cuMemHostAlloc(&address, size, below(&w->d, 4)), 0);
        block_start(w, b, address, size, device);
        b->registered = false;
    }
}

void op_host_register(world *w)
{
    block *b = free_block(w);
    if (b != NULL) {
        uint64_t size = 1 + below(&w->d, 2 * WINDOW);
        unsigned char *address = malloc(size);
        REQUIRE(address != NULL);
        int device = (int)below(&w->d, DEVICES);
        world_current(w, device);
        EXPECT(w, w->k.driver.cuMemHostRegister(address, size, 0), 0);
        EXPECT(w, w->k.driver.cuMemHostRegister(address + size / 2, 1, 0),
               CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
        block_start(w, b, address, size, device);
        b->registered = true;
    }
}

static void check_block(world *w, const block *b)
{
    if (memcmp(b->bytes.shadow, b->address, b->bytes.size) != 0) {
        WORLD_FAIL(w, "host memory does not hold what was written");
    }
}

/* Either call waits for all work of the block's device, also where it refuses. */
void op_host_free(world *w)
{
    block *b = &w->blocks[below(&w->d, BLOCKS)];
    const ebb__driver *cu = &w->k.driver;
    if (b->bytes.size == 0) {
        return;
    }
    world_observe(w, &b->bytes, 0, UINT64_MAX, b->device);
    world_current(w, (int)below(&w->d, DEVICES));
    EXPECT(w, b->registered ? cu->cuMemFreeHost(b->address) : cu->cuMemHostUnregister(b->address),
           CUDA_ERROR_INVALID_VALUE);
    world_learn_context(w, b->device);
    check_block(w, b);
    if (b->registered) {
        EXPECT(w, cu->cuMemHostUnregister(b->address), 0);
        EXPECT(w, cu->cuMemHostUnregister(b->address), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
        free(b->address);
    } else {
        EXPECT(w, cu->cuMemFreeHost(b->address), 0);
    }
    object_end(&b->bytes);
}

/* The host writes: nobody may be reading or writing there any more. */
void op_host_fill(world *w)
{
    block *b = &w->blocks[below(&w->d, BLOCKS)];
    if (b->bytes.size == 0) {
        return;
    }
    world_observe(w, &b->bytes, 0, UINT64_MAX, -1);
    check_block(w, b);
    random_bytes(w, b->address, b->bytes.size);
    memcpy(b->bytes.shadow, b->address, b->bytes.size);
}

bool world_host_span(world *w, uint64_t length, span *s)
{
    for (unsigned tries = 0; tries < 4; tries++) {
        block *b = &w->blocks[below(&w->d, BLOCKS)];
        if (b->bytes.size >= length && b->bytes.size > 0) {
            uint64_t offset = below(&w->d, (unsigned)(b->bytes.size - length + 1));
            *s = object_span(&b->bytes, (CUdeviceptr)(uintptr_t)b->address, offset, length);
            return true;
        }
    }
    return false;
}

/* ---- copies ------------------------------------------------------------------------------------ */

/* Where to queue it: often where the memory was used last, which orders it by itself. */
static lane *choose_lane(world *w, int device, const span *s)
{
    const object *o = s->parts[0].bytes;
    if (o->past_count > 0 && below(&w->d, 3) == 0) {
        lane *l = &w->lanes[o->pasts[o->past_count - 1].lane];
        if (l->alive && l->device == device) {
            return l;
        }
    }
    return world_any_lane(w, device);
}

static void ready(world *w, lane *l, const span *from, const span *to)
{
    if (from != NULL) {
        world_order(w, l, from, false);
    }
    if (to != NULL) {
        world_order(w, l, to, true);
        world_order(w, l, to, true); /* what a wait for one has moved may be needed for another */
    }
    world_current(w, l->device);
}

static void copied(world *w, lane *l, const span *from, const span *to)
{
    unsigned char bytes[2 * WINDOW];
    uint64_t number = world_queued(w, l);
    span_read(from, bytes);
    span_write(to, bytes);
    world_note(w, l, number, from, false);
    world_note(w, l, number, to, true);
}

void op_upload(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span from, to;
    if (world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, false, 0, &to) &&
        world_host_span(w, to.length, &from)) {
        lane *l = choose_lane(w, device, &to);
        ready(w, l, &from, &to);
        EXPECT(
            w,
            w->k.driver.cuMemcpyHtoDAsync(to.address, pointer(from.address), to.length, l->handle),
            0);
        copied(w, l, &from, &to);
    }
}

void op_download(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span from, to;
    if (world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READ, false, 0, &from) &&
        world_host_span(w, from.length, &to)) {
        lane *l = choose_lane(w, device, &from);
        ready(w, l, &from, &to);
        EXPECT(
            w,
            w->k.driver.cuMemcpyDtoHAsync(pointer(to.address), from.address, to.length, l->handle),
            0);
        copied(w, l, &from, &to);
    }
}

/* The source may change as soon as the call is back. */
void op_upload_pageable(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span to;
    unsigned char bytes[2 * WINDOW];
    if (world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, false, 0, &to)) {
        lane *l = choose_lane(w, device, &to);
        random_bytes(w, bytes, to.length);
        ready(w, l, NULL, &to);
        EXPECT(w, w->k.driver.cuMemcpyHtoDAsync(to.address, bytes, to.length, l->handle), 0);
        span_write(&to, bytes);
        memset(bytes, 0x5A, to.length);
        world_note(w, l, world_queued(w, l), &to, true);
    }
}

/* The bytes are there when the call is back. */
void op_download_pageable(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span from;
    unsigned char bytes[2 * WINDOW], expected[2 * WINDOW];
    if (world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READ, false, 0, &from)) {
        lane *l = choose_lane(w, device, &from);
        ready(w, l, &from, NULL);
        EXPECT(w, w->k.driver.cuMemcpyDtoHAsync(bytes, from.address, from.length, l->handle), 0);
        world_queued(w, l);
        world_host_learns(w, l->knows);
        span_read(&from, expected);
        if (memcmp(bytes, expected, from.length) != 0) {
            WORLD_FAIL(w, "a copy to the host brought other bytes");
        }
    }
}

void op_copy(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span from, to;
    if (world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READ, false, 0, &from) &&
        world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, false, from.length, &to) &&
        !spans_meet(&from, &to)) {
        lane *l = choose_lane(w, device, &from);
        ready(w, l, &from, &to);
        EXPECT(w, w->k.driver.cuMemcpyDtoDAsync(to.address, from.address, to.length, l->handle), 0);
        copied(w, l, &from, &to);
    }
}

/* From one device to another, each by its own access, on a stream of any. */
void op_peer(world *w)
{
    int reader = (int)below(&w->d, DEVICES), writer = (int)below(&w->d, DEVICES);
    span from, to;
    if (world_device_span(w, reader, CU_MEM_ACCESS_FLAGS_PROT_READ, false, 0, &from) &&
        world_device_span(w, writer, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, false, from.length, &to) &&
        !spans_meet(&from, &to)) {
        lane *l = world_any_lane(w, -1);
        ready(w, l, &from, &to);
        EXPECT(w,
               w->k.driver.cuMemcpyPeerAsync(to.address, w->k.context[writer], from.address,
                                             w->k.context[reader], to.length, l->handle),
               0);
        copied(w, l, &from, &to);
    }
}

void op_set(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span to;
    unsigned char bytes[2 * WINDOW];
    if (!world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, false, 0, &to)) {
        return;
    }
    lane *l = choose_lane(w, device, &to);
    unsigned value = (unsigned)throw_dice(&w->d);
    ready(w, l, NULL, &to);
    if (to.address % 4 == 0 && to.length % 4 == 0) {
        for (uint64_t i = 0; i < to.length; i += 4) {
            memcpy(bytes + i, &value, 4);
        }
        EXPECT(w, w->k.driver.cuMemsetD32Async(to.address, value, to.length / 4, l->handle), 0);
    } else {
        memset(bytes, (int)(value & 0xFF), to.length);
        EXPECT(w,
               w->k.driver.cuMemsetD8Async(to.address, (unsigned char)value, to.length, l->handle),
               0);
    }
    span_write(&to, bytes);
    world_note(w, l, world_queued(w, l), &to, true);
}

/* ---- kernels ----------------------------------------------------------------------------------- */

/* What a kernel finds and leaves. Made when it is queued, played when it runs. */
typedef struct play {
    world *w;
    bool late, finds;
    uint64_t found_length, left_length;
    CUdeviceptr found_at, left_at;
    unsigned char *found, *left;
} play;

static void run(void *data)
{
    play *k = data;
    if (k->finds && memcmp(pointer(k->found_at), k->found, k->found_length) != 0) {
        WORLD_FAIL(k->w, "a %s kernel finds other bytes than were written",
                   k->late ? "late" : "ready");
    }
    memcpy(pointer(k->left_at), k->left, k->left_length);
    k->w->late -= k->late;
    free(k->found);
    free(k->left);
    free(k);
}

static play *make_play(world *w, const span *reads, const span *writes, bool late)
{
    play *k = calloc(1, sizeof *k);
    REQUIRE(k != NULL);
    *k = (play){.w = w, .late = late, .finds = reads->count > 0};
    k->found = malloc(reads->length + 1);
    k->left = malloc(writes->length + 1);
    REQUIRE(k->found != NULL && k->left != NULL);
    k->found_at = reads->address;
    k->found_length = reads->length;
    span_read(reads, k->found);
    k->left_at = writes->address;
    k->left_length = writes->length;
    random_bytes(w, k->left, writes->length);
    span_write(writes, k->left);
    w->late += late;
    return k;
}

/* Reads one range (or none) and writes another, or reads and writes the same; late, or at once. */
void op_kernel(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    span reads = {.count = 0}, writes;
    if (!world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, true, 0, &writes)) {
        return;
    }
    bool same = below(&w->d, 3) == 0;
    if (same) {
        reads = writes;
    } else if (below(&w->d, 3) == 0) {
        world_host_span(w, 1 + below(&w->d, 64), &reads); /* pinned memory is seen by kernels too */
    } else {
        world_device_span(w, device, CU_MEM_ACCESS_FLAGS_PROT_READ, true, 0, &reads);
    }
    if (!same && spans_meet(&reads, &writes)) {
        return;
    }
    lane *l = choose_lane(w, device, &writes);
    ready(w, l, &reads, &writes);
    ebbsim_range ranges[2] = {
        {writes.address, writes.length, same ? EBBSIM_READ | EBBSIM_WRITE : EBBSIM_WRITE},
        {reads.address, reads.length, EBBSIM_READ}};
    bool late = below(&w->d, 2) == 0;
    play *k = make_play(w, &reads, &writes, late);
    ebbsim_work work = {.size = sizeof work,
                        .name = late ? "late" : "ready",
                        .ranges = ranges,
                        .range_count = same || reads.count == 0 ? 1 : 2,
                        .nanoseconds = below(&w->d, 3) == 0 ? 0 : 1 + below(&w->d, 30000),
                        .function = late ? run : NULL,
                        .data = k,
                        .now = !late};
    EXPECT(w, ebbsim_launch(&work, l->handle), 0);
    if (!late) {
        run(k);
    }
    uint64_t number = world_queued(w, l);
    world_note(w, l, number, &writes, true);
    if (!same) {
        world_note(w, l, number, &reads, false);
    }
}

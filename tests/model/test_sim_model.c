/*
 * The simulated GPU against a naive model: hundreds of thousands of random operations, every code,
 * every byte, every free byte of memory; its books in order after every step; not one hazard, because
 * the programs have none; and nothing left when everything has been given back.
 *
 *   argv[1]   number of operations for each seed
 *   argv[2]   the one seed to play
 */
#include <unistd.h>

#include "scale.h"
#include "world.h"

/* ---- what must be refused ---------------------------------------------------------------------- */

static void illegal_memory(world *w)
{
    const ebb__driver *cu = &w->k.driver;
    CUdeviceptr address = 0;
    CUmemGenericAllocationHandle retained = 0;
    size_t odd = PAGE / 2;
    switch (below(&w->d, 8)) {
    case 0:
        EXPECT(w, cu->cuMemRelease(w->stale_handle), CUDA_ERROR_INVALID_VALUE);
        break;
    case 1:
        EXPECT(w, cu->cuMemMap(w->k.base, PAGE, 0, w->stale_handle, 0), CUDA_ERROR_INVALID_VALUE);
        break;
    case 2:
        EXPECT(w, cu->cuMemUnmap(w->k.base, 0), CUDA_ERROR_INVALID_VALUE);
        break;
    case 3:
        EXPECT(w, cu->cuMemAddressReserve(&address, odd, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
        break;
    case 4:
        EXPECT(w, cu->cuMemAddressFree(w->k.base + PAGE, PAGE), CUDA_ERROR_INVALID_VALUE);
        break;
    case 5:
        EXPECT(w, cu->cuMemRetainAllocationHandle(&retained, (void *)(uintptr_t)w->k.base),
               CUDA_ERROR_INVALID_VALUE);
        break;
    case 6:
        EXPECT(w, cu->cuMemFree(w->k.base), CUDA_ERROR_INVALID_VALUE);
        break;
    default:
        EXPECT(w, cu->cuMemAlloc(&address, 0), CUDA_ERROR_INVALID_VALUE);
    }
}

/* Memory that is reserved and not mapped: no copy, no memset. */
static void illegal_work(world *w)
{
    const ebb__driver *cu = &w->k.driver;
    lane *l = world_any_lane(w, -1);
    unsigned char bytes[16] = {0};
    world_current(w, l->device);
    switch (below(&w->d, 4)) {
    case 0:
        EXPECT(w, cu->cuMemcpyHtoDAsync(w->k.base, bytes, 16, l->handle), CUDA_ERROR_INVALID_VALUE);
        break;
    case 1:
        EXPECT(w, cu->cuMemcpyDtoHAsync(bytes, w->k.base, 16, l->handle), CUDA_ERROR_INVALID_VALUE);
        break;
    case 2:
        EXPECT(w, cu->cuMemsetD8Async(w->k.base, 1, 16, l->handle), CUDA_ERROR_INVALID_VALUE);
        break;
    default:
        EXPECT(w, cu->cuMemsetD8Async((CUdeviceptr)(uintptr_t)bytes, 1, 16, l->handle),
               CUDA_ERROR_INVALID_VALUE);
    }
}

static void illegal_handles(world *w)
{
    const ebb__driver *cu = &w->k.driver;
    if (w->stale_event == NULL || w->stale_stream == NULL) {
        return;
    }
    switch (below(&w->d, 6)) {
    case 0:
        EXPECT(w, cu->cuStreamDestroy(w->stale_stream), CUDA_ERROR_INVALID_HANDLE);
        break;
    case 1:
        EXPECT(w, cu->cuStreamSynchronize(w->stale_stream), CUDA_ERROR_INVALID_HANDLE);
        break;
    case 2:
        EXPECT(w, cu->cuEventDestroy(w->stale_event), CUDA_ERROR_INVALID_HANDLE);
        break;
    case 3:
        EXPECT(w, cu->cuEventQuery(w->stale_event), CUDA_ERROR_INVALID_HANDLE);
        break;
    case 4:
        EXPECT(w, cu->cuEventRecord(w->stale_event, NULL), CUDA_ERROR_INVALID_HANDLE);
        break;
    default:
        EXPECT(w, cu->cuStreamWaitEvent(NULL, w->stale_event, 0), CUDA_ERROR_INVALID_HANDLE);
    }
}

void op_illegal(world *w)
{
    world_current(w, (int)below(&w->d, DEVICES));
    unsigned which = below(&w->d, 3);
    if (which == 0) {
        illegal_memory(w);
    } else if (which == 1) {
        illegal_work(w);
    } else {
        illegal_handles(w);
    }
}

/* ---- the play ---------------------------------------------------------------------------------- */

static const struct {
    operation *play;
    const char *name;
    unsigned share;
} operations[] = {
#define OPERATION(name, share)                                                                     \
    {                                                                                              \
        op_##name, #name, share                                                                    \
    }
    OPERATION(reserve, 6),
    OPERATION(unreserve, 3),
    OPERATION(create, 14),
    OPERATION(release, 8),
    OPERATION(retain, 3),
    OPERATION(export, 3),
    OPERATION(import, 3),
    OPERATION(close, 3),
    OPERATION(map, 40),
    OPERATION(unmap, 10),
    OPERATION(access, 24),
    OPERATION(alloc, 4),
    OPERATION(free, 4),
    OPERATION(foreign, 2),
    OPERATION(peek, 8),
    OPERATION(host_alloc, 4),
    OPERATION(host_register, 3),
    OPERATION(host_free, 4),
    OPERATION(host_fill, 5),
    OPERATION(stream_create, 8),
    OPERATION(stream_destroy, 6),
    OPERATION(event_create, 6),
    OPERATION(event_destroy, 3),
    OPERATION(record, 14),
    OPERATION(wait, 12),
    OPERATION(query, 8),
    OPERATION(synchronize, 5),
    OPERATION(pass, 5),
    OPERATION(upload, 30),
    OPERATION(download, 30),
    OPERATION(upload_pageable, 10),
    OPERATION(download_pageable, 4),
    OPERATION(copy, 25),
    OPERATION(peer, 8),
    OPERATION(set, 15),
    OPERATION(kernel, 40),
    OPERATION(illegal, 8),
};

static void start(world *w, uint64_t seed)
{
    memset(w, 0, sizeof *w);
    w->seed = seed;
    w->d.state = seed * 0x632BE59BD9B4E019u;
    w->memory = 48 * (uint64_t)MIB;
    w->doing = "start";
    kit_start(&w->k, DEVICES, w->memory, 1);
    ebbsim_card card;
    ebbsim_card_default(&card, w->memory);
    for (int i = 0; i < DEVICES; i++) {
        w->used[i] = card.context;
        w->lanes[i] = (lane){.used = true,
                             .alive = true,
                             .blocking = true,
                             .is_default = true,
                             .lasts = true,
                             .device = i};
        w->lanes[DEVICES + i] = w->lanes[i]; /* the thread's own: a blocking stream like any */
        w->lanes[DEVICES + i].is_default = false;
        w->lanes[DEVICES + i].handle = CU_STREAM_PER_THREAD;
        w->fences[i] = (fence){.used = true, .device = i};
        world_current(w, i);
        OK(w->k.driver.cuEventCreate(&w->fences[i].handle, CU_EVENT_DISABLE_TIMING));
    }
}

/* One operation; if there is nothing it could be done to, none. */
static void step(world *w)
{
    enum { COUNT = sizeof operations / sizeof *operations };
    unsigned total = 0, which = 0;
    for (unsigned i = 0; i < COUNT; i++) {
        total += operations[i].share;
    }
    unsigned thrown = below(&w->d, total);
    while (thrown >= operations[which].share) {
        thrown -= operations[which++].share;
    }
    w->doing = operations[which].name;
    unsigned long calls = ebbsim_calls(NULL);
    operations[which].play(w);
    w->step += ebbsim_calls(NULL) != calls;
    const char *wrong = ebbsim_check();
    if (wrong != NULL) {
        WORLD_FAIL(w, "%s", wrong);
    }
    ebbsim_hazard h;
    if (ebbsim_hazard_get(0, &h) == 0) {
        WORLD_FAIL(w, "a hazard where there is none: %s", h.text);
    }
    if (w->step % 8 == 0) {
        world_check_memory(w);
    }
}

/* Give everything back, in a legal order; then nothing must be left. */
static void finish(world *w)
{
    const ebb__driver *cu = &w->k.driver;
    w->doing = "finish";
    world_synchronize(w);
    for (int i = 0; i < PLACES; i++) {
        place *p = &w->places[i];
        if (p->size > 0 && p->frame->bytes.known && (p->access[0] | p->access[1]) != 0) {
            world_check_bytes(w, p);
        }
        if (p->size > 0) {
            EXPECT(w,
                   p->chunk != NULL ? cu->cuMemFree(p->address)
                                    : cu->cuMemUnmap(p->address, p->size),
                   0);
        }
    }
    for (int i = 0; i < HANDLES; i++) {
        for (; w->handles[i].frame != NULL && w->handles[i].count > 0; w->handles[i].count--) {
            EXPECT(w, cu->cuMemRelease(w->handles[i].value), 0);
        }
    }
    for (int i = 0; i < FILES; i++) {
        if (w->files[i].frame != NULL) {
            close(w->files[i].descriptor);
        }
    }
    for (int i = 0; i < SPACES; i++) {
        if (w->spaces[i].size > 0) {
            EXPECT(w, cu->cuMemAddressFree(w->spaces[i].address, w->spaces[i].size), 0);
        }
    }
    EXPECT(w, cu->cuMemAddressFree(w->k.base, (size_t)KIT_PAGES * PAGE), 0);
    for (int i = 0; i < FENCES; i++) {
        if (w->fences[i].used) {
            EXPECT(w, cu->cuEventDestroy(w->fences[i].handle), 0);
        }
    }
    for (int i = 0; i < LANES; i++) {
        if (w->lanes[i].alive && !w->lanes[i].lasts) {
            EXPECT(w, cu->cuStreamDestroy(w->lanes[i].handle), 0);
        }
    }
}

static void finish_host(world *w)
{
    const ebb__driver *cu = &w->k.driver;
    for (int i = 0; i < BLOCKS; i++) {
        block *b = &w->blocks[i];
        if (b->bytes.size > 0) {
            EXPECT(w, memcmp(b->bytes.shadow, b->address, b->bytes.size), 0);
            EXPECT(w,
                   b->registered ? cu->cuMemHostUnregister(b->address)
                                 : cu->cuMemFreeHost(b->address),
                   0);
            if (b->registered) {
                free(b->address);
            }
            object_end(&b->bytes);
        }
    }
    for (int i = 0; i < FRAMES; i++) {
        if (w->frames[i].used) {
            object_end(&w->frames[i].bytes);
        }
    }
    for (int i = 0; i < DEVICES; i++) {
        size_t free_bytes = 0;
        world_current(w, i);
        EXPECT(w, cu->cuMemGetInfo(&free_bytes, NULL), 0); /* and notices closed files */
        EXPECT(w, cu->cuDevicePrimaryCtxRelease(i), 0);
    }
    if (w->late != 0) {
        WORLD_FAIL(w, "%lu kernels never ran", w->late);
    }
}

static void nothing_is_left(world *w)
{
    ebbsim_census c = {.size = sizeof c}, nothing = {.size = sizeof c};
    ebbsim_census_take(&c);
    if (memcmp(&c, &nothing, sizeof c) != 0) {
        WORLD_FAIL(w,
                   "left: %llu reservations, %llu handles, %llu frames, %llu mappings, %llu "
                   "allocations, %llu host blocks, %llu streams, %llu events, %llu contexts, %llu "
                   "works",
                   (unsigned long long)c.reservations, (unsigned long long)c.handles,
                   (unsigned long long)c.frames, (unsigned long long)c.mappings,
                   (unsigned long long)c.allocations, (unsigned long long)c.host_blocks,
                   (unsigned long long)c.streams, (unsigned long long)c.events,
                   (unsigned long long)c.contexts, (unsigned long long)c.pending_works);
    }
    if (ebbsim_hazards() != 0) {
        WORLD_FAIL(w, "%lu hazards", ebbsim_hazards());
    }
}

int main(int argc, char **argv)
{
    static const uint64_t seeds[] = {1, 2, 3, 4, 5, 6, 7, 8};
    static world w;
    unsigned long count = argc > 1 ? strtoul(argv[1], NULL, 10) : SCALED(60000, 10000);
    size_t plays = argc > 2 ? 1 : sizeof seeds / sizeof *seeds;
    for (size_t i = 0; i < plays && harness_failures == 0; i++) {
        start(&w, argc > 2 ? strtoull(argv[2], NULL, 10) : seeds[i]);
        while (w.step < count && w.failures == 0) {
            step(&w);
        }
        if (w.failures == 0) {
            finish(&w);
            finish_host(&w);
            nothing_is_left(&w);
        }
        harness_tests++;
        harness_failures += w.failures;
        printf("%s seed %llu: %lu operations\n", w.failures == 0 ? "ok    " : "FAILED",
               (unsigned long long)w.seed, w.step);
    }
    ebbsim_reset();
    return REPORT();
}

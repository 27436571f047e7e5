/*
 * Where the model's memory comes from: frames by handle and by file descriptor, allocations.
 */
#include <unistd.h>

#include "world.h"

static bool fits(const world *w, int device, uint64_t bytes)
{
    return w->used[device] + w->foreign[device] + bytes <= w->memory;
}

/* ---- frames ------------------------------------------------------------------------------------ */

static frame *free_frame(world *w)
{
    for (frame *f = w->frames; f < w->frames + FRAMES; f++) {
        if (!f->used) {
            return f;
        }
    }
    return NULL;
}

static void frame_start(world *w, frame *f, int device, uint64_t charged, uint64_t size)
{
    *f = (frame){.used = true, .device = device, .charged = charged};
    object_start(&f->bytes, size);
    w->used[device] += charged;
}

static void frame_drop(world *w, frame *f)
{
    if (f->handles == 0 && f->files == 0) {
        w->used[f->device] -= f->charged;
        object_end(&f->bytes);
        f->used = false;
    }
}

static handle *free_handle(world *w)
{
    for (handle *h = w->handles; h < w->handles + HANDLES; h++) {
        if (h->frame == NULL) {
            return h;
        }
    }
    return NULL;
}

handle *world_any_handle(world *w)
{
    handle *h = &w->handles[below(&w->d, HANDLES)];
    return h->frame != NULL ? h : NULL;
}

static void handle_start(handle *h, frame *f, bool exportable)
{
    h->frame = f;
    h->count = 1;
    h->places = 0;
    h->exportable = exportable;
    f->handles++;
}

void world_handle_settle(world *w, handle *h)
{
    if (h->count == 0 && h->places == 0) {
        w->stale_handle = h->value;
        h->frame->handles--;
        frame_drop(w, h->frame);
        h->frame = NULL;
    }
}

void op_create(world *w)
{
    frame *f = free_frame(w);
    handle *h = free_handle(w);
    if (f == NULL || h == NULL) {
        return;
    }
    int device = (int)below(&w->d, DEVICES);
    uint64_t size = (1 + below(&w->d, 2)) * (uint64_t)PAGE;
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    bool room = fits(w, device, size);
    EXPECT(w, w->k.driver.cuMemCreate(&h->value, size, &properties, 0),
           room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
    if (room) {
        frame_start(w, f, device, size, size);
        handle_start(h, f, true);
    }
}

/* Once for every time it was got; what is mapped by it stays. */
void op_release(world *w)
{
    handle *h = world_any_handle(w);
    if (h != NULL) {
        EXPECT(w, w->k.driver.cuMemRelease(h->value),
               h->count > 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
        h->count -= h->count > 0;
        world_handle_settle(w, h);
    }
}

/* From an address back to the handle it was mapped by. */
void op_retain(world *w)
{
    const place *p = &w->places[below(&w->d, PLACES)];
    CUmemGenericAllocationHandle value = 0;
    if (p->size > 0) {
        void *inside = (void *)(uintptr_t)(p->address + below(&w->d, (unsigned)p->size));
        EXPECT(w, w->k.driver.cuMemRetainAllocationHandle(&value, inside),
               p->chunk != NULL ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS);
        if (p->handle != NULL) {
            EXPECT(w, value != p->handle->value, 0);
            p->handle->count++;
        }
    }
}

/* ---- by file descriptor ------------------------------------------------------------------------ */

void op_export(world *w)
{
    const handle *h = world_any_handle(w);
    file *f = &w->files[below(&w->d, FILES)];
    int descriptor = -1;
    if (h == NULL || f->frame != NULL) {
        return;
    }
    EXPECT(w,
           w->k.driver.cuMemExportToShareableHandle(&descriptor, h->value,
                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
           h->exportable ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    if (h->exportable) {
        *f = (file){.descriptor = descriptor, .frame = h->frame};
        h->frame->files++;
    }
}

/* The same memory by another handle, also when no other is left. */
void op_import(world *w)
{
    const file *f = &w->files[below(&w->d, FILES)];
    handle *h = free_handle(w);
    if (f->frame != NULL && h != NULL) {
        EXPECT(w,
               w->k.driver.cuMemImportFromShareableHandle(&h->value,
                                                          (void *)(intptr_t)f->descriptor,
                                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               0);
        handle_start(h, f->frame, false);
    }
}

void op_close(world *w)
{
    file *f = &w->files[below(&w->d, FILES)];
    if (f->frame != NULL) {
        close(f->descriptor);
        f->frame->files--;
        frame_drop(w, f->frame);
        f->frame = NULL;
        world_check_memory(w); /* nobody tells the driver: it finds out when it is asked */
    }
}

void op_foreign(world *w)
{
    int device = (int)below(&w->d, DEVICES);
    uint64_t pages = below(&w->d, 3) == 0 ? below(&w->d, (unsigned)(w->memory / PAGE)) : 0;
    w->foreign[device] = pages * PAGE;
    EXPECT(w, ebbsim_foreign_use(device, w->foreign[device]), 0);
}

/* ---- allocations ------------------------------------------------------------------------------- */

static bool has_room(const chunk *c, int device, uint64_t size)
{
    return c->size > 0 && c->shared && c->device == device && c->size - c->taken >= size;
}

/* The chunk an address was cut from: one of those with room, or a new one if there are none. */
static chunk *chunk_of(world *w, int device, uint64_t size, CUdeviceptr address)
{
    chunk *unused = NULL;
    for (chunk *c = w->chunks; c < w->chunks + CHUNKS; c++) {
        if (size < MIB && has_room(c, device, size) && address == c->address + c->taken) {
            return c;
        }
        unused = c->size == 0 ? c : unused;
    }
    REQUIRE(unused != NULL);
    *unused = (chunk){.address = address,
                      .size = (size + PAGE - 1) / PAGE * PAGE,
                      .device = device,
                      .shared = size < MIB};
    w->used[device] += unused->size;
    return unused;
}

static unsigned chunks_in_use(const world *w)
{
    unsigned count = 0;
    for (const chunk *c = w->chunks; c < w->chunks + CHUNKS; c++) {
        count += c->size > 0;
    }
    return count;
}

void op_alloc(world *w)
{
    frame *f = free_frame(w);
    place *p = world_free_place(w);
    if (f == NULL || p == NULL || chunks_in_use(w) == CHUNKS) {
        return;
    }
    int device = (int)below(&w->d, DEVICES);
    uint64_t size = 1 + below(&w->d, below(&w->d, 2) == 0 ? 500000 : 2 * PAGE);
    bool room = fits(w, device, (size + PAGE - 1) / PAGE * PAGE);
    for (const chunk *c = w->chunks; c < w->chunks + CHUNKS; c++) {
        room |= size < MIB && has_room(c, device, size);
    }
    CUdeviceptr address = 0;
    world_current(w, device);
    EXPECT(w, w->k.driver.cuMemAlloc(&address, size),
           room ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY);
    if (room) {
        chunk *c = chunk_of(w, device, size, address);
        c->taken += (size + 511) / 512 * 512;
        c->live++;
        frame_start(w, f, device, 0, size);
        *p = (place){.address = address, .size = size, .frame = f, .chunk = c};
        p->access[device] = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        world_fill(w, p, device);
    }
}

/* Waits for all work of the device it belongs to by itself. */
void op_free(world *w)
{
    place *p = &w->places[below(&w->d, PLACES)];
    if (p->size == 0) {
        return;
    }
    world_current(w, (int)below(&w->d, DEVICES));
    if (p->chunk == NULL) {
        EXPECT(w, w->k.driver.cuMemFree(p->address), CUDA_ERROR_INVALID_VALUE);
        return;
    }
    chunk *c = p->chunk;
    world_observe(w, &p->frame->bytes, p->address, p->address + p->size, c->device);
    EXPECT(w, w->k.driver.cuMemFree(p->address + 1), CUDA_ERROR_INVALID_VALUE);
    EXPECT(w, w->k.driver.cuMemFree(p->address), 0);
    world_learn_context(w, c->device);
    if (--c->live == 0) {
        w->used[c->device] -= c->size;
        c->size = 0;
    }
    frame_drop(w, p->frame);
    p->size = 0;
}

/*
 * Memory of the model: objects and their bytes, reservations, mappings, access.
 */
#include "world.h"

/* ---- objects ----------------------------------------------------------------------------------- */

static bool is_small(const object *o)
{
    return o->size <= 2 * (uint64_t)WINDOW;
}

void object_start(object *o, uint64_t size)
{
    memset(o, 0, sizeof *o);
    o->size = size;
    o->shadow = calloc(1, is_small(o) ? size : 2 * (size_t)WINDOW);
    REQUIRE(o->shadow != NULL);
}

void object_end(object *o)
{
    free(o->shadow);
    memset(o, 0, sizeof *o);
}

static unsigned char *shadow_at(const object *o, uint64_t offset)
{
    return o->shadow +
           (is_small(o) || offset < WINDOW ? offset : offset + 2 * (uint64_t)WINDOW - o->size);
}

span object_span(object *o, CUdeviceptr address, uint64_t offset, uint64_t length)
{
    span s = {.address = address + offset, .length = length, .count = 1};
    s.parts[0].bytes = o;
    s.parts[0].offset = offset;
    s.parts[0].length = length;
    return s;
}

void object_windows(object *o, CUdeviceptr address, span windows[2])
{
    uint64_t head = is_small(o) ? (o->size + 1) / 2 : WINDOW;
    uint64_t tail = is_small(o) ? o->size / 2 : WINDOW;
    windows[0] = object_span(o, address, 0, head);
    windows[1] = object_span(o, address, o->size - tail, tail);
}

void span_read(const span *s, unsigned char *bytes)
{
    for (unsigned i = 0; i < s->count; bytes += s->parts[i++].length) {
        memcpy(bytes, shadow_at(s->parts[i].bytes, s->parts[i].offset), s->parts[i].length);
    }
}

void span_write(const span *s, const unsigned char *bytes)
{
    for (unsigned i = 0; i < s->count; bytes += s->parts[i++].length) {
        memcpy(shadow_at(s->parts[i].bytes, s->parts[i].offset), bytes, s->parts[i].length);
    }
}

bool spans_meet(const span *a, const span *b)
{
    for (unsigned i = 0; i < a->count; i++) {
        for (unsigned j = 0; j < b->count; j++) {
            if (a->parts[i].bytes == b->parts[j].bytes &&
                a->parts[i].offset < b->parts[j].offset + b->parts[j].length &&
                b->parts[j].offset < a->parts[i].offset + a->parts[i].length) {
                return true;
            }
        }
    }
    return false;
}

/* ---- where ------------------------------------------------------------------------------------- */

place *world_place_at(world *w, CUdeviceptr address)
{
    for (place *p = w->places; p < w->places + PLACES; p++) {
        if (p->size > 0 && p->address <= address && address < p->address + p->size) {
            return p;
        }
    }
    return NULL;
}

bool world_usable(const place *p, int device, int access, bool kernel)
{
    if (p == NULL || p->size == 0 || !p->frame->bytes.known) {
        return false;
    }
    return (p->chunk != NULL && !kernel) || (p->access[device] & access) == access;
}

bool world_device_span(world *w, int device, int access, bool kernel, uint64_t length, span *s)
{
    for (unsigned tries = 0; tries < 8; tries++) {
        place *p = &w->places[below(&w->d, PLACES)];
        if (!world_usable(p, device, access, kernel)) {
            continue;
        }
        span windows[2];
        object_windows(&p->frame->bytes, p->address, windows);
        span window = windows[below(&w->d, 2)];
        uint64_t most = below(&w->d, 12) == 0 ? window.length : 600;
        uint64_t bytes = length != 0 ? length : 1 + below(&w->d, (unsigned)most);
        if (bytes > window.length) {
            continue;
        }
        uint64_t offset =
            window.parts[0].offset + below(&w->d, (unsigned)(window.length - bytes + 1));
        *s = object_span(&p->frame->bytes, p->address, offset, bytes);
        place *next = world_place_at(w, p->address + p->size);
        if (p->chunk == NULL && bytes > 1 && below(&w->d, 3) == 0 && next != NULL &&
            next->chunk == NULL && world_usable(next, device, access, kernel)) {
            uint64_t here = 1 + below(&w->d, (unsigned)bytes - 1); /* and the rest next door */
            *s = object_span(&p->frame->bytes, p->address, p->size - here, here);
            s->length = bytes;
            s->count = 2;
            s->parts[1].bytes = &next->frame->bytes;
            s->parts[1].offset = 0;
            s->parts[1].length = bytes - here;
        }
        return true;
    }
    return false;
}

void world_check_bytes(world *w, const place *p)
{
    span windows[2];
    unsigned char bytes[WINDOW];
    object_windows(&p->frame->bytes, p->address, windows);
    for (unsigned i = 0; i < 2; i++) {
        span_read(&windows[i], bytes);
        if (memcmp(bytes, (void *)(uintptr_t)windows[i].address, windows[i].length) != 0) {
            WORLD_FAIL(w, "memory at %llx does not hold what was written",
                       (unsigned long long)windows[i].address);
        }
    }
}

void world_check_memory(world *w)
{
    for (int i = 0; i < DEVICES; i++) {
        size_t free_bytes = 0, total = 0;
        world_current(w, i);
        EXPECT(w, w->k.driver.cuMemGetInfo(&free_bytes, &total), 0);
        uint64_t used = w->used[i] + w->foreign[i];
        uint64_t expected = used < w->memory ? w->memory - used : 0;
        if (total != w->memory || free_bytes != expected) {
            WORLD_FAIL(w, "%zu of %zu bytes are free on device %d, not %llu", free_bytes, total, i,
                       (unsigned long long)expected);
        }
    }
}

/* ---- reservations ------------------------------------------------------------------------------ */

void op_reserve(world *w)
{
    static const size_t alignments[] = {0, 4096, PAGE, 4 * PAGE};
    for (space *s = w->spaces; s < w->spaces + SPACES; s++) {
        if (s->size > 0) {
            continue;
        }
        uint64_t size = (1 + below(&w->d, 8)) * (uint64_t)PAGE;
        size_t alignment = alignments[below(&w->d, 4)];
        EXPECT(w, w->k.driver.cuMemAddressReserve(&s->address, size, alignment, 0, 0), 0);
        EXPECT(w, s->address % (alignment > PAGE ? alignment : PAGE), 0);
        for (const space *other = w->spaces; other < w->spaces + SPACES; other++) {
            if (other->size > 0 && s->address < other->address + other->size &&
                other->address < s->address + size) {
                WORLD_FAIL(w, "two reservations overlap");
            }
        }
        s->size = size;
        return;
    }
}

static bool has_places(const world *w, CUdeviceptr from, CUdeviceptr to)
{
    for (const place *p = w->places; p < w->places + PLACES; p++) {
        if (p->size > 0 && p->address < to && from < p->address + p->size) {
            return true;
        }
    }
    return false;
}

void op_unreserve(world *w)
{
    space *s = &w->spaces[below(&w->d, SPACES)];
    if (s->size == 0) {
        return;
    }
    CUdeviceptr address = s->address + (below(&w->d, 6) == 0 ? PAGE : 0);
    uint64_t size = s->size + (below(&w->d, 6) == 0 ? PAGE : 0);
    bool legal = address == s->address && size == s->size &&
                 !has_places(w, s->address, s->address + s->size);
    EXPECT(w, w->k.driver.cuMemAddressFree(address, size),
           legal ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    if (legal) {
        s->size = 0;
    }
}

/* ---- mappings ---------------------------------------------------------------------------------- */

place *world_free_place(world *w)
{
    for (place *p = w->places; p < w->places + PLACES; p++) {
        if (p->size == 0) {
            return p;
        }
    }
    return NULL;
}

/* Every page of the range is reserved, in one reservation or in several side by side. */
static bool reserved(const world *w, CUdeviceptr from, CUdeviceptr to)
{
    for (CUdeviceptr at = from; at < to; at += PAGE) {
        bool found = false;
        for (const space *s = w->spaces; s < w->spaces + SPACES; s++) {
            found |= s->address <= at && at < s->address + s->size;
        }
        if (!found) {
            return false;
        }
    }
    return true;
}

void op_map(world *w)
{
    handle *h = world_any_handle(w);
    const space *s = &w->spaces[below(&w->d, SPACES)];
    place *p = world_free_place(w);
    if (h == NULL || p == NULL || s->size == 0) {
        return;
    }
    CUdeviceptr at = s->address + (CUdeviceptr)below(&w->d, (unsigned)(s->size / PAGE)) * PAGE;
    uint64_t size = below(&w->d, 10) == 0 ? PAGE : h->frame->bytes.size;
    bool whole = size == h->frame->bytes.size;
    bool legal = whole && reserved(w, at, at + size) && !has_places(w, at, at + size);
    EXPECT(w, w->k.driver.cuMemMap(at, size, 0, h->value, 0),
           legal   ? CUDA_SUCCESS
           : whole ? CUDA_ERROR_INVALID_VALUE
                   : CUDA_ERROR_NOT_SUPPORTED);
    if (legal) {
        *p = (place){.address = at, .size = size, .frame = h->frame, .handle = h};
        h->places++;
    }
}

/* Some pages: a mapping, two that are neighbours, a bit more or less, or any of a reservation. */
static bool any_range(world *w, CUdeviceptr *from, CUdeviceptr *to)
{
    const place *p = &w->places[below(&w->d, PLACES)];
    const space *s = &w->spaces[below(&w->d, SPACES)];
    if (s->size > 0 && below(&w->d, 8) == 0) {
        unsigned pages = (unsigned)(s->size / PAGE), first = below(&w->d, pages);
        *from = s->address + (CUdeviceptr)first * PAGE;
        *to = *from + (1 + below(&w->d, pages - first)) * (CUdeviceptr)PAGE;
        return true;
    }
    if (p->size == 0 || p->chunk != NULL) {
        return false;
    }
    const place *next = world_place_at(w, p->address + p->size);
    *from = p->address + (below(&w->d, 12) == 0 ? PAGE : 0);
    *to = p->address + p->size;
    if (next != NULL && below(&w->d, 3) == 0) {
        *to = next->address + next->size;
    }
    *to += below(&w->d, 12) == 0 ? PAGE : 0;
    return *from < *to;
}

static bool cuts(const world *w, CUdeviceptr from, CUdeviceptr to)
{
    for (const place *p = w->places; p < w->places + PLACES; p++) {
        CUdeviceptr end = p->address + p->size;
        if (p->size > 0 && ((p->address < from && from < end) || (p->address < to && to < end))) {
            return true;
        }
    }
    return false;
}

/* A range may have holes, but its beginning must be reserved, and its ends cut nothing in two. */
void op_unmap(world *w)
{
    CUdeviceptr from, to;
    if (!any_range(w, &from, &to)) {
        return;
    }
    bool legal = reserved(w, from, from + 1) && !cuts(w, from, to);
    for (const place *p = w->places; legal && p < w->places + PLACES; p++) {
        if (p->size > 0 && p->address >= from && p->address < to) {
            world_observe(w, &p->frame->bytes, p->address, p->address + p->size, -1);
            if (world_usable(p, 0, 1, true) && world_idle(w, &p->frame->bytes, true)) {
                world_check_bytes(w, p);
            }
        }
    }
    EXPECT(w, w->k.driver.cuMemUnmap(from, to - from),
           legal ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    for (place *p = w->places; legal && p < w->places + PLACES; p++) {
        if (p->size > 0 && p->address >= from && p->address < to) {
            p->size = 0;
            p->handle->places--;
            world_handle_settle(w, p->handle);
        }
    }
}

/* ---- access ------------------------------------------------------------------------------------ */

/* Before its first use an object is filled: nobody promises what a new frame holds. */
void world_fill(world *w, place *p, int device)
{
    span windows[2];
    object *o = &p->frame->bytes;
    unsigned char bytes[WINDOW];
    object_windows(o, p->address, windows);
    for (unsigned i = 0; i < 2; i++) {
        lane *l = world_any_lane(w, device);
        unsigned char value = (unsigned char)below(&w->d, 256);
        world_current(w, device);
        world_order(w, l, &windows[i], true);
        EXPECT(w,
               w->k.driver.cuMemsetD8Async(windows[i].address, value, windows[i].length, l->handle),
               0);
        world_note(w, l, world_queued(w, l), &windows[i], true);
        memset(bytes, value, sizeof bytes);
        span_write(&windows[i], bytes);
    }
    o->known = true;
}

static void give(world *w, place *p, int device, int flags)
{
    unsigned long long seen = 99;
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    p->access[device] = flags;
    EXPECT(w, w->k.driver.cuMemGetAccess(&seen, &location, p->address + 77), 0);
    EXPECT(w, seen, flags);
    if (flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE && !p->frame->bytes.known) {
        world_fill(w, p, device);
    }
}

/* At a hole the driver stops, and says nothing. */
void op_access(world *w)
{
    static const int choices[] = {CU_MEM_ACCESS_FLAGS_PROT_NONE, CU_MEM_ACCESS_FLAGS_PROT_READ};
    CUdeviceptr from, to;
    if (!any_range(w, &from, &to)) {
        return;
    }
    CUmemAccessDesc access[DEVICES];
    unsigned count = 1 + below(&w->d, DEVICES), first = below(&w->d, DEVICES);
    for (unsigned i = 0; i < count; i++) {
        access[i] = (CUmemAccessDesc){{CU_MEM_LOCATION_TYPE_DEVICE, (int)((first + i) % DEVICES)},
                                      below(&w->d, 4) == 0 ? choices[below(&w->d, 2)]
                                                           : CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    }
    const place *first_place = world_place_at(w, from), *last_place = world_place_at(w, to - 1);
    bool legal = first_place != NULL && last_place != NULL && !cuts(w, from, to);
    for (CUdeviceptr at = from; legal && at < to && world_place_at(w, at) != NULL;) {
        const place *p = world_place_at(w, at);
        for (unsigned i = 0; i < count; i++) {
            if (p->access[access[i].location.id] & ~access[i].flags) { /* some is taken away */
                world_observe(w, &p->frame->bytes, p->address, p->address + p->size, -1);
            }
        }
        at += p->size;
    }
    EXPECT(w, w->k.driver.cuMemSetAccess(from, to - from, access, count),
           legal ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
    for (CUdeviceptr at = from; legal && at < to && world_place_at(w, at) != NULL;) {
        place *p = world_place_at(w, at);
        for (unsigned i = 0; i < count; i++) {
            give(w, p, access[i].location.id, access[i].flags);
        }
        at += p->size;
    }
}

void op_peek(world *w)
{
    const place *p = &w->places[below(&w->d, PLACES)];
    if (p->size > 0 && p->frame->bytes.known && (p->access[0] | p->access[1]) != 0) {
        if (below(&w->d, 4) == 0) {
            world_observe(w, &p->frame->bytes, 0, UINT64_MAX, -1);
        }
        if (world_idle(w, &p->frame->bytes, true)) {
            world_check_bytes(w, p);
        }
    }
}

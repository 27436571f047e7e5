/*
 * Works made of calls: copies, memsets, kernels; and their effects.
 */
#include <stdlib.h>
#include <string.h>

#include "driver_face.h"
#include "sim.h"

/* ---- where an address lies -------------------------------------------------------------------- */

typedef enum place { PLACE_NOWHERE, PLACE_PAGEABLE, PLACE_PINNED, PLACE_DEVICE } place;

/* The first address in [address, +bytes) that nothing is mapped at, or that `device` may not access
   in this way; `end` if there is none. *found is the mapping there, or NULL. */
static uint64_t first_forbidden(uint64_t address, uint64_t bytes, int device, int access,
                                mapping **found)
{
    uint64_t end = address + bytes < address ? UINT64_MAX : address + bytes;
    uint8_t needed = (access & EBBSIM_WRITE) != 0 ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                                  : CU_MEM_ACCESS_FLAGS_PROT_READ;
    while (address < end) {
        *found = sim_mapping_at(address);
        if (*found == NULL || ((*found)->access[device] & needed) != needed) {
            return address;
        }
        address = (*found)->node.end;
    }
    return end;
}

/* Where a copy's operand lies. NOWHERE: the driver refuses it. `device` is the one that accesses. */
static place locate(uint64_t address, uint64_t bytes, int device, int access)
{
    const host_block *block = sim_host_block_at(address);
    if (address + bytes < address) {
        return PLACE_NOWHERE;
    }
    if (block != NULL) { /* one registration must cover all of it, and allow it */
        bool kept = block->registered && (block->flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
        bool allowed = !kept || (access & EBBSIM_WRITE) == 0;
        return allowed && address + bytes <= block->node.end ? PLACE_PINNED : PLACE_NOWHERE;
    }
    mapping *m = sim_mapping_at(address);
    if (m == NULL) {
        return sim_ranges_find(&sim.reservations, address) != NULL ? PLACE_NOWHERE : PLACE_PAGEABLE;
    }
    if (m->chunk) { /* cuMemAlloc: reached from every context, through the driver */
        const allocation *a = sim_allocation_at(address);
        return a != NULL && address + bytes <= a->node.end ? PLACE_DEVICE : PLACE_NOWHERE;
    }
    uint64_t forbidden = first_forbidden(address, bytes, device, access, &m);
    return forbidden == address + bytes ? PLACE_DEVICE : PLACE_NOWHERE;
}

/* ---- sources that must not change ------------------------------------------------------------- */

static uint64_t hash(const void *data, uint64_t bytes)
{
    const unsigned char *at = data;
    uint64_t lanes[4] = {1, 2, 3, 4};
    for (; bytes >= 32; bytes -= 32, at += 32) {
        uint64_t words[4];
        memcpy(words, at, 32);
        for (int i = 0; i < 4; i++) {
            lanes[i] = (lanes[i] ^ words[i]) * 0x9E3779B97F4A7C15u;
            lanes[i] ^= lanes[i] >> 29;
        }
    }
    for (; bytes > 0; bytes--, at++) {
        lanes[0] = (lanes[0] ^ *at) * 0x100000001B3u;
    }
    return lanes[0] ^ lanes[1] * 3 ^ lanes[2] * 5 ^ lanes[3] * 7;
}

/* What a pinned source holds when its copy is queued, and what was to be written there has been. */
void sim_source_remember(work *w)
{
    w->source_hash = hash((const void *)(uintptr_t)w->from, w->bytes);
    w->check_source = true;
}

/* Compare a pinned source with what it was when the copy was queued. Once. */
void sim_source_check(work *w)
{
    if (w->check_source) {
        w->check_source = false;
        if (sim_reachable(w->from, w->bytes) &&
            hash((const void *)(uintptr_t)w->from, w->bytes) != w->source_hash) {
            sim_report_source(w);
        }
    }
}

/* A work is about to write host memory: whoever still has to vouch for it does so now. */
void sim_sources_settle(uint64_t address, uint64_t bytes)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        for (work *w = sim.streams[i]->checks; w != NULL; w = w->next_check) {
            if (w->from < address + bytes && address < w->from + w->bytes) {
                sim_source_check(w);
            }
        }
    }
}

/* ---- effects ---------------------------------------------------------------------------------- */

/* Memory that was taken away under a work was reported then; it must not be touched now. */
static bool still_there(const work *w)
{
    bool there = true;
    for (size_t i = 0; i < w->range_count; i++) {
        there &= sim_reachable(w->ranges[i].address, w->ranges[i].bytes);
    }
    return there;
}

void sim_effect(work *w)
{
    if (w->effect == EFFECT_NONE || !still_there(w)) {
        return;
    }
    void *to = (void *)(uintptr_t)w->to;
    switch (w->effect) {
    case EFFECT_NONE:
        break;
    case EFFECT_COPY:
        memmove(to, w->snapshot != NULL ? w->snapshot : (void *)(uintptr_t)w->from, w->bytes);
        free(w->snapshot);
        w->snapshot = NULL;
        break;
    case EFFECT_SET8:
        memset(to, (int)(w->value & 0xFF), w->bytes);
        break;
    case EFFECT_SET32:
        for (uint64_t i = 0; i < w->bytes / 4; i++) {
            memcpy((char *)to + 4 * i, &w->value, 4);
        }
        break;
    case EFFECT_FUNCTION:
        w->function(w->data);
        break;
    }
}

/* Queue a work, or add it to the graph if the stream is capturing. */
static CUresult submit(stream *s, work *w)
{
    if (s->capture != NULL) {
        return sim_capture_add(s, w);
    }
    CUresult code = sim_capture_check_implicit(s);
    if (code != CUDA_SUCCESS) {
        sim_work_unref(w);
        return code;
    }
    if (w->effect == EFFECT_COPY && w->snapshot_wanted) {
        w->snapshot = malloc(w->bytes);
        if (w->snapshot == NULL) {
            sim_work_unref(w);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        memcpy(w->snapshot, (const void *)(uintptr_t)w->from, w->bytes);
    }
    sim_queue(s, w);
    return CUDA_SUCCESS;
}

/* An access that a GPU would fault on: report it, and the context is lost as it would be there. */
static bool kernel_may_touch(const work *w)
{
    for (size_t i = 0; i < w->range_count; i++) {
        const ebbsim_range *r = &w->ranges[i];
        const host_block *block = sim_host_block_at(r->address);
        if (r->bytes == 0 || (block != NULL && r->bytes <= block->node.end - r->address)) {
            continue;
        }
        mapping *m = NULL;
        uint64_t forbidden =
            first_forbidden(r->address, r->bytes, w->device, r->access & EBBSIM_WRITE, &m);
        if (forbidden != r->address + r->bytes) {
            sim_report_access(w, forbidden, m == NULL ? -1 : m->frame->device);
            return false;
        }
    }
    return true;
}

/* A graph can outlive the memory it was made for: to replay it then is a fault. */
static bool node_may_touch(const work *w)
{
    if (w->effect == EFFECT_NONE || w->effect == EFFECT_FUNCTION) {
        return kernel_may_touch(w);
    }
    for (size_t i = 0; i < w->range_count; i++) {
        const ebbsim_range *r = &w->ranges[i];
        mapping *m = sim_mapping_at(r->address);
        if (!sim_reachable(r->address, r->bytes)) {
            sim_report_access(w, r->address, -1);
            return false;
        }
        if (m != NULL && !m->chunk && !w->between_devices) {
            uint64_t forbidden = first_forbidden(r->address, r->bytes, w->device, r->access, &m);
            if (forbidden != r->address + r->bytes) {
                sim_report_access(w, forbidden, m == NULL ? -1 : m->frame->device);
                return false;
            }
        }
    }
    return true;
}

/* A fault shows in the calls after it, not in the launch. */
static CUresult fault(stream *s, work *w)
{
    sim.contexts[s->device].lost = CUDA_ERROR_ILLEGAL_ADDRESS;
    sim_work_unref(w);
    return CUDA_SUCCESS;
}

static void name_place(work *w, const stream *s)
{
    w->device = s->device;
    w->stream_number = s->number;
    w->when = sim_now();
    w->thread = sim_thread_number();
}

/* A new work with a captured one as its pattern. */
static CUresult again(stream *s, const work *captured)
{
    work *w = sim_work_new(captured->kind, captured->call);
    if (w == NULL || !sim_work_ranges(w, captured->ranges, captured->range_count)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    w->effect = captured->effect;
    w->engine = captured->engine;
    w->duration = captured->duration;
    w->rate = captured->rate;
    w->to = captured->to;
    w->from = captured->from;
    w->bytes = captured->bytes;
    w->value = captured->value;
    w->value_test = captured->value_test;
    w->now = captured->now;
    w->function = captured->now ? NULL : captured->function;
    w->data = captured->data;
    w->snapshot_wanted = captured->snapshot_wanted;
    w->source_pinned = captured->source_pinned;
    w->between_devices = captured->between_devices;
    name_place(w, s);
    return node_may_touch(w) ? submit(s, w) : fault(s, w);
}

/* A graph's node, again. What a program does by itself (`now`) it does here, without the lock. */
CUresult sim_work_again(stream *s, work *captured)
{
    if (captured->now && captured->function != NULL) {
        captured->refs++; /* the graph may go while the lock is dropped */
        sim_catch_up(s);
        pthread_mutex_unlock(&sim.mutex);
        captured->function(captured->data);
        pthread_mutex_lock(&sim.mutex);
        CUresult code = again(s, captured);
        sim_work_unref(captured);
        return code;
    }
    return again(s, captured);
}

/* ---- copies ----------------------------------------------------------------------------------- */

static void price_copy(work *w, const ebbsim_card *card, place to, place from, bool same_device)
{
    bool pageable = to == PLACE_PAGEABLE || from == PLACE_PAGEABLE;
    if (to == PLACE_DEVICE && from == PLACE_DEVICE && same_device) {
        w->engine = ENGINE_COMPUTE;
        w->duration = card->kernel_latency + (uint64_t)(2e9 * (double)w->bytes / card->memory_rate);
        return;
    }
    bool in = to == PLACE_DEVICE && from != PLACE_DEVICE;
    w->engine = in ? ENGINE_H2D : ENGINE_D2H;
    w->rate = pageable ? card->pageable_rate : in ? card->h2d_rate : card->d2h_rate;
}

/*
 * Memory that is not pinned goes through a staging buffer of the driver's. A copy to the host
 * returns when the bytes are there; one from the host as soon as they fit the buffer, which is when
 * the copies before have left it.
 */
enum { STAGING = 4 << 20 };

static bool staging_has_room(const stream *s, const work *w)
{
    uint64_t staged = 0;
    sim_settle();
    for (uint32_t i = 0; i < sim.slots; i++) {
        for (const work *q = sim.streams[i]->head; q != NULL; q = q->next) {
            bool over = q->settled && q->end <= sim_now();
            staged += q->device == s->device && q->snapshot_wanted && !over ? q->bytes : 0;
        }
    }
    return staged + w->bytes < STAGING;
}

CUresult sim_copy(const char *call, stream *s, uint64_t to, int to_device, uint64_t from,
                  int from_device, uint64_t bytes)
{
    if (bytes == 0) {
        return CUDA_SUCCESS;
    }
    if (to == 0 || from == 0) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    int writer = to_device >= 0 ? to_device : s->device;
    int reader = from_device >= 0 ? from_device : s->device;
    place target = locate(to, bytes, writer, EBBSIM_WRITE);
    place source = locate(from, bytes, reader, EBBSIM_READ);
    if (target == PLACE_NOWHERE || source == PLACE_NOWHERE ||
        (target == PLACE_PAGEABLE && to_device != SIM_HOST) ||
        (source == PLACE_PAGEABLE && from_device != SIM_HOST)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    work *w = sim_work_new(ENTRY_WORK, call);
    ebbsim_range touched[2];
    size_t count = 0;
    if (source != PLACE_PAGEABLE) {
        touched[count++] = (ebbsim_range){from, bytes, EBBSIM_READ};
    }
    if (target != PLACE_PAGEABLE) {
        touched[count++] = (ebbsim_range){to, bytes, EBBSIM_WRITE};
    }
    if (w == NULL || !sim_work_ranges(w, touched, count)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    w->effect = EFFECT_COPY;
    w->to = to;
    w->from = from;
    w->bytes = bytes;
    w->snapshot_wanted = source == PLACE_PAGEABLE;
    w->source_pinned = source == PLACE_PINNED;
    w->between_devices = writer != s->device || reader != s->device;
    price_copy(w, sim_card(s->device), target, source, writer == reader);
    bool waits = target == PLACE_PAGEABLE || (source == PLACE_PAGEABLE && !staging_has_room(s, w));
    CUresult code = submit(s, w);
    if (code == CUDA_SUCCESS && waits && s->capture == NULL) {
        mark *m = sim_mark_stream(s, -1);
        sim_mark_wait(m);
        sim_mark_unref(m);
    }
    return code;
}

CUresult sim_set(const char *call, stream *s, uint64_t to, uint32_t value, uint64_t count,
                 unsigned width)
{
    uint64_t bytes = count * width;
    if (count == 0) {
        return CUDA_SUCCESS;
    }
    if (to % width != 0 || bytes / width != count) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    place target = locate(to, bytes, s->device, EBBSIM_WRITE);
    if (target != PLACE_DEVICE && target != PLACE_PINNED) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    work *w = sim_work_new(ENTRY_WORK, call);
    ebbsim_range touched = {to, bytes, EBBSIM_WRITE};
    if (w == NULL || !sim_work_ranges(w, &touched, 1)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const ebbsim_card *card = sim_card(s->device);
    w->effect = width == 1 ? EFFECT_SET8 : EFFECT_SET32;
    w->engine = ENGINE_COMPUTE;
    w->duration = card->kernel_latency + (uint64_t)(1e9 * (double)bytes / card->memory_rate);
    w->to = to;
    w->bytes = bytes;
    w->value = value;
    return submit(s, w);
}

/* Something that happens to memory in a stream's order, without a change of its bytes. */
CUresult sim_touch(const char *call, stream *s, uint64_t address, uint64_t bytes, int node_type)
{
    work *w = sim_work_new(ENTRY_WORK, call);
    ebbsim_range touched = {address, bytes, EBBSIM_WRITE};
    if (w == NULL || !sim_work_ranges(w, &touched, 1)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    w->node_type = node_type;
    return submit(s, w);
}

/* A word of memory: waited for, or written by the driver's own thread when its turn comes. */
CUresult sim_word(const char *call, stream *s, uint64_t address, uint32_t value, int test)
{
    ebbsim_range touched = {address, 4, test >= 0 ? EBBSIM_READ : EBBSIM_WRITE};
    mapping *m = sim_mapping_at(address);
    if (address == 0 || address % 4 != 0 || !sim_reachable(address, 4) ||
        (m != NULL && !m->chunk &&
         first_forbidden(address, 4, s->device, touched.access, &m) != address + 4)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    work *w = sim_work_new(test >= 0 ? ENTRY_WAIT_VALUE : ENTRY_HOST, call);
    if (w == NULL || !sim_work_ranges(w, &touched, 1)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    w->from = w->to = address;
    w->value = value;
    w->value_test = (unsigned)test;
    return submit(s, w);
}

CUresult sim_host_function(stream *s, CUhostFn function, void *data)
{
    work *w = sim_work_new(ENTRY_HOST, "cuLaunchHostFunc");
    if (w == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    w->function = function;
    w->data = data;
    return submit(s, w);
}

/* ---- kernels ---------------------------------------------------------------------------------- */

/* *kept: the work is a graph's node now, and will let go of its data by itself. */
static CUresult launch(const ebbsim_work *given, stream *s, bool *kept)
{
    work *w = sim_work_new(ENTRY_WORK, given->name == NULL ? "kernel" : given->name);
    if (w == NULL || !sim_work_ranges(w, given->ranges, given->range_count)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const ebbsim_card *card = sim_card(s->device);
    double bytes = 0;
    for (size_t i = 0; i < given->range_count; i++) {
        bytes += (double)given->ranges[i].bytes;
    }
    double seconds = bytes / card->memory_rate > given->flops / card->flops
                         ? bytes / card->memory_rate
                         : given->flops / card->flops;
    w->duration = given->nanoseconds != 0 ? given->nanoseconds
                                          : card->kernel_latency + (uint64_t)(seconds * 1e9);
    w->engine = ENGINE_COMPUTE;
    name_place(w, s);
    w->now = given->now != 0;
    if (w->now && s->capture != NULL) {
        w->function = given->function;
        w->data = given->data;
        w->release = given->release;
        *kept = true;
    } else if (!w->now && given->function != NULL) {
        w->effect = EFFECT_FUNCTION;
        w->function = given->function;
        w->data = given->data;
    }
    return kernel_may_touch(w) ? submit(s, w) : fault(s, w);
}

int ebbsim_launch(const ebbsim_work *given, void *handle)
{
    CUresult code = sim_enter(FN_ebbsim_launch);
    if (given == NULL || given->size != sizeof *given ||
        (given->range_count > 0 && given->ranges == NULL)) {
        return (int)sim_leave(code != CUDA_SUCCESS ? code : CUDA_ERROR_INVALID_VALUE);
    }
    bool kept = false;
    stream *s = code == CUDA_SUCCESS ? sim_stream_get(handle, &code) : NULL;
    if (s != NULL) {
        code = launch(given, s, &kept);
    }
    if (given->release != NULL && !kept) {
        given->release(given->data);
    }
    return (int)sim_leave(code);
}

int ebbsim_catch_up(void *stream_handle)
{
    CUresult code = sim_enter(FN_ebbsim_catch_up);
    stream *s = code == CUDA_SUCCESS ? sim_stream_get(stream_handle, &code) : NULL;
    if (s != NULL && s->capture != NULL) {
        code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    } else if (s != NULL) {
        sim_catch_up(s);
    }
    return (int)sim_leave(code);
}

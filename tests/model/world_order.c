/*
 * Streams and events of the model: who knows what to be over, and the ways to make it so.
 */
#include "world.h"

void world_current(world *w, int device)
{
    OK(w->k.driver.cuCtxSetCurrent(w->k.context[device]));
}

static unsigned number_of(const world *w, const lane *l)
{
    return (unsigned)(l - w->lanes);
}

lane *world_any_lane(world *w, int device)
{
    for (;;) {
        lane *l = &w->lanes[below(&w->d, LANES)];
        if (l->alive && (device < 0 || l->device == device)) {
            return l;
        }
    }
}

static void join(uint64_t *into, const uint64_t *from)
{
    for (unsigned i = 0; i < LANES; i++) {
        into[i] = into[i] > from[i] ? into[i] : from[i];
    }
}

static bool all_known(const uint64_t *what, const uint64_t *by)
{
    for (unsigned i = 0; i < LANES; i++) {
        if (what[i] > by[i]) {
            return false;
        }
    }
    return true;
}

/* What the next entry of a lane will be ordered after: its own, what the host knows, and by the
   rules of the legacy default stream all blocking lanes', or the default one's. */
static void would_know(const world *w, const lane *l, uint64_t *knows)
{
    memcpy(knows, l->knows, sizeof l->knows);
    join(knows, w->host);
    for (unsigned i = 0; i < LANES; i++) {
        const lane *other = &w->lanes[i];
        if (other != l && other->used && other->device == l->device && l->blocking &&
            other->blocking && (l->is_default || other->is_default)) {
            join(knows, other->knows);
        }
    }
}

uint64_t world_queued(world *w, lane *l)
{
    uint64_t knows[LANES];
    would_know(w, l, knows);
    memcpy(l->knows, knows, sizeof knows);
    l->queued++;
    l->knows[number_of(w, l)] = l->queued;
    return l->queued;
}

/* A destroyed lane may serve again when the host knows that all its work is over. */
static void bury(world *w)
{
    for (unsigned i = 0; i < LANES; i++) {
        lane *l = &w->lanes[i];
        if (l->used && !l->alive && w->host[i] >= l->queued) {
            l->used = false;
        }
    }
}

void world_host_learns(world *w, const uint64_t *covers)
{
    join(w->host, covers);
    bury(w);
}

/* What a call that waited for everything on a device has shown. */
void world_learn_context(world *w, int device)
{
    for (unsigned i = 0; i < LANES; i++) {
        if (w->lanes[i].used && w->lanes[i].device == device) {
            join(w->host, w->lanes[i].knows);
        }
    }
    bury(w);
}

void world_synchronize(world *w)
{
    for (int i = 0; i < DEVICES; i++) {
        world_current(w, i);
        EXPECT(w, w->k.driver.cuCtxSynchronize(), 0);
        world_learn_context(w, i);
    }
}

/* ---- fences ------------------------------------------------------------------------------------ */

static fence *any_fence(world *w, int device)
{
    for (;;) {
        fence *f = &w->fences[below(&w->d, FENCES)];
        if (f->used && (device < 0 || f->device == device)) {
            return f;
        }
    }
}

static void record(world *w, fence *f, lane *l)
{
    world_current(w, l->device);
    EXPECT(w, w->k.driver.cuEventRecord(f->handle, l->handle), 0);
    if (l->is_default) {
        world_queued(w, l);
    }
    would_know(w, l, f->covers);
    f->recorded = true;
}

static void record_context(world *w, fence *f)
{
    EXPECT(w, w->k.driver.cuCtxRecordEvent(w->k.context[f->device], f->handle), 0);
    memcpy(f->covers, w->host, sizeof f->covers);
    for (unsigned i = 0; i < LANES; i++) {
        if (w->lanes[i].used && w->lanes[i].device == f->device) {
            join(f->covers, w->lanes[i].knows);
        }
    }
    f->recorded = true;
}

static void wait_for(world *w, lane *l, const fence *f)
{
    world_current(w, l->device);
    EXPECT(w, w->k.driver.cuStreamWaitEvent(l->handle, f->handle, 0), 0);
    if (f->recorded) {
        world_queued(w, l);
        join(l->knows, f->covers);
    }
}

/* A fence that answers "not yet" stands for something the host does not know to be over. */
static bool query(world *w, const fence *f)
{
    CUresult code = w->k.driver.cuEventQuery(f->handle);
    if (code == CUDA_SUCCESS) {
        world_host_learns(w, f->covers);
    } else if (code != CUDA_ERROR_NOT_READY || !f->recorded || all_known(f->covers, w->host)) {
        WORLD_FAIL(w, "cuEventQuery gave %d", (int)code);
    }
    return code == CUDA_SUCCESS;
}

/* The host waits for a fence, by sleeping or by asking. */
static void host_waits(world *w, const fence *f)
{
    world_current(w, f->device);
    if (below(&w->d, 2) == 0) {
        EXPECT(w, w->k.driver.cuEventSynchronize(f->handle), 0);
        world_host_learns(w, f->covers);
    } else {
        while (!query(w, f) && w->failures == 0) {
            ebbsim_pass(1 + below(&w->d, 20000));
        }
    }
}

static void synchronize_stream(world *w, lane *l)
{
    world_current(w, l->device);
    EXPECT(w, w->k.driver.cuStreamSynchronize(l->handle), 0);
    if (l->is_default) {
        world_queued(w, l);
    }
    world_host_learns(w, l->knows);
}

static bool query_stream(world *w, lane *l)
{
    world_current(w, l->device);
    CUresult code = w->k.driver.cuStreamQuery(l->handle);
    uint64_t knows[LANES];
    memcpy(knows, l->knows, sizeof knows);
    if (l->is_default) { /* a blocking lane waits for it only when it has something to do */
        would_know(w, l, knows);
    }
    if (code == CUDA_SUCCESS) {
        world_host_learns(w, knows);
    } else if (code != CUDA_ERROR_NOT_READY || all_known(knows, w->host)) {
        WORLD_FAIL(w, "cuStreamQuery gave %d", (int)code);
    }
    return code == CUDA_SUCCESS;
}

/* ---- the legal ways ---------------------------------------------------------------------------- */

/* The host comes to know that an access is over. */
static void observe(world *w, const past *p)
{
    lane *l = &w->lanes[p->lane];
    unsigned way = below(&w->d, l->alive ? 6 : 3);
    fence *f = any_fence(w, l->device);
    if (way == 0) {
        world_current(w, l->device);
        EXPECT(w, w->k.driver.cuCtxSynchronize(), 0);
        world_learn_context(w, l->device);
    } else if (way < 3) {
        record_context(w, f);
        host_waits(w, f);
    } else if (way == 3) {
        synchronize_stream(w, l);
    } else if (way == 4) {
        record(w, f, l);
        host_waits(w, f);
    } else {
        while (!query_stream(w, l) && w->failures == 0) {
            ebbsim_pass(1 + below(&w->d, 20000));
        }
    }
}

/* `l` goes on after an access. */
static void order(world *w, lane *l, const past *p)
{
    lane *other = &w->lanes[p->lane];
    unsigned way = below(&w->d, 8);
    if (way == 0) {
        observe(w, p);
        return;
    }
    fence *f = any_fence(w, -1);
    if (way < 4 && f->recorded && f->covers[p->lane] >= p->number) {
        wait_for(w, l, f); /* one that happens to be behind it */
        return;
    }
    f = any_fence(w, other->device);
    if (!other->alive || way == 7) {
        record_context(w, f);
    } else {
        record(w, f, other);
    }
    wait_for(w, l, f);
}

static bool meets(const past *p, uint64_t offset, uint64_t length)
{
    return p->start < offset + length && offset < p->end;
}

static void forget(world *w, object *o)
{
    unsigned kept = 0;
    for (unsigned i = 0; i < o->past_count; i++) {
        if (o->pasts[i].number > w->host[o->pasts[i].lane]) {
            o->pasts[kept++] = o->pasts[i];
        }
    }
    o->past_count = kept;
}

void world_order(world *w, lane *l, const span *s, bool writes)
{
    for (unsigned i = 0; i < s->count; i++) {
        object *o = s->parts[i].bytes;
        for (unsigned j = 0; j < o->past_count && w->failures == 0;) {
            uint64_t knows[LANES];
            past p = o->pasts[j]; /* a copy: ordering moves them */
            would_know(w, l, knows);
            if (meets(&p, s->parts[i].offset, s->parts[i].length) && (writes || p.writes) &&
                p.number > knows[p.lane]) {
                order(w, l, &p);
                j = 0;
            } else {
                j++;
            }
        }
    }
}

void world_observe(world *w, object *o, CUdeviceptr from, CUdeviceptr to, int but)
{
    forget(w, o);
    for (unsigned i = 0; i < o->past_count && w->failures == 0;) {
        past p = o->pasts[i];
        if (p.address >= from && p.address < to && w->lanes[p.lane].device != but) {
            observe(w, &p);
            forget(w, o);
            i = 0;
        } else {
            i++;
        }
    }
}

bool world_idle(world *w, object *o, bool writes_only)
{
    bool idle = true;
    forget(w, o);
    for (unsigned i = 0; i < o->past_count; i++) {
        idle &= writes_only && !o->pasts[i].writes;
    }
    return idle;
}

void world_note(world *w, const lane *l, uint64_t number, const span *s, bool writes)
{
    uint64_t behind = 0;
    for (unsigned i = 0; i < s->count; i++) {
        object *o = s->parts[i].bytes;
        if (o->past_count == PASTS) {
            forget(w, o);
        }
        if (o->past_count == PASTS) {
            world_synchronize(w);
            forget(w, o);
        }
        o->pasts[o->past_count++] = (past){.lane = number_of(w, l),
                                           .number = number,
                                           .start = s->parts[i].offset,
                                           .end = s->parts[i].offset + s->parts[i].length,
                                           .address = s->address + behind,
                                           .writes = writes};
        behind += s->parts[i].length;
    }
}

/* ---- operations -------------------------------------------------------------------------------- */

void op_stream_create(world *w)
{
    for (unsigned i = 0; i < LANES; i++) {
        lane *l = &w->lanes[i];
        if (l->used) {
            continue;
        }
        l->used = l->alive = true;
        l->is_default = l->lasts = false;
        l->blocking = below(&w->d, 2) == 0;
        l->device = (int)below(&w->d, DEVICES);
        memcpy(l->knows, w->host, sizeof l->knows);
        l->knows[i] = l->queued;
        world_current(w, l->device);
        unsigned flags = l->blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING;
        EXPECT(w,
               below(&w->d, 2) == 0 ? w->k.driver.cuStreamCreate(&l->handle, flags)
                                    : w->k.driver.cuStreamCreateWithPriority(&l->handle, flags, -1),
               0);
        return;
    }
}

/* Its work goes on. */
void op_stream_destroy(world *w)
{
    lane *l = world_any_lane(w, -1);
    if (!l->lasts) {
        world_current(w, l->device);
        EXPECT(w, w->k.driver.cuStreamDestroy(l->handle), 0);
        w->stale_stream = l->handle;
        l->alive = false;
        bury(w);
    }
}

void op_event_create(world *w)
{
    fence *f = &w->fences[below(&w->d, FENCES)];
    if (!f->used) {
        *f = (fence){.used = true, .device = (int)below(&w->d, DEVICES)};
        world_current(w, f->device);
        EXPECT(w, w->k.driver.cuEventCreate(&f->handle, below(&w->d, 3)), 0);
    }
}

void op_event_destroy(world *w)
{
    fence *f = &w->fences[DEVICES + below(&w->d, FENCES - DEVICES)]; /* one each is always there */
    if (f->used) {
        EXPECT(w, w->k.driver.cuEventDestroy(f->handle), 0);
        w->stale_event = f->handle;
        f->used = false;
    }
}

void op_record(world *w)
{
    fence *f = any_fence(w, -1);
    lane *l = world_any_lane(w, -1);
    if (below(&w->d, 6) == 0) {
        record_context(w, f);
    } else if (l->device == f->device) {
        record(w, f, l);
    } else {
        world_current(w, l->device);
        EXPECT(w, w->k.driver.cuEventRecord(f->handle, l->handle), CUDA_ERROR_INVALID_HANDLE);
    }
}

void op_wait(world *w)
{
    wait_for(w, world_any_lane(w, -1), any_fence(w, -1));
}

void op_query(world *w)
{
    if (below(&w->d, 2) == 0) {
        query_stream(w, world_any_lane(w, -1));
    } else {
        fence *f = any_fence(w, -1);
        world_current(w, f->device);
        query(w, f);
    }
}

void op_synchronize(world *w)
{
    unsigned way = below(&w->d, 8);
    if (way == 0) {
        world_synchronize(w);
    } else if (way < 4) {
        synchronize_stream(w, world_any_lane(w, -1));
    } else {
        host_waits(w, any_fence(w, -1));
    }
}

void op_pass(world *w)
{
    ebbsim_pass(below(&w->d, 100000));
}

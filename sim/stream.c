/*
 * Streams: what is queued, what it is ordered after, when it ends, when it has its effect.
 *
 * A stream is a list of entries. Two pointers walk along it, each in its own time:
 *
 *      head                 to_run                 to_settle              tail
 *       |  settled and run    |  settled, not run     |  no end known yet   |
 *       v                     v                       v                     v
 *      [copy] [record] [wait] [copy] [kernel] [record] [wait value] [copy] [record]
 *
 * An entry leaves the list when both have passed it; what it touched lives on in history.c until the
 * host has observed it. Either pointer may be ahead. `to_settle` stops at what no model can foresee:
 * a host function, a word of memory, a mark of another stream that is stopped itself. `to_run` moves
 * only when somebody needs an effect.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

/* ---- vector clocks --------------------------------------------------------------------------- */

void sim_vclock_reserve(vclock *clock, uint32_t count)
{
    if (clock->count < count) {
        uint32_t room = 16; /* powers of two, or clocks that join each other would double in turn */
        while (room < count) {
            room *= 2;
        }
        clock->at = realloc(clock->at, room * sizeof *clock->at);
        if (clock->at == NULL) {
            abort(); /* a simulator that cannot remember an order must not go on */
        }
        memset(clock->at + clock->count, 0, (room - clock->count) * sizeof *clock->at);
        clock->count = room;
    }
}

uint64_t sim_vclock_get(const vclock *clock, uint32_t slot)
{
    return slot < clock->count ? clock->at[slot] : 0;
}

void sim_vclock_set(vclock *clock, uint32_t slot, uint64_t value)
{
    sim_vclock_reserve(clock, slot + 1);
    clock->at[slot] = value;
}

void sim_vclock_join(vclock *into, const vclock *from)
{
    sim_vclock_reserve(into, from->count);
    for (uint32_t i = 0; i < from->count; i++) {
        if (into->at[i] < from->at[i]) {
            into->at[i] = from->at[i];
        }
    }
}

/* ---- works ----------------------------------------------------------------------------------- */

work *sim_work_new(entry_kind kind, const char *call)
{
    work *w = calloc(1, sizeof *w);
    if (w != NULL) {
        w->refs = 1;
        w->kind = kind;
        snprintf(w->call, sizeof w->call, "%s", call);
        sim.works++;
    }
    return w;
}

bool sim_work_ranges(work *w, const ebbsim_range *list, size_t count)
{
    w->ranges = w->inline_ranges;
    if (count > WORK_INLINE_RANGES) {
        w->ranges = malloc(count * sizeof *list);
        if (w->ranges == NULL) {
            w->ranges = w->inline_ranges;
            return false;
        }
    }
    if (count > 0) {
        memcpy(w->ranges, list, count * sizeof *list);
    }
    w->range_count = count;
    return true;
}

void sim_work_unref(work *w)
{
    if (--w->refs > 0) {
        return;
    }
    if (w->release != NULL) {
        w->release(w->data);
    }
    if (w->mark != NULL) {
        sim_mark_unref(w->mark);
    }
    if (w->ranges != w->inline_ranges) {
        free(w->ranges);
    }
    free(w->snapshot);
    free(w);
    sim.works--;
}

bool sim_observed(const work *w)
{
    return w->sequence <= sim_vclock_get(&sim.host, w->slot);
}

/* ---- queueing --------------------------------------------------------------------------------- */

static void know_the_host(stream *s)
{
    if (s->host_version != sim.host_version) {
        sim_vclock_join(&s->order, &sim.host);
        s->host_version = sim.host_version;
    }
}

static void append(stream *s, work *w)
{
    w->slot = s->slot;
    w->sequence = ++s->sequence;
    w->device = s->device;
    w->stream_number = s->number;
    w->when = sim_now();
    w->thread = sim_thread_number();
    sim_vclock_set(&s->order, s->slot, w->sequence);
    if (s->tail == NULL) {
        s->head = w;
    } else {
        s->tail->next = w;
    }
    s->tail = w;
    if (s->to_settle == NULL) {
        s->to_settle = w;
    }
    if (s->to_run == NULL) {
        s->to_run = w;
    }
    s->waiting++;
    sim.unsettled++;
}

static mark *mark_new(void)
{
    mark *m = calloc(1, sizeof *m);
    if (m == NULL) {
        abort(); /* as for vector clocks */
    }
    m->refs = 1;
    m->shared = -1;
    return m;
}

static void record(stream *s, mark *m)
{
    work *w = sim_work_new(ENTRY_RECORD, "record");
    if (w == NULL) {
        abort();
    }
    know_the_host(s);
    m->refs++;
    m->pending++;
    w->mark = m;
    append(s, w);
    sim_vclock_join(&m->order, &s->order);
    sim_settle_stream(s);
}

static void wait_for(stream *s, mark *m)
{
    work *w = sim_work_new(ENTRY_WAIT, "wait");
    if (w == NULL) {
        abort();
    }
    m->refs++;
    w->mark = m;
    know_the_host(s);
    append(s, w);
    sim_vclock_join(&s->order, &m->order);
    sim_settle_stream(s);
}

/*
 * The legacy default stream: its work waits for all earlier work of blocking streams, and theirs for
 * its. Streams made with NON_BLOCKING take no part.
 */
static void join_default(stream *s)
{
    if (s->non_blocking) {
        return;
    }
    know_the_host(s);
    for (uint32_t i = 0; i < sim.slots; i++) {
        stream *other = sim.streams[i];
        if (other == s || other->device != s->device || other->non_blocking ||
            (!s->is_default && !other->is_default) ||
            other->sequence <= sim_vclock_get(&s->order, other->slot)) {
            continue;
        }
        mark *m = mark_new();
        record(other, m);
        wait_for(s, m);
        sim_mark_unref(m);
    }
}

/* Fill what a late write will write with the pattern, unless the work reads it too. */
static void fill_with_pattern(const work *w)
{
    for (size_t i = 0; i < w->range_count; i++) {
        const ebbsim_range *r = &w->ranges[i];
        bool read_too = r->access != EBBSIM_WRITE || r->bytes == 0;
        for (size_t j = 0; j < w->range_count && !read_too; j++) {
            const ebbsim_range *other = &w->ranges[j];
            read_too = (other->access & EBBSIM_READ) != 0 &&
                       other->address < r->address + r->bytes &&
                       r->address < other->address + other->bytes;
        }
        if (!read_too) {
            memset((void *)(uintptr_t)r->address, EBBSIM_PATTERN, r->bytes);
        }
    }
}

/* Everything ordered before the stream's next entry has its effect. */
static void run_before(stream *s)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        sim_wait_run(i, sim_vclock_get(&s->order, i));
    }
}

void sim_catch_up(stream *s)
{
    join_default(s);
    know_the_host(s);
    run_before(s);
}

void sim_queue(stream *s, work *w)
{
    join_default(s);
    know_the_host(s);
    append(s, w);
    if (w->kind == ENTRY_HOST) { /* remember what its function will know to be over */
        w->mark = mark_new();
        sim_vclock_join(&w->mark->order, &s->order);
        w->mark->order.at[s->slot]--;
    }
    w->refs++;
    bool way = sim_history_note(w);
    if (w->now) {
        run_before(s);
    } else if (w->kind == ENTRY_WORK && w->effect != EFFECT_NONE && way) {
        fill_with_pattern(w);
    }
    if (w->source_pinned && way) {
        sim_source_remember(w);
        w->refs++;
        if (s->last_check == NULL) {
            s->checks = w;
        } else {
            s->last_check->next_check = w;
        }
        s->last_check = w;
    }
    sim_settle_stream(s);
    if (s->waiting > SIM_QUEUE_LIMIT) {
        sim_run(s->slot, w->sequence - SIM_QUEUE_LIMIT / 2);
    }
    if (w->kind == ENTRY_HOST || w->kind == ENTRY_WAIT_VALUE) {
        sim_helper_start();
    }
    sim_work_unref(w);
}

/* ---- marks ------------------------------------------------------------------------------------ */

void sim_mark_ref(mark *m)
{
    m->refs++;
}

void sim_mark_unref(mark *m)
{
    if (--m->refs == 0) {
        free(m->order.at);
        free(m);
    }
}

/*
 * A blocking stream does not wait for the default stream before it has something to do, and is idle
 * until then. A record there is not over before the default stream's work is, all the same.
 */
static void record_with_default(stream *s, mark *m)
{
    m->pending = 1; /* not reached before both have it */
    for (uint32_t i = 0; i < sim.slots; i++) {
        stream *other = sim.streams[i];
        if (other->is_default && other->device == s->device && !other->dead &&
            other->sequence > sim_vclock_get(&s->order, other->slot)) {
            record(other, m);
        }
    }
    record(s, m);
    sim_mark_reach(m, sim_now());
}

mark *sim_mark_stream(stream *s, int shared)
{
    mark *m = mark_new();
    if (shared < 0 && !s->is_default && !s->non_blocking) {
        record_with_default(s, m);
        return m;
    }
    join_default(s);
    if (shared >= 0) {
        /* Another process may look at any time, and cannot make our works have their effect. */
        m->shared = shared;
        m->shared_record = sim_shared_event_record(shared);
        know_the_host(s);
        run_before(s);
        sim_helper_start();
    }
    record(s, m);
    return m;
}

mark *sim_mark_own(stream *s)
{
    mark *m = mark_new();
    if (s->is_default) {
        join_default(s);
    }
    record(s, m);
    return m;
}

mark *sim_mark_context(int device, int shared)
{
    mark *m = mark_new();
    m->pending = 1;    /* not reached before every stream has it */
    if (shared >= 0) { /* as for one stream */
        m->shared = shared;
        m->shared_record = sim_shared_event_record(shared);
        for (uint32_t i = 0; i < sim.slots; i++) {
            if (sim.streams[i]->device == device) {
                sim_wait_run(i, sim.streams[i]->sequence);
            }
        }
        sim_helper_start();
    }
    for (uint32_t i = 0; i < sim.slots; i++) {
        stream *s = sim.streams[i];
        if (s->device == device && s->sequence > sim_vclock_get(&sim.host, s->slot)) {
            record(s, m);
        }
    }
    sim_mark_reach(m, sim_now());
    return m;
}

/* Two marks as one. Neither may be pending. */
mark *sim_mark_both(const mark *a, const mark *b)
{
    mark *m = mark_new();
    m->end = a->end > b->end ? a->end : b->end;
    sim_vclock_join(&m->order, &a->order);
    sim_vclock_join(&m->order, &b->order);
    return m;
}

mark *sim_mark_foreign(int shared, uint64_t record_number)
{
    mark *m = mark_new();
    m->shared = shared;
    m->shared_record = record_number;
    m->foreign = true;
    m->pending = 1;
    return m;
}

bool sim_mark_reached(mark *m)
{
    sim_settle();
    sim_mark_refresh(m);
    return m->pending == 0 && m->end <= sim_now();
}

void sim_mark_observe(mark *m)
{
    if (!m->foreign) {
        sim_observe(&m->order);
    }
}

/* Let go of the lock for a while: asleep, or for short waits, which sleeping would stretch, awake. */
static void idle(uint64_t nanoseconds)
{
    uint64_t until = sim_now() + nanoseconds;
    pthread_mutex_unlock(&sim.mutex);
    if (nanoseconds > 60000) {
        uint64_t time = nanoseconds > 1000000000u ? 1000000000u : nanoseconds - 50000;
        nanosleep(&(struct timespec){(time_t)(time / 1000000000u), (long)(time % 1000000000u)},
                  NULL);
    } else {
        while (sim_now() < until) {
            sched_yield();
        }
    }
    pthread_mutex_lock(&sim.mutex);
}

void sim_mark_wait(mark *m)
{
    m->refs++;
    while (!sim_mark_reached(m)) {
        if (m->pending > 0) { /* for something no model can foresee */
            sim_mark_give_up(m);
            pthread_mutex_unlock(&sim.mutex);
            nanosleep(&(struct timespec){0, 20000}, NULL);
            pthread_mutex_lock(&sim.mutex);
        } else if (sim.run->clock_virtual) {
            sim_clock_reach(m->end);
        } else {
            uint64_t now = sim_now();
            idle(m->end > now ? m->end - now : 0);
        }
    }
    sim_mark_observe(m);
    sim_mark_unref(m);
    sim_pools_release();
}

void sim_wait_mark(stream *s, mark *m)
{
    join_default(s);
    wait_for(s, m);
}

/* ---- creation and end ------------------------------------------------------------------------- */

/* A slot may serve again when the host has observed all that was queued under it. */
static stream *reusable(void)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        stream *s = sim.streams[i];
        if (s->dead && s->head == NULL && s->checks == NULL &&
            s->sequence <= sim_vclock_get(&sim.host, i)) {
            return s;
        }
    }
    return NULL;
}

stream *sim_stream_new(int device, bool non_blocking, int priority)
{
    stream *s = reusable();
    if (s == NULL) {
        if (sim.slots == SIM_MAX_STREAMS || (s = calloc(1, sizeof *s)) == NULL) {
            return NULL;
        }
        s->slot = sim.slots;
        sim.streams[sim.slots++] = s;
    }
    s->id = sim_ids_add(&sim.stream_ids, s);
    if (s->id == 0) {
        s->dead = true;
        return NULL;
    }
    s->dead = false;
    s->is_default = s->nobodys = false;
    s->device = device;
    s->non_blocking = non_blocking;
    s->priority = priority;
    s->number = ++sim.next_stream_number;
    s->host_version = 0;
    s->end = 0;
    s->capture = NULL;
    sim.streams_alive++;
    return s;
}

void sim_stream_retire(stream *s)
{
    sim_ids_drop(&sim.stream_ids, s->id);
    s->id = 0;
    s->dead = true;
    sim.streams_alive--;
}

/* The calling thread's own stream, made when it is first used. It takes part in the default
   stream's order like any blocking stream. */
static stream *per_thread(int device)
{
    uint64_t *id = &sim_thread()->own_stream[device];
    stream *s = sim_ids_get(&sim.stream_ids, *id);
    if (s == NULL && (s = sim_stream_new(device, false, 0)) != NULL) {
        sim.streams_alive--; /* nobody destroys it */
        s->nobodys = true;
        *id = s->id;
    }
    return s;
}

/* The stream a handle means; its context is the current one only for the default streams. */
stream *sim_stream_get(CUstream handle, CUresult *code)
{
    const context *c = sim_current();
    stream *s = NULL;
    *code = CUDA_SUCCESS;
    if (handle != NULL && handle != CU_STREAM_LEGACY && handle != CU_STREAM_PER_THREAD) {
        s = sim_ids_get(&sim.stream_ids, (uint64_t)(uintptr_t)handle);
        *code = s == NULL ? CUDA_ERROR_INVALID_HANDLE : sim.contexts[s->device].lost;
    } else if (c == NULL || !c->active) {
        *code = c == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_ERROR_CONTEXT_IS_DESTROYED;
    } else {
        s = handle == CU_STREAM_PER_THREAD ? per_thread(c->device) : c->default_stream;
        *code = s == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    return *code == CUDA_SUCCESS ? s : NULL;
}

stream *sim_enter_stream(int function, CUstream handle, CUresult *code)
{
    *code = sim_enter((function_id)function);
    return *code != CUDA_SUCCESS ? NULL : sim_stream_get(handle, code);
}

void sim_stream_context_gone(int device)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        stream *s = sim.streams[i];
        if (s->device == device && !s->dead) {
            sim_capture_stream_gone(s);
            sim_stream_retire(s);
            sim.streams_alive += s->nobodys; /* it was never counted */
        }
    }
}

void sim_stream_reset(void)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        stream *s = sim.streams[i];
        for (work *w = s->checks, *next; w != NULL; w = next) {
            next = w->next_check;
            sim_work_unref(w);
        }
        for (work *w = s->head, *next; w != NULL; w = next) {
            next = w->next;
            sim_work_unref(w);
        }
        free(s->order.at);
        free(s);
        sim.streams[i] = NULL;
    }
    free(sim.host.at);
    memset(&sim.host, 0, sizeof sim.host);
    sim.slots = 0;
    sim.unsettled = 0;
    sim.streams_alive = 0;
    sim.next_stream_number = 0;
}

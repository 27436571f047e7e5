/*
 * Progress: when entries end (settling), when they have their effect (running), and what the host has
 * seen of it (observing). stream.c has the picture.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sim.h"

/* ---- settling: when does it end? -------------------------------------------------------------- */

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* A copy shares the link with one that runs the other way, for as long as both run. */
static uint64_t copy_time(const work *w, const context *c, uint64_t start)
{
    const ebbsim_card *card = sim_card(w->device);
    uint64_t other = c->engine_end[w->engine == ENGINE_H2D ? ENGINE_D2H : ENGINE_H2D];
    double bytes = (double)w->bytes;
    double shared = other > start ? (double)(other - start) * 1e-9 * card->duplex_rate : 0;
    double slow = shared < bytes ? shared : bytes;
    double seconds = w->rate < card->duplex_rate
                         ? bytes / w->rate
                         : slow / card->duplex_rate + (bytes - slow) / w->rate;
    return card->copy_latency + (uint64_t)(seconds * 1e9);
}

static uint64_t settle_work(work *w, uint64_t start)
{
    context *c = &sim.contexts[w->device];
    if (w->engine == ENGINE_NONE) {
        return start;
    }
    start = later(start, c->engine_end[w->engine]);
    uint64_t duration = w->rate > 0 ? copy_time(w, c, start) : w->duration;
    c->engine_end[w->engine] = start + duration;
    return start + duration;
}

static bool value_is_there(const work *w)
{
    if (!sim_reachable(w->from, 4)) {
        return true; /* taken away: it would wait for ever */
    }
    uint32_t seen = __atomic_load_n((const uint32_t *)(uintptr_t)w->from, __ATOMIC_ACQUIRE);
    switch (w->value_test) {
    case 0:
        return (int32_t)(seen - w->value) >= 0;
    case 1:
        return seen == w->value;
    case 2:
        return (seen & w->value) != 0;
    default:
        return ~(seen | w->value) != 0;
    }
}

/* A mark of another process is reached when that process's simulator has said so. */
void sim_mark_refresh(mark *m)
{
    if (m->foreign && m->pending > 0) {
        const shared_event *e = &sim.run->events[m->shared];
        if (__atomic_load_n(&e->settled, __ATOMIC_ACQUIRE) >= m->shared_record) {
            m->end = e->end;
            m->pending = 0;
        }
    }
}

void sim_mark_give_up(mark *m)
{
    if (m->foreign && m->pending > 0 && sim_shared_event_lost(m->shared, m->shared_record)) {
        m->end = later(m->end, sim_now());
        m->pending = 0;
    }
}

void sim_mark_reach(mark *m, uint64_t end)
{
    m->end = later(m->end, end);
    if (--m->pending == 0 && m->shared >= 0) {
        shared_event *e = &sim.run->events[m->shared];
        if (e->settled < m->shared_record) { /* else a later one, of another process, was faster */
            e->end = m->end;
            __atomic_store_n(&e->settled, m->shared_record, __ATOMIC_RELEASE);
        }
    }
}

static bool settle_entry(stream *s, work *w)
{
    uint64_t end = later(s->end, w->when);
    switch (w->kind) {
    case ENTRY_WORK:
        end = settle_work(w, end);
        break;
    case ENTRY_RECORD:
        sim_mark_reach(w->mark, end);
        break;
    case ENTRY_WAIT:
        sim_mark_refresh(w->mark);
        sim_mark_give_up(w->mark);
        if (w->mark->pending > 0) {
            return false;
        }
        end = later(end, w->mark->end);
        break;
    case ENTRY_WAIT_VALUE:
        if (!value_is_there(w)) {
            w->waited = true;
            return false;
        }
        end = w->waited ? later(end, sim_now()) : end;
        break;
    case ENTRY_HOST:
        if (!w->host_done) {
            return false;
        }
        end = later(end, w->end);
        break;
    }
    w->end = s->end = end;
    w->settled = true;
    return true;
}

static void leave_queue(stream *s)
{
    while (s->head != NULL && s->head->settled && s->head->ran) {
        work *w = s->head;
        s->head = w->next;
        if (s->head == NULL) {
            s->tail = NULL;
        }
        w->next = NULL;
        sim_work_unref(w);
    }
}

bool sim_settle_stream(stream *s)
{
    bool moved = false;
    while (s->to_settle != NULL && settle_entry(s, s->to_settle)) {
        s->to_settle = s->to_settle->next;
        sim.unsettled--;
        moved = true;
    }
    if (moved) {
        leave_queue(s);
    }
    return moved;
}

void sim_settle(void)
{
    for (bool moved = true; moved && sim.unsettled > 0;) {
        moved = false;
        for (uint32_t i = 0; i < sim.slots; i++) {
            moved |= sim_settle_stream(sim.streams[i]);
        }
    }
}

/* ---- running: effects ------------------------------------------------------------------------- */

/*
 * Let entries of a slot up to `sequence` have their effect, and first what they are ordered after.
 * false: a host function is in the way that has not run yet.
 */
bool sim_run(uint32_t slot, uint64_t sequence)
{
    stream *s = sim.streams[slot];
    while (s->to_run != NULL && s->to_run->sequence <= sequence) {
        work *w = s->to_run;
        if (w->kind == ENTRY_WAIT && !w->mark->foreign) {
            /* Vector clocks are transitive and s is not past w, so this ends. */
            for (uint32_t i = 0; i < w->mark->order.count && i < sim.slots; i++) {
                if (i != slot && !sim_run(i, w->mark->order.at[i])) {
                    return false;
                }
            }
        } else if (w->kind == ENTRY_HOST && !w->host_done) {
            return false;
        } else if (w->kind == ENTRY_WORK) {
            sim_effect(w);
        }
        w->ran = true;
        s->to_run = w->next;
        s->waiting--;
    }
    leave_queue(s);
    return true;
}

/* As sim_run, but wait for host functions, with the lock dropped. */
void sim_wait_run(uint32_t slot, uint64_t sequence)
{
    while (!sim_run(slot, sequence)) {
        pthread_mutex_unlock(&sim.mutex);
        nanosleep(&(struct timespec){0, 20000}, NULL);
        pthread_mutex_lock(&sim.mutex);
    }
}

/* ---- what the host knows ---------------------------------------------------------------------- */

void sim_observe(const vclock *order)
{
    bool news = false;
    sim_vclock_reserve(&sim.host, order->count);
    for (uint32_t i = 0; i < order->count && i < sim.slots; i++) {
        if (order->at[i] <= sim.host.at[i]) {
            continue;
        }
        stream *s = sim.streams[i];
        sim_run(i, order->at[i]);
        sim.host.at[i] = order->at[i];
        news = true;
        while (s->checks != NULL && s->checks->sequence <= order->at[i]) {
            work *w = s->checks;
            s->checks = w->next_check;
            if (s->checks == NULL) {
                s->last_check = NULL;
            }
            sim_source_check(w);
            sim_work_unref(w);
        }
    }
    if (news) {
        sim.host_version++;
        if (sim.pieces > sim.sweep_at) {
            sim_history_sweep();
        }
    }
}

/* The legacy default stream is idle when all blocking streams are. */
static bool joined(const stream *s, const stream *other)
{
    return s->is_default && other->device == s->device && !other->non_blocking;
}

bool sim_stream_idle(stream *s)
{
    sim_settle();
    for (uint32_t i = 0; i < sim.slots; i++) {
        const stream *other = sim.streams[i];
        if ((other == s || joined(s, other)) &&
            (other->to_settle != NULL || other->end > sim_now())) {
            return false;
        }
    }
    for (uint32_t i = 0; i < sim.slots; i++) {
        if (sim.streams[i] == s || joined(s, sim.streams[i])) {
            sim_observe(&sim.streams[i]->order);
        }
    }
    return true;
}

/* ---- the driver's own thread: host functions, and marks that other processes wait for ---------- */

/* The first host function whose turn has come; NULL: none. */
static work *next_host_function(void)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        work *w = sim.streams[i]->to_settle;
        if (w != NULL && w->kind == ENTRY_HOST && !w->host_started &&
            (sim.run->clock_virtual || later(sim.streams[i]->end, w->when) <= sim_now())) {
            return w;
        }
    }
    return NULL;
}

static void run_host_function(work *w)
{
    w->host_started = true;
    w->refs++;
    sim_observe(&w->mark->order); /* whatever the function goes on to do knows that this is over */
    if (w->function == NULL && sim_reachable(w->to, 4)) { /* cuStreamWriteValue32 */
        __atomic_store_n((uint32_t *)(uintptr_t)w->to, w->value, __ATOMIC_RELEASE);
    } else if (w->function != NULL) {
        pthread_mutex_unlock(&sim.mutex);
        sim_thread()->in_host_function = true;
        w->function(w->data);
        sim_thread()->in_host_function = false;
        pthread_mutex_lock(&sim.mutex);
    }
    /* On a virtual clock it takes no time, or timings would depend on when this thread got its turn. */
    w->end = sim.run == NULL || sim.run->clock_virtual ? 0 : sim_now();
    w->host_done = true;
    sim_work_unref(w);
}

static void *helper(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&sim.mutex);
    for (;;) {
        while (sim.unsettled == 0 || sim.run == NULL) {
            pthread_cond_wait(&sim.changed, &sim.mutex);
        }
        sim_settle();
        work *w = next_host_function();
        if (w != NULL) {
            run_host_function(w);
            continue;
        }
        pthread_mutex_unlock(&sim.mutex);
        nanosleep(&(struct timespec){0, 50000}, NULL);
        pthread_mutex_lock(&sim.mutex);
    }
    return NULL;
}

void sim_helper_start(void)
{
    pthread_t thread;
    if (!sim.helper_running && pthread_create(&thread, NULL, helper, NULL) == 0) {
        pthread_detach(thread);
        sim.helper_running = true;
    }
    pthread_cond_signal(&sim.changed);
}

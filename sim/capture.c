/*
 * Captures: a stream that records instead of working, and the graph that comes of it.
 *
 * Works queued on a capturing stream become nodes. A graph is replayed node by node, in the order of
 * capture, on the stream it is launched on: a legal order, though not the only one.
 *
 * Which calls a capture forbids, and to whom, depends on three things: the mode the capture was begun
 * with, the thread that began it, and the mode of the calling thread.
 */
#include <stdlib.h>
#include <string.h>

#include "driver_face.h"
#include "sim.h"

struct capture {
    CUstreamCaptureMode mode;
    long thread;
    bool invalid;
    int device;
    stream *origin;
    work **nodes;
    size_t node_count, node_room;
    uint32_t member_count;
    struct capture *next;
};

typedef struct graph {
    uint64_t id;
    bool executable;
    work **nodes;
    size_t node_count;
} graph;

static capture *captures; /* open ones; under sim.mutex */

/* ---- state ------------------------------------------------------------------------------------ */

uint64_t sim_capture_count(void)
{
    uint64_t count = 0;
    for (const capture *c = captures; c != NULL; c = c->next) {
        count++;
    }
    return count;
}

bool sim_capture_any(int device)
{
    for (const capture *c = captures; c != NULL; c = c->next) {
        if (c->device == device) {
            return true;
        }
    }
    return false;
}

void sim_capture_invalidate(capture *c)
{
    c->invalid = true;
}

void sim_capture_invalidate_all(int device)
{
    for (capture *c = captures; c != NULL; c = c->next) {
        if (c->device == device) {
            c->invalid = true;
        }
    }
}

bool sim_capture_forbids(void)
{
    int mode = sim_thread()->mode;
    long me = sim_thread_number();
    bool forbidden = false;
    for (capture *c = captures; mode != CU_STREAM_CAPTURE_MODE_RELAXED && c != NULL; c = c->next) {
        bool mine = c->thread == me && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        bool everybodys =
            c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL && mode == CU_STREAM_CAPTURE_MODE_GLOBAL;
        if (mine || everybodys) {
            c->invalid = true;
            forbidden = true;
        }
    }
    return forbidden;
}

/* The default stream waits for blocking streams, and a capturing one cannot be waited for. */
static CUresult implicit(const stream *s, bool kill)
{
    CUresult code = CUDA_SUCCESS;
    for (uint32_t i = 0; s->is_default && captures != NULL && i < sim.slots; i++) {
        const stream *other = sim.streams[i];
        if (other->capture != NULL && !other->non_blocking && other->device == s->device &&
            !other->capture->invalid) {
            other->capture->invalid = kill;
            code = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    }
    return code;
}

CUresult sim_capture_check_implicit(stream *s)
{
    return implicit(s, true);
}

/* ---- members ---------------------------------------------------------------------------------- */

static void join_capture(stream *s, capture *c)
{
    s->capture = c;
    s->capture_index = c->member_count++;
    s->capture_sequence = 0;
    memset(&s->capture_order, 0, sizeof s->capture_order);
}

static void leave_capture(stream *s)
{
    s->capture = NULL;
    free(s->capture_order.at);
    memset(&s->capture_order, 0, sizeof s->capture_order);
}

CUresult sim_capture_add(stream *s, work *w)
{
    capture *c = s->capture;
    if (c->invalid) {
        sim_work_unref(w);
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (c->node_count == c->node_room) {
        size_t room = c->node_room == 0 ? 16 : c->node_room * 2;
        work **nodes = realloc(c->nodes, room * sizeof *nodes);
        if (nodes == NULL) {
            sim_work_unref(w);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        c->nodes = nodes;
        c->node_room = room;
    }
    c->nodes[c->node_count++] = w;
    sim_vclock_set(&s->capture_order, s->capture_index, ++s->capture_sequence);
    return CUDA_SUCCESS;
}

CUresult sim_capture_record(stream *s, event *e)
{
    if (s->capture->invalid) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (e->mark != NULL) {
        sim_mark_unref(e->mark);
        e->mark = NULL;
    }
    e->captured = true;
    e->captured_in = s->capture;
    free(e->captured_order.at);
    memset(&e->captured_order, 0, sizeof e->captured_order);
    sim_vclock_join(&e->captured_order, &s->capture_order);
    return CUDA_SUCCESS;
}

CUresult sim_capture_wait(stream *s, event *e)
{
    capture *c = s->capture, *of = e->captured_in;
    if ((c != NULL && c->invalid) || (of != NULL && of->invalid)) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (of == NULL) {
        if (c == NULL) {
            return CUDA_SUCCESS; /* neither has to do with a capture */
        }
        c->invalid = true; /* it must not depend on what is outside */
        return e->captured ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    if (c != NULL && c != of) {
        c->invalid = of->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (c == NULL) {
        if (s->is_default) {
            of->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        join_capture(s, of);
    }
    sim_vclock_join(&s->capture_order, &e->captured_order);
    return CUDA_SUCCESS;
}

/* ---- begin and end ---------------------------------------------------------------------------- */

static void close_capture(capture *c)
{
    for (capture **link = &captures; *link != NULL; link = &(*link)->next) {
        if (*link == c) {
            *link = c->next;
            break;
        }
    }
    for (uint32_t i = 0; i < sim.slots; i++) {
        if (sim.streams[i]->capture == c) {
            leave_capture(sim.streams[i]);
        }
    }
    for (uint32_t i = 0; i < sim.event_ids.capacity; i++) {
        event *e = sim.event_ids.objects[i];
        if (e != NULL && e->captured_in == c) {
            e->captured_in = NULL;
        }
    }
    for (size_t i = 0; i < c->node_count; i++) {
        sim_work_unref(c->nodes[i]);
    }
    free(c->nodes);
    free(c);
}

/* Every node of the other streams that joined has been waited for by the origin. */
static bool all_joined(const capture *c)
{
    for (uint32_t i = 0; i < sim.slots; i++) {
        const stream *s = sim.streams[i];
        if (s->capture == c && s != c->origin &&
            sim_vclock_get(&c->origin->capture_order, s->capture_index) < s->capture_sequence) {
            return false;
        }
    }
    return true;
}

static graph *graph_of(work **nodes, size_t count, bool executable)
{
    graph *g = calloc(1, sizeof *g);
    work **copy = malloc((count + 1) * sizeof *copy);
    uint64_t id = g == NULL || copy == NULL ? 0 : sim_ids_add(&sim.graph_ids, g);
    if (id == 0) {
        free(g);
        free(copy);
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        copy[i] = nodes[i];
        copy[i]->refs++;
    }
    *g = (graph){.id = id, .executable = executable, .nodes = copy, .node_count = count};
    return g;
}

static CUresult begin(stream *s, CUstreamCaptureMode mode)
{
    if (s->is_default) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (s->capture != NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    capture *c = calloc(1, sizeof *c);
    if (c == NULL) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    c->mode = mode;
    c->thread = sim_thread_number();
    c->device = s->device;
    c->origin = s;
    c->next = captures;
    captures = c;
    join_capture(s, c);
    return CUDA_SUCCESS;
}

static CUresult end(stream *s, CUgraph *out)
{
    capture *c = s->capture;
    if (c == NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    if (c->origin != s) {
        c->invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    }
    bool stranger = c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != sim_thread_number();
    CUresult code = stranger         ? CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD
                    : c->invalid     ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
                    : !all_joined(c) ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED
                                     : CUDA_SUCCESS;
    if (out != NULL) {
        *out = NULL;
    }
    if (code == CUDA_SUCCESS && out != NULL) {
        const graph *g = graph_of(c->nodes, c->node_count, false);
        code = g == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        *out = g == NULL ? NULL : (CUgraph)(uintptr_t)g->id;
    }
    close_capture(c);
    return code;
}

void sim_capture_stream_gone(stream *s)
{
    if (s->capture != NULL) {
        capture *c = s->capture;
        c->invalid = true;
        if (c->origin == s) {
            close_capture(c);
        } else {
            leave_capture(s);
        }
    }
}

void sim_capture_event_gone(event *e)
{
    free(e->captured_order.at);
}

static void graph_free(graph *g)
{
    for (size_t i = 0; i < g->node_count; i++) {
        sim_work_unref(g->nodes[i]);
    }
    free(g->nodes);
    free(g);
}

void sim_capture_reset(void)
{
    while (captures != NULL) {
        close_capture(captures);
    }
    for (uint32_t i = 0; i < sim.graph_ids.capacity; i++) {
        if (sim.graph_ids.objects[i] != NULL) {
            graph_free(sim.graph_ids.objects[i]);
        }
    }
}

/* ---- the driver's face ------------------------------------------------------------------------ */

CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode)
{
    CUresult code = sim_enter(FN_cuStreamBeginCapture_v2);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    stream *s = sim_stream_get(handle, &code);
    return sim_leave(s == NULL ? code : begin(s, mode));
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph *out)
{
    CUresult code = sim_enter(FN_cuStreamEndCapture);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    stream *s = sim_stream_get(handle, &code);
    return sim_leave(s == NULL ? code : end(s, out));
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    CUresult code = sim_enter(FN_cuStreamIsCapturing);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    if (status == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    stream *s = sim_stream_get(handle, &code);
    if (s != NULL) {
        code = implicit(s, false);
        *status = s->capture == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
                  : s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                        : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    }
    return sim_leave(code);
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUresult code = sim_enter(FN_cuThreadExchangeStreamCaptureMode);
    if (code == CUDA_SUCCESS && mode == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        int before = sim_thread()->mode;
        sim_thread()->mode = (int)*mode;
        *mode = (CUstreamCaptureMode)before;
    }
    return sim_leave(code);
}

static graph *graph_get(const void *handle, bool executable)
{
    graph *g = sim_ids_get(&sim.graph_ids, (uint64_t)(uintptr_t)handle);
    return g != NULL && g->executable == executable ? g : NULL;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags)
{
    CUresult code = sim_enter(FN_cuGraphInstantiateWithFlags);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const graph *g = graph_get(handle, false);
    if (out == NULL || g == NULL || flags > 15) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    const graph *made = graph_of(g->nodes, g->node_count, true);
    *out = made == NULL ? NULL : (CUgraphExec)(uintptr_t)made->id;
    return sim_leave(made == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS);
}

CUresult cuGraphLaunch(CUgraphExec handle, CUstream stream_handle)
{
    CUresult code = sim_enter(FN_cuGraphLaunch);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const graph *g = graph_get(handle, true);
    stream *s = sim_stream_get(stream_handle, &code);
    if (g == NULL || s == NULL) {
        return sim_leave(g == NULL ? CUDA_ERROR_INVALID_VALUE : code);
    }
    if (s->capture != NULL) {
        s->capture->invalid = true;
        return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    for (size_t i = 0; i < g->node_count && code == CUDA_SUCCESS; i++) {
        code = sim_work_again(s, g->nodes[i]);
    }
    return sim_leave(code);
}

static CUresult destroy(function_id function, const void *handle, bool executable)
{
    CUresult code = sim_enter(function);
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    graph *g = graph_get(handle, executable);
    if (g == NULL) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    sim_ids_drop(&sim.graph_ids, g->id);
    graph_free(g);
    return sim_leave(CUDA_SUCCESS);
}

CUresult cuGraphExecDestroy(CUgraphExec handle)
{
    return destroy(FN_cuGraphExecDestroy, handle, true);
}

CUresult cuGraphDestroy(CUgraph handle)
{
    return destroy(FN_cuGraphDestroy, handle, false);
}

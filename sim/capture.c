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
    uint64_t id;  /* never used again in this process */
    graph *graph; /* what has been collected */
    uint32_t branch_count;
    CUgraphNode *answer; /* what cuStreamGetCaptureInfo gave last */
    CUgraphEdgeData *edges;
    struct capture *next;
};

static capture *captures; /* open ones; under sim.mutex */
static uint64_t last_id;

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

bool sim_capture_is_invalid(const stream *s)
{
    return s->capture != NULL && s->capture->invalid;
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
    s->capture_index = c->branch_count++;
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
    sim_vclock_set(&s->capture_order, s->capture_index, s->capture_sequence + 1);
    if (!sim_graph_add(c->graph, w, s->capture_index, s->capture_sequence + 1, &s->capture_order)) {
        sim_vclock_set(&s->capture_order, s->capture_index, s->capture_sequence);
        sim_work_unref(w);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    s->capture_sequence++;
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
    if (c->graph != NULL) {
        sim_graph_free(c->graph);
    }
    free(c->answer);
    free(c->edges);
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

static CUresult begin(stream *s, CUstreamCaptureMode mode)
{
    if (s->is_default) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (s->capture != NULL) {
        return CUDA_ERROR_ILLEGAL_STATE;
    }
    capture *c = calloc(1, sizeof *c);
    if (c == NULL || (c->graph = sim_graph_new(false)) == NULL) {
        free(c);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    c->graph->capturing = true;
    c->id = ++last_id;
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
        c->graph->capturing = false;
        *out = (CUgraph)(uintptr_t)c->graph->id;
        c->graph = NULL;
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

void sim_capture_reset(void)
{
    while (captures != NULL) {
        close_capture(captures);
    }
    sim_graphs_reset();
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

/* ---- what a capture has collected so far ------------------------------------------------------ */

typedef struct capture_info {
    CUstreamCaptureStatus *status;
    uint64_t *id;
    CUgraph *graph;
    const CUgraphNode **nodes;
    const CUgraphEdgeData **edges;
    size_t *count;
} capture_info;

/* The nodes that whatever is captured next on the stream will depend on. */
static CUresult answer_nodes(stream *s, const capture_info *wanted)
{
    capture *c = s->capture;
    size_t count = sim_graph_last(c->graph, &s->capture_order, NULL, 0);
    CUgraphNode *nodes = malloc((count + 1) * sizeof(CUgraphNode));
    CUgraphEdgeData *edges = calloc(count + 1, sizeof *edges);
    if (nodes == NULL || edges == NULL) {
        free(nodes);
        free(edges);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    sim_graph_last(c->graph, &s->capture_order, nodes, count);
    free(c->answer);
    free(c->edges);
    c->answer = nodes;
    c->edges = edges;
    if (wanted->nodes != NULL) {
        *wanted->nodes = nodes;
    }
    if (wanted->edges != NULL) {
        *wanted->edges = edges;
    }
    if (wanted->count != NULL) {
        *wanted->count = count;
    }
    return CUDA_SUCCESS;
}

static CUresult tell(function_id function, CUstream handle, const capture_info *wanted)
{
    CUresult code;
    stream *s = sim_enter_stream((int)function, handle, &code);
    if (s == NULL || wanted->status == NULL) {
        return sim_leave(s == NULL ? code : CUDA_ERROR_INVALID_VALUE);
    }
    if ((code = implicit(s, false)) != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    const capture *c = s->capture;
    *wanted->status = c == NULL    ? CU_STREAM_CAPTURE_STATUS_NONE
                      : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                   : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (*wanted->status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        return sim_leave(CUDA_SUCCESS);
    }
    if (wanted->id != NULL) {
        *wanted->id = c->id;
    }
    if (wanted->graph != NULL) {
        *wanted->graph = (CUgraph)(uintptr_t)c->graph->id;
    }
    if (wanted->nodes != NULL || wanted->edges != NULL || wanted->count != NULL) {
        code = answer_nodes(s, wanted);
    }
    return sim_leave(code);
}

CUresult cuStreamGetCaptureInfo(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id)
{
    return tell(FN_cuStreamGetCaptureInfo, handle, &(capture_info){.status = status, .id = id});
}

CUresult cuStreamGetCaptureInfo_v2(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *graph_out, const CUgraphNode **nodes, size_t *count)
{
    return tell(FN_cuStreamGetCaptureInfo_v2, handle,
                &(capture_info){status, id, graph_out, nodes, NULL, count});
}

CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, uint64_t *id,
                                   CUgraph *graph_out, const CUgraphNode **nodes,
                                   const CUgraphEdgeData **edges, size_t *count)
{
    return tell(FN_cuStreamGetCaptureInfo_v3, handle,
                &(capture_info){status, id, graph_out, nodes, edges, count});
}

/* The stream goes on from these nodes: instead of, or besides, those it had. */
static CUresult depend(stream *s, const CUgraphNode *nodes, size_t count, unsigned flags)
{
    capture *c = s->capture;
    if (c == NULL || c->invalid) {
        return c == NULL ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    if (flags > CU_STREAM_SET_CAPTURE_DEPENDENCIES || (count > 0 && nodes == NULL)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (size_t i = 0; i < count; i++) {
        const graph_node *n = sim_graph_node(nodes[i]);
        if (n == NULL || n->graph != c->graph) {
            return CUDA_ERROR_INVALID_VALUE;
        }
    }
    if (flags == CU_STREAM_SET_CAPTURE_DEPENDENCIES) { /* what it had is a branch of its own now */
        leave_capture(s);
        join_capture(s, c);
    }
    for (size_t i = 0; i < count; i++) {
        sim_vclock_join(&s->capture_order, &sim_graph_node(nodes[i])->order);
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamUpdateCaptureDependencies(CUstream handle, CUgraphNode *nodes, size_t count,
                                           unsigned flags)
{
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamUpdateCaptureDependencies, handle, &code);
    return sim_leave(s == NULL ? code : depend(s, nodes, count, flags));
}

CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *nodes,
                                              const CUgraphEdgeData *edges, size_t count,
                                              unsigned flags)
{
    (void)edges; /* every edge is a full dependency here */
    CUresult code;
    stream *s = sim_enter_stream(FN_cuStreamUpdateCaptureDependencies_v2, handle, &code);
    return sim_leave(s == NULL ? code : depend(s, nodes, count, flags));
}

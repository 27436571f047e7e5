/*
 * Graphs: what a capture leaves behind.
 *
 * A node is a work that was queued on a capturing stream. It knows its place in the capture's own
 * vector clock (which branch, which number on it) and what it is ordered after; dependencies are
 * worked out from that when somebody asks. An executable graph shares its nodes' works.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver_face.h"
#include "sim.h"

/* ---- nodes ------------------------------------------------------------------------------------ */

static void node_free(graph_node *n)
{
    sim_ids_drop(&sim.node_ids, n->id);
    sim_work_unref(n->work);
    free(n->order.at);
    free(n);
}

static graph_node *node_new(graph *g, work *w, uint32_t branch, uint64_t sequence,
                            const vclock *order)
{
    graph_node *n = calloc(1, sizeof *n);
    uint64_t id = n == NULL ? 0 : sim_ids_add(&sim.node_ids, n);
    if (id == 0) {
        free(n);
        return NULL;
    }
    *n = (graph_node){.id = id, .graph = g, .work = w, .branch = branch, .sequence = sequence};
    sim_vclock_join(&n->order, order);
    return n;
}

bool sim_graph_add(graph *g, work *w, uint32_t branch, uint64_t sequence, const vclock *order)
{
    if (g->node_count == g->node_room) {
        size_t room = g->node_room == 0 ? 16 : g->node_room * 2;
        graph_node **nodes = realloc(g->nodes, room * sizeof(graph_node *));
        if (nodes == NULL) {
            return false;
        }
        g->nodes = nodes;
        g->node_room = room;
    }
    graph_node *n = node_new(g, w, branch, sequence, order);
    if (n != NULL) {
        g->nodes[g->node_count++] = n;
    }
    return n != NULL;
}

static graph_node *node_at(const graph *g, uint32_t branch, uint64_t sequence)
{
    for (size_t i = g->node_count; i-- > 0;) {
        if (g->nodes[i]->branch == branch && g->nodes[i]->sequence == sequence) {
            return g->nodes[i];
        }
    }
    return NULL;
}

/* `clock` up to branch's entry before `own`, if that is its branch. */
static uint64_t clock_at(const vclock *clock, uint32_t branch, const graph_node *own)
{
    uint64_t at = sim_vclock_get(clock, branch);
    return own != NULL && own->branch == branch && at > 0 ? at - 1 : at;
}

/*
 * The last nodes of what a clock has seen: those that no other of them comes after. `own` is left
 * out, so that a node's own clock gives its dependencies. `nodes` may be NULL: only count.
 */
static size_t last_nodes(const graph *g, const vclock *clock, const graph_node *own,
                         CUgraphNode *nodes, size_t room)
{
    size_t count = 0;
    for (uint32_t i = 0; i < clock->count; i++) {
        uint64_t at = clock_at(clock, i, own);
        const graph_node *n = at == 0 ? NULL : node_at(g, i, at);
        bool covered = n == NULL;
        for (uint32_t j = 0; j < clock->count && !covered; j++) {
            uint64_t other_at = clock_at(clock, j, own);
            const graph_node *other = j == i || other_at == 0 ? NULL : node_at(g, j, other_at);
            covered = other != NULL && sim_vclock_get(&other->order, i) >= at;
        }
        if (!covered) {
            if (nodes != NULL && count < room) {
                nodes[count] = (CUgraphNode)(uintptr_t)n->id;
            }
            count++;
        }
    }
    return count;
}

size_t sim_graph_last(const graph *g, const vclock *clock, CUgraphNode *nodes, size_t room)
{
    return last_nodes(g, clock, NULL, nodes, room);
}

graph_node *sim_graph_node(CUgraphNode handle)
{
    return sim_ids_get(&sim.node_ids, (uint64_t)(uintptr_t)handle);
}

/* ---- graphs ----------------------------------------------------------------------------------- */

graph *sim_graph_new(bool executable)
{
    graph *g = calloc(1, sizeof *g);
    uint64_t id = g == NULL ? 0 : sim_ids_add(&sim.graph_ids, g);
    if (id == 0) {
        free(g);
        return NULL;
    }
    g->id = id;
    g->executable = executable;
    return g;
}

void sim_graph_free(graph *g)
{
    for (size_t i = 0; i < g->node_count; i++) {
        node_free(g->nodes[i]);
    }
    sim_ids_drop(&sim.graph_ids, g->id);
    free(g->nodes);
    free(g);
}

void sim_graphs_reset(void)
{
    for (uint32_t i = 0; i < sim.graph_ids.capacity; i++) {
        if (sim.graph_ids.objects[i] != NULL) {
            sim_graph_free(sim.graph_ids.objects[i]);
        }
    }
}

static graph *graph_get(const void *handle, bool executable)
{
    graph *g = sim_ids_get(&sim.graph_ids, (uint64_t)(uintptr_t)handle);
    return g != NULL && g->executable == executable ? g : NULL;
}

static graph *executable_of(const graph *g, unsigned long long flags)
{
    graph *made = sim_graph_new(true);
    if (made != NULL) {
        made->flags = flags;
    }
    for (size_t i = 0; made != NULL && i < g->node_count; i++) {
        const graph_node *n = g->nodes[i];
        n->work->refs++;
        if (!sim_graph_add(made, n->work, n->branch, n->sequence, &n->order)) {
            sim_work_unref(n->work);
            sim_graph_free(made);
            made = NULL;
        }
    }
    return made;
}

/* ---- the driver's face ------------------------------------------------------------------------ */

CUresult cuGraphCreate(CUgraph *out, unsigned flags)
{
    CUresult code = sim_enter(FN_cuGraphCreate);
    if (code == CUDA_SUCCESS && (out == NULL || flags != 0)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        const graph *g = sim_graph_new(false);
        code = g == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
        *out = g == NULL ? NULL : (CUgraph)(uintptr_t)g->id;
    }
    return sim_leave(code);
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, unsigned long long flags)
{
    const graph *g = graph_get(handle, false);
    if (out == NULL || g == NULL || flags > 15) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    const graph *made = executable_of(g, flags);
    *out = made == NULL ? NULL : (CUgraphExec)(uintptr_t)made->id;
    return made == NULL ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph handle, unsigned long long flags)
{
    CUresult code = sim_enter(FN_cuGraphInstantiateWithFlags);
    return sim_leave(code != CUDA_SUCCESS ? code : instantiate(out, handle, flags));
}

CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph handle,
                                      CUDA_GRAPH_INSTANTIATE_PARAMS *parameters)
{
    CUresult code = sim_enter(FN_cuGraphInstantiateWithParams);
    if (code == CUDA_SUCCESS) {
        code = parameters == NULL ? CUDA_ERROR_INVALID_VALUE
                                  : instantiate(out, handle, parameters->flags);
    }
    if (code == CUDA_SUCCESS) {
        parameters->hErrNode_out = NULL;
        parameters->result_out = 0;
    }
    return sim_leave(code);
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
        sim_capture_invalidate(s->capture);
        return sim_leave(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    }
    for (size_t i = 0; i < g->node_count && code == CUDA_SUCCESS; i++) {
        code = sim_work_again(s, g->nodes[i]->work);
    }
    return sim_leave(code);
}

/* Nothing to bring to a device here; the arguments are checked all the same. */
CUresult cuGraphUpload(CUgraphExec handle, CUstream stream_handle)
{
    CUresult code = sim_enter(FN_cuGraphUpload);
    const stream *s = code == CUDA_SUCCESS ? sim_stream_get(stream_handle, &code) : NULL;
    if (s != NULL && graph_get(handle, true) == NULL) {
        code = CUDA_ERROR_INVALID_VALUE;
    } else if (s != NULL && s->capture != NULL) {
        sim_capture_invalidate(s->capture);
        code = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return sim_leave(code);
}

enum { USE_NODE_PRIORITY = 8 }; /* forgotten by the driver */

CUresult cuGraphExecGetFlags(CUgraphExec handle, unsigned long long *flags)
{
    CUresult code = sim_enter(FN_cuGraphExecGetFlags);
    const graph *g = graph_get(handle, true);
    if (code == CUDA_SUCCESS && (g == NULL || flags == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *flags = g->flags & ~(unsigned long long)USE_NODE_PRIORITY;
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
    if (g == NULL || g->capturing) {
        return sim_leave(CUDA_ERROR_INVALID_VALUE);
    }
    sim_graph_free(g);
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

/* ---- what is in a graph ----------------------------------------------------------------------- */

/* All nodes, or (roots) those that depend on none. As the driver does: with `nodes` NULL *count
   becomes how many there are; else up to *count (not 0) are given, and the rest of the room is
   zeroed. */
static CUresult list_nodes(function_id function, CUgraph handle, CUgraphNode *nodes, size_t *count,
                           bool roots)
{
    CUresult code = sim_enter(function);
    const graph *g = graph_get(handle, false);
    if (code == CUDA_SUCCESS && (g == NULL || count == NULL || (nodes != NULL && *count == 0))) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    size_t found = 0;
    for (size_t i = 0; code == CUDA_SUCCESS && i < g->node_count; i++) {
        const graph_node *n = g->nodes[i];
        if (roots && last_nodes(g, &n->order, n, NULL, 0) > 0) {
            continue;
        }
        if (nodes != NULL && found < *count) {
            nodes[found] = (CUgraphNode)(uintptr_t)n->id;
        }
        found++;
    }
    if (code == CUDA_SUCCESS) {
        for (size_t i = found; nodes != NULL && i < *count; i++) {
            nodes[i] = NULL;
        }
        *count = nodes == NULL || found < *count ? found : *count;
    }
    return sim_leave(code);
}

CUresult cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    return list_nodes(FN_cuGraphGetNodes, handle, nodes, count, false);
}

CUresult cuGraphGetRootNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    return list_nodes(FN_cuGraphGetRootNodes, handle, nodes, count, true);
}

static CUresult dependencies(function_id function, CUgraphNode handle, CUgraphNode *nodes,
                             CUgraphEdgeData *edges, size_t *count)
{
    CUresult code = sim_enter(function);
    const graph_node *n = sim_graph_node(handle);
    if (code == CUDA_SUCCESS && (n == NULL || count == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        size_t room = *count, found = last_nodes(n->graph, &n->order, n, nodes, room);
        for (size_t i = found; nodes != NULL && i < room; i++) {
            nodes[i] = NULL;
        }
        if (nodes != NULL && edges != NULL) {
            memset(edges, 0, room * sizeof *edges);
        }
        *count = nodes == NULL || found < room ? found : room;
    }
    return sim_leave(code);
}

CUresult cuGraphNodeGetDependencies(CUgraphNode handle, CUgraphNode *nodes, size_t *count)
{
    return dependencies(FN_cuGraphNodeGetDependencies, handle, nodes, NULL, count);
}

CUresult cuGraphNodeGetDependencies_v2(CUgraphNode handle, CUgraphNode *nodes,
                                       CUgraphEdgeData *edges, size_t *count)
{
    return dependencies(FN_cuGraphNodeGetDependencies_v2, handle, nodes, edges, count);
}

static int node_type(const work *w)
{
    if (w->node_type != 0) {
        return w->node_type;
    }
    switch (w->kind) {
    case ENTRY_HOST:
        return w->function == NULL ? CU_GRAPH_NODE_TYPE_BATCH_MEM_OP : CU_GRAPH_NODE_TYPE_HOST;
    case ENTRY_WAIT_VALUE:
        return CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    default:
        return w->effect == EFFECT_COPY                                ? CU_GRAPH_NODE_TYPE_MEMCPY
               : w->effect == EFFECT_SET8 || w->effect == EFFECT_SET32 ? CU_GRAPH_NODE_TYPE_MEMSET
                                                                       : CU_GRAPH_NODE_TYPE_KERNEL;
    }
}

CUresult cuGraphNodeGetType(CUgraphNode handle, int *type)
{
    CUresult code = sim_enter(FN_cuGraphNodeGetType);
    const graph_node *n = sim_graph_node(handle);
    if (code == CUDA_SUCCESS && (n == NULL || type == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        *type = node_type(n->work);
    }
    return sim_leave(code);
}

static void print_dot(const graph *g, FILE *to)
{
    fprintf(to,
            "digraph dot {\nsubgraph cluster_1 {\nlabel=\"graph_1\" graph[style=\"dashed\"];\n");
    for (size_t i = 0; i < g->node_count; i++) {
        const graph_node *n = g->nodes[i];
        fprintf(to,
                "\"graph_1_node_%" PRIx64 "\"[style=\"solid\" shape=\"rectangle\" label=\"%s\"];\n",
                n->id, n->work->call);
    }
    for (size_t i = 0; i < g->node_count; i++) {
        const graph_node *n = g->nodes[i];
        size_t count = last_nodes(g, &n->order, n, NULL, 0);
        CUgraphNode *before = calloc(count + 1, sizeof(CUgraphNode));
        if (before == NULL) {
            break;
        }
        last_nodes(g, &n->order, n, before, count);
        for (size_t j = 0; j < count; j++) {
            fprintf(to, "\"graph_1_node_%" PRIxPTR "\" -> \"graph_1_node_%" PRIx64 "\";\n",
                    (uintptr_t)before[j], n->id);
        }
        free(before);
    }
    fprintf(to, "}\n}\n");
}

CUresult cuGraphDebugDotPrint(CUgraph handle, const char *path, unsigned flags)
{
    (void)flags; /* how much to say of each node: all there is */
    CUresult code = sim_enter(FN_cuGraphDebugDotPrint);
    const graph *g = graph_get(handle, false);
    if (code == CUDA_SUCCESS && (g == NULL || path == NULL)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code == CUDA_SUCCESS) {
        FILE *to = fopen(path, "we");
        if (to == NULL) {
            return sim_leave(CUDA_ERROR_OPERATING_SYSTEM);
        }
        print_dot(g, to);
        code = fclose(to) == 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
    }
    return sim_leave(code);
}

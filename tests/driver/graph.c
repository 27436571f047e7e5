/*
 * Graphs: what is in one, and the other ways to make it executable.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "more.h"

static void do_nothing(void *data)
{
    (void)data;
}

/* memset -> copy out -> host function, and a memset beside them. */
struct made {
    CUgraph graph;
    CUdeviceptr memory;
    char *pinned;
};

static struct made make_graph(void)
{
    CUstream stream = make_stream(), side = make_stream();
    CUevent fork = make_event(), join = make_event();
    struct made m = {.memory = make_memory(8192), .pinned = make_pinned(4096)};
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    REQUIRE(cu.cuEventRecord(fork, stream));
    REQUIRE(cu.cuStreamWaitEvent(side, fork, 0));
    REQUIRE(cu.cuMemsetD8Async(m.memory, 7, 4096, stream));
    REQUIRE(cu.cuMemcpyDtoHAsync(m.pinned, m.memory, 4096, stream));
    REQUIRE(cu.cuMemsetD8Async(m.memory + 4096, 8, 4096, side));
    REQUIRE(cu.cuEventRecord(join, side));
    REQUIRE(cu.cuStreamWaitEvent(stream, join, 0));
    REQUIRE(cu.cuLaunchHostFunc(stream, do_nothing, NULL));
    REQUIRE(cu.cuStreamEndCapture(stream, &m.graph));
    return m;
}

static int type_of(CUgraphNode node)
{
    int type = -1;
    REQUIRE(more.cuGraphNodeGetType(node, &type));
    return type;
}

static int count_types(const CUgraphNode *nodes, size_t count, int type)
{
    int found = 0;
    for (size_t i = 0; i < count; i++) {
        found += type_of(nodes[i]) == type;
    }
    return found;
}

static void the_nodes_of_a_graph(void)
{
    struct made m = make_graph();
    CUgraphNode nodes[8] = {NULL};
    size_t count = 77;
    EXPECT(OK, more.cuGraphGetNodes(m.graph, NULL, &count));
    EXPECT_INT(4, count);
    EXPECT(OK, more.cuGraphGetNodes(m.graph, nodes, &count));
    EXPECT_INT(4, count);
    EXPECT_INT(2, count_types(nodes, 4, CU_GRAPH_NODE_TYPE_MEMSET));
    EXPECT_INT(1, count_types(nodes, 4, CU_GRAPH_NODE_TYPE_MEMCPY));
    EXPECT_INT(1, count_types(nodes, 4, CU_GRAPH_NODE_TYPE_HOST));
    EXPECT(OK, more.cuGraphGetRootNodes(m.graph, NULL, &count));
    EXPECT_INT(2, count);
    EXPECT(OK, more.cuGraphGetRootNodes(m.graph, nodes, &count));
    EXPECT_INT(2, count_types(nodes, 2, CU_GRAPH_NODE_TYPE_MEMSET));
}

static void room_for_fewer_and_for_more_nodes(void)
{
    struct made m = make_graph();
    CUgraphNode nodes[8];
    size_t count = 2;
    memset(nodes, 0x55, sizeof nodes);
    EXPECT(OK, more.cuGraphGetNodes(m.graph, nodes, &count));
    EXPECT_INT(2, count);
    CHECK(all_bytes(&nodes[2], 0x55, sizeof nodes[2]));
    count = 8;
    EXPECT(OK, more.cuGraphGetNodes(m.graph, nodes, &count));
    EXPECT_INT(4, count);
    CHECK(nodes[4] == NULL && nodes[7] == NULL);
    count = 0;
    EXPECT(INVALID_VALUE, more.cuGraphGetNodes(m.graph, nodes, &count));
    EXPECT_INT(0, count);
}

static void what_nodes_depend_on(void)
{
    struct made m = make_graph();
    CUgraphNode nodes[4] = {NULL}, before[4] = {NULL};
    size_t count = 4;
    REQUIRE(more.cuGraphGetNodes(m.graph, nodes, &count));
    for (size_t i = 0; i < 4; i++) {
        int type = type_of(nodes[i]);
        size_t found = 77, room = 4;
        EXPECT(OK, more.cuGraphNodeGetDependencies(nodes[i], NULL, &found));
        EXPECT_INT(type == CU_GRAPH_NODE_TYPE_HOST     ? 2
                   : type == CU_GRAPH_NODE_TYPE_MEMCPY ? 1
                                                       : 0,
                   found);
        memset(before, 0x55, sizeof before);
        EXPECT(OK, more.cuGraphNodeGetDependencies(nodes[i], before, &room));
        CHECK(room == found && before[3] == NULL);
    }
}

static void what_nodes_depend_on_in_the_second_form(void)
{
    NEED(cuGraphNodeGetDependencies_v2);
    struct made m = make_graph();
    CUgraphNode nodes[4] = {NULL}, before[4] = {NULL};
    CUgraphEdgeData edges[4];
    size_t count = 4;
    REQUIRE(more.cuGraphGetNodes(m.graph, nodes, &count));
    for (size_t i = 0; i < 4; i++) {
        size_t found = 4;
        memset(edges, 0x55, sizeof edges);
        EXPECT(OK, more.cuGraphNodeGetDependencies_v2(nodes[i], before, edges, &found));
        EXPECT_INT(0, found == 0 ? 0 : edges[0].type);
        found = 4;
        EXPECT(OK, more.cuGraphNodeGetDependencies_v2(nodes[i], before, NULL, &found));
    }
}

static void an_empty_graph(void)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    CUstream stream = make_stream();
    size_t count = 77;
    EXPECT(OK, more.cuGraphCreate(&graph, 0));
    EXPECT(OK, more.cuGraphGetNodes(graph, NULL, &count));
    EXPECT_INT(0, count);
    EXPECT(OK, more.cuGraphGetRootNodes(graph, NULL, &count));
    EXPECT_INT(0, count);
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, more.cuGraphUpload(exec, stream));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(OK, cu.cuGraphDestroy(graph));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuGraphExecDestroy(exec));
}

static void a_graph_takes_no_flags(void)
{
    CUgraph graph = NULL;
    EXPECT(INVALID_VALUE, more.cuGraphCreate(&graph, 1));
    EXPECT(INVALID_VALUE, more.cuGraphCreate(NULL, 0));
}

static void a_graph_is_made_executable_with_parameters(void)
{
    struct made m = make_graph();
    CUstream stream = make_stream();
    CUgraphExec exec = NULL;
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters;
    memset(&parameters, 0, sizeof parameters);
    parameters.result_out = 77;
    EXPECT(OK, more.cuGraphInstantiateWithParams(&exec, m.graph, &parameters));
    EXPECT_INT(0, parameters.result_out);
    CHECK(parameters.hErrNode_out == NULL);
    unsigned long long flags = 77;
    EXPECT(OK, more.cuGraphExecGetFlags(exec, &flags));
    EXPECT_INT(0, flags);
    EXPECT(OK, more.cuGraphUpload(exec, stream));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(m.pinned, 7, 4096));
    EXPECT(OK, cu.cuGraphExecDestroy(exec));
}

static void the_flags_of_an_executable_graph(void)
{
    struct made m = make_graph();
    CUgraphExec exec = NULL;
    unsigned long long flags = 77;
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, m.graph, 1)); /* free memory at launch */
    EXPECT(OK, more.cuGraphExecGetFlags(exec, &flags));
    EXPECT_INT(1, flags);
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, m.graph, 8)); /* priorities of nodes */
    EXPECT(OK, more.cuGraphExecGetFlags(exec, &flags));
    EXPECT_INT(0, flags);
    EXPECT(INVALID_VALUE, cu.cuGraphInstantiateWithFlags(&exec, m.graph, 1ull << 40));
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters;
    memset(&parameters, 0, sizeof parameters);
    parameters.flags = 1ull << 40;
    EXPECT(INVALID_VALUE, more.cuGraphInstantiateWithParams(&exec, m.graph, &parameters));
}

static void a_graph_is_uploaded_while_it_is_made_executable(void)
{
    struct made m = make_graph();
    CUstream stream = make_stream();
    CUgraphExec exec = NULL;
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters;
    memset(&parameters, 0, sizeof parameters);
    parameters.flags = 2;
    parameters.hUploadStream = stream;
    EXPECT(OK, more.cuGraphInstantiateWithParams(&exec, m.graph, &parameters));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(m.pinned, 7, 4096));
}

static void an_upload_into_a_capturing_stream(void)
{
    struct made m = make_graph();
    CUstream stream = make_stream();
    CUgraphExec exec = NULL;
    CUgraph graph = NULL;
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, m.graph, 0));
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(CAPTURE_UNSUPPORTED, more.cuGraphUpload(exec, stream));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

static void graph_calls_during_a_capture(void)
{
    struct made m = make_graph();
    CUstream stream = make_stream(), other = make_stream();
    CUgraphExec exec = NULL;
    CUgraph graph = NULL, fresh = NULL;
    CUgraphNode nodes[4] = {NULL};
    unsigned long long flags = 0;
    size_t count = 4;
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, m.graph, 0));
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, more.cuGraphGetNodes(m.graph, nodes, &count));
    EXPECT(OK, more.cuGraphExecGetFlags(exec, &flags));
    EXPECT(OK, more.cuGraphCreate(&fresh, 0));
    EXPECT(OK, cu.cuGraphDestroy(fresh));
    EXPECT(OK, more.cuGraphUpload(exec, other));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void instantiation_with_parameters_during_a_capture(void)
{
    struct made m = make_graph();
    CUstream stream = make_stream();
    CUgraphExec exec = NULL;
    CUgraph graph = NULL;
    CUDA_GRAPH_INSTANTIATE_PARAMS parameters;
    memset(&parameters, 0, sizeof parameters);
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(CAPTURE_UNSUPPORTED, more.cuGraphInstantiateWithParams(&exec, m.graph, &parameters));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

/* The graph of a capture that is still open can be looked at, but it is not the program's yet. */
static void the_graph_of_an_open_capture(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUstreamCaptureStatus status;
    uint64_t id = 0;
    CUgraph graph = NULL, end = NULL;
    size_t count = 77;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT(OK, more.cuStreamGetCaptureInfo_v2(stream, &status, &id, &graph, NULL, NULL));
    EXPECT(OK, more.cuGraphGetNodes(graph, NULL, &count));
    EXPECT_INT(1, count);
    EXPECT(OK, cu.cuStreamEndCapture(stream, &end));
    CHECK(graph == end);
}

static void words_are_nodes_too(void)
{
    CUstream stream = make_stream();
    uint32_t *word = make_pinned(4096);
    CUgraph graph = NULL;
    CUgraphNode nodes[4] = {NULL};
    size_t count = 4;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, cu.cuStreamWriteValue32(stream, (CUdeviceptr)(uintptr_t)word, 7, 0));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, more.cuGraphGetNodes(graph, nodes, &count));
    EXPECT_INT(1, count);
    EXPECT_INT(CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, count == 1 ? type_of(nodes[0]) : -1);
}

/* ---- as text -------------------------------------------------------------------------------- */

static void a_graph_is_written_as_text(void)
{
    struct made m = make_graph();
    char path[64], line[256] = "";
    snprintf(path, sizeof path, "/tmp/driver_suite.dot.%d", (int)getpid());
    EXPECT(OK, more.cuGraphDebugDotPrint(m.graph, path, 0));
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    if (file != NULL) {
        CHECK(fgets(line, sizeof line, file) != NULL && strncmp(line, "digraph", 7) == 0);
        fclose(file);
    }
    unlink(path);
}

static void a_graph_is_written_to_where_nothing_can_be(void)
{
    struct made m = make_graph();
    EXPECT(OPERATING_SYSTEM, more.cuGraphDebugDotPrint(m.graph, "/nowhere/at/all.dot", 0));
}

/* ---- nothing -------------------------------------------------------------------------------- */

static void nodes_of_no_graph(void)
{
    size_t count = 0;
    EXPECT(INVALID_VALUE, more.cuGraphGetNodes(NULL, NULL, &count));
    EXPECT(INVALID_VALUE, more.cuGraphGetRootNodes(NULL, NULL, &count));
}

static void nodes_without_a_count(void)
{
    struct made m = make_graph();
    EXPECT(INVALID_VALUE, more.cuGraphGetNodes(m.graph, NULL, NULL));
    EXPECT(INVALID_VALUE, more.cuGraphGetRootNodes(m.graph, NULL, NULL));
}

static void no_node_is_asked(void)
{
    size_t count = 0;
    int type = 0;
    EXPECT(INVALID_VALUE, more.cuGraphNodeGetType(NULL, &type));
    EXPECT(INVALID_VALUE, more.cuGraphNodeGetDependencies(NULL, NULL, &count));
}

static void a_node_is_asked_into_nothing(void)
{
    struct made m = make_graph();
    CUgraphNode nodes[4] = {NULL};
    size_t count = 4;
    REQUIRE(more.cuGraphGetNodes(m.graph, nodes, &count));
    EXPECT(INVALID_VALUE, more.cuGraphNodeGetType(nodes[0], NULL));
    EXPECT(INVALID_VALUE, more.cuGraphNodeGetDependencies(nodes[0], NULL, NULL));
}

static void no_executable_graph_is_asked(void)
{
    unsigned long long flags = 0;
    EXPECT(INVALID_VALUE, more.cuGraphExecGetFlags(NULL, &flags));
    EXPECT(INVALID_VALUE, more.cuGraphUpload(NULL, make_stream()));
}

static void an_executable_graph_is_asked_into_nothing(void)
{
    struct made m = make_graph();
    CUgraphExec exec = NULL;
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, m.graph, 0));
    EXPECT(INVALID_VALUE, more.cuGraphExecGetFlags(exec, NULL));
}

static void parameters_that_are_missing(void)
{
    struct made m = make_graph();
    CUgraphExec exec = NULL;
    EXPECT(INVALID_VALUE, more.cuGraphInstantiateWithParams(&exec, m.graph, NULL));
}

static void text_of_or_to_nothing(void)
{
    struct made m = make_graph();
    EXPECT(INVALID_VALUE, more.cuGraphDebugDotPrint(m.graph, NULL, 0));
    EXPECT(INVALID_VALUE, more.cuGraphDebugDotPrint(NULL, "/tmp/never.dot", 0));
}

const suite_case graph_cases[] = {
    CASE(the_nodes_of_a_graph),
    CASE(room_for_fewer_and_for_more_nodes),
    CASE(what_nodes_depend_on),
    CASE(what_nodes_depend_on_in_the_second_form),
    CASE(an_empty_graph),
    CASE(a_graph_takes_no_flags),
    CASE(a_graph_is_made_executable_with_parameters),
    CASE(the_flags_of_an_executable_graph),
    CASE(a_graph_is_uploaded_while_it_is_made_executable),
    CASE(an_upload_into_a_capturing_stream),
    CASE(graph_calls_during_a_capture),
    CASE(instantiation_with_parameters_during_a_capture),
    CASE(the_graph_of_an_open_capture),
    CASE(words_are_nodes_too),
    CASE(a_graph_is_written_as_text),
    CASE(a_graph_is_written_to_where_nothing_can_be),
    CASE(nodes_of_no_graph),
    CASE(nodes_without_a_count),
    CASE(no_node_is_asked),
    CASE(a_node_is_asked_into_nothing),
    CASE(no_executable_graph_is_asked),
    CASE(an_executable_graph_is_asked_into_nothing),
    CASE(parameters_that_are_missing),
    CASE(text_of_or_to_nothing),
    CASE_END,
};

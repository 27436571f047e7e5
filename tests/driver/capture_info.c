/*
 * What a capture says of itself, in the three forms of cuStreamGetCaptureInfo, and what a stream's
 * next node is made to depend on.
 */
#include "more.h"

enum {
    NONE = CU_STREAM_CAPTURE_STATUS_NONE,
    ACTIVE = CU_STREAM_CAPTURE_STATUS_ACTIVE,
    INVALIDATED = CU_STREAM_CAPTURE_STATUS_INVALIDATED,
    ADD = CU_STREAM_ADD_CAPTURE_DEPENDENCIES,
    SET = CU_STREAM_SET_CAPTURE_DEPENDENCIES
};

struct info {
    CUstreamCaptureStatus status;
    uint64_t id;
    CUgraph graph;
    const CUgraphNode *nodes;
    size_t count;
};

static struct info info_of(CUstream stream)
{
    struct info i = {.status = (CUstreamCaptureStatus)77, .count = 77};
    EXPECT(OK,
           more.cuStreamGetCaptureInfo_v2(stream, &i.status, &i.id, &i.graph, &i.nodes, &i.count));
    return i;
}

static void begin(CUstream stream)
{
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
}

static void add_memset(CUstream stream, CUdeviceptr memory)
{
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
}

static size_t count_of(CUgraph graph, bool roots)
{
    size_t count = 0;
    REQUIRE(roots ? more.cuGraphGetRootNodes(graph, NULL, &count)
                  : more.cuGraphGetNodes(graph, NULL, &count));
    return count;
}

/* ---- asking --------------------------------------------------------------------------------- */

static void a_stream_that_does_not_capture(void)
{
    CUstream stream = make_stream();
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    uint64_t id = 77;
    EXPECT(OK, more.cuStreamGetCaptureInfo(stream, &status, &id));
    EXPECT_INT(NONE, status);
    EXPECT_INT(77, id);
    struct info i = info_of(stream);
    EXPECT_INT(NONE, i.status);
    EXPECT_INT(77, i.count);
    EXPECT(OK, more.cuStreamGetCaptureInfo(NULL, &status, &id));
    EXPECT_INT(NONE, status);
    EXPECT(OK, more.cuStreamGetCaptureInfo(stream, &status, NULL));
}

static void a_capture_has_an_id(void)
{
    CUstream one = make_stream(), two = make_stream();
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    uint64_t first = 0, second = 0, again = 0;
    CUgraph graph = NULL;
    begin(one);
    begin(two);
    EXPECT(OK, more.cuStreamGetCaptureInfo(one, &status, &first));
    EXPECT_INT(ACTIVE, status);
    EXPECT(OK, more.cuStreamGetCaptureInfo(two, &status, &second));
    CHECK(first != 0 && second != 0 && first != second);
    EXPECT(OK, cu.cuStreamEndCapture(two, &graph));
    EXPECT(OK, cu.cuStreamEndCapture(one, &graph));
    begin(one);
    EXPECT(OK, more.cuStreamGetCaptureInfo(one, &status, &again));
    CHECK(again != first && again != second);
    EXPECT(OK, cu.cuStreamEndCapture(one, &graph));
}

static void a_status_into_nothing(void)
{
    CUstream stream = make_stream();
    uint64_t id = 0;
    EXPECT(INVALID_VALUE, more.cuStreamGetCaptureInfo(stream, NULL, &id));
}

static void a_status_into_nothing_in_the_second_form(void)
{
    EXPECT(INVALID_VALUE,
           more.cuStreamGetCaptureInfo_v2(make_stream(), NULL, NULL, NULL, NULL, NULL));
}

static void a_capture_tells_what_comes_next_depends_on(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    begin(stream);
    struct info empty = info_of(stream);
    EXPECT_INT(ACTIVE, empty.status);
    EXPECT_INT(0, empty.count);
    CHECK(empty.id != 0 && empty.graph != NULL);
    add_memset(stream, memory);
    struct info one = info_of(stream);
    EXPECT_INT(1, one.count);
    CHECK(one.graph == empty.graph && one.id == empty.id);
    CUgraphNode first = one.nodes[0];
    add_memset(stream, memory);
    struct info two = info_of(stream);
    EXPECT_INT(1, two.count);
    CHECK(two.nodes[0] != first);
    CUgraph graph = NULL;
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    CHECK(graph == one.graph);
    EXPECT_INT(2, count_of(graph, false));
}

static void a_join_depends_on_both(void)
{
    CUstream stream = make_stream(), side = make_stream();
    CUdeviceptr memory = make_memory(8192);
    CUevent fork = make_event(), join = make_event();
    begin(stream);
    REQUIRE(cu.cuEventRecord(fork, stream));
    REQUIRE(cu.cuStreamWaitEvent(side, fork, 0));
    add_memset(stream, memory);
    add_memset(side, memory + 4096);
    struct info i = info_of(side);
    EXPECT_INT(ACTIVE, i.status);
    EXPECT_INT(1, i.count);
    CHECK(i.id == info_of(stream).id);
    REQUIRE(cu.cuEventRecord(join, side));
    REQUIRE(cu.cuStreamWaitEvent(stream, join, 0));
    EXPECT_INT(2, info_of(stream).count);
    CUgraph graph = NULL;
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(2, count_of(graph, true));
}

static void the_third_form_tells_of_edges(void)
{
    NEED(cuStreamGetCaptureInfo_v3);
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    begin(stream);
    add_memset(stream, memory);
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    uint64_t id = 0;
    CUgraph graph = NULL;
    const CUgraphNode *nodes = NULL;
    const CUgraphEdgeData *edges = NULL;
    size_t count = 77;
    EXPECT(OK,
           more.cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &nodes, &edges, &count));
    EXPECT_INT(ACTIVE, status);
    EXPECT_INT(1, count);
    EXPECT_INT(0, edges == NULL ? 0 : edges[0].type);
    EXPECT(OK, more.cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &nodes, NULL, &count));
    EXPECT(OK, more.cuStreamGetCaptureInfo_v3(stream, &status, NULL, NULL, NULL, NULL, NULL));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void a_dead_capture_says_so(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    CUgraph graph = NULL;
    begin(stream);
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(stream));
    struct info i = info_of(stream);
    EXPECT_INT(INVALIDATED, i.status);
    EXPECT_INT(77, i.count);
    CHECK(i.graph == NULL);
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(NONE, info_of(stream).status);
    EXPECT(OK, cu.cuEventDestroy(event));
}

static void the_default_stream_is_asked_beside_a_captured_blocking_stream(void)
{
    CUstream stream = make_blocking_stream();
    CUstreamCaptureStatus status = (CUstreamCaptureStatus)77;
    uint64_t id = 0;
    CUgraph graph = NULL;
    begin(stream);
    EXPECT(CAPTURE_IMPLICIT, more.cuStreamGetCaptureInfo(NULL, &status, &id));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void ask_from_elsewhere(void *data)
{
    struct info i = info_of(*(CUstream *)data);
    EXPECT_INT(ACTIVE, i.status);
    EXPECT_INT(0, i.count);
}

static void a_capture_is_asked_from_another_thread(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    begin(stream);
    in_thread(ask_from_elsewhere, &stream);
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

/* ---- telling -------------------------------------------------------------------------------- */

static void dependencies_are_taken_away(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    begin(stream);
    add_memset(stream, memory);
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies(stream, NULL, 0, SET));
    EXPECT_INT(0, info_of(stream).count);
    add_memset(stream, memory + 4096);
    CUgraph graph = NULL;
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(2, count_of(graph, false));
    EXPECT_INT(2, count_of(graph, true));
}

static void dependencies_are_added(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    begin(stream);
    add_memset(stream, memory);
    CUgraphNode first = info_of(stream).nodes[0];
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies(stream, NULL, 0, SET));
    add_memset(stream, memory + 4096);
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies(stream, &first, 1, ADD));
    EXPECT_INT(2, info_of(stream).count);
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies(stream, &first, 1, SET));
    EXPECT_INT(1, info_of(stream).count);
    CHECK(info_of(stream).nodes[0] == first);
    CUgraph graph = NULL;
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT_INT(2, count_of(graph, true));
}

static void dependencies_in_the_second_form(void)
{
    NEED(cuStreamUpdateCaptureDependencies_v2);
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    begin(stream);
    add_memset(stream, memory);
    CUgraphNode first = info_of(stream).nodes[0];
    CUgraphEdgeData edge = {0};
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies_v2(stream, NULL, NULL, 0, SET));
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies_v2(stream, &first, NULL, 1, SET));
    EXPECT(OK, more.cuStreamUpdateCaptureDependencies_v2(stream, &first, &edge, 1, SET));
    EXPECT_INT(1, info_of(stream).count);
    CUgraph graph = NULL;
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void dependencies_of_a_stream_that_does_not_capture(void)
{
    EXPECT(ILLEGAL_STATE, more.cuStreamUpdateCaptureDependencies(make_stream(), NULL, 0, SET));
}

static void dependencies_of_the_default_stream(void)
{
    EXPECT(ILLEGAL_STATE, more.cuStreamUpdateCaptureDependencies(NULL, NULL, 0, SET));
}

static void dependencies_with_odd_flags(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    begin(stream);
    EXPECT(INVALID_VALUE, more.cuStreamUpdateCaptureDependencies(stream, NULL, 0, 2));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void dependencies_that_are_missing(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    begin(stream);
    EXPECT(INVALID_VALUE, more.cuStreamUpdateCaptureDependencies(stream, NULL, 1, SET));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void dependencies_on_a_node_of_another_graph(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    begin(stream);
    begin(other);
    add_memset(other, memory);
    CUgraphNode stranger = info_of(other).nodes[0];
    EXPECT(INVALID_VALUE, more.cuStreamUpdateCaptureDependencies(stream, &stranger, 1, SET));
    EXPECT(OK, cu.cuStreamEndCapture(other, &graph));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

static void dependencies_of_a_dead_capture(void)
{
    CUstream stream = make_stream();
    CUgraph graph = NULL;
    begin(stream);
    EXPECT(CAPTURE_UNSUPPORTED, cu.cuStreamSynchronize(stream));
    EXPECT(CAPTURE_INVALIDATED, more.cuStreamUpdateCaptureDependencies(stream, NULL, 0, SET));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

const suite_case capture_info_cases[] = {
    CASE(a_stream_that_does_not_capture),
    CASE(a_capture_has_an_id),
    CASE(a_status_into_nothing),
    CASE(a_status_into_nothing_in_the_second_form),
    CASE(a_capture_tells_what_comes_next_depends_on),
    CASE(a_join_depends_on_both),
    CASE(the_third_form_tells_of_edges),
    CASE(a_dead_capture_says_so),
    CASE(the_default_stream_is_asked_beside_a_captured_blocking_stream),
    CASE(a_capture_is_asked_from_another_thread),
    CASE(dependencies_are_taken_away),
    CASE(dependencies_are_added),
    CASE(dependencies_in_the_second_form),
    CASE(dependencies_of_a_stream_that_does_not_capture),
    CASE(dependencies_of_the_default_stream),
    CASE(dependencies_with_odd_flags),
    CASE(dependencies_that_are_missing),
    CASE(dependencies_on_a_node_of_another_graph),
    CASE(dependencies_of_a_dead_capture),
    CASE_END,
};

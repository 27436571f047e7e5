/*
 * Captures and graphs, as PyTorch looks at them.
 */
#include <stdio.h>
#include <unistd.h>

#include "kit.h"

static cudaStream_t one, two;
static cudaEvent_t event;
static unsigned char *memory;

#if EBB_CUDART == 12
#define INFO cudaStreamGetCaptureInfo_v3
#define DEPENDENCIES cudaGraphNodeGetDependencies_v2
#define UPDATE cudaStreamUpdateCaptureDependencies_v2
#else
#define INFO cudaStreamGetCaptureInfo
#define DEPENDENCIES cudaGraphNodeGetDependencies
#define UPDATE cudaStreamUpdateCaptureDependencies
#endif

static void a_stream_that_does_not_capture_says_so(void)
{
    int status = -1;
    unsigned long long id = 5;
    OK(INFO(one, &status, &id, NULL, NULL, NULL, NULL));
    CHECK_EQ(status, 0);
    OK(cudaStreamIsCapturing(one, &status));
    CHECK_EQ(status, 0);
}

static void a_capture_has_an_id_a_graph_and_dependencies(void)
{
    int status = -1;
    unsigned long long first = 0, joined = 0, second = 0;
    cudaGraph_t graph = NULL, during = NULL;
    const cudaGraphNode_t *nodes = NULL;
    const cudaGraphEdgeData *edges = NULL;
    size_t count = 99;
    OK(cudaStreamBeginCapture(one, 0));
    OK(INFO(one, &status, &first, &during, &nodes, &edges, &count));
    CHECK_EQ(status, 1);
    CHECK_EQ(count, 0);
    OK(cudaMemsetAsync(memory, 1, 100, one));
    OK(cudaEventRecord(event, one));
    OK(cudaStreamWaitEvent(two, event, 0));
    OK(cudaMemsetAsync(memory + 512, 2, 100, two));
    OK(cudaMemsetAsync(memory, 3, 100, one));
    OK(INFO(two, &status, &joined, NULL, NULL, NULL, NULL));
    CHECK_EQ(joined, first);
    OK(cudaEventRecord(event, two));
    OK(cudaStreamWaitEvent(one, event, 0));
    OK(INFO(one, &status, &first, &during, &nodes, &edges, &count));
    CHECK_EQ(count, 2); /* the last of each branch */
    CHECK(nodes != NULL && edges != NULL && nodes[0] != nodes[1]);
    OK(cudaStreamEndCapture(one, &graph));
    CHECK(graph == during);
    OK(cudaGraphGetNodes(graph, NULL, &count));
    CHECK_EQ(count, 3);
    OK(cudaGraphGetRootNodes(graph, NULL, &count));
    CHECK_EQ(count, 1);
    OK(cudaGraphDestroy(graph));
    OK(cudaStreamBeginCapture(one, 0));
    OK(INFO(one, &status, &second, NULL, NULL, NULL, NULL));
    CHECK(second != first);
    OK(cudaStreamEndCapture(one, &graph));
    OK(cudaGraphDestroy(graph));
}

static void a_graph_is_replayed(void)
{
    unsigned char out[8];
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaGraphNode_t nodes[4], before[4];
    size_t count = 4;
    int type = -1;
    OK(cudaMemset(memory, 0, 1024));
    OK(cudaStreamBeginCapture(one, 1));
    OK(cudaMemsetAsync(memory, 7, 512, one));
    OK(cudaMemcpyAsync(memory + 512, memory, 512, cudaMemcpyDeviceToDevice, one));
    OK(cudaStreamEndCapture(one, &graph));
    OK(cudaMemcpy(out, memory + 512, sizeof out, cudaMemcpyDeviceToHost));
    CHECK_EQ(out[0], 0);
    OK(cudaGraphGetNodes(graph, nodes, &count));
    CHECK_EQ(count, 2);
    CHECK(nodes[2] == NULL);
    OK(cudaGraphNodeGetType(nodes[1], &type));
    CHECK_EQ(type, CU_GRAPH_NODE_TYPE_MEMCPY);
    count = 4;
    OK(DEPENDENCIES(nodes[1], before, NULL, &count));
    CHECK_EQ(count, 1);
    CHECK(before[0] == nodes[0]);
    OK(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cudaGraphDestroy(graph));
    OK(cudaGraphLaunch(exec, one));
    OK(cudaStreamSynchronize(one));
    OK(cudaMemcpy(out, memory + 512, sizeof out, cudaMemcpyDeviceToHost));
    CHECK_EQ(out[0], 7);
    OK(cudaGraphExecDestroy(exec));
    CHECK_EQ(cudaGraphLaunch(exec, one), cudaErrorInvalidValue);
    cudaGetLastError();
}

static void dependencies_can_be_set(void)
{
    int status = -1;
    unsigned long long id = 0;
    cudaGraph_t graph = NULL;
    const cudaGraphNode_t *nodes = NULL;
    cudaGraphNode_t first = NULL;
    size_t count = 0;
    OK(cudaStreamBeginCapture(one, 2));
    OK(cudaMemsetAsync(memory, 1, 100, one));
    OK(INFO(one, &status, &id, NULL, &nodes, NULL, &count));
    REQUIRE(count == 1);
    first = nodes[0];
    OK(cudaMemsetAsync(memory + 512, 1, 100, one));
    OK(UPDATE(one, &first, NULL, 1, CU_STREAM_SET_CAPTURE_DEPENDENCIES));
    OK(INFO(one, &status, &id, NULL, &nodes, NULL, &count));
    CHECK(count == 1 && nodes[0] == first);
    OK(cudaMemsetAsync(memory + 1024, 1, 100, one));
    OK(cudaStreamEndCapture(one, &graph));
    OK(cudaGraphGetNodes(graph, NULL, &count));
    CHECK_EQ(count, 3);
    OK(cudaGraphDestroy(graph));
}

static void a_graph_can_be_drawn(void)
{
    cudaGraph_t graph = NULL;
    char path[] = "/tmp/ebbtide-graph-XXXXXX", text[4096];
    int fd = mkstemp(path);
    REQUIRE(fd >= 0);
    OK(cudaStreamBeginCapture(one, 2));
    OK(cudaMemsetAsync(memory, 1, 100, one));
    OK(cudaMemsetAsync(memory, 2, 100, one));
    OK(cudaStreamEndCapture(one, &graph));
    OK(cudaGraphDebugDotPrint(graph, path, 0));
    ssize_t length = read(fd, text, sizeof text - 1);
    REQUIRE(length > 0);
    text[length] = '\0';
    CHECK_HAS(text, "digraph");
    CHECK_HAS(text, " -> ");
    close(fd);
    unlink(path);
    OK(cudaGraphDestroy(graph));
}

/* Pools, too: what is done on a stream that does not capture, and every question. */
static void what_a_capture_forbids_of_pools(void)
{
    static const int modes[][2] = {{0, 0}, {0, 2}, {1, 0}, {2, 0}}; /* capture's, thread's */
    cudaMemPool_t pool = NULL;
    OK(cudaDeviceGetDefaultMemPool(&pool, 0));
    for (int i = 0; i < 4; i++) {
        int mode = modes[i][1];
        int allowed = modes[i][0] == 2 || modes[i][1] == 2;
        int code = allowed ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
        uint64_t value = 0;
        void *more = NULL, *node = NULL;
        cudaGraph_t graph = NULL;
        OK(cudaStreamBeginCapture(one, modes[i][0]));
        OK(cudaThreadExchangeStreamCaptureMode(&mode));
        OK(cudaMallocAsync(&node, 100, one));
        OK(cudaFreeAsync(node, one));
        CHECK_EQ(cudaMallocAsync(&more, 100, two), code);
        CHECK_EQ(cudaFreeAsync(more, two), code);
        CHECK_EQ(cudaMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value), code);
        OK(cudaThreadExchangeStreamCaptureMode(&mode));
        CHECK_EQ(cudaStreamEndCapture(one, &graph),
                 allowed ? cudaSuccess : cudaErrorStreamCaptureInvalidated);
        if (graph != NULL) {
            OK(cudaGraphDestroy(graph));
        }
        cudaGetLastError();
    }
}

static void what_a_capture_forbids_ends_it(void)
{
    void *more = NULL;
    int mode = 2;
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(one, 0));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    OK(cudaMalloc(&more, 100)); /* allowed in relaxed mode */
    OK(cudaFree(more));
    OK(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK_EQ(cudaMalloc(&more, 100), cudaErrorStreamCaptureUnsupported);
    CHECK_EQ(cudaStreamEndCapture(one, &graph), cudaErrorStreamCaptureInvalidated);
    CHECK(graph == NULL);
    cudaGetLastError();
    OK(cudaStreamBeginCapture(one, 0));
    CHECK_EQ(cudaStreamSynchronize(one), cudaErrorStreamCaptureUnsupported);
    CHECK_EQ(cudaStreamEndCapture(one, &graph), cudaErrorStreamCaptureInvalidated);
    cudaGetLastError();
}

static void count_up(void *data)
{
    __atomic_add_fetch((int *)data, 1, __ATOMIC_SEQ_CST);
}

static void count_back(cudaStream_t stream, cudaError_t status, void *data)
{
    CHECK(stream == one && status == cudaSuccess);
    count_up(data);
}

static void host_functions_are_called_in_their_turn(void)
{
    int calls = 0;
    OK(cudaLaunchHostFunc(one, count_up, &calls));
    OK(cudaStreamAddCallback(one, count_back, &calls, 0));
    OK(cudaStreamSynchronize(one));
    CHECK_EQ(__atomic_load_n(&calls, __ATOMIC_SEQ_CST), 2);
    cudaGraph_t graph = NULL;
    OK(cudaStreamBeginCapture(one, 2));
    CHECK_EQ(cudaStreamAddCallback(one, count_back, &calls, 0), cudaErrorStreamCaptureUnsupported);
    OK(cudaStreamEndCapture(one, &graph));
    OK(cudaGraphDestroy(graph));
    cudaGetLastError();
}

int main(void)
{
    OK(cudaStreamCreateWithFlags(&one, CU_STREAM_NON_BLOCKING));
    OK(cudaStreamCreateWithFlags(&two, CU_STREAM_NON_BLOCKING));
    OK(cudaEventCreateWithFlags(&event, CU_EVENT_DISABLE_TIMING));
    OK(cudaMalloc((void **)&memory, 4096));
    RUN(a_stream_that_does_not_capture_says_so);
    RUN(a_capture_has_an_id_a_graph_and_dependencies);
    RUN(a_graph_is_replayed);
    RUN(dependencies_can_be_set);
    RUN(a_graph_can_be_drawn);
    RUN(what_a_capture_forbids_ends_it);
    RUN(what_a_capture_forbids_of_pools);
    RUN(host_functions_are_called_in_their_turn);
    CHECK_EQ(ebbsim_hazards(), 0);
    CHECK(ebbsim_check() == NULL);
    OK(cudaDeviceReset());
    ebbsim_reset();
    return REPORT();
}

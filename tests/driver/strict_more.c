/*
 * As strict.c, for the functions Ebbtide itself does not call: handles that are gone or never were.
 * A GPU's driver takes a handle for an address, so nobody tries these there.
 */
#include "more.h"

static CUmemoryPool make_pool(void)
{
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemoryPool pool = NULL;
    REQUIRE(more.cuMemPoolCreate(&pool, &properties));
    return pool;
}

static void a_destroyed_pool_is_refused(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    CUdeviceptr address = 0;
    unsigned long long value = 0;
    int flags = 0;
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(OK, more.cuMemPoolDestroy(pool));
    EXPECT(INVALID_VALUE, more.cuMemPoolDestroy(pool));
    EXPECT(INVALID_VALUE, more.cuMemPoolTrimTo(pool, 0));
    EXPECT(INVALID_VALUE,
           more.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    EXPECT(INVALID_VALUE,
           more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    EXPECT(INVALID_VALUE, more.cuMemPoolSetAccess(pool, &access, 1));
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAccess(&flags, pool, &access.location));
    EXPECT(INVALID_VALUE, more.cuDeviceSetMemPool(0, pool));
    EXPECT(INVALID_VALUE, more.cuMemAllocFromPoolAsync(&address, MiB, pool, stream));
}

static void a_destroyed_stream_is_refused(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096), address = 0;
    CUstreamCaptureStatus status;
    CUevent event = make_event();
    int priority = 0;
    unsigned flags = 0;
    uint64_t id = 0;
    unsigned long long stream_id = 0;
    REQUIRE(cu.cuStreamDestroy(stream));
    EXPECT(INVALID_HANDLE, more.cuStreamGetPriority(stream, &priority));
    EXPECT(INVALID_HANDLE, more.cuStreamGetFlags(stream, &flags));
    EXPECT(INVALID_HANDLE, more.cuStreamGetId(stream, &stream_id));
    EXPECT(INVALID_HANDLE, more.cuStreamGetCaptureInfo(stream, &status, &id));
    EXPECT(INVALID_HANDLE, more.cuStreamUpdateCaptureDependencies(stream, NULL, 0, 0));
    EXPECT(INVALID_HANDLE, more.cuMemAllocAsync(&address, MiB, stream));
    EXPECT(INVALID_HANDLE, more.cuMemFreeAsync(memory, stream));
    EXPECT(INVALID_HANDLE, more.cuMemcpyAsync(memory, memory + 64, 64, stream));
    EXPECT(INVALID_HANDLE, more.cuEventRecordWithFlags(event, stream, 0));
}

static void a_destroyed_event_is_refused(void)
{
    CUstream stream = make_stream();
    CUevent event = make_event();
    REQUIRE(cu.cuEventDestroy(event));
    EXPECT(INVALID_HANDLE, more.cuEventRecordWithFlags(event, stream, 0));
    if (cu.cuCtxRecordEvent) {
        EXPECT(INVALID_HANDLE, cu.cuCtxRecordEvent(context, event));
    }
}

static void a_destroyed_graph_is_refused(void)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    unsigned long long flags = 0;
    size_t count = 0;
    REQUIRE(more.cuGraphCreate(&graph, 0));
    REQUIRE(cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphDestroy(graph));
    EXPECT(INVALID_VALUE, more.cuGraphGetNodes(graph, NULL, &count));
    EXPECT(INVALID_VALUE, more.cuGraphGetRootNodes(graph, NULL, &count));
    EXPECT(INVALID_VALUE, more.cuGraphDebugDotPrint(graph, "/tmp/never.dot", 0));
    EXPECT(OK, cu.cuGraphExecDestroy(exec));
    EXPECT(INVALID_VALUE, more.cuGraphExecGetFlags(exec, &flags));
    EXPECT(INVALID_VALUE, more.cuGraphUpload(exec, make_stream()));
}

static void a_node_of_a_destroyed_graph_is_refused(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUgraph graph = NULL;
    CUgraphNode node = NULL;
    size_t count = 1;
    int type = 0;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    REQUIRE(more.cuGraphGetNodes(graph, &node, &count));
    EXPECT(OK, cu.cuGraphDestroy(graph));
    EXPECT(INVALID_VALUE, more.cuGraphNodeGetType(node, &type));
    EXPECT(INVALID_VALUE, more.cuGraphNodeGetDependencies(node, NULL, &count));
}

static void the_graph_of_an_open_capture_is_not_destroyed(void)
{
    CUstream stream = make_stream();
    CUstreamCaptureStatus status;
    CUgraph graph = NULL, end = NULL;
    uint64_t id = 0;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    REQUIRE(more.cuStreamGetCaptureInfo_v2(stream, &status, &id, &graph, NULL, NULL));
    EXPECT(INVALID_VALUE, cu.cuGraphDestroy(graph));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &end));
}

const suite_case strict_more_cases[] = {
    CASE_SIMULATED(a_destroyed_pool_is_refused, WITH_CONTEXT),
    CASE_SIMULATED(a_destroyed_stream_is_refused, WITH_CONTEXT),
    CASE_SIMULATED(a_destroyed_event_is_refused, WITH_CONTEXT),
    CASE_SIMULATED(a_destroyed_graph_is_refused, WITH_CONTEXT),
    CASE_SIMULATED(a_node_of_a_destroyed_graph_is_refused, WITH_CONTEXT),
    CASE_SIMULATED(the_graph_of_an_open_capture_is_not_destroyed, WITH_CONTEXT),
    CASE_END,
};

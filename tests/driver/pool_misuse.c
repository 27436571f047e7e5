/*
 * Memory pools: what they refuse, who may reach their memory, and captures.
 */
#include <stdint.h>
#include <string.h>

#include "more.h"

static CUmemPoolProps good_properties(void)
{
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    return properties;
}

static CUmemoryPool make_pool(void)
{
    CUmemPoolProps properties = good_properties();
    CUmemoryPool pool = NULL;
    REQUIRE(more.cuMemPoolCreate(&pool, &properties));
    return pool;
}

static CUmemoryPool default_pool(void)
{
    CUmemoryPool pool = NULL;
    REQUIRE(more.cuDeviceGetDefaultMemPool(&pool, 0));
    return pool;
}

static CUdeviceptr allocate(size_t size, CUstream stream)
{
    CUdeviceptr address = 0;
    REQUIRE(more.cuMemAllocAsync(&address, size, stream));
    return address;
}

/* ---- pools ---------------------------------------------------------------------------------- */

static void bad_pools_are_not_made(void)
{
    CUmemoryPool pool = NULL;
    CUmemPoolProps properties = good_properties();
    properties.allocType = 0;
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(&pool, &properties));
    properties = good_properties();
    properties.location.type = 0;
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(&pool, &properties));
    properties = good_properties();
    properties.location.id = 99;
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(&pool, &properties));
    properties = good_properties();
    properties.location.id = -1;
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(&pool, &properties));
    CHECK(pool == NULL);
}

static void a_pool_for_handles_of_windows_is_not_made(void)
{
    CUmemoryPool pool = NULL;
    CUmemPoolProps properties = good_properties();
    properties.handleTypes = 2;
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(&pool, &properties));
}

static void a_pool_with_nothing_to_go_by_is_not_made(void)
{
    CUmemoryPool pool = NULL;
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(&pool, NULL));
}

static void a_pool_into_nothing_is_not_made(void)
{
    CUmemPoolProps properties = good_properties();
    EXPECT(INVALID_VALUE, more.cuMemPoolCreate(NULL, &properties));
}

static void a_pool_may_have_a_largest_size(void)
{
    CUmemoryPool pool = NULL;
    CUmemPoolProps properties = good_properties();
    CUstream stream = make_stream();
    CUdeviceptr address = 0;
    properties.maxSize = 64 * MiB;
    EXPECT(OK, more.cuMemPoolCreate(&pool, &properties));
    EXPECT(OUT_OF_MEMORY, more.cuMemAllocFromPoolAsync(&address, 65 * MiB, pool, stream));
    EXPECT(OK, more.cuMemAllocFromPoolAsync(&address, 64 * MiB, pool, stream));
    EXPECT(OUT_OF_MEMORY, more.cuMemAllocFromPoolAsync(&address, 2 * MiB, pool, stream));
}

static void the_default_pool_is_not_destroyed(void)
{
    EXPECT(INVALID_VALUE, more.cuMemPoolDestroy(default_pool()));
    EXPECT(OK, more.cuMemPoolTrimTo(default_pool(), 0));
}

static void pools_of_devices_that_are_not_there(void)
{
    CUmemoryPool pool = NULL, own = make_pool();
    EXPECT(INVALID_DEVICE, more.cuDeviceGetDefaultMemPool(&pool, 99));
    EXPECT(INVALID_VALUE, more.cuDeviceGetMemPool(&pool, 99));
    EXPECT(INVALID_VALUE, more.cuDeviceSetMemPool(99, own));
    EXPECT(INVALID_VALUE, more.cuDeviceGetMemPool(&pool, -1));
}

static void pools_into_nothing(void)
{
    EXPECT(INVALID_VALUE, more.cuDeviceGetDefaultMemPool(NULL, 0));
    EXPECT(INVALID_VALUE, more.cuDeviceGetMemPool(NULL, 0));
}

static void no_pool_is_destroyed(void)
{
    EXPECT(INVALID_VALUE, more.cuMemPoolDestroy(NULL));
}

static void no_pool_is_trimmed(void)
{
    EXPECT(INVALID_VALUE, more.cuMemPoolTrimTo(NULL, 0));
}

static void no_pool_is_made_current(void)
{
    EXPECT(INVALID_VALUE, more.cuDeviceSetMemPool(0, NULL));
}

static void no_pool_is_asked(void)
{
    unsigned long long value = 0;
    EXPECT(INVALID_VALUE,
           more.cuMemPoolGetAttribute(NULL, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    EXPECT(INVALID_VALUE,
           more.cuMemPoolSetAttribute(NULL, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
}

/* ---- attributes ----------------------------------------------------------------------------- */

static void pool_attributes_that_are_none(void)
{
    CUmemoryPool pool = make_pool();
    unsigned long long value[8] = {0};
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAttribute(pool, (CUmemPool_attribute)0, value));
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAttribute(pool, (CUmemPool_attribute)999, value));
    EXPECT(INVALID_VALUE, more.cuMemPoolSetAttribute(pool, (CUmemPool_attribute)0, value));
    EXPECT(INVALID_VALUE, more.cuMemPoolSetAttribute(pool, (CUmemPool_attribute)999, value));
}

static void what_is_in_use_is_not_set(void)
{
    CUmemoryPool pool = make_pool();
    unsigned long long zero = 0;
    EXPECT(INVALID_VALUE,
           more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &zero));
    EXPECT(INVALID_VALUE,
           more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &zero));
}

static void attributes_into_nothing(void)
{
    CUmemoryPool pool = make_pool();
    EXPECT(INVALID_VALUE,
           more.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, NULL));
}

static void attributes_from_nothing(void)
{
    CUmemoryPool pool = make_pool();
    EXPECT(INVALID_VALUE,
           more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, NULL));
}

/* ---- access --------------------------------------------------------------------------------- */

static void a_pools_own_device_has_access(void)
{
    CUmemoryPool pool = make_pool();
    CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    int flags = -1;
    EXPECT(OK, more.cuMemPoolGetAccess(&flags, pool, &here));
    EXPECT_INT(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, flags);
    EXPECT(OK, more.cuMemPoolSetAccess(pool, &access, 1));
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    EXPECT(INVALID_DEVICE, more.cuMemPoolSetAccess(pool, &access, 1));
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    EXPECT(NOT_SUPPORTED, more.cuMemPoolSetAccess(pool, &access, 1));
    access.flags = 99;
    EXPECT(INVALID_VALUE, more.cuMemPoolSetAccess(pool, &access, 1));
    EXPECT(OK, more.cuMemPoolGetAccess(&flags, pool, &here));
    EXPECT_INT(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, flags);
}

static void access_of_what_is_no_device(void)
{
    CUmemoryPool pool = make_pool();
    CUmemLocation there = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 99};
    CUmemAccessDesc access = access_of(99, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    int flags = -1;
    EXPECT(INVALID_DEVICE, more.cuMemPoolSetAccess(pool, &access, 1));
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAccess(&flags, pool, &there));
    access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    access.location.type = there.type = 0;
    EXPECT(NOT_SUPPORTED, more.cuMemPoolSetAccess(pool, &access, 1));
    there.id = 0;
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAccess(&flags, pool, &there));
}

static void access_of_nobody(void)
{
    CUmemoryPool pool = make_pool();
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(OK, more.cuMemPoolSetAccess(pool, &access, 0));
    EXPECT(INVALID_VALUE, more.cuMemPoolSetAccess(pool, NULL, 1));
}

static void access_into_nothing(void)
{
    CUmemoryPool pool = make_pool();
    CUmemLocation here = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAccess(NULL, pool, &here));
}

static void access_of_no_location(void)
{
    CUmemoryPool pool = make_pool();
    int flags = -1;
    EXPECT(INVALID_VALUE, more.cuMemPoolGetAccess(&flags, pool, NULL));
}

/* ---- allocating and freeing ------------------------------------------------------------------ */

static void allocations_of_nothing_and_of_too_much(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = 77;
    EXPECT(OK, more.cuMemAllocAsync(&address, 0, stream));
    EXPECT(OUT_OF_MEMORY, more.cuMemAllocAsync(&address, (size_t)1 << 50, stream));
    EXPECT(OUT_OF_MEMORY, more.cuMemAllocAsync(&address, SIZE_MAX, stream));
    EXPECT(OK, more.cuMemAllocAsync(&address, MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void an_allocation_into_nothing(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, more.cuMemAllocAsync(NULL, MiB, stream));
    EXPECT(INVALID_VALUE, more.cuMemAllocFromPoolAsync(NULL, MiB, make_pool(), stream));
}

static void an_allocation_from_no_pool(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = 0;
    EXPECT(INVALID_VALUE, more.cuMemAllocFromPoolAsync(&address, MiB, NULL, stream));
}

static void nothing_is_freed(void)
{
    CUstream stream = make_stream();
    EXPECT(OK, more.cuMemFreeAsync(0, stream));
}

static void pool_memory_is_freed_once_and_by_its_start(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = allocate(MiB, stream);
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync(address + 512, stream));
    EXPECT(INVALID_VALUE, cu.cuMemFree(address + 512));
    EXPECT(OK, more.cuMemFreeAsync(address, stream));
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync(address, stream));
    EXPECT(INVALID_VALUE, cu.cuMemFree(address));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void what_was_freed_is_not_used(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = allocate(MiB, stream);
    REQUIRE(more.cuMemFreeAsync(address, stream));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(address, 1, MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void what_is_no_pool_memory_is_not_freed_in_order(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(FRAME);
    map_frame(range, FRAME);
    char *pinned = make_pinned(MiB), *pages = make_pages(MiB);
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync(range, stream));
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync((CUdeviceptr)(uintptr_t)pinned, stream));
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync((CUdeviceptr)(uintptr_t)pages, stream));
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync(0x1000, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

/* ---- captures ------------------------------------------------------------------------------- */

static CUgraph end_capture(CUstream stream)
{
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamEndCapture(stream, &graph));
    return graph;
}

static void a_graph_allocates_and_frees(void)
{
    CUstream stream = make_stream();
    char *back = make_pinned(MiB);
    CUdeviceptr address = 0;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, more.cuMemAllocAsync(&address, MiB, stream));
    CHECK(address != 0);
    EXPECT(OK, cu.cuMemsetD8Async(address, 6, MiB, stream));
    EXPECT(OK, cu.cuMemcpyDtoHAsync(back, address, MiB, stream));
    EXPECT(OK, more.cuMemFreeAsync(address, stream));
    CUgraph graph = end_capture(stream);
    CUgraphNode nodes[8] = {NULL};
    size_t count = 8;
    EXPECT(OK, more.cuGraphGetNodes(graph, nodes, &count));
    EXPECT_INT(4, count);
    for (size_t i = 0; i < count && i < 8; i++) {
        static const int expected[] = {CU_GRAPH_NODE_TYPE_MEM_ALLOC, CU_GRAPH_NODE_TYPE_MEMSET,
                                       CU_GRAPH_NODE_TYPE_MEMCPY, CU_GRAPH_NODE_TYPE_MEM_FREE};
        int type = -1;
        EXPECT(OK, more.cuGraphNodeGetType(nodes[i], &type));
        EXPECT_INT(expected[i % 4], type);
    }
    CUgraphExec exec = NULL;
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    for (int i = 0; i < 2; i++) {
        memset(back, 0, MiB);
        EXPECT(OK, cu.cuGraphLaunch(exec, stream));
        EXPECT(OK, cu.cuStreamSynchronize(stream));
        CHECK(all_bytes(back, 6, MiB));
    }
    EXPECT(OK, cu.cuGraphExecDestroy(exec));
    EXPECT(OK, cu.cuGraphDestroy(graph));
}

static void memory_of_before_is_freed_in_a_capture(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = allocate(MiB, stream);
    REQUIRE(cu.cuStreamSynchronize(stream));
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(INVALID_VALUE, more.cuMemFreeAsync(address, stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    EXPECT(OK, more.cuMemFreeAsync(address, stream));
}

static void allocation_on_another_stream_during_a_capture(void)
{
    CUstream stream = make_stream(), other = make_stream();
    CUgraph graph = NULL;
    CUdeviceptr address = 0;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(CAPTURE_UNSUPPORTED, more.cuMemAllocAsync(&address, MiB, other));
    EXPECT(CAPTURE_UNSUPPORTED, more.cuMemFreeAsync(address, other));
    EXPECT(CAPTURE_INVALIDATED, cu.cuStreamEndCapture(stream, &graph));
}

/* One call during a capture: its code, and what it does to the capture. */
#define DURING(code, end_code, call)                                                               \
    do {                                                                                           \
        CUgraph graph_ = NULL;                                                                     \
        REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));                   \
        EXPECT(code, call);                                                                        \
        EXPECT(end_code, cu.cuStreamEndCapture(stream, &graph_));                                  \
    } while (0)

#define FORBIDDEN(call) DURING(CAPTURE_UNSUPPORTED, CAPTURE_INVALIDATED, call)

static void pool_calls_during_a_capture(void)
{
    CUstream stream = make_stream();
    CUmemoryPool pool = make_pool(), spare = NULL;
    CUmemPoolProps properties = good_properties();
    CUmemLocation here = properties.location;
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    unsigned long long value = 0;
    int flags = 0;
    DURING(OK, OK, more.cuDeviceGetDefaultMemPool(&spare, 0));
    DURING(OK, OK, more.cuDeviceGetMemPool(&spare, 0));
    FORBIDDEN(more.cuDeviceSetMemPool(0, default_pool()));
    FORBIDDEN(more.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    FORBIDDEN(more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    FORBIDDEN(more.cuMemPoolGetAccess(&flags, pool, &here));
    FORBIDDEN(more.cuMemPoolSetAccess(pool, &access, 1));
    FORBIDDEN(more.cuMemPoolTrimTo(pool, 0));
    FORBIDDEN(more.cuMemPoolCreate(&spare, &properties));
    FORBIDDEN(more.cuMemPoolDestroy(spare));
}

const suite_case pool_misuse_cases[] = {
    CASE(bad_pools_are_not_made),
    CASE(a_pool_for_handles_of_windows_is_not_made),
    CASE(a_pool_with_nothing_to_go_by_is_not_made),
    CASE(a_pool_into_nothing_is_not_made),
    CASE(a_pool_may_have_a_largest_size),
    CASE(the_default_pool_is_not_destroyed),
    CASE(pools_of_devices_that_are_not_there),
    CASE(pools_into_nothing),
    CASE(no_pool_is_destroyed),
    CASE(no_pool_is_trimmed),
    CASE(no_pool_is_made_current),
    CASE(no_pool_is_asked),
    CASE(pool_attributes_that_are_none),
    CASE(what_is_in_use_is_not_set),
    CASE(attributes_into_nothing),
    CASE_SIMULATED(attributes_from_nothing, WITH_CONTEXT),
    CASE(a_pools_own_device_has_access),
    CASE(access_of_what_is_no_device),
    CASE(access_of_nobody),
    CASE(access_into_nothing),
    CASE(access_of_no_location),
    CASE(allocations_of_nothing_and_of_too_much),
    CASE(an_allocation_into_nothing),
    CASE(an_allocation_from_no_pool),
    CASE(nothing_is_freed),
    CASE(pool_memory_is_freed_once_and_by_its_start),
    CASE(what_was_freed_is_not_used),
    CASE(what_is_no_pool_memory_is_not_freed_in_order),
    CASE(a_graph_allocates_and_frees),
    CASE(memory_of_before_is_freed_in_a_capture),
    CASE(allocation_on_another_stream_during_a_capture),
    CASE(pool_calls_during_a_capture),
    CASE_END,
};

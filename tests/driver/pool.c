/*
 * Memory pools: allocation and freeing in a stream's order.
 */
#include "more.h"

static CUmemoryPool default_pool(void)
{
    CUmemoryPool pool = NULL;
    REQUIRE(more.cuDeviceGetDefaultMemPool(&pool, 0));
    return pool;
}

static CUmemoryPool make_pool(void)
{
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    CUmemoryPool pool = NULL;
    REQUIRE(more.cuMemPoolCreate(&pool, &properties));
    return pool;
}

static unsigned long long number(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    unsigned long long value = 0;
    REQUIRE(more.cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static int choice(CUmemoryPool pool, CUmemPool_attribute attribute)
{
    int value = -1;
    REQUIRE(more.cuMemPoolGetAttribute(pool, attribute, &value));
    return value;
}

static void set_number(CUmemoryPool pool, CUmemPool_attribute attribute, unsigned long long value)
{
    REQUIRE(more.cuMemPoolSetAttribute(pool, attribute, &value));
}

static CUdeviceptr allocate(CUmemoryPool pool, size_t size, CUstream stream)
{
    CUdeviceptr address = 0;
    REQUIRE(more.cuMemAllocFromPoolAsync(&address, size, pool, stream));
    return address;
}

/* ---- which pool ----------------------------------------------------------------------------- */

static void a_device_has_a_default_pool_and_a_current_one(void)
{
    CUmemoryPool first = NULL, current = NULL, own = make_pool();
    EXPECT(OK, more.cuDeviceGetDefaultMemPool(&first, 0));
    EXPECT(OK, more.cuDeviceGetMemPool(&current, 0));
    CHECK(first != NULL && current == first);
    EXPECT(OK, more.cuDeviceSetMemPool(0, own));
    EXPECT(OK, more.cuDeviceGetMemPool(&current, 0));
    CHECK(current == own);
    EXPECT(OK, more.cuDeviceGetDefaultMemPool(&current, 0));
    CHECK(current == first);
    CUdeviceptr address = 0;
    EXPECT(OK, more.cuMemAllocAsync(&address, MiB, NULL));
    EXPECT_INT(MiB, number(own, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
    EXPECT_INT(0, number(first, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
    EXPECT(OK, more.cuMemFreeAsync(address, NULL));
    EXPECT(OK, more.cuDeviceSetMemPool(0, first));
    EXPECT(OK, more.cuMemPoolDestroy(own));
}

static void a_current_pool_that_is_destroyed_makes_way_for_the_default_one(void)
{
    CUmemoryPool own = make_pool(), current = NULL;
    EXPECT(OK, more.cuDeviceSetMemPool(0, own));
    EXPECT(OK, more.cuMemPoolDestroy(own));
    EXPECT(OK, more.cuDeviceGetMemPool(&current, 0));
    CHECK(current == default_pool());
}

static void pools_need_no_context(void)
{
    CUmemoryPool pool = NULL;
    unsigned long long value = 1;
    EXPECT(OK, more.cuDeviceGetDefaultMemPool(&pool, 0));
    EXPECT(OK, more.cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    EXPECT_INT(0, value);
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &value));
    EXPECT(OK, more.cuMemPoolTrimTo(pool, 0));
    CUmemPoolProps properties = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    EXPECT(OK, more.cuMemPoolCreate(&pool, &properties));
    EXPECT(OK, more.cuMemPoolDestroy(pool));
}

/* ---- attributes ----------------------------------------------------------------------------- */

static void attributes_of_a_new_pool(void)
{
    CUmemoryPool pools[] = {default_pool(), make_pool()};
    for (int i = 0; i < 2; i++) {
        CUmemoryPool pool = pools[i];
        EXPECT_INT(1, choice(pool, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES));
        EXPECT_INT(1, choice(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC));
        EXPECT_INT(1, choice(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES));
        EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
        EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
        EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));
        EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
        EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH));
    }
}

static void attributes_are_set(void)
{
    CUmemoryPool pool = make_pool();
    int off = 0, seven = 7;
    EXPECT(OK,
           more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, &off));
    EXPECT_INT(0, choice(pool, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES));
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, &off));
    EXPECT_INT(0, choice(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC));
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
                                          &seven));
    EXPECT_INT(1, choice(pool, CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES));
    unsigned long long threshold = 123456789, all = ~0ull;
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold));
    EXPECT_INT(123456789, number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all));
    EXPECT_INT(-1, number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD));
}

static void a_high_mark_is_set_back(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    set_number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ~0ull);
    CUdeviceptr first = allocate(pool, MiB, stream), second = allocate(pool, MiB, stream);
    REQUIRE(more.cuMemFreeAsync(second, stream));
    REQUIRE(cu.cuStreamSynchronize(stream));
    EXPECT_INT(MiB, number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
    EXPECT_INT(2 * MiB, number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH));
    unsigned long long zero = 0, one = 1;
    EXPECT(INVALID_VALUE, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &one));
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH, &zero));
    EXPECT_INT(MiB, number(pool, CU_MEMPOOL_ATTR_USED_MEM_HIGH));
    EXPECT(INVALID_VALUE,
           more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &one));
    EXPECT(OK, more.cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, &zero));
    CHECK(number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH) ==
          number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    REQUIRE(more.cuMemFreeAsync(first, stream));
}

/* ---- what an allocation takes ---------------------------------------------------------------- */

static void use_is_counted_by_the_byte(void)
{
    static const size_t sizes[] = {1, 512, 513, 4096, 64 * KiB + 1, MiB - 1, 2 * MiB, 33 * MiB};
    CUstream stream = make_stream();
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CUmemoryPool pool = make_pool();
        CUdeviceptr address = allocate(pool, sizes[i], stream);
        EXPECT_INT(sizes[i], number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
        EXPECT_INT(0, address % 512);
        REQUIRE(more.cuMemFreeAsync(address, stream));
    }
}

static void a_pool_grows_by_32_mib(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    allocate(pool, MiB, stream);
    EXPECT_INT(32 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    allocate(pool, 30 * MiB, stream);
    EXPECT_INT(32 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    allocate(pool, 33 * MiB, stream); /* of which one was there */
    EXPECT_INT(64 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    EXPECT_INT(64 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH));
}

static void pool_memory_is_used_in_its_streams_order(void)
{
    CUstream stream = make_stream();
    gate busy = gate_make();
    char *back = make_pinned(MiB);
    CUdeviceptr address = 0;
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, more.cuMemAllocAsync(&address, MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemsetD8Async(address, 5, MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyDtoHAsync(back, address, MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemFreeAsync(address, stream));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(back, 5, MiB));
}

static void a_copy_beyond_the_end_of_pool_memory(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = allocate(make_pool(), MiB, stream);
    EXPECT(OK, cu.cuMemsetD8Async(address, 1, MiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(address, 1, MiB + 1, stream));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(address, 1, 128 * MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void pointers_into_pool_memory(void)
{
    CUstream stream = make_stream();
    CUdeviceptr address = allocate(make_pool(), MiB, stream), start = 0;
    int type = 0, device = -1;
    size_t size = 0;
    CUcontext of = NULL;
    EXPECT(OK, cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address + 5));
    EXPECT_INT(CU_MEMORYTYPE_DEVICE, type);
    EXPECT(OK, cu.cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address));
    EXPECT_INT(0, device);
    EXPECT(OK, cu.cuPointerGetAttribute(&of, CU_POINTER_ATTRIBUTE_CONTEXT, address));
    CHECK(of == NULL);
    EXPECT(OK, cu.cuPointerGetAttribute(&size, CU_POINTER_ATTRIBUTE_RANGE_SIZE, address + 5));
    EXPECT_INT(MiB, size);
    EXPECT(OK, more.cuMemGetAddressRange(&start, &size, address + 5));
    CHECK(start == address);
    EXPECT_INT(MiB, size);
    CUmemGenericAllocationHandle handle = 0;
    EXPECT(INVALID_VALUE, cu.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)address));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(address, 2 * MiB));
    CUipcMemHandle ticket;
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&ticket, address));
}

/* ---- reuse ---------------------------------------------------------------------------------- */

static void memory_freed_on_a_stream_serves_it_again_at_once(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    gate busy = gate_make();
    CUdeviceptr first = allocate(pool, 8 * MiB, stream);
    gate_hold(&busy, stream);
    REQUIRE(more.cuMemFreeAsync(first, stream));
    CHECK(allocate(pool, 8 * MiB, stream) == first);
    EXPECT_INT(32 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void memory_freed_on_one_stream_is_not_anothers_before_its_turn(void)
{
    CUmemoryPool pool = make_pool();
    CUstream one = make_stream(), two = make_stream();
    gate busy = gate_make();
    CUdeviceptr first = allocate(pool, 32 * MiB, one);
    gate_hold(&busy, one);
    REQUIRE(more.cuMemFreeAsync(first, one));
    CHECK(allocate(pool, 32 * MiB, two) != first);
    EXPECT_AT_ONCE(&busy, OK, cu.cuStreamSynchronize(two));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void memory_follows_an_event_to_another_stream(void)
{
    CUmemoryPool pool = make_pool();
    CUstream one = make_stream(), two = make_stream();
    CUevent event = make_event();
    gate busy = gate_make();
    CUdeviceptr first = allocate(pool, 32 * MiB, one);
    gate_hold(&busy, one);
    REQUIRE(more.cuMemFreeAsync(first, one));
    REQUIRE(cu.cuEventRecord(event, one));
    REQUIRE(cu.cuStreamWaitEvent(two, event, 0));
    CHECK(allocate(pool, 32 * MiB, two) == first);
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

/* ---- giving back ----------------------------------------------------------------------------- */

static void a_pool_without_a_threshold_gives_back_when_the_host_waits(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    CUdeviceptr first = allocate(pool, 64 * MiB, stream);
    EXPECT_INT(64 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    REQUIRE(more.cuMemFreeAsync(first, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
}

static void a_pool_with_a_threshold_keeps_its_memory_until_it_is_trimmed(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    set_number(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, ~0ull);
    CUdeviceptr first = allocate(pool, 64 * MiB, stream);
    CUdeviceptr second = allocate(pool, 64 * MiB, stream);
    REQUIRE(more.cuMemFreeAsync(first, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT_INT(128 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    EXPECT(OK, more.cuMemPoolTrimTo(pool, 128 * MiB));
    EXPECT_INT(128 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    EXPECT(OK, more.cuMemPoolTrimTo(pool, 0));
    EXPECT_INT(64 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    REQUIRE(more.cuMemFreeAsync(second, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT(OK, more.cuMemPoolTrimTo(pool, 0));
    EXPECT_INT(0, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
}

static void trimming_takes_nothing_whose_free_is_still_to_come(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    gate busy = gate_make();
    CUdeviceptr first = allocate(pool, 32 * MiB, stream);
    gate_hold(&busy, stream);
    REQUIRE(more.cuMemFreeAsync(first, stream));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemPoolTrimTo(pool, 0));
    EXPECT_INT(32 * MiB, number(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void what_a_pool_holds_is_not_free(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    size_t before = free_memory();
    CUdeviceptr first = allocate(pool, 256 * MiB, stream);
    EXPECT_INT(256 * MiB, before - free_memory());
    REQUIRE(more.cuMemFreeAsync(first, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT_INT(0, before - free_memory());
}

static void a_pool_that_is_destroyed_ends_with_its_last_allocation(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    gate busy = gate_make();
    CUdeviceptr address = allocate(pool, MiB, stream);
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, more.cuMemPoolDestroy(pool));
    EXPECT(OK, cu.cuMemsetD8Async(address, 1, MiB, stream));
    EXPECT(OK, more.cuMemFreeAsync(address, stream));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(stream));
}

static void a_pool_is_destroyed_before_its_frees_are_over(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    gate busy = gate_make();
    CUdeviceptr address = allocate(pool, MiB, stream);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(address, 1, MiB, stream));
    REQUIRE(more.cuMemFreeAsync(address, stream));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemPoolDestroy(pool));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(stream));
}

/* ---- the other ways of allocating and freeing ------------------------------------------------- */

/* And it is in use until the work there is over. */
static void pool_memory_is_freed_by_cuMemFree_which_does_not_wait(void)
{
    CUmemoryPool pool = make_pool();
    CUstream stream = make_stream();
    gate busy = gate_make();
    CUdeviceptr address = allocate(pool, MiB, stream);
    REQUIRE(cu.cuStreamSynchronize(stream));
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(address, 1, MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemFree(address));
    EXPECT_INT(MiB, number(pool, CU_MEMPOOL_ATTR_USED_MEM_CURRENT));
}

static void cuMemAlloc_memory_is_freed_in_a_streams_order(void)
{
    CUstream stream = make_stream();
    gate busy = gate_make();
    CUdeviceptr memory = make_memory(4 * MiB);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4 * MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, more.cuMemFreeAsync(memory, stream));
    EXPECT_WAITS(&busy, OK, cu.cuStreamSynchronize(stream));
    EXPECT(INVALID_VALUE, cu.cuMemFree(memory));
}

static void in_a_thread_without_a_context(void *data)
{
    CUstream stream = *(CUstream *)data;
    CUdeviceptr address = 0;
    EXPECT(OK, more.cuMemAllocAsync(&address, MiB, stream));
    EXPECT(OK, more.cuMemFreeAsync(address, stream));
    EXPECT(INVALID_CONTEXT, more.cuMemAllocAsync(&address, MiB, NULL));
    EXPECT(INVALID_CONTEXT, more.cuMemAllocFromPoolAsync(&address, MiB, default_pool(), NULL));
    EXPECT(INVALID_CONTEXT, more.cuMemFreeAsync(address, NULL));
}

static void allocation_on_a_stream_needs_no_current_context(void)
{
    CUstream stream = make_stream();
    in_thread(in_a_thread_without_a_context, &stream);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

const suite_case pool_cases[] = {
    CASE(a_device_has_a_default_pool_and_a_current_one),
    CASE(a_current_pool_that_is_destroyed_makes_way_for_the_default_one),
    CASE_FROM(pools_need_no_context, WITHOUT_CONTEXT),
    CASE(attributes_of_a_new_pool),
    CASE(attributes_are_set),
    CASE(a_high_mark_is_set_back),
    CASE(use_is_counted_by_the_byte),
    CASE(a_pool_grows_by_32_mib),
    CASE(pool_memory_is_used_in_its_streams_order),
    CASE(a_copy_beyond_the_end_of_pool_memory),
    CASE(pointers_into_pool_memory),
    CASE(memory_freed_on_a_stream_serves_it_again_at_once),
    CASE(memory_freed_on_one_stream_is_not_anothers_before_its_turn),
    CASE(memory_follows_an_event_to_another_stream),
    CASE(a_pool_without_a_threshold_gives_back_when_the_host_waits),
    CASE(a_pool_with_a_threshold_keeps_its_memory_until_it_is_trimmed),
    CASE(trimming_takes_nothing_whose_free_is_still_to_come),
    CASE_ALONE(what_a_pool_holds_is_not_free),
    CASE(a_pool_that_is_destroyed_ends_with_its_last_allocation),
    CASE(a_pool_is_destroyed_before_its_frees_are_over),
    CASE(pool_memory_is_freed_by_cuMemFree_which_does_not_wait),
    CASE(cuMemAlloc_memory_is_freed_in_a_streams_order),
    CASE(allocation_on_a_stream_needs_no_current_context),
    CASE_END,
};

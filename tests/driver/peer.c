/*
 * Devices that reach each other's memory. Most of it needs two devices; with one those cases are
 * skipped, visibly.
 */
#include "more.h"

static void questions_about_one_device(void)
{
    int value = 77;
    EXPECT(INVALID_DEVICE,
           more.cuDeviceGetP2PAttribute(&value, 2, 0, 0)); /* 2: is access supported */
    EXPECT(INVALID_DEVICE, more.cuDeviceGetP2PAttribute(&value, 2, 0, 99));
    EXPECT(INVALID_DEVICE, more.cuDeviceGetP2PAttribute(&value, 2, 99, 0));
    EXPECT_INT(77, value);
    EXPECT(INVALID_DEVICE, cu.cuDeviceCanAccessPeer(&value, 0, 99));
    EXPECT(INVALID_DEVICE, cu.cuDeviceCanAccessPeer(&value, 99, 0));
    EXPECT(OK, cu.cuDeviceCanAccessPeer(&value, 0, 0));
    EXPECT_INT(0, value);
}

static void a_context_is_no_peer_of_itself(void)
{
    EXPECT(PEER_UNSUPPORTED, more.cuCtxEnablePeerAccess(context, 0));
    EXPECT(PEER_UNSUPPORTED, more.cuCtxEnablePeerAccess(context, 0));
    EXPECT(PEER_NOT_ENABLED, more.cuCtxDisablePeerAccess(context));
}

static void peer_access_takes_no_flags(void)
{
    EXPECT(INVALID_VALUE, more.cuCtxEnablePeerAccess(context, 1));
}

static void nobody_is_a_peer(void)
{
    EXPECT(INVALID_CONTEXT, more.cuCtxEnablePeerAccess(NULL, 0));
    EXPECT(INVALID_CONTEXT, more.cuCtxDisablePeerAccess(NULL));
}

static void enable_without_a_context(void *data)
{
    (void)data;
    EXPECT(INVALID_CONTEXT, more.cuCtxEnablePeerAccess(context, 0));
    EXPECT(INVALID_CONTEXT, more.cuCtxDisablePeerAccess(context));
}

static void peer_access_needs_a_current_context(void)
{
    in_thread(enable_without_a_context, NULL);
}

static void peer_copies_that_are_waited_for(void)
{
    CUdeviceptr one = make_memory(MiB), two = make_memory(MiB);
    fill(one, 5, MiB);
    EXPECT(OK, more.cuMemcpyPeer(two, context, one, context, MiB));
    EXPECT(OK, cu.cuCtxSynchronize());
    CHECK(holds(two, 5, MiB));
    EXPECT(OK, more.cuMemcpyPeer(two, context, one, context, 0));
    EXPECT(INVALID_VALUE, more.cuMemcpyPeer(0, context, one, context, MiB));
    EXPECT(INVALID_VALUE, more.cuMemcpyPeer(two, context, one, context, 2 * MiB));
}

static void a_peer_copy_that_names_no_context(void)
{
    CUdeviceptr one = make_memory(MiB), two = make_memory(MiB);
    EXPECT(OK, more.cuMemcpyPeer(two, NULL, one, context, MiB));
    EXPECT(OK, more.cuMemcpyPeer(two, context, one, NULL, MiB));
}

/* ---- two devices ------------------------------------------------------------------------------ */

static CUcontext second_context(void)
{
    if (device_count() < 2) {
        SKIP("there is one device");
    }
    CUcontext second = NULL;
    REQUIRE(cu.cuDevicePrimaryCtxRetain(&second, 1));
    int can = 0;
    REQUIRE(cu.cuDeviceCanAccessPeer(&can, 0, 1));
    if (!can) {
        SKIP("the devices are no peers");
    }
    return second;
}

static void questions_about_two_devices(void)
{
    second_context();
    int value = -1;
    EXPECT(OK, cu.cuDeviceCanAccessPeer(&value, 0, 1));
    EXPECT_INT(1, value);
    EXPECT(OK, more.cuDeviceGetP2PAttribute(&value, 2, 0, 1));
    EXPECT_INT(1, value);
    EXPECT(INVALID_VALUE, more.cuDeviceGetP2PAttribute(&value, 0, 0, 1));
    EXPECT(INVALID_VALUE, more.cuDeviceGetP2PAttribute(&value, 99, 0, 1));
}

static void peer_access_is_enabled_once(void)
{
    CUcontext second = second_context();
    EXPECT(PEER_NOT_ENABLED, more.cuCtxDisablePeerAccess(second));
    EXPECT(OK, more.cuCtxEnablePeerAccess(second, 0));
    EXPECT(PEER_ENABLED, more.cuCtxEnablePeerAccess(second, 0));
    EXPECT(OK, more.cuCtxDisablePeerAccess(second));
    EXPECT(PEER_NOT_ENABLED, more.cuCtxDisablePeerAccess(second));
}

static void memory_is_copied_between_devices(void)
{
    CUcontext second = second_context();
    CUdeviceptr here = make_memory(MiB), there = 0;
    CUstream stream = make_stream();
    fill(here, 7, MiB);
    REQUIRE(cu.cuCtxPushCurrent(second));
    there = make_memory(MiB);
    REQUIRE(cu.cuCtxPopCurrent(NULL));
    EXPECT(OK, cu.cuMemcpyPeerAsync(there, second, here, context, MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    REQUIRE(cu.cuCtxPushCurrent(second));
    CHECK(holds(there, 7, MiB));
    REQUIRE(cu.cuCtxPopCurrent(NULL));
    EXPECT(OK, more.cuMemcpyPeer(here, context, there, second, MiB));
    EXPECT(OK, cu.cuCtxSynchronize());
}

/* Frames are reached by the devices that cuMemSetAccess names, and by no other. */
static void access_to_a_frame_is_given_by_device(void)
{
    CUcontext second = second_context();
    CUdeviceptr range = reserve(FRAME);
    map_frame(range, FRAME);
    fill(range, 1, FRAME);
    REQUIRE(cu.cuCtxPushCurrent(second));
    CUstream far = make_stream();
    CUdeviceptr far_memory = make_memory(FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(range, 2, FRAME, far));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(far_memory, range, FRAME, far));
    EXPECT(OK, cu.cuStreamSynchronize(far));
    unsigned long long flags = 99;
    CUmemAccessDesc access = access_of(1, CU_MEM_ACCESS_FLAGS_PROT_READ);
    EXPECT(OK, cu.cuMemGetAccess(&flags, &access.location, range));
    EXPECT_INT(0, flags);
    EXPECT(OK, cu.cuMemSetAccess(range, FRAME, &access, 1));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(far_memory, range, FRAME, far));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(range, 2, FRAME, far));
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    EXPECT(OK, cu.cuStreamSynchronize(far));
    EXPECT(OK, cu.cuMemSetAccess(range, FRAME, &access, 1));
    EXPECT(OK, cu.cuMemsetD8Async(range, 2, FRAME, far));
    EXPECT(OK, cu.cuStreamSynchronize(far));
    REQUIRE(cu.cuCtxPopCurrent(NULL));
    CHECK(holds(range, 2, FRAME));
}

static void a_pool_is_opened_to_a_peer(void)
{
    second_context();
    CUmemoryPool pool = NULL;
    CUmemLocation there = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 1};
    CUmemAccessDesc access = access_of(1, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    int flags = -1;
    REQUIRE(more.cuDeviceGetDefaultMemPool(&pool, 0));
    EXPECT(OK, more.cuMemPoolGetAccess(&flags, pool, &there));
    EXPECT_INT(0, flags);
    EXPECT(OK, more.cuMemPoolSetAccess(pool, &access, 1));
    EXPECT(OK, more.cuMemPoolGetAccess(&flags, pool, &there));
    EXPECT_INT(3, flags);
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_NONE;
    EXPECT(OK, more.cuMemPoolSetAccess(pool, &access, 1));
    EXPECT(INVALID_VALUE, more.cuDeviceSetMemPool(1, pool));
}

const suite_case peer_cases[] = {
    CASE(questions_about_one_device),
    CASE(a_context_is_no_peer_of_itself),
    CASE(peer_access_takes_no_flags),
    CASE(nobody_is_a_peer),
    CASE(peer_access_needs_a_current_context),
    CASE(peer_copies_that_are_waited_for),
    CASE(a_peer_copy_that_names_no_context),
    CASE(questions_about_two_devices),
    CASE(peer_access_is_enabled_once),
    CASE(memory_is_copied_between_devices),
    CASE(access_to_a_frame_is_given_by_device),
    CASE(a_pool_is_opened_to_a_peer),
    CASE_END,
};

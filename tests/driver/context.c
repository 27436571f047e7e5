/*
 * Contexts: the stack of a thread, the primary context's count, and what is left after release.
 */
#include <string.h>

#include "suite.h"

static void a_thread_begins_without_a_context(void)
{
    CUcontext found = (CUcontext)&found;
    CUdevice device = 77;
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == NULL);
    EXPECT(INVALID_CONTEXT, cu.cuCtxGetDevice(&device));
    EXPECT(INVALID_CONTEXT, cu.cuCtxSynchronize());
    EXPECT(INVALID_VALUE, cu.cuCtxGetCurrent(NULL));
}

static void pop_of_an_empty_stack_is_refused(void)
{
    CUcontext found = (CUcontext)&found;
    EXPECT(INVALID_CONTEXT, cu.cuCtxPopCurrent(&found));
    EXPECT(INVALID_CONTEXT, cu.cuCtxPopCurrent(NULL));
}

static void contexts_stack_per_thread(void)
{
    CUcontext found = NULL;
    EXPECT(OK, cu.cuCtxPushCurrent(context));
    EXPECT(OK, cu.cuCtxPushCurrent(context));
    EXPECT(OK, cu.cuCtxPopCurrent(&found));
    CHECK(found == context);
    EXPECT(OK, cu.cuCtxPopCurrent(NULL));
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == context);
    /* The one that cuCtxSetCurrent put there counts as pushed. */
    EXPECT(OK, cu.cuCtxPopCurrent(&found));
    CHECK(found == context);
    EXPECT(INVALID_CONTEXT, cu.cuCtxPopCurrent(&found));
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == NULL);
}

static void set_current_replaces_the_top(void)
{
    CUcontext found = NULL;
    EXPECT(OK, cu.cuCtxPushCurrent(context));
    EXPECT(OK, cu.cuCtxSetCurrent(NULL)); /* takes the top away */
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == context);
    EXPECT(OK, cu.cuCtxSetCurrent(NULL));
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == NULL);
    EXPECT(OK, cu.cuCtxSetCurrent(NULL));
    EXPECT(OK, cu.cuCtxSetCurrent(context));
    EXPECT(OK, cu.cuCtxSetCurrent(context));
    EXPECT(OK, cu.cuCtxPopCurrent(&found));
    EXPECT(INVALID_CONTEXT, cu.cuCtxPopCurrent(&found));
}

static void push_of_null_is_refused(void)
{
    EXPECT(INVALID_VALUE, cu.cuCtxPushCurrent(NULL));
}

static void state_follows_retain_and_release(void)
{
    CUcontext first = NULL, second = NULL;
    unsigned flags = 77;
    int active = 77;
    EXPECT(OK, cu.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_INT(0, flags);
    EXPECT_INT(0, active);
    EXPECT(OK, cu.cuDevicePrimaryCtxRetain(&first, 0));
    EXPECT(OK, cu.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_INT(1, active);
    EXPECT(OK, cu.cuDevicePrimaryCtxRetain(&second, 0));
    CHECK(first == second);
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    EXPECT(OK, cu.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_INT(1, active);
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    EXPECT(OK, cu.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_INT(0, active);
    EXPECT_INT(0, flags);
}

static void retain_makes_nothing_current(void)
{
    CUcontext found = NULL, retained = NULL;
    EXPECT(OK, cu.cuDevicePrimaryCtxRetain(&retained, 0));
    EXPECT(OK, cu.cuCtxGetCurrent(&found));
    CHECK(found == NULL);
}

static void release_without_retain_is_refused(void)
{
    EXPECT(INVALID_CONTEXT, cu.cuDevicePrimaryCtxRelease(0));
    CUcontext retained = NULL;
    EXPECT(OK, cu.cuDevicePrimaryCtxRetain(&retained, 0));
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    EXPECT(INVALID_CONTEXT, cu.cuDevicePrimaryCtxRelease(0));
}

static void a_released_context_is_destroyed(void)
{
    CUcontext found = NULL;
    CUdevice device = 77;
    size_t bytes, total;
    CUdeviceptr memory = 0;
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    EXPECT(OK, cu.cuCtxGetCurrent(&found)); /* it stays on the stack */
    CHECK(found == context);
    EXPECT(CONTEXT_IS_DESTROYED, cu.cuMemGetInfo(&bytes, &total));
    EXPECT(CONTEXT_IS_DESTROYED, cu.cuMemAlloc(&memory, 4096));
    EXPECT(CONTEXT_IS_DESTROYED, cu.cuCtxSynchronize());
    EXPECT(OK, cu.cuCtxGetDevice(&device)); /* what it was the context of is still known */
    EXPECT_INT(0, device);
    EXPECT(OK, cu.cuCtxPopCurrent(&found));
    EXPECT(INVALID_CONTEXT, cu.cuMemGetInfo(&bytes, &total));
}

static void a_context_comes_back_with_the_next_retain(void)
{
    CUcontext again = NULL;
    size_t bytes, total;
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    EXPECT(OK, cu.cuDevicePrimaryCtxRetain(&again, 0));
    CHECK(again == context);
    EXPECT(OK, cu.cuMemGetInfo(&bytes, &total));
    EXPECT(OK, cu.cuCtxSetCurrent(again));
    EXPECT(OK, cu.cuMemGetInfo(&bytes, &total));
    EXPECT(OK, cu.cuMemFree(make_memory(4096)));
}

static void the_last_release_frees_what_cuMemAlloc_gave(void)
{
    CUcontext again = NULL;
    int type = 0;
    size_t before = free_memory();
    CUdeviceptr memory = make_memory(256 * MiB);
    CHECK(free_memory() + 256 * MiB == before);
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    REQUIRE(cu.cuDevicePrimaryCtxRetain(&again, 0));
    REQUIRE(cu.cuCtxSetCurrent(again));
    CHECK(free_memory() == before);
    EXPECT(INVALID_VALUE,
           cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory));
    EXPECT(INVALID_VALUE, cu.cuMemFree(memory));
}

/* Reservations and frames belong to the process, not to a context. */
static void frames_outlive_the_context(void)
{
    CUcontext again = NULL;
    CUdeviceptr range = reserve(2 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    fill(range, 0x5a, FRAME);
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    REQUIRE(cu.cuDevicePrimaryCtxRetain(&again, 0));
    REQUIRE(cu.cuCtxSetCurrent(again));
    unsigned long long flags = 77;
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(OK, cu.cuMemGetAccess(&flags, &access.location, range));
    EXPECT_INT(CU_MEM_ACCESS_FLAGS_PROT_READWRITE, flags);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemMap(range + FRAME, FRAME, 0, handle, 0));
    EXPECT(OK, cu.cuMemSetAccess(range + FRAME, FRAME, &access, 1));
    CHECK(holds(range + FRAME, 0x5a, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemAddressFree(range, 2 * FRAME));
}

/* The physical memory calls need the driver, not a context. */
static void frames_need_no_context_at_all(void)
{
    CUmemAllocationProp properties = plain_properties();
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    size_t granularity = 0;
    CUdeviceptr range = 0;
    CUmemGenericAllocationHandle handle = 0;
    unsigned flags = 77;
    int active = 77;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties,
                                                CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    EXPECT(OK, cu.cuMemAddressReserve(&range, FRAME, 0, 0, 0));
    EXPECT(OK, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    EXPECT(OK, cu.cuMemMap(range, FRAME, 0, handle, 0));
    EXPECT(OK, cu.cuMemSetAccess(range, FRAME, &access, 1));
    EXPECT(OK, cu.cuDevicePrimaryCtxGetState(0, &flags, &active));
    EXPECT_INT(0, active);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemAddressFree(range, FRAME));
}

static void a_context_costs_memory_that_release_gives_back(void)
{
    CUcontext again = NULL;
    size_t with = free_memory();
    EXPECT(OK, cu.cuDevicePrimaryCtxRelease(0));
    REQUIRE(cu.cuDevicePrimaryCtxRetain(&again, 0));
    REQUIRE(cu.cuCtxSetCurrent(again));
    CHECK(free_memory() == with);
    size_t total = 0;
    REQUIRE(cu.cuDeviceTotalMem(&total, 0));
    CHECK(with + 16 * MiB < total);
}

const suite_case context_cases[] = {
    CASE_FROM(a_thread_begins_without_a_context, WITHOUT_CONTEXT),
    CASE_FROM(pop_of_an_empty_stack_is_refused, WITHOUT_CONTEXT),
    CASE(contexts_stack_per_thread),
    CASE(set_current_replaces_the_top),
    CASE(push_of_null_is_refused),
    CASE_FROM(state_follows_retain_and_release, WITHOUT_CONTEXT),
    CASE_FROM(retain_makes_nothing_current, WITHOUT_CONTEXT),
    CASE_FROM(release_without_retain_is_refused, WITHOUT_CONTEXT),
    CASE(a_released_context_is_destroyed),
    CASE(a_context_comes_back_with_the_next_retain),
    CASE_ALONE(the_last_release_frees_what_cuMemAlloc_gave),
    CASE(frames_outlive_the_context),
    CASE_FROM(frames_need_no_context_at_all, WITHOUT_CONTEXT),
    CASE_ALONE(a_context_costs_memory_that_release_gives_back),
    CASE_END,
};

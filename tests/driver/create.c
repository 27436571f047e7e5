/*
 * Physical memory: creating and releasing frames, what they count as, and running out.
 */
#include <stdlib.h>
#include <string.h>

#include "suite.h"

static void frame_sizes_are_multiples_of_the_granularity(void)
{
    CUmemAllocationProp properties = plain_properties();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, 0, &properties, 0));
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, 4096, &properties, 0));
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, 64 * KiB, &properties, 0));
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME - 1, &properties, 0));
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME + 4096, &properties, 0));
    EXPECT(OK, cu.cuMemCreate(&handle, 3 * FRAME, &properties, 0));
    EXPECT(OK, cu.cuMemRelease(handle));
}

static void a_frame_larger_than_the_card_is_out_of_memory(void)
{
    CUmemAllocationProp properties = plain_properties();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT(OUT_OF_MEMORY, cu.cuMemCreate(&handle, 1024 * GiB, &properties, 0));
    EXPECT(OUT_OF_MEMORY, cu.cuMemCreate(&handle, (size_t)1 << 50, &properties, 0));
    EXPECT(OUT_OF_MEMORY, cu.cuMemCreate(&handle, (size_t)1 << 62, &properties, 0));
}

static void frames_of_bad_properties_are_refused(void)
{
    CUmemAllocationProp properties = plain_properties();
    CUmemGenericAllocationHandle handle = 0;
    properties.location.id = 1000;
    EXPECT(INVALID_DEVICE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    properties.location.id = -1;
    EXPECT(INVALID_DEVICE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    properties = plain_properties();
    properties.type = 0;
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    properties.type = 77;
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    properties = plain_properties();
    properties.location.type = 0;
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    properties.location.type = 77;
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    properties = plain_properties();
    properties.requestedHandleTypes = 2; /* another system's handles */
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, &properties, 0));
}

static void handle_types_that_nobody_knows_are_no_error(void)
{
    CUmemAllocationProp properties = plain_properties(), seen;
    CUmemGenericAllocationHandle handle = 0;
    int descriptor = -1;
    properties.requestedHandleTypes = 0x40000000;
    EXPECT(OK, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    memset(&seen, 0, sizeof seen);
    EXPECT(OK, cu.cuMemGetAllocationPropertiesFromHandle(&seen, handle));
    EXPECT_INT(0, seen.requestedHandleTypes);
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(
                              &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    EXPECT(OK, cu.cuMemRelease(handle));
}

static void frames_with_flags_or_null_are_refused(void)
{
    CUmemAllocationProp properties = plain_properties();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, &properties, 1));
    EXPECT(INVALID_VALUE, cu.cuMemCreate(&handle, FRAME, NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuMemCreate(NULL, FRAME, &properties, 0));
}

static void granularity_is_two_megabytes(void)
{
    CUmemAllocationProp properties = plain_properties();
    size_t granularity = 0;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties,
                                                CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    EXPECT_INT(FRAME, granularity);
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties,
                                                CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    EXPECT_INT(FRAME, granularity);
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties,
                                                CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    EXPECT_INT(FRAME, granularity);
}

static void granularity_refuses_nonsense(void)
{
    CUmemAllocationProp properties = plain_properties();
    size_t granularity = 0;
    EXPECT(INVALID_VALUE, cu.cuMemGetAllocationGranularity(&granularity, &properties, 77));
    EXPECT(INVALID_VALUE, cu.cuMemGetAllocationGranularity(&granularity, NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuMemGetAllocationGranularity(NULL, &properties, 0));
}

/* The properties must be there; what they say does not matter. */
static void granularity_is_the_same_for_bad_properties(void)
{
    CUmemAllocationProp properties = plain_properties();
    size_t granularity = 0;
    properties.location.id = 1000;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties, 0));
    EXPECT_INT(FRAME, granularity);
    properties = plain_properties();
    properties.type = 0;
    granularity = 0;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties, 0));
    EXPECT_INT(FRAME, granularity);
    properties = plain_properties();
    properties.location.type = 77;
    granularity = 0;
    EXPECT(OK, cu.cuMemGetAllocationGranularity(&granularity, &properties, 0));
    EXPECT_INT(FRAME, granularity);
}

static void a_handle_is_released_once(void)
{
    CUmemGenericAllocationHandle handle = create(FRAME);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(INVALID_VALUE, cu.cuMemRelease(handle));
    EXPECT(INVALID_VALUE, cu.cuMemRelease(0));
}

static void properties_are_read_back_from_a_handle(void)
{
    CUmemGenericAllocationHandle plain = create(FRAME), shared = create_exportable(FRAME);
    CUmemAllocationProp seen;
    memset(&seen, 0x77, sizeof seen);
    EXPECT(OK, cu.cuMemGetAllocationPropertiesFromHandle(&seen, plain));
    EXPECT_INT(CU_MEM_ALLOCATION_TYPE_PINNED, seen.type);
    EXPECT_INT(CU_MEM_LOCATION_TYPE_DEVICE, seen.location.type);
    EXPECT_INT(0, seen.location.id);
    EXPECT_INT(CU_MEM_HANDLE_TYPE_NONE, seen.requestedHandleTypes);
    EXPECT_INT(0, seen.allocFlags.usage);
    EXPECT(OK, cu.cuMemGetAllocationPropertiesFromHandle(&seen, shared));
    EXPECT_INT(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, seen.requestedHandleTypes);
    EXPECT(INVALID_VALUE, cu.cuMemGetAllocationPropertiesFromHandle(NULL, plain));
    EXPECT(INVALID_VALUE, cu.cuMemGetAllocationPropertiesFromHandle(&seen, 0));
    EXPECT(OK, cu.cuMemRelease(plain));
    EXPECT(OK, cu.cuMemRelease(shared));
}

static void memory_works_after_its_handle_is_released(void)
{
    CUdeviceptr range = reserve(FRAME);
    map_released_frame(range, FRAME);
    fill(range, 0x42, FRAME);
    CHECK(holds(range, 0x42, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemAddressFree(range, FRAME));
}

static void a_handle_is_retained_by_address(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, 2 * FRAME), again = 0;
    EXPECT(OK, cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)range));
    CHECK(again == handle);
    EXPECT(OK, cu.cuMemRelease(again));
    EXPECT(OK, cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(range + FRAME + 5)));
    CHECK(again == handle);
    EXPECT(OK, cu.cuMemRelease(again));
    /* Released twice more: once by us, once too often. */
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(INVALID_VALUE, cu.cuMemRelease(handle));
    /* The mapping still knows its memory: a handle can be had again. */
    EXPECT(OK, cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)range));
    EXPECT(OK, cu.cuMemRelease(again));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
}

static void no_handle_is_retained_where_nothing_is_mapped(void)
{
    CUdeviceptr range = reserve(4 * FRAME), memory = make_memory(FRAME);
    CUmemGenericAllocationHandle again = 0;
    int local = 0;
    map_released_frame(range, FRAME);
    EXPECT(INVALID_VALUE,
           cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)(range + FRAME)));
    EXPECT(INVALID_VALUE, cu.cuMemRetainAllocationHandle(&again, (void *)(uintptr_t)memory));
    EXPECT(INVALID_VALUE, cu.cuMemRetainAllocationHandle(&again, &local));
    EXPECT(INVALID_VALUE, cu.cuMemRetainAllocationHandle(&again, NULL));
    EXPECT(INVALID_VALUE, cu.cuMemRetainAllocationHandle(NULL, (void *)(uintptr_t)range));
}

/* ---- accounting ----------------------------------------------------------------------------- */

static void memory_is_taken_at_create_and_back_when_nothing_holds_it(void)
{
    CUdeviceptr range = reserve(64 * MiB);
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = create(64 * MiB);
    CHECK(free_memory() + 64 * MiB == before);
    map(range, 64 * MiB, handle);
    CHECK(free_memory() + 64 * MiB == before);
    EXPECT(OK, cu.cuMemRelease(handle));
    CHECK(free_memory() + 64 * MiB == before); /* the mapping holds it */
    EXPECT(OK, cu.cuMemUnmap(range, 64 * MiB));
    CHECK(free_memory() == before);
    EXPECT(OK, cu.cuMemAddressFree(range, 64 * MiB));
    CHECK(free_memory() == before);
}

static void memory_is_back_when_released_after_unmap(void)
{
    CUdeviceptr range = reserve(64 * MiB);
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = map_frame(range, 64 * MiB);
    EXPECT(OK, cu.cuMemUnmap(range, 64 * MiB));
    CHECK(free_memory() + 64 * MiB == before); /* the handle holds it */
    EXPECT(OK, cu.cuMemRelease(handle));
    CHECK(free_memory() == before);
}

/* Two megabytes are counted as two megabytes: no larger unit is taken behind the scenes. */
static void a_small_frame_counts_what_it_is(void)
{
    CUmemGenericAllocationHandle handles[5];
    size_t before = free_memory();
    for (size_t i = 0; i < 5; i++) {
        handles[i] = create(FRAME);
        EXPECT_INT((i + 1) * 2, (before - free_memory()) / MiB);
    }
    for (size_t i = 0; i < 5; i++) {
        EXPECT(OK, cu.cuMemRelease(handles[i]));
    }
    CHECK(free_memory() == before);
}

static void an_exportable_frame_counts_the_same(void)
{
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    EXPECT_INT(FRAME, before - free_memory());
    EXPECT(OK, cu.cuMemRelease(handle));
    CHECK(free_memory() == before);
}

/* ---- running out ---------------------------------------------------------------------------- */

enum { LARGE_MOST = 4096, SMALL_MOST = 4096 };

static size_t create_until_refused(CUmemGenericAllocationHandle *handles, size_t most, size_t size,
                                   CUresult *refusal)
{
    CUmemAllocationProp properties = plain_properties();
    size_t count = 0;
    *refusal = CUDA_SUCCESS;
    while (count < most && *refusal == CUDA_SUCCESS) {
        *refusal = cu.cuMemCreate(&handles[count], size, &properties, 0);
        count += *refusal == CUDA_SUCCESS;
    }
    return count;
}

static unsigned release_all(CUmemGenericAllocationHandle *handles, size_t count)
{
    unsigned failed = 0;
    for (size_t i = 0; i < count; i++) {
        failed += cu.cuMemRelease(handles[i]) != CUDA_SUCCESS;
    }
    return failed;
}

static void a_full_card_refuses_and_recovers(void)
{
    static CUmemGenericAllocationHandle large[LARGE_MOST], small[SMALL_MOST];
    CUresult refusal;
    size_t before = free_memory();
    size_t large_count = create_until_refused(large, LARGE_MOST, GiB, &refusal);
    EXPECT(OUT_OF_MEMORY, refusal);
    /* What is left is less than what was refused, and what is gone is what was given. */
    size_t left = free_memory();
    CHECK(left < GiB + 64 * MiB);
    CHECK(before - left == large_count * GiB);
    size_t small_count = create_until_refused(small, SMALL_MOST, FRAME, &refusal);
    EXPECT(OUT_OF_MEMORY, refusal);
    CHECK(left - free_memory() == small_count * FRAME);
    CHECK(free_memory() < 64 * MiB);
    CUdeviceptr memory = 0;
    EXPECT(OUT_OF_MEMORY, cu.cuMemAlloc(&memory, 256 * MiB));
    /* One frame back, one frame more. */
    CHECK(small_count > 0);
    if (small_count > 0) {
        CUmemAllocationProp properties = plain_properties();
        EXPECT(OK, cu.cuMemRelease(small[small_count - 1]));
        EXPECT(OK, cu.cuMemCreate(&small[small_count - 1], FRAME, &properties, 0));
    }
    EXPECT_INT(0, release_all(small, small_count));
    EXPECT_INT(0, release_all(large, large_count));
    CHECK(free_memory() == before);
}

static void all_that_is_said_to_be_free_can_be_had(void)
{
    static CUmemGenericAllocationHandle handles[LARGE_MOST];
    CUresult refusal;
    size_t before = free_memory();
    size_t count = create_until_refused(handles, LARGE_MOST, 256 * MiB, &refusal);
    EXPECT(OUT_OF_MEMORY, refusal);
    CHECK(count == before / (256 * MiB));
    EXPECT_INT(0, release_all(handles, count));
    CHECK(free_memory() == before);
}

static void one_frame_of_almost_the_whole_card(void)
{
    size_t before = free_memory();
    size_t size = before / (256 * MiB) * (256 * MiB) - 256 * MiB;
    CUmemGenericAllocationHandle handle = create(size);
    CHECK(before - free_memory() == size);
    EXPECT(OK, cu.cuMemRelease(handle));
    CHECK(free_memory() == before);
}

const suite_case create_cases[] = {
    CASE(frame_sizes_are_multiples_of_the_granularity),
    CASE(a_frame_larger_than_the_card_is_out_of_memory),
    CASE(frames_of_bad_properties_are_refused),
    CASE(handle_types_that_nobody_knows_are_no_error),
    CASE(frames_with_flags_or_null_are_refused),
    CASE(granularity_is_two_megabytes),
    CASE(granularity_refuses_nonsense),
    CASE(granularity_is_the_same_for_bad_properties),
    CASE(a_handle_is_released_once),
    CASE(properties_are_read_back_from_a_handle),
    CASE(memory_works_after_its_handle_is_released),
    CASE(a_handle_is_retained_by_address),
    CASE(no_handle_is_retained_where_nothing_is_mapped),
    CASE_ALONE(memory_is_taken_at_create_and_back_when_nothing_holds_it),
    CASE_ALONE(memory_is_back_when_released_after_unmap),
    CASE_ALONE(a_small_frame_counts_what_it_is),
    CASE_ALONE(an_exportable_frame_counts_the_same),
    CASE_ALONE(a_full_card_refuses_and_recovers),
    CASE_ALONE(all_that_is_said_to_be_free_can_be_had),
    CASE_ALONE(one_frame_of_almost_the_whole_card),
    CASE_END,
};

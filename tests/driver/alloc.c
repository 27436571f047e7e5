/*
 * cuMemAlloc and cuMemFree: arguments, counts, and the wait that cuMemUnmap does not have.
 */
#include "suite.h"

static void allocations_of_nothing_or_too_much(void)
{
    CUdeviceptr memory = 77;
    EXPECT(INVALID_VALUE, cu.cuMemAlloc(&memory, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAlloc(NULL, 4096));
    EXPECT(OUT_OF_MEMORY, cu.cuMemAlloc(&memory, 1024 * GiB));
    EXPECT(OUT_OF_MEMORY, cu.cuMemAlloc(&memory, (size_t)1 << 60));
    EXPECT(OUT_OF_MEMORY, cu.cuMemAlloc(&memory, ~(size_t)0));
}

static void free_of_null_is_nothing(void)
{
    EXPECT(OK, cu.cuMemFree(0));
}

static void memory_is_freed_once_and_by_its_start(void)
{
    CUdeviceptr memory = make_memory(4 * MiB);
    EXPECT(INVALID_VALUE, cu.cuMemFree(memory + 4096));
    EXPECT(INVALID_VALUE, cu.cuMemFree(memory + 1));
    EXPECT(OK, cu.cuMemFree(memory));
    EXPECT(INVALID_VALUE, cu.cuMemFree(memory));
}

static void free_of_what_was_not_allocated(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemFree(range));         /* mapped */
    EXPECT(INVALID_VALUE, cu.cuMemFree(range + FRAME)); /* reserved */
    EXPECT(INVALID_VALUE, cu.cuMemFree(0x123456));
    EXPECT(INVALID_VALUE, cu.cuMemFree((CUdeviceptr)(uintptr_t)make_pages(4096)));
    EXPECT(INVALID_VALUE, cu.cuMemFree((CUdeviceptr)(uintptr_t)make_pinned(4096)));
    fill(range, 1, FRAME);
    CHECK(holds(range, 1, FRAME));
}

static void allocations_are_aligned(void)
{
    static const size_t sizes[] = {1, 3, 100, 513, 4097, 64 * KiB, MiB + 1, 4 * MiB};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CUdeviceptr memory = make_memory(sizes[i]);
        CHECK(memory % 512 == 0);
    }
}

/* Large allocations count in units of two megabytes; small ones share such a unit. */
static void allocations_count_in_units_of_two_megabytes(void)
{
    size_t before = free_memory();
    CUdeviceptr large = make_memory(64 * MiB);
    EXPECT_INT(64, (before - free_memory()) / MiB);
    EXPECT(OK, cu.cuMemFree(large));
    CHECK(free_memory() == before);
    large = make_memory(3 * MiB);
    EXPECT_INT(4, (before - free_memory()) / MiB);
    EXPECT(OK, cu.cuMemFree(large));
    CHECK(free_memory() == before);
    CUdeviceptr small = make_memory(4096);
    EXPECT_INT(2, (before - free_memory()) / MiB);
    CUdeviceptr second = make_memory(4096);
    EXPECT_INT(2, (before - free_memory()) / MiB);
    EXPECT(OK, cu.cuMemFree(small));
    EXPECT(OK, cu.cuMemFree(second));
    CHECK(free_memory() == before);
}

static void free_waits_for_all_work(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr touched = make_memory(4 * MiB), other = make_memory(4 * MiB);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(touched, 1, 4 * MiB, stream));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    EXPECT_WAITS(&busy, OK, cu.cuMemFree(other)); /* although nothing touches it */
    EXPECT(OK, cu.cuStreamQuery(stream));
    EXPECT(OK, cu.cuMemFree(touched));
}

static void free_of_a_small_piece_waits_too(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr touched = make_memory(4 * MiB), other = make_memory(4096), third;
    third = make_memory(4096);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(touched, 1, 4 * MiB, stream));
    EXPECT_WAITS(&busy, OK, cu.cuMemFree(other));
    EXPECT(OK, cu.cuMemFree(third));
}

static void allocation_waits_for_nothing(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr touched = make_memory(4 * MiB), memory = 0;
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(touched, 1, 4 * MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemAlloc(&memory, 4096));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemAlloc(&memory, 64 * MiB));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_refused_free_waits_for_nothing(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr touched = make_memory(4 * MiB);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(touched, 1, 4 * MiB, stream));
    EXPECT_AT_ONCE(&busy, INVALID_VALUE, cu.cuMemFree(touched + 4096));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemFree(0));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void memory_works_from_end_to_end(void)
{
    CUdeviceptr memory = make_memory(3 * MiB + 5);
    fill(memory, 0x17, 3 * MiB + 5);
    CHECK(holds(memory, 0x17, 3 * MiB + 5));
    EXPECT(OK, cu.cuMemFree(memory));
}

const suite_case alloc_cases[] = {
    CASE(allocations_of_nothing_or_too_much),
    CASE(free_of_null_is_nothing),
    CASE(memory_is_freed_once_and_by_its_start),
    CASE(free_of_what_was_not_allocated),
    CASE(allocations_are_aligned),
    CASE_ALONE(allocations_count_in_units_of_two_megabytes),
    CASE(free_waits_for_all_work),
    CASE(free_of_a_small_piece_waits_too),
    CASE(allocation_waits_for_nothing),
    CASE(a_refused_free_waits_for_nothing),
    CASE(memory_works_from_end_to_end),
    CASE_END,
};

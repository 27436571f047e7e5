/*
 * Mapping frames into reserved addresses.
 */
#include "suite.h"

/* Wrong in itself: an invalid value. A part of a frame would make sense: not supported. */
static void a_frame_is_mapped_whole(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create(2 * FRAME);
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, FRAME, FRAME, handle, 0)); /* its second half */
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, FRAME, 0, handle, 0));     /* its first half */
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 2 * FRAME, FRAME, handle, 0));
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 4 * FRAME, 0, handle, 0)); /* more than it has */
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, 0, 0, handle, 0));
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 2 * FRAME - 4096, 0, handle, 0));
    EXPECT(OK, cu.cuMemMap(range, 2 * FRAME, 0, handle, 0));
    unmap_all_and_free(range, 8 * FRAME, 2 * FRAME);
}

static void part_of_a_frame_cannot_be_mapped(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create(4 * FRAME);
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 2 * FRAME, 0, handle, 0));
}

static void an_offset_into_a_frame_is_refused(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create(4 * FRAME);
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 2 * FRAME, 2 * FRAME, handle, 0));
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 2 * FRAME, 4096, handle, 0));
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, FRAME, 4 * FRAME, handle, 0));
}

static void more_than_a_frame_cannot_be_mapped(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create(2 * FRAME);
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 4 * FRAME, 0, handle, 0));
}

static void addresses_to_map_at_are_aligned(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create(FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + 4096, FRAME, 0, handle, 0));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + 64 * KiB, FRAME, 0, handle, 0));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + 1, FRAME, 0, handle, 0));
    EXPECT(OK, cu.cuMemMap(range + FRAME, FRAME, 0, handle, 0));
}

/* The granularity is what addresses are multiples of, not the frame's size. */
static void a_large_frame_is_mapped_at_any_multiple_of_the_granularity(void)
{
    CUdeviceptr range = reserve(64 * MiB);
    CUmemGenericAllocationHandle handle = create(32 * MiB);
    EXPECT(OK, cu.cuMemMap(range + FRAME, 32 * MiB, 0, handle, 0));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, 32 * MiB));
    EXPECT(OK, cu.cuMemMap(range + 3 * FRAME, 32 * MiB, 0, handle, 0));
    set_access(range + 3 * FRAME, 32 * MiB, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    fill(range + 3 * FRAME, 9, 32 * MiB);
    CHECK(holds(range + 3 * FRAME, 9, 32 * MiB));
}

static void addresses_to_map_at_are_reserved(void)
{
    CUdeviceptr range = reserve(4 * FRAME), memory = make_memory(4 * FRAME);
    CUmemGenericAllocationHandle handle = create(2 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemMap(0, 2 * FRAME, 0, handle, 0));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + 3 * FRAME, 2 * FRAME, 0, handle, 0));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range - FRAME, 2 * FRAME, 0, handle, 0));
    CUdeviceptr inside = (memory + FRAME - 1) / FRAME * FRAME;
    EXPECT(INVALID_VALUE, cu.cuMemMap(inside, 2 * FRAME, 0, handle, 0));
    EXPECT(OK, cu.cuMemAddressFree(range, 4 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, 2 * FRAME, 0, handle, 0));
}

/* Reservations are what addresses are freed by; mapping only asks whether they are reserved. */
static void a_mapping_spans_two_adjacent_reservations(void)
{
    CUdeviceptr range = reserve(8 * FRAME), first = 0, second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 8 * FRAME));
    REQUIRE(cu.cuMemAddressReserve(&first, 4 * FRAME, 0, range, 0));
    REQUIRE(cu.cuMemAddressReserve(&second, 4 * FRAME, 0, range + 4 * FRAME, 0));
    CHECK(first == range && second == range + 4 * FRAME);
    CUmemGenericAllocationHandle handle = create(2 * FRAME);
    EXPECT(OK, cu.cuMemMap(range + 3 * FRAME, 2 * FRAME, 0, handle, 0));
    set_access(range + 3 * FRAME, 2 * FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    fill(range + 3 * FRAME, 7, 2 * FRAME);
    CHECK(holds(range + 3 * FRAME, 7, 2 * FRAME));
    /* Each has half of it mapped. */
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(first, 4 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(second, 4 * FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + 3 * FRAME, 2 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(first, 4 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(second, 4 * FRAME));
}

static void a_mapped_address_is_not_mapped_again(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle first = map_frame(range + FRAME, 2 * FRAME);
    CUmemGenericAllocationHandle second = create(2 * FRAME);
    fill(range + FRAME, 1, 2 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + FRAME, 2 * FRAME, 0, second, 0)); /* the same */
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, 2 * FRAME, 0, second, 0));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + 2 * FRAME, 2 * FRAME, 0, second, 0));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range + FRAME, 2 * FRAME, 0, first, 0)); /* by itself */
    CHECK(holds(range + FRAME, 1, 2 * FRAME));
    EXPECT(OK, cu.cuMemMap(range + 3 * FRAME, 2 * FRAME, 0, second, 0));
}

static void one_frame_at_two_addresses_is_one_memory(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, 2 * FRAME);
    EXPECT(OK, cu.cuMemMap(range + 4 * FRAME, 2 * FRAME, 0, handle, 0));
    set_access(range + 4 * FRAME, 2 * FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    fill(range, 0x11, 2 * FRAME);
    CHECK(holds(range + 4 * FRAME, 0x11, 2 * FRAME));
    fill(range + 4 * FRAME, 0x22, FRAME);
    CHECK(holds(range, 0x22, FRAME));
    CHECK(holds(range + FRAME, 0x11, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    CHECK(holds(range + 4 * FRAME, 0x22, FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    CHECK(holds(range + 4 * FRAME, 0x22, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + 4 * FRAME, 2 * FRAME));
}

static void an_alias_counts_once(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = map_frame(range, 2 * FRAME);
    map(range + 4 * FRAME, 2 * FRAME, handle);
    CHECK(before - free_memory() == 2 * FRAME);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    CHECK(before - free_memory() == 2 * FRAME);
    EXPECT(OK, cu.cuMemUnmap(range + 4 * FRAME, 2 * FRAME));
    CHECK(free_memory() == before);
}

static void the_handle_zero_is_not_mapped(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, FRAME, 0, 0, 0));
}

/* Released while mapped: the frame lives, and so does its handle, though it cannot be released. */
static void a_handle_released_while_mapped_can_be_mapped_again(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    fill(range, 0x3e, FRAME);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemMap(range + FRAME, FRAME, 0, handle, 0));
    set_access(range + FRAME, FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK(holds(range + FRAME, 0x3e, FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    CHECK(holds(range + FRAME, 0x3e, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, FRAME));
}

static void a_frame_mapped_again_after_release_is_back_with_its_last_mapping(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemAllocationProp seen;
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemGetAllocationPropertiesFromHandle(&seen, handle));
    map(range + FRAME, FRAME, handle);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT_INT(FRAME, before - free_memory());
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, FRAME));
    CHECK(free_memory() == before);
}

static void map_flags_are_refused(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = create(FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, FRAME, 0, handle, 1));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, FRAME, 0, handle, 1ull << 40));
    EXPECT(OK, cu.cuMemMap(range, FRAME, 0, handle, 0));
}

static void data_moves_with_its_frame(void)
{
    CUdeviceptr first = reserve(FRAME), second = reserve(FRAME);
    CUmemGenericAllocationHandle handle = map_frame(first, FRAME);
    fill(first, 0x77, FRAME);
    EXPECT(OK, cu.cuMemUnmap(first, FRAME));
    EXPECT(OK, cu.cuMemMap(second, FRAME, 0, handle, 0));
    set_access(second, FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK(holds(second, 0x77, FRAME));
}

/* Who owns a frame of physical memory next must not see what was in it. */
static void a_new_frame_holds_zeroes(void)
{
    CUdeviceptr range = reserve(64 * MiB);
    map_released_frame(range, 64 * MiB);
    fill(range, 0x99, 64 * MiB);
    EXPECT(OK, cu.cuMemUnmap(range, 64 * MiB));
    map_released_frame(range, 64 * MiB);
    CHECK(holds(range, 0, 64 * MiB));
}

static void a_frame_fills_its_reservation_exactly(void)
{
    CUdeviceptr range = reserve(2 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, FRAME);
    fill(range, 4, 2 * FRAME);
    CHECK(holds(range, 4, 2 * FRAME));
    unmap_all_and_free(range, 2 * FRAME, 2 * FRAME);
}

/* ---- what waits for the GPU ------------------------------------------------------------------ */

static void physical_memory_calls_wait_for_nothing(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME), memory = make_memory(4096), other = 0;
    CUmemGenericAllocationHandle handle = 0;
    CUmemAllocationProp properties = exportable_properties();
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    size_t bytes, total;
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemCreate(&handle, FRAME, &properties, 0));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemMap(range, FRAME, 0, handle, 0));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemSetAccess(range, FRAME, &access, 1));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemUnmap(range, FRAME));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemRelease(handle));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemAddressReserve(&other, FRAME, 0, 0, 0));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemAddressFree(other, FRAME));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemGetInfo(&bytes, &total));
    CHECK(!gate_is_open(&busy));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

const suite_case map_cases[] = {
    CASE(a_frame_is_mapped_whole),
    CASE(part_of_a_frame_cannot_be_mapped),
    CASE(an_offset_into_a_frame_is_refused),
    CASE(more_than_a_frame_cannot_be_mapped),
    CASE(addresses_to_map_at_are_aligned),
    CASE(a_large_frame_is_mapped_at_any_multiple_of_the_granularity),
    CASE(addresses_to_map_at_are_reserved),
    CASE(a_mapping_spans_two_adjacent_reservations),
    CASE(a_mapped_address_is_not_mapped_again),
    CASE(one_frame_at_two_addresses_is_one_memory),
    CASE_ALONE(an_alias_counts_once),
    CASE(the_handle_zero_is_not_mapped),
    CASE(a_handle_released_while_mapped_can_be_mapped_again),
    CASE_ALONE(a_frame_mapped_again_after_release_is_back_with_its_last_mapping),
    CASE(map_flags_are_refused),
    CASE(data_moves_with_its_frame),
    CASE(a_new_frame_holds_zeroes),
    CASE(a_frame_fills_its_reservation_exactly),
    CASE(physical_memory_calls_wait_for_nothing),
    CASE_END,
};

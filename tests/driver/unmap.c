/*
 * Unmapping: whole mappings, several at once, and everything that is not quite that.
 *
 * The rule: the range lies in reserved addresses and covers every mapping it touches whole. Holes,
 * and sizes that are no multiple of anything, do not matter.
 */
#include "suite.h"

static CUresult see(CUdeviceptr address)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    unsigned long long flags = 77;
    return cu.cuMemGetAccess(&flags, &location, address);
}

static void a_range_is_unmapped_as_often_as_one_likes(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, 2 * FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(range, 4 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, 2 * FRAME));
}

static void several_mappings_are_unmapped_in_one_call(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, 2 * FRAME);
    map_released_frame(range + 3 * FRAME, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, 4 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(range, 8 * FRAME));
}

static void unmap_of_half_a_frame_is_refused(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range, 2 * FRAME);
    fill(range, 8, 2 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range + FRAME, FRAME));
    CHECK(holds(range, 8, 2 * FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
}

static void unmap_of_a_frame_and_half_of_the_next_is_refused(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, 2 * FRAME);
    fill(range, 8, 3 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, 2 * FRAME));
    CHECK(holds(range, 8, 3 * FRAME)); /* nothing was unmapped on the way */
    EXPECT(OK, cu.cuMemUnmap(range, 3 * FRAME));
}

static void unmap_across_a_hole_takes_what_is_there(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + 2 * FRAME, FRAME);
    fill(range, 8, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, 3 * FRAME));
    EXPECT(INVALID_VALUE, see(range));
    EXPECT(INVALID_VALUE, see(range + 2 * FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + 2 * FRAME, FRAME));
}

static void unmap_with_a_hole_at_the_end_takes_what_is_there(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    EXPECT(INVALID_VALUE, see(range));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
}

static void unmap_with_a_hole_at_the_beginning_takes_what_is_there(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range + FRAME, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    EXPECT(INVALID_VALUE, see(range + FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, FRAME));
}

static void a_whole_reservation_with_holes_is_unmapped(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range + FRAME, FRAME);
    map_released_frame(range + 4 * FRAME, 2 * FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, 8 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(range, 8 * FRAME));
}

static void unmap_of_reserved_addresses_is_nothing(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, 4 * FRAME));
}

static void unmap_of_addresses_not_reserved_is_refused(void)
{
    CUdeviceptr memory = make_memory(4 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(0, FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap((memory + FRAME - 1) / FRAME * FRAME, FRAME));
}

/* What is beyond does not matter, as long as the beginning is reserved. */
static void unmap_beyond_the_end_of_a_reservation(void)
{
    CUdeviceptr range = reserve(8 * FRAME), first = 0;
    REQUIRE(cu.cuMemAddressFree(range, 8 * FRAME));
    REQUIRE(cu.cuMemAddressReserve(&first, 4 * FRAME, 0, range, 0));
    map_released_frame(first + 3 * FRAME, FRAME);
    EXPECT(OK, cu.cuMemUnmap(first + 3 * FRAME, 2 * FRAME));
    EXPECT(INVALID_VALUE, see(first + 3 * FRAME));
    EXPECT(OK, cu.cuMemUnmap(first + 2 * FRAME, 4 * FRAME));
    EXPECT(INVALID_VALUE, see(first + 3 * FRAME));
}

static void unmap_ranges_need_not_be_aligned(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, 2 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range + 4096, FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, 2 * FRAME - 4096));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME + 4096)); /* all of it and a little of a hole */
    EXPECT(INVALID_VALUE, see(range));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME - 1)); /* nothing but a hole */
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, 0));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
}

static void unmap_of_all_but_a_byte_is_refused(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range + FRAME, FRAME);
    fill(range + FRAME, 8, FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range + FRAME, FRAME - 1));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range + FRAME, 1));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range + FRAME + 1, FRAME - 1));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, FRAME + 4096)); /* a hole and a little of it */
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, FRAME + 1));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range + 2 * FRAME - 1, FRAME));
    CHECK(holds(range + FRAME, 8, FRAME));
}

/* A whole frame, and so little of the next that it may be forgotten. */
static void unmap_of_a_frame_and_a_byte_of_the_next_is_refused(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, FRAME);
    fill(range, 8, 2 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, FRAME + 1));
    EXPECT(INVALID_VALUE, cu.cuMemUnmap(range, 2 * FRAME - 4096));
    CHECK(holds(range, 8, 2 * FRAME));
}

/* Addresses that begin in the middle of a frame's place, where nothing is mapped. */
static void unmap_begins_anywhere_in_a_hole(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map_released_frame(range + FRAME, FRAME);
    map_released_frame(range + 3 * FRAME, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range + 4096, 4096));
    EXPECT(OK, cu.cuMemUnmap(range + 1, 1));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME - 4096, FRAME + 4096));
    EXPECT(INVALID_VALUE, see(range + FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + 3 * FRAME - 1, FRAME + 2));
    EXPECT(INVALID_VALUE, see(range + 3 * FRAME));
}

static void data_is_there_after_unmap_and_map(void)
{
    CUdeviceptr range = reserve(2 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    fill(range, 0x3c, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemMap(range, FRAME, 0, handle, 0));
    set_access(range, FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK(holds(range, 0x3c, FRAME));
}

static void other_memory_takes_the_place(void)
{
    CUdeviceptr range = reserve(2 * FRAME);
    CUmemGenericAllocationHandle first = map_frame(range, FRAME);
    fill(range, 1, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    CUmemGenericAllocationHandle second = map_frame(range, FRAME);
    fill(range, 2, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    map(range, FRAME, first);
    map(range + FRAME, FRAME, second);
    set_access(range, 2 * FRAME, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK(holds(range, 1, FRAME));
    CHECK(holds(range + FRAME, 2, FRAME));
}

static void one_of_two_neighbours_is_unmapped(void)
{
    CUdeviceptr range = reserve(2 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, FRAME);
    fill(range, 7, 2 * FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    CHECK(holds(range + FRAME, 7, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, FRAME));
}

static void one_call_unmaps_in_two_adjacent_reservations(void)
{
    CUdeviceptr range = reserve(2 * FRAME), first = 0, second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 2 * FRAME));
    REQUIRE(cu.cuMemAddressReserve(&first, FRAME, 0, range, 0));
    REQUIRE(cu.cuMemAddressReserve(&second, FRAME, 0, range + FRAME, 0));
    CHECK(first == range && second == range + FRAME);
    map_released_frame(first, FRAME);
    map_released_frame(second, FRAME);
    EXPECT(OK, cu.cuMemUnmap(first, 2 * FRAME));
    EXPECT(INVALID_VALUE, see(first));
    EXPECT(INVALID_VALUE, see(second));
}

static void one_call_gives_access_in_two_adjacent_reservations(void)
{
    CUdeviceptr range = reserve(2 * FRAME), first = 0, second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 2 * FRAME));
    REQUIRE(cu.cuMemAddressReserve(&first, FRAME, 0, range, 0));
    REQUIRE(cu.cuMemAddressReserve(&second, FRAME, 0, range + FRAME, 0));
    map(first, FRAME, create(FRAME));
    map(second, FRAME, create(FRAME));
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(OK, cu.cuMemSetAccess(first, 2 * FRAME, &access, 1));
    fill(first, 4, 2 * FRAME);
    CHECK(holds(first, 4, 2 * FRAME));
}

/* Two reservations with addresses between them that nobody reserved. */
static void access_and_unmap_across_addresses_not_reserved(void)
{
    CUdeviceptr range = reserve(3 * FRAME), parts[3] = {0, 0, 0};
    REQUIRE(cu.cuMemAddressFree(range, 3 * FRAME));
    for (unsigned i = 0; i < 3; i++) {
        REQUIRE(cu.cuMemAddressReserve(&parts[i], FRAME, 0, range + i * FRAME, 0));
        CHECK(parts[i] == range + i * FRAME);
    }
    map(parts[0], FRAME, create(FRAME));
    map(parts[2], FRAME, create(FRAME));
    REQUIRE(cu.cuMemAddressFree(parts[1], FRAME));
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    EXPECT(OK, cu.cuMemSetAccess(range, 3 * FRAME, &access, 1));
    EXPECT(OK, cu.cuMemUnmap(range, 3 * FRAME));
    EXPECT(INVALID_VALUE, see(parts[0]));
    EXPECT(INVALID_VALUE, see(parts[2]));
}

static void ten_thousand_maps_and_unmaps(void)
{
    CUdeviceptr range = reserve(16 * FRAME);
    CUmemGenericAllocationHandle handle = create(FRAME);
    unsigned failed = 0;
    for (unsigned i = 0; i < 10000; i++) {
        CUdeviceptr address = range + (i * 7 % 16) * FRAME;
        failed += cu.cuMemMap(address, FRAME, 0, handle, 0) != CUDA_SUCCESS;
        failed += cu.cuMemUnmap(address, FRAME) != CUDA_SUCCESS;
    }
    EXPECT_INT(0, failed);
}

const suite_case unmap_cases[] = {
    CASE(a_range_is_unmapped_as_often_as_one_likes),
    CASE(several_mappings_are_unmapped_in_one_call),
    CASE(unmap_of_half_a_frame_is_refused),
    CASE(unmap_of_a_frame_and_half_of_the_next_is_refused),
    CASE(unmap_across_a_hole_takes_what_is_there),
    CASE(unmap_with_a_hole_at_the_end_takes_what_is_there),
    CASE(unmap_with_a_hole_at_the_beginning_takes_what_is_there),
    CASE(a_whole_reservation_with_holes_is_unmapped),
    CASE(unmap_of_reserved_addresses_is_nothing),
    CASE(unmap_of_addresses_not_reserved_is_refused),
    CASE(unmap_beyond_the_end_of_a_reservation),
    CASE(unmap_ranges_need_not_be_aligned),
    CASE(unmap_of_all_but_a_byte_is_refused),
    CASE(unmap_of_a_frame_and_a_byte_of_the_next_is_refused),
    CASE(unmap_begins_anywhere_in_a_hole),
    CASE(data_is_there_after_unmap_and_map),
    CASE(other_memory_takes_the_place),
    CASE(one_of_two_neighbours_is_unmapped),
    CASE(one_call_unmaps_in_two_adjacent_reservations),
    CASE(one_call_gives_access_in_two_adjacent_reservations),
    CASE(access_and_unmap_across_addresses_not_reserved),
    CASE(ten_thousand_maps_and_unmaps),
    CASE_END,
};

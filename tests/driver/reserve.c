/*
 * Reserving addresses, and giving them back.
 */
#include "suite.h"

static void reservation_of_nothing_is_refused(void)
{
    CUdeviceptr range = 77;
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, 0, 0, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(NULL, FRAME, 0, 0, 0));
}

static void reservation_sizes_are_multiples_of_the_granularity(void)
{
    CUdeviceptr range = 0;
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, 4096, 0, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME - 1, 0, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME + 4096, 0, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME / 2, 0, 0, 0));
    EXPECT(OK, cu.cuMemAddressReserve(&range, FRAME, 0, 0, 0));
    EXPECT(OK, cu.cuMemAddressFree(range, FRAME));
    EXPECT(OK, cu.cuMemAddressReserve(&range, 3 * FRAME, 0, 0, 0));
    EXPECT(OK, cu.cuMemAddressFree(range, 3 * FRAME));
}

static void a_reservation_of_64_kib_is_refused(void)
{
    CUdeviceptr range = 0;
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, 64 * KiB, 0, 0, 0));
}

static void addresses_are_plentiful_but_not_endless(void)
{
    CUdeviceptr range = 0;
    EXPECT(OK, cu.cuMemAddressReserve(&range, 1024 * GiB, 0, 0, 0));
    EXPECT(OK, cu.cuMemAddressFree(range, 1024 * GiB));
    EXPECT(OUT_OF_MEMORY, cu.cuMemAddressReserve(&range, (size_t)1 << 60, 0, 0, 0));
    EXPECT(OUT_OF_MEMORY, cu.cuMemAddressReserve(&range, (size_t)1 << 48, 0, 0, 0));
    EXPECT(OUT_OF_MEMORY, cu.cuMemAddressReserve(&range, ~(size_t)0 - FRAME + 1, 0, 0, 0));
}

static void reservations_are_aligned_to_the_granularity(void)
{
    CUdeviceptr ranges[4];
    for (int i = 0; i < 4; i++) {
        ranges[i] = reserve(FRAME);
        CHECK(ranges[i] % FRAME == 0);
    }
    for (int i = 0; i < 4; i++) {
        EXPECT(OK, cu.cuMemAddressFree(ranges[i], FRAME));
    }
}

static void reservations_can_be_aligned_further(void)
{
    static const size_t alignments[] = {1,       2,       512,      4096,   64 * KiB,
                                        2 * MiB, 4 * MiB, 32 * MiB, 1 * GiB};
    for (size_t i = 0; i < sizeof alignments / sizeof *alignments; i++) {
        CUdeviceptr range = 0;
        if (EXPECT(OK, cu.cuMemAddressReserve(&range, FRAME, alignments[i], 0, 0)) == OK) {
            CHECK(range % alignments[i] == 0);
            CHECK(range % FRAME == 0);
            EXPECT(OK, cu.cuMemAddressFree(range, FRAME));
        }
    }
}

static void alignments_are_powers_of_two(void)
{
    CUdeviceptr range = 0;
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, 3 * FRAME, 3 * FRAME, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME, 3, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME, FRAME + 4096, 0, 0));
}

/* A hint is no promise, even where the addresses are free: a GPU followed some and not others, so
   there is nothing to hold either to but that the answer is good. */
static void a_hint_is_no_promise(void)
{
    CUdeviceptr range = reserve(16 * FRAME), second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 16 * FRAME));
    EXPECT(OK, cu.cuMemAddressReserve(&second, 4 * FRAME, 0, range + 4 * FRAME, 0));
    CHECK(second % FRAME == 0);
    EXPECT(OK, cu.cuMemAddressFree(second, 4 * FRAME));
}

static void a_hint_that_is_taken_is_not_followed(void)
{
    CUdeviceptr range = reserve(4 * FRAME), second = 0;
    EXPECT(OK, cu.cuMemAddressReserve(&second, FRAME, 0, range, 0));
    CHECK(second < range || second >= range + 4 * FRAME);
    EXPECT(OK, cu.cuMemAddressFree(second, FRAME));
    EXPECT(OK, cu.cuMemAddressFree(range, 4 * FRAME));
}

static void a_hint_that_is_not_aligned_is_refused(void)
{
    CUdeviceptr range = reserve(16 * FRAME), second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 16 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&second, FRAME, 0, range + 4096, 0));
    CHECK(second == 0);
}

static void reservation_flags_are_refused(void)
{
    CUdeviceptr range = 0;
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME, 0, 0, 1));
    EXPECT(INVALID_VALUE, cu.cuMemAddressReserve(&range, FRAME, 0, 0, 1ull << 40));
}

static void addresses_are_freed_exactly_as_reserved(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range, 2 * FRAME)); /* half of it */
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range, 8 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range, 4 * FRAME - 1));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range + 2 * FRAME, 2 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range + FRAME, FRAME)); /* in the middle */
    EXPECT(OK, cu.cuMemAddressFree(range, 4 * FRAME));
}

static void addresses_are_freed_once(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    EXPECT(OK, cu.cuMemAddressFree(range, 4 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range, 4 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(0, 4 * FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(0x123456, FRAME));
}

static void addresses_with_something_mapped_are_not_freed(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range + FRAME, FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(range, 4 * FRAME));
    fill(range + FRAME, 3, FRAME);
    CHECK(holds(range + FRAME, 3, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + FRAME, FRAME));
    EXPECT(OK, cu.cuMemAddressFree(range, 4 * FRAME));
}

static void memory_of_cuMemAlloc_is_no_reservation(void)
{
    CUdeviceptr memory = make_memory(4 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(memory, 4 * FRAME));
    EXPECT(OK, cu.cuMemFree(memory));
}

static void adjacent_reservations_stay_two(void)
{
    CUdeviceptr range = reserve(8 * FRAME), first = 0, second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 8 * FRAME));
    REQUIRE(cu.cuMemAddressReserve(&first, 4 * FRAME, 0, range, 0));
    REQUIRE(cu.cuMemAddressReserve(&second, 4 * FRAME, 0, range + 4 * FRAME, 0));
    CHECK(second == first + 4 * FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemAddressFree(first, 8 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(first, 4 * FRAME));
    EXPECT(OK, cu.cuMemAddressFree(second, 4 * FRAME));
}

static void reserving_takes_no_memory(void)
{
    size_t before = free_memory();
    CUdeviceptr range = reserve(64 * GiB);
    CHECK(free_memory() == before);
    EXPECT(OK, cu.cuMemAddressFree(range, 64 * GiB));
    CHECK(free_memory() == before);
}

static void a_thousand_reservations(void)
{
    static CUdeviceptr ranges[1000];
    unsigned failed = 0;
    for (int i = 0; i < 1000; i++) {
        failed += cu.cuMemAddressReserve(&ranges[i], 8 * FRAME, 0, 0, 0) != CUDA_SUCCESS;
    }
    for (int i = 0; i < 1000; i++) {
        failed += cu.cuMemAddressFree(ranges[i], 8 * FRAME) != CUDA_SUCCESS;
    }
    EXPECT_INT(0, failed);
}

const suite_case reserve_cases[] = {
    CASE(reservation_of_nothing_is_refused),
    CASE(reservation_sizes_are_multiples_of_the_granularity),
    CASE(a_reservation_of_64_kib_is_refused),
    CASE(addresses_are_plentiful_but_not_endless),
    CASE(reservations_are_aligned_to_the_granularity),
    CASE(reservations_can_be_aligned_further),
    CASE(alignments_are_powers_of_two),
    CASE(a_hint_is_no_promise),
    CASE(a_hint_that_is_taken_is_not_followed),
    CASE(a_hint_that_is_not_aligned_is_refused),
    CASE(reservation_flags_are_refused),
    CASE(addresses_are_freed_exactly_as_reserved),
    CASE(addresses_are_freed_once),
    CASE(addresses_with_something_mapped_are_not_freed),
    CASE(memory_of_cuMemAlloc_is_no_reservation),
    CASE(adjacent_reservations_stay_two),
    CASE_ALONE(reserving_takes_no_memory),
    CASE(a_thousand_reservations),
    CASE_END,
};

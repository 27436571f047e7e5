/*
 * Copies and memsets: arguments, ranges, and when they return.
 */
#include <stdio.h>
#include <string.h>

#include "suite.h"

static void copies_of_nothing(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096), range = reserve(FRAME);
    void *pinned = make_pinned(4096);
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pinned, 0, stream));
    EXPECT(OK, cu.cuMemcpyDtoHAsync(pinned, memory, 0, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory, memory, 0, stream));
    EXPECT(OK, cu.cuMemsetD8Async(memory, 1, 0, stream));
    EXPECT(OK, cu.cuMemsetD32Async(memory, 1, 0, stream));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(0, NULL, 0, stream));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(range, pinned, 0, stream));
    EXPECT(OK, cu.cuMemsetD8Async(0, 1, 0, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void copies_with_null(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    void *pinned = make_pinned(4096);
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(0, pinned, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, NULL, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(NULL, memory, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(pinned, 0, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(0, memory, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(memory, 0, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(0, 1, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void copies_with_host_memory_as_device_memory(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    CUdeviceptr pinned = (CUdeviceptr)(uintptr_t)make_pinned(8192);
    CUdeviceptr pages = (CUdeviceptr)(uintptr_t)make_pages(8192);
    EXPECT(OK, cu.cuMemsetD8Async(pinned, 7, 4096, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory, pinned, 4096, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(pinned + 4096, memory, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes((void *)(uintptr_t)pinned, 7, 8192));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(pages, 7, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(memory, pages, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void copies_with_device_memory_as_host_memory(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    void *alias = (void *)(uintptr_t)(memory + 4096);
    fill(memory + 4096, 3, 4096);
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, alias, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 3, 4096));
}

static void copies_beyond_the_end_of_an_allocation(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4 * MiB);
    void *pinned = make_pinned(8 * MiB);
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory + 2 * MiB, pinned, 4 * MiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, pinned, 8 * MiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(memory + 2 * MiB, 1, 4 * MiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(pinned, memory + 2 * MiB, 4 * MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void copies_beyond_the_end_of_a_pinned_block(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(16 * MiB);
    char *pinned = make_pinned(4 * MiB);
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, pinned, 16 * MiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(pinned + 2 * MiB, memory, 4 * MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_copy_into_a_hole_behind_a_mapping(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    void *pinned = make_pinned(8192);
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(range + FRAME - 4096, pinned, 8192, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_memset_into_a_hole_behind_a_mapping(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(range + FRAME - 4096, 1, 8192, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_copy_out_of_a_hole_behind_a_mapping(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    void *pinned = make_pinned(8192);
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(pinned, range + FRAME - 4096, 8192, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_copy_across_a_hole_between_mappings(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + 2 * FRAME, FRAME);
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(range, make_pinned(3 * FRAME), 3 * FRAME, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void copies_span_adjacent_frames(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, 2 * FRAME);
    map_released_frame(range + 3 * FRAME, FRAME);
    void *pinned = make_pinned(4 * FRAME);
    memset(pinned, 0x2d, 4 * FRAME);
    EXPECT(OK, cu.cuMemcpyHtoDAsync(range, pinned, 4 * FRAME, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(range, 0x2d, 4 * FRAME));
    EXPECT(OK, cu.cuMemsetD8Async(range + FRAME - 100, 0x2e, 200, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(range + 3 * FRAME - 100, range + FRAME - 100, 200, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(range + 3 * FRAME - 100, 0x2e, 200));
}

static void a_copy_across_two_reservations(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(2 * FRAME), first = 0, second = 0;
    REQUIRE(cu.cuMemAddressFree(range, 2 * FRAME));
    REQUIRE(cu.cuMemAddressReserve(&first, FRAME, 0, range, 0));
    REQUIRE(cu.cuMemAddressReserve(&second, FRAME, 0, range + FRAME, 0));
    map_released_frame(first, FRAME);
    map_released_frame(second, FRAME);
    EXPECT(OK, cu.cuMemcpyHtoDAsync(first, make_pinned(2 * FRAME), 2 * FRAME, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void copies_that_overlap_themselves(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(64 * KiB);
    fill(memory, 1, 64 * KiB);
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory, memory, 64 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory + 4096, memory, 32 * KiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 1, 64 * KiB));
}

static void memset_values(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    uint32_t *words = make_pinned(4096);
    fill(memory, 0, 4096);
    EXPECT(OK, cu.cuMemsetD8Async(memory + 3, 0xab, 5, stream));
    EXPECT(OK, cu.cuMemsetD32Async(memory + 16, 0x12345678, 3, stream));
    EXPECT(OK, cu.cuMemcpyDtoHAsync(words, memory, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    EXPECT_INT(0xab000000, words[0]);
    EXPECT_INT(0xabababab, words[1]);
    EXPECT_INT(0, words[2]);
    EXPECT_INT(0x12345678, words[4]);
    EXPECT_INT(0x12345678, words[6]);
    EXPECT_INT(0, words[7]);
}

static void memset_of_words_is_aligned(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    EXPECT(INVALID_VALUE, cu.cuMemsetD32Async(memory + 1, 1, 4, stream));
    EXPECT(INVALID_VALUE, cu.cuMemsetD32Async(memory + 2, 1, 4, stream));
    EXPECT(OK, cu.cuMemsetD32Async(memory + 4, 1, 4, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void peer_copies_within_one_context(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(8192);
    fill(memory, 0x4e, 4096);
    EXPECT(OK, cu.cuMemcpyPeerAsync(memory + 4096, context, memory, context, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory + 4096, 0x4e, 4096));
    EXPECT(OK, cu.cuMemcpyPeerAsync(memory, context, memory, context, 0, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyPeerAsync(0, context, memory, context, 4096, stream));
    EXPECT(OK, cu.cuMemcpyPeerAsync(memory, NULL, memory, context, 4096, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

/* ---- when a copy returns --------------------------------------------------------------------- */

static void a_pageable_source_may_change_after_the_call(void)
{
    static const size_t sizes[] = {16, 64 * KiB, 64 * KiB + 1, MiB, 16 * MiB};
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(16 * MiB);
    char *pages = make_pages(16 * MiB);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memset(pages, 0x33, sizes[i]);
        EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages, sizes[i], stream));
        memset(pages, 0x44, sizes[i]);
        EXPECT(OK, cu.cuStreamSynchronize(stream));
        CHECK(holds(memory, 0x33, sizes[i]));
    }
}

static void a_copy_to_pageable_memory_is_over_on_return(void)
{
    static const size_t sizes[] = {16, 64 * KiB, 64 * KiB + 1, MiB, 16 * MiB};
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(16 * MiB);
    char *pages = make_pages(16 * MiB);
    fill(memory, 0x5d, 16 * MiB);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        memset(pages, 0, sizes[i]);
        EXPECT(OK, cu.cuMemcpyDtoHAsync(pages, memory, sizes[i], stream));
        CHECK(all_bytes(pages, 0x5d, sizes[i]));
    }
}

/* One copy behind a closed gate; returns at once or waits. */
static void pinned_copies_return_before_they_run(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(16 * MiB);
    char *pinned = make_pinned(16 * MiB), *back = make_pinned(16 * MiB);
    fill(memory, 1, 16 * MiB);
    memset(pinned, 2, 16 * MiB);
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pinned, 16 * MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyDtoHAsync(back, memory, 16 * MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemsetD8Async(memory, 3, 16 * MiB, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyDtoDAsync(memory, memory + 8 * MiB, 8 * MiB, stream));
    EXPECT(NOT_READY, cu.cuStreamQuery(stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(back, 2, 16 * MiB));
    CHECK(holds(memory, 3, 16 * MiB));
}

static void a_small_pageable_copy_behind_a_gate(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(MiB);
    char *pages = make_pages(MiB);
    memset(pages, 7, MiB);
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pages, 16, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pages, 4096, stream));
    memset(pages, 8, MiB);
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 7, 4096));
}

static void a_64_kib_pageable_copy_behind_a_gate(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(MiB);
    char *pages = make_pages(MiB);
    memset(pages, 7, MiB);
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pages, 64 * KiB, stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 7, 64 * KiB));
}

static void a_pageable_copy_just_over_64_kib_behind_a_gate(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(MiB);
    char *pages = make_pages(MiB);
    memset(pages, 7, MiB);
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pages, 64 * KiB + 1, stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 7, 64 * KiB + 1));
}

/*
 * Where is the limit? Each size behind a gate of its own that opens after 200 ms, with nothing
 * else queued: a copy that returns before is kept in the driver's own memory.
 */
static void pageable_copies_of_many_sizes_behind_a_gate(void)
{
    static const struct {
        size_t size;
        bool waits;
    } sizes[] = {
        {128 * KiB, false}, {256 * KiB, false}, {512 * KiB, false}, {MiB, false},
        {MiB + 1, false},   {2 * MiB, false},   {4 * MiB, true},    {8 * MiB, true},
        {16 * MiB, true},   {32 * MiB, true},
    };
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(32 * MiB);
    char *pages = make_pages(32 * MiB);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        gate busy = gate_make();
        char what[64];
        snprintf(what, sizeof what, "a pageable copy of %zu bytes", sizes[i].size);
        memset(pages, (int)i + 1, sizes[i].size);
        gate_hold(&busy, stream);
        gate_open_later(&busy, 200);
        CUresult code = cu.cuMemcpyHtoDAsync(memory, pages, sizes[i].size, stream);
        suite_expect_gated(HERE, what, OK, sizes[i].waits, &busy, (int)code);
        gate_open(&busy);
        memset(pages, 0xff, sizes[i].size); /* it was read before the call returned */
        EXPECT(OK, cu.cuStreamSynchronize(stream));
        CHECK(holds(memory, (unsigned char)(i + 1), sizes[i].size));
    }
}

/* Small ones in a row: what the driver keeps of them is less than 4 MiB in all. */
static void many_small_pageable_copies_behind_a_gate(void)
{
    enum { COPIES = 64 };
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(64 * KiB * COPIES);
    char *pages = make_pages(64 * KiB);
    unsigned at_once = 0, failed = 0;
    gate_hold(&busy, stream);
    gate_open_later(&busy, 500);
    for (unsigned i = 0; i < COPIES; i++) {
        memset(pages, (int)i, 64 * KiB);
        failed +=
            cu.cuMemcpyHtoDAsync(memory + i * 64 * KiB, pages, 64 * KiB, stream) != CUDA_SUCCESS;
        at_once += !gate_is_open(&busy);
    }
    gate_cancel(&busy);
    gate_open(&busy);
    EXPECT_INT(COPIES - 1, at_once);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    for (unsigned i = 0; i < COPIES; i++) {
        failed += !holds(memory + i * 64 * KiB, (unsigned char)i, 64 * KiB);
    }
    EXPECT_INT(0, failed);
}

static void a_large_pageable_copy_behind_a_gate(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(64 * MiB);
    char *pages = make_pages(64 * MiB);
    memset(pages, 7, 64 * MiB);
    gate_hold(&busy, stream);
    EXPECT_WAITS(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pages, 64 * MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 7, 64 * MiB));
}

static void a_copy_to_pageable_memory_behind_a_gate(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    char *pages = make_pages(4096);
    fill(memory, 7, 4096);
    gate_hold(&busy, stream);
    EXPECT_WAITS(&busy, OK, cu.cuMemcpyDtoHAsync(pages, memory, 16, stream));
    CHECK(all_bytes(pages, 7, 16));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void registered_copies_return_before_they_run(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4 * MiB);
    char *pages = make_pages(4 * MiB);
    memset(pages, 9, 4 * MiB);
    REQUIRE(cu.cuMemHostRegister(pages, 4 * MiB, 0));
    gate_hold(&busy, stream);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pages, 4 * MiB, stream));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 9, 4 * MiB));
}

/* Copies on the device are queued like kernels, on stream 0 as on any other. */
static void copies_on_the_default_stream_return_before_they_run(void)
{
    gate busy = gate_make();
    CUdeviceptr memory = make_memory(4 * MiB);
    void *pinned = make_pinned(4 * MiB);
    gate_hold(&busy, NULL);
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemcpyHtoDAsync(memory, pinned, 4 * MiB, NULL));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemsetD8Async(memory, 1, 4 * MiB, NULL));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(NULL));
}

const suite_case copy_cases[] = {
    CASE(copies_of_nothing),
    CASE(copies_with_null),
    CASE(copies_with_host_memory_as_device_memory),
    CASE(copies_with_device_memory_as_host_memory),
    CASE(copies_beyond_the_end_of_an_allocation),
    CASE(copies_beyond_the_end_of_a_pinned_block),
    CASE(a_copy_into_a_hole_behind_a_mapping),
    CASE(a_memset_into_a_hole_behind_a_mapping),
    CASE(a_copy_out_of_a_hole_behind_a_mapping),
    CASE(a_copy_across_a_hole_between_mappings),
    CASE(copies_span_adjacent_frames),
    CASE(a_copy_across_two_reservations),
    CASE(copies_that_overlap_themselves),
    CASE(memset_values),
    CASE(memset_of_words_is_aligned),
    CASE(peer_copies_within_one_context),
    CASE(a_pageable_source_may_change_after_the_call),
    CASE(a_copy_to_pageable_memory_is_over_on_return),
    CASE(pinned_copies_return_before_they_run),
    CASE(a_small_pageable_copy_behind_a_gate),
    CASE(a_64_kib_pageable_copy_behind_a_gate),
    CASE(a_pageable_copy_just_over_64_kib_behind_a_gate),
    CASE(pageable_copies_of_many_sizes_behind_a_gate),
    CASE(many_small_pageable_copies_behind_a_gate),
    CASE(a_large_pageable_copy_behind_a_gate),
    CASE(a_copy_to_pageable_memory_behind_a_gate),
    CASE(registered_copies_return_before_they_run),
    CASE(copies_on_the_default_stream_return_before_they_run),
    CASE_END,
};

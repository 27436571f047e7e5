/*
 * Access to mapped memory, and what happens to work that touches memory without it.
 *
 * Whatever may cost the context stands in a case of its own.
 */
#include <string.h>

#include "suite.h"

static const int READWRITE = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
static const int READ = CU_MEM_ACCESS_FLAGS_PROT_READ;
static const int NONE = CU_MEM_ACCESS_FLAGS_PROT_NONE;

static CUresult give(CUdeviceptr address, size_t size, int flags)
{
    CUmemAccessDesc access = access_of(0, flags);
    return cu.cuMemSetAccess(address, size, &access, 1);
}

static CUresult see(CUdeviceptr address, int *flags)
{
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    unsigned long long seen = 77;
    CUresult code = cu.cuMemGetAccess(&seen, &location, address);
    *flags = (int)seen;
    return code;
}

/* A range begins and ends with mapped memory; what is in between may be missing. */
static void access_is_given_from_mapped_memory_to_mapped_memory(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    EXPECT(INVALID_VALUE, give(range, FRAME, READWRITE)); /* nothing is mapped */
    map(range, FRAME, create(FRAME));
    map(range + 2 * FRAME, FRAME, create(FRAME));
    EXPECT(INVALID_VALUE, give(range, 2 * FRAME, READWRITE)); /* a hole at the end */
    EXPECT(INVALID_VALUE, give(range + FRAME, 2 * FRAME, READWRITE));
    EXPECT(INVALID_VALUE, give(range - FRAME, 2 * FRAME, READWRITE));
    EXPECT(INVALID_VALUE, give(0, FRAME, READWRITE));
    int flags = 77;
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(NONE, flags); /* a refused call gave nothing to the first frame */
    EXPECT(OK, give(range, FRAME, READWRITE));
    EXPECT(OK, give(range + 2 * FRAME, FRAME, READWRITE));
    EXPECT(INVALID_VALUE, give(range, FRAME + 4096, READ)); /* a little of a hole at the end */
}

/* A hole in the middle is no error, and yet access ends there: what is behind gets none. */
static void access_ends_at_a_hole(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    int flags = 77;
    map(range, FRAME, create(FRAME));
    map(range + 2 * FRAME, FRAME, create(FRAME));
    EXPECT(OK, give(range, 3 * FRAME, READWRITE));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(READWRITE, flags);
    EXPECT(INVALID_VALUE, see(range + FRAME, &flags));
    EXPECT(OK, see(range + 2 * FRAME, &flags));
    EXPECT_INT(NONE, flags);
    /* What is mapped into the hole later begins without access. */
    map(range + FRAME, FRAME, create(FRAME));
    EXPECT(OK, see(range + FRAME, &flags));
    EXPECT_INT(NONE, flags);
}

static void access_across_two_holes_and_a_mapping_between(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    int flags = 77;
    map(range, FRAME, create(FRAME));
    map(range + 2 * FRAME, 2 * FRAME, create(2 * FRAME));
    map(range + 6 * FRAME, FRAME, create(FRAME));
    EXPECT(INVALID_VALUE, give(range, 3 * FRAME, READ)); /* it ends inside a mapping */
    EXPECT(OK, give(range, 7 * FRAME, READ));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(READ, flags);
    EXPECT(OK, see(range + 3 * FRAME, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(OK, see(range + 6 * FRAME, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(INVALID_VALUE, give(range, 8 * FRAME, READ)); /* it ends in a hole */
}

static void access_covers_whole_mappings(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map(range, 4 * FRAME, create(4 * FRAME));
    int flags = 77;
    EXPECT(INVALID_VALUE, give(range, 2 * FRAME, READWRITE)); /* first half of the mapping */
    EXPECT(INVALID_VALUE, give(range + 2 * FRAME, 2 * FRAME, READWRITE));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(OK, give(range, 4 * FRAME, READWRITE));
    EXPECT(OK, see(range + 3 * FRAME, &flags));
    EXPECT_INT(READWRITE, flags);
}

static void access_over_part_of_a_later_mapping(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map(range, 2 * FRAME, create(2 * FRAME));
    map(range + 2 * FRAME, 2 * FRAME, create(2 * FRAME));
    EXPECT(INVALID_VALUE, give(range, 3 * FRAME, READWRITE));
    EXPECT(INVALID_VALUE, give(range + FRAME, 3 * FRAME, READWRITE));
    EXPECT(OK, give(range, 4 * FRAME, READWRITE));
}

static void access_ranges_are_aligned(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map(range, 2 * FRAME, create(2 * FRAME));
    EXPECT(INVALID_VALUE, give(range + 4096, FRAME, READWRITE));
    EXPECT(INVALID_VALUE, give(range, FRAME + 4096, READWRITE));
    EXPECT(INVALID_VALUE, give(range, 4096, READWRITE));
    EXPECT(INVALID_VALUE, give(range, 0, READWRITE));
    EXPECT(INVALID_VALUE, give(range + 1, 2 * FRAME, READWRITE));
}

static void access_refuses_bad_descriptions(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map(range, FRAME, create(FRAME));
    CUmemAccessDesc access = access_of(0, READWRITE);
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 0));
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, NULL, 1));
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, NULL, 0));
    access.location.id = 1000;
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 1));
    access.location.id = -1;
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 1));
    access = access_of(0, 77);
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 1));
    access = access_of(0, 2); /* write only: there is no such thing */
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 1));
    access = access_of(0, READWRITE);
    access.location.type = 0;
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 1));
    access.location.type = 77;
    EXPECT(INVALID_VALUE, cu.cuMemSetAccess(range, FRAME, &access, 1));
}

static void the_same_device_twice_in_one_call(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map(range, FRAME, create(FRAME));
    CUmemAccessDesc twice[2] = {access_of(0, READ), access_of(0, READWRITE)};
    int flags = 77;
    EXPECT(OK, cu.cuMemSetAccess(range, FRAME, twice, 2));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(READWRITE, flags);
    twice[0] = access_of(0, READWRITE);
    twice[1] = access_of(0, READ);
    EXPECT(OK, cu.cuMemSetAccess(range, FRAME, twice, 2));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(READ, flags); /* the last one counts */
}

static void one_call_gives_access_to_three_mappings(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    map(range, FRAME, create(FRAME));
    map(range + FRAME, 2 * FRAME, create(2 * FRAME));
    map(range + 3 * FRAME, FRAME, create(FRAME));
    int flags = 77;
    EXPECT(OK, give(range, 4 * FRAME, READWRITE));
    for (unsigned i = 0; i < 4; i++) {
        EXPECT(OK, see(range + i * FRAME, &flags));
        EXPECT_INT(READWRITE, flags);
    }
    fill(range, 6, 4 * FRAME);
    CHECK(holds(range, 6, 4 * FRAME));
}

static void access_is_seen_in_every_state(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    int flags = 77;
    EXPECT(INVALID_VALUE, see(range, &flags)); /* reserved only */
    CUmemGenericAllocationHandle handle = create(2 * FRAME);
    map(range, 2 * FRAME, handle);
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(OK, give(range, 2 * FRAME, READ));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(READ, flags);
    EXPECT(OK, give(range, 2 * FRAME, READWRITE));
    EXPECT(OK, see(range + FRAME + 77, &flags)); /* any address inside */
    EXPECT_INT(READWRITE, flags);
    EXPECT(OK, give(range, 2 * FRAME, NONE));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(OK, give(range, 2 * FRAME, READWRITE));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    EXPECT(INVALID_VALUE, see(range, &flags));
    /* Access belongs to the mapping: a new one starts without. */
    map(range, 2 * FRAME, handle);
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(NONE, flags);
}

static void access_is_per_mapping_of_an_alias(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    map(range + FRAME, FRAME, handle);
    int flags = 77;
    EXPECT(OK, see(range + FRAME, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(OK, give(range + FRAME, FRAME, READ));
    EXPECT(OK, see(range, &flags));
    EXPECT_INT(READWRITE, flags);
}

static void seeing_access_refuses_nonsense(void)
{
    CUdeviceptr range = reserve(2 * FRAME);
    map_released_frame(range, FRAME);
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0};
    unsigned long long flags = 77;
    int local = 0;
    EXPECT(INVALID_VALUE, cu.cuMemGetAccess(NULL, &location, range));
    EXPECT(INVALID_VALUE, cu.cuMemGetAccess(&flags, NULL, range));
    EXPECT(INVALID_VALUE, cu.cuMemGetAccess(&flags, &location, 0));
    EXPECT(INVALID_VALUE, cu.cuMemGetAccess(&flags, &location, range + FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemGetAccess(&flags, &location, (CUdeviceptr)(uintptr_t)&local));
    location.id = 1000;
    EXPECT(INVALID_DEVICE, cu.cuMemGetAccess(&flags, &location, range));
    location.id = 0;
    location.type = 77;
    EXPECT(INVALID_DEVICE, cu.cuMemGetAccess(&flags, &location, range));
}

/* It can be asked for, and the answer is none. */
static void access_to_cuMemAlloc_memory_is_not_seen(void)
{
    CUdeviceptr memory = make_memory(FRAME);
    int flags = 77;
    EXPECT(OK, see(memory, &flags));
    EXPECT_INT(NONE, flags);
    EXPECT(OK, see(memory + FRAME - 1, &flags));
    EXPECT_INT(NONE, flags);
}

static void access_to_cuMemAlloc_memory_is_not_set(void)
{
    CUdeviceptr memory = make_memory(4 * FRAME);
    EXPECT(INVALID_VALUE, give((memory + FRAME - 1) / FRAME * FRAME, FRAME, READ));
}

/* ---- touching what must not be touched ------------------------------------------------------ */

/* Queue, then look: a refusal comes at the call, an illegal access with the next wait. */
static void after_touching(CUstream stream, int synchronized)
{
    size_t bytes, total;
    EXPECT(synchronized, cu.cuStreamSynchronize(stream));
    EXPECT(synchronized, cu.cuCtxSynchronize());
    EXPECT(synchronized, cu.cuMemGetInfo(&bytes, &total));
}

static CUdeviceptr unmapped(void)
{
    return reserve(4 * FRAME);
}

static CUdeviceptr without_access(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map(range, FRAME, create(FRAME));
    return range;
}

static CUdeviceptr read_only(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    fill(range, 5, FRAME);
    set_access(range, FRAME, READ);
    return range;
}

static void copy_into_unmapped_addresses(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(unmapped(), make_pinned(4096), 4096, stream));
    after_touching(stream, OK);
}

static void pageable_copy_into_unmapped_addresses(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(unmapped(), make_pages(4096), 4096, stream));
    after_touching(stream, OK);
}

static void copy_out_of_unmapped_addresses(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(make_pinned(4096), unmapped(), 4096, stream));
    after_touching(stream, OK);
}

static void copy_on_the_device_into_unmapped_addresses(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(unmapped(), make_memory(4096), 4096, stream));
    after_touching(stream, OK);
}

static void memset_of_unmapped_addresses(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(unmapped(), 1, 4096, stream));
    after_touching(stream, OK);
}

static void copy_into_memory_without_access(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(without_access(), make_pinned(4096), 4096, stream));
    after_touching(stream, OK);
}

static void copy_out_of_memory_without_access(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(make_pinned(4096), without_access(), 4096, stream));
    after_touching(stream, OK);
}

static void copy_on_the_device_from_memory_without_access(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(make_memory(4096), without_access(), 4096, stream));
    after_touching(stream, OK);
}

static void memset_of_memory_without_access(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(without_access(), 1, 4096, stream));
    after_touching(stream, OK);
}

static void copy_out_of_read_only_memory(void)
{
    CUdeviceptr range = read_only();
    CHECK(holds(range, 5, FRAME));
}

static void copy_into_read_only_memory_is_refused(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = read_only();
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(range, make_pinned(4096), 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(range, make_pages(4096), 4096, stream));
    after_touching(stream, OK);
    CHECK(holds(range, 5, FRAME));
}

static void memset_of_read_only_memory_is_refused(void)
{
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(read_only(), 1, 4096, stream));
    after_touching(stream, OK);
}

static void copies_on_the_device_with_read_only_memory(void)
{
    CUstream stream = make_stream();
    CUdeviceptr range = read_only(), memory = make_memory(4096);
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory, range, 4096, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoDAsync(range, memory, 4096, stream));
    after_touching(stream, OK);
    CHECK(holds(memory, 5, 4096));
}

/* Writable where it begins, read-only where it ends. */
static void a_memset_across_read_only_memory(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    map_released_frame(range + FRAME, FRAME);
    set_access(range + FRAME, FRAME, READ);
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(range + FRAME - 4096, 1, 8192, stream));
    after_touching(stream, OK);
}

static void copy_into_memory_whose_access_was_taken(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    fill(range, 5, FRAME);
    set_access(range, FRAME, NONE);
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(range, make_pinned(4096), 4096, stream));
    after_touching(stream, OK);
}

static void copy_into_memory_that_was_unmapped(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    fill(range, 5, FRAME);
    REQUIRE(cu.cuMemUnmap(range, FRAME));
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(range, make_pinned(4096), 4096, stream));
    after_touching(stream, OK);
}

/* Unmapped under queued work: nothing protects it. */
static void memset_of_memory_unmapped_before_it_runs(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(range, 1, FRAME, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemUnmap(range, FRAME));
    gate_open(&busy);
    after_touching(stream, ILLEGAL_ADDRESS);
    /* The context is lost: everything says so from now on. */
    CUevent event = NULL;
    CUdeviceptr memory = 0;
    EXPECT(ILLEGAL_ADDRESS, cu.cuEventCreate(&event, 0));
    EXPECT(ILLEGAL_ADDRESS, cu.cuMemAlloc(&memory, 4096));
    EXPECT(ILLEGAL_ADDRESS, cu.cuStreamQuery(stream));
    EXPECT(ILLEGAL_ADDRESS, cu.cuStreamDestroy(stream));
}

static void a_memset_across_memory_without_access(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_released_frame(range, FRAME);
    map(range + FRAME, FRAME, create(FRAME));
    CUstream stream = make_stream();
    EXPECT(INVALID_VALUE, cu.cuMemsetD8Async(range + FRAME - 4096, 1, 8192, stream));
    after_touching(stream, OK);
}

const suite_case access_cases[] = {
    CASE(access_is_given_from_mapped_memory_to_mapped_memory),
    CASE(access_ends_at_a_hole),
    CASE(access_across_two_holes_and_a_mapping_between),
    CASE(access_covers_whole_mappings),
    CASE(access_over_part_of_a_later_mapping),
    CASE(access_ranges_are_aligned),
    CASE(access_refuses_bad_descriptions),
    CASE(the_same_device_twice_in_one_call),
    CASE(one_call_gives_access_to_three_mappings),
    CASE(access_is_seen_in_every_state),
    CASE(access_is_per_mapping_of_an_alias),
    CASE(seeing_access_refuses_nonsense),
    CASE(access_to_cuMemAlloc_memory_is_not_seen),
    CASE(access_to_cuMemAlloc_memory_is_not_set),
    CASE(copy_into_unmapped_addresses),
    CASE(pageable_copy_into_unmapped_addresses),
    CASE(copy_out_of_unmapped_addresses),
    CASE(copy_on_the_device_into_unmapped_addresses),
    CASE(memset_of_unmapped_addresses),
    CASE(copy_into_memory_without_access),
    CASE(copy_out_of_memory_without_access),
    CASE(copy_on_the_device_from_memory_without_access),
    CASE(memset_of_memory_without_access),
    CASE(copy_out_of_read_only_memory),
    CASE(copy_into_read_only_memory_is_refused),
    CASE(memset_of_read_only_memory_is_refused),
    CASE(copies_on_the_device_with_read_only_memory),
    CASE(a_memset_across_read_only_memory),
    CASE(copy_into_memory_whose_access_was_taken),
    CASE(copy_into_memory_that_was_unmapped),
    CASE(memset_of_memory_unmapped_before_it_runs),
    CASE(a_memset_across_memory_without_access),
    CASE_END,
};

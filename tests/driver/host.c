/*
 * Pinned host memory: allocated by the driver, or registered with it.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "suite.h"

static void a_host_allocation_of_nothing_gives_null(void)
{
    void *memory = &memory;
    EXPECT(OK, cu.cuMemHostAlloc(&memory, 0, 0));
    CHECK(memory == NULL);
    EXPECT(OK, cu.cuMemFreeHost(memory == &memory ? NULL : memory));
}

static void host_allocations_of_too_much(void)
{
    void *memory = NULL;
    EXPECT(INVALID_VALUE, cu.cuMemHostAlloc(NULL, 4096, 0));
    EXPECT(OUT_OF_MEMORY, cu.cuMemHostAlloc(&memory, (size_t)1 << 60, 0));
    EXPECT(OUT_OF_MEMORY, cu.cuMemHostAlloc(&memory, (size_t)1 << 46, 0));
}

static void host_allocation_flags(void)
{
    void *memory = NULL;
    for (unsigned flags = 0; flags < 8; flags++) {
        if (EXPECT(OK, cu.cuMemHostAlloc(&memory, 4096, flags)) == OK) {
            EXPECT(OK, cu.cuMemFreeHost(memory));
        }
    }
    EXPECT(INVALID_VALUE, cu.cuMemHostAlloc(&memory, 4096, 0x100));
    EXPECT(INVALID_VALUE, cu.cuMemHostAlloc(&memory, 4096, 8));
}

static void host_memory_is_page_aligned(void)
{
    void *small = make_pinned(1), *large = make_pinned(3 * MiB + 1);
    CHECK((uintptr_t)small % 512 == 0);
    CHECK((uintptr_t)large % 512 == 0);
}

static void host_memory_is_freed_once_and_by_its_start(void)
{
    char *memory = make_pinned(64 * KiB);
    EXPECT(INVALID_VALUE, cu.cuMemFreeHost(memory + 4096));
    EXPECT(OK, cu.cuMemFreeHost(memory));
    EXPECT(INVALID_VALUE, cu.cuMemFreeHost(memory));
}

static void free_host_of_null_is_nothing(void)
{
    EXPECT(OK, cu.cuMemFreeHost(NULL));
}

static void free_host_of_what_the_driver_did_not_allocate(void)
{
    char *registered = make_pages(64 * KiB);
    REQUIRE(cu.cuMemHostRegister(registered, 64 * KiB, 0));
    EXPECT(INVALID_VALUE, cu.cuMemFreeHost(registered));
    EXPECT(INVALID_VALUE, cu.cuMemFreeHost(make_pages(4096)));
    EXPECT(INVALID_VALUE, cu.cuMemFreeHost((void *)(uintptr_t)make_memory(4096)));
    EXPECT(OK, cu.cuMemHostUnregister(registered));
}

static void unregister_of_what_is_not_registered(void)
{
    char *pages = make_pages(64 * KiB), *pinned = make_pinned(64 * KiB);
    EXPECT(NOT_REGISTERED, cu.cuMemHostUnregister(pages));
    EXPECT(INVALID_VALUE, cu.cuMemHostUnregister(pinned));
    EXPECT(INVALID_VALUE, cu.cuMemHostUnregister(NULL));
    REQUIRE(cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT(INVALID_VALUE, cu.cuMemHostUnregister(pages + 4096)); /* its middle */
    EXPECT(OK, cu.cuMemHostUnregister(pages));
    EXPECT(NOT_REGISTERED, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
}

static void a_registration_does_not_overlap_another(void)
{
    char *pages = make_pages(64 * KiB);
    REQUIRE(cu.cuMemHostRegister(pages + 16 * KiB, 32 * KiB, 0));
    EXPECT(ALREADY_REGISTERED, cu.cuMemHostRegister(pages + 16 * KiB, 32 * KiB, 0));
    EXPECT(ALREADY_REGISTERED, cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT(ALREADY_REGISTERED, cu.cuMemHostRegister(pages, 32 * KiB, 0));
    EXPECT(ALREADY_REGISTERED, cu.cuMemHostRegister(pages + 32 * KiB, 32 * KiB, 0));
    EXPECT(ALREADY_REGISTERED, cu.cuMemHostRegister(pages + 20 * KiB, 4 * KiB, 0));
    EXPECT(OK, cu.cuMemHostRegister(pages, 16 * KiB, 0)); /* adjacent */
    EXPECT(OK, cu.cuMemHostRegister(pages + 48 * KiB, 16 * KiB, 0));
}

static void pinned_memory_is_not_registered_again(void)
{
    char *pinned = make_pinned(64 * KiB);
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pinned, 64 * KiB, 0));
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pinned + 4096, 4096, 0));
}

static void registrations_of_nonsense(void)
{
    char *pages = make_pages(64 * KiB);
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pages, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(NULL, 4096, 0));
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pages, 64 * KiB, 0x100));
    EXPECT(INVALID_VALUE,
           cu.cuMemHostRegister((void *)(uintptr_t)make_memory(64 * KiB), 64 * KiB, 0));
}

static void registration_of_addresses_without_memory(void)
{
    char *pages = make_pages(64 * KiB);
    munmap(pages + 32 * KiB, 32 * KiB);
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pages + 32 * KiB, 32 * KiB, 0));
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT(OK, cu.cuMemHostRegister(pages, 32 * KiB, 0));
}

/* Neither address nor size need be multiples of a page; the pages are pinned whole. */
static void registrations_need_not_be_aligned(void)
{
    char *pages = make_pages(64 * KiB);
    EXPECT(OK, cu.cuMemHostRegister(pages + 100, 5000, 0));
    EXPECT(NOT_REGISTERED, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemHostUnregister(pages + 100));
    EXPECT(OK, cu.cuMemHostRegister(pages + 1, 1, 0));
    EXPECT(OK, cu.cuMemHostUnregister(pages + 1));
}

/* Two that share a page but no byte; then one that shares bytes. */
static void unaligned_registrations_share_a_page(void)
{
    char *pages = make_pages(64 * KiB);
    EXPECT(OK, cu.cuMemHostRegister(pages, 2048, 0));
    EXPECT(OK, cu.cuMemHostRegister(pages + 2048, 2048, 0));
    EXPECT(OK, cu.cuMemHostRegister(pages + 4096, 2048, 0));
    EXPECT(ALREADY_REGISTERED, cu.cuMemHostRegister(pages + 6000, 1000, 0));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemHostUnregister(pages + 2048));
}

static void registration_flags(void)
{
    char *pages = make_pages(64 * KiB);
    EXPECT(OK, cu.cuMemHostRegister(pages, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemHostRegister(pages, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemHostRegister(pages, 4096,
                                    CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuMemHostRegister(pages, 4096, CU_MEMHOSTREGISTER_READ_ONLY));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
}

static void *read_only_file(size_t size)
{
    char name[] = "/tmp/driver_suite.XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && ftruncate(file, (off_t)size) == 0);
    unlink(name);
    char *writable = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    memset(writable, 0x6d, size);
    munmap(writable, size);
    void *pages = mmap(NULL, size, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    CHECK(pages != MAP_FAILED);
    return pages;
}

static void a_read_only_file_mapping_is_registered_read_only(void)
{
    void *pages = read_only_file(MiB);
    CUdeviceptr memory = make_memory(MiB);
    CUstream stream = make_stream();
    EXPECT(OK, cu.cuMemHostRegister(pages, MiB, CU_MEMHOSTREGISTER_READ_ONLY));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages, MiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 0x6d, MiB));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
}

static void a_read_only_file_mapping_is_not_registered_for_writing(void)
{
    void *pages = read_only_file(MiB);
    EXPECT(INVALID_VALUE, cu.cuMemHostRegister(pages, MiB, 0));
}

static void registered_memory_is_copied_from_and_to(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr memory = make_memory(64 * KiB);
    CUstream stream = make_stream();
    memset(pages, 0x19, 64 * KiB);
    REQUIRE(cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages, 32 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyDtoDAsync(memory + 32 * KiB, memory, 32 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyDtoHAsync(pages + 32 * KiB, memory + 32 * KiB, 32 * KiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(pages, 0x19, 64 * KiB));
    EXPECT(OK, cu.cuMemHostUnregister(pages));
}

static void a_copy_across_two_registrations_is_refused(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr memory = make_memory(64 * KiB);
    CUstream stream = make_stream();
    REQUIRE(cu.cuMemHostRegister(pages, 32 * KiB, 0));
    REQUIRE(cu.cuMemHostRegister(pages + 32 * KiB, 32 * KiB, 0));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, pages, 64 * KiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, pages + 31 * KiB, 2 * KiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(pages, memory, 64 * KiB, stream));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages + 32 * KiB, 32 * KiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_copy_from_a_registration_into_pageable_memory_beyond(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr memory = make_memory(64 * KiB);
    CUstream stream = make_stream();
    memset(pages, 0x2b, 64 * KiB);
    REQUIRE(cu.cuMemHostRegister(pages, 32 * KiB, 0));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, pages, 64 * KiB, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyDtoHAsync(pages, memory, 64 * KiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void a_copy_from_pageable_memory_into_a_registration(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr memory = make_memory(64 * KiB);
    CUstream stream = make_stream();
    memset(pages, 0x2b, 64 * KiB);
    REQUIRE(cu.cuMemHostRegister(pages + 32 * KiB, 32 * KiB, 0));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages, 64 * KiB, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(holds(memory, 0x2b, 64 * KiB));
}

/* Bytes of a page that is pinned whole, but outside what was registered. */
static void a_copy_beyond_an_unaligned_registration_is_refused(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr memory = make_memory(64 * KiB);
    CUstream stream = make_stream();
    REQUIRE(cu.cuMemHostRegister(pages + 100, 1000, 0));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages + 100, 1000, stream));
    EXPECT(INVALID_VALUE, cu.cuMemcpyHtoDAsync(memory, pages + 100, 2000, stream));
    EXPECT(OK, cu.cuMemcpyHtoDAsync(memory, pages, 50, stream)); /* before it: pageable */
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void host_calls_behind_busy_streams(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    void *pages = make_pages(64 * KiB), *pinned = NULL;
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT_AT_ONCE(&busy, OK, cu.cuMemHostAlloc(&pinned, 4 * MiB, 0));
    gate_open(&busy);
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void free_host_waits_for_all_work(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    void *pinned = make_pinned(4 * MiB);
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT_WAITS(&busy, OK, cu.cuMemFreeHost(pinned));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

static void unregister_waits_for_all_work(void)
{
    gate busy = gate_make();
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(4096);
    void *pages = make_pages(64 * KiB);
    REQUIRE(cu.cuMemHostRegister(pages, 64 * KiB, 0));
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 1, 4096, stream));
    EXPECT_WAITS(&busy, OK, cu.cuMemHostUnregister(pages));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
}

const suite_case host_cases[] = {
    CASE(a_host_allocation_of_nothing_gives_null),
    CASE(host_allocations_of_too_much),
    CASE(host_allocation_flags),
    CASE(host_memory_is_page_aligned),
    CASE(host_memory_is_freed_once_and_by_its_start),
    CASE(free_host_of_null_is_nothing),
    CASE(free_host_of_what_the_driver_did_not_allocate),
    CASE(unregister_of_what_is_not_registered),
    CASE(a_registration_does_not_overlap_another),
    CASE(pinned_memory_is_not_registered_again),
    CASE(registrations_of_nonsense),
    CASE(registration_of_addresses_without_memory),
    CASE(registrations_need_not_be_aligned),
    CASE(unaligned_registrations_share_a_page),
    CASE(registration_flags),
    CASE(a_read_only_file_mapping_is_registered_read_only),
    CASE(a_read_only_file_mapping_is_not_registered_for_writing),
    CASE(registered_memory_is_copied_from_and_to),
    CASE(a_copy_across_two_registrations_is_refused),
    CASE(a_copy_from_a_registration_into_pageable_memory_beyond),
    CASE(a_copy_from_pageable_memory_into_a_registration),
    CASE(a_copy_beyond_an_unaligned_registration_is_refused),
    CASE(host_calls_behind_busy_streams),
    CASE(free_host_waits_for_all_work),
    CASE(unregister_waits_for_all_work),
    CASE_END,
};

/*
 * Questions about addresses: the range one is part of, several attributes at once, pinned memory.
 */
#include <string.h>

#include "more.h"

/* ---- cuMemGetAddressRange ------------------------------------------------------------------- */

static void expect_range(CUdeviceptr asked, CUdeviceptr start, size_t size)
{
    CUdeviceptr base = 0;
    size_t found = 0;
    EXPECT(OK, more.cuMemGetAddressRange(&base, &found, asked));
    CHECK(base == start);
    EXPECT_INT(size, found);
}

static void ranges_of_cuMemAlloc_memory(void)
{
    CUdeviceptr memory = make_memory(3 * MiB), small = make_memory(100);
    CUdeviceptr base = 0;
    size_t size = 0;
    expect_range(memory, memory, 3 * MiB);
    expect_range(memory + MiB, memory, 3 * MiB);
    expect_range(memory + 3 * MiB - 1, memory, 3 * MiB);
    expect_range(small + 99, small, 100);
    EXPECT(OK, more.cuMemGetAddressRange(&base, NULL, memory));
    EXPECT(OK, more.cuMemGetAddressRange(NULL, &size, memory));
    EXPECT(OK, more.cuMemGetAddressRange(NULL, NULL, memory));
}

static void ranges_of_frames(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    map_frame(range, FRAME);
    map_frame(range + FRAME, FRAME);
    expect_range(range + 5, range, FRAME);
    expect_range(range + FRAME + 5, range + FRAME, FRAME);
    CUdeviceptr base = 0;
    size_t size = 0;
    EXPECT(NOT_FOUND, more.cuMemGetAddressRange(&base, &size, range + 2 * FRAME));
}

static void ranges_of_pinned_memory(void)
{
    char *pinned = make_pinned(64 * KiB);
    CUdeviceptr base = 0;
    size_t size = 0;
    EXPECT(OK, more.cuMemGetAddressRange(&base, &size, (CUdeviceptr)(uintptr_t)pinned));
}

static void ranges_of_nothing(void)
{
    CUdeviceptr base = 0, gone = make_memory(4 * MiB);
    size_t size = 0;
    char *pages = make_pages(4096);
    REQUIRE(cu.cuMemFree(gone));
    EXPECT(NOT_FOUND, more.cuMemGetAddressRange(&base, &size, gone));
    EXPECT(NOT_FOUND, more.cuMemGetAddressRange(&base, &size, 0));
    EXPECT(NOT_FOUND, more.cuMemGetAddressRange(&base, &size, 0x1000));
    EXPECT(NOT_FOUND, more.cuMemGetAddressRange(&base, &size, (CUdeviceptr)(uintptr_t)pages));
}

static void ask_for_a_range(void *data)
{
    CUdeviceptr memory = *(CUdeviceptr *)data, base = 0;
    size_t size = 0;
    EXPECT(INVALID_CONTEXT, more.cuMemGetAddressRange(&base, &size, memory));
}

static void ranges_without_a_context(void)
{
    CUdeviceptr memory = make_memory(MiB);
    in_thread(ask_for_a_range, &memory);
}

/* ---- cuPointerGetAttributes ------------------------------------------------------------------ */

struct answers {
    void *context;
    unsigned type;
    CUdeviceptr device, host;
    int ordinal;
    CUdeviceptr start;
    size_t size;
    int mapped;
};

static int ask_all(struct answers *a, CUdeviceptr address)
{
    CUpointer_attribute asked[] = {
        CU_POINTER_ATTRIBUTE_CONTEXT,        CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER,
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
        CU_POINTER_ATTRIBUTE_RANGE_SIZE,     CU_POINTER_ATTRIBUTE_MAPPED};
    void *values[] = {&a->context, &a->type,  &a->device, &a->host,
                      &a->ordinal, &a->start, &a->size,   &a->mapped};
    memset(a, 0x55, sizeof *a);
    return (int)more.cuPointerGetAttributes(8, asked, values, address);
}

static void attributes_of_cuMemAlloc_memory(void)
{
    CUdeviceptr memory = make_memory(MiB);
    struct answers a;
    EXPECT(OK, ask_all(&a, memory + 5));
    CHECK(a.context == (void *)context);
    EXPECT_INT(CU_MEMORYTYPE_DEVICE, a.type);
    EXPECT_INT(5, a.device - memory);
    EXPECT_INT(0, a.host);
    EXPECT_INT(0, a.ordinal);
    EXPECT_INT(0, a.start - memory);
    EXPECT_INT(MiB, a.size);
    EXPECT_INT(1, a.mapped);
}

static void attributes_of_pinned_memory(void)
{
    CUdeviceptr pinned = (CUdeviceptr)(uintptr_t)make_pinned(64 * KiB);
    struct answers a;
    EXPECT(OK, ask_all(&a, pinned + 5));
    CHECK(a.context == (void *)context);
    EXPECT_INT(CU_MEMORYTYPE_HOST, a.type);
    EXPECT_INT(5, a.device - pinned);
    EXPECT_INT(5, a.host - pinned);
    EXPECT_INT(0, a.ordinal);
    EXPECT_INT(0, a.start - pinned);
    EXPECT_INT(64 * KiB, a.size);
    EXPECT_INT(1, a.mapped);
}

static void attributes_of_frames(void)
{
    CUdeviceptr range = reserve(2 * FRAME);
    map_frame(range, FRAME);
    struct answers a;
    EXPECT(OK, ask_all(&a, range + 5));
    CHECK(a.context == NULL);
    EXPECT_INT(CU_MEMORYTYPE_DEVICE, a.type);
    EXPECT_INT(5, a.device - range);
    EXPECT_INT(0, a.host);
    EXPECT_INT(0, a.ordinal);
    EXPECT_INT(0, a.start - range);
    EXPECT_INT(2 * FRAME, a.size);
    EXPECT_INT(1, a.mapped);
}

/* Memory that is not the driver's is no error here, as it is for one attribute. */
static void attributes_of_pageable_memory(void)
{
    CUdeviceptr pages = (CUdeviceptr)(uintptr_t)make_pages(4096);
    struct answers a;
    EXPECT(OK, ask_all(&a, pages));
    CHECK(a.context == NULL);
    EXPECT_INT(0, a.type);
    EXPECT_INT(0, a.device);
    CHECK(a.host == pages);
    EXPECT_INT(-2, a.ordinal);
    EXPECT_INT(0x5555555555555555, a.start); /* not written */
    EXPECT_INT(0x5555555555555555, a.size);
    EXPECT_INT(0, a.mapped);
}

static void attributes_of_address_0(void)
{
    struct answers a;
    EXPECT(OK, ask_all(&a, 0));
    EXPECT_INT(0, a.type);
    EXPECT_INT(-2, a.ordinal);
}

static void no_attributes_at_all(void)
{
    CUdeviceptr memory = make_memory(MiB);
    CUpointer_attribute asked = CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
    unsigned type = 77;
    void *values = &type;
    EXPECT(INVALID_VALUE, more.cuPointerGetAttributes(0, &asked, &values, memory));
    EXPECT_INT(77, type);
    EXPECT(INVALID_VALUE, more.cuPointerGetAttributes(1, NULL, &values, memory));
    EXPECT(INVALID_VALUE, more.cuPointerGetAttributes(1, &asked, NULL, memory));
}

static void attributes_that_are_none(void)
{
    CUdeviceptr memory = make_memory(MiB);
    CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUpointer_attribute)1000};
    unsigned type = 77;
    unsigned long long other[4] = {77};
    void *values[] = {&type, other};
    EXPECT(INVALID_VALUE, more.cuPointerGetAttributes(2, asked, values, memory));
}

/* ---- pinned memory --------------------------------------------------------------------------- */

static void pinned_memory_is_at_the_same_address_for_the_gpu(void)
{
    char *pinned = make_pinned(64 * KiB), *pages = make_pages(64 * KiB);
    CUdeviceptr found = 0;
    EXPECT(OK, more.cuMemHostGetDevicePointer(&found, pinned, 0));
    CHECK(found == (CUdeviceptr)(uintptr_t)pinned);
    EXPECT(OK, more.cuMemHostGetDevicePointer(&found, pinned + 77, 0));
    CHECK(found == (CUdeviceptr)(uintptr_t)pinned + 77);
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(&found, pinned, 1));
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(&found, pages, 0));
    REQUIRE(cu.cuMemHostRegister(pages, 64 * KiB, 0));
    EXPECT(OK, more.cuMemHostGetDevicePointer(&found, pages + 5, 0));
    CHECK(found == (CUdeviceptr)(uintptr_t)pages + 5);
    REQUIRE(cu.cuMemHostUnregister(pages));
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(&found, pages, 0));
    REQUIRE(cu.cuMemFreeHost(pinned));
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(&found, pinned, 0));
}

static void device_pointers_of_and_into_nothing(void)
{
    char *pinned = make_pinned(4096);
    CUdeviceptr found = 0;
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(&found, NULL, 0));
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(NULL, pinned, 0));
}

static void device_memory_has_no_device_pointer(void)
{
    CUdeviceptr memory = make_memory(4096), found = 0;
    EXPECT(INVALID_VALUE, more.cuMemHostGetDevicePointer(&found, (void *)(uintptr_t)memory, 0));
}

/* PORTABLE is forgotten, DEVICEMAP goes without saying. */
static void flags_of_pinned_memory(void)
{
    for (unsigned flags = 0; flags < 8; flags++) {
        unsigned kept = (flags & CU_MEMHOSTALLOC_WRITECOMBINED) | CU_MEMHOSTALLOC_DEVICEMAP;
        void *pinned = NULL;
        unsigned found = 99;
        REQUIRE(cu.cuMemHostAlloc(&pinned, 4096, flags));
        EXPECT(OK, more.cuMemHostGetFlags(&found, pinned));
        EXPECT_INT(kept, found);
        EXPECT(OK, more.cuMemHostGetFlags(&found, (char *)pinned + 100));
        EXPECT_INT(kept, found);
    }
}

static void flags_of_registered_memory(void)
{
    char *pages = make_pages(4096);
    unsigned found = 99;
    REQUIRE(cu.cuMemHostRegister(pages, 4096, CU_MEMHOSTREGISTER_PORTABLE));
    EXPECT(OK, more.cuMemHostGetFlags(&found, pages));
}

static void flags_of_what_is_not_pinned(void)
{
    char *pages = make_pages(4096), *pinned = make_pinned(4096);
    CUdeviceptr memory = make_memory(4096);
    unsigned found = 99;
    EXPECT(INVALID_VALUE, more.cuMemHostGetFlags(&found, pages));
    EXPECT(INVALID_VALUE, more.cuMemHostGetFlags(&found, (void *)(uintptr_t)memory));
    EXPECT(INVALID_VALUE, more.cuMemHostGetFlags(&found, NULL));
    EXPECT(INVALID_VALUE, more.cuMemHostGetFlags(NULL, pinned));
}

static void ask_about_pinned_memory(void *data)
{
    CUdeviceptr found = 0;
    unsigned flags = 99;
    EXPECT(INVALID_CONTEXT, more.cuMemHostGetDevicePointer(&found, data, 0));
    EXPECT(INVALID_CONTEXT, more.cuMemHostGetFlags(&flags, data));
}

static void pinned_memory_without_a_context(void)
{
    in_thread(ask_about_pinned_memory, make_pinned(4096));
}

const suite_case address_cases[] = {
    CASE(ranges_of_cuMemAlloc_memory),
    CASE(ranges_of_frames),
    CASE(ranges_of_pinned_memory),
    CASE(ranges_of_nothing),
    CASE(ranges_without_a_context),
    CASE(attributes_of_cuMemAlloc_memory),
    CASE(attributes_of_pinned_memory),
    CASE(attributes_of_frames),
    CASE(attributes_of_pageable_memory),
    CASE(attributes_of_address_0),
    CASE(no_attributes_at_all),
    CASE(attributes_that_are_none),
    CASE(pinned_memory_is_at_the_same_address_for_the_gpu),
    CASE(device_pointers_of_and_into_nothing),
    CASE(device_memory_has_no_device_pointer),
    CASE(flags_of_pinned_memory),
    CASE(flags_of_registered_memory),
    CASE(flags_of_what_is_not_pinned),
    CASE(pinned_memory_without_a_context),
    CASE_END,
};

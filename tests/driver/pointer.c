/*
 * What the driver says of a pointer, for every kind of memory.
 *
 * An answer is written as text: a value, "here" for the pointer itself, "start" and "start+N" for
 * the range's first byte, "!N" for a code. So addresses compare between drivers.
 */
#include <stdio.h>
#include <string.h>

#include "suite.h"

enum { QUESTIONS = 8 };

static const struct {
    CUpointer_attribute attribute;
    const char *name;
} questions[QUESTIONS] = {
    {CU_POINTER_ATTRIBUTE_CONTEXT, "context"},
    {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, "memory type"},
    {CU_POINTER_ATTRIBUTE_DEVICE_POINTER, "device pointer"},
    {CU_POINTER_ATTRIBUTE_HOST_POINTER, "host pointer"},
    {CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, "device ordinal"},
    {CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, "range start"},
    {CU_POINTER_ATTRIBUTE_RANGE_SIZE, "range size"},
    {CU_POINTER_ATTRIBUTE_MAPPED, "mapped"},
};

/* Ask one question of `address`, which lies in memory that begins at `start`. */
static void answer(char *text, size_t length, CUpointer_attribute attribute, CUdeviceptr address,
                   CUdeviceptr start)
{
    union {
        int number;
        bool truth;
        size_t size;
        CUdeviceptr pointer;
        CUcontext context;
    } value;
    memset(&value, 0, sizeof value);
    CUresult code = cu.cuPointerGetAttribute(&value, attribute, address);
    if (code != CUDA_SUCCESS) {
        snprintf(text, length, "!%d", (int)code);
        return;
    }
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        snprintf(text, length, "%s",
                 value.context == context ? "ours" : (value.context ? "another" : "none"));
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        if (value.pointer == start) {
            snprintf(text, length, "start");
        } else if (value.pointer == address) {
            snprintf(text, length, "here");
        } else {
            snprintf(text, length, "start%+lld", (long long)(value.pointer - start));
        }
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        snprintf(text, length, "%zu", value.size);
        break;
    case CU_POINTER_ATTRIBUTE_MAPPED:
        snprintf(text, length, "%d", value.truth ? 1 : 0);
        break;
    default:
        snprintf(text, length, "%d", value.number);
    }
}

static void interrogate(const char *kind, CUdeviceptr address, CUdeviceptr start,
                        const char *const expected[QUESTIONS])
{
    for (size_t i = 0; i < QUESTIONS; i++) {
        char got[64], what[96];
        answer(got, sizeof got, questions[i].attribute, address, start);
        snprintf(what, sizeof what, "%s of %s", questions[i].name, kind);
        suite_expect_text(HERE, what, expected[i], got);
    }
}

#define ANSWERS(...) ((const char *const[QUESTIONS]){__VA_ARGS__})

/* What a pointer that the driver does not know gets to every question. */
#define UNKNOWN ANSWERS("!1", "!1", "!1", "!1", "!1", "!1", "!1", "!1")

static CUdeviceptr address_of(const void *pointer)
{
    return (CUdeviceptr)(uintptr_t)pointer;
}

static void pointers_into_pinned_memory(void)
{
    CUdeviceptr start = address_of(make_pinned(MiB));
    interrogate("pinned memory", start, start,
                ANSWERS("ours", "1", "start", "start", "0", "start", "1048576", "1"));
    interrogate("the middle of pinned memory", start + 5000, start,
                ANSWERS("ours", "1", "here", "here", "0", "start", "1048576", "1"));
    interrogate("the end of pinned memory", start + MiB, start, UNKNOWN);
}

static void pointers_into_registered_memory(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr start = address_of(pages);
    REQUIRE(cu.cuMemHostRegister(pages + 4096, 8192, 0));
    interrogate("registered memory", start + 4096, start,
                ANSWERS("ours", "1", "here", "here", "0", "here", "8192", "1"));
    interrogate("the middle of registered memory", start + 5000, start + 4096,
                ANSWERS("ours", "1", "here", "here", "0", "start", "8192", "1"));
    interrogate("before registered memory", start, start, UNKNOWN);
    REQUIRE(cu.cuMemHostUnregister(pages + 4096));
    interrogate("memory no longer registered", start + 4096, start, UNKNOWN);
}

static void pointers_into_an_unaligned_registration(void)
{
    char *pages = make_pages(64 * KiB);
    CUdeviceptr start = address_of(pages);
    REQUIRE(cu.cuMemHostRegister(pages + 100, 1000, 0));
    interrogate("an unaligned registration", start + 100, start,
                ANSWERS("ours", "1", "here", "here", "0", "here", "1000", "1"));
    interrogate("its page, before it", start, start, UNKNOWN);
    interrogate("its page, behind it", start + 1200, start, UNKNOWN);
}

static void pointers_into_pageable_memory(void)
{
    int local = 0;
    CUdeviceptr start = address_of(make_pages(64 * KiB));
    interrogate("pageable memory", start, start, UNKNOWN);
    interrogate("the stack", address_of(&local), address_of(&local), UNKNOWN);
}

static void pointers_into_cuMemAlloc_memory(void)
{
    CUdeviceptr start = make_memory(MiB);
    interrogate("device memory", start, start,
                ANSWERS("ours", "2", "start", "!1", "0", "start", "1048576", "1"));
    interrogate("the middle of device memory", start + 5000, start,
                ANSWERS("ours", "2", "here", "!1", "0", "start", "1048576", "1"));
    REQUIRE(cu.cuMemFree(start));
    interrogate("freed device memory", start, start, UNKNOWN);
}

static void pointers_into_small_cuMemAlloc_memory(void)
{
    CUdeviceptr start = make_memory(1000);
    interrogate("little device memory", start, start,
                ANSWERS("ours", "2", "start", "!1", "0", "start", "1000", "1"));
}

/* The range is the reservation, however it is filled. */
static void pointers_into_mapped_frames(void)
{
    CUdeviceptr start = reserve(8 * FRAME);
    map_released_frame(start, FRAME);
    map_released_frame(start + FRAME, 2 * FRAME);
    interrogate("a frame", start, start,
                ANSWERS("none", "2", "start", "!1", "0", "start", "16777216", "1"));
    interrogate("the middle of the next frame", start + 2 * FRAME + 5, start + FRAME,
                ANSWERS("none", "2", "here", "!1", "0", "start-2097152", "16777216", "1"));
    map(start + 4 * FRAME, FRAME, create(FRAME));
    interrogate("a frame without access", start + 4 * FRAME, start + 4 * FRAME,
                ANSWERS("none", "2", "!1", "!1", "0", "start-8388608", "16777216", "1"));
    REQUIRE(cu.cuMemUnmap(start, FRAME));
    interrogate("an unmapped frame", start, start, UNKNOWN);
}

static void pointers_into_reserved_addresses(void)
{
    CUdeviceptr start = reserve(8 * FRAME);
    interrogate("reserved addresses", start, start, UNKNOWN);
    interrogate("the middle of reserved addresses", start + FRAME + 9, start, UNKNOWN);
    REQUIRE(cu.cuMemAddressFree(start, 8 * FRAME));
    interrogate("addresses given back", start, start, UNKNOWN);
}

static void pointers_to_nowhere(void)
{
    interrogate("NULL", 0, 0, UNKNOWN);
    interrogate("a small number", 0x123456, 0x123456, UNKNOWN);
    interrogate("a large number", ~0ull - 4095, ~0ull - 4095, UNKNOWN);
}

static void pointer_questions_refuse_nonsense(void)
{
    CUdeviceptr memory = make_memory(4096);
    int value = 77;
    EXPECT(INVALID_VALUE, cu.cuPointerGetAttribute(NULL, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory));
    EXPECT(INVALID_VALUE, cu.cuPointerGetAttribute(&value, (CUpointer_attribute)0, memory));
    EXPECT(INVALID_VALUE, cu.cuPointerGetAttribute(&value, (CUpointer_attribute)1000, memory));
}

const suite_case pointer_cases[] = {
    CASE(pointers_into_pinned_memory),
    CASE(pointers_into_registered_memory),
    CASE(pointers_into_an_unaligned_registration),
    CASE(pointers_into_pageable_memory),
    CASE(pointers_into_cuMemAlloc_memory),
    CASE(pointers_into_small_cuMemAlloc_memory),
    CASE(pointers_into_mapped_frames),
    CASE(pointers_into_reserved_addresses),
    CASE(pointers_to_nowhere),
    CASE(pointer_questions_refuse_nonsense),
    CASE_END,
};

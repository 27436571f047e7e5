/*
 * Each way to break a program that moves memory under running work is reported, every time, and the
 * right program next to it never is.
 *
 * A scenario is run with seeds 1 to 1,000 (100 with a sanitizer; or the first argument): sizes,
 * places, kinds of work, other work around it, the time that passes and the way of waiting differ
 * from seed to seed. Time passing makes no hazard go away, and luck plays no part.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "scale.h"
#include "sim_kit.h"

typedef struct scene {
    kit k;
    dice d;
    bool wrong; /* leave out what would make it right */
    CUstream a, b;
    CUdeviceptr page, other;
    size_t offset, bytes; /* within the page */
    unsigned char *pinned;
} scene;

/* ---- props ------------------------------------------------------------------------------------ */

/* Work that touches nothing of interest, before, between and behind the rest. */
static void noise(scene *s, CUstream stream)
{
    for (unsigned i = below(&s->d, 4); i > 0; i--) {
        if (below(&s->d, 2) == 0) {
            OK(s->k.driver.cuMemsetD8Async(s->other, 1, 4096, stream));
            OK(s->k.driver.cuStreamSynchronize(stream));
        } else {
            kit_kernel("noise", stream, 0, 0, EBBSIM_READ);
        }
    }
    if (below(&s->d, 3) == 0) {
        ebbsim_pass(100000); /* modelled work is long over by then; nobody has looked */
    }
}

/* One of the ways to use memory, on `stream`; returns the call's name. */
static const char *touch(scene *s, CUstream stream, CUdeviceptr at, bool write)
{
    unsigned kind = below(&s->d, 3);
    if (kind == 0) {
        kit_kernel("kernel", stream, at, s->bytes, write ? EBBSIM_WRITE : EBBSIM_READ);
        return "kernel";
    }
    if (!write) {
        OK(s->k.driver.cuMemcpyDtoHAsync(s->pinned, at, s->bytes, stream));
        return "cuMemcpyDtoHAsync";
    }
    if (kind == 1) {
        OK(s->k.driver.cuMemsetD8Async(at, 3, s->bytes, stream));
        return "cuMemsetD8Async";
    }
    OK(s->k.driver.cuMemcpyHtoDAsync(at, s->pinned, s->bytes, stream));
    return "cuMemcpyHtoDAsync";
}

/* One of the ways for the host to wait for a stream. */
static void wait_for(scene *s, CUstream stream)
{
    unsigned way = below(&s->d, 4);
    CUevent event = NULL;
    OK(s->k.driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(way == 3 ? s->k.driver.cuCtxRecordEvent(s->k.context[0], event)
                : s->k.driver.cuEventRecord(event, stream));
    if (way == 0) {
        OK(s->k.driver.cuStreamSynchronize(stream));
    } else if (way == 1) {
        OK(s->k.driver.cuEventSynchronize(event));
    } else {
        while (s->k.driver.cuEventQuery(event) == CUDA_ERROR_NOT_READY) {
        }
    }
    OK(s->k.driver.cuEventDestroy(event));
}

/* ---- what is expected ------------------------------------------------------------------------- */

/* Exactly one report of this kind whose sides are these calls; in the right program, none at all. */
static void expect(scene *s, ebbsim_kind kind, const char *first, const char *second)
{
    unsigned long count = 0;
    ebbsim_hazard h, found;
    memset(&found, 0, sizeof found);
    for (unsigned long i = 0; ebbsim_hazard_get(i, &h) == 0; i++) {
        if (h.kind == kind) {
            found = h;
            count++;
        } else {
            FAIL("another hazard: %s", h.text);
        }
    }
    CHECK_EQ(count, s->wrong ? 1 : 0);
    if (s->wrong && count == 1) {
        CHECK_STR(found.first.call, first);
        CHECK_STR(found.second.call, second);
        CHECK_HAS(found.text, first);
        CHECK_HAS(found.text, second);
    }
    const char *books = ebbsim_check();
    if (books != NULL) {
        FAIL("%s", books);
    }
}

/* ---- the scenarios ---------------------------------------------------------------------------- */

static void unmap_while_work_touches_the_page(scene *s)
{
    noise(s, s->a);
    const char *call = touch(s, s->a, s->page + s->offset, below(&s->d, 2));
    noise(s, s->b);
    if (!s->wrong) {
        wait_for(s, s->a);
    }
    OK(s->k.driver.cuMemUnmap(s->page, PAGE));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemUnmap");
}

static void fence_on_the_wrong_stream(scene *s)
{
    const char *call = touch(s, s->a, s->page + s->offset, below(&s->d, 2));
    noise(s, s->b);
    CUevent fence = NULL;
    OK(s->k.driver.cuEventCreate(&fence, CU_EVENT_DISABLE_TIMING));
    OK(s->k.driver.cuEventRecord(fence, s->wrong ? s->b : s->a));
    OK(s->k.driver.cuEventSynchronize(fence));
    OK(s->k.driver.cuMemUnmap(s->page, PAGE));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemUnmap");
}

/* One event of the whole context stands for both streams; an event of one of them does not. */
static void fence_of_one_stream_where_the_contexts_is_needed(scene *s)
{
    size_t half = s->bytes / 2;
    const char *call = "kernel";
    kit_kernel("other", s->b, s->page + s->offset, half, EBBSIM_READ);
    kit_kernel(call, s->a, s->page + s->offset + half, half, EBBSIM_WRITE);
    noise(s, s->b);
    CUevent fence = NULL;
    OK(s->k.driver.cuEventCreate(&fence, CU_EVENT_DISABLE_TIMING));
    OK(s->wrong ? s->k.driver.cuEventRecord(fence, s->b)
                : s->k.driver.cuCtxRecordEvent(s->k.context[0], fence));
    OK(s->k.driver.cuEventSynchronize(fence));
    OK(s->k.driver.cuMemUnmap(s->page, PAGE));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemUnmap");
    OK(s->k.driver.cuEventDestroy(fence));
}

/* What is queued after the context's event is not covered by it. */
static void work_behind_the_contexts_event(scene *s)
{
    CUevent fence = NULL;
    OK(s->k.driver.cuEventCreate(&fence, CU_EVENT_DISABLE_TIMING));
    if (s->wrong) {
        OK(s->k.driver.cuCtxRecordEvent(s->k.context[0], fence));
    }
    const char *call = touch(s, s->a, s->page + s->offset, below(&s->d, 2));
    if (!s->wrong) {
        OK(s->k.driver.cuCtxRecordEvent(s->k.context[0], fence));
    }
    OK(s->k.driver.cuEventSynchronize(fence));
    OK(s->k.driver.cuMemUnmap(s->page, PAGE));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemUnmap");
    OK(s->k.driver.cuEventDestroy(fence));
}

/* A stream waits for a word, or is to write one, in memory that is taken away. */
static void word_taken_away_before_its_turn(scene *s)
{
    bool write = below(&s->d, 2) == 0;
    CUdeviceptr word = s->page + s->offset / 4 * 4;
    const char *call = write ? "cuStreamWriteValue32" : "cuStreamWaitValue32";
    noise(s, s->a);
    OK(write ? s->k.driver.cuStreamWriteValue32(s->a, word, 1, 0)
             : s->k.driver.cuStreamWaitValue32(s->a, word, 0, CU_STREAM_WAIT_VALUE_GEQ));
    if (!s->wrong) {
        wait_for(s, s->a);
    }
    OK(s->k.driver.cuMemUnmap(s->page, PAGE));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemUnmap");
}

/* The kernel that uses the memory runs at once, as PyTorch's operators do, and sees what is there. */
static void use_not_ordered_after_the_copy_that_fills(scene *s)
{
    memset(s->pinned, 0x55, s->bytes);
    OK(s->k.driver.cuMemcpyHtoDAsync(s->page + s->offset, s->pinned, s->bytes, s->a));
    if (below(&s->d, 3) == 0) {
        ebbsim_pass(100000);
    }
    if (!s->wrong) {
        kit_order(&s->k, s->a, s->b);
    }
    ebbsim_range range = {s->page + s->offset, s->bytes, EBBSIM_READ};
    ebbsim_work work = {
        .size = sizeof work, .name = "layer", .ranges = &range, .range_count = 1, .now = 1};
    OK(ebbsim_launch(&work, s->b));
    const unsigned char *seen = (const unsigned char *)(uintptr_t)(s->page + s->offset);
    CHECK_EQ(seen[below(&s->d, (unsigned)s->bytes)], s->wrong ? EBBSIM_PATTERN : 0x55);
    expect(s, EBBSIM_HAZARD_RACE, "cuMemcpyHtoDAsync", "layer");
}

static void staging_buffer_refilled_before_its_copy_ran(scene *s)
{
    memset(s->pinned, 0x11, s->bytes);
    OK(s->k.driver.cuMemcpyHtoDAsync(s->page + s->offset, s->pinned, s->bytes, s->a));
    bool forced = below(&s->d, 2) == 0;
    if (forced) { /* the bytes have moved already, but who could know */
        ebbsim_work work = {.size = sizeof work, .name = "layer", .now = 1};
        OK(ebbsim_launch(&work, s->a));
    }
    if (below(&s->d, 3) == 0) {
        ebbsim_pass(100000);
    }
    if (!s->wrong) {
        wait_for(s, s->a);
    }
    memset(s->pinned + below(&s->d, (unsigned)s->bytes), 0x22, 1);
    OK(s->k.driver.cuStreamSynchronize(s->a));
    const unsigned char *filled = (const unsigned char *)(uintptr_t)(s->page + s->offset);
    bool wrong_bytes = memcmp(filled, s->pinned, s->bytes) == 0;
    CHECK_EQ(wrong_bytes, s->wrong && !forced);
    expect(s, EBBSIM_HAZARD_SOURCE, "cuMemcpyHtoDAsync", "the host");
}

static void copy_out_not_ordered_after_the_last_write(scene *s)
{
    const char *call = touch(s, s->a, s->page + s->offset, true);
    noise(s, s->b);
    if (!s->wrong) {
        if (below(&s->d, 2) == 0) {
            kit_order(&s->k, s->a, s->b);
        } else {
            wait_for(s, s->a);
        }
    }
    unsigned char *out = kit_host(&s->k, s->bytes, 0);
    OK(s->k.driver.cuMemcpyDtoHAsync(out, s->page + s->offset, s->bytes, s->b));
    expect(s, EBBSIM_HAZARD_RACE, call, "cuMemcpyDtoHAsync");
}

/* The frame is behind two pages for a moment: two addresses, one memory. */
static void frame_given_to_another_page_too_early(scene *s)
{
    CUmemGenericAllocationHandle frame = kit_frame(&s->k, 0);
    CUdeviceptr old = kit_map(&s->k, 20, frame, 0);
    const char *call = touch(s, s->a, old + s->offset, below(&s->d, 2));
    noise(s, s->b);
    if (!s->wrong) {
        wait_for(s, s->a);
    }
    CUdeviceptr new = kit_map(&s->k, 30, frame, 0);
    OK(s->k.driver.cuMemsetD8Async(new + s->offset, 9, s->bytes, s->b));
    expect(s, EBBSIM_HAZARD_RACE, call, "cuMemsetD8Async");
    ebbsim_hazard h;
    if (s->wrong && ebbsim_hazard_get(0, &h) == 0) {
        CHECK_EQ(h.first.address, old + s->offset);
        CHECK_EQ(h.second.address, new + s->offset);
    }
}

static void memory_of_another_device_without_access(scene *s)
{
    OK(s->k.driver.cuCtxSetCurrent(s->k.context[1]));
    CUstream stream = kit_stream(&s->k);
    if (!s->wrong) {
        kit_access(&s->k, s->page, 1);
    }
    kit_kernel("peer", stream, s->page + s->offset, s->bytes, EBBSIM_READ + (int)below(&s->d, 2));
    CHECK_EQ(s->k.driver.cuStreamSynchronize(stream),
             s->wrong ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
    expect(s, EBBSIM_HAZARD_ACCESS, "memory of device 0", "peer");
    ebbsim_hazard h;
    if (s->wrong && ebbsim_hazard_get(0, &h) == 0) {
        CHECK_EQ(h.first.device, 0);
        CHECK_EQ(h.second.device, 1);
    }
}

/* A later use of the frame by its other address does not hide the earlier one. */
static void unmap_of_one_of_two_addresses(scene *s)
{
    CUmemGenericAllocationHandle frame = kit_frame(&s->k, 0);
    CUdeviceptr one = kit_map(&s->k, 20, frame, 0), other = kit_map(&s->k, 30, frame, 0);
    const char *call = touch(s, s->a, one + s->offset, below(&s->d, 2));
    if (!s->wrong) {
        wait_for(s, s->a);
    }
    touch(s, s->a, other + s->offset, below(&s->d, 2));
    OK(s->k.driver.cuMemUnmap(one, PAGE));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemUnmap");
}

/* Rights are taken from under a kernel that is still using them. */
static void access_taken_away_under_work(scene *s)
{
    const char *call = touch(s, s->a, s->page + s->offset, true);
    noise(s, s->b);
    if (!s->wrong) {
        wait_for(s, s->a);
    }
    CUmemAccessDesc less = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_NONE};
    OK(s->k.driver.cuMemSetAccess(s->page, PAGE, &less, 1));
    expect(s, EBBSIM_HAZARD_UNMAP, call, "cuMemSetAccess");
}

static void kernel_on_memory_that_is_not_mapped(scene *s)
{
    size_t bytes = s->wrong ? PAGE + 1 + below(&s->d, PAGE) : PAGE;
    kit_kernel("stray", s->a, s->page, bytes, EBBSIM_READ);
    CHECK_EQ(s->k.driver.cuStreamSynchronize(s->a),
             s->wrong ? CUDA_ERROR_ILLEGAL_ADDRESS : CUDA_SUCCESS);
    expect(s, EBBSIM_HAZARD_UNMAPPED, "nothing", "stray");
}

/* A file's pages are pinned to be read, and are the program's own. */
static void a_private_file_is_pinned(scene *s)
{
    char name[] = "/tmp/ebbtide_hazard.XXXXXX";
    int file = mkstemp(name);
    REQUIRE(file >= 0 && !ftruncate(file, (off_t)(s->offset + s->bytes)));
    unlink(name);
    char *memory =
        mmap(NULL, s->offset + s->bytes, PROT_READ, s->wrong ? MAP_PRIVATE : MAP_SHARED, file, 0);
    close(file);
    REQUIRE(memory != MAP_FAILED);
    noise(s, s->b);
    OK(s->k.driver.cuMemHostRegister(memory + s->offset, s->bytes, CU_MEMHOSTREGISTER_READ_ONLY));
    expect(s, EBBSIM_HAZARD_PRIVATE, "a private mapping", "cuMemHostRegister");
    OK(s->k.driver.cuMemHostUnregister(memory + s->offset));
    munmap(memory, s->offset + s->bytes);
}

/* ---- all of them, over and over --------------------------------------------------------------- */

static void play(void (*scenario)(scene *), uint64_t seed, bool wrong)
{
    scene s = {.d = {seed}, .wrong = wrong};
    kit_start(&s.k, 2, 256 * (uint64_t)MIB, (int)(seed % 2));
    s.page = kit_page(&s.k, 4);
    s.other = kit_page(&s.k, 10);
    s.a = kit_stream(&s.k);
    s.b = kit_stream(&s.k);
    s.bytes = 1 + below(&s.d, 64 << 10);
    s.offset = below(&s.d, (unsigned)(PAGE - s.bytes));
    s.pinned = kit_host(&s.k, 64 << 10, 7);
    scenario(&s);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*scenario)(scene *);
    } scenarios[] = {
#define SCENARIO(name) {#name, name}
        SCENARIO(unmap_while_work_touches_the_page),
        SCENARIO(fence_on_the_wrong_stream),
        SCENARIO(fence_of_one_stream_where_the_contexts_is_needed),
        SCENARIO(work_behind_the_contexts_event),
        SCENARIO(word_taken_away_before_its_turn),
        SCENARIO(use_not_ordered_after_the_copy_that_fills),
        SCENARIO(staging_buffer_refilled_before_its_copy_ran),
        SCENARIO(copy_out_not_ordered_after_the_last_write),
        SCENARIO(frame_given_to_another_page_too_early),
        SCENARIO(memory_of_another_device_without_access),
        SCENARIO(unmap_of_one_of_two_addresses),
        SCENARIO(access_taken_away_under_work),
        SCENARIO(kernel_on_memory_that_is_not_mapped),
        SCENARIO(a_private_file_is_pinned),
    };
    unsigned long seeds = argc > 1 ? strtoul(argv[1], NULL, 10) : SCALED(1000, 100);
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        unsigned long found = 0, silent = 0;
        for (unsigned long seed = 1; seed <= seeds; seed++) {
            int before = harness_failures;
            play(scenarios[i].scenario, seed, true);
            found += harness_failures == before;
            before = harness_failures;
            play(scenarios[i].scenario, seed, false);
            silent += harness_failures == before;
        }
        harness_tests++;
        printf("%s %-45s found in %lu of %lu, silent when right in %lu of %lu\n",
               found == seeds && silent == seeds ? "ok    " : "FAILED", scenarios[i].name, found,
               seeds, silent, seeds);
    }
    ebbsim_reset();
    return REPORT();
}

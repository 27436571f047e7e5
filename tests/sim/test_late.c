/*
 * Work has its effect as late as the rules allow: when something ordered after it needs it, or the
 * host has seen that it is over. Until then what it writes holds a pattern. A missing wait is then
 * wrong bytes every time.
 */
#include "sim_kit.h"

enum { BYTES = 4096 };

typedef struct scene {
    kit k;
    CUstream a, b;
    CUdeviceptr page, other;
    unsigned char *pinned;
} scene;

static void set(scene *s)
{
    kit_start(&s->k, 1, 256 * (uint64_t)MIB, 1);
    s->page = kit_page(&s->k, 0);
    s->other = kit_page(&s->k, 2);
    s->a = kit_stream(&s->k);
    s->b = kit_stream(&s->k);
    s->pinned = kit_host(&s->k, BYTES, 0x11);
    OK(s->k.driver.cuMemsetD8Async(s->page, 0x22, PAGE, s->a));
    OK(s->k.driver.cuMemsetD8Async(s->other, 0x33, PAGE, s->a));
    OK(s->k.driver.cuCtxSynchronize());
}

static const unsigned char *bytes_at(CUdeviceptr address)
{
    return (const unsigned char *)(uintptr_t)address;
}

/* All of `bytes` bytes are `value`. */
static bool holds(const void *at, size_t bytes, int value)
{
    const unsigned char *byte = at;
    for (size_t i = 0; i < bytes; i++) {
        if (byte[i] != value) {
            return false;
        }
    }
    return true;
}

static bool page_holds(CUdeviceptr address, int value)
{
    return holds(bytes_at(address), BYTES, value);
}

static void ready_kernel(CUstream stream, CUdeviceptr address, size_t bytes, int access)
{
    ebbsim_range range = {address, bytes, access};
    ebbsim_work work = {
        .size = sizeof work, .name = "ready", .ranges = &range, .range_count = bytes > 0, .now = 1};
    OK(ebbsim_launch(&work, stream));
}

static void nothing(void *data)
{
    (void)data;
}

static uint64_t pending(void)
{
    ebbsim_census c = {.size = sizeof c};
    ebbsim_census_take(&c);
    return c.pending_works;
}

/* ---- until it is observed ---------------------------------------------------------------------- */

static void a_destination_holds_the_pattern_until_the_host_has_waited(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    CHECK(holds(bytes_at(s.page + BYTES), BYTES, 0x22)); /* and nothing else does */
    OK(s.k.driver.cuMemcpyDtoDAsync(s.page + 8 * BYTES, s.other, BYTES, s.a));
    CHECK(page_holds(s.page + 8 * BYTES, EBBSIM_PATTERN));
    OK(s.k.driver.cuMemsetD8Async(s.other + 8 * BYTES, 0x44, BYTES, s.a));
    CHECK(page_holds(s.other + 8 * BYTES, EBBSIM_PATTERN));
    ebbsim_pass(1000000000); /* all of it is over by now, but who could know */
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    CHECK(pending() >= 3);
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(page_holds(s.page, 0x11));
    CHECK(page_holds(s.page + 8 * BYTES, 0x33));
    CHECK(page_holds(s.other + 8 * BYTES, 0x44));
    CHECK_EQ(pending(), 0);
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_download_holds_the_pattern_too(void)
{
    scene s;
    set(&s);
    CUevent event = NULL;
    OK(s.k.driver.cuEventCreate(&event, 0));
    OK(s.k.driver.cuMemcpyDtoHAsync(s.pinned, s.page, BYTES, s.a));
    OK(s.k.driver.cuEventRecord(event, s.a));
    CHECK(holds(s.pinned, BYTES, EBBSIM_PATTERN));
    CHECK_EQ(s.k.driver.cuEventQuery(event), CUDA_ERROR_NOT_READY);
    CHECK(holds(s.pinned, BYTES, EBBSIM_PATTERN)); /* asked too early: nothing learnt */
    ebbsim_pass(1000000);
    CHECK_EQ(s.k.driver.cuEventQuery(event), CUDA_SUCCESS);
    CHECK(holds(s.pinned, BYTES, 0x22));
}

static void waiting_for_another_stream_shows_nothing(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    ebbsim_pass(1000000);
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    OK(s.k.driver.cuCtxSynchronize());
    CHECK(page_holds(s.page, 0x11));
}

static void a_destroyed_streams_work_happens_all_the_same(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    OK(s.k.driver.cuStreamDestroy(s.a));
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    OK(s.k.driver.cuCtxSynchronize());
    CHECK(page_holds(s.page, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_kernel_that_reads_what_it_writes_finds_it(void)
{
    for (int late = 0; late < 2; late++) {
        scene s;
        set(&s);
        ebbsim_range range = {s.page, BYTES, EBBSIM_READ | EBBSIM_WRITE};
        ebbsim_work work = {.size = sizeof work,
                            .ranges = &range,
                            .range_count = 1,
                            .function = late ? nothing : NULL,
                            .now = !late};
        OK(ebbsim_launch(&work, s.a));
        CHECK(page_holds(s.page, 0x22));
    }
}

/* ---- sources ----------------------------------------------------------------------------------- */

static void a_pinned_source_is_read_late(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    s.pinned[100] = 0x99;
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK_EQ(bytes_at(s.page)[100], 0x99);
    CHECK_EQ(bytes_at(s.page)[101], 0x11);
    ebbsim_hazard h;
    CHECK_EQ(ebbsim_hazards(), 1);
    CHECK(ebbsim_hazard_get(0, &h) == 0 && h.kind == EBBSIM_HAZARD_SOURCE);
}

static void a_pageable_source_is_read_at_once(void)
{
    scene s;
    set(&s);
    unsigned char pageable[BYTES];
    memset(pageable, 0x77, BYTES);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, pageable, BYTES, s.a));
    memset(pageable, 0, BYTES);
    CHECK(page_holds(s.page, EBBSIM_PATTERN)); /* written late, though */
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(page_holds(s.page, 0x77));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_copy_to_pageable_memory_is_there_when_the_call_is_back(void)
{
    scene s;
    set(&s);
    unsigned char pageable[BYTES];
    memset(pageable, 0, BYTES);
    OK(s.k.driver.cuMemsetD8Async(s.page, 0x55, BYTES, s.a));
    OK(s.k.driver.cuMemcpyDtoHAsync(pageable, s.page, BYTES, s.a));
    CHECK(holds(pageable, BYTES, 0x55));
    CHECK(page_holds(s.page, 0x55)); /* the host has seen all that was before it */
}

/* Out to a pinned buffer and in again from it, without the host looking: no source has changed. Nor
   when the buffer is filled once more behind that. */
static void a_buffer_filled_by_one_copy_may_be_read_by_the_next(void)
{
    for (int again = 0; again < 2; again++) {
        scene s;
        set(&s);
        OK(s.k.driver.cuMemcpyDtoHAsync(s.pinned, s.page, BYTES, s.a));
        kit_order(&s.k, s.a, s.b);
        OK(s.k.driver.cuMemcpyHtoDAsync(s.other, s.pinned, BYTES, s.b));
        if (again) {
            kit_order(&s.k, s.b, s.a);
            OK(s.k.driver.cuMemcpyDtoHAsync(s.pinned, s.page + BYTES, BYTES, s.a));
        }
        OK(s.k.driver.cuCtxSynchronize());
        CHECK(page_holds(s.other, 0x22));
        CHECK_EQ(ebbsim_hazards(), 0);
    }
}

/* ---- forced by what is ordered after ------------------------------------------------------------ */

static void a_kernel_that_runs_at_once_finds_what_it_is_ordered_after(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    OK(s.k.driver.cuMemsetD8Async(s.other, 0x66, BYTES, s.a));
    kit_order(&s.k, s.a, s.b);
    ready_kernel(s.b, s.page, BYTES, EBBSIM_READ);
    CHECK(page_holds(s.page, 0x11));
    CHECK(page_holds(s.other, 0x66)); /* also what it does not name: it might follow a pointer */
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* The same without a kernel: for whoever reads first and says afterwards what was read. */
static void a_stream_can_be_caught_up_with(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    OK(ebbsim_catch_up(s.b));
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    kit_order(&s.k, s.a, s.b);
    OK(ebbsim_catch_up(s.b));
    CHECK(page_holds(s.page, 0x11));
    s.pinned[0] = 0x12; /* the host has not observed anything by that */
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK_EQ(ebbsim_hazards(), 1);
}

static void a_kernel_that_is_not_ordered_finds_the_pattern(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    ready_kernel(s.b, s.page, BYTES, EBBSIM_READ);
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    CHECK_EQ(ebbsim_hazards(), 1);
}

static void an_overwritten_copy_has_gone_where_it_was_to_go_first(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemsetD8Async(s.page, 0x66, BYTES, s.a));
    OK(s.k.driver.cuMemcpyDtoDAsync(s.other, s.page, BYTES, s.a));
    OK(s.k.driver.cuMemsetD8Async(s.page, 0x77, BYTES, s.a)); /* the copy must have read by now */
    CHECK(page_holds(s.other, 0x66));
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(page_holds(s.page, 0x77));
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* A relay through two streams and a buffer: waiting for the end shows the whole way. */
static void a_chain_of_copies_happens_from_its_beginning(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    kit_order(&s.k, s.a, s.b);
    OK(s.k.driver.cuMemcpyDtoDAsync(s.other, s.page, BYTES, s.b));
    kit_order(&s.k, s.b, s.a);
    unsigned char *out = kit_host(&s.k, BYTES, 0);
    OK(s.k.driver.cuMemcpyDtoHAsync(out, s.other, BYTES, s.a));
    CHECK(page_holds(s.page, EBBSIM_PATTERN));
    CHECK(page_holds(s.other, EBBSIM_PATTERN));
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(holds(out, BYTES, 0x11));
    CHECK(page_holds(s.other, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* ---- functions of kernels ----------------------------------------------------------------------- */

static struct {
    int order[8];
    int count;
    int seen;
} log_of;

typedef struct note {
    int name;
    const unsigned char *looks_at;
} note;

static void write_down(void *data)
{
    const note *n = data;
    log_of.order[log_of.count++] = n->name;
    if (n->looks_at != NULL) {
        log_of.seen = *n->looks_at;
    }
}

static void launch_note(CUstream stream, note *n, CUdeviceptr address)
{
    ebbsim_range range = {address, BYTES, EBBSIM_READ};
    ebbsim_work work = {
        .size = sizeof work, .ranges = &range, .range_count = 1, .function = write_down, .data = n};
    OK(ebbsim_launch(&work, stream));
}

static void a_kernels_function_runs_once_and_late_and_in_order(void)
{
    scene s;
    set(&s);
    memset(&log_of, 0, sizeof log_of);
    note first = {1, NULL}, second = {2, bytes_at(s.page)}, third = {3, NULL};
    launch_note(s.a, &first, s.page);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.a));
    launch_note(s.a, &second, s.page);
    kit_order(&s.k, s.a, s.b);
    launch_note(s.b, &third, s.page);
    CHECK(log_of.count <= 1); /* the copy overwrites what the first one reads: that may force it */
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK_EQ(log_of.count, 3);
    CHECK(log_of.order[0] == 1 && log_of.order[1] == 2 && log_of.order[2] == 3);
    CHECK_EQ(log_of.seen, 0x11);
    OK(s.k.driver.cuCtxSynchronize());
    CHECK_EQ(log_of.count, 3);
}

static void what_was_never_observed_never_ran_when_all_is_forgotten(void)
{
    scene s;
    set(&s);
    memset(&log_of, 0, sizeof log_of);
    note only = {1, NULL};
    launch_note(s.a, &only, s.page);
    ebbsim_reset();
    CHECK_EQ(log_of.count, 0);
    CHECK_EQ(pending(), 0);
}

/* ---- the queue ---------------------------------------------------------------------------------- */

/* As on a GPU, a stream holds about a thousand entries: then the oldest have to happen. */
static void a_full_queue_lets_the_oldest_happen(void)
{
    scene s;
    set(&s);
    enum { WORKS = 1500 };
    for (int i = 0; i < WORKS; i++) {
        OK(s.k.driver.cuMemsetD8Async(s.page + (CUdeviceptr)i, 0x44, 1, s.a));
    }
    CHECK(pending() <= 1024);
    CHECK_EQ(bytes_at(s.page)[0], 0x44);
    CHECK_EQ(bytes_at(s.page)[WORKS - 1], EBBSIM_PATTERN);
    int changes = 0;
    for (int i = 1; i < WORKS; i++) {
        changes += bytes_at(s.page)[i] != bytes_at(s.page)[i - 1];
    }
    CHECK_EQ(changes, 1); /* the oldest, and no others */
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(holds(bytes_at(s.page), WORKS, 0x44));
    CHECK(ebbsim_check() == NULL);
}

/* ---- memory that goes away ---------------------------------------------------------------------- */

/* cuMemFree and cuMemFreeHost wait by themselves: nothing is cut off. */
static void freeing_lets_work_happen_first(void)
{
    scene s;
    set(&s);
    CUdeviceptr allocation = 0;
    OK(s.k.driver.cuMemAlloc(&allocation, BYTES));
    OK(s.k.driver.cuMemcpyDtoDAsync(allocation, s.page, BYTES, s.a));
    OK(s.k.driver.cuMemcpyDtoDAsync(s.other, allocation, BYTES, s.a));
    OK(s.k.driver.cuMemFree(allocation));
    CHECK(page_holds(s.other, 0x22));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.b));
    OK(s.k.driver.cuMemFreeHost(s.pinned));
    CHECK(page_holds(s.page, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* A hazard, but no crash: what is cut off has happened before. */
static void work_cut_off_by_an_unmap_is_reported_and_does_no_harm(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuMemcpyDtoHAsync(s.pinned, s.page, BYTES, s.a));
    ebbsim_pass(1000000);
    OK(s.k.driver.cuMemUnmap(s.page, PAGE));
    CHECK_EQ(ebbsim_hazards(), 1);
    OK(s.k.driver.cuCtxSynchronize());
    CHECK(holds(s.pinned, BYTES, 0x22));
    CHECK(ebbsim_check() == NULL);
}

int main(void)
{
    RUN(a_destination_holds_the_pattern_until_the_host_has_waited);
    RUN(a_download_holds_the_pattern_too);
    RUN(waiting_for_another_stream_shows_nothing);
    RUN(a_destroyed_streams_work_happens_all_the_same);
    RUN(a_kernel_that_reads_what_it_writes_finds_it);
    RUN(a_pinned_source_is_read_late);
    RUN(a_pageable_source_is_read_at_once);
    RUN(a_copy_to_pageable_memory_is_there_when_the_call_is_back);
    RUN(a_buffer_filled_by_one_copy_may_be_read_by_the_next);
    RUN(a_kernel_that_runs_at_once_finds_what_it_is_ordered_after);
    RUN(a_stream_can_be_caught_up_with);
    RUN(a_kernel_that_is_not_ordered_finds_the_pattern);
    RUN(an_overwritten_copy_has_gone_where_it_was_to_go_first);
    RUN(a_chain_of_copies_happens_from_its_beginning);
    RUN(a_kernels_function_runs_once_and_late_and_in_order);
    RUN(what_was_never_observed_never_ran_when_all_is_forgotten);
    RUN(a_full_queue_lets_the_oldest_happen);
    RUN(freeing_lets_work_happen_first);
    RUN(work_cut_off_by_an_unmap_is_reported_and_does_no_harm);
    ebbsim_reset();
    return REPORT();
}

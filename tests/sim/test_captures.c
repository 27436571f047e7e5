/*
 * Graphs: what is captured does not happen; what is replayed does, late like any work, as often as it
 * is replayed, and with the same hazards.
 */
#include "sim_kit.h"

enum { BYTES = 4096 };

typedef struct scene {
    kit k;
    CUstream a, b;
    CUdeviceptr page, other;
    unsigned char *in, *out;
    CUgraph graph;
    CUgraphExec exec;
} scene;

static void set(scene *s)
{
    kit_start(&s->k, 2, 256 * (uint64_t)MIB, 1);
    s->page = kit_page(&s->k, 0);
    s->other = kit_page(&s->k, 2);
    s->a = kit_stream(&s->k);
    s->b = kit_stream(&s->k);
    s->in = kit_host(&s->k, BYTES, 0x11);
    s->out = kit_host(&s->k, BYTES, 0);
    OK(s->k.driver.cuMemsetD8Async(s->page, 0x22, PAGE, s->a));
    OK(s->k.driver.cuMemsetD8Async(s->other, 0x33, PAGE, s->a));
    OK(s->k.driver.cuCtxSynchronize());
}

static void begin(scene *s)
{
    OK(s->k.driver.cuStreamBeginCapture(s->a, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}

static void end(scene *s)
{
    OK(s->k.driver.cuStreamEndCapture(s->a, &s->graph));
    OK(s->k.driver.cuGraphInstantiateWithFlags(&s->exec, s->graph, 0));
}

/* In, across, out: three copies, one after the other. */
static void capture_copies(scene *s)
{
    begin(s);
    OK(s->k.driver.cuMemcpyHtoDAsync(s->page, s->in, BYTES, s->a));
    OK(s->k.driver.cuMemcpyDtoDAsync(s->other, s->page, BYTES, s->a));
    OK(s->k.driver.cuMemcpyDtoHAsync(s->out, s->other, BYTES, s->a));
    end(s);
}

static bool holds(const void *at, int value)
{
    const unsigned char *byte = at;
    for (int i = 0; i < BYTES; i++) {
        if (byte[i] != value) {
            return false;
        }
    }
    return true;
}

static bool page_holds(CUdeviceptr address, int value)
{
    return holds((const void *)(uintptr_t)address, value);
}

/* The only hazard so far is of this kind, and names this call. */
static void expect_hazard(ebbsim_kind kind, const char *call)
{
    ebbsim_hazard h;
    CHECK_EQ(ebbsim_hazards(), 1);
    if (ebbsim_hazard_get(0, &h) == 0) {
        CHECK_EQ(h.kind, kind);
        CHECK_HAS(h.text, call);
    }
}

/* ---- replaying ----------------------------------------------------------------------------------- */

static void what_is_captured_does_not_happen(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuCtxSynchronize());
    CHECK(page_holds(s.page, 0x22));
    CHECK(page_holds(s.other, 0x33));
    CHECK(holds(s.out, 0));
    memset(s.in, 0x44, BYTES); /* nor is anybody reading */
    OK(s.k.driver.cuMemUnmap(s.page, PAGE));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void every_replay_moves_bytes(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    for (int value = 1; value <= 3; value++) {
        memset(s.in, value, BYTES);
        OK(s.k.driver.cuGraphLaunch(s.exec, value == 2 ? s.b : s.a));
        OK(s.k.driver.cuStreamSynchronize(value == 2 ? s.b : s.a));
        CHECK(holds(s.out, value));
        CHECK(page_holds(s.other, value));
    }
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_replay_is_late_like_any_work(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    ebbsim_pass(1000000000);
    CHECK(holds(s.out, EBBSIM_PATTERN));
    CHECK(page_holds(s.other, EBBSIM_PATTERN));
    CHECK_EQ(s.k.driver.cuStreamQuery(s.a), CUDA_SUCCESS);
    CHECK(holds(s.out, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_replay_takes_its_time_once_more(void)
{
    scene s;
    set(&s);
    CUevent from = NULL, to = NULL;
    float milliseconds = 0;
    OK(s.k.driver.cuEventCreate(&from, 0));
    OK(s.k.driver.cuEventCreate(&to, 0));
    ebbsim_work work = {.size = sizeof work, .nanoseconds = 3000000};
    begin(&s);
    OK(ebbsim_launch(&work, s.a));
    OK(ebbsim_launch(&work, s.a));
    end(&s);
    OK(s.k.driver.cuEventRecord(from, s.a));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    OK(s.k.driver.cuEventRecord(to, s.a));
    OK(s.k.driver.cuEventSynchronize(to));
    OK(s.k.driver.cuEventElapsedTime(&milliseconds, from, to));
    CHECK(milliseconds >= 6.0f && milliseconds < 6.1f);
}

static int ran[4];

static void note_run(void *data)
{
    ran[0]++;
    ran[ran[0] < 4 ? ran[0] : 3] = *(int *)data;
}

static void kernels_run_once_for_each_replay_and_in_order(void)
{
    scene s;
    set(&s);
    memset(ran, 0, sizeof ran);
    int one = 1, two = 2;
    ebbsim_work work = {.size = sizeof work, .function = note_run, .data = &one};
    begin(&s);
    OK(ebbsim_launch(&work, s.a));
    work.data = &two;
    OK(ebbsim_launch(&work, s.a));
    end(&s);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
    CHECK_EQ(ran[0], 0);
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK(ran[0] == 2 && ran[1] == 1 && ran[2] == 2);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK_EQ(ran[0], 6);
}

/* The second stream joins the capture by waiting, and the first waits for it in turn. */
static void a_graph_of_two_streams_is_replayed_whole(void)
{
    scene s;
    set(&s);
    begin(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.in, BYTES, s.a));
    kit_order(&s.k, s.a, s.b);
    OK(s.k.driver.cuMemcpyDtoDAsync(s.other, s.page, BYTES, s.b));
    kit_order(&s.k, s.b, s.a);
    OK(s.k.driver.cuMemcpyDtoHAsync(s.out, s.other, BYTES, s.a));
    end(&s);
    CHECK(page_holds(s.other, 0x33));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK(holds(s.out, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_graph_outlives_what_it_was_made_from(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuGraphDestroy(s.graph));
    OK(s.k.driver.cuStreamDestroy(s.a));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
    OK(s.k.driver.cuGraphExecDestroy(s.exec)); /* under way: what was launched goes on */
    OK(s.k.driver.cuStreamSynchronize(s.b));
    CHECK(holds(s.out, 0x11));
    CHECK_EQ(s.k.driver.cuGraphLaunch(s.exec, s.b), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(s.k.driver.cuGraphDestroy(s.graph), CUDA_ERROR_INVALID_VALUE);
    ebbsim_census c = {.size = sizeof c};
    ebbsim_census_take(&c);
    CHECK(c.graphs == 0 && c.captures == 0);
}

static void a_pageable_source_is_read_at_each_replay(void)
{
    scene s;
    set(&s);
    unsigned char *pageable = malloc(BYTES);
    REQUIRE(pageable != NULL);
    memset(pageable, 0x66, BYTES);
    begin(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, pageable, BYTES, s.a));
    end(&s);
    memset(pageable, 0x77, BYTES);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(page_holds(s.page, 0x77));
    free(pageable);
}

static void a_capture_that_fails_leaves_no_graph(void)
{
    scene s;
    set(&s);
    CUdeviceptr address = 0;
    CUgraph graph = (CUgraph)(uintptr_t)1;
    begin(&s);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.in, BYTES, s.a));
    CHECK_EQ(s.k.driver.cuMemAlloc(&address, BYTES), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    CHECK_EQ(s.k.driver.cuMemcpyHtoDAsync(s.page, s.in, BYTES, s.a),
             CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK_EQ(s.k.driver.cuStreamEndCapture(s.a, &graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
    CHECK(graph == NULL);
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.in, BYTES, s.a)); /* the stream works again */
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(page_holds(s.page, 0x11));
    ebbsim_census c = {.size = sizeof c};
    ebbsim_census_take(&c);
    CHECK(c.graphs == 0 && c.captures == 0 && c.allocations == 0);
}

/* ---- hazards ------------------------------------------------------------------------------------- */

static void a_replay_that_is_not_ordered_races(void)
{
    for (int ordered = 0; ordered < 2; ordered++) {
        scene s;
        set(&s);
        capture_copies(&s);
        OK(s.k.driver.cuMemsetD8Async(s.page, 1, BYTES, s.a));
        if (ordered) {
            kit_order(&s.k, s.a, s.b);
        }
        OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
        if (ordered) {
            CHECK_EQ(ebbsim_hazards(), 0);
        } else {
            expect_hazard(EBBSIM_HAZARD_RACE, "cuMemsetD8Async");
        }
    }
}

static void work_that_is_not_ordered_after_a_replay_races(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    OK(s.k.driver.cuMemsetD8Async(s.other, 1, BYTES, s.b));
    CHECK(ebbsim_hazards() > 0);
    ebbsim_hazard h;
    if (ebbsim_hazard_get(0, &h) == 0) {
        CHECK_EQ(h.kind, EBBSIM_HAZARD_RACE);
        CHECK_STR(h.second.call, "cuMemsetD8Async");
    }
}

static void two_replays_on_one_stream_are_in_order(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    kit_order(&s.k, s.a, s.b);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.b));
    OK(s.k.driver.cuCtxSynchronize());
    CHECK(holds(s.out, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_source_refilled_under_a_replay_is_reported(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    memset(s.in, 0x55, BYTES);
    OK(s.k.driver.cuStreamSynchronize(s.a));
    expect_hazard(EBBSIM_HAZARD_SOURCE, "cuMemcpyHtoDAsync");
}

static void an_unmap_under_a_replay_is_reported(void)
{
    scene s;
    set(&s);
    begin(&s);
    OK(s.k.driver.cuMemsetD8Async(s.page, 7, BYTES, s.a));
    end(&s);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    OK(s.k.driver.cuMemUnmap(s.page, PAGE));
    expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemsetD8Async");
}

/* A page that was given up since the capture: nothing there, and the context is lost. */
static void a_replay_on_memory_that_is_gone_is_a_fault(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuMemUnmap(s.other, PAGE));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    ebbsim_hazard h;
    CHECK(ebbsim_hazards() >= 1);
    if (ebbsim_hazard_get(0, &h) == 0) {
        CHECK_EQ(h.kind, EBBSIM_HAZARD_UNMAPPED);
        CHECK_STR(h.second.call, "cuMemcpyDtoDAsync");
    }
    CHECK_EQ(s.k.driver.cuStreamSynchronize(s.a), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(ebbsim_check() == NULL);
}

static void a_replay_on_host_memory_that_is_gone_is_a_fault(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuMemFreeHost(s.in));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    expect_hazard(EBBSIM_HAZARD_UNMAPPED, "cuMemcpyHtoDAsync");
    CHECK_EQ(s.k.driver.cuStreamSynchronize(s.a), CUDA_ERROR_ILLEGAL_ADDRESS);
}

/* Mapped anew, by whatever frame, it is as good as before: graphs know addresses. */
static void a_replay_on_memory_that_came_back_finds_it(void)
{
    scene s;
    set(&s);
    capture_copies(&s);
    OK(s.k.driver.cuMemUnmap(s.page, PAGE));
    CHECK_EQ(kit_page(&s.k, 0), s.page);
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    OK(s.k.driver.cuStreamSynchronize(s.a));
    CHECK(holds(s.out, 0x11));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_replayed_kernel_needs_access_like_any(void)
{
    scene s;
    set(&s);
    begin(&s);
    kit_kernel("layer", s.a, s.page, BYTES, EBBSIM_WRITE);
    end(&s);
    CUmemAccessDesc access[2] = {
        {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READ},
        {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE}};
    OK(s.k.driver.cuMemSetAccess(s.page, PAGE, access, 2));
    OK(s.k.driver.cuGraphLaunch(s.exec, s.a));
    expect_hazard(EBBSIM_HAZARD_ACCESS, "layer");
    CHECK_EQ(s.k.driver.cuStreamSynchronize(s.a), CUDA_ERROR_ILLEGAL_ADDRESS);
}

int main(void)
{
    RUN(what_is_captured_does_not_happen);
    RUN(every_replay_moves_bytes);
    RUN(a_replay_is_late_like_any_work);
    RUN(a_replay_takes_its_time_once_more);
    RUN(kernels_run_once_for_each_replay_and_in_order);
    RUN(a_graph_of_two_streams_is_replayed_whole);
    RUN(a_graph_outlives_what_it_was_made_from);
    RUN(a_pageable_source_is_read_at_each_replay);
    RUN(a_capture_that_fails_leaves_no_graph);
    RUN(a_replay_that_is_not_ordered_races);
    RUN(work_that_is_not_ordered_after_a_replay_races);
    RUN(two_replays_on_one_stream_are_in_order);
    RUN(a_source_refilled_under_a_replay_is_reported);
    RUN(an_unmap_under_a_replay_is_reported);
    RUN(a_replay_on_memory_that_is_gone_is_a_fault);
    RUN(a_replay_on_host_memory_that_is_gone_is_a_fault);
    RUN(a_replay_on_memory_that_came_back_finds_it);
    RUN(a_replayed_kernel_needs_access_like_any);
    ebbsim_reset();
    return REPORT();
}

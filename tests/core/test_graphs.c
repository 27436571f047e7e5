/* Captured graphs: what they use is held, and nothing Ebbtide does destroys a capture. */
#include <pthread.h>

#include "rig.h"

static void begin(core *c, CUstream s, CUstreamCaptureMode mode)
{
    MUST(c->driver.cuStreamBeginCapture(s, mode));
}

/* End a capture: it must have survived. */
static CUgraphExec end(core *c, CUstream s)
{
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    CHECK_EQ(c->driver.cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    if (!graph)
        return NULL;
    MUST(c->driver.cuGraphInstantiateWithFlags(&exec, graph, 0));
    MUST(c->driver.cuGraphDestroy(graph));
    return exec;
}

static void a_page_used_by_a_graph_is_held_until_the_graphs_are_gone(void)
{
    for (int lasting = 0; lasting < 2; lasting++) {
        core c;
        core_open(&c, 512 * MIB, 2 * LARGE);
        CUstream s = lasting ? core_lasting(&c) : core_stream(&c), t = core_lasting(&c);
        ebb_vbar v = core_vbar(&c, 2 * LARGE), new = core_vbar(&c, 2 * LARGE);
        CHECK_EQ(rig_touch(v, 0, 2 * LARGE, s), EBB_OK);
        MUST(c.driver.cuStreamSynchronize(s));

        begin(&c, s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
        rig_busy(&c, v, 0, LARGE, 5 * MILLISECOND, s);
        CUgraphExec exec = end(&c, s);
        CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT | EBB_PAGE_HELD);
        CHECK_EQ(core_stats(v).held, LARGE);
        CHECK_EQ(core_device_stats(&c).for_graphs, LARGE);
        core_check(&c);

        CHECK_EQ(ebb_vbar_destroy(v), EBB_BUSY);
        CHECK_EQ(ebb_device_close(c.device), EBB_BUSY);
        CHECK_EQ(rig_touch(new, 0, 2 * LARGE, t), EBB_OFFLOADED);
        CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK); /* the other page goes */
        CHECK_EQ(ebb_device_set_limit(c.device, 0), EBB_BUSY);
        CHECK_EQ(core_stats(v).resident, LARGE);
        CHECK_EQ(ebb_device_set_limit(c.device, 2 * LARGE), EBB_OK);
        core_check(&c);

        MUST(c.driver.cuGraphLaunch(exec, s));
        MUST(c.driver.cuGraphLaunch(exec, s));
        MUST(c.driver.cuGraphExecDestroy(exec));
        CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_OK);
        CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT);
        CHECK_EQ(core_device_stats(&c).for_graphs, 0);
        CHECK_EQ(ebb_vbar_prioritize(new), EBB_OK);
        CHECK_EQ(rig_touch(new, 0, 2 * LARGE, t), EBB_OK); /* waits for the launches */
        CHECK_EQ(core_stats(v).resident, 0);
        core_close(&c);
    }
}

static void a_pinned_and_held_page_goes_through_both(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, t, &signature), EBB_OK);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OFFLOADED); /* notes the pin */
    begin(&c, s, CU_STREAM_CAPTURE_MODE_RELAXED);
    rig_busy(&c, v, 0, LARGE, 1000, s);
    CUgraphExec exec = end(&c, s);
    core_check(&c);
    CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_OK);
    core_check(&c);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OFFLOADED);
    CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, t), EBB_OK);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
    MUST(c.driver.cuGraphExecDestroy(exec));
    core_close(&c);
}

static void a_victim_whose_stream_captures_is_passed_over_and_the_capture_survives(void)
{
    core c;
    core_open(&c, 512 * MIB, 2 * LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar a = core_vbar(&c, LARGE), b = core_vbar(&c, LARGE), new = core_vbar(&c, 2 * LARGE);
    rig_busy(&c, a, 0, LARGE, 1000, s); /* least important, its fence not marked yet */
    rig_busy(&c, b, 0, LARGE, 1000, t);
    begin(&c, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
    CHECK_EQ(rig_page(a, 0), EBB_PAGE_RESIDENT);
    CHECK_EQ(rig_page(b, 0), 0);
    CHECK_EQ(rig_touch(new, LARGE, LARGE, t), EBB_OFFLOADED);
    CHECK_EQ(ebb_vbar_destroy(a), EBB_BUSY);
    CHECK_EQ(rig_touch(a, 0, LARGE, t), EBB_OFFLOADED); /* cannot be put in order now */
    uint64_t freed;
    CHECK_EQ(ebb_vbar_free_memory(a, LARGE, &freed), EBB_OK);
    CHECK_EQ(freed, 0);
    core_check(&c);
    CUgraphExec exec = end(&c, s);
    CHECK(exec != NULL);
    CHECK_EQ(rig_touch(new, LARGE, LARGE, t), EBB_OK);
    MUST(c.driver.cuGraphExecDestroy(exec));
    core_close(&c);
}

static void a_capture_on_a_blocking_stream_survives_pages_of_the_default_stream(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    CUstream s = NULL, t = core_lasting(&c);
    MUST(c.driver.cuStreamCreate(&s, CU_STREAM_DEFAULT));
    ebb_vbar v = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
    rig_busy(&c, v, 0, LARGE, 1000, NULL);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, NULL, &signature), EBB_OK);
    begin(&c, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (int i = 0; i < 300; i++) { /* more than it takes for a mark now and then */
        CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, NULL, &signature), EBB_OK);
        CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, NULL), EBB_OK);
    }
    CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, NULL), EBB_OK);
    CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT); /* no graph has it */
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OFFLOADED);
    CHECK_EQ(rig_touch(v, 0, LARGE, t), EBB_OFFLOADED);
    core_check(&c);
    CUgraphExec exec = end(&c, s);
    CHECK(exec != NULL);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
    if (exec)
        MUST(c.driver.cuGraphExecDestroy(exec));
    MUST(c.driver.cuStreamDestroy(s));
    core_close(&c);
}

static void a_capturing_stream_hits_a_page_of_another_stream(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    rig_clock();
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar v = core_vbar(&c, LARGE);
    uint64_t signature, again;
    CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, t, &signature), EBB_OK);
    core_fill(&c, v, 0, LARGE, 9, t);
    CHECK_EQ(ebb_vbar_filled(v, 0, LARGE, t), EBB_OK);
    CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, t), EBB_OK);
    begin(&c, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s, &again), EBB_OK); /* the host waits */
    CHECK_EQ(again, signature);
    CHECK_EQ(rig_kernel("node", core_stats(v).address, LARGE, EBBSIM_READ, 1000, s), 0);
    MUST(c.driver.cuMemcpyDtoHAsync(c.host, core_stats(v).address + 5 * MIB, 1, s));
    CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s), EBB_OK);
    CUgraphExec exec = end(&c, s);
    REQUIRE(exec);
    MUST(c.driver.cuGraphLaunch(exec, s));
    MUST(c.driver.cuStreamSynchronize(s));
    CHECK_EQ(c.host[0], 9);
    core_check(&c);
    MUST(c.driver.cuGraphExecDestroy(exec));
    CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_OK);
    core_close(&c);
}

static void graphs_gone_is_refused_on_a_capturing_stream(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s = core_stream(&c);
    ebb_vbar v = core_vbar(&c, LARGE);
    begin(&c, s, CU_STREAM_CAPTURE_MODE_GLOBAL);
    rig_busy(&c, v, 0, LARGE, 1000, s);
    CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_BUSY);
    CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT | EBB_PAGE_HELD);
    CUgraphExec exec = end(&c, s);
    CHECK(exec != NULL);
    MUST(c.driver.cuGraphExecDestroy(exec));
    CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_OK);
    core_close(&c);
}

/* ---- a capture in another thread ------------------------------------------------------------------ */

typedef struct other {
    core *c;
    CUstream stream;
    pthread_barrier_t begun, done;
    bool survived;
} other;

static void *capture(void *data)
{
    other *o = data;
    core *c = o->c;
    MUST(c->driver.cuCtxSetCurrent(c->context));
    begin(c, o->stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    pthread_barrier_wait(&o->begun);
    pthread_barrier_wait(&o->done);
    CUgraph graph = NULL;
    o->survived = c->driver.cuStreamEndCapture(o->stream, &graph) == CUDA_SUCCESS;
    if (graph)
        MUST(c->driver.cuGraphDestroy(graph));
    return NULL;
}

static int save(void *user, uint64_t offset, uint64_t bytes)
{
    (void)user, (void)offset, (void)bytes;
    return 0;
}

static void a_capture_in_another_thread_survives_all_we_do(void)
{
    core c;
    core_open(&c, 512 * MIB, 2 * LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c), u = core_stream(&c);
    other o = {.c = &c, .stream = core_stream(&c)};
    pthread_barrier_init(&o.begun, NULL, 2);
    pthread_barrier_init(&o.done, NULL, 2);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, capture, &o));
    pthread_barrier_wait(&o.begun);

    ebb_vbar_options options = {.size = sizeof options, .bytes = 2 * LARGE, .page_out = save};
    ebb_vbar a, b = core_vbar(&c, 2 * LARGE);
    MUST(ebb_vbar_create(c.device, &options, &a));
    for (int i = 0; i < 20; i++) {
        rig_busy(&c, a, 0, 2 * LARGE, 100000, i % 2 ? s : u);
        CHECK_EQ(ebb_vbar_prioritize(b), EBB_OK);
        rig_busy(&c, b, 0, 2 * LARGE, 100000, t);
        rig_busy(&c, b, 0, 2 * LARGE, 100000, u);
        rig_busy(&c, b, 0, LARGE, 100000, NULL);
        CHECK_EQ(ebb_vbar_prioritize(a), EBB_OK);
    }
    CHECK_EQ(ebb_device_set_limit(c.device, LARGE), EBB_OK);
    CHECK_EQ(ebb_vbar_free_memory(b, LARGE, NULL), EBB_OK);
    CHECK_EQ(ebb_device_trim(c.device, NULL), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(a), EBB_OK);
    core_check(&c);
    /* Its thread's own mode is as it was. */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    MUST(c.driver.cuThreadExchangeStreamCaptureMode(&mode));
    CHECK_EQ(mode, CU_STREAM_CAPTURE_MODE_GLOBAL);

    pthread_barrier_wait(&o.done);
    pthread_join(thread, NULL);
    CHECK(o.survived);
    core_close(&c);
}

int main(void)
{
    RUN(a_page_used_by_a_graph_is_held_until_the_graphs_are_gone);
    RUN(a_pinned_and_held_page_goes_through_both);
    RUN(a_victim_whose_stream_captures_is_passed_over_and_the_capture_survives);
    RUN(a_capture_on_a_blocking_stream_survives_pages_of_the_default_stream);
    RUN(a_capturing_stream_hits_a_page_of_another_stream);
    RUN(graphs_gone_is_refused_on_a_capturing_stream);
    RUN(a_capture_in_another_thread_survives_all_we_do);
    return REPORT();
}

/* Whatever driver call fails, wherever: the books stay right, and all comes back in the end. */
#include "core_fail.h"

static void a_life(scene *x)
{
    open_scene(x, 2 * LARGE);
    if (!x->open)
        return;
    create(x, 0, LARGE + 2 * SMALL, NULL);
    create(x, 1, LARGE, NULL);
    use(x, 0, 0, LARGE + 2 * SMALL, x->s[0]);
    use(x, 0, 0, LARGE, x->s[0]);
    use(x, 1, 0, LARGE, x->s[1]); /* displaces the small ones */
    ok(ebb_vbar_prioritize(x->v[0]));
    use(x, 0, 0, LARGE + 2 * SMALL, x->s[0]);
    ok(ebb_vbar_deprioritize(x->v[0]));
    ok(ebb_vbar_prioritize(x->v[1]));
    use(x, 1, 0, LARGE, NULL);
    ok(ebb_vbar_free_memory(x->v[0], SMALL, NULL));
    ok(ebb_device_trim(x->c.device, NULL));
    ok(ebb_vbar_destroy(x->v[0]));
    ebb_status status = ebb_device_close(x->c.device);
    x->open = !ok(status);
}

static void batches(scene *x)
{
    open_scene(x, 3 * LARGE);
    if (!x->open)
        return;
    create(x, 0, 2 * LARGE, NULL);
    create(x, 1, 3 * LARGE, NULL);
    use(x, 0, 0, 2 * LARGE, x->s[0]);
    ebb_range ranges[3] = {{0, LARGE}, {LARGE - 1, 2}, {LARGE + 5, LARGE}};
    uint64_t signatures[3];
    for (int i = 0; i < 2; i++) {
        CUstream stream = x->s[i ? 2 : 1];
        if (!ok(ebb_vbar_fault_many(x->v[1], ranges, 3, stream, signatures)))
            continue;
        if (!ok(ebb_vbar_unpin_many(x->v[1], ranges, 3, stream)))
            for (int k = 0; k < 3; k++)
                unpin(x, 1, ranges[k].offset, ranges[k].bytes, stream);
    }
}

static void several_streams(scene *x)
{
    open_scene(x, 2 * LARGE);
    if (!x->open)
        return;
    create(x, 0, LARGE, NULL);
    create(x, 1, 2 * LARGE, NULL);
    for (int i = 0; i < 6; i++)
        use(x, 0, 0, LARGE, x->s[i % STREAMS]);
    use(x, 0, 0, LARGE, NULL);
    use(x, 1, 0, 2 * LARGE, x->s[3]);
    /* A stream dies; the next may have its handle. */
    use(x, 1, 0, LARGE, x->s[2]);
    if (x->pin_count == 0 && x->c.driver.cuStreamDestroy(x->s[2]) == CUDA_SUCCESS) {
        x->s[2] = NULL;
        if (x->c.driver.cuStreamCreate(&x->s[2], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
            x->s[2] = NULL;
    }
    ok(ebb_vbar_prioritize(x->v[0]));
    use(x, 0, 0, LARGE, x->s[3]);
}

static int save(void *user, uint64_t offset, uint64_t bytes)
{
    scene *x = user;
    (void)offset, (void)bytes;
    use(x, 2, 0, 1, x->s[1]); /* another VBAR, from inside */
    return 0;
}

static void saving(scene *x)
{
    open_scene(x, 2 * LARGE + SMALL);
    if (!x->open)
        return;
    create(x, 0, 2 * LARGE, save);
    create(x, 2, SMALL, NULL);
    if (!x->v[0].id || !x->v[2].id)
        return;
    use(x, 2, 0, 1, x->s[1]);
    use(x, 0, 0, 2 * LARGE, x->s[0]);
    create(x, 1, LARGE, NULL);
    if (x->v[1].id)
        use(x, 1, 0, LARGE, x->s[2]);
    ok(ebb_vbar_free_memory(x->v[0], UINT64_MAX, NULL));
}

static void a_lower_limit(scene *x)
{
    open_scene(x, 4 * LARGE);
    if (!x->open)
        return;
    create(x, 0, 2 * LARGE, NULL);
    create(x, 1, 2 * LARGE, NULL);
    use(x, 0, 0, 2 * LARGE, x->s[0]);
    use(x, 1, 0, 2 * LARGE, x->s[2]);
    uint64_t signature;
    ebb_status pinned = ebb_vbar_fault(x->v[1], 0, LARGE, x->s[1], &signature);
    ok(ebb_device_set_limit(x->c.device, 2 * LARGE));
    ok(ebb_device_set_limit(x->c.device, 0));
    if (pinned == EBB_OK)
        unpin(x, 1, 0, LARGE, x->s[1]);
    ok(ebb_device_set_headroom(x->c.device, EBB_DEFAULT));
    ok(ebb_device_set_limit(x->c.device, EBB_DEFAULT));
    ok(ebb_vbar_prioritize(x->v[0]));
    use(x, 0, 0, 2 * LARGE, x->s[0]);
}

/* The capture itself is the test's: it begins before anything can fail, and ends after. */
static void in_a_capture(scene *x, bool lasting)
{
    const ebb__driver *driver = &x->c.driver;
    CUstream s = x->graphs = x->s[lasting ? 0 : 2];
    open_scene(x, 2 * LARGE);
    if (!x->open)
        return;
    create(x, 0, LARGE, NULL);
    create(x, 1, 2 * LARGE, NULL);
    use(x, 0, 0, LARGE, s);
    if (driver->cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_GLOBAL) != CUDA_SUCCESS)
        return;
    uint64_t signature;
    bool pinned = ok(ebb_vbar_fault(x->v[0], 0, LARGE, s, &signature));
    ebb_vbar_stats stats = {.size = sizeof stats};
    if (pinned && ok(ebb_vbar_get_stats(x->v[0], &stats)))
        rig_kernel("node", stats.address, LARGE, EBBSIM_READ, 1000, s);
    bool unpinned = pinned && ok(ebb_vbar_unpin(x->v[0], 0, LARGE, s));
    if (pinned && !unpinned) /* tried again while it captures, as a caller would */
        unpinned = ok(ebb_vbar_unpin(x->v[0], 0, LARGE, s));
    use(x, 1, 0, 2 * LARGE, x->s[1]);
    use(x, 1, 0, LARGE, x->s[1]);
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    /* It survived, whatever failed of ours. */
    INSIST(driver->cuStreamEndCapture(s, &graph));
    if (pinned && !unpinned)
        unpin(x, 0, 0, LARGE, s);
    if (!graph)
        return;
    if (driver->cuGraphInstantiateWithFlags(&exec, graph, 0) == CUDA_SUCCESS) {
        if (unpinned)
            driver->cuGraphLaunch(exec, s);
        use(x, 1, 0, 2 * LARGE, x->s[1]);
        INSIST(driver->cuGraphExecDestroy(exec));
    }
    INSIST(driver->cuGraphDestroy(graph));
    ok(ebb_vbar_graphs_gone(x->v[0], s));
    use(x, 1, 0, 2 * LARGE, x->s[1]);
}

static void a_capture(scene *x)
{
    in_a_capture(x, true);
}

static void a_capture_on_a_stream_that_may_go(scene *x)
{
    in_a_capture(x, false);
}

static const struct {
    const char *name;
    void (*run)(scene *);
} scenarios[] = {
    {"a life", a_life},
    {"batches", batches},
    {"several streams", several_streams},
    {"saving", saving},
    {"a lower limit", a_lower_limit},
    {"a capture", a_capture},
    {"a capture on a stream that may go", a_capture_on_a_stream_that_may_go},
};

static void fail_all(unsigned row)
{
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++)
        fail_every_call(scenarios[i].name, scenarios[i].run, row);
}

static void every_call_may_fail(void)
{
    fail_all(1);
}

static void every_two_calls_in_a_row_may_fail(void)
{
    fail_all(2);
}

static void every_five_calls_in_a_row_may_fail(void)
{
    fail_all(5);
}

int main(void)
{
    RUN(every_call_may_fail);
    RUN(every_two_calls_in_a_row_may_fail);
    RUN(every_five_calls_in_a_row_may_fail);
    return REPORT();
}

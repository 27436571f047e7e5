/* Pages on their way out, and VBARs: taken back, saved first, destroyed in every state. */
#include <pthread.h>
#include <unistd.h>

#include "rig.h"

/* Something done by another thread, at a time of its own. */
typedef struct helper {
    pthread_t thread;
    core *c;
    ebb_vbar vbar;
    uint64_t offset, bytes, signature;
    CUstream stream;
    unsigned after_ms;
    bool keep; /* the pin */
    ebb_status status;
} helper;

static void *helper_fault(void *data)
{
    helper *h = data;
    usleep(h->after_ms * 1000);
    h->status = ebb_vbar_fault(h->vbar, h->offset, h->bytes, h->stream, &h->signature);
    if (h->status == EBB_OK && !h->keep)
        CHECK_EQ(ebb_vbar_unpin(h->vbar, h->offset, h->bytes, h->stream), EBB_OK);
    return NULL;
}

static void *helper_destroy(void *data)
{
    helper *h = data;
    usleep(h->after_ms * 1000);
    h->status = ebb_vbar_destroy(h->vbar);
    return NULL;
}

static void *helper_close(void *data)
{
    helper *h = data;
    h->status = ebb_device_close(h->c->device);
    return NULL;
}

static void start(helper *h, void *(*what)(void *))
{
    MUST(pthread_create(&h->thread, NULL, what, h));
}

static ebb_status joined(helper *h)
{
    pthread_join(h->thread, NULL);
    return h->status;
}

enum { LONG = 300 * MILLISECOND };

/* ---- taken back ----------------------------------------------------------------------------------- */

static void a_fault_takes_back_a_page_that_is_leaving(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
    uint64_t signature = 0, again;
    CHECK_EQ(core_use(&c, old, 0, LARGE, &signature, 3, s), EBB_OK);
    rig_busy(&c, old, 0, LARGE, LONG, s);
    helper h = {.c = &c, .vbar = new, .bytes = LARGE, .stream = t};
    start(&h, helper_fault);
    usleep(100000);
    CHECK_EQ(rig_page(old, 0), EBB_PAGE_RESIDENT); /* on its way out */
    CHECK_EQ(ebb_check(c.device, NULL, 0), EBB_OK);
    CHECK_EQ(ebb_vbar_fault(old, 0, LARGE, s, &again), EBB_OK);
    CHECK_EQ(again, signature);
    CHECK_EQ(joined(&h), EBB_OFFLOADED);
    CHECK_EQ(core_read(&c, old, 1, s), 3);
    CHECK_EQ(core_stats(old).evictions[EBB_FOR_WEIGHT], 0);
    CHECK_EQ(core_stats(old).watermark, LARGE);
    CHECK_EQ(ebb_vbar_unpin(old, 0, LARGE, s), EBB_OK);
    core_close(&c);
}

/* ---- saved first ---------------------------------------------------------------------------------- */

typedef struct saver {
    core *c;
    ebb_vbar vbar, other;
    CUstream stream;
    unsigned calls, sleep_ms;
    int refuses;
    uint64_t offset, bytes;
    int seen;
    ebb_status of_other, of_own;
} saver;

static int save(void *user, uint64_t offset, uint64_t bytes)
{
    saver *s = user;
    core *c = s->c;
    s->calls++;
    s->offset = offset;
    s->bytes = bytes;
    /* Its fence has passed: it can be read on any stream, and other VBARs can be used. */
    CUcontext popped;
    MUST(c->driver.cuCtxPushCurrent(c->context));
    ebb_vbar_stats stats = {.size = sizeof stats};
    MUST(ebb_vbar_get_stats(s->vbar, &stats));
    MUST(c->driver.cuMemcpyDtoHAsync(c->host, stats.address + offset, 1, s->stream));
    MUST(c->driver.cuStreamSynchronize(s->stream));
    s->seen = c->host[0];
    if (s->other.id) {
        s->of_other = rig_touch(s->other, 0, 1, s->stream);
        uint64_t signature;
        s->of_own = ebb_vbar_fault(s->vbar, offset, bytes, s->stream, &signature);
    }
    MUST(c->driver.cuCtxPopCurrent(&popped));
    usleep(s->sleep_ms * 1000);
    return s->refuses;
}

/* A VBAR of `pages` large pages that are saved before they go. */
static ebb_vbar saved(core *c, saver *s, uint64_t pages, CUstream stream)
{
    ebb_vbar_options options = {
        .size = sizeof options, .bytes = pages * LARGE, .page_out = save, .user = s};
    *s = (saver){.c = c, .stream = stream, .seen = -1};
    MUST(ebb_vbar_create(c->device, &options, &s->vbar));
    return s->vbar;
}

static void a_page_is_saved_after_its_fence_without_a_lock(void)
{
    core c;
    core_open(&c, 512 * MIB, 3 * LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c), u = core_lasting(&c);
    ebb_vbar other = core_vbar(&c, LARGE);
    saver about;
    ebb_vbar v = saved(&c, &about, 2, u);
    about.other = other;
    CHECK_EQ(rig_touch(other, 0, 1, u), EBB_OK);
    CHECK_EQ(ebb_vbar_prioritize(other), EBB_OK);
    uint64_t signature = 0;
    CHECK_EQ(core_use(&c, v, 0, 2 * LARGE, &signature, 42, s), EBB_OK);
    ebb_vbar new = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
    CHECK_EQ(about.calls, 1);
    CHECK_EQ(about.offset, LARGE);
    CHECK_EQ(about.bytes, LARGE);
    CHECK_EQ(about.seen, 42);
    CHECK_EQ(about.of_other, EBB_OK);
    CHECK_EQ(about.of_own, EBB_BUSY); /* rather than waiting for itself */
    CHECK_EQ(core_device_stats(&c).page_outs, 1);
    /* On request, and for a limit. */
    CHECK_EQ(ebb_device_set_limit(c.device, 2 * LARGE), EBB_OK);
    CHECK_EQ(about.calls, 2);
    CHECK_EQ(core_stats(v).resident, 0);
    core_check(&c);
    core_close(&c);
}

static void a_page_that_cannot_be_saved_stays(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    saver about;
    ebb_vbar v = saved(&c, &about, 1, t);
    about.refuses = 1;
    uint64_t signature = 0, again;
    CHECK_EQ(core_use(&c, v, 0, LARGE, &signature, 42, s), EBB_OK);
    ebb_vbar new = core_vbar(&c, LARGE);
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OFFLOADED);
    CHECK_EQ(about.calls, 1);
    CHECK_EQ(ebb_vbar_free_memory(v, LARGE, NULL), EBB_OK);
    CHECK_EQ(about.calls, 2);
    CHECK_EQ(ebb_device_set_limit(c.device, 0), EBB_BUSY);
    CHECK_EQ(about.calls, 3);
    CHECK_EQ(ebb_device_set_limit(c.device, LARGE), EBB_OK);
    CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s, &again), EBB_OK);
    CHECK_EQ(again, signature);
    CHECK_EQ(core_read(&c, v, 0, s), 42);
    CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s), EBB_OK);
    CHECK_EQ(core_stats(v).watermark, LARGE);
    about.refuses = 0;
    CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
    core_close(&c);
}

static void a_fault_waits_while_the_page_is_saved(void)
{
    for (int refuses = 0; refuses < 2; refuses++) {
        core c;
        core_open(&c, 512 * MIB, LARGE);
        CUstream s = core_lasting(&c), t = core_lasting(&c), u = core_lasting(&c);
        saver about;
        ebb_vbar v = saved(&c, &about, 1, u);
        about.sleep_ms = 200;
        about.refuses = refuses;
        uint64_t signature = 0, again = 0;
        CHECK_EQ(core_use(&c, v, 0, LARGE, &signature, 42, s), EBB_OK);
        helper h = {.c = &c, .vbar = core_vbar(&c, LARGE), .bytes = LARGE, .stream = t};
        start(&h, helper_fault);
        usleep(100000);
        CHECK_EQ(ebb_vbar_destroy(v), EBB_BUSY);
        ebb_status status = ebb_vbar_fault(v, 0, LARGE, s, &again);
        CHECK_EQ(about.calls, 1);
        CHECK_EQ(status, refuses ? EBB_OK : EBB_OFFLOADED);
        CHECK_EQ(joined(&h), refuses ? EBB_OFFLOADED : EBB_OK);
        if (status == EBB_OK) {
            CHECK_EQ(again, signature);
            CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s), EBB_OK);
        }
        core_check(&c);
        core_close(&c);
    }
}

static void nothing_is_saved_for_the_end(void)
{
    core c;
    core_open(&c, 512 * MIB, 4 * LARGE);
    CUstream s = core_lasting(&c);
    saver a, b;
    ebb_vbar v = saved(&c, &a, 2, s), w = saved(&c, &b, 2, s);
    CHECK_EQ(rig_touch(v, 0, 2 * LARGE, s), EBB_OK);
    CHECK_EQ(rig_touch(w, 0, 2 * LARGE, s), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    core_close(&c);
    CHECK_EQ(a.calls + b.calls, 0);
}

/* ---- destroyed ------------------------------------------------------------------------------------ */

static void a_vbar_can_be_destroyed_unless_it_is_in_use(void)
{
    core c;
    core_open(&c, 512 * MIB, 4 * LARGE);
    ebbsim_clock_virtual(1);
    CUstream s = core_lasting(&c);
    ebb_vbar absent = core_vbar(&c, 2 * LARGE);
    CHECK_EQ(ebb_vbar_destroy(absent), EBB_OK);

    ebb_vbar v = core_vbar(&c, 3 * LARGE);
    CHECK_EQ(rig_touch(v, 0, 3 * LARGE, s), EBB_OK);
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(v, LARGE, 1, s, &signature), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(v), EBB_BUSY);
    CHECK_EQ(core_stats(v).resident, 3 * LARGE);
    core_check(&c);
    CHECK_EQ(ebb_vbar_unpin(v, LARGE, 1, s), EBB_OK);

    rig_busy(&c, v, 0, 3 * LARGE, 70 * MILLISECOND, s);
    uint64_t begin = ebbsim_now();
    CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
    CHECK(ebbsim_now() - begin > 69 * MILLISECOND && ebbsim_now() - begin < 71 * MILLISECOND);
    core_check(&c);
    CHECK_EQ(core_device_stats(&c).unused, 3 * LARGE);
    CHECK_EQ(core_device_stats(&c).evictions[EBB_FOR_ASKING], 0);
    core_close(&c);
}

static void a_vbar_whose_page_is_leaving_is_busy(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c);
    ebb_vbar old = core_vbar(&c, LARGE);
    rig_busy(&c, old, 0, LARGE, LONG, s);
    helper h = {.c = &c, .vbar = core_vbar(&c, LARGE), .bytes = LARGE, .stream = t};
    start(&h, helper_fault);
    usleep(100000);
    CHECK_EQ(ebb_vbar_destroy(old), EBB_BUSY);
    CHECK_EQ(ebb_vbar_destroy(h.vbar), EBB_BUSY); /* in a call */
    CHECK_EQ(ebb_device_close(c.device), EBB_BUSY);
    CHECK_EQ(joined(&h), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(old), EBB_OK);
    core_close(&c);
}

static void a_fault_in_the_middle_of_a_destruction_wins(void)
{
    /* The upper page is gone already, and comes back while the lower one's fence is waited for; or
       the lower one is taken back itself. */
    for (uint64_t page = 0; page < 2; page++) {
        core c;
        core_open(&c, 512 * MIB, 2 * LARGE);
        CUstream s = core_lasting(&c), t = core_lasting(&c);
        ebb_vbar v = core_vbar(&c, 2 * LARGE);
        CHECK_EQ(rig_touch(v, LARGE, LARGE, t), EBB_OK);
        rig_busy(&c, v, 0, LARGE, LONG, s);
        helper h = {.c = &c, .vbar = v};
        start(&h, helper_destroy);
        usleep(100000);
        uint64_t signature;
        CHECK_EQ(ebb_vbar_fault(v, page * LARGE, LARGE, t, &signature), EBB_OK);
        CHECK_EQ(joined(&h), EBB_BUSY);
        CHECK_EQ(rig_page(v, page), EBB_PAGE_RESIDENT | EBB_PAGE_PINNED);
        core_check(&c);
        CHECK_EQ(ebb_vbar_unpin(v, page * LARGE, LARGE, t), EBB_OK);
        CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
        core_close(&c);
    }
}

static void a_fault_that_waits_keeps_its_vbar_alive(void)
{
    core c;
    core_open(&c, 512 * MIB, 2 * LARGE);
    CUstream s = core_lasting(&c), t = core_lasting(&c), u = core_lasting(&c);
    ebb_vbar low = core_vbar(&c, LARGE), v = core_vbar(&c, 2 * LARGE);
    rig_busy(&c, low, 0, LARGE, 2 * LONG, u);
    rig_busy(&c, v, 0, LARGE, LONG, s);
    helper h = {.c = &c, .vbar = v}, f = {.c = &c,
                                          .vbar = v,
                                          .offset = LARGE,
                                          .bytes = LARGE,
                                          .stream = t,
                                          .after_ms = 100,
                                          .keep = true};
    start(&h, helper_destroy); /* until the first page's fence has passed */
    start(&f, helper_fault);   /* until the other model's fence has */
    CHECK_EQ(joined(&h), EBB_BUSY);
    CHECK_EQ(joined(&f), EBB_OK);
    CHECK_EQ(core_stats(v).pinned, LARGE);
    core_check(&c);
    CHECK_EQ(ebb_vbar_unpin(v, LARGE, LARGE, t), EBB_OK);
    core_close(&c);
}

static void a_vbar_made_while_the_device_closes_keeps_it_open(void)
{
    core c;
    core_open(&c, 512 * MIB, 2 * LARGE);
    CUstream s = core_lasting(&c);
    ebb_vbar before = core_vbar(&c, LARGE), b = core_vbar(&c, LARGE), after = core_vbar(&c, LARGE);
    CHECK_EQ(ebb_vbar_destroy(before), EBB_OK);
    CHECK_EQ(ebb_vbar_destroy(after), EBB_OK);
    rig_busy(&c, b, 0, LARGE, LONG, s);
    helper h = {.c = &c};
    start(&h, helper_close);
    usleep(100000);
    /* In the places on both sides of it: one of them is behind whoever goes through the places. */
    ebb_vbar late[2] = {core_vbar(&c, LARGE), core_vbar(&c, LARGE)};
    CHECK_EQ(joined(&h), EBB_BUSY);
    core_check(&c);
    ebb_vbar_stats stats = {.size = sizeof stats};
    int there = 0;
    for (int i = 0; i < 2; i++)
        there += ebb_vbar_get_stats(late[i], &stats) == EBB_OK;
    CHECK_EQ(there, 1);
    core_close(&c);
}

int main(void)
{
    if (getenv("EBBTIDE_TEST_GPU"))
        SKIP("kernels of a declared length are the simulated GPU's");
    RUN(a_fault_takes_back_a_page_that_is_leaving);
    RUN(a_page_is_saved_after_its_fence_without_a_lock);
    RUN(a_page_that_cannot_be_saved_stays);
    RUN(a_fault_waits_while_the_page_is_saved);
    RUN(nothing_is_saved_for_the_end);
    RUN(a_vbar_can_be_destroyed_unless_it_is_in_use);
    RUN(a_vbar_whose_page_is_leaving_is_busy);
    RUN(a_fault_in_the_middle_of_a_destruction_wins);
    RUN(a_fault_that_waits_keeps_its_vbar_alive);
    RUN(a_vbar_made_while_the_device_closes_keeps_it_open);
    return REPORT();
}

/*
 * Streams that were promised never to capture: what is not asked of them, that their fences hold all
 * the same, and what becomes of a promise that is taken back, ends with its stream, or is broken.
 */
#include "internal.h"
#include "rig.h"

/* ---- the questions, counted ----------------------------------------------------------------------- */

static unsigned long questions;
static CUresult (*really_ask)(CUstream, CUstreamCaptureStatus *);

static CUresult ask(CUstream stream, CUstreamCaptureStatus *status)
{
    questions++;
    return really_ask(stream, status);
}

static ebb__device *inside(const core *c)
{
    ebb_status status;
    return ebb__device_find(c->device, &status);
}

static void count_questions(const core *c)
{
    really_ask = inside(c)->driver.cuStreamIsCapturing;
    inside(c)->driver.cuStreamIsCapturing = ask;
}

static void open_counted(core *c, uint64_t limit)
{
    core_open(c, 512 * MIB, limit);
    count_questions(c);
}

/* Questions that `times` hits and unpins take. No mark must fall due meanwhile: a few times only. */
static unsigned long asked(ebb_vbar vbar, uint64_t bytes, int times, CUstream stream)
{
    CHECK_EQ(rig_touch(vbar, 0, bytes, stream), EBB_OK); /* the last user, from now on */
    unsigned long before = questions;
    for (int i = 0; i < times; i++)
        CHECK_EQ(rig_touch(vbar, 0, bytes, stream), EBB_OK);
    return questions - before;
}

/* ---- what the promise saves ------------------------------------------------------------------------ */

static void an_unpin_asks_once_and_of_a_stream_that_never_captures_not_at_all(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, 3 * LARGE);
    CUstream lasting = core_lasting(&c), promised = core_promised(&c);
    CHECK_EQ(asked(v, LARGE, 20, lasting), 20);
    CHECK_EQ(asked(v, 3 * LARGE, 20, lasting), 20);
    CHECK_EQ(asked(v, LARGE, 20, promised), 0);
    CHECK_EQ(asked(v, 3 * LARGE, 20, promised), 0);
    CHECK_EQ(asked(v, LARGE, 20, NULL), 0);

    ebb_range ranges[2] = {{0, LARGE}, {LARGE, LARGE}};
    uint64_t signatures[2];
    for (int i = 0; i < 2; i++) {
        CUstream stream = i ? promised : lasting;
        CHECK_EQ(rig_touch(v, 0, 2 * LARGE, stream), EBB_OK);
        unsigned long before = questions;
        CHECK_EQ(ebb_vbar_fault_many(v, ranges, 2, stream, signatures), EBB_OK);
        CHECK_EQ(ebb_vbar_unpin_many(v, ranges, 2, stream), EBB_OK);
        CHECK_EQ(questions - before, i ? 0 : 2);
    }
    core_close(&c);
}

static void a_hit_and_its_unpin_call_no_driver(void)
{
    NEEDS_SIM("only a simulated GPU counts the driver's calls");
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    ebb_vbar v = core_vbar(&c, 2 * LARGE);
    CUstream s = core_promised(&c);
    CHECK_EQ(rig_touch(v, 0, 2 * LARGE, s), EBB_OK);
    unsigned long before = ebbsim_calls(NULL);
    for (int i = 0; i < 50; i++)
        CHECK_EQ(rig_touch(v, 0, 2 * LARGE, s), EBB_OK);
    CHECK_EQ(ebbsim_calls(NULL), before);
    core_close(&c);
}

static void a_mark_is_made_now_and_then_and_asks(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CUstream s = core_promised(&c);
    CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
    unsigned long before = questions;
    for (int i = 0; i < 5000; i++)
        CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
    uint64_t marks = core_device_stats(&c).marks;
    CHECK(marks >= 5000 / 128 - 1 && marks <= 5000 / 64);
    CHECK(questions - before >= marks && questions - before <= 2 * marks);
    core_close(&c);
}

/* ---- its fences ------------------------------------------------------------------------------------ */

/* Use the page until a mark is made: the next use is a hit, in an epoch it has no ticket of yet. */
static void use_until_marked(core *c, ebb_vbar vbar, CUstream stream)
{
    uint64_t marks = core_device_stats(c).marks;
    for (int i = 0; core_device_stats(c).marks == marks; i++) {
        REQUIRE(i < 2 * EBB__UNPINS_A_MARK);
        CHECK_EQ(rig_touch(vbar, 0, LARGE, stream), EBB_OK);
    }
    MUST(c->driver.cuStreamSynchronize(stream));
}

static void eviction_waits_for_its_work(void)
{
    core c;
    core_open(&c, 512 * MIB, LARGE);
    rig_clock();
    ebb_vbar old = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
    CUstream s = core_promised(&c), t = core_promised(&c);
    use_until_marked(&c, old, s);
    rig_busy(&c, old, 0, LARGE, rig_length(50), s);
    uint64_t begin = rig_now(), signature;
    CHECK_EQ(ebb_vbar_fault(new, 0, LARGE, t, &signature), EBB_OK);
    CHECK(rig_took(rig_now() - begin, rig_length(50)));
    CHECK_EQ(c.driver.cuStreamQuery(s), CUDA_SUCCESS);
    CHECK_EQ(ebb_vbar_unpin(new, 0, LARGE, t), EBB_OK);
    core_close(&c);
}

static void a_hit_on_another_stream_comes_after_its_work_and_the_reverse(void)
{
    core c;
    core_open(&c, 512 * MIB, 256 * MIB);
    CUstream s[5] = {core_promised(&c), core_promised(&c), core_lasting(&c), core_stream(&c), NULL};
    for (int from = 0; from < 5; from++)
        for (int to = 0; to < 5; to++) {
            ebb_vbar v = core_vbar(&c, LARGE);
            uint64_t signature, found;
            use_until_marked(&c, v, s[from]);
            CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s[from], &signature), EBB_OK);
            if (!c.sim) /* without an order the write would come too late */
                CHECK_EQ(rig_hold(20 * MILLISECOND, s[from]), 0);
            core_fill(&c, v, 0, LARGE, 10 + 5 * from + to, s[from]);
            CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s[from]), EBB_OK);
            CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s[to], &found), EBB_OK);
            CHECK_EQ(found, signature);
            CHECK_EQ(core_read(&c, v, 5 * MIB, s[to]), 10 + 5 * from + to);
            CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s[to]), EBB_OK);
            core_check(&c);
            CHECK_EQ(ebb_vbar_destroy(v), EBB_OK);
        }
    core_close(&c);
}

/* ---- captures -------------------------------------------------------------------------------------- */

static void begin(core *c, CUstream s)
{
    MUST(c->driver.cuStreamBeginCapture(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL));
}

/* End a capture: it must have survived. */
static void end(core *c, CUstream s)
{
    CUgraph graph = NULL;
    CHECK_EQ(c->driver.cuStreamEndCapture(s, &graph), CUDA_SUCCESS);
    if (graph)
        MUST(c->driver.cuGraphDestroy(graph));
}

/* A capture uses the page: whether it is held then, as it should be. */
static bool held_by_a_capture(core *c, ebb_vbar vbar, CUstream s)
{
    begin(c, s);
    CHECK_EQ(rig_touch(vbar, 0, LARGE, s), EBB_OK);
    bool held = rig_page(vbar, 0) == (EBB_PAGE_RESIDENT | EBB_PAGE_HELD);
    end(c, s);
    CHECK_EQ(ebb_vbar_graphs_gone(vbar, s), EBB_OK);
    return held;
}

static void what_cannot_be_promised_is_refused_and_changes_nothing(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CUstream s = core_lasting(&c), t = core_promised(&c);
    for (unsigned bit = EBB_NEVER_CAPTURES << 1; bit; bit <<= 1) {
        CHECK_EQ(ebb_device_keep_stream(c.device, s, bit), EBB_INVALID);
        CHECK_EQ(ebb_device_keep_stream(c.device, s, bit | EBB_NEVER_CAPTURES), EBB_INVALID);
        CHECK_EQ(ebb_device_keep_stream(c.device, t, bit), EBB_INVALID);
    }
    CHECK_EQ(ebb_device_keep_stream(c.device, CU_STREAM_PER_THREAD, EBB_NEVER_CAPTURES),
             EBB_INVALID);
    CHECK_EQ(asked(v, LARGE, 5, s), 5);
    CHECK_EQ(asked(v, LARGE, 5, t), 0);

    begin(&c, s);
    CHECK_EQ(ebb_device_keep_stream(c.device, s, EBB_NEVER_CAPTURES), EBB_BUSY);
    end(&c, s);
    CHECK_EQ(asked(v, LARGE, 5, s), 5);
    CHECK_EQ(core_device_stats(&c).broken_promises, 0); /* it was never made */

    /* The legacy default stream is asked neither way. */
    CHECK_EQ(ebb_device_keep_stream(c.device, NULL, EBB_NEVER_CAPTURES), EBB_OK);
    CHECK_EQ(ebb_device_keep_stream(c.device, CU_STREAM_LEGACY, 0), EBB_OK);
    CHECK_EQ(asked(v, LARGE, 5, NULL), 0);
    core_close(&c);
}

static void a_driver_that_does_not_say_whether_it_captures_fails_the_promise(void)
{
    NEEDS_SIM("a real GPU's driver does not fail when told to");
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CUstream s = core_stream(&c);
    ebbsim_fail("cuStreamIsCapturing", 1, CUDA_ERROR_UNKNOWN);
    CHECK_EQ(ebb_device_keep_stream(c.device, s, EBB_NEVER_CAPTURES), EBB_DRIVER_FAILED);
    CHECK_EQ(ebbsim_failures(), 1);
    uint64_t marks = core_device_stats(&c).marks;
    CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
    CHECK_EQ(core_device_stats(&c).marks, marks + 1); /* nor does it last */
    core_close(&c);
}

static void it_can_be_taken_back_and_made_again(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CUstream s = core_promised(&c);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(asked(v, LARGE, 5, s), 0);
        uint64_t marks = core_device_stats(&c).marks;
        CHECK_EQ(ebb_device_keep_stream(c.device, s, 0), EBB_OK);
        CHECK_EQ(asked(v, LARGE, 5, s), 5);
        CHECK_EQ(core_device_stats(&c).marks, marks); /* it still lasts */
        CHECK(held_by_a_capture(&c, v, s));
        CHECK_EQ(ebb_device_keep_stream(c.device, s, EBB_NEVER_CAPTURES), EBB_OK);
    }
    CHECK_EQ(core_device_stats(&c).broken_promises, 0);
    core_close(&c);
}

/* ---- the end of a stream, and of a device ---------------------------------------------------------- */

/* The stream is as good as another with the same handle, which promised nothing, or only to last. */
static void is_unknown(core *c, ebb_vbar v, CUstream s)
{
    CHECK(held_by_a_capture(c, v, s));
    CHECK(asked(v, LARGE, 5, s) >= 5);
    CHECK_EQ(ebb_device_keep_stream(c->device, s, 0), EBB_OK);
    CHECK_EQ(asked(v, LARGE, 5, s), 5);
    CHECK(held_by_a_capture(c, v, s));
    CHECK_EQ(core_device_stats(c).broken_promises, 0);
}

static void it_ends_with_the_stream_and_is_not_the_next_ones_of_the_same_handle(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CUstream s = core_promised(&c);
    CHECK_EQ(asked(v, LARGE, 5, s), 0);
    MUST(c.driver.cuStreamSynchronize(s));
    ebb__scope scope;
    ebb__enter(inside(&c), &scope);
    ebb__stream_part_locked(inside(&c), s);
    ebb__leave(inside(&c), &scope);
    is_unknown(&c, v, s);
    core_close(&c);
}

static void it_ends_with_the_device(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    CUstream s = core_promised(&c);
    CHECK_EQ(asked(v, LARGE, 5, s), 0);
    CHECK_EQ(ebb_device_close(c.device), EBB_OK);
    MUST(rig_device(0, 256 * MIB, &c.device, NULL, 0));
    count_questions(&c);
    v = core_vbar(&c, LARGE);
    is_unknown(&c, v, s);
    core_close(&c);
}

static void a_movers_own_stream_makes_it_and_it_ends_with_the_mover(void)
{
    core c;
    open_counted(&c, 256 * MIB);
    ebb_vbar v = core_vbar(&c, LARGE);
    ebb_mover *mover;
    MUST(ebb_mover_create(c.device, &mover));
    CUstream s = ebb_mover_stream(mover);
    CHECK_EQ(asked(v, LARGE, 5, s), 0);
    MUST(ebb_mover_destroy(mover));
    const ebb__device *device = inside(&c);
    for (unsigned slot = EBB__LEGACY_SLOT + 1; slot < EBB__STREAMS; slot++)
        CHECK(!atomic_load(&device->streams[slot].never_captures));
    core_close(&c);
}

/* ---- broken ---------------------------------------------------------------------------------------- */

enum { EVICTION, FILL, OTHER_STREAM, MARKS, GRAPHS_GONE, PROMISED_AGAIN, WAYS };

/* Something under the lock that asks the stream, while it captures. */
static void let_it_ask(core *c, int way, ebb_vbar v, ebb_vbar new, CUstream s, CUstream t)
{
    uint64_t signature;
    switch (way) {
    case EVICTION:
        CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OFFLOADED);
        break;
    case FILL:
        CHECK_EQ(ebb_vbar_fault(v, 0, LARGE, s, &signature), EBB_OK);
        CHECK_EQ(ebb_vbar_filled(v, 0, LARGE, s), EBB_OK);
        CHECK_EQ(ebb_vbar_unpin(v, 0, LARGE, s), EBB_OK);
        break;
    case OTHER_STREAM:
        CHECK_EQ(rig_touch(v, 0, LARGE, t), EBB_OFFLOADED); /* cannot be put in order now */
        break;
    case MARKS:
        for (int i = 0; i < EBB__UNPINS_A_MARK; i++)
            CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
        break;
    case GRAPHS_GONE:
        CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_BUSY);
        break;
    default:
        CHECK_EQ(ebb_device_keep_stream(c->device, s, EBB_NEVER_CAPTURES), EBB_BUSY);
    }
}

static void a_broken_promise_is_found_out_where_it_is_asked_and_is_void(void)
{
    for (int way = 0; way < WAYS; way++) {
        core c;
        char why[256] = "";
        core_open(&c, 512 * MIB, LARGE);
        CUstream s = core_promised(&c), t = core_lasting(&c);
        ebb_vbar v = core_vbar(&c, LARGE), new = core_vbar(&c, LARGE);
        CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
        begin(&c, s);
        CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK);
        CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT); /* that is what breaking it does */
        CHECK_EQ(core_device_stats(&c).broken_promises, 0);

        let_it_ask(&c, way, v, new, s, t);
        CHECK_EQ(core_device_stats(&c).broken_promises, 1);
        CHECK_EQ(ebb_device_failure(c.device, why, sizeof why), EBB_OK);
        CHECK(strstr(why, "promised never to capture") != NULL);
        CHECK_EQ(rig_touch(v, 0, LARGE, s), EBB_OK); /* asked again, and so it is held */
        CHECK_EQ(rig_page(v, 0), EBB_PAGE_RESIDENT | EBB_PAGE_HELD);
        let_it_ask(&c, way, v, new, s, t);
        CHECK_EQ(core_device_stats(&c).broken_promises, 1); /* one promise, broken once */
        core_check(&c);
        end(&c, s);
        CHECK_EQ(ebb_vbar_graphs_gone(v, s), EBB_OK);
        CHECK_EQ(rig_touch(new, 0, LARGE, t), EBB_OK);
        core_close(&c);
    }
}

int main(void)
{
    RUN(an_unpin_asks_once_and_of_a_stream_that_never_captures_not_at_all);
    RUN(a_hit_and_its_unpin_call_no_driver);
    RUN(a_mark_is_made_now_and_then_and_asks);
    RUN(eviction_waits_for_its_work);
    RUN(a_hit_on_another_stream_comes_after_its_work_and_the_reverse);
    RUN(what_cannot_be_promised_is_refused_and_changes_nothing);
    RUN(a_driver_that_does_not_say_whether_it_captures_fails_the_promise);
    RUN(it_can_be_taken_back_and_made_again);
    RUN(it_ends_with_the_stream_and_is_not_the_next_ones_of_the_same_handle);
    RUN(it_ends_with_the_device);
    RUN(a_movers_own_stream_makes_it_and_it_ends_with_the_mover);
    RUN(a_broken_promise_is_found_out_where_it_is_asked_and_is_void);
    return REPORT();
}

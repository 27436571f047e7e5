/*
 * The calls of ops.c in every situation: one line per call and situation.
 */
#include <stdio.h>
#include <string.h>

#include "ops.h"

/* ---- without a capture ----------------------------------------------------------------------- */

struct errand {
    const struct op *op;
    struct things things;
    bool relaxed;
    CUresult code;
};

static void make_the_call(void *data)
{
    struct errand *errand = data;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (errand->relaxed) {
        REQUIRE(cu.cuThreadExchangeStreamCaptureMode(&mode));
    }
    errand->code = errand->op->call(&errand->things);
    if (errand->relaxed) {
        REQUIRE(cu.cuThreadExchangeStreamCaptureMode(&mode));
    }
}

static void calls_of_a_thread_without_a_context(void)
{
    static struct errand errand;
    for (size_t i = 0; i < op_count; i++) {
        errand.op = &ops[i];
        if (!op_is_there(errand.op)) {
            continue;
        }
        things_make(&errand.things);
        in_thread(make_the_call, &errand);
        op_expect(errand.op, errand.op->expected[NO_CONTEXT], errand.code);
        CUgraph graph = NULL; /* of the call that begins a capture */
        cu.cuStreamEndCapture(errand.things.capturing, &graph);
        things_drop(&errand.things);
    }
}

/* The same calls where they are at home: all succeed. */
static void calls_of_a_thread_with_a_context(void)
{
    static struct errand errand;
    for (size_t i = 0; i < op_count; i++) {
        errand.op = &ops[i];
        if (!op_is_there(errand.op)) {
            continue;
        }
        things_make(&errand.things);
        in_thread_with_context(make_the_call, &errand);
        op_expect(errand.op, OK, errand.code);
        CUgraph graph = NULL;
        cu.cuStreamEndCapture(errand.things.capturing, &graph);
        things_drop(&errand.things);
    }
}

static void calls_before_init(void)
{
    load_without_init(&cu);
    struct things none;
    for (size_t i = 0; i < op_count; i++) {
        /* cuInit itself would end the situation. */
        if (op_is_there(&ops[i]) && strstr(ops[i].text, "cuInit") == NULL) {
            memset(&none, 0, sizeof none);
            op_expect(&ops[i], ops[i].before_init, ops[i].call(&none));
        }
    }
}

/* The driver does not survive a fork: the child must not use what the parent started. */
static void calls_of_a_forked_child(void)
{
    ops_after_fork(true);
}

/* ---- during a capture ------------------------------------------------------------------------ */

struct capture_plan {
    CUstreamCaptureMode mode; /* of the capture */
    bool other_thread;        /* the call is made in another thread */
    bool relaxed;             /* the thread that makes it is in relaxed mode */
    situation column;         /* where the expected answers are */
};

static const char *const status_names[] = {"not capturing", "capturing", "invalidated"};

static void answer_text(char *text, size_t length, int code, int status, int end)
{
    snprintf(text, length, "%s(%d), %s, end %s(%d)", suite_code_name(code), code,
             status >= 0 && status <= 2 ? status_names[status] : "?", suite_code_name(end), end);
}

static void call_during_capture(const struct capture_plan *plan, const struct op *op)
{
    static struct errand errand;
    errand.op = op;
    errand.relaxed = plan->relaxed;
    things_make(&errand.things);
    struct things *t = &errand.things;
    REQUIRE(cu.cuStreamBeginCapture(t->capturing, plan->mode));
    REQUIRE(cu.cuEventRecord(t->captured, t->capturing));
    if (plan->other_thread) {
        in_thread_with_context(make_the_call, &errand);
    } else {
        make_the_call(&errand);
    }
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamIsCapturing(t->capturing, &status));
    CUresult end = cu.cuStreamEndCapture(t->capturing, &graph);
    if (graph) {
        cu.cuGraphDestroy(graph);
    }
    char expected[128], got[128];
    int wanted = op->expected[plan->column];
    bool dead = wanted >= DEAD(0);
    answer_text(expected, sizeof expected, dead ? wanted - DEAD(0) : wanted, dead ? 2 : 1,
                dead ? CAPTURE_INVALIDATED : OK);
    answer_text(got, sizeof got, (int)errand.code, (int)status, (int)end);
    suite_expect_text(HERE, op->text, expected, got);
    things_drop(t);
}

static void calls_during_captures(struct capture_plan plan)
{
    for (size_t i = 0; i < op_count; i++) {
        if (op_is_there(&ops[i])) {
            call_during_capture(&plan, &ops[i]);
        }
    }
}

static void calls_of_the_capturing_thread(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_GLOBAL, false, false, OWN_THREAD});
}

static void calls_of_the_capturing_thread_in_relaxed_mode(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_GLOBAL, false, true, OWN_RELAXED});
}

static void calls_of_another_thread_during_a_capture(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_GLOBAL, true, false, OTHER_THREAD});
}

static void calls_of_another_thread_in_relaxed_mode_during_a_capture(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_GLOBAL, true, true, OTHER_RELAXED});
}

static void calls_of_the_capturing_thread_of_a_thread_local_capture(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, false, false, OWN_THREAD});
}

static void calls_of_another_thread_during_a_thread_local_capture(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_THREAD_LOCAL, true, false, OTHER_RELAXED});
}

static void calls_of_the_capturing_thread_of_a_relaxed_capture(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_RELAXED, false, false, OWN_RELAXED});
}

static void calls_of_another_thread_during_a_relaxed_capture(void)
{
    calls_during_captures(
        (struct capture_plan){CU_STREAM_CAPTURE_MODE_RELAXED, true, false, OTHER_RELAXED});
}

const suite_case matrix_cases[] = {
    CASE(calls_of_a_thread_with_a_context),
    CASE(calls_of_a_thread_without_a_context),
    CASE_FROM(calls_before_init, WITHOUT_DRIVER),
    CASE(calls_of_a_forked_child),
    CASE(calls_of_the_capturing_thread),
    CASE(calls_of_the_capturing_thread_in_relaxed_mode),
    CASE(calls_of_another_thread_during_a_capture),
    CASE(calls_of_another_thread_in_relaxed_mode_during_a_capture),
    CASE(calls_of_the_capturing_thread_of_a_thread_local_capture),
    CASE(calls_of_another_thread_during_a_thread_local_capture),
    CASE(calls_of_the_capturing_thread_of_a_relaxed_capture),
    CASE(calls_of_another_thread_during_a_relaxed_capture),
    CASE_END,
};

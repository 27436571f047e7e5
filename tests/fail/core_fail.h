/*
 * Failure tests of the core: a scenario is run again and again, and the nth driver call of it fails,
 * for n = 1, 2, ... until none does. After each: the books are right, nothing was done that a GPU
 * would punish, and once the failure is over everything can be unpinned, destroyed and closed, with
 * nothing left.
 */
#ifndef EBB_CORE_FAIL_H
#define EBB_CORE_FAIL_H

#include "core/rig.h"
#include "scale.h"

enum { VBARS = 4, STREAMS = 4, PINS = 64 };

typedef struct pin {
    ebb_vbar vbar;
    uint64_t offset, bytes;
    CUstream stream;
} pin;

typedef struct scene {
    core c;
    bool open;
    ebb_vbar v[VBARS];
    CUstream s[STREAMS]; /* the first two last, the second never captures */
    pin pins[PINS];
    size_t pin_count;
    uint64_t signature[VBARS];
    CUstream graphs; /* where graphs were launched */
} scene;

/* A call of the test's own, made until it does not fail any more. */
#define INSIST(call)                                                                               \
    do {                                                                                           \
        int tries_ = 0;                                                                            \
        while ((call) != CUDA_SUCCESS && ++tries_ < 20)                                            \
            continue;                                                                              \
        CHECK(tries_ < 20);                                                                        \
    } while (0)

/* Statuses that a failing driver may lead to. Anything else is a mistake of ours. */
static bool known(ebb_status status)
{
    return status == EBB_OK || status == EBB_OFFLOADED || status == EBB_DRIVER_FAILED ||
           status == EBB_NO_ADDRESSES || status == EBB_BUSY || status == EBB_GONE ||
           status == EBB_NO_HOST_MEMORY;
}

static bool ok(ebb_status status)
{
    if (!known(status))
        FAIL("status %s", ebb_status_name(status));
    return status == EBB_OK;
}

static void open_scene(scene *x, uint64_t limit)
{
    char why[256] = "";
    ebb_status status = rig_device(0, limit, &x->c.device, why, sizeof why);
    x->open = status == EBB_OK;
    CHECK(x->open || why[0]);
    for (int i = 0; i < 2 && x->open; i++)
        ok(ebb_device_keep_stream(x->c.device, x->s[i], i ? EBB_NEVER_CAPTURES : 0));
}

static void create(scene *x, int i, uint64_t bytes, ebb_page_out page_out)
{
    ebb_vbar_options options = {
        .size = sizeof options, .bytes = bytes, .page_out = page_out, .user = x};
    if (!ok(ebb_vbar_create(x->c.device, &options, &x->v[i])))
        x->v[i].id = 0;
}

/* End a use; if that fails it is made up for later. */
static void unpin(scene *x, int i, uint64_t offset, uint64_t bytes, CUstream stream)
{
    if (ebb_vbar_unpin(x->v[i], offset, bytes, stream) == EBB_OK)
        return;
    REQUIRE(x->pin_count < PINS);
    x->pins[x->pin_count++] = (pin){x->v[i], offset, bytes, stream};
}

/* Wait for a stream, without disturbing a capture on another. */
static void see_over(scene *x, CUstream stream)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    INSIST(x->c.driver.cuThreadExchangeStreamCaptureMode(&mode));
    INSIST(x->c.driver.cuStreamSynchronize(stream));
    INSIST(x->c.driver.cuThreadExchangeStreamCaptureMode(&mode));
}

/* Use a range: fill it if it is new (then it may only be read if that is known to all), read it. */
static ebb_status use(scene *x, int i, uint64_t offset, uint64_t bytes, CUstream stream)
{
    uint64_t signature;
    ebb_vbar_stats stats = {.size = sizeof stats};
    ebb_status status = ebb_vbar_fault(x->v[i], offset, bytes, stream, &signature);
    if (!ok(status))
        return status;
    ok(ebb_vbar_get_stats(x->v[i], &stats));
    if (stats.address) {
        int access = signature != x->signature[i] ? EBBSIM_WRITE : EBBSIM_READ;
        /* It may be this call that fails: then there was no work. */
        rig_kernel("use", stats.address + offset, bytes, access, 200000, stream);
    }
    if (signature != x->signature[i]) {
        if (ok(ebb_vbar_filled(x->v[i], offset, bytes, stream)))
            x->signature[i] = signature;
        else /* nobody else knows of the fill, and would begin one of his own */
            see_over(x, stream);
    }
    unpin(x, i, offset, bytes, stream);
    return EBB_OK;
}

static void open_books(scene *x)
{
    rig_cards(1, 512 * MIB, 1);
    ebbsim_clock_virtual(1);
    *x = (scene){.c = {.sim = true}};
    core_driver(&x->c);
    for (int i = 0; i < STREAMS; i++)
        MUST(x->c.driver.cuStreamCreate(&x->s[i], CU_STREAM_NON_BLOCKING));
}

/* The failure is over: everything can be put in order. */
static void close_books(scene *x)
{
    if (x->open) {
        char why[256] = "";
        if (ebb_check(x->c.device, why, sizeof why) != EBB_OK)
            FAIL("%s", why);
        for (size_t i = 0; i < x->pin_count; i++)
            CHECK_EQ(ebb_vbar_unpin(x->pins[i].vbar, x->pins[i].offset, x->pins[i].bytes,
                                    x->pins[i].stream),
                     EBB_OK);
        for (int i = 0; i < VBARS; i++) {
            ebb_vbar_stats stats = {.size = sizeof stats};
            if (!x->v[i].id || ebb_vbar_get_stats(x->v[i], &stats) == EBB_GONE)
                continue;
            CHECK_EQ(stats.pinned, 0);
            CHECK_EQ(ebb_vbar_graphs_gone(x->v[i], x->graphs), EBB_OK);
            CHECK_EQ(ebb_check(x->c.device, NULL, 0), EBB_OK);
            CHECK_EQ(ebb_vbar_destroy(x->v[i]), EBB_OK);
        }
        CHECK_EQ(ebb_device_close(x->c.device), EBB_OK);
    }
    for (int i = 0; i < STREAMS; i++)
        if (x->s[i])
            MUST(x->c.driver.cuStreamDestroy(x->s[i]));
    MUST(x->c.driver.cuDevicePrimaryCtxRelease(0));
    CHECK_EQ(ebbsim_hazards(), 0);
    CHECK_EQ(rig_left(), 0);
    const char *wrong = ebbsim_check();
    if (wrong)
        FAIL("%s", wrong);
    ebb__driver_close(&x->c.driver);
}

/* Run a scenario until no call of it fails any more; `row` calls in a row fail at a time. */
static void fail_every_call(const char *name, void (*run)(scene *), unsigned row)
{
    static const int all[] = {1, 2, 600, 700, 999};
    enum { CODES = sizeof all / sizeof *all };
    /* With a sanitizer one code for each number in a row: paths differ little by code. */
    const int *codes = all + SCALED(0, row % CODES);
    unsigned long n = 0;
    for (size_t k = 0; k < SCALED(CODES, 1); k++) {
        unsigned long fired = 1;
        for (n = 1; fired && n < 3000; n++) {
            scene x;
            int before = harness_failures;
            open_books(&x);
            for (unsigned i = 0; i < row; i++)
                MUST(ebbsim_fail(NULL, n + i, codes[k]));
            run(&x);
            fired = ebbsim_failures();
            ebbsim_fail_clear();
            close_books(&x);
            if (harness_failures != before) {
                FAIL("%s: when call %lu fails with %d (%u in a row)", name, n, codes[k], row);
                if (harness_failures > 60)
                    exit(1);
            }
        }
        CHECK(n < 3000);
    }
    printf("       %s: %lu calls\n", name, n - 2);
}

#endif

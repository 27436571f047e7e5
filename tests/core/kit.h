/*
 * What tests of the core have in common: a device with a limit, streams, and bytes that can be told
 * apart, on the simulated GPU or, with EBBTIDE_TEST_GPU set, on a real one. What only a simulated one
 * can say (hazards, a census, failing calls) is asked where there is one; a test that is about nothing
 * else is skipped. With EBBTIDE_DRIVER set to the simulator as well, what is done to a GPU is done to a
 * simulated one that cannot be told from it.
 */
#ifndef EBB_CORE_KIT_H
#define EBB_CORE_KIT_H

#include <stdbool.h>

#include "driver.h"
#include "ebbtide.h"
#include "ebbtide_sim.h"
#include "harness.h"

#define MIB UINT64_C(1048576)
#define LARGE (32 * MIB)
#define SMALL (2 * MIB)

typedef struct core {
    ebb_device device;
    ebb__driver driver;
    CUcontext context;
    bool sim;
    unsigned char *host;  /* pinned, KIT_HOST bytes, for reading back */
    unsigned char *work;  /* pinned, KIT_WORK bytes: of the work that rig.h has a real GPU do */
    CUstream streams[64]; /* made by core_stream(): they live as long as the device */
    unsigned stream_count;
} core;

enum { KIT_HOST = 1 << 20, KIT_WORK = 1 << 20 };

/* The one that is open now. */
__attribute__((unused)) static core *kit_core;

/* The GPU is the simulated one, and known to be. */
__attribute__((unused)) static bool core_sim(void)
{
    return !getenv("EBBTIDE_TEST_GPU");
}

__attribute__((unused)) static const char *core_library(void)
{
    return core_sim() ? SIM_LIBRARY : NULL;
}

#define NEEDS_SIM(why)                                                                             \
    do {                                                                                           \
        if (!core_sim())                                                                           \
            SKIP_TEST(why);                                                                        \
    } while (0)

/* Calls a test takes for granted: another answer ends the program. */
#define MUST(call)                                                                                 \
    do {                                                                                           \
        int code_ = (int)(call);                                                                   \
        if (code_ != 0) {                                                                          \
            FAIL("%s gave %d", #call, code_);                                                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

__attribute__((unused)) static void core_driver(core *c)
{
    char why[256];
    c->sim = core_sim();
    if (ebb__driver_open(&c->driver, core_library(), why, sizeof why) != EBB_OK) {
        FAIL("the driver does not open: %s", why);
        exit(1);
    }
    MUST(c->driver.cuDevicePrimaryCtxRetain(&c->context, 0));
    MUST(c->driver.cuCtxSetCurrent(c->context));
    if (!c->sim) {
        void *work;
        MUST(c->driver.cuMemHostAlloc(&work, KIT_WORK, 0));
        memset(work, 0, KIT_WORK);
        c->work = work;
    }
    kit_core = c;
}

/* Undo core_driver(), but for the library. Whatever is queued is waited for. */
__attribute__((unused)) static void core_release(core *c)
{
    if (c->work)
        MUST(c->driver.cuMemFreeHost(c->work));
    kit_core = NULL;
    MUST(c->driver.cuDevicePrimaryCtxRelease(0));
}

/* A device of `memory` bytes (simulated; a real one has what it has) with a limit. */
__attribute__((unused)) static void core_open(core *c, uint64_t memory, uint64_t limit)
{
    *c = (core){.sim = core_sim()};
    if (c->sim) {
        ebbsim_reset();
        ebbsim_card card;
        ebbsim_card_default(&card, memory);
        card.context = 0;
        MUST(ebbsim_card_add(&card, NULL));
        ebbsim_on_hazard(EBBSIM_PRINT);
    }
    ebb_device_options options = {
        .size = sizeof options, .library = core_library(), .limit = limit, .headroom = 0};
    char why[256];
    ebb_status status = ebb_device_open(&options, &c->device, why, sizeof why);
    if (status != EBB_OK) {
        FAIL("the device does not open: %s: %s", ebb_status_name(status), why);
        exit(1);
    }
    core_driver(c);
    void *host;
    MUST(c->driver.cuMemHostAlloc(&host, KIT_HOST, 0));
    c->host = host;
}

/* The books are right, and nothing was done that a GPU would punish. */
__attribute__((unused)) static void core_check(core *c)
{
    char why[256];
    if (ebb_check(c->device, why, sizeof why) != EBB_OK)
        FAIL("%s", why);
    if (c->sim) {
        CHECK_EQ(ebbsim_hazards(), 0);
        const char *wrong = ebbsim_check();
        if (wrong)
            FAIL("%s", wrong);
    }
}

/* Close everything: nothing is left. */
__attribute__((unused)) static void core_close(core *c)
{
    core_check(c);
    MUST(c->driver.cuMemFreeHost(c->host));
    CHECK_EQ(ebb_device_close(c->device), EBB_OK);
    CHECK_EQ(ebb_device_close(c->device), EBB_GONE);
    while (c->stream_count)
        MUST(c->driver.cuStreamDestroy(c->streams[--c->stream_count]));
    core_release(c);
    if (c->sim) {
        ebbsim_census n = {.size = sizeof n};
        ebbsim_census_take(&n);
        CHECK_EQ(n.reservations + n.handles + n.frames + n.mappings + n.allocations + n.events +
                     n.contexts + n.host_blocks,
                 0);
    }
    ebb__driver_close(&c->driver);
}

__attribute__((unused)) static CUstream core_stream(core *c)
{
    CUstream stream = NULL;
    REQUIRE(c->stream_count < sizeof c->streams / sizeof *c->streams);
    MUST(c->driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    c->streams[c->stream_count++] = stream;
    return stream;
}

/* A stream that was promised to last. */
__attribute__((unused)) static CUstream core_lasting(core *c)
{
    CUstream stream = core_stream(c);
    MUST(ebb_device_keep_stream(c->device, stream, 0));
    return stream;
}

/* One that was promised never to capture, too. */
__attribute__((unused)) static CUstream core_promised(core *c)
{
    CUstream stream = core_stream(c);
    MUST(ebb_device_keep_stream(c->device, stream, EBB_NEVER_CAPTURES));
    return stream;
}

__attribute__((unused)) static ebb_vbar core_vbar(core *c, uint64_t bytes)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes};
    ebb_vbar vbar = {0};
    MUST(ebb_vbar_create(c->device, &options, &vbar));
    return vbar;
}

__attribute__((unused)) static ebb_vbar_stats core_stats(ebb_vbar vbar)
{
    ebb_vbar_stats stats = {.size = sizeof stats};
    MUST(ebb_vbar_get_stats(vbar, &stats));
    return stats;
}

__attribute__((unused)) static ebb_device_stats core_device_stats(core *c)
{
    ebb_device_stats stats = {.size = sizeof stats};
    MUST(ebb_device_get_stats(c->device, &stats));
    return stats;
}

/* Queue the filling of a pinned range with a byte. */
__attribute__((unused)) static void core_fill(core *c, ebb_vbar vbar, uint64_t offset,
                                              uint64_t bytes, int value, CUstream stream)
{
    MUST(c->driver.cuMemsetD8Async(core_stats(vbar).address + offset, (unsigned char)value, bytes,
                                   stream));
}

/* The byte at an offset of a pinned range, as work on `stream` sees it now. */
__attribute__((unused)) static int core_read(core *c, ebb_vbar vbar, uint64_t offset,
                                             CUstream stream)
{
    MUST(c->driver.cuMemcpyDtoHAsync(c->host, core_stats(vbar).address + offset, 1, stream));
    MUST(c->driver.cuStreamSynchronize(stream));
    return c->host[0];
}

/* Fault a range, fill it if it is new, unpin it. What fault said. */
__attribute__((unused)) static ebb_status core_use(core *c, ebb_vbar vbar, uint64_t offset,
                                                   uint64_t bytes, uint64_t *signature, int value,
                                                   CUstream stream)
{
    uint64_t found;
    ebb_status status = ebb_vbar_fault(vbar, offset, bytes, stream, &found);
    if (status != EBB_OK)
        return status;
    if (found != *signature) {
        core_fill(c, vbar, offset, bytes, value, stream);
        MUST(ebb_vbar_filled(vbar, offset, bytes, stream));
        *signature = found;
    }
    MUST(ebb_vbar_unpin(vbar, offset, bytes, stream));
    return EBB_OK;
}

#endif

/*
 * What the sharper tests add to the kit: several cards, kernels, victims by name, and a census.
 *
 * A kernel of a declared length is the simulated GPU's. On a real one its stream is held by a gate, a
 * word of pinned memory that a thread of ours sets when the time has come, whatever else happens; what
 * the kernel touches is touched behind it, by copies and memsets. Memory that was unmapped too early
 * is an illegal access then, and no call succeeds any more.
 */
#ifndef EBB_CORE_RIG_H
#define EBB_CORE_RIG_H

#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "kit.h"

enum { MILLISECOND = 1000000 };

/* ---- time ----------------------------------------------------------------------------------------- */

__attribute__((unused)) static void rig_sleep(uint64_t nanoseconds)
{
    struct timespec left = {.tv_sec = (time_t)(nanoseconds / 1000000000),
                            .tv_nsec = (long)(nanoseconds % 1000000000)};
    while (nanosleep(&left, &left))
        continue;
}

/* Nanoseconds, by the clock that work goes by. */
__attribute__((unused)) static uint64_t rig_now(void)
{
    if (core_sim())
        return ebbsim_now();
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

/* Let waiting cost nothing, where that can be had. */
__attribute__((unused)) static void rig_clock(void)
{
    if (core_sim())
        ebbsim_clock_virtual(1);
}

/* How long work takes that shall be waited for: to the clock on the wall, long enough to be told. */
__attribute__((unused)) static uint64_t rig_length(uint64_t milliseconds)
{
    return milliseconds * MILLISECOND * (core_sim() ? 1 : 5);
}

/* And work that is not to be waited for. */
__attribute__((unused)) static uint64_t rig_forever(void)
{
    return UINT64_C(2000) * MILLISECOND;
}

/* It took as long as work of that length: exactly so, or, to the clock on the wall, not as long as
   whatever goes on for ever. */
__attribute__((unused)) static bool rig_took(uint64_t took, uint64_t length)
{
    if (core_sim())
        return took + MILLISECOND > length && took < length + MILLISECOND;
    return took >= length / 2 && took < length + rig_forever() / 2;
}

/* ---- gates, on a real GPU -------------------------------------------------------------------------- */

enum { RIG_GATES = 4096, RIG_GATE_BYTES = 64, RIG_CELLS = 65536, RIG_CELL_BYTES = 8 };
_Static_assert(RIG_GATES *RIG_GATE_BYTES + RIG_CELLS * RIG_CELL_BYTES <= KIT_WORK, "room");

typedef struct rig_gate {
    _Atomic uint32_t *word;
    uint64_t nanoseconds;
} rig_gate;

__attribute__((unused)) static void *rig_gatekeeper(void *data)
{
    rig_gate gate = *(rig_gate *)data;
    free(data);
    rig_sleep(gate.nanoseconds);
    /* With this the memory is not ours any more: whoever waits for it may be the last. */
    atomic_store_explicit(gate.word, 1, memory_order_release);
    return NULL;
}

/* Hold a stream for a while. */
__attribute__((unused)) static int rig_hold(uint64_t nanoseconds, CUstream stream)
{
    static atomic_uint made;
    unsigned number = atomic_fetch_add(&made, 1) % RIG_GATES;
    rig_gate *gate = malloc(sizeof *gate);
    REQUIRE(gate);
    gate->word = (_Atomic uint32_t *)(void *)(kit_core->work + (size_t)number * RIG_GATE_BYTES);
    gate->nanoseconds = nanoseconds;
    atomic_store(gate->word, 0);
    int code = (int)kit_core->driver.cuStreamWaitValue32(stream, (CUdeviceptr)(uintptr_t)gate->word,
                                                         1, CU_STREAM_WAIT_VALUE_GEQ);
    if (code) {
        free(gate);
        return code;
    }
    pthread_t thread;
    if (pthread_create(&thread, NULL, rig_gatekeeper, gate)) {
        FAIL("no thread opens the gate");
        gate->nanoseconds = 0;
        rig_gatekeeper(gate);
    } else {
        pthread_detach(thread);
    }
    return 0;
}

__attribute__((unused)) static void rig_doze(void *data)
{
    rig_sleep((uint64_t)(uintptr_t)data);
}

/* Touch both ends of a range, after a while. */
__attribute__((unused)) static int rig_real_kernel(uint64_t address, uint64_t bytes, int access,
                                                   uint64_t nanoseconds, CUstream stream)
{
    static atomic_uint made;
    const ebb__driver *cu = &kit_core->driver;
    int code = 0;
    if (nanoseconds >= MILLISECOND) {
        CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
        code = (int)cu->cuStreamIsCapturing(stream, &capture);
        if (code)
            return code;
        /* A gate opens once, a graph is launched many times. */
        code = capture == CU_STREAM_CAPTURE_STATUS_NONE
                   ? rig_hold(nanoseconds, stream)
                   : (int)cu->cuLaunchHostFunc(stream, rig_doze, (void *)(uintptr_t)nanoseconds);
    }
    uint64_t size = bytes < 4 ? bytes : 4;
    for (int end = 0; end < 2 && !code && bytes; end++) {
        uint64_t at = end ? address + bytes - size : address;
        if (access & EBBSIM_READ) {
            size_t cell = atomic_fetch_add(&made, 1) % RIG_CELLS;
            unsigned char *to = kit_core->work + RIG_GATES * RIG_GATE_BYTES + cell * RIG_CELL_BYTES;
            code = (int)cu->cuMemcpyDtoHAsync(to, at, size, stream);
        }
        if (!code && access & EBBSIM_WRITE)
            code = (int)cu->cuMemsetD8Async(at, 0x5a, size, stream);
    }
    return code;
}

/* ---- cards ---------------------------------------------------------------------------------------- */

/* Everything that should be zero when all is closed, added up, where it can be known. */
__attribute__((unused)) static unsigned long long rig_left(void)
{
    if (!core_sim())
        return 0;
    ebbsim_census n = {.size = sizeof n};
    ebbsim_census_take(&n);
    return n.reservations + n.handles + n.frames + n.mappings + n.allocations + n.host_blocks +
           n.streams + n.events + n.contexts + n.graphs + n.captures;
}

/* Start over with `cards` simulated cards; a real machine has what it has. How many there are. */
__attribute__((unused)) static int rig_cards(int cards, uint64_t memory, int peer)
{
    if (!core_sim()) {
        ebb_probe_result found = {.size = sizeof found};
        MUST(ebb_probe(NULL, 0, &found));
        return found.device_count;
    }
    ebbsim_reset();
    ebbsim_on_hazard(EBBSIM_PRINT);
    for (int i = 0; i < cards; i++) {
        ebbsim_card card;
        ebbsim_card_default(&card, memory);
        card.context = 0;
        card.peer = peer;
        MUST(ebbsim_card_add(&card, NULL));
    }
    return cards;
}

__attribute__((unused)) static ebb_status rig_device(int index, uint64_t limit, ebb_device *device,
                                                     char *why, size_t length)
{
    ebb_device_options options = {
        .size = sizeof options, .library = core_library(), .index = index, .limit = limit};
    return ebb_device_open(&options, device, why, length);
}

/* ---- work ----------------------------------------------------------------------------------------- */

/* A kernel of `nanoseconds` that touches a range. */
__attribute__((unused)) static int rig_kernel(const char *name, uint64_t address, uint64_t bytes,
                                              int access, uint64_t nanoseconds, CUstream stream)
{
    if (!core_sim())
        return rig_real_kernel(address, bytes, access, nanoseconds, stream);
    ebbsim_range range = {address, bytes, access};
    ebbsim_work work = {.size = sizeof work,
                        .name = name,
                        .ranges = &range,
                        .range_count = bytes ? 1 : 0,
                        .nanoseconds = nanoseconds};
    return ebbsim_launch(&work, stream);
}

/* Make a page resident, let a kernel read it for a while on a stream, and unpin it. */
__attribute__((unused)) static void rig_busy(core *c, ebb_vbar vbar, uint64_t offset,
                                             uint64_t bytes, uint64_t nanoseconds, CUstream stream)
{
    uint64_t signature;
    CHECK_EQ(ebb_vbar_fault(vbar, offset, bytes, stream, &signature), EBB_OK);
    CHECK_EQ(rig_kernel("reader", core_stats(vbar).address + offset, bytes, EBBSIM_READ,
                        nanoseconds, stream),
             0);
    CHECK_EQ(ebb_vbar_unpin(vbar, offset, bytes, stream), EBB_OK);
    (void)c;
}

/* Fault a range and unpin it again, nothing queued. What fault said. */
__attribute__((unused)) static ebb_status rig_touch(ebb_vbar vbar, uint64_t offset, uint64_t bytes,
                                                    CUstream stream)
{
    uint64_t signature;
    ebb_status status = ebb_vbar_fault(vbar, offset, bytes, stream, &signature);
    if (status == EBB_OK)
        CHECK_EQ(ebb_vbar_unpin(vbar, offset, bytes, stream), EBB_OK);
    return status;
}

/* A page's flags. */
__attribute__((unused)) static int rig_page(ebb_vbar vbar, uint64_t page)
{
    uint8_t flags[64] = {0};
    REQUIRE(page < sizeof flags);
    MUST(ebb_vbar_residency(vbar, flags, (size_t)page + 1));
    return flags[page];
}

__attribute__((unused)) static ebb_vbar rig_rising(core *c, uint64_t bytes)
{
    ebb_vbar_options options = {.size = sizeof options, .bytes = bytes, .rise = 1};
    ebb_vbar vbar = {0};
    MUST(ebb_vbar_create(c->device, &options, &vbar));
    return vbar;
}

#endif

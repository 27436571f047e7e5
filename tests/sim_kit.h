/*
 * What tests of and on the simulated GPU have in common: a card of its own for every test, the driver
 * table over it, pages, and dice that can be thrown again.
 *
 * SIM_LIBRARY, the simulator's path, comes from the build.
 */
#ifndef EBB_SIM_KIT_H
#define EBB_SIM_KIT_H

#include <stdbool.h>

#include "driver.h"
#include "ebbtide_sim.h"
#include "harness.h"

enum { MIB = 1 << 20, PAGE = 2 * MIB };

/* Dice: the same seed gives the same throws everywhere. */
typedef struct dice {
    uint64_t state;
} dice;

__attribute__((unused)) static uint64_t throw_dice(dice *d)
{
    d->state += 0x9E3779B97F4A7C15u;
    uint64_t z = d->state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

/* 0 to below n */
__attribute__((unused)) static unsigned below(dice *d, unsigned n)
{
    return (unsigned)(throw_dice(d) % n);
}

typedef struct kit {
    ebb__driver driver;
    CUcontext context[2];
    CUdeviceptr base; /* a reserved range of 64 pages */
} kit;

enum { KIT_PAGES = 64 };

/* Every call a test makes for granted goes through this: a wrong code ends the program. */
#define OK(call)                                                                                   \
    do {                                                                                           \
        int code_ = (int)(call);                                                                   \
        if (code_ != 0) {                                                                          \
            FAIL("%s gave %d", #call, code_);                                                      \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

/* Forget everything and start anew, with `cards` such cards. */
__attribute__((unused)) static void kit_start_cards(kit *k, int cards, const ebbsim_card *card,
                                                    int virtual_clock)
{
    ebbsim_reset();
    for (int i = 0; i < cards; i++) {
        OK(ebbsim_card_add(card, NULL));
    }
    ebbsim_clock_virtual(virtual_clock);
    ebbsim_on_hazard(EBBSIM_QUIET);
    char why[256];
    if (ebb__driver_open(&k->driver, SIM_LIBRARY, why, sizeof why) != EBB_OK) {
        FAIL("the simulated driver does not open: %s", why);
        exit(1);
    }
    for (int i = cards; i-- > 0;) {
        OK(k->driver.cuDevicePrimaryCtxRetain(&k->context[i], i));
        OK(k->driver.cuCtxSetCurrent(k->context[i]));
    }
    OK(k->driver.cuMemAddressReserve(&k->base, (size_t)KIT_PAGES * PAGE, 0, 0, 0));
}

/* The same, with H200s of `memory` bytes. */
__attribute__((unused)) static void kit_start(kit *k, int cards, uint64_t memory, int virtual_clock)
{
    ebbsim_card card;
    ebbsim_card_default(&card, memory);
    kit_start_cards(k, cards, &card, virtual_clock);
}

__attribute__((unused)) static CUmemGenericAllocationHandle kit_frame(kit *k, int device)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes =
                                          CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemGenericAllocationHandle handle = 0;
    OK(k->driver.cuMemCreate(&handle, PAGE, &properties, 0));
    return handle;
}

__attribute__((unused)) static void kit_access(kit *k, CUdeviceptr address, int device)
{
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, device},
                              CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    OK(k->driver.cuMemSetAccess(address, PAGE, &access, 1));
}

/* Put a frame behind page number `page`, for its own device. */
__attribute__((unused)) static CUdeviceptr kit_map(kit *k, unsigned page,
                                                   CUmemGenericAllocationHandle frame, int device)
{
    CUdeviceptr address = k->base + (CUdeviceptr)page * PAGE;
    OK(k->driver.cuMemMap(address, PAGE, 0, frame, 0));
    kit_access(k, address, device);
    return address;
}

/* A page with a frame that lives as long as it is mapped. */
__attribute__((unused)) static CUdeviceptr kit_page(kit *k, unsigned page)
{
    CUmemGenericAllocationHandle frame = kit_frame(k, 0);
    CUdeviceptr address = kit_map(k, page, frame, 0);
    OK(k->driver.cuMemRelease(frame));
    return address;
}

__attribute__((unused)) static CUstream kit_stream(kit *k)
{
    CUstream stream = NULL;
    OK(k->driver.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

/* Pinned host memory, filled with `value`. */
__attribute__((unused)) static unsigned char *kit_host(kit *k, size_t bytes, int value)
{
    void *at = NULL;
    OK(k->driver.cuMemHostAlloc(&at, bytes, 0));
    memset(at, value, bytes);
    return at;
}

__attribute__((unused)) static void kit_kernel(const char *name, CUstream stream,
                                               CUdeviceptr address, size_t bytes, int access)
{
    ebbsim_range range = {address, bytes, access};
    ebbsim_work work = {.size = sizeof work, .name = name, .ranges = &range, .range_count = 1};
    OK(ebbsim_launch(&work, stream));
}

/* Let `second` wait for what is queued on `first` so far. */
__attribute__((unused)) static void kit_order(kit *k, CUstream first, CUstream second)
{
    CUevent event = NULL;
    OK(k->driver.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(k->driver.cuEventRecord(event, first));
    OK(k->driver.cuStreamWaitEvent(second, event, 0));
    OK(k->driver.cuEventDestroy(event));
}

#endif

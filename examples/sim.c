/*
 * The simulated GPU in a page: a card, a copy, and a bug that it catches every time.
 *
 * A program that has <cuda.h> uses it as with any driver. This one has not, and declares the few
 * functions it needs; the library hands them out through cuGetProcAddress, as libcuda does.
 */
#include <stdio.h>
#include <string.h>

#include "ebbtide_sim.h"

enum { BYTES = 1 << 20 };

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *found);

/* Name and parameters of every driver function used here. */
/* clang-format off */
#define FUNCTIONS(X)                                                                               \
    X(cuInit, (unsigned flags))                                                                    \
    X(cuDevicePrimaryCtxRetain, (void **context, int device))                                      \
    X(cuCtxSetCurrent, (void *context))                                                            \
    X(cuMemAlloc, (uint64_t *address, size_t size))                                                \
    X(cuMemHostAlloc, (void **address, size_t size, unsigned flags))                               \
    X(cuStreamCreate, (void **stream, unsigned flags))                                             \
    X(cuStreamSynchronize, (void *stream))                                                         \
    X(cuMemcpyHtoDAsync, (uint64_t to, const void *from, size_t size, void *stream))
/* clang-format on */
#define DECLARE(name, parameters) static int(*name) parameters;
FUNCTIONS(DECLARE)

/* The first call that fails ends the program: an example shows the way that goes well. */
#define TRY(call)                                                                                  \
    do {                                                                                           \
        int code = (call);                                                                         \
        if (code != 0) {                                                                           \
            fprintf(stderr, "%s gave %d\n", #call, code);                                          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)
#define LOAD(name, parameters) TRY(cuGetProcAddress_v2(#name, (void **)&(name), 12000, 0, NULL));

int main(void)
{
    ebbsim_card card; /* an H200, but for its size; any figure may be changed */
    ebbsim_card_default(&card, (uint64_t)1 << 30);
    TRY(ebbsim_card_add(&card, NULL));
    ebbsim_clock_virtual(1);        /* waiting takes no time, and timings never differ */
    ebbsim_on_hazard(EBBSIM_QUIET); /* we print them ourselves */

    FUNCTIONS(LOAD)
    void *context, *pinned, *stream, *other;
    uint64_t address;
    TRY(cuInit(0));
    TRY(cuDevicePrimaryCtxRetain(&context, 0));
    TRY(cuCtxSetCurrent(context));
    TRY(cuMemAlloc(&address, BYTES));
    TRY(cuMemHostAlloc(&pinned, BYTES, 0));
    TRY(cuStreamCreate(&stream, 1)); /* CU_STREAM_NON_BLOCKING */
    TRY(cuStreamCreate(&other, 1));

    /* A copy has its effect as late as the rules allow: the memory of the card is our own, look. */
    const unsigned char *byte = (const unsigned char *)(uintptr_t)address;
    memset(pinned, 0x42, BYTES);
    TRY(cuMemcpyHtoDAsync(address, pinned, BYTES, stream));
    printf("queued: the first byte is 0x%02X\n", *byte);
    uint64_t start = ebbsim_now();
    TRY(cuStreamSynchronize(stream));
    printf("waited: it is 0x%02X, %.1f us later\n", *byte, (double)(ebbsim_now() - start) / 1e3);

    /* The bug: the kernel is on another stream, and nothing orders it after the copy it needs. */
    ebbsim_range reads = {.address = address, .bytes = BYTES, .access = EBBSIM_READ};
    ebbsim_work kernel = {
        .size = sizeof kernel, .name = "layer_norm", .ranges = &reads, .range_count = 1};
    TRY(cuMemcpyHtoDAsync(address, pinned, BYTES, stream));
    TRY(ebbsim_launch(&kernel, other));
    ebbsim_hazard hazard;
    TRY(ebbsim_hazard_get(0, &hazard));
    printf("\n%s\n", hazard.text);
    return ebbsim_hazards() == 1 ? 0 : 1;
}

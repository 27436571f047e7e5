/*
 * What the tests of the runtime's face share.
 */
#ifndef EBB_RUNTIME_KIT_H
#define EBB_RUNTIME_KIT_H

#include <stdint.h>

#include "ebbtide_sim.h"
#include "harness.h"
#include "runtime/runtime_face.h"

#define OK(call) CHECK_EQ(call, cudaSuccess)

#define MIB ((size_t)1 << 20)

/* Keep a stream busy: a kernel that touches nothing. */
__attribute__((unused)) static void busy(cudaStream_t stream, uint64_t nanoseconds)
{
    ebbsim_work work = {.size = sizeof work, .name = "busy", .nanoseconds = nanoseconds};
    CHECK_EQ(ebbsim_launch(&work, stream), 0);
}

/* A kernel that touches memory. */
__attribute__((unused)) static int touch(cudaStream_t stream, const void *memory, size_t bytes,
                                         int access)
{
    ebbsim_range range = {(uint64_t)(uintptr_t)memory, bytes, access};
    ebbsim_work work = {.size = sizeof work, .name = "touch", .ranges = &range, .range_count = 1};
    return ebbsim_launch(&work, stream);
}

#endif

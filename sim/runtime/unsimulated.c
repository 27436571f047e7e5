/*
 * The runtime's face: what is there by name only. Programs bind to these when they are loaded; whoever
 * calls one is told that it is not supported, and stderr is told once.
 */
#include "unsimulated.h"
#include "runtime.h"

#define DEFINE_UNSIMULATED(name)                                                                   \
    RT_API cudaError_t name(void);                                                                 \
    cudaError_t name(void)                                                                         \
    {                                                                                              \
        static bool said;                                                                          \
        return rt_unsimulated(#name, &said);                                                       \
    }

RT_UNSIMULATED(DEFINE_UNSIMULATED)

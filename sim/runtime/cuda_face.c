/*
 * libcuda.so.1's face: the simulated driver's functions, exported by name, for programs that link
 * with the driver or look its functions up with dlsym. Each is found as everybody else finds it,
 * through cuGetProcAddress, when the first of them is called.
 */
#define _GNU_SOURCE
#include "cuda_exports.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "driver_face.h"
#include "functions.h"

#define CUDA_API __attribute__((visibility("default")))

enum {
#define PLACE(name, since, symbol, cost, needs) PLACE_##symbol,
    SIM_FUNCTIONS(PLACE)
#undef PLACE
        PLACES
};

static const struct {
    const char *name;
    int since;
} functions[PLACES] = {
#define ROW(name, since, symbol, cost, needs) {name, since},
    SIM_FUNCTIONS(ROW)
#undef ROW
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static void *found[PLACES];

/* By the library it is in: this one exports the same name. */
static void fill(void)
{
    __typeof__(cuGetProcAddress_v2) *look_up = NULL;
    void *library = dlopen("libebbtide_sim.so", RTLD_NOW | RTLD_NOLOAD);
    void *entry = library == NULL ? NULL : dlsym(library, "cuGetProcAddress_v2");
    memcpy(&look_up, &entry, sizeof look_up);
    if (look_up == NULL) {
        return;
    }
    for (int i = 0; i < PLACES; i++) {
        CUdriverProcAddressQueryResult status;
        if (functions[i].since != 0 &&
            look_up(functions[i].name, &found[i], functions[i].since, 0, &status) != CUDA_SUCCESS) {
            found[i] = NULL;
        }
    }
}

static void *at(int place)
{
    pthread_once(&once, fill);
    return found[place];
}

#define FORWARD_TO(name, target, parameters, arguments)                                            \
    CUDA_API CUresult name parameters                                                              \
    {                                                                                              \
        __typeof__(target) *forward = NULL;                                                        \
        void *there = at(PLACE_##target);                                                          \
        memcpy(&forward, &there, sizeof forward);                                                  \
        return forward == NULL ? CUDA_ERROR_NOT_SUPPORTED : forward arguments;                     \
    }

#define FORWARD(name, parameters, arguments) FORWARD_TO(name, name, parameters, arguments)

CUDA_EXPORTS(FORWARD)

#define DECLARE(name, target, parameters, arguments) CUresult name parameters;
CUDA_OLDER(DECLARE)
CUDA_OLDER(FORWARD_TO)

static CUresult unsimulated(const char *name, bool *said)
{
    if (!__atomic_exchange_n(said, true, __ATOMIC_RELAXED)) {
        fprintf(stderr, "ebbtide sim: %s is not simulated\n", name);
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

#define REFUSE(name)                                                                               \
    CUDA_API CUresult name(void);                                                                  \
    CUresult name(void)                                                                            \
    {                                                                                              \
        static bool said;                                                                          \
        return unsimulated(#name, &said);                                                          \
    }

CUDA_UNSIMULATED(REFUSE)

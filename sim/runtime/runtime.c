/*
 * The runtime's face: start, contexts, the last error, the driver's functions by name.
 */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

rt_driver rt;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static cudaError_t started;

/* Primary contexts, each retained once while this library needs it. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static CUcontext contexts[RT_MAX_DEVICES];
static bool retained[RT_MAX_DEVICES];

rt_thread *rt_self(void)
{
    static _Thread_local rt_thread self;
    return &self;
}

/* ---- start ------------------------------------------------------------------------------------ */

/* By the library it is in: another driver in the process exports the same name. */
static __typeof__(cuGetProcAddress_v2) *look_up;

static void find_the_driver(void)
{
    void *library = dlopen("libebbtide_sim.so", RTLD_NOW | RTLD_NOLOAD);
    void *entry = library == NULL ? NULL : dlsym(library, "cuGetProcAddress_v2");
    memcpy(&look_up, &entry, sizeof entry);
}

static void load(const char *name, void *field, int version)
{
    void *function = NULL;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (look_up(name, &function, version, 0, &status) != CUDA_SUCCESS) {
        function = NULL;
    }
    memcpy(field, &function, sizeof function);
}

static void start(void)
{
    int version = RT_VERSION;
    find_the_driver();
    if (look_up == NULL) {
        started = cudaErrorInsufficientDriver;
        return;
    }
    load("cuDriverGetVersion", &rt.cuDriverGetVersion, 12000);
    if (rt.cuDriverGetVersion != NULL && rt.cuDriverGetVersion(&version) == CUDA_SUCCESS) {
        version = version < RT_VERSION ? version : RT_VERSION;
    }
#define RT_LOAD(name, form) load(name, &rt.form, version);
    RT_DRIVER(RT_LOAD)
#undef RT_LOAD
    started = RT_CALL(cuInit, 0);
}

cudaError_t rt_ready(void)
{
    pthread_once(&once, start);
    return started;
}

/* ---- contexts --------------------------------------------------------------------------------- */

cudaError_t rt_primary(int device, CUcontext *context)
{
    int count = 0;
    cudaError_t code = RT_CALL(cuDeviceGetCount, &count);
    if (code == cudaSuccess && (device < 0 || device >= count || device >= RT_MAX_DEVICES)) {
        code = cudaErrorInvalidDevice;
    }
    if (code != cudaSuccess) {
        return code;
    }
    pthread_mutex_lock(&mutex);
    if (!retained[device]) {
        code = RT_CALL(cuDevicePrimaryCtxRetain, &contexts[device], device);
        retained[device] = code == cudaSuccess;
    }
    *context = contexts[device];
    pthread_mutex_unlock(&mutex);
    return code;
}

cudaError_t rt_use(int device)
{
    CUcontext context = NULL;
    cudaError_t code = rt_primary(device, &context);
    return code != cudaSuccess ? code : RT_CALL(cuCtxSetCurrent, context);
}

/* A context that this library once used and has let go of: cudaDeviceReset, in another thread. */
static bool is_gone(CUcontext context)
{
    bool gone = false;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < RT_MAX_DEVICES; i++) {
        gone |= contexts[i] == context && !retained[i];
    }
    pthread_mutex_unlock(&mutex);
    return gone;
}

cudaError_t rt_context(void)
{
    CUcontext current = NULL;
    cudaError_t code = rt_ready();
    if (code == cudaSuccess) {
        code = RT_CALL(cuCtxGetCurrent, &current);
    }
    if (code == cudaSuccess && (current == NULL || is_gone(current))) {
        code = rt_use(rt_self()->device);
    }
    return code;
}

cudaError_t rt_forget(int device)
{
    cudaError_t code = cudaSuccess;
    pthread_mutex_lock(&mutex);
    if (retained[device]) {
        retained[device] = false;
        code = RT_CALL(cuDevicePrimaryCtxRelease_v2, device);
    }
    pthread_mutex_unlock(&mutex);
    return code;
}

/* ---- errors ----------------------------------------------------------------------------------- */

/* After these the context is lost; the error stays. */
static bool is_sticky(cudaError_t code)
{
    return code == cudaErrorIllegalAddress || code == cudaErrorLaunchFailure;
}

cudaError_t rt_leave(cudaError_t code)
{
    if (code != 0) {
        rt_thread *self = rt_self();
        self->last = code;
        self->launched = false;
    }
    return code;
}

cudaError_t cudaGetLastError(void)
{
    rt_thread *self = rt_self();
    cudaError_t code = self->last;
    if (!is_sticky(code)) {
        self->last = cudaSuccess;
    }
    return code;
}

cudaError_t cudaPeekAtLastError(void)
{
    return rt_self()->last;
}

const char *cudaGetErrorName(cudaError_t code)
{
    switch (code) {
#define RT_ERROR_NAME(value, name, text)                                                           \
    case name:                                                                                     \
        return #name;
        RT_ERRORS(RT_ERROR_NAME)
#undef RT_ERROR_NAME
    }
    return "unrecognized error code";
}

/* A launch that cannot be run says which kernel it was: programs show these words. */
const char *cudaGetErrorString(cudaError_t code)
{
    const rt_thread *self = rt_self();
    if (code == cudaErrorNotSupported && self->launched) {
        return self->text;
    }
    switch (code) {
#define RT_ERROR_TEXT(value, name, text)                                                           \
    case name:                                                                                     \
        return text;
        RT_ERRORS(RT_ERROR_TEXT)
#undef RT_ERROR_TEXT
    }
    return "unrecognized error code";
}

cudaError_t rt_unsimulated(const char *name, bool *said)
{
    if (!__atomic_exchange_n(said, true, __ATOMIC_RELAXED)) {
        fprintf(stderr, "ebbtide sim: %s is not simulated\n", name);
    }
    return rt_leave(cudaErrorNotSupported);
}

/* ---- versions, and the driver's functions by name ---------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *version)
{
    if (version == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    rt_ready(); /* the version can be had where there is no device */
    return rt_leave(RT_CALL(cuDriverGetVersion, version));
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    if (version == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *version = RT_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, int *status)
{
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    int most = 0;
    cudaError_t code = rt_ready();
    if (code == cudaSuccess) {
        code = RT_CALL(cuDriverGetVersion, &most);
    }
    if (code == cudaSuccess) { /* a program may be newer than the driver: it gets what there is */
        int wanted = version > (unsigned)most ? most : (int)version;
        code = (cudaError_t)look_up(symbol, function, wanted, flags, &found);
    }
    if (code == cudaSuccess && status != NULL) {
        *status = (int)found;
    } else if (code == cudaSuccess && *function == NULL) {
        code = cudaErrorSymbolNotFound;
    }
    return rt_leave(code);
}

cudaError_t cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags,
                                    int *status)
{
    return cudaGetDriverEntryPointByVersion(symbol, function, RT_VERSION, flags, status);
}

cudaError_t cudaProfilerStart(void)
{
    return cudaSuccess;
}

cudaError_t cudaProfilerStop(void)
{
    return cudaSuccess;
}

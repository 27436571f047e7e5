/*
 * The runtime's face: kernels and device variables of the program.
 *
 * A program registers its kernels when it is loaded, each by the address of a host function that
 * stands for it. Nothing here can run them: a launch is an error, at once, that names the kernel. The
 * one exception is the kernel behind torch.cuda._sleep, which does nothing but take time.
 */
#define _GNU_SOURCE
#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ebbtide_sim.h"

/* ---- what was registered ---------------------------------------------------------------------- */

typedef struct kernel {
    const void *function;
    const char *name; /* mangled; the program's */
} kernel;

typedef struct variable {
    const void *host;
    size_t size;
    CUdeviceptr address[RT_MAX_DEVICES]; /* made when first asked for */
    struct variable *next;
} variable;

typedef struct module {
    kernel *kernels;
    size_t count, room;
    variable *variables;
    struct module *next;
} module;

/* PyTorch registers a hundred thousand kernels: adding must be quick, finding need not be. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static module *modules;

void **__cudaRegisterFatBinary(void *binary)
{
    (void)binary;
    module *m = calloc(1, sizeof *m);
    pthread_mutex_lock(&mutex);
    if (m != NULL) {
        m->next = modules;
        modules = m;
    }
    pthread_mutex_unlock(&mutex);
    return (void **)m;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    module *m = (module *)handle;
    pthread_mutex_lock(&mutex);
    for (module **link = &modules; *link != NULL; link = &(*link)->next) {
        if (*link == m) {
            *link = m->next;
            break;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (m != NULL) {
        for (variable *v = m->variables, *next; v != NULL; v = next) {
            next = v->next;
            free(v);
        }
        free(m->kernels);
        free(m);
    }
}

char __cudaInitModule(void **handle)
{
    (void)handle;
    return 1;
}

void __cudaRegisterFunction(void **handle, const char *function, char *device_function,
                            const char *name, int thread_limit, void *thread, void *block,
                            dim3 *block_dim, dim3 *grid_dim, int *warp)
{
    (void)device_function, (void)thread_limit, (void)thread, (void)block;
    (void)block_dim, (void)grid_dim, (void)warp;
    module *m = (module *)handle;
    if (m == NULL) {
        return;
    }
    pthread_mutex_lock(&mutex);
    if (m->count == m->room) {
        size_t room = m->room == 0 ? 32 : m->room * 2;
        kernel *kernels = realloc(m->kernels, room * sizeof *kernels);
        if (kernels == NULL) { /* its launch will be an error without a name */
            pthread_mutex_unlock(&mutex);
            return;
        }
        m->kernels = kernels;
        m->room = room;
    }
    m->kernels[m->count++] = (kernel){function, name};
    pthread_mutex_unlock(&mutex);
}

void __cudaRegisterVar(void **handle, char *host, char *device_address, const char *name,
                       int external, size_t size, int constant, int global)
{
    (void)device_address, (void)name, (void)external, (void)constant, (void)global;
    module *m = (module *)handle;
    variable *v = m == NULL ? NULL : calloc(1, sizeof *v);
    if (v != NULL) {
        *v = (variable){.host = host, .size = size};
        pthread_mutex_lock(&mutex);
        v->next = m->variables;
        m->variables = v;
        pthread_mutex_unlock(&mutex);
    }
}

/* The mangled name, or NULL. The last one found is remembered: a program that sleeps sleeps often. */
static const char *name_of(const void *function)
{
    static kernel last;
    pthread_mutex_lock(&mutex);
    const char *name = last.function == function ? last.name : NULL;
    for (const module *m = modules; name == NULL && m != NULL; m = m->next) {
        for (size_t i = 0; name == NULL && i < m->count; i++) {
            if (m->kernels[i].function == function) {
                name = m->kernels[i].name;
                last = m->kernels[i];
            }
        }
    }
    pthread_mutex_unlock(&mutex);
    return name;
}

/* ---- launches --------------------------------------------------------------------------------- */

/* In C++'s words, where the program has C++'s library; else as it is. To be freed; NULL: as it is. */
static char *demangled(const char *name)
{
    char *(*demangle)(const char *, char *, size_t *, int *) = NULL;
    void *library = dlopen("libstdc++.so.6", RTLD_LAZY | RTLD_NOLOAD);
    void *found = library == NULL ? NULL : dlsym(library, "__cxa_demangle");
    memcpy(&demangle, &found, sizeof demangle);
    int status = 0;
    return demangle == NULL ? NULL : demangle(name, NULL, NULL, &status);
}

static cudaError_t refuse(const char *name)
{
    rt_thread *self = rt_self();
    char *readable = name == NULL ? NULL : demangled(name);
    snprintf(
        self->text, sizeof self->text,
        "the simulated GPU cannot run device code, and this program launched the kernel %.800s",
        readable != NULL ? readable
        : name != NULL   ? name
                         : "(unknown)");
    free(readable);
    rt_leave(cudaErrorNotSupported);
    self->launched = true;
    return cudaErrorNotSupported;
}

/* torch.cuda._sleep(cycles), on a card with the clock of an H200. */
static cudaError_t sleep_on(cudaStream_t stream, void **arguments)
{
    int64_t cycles = 0;
    memcpy(&cycles, arguments[0], sizeof cycles);
    ebbsim_work work = {.size = sizeof work,
                        .name = "spin_kernel",
                        .nanoseconds = cycles > 0 ? (uint64_t)((double)cycles / 1.98) + 1 : 1};
    return rt_leave((cudaError_t)ebbsim_launch(&work, stream));
}

static cudaError_t launch(const void *function, void **arguments, cudaStream_t stream)
{
    cudaError_t code = rt_context();
    if (code != cudaSuccess) {
        return rt_leave(code);
    }
    const char *name = name_of(function);
    bool sleeps = name != NULL && arguments != NULL && strstr(name, "spin_kernel") != NULL;
    return sleeps ? sleep_on(stream, arguments) : refuse(name);
}

cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                             size_t shared, cudaStream_t stream)
{
    (void)grid, (void)block, (void)shared;
    return launch(function, arguments, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block,
                                        void **arguments, size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function,
                                void **arguments)
{
    return config == NULL ? rt_leave(cudaErrorInvalidValue)
                          : launch(function, arguments, config->stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void **arguments,
                               size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared, stream);
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t function, dim3 grid, dim3 block, void **arguments,
                                    size_t shared, cudaStream_t stream)
{
    return cudaLaunchKernel(function, grid, block, arguments, shared,
                            stream == NULL ? CU_STREAM_PER_THREAD : stream);
}

/* A kernel's handle is the address it was registered with. */
cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *function)
{
    *out = function;
    return cudaSuccess;
}

cudaError_t cudaGetKernel(cudaKernel_t *out, const void *function)
{
    return out == NULL ? rt_leave(cudaErrorInvalidValue) : __cudaGetKernel(out, function);
}

cudaError_t cudaGetFuncBySymbol(cudaKernel_t *out, const void *function)
{
    return cudaGetKernel(out, function);
}

cudaError_t cudaFuncGetName(const char **name, const void *function)
{
    if (name == NULL) {
        return rt_leave(cudaErrorInvalidValue);
    }
    *name = name_of(function);
    return *name == NULL ? rt_leave(cudaErrorInvalidDeviceFunction) : cudaSuccess;
}

/* ---- what <<<...>>> leaves for the stub that it calls ------------------------------------------ */

typedef struct configuration {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

static _Thread_local struct {
    configuration stack[8];
    unsigned depth;
} pushed;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    if (pushed.depth == sizeof pushed.stack / sizeof *pushed.stack) {
        return 1;
    }
    pushed.stack[pushed.depth++] = (configuration){grid, block, shared, stream};
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    if (pushed.depth == 0) {
        return rt_leave(cudaErrorMissingConfiguration);
    }
    const configuration *c = &pushed.stack[--pushed.depth];
    *grid = c->grid;
    *block = c->block;
    *shared = c->shared;
    memcpy(stream, &c->stream, sizeof c->stream);
    return cudaSuccess;
}

/* ---- what is said of kernels: plausible, and the same of each ---------------------------------- */

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *function)
{
    int device = 0;
    cudaError_t code = out == NULL || function == NULL ? cudaErrorInvalidValue : rt_context();
    if (code == cudaSuccess) {
        code = cudaGetDevice(&device);
    }
    if (code != cudaSuccess) {
        return rt_leave(code);
    }
    int generation = rt_attribute(75, device) * 10 + rt_attribute(76, device);
    *out = (cudaFuncAttributes){.maxThreadsPerBlock = 1024,
                                .numRegs = 32,
                                .ptxVersion = generation,
                                .binaryVersion = generation,
                                .maxDynamicSharedSizeBytes = rt_attribute(8, device),
                                .preferredShmemCarveout = -1};
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *function, int attribute, int value)
{
    (void)attribute, (void)value;
    return rt_leave(function == NULL ? cudaErrorInvalidDeviceFunction : rt_context());
}

cudaError_t cudaFuncSetCacheConfig(const void *function, int config)
{
    return cudaFuncSetAttribute(function, 0, config);
}

cudaError_t cudaFuncSetSharedMemConfig(const void *function, int config)
{
    return cudaFuncSetAttribute(function, 0, config);
}

static int blocks_that_fit(int block, size_t shared, int device)
{
    int threads = rt_attribute(39, device), most = rt_attribute(106, device);
    int by_threads = threads / ((block + 31) / 32 * 32);
    size_t all = (size_t)rt_attribute(81, device), each = shared + 1024;
    int by_shared = (int)(all / each);
    int fit = by_threads < by_shared ? by_threads : by_shared;
    return fit < most ? fit : most;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks,
                                                                   const void *function, int block,
                                                                   size_t shared, unsigned flags)
{
    (void)flags;
    int device = 0;
    cudaError_t code = blocks == NULL || function == NULL || block <= 0 || block > 1024
                           ? cudaErrorInvalidValue
                           : rt_context();
    if (code == cudaSuccess) {
        code = cudaGetDevice(&device);
    }
    if (code == cudaSuccess) {
        *blocks = blocks_that_fit(block, shared, device);
    }
    return rt_leave(code);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function,
                                                          int block, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block, shared,
                                                                  0);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, const void *function,
                                                      int blocks, int block)
{
    (void)function, (void)block;
    int device = 0;
    cudaError_t code = bytes == NULL || blocks <= 0 ? cudaErrorInvalidValue : rt_context();
    if (code == cudaSuccess) {
        code = cudaGetDevice(&device);
    }
    if (code == cudaSuccess) {
        size_t each = (size_t)(rt_attribute(81, device) / blocks - 1024);
        size_t most = (size_t)rt_attribute(97, device);
        *bytes = each < most ? each : most;
    }
    return rt_leave(code);
}

/* ---- variables -------------------------------------------------------------------------------- */

static variable *find_variable(const void *symbol)
{
    for (const module *m = modules; m != NULL; m = m->next) {
        for (variable *v = m->variables; v != NULL; v = v->next) {
            if (v->host == symbol) {
                return v;
            }
        }
    }
    return NULL;
}

/* Memory of the current device for a variable, made when it is first asked for. */
static cudaError_t locate(const void *symbol, CUdeviceptr *address, size_t *size)
{
    int device = 0;
    cudaError_t code = rt_context();
    if (code == cudaSuccess) {
        code = cudaGetDevice(&device);
    }
    if (code != cudaSuccess) {
        return code;
    }
    pthread_mutex_lock(&mutex);
    variable *v = find_variable(symbol);
    if (v != NULL && v->address[device] == 0) {
        code = RT_CALL(cuMemAlloc_v2, &v->address[device], v->size == 0 ? 1 : v->size);
    }
    *address = v == NULL ? 0 : v->address[device];
    *size = v == NULL ? 0 : v->size;
    pthread_mutex_unlock(&mutex);
    return v == NULL ? cudaErrorInvalidSymbol : code;
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol)
{
    CUdeviceptr address = 0;
    size_t size = 0;
    cudaError_t code = out == NULL ? cudaErrorInvalidValue : locate(symbol, &address, &size);
    if (code == cudaSuccess) {
        *out = (void *)(uintptr_t)address;
    }
    return rt_leave(code);
}

cudaError_t cudaGetSymbolSize(size_t *out, const void *symbol)
{
    pthread_mutex_lock(&mutex);
    const variable *v = find_variable(symbol);
    if (v != NULL && out != NULL) {
        *out = v->size;
    }
    pthread_mutex_unlock(&mutex);
    return rt_leave(out == NULL ? cudaErrorInvalidValue
                    : v == NULL ? cudaErrorInvalidSymbol
                                : cudaSuccess);
}

/* A place in a variable, if `count` bytes from `offset` on are all in it. */
static cudaError_t place(const void *symbol, size_t offset, size_t count, void **out)
{
    CUdeviceptr address = 0;
    size_t size = 0;
    cudaError_t code = locate(symbol, &address, &size);
    if (code == cudaSuccess && (offset > size || count > size - offset)) {
        code = cudaErrorInvalidValue;
    }
    *out = (void *)(uintptr_t)(address + offset);
    return rt_leave(code);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t count, size_t offset,
                               cudaMemcpyKind kind)
{
    void *to = NULL;
    cudaError_t code = place(symbol, offset, count, &to);
    return code != cudaSuccess ? code : cudaMemcpy(to, from, count, kind);
}

cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t count,
                                    size_t offset, cudaMemcpyKind kind, cudaStream_t stream)
{
    void *to = NULL;
    cudaError_t code = place(symbol, offset, count, &to);
    return code != cudaSuccess ? code : cudaMemcpyAsync(to, from, count, kind, stream);
}

cudaError_t cudaMemcpyFromSymbol(void *to, const void *symbol, size_t count, size_t offset,
                                 cudaMemcpyKind kind)
{
    void *from = NULL;
    cudaError_t code = place(symbol, offset, count, &from);
    return code != cudaSuccess ? code : cudaMemcpy(to, from, count, kind);
}

cudaError_t cudaMemcpyFromSymbolAsync(void *to, const void *symbol, size_t count, size_t offset,
                                      cudaMemcpyKind kind, cudaStream_t stream)
{
    void *from = NULL;
    cudaError_t code = place(symbol, offset, count, &from);
    return code != cudaSuccess ? code : cudaMemcpyAsync(to, from, count, kind, stream);
}

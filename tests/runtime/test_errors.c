/*
 * Errors: who remembers which, for how long, and in what words. Launches, which are always one.
 */
#include <pthread.h>

#include "kit.h"

static void the_last_error_is_told_once_and_seen_as_often_as_wanted(void)
{
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    CHECK_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
    OK(cudaSetDevice(0));
    CHECK_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    CHECK_EQ(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidDevice);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
}

static void work_that_is_not_over_is_an_error_too(void)
{
    cudaEvent_t event;
    OK(cudaEventCreate(&event));
    busy(NULL, 1000000000);
    OK(cudaEventRecord(event, NULL));
    CHECK_EQ(cudaEventQuery(event), cudaErrorNotReady);
    CHECK_EQ(cudaGetLastError(), cudaErrorNotReady);
    CHECK_EQ(cudaStreamQuery(NULL), cudaErrorNotReady);
    CHECK_EQ(cudaGetLastError(), cudaErrorNotReady);
    OK(cudaEventSynchronize(event));
    OK(cudaEventQuery(event));
    OK(cudaEventDestroy(event));
}

static void *in_another_thread(void *unused)
{
    int device = -1;
    CHECK_EQ(cudaPeekAtLastError(), cudaSuccess);
    OK(cudaGetDevice(&device));
    CHECK_EQ(device, 0);
    OK(cudaSetDevice(1));
    OK(cudaGetDevice(&device));
    CHECK_EQ(device, 1);
    return unused;
}

static void device_and_last_error_are_the_threads_own(void)
{
    pthread_t thread;
    int device = -1;
    OK(cudaSetDevice(0));
    CHECK_EQ(cudaMalloc(NULL, 1), cudaErrorInvalidValue);
    REQUIRE(pthread_create(&thread, NULL, in_another_thread, NULL) == 0);
    pthread_join(thread, NULL);
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    OK(cudaGetDevice(&device));
    CHECK_EQ(device, 0);
}

static void names_and_words_are_nvidias(void)
{
    CHECK_STR(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
    CHECK_STR(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
    CHECK_STR(cudaGetErrorString(cudaErrorNotSupported), "operation not supported");
    CHECK_STR(cudaGetErrorString(cudaErrorStreamCaptureUnsupported),
              "operation not permitted when stream is capturing");
    CHECK_STR(cudaGetErrorName((cudaError_t)12345), "unrecognized error code");
    CHECK_STR(cudaGetErrorString((cudaError_t)12345), "unrecognized error code");
}

static void versions_are_those_of_the_face(void)
{
    int version = 0;
    OK(cudaRuntimeGetVersion(&version));
    CHECK_EQ(version, EBB_CUDART == 12 ? 12040 : 13000);
    OK(cudaDriverGetVersion(&version));
    CHECK(version >= 12040);
}

static void a_driver_function_is_found_or_said_to_be_missing(void)
{
    void *function = NULL;
    int status = -1;
    OK(cudaGetDriverEntryPoint("cuMemCreate", &function, 0, &status));
    CHECK(function != NULL);
    CHECK_EQ(status, 0);
    OK(cudaGetDriverEntryPoint("cuMulticastCreate", &function, 0, &status));
    CHECK(function == NULL);
    CHECK_EQ(status, 1);
    CHECK_EQ(cudaGetDriverEntryPoint("cuNoSuchThing", &function, 0, NULL), cudaErrorSymbolNotFound);
    cudaGetLastError();
    OK(cudaGetDriverEntryPointByVersion("cuStreamGetCaptureInfo", &function, 12000, 0, &status));
    void *newer = NULL;
    OK(cudaGetDriverEntryPointByVersion("cuStreamGetCaptureInfo", &newer, 12030, 0, &status));
    CHECK(function != NULL && newer != NULL && function != newer);
}

/* ---- launches --------------------------------------------------------------------------------- */

static const dim3 one = {1, 1, 1};
static char a_kernel, a_sleep;

static void a_launch_is_an_error_that_names_the_kernel(void)
{
    CHECK_EQ(cudaLaunchKernel(&a_kernel, one, one, NULL, 0, NULL), cudaErrorNotSupported);
    CHECK_HAS(cudaGetErrorString(cudaErrorNotSupported), "my_kernel");
    CHECK_HAS(cudaGetErrorString(cudaErrorNotSupported), "cannot run device code");
    CHECK_EQ(cudaGetLastError(), cudaErrorNotSupported);
    CHECK_HAS(cudaGetErrorString(cudaErrorNotSupported), "my_kernel");
    CHECK_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
    CHECK_STR(cudaGetErrorString(cudaErrorNotSupported), "operation not supported");
    cudaGetLastError();
    cudaLaunchConfig_t config = {.gridDim = one, .blockDim = one};
    CHECK_EQ(cudaLaunchKernelExC(&config, &config, NULL), cudaErrorNotSupported);
    CHECK_HAS(cudaGetErrorString(cudaErrorNotSupported), "(unknown)");
    CHECK_EQ(cudaGetLastError(), cudaErrorNotSupported);
}

static void a_call_configuration_comes_back(void)
{
    dim3 grid = {0}, block = {0};
    size_t shared = 0;
    void *stream = NULL;
    CHECK_EQ(__cudaPushCallConfiguration((dim3){1, 2, 3}, (dim3){4, 5, 6}, 7, (void *)8), 0);
    OK(__cudaPopCallConfiguration(&grid, &block, &shared, &stream));
    CHECK(grid.y == 2 && block.z == 6 && shared == 7 && stream == (void *)8);
    CHECK_EQ(__cudaPopCallConfiguration(&grid, &block, &shared, &stream),
             cudaErrorMissingConfiguration);
    cudaGetLastError();
}

static void sleeping_takes_its_cycles(void)
{
    cudaEvent_t before, after;
    float milliseconds = 0;
    int64_t cycles = 1980000 * 5;
    void *arguments[] = {&cycles};
    OK(cudaEventCreate(&before));
    OK(cudaEventCreate(&after));
    OK(cudaEventRecord(before, NULL));
    OK(cudaLaunchKernel(&a_sleep, one, one, arguments, 0, NULL));
    OK(cudaEventRecord(after, NULL));
    OK(cudaEventSynchronize(after));
    OK(cudaEventElapsedTime(&milliseconds, before, after));
    CHECK(milliseconds > 4.9f && milliseconds < 5.2f);
    OK(cudaEventDestroy(before));
    OK(cudaEventDestroy(after));
}

static void a_kernel_has_attributes_and_an_occupancy(void)
{
    cudaFuncAttributes attributes;
    int blocks = 0;
    OK(cudaFuncGetAttributes(&attributes, &a_kernel));
    CHECK_EQ(attributes.maxThreadsPerBlock, 1024);
    OK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, &a_kernel, 256, 0));
    CHECK_EQ(blocks, 8);
    OK(cudaFuncSetAttribute(&a_kernel, 8, 1000));
}

/* ---- variables -------------------------------------------------------------------------------- */

static void a_variable_has_memory_when_it_is_asked_for(void)
{
    static char symbol;
    int in = 42, out = 0;
    size_t size = 0;
    void *address = NULL;
    void **module = __cudaRegisterFatBinary(&symbol);
    __cudaRegisterVar(module, &symbol, &symbol, "symbol", 0, 8, 0, 0);
    OK(cudaGetSymbolSize(&size, &symbol));
    CHECK_EQ(size, 8);
    OK(cudaMemcpyToSymbol(&symbol, &in, sizeof in, 4, cudaMemcpyHostToDevice));
    OK(cudaMemcpyFromSymbol(&out, &symbol, sizeof out, 4, cudaMemcpyDeviceToHost));
    CHECK_EQ(out, 42);
    CHECK_EQ(cudaMemcpyToSymbol(&symbol, &in, sizeof in, 5, cudaMemcpyHostToDevice),
             cudaErrorInvalidValue);
    CHECK_EQ(cudaGetSymbolAddress(&address, &in), cudaErrorInvalidSymbol);
    OK(cudaGetSymbolAddress(&address, &symbol));
    OK(cudaFree(address));
    __cudaUnregisterFatBinary(module);
    CHECK_EQ(cudaGetSymbolSize(&size, &symbol), cudaErrorInvalidSymbol);
    cudaGetLastError();
}

/* ---- last, because nothing works afterwards ------------------------------------------------------ */

static void a_lost_context_stays_an_error(void)
{
    void *memory = NULL;
    CHECK_EQ(touch(NULL, (void *)0x1000, 64, EBBSIM_WRITE), 0);
    CHECK_EQ(cudaStreamSynchronize(NULL), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_EQ(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_EQ(cudaMalloc(&memory, 100), cudaErrorIllegalAddress);
}

int main(void)
{
    void **module = __cudaRegisterFatBinary(&a_kernel);
    __cudaRegisterFunction(module, &a_kernel, NULL, "my_kernel", -1, NULL, NULL, NULL, NULL, NULL);
    __cudaRegisterFunction(module, &a_sleep, NULL, "_ZN2at4cuda11spin_kernelEl", -1, NULL, NULL,
                           NULL, NULL, NULL);
    __cudaRegisterFatBinaryEnd(module);
    RUN(the_last_error_is_told_once_and_seen_as_often_as_wanted);
    RUN(work_that_is_not_over_is_an_error_too);
    RUN(device_and_last_error_are_the_threads_own);
    RUN(names_and_words_are_nvidias);
    RUN(versions_are_those_of_the_face);
    RUN(a_driver_function_is_found_or_said_to_be_missing);
    RUN(a_launch_is_an_error_that_names_the_kernel);
    RUN(a_call_configuration_comes_back);
    RUN(sleeping_takes_its_cycles);
    RUN(a_kernel_has_attributes_and_an_occupancy);
    RUN(a_variable_has_memory_when_it_is_asked_for);
    RUN(a_lost_context_stays_an_error);
    __cudaUnregisterFatBinary(module);
    return REPORT();
}

/*
 * The libraries themselves: what they export, and under which version.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit.h"

static void every_name_of_the_real_library_is_there(void)
{
    char line[128], version[32];
    void *library = dlopen(CUDART, RTLD_NOW);
    FILE *names = fopen(SYMBOLS, "r");
    int count = 0;
    REQUIRE(library != NULL && names != NULL);
    snprintf(version, sizeof version, "libcudart.so.%d", EBB_CUDART);
    while (fgets(line, sizeof line, names) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (dlvsym(library, line, version) == NULL) {
            FAIL("%s is not there, or not with version %s", line, version);
        }
        count++;
    }
    CHECK(count > 400);
    fclose(names);
}

static void what_is_not_simulated_says_so(void)
{
    int (*array)(void) = NULL;
    void *found = dlsym(RTLD_DEFAULT, "cudaMallocArray");
    REQUIRE(found != NULL);
    memcpy(&array, &found, sizeof array);
    CHECK_EQ(array(), cudaErrorNotSupported);
    CHECK_EQ(cudaGetLastError(), cudaErrorNotSupported);
}

static void the_per_thread_forms_use_the_threads_stream(void)
{
    __typeof__(cudaMemsetAsync) *set = NULL;
    __typeof__(cudaStreamSynchronize) *wait = NULL;
    void *found = dlsym(RTLD_DEFAULT, "cudaMemsetAsync_ptsz"), *memory = NULL;
    memcpy(&set, &found, sizeof set);
    found = dlsym(RTLD_DEFAULT, "cudaStreamSynchronize_ptsz");
    memcpy(&wait, &found, sizeof wait);
    REQUIRE(set != NULL && wait != NULL);
    unsigned char byte = 0;
    OK(cudaMalloc(&memory, 100));
    OK(set(memory, 4, 100, NULL));
    OK(wait(NULL));
    OK(cudaMemcpy(&byte, memory, 1, cudaMemcpyDeviceToHost));
    CHECK_EQ(byte, 4);
    OK(cudaFree(memory));
}

static void *function_of(void *library, const char *name)
{
    void *found = dlsym(library, name);
    if (found == NULL) {
        FAIL("%s is not there", name);
        exit(1);
    }
    return found;
}

#define GET(library, type, name)                                                                   \
    __typeof__(type) name = NULL;                                                                  \
    do {                                                                                           \
        void *found_ = function_of(library, #name);                                                \
        memcpy(&name, &found_, sizeof name);                                                       \
    } while (0)

/* Before the runtime has started the driver: in a child that starts with this. */
static int counts_without_starting(void)
{
    void *nvml = dlopen(NVML_FACE, RTLD_NOW), *cuda = dlopen(CUDA_FACE, RTLD_NOW);
    REQUIRE(nvml != NULL && cuda != NULL);
    GET(nvml, int (*)(void), nvmlInit_v2);
    GET(nvml, int (*)(unsigned *), nvmlDeviceGetCount_v2);
    GET(nvml, int (*)(const char *, void **), nvmlDeviceGetHandleByPciBusId_v2);
    GET(nvml, int (*)(void *, char *, unsigned), nvmlDeviceGetUUID);
    GET(cuda, CUresult(*)(int *), cuDeviceGetCount);
    GET(cuda, CUresult(*)(unsigned), cuInit);
    unsigned count = 0;
    int devices = 0;
    void *card = NULL;
    char uuid[96];
    CHECK_EQ(nvmlInit_v2(), 0);
    CHECK_EQ(nvmlDeviceGetCount_v2(&count), 0);
    CHECK_EQ(count, 2);
    CHECK_EQ(nvmlDeviceGetHandleByPciBusId_v2("0000:02:00.0", &card), 0);
    CHECK_EQ(nvmlDeviceGetUUID(card, uuid, sizeof uuid), 0);
    CHECK_HAS(uuid, "GPU-65626274");
    CHECK_EQ(cuDeviceGetCount(&devices), CUDA_ERROR_NOT_INITIALIZED);
    pid_t child = fork(); /* looked at, not started: the child can start */
    if (child == 0) {
        _exit(cuInit(0) == CUDA_SUCCESS && cuDeviceGetCount(&devices) == 0 && devices == 2 ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    return harness_failures == 0 ? 0 : 1;
}

static void cards_are_counted_without_starting_the_driver(void)
{
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        _exit(counts_without_starting());
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void the_driver_can_be_linked_with(void)
{
    void *cuda = dlopen(CUDA_FACE, RTLD_NOW);
    REQUIRE(cuda != NULL);
    GET(cuda, CUresult(*)(unsigned), cuInit);
    GET(cuda, CUresult(*)(CUdeviceptr *, size_t), cuMemAlloc_v2);
    GET(cuda, CUresult(*)(CUdeviceptr), cuMemFree_v2);
    GET(cuda, CUresult(*)(void), cuLaunchKernel);
    GET(cuda, CUresult(*)(CUdevice, unsigned *, int *), cuDevicePrimaryCtxGetState);
    /* By its name without a version, as PyTorch 2.6 looks it up. */
    GET(cuda, CUresult(*)(CUstream, CUdeviceptr, uint32_t, unsigned), cuStreamWriteValue32);
    CUdeviceptr address = 0;
    unsigned flags = 0;
    int active = 0;
    OK(cudaSetDevice(0));
    CHECK_EQ(cuInit(0), 0);
    CHECK_EQ(cuDevicePrimaryCtxGetState(0, &flags, &active), 0);
    CHECK_EQ(active, 1);
    CHECK_EQ(cuMemAlloc_v2(&address, 100), 0);
    uint32_t word = 0;
    CHECK_EQ(cuStreamWriteValue32(NULL, address, 7, 0), 0);
    OK(cudaMemcpy(&word, (void *)(uintptr_t)address, 4, cudaMemcpyDeviceToHost));
    CHECK_EQ(word, 7);
    OK(cudaFree((void *)(uintptr_t)address)); /* one driver below both */
    CHECK_EQ(cuMemFree_v2(address), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cuLaunchKernel(), CUDA_ERROR_NOT_SUPPORTED);
}

int main(void)
{
    RUN(cards_are_counted_without_starting_the_driver);
    RUN(every_name_of_the_real_library_is_there);
    RUN(what_is_not_simulated_says_so);
    RUN(the_per_thread_forms_use_the_threads_stream);
    RUN(the_driver_can_be_linked_with);
    return REPORT();
}

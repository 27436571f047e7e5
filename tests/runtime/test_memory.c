/*
 * Memory, pointers, copies, properties, peers.
 */
#include "kit.h"

static void memory_comes_and_goes(void)
{
    void *memory = NULL, *none = &memory;
    size_t before = 0, during = 0, after = 0, total = 0;
    OK(cudaFree(NULL));
    OK(cudaMemGetInfo(&before, &total));
    CHECK_EQ(total, 256 * MIB);
    CHECK(before < total);
    OK(cudaMalloc(&memory, 10 * MIB));
    OK(cudaMemGetInfo(&during, &total));
    CHECK_EQ(before - during, 10 * MIB);
    OK(cudaFree(memory));
    OK(cudaMemGetInfo(&after, &total));
    CHECK_EQ(before, after);
    CHECK_EQ(cudaFree(memory), cudaErrorInvalidValue);
    OK(cudaMalloc(&none, 0));
    CHECK(none == NULL);
    CHECK_EQ(cudaMalloc(&memory, 1000 * MIB), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
}

static void pointers_say_what_they_are(void)
{
    cudaPointerAttributes a;
    char local = 0;
    void *device = NULL, *pinned = NULL;
    static char registered[8192] __attribute__((aligned(4096)));
    OK(cudaMalloc(&device, 100));
    OK(cudaHostAlloc(&pinned, 100, 0));
    OK(cudaHostRegister(registered, sizeof registered, 0));
    OK(cudaPointerGetAttributes(&a, &local));
    CHECK_EQ(a.type, cudaMemoryTypeUnregistered);
    OK(cudaPointerGetAttributes(&a, device));
    CHECK_EQ(a.type, cudaMemoryTypeDevice);
    CHECK_EQ(a.device, 0);
    CHECK(a.devicePointer == device && a.hostPointer == NULL);
    OK(cudaPointerGetAttributes(&a, pinned));
    CHECK_EQ(a.type, cudaMemoryTypeHost);
    CHECK(a.hostPointer == pinned);
    OK(cudaPointerGetAttributes(&a, registered + 5000));
    CHECK_EQ(a.type, cudaMemoryTypeHost);
    OK(cudaHostUnregister(registered));
    OK(cudaPointerGetAttributes(&a, registered));
    CHECK_EQ(a.type, cudaMemoryTypeUnregistered);
    OK(cudaFreeHost(pinned));
    OK(cudaFree(device));
}

static void copies_go_every_way(void)
{
    enum { COUNT = 1000 };
    int in[COUNT], out[COUNT] = {0};
    void *a = NULL, *b = NULL;
    for (int i = 0; i < COUNT; i++) {
        in[i] = i;
    }
    OK(cudaMalloc(&a, sizeof in));
    OK(cudaMalloc(&b, sizeof in));
    OK(cudaMemcpy(a, in, sizeof in, cudaMemcpyHostToDevice));
    OK(cudaMemcpy(b, a, sizeof in, cudaMemcpyDeviceToDevice));
    OK(cudaMemcpy(out, b, sizeof in, cudaMemcpyDeviceToHost));
    CHECK(memcmp(in, out, sizeof in) == 0);
    memset(out, 0, sizeof out);
    OK(cudaMemset(b, 0, sizeof in));
    OK(cudaMemcpy(b, in, sizeof in, cudaMemcpyDefault));
    OK(cudaMemcpyAsync(out, b, sizeof in, cudaMemcpyDefault, NULL));
    CHECK(memcmp(in, out, sizeof in) == 0);
    memset(out, 0, sizeof out);
    OK(cudaMemcpy(out, in, sizeof in, cudaMemcpyHostToHost));
    CHECK(memcmp(in, out, sizeof in) == 0);
    CHECK_EQ(cudaMemcpy(out, in, sizeof in, (cudaMemcpyKind)9), cudaErrorInvalidMemcpyDirection);
    CHECK_EQ(cudaMemcpy(a, in, sizeof in, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
    cudaGetLastError();
    OK(cudaFree(a));
    OK(cudaFree(b));
    CHECK_EQ(ebbsim_hazards(), 0);
}

static void a_copy_to_pageable_memory_blocks_and_one_to_pinned_memory_does_not(void)
{
    unsigned char pageable[256];
    unsigned char *pinned = NULL;
    void *device = NULL;
    cudaStream_t stream;
    OK(cudaStreamCreateWithFlags(&stream, CU_STREAM_NON_BLOCKING));
    OK(cudaMalloc(&device, 256));
    OK(cudaHostAlloc((void **)&pinned, 256, 0));
    OK(cudaMemsetAsync(device, 7, 256, stream));
    OK(cudaMemcpyAsync(pinned, device, 256, cudaMemcpyDeviceToHost, stream));
    CHECK_EQ(pinned[0], EBBSIM_PATTERN);
    OK(cudaMemcpyAsync(pageable, device, 256, cudaMemcpyDeviceToHost, stream));
    CHECK_EQ(pageable[0], 7);
    OK(cudaStreamSynchronize(stream));
    CHECK_EQ(pinned[0], 7);
    OK(cudaStreamDestroy(stream));
    OK(cudaFreeHost(pinned));
    OK(cudaFree(device));
}

static void rectangles_are_copied_row_by_row(void)
{
    unsigned char in[4][8], out[4][8];
    unsigned char *device = NULL;
    size_t pitch = 0;
    memset(in, 1, sizeof in);
    memset(out, 2, sizeof out);
    OK(cudaMallocPitch((void **)&device, &pitch, 5, 4));
    CHECK_EQ(pitch % 512, 0);
    OK(cudaMemset2D(device, pitch, 9, 5, 4));
    OK(cudaMemcpy2D(device, pitch, in, 8, 4, 4, cudaMemcpyHostToDevice));
    OK(cudaMemcpy2DAsync(out, 8, device, pitch, 5, 4, cudaMemcpyDeviceToHost, NULL));
    OK(cudaDeviceSynchronize());
    CHECK(out[3][3] == 1 && out[3][4] == 9 && out[3][5] == 2);
    CHECK_EQ(cudaMemcpy2D(out, 4, device, pitch, 5, 4, cudaMemcpyDeviceToHost),
             cudaErrorInvalidPitchValue);
    cudaGetLastError();
    OK(cudaFree(device));
}

static void properties_are_those_of_the_card(void)
{
    cudaDeviceProp p;
    int value = 0;
    char bus[32];
#if EBB_CUDART == 12
    OK(cudaGetDeviceProperties_v2(&p, 1));
#else
    OK(cudaGetDeviceProperties(&p, 1));
#endif
    CHECK_HAS(p.name, "Ebbtide");
    CHECK_EQ(p.totalGlobalMem, 256 * MIB);
    CHECK_EQ(p.major, 9);
    CHECK_EQ(p.warpSize, 32);
    CHECK_EQ(p.multiProcessorCount, 132);
    CHECK_EQ(p.maxThreadsPerMultiProcessor, 2048);
    CHECK_EQ(p.sharedMemPerBlock, 49152);
    CHECK_EQ(p.sharedMemPerBlockOptin, 232448);
    CHECK_EQ(p.memoryPoolsSupported, 1);
    OK(cudaDeviceGetPCIBusId(bus, sizeof bus, 1));
    OK(cudaDeviceGetByPCIBusId(&value, bus));
    CHECK_EQ(value, 1);
    OK(cudaDeviceGetAttribute(&value, 10, 0));
    CHECK_EQ(value, 32);
    CHECK_EQ(cudaDeviceGetAttribute(&value, 9999, 0), cudaErrorInvalidValue);
    CHECK_EQ(cudaDeviceGetAttribute(&value, 10, 5), cudaErrorInvalidDevice);
    cudaGetLastError();
}

static void limits_are_remembered(void)
{
    size_t value = 0;
    int least = 1, greatest = 1;
    OK(cudaDeviceSetLimit(0, 4096));
    OK(cudaDeviceGetLimit(&value, 0));
    CHECK_EQ(value, 4096);
    OK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CHECK(least == 0 && greatest < 0);
    OK(cudaCtxResetPersistingL2Cache());
}

static void a_peer_reaches_memory_once_it_was_let(void)
{
    void *memory = NULL, *later = NULL;
    int can = 0;
    OK(cudaDeviceCanAccessPeer(&can, 1, 0));
    CHECK_EQ(can, 1);
    OK(cudaMalloc(&memory, 4 * MIB));
    OK(cudaSetDevice(1));
    CHECK_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorInvalidDevice);
    OK(cudaDeviceEnablePeerAccess(0, 0));
    CHECK_EQ(cudaDeviceEnablePeerAccess(0, 0), cudaErrorPeerAccessAlreadyEnabled);
    CHECK_EQ(touch(NULL, memory, 4 * MIB, EBBSIM_READ | EBBSIM_WRITE), 0);
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    OK(cudaMalloc(&later, 4 * MIB));
    OK(cudaSetDevice(1));
    CHECK_EQ(touch(NULL, later, 4 * MIB, EBBSIM_READ), 0);
    OK(cudaDeviceSynchronize());
    CHECK_EQ(ebbsim_hazards(), 0);
    OK(cudaDeviceDisablePeerAccess(0));
    CHECK_EQ(cudaDeviceDisablePeerAccess(0), cudaErrorPeerAccessNotEnabled);
    cudaGetLastError();
    OK(cudaFree(memory));
    OK(cudaFree(later));
    OK(cudaSetDevice(0));
}

static void peers_copy_without_access(void)
{
    int in = 42, out = 0;
    void *there = NULL, *here = NULL;
    OK(cudaMalloc(&here, 4));
    OK(cudaSetDevice(1));
    OK(cudaMalloc(&there, 4));
    OK(cudaMemcpy(there, &in, 4, cudaMemcpyHostToDevice));
    OK(cudaMemcpyPeer(here, 0, there, 1, 4));
    OK(cudaDeviceSynchronize());
    OK(cudaSetDevice(0));
    OK(cudaMemcpy(&out, here, 4, cudaMemcpyDeviceToHost));
    CHECK_EQ(out, 42);
    OK(cudaFree(here));
    OK(cudaFree(there));
}

static void a_reset_device_starts_anew(void)
{
    void *memory = NULL;
    cudaPointerAttributes a;
    OK(cudaMalloc(&memory, MIB));
    OK(cudaDeviceReset());
    OK(cudaPointerGetAttributes(&a, memory));
    CHECK_EQ(a.type, cudaMemoryTypeUnregistered);
    OK(cudaMalloc(&memory, MIB));
    OK(cudaFree(memory));
}

int main(void)
{
    RUN(memory_comes_and_goes);
    RUN(pointers_say_what_they_are);
    RUN(copies_go_every_way);
    RUN(a_copy_to_pageable_memory_blocks_and_one_to_pinned_memory_does_not);
    RUN(rectangles_are_copied_row_by_row);
    RUN(properties_are_those_of_the_card);
    RUN(limits_are_remembered);
    RUN(a_peer_reaches_memory_once_it_was_let);
    RUN(peers_copy_without_access);
    RUN(a_reset_device_starts_anew);
    CHECK(ebbsim_check() == NULL);
    return REPORT();
}

/*
 * Memory and events that travel between processes.
 */
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kit.h"

typedef struct parcel {
    cudaIpcMemHandle_t memory, small;
    cudaIpcEventHandle_t event;
} parcel;

static void send_all(int fd, const void *data, size_t size)
{
    REQUIRE(write(fd, data, size) == (ssize_t)size);
}

static void receive_all(int fd, void *data, size_t size)
{
    char *at = data;
    while (size > 0) {
        ssize_t got = read(fd, at, size);
        REQUIRE(got > 0);
        at += got;
        size -= (size_t)got;
    }
}

/* The process that owns the memory; ends when the other has closed its end. */
static int owner(int out, int in)
{
    parcel p;
    void *memory = NULL, *small = NULL, *mine = NULL;
    cudaEvent_t event;
    char word = 0;
    OK(cudaMalloc(&memory, 4 * MIB));
    OK(cudaMalloc(&small, 1000));
    OK(cudaMalloc(&small, 1000)); /* not the first of its chunk */
    OK(cudaMemset(memory, 5, 4 * MIB));
    OK(cudaMemset(small, 6, 1000));
    OK(cudaEventCreateWithFlags(&event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    OK(cudaEventRecord(event, NULL));
    OK(cudaIpcGetMemHandle(&p.memory, memory));
    OK(cudaIpcGetMemHandle(&p.small, small));
    OK(cudaIpcGetEventHandle(&p.event, event));
    OK(cudaDeviceSynchronize());
    CHECK_EQ(cudaIpcOpenMemHandle(&mine, p.memory, 1), cudaErrorDeviceUninitialized);
    send_all(out, &p, sizeof p);
    receive_all(in, &word, 1);
    unsigned char seen = 0;
    OK(cudaMemcpy(&seen, memory, 1, cudaMemcpyDeviceToHost));
    CHECK_EQ(seen, 9); /* what the other wrote */
    OK(cudaFree(memory));
    return harness_failures == 0 ? 0 : 1;
}

static int to_owner[2], from_owner[2];
static pid_t owners_pid;

static void memory_and_events_are_opened_by_another_process(void)
{
    parcel p;
    unsigned char *memory = NULL, *again = NULL, *small = NULL, byte = 0;
    cudaEvent_t event;
    size_t before = 0, during = 0, total = 0;
    receive_all(from_owner[0], &p, sizeof p);
    OK(cudaMemGetInfo(&before, &total));
    OK(cudaIpcOpenEventHandle(&event, p.event));
    OK(cudaStreamWaitEvent(NULL, event, 0));
    OK(cudaEventSynchronize(event));
    OK(cudaIpcOpenMemHandle((void **)&memory, p.memory, 1));
    OK(cudaIpcOpenMemHandle((void **)&again, p.memory, 1));
    CHECK(memory == again);
    OK(cudaIpcOpenMemHandle((void **)&small, p.small, 1));
    OK(cudaMemGetInfo(&during, &total));
    CHECK_EQ(before, during); /* it is charged to its owner, once */
    OK(cudaMemcpy(&byte, memory + 4 * MIB - 1, 1, cudaMemcpyDeviceToHost));
    CHECK_EQ(byte, 5);
    OK(cudaMemcpy(&byte, small + 999, 1, cudaMemcpyDeviceToHost));
    CHECK_EQ(byte, 6);
    CHECK_EQ(cudaFree(memory), cudaErrorInvalidValue);
    OK(cudaMemset(memory, 9, 100));
    OK(cudaDeviceSynchronize());
    OK(cudaIpcCloseMemHandle(again));
    OK(cudaMemcpy(&byte, memory, 1, cudaMemcpyDeviceToHost));
    OK(cudaIpcCloseMemHandle(memory));
    CHECK_EQ(cudaIpcCloseMemHandle(memory), cudaErrorInvalidValue);
    OK(cudaIpcCloseMemHandle(small));
    OK(cudaEventDestroy(event));
    cudaGetLastError();
    int status = 0;
    send_all(to_owner[1], "x", 1);
    REQUIRE(waitpid(owners_pid, &status, 0) == owners_pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    OK(cudaMemGetInfo(&during, &total)); /* its memory, its context: gone */
    CHECK(during > before);
    CHECK_EQ(cudaIpcOpenMemHandle((void **)&memory, p.memory, 1), cudaErrorInvalidValue);
    cudaGetLastError();
}

static void what_cannot_travel_is_refused(void)
{
    cudaIpcMemHandle_t handle;
    char local = 0;
    void *pooled = NULL;
    CHECK_EQ(cudaIpcGetMemHandle(&handle, &local), cudaErrorInvalidValue);
    OK(cudaMallocAsync(&pooled, 1000, NULL));
    CHECK_EQ(cudaIpcGetMemHandle(&handle, pooled), cudaErrorInvalidValue);
    OK(cudaFreeAsync(pooled, NULL));
    memset(&handle, 0, sizeof handle);
    CHECK_EQ(cudaIpcOpenMemHandle(&pooled, handle, 1), cudaErrorInvalidValue);
    cudaGetLastError();
}

int main(void)
{
    char path[] = "/tmp/ebbtide-runtime-XXXXXX";
    int fd = mkstemp(path);
    REQUIRE(fd >= 0 && pipe(to_owner) == 0 && pipe(from_owner) == 0);
    close(fd);
    setenv("EBBTIDE_SIM_RUN", path, 1);
    owners_pid = fork();
    if (owners_pid == 0) {
        close(to_owner[1]);
        _exit(owner(from_owner[1], to_owner[0]));
    }
    RUN(memory_and_events_are_opened_by_another_process);
    RUN(what_cannot_travel_is_refused);
    CHECK_EQ(ebbsim_hazards(), 0);
    CHECK(ebbsim_check() == NULL);
    unlink(path);
    return REPORT();
}

/*
 * Small helpers of the driver suite: making the things a case starts from, and looking at memory.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

CUmemAllocationProp plain_properties(void)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    return properties;
}

CUmemAllocationProp exportable_properties(void)
{
    CUmemAllocationProp properties = plain_properties();
    properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return properties;
}

CUmemAccessDesc access_of(int device, int flags)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device},
                              .flags = flags};
    return access;
}

CUdeviceptr reserve(size_t size)
{
    CUdeviceptr address = 0;
    REQUIRE(cu.cuMemAddressReserve(&address, size, 0, 0, 0));
    return address;
}

CUmemGenericAllocationHandle create(size_t size)
{
    CUmemAllocationProp properties = plain_properties();
    CUmemGenericAllocationHandle handle = 0;
    REQUIRE(cu.cuMemCreate(&handle, size, &properties, 0));
    return handle;
}

CUmemGenericAllocationHandle create_exportable(size_t size)
{
    CUmemAllocationProp properties = exportable_properties();
    CUmemGenericAllocationHandle handle = 0;
    REQUIRE(cu.cuMemCreate(&handle, size, &properties, 0));
    return handle;
}

void map(CUdeviceptr address, size_t size, CUmemGenericAllocationHandle handle)
{
    REQUIRE(cu.cuMemMap(address, size, 0, handle, 0));
}

void set_access(CUdeviceptr address, size_t size, int flags)
{
    CUmemAccessDesc access = access_of(0, flags);
    REQUIRE(cu.cuMemSetAccess(address, size, &access, 1));
}

CUmemGenericAllocationHandle map_frame(CUdeviceptr address, size_t size)
{
    CUmemGenericAllocationHandle handle = create(size);
    map(address, size, handle);
    set_access(address, size, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    return handle;
}

void map_released_frame(CUdeviceptr address, size_t size)
{
    REQUIRE(cu.cuMemRelease(map_frame(address, size)));
}

void unmap_all_and_free(CUdeviceptr address, size_t size, size_t mapped)
{
    REQUIRE(cu.cuMemUnmap(address, mapped));
    REQUIRE(cu.cuMemAddressFree(address, size));
}

CUstream make_stream(void)
{
    CUstream stream = NULL;
    REQUIRE(cu.cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

CUstream make_blocking_stream(void)
{
    CUstream stream = NULL;
    REQUIRE(cu.cuStreamCreate(&stream, CU_STREAM_DEFAULT));
    return stream;
}

CUevent make_event(void)
{
    CUevent event = NULL;
    REQUIRE(cu.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    return event;
}

void *make_pinned(size_t size)
{
    void *memory = NULL;
    REQUIRE(cu.cuMemHostAlloc(&memory, size, 0));
    memset(memory, 0, size);
    return memory;
}

void *make_pages(size_t size)
{
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED) {
        abort();
    }
    memset(pages, 0, size);
    return pages;
}

CUdeviceptr make_memory(size_t size)
{
    CUdeviceptr address = 0;
    REQUIRE(cu.cuMemAlloc(&address, size));
    return address;
}

size_t free_memory(void)
{
    size_t bytes = 0, total = 0;
    REQUIRE(cu.cuMemGetInfo(&bytes, &total));
    return bytes;
}

void fill(CUdeviceptr address, unsigned char value, size_t size)
{
    CUstream stream = make_stream();
    REQUIRE(cu.cuMemsetD8Async(address, value, size, stream));
    REQUIRE(cu.cuStreamSynchronize(stream));
    REQUIRE(cu.cuStreamDestroy(stream));
}

bool holds(CUdeviceptr address, unsigned char value, size_t size)
{
    unsigned char *copy = malloc(size);
    if (!copy) {
        abort();
    }
    memset(copy, ~value, size);
    CUstream stream = make_stream();
    REQUIRE(cu.cuMemcpyDtoHAsync(copy, address, size, stream));
    REQUIRE(cu.cuStreamSynchronize(stream));
    REQUIRE(cu.cuStreamDestroy(stream));
    bool same = all_bytes(copy, value, size);
    free(copy);
    return same;
}

bool all_bytes(const void *memory, unsigned char value, size_t size)
{
    const unsigned char *bytes = memory;
    for (size_t i = 0; i < size; i++) {
        if (bytes[i] != value) {
            return false;
        }
    }
    return true;
}

partner partner_start(void (*function)(int socket))
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) {
        abort();
    }
    fflush(stdout);
    int pid = fork();
    if (pid < 0) {
        abort();
    }
    if (pid == 0) {
        close(ends[0]);
        function(ends[1]);
        gate_open_all();
        fflush(stdout);
        _exit(suite_failed ? 1 : 0);
    }
    close(ends[1]);
    return (partner){.pid = pid, .socket = ends[0]};
}

void partner_end(partner *other)
{
    int status = 0;
    CHECK(waitpid(other->pid, &status, 0) == other->pid);
    EXPECT_INT(0, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
    close(other->socket);
}

void send_bytes(int socket, const void *bytes, size_t size)
{
    if (send(socket, bytes, size, MSG_NOSIGNAL) != (ssize_t)size) {
        suite_check(HERE, "the other process is there to send to", false);
    }
}

void receive_bytes(int socket, void *bytes, size_t size)
{
    if (recv(socket, bytes, size, MSG_WAITALL) != (ssize_t)size) {
        suite_check(HERE, "the other process is there to receive from", false);
    }
}

void send_turn(int socket)
{
    send_bytes(socket, ".", 1);
}

void receive_turn(int socket)
{
    char turn = 0;
    receive_bytes(socket, &turn, 1);
}

void send_descriptor(int socket, int descriptor)
{
    char turn = 'd', space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec bytes = {.iov_base = &turn, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(head), &descriptor, sizeof descriptor);
    if (sendmsg(socket, &message, MSG_NOSIGNAL) != 1) {
        suite_check(HERE, "a file descriptor can be sent", false);
    }
}

int receive_descriptor(int socket)
{
    char turn = 0, space[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec bytes = {.iov_base = &turn, .iov_len = 1};
    struct msghdr message = {
        .msg_iov = &bytes, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    int descriptor = -1;
    struct cmsghdr *head = NULL;
    if (recvmsg(socket, &message, 0) == 1) {
        head = CMSG_FIRSTHDR(&message);
    }
    if (!head) {
        suite_check(HERE, "a file descriptor can be received", false);
        return -1;
    }
    memcpy(&descriptor, CMSG_DATA(head), sizeof descriptor);
    return descriptor;
}

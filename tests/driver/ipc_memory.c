/*
 * Memory between processes (cuIpcGetMemHandle).
 */
#include <string.h>

#include "more.h"

enum { LAZY = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS };

static CUipcMemHandle ticket_of(CUdeviceptr memory)
{
    CUipcMemHandle handle;
    memset(&handle, 0, sizeof handle);
    REQUIRE(more.cuIpcGetMemHandle(&handle, memory));
    return handle;
}

static void handles_of_memory(void)
{
    CUdeviceptr memory = make_memory(2 * MiB);
    CUipcMemHandle first = ticket_of(memory), second = ticket_of(memory), inside;
    CHECK(memcmp(&first, &second, sizeof first) == 0);
    EXPECT(OK, more.cuIpcGetMemHandle(&inside, memory + 4096));
    CHECK(memcmp(&first, &inside, sizeof first) == 0);
}

static void what_has_no_memory_handle(void)
{
    CUipcMemHandle handle;
    CUdeviceptr range = reserve(FRAME), gone = make_memory(4 * MiB);
    map_frame(range, FRAME);
    REQUIRE(cu.cuMemFree(gone));
    char *pinned = make_pinned(4096), *pages = make_pages(4096);
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&handle, 0));
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&handle, range));
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&handle, gone));
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&handle, (CUdeviceptr)(uintptr_t)pinned));
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&handle, (CUdeviceptr)(uintptr_t)pages));
}

static void a_memory_handle_into_nothing(void)
{
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(NULL, make_memory(2 * MiB)));
}

static void ones_own_memory_is_not_opened(void)
{
    CUipcMemHandle handle = ticket_of(make_memory(2 * MiB));
    CUdeviceptr opened = 0;
    EXPECT(INVALID_CONTEXT, more.cuIpcOpenMemHandle(&opened, handle, LAZY));
}

static void a_memory_handle_of_zeroes_opens_nothing(void)
{
    CUipcMemHandle handle;
    CUdeviceptr opened = 0;
    memset(&handle, 0, sizeof handle);
    EXPECT(INVALID_VALUE, more.cuIpcOpenMemHandle(&opened, handle, LAZY));
}

static void what_was_not_opened_is_not_closed(void)
{
    CUdeviceptr memory = make_memory(2 * MiB);
    EXPECT(INVALID_VALUE, more.cuIpcCloseMemHandle(memory));
    EXPECT(INVALID_VALUE, more.cuIpcCloseMemHandle(0));
    EXPECT(INVALID_VALUE, more.cuIpcCloseMemHandle(0x1000));
}

static void memory_handles_during_a_capture(void)
{
    CUstream stream = make_stream();
    CUdeviceptr memory = make_memory(2 * MiB);
    CUipcMemHandle handle;
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, more.cuIpcGetMemHandle(&handle, memory));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
}

/* ---- between two processes -------------------------------------------------------------------- */

static void guest(int socket)
{
    open_driver();
    open_context();
    CUipcMemHandle handle;
    CUdeviceptr memory = 0, again = 0, base = 0;
    size_t size = 0;
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, more.cuIpcOpenMemHandle(&memory, handle, LAZY));
    CHECK(holds(memory, 3, 2 * MiB));
    EXPECT(OK, more.cuMemGetAddressRange(&base, &size, memory + 5));
    CHECK(base == memory);
    EXPECT_INT(2 * MiB, size);
    int type = 0;
    EXPECT(OK, cu.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, memory));
    EXPECT_INT(CU_MEMORYTYPE_DEVICE, type);
    fill(memory, 4, 2 * MiB);
    EXPECT(INVALID_VALUE, more.cuIpcGetMemHandle(&handle, memory));
    EXPECT(INVALID_VALUE, cu.cuMemFree(memory));
    EXPECT(INVALID_VALUE, more.cuIpcCloseMemHandle(memory + 512));
    EXPECT(OK, more.cuIpcCloseMemHandle(memory));
    EXPECT(INVALID_VALUE, more.cuIpcCloseMemHandle(memory));
    send_turn(socket);
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, more.cuIpcOpenMemHandle(&memory, handle, LAZY));
    EXPECT(OK, more.cuIpcOpenMemHandle(&again, handle, LAZY));
    CHECK(again == memory);
    EXPECT(OK, more.cuIpcCloseMemHandle(memory));
    CHECK(holds(memory, 4, 2 * MiB));
    EXPECT(OK, more.cuIpcCloseMemHandle(memory));
    EXPECT(INVALID_VALUE, more.cuIpcCloseMemHandle(memory));
    send_turn(socket);
}

static void memory_is_shared_with_another_process(void)
{
    partner other = partner_start(guest);
    open_driver();
    open_context();
    CUdeviceptr memory = make_memory(2 * MiB);
    fill(memory, 3, 2 * MiB);
    CUipcMemHandle handle = ticket_of(memory);
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    CHECK(holds(memory, 4, 2 * MiB));
    send_bytes(other.socket, &handle, sizeof handle);
    receive_turn(other.socket);
    partner_end(&other);
    EXPECT(OK, cu.cuMemFree(memory));
}

static void guest_with_odd_flags(int socket)
{
    open_driver();
    open_context();
    CUipcMemHandle handle;
    CUdeviceptr memory = 0;
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(INVALID_VALUE, more.cuIpcOpenMemHandle(&memory, handle, 2));
    EXPECT(INVALID_VALUE, more.cuIpcOpenMemHandle(NULL, handle, LAZY));
    EXPECT(INVALID_VALUE, more.cuIpcOpenMemHandle(&memory, handle, 0));
}

static void the_flags_of_opening_memory(void)
{
    partner other = partner_start(guest_with_odd_flags);
    open_driver();
    open_context();
    CUipcMemHandle handle = ticket_of(make_memory(2 * MiB));
    send_bytes(other.socket, &handle, sizeof handle);
    partner_end(&other);
}

/* Closing waits for what the guest itself still does there. */
static void slow_guest(int socket)
{
    open_driver();
    open_context();
    CUipcMemHandle handle;
    CUdeviceptr memory = 0;
    gate busy = gate_make();
    CUstream stream = make_stream();
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, more.cuIpcOpenMemHandle(&memory, handle, LAZY));
    gate_hold(&busy, stream);
    REQUIRE(cu.cuMemsetD8Async(memory, 9, 2 * MiB, stream));
    EXPECT_WAITS(&busy, OK, more.cuIpcCloseMemHandle(memory));
}

static void closing_anothers_memory_waits_for_all_work(void)
{
    partner other = partner_start(slow_guest);
    open_driver();
    open_context();
    CUdeviceptr memory = make_memory(2 * MiB);
    CUipcMemHandle handle = ticket_of(memory);
    send_bytes(other.socket, &handle, sizeof handle);
    partner_end(&other);
    CHECK(holds(memory, 9, 2 * MiB));
}

static void late_guest(int socket)
{
    open_driver();
    open_context();
    CUipcMemHandle handle;
    CUdeviceptr memory = 0;
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(INVALID_VALUE, more.cuIpcOpenMemHandle(&memory, handle, LAZY));
}

static void memory_that_was_freed_is_not_opened(void)
{
    partner other = partner_start(late_guest);
    open_driver();
    open_context();
    CUdeviceptr memory = make_memory(2 * MiB);
    CUipcMemHandle handle = ticket_of(memory);
    REQUIRE(cu.cuMemFree(memory));
    send_bytes(other.socket, &handle, sizeof handle);
    partner_end(&other);
}

/* A guest that dies without closing leaves nothing behind. */
static void dying_guest(int socket)
{
    open_driver();
    open_context();
    CUipcMemHandle handle;
    CUdeviceptr memory = 0;
    receive_bytes(socket, &handle, sizeof handle);
    EXPECT(OK, more.cuIpcOpenMemHandle(&memory, handle, LAZY));
}

static void a_guest_that_dies_leaves_the_memory_alone(void)
{
    partner other = partner_start(dying_guest);
    open_driver();
    open_context();
    CUdeviceptr memory = make_memory(2 * MiB);
    fill(memory, 3, 2 * MiB);
    CUipcMemHandle handle = ticket_of(memory);
    send_bytes(other.socket, &handle, sizeof handle);
    partner_end(&other);
    CHECK(holds(memory, 3, 2 * MiB));
    EXPECT(OK, cu.cuMemFree(memory));
}

const suite_case ipc_memory_cases[] = {
    CASE(handles_of_memory),
    CASE(what_has_no_memory_handle),
    CASE(a_memory_handle_into_nothing),
    CASE(ones_own_memory_is_not_opened),
    CASE(a_memory_handle_of_zeroes_opens_nothing),
    CASE(what_was_not_opened_is_not_closed),
    CASE(memory_handles_during_a_capture),
    CASE_FROM(memory_is_shared_with_another_process, WITHOUT_DRIVER),
    CASE_FROM(the_flags_of_opening_memory, WITHOUT_DRIVER),
    CASE_FROM(closing_anothers_memory_waits_for_all_work, WITHOUT_DRIVER),
    CASE_FROM(memory_that_was_freed_is_not_opened, WITHOUT_DRIVER),
    CASE_FROM(a_guest_that_dies_leaves_the_memory_alone, WITHOUT_DRIVER),
    CASE_END,
};

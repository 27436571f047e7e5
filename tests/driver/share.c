/*
 * Frames as file descriptors: export, import, other processes.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "suite.h"

static const int FD = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

static CUresult export_to(int *descriptor, CUmemGenericAllocationHandle handle)
{
    *descriptor = -1;
    return cu.cuMemExportToShareableHandle(descriptor, handle, FD, 0);
}

static CUresult import_from(CUmemGenericAllocationHandle *handle, int descriptor)
{
    *handle = 0;
    return cu.cuMemImportFromShareableHandle(handle, (void *)(intptr_t)descriptor, FD);
}

static void map_for_use(CUdeviceptr address, size_t size, CUmemGenericAllocationHandle handle)
{
    map(address, size, handle);
    set_access(address, size, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
}

static void an_imported_frame_is_the_same_memory(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(2 * FRAME), imported = 0;
    int descriptor = -1;
    EXPECT(OK, export_to(&descriptor, handle));
    CHECK(descriptor >= 0);
    EXPECT(OK, import_from(&imported, descriptor));
    CHECK(imported != 0);
    map_for_use(range, 2 * FRAME, handle);
    map_for_use(range + 4 * FRAME, 2 * FRAME, imported);
    fill(range, 0x21, 2 * FRAME);
    CHECK(holds(range + 4 * FRAME, 0x21, 2 * FRAME));
    EXPECT_INT(0, close(descriptor));
    EXPECT(OK, cu.cuMemUnmap(range, 2 * FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    CHECK(holds(range + 4 * FRAME, 0x21, 2 * FRAME));
    EXPECT(OK, cu.cuMemUnmap(range + 4 * FRAME, 2 * FRAME));
    EXPECT(OK, cu.cuMemRelease(imported));
}

/* Does the driver know its own frame when it comes back? */
static void an_import_in_the_same_process_is_another_handle(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME), first = 0, second = 0;
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    EXPECT(OK, import_from(&first, descriptor));
    EXPECT(OK, import_from(&second, descriptor));
    CHECK(first != handle);
    CHECK(first != second);
    EXPECT(OK, cu.cuMemRelease(first));
    EXPECT(OK, cu.cuMemRelease(second));
    EXPECT(OK, cu.cuMemRelease(handle));
    close(descriptor);
}

static void an_imported_handle_has_its_properties_but_is_not_exportable(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME), imported = 0;
    CUmemAllocationProp seen;
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    REQUIRE(import_from(&imported, descriptor));
    memset(&seen, 0x77, sizeof seen);
    EXPECT(OK, cu.cuMemGetAllocationPropertiesFromHandle(&seen, imported));
    EXPECT_INT(CU_MEM_ALLOCATION_TYPE_PINNED, seen.type);
    EXPECT_INT(CU_MEM_LOCATION_TYPE_DEVICE, seen.location.type);
    EXPECT_INT(0, seen.location.id);
    EXPECT_INT(CU_MEM_HANDLE_TYPE_NONE, seen.requestedHandleTypes); /* see the next case */
}

static void an_imported_handle_cannot_be_exported_again(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(FRAME), imported = 0, third = 0;
    int descriptor = -1, second = -1;
    REQUIRE(export_to(&descriptor, handle));
    REQUIRE(import_from(&imported, descriptor));
    EXPECT(INVALID_VALUE, export_to(&second, imported));
    EXPECT_INT(-1, second);
    /* The descriptor can be passed on instead. */
    second = dup(descriptor);
    EXPECT(OK, import_from(&third, second));
    map_for_use(range, FRAME, handle);
    map_for_use(range + FRAME, FRAME, third);
    fill(range, 0x31, FRAME);
    CHECK(holds(range + FRAME, 0x31, FRAME));
}

static void a_frame_is_exported_more_than_once(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int first = -1, second = -1;
    EXPECT(OK, export_to(&first, handle));
    EXPECT(OK, export_to(&second, handle));
    CHECK(first != second);
}

static void export_refuses_what_is_not_exportable(void)
{
    CUmemGenericAllocationHandle plain = create(FRAME);
    int descriptor = -1;
    EXPECT(INVALID_VALUE, export_to(&descriptor, plain));
    EXPECT_INT(-1, descriptor);
}

static void export_refuses_nonsense(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int descriptor = -1;
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(&descriptor, handle, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(&descriptor, handle, 0x40000000, 0));
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(&descriptor, handle, 2, 0));
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(&descriptor, handle, FD, 1));
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(NULL, handle, FD, 0));
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(&descriptor, 0, FD, 0));
    EXPECT_INT(-1, descriptor);
}

/* As for cuMemMap: the frame lives while it is mapped, and its handle with it. */
static void a_handle_released_while_mapped_can_be_exported(void)
{
    CUdeviceptr range = reserve(FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int descriptor = -1;
    map(range, FRAME, handle);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, export_to(&descriptor, handle));
    CHECK(descriptor >= 0);
}

static void import_of_minus_one(void)
{
    CUmemGenericAllocationHandle imported = 0;
    EXPECT(UNKNOWN_ERROR, import_from(&imported, -1));
}

static void import_of_a_closed_descriptor(void)
{
    CUmemGenericAllocationHandle imported = 0;
    int descriptor = dup(0);
    close(descriptor);
    EXPECT(UNKNOWN_ERROR, import_from(&imported, descriptor));
}

static void import_of_a_regular_file(void)
{
    CUmemGenericAllocationHandle imported = 0;
    int descriptor = open("/proc/self/exe", O_RDONLY);
    EXPECT(UNKNOWN_ERROR, import_from(&imported, descriptor));
    close(descriptor);
}

static void import_of_a_memory_file(void)
{
    CUmemGenericAllocationHandle imported = 0;
    int descriptor = memfd_create("not a frame", 0);
    EXPECT_INT(0, ftruncate(descriptor, (off_t)FRAME));
    EXPECT(UNKNOWN_ERROR, import_from(&imported, descriptor));
    close(descriptor);
}

static void import_refuses_nonsense(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME), imported = 0;
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    void *shareable = (void *)(intptr_t)descriptor;
    EXPECT(INVALID_VALUE, cu.cuMemImportFromShareableHandle(NULL, shareable, FD));
    EXPECT(INVALID_VALUE, cu.cuMemImportFromShareableHandle(&imported, shareable, 0));
    EXPECT(INVALID_VALUE, cu.cuMemImportFromShareableHandle(&imported, shareable, 0x40000000));
    EXPECT(NOT_SUPPORTED, cu.cuMemImportFromShareableHandle(&imported, shareable, 2));
}

static void a_descriptor_works_after_its_handle_is_released(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(FRAME), imported = 0;
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    map_for_use(range, FRAME, handle);
    fill(range, 0x44, FRAME);
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, import_from(&imported, descriptor));
    map_for_use(range + FRAME, FRAME, imported);
    CHECK(holds(range + FRAME, 0x44, FRAME));
}

/* The memory is held by what is open: handles, mappings, descriptors. */
static void a_descriptor_holds_its_memory(void)
{
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = create_exportable(64 * MiB);
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    EXPECT_INT(64, (before - free_memory()) / MiB);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT_INT(64, (before - free_memory()) / MiB);
    close(descriptor);
    EXPECT_INT(0, (before - free_memory()) / MiB);
}

static void an_import_takes_no_more_memory(void)
{
    CUdeviceptr range = reserve(64 * MiB);
    size_t before = free_memory();
    CUmemGenericAllocationHandle handle = create_exportable(64 * MiB), imported = 0;
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    REQUIRE(import_from(&imported, descriptor));
    close(descriptor);
    map_for_use(range, 64 * MiB, imported);
    EXPECT_INT(64, (before - free_memory()) / MiB);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemRelease(imported));
    EXPECT_INT(64, (before - free_memory()) / MiB);
    EXPECT(OK, cu.cuMemUnmap(range, 64 * MiB));
    CHECK(free_memory() == before);
}

static void an_imported_frame_is_mapped_whole(void)
{
    CUdeviceptr range = reserve(8 * FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(2 * FRAME), imported = 0;
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    REQUIRE(import_from(&imported, descriptor));
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, FRAME, 0, imported, 0));
    EXPECT(NOT_SUPPORTED, cu.cuMemMap(range, 4 * FRAME, 0, imported, 0));
    EXPECT(OK, cu.cuMemMap(range, 2 * FRAME, 0, imported, 0));
}

static void an_exported_descriptor_is_closed_on_exec_or_not(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int descriptor = -1;
    REQUIRE(export_to(&descriptor, handle));
    EXPECT_INT(1, fcntl(descriptor, F_GETFD) & FD_CLOEXEC);
}

/* ---- between processes ----------------------------------------------------------------------- */

/* The one that receives: sees the bytes, changes them, sees them after the sender is done. */
static void receiver(int socket)
{
    open_driver();
    open_context();
    int descriptor = receive_descriptor(socket);
    CUmemGenericAllocationHandle imported = 0;
    CUdeviceptr range = reserve(FRAME);
    EXPECT(OK, import_from(&imported, descriptor));
    close(descriptor);
    map_for_use(range, FRAME, imported);
    CHECK(holds(range, 0x51, FRAME));
    fill(range, 0x52, FRAME);
    send_turn(socket);
    receive_turn(socket); /* the sender has let go */
    CHECK(holds(range, 0x52, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemRelease(imported));
}

static void another_process_sees_the_bytes(void)
{
    partner other = partner_start(receiver);
    open_driver();
    open_context();
    CUdeviceptr range = reserve(FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int descriptor = -1;
    map_for_use(range, FRAME, handle);
    fill(range, 0x51, FRAME);
    REQUIRE(export_to(&descriptor, handle));
    send_descriptor(other.socket, descriptor);
    close(descriptor);
    receive_turn(other.socket);
    CHECK(holds(range, 0x52, FRAME));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(OK, cu.cuMemRelease(handle));
    send_turn(other.socket);
    partner_end(&other);
}

/* An exporter that is killed, its context and all. */
static void doomed(int socket)
{
    open_driver();
    open_context();
    CUdeviceptr range = reserve(FRAME);
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int descriptor = -1;
    map_for_use(range, FRAME, handle);
    fill(range, 0x61, FRAME);
    REQUIRE(export_to(&descriptor, handle));
    send_descriptor(socket, descriptor);
    receive_turn(socket);
}

static void memory_outlives_the_process_that_made_it(void)
{
    partner other = partner_start(doomed);
    open_driver();
    open_context();
    int descriptor = receive_descriptor(other.socket), status = 0;
    CUmemGenericAllocationHandle imported = 0;
    CUdeviceptr range = reserve(FRAME);
    kill(other.pid, SIGKILL);
    waitpid(other.pid, &status, 0);
    CHECK(WIFSIGNALED(status));
    EXPECT(OK, import_from(&imported, descriptor));
    map_for_use(range, FRAME, imported);
    CHECK(holds(range, 0x61, FRAME));
}

static void holder(int socket)
{
    open_driver();
    open_context();
    CUmemGenericAllocationHandle handle = create(256 * MiB);
    send_turn(socket);
    receive_turn(socket);
    (void)handle;
}

/* Free memory is the card's, not the process's; a dead process's memory returns. */
static void free_memory_is_the_cards(void)
{
    partner other = partner_start(holder);
    open_driver();
    open_context();
    receive_turn(other.socket);
    size_t before = free_memory();
    int status = 0;
    kill(other.pid, SIGKILL);
    waitpid(other.pid, &status, 0);
    size_t after = free_memory();
    for (int i = 0; i < 200 && after < before + 256 * MiB; i++) {
        pass_milliseconds(10); /* the kernel tidies up after the process is gone */
        after = free_memory();
    }
    CHECK(after > before + 256 * MiB); /* its context's memory came back as well */
}

const suite_case share_cases[] = {
    CASE(an_imported_frame_is_the_same_memory),
    CASE(an_import_in_the_same_process_is_another_handle),
    CASE(an_imported_handle_has_its_properties_but_is_not_exportable),
    CASE(an_imported_handle_cannot_be_exported_again),
    CASE(a_frame_is_exported_more_than_once),
    CASE(export_refuses_what_is_not_exportable),
    CASE(export_refuses_nonsense),
    CASE(a_handle_released_while_mapped_can_be_exported),
    CASE(import_of_minus_one),
    CASE(import_of_a_closed_descriptor),
    CASE(import_of_a_regular_file),
    CASE(import_of_a_memory_file),
    CASE(import_refuses_nonsense),
    CASE(a_descriptor_works_after_its_handle_is_released),
    CASE_ALONE(a_descriptor_holds_its_memory),
    CASE_ALONE(an_import_takes_no_more_memory),
    CASE(an_imported_frame_is_mapped_whole),
    CASE(an_exported_descriptor_is_closed_on_exec_or_not),
    CASE_FROM(another_process_sees_the_bytes, WITHOUT_DRIVER),
    CASE_FROM(memory_outlives_the_process_that_made_it, WITHOUT_DRIVER),
    {.name = "free_memory_is_the_cards",
     .run = free_memory_is_the_cards,
     .start = WITHOUT_DRIVER,
     .alone = true},
    CASE_END,
};

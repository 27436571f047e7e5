/*
 * Memory that is taken away under unfinished work: the program is wrong and is told so; the simulator
 * goes on, touches nothing that is gone, and keeps its books.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sim_kit.h"

enum { BYTES = 4096 };

typedef struct scene {
    kit k;
    CUstream a, b, far; /* far: of device 1 */
    CUdeviceptr page;
    unsigned char *pinned, *second;
} scene;

static void set(scene *s)
{
    kit_start(&s->k, 2, 256 * (uint64_t)MIB, 1);
    s->page = kit_page(&s->k, 0);
    kit_access(&s->k, s->page, 1);
    s->pinned = kit_host(&s->k, BYTES, 1);
    s->second = kit_host(&s->k, BYTES, 2);
    s->a = kit_stream(&s->k);
    s->b = kit_stream(&s->k);
    OK(s->k.driver.cuCtxSetCurrent(s->k.context[1]));
    s->far = kit_stream(&s->k);
    OK(s->k.driver.cuCtxSetCurrent(s->k.context[0]));
}

/* Everything that is still to come comes now. A lost context is an answer, too. */
static void see_it_through(scene *s)
{
    for (int i = 0; i < 2; i++) {
        s->k.driver.cuCtxSetCurrent(s->k.context[i]);
        CUresult code = s->k.driver.cuCtxSynchronize();
        CHECK(code == CUDA_SUCCESS || code == CUDA_ERROR_ILLEGAL_ADDRESS);
    }
    CHECK(ebbsim_check() == NULL);
}

/* One hazard at least is of this kind, and its second side is this call. */
static void expect_hazard(ebbsim_kind kind, const char *call)
{
    ebbsim_hazard h;
    bool found = false;
    for (unsigned long i = 0; ebbsim_hazard_get(i, &h) == 0; i++) {
        found |= h.kind == kind && strcmp(h.second.call, call) == 0;
    }
    if (!found) {
        FAIL("no report of %s", call);
    }
}

/* ---- pages --------------------------------------------------------------------------------------- */

/* Two works race for a page, then it is unmapped under both. */
static void a_page_two_works_race_for(void)
{
    for (int over = 0; over < 2; over++) {
        scene s;
        set(&s);
        OK(s.k.driver.cuMemsetD8Async(s.page, 1, BYTES, s.a));
        kit_kernel("other", s.b, s.page, BYTES, EBBSIM_WRITE);
        if (over) {
            ebbsim_pass(1000000);
        }
        OK(s.k.driver.cuMemUnmap(s.page, PAGE));
        expect_hazard(EBBSIM_HAZARD_RACE, "other");
        expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemUnmap");
        see_it_through(&s);
    }
}

/* One frame at two addresses; work through the first is still to come when that is unmapped. */
static void one_of_two_addresses_of_a_frame(void)
{
    scene s;
    set(&s);
    CUmemGenericAllocationHandle frame = kit_frame(&s.k, 0);
    CUdeviceptr first = kit_map(&s.k, 10, frame, 0), alias = kit_map(&s.k, 12, frame, 0);
    OK(s.k.driver.cuMemcpyDtoHAsync(s.pinned, first, BYTES, s.a));
    OK(s.k.driver.cuMemcpyDtoHAsync(s.second, alias, BYTES, s.a));
    ebbsim_pass(1000000);
    OK(s.k.driver.cuMemUnmap(first, PAGE));
    see_it_through(&s);
}

static void access_for_everybody(void)
{
    scene s;
    set(&s);
    CUmemAccessDesc none[2] = {{{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_NONE},
                               {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_NONE}};
    OK(s.k.driver.cuMemsetD8Async(s.page, 1, BYTES, s.a));
    kit_kernel("other", s.b, s.page, BYTES, EBBSIM_WRITE);
    ebbsim_pass(1000000);
    OK(s.k.driver.cuMemSetAccess(s.page, PAGE, none, 2));
    expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemSetAccess");
    see_it_through(&s);
}

static void doze(void *unused)
{
    (void)unused;
    usleep(20000);
}

/* The work cannot be hurried: a function of the program's is in the way. */
static void a_page_under_work_behind_a_host_function(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuLaunchHostFunc(s.a, doze, NULL));
    usleep(2000);
    OK(s.k.driver.cuMemsetD8Async(s.page, 1, BYTES, s.a));
    OK(s.k.driver.cuMemUnmap(s.page, PAGE));
    expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemUnmap");
    usleep(30000);
    see_it_through(&s);
}

/* ---- by the other device -------------------------------------------------------------------------- */

/* cuMemFree and cuMemFreeHost wait for the owner's work, and for nobody else's. */
static void an_allocation_another_device_uses(void)
{
    for (int released = 0; released < 2; released++) {
        scene s;
        set(&s);
        CUdeviceptr memory = 0;
        OK(s.k.driver.cuMemAlloc(&memory, BYTES));
        OK(s.k.driver.cuMemcpyPeerAsync(memory, s.k.context[0], memory + BYTES / 2, s.k.context[0],
                                        BYTES / 2, s.far));
        OK(released ? s.k.driver.cuDevicePrimaryCtxRelease(0) : s.k.driver.cuMemFree(memory));
        expect_hazard(EBBSIM_HAZARD_UNMAP, released ? "cuDevicePrimaryCtxRelease" : "cuMemFree");
        OK(s.k.driver.cuCtxSetCurrent(s.k.context[1]));
        CUresult code = s.k.driver.cuCtxSynchronize();
        CHECK(code == CUDA_SUCCESS || code == CUDA_ERROR_ILLEGAL_ADDRESS);
        CHECK(ebbsim_check() == NULL);
    }
}

static void host_memory_another_device_copies_from(void)
{
    scene s;
    set(&s);
    static unsigned char own[BYTES];
    OK(s.k.driver.cuMemHostRegister(own, BYTES, 0));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page, s.pinned, BYTES, s.far));
    OK(s.k.driver.cuMemcpyHtoDAsync(s.page + BYTES, own, BYTES, s.far));
    OK(s.k.driver.cuMemFreeHost(s.pinned));
    expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemFreeHost");
    OK(s.k.driver.cuMemHostUnregister(own));
    expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemHostUnregister");
    see_it_through(&s);
}

static void a_context_with_an_open_capture(void)
{
    scene s;
    set(&s);
    OK(s.k.driver.cuStreamBeginCapture(s.a, CU_STREAM_CAPTURE_MODE_RELAXED));
    OK(s.k.driver.cuMemsetD8Async(s.page, 1, BYTES, s.a));
    OK(s.k.driver.cuDevicePrimaryCtxRelease(0));
    ebbsim_census c = {.size = sizeof c};
    ebbsim_census_take(&c);
    CHECK(c.captures == 0 && c.graphs == 0);
    CHECK(ebbsim_check() == NULL);
}

/* ---- words ----------------------------------------------------------------------------------------- */

static void a_word_that_is_waited_for_or_to_be_written(void)
{
    scene s;
    set(&s);
    CUdeviceptr word = (CUdeviceptr)(uintptr_t)s.pinned;
    OK(s.k.driver.cuStreamWaitValue32(s.a, s.page, 77, CU_STREAM_WAIT_VALUE_EQ));
    OK(s.k.driver.cuStreamWaitValue32(s.b, word, 77, CU_STREAM_WAIT_VALUE_EQ));
    OK(s.k.driver.cuStreamWriteValue32(s.a, s.page + 64, 1, 0));
    CHECK_EQ(s.k.driver.cuStreamQuery(s.a), CUDA_ERROR_NOT_READY);
    OK(s.k.driver.cuMemUnmap(s.page, PAGE));
    expect_hazard(EBBSIM_HAZARD_UNMAP, "cuMemUnmap");
    CHECK_EQ(s.k.driver.cuStreamQuery(s.a), CUDA_ERROR_ILLEGAL_ADDRESS);
    __atomic_store_n((uint32_t *)(void *)s.pinned, 77, __ATOMIC_RELEASE);
    see_it_through(&s);
}

/* Freeing waits for the work of the memory's own device, not for another's. */
static void a_word_another_device_waits_for(void)
{
    for (int way = 0; way < 2; way++) {
        scene s;
        set(&s);
        CUdeviceptr memory = 0, word = (CUdeviceptr)(uintptr_t)s.pinned;
        OK(s.k.driver.cuMemAlloc(&memory, PAGE));
        word = way == 0 ? memory : word;
        OK(s.k.driver.cuStreamWaitValue32(s.far, word, 77, CU_STREAM_WAIT_VALUE_EQ));
        CHECK_EQ(s.k.driver.cuStreamQuery(s.far), CUDA_ERROR_NOT_READY);
        OK(way == 0 ? s.k.driver.cuMemFree(memory) : s.k.driver.cuMemFreeHost(s.pinned));
        expect_hazard(EBBSIM_HAZARD_UNMAP, way == 0 ? "cuMemFree" : "cuMemFreeHost");
        see_it_through(&s);
    }
}

static void a_word_a_device_has_no_access_to_is_refused(void)
{
    scene s;
    set(&s);
    CUdeviceptr page = kit_page(&s.k, 5); /* for device 0 alone */
    CHECK_EQ(s.k.driver.cuStreamWaitValue32(s.far, page, 0, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(s.k.driver.cuStreamWriteValue32(s.far, page, 0, 0), CUDA_ERROR_INVALID_VALUE);
    CUmemAccessDesc read = {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READ};
    OK(s.k.driver.cuMemSetAccess(page, PAGE, &read, 1));
    OK(s.k.driver.cuStreamWaitValue32(s.far, page, 0, 0));
    CHECK_EQ(s.k.driver.cuStreamWriteValue32(s.far, page, 0, 0), CUDA_ERROR_INVALID_VALUE);
    OK(s.k.driver.cuStreamSynchronize(s.far));
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* Each kind of work of device 1 on a frame of device 0: without access, to read, to write. */
static void work_of_a_device_without_access(void)
{
    scene s;
    set(&s);
    const ebb__driver *cu = &s.k.driver;
    CUdeviceptr page = kit_page(&s.k, 5);
    CHECK_EQ(cu->cuMemsetD8Async(page, 1, BYTES, s.far), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemsetD32Async(page, 1, BYTES / 4, s.far), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemcpyHtoDAsync(page, s.pinned, BYTES, s.far), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemcpyDtoHAsync(s.pinned, page, BYTES, s.far), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemcpyDtoDAsync(s.page, page, BYTES, s.far), CUDA_ERROR_INVALID_VALUE);
    CUmemAccessDesc read = {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_READ};
    OK(cu->cuMemSetAccess(page, PAGE, &read, 1));
    OK(cu->cuMemcpyDtoHAsync(s.pinned, page, BYTES, s.far));
    kit_kernel("reader", s.far, page, BYTES, EBBSIM_READ);
    OK(cu->cuStreamSynchronize(s.far));
    CHECK_EQ(cu->cuMemsetD8Async(page, 1, BYTES, s.far), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(ebbsim_hazards(), 0);
    kit_kernel("writer", s.far, page, BYTES, EBBSIM_WRITE);
    expect_hazard(EBBSIM_HAZARD_ACCESS, "writer");
    CHECK_EQ(cu->cuStreamSynchronize(s.far), CUDA_ERROR_ILLEGAL_ADDRESS);
    OK(cu->cuStreamSynchronize(s.a)); /* the other device's context is well */
}

/* Access that a graph was captured with, and that is gone when it is launched. */
static void a_graph_of_a_device_that_lost_access(void)
{
    scene s;
    set(&s);
    const ebb__driver *cu = &s.k.driver;
    CUgraph graph = NULL;
    CUgraphExec exec = NULL;
    OK(cu->cuCtxSetCurrent(s.k.context[1]));
    OK(cu->cuStreamBeginCapture(s.far, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(cu->cuMemsetD8Async(s.page, 1, BYTES, s.far));
    OK(cu->cuStreamEndCapture(s.far, &graph));
    OK(cu->cuGraphInstantiateWithFlags(&exec, graph, 0));
    OK(cu->cuGraphLaunch(exec, s.far));
    OK(cu->cuStreamSynchronize(s.far));
    CUmemAccessDesc none = {{CU_MEM_LOCATION_TYPE_DEVICE, 1}, CU_MEM_ACCESS_FLAGS_PROT_NONE};
    OK(cu->cuMemSetAccess(s.page, PAGE, &none, 1));
    CHECK_EQ(ebbsim_hazards(), 0);
    OK(cu->cuGraphLaunch(exec, s.far));
    expect_hazard(EBBSIM_HAZARD_ACCESS, "cuMemsetD8Async");
    CHECK_EQ(cu->cuStreamSynchronize(s.far), CUDA_ERROR_ILLEGAL_ADDRESS);
}

static void a_word_nobody_can_reach_is_refused(void)
{
    scene s;
    set(&s);
    CUmemGenericAllocationHandle frame = kit_frame(&s.k, 0);
    CUdeviceptr at = s.k.base + 20 * (CUdeviceptr)PAGE;
    OK(s.k.driver.cuMemMap(at, PAGE, 0, frame, 0)); /* no access */
    CHECK_EQ(s.k.driver.cuStreamWaitValue32(s.a, at, 1, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(s.k.driver.cuStreamWriteValue32(s.a, at, 1, 0), CUDA_ERROR_INVALID_VALUE);
    OK(s.k.driver.cuStreamQuery(s.a));
}

/* ---- sizes beyond the end --------------------------------------------------------------------------- */

static void a_file_that_memory_writes_through_is_pinned_for_reading_only(void)
{
    scene s;
    set(&s);
    const ebb__driver *cu = &s.k.driver;
    char name[] = "/var/tmp/ebbtide_taken.XXXXXX";
    int file = mkstemp(name);
    CHECK(file >= 0 && unlink(name) == 0 && ftruncate(file, BYTES) == 0);
    void *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    CHECK_EQ(cu->cuMemHostRegister(at, BYTES, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cu->cuMemHostRegister(at, BYTES, CU_MEMHOSTREGISTER_READ_ONLY));
    OK(cu->cuMemcpyHtoDAsync(s.page, at, BYTES, s.a));
    CHECK_EQ(cu->cuMemcpyDtoHAsync(at, s.page, BYTES, s.a), CUDA_ERROR_INVALID_VALUE);
    OK(cu->cuStreamSynchronize(s.a));
    OK(cu->cuMemHostUnregister(at));
    OK(cu->cuMemcpyDtoHAsync(at, s.page, BYTES, s.a));
    OK(cu->cuStreamSynchronize(s.a));
    munmap(at, BYTES);
    CHECK_EQ(ebbsim_hazards(), 0);
    CHECK(ebbsim_check() == NULL);
}

static void a_range_that_ends_behind_the_last_address_is_refused(void)
{
    scene s;
    set(&s);
    const ebb__driver *cu = &s.k.driver;
    size_t absurd = SIZE_MAX - 15;
    static unsigned char own[BYTES];
    CHECK_EQ(cu->cuMemcpyHtoDAsync(s.page, s.pinned, absurd, s.a), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemcpyDtoDAsync(s.page, s.page + BYTES, absurd, s.a), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemsetD8Async(s.page, 1, absurd, s.a), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemsetD8Async((CUdeviceptr)(uintptr_t)s.pinned, 1, absurd, s.a),
             CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(cu->cuMemHostRegister(own, absurd, 0), CUDA_ERROR_INVALID_VALUE);
    OK(cu->cuStreamSynchronize(s.a));
    CHECK_EQ(ebbsim_hazards(), 0);
    kit_kernel("absurd", s.a, s.page, absurd, EBBSIM_WRITE);
    expect_hazard(EBBSIM_HAZARD_UNMAPPED, "absurd");
    CHECK_EQ(cu->cuStreamSynchronize(s.a), CUDA_ERROR_ILLEGAL_ADDRESS);
    CHECK(ebbsim_check() == NULL);
}

int main(void)
{
    RUN(a_page_two_works_race_for);
    RUN(one_of_two_addresses_of_a_frame);
    RUN(access_for_everybody);
    RUN(a_page_under_work_behind_a_host_function);
    RUN(an_allocation_another_device_uses);
    RUN(host_memory_another_device_copies_from);
    RUN(a_context_with_an_open_capture);
    RUN(a_word_that_is_waited_for_or_to_be_written);
    RUN(a_word_another_device_waits_for);
    RUN(a_word_nobody_can_reach_is_refused);
    RUN(a_word_a_device_has_no_access_to_is_refused);
    RUN(work_of_a_device_without_access);
    RUN(a_graph_of_a_device_that_lost_access);
    RUN(a_file_that_memory_writes_through_is_pinned_for_reading_only);
    RUN(a_range_that_ends_behind_the_last_address_is_refused);
    ebbsim_reset();
    return REPORT();
}

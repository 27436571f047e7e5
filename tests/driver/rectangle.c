/*
 * Copies and memsets of rectangles.
 */
#include <string.h>

#include "more.h"

enum { WIDTH = 64, PITCH = 256, ROWS = 8 };

static CUDA_MEMCPY2D out_of(CUdeviceptr from, void *to)
{
    CUDA_MEMCPY2D copy;
    memset(&copy, 0, sizeof copy);
    copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = from;
    copy.srcPitch = PITCH;
    copy.dstMemoryType = CU_MEMORYTYPE_HOST;
    copy.dstHost = to;
    copy.dstPitch = WIDTH;
    copy.WidthInBytes = WIDTH;
    copy.Height = ROWS;
    return copy;
}

static void a_rectangle_is_set_and_copied(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    CUstream stream = make_stream();
    char *pinned = make_pinned(4096);
    fill(memory, 0, PITCH * ROWS);
    EXPECT(OK, more.cuMemsetD2D8Async(memory + 16, PITCH, 7, WIDTH, ROWS, stream));
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    copy.srcXInBytes = 16;
    EXPECT(OK, more.cuMemcpy2DAsync(&copy, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(pinned, 7, WIDTH * ROWS));
    CHECK(holds(memory, 0, 16));
    CHECK(holds(memory + 16 + WIDTH, 0, PITCH - WIDTH));
    CHECK(holds(memory + PITCH + 16, 7, WIDTH));
    copy.srcY = 1;
    copy.Height = ROWS - 1;
    memset(pinned, 0, 4096);
    EXPECT(OK, more.cuMemcpy2D(&copy));
    CHECK(all_bytes(pinned, 7, WIDTH * (ROWS - 1)));
    CHECK(all_bytes(pinned + WIDTH * (ROWS - 1), 0, WIDTH));
}

static void a_rectangle_is_copied_in_and_across(void)
{
    CUdeviceptr one = make_memory(PITCH * ROWS), two = make_memory(PITCH * ROWS);
    char *pages = make_pages(4096);
    memset(pages, 9, 4096);
    CUDA_MEMCPY2D copy = {.srcMemoryType = CU_MEMORYTYPE_HOST,
                          .srcHost = pages,
                          .srcPitch = WIDTH,
                          .dstMemoryType = CU_MEMORYTYPE_DEVICE,
                          .dstDevice = one,
                          .dstPitch = PITCH,
                          .WidthInBytes = WIDTH,
                          .Height = ROWS};
    fill(two, 0, PITCH * ROWS);
    EXPECT(OK, more.cuMemcpy2D(&copy));
    copy.srcMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.srcDevice = one;
    copy.srcPitch = PITCH;
    copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.dstDevice = two;
    EXPECT(OK, more.cuMemcpy2D(&copy));
    EXPECT(OK, cu.cuCtxSynchronize());
    CHECK(holds(two, 9, WIDTH));
    CHECK(holds(two + WIDTH, 0, PITCH - WIDTH));
    CHECK(holds(two + (ROWS - 1) * PITCH, 9, WIDTH));
}

static void rectangles_of_nothing(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    CUstream stream = make_stream();
    char *pinned = make_pinned(4096);
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    copy.WidthInBytes = 0;
    EXPECT(OK, more.cuMemcpy2D(&copy));
    EXPECT(OK, more.cuMemcpy2DAsync(&copy, stream));
    copy = out_of(memory, pinned);
    copy.Height = 0;
    EXPECT(OK, more.cuMemcpy2D(&copy));
    EXPECT(OK, more.cuMemsetD2D8Async(memory, PITCH, 1, 0, ROWS, stream));
    EXPECT(OK, more.cuMemsetD2D8Async(memory, PITCH, 1, WIDTH, 0, stream));
}

static void rectangles_wider_than_their_rows(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    CUstream stream = make_stream();
    char *pinned = make_pinned(4096);
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    copy.dstPitch = WIDTH - 1;
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
    copy = out_of(memory, pinned);
    copy.srcPitch = WIDTH - 1;
    EXPECT(INVALID_VALUE, more.cuMemcpy2DAsync(&copy, stream));
    EXPECT(INVALID_VALUE, more.cuMemsetD2D8Async(memory, WIDTH - 1, 1, WIDTH, ROWS, stream));
    EXPECT(OK, more.cuMemsetD2D8Async(memory, WIDTH - 1, 1, WIDTH, 1, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    copy = out_of(memory, pinned);
    copy.srcPitch = copy.dstPitch = 0;
    copy.Height = 1;
    EXPECT(OK, more.cuMemcpy2D(&copy));
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void rectangles_beyond_the_end(void)
{
    CUdeviceptr memory = make_memory(2 * MiB);
    CUstream stream = make_stream();
    char *pinned = make_pinned(MiB);
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    copy.srcPitch = MiB;
    copy.Height = 3;
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
    EXPECT(OK, cu.cuCtxSynchronize());
    EXPECT(INVALID_VALUE, more.cuMemcpy2DAsync(&copy, stream));
    EXPECT(INVALID_VALUE, more.cuMemsetD2D8Async(memory, MiB, 1, WIDTH, 3, stream));
    copy.Height = 2;
    EXPECT(OK, cu.cuCtxSynchronize());
    EXPECT(OK, more.cuMemcpy2D(&copy));
    EXPECT(OK, more.cuMemsetD2D8Async(memory, MiB, 1, WIDTH, 2, stream));
    EXPECT(OK, cu.cuCtxSynchronize());
}

static void rectangles_of_null(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    char *pinned = make_pinned(4096);
    CUDA_MEMCPY2D copy = out_of(memory, NULL);
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
    copy = out_of(0, pinned);
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
    EXPECT(INVALID_VALUE, more.cuMemsetD2D8Async(0, PITCH, 1, WIDTH, ROWS, NULL));
}

static void memory_types_that_are_none(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    char *pinned = make_pinned(4096);
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    copy.srcMemoryType = 0;
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
    copy.srcMemoryType = 99;
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
    copy = out_of(memory, pinned);
    copy.dstMemoryType = 0;
    EXPECT(INVALID_VALUE, more.cuMemcpy2D(&copy));
}

static void rectangles_are_captured(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    CUstream stream = make_stream();
    char *pinned = make_pinned(4096);
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    CUgraph graph = NULL;
    REQUIRE(cu.cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    EXPECT(OK, more.cuMemsetD2D8Async(memory, PITCH, 3, WIDTH, ROWS, stream));
    EXPECT(OK, more.cuMemcpy2DAsync(&copy, stream));
    EXPECT(OK, cu.cuStreamEndCapture(stream, &graph));
    CUgraphExec exec = NULL;
    EXPECT(OK, cu.cuGraphInstantiateWithFlags(&exec, graph, 0));
    EXPECT(OK, cu.cuGraphLaunch(exec, stream));
    EXPECT(OK, cu.cuStreamSynchronize(stream));
    CHECK(all_bytes(pinned, 3, WIDTH * ROWS));
}

static void a_rectangle_out_waits(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS);
    char *pinned = make_pinned(4096);
    CUDA_MEMCPY2D copy = out_of(memory, pinned);
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_WAITS(&busy, OK, more.cuMemcpy2D(&copy));
}

static void a_rectangle_within_the_device_does_not_wait(void)
{
    CUdeviceptr memory = make_memory(PITCH * ROWS), other = make_memory(PITCH * ROWS);
    CUDA_MEMCPY2D copy = out_of(memory, NULL);
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = other;
    gate busy = gate_make();
    gate_hold(&busy, NULL);
    EXPECT_AT_ONCE(&busy, OK, more.cuMemcpy2D(&copy));
    gate_open(&busy);
    EXPECT(OK, cu.cuCtxSynchronize());
}

const suite_case rectangle_cases[] = {
    CASE(a_rectangle_is_set_and_copied),
    CASE(a_rectangle_is_copied_in_and_across),
    CASE(rectangles_of_nothing),
    CASE(rectangles_wider_than_their_rows),
    CASE(rectangles_beyond_the_end),
    CASE(rectangles_of_null),
    CASE(memory_types_that_are_none),
    CASE(rectangles_are_captured),
    CASE(a_rectangle_out_waits),
    CASE(a_rectangle_within_the_device_does_not_wait),
    CASE_END,
};

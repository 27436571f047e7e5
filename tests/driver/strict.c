/*
 * What is undefined on a GPU: calls at which its driver crashed (signal 11) or read memory that it
 * had freed. The simulated GPU answers each with an error, so that a program's mistake is a failed
 * call there and not a crash, or worse. On a GPU these cases are skipped, visibly.
 */
#include <string.h>

#include "ops.h"

static void function_lookup_with_null(void)
{
    load_without_init(&cu);
    void *function = NULL;
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SUCCESS;
    EXPECT(INVALID_VALUE, suite_get_proc_address(NULL, &function, 12000, 0, &status));
    EXPECT(INVALID_VALUE, suite_get_proc_address("cuInit", NULL, 12000, 0, &status));
}

static void error_names_into_nothing(void)
{
    EXPECT(INVALID_VALUE, cu.cuGetErrorName(CUDA_SUCCESS, NULL));
    EXPECT(INVALID_VALUE, cu.cuGetErrorString(CUDA_SUCCESS, NULL));
}

static void a_device_name_of_no_length(void)
{
    char tiny[8];
    memset(tiny, 'x', sizeof tiny);
    EXPECT(INVALID_VALUE, cu.cuDeviceGetName(tiny, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceGetName(tiny, -1, 0));
    CHECK(all_bytes(tiny, 'x', sizeof tiny));
}

static void release_of_garbage_is_refused(void)
{
    EXPECT(INVALID_VALUE, cu.cuMemRelease(0x123456));
    EXPECT(INVALID_VALUE, cu.cuMemRelease(~0ull));
}

static void a_released_handle_is_not_mapped(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = create(FRAME);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, FRAME, 0, handle, 0));
}

/* A handle released while mapped lives on, but not longer than the last mapping. */
static void a_handle_ends_with_the_last_mapping(void)
{
    CUdeviceptr range = reserve(4 * FRAME);
    CUmemGenericAllocationHandle handle = map_frame(range, FRAME);
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(OK, cu.cuMemUnmap(range, FRAME));
    EXPECT(INVALID_VALUE, cu.cuMemMap(range, FRAME, 0, handle, 0));
}

/* A GPU's driver answers, from memory that it has freed. */
static void a_released_handle_has_no_properties(void)
{
    CUmemGenericAllocationHandle handle = create(FRAME);
    CUmemAllocationProp seen;
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(INVALID_VALUE, cu.cuMemGetAllocationPropertiesFromHandle(&seen, handle));
}

static void a_released_handle_is_not_exported(void)
{
    CUmemGenericAllocationHandle handle = create_exportable(FRAME);
    int descriptor = -1;
    EXPECT(OK, cu.cuMemRelease(handle));
    EXPECT(INVALID_VALUE, cu.cuMemExportToShareableHandle(
                              &descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    EXPECT_INT(-1, descriptor);
}

static void a_capture_mode_is_not_exchanged_with_nothing(void)
{
    EXPECT(INVALID_VALUE, cu.cuThreadExchangeStreamCaptureMode(NULL));
}

static void calls_of_a_forked_child_from_the_first_that_crashes(void)
{
    ops_after_fork(false);
}

const suite_case strict_cases[] = {
    CASE_SIMULATED(function_lookup_with_null, WITHOUT_DRIVER),
    CASE_SIMULATED(error_names_into_nothing, WITHOUT_CONTEXT),
    CASE_SIMULATED(a_device_name_of_no_length, WITHOUT_CONTEXT),
    CASE_SIMULATED(release_of_garbage_is_refused, WITH_CONTEXT),
    CASE_SIMULATED(a_released_handle_is_not_mapped, WITH_CONTEXT),
    CASE_SIMULATED(a_handle_ends_with_the_last_mapping, WITH_CONTEXT),
    CASE_SIMULATED(a_released_handle_has_no_properties, WITH_CONTEXT),
    CASE_SIMULATED(a_released_handle_is_not_exported, WITH_CONTEXT),
    CASE_SIMULATED(a_capture_mode_is_not_exchanged_with_nothing, WITH_CONTEXT),
    CASE_SIMULATED(calls_of_a_forked_child_from_the_first_that_crashes, WITH_CONTEXT),
    CASE_END,
};

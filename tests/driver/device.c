/*
 * Devices: ordinals, names, attributes, and what they are asked with.
 */
#include <limits.h>
#include <string.h>

#include "suite.h"

static void device_ordinals_out_of_range_are_refused(void)
{
    CUdevice device = 77;
    EXPECT(INVALID_DEVICE, cu.cuDeviceGet(&device, 1000));
    EXPECT(INVALID_DEVICE, cu.cuDeviceGet(&device, -1));
    EXPECT(INVALID_DEVICE, cu.cuDeviceGet(&device, INT_MAX));
    EXPECT_INT(77, device);
    EXPECT(INVALID_VALUE, cu.cuDeviceGet(NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceGet(NULL, 1000));
    EXPECT(INVALID_VALUE, cu.cuDeviceGetCount(NULL));
}

static void device_questions_refuse_bad_devices(void)
{
    char name[64];
    CUuuid uuid;
    size_t bytes;
    int value, active;
    unsigned flags;
    CUcontext found;
    EXPECT(INVALID_DEVICE, cu.cuDeviceGetName(name, sizeof name, 1000));
    EXPECT(INVALID_DEVICE, cu.cuDeviceGetName(name, sizeof name, -1));
    EXPECT(INVALID_DEVICE, cu.cuDeviceGetUuid(&uuid, 1000));
    EXPECT(INVALID_DEVICE, cu.cuDeviceTotalMem(&bytes, 1000));
    EXPECT(INVALID_DEVICE,
           cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1000));
    EXPECT(INVALID_DEVICE, cu.cuDevicePrimaryCtxRetain(&found, 1000));
    EXPECT(INVALID_DEVICE, cu.cuDevicePrimaryCtxRelease(1000));
    EXPECT(INVALID_DEVICE, cu.cuDevicePrimaryCtxGetState(1000, &flags, &active));
    EXPECT(INVALID_DEVICE, cu.cuDeviceCanAccessPeer(&value, 0, 1000));
    EXPECT(INVALID_DEVICE, cu.cuDeviceCanAccessPeer(&value, 1000, 0));
}

static void device_questions_refuse_null(void)
{
    unsigned flags;
    int active;
    EXPECT(INVALID_VALUE, cu.cuDeviceGetName(NULL, 64, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceGetUuid(NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceTotalMem(NULL, 0));
    EXPECT(INVALID_VALUE,
           cu.cuDeviceGetAttribute(NULL, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceCanAccessPeer(NULL, 0, 0));
    EXPECT(INVALID_VALUE, cu.cuDevicePrimaryCtxRetain(NULL, 0));
    EXPECT(INVALID_VALUE, cu.cuDevicePrimaryCtxGetState(0, NULL, &active));
    EXPECT(INVALID_VALUE, cu.cuDevicePrimaryCtxGetState(0, &flags, NULL));
}

static void attribute_numbers_out_of_range_are_refused(void)
{
    int value = 77;
    EXPECT(INVALID_VALUE, cu.cuDeviceGetAttribute(&value, (CUdevice_attribute)0, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceGetAttribute(&value, (CUdevice_attribute)100000, 0));
    EXPECT(INVALID_VALUE, cu.cuDeviceGetAttribute(&value, (CUdevice_attribute)-1, 0));
    EXPECT_INT(77, value);
    EXPECT(INVALID_DEVICE, cu.cuDeviceGetAttribute(&value, (CUdevice_attribute)100000, 1000));
}

/* Those a card of ours must have, whichever card it is. */
static void attributes_of_a_card_we_can_use(void)
{
    static const CUdevice_attribute needed[] = {
        CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
        CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED,
    };
    int value;
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++) {
        value = -1;
        EXPECT(OK, cu.cuDeviceGetAttribute(&value, needed[i], 0));
        EXPECT_INT(1, value);
    }
    EXPECT(OK, cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_INTEGRATED, 0));
    EXPECT_INT(0, value);
    EXPECT(OK, cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 0));
    CHECK(value >= 2);
    EXPECT(OK, cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
    CHECK(value >= 7);
    EXPECT(OK, cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0));
    CHECK(value > 0);
    EXPECT(OK, cu.cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0));
}

static void a_name_is_cut_to_the_buffer(void)
{
    char whole[64] = "", tiny[8];
    EXPECT(OK, cu.cuDeviceGetName(whole, sizeof whole, 0));
    memset(tiny, 'x', sizeof tiny);
    EXPECT(OK, cu.cuDeviceGetName(tiny, 4, 0));
    CHECK(strlen(tiny) == 3 && strncmp(tiny, whole, 3) == 0);
    CHECK(tiny[4] == 'x');
    memset(tiny, 'x', sizeof tiny);
    EXPECT(OK, cu.cuDeviceGetName(tiny, 1, 0));
    CHECK(tiny[0] == 0 && tiny[1] == 'x');
}

static void a_device_is_no_peer_of_itself(void)
{
    int can = 77;
    EXPECT(OK, cu.cuDeviceCanAccessPeer(&can, 0, 0));
    EXPECT_INT(0, can);
}

static void total_memory_is_what_mem_get_info_says(void)
{
    size_t total = 0, bytes = 0, seen = 0;
    EXPECT(OK, cu.cuDeviceTotalMem(&total, 0));
    EXPECT(OK, cu.cuMemGetInfo(&bytes, &seen));
    CHECK(total == seen);
    CHECK(bytes < total);
}

static void mem_get_info_with_null(void)
{
    size_t bytes = 0;
    EXPECT(OK, cu.cuMemGetInfo(&bytes, NULL));
    CHECK(bytes > 0);
    bytes = 0;
    EXPECT(OK, cu.cuMemGetInfo(NULL, &bytes));
    CHECK(bytes > 0);
    EXPECT(OK, cu.cuMemGetInfo(NULL, NULL));
}

static void a_device_keeps_its_uuid(void)
{
    CUuuid first, second;
    EXPECT(OK, cu.cuDeviceGetUuid(&first, 0));
    EXPECT(OK, cu.cuDeviceGetUuid(&second, 0));
    CHECK(memcmp(&first, &second, sizeof first) == 0);
}

const suite_case device_cases[] = {
    CASE_FROM(device_ordinals_out_of_range_are_refused, WITHOUT_CONTEXT),
    CASE_FROM(device_questions_refuse_bad_devices, WITHOUT_CONTEXT),
    CASE_FROM(device_questions_refuse_null, WITHOUT_CONTEXT),
    CASE_FROM(attribute_numbers_out_of_range_are_refused, WITHOUT_CONTEXT),
    CASE_FROM(attributes_of_a_card_we_can_use, WITHOUT_CONTEXT),
    CASE_FROM(a_name_is_cut_to_the_buffer, WITHOUT_CONTEXT),
    CASE_FROM(a_device_is_no_peer_of_itself, WITHOUT_CONTEXT),
    CASE(total_memory_is_what_mem_get_info_says),
    CASE(mem_get_info_with_null),
    CASE_FROM(a_device_keeps_its_uuid, WITHOUT_CONTEXT),
    CASE_END,
};

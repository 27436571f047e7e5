/*
 * Cards of all kinds: several, small, without what a vGPU lacks, behind an old driver; and what the
 * environment says about them.
 */
#define _GNU_SOURCE
#include "self.h"
#include "sim_kit.h"

static ebbsim_card card_of(uint64_t memory)
{
    ebbsim_card card;
    ebbsim_card_default(&card, memory);
    return card;
}

static size_t free_on(kit *k, int device)
{
    size_t free_bytes = 0;
    OK(k->driver.cuCtxSetCurrent(k->context[device]));
    OK(k->driver.cuMemGetInfo(&free_bytes, NULL));
    return free_bytes;
}

static int attribute(kit *k, CUdevice_attribute which, int device)
{
    int value = -1;
    OK(k->driver.cuDeviceGetAttribute(&value, which, device));
    return value;
}

static int create(kit *k, int device, int types, CUmemGenericAllocationHandle *handle)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = types,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    return (int)k->driver.cuMemCreate(handle, PAGE, &properties, 0);
}

/* ---- several ------------------------------------------------------------------------------------ */

static void cards_are_told_apart(void)
{
    kit k;
    ebbsim_reset();
    ebbsim_card small = card_of(64 * (uint64_t)MIB), large = card_of(512 * (uint64_t)MIB);
    snprintf(large.name, sizeof large.name, "Large");
    large.multiprocessors = 7;
    large.compute_major = 8;
    large.compute_minor = 6;
    int first = -1, second = -1;
    OK(ebbsim_card_add(&small, &first));
    OK(ebbsim_card_add(&large, &second));
    char text[256];
    REQUIRE(ebb__driver_open(&k.driver, SIM_LIBRARY, text, sizeof text) == EBB_OK);
    int count = 0;
    OK(k.driver.cuDeviceGetCount(&count));
    CHECK(count == 2 && first == 0 && second == 1);
    CUuuid one, other;
    size_t bytes = 0;
    OK(k.driver.cuDeviceGetName(text, sizeof text, 1));
    CHECK_STR(text, "Large");
    OK(k.driver.cuDeviceGetName(text, 3, 1));
    CHECK_STR(text, "La");
    OK(k.driver.cuDeviceTotalMem(&bytes, 0));
    CHECK_EQ(bytes, 64 * MIB);
    OK(k.driver.cuDeviceTotalMem(&bytes, 1));
    CHECK_EQ(bytes, 512 * MIB);
    OK(k.driver.cuDeviceGetUuid(&one, 0));
    OK(k.driver.cuDeviceGetUuid(&other, 1));
    CHECK(memcmp(&one, &other, sizeof one) != 0);
    CHECK(attribute(&k, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 0) !=
          attribute(&k, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 1));
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 1), 7);
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 1), 8);
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 1), 6);
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0), 1);
    CHECK_EQ(k.driver.cuDeviceTotalMem(&bytes, 2), CUDA_ERROR_INVALID_DEVICE);
}

static void each_card_has_its_own_memory(void)
{
    kit k;
    kit_start(&k, 2, 32 * (uint64_t)MIB, 1);
    size_t free_bytes = free_on(&k, 0), other = free_on(&k, 1);
    CUmemGenericAllocationHandle handle;
    int frames = 0;
    while (create(&k, 0, 0, &handle) == 0) {
        frames++;
    }
    CHECK_EQ(frames, free_bytes / PAGE);
    CHECK_EQ(free_on(&k, 0), free_bytes % PAGE);
    CHECK_EQ(free_on(&k, 1), other);
    OK(create(&k, 1, 0, &handle));
    CHECK_EQ(create(&k, 0, 0, &handle), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(create(&k, 2, 0, &handle), CUDA_ERROR_INVALID_DEVICE);
}

/* As a GPU's driver does it, and PyTorch's allocator notices. */
static void allocations_grow_upwards_and_fill_gaps(void)
{
    kit k;
    ebbsim_card card = card_of(64 * (uint64_t)MIB);
    kit_start_cards(&k, 1, &card, 1);
    CUdeviceptr at[3], again = 0;
    for (int i = 0; i < 3; i++) {
        OK(k.driver.cuMemAlloc(&at[i], 2 * (size_t)MIB));
    }
    CHECK(at[0] < at[1] && at[1] < at[2]);
    OK(k.driver.cuMemFree(at[1]));
    OK(k.driver.cuMemAlloc(&again, 2 * (size_t)MIB));
    CHECK_EQ(again, at[1]);
}

static void a_context_takes_its_share_once(void)
{
    kit k;
    ebbsim_card card = card_of(64 * (uint64_t)MIB);
    card.context = 10 * (uint64_t)MIB;
    kit_start_cards(&k, 1, &card, 1);
    CHECK_EQ(free_on(&k, 0), 54 * MIB);
    CUcontext again;
    OK(k.driver.cuDevicePrimaryCtxRetain(&again, 0));
    CHECK_EQ(free_on(&k, 0), 54 * MIB);
    OK(k.driver.cuDevicePrimaryCtxRelease(0));
    CHECK_EQ(free_on(&k, 0), 54 * MIB);
    OK(k.driver.cuDevicePrimaryCtxRelease(0));
    CHECK_EQ(k.driver.cuDevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
    OK(ebbsim_foreign_use(0, 60 * (uint64_t)MIB)); /* a context does not fit in the rest */
    CHECK_EQ(k.driver.cuDevicePrimaryCtxRetain(&again, 0), CUDA_ERROR_OUT_OF_MEMORY);
    OK(ebbsim_foreign_use(0, 0));
    OK(k.driver.cuDevicePrimaryCtxRetain(&again, 0));
}

static void somebody_elses_use_comes_and_goes(void)
{
    kit k;
    kit_start(&k, 2, 64 * (uint64_t)MIB, 1);
    size_t before = free_on(&k, 0), other = free_on(&k, 1);
    CUmemGenericAllocationHandle handle;
    OK(ebbsim_foreign_use(0, 10 * (uint64_t)MIB));
    CHECK_EQ(free_on(&k, 0), before - 10 * MIB);
    CHECK_EQ(free_on(&k, 1), other);
    OK(ebbsim_foreign_use(0, before)); /* all of the rest */
    CHECK_EQ(free_on(&k, 0), 0);
    CHECK_EQ(create(&k, 0, 0, &handle), CUDA_ERROR_OUT_OF_MEMORY);
    OK(create(&k, 1, 0, &handle));
    OK(ebbsim_foreign_use(0, (uint64_t)1 << 40)); /* more than there is: then nothing is free */
    CHECK_EQ(free_on(&k, 0), 0);
    OK(ebbsim_foreign_use(0, 0));
    CHECK_EQ(free_on(&k, 0), before);
    OK(create(&k, 0, 0, &handle));
    CHECK_EQ(ebbsim_foreign_use(2, 0), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(ebbsim_foreign_use(-1, 0), CUDA_ERROR_INVALID_VALUE);
}

static void cards_that_make_no_sense_are_refused(void)
{
    ebbsim_reset();
    ebbsim_card good = card_of(64 * (uint64_t)MIB), card = good;
    card.size--;
    CHECK_EQ(ebbsim_card_add(&card, NULL), CUDA_ERROR_INVALID_VALUE);
    card = good;
    card.memory += 4096;
    CHECK_EQ(ebbsim_card_add(&card, NULL), CUDA_ERROR_INVALID_VALUE);
    card = good;
    card.context = card.memory;
    CHECK_EQ(ebbsim_card_add(&card, NULL), CUDA_ERROR_INVALID_VALUE);
    card = good;
    card.duplex_rate = 0;
    CHECK_EQ(ebbsim_card_add(&card, NULL), CUDA_ERROR_INVALID_VALUE);
    card = good;
    memset(card.name, 'x', sizeof card.name);
    CHECK_EQ(ebbsim_card_add(&card, NULL), CUDA_ERROR_INVALID_VALUE);
    CHECK_EQ(ebbsim_card_add(NULL, NULL), CUDA_ERROR_INVALID_VALUE);
    int last = -1;
    for (int i = 0; i < 16; i++) {
        OK(ebbsim_card_add(&good, &last));
    }
    CHECK_EQ(last, 15);
    CHECK_EQ(ebbsim_card_add(&good, &last), CUDA_ERROR_INVALID_VALUE);
}

/* ---- what a card may lack ------------------------------------------------------------------------ */

static void a_vgpu_has_no_virtual_memory_management(void)
{
    kit k;
    ebbsim_card card = card_of(64 * (uint64_t)MIB);
    card.vmm = 0;
    kit_start_cards(&k, 1, &card, 1);
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0), 0);
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0), 0);
    CUmemGenericAllocationHandle handle;
    CHECK_EQ(create(&k, 0, 0, &handle), CUDA_ERROR_NOT_SUPPORTED);
    CUdeviceptr address = 0;
    OK(k.driver.cuMemAlloc(&address, 4096)); /* the old way works */
    OK(k.driver.cuMemsetD8Async(address, 5, 4096, NULL));
    OK(k.driver.cuStreamSynchronize(NULL));
    CHECK_EQ(*(unsigned char *)(uintptr_t)address, 5);
}

static void a_card_may_not_export(void)
{
    kit k;
    ebbsim_card card = card_of(64 * (uint64_t)MIB);
    card.exportable = 0;
    kit_start_cards(&k, 1, &card, 1);
    CHECK_EQ(attribute(&k, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0), 0);
    CUmemGenericAllocationHandle handle;
    CHECK_EQ(create(&k, 0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, &handle),
             CUDA_ERROR_NOT_SUPPORTED);
    OK(create(&k, 0, CU_MEM_HANDLE_TYPE_NONE, &handle));
}

/* One of three cards is nobody's peer. */
static void access_is_refused_where_cards_are_no_peers(void)
{
    kit k;
    ebbsim_card card = card_of(64 * (uint64_t)MIB), loner = card;
    loner.peer = 0;
    kit_start_cards(&k, 2, &card, 1);
    OK(ebbsim_card_add(&loner, NULL));
    int can = -1;
    OK(k.driver.cuDeviceCanAccessPeer(&can, 0, 1));
    CHECK_EQ(can, 1);
    OK(k.driver.cuDeviceCanAccessPeer(&can, 0, 2));
    CHECK_EQ(can, 0);
    OK(k.driver.cuDeviceCanAccessPeer(&can, 0, 0));
    CHECK_EQ(can, 0);
    CUdeviceptr page = kit_page(&k, 0);
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 2}, CU_MEM_ACCESS_FLAGS_PROT_READ};
    unsigned long long rights = 99;
    CHECK_EQ(k.driver.cuMemSetAccess(page, PAGE, &access, 1), CUDA_ERROR_INVALID_DEVICE);
    OK(k.driver.cuMemGetAccess(&rights, &access.location, page));
    CHECK_EQ(rights, CU_MEM_ACCESS_FLAGS_PROT_NONE);
    kit_access(&k, page, 1);
    OK(k.driver.cuCtxSetCurrent(k.context[1]));
    CUstream stream = kit_stream(&k);
    kit_kernel("peer", stream, page, 4096, EBBSIM_READ | EBBSIM_WRITE);
    OK(k.driver.cuStreamSynchronize(stream));
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* ---- older drivers ------------------------------------------------------------------------------- */

static ebb_status open_after(int version, const char *hidden, ebb__driver *driver, char *why,
                             size_t length)
{
    ebbsim_reset();
    ebbsim_driver_version(version);
    if (hidden != NULL) {
        ebbsim_driver_hide(hidden);
    }
    why[0] = '\0';
    return ebb__driver_open(driver, SIM_LIBRARY, why, length);
}

static bool is_zero(const ebb__driver *driver)
{
    static const ebb__driver zero;
    return memcmp(driver, &zero, sizeof zero) == 0;
}

static void a_driver_that_is_too_old_is_said_to_be(void)
{
    ebb__driver driver;
    char why[256];
    CHECK_EQ(open_after(11080, NULL, &driver, why, sizeof why), EBB_DRIVER_TOO_OLD);
    CHECK_HAS(why, "11.8");
    CHECK(is_zero(&driver));
    CHECK_EQ(open_after(12000, NULL, &driver, why, sizeof why), EBB_OK);
    CHECK_EQ(driver.version, 12000);
    CHECK(driver.cuCtxRecordEvent == NULL); /* came with 12.5; we can do without */
    CHECK_EQ(open_after(12050, NULL, &driver, why, sizeof why), EBB_OK);
    CHECK(driver.cuCtxRecordEvent != NULL);
}

static void a_function_that_is_missing_is_named(void)
{
    static const struct {
        const char *name;
        bool required;
    } table[] = {
#define REQUIRED true
#define OPTIONAL false
#define ROW(need, name, since, parameters) {#name, need},
        EBB__DRIVER_FUNCTIONS(ROW)
#undef ROW
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        ebb__driver driver;
        char why[256];
        ebb_status status = open_after(13000, table[i].name, &driver, why, sizeof why);
        CHECK_EQ(status, table[i].required ? EBB_DRIVER_INCOMPLETE : EBB_OK);
        if (table[i].required) {
            CHECK_HAS(why, table[i].name);
            CHECK(is_zero(&driver));
        }
    }
    ebb__driver driver;
    char why[256];
    CHECK_EQ(open_after(13000, NULL, &driver, why, sizeof why), EBB_OK); /* forgotten by a reset */
}

static void a_driver_that_does_not_start_is_said_not_to(void)
{
    ebb__driver driver;
    char why[256];
    ebbsim_reset();
    OK(ebbsim_fail("cuInit", 1, CUDA_ERROR_UNKNOWN));
    CHECK_EQ(ebb__driver_open(&driver, SIM_LIBRARY, why, sizeof why), EBB_DRIVER_FAILED);
    CHECK_HAS(why, "cuInit");
    CHECK_HAS(why, "999");
    CHECK(is_zero(&driver));
    OK(ebbsim_fail("cuInit", 1, CUDA_ERROR_NO_DEVICE));
    CHECK_EQ(ebb__driver_open(&driver, SIM_LIBRARY, why, sizeof why), EBB_NO_DEVICE);
    CHECK_EQ(ebb__driver_open(&driver, SIM_LIBRARY, why, sizeof why), EBB_OK);
}

/* ---- the environment ----------------------------------------------------------------------------- */

/* In another process: say what there is. */
static int describe(const char *role)
{
    kit k;
    char why[256];
    if (strcmp(role, "own") == 0) { /* a program's own cards count, whatever the environment says */
        ebbsim_card card = card_of(96 * (uint64_t)MIB);
        OK(ebbsim_card_add(&card, NULL));
    }
    ebb_status status = ebb__driver_open(&k.driver, SIM_LIBRARY, why, sizeof why);
    if (status != EBB_OK) {
        printf("status %d: %s\n", (int)status, why);
        return 0;
    }
    int count = 0, peer = 0;
    size_t total = 0, free_bytes = 0;
    OK(k.driver.cuDeviceGetCount(&count));
    OK(k.driver.cuDevicePrimaryCtxRetain(&k.context[0], 0));
    OK(k.driver.cuCtxSetCurrent(k.context[0]));
    OK(k.driver.cuMemGetInfo(&free_bytes, &total));
    if (count > 1) {
        OK(k.driver.cuDeviceCanAccessPeer(&peer, 0, 1));
    }
    uint64_t now = ebbsim_now();
    usleep(2000);
    printf("%d of %zu MiB, context %zu MiB, peer %d, clock %s\n", count, total / MIB,
           (total - free_bytes) / MIB, peer, ebbsim_now() == now ? "virtual" : "real");
    return 0;
}

static void says(const char *role, const char *value, const char *expected)
{
    char text[2048], variable[512];
    const char *variables[] = {variable, NULL};
    snprintf(variable, sizeof variable, "EBBTIDE_SIM=%s", value);
    CHECK_EQ(self_run(role, value == NULL ? NULL : variables, text, sizeof text), 0);
    if (strstr(text, expected) == NULL) {
        FAIL("EBBTIDE_SIM=%s: \"%s\", which does not hold \"%s\"", value, text, expected);
    }
}

static void the_environment_describes_cards(void)
{
    unsetenv("EBBTIDE_SIM");
    says("describe", NULL, "1 of 8192 MiB, context 256 MiB, peer 0, clock real\n");
    says("describe", "", "1 of 8192 MiB");
    says("describe", "512MiB", "1 of 512 MiB, context 16 MiB, peer 0, clock real\n");
    says("describe", "1.5GiB,devices=2", "2 of 1536 MiB, context 48 MiB, peer 1, clock real\n");
    says("describe", "memory=1GiB,devices=3,peer=0,clock=virtual,context=40MiB",
         "3 of 1024 MiB, context 40 MiB, peer 0, clock virtual\n");
    says("own", "memory=1GiB,devices=3", "1 of 96 MiB");
}

static void what_the_environment_says_wrong_is_said_and_there_is_no_device(void)
{
    static const char *const wrong[] = {"nonsense",       "memory=",
                                        "memory=-1GiB",   "memory=8GiBs",
                                        "devices=0",      "devices=17",
                                        "devices=",       "devices=2x",
                                        "peer=maybe",     "clock=sometimes",
                                        "context=a lot",  "colour=red",
                                        "memory=1e99GiB", "memory=8GiB,devices=two"};
    char number[32];
    snprintf(number, sizeof number, "status %d", (int)EBB_NO_DEVICE);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        says("describe", wrong[i], "EBBTIDE_SIM: cannot understand ");
        says("describe", wrong[i], number);
    }
    says("describe", "1MiB", "EBBTIDE_SIM=1MiB: no such card");
    says("describe", "memory=64MiB,context=64MiB", "no such card");
    says("describe", "1MiB", number);
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        return describe(argv[1]);
    }
    RUN(cards_are_told_apart);
    RUN(each_card_has_its_own_memory);
    RUN(allocations_grow_upwards_and_fill_gaps);
    RUN(a_context_takes_its_share_once);
    RUN(somebody_elses_use_comes_and_goes);
    RUN(cards_that_make_no_sense_are_refused);
    RUN(a_vgpu_has_no_virtual_memory_management);
    RUN(a_card_may_not_export);
    RUN(access_is_refused_where_cards_are_no_peers);
    RUN(a_driver_that_is_too_old_is_said_to_be);
    RUN(a_function_that_is_missing_is_named);
    RUN(a_driver_that_does_not_start_is_said_not_to);
    RUN(the_environment_describes_cards);
    RUN(what_the_environment_says_wrong_is_said_and_there_is_no_device);
    ebbsim_reset();
    return REPORT();
}

/* ebb_probe() says whether a GPU can be used, and touches the caller's struct only when it can. */
#include <dlfcn.h>

#include "ebbtide.h"
#include "harness.h"

#define FAKE(kind) FAKE_FOLDER "/libfake_" kind ".so"

static int is_loaded(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library)
        dlclose(library);
    return library != NULL;
}

static void a_usable_gpu_is_described(void)
{
    ebb_probe_result found = {.size = sizeof found};
    CHECK_EQ(ebb_probe(FAKE("good"), 0, &found), EBB_OK);
    CHECK_EQ(found.size, sizeof found);
    CHECK_EQ(found.driver_version, 13000);
    CHECK_EQ(found.device_count, 1);
    CHECK_EQ(found.exportable, 1);
    CHECK_EQ(found.context_events, 1);
    CHECK_EQ(found.total_bytes, 8LL << 30);
    CHECK_EQ(found.granularity, 2 << 20);
    CHECK_STR(found.name, "A fake GPU");
    CHECK_HAS(found.detail, "A fake GPU");
    CHECK(!is_loaded(FAKE("good")));
}

static void an_older_driver_has_no_context_events(void)
{
    ebb_probe_result found = {.size = sizeof found};
    CHECK_EQ(ebb_probe(FAKE("twelve"), 0, &found), EBB_OK);
    CHECK_EQ(found.driver_version, 12000);
    CHECK_EQ(found.context_events, 0);
}

/* A refusal writes the detail and nothing else. */
static void refuse(const char *path, int index, ebb_status expected, const char *words)
{
    ebb_probe_result found, before;
    memset(&found, 0x55, sizeof found);
    found.size = sizeof found;
    before = found;
    CHECK_EQ(ebb_probe(path, index, &found), expected);
    CHECK_HAS(found.detail, words);
    CHECK(!memcmp(&found, &before, offsetof(ebb_probe_result, detail)));
    CHECK(!is_loaded(path));
}

static void a_gpu_without_vmm_is_refused_by_name(void)
{
    refuse(FAKE("no_vmm"), 0, EBB_NO_VMM, "A fake GPU");
}

static void a_gpu_that_is_not_there(void)
{
    refuse(FAKE("good"), 1, EBB_NO_DEVICE, "no GPU 1");
    refuse(FAKE("no_gpu"), 0, EBB_NO_DEVICE, "CUDA_ERROR_NO_DEVICE");
}

static void a_driver_that_cannot_be_used(void)
{
    refuse(FAKE_FOLDER "/no/such/library.so", 0, EBB_NO_DRIVER, "/no/such/library.so");
    refuse(FAKE("old"), 0, EBB_DRIVER_TOO_OLD, "CUDA 11.8");
    refuse(FAKE("lacking"), 0, EBB_DRIVER_INCOMPLETE, "cuMemMap");
    refuse(FAKE("broken"), 0, EBB_DRIVER_FAILED, "cuInit");
}

static void arguments_that_make_no_sense(void)
{
    CHECK_EQ(ebb_probe(FAKE("good"), 0, NULL), EBB_INVALID);
    ebb_probe_result found = {.size = sizeof found - 1};
    CHECK_EQ(ebb_probe(FAKE("good"), 0, &found), EBB_INVALID);
    CHECK_STR(found.detail, "");
    refuse(FAKE("good"), -1, EBB_INVALID, "-1");
}

int main(void)
{
    RUN(a_usable_gpu_is_described);
    RUN(an_older_driver_has_no_context_events);
    RUN(a_gpu_without_vmm_is_refused_by_name);
    RUN(a_gpu_that_is_not_there);
    RUN(a_driver_that_cannot_be_used);
    RUN(arguments_that_make_no_sense);
    return REPORT();
}

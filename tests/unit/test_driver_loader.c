/* The loader, against libraries that are wrong in one way each (fake_driver.c). */
#include <dlfcn.h>

#include "driver.h"
#include "harness.h"

#define FAKE(kind) FAKE_FOLDER "/libfake_" kind ".so"

static char detail[256];

static int is_loaded(const char *path)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    if (library)
        dlclose(library);
    return library != NULL;
}

static int is_zero(const ebb__driver *driver)
{
    static const ebb__driver zero;
    return !memcmp(driver, &zero, sizeof zero);
}

/* Open a fake that cannot be used: the status, words, and nothing left behind. */
static void refuse(const char *path, ebb_status expected, const char *words)
{
    ebb__driver driver;
    memset(&driver, 0x55, sizeof driver);
    memset(detail, 0, sizeof detail);
    CHECK_EQ(ebb__driver_open(&driver, path, detail, sizeof detail), expected);
    CHECK_HAS(detail, words);
    CHECK(is_zero(&driver));
    CHECK(!is_loaded(path));
    /* The words are a courtesy: without room for them the answer is the same. */
    CHECK_EQ(ebb__driver_open(&driver, path, NULL, 0), expected);
    CHECK(is_zero(&driver));
    CHECK(!is_loaded(path));
}

static void a_library_that_is_not_there(void)
{
    refuse(FAKE_FOLDER "/no/such/library.so", EBB_NO_DRIVER, "/no/such/library.so");
}

static void a_library_that_is_no_driver(void)
{
    refuse(FAKE("nothing"), EBB_NO_DRIVER, "cuGetProcAddress_v2");
}

static void a_driver_from_before_cuGetProcAddress_v2(void)
{
    refuse(FAKE("eleven"), EBB_DRIVER_TOO_OLD, "CUDA 11.4");
}

static void a_driver_that_says_it_is_too_old(void)
{
    refuse(FAKE("old"), EBB_DRIVER_TOO_OLD, "CUDA 11.8");
    CHECK_HAS(detail, "12.0");
}

static void a_missing_function_is_named(void)
{
    refuse(FAKE("lacking"), EBB_DRIVER_INCOMPLETE, "cuMemMap ");
    refuse(FAKE("lacking_quietly"), EBB_DRIVER_INCOMPLETE, "cuMemSetAccess ");
    refuse(FAKE("lacking_version"), EBB_DRIVER_INCOMPLETE, "cuDriverGetVersion");
}

static void a_driver_without_a_gpu(void)
{
    refuse(FAKE("no_gpu"), EBB_NO_DEVICE, "CUDA_ERROR_NO_DEVICE (100)");
}

static void a_driver_that_does_not_start(void)
{
    refuse(FAKE("broken"), EBB_DRIVER_FAILED, "cuInit failed with CUDA_ERROR_UNKNOWN (999)");
}

static void a_whole_driver_fills_every_entry(void)
{
    ebb__driver driver;
    CHECK_EQ(ebb__driver_open(&driver, FAKE("good"), detail, sizeof detail), EBB_OK);
    CHECK_EQ(driver.version, 13000);
    CHECK(is_loaded(FAKE("good")));
#define CASE(need, name, since, parameters) CHECK(driver.name != NULL);
    EBB__DRIVER_FUNCTIONS(CASE)
#undef CASE
    ebb__driver_close(&driver);
    CHECK(is_zero(&driver));
    CHECK(!is_loaded(FAKE("good")));
    ebb__driver_close(&driver);
}

static void an_optional_function_may_be_missing(void)
{
    ebb__driver driver;
    CHECK_EQ(ebb__driver_open(&driver, FAKE("twelve"), detail, sizeof detail), EBB_OK);
    CHECK_EQ(driver.version, 12000);
    CHECK(driver.cuCtxRecordEvent == NULL);
    CHECK(driver.cuMemMap != NULL);
    ebb__driver_close(&driver);
}

static void the_environment_names_the_library_where_the_caller_does_not(void)
{
    ebb__driver driver;
    setenv("EBBTIDE_DRIVER", FAKE("good"), 1);
    CHECK_EQ(ebb__driver_open(&driver, NULL, detail, sizeof detail), EBB_OK);
    CHECK(is_loaded(FAKE("good")));
    ebb__driver_close(&driver);
    CHECK_EQ(ebb__driver_open(&driver, FAKE("old"), NULL, 0), EBB_DRIVER_TOO_OLD);
    unsetenv("EBBTIDE_DRIVER");
}

int main(void)
{
    RUN(a_library_that_is_not_there);
    RUN(a_library_that_is_no_driver);
    RUN(a_driver_from_before_cuGetProcAddress_v2);
    RUN(a_driver_that_says_it_is_too_old);
    RUN(a_missing_function_is_named);
    RUN(a_driver_without_a_gpu);
    RUN(a_driver_that_does_not_start);
    RUN(a_whole_driver_fills_every_entry);
    RUN(an_optional_function_may_be_missing);
    RUN(the_environment_names_the_library_where_the_caller_does_not);
    return REPORT();
}

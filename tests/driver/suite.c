/*
 * Inside a case's process: the driver under test, and expectations. The runner is in main.c.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "more.h"
#include "runner.h"

ebb__driver cu;
more_functions more;
CUcontext context;
unsigned suite_failed;
get_proc_address suite_get_proc_address;

static const char *case_name = "?";
static bool learning;

void suite_begin(const char *name, bool learn)
{
    case_name = name;
    learning = learn;
}

/* ---- starting ------------------------------------------------------------------------------- */

static void load_more(void)
{
    get_proc_address find = NULL;
    void *found = dlsym(cu.library, "cuGetProcAddress_v2");
    if (!found) {
        return;
    }
    memcpy(&find, &found, sizeof found);
    CUdriverProcAddressQueryResult status;
#define LOAD_MORE(member, name, since, parameters)                                                 \
    if (cu.version >= (since) && find(name, &found, since, 0, &status) == CUDA_SUCCESS) {          \
        memcpy(&more.member, &found, sizeof found);                                                \
    }
    MORE_FUNCTIONS(LOAD_MORE)
#undef LOAD_MORE
}

void open_driver(void)
{
    char detail[256] = "";
    ebb_status status = ebb__driver_open(&cu, NULL, detail, sizeof detail);
    if (status != EBB_OK) {
        SKIP(detail);
    }
    load_more();
}

int device_count(void)
{
    int count = 0;
    REQUIRE(cu.cuDeviceGetCount(&count));
    return count;
}

void open_context(void)
{
    CUdevice device = -1;
    REQUIRE(cu.cuDeviceGet(&device, 0));
    REQUIRE(cu.cuDevicePrimaryCtxRetain(&context, device));
    REQUIRE(cu.cuCtxSetCurrent(context));
}

static void *open_library(void)
{
    const char *path = getenv("EBBTIDE_DRIVER");
    return dlopen(path && *path ? path : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
}

bool suite_is_simulated(void)
{
    void *library = open_library();
    return library && dlsym(library, "ebbsim_now");
}

void load_without_init(ebb__driver *table)
{
    void *library = open_library();
    if (!library) {
        SKIP("no driver library");
    }
    void *found = dlsym(library, "cuGetProcAddress_v2");
    if (!found) {
        SKIP("the library has no cuGetProcAddress_v2");
    }
    memcpy(&suite_get_proc_address, &found, sizeof found);
    memset(table, 0, sizeof *table);
#define LOAD(need, name, since, parameters)                                                        \
    if (suite_get_proc_address(#name, &found, since, 0, NULL) == CUDA_SUCCESS) {                   \
        memcpy(&table->name, &found, sizeof found);                                                \
    }
    EBB__DRIVER_FUNCTIONS(LOAD)
#undef LOAD
}

/* ---- expectations --------------------------------------------------------------------------- */

const char *suite_code_name(int code)
{
    switch (code) {
#define NAME_OF(name, value)                                                                       \
    case value:                                                                                    \
        return #name;
        CUDA_CODES(NAME_OF)
#undef NAME_OF
    default:
        return "?";
    }
}

static const char *base_name(const char *file)
{
    const char *slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

/* Every observation passes here: printed when learning, and when it is not what was expected. */
static void observe(const char *file, int line, const char *text, const char *expected,
                    const char *got)
{
    bool met = strcmp(expected, got) == 0;
    if (!met) {
        suite_failed++;
    }
    if (learning) {
        printf("%s|%d|%s|%s\n", case_name, line, text, got);
    }
    if (!met) {
        fprintf(learning ? stderr : stdout, "%s %s:%d  %s  expected %s got %s\n", case_name,
                base_name(file), line, text, expected, got);
    }
    fflush(stdout);
}

void suite_expect_text(const char *file, int line, const char *text, const char *expected,
                       const char *got)
{
    observe(file, line, text, expected, got);
}

static void code_text(char *text, size_t length, int code)
{
    snprintf(text, length, "%s(%d)", suite_code_name(code), code);
}

int suite_expect(const char *file, int line, const char *text, int expected, int got)
{
    char expected_text[64], got_text[64];
    code_text(expected_text, sizeof expected_text, expected);
    code_text(got_text, sizeof got_text, got);
    observe(file, line, text, expected_text, got_text);
    return got;
}

void suite_require(const char *file, int line, const char *text, int got)
{
    if (got != CUDA_SUCCESS) {
        suite_expect(file, line, text, CUDA_SUCCESS, got);
        gate_open_all();
        _exit(1);
    }
}

bool suite_check(const char *file, int line, const char *text, bool got)
{
    observe(file, line, text, "true", got ? "true" : "false");
    return got;
}

void suite_expect_int(const char *file, int line, const char *text, long long expected,
                      long long got)
{
    char expected_text[32], got_text[32];
    snprintf(expected_text, sizeof expected_text, "%lld", expected);
    snprintf(got_text, sizeof got_text, "%lld", got);
    observe(file, line, text, expected_text, got_text);
}

void suite_expect_gated(const char *file, int line, const char *text, int expected, bool waits,
                        gate *closed, int got)
{
    bool waited = gate_is_open(closed);
    gate_cancel(closed);
    char expected_text[96], got_text[96];
    snprintf(expected_text, sizeof expected_text, "%s(%d) %s", suite_code_name(expected), expected,
             waits ? "after the gate opened" : "at once");
    snprintf(got_text, sizeof got_text, "%s(%d) %s", suite_code_name(got), got,
             waited ? "after the gate opened" : "at once");
    observe(file, line, text, expected_text, got_text);
    if (waits) {
        gate_open(closed);
    }
}

void suite_skip(const char *file, int line, const char *reason)
{
    fprintf(stderr, "%s %s:%d  skipped: %s\n", case_name, base_name(file), line, reason);
    fflush(stdout);
    gate_open_all();
    _exit(SUITE_SKIPPED);
}

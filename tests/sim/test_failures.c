/*
 * Any call can be made to fail: with the code asked for, and without doing anything.
 *
 * One program that makes every call of the driver table once. Each step is one call, so the nth call
 * is the nth step.
 */
#define _GNU_SOURCE
#include "self.h"
#include "sim_kit.h"

enum { BYTES = 4096 };

typedef struct scene {
    ebb__driver cu;
    CUcontext context, other;
    CUdevice device;
    CUdeviceptr space, allocation;
    CUmemGenericAllocationHandle frame, retained, imported;
    CUstream stream, second;
    CUevent first, last, travels;
    CUgraph graph;
    CUgraphExec exec;
    CUipcEventHandle ticket;
    CUuuid uuid;
    CUmemAllocationProp properties;
    CUstreamCaptureMode mode;
    CUstreamCaptureStatus status;
    char name[64];
    int number, file;
    unsigned flags;
    unsigned long long rights;
    size_t size, total;
    float milliseconds;
    void *pinned, *registered;
    uint32_t *word;
} scene;

static CUmemAllocationProp properties_of(int device)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
}

static void nothing(void *data)
{
    (void)data;
}

/* ---- the steps ---------------------------------------------------------------------------------- */

#define STEP(function, ...)                                                                        \
    static CUresult step_##function(scene *s)                                                      \
    {                                                                                              \
        return s->cu.function(__VA_ARGS__);                                                        \
    }

STEP(cuInit, 0)
STEP(cuDriverGetVersion, &s->number)
STEP(cuDeviceGetCount, &s->number)
STEP(cuDeviceGet, &s->device, 0)
STEP(cuDeviceGetName, s->name, (int)sizeof s->name, 0)
STEP(cuDeviceGetUuid, &s->uuid, 0)
STEP(cuDeviceTotalMem, &s->total, 0)
STEP(cuDeviceGetAttribute, &s->number, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0)
STEP(cuDeviceCanAccessPeer, &s->number, 0, 1)
STEP(cuDevicePrimaryCtxRetain, &s->context, 0)
STEP(cuDevicePrimaryCtxGetState, 0, &s->flags, &s->number)
STEP(cuCtxSetCurrent, s->context)
STEP(cuCtxPushCurrent, s->context)
STEP(cuCtxGetCurrent, &s->other)
STEP(cuCtxPopCurrent, &s->other)
STEP(cuCtxGetDevice, &s->device)
STEP(cuMemGetInfo, &s->size, &s->total)
STEP(cuMemAddressReserve, &s->space, 4 * (size_t)PAGE, 0, 0, 0)
static CUresult step_cuMemGetAllocationGranularity(scene *s)
{
    CUmemAllocationProp p = properties_of(0);
    return s->cu.cuMemGetAllocationGranularity(&s->size, &p, 0);
}
static CUresult step_cuMemCreate(scene *s)
{
    CUmemAllocationProp p = properties_of(0);
    return s->cu.cuMemCreate(&s->frame, PAGE, &p, 0);
}
STEP(cuMemMap, s->space, PAGE, 0, s->frame, 0)
static CUresult step_cuMemSetAccess(scene *s)
{
    CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return s->cu.cuMemSetAccess(s->space, PAGE, &access, 1);
}
static CUresult step_cuMemGetAccess(scene *s)
{
    CUmemLocation location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return s->cu.cuMemGetAccess(&s->rights, &location, s->space);
}
STEP(cuMemRetainAllocationHandle, &s->retained, (void *)(uintptr_t)s->space)
STEP(cuMemGetAllocationPropertiesFromHandle, &s->properties, s->frame)
STEP(cuMemExportToShareableHandle, &s->file, s->frame, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
STEP(cuMemImportFromShareableHandle, &s->imported, (void *)(intptr_t)s->file,
     CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
STEP(cuMemAlloc, &s->allocation, BYTES)
STEP(cuPointerGetAttribute, &s->number, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, s->allocation)
STEP(cuMemHostAlloc, &s->pinned, BYTES, 0)
STEP(cuMemHostRegister, s->registered, BYTES, 0)
STEP(cuStreamCreate, &s->stream, CU_STREAM_NON_BLOCKING)
STEP(cuStreamCreateWithPriority, &s->second, CU_STREAM_NON_BLOCKING, -1)
STEP(cuEventCreate, &s->first, 0)
static CUresult step_create_last(scene *s)
{
    return s->cu.cuEventCreate(&s->last, 0);
}
static CUresult step_create_travelling(scene *s)
{
    return s->cu.cuEventCreate(&s->travels, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING);
}
STEP(cuMemcpyHtoDAsync, s->space, s->pinned, BYTES, s->stream)
STEP(cuEventRecord, s->first, s->stream)
STEP(cuStreamWaitEvent, s->second, s->first, 0)
STEP(cuMemcpyDtoDAsync, s->allocation, s->space, BYTES, s->second)
STEP(cuMemcpyPeerAsync, s->space, s->context, s->allocation, s->context, BYTES, s->second)
STEP(cuMemcpyDtoHAsync, s->registered, s->allocation, BYTES, s->second)
STEP(cuMemsetD8Async, s->space, 1, BYTES, s->second)
STEP(cuMemsetD32Async, s->space, 1, BYTES / 4, s->second)
static CUresult step_ebbsim_launch(scene *s)
{
    ebbsim_range range = {s->space, BYTES, EBBSIM_READ};
    ebbsim_work work = {.size = sizeof work, .ranges = &range, .range_count = 1};
    return (CUresult)ebbsim_launch(&work, s->second);
}
static CUresult step_ebbsim_catch_up(scene *s)
{
    return (CUresult)ebbsim_catch_up(s->second);
}
STEP(cuStreamWaitValue32, s->second, (CUdeviceptr)(uintptr_t)s->word, 0, CU_STREAM_WAIT_VALUE_GEQ)
STEP(cuStreamWriteValue32, s->second, (CUdeviceptr)(uintptr_t)s->word, 1, 0)
STEP(cuLaunchHostFunc, s->second, nothing, NULL)
STEP(cuCtxRecordEvent, s->context, s->last)
STEP(cuEventSynchronize, s->last)
STEP(cuStreamSynchronize, s->second)
STEP(cuCtxSynchronize)
STEP(cuEventQuery, s->last)
STEP(cuEventElapsedTime, &s->milliseconds, s->first, s->last)
STEP(cuStreamQuery, s->stream)
STEP(cuStreamGetCtx, s->stream, &s->other)
STEP(cuIpcGetEventHandle, &s->ticket, s->travels)
STEP(cuIpcOpenEventHandle, &s->travels, s->ticket)
STEP(cuThreadExchangeStreamCaptureMode, &s->mode)
STEP(cuStreamBeginCapture, s->stream, CU_STREAM_CAPTURE_MODE_RELAXED)
STEP(cuStreamIsCapturing, s->stream, &s->status)
STEP(cuStreamEndCapture, s->stream, &s->graph)
STEP(cuGraphInstantiateWithFlags, &s->exec, s->graph, 0)
STEP(cuGraphLaunch, s->exec, s->stream)
STEP(cuGraphExecDestroy, s->exec)
STEP(cuGraphDestroy, s->graph)
STEP(cuStreamDestroy, s->stream)
static CUresult step_destroy_second(scene *s)
{
    return s->cu.cuStreamDestroy(s->second);
}
STEP(cuEventDestroy, s->first)
static CUresult step_destroy_last(scene *s)
{
    return s->cu.cuEventDestroy(s->last);
}
static CUresult step_destroy_travelling(scene *s)
{
    return s->cu.cuEventDestroy(s->travels);
}
STEP(cuMemHostUnregister, s->registered)
STEP(cuMemFreeHost, s->pinned)
STEP(cuMemFree, s->allocation)
STEP(cuMemUnmap, s->space, PAGE)
STEP(cuMemRelease, s->frame)
static CUresult step_release_retained(scene *s)
{
    return s->cu.cuMemRelease(s->retained);
}
static CUresult step_release_imported(scene *s)
{
    return s->cu.cuMemRelease(s->imported);
}
STEP(cuMemAddressFree, s->space, 4 * (size_t)PAGE)
STEP(cuDevicePrimaryCtxRelease, 0)

static const struct {
    const char *function;
    CUresult (*call)(scene *s);
    CUresult code; /* when it is not made to fail */
} steps[] = {
#define DO(function)                                                                               \
    {                                                                                              \
#function, step_##function, CUDA_SUCCESS                                                   \
    }
#define AGAIN(function, name)                                                                      \
    {                                                                                              \
#function, step_##name, CUDA_SUCCESS                                                       \
    }
    /* start */
    DO(cuInit),
    DO(cuDriverGetVersion),
    DO(cuDeviceGetCount),
    DO(cuDeviceGet),
    DO(cuDeviceGetName),
    DO(cuDeviceGetUuid),
    DO(cuDeviceTotalMem),
    DO(cuDeviceGetAttribute),
    DO(cuDeviceCanAccessPeer),
    DO(cuDevicePrimaryCtxRetain),
    DO(cuDevicePrimaryCtxGetState),
    DO(cuCtxSetCurrent),
    DO(cuCtxPushCurrent),
    DO(cuCtxGetCurrent),
    DO(cuCtxPopCurrent),
    DO(cuCtxGetDevice),
    /* memory */
    DO(cuMemGetInfo),
    DO(cuMemAddressReserve),
    DO(cuMemGetAllocationGranularity),
    DO(cuMemCreate),
    DO(cuMemMap),
    DO(cuMemSetAccess),
    DO(cuMemGetAccess),
    DO(cuMemRetainAllocationHandle),
    DO(cuMemGetAllocationPropertiesFromHandle),
    DO(cuMemExportToShareableHandle),
    DO(cuMemImportFromShareableHandle),
    DO(cuMemAlloc),
    DO(cuPointerGetAttribute),
    DO(cuMemHostAlloc),
    DO(cuMemHostRegister),
    /* work */
    DO(cuStreamCreate),
    DO(cuStreamCreateWithPriority),
    DO(cuEventCreate),
    AGAIN(cuEventCreate, create_last),
    AGAIN(cuEventCreate, create_travelling),
    DO(cuMemcpyHtoDAsync),
    DO(cuEventRecord),
    DO(cuStreamWaitEvent),
    DO(cuMemcpyDtoDAsync),
    DO(cuMemcpyPeerAsync),
    DO(cuMemcpyDtoHAsync),
    DO(cuMemsetD8Async),
    DO(cuMemsetD32Async),
    DO(ebbsim_launch),
    DO(ebbsim_catch_up),
    DO(cuStreamWaitValue32),
    DO(cuStreamWriteValue32),
    DO(cuLaunchHostFunc),
    DO(cuCtxRecordEvent),
    DO(cuEventSynchronize),
    DO(cuStreamSynchronize),
    DO(cuCtxSynchronize),
    DO(cuEventQuery),
    DO(cuEventElapsedTime),
    DO(cuStreamQuery),
    DO(cuStreamGetCtx),
    DO(cuIpcGetEventHandle),
    {"cuIpcOpenEventHandle", step_cuIpcOpenEventHandle, CUDA_ERROR_INVALID_CONTEXT}, /* its own */
    DO(cuThreadExchangeStreamCaptureMode),
    DO(cuStreamBeginCapture),
    DO(cuStreamIsCapturing),
    DO(cuStreamEndCapture),
    DO(cuGraphInstantiateWithFlags),
    DO(cuGraphLaunch),
    /* the end */
    DO(cuGraphExecDestroy),
    DO(cuGraphDestroy),
    DO(cuStreamDestroy),
    AGAIN(cuStreamDestroy, destroy_second),
    DO(cuEventDestroy),
    AGAIN(cuEventDestroy, destroy_last),
    AGAIN(cuEventDestroy, destroy_travelling),
    DO(cuMemHostUnregister),
    DO(cuMemFreeHost),
    DO(cuMemFree),
    DO(cuMemUnmap),
    DO(cuMemRelease),
    AGAIN(cuMemRelease, release_retained),
    AGAIN(cuMemRelease, release_imported),
    DO(cuMemAddressFree),
    DO(cuDevicePrimaryCtxRelease)};

enum { STEPS = sizeof steps / sizeof *steps };

/* ---- playing them ------------------------------------------------------------------------------- */

static void start(scene *s)
{
    char why[256];
    static uint32_t *word;
    static unsigned char *registered;
    ebbsim_reset();
    ebbsim_card card;
    ebbsim_card_default(&card, 128 * (uint64_t)MIB);
    OK(ebbsim_card_add(&card, NULL));
    OK(ebbsim_card_add(&card, NULL));
    ebbsim_clock_virtual(1);
    ebbsim_on_hazard(EBBSIM_QUIET);
    memset(s, 0, sizeof *s);
    if (registered == NULL) {
        registered = calloc(1, 2 * BYTES);
        REQUIRE(registered != NULL);
        word = (uint32_t *)(void *)registered;
    }
    s->registered = registered;
    s->word = word;
    s->file = -1;
    s->mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
    REQUIRE(ebb__driver_open(&s->cu, SIM_LIBRARY, why, sizeof why) == EBB_OK);
}

static void finish(scene *s)
{
    ebbsim_census c = {.size = sizeof c}, none = {.size = sizeof c};
    close(s->file); /* the last hold on the exported frame: the next frame made notices */
    OK(step_cuMemCreate(s));
    OK(step_cuMemRelease(s));
    ebbsim_census_take(&c);
    CHECK(memcmp(&c, &none, sizeof c) == 0);
    CHECK_EQ(ebbsim_hazards(), 0);
}

/* What the process holds. The driver's own thread may be at work, so works are left out. */
static ebbsim_census holds(void)
{
    ebbsim_census c = {.size = sizeof c};
    ebbsim_census_take(&c);
    c.pending_works = 0;
    return c;
}

static void play(scene *s, int from, int to)
{
    for (int i = from; i < to; i++) {
        CUresult code = steps[i].call(s);
        if (code != steps[i].code) {
            FAIL("step %d, %s, gave %d", i, steps[i].function, (int)code);
        }
    }
}

/* This step fails, nothing happens; and the next time it works. */
static void play_failing(scene *s, int step, int code)
{
    ebbsim_census before = holds();
    scene untouched = *s;
    unsigned long failures = ebbsim_failures();
    int got = (int)steps[step].call(s);
    ebbsim_census after = holds();
    if (got != code) {
        FAIL("%s gave %d, not %d", steps[step].function, got, code);
    }
    if (memcmp(&before, &after, sizeof before) != 0 || memcmp(&untouched, s, sizeof *s) != 0) {
        FAIL("%s failed and did something", steps[step].function);
    }
    CHECK_EQ(ebbsim_failures(), failures + 1);
    CHECK(ebbsim_check() == NULL);
}

static void every_function_can_fail_and_then_does_nothing(void)
{
    for (int i = 0; i < STEPS; i++) {
        scene s;
        start(&s);
        play(&s, 0, i);
        OK(ebbsim_fail(steps[i].function, 1, 999));
        play_failing(&s, i, 999);
        play(&s, i, STEPS);
        finish(&s);
    }
}

static void the_nth_call_of_any_function_can_fail(void)
{
    for (int i = 0; i < STEPS; i++) {
        scene s;
        start(&s);
        OK(ebbsim_fail(NULL, (unsigned long)i + 1, 2));
        play(&s, 0, i);
        play_failing(&s, i, 2);
        play(&s, i, STEPS);
        finish(&s);
    }
}

/* Those that answer without the driver, and the names of codes, cannot fail and are left out. */
static void the_steps_cover_the_whole_table(void)
{
    static const char *const table[] = {
#define NAME(need, name, since, parameters) #name,
        EBB__DRIVER_FUNCTIONS(NAME)
#undef NAME
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        bool found =
            strcmp(table[i], "cuGetErrorName") == 0 || strcmp(table[i], "cuGetErrorString") == 0;
        for (int j = 0; j < STEPS && !found; j++) {
            found = strcmp(steps[j].function, table[i]) == 0;
        }
        if (!found) {
            FAIL("no step calls %s", table[i]);
        }
    }
}

/* ---- plans -------------------------------------------------------------------------------------- */

static void the_nth_call_of_a_function_is_counted_from_now(void)
{
    scene s;
    start(&s);
    play(&s, 0, STEPS - 1);
    OK(ebbsim_fail("cuMemGetInfo", 3, 999));
    size_t a, b;
    OK(s.cu.cuMemGetInfo(&a, &b));
    OK(s.cu.cuCtxSynchronize());
    OK(s.cu.cuMemGetInfo(&a, &b));
    CHECK_EQ(s.cu.cuMemGetInfo(&a, &b), 999);
    OK(s.cu.cuMemGetInfo(&a, &b));
    CHECK_EQ(ebbsim_failures(), 1);
}

static void several_failures_can_wait_at_once(void)
{
    scene s;
    start(&s);
    play(&s, 0, STEPS - 1);
    OK(ebbsim_fail("cuMemGetInfo", 1, 999));
    OK(ebbsim_fail("cuMemGetInfo", 2, 2));
    OK(ebbsim_fail("cuCtxSynchronize", 1, 700));
    OK(ebbsim_fail(NULL, 4, 304));
    size_t a, b;
    CHECK_EQ(s.cu.cuMemGetInfo(&a, &b), 999);
    CHECK_EQ(s.cu.cuCtxSynchronize(), 700);
    CHECK_EQ(s.cu.cuMemGetInfo(&a, &b), 2);
    CHECK_EQ(s.cu.cuMemGetInfo(&a, &b), 304);
    OK(s.cu.cuMemGetInfo(&a, &b));
    CHECK_EQ(ebbsim_failures(), 4);
}

static void what_has_not_happened_can_be_called_off(void)
{
    scene s;
    start(&s);
    play(&s, 0, STEPS - 1);
    OK(ebbsim_fail("cuCtxSynchronize", 1, 999));
    OK(ebbsim_fail(NULL, 2, 999));
    ebbsim_fail_clear();
    OK(s.cu.cuCtxSynchronize());
    OK(s.cu.cuCtxSynchronize());
    CHECK_EQ(ebbsim_failures(), 0);
    CHECK_EQ(ebbsim_fail("cuNoSuchThing", 1, 999), CUDA_ERROR_NOT_FOUND);
    CHECK_EQ(ebbsim_fail("cuInit", 0, 999), CUDA_ERROR_INVALID_VALUE);
}

static void calls_are_counted(void)
{
    scene s;
    start(&s);
    unsigned long all = ebbsim_calls(NULL);
    play(&s, 0, STEPS - 1);
    CHECK_EQ(ebbsim_calls(NULL), all + STEPS - 1);
    CHECK_EQ(ebbsim_calls("cuMemRelease"), 3);
    CHECK_EQ(ebbsim_calls("cuEventCreate"), 3);
    CHECK_EQ(ebbsim_calls("cuDevicePrimaryCtxRelease"), 0);
    CHECK_EQ(ebbsim_calls("cuNoSuchThing"), 0);
    OK(ebbsim_fail("cuCtxSynchronize", 1, 999));
    unsigned long before = ebbsim_calls("cuCtxSynchronize");
    CHECK_EQ(s.cu.cuCtxSynchronize(), 999);
    CHECK_EQ(ebbsim_calls("cuCtxSynchronize"), before + 1); /* also one that fails */
    ebbsim_reset();
    CHECK_EQ(ebbsim_calls(NULL), 0);
}

/* Words for codes are calls like any other. */
static void words_for_codes_can_fail(void)
{
    scene s;
    start(&s);
    const char *text = "before";
    OK(ebbsim_fail("cuGetErrorName", 1, 999));
    CHECK_EQ(s.cu.cuGetErrorName(CUDA_SUCCESS, &text), 999);
    CHECK(text == NULL);
    OK(ebbsim_fail("cuGetErrorString", 1, 999));
    CHECK_EQ(s.cu.cuGetErrorString(CUDA_SUCCESS, &text), 999);
    CHECK(text == NULL);
    OK(s.cu.cuGetErrorName(CUDA_ERROR_NOT_READY, &text));
    CHECK_STR(text, "CUDA_ERROR_NOT_READY");
    OK(s.cu.cuGetErrorString(CUDA_ERROR_NOT_READY, &text));
    CHECK_EQ(ebbsim_failures(), 2);
}

/* ---- from the environment ------------------------------------------------------------------------ */

/* The second cuMemCreate and the first cuStreamCreate of this process are to fail. */
static int in_an_environment_with_failures(bool again)
{
    if (again) {
        ebbsim_reset(); /* a process that begins anew has its environment still */
    }
    ebb__driver cu;
    char why[256];
    CUcontext context;
    CUstream stream;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp properties = properties_of(0);
    if (ebb__driver_open(&cu, SIM_LIBRARY, why, sizeof why) != EBB_OK) {
        printf("%s\n", why);
        return 1;
    }
    int codes[5] = {(int)cu.cuDevicePrimaryCtxRetain(&context, 0), (int)cu.cuCtxSetCurrent(context),
                    (int)cu.cuMemCreate(&handle, PAGE, &properties, 0),
                    (int)cu.cuMemCreate(&handle, PAGE, &properties, 0),
                    (int)cu.cuStreamCreate(&stream, 0)};
    printf("%d %d %d %d %d, %lu failures\n", codes[0], codes[1], codes[2], codes[3], codes[4],
           ebbsim_failures());
    return 0;
}

static void failures_come_from_the_environment(void)
{
    char text[1024];
    const char *good[] = {"EBBTIDE_SIM_FAIL=cuMemCreate:2:2,cuStreamCreate:1:999", NULL};
    CHECK_EQ(self_run("child", good, text, sizeof text), 0);
    CHECK_STR(text, "0 0 0 2 999, 2 failures\n");
    CHECK_EQ(self_run("again", good, text, sizeof text), 0);
    CHECK_STR(text, "0 0 0 2 999, 2 failures\n");
    const char *bad[] = {"EBBTIDE_SIM_FAIL=cuMemCreate:2:2,cuNoSuchThing:1:2,cuInit", NULL};
    CHECK_EQ(self_run("child", bad, text, sizeof text), 0);
    CHECK_HAS(text, "EBBTIDE_SIM_FAIL: cannot understand cuNoSuchThing:1:2");
    CHECK_HAS(text, "EBBTIDE_SIM_FAIL: cannot understand cuInit");
    CHECK_HAS(text, "0 0 0 2 0, 1 failures");
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        return in_an_environment_with_failures(strcmp(argv[1], "again") == 0);
    }
    RUN(the_steps_cover_the_whole_table);
    RUN(every_function_can_fail_and_then_does_nothing);
    RUN(the_nth_call_of_any_function_can_fail);
    RUN(the_nth_call_of_a_function_is_counted_from_now);
    RUN(several_failures_can_wait_at_once);
    RUN(what_has_not_happened_can_be_called_off);
    RUN(calls_are_counted);
    RUN(words_for_codes_can_fail);
    RUN(failures_come_from_the_environment);
    ebbsim_reset();
    return REPORT();
}

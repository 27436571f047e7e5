/*
 * A process of a simulated run that does what it is told.
 */
#define _GNU_SOURCE
#include "actor.h"

#include <fcntl.h>
#include <unistd.h>

void actor_start(actor *a)
{
    char why[256];
    ebbsim_on_hazard(EBBSIM_QUIET);
    if (ebb__driver_open(&a->k.driver, SIM_LIBRARY, why, sizeof why) != EBB_OK) {
        printf("-1 %s\n", why);
        exit(1);
    }
    OK(a->k.driver.cuDevicePrimaryCtxRetain(&a->k.context[0], 0));
    OK(a->k.driver.cuCtxSetCurrent(a->k.context[0]));
    OK(a->k.driver.cuMemAddressReserve(&a->k.base, (size_t)KIT_PAGES * PAGE, 0, 0, 0));
    a->stream = kit_stream(&a->k);
    a->word = (uint32_t *)(void *)kit_host(&a->k, 4096, 0);
}

long long actor_free_bytes(actor *a)
{
    size_t bytes = 0;
    OK(a->k.driver.cuMemGetInfo(&bytes, NULL));
    return (long long)bytes;
}

/* A frame with access, filled with `value`; its file descriptor. */
long long actor_export(actor *a, int value)
{
    int fd = -1;
    a->frame = kit_frame(&a->k, 0);
    a->page = kit_map(&a->k, 0, a->frame, 0);
    OK(a->k.driver.cuMemsetD8Async(a->page, (unsigned char)value, PAGE, a->stream));
    OK(a->k.driver.cuStreamSynchronize(a->stream));
    OK(a->k.driver.cuMemExportToShareableHandle(&fd, a->frame,
                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    return fd;
}

long long actor_import(actor *a, pid_t pid, int fd)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, fd);
    int own = open(path, O_RDWR | O_CLOEXEC);
    long long code = (long long)a->k.driver.cuMemImportFromShareableHandle(
        &a->frame, (void *)(intptr_t)own, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(own);
    if (code == 0) {
        a->page = kit_map(&a->k, 1, a->frame, 0);
    }
    return code;
}

long long actor_drop(actor *a)
{
    OK(a->k.driver.cuMemUnmap(a->page, PAGE));
    OK(a->k.driver.cuMemRelease(a->frame));
    return 0;
}

static void hex(char *text, const CUipcEventHandle *ticket)
{
    for (size_t i = 0; i < sizeof *ticket; i++) {
        sprintf(text + 2 * i, "%02x", (unsigned char)ticket->reserved[i]);
    }
}

long long actor_event(actor *a, char *text)
{
    OK(a->k.driver.cuEventCreate(&a->event, CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING));
    OK(a->k.driver.cuIpcGetEventHandle(&a->ticket, a->event));
    hex(text, &a->ticket);
    return 0;
}

long long actor_open_event(actor *a, const char *text)
{
    CUipcEventHandle ticket;
    for (size_t i = 0; i < sizeof ticket; i++) {
        unsigned byte = 0;
        sscanf(text + 2 * i, "%2x", &byte);
        ticket.reserved[i] = (char)byte;
    }
    return (long long)a->k.driver.cuIpcOpenEventHandle(&a->event, ticket);
}

long long actor_kernel(actor *a, uint64_t nanoseconds)
{
    ebbsim_work work = {.size = sizeof work, .nanoseconds = nanoseconds};
    return ebbsim_launch(&work, a->stream);
}

static long long hold(actor *a) /* the stream, until told otherwise */
{
    a->word[0] = 0;
    return (long long)a->k.driver.cuStreamWaitValue32(a->stream, (CUdeviceptr)(uintptr_t)a->word, 1,
                                                      CU_STREAM_WAIT_VALUE_GEQ);
}

static long long let_go(actor *a)
{
    __atomic_store_n(a->word, 1, __ATOMIC_RELEASE);
    return (long long)a->k.driver.cuStreamSynchronize(a->stream);
}

long long actor_frames(actor *a, long long count)
{
    CUmemAllocationProp properties = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    long long code = 0;
    for (; count > 0 && code == 0; count--) {
        code = (long long)a->k.driver.cuMemCreate(&a->frame, PAGE, &properties, 0);
    }
    return code;
}

static long long act_on_memory(actor *a, const char *verb, long long number, const char *text)
{
    long long result = -1;
    if (strcmp(verb, "frames") == 0) {
        result = actor_frames(a, number);
    } else if (strcmp(verb, "free") == 0) {
        result = actor_free_bytes(a);
    } else if (strcmp(verb, "export") == 0) {
        result = actor_export(a, (int)number);
    } else if (strcmp(verb, "import") == 0) {
        result = actor_import(a, (pid_t)number, (int)strtol(text, NULL, 10));
    } else if (strcmp(verb, "read") == 0) {
        result = *(volatile unsigned char *)(uintptr_t)(a->page + (CUdeviceptr)number);
    } else if (strcmp(verb, "write") == 0) {
        OK(a->k.driver.cuMemsetD8Async(a->page, (unsigned char)number, PAGE, a->stream));
        result = (long long)a->k.driver.cuStreamSynchronize(a->stream);
    } else if (strcmp(verb, "drop") == 0) {
        result = actor_drop(a);
    } else if (strcmp(verb, "foreign") == 0) {
        result = ebbsim_foreign_use(0, (uint64_t)number);
    } else if (strcmp(verb, "check") == 0) {
        result = ebbsim_check() != NULL;
    }
    return result;
}

static long long act_on_time(actor *a, const char *verb, long long number, char *text)
{
    long long result = -1;
    if (strcmp(verb, "now") == 0) {
        result = (long long)ebbsim_now();
    } else if (strcmp(verb, "pass") == 0) {
        ebbsim_pass((uint64_t)number);
        result = 0;
    } else if (strcmp(verb, "event") == 0) {
        result = actor_event(a, text);
    } else if (strcmp(verb, "open") == 0) {
        result = actor_open_event(a, text);
    } else if (strcmp(verb, "kernel") == 0) {
        result = actor_kernel(a, (uint64_t)number);
    } else if (strcmp(verb, "hold") == 0) {
        result = hold(a);
    } else if (strcmp(verb, "go") == 0) {
        result = let_go(a);
    } else if (strcmp(verb, "record") == 0) {
        result = (long long)a->k.driver.cuEventRecord(a->event, a->stream);
    } else if (strcmp(verb, "query") == 0) {
        result = (long long)a->k.driver.cuEventQuery(a->event);
    } else if (strcmp(verb, "synchronize") == 0) {
        result = (long long)a->k.driver.cuEventSynchronize(a->event);
    } else if (strcmp(verb, "wait") == 0) {
        result = (long long)a->k.driver.cuStreamWaitEvent(a->stream, a->event, 0);
    } else if (strcmp(verb, "destroy") == 0) {
        result = (long long)a->k.driver.cuEventDestroy(a->event);
    } else if (strcmp(verb, "stream") == 0) {
        result = (long long)a->k.driver.cuStreamSynchronize(a->stream);
    }
    return result;
}

int actor_obey(void)
{
    static actor a;
    char line[512], verb[32], text[256];
    actor_start(&a);
    puts("0"); /* ready */
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        long long number = 0;
        verb[0] = text[0] = '\0';
        sscanf(line, "%31s %lld %255s", verb, &number, text);
        long long result = act_on_memory(&a, verb, number, text);
        result = result == -1 ? act_on_time(&a, verb, number, text) : result;
        printf("%lld", result);
        if (strcmp(verb, "event") == 0) {
            printf(" %s", text);
        }
        putchar('\n');
        fflush(stdout);
    }
    return 0; /* without giving anything back: the process's end does */
}

/*
 * Entry and exit of every driver call: the lock, the cost, the planned failure, the context.
 *
 * Also cuGetProcAddress, because it is the same table that says what exists, and reset, because it is
 * the one place that knows all the parts.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "driver_face.h"
#include "sim.h"

simulator sim = {.mutex = PTHREAD_MUTEX_INITIALIZER,
                 .changed = PTHREAD_COND_INITIALIZER,
                 .run_fd = -1,
                 .process = -1,
                 .driver_version = 13000,
                 .stream_ids = {.tag = 1},
                 .event_ids = {.tag = 2},
                 .handle_ids = {.tag = 3},
                 .graph_ids = {.tag = 4},
                 .node_ids = {.tag = 5},
                 .pool_ids = {.tag = 6}};

enum { ANY, INIT, GUARDED, CTX, UNSAFE };

static const struct {
    const char *name; /* what cuGetProcAddress is asked for */
    const char *symbol;
    int since;
    unsigned cost;
    int needs;
    void (*address)(void);
} functions[FN_COUNT] = {
#define SIM_FUNCTION_ROW(name, since, symbol, cost, needs)                                         \
    {name, #symbol, since, cost, needs, (void (*)(void))symbol},
    SIM_FUNCTIONS(SIM_FUNCTION_ROW)
#undef SIM_FUNCTION_ROW
};

/* Planned failures, call counts and the program's own time for a call; under sim.mutex. */
typedef struct plan {
    int function; /* -1: any */
    unsigned long nth;
    int code;
    struct plan *next;
} plan;

static struct {
    plan *plans;
    unsigned long happened;
    unsigned long calls[FN_COUNT], all_calls;
    bool hidden[FN_COUNT];
    uint64_t host_time[FN_COUNT];
} control;

/* ---- threads --------------------------------------------------------------------------------- */

thread_state *sim_thread(void)
{
    static _Thread_local thread_state state;
    return &state;
}

context *sim_current(void)
{
    thread_state *t = sim_thread();
    return t->depth > 0 ? t->stack[t->depth - 1] : NULL;
}

long sim_thread_number(void)
{
    thread_state *t = sim_thread();
    if (t->number == 0) {
        t->number = (long)syscall(SYS_gettid);
    }
    return t->number;
}

/* ---- first use ------------------------------------------------------------------------------- */

/* A driver does not survive a fork: the child's calls fail as the real one's do. */
static void after_fork(void)
{
    sim.forked = sim.initialised;
    pthread_mutex_init(&sim.mutex, NULL);
    sim_thread()->number = 0;
    if (!sim.initialised && sim.run != NULL) {
        /* Only looked at so far: the child starts anew, with an entry of its own. */
        sim.forked = true;
        sim_run_close();
        sim.forked = false;
    }
}

static void plan_from_environment(void)
{
    char text[256];
    const char *given = getenv("EBBTIDE_SIM_FAIL");
    snprintf(text, sizeof text, "%s", given == NULL ? "" : given);
    char *rest = NULL;
    for (char *word = strtok_r(text, ",", &rest); word != NULL; word = strtok_r(NULL, ",", &rest)) {
        char name[64];
        unsigned long nth = 0;
        int code = 0;
        if (sscanf(word, "%63[^:]:%lu:%d", name, &nth, &code) != 3 ||
            ebbsim_fail(name, nth, code) != 0) {
            fprintf(stderr, "ebbtide sim: EBBTIDE_SIM_FAIL: cannot understand %s\n", word);
        }
    }
}

__attribute__((constructor)) static void loaded(void)
{
    pthread_atfork(NULL, NULL, after_fork);
    plan_from_environment();
    const char *mode = getenv("EBBTIDE_SIM_HAZARD");
    if (mode != NULL) {
        ebbsim_on_hazard(strcmp(mode, "abort") == 0   ? EBBSIM_ABORT
                         : strcmp(mode, "quiet") == 0 ? EBBSIM_QUIET
                                                      : EBBSIM_PRINT);
    }
    /* Every frame is a file descriptor: take as many as we may. */
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

__attribute__((destructor)) static void unloaded(void)
{
    pthread_mutex_lock(&sim.mutex);
    sim_run_close();
    pthread_mutex_unlock(&sim.mutex);
}

/* ---- entry and exit -------------------------------------------------------------------------- */

static CUresult planned_failure(int function)
{
    CUresult code = CUDA_SUCCESS;
    for (plan **link = &control.plans; *link != NULL;) {
        plan *p = *link;
        if ((p->function == function || p->function < 0) && --p->nth == 0) {
            code = (CUresult)p->code;
            control.happened++;
            *link = p->next;
            free(p);
        } else {
            link = &p->next;
        }
    }
    return code;
}

CUresult sim_enter(function_id function)
{
    pthread_mutex_lock(&sim.mutex);
    control.calls[function]++;
    control.all_calls++;
    int needs = functions[function].needs;
    if (sim.forked) {
        return needs == ANY ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    }
    if (!sim_run_open()) {
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    sim_clock_add(functions[function].cost + control.host_time[function]);
    CUresult code = planned_failure((int)function);
    if (code != CUDA_SUCCESS || needs == ANY) {
        return code;
    }
    if (!sim.initialised) {
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    if (sim_thread()->in_host_function) {
        return CUDA_ERROR_NOT_PERMITTED;
    }
    const context *current = sim_current();
    if (current != NULL && current->lost != CUDA_SUCCESS) {
        return current->lost;
    }
    if (needs >= CTX && current == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (needs >= CTX && !current->active) {
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    }
    if ((needs == UNSAFE || needs == GUARDED) && sim_capture_forbids()) {
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult sim_leave(CUresult code)
{
    pthread_mutex_unlock(&sim.mutex);
    return code;
}

const char *sim_function_name(function_id function)
{
    return functions[function].name;
}

/* ---- what exists ----------------------------------------------------------------------------- */

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                             CUdriverProcAddressQueryResult *status)
{
    CUresult code = sim_enter(FN_cuGetProcAddress_v2);
    if (code == CUDA_SUCCESS &&
        (symbol == NULL || function == NULL || flags > 3 || version > sim.driver_version)) {
        code = CUDA_ERROR_INVALID_VALUE;
    }
    if (code != CUDA_SUCCESS) {
        return sim_leave(code);
    }
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = NULL;
    for (int i = 0; i < FN_COUNT; i++) {
        if (strcmp(functions[i].name, symbol) != 0 || control.hidden[i] ||
            functions[i].since > sim.driver_version || functions[i].since == 0) {
            continue;
        }
        if (functions[i].since > version) {
            found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
            continue;
        }
        memcpy(function, &functions[i].address, sizeof *function);
        found = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    if (status != NULL) {
        *status = found;
    }
    /* Asked in the older way, without a status, a missing function is an error. */
    return sim_leave(status == NULL && *function == NULL ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS);
}

CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

void ebbsim_driver_version(int version)
{
    pthread_mutex_lock(&sim.mutex);
    sim.driver_version = version;
    pthread_mutex_unlock(&sim.mutex);
}

static int find(const char *name)
{
    for (int i = 0; name != NULL && i < FN_COUNT; i++) {
        if (strcmp(functions[i].name, name) == 0 || strcmp(functions[i].symbol, name) == 0) {
            return i;
        }
    }
    return -1;
}

void ebbsim_driver_hide(const char *function)
{
    int index = find(function);
    pthread_mutex_lock(&sim.mutex);
    if (index >= 0) {
        control.hidden[index] = true;
    }
    pthread_mutex_unlock(&sim.mutex);
}

int ebbsim_host_time(const char *function, uint64_t nanoseconds)
{
    int index = find(function);
    if (index < 0) {
        return CUDA_ERROR_NOT_FOUND;
    }
    pthread_mutex_lock(&sim.mutex);
    control.host_time[index] = nanoseconds;
    pthread_mutex_unlock(&sim.mutex);
    return CUDA_SUCCESS;
}

/* ---- planned failures ------------------------------------------------------------------------ */

int ebbsim_fail(const char *function, unsigned long nth, int code)
{
    int index = find(function);
    if (function != NULL && index < 0) {
        return CUDA_ERROR_NOT_FOUND;
    }
    plan *p = nth == 0 ? NULL : malloc(sizeof *p);
    if (p == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&sim.mutex);
    *p = (plan){.function = index, .nth = nth, .code = code, .next = control.plans};
    control.plans = p;
    pthread_mutex_unlock(&sim.mutex);
    return CUDA_SUCCESS;
}

unsigned long ebbsim_failures(void)
{
    pthread_mutex_lock(&sim.mutex);
    unsigned long happened = control.happened;
    pthread_mutex_unlock(&sim.mutex);
    return happened;
}

static void forget_plans(void)
{
    while (control.plans != NULL) {
        plan *p = control.plans;
        control.plans = p->next;
        free(p);
    }
}

void ebbsim_fail_clear(void)
{
    pthread_mutex_lock(&sim.mutex);
    forget_plans();
    pthread_mutex_unlock(&sim.mutex);
}

unsigned long ebbsim_calls(const char *function)
{
    int index = find(function);
    pthread_mutex_lock(&sim.mutex);
    unsigned long calls = function == NULL ? control.all_calls
                          : index < 0      ? 0
                                           : control.calls[index];
    pthread_mutex_unlock(&sim.mutex);
    return calls;
}

/* ---- reset and census ------------------------------------------------------------------------ */

void ebbsim_reset(void)
{
    pthread_mutex_lock(&sim.mutex);
    sim_capture_reset();
    sim_events_reset();
    sim_stream_reset();
    sim_memory_reset();
    sim_host_reset();
    sim_hazards_reset();
    sim_run_close();
    sim_ids_clear(&sim.stream_ids);
    sim_ids_clear(&sim.event_ids);
    sim_ids_clear(&sim.handle_ids);
    sim_ids_clear(&sim.graph_ids);
    sim_ids_clear(&sim.node_ids);
    sim_ids_clear(&sim.pool_ids);
    memset(sim.contexts, 0, sizeof sim.contexts);
    forget_plans();
    memset(&control, 0, sizeof control);
    sim.initialised = sim.chosen = false;
    sim.driver_version = 13000;
    memset(sim_thread(), 0, sizeof(thread_state));
    pthread_mutex_unlock(&sim.mutex);
    plan_from_environment(); /* as in a process that begins */
}

void ebbsim_census_take(ebbsim_census *census)
{
    size_t size = census->size;
    ebbsim_census c = {.size = size};
    pthread_mutex_lock(&sim.mutex);
    c.reservations = sim.reservations.count - sim.chunks;
    c.reserved_bytes = sim.reserved_bytes;
    c.handles = sim.handles;
    c.frames = sim.frames;
    c.frame_bytes = sim.frame_bytes;
    c.mappings = sim.mappings.count - sim.chunk_mappings;
    c.mapped_bytes = sim.mapped_bytes;
    c.allocations = sim.allocations.count;
    c.host_blocks = sim.host_blocks.count;
    c.streams = sim.streams_alive;
    c.events = sim.event_ids.count;
    c.graphs = sim.graph_ids.count;
    c.captures = sim_capture_count();
    for (int i = 0; i < SIM_MAX_CARDS; i++) {
        c.contexts += sim.contexts[i].retained;
    }
    for (uint32_t i = 0; i < sim.slots; i++) {
        c.pending_works += sim.streams[i]->waiting;
    }
    pthread_mutex_unlock(&sim.mutex);
    memcpy(census, &c, size < sizeof c ? size : sizeof c);
}

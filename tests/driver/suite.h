/*
 * The driver suite's harness: cases, expectations, gates, threads, and a kit of small helpers.
 *
 * The suite tests the CUDA driver itself, through the driver table. The same binary runs on a GPU
 * and on the simulated one (EBBTIDE_DRIVER names the library); both must give the same answer to
 * every call, which is what makes the simulated one worth trusting.
 *
 * Each case runs in a process of its own, so that a lost context, a crash or a hang stays there. An
 * expectation that is not met is reported and the case goes on: on a new driver one run shows all
 * differences. With --learn every observation is printed as `case|line|what|answer`, without
 * addresses or times, so that two drivers are compared with diff.
 */
#ifndef EBB_DRIVER_SUITE_H
#define EBB_DRIVER_SUITE_H

#include <semaphore.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "driver.h"

/* Short names for the codes: the cases name them a thousand times. */
enum {
    OK = CUDA_SUCCESS,
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE,
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY,
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED,
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE,
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT,
    UNSUPPORTED_LIMIT = CUDA_ERROR_UNSUPPORTED_LIMIT,
    PEER_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
    PEER_ENABLED = CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED,
    PEER_NOT_ENABLED = CUDA_ERROR_PEER_ACCESS_NOT_ENABLED,
    MAPPING_FAILED = CUDA_ERROR_MAP_FAILED,
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE,
    ILLEGAL_STATE = CUDA_ERROR_ILLEGAL_STATE,
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM,
    NOT_FOUND = CUDA_ERROR_NOT_FOUND,
    NOT_READY = CUDA_ERROR_NOT_READY,
    ILLEGAL_ADDRESS = CUDA_ERROR_ILLEGAL_ADDRESS,
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED,
    ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
    NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
    NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED,
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED,
    CAPTURE_UNSUPPORTED = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
    CAPTURE_INVALIDATED = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
    CAPTURE_MERGE = CUDA_ERROR_STREAM_CAPTURE_MERGE,
    CAPTURE_UNMATCHED = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
    CAPTURE_UNJOINED = CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
    CAPTURE_ISOLATION = CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
    CAPTURE_IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
    CAPTURED_EVENT = CUDA_ERROR_CAPTURED_EVENT,
    CAPTURE_WRONG_THREAD = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
    UNKNOWN_ERROR = CUDA_ERROR_UNKNOWN
};

#define KiB ((size_t)1 << 10)
#define MiB ((size_t)1 << 20)
#define GiB ((size_t)1 << 30)
#define FRAME (2 * MiB) /* the granularity of every card we know */

/* ---- cases ---------------------------------------------------------------------------------- */

typedef enum suite_start {
    WITH_CONTEXT,    /* the primary context of device 0 is retained and current (the default) */
    WITHOUT_CONTEXT, /* the driver is open, no context exists */
    WITHOUT_DRIVER,  /* nothing is loaded; for cases that fork, or look at the driver's start */
} suite_start;

typedef struct suite_case {
    const char *name;
    void (*run)(void);
    suite_start start;
    bool alone; /* it reads or exhausts the card's free memory: nothing may run beside it */
    bool simulated_only; /* undefined on a GPU, whose driver crashes: only reported there */
} suite_case;

#define CASE(function)                                                                             \
    {                                                                                              \
        .name = #function, .run = function                                                         \
    }
#define CASE_FROM(function, beginning)                                                             \
    {                                                                                              \
        .name = #function, .run = function, .start = beginning                                     \
    }
#define CASE_ALONE(function)                                                                       \
    {                                                                                              \
        .name = #function, .run = function, .alone = true                                          \
    }
#define CASE_SIMULATED(function, beginning)                                                        \
    {                                                                                              \
        .name = #function, .run = function, .start = beginning, .simulated_only = true             \
    }
#define CASE_END                                                                                   \
    {                                                                                              \
        .name = NULL                                                                               \
    }

/* One array per file, ended by CASE_END; suite.c lists them. */
extern const suite_case table_cases[], device_cases[], context_cases[], reserve_cases[],
    create_cases[], map_cases[], access_cases[], unmap_cases[], share_cases[], ipc_event_cases[],
    alloc_cases[], host_cases[], pointer_cases[], copy_cases[], stream_cases[], event_cases[],
    context_event_cases[], capture_cases[], capture_event_cases[], matrix_cases[], pool_cases[],
    pool_misuse_cases[], address_cases[], ipc_memory_cases[], peer_cases[], copy_now_cases[],
    rectangle_cases[], about_cases[], capture_info_cases[], graph_cases[], thread_cases[],
    strict_cases[], strict_more_cases[];

extern ebb__driver cu;        /* the driver under test */
extern CUcontext context;     /* device 0's primary context, in cases that start WITH_CONTEXT */
extern unsigned suite_failed; /* expectations not met so far in this process */

/* For cases that start WITHOUT_DRIVER, after they have forked: catch up. Skips without a device. */
void open_driver(void);
void open_context(void);

/*
 * Fill *table through the library's own cuGetProcAddress, without cuInit. The function itself is in
 * suite_get_proc_address afterwards. Skips the case where there is no library.
 */
void load_without_init(ebb__driver *table);
typedef CUresult (*get_proc_address)(const char *name, void **function, int version, uint64_t flags,
                                     CUdriverProcAddressQueryResult *status);
extern get_proc_address suite_get_proc_address;

/* ---- expectations --------------------------------------------------------------------------- */

#define HERE __FILE__, __LINE__

/* The call gives this code. Reports and goes on if not. Gives the code it got. */
#define EXPECT(code, call) suite_expect(HERE, #call, (code), (int)(call))

/* The call succeeds; the rest of the case makes no sense if not. */
#define REQUIRE(call) suite_require(HERE, #call, (int)(call))

/* The condition holds. */
#define CHECK(condition) suite_check(HERE, #condition, (condition) ? true : false)

/* The expression has this value; the same on every driver, since it is printed by --learn. */
#define EXPECT_INT(value, expression)                                                              \
    suite_expect_int(HERE, #expression, (long long)(value), (long long)(expression))

/* The call gives this code, and returns only after the gate was opened (by a thread, 100 ms on). */
#define EXPECT_WAITS(closed, code, call)                                                           \
    (gate_open_later((closed), 100),                                                               \
     suite_expect_gated(HERE, #call, (code), true, (closed), (int)(call)))

/* The call gives this code, and returns while the gate is closed. The gate stays closed. */
#define EXPECT_AT_ONCE(closed, code, call)                                                         \
    (gate_open_later((closed), 2000),                                                              \
     suite_expect_gated(HERE, #call, (code), false, (closed), (int)(call)))

/* Leave the case here, visibly not run. */
#define SKIP(reason) suite_skip(HERE, (reason))

typedef struct gate gate;
int suite_expect(const char *file, int line, const char *text, int expected, int got);
void suite_require(const char *file, int line, const char *text, int got);
bool suite_check(const char *file, int line, const char *text, bool got);
void suite_expect_int(const char *file, int line, const char *text, long long expected,
                      long long got);
void suite_expect_gated(const char *file, int line, const char *text, int expected, bool waits,
                        gate *closed, int got);
void suite_expect_text(const char *file, int line, const char *text, const char *expected,
                       const char *got);
_Noreturn void suite_skip(const char *file, int line, const char *reason);
const char *suite_code_name(int code);

/* ---- gates (gate.c) ------------------------------------------------------------------------- */

/* A gate holds a stream busy until it is opened: the stream waits for a word of pinned memory. */
struct gate {
    _Atomic uint32_t *word; /* 0: closed, 1: open. The GPU sees it at the same address */
    struct gate_timer *timer;
};

/* A closed gate that nothing waits for yet. Make all gates of a case before anything is busy. */
gate gate_make(void);
/* What is queued on `stream` from now on runs only once the gate is open. */
void gate_hold(gate *closed, CUstream stream);
void gate_open(gate *closed);
bool gate_is_open(const gate *closed);
/* Open it from another thread, after some milliseconds. gate_cancel: if that has not happened yet,
   it shall not. */
void gate_open_later(gate *closed, int milliseconds);
void gate_cancel(gate *closed);
/* For every way out of a process: no gate may stay closed, or the GPU would wait for ever. */
void gate_open_all(void);

/* The same by a host function that waits for a semaphore, for what holds a stream by a callback. */
typedef struct host_gate {
    sem_t entered, leave;
} host_gate;
void host_gate_hold(host_gate *held, CUstream stream);
void host_gate_open(host_gate *held);

/* ---- threads (gate.c) ----------------------------------------------------------------------- */

/* Run `function` in a new thread and wait until it is over. The thread has no current context, or
   the case's own. */
void in_thread(void (*function)(void *data), void *data);
void in_thread_with_context(void (*function)(void *data), void *data);
void pass_milliseconds(int milliseconds);

/* ---- kit (kit.c) ---------------------------------------------------------------------------- */

/* Properties of pinned memory on device 0, exportable or not; access of device 0. */
CUmemAllocationProp plain_properties(void);
CUmemAllocationProp exportable_properties(void);
CUmemAccessDesc access_of(int device, int flags);

/* Each REQUIREs its calls. */
CUdeviceptr reserve(size_t size);
CUmemGenericAllocationHandle create(size_t size);
CUmemGenericAllocationHandle create_exportable(size_t size);
void map(CUdeviceptr address, size_t size, CUmemGenericAllocationHandle handle);
void set_access(CUdeviceptr address, size_t size, int flags);
/* A new frame at this reserved address, readable and writable; its handle is kept or released. */
CUmemGenericAllocationHandle map_frame(CUdeviceptr address, size_t size);
void map_released_frame(CUdeviceptr address, size_t size);
void unmap_all_and_free(CUdeviceptr address, size_t size, size_t mapped);
CUstream make_stream(void); /* non-blocking */
CUstream make_blocking_stream(void);
CUevent make_event(void); /* without timing */
void *make_pinned(size_t size);
void *make_pages(size_t size); /* pageable, page-aligned, zeroed; kept until the process ends */
CUdeviceptr make_memory(size_t size);
size_t free_memory(void);

/* Set or compare `size` bytes of device memory, finished on return. For up to 64 MiB. */
void fill(CUdeviceptr address, unsigned char value, size_t size);
bool holds(CUdeviceptr address, unsigned char value, size_t size);
/* Host memory that holds this value throughout. */
bool all_bytes(const void *memory, unsigned char value, size_t size);

/* Fork a child that runs `function` and exits with its failures; wait for it. Both ends of a
   conversation take turns, so that what they print comes in one order. */
typedef struct partner {
    int pid;
    int socket;
} partner;
partner partner_start(void (*function)(int socket));
void partner_end(partner *other); /* CHECKs that it ended well */
void send_bytes(int socket, const void *bytes, size_t size);
void receive_bytes(int socket, void *bytes, size_t size);
void send_turn(int socket);
void receive_turn(int socket);
void send_descriptor(int socket, int descriptor);
int receive_descriptor(int socket);

#endif

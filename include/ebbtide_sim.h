/*
 * The simulated GPU: what only a simulated GPU has.
 *
 * libebbtide_sim.so answers cuGetProcAddress as libcuda.so.1 does, so everything a program does
 * with a GPU it does through the driver's own functions. This header is the rest: which cards there
 * are, what the time is, which call fails, what a "kernel" touches, and what was done wrong.
 *
 * Words:
 *   card     one simulated GPU. The cards of a run are shared by its processes (EBBTIDE_SIM_RUN).
 *   work     something queued on a stream: a copy, a memset, a kernel. It ends, by the model, at
 *            max(now, end of the stream's last work, end of its engine's last work) + duration.
 *   late     work has its effect on memory as late as the rules allow: when something that is
 *            ordered after it needs it, or the host has seen that it is over. Until then what it
 *            writes holds a pattern (EBBSIM_PATTERN).
 *   ordered  one work is ordered after another through a stream, an event, or the host having
 *            waited. Modelled time orders nothing: a hazard that would have gone well this time is
 *            reported all the same.
 *   hazard   two sides, at least one of them writing (or unmapping, or freeing), on the same
 *            memory, in no order.
 *
 * Environment (read when the first function is called):
 *   EBBTIDE_SIM          the cards, when no program adds them: "8GiB", or a list of
 *                        memory=8GiB devices=2 clock=virtual peer=0 context=64MiB, by commas
 *   EBBTIDE_SIM_RUN      a file that holds the cards' state, shared by the processes that name it.
 *                        Made if it does not exist. Unset: the cards belong to this process alone.
 *   EBBTIDE_SIM_HAZARD   what happens at a hazard: print (on stderr; the default), quiet, abort
 *   EBBTIDE_SIM_FAIL     "cuMemMap:3:2" fails the third cuMemMap with code 2; several, by commas
 *
 * All functions may be called from any thread.
 */
#ifndef EBBTIDE_SIM_H
#define EBBTIDE_SIM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EBBSIM_API __attribute__((visibility("default")))

/* What a queued write's destination holds until the write has happened, byte for byte. */
#define EBBSIM_PATTERN 0xEB

/* ---- cards ---------------------------------------------------------------------------------- */

typedef struct ebbsim_card {
    size_t size;             /* sizeof(ebbsim_card) */
    char name[64];           /* as cuDeviceGetName gives it */
    uint64_t memory;         /* bytes in all */
    uint64_t context;        /* bytes each process's context takes */
    double h2d_rate;         /* pinned host to device, bytes a second */
    double d2h_rate;         /* device to pinned host */
    double duplex_rate;      /* each way, while both ways are busy */
    double pageable_rate;    /* either way, host memory that is not pinned */
    double memory_rate;      /* device memory, bytes read plus bytes written a second */
    double flops;            /* floating-point operations a second */
    uint64_t copy_latency;   /* nanoseconds a copy takes before its first byte */
    uint64_t kernel_latency; /* nanoseconds a kernel takes before its first byte */
    int compute_major, compute_minor;
    int multiprocessors;
    int peer;       /* other simulated cards can have access to its memory */
    int vmm;        /* 0: a vGPU without virtual memory management */
    int exportable; /* memory can be exported as file descriptors */
} ebbsim_card;

/* The figures of an H200, with `memory` bytes. */
EBBSIM_API void ebbsim_card_default(ebbsim_card *card, uint64_t memory);

/*
 * Add a card; *ordinal (may be NULL) is its number for cuDeviceGet. Before or after cuInit. A
 * process that adds no card gets those of EBBTIDE_SIM at cuInit, and without it one of 8 GiB.
 * 0, or CUDA_ERROR_INVALID_VALUE for figures that make no sense or a seventeenth card.
 */
EBBSIM_API int ebbsim_card_add(const ebbsim_card *card, int *ordinal);

/* How many cards there are (those of EBBTIDE_SIM, if none was added), and the figures of one, without
   starting the driver. 0, or CUDA_ERROR_INVALID_DEVICE. */
EBBSIM_API int ebbsim_card_count(void);
EBBSIM_API int ebbsim_card_get(int ordinal, ebbsim_card *card);

/* Let `bytes` of a card be in use by somebody else, as another process's would. At once. */
EBBSIM_API int ebbsim_foreign_use(int ordinal, uint64_t bytes);

/* Give the driver another version (12000 to 13000...), or take a function away: before it is asked
   for by cuGetProcAddress. What is hidden is not found, as on an older driver. */
EBBSIM_API void ebbsim_driver_version(int version);
EBBSIM_API void ebbsim_driver_hide(const char *function);

/*
 * Forget everything: cards, memory, streams, events, hazards, failures, clock, hidden functions.
 * What was mapped is unmapped. As in a new process; for tests. No other thread may be in a call.
 */
EBBSIM_API void ebbsim_reset(void);

/* ---- time ----------------------------------------------------------------------------------- */

/* virtual: a wait moves the clock instead of sleeping, and every driver call adds what it costs on
   an H200. Timings are then the same in every run. real (the default): the clock on the wall. */
EBBSIM_API void ebbsim_clock_virtual(int on);

/* Nanoseconds since the run began. */
EBBSIM_API uint64_t ebbsim_now(void);

/* Let time pass: moves a virtual clock, sleeps with a real one. */
EBBSIM_API void ebbsim_pass(uint64_t nanoseconds);

/* Let each call of `function` in this process take so many nanoseconds more on a virtual clock: the
   time that a program's own code needs for it, Python's for a launch, which the clock cannot know. 0,
   the default, takes it back. Returns 0, or CUDA_ERROR_NOT_FOUND: no such function. */
EBBSIM_API int ebbsim_host_time(const char *function, uint64_t nanoseconds);

/* ---- work ----------------------------------------------------------------------------------- */

enum { EBBSIM_READ = 1, EBBSIM_WRITE = 2 };

typedef struct ebbsim_range {
    uint64_t address; /* device memory, or pinned host memory */
    uint64_t bytes;
    int access; /* EBBSIM_READ, EBBSIM_WRITE or both */
} ebbsim_range;

/* A kernel: what it touches, how long it takes, what it does. */
typedef struct ebbsim_work {
    size_t size;                /* sizeof(ebbsim_work) */
    const char *name;           /* for reports; copied (63 characters) */
    const ebbsim_range *ranges; /* what it touches */
    size_t range_count;
    uint64_t nanoseconds; /* how long it takes; 0: latency + max(bytes / memory_rate, flops/rate) */
    double flops;
    void (*function)(void *data); /* its effect, late; NULL: none. It must not call the driver */
    void *data;
    /* The caller does the work itself right after the call returns: everything ordered before it
       has then had its effect. This is how PyTorch's operators run. On a capturing stream the work
       becomes a node, and `function` is what does it when the graph is launched: then, on the
       launching thread, without the simulator's lock. Else `function` is not used. */
    int now;
    /* Called once `data` is not needed any more (a captured work will not run again, or the work was
       not captured), with the lock held: it must not wait, nor call the driver. May be NULL. */
    void (*release)(void *data);
} ebbsim_work;

/*
 * Queue a kernel on `stream` of the calling thread's current context. Memory it touches must be
 * mapped with access for the stream's device, else a hazard is reported and the context is lost
 * (CUDA_ERROR_ILLEGAL_ADDRESS from then on), as on a GPU. Returns a CUresult.
 */
EBBSIM_API int ebbsim_launch(const ebbsim_work *work, void *stream);

/*
 * Let everything that whatever is queued next on `stream` would be ordered after have its effect, so
 * that the calling thread may read and write that memory itself, and say afterwards what it touched
 * (ebbsim_launch with `now`). May wait for host functions. Returns a CUresult; if the stream is
 * capturing, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, and the capture goes on.
 */
EBBSIM_API int ebbsim_catch_up(void *stream);

/* ---- failures ------------------------------------------------------------------------------- */

/* Make the nth call from now (1: the next) of `function`, or of any function if NULL, return `code`
   and do nothing else. Several may wait at once. 0, or CUDA_ERROR_NOT_FOUND: no such function. */
EBBSIM_API int ebbsim_fail(const char *function, unsigned long nth, int code);

/* How many planned failures have happened; forget those that have not. */
EBBSIM_API unsigned long ebbsim_failures(void);
EBBSIM_API void ebbsim_fail_clear(void);

/* How often `function` (NULL: any) has been called since the start or the last reset. */
EBBSIM_API unsigned long ebbsim_calls(const char *function);

/* ---- hazards -------------------------------------------------------------------------------- */

typedef enum ebbsim_kind {
    EBBSIM_HAZARD_RACE,     /* two works on the same memory, unordered, one of them writing */
    EBBSIM_HAZARD_UNMAP,    /* memory was unmapped, or lost access, under unfinished work */
    EBBSIM_HAZARD_SOURCE,   /* the host changed a copy's source before it could know it over */
    EBBSIM_HAZARD_ACCESS,   /* work touches memory its device has no access to */
    EBBSIM_HAZARD_UNMAPPED, /* work touches memory that is not mapped */
    EBBSIM_HAZARD_PRIVATE, /* a privately mapped file is pinned to be read: that may never return */
} ebbsim_kind;

/* One side of a hazard: who touched what, when. */
typedef struct ebbsim_side {
    char call[64];    /* cuMemcpyHtoDAsync, cuMemUnmap, a kernel's name, "the host" */
    int device;       /* ordinal; -1: the host */
    int stream;       /* small number of the stream, as in the text; 0: default stream; -1: none */
    int writes;       /* it writes (or unmaps); else it reads */
    uint64_t address; /* what it touches, as it named it */
    uint64_t bytes;
    uint64_t when; /* nanoseconds since the run began, when it was queued or called */
    long thread;   /* thread that queued it */
} ebbsim_side;

typedef struct ebbsim_hazard {
    ebbsim_kind kind;
    ebbsim_side first;  /* the earlier one */
    ebbsim_side second; /* the one that was caught */
    char text[1024];    /* both sides in words, and what would have ordered them */
} ebbsim_hazard;

/* How many hazards so far; the index-th of them (the first 1,024 are kept). */
EBBSIM_API unsigned long ebbsim_hazards(void);
EBBSIM_API int ebbsim_hazard_get(unsigned long index, ebbsim_hazard *hazard);
EBBSIM_API void ebbsim_hazard_clear(void);

typedef enum ebbsim_hazard_mode { EBBSIM_PRINT, EBBSIM_QUIET, EBBSIM_ABORT } ebbsim_hazard_mode;
EBBSIM_API void ebbsim_on_hazard(ebbsim_hazard_mode mode);

/* ---- census --------------------------------------------------------------------------------- */

/* What this process holds of the simulated driver: all zero when nothing leaked. */
typedef struct ebbsim_census {
    size_t size;           /* sizeof(ebbsim_census) */
    uint64_t reservations; /* address ranges reserved */
    uint64_t reserved_bytes;
    uint64_t handles; /* physical allocations with a handle not yet released */
    uint64_t frames;  /* physical allocations alive (a handle or a mapping holds them) */
    uint64_t frame_bytes;
    uint64_t mappings;
    uint64_t mapped_bytes;
    uint64_t allocations;   /* cuMemAlloc */
    uint64_t host_blocks;   /* cuMemHostAlloc and cuMemHostRegister */
    uint64_t streams;       /* created and not destroyed */
    uint64_t events;        /* created and not destroyed */
    uint64_t contexts;      /* primary contexts retained */
    uint64_t graphs;        /* graphs and executable graphs */
    uint64_t captures;      /* captures open */
    uint64_t pending_works; /* works that have not had their effect yet */
} ebbsim_census;

EBBSIM_API void ebbsim_census_take(ebbsim_census *census);

/* Check the simulator's own books against each other. NULL, or what is wrong in words. */
EBBSIM_API const char *ebbsim_check(void);

#ifdef __cplusplus
}
#endif
#endif

/*
 * One call of nearly every function of the table, to be made in many situations: in a thread
 * without a context, during captures, before the driver's start, in a forked child.
 */
#ifndef EBB_DRIVER_OPS_H
#define EBB_DRIVER_OPS_H

#include "suite.h"

/* What the calls are made with. Made by things_make() with a context, or all zero. */
struct things {
    CUstream stream;    /* idle, non-blocking, never capturing */
    CUstream capturing; /* the one that captures, where something captures */
    CUevent event;      /* recorded on `stream`, over */
    CUevent timed;      /* the same, with timing */
    CUevent fresh;      /* never recorded */
    CUevent captured;   /* recorded on `capturing` */
    CUevent shared;     /* between processes */
    CUdeviceptr memory; /* of cuMemAlloc, 1 MiB */
    CUdeviceptr range;  /* 8 frames of addresses; the first is mapped and accessible */
    CUmemGenericAllocationHandle frame; /* exportable; mapped at `range` */
    int descriptor;                     /* of `frame` */
    char *pinned, *pages;               /* 1 MiB each */
    char *registered;
    CUgraph graph; /* a memset of `memory` */
    CUgraphExec exec;
    /* For the calls that take something away; zero once taken. */
    CUstream spare_stream;
    CUevent spare_event;
    CUdeviceptr spare_memory, spare_range;
    CUmemGenericAllocationHandle spare_frame;
    char *spare_pinned;
};

void things_make(struct things *t);
void things_drop(struct things *t);

/* An answer during a capture: the code, and DEAD if the capture is invalid afterwards. */
#define DEAD(code) ((code) + 10000)

typedef enum situation {
    NO_CONTEXT,   /* in a thread without a current context, nothing captures */
    OWN_THREAD,   /* in the thread that captures */
    OTHER_THREAD, /* in another thread while a global capture is open */
    OWN_RELAXED,  /* as OWN_THREAD and OTHER_THREAD, the thread in relaxed mode */
    OTHER_RELAXED,
    SITUATIONS
} situation;

struct op {
    const char *text;
    CUresult (*call)(struct things *t);
    int expected[SITUATIONS];
    int before_init; /* the answer before cuInit, with nothing but zeroes to call with */
};

extern const struct op ops[];
extern const size_t op_count;

/* False for a call of a function this driver does not have. */
bool op_is_there(const struct op *op);

/*
 * Does a GPU's driver survive this call in a child forked after its start? False for a memset, and
 * for what stands behind it in the table: the child crashed there, so nobody knows.
 */
bool op_returns_after_fork(const struct op *op);

/* One expectation of a call. */
void op_expect(const struct op *op, int expected, CUresult got);

/* Fork, and make the calls that return (or those that may not) in the child: none may work. */
void ops_after_fork(bool returning);

#endif

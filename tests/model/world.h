/*
 * A naive model of what a program may expect of a GPU, and the means to play against it.
 *
 * The model is sequential: a write has happened when it was queued. A program without hazards cannot
 * tell the difference, and the programs played here have none by construction: before something is
 * queued, whatever it must come after is made to come before it, in one of the legal ways. So the
 * model knows every byte, every code and every free byte of memory, and the simulator must agree.
 *
 *   lane      a stream, or a destroyed one whose work is not known to be over
 *   fence     an event
 *   object    bytes with a past: a frame, a cuMemAlloc allocation, a block of host memory
 *   place     an object (not of the host) at an address: a mapping, or an allocation
 *   space     a reservation
 *   block     host memory that is pinned
 *
 * Of large objects only the first and the last WINDOW bytes are used and known.
 */
#ifndef EBB_WORLD_H
#define EBB_WORLD_H

#include "sim_kit.h"

enum {
    DEVICES = 2,
    LANES = 24,
    FENCES = 10,
    SPACES = 10,
    FRAMES = 40,
    HANDLES = 48,
    PLACES = 60,
    CHUNKS = 20,
    FILES = 4,
    BLOCKS = 8,
    PASTS = 48,
    WINDOW = 8 << 10
};

typedef struct past { /* an access that the host may not know to be over */
    unsigned lane;
    uint64_t number;
    uint64_t start, end; /* in the object */
    CUdeviceptr address; /* by which it went */
    bool writes;
} past;

typedef struct object {
    uint64_t size;
    unsigned char *shadow; /* its bytes: all, or the first and the last WINDOW */
    bool known;            /* they are, since it was filled once */
    unsigned past_count;
    past pasts[PASTS];
} object;

typedef struct lane {
    CUstream handle;
    bool used, alive, blocking, is_default;
    bool lasts; /* not the program's to destroy */
    int device;
    uint64_t queued;       /* entries so far, under this number of lane */
    uint64_t knows[LANES]; /* how far each lane is ordered before what this one does next */
} lane;

typedef struct fence {
    CUevent handle;
    bool used, recorded;
    int device;
    uint64_t covers[LANES];
} fence;

/* Memory: it lives while a handle or a file descriptor stands for it. */
typedef struct frame {
    bool used;
    int device;
    uint64_t charged;
    unsigned handles, files;
    object bytes;
} frame;

/* It is good while the program holds it, or something is mapped by it. */
typedef struct handle {
    CUmemGenericAllocationHandle value;
    frame *frame; /* NULL: unused */
    unsigned count, places;
    bool exportable;
} handle;

typedef struct file {
    int descriptor;
    frame *frame; /* NULL: unused */
} file;

typedef struct space {
    CUdeviceptr address;
    uint64_t size; /* 0: unused */
} space;

/* What allocations are cut from: small ones share one. */
typedef struct chunk {
    CUdeviceptr address;
    uint64_t size, taken; /* size 0: unused */
    int device;
    bool shared;
    unsigned live;
} chunk;

typedef struct place {
    CUdeviceptr address;
    uint64_t size; /* 0: unused */
    frame *frame;
    handle *handle; /* a mapping's */
    chunk *chunk;   /* an allocation's */
    int access[DEVICES];
} place;

typedef struct block {
    unsigned char *address;
    bool registered;
    int device;   /* whose context made it */
    object bytes; /* size 0: unused */
} block;

/* Up to two neighbouring pieces of memory, one behind the other. */
typedef struct span {
    CUdeviceptr address;
    uint64_t length;
    unsigned count;
    struct {
        object *bytes;
        uint64_t offset, length;
    } parts[2];
} span;

typedef struct world {
    kit k;
    dice d;
    uint64_t seed;
    unsigned long step;
    const char *doing;
    int failures;
    lane lanes[LANES];
    uint64_t host[LANES]; /* what the host knows to be over */
    fence fences[FENCES];
    frame frames[FRAMES];
    handle handles[HANDLES];
    file files[FILES];
    chunk chunks[CHUNKS];
    space spaces[SPACES];
    place places[PLACES];
    block blocks[BLOCKS];
    uint64_t memory, used[DEVICES], foreign[DEVICES];
    CUmemGenericAllocationHandle stale_handle;
    CUstream stale_stream;
    CUevent stale_event;
    unsigned long late; /* functions of kernels that have not run */
} world;

#define WORLD_FAIL(w, ...)                                                                         \
    do {                                                                                           \
        fprintf(stderr, "%s:%d: seed %llu, step %lu, %s: ", __FILE__, __LINE__,                    \
                (unsigned long long)(w)->seed, (w)->step, (w)->doing);                             \
        fprintf(stderr, __VA_ARGS__);                                                              \
        fputc('\n', stderr);                                                                       \
        (w)->failures++;                                                                           \
    } while (0)

/* A call, and the code it must give. */
#define EXPECT(w, call, code)                                                                      \
    do {                                                                                           \
        int expected_ = (int)(code), got_ = (int)(call);                                           \
        if (got_ != expected_)                                                                     \
            WORLD_FAIL(w, "%s gave %d, not %d", #call, got_, expected_);                           \
    } while (0)

/* ---- world_order.c ---------------------------------------------------------------------------- */

void world_current(world *w, int device);   /* make its context current */
lane *world_any_lane(world *w, int device); /* alive; device -1: of any */
uint64_t world_queued(world *w, lane *l);   /* something was queued: its number */
void world_host_learns(world *w, const uint64_t *covers);
void world_order(world *w, lane *l, const span *s, bool writes); /* before what l does next */
/* The host waits for accesses through addresses from `from` to `to`, but not for those on streams of
   device `but` (-1: for all). */
void world_observe(world *w, object *o, CUdeviceptr from, CUdeviceptr to, int but);
void world_note(world *w, const lane *l, uint64_t number, const span *s, bool writes);
bool world_idle(world *w, object *o, bool writes_only); /* the host knows that nobody uses it */
void world_learn_context(world *w, int device); /* a call has waited for everything on a device */
void world_synchronize(world *w);               /* all devices */

/* ---- world_memory.c --------------------------------------------------------------------------- */

void object_start(object *o, uint64_t size);
void object_end(object *o);
span object_span(object *o, CUdeviceptr address, uint64_t offset, uint64_t length);
void object_windows(object *o, CUdeviceptr address, span windows[2]); /* what is known of it */
/* Memory of this device that it may access in this way (CU_MEM_ACCESS_FLAGS_*), `length` bytes or, if
   0, any number. `kernel`: by a kernel, which does not reach other devices' allocations. */
bool world_device_span(world *w, int device, int access, bool kernel, uint64_t length, span *s);
bool world_host_span(world *w, uint64_t length, span *s);
void span_read(const span *s, unsigned char *bytes);
void span_write(const span *s, const unsigned char *bytes);
bool spans_meet(const span *a, const span *b);
void world_check_memory(world *w); /* what is free */
void world_check_bytes(world *w, const place *p);

place *world_place_at(world *w, CUdeviceptr address);
place *world_free_place(world *w);
bool world_usable(const place *p, int device, int access, bool kernel);
void world_fill(world *w, place *p, int device); /* before its first use */

/* ---- world_frames.c ---------------------------------------------------------------------------- */

handle *world_any_handle(world *w);
void world_handle_settle(world *w, handle *h); /* gone, if nothing holds it */

/* ---- the operations ---------------------------------------------------------------------------- */

typedef void operation(world *w);
operation op_reserve, op_unreserve, op_map, op_unmap, op_access, op_peek;               /* memory */
operation op_create, op_release, op_retain, op_export, op_import, op_close, op_foreign; /* frames */
operation op_alloc, op_free;
operation op_host_alloc, op_host_register, op_host_free, op_host_fill;            /* host */
operation op_stream_create, op_stream_destroy, op_event_create, op_event_destroy; /* order */
operation op_record, op_wait, op_query, op_synchronize, op_pass;
operation op_upload, op_download, op_upload_pageable, op_download_pageable, op_copy, op_peer,
    op_set, op_kernel; /* work */
operation op_illegal;

#endif

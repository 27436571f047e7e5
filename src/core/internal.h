/*
 * What crosses files inside the core: types, page states, numbered invariants, the lock's rules, and
 * the functions, grouped by the file that defines them. The driver table has a header of its own
 * (driver.h), and so has the platform (os.h).
 *
 * The way of a fault, downwards only:
 *
 *   vbar.c    is every page of the range resident? yes: pin, return
 *   room.c    how many frames are missing, and who gives them up (policy.c picks, pure)
 *   frames.c  map here, unmap there; the only file that counts VRAM
 *   driver.h  the table of driver functions
 *
 * Beside it: pages.c (a page's states, and giving one up), fence.c (what the GPU still does with a
 * page), vbars.c (a VBAR's life), device.c (a device's), stats.c, check.c.
 *
 * One lock
 *   Each device has one mutex, taken by ebb__enter() in the public entry points and in nothing below
 *   them. A function that needs it held is named _locked; one that lets go of it for a while says so
 *   at its declaration. Nothing waits for the GPU with it held. No two devices' locks are ever held
 *   at once. What may be read or changed without it is _Atomic: a page's word, ticket and generation,
 *   a VBAR's hot part, a stream's epoch.
 *
 * Handles
 *   Structures behind handles are never freed, only used again under another id, and so are page
 *   tables (ebb__os_table_clear makes a dead one read as all absent). A thread that comes late with
 *   an old handle therefore reads something harmless, and finds out by the id.
 *
 * Invariants, checked by check.c; they hold whenever the lock is free:
 *    1  bytes held = sum of the frames of every owner; every frame has exactly one owner
 *    2  a page has a frame if and only if it is RESIDENT, LEAVING or POISONED
 *    3  a page's bit in `resident` is set if and only if it has a frame
 *    4  a page's bit in `evictable` is set if and only if it is RESIDENT, not NOTED and not HELD
 *    5  a VBAR is in the order of victims if and only if it has an evictable page
 *    6  a pinned page is RESIDENT
 *    7  a resident page's generation is from 1 to the device's
 *    8  a page has at most one ticket of each stream, none ahead of that stream's epoch
 *    9  a stream's marks have rising epochs, all above what has passed and below its epoch
 *   10  the order of victims is sorted by rank, and its links agree
 *   11  watermark <= its limit <= pages
 *   12  frames that belong to VBARs = pages that have one
 *   13  between calls, no frame is in a request's hand
 */
#ifndef EBB_INTERNAL_H
#define EBB_INTERNAL_H

#include <stdatomic.h>

#include "driver.h"
#include "ebbtide.h"
#include "os.h"

typedef struct ebb__device ebb__device;
typedef struct ebb__vbar ebb__vbar;

/*
 * Clang checks at compile time who holds the lock (-Wthread-safety). No thread ever holds two, so
 * one name stands for every device's: that a device's lock is held, not which.
 */
#if defined(__clang__)
typedef struct __attribute__((capability("mutex"))) ebb__lock {
    char name;
} ebb__lock;
extern ebb__lock ebb__the_lock;
#define EBB__LOCKED __attribute__((requires_capability(ebb__the_lock)))
#define EBB__LOCKS __attribute__((acquire_capability(ebb__the_lock)))
#define EBB__TRIES __attribute__((try_acquire_capability(true, ebb__the_lock)))
#define EBB__UNLOCKS __attribute__((release_capability(ebb__the_lock)))
#define EBB__UNCHECKED __attribute__((no_thread_safety_analysis))
#else
#define EBB__LOCKED
#define EBB__LOCKS
#define EBB__TRIES
#define EBB__UNLOCKS
#define EBB__UNCHECKED
#endif

/* ---- frames --------------------------------------------------------------------------------- */

typedef enum ebb__kind { EBB__LARGE, EBB__SMALL, EBB__KINDS } ebb__kind;

typedef enum ebb__owner {
    EBB__OF_NOBODY,  /* free, kept for re-use */
    EBB__OF_REQUEST, /* in the hand of a request being served */
    EBB__OF_VBAR,    /* behind a page */
    EBB__OF_SEGMENT, /* behind memory given to PyTorch */
    EBB__OF_POISON,  /* the driver would not unmap or release it */
    EBB__OWNERS
} ebb__owner;

typedef struct ebb__frame {
    CUmemGenericAllocationHandle handle;
    struct ebb__frame *next; /* in the list of its owner; a VBAR's frames are in no list */
    ebb__kind kind;
    ebb__owner owner;
} ebb__frame;

enum {
    EBB__LARGE_SHIFT = 25, /* 32 MiB: the driver's cost is per frame, hardly per byte */
    EBB__ALIGNMENT = 512,  /* of what ebb_vbar_alloc() gives */
};

/* ---- fences --------------------------------------------------------------------------------- */

/*
 * A ticket names work that must be over: everything on a stream up to an epoch of it.
 *
 *   63    48 47   46                0
 *   [ slot ][more][     epoch       ]     slot 0: no ticket
 *
 * `more`, in a page's own ticket: there are others, of other streams, in page->more.
 */
#define EBB__TICKET_MORE (UINT64_C(1) << 47)
#define EBB__TICKET_EPOCH (EBB__TICKET_MORE - 1)
#define EBB__TICKET_SLOT(ticket) ((unsigned)((ticket) >> 48))

typedef struct ebb__more {
    struct ebb__more *next;
    uint64_t ticket;
} ebb__more;

/* An event recorded on a stream: when it is over, so is every ticket up to `epoch`. */
typedef struct ebb__mark {
    CUevent event;
    uint64_t epoch;
    unsigned waiters; /* threads waiting for it without the lock: it must not be recorded again */
} ebb__mark;

enum {
    EBB__STREAMS = 2048,     /* streams a device can tell apart */
    EBB__STREAM_HASH = 4096, /* places to look for one */
    EBB__LEGACY_SLOT = 1,    /* the legacy default stream's slot */
    EBB__CONTEXT_SLOT = 2,   /* stands for every stream of the context at once */
    EBB__MARKS = 8,          /* marks a lasting stream keeps; more would only be finer */
    EBB__UNPINS_A_MARK =
        128, /* a mark now and then, so that old tickets pass while new work queues */
};

typedef struct ebb__stream {
    _Atomic(ebb_stream) handle;
    _Atomic bool lasting;        /* promised to outlive the device: marks can wait until needed */
    _Atomic bool never_captures; /* promised, or the legacy stream: an unpin need not ask. Changed
                                    before `lasting` and read after it, so that who finds a stream
                                    lasting does not take an earlier one's promise for its own */
    _Atomic uint64_t epoch;      /* what is noted on pages now */
    _Atomic unsigned unpins;     /* roughly, since the last mark */
    /* the rest under the lock */
    bool used;
    bool kept;        /* was ever promised to last: the slot is never another handle's */
    uint64_t passed;  /* tickets up to here are over */
    ebb__mark *marks; /* oldest first */
    unsigned mark_count, mark_room;
    unsigned drains; /* threads waiting for the stream itself, for want of a mark */
} ebb__stream;
_Static_assert(sizeof(void *) != 8 || sizeof(ebb__stream) == 64,
               "as large as a cache line, and found by a shift");

/* ---- pages ---------------------------------------------------------------------------------- */

/*
 * A page's life:
 *
 *   ABSENT --load--> RESIDENT --leave--> LEAVING --drop--> ABSENT
 *                       ^                   |  \--failed--> POISONED --(unmapped at last)--> ABSENT
 *                       \-------back--------/
 *
 * LEAVING: chosen as a victim, the lock may be dropped while its fence is waited for or its contents
 * are saved. A fault takes it back, contents intact; not while it is being SAVED, that it waits for.
 */
typedef enum ebb__state { EBB__ABSENT, EBB__RESIDENT, EBB__LEAVING, EBB__POISONED } ebb__state;

/*
 * The word of a page, changed by compare-and-swap:
 *
 *   63          24 23    6   5      4     3    2   0
 *   [ hits since  ][ pins ][SAVING][HELD][NOTED][state]
 *
 * NOTED: found pinned when a victim was sought and taken out of `evictable`, so that nobody looks at
 * it again; the unpin that drops the last pin puts it back, under the lock.
 * HELD: a captured graph uses it. Hits are counted here because the swap is made anyway.
 */
#define EBB__STATE(word) ((ebb__state)((word)&7))
#define EBB__NOTED (UINT64_C(1) << 3)
#define EBB__HELD (UINT64_C(1) << 4)
#define EBB__SAVING (UINT64_C(1) << 5)
#define EBB__PIN (UINT64_C(1) << 6)
#define EBB__PINS (UINT64_C(0x3ffff) << 6)
#define EBB__HIT (UINT64_C(1) << 24)
#define EBB__HITS(word) ((word) >> 24)

typedef struct ebb__page {
    _Atomic uint64_t word;
    _Atomic uint64_t ticket; /* of the stream that used it last */
    _Atomic uint64_t generation;
    ebb__frame *frame;
    ebb__more *more;    /* tickets of other streams */
    uint64_t departure; /* LEAVING: which leave this is. ABSENT: which fault counted it last */
} ebb__page;

/* A set of numbers below `count`, that finds its largest member in a few steps. */
typedef struct ebb__bits {
    uint64_t *level[4]; /* level[k + 1] has a bit for each word of level[k] */
    uint64_t count, members;
} ebb__bits;

#define EBB__NONE UINT64_MAX

/* Memory for a page table and its bits; used again, never freed. */
typedef struct ebb__table {
    struct ebb__table *next;
    void *memory;
    uint64_t pages; /* as many as there is room for, a power of two; the sets lie behind them */
    size_t bytes;
} ebb__table;

/* A thread inside a page-out function; in a list as long as it is. */
typedef struct ebb__saver {
    struct ebb__saver *next;
    uint64_t thread;
} ebb__saver;

struct ebb__vbar {
    /* hot, read without the lock */
    _Atomic uint64_t id; /* the handle's; 0: not in use */
    _Atomic(ebb__page *) pages;
    _Atomic uint64_t bytes;
    _Atomic uint64_t large_bytes; /* of them, in large pages; the rest is small ones */
    ebb__device *device;          /* never changes */
    /* under the lock */
    uint32_t index, generation;
    uint32_t next_free;
    ebb__table *table;
    CUdeviceptr base;
    uint64_t page_count, large_count;
    uint64_t taken;                      /* by ebb_vbar_alloc() */
    uint64_t watermark, watermark_limit; /* in pages */
    int64_t rank;
    ebb__vbar *left, *right, *up; /* in the order of victims */
    uint64_t chance;              /* keeps that order balanced */
    ebb__bits resident, evictable;
    unsigned busy; /* threads in a call that has dropped the lock */
    ebb_page_out page_out;
    void *user;
    bool rise;
    unsigned setbacks; /* rises that were followed by an eviction */
    bool risen;
    uint64_t quiet_since; /* device->faults at the last eviction */
    /* counters; hits of resident pages are in their words */
    uint64_t hits, misses, offloaded, loads, evictions[EBB_REASONS];
};

/* ---- requests for room ------------------------------------------------------------------------ */

/* Who asks, for how much, and what may be done for it. */
typedef struct ebb__request {
    uint64_t need[EBB__KINDS];    /* frames still missing */
    ebb__frame *hand[EBB__KINDS]; /* frames got so far */
    int64_t rank;                 /* victims must be less important than this... */
    uint64_t above;               /* ...or, in the VBAR of the same rank, pages from here up */
    ebb_reason reason;
    bool may_wait;    /* for victims' fences */
    bool may_call;    /* page-out functions */
    uint64_t lacking; /* out: bytes that nobody could give; 0: that was not why */
} ebb__request;

/* A rank above every VBAR's: for those that outrank all weights. */
#define EBB__RANK_ALL INT64_MAX

/* What a holder of frames could give up next. One for each owner is shown to policy.c. */
typedef struct ebb__candidate {
    unsigned owner; /* index in the device's table of owners */
    unsigned cost;  /* 0: nothing to do for it ... 9: last resort */
    uint64_t bytes; /* what it would free */
    void *object;
    uint64_t place;
    uint64_t departure;
} ebb__candidate;

/*
 * A holder of frames, as room.c knows it; each owner's file registers one when the device opens.
 *
 *   best     the candidate it would give up next for this request; false: none
 *   begin    take it out of use: false if somebody has just begun to use it
 *   settle   wait until it can go. Drops the lock. false: it was taken back, or cannot go
 *   settled  whether settle would not wait
 *   finish   make its frames free ones. false: the driver failed
 *   undo     back into use
 *
 * All are called with the lock held.
 */
typedef struct ebb__holder {
    bool (*best)(ebb__device *, const ebb__request *, ebb__candidate *);
    bool (*begin)(ebb__device *, ebb__candidate *);
    bool (*settled)(ebb__device *, const ebb__candidate *);
    bool (*settle)(ebb__device *, const ebb__candidate *);
    bool (*finish)(ebb__device *, const ebb__candidate *, ebb_reason);
    void (*undo)(ebb__device *, const ebb__candidate *);
} ebb__holder;

enum { EBB__VBAR_HOLDER, EBB__SEGMENT_HOLDER, EBB__HOLDERS };

/*
 * Somebody who keeps pages pinned, and can do with fewer if PyTorch would have to do without: a mover,
 * with its ring. `give` unpins pages of as many bytes, or of as many as it can, and says how many;
 * asked for 0 it gives nothing, and says how many it could. It is called without the lock, takes it,
 * asks for no room, and waits for nothing.
 */
typedef struct ebb__giver {
    struct ebb__giver *next;
    uint64_t (*give)(struct ebb__giver *, uint64_t bytes);
    unsigned calls; /* threads in `give`: as long as there are, it stays */
} ebb__giver;

/* ---- devices ---------------------------------------------------------------------------------- */

enum {
    EBB__DEVICES = 32,
    EBB__PEERS = 32,
    EBB__TABLE_SIZES = 48,
    EBB__INDEX_BITS = 24, /* of a VBAR's number, in its handle */
    EBB__DEVICE_SHIFT = 56,
    EBB__VBARS_A_CHUNK = 1024,
    EBB__VBAR_CHUNKS = (1 << EBB__INDEX_BITS) / EBB__VBARS_A_CHUNK,
};

struct ebb__device {
    ebb__mutex mu;
    ebb__condition changed; /* a page is no longer being saved, or a giver no longer asked */
    _Atomic uint32_t id;    /* the handle's; 0: closed */
    _Atomic bool forked;    /* this process is a fork of the one that opened it */
    uint32_t number, generation_of_id;
    unsigned opens;
    unsigned
        busy; /* what keeps it open: threads in a call, of no VBAR, that may have dropped the lock;
                      movers; pinned host memory */

    ebb__driver driver;
    int index;
    CUdevice ordinal;
    CUcontext context;
    char failure[200];

    /* frames.c */
    CUmemAllocationProp properties;
    CUmemAccessDesc access[EBB__PEERS];
    size_t access_count;
    uint64_t frame_bytes[EBB__KINDS];
    unsigned small_shift;
    uint64_t total, limit, headroom;
    ebb__frame *frames[EBB__KINDS]; /* free ones */
    ebb__frame *stuck;              /* those the driver would not release */
    ebb__frame *lost;               /* of segments, that it would not unmap */
    uint64_t frame_count[EBB__OWNERS][EBB__KINDS];
    uint64_t frames_created, frames_recycled, frames_released, retries;

    /* fence.c */
    ebb__stream streams[EBB__STREAMS]; /* slot 0 is nobody */
    _Atomic uint16_t stream_hash[EBB__STREAM_HASH];
    unsigned stream_count;
    CUevent *events; /* free ones */
    unsigned event_count, event_room;
    uint64_t marks, orders, waits, wait_ns, broken_promises;

    /* pages.c, vbars.c */
    _Atomic(ebb__vbar *) vbar_chunks[EBB__VBAR_CHUNKS]; /* of EBB__VBARS_A_CHUNK each */
    uint32_t vbar_high, vbar_free, vbar_count;          /* ever used; list of free ones; in use */
    ebb__table *tables[EBB__TABLE_SIZES];
    ebb__vbar *order; /* of victims: those with an evictable page, least important first */
    int64_t rank_top, rank_bottom;
    uint64_t generation;
    uint64_t departures;
    uint64_t faults; /* that took the lock */
    uint64_t page_outs;
    ebb__saver *savers;
    uint64_t gone_hits, gone_misses, gone_offloaded,
        gone_evictions[EBB_REASONS]; /* destroyed VBARs' */

    /* room.c */
    ebb__holder holders[EBB__HOLDERS]; /* those that are there have a `best` */
    ebb__giver *givers;

    /* the doors */
    struct ebb__segments *segments; /* src/doors/segment.c; NULL: no door is open */
    uint64_t before; /* bytes PyTorch has from elsewhere: they count against the limit */

    /* moving weights */
    struct ebb__host *host; /* src/move/host.c; NULL: no host memory is known */
};

/* ---- errors.c ------------------------------------------------------------------------------- */

/*
 * Write a sentence about a failure into `detail`, of `length` bytes, cutting it where it does not
 * fit. Does nothing if `detail` is NULL or `length` is 0, so that callers need not ask.
 */
__attribute__((format(printf, 3, 4))) void ebb__detail(char *detail, size_t length,
                                                       const char *format, ...);

/* ---- device.c ------------------------------------------------------------------------------- */

/* Every device of this process. */
extern ebb__device ebb__devices[EBB__DEVICES];

/* What a thread had before ebb__enter(). */
typedef struct ebb__scope {
    CUstreamCaptureMode mode;
    bool relaxed, pushed;
    bool ready; /* the driver can be called: context and mode are as they should be */
} ebb__scope;

/* The device behind a handle: NULL, and *status says why. */
ebb__device *ebb__device_find(ebb_device handle, ebb_status *status);

/*
 * The device behind a handle, entered. NULL, and *status says why not: EBB_GONE, EBB_FORKED,
 * EBB_DRIVER_FAILED.
 */
ebb__device *ebb__device_enter(ebb_device handle, ebb__scope *scope, ebb_status *status) EBB__TRIES;

/*
 * Take the lock, make the device's context current and let the thread's calls not disturb captures.
 * The context's state is the caller's again after leave. scope->ready says whether that worked: on
 * another device's context, or with a capture at stake, no driver function may be called.
 */
void ebb__enter(ebb__device *device, ebb__scope *scope) EBB__LOCKS;
void ebb__leave(ebb__device *device, const ebb__scope *scope) EBB__UNLOCKS;

/* Let go of the lock for a while, the rest as it is; and take it again. */
void ebb__drop(ebb__device *device) EBB__UNLOCKS;
void ebb__retake(ebb__device *device) EBB__LOCKS;

/* Wait, without the lock, until somebody says that something has changed. */
void ebb__await(ebb__device *device) EBB__LOCKED;

/* Keep what a failed driver call said, for ebb_device_failure(). Always EBB_DRIVER_FAILED. */
ebb_status ebb__failed_locked(ebb__device *device, const char *call, CUresult code) EBB__LOCKED;

/* ---- frames.c ------------------------------------------------------------------------------- */

/* Ask the driver what frames of this device are to be. */
ebb_status ebb__frames_open_locked(ebb__device *device) EBB__LOCKED;

/* Bytes held through Ebbtide. */
uint64_t ebb__frames_held_locked(const ebb__device *device) EBB__LOCKED;

/* Bytes of new frames that the limit and the headroom allow now; asks the driver if the limit does. */
uint64_t ebb__frames_room_locked(ebb__device *device) EBB__LOCKED;

/* A free frame, or a new one: NULL if there is none, or the driver has none. */
ebb__frame *ebb__frame_take_locked(ebb__device *device, ebb__kind kind,
                                   ebb__owner owner) EBB__LOCKED;
ebb__frame *ebb__frame_create_locked(ebb__device *device, ebb__kind kind,
                                     ebb__owner owner) EBB__LOCKED;

/* Change its owner; put: to nobody, kept for re-use. */
void ebb__frame_own_locked(ebb__device *device, ebb__frame *frame, ebb__owner owner) EBB__LOCKED;
void ebb__frame_put_locked(ebb__device *device, ebb__frame *frame) EBB__LOCKED;

/* Give free frames of a kind back to the driver until `bytes` are; how many were. */
uint64_t ebb__frames_trim_locked(ebb__device *device, ebb__kind kind, uint64_t bytes) EBB__LOCKED;

/*
 * Map a frame at an address, with access for the device and every peer that can have it; unmap it.
 * A failed map is undone: EBB_DRIVER_FAILED, and *stuck says whether even that failed and the frame
 * is still mapped.
 */
ebb_status ebb__frame_map_locked(ebb__device *device, ebb__frame *frame, CUdeviceptr address,
                                 bool *stuck) EBB__LOCKED;
ebb_status ebb__frame_unmap_locked(ebb__device *device, ebb__frame *frame,
                                   CUdeviceptr address) EBB__LOCKED;

/* The driver would not unmap a frame: take it out of the list it is in (`link`, or none), count it as
   lost. It can never be used again. */
void ebb__frame_lose_locked(ebb__device *device, ebb__frame *frame, ebb__frame **link) EBB__LOCKED;

/* Release every free frame, and what was stuck. EBB_DRIVER_FAILED: not all; it can be repeated. */
ebb_status ebb__frames_close_locked(ebb__device *device) EBB__LOCKED;

/* ---- room.c, policy.c ------------------------------------------------------------------------ */

/*
 * Get the frames of request->need into request->hand, from the first that can give them. true: all
 * of them. false: none, and what was got is free again. Drops the lock where it may wait.
 */
bool ebb__room_make_locked(ebb__device *device, ebb__request *request) EBB__LOCKED;

/* Give frames back until the device holds at most `bytes`. Drops the lock where it may wait. */
bool ebb__room_shrink_locked(ebb__device *device, uint64_t bytes, ebb_reason reason, bool may_wait,
                             bool may_call) EBB__LOCKED;

/*
 * The last resort of those who outrank all weights: givers unpin pages of `bytes`, if there are as many.
 * false: they have unpinned nothing. Drops the lock.
 */
bool ebb__room_beg_locked(ebb__device *device, uint64_t bytes) EBB__LOCKED;

/* A giver comes; it goes, when nobody asks it any more, which may drop the lock. */
void ebb__giver_add_locked(ebb__device *device, ebb__giver *giver) EBB__LOCKED;
void ebb__giver_remove_locked(ebb__device *device, ebb__giver *giver) EBB__LOCKED;

/* Which of `count` candidates goes first. */
unsigned ebb__policy_pick(const ebb__candidate *candidates, unsigned count);

/* May PyTorch be asked to give back what it does not use, the `pressures`th time that weights would
   have to give way since it last was, after so many times that it did not help? */
bool ebb__policy_may_ask(uint64_t pressures, unsigned setbacks);

/* May a watermark rise over `missing` bytes, with `room` bytes to be had without taking any from
   others, `quiet` faults after the VBAR's last eviction, and so many setbacks? */
bool ebb__policy_may_rise(uint64_t missing, uint64_t room, uint64_t limit, uint64_t quiet,
                          unsigned setbacks);

/* ---- fence.c -------------------------------------------------------------------------------- */

/* The legacy default stream has two names. */
static inline ebb_stream ebb__stream_plain(ebb_stream stream)
{
    return stream == CU_STREAM_LEGACY ? NULL : stream;
}

static inline unsigned ebb__stream_hash(ebb_stream stream)
{
    uint64_t z = (uint64_t)(uintptr_t)stream * 0x9E3779B97F4A7C15u;
    return (unsigned)(z >> 52); /* 12 bits: EBB__STREAM_HASH */
}

/* The slot of a stream, without the lock; 0: not seen yet. */
static inline unsigned ebb__stream_find(ebb__device *device, ebb_stream stream)
{
    stream = ebb__stream_plain(stream);
    if (!stream)
        return EBB__LEGACY_SLOT;
    for (unsigned at = ebb__stream_hash(stream), n = 0; n < EBB__STREAM_HASH; at++, n++) {
        unsigned slot =
            atomic_load_explicit(&device->stream_hash[at % EBB__STREAM_HASH], memory_order_acquire);
        if (!slot)
            return 0;
        if (atomic_load_explicit(&device->streams[slot].handle, memory_order_relaxed) == stream)
            return slot;
    }
    return 0;
}

typedef enum ebb__capture {
    EBB__NOT_CAPTURING,
    EBB__CAPTURING, /* nothing may be recorded on it */
    EBB__BARRED,    /* the legacy stream, while a stream that waits for it captures: likewise */
    EBB__UNTOLD,    /* the driver failed */
} ebb__capture;

/* Whether the stream is capturing. To ask disturbs no capture. */
static inline ebb__capture ebb__stream_capture(const ebb__device *device, ebb_stream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult code = device->driver.cuStreamIsCapturing(stream, &status);
    if (code == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        return EBB__BARRED;
    if (code != CUDA_SUCCESS)
        return EBB__UNTOLD;
    return status == CU_STREAM_CAPTURE_STATUS_NONE ? EBB__NOT_CAPTURING : EBB__CAPTURING;
}

/* The same, with the lock held: a promise that turns out to be broken is counted and void. */
ebb__capture ebb__stream_ask_locked(ebb__device *device, ebb_stream stream) EBB__LOCKED;

/* The slot of a stream, made if there is none; 0: none to be had. Dropped streams' slots are used
   again. */
unsigned ebb__stream_get_locked(ebb__device *device, ebb_stream stream) EBB__LOCKED;

/* Captures of this process that the doors know to be open: while there is one, nothing may be
   recorded of a context. Who adds one takes each device's lock once before the capture begins. */
extern _Atomic unsigned ebb__captures;

/* Record an event on the stream: it covers all tickets so far. */
ebb_status ebb__mark_locked(ebb__device *device, unsigned slot) EBB__LOCKED;

/* A mark now and then, of a stream that lasts: takes the lock itself, and as little as it can. */
void ebb__mark_in_passing(ebb__device *device, unsigned slot);

/*
 * Tickets of the stream have been noted: see to it that they can pass. Of a lasting stream a mark can
 * be made at any time; of another now, or it is waited for. May drop the lock. false: neither was to
 * be had, and the pages must stay pinned or held until it succeeds.
 */
bool ebb__fence_seal_locked(ebb__device *device, unsigned slot) EBB__LOCKED;

/* As ebb_device_keep_stream(), with promises that there are. May drop the lock. */
ebb_status ebb__stream_keep_locked(ebb__device *device, ebb_stream stream,
                                   unsigned promises) EBB__LOCKED;

/* The promises end: all work on the stream is over, nobody queues any more, and it will be destroyed. */
void ebb__stream_part_locked(ebb__device *device, ebb_stream stream) EBB__LOCKED;

/* Note on a page that the stream's work so far uses it. May drop the lock; the page is pinned. false:
   there is no memory to note it, so the page must never go. */
bool ebb__fence_note_locked(ebb__device *device, ebb__page *page, unsigned slot) EBB__LOCKED;

/* A ticket for what is on a stream by now. */
uint64_t ebb__ticket_locked(ebb__device *device, unsigned slot) EBB__LOCKED;

typedef enum ebb__fence_state {
    EBB__PASSED,
    EBB__PENDING,
    EBB__UNKNOWN, /* a stream of it is capturing, or the driver failed: not to be had now */
} ebb__fence_state;

/* Does the GPU still use the page? Records marks where there is none yet; forgets what has passed. */
ebb__fence_state ebb__fence_state_locked(ebb__device *device, ebb__page *page) EBB__LOCKED;

/* The same of one ticket; and wait for it, dropping the lock. */
ebb__fence_state ebb__ticket_state_locked(ebb__device *device, uint64_t ticket) EBB__LOCKED;
bool ebb__ticket_wait_locked(ebb__device *device, uint64_t ticket) EBB__LOCKED;

/* Wait until it does not. Drops the lock. false: cannot be known. Tickets noted while it waits are
   not waited for: the caller looks at the state again. */
bool ebb__fence_wait_locked(ebb__device *device, ebb__page *page) EBB__LOCKED;

/* Order what comes next on `stream` after every ticket of the page that is of another stream. false:
   cannot be done now. May drop the lock (the stream is capturing); the page is pinned. */
bool ebb__fence_order_locked(ebb__device *device, ebb__page *page, unsigned slot,
                             ebb_stream stream) EBB__LOCKED;

/* The page's frame is gone, and its tickets with it. */
void ebb__fence_clear_locked(ebb__device *device, ebb__page *page) EBB__LOCKED;

/* Wait for one stream, for want of a slot or a mark. Drops the lock. false: the driver failed. */
bool ebb__stream_drain_locked(ebb__device *device, ebb_stream stream) EBB__LOCKED;

/* The streams that are always there. */
void ebb__fence_open_locked(ebb__device *device) EBB__LOCKED;

/* Forget every stream and destroy every event; no page has a ticket. EBB_DRIVER_FAILED: not all
   events; it can be repeated. */
ebb_status ebb__fence_close_locked(ebb__device *device) EBB__LOCKED;

/* ---- bits.c ---------------------------------------------------------------------------------- */

/* Bytes of zeroes that a set of `count` numbers needs, and the set over them. */
size_t ebb__bits_bytes(uint64_t count);
void ebb__bits_over(ebb__bits *bits, void *zeroes, uint64_t count);

void ebb__bits_add(ebb__bits *bits, uint64_t n);
void ebb__bits_remove(ebb__bits *bits, uint64_t n);
bool ebb__bits_has(const ebb__bits *bits, uint64_t n);

/* The largest member below `end`; EBB__NONE if there is none. */
uint64_t ebb__bits_last(const ebb__bits *bits, uint64_t end);

/* ---- order.c --------------------------------------------------------------------------------- */

/* The order of victims: VBARs by rank, in a treap. */
void ebb__order_add(ebb__vbar **root, ebb__vbar *vbar);
void ebb__order_remove(ebb__vbar **root, ebb__vbar *vbar);
ebb__vbar *ebb__order_first(ebb__vbar *root);
ebb__vbar *ebb__order_next(ebb__vbar *vbar);

/* ---- pages.c --------------------------------------------------------------------------------- */

/* Which page an offset is in; where a page begins; its kind. */
uint64_t ebb__page_at_locked(const ebb__vbar *vbar, uint64_t offset) EBB__LOCKED;
uint64_t ebb__page_offset_locked(const ebb__vbar *vbar, uint64_t page) EBB__LOCKED;
ebb__kind ebb__page_kind_locked(const ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/*
 * Pin a page that has a frame: RESIDENT, or LEAVING, which takes it back. false: it has none, is
 * poisoned, is being saved, or has as many pins as can be counted.
 */
bool ebb__page_pin_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/* Take a pin back; the last one of a NOTED page makes it a candidate again. false: there was none. */
bool ebb__page_unpin_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/* Put a frame behind an absent page and pin it. On failure the frame is free again, or the page is
   poisoned. */
ebb_status ebb__page_load_locked(ebb__vbar *vbar, uint64_t page, ebb__frame *frame) EBB__LOCKED;

/* A graph holds a page; none does any more. */
void ebb__page_hold_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;
void ebb__page_release_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/* Begin to give a page up: false if it is pinned, held, or not resident. */
bool ebb__page_leave_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/* Take back what leave did. */
void ebb__page_back_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/* Unmap a LEAVING or POISONED page whose fence has passed; its frame is free. EBB_DRIVER_FAILED: it
   is poisoned (still). */
ebb_status ebb__page_drop_locked(ebb__vbar *vbar, uint64_t page) EBB__LOCKED;

/* Wait for a LEAVING page's fence and have it saved. Drops the lock. false: taken back, or it cannot
   go now; if it is still LEAVING by `departure` it was put back. */
bool ebb__page_settle_locked(ebb__vbar *vbar, uint64_t page, uint64_t departure,
                             bool save) EBB__LOCKED;

/* Whether this thread is inside a page-out function: then it must not wait for another's. */
bool ebb__page_saver_locked(const ebb__device *device) EBB__LOCKED;

/* Give up a settled page for a reason: drop it, lower the watermark, count. */
bool ebb__page_evict_locked(ebb__vbar *vbar, uint64_t page, ebb_reason reason) EBB__LOCKED;

/* VBARs as room.c knows them. */
extern const ebb__holder ebb__vbar_holder;

/* ---- stats.c --------------------------------------------------------------------------------- */

/* What is counted in the pages' words, added up. */
void ebb__vbar_sums_locked(const ebb__vbar *vbar, uint64_t *hits, uint64_t *resident,
                           uint64_t *pinned, uint64_t *held) EBB__LOCKED;

/* ---- vbars.c --------------------------------------------------------------------------------- */

/*
 * A handle's id:
 *
 *   63         56 55         24 23      0
 *   [ device + 1 ][ generation ][ index ]
 */
#define EBB__INDEX_MASK ((UINT64_C(1) << EBB__INDEX_BITS) - 1)

/* The VBAR number `index` of a device, at most EBB__INDEX_MASK, in use or not; NULL: never was. */
static inline ebb__vbar *ebb__vbar_number(const ebb__device *device, uint32_t index)
{
    ebb__vbar *vbars = atomic_load_explicit(&device->vbar_chunks[index / EBB__VBARS_A_CHUNK],
                                            memory_order_acquire);
    return vbars ? &vbars[index % EBB__VBARS_A_CHUNK] : NULL;
}

/* Where the VBAR behind a handle is, if there still is one: the caller looks at the id. */
static inline ebb__vbar *ebb__vbar_place(ebb_vbar handle)
{
    uint64_t number = handle.id >> EBB__DEVICE_SHIFT;
    if (!number || number > EBB__DEVICES)
        return NULL;
    return ebb__vbar_number(&ebb__devices[number - 1], handle.id & EBB__INDEX_MASK);
}

/* The VBAR behind a handle, without the lock. NULL: none, or none any more. */
static inline ebb__vbar *ebb__vbar_find(ebb_vbar handle)
{
    ebb__vbar *vbar = ebb__vbar_place(handle);
    if (!vbar || atomic_load_explicit(&vbar->id, memory_order_acquire) != handle.id)
        return NULL;
    return vbar;
}

/* Why there is none. */
ebb_status ebb__vbar_missing(ebb_vbar handle);

/* As ebb_vbar_destroy(). Drops the lock. */
ebb_status ebb__vbar_destroy_locked(ebb__vbar *vbar) EBB__LOCKED;

#endif

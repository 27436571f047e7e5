/*
 * The simulated GPU, inside.
 *
 * One process-wide object, `sim`, under one mutex: a driver is a process-wide thing, and a simulator
 * is read more often than it is raced against. What processes share (cards, use, the clock, events
 * that travel) lies in a `struct run` in shared memory, under a mutex of its own, taken inside the
 * first.
 *
 *    driver_*.c    the driver's face: arguments checked, codes as the H200's driver gives them
 *        |
 *    copy.c  capture.c  graph.c   works are made of      memory.c  alloc.c  pool.c  host.c   what is
 *        |                        calls                      |                      mapped where
 *        |                                                   |
 *    stream.c      queues, order, marks                  history.c    who touched what; races
 *    progress.c    time, effects, what the host has seen     |
 *        |                                                   |
 *    run.c  ranges.c  table.c  hazard.c    cards and clock; a tree of ranges; entry; reports
 *
 * Three questions are kept apart, because mixing them up is how simulators lie:
 *
 *    when is a work over?       modelled time. sim_settle() gives each queued entry its end.
 *    what is it ordered after?  vector clocks. Each stream has a slot; its entries are numbered; a
 *                               stream's clock holds, for each slot, the last entry that is ordered
 *                               before whatever is queued next. Hazards are decided by this alone.
 *    has it had its effect?     as late as the rules allow. sim_run() makes up for it.
 *
 * Invariants (checked by ebbsim_check(), in check.c):
 *   S1  entries of a stream are settled in order and run in order.
 *   S2  what the host has observed has been settled and run, and had ended by then.
 *   S3  a frame lives while a handle holds it, a handle while the program or a mapping does (and an
 *       exported frame while a file descriptor is open on it); its bytes are charged exactly once.
 *   S4  mappings begin inside a reservation and do not overlap.
 *   S5  bytes charged to this process are those of its frames, plus one context per active device.
 */
#ifndef EBB_SIM_H
#define EBB_SIM_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver_abi.h"
#include "ebbtide_sim.h"
#include "ranges.h"

enum {
    SIM_MAX_CARDS = 16,
    SIM_MAX_PROCESSES = 64,
    SIM_MAX_SHARED_FRAMES = 8192,
    SIM_MAX_SHARED_EVENTS = 2048,
    SIM_MAX_STREAMS = 4096,
    SIM_QUEUE_LIMIT = 1024, /* entries of a stream that may wait for their effect, as on a GPU */
};

#define SIM_GRANULARITY ((uint64_t)2 << 20)

/* ---- run.c: what the processes of a run share ----------------------------------------------- */

typedef struct shared_process {
    int pid;
    uint64_t started; /* the kernel's start time, so that a re-used pid is not mistaken */
    uint64_t bytes[SIM_MAX_CARDS];
} shared_process;

/* A frame that was exported. Its bytes are charged here, once, while any process holds it. */
typedef struct shared_frame {
    uint64_t inode; /* of its memfd; 0: entry unused */
    uint64_t bytes;
    uint64_t holders; /* one bit per process */
    int device;
} shared_frame;

typedef struct shared_event {
    int owner;         /* process that made it */
    int users;         /* events that stand for it, in all processes; entry unused when 0 */
    uint64_t recorded; /* how often it was recorded */
    uint64_t settled;  /* the last record whose end is known */
    uint64_t end;      /* its end */
    uint64_t lost;     /* the last record whose process died before it was over */
    int recorder;      /* process that recorded it last, by its index + 1; 0: nobody alive */
} shared_event;

typedef struct run {
    uint64_t magic;
    pthread_mutex_t mutex; /* robust, shared */
    uint64_t began;        /* CLOCK_MONOTONIC, nanoseconds */
    int clock_virtual;
    _Atomic uint64_t virtual_now;
    int card_count;
    ebbsim_card cards[SIM_MAX_CARDS];
    uint64_t foreign[SIM_MAX_CARDS];
    shared_process processes[SIM_MAX_PROCESSES];
    int frames_high; /* entries of frames[] ever used */
    shared_frame frames[SIM_MAX_SHARED_FRAMES];
    shared_event events[SIM_MAX_SHARED_EVENTS];
} run;

int sim_cards_ready(void); /* at cuInit: how many cards there are */
int sim_cards_choose(
    void); /* at cuInit: how many of them CUDA_VISIBLE_DEVICES lets this process see */
int sim_card_count(void);  /* those it sees; the driver's ordinals are of them alone */
int sim_place(int device); /* which of the run's cards that is */
const ebbsim_card *sim_card(int device);
enum { SIM_UUID_TEXT = 41 };
void sim_uuid_text(int place, char text[SIM_UUID_TEXT]); /* as nvidia-smi writes it */
void sim_run_lock(void);
void sim_run_unlock(void);
bool sim_run_open(void);  /* joins or makes the run; idempotent. false: no memory for it */
void sim_run_close(void); /* this process's use returns */
uint64_t sim_now(void);
void sim_clock_add(uint64_t nanoseconds);   /* virtual clock only */
void sim_clock_reach(uint64_t nanoseconds); /* virtual clock only: not before this */
CUresult sim_charge(int device,
                    uint64_t bytes); /* CUDA_ERROR_OUT_OF_MEMORY where it does not fit */
void sim_uncharge(int device, uint64_t bytes);
uint64_t sim_card_used(int device);                              /* by everybody */
uint64_t sim_own_bytes(int device);                              /* charged to this process alone */
int sim_share_frame(uint64_t inode, uint64_t bytes, int device); /* its index, -1: table full */
int sim_find_shared_frame(uint64_t inode);                       /* and hold it; -1: no such */
void sim_unshare_frame(int index);                               /* hold it no more */
int sim_shared_event_new(void);                                  /* its index, -1: table full */
bool sim_shared_event_hold(int index);                           /* false: no such */
void sim_shared_event_release(int index);
uint64_t sim_shared_event_record(int index); /* the number of the new record */
uint64_t sim_shared_event_recorded(int index);
/* Is this record of a process that died before it was over? */
bool sim_shared_event_lost(int index, uint64_t record_number);

/* ---- history.c: who touched what -------------------------------------------------------------*/

typedef struct work work;
typedef struct mapping mapping;

/* Memory whose accesses are followed: a frame or a block of pinned host memory. */
typedef struct memory_object {
    ranges pieces;                         /* offsets in the object */
    struct memory_object *next, *previous; /* all objects with a history */
} memory_object;

/* A work was queued: report its races, let what it will overwrite have its effect, remember what it
   touches. false: a host function is in the way of some effect. */
bool sim_history_note(work *w);
/* Report, and run, unfinished work that touches [address, address + size) of the object. */
void sim_history_leave(memory_object *object, const char *call, uint64_t address, uint64_t size);
void sim_history_leave_mapping(mapping *m, const char *call);
void sim_history_forget_mapping(mapping *m);
void sim_history_forget(memory_object *object);
void sim_history_sweep(void); /* drop what the host has observed */

/* ---- memory.c ----------------------------------------------------------------------- */

typedef struct frame {
    memory_object object; /* first */
    uint64_t size;
    int device;
    int fd;
    int shared;       /* index in run.frames, or -1 */
    uint32_t handles; /* that stand for it */
    struct frame *next_orphan;
} frame;

/* What a program holds of a frame. It is good while somebody holds it or it is mapped somewhere, as
   the driver has it; an imported frame has a handle of its own. */
typedef struct frame_handle {
    uint64_t id;
    frame *frame;
    int types;      /* CU_MEM_HANDLE_TYPE_*: how it may be exported */
    uint32_t count; /* held by the program */
    uint32_t mappings;
} frame_handle;

typedef struct reservation {
    range node; /* first */
    bool chunk; /* made by cuMemAlloc */
} reservation;

struct mapping {
    range node; /* first */
    frame_handle *handle;
    frame *frame;
    uint8_t access[SIM_MAX_CARDS];
    bool touched; /* the frame is behind the address (access was given once) */
    work **users; /* the latest of each stream that the host has not observed, and maybe more */
    uint32_t user_count;
    /* a chunk of cuMemAlloc: */
    bool chunk;
    struct pool *pool; /* that it belongs to, or NULL */
    bool shared;       /* by small allocations */
    int context;       /* device whose context owns it */
    uint64_t used;     /* bytes handed out, from the start */
    uint32_t live;     /* allocations in it */
};

typedef struct pool_block pool_block;
typedef struct pool_chunk pool_chunk;

/* One cuMemAlloc or cuMemAllocAsync, or one memory of another process. Small ones share a chunk. */
typedef struct allocation {
    range node; /* first; what was asked for, to the byte */
    mapping *chunk;
    pool_block *block; /* of a pool, or NULL */
    bool graphs;       /* allocated in a capture */
    uint32_t opened;   /* another process's memory, opened this often; 0: our own */
} allocation;

typedef struct pool {
    uint64_t id;
    int device;
    bool is_default;
    bool dead;          /* destroyed, but something of it is still in use */
    int reuse[3];       /* CU_MEMPOOL_ATTR_REUSE_* */
    uint64_t most;      /* bytes it may hold; 0: any */
    uint64_t threshold; /* bytes it keeps when the host waits for something */
    uint64_t reserved, reserved_high, used, used_high;
    uint8_t access[SIM_MAX_CARDS];
    pool_chunk *chunks;
    struct pool *next;
} pool;

typedef struct host_block {
    range node; /* first */
    memory_object object;
    bool registered; /* else allocated, */
    uint64_t mapped; /* with this many bytes */
    unsigned flags;
    int context;
} host_block;

mapping *sim_mapping_at(uint64_t address);
allocation *sim_allocation_at(uint64_t address);
host_block *sim_host_block_at(uint64_t address);
/* Can this process touch all of it? Not where nothing is mapped or nobody has access. */
bool sim_reachable(uint64_t address, uint64_t bytes);
CUresult sim_reserve(uint64_t size, uint64_t alignment, uint64_t hint, CUdeviceptr *address);
CUresult sim_reserve_chunk(uint64_t size, CUdeviceptr *address); /* for allocations: upwards */
CUresult sim_unreserve(uint64_t address, uint64_t size);
CUresult sim_frame_create(int device, uint64_t size, int types, frame_handle **out);
void sim_handle_settle(frame_handle *h); /* gone, if nothing holds it any more */
CUresult sim_handle_export(frame_handle *h, int *fd);
CUresult sim_handle_import(int fd, frame_handle **out);
void sim_orphans_check(void); /* exported frames that only a file descriptor held */
CUresult sim_map(uint64_t address, uint64_t size, frame_handle *h);
CUresult sim_unmap(uint64_t address, uint64_t size);
CUresult sim_set_access(uint64_t address, uint64_t size, const CUmemAccessDesc *access,
                        size_t count);
CUresult sim_map_frame(uint64_t address, uint64_t size, frame_handle *h);
void sim_unmap_one(mapping *m);
bool sim_apply_access(mapping *m);
void sim_forget_reservation(reservation *r);
CUresult sim_frame_share(frame *f);
uint64_t sim_inode_of(int fd); /* 0: none */
void sim_memory_reset(void);
void sim_wait_for_everything(int device); /* driver_memory.c; drops the lock meanwhile */

typedef struct mark mark;
typedef struct stream stream;

/* ---- alloc.c, pool.c -------------------------------------------------------------------------- */

/* With addresses behind it for `room` bytes more, if they are to be had. NULL: *code says why. */
mapping *sim_chunk_new(int device, uint64_t size, uint64_t room, CUresult *code);
bool sim_chunk_extend(const mapping *first, uint64_t size); /* by a mapping behind its last */
mapping *sim_chunk_last(const mapping *first);              /* of its mappings */
void sim_chunk_drop_last(mapping *first);                   /* there must be several */
void sim_chunk_free(mapping *first);
CUresult sim_alloc(int device, uint64_t size, CUdeviceptr *address);
void sim_allocation_leave(const allocation *a, const char *call);
void sim_free(allocation *a);
CUresult sim_free_block(allocation *a);            /* of a pool, in no stream's order */
CUresult sim_free_later(allocation *a, stream *s); /* of cuMemAlloc, in the stream's order */
void sim_leaving_release(void);                    /* what was freed so, as far as it is over */
void sim_leaving_reset(void);
void sim_memory_context_gone(int device);

pool *sim_pool_new(int device); /* NULL: no host memory */
pool *sim_pool_of(int device);  /* its default pool */
CUresult sim_pool_alloc(pool *p, uint64_t bytes, stream *s, CUdeviceptr *address);
CUresult sim_pool_free(allocation *a, stream *s);
void sim_pool_take_back(pool_block *b, mark *freed); /* takes the reference; NULL: it is over */
void sim_pool_trim(pool *p, uint64_t keep);
void sim_pool_set_access(pool *p, int device, int flags);
void sim_pool_destroy(pool *p);
void sim_pools_release(void); /* what pools hold beyond their thresholds */
void sim_pools_context_gone(int device);
void sim_pools_reset(void);

/* ---- host.c ----------------------------------------------------------------------------------- */

CUresult sim_host_alloc(int device, uint64_t size, unsigned flags, void **address);
CUresult sim_host_free(uint64_t address);
CUresult sim_host_register(int device, uint64_t address, uint64_t size, unsigned flags);
CUresult sim_host_unregister(uint64_t address);
void sim_host_context_gone(int device);
void sim_host_reset(void);

/* ---- stream.c: queues, time, order, effects ------------------------------------------------- */

typedef struct vclock {
    uint64_t *at; /* by slot */
    uint32_t count;
} vclock;

/* A point in one or several streams: what an event stands for once it is recorded. */
struct mark {
    int refs;
    int pending;  /* streams that have not reached it yet (in modelled time) */
    uint64_t end; /* when all have, if none is pending */
    vclock order;
    int shared; /* index in run.events of a travelling event, or -1 */
    uint64_t shared_record;
    bool foreign; /* of another process: settled when run.events says so */
};

typedef enum entry_kind {
    ENTRY_WORK,       /* effect: function, copy or memset */
    ENTRY_RECORD,     /* a mark is reached */
    ENTRY_WAIT,       /* for a mark */
    ENTRY_WAIT_VALUE, /* for a word of memory */
    ENTRY_HOST,       /* a function on the driver's thread */
} entry_kind;

typedef enum effect {
    EFFECT_NONE,
    EFFECT_COPY,
    EFFECT_SET8,
    EFFECT_SET32,
    EFFECT_FUNCTION,
} effect;

typedef enum engine { ENGINE_NONE, ENGINE_COMPUTE, ENGINE_H2D, ENGINE_D2H, ENGINE_COUNT } engine;

enum { WORK_INLINE_RANGES = 3 };

struct work {
    int refs;
    entry_kind kind;
    effect effect;
    engine engine;
    char call[64];
    int device, stream_number;
    uint32_t slot;
    uint64_t sequence;
    uint64_t when; /* queued */
    long thread;
    uint64_t duration, end;
    double rate;   /* copies: bytes a second when alone on the link; else 0 */
    uint64_t left; /* the last call (sim.calls_taking) that took memory from it, and was reported */
    bool settled, ran, now, waited, host_started, host_done;
    ebbsim_range *ranges;
    ebbsim_range inline_ranges[WORK_INLINE_RANGES];
    size_t range_count;
    uint64_t to, from, bytes; /* EFFECT_COPY, EFFECT_SET*; ENTRY_WAIT_VALUE: from */
    void *snapshot;           /* EFFECT_COPY from memory that was not pinned */
    bool snapshot_wanted, source_pinned;
    bool between_devices; /* a copy that names other devices than the stream's */
    uint32_t value;
    unsigned value_test; /* ENTRY_WAIT_VALUE: CU_STREAM_WAIT_VALUE_* */
    int node_type;       /* CU_GRAPH_NODE_TYPE_*, where the rest does not tell; else 0 */
    void (*function)(void *);
    void *data;
    void (*release)(void *); /* of a captured work's data */
    mark *mark;
    bool check_source; /* compare `source_hash` once more when the host knows that it is over */
    uint64_t source_hash;
    const work *reported;    /* the last work a race with this one was reported for */
    struct work *next;       /* in the stream's queue */
    struct work *next_check; /* in the stream's list of sources to check */
};

typedef struct capture capture;

struct stream {
    uint64_t id; /* handle; 0: slot unused */
    int number;  /* for people */
    uint32_t slot;
    int device;
    bool non_blocking, is_default, dead;
    bool nobodys; /* a default or per-thread stream: not the program's to destroy */
    int priority;
    uint64_t sequence; /* of the last entry */
    vclock order;
    uint64_t host_version; /* of sim.host that `order` knows */
    uint64_t end;          /* of the last settled entry */
    work *head, *tail;
    work *to_settle, *to_run; /* first entry not settled, not run */
    uint32_t waiting;         /* entries not run */
    work *checks, *last_check;
    capture *capture;
    uint32_t capture_index; /* its place in the capture's own order */
    uint64_t capture_sequence;
    vclock capture_order;
};

enum { SIM_LIMITS = 7 };

typedef struct context {
    int device;
    unsigned retained;
    bool active;
    CUresult lost; /* an illegal access happened: every call returns this */
    stream *default_stream;
    uint64_t engine_end[ENGINE_COUNT];
    size_t limits[SIM_LIMITS]; /* CU_LIMIT_*, as set; 0: not */
} context;

void sim_vclock_join(vclock *into, const vclock *from);
void sim_vclock_set(vclock *clock, uint32_t slot, uint64_t value);
uint64_t sim_vclock_get(const vclock *clock, uint32_t slot);

void sim_vclock_reserve(vclock *clock, uint32_t count);

stream *sim_stream_new(int device, bool non_blocking, int priority); /* NULL: no host memory */
void sim_stream_retire(stream *s); /* destroyed: its work goes on */
stream *sim_stream_get(CUstream handle, CUresult *code);
/* Enter a call that names a stream. NULL: return sim_leave(*code). */
stream *sim_enter_stream(int function, CUstream handle, CUresult *code);
void sim_stream_context_gone(int device);
void sim_stream_reset(void);

work *sim_work_new(entry_kind kind, const char *call);
bool sim_work_ranges(work *w, const ebbsim_range *list, size_t count);
void sim_work_unref(work *w);
void sim_queue(stream *s, work *w); /* takes the reference */
void sim_catch_up(stream *s);
bool sim_observed(const work *w);

mark *sim_mark_stream(stream *s, int shared); /* shared: index of a travelling event, or -1 */
mark *sim_mark_own(stream *s); /* of what the host waits for when it waits for the stream */
mark *sim_mark_context(int device, int shared); /* as sim_mark_stream */
void sim_mark_ref(mark *m);
void sim_mark_unref(mark *m);
bool sim_mark_reached(mark *m); /* in modelled time */
void sim_mark_observe(mark *m); /* the host knows */
void sim_mark_wait(mark *m);    /* block until reached, then observe; drops the lock meanwhile */
void sim_wait_mark(stream *s, mark *m); /* the stream waits, not the host */
mark *sim_mark_foreign(int shared, uint64_t record_number);
mark *sim_mark_both(const mark *a, const mark *b);

/* ---- progress.c ------------------------------------------------------------------------------ */

bool sim_settle_stream(stream *s); /* true: something settled */
void sim_settle(void);             /* all streams, as far as it goes */
void sim_mark_refresh(mark *m);
void sim_mark_give_up(mark *m); /* for those who wait: what died with its process counts as over */
void sim_mark_reach(mark *m, uint64_t end);          /* by one stream */
bool sim_run(uint32_t slot, uint64_t sequence);      /* false: a host function is in the way */
void sim_wait_run(uint32_t slot, uint64_t sequence); /* waits for it; drops the lock meanwhile */
void sim_observe(const vclock *order);               /* the host knows that all this is over */
bool sim_stream_idle(stream *s);                     /* and the host knows */
void sim_helper_start(void); /* the driver's own thread: host functions, words written */

/* ---- copy.c --------------------------------------------------------------------------------- */

CUresult sim_copy(const char *call, stream *s, uint64_t to, int to_device, uint64_t from,
                  int from_device, uint64_t bytes);
CUresult sim_set(const char *call, stream *s, uint64_t to, uint32_t value, uint64_t count,
                 unsigned width);
CUresult sim_touch(const char *call, stream *s, uint64_t address, uint64_t bytes, int node_type);
void sim_effect(work *w);
void sim_source_remember(work *w);
void sim_source_check(work *w);
void sim_sources_settle(uint64_t address, uint64_t bytes);
CUresult sim_word(const char *call, stream *s, uint64_t address, uint32_t value, int test);
CUresult sim_host_function(stream *s, CUhostFn function, void *data);
CUresult sim_work_again(stream *s, work *captured);
enum { SIM_HOST = -1, SIM_STREAMS_DEVICE = -2 };

/* ---- capture.c ------------------------------------------------------------------------------ */

typedef struct event {
    uint64_t id;
    unsigned flags;
    int device;           /* whose context made it */
    mark *mark;           /* NULL: never recorded */
    capture *captured_in; /* recorded on a capturing stream, and that capture still is open */
    bool captured;        /* recorded on a capturing stream: useless as a fence ever after */
    vclock captured_order;
    int shared; /* index in run.events of one that travels, or -1 */
} event;

void sim_events_reset(void);    /* driver_stream.c */
bool sim_capture_forbids(void); /* an unsafe call now: invalidates what it must. true: code 900 */
CUresult sim_capture_add(stream *s, work *w); /* takes the reference */
CUresult sim_capture_record(stream *s, event *e);
CUresult sim_capture_wait(stream *s, event *e);
void sim_capture_invalidate(capture *c);
bool sim_capture_is_invalid(const stream *s);
void sim_capture_invalidate_all(int device);
bool sim_capture_any(int device);
void sim_capture_event_gone(event *e);
void sim_capture_stream_gone(stream *s);
void sim_capture_reset(void);
CUresult sim_capture_check_implicit(stream *s); /* 906: the default stream beside a capture */
uint64_t sim_capture_count(void);

/* ---- graph.c -------------------------------------------------------------------------------- */

typedef struct graph_node {
    uint64_t id;
    struct graph *graph;
    work *work;
    uint32_t branch;   /* its place in the capture's order: the branch, */
    uint64_t sequence; /* and the number on it */
    vclock order;      /* what it comes after, and itself */
} graph_node;

typedef struct graph {
    uint64_t id;
    bool executable, capturing;
    unsigned long long flags;
    graph_node **nodes; /* in the order of capture, which is a legal order */
    size_t node_count, node_room;
} graph;

graph *sim_graph_new(bool executable); /* NULL: no host memory */
void sim_graph_free(graph *g);
/* Takes the reference to the work; false: no host memory, and it does not. */
bool sim_graph_add(graph *g, work *w, uint32_t branch, uint64_t sequence, const vclock *order);
graph_node *sim_graph_node(CUgraphNode handle); /* NULL: no such */
/* The last nodes of what `clock` has seen; how many there are. */
size_t sim_graph_last(const graph *g, const vclock *clock, CUgraphNode *nodes, size_t room);
void sim_graphs_reset(void);

/* ---- attributes.c --------------------------------------------------------------------------- */

CUresult sim_attribute(int device, int attribute, int *value);

/* ---- table.c: entry and exit of every call; failures ---------------------------------------- */

/* X(name, since, symbol, nanoseconds, needs): every function the simulated driver has. */
#include "functions.h"

typedef enum function_id {
#define SIM_FUNCTION_ID(name, since, symbol, cost, needs) FN_##symbol,
    SIM_FUNCTIONS(SIM_FUNCTION_ID)
#undef SIM_FUNCTION_ID
        FN_COUNT
} function_id;

/* Takes the lock. A code other than 0 means: return sim_leave(code) and do nothing. */
CUresult sim_enter(function_id function);
CUresult sim_leave(CUresult code);
const char *sim_function_name(function_id function);

/* ---- hazard.c ------------------------------------------------------------------------------- */

/* Two works, and how each named the memory. */
void sim_report_race(const work *first, const ebbsim_range *there, const work *second,
                     const ebbsim_range *where);
void sim_report_unmap(const work *first, const char *call, uint64_t address, uint64_t size);
void sim_report_source(const work *w);
void sim_report_private(const char *call, uint64_t address, uint64_t size);
void sim_report_access(const work *w, uint64_t address, int owner); /* owner -1: not mapped */
void sim_hazards_reset(void);

/* ---- the process's driver ------------------------------------------------------------------- */

typedef struct simulator {
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* something settled, a host function ended */
    run *run;
    int run_fd;
    int process; /* index in run->processes */
    bool opened, initialised, forked;
    bool chosen; /* CUDA_VISIBLE_DEVICES was set at cuInit: */
    int visible_count, visible[SIM_MAX_CARDS];
    int driver_version;
    context contexts[SIM_MAX_CARDS];
    stream *streams[SIM_MAX_STREAMS];
    uint32_t slots;     /* streams ever in use at once */
    uint64_t unsettled; /* entries that have no end yet */
    vclock host;        /* what the host has observed */
    uint64_t host_version;
    ids stream_ids, event_ids, handle_ids, graph_ids, node_ids, pool_ids;
    ranges reservations, mappings, allocations, host_blocks;
    pool *default_pools[SIM_MAX_CARDS], *current_pools[SIM_MAX_CARDS];
    bool peers[SIM_MAX_CARDS][SIM_MAX_CARDS];    /* [user][owner]: cuCtxEnablePeerAccess */
    frame *shared_frames[SIM_MAX_SHARED_FRAMES]; /* by index in run->frames: those we hold */
    frame *orphans;         /* exported, held by nobody but a file descriptor somewhere */
    memory_object *objects; /* those with a history */
    uint64_t pieces, sweep_at;
    uint64_t calls_taking; /* calls that took memory away, so far */
    uint64_t frames, frame_bytes, mapped_bytes, reserved_bytes, handles, works;
    uint64_t chunks, chunk_mappings;
    uint64_t streams_alive;
    int next_stream_number;
    bool helper_running;
} simulator;

extern simulator sim;

/* The calling thread's stack of contexts and capture mode, as the driver keeps it. */
typedef struct thread_state {
    context *stack[16];
    int depth;
    int mode; /* CUstreamCaptureMode */
    long number;
    bool in_host_function;              /* the driver's own thread, in a program's function */
    uint64_t own_stream[SIM_MAX_CARDS]; /* CU_STREAM_PER_THREAD: ids, made on first use */
} thread_state;

thread_state *sim_thread(void);
context *sim_current(void);                /* NULL: none */
context *sim_context_of(CUcontext handle); /* NULL: no such */
long sim_thread_number(void);

#endif

/*
 * A race is reported if and only if there is one.
 *
 * Small random programs over a few streams, events and ranges. What is ordered before what is said
 * here by an explicit graph (order.h): a node for everything queued, an edge for everything that
 * orders, and nothing in common with the way the simulator does it.
 *
 *   argv[1]   number of programs
 *   argv[2]   the first seed; program n has the seed that is printed when it fails
 *
 * The simulator remembers, of every byte, the last write and the reads since. That is exact as long
 * as no two accesses of the byte have raced. Where they have (a "spoilt" cell), a later work may race
 * with one that is forgotten by then: there, a report must be right, but need not come.
 */
#include <pthread.h>
#include <sched.h>

#include "order.h"
#include "scale.h"
#include "sim_kit.h"

enum {
    LANES = 24,
    EVENTS = 4,
    WORKS = 128,
    RANGES = 3,
    PAGES = 6,
    FRAMES = 3,
    HOST = FRAMES,  /* the pinned block, as an object */
    CELLS = 8,      /* of an object: half at its start, half at its end */
    CELL_BYTES = 37 /* cells lie side by side: one byte too far is a race */
};

typedef struct lane { /* a stream, or one that is gone with its work unfinished */
    CUstream handle;
    int device;
    bool blocking, is_default, alive;
    bool lasts;    /* not the program's to destroy */
    unsigned tail; /* node of the last thing queued; 0: nothing yet */
} lane;

typedef struct fence {
    CUevent handle;
    int device;
    unsigned node; /* 0: not recorded */
} fence;

typedef struct touch { /* cells [first, last] of the row of pages, or of the pinned block */
    bool host;
    unsigned first, last;
    int access;
} touch;

typedef struct job {
    unsigned node, on, touches; /* on: which lane */
    bool left;                  /* an unmap under it was reported: that comes once for each work */
    touch at[RANGES];
    unsigned char reads[FRAMES + 1][CELLS], writes[FRAMES + 1][CELLS];
    unsigned char pages[PAGES], once[PAGES]; /* through which it touches, or has touched, a frame */
} job;

typedef struct program {
    kit k;
    dice d;
    uint64_t seed;
    order order;
    unsigned host; /* what the host knows: the predecessors of this node */
    lane lanes[LANES];
    unsigned lane_count;
    fence fences[EVENTS];
    job jobs[WORKS];
    unsigned job_count;
    CUmemGenericAllocationHandle frames[FRAMES];
    unsigned frame_at[PAGES];
    bool spoilt[FRAMES + 1][CELLS];
    bool spoilt_host; /* ever: a copy may have been held to bytes that a forgotten one changed */
    unsigned char *pinned;
    unsigned steps;
    bool ends;
    bool must[2], may[2]; /* be reported for this step: races, unmaps */
} program;

static unsigned long works_queued, races_found, unmaps_found;

/* ---- what orders what -------------------------------------------------------------------------------- */

/* Something is queued on a stream: behind the stream's last, behind what the host knows, and by the
   rules of the legacy default stream. */
static unsigned node_behind(program *p, const lane *l)
{
    unsigned n = order_node(&p->order);
    order_after(&p->order, n, l->tail);
    order_after(&p->order, n, p->host);
    for (unsigned i = 0; i < p->lane_count; i++) {
        const lane *other = &p->lanes[i];
        if (other != l && other->device == l->device && l->blocking && other->blocking &&
            (l->is_default || other->is_default)) {
            order_after(&p->order, n, other->tail);
        }
    }
    return n;
}

static unsigned queue_node(program *p, lane *l)
{
    l->tail = node_behind(p, l);
    return l->tail;
}

/* What is over when a stream is idle. A blocking stream waits for the default one only when it has
   something to do; the default one is idle when all blocking streams are. */
static unsigned idle_node(program *p, lane *l)
{
    return l->is_default ? queue_node(p, l) : l->tail;
}

static void host_learns(program *p, unsigned of)
{
    unsigned n = order_node(&p->order);
    order_after(&p->order, n, p->host);
    order_after(&p->order, n, of);
    p->host = n;
}

/* A point behind everything queued on a device, by living streams and dead ones. */
static unsigned context_node(program *p, int device)
{
    unsigned n = order_node(&p->order);
    order_after(&p->order, n, p->host);
    for (unsigned i = 0; i < p->lane_count; i++) {
        if (p->lanes[i].device == device) {
            order_after(&p->order, n, p->lanes[i].tail);
        }
    }
    return n;
}

/* ---- what a work touches ---------------------------------------------------------------------- */

static CUdeviceptr cell_address(const program *p, bool host, unsigned cell)
{
    if (host) {
        return (CUdeviceptr)(uintptr_t)p->pinned + (CUdeviceptr)cell * CELL_BYTES;
    }
    unsigned page = cell / CELLS, in = cell % CELLS;
    CUdeviceptr offset = in < CELLS / 2 ? in * CELL_BYTES : PAGE - (CELLS - in) * CELL_BYTES;
    return p->k.base + (CUdeviceptr)page * PAGE + offset;
}

static ebbsim_range range_of(const program *p, const touch *t)
{
    CUdeviceptr start = cell_address(p, t->host, t->first);
    CUdeviceptr end = cell_address(p, t->host, t->last) + CELL_BYTES;
    return (ebbsim_range){start, end - start, t->access};
}

static void note_cells(const program *p, job *j)
{
    for (unsigned i = 0; i < j->touches; i++) {
        const touch *t = &j->at[i];
        for (unsigned cell = t->first; cell <= t->last; cell++) {
            unsigned object = t->host ? HOST : p->frame_at[cell / CELLS];
            j->reads[object][cell % CELLS] |= (t->access & EBBSIM_READ) != 0;
            j->writes[object][cell % CELLS] |= (t->access & EBBSIM_WRITE) != 0;
            if (!t->host) {
                j->pages[cell / CELLS] = j->once[cell / CELLS] = 1;
            }
        }
    }
}

/* `cells` neighbours, in one half of an object, so that any two such ranges are of equal length. */
static touch short_touch(program *p, bool host, unsigned cells, int access)
{
    unsigned half = CELLS / 2;
    unsigned first = below(&p->d, half - cells + 1) + half * below(&p->d, 2);
    first += host ? 0 : CELLS * below(&p->d, PAGES);
    return (touch){host, first, first + cells - 1, access};
}

static touch any_touch(program *p, bool long_ones)
{
    int access = 1 + (int)below(&p->d, 3);
    if (!long_ones || below(&p->d, 3) != 0) {
        return short_touch(p, below(&p->d, 5) == 0, 1 + below(&p->d, CELLS / 2), access);
    }
    unsigned a = below(&p->d, PAGES * CELLS), b = below(&p->d, PAGES * CELLS);
    return (touch){false, a < b ? a : b, a < b ? b : a, access};
}

/* ---- works ------------------------------------------------------------------------------------ */

static void nothing(void *data)
{
    (void)data;
}

static void queue_kernel(program *p, const lane *l, job *j)
{
    unsigned kind = below(&p->d, 4); /* most only declare what they touch: those may be large */
    j->touches = 1 + below(&p->d, RANGES);
    ebbsim_range ranges[RANGES];
    for (unsigned i = 0; i < j->touches; i++) {
        j->at[i] = any_touch(p, kind > 1);
        ranges[i] = range_of(p, &j->at[i]);
    }
    ebbsim_work work = {.size = sizeof work,
                        .name = "kernel",
                        .ranges = ranges,
                        .range_count = j->touches,
                        .nanoseconds = 1 + below(&p->d, 50000),
                        .function = kind == 0 ? nothing : NULL,
                        .now = kind == 1};
    OK(ebbsim_launch(&work, l->handle));
}

static void queue_copy(program *p, const lane *l, job *j)
{
    const ebb__driver *cu = &p->k.driver;
    unsigned cells = 1 + below(&p->d, CELLS / 2), kind = below(&p->d, 4);
    j->touches = 2;
    j->at[0] = short_touch(p, kind == 0, cells, EBBSIM_READ);
    j->at[1] = short_touch(p, kind == 1, cells, EBBSIM_WRITE);
    ebbsim_range from = range_of(p, &j->at[0]), to = range_of(p, &j->at[1]);
    if (kind == 0) {
        OK(cu->cuMemcpyHtoDAsync(to.address, (void *)(uintptr_t)from.address, to.bytes, l->handle));
    } else if (kind == 1) {
        OK(cu->cuMemcpyDtoHAsync((void *)(uintptr_t)to.address, from.address, to.bytes, l->handle));
    } else if (kind == 2) {
        OK(cu->cuMemcpyDtoDAsync(to.address, from.address, to.bytes, l->handle));
    } else {
        OK(cu->cuMemcpyPeerAsync(to.address, p->k.context[below(&p->d, 2)], from.address,
                                 p->k.context[below(&p->d, 2)], to.bytes, l->handle));
    }
}

static void queue_memset(program *p, const lane *l, job *j)
{
    j->touches = 1;
    j->at[0] = short_touch(p, below(&p->d, 5) == 0, 1 + below(&p->d, CELLS / 2), EBBSIM_WRITE);
    ebbsim_range r = range_of(p, &j->at[0]);
    OK(p->k.driver.cuMemsetD8Async(r.address, 1, r.bytes, l->handle));
}

/* Does a work race with an earlier one on memory that nobody has spoilt (must be reported), or on
   any (may be)? Spoils what it races on. */
static void judge(program *p, const job *j)
{
    bool is_before[ORDER_NODES];
    bool spoils[FRAMES + 1][CELLS] = {{false}};
    order_ancestors(&p->order, j->node, is_before);
    for (const job *earlier = p->jobs; earlier < j; earlier++) {
        for (unsigned i = 0; !is_before[earlier->node] && i < (FRAMES + 1) * CELLS; i++) {
            unsigned object = i / CELLS, cell = i % CELLS;
            if ((j->writes[object][cell] &&
                 (earlier->reads[object][cell] || earlier->writes[object][cell])) ||
                (j->reads[object][cell] && earlier->writes[object][cell])) {
                p->may[EBBSIM_HAZARD_RACE] = true;
                p->must[EBBSIM_HAZARD_RACE] |= !p->spoilt[object][cell];
                spoils[object][cell] = true;
                p->spoilt_host |= object == HOST;
            }
        }
    }
    for (unsigned i = 0; i < (FRAMES + 1) * CELLS; i++) {
        p->spoilt[i / CELLS][i % CELLS] |= spoils[i / CELLS][i % CELLS];
    }
}

static void finish_work(program *p, lane *l, job *j)
{
    j->node = queue_node(p, l);
    j->on = (unsigned)(l - p->lanes);
    note_cells(p, j);
    judge(p, j);
    works_queued++;
    races_found += p->may[EBBSIM_HAZARD_RACE];
}

static void step_work(program *p, lane *l)
{
    if (p->job_count == WORKS) {
        return;
    }
    job *j = &p->jobs[p->job_count++];
    memset(j, 0, sizeof *j);
    unsigned kind = below(&p->d, 4);
    if (kind < 2) {
        queue_kernel(p, l, j);
    } else if (kind == 2) {
        queue_copy(p, l, j);
    } else {
        queue_memset(p, l, j);
    }
    finish_work(p, l, j);
}

/* ---- what orders ------------------------------------------------------------------------------ */

static void step_record(program *p, lane *l)
{
    fence *f = &p->fences[below(&p->d, EVENTS)];
    if (f->device != l->device) {
        CHECK_EQ(p->k.driver.cuEventRecord(f->handle, l->handle), CUDA_ERROR_INVALID_HANDLE);
        return;
    }
    OK(p->k.driver.cuEventRecord(f->handle, l->handle));
    f->node = l->is_default ? queue_node(p, l) : node_behind(p, l);
}

static void step_record_context(program *p, lane *l)
{
    (void)l;
    fence *f = &p->fences[below(&p->d, EVENTS)];
    OK(p->k.driver.cuCtxRecordEvent(p->k.context[f->device], f->handle));
    f->node = context_node(p, f->device);
}

static void step_wait(program *p, lane *l)
{
    const fence *f = &p->fences[below(&p->d, EVENTS)];
    OK(p->k.driver.cuStreamWaitEvent(l->handle, f->handle, 0));
    if (f->node != 0) {
        order_after(&p->order, queue_node(p, l), f->node);
    }
}

static void step_synchronize_stream(program *p, lane *l)
{
    OK(p->k.driver.cuStreamSynchronize(l->handle));
    host_learns(p, idle_node(p, l));
}

static void step_query_stream(program *p, lane *l)
{
    CUresult code = p->k.driver.cuStreamQuery(l->handle);
    CHECK(code == CUDA_SUCCESS || code == CUDA_ERROR_NOT_READY);
    if (code == CUDA_SUCCESS) {
        host_learns(p, l->is_default ? node_behind(p, l) : l->tail);
    }
}

static void step_ask_event(program *p, lane *l)
{
    (void)l;
    const fence *f = &p->fences[below(&p->d, EVENTS)];
    CUresult code = below(&p->d, 3) == 0 ? p->k.driver.cuEventSynchronize(f->handle)
                                         : p->k.driver.cuEventQuery(f->handle);
    CHECK(code == CUDA_SUCCESS || code == CUDA_ERROR_NOT_READY);
    if (code == CUDA_SUCCESS) {
        host_learns(p, f->node);
    }
}

static void step_copy_to_pageable_memory(program *p, lane *l)
{
    if (p->job_count == WORKS) {
        return;
    }
    job *j = &p->jobs[p->job_count++];
    unsigned char buffer[CELLS * CELL_BYTES];
    *j = (job){.touches = 1};
    j->at[0] = short_touch(p, false, 1 + below(&p->d, CELLS / 2), EBBSIM_READ);
    ebbsim_range r = range_of(p, &j->at[0]);
    OK(p->k.driver.cuMemcpyDtoHAsync(buffer, r.address, r.bytes, l->handle));
    finish_work(p, l, j);
    host_learns(p, j->node);
}

static void set_flag(void *flag)
{
    __atomic_store_n((int *)flag, 1, __ATOMIC_RELEASE);
}

/* A function on the driver's thread knows what it was queued behind; who hears from it does too. */
static void step_host_function(program *p, lane *l)
{
    static int flag;
    __atomic_store_n(&flag, 0, __ATOMIC_RELEASE);
    OK(p->k.driver.cuLaunchHostFunc(l->handle, set_flag, &flag));
    unsigned n = queue_node(p, l);
    while (__atomic_load_n(&flag, __ATOMIC_ACQUIRE) == 0) {
        sched_yield();
    }
    host_learns(p, n);
}

static void everything_is_observed(program *p)
{
    for (int device = 0; device < 2; device++) {
        OK(p->k.driver.cuCtxSetCurrent(p->k.context[device]));
        OK(p->k.driver.cuCtxSynchronize());
        host_learns(p, context_node(p, device));
    }
    memset(p->spoilt, 0, sizeof p->spoilt);
}

static void step_pass(program *p, lane *l)
{
    (void)l;
    ebbsim_pass(below(&p->d, 200000));
}

/* ---- streams, events and pages that come and go ------------------------------------------------ */

static void add_lane(program *p, int device, bool blocking)
{
    lane *l = &p->lanes[p->lane_count++];
    *l = (lane){.device = device, .blocking = blocking, .alive = true};
    OK(p->k.driver.cuCtxSetCurrent(p->k.context[device]));
    OK(p->k.driver.cuStreamCreate(&l->handle, blocking ? 0 : CU_STREAM_NON_BLOCKING));
}

/* The default stream, and the thread's own, which is a blocking stream like any. */
static void add_lasting_lanes(program *p, int device)
{
    p->lanes[p->lane_count++] = (lane){
        .device = device, .blocking = true, .is_default = true, .alive = true, .lasts = true};
    p->lanes[p->lane_count++] = (lane){.handle = CU_STREAM_PER_THREAD,
                                       .device = device,
                                       .blocking = true,
                                       .alive = true,
                                       .lasts = true};
}

static void step_replace_stream(program *p, lane *l)
{
    if (!l->lasts && p->lane_count < LANES) {
        OK(p->k.driver.cuStreamDestroy(l->handle));
        l->alive = false;
        add_lane(p, l->device, below(&p->d, 2));
    }
}

static void make_event(program *p, fence *f)
{
    f->device = (int)below(&p->d, 2);
    f->node = 0;
    OK(p->k.driver.cuCtxSetCurrent(p->k.context[f->device]));
    OK(p->k.driver.cuEventCreate(&f->handle, CU_EVENT_DISABLE_TIMING));
}

static void step_replace_event(program *p, lane *l)
{
    (void)l;
    fence *f = &p->fences[below(&p->d, EVENTS)];
    OK(p->k.driver.cuEventDestroy(f->handle));
    make_event(p, f);
}

static void put_frame(program *p, unsigned page, unsigned frame)
{
    CUdeviceptr at = kit_map(&p->k, page, p->frames[frame], 0);
    kit_access(&p->k, at, 1);
    p->frame_at[page] = frame;
}

/* Of a byte, the last write and each stream's last read since are remembered, and by which address:
   a work may be forgotten when another has done the same through another page. */
static bool remembered(const program *p, const job *j, unsigned object)
{
    bool found = false;
    for (unsigned cell = 0; cell < CELLS; cell++) {
        bool still = j->reads[object][cell] || j->writes[object][cell];
        for (const job *later = j + 1; later < p->jobs + p->job_count; later++) {
            still &= !later->writes[object][cell];
            still &= !later->reads[object][cell] || j->writes[object][cell] || later->on != j->on;
        }
        found |= still;
    }
    return found;
}

/* Another frame moves behind a page. A hazard, if work through this page is not observed; and if it
   is not over either, the context is lost, and the program ends here. */
static void step_remap(program *p, lane *l)
{
    (void)l;
    unsigned page = below(&p->d, PAGES);
    if (below(&p->d, 4) != 0) {
        ebbsim_pass(1000000000); /* everything is over, and nobody has looked */
    } else {
        p->ends = true;
    }
    bool is_before[ORDER_NODES];
    order_ancestors(&p->order, p->host, is_before);
    for (job *j = p->jobs; j < p->jobs + p->job_count; j++) {
        if (j->once[page] && !is_before[j->node]) {
            p->may[EBBSIM_HAZARD_UNMAP] = true;
            p->must[EBBSIM_HAZARD_UNMAP] |=
                j->pages[page] && remembered(p, j, p->frame_at[page]) && !j->left;
            j->left = true;
        }
        j->pages[page] = 0;
    }
    OK(p->k.driver.cuMemUnmap(p->k.base + (CUdeviceptr)page * PAGE, PAGE));
    unmaps_found += p->may[EBBSIM_HAZARD_UNMAP];
    p->ends &= p->may[EBBSIM_HAZARD_UNMAP];
    if (!p->ends) {
        put_frame(p, page, below(&p->d, FRAMES));
    }
}

/* ---- programs --------------------------------------------------------------------------------- */

static void start(program *p, uint64_t seed)
{
    *p = (program){.d = {seed}, .seed = seed};
    order_start(&p->order);
    kit_start(&p->k, 2, 256 * (uint64_t)MIB, 1);
    for (unsigned i = 0; i < FRAMES; i++) {
        p->frames[i] = kit_frame(&p->k, i == 0);
    }
    for (unsigned i = 0; i < PAGES; i++) {
        put_frame(p, i, below(&p->d, FRAMES));
    }
    p->pinned = kit_host(&p->k, CELLS * CELL_BYTES, 0);
    for (int device = 0; device < 2; device++) {
        add_lasting_lanes(p, device);
        for (unsigned i = 1 + below(&p->d, 3); i > 0; i--) {
            add_lane(p, device, below(&p->d, 2));
        }
    }
    for (unsigned i = 0; i < EVENTS; i++) {
        make_event(p, &p->fences[i]);
    }
}

/* What was reported for this step against what there was to report. */
static void compare(const program *p)
{
    unsigned long long seed = p->seed;
    bool seen[2] = {false, false};
    ebbsim_hazard h;
    for (unsigned long i = 0; ebbsim_hazard_get(i, &h) == 0; i++) {
        bool source = h.kind == EBBSIM_HAZARD_SOURCE && p->spoilt_host;
        if (!source && (h.kind > EBBSIM_HAZARD_UNMAP || !p->may[h.kind])) {
            FAIL("seed %llu, step %u: there is no hazard, but the report: %s", seed, p->steps,
                 h.text);
        } else if (!source) {
            seen[h.kind] = true;
        }
    }
    for (int kind = EBBSIM_HAZARD_RACE; kind <= EBBSIM_HAZARD_UNMAP; kind++) {
        if (p->must[kind] && !seen[kind]) {
            FAIL("seed %llu, step %u: %s, and no report", seed, p->steps,
                 kind == EBBSIM_HAZARD_RACE ? "a race" : "an unmap under unfinished work");
        }
    }
    const char *wrong = ebbsim_check();
    if (wrong != NULL) {
        FAIL("seed %llu, step %u: %s", seed, p->steps, wrong);
    }
}

static void play(program *p, uint64_t seed)
{
    static const struct {
        void (*step)(program *, lane *);
        unsigned share;
    } steps[] = {{step_work, 44},
                 {step_record, 14},
                 {step_wait, 14},
                 {step_record_context, 3},
                 {step_synchronize_stream, 3},
                 {step_query_stream, 5},
                 {step_ask_event, 5},
                 {step_pass, 4},
                 {step_replace_stream, 3},
                 {step_replace_event, 1},
                 {step_copy_to_pageable_memory, 1},
                 {step_host_function, 1},
                 {step_remap, 2}};
    start(p, seed);
    for (unsigned count = 10 + below(&p->d, 60); p->steps < count && !p->ends; p->steps++) {
        lane *l = &p->lanes[below(&p->d, p->lane_count)];
        if (!l->alive) {
            continue;
        }
        OK(p->k.driver.cuCtxSetCurrent(p->k.context[l->device]));
        ebbsim_hazard_clear();
        unsigned which = 0, thrown = below(&p->d, 100);
        while (thrown >= steps[which].share) {
            thrown -= steps[which++].share;
        }
        memset(p->must, 0, sizeof p->must);
        memset(p->may, 0, sizeof p->may);
        steps[which].step(p, l);
        compare(p);
        if (p->may[EBBSIM_HAZARD_RACE] && below(&p->d, 2) == 0) {
            everything_is_observed(p);
        }
    }
}

int main(int argc, char **argv)
{
    unsigned long programs = argc > 1 ? strtoul(argv[1], NULL, 10) : SCALED(12000, 2500);
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    static program p;
    for (uint64_t seed = first; seed < first + programs && harness_failures < 20; seed++) {
        play(&p, seed);
    }
    ebbsim_reset();
    harness_tests++;
    printf("%s %lu programs: %lu works of which %lu race, %lu unmaps under unfinished work\n",
           harness_failures == 0 ? "ok    " : "FAILED", programs, works_queued, races_found,
           unmaps_found);
    return REPORT();
}

/* Choosing, comparing, and the GPU's work, for the core's model test. */
#include "core_world.h"

int world_any_bar(world *w)
{
    unsigned start = below(&w->d, MODEL_BARS);
    for (unsigned i = 0; i < MODEL_BARS; i++)
        if (w->m.bars[(start + i) % MODEL_BARS].alive)
            return (int)((start + i) % MODEL_BARS);
    return -1;
}

unsigned world_any_lane(world *w)
{
    unsigned start = below(&w->d, STREAMS);
    while (!w->lanes[start % STREAMS].alive)
        start++;
    return start % STREAMS;
}

unsigned world_promises(world *w)
{
    return below(&w->d, 2) ? EBB_NEVER_CAPTURES : 0;
}

void world_settle(world *w, const model *then)
{
    (void)w;
    if (then->depends)
        ebbsim_pass(UINT64_C(1000000000000));
}

/* ---- comparing ----------------------------------------------------------------------------------- */

static void compare_bar(world *w, unsigned b)
{
    const model_bar *bar = &w->m.bars[b];
    ebb_vbar_stats s = {.size = sizeof s};
    uint8_t flags[MODEL_PAGES] = {0};
    uint64_t resident = 0, pinned = 0;
    EXPECT(w, ebb_vbar_get_stats(w->bars[b].handle, &s), EBB_OK);
    EXPECT(w, ebb_vbar_residency(w->bars[b].handle, flags, bar->pages), EBB_OK);
    for (unsigned p = 0; p < bar->pages; p++) {
        int expected =
            (bar->generation[p] ? EBB_PAGE_RESIDENT : 0) | (bar->pins[p] ? EBB_PAGE_PINNED : 0);
        if (flags[p] != expected)
            WORLD_FAIL(w, "VBAR %u, page %u of %u has flags %d, the model says %d", b, p,
                       bar->pages, flags[p], expected);
        resident += bar->generation[p] ? model_page_bytes(bar, p) : 0;
        pinned += bar->pins[p] ? model_page_bytes(bar, p) : 0;
    }
    EXPECT(w, s.bytes, bar->bytes);
    EXPECT(w, s.pages, bar->pages);
    EXPECT(w, s.allocated, bar->taken);
    EXPECT(w, s.resident, resident);
    EXPECT(w, s.pinned, pinned);
    EXPECT(w, s.held, 0);
    EXPECT(w, s.watermark, model_page_offset(bar, bar->watermark));
    EXPECT(w, s.watermark_limit, model_page_offset(bar, bar->watermark_limit));
    EXPECT(w, s.hits, bar->hits);
    EXPECT(w, s.misses, bar->misses);
    EXPECT(w, s.offloaded, bar->offloaded);
    EXPECT(w, s.loads, bar->loads);
    for (int i = 0; i < EBB_REASONS; i++)
        EXPECT(w, s.evictions[i], bar->evictions[i]);
}

static void compare_device(world *w)
{
    const model *m = &w->m;
    ebb_device_stats s = {.size = sizeof s};
    uint64_t vbars = 0;
    for (unsigned b = 0; b < MODEL_BARS; b++)
        vbars += m->bars[b].alive;
    EXPECT(w, ebb_device_get_stats(w->device, &s), EBB_OK);
    EXPECT(w, s.total, m->memory);
    EXPECT(w, s.free, model_free(m));
    EXPECT(w, s.limit, m->limit);
    EXPECT(w, s.headroom, m->headroom);
    EXPECT(w, s.held, model_held(m));
    EXPECT(w, s.resident, model_resident(m));
    EXPECT(w, s.unused, model_held(m) - model_resident(m));
    EXPECT(w, s.poisoned, 0);
    EXPECT(w, s.vbars, vbars);
    EXPECT(w, s.hits, m->hits);
    EXPECT(w, s.misses, m->misses);
    EXPECT(w, s.offloaded, m->offloaded);
    EXPECT(w, s.frames_created, m->created);
    EXPECT(w, s.frames_recycled, m->recycled);
    EXPECT(w, s.frames_released, m->released);
    for (int i = 0; i < EBB_REASONS; i++)
        EXPECT(w, s.evictions[i], m->evictions[i]);
    /* What is above the limit is pinned: it was lowered under it. */
    if (s.held > s.limit)
        EXPECT(w, s.held, s.pinned);
}

void world_compare(world *w, unsigned b)
{
    if (w->m.bars[b].alive)
        compare_bar(w, b);
    compare_device(w);
}

/* ---- the GPU's work ------------------------------------------------------------------------------ */

/* What identifies the bytes of a weight in a page. */
typedef struct stamp {
    uint32_t serial, version;
    uint64_t offset;
} stamp;

typedef struct job {
    world *w;
    bool write;
    unsigned count;
    uint64_t at[MODEL_PAGES];
    stamp stamps[MODEL_PAGES];
} job;

static void run_job(void *data)
{
    job *j = data;
    for (unsigned i = 0; i < j->count; i++) {
        stamp *there = (void *)(uintptr_t)j->at[i]; /* simulated memory is the host's */
        if (j->write)
            *there = j->stamps[i];
        else if (memcmp(there, &j->stamps[i], sizeof *there) != 0)
            WORLD_FAIL(j->w,
                       "VBAR %u, offset %llx, should hold version %u and holds version %u of "
                       "VBAR %u, offset %llx",
                       j->stamps[i].serial, (unsigned long long)j->stamps[i].offset,
                       j->stamps[i].version, there->version, there->serial,
                       (unsigned long long)there->offset);
    }
    j->w->late--;
    free(j);
}

/* Queue a kernel that fills a weight with what is its own, or finds that there. */
void world_use(world *w, unsigned b, int which, bool write, CUstream stream)
{
    const weight *its = &w->bars[b].weights[which];
    const model_bar *bar = &w->m.bars[b];
    unsigned first = 0, last = 0;
    model_span(bar, (ebb_range){its->offset, its->bytes}, &first, &last);
    job *j = calloc(1, sizeof *j);
    REQUIRE(j != NULL);
    j->w = w;
    j->write = write;
    ebbsim_range ranges[MODEL_PAGES];
    for (unsigned p = first; p <= last; p++) {
        uint64_t begin = model_page_offset(bar, p), end = begin + model_page_bytes(bar, p);
        begin = its->offset > begin ? its->offset : begin;
        end = its->offset + its->bytes < end ? its->offset + its->bytes : end;
        j->at[j->count] = w->bars[b].address + begin;
        j->stamps[j->count] = (stamp){w->bars[b].serial, its->version, begin};
        /* A kernel's writes are few, because each byte of them is really written. */
        ranges[j->count] = (ebbsim_range){j->at[j->count], write ? sizeof(stamp) : end - begin,
                                          write ? EBBSIM_WRITE : EBBSIM_READ};
        j->count++;
    }
    static const uint64_t durations[] = {1000, 20000, 500000, 10000000};
    ebbsim_work work = {.size = sizeof work,
                        .name = write ? "fill" : "use",
                        .ranges = ranges,
                        .range_count = j->count,
                        .nanoseconds = durations[below(&w->d, 4)],
                        .function = run_job,
                        .data = j};
    w->late++;
    OK(ebbsim_launch(&work, stream));
}

/* The naive model of the core: see core_model.h. */
#include "core_model.h"

static const uint64_t frame_bytes[MODEL_KINDS] = {UINT64_C(32) << 20, UINT64_C(2) << 20};
enum { BIG, LITTLE, AT_ONCE = 64 /* victims taken at a time */ };

/* ---- sizes and sums ----------------------------------------------------------------------------- */

static int kind_of(const model_bar *bar, unsigned page)
{
    return page < bar->large ? BIG : LITTLE;
}

uint64_t model_page_bytes(const model_bar *bar, unsigned page)
{
    return frame_bytes[kind_of(bar, page)];
}

uint64_t model_page_offset(const model_bar *bar, unsigned page)
{
    uint64_t offset = 0;
    for (unsigned i = 0; i < page; i++)
        offset += model_page_bytes(bar, i);
    return offset;
}

uint64_t model_resident(const model *m)
{
    uint64_t sum = 0;
    for (unsigned b = 0; b < MODEL_BARS; b++)
        for (unsigned p = 0; m->bars[b].alive && p < m->bars[b].pages; p++)
            sum += m->bars[b].generation[p] ? model_page_bytes(&m->bars[b], p) : 0;
    return sum;
}

uint64_t model_held(const model *m)
{
    return model_resident(m) + m->unused[BIG] * frame_bytes[BIG] +
           m->unused[LITTLE] * frame_bytes[LITTLE];
}

uint64_t model_free(const model *m)
{
    uint64_t used = m->foreign + model_held(m);
    return used < m->memory ? m->memory - used : 0;
}

bool model_span(const model_bar *bar, ebb_range range, unsigned *first, unsigned *last)
{
    if (!range.bytes || range.offset > bar->bytes || range.bytes > bar->bytes - range.offset)
        return false;
    for (unsigned p = 0; p < bar->pages; p++) {
        uint64_t begin = model_page_offset(bar, p), end = begin + model_page_bytes(bar, p);
        if (range.offset >= begin && range.offset < end)
            *first = p;
        if (range.offset + range.bytes > begin && range.offset + range.bytes <= end)
            *last = p;
    }
    return true;
}

/* ---- who gives memory up ------------------------------------------------------------------------ */

/* What is asked for: frames by kind; whose pages may go for it. */
typedef struct wish {
    uint64_t need[MODEL_KINDS], got[MODEL_KINDS];
    bool all;     /* every VBAR's pages may go, else only those less important than... */
    int64_t rank; /* ...this */
    unsigned above;
    ebb_reason reason;
    bool may_wait;
} wish;

typedef struct victim {
    unsigned bar, page;
} victim;

/* The least important unpinned page that may go and is not among the first `count` victims. */
static bool next_victim(const model *m, const wish *w, const victim *victims, unsigned count,
                        victim *found)
{
    bool any = false;
    for (unsigned b = 0; b < MODEL_BARS; b++) {
        const model_bar *bar = &m->bars[b];
        for (unsigned p = 0; bar->alive && p < bar->pages; p++) {
            bool less = w->all || bar->rank < w->rank || (bar->rank == w->rank && p >= w->above);
            if (!less || !bar->generation[p] || bar->pins[p])
                continue;
            for (unsigned i = 0; i < count && less; i++)
                less = victims[i].bar != b || victims[i].page != p;
            if (!less)
                continue;
            int64_t best = any ? m->bars[found->bar].rank : 0;
            if (!any || bar->rank < best || (bar->rank == best && p > found->page))
                *found = (victim){b, p};
            any = true;
        }
    }
    return any;
}

static void give_up(model *m, victim v, ebb_reason reason)
{
    model_bar *bar = &m->bars[v.bar];
    bar->generation[v.page] = 0;
    m->unused[kind_of(bar, v.page)]++;
    bar->evictions[reason]++;
    m->evictions[reason]++;
    if (v.page < bar->watermark)
        bar->watermark = v.page;
}

/* With `whole`: if there are not enough, none goes. */
static uint64_t evict(model *m, const wish *w, uint64_t bytes, bool whole)
{
    victim victims[AT_ONCE];
    unsigned count = 0;
    uint64_t sum = 0, least = UINT64_MAX;
    while (count < AT_ONCE && sum < bytes && next_victim(m, w, victims, count, &victims[count])) {
        uint64_t its = model_page_bytes(&m->bars[victims[count].bar], victims[count].page);
        sum += its;
        least = its < least ? its : least;
        count++;
    }
    if (whole && sum < bytes && count < AT_ONCE)
        return 0;
    /* Without some of them it might be enough: then those that can go at once decide. */
    if (count && (!w->may_wait || sum - least >= bytes))
        m->depends = true;
    for (unsigned i = 0; i < count; i++)
        give_up(m, victims[i], w->reason);
    return sum;
}

static uint64_t release(model *m, int kind, uint64_t bytes)
{
    uint64_t freed = 0;
    while (freed < bytes && m->unused[kind]) {
        m->unused[kind]--;
        m->released++;
        freed += frame_bytes[kind];
    }
    return freed;
}

static bool shrink(model *m, uint64_t bytes, bool may_wait)
{
    wish w = {.all = true, .reason = EBB_FOR_LIMIT, .may_wait = may_wait};
    for (;;) {
        for (int kind = 0; kind < MODEL_KINDS; kind++)
            if (model_held(m) > bytes)
                release(m, kind, model_held(m) - bytes);
        if (model_held(m) <= bytes)
            return true;
        if (!evict(m, &w, model_held(m) - bytes, false))
            return false;
    }
}

/* Frames in hand are held: they are counted as unused until the wish is over. */
static uint64_t hand_bytes(const wish *w)
{
    return w->got[BIG] * frame_bytes[BIG] + w->got[LITTLE] * frame_bytes[LITTLE];
}

static void take_unused(model *m, wish *w)
{
    for (int kind = 0; kind < MODEL_KINDS; kind++) {
        while (w->need[kind] && m->unused[kind]) {
            m->unused[kind]--;
            m->recycled++;
            w->need[kind]--;
            w->got[kind]++;
        }
    }
}

/* What is left of the room for new ones. */
static uint64_t take_new(model *m, wish *w)
{
    uint64_t held = model_held(m) + hand_bytes(w), used = held + m->foreign;
    uint64_t room = m->limit > held ? m->limit - held : 0;
    uint64_t left = m->memory > used ? m->memory - used : 0;
    left = left > m->headroom ? left - m->headroom : 0;
    room = left < room ? left : room;
    for (int kind = 0; kind < MODEL_KINDS; kind++) {
        while (w->need[kind] && room >= frame_bytes[kind]) {
            room -= frame_bytes[kind];
            m->created++;
            w->need[kind]--;
            w->got[kind]++;
        }
    }
    return room;
}

/* Get all frames of a wish, or none. */
static bool make_room(model *m, wish *w)
{
    uint64_t missing = w->need[BIG] * frame_bytes[BIG] + w->need[LITTLE] * frame_bytes[LITTLE];
    bool possible = missing <= m->limit && (model_held(m) <= m->limit || shrink(m, m->limit, true));
    while (possible) {
        take_unused(m, w);
        uint64_t room = take_new(m, w);
        if (!w->need[BIG] && !w->need[LITTLE])
            return true;
        missing = w->need[BIG] * frame_bytes[BIG] + w->need[LITTLE] * frame_bytes[LITTLE];
        /* Free frames of the other size make room, if only one size is asked for. */
        int other = w->need[BIG] ? LITTLE : BIG;
        if ((!w->need[BIG] || !w->need[LITTLE]) && release(m, other, missing))
            continue;
        /* What is left of the room is too little for a frame, and counts all the same. */
        possible = evict(m, w, missing > room ? missing - room : 1, true) > 0;
    }
    for (int kind = 0; kind < MODEL_KINDS; kind++)
        m->unused[kind] += w->got[kind];
    return false;
}

/* ---- calls -------------------------------------------------------------------------------------- */

void model_create(model *m, unsigned b, uint64_t bytes)
{
    bytes = (bytes + frame_bytes[LITTLE] - 1) / frame_bytes[LITTLE] * frame_bytes[LITTLE];
    model_bar bar = {.alive = true, .bytes = bytes, .rank = ++m->top};
    bar.large = (unsigned)(bytes / frame_bytes[BIG]);
    bar.pages = bar.large + (unsigned)(bytes % frame_bytes[BIG] / frame_bytes[LITTLE]);
    bar.watermark = bar.watermark_limit = bar.pages;
    m->bars[b] = bar;
}

ebb_status model_destroy(model *m, unsigned b)
{
    model_bar *bar = &m->bars[b];
    for (unsigned p = 0; p < bar->pages; p++)
        if (bar->pins[p])
            return EBB_BUSY;
    for (unsigned p = 0; p < bar->pages; p++)
        m->unused[kind_of(bar, p)] += bar->generation[p] > 0;
    bar->alive = false;
    return EBB_OK;
}

ebb_status model_alloc(model *m, unsigned b, uint64_t bytes, uint64_t *offset)
{
    model_bar *bar = &m->bars[b];
    if (!bytes)
        return EBB_INVALID;
    if (bytes > bar->bytes - bar->taken)
        return EBB_FULL;
    *offset = bar->taken;
    bar->taken += (bytes + 511) / 512 * 512;
    return EBB_OK;
}

/* Put frames behind the absent pages of a fault. false: it is offloaded. */
static bool load(model *m, model_bar *bar, const bool *wanted)
{
    wish w = {.rank = bar->rank, .reason = EBB_FOR_WEIGHT, .may_wait = true};
    for (unsigned p = 0; p < bar->pages; p++) {
        if (!wanted[p] || bar->generation[p])
            continue;
        if (p >= bar->watermark)
            return false;
        w.need[kind_of(bar, p)]++;
        w.above = p + 1;
    }
    /* What the fault wants and has must not go for what it wants and has not. */
    for (unsigned p = 0; p < bar->pages; p++)
        bar->pins[p] += wanted[p] && bar->generation[p];
    bool done = make_room(m, &w);
    for (unsigned p = 0; p < bar->pages; p++)
        bar->pins[p] -= wanted[p] && bar->generation[p];
    return done;
}

ebb_status model_fault(model *m, unsigned b, const ebb_range *ranges, unsigned count,
                       uint64_t *signatures)
{
    model_bar *bar = &m->bars[b];
    bool wanted[MODEL_PAGES] = {false}, missing = false;
    unsigned first = 0, last = 0;
    for (unsigned i = 0; i < count; i++)
        if (!model_span(bar, ranges[i], &first, &last))
            return EBB_INVALID;
    for (unsigned i = 0; i < count; i++) {
        model_span(bar, ranges[i], &first, &last);
        for (unsigned p = first; p <= last; p++) {
            wanted[p] = true;
            missing = missing || !bar->generation[p];
        }
    }
    if (missing && !load(m, bar, wanted)) {
        bar->offloaded += count;
        m->offloaded += count;
        return EBB_OFFLOADED;
    }
    for (unsigned i = 0; i < count; i++) {
        model_span(bar, ranges[i], &first, &last);
        for (unsigned p = first; p <= last; p++) {
            bar->loads += !bar->generation[p];
            if (!bar->generation[p])
                bar->generation[p] = ++m->generation;
            bar->pins[p]++;
        }
    }
    for (unsigned i = 0; i < count; i++) {
        model_span(bar, ranges[i], &first, &last);
        signatures[i] = 0;
        for (unsigned p = first; p <= last; p++)
            if (bar->generation[p] > signatures[i])
                signatures[i] = bar->generation[p];
    }
    *(missing ? &bar->misses : &bar->hits) += count;
    *(missing ? &m->misses : &m->hits) += count;
    return EBB_OK;
}

ebb_status model_filled(model *m, unsigned b, ebb_range range)
{
    const model_bar *bar = &m->bars[b];
    unsigned first = 0, last = 0;
    if (!model_span(bar, range, &first, &last))
        return EBB_INVALID;
    for (unsigned p = first; p <= last; p++)
        if (!bar->pins[p])
            return EBB_NOT_PINNED;
    if (model_held(m) > m->limit)
        shrink(m, m->limit, false);
    return EBB_OK;
}

ebb_status model_unpin(model *m, unsigned b, const ebb_range *ranges, unsigned count)
{
    model_bar *bar = &m->bars[b];
    unsigned less[MODEL_PAGES] = {0}, first = 0, last = 0;
    for (unsigned i = 0; i < count; i++)
        if (!model_span(bar, ranges[i], &first, &last))
            return EBB_INVALID;
    for (unsigned i = 0; i < count; i++) {
        model_span(bar, ranges[i], &first, &last);
        for (unsigned p = first; p <= last; p++)
            less[p]++;
    }
    for (unsigned p = 0; p < bar->pages; p++)
        if (less[p] > bar->pins[p])
            return EBB_NOT_PINNED;
    for (unsigned p = 0; p < bar->pages; p++)
        bar->pins[p] -= less[p];
    if (model_held(m) > m->limit)
        shrink(m, m->limit, false);
    return EBB_OK;
}

void model_prioritize(model *m, unsigned b)
{
    m->bars[b].rank = ++m->top;
    m->bars[b].watermark = m->bars[b].watermark_limit;
}

void model_deprioritize(model *m, unsigned b)
{
    m->bars[b].rank = --m->bottom;
}

void model_trade(model *m, unsigned b, unsigned other)
{
    int64_t rank = m->bars[b].rank;
    m->bars[b].rank = m->bars[other].rank;
    m->bars[other].rank = rank;
}

uint64_t model_free_memory(model *m, unsigned b, uint64_t bytes)
{
    model_bar *bar = &m->bars[b];
    uint64_t freed = 0;
    for (unsigned p = bar->pages; p-- > 0 && freed < bytes;) {
        if (!bar->generation[p] || bar->pins[p])
            continue;
        give_up(m, (victim){b, p}, EBB_FOR_ASKING);
        freed += release(m, kind_of(bar, p), 1);
    }
    return freed;
}

/* The first page that begins at or above `bytes`. */
static unsigned page_from(const model_bar *bar, uint64_t bytes)
{
    unsigned page = 0;
    while (page < bar->pages && model_page_offset(bar, page) < bytes)
        page++;
    return page;
}

void model_set_watermark(model *m, unsigned b, uint64_t bytes)
{
    model_bar *bar = &m->bars[b];
    unsigned page = page_from(bar, bytes);
    bar->watermark = page < bar->watermark_limit ? page : bar->watermark_limit;
}

void model_set_watermark_limit(model *m, unsigned b, uint64_t bytes)
{
    model_bar *bar = &m->bars[b];
    bar->watermark_limit = page_from(bar, bytes);
    if (bar->watermark > bar->watermark_limit)
        bar->watermark = bar->watermark_limit;
}

ebb_status model_set_limit(model *m, uint64_t bytes)
{
    m->limit = bytes == EBB_DEFAULT ? m->memory : bytes;
    return shrink(m, m->limit, true) ? EBB_OK : EBB_BUSY;
}

uint64_t model_trim(model *m)
{
    return release(m, BIG, UINT64_MAX) + release(m, LITTLE, UINT64_MAX);
}

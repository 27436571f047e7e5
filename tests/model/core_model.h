/*
 * What the core must do, written down as simply as possible: arrays, linear scans, and a copy of the
 * whole where one is needed. Nothing here is shared with the core; the rules are those of ebbtide.h
 * and of "Who gives memory up".
 *
 * GPU time is not in it. Where it would decide which of several victims goes (some could go at once,
 * others are still in use by the GPU), the model says so in `depends`, and is right if no GPU work is
 * unfinished.
 */
#ifndef EBB_CORE_MODEL_H
#define EBB_CORE_MODEL_H

#include <stdbool.h>

#include "ebbtide.h"

enum { MODEL_BARS = 7, MODEL_PAGES = 32, MODEL_KINDS = 2 };

typedef struct model_bar {
    bool alive;
    uint64_t bytes, taken;
    unsigned pages, large; /* the first `large` are large */
    unsigned pins[MODEL_PAGES];
    uint64_t generation[MODEL_PAGES]; /* of the frame behind it; 0: none */
    unsigned watermark, watermark_limit;
    int64_t rank;
    uint64_t hits, misses, offloaded, loads, evictions[EBB_REASONS];
} model_bar;

typedef struct model {
    uint64_t memory, foreign, limit, headroom;
    uint64_t unused[MODEL_KINDS]; /* free frames: large, small */
    model_bar bars[MODEL_BARS];
    int64_t top, bottom;
    uint64_t generation;
    uint64_t hits, misses, offloaded, evictions[EBB_REASONS];
    uint64_t created, recycled, released;
    bool depends; /* the outcome depends on what the GPU has finished */
} model;

uint64_t model_page_bytes(const model_bar *bar, unsigned page);
uint64_t model_page_offset(const model_bar *bar, unsigned page);
uint64_t model_resident(const model *m);
uint64_t model_held(const model *m);
uint64_t model_free(const model *m);

/* The pages of a range; false: it is no range of this VBAR. */
bool model_span(const model_bar *bar, ebb_range range, unsigned *first, unsigned *last);

void model_create(model *m, unsigned bar, uint64_t bytes);
ebb_status model_destroy(model *m, unsigned bar);
ebb_status model_alloc(model *m, unsigned bar, uint64_t bytes, uint64_t *offset);
ebb_status model_fault(model *m, unsigned bar, const ebb_range *ranges, unsigned count,
                       uint64_t *signatures);
ebb_status model_filled(model *m, unsigned bar, ebb_range range);
ebb_status model_unpin(model *m, unsigned bar, const ebb_range *ranges, unsigned count);
void model_prioritize(model *m, unsigned bar);
void model_deprioritize(model *m, unsigned bar);
void model_trade(model *m, unsigned bar, unsigned other);
uint64_t model_free_memory(model *m, unsigned bar, uint64_t bytes);
void model_set_watermark(model *m, unsigned bar, uint64_t bytes);
void model_set_watermark_limit(model *m, unsigned bar, uint64_t bytes);
ebb_status model_set_limit(model *m, uint64_t bytes);
uint64_t model_trim(model *m);

#endif

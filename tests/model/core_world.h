/*
 * The world of the core's model test: a device with VBARs, weights in them, streams, pins, and the
 * model beside it. Split by what the operations are about.
 */
#ifndef EBB_CORE_WORLD_H
#define EBB_CORE_WORLD_H

#include "core_model.h"
#include "sim_kit.h"

enum { WEIGHTS = 12, STREAMS = 8, PINS = 24, BATCH = 4, LASTING = 3 /* the first streams */ };

typedef struct weight {
    uint64_t offset, bytes;
    uint64_t signature; /* under which it was filled last; 0: never */
    uint32_t version;
} weight;

typedef struct shelf { /* a VBAR, and what is in it */
    ebb_vbar handle;
    uint64_t address;
    uint32_t serial; /* no two VBARs of a play have the same */
    weight weights[WEIGHTS];
    unsigned weight_count;
} shelf;

typedef struct lane {
    CUstream handle;
    bool alive, lasting;
} lane;

typedef struct pin {
    bool used;
    unsigned bar, lane, count;
    ebb_range ranges[BATCH];
    int weights[BATCH]; /* which weight a range is, if its bytes are right; -1: none */
} pin;

typedef struct world {
    uint64_t seed;
    unsigned long step;
    const char *doing;
    int failures;
    dice d;
    ebb__driver cu;
    ebb_device device;
    model m;
    shelf bars[MODEL_BARS];
    lane lanes[STREAMS];
    pin pins[PINS];
    ebb_vbar stale;
    uint32_t serials;
    unsigned long late; /* kernels that have not run yet */
} world;

#define WORLD_FAIL(w, ...)                                                                         \
    do {                                                                                           \
        FAIL("seed %llu, step %lu, %s:", (unsigned long long)(w)->seed, (w)->step, (w)->doing);    \
        FAIL(__VA_ARGS__);                                                                         \
        (w)->failures++;                                                                           \
    } while (0)

#define EXPECT(w, got, expected)                                                                   \
    do {                                                                                           \
        long long got_ = (long long)(got), expected_ = (long long)(expected);                      \
        if (got_ != expected_)                                                                     \
            WORLD_FAIL(w, "%s is %lld, the model says %lld", #got, got_, expected_);               \
    } while (0)

typedef void operation(world *w);

/* ---- core_world.c: choosing, comparing, GPU work ------------------------------------------------- */

int world_any_bar(world *w);       /* one that is alive; -1: there is none */
unsigned world_any_lane(world *w); /* one that is alive */
unsigned world_promises(world *w); /* of a lane: none captures, so each is true */
void world_settle(world *w,
                  const model *then);     /* if `then` depends on the GPU's work: see it over */
void world_compare(world *w, unsigned b); /* a VBAR and the device with the model */
void world_use(world *w, unsigned b, int which, bool write, CUstream stream);

/* ---- core_ops.c ---------------------------------------------------------------------------------- */

operation op_create, op_destroy, op_alloc, op_fault, op_fault_many, op_unpin, op_work,
    op_prioritize, op_deprioritize, op_trade, op_free_memory, op_watermark, op_watermark_limit,
    op_limit, op_headroom, op_trim, op_stream, op_keep, op_foreign, op_pass, op_wrong;

void world_unpin(world *w, pin *p);

#endif

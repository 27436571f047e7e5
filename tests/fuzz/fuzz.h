/*
 * What the parts of the fuzz target share: the input, and what was got by the calls so far.
 */
#ifndef EBB_FUZZ_H
#define EBB_FUZZ_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "driver.h"
#include "ebbtide_sim.h"

enum { POOL = 8, PAGE = 2 << 20 };

typedef struct pool { /* the last few of a kind */
    uint64_t values[POOL];
    unsigned next;
} pool;

typedef struct fuzz {
    const uint8_t *at, *end;
    ebb__driver cu;
    pool contexts, streams, events, spaces, allocations, blocks, handles, graphs, execs;
    CUipcEventHandle ticket;
    int files[POOL];
    bool travelling; /* an event for several processes was made */
    _Alignas(16) unsigned char out[128];
} fuzz;

/* The entry point libFuzzer calls, and the replay too. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* ---- fuzz_sim.c: from bytes to arguments ---------------------------------------------------------- */

uint8_t fuzz_byte(fuzz *f);
uint64_t fuzz_number(fuzz *f);
uint64_t fuzz_size(fuzz *f);
void fuzz_keep(pool *p, uint64_t value);
uint64_t fuzz_pick(fuzz *f, const pool *p);
CUstream fuzz_stream(fuzz *f);
CUdeviceptr fuzz_address(fuzz *f);
void *fuzz_host(fuzz *f, uint64_t *size);
void *fuzz_out(fuzz *f);
uint64_t fuzz_got(const fuzz *f); /* what a call wrote to fuzz_out() */
void fuzz_release_words(void);
void *fuzz_spare(fuzz *f, uint64_t *size);
uint32_t *fuzz_word(fuzz *f, unsigned flags, uint32_t *value);

/* ---- fuzz_calls.c: from arguments to calls -------------------------------------------------------- */

void fuzz_call(fuzz *f);

#endif

/*
 * What crosses files in src/move: the books of a mover's ring. ring.c knows no driver and takes no
 * lock; mover.c calls it under its own.
 */
#ifndef EBB_MOVE_H
#define EBB_MOVE_H

#include <stdbool.h>

#include "cuda_abi.h"
#include "ebbtide.h"

/* An event, made once and recorded again and again. */
typedef struct ebb__flag {
    struct ebb__flag *next;
    CUevent event;
} ebb__flag;

/*
 * A piece of the ring. While it is out: `users` streams read it, or none does yet. When it is over:
 * `done` are the events after which its place may be written.
 */
typedef struct ebb__cargo {
    uint64_t start, end;
    unsigned users;
    bool over;
    ebb__flag *arrived;
    ebb__flag *done;
} ebb__cargo;

/*
 * The ring: cargoes one behind the other, in the order of their numbers.
 *
 *   0            tail                 head           bytes
 *   |    past    | first | ... | next-1 |    past    |
 *
 * A cargo does not wrap: what is left at the end is skipped. The space of a cargo that is over is had
 * again when every older one is over, too; it is then past, until one that comes to lie on it has been
 * ordered behind `done`. Invariants, checked by ebb__ring_check():
 *
 *   1  cargoes, past ones included, lie in the ring and do not overlap
 *   2  the first cargo is out; one is out as long as it is not over, and only then has `arrived`
 *   3  a past cargo has at least one event
 *   4  going round from the tail, cargoes come in the order of their numbers, and end at the head
 */
typedef struct ebb__ring {
    uint64_t bytes, head;
    uint64_t first, next; /* numbers: of the oldest that is not past, and of the one to come */
    ebb__cargo *cargoes;  /* number n at n % room */
    uint64_t room;        /* a power of two */
    ebb__cargo *past;
    size_t past_count, past_room;
} ebb__ring;

/* An empty ring; numbers go on where they were. The books of the last one must be empty. */
void ebb__ring_begin(ebb__ring *ring, uint64_t bytes);
void ebb__ring_free(ebb__ring *ring);

/* Where `bytes` would go; false: there is no room now. */
bool ebb__ring_place(const ebb__ring *ring, uint64_t bytes, uint64_t *start);

/* Make sure that ebb__ring_add() finds memory for its books. */
bool ebb__ring_ready(ebb__ring *ring);

/* The cargo is there, at a place that was found: its number, never 0. */
uint64_t ebb__ring_add(ebb__ring *ring, uint64_t start, uint64_t bytes, ebb__flag *arrived);

/* A cargo that is out; NULL: it is not. */
ebb__cargo *ebb__ring_find(const ebb__ring *ring, uint64_t number);

/* The cargo is over: nobody will wait for its arrival any more, and its event is free. */
ebb__flag *ebb__ring_over(ebb__ring *ring, ebb__cargo *cargo);

/* A past cargo that lies on a range, or NULL; and forget it, when it has no event any more. */
ebb__cargo *ebb__ring_past(const ebb__ring *ring, uint64_t start, uint64_t end);
void ebb__ring_forget(ebb__ring *ring, ebb__cargo *past);

/* Bytes from the oldest cargo that is out to the head; how many are out. */
uint64_t ebb__ring_used(const ebb__ring *ring);
uint64_t ebb__ring_out(const ebb__ring *ring);

/* Which invariant does not hold; 0: all do. */
int ebb__ring_check(const ebb__ring *ring);

/* For tests: the same of a mover's ring, and 9 if an event has been lost. */
int ebb__mover_check(ebb_mover *mover);

#endif

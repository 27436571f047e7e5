/*
 * What crosses files in src/move: a mover, and the books of its ring. ring.c knows no driver and takes
 * no lock; the others call it under the mover's. host.c stands alone.
 */
#ifndef EBB_MOVE_H
#define EBB_MOVE_H

#include <stdbool.h>

#include "internal.h"

/* ---- ring.c ---------------------------------------------------------------------------------- */

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

/* A range of places in the ring. */
typedef struct ebb__span {
    uint64_t start, end;
} ebb__span;

enum { EBB__PIECES = 16 };

/*
 * The ring: cargoes one behind the other, in the order of their numbers.
 *
 *   |    past    | first | ... | next-1 |    past    |
 *               tail                   head
 *
 * It is what is left of a piece of memory after some was given up, at its ends or in the middle: a few
 * pieces, seldom more than one. A cargo lies in one of them, and none goes across an end: what is left
 * there is skipped, and so is what is before one that is to be in a certain place. The space of a cargo
 * that is over is had again when every older one is over, too; it is then past, until one that comes to lie
 * on it has been ordered behind `done`. Invariants, checked by ebb__ring_check():
 *
 *   1  cargoes, past ones included, lie each in a piece and do not overlap; one that is over, and need not
 *      be waited for, may have lost its place
 *   2  the first cargo is out; one is out as long as it is not over, and only then has `arrived`
 *   3  a past cargo has at least one event
 *   4  going round from the tail, cargoes come in the order of their numbers, and end at the head
 *   5  pieces have bytes, go up, and do not touch
 */
typedef struct ebb__ring {
    ebb__span pieces[EBB__PIECES];
    size_t piece_count;
    uint64_t head;
    uint64_t first, next; /* numbers: of the oldest that is not past, and of the one to come */
    ebb__cargo *cargoes;  /* number n at n % room */
    uint64_t room;        /* a power of two */
    ebb__cargo *past;
    size_t past_count, past_room;
} ebb__ring;

/* An empty ring; numbers go on where they were. The books of the last one must be empty. */
void ebb__ring_begin(ebb__ring *ring, uint64_t bytes);
void ebb__ring_free(ebb__ring *ring);

uint64_t ebb__ring_size(const ebb__ring *ring);

/* Where `bytes` would go: at `at`, if no more than `skip` bytes are skipped for that, or else as near as can
   be; false: there is no room now. */
bool ebb__ring_place(const ebb__ring *ring, uint64_t bytes, uint64_t at, uint64_t skip,
                     uint64_t *start);

/* How many of `bytes` would have room now, in one piece: at the head, if that has room for `least` of them,
   rather than where more have. */
uint64_t ebb__ring_room(const ebb__ring *ring, uint64_t bytes, uint64_t least);

/* Make sure that ebb__ring_add() finds memory for its books. */
bool ebb__ring_ready(ebb__ring *ring);

/* The cargo is there, at a place that was found: its number, never 0. */
uint64_t ebb__ring_add(ebb__ring *ring, uint64_t start, uint64_t bytes, ebb__flag *arrived);

/* The cargo to which `bytes` can be added where it ends: it is the last, and nobody uses it yet. Else NULL,
   and so for number 0. And they have been. */
ebb__cargo *ebb__ring_extensible(const ebb__ring *ring, uint64_t number, uint64_t bytes);
void ebb__ring_extend(ebb__ring *ring, ebb__cargo *cargo, uint64_t bytes);

/* A cargo that is out; NULL: it is not. */
ebb__cargo *ebb__ring_find(const ebb__ring *ring, uint64_t number);

/* The cargo is over: nobody will wait for its arrival any more, and its event is free. If it was the last,
   and nobody has read it, its place is room again. */
ebb__flag *ebb__ring_over(ebb__ring *ring, ebb__cargo *cargo);

/* Those that are over and come last are past, though one before them is out: whether there is more room for
   it. What comes next lies where they were used a moment ago, and waits for that. */
bool ebb__ring_recede(ebb__ring *ring);

/* A past cargo that lies on a range, or NULL; and forget it, when it has no event any more. */
ebb__cargo *ebb__ring_past(const ebb__ring *ring, uint64_t start, uint64_t end);
void ebb__ring_forget(ebb__ring *ring, ebb__cargo *past);

/* Where, from a place on, the next past cargo begins; at most at `end`. */
uint64_t ebb__ring_free_until(const ebb__ring *ring, uint64_t from, uint64_t end);

/* Bytes from the oldest cargo that is out to the head; how many are out. */
uint64_t ebb__ring_used(const ebb__ring *ring);
uint64_t ebb__ring_out(const ebb__ring *ring);

/* Whether a cargo that is in use lies on a range. */
bool ebb__ring_in_use(const ebb__ring *ring, uint64_t start, uint64_t end);

/* On a range: the number of the oldest cargo that is out and not in use, or 0; and one that is over, is not
   past yet, and has events, or NULL. */
uint64_t ebb__ring_unused(const ebb__ring *ring, uint64_t start, uint64_t end);
ebb__cargo *ebb__ring_read(const ebb__ring *ring, uint64_t start, uint64_t end);

/* A range of a piece is given up: nothing is out there, past, or has events. In the middle of it, there must be
   room for one piece more. */
void ebb__ring_cut(ebb__ring *ring, uint64_t start, uint64_t end);

/* Which invariant does not hold; 0: all do. */
int ebb__ring_check(const ebb__ring *ring);

/* ---- mover.c --------------------------------------------------------------------------------- */

/* A pin that the driver would not let us take back; tried again at the next occasion. */
typedef struct ebb__debt {
    struct ebb__debt *next;
    ebb_vbar vbar;
    uint64_t offset, bytes;
} ebb__debt;

typedef struct ebb__timed {
    CUevent event;
    bool set; /* and not given back */
} ebb__timed;

struct ebb_mover {
    ebb_device device; /* open as long as the mover is there */
    CUstream stream;
    _Atomic uint64_t filled, copies; /* added to without the lock */
    ebb__giver giver;                /* under the device's lock */
    ebb__mutex mu;
    /* under it */
    bool changing;  /* the ring, or the end of it all */
    ebb_vbar vbar;  /* the ring's; 0: none */
    bool pinned;    /* it is, where the ring is; else it only waits to be destroyed */
    uint64_t base;  /* where the ring begins on the GPU */
    uint64_t size;  /* of the VBAR */
    ebb__ring ring; /* gives no room while it changes */
    ebb__flag *flags;
    uint64_t flag_count; /* events there are, free or not */
    ebb__debt *debts;
    ebb__timed *marks;
    size_t mark_count, mark_room;
    uint64_t cargoes, staged, waits, no_room, given_up;
};

/*
 * Make the driver ready to be called by this thread, without a lock of the device's: queuing may take
 * its time. The device stays open because the mover is there. NULL, and *status says why not.
 */
ebb__device *ebb__mover_reach(const ebb_mover *mover, ebb__scope *scope, ebb_status *status);
void ebb__mover_leave(ebb__device *device, const ebb__scope *scope);

/* Keep what a failed driver call said. Always EBB_DRIVER_FAILED. Takes the device's lock. */
ebb_status ebb__mover_failed(ebb__device *device, const char *call, CUresult code);

/* A free event, or a new one, or the one that is given, recorded on a stream; and one that is free again.
   Under the mover's lock. */
ebb_status ebb__mover_raise(ebb_mover *mover, ebb__device *device, CUstream stream,
                            ebb__flag **flag);
void ebb__mover_lower(ebb_mover *mover, ebb__flag *flag);

/* Order the copies to come behind the uses of a cargo that is over, whose events are free then. Under the
   mover's lock. */
ebb_status ebb__mover_await(ebb_mover *mover, ebb__device *device, ebb__cargo *cargo);

/* Order the copies to come behind every use of past cargoes that lie on a range, and forget these. Under
   the mover's lock. */
ebb_status ebb__mover_follow(ebb_mover *mover, ebb__device *device, uint64_t start, uint64_t end);

/* Whether work outside of a capture can be queued on a stream. EBB_BUSY: it cannot. */
ebb_status ebb__mover_outside(ebb__device *device, ebb_stream stream);

/* Whether the mover may be used, before its lock is touched: in a forked process it may be held. */
ebb_status ebb__mover_there(const ebb_mover *mover);

/* Take back a pin of the mover's stream. If the driver fails it is owed, and pay() tries again:
   EBB_DRIVER_FAILED if something still is. Without the mover's lock. */
void ebb__mover_unpin(ebb_mover *mover, ebb_vbar vbar, uint64_t offset, uint64_t bytes);
ebb_status ebb__mover_pay(ebb_mover *mover);

/* For tests: the same of a mover's ring, and 9 if an event has been lost. */
int ebb__mover_check(ebb_mover *mover);

/* ---- marks.c --------------------------------------------------------------------------------- */

/* Destroy all marks, at the mover's end. Under the device's lock. */
ebb_status ebb__marks_end_locked(ebb_mover *mover, ebb__device *device) EBB__LOCKED;

/* ---- give.c ---------------------------------------------------------------------------------- */

/* What a mover's giver does: gives up what it can of the ring. */
uint64_t ebb__mover_give(ebb__giver *giver, uint64_t bytes);

#endif

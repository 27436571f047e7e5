/* What the files of Unit share. */
#ifndef EBB_CORE_UNIT_H
#define EBB_CORE_UNIT_H

#include "_core.h"

typedef struct run {
    uint64_t offset, bytes, signature; /* signature 0: not known to be filled */
} run;

typedef struct swap {
    PyObject *place, *key, *parked, *real;
    PyObject *installed; /* while it is exchanged */
    Py_ssize_t index;    /* of a list; -1: a dict */
    uint32_t piece;
    bool looked_up; /* in Places */
} swap;

/* Who is in a unit; and of a run, in how many calls of its members. */
typedef struct guest {
    uint64_t thread;
    unsigned within;
} guest;

struct unit {
    PyObject_HEAD vbar *vbar;
    piece *pieces;
    run *runs;
    swap *swaps;
    size_t piece_count, run_count, swap_count;
    size_t exchanged; /* of the swaps, those that are not in Places */
    bool exchanges;   /* entered with all of them exchanged */
    bool open;        /* real tensors are to be found */
    PyObject *reals;  /* what is found while it is entered, None for its own; NULL: its own, all */
    PyObject *compile_by; /* PyTorch's function: who compiles from now on, and did before */
    unsigned depth;       /* times entered and not left */
    guest *guests;        /* by whom, as many */
    size_t guest_room;
    /* Between the calls of its members nothing real is found: who looks is none of them. */
    char closes;
    /* A piece's contents have changed since somebody came in, who goes on with what it was. */
    char outdated;
    bool whole; /* entered with all of it resident: its runs are pinned */
    int stale;  /* its places or weights are not what they were: it is not entered any more */
    /* The tensor that the VBAR's own are views of, or NULL: its version tells who writes. */
    PyObject *base;
    long version;
    PyObject *name;            /* "_version" */
    PyObject *compiler;        /* the module without which nobody compiles */
    PyObject *ahead;           /* what will be needed, by swap */
    PyObject *now;             /* the same, of what is found while it is entered; or NULL */
    char settled;              /* what of it is not resident will not be, as far as is known */
    char small;                /* its layers are many, and small */
    spots spots;               /* in the ring, where it was */
    uint64_t size;             /* of all pieces */
    uint64_t streamed, filled; /* bytes sent for: into the ring, and to stay */
    /* Python's, and a course's: what has been sent for of it, or None; and its tensors over the ring, by where
       they are, and those that are in its places, or None. */
    PyObject *load, *views, *tensors;
};

/* ---- _core_unit_places.c ------------------------------------------------------------------------- */

/* Let real tensors be found by who has entered it: `reals` says what goes where, None for the VBAR's own;
   or NULL. `its`: what of it will be needed. false: a place is not as it was. */
bool unit_install(unit *u, PyObject *reals, PyObject *its);

/* Take out what was put in, where it is still there. */
void unit_park(unit *u);

/* ---- _core_unit_pins.c --------------------------------------------------------------------------- */

/* Bytes that are resident, and as they were filled; and whether all are. */
uint64_t unit_bytes_here(const unit *u);
bool unit_is_here(const unit *u);

/* If all is: pin it, by its runs. `slowly`: whatever that takes. */
bool unit_pin_runs(unit *u, ebb_stream stream, bool slowly);
void unit_unpin_runs(unit *u, ebb_stream stream);

/* Pin those pieces that are not staged. */
bool unit_pin_pieces(unit *u, const uint64_t *staged, ebb_stream stream);
void unit_unpin_pieces(unit *u, ebb_stream stream);

/* What is pinned, for another stream, and behind what has filled it; and take one of these pins back, on the
   stream that used it. */
bool unit_pin_again(unit *u, ebb_stream stream);
void unit_unpin_once(unit *u, ebb_stream stream);

/* All pieces have been seen to be filled: from now on their runs tell by themselves. */
void unit_sign_runs(unit *u);

#endif

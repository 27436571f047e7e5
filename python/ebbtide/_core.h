/* What the files of the extension share. */
#ifndef EBB_PYTHON_CORE_H
#define EBB_PYTHON_CORE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stddef.h>
#include <structmember.h>

#include "ebbtide.h"

/* ---- _core.c: the module and its errors --------------------------------------------------------- */

enum { KINDS = 14 }; /* of errors that have a type of their own */
enum { DEVICE, VBAR, WEIGHT, AHEAD, UNIT, MOVER, LOAD, COURSE, PASS, GATE, PLACES, TYPES };

typedef struct state {
    PyObject *error;
    PyObject *errors[KINDS];
    PyTypeObject *probe;
    PyTypeObject *types[TYPES];
} state;

/* The module's state, from an object of one of its types. NULL with an exception. */
const state *state_of(PyObject *object);

/* Raise the exception of a status, with more words if there are any. Always NULL. */
PyObject *raise_status(const state *s, ebb_status status, const char *detail);

/* An exception that is of no account goes, if there is one. Ctrl-C is meant for the program, whatever it has struck:
   it comes once more. */
void forgive(void);

/* A size: a whole number from 0. 0, or -1 with an exception. */
int size_of(PyObject *given, uint64_t *size);

/* Put a number into a dict. 0, or -1 with an exception. */
int add_size(PyObject *dict, const char *name, uint64_t value);

/* ---- _core_device.c ------------------------------------------------------------------------------ */

enum { SEEN = 256 }; /* streams remembered; a place each, by hash */

typedef struct device {
    PyObject_HEAD const state *s; /* NULL: never made */
    ebb_device handle;
    PyObject *index;     /* as PyTorch counts */
    PyObject *stream_of; /* called with the index: the current stream's address. Or NULL */
    int32_t number;      /* the same */
    unsigned long long
        stream_at; /* the same as a C function's address, where PyTorch has it. Or 0 */
    int beside;    /* a simulated card beside PyTorch's devices: its streams are not PyTorch's */
    ebb_stream seen[SEEN];
} device;

extern PyType_Spec device_spec;

/* The same, with the driver's own words, or `advice`, which says what to do. Without a device it is
   about an object that was never made. */
PyObject *fail(const device *d, ebb_status status, const char *advice);

/* The stream that was given, or PyTorch's current one, or the legacy default stream. */
int stream_for(device *d, PyObject *given, ebb_stream *stream);

/* Whether the current stream has been one before: then to ask for it runs no Python, in which Ctrl-C might
   strike. */
bool stream_is_met(device *d);

/* The same, from the arguments of a method that takes `before` others first. */
int stream_argument(device *d, PyObject *const *arguments, Py_ssize_t count, PyObject *names,
                    Py_ssize_t before, const char *method, ebb_stream *stream);

/* ---- _core_attach.c: functions of the module ------------------------------------------------------ */

PyObject *core_attach(PyObject *module, PyObject *arguments);
PyObject *core_detach(PyObject *module, PyObject *unused);
PyObject *core_attach_before(PyObject *module, PyObject *arguments);
PyObject *core_attach_pool(PyObject *module, PyObject *arguments);
PyObject *core_attached_stats(PyObject *module, PyObject *given);

/* ---- _core_vbar.c, _core_weight.c ------------------------------------------------------------------ */

typedef struct vbar {
    PyObject_HEAD device *device; /* NULL: never made */
    ebb_vbar handle;
    uint64_t address;
    PyObject *page_out; /* the core has it too, until the VBAR is destroyed */
} vbar;

typedef struct weight {
    PyObject_HEAD vbar *vbar; /* NULL: never made */
    uint64_t offset, bytes;
    uint64_t signature; /* under which it was filled last; 0: never */
    unsigned long pins;
    struct use {
        ebb_stream stream;
        unsigned long open; /* faults on it that have not been taken back, or are under way */
    } * uses;
    unsigned use_count;
} weight;

extern PyType_Spec vbar_spec, weight_spec;

/*
 * A weight remembers the streams it is in use on: whoever fills it makes them wait for the fill. To be
 * called before the fault, so that none is missed; exit takes one back, of this stream if there is one.
 * false: out of memory, with an exception.
 */
bool weight_enter(weight *w, ebb_stream stream);
void weight_exit(weight *w, ebb_stream stream);

/* Bytes at an address of a device, as a DLPack capsule that keeps `owner`. */
PyObject *dlpack_over(PyObject *owner, const device *d, uint64_t address, uint64_t bytes);

/* ---- _core_unit.c, _spots.c, _ahead.c, _places.c, _mover.c, _load.c, _course.c, _pass.c, _gate.c ------------ */

enum { SPOTS = 16 }; /* of a unit, that are remembered */

typedef struct spots {
    uint64_t start; /* of the ring that they are in */
    uint64_t at[SPOTS];
    unsigned count, new_in_a_row;
    bool drifts;
} spots;

/* Where in a ring of so many bytes from `start` on a unit should be, so that it is where it was: the first such
   spot from the head on, or the first of all, or one that is to recur; 0: anywhere. `few`: that matters more
   than to use all of the ring. And a spot where it was. */
uint64_t spots_near(spots *s, uint64_t size, uint64_t head, uint64_t start, uint64_t ring,
                    bool few);
void spots_add(spots *s, uint64_t at);

typedef struct piece {
    uint64_t offset, bytes, signature;
    const void *host;
    bool pinned;     /* by this unit, where not all are resident */
    uint64_t staged; /* if it is not: where it was when the unit was entered last */
} piece;

typedef struct unit unit;

/* The weights of a unit, and how many: NULL, if it was never made. */
piece *unit_pieces(unit *u, size_t *count, ebb_vbar *handle);

/* Where in the ring it was, and the bytes of all its weights. */
spots *unit_spots(unit *u, uint64_t *size);

/* So many of its bytes were sent for: into the ring, or to stay. */
void unit_count(unit *u, uint64_t streamed, uint64_t filled);

/* What of it is not resident will not be, as far as is known. */
bool unit_settled(const unit *u);

/* Its layers are many, and small. */
bool unit_small(const unit *u);

/* Enter a unit whose weights are all resident, on the current stream: 1. 0: it is not so, or somebody
   is in. -1: an exception. And leave one. */
int unit_go_in(unit *u);
int unit_go_out(unit *u);

/* The same, whatever it takes: of pieces that a load has in the ring the tensors of `reals` go in, and the
   others are pinned. `its`: what of them will be needed. */
int unit_go_in_with(unit *u, PyObject *load, PyObject *reals, PyObject *its);

/* This thread, which is in a run, goes into a call of one of its members, or comes out: whether it is in that run.
   And whether it is in such a call: what that has looked up is there until its end. */
bool unit_step(unit *u, bool in);
bool unit_is_within(const unit *u);

/* The current stream of its GPU. 0, or -1 with an exception. */
int unit_stream(unit *u, ebb_stream *stream);

/* A number that is this thread's, and was and will be no other one's. */
uint64_t this_thread(void);

/* What this thread is to find in the places of a unit's weights now: parked tensors, the real ones that the
   unit was made with, other ones for some of them; or one has to look, because its places are not what they
   were. Whoever has not entered it finds parked ones: those of another thread may be gone any moment. */
typedef enum shown { PARKED, OWN, OTHERS, UNKNOWN } shown;
shown unit_shows(const unit *u);

/* Of a unit that shows OTHERS: what stands for a swap, borrowed; NULL: its own. */
PyObject *unit_other(const unit *u, size_t which);

/* What stands for a parked tensor, one of `count` swaps from `first` on, in a unit that shows real ones.
   Borrowed; itself, if it is none of them. */
PyObject *unit_real(const unit *u, size_t first, size_t count, PyObject *parked);

/* Whether somebody is in, and an address is one of the memory that its weights are in, which is somebody
   else's when it is left. */
bool unit_covers(const unit *u, uint64_t at);

/* Its places or weights are not what they were: it is not entered any more. */
void unit_stale(unit *u);

/* A module's weight was looked up, so the one that has this swap will be called soon. */
void unit_look_ahead(const unit *u, size_t next);

typedef struct ahead ahead;

/* Ask for the memory of a step. Nothing is waited for. */
void ahead_fetch(const ahead *a, size_t step);
PyObject *core_table_of(PyObject *module, PyObject *dict);

/* A unit's swaps are in a dict of a module, and the first is of these two; and are not any more. */
void places_bind(PyObject *self, unit *u, size_t first, size_t count, PyObject *parked,
                 PyObject *real);
void places_release(PyObject *self, const unit *u);

/* NULL: it was closed. Its device, if it was ever made. And the exception of a status: always NULL. */
ebb_mover *mover_handle(PyObject *self, device **d);
PyObject *mover_failed(const device *d, ebb_status status);

/* All that a balance between tensors and weights depends on, as bytes. NULL with an exception. */
PyObject *mover_outlook(PyObject *self, PyObject *vbar);

/* Of each of a unit's pieces that have been sent for: where it is in the ring; 0: it is resident. The same, to be
   looked up. Whether those are all, and how many cargoes they are in the ring. */
const uint64_t *load_staged(PyObject *self, size_t *count);
PyObject *load_key(PyObject *self);
bool load_is_whole(PyObject *self);
size_t load_cargoes(PyObject *self);

/* Send for more of a unit, as far as the ring has room, or whatever it takes: whether that was all. Then the current
   stream waits until it has arrived; and its last use is on the current stream. -1: an exception. */
int load_more(PyObject *self, PyObject *mover, unit *u, bool demand);
int load_begin(PyObject *self, PyObject *mover);
int load_end(PyObject *self, PyObject *mover);

typedef struct pass pass;
typedef struct course course;

/* A call of the model begins: whether it goes by its course, where one is laid. If so, then it ends by course_end(),
   which says whether that was all: if not, then Python has to see to its end. An exception that is there stays. */
bool course_begin(pass *p);
bool course_end(pass *p, bool failed);

/* Into a unit by a gate of that name, and out of one: 1. 0: Python has to do it. -1: an exception, and it is not
   entered, or it is left. */
int course_enter(pass *p, PyObject *name, unit *u, bool of_run);
int course_leave(pass *p, unit *u, bool of_run);

/* The run that this thread is in, borrowed, or NULL; and another one, or none, from the current stream on.
   0, or -1 with an exception. */
PyObject *pass_run(const pass *p);
int pass_set_run(pass *p, PyObject *run);

/* Whether this thread is in that run, and came into it on another stream than the current one: which has
   not waited for its weights, and would not be waited for. 1, 0, or -1 with an exception. */
int pass_strays(const pass *p, PyObject *run);

/* Whether Python has to see a call of the model begin, or end: somebody wants to, or this thread is in a
   run that nobody has left. */
bool pass_is_watched(const pass *p);

/* Into a gate, of the model itself or of a module in it: 0, or -1 with an exception. And out of it: whether
   this thread is in none any more, but still in a run. */
int pass_begin(pass *p, bool root);
bool pass_end(pass *p, bool root);

/* Until this thread has left all of them autocast keeps nothing of what it makes of weights. */
void pass_forgo(pass *p);

/* Its course, borrowed, or NULL; calls of the model under way; and whether this thread is in one gate and in no
   run. */
course *pass_course(const pass *p);
unsigned pass_calls(const pass *p);
bool pass_is_outermost(const pass *p);

/* To be called before the type is made of its spec. 0, or -1 with an exception. */
int places_measure(void);

extern PyType_Spec ahead_spec, unit_spec, places_spec, mover_spec, load_spec, course_spec,
    pass_spec, gate_spec;

#endif

/* What the files of the module ebbtide._sim share. */
#ifndef EBBTIDE_PYTHON_SIM_H
#define EBBTIDE_PYTHON_SIM_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>

#include "ebbtide_sim.h"

/* ---- _sim.c ------------------------------------------------------------------------------------- */

/* The memory that one operator reads and writes: the Python type Ranges. */
typedef struct ranges {
    PyObject_HEAD size_t count, capacity;
    ebbsim_range *list; /* `few`, or allocated */
    ebbsim_range few[8];
} ranges;

/* The object, or NULL with an error if it is not one. Borrowed. */
ranges *ranges_of(PyObject *object);
/* Zero, or -1 with an error. No bytes are no range. */
int ranges_add(ranges *r, uint64_t address, uint64_t bytes, int access);
/* Whether the address lies in one of the first so many. */
int ranges_hold(const ranges *r, uint64_t address, size_t first);

/* ---- _seen.c ------------------------------------------------------------------------------------ */

/* What is known of a CUDA tensor: its device, its alias on the CPU, the memory it reaches over. */
typedef struct seen {
    PyObject *alias;
    uint64_t address, bytes;
    int device;
} seen;

/* What was kept of the tensor, given its C++ object, or NULL: it was not, or it looks different now.
   Good until the next call of anything here. */
const seen *seen_find(const void *tensor);
/* Keep it for the next time. `sizes` is where PyTorch has the tensor's sizes. */
void seen_keep(const void *tensor, const int64_t *sizes, const seen *what);
/* Nothing of what was kept is found again. */
void seen_forget(void);

/* A tensor of five dimensions, and what PyTorch says of it. */
typedef struct sample {
    const void *tensor, *storage; /* C++ objects */
    const int64_t *sizes;
    uint64_t keys, data, bytes; /* the storage's address and size */
} sample;

/* Find out where things are. The others differ from the sample in one thing each: dtype, offset, sizes
   and the like. 0: this PyTorch's tensors are not laid out as known, and nothing will be kept. */
int seen_learn(const sample *s, const void *const *others, size_t count);

/* ---- _tensors.c --------------------------------------------------------------------------------- */

/* Functions of the module, METH_FASTCALL; what they do is said where they are. */
PyObject *tensors_bind(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_learn(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_know(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_forget(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_reach(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_convert(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_lift(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

/* What a stream's next work is ordered after has had its effect: 0, or why not. Lets go of the GIL. */
int sim_catch_up(int device, void *stream);

#endif

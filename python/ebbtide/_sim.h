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

/* ---- _tensors.c --------------------------------------------------------------------------------- */

/* Functions of the module, METH_FASTCALL; what they do is said where they are. */
PyObject *tensors_bind(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_know(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_forget(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_reach(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_convert(PyObject *self, PyObject *const *arguments, Py_ssize_t count);
PyObject *tensors_lift(PyObject *self, PyObject *const *arguments, Py_ssize_t count);

#endif

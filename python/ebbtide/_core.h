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

typedef struct state {
    PyObject *error;
    PyObject *errors[KINDS];
    PyTypeObject *probe;
} state;

/* Raise the exception of a status, with more words if there are any. Always NULL. */
PyObject *raise_status(const state *s, ebb_status status, const char *detail);

/* A size: a whole number from 0. 0, or -1 with an exception. */
int size_of(PyObject *given, uint64_t *size);

/* Put a number into a dict. 0, or -1 with an exception. */
int add_size(PyObject *dict, const char *name, uint64_t value);

/* ---- _core_device.c ------------------------------------------------------------------------------ */

enum { SEEN = 256 }; /* streams remembered; a place each, by hash */

typedef struct device {
    PyObject_HEAD const state *s;
    ebb_device handle;
    PyObject *index;     /* as PyTorch counts */
    PyObject *stream_of; /* called with the index: the current stream's address. Or NULL */
    int beside; /* a simulated card beside PyTorch's devices: its streams are not PyTorch's */
    ebb_stream seen[SEEN];
} device;

extern PyType_Spec device_spec;

/* The same, with the driver's own words, or `advice`, which says what to do. */
PyObject *fail(const device *d, ebb_status status, const char *advice);

/* The stream that was given, or PyTorch's current one, or the legacy default stream. */
int stream_for(device *d, PyObject *given, ebb_stream *stream);

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
    PyObject_HEAD device *device;
    ebb_vbar handle;
    uint64_t address;
    PyObject *page_out;
} vbar;

typedef struct weight {
    PyObject_HEAD vbar *vbar;
    uint64_t offset, bytes;
    uint64_t signature; /* under which it was filled last; 0: never */
    unsigned long pins;
    ebb_stream used;   /* the stream of its last fault */
    ebb_stream filled; /* and of its last fill */
    bool mixed;        /* it has been used on more than one */
} weight;

extern PyType_Spec vbar_spec, weight_spec;

/* A use begins, or ends, on a stream: for what a weight remembers of it. */
void weight_begun(weight *w, ebb_stream stream);

#endif

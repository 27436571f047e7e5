/*
 * Ahead, memory that the processor will need soon: where it is, step by step.
 *
 * A layer of a model is some thirty lines of memory, all over the place: its module, the dicts of that,
 * the tensors in them. A model of many layers has more of them than a cache has, so that the host waits
 * for one after the other, for longer than all that Ebbtide does. But whoever looks up a weight of one
 * layer will be in the next one soon, and which that is, is known: so its lines are asked for then, all
 * at once, and have come when they are needed.
 *
 * An address that is of nothing any more does no harm: it is not read, only asked for.
 */
#include "_core.h"

#include <stdint.h>
#include <stdlib.h>

enum { LINE = 64 };

struct ahead {
    PyObject_HEAD uint64_t
        *ranges;    /* a line's address, and in its low bits how many lines from it */
    size_t *firsts; /* of each step, its first range; and the end of the last one's */
    size_t count;   /* of steps */
};

static int take(ahead *a, PyObject *steps)
{
    size_t count = (size_t)PyList_Size(steps), all = 0, at = 0;
    for (size_t i = 0; i < count; i++) {
        PyObject *step = PyList_GetItem(steps, (Py_ssize_t)i);
        if (!PyList_Check(step)) {
            PyErr_SetString(PyExc_TypeError, "a step is a list of (address, bytes)");
            return -1;
        }
        all += (size_t)PyList_Size(step);
    }
    a->ranges = calloc(all + 1, sizeof *a->ranges);
    a->firsts = calloc(count + 1, sizeof *a->firsts);
    if (!a->ranges || !a->firsts) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *step = PyList_GetItem(steps, (Py_ssize_t)i);
        for (Py_ssize_t k = 0; k < PyList_Size(step) && at < all; k++) {
            unsigned long long address, bytes;
            PyObject *range = PyList_GetItem(step, k);
            if (!PyTuple_Check(range) || !PyArg_ParseTuple(range, "KK", &address, &bytes)) {
                if (!PyErr_Occurred())
                    PyErr_SetString(PyExc_TypeError, "a step is a list of (address, bytes)");
                return -1;
            }
            uint64_t lines = (address % LINE + bytes + LINE - 1) / LINE;
            a->ranges[at++] = (address & ~(uint64_t)(LINE - 1)) | (lines < LINE ? lines : LINE - 1);
        }
        a->firsts[i + 1] = at;
    }
    a->count = count;
    return 0;
}

static int ahead_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    ahead *a = (ahead *)self;
    PyObject *steps;
    if (a->firsts || keywords) {
        PyErr_SetString(PyExc_TypeError, "it is made once, of steps");
        return -1;
    }
    return PyArg_ParseTuple(arguments, "O!", &PyList_Type, &steps) ? take(a, steps) : -1;
}

static void ahead_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    free(((ahead *)self)->ranges);
    free(((ahead *)self)->firsts);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

void ahead_fetch(const ahead *a, size_t step)
{
    if (step >= a->count)
        return;
    for (size_t i = a->firsts[step]; i < a->firsts[step + 1]; i++) {
        const char *line = (const char *)(uintptr_t)(a->ranges[i] & ~(uint64_t)(LINE - 1));
        for (unsigned n = a->ranges[i] % LINE; n; n--, line += LINE)
            __builtin_prefetch(line, 0, 2);
    }
}

/* Where a dict has its table, as far as is known: a word of it is an address, and if it is another one,
   then nothing is asked for that is needed. */
PyObject *core_table_of(PyObject *module, PyObject *dict)
{
    (void)module;
    enum { TABLE = 4 }; /* words from its start: two that all objects have, two numbers */
    if (!PyDict_Check(dict)) {
        PyErr_SetString(PyExc_TypeError, "not a dict");
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(((const uintptr_t *)dict)[TABLE]);
}

static PyObject *length(PyObject *self, void *unused)
{
    (void)unused;
    const ahead *a = (const ahead *)self;
    return PyLong_FromSize_t(a->firsts ? a->firsts[a->count] : 0);
}

static PyGetSetDef getset[] = {
    {"ranges", length, NULL, "of memory, in all steps", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"Memory that the processor will need soon."},
    {Py_tp_init, (void *)ahead_init},
    {Py_tp_dealloc, (void *)ahead_dealloc},
    {Py_tp_getset, getset},
    {0, NULL},
};

PyType_Spec ahead_spec = {"ebbtide._core.Ahead", sizeof(ahead), 0, Py_TPFLAGS_DEFAULT, slots};

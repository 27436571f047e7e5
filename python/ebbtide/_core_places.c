/*
 * Places, the dict in which an offloaded module has its parameters, or its buffers.
 *
 * It holds parked tensors, which have no memory. As long as a thread is in the unit that they belong to,
 * it gets the real tensor that stands for one when it looks that up. So to go into a unit nothing of its
 * modules is touched: to exchange a tensor in each of a thousand dicts, none of which is in the
 * processor's caches, and to take it out again, costs about twice as much.
 *
 * What reads a dict behind its back (PyDict_GetItem()) gets parked tensors, which are slow there and
 * right. Whoever puts something in makes the unit stale; _offload/lasting.py sees to it that it is
 * nothing that is real only as long as a unit is entered.
 */
#include "_core.h"

/* None of these is owned: a unit, which owns them, takes itself out when it goes. */
typedef struct shelf {
    unit *unit;          /* NULL: a dict like any other */
    size_t first, count; /* the unit's swaps that are in this dict */
    /* The first of them, here too: to look for it elsewhere is to wait for memory, which a model of
       many small layers notices. */
    PyObject *parked, *real;
} shelf;

/* Behind what a dict has of its own, which the stable ABI does not tell: the same in every interpreter
   of a process. */
static size_t offset;

static shelf *shelf_of(PyObject *self)
{
    return (shelf *)((char *)self + offset);
}

void places_bind(PyObject *self, unit *u, size_t first, size_t count, PyObject *parked,
                 PyObject *real)
{
    *shelf_of(self) =
        (shelf){.unit = u, .first = first, .count = count, .parked = parked, .real = real};
}

void places_release(PyObject *self, const unit *u)
{
    if (shelf_of(self)->unit == u)
        *shelf_of(self) = (shelf){.unit = NULL};
}

/* Borrowed, like what is given. */
static PyObject *real_of(PyObject *self, PyObject *value)
{
    const shelf *s = shelf_of(self);
    if (!s->unit)
        return value;
    shown what = unit_shows(s->unit);
    if (what == PARKED)
        return value;
    if (what != UNKNOWN && value == s->parked) {
        unit_look_ahead(s->unit, s->first + s->count);
        PyObject *other = what == OTHERS ? unit_other(s->unit, s->first) : NULL;
        return other ? other : s->real;
    }
    if (what != UNKNOWN && s->count == 1)
        return value; /* it is none of the unit's */
    return unit_real(s->unit, s->first, s->count, value);
}

static PyObject *places_subscript(PyObject *self, PyObject *key)
{
    PyObject *value = PyDict_GetItemWithError(self, key);
    if (!value) {
        if (!PyErr_Occurred())
            PyErr_SetObject(PyExc_KeyError, key);
        return NULL;
    }
    value = real_of(self, value);
    Py_INCREF(value);
    return value;
}

/* Somebody is about to change it. */
static PyObject *places_changed(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (shelf_of(self)->unit)
        unit_stale(shelf_of(self)->unit);
    Py_RETURN_NONE;
}

static int places_put(PyObject *self, PyObject *key, PyObject *value)
{
    if (shelf_of(self)->unit)
        unit_stale(shelf_of(self)->unit);
    return value ? PyDict_SetItem(self, key, value) : PyDict_DelItem(self, key);
}

/* What a look-up would give, all of it, as a plain dict. */
static PyObject *places_now(PyObject *self, PyObject *unused)
{
    (void)unused;
    PyObject *now = PyDict_New(), *key, *value;
    Py_ssize_t at = 0;
    while (now && PyDict_Next(self, &at, &key, &value))
        if (PyDict_SetItem(now, key, real_of(self, value)) < 0)
            Py_CLEAR(now);
    return now;
}

/* Its keys, as ever. But dict(places), {**places} and places | other look values up one by one where a
   dict has an iterator of its own, and would take what is in it otherwise. */
static PyObject *places_iterator(PyObject *self)
{
    getiterfunc keys = (getiterfunc)PyType_GetSlot(&PyDict_Type, Py_tp_iter);
    return keys(self);
}

static PyMethodDef methods[] = {
    {"_changed", places_changed, METH_NOARGS, "Somebody is about to change it."},
    {"_now", places_now, METH_NOARGS, "As a plain dict, with real tensors where there are any."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"An offloaded module's parameters, or buffers."},
    {Py_tp_methods, methods},
    {Py_tp_iter, (void *)places_iterator},
    {Py_mp_subscript, (void *)places_subscript},
    {Py_mp_ass_subscript, (void *)places_put},
    {0, NULL},
};

PyType_Spec places_spec = {"ebbtide._core.Places", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           slots};

int places_measure(void)
{
    PyObject *size = PyObject_GetAttrString((PyObject *)&PyDict_Type, "__basicsize__");
    long bytes = size ? PyLong_AsLong(size) : -1;
    Py_XDECREF(size);
    if (bytes < 0)
        return -1;
    size_t most = _Alignof(shelf);
    offset = ((size_t)bytes + most - 1) / most * most;
    places_spec.basicsize = (int)(offset + sizeof(shelf));
    return 0;
}

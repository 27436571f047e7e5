/* What is found in a unit's places while it is entered: tensors over memory, in place of the parked ones. */
#include "_core_unit.h"

static PyObject *there(const swap *s) /* borrowed */
{
    if (s->index < 0)
        return PyDict_GetItemWithError(s->place, s->key);
    return s->index < PyList_Size(s->place) ? PyList_GetItem(s->place, s->index) : NULL;
}

static int put(const swap *s, PyObject *what)
{
    if (s->index < 0)
        return PyDict_SetItem(s->place, s->key, what);
    Py_INCREF(what);
    return PyList_SetItem(s->place, s->index, what);
}

/* Whether a thread finds what is real. */
static bool is_shown(const unit *u, uint64_t thread)
{
    for (unsigned i = 0; i < u->depth; i++)
        if (u->guests[i].thread == thread)
            return !u->closes || u->guests[i].within;
    return false;
}

shown unit_shows(const unit *u)
{
    if (!u->open || !is_shown(u, this_thread()))
        return PARKED;
    return u->stale ? UNKNOWN : u->reals ? OTHERS : OWN;
}

PyObject *unit_other(const unit *u, size_t which)
{
    PyObject *other = PyList_GetItem(u->reals, (Py_ssize_t)which); /* as many as there are swaps */
    return other == Py_None ? NULL : other;
}

PyObject *unit_real(const unit *u, size_t first, size_t count, PyObject *parked)
{
    size_t end = first + count;
    if (u->stale) {
        first = 0; /* it may have been put into another dict since */
        end = u->swap_count;
    }
    for (size_t i = first; i < end && i < u->swap_count; i++) {
        const swap *s = &u->swaps[i];
        if (s->parked != parked)
            continue;
        PyObject *real = u->reals ? PyList_GetItem(u->reals, (Py_ssize_t)i) : Py_None;
        return real == Py_None ? s->real : real;
    }
    return parked;
}

void unit_look_ahead(const unit *u, size_t next)
{
    if (u->now)
        ahead_fetch((const ahead *)u->now, next);
}

void unit_stale(unit *u)
{
    u->stale = 1;
}

void unit_park(unit *u)
{
    u->open = false;
    Py_CLEAR(u->reals);
    Py_CLEAR(u->now);
    if (!u->exchanged && !u->exchanges)
        return;
    u->exchanges = false;
    for (size_t i = 0; i < u->swap_count; i++) {
        swap *s = &u->swaps[i];
        if (!s->installed)
            continue;
        if (there(s) == s->installed)
            put(s, s->parked);
        else
            u->stale = 1; /* somebody has put something else there, and means it */
        Py_CLEAR(s->installed);
    }
    PyErr_Clear();
}

/* Whether somebody compiles: torch.compile() looks into dicts by itself. PyTorch is told that nobody
   does, says who did, and is told so again: the function that only asks loses count of references in
   some versions (2.6). */
static bool compiles(const unit *u)
{
    if (!PyDict_GetItemWithError(PyImport_GetModuleDict(), u->compiler)) {
        PyErr_Clear();
        return false;
    }
    PyObject *who = PyObject_CallFunctionObjArgs(u->compile_by, Py_None, NULL);
    bool yes = who && who != Py_None;
    if (yes)
        Py_XDECREF(PyObject_CallFunctionObjArgs(u->compile_by, who, NULL));
    Py_XDECREF(who);
    PyErr_Clear();
    return yes;
}

bool unit_install(unit *u, PyObject *reals, PyObject *its)
{
    Py_XINCREF(reals);
    u->reals = reals; /* there were none: nobody was in */
    Py_INCREF(its);
    u->now = its;
    unit_look_ahead(u, 0);
    u->exchanges = compiles(u);
    for (size_t i = 0; (u->exchanged || u->exchanges) && i < u->swap_count; i++) {
        swap *s = &u->swaps[i];
        if (s->looked_up && !u->exchanges)
            continue;
        PyObject *real = reals ? PyList_GetItem(reals, (Py_ssize_t)i) : Py_None;
        real = real == Py_None ? s->real : real;
        if (!real || there(s) != s->parked || put(s, real) < 0) {
            unit_park(u);
            u->stale = 1;
            PyErr_Clear();
            return false;
        }
        Py_INCREF(real);
        s->installed = real;
    }
    u->open = true;
    return true;
}

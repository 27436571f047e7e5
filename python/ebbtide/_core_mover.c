/*
 * Mover, the bare type under _offload/: a copy stream, a ring of GPU memory for weights on their way, and
 * the host's memory they come from.
 */
#include "_core.h"

#include <stdlib.h>

#include "fast.h"

typedef struct mover {
    PyObject_HEAD device *device;
    ebb_mover *handle;
} mover;

static int mover_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    mover *m = (mover *)self;
    PyObject *d;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTupleAndKeywords(arguments, keywords, "O", names, &d))
        return -1;
    if (m->device || !PyObject_TypeCheck(d, s->types[DEVICE])) {
        PyErr_SetString(PyExc_TypeError, "a mover is made once, of a Device");
        return -1;
    }
    Py_INCREF(d);
    m->device = (device *)d;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_mover_create(m->device->handle, &m->handle);
    Py_END_ALLOW_THREADS
    if (status == EBB_OK)
        return 0;
    fail(m->device, status, "the device was closed");
    return -1;
}

static PyObject *mover_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    mover *m = (mover *)self;
    ebb_status status = EBB_OK;
    if (m->handle) {
        Py_BEGIN_ALLOW_THREADS
        status = ebb_mover_destroy(m->handle);
        Py_END_ALLOW_THREADS
    }
    if (status != EBB_OK)
        return fail(m->device, status, "a cargo is still out");
    m->handle = NULL;
    Py_RETURN_NONE;
}

static void mover_dealloc(PyObject *self)
{
    mover *m = (mover *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(mover_close(self, NULL));
    PyErr_Clear();
    Py_XDECREF(m->device);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Whether it was made, and its device with it; else there is an exception. */
static bool made(const mover *m)
{
    if (!m->device)
        fail(NULL, EBB_GONE, "");
    return m->device != NULL;
}

static PyObject *answer(mover *m, ebb_status status)
{
    if (status == EBB_OK)
        Py_RETURN_TRUE;
    if (status == EBB_OFFLOADED)
        Py_RETURN_FALSE;
    return fail(m->device, status,
                status == EBB_BUSY ? "it is in use, or the stream is being captured: an offloaded "
                                     "weight that is not resident cannot be part of a graph"
                                   : "the mover was closed");
}

static PyObject *mover_set_ring(PyObject *self, PyObject *bytes)
{
    mover *m = (mover *)self;
    uint64_t size;
    if (!made(m))
        return NULL;
    if (size_of(bytes, &size) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = m->handle ? ebb_mover_set_ring(m->handle, size) : EBB_GONE;
    Py_END_ALLOW_THREADS
    return answer(m, status);
}

/* How many pieces are to be sent for together: those that are where they were filled, and of others as
   many as are `most` bytes, or one. *bytes: of these others. */
static size_t together(ebb_vbar handle, const piece *pieces, size_t count, uint64_t most,
                       uint64_t *bytes)
{
    *bytes = 0;
    for (size_t i = 0; i < count; i++) {
        const piece *p = &pieces[i];
        if (p->signature && ebb__vbar_peek(handle, p->offset, p->bytes) == p->signature)
            continue;
        if (*bytes && *bytes + p->bytes > most)
            return i;
        *bytes += p->bytes;
    }
    return count;
}

/* fetch(unit, first, most, with, at, ahead, stage): (cargo, the address of each of these pieces in the ring, 0 where
   it is resident); None: the ring has no room now. `ahead`: nobody waits for it yet. */
static PyObject *mover_fetch(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    PyObject *of;
    Py_ssize_t first;
    unsigned long long most, with, at;
    int early, stage;
    uint64_t bytes;
    size_t count = 0;
    ebb_vbar handle;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTuple(arguments, "O!nKKKpp", s->types[UNIT], &of, &first, &most, &with,
                                &at, &early, &stage))
        return NULL;
    piece *pieces = unit_pieces((unit *)of, &count, &handle);
    if (!m->handle || !pieces)
        return fail(m->device, EBB_GONE, "the mover was closed");
    if (first < 0 || (size_t)first >= count) {
        PyErr_SetString(PyExc_IndexError, "the unit has no such piece");
        return NULL;
    }
    pieces += first;
    count = together(handle, pieces, count - (size_t)first, most, &bytes);
    /* A place of its own is looked for when the ring has one, too: to look is not for nothing. */
    if (early && bytes && ebb_mover_head(m->handle) &&
        ebb_mover_has_room(m->handle, bytes) == EBB_OFFLOADED)
        Py_RETURN_NONE;
    ebb_load *loads = calloc(count, sizeof *loads);
    if (!loads)
        return PyErr_NoMemory();
    for (size_t i = 0; i < count; i++)
        loads[i] = (ebb_load){.offset = pieces[i].offset,
                              .bytes = pieces[i].bytes,
                              .host = pieces[i].host,
                              .signature = pieces[i].signature};
    const ebb_fetch how = {.with = with, .at = at, .stage = stage};
    uint64_t cargo = 0;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_mover_fetch(m->handle, handle, loads, count, &how, &cargo);
    Py_END_ALLOW_THREADS
    for (size_t i = 0; i < count; i++)
        pieces[i].signature = loads[i].signature;
    PyObject *list = status == EBB_OK ? PyList_New((Py_ssize_t)count) : NULL;
    for (size_t i = 0; list && i < count; i++)
        if (PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromUnsignedLongLong(loads[i].staged)))
            Py_CLEAR(list);
    free(loads);
    if (list)
        return Py_BuildValue("(KN)", (unsigned long long)cargo, list);
    if (status == EBB_OFFLOADED)
        Py_RETURN_NONE;
    return status == EBB_OK ? NULL : answer(m, status);
}

static int cargo_and_stream(mover *m, PyObject *given, uint64_t *cargo, ebb_stream *stream)
{
    return !made(m) || size_of(given, cargo) < 0 || stream_for(m->device, Py_None, stream) < 0 ? -1
                                                                                               : 0;
}

static PyObject *mover_use(PyObject *self, PyObject *given)
{
    mover *m = (mover *)self;
    uint64_t cargo;
    ebb_stream stream;
    if (cargo_and_stream(m, given, &cargo, &stream) < 0)
        return NULL;
    return answer(m, m->handle ? ebb_mover_use(m->handle, cargo, stream) : EBB_GONE);
}

static PyObject *mover_done(PyObject *self, PyObject *given)
{
    mover *m = (mover *)self;
    uint64_t cargo;
    ebb_stream stream;
    if (cargo_and_stream(m, given, &cargo, &stream) < 0)
        return NULL;
    return answer(m, m->handle ? ebb_mover_done(m->handle, cargo, stream) : EBB_GONE);
}

static PyObject *mover_drop(PyObject *self, PyObject *given)
{
    mover *m = (mover *)self;
    uint64_t cargo;
    if (!made(m))
        return NULL;
    if (size_of(given, &cargo) < 0)
        return NULL;
    return answer(m, m->handle ? ebb_mover_drop(m->handle, cargo) : EBB_GONE);
}

/* ---- host memory ---- */

static PyObject *mover_pin(PyObject *self, PyObject *bytes)
{
    mover *m = (mover *)self;
    uint64_t size;
    void *memory = NULL;
    if (!made(m))
        return NULL;
    if (size_of(bytes, &size) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_alloc(m->device->handle, size, &memory);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(m->device, status, "");
    return PyLong_FromVoidPtr(memory);
}

static PyObject *mover_unpin(PyObject *self, PyObject *address)
{
    mover *m = (mover *)self;
    uint64_t at;
    if (!made(m))
        return NULL;
    if (size_of(address, &at) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_free(m->device->handle, (void *)(uintptr_t)at);
    Py_END_ALLOW_THREADS
    return answer(m, status);
}

static PyObject *mover_borrow(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned long long at, bytes;
    if (!made(m))
        return NULL;
    if (!PyArg_ParseTuple(arguments, "KK", &at, &bytes))
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_borrow(m->device->handle, (const void *)(uintptr_t)at, bytes);
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(status == EBB_OK);
}

static PyObject *mover_give_back(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned long long at, bytes;
    if (!made(m))
        return NULL;
    if (!PyArg_ParseTuple(arguments, "KK", &at, &bytes))
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_return(m->device->handle, (const void *)(uintptr_t)at, bytes);
    Py_END_ALLOW_THREADS
    return answer(m, status);
}

static PyObject *mover_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    mover *m = (mover *)self;
    ebb_mover_stats stats = {.size = sizeof stats};
    ebb_status status = m->handle ? ebb_mover_get_stats(m->handle, &stats) : EBB_GONE;
    if (status != EBB_OK)
        return fail(m->device, status, "the mover was closed");
    PyObject *dict = PyDict_New();
    const struct {
        const char *name;
        uint64_t value;
    } values[] = {{"ring", stats.ring},           {"address", stats.address},
                  {"ring_used", stats.ring_used}, {"cargoes_out", stats.cargoes_out},
                  {"cargoes", stats.cargoes},     {"staged", stats.staged},
                  {"filled", stats.filled},       {"copies", stats.copies},
                  {"waits", stats.waits},         {"no_room", stats.no_room},
                  {"given_up", stats.given_up}};
    for (size_t i = 0; dict && i < sizeof values / sizeof *values; i++)
        if (add_size(dict, values[i].name, values[i].value) < 0)
            Py_CLEAR(dict);
    return dict;
}

static PyObject *mover_dlpack(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned long long address, bytes;
    if (!made(m))
        return NULL;
    if (!PyArg_ParseTuple(arguments, "KK", &address, &bytes))
        return NULL;
    return dlpack_over(self, m->device, address, bytes);
}

static PyMethodDef mover_methods[] = {
    {"stats", mover_stats, METH_NOARGS, "stats($self, /)\n--\n\nWhat it has moved."},
    {"_dlpack", mover_dlpack, METH_VARARGS, "Bytes of the ring, as a DLPack capsule."},
    {"pin", mover_pin, METH_O,
     "pin($self, bytes, /)\n--\n\nNew host memory that is copied at the link's speed: its "
     "address."},
    {"unpin", mover_unpin, METH_O, "unpin($self, address, /)\n--\n\nGive it back."},
    {"borrow", mover_borrow, METH_VARARGS,
     "borrow($self, address, bytes, /)\n--\n\nPin somebody else's memory: whether it could be."},
    {"give_back", mover_give_back, METH_VARARGS,
     "give_back($self, address, bytes, /)\n--\n\nUndo borrow()."},
    {"close", mover_close, METH_NOARGS, "close($self, /)\n--\n\nGive everything back."},
    {"set_ring", mover_set_ring, METH_O,
     "set_ring($self, bytes, /)\n--\n\nThe ring's size: whether it could be had."},
    {"fetch", mover_fetch, METH_VARARGS,
     "fetch($self, unit, first, most, cargo, address, ahead, stage, /)\n--\n\n"
     "Bring some pieces of a unit: into the VBAR, or the ring, there with a cargo or at an "
     "address, "
     "if that can be."},
    {"use", mover_use, METH_O,
     "use($self, cargo, /)\n--\n\nThe current stream waits until it has arrived."},
    {"done", mover_done, METH_O,
     "done($self, cargo, /)\n--\n\nIts last use is on the current stream by now."},
    {"drop", mover_drop, METH_O, "drop($self, cargo, /)\n--\n\nIt was fetched for nothing."},
    {NULL, NULL, 0, NULL},
};

static PyObject *mover_head(PyObject *self, void *unused)
{
    (void)unused;
    const mover *m = (const mover *)self;
    return PyLong_FromUnsignedLongLong(m->handle ? ebb_mover_head(m->handle) : 0);
}

static PyGetSetDef mover_getset[] = {
    {"head", mover_head, NULL, "where the next cargo goes, or 0", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mover_slots[] = {
    {Py_tp_doc, (void *)"A copy stream, and a ring of memory for weights on their way."},
    {Py_tp_init, (void *)mover_init},
    {Py_tp_dealloc, (void *)mover_dealloc},
    {Py_tp_methods, mover_methods},
    {Py_tp_getset, mover_getset},
    {0, NULL},
};

PyType_Spec mover_spec = {"ebbtide._core.Mover", sizeof(mover), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, mover_slots};

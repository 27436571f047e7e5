/*
 * Load, a unit's weights on their way: as many of its pieces as have been sent for, and where they will be.
 *
 * A unit is sent for piece by piece, in their order, as far as the ring has room. What is found resident
 * needs no room and counts as sent for; should it go before the unit is entered, the unit says so. The
 * pieces in the ring are cargoes of the mover, mostly one, for it grows as long as it is the last. A load
 * that is lost, because Ctrl-C struck whoever was about to end it, ends with its last reference: nobody
 * else would ever give its place in the ring back.
 *
 * In C because a model that does not fit pays for it, for each unit, while the GPU waits for the host.
 */
#include "_core.h"

#include <stdlib.h>

#include "fast.h"

enum { FEW = 16 }; /* pieces for which the stack has room */

/* Parts of the ring that may be skipped for a spot where a unit was: of many small layers, which the host is
   busy with, it has fewer tensors to touch so; for others the link is to have all of the ring. */
enum { NEAR = 8, FAR = 4 };

typedef struct load {
    PyObject_HEAD uint64_t *staged; /* of each piece so far, its place in the ring; 0: resident */
    uint64_t *cargoes;
    size_t staged_count, cargo_count;
    uint64_t most;   /* bytes to send for together */
    unsigned users;  /* times that it has been entered and not left */
    char whole;      /* all of it has been sent for */
    PyObject *mover; /* whose cargoes they are; NULL: they are none of its any more */
} load;

static int load_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    unsigned long long most;
    if (keywords || !PyArg_ParseTuple(arguments, "K", &most)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "Load() takes no names");
        return -1;
    }
    ((load *)self)->most = most;
    return 0;
}

static PyObject *end(load *l, PyObject *by, bool was_used);

static void load_dealloc(PyObject *self)
{
    load *l = (load *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    while (l->mover)
        Py_XDECREF(end(l, l->mover, l->users > 0));
    PyErr_Clear();
    PyErr_Restore(kind, value, trace);
    free(l->staged);
    free(l->cargoes);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

const uint64_t *load_staged(PyObject *self, size_t *count)
{
    const load *l = (const load *)self;
    *count = l->staged_count;
    return l->staged;
}

/* ---- sending for it ------------------------------------------------------------------------------ */

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

/* What was sent for is a part of the load. */
static void note(load *l, unit *u, const ebb_load *loads, size_t count, uint64_t cargo)
{
    uint64_t first = 0, size;
    for (size_t i = 0; i < count; i++) {
        l->staged[l->staged_count++] = loads[i].staged;
        first = first ? first : loads[i].staged;
    }
    if (!cargo || (l->cargo_count && l->cargoes[l->cargo_count - 1] == cargo))
        return;
    if (!l->cargo_count)
        spots_add(unit_spots(u, &size), first);
    l->cargoes[l->cargo_count++] = cargo;
}

/* Send for the next pieces. EBB_OFFLOADED: the ring has no room now. */
static ebb_status send(load *l, ebb_mover *mover, unit *u, bool demand)
{
    ebb_vbar handle;
    size_t all;
    uint64_t bytes;
    piece *pieces = unit_pieces(u, &all, &handle) + l->staged_count;
    size_t count = together(handle, pieces, all - l->staged_count, l->most, &bytes);
    uint64_t last = l->cargo_count ? l->cargoes[l->cargo_count - 1] : 0, cargo = 0;
    /* A place of its own is looked for when the ring has one, too: to look is not for nothing. */
    uint64_t start, ring, head = ebb_mover_head(mover, &start, &ring);
    uint64_t room = head && !demand ? ebb_mover_room(mover, bytes, bytes / 8) : bytes;
    if (room < bytes) {
        count = together(handle, pieces, all - l->staged_count, room, &bytes);
        if (bytes > room) /* there is no room for one of them, there */
            room = ebb_mover_room(mover, bytes, UINT64_MAX);
        if (bytes > room)
            return EBB_OFFLOADED;
    }
    ebb_load few[FEW], *loads = count > FEW ? malloc(count * sizeof *loads) : few;
    if (!loads)
        return EBB_NO_HOST_MEMORY;
    for (size_t i = 0; i < count; i++)
        loads[i] = (ebb_load){.offset = pieces[i].offset,
                              .bytes = pieces[i].bytes,
                              .host = pieces[i].host,
                              .signature = pieces[i].signature};
    uint64_t size;
    spots *were = unit_spots(u, &size);
    bool small = unit_small(u);
    const ebb_fetch how = {.with = last,
                           .at = last ? 0 : spots_near(were, size, head, start, ring, small),
                           .skip = ring / (small ? FAR : NEAR),
                           .stage = unit_settled(u)};
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_mover_fetch(mover, handle, loads, count, &how, &cargo);
    Py_END_ALLOW_THREADS
    for (size_t i = 0; i < count; i++) {
        bool filled = pieces[i].signature != loads[i].signature;
        unit_count(u, loads[i].staged ? loads[i].bytes : 0, filled ? loads[i].bytes : 0);
        pieces[i].signature = loads[i].signature;
    }
    if (status == EBB_OK)
        note(l, u, loads, count, cargo);
    if (loads != few)
        free(loads);
    return status;
}

/* Memory for all pieces of a unit. */
static bool ready(load *l, size_t count)
{
    if (!l->staged)
        l->staged = calloc(count, sizeof *l->staged);
    if (!l->cargoes)
        l->cargoes = calloc(count, sizeof *l->cargoes);
    return l->staged && l->cargoes;
}

int load_more(PyObject *self, PyObject *by, unit *u, bool demand)
{
    load *l = (load *)self;
    size_t count;
    ebb_vbar handle;
    device *d;
    ebb_mover *mover = mover_handle(by, &d);
    if (!mover || !unit_pieces(u, &count, &handle)) {
        fail(d, EBB_GONE, "the mover was closed");
        return -1;
    }
    if (!ready(l, count)) {
        PyErr_NoMemory();
        return -1;
    }
    if (!l->mover)
        Py_INCREF(l->mover = by);
    ebb_status status = EBB_OK;
    while (l->staged_count < count && status == EBB_OK)
        status = send(l, mover, u, demand);
    l->whole = (char)(l->staged_count >= count);
    if (status == EBB_OK || status == EBB_OFFLOADED)
        return l->whole;
    mover_failed(d, status);
    return -1;
}

/* advance(mover, unit, demand): send for more, as far as the ring has room: whether that was all. */
static PyObject *load_advance(PyObject *self, PyObject *arguments)
{
    PyObject *by, *of;
    int demand;
    const state *s = state_of(self);
    if (!s ||
        !PyArg_ParseTuple(arguments, "O!O!p", s->types[MOVER], &by, s->types[UNIT], &of, &demand))
        return NULL;
    int whole = load_more(self, by, (unit *)of, demand);
    return whole < 0 ? NULL : PyBool_FromLong(whole);
}

bool load_is_whole(PyObject *self)
{
    return ((const load *)self)->whole;
}

size_t load_cargoes(PyObject *self)
{
    return ((const load *)self)->cargo_count;
}

/* ---- using it ------------------------------------------------------------------------------------- */

/* The mover, and the current stream of its device. NULL with an exception. */
static ebb_mover *by_and_on(PyObject *by, device **d, ebb_stream *stream)
{
    ebb_mover *mover = mover_handle(by, d);
    if (!mover)
        fail(*d, EBB_GONE, "the mover was closed");
    return mover && stream_for(*d, Py_None, stream) == 0 ? mover : NULL;
}

static bool is_mover(PyObject *self, PyObject *by)
{
    const state *s = state_of(self);
    if (s && !PyObject_TypeCheck(by, s->types[MOVER]))
        PyErr_SetString(PyExc_TypeError, "a load is a Mover's");
    return s && PyObject_TypeCheck(by, s->types[MOVER]);
}

int load_begin(PyObject *self, PyObject *by)
{
    load *l = (load *)self;
    device *d;
    ebb_stream stream;
    ebb_mover *mover = by_and_on(by, &d, &stream);
    if (!mover)
        return -1;
    for (size_t i = 0; i < l->cargo_count; i++) {
        ebb_status status = ebb_mover_use(mover, l->cargoes[i], stream);
        if (status == EBB_OK)
            continue;
        while (i--)
            ebb_mover_done(mover, l->cargoes[i], stream);
        mover_failed(d, status);
        return -1;
    }
    l->users++;
    return 0;
}

static PyObject *load_use(PyObject *self, PyObject *by)
{
    if (!is_mover(self, by) || load_begin(self, by) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* No more of it is needed: it was used, or it was not. With the last use, or without any, it is over. */
static PyObject *end(load *l, PyObject *by, bool was_used)
{
    device *d;
    ebb_stream stream;
    l->users -= was_used && l->users > 0;
    PyObject *last = l->users ? NULL : l->mover;
    if (last)
        l->mover = NULL;
    ebb_mover *mover = by_and_on(by, &d, &stream);
    ebb_status status = EBB_OK;
    for (size_t i = 0; mover && i < l->cargo_count; i++) {
        ebb_status one = was_used ? ebb_mover_done(mover, l->cargoes[i], stream)
                                  : ebb_mover_drop(mover, l->cargoes[i]);
        if (one == EBB_GONE && !was_used)
            one = EBB_OK; /* it has given way to tensors */
        status = status == EBB_OK ? one : status;
    }
    PyObject *result = !mover             ? NULL
                       : status == EBB_OK ? Py_NewRef(Py_None)
                                          : mover_failed(d, status);
    Py_XDECREF(last);
    return result;
}

int load_end(PyObject *self, PyObject *by)
{
    PyObject *ended = end((load *)self, by, true);
    Py_XDECREF(ended);
    return ended ? 0 : -1;
}

static PyObject *load_done(PyObject *self, PyObject *by)
{
    return is_mover(self, by) ? end((load *)self, by, true) : NULL;
}

static PyObject *load_drop(PyObject *self, PyObject *by)
{
    return is_mover(self, by) ? end((load *)self, by, false) : NULL;
}

/* ---- what it says of itself ----------------------------------------------------------------------- */

static PyObject *get_staged(PyObject *self, void *unused)
{
    (void)unused;
    const load *l = (const load *)self;
    PyObject *list = PyList_New((Py_ssize_t)l->staged_count);
    for (size_t i = 0; list && i < l->staged_count; i++)
        if (PyList_SetItem(list, (Py_ssize_t)i, PyLong_FromUnsignedLongLong(l->staged[i])))
            Py_CLEAR(list);
    return list;
}

PyObject *load_key(PyObject *self)
{
    const load *l = (const load *)self;
    return PyBytes_FromStringAndSize((const char *)l->staged,
                                     (Py_ssize_t)(l->staged_count * sizeof *l->staged));
}

static PyObject *get_key(PyObject *self, void *unused)
{
    (void)unused;
    return load_key(self);
}

static PyObject *get_cargoes(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(((const load *)self)->cargo_count);
}

static PyMethodDef load_methods[] = {
    {"advance", load_advance, METH_VARARGS,
     "advance($self, mover, unit, demand, /)\n--\n\n"
     "Send for more, as far as the ring has room: whether that was all. `demand`: somebody waits "
     "for it."},
    {"use", load_use, METH_O,
     "use($self, mover, /)\n--\n\n"
     "The current stream waits until it has arrived. Gone: it has given way to tensors."},
    {"done", load_done, METH_O,
     "done($self, mover, /)\n--\n\nIts last use is on the current stream by now."},
    {"drop", load_drop, METH_O, "drop($self, mover, /)\n--\n\nIt was sent for in vain."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef load_getset[] = {
    {"staged", get_staged, NULL, "of each piece, its place in the ring; 0: resident", NULL},
    {"key", get_key, NULL, "the same, to be looked up", NULL},
    {"cargoes", get_cargoes, NULL, "how many there are in the ring", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef load_members[] = {
    {"whole", T_BOOL, offsetof(load, whole), READONLY, "all of it has been sent for"},
    {"used", T_UINT, offsetof(load, users), READONLY, "times entered and not left"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot load_slots[] = {
    {Py_tp_doc, (void *)"A unit's weights on their way."},
    {Py_tp_init, (void *)load_init},
    {Py_tp_dealloc, (void *)load_dealloc},
    {Py_tp_methods, load_methods},
    {Py_tp_getset, load_getset},
    {Py_tp_members, load_members},
    {0, NULL},
};

PyType_Spec load_spec = {"ebbtide._core.Load", sizeof(load), 0, Py_TPFLAGS_DEFAULT, load_slots};

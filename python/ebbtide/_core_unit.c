/*
 * Unit, what _offload/ goes in and out of: a few modules' weights, which are needed together.
 *
 * Between uses the modules hold parked tensors, which have no memory. enter() pins the weights, and
 * from then on the thread finds tensors over their memory in the place of the parked ones; leave() undoes
 * both. A unit whose weights are all where they were filled is entered without letting go of Python's lock, in
 * less than a microsecond: that is what a model pays that fits.
 *
 *   pieces  the weights, a range of the VBAR each, in the order of their addresses
 *   runs    the same as few ranges as possible: what is pinned when all of them are resident
 *   swaps   places in modules, and what is found there while the unit is entered. Modules' own dicts
 *           are Places, which look that up. In others, and in lists, tensors are exchanged; and
 *           everywhere for torch.compile(), which reads dicts behind their backs.
 */
#include "_core_unit.h"

#include <stdlib.h>

enum { ALIGNMENT = 512 };

/* ---- life --------------------------------------------------------------------------------------- */

static int take_pieces(unit *u, PyObject *list)
{
    Py_ssize_t count = PyList_Size(list);
    if (count < 0)
        return -1;
    u->pieces = calloc((size_t)count + 1, sizeof *u->pieces);
    u->runs = calloc((size_t)count + 1, sizeof *u->runs);
    if (!u->pieces || !u->runs) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long offset, bytes, host;
        PyObject *item = PyList_GetItem(list, i);
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "KKK", &offset, &bytes, &host)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a piece is (offset, bytes, host address)");
            return -1;
        }
        piece *p = &u->pieces[u->piece_count++];
        *p = (piece){.offset = offset, .bytes = bytes, .host = (const void *)(uintptr_t)host};
        u->size += bytes;
        run *last = u->run_count ? &u->runs[u->run_count - 1] : NULL;
        if (last && last->offset + last->bytes <= offset &&
            offset - (last->offset + last->bytes) < ALIGNMENT)
            last->bytes = offset + bytes - last->offset;
        else
            u->runs[u->run_count++] = (run){.offset = offset, .bytes = bytes};
    }
    return 0;
}

/* Tell a module's dict which of the swaps are in it: those that follow one another. */
static void bind(unit *u)
{
    for (size_t i = 0, first = 0; i < u->swap_count; i++) {
        if (u->swaps[i].place != u->swaps[first].place)
            first = i;
        if (u->swaps[i].looked_up)
            places_bind(u->swaps[i].place, u, first, i - first + 1, u->swaps[first].parked,
                        u->swaps[first].real);
    }
}

static int take_swaps(unit *u, PyObject *list, const state *s_)
{
    Py_ssize_t count = PyList_Size(list);
    if (count < 0)
        return -1;
    u->swaps = calloc((size_t)count + 1, sizeof *u->swaps);
    if (!u->swaps) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyList_GetItem(list, i), *place, *key, *parked, *real;
        unsigned which;
        if (!PyTuple_Check(item) ||
            !PyArg_ParseTuple(item, "OOOOI", &place, &key, &parked, &real, &which))
            return -1;
        bool sequence = PyList_Check(place);
        bool looked_up = PyObject_TypeCheck(place, s_->types[PLACES]);
        if ((!sequence && !PyDict_Check(place)) || which >= u->piece_count) {
            PyErr_SetString(PyExc_TypeError, "a swap is in a dict or a list, and of a piece");
            return -1;
        }
        swap *s = &u->swaps[u->swap_count];
        *s = (swap){
            .index = sequence ? PyLong_AsSsize_t(key) : -1, .piece = which, .looked_up = looked_up};
        if (PyErr_Occurred())
            return -1;
        u->exchanged += !looked_up;
        Py_INCREF(s->place = place);
        Py_INCREF(s->key = key);
        Py_INCREF(s->parked = parked);
        Py_INCREF(s->real = real);
        u->swap_count++;
    }
    return 0;
}

static int unit_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"vbar", "pieces", "swaps", "compile_by", "ahead", NULL};
    unit *u = (unit *)self;
    PyObject *v, *pieces, *swaps, *compile_by, *its;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTupleAndKeywords(arguments, keywords, "OO!O!OO!", names, &v, &PyList_Type,
                                           &pieces, &PyList_Type, &swaps, &compile_by,
                                           s->types[AHEAD], &its))
        return -1;
    if (u->vbar || !PyObject_TypeCheck(v, s->types[VBAR])) {
        PyErr_SetString(PyExc_TypeError, "a unit is made once, of a VBAR");
        return -1;
    }
    u->name = PyUnicode_InternFromString("_version");
    u->compiler = PyUnicode_InternFromString("torch._dynamo");
    if (!u->name || !u->compiler)
        return -1;
    Py_INCREF(v);
    u->vbar = (vbar *)v;
    Py_INCREF(u->compile_by = compile_by);
    Py_INCREF(u->ahead = its);
    if (take_pieces(u, pieces) < 0 || take_swaps(u, swaps, s) < 0)
        return -1;
    bind(u);
    return 0;
}

static int unit_traverse(PyObject *self, visitproc visit, void *arg)
{
    unit *u = (unit *)self;
    Py_VISIT(u->vbar);
    Py_VISIT(u->base);
    Py_VISIT(u->reals);
    Py_VISIT(u->compile_by);
    Py_VISIT(u->ahead);
    Py_VISIT(u->now);
    Py_VISIT(u->load);
    Py_VISIT(u->views);
    Py_VISIT(u->tensors);
    for (size_t i = 0; i < u->swap_count; i++) {
        Py_VISIT(u->swaps[i].place);
        Py_VISIT(u->swaps[i].parked);
        Py_VISIT(u->swaps[i].real);
        Py_VISIT(u->swaps[i].installed);
    }
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int unit_clear(PyObject *self)
{
    unit *u = (unit *)self;
    size_t count = u->swap_count;
    u->swap_count = 0;
    for (size_t i = 0; i < count; i++) {
        if (u->swaps[i].looked_up)
            places_release(u->swaps[i].place, u);
        Py_CLEAR(u->swaps[i].place);
        Py_CLEAR(u->swaps[i].key);
        Py_CLEAR(u->swaps[i].parked);
        Py_CLEAR(u->swaps[i].real);
        Py_CLEAR(u->swaps[i].installed);
    }
    Py_CLEAR(u->vbar);
    Py_CLEAR(u->base);
    Py_CLEAR(u->reals);
    Py_CLEAR(u->compile_by);
    Py_CLEAR(u->name);
    Py_CLEAR(u->compiler);
    Py_CLEAR(u->ahead);
    Py_CLEAR(u->now);
    Py_CLEAR(u->load);
    Py_CLEAR(u->views);
    Py_CLEAR(u->tensors);
    return 0;
}

static void unit_dealloc(PyObject *self)
{
    unit *u = (unit *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    unit_clear(self);
    free(u->pieces);
    free(u->runs);
    free(u->swaps);
    free(u->guests);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* ---- who is in ----------------------------------------------------------------------------------- */

static bool come_in(unit *u)
{
    if (u->depth == u->guest_room) {
        size_t room = u->guest_room ? 2 * u->guest_room : 2;
        guest *guests = realloc(u->guests, room * sizeof *guests);
        if (!guests) {
            PyErr_NoMemory();
            return false;
        }
        u->guests = guests;
        u->guest_room = room;
    }
    u->guests[u->depth++] = (guest){.thread = this_thread()};
    return true;
}

static void go_away(unit *u)
{
    uint64_t me = this_thread();
    unsigned i = --u->depth;
    if (!i)
        u->outdated = 0;
    for (unsigned k = 0; k < u->depth; k++)
        if (u->guests[k].thread == me && u->guests[i].thread != me) {
            u->guests[k] = u->guests[i];
            return;
        }
}

static guest *me_in(const unit *u)
{
    uint64_t me = u->depth ? this_thread() : 0;
    for (unsigned i = 0; i < u->depth; i++)
        if (u->guests[i].thread == me)
            return &u->guests[i];
    return NULL;
}

bool unit_step(unit *u, bool in)
{
    guest *it = me_in(u);
    if (!it || (!in && !it->within))
        return false;
    if (in)
        it->within++;
    else
        it->within--;
    return true;
}

bool unit_is_within(const unit *u)
{
    const guest *it = me_in(u);
    return it && it->within;
}

/* ---- methods ------------------------------------------------------------------------------------- */

int unit_stream(unit *u, ebb_stream *stream)
{
    if (!u->vbar) {
        fail(NULL, EBB_GONE, "");
        return -1;
    }
    return stream_for(u->vbar->device, Py_None, stream);
}

int unit_go_in(unit *u)
{
    ebb_stream stream;
    if (unit_stream(u, &stream) < 0)
        return -1;
    if (u->depth || u->stale || !unit_pin_runs(u, stream, false))
        return 0;
    bool in = come_in(u);
    if (!in || !unit_install(u, NULL, u->ahead)) {
        u->depth = 0;
        unit_unpin_runs(u, stream);
        return in ? 0 : -1;
    }
    u->whole = true;
    return 1;
}

/* enter(): True, or False: something is not resident, or somebody is in. */
static PyObject *unit_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    int in = unit_go_in((unit *)self);
    return in < 0 ? NULL : PyBool_FromLong(in);
}

int unit_go_in_with(unit *u, PyObject *brought, PyObject *reals, PyObject *its)
{
    ebb_stream stream;
    size_t count;
    if (unit_stream(u, &stream) < 0)
        return -1;
    const uint64_t *staged = load_staged(brought, &count);
    if (count != u->piece_count || (size_t)PyList_Size(reals) != u->swap_count) {
        PyErr_SetString(PyExc_ValueError, "a whole load, and one tensor for each swap");
        return -1;
    }
    if (u->depth || u->stale)
        return 0;
    if (!come_in(u)) /* Python's lock may be dropped: nobody else comes in */
        return -1;
    bool pinned = unit_pin_pieces(u, staged, stream);
    if (!pinned || !unit_install(u, reals, its)) {
        unit_unpin_pieces(u, stream);
        u->depth = 0;
        return 0;
    }
    u->whole = false;
    bool all = true;
    for (size_t i = 0; i < u->piece_count; i++)
        all = all && u->pieces[i].pinned;
    if (all)
        unit_sign_runs(u);
    return 1;
}

/* enter_with(load, reals, ahead): the same, whatever it takes: of pieces that the load has in the ring the
   tensors of `reals` go in, and the others are pinned. */
static PyObject *unit_enter_with(PyObject *self, PyObject *arguments)
{
    PyObject *brought, *reals, *its;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTuple(arguments, "O!O!O!", s->types[LOAD], &brought, &PyList_Type, &reals,
                                s->types[AHEAD], &its))
        return NULL;
    int in = unit_go_in_with((unit *)self, brought, reals, its);
    return in < 0 ? NULL : PyBool_FromLong(in);
}

static PyObject *unit_covers_(PyObject *self, PyObject *address)
{
    uint64_t at = PyLong_AsUnsignedLongLong(address);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(unit_covers((unit *)self, at));
}

/* enter_again(): one more, where somebody is in, for the current stream. False: nobody is, or what is there is
   no more what the weights are. */
static PyObject *unit_enter_again(PyObject *self, PyObject *unused)
{
    (void)unused;
    unit *u = (unit *)self;
    ebb_stream stream;
    if (unit_stream(u, &stream) < 0)
        return NULL;
    if (!u->depth || u->outdated)
        Py_RETURN_FALSE;
    if (!come_in(u)) /* Python's lock may be dropped: it stays entered */
        return NULL;
    if (unit_pin_again(u, stream))
        Py_RETURN_TRUE;
    go_away(u);
    return fail(u->vbar->device, EBB_DRIVER_FAILED, "one stream could not be put after another");
}

/* Has somebody written to its tensors? _written() saves what they hold, before they are parked. */
static int look_for_writes(unit *u)
{
    if (!u->base)
        return 0;
    PyObject *version = PyObject_GetAttr(u->base, u->name);
    long now = version ? PyLong_AsLong(version) : -1;
    Py_XDECREF(version);
    if (now == u->version)
        return 0;
    PyObject *saved =
        PyErr_Occurred() ? NULL : PyObject_CallMethod((PyObject *)u, "_written", NULL);
    Py_XDECREF(saved);
    return saved ? 0 : -1;
}

int unit_go_out(unit *u)
{
    ebb_stream stream;
    if (unit_stream(u, &stream) < 0)
        return -1;
    if (!u->depth) {
        fail(u->vbar->device, EBB_NOT_PINNED, "leave() goes with an enter()");
        return -1;
    }
    PyObject *type = NULL, *value = NULL, *trace = NULL;
    if (u->depth == 1) {
        if (look_for_writes(u) < 0)
            PyErr_Fetch(&type, &value, &trace);
        unit_park(u);
    }
    unit_unpin_once(u, stream);
    go_away(u);
    if (!u->depth)
        for (size_t i = 0; !u->whole && i < u->piece_count; i++)
            u->pieces[i].pinned = false;
    if (!type)
        return 0;
    PyErr_Restore(type, value, trace);
    return -1;
}

static PyObject *unit_leave(PyObject *self, PyObject *unused)
{
    (void)unused;
    if (unit_go_out((unit *)self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* forget(piece): its contents on the host have changed. */
static PyObject *unit_forget(PyObject *self, PyObject *which)
{
    unit *u = (unit *)self;
    size_t index = PyLong_AsSize_t(which);
    if (PyErr_Occurred())
        return NULL;
    if (index >= u->piece_count) {
        PyErr_SetString(PyExc_IndexError, "no such piece");
        return NULL;
    }
    u->pieces[index].signature = 0;
    for (size_t i = 0; i < u->run_count; i++)
        u->runs[i].signature = 0;
    u->outdated = (char)(u->depth > 0);
    Py_RETURN_NONE;
}

/* learn(piece, unit, its piece): both are the same weight, so what one has filled the other need not. */
static PyObject *unit_learn(PyObject *self, PyObject *arguments)
{
    unit *u = (unit *)self;
    unsigned mine, its;
    PyObject *other;
    if (!PyArg_ParseTuple(arguments, "IOI", &mine, &other, &its))
        return NULL;
    const state *s = state_of(self);
    if (!s || !PyObject_TypeCheck(other, s->types[UNIT]) || mine >= u->piece_count ||
        its >= ((unit *)other)->piece_count) {
        PyErr_SetString(PyExc_TypeError, "a piece of this unit, and one of another");
        return NULL;
    }
    uint64_t signature = ((unit *)other)->pieces[its].signature;
    if (signature > u->pieces[mine].signature)
        u->pieces[mine].signature = signature;
    Py_RETURN_NONE;
}

static PyObject *unit_resident(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(unit_bytes_here((const unit *)self));
}

static PyObject *unit_is_resident(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(unit_is_here((const unit *)self));
}

static PyObject *unit_step_(PyObject *self, PyObject *in)
{
    return PyBool_FromLong(unit_step((unit *)self, in == Py_True));
}

static PyMethodDef unit_methods[] = {
    {"enter", unit_enter, METH_NOARGS,
     "enter($self, /)\n--\n\nPin all and install its tensors, if all is resident: whether it was."},
    {"enter_with", unit_enter_with, METH_VARARGS,
     "enter_with($self, load, reals, ahead, /)\n--\n\n"
     "The same, with other tensors for the pieces that are in the ring."},
    {"enter_again", unit_enter_again, METH_NOARGS,
     "enter_again($self, /)\n--\n\nOnce more, where somebody is in: whether that is so, and its "
     "weights are what they were."},
    {"step", unit_step_, METH_O,
     "step($self, into, /)\n--\n\nThis thread goes into a member of the run, or comes out: whether "
     "it is in the run."},
    {"covers", unit_covers_, METH_O,
     "covers($self, address, /)\n--\n\nWhether it is in use for the unit, which is entered."},
    {"leave", unit_leave, METH_NOARGS, "leave($self, /)\n--\n\nPark its tensors, and unpin."},
    {"forget", unit_forget, METH_O,
     "forget($self, piece, /)\n--\n\nThe piece's contents on the host have changed."},
    {"learn", unit_learn, METH_VARARGS,
     "learn($self, piece, unit, its, /)\n--\n\nThe same weight, which the other may have filled."},
    {NULL, NULL, 0, NULL},
};

static PyObject *unit_mine(PyObject *self, void *unused)
{
    (void)unused;
    const unit *u = (const unit *)self;
    uint64_t me = this_thread();
    unsigned long times = 0;
    for (unsigned i = 0; i < u->depth; i++)
        times += u->guests[i].thread == me;
    return PyLong_FromUnsignedLong(times);
}

static PyObject *get_within(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(unit_is_within((const unit *)self));
}

static PyGetSetDef unit_getset[] = {
    {"mine", unit_mine, NULL, "times that this thread has entered it and not left it", NULL},
    {"within", get_within, NULL, "this thread is in a call of one of the run's members", NULL},
    {"resident", unit_resident, NULL, "bytes that are resident, and filled", NULL},
    {"is_resident", unit_is_resident, NULL, "all of them are", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef unit_members[] = {
    {"depth", T_UINT, offsetof(unit, depth), READONLY, "times entered and not left"},
    {"stale", T_INT, offsetof(unit, stale), 0, "it is not entered any more"},
    {"closes", T_BOOL, offsetof(unit, closes), 0, "between its members nothing real is found"},
    {"outdated", T_BOOL, offsetof(unit, outdated), READONLY, "in use, with what it was before"},
    {"settled", T_BOOL, offsetof(unit, settled), 0, "no place of its own is tried for"},
    {"small", T_BOOL, offsetof(unit, small), 0, "its layers are many, and small"},
    {"streamed", T_ULONGLONG, offsetof(unit, streamed), READONLY, "bytes sent into the ring"},
    {"filled", T_ULONGLONG, offsetof(unit, filled), READONLY, "bytes sent for to stay"},
    {"base", T_OBJECT, offsetof(unit, base), 0, "the tensor that its own are views of"},
    {"version", T_LONG, offsetof(unit, version), 0, "the base's, when it was last looked at"},
    {"load", T_OBJECT, offsetof(unit, load), 0, "what has been sent for of it, or None"},
    {"views", T_OBJECT, offsetof(unit, views), 0, "its tensors over the ring, by where they are"},
    {"tensors", T_OBJECT, offsetof(unit, tensors), 0, "those that are in its places, or None"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot unit_slots[] = {
    {Py_tp_doc, (void *)"Weights that are needed together."},
    {Py_tp_init, (void *)unit_init},
    {Py_tp_traverse, (void *)unit_traverse},
    {Py_tp_clear, (void *)unit_clear},
    {Py_tp_dealloc, (void *)unit_dealloc},
    {Py_tp_methods, unit_methods},
    {Py_tp_getset, unit_getset},
    {Py_tp_members, unit_members},
    {0, NULL},
};

PyType_Spec unit_spec = {"ebbtide._core.Unit", sizeof(unit), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, unit_slots};

spots *unit_spots(unit *u, uint64_t *size)
{
    *size = u->size;
    return &u->spots;
}

void unit_count(unit *u, uint64_t streamed, uint64_t filled)
{
    u->streamed += streamed;
    u->filled += filled;
}

bool unit_settled(const unit *u)
{
    return u->settled;
}

bool unit_small(const unit *u)
{
    return u->small;
}

piece *unit_pieces(unit *u, size_t *count, ebb_vbar *handle)
{
    if (!u->vbar)
        return NULL;
    *count = u->piece_count;
    *handle = u->vbar->handle;
    return u->pieces;
}

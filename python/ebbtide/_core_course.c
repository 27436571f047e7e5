/*
 * Course, passes of a model that streams, that go as the last one went.
 *
 * Python sees to every pass of such a model: what comes next, what there is to learn, how much is to stay. Mostly
 * there is nothing new. But between two layers none of what Python needs for that is in the processor's caches,
 * so to find it out takes the host as long as a layer does, for each unit. So when some passes were the same,
 * Python lays a course: the units in their order, for so many passes. What these need is done here.
 *
 * Whatever is not as it was laid ends it: another unit, weights that have not come, tensors that are not made
 * yet, another stream, another thread, a change of the GPU's room. Python does that step, and goes on from there
 * (Way.by_hand()): at any time all of what it looks at is as if it had done the steps before.
 *
 * A step is done with the lock that Python uses, if that is free, and if the current stream is known. Then nothing
 * here runs Python, but where a weight has been written to, or where the program looks at whatever PyTorch is asked
 * for (a TorchFunctionMode): so Ctrl-C finds a step done or not begun, or is told after it.
 */
#include "_core_unit.h"

#include <stdlib.h>

typedef struct leg {
    unit *unit;
    uint64_t portion; /* bytes of it to send for together; 0: it was resident */
} leg;

/* What Python calls that which is asked for in every pass. */
enum { REALS, AHEADS, BASES, VERSIONS, NAMES };
static const char *const names[NAMES] = {"reals", "ahead", "bases", "versions"};

struct course {
    PyObject_HEAD PyObject *mover;
    PyObject *acquire, *release; /* the lock's */
    PyTypeObject *load;          /* the type */
    PyObject *names[NAMES];
    PyObject *vbar, *outlook; /* what the GPU's room has to look like: see Mover.outlook() */
    leg *legs;
    size_t count;
    unsigned left, taken;       /* passes that it may be for still, and has been for */
    char stopped;               /* Python is to see the end of the pass that goes by it */
    char running;               /* a pass does, */
    uint64_t thread;            /* on this thread; */
    size_t at;                  /* it has come to so many units, */
    unsigned slow;              /* of which so many had to come, */
    PyObject *called;           /* by gates of these names; */
    PyObject *calls;            /* if it goes as the last one went, these */
    unsigned long long entries; /* of units that had to come, in all */
};

/* ---- its life -------------------------------------------------------------------------------------- */

static int course_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    course *c = (course *)self;
    PyObject *mover, *lock;
    const state *s = state_of(self);
    if (!s || keywords || !PyArg_ParseTuple(arguments, "O!O", s->types[MOVER], &mover, &lock))
        return -1;
    if (c->mover) {
        PyErr_SetString(PyExc_TypeError, "a course is made once");
        return -1;
    }
    Py_INCREF(c->mover = mover);
    Py_INCREF(c->load = s->types[LOAD]);
    c->acquire = PyObject_GetAttrString(lock, "acquire");
    c->release = PyObject_GetAttrString(lock, "release");
    bool made = c->acquire && c->release;
    for (int i = 0; i < NAMES && made; i++)
        made = (c->names[i] = PyUnicode_InternFromString(names[i]));
    return made ? 0 : -1;
}

static int course_traverse(PyObject *self, visitproc visit, void *arg)
{
    const course *c = (const course *)self;
    Py_VISIT(c->mover);
    Py_VISIT(c->acquire);
    Py_VISIT(c->release);
    Py_VISIT(c->load);
    Py_VISIT(c->vbar);
    Py_VISIT(c->called);
    Py_VISIT(c->calls);
    for (size_t i = 0; i < c->count; i++)
        Py_VISIT(c->legs[i].unit);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

/* Nothing is laid any more. To let go of units may run anything. */
static void forget(course *c)
{
    leg *legs = c->legs;
    size_t count = c->count;
    c->legs = NULL;
    c->count = 0;
    c->left = 0;
    c->running = 0;
    for (size_t i = 0; i < count; i++)
        Py_DECREF(legs[i].unit);
    free(legs);
    Py_CLEAR(c->vbar);
    Py_CLEAR(c->outlook);
    Py_CLEAR(c->called);
    Py_CLEAR(c->calls);
}

static int course_clear(PyObject *self)
{
    course *c = (course *)self;
    forget(c);
    Py_CLEAR(c->mover);
    Py_CLEAR(c->acquire);
    Py_CLEAR(c->release);
    Py_CLEAR(c->load);
    for (int i = 0; i < NAMES; i++)
        Py_CLEAR(c->names[i]);
    return 0;
}

static void course_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    course_clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* ---- laying it ------------------------------------------------------------------------------------- */

/* lay(units, portions, calls, vbar, outlook, passes): the next passes are as these units ran, by these calls of
   gates. */
static PyObject *course_lay(PyObject *self, PyObject *arguments)
{
    course *c = (course *)self;
    PyObject *units, *portions, *calls, *of, *outlook;
    unsigned passes;
    const state *s = state_of(self);
    if (!s ||
        !PyArg_ParseTuple(arguments, "O!O!O!O!SI", &PyList_Type, &units, &PyList_Type, &portions,
                          &PyList_Type, &calls, s->types[VBAR], &of, &outlook, &passes))
        return NULL;
    Py_ssize_t count = PyList_Size(units);
    if (!count || count != PyList_Size(portions)) {
        PyErr_SetString(PyExc_ValueError, "a portion for each unit, of which there are some");
        return NULL;
    }
    forget(c);
    c->legs = calloc((size_t)count, sizeof *c->legs);
    if (!c->legs)
        return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *its = PyList_GetItem(units, i);
        uint64_t portion;
        if (size_of(PyList_GetItem(portions, i), &portion) < 0 ||
            !PyObject_TypeCheck(its, s->types[UNIT])) {
            forget(c);
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_TypeError, "a course is of units");
            return NULL;
        }
        Py_INCREF(its);
        c->legs[c->count++] = (leg){.unit = (unit *)its, .portion = portion};
    }
    Py_INCREF(c->calls = calls);
    Py_INCREF(c->vbar = of);
    Py_INCREF(c->outlook = outlook);
    c->left = passes;
    Py_RETURN_NONE;
}

/* stop(): the pass that it is in is the last, and Python sees to its end. */
static PyObject *course_stop(PyObject *self, PyObject *unused)
{
    (void)unused;
    ((course *)self)->left = 0;
    ((course *)self)->stopped = 1;
    Py_RETURN_NONE;
}

/* clear(): what was laid is gone. For how many passes it was used; and of one that goes by it, which Python sees to
   from now on, what was called, how many units were entered, and how many of them had to come; else None. At once: a
   pass that began in between would be seen by nobody. */
static PyObject *course_forget(PyObject *self, PyObject *unused)
{
    (void)unused;
    course *c = (course *)self;
    unsigned taken = c->taken, slow = c->slow;
    Py_ssize_t at = (Py_ssize_t)c->at;
    PyObject *called = c->running ? c->called : NULL;
    if (called)
        c->called = NULL;
    c->taken = 0;
    forget(c);
    return called ? Py_BuildValue("I(NnI)", taken, called, at, slow)
                  : Py_BuildValue("IO", taken, Py_None);
}

/* ---- one step -------------------------------------------------------------------------------------- */

/* What could not be done here is no error: Python does it, and is told. Always 0. */
static int by_python(void)
{
    forgive();
    return 0;
}

/* A step begins: with the lock, and on a stream that runs no Python to be asked for. */
static bool begin(course *c)
{
    device *d;
    mover_handle(c->mover, &d);
    if (!stream_is_met(d))
        return false;
    PyObject *got = PyObject_CallFunctionObjArgs(c->acquire, Py_False, NULL);
    bool yes = got == Py_True;
    Py_XDECREF(got);
    forgive();
    return yes;
}

/* And is over. An exception that is there stays. */
static void end(course *c)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallNoArgs(c->release));
    forgive();
    PyErr_Restore(type, value, trace);
}

static PyObject *load_of(const unit *u)
{
    return u->load == Py_None ? NULL : u->load;
}

static void put(PyObject **to, PyObject *what)
{
    PyObject *old = *to;
    Py_INCREF(*to = what);
    Py_XDECREF(old);
}

/* Send for more of a unit, as far as the ring goes: whether that was all. */
static bool fetch(course *c, const leg *next)
{
    unit *u = next->unit;
    PyObject *load = load_of(u);
    if (load)
        Py_INCREF(load);
    else if (next->portion)
        load = PyObject_CallFunction((PyObject *)c->load, "K", next->portion);
    if (!load)
        return by_python();
    put(&u->load, load);
    int whole = load_more(load, c->mover, u, false);
    forgive(); /* whoever needs it tries again, and is told */
    /* What is resident by now needs no keeping. */
    if (!load_cargoes(load) && u->load == load)
        put(&u->load, Py_None);
    Py_DECREF(load);
    return whole > 0;
}

/* Bring what comes next, beyond the end of the pass too. */
static void fetch_ahead(course *c)
{
    for (size_t i = 0; i < c->count; i++) {
        const leg *next = &c->legs[(c->at + i) % c->count];
        const unit *u = next->unit;
        PyObject *load = load_of(u);
        if (u->depth || (load ? load_is_whole(load) : unit_is_here(u)))
            continue;
        if (!fetch(c, next))
            return;
    }
}

/* A part of what Python knows a unit's tensors by. Borrowed from it, for it goes on to be there. */
static PyObject *part(const course *c, PyObject *tensors, int name)
{
    PyObject *found = PyObject_GetAttr(tensors, c->names[name]);
    Py_XDECREF(found);
    return found;
}

/* Whether somebody has written to the tensors over the ring. */
static bool is_written(const course *c, const unit *u)
{
    if (!u->tensors || u->tensors == Py_None)
        return false;
    PyObject *bases = part(c, u->tensors, BASES), *versions = part(c, u->tensors, VERSIONS);
    bool same = bases && versions && PyList_Check(bases) && PyList_Check(versions) &&
                PyList_Size(bases) == PyList_Size(versions);
    for (Py_ssize_t i = 0; same && i < PyList_Size(bases); i++) {
        PyObject *now = PyObject_GetAttr(PyList_GetItem(bases, i), u->name);
        same = now && PyObject_RichCompareBool(now, PyList_GetItem(versions, i), Py_EQ) == 1;
        Py_XDECREF(now);
    }
    return !same;
}

/* Out of a unit. 1; 0: it is still in; -1: it is out, with an exception. */
static int out_of(course *c, unit *u)
{
    PyObject *load = load_of(u);
    if (u->depth != 1 || u->guests[0].thread != c->thread || is_written(c, u))
        return by_python();
    if (!load)
        return unit_go_out(u) < 0 ? -1 : 1;
    Py_INCREF(load);
    PyObject *type, *value, *trace;
    unit_go_out(u);
    PyErr_Fetch(&type, &value, &trace);
    if (!u->depth) {
        put(&u->tensors, Py_None);
        put(&u->load, Py_None);
        if (load_end(load, c->mover) < 0 && type)
            PyErr_Clear(); /* the first error is the one to tell */
    }
    Py_DECREF(load);
    if (type)
        PyErr_Restore(type, value, trace);
    if (PyErr_Occurred())
        return u->depth ? by_python() : -1;
    fetch_ahead(c);
    return 1;
}

/* Out of the run that this thread is in, if there is one. */
static int out_of_run(course *c, pass *p)
{
    PyObject *its = pass_run(p);
    if (!its)
        return 1;
    if (unit_is_within((unit *)its) || pass_strays(p, its))
        return by_python();
    /* First, for what has been written to it is saved by Python, which must not find it in a run. */
    Py_INCREF(its);
    pass_set_run(p, NULL);
    int left = out_of(c, (unit *)its);
    if (!left && pass_set_run(p, its) < 0)
        left = -1;
    Py_DECREF(its);
    return left;
}

/* Into a unit that has been sent for as a whole, by its tensors where it is. */
static int into_what_came(course *c, unit *u, PyObject *load)
{
    PyObject *key = load_key(load);
    PyObject *made = key && PyDict_Check(u->views) ? PyDict_GetItemWithError(u->views, key) : NULL;
    Py_XDECREF(key);
    if (!made)
        return by_python();
    PyObject *reals = part(c, made, REALS), *its = part(c, made, AHEADS);
    if (!reals || !its || load_begin(load, c->mover) < 0)
        return by_python();
    put(&u->tensors, made); /* which keeps them */
    int in = unit_go_in_with(u, load, reals, its);
    if (in > 0) {
        c->slow++;
        c->entries++;
        return 1;
    }
    forgive();
    put(&u->tensors, Py_None);
    put(&u->load, Py_None);
    load_end(load, c->mover);
    return by_python();
}

static int into(course *c, pass *p, unit *u, bool of_run)
{
    if (u->stale || u->depth)
        return 0;
    int left = out_of_run(c, p);
    if (left <= 0)
        return left;
    PyObject *load = load_of(u);
    if (load && !load_is_whole(load))
        return 0;
    if (of_run && pass_set_run(p, (PyObject *)u) < 0)
        return -1;
    Py_XINCREF(load);
    int in = load ? into_what_came(c, u, load) : unit_go_in(u);
    Py_XDECREF(load);
    if (in > 0)
        return 1;
    if (of_run)
        pass_set_run(p, NULL);
    return by_python();
}

/* ---- what gates ask for ---------------------------------------------------------------------------- */

/* The course that this thread is in a pass of. */
static course *mine(const pass *p)
{
    course *c = pass_course(p);
    return c && c->running && c->thread == this_thread() && pass_calls(p) == 1 ? c : NULL;
}

static bool may_begin(const course *c, const pass *p)
{
    return c->left && !c->running && pass_calls(p) == 1 && pass_is_outermost(p);
}

bool course_begin(pass *p)
{
    course *c = pass_course(p);
    if (!c || !may_begin(c, p))
        return false;
    /* To ask lets go of Python's lock: by then another thread may have stopped it, or laid another one. */
    PyObject *of = c->vbar, *outlook = c->outlook;
    Py_INCREF(of);
    Py_INCREF(outlook);
    PyObject *called = PyList_New(0);
    PyObject *now = called ? mover_outlook(c->mover, of) : NULL;
    bool same = now && PyObject_RichCompareBool(now, outlook, Py_EQ) == 1;
    Py_XDECREF(now);
    same = same && may_begin(c, p) && c->outlook == outlook;
    Py_DECREF(of);
    Py_DECREF(outlook);
    if (!same) {
        Py_XDECREF(called);
        return by_python();
    }
    c->left--;
    c->stopped = 0;
    c->running = 1;
    c->at = 0;
    c->slow = 0;
    c->thread = this_thread();
    PyObject *before = c->called;
    c->called = called;
    Py_XDECREF(before);
    pass_forgo(p);
    return true;
}

int course_enter(pass *p, PyObject *name, unit *u, bool of_run)
{
    course *c = mine(p);
    if (!c || !name)
        return 0;
    if (of_run && pass_run(p) == (PyObject *)u)
        return PyList_Append(c->called, name) < 0 ? -1 : 1;
    if (c->at >= c->count || c->legs[c->at].unit != u || !begin(c))
        return 0;
    Py_INCREF(c);
    int in = into(c, p, u, of_run);
    /* Where another thread has put an end to it meanwhile, the unit is entered all the same. */
    if (in > 0 && c->running) {
        c->at++;
        if (PyList_Append(c->called, name) < 0)
            forgive(); /* it will look like another pass, and be learned from */
    }
    end(c);
    Py_DECREF(c);
    return in;
}

int course_leave(pass *p, unit *u, bool of_run)
{
    course *c = mine(p);
    if (!c || !begin(c))
        return 0;
    Py_INCREF(c);
    int left = !of_run ? out_of(c, u) : pass_run(p) == (PyObject *)u ? out_of_run(c, p) : 1;
    end(c);
    Py_DECREF(c);
    return left;
}

bool course_end(pass *p, bool failed)
{
    course *c = mine(p);
    if (!c || failed || c->at != c->count || c->stopped)
        return false;
    if (PyObject_RichCompareBool(c->called, c->calls, Py_EQ) != 1)
        return by_python();
    if (!begin(c))
        return false;
    int left = out_of_run(c, p);
    if (left > 0) {
        c->running = 0;
        c->taken++;
    }
    end(c);
    return left > 0;
}

/* ---- what it says of itself ------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"lay", course_lay, METH_VARARGS,
     "lay($self, units, portions, calls, vbar, outlook, passes, /)\n--\n\n"
     "So many passes from now on may be as these units ran, if the outlook is the same."},
    {"stop", course_stop, METH_NOARGS, "stop($self, /)\n--\n\nThe pass that it is in is the last."},
    {"clear", course_forget, METH_NOARGS,
     "clear($self, /)\n--\n\nForget what was laid: for how many passes it has been used; and of "
     "one that "
     "goes by it what was called, how many units were entered and how many of these had to come, "
     "or None."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"running", T_BOOL, offsetof(course, running), READONLY, "a pass goes by it"},
    {"left", T_UINT, offsetof(course, left), READONLY, "passes that it may be for still"},
    {"entries", T_ULONGLONG, offsetof(course, entries), READONLY, "units that had to come, in all"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"Passes that go as the last one went."},
    {Py_tp_init, (void *)course_init},
    {Py_tp_dealloc, (void *)course_dealloc},
    {Py_tp_traverse, (void *)course_traverse},
    {Py_tp_clear, (void *)course_clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec course_spec = {"ebbtide._core.Course", sizeof(course), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

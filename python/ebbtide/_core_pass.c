/*
 * Pass, what the gates of one model share: how many calls of the model are under way, whether Python has
 * to see them begin and end, and of each thread how many gates it is in, in which run of modules, on
 * which stream, and whether autocast has been told to keep nothing meanwhile.
 *
 * Gates are counted here and not in Python because nothing comes in between: wherever Ctrl-C strikes, a
 * thread that has left all its gates is known to be in none, and its autocast is as it was.
 *
 * In C because every pass asks for all of it: a lock and a thread's dict for each of these questions are
 * microseconds that a model notices whose layers are small. Python's own lock guards it.
 */
#include "_core.h"

#include <stdint.h>
#include <stdlib.h>

typedef struct visitor {
    uint64_t thread;
    unsigned gates;
    char forgoes;      /* autocast keeps nothing of what it makes, and did before */
    PyObject *run;     /* owned; or NULL */
    ebb_stream stream; /* that was the current one when it came into the run */
} visitor;

struct pass {
    PyObject_HEAD unsigned depth; /* calls of the model under way */
    unsigned times;               /* that a thread has come in, by whatever gate; it may wrap */
    char watched;                 /* Python sees to their begin and end */
    PyObject *course;             /* or NULL */
    /* PyTorch's functions, or NULL: whether autocast keeps what it makes of weights; and that it is to. */
    PyObject *keeps, *set_keeps;
    visitor *visitors; /* threads that are in a gate, or in a run */
    size_t count, room;
};

static int pass_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    pass *p = (pass *)self;
    PyObject *keeps = NULL, *set_keeps = NULL;
    if (keywords || !PyArg_ParseTuple(arguments, "|OO", &keeps, &set_keeps))
        return -1;
    if (p->keeps || !keeps != !set_keeps) {
        PyErr_SetString(PyExc_TypeError, "a pass is made once, with both functions or none");
        return -1;
    }
    Py_XINCREF(p->keeps = keeps);
    Py_XINCREF(p->set_keeps = set_keeps);
    return 0;
}

static int pass_traverse(PyObject *self, visitproc visit, void *arg)
{
    const pass *p = (const pass *)self;
    for (size_t i = 0; i < p->count; i++)
        Py_VISIT(p->visitors[i].run);
    Py_VISIT(p->course);
    Py_VISIT(p->keeps);
    Py_VISIT(p->set_keeps);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int pass_clear(PyObject *self)
{
    pass *p = (pass *)self;
    for (size_t i = 0; i < p->count; i++)
        Py_CLEAR(p->visitors[i].run);
    Py_CLEAR(p->course);
    Py_CLEAR(p->keeps);
    Py_CLEAR(p->set_keeps);
    return 0;
}

static void pass_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    pass_clear(self);
    free(((pass *)self)->visitors);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* This thread, and no other one that there ever was: the system gives a thread's number to the next one
   when it is over, which is in no run. */
uint64_t this_thread(void)
{
    static uint64_t last; /* under Python's lock */
    static _Thread_local uint64_t number;
    if (!number)
        number = ++last;
    return number;
}

static visitor *mine(const pass *p)
{
    uint64_t me = p->count ? this_thread() : 0;
    for (size_t i = 0; i < p->count; i++)
        if (p->visitors[i].thread == me)
            return &p->visitors[i];
    return NULL;
}

/* The same, made if need be. NULL with an exception. */
static visitor *mine_or_new(pass *p)
{
    visitor *found = mine(p);
    if (found)
        return found;
    if (p->count == p->room) {
        size_t room = p->room ? 2 * p->room : 4;
        visitor *visitors = realloc(p->visitors, room * sizeof *visitors);
        if (!visitors) {
            PyErr_NoMemory();
            return NULL;
        }
        p->visitors = visitors;
        p->room = room;
    }
    found = &p->visitors[p->count++];
    *found = (visitor){.thread = this_thread()};
    return found;
}

/* It is in nothing any more. */
static void let_go(pass *p, visitor *it)
{
    if (!it->gates && !it->run)
        *it = p->visitors[--p->count];
}

PyObject *pass_run(const pass *p)
{
    const visitor *found = mine(p);
    return found ? found->run : NULL;
}

int pass_set_run(pass *p, PyObject *run)
{
    ebb_stream stream = NULL;
    if (run && unit_stream((unit *)run, &stream) < 0) /* first, for it may run anything */
        return -1;
    visitor *found = run ? mine_or_new(p) : mine(p);
    if (!found)
        return run ? -1 : 0;
    PyObject *old = found->run;
    Py_XINCREF(run);
    found->run = run;
    found->stream = stream;
    let_go(p, found);
    Py_XDECREF(old);
    return 0;
}

int pass_strays(const pass *p, PyObject *run)
{
    const visitor *found = mine(p);
    if (!found || !run || found->run != run)
        return 0;
    ebb_stream before = found->stream, now;
    return unit_stream((unit *)run, &now) < 0 ? -1 : now != before;
}

bool pass_is_watched(const pass *p)
{
    return p->watched || pass_run(p);
}

/* An exception that is there stays. */
static void set_keeps(pass *p, bool on)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    Py_XDECREF(PyObject_CallFunction(p->set_keeps, "O", on ? Py_True : Py_False));
    forgive();
    PyErr_Restore(type, value, trace);
}

int pass_begin(pass *p, bool root)
{
    visitor *found = mine_or_new(p);
    if (!found)
        return -1;
    p->times += !found->gates;
    found->gates++;
    p->depth += root;
    return 0;
}

bool pass_end(pass *p, bool root)
{
    visitor *found = mine(p);
    p->depth -= root;
    bool last = !--found->gates, in = found->run, again = last && found->forgoes;
    if (last)
        found->forgoes = 0;
    let_go(p, found);
    if (again)
        set_keeps(p, true);
    return last && in;
}

void pass_forgo(pass *p)
{
    PyObject *answer = p->keeps ? PyObject_CallNoArgs(p->keeps) : NULL;
    bool keeps = answer == Py_True;
    Py_XDECREF(answer);
    forgive();
    visitor *found = mine(p);
    if (!keeps || !found || !found->gates)
        return;
    found->forgoes = 1;
    set_keeps(p, false);
}

course *pass_course(const pass *p)
{
    return (course *)p->course;
}

unsigned pass_calls(const pass *p)
{
    return p->depth;
}

bool pass_is_outermost(const pass *p)
{
    const visitor *found = mine(p);
    return found && found->gates == 1 && !found->run;
}

static PyObject *get_course(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *its = ((pass *)self)->course;
    its = its ? its : Py_None;
    Py_INCREF(its);
    return its;
}

static int set_course(PyObject *self, PyObject *given, void *unused)
{
    (void)unused;
    pass *p = (pass *)self;
    const state *s = state_of(self);
    if (!s || !given || !PyObject_TypeCheck(given, s->types[COURSE]) || p->course) {
        PyErr_SetString(PyExc_TypeError, "a pass has one course");
        return -1;
    }
    Py_INCREF(p->course = given);
    return 0;
}

static PyObject *get_run(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *run = pass_run((pass *)self);
    run = run ? run : Py_None;
    Py_INCREF(run);
    return run;
}

static int set_run(PyObject *self, PyObject *run, void *unused)
{
    (void)unused;
    run = run != Py_None ? run : NULL;
    const state *s = state_of(self);
    if (run && (!s || !PyObject_TypeCheck(run, s->types[UNIT]))) {
        PyErr_Format(PyExc_TypeError, "a run is a unit, not %R", run);
        return -1;
    }
    return pass_set_run((pass *)self, run);
}

static PyObject *get_stream(PyObject *self, void *unused)
{
    (void)unused;
    const visitor *found = mine((pass *)self);
    return PyLong_FromVoidPtr(found ? found->stream : NULL);
}

static PyObject *strays(PyObject *self, PyObject *run)
{
    int answer = pass_strays((pass *)self, run);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

static PyObject *forgo(PyObject *self, PyObject *unused)
{
    (void)unused;
    pass_forgo((pass *)self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"forgo", forgo, METH_NOARGS,
     "forgo($self, /)\n--\n\nUntil this thread has left all gates autocast keeps nothing of "
     "what it makes of weights."},
    {"strays", strays, METH_O,
     "strays($self, run, /)\n--\n\nWhether this thread is in that run, and came into it on another "
     "stream than the current one."},
    {NULL, NULL, 0, NULL},
};

static PyObject *get_gates(PyObject *self, void *unused)
{
    (void)unused;
    const visitor *found = mine((pass *)self);
    return PyLong_FromUnsignedLong(found ? found->gates : 0);
}

static PyGetSetDef getset[] = {
    {"gates", get_gates, NULL, "how many this thread is in", NULL},
    {"run", get_run, set_run, "the run that this thread is in, or None", NULL},
    {"stream", get_stream, NULL, "on which it came into that", NULL},
    {"course", get_course, set_course, "by which passes may go, or None", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"depth", T_UINT, offsetof(pass, depth), READONLY, "calls of the model under way"},
    {"times", T_UINT, offsetof(pass, times), READONLY, "that a thread has come in"},
    {"watched", T_BOOL, offsetof(pass, watched), 0, "Python sees to their begin and end"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"What the gates of one model share."},
    {Py_tp_init, (void *)pass_init},
    {Py_tp_traverse, (void *)pass_traverse},
    {Py_tp_clear, (void *)pass_clear},
    {Py_tp_dealloc, (void *)pass_dealloc},
    {Py_tp_getset, getset},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec pass_spec = {"ebbtide._core.Pass", sizeof(pass), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

/*
 * Pass, what the gates of one model share: how many calls of the model are under way, whether Python has
 * to see them begin and end, and which run of modules each thread is in.
 *
 * In C because every pass asks for all of it: a lock and a thread's dict for each of these questions are
 * microseconds that a model notices whose layers are small. Python's own lock guards it.
 */
#include "_core.h"

#include <stdint.h>
#include <stdlib.h>

typedef struct in_run {
    uint64_t thread;
    PyObject *run; /* owned */
} in_run;

struct pass {
    PyObject_HEAD unsigned depth; /* calls under way */
    char watched;                 /* Python sees to their begin and end */
    in_run *runs;                 /* one for each thread that is in a run */
    size_t count, room;
};

static int pass_traverse(PyObject *self, visitproc visit, void *arg)
{
    const pass *p = (const pass *)self;
    for (size_t i = 0; i < p->count; i++)
        Py_VISIT(p->runs[i].run);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int pass_clear(PyObject *self)
{
    pass *p = (pass *)self;
    while (p->count) {
        PyObject *run = p->runs[--p->count].run;
        Py_DECREF(run);
    }
    return 0;
}

static void pass_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    pass_clear(self);
    free(((pass *)self)->runs);
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

static in_run *mine(const pass *p)
{
    uint64_t me = p->count ? this_thread() : 0;
    for (size_t i = 0; i < p->count; i++)
        if (p->runs[i].thread == me)
            return &p->runs[i];
    return NULL;
}

PyObject *pass_run(const pass *p)
{
    const in_run *found = mine(p);
    return found ? found->run : NULL;
}

int pass_set_run(pass *p, PyObject *run)
{
    in_run *found = mine(p);
    PyObject *old = found ? found->run : NULL;
    if (run && !found) {
        if (p->count == p->room) {
            size_t room = p->room ? 2 * p->room : 4;
            in_run *runs = realloc(p->runs, room * sizeof *runs);
            if (!runs) {
                PyErr_NoMemory();
                return -1;
            }
            p->runs = runs;
            p->room = room;
        }
        found = &p->runs[p->count++];
        found->thread = this_thread();
    }
    if (run) {
        Py_INCREF(run);
        found->run = run;
    } else if (found) {
        *found = p->runs[--p->count];
    }
    Py_XDECREF(old);
    return 0;
}

bool pass_is_watched(const pass *p)
{
    return p->watched || mine(p);
}

void pass_begin(pass *p)
{
    p->depth++;
}

void pass_end(pass *p)
{
    p->depth--;
}

static PyObject *begin(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(++((pass *)self)->depth);
}

static PyObject *end(PyObject *self, PyObject *unused)
{
    (void)unused;
    pass *p = (pass *)self;
    p->depth -= p->depth > 0;
    return PyLong_FromUnsignedLong(p->depth);
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
    return pass_set_run((pass *)self, run && run != Py_None ? run : NULL);
}

static PyMethodDef methods[] = {
    {"begin", begin, METH_NOARGS, "begin($self, /)\n--\n\nOne more call: how many there are now."},
    {"end", end, METH_NOARGS, "end($self, /)\n--\n\nOne less."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"run", get_run, set_run, "the run that this thread is in, or None", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"depth", T_UINT, offsetof(pass, depth), READONLY, "calls under way"},
    {"watched", T_BOOL, offsetof(pass, watched), 0, "Python sees to their begin and end"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, (void *)"What the gates of one model share."},
    {Py_tp_traverse, (void *)pass_traverse},
    {Py_tp_clear, (void *)pass_clear},
    {Py_tp_dealloc, (void *)pass_dealloc},
    {Py_tp_methods, methods},
    {Py_tp_getset, getset},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec pass_spec = {"ebbtide._core.Pass", sizeof(pass), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

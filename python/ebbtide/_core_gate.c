/*
 * Gate, what stands in the place of a module's forward(): into its unit, the module's own forward(), out
 * again.
 *
 * In C because a model that fits pays nothing but this, for each unit: what can be done without Python's
 * help is done here, and everything else is the Python class's _call(). And because torch.compile() does
 * not look into it: it compiles what is behind it.
 */
#include "_core.h"

typedef struct gate {
    PyObject_HEAD PyObject *module; /* a weak reference */
    PyObject *function, *own;       /* the class's forward(), or the instance's own */
    PyObject *grad_enabled;         /* PyTorch's function */
    PyObject *tracing;              /* another: what is being traced, or None */
    PyObject *calls;                /* a Pass, the model's */
    PyObject *tensor, *address_of;  /* PyTorch's type, and its data_ptr() */
    PyObject *parts_of;             /* what is in a result of another kind: lasting.py's */
    PyObject *unit;                 /* or NULL */
    PyObject *name;                 /* of the module, in the model */
    char slow, root, run, enters, leaves;
    char compiled; /* Python has to see to what torch.compile() compiles */
} gate;

static int gate_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    gate *g = (gate *)self;
    PyObject *module, *function, *own, *grad_enabled, *tracing, *calls, *tensor, *parts_of;
    int root;
    const state *s = state_of(self);
    if (!s || keywords ||
        !PyArg_ParseTuple(arguments, "OOOOOO!O!Op", &module, &function, &own, &grad_enabled,
                          &tracing, s->types[PASS], &calls, &PyType_Type, &tensor, &parts_of,
                          &root))
        return -1;
    if (g->module) {
        PyErr_SetString(PyExc_TypeError, "a gate is made once");
        return -1;
    }
    Py_INCREF(g->module = module);
    Py_INCREF(g->function = function);
    Py_INCREF(g->own = own);
    Py_INCREF(g->grad_enabled = grad_enabled);
    Py_INCREF(g->tracing = tracing);
    Py_INCREF(g->calls = calls);
    Py_INCREF(g->tensor = tensor);
    Py_INCREF(g->parts_of = parts_of);
    g->address_of = PyObject_GetAttrString(tensor, "data_ptr");
    if (!g->address_of)
        return -1;
    g->root = (char)root;
    g->slow = g->enters = g->leaves = 1;
    return 0;
}

static int gate_traverse(PyObject *self, visitproc visit, void *arg)
{
    gate *g = (gate *)self;
    Py_VISIT(g->module);
    Py_VISIT(g->function);
    Py_VISIT(g->own);
    Py_VISIT(g->grad_enabled);
    Py_VISIT(g->tracing);
    Py_VISIT(g->calls);
    Py_VISIT(g->tensor);
    Py_VISIT(g->parts_of);
    Py_VISIT(g->address_of);
    Py_VISIT(g->unit);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int gate_clear(PyObject *self)
{
    gate *g = (gate *)self;
    Py_CLEAR(g->module);
    Py_CLEAR(g->function);
    Py_CLEAR(g->own);
    Py_CLEAR(g->grad_enabled);
    Py_CLEAR(g->tracing);
    Py_CLEAR(g->calls);
    Py_CLEAR(g->tensor);
    Py_CLEAR(g->parts_of);
    Py_CLEAR(g->address_of);
    Py_CLEAR(g->unit);
    Py_CLEAR(g->name);
    return 0;
}

static void gate_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    gate_clear(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* The module's own forward(). */
static PyObject *forward(gate *g, PyObject *args, PyObject *kwargs)
{
    if (g->own != Py_None)
        return PyObject_Call(g->own, args, kwargs);
    PyObject *module = PyWeakref_GetObject(g->module); /* borrowed; who calls it holds it */
    Py_ssize_t count = PyTuple_Size(args);
    PyObject *all = module ? PyTuple_New(count + 1) : NULL;
    if (!all)
        return NULL;
    Py_INCREF(module);
    PyTuple_SetItem(all, 0, module);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PyTuple_GetItem(args, i);
        Py_INCREF(item);
        PyTuple_SetItem(all, i + 1, item);
    }
    PyObject *result = PyObject_Call(g->function, all, kwargs);
    Py_DECREF(all);
    return result;
}

/* Whether gradients are to be kept: 1, 0, or -1 with an exception. */
static int wants_grad(const gate *g)
{
    PyObject *answer = PyObject_CallNoArgs(g->grad_enabled);
    int yes = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return yes;
}

/* Whether torch.jit.trace() is at work: it would keep a weight's address for ever. true with an
   exception. */
static bool is_traced(const gate *g)
{
    PyObject *answer = PyObject_CallNoArgs(g->tracing);
    bool no = answer == Py_None;
    Py_XDECREF(answer);
    if (answer && !no)
        PyErr_SetString(PyExc_RuntimeError,
                        "an offloaded model cannot be traced: its weights come and go, and a trace "
                        "keeps where they were. restore() it first");
    return !no;
}

static pass *calls_of(const gate *g)
{
    return (pass *)g->calls;
}

/* The module's own, as a call of a member of a run, if it is one. */
static PyObject *forward_in(gate *g, PyObject *its, PyObject *args, PyObject *kwargs)
{
    bool member = g->run && its && its != Py_None && unit_step((unit *)its, true);
    PyObject *result = forward(g, args, kwargs);
    if (member)
        unit_step((unit *)its, false);
    return result;
}

/* Out of the unit; of a run only if this thread is in it, and in no member. An exception that is there stays. */
static void out(gate *g, PyObject *its)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!g->run || (pass_run(calls_of(g)) == its && !unit_is_within((unit *)its))) {
        if (g->run)
            pass_set_run(calls_of(g), NULL);
        unit_go_out((unit *)its);
    }
    if (type || !PyErr_Occurred()) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
}

enum { DEEP = 4 }; /* results in results that are looked at */

/* Whether a tensor is over memory of the unit's weights. */
static bool is_over(const gate *g, const unit *u, PyObject *tensor)
{
    PyObject *address = PyObject_CallFunctionObjArgs(g->address_of, tensor, NULL);
    /* A parked tensor has none, nor has one that is more than its memory. */
    bool known = address && PyLong_Check(address);
    uint64_t at = known ? PyLong_AsUnsignedLongLong(address) : 0;
    Py_XDECREF(address);
    forgive();
    return at && unit_covers(u, at);
}

/* Whether a result, or a tensor in it, is: a table that is given away by its rows, say. When the unit is
   left, something else will be there. To ask a tensor may run anything, so what is asked is held. */
static bool holds(const gate *g, const unit *u, PyObject *what, int deep)
{
    if (what == Py_None)
        return false;
    if (PyObject_TypeCheck(what, (PyTypeObject *)g->tensor))
        return is_over(g, u, what);
    if (!deep || PyUnicode_Check(what) || PyLong_Check(what) || PyFloat_Check(what))
        return false;
    PyObject *items;
    if (PyTuple_Check(what) || PyList_Check(what)) {
        items = PySequence_Tuple(what);
    } else if (PyDict_Check(what)) {
        items = PyDict_Values(what);
    } else {
        items = PyObject_CallFunctionObjArgs(g->parts_of, what, NULL);
        deep -=
            deep > 1; /* Python is asked: not for all that a cache of keys and values has in it */
    }
    bool found = false;
    Py_ssize_t count = items ? PySequence_Size(items) : 0;
    for (Py_ssize_t i = 0; i < count && !found; i++) {
        PyObject *item = PySequence_GetItem(items, i);
        found = item && holds(g, u, item, deep - 1);
        Py_XDECREF(item);
    }
    Py_XDECREF(items);
    forgive();
    return found;
}

/* The same for Python: _holds(unit, result). */
static PyObject *gate_holds(PyObject *self, PyObject *arguments)
{
    gate *g = (gate *)self;
    PyObject *its, *result;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTuple(arguments, "O!O", s->types[UNIT], &its, &result))
        return NULL;
    return PyBool_FromLong(g->address_of && holds(g, (unit *)its, result, DEEP));
}

/* A result that stays what it is when the unit is left: _lasting() makes it. Takes `result`. */
static PyObject *lasting(PyObject *self, PyObject *its, PyObject *result)
{
    PyObject *name = PyUnicode_InternFromString("_lasting");
    PyObject *made = name ? PyObject_CallMethodObjArgs(self, name, its, result, NULL) : NULL;
    Py_XDECREF(name);
    Py_DECREF(result);
    return made;
}

/* Everything that is not the plain case: _call(). */
static PyObject *slowly(PyObject *self, PyObject *args, PyObject *kwargs)
{
    PyObject *name = PyUnicode_InternFromString("_call"), *none = NULL;
    if (!kwargs)
        kwargs = none = PyDict_New();
    PyObject *result =
        name && kwargs ? PyObject_CallMethodObjArgs(self, name, args, kwargs, NULL) : NULL;
    Py_XDECREF(name);
    Py_XDECREF(none);
    return result;
}

/* What Python has to see at the end of a call: _over() or _rest(), with an exception's type, which goes
   on. */
static void by_name(PyObject *self, const char *method)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *name = PyUnicode_InternFromString(method);
    PyObject *done =
        name ? PyObject_CallMethodObjArgs(self, name, type ? type : Py_None, NULL) : NULL;
    Py_XDECREF(name);
    Py_XDECREF(done);
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
}

/* Where a unit's weights have to come, or to be waited for: by the course, else by Python. Into it: the unit, or
   None, or NULL with an exception. */
static PyObject *in_slowly(PyObject *self, PyObject *its, bool strays)
{
    gate *g = (gate *)self;
    int in = strays ? 0 : course_enter(calls_of(g), g->name, (unit *)its, g->run);
    if (in)
        return in > 0 ? Py_NewRef(its) : NULL;
    PyObject *name = PyUnicode_InternFromString("_in");
    PyObject *entered = name ? PyObject_CallMethodObjArgs(self, name, NULL) : NULL;
    Py_XDECREF(name);
    return entered;
}

/* And out of it. An exception that is there stays: the first one is the one to tell. */
static void out_slowly(PyObject *self, PyObject *its)
{
    gate *g = (gate *)self;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!course_leave(calls_of(g), (unit *)its, g->run)) {
        PyObject *name = PyUnicode_InternFromString("_out");
        Py_XDECREF(name ? PyObject_CallMethodObjArgs(self, name, its, NULL) : NULL);
        Py_XDECREF(name);
    }
    if (type) {
        PyErr_Clear();
        PyErr_Restore(type, value, trace);
    }
}

static PyObject *by_and_by(PyObject *self, PyObject *args, PyObject *kwargs)
{
    gate *g = (gate *)self;
    PyObject *its = g->unit;
    Py_INCREF(its);
    int strays = g->run ? pass_strays(calls_of(g), its) : 0;
    if (strays < 0) {
        Py_DECREF(its);
        return NULL;
    }
    if (g->enters || strays) {
        PyObject *entered = in_slowly(self, its, strays);
        Py_DECREF(its);
        if (!entered)
            return NULL;
        its = entered; /* or None */
    }
    PyObject *result = forward_in(g, its, args, kwargs);
    if (result && its != Py_None && holds(g, (unit *)its, result, DEEP))
        result = lasting(self, its, result);
    /* What it does at its end may be something else by now: to go in may have been to plan anew. */
    if (g->leaves && its != Py_None)
        out_slowly(self, its);
    Py_DECREF(its);
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    return result;
}

/* A call of the model that goes by its course. */
static PyObject *along(PyObject *self, PyObject *args, PyObject *kwargs)
{
    gate *g = (gate *)self;
    PyObject *result = forward(g, args, kwargs);
    if (!course_end(calls_of(g), !result))
        by_name(self, "_over");
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    return result;
}

static PyObject *call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    gate *g = (gate *)self;
    bool grad = wants_grad(g) != 0;
    bool plain = !g->slow && (g->unit || g->root) && !grad && !PyErr_Occurred();
    if (g->slow && g->unit && !g->root && !grad && !g->compiled)
        return by_and_by(self, args, kwargs);
    if (g->slow && g->root && !g->unit && !grad && !g->compiled && !PyErr_Occurred() &&
        course_begin(calls_of(g)))
        return along(self, args, kwargs);
    bool enters = g->enters;
    if (plain && g->root) {
        plain = !pass_is_watched(calls_of(g));
    } else if (plain && g->run) {
        const PyObject *run = pass_run(calls_of(g));
        int strays = run ? pass_strays(calls_of(g), g->unit) : 0;
        if (strays < 0)
            return NULL;
        plain = !strays && (!enters || !run || run == g->unit);
        enters = enters && run != g->unit;
    }
    /* Another may be in its place at any time: when a stream is met for the first time, too. */
    PyObject *its = g->unit;
    Py_XINCREF(its);
    int in = plain && its && enters ? unit_go_in((unit *)its) : plain;
    if (in <= 0 || PyErr_Occurred()) {
        Py_XDECREF(its);
        return PyErr_Occurred() ? NULL : slowly(self, args, kwargs);
    }
    bool root = g->root;
    if (its && g->run && enters && pass_set_run(calls_of(g), its) < 0) {
        unit_go_out((unit *)its);
        Py_DECREF(its);
        return NULL;
    }
    PyObject *result = forward_in(g, its, args, kwargs);
    if (result && its && holds(g, (unit *)its, result, DEEP))
        result = lasting(self, its, result);
    if (its && g->leaves)
        out(g, its);
    Py_XDECREF(its);
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    if (root && (!result || pass_is_watched(calls_of(g))))
        by_name(self, "_over");
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    return result;
}

static PyObject *gate_call(PyObject *self, PyObject *args, PyObject *kwargs)
{
    gate *g = (gate *)self;
    if (!g->module)
        return fail(NULL, EBB_GONE, "");
    pass *calls = calls_of(g);
    bool root = g->root; /* it may become one */
    if (((root || g->enters) && is_traced(g)) || pass_begin(calls, root) < 0)
        return NULL;
    Py_INCREF(calls);
    PyObject *result = call(self, args, kwargs);
    if (pass_end(calls, root))
        by_name(self, "_rest");
    Py_DECREF(calls);
    if (result && PyErr_Occurred())
        Py_CLEAR(result);
    return result;
}

static PyObject *gate_unit(PyObject *self, void *unused)
{
    (void)unused;
    PyObject *its = ((gate *)self)->unit ? ((gate *)self)->unit : Py_None;
    Py_INCREF(its);
    return its;
}

static int gate_set_unit(PyObject *self, PyObject *given, void *unused)
{
    (void)unused;
    gate *g = (gate *)self;
    const state *s = state_of(self);
    if (!s)
        return -1;
    if (given && given != Py_None && !PyObject_TypeCheck(given, s->types[UNIT])) {
        PyErr_Format(PyExc_TypeError, "a gate leads into a unit, not %R", given);
        return -1;
    }
    PyObject *old = g->unit;
    g->unit = given && given != Py_None ? given : NULL;
    Py_XINCREF(g->unit);
    Py_XDECREF(old);
    return 0;
}

static PyMethodDef gate_methods[] = {
    {"_holds", gate_holds, METH_VARARGS,
     "_holds($self, unit, result, /)\n--\n\nWhether a result is over memory of the unit's "
     "weights."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef gate_getset[] = {
    {"unit", gate_unit, gate_set_unit, "the unit it leads into, or None", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef gate_members[] = {
    {"name", T_OBJECT, offsetof(gate, name), 0, "of the module, in the model"},
    {"slow", T_BOOL, offsetof(gate, slow), 0, "_call() is asked, every time"},
    {"root", T_BOOL, offsetof(gate, root), 0, "of the model itself"},
    {"run", T_BOOL, offsetof(gate, run), 0, "its unit has several members"},
    {"enters", T_BOOL, offsetof(gate, enters), 0, "a call goes into the unit"},
    {"compiled", T_BOOL, offsetof(gate, compiled), 0, "torch.compile() has to be told"},
    {"leaves", T_BOOL, offsetof(gate, leaves), 0, "the end of a call leaves the unit"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot gate_slots[] = {
    {Py_tp_doc, (void *)"What stands in the place of a module's forward()."},
    {Py_tp_init, (void *)gate_init},
    {Py_tp_call, (void *)gate_call},
    {Py_tp_traverse, (void *)gate_traverse},
    {Py_tp_clear, (void *)gate_clear},
    {Py_tp_dealloc, (void *)gate_dealloc},
    {Py_tp_methods, gate_methods},
    {Py_tp_getset, gate_getset},
    {Py_tp_members, gate_members},
    {0, NULL},
};

PyType_Spec gate_spec = {"ebbtide._core.Gate", sizeof(gate), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, gate_slots};

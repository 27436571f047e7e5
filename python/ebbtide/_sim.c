/*
 * What PyTorch's redirected operators tell the simulated GPU, quickly: an operator that runs on the
 * CPU's kernels says here when it begins, and what it has read and written.
 *
 * Linked against the simulated GPU, and imported only where that is started.
 */
#include "_sim.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_DEVICES = 16, CAPTURING = 900 };

/* Functions of the simulated driver, asked of itself when the module is loaded. */
extern int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                               int *status);
static int (*retain)(void **context, int device);
static int (*get_current)(void **context);
static int (*set_current)(void *context);

static int find_functions(void)
{
    int status;
    return cuGetProcAddress_v2("cuDevicePrimaryCtxRetain", (void **)&retain, 12000, 0, &status) ||
           cuGetProcAddress_v2("cuCtxGetCurrent", (void **)&get_current, 12000, 0, &status) ||
           cuGetProcAddress_v2("cuCtxSetCurrent", (void **)&set_current, 12000, 0, &status) ||
           !retain || !get_current || !set_current;
}

/*
 * Make the device's context current, as PyTorch's own operators do; *before is what was. The thread
 * may have called nothing of CUDA yet, and the device may be another than its current one. Contexts
 * stay retained: PyTorch keeps them as long as the process lives, too. Under the GIL.
 */
static int enter_device(int device, void **before)
{
    static void *contexts[MOST_DEVICES];
    if (device < 0 || device >= MOST_DEVICES)
        return 101;
    int code = contexts[device] ? 0 : retain(&contexts[device], device);
    if (!code)
        code = get_current(before);
    return code || *before == contexts[device] ? code : set_current(contexts[device]);
}

static void leave_device(void *before)
{
    void *current = NULL;
    if (!get_current(&current) && current != before && before)
        set_current(before);
}

static int check(int code, const char *what)
{
    if (code == 0)
        return 0;
    PyErr_Format(PyExc_RuntimeError, "CUDA error: the simulated GPU refused %s (code %d)%s", what,
                 code, code == 700 ? ": an illegal memory access was encountered" : "");
    return -1;
}

int sim_catch_up(int device, void *stream)
{
    void *before = NULL;
    int code = enter_device(device, &before);
    if (!code) {
        Py_BEGIN_ALLOW_THREADS;
        code = ebbsim_catch_up(stream);
        Py_END_ALLOW_THREADS;
        leave_device(before);
    }
    return code;
}

/* catch_up(device, stream): what the stream's next work is ordered after has had its effect. True: the
   stream is capturing, and nothing has. */
static PyObject *catch_up(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "catch_up(device, stream)");
    int device = (int)PyLong_AsLong(arguments[0]);
    void *stream = PyLong_AsVoidPtr(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    int code = sim_catch_up(device, stream);
    if (code == CAPTURING)
        Py_RETURN_TRUE;
    if (check(code, "to catch up"))
        return NULL;
    Py_RETURN_FALSE;
}

/* ---- what captured operators leave behind ------------------------------------------------------- */

/* Objects whose graph is gone. They are let go when this module is called next: their graph may have
   gone with the simulator's lock held, where nobody may wait for the GIL. */
static struct gone {
    PyObject *object;
    struct gone *next;
} * gone;
static pthread_mutex_t gone_mutex = PTHREAD_MUTEX_INITIALIZER;

typedef struct node {
    PyObject *callable;
    struct gone entry;
} node;

static void release_node(void *data)
{
    node *n = data;
    n->entry.object = n->callable;
    pthread_mutex_lock(&gone_mutex);
    n->entry.next = gone;
    gone = &n->entry;
    pthread_mutex_unlock(&gone_mutex);
}

static void let_go(void)
{
    pthread_mutex_lock(&gone_mutex);
    struct gone *list = gone;
    gone = NULL;
    pthread_mutex_unlock(&gone_mutex);
    while (list) {
        node *n = (node *)(void *)((char *)list - offsetof(node, entry));
        list = list->next;
        Py_DECREF(n->callable);
        free(n);
    }
}

/* A graph is launched: do the operator again, on whatever thread that is. */
static void run_node(void *data)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *result = PyObject_CallNoArgs(((node *)data)->callable);
    if (result)
        Py_DECREF(result);
    else
        PyErr_WriteUnraisable(((node *)data)->callable);
    PyGILState_Release(state);
}

/* ---- Ranges ------------------------------------------------------------------------------------- */

static PyTypeObject *ranges_type;

ranges *ranges_of(PyObject *object)
{
    if (Py_TYPE(object) == ranges_type)
        return (ranges *)object;
    PyErr_SetString(PyExc_TypeError, "not a Ranges");
    return NULL;
}

int ranges_add(ranges *r, uint64_t address, uint64_t bytes, int access)
{
    if (bytes == 0)
        return 0;
    if (r->count == r->capacity) {
        size_t size = 2 * r->capacity * sizeof *r->list;
        ebbsim_range *more = PyMem_Realloc(r->list == r->few ? NULL : r->list, size);
        if (!more) {
            PyErr_NoMemory();
            return -1;
        }
        if (r->list == r->few)
            memcpy(more, r->few, sizeof r->few);
        r->list = more;
        r->capacity *= 2;
    }
    r->list[r->count++] = (ebbsim_range){.address = address, .bytes = bytes, .access = access};
    return 0;
}

int ranges_hold(const ranges *r, uint64_t address, size_t first)
{
    for (size_t i = 0; i < r->count && i < first; i++)
        if (address - r->list[i].address < r->list[i].bytes)
            return 1;
    return 0;
}

static PyObject *ranges_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    (void)args, (void)kwargs;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    ranges *r = (ranges *)allocate(type, 0);
    if (r) {
        r->list = r->few;
        r->capacity = sizeof r->few / sizeof *r->few;
    }
    return (PyObject *)r;
}

static void ranges_dealloc(PyObject *self)
{
    ranges *r = (ranges *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (r->list != r->few)
        PyMem_Free(r->list);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static Py_ssize_t ranges_length(PyObject *self)
{
    return (Py_ssize_t)((ranges *)self)->count;
}

/* add(address, bytes, access) */
static PyObject *ranges_add_method(PyObject *self, PyObject *args)
{
    unsigned long long address, bytes;
    int access;
    if (!PyArg_ParseTuple(args, "KKi", &address, &bytes, &access) ||
        ranges_add((ranges *)self, address, bytes, access))
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef ranges_methods[] = {
    {"add", ranges_add_method, METH_VARARGS, "One range more: (address, bytes, access)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ranges_slots[] = {
    {Py_tp_doc, "The memory that one operator reads and writes."},
    {Py_tp_new, (void *)ranges_new},
    {Py_tp_dealloc, (void *)ranges_dealloc},
    {Py_tp_methods, ranges_methods},
    {Py_sq_length, (void *)ranges_length},
    {0, NULL},
};

static PyType_Spec ranges_spec = {
    .name = "ebbtide._sim.Ranges",
    .basicsize = sizeof(ranges),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = ranges_slots,
};

/* ---- an operator has run ------------------------------------------------------------------------ */

static int launch(int device, void *stream, const char *name, double flops, PyObject *callable,
                  const ranges *r)
{
    ebbsim_work work = {.size = sizeof work,
                        .name = name,
                        .ranges = r->list,
                        .range_count = r->count,
                        .flops = flops,
                        .now = 1};
    void *before = NULL;
    int code = enter_device(device, &before);
    node *n = code || !callable ? NULL : malloc(sizeof *n);
    if (n) { /* from here on the simulator's, which releases it */
        Py_INCREF(callable);
        n->callable = callable;
        work.function = run_node;
        work.data = n;
        work.release = release_node;
    }
    if (!code) {
        Py_BEGIN_ALLOW_THREADS;
        code = ebbsim_launch(&work, stream);
        Py_END_ALLOW_THREADS;
        leave_device(before);
    }
    return check(code, name);
}

/* touched(device, stream, name, flops, ranges): an operator has run.
   captured(device, stream, name, flops, ranges, callable): the stream is capturing; this does it. */
static PyObject *note(PyObject *const *arguments, Py_ssize_t count, int captured)
{
    ranges *r = count == 5 + captured ? ranges_of(arguments[4]) : NULL;
    if (!r)
        return PyErr_Format(PyExc_TypeError, "(device, stream, name, flops, ranges%s)",
                            captured ? ", callable" : "");
    let_go();
    int device = (int)PyLong_AsLong(arguments[0]);
    void *stream = PyLong_AsVoidPtr(arguments[1]);
    double flops = PyFloat_AsDouble(arguments[3]);
    const char *name = PyErr_Occurred() ? NULL : PyUnicode_AsUTF8AndSize(arguments[2], NULL);
    if (!name || launch(device, stream, name, flops, captured ? arguments[5] : NULL, r))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *touched(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return note(arguments, count, 0);
}

static PyObject *captured(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return note(arguments, count, 1);
}

#define FAST(function) (PyCFunction)(void (*)(void))(function), METH_FASTCALL
static PyMethodDef methods[] = {
    {"catch_up", FAST(catch_up), "What the stream's next work is ordered after has its effect."},
    {"touched", FAST(touched), "An operator has run: what it read and wrote."},
    {"captured", FAST(captured), "An operator was captured: what does it again."},
    {"bind", FAST(tensors_bind), "PyTorch's functions."},
    {"learn", FAST(tensors_learn), "Where a tensor's C++ object has what."},
    {"know", FAST(tensors_know), "A dtype, by a tensor that has it."},
    {"forget", FAST(tensors_forget), "No alias is given out again."},
    {"reach", FAST(tensors_reach), "The alias of a CUDA tensor."},
    {"convert", FAST(tensors_convert), "An operator's arguments for the CPU's kernel."},
    {"lift", FAST(tensors_lift), "A CUDA tensor with a CPU tensor's contents."},
    {NULL, NULL, 0, NULL},
};

static int add_types(PyObject *self)
{
    ranges_type = (PyTypeObject *)PyType_FromSpec(&ranges_spec);
    return ranges_type ? PyModule_AddType(self, ranges_type) : -1;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)add_types},
    {0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ebbtide._sim",
    .m_doc = "What PyTorch's redirected operators tell the simulated GPU.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__sim(void); /* Python's own headers do not declare it */

PyMODINIT_FUNC PyInit__sim(void)
{
    if (find_functions()) {
        PyErr_SetString(PyExc_ImportError, "the simulated GPU lacks a driver function");
        return NULL;
    }
    return PyModuleDef_Init(&module);
}

/*
 * What PyTorch's redirected operators tell the simulated GPU, quickly: an operator that runs on the
 * CPU's kernels says here when it begins, and what it has read and written.
 *
 * Linked against the simulated GPU, and imported only where that is started.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

#include "ebbtide_sim.h"

enum { MOST_RANGES = 1024, MOST_DEVICES = 16, CAPTURING = 900 };

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
    void *before = NULL;
    int code = enter_device(device, &before);
    if (!code) {
        Py_BEGIN_ALLOW_THREADS;
        code = ebbsim_catch_up(stream);
        Py_END_ALLOW_THREADS;
        leave_device(before);
    }
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

/* ---- an operator has run ------------------------------------------------------------------------ */

/* Queue a work whose ranges are the arguments from `arguments` on, three to a range. */
static int launch(int device, void *stream, PyObject *name, double flops, PyObject *callable,
                  PyObject *const *arguments, size_t range_count)
{
    ebbsim_range few[16], *ranges = few;
    if (range_count > 16 && !(ranges = PyMem_Malloc(range_count * sizeof *ranges))) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; i < range_count; i++) {
        ranges[i].address = PyLong_AsUnsignedLongLong(arguments[3 * i]);
        ranges[i].bytes = PyLong_AsUnsignedLongLong(arguments[1 + 3 * i]);
        ranges[i].access = (int)PyLong_AsLong(arguments[2 + 3 * i]);
    }
    ebbsim_work work = {.size = sizeof work,
                        .name = PyBytes_AsString(name),
                        .ranges = ranges,
                        .range_count = range_count,
                        .flops = flops,
                        .now = 1};
    void *before = NULL;
    int code = PyErr_Occurred() ? 1 : enter_device(device, &before);
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
    if (ranges != few)
        PyMem_Free(ranges);
    return PyErr_Occurred() ? -1 : check(code, work.name);
}

static PyObject *note(PyObject *const *arguments, Py_ssize_t count, int captured)
{
    Py_ssize_t fixed = 4 + captured;
    if (count < fixed || (count - fixed) % 3 != 0 || (count - fixed) / 3 > MOST_RANGES)
        return PyErr_Format(PyExc_TypeError,
                            "(device, stream, name, flops%s, address, bytes, access, ...)",
                            captured ? ", callable" : "");
    let_go();
    int device = (int)PyLong_AsLong(arguments[0]);
    void *stream = PyLong_AsVoidPtr(arguments[1]);
    double flops = PyFloat_AsDouble(arguments[3]);
    PyObject *name = PyErr_Occurred() ? NULL : PyUnicode_AsUTF8String(arguments[2]);
    if (!name)
        return NULL;
    int failed = launch(device, stream, name, flops, captured ? arguments[4] : NULL,
                        arguments + fixed, (size_t)(count - fixed) / 3);
    Py_DECREF(name);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* touched(device, stream, name, flops, address, bytes, access, ...) */
static PyObject *touched(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return note(arguments, count, 0);
}

/* captured(device, stream, name, flops, callable, address, bytes, access, ...) */
static PyObject *captured(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    return note(arguments, count, 1);
}

static PyMethodDef methods[] = {
    {"catch_up", (PyCFunction)(void (*)(void))catch_up, METH_FASTCALL,
     "What the stream's next work is ordered after has its effect."},
    {"touched", (PyCFunction)(void (*)(void))touched, METH_FASTCALL,
     "An operator has run: what it read and wrote."},
    {"captured", (PyCFunction)(void (*)(void))captured, METH_FASTCALL,
     "An operator was captured: what does it again, and what that reads and writes."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ebbtide._sim",
    .m_doc = "What PyTorch's redirected operators tell the simulated GPU.",
    .m_methods = methods,
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

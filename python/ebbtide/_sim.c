/*
 * What PyTorch's redirected operators tell the simulated GPU, quickly: an operator that runs on the
 * CPU's kernels says here when it begins, and what it has read and written.
 *
 * Linked against the simulated GPU, and imported only where that is started.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "ebbtide_sim.h"

enum { MOST_RANGES = 1024, NO_CONTEXT = 201 };

/* Functions of the simulated driver, asked of itself when the module is loaded. */
extern int cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags,
                               int *status);
static int (*retain)(void **context, int device);
static int (*set_current)(void *context);

static int find_functions(void)
{
    int status;
    return cuGetProcAddress_v2("cuDevicePrimaryCtxRetain", (void **)&retain, 12000, 0, &status) ||
           cuGetProcAddress_v2("cuCtxSetCurrent", (void **)&set_current, 12000, 0, &status) ||
           !retain || !set_current;
}

/* A thread that has not called CUDA yet has no context, and PyTorch's runtime would give it one at
   its first call. This may be the first. */
static int make_current(int device)
{
    void *context;
    int code = retain(&context, device);
    return code ? code : set_current(context);
}

static int check(int code, const char *what)
{
    if (code == 0)
        return 0;
    PyErr_Format(PyExc_RuntimeError, "CUDA error: the simulated GPU refused %s (code %d)%s", what,
                 code, code == 700 ? ": an illegal memory access was encountered" : "");
    return -1;
}

/* catch_up(device, stream): what the stream's next work is ordered after has had its effect. */
static PyObject *catch_up(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 2)
        return PyErr_Format(PyExc_TypeError, "catch_up(device, stream)");
    int device = (int)PyLong_AsLong(arguments[0]);
    void *stream = PyLong_AsVoidPtr(arguments[1]);
    if (PyErr_Occurred())
        return NULL;
    int code;
    Py_BEGIN_ALLOW_THREADS;
    code = ebbsim_catch_up(stream);
    if (code == NO_CONTEXT && !(code = make_current(device)))
        code = ebbsim_catch_up(stream);
    Py_END_ALLOW_THREADS;
    if (check(code, "to catch up"))
        return NULL;
    Py_RETURN_NONE;
}

/* touched(stream, name, flops, address, bytes, access, ...): an operator has run. */
static PyObject *touched(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count < 3 || (count - 3) % 3 != 0 || (count - 3) / 3 > MOST_RANGES)
        return PyErr_Format(PyExc_TypeError, "touched(stream, name, flops, address, bytes, access, "
                                             "...)");
    ebbsim_range few[16], *ranges = few;
    size_t range_count = (size_t)(count - 3) / 3;
    if (range_count > 16 && !(ranges = PyMem_Malloc(range_count * sizeof *ranges)))
        return PyErr_NoMemory();
    for (size_t i = 0; i < range_count; i++) {
        ranges[i].address = PyLong_AsUnsignedLongLong(arguments[3 + 3 * i]);
        ranges[i].bytes = PyLong_AsUnsignedLongLong(arguments[4 + 3 * i]);
        ranges[i].access = (int)PyLong_AsLong(arguments[5 + 3 * i]);
    }
    PyObject *name = PyUnicode_AsUTF8String(arguments[1]);
    void *stream = PyLong_AsVoidPtr(arguments[0]);
    double flops = PyFloat_AsDouble(arguments[2]);
    int code = 1;
    if (name && !PyErr_Occurred()) {
        ebbsim_work work = {.size = sizeof work,
                            .name = PyBytes_AsString(name),
                            .ranges = ranges,
                            .range_count = range_count,
                            .flops = flops,
                            .now = 1};
        Py_BEGIN_ALLOW_THREADS;
        code = ebbsim_launch(&work, stream);
        Py_END_ALLOW_THREADS;
        check(code, PyBytes_AsString(name));
    }
    Py_XDECREF(name);
    if (ranges != few)
        PyMem_Free(ranges);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"catch_up", (PyCFunction)(void (*)(void))catch_up, METH_FASTCALL,
     "What the stream's next work is ordered after has its effect."},
    {"touched", (PyCFunction)(void (*)(void))touched, METH_FASTCALL,
     "An operator has run: what it read and wrote."},
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

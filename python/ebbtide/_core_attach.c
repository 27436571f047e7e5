/* The door under PyTorch's allocator: what python/ebbtide/_attach.py calls. */
#include "_core.h"

#include <stdlib.h>

static const state *state_in(PyObject *module)
{
    return PyModule_GetState(module);
}

PyObject *core_attach(PyObject *module, PyObject *arguments)
{
    PyObject *limit, *headroom;
    unsigned long long devices;
    ebb_attach_options options = {
        .size = sizeof options, .limit = EBB_DEFAULT, .headroom = EBB_DEFAULT};
    if (!PyArg_ParseTuple(arguments, "OOK", &limit, &headroom, &devices))
        return NULL;
    if ((limit != Py_None && size_of(limit, &options.limit) < 0) ||
        (headroom != Py_None && size_of(headroom, &options.headroom) < 0))
        return NULL;
    options.devices = devices;
    char detail[512] = "";
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_attach(&options, detail, sizeof detail);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return raise_status(state_in(module), status, detail);
    Py_RETURN_NONE;
}

PyObject *core_detach(PyObject *module, PyObject *unused)
{
    (void)unused;
    uint64_t remaining = 0;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_detach(&remaining);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return raise_status(state_in(module), status,
                            "another library has replaced PyTorch's imports since");
    return PyLong_FromUnsignedLongLong(remaining);
}

/* Segments as (address, bytes). */
PyObject *core_attach_before(PyObject *module, PyObject *arguments)
{
    int index;
    PyObject *given;
    if (!PyArg_ParseTuple(arguments, "iO", &index, &given))
        return NULL;
    Py_ssize_t count = PySequence_Size(given);
    ebb_range *segments = count < 0 ? NULL : calloc((size_t)count + 1, sizeof *segments);
    if (!segments)
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    ebb_status status = EBB_OK;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *pair = PySequence_GetItem(given, i);
        unsigned long long address = 0, bytes = 0;
        int good = pair && PyArg_ParseTuple(pair, "KK", &address, &bytes);
        Py_XDECREF(pair);
        if (!good) {
            free(segments);
            return NULL;
        }
        segments[i] = (ebb_range){address, bytes};
    }
    Py_BEGIN_ALLOW_THREADS
    status = ebb_attach_before(index, segments, (size_t)count);
    Py_END_ALLOW_THREADS
    free(segments);
    if (status != EBB_OK)
        return raise_status(state_in(module), status, "");
    Py_RETURN_NONE;
}

PyObject *core_attach_pool(PyObject *module, PyObject *arguments)
{
    (void)module;
    int index, change;
    if (!PyArg_ParseTuple(arguments, "ii", &index, &change))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ebb_attach_pool(index, change);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyObject *core_attached_stats(PyObject *module, PyObject *given)
{
    long index = PyLong_AsLong(given);
    if (index == -1 && PyErr_Occurred())
        return NULL;
    ebb_segment_stats t = {.size = sizeof t};
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_attached_stats((int)index, &t);
    Py_END_ALLOW_THREADS
    if (status == EBB_GONE)
        Py_RETURN_NONE;
    if (status != EBB_OK)
        return raise_status(state_in(module), status, "");
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "segments", t.segments, "segment_bytes",
                         t.bytes, "parked", t.parked, "parked_bytes", t.parked_bytes, "before",
                         t.before, "segments_reused", t.reused, "refusals", t.refusals);
}

/* VBAR, the bare type under ebbtide.VBAR. */
#include "_core.h"

#include <stdlib.h>

/* ---- life -------------------------------------------------------------------------------------- */

/* The page-out function is Python's: an exception keeps the page. */
static int page_out(void *user, uint64_t offset, uint64_t bytes)
{
    PyObject *function = user;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *done = PyObject_CallFunction(function, "KK", (unsigned long long)offset,
                                           (unsigned long long)bytes);
    int failed = !done;
    if (failed)
        PyErr_WriteUnraisable(function);
    Py_XDECREF(done);
    PyGILState_Release(gil);
    return failed;
}

static int vbar_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"device", "bytes", "rise", "page_out", "fine", NULL};
    vbar *v = (vbar *)self;
    PyObject *d, *bytes, *function = Py_None, *fine = NULL;
    ebb_vbar_options options = {.size = sizeof options};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "OO|pOO", names, &d, &bytes,
                                     &options.rise, &function, &fine))
        return -1;
    const state *s = state_of(self);
    if (!s || size_of(bytes, &options.bytes) < 0 || (fine && size_of(fine, &options.fine) < 0))
        return -1;
    if (!PyObject_TypeCheck(d, s->types[DEVICE])) {
        PyErr_Format(PyExc_TypeError, "a VBAR is made on a Device, not on %R", d);
        return -1;
    }
    if (!((device *)d)->s) {
        fail(NULL, EBB_GONE, "");
        return -1;
    }
    if (function != Py_None && !PyCallable_Check(function)) {
        PyErr_SetString(PyExc_TypeError, "page_out is a function of (offset, bytes)");
        return -1;
    }
    if (v->device) {
        PyErr_SetString(PyExc_TypeError, "a VBAR is made once");
        return -1;
    }
    Py_INCREF(d);
    v->device = (device *)d;
    if (function != Py_None) {
        Py_INCREF(function);
        v->page_out = function;
        options.page_out = page_out;
        options.user = function;
    }
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_create(v->device->handle, &options, &v->handle);
    Py_END_ALLOW_THREADS
    ebb_vbar_stats stats = {.size = sizeof stats};
    if (status == EBB_OK)
        status = ebb_vbar_get_stats(v->handle, &stats);
    v->address = stats.address;
    if (status == EBB_OK)
        return 0;
    fail(v->device, status,
         status == EBB_GONE ? "the device was closed"
                            : "a VBAR has at least one byte, and no more than can be counted");
    return -1;
}

/* The device keeps frames because weights and tensors take turns with them. Where there are no weights any more,
   other processes may need what nobody uses. */
static void give_to_others(ebb_device whose)
{
    ebb_device_stats stats = {.size = sizeof stats};
    if (ebb_device_get_stats(whose, &stats) == EBB_OK && !stats.vbars)
        ebb_device_trim(whose, NULL);
}

static ebb_status vbar_destroy(vbar *v)
{
    ebb_status status = EBB_OK;
    if (v->handle.id) {
        Py_BEGIN_ALLOW_THREADS
        status = ebb_vbar_destroy(v->handle);
        if (status == EBB_OK)
            give_to_others(v->device->handle);
        Py_END_ALLOW_THREADS
    }
    if (status == EBB_OK || status == EBB_GONE)
        v->handle.id = 0;
    return status;
}

static int vbar_traverse(PyObject *self, visitproc visit, void *arg)
{
    vbar *v = (vbar *)self;
    Py_VISIT(v->page_out);
    Py_VISIT(v->device);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int vbar_clear(PyObject *self)
{
    /* The device stays until the end: destroying needs it. */
    vbar *v = (vbar *)self;
    ebb_status status = vbar_destroy(v);
    if (status == EBB_OK || status == EBB_GONE)
        Py_CLEAR(v->page_out);
    return 0;
}

static void vbar_dealloc(PyObject *self)
{
    vbar *v = (vbar *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    /* A VBAR that a graph still holds outlives this, and so does what it calls. */
    vbar_clear(self);
    Py_XDECREF(v->device);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *vbar_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    vbar *v = (vbar *)self;
    ebb_status status = vbar_destroy(v);
    if (status != EBB_OK && status != EBB_GONE)
        return fail(v->device, status,
                    "unpin its weights, and say graphs_gone() of captured ones, first");
    Py_RETURN_NONE;
}

/* Methods that take nothing and answer a status. */
static PyObject *vbar_plain(vbar *v, ebb_status (*call)(ebb_vbar))
{
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = call(v->handle);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(v->device, status, "the VBAR was closed");
    Py_RETURN_NONE;
}

static PyObject *vbar_prioritize(PyObject *self, PyObject *unused)
{
    (void)unused;
    return vbar_plain((vbar *)self, ebb_vbar_prioritize);
}

static PyObject *vbar_deprioritize(PyObject *self, PyObject *unused)
{
    (void)unused;
    return vbar_plain((vbar *)self, ebb_vbar_deprioritize);
}

static PyObject *vbar_trade(PyObject *self, PyObject *other)
{
    vbar *v = (vbar *)self;
    const state *s = state_of(self);
    if (!s)
        return NULL;
    if (!PyObject_TypeCheck(other, s->types[VBAR])) {
        PyErr_SetString(PyExc_TypeError, "not a VBAR");
        return NULL;
    }
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_trade(v->handle, ((vbar *)other)->handle);
    Py_END_ALLOW_THREADS
    if (status == EBB_INVALID) {
        PyErr_SetString(PyExc_ValueError, "the VBARs are on different devices");
        return NULL;
    }
    if (status != EBB_OK)
        return fail(v->device, status, "the VBAR was closed");
    Py_RETURN_NONE;
}

static PyObject *vbar_free_memory(PyObject *self, PyObject *given)
{
    vbar *v = (vbar *)self;
    uint64_t bytes, freed = 0;
    if (size_of(given, &bytes) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_free_memory(v->handle, bytes, &freed);
    Py_END_ALLOW_THREADS
    return status == EBB_OK ? PyLong_FromUnsignedLongLong(freed)
                            : fail(v->device, status, "the VBAR was closed");
}

static PyObject *vbar_graphs_gone(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                                  PyObject *names)
{
    vbar *v = (vbar *)self;
    ebb_stream stream;
    if (stream_argument(v->device, arguments, count, names, 0, "graphs_gone", &stream) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_graphs_gone(v->handle, stream);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(v->device, status, "the VBAR was closed");
    Py_RETURN_NONE;
}

static PyObject *vbar_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    vbar *v = (vbar *)self;
    ebb_vbar_stats t = {.size = sizeof t};
    ebb_status status = ebb_vbar_get_stats(v->handle, &t);
    if (status != EBB_OK)
        return fail(v->device, status, "the VBAR was closed");
    PyObject *dict = Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:L,s:K,s:K,s:K,s:K}",
                                   "address", t.address, "bytes", t.bytes, "allocated", t.allocated,
                                   "resident", t.resident, "pinned", t.pinned, "held", t.held,
                                   "watermark", t.watermark, "watermark_limit", t.watermark_limit,
                                   "pages", t.pages, "rank", t.rank, "hits", t.hits, "misses",
                                   t.misses, "offloaded", t.offloaded, "loads", t.loads);
    static const char *const reasons[] = {"evictions_for_weights", "evictions_for_tensors",
                                          "evictions_for_limit", "evictions_asked_for"};
    _Static_assert(sizeof reasons / sizeof *reasons == EBB_REASONS, "a name for each");
    for (int i = 0; dict && i < EBB_REASONS; i++)
        if (add_size(dict, reasons[i], t.evictions[i]) < 0)
            Py_CLEAR(dict);
    return dict;
}

static PyObject *vbar_residency(PyObject *self, PyObject *unused)
{
    (void)unused;
    vbar *v = (vbar *)self;
    ebb_vbar_stats t = {.size = sizeof t};
    ebb_status status = ebb_vbar_get_stats(v->handle, &t);
    if (status != EBB_OK)
        return fail(v->device, status, "the VBAR was closed");
    PyObject *map = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)t.pages);
    if (!map)
        return NULL;
    status = ebb_vbar_residency(v->handle, (uint8_t *)PyBytes_AsString(map), t.pages);
    if (status == EBB_OK)
        return map;
    Py_DECREF(map);
    return fail(v->device, status, "the VBAR was closed");
}

static PyObject *vbar_set_marks(PyObject *self, PyObject *given, bool limit)
{
    vbar *v = (vbar *)self;
    uint64_t bytes;
    if (size_of(given, &bytes) < 0)
        return NULL;
    ebb_status status = limit ? ebb_vbar_set_watermark_limit(v->handle, bytes)
                              : ebb_vbar_set_watermark(v->handle, bytes);
    if (status != EBB_OK)
        return fail(v->device, status, "the VBAR was closed");
    Py_RETURN_NONE;
}

static PyObject *vbar_set_watermark(PyObject *self, PyObject *given)
{
    return vbar_set_marks(self, given, false);
}

static PyObject *vbar_set_watermark_limit(PyObject *self, PyObject *given)
{
    return vbar_set_marks(self, given, true);
}

/* ---- many weights at once ------------------------------------------------------------------------ */

/* The weights of a sequence, which is new, and their ranges: both the caller's to free. */
static PyObject *ranges_of(vbar *v, PyObject *given, ebb_range **ranges, Py_ssize_t *count)
{
    PyObject *weights = PySequence_Tuple(given);
    if (!weights)
        return NULL;
    *count = PyTuple_Size(weights);
    *ranges = calloc((size_t)*count + 1, sizeof **ranges);
    for (Py_ssize_t i = 0; *ranges && i < *count; i++) {
        PyObject *item = PyTuple_GetItem(weights, i);
        if (!PyObject_TypeCheck(item, v->device->s->types[WEIGHT]) || ((weight *)item)->vbar != v) {
            PyErr_Format(PyExc_ValueError, "%R is no weight of this VBAR", item);
            free(*ranges);
            Py_DECREF(weights);
            return NULL;
        }
        const weight *w = (weight *)item;
        (*ranges)[i] = (ebb_range){w->offset, w->bytes};
    }
    if (*ranges)
        return weights;
    Py_DECREF(weights);
    return PyErr_NoMemory();
}

static PyObject *signature_list(const uint64_t *signatures, Py_ssize_t count)
{
    PyObject *list = PyList_New(count);
    for (Py_ssize_t i = 0; list && i < count; i++) {
        PyObject *number = PyLong_FromUnsignedLongLong(signatures[i]);
        if (!number)
            Py_CLEAR(list);
        else
            PyList_SetItem(list, i, number);
    }
    return list;
}

static PyObject *vbar_fault(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                            PyObject *names)
{
    vbar *v = (vbar *)self;
    ebb_stream stream;
    ebb_range *ranges = NULL;
    Py_ssize_t n = 0;
    if (stream_argument(v->device, arguments, count, names, 1, "fault", &stream) < 0)
        return NULL;
    PyObject *weights = ranges_of(v, arguments[0], &ranges, &n);
    if (!weights)
        return NULL;
    uint64_t *signatures = calloc((size_t)n + 1, sizeof *signatures);
    ebb_status status = signatures ? EBB_OK : EBB_NO_HOST_MEMORY;
    Py_ssize_t entered = 0;
    while (status == EBB_OK && entered < n)
        if (weight_enter((weight *)PyTuple_GetItem(weights, entered), stream))
            entered++;
        else
            status = EBB_NO_HOST_MEMORY;
    if (status == EBB_OK && n) {
        Py_BEGIN_ALLOW_THREADS
        status = ebb_vbar_fault_many(v->handle, ranges, (size_t)n, stream, signatures);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; i < entered; i++) {
        weight *w = (weight *)PyTuple_GetItem(weights, i);
        if (status == EBB_OK)
            w->pins++;
        else
            weight_exit(w, stream);
    }
    PyObject *answer = NULL;
    if (status == EBB_OK) {
        answer = signature_list(signatures, n);
    } else if (status == EBB_OFFLOADED) {
        answer = Py_None;
        Py_INCREF(answer);
    } else {
        fail(v->device, status, "the VBAR was closed");
    }
    free(signatures);
    free(ranges);
    Py_DECREF(weights);
    return answer;
}

static PyObject *vbar_unpin(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                            PyObject *names)
{
    vbar *v = (vbar *)self;
    ebb_stream stream;
    ebb_range *ranges = NULL;
    Py_ssize_t n = 0;
    if (stream_argument(v->device, arguments, count, names, 1, "unpin", &stream) < 0)
        return NULL;
    PyObject *weights = ranges_of(v, arguments[0], &ranges, &n);
    if (!weights)
        return NULL;
    /* Each weight's own pins first: a page counts those of all its weights. */
    ebb_status status = EBB_OK;
    Py_ssize_t taken = 0;
    for (; taken < n && ((weight *)PyTuple_GetItem(weights, taken))->pins; taken++)
        ((weight *)PyTuple_GetItem(weights, taken))->pins--;
    if (taken < n)
        status = EBB_NOT_PINNED;
    else if (n) {
        Py_BEGIN_ALLOW_THREADS
        status = ebb_vbar_unpin_many(v->handle, ranges, (size_t)n, stream);
        Py_END_ALLOW_THREADS
    }
    while (status != EBB_OK && taken)
        ((weight *)PyTuple_GetItem(weights, --taken))->pins++;
    while (taken)
        weight_exit((weight *)PyTuple_GetItem(weights, --taken), stream);
    free(ranges);
    Py_DECREF(weights);
    if (status != EBB_OK)
        return fail(v->device, status, "unpin() goes with a fault() that did not give None");
    Py_RETURN_NONE;
}

static PyObject *vbar_dlpack(PyObject *self, PyObject *arguments)
{
    vbar *v = (vbar *)self;
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(arguments, "KK", &address, &bytes))
        return NULL;
    return v->device ? dlpack_over(self, v->device, address, bytes) : fail(NULL, EBB_GONE, "");
}

static PyMethodDef vbar_methods[] = {
    {"_dlpack", vbar_dlpack, METH_VARARGS, "Bytes at an address of it, as a DLPack capsule."},
    {"fault", (PyCFunction)(void (*)(void))vbar_fault, METH_FASTCALL | METH_KEYWORDS,
     "fault($self, weights, /, stream=None)\n--\n\n"
     "Fault several weights, all or none: their signatures. None: offloaded, none pinned."},
    {"unpin", (PyCFunction)(void (*)(void))vbar_unpin, METH_FASTCALL | METH_KEYWORDS,
     "unpin($self, weights, /, stream=None)\n--\n\nTake one fault() of each back."},
    {"close", vbar_close, METH_NOARGS, "Give everything back. Its weights cannot be used after."},
    {"prioritize", vbar_prioritize, METH_NOARGS,
     "Make it the most important of its device, and lift its watermark."},
    {"deprioritize", vbar_deprioritize, METH_NOARGS, "Make it the least important of its device."},
    {"trade", vbar_trade, METH_O,
     "trade($self, other, /)\n--\n\nExchange importance with another VBAR of the device."},
    {"free_memory", vbar_free_memory, METH_O,
     "Give up unpinned pages from the top until so many bytes are free. How many were."},
    {"graphs_gone", (PyCFunction)(void (*)(void))vbar_graphs_gone, METH_FASTCALL | METH_KEYWORDS,
     "graphs_gone($self, /, stream=None)\n--\n\nNo graph that was captured with its weights exists "
     "any "
     "more."},
    {"stats", vbar_stats, METH_NOARGS, "Where it is and what was done: a dict of integers."},
    {"residency", vbar_residency, METH_NOARGS,
     "A byte for each page: 1 resident, 2 pinned, 4 held by a graph, 8 lost; added up."},
    {"set_watermark", vbar_set_watermark, METH_O,
     "Pages that begin at or above so many bytes are not loaded."},
    {"set_watermark_limit", vbar_set_watermark_limit, METH_O,
     "The watermark never stands above so many bytes."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef vbar_members[] = {
    {"device", T_OBJECT, offsetof(vbar, device), READONLY, "the Device"},
    {"address", T_ULONGLONG, offsetof(vbar, address), READONLY, "where it begins, on the GPU"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot vbar_slots[] = {
    {Py_tp_doc, (void *)"A range of GPU addresses for the weights of one model."},
    {Py_tp_init, (void *)vbar_init},
    {Py_tp_traverse, (void *)vbar_traverse},
    {Py_tp_clear, (void *)vbar_clear},
    {Py_tp_dealloc, (void *)vbar_dealloc},
    {Py_tp_methods, vbar_methods},
    {Py_tp_members, vbar_members},
    {0, NULL},
};

PyType_Spec vbar_spec = {"ebbtide._core.VBAR", sizeof(vbar), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, vbar_slots};

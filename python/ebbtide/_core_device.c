/*
 * Device, the bare type under ebbtide.Device, and the question which stream a call is about.
 *
 * The stream is asked of a function that was looked up once: PyTorch's, if PyTorch is there.
 */
#include "_core.h"
#include "fast.h"

/* ---- failures ---------------------------------------------------------------------------------- */

/* What to do about it, where the status alone does not say. */
PyObject *fail(const device *d, ebb_status status, const char *advice)
{
    char detail[256] = "";
    if (!d || !d->s) {
        PyErr_SetString(PyExc_TypeError,
                        "it was never made: a class of your own must call super().__init__()");
        return NULL;
    }
    if (status == EBB_DRIVER_FAILED || status == EBB_NO_ADDRESSES) {
        ebb_device_failure(d->handle, detail, sizeof detail);
        advice = detail;
    }
    if (status == EBB_FORKED)
        advice = "start processes with multiprocessing's \"spawn\"";
    return raise_status(d->s, status, advice);
}

/* ---- streams ----------------------------------------------------------------------------------- */

/* Let Python look: it may know PyTorch by now. */
static int look_for_torch(device *d)
{
    if (d->beside)
        return 0;
    PyObject *torch = PyDict_GetItemString(PyImport_GetModuleDict(), "torch");
    if (!torch || torch == Py_None) /* None: somebody forbids it */
        return 0;
    PyObject *done = PyObject_CallMethod((PyObject *)d, "_meet_torch", NULL);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* The first time a stream is current: Python says whether it is one that lasts. If that was said
   before, there may have been promised more, which is to stay. */
static int meet_stream(device *d, ebb_stream stream, size_t place)
{
    if (ebb__stream_lasts(d->handle, stream)) {
        d->seen[place] = stream;
        return 0;
    }
    PyObject *done = PyObject_CallMethod((PyObject *)d, "_meet_stream", "K",
                                         (unsigned long long)(uintptr_t)stream);
    if (!done)
        return -1;
    Py_DECREF(done);
    d->seen[place] = stream;
    return 0;
}

static int stream_at(PyObject *address, ebb_stream *stream)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(address);
    *stream = (ebb_stream)(uintptr_t)number;
    return number == (unsigned long long)-1 && PyErr_Occurred() ? -1 : 0;
}

static int given_stream(PyObject *given, ebb_stream *stream)
{
    if (PyLong_Check(given))
        return stream_at(given, stream);
    /* torch.cuda.Stream, or anything that looks like one */
    PyObject *address = PyObject_GetAttrString(given, "cuda_stream");
    if (!address) {
        PyErr_Format(PyExc_TypeError,
                     "stream is a torch.cuda.Stream or the address of a CUDA stream, not %R",
                     given);
        return -1;
    }
    int status = stream_at(address, stream);
    Py_DECREF(address);
    return status;
}

static size_t place_of(ebb_stream stream)
{
    return ((uintptr_t)stream >> 6) % SEEN;
}

/* PyTorch's current stream. The C function, where there is one and it answers; else Python's, which says what
   is wrong. 0, or -1 with an exception. */
static int current_stream(device *d, ebb_stream *stream)
{
    typedef int32_t (*current)(int32_t index, void **stream);
    if (!d->stream_at || ((current)(uintptr_t)d->stream_at)(d->number, stream) != 0) {
        PyObject *address = PyObject_CallFunctionObjArgs(d->stream_of, d->index, NULL);
        if (!address)
            return -1;
        *stream = PyLong_AsVoidPtr(address);
        Py_DECREF(address);
    }
    return !*stream && PyErr_Occurred() ? -1 : 0;
}

/* The stream that was given, or PyTorch's current one, or the legacy default stream. */
int stream_for(device *d, PyObject *given, ebb_stream *stream)
{
    *stream = NULL;
    if (given && given != Py_None)
        return given_stream(given, stream);
    if (!d->stream_of && (look_for_torch(d) < 0 || !d->stream_of))
        return PyErr_Occurred() ? -1 : 0;
    if (current_stream(d, stream) < 0)
        return -1;
    size_t place = place_of(*stream);
    return !*stream || d->seen[place] == *stream ? 0 : meet_stream(d, *stream, place);
}

bool stream_is_met(device *d)
{
    ebb_stream stream = NULL;
    bool known = d->stream_of && current_stream(d, &stream) == 0;
    PyErr_Clear(); /* whoever asks for it is told */
    return known && (!stream || d->seen[place_of(stream)] == stream);
}

/* The one argument of many methods: stream=None. */
int stream_argument(device *d, PyObject *const *arguments, Py_ssize_t count, PyObject *names,
                    Py_ssize_t before, const char *method, ebb_stream *stream)
{
    if (!d) {
        fail(d, EBB_GONE, "");
        return -1;
    }
    PyObject *given = count > before ? arguments[before] : NULL;
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    if (named == 1 && count == before &&
        PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "stream") == 0)
        given = arguments[count];
    else if (named || count > before + 1 || count < before) {
        PyErr_Format(PyExc_TypeError, "%s() takes %s", method,
                     before ? "one argument and stream=" : "stream= and nothing else");
        return -1;
    }
    return stream_for(d, given, stream);
}

/* ---- Device ------------------------------------------------------------------------------------ */

static int device_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"index", "limit", "headroom", "library", "beside", NULL};
    device *d = (device *)self;
    PyObject *limit = Py_None, *headroom = Py_None, *library = Py_None, *path = NULL;
    int beside = 0;
    ebb_device_options options = {
        .size = sizeof options, .limit = EBB_DEFAULT, .headroom = EBB_DEFAULT};
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "i|OOOp", names, &options.index, &limit,
                                     &headroom, &library, &beside))
        return -1;
    if (d->index) {
        PyErr_SetString(PyExc_TypeError, "a Device is opened once");
        return -1;
    }
    if ((limit != Py_None && size_of(limit, &options.limit) < 0) ||
        (headroom != Py_None && size_of(headroom, &options.headroom) < 0) ||
        !(d->s = state_of(self)) || (library != Py_None && !PyUnicode_FSConverter(library, &path)))
        return -1;
    d->beside = beside;
    options.library = path ? PyBytes_AsString(path) : NULL;
    char detail[256] = "";
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_device_open(&options, &d->handle, detail, sizeof detail);
    Py_END_ALLOW_THREADS
    Py_XDECREF(path);
    if (status != EBB_OK) {
        raise_status(d->s, status, detail);
        return -1;
    }
    d->number = options.index;
    d->index = PyLong_FromLong(options.index);
    return d->index ? 0 : -1;
}

static PyObject *device_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    device *d = (device *)self;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_device_close(d->handle);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK && status != EBB_GONE)
        return fail(d, status, "unpin every weight, and tell of graphs that are gone, first");
    d->handle.id = 0;
    Py_RETURN_NONE;
}

static void device_dealloc(PyObject *self)
{
    device *d = (device *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (d->handle.id) {
        Py_BEGIN_ALLOW_THREADS
        ebb_device_close(d->handle);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(d->index);
    Py_XDECREF(d->stream_of);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *device_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    device *d = (device *)self;
    ebb_device_stats t = {.size = sizeof t};
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_device_get_stats(d->handle, &t);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(d, status, "the device was closed");
    const struct {
        const char *name;
        uint64_t value;
    } values[] = {
        {"total", t.total},
        {"free", t.free},
        {"limit", t.limit},
        {"headroom", t.headroom},
        {"held", t.held},
        {"resident", t.resident},
        {"pinned", t.pinned},
        {"for_graphs", t.for_graphs},
        {"unused", t.unused},
        {"poisoned", t.poisoned},
        {"vbars", t.vbars},
        {"hits", t.hits},
        {"misses", t.misses},
        {"offloaded", t.offloaded},
        {"evictions_for_weights", t.evictions[EBB_FOR_WEIGHT]},
        {"evictions_for_tensors", t.evictions[EBB_FOR_TENSOR]},
        {"evictions_for_limit", t.evictions[EBB_FOR_LIMIT]},
        {"evictions_asked_for", t.evictions[EBB_FOR_ASKING]},
        {"frames_created", t.frames_created},
        {"frames_recycled", t.frames_recycled},
        {"frames_released", t.frames_released},
        {"marks", t.marks},
        {"orders", t.orders},
        {"waits", t.waits},
        {"wait_ns", t.wait_ns},
        {"retries", t.retries},
        {"page_outs", t.page_outs},
        {"broken_promises", t.broken_promises},
    };
    PyObject *dict = PyDict_New();
    for (size_t i = 0; dict && i < sizeof values / sizeof *values; i++)
        if (add_size(dict, values[i].name, values[i].value) < 0)
            Py_CLEAR(dict);
    return dict;
}

static PyObject *device_trim(PyObject *self, PyObject *unused)
{
    (void)unused;
    device *d = (device *)self;
    uint64_t freed = 0;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_device_trim(d->handle, &freed);
    Py_END_ALLOW_THREADS
    return status == EBB_OK ? PyLong_FromUnsignedLongLong(freed)
                            : fail(d, status, "the device was closed");
}

static PyObject *device_check(PyObject *self, PyObject *unused)
{
    (void)unused;
    device *d = (device *)self;
    char detail[256] = "";
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_check(d->handle, detail, sizeof detail);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(d, status, *detail ? detail : "the device was closed");
    Py_RETURN_NONE;
}

static const char *why_not_kept(ebb_status status)
{
    switch (status) {
    case EBB_GONE:
        return "the device was closed";
    case EBB_BUSY:
        return "the stream is capturing";
    case EBB_INVALID:
        return "the per-thread default stream is another in every thread";
    default:
        return "";
    }
}

static PyObject *device_keep_stream(PyObject *self, PyObject *arguments, PyObject *names)
{
    static char *keywords[] = {"", "never_captures", NULL};
    device *d = (device *)self;
    PyObject *given;
    int never_captures = 0;
    ebb_stream stream;
    if (!PyArg_ParseTupleAndKeywords(arguments, names, "O|p:keep_stream", keywords, &given,
                                     &never_captures) ||
        given_stream(given, &stream) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_device_keep_stream(d->handle, stream, never_captures ? EBB_NEVER_CAPTURES : 0);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(d, status, why_not_kept(status));
    Py_RETURN_NONE;
}

static PyObject *device_get(PyObject *self, void *which)
{
    device *d = (device *)self;
    uint64_t limit, headroom, total;
    ebb_status status = ebb__device_limits(d->handle, &limit, &headroom, &total);
    if (status != EBB_OK)
        return fail(d, status, "the device was closed");
    switch (*(const char *)which) {
    case 'l':
        return PyLong_FromUnsignedLongLong(limit);
    case 'h':
        return PyLong_FromUnsignedLongLong(headroom);
    default: /* what all together may hold */
        total = total > headroom ? total - headroom : 0;
        return PyLong_FromUnsignedLongLong(limit < total ? limit : total);
    }
}

static int device_set(PyObject *self, PyObject *value, void *which)
{
    device *d = (device *)self;
    uint64_t bytes;
    if (!value) {
        PyErr_SetString(PyExc_AttributeError, "a limit and a headroom cannot be deleted");
        return -1;
    }
    if (size_of(value, &bytes) < 0)
        return -1;
    bool limit = *(const char *)which == 'l';
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status =
        limit ? ebb_device_set_limit(d->handle, bytes) : ebb_device_set_headroom(d->handle, bytes);
    Py_END_ALLOW_THREADS
    if (status == EBB_OK)
        return 0;
    fail(d, status,
         status == EBB_BUSY ? "the limit is set, and what is pinned above it goes as it is unpinned"
                            : "the device was closed");
    return -1;
}

static PyMethodDef device_methods[] = {
    {"close", device_close, METH_NOARGS, "Destroy its VBARs and give everything back."},
    {"stats", device_stats, METH_NOARGS, "What is held and what was done: a dict of integers."},
    {"trim", device_trim, METH_NOARGS, "Give free frames back to the driver. Bytes."},
    {"check", device_check, METH_NOARGS, "Check the books; raises Broken if they do not match."},
    {"keep_stream", (PyCFunction)(void (*)(void))device_keep_stream, METH_VARARGS | METH_KEYWORDS,
     "keep_stream($self, stream, /, never_captures=False)\n--\n\n"
     "Promise that a stream lives as long as the device: unpinning on it is then cheaper. If\n"
     "nothing is ever captured on it either, by anyone, never_captures=True makes it cheaper\n"
     "still; if that is not kept, a graph may use memory that was given to another. A later\n"
     "call takes it back."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_getset[] = {
    {"limit", device_get, device_set, "bytes of VRAM that may be held", (void *)"l"},
    {"headroom", device_get, device_set, "bytes to leave free for others", (void *)"h"},
    {"_most", device_get, NULL, "bytes that limit and headroom allow", (void *)"m"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef device_members[] = {
    {"index", T_OBJECT, offsetof(device, index), READONLY, "the GPU's number"},
    {"_stream_at", T_ULONGLONG, offsetof(device, stream_at), 0,
     "the same as a C function's address"},
    {"_stream_of", T_OBJECT, offsetof(device, stream_of), 0, "PyTorch's current stream, by index"},
    {"_beside", T_INT, offsetof(device, beside), READONLY, "not one of PyTorch's devices"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc, (void *)"One GPU and everything Ebbtide knows of it."},
    {Py_tp_init, (void *)device_init},
    {Py_tp_dealloc, (void *)device_dealloc},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_getset},
    {Py_tp_members, device_members},
    {0, NULL},
};

PyType_Spec device_spec = {"ebbtide._core.Device", sizeof(device), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, device_slots};

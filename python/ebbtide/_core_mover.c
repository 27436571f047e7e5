/*
 * Mover, the bare type under _offload/: a copy stream, a ring of GPU memory for weights on their way, and
 * the host's memory they come from.
 */
#include "_core.h"

#include "fast.h"

typedef struct mover {
    PyObject_HEAD device *device;
    ebb_mover *handle;
} mover;

static int mover_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"device", NULL};
    mover *m = (mover *)self;
    PyObject *d;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTupleAndKeywords(arguments, keywords, "O", names, &d))
        return -1;
    if (m->device || !PyObject_TypeCheck(d, s->types[DEVICE])) {
        PyErr_SetString(PyExc_TypeError, "a mover is made once, of a Device");
        return -1;
    }
    Py_INCREF(d);
    m->device = (device *)d;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_mover_create(m->device->handle, &m->handle);
    Py_END_ALLOW_THREADS
    if (status == EBB_OK)
        return 0;
    fail(m->device, status, "the device was closed");
    return -1;
}

static PyObject *mover_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    mover *m = (mover *)self;
    ebb_status status = EBB_OK;
    if (m->handle) {
        Py_BEGIN_ALLOW_THREADS
        status = ebb_mover_destroy(m->handle);
        Py_END_ALLOW_THREADS
    }
    if (status != EBB_OK)
        return fail(m->device, status, "a cargo is still out");
    m->handle = NULL;
    Py_RETURN_NONE;
}

static void mover_dealloc(PyObject *self)
{
    mover *m = (mover *)self;
    PyTypeObject *type = Py_TYPE(self);
    PyObject *kind, *value, *traceback; /* of whoever fails to make one */
    PyErr_Fetch(&kind, &value, &traceback);
    Py_XDECREF(mover_close(self, NULL));
    PyErr_Clear();
    PyErr_Restore(kind, value, traceback);
    Py_XDECREF(m->device);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

/* Whether it was made, and its device with it; else there is an exception. */
static bool made(const mover *m)
{
    if (!m->device)
        fail(NULL, EBB_GONE, "");
    return m->device != NULL;
}

PyObject *mover_failed(const device *d, ebb_status status)
{
    return fail(d, status,
                status == EBB_BUSY
                    ? "an offloaded model that streams cannot be part of a CUDA graph: "
                      "capture it when residency() is 1.0 everywhere"
                    : "the mover was closed");
}

ebb_mover *mover_handle(PyObject *self, device **d)
{
    *d = ((mover *)self)->device;
    return ((mover *)self)->handle;
}

static PyObject *answer(mover *m, ebb_status status)
{
    if (status == EBB_OK)
        Py_RETURN_TRUE;
    if (status == EBB_OFFLOADED)
        Py_RETURN_FALSE;
    return mover_failed(m->device, status);
}

static PyObject *mover_set_ring(PyObject *self, PyObject *bytes)
{
    mover *m = (mover *)self;
    uint64_t size;
    if (!made(m))
        return NULL;
    if (size_of(bytes, &size) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = m->handle ? ebb_mover_set_ring(m->handle, size) : EBB_GONE;
    Py_END_ALLOW_THREADS
    return answer(m, status);
}

/* ---- host memory ---- */

static PyObject *mover_pin(PyObject *self, PyObject *bytes)
{
    mover *m = (mover *)self;
    uint64_t size;
    void *memory = NULL;
    if (!made(m))
        return NULL;
    if (size_of(bytes, &size) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_alloc(m->device->handle, size, &memory);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(m->device, status, "");
    return PyLong_FromVoidPtr(memory);
}

static PyObject *mover_unpin(PyObject *self, PyObject *address)
{
    mover *m = (mover *)self;
    uint64_t at;
    if (!made(m))
        return NULL;
    if (size_of(address, &at) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_free(m->device->handle, (void *)(uintptr_t)at);
    Py_END_ALLOW_THREADS
    return answer(m, status);
}

static PyObject *mover_borrow(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned long long at, bytes, low, high;
    if (!made(m))
        return NULL;
    if (!PyArg_ParseTuple(arguments, "KKKK", &at, &bytes, &low, &high))
        return NULL;
    ebb_status status;
    const ebb_span within = {(const void *)(uintptr_t)low, high > low ? high - low : 0};
    const void *from = NULL;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_borrow(m->device->handle, (const void *)(uintptr_t)at, bytes, &within, &from);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        Py_RETURN_NONE;
    return PyLong_FromVoidPtr((void *)(uintptr_t)from);
}

static PyObject *mover_pinned(PyObject *self, PyObject *address)
{
    mover *m = (mover *)self;
    unsigned long long at = PyLong_AsUnsignedLongLong(address);
    if (!made(m) || PyErr_Occurred())
        return NULL;
    ebb_span whole;
    if (ebb_host_pinned(m->device->handle, (const void *)(uintptr_t)at, &whole) != EBB_OK)
        Py_RETURN_NONE;
    unsigned long long start = (uintptr_t)whole.start;
    return Py_BuildValue("KK", start, start + whole.bytes);
}

static PyObject *mover_give_back(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned long long at, bytes;
    if (!made(m))
        return NULL;
    if (!PyArg_ParseTuple(arguments, "KK", &at, &bytes))
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_host_return(m->device->handle, (const void *)(uintptr_t)at, bytes);
    Py_END_ALLOW_THREADS
    return answer(m, status);
}

/* false with an exception: it was closed. */
static bool read_stats(const mover *m, ebb_mover_stats *stats)
{
    *stats = (ebb_mover_stats){.size = sizeof *stats};
    ebb_status status = m->handle ? ebb_mover_get_stats(m->handle, stats) : EBB_GONE;
    if (status != EBB_OK)
        fail(m->device, status, "the mover was closed");
    return status == EBB_OK;
}

static PyObject *mover_stats(PyObject *self, PyObject *unused)
{
    (void)unused;
    ebb_mover_stats stats;
    if (!read_stats((const mover *)self, &stats))
        return NULL;
    PyObject *dict = PyDict_New();
    const struct {
        const char *name;
        uint64_t value;
    } values[] = {{"ring", stats.ring},
                  {"address", stats.address},
                  {"end", stats.end},
                  {"pieces", stats.pieces},
                  {"ring_used", stats.ring_used},
                  {"cargoes_out", stats.cargoes_out},
                  {"cargoes", stats.cargoes},
                  {"staged", stats.staged},
                  {"filled", stats.filled},
                  {"copies", stats.copies},
                  {"waits", stats.waits},
                  {"no_room", stats.no_room},
                  {"given_up", stats.given_up}};
    for (size_t i = 0; dict && i < sizeof values / sizeof *values; i++)
        if (add_size(dict, values[i].name, values[i].value) < 0)
            Py_CLEAR(dict);
    return dict;
}

/* A figure of stats() by itself: it is asked for in every pass. */
static PyObject *get_filled(PyObject *self, void *unused)
{
    (void)unused;
    ebb_mover_stats stats;
    if (!read_stats((const mover *)self, &stats))
        return NULL;
    return PyLong_FromUnsignedLongLong(stats.filled);
}

/* outlook(vbar): all that a balance between tensors and weights depends on, as bytes, to be compared with
   what it was. One call, because mostly it is the same: in the middle of a model, where nothing else of this
   is in the processor's caches, each of these questions by itself takes as long as a layer does. */
PyObject *mover_outlook(PyObject *self, PyObject *its)
{
    mover *m = (mover *)self;
    const state *s = state_of(self);
    if (!s || !made(m))
        return NULL;
    if (!PyObject_TypeCheck(its, s->types[VBAR])) {
        PyErr_SetString(PyExc_TypeError, "not a VBAR");
        return NULL;
    }
    ebb_mover_stats moved = {.size = sizeof moved};
    ebb_vbar_stats resident = {.size = sizeof resident};
    ebb_segment_stats tensors = {.size = sizeof tensors};
    uint64_t limit, headroom, total;
    ebb_status status = m->handle ? EBB_OK : EBB_GONE;
    if (status != EBB_OK)
        return fail(m->device, status, "the mover was closed");
    Py_BEGIN_ALLOW_THREADS
    status = ebb__device_limits(m->device->handle, &limit, &headroom, &total);
    if (status == EBB_OK)
        status = ebb_mover_get_stats(m->handle, &moved);
    if (status == EBB_OK)
        status = ebb_vbar_get_stats(((vbar *)its)->handle, &resident);
    if (ebb_attached_stats(m->device->number, &tensors) != EBB_OK)
        tensors = (ebb_segment_stats){0};
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(m->device, status, "the device or the VBAR was closed");
    const uint64_t all[] = {limit,
                            headroom,
                            total,
                            moved.ring,
                            moved.given_up,
                            tensors.bytes,
                            tensors.before,
                            resident.bytes,
                            resident.watermark,
                            resident.watermark_limit,
                            resident.evictions[EBB_FOR_TENSOR]};
    return PyBytes_FromStringAndSize((const char *)all, sizeof all);
}

static PyObject *mover_dlpack(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned long long address, bytes;
    if (!made(m))
        return NULL;
    if (!PyArg_ParseTuple(arguments, "KK", &address, &bytes))
        return NULL;
    return dlpack_over(self, m->device, address, bytes);
}

/* ---- marks: how long the GPU takes ---- */

static PyObject *mover_mark(PyObject *self, PyObject *of_its_own)
{
    mover *m = (mover *)self;
    int own = PyObject_IsTrue(of_its_own);
    ebb_stream stream = NULL;
    uint32_t mark = 0;
    if (!made(m) || own < 0)
        return NULL;
    if (!m->handle)
        return mover_failed(m->device, EBB_GONE);
    if (own)
        stream = ebb_mover_stream(m->handle);
    else if (stream_for(m->device, Py_None, &stream) < 0)
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_mover_mark(m->handle, stream, &mark);
    Py_END_ALLOW_THREADS
    return status == EBB_OK ? PyLong_FromUnsignedLong(mark) : mover_failed(m->device, status);
}

static PyObject *mover_between(PyObject *self, PyObject *arguments)
{
    mover *m = (mover *)self;
    unsigned from, to;
    double milliseconds;
    if (!made(m) || !PyArg_ParseTuple(arguments, "II", &from, &to))
        return NULL;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = m->handle ? ebb_mover_between(m->handle, from, to, &milliseconds) : EBB_GONE;
    Py_END_ALLOW_THREADS
    if (status == EBB_BUSY)
        Py_RETURN_NONE;
    return status == EBB_OK ? PyFloat_FromDouble(milliseconds) : mover_failed(m->device, status);
}

static PyObject *mover_unmark(PyObject *self, PyObject *number)
{
    mover *m = (mover *)self;
    unsigned long mark = PyLong_AsUnsignedLong(number);
    if (PyErr_Occurred())
        return NULL;
    if (m->handle && mark <= UINT32_MAX)
        ebb_mover_unmark(m->handle, (uint32_t)mark);
    Py_RETURN_NONE;
}

static PyMethodDef mover_methods[] = {
    {"stats", mover_stats, METH_NOARGS, "stats($self, /)\n--\n\nWhat it has moved."},
    {"outlook", mover_outlook, METH_O,
     "outlook($self, vbar, /)\n--\n\nAll that its share of the GPU depends on, to be compared."},
    {"_dlpack", mover_dlpack, METH_VARARGS, "Bytes of the ring, as a DLPack capsule."},
    {"pin", mover_pin, METH_O,
     "pin($self, bytes, /)\n--\n\nNew host memory that is copied at the link's speed: its "
     "address."},
    {"unpin", mover_unpin, METH_O, "unpin($self, address, /)\n--\n\nGive it back."},
    {"borrow", mover_borrow, METH_VARARGS,
     "borrow($self, address, bytes, low, high, /)\n--\n\nPin somebody else's memory, and of a file "
     "all from low to high: where the GPU copies it from, or None."},
    {"pinned", mover_pinned, METH_O,
     "pinned($self, address, /)\n--\n\nFrom where to where memory is pinned as one; None: it is "
     "not."},
    {"give_back", mover_give_back, METH_VARARGS,
     "give_back($self, address, bytes, /)\n--\n\nUndo borrow()."},
    {"mark", mover_mark, METH_O,
     "mark($self, own, /)\n--\n\nA point in the current stream's work, or in its own: a "
     "number. Busy: it is being captured."},
    {"between", mover_between, METH_VARARGS,
     "between($self, first, last, /)\n--\n\nMilliseconds that the GPU took from one mark to "
     "another; None: it has not come to both."},
    {"unmark", mover_unmark, METH_O, "unmark($self, mark, /)\n--\n\nGive a mark back."},
    {"close", mover_close, METH_NOARGS, "close($self, /)\n--\n\nGive everything back."},
    {"set_ring", mover_set_ring, METH_O,
     "set_ring($self, bytes, /)\n--\n\nThe ring's size: whether it could be had."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef mover_getset[] = {
    {"filled", get_filled, NULL, "bytes that were brought to stay", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mover_slots[] = {
    {Py_tp_doc, (void *)"A copy stream, and a ring of memory for weights on their way."},
    {Py_tp_init, (void *)mover_init},
    {Py_tp_dealloc, (void *)mover_dealloc},
    {Py_tp_methods, mover_methods},
    {Py_tp_getset, mover_getset},
    {0, NULL},
};

PyType_Spec mover_spec = {"ebbtide._core.Mover", sizeof(mover), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, mover_slots};

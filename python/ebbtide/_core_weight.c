/*
 * Weight, the bare type under ebbtide.Weight.
 *
 * A hit, and its unpin, keep Python's lock, because they take no other: only what may wait lets go
 * of it.
 */
#include "_core.h"

#include <stdlib.h>

#include "fast.h"

/* ---- Weight ------------------------------------------------------------------------------------ */

static int weight_init(PyObject *self, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"vbar", "bytes", NULL};
    weight *w = (weight *)self;
    PyObject *v, *given;
    uint64_t bytes;
    const state *s = state_of(self);
    if (!s || !PyArg_ParseTupleAndKeywords(arguments, keywords, "OO", names, &v, &given) ||
        size_of(given, &bytes) < 0)
        return -1;
    if (!PyObject_TypeCheck(v, s->types[VBAR])) {
        PyErr_Format(PyExc_TypeError, "a weight is a piece of a VBAR, not of %R", v);
        return -1;
    }
    if (w->vbar) {
        PyErr_SetString(PyExc_TypeError, "a weight is made once");
        return -1;
    }
    vbar *owner = (vbar *)v;
    ebb_status status = ebb_vbar_alloc(owner->handle, bytes, &w->offset);
    if (status != EBB_OK) {
        char advice[128];
        snprintf(advice, sizeof advice,
                 status == EBB_FULL   ? "%llu bytes do not fit any more: make the VBAR larger"
                 : status == EBB_GONE ? "the VBAR was closed"
                                      : "a weight has at least one byte, not %llu",
                 (unsigned long long)bytes);
        fail(owner->device, status, advice);
        return -1;
    }
    Py_INCREF(v);
    w->bytes = bytes;
    w->vbar = owner;
    return 0;
}

/* A page_out function may know the weights, which know the VBAR, which knows the function. */
static int weight_traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(((weight *)self)->vbar);
    Py_VISIT(Py_TYPE(self));
    return 0;
}

static int weight_clear(PyObject *self)
{
    weight *w = (weight *)self;
    /* Pins that nobody can take back any more, each on its stream. */
    for (; w->pins; w->pins--) {
        unsigned i = 0;
        while (i + 1 < w->use_count && !w->uses[i].open)
            i++;
        ebb_stream stream = w->uses[i].stream;
        w->uses[i].open--;
        ebb_vbar handle = w->vbar->handle;
        Py_BEGIN_ALLOW_THREADS
        ebb_vbar_unpin(handle, w->offset, w->bytes, stream);
        Py_END_ALLOW_THREADS
    }
    Py_CLEAR(w->vbar);
    return 0;
}

static void weight_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    weight_clear(self);
    free(((weight *)self)->uses);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static ebb_status fault(weight *w, ebb_stream stream, uint64_t *signature)
{
    ebb_vbar handle = w->vbar->handle;
    *signature = ebb__vbar_hit(handle, w->offset, w->bytes, stream);
    if (*signature)
        return EBB_OK;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_fault(handle, w->offset, w->bytes, stream, signature);
    Py_END_ALLOW_THREADS
    return status;
}

static ebb_status unpin(weight *w, ebb_stream stream)
{
    ebb_vbar handle = w->vbar->handle;
    if (ebb__vbar_part(handle, w->offset, w->bytes, stream))
        return EBB_OK;
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_unpin(handle, w->offset, w->bytes, stream);
    Py_END_ALLOW_THREADS
    return status;
}

static device *device_of(const weight *w)
{
    return w->vbar ? w->vbar->device : NULL;
}

bool weight_enter(weight *w, ebb_stream stream)
{
    unsigned free_place = w->use_count;
    for (unsigned i = 0; i < w->use_count; i++) {
        if (w->uses[i].stream == stream) {
            w->uses[i].open++;
            return true;
        }
        if (!w->uses[i].open)
            free_place = i;
    }
    if (free_place == w->use_count) {
        struct use *more = realloc(w->uses, (w->use_count + 1) * sizeof *more);
        if (!more) {
            PyErr_NoMemory();
            return false;
        }
        w->uses = more;
        w->use_count++;
    }
    w->uses[free_place] = (struct use){stream, 1};
    return true;
}

void weight_exit(weight *w, ebb_stream stream)
{
    struct use *found = NULL;
    for (unsigned i = 0; i < w->use_count; i++)
        if (w->uses[i].open && (!found || w->uses[i].stream == stream))
            found = &w->uses[i];
    if (found)
        found->open--;
}

/* Python may know of memory that PyTorch caches and does not use: 1 if it has got some back. */
static int make_room(const weight *w, device *d)
{
    if (!ebb__vbar_wanted(w->vbar->handle, w->offset, w->bytes))
        return 0;
    PyObject *more =
        PyObject_CallMethod((PyObject *)d, "_make_room", "K", (unsigned long long)w->bytes);
    int again = more ? PyObject_IsTrue(more) : -1;
    Py_XDECREF(more);
    return again;
}

static PyObject *weight_fault(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                              PyObject *names)
{
    weight *w = (weight *)self;
    device *d = device_of(w);
    ebb_stream stream;
    if (stream_argument(d, arguments, count, names, 0, "fault", &stream) < 0)
        return NULL;
    if (!weight_enter(w, stream))
        return NULL;
    uint64_t signature;
    ebb_status status = fault(w, stream, &signature);
    if (status == EBB_OFFLOADED && make_room(w, d) > 0)
        status = fault(w, stream, &signature);
    if (status != EBB_OK)
        weight_exit(w, stream);
    if (PyErr_Occurred())
        return NULL;
    if (status == EBB_OFFLOADED)
        Py_RETURN_NONE;
    if (status != EBB_OK)
        return fail(d, status, "its VBAR was closed");
    w->pins++;
    return PyLong_FromUnsignedLongLong(signature);
}

static PyObject *weight_unpin(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                              PyObject *names)
{
    weight *w = (weight *)self;
    device *d = device_of(w);
    ebb_stream stream;
    if (stream_argument(d, arguments, count, names, 0, "unpin", &stream) < 0)
        return NULL;
    if (!w->pins)
        return fail(d, EBB_NOT_PINNED, "unpin() goes with a fault() that did not give None");
    w->pins--; /* before another thread can have it */
    ebb_status status = unpin(w, stream);
    if (status == EBB_OK) {
        weight_exit(w, stream);
        Py_RETURN_NONE;
    }
    w->pins++;
    return fail(d, status, "its VBAR was closed");
}

/*
 * Faults on other streams that came before this fill were not ordered after it, and are about to find
 * its signature: order them now. A fault and its unpin do that.
 */
static void order_users(weight *w, ebb_stream filled)
{
    /* Python's lock may be dropped in between, and the array be another. */
    for (unsigned i = 0; i < w->use_count; i++) {
        ebb_stream stream = w->uses[i].stream;
        uint64_t again;
        if (w->uses[i].open && stream != filled && fault(w, stream, &again) == EBB_OK)
            unpin(w, stream);
    }
}

static PyObject *weight_filled(PyObject *self, PyObject *const *arguments, Py_ssize_t count,
                               PyObject *names)
{
    weight *w = (weight *)self;
    device *d = device_of(w);
    ebb_stream stream;
    if (stream_argument(d, arguments, count, names, 1, "filled", &stream) < 0)
        return NULL;
    uint64_t signature;
    if (size_of(arguments[0], &signature) < 0)
        return NULL;
    /* The page may be pinned all the same, for another weight. */
    ebb_status status = EBB_NOT_PINNED;
    if (!w->pins)
        return fail(d, status, "filled() goes between fault() and unpin()");
    Py_BEGIN_ALLOW_THREADS
    status = ebb_vbar_filled(w->vbar->handle, w->offset, w->bytes, stream);
    Py_END_ALLOW_THREADS
    if (status != EBB_OK)
        return fail(d, status, "filled() goes between fault() and unpin()");
    order_users(w, stream);
    w->signature = signature;
    Py_RETURN_NONE;
}

static PyObject *weight_signature(PyObject *self, void *unused)
{
    (void)unused;
    const weight *w = (weight *)self;
    if (!w->signature)
        Py_RETURN_NONE;
    return PyLong_FromUnsignedLongLong(w->signature);
}

static PyObject *weight_address(PyObject *self, void *unused)
{
    (void)unused;
    const weight *w = (weight *)self;
    if (!w->vbar)
        return fail(NULL, EBB_GONE, "");
    return PyLong_FromUnsignedLongLong(w->vbar->address + w->offset);
}

/* ---- tensors: DLPack ------------------------------------------------------------------------------ */

/* DLPack's structures, version 0: what every PyTorch we support takes. */
typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t dimensions;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } element;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    dl_tensor tensor;
    void *owner;
    void (*release)(struct dl_managed *);
    int64_t shape[1]; /* ours */
} dl_managed;

enum { DL_CPU = 1, DL_CUDA = 2, DL_UNSIGNED = 1 };

static void dl_release(dl_managed *managed)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE gil = PyGILState_Ensure();
        Py_DECREF((PyObject *)managed->owner);
        PyGILState_Release(gil);
    }
    free(managed);
}

static void dl_forget(PyObject *capsule)
{
    /* Whoever takes the tensor renames the capsule. */
    if (PyCapsule_IsValid(capsule, "dltensor"))
        dl_release(PyCapsule_GetPointer(capsule, "dltensor"));
}

PyObject *dlpack_over(PyObject *owner, const device *d, uint64_t address, uint64_t bytes)
{
    dl_managed *managed = calloc(1, sizeof *managed);
    if (!managed)
        return PyErr_NoMemory();
    managed->shape[0] = (int64_t)bytes;
    managed->tensor = (dl_tensor){
        .data = (void *)(uintptr_t)address,
        .device = {d->beside ? DL_CPU : DL_CUDA, d->beside ? 0 : (int32_t)PyLong_AsLong(d->index)},
        .dimensions = 1,
        .element = {DL_UNSIGNED, 8, 1},
        .shape = managed->shape,
    };
    managed->owner = owner;
    managed->release = dl_release;
    PyObject *capsule = PyCapsule_New(managed, "dltensor", dl_forget);
    if (!capsule)
        free(managed);
    else
        Py_INCREF(owner);
    return capsule;
}

static PyObject *weight_dlpack(PyObject *self, PyObject *unused)
{
    (void)unused;
    const weight *w = (weight *)self;
    if (!w->vbar)
        return fail(NULL, EBB_GONE, "");
    /* The tensor keeps the addresses, not the weight: the weight keeps the tensor. */
    return dlpack_over((PyObject *)w->vbar, w->vbar->device, w->vbar->address + w->offset,
                       w->bytes);
}

static PyMethodDef weight_methods[] = {
    {"fault", (PyCFunction)(void (*)(void))weight_fault, METH_FASTCALL | METH_KEYWORDS,
     "fault($self, /, stream=None)\n--\n\n"
     "Make it resident and pin it: its signature. None: offloaded, and not pinned."},
    {"unpin", (PyCFunction)(void (*)(void))weight_unpin, METH_FASTCALL | METH_KEYWORDS,
     "unpin($self, /, stream=None)\n--\n\nTake one fault() back, once the stream's work so far is "
     "over."},
    {"filled", (PyCFunction)(void (*)(void))weight_filled, METH_FASTCALL | METH_KEYWORDS,
     "filled($self, signature, /, stream=None)\n--\n\n"
     "It has been filled by work on the stream, under this signature of fault()."},
    {"_dlpack", weight_dlpack, METH_NOARGS, "Its bytes, as a DLPack capsule."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef weight_getset[] = {
    {"signature", weight_signature, NULL, "the signature it was filled under; None: never", NULL},
    {"address", weight_address, NULL, "where it is, on the GPU", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef weight_members[] = {
    {"vbar", T_OBJECT, offsetof(weight, vbar), READONLY, "the VBAR it is in"},
    {"offset", T_ULONGLONG, offsetof(weight, offset), READONLY, "where it begins in the VBAR"},
    {"nbytes", T_ULONGLONG, offsetof(weight, bytes), READONLY, "how large it is"},
    {"pins", T_ULONG, offsetof(weight, pins), READONLY, "faults not yet taken back"},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot weight_slots[] = {
    {Py_tp_doc,
     (void *)"A piece of a VBAR: addresses, and behind them memory that comes and goes."},
    {Py_tp_init, (void *)weight_init},
    {Py_tp_traverse, (void *)weight_traverse},
    {Py_tp_clear, (void *)weight_clear},
    {Py_tp_dealloc, (void *)weight_dealloc},
    {Py_tp_methods, weight_methods},
    {Py_tp_getset, weight_getset},
    {Py_tp_members, weight_members},
    {0, NULL},
};

PyType_Spec weight_spec = {"ebbtide._core.Weight", sizeof(weight), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
                           weight_slots};

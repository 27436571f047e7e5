/*
 * PyTorch's tensors, seen from C and without PyTorch's headers: which memory they reach over, CPU
 * tensors that alias them, and CUDA tensors for results.
 *
 * A tensor's Python object holds the address of its C++ object at a place that tensors_bind() finds
 * out. The address of that place is what PyTorch's C interface (aoti_torch_*, which is stable from
 * version to version) takes as a tensor. Asking that way also leaves no trace: a storage that Python
 * has seen counts one owner more, and autograd then adds gradients up in new memory instead of in
 * place.
 *
 * Aliases own nothing and are kept: one is right for every tensor of the same address, storage,
 * shape and dtype. A tensor that has not changed since it was last looked at is not looked at again
 * (_seen.c). Everything here runs under the GIL.
 */
#include <string.h>

#include "_sim.h"

enum { MOST_DIMS = 64, MOST_DTYPES = 64, MOST_ALIASES = 8192, MOST_SAMPLES = 8, LARGE = 1 << 16 };
enum { ON_CPU = 0, ON_CUDA = 1 };               /* PyTorch's device types */
enum { STRIDED = 0 };                           /* PyTorch's layout of most tensors */
enum { COMPLEX_HALF = 8, COMPLEX_DOUBLE = 10 }; /* PyTorch's dtypes, the first and the last */
enum { MANY_TENSORS = 1, DEVICE = 2 };          /* kinds of arguments, as in redirect.py */

/* PyTorch's functions, in the order that tensors_bind() gets them. */
static struct {
    int (*layout)(void *tensor, int32_t *result); /* NULL in PyTorch 2.6 */
    int (*data_ptr)(void *tensor, void **result);
    int (*storage_size)(void *tensor, int64_t *result);
    int (*storage_offset)(void *tensor, int64_t *result);
    int (*dim)(void *tensor, int64_t *result);
    int (*sizes)(void *tensor, int64_t **result);
    int (*strides)(void *tensor, int64_t **result);
    int (*dtype)(void *tensor, int32_t *result);
    int (*device_type)(void *tensor, int32_t *result);
    int (*device_index)(void *tensor, int32_t *result);
} torch;

static size_t place; /* of the C++ object's address in a tensor's Python object */
static PyTypeObject *tensor_type, *plain_type; /* what all tensors are, what most of them are */
static PyObject *is_conj, *is_neg, *make_alias, *empty_strided, *resolve, *strided, *stream_of;
static PyObject *aliases; /* a tensor's look, as bytes -> (alias, address, bytes) */

static struct {
    PyObject *object;
    int64_t bytes;
} dtypes[MOST_DTYPES];

/* How a tensor looks. Two that look the same are the same memory, read in the same way. */
typedef struct look {
    void *data;
    int64_t storage_bytes, offset, dim;
    int32_t dtype, bits; /* 1: conjugate, 2: negative of what is stored */
    int64_t shape[2 * MOST_DIMS];
} look;

static void *handle(PyObject *tensor)
{
    return (char *)tensor + place;
}

/* The tensor's C++ object. */
static void *inside(PyObject *tensor)
{
    return *(void **)handle(tensor);
}

static int is_tensor(PyObject *object)
{
    return Py_TYPE(object) == plain_type || PyType_IsSubtype(Py_TYPE(object), tensor_type);
}

/* The device's index, -1 for the CPU, -2 for others. */
static int device_of(PyObject *tensor)
{
    int32_t type = ON_CPU, index = 0;
    if (torch.device_type(handle(tensor), &type) || type == ON_CPU)
        return -1;
    return type != ON_CUDA || torch.device_index(handle(tensor), &index) ? -2 : index;
}

static int is_true(PyObject *method, PyObject *tensor)
{
    PyObject *result = PyObject_CallFunctionObjArgs(method, tensor, NULL);
    Py_XDECREF(result);
    return result == NULL ? -1 : result == Py_True;
}

static int is_strided(PyObject *tensor)
{
    int32_t code = STRIDED;
    if (torch.layout)
        return torch.layout(handle(tensor), &code) == 0 && code == STRIDED;
    PyObject *layout = PyObject_GetAttrString(tensor, "layout");
    if (!layout)
        PyErr_Clear();
    Py_XDECREF(layout);
    return layout == strided;
}

/* Zero, 1 if PyTorch would not say, -1 with an error. */
static int look_at(PyObject *tensor, look *l)
{
    void *h = handle(tensor);
    int64_t *sizes, *strides;
    if (!is_strided(tensor) || torch.dim(h, &l->dim) || l->dim > MOST_DIMS ||
        torch.sizes(h, &sizes) || torch.strides(h, &strides) || torch.data_ptr(h, &l->data) ||
        torch.storage_size(h, &l->storage_bytes) || torch.storage_offset(h, &l->offset) ||
        torch.dtype(h, &l->dtype))
        return 1;
    size_t bytes = (size_t)l->dim * sizeof *sizes;
    if (bytes) {
        memcpy(l->shape, sizes, bytes);
        memcpy(l->shape + l->dim, strides, bytes);
    }
    int negative = is_true(is_neg, tensor);
    int conjugate = 0;
    if (l->dtype >= COMPLEX_HALF && l->dtype <= COMPLEX_DOUBLE)
        conjugate = is_true(is_conj, tensor);
    if (negative < 0 || conjugate < 0)
        return -1;
    l->bits = conjugate | negative << 1;
    return 0;
}

/* The alias of a CUDA tensor that is not among those seen before, and what it reaches over: one that
   was made for a tensor that looks the same, or a new one. Zero, or -1 with an error; the alias is a new
   reference. */
static int look_up(PyObject *tensor, seen *what)
{
    look l;
    int unknown = look_at(tensor, &l);
    if (unknown < 0)
        return -1;
    PyObject *key = NULL, *found = NULL;
    if (!unknown) {
        size_t used = offsetof(look, shape) + 2 * (size_t)l.dim * sizeof *l.shape;
        key = PyBytes_FromStringAndSize((const char *)&l, (Py_ssize_t)used);
        if (!key)
            return -1;
        found = PyDict_GetItemWithError(aliases, key);
        Py_XINCREF(found);
    }
    if (!found && !PyErr_Occurred()) {
        found = PyObject_CallFunctionObjArgs(make_alias, tensor, NULL);
        /* Empty tensors have all one address, and yet are not one tensor. */
        if (found && key && PyObject_IsTrue(PyTuple_GetItem(found, 2))) {
            if (PyDict_Size(aliases) >= MOST_ALIASES)
                PyDict_Clear(aliases);
            if (PyDict_SetItem(aliases, key, found))
                Py_CLEAR(found);
        }
    }
    Py_XDECREF(key);
    if (!found)
        return -1;
    what->alias = PyTuple_GetItem(found, 0);
    what->address = PyLong_AsUnsignedLongLong(PyTuple_GetItem(found, 1));
    what->bytes = PyLong_AsUnsignedLongLong(PyTuple_GetItem(found, 2));
    Py_XINCREF(what->alias);
    Py_DECREF(found);
    if (PyErr_Occurred()) {
        Py_XDECREF(what->alias);
        return -1;
    }
    int64_t *sizes;
    if (!unknown && what->bytes && !torch.sizes(handle(tensor), &sizes))
        seen_keep(inside(tensor), sizes, what);
    return 0;
}

/* A new reference to the alias of a CUDA tensor; what it reaches over goes to `r`. `before`: what is
   known of it, or NULL. */
static PyObject *reach(PyObject *tensor, int device, const seen *before, ranges *r, int access)
{
    seen what = {.device = device};
    if (before) {
        what = *before;
        Py_INCREF(what.alias);
    } else if (look_up(tensor, &what)) {
        return NULL;
    }
    if (ranges_add(r, what.address, what.bytes, access))
        Py_CLEAR(what.alias);
    return what.alias;
}

/* ---- what the module offers --------------------------------------------------------------------- */

/* bind(addresses, sample, its C++ object's address, type, is_conj, is_neg, make_alias, empty_strided,
   resolve, strided, stream_of): PyTorch's functions. make_alias(tensor) gives (alias, address, bytes);
   resolve(tensor) gives one without conjugate and negative bits; stream_of(device) its current stream. */
PyObject *tensors_bind(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    void **functions = (void **)&torch;
    size_t wanted = sizeof torch / sizeof *functions;
    if (count != 11 || PyTuple_Size(arguments[0]) != (Py_ssize_t)wanted)
        return PyErr_Format(PyExc_TypeError, "bind() wants 11 arguments and %zu functions", wanted);
    for (size_t i = 0; i < wanted; i++)
        functions[i] = PyLong_AsVoidPtr(PyTuple_GetItem(arguments[0], (Py_ssize_t)i));
    void *object = PyLong_AsVoidPtr(arguments[2]);
    if (PyErr_Occurred())
        return NULL;
    void **words = (void **)(void *)arguments[1];
    size_t word = sizeof(PyObject) / sizeof *words, end = word + 4;
    while (word < end && words[word] != object)
        word++;
    if (word == end)
        return PyErr_Format(PyExc_ImportError, "this PyTorch's tensors are not laid out as known");
    place = word * sizeof *words;
    tensor_type = (PyTypeObject *)arguments[3];
    plain_type = Py_TYPE(arguments[1]);
    PyObject **kept[] = {&is_conj, &is_neg,  &make_alias, &empty_strided,
                         &resolve, &strided, &stream_of};
    Py_INCREF(arguments[3]);
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        Py_INCREF(arguments[4 + i]);
        *kept[i] = arguments[4 + i];
    }
    if (!aliases && !(aliases = PyDict_New()))
        return NULL;
    Py_RETURN_NONE;
}

/* learn(sample, storage, keys, data, bytes, others): whether tensors can be recognised; _sim.h says what
   the sample is. Storage is the address of its storage's C++ object. */
PyObject *tensors_learn(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    const void *others[MOST_SAMPLES];
    Py_ssize_t length = count == 6 ? PyTuple_Size(arguments[5]) : -1;
    if (length < 0 || length > MOST_SAMPLES || !is_tensor(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "learn(sample, storage, keys, data, bytes, others)");
    for (Py_ssize_t i = 0; i < length; i++)
        others[i] = inside(PyTuple_GetItem(arguments[5], i));
    int64_t *sizes = NULL;
    sample s = {.tensor = inside(arguments[0]),
                .storage = PyLong_AsVoidPtr(arguments[1]),
                .keys = PyLong_AsUnsignedLongLong(arguments[2]),
                .data = PyLong_AsUnsignedLongLong(arguments[3]),
                .bytes = PyLong_AsUnsignedLongLong(arguments[4])};
    if (PyErr_Occurred())
        return NULL;
    if (torch.sizes(handle(arguments[0]), &sizes))
        Py_RETURN_FALSE;
    s.sizes = sizes;
    return PyBool_FromLong(seen_learn(&s, others, (size_t)length));
}

/* know(tensor, dtype, bytes): a dtype, by a tensor that has it. */
PyObject *tensors_know(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    int32_t code = -1;
    int64_t bytes = count == 3 ? PyLong_AsLongLong(arguments[2]) : -1;
    if (PyErr_Occurred())
        return NULL;
    if (bytes < 1 || torch.dtype(handle(arguments[0]), &code) || code < 0 || code >= MOST_DTYPES)
        return PyErr_Format(PyExc_ValueError, "know(tensor, dtype, bytes)");
    Py_INCREF(arguments[1]);
    Py_XDECREF(dtypes[code].object);
    dtypes[code].object = arguments[1];
    dtypes[code].bytes = bytes;
    Py_RETURN_NONE;
}

/* forget(): no alias is given out again. */
PyObject *tensors_forget(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self, (void)arguments, (void)count;
    seen_forget();
    PyDict_Clear(aliases);
    Py_RETURN_NONE;
}

/* reach(tensor, ranges, access): the alias of a CUDA tensor. It is kept and given out again: it must
   not get another shape. */
PyObject *tensors_reach(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    if (count != 3 || !is_tensor(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "reach(tensor, ranges, access)");
    ranges *r = ranges_of(arguments[1]);
    if (!r)
        return NULL;
    const seen *before = seen_find(inside(arguments[0]));
    int device = before ? before->device : device_of(arguments[0]);
    return reach(arguments[0], device, before, r, (int)PyLong_AsLong(arguments[2]));
}

/* One tensor of convert()'s arguments. *item is borrowed, and becomes a new reference. 1: done, 0: not
   on a CUDA device, or not on that of the others, -1: an error. */
static int convert_tensor(PyObject **item, int access, int *index, ranges *r)
{
    const seen *before = seen_find(inside(*item));
    int device = before ? before->device : device_of(*item);
    if (device < 0 || (*index >= 0 && *index != device))
        return 0;
    *index = device;
    *item = reach(*item, device, before, r, access);
    return *item ? 1 : -1;
}

/* A list of them; likewise. */
static int convert_list(PyObject **item, int access, int *index, ranges *r)
{
    PyObject *value = *item;
    if (!PyList_Check(value))
        return 0;
    Py_ssize_t length = PyList_Size(value);
    PyObject *list = PyList_New(length);
    int done = list ? 1 : -1;
    for (Py_ssize_t i = 0; done > 0 && i < length; i++) {
        PyObject *one = PyList_GetItem(value, i);
        done = is_tensor(one) ? convert_tensor(&one, access, index, r) : 0;
        if (done > 0)
            PyList_SetItem(list, i, one);
    }
    if (done <= 0)
        Py_CLEAR(list);
    *item = list;
    return done;
}

/* A number, or a number in a tensor, which may be anywhere. */
static int is_number(PyObject *value, int access)
{
    int64_t dim = 1;
    return !is_tensor(value) || (device_of(value) == -1 && access == EBBSIM_READ &&
                                 !torch.dim(handle(value), &dim) && dim == 0);
}

/* One argument; likewise. 0: not a plain case. */
static int convert_one(PyObject **item, int kind, int access, int *index, ranges *r)
{
    if (kind == MANY_TENSORS)
        return convert_list(item, access, index, r);
    if (kind == DEVICE)
        return 0;
    int done = is_tensor(*item) ? convert_tensor(item, access, index, r) : 0;
    if (done == 0 && is_number(*item, access)) {
        Py_INCREF(*item);
        done = 1;
    }
    return done;
}

/* convert(signature, args, kwargs, ranges): (device, arguments for the CPU's kernel), or None if this
   is not the plain case: CUDA tensors of one device, by position. The signature is a pair: three
   bytes for each argument that may be a tensor or a device (its place, kind and access), and a
   tuple of their names. */
PyObject *tensors_convert(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    (void)self;
    ranges *r = count == 4 ? ranges_of(arguments[3]) : NULL;
    if (!r)
        return PyErr_Format(PyExc_TypeError, "convert(signature, args, kwargs, ranges)");
    PyObject *args = arguments[1], *kwargs = arguments[2];
    PyObject *packed = PyTuple_GetItem(arguments[0], 0), *names = PyTuple_GetItem(arguments[0], 1);
    const unsigned char *inputs = (const unsigned char *)PyBytes_AsString(packed);
    Py_ssize_t given = PyTuple_Size(args), length = names ? PyTuple_Size(names) : -1;
    if (!inputs || given < 0 || length < 0)
        return NULL;
    int by_name = PyDict_Size(kwargs) > 0, index = -1, done = 1;
    PyObject *made = PyList_New(given);
    for (Py_ssize_t i = 0; made && i < given; i++) {
        PyObject *item = PyTuple_GetItem(args, i);
        Py_INCREF(item);
        PyList_SetItem(made, i, item);
    }
    for (Py_ssize_t i = 0; made && done > 0 && i < length; i++) {
        const unsigned char *input = inputs + 3 * i;
        if (input[0] >= given) {
            PyObject *value = by_name ? PyDict_GetItem(kwargs, PyTuple_GetItem(names, i)) : NULL;
            done = value == NULL || value == Py_None;
            continue;
        }
        PyObject *item = PyTuple_GetItem(args, input[0]);
        if (item == Py_None)
            continue;
        done = convert_one(&item, input[1], input[2], &index, r);
        if (done > 0)
            PyList_SetItem(made, input[0], item);
    }
    PyObject *result = NULL;
    if (made && done > 0 && index >= 0) {
        result = Py_BuildValue("(iO)", index, made);
    } else if (made && done >= 0 && !PyErr_Occurred()) {
        r->count = 0;
        result = Py_None;
        Py_INCREF(result);
    }
    Py_XDECREF(made);
    return result;
}

/* ---- results ------------------------------------------------------------------------------------ */

static PyObject *tuple_of(const int64_t *numbers, int64_t length)
{
    PyObject *tuple = PyTuple_New((Py_ssize_t)length);
    for (Py_ssize_t i = 0; tuple && i < length; i++)
        if (PyTuple_SetItem(tuple, i, PyLong_FromLongLong(numbers[i])))
            Py_CLEAR(tuple);
    return tuple;
}

/* How many bytes a tensor reaches over, gaps included. */
static int64_t reach_of(const look *l)
{
    int64_t extent = 1;
    for (int64_t i = 0; i < l->dim; i++) {
        if (l->shape[i] == 0)
            return 0;
        extent += (l->shape[i] - 1) * l->shape[l->dim + i];
    }
    return extent * dtypes[l->dtype].bytes;
}

/* An empty CUDA tensor of the same shape, strides and dtype, as PyTorch's own allocator makes it. */
static PyObject *empty_like(const look *l, PyObject *device)
{
    PyObject *size = tuple_of(l->shape, l->dim), *stride = tuple_of(l->shape + l->dim, l->dim);
    PyObject *positional = size && stride ? PyTuple_Pack(2, size, stride) : NULL;
    PyObject *named = PyDict_New(), *made = NULL;
    if (positional && named && !PyDict_SetItemString(named, "dtype", dtypes[l->dtype].object) &&
        !PyDict_SetItemString(named, "device", device))
        made = PyObject_Call(empty_strided, positional, named);
    Py_XDECREF(size);
    Py_XDECREF(stride);
    Py_XDECREF(positional);
    Py_XDECREF(named);
    return made;
}

/* What is queued on the current stream has had its effect. The memory of a new tensor may be what another
   thread has given back meanwhile, behind a copy from it that has only been queued. A stream that is
   capturing has nothing to wait for. 0, or -1 with an exception. */
static int catch_up_for(PyObject *made)
{
    int32_t index = 0;
    if (torch.device_index(handle(made), &index))
        return 0;
    PyObject *stream = PyObject_CallFunction(stream_of, "i", (int)index);
    void *its = stream ? PyLong_AsVoidPtr(stream) : NULL;
    Py_XDECREF(stream);
    if (PyErr_Occurred())
        return -1;
    sim_catch_up(index, its);
    return 0;
}

/* lift(result, device, ranges, inputs): a CUDA tensor with a CPU tensor's contents. None if that is not
   all there is to it: the tensor is not plain, or lies in one of the first `inputs` ranges. */
PyObject *tensors_lift(PyObject *self, PyObject *const *arguments, Py_ssize_t count)
{
    ranges *r = count == 4 ? ranges_of(arguments[2]) : NULL;
    Py_ssize_t inputs = r ? PyLong_AsSsize_t(arguments[3]) : -1;
    if (inputs < 0 || !is_tensor(arguments[0]))
        return PyErr_Format(PyExc_TypeError, "lift(tensor, device, ranges, inputs)");
    look l;
    int unknown = look_at(arguments[0], &l);
    if (unknown < 0)
        return NULL;
    if (unknown || device_of(arguments[0]) != -1 || l.dtype < 0 || l.dtype >= MOST_DTYPES ||
        !dtypes[l.dtype].object || ranges_hold(r, (uint64_t)(uintptr_t)l.data, (size_t)inputs))
        Py_RETURN_NONE;
    if (l.bits) {
        PyObject *again[] = {PyObject_CallFunctionObjArgs(resolve, arguments[0], NULL),
                             arguments[1], arguments[2], arguments[3]};
        PyObject *made = again[0] ? tensors_lift(self, again, 4) : NULL;
        Py_XDECREF(again[0]);
        return made;
    }
    PyObject *made = empty_like(&l, arguments[1]);
    void *data = NULL;
    if (!made || torch.data_ptr(handle(made), &data))
        return made;
    if (catch_up_for(made) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    int64_t bytes = reach_of(&l);
    if (bytes > LARGE) {
        Py_BEGIN_ALLOW_THREADS;
        memmove(data, l.data, (size_t)bytes);
        Py_END_ALLOW_THREADS;
    } else if (bytes > 0) {
        memmove(data, l.data, (size_t)bytes);
    }
    if (ranges_add(r, (uint64_t)(uintptr_t)data, (uint64_t)bytes, EBBSIM_WRITE))
        Py_CLEAR(made);
    return made;
}

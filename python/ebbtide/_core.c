/*
 * The Python extension: ebbtide.h for Python, in the limited API of 3.10, so that one binary serves
 * every later version. Nothing here decides anything; that is the core's business.
 */
#include "_core.h"

/* The exception of each status. Error is the base of all; the names are what users catch. */
static const struct {
    ebb_status status;
    const char *name; /* qualified: where users find it */
} kinds[KINDS] = {
    {EBB_INVALID, "ebbtide.Invalid"},
    {EBB_NO_DRIVER, "ebbtide.NoDriver"},
    {EBB_DRIVER_TOO_OLD, "ebbtide.DriverTooOld"},
    {EBB_DRIVER_INCOMPLETE, "ebbtide.DriverIncomplete"},
    {EBB_DRIVER_FAILED, "ebbtide.DriverFailed"},
    {EBB_NO_DEVICE, "ebbtide.NoDevice"},
    {EBB_NO_VMM, "ebbtide.NoVMM"},
    {EBB_GONE, "ebbtide.Gone"},
    {EBB_BUSY, "ebbtide.Busy"},
    {EBB_NOT_PINNED, "ebbtide.NotPinned"},
    {EBB_NO_ADDRESSES, "ebbtide.NoAddresses"},
    {EBB_FULL, "ebbtide.Full"},
    {EBB_FORKED, "ebbtide.Forked"},
    {EBB_BROKEN, "ebbtide.Broken"},
};

PyObject *raise_status(const state *s, ebb_status status, const char *detail)
{
    /* The host's memory is Python's too: its own exception is the one people expect. */
    if (status == EBB_NO_HOST_MEMORY)
        return PyErr_NoMemory();
    PyObject *type = s->error;
    for (size_t i = 0; i < KINDS; i++)
        if (kinds[i].status == status)
            type = s->errors[i];
    return PyErr_Format(type, *detail ? "%s: %s" : "%s", ebb_status_text(status), detail);
}

static struct PyModuleDef definition;

const state *state_of(PyObject *object)
{
    /* A subclass's own type has no module, or another's: one of its bases has ours. */
    for (PyTypeObject *type = Py_TYPE(object); type;
         type = (PyTypeObject *)PyType_GetSlot(type, Py_tp_base)) {
        PyObject *module = PyType_GetModule(type);
        if (module && PyModule_GetDef(module) == &definition)
            return PyModule_GetState(module);
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "a type of another module");
    return NULL;
}

void forgive(void)
{
    if (!PyErr_Occurred())
        return;
    bool interrupt = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
    PyErr_Clear();
    if (interrupt)
        PyErr_SetInterrupt();
}

int size_of(PyObject *given, uint64_t *size)
{
    *size = PyLong_AsUnsignedLongLong(given);
    return *size == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

int add_size(PyObject *dict, const char *name, uint64_t value)
{
    PyObject *number = PyLong_FromUnsignedLongLong(value);
    int status = number ? PyDict_SetItemString(dict, name, number) : -1;
    Py_XDECREF(number);
    return status;
}

static PyStructSequence_Field probe_fields[] = {
    {"name", "the GPU's name"},
    {"driver_version", "13000 for CUDA 13.0"},
    {"device_count", "GPUs the driver shows"},
    {"total_bytes", "the GPU's memory"},
    {"granularity", "bytes a physical allocation is a multiple of"},
    {"exportable", "memory of this GPU can be shared as file descriptors"},
    {"context_events", "the driver can record an event of a whole context"},
    {"detail", "what was found, in words"},
    {NULL, NULL},
};
enum { PROBE_FIELDS = sizeof probe_fields / sizeof *probe_fields - 1 };
static PyStructSequence_Desc probe_desc = {
    .name = "ebbtide.Probe",
    .doc = "What probe() found.",
    .fields = probe_fields,
    .n_in_sequence = PROBE_FIELDS,
};

static PyObject *probe_result(const state *s, const ebb_probe_result *found)
{
    PyObject *values[] = {
        PyUnicode_DecodeUTF8(found->name, (Py_ssize_t)strlen(found->name), "replace"),
        PyLong_FromLong(found->driver_version),
        PyLong_FromLong(found->device_count),
        PyLong_FromUnsignedLongLong(found->total_bytes),
        PyLong_FromSize_t(found->granularity),
        PyBool_FromLong(found->exportable),
        PyBool_FromLong(found->context_events),
        PyUnicode_DecodeUTF8(found->detail, (Py_ssize_t)strlen(found->detail), "replace"),
    };
    _Static_assert(sizeof values / sizeof values[0] == PROBE_FIELDS, "a value for each field");
    /* The sequence owns what it is given, the missing ones included, so one release frees all. */
    PyObject *result = PyStructSequence_New(s->probe);
    int whole = result != NULL;
    for (Py_ssize_t i = 0; i < PROBE_FIELDS; i++) {
        whole = whole && values[i];
        if (result)
            PyStructSequence_SetItem(result, i, values[i]);
        else
            Py_XDECREF(values[i]);
    }
    if (whole)
        return result;
    Py_XDECREF(result);
    return NULL;
}

PyDoc_STRVAR(
    probe_doc,
    "probe(library=None, index=0)\n--\n\n"
    "Say what GPU number `index` is, or raise the Error that says why Ebbtide cannot work\n"
    "with it. `library` is the path of a driver library; None: EBBTIDE_DRIVER if set, else\n"
    "the system's. No context is made and nothing is left behind.");

static PyObject *probe(PyObject *module, PyObject *arguments, PyObject *keywords)
{
    static char *names[] = {"library", "index", NULL};
    PyObject *given = Py_None, *path = NULL;
    int index = 0;
    if (!PyArg_ParseTupleAndKeywords(arguments, keywords, "|Oi:probe", names, &given, &index))
        return NULL;
    if (given != Py_None && !PyUnicode_FSConverter(given, &path))
        return NULL;

    const char *library = path ? PyBytes_AsString(path) : NULL;
    ebb_probe_result found = {.size = sizeof found};
    ebb_status status;
    Py_BEGIN_ALLOW_THREADS
    status = ebb_probe(library, index, &found);
    Py_END_ALLOW_THREADS
    Py_XDECREF(path);

    const state *s = PyModule_GetState(module);
    return status == EBB_OK ? probe_result(s, &found) : raise_status(s, status, found.detail);
}

static PyMethodDef methods[] = {
    {"probe", (PyCFunction)(void (*)(void))probe, METH_VARARGS | METH_KEYWORDS, probe_doc},
    {"attach", core_attach, METH_VARARGS, "Of _attach.py: limit, headroom, GPUs as bits."},
    {"detach", core_detach, METH_NOARGS, "Of _attach.py: bytes that remain."},
    {"attach_before", core_attach_before, METH_VARARGS, "Of _attach.py: a GPU, its segments."},
    {"attach_pool", core_attach_pool, METH_VARARGS, "Of _attach.py: a GPU, 1 or -1."},
    {"table_of", core_table_of, METH_O, "Of _offload/ahead.py: where a dict has its table."},
    {"attached_stats", core_attached_stats, METH_O, "Of _attach.py: a GPU's segments, or None."},
    {NULL, NULL, 0, NULL},
};

/* Make an exception type with its number as `status`, and add it to the module. */
static PyObject *add_error(PyObject *module, const char *name, const char *doc, PyObject *bases,
                           ebb_status status)
{
    PyObject *type = NULL;
    PyObject *members = Py_BuildValue("{s:i}", "status", (int)status);
    if (members)
        type = PyErr_NewExceptionWithDoc(name, doc, bases, members);
    Py_XDECREF(members);
    if (type && PyModule_AddObjectRef(module, strchr(name, '.') + 1, type) < 0)
        Py_CLEAR(type);
    return type;
}

static int add_types(PyObject *module, state *s)
{
    const struct {
        const char *name;
        PyType_Spec *spec;
        PyTypeObject *base;
    } types[TYPES] = {[DEVICE] = {"Device", &device_spec},
                      [VBAR] = {"VBAR", &vbar_spec},
                      [WEIGHT] = {"Weight", &weight_spec},
                      [AHEAD] = {"Ahead", &ahead_spec},
                      [UNIT] = {"Unit", &unit_spec},
                      [MOVER] = {"Mover", &mover_spec},
                      [LOAD] = {"Load", &load_spec},
                      [COURSE] = {"Course", &course_spec},
                      [PASS] = {"Pass", &pass_spec},
                      [GATE] = {"Gate", &gate_spec},
                      [PLACES] = {"Places", &places_spec, &PyDict_Type}};
    if (places_measure() < 0)
        return -1;
    for (size_t i = 0; i < TYPES; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, types[i].spec, (PyObject *)types[i].base);
        s->types[i] = (PyTypeObject *)type;
        if (!type || PyModule_AddObjectRef(module, types[i].name, type) < 0)
            return -1;
    }
    return 0;
}

static int execute(PyObject *module)
{
    state *s = PyModule_GetState(module);
    s->error = add_error(module, "ebbtide.Error", "Ebbtide could not do what was asked.",
                         PyExc_RuntimeError, EBB_OK);
    if (!s->error)
        return -1;
    for (size_t i = 0; i < KINDS; i++) {
        s->errors[i] = add_error(module, kinds[i].name, ebb_status_text(kinds[i].status), s->error,
                                 kinds[i].status);
        if (!s->errors[i])
            return -1;
    }
    s->probe = PyStructSequence_NewType(&probe_desc);
    if (!s->probe || PyModule_AddObjectRef(module, "Probe", (PyObject *)s->probe) < 0)
        return -1;
    if (add_types(module, s) < 0)
        return -1;
    return PyModule_AddStringConstant(module, "version", ebb_version());
}

static int traverse(PyObject *module, visitproc visit, void *arg)
{
    state *s = PyModule_GetState(module);
    Py_VISIT(s->error);
    Py_VISIT(s->probe);
    for (size_t i = 0; i < KINDS; i++)
        Py_VISIT(s->errors[i]);
    for (size_t i = 0; i < TYPES; i++)
        Py_VISIT(s->types[i]);
    return 0;
}

static int clear(PyObject *module)
{
    state *s = PyModule_GetState(module);
    Py_CLEAR(s->error);
    Py_CLEAR(s->probe);
    for (size_t i = 0; i < KINDS; i++)
        Py_CLEAR(s->errors[i]);
    for (size_t i = 0; i < TYPES; i++)
        Py_CLEAR(s->types[i]);
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)execute},
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,   .m_name = "ebbtide._core", .m_doc = "Ebbtide's core.",
    .m_size = sizeof(state), .m_methods = methods,      .m_slots = slots,
    .m_traverse = traverse,  .m_clear = clear,
};

PyMODINIT_FUNC PyInit__core(void);

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&definition);
}

/* Calls around a function, as in wrapping.py. */

typedef struct {
    PyObject_HEAD
    PyObject *original, *hook, *begin, *end, *names, *references;
    vectorcallfunc vectorcall;
    int light;
    char waits;
} Around;

/* The calls that compiled code follows in light steps. */
enum { NOTHING, LIGHT_ENGINE, LIGHT_BATCH, LIGHT_INDICES };

static int light_begins(Around *self, Phases *rank, PyObject *const *args, Py_ssize_t count,
                        PyObject *names)
{
    if (rank == NULL || self->light == NOTHING)
        return FOR_PYTHON;
    if (self->light == LIGHT_ENGINE)
        return light_backward(rank, args, count, names);
    if (count < 1)
        return FOR_PYTHON;
    if (self->light == LIGHT_BATCH)
        return light_batch(rank, args[0]);
    return is_unfollowed(args[0]) ? NO_END : FOR_PYTHON;
}

static PyTypeObject AroundType;

/* Call end(begun, result, error). An Exception that it raises is a fault. Anything else is the
 * job's own: return -1 with it set. */
static int around_ends(Around *self, PyObject *begun, PyObject *result, PyObject *error)
{
    PyObject *done = PyObject_CallFunctionObjArgs(self->end, begun, result ? result : Py_None,
                                                  error ? error : Py_None, NULL);
    Py_XDECREF(done);
    return done != NULL ? 0 : note_fault(self->hook);
}

static PyObject *Around_call(Around *self, PyObject *const *args, size_t flagged, PyObject *names)
{
    if (active() == NULL || is_off(self->hook))
        return PyObject_Vectorcall(self->original, args, flagged, names);
    Phases *rank = active_rank();
    if (self->waits && rank != NULL && rank->phase == WAIT)
        return PyObject_Vectorcall(self->original, args, flagged, names);
    Py_XINCREF(rank);
    PyObject *begun = NULL;
    int light = light_begins(self, rank, args, PyVectorcall_NARGS(flagged), names);
    if (light == FAULT && note_fault(self->hook) < 0) {
        Py_DECREF(rank);
        return NULL;
    }
    if (light == FOR_PYTHON) {
        size_t given = flagged & ~PY_VECTORCALL_ARGUMENTS_OFFSET;
        begun = PyObject_Vectorcall(self->begin, args, given, names);
        if (begun == NULL && note_fault(self->hook) < 0) {
            Py_XDECREF(rank);
            return NULL;
        }
        if (begun == Py_None)
            Py_CLEAR(begun);
    }
    PyObject *result = PyObject_Vectorcall(self->original, args, flagged, names);
    if (light == BEGUN && self->light == LIGHT_BATCH && result == NULL) {
        /* The loader has no more batches, or failed. */
        begun = Py_NewRef(args[0]);
        light = FOR_PYTHON;
    }
    if (begun != NULL || light == BEGUN) {
        PyObject *error = result == NULL ? take_exception() : NULL;
        int raised;
        if (light != BEGUN)
            raised = around_ends(self, begun, result, error) < 0;
        else {
            int ended = self->light == LIGHT_ENGINE ? light_backward_ended(rank, error)
                                                    : light_batch_came(rank, args[0], result);
            raised = ended < 0 && note_fault(self->hook) < 0;
        }
        if (raised) {
            Py_XDECREF(error);
            Py_CLEAR(result);
        } else
            set_exception(error);
    }
    Py_XDECREF(begun);
    Py_XDECREF(rank);
    return result;
}

static int Around_init(Around *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"original", "hook", "begin", "end", "light", "waits", NULL};
    static const char *const kinds[] = {"", "engine", "batch", "indices"};
    PyObject *original, *hook, *begin, *end;
    const char *light = "";
    int waits = 0, kind = LIGHT_INDICES;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUOO|sp", names, &original, &hook, &begin, &end,
                                     &light, &waits))
        return -1;
    while (kind > NOTHING && strcmp(kinds[kind], light))
        kind--;
    Py_XSETREF(self->original, Py_NewRef(original));
    Py_XSETREF(self->hook, Py_NewRef(hook));
    Py_XSETREF(self->begin, Py_NewRef(begin));
    Py_XSETREF(self->end, Py_NewRef(end));
    self->light = kind;
    self->waits = (char)waits;
    self->vectorcall = (vectorcallfunc)Around_call;
    return 0;
}

#define AROUND_REFERENCES(DO) DO(original) DO(hook) DO(begin) DO(end) DO(names)

static int Around_traverse(Around *self, visitproc visit, void *arg)
{
    AROUND_REFERENCES(VISIT)
    return 0;
}

static int Around_clear(Around *self)
{
    AROUND_REFERENCES(CLEAR)
    return 0;
}

static void Around_dealloc(Around *self)
{
    PyObject_GC_UnTrack(self);
    if (self->references != NULL)
        PyObject_ClearWeakRefs((PyObject *)self);
    Around_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Around_get(PyObject *self, PyObject *object, PyObject *type)
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

/* Copied and pickled by name, like a function. */
static PyObject *Around_reduce(PyObject *self, PyObject *unused)
{
    return PyObject_GetAttr(self, s_qualname);
}

static PyMethodDef Around_methods[] = {
    {"__reduce__", Around_reduce, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef Around_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject AroundType = {
    TYPE(Around),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Around_init,
    COLLECTED(Around),
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Around, vectorcall),
    .tp_dictoffset = offsetof(Around, names),
    .tp_weaklistoffset = offsetof(Around, references),
    .tp_descr_get = Around_get,
    .tp_methods = Around_methods,
    .tp_getset = Around_getset,
};

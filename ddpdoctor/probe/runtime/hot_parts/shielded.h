/* A function that does not raise, as in shield.shielded. */

typedef struct {
    PyObject_HEAD
    PyObject *function, *name;
    vectorcallfunc vectorcall;
} Shielded;

static PyTypeObject ShieldedType;

static PyObject *Shielded_call(Shielded *self, PyObject *const *args, size_t flagged,
                               PyObject *names)
{
    if (is_off(self->name))
        Py_RETURN_NONE;
    PyObject *done = PyObject_Vectorcall(self->function, args, flagged, names);
    if (done == NULL && note_fault(self->name) < 0)
        return NULL;
    Py_XDECREF(done);
    Py_RETURN_NONE;
}

static int Shielded_init(Shielded *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"function", "name", NULL};
    PyObject *function, *name;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OU", names, &function, &name))
        return -1;
    Py_XSETREF(self->function, Py_NewRef(function));
    Py_XSETREF(self->name, Py_NewRef(name));
    self->vectorcall = (vectorcallfunc)Shielded_call;
    return 0;
}

static int Shielded_traverse(Shielded *self, visitproc visit, void *arg)
{
    Py_VISIT(self->function);
    return 0;
}

static int Shielded_clear(Shielded *self)
{
    Py_CLEAR(self->function);
    return 0;
}

static void Shielded_dealloc(Shielded *self)
{
    PyObject_GC_UnTrack(self);
    Shielded_clear(self);
    Py_XDECREF(self->name);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyTypeObject ShieldedType = {
    TYPE(Shielded),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Shielded_init,
    COLLECTED(Shielded),
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Shielded, vectorcall),
};

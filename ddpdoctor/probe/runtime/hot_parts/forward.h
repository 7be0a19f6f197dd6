/* A context around DDP's own context of the wrapped module's forward (probe/hooks/ddp.py). */

typedef struct {
    PyObject_HEAD
    PyObject *ddp, *context, *before, *rank;
    char light;
} Forward;

static PyTypeObject ForwardType;

static PyObject *Forward_make(PyObject *type, PyObject *const *args, size_t flagged, PyObject *names)
{
    if (PyVectorcall_NARGS(flagged) != 3 || names != NULL) {
        PyErr_SetString(PyExc_TypeError, "Forward(ddp, context, before)");
        return NULL;
    }
    Forward *self = (Forward *)PyType_GenericAlloc((PyTypeObject *)type, 0);
    if (self != NULL) {
        self->ddp = Py_NewRef(args[0]);
        self->context = Py_NewRef(args[1]);
        self->before = Py_NewRef(args[2]);
    }
    return (PyObject *)self;
}

/* Not tracked by the garbage collector: nothing that it holds refers to it. */
static void Forward_dealloc(Forward *self)
{
    Py_XDECREF(self->ddp);
    Py_XDECREF(self->context);
    Py_XDECREF(self->before);
    Py_XDECREF(self->rank);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Forward_enter(Forward *self, PyObject *unused)
{
    Phases *rank = active_rank();
    int done = NO_END;
    if (rank != NULL) {
        Py_INCREF(rank);
        done = light_forward(rank, self->ddp);
        if (done == FAULT && note_fault(h_forward) < 0) {
            Py_DECREF(rank);
            return NULL;
        }
        if (done == FOR_PYTHON) {
            PyFrameObject *frame = PyEval_GetFrame();
            PyObject *found = PyObject_CallFunctionObjArgs(
                self->before, self->ddp, frame ? (PyObject *)frame : Py_None, NULL);
            if (found == NULL) {
                Py_DECREF(rank);
                return NULL;
            }
            done = found != Py_None ? BEGUN : NO_END;
            Py_DECREF(found);
        } else
            self->light = 1;
        if (done == BEGUN)
            Py_XSETREF(self->rank, Py_NewRef((PyObject *)rank));
        Py_DECREF(rank);
    }
    return PyObject_CallMethodNoArgs(self->context, s_enter);
}

static PyObject *Forward_exit(Forward *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 3) {
        PyErr_SetString(PyExc_TypeError, "__exit__(type, error, traceback)");
        return NULL;
    }
    if (self->rank != NULL) {
        Phases *rank = (Phases *)self->rank;
        int64_t began = self->light && rank->clocked ? cpu_ns() : 0;
        PyObject *error = args[1] == Py_None ? NULL : args[1];
        int failed = do_leave(rank, error) < 0;
        if (!failed && error == NULL && !self->light) {
            PyObject *grad = PyObject_CallNoArgs(grad_enabled);
            Py_XDECREF(grad);
            if (grad == Py_False) {
                PyObject *done = PyObject_CallMethodNoArgs(self->rank, s_evaluated);
                Py_XDECREF(done);
            }
            failed = PyErr_Occurred() != NULL;
        }
        int raised = failed && note_fault(h_forward) < 0;
        clocked_since(rank, began);
        if (raised)
            return NULL;
    }
    return PyObject_CallMethodObjArgs(self->context, s_exit, args[0], args[1], args[2], NULL);
}

static PyMethodDef Forward_methods[] = {
    {"__enter__", (PyCFunction)Forward_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))Forward_exit, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject ForwardType = {
    TYPE(Forward),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_vectorcall = Forward_make,
    .tp_methods = Forward_methods,
};

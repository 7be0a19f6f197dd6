/* The user lines that lead to a hook, as in sites.py. */

typedef struct {
    PyObject *code;
    int at;
} Place;

typedef struct {
    PyObject_HEAD
    long most;
    int count, enough;
    Place places[MAX_FRAMES];
    PyObject *found;
} Chain;

static PyTypeObject ChainType;

static void chain_forget(Chain *self)
{
    for (int i = 0; i < self->count; i++)
        Py_CLEAR(self->places[i].code);
    self->count = 0;
    self->enough = 0;
    Py_CLEAR(self->found);
}

static void Chain_dealloc(Chain *self)
{
    chain_forget(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Chain_init(Chain *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"most", NULL};
    self->most = 8;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|l", names, &self->most))
        return -1;
    return memos != NULL ? PyList_Append(memos, (PyObject *)self) : 0;
}

/* Walk the stack. Return a new reference to the lines that led here, or NULL with an exception. */
static PyObject *chain_walk(Chain *self)
{
    PyFrameObject *frame = PyEval_GetFrame();
    PyObject *most = PyLong_FromLong(self->most);
    PyObject *known = NULL;
    if (most != NULL && walk != NULL && frame != NULL)
        known = PyObject_CallFunctionObjArgs(walk, (PyObject *)frame, most, NULL);
    Py_XDECREF(most);
    PyObject *frames, *found;
    int enough;
    if (known == NULL || !PyArg_ParseTuple(known, "O!pO!", &PyTuple_Type, &frames, &enough,
                                           &PyTuple_Type, &found)) {
        Py_XDECREF(known);
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_RuntimeError, "not bound");
        return NULL;
    }
    chain_forget(self);
    Py_ssize_t count = PyTuple_GET_SIZE(frames);
    if (count <= MAX_FRAMES) {
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *place = PyTuple_GET_ITEM(frames, i);
            self->places[i].code = Py_NewRef(PyTuple_GET_ITEM(place, 0));
            self->places[i].at = (int)PyLong_AsLong(PyTuple_GET_ITEM(place, 1));
        }
        self->count = (int)count;
        self->enough = enough;
        self->found = Py_NewRef(found);
    }
    Py_INCREF(found);
    Py_DECREF(known);
    return found;
}

/* Return a new reference to the lines that led here, or NULL with an exception. */
static PyObject *chain_sites(Chain *self)
{
    if (self->found == NULL)
        return chain_walk(self);
    Frame frame = frame_first();
    int i = 0;
    while (i < self->count && frame != NULL && frame_code(frame) == self->places[i].code &&
           frame_at(frame) == self->places[i].at) {
        i++;
        /* The caller of the last one does not matter. */
        if (i == self->count && self->enough)
            break;
        frame = frame_back(frame);
    }
    int known = i == self->count && (self->enough || frame == NULL);
    frame_done(frame);
    return known ? Py_NewRef(self->found) : chain_walk(self);
}

static PyObject *Chain_sites(Chain *self, PyObject *unused)
{
    return chain_sites(self);
}

static PyObject *Chain_forget(Chain *self, PyObject *unused)
{
    chain_forget(self);
    Py_RETURN_NONE;
}

static PyMethodDef Chain_methods[] = {
    {"sites", (PyCFunction)Chain_sites, METH_NOARGS, NULL},
    {"forget", (PyCFunction)Chain_forget, METH_NOARGS, NULL},
    {NULL},
};

static PyTypeObject ChainType = {
    TYPE(Chain),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Chain_init,
    .tp_methods = Chain_methods,
};

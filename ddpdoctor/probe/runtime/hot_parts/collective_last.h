/* The last call of a collective. Equal calls are recorded from its stored form. */

/* The positions of the arguments that all ranks share. */
enum { TENSOR, OP, ROOT, GROUP_ROOT, GROUP, ASYNC_OP, ARGUMENTS };

typedef struct {
    PyObject_HEAD
    PyObject *name, *original;
    PyObject *in_python;     /* an Around of the same function, for calls that differ from the last */
    PyObject *parameters[ARGUMENTS];
    int places[ARGUMENTS];
    char first, point_to_point, reduces, gathers;
    char shown[COLLECTIVE_SIZE];
    Chain *lines;
    /* The last call, and the stored form of all equal ones. */
    PyObject *chain, *given[ARGUMENTS], *dtype, *shape, *known;
    Calls *of;
    long long numel;
    char rest[RING_ENTRY - RING_REST];
} Collective;

static PyTypeObject CollectiveType;

static int Collective_traverse(Collective *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->in_python);
    Py_VISIT(self->chain);
    for (int i = 0; i < ARGUMENTS; i++)
        Py_VISIT(self->given[i]);
    Py_VISIT(self->known);
    Py_VISIT(self->of);
    return 0;
}

static void collective_forget(Collective *self)
{
    Py_CLEAR(self->chain);
    for (int i = 0; i < ARGUMENTS; i++)
        Py_CLEAR(self->given[i]);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->known);
    Calls *of = self->of;
    self->of = NULL;
    Py_XDECREF(of);
}

static int Collective_clear(Collective *self)
{
    collective_forget(self);
    Py_CLEAR(self->name);
    Py_CLEAR(self->original);
    Py_CLEAR(self->in_python);
    for (int i = 0; i < ARGUMENTS; i++)
        Py_CLEAR(self->parameters[i]);
    Chain *lines = self->lines;
    self->lines = NULL;
    Py_XDECREF(lines);
    return 0;
}

static void Collective_dealloc(Collective *self)
{
    PyObject_GC_UnTrack(self);
    Collective_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Collective(name, original, in_python, parameters, places, first, point_to_point) */
static int Collective_init(Collective *self, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *original, *in_python, *parameters, *places;
    int first, point_to_point;
    if (!PyArg_ParseTuple(args, "UOOO!O!pp", &name, &original, &in_python, &PyTuple_Type,
                          &parameters, &PyTuple_Type, &places, &first, &point_to_point))
        return -1;
    if (self->name != NULL || PyTuple_GET_SIZE(parameters) != ARGUMENTS ||
        PyTuple_GET_SIZE(places) != ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "wrong number of parameters or places");
        return -1;
    }
    const char *text = PyUnicode_AsUTF8(name);
    if (text == NULL)
        return -1;
    strncpy(self->shown, text, COLLECTIVE_SIZE - 1);
    self->reduces = strstr(text, "reduce") != NULL;
    self->gathers = !self->reduces && strstr(text, "gather") != NULL;
    for (int i = 0; i < ARGUMENTS; i++) {
        self->places[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(places, i));
        self->parameters[i] = Py_NewRef(PyTuple_GET_ITEM(parameters, i));
    }
    self->name = Py_NewRef(name);
    self->original = Py_NewRef(original);
    self->in_python = Py_NewRef(in_python);
    self->first = (char)first;
    self->point_to_point = (char)point_to_point;
    self->lines = (Chain *)PyObject_CallNoArgs((PyObject *)&ChainType);
    return self->lines == NULL || PyErr_Occurred() ? -1 : 0;
}

/* The arguments of a call, borrowed; NULL for one that is left out. */
static void collective_bind(Collective *self, PyObject *args, PyObject *kwargs, PyObject **given)
{
    Py_ssize_t count = PyTuple_GET_SIZE(args);
    for (int i = 0; i < ARGUMENTS; i++) {
        given[i] = NULL;
        if (self->places[i] < 0)
            continue;
        if (self->places[i] < count)
            given[i] = PyTuple_GET_ITEM(args, self->places[i]);
        else if (kwargs != NULL && PyDict_GET_SIZE(kwargs))
            given[i] = PyDict_GetItemWithError(kwargs, self->parameters[i]);
    }
    if (given[TENSOR] != NULL && self->first)
        given[TENSOR] = PyList_Check(given[TENSOR]) && PyList_GET_SIZE(given[TENSOR])
                            ? PyList_GET_ITEM(given[TENSOR], 0)
                            : NULL;
}

/* Return the group of a call that equals the last one here, or NULL for another call, with an exception
 * if that is the job's own. It is a new reference, since code that runs from now on may drop it. */
static PyObject *collective_alike(Collective *self, Calls *calls, PyObject *chain,
                                  PyObject **given)
{
    if (self->known == NULL || self->of != calls || self->chain != chain)
        return NULL;
    for (int i = TENSOR + 1; i < ARGUMENTS; i++)
        if (self->given[i] != given[i])
            return NULL;
    if (self->places[TENSOR] < 0)
        return Py_NewRef(self->known);
    if (given[TENSOR] == NULL)
        return NULL;
    PyObject *known = Py_NewRef(self->known), *last = Py_NewRef(self->shape);
    PyObject *dtype = PyObject_GetAttr(given[TENSOR], s_dtype);
    PyObject *shape = dtype == self->dtype ? PyObject_GetAttr(given[TENSOR], s_shape) : NULL;
    int alike = shape != NULL && PyTuple_Check(shape) &&
                PyObject_RichCompareBool(shape, last, Py_EQ) == 1 && known == self->known;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    Py_DECREF(last);
    if (PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear();
    if (!alike)
        Py_CLEAR(known);
    return known;
}

/* Keep the ledger's stored form of a call that Python has just recorded. Return -1 for an exception
 * of the job's own. */
static int collective_learn(Collective *self, Calls *calls, PyObject *chain, PyObject **given)
{
    collective_forget(self);
    if (self->places[TENSOR] >= 0 && given[TENSOR] == NULL)
        return 0;
    PyObject *or_none[ARGUMENTS];
    for (int i = 0; i < ARGUMENTS; i++)
        or_none[i] = given[i] != NULL ? given[i] : Py_None;
    PyObject *found = PyObject_CallMethodObjArgs(
        (PyObject *)calls, s_like, self->name, or_none[TENSOR], or_none[OP], or_none[ROOT],
        or_none[GROUP_ROOT], or_none[GROUP], or_none[ASYNC_OP], NULL);
    PyObject *known, *dtype, *shape;
    const char *rest;
    Py_ssize_t size;
    long long numel;
    if (found != NULL && found != Py_None &&
        PyArg_ParseTuple(found, "Oy#OOL", &known, &rest, &size, &dtype, &shape, &numel) &&
        size == sizeof self->rest) {
        memcpy(self->rest, rest, sizeof self->rest);
        self->numel = numel;
        self->chain = Py_NewRef(chain);
        for (int i = TENSOR + 1; i < ARGUMENTS; i++)
            self->given[i] = Py_XNewRef(given[i]);
        self->dtype = Py_NewRef(dtype);
        self->shape = Py_NewRef(shape);
        self->known = Py_NewRef(known);
        self->of = (Calls *)Py_NewRef(calls);
    }
    Py_XDECREF(found);
    return note_fault(h_ring);
}

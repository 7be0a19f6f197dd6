/* Counts of a rank's collectives, as Calls of phases.py, and its ring of collectives. */

/* The base of probe/observers/collective_calls.py's Ledger. */
typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    char *bytes;
    long long count, wide, carried, carried_in, enough;
    char elsewhere;
} Calls;

static PyTypeObject CallsType;

/* As in run/ring.py. */
enum { RING_ENTRIES = 64, RING_ENTRY = 72, RING_COUNT_AT = 32, RING_ENTRIES_AT = 64 };
enum { RING_SIZE = 32 << 10, RING_ENDED = 16, RING_REST = 40, NARROW = 64 };

static int Calls_init(Calls *self, PyObject *args, PyObject *kwargs)
{
    PyObject *memory;
    if (!PyArg_ParseTuple(args, "O", &memory))
        return -1;
    if (self->bytes != NULL || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0)
        return -1;
    if (self->memory.len < RING_SIZE) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "the memory is too small for a ring");
        return -1;
    }
    self->bytes = self->memory.buf;
    return 0;
}

static void Calls_dealloc(Calls *self)
{
    if (self->bytes != NULL)
        PyBuffer_Release(&self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

#define CALLS(name) {#name, T_LONGLONG, offsetof(Calls, name), 0, NULL}
static PyMemberDef Calls_members[] = {
    CALLS(count), CALLS(wide), CALLS(carried), CALLS(carried_in), CALLS(enough),
    {"elsewhere", T_BOOL, offsetof(Calls, elsewhere), 0, NULL},
    {NULL},
};

static PyTypeObject CallsType = {
    TYPE(Calls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Calls_init,
    .tp_members = Calls_members,
};

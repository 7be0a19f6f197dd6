/* The Python type, with the attributes of Phases in phases.py. */

static PyObject *Phases_is_here(Phases *self, PyObject *unused)
{
    return PyBool_FromLong(PyThread_get_thread_ident() == self->thread);
}

static PyObject *Phases_here(Phases *self, PyObject *unused)
{
    if (PyThread_get_thread_ident() == self->thread)
        Py_RETURN_FALSE;
    self->thread = PyThread_get_thread_ident();
    self->depth = 0;
    self->phase = OTHER;
    Py_RETURN_TRUE;
}

static PyObject *Phases_enter(Phases *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "enter(phase, site)");
        return NULL;
    }
    long phase = PyLong_AsLong(args[0]);
    if (phase == -1 && PyErr_Occurred())
        return NULL;
    int begun = do_enter(self, (int)(phase & 7), args[1]);
    return begun < 0 ? NULL : PyBool_FromLong(begun);
}

static PyObject *Phases_leave(Phases *self, PyObject *const *args, Py_ssize_t count)
{
    if (do_leave(self, count ? args[0] : NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Phases_charge(Phases *self, PyObject *unused)
{
    return PyLong_FromLongLong(charge_host(self));
}

static PyObject *Phases_reset(Phases *self, PyObject *unused)
{
    do_reset(self);
    Py_RETURN_NONE;
}

static PyObject *Phases_page_phase(Phases *self, PyObject *phase)
{
    long number = PyLong_AsLong(phase);
    if (number == -1 && PyErr_Occurred())
        return NULL;
    self->phase = number & 7;
    show(self, now_ns());
    Py_RETURN_NONE;
}

static PyObject *Phases_site_met(Phases *self, PyObject *const *args, Py_ssize_t count)
{
    long phase = count == 2 ? PyLong_AsLong(args[0]) : 0;
    PyObject *before = count == 2 ? PyObject_GetAttr(args[1], s_recorded) : NULL;
    if (before == NULL) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "site_met(phase, site)");
        return NULL;
    }
    PyObject *now = PyLong_FromLong(PyLong_AsLong(before) | 1L << (phase & 7));
    int failed = now == NULL || PyObject_SetAttr(args[1], s_recorded, now) < 0;
    Py_XDECREF(now);
    Py_DECREF(before);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Phases_forward_begins(Phases *self, PyObject *armed)
{
    int truth = PyObject_IsTrue(armed);
    if (truth < 0)
        return NULL;
    do_forward_begins(self, truth);
    Py_RETURN_NONE;
}

static PyObject *Phases_backward_begins(Phases *self, PyObject *site)
{
    do_backward_begins(self, site);
    Py_RETURN_NONE;
}

static PyObject *Phases_backward_ended(Phases *self, PyObject *unused)
{
    do_backward_ended(self);
    Py_RETURN_NONE;
}

static PyObject *Phases_goes_on(Phases *self, PyObject *iterator)
{
    long long id = PyLong_AsLongLong(iterator);
    if (id == -1 && PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(do_goes_on(self, id));
}

static PyObject *Phases_backwards(Phases *self, void *unused)
{
    long long count = self->backward_count < BACKWARDS ? self->backward_count : BACKWARDS;
    PyObject *list = PyList_New(0);
    for (long long i = self->backward_count - count; list && i < self->backward_count; i++) {
        Backward *one = &self->backwards[i % BACKWARDS];
        PyObject *made = Py_BuildValue("(LLO)", (long long)one->began, (long long)one->ended,
                                       one->site ? one->site : Py_None);
        if (made == NULL || PyList_Append(list, made) < 0)
            Py_CLEAR(list);
        Py_XDECREF(made);
    }
    return list;
}

static PyObject *Phases_now(Phases *self, void *unused)
{
    return PyLong_FromLongLong(self->mark);
}

static PyObject *Phases_last_change(Phases *self, void *unused)
{
    return PyLong_FromLongLong(self->mark + self->unix_ns);
}

static PyObject *Phases_unix(Phases *self, void *unused)
{
    return PyLong_FromLongLong(self->unix_ns);
}

static PyObject *Phases_keep(Phases *self, PyObject *unused)
{
    memcpy(self->kept, self->times, sizeof self->kept);
    Py_RETURN_NONE;
}

static PyObject *Phases_take(Phases *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"kept", NULL};
    int kept = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p", names, &kept))
        return NULL;
    int64_t *times = kept ? self->kept : self->times;
    PyObject *list = PyList_New(PHASES);
    for (int i = 0; list != NULL && i < PHASES; i++) {
        PyObject *each = PyLong_FromLongLong(times[i]);
        if (each == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, i, each);
    }
    memset(self->times, 0, sizeof self->times);
    memset(self->kept, 0, sizeof self->kept);
    return list;
}

static PyObject *Phases_start(Phases *self, PyObject *unused)
{
    self->mark = now_ns();
    memset(self->times, 0, sizeof self->times);
    return PyLong_FromLongLong(self->mark);
}

static PyObject *Phases_watch(Phases *self, PyObject *args)
{
    PyObject *memory;
    Py_ssize_t at;
    Py_buffer view;
    if (!PyArg_ParseTuple(args, "On", &memory, &at) ||
        PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (at < 0 || at + 8 > view.len || at % 8) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "no eight bytes there");
        return NULL;
    }
    if (self->word != NULL)
        PyBuffer_Release(&self->watched);
    self->watched = view;
    self->word = (const int64_t *)((char *)view.buf + at);
    self->seen = *(const volatile int64_t *)self->word;
    Py_RETURN_NONE;
}

static int is_noticed(Phases *self)
{
    if (self->word == NULL)
        return 0;
    int64_t word = *(const volatile int64_t *)self->word;
    if (word == self->seen)
        return 0;
    self->seen = word;
    return 1;
}

static PyObject *Phases_noticed(Phases *self, PyObject *unused)
{
    return PyBool_FromLong(is_noticed(self));
}

static PyObject *Phases_thread(Phases *self, void *unused)
{
    return PyLong_FromUnsignedLong(self->thread);
}

static PyMethodDef Phases_methods[] = {
    {"is_here", (PyCFunction)Phases_is_here, METH_NOARGS, NULL},
    {"here", (PyCFunction)Phases_here, METH_NOARGS, NULL},
    {"enter", (PyCFunction)(void (*)(void))Phases_enter, METH_FASTCALL, NULL},
    {"leave", (PyCFunction)(void (*)(void))Phases_leave, METH_FASTCALL, NULL},
    {"charge", (PyCFunction)Phases_charge, METH_NOARGS, NULL},
    {"reset", (PyCFunction)Phases_reset, METH_NOARGS, NULL},
    {"page_phase", (PyCFunction)Phases_page_phase, METH_O, NULL},
    {"site_met", (PyCFunction)(void (*)(void))Phases_site_met, METH_FASTCALL, NULL},
    {"forward_begins", (PyCFunction)Phases_forward_begins, METH_O, NULL},
    {"backward_begins", (PyCFunction)Phases_backward_begins, METH_O, NULL},
    {"backward_ended", (PyCFunction)Phases_backward_ended, METH_NOARGS, NULL},
    {"goes_on", (PyCFunction)Phases_goes_on, METH_O, NULL},
    {"keep", (PyCFunction)Phases_keep, METH_NOARGS, NULL},
    {"take", (PyCFunction)(void (*)(void))Phases_take, METH_VARARGS | METH_KEYWORDS, NULL},
    {"start", (PyCFunction)Phases_start, METH_NOARGS, NULL},
    {"watch", (PyCFunction)Phases_watch, METH_VARARGS, NULL},
    {"noticed", (PyCFunction)Phases_noticed, METH_NOARGS, NULL},
    {NULL},
};

#define NUMBER(name) {#name, T_LONGLONG, offsetof(Phases, name), 0, NULL}
#define OBJECT(name) {#name, T_OBJECT, offsetof(Phases, name), 0, NULL}
static PyMemberDef Phases_members[] = {
    NUMBER(phase), NUMBER(steps), NUMBER(last_total), NUMBER(epoch), NUMBER(armed),
    NUMBER(forwards), NUMBER(backward_count), NUMBER(reduced), NUMBER(begun), NUMBER(step_armed),
    NUMBER(step_backwards), NUMBER(light), NUMBER(line), NUMBER(sparse), NUMBER(spent),
    NUMBER(began), NUMBER(closer), NUMBER(optimizer_steps),
    NUMBER(collectives), NUMBER(reductions), NUMBER(gathers),
    NUMBER(looped), NUMBER(loop_batches), NUMBER(loop_forwards), NUMBER(loop_backwards),
    OBJECT(page), OBJECT(device), OBJECT(collective), OBJECT(failed), OBJECT(optimizer_code),
    OBJECT(passes), OBJECT(iterators), OBJECT(trained), OBJECT(calls),
    {"clocked", T_BOOL, offsetof(Phases, clocked), 0, NULL},
    {"aside", T_BOOL, offsetof(Phases, aside), 0, NULL},
    {NULL},
};

static PyGetSetDef Phases_getset[] = {
    {"backwards", (getter)Phases_backwards, NULL, NULL, NULL},
    {"now", (getter)Phases_now, NULL, NULL, NULL},
    {"last_change", (getter)Phases_last_change, NULL, NULL, NULL},
    {"unix", (getter)Phases_unix, NULL, NULL, NULL},
    {"thread", (getter)Phases_thread, NULL, NULL, NULL},
    {NULL},
};

static PyTypeObject PhasesType = {
    TYPE(Phases),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Phases_init,
    COLLECTED(Phases),
    .tp_methods = Phases_methods,
    .tp_members = Phases_members,
    .tp_getset = Phases_getset,
};

/* The rank's tracker, borrowed; NULL if this process is not a rank. */
static Phases *active_rank(void)
{
    PyObject *found = active();
    return found != NULL && PyObject_TypeCheck(found, &PhasesType) ? (Phases *)found : NULL;
}

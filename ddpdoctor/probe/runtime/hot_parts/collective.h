/* A call of a collective, as probe/hooks/collectives.py follows it. */

static int add_to(PyObject *object, PyObject *name, long long *sum)
{
    PyObject *before = PyObject_GetAttr(object, name);
    if (before == NULL)
        return -1;
    *sum = PyLong_AsLongLong(before) + 1;
    Py_DECREF(before);
    PyObject *now = PyLong_FromLongLong(*sum);
    int failed = now == NULL || PyObject_SetAttr(object, name, now) < 0;
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

static char *ring_place(Calls *calls, long long order)
{
    return calls->bytes + RING_ENTRIES_AT + order % RING_ENTRIES * RING_ENTRY;
}

/* Record a call that equals the last one, as Ledger.begin does. Return its order, or -1 for a fault. */
static long long collective_write(Collective *self, PyObject *known, Phases *rank, Calls *calls)
{
    long long sequence = 0;
    if (!self->point_to_point) {
        if (add_to(known, s_calls, &sequence) < 0)
            return -1;
        if (self->numel > 0 && calls->enough) {
            if (calls->carried_in != rank->steps) {
                calls->carried = 0;
                calls->carried_in = rank->steps;
            }
            calls->carried += self->numel;
            if (calls->carried >= calls->enough) {
                PyObject *done = PyObject_CallMethodNoArgs((PyObject *)calls, s_carry);
                Py_XDECREF(done);
                if (done == NULL)
                    return -1;
            }
        }
    }
    calls->wide += self->numel > NARROW;
    int64_t order = ++calls->count;
    char *place = ring_place(calls, order);
    int64_t numbers[5] = {order, read_clock(CLOCK_REALTIME), 0, sequence, self->numel};
    memcpy(place, numbers, sizeof numbers);
    memcpy(place + RING_REST, self->rest, sizeof self->rest);
    memcpy(calls->bytes + RING_COUNT_AT, &order, sizeof order);
    return order;
}

/* Keep the Work that an asynchronous call returned. Return -1 for an exception of the job's own. */
static int collective_returned(Calls *calls, long long order, PyObject *work)
{
    PyObject *number = PyLong_FromLongLong(order);
    PyObject *done =
        number ? PyObject_CallMethodObjArgs((PyObject *)calls, s_returned, number, work, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done != NULL ? 0 : note_fault(h_collectives);
}

static int leave_collective(Phases *rank, PyObject *error)
{
    int raised = do_leave(rank, error) < 0 && note_fault(h_collectives) < 0;
    Py_SETREF(rank->collective, Py_NewRef(s_empty));
    memset(rank->bytes + COLLECTIVE_AT, 0, COLLECTIVE_SIZE);
    return raised ? -1 : 0;
}

/* call(args, kwargs) */
static PyObject *Collective_call(Collective *self, PyObject *const *both, Py_ssize_t count)
{
    if (count != 2 || !PyTuple_Check(both[0]) || !PyDict_Check(both[1])) {
        PyErr_SetString(PyExc_TypeError, "call(args, kwargs)");
        return NULL;
    }
    PyObject *args = both[0], *kwargs = both[1], *given[ARGUMENTS];
    Phases *rank = active_rank();
    PyObject *compiling =
        compiler_names ? PyDict_GetItemWithError(compiler_names, s_compiling) : NULL;
    if (rank == NULL || compiling == Py_True || is_off(h_collectives))
        return PyObject_Call(self->original, args, kwargs);
    if (rank->phase == WAIT || is_off(h_ring) || !PyObject_TypeCheck(rank->calls, &CallsType) ||
        PyThread_get_thread_ident() != rank->thread)
        return PyObject_Call(self->in_python, args, kwargs);
    Py_INCREF(rank);
    Calls *calls = (Calls *)Py_NewRef(rank->calls);
    PyObject *result = NULL, *known = NULL;
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *chain = chain_sites(self->lines);
    collective_bind(self, args, kwargs, given);
    /* It may be in a list, which others can change. */
    PyObject *tensor = Py_XNewRef(given[TENSOR]);
    if (chain == NULL && note_fault(h_collectives) < 0)
        goto end;
    if (chain != NULL && !calls->elsewhere)
        known = collective_alike(self, calls, chain, given);
    if (known == NULL && PyErr_Occurred())
        goto end;
    if (known == NULL) {
        result = PyObject_Call(self->in_python, args, kwargs);
        /* A stack that is too deep is not remembered, so no call equals the last one. */
        if (chain != NULL && chain == self->lines->found && !calls->elsewhere && result != NULL &&
            collective_learn(self, calls, chain, given) < 0)
            Py_CLEAR(result);
        goto end;
    }
    long long order = -1;
    int begun = do_enter(rank, WAIT, PyTuple_GET_ITEM(chain, 0));
    if (begun == 1) {
        Py_SETREF(rank->collective, Py_NewRef(self->name));
        memcpy(rank->bytes + COLLECTIVE_AT, self->shown, COLLECTIVE_SIZE);
        rank->collectives++;
        rank->reductions += self->reduces;
        rank->gathers += self->gathers;
        order = collective_write(self, known, rank, calls);
    }
    int raised = (begun < 0 || (begun == 1 && order < 0)) && note_fault(h_collectives) < 0;
    clocked_since(rank, began);
    if (!raised)
        result = PyObject_Call(self->original, args, kwargs);
    if (begun == 1) {
        PyObject *error = take_exception();
        began = rank->clocked ? cpu_ns() : 0;
        if (order > 0 && result == Py_None) {
            int64_t now = read_clock(CLOCK_REALTIME);
            if (calls->count - order < RING_ENTRIES)
                memcpy(ring_place(calls, order) + RING_ENDED, &now, sizeof now);
        } else if (order > 0 && result != NULL && collective_returned(calls, order, result) < 0) {
            error = take_exception();
            Py_CLEAR(result);
        }
        if (leave_collective(rank, error) < 0) {
            Py_XDECREF(error);
            Py_CLEAR(result);
        } else
            set_exception(error);
        clocked_since(rank, began);
    }
end:
    Py_XDECREF(known);
    Py_XDECREF(tensor);
    Py_XDECREF(chain);
    Py_DECREF(calls);
    Py_DECREF(rank);
    return result;
}

static PyObject *Collective_forget(Collective *self, PyObject *unused)
{
    collective_forget(self);
    Py_RETURN_NONE;
}

static PyMethodDef Collective_methods[] = {
    {"call", (PyCFunction)(void (*)(void))Collective_call, METH_FASTCALL, NULL},
    {"forget", (PyCFunction)Collective_forget, METH_NOARGS, NULL},
    {NULL},
};

static PyTypeObject CollectiveType = {
    TYPE(Collective),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Collective_init,
    COLLECTED(Collective),
    .tp_methods = Collective_methods,
};

/* The hooks of light steps. */

static Chain *forward_lines, *backward_lines, *optimizer_lines, *data_lines;

/* Begin a phase at the user's line that led here. Return 1, 0 or -1 as do_enter. All frames up to that
 * line are compared every time, since a hang is often at a line that one rank takes once. */
static int enter_at(Phases *rank, int phase, Chain *lines, PyObject **site)
{
    PyObject *found = chain_sites(lines);
    if (found == NULL)
        return -1;
    int begun = do_enter(rank, phase, PyTuple_GET_ITEM(found, 0));
    if (site != NULL)
        *site = Py_NewRef(PyTuple_GET_ITEM(found, 0));
    Py_DECREF(found);
    return begun;
}

/* Whether the current step is light. */
static int is_light(Phases *rank)
{
    return rank != NULL && rank->light;
}

/* Results of the functions below: a fault; nothing was done, so Python has to; the phase has begun; all
 * is done without an end (a call of another thread). */
enum { FAULT = -1, FOR_PYTHON, BEGUN, NO_END };

static int begun_at(Phases *rank, int phase, Chain *lines, PyObject **site)
{
    switch (enter_at(rank, phase, lines, site)) {
    case 1:
        return BEGUN;
    case 0:
        return NO_END;
    default:
        return FAULT;
    }
}

/* Call the subscribers of an event. Return -1 for an exception of the job's own. */
static int call_subscribers(int event, PyObject *hook, PyObject *first, PyObject *second)
{
    PyObject *each = subscribers(event);
    if (each == NULL)
        return 0;
    Py_INCREF(each);
    int raised = 0;
    for (Py_ssize_t i = 0; !raised && i < PyTuple_GET_SIZE(each); i++) {
        PyObject *done = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(each, i), first, second, NULL);
        Py_XDECREF(done);
        raised = done == NULL && note_fault(hook) < 0;
    }
    Py_DECREF(each);
    return raised ? -1 : 0;
}

static void clocked_since(Phases *rank, int64_t began)
{
    if (began && rank->clocked)
        rank->spent += cpu_ns() - began;
}

/* A forward of a DDP module. */
static int light_forward(Phases *rank, PyObject *ddp)
{
    /* DDP's logger is read in the step after a full one. */
    if (!is_light(rank) || !rank->closer || !(rank->steps & rank->sparse) || is_off(h_forward))
        return FOR_PYTHON;
    PyObject *grad = PyObject_CallNoArgs(grad_enabled);
    if (grad == NULL)
        return FAULT;
    Py_DECREF(grad);
    if (grad != Py_True)
        return FOR_PYTHON;
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *syncs = attribute(ddp, s_sync);
    if (syncs == NULL)
        return FAULT;
    int armed = PyObject_IsTrue(syncs);
    Py_DECREF(syncs);
    if (armed < 0)
        return FAULT;
    do_forward_begins(rank, armed);
    int done = FAULT;
    if (call_subscribers(FORWARD_BEGINS, h_forward, ddp, armed ? Py_True : Py_False) == 0)
        done = begun_at(rank, FORWARD, forward_lines, NULL);
    clocked_since(rank, began);
    return done;
}

enum { BARE_DEPTH = 5 };

/* Whether the leaf at the end of a graph is a parameter. Its node has the tensor. */
static int of_parameter(PyObject *leaf)
{
    PyObject *variable = PyObject_GetAttr(leaf, s_variable);
    int found = variable != NULL && !strcmp(Py_TYPE(variable)->tp_name, "Parameter");
    Py_XDECREF(variable);
    return found;
}

/* Whether the first loss has no graph, or one so small that it may reach no parameter, as in
 * torch_private.is_bare. */
static int is_bare(PyObject *tensors)
{
    if (!PyTuple_Check(tensors) || !PyTuple_GET_SIZE(tensors))
        return 0;
    PyObject *node = PyObject_GetAttr(PyTuple_GET_ITEM(tensors, 0), s_grad_fn);
    int bare = node == Py_None;
    for (int depth = 0; node != NULL && !bare && depth < BARE_DEPTH; depth++) {
        PyObject *edges = PyObject_GetAttr(node, s_next_functions), *next = NULL;
        if (edges != NULL && PyTuple_Check(edges)) {
            PyObject *edge = PyTuple_GET_SIZE(edges) ? PyTuple_GET_ITEM(edges, 0) : NULL;
            if (edge != NULL && PyTuple_Check(edge) && PyTuple_GET_SIZE(edge))
                next = Py_NewRef(PyTuple_GET_ITEM(edge, 0));
            bare = edge == NULL ? !of_parameter(node) : next == Py_None;
        }
        Py_XDECREF(edges);
        Py_XSETREF(node, next);
    }
    Py_XDECREF(node);
    PyErr_Clear();
    return bare;
}

/* A call of autograd's engine. */
static int light_backward(Phases *rank, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (!is_light(rank) || rank->phase == BACKWARD)
        return FOR_PYTHON;
    Py_ssize_t i = 0, keywords = names != NULL ? PyTuple_GET_SIZE(names) : 0;
    while (i < keywords && PyUnicode_Compare(PyTuple_GET_ITEM(names, i), s_accumulate_grad))
        i++;
    if (i == keywords || args[count + i] != Py_True)
        return FOR_PYTHON;
    if (rank->reduces && count > 0 && is_bare(args[0]))
        return FOR_PYTHON;
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *site = NULL;
    int done = begun_at(rank, BACKWARD, backward_lines, &site);
    if (done == BEGUN) {
        do_backward_begins(rank, site);
        if (call_subscribers(BACKWARD_BEGINS, h_backward, NULL, NULL) < 0)
            done = FAULT;
    }
    Py_XDECREF(site);
    clocked_since(rank, began);
    return done;
}

static int light_backward_ended(Phases *rank, PyObject *error)
{
    int64_t began = rank->clocked ? cpu_ns() : 0;
    if (do_leave(rank, error) < 0)
        return FAULT;
    do_backward_ended(rank);
    if (error == NULL && call_subscribers(BACKWARD_ENDED, h_backward, NULL, NULL) < 0)
        return FAULT;
    clocked_since(rank, began);
    return BEGUN;
}

/* An integer attribute of an object, or `otherwise` if it has none. */
static long long number_of(PyObject *object, PyObject *name, long long otherwise)
{
    PyObject *found = PyObject_GenericGetAttr(object, name);
    if (found != NULL && PyLong_Check(found))
        otherwise = PyLong_AsLongLong(found);
    Py_XDECREF(found);
    PyErr_Clear();
    return otherwise;
}

/* A loader's iterator is asked for a batch that is not the first, as in _batch_wanted. */
static int light_batch(Phases *rank, PyObject *iterator)
{
    if (!is_light(rank) || number_of(iterator, s_num_yielded, 1) == 0)
        return FOR_PYTHON;
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *id = PyLong_FromVoidPtr(iterator);
    int known = id != NULL ? PySet_Contains(rank->trained, id) : -1, done = FAULT;
    if (known >= 0 && (rank->begun ? !rank->closer : known && rank->aside))
        done = FOR_PYTHON;
    else if (known >= 0)
        done = begun_at(rank, DATA, data_lines, NULL);
    if (done == BEGUN) {
        if (!rank->begun)
            rank->aside = !known;
        if (PySet_Add(rank->iterators, id) < 0)
            done = FAULT;
        rank->epoch = number_of(iterator, s_data_epoch, NO_EPOCH);
    }
    Py_XDECREF(id);
    clocked_since(rank, began);
    return done;
}

/* The iterator has returned the batch, as in _batch_came. */
static int light_batch_came(Phases *rank, PyObject *iterator, PyObject *data)
{
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *grad = NULL;
    int failed = do_leave(rank, NULL) < 0 || (grad = PyObject_CallNoArgs(grad_enabled)) == NULL ||
                 call_subscribers(BATCH_FETCHED, h_dataloader, iterator, data) < 0;
    Py_XDECREF(grad);
    if (!failed && grad == Py_False)
        failed = call_subscribers(BATCH_EVALUATED, h_dataloader, iterator, NULL) < 0;
    else if (!failed && !do_goes_on(rank, (long long)(intptr_t)iterator))
        failed = call_subscribers(LOOP_TURNS, h_dataloader, iterator, NULL) < 0;
    clocked_since(rank, began);
    return failed ? FAULT : BEGUN;
}

/* Whether the pass of a loader's iterator is not followed: its observer has left (pass, None). */
static int is_unfollowed(PyObject *iterator)
{
    PyObject *known = PyObject_GenericGetAttr(iterator, s_pass), *pass = NULL;
    if (known != NULL && PyTuple_Check(known) && PyTuple_GET_SIZE(known) == 2 &&
        PyTuple_GET_ITEM(known, 1) == Py_None)
        pass = PyObject_GenericGetAttr(iterator, s_sampler_iter);
    int unfollowed = pass != NULL && pass == PyTuple_GET_ITEM(known, 0);
    Py_XDECREF(pass);
    Py_XDECREF(known);
    PyErr_Clear();
    return unfollowed;
}

/* The end of a step that ends no line of the journal, as in StepTracker.close. */
static int light_close(Phases *rank)
{
    int64_t now = charge_host(rank);
    rank->last_total = now - rank->began;
    rank->began = now;
    rank->optimizer_steps++;
    rank->steps++;
    rank->begun = 0;
    PyObject *passed = PyLong_FromLongLong(rank->step_backwards);
    int failed = passed == NULL || PyList_Append(rank->passes, passed) < 0;
    Py_XDECREF(passed);
    if (failed)
        return -1;
    if (PySet_GET_SIZE(rank->iterators)) {
        PyObject *before = rank->trained;
        rank->trained = rank->iterators;
        rank->iterators = before;
        PySet_Clear(before);
    }
    rank->aside = 0;
    memcpy(rank->kept, rank->times, sizeof rank->kept);
    store(rank, TOTALS_AT, rank->steps);
    store(rank, TOTALS_AT + 8, rank->epoch);
    store(rank, TOTALS_AT + 16, rank->last_total);
    rank->light = (rank->steps + 1) & rank->sparse;
    /* If the next step is full, the time before it has no known phase. */
    if (charge_device(rank, STARTING) < 0)
        return -1;
    if (is_noticed(rank)) {
        PyObject *done = PyObject_CallMethodNoArgs((PyObject *)rank, s_noticing);
        Py_XDECREF(done);
        if (done == NULL)
            return -1;
    }
    if (rank->steps >= due()) {
        PyObject *ring = PyDict_GetItemWithError(event_names, s_ring);
        PyObject *number = PyLong_FromLongLong(rank->steps);
        PyObject *done = ring && number ? PyObject_CallOneArg(ring, number) : NULL;
        Py_XDECREF(number);
        Py_XDECREF(done);
        if (done == NULL)
            return -1;
    }
    return 0;
}

static int initializing;

/* initializes(more): count running calls of torch that step an optimizer without training. */
static PyObject *initializes(PyObject *module, PyObject *more)
{
    initializing += (int)PyLong_AsLong(more);
    Py_RETURN_NONE;
}

/* step_begins(optimizer): whether it was light, and all is done. */
static PyObject *step_begins(PyObject *module, PyObject *optimizer)
{
    Phases *rank = active_rank();
    if (!is_light(rank) || is_off(h_optimizer) || initializing || rank->optimizer_code == Py_None)
        return PyBool_FromLong(rank == NULL);
    Py_INCREF(rank);
    int64_t began = rank->clocked ? cpu_ns() : 0;
    int failed = begun_at(rank, OPTIMIZER, optimizer_lines, NULL) == FAULT ||
                 call_subscribers(STEP_BEGINS, h_optimizer, optimizer, NULL) < 0;
    int raised = failed && note_fault(h_optimizer) < 0;
    clocked_since(rank, began);
    Py_DECREF(rank);
    return raised ? NULL : Py_NewRef(Py_True);
}

/* step_ended(optimizer): the same for its end. */
static PyObject *step_ended(PyObject *module, PyObject *optimizer)
{
    Phases *rank = active_rank();
    if (rank == NULL)
        Py_RETURN_TRUE;
    if (!is_light(rank) || rank->phase != OPTIMIZER || rank->closer != (long long)(intptr_t)optimizer)
        Py_RETURN_FALSE;
    int nested = rank->depth > 0 && rank->depth <= MAX_NESTED &&
                 rank->stack[rank->depth - 1] == OPTIMIZER;
    /* There is more to do at the end of a line of the journal. */
    if (nested || !((rank->steps + 1) & rank->line))
        Py_RETURN_FALSE;
    Py_INCREF(rank);
    int64_t began = rank->clocked ? cpu_ns() : 0;
    int was_clocked = rank->clocked;
    long long number = rank->steps;
    int failed = do_leave(rank, NULL) < 0 || light_close(rank) < 0;
    if (!failed && subscribers(STEP_ENDED) != NULL) {
        PyObject *closed = PyLong_FromLongLong(number);
        failed = closed == NULL || call_subscribers(STEP_ENDED, h_optimizer, optimizer, closed) < 0;
        Py_XDECREF(closed);
    }
    if (was_clocked && began && !failed) {
        rank->spent += cpu_ns() - began;
        PyObject *detail = PyObject_GetAttr((PyObject *)rank, s_detail);
        PyObject *done = detail ? PyObject_CallMethodOneArg(detail, s_clock, Py_True) : NULL;
        failed = done == NULL;
        Py_XDECREF(done);
        Py_XDECREF(detail);
    }
    int raised = failed && note_fault(h_optimizer) < 0;
    Py_DECREF(rank);
    return raised ? NULL : Py_NewRef(Py_True);
}

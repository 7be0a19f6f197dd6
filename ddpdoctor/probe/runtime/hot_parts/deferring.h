/* Defer Ctrl-C in a hook that C++ calls until the work of C++ is done.
 *
 * Without the hook no Python code runs there, so Python raises KeyboardInterrupt later, in the job's own
 * code. A callback of the garbage collector would even swallow it. */

static int is_pythons_own_handler(void)
{
    PyObject *signals = PyImport_ImportModule("_signal");
    PyObject *given = signals ? PyObject_CallMethod(signals, "getsignal", "i", SIGINT) : NULL;
    PyObject *own = signals ? PyObject_GetAttrString(signals, "default_int_handler") : NULL;
    int same = given != NULL && given == own;
    Py_XDECREF(signals);
    Py_XDECREF(given);
    Py_XDECREF(own);
    PyErr_Clear();
    return same;
}

static PyObject *deferring_call(PyObject *hook, PyObject *args)
{
    PyObject *result = PyObject_Call(hook, args, NULL);
    if (result != NULL || !PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return result;
    PyObject *error = take_exception();
    /* A handler of the job may count signals. */
    if (!is_pythons_own_handler()) {
        set_exception(error);
        return NULL;
    }
    Py_XDECREF(error);
    PyErr_SetInterrupt();
    Py_RETURN_NONE;
}

static PyMethodDef deferring_definition = {"deferring_call", deferring_call, METH_VARARGS, NULL};

/* deferring(hook) */
static PyObject *deferring(PyObject *module, PyObject *hook)
{
    return PyCFunction_New(&deferring_definition, hook);
}

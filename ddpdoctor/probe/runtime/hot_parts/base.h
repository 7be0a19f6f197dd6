/* Shared by all parts: the layout of the status page, names, clocks, faults, subscribers. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "written for Pythons with a GIL"
#endif
#ifndef __linux__
#error "the clock is Linux's"
#endif

/* As in run/status.py. */
enum { STARTING, OTHER, DATA, FORWARD, BACKWARD, OPTIMIZER, WAIT, ENDED, PHASES };
enum { LIVE_AT = 128, TOTALS_AT = 160, REDUCED_AT = 192, COLLECTIVE_AT = 256, SITE_AT = 320 };
enum { COLLECTIVE_SIZE = 64, SITE_SIZE = 688, PAGE_SIZE = 1024 };
enum { MAX_NESTED = 250, BACKWARDS = 64, MAX_FRAMES = 48 };

#define NO_EPOCH (-1)

/* Increase it with each change that hot.py depends on. */
#define CONTRACT 5

/* Declarations of all types, and those of types that the garbage collector follows. */
#define TYPE(type)                                                                                  \
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "ddpdoctor.probe.runtime._hot." #type,                 \
    .tp_basicsize = sizeof(type), .tp_dealloc = (destructor)type##_dealloc
#define COLLECTED(type)                                                                             \
    .tp_traverse = (traverseproc)type##_traverse, .tp_clear = (inquiry)type##_clear

/* Applied to the list of a type's references. */
#define VISIT(reference) Py_VISIT(self->reference);
#define CLEAR(reference) Py_CLEAR(self->reference);

/* Names of other modules of the probe; see bind(). */
static PyObject *rank_names, *event_names, *off_hooks, *fault_of, *grad_enabled, *walk, *memos;
static PyObject *compiler_names;
/* Names of attributes. */
static PyObject *s_active, *s_page, *s_recorded, *s_site_met, *s_charge, *s_memory, *s_due, *s_ring;
static PyObject *s_noticing, *s_detail, *s_clock, *s_accumulate_grad, *s_sync, *s_enter;
static PyObject *s_exit, *s_evaluated, *s_forward_begins, *s_backward_begins, *s_backward_ended;
static PyObject *s_calls, *s_dtype, *s_shape, *s_like, *s_returned;
static PyObject *s_carry, *s_compiling, *s_qualname, *s_grad_fn, *s_next_functions;
static PyObject *s_variable, *s_num_yielded, *s_sampler_iter, *s_pass, *s_data_epoch;
static PyObject *s_batch_fetched, *s_batch_evaluated, *s_loop_turns, *h_dataloader;
static PyObject *s_step_begins, *s_step_ended, *s_empty, *h_forward, *h_backward, *h_optimizer;
static PyObject *h_collectives, *h_ring;

static PyObject *clock_of_tests;

static int64_t read_clock(clockid_t which)
{
    struct timespec now;
    clock_gettime(which, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* time.perf_counter_ns() */
static int64_t now_ns(void)
{
    if (clock_of_tests != NULL) {
        PyObject *now = PyObject_CallNoArgs(clock_of_tests);
        int64_t value = now != NULL ? PyLong_AsLongLong(now) : 0;
        Py_XDECREF(now);
        return value;
    }
    return read_clock(CLOCK_MONOTONIC);
}

/* time.thread_time_ns(), as budget.clock */
static int64_t cpu_ns(void)
{
    return read_clock(CLOCK_THREAD_CPUTIME_ID);
}

/* Take the current exception, or NULL (3.12: PyErr_GetRaisedException). */
static PyObject *take_exception(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (type == NULL)
        return NULL;
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL && error != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

/* Set an exception that was taken, with its reference. Do nothing for NULL. */
static void set_exception(PyObject *error)
{
    if (error != NULL)
        PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error,
                      PyException_GetTraceback(error));
}

/* Look up an attribute as for any object. Call a module's own __getattr__ only if it is missing. */
static PyObject *attribute(PyObject *object, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(object, name);
    if (found != NULL || !PyErr_ExceptionMatches(PyExc_AttributeError))
        return found;
    PyErr_Clear();
    return PyObject_GetAttr(object, name);
}

/* Note the current exception as a fault of a hook. Return -1 and keep it if it is the job's own: not an
 * Exception (KeyboardInterrupt, SystemExit), or raised by a signal handler (see shield.fault). */
static int note_fault(PyObject *hook)
{
    if (!PyErr_Occurred())
        return 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyObject *error = take_exception(), *done = NULL;
    if (fault_of != NULL)
        done = PyObject_CallFunctionObjArgs(fault_of, hook, error, NULL);
    Py_XDECREF(done);
    Py_XDECREF(error);
    return PyErr_Occurred() ? -1 : 0;
}

static int is_off(PyObject *hook)
{
    return off_hooks != NULL && PySet_GET_SIZE(off_hooks) && PySet_Contains(off_hooks, hook) != 0;
}

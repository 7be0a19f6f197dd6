/* The part of the probe that runs in every step: phases, call sites, wrappers of torch's functions.
 *
 * Each type here has a Python type of the same name (phases.py, sites.py, wrapping.py), with the same
 * attributes, which passes the same tests and is used if this file is not compiled. In light steps
 * (see probe/observers/overhead.py) the functions of hot_parts/light.h replace the Python hooks, and
 * call them only if there is more to do.
 *
 * Nothing here raises into the job, blocks, or calls torch. The GIL is held throughout.
 */

#include "hot_parts/base.h"
#include "hot_parts/events.h"
#include "hot_parts/frames.h"
#include "hot_parts/phases.h"
#include "hot_parts/phases_type.h"
#include "hot_parts/chain.h"
#include "hot_parts/light.h"
#include "hot_parts/around.h"
#include "hot_parts/forward.h"
#include "hot_parts/calls.h"
#include "hot_parts/collective_last.h"
#include "hot_parts/collective.h"
#include "hot_parts/deferring.h"
#include "hot_parts/shielded.h"

static PyObject *bind(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"rank", "events", "off", "fault", "walk", "memos", NULL};
    PyObject *rank, *events, *off, *fault, *walks, *chains;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!OOO!", names, &PyDict_Type, &rank,
                                     &PyDict_Type, &events, &PySet_Type, &off, &fault, &walks,
                                     &PyList_Type, &chains))
        return NULL;
    Py_XSETREF(rank_names, Py_NewRef(rank));
    Py_XSETREF(event_names, Py_NewRef(events));
    Py_XSETREF(off_hooks, Py_NewRef(off));
    Py_XSETREF(fault_of, Py_NewRef(fault));
    Py_XSETREF(walk, Py_NewRef(walks));
    Py_XSETREF(memos, Py_NewRef(chains));
    Chain **lines[] = {&forward_lines, &backward_lines, &optimizer_lines, &data_lines};
    for (int i = 0; i < 4; i++) {
        PyObject *made = PyObject_CallFunction((PyObject *)&ChainType, "i", 1);
        if (made == NULL)
            return NULL;
        Py_XSETREF(*lines[i], (Chain *)made);
    }
    Py_RETURN_NONE;
}

static PyObject *use_torch(PyObject *module, PyObject *args)
{
    PyObject *enabled, *compiler;
    if (!PyArg_ParseTuple(args, "OO!", &enabled, &PyDict_Type, &compiler))
        return NULL;
    Py_XSETREF(grad_enabled, Py_NewRef(enabled));
    Py_XSETREF(compiler_names, Py_NewRef(compiler));
    Py_RETURN_NONE;
}

static PyObject *set_clock(PyObject *module, PyObject *clock)
{
    if (clock == Py_None)
        Py_CLEAR(clock_of_tests);
    else
        Py_XSETREF(clock_of_tests, Py_NewRef(clock));
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"bind", (PyCFunction)(void (*)(void))bind, METH_VARARGS | METH_KEYWORDS,
     "Set the names of other modules of the probe."},
    {"use_torch", use_torch, METH_VARARGS, "Set torch.is_grad_enabled and torch.compiler's names."},
    {"set_clock", set_clock, METH_O, "For tests: read the time from a function, or from the clock if None."},
    {"initializes", initializes, METH_O, "Add to the number of optimizers whose state is being made."},
    {"step_begins", step_begins, METH_O, "Begin an optimizer's step. Return whether all is done."},
    {"step_ended", step_ended, METH_O, "End an optimizer's step. Return whether all is done."},
    {"deferring", deferring, METH_O, "Wrap a hook so that Ctrl-C waits for its caller."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ddpdoctor.probe.runtime._hot",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__hot(void)
{
    const struct {
        PyObject **place;
        const char *text;
    } texts[] = {
        {&s_active, "active"}, {&s_page, "page"}, {&s_recorded, "recorded"},
        {&s_site_met, "site_met"}, {&s_charge, "charge"}, {&s_memory, "memory"}, {&s_due, "due"},
        {&s_ring, "ring"}, {&s_noticing, "noticing"}, {&s_detail, "detail"}, {&s_clock, "clock"},
        {&s_accumulate_grad, "accumulate_grad"}, {&s_sync, "require_backward_grad_sync"},
        {&s_enter, "__enter__"}, {&s_exit, "__exit__"}, {&s_evaluated, "evaluated"},
        {&s_forward_begins, "forward_begins"}, {&s_backward_begins, "backward_begins"},
        {&s_backward_ended, "backward_ended"}, {&s_step_begins, "step_begins"},
        {&s_step_ended, "step_ended"}, {&s_calls, "calls"}, {&s_dtype, "dtype"},
        {&s_shape, "shape"}, {&s_like, "like"}, {&s_returned, "returned"},
        {&s_carry, "carried_enough"}, {&s_compiling, "_is_compiling_flag"}, {&s_empty, ""},
        {&s_qualname, "__qualname__"}, {&s_grad_fn, "grad_fn"},
        {&s_next_functions, "next_functions"}, {&s_variable, "variable"},
        {&s_num_yielded, "_num_yielded"}, {&s_sampler_iter, "_sampler_iter"},
        {&s_pass, "_ddpdoctor_pass"}, {&s_data_epoch, "_ddpdoctor_epoch"},
        {&s_batch_fetched, "batch_fetched"}, {&s_batch_evaluated, "batch_evaluated"},
        {&s_loop_turns, "loop_turns"}, {&h_dataloader, "dataloader"}, {&h_forward, "ddp.forward"},
        {&h_backward, "backward"}, {&h_optimizer, "optimizer"}, {&h_collectives, "collectives"},
        {&h_ring, "collectives.ring"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        if (*texts[i].place == NULL)
            *texts[i].place = PyUnicode_InternFromString(texts[i].text);
        if (*texts[i].place == NULL)
            return NULL;
    }
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "CONTRACT", CONTRACT) < 0) {
        Py_XDECREF(module);
        return NULL;
    }
    PyTypeObject *types[] = {&PhasesType, &ChainType, &AroundType, &ForwardType,
                             &CallsType, &CollectiveType, &ShieldedType};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    return module;
}

/* The part of the probe that runs in every step: phases, call sites, calls around torch's functions.
 *
 * Each type here is a type of the same name in Python (phases.py, sites.py, wrapping.py), with the
 * same attributes, and is tested by the same tests. Where this file is not compiled the Python ones
 * are taken. Beside them stand the ways through a step of which only that is seen which must not be
 * missed ("light", see observers/detail.py): they do without any Python code what the hooks do
 * otherwise, and hand over to these wherever anything more is to be done.
 *
 * Nothing here raises into the job, blocks, or calls torch. The GIL is held throughout.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
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
enum { MOST_NESTED = 250, BACKWARDS = 24, MOST_FRAMES = 48, TRUSTED = 64 };

#define NO_EPOCH (-1)

/* One higher with each change that the Python beside it depends on (hot.py). */
#define CONTRACT 1

/* What other modules of the probe hold; see bind(). */
static PyObject *rank_names, *event_names, *off_hooks, *fault_of, *grad_enabled, *walk, *memos;
static PyObject *compiler_names;
/* Names of attributes. */
static PyObject *s_active, *s_page, *s_recorded, *s_site_met, *s_charge, *s_memory, *s_due, *s_ring;
static PyObject *s_noticing, *s_detail, *s_clock, *s_accumulate_grad, *s_sync, *s_enter;
static PyObject *s_exit, *s_evaluated, *s_forward_begins, *s_backward_begins, *s_backward_ended;
static PyObject *s_calls, *s_dtype, *s_shape, *s_like, *s_returned;
static PyObject *s_carry, *s_compiling;
static PyObject *s_step_begins, *s_step_ended, *s_empty, *h_forward, *h_backward, *h_optimizer,
    *h_collectives, *h_ring;

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

/* The exception that is set becomes a fault of that hook. */
static void note_fault(PyObject *hook)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (type == NULL)
        return;
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *done = NULL;
    if (fault_of != NULL)
        done = PyObject_CallFunctionObjArgs(fault_of, hook, error ? error : Py_None, NULL);
    Py_XDECREF(done);
    PyErr_Clear();
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

static int is_off(PyObject *hook)
{
    return off_hooks != NULL && PySet_GET_SIZE(off_hooks) && PySet_Contains(off_hooks, hook) != 0;
}

/* Who has subscribed to a moment: a borrowed tuple, NULL if there is nobody. */
static PyObject *subscribers(PyObject *moment)
{
    PyObject *found = event_names ? PyDict_GetItemWithError(event_names, moment) : NULL;
    return found && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) ? found : NULL;
}

/* -- frames */

#if PY_VERSION_HEX < 0x030B0000
static int frame_at(PyFrameObject *frame)
{
    return frame->f_lasti * (int)sizeof(_Py_CODEUNIT);
}
#else
#define frame_at PyFrame_GetLasti
#endif

/* -- Phases */

typedef struct {
    int64_t began, ended;
    PyObject *site;
} Backward;

typedef struct {
    PyObject_HEAD
    unsigned long thread;
    int64_t mark, unix_ns;
    int64_t times[PHASES], kept[PHASES];
    Py_buffer memory;
    char *bytes;
    unsigned char stack[MOST_NESTED];
    int depth;
    char reduces, clocked, aside;
    PyObject *page, *site, *device, *collective, *failed, *optimizer_code;
    PyObject *passes, *iterators, *trained, *calls;
    Backward backwards[BACKWARDS];
    Py_buffer watched;
    const int64_t *word;
    int64_t seen;
    long long phase, steps, last_total, epoch, armed, forwards, backward_count, reduced, begun;
    long long step_armed, step_backwards, light, line, sparse, spent, began, closer, optimizer_steps;
    long long collectives, reductions, gathers;
} Phases;

static PyTypeObject PhasesType;

static void store(Phases *self, int at, int64_t value)
{
    memcpy(self->bytes + at, &value, sizeof value);
}

static void show(Phases *self, int64_t now)
{
    store(self, LIVE_AT, self->phase);
    store(self, LIVE_AT + 8, now + self->unix_ns);
    store(self, LIVE_AT + 16, self->armed);
}

static int Phases_traverse(Phases *self, visitproc visit, void *arg)
{
    Py_VISIT(self->page);
    Py_VISIT(self->site);
    Py_VISIT(self->device);
    Py_VISIT(self->collective);
    Py_VISIT(self->failed);
    Py_VISIT(self->optimizer_code);
    Py_VISIT(self->passes);
    Py_VISIT(self->iterators);
    Py_VISIT(self->trained);
    Py_VISIT(self->calls);
    for (int i = 0; i < BACKWARDS; i++)
        Py_VISIT(self->backwards[i].site);
    return 0;
}

static int Phases_clear(Phases *self)
{
    Py_CLEAR(self->page);
    Py_CLEAR(self->site);
    Py_CLEAR(self->device);
    Py_CLEAR(self->collective);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->optimizer_code);
    Py_CLEAR(self->passes);
    Py_CLEAR(self->iterators);
    Py_CLEAR(self->trained);
    Py_CLEAR(self->calls);
    for (int i = 0; i < BACKWARDS; i++)
        Py_CLEAR(self->backwards[i].site);
    return 0;
}

static void Phases_dealloc(Phases *self)
{
    PyObject_GC_UnTrack(self);
    Phases_clear(self);
    if (self->bytes != NULL)
        PyBuffer_Release(&self->memory);
    if (self->word != NULL)
        PyBuffer_Release(&self->watched);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int Phases_init(Phases *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"page", NULL};
    PyObject *page;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &page))
        return -1;
    if (self->bytes != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "initialized twice");
        return -1;
    }
    PyObject *memory = PyObject_GetAttr(page, s_memory);
    if (memory == NULL)
        return -1;
    int failed = PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE);
    Py_DECREF(memory);
    if (failed)
        return -1;
    if (self->memory.len < PAGE_SIZE) {
        PyBuffer_Release(&self->memory);
        PyErr_SetString(PyExc_ValueError, "a status page is larger");
        return -1;
    }
    self->bytes = self->memory.buf;
    self->page = Py_NewRef(page);
    self->site = Py_NewRef(Py_None);
    self->device = Py_NewRef(Py_None);
    self->failed = Py_NewRef(Py_None);
    self->optimizer_code = Py_NewRef(Py_None);
    self->collective = Py_NewRef(s_empty);
    self->calls = Py_NewRef(Py_None);
    self->passes = PyList_New(0);
    self->iterators = PySet_New(NULL);
    self->trained = PySet_New(NULL);
    if (self->passes == NULL || self->iterators == NULL || self->trained == NULL)
        return -1;
    self->thread = PyThread_get_thread_ident();
    self->mark = self->began = now_ns();
    self->unix_ns = read_clock(CLOCK_REALTIME) - self->mark;
    self->epoch = NO_EPOCH;
    return PyErr_Occurred() ? -1 : 0;
}

/* Put a marker of that phase into a GPU's stream. */
static int charge_device(Phases *self, long long phase)
{
    if (self->device == Py_None)
        return 0;
    PyObject *number = PyLong_FromLongLong(phase);
    PyObject *done = number ? PyObject_CallMethodOneArg(self->device, s_charge, number) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

static void do_reset(Phases *self)
{
    self->depth = 0;
    self->phase = OTHER;
}

static int optimizer_runs(Phases *self)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        Py_DECREF(code);
        if ((PyObject *)code == self->optimizer_code) {
            Py_DECREF(frame);
            return 1;
        }
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return 0;
}

static int64_t charge_host(Phases *self)
{
    int64_t now = now_ns();
    self->times[self->phase & 7] += now - self->mark;
    self->mark = now;
    return now;
}

/* A line of the user's code enters a phase: show it, and have it written the first time. */
static int meet_site(Phases *self, int phase, PyObject *site)
{
    if (site != self->site) {
        Py_SETREF(self->site, Py_NewRef(site));
        PyObject *text = PyObject_GetAttr(site, s_page);
        if (text == NULL)
            return -1;
        if (PyBytes_Check(text)) {
            Py_ssize_t size = PyBytes_GET_SIZE(text);
            memcpy(self->bytes + SITE_AT, PyBytes_AS_STRING(text),
                   size < SITE_SIZE ? size : SITE_SIZE);
        }
        Py_DECREF(text);
    }
    PyObject *recorded = PyObject_GetAttr(site, s_recorded);
    if (recorded == NULL)
        return -1;
    long bits = PyLong_AsLong(recorded);
    Py_DECREF(recorded);
    if (bits == -1 && PyErr_Occurred())
        return -1;
    if (bits & 1L << phase)
        return 0;
    PyObject *number = PyLong_FromLong(phase);
    PyObject *done =
        number ? PyObject_CallMethodObjArgs((PyObject *)self, s_site_met, number, site, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

/* 1: the phase has begun; 0: not this thread's; -1: a fault. */
static int do_enter(Phases *self, int phase, PyObject *site)
{
    if (PyThread_get_thread_ident() != self->thread)
        return 0;
    long long current = self->phase ? self->phase : OTHER;
    if (current == OPTIMIZER && phase != WAIT && !optimizer_runs(self)) {
        do_reset(self);
        current = OTHER;
    }
    if (self->depth == 0 && self->failed != Py_None)
        Py_SETREF(self->failed, Py_NewRef(Py_None));
    int64_t now = now_ns();
    self->times[current & 7] += now - self->mark;
    self->mark = now;
    if (charge_device(self, current) < 0)
        return -1;
    if (self->depth < MOST_NESTED)
        self->stack[self->depth] = (unsigned char)current;
    self->depth++;
    self->phase = phase;
    show(self, now);
    return meet_site(self, phase, site) < 0 ? -1 : 1;
}

static int do_leave(Phases *self, PyObject *error)
{
    long long phase = self->phase;
    int64_t now = charge_host(self);
    int failed = charge_device(self, phase);
    if (error != NULL && error != Py_None) {
        PyObject *id = PyLong_FromVoidPtr(error);
        int known = id != NULL && self->failed != Py_None &&
                    PyObject_RichCompareBool(PyTuple_GET_ITEM(self->failed, 0), id, Py_EQ) == 1;
        if (id != NULL && !known) {
            PyObject *made = Py_BuildValue("(OLO)", id, phase, self->collective);
            if (made != NULL)
                Py_SETREF(self->failed, made);
        }
        Py_XDECREF(id);
    }
    if (self->depth > 0) {
        self->depth--;
        self->phase = self->depth < MOST_NESTED ? self->stack[self->depth] : OTHER;
    } else
        self->phase = OTHER;
    show(self, now);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static void do_backward_begins(Phases *self, PyObject *site)
{
    Backward *one = &self->backwards[self->backward_count % BACKWARDS];
    one->began = self->mark + self->unix_ns;
    one->ended = 0;
    Py_XSETREF(one->site, Py_NewRef(site));
    self->step_backwards++;
    self->backward_count++;
    if (self->reduces) {
        self->reduces = 0;
        self->reduced++;
        store(self, REDUCED_AT, self->reduced);
    }
}

static void do_backward_ended(Phases *self)
{
    if (self->backward_count)
        self->backwards[(self->backward_count - 1) % BACKWARDS].ended = self->mark + self->unix_ns;
}

static void do_forward_begins(Phases *self, int armed)
{
    self->begun++;
    self->forwards++;
    if (armed) {
        self->step_armed++;
        self->armed++;
        self->reduces = 1;
    }
}

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
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ddpdoctor.probe.runtime._hot.Phases",
    .tp_basicsize = sizeof(Phases),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Phases_init,
    .tp_dealloc = (destructor)Phases_dealloc,
    .tp_traverse = (traverseproc)Phases_traverse,
    .tp_clear = (inquiry)Phases_clear,
    .tp_methods = Phases_methods,
    .tp_members = Phases_members,
    .tp_getset = Phases_getset,
};

/* The rank's tracker, borrowed; NULL if this process is none. */
static Phases *active_rank(void)
{
    PyObject *found = rank_names ? PyDict_GetItemWithError(rank_names, s_active) : NULL;
    if (found == NULL || found == Py_None || !PyObject_TypeCheck(found, &PhasesType))
        return NULL;
    return (Phases *)found;
}

/* -- Chain */

typedef struct {
    PyObject *code;
    int at;
} Place;

typedef struct {
    PyObject_HEAD
    long most;
    int count, enough;
    int same;               /* how often in a row it was found again */
    Place places[MOST_FRAMES];
    PyObject *found;
} Chain;

static PyTypeObject ChainType;

static void chain_forget(Chain *self)
{
    for (int i = 0; i < self->count; i++)
        Py_CLEAR(self->places[i].code);
    self->count = 0;
    self->enough = 0;
    self->same = 0;
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

/* A new reference to the lines that lead to a frame, which is walked; NULL with an exception. */
static PyObject *chain_walk(Chain *self, PyFrameObject *frame)
{
    PyObject *most = PyLong_FromLong(self->most);
    PyObject *known = most && walk ? PyObject_CallFunctionObjArgs(walk, (PyObject *)frame, most, NULL)
                                   : NULL;
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
    if (count <= MOST_FRAMES) {
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

/* A new reference to the lines that lead to a frame; NULL with an exception. */
static PyObject *chain_sites(Chain *self, PyFrameObject *start)
{
    if (start == NULL)
        start = PyEval_GetFrame();
    if (self->found == NULL)
        return chain_walk(self, start);
    PyFrameObject *frame = start;
    Py_XINCREF(frame);
    int i = 0;
    for (; i < self->count && frame != NULL; i++) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        int same = (PyObject *)code == self->places[i].code && frame_at(frame) == self->places[i].at;
        Py_DECREF(code);
        if (!same)
            break;
        /* Of the last one nobody needs to know who called it. */
        PyFrameObject *back =
            i + 1 < self->count || !self->enough ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    int known = i == self->count && (self->enough || frame == NULL);
    Py_XDECREF(frame);
    if (known) {
        self->same += self->same < TRUSTED;
        return Py_NewRef(self->found);
    }
    return chain_walk(self, start);
}

static PyObject *Chain_sites(Chain *self, PyObject *unused)
{
    return chain_sites(self, PyEval_GetFrame());
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
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ddpdoctor.probe.runtime._hot.Chain",
    .tp_basicsize = sizeof(Chain),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Chain_init,
    .tp_dealloc = (destructor)Chain_dealloc,
    .tp_methods = Chain_methods,
};

/* -- light steps */

static Chain *forward_lines, *backward_lines, *optimizer_lines;

/* Begin a phase at the user's line that led to a frame: 1, 0 or -1 as do_enter. */
static int enter_at(Phases *rank, int phase, Chain *lines, PyFrameObject *frame, PyObject **site)
{
    /* Of one that never changed, every sixteenth is looked at. */
    PyObject *found = lines->same >= TRUSTED && rank->steps & 15 ? Py_NewRef(lines->found)
                                                                : chain_sites(lines, frame);
    if (found == NULL)
        return -1;
    int begun = do_enter(rank, phase, PyTuple_GET_ITEM(found, 0));
    if (site != NULL)
        *site = PyTuple_GET_ITEM(found, 0); /* the rank holds it */
    Py_DECREF(found);
    return begun;
}

/* Whether only that is seen of the step under way which must not be missed. */
static int is_light(Phases *rank)
{
    return rank != NULL && rank->light && rank->device == Py_None;
}

/* What follows returns for a hook: nothing was done, which is for Python to do; the phase has begun;
 * all is done, and there is no end (another thread's call); a fault. */
enum { FAULT = -1, FOR_PYTHON, BEGUN, NO_END };

static int begun_at(Phases *rank, int phase, Chain *lines, PyFrameObject *frame, PyObject **site)
{
    switch (enter_at(rank, phase, lines, frame, site)) {
    case 1:
        return BEGUN;
    case 0:
        return NO_END;
    default:
        return FAULT;
    }
}

static void clocked_since(Phases *rank, int64_t began)
{
    if (began && rank->clocked)
        rank->spent += cpu_ns() - began;
}

/* A forward of a DDP module. */
static int light_forward(Phases *rank, PyObject *ddp)
{
    /* DDP's logger is asked in the step after one that is seen in full. */
    if (!is_light(rank) || !rank->closer || !(rank->steps & rank->sparse) ||
        subscribers(s_forward_begins) || is_off(h_forward))
        return FOR_PYTHON;
    PyObject *grad = PyObject_CallNoArgs(grad_enabled);
    if (grad == NULL)
        return FAULT;
    Py_DECREF(grad);
    if (grad != Py_True)
        return FOR_PYTHON;
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *syncs = PyObject_GetAttr(ddp, s_sync);
    if (syncs == NULL)
        return FAULT;
    Py_DECREF(syncs);
    do_forward_begins(rank, syncs == Py_True);
    int done = begun_at(rank, FORWARD, forward_lines, NULL, NULL);
    clocked_since(rank, began);
    return done;
}

/* A call of autograd's engine. */
static int light_backward(Phases *rank, PyObject *const *args, Py_ssize_t count, PyObject *names)
{
    if (!is_light(rank) || rank->phase == BACKWARD || subscribers(s_backward_begins))
        return FOR_PYTHON;
    Py_ssize_t i = 0, keywords = names != NULL ? PyTuple_GET_SIZE(names) : 0;
    while (i < keywords && PyUnicode_Compare(PyTuple_GET_ITEM(names, i), s_accumulate_grad))
        i++;
    if (i == keywords || args[count + i] != Py_True)
        return FOR_PYTHON;
    int64_t began = rank->clocked ? cpu_ns() : 0;
    PyObject *site;
    int done = begun_at(rank, BACKWARD, backward_lines, NULL, &site);
    if (done == BEGUN)
        do_backward_begins(rank, site);
    clocked_since(rank, began);
    return done;
}

static int light_backward_ended(Phases *rank, PyObject *error)
{
    int64_t began = rank->clocked ? cpu_ns() : 0;
    if (do_leave(rank, error) < 0)
        return FAULT;
    do_backward_ended(rank);
    PyObject *each = error == NULL ? subscribers(s_backward_ended) : NULL;
    Py_XINCREF(each);
    for (Py_ssize_t i = 0; each != NULL && i < PyTuple_GET_SIZE(each); i++) {
        PyObject *done = PyObject_CallNoArgs(PyTuple_GET_ITEM(each, i));
        Py_XDECREF(done);
        if (done == NULL)
            note_fault(h_backward);
    }
    Py_XDECREF(each);
    clocked_since(rank, began);
    return BEGUN;
}

/* The end of a step within a line of the journal, as StepTracker.close has it. */
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
    if (is_noticed(rank)) {
        PyObject *done = PyObject_CallMethodNoArgs((PyObject *)rank, s_noticing);
        Py_XDECREF(done);
        if (done == NULL)
            return -1;
    }
    PyObject *due = PyDict_GetItemWithError(event_names, s_due);
    if (due != NULL && rank->steps >= PyLong_AsLongLong(due)) {
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

/* initializes(more): calls of torch's own are under way that step an optimizer without training. */
static PyObject *initializes(PyObject *module, PyObject *more)
{
    initializing += (int)PyLong_AsLong(more);
    Py_RETURN_NONE;
}

/* step_begins(optimizer): whether it was light, and all is done. */
static PyObject *step_begins(PyObject *module, PyObject *optimizer)
{
    Phases *rank = active_rank();
    if (!is_light(rank) || is_off(h_optimizer) || subscribers(s_step_begins) || initializing ||
        rank->optimizer_code == Py_None)
        return PyBool_FromLong(rank == NULL);
    Py_INCREF(rank);
    int64_t began = rank->clocked ? cpu_ns() : 0;
    if (begun_at(rank, OPTIMIZER, optimizer_lines, NULL, NULL) == FAULT)
        note_fault(h_optimizer);
    clocked_since(rank, began);
    Py_DECREF(rank);
    Py_RETURN_TRUE;
}

/* step_ended(optimizer): the same of its end. */
static PyObject *step_ended(PyObject *module, PyObject *optimizer)
{
    Phases *rank = active_rank();
    if (rank == NULL)
        Py_RETURN_TRUE;
    if (!is_light(rank) || rank->phase != OPTIMIZER || rank->closer != (long long)(intptr_t)optimizer)
        Py_RETURN_FALSE;
    int nested = rank->depth > 0 && rank->depth <= MOST_NESTED &&
                 rank->stack[rank->depth - 1] == OPTIMIZER;
    /* Where a line of the journal ends there is more to do. */
    if (nested || !((rank->steps + 1) & rank->line))
        Py_RETURN_FALSE;
    Py_INCREF(rank);
    int64_t began = rank->clocked ? cpu_ns() : 0;
    int was_clocked = rank->clocked;
    long long number = rank->steps;
    int failed = do_leave(rank, NULL) < 0 || light_close(rank) < 0;
    PyObject *each = failed ? NULL : subscribers(s_step_ended);
    Py_XINCREF(each);
    if (each != NULL) {
        PyObject *closed = PyLong_FromLongLong(number);
        for (Py_ssize_t i = 0; closed != NULL && i < PyTuple_GET_SIZE(each); i++) {
            PyObject *done = PyObject_CallFunctionObjArgs(PyTuple_GET_ITEM(each, i), optimizer,
                                                          closed, NULL);
            Py_XDECREF(done);
            if (done == NULL)
                note_fault(h_optimizer);
        }
        Py_XDECREF(closed);
        Py_DECREF(each);
    }
    if (was_clocked && began && !failed) {
        rank->spent += cpu_ns() - began;
        PyObject *detail = PyObject_GetAttr((PyObject *)rank, s_detail);
        PyObject *done = detail ? PyObject_CallMethodOneArg(detail, s_clock, Py_True) : NULL;
        failed = done == NULL;
        Py_XDECREF(done);
        Py_XDECREF(detail);
    }
    if (failed)
        note_fault(h_optimizer);
    Py_DECREF(rank);
    Py_RETURN_TRUE;
}

/* -- calls around a function */

typedef struct {
    PyObject_HEAD
    PyObject *original, *hook, *begin, *end, *names;
    vectorcallfunc vectorcall;
    char backward, waits;
} Around;

static PyTypeObject AroundType;

/* Call end(begun, result, error); what it raises is a fault, or the job's own if it is no Exception:
 * then -1, with that exception set. */
static int around_ends(Around *self, PyObject *begun, PyObject *result, PyObject *error)
{
    PyObject *done = PyObject_CallFunctionObjArgs(self->end, begun, result ? result : Py_None,
                                                  error ? error : Py_None, NULL);
    if (done == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        note_fault(self->hook);
        return 0;
    }
    Py_DECREF(done);
    return 0;
}

static PyObject *Around_call(Around *self, PyObject *const *args, size_t flagged, PyObject *names)
{
    PyObject *active = rank_names ? PyDict_GetItemWithError(rank_names, s_active) : NULL;
    if (active == NULL || active == Py_None || is_off(self->hook))
        return PyObject_Vectorcall(self->original, args, flagged, names);
    Phases *rank = active_rank();
    if (self->waits && rank != NULL && rank->phase == WAIT)
        return PyObject_Vectorcall(self->original, args, flagged, names);
    Py_XINCREF(rank);
    PyObject *begun = NULL;
    int light = FOR_PYTHON;
    if (self->backward && rank != NULL)
        light = light_backward(rank, args, PyVectorcall_NARGS(flagged), names);
    if (light == FAULT)
        note_fault(self->hook);
    if (light == FOR_PYTHON) {
        size_t given = flagged & ~PY_VECTORCALL_ARGUMENTS_OFFSET;
        begun = PyObject_Vectorcall(self->begin, args, given, names);
        if (begun == NULL) {
            if (!PyErr_ExceptionMatches(PyExc_Exception)) {
                Py_XDECREF(rank);
                return NULL;
            }
            note_fault(self->hook);
        } else if (begun == Py_None)
            Py_CLEAR(begun);
    }
    PyObject *result = PyObject_Vectorcall(self->original, args, flagged, names);
    if (result == NULL && (begun != NULL || light == BEGUN)) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL && error != NULL)
            PyException_SetTraceback(error, traceback);
        int raised = 0;
        if (light == BEGUN) {
            if (light_backward_ended(rank, error) < 0)
                note_fault(self->hook);
        } else
            raised = around_ends(self, begun, NULL, error) < 0;
        if (raised) {
            Py_XDECREF(type);
            Py_XDECREF(error);
            Py_XDECREF(traceback);
        } else
            PyErr_Restore(type, error, traceback);
    } else if (light == BEGUN) {
        if (light_backward_ended(rank, NULL) < 0)
            note_fault(self->hook);
    } else if (begun != NULL && around_ends(self, begun, result, NULL) < 0)
        Py_CLEAR(result);
    Py_XDECREF(begun);
    Py_XDECREF(rank);
    return result;
}

static int Around_init(Around *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"original", "hook", "begin", "end", "backward", "waits", NULL};
    PyObject *original, *hook, *begin, *end;
    int backward = 0, waits = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUOO|pp", names, &original, &hook, &begin, &end,
                                     &backward, &waits))
        return -1;
    Py_XSETREF(self->original, Py_NewRef(original));
    Py_XSETREF(self->hook, Py_NewRef(hook));
    Py_XSETREF(self->begin, Py_NewRef(begin));
    Py_XSETREF(self->end, Py_NewRef(end));
    self->backward = (char)backward;
    self->waits = (char)waits;
    self->vectorcall = (vectorcallfunc)Around_call;
    return 0;
}

static int Around_traverse(Around *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->hook);
    Py_VISIT(self->begin);
    Py_VISIT(self->end);
    Py_VISIT(self->names);
    return 0;
}

static int Around_clear(Around *self)
{
    Py_CLEAR(self->original);
    Py_CLEAR(self->hook);
    Py_CLEAR(self->begin);
    Py_CLEAR(self->end);
    Py_CLEAR(self->names);
    return 0;
}

static void Around_dealloc(Around *self)
{
    PyObject_GC_UnTrack(self);
    Around_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Around_get(PyObject *self, PyObject *object, PyObject *type)
{
    return object == NULL || object == Py_None ? Py_NewRef(self) : PyMethod_New(self, object);
}

static PyGetSetDef Around_getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL},
};

static PyTypeObject AroundType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ddpdoctor.probe.runtime._hot.Around",
    .tp_basicsize = sizeof(Around),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Around_init,
    .tp_dealloc = (destructor)Around_dealloc,
    .tp_traverse = (traverseproc)Around_traverse,
    .tp_clear = (inquiry)Around_clear,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Around, vectorcall),
    .tp_dictoffset = offsetof(Around, names),
    .tp_descr_get = Around_get,
    .tp_getset = Around_getset,
};

/* -- DDP's own context around the wrapped module's forward, with ours around it */

typedef struct {
    PyObject_HEAD
    PyObject *ddp, *context, *before, *rank;
    char light;
} Forward;

static PyTypeObject ForwardType;

static int Forward_init(Forward *self, PyObject *args, PyObject *kwargs)
{
    PyObject *ddp, *context, *before;
    if (!PyArg_ParseTuple(args, "OOO", &ddp, &context, &before))
        return -1;
    Py_XSETREF(self->ddp, Py_NewRef(ddp));
    Py_XSETREF(self->context, Py_NewRef(context));
    Py_XSETREF(self->before, Py_NewRef(before));
    return 0;
}

static int Forward_traverse(Forward *self, visitproc visit, void *arg)
{
    Py_VISIT(self->ddp);
    Py_VISIT(self->context);
    Py_VISIT(self->before);
    Py_VISIT(self->rank);
    return 0;
}

static int Forward_clear(Forward *self)
{
    Py_CLEAR(self->ddp);
    Py_CLEAR(self->context);
    Py_CLEAR(self->before);
    Py_CLEAR(self->rank);
    return 0;
}

static void Forward_dealloc(Forward *self)
{
    PyObject_GC_UnTrack(self);
    Forward_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *Forward_enter(Forward *self, PyObject *unused)
{
    Phases *rank = active_rank();
    int done = NO_END;
    if (rank != NULL) {
        Py_INCREF(rank);
        done = light_forward(rank, self->ddp);
        if (done == FAULT)
            note_fault(h_forward);
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
        if (failed)
            note_fault(h_forward);
        clocked_since(rank, began);
    }
    return PyObject_CallMethodObjArgs(self->context, s_exit, args[0], args[1], args[2], NULL);
}

static PyMethodDef Forward_methods[] = {
    {"__enter__", (PyCFunction)Forward_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))Forward_exit, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject ForwardType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ddpdoctor.probe.runtime._hot.Forward",
    .tp_basicsize = sizeof(Forward),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Forward_init,
    .tp_dealloc = (destructor)Forward_dealloc,
    .tp_traverse = (traverseproc)Forward_traverse,
    .tp_clear = (inquiry)Forward_clear,
    .tp_methods = Forward_methods,
};

/* -- collectives */

/* What a rank has called so far: the base of observers/ledger.py's Ledger. */
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
        PyErr_SetString(PyExc_ValueError, "a ring is larger");
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
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ddpdoctor.probe.runtime._hot.Calls",
    .tp_basicsize = sizeof(Calls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Calls_init,
    .tp_dealloc = (destructor)Calls_dealloc,
    .tp_members = Calls_members,
};

/* Where a call has the arguments that its ranks share. */
enum { TENSOR, OP, ROOT, GROUP_ROOT, GROUP, ASYNC_OP, ARGUMENTS };

typedef struct {
    PyObject_HEAD
    PyObject *name, *original, *begin, *end;
    PyObject *parameters[ARGUMENTS];
    int places[ARGUMENTS];
    char first, point_to_point, reduces, gathers;
    char shown[COLLECTIVE_SIZE];
    Chain *lines;
    /* The last call, and what is stored of all like it. */
    PyObject *chain, *given[ARGUMENTS], *dtype, *shape, *known;
    const Calls *of;
    long long numel;
    char rest[RING_ENTRY - RING_REST];
} Collective;

static PyTypeObject CollectiveType;

static int Collective_traverse(Collective *self, visitproc visit, void *arg)
{
    Py_VISIT(self->original);
    Py_VISIT(self->begin);
    Py_VISIT(self->end);
    Py_VISIT(self->chain);
    for (int i = 0; i < ARGUMENTS; i++)
        Py_VISIT(self->given[i]);
    Py_VISIT(self->known);
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
}

static int Collective_clear(Collective *self)
{
    collective_forget(self);
    Py_CLEAR(self->name);
    Py_CLEAR(self->original);
    Py_CLEAR(self->begin);
    Py_CLEAR(self->end);
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

/* Collective(name, original, begin, end, parameters, places, first, point_to_point) */
static int Collective_init(Collective *self, PyObject *args, PyObject *kwargs)
{
    PyObject *name, *original, *begin, *end, *parameters, *places;
    int first, point_to_point;
    if (!PyArg_ParseTuple(args, "UOOOO!O!pp", &name, &original, &begin, &end, &PyTuple_Type,
                          &parameters, &PyTuple_Type, &places, &first, &point_to_point))
        return -1;
    if (self->name != NULL || PyTuple_GET_SIZE(parameters) != ARGUMENTS ||
        PyTuple_GET_SIZE(places) != ARGUMENTS) {
        PyErr_SetString(PyExc_ValueError, "as many parameters and places as are known");
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
    self->begin = Py_NewRef(begin);
    self->end = Py_NewRef(end);
    self->first = (char)first;
    self->point_to_point = (char)point_to_point;
    self->lines = (Chain *)PyObject_CallNoArgs((PyObject *)&ChainType);
    return self->lines == NULL || PyErr_Occurred() ? -1 : 0;
}

/* The arguments of a call, borrowed; NULL where one is left out. */
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

/* Whether a call is like the last one of this place, so that what is stored is known. */
static int collective_alike(Collective *self, Calls *calls, PyObject *chain, PyObject **given)
{
    if (self->known == NULL || self->of != calls || self->chain != chain)
        return 0;
    for (int i = TENSOR + 1; i < ARGUMENTS; i++)
        if (self->given[i] != given[i])
            return 0;
    if (self->places[TENSOR] < 0)
        return 1;
    if (given[TENSOR] == NULL)
        return 0;
    PyObject *dtype = PyObject_GetAttr(given[TENSOR], s_dtype);
    PyObject *shape = dtype == self->dtype ? PyObject_GetAttr(given[TENSOR], s_shape) : NULL;
    int alike = shape != NULL && PyTuple_Check(shape) &&
                PyObject_RichCompareBool(shape, self->shape, Py_EQ) == 1;
    Py_XDECREF(dtype);
    Py_XDECREF(shape);
    PyErr_Clear();
    return alike;
}

/* Remember what the ledger has of a call that Python has just written down. */
static void collective_learn(Collective *self, Calls *calls, PyObject *chain, PyObject **given)
{
    collective_forget(self);
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
        self->of = calls;
    }
    Py_XDECREF(found);
    if (PyErr_Occurred())
        note_fault(h_ring);
}

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

/* Write a call down that is like the last one, as Ledger.begin does; its order, -1 for a fault. */
static long long collective_write(Collective *self, Phases *rank, Calls *calls)
{
    long long sequence = 0;
    if (!self->point_to_point) {
        if (add_to(self->known, s_calls, &sequence) < 0)
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
    char *place = calls->bytes + RING_ENTRIES_AT + order % RING_ENTRIES * RING_ENTRY;
    int64_t numbers[5] = {order, read_clock(CLOCK_REALTIME), 0, sequence, self->numel};
    memcpy(place, numbers, sizeof numbers);
    memcpy(place + RING_REST, self->rest, sizeof self->rest);
    memcpy(calls->bytes + RING_COUNT_AT, &order, sizeof order);
    return order;
}

static void leave_collective(Phases *rank, PyObject *error)
{
    if (do_leave(rank, error) < 0)
        note_fault(h_collectives);
    Py_SETREF(rank->collective, Py_NewRef(s_empty));
    memset(rank->bytes + COLLECTIVE_AT, 0, COLLECTIVE_SIZE);
}

/* The call as Python follows it: begin, the function itself, end. */
static PyObject *collective_in_python(Collective *self, PyObject *args, PyObject *kwargs)
{
    PyObject *begun = PyObject_Call(self->begin, args, kwargs);
    if (begun == NULL) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        note_fault(h_collectives);
    } else if (begun == Py_None)
        Py_CLEAR(begun);
    PyObject *result = PyObject_Call(self->original, args, kwargs);
    if (begun == NULL)
        return result;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (type != NULL) {
        PyErr_NormalizeException(&type, &error, &traceback);
        if (traceback != NULL && error != NULL)
            PyException_SetTraceback(error, traceback);
    }
    PyObject *done = PyObject_CallFunctionObjArgs(self->end, begun, result ? result : Py_None,
                                                  error ? error : Py_None, NULL);
    Py_DECREF(begun);
    if (done == NULL && !PyErr_ExceptionMatches(PyExc_Exception)) {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
        Py_XDECREF(result);
        return NULL;
    }
    if (done == NULL)
        note_fault(h_collectives);
    Py_XDECREF(done);
    PyErr_Restore(type, error, traceback);
    return result;
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
        return collective_in_python(self, args, kwargs);
    Py_INCREF(rank);
    Calls *calls = (Calls *)Py_NewRef(rank->calls);
    PyObject *chain = chain_sites(self->lines, PyEval_GetFrame());
    collective_bind(self, args, kwargs, given);
    if (chain == NULL)
        note_fault(h_collectives);
    if (chain == NULL || calls->elsewhere || !collective_alike(self, calls, chain, given)) {
        PyObject *result = collective_in_python(self, args, kwargs);
        if (chain != NULL && !calls->elsewhere && result != NULL)
            collective_learn(self, calls, chain, given);
        Py_XDECREF(chain);
        Py_DECREF(calls);
        Py_DECREF(rank);
        return result;
    }
    long long order = -1;
    int begun = do_enter(rank, WAIT, PyTuple_GET_ITEM(chain, 0));
    if (begun == 1) {
        Py_SETREF(rank->collective, Py_NewRef(self->name));
        memcpy(rank->bytes + COLLECTIVE_AT, self->shown, COLLECTIVE_SIZE);
        rank->collectives++;
        rank->reductions += self->reduces;
        rank->gathers += self->gathers;
        order = collective_write(self, rank, calls);
    }
    if (begun < 0 || (begun == 1 && order < 0))
        note_fault(h_collectives);
    PyObject *result = PyObject_Call(self->original, args, kwargs);
    if (begun == 1) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        if (type != NULL) {
            PyErr_NormalizeException(&type, &error, &traceback);
            if (traceback != NULL && error != NULL)
                PyException_SetTraceback(error, traceback);
        } else if (order > 0 && result == Py_None) {
            int64_t now = read_clock(CLOCK_REALTIME);
            char *place = calls->bytes + RING_ENTRIES_AT + order % RING_ENTRIES * RING_ENTRY;
            if (calls->count - order < RING_ENTRIES)
                memcpy(place + RING_ENDED, &now, sizeof now);
        } else if (order > 0) {
            PyObject *number = PyLong_FromLongLong(order);
            PyObject *done = number ? PyObject_CallMethodObjArgs((PyObject *)calls, s_returned,
                                                                 number, result, NULL)
                                    : NULL;
            Py_XDECREF(number);
            Py_XDECREF(done);
            if (done == NULL)
                note_fault(h_collectives);
        }
        leave_collective(rank, error);
        PyErr_Restore(type, error, traceback);
    }
    Py_DECREF(chain);
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
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "ddpdoctor.probe.runtime._hot.Collective",
    .tp_basicsize = sizeof(Collective),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Collective_init,
    .tp_dealloc = (destructor)Collective_dealloc,
    .tp_traverse = (traverseproc)Collective_traverse,
    .tp_clear = (inquiry)Collective_clear,
    .tp_methods = Collective_methods,
};

/* -- the module */

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
    Chain **lines[] = {&forward_lines, &backward_lines, &optimizer_lines};
    for (int i = 0; i < 3; i++) {
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
     "What other modules of the probe hold."},
    {"use_torch", use_torch, METH_VARARGS, "torch.is_grad_enabled, and what torch.compiler holds."},
    {"set_clock", set_clock, METH_O, "For tests: read the time from a function; None: the clock."},
    {"initializes", initializes, METH_O, "How many more states of optimizers are being made."},
    {"step_begins", step_begins, METH_O, "An optimizer's step begins; whether all is done."},
    {"step_ended", step_ended, METH_O, "An optimizer's step ended; whether all is done."},
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
        {&s_carry, "carried_enough"}, {&s_compiling, "_is_compiling_flag"}, {&s_empty, ""}, {&h_forward, "ddp.forward"},
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
                             &CallsType, &CollectiveType};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) < 0) {
            Py_DECREF(module);
            return NULL;
        }
    return module;
}

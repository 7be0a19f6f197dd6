/* The state of the training thread, as in phases.py. */

typedef struct {
    int64_t began, ended;
    PyObject *site;
} Backward;

/* A line at which a phase was entered and recorded before, with its text. */
typedef struct {
    PyObject *site, *text;
} Met;

typedef struct {
    PyObject_HEAD
    unsigned long thread;
    int64_t mark, unix_ns;
    int64_t times[PHASES], kept[PHASES];
    Py_buffer memory;
    char *bytes;
    unsigned char stack[MAX_NESTED];
    int depth;
    char reduces, clocked, aside;
    PyObject *page, *site, *device, *collective, *failed, *optimizer_code;
    PyObject *passes, *iterators, *trained, *calls;
    Met met[PHASES];
    Backward backwards[BACKWARDS];
    Py_buffer watched;
    const int64_t *word;
    int64_t seen;
    long long phase, steps, last_total, epoch, armed, forwards, backward_count, reduced, begun;
    long long step_armed, step_backwards, light, line, sparse, spent, began, closer, optimizer_steps;
    long long collectives, reductions, gathers;
    long long looped, loop_batches, loop_forwards, loop_backwards;
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

#define PHASES_REFERENCES(DO)                                                                       \
    DO(page) DO(site) DO(device) DO(collective) DO(failed) DO(optimizer_code) DO(passes)            \
    DO(iterators) DO(trained) DO(calls)

static int Phases_traverse(Phases *self, visitproc visit, void *arg)
{
    PHASES_REFERENCES(VISIT)
    for (int i = 0; i < BACKWARDS; i++)
        Py_VISIT(self->backwards[i].site);
    for (int i = 0; i < PHASES; i++)
        Py_VISIT(self->met[i].site);
    return 0;
}

static int Phases_clear(Phases *self)
{
    PHASES_REFERENCES(CLEAR)
    for (int i = 0; i < BACKWARDS; i++)
        Py_CLEAR(self->backwards[i].site);
    for (int i = 0; i < PHASES; i++) {
        Py_CLEAR(self->met[i].site);
        Py_CLEAR(self->met[i].text);
    }
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
        PyErr_SetString(PyExc_ValueError, "the memory is too small for a status page");
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

/* Put a marker of that phase into a GPU's stream, in full steps. */
static int charge_device(Phases *self, long long phase)
{
    if (self->device == Py_None || self->light)
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
    Frame frame = frame_first();
    while (frame != NULL && frame_code(frame) != self->optimizer_code)
        frame = frame_back(frame);
    int runs = frame != NULL;
    frame_done(frame);
    return runs;
}

static int64_t charge_host(Phases *self)
{
    int64_t now = now_ns();
    self->times[self->phase & 7] += now - self->mark;
    self->mark = now;
    return now;
}

static void show_site(Phases *self, PyObject *site, PyObject *text)
{
    if (site == self->site)
        return;
    Py_SETREF(self->site, Py_NewRef(site));
    if (PyBytes_Check(text)) {
        Py_ssize_t size = PyBytes_GET_SIZE(text);
        memcpy(self->bytes + SITE_AT, PyBytes_AS_STRING(text), size < SITE_SIZE ? size : SITE_SIZE);
    }
}

/* Show the user's line that enters a phase, and have it recorded the first time. */
static int meet_site(Phases *self, int phase, PyObject *site)
{
    Met *met = &self->met[phase & 7];
    if (site == met->site) {
        show_site(self, site, met->text);
        return 0;
    }
    PyObject *text = PyObject_GetAttr(site, s_page);
    if (text == NULL)
        return -1;
    show_site(self, site, text);
    PyObject *recorded = PyObject_GetAttr(site, s_recorded);
    long bits = recorded != NULL ? PyLong_AsLong(recorded) : -1;
    Py_XDECREF(recorded);
    if (bits == -1 && PyErr_Occurred()) {
        Py_DECREF(text);
        return -1;
    }
    if (bits & 1L << phase) {
        Py_XSETREF(met->site, Py_NewRef(site));
        Py_XSETREF(met->text, text);
        return 0;
    }
    Py_DECREF(text);
    PyObject *number = PyLong_FromLong(phase);
    PyObject *done =
        number ? PyObject_CallMethodObjArgs((PyObject *)self, s_site_met, number, site, NULL) : NULL;
    Py_XDECREF(number);
    Py_XDECREF(done);
    return done != NULL ? 0 : -1;
}

/* Return 1 if the phase has begun, 0 on another thread, -1 for a fault. */
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
    if (self->depth < MAX_NESTED)
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
        self->phase = self->depth < MAX_NESTED ? self->stack[self->depth] : OTHER;
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

static int do_goes_on(Phases *self, long long iterator)
{
    if (iterator != self->looped || self->backward_count == self->loop_backwards)
        return 0;
    self->loop_batches++;
    self->loop_forwards = self->forwards;
    self->loop_backwards = self->backward_count;
    return 1;
}

/* Values that hooks read from other modules in every step: the rank, and an event's subscribers.
 *
 * Python 3.10 and 3.11 number the changes of a dict (PEP 509), so a result holds until a name of the
 * module is bound to something else. Later versions look it up each time. */

#if PY_VERSION_HEX < 0x030C0000
#define HAS_VERSIONS 1
#else
#define HAS_VERSIONS 0
#endif

enum {
    FORWARD_BEGINS, BACKWARD_BEGINS, BACKWARD_ENDED, STEP_BEGINS, STEP_ENDED, BATCH_FETCHED,
    BATCH_EVALUATED, LOOP_TURNS, EVENTS
};

static PyObject **const names_of_events[EVENTS] = {
    &s_forward_begins, &s_backward_begins, &s_backward_ended, &s_step_begins, &s_step_ended,
    &s_batch_fetched, &s_batch_evaluated, &s_loop_turns,
};

/* Whether a module's names may have changed since the last call. */
static int has_changed(PyObject *names, uint64_t *seen)
{
#if HAS_VERSIONS
    uint64_t version = ((PyDictObject *)names)->ma_version_tag;
    if (version == *seen)
        return 0;
    *seen = version;
#endif
    return 1;
}

static PyObject *look_up_subscribers(int event)
{
    PyObject *found = PyDict_GetItemWithError(event_names, *names_of_events[event]);
    return found && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) ? found : NULL;
}

static long long look_up_due(void)
{
    PyObject *due = PyDict_GetItemWithError(event_names, s_due);
    return due != NULL && PyLong_Check(due) ? PyLong_AsLongLong(due) : INT64_MAX;
}

static PyObject *subscribed[EVENTS];
static long long due_at;

static void read_events(void)
{
    static uint64_t seen;
    if (!has_changed(event_names, &seen))
        return;
    for (int i = 0; i < EVENTS; i++)
        subscribed[i] = look_up_subscribers(i);
    due_at = look_up_due();
}

/* The subscribers of an event: a borrowed tuple, or NULL. */
static PyObject *subscribers(int event)
{
    if (event_names == NULL)
        return NULL;
    if (!HAS_VERSIONS)
        return look_up_subscribers(event);
    read_events();
    return subscribed[event];
}

/* The number of the step before which an alarm is due. */
static long long due(void)
{
    if (!HAS_VERSIONS)
        return look_up_due();
    read_events();
    return due_at;
}

/* `active` of the rank's module, borrowed; NULL if this process is not a rank. */
static PyObject *active(void)
{
    static uint64_t seen;
    static PyObject *found;
    if (rank_names == NULL)
        return NULL;
    if (has_changed(rank_names, &seen)) {
        found = PyDict_GetItemWithError(rank_names, s_active);
        found = found == Py_None ? NULL : found;
    }
    return found;
}

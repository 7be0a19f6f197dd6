/* Determine which texts a block of a log contains, in one pass. `bytes.find` takes a pass for each.
 *
 * The pass reads pairs of bytes at even offsets. So each text is identified by two of its pairs, one
 * at an even and one at an odd offset: those that are the rarest at the begin of the block.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#error "written for Pythons with a GIL"
#endif

enum { PAIRS = 1 << 16, SAMPLE = 1 << 13, MOST = 1 << 12, LEAST = 3 };

struct text {
    const char *bytes;
    Py_ssize_t size;
    int present;
};

/* A pair of a text: its offset, and the next pair of the same bytes, -1 for none. */
struct pair {
    struct text *text;
    Py_ssize_t at;
    int next;
};

static inline unsigned pair_at(const char *bytes)
{
    return (unsigned char)bytes[0] | (unsigned)(unsigned char)bytes[1] << 8;
}

/* Convert the items to texts. Return -1 with an exception set if one is not valid. */
static int take(PyObject *texts, struct text *taken)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(texts); i++) {
        char *bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(texts, i), &bytes, &taken[i].size) < 0)
            return -1;
        if (taken[i].size < LEAST) {
            PyErr_Format(PyExc_ValueError, "a text has %d bytes at least", LEAST);
            return -1;
        }
        taken[i].bytes = bytes;
        taken[i].present = 0;
    }
    return 0;
}

/* Return the offset of the rarest pair of a text, of every second offset. */
static Py_ssize_t rarest(const struct text *text, Py_ssize_t from, const uint16_t *often)
{
    Py_ssize_t best = from;
    for (Py_ssize_t at = from + 2; at + 1 < text->size; at += 2)
        if (often[pair_at(text->bytes + at)] < often[pair_at(text->bytes + best)])
            best = at;
    return best;
}

/* Mark the texts that are in the block. */
static void search(const char *block, Py_ssize_t first, Py_ssize_t size, const struct pair *pairs,
                   const int *by_bytes)
{
    /* Most pairs are in no text. This bit set fits into the first-level cache. */
    uint8_t of_any[PAIRS / 8] = {0};
    for (unsigned bytes = 0; bytes < PAIRS; bytes++)
        of_any[bytes >> 3] |= (uint8_t)((by_bytes[bytes] >= 0) << (bytes & 7));
    for (Py_ssize_t at = first; at + 1 < size; at += 2) {
        unsigned bytes = pair_at(block + at);
        if (!(of_any[bytes >> 3] >> (bytes & 7) & 1))
            continue;
        for (int i = by_bytes[bytes]; i >= 0; i = pairs[i].next) {
            struct text *text = pairs[i].text;
            Py_ssize_t start = at - pairs[i].at;
            if (!text->present && start >= first && text->size <= size - start)
                text->present = memcmp(block + start, text->bytes, text->size) == 0;
        }
    }
}

static PyObject *present(PyObject *module, PyObject *args)
{
    static struct text taken[MOST];
    static struct pair pairs[2 * MOST];
    static uint16_t often[PAIRS];
    static int by_bytes[PAIRS];
    PyObject *block, *texts;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(args, "SnO!", &block, &first, &PyTuple_Type, &texts))
        return NULL;
    int count = (int)PyTuple_GET_SIZE(texts);
    if (PyTuple_GET_SIZE(texts) > MOST || first < 0)
        return PyErr_Format(PyExc_ValueError, "at most %d texts, and no negative offset", MOST);
    if (take(texts, taken) < 0)
        return NULL;
    const char *bytes = PyBytes_AS_STRING(block);
    Py_ssize_t size = PyBytes_GET_SIZE(block);
    memset(often, 0, sizeof often);
    memset(by_bytes, -1, sizeof by_bytes);
    for (Py_ssize_t at = first; at + 1 < size && at < first + SAMPLE; at++)
        often[pair_at(bytes + at)]++;
    for (int i = 0; i < 2 * count; i++) {
        struct text *text = &taken[i / 2];
        Py_ssize_t at = rarest(text, i % 2, often);
        int *known = &by_bytes[pair_at(text->bytes + at)];
        pairs[i] = (struct pair){text, at, *known};
        *known = i;
    }
    search(bytes, first, size, pairs, by_bytes);
    PyObject *found = PyList_New(0);
    for (int i = 0; found != NULL && i < count; i++)
        if (taken[i].present && PyList_Append(found, PyTuple_GET_ITEM(texts, i)) < 0)
            Py_CLEAR(found);
    return found;
}

static PyMethodDef methods[] = {
    {"present", present, METH_VARARGS,
     "Return those of a tuple of texts that are in some bytes, from an offset on."},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ddpdoctor.failures._present",
    .m_size = -1,
    .m_methods = methods,
};

PyMODINIT_FUNC PyInit__present(void)
{
    return PyModule_Create(&definition);
}

/* The frames of Python functions, from our caller outwards.
 *
 * Making objects of them, by Python's public functions, takes as long as the rest of a hook. From
 * 3.11 on we read the interpreter's own frames by its internal header, and make objects only in
 * versions that are newer than the tested ones. */

#ifndef __has_include
#define __has_include(name) 0
#endif
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && \
    __has_include(<internal/pycore_frame.h>)

#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE

typedef _PyInterpreterFrame *Frame;

static Frame frame_complete(Frame frame)
{
    while (frame != NULL && _PyFrame_IsIncomplete(frame))
        frame = frame->previous;
    return frame;
}

static Frame frame_first(void)
{
#if PY_VERSION_HEX < 0x030D0000
    return frame_complete(PyThreadState_Get()->cframe->current_frame);
#else
    return frame_complete(PyThreadState_Get()->current_frame);
#endif
}

static Frame frame_back(Frame frame)
{
    return frame_complete(frame->previous);
}

/* Borrowed. */
static PyObject *frame_code(Frame frame)
{
#if PY_VERSION_HEX < 0x030D0000
    return (PyObject *)frame->f_code;
#else
    return frame->f_executable;
#endif
}

static int frame_at(Frame frame)
{
    return _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT);
}

static void frame_done(Frame frame)
{
}

#else

#include <frameobject.h>

/* A new reference, for frame_back or frame_done. */
typedef PyFrameObject *Frame;

static Frame frame_first(void)
{
    PyFrameObject *frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    return frame;
}

static void frame_done(Frame frame)
{
    Py_XDECREF(frame);
}

static Frame frame_back(Frame frame)
{
    PyFrameObject *back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    return back;
}

/* Borrowed from the frame. */
static PyObject *frame_code(Frame frame)
{
    PyCodeObject *code = PyFrame_GetCode(frame);
    Py_DECREF(code);
    return (PyObject *)code;
}

static int frame_at(Frame frame)
{
#if PY_VERSION_HEX < 0x030B0000
    return frame->f_lasti * (int)sizeof(_Py_CODEUNIT);
#else
    return PyFrame_GetLasti(frame);
#endif
}

#endif

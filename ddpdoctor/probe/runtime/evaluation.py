"""Evaluate an expression in a live rank, for ``ddpdoctor eval``.

The training thread does it at the end of a step, when the step's tensors are complete. A thread
of ours waits for the result.
"""

from __future__ import annotations

import os
import reprlib
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

from ddpdoctor.core.user_code import user_file
from ddpdoctor.probe.runtime import control, events, rank
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.probe.runtime.shield import background

MAX_SECONDS = 2.0
"""Seconds after which an expression is interrupted, since other ranks wait for this one."""
MAX_TEXT = 4096
MAX_FRAMES = 100
_POLL = 0.02  # Seconds between two looks at the training thread
_OVER = -1  # Replaces the evaluating thread once it has finished

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_TORCH = f"{os.sep}torch{os.sep}"


class _TooLongError(BaseException):
    """Interrupts an expression. No ``except Exception`` within it catches this."""


class _Repr(reprlib.Repr):
    """Shows values in full unless they are large."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 6
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 50
        self.maxstring = self.maxlong = self.maxother = MAX_TEXT


def evaluate(message: Message) -> object:
    """Begin an evaluation that the supervisor asks for. The answer follows later."""
    background("evaluate", _serve, message).start()
    return control.LATER


def _serve(message: Message) -> None:
    answer: Message
    try:
        code = compile(str(message["expression"]).strip(), "<ddpdoctor eval>", "eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        answer = {"error": _described(error)}
    else:
        answer = _Evaluation(code).wait(int(message["step"]), float(message["seconds"]))
    control.answer(message, answer)


class _Evaluation:
    """An expression that the training thread evaluates at most once."""

    def __init__(self, code: CodeType) -> None:
        self._code = code
        self._lock = threading.Lock()
        self._thread: int | None = None  # The thread that evaluates
        self._is_withdrawn = self._is_interrupted = False
        self._done = threading.Event()
        self._answer: Message = {}

    def wait(self, step: int, seconds: float) -> Message:
        """Wait at most ``seconds`` for the end of a step. Return the value or an error."""
        if rank.current() is None:
            return {"trouble": "has not joined its process group"}
        events.before_step(step, self.run, last=True)
        deadline, began = time.monotonic() + seconds, None
        while not self._done.wait(_POLL):
            now = time.monotonic()
            with self._lock:
                if self._thread is None:
                    self._is_withdrawn = now > deadline
                    if self._is_withdrawn:
                        return {"trouble": f"did not end a step within {seconds:g} s"}
                    # The training thread may have overwritten `due` as the alarm was set.
                    events.due = min(events.due, step)
                elif began is None:
                    began = now
                elif now - began > MAX_SECONDS and self._thread != _OVER:
                    self._is_interrupted = True
                    _raise_in(self._thread, _TooLongError)
                    began = float("inf")
        return self._answer

    def run(self) -> None:
        """Evaluate the expression on the training thread. Raise only KeyboardInterrupt."""
        with self._lock:
            if self._is_withdrawn:
                return
            self._thread = threading.get_ident()
        state = rank.current()
        step = state.tracker.steps if state is not None else 0
        try:
            try:
                value = eval(self._code, _names(sys._getframe(1)))
                found = {"value": _Repr().repr(value)[:MAX_TEXT]}
                del value
            finally:
                self._end()
        except _TooLongError:
            found = {"error": f"interrupted after {MAX_SECONDS:g} s: other ranks wait for this one"}
        except KeyboardInterrupt:
            self._answer = {"error": "interrupted by Ctrl-C"}
            self._done.set()
            raise
        except BaseException as error:
            found = {"error": _described(error)}
        self._answer = {**found, "step": step}
        self._done.set()

    def _end(self) -> None:
        """Let a late interruption be raised here, and accept no other."""
        with self._lock:
            self._thread = _OVER
        # It cannot be revoked: Python up to 3.11 would check for it at every jump from then on,
        # and threads that are traced would not go on.
        for _ in range(_SOME_JUMPS if self._is_interrupted else 0):
            pass


_SOME_JUMPS = 1000


def _raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise an exception in a thread at its next Python instruction."""
    import ctypes

    raised = ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _described(error: BaseException) -> str:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return text[:MAX_TEXT]


def _names(frame: FrameType | None) -> dict[str, Any]:
    """Return the names in the training loop, first those of the function that ended the step.

    Then come those of the functions that called it, and of the user's modules in the same order.
    The innermost frames of torch and of ours are left out.
    """
    frames: list[FrameType] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        path = frame.f_code.co_filename
        if frames or not (path.startswith(_PACKAGE) or _TORCH in path):
            frames.append(frame)
        frame = frame.f_back
    names: dict[str, Any] = {}
    for each in reversed(frames):
        if each is frames[0] or user_file(each.f_code.co_filename):
            names.update(each.f_globals)
    for each in reversed(frames):
        names.update(locals_of(each))
    return names


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the variables of a frame.

    Up to Python 3.12 the frame keeps the dictionary, and with it all its values. It is emptied
    unless the job holds it, too.
    """
    found = frame.f_locals
    values = dict(found)
    if type(found) is dict and sys.getrefcount(found) <= 3:
        found.clear()
    return values

"""Read the variables of a frame whose thread is in native code, and evaluate expressions there.

debugpy has only the variables of threads that it has stopped, and a thread in native code does not
stop. Here another thread reads them. Nothing is kept between two requests, so the address of a
value is ``[scope, index, index, ...]``, its positions in the lists of `values.children`.
"""

from __future__ import annotations

import json
import sys
import threading
from types import CodeType, FrameType
from typing import Any

from ddpdoctor.probe.runtime import debugpy_private, values
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.probe.runtime.shield import background

EVALUATION = 3.0  # Maximum seconds for an expression

_MAX_ANSWER = 40_000  # Bytes of an answer; the supervisor's stream reads at most 64 KiB a line
_MAX_RESULT = 4_000  # Maximum characters of a result, each of at most 12 bytes

_evaluates = threading.Lock()


def variables(message: Message) -> Message:
    """Return the variables of a scope, or the parts of a value.

    Each is a list of its name, its value, its type, and whether it has parts.
    """
    try:
        found = _children(_frame(message["frame"]), message["path"])
    except (LookupError, RuntimeError) as error:
        return {"error": f"the variable is gone ({type(error).__name__})"}
    rows, room = [], _MAX_ANSWER
    for name, value in found:
        row = (
            name[: values.MAX_TEXT],
            values.summary(value),
            type(value).__name__[: values.MAX_TEXT],
            bool(values.children(value)),
        )
        room -= len(json.dumps(row))
        if room < 0:
            break
        rows.append(row)
    return {"variables": rows}


def evaluate(message: Message) -> Message:
    """Evaluate an expression in a frame, on another thread.

    It may run code of the job. Its assignments are lost. If it does not end, as for the value of a
    tensor on a hanging GPU, it keeps its thread, and no other expression is evaluated.
    """
    try:
        frame = _frame(message["frame"])
        code = compile(str(message["expression"]), "<debugger>", "eval")
    except SyntaxError as error:
        return {"error": f"only expressions can be evaluated while it is in native code: {error}"}
    except (LookupError, ValueError, RecursionError) as error:
        return {"error": str(error)}
    if not _evaluates.acquire(blocking=False):
        return {"error": "the previous expression has not ended yet"}
    answer: Message = {}
    done = threading.Event()
    background("evaluation", _evaluate, code, frame, answer, done).start()
    if not done.wait(EVALUATION):
        return {"error": f"no result within {EVALUATION:g} s; its thread keeps waiting"}
    return answer


def _evaluate(code: CodeType, frame: FrameType, answer: Message, done: threading.Event) -> None:
    try:
        value = eval(code, frame.f_globals, dict(frame.f_locals))
        # Its text may run code of the job, too.
        text = values.summary(value) if values.is_tensor(value) else repr(value)
        kind = type(value).__name__[: values.MAX_TEXT]
        answer.update(result=text[:_MAX_RESULT], type=kind)
    except BaseException as error:
        answer["error"] = f"{type(error).__name__}: {error}"[:_MAX_RESULT]
    finally:
        _evaluates.release()
        done.set()


def _frame(number: object) -> FrameType:
    """Return the frame that the client knows by a number.

    Raises:
        LookupError: It has returned.
    """
    wanted = debugpy_private.object_id(number)
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if id(frame) == wanted:
                return frame
            frame = frame.f_back
    raise LookupError("the function has returned")


def _children(frame: FrameType, path: list[Any]) -> list[tuple[str, Any]]:
    scope, *places = path
    # A proxy from Python 3.13 on.
    found = dict(frame.f_locals if scope == "locals" else frame.f_globals)
    rows = [(name, value) for name, value in found.items() if not name.startswith("__")]
    for place in places:
        rows = values.children(rows[place][1])
    return rows

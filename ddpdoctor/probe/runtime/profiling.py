"""Profile some steps of a live rank with torch.profiler, for ``ddpdoctor profile``.

The profiler belongs to the training thread, which starts and stops it between two steps. A thread
of ours writes the trace. ``--memory`` records the allocator's history instead.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from typing import Any

from ddpdoctor.probe.runtime import control, events, rank, torch_memory, torch_private
from ddpdoctor.probe.runtime.control import Message
from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.names import PROFILES

MAX_STEPS = 1000
_POLL = 0.02  # Seconds
_FOLDER = re.compile(r"[\w-]{1,64}")

_current: _Profiling | None = None  # One at a time
_is_tracing = False  # Whether our profiler may be on


def profile(message: Message) -> object:
    """Begin the profile that the supervisor asks for. The answer follows later."""
    background("profile", _serve, message).start()
    return control.LATER


def _serve(message: Message) -> None:
    try:
        answer = _profiled(message)
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    control.answer(message, answer)


def _profiled(message: Message) -> Message:
    global _current
    if rank.current() is None:
        return {"trouble": "has not joined its process group"}
    if _current is not None:
        return {"trouble": "is already being profiled"}
    name = str(message["folder"])
    if not _FOLDER.fullmatch(name):
        return {"error": "no such folder"}
    folder = os.path.join(os.environ["DDPDOCTOR_RUN_DIR"], PROFILES, name)
    steps = min(max(1, int(message["steps"])), MAX_STEPS)
    kind = _MemoryHistory if message.get("memory") else _Trace
    _current = _Profiling(kind(), steps)
    try:
        trouble = _current.wait(int(message["step"]), float(message["seconds"]))
        if trouble:
            return {"trouble": trouble}
        os.makedirs(folder, 0o700, exist_ok=True)
        path = os.path.join(folder, f"rank{int(message['rank'])}.{kind.suffix}")
        _current.tool.write(path)
        return {"step": _current.first, "path": path}
    finally:
        _current = None


def forget() -> None:
    """Stop recording operators in a forked child, which would keep them until it ends."""
    global _current
    _current = None
    if _is_tracing:
        _set_tracing(False)
        torch_private.stop_recording(sys.modules["torch"])


def _set_tracing(on: bool) -> None:
    global _is_tracing
    _is_tracing = on


class _Trace:
    """A trace of torch.profiler."""

    suffix = "json"

    def start(self) -> None:
        torch: Any = sys.modules["torch"]
        if torch_private.is_profiling(torch):
            raise RuntimeError("the job profiles itself now")
        self._profile = torch.profiler.profile()
        _set_tracing(True)
        self._profile.start()

    def stop(self) -> None:
        self._profile.stop()
        _set_tracing(False)

    def write(self, path: str) -> None:
        self._profile.export_chrome_trace(path)


class _MemoryHistory:
    """A snapshot of the CUDA allocator with the history of these steps."""

    suffix = "pickle"

    def start(self) -> None:
        torch: Any = sys.modules["torch"]
        if not torch.cuda.is_initialized():
            raise RuntimeError("it does not use CUDA, and torch records no other device's memory")
        if not torch_memory.record_history("all"):
            raise RuntimeError("the job records its memory itself, or this torch cannot")
        self._device = torch.cuda.current_device()

    def stop(self) -> None:
        self._found = torch_memory.snapshot(self._device)
        torch_memory.record_history(None)

    def write(self, path: str) -> None:
        if not torch_memory.keep(self._found, path):
            raise ValueError(f"the snapshot is larger than {torch_memory.MAX_SNAPSHOT >> 20} MiB")


class _Profiling:
    """Some steps, profiled once.

    Args:
        tool: Started before the first step, and stopped after the last one.
        steps: Number of steps.
    """

    def __init__(self, tool: _Trace | _MemoryHistory, steps: int) -> None:
        self.tool = tool
        self.first = 0
        self._steps = steps
        self._lock = threading.Lock()
        self._is_withdrawn = False
        self._is_stopped = False
        self._error = ""
        self._done = threading.Event()

    def wait(self, step: int, seconds: float) -> str:
        """Wait at most ``seconds`` for the steps to end. Return why they did not, or "".

        If they have begun but not ended, the profiler stops after the current step.
        """
        events.before_step(step, self._start, last=True)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._done.wait(_POLL):
                return self._error
            with self._lock:
                if not self.first:
                    # The training thread may have overwritten `due` as the alarm was set.
                    events.due = min(events.due, step)
        with self._lock:
            self._is_withdrawn = True
            what = f"{self._steps} steps" if self.first else "a step"
        if self.first:
            events.before_step(0, self._stop)
        return f"did not end {what} within {seconds:g} s"

    def _start(self) -> None:
        """Start the profiler, on the training thread. Never raise."""
        state = rank.current()
        with self._lock:
            if self._is_withdrawn or state is None:
                return
            self.first = state.tracker.steps
        try:
            self.tool.start()
        except Exception as error:
            self._is_stopped = True
            self._end(str(error) or type(error).__name__)
            return
        events.before_step(self.first + self._steps, self._stop)

    def _stop(self) -> None:
        """Stop the profiler, on the training thread, once. Never raise."""
        if self._is_stopped:
            return
        self._is_stopped = True
        try:
            self.tool.stop()
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")
        else:
            self._end("")

    def _end(self, error: str) -> None:
        self._error = error
        self._done.set()

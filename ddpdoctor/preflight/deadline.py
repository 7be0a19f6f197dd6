"""Time limits: of a check, and of a call that may never come back."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")


class Deadline:
    """Until when a check may run, and whether it has been cancelled.

    Args:
        seconds: From now on.
        parent: What also ends this one when it is cancelled.
    """

    def __init__(self, seconds: float, parent: Deadline | None = None) -> None:
        self._until = time.monotonic() + seconds
        self._cancelled: threading.Event
        self._cancelled = threading.Event() if parent is None else parent._cancelled
        if parent is not None:
            self._until = min(self._until, parent._until)

    def left(self) -> float:
        """Seconds that are left; 0 when it is over or cancelled."""
        return 0.0 if self.cancelled else max(0.0, self._until - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether Ctrl-C was pressed, or the like."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop: this deadline and all that share its parent are over."""
        self._cancelled.set()

    def sleep(self, seconds: float) -> bool:
        """Let time pass; False once it is over or cancelled."""
        self._cancelled.wait(min(seconds, self.left()))
        return self.left() > 0


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """See to it that a process, and all that it started, does not outlive the block.

    It must have been started with ``start_new_session=True``.
    """
    try:
        yield
    finally:
        # The group may have members left when its leader has ended.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for file in (process.stdin, process.stdout, process.stderr):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What a call returns that cannot be interrupted: a name lookup, a file on a dead server.

    It runs on a thread that is left behind if it does not come back. The seconds are those of the
    time that this process gets.

    Raises:
        TimeoutError: It did not come back in time.
        Exception: Whatever the call raised.
    """
    return while_it_goes_on(lambda _: call(), seconds)


def while_it_goes_on(call: Callable[[Callable[[], None]], T], seconds: float) -> T:
    """The same for a call that may go on as long as it reports progress.

    Args:
        call: Takes a function to call whenever it came further.
        seconds: That may pass between two such calls.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    further = threading.Event()

    def run() -> None:
        try:
            answers.append(call(further.set))
        except BaseException as error:  # handed to the caller
            errors.append(error)
        further.set()

    threading.Thread(target=run, daemon=True).start()
    while _waited(further, seconds):
        further.clear()
        if answers:
            return answers[0]
        if errors:
            raise errors[0]
    raise TimeoutError


def waited_for_core() -> float:
    """For how long this thread has waited for a core so far, in seconds; 0 if nothing says so."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


TICK_S = 0.05


def _waited(event: threading.Event, seconds: float) -> bool:
    """Wait for an event for so many seconds of the time that this process gets.

    A tick that comes late, because others have the cores, counts as two at most.
    """
    had = 0.0
    while had < seconds:
        began = time.monotonic()
        if event.wait(min(TICK_S, seconds - had)):
            return True
        had += min(time.monotonic() - began, 2 * TICK_S)
    return event.is_set()

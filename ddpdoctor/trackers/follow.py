"""Follow a run and send it to trackers. ``ddpdoctor run`` starts this in a separate process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top.frame_sources import RunSource
from ddpdoctor.top.frames import WANT_ALL
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.trackers.base import Tracker, numbers_of, open_tracker

INTERVAL = 5.0  # Seconds between two frames of a live run
CLOSE_TIMEOUT = 20.0
"""Seconds to send the end of a run. A supervisor that is still alive ends this process earlier."""


class Sender:
    """Sends frames to one tracker. After an error it stops, and the others go on.

    Args:
        target: As for :func:`open_tracker`.
        say: Takes a line for the user.
    """

    def __init__(self, target: str, say: Callable[[str], None]) -> None:
        self._target = target
        self._say = say
        self._tracker: Tracker | None = None
        self._failed = False
        self._step = -1
        self._sent: set[str] = set()

    def send(self, frame: Snapshot, *, past: bool = False) -> None:
        """Send numbers, if a step has ended since the last ones, and new findings.

        Args:
            frame: A frame of the run.
            past: Whether it shows an earlier time. Trackers without `has_past` skip it.
        """
        self._guarded(partial(self._send, past=past), frame)

    def _send(self, frame: Snapshot, *, past: bool) -> None:
        if self._tracker is None:
            self._tracker = open_tracker(self._target, frame)
        if past and not self._tracker.has_past:
            return
        step = frame.job.step or 0
        if step != self._step and frame.median is not None:
            self._step = step
            self._tracker.numbers(numbers_of(frame), step, frame.time)
        for row in frame.findings:
            if row.finding.id not in self._sent:
                self._sent.add(row.finding.id)
                self._tracker.finding(row.finding, step, row.time or frame.time)

    def close(self, frame: Snapshot) -> None:
        """Send the last frame and the end of the run."""
        self.send(frame)
        self._guarded(self._close, frame)

    def _close(self, frame: Snapshot) -> None:
        if self._tracker is not None:
            self._tracker.close(frame.verdict.text, not frame.exit_status)
            self._say(f"sent to {self._target.partition(':')[0]}: {self._tracker.place}")

    def _guarded(self, part: Callable[[Snapshot], None], frame: Snapshot) -> None:
        if self._failed:
            return
        try:
            part(frame)
        except DoctorError as error:
            self._fail(error.message + (f"; {error.hint}" if error.hint else ""))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        self._failed = True
        name = self._target.partition(":")[0]
        self._say(f"warning: --log-to {name}: {' '.join(why.split())[:500]}; nothing more is sent")


def send_finished(path: Path, targets: Sequence[str], say: Callable[[str], None]) -> None:
    """Send a finished run, step by step as its charts are drawn."""
    senders = [Sender(each, say) for each in targets]
    with contextlib.closing(RunSource(path, INTERVAL)) as source:
        for frame in source.history():
            for sender in senders:
                sender.send(frame, past=True)
        last = source.read(WANT_ALL)
    for sender in senders:
        sender.close(last)


def follow(path: Path, targets: Sequence[str], say: Callable[[str], None]) -> None:
    """Send a live run until its supervisor closes standard input at the end.

    Each tracker has a thread, so that none waits for another.
    """
    senders = [Sender(each, say) for each in targets]
    threads: dict[Sender, threading.Thread] = {}
    with contextlib.closing(LiveSource(path, INTERVAL)) as source:
        while not select.select([0], [], [], INTERVAL)[0]:
            frame = source.read(WANT_ALL)
            for sender in senders:
                # A tracker that is still busy gets the next frame.
                if (thread := threads.get(sender)) is None or not thread.is_alive():
                    threads[sender] = _start(sender.send, frame)
        last = source.read(WANT_ALL)
    deadline = time.monotonic() + CLOSE_TIMEOUT
    for thread in [_start(partial(_close, each, threads.get(each)), last) for each in senders]:
        thread.join(max(0.0, deadline - time.monotonic()))


def _close(sender: Sender, busy: threading.Thread | None, last: Snapshot) -> None:
    """Close a tracker once it has sent its frame."""
    if busy is not None:
        busy.join()
    sender.close(last)


def _start(part: Callable[[Snapshot], None], frame: Snapshot) -> threading.Thread:
    thread = threading.Thread(target=part, args=(frame,), daemon=True)
    thread.start()
    return thread


def main(words: Sequence[str]) -> None:
    """Follow a run: its directory and the targets. Lines for the user go to standard output."""
    # Slurm may signal all processes of a job. The end of the run still has to be sent.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    # Whatever clients print goes to standard error, which is a file in the run directory.
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            print(line, file=output, flush=True)

    try:
        follow(Path(words[0]), words[1:], say)
    except Exception as error:
        say(f"warning: --log-to: {' '.join(str(error).split())[:500]}; nothing more is sent")
    sys.stderr.flush()
    # A client's thread that hangs must not delay the end.
    os._exit(0)

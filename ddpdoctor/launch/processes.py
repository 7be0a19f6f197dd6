"""The processes of a job: finding them all, and ending them.

A process belongs to the job if its environment holds the run's id (inherited at exec, kept across
forks, new sessions and re-parenting), if it descends from one that does, or from the supervisor, or
if it stayed in the session of the job's command. Nothing else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import psutil

from ddpdoctor.probe.watch import MARK


@dataclass(frozen=True)
class Job:
    """How the processes of one job are known.

    Attributes:
        run_id: The value of their `MARK`, or its beginning.
        session: The session of the job's command, which is its leader's pid; None if not started.
        ancestor: A process whose descendants all belong to the job: the supervisor itself.
        spared: Processes that are not the job's all the same: the guards.
    """

    run_id: str
    session: int | None = None
    ancestor: int | None = None
    spared: frozenset[int] = frozenset()

    def processes(self) -> list[psutil.Process]:
        """All live processes of the job."""
        every: dict[int, psutil.Process] = {}
        parents: dict[int, int] = {}
        mine: set[int] = set()
        for process in psutil.process_iter():
            try:
                with process.oneshot():
                    parents[process.pid] = process.ppid()
                    if process.status() == psutil.STATUS_ZOMBIE:
                        continue
                every[process.pid] = process
                if self._is_marked(process):
                    mine.add(process.pid)
            except (psutil.Error, OSError):
                continue
        roots = mine | ({self.ancestor} if self.ancestor is not None else set())
        skip = self.spared | {os.getpid()}
        return [
            process
            for pid, process in every.items()
            if pid not in skip and (pid in mine or _descends(pid, roots, self.spared, parents))
        ]

    def _is_marked(self, process: psutil.Process) -> bool:
        if self.session is not None:
            with contextlib.suppress(OSError):
                if os.getsid(process.pid) == self.session:
                    return True
        if process.uids().real != os.getuid():
            return False
        mark = process.environ().get(MARK, "")
        return mark == self.run_id or mark.startswith(f"{self.run_id}/")


def _descends(
    pid: int, roots: Collection[int], barriers: Collection[int], parents: Mapping[int, int]
) -> bool:
    """Whether ``pid`` has an ancestor among ``roots``, with no barrier in between."""
    seen = set()
    while pid in parents and pid not in seen:
        seen.add(pid)
        pid = parents[pid]
        if pid in barriers:
            return False
        if pid in roots:
            return True
    return False


def describe(process: psutil.Process) -> str:
    """A process in a few words, for a person: ``python train.py (pid 4711)``."""
    try:
        words = process.cmdline()
    except psutil.Error:
        words = []
    words = [os.path.basename(words[0]), *words[1:]] if words else ["a process"]
    text = " ".join(words)
    return f"{text[:60]}{'...' if len(text) > 60 else ''} (pid {process.pid})"


def end(
    job: Job,
    *,
    patience: float = 0.0,
    soft: float = 3.0,
    idle: Callable[[float], None] = time.sleep,
) -> list[str]:
    """End every process of a job, whatever it does about it.

    Args:
        job: Whose processes.
        patience: Seconds in which they may still end by themselves.
        soft: Seconds between SIGTERM and SIGKILL.
        idle: Called to let time pass; reaps children where the caller is their parent.

    Returns:
        The processes that had to be ended, described.
    """
    left = job.processes()
    deadline = time.monotonic() + patience
    while left and time.monotonic() < deadline:
        idle(0.1)
        left = job.processes()
    ended = [describe(process) for process in left]
    for signal_number, wait in ((signal.SIGTERM, soft), (signal.SIGKILL, 2.0)):
        if not left:
            break
        deadline = time.monotonic() + wait
        for process in left:
            _signal(process, signal_number)
        while left and time.monotonic() < deadline:
            idle(0.05)
            left = job.processes()
    for process in left:
        # Born while we were killing its parents.
        _signal(process, signal.SIGKILL)
    return ended


def _signal(process: psutil.Process, signal_number: int) -> None:
    # psutil compares the start time first: a pid that was given away is not signalled.
    with contextlib.suppress(psutil.Error, OSError):
        process.send_signal(signal_number)

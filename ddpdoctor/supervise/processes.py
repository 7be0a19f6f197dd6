"""Find all processes of a job, and end them.

A process belongs to the job if it descends from a keeper (`ddpdoctor.supervise.keeper`) or from the
supervisor. They are subreapers, so this stays true for every orphan below them. If none of them is
left, a process is recognized by the run's id in its environment, or because it was seen below them.
No other process is ever signaled.

We do not use a control group. It would also need a live process to empty it, and the job would see
a different ``/proc/self/cgroup`` and different limits than without ddpdoctor.

Standard library only, because a keeper is a bare interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from ddpdoctor.run.names import MARK
from ddpdoctor.system import proc
from ddpdoctor.system.proc import pause


class Process(NamedTuple):
    """A process as the kernel lists it."""

    pid: int
    parent: int
    state: str  # One letter: R, S, D, T (stopped), Z (zombie), ...
    group: int
    started: object
    """Start time in the system's unit. Together with the pid it identifies a process."""


class Job(NamedTuple):
    """Identifies the processes of one job."""

    run_id: str  # The value of their `MARK`, or its beginning
    ancestors: frozenset[int] = frozenset()  # Processes whose descendants all belong to the job
    known: frozenset[Process] = frozenset()
    """Processes that belong to the job, like their descendants."""
    spared: frozenset[int] = frozenset()
    """Processes that do not belong to the job: the supervisor, the keepers."""
    helpers: frozenset[int] = frozenset()
    """Processes that do not belong to the job, like their descendants."""

    def processes(self) -> list[Process]:
        """Return all live processes of the job."""
        if self.ancestors and not self.known:
            pids = below(self.ancestors)
        else:
            known = {(process.pid, process.started) for process in self.known}
            pids = {
                process.pid
                for process in listed()
                if (process.pid, process.started) in known or _is_marked(process.pid, self.run_id)
            }
            pids |= below(pids)
        spared = self.spared | self.ancestors | {os.getpid()}
        if self.helpers:
            # Last, because a helper may just have started a process.
            spared |= self.helpers | below(self.helpers)
        found = map(_read, pids - spared)
        return [each for each in found if each is not None and each.state not in proc.ENDED]


def below(roots: Collection[int]) -> set[int]:
    """Return the pids of all descendants of some processes."""
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return proc.below(roots)
    # A kernel without this file, or macOS.
    parents = {process.pid: process.parent for process in listed()}
    found: set[int] = set()
    while new := {pid for pid, parent in parents.items() if parent in found | {*roots}} - found:
        found |= new
    return found


def listed() -> Iterator[Process]:
    """Yield all processes of this machine."""
    if os.path.exists("/proc/self"):
        yield from (each for each in map(_read, proc.pids()) if each is not None)
        return
    # macOS
    import subprocess

    words = ["ps", "-axo", "pid=,ppid=,stat=,pgid=,lstart="]
    with contextlib.suppress(OSError, ValueError):
        for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines():
            pid, parent, state, group, started = line.split(None, 4)
            yield Process(int(pid), int(parent), state[0], int(group), started)


def _read(pid: int) -> Process | None:
    stat = proc.read_stat(pid)
    if stat is None:
        return None
    return Process(pid, stat.parent, stat.letter, stat.group, stat.start)


def _is_marked(pid: int, run_id: str) -> bool:
    """Return whether a process of this user has the run's id in its environment."""
    try:
        mine = os.stat(f"/proc/{pid}/environ").st_uid == os.getuid()
    except OSError:
        return False
    mark = proc.environ(pid).get(MARK, "") if mine else ""
    return mark == run_id or mark.startswith(run_id + "/")


def end(
    job: Job, *, patience: float = 0.0, soft: float = 3.0, idle: Callable[[float], None] = pause
) -> list[str]:
    """End all processes of a job. Return descriptions of those that did not end by themselves.

    They have ``patience`` seconds for that, and ``soft`` seconds between SIGTERM and SIGKILL.
    ``idle`` waits, and reaps children if the caller is their parent.
    """
    left = job.processes()
    deadline = time.monotonic() + patience
    while left and time.monotonic() < deadline:
        idle(0.1)
        left = job.processes()
    ended = [proc.described(process.pid) for process in left]
    for process in left:
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + soft
    while left and time.monotonic() < deadline:
        idle(0.05)
        left = job.processes()
    deadline = time.monotonic() + 2.0
    while left and time.monotonic() < deadline:
        # List them again each time, because one may start while its parent is being killed.
        for process in left:
            send(process, signal.SIGKILL)
        idle(0.05)
        left = job.processes()
    return ended


def send(process: Process, number: int) -> bool:
    """Signal a process, but never another one with its pid. Returns whether it existed."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except (AttributeError, OSError):
        descriptor = -1
    try:
        now = _read(process.pid)
        if now is not None and now.started != process.started:
            return False
        if descriptor >= 0:
            signal.pidfd_send_signal(descriptor, number)
        else:
            os.kill(process.pid, number)
    except OSError:
        return False
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return True

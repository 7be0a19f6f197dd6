"""Find all processes of a job, and end them.

A process belongs to the job if it descends from a keeper (`ddpdoctor.supervise.keeper`) or from the
supervisor, which the kernel keeps true for every orphan below them, since they are subreapers. Only
where none of them is left, a process is known by the run's id in its environment, or because it was
seen below them. Nothing else is ever signalled.

No control group is used: it, too, needs somebody alive to empty it, and the job would see another
``/proc/self/cgroup`` and other limits than without ddpdoctor.

Standard library only, since a keeper is a bare interpreter.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple

from ddpdoctor.run.names import MARK
from ddpdoctor.system import proc
from ddpdoctor.system.proc import pause


class Process(NamedTuple):
    """A process as the kernel lists it."""

    pid: int
    parent: int
    state: str
    """One letter: R, S, D, T (stopped), Z (zombie)..."""
    group: int
    started: object
    """When, as the system says it; with the pid it identifies a process for good."""


class Job(NamedTuple):
    """How the processes of one job are known.

    Attributes:
        run_id: The value of their `MARK`, or its beginning.
        ancestors: Processes whose descendants all belong to the job.
        known: Processes that were seen to belong to it; their descendants do, too.
        spared: Processes that are not the job's all the same: the supervisor, the keepers.
    """

    run_id: str
    ancestors: frozenset[int] = frozenset()
    known: frozenset[Process] = frozenset()
    spared: frozenset[int] = frozenset()

    def processes(self) -> list[Process]:
        """All live processes of the job."""
        pids = self._seen() if self.known or not self.ancestors else below(self.ancestors)
        found = map(_read, pids - self.spared - self.ancestors - {os.getpid()})
        return [each for each in found if each is not None and each.state not in proc.ENDED]

    def _seen(self) -> set[int]:
        """Those without an ancestor that is known to be of this job and nothing else."""
        known = {(process.pid, process.started) for process in self.known}
        mine = {
            process.pid
            for process in listed()
            if (process.pid, process.started) in known or _is_marked(process.pid, self.run_id)
        }
        return mine | below(mine)


def below(roots: Collection[int]) -> set[int]:
    """The pids of all descendants of some processes."""
    if os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
        return proc.below(roots)
    every = {process.pid: process for process in listed()}
    return {pid for pid in every if _descends(pid, roots, every)}


def listed() -> Iterator[Process]:
    """All processes of this machine."""
    if not os.path.exists("/proc/self"):
        yield from _listed_by_ps()
    yield from (each for each in map(_read, proc.pids()) if each is not None)


def _read(pid: int) -> Process | None:
    stat = proc.read_stat(pid)
    if stat is None:
        return None
    return Process(pid, stat.parent, stat.letter, stat.group, stat.start)


def _listed_by_ps() -> Iterator[Process]:
    """Where there is no ``/proc``: macOS."""
    import subprocess

    words = ["ps", "-axo", "pid=,ppid=,stat=,pgid=,lstart="]
    with contextlib.suppress(OSError, ValueError):
        for line in subprocess.run(words, capture_output=True, text=True).stdout.splitlines():
            pid, parent, state, group, started = line.split(None, 4)
            yield Process(int(pid), int(parent), state[0], int(group), started)


def _is_marked(pid: int, run_id: str) -> bool:
    """Whether a process of this user's carries the run's id."""
    try:
        mine = os.stat(f"/proc/{pid}/environ").st_uid == os.getuid()
    except OSError:
        return False
    mark = proc.environ(pid).get(MARK, "") if mine else ""
    return mark == run_id or mark.startswith(run_id + "/")


def _descends(pid: int, roots: Collection[int], every: Mapping[int, Process]) -> bool:
    seen = set()
    while pid in every and pid not in seen:
        seen.add(pid)
        pid = every[pid].parent
        if pid in roots:
            return True
    return False


def end(
    job: Job,
    *,
    patience: float = 0.0,
    soft: float = 3.0,
    idle: Callable[[float], None] = pause,
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
    ended = [proc.described(process.pid) for process in left]
    for process in left:
        send(process, signal.SIGTERM)
    deadline = time.monotonic() + soft
    while left and time.monotonic() < deadline:
        idle(0.05)
        left = job.processes()
    deadline = time.monotonic() + 2.0
    while left and time.monotonic() < deadline:
        # Each time all of them: one may be born while its parent is being killed.
        for process in left:
            send(process, signal.SIGKILL)
        idle(0.05)
        left = job.processes()
    return ended


def send(process: Process, number: int) -> bool:
    """Signal a process, never another one that was given its pid since; whether it was there."""
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

"""Watches rank processes: when each ended, how, and what it left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpdoctor.run.environment import namespace
from ddpdoctor.run.records.supervisor import RankExitRecord
from ddpdoctor.system import proc
from ddpdoctor.system.oom import OomWatch

if TYPE_CHECKING:
    import psutil

    from ddpdoctor.run.snapshot import Run

LEFTOVER_PATIENCE = 4.0
"""Seconds that a dead rank's DataLoader worker has to notice by itself.

torch's workers look every 5 seconds, one that is stuck never does, and all must be gone in 10.
"""

LEFTOVER_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for one that did not."""


@dataclass
class _Watched:
    rank: int
    restart: int
    pid: int
    descriptor: int
    leads_session: bool
    children: set[int] = field(default_factory=set)


class RankWatch:
    """Knows the rank processes of a run by their pidfds.

    A rank is torchrun's child, not ours, so its exit status is read from its zombie, in the moment
    between its end and torchrun's ``wait``. Where that moment is missed the status stays unknown.
    """

    def __init__(self) -> None:
        self._oom = OomWatch()
        self._namespace = namespace()
        self._watched: dict[int, _Watched] = {}
        self._known: set[tuple[int, int]] = set()
        self._dead: dict[int, set[int]] = {}
        self._leftovers: dict[int, tuple[float, psutil.Process, bool]] = {}

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when a rank ends."""
        return list(self._watched)

    def follow(self, run: Run) -> Iterator[RankExitRecord]:
        """Start watching the ranks that are new in ``run``; the records of those already gone."""
        for rank in run.ranks:
            key = (rank.rank, rank.restart)
            if key in self._known or rank.status is None:
                continue
            place = rank.opened.namespace
            if place not in (None, self._namespace):
                # On another machine or in another container: its pids are not ours.
                self._known.add(key)
                continue
            self._known.add(key)
            pid = rank.status.pid
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead[pid] = set()
                yield _exit_record(rank.rank, rank.restart, pid, None, self._oom.kernel_says(pid))
                continue
            except (AttributeError, OSError):
                continue
            self._watched[descriptor] = _Watched(
                rank=rank.rank,
                restart=rank.restart,
                pid=pid,
                descriptor=descriptor,
                leads_session=proc.session_of(pid) == pid,
            )

    def note_children(self) -> None:
        """Remember the children of ranks that share their session with others.

        Under torchrun a rank leads its own session, which its workers keep when it dies.
        """
        for watched in self._watched.values():
            if not watched.leads_session:
                watched.children |= proc.children(watched.pid)

    def ended(self, descriptor: int) -> RankExitRecord:
        """A rank's end, as a record; call it as soon as its descriptor is readable."""
        watched = self._watched.pop(descriptor)
        status = proc.zombie_status(watched.pid)
        os.close(descriptor)
        if status != 0:
            # What a rank that ended well has put in the background may finish while others train.
            self._dead[watched.pid] = watched.children
        oom = ""
        if status == -signal.SIGKILL:
            oom = self._oom.verdict(watched.pid)
        elif status is None:
            oom = self._oom.kernel_says(watched.pid)
        return _exit_record(watched.rank, watched.restart, watched.pid, status, oom)

    def end_leftovers(self, keepers: Iterable[int]) -> None:
        """End the processes of dead ranks that had their time.

        The keepers adopt them, or the supervisor. A rank's worker keeps the rank's session; a
        program that the job put in the background on purpose has its own.
        """
        if not self._dead:
            return
        import psutil

        now = time.monotonic()
        adopted = set().union(*(proc.children(pid) for pid in (os.getpid(), *keepers)))
        for pid in adopted - self._leftovers.keys():
            session = proc.session_of(pid)
            if session in self._dead or any(pid in known for known in self._dead.values()):
                with contextlib.suppress(psutil.Error):
                    self._leftovers[pid] = (now + LEFTOVER_PATIENCE, psutil.Process(pid), False)
        for pid, (due, process, asked) in list(self._leftovers.items()):
            try:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    del self._leftovers[pid]
                elif now >= due and asked:
                    process.kill()
                elif now >= due:
                    process.terminate()
                    self._leftovers[pid] = (now + LEFTOVER_GRACE, process, True)
            except psutil.Error:
                del self._leftovers[pid]


def _exit_record(rank: int, restart: int, pid: int, status: int | None, oom: str) -> RankExitRecord:
    """How a rank's process ended; ``status`` is None where it was not seen."""
    return RankExitRecord(
        time=time.time_ns(), rank=rank, restart=restart, pid=pid, status=status, oom=oom
    )

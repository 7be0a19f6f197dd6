"""The supervisor's eye on jobs that stand still: when to look, and what became of it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from ddpdoctor import rundir
from ddpdoctor.finding import Finding, Severity
from ddpdoctor.launch.hangs import activity, examination
from ddpdoctor.launch.hangs.signs import FIRST, LEAST, Signs, Still
from ddpdoctor.probe.asking import Asking
from ddpdoctor.record import Phase, Record
from ddpdoctor.run import HANG, Run

AGAIN = 2.0
"""How much longer the job has stood still, as a factor, when it is looked at again."""

MOST_FILES = 8
"""Examinations whose files are kept: the first one and the newest."""

SETTLE = 2.0
"""Seconds in which a rank that moved may turn out to have failed."""

LAST = 3.0
"""Seconds that an examination may still take when the job has ended."""

IDLE = 3.0
"""Seconds without CPU time after which a job is not starting any more, but waits."""

BUSY = 0.2
"""Cores that a job uses at least while it is still starting."""

_GIVES_UP = ("error", "exit", "rank_exit", "end")
_OF_HANGS = ("DDP4", "DDP8", "DDP109")
"""Families of findings that say why a job stands still."""


class Speaker(Protocol):
    """Where words go."""

    def note(self, text: str) -> None:
        """Say what ddpdoctor does; not with ``--quiet``."""


class HangWatch:
    """Looks at a job that gives no sign of life, and again when the picture changes.

    Args:
        directory: The run directory.
        hang_after: Seconds, if a person named them.
        write: Writes a record of the supervisor.
        speaker: Says that the job goes on again.
        wake: Wakes the supervisor's loop.

    Raises:
        OSError: The file by which ranks are asked cannot be made.
    """

    def __init__(
        self,
        directory: Path,
        hang_after: float | None,
        write: Callable[[Record], None],
        speaker: Speaker,
        wake: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._write = write
        self._speaker = speaker
        self._wake = wake
        self._asking = Asking(str(directory))
        self._signs = Signs(hang_after)
        self._base = hang_after if hang_after is not None else LEAST
        self._number = 0
        self._started = time.monotonic()
        self._pid: int | None = None
        self._cpu: tuple[float, float] | None = None
        """Since when the job's CPU time is watched, and what it was (see :meth:`_starting`)."""
        self._thread: threading.Thread | None = None
        self._found: Record | None = None
        self._hung: Still | None = None
        self._marks: dict[int, float] = {}
        self._before: dict[int, Record] = {}
        self._native: dict[int, Record] = {}
        """The stacks with native frames of ranks that were to blame, by rank."""
        self._below = 0
        """The examination for which native frames were looked at."""
        self._dead = 0
        self._next = 0.0
        self._moved: float | None = None
        self._said = False
        """Something was said of why the job stands still."""
        self._ended = False

    def begin(self, pid: int) -> None:
        """The job's command has started as process ``pid``."""
        self._pid = pid
        self._started = time.monotonic()

    def look(self, run: Run) -> bool:
        """Take in a snapshot.

        Returns:
            Whether the rules should look now: an examination is done, or the job goes on.
        """
        if self._ended or run.stopped_at is not None:
            return False
        now = time.monotonic()
        if self._thread is not None:
            if self._thread.is_alive():
                return False
            self._thread = None
            return not self._look_below(run) and self._examined(run)
        still = self._signs.look(run, now) if run.ranks else self._before_any_rank(run, now)
        if self._hung is not None and self._goes_on(run, now):
            return True
        if still is None or self._excused(run, still, now):
            return False
        dead = sum(rank.exit is not None for rank in run.last)
        if self._hung is None or now >= self._next or dead != self._dead:
            self._dead = dead
            self._examine(run, still)
        return False

    def end(self, run: Run, status: int) -> None:
        """The job has ended, with that exit status."""
        if self._thread is not None:
            self._thread.join(LAST)
            self._thread = None
            self._examined(run)
        since = self._found["time"] if self._found is not None else 0
        gave_up = self._ended and _failed(run, since, ("error",))
        if self._hung is not None and status == 0 and not gave_up:
            # It did come to its end.
            self._write({"kind": "hang_over", "time": time.time_ns(), "number": self._number})
        self._ended = True

    def close(self) -> None:
        """Let go of the file by which ranks are asked."""
        self._asking.close()

    # -- when

    def _before_any_rank(self, run: Run, now: float) -> Still | None:
        quiet = now - self._started
        ended = any(each["kind"] in ("error", "exit") for each in run.strays)
        if ended or quiet < self._base:
            return None
        return Still(quiet, self._base, (), True, True)

    def _excused(self, run: Run, still: Still, now: float) -> bool:
        """Whether there is a good reason: a debugger, or a first step that takes its time."""
        if any(end == 1 << 63 for _, end in run.debugged):
            return True
        if not still.fresh or still.seconds >= FIRST * still.limit:
            return False
        return self._starting(now)

    def _starting(self, now: float) -> bool:
        """Whether the job works on its first step: processes of it use the CPU."""
        if self._pid is None:
            return False
        cpu = activity.cpu_of_tree(self._pid)
        if self._cpu is None:
            self._cpu = (now, cpu)
            return True
        since, before = self._cpu
        if now - since < IDLE:
            return True
        self._cpu = (now, cpu)
        return cpu - before >= BUSY * (now - since)

    def _goes_on(self, run: Run, now: float) -> bool:
        """Whether the ranks that stood still move again, for good."""
        hung = self._hung
        assert hung is not None
        marks = self._signs.marks(hung.ranks)
        moved = any(marks.get(rank, mark) > mark for rank, mark in self._marks.items())
        if not hung.ranks:
            moved = bool(run.ranks)
        if not moved:
            return False
        if self._moved is None:
            self._moved = now
        if now - self._moved < SETTLE:
            return False
        self._moved = None
        since = self._found["time"] if self._found is not None else 0
        if _failed(run, since):
            # Not going on but giving up: what was found is why.
            self._ended = True
            return False
        seconds = now - SETTLE - min(self._marks.values(), default=self._started)
        self._write({"kind": "hang_over", "time": time.time_ns(), "number": self._number})
        if self._said:
            self._speaker.note(f"the job goes on again after it stood still for {seconds:.0f} s")
        self._hung, self._found, self._marks, self._said = None, None, {}, False
        return True

    # -- the examination

    def _examine(self, run: Run, still: Still) -> None:
        self._number += 1
        self._hung = still
        self._marks = self._signs.marks(still.ranks)
        self._next = time.monotonic() + max(still.seconds * (AGAIN - 1), 2.0)
        self._asking.ask(self._number)
        waiting = [
            rank.rank
            for rank in run.last
            if rank.status is not None and rank.status.phase in (Phase.WAIT, Phase.BACKWARD)
        ]
        self._work(partial(self._gather, run, still, self._number, waiting))

    def _work(self, gather: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=gather, name="examination", daemon=True)
        self._thread.start()

    def _gather(self, run: Run, still: Still, number: int, waiting: list[int]) -> None:
        record: Record = {
            "kind": "hang",
            "time": time.time_ns(),
            "number": number,
            "restart": run.restarts[-1],
            "seconds": round(still.seconds, 1),
            "everybody": still.everybody,
            "fresh": still.fresh,
        }
        try:
            ranks = examination.examine(run, number, waiting, self._before)
            self._before = {record["rank"]: record for record in ranks}
            record["file"] = f"hang-{number:04d}.json"
            self._put(record)
        except Exception as error:
            # Said, and the job goes on.
            record["trouble"] = repr(error)
            record.pop("file", None)
        self._found = record
        self._wake()

    def _put(self, record: Record) -> None:
        told = {**record, "ranks": [self._before[rank] for rank in sorted(self._before)]}
        text = json.dumps(told, separators=(",", ":"), default=str)
        rundir.put(self._directory / record["file"], text.encode())

    def _look_below(self, run: Run) -> bool:
        """Whether the native frames of those who are to blame for sure are looked at first.

        py-spy, where it is installed, holds each for a second or two; the job stands still anyway.
        """
        found = self._found
        if found is None or "file" not in found or self._below == self._number:
            return False
        from ddpdoctor.rules.diagnosis import guilty

        self._below = self._number
        ranks = guilty(replace(run, supervisor=(*run.supervisor, found)))
        if ranks:
            self._work(partial(self._hold, found, ranks))
        return bool(ranks)

    def _hold(self, found: Record, ranks: frozenset[int]) -> None:
        with contextlib.suppress(Exception):
            examination.add_native(self._before.values(), ranks, self._native)
            self._put(found)
        self._wake()

    def _examined(self, run: Run) -> bool:
        if self._found is None:
            return False
        self._write(self._found)
        self._forget_files()
        return True

    def _forget_files(self) -> None:
        files = sorted(self._directory.glob(HANG))
        for old in files[1 : -MOST_FILES + 1]:
            with contextlib.suppress(OSError):
                old.unlink()

    def judged(self, findings: Iterable[Finding]) -> bool:
        """Take in what the rules found; whether the job hangs for sure."""
        if self._hung is None or self._found is None:
            return False
        told = [each for each in findings if each.code.startswith(_OF_HANGS)]
        self._said |= bool(told)
        return self._moved is None and any(each.severity >= Severity.ERROR for each in told)


def _failed(run: Run, since: int, kinds: tuple[str, ...] = _GIVES_UP) -> bool:
    """Whether a process of the job has failed or ended since (Unix nanoseconds)."""
    records = [
        record
        for rank in run.last
        for record in (*rank.records, *([rank.exit] if rank.exit is not None else ()))
    ]
    return any(record.get("kind") in kinds and record.get("time", 0) >= since for record in records)

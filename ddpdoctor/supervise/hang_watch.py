"""Watch for jobs that make no progress: when to examine them, and what became of it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.opening import integer
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.run import rundir
from ddpdoctor.run.mapped import Asking
from ddpdoctor.run.records.base import JsonObject, Record, as_json, json_line
from ddpdoctor.run.records.process import EndRecord, ErrorRecord, ExitRecord
from ddpdoctor.run.records.supervisor import HangOverRecord, HangRecord, RankExitRecord
from ddpdoctor.run.snapshot import HANG, Records, Run
from ddpdoctor.supervise import hang_examination, nccl_ras
from ddpdoctor.supervise.hang_signs import (
    FIRST,
    LEAST,
    Cores,
    Signs,
    Start,
    Still,
    is_loaded,
    waits,
)
from ddpdoctor.system.proc import pause

AGAIN = 2.0
"""How much longer the job has stood still, as a factor, when it is looked at again."""

MOST_FILES = 8
"""Examinations whose files are kept: the first one and the newest."""

SETTLE = 2.0
"""Seconds in which a rank that moved may turn out to have failed."""

LAST = 3.0
"""Seconds that an examination may still take when the job has ended."""

CONFIRM = 2.0
"""Seconds until those that are to blame are looked at again, where processes lack cores."""

_GIVES_UP = (ErrorRecord, ExitRecord, RankExitRecord, EndRecord)
_OF_HANGS = ("DDP4", "DDP8", "DDP109")
"""Families of findings that say why a job hangs."""


class HangWatch:
    """Looks at a job that gives no sign of life, and again when the picture changes.

    Args:
        directory: The run directory.
        asking: By which ranks are asked for their stacks.
        hang_after: Seconds, if a person named them.
        write: Writes a record of the supervisor.
        note: Says that the job goes on again.
        wake: Wakes the supervisor's loop.
    """

    def __init__(
        self,
        directory: Path,
        asking: Asking,
        hang_after: float | None,
        write: Callable[[Record], None],
        note: Callable[[str], None],
        wake: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._write = write
        self._note = note
        self._wake = wake
        self._asking = asking
        self._cores = Cores()
        self._signs = Signs(hang_after, self._cores.lost_by)
        self._start = Start(hang_after if hang_after is not None else LEAST)
        self._number = 0
        self._thread: threading.Thread | None = None
        self._found: HangRecord | None = None
        self._pending = False
        """What was found is not written yet."""
        self._written = False
        """Something that was found of this hang is."""
        self._hung: Still | None = None
        self._marks: dict[int, float] = {}
        self._before: dict[int, JsonObject] = {}
        self._native: dict[int, JsonObject] = {}
        """The stacks with native frames of ranks that were to blame, by rank."""
        self._seen: dict[int, hang_examination.Seen] = {}
        """The processes of the ranks when they were looked at last."""
        self._confirmed = 0
        """The examination after which those to blame were looked at again."""
        self._below = 0
        """The examination for which native frames were looked at."""
        self._dead = 0
        self._next = 0.0
        self._moved: float | None = None
        self._said = False
        """A finding has said why the job hangs."""
        self._by_calls = False
        """What the ranks called says that it hangs, wherever they stand when looked at again."""
        self._ended = False

    def begin(self, pid: int) -> None:
        """The job's command has started as process ``pid``."""
        self._start.begin(pid)

    def slept(self, seconds: float) -> None:
        """The whole job, and this process, were stopped for so long."""
        self._signs.slept(seconds)
        self._start.slept(seconds)
        self._next += seconds

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
                self._note_move(run, now)
                return False
            self._thread = None
            # First: py-spy would hold a rank that goes on.
            if not self._stands(run, now) or self._look_below(run) or self._doubts(run):
                return False
            return self._examined(run)
        still = self._signs.look(run, now) if run.ranks else self._start.silence(run, now)
        for record in self._cores.records(run):
            self._write(record)
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
        if self._pending:
            self._examined(run)
        gave_up = self._ended and _failed(run, self._examined_at, (ErrorRecord,))
        if self._hung is not None and status == 0 and not gave_up:
            # It did come to its end.
            self._write(HangOverRecord(time=time.time_ns(), number=self._number))
        self._ended = True

    def close(self) -> None:
        """Let go of the file by which ranks are asked."""
        self._asking.close()

    @property
    def _examined_at(self) -> int:
        """When what was found was seen (Unix nanoseconds); 0 if nothing was."""
        return self._found.time if self._found is not None else 0

    # -- when

    def _excused(self, run: Run, still: Still, now: float) -> bool:
        """Whether there is a good reason: a debugger, or a first step that takes its time."""
        if any(end == 1 << 63 for _, end in run.debugged):
            return True
        if not still.fresh or still.seconds >= FIRST * still.limit:
            return False
        return self._start.works(now)

    def _goes_on(self, run: Run, now: float) -> bool:
        """Whether the ranks that stood still move again, for good."""
        hung = self._hung
        assert hung is not None
        if not (self._has_moved() if hung.ranks else run.ranks):
            return False
        if self._moved is None:
            self._moved = now
        if now - self._moved < SETTLE:
            return False
        self._moved = None
        if hung.ranks and _failed(run, self._examined_at):
            # Not going on but giving up: what was found is why. A start that came to ranks was
            # only slow, whatever becomes of them.
            self._ended = True
            return self._pending and self._examined(run)
        seconds = now - SETTLE - min(self._marks.values(), default=self._start.began)
        if self._said:
            self._note(f"the job runs again after no progress for {seconds:.0f} s")
        self._over()
        return True

    def _note_move(self, run: Run, now: float) -> None:
        """An examination takes seconds on a busy machine: since when the job goes on meanwhile."""
        if self._hung is not None and self._hung.ranks:
            self._signs.look(run, now)
            self._moved = self._moved or (now if self._has_moved() else None)

    def _has_moved(self) -> bool:
        """Whether a rank of those that stood still has given a sign since."""
        marks = self._signs.marks(tuple(self._marks))
        return any(marks.get(rank, mark) > mark for rank, mark in self._marks.items())

    # -- the examination

    def _examine(self, run: Run, still: Still) -> None:
        self._number += 1
        self._hung, self._moved = still, None
        self._marks = self._signs.marks(still.ranks)
        self._next = time.monotonic() + max(still.seconds * (AGAIN - 1), 2.0)
        self._asking.ask(self._number)
        waiting = [rank.rank for rank in run.last if waits(rank)]
        self._work(partial(self._gather, run, still, self._number, waiting))

    def _work(self, gather: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=gather, name="examination", daemon=True)
        self._thread.start()

    def _gather(self, run: Run, still: Still, number: int, waiting: list[int]) -> None:
        found = HangRecord(
            time=time.time_ns(),
            number=number,
            restart=run.restarts[-1],
            seconds=round(still.seconds, 1),
            everybody=still.everybody,
            fresh=still.fresh,
            limit=round(still.limit, 1),
        )
        try:
            nccl = nccl_ras.asked(run)
            ranks = hang_examination.examine(
                run, number, waiting, self._before, self._seen, self._start.pid, still.lost
            )
            self._before = {each["rank"]: each for each in ranks}
            works = any(each.get("launcher_works") for each in ranks)
            whole = replace(found, launcher_works=works, ras=nccl(), file=f"hang-{number:04d}.json")
            self._put(whole)
            found = whole
        except Exception as error:
            # Said, and the job goes on.
            found = replace(found, trouble=repr(error))
        self._found, self._pending = found, True
        self._wake()

    def _put(self, found: HangRecord) -> None:
        ranks = tuple(self._before[rank] for rank in sorted(self._before))
        line = json_line(as_json(replace(found, ranks=ranks)))
        rundir.put(self._directory / found.file, line)

    def _look_below(self, run: Run) -> bool:
        """Whether the native frames of those who are to blame for sure are looked at first.

        py-spy, where it is installed, holds each for a second or two; the job does nothing anyway.
        """
        found = self._found
        if found is None or not found.file or self._below == self._number:
            return False
        self._below = self._number
        ranks = self._guilty(run)
        if ranks:
            self._work(partial(self._hold, found, ranks))
        return bool(ranks)

    def _hold(self, found: HangRecord, ranks: frozenset[int]) -> None:
        with contextlib.suppress(Exception):
            hang_examination.add_native(self._before.values(), ranks, self._native)
            self._put(found)
        self._wake()

    # -- whether it is still true

    def _guilty(self, run: Run) -> frozenset[int]:
        """Who is to blame for sure, by what was found."""
        from ddpdoctor.diagnose.hangs.rules_diagnosis import guilty

        if self._found is None:
            return frozenset()
        return guilty(replace(run, supervisor=Records((*run.supervisor, self._found))))

    def _doubts(self, run: Run) -> bool:
        """Whether those to blame are looked at once more before it is said.

        Not on a machine that idles: there a second shows who does nothing.
        """
        hung = self._hung
        if hung is None or self._confirmed == self._number or self._found is None:
            return False
        loaded = any(lost > 0.1 * hung.seconds for lost in hung.lost.values())
        if not self._found.file or not (loaded or is_loaded()):
            return False
        self._confirmed = self._number
        if not self._guilty(run):
            return False
        self._work(partial(self._look_again, run, CONFIRM))
        return True

    def _look_again(self, run: Run, after: float = 0.0) -> None:
        """Look once more at what was found, and put it into the run directory."""
        pause(after)
        if (found := self._found) is None:
            return
        with contextlib.suppress(Exception):
            hang_examination.look_again(run, self._before, self._seen)
            self._put(found)
        if after:
            self._wake()

    def _stands(self, run: Run, now: float) -> bool:
        """Whether the ranks are where they were when they were examined."""
        if run.ranks:
            self._signs.look(run, now)
        if self._has_moved():
            # What becomes of it is seen in a moment.
            return False
        if _ended_well(run, self._guilty(run), self._examined_at):
            # It was only slow to end.
            self._over()
            return False
        return True

    def _over(self) -> None:
        """What was found is not true any more."""
        if self._written or not self._pending:
            self._write(HangOverRecord(time=time.time_ns(), number=self._number))
        self._hung, self._found, self._marks, self._said = None, None, {}, False
        self._pending = self._written = False

    def confirmed(self, run: Run) -> bool:
        """Whether a job that hung for sure still does; ``run`` is a new snapshot."""
        found = self._found
        if found is None or self._thread is not None or not self._stands(run, time.monotonic()):
            return False
        if not found.file or self._by_calls:
            return True
        self._look_again(run)
        if self._guilty(run):
            return True
        # It is looked at again soon.
        self._next = time.monotonic() + CONFIRM
        return False

    def _examined(self, run: Run) -> bool:
        if self._found is None:
            return False
        self._pending = False
        if self._written and self._gave_up():
            # What was found before is why; where a rank is by now says nothing of it.
            return False
        self._write(self._found)
        self._written = True
        self._forget_files()
        return True

    def _gave_up(self) -> bool:
        """Whether a rank moved while it was looked at: what was seen of it does not fit."""
        return any(integer(each, "since") > self._examined_at for each in self._before.values())

    def _forget_files(self) -> None:
        files = sorted(self._directory.glob(HANG))
        for old in files[1 : -MOST_FILES + 1]:
            with contextlib.suppress(OSError):
                old.unlink()

    def judged(self, findings: Iterable[Finding]) -> bool:
        """Take in what the rules found; whether the job hangs for sure."""
        if self._hung is None or self._found is None or self._pending:
            return False
        found = [each for each in findings if each.code.startswith(_OF_HANGS)]
        self._said |= bool(found)
        errors = [each for each in found if each.severity >= Severity.ERROR]
        self._by_calls = any(STANDSTILL not in each.subjects for each in errors)
        return self._moved is None and bool(errors)


def _ended_well(run: Run, ranks: frozenset[int], since: int) -> bool:
    """Whether one of these ranks has ended without a failure since (Unix nanoseconds)."""
    return any(
        rank.exit is not None and rank.exit.status == 0 and rank.exit.time >= since
        for rank in run.last
        if rank.rank in ranks
    )


def _failed(run: Run, since: int, kinds: tuple[type[Record], ...] = _GIVES_UP) -> bool:
    """Whether a process of the job has failed or ended since (Unix nanoseconds)."""
    records = [
        record
        for rank in run.last
        for record in (*rank.records, *([rank.exit] if rank.exit is not None else ()))
    ]
    return any(type(each) in kinds and getattr(each, "time", 0) >= since for each in records)

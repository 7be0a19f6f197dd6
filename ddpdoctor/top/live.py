"""A run that lives, or lived a moment ago: its status pages, and of what is looked at, more."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar

import psutil

from ddpdoctor.analysis.pace import WARM_UP
from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.faults import words
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.environment import namespace
from ddpdoctor.run.reader import read_manifest
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import ErrorRecord, OpenRecord
from ddpdoctor.run.records.supervisor import RankExitRecord
from ddpdoctor.run.status import Parts, Phase, Status
from ddpdoctor.system.process_state import Turn, lacked, read_turn
from ddpdoctor.top import hardware, steplog, story, times, verdict
from ddpdoctor.top.pages import Ages, Pages
from ddpdoctor.top.snapshot import Gpu, RankRow, Snapshot, Verdict
from ddpdoctor.top.source import Want
from ddpdoctor.top.stderr import Stderr, clean
from ddpdoctor.top.steplog import StepLog, StepTail
from ddpdoctor.top.story import Story
from ddpdoctor.top.times import Recent

T = TypeVar("T")

LIST_EVERY = 2.0
"""Seconds between two listings of the run directory."""

GLANCE = 0.05
"""Seconds over which a process that gives no heartbeat is watched when that is seen first."""

STALE = 5.0
"""Seconds without a heartbeat, which comes four times a second, after which a rank is stale."""

_still = lru_cache(maxsize=4096)(clean)
"""`clean`, for texts that are the same in most frames."""

MANY = 64
"""Ranks from which on those that nobody looks at are read in every other frame."""

_DROP = 30.0
"""Seconds for which the steps of a rank are followed that nobody looks at any more."""


class LiveSource:
    """Follows the newest attempt of a run.

    Args:
        path: The run directory.
        interval: Seconds between frames.

    Raises:
        DoctorError: It is no run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self.path = path
        self._manifest: JsonObject = {}
        self._read_manifest(rundir.is_live(path))
        self._pages = Pages(path)
        self._gpus = hardware.GpuFiles(path)
        self._stderr = Stderr(path)
        self._story = Story(path)
        self._meter = hardware.Meter()
        self._ages = Ages()
        self._namespace = namespace()
        self._listed = float("-inf")
        self._gone = False
        self._attempt: int | None = None
        self._rows: dict[int, RankRow] = {}
        self._turn = False
        self._broken: list[tuple[str, Exception]] = []
        """The parts of this frame that a fault of ours is in."""
        self._recent: dict[int, Recent] = {}
        self._opened: dict[int, OpenRecord | None] = {}
        self._errors: dict[int, ErrorRecord | None] = {}
        self._turns: dict[int, tuple[float, Turn | None]] = {}
        """What the main threads of silent ranks had had of the cores at a moment, by pid."""
        self._tails: dict[int, tuple[StepTail, float]] = {}
        self.live = True
        """Whether the run lived when it was read last."""

    def _read_manifest(self, live: bool) -> None:
        try:
            self._manifest = read_manifest(self.path)
        except DoctorError:
            # Of a run that begins it may be half-written.
            if not live:
                raise

    def close(self) -> None:
        """Close the files."""
        self._pages.close()

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        now, ticks = time.time_ns(), time.monotonic()
        # First, so that what is read afterwards is whole if the run is over.
        self.live = rundir.is_live(self.path)
        if ticks - self._listed >= LIST_EVERY or not self.live or not self._pages.ranks:
            self._listed = ticks
            self._gone = not self._pages.look()
            self._gpus.look()
        if not self._manifest and not self._gone:
            with contextlib.suppress(DoctorError):
                self._read_manifest(True)
        if self._pages.restart != self._attempt:
            self._attempt = self._pages.restart
            for known in (self._rows, self._recent, self._opened, self._errors, self._tails):
                known.clear()
        self._broken.clear()
        self._part("events", self._story.poll)
        resting = self._resting(want)
        pages = self._pages.read(resting)
        self._part("the output", self._stderr.read)
        nothing: tuple[tuple[Gpu, ...], str] = (), ""
        found, nvml = self._part("the GPUs", lambda: self._gpus.read(self.live)) or nothing
        devices = self._part("the GPUs", lambda: hardware.by_uuid(found)) or {}
        for rank, status in pages.items():
            if rank not in resting:
                read = partial(self._row, rank, status, devices, want, now, ticks)
                row = self._part(f"rank {rank}", read)
                if row is not None:
                    self._rows[rank] = row
        for rank in [each for each, (_, seen) in self._tails.items() if ticks - seen > _DROP]:
            del self._tails[rank]
        rows = [self._rows[rank] for rank in pages if rank in self._rows]
        return self._snapshot(rows, pages, found, nvml, now)

    def _part(self, name: str, read: Callable[[], T]) -> T | None:
        """A part of the frame; None if a fault of ours is in it, which a note then says."""
        try:
            return read()
        except (OSError, DoctorError):
            raise
        except Exception as error:
            self._broken.append((name, error))
        return None

    # -- ranks

    def _resting(self, want: Want) -> frozenset[int]:
        """Ranks whose row stays as it is in this frame.

        Of many ranks those that nobody looks at are read in every other frame, unless they ended.
        """
        self._turn = not self._turn
        if want.ranks is None or len(self._rows) < MANY or not self.live:
            return frozenset()
        over = {rank for rank, restart in self._story.exits if restart == self._attempt}
        unseen = self._rows.keys() - want.ranks - over
        return frozenset(rank for rank in unseen if rank % 2 == self._turn)

    def _row(
        self,
        rank: int,
        status: Status,
        devices: dict[str, Gpu],
        want: Want,
        now: int,
        ticks: float,
    ) -> RankRow:
        recent = self._recent.get(rank)
        if recent is None:
            recent = self._recent[rank] = self._begin(rank)
        recent.saw(status.parts)
        opened = self._opened.get(rank)
        if opened is None:
            opened = self._opened[rank] = steplog.head(self._pages.path(rank, "jsonl"), self._share)
        node = _still(opened.host if opened is not None else "")
        since = self._ages.age((rank, "since"), status.since, now, ticks)
        beat = since
        if status.beat is not None:
            beat = min(since, self._ages.age((rank, "beat"), status.beat, now, ticks))
        state, said = self._state(rank, status, opened, beat)
        wanted = want.ranks is None or rank in want.ranks
        steps = self._steps(rank, want.history, ticks) if wanted else []
        owns, totals = series(steps, want.history)
        runs = state not in ("ended", "dead")
        local = status.local_rank if status.local_rank >= 0 else None
        here = node == self._manifest.get("host")
        return RankRow(
            rank=rank,
            node=node,
            local_rank=local,
            restart=status.restart,
            pid=status.pid,
            state=state,
            said=said,
            phase=status.phase.label if runs else "",
            since=since if runs else None,
            site=_still(status.site),
            collective=_still(status.collective) if status.phase is Phase.WAIT else "",
            step=status.step,
            epoch=status.epoch,
            times=recent.times,
            owns=owns,
            totals=totals,
            heartbeat=beat if runs else None,
            dropped=status.dropped,
            rss=status.rss if runs else None,
            allocated=status.allocated if runs else None,
            reserved=status.reserved if runs else None,
            peak=status.peak,
            gpu=devices.get(status.gpu) if status.gpu else None,
            debug_port=self._story.port(rank) if runs else None,
            output=self._stderr.of(rank, local, here) if wanted else (),
        )

    def _begin(self, rank: int) -> Recent:
        """What a rank did before it was first looked at."""
        log = StepLog(self._pages.path(rank, "jsonl"))
        return Recent(steady([step.parts for step in log.until(1 << 62, times.WINDOW)]))

    def _steps(self, rank: int, history: int, ticks: float) -> list[steplog.Seconds]:
        tail = self._tails.get(rank, (None, 0.0))[0]
        if tail is None or tail.keep < history:
            tail = StepTail(self._pages.path(rank, "jsonl"), history)
        self._tails[rank] = (tail, ticks)
        tail.poll()
        return list(tail.seconds)

    def _state(
        self, rank: int, status: Status, opened: OpenRecord | None, heartbeat: float
    ) -> tuple[str, str]:
        """A rank's state, and the words to it."""
        ending = self._story.exits.get((rank, status.restart))
        if ending is not None:
            code = ending.status
            if code == 0 or (code is None and status.phase is Phase.ENDED):
                return "ended", ""
            if status.phase is Phase.ENDED and not self._failed(rank, code):
                # Its script came to its end; what came after is not training.
                return "ended", story.died(ending, None)
            return "dead", self._died(rank, ending)
        if status.phase is Phase.ENDED:
            return ("dead", self._died(rank, None)) if self._error(rank) else ("ended", "")
        if self._gone:
            # The job may well live on: a directory that was removed says nothing of it.
            return "stale", "no more is known of it"
        if not self.live:
            return "dead", self._died(rank, None)
        debugged = self._story.debugged(rank)
        if debugged:
            return "debugger", debugged
        near = opened is not None and opened.namespace == self._namespace
        if heartbeat > STALE and status.beat is not None:
            if near:
                return self._silent(status.pid)
            return "stale", ""
        return ("starting" if status.phase is Phase.STARTING else "running"), ""

    def _failed(self, rank: int, code: object) -> bool:
        """Whether a rank whose interpreter came to its end did so because of a failure.

        An exception that nobody caught ends the interpreter in order, too.
        """
        return bool(self._error(rank)) or (isinstance(code, int) and code > 0)

    @property
    def _share(self) -> int:
        """Bytes of memory that a record of each rank may take."""
        return opening.MOST_EXPANDED // (len(self._pages.ranks) or 1)

    def _error(self, rank: int) -> ErrorRecord | None:
        """The exception that nobody caught, of a rank that has come to its end."""
        if rank not in self._errors:
            path = self._pages.path(rank, "jsonl")
            self._errors[rank] = steplog.last_error(path, self._share)
        return self._errors[rank]

    def _died(self, rank: int, ending: RankExitRecord | None) -> str:
        return story.died(ending, self._error(rank))

    def _silent(self, pid: int) -> tuple[str, str]:
        """Why a process of this machine gives no sign of life."""
        try:
            told = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return "dead", "its process is gone"
        except (psutil.Error, OSError, ValueError, OverflowError):
            return "stale", ""
        if told == psutil.STATUS_ZOMBIE:
            return "dead", "its process has ended"
        if told == psutil.STATUS_RUNNING and self._lacks_core(pid):
            # It works, as far as it can; so does the thread that has to tell.
            return "running", "gets little CPU"
        words = {
            psutil.STATUS_STOPPED: "its process is stopped (SIGSTOP)",
            psutil.STATUS_TRACING_STOP: "its process is traced",
            psutil.STATUS_DISK_SLEEP: "its process waits for a disk",
        }
        return "stale", words.get(told, "")

    def _lacks_core(self, pid: int) -> bool:
        """Whether a main thread that is ready to run has had no core for most of the time."""
        now, turn = time.monotonic(), read_turn(pid, pid)
        if pid not in self._turns:
            self._turns[pid] = (now, turn)
            time.sleep(GLANCE)
            now, turn = time.monotonic(), read_turn(pid, pid)
        when, before = self._turns[pid]
        if now - when >= LIST_EVERY:
            self._turns[pid] = (now, turn)
        if before is None or turn is None:
            return False
        return lacked(before, turn, now - when) > (now - when) / 2

    # -- the whole

    def _snapshot(
        self,
        rows: list[RankRow],
        pages: dict[int, Status],
        found: tuple[Gpu, ...],
        nvml: str,
        now: int,
    ) -> Snapshot:
        told = self._story
        started = integer(self._manifest, "started") or None
        until = told.ended if told.ended is not None and not self.live else now
        dead = {row.rank for row in rows if row.state == "dead"}
        ends = {
            rank: record.time
            for (rank, restart), record in told.exits.items()
            if restart == self._attempt
        }
        # Who raised first is the cause, even if its process was reaped after those of its victims.
        ends |= {
            rank: error.time for rank in dead if (error := self._errors.get(rank)) and error.time
        }
        exits = sorted((moment, rank) for rank, moment in ends.items())
        world = max((status.world_size for status in pages.values()), default=None)
        timed = [row.times for row in rows if row.times is not None and row.state != "dead"]
        usual = times.of_ranks(timed)
        judge = partial(
            verdict.judge,
            rows,
            verdict.Facts(
                live=self.live,
                usual=usual,
                exit_status=None if self.live else told.status,
                asked=told.asked,
                world_size=world,
                since_start=None if started is None else max(0.0, (until - started) / 1e9),
                died=tuple(rank for _, rank in exits if rank in dead),
                seen=min(
                    (len(self._recent[row.rank]) for row in rows if row.times is not None),
                    default=0,
                ),
                held=told.held,
                findings=told.findings,
            ),
        )
        judged = self._part("the verdict", judge) or Verdict("not known", "warning")
        if self._gone:
            judged = Verdict("the run directory is gone: this is what was there last", "warning")
        return Snapshot(
            time=until / 1e9,
            kind="run",
            verdict=judged,
            run=str(self._manifest.get("id") or self.path.name),
            path=str(self.path),
            command=story.command(self._manifest),
            started=None if started is None else started / 1e9,
            live=self.live,
            exit_status=None if self.live else told.status,
            world_size=world,
            ranks=times.ordered(rows, judged.rank),
            median=usual,
            skew=times.skew(timed),
            gpus=found,
            machine=self._meter.read(),
            findings=told.findings,
            output=self._stderr.lines,
            nvml=nvml,
            gone=self._gone,
            notes=self._notes(pages),
            environment=story.environment(
                self._manifest, next((each for each in self._opened.values() if each), None)
            ),
        )

    def _notes(self, pages: dict[int, Status]) -> tuple[str, ...]:
        notes = []
        if self._gone:
            notes.append(f"{self.path} is gone")
        if not self._manifest:
            notes.append("run.json cannot be read")
        supervisor = integer(self._manifest, "supervisor", -1)
        if self.live and supervisor > 0 and self._manifest.get("host") == socket.gethostname():
            why = self._silent(supervisor)[1]
            if why.endswith("(SIGSTOP)"):
                notes.append(f"ddpdoctor is stopped: kill -CONT {supervisor}; findings stand still")
        bad = self._pages.unreadable
        if bad and not self._gone:
            rank, why = next(iter(bad.items()))
            more = f", and those of {len(bad) - 1} more" if len(bad) > 1 else ""
            notes.append(f"the status page of rank {rank} cannot be read{more}: {why}")
        if self._pages.left_out:
            notes.append(f"{self._pages.left_out} more ranks are left out")
        if self._story.unread:
            notes.append(f"left out: {self._story.unread}")
        mute = sum(status.unwritten for status in pages.values())
        if mute:
            notes.append(f"{mute} of {len(pages)} ranks cannot write their records: disk full?")
        if self._story.left_out:
            notes.append(f"{self._story.left_out} older findings are left out")
        if self._broken:
            notes.append(words(self._broken))
        return tuple(clean(note) for note in notes)


def steady(steps: list[Parts]) -> list[Parts]:
    """Steps without the first ones of a job, if there are any others."""
    later = [parts for parts in steps if parts.number >= WARM_UP]
    return later or steps


def series(
    steps: Sequence[steplog.Seconds], history: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Own times and durations of the last steps; own times of those that were split, if any was."""
    steps = steps[-history:] if history > 0 else ()
    split = [own for own, _, split in steps if split]
    return tuple(split or [own for own, _, _ in steps]), tuple([total for _, total, _ in steps])

"""An immutable snapshot of a run directory, for rules and renderers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from ddpdoctor.core import opening
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject, Record
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.process import (
    EndRecord,
    ErrorRecord,
    ExitRecord,
    FaultRecord,
    LimitRecord,
    OpenRecord,
)
from ddpdoctor.run.records.supervisor import (
    DebugRecord,
    HangOverRecord,
    HangRecord,
    JobRecord,
    NoCoreRecord,
    NodeRecord,
    RankExitRecord,
    SignalRecord,
)
from ddpdoctor.run.records.training import SiteRecord, StepRecord
from ddpdoctor.run.records.typed_json import decoder, parse
from ddpdoctor.run.ring import Ring, read_ring
from ddpdoctor.run.status import Status

HANG = "hang-*.json"  # Files with the evidence of a hang, in alphabetical order
MAX_EXPANDED = 1 << 11  # Maximum number of steps that the lines of a rank are expanded to
FOREVER = 1 << 63  # A time that is never reached, in Unix nanoseconds

R = TypeVar("R", bound=Record)


class Records(tuple[Record, ...]):
    """The records of a journal, oldest first."""

    def of(self, declared: type[R]) -> tuple[R, ...]:
        """Return the records of one class, oldest first."""
        return cast("tuple[R, ...]", self._by_class.get(declared, ()))

    def first(self, declared: type[R]) -> R | None:
        """Return the oldest record of a class, or None."""
        return next(iter(self.of(declared)), None)

    @cached_property
    def _by_class(self) -> dict[type[Record], tuple[Record, ...]]:
        found: dict[type[Record], list[Record]] = {}
        for record in self:
            found.setdefault(type(record), []).append(record)
        return {declared: tuple(each) for declared, each in found.items()}


NO_RECORDS = Records()
UNOPENED = OpenRecord(format=FORMAT, rank=-1)


@dataclass(frozen=True)
class Rank:
    """One rank in one attempt (``restart``)."""

    rank: int
    restart: int
    status: Status | None
    opened: OpenRecord = UNOPENED  # Its identity. Without values if the record is missing.
    step_lines: tuple[bytes, ...] = ()
    """The newest step records, unparsed. :attr:`steps` parses them."""
    split_lines: tuple[bytes, ...] = ()
    """The newest step records whose backward was split, which are rare on a GPU."""
    records: Records = NO_RECORDS  # All records of the journal except steps
    exit: RankExitRecord | None = None  # How the process ended, if the supervisor saw it
    fault: str = ""  # The output of ``faulthandler`` on a fatal signal
    max_steps: int = MAX_EXPANDED  # Maximum number of steps that the lines are expanded to
    partial: bool = False  # Whether part of the journal was not read because it is too large
    ring_file: Path | None = None
    """The file with the collectives called from Python. :attr:`ring` reads it."""

    @cached_property
    def steps(self) -> tuple[StepRecord, ...]:
        """The newest steps, oldest of them first."""
        return _steps(self.step_lines, self.max_steps)

    @cached_property
    def split_steps(self) -> tuple[StepRecord, ...]:
        """The newest steps whose backward was split into compute and wait."""
        return _steps(self.split_lines, self.max_steps)

    @cached_property
    def ring(self) -> Ring | None:
        """The newest collectives called from Python."""
        if self.ring_file is None:
            return None
        try:
            return read_ring(str(self.ring_file))
        except (OSError, UnreadableError):
            return None

    def sites(self, phase: str) -> tuple[Location, ...]:
        """Return the lines that entered a phase, in the order of their first use."""
        found = (record for record in self.records.of(SiteRecord) if record.phase == phase)
        return tuple(record.location for record in found if record.location is not None)

    def site(self, phase: str) -> Location | None:
        """Return the first line that entered a phase."""
        return next(iter(self.sites(phase)), None)

    def ddp(self, number: int) -> DdpRecord | None:
        """Return the record of a DDP module. Modules are numbered in the order of construction."""
        built = self.records.of(DdpRecord)
        return built[number] if 0 <= number < len(built) else None

    @property
    def elsewhere(self) -> bool:
        """Whether it is a rank of another node, whose pid means nothing here."""
        status = self.status
        return (status is not None and status.elsewhere) or "@" in (self.opened.namespace or "")

    @property
    def lost(self) -> bool:
        """Whether records are missing, so that unrecorded events may have happened.

        The queue was full, the disk refused the journal, a hook failed and was disabled, or there
        is too much to read.
        """
        status = self.status
        failed = status is not None and (status.unwritten or status.dropped > 0)
        return failed or self.partial or self.records.first(FaultRecord) is not None

    def watched(self, *declared: type[Record], until: int = FOREVER) -> bool:
        """Return whether all records of some classes exist, so that a missing one proves absence.

        ``until`` is the end of the time that matters, in Unix nanoseconds.
        """
        kinds = {each.kind for each in declared}
        limits = self.records.of(LimitRecord)
        return not self.lost and all(each.of not in kinds or each.time > until for each in limits)

    @property
    def counted_collectives(self) -> bool:
        """Whether every collective that the rank called from Python was counted."""
        return not self.lost and (self.ring is None or not self.ring.partial)

    @property
    def ended(self) -> EndRecord | None:
        """The record of the interpreter's normal end, if any."""
        return self.records.first(EndRecord)


def _steps(lines: Sequence[bytes], most: int) -> tuple[StepRecord, ...]:
    """Parse the newest steps. Expand lines that cover several steps."""
    found: list[StepRecord] = []
    most = max(len(lines), most)
    for line in reversed(lines):
        record = parse(line)
        if isinstance(record, StepRecord) and record.step >= 0:
            room = most - len(found)
            found += _each(record, room) if record.steps > 1 else (record,)
            if room <= 1:
                break
    return tuple(reversed(found))


def _each(record: StepRecord, room: int) -> Iterator[StepRecord]:
    """Expand a line to its steps, the newest first. Each keeps the line's ``steps``."""
    count = min(record.steps, record.step + 1)
    numbers, times = record.each[::2], record.each[1::2]
    backwards: list[int] = []
    for number, many in zip(numbers, times, strict=False):
        backwards += [number] * min(max(0, many), count - len(backwards))
    # `dataclasses.replace` would look up every field of every step.
    shared = {each.name: getattr(record, each.name) for each in fields(record)}
    for back in range(min(count, room)):
        place = count - 1 - back
        shared["step"] = record.step - back
        shared["start"] = record.start + place * record.total
        shared["backwards"] = backwards[place] if place < len(backwards) else record.backwards
        shared["skipped"] = record.skipped and not back
        shared["outside"] = 0 if place else record.outside
        yield StepRecord(**shared)


def command_words(manifest: Mapping[str, object]) -> list[str]:
    """Return the job's command line from run.json. Empty if it is missing or damaged."""
    words = manifest.get("command")
    return [str(word) for word in words] if isinstance(words, list) else []


class Span(NamedTuple):
    """A span of time, in Unix nanoseconds."""

    start: int
    end: int


@dataclass(frozen=True)
class Run:
    """One launch of a job."""

    path: Path
    manifest: JsonObject
    ranks: tuple[Rank, ...]  # Ascending by restart, then by rank
    strays: Records = NO_RECORDS  # Records of processes that never became ranks, oldest first
    supervisor: Records = NO_RECORDS  # The supervisor's records
    taken: int = 0  # Time of the snapshot in Unix nanoseconds
    stderr: str = ""  # The last MiB of the job's stderr, or the last 64 KiB while the job runs
    stderr_elsewhere: str = ""  # The ends of the job's stderr on other nodes, with other pids
    unreadable: tuple[str, ...] = ()  # Remarks about files that could not be read

    @property
    def id(self) -> str:
        """The run's id, or the name of its directory."""
        return str(self.manifest.get("id") or self.path.name)

    @property
    def started_at(self) -> int:
        """Start of the run in Unix nanoseconds. 0 if unknown."""
        value = self.manifest.get("started")
        return value if isinstance(value, int) else 0

    @property
    def command(self) -> list[str]:
        """The words of the job's command line."""
        return command_words(self.manifest)

    @cached_property
    def nodes(self) -> tuple[NodeRecord, ...]:
        """The other nodes whose records are here: the newest record of each, by number."""
        newest = {each.number: each for each in self.supervisor.of(NodeRecord)}
        return tuple(newest[number] for number in sorted(newest))

    def ranks_on(self, node: NodeRecord) -> tuple[Rank, ...]:
        """Return the ranks of the last attempt that are on another node."""
        return tuple(
            rank
            for rank in self.last
            if node.place and (rank.opened.namespace or "").endswith(node.place)
        )

    @property
    def every_stderr(self) -> str:
        """The ends of the job's stderr on all nodes. Its pids are of different nodes."""
        return self.stderr + self.stderr_elsewhere

    @property
    def late(self) -> bool:
        """Whether the probe started while the job ran (`ddpdoctor attach --probe`)."""
        return self.manifest.get("launcher") == "attach"

    @property
    def heard(self) -> Run:
        """The run without the ranks of nodes that do not respond."""
        lost = tuple(node.place for node in self.nodes if node.state == "lost")
        if not lost:
            return self
        ranks = (rank for rank in self.ranks if not (rank.opened.namespace or "").endswith(lost))
        return replace(self, ranks=tuple(ranks))

    @property
    def restarts(self) -> tuple[int, ...]:
        """The known attempts, ascending, at least ``(0,)``."""
        strays = {getattr(record, "restart", 0) for record in self.strays}
        return tuple(sorted({rank.restart for rank in self.ranks} | strays)) or (0,)

    def attempt(self, restart: int) -> tuple[Rank, ...]:
        """Return the ranks of one attempt."""
        return tuple(rank for rank in self.ranks if rank.restart == restart)

    @property
    def last(self) -> tuple[Rank, ...]:
        """The ranks of the last attempt."""
        return self.attempt(self.restarts[-1])

    def rank(self, number: int) -> Rank:
        """Return a rank of the last attempt.

        Raises:
            StopIteration: There is no such rank.
        """
        return next(rank for rank in self.last if rank.rank == number)

    @property
    def over(self) -> bool:
        """Whether the job has ended, or all ranks have."""
        return self.exit_status is not None or all(rank.ended for rank in self.last)

    @property
    def world_size(self) -> int:
        """World size of the last attempt. 0 if not known."""
        return max((rank.opened.world_size for rank in self.last), default=0)

    @property
    def has_peers(self) -> bool:
        """Whether the job has more than one rank."""
        ended = (each for each in self.strays if isinstance(each, (ErrorRecord, ExitRecord)))
        ranks = {each.rank for each in (*self.ranks, *ended) if each.rank is not None}
        return self.world_size > 1 or len(ranks) > 1

    @property
    def step(self) -> int | None:
        """The highest step of the last attempt. None if not known."""
        return self.reached(self.restarts[-1])

    def reached(self, restart: int) -> int | None:
        """Return the highest step of an attempt. None if not known."""
        steps = (rank.status.step for rank in self.attempt(restart) if rank.status is not None)
        return max(steps, default=None)

    @property
    def exit_status(self) -> int | None:
        """The job's exit status (negative: a signal). None while it runs, or if not known."""
        statuses = (job.status for job in self.supervisor.of(JobRecord))
        return next((status for status in statuses if status is not None), None)

    @property
    def last_sign(self) -> int:
        """Time of the last write in Unix nanoseconds, at which waits of a dead job end."""
        times = [getattr(record, "time", 0) for record in self.supervisor]
        for rank in self.ranks:
            if rank.status is not None:
                times += [rank.status.since, rank.status.beat or 0]
            times += [getattr(record, "time", 0) for record in rank.records[-20:]]
        return max(times, default=self.taken)

    @property
    def stopped_at(self) -> int | None:
        """Time in Unix nanoseconds at which a person or a scheduler stopped the job."""
        return next((each.time for each in self.supervisor.of(SignalRecord) if each.time), None)

    @property
    def ended_for_hang(self) -> bool:
        """Whether ddpdoctor ended the job because it hung."""
        return any(record.hang for record in self.supervisor.of(SignalRecord))

    @property
    def ended_by_debugger(self) -> bool:
        """Whether the job was ended because its debugger was stopped."""
        return any(record.debugger for record in self.supervisor.of(SignalRecord))

    @cached_property
    def hang(self) -> HangRecord | None:
        """The newest examination of a job that hangs, or hung until its end.

        None if the job makes progress. ``ranks`` holds the evidence of each rank. Examinations
        after the first ranks have given up are ignored, since they show less.
        """
        newest: HangRecord | None = None
        ends = [
            end.time
            for rank in self.last
            for end in (*rank.records.of(ErrorRecord), *([rank.exit] if rank.exit else ()))
        ]
        for record in self.supervisor:
            if isinstance(record, HangRecord):
                before = newest.time if newest is not None else 0
                if newest is None or not any(before < end <= record.time for end in ends):
                    newest = record
            elif isinstance(record, HangOverRecord):
                newest = None
        if newest is None or newest.restart != self.restarts[-1]:
            return None
        if not newest.file or os.path.basename(newest.file) != newest.file:
            return newest
        try:
            found = opening.json_object(self.path / newest.file, opening.MOST_RECORD)
        except (OSError, ValueError):
            return newest
        return decoder(HangRecord)(found)

    @property
    def stalls(self) -> list[Span]:
        """The spans without progress, according to the examinations."""
        found: list[Span] = []
        for record in self.supervisor:
            if isinstance(record, HangRecord):
                begin = record.time - round(record.seconds * 1e9)
                if found and begin <= found[-1].end:
                    begin = found.pop().start
                found.append(Span(begin, record.time))
            elif isinstance(record, HangOverRecord) and found:
                found[-1] = found[-1]._replace(end=record.time)
        return found

    @property
    def went_on(self) -> tuple[int, ...]:
        """Times at which a hanging job made progress again, in Unix nanoseconds."""
        return tuple(record.time for record in self.supervisor.of(HangOverRecord))

    @cached_property
    def _without_core(self) -> dict[tuple[int, int, int], int]:
        """Nanoseconds without a core, by rank, attempt and start of the phase."""
        return {
            (each.rank, each.restart, each.since): each.lost
            for each in self.supervisor.of(NoCoreRecord)
        }

    def waits_for(self, rank: Rank, until: int | None = None) -> int:
        """Return the nanoseconds that a rank has been in its phase, except those without a core.

        ``until`` is Unix nanoseconds, by default the time of the snapshot.
        """
        status = rank.status
        if status is None:
            return 0
        lost = self._without_core.get((rank.rank, rank.restart, status.since), 0)
        return (self.taken if until is None else until) - status.since - lost

    @cached_property
    def debug_states(self) -> dict[int, DebugRecord]:
        """The newest debugger record of each rank: its port, process and state."""
        found: dict[int, DebugRecord] = {}
        for record in self.supervisor.of(DebugRecord):
            rank = record.rank
            before = found.get(rank) if rank is not None else None
            if before is not None and record.state == "port" and before.state != "lost":
                record = replace(before, port=record.port)
            elif before is not None and record.port is None:
                # The record comes from the rank's node. The port is one of this node.
                record = replace(record, port=before.port)
            if rank is not None:
                found[rank] = record
        return found

    @cached_property
    def debugged(self) -> tuple[Span, ...]:
        """Spans in which a rank was in the debugger or waited for one. Open ones end at `FOREVER`.

        Timings of all ranks in these spans say nothing about the job.
        """
        spans: list[Span] = []
        since: dict[int | None, int] = {}
        attached: set[int | None] = set()
        for record in self.supervisor.of(DebugRecord):
            rank, state = record.rank, record.state
            if state in ("attached", "waits"):
                since.setdefault(rank, record.time)
                if state == "attached":
                    attached.add(rank)
            elif state in ("detached", "gone", "lost") or (
                state == "goes on" and rank not in attached
            ):
                attached.discard(rank)
                if rank in since:
                    spans.append(Span(since.pop(rank), record.time))
        return (*spans, *(Span(start, FOREVER) for start in since.values()))

    def undisturbed(self, step: StepRecord) -> bool:
        """Return whether no rank was in the debugger during a step."""
        return not any(
            span.start < step.start + step.total and step.start < span.end for span in self.debugged
        )

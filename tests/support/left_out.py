"""The records of a healthy run without those that one rank might not have written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import (
    BuffersRecord,
    ClipRecord,
    ConstantLossRecord,
    CutRecord,
    EditRecord,
    ElementsRecord,
    FingerprintRecord,
    LoadRecord,
    NeverUsedRecord,
    OtherModelRecord,
    OutsideRecord,
    ResumeRecord,
    SoloEndRecord,
    SoloRecord,
    StatisticsRecord,
    TogetherRecord,
    UnreducedRecord,
)
from ddpdoctor.run.records.process import (
    EndRecord,
    FaultRecord,
    LimitRecord,
    OpenRecord,
    PendingErrorRecord,
)
from ddpdoctor.run.records.training import (
    EvaluationRecord,
    PassRecord,
    RandomRecord,
    SaveRecord,
    StepRecord,
)
from ddpdoctor.run.records.typed_json import parse
from ddpdoctor.run.snapshot import Rank, Records, Run
from ddpdoctor.run.status import Phase
from tests.support.written import SECOND

PAID = (
    FingerprintRecord, ElementsRecord, OutsideRecord, BuffersRecord, StatisticsRecord,
    UnreducedRecord, SoloRecord, RandomRecord, OtherModelRecord, NeverUsedRecord,
)  # fmt: skip
"""Records that a rank writes only while its overhead budget lasts."""

LIMITED = (
    SaveRecord, EvaluationRecord, LoadRecord, ResumeRecord, CutRecord, ClipRecord, EditRecord,
    ConstantLossRecord, PendingErrorRecord,
)  # fmt: skip
"""Records of which a rank writes so many at most."""


class Line(NamedTuple):
    """A line of a journal."""

    step: int
    """The step that it is about, or the last one before it."""
    text: bytes
    record: Record


Lines = Sequence[Line]


def journal(run: Run, rank: Rank) -> list[Line]:
    """The lines of a rank's journal, which has not been rotated."""
    found: list[Line] = []
    step = 0
    path = run.path / f"{rank_stem(rank.rank, rank.restart)}.jsonl"
    for text in path.read_bytes().splitlines():
        record = parse(text)
        if record is not None:
            about = getattr(record, "step", None)
            step = record.step if isinstance(record, StepRecord) else step
            found.append(Line(step if about is None else about, text, record))
    return found


def _unpaid(line: Line) -> Line:
    """A line as a rank writes it that cannot pay for a look."""
    if isinstance(line.record, TogetherRecord):
        return line._replace(record=replace(line.record, parameters=None))
    return line


def spent(lines: Lines, step: int) -> Iterator[Line]:
    """The budget is spent after a step."""
    going: dict[int, PassRecord] = {}
    for line in lines:
        record = line.record
        if line.step <= step:
            if isinstance(record, PassRecord):
                going[record.pass_] = record
            yield line
            continue
        for each in going.values():
            if each.state not in ("ended", "left"):
                yield Line(step, b"", replace(each, state="unfollowed"))
        going.clear()
        if not isinstance(record, (*PAID, PassRecord)):
            yield _unpaid(line)


def earned(lines: Lines, step: int) -> Iterator[Line]:
    """The budget is spent at first, and enough has been earned by a step."""
    missed = {
        line.record.pass_
        for line in lines
        if isinstance(line.record, PassRecord) and line.step < step
    }
    for line in lines:
        if isinstance(line.record, PassRecord) and line.record.pass_ in missed:
            continue
        if line.step >= step:
            yield line
        elif not isinstance(line.record, PAID):
            yield _unpaid(line)


def thinned(lines: Lines, step: int) -> Iterator[Line]:
    """One fingerprint of four is taken after a step."""
    for line in lines:
        between = line.step > step and line.step % 4
        if not (between and isinstance(line.record, (FingerprintRecord, OutsideRecord))):
            yield line


def overflowed(lines: Lines, step: int) -> Iterator[Line]:
    """The queue is full for four steps."""
    return (line for line in lines if not step < line.step <= step + 4)


def refused(lines: Lines, step: int) -> Iterator[Line]:
    """The disk refuses the journal after a step."""
    return (line for line in lines if line.step <= step)


def abrupt(lines: Lines, step: int) -> Iterator[Line]:
    """The process ends without what a rank writes at its end, as by ``os._exit``."""
    last = max((place for place, each in enumerate(lines) if _is_step(each)), default=-1)
    return (line for place, line in enumerate(lines) if place <= last)


def _is_step(line: Line) -> bool:
    return isinstance(line.record, StepRecord)


def full(lines: Lines, step: int) -> Iterator[Line]:
    """There were too many records of some kinds after a step."""
    refused = set()
    for line in lines:
        kind = line.record.kind
        if line.step <= step or not isinstance(line.record, LIMITED):
            yield line
        elif kind not in refused:
            refused.add(kind)
            record = LimitRecord(time=getattr(line.record, "time", 0), of=kind)
            yield Line(line.step, b"", record)


def rotated(lines: Lines, step: int) -> Iterator[Line]:
    """The journal keeps of what was before a step no more than it promises."""
    written: Counter[str] = Counter()
    for line in lines:
        written[line.record.kind] += 1
        if line.step >= step or written[line.record.kind] <= line.record.kept:
            yield line


Way = Callable[[Lines, int], Iterator[Line]]

LOSING: dict[Way, dict[str, Any]] = {
    overflowed: {"dropped": 4},
    refused: {"dropped": 4, "unwritten": True},
}
"""What the status page says of lost records."""

WAYS: tuple[Way, ...] = (spent, earned, thinned, rotated, abrupt, full, *LOSING)
"""Ways to leave out records, given the lines of a journal and a step."""


def until(lines: Lines, step: int) -> list[Line]:
    """What a rank had written when a step had ended."""
    ends = (EndRecord, SoloEndRecord)
    return [line for line in lines if line.step <= step and not isinstance(line.record, ends)]


def with_lines(run: Run, rank: Rank, lines: Iterable[Line], **page: Any) -> Run:
    """A run in which a rank wrote these lines."""
    kept = tuple(lines)
    steps = tuple(each.text for each in kept if isinstance(each.record, StepRecord))
    status = rank.status
    other = replace(
        rank,
        records=Records(each.record for each in kept if not isinstance(each.record, StepRecord)),
        step_lines=steps,
        split_lines=tuple(text for text in steps if b'"split":true' in text),
        status=status._replace(**page) if status is not None else None,
    )
    return replace(run, ranks=tuple(other if each is rank else each for each in run.ranks))


def in_between(run: Run, step: int, waiting: int) -> Run:
    """A run as it is after a step, while all ranks but one wait in a backward for that one."""
    records = [line.record for rank in run.last for line in journal(run, rank)]
    starts = [each.start for each in records if isinstance(each, StepRecord) and each.step == step]
    taken = max(starts, default=run.taken) + 20 * SECOND
    found = replace(run, supervisor=Records(), taken=taken)
    for rank in run.last:
        end, alone = rank.ended, rank.rank == waiting
        armed = (step + 1) * end.armed // end.steps if end is not None and end.steps else 0
        page = {"step": step + 1, "since": taken - 9 * SECOND, "armed": armed, "reduced": armed}
        if not alone:
            page |= {"armed": armed + 1, "reduced": armed + 1}
        phase = Phase.OTHER if alone else Phase.BACKWARD
        found = with_lines(found, rank, until(journal(run, rank), step), phase=phase, **page)
    return replace(found, ranks=tuple(replace(rank, exit=None) for rank in found.ranks))


def left_out(run: Run) -> Iterator[tuple[str, Run, Run]]:
    """Runs with less than all records: what is left out, the run, and the run with all of them."""
    last = min((rank.status.step for rank in run.last if rank.status is not None), default=1) - 1
    middle = 2 * last // 3
    moments = {"at the end": run}
    for slow in run.last[:2]:
        moments[f"while rank {slow.rank} is slow"] = in_between(run, middle, slow.rank)
    for when, whole in moments.items():
        lines = {rank.rank: journal(run, rank) for rank in run.last}
        if whole is not run:
            lines = {rank: until(each, middle) for rank, each in lines.items()}
        for rank in whole.last[:2]:
            for what, fewer in _fewer(whole, rank, lines[rank.rank], last):
                yield f"{when}, of rank {rank.rank}: {what}", fewer, whole
        for way in WAYS:
            for step in steps(last):
                fewer = whole
                for rank in whole.last:
                    fewer = with_lines(
                        fewer, rank, way(lines[rank.rank], step), **LOSING.get(way, {})
                    )
                yield f"{when}, of all ranks: {way.__name__} {step}", fewer, whole


def steps(last: int) -> list[int]:
    """The steps at which something begins to be missing, of a run with that last step."""
    return sorted({0, 9, last // 3, last // 2})


def _fewer(run: Run, rank: Rank, lines: Lines, last: int) -> Iterator[tuple[str, Run]]:
    """The run with less than all records of one rank, and what is left out."""
    for way in WAYS:
        for step in steps(last):
            page = LOSING.get(way, {})
            yield f"{way.__name__} {step}", with_lines(run, rank, way(lines, step), **page)
    for kind in sorted({line.record.kind for line in lines} - {OpenRecord.kind, EndRecord.kind}):
        for step in (-1, last // 3):
            fewer = [line for line in lines if line.step <= step or line.record.kind != kind]
            fault = Line(step, b"", FaultRecord(hook="what writes them", error="ValueError"))
            yield f"{kind} after step {step}", with_lines(run, rank, [*fewer, fault])

"""From the failures in logs to findings: the first cause, its consequences, what is not known."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.opening import whole
from ddpdoctor.core.ranks import named
from ddpdoctor.failures import Failure, Weight, matching_line
from ddpdoctor.failures.candidates import ONE_RUN, found_in, is_timed, name_of
from ddpdoctor.failures.lines import shortened
from ddpdoctor.failures.reported import with_ranks
from ddpdoctor.failures.runs import Runs, split
from ddpdoctor.failures.sightings import Sighting
from ddpdoctor.failures.waiting import Awaited, awaited, together

_FIX = "Fix this exception first; failures of other ranks follow from it."
_WHOSE = "lines do not say whose they are, and the log goes on after it"
_CUT = "an exception whose message is cut off in the log"
_SHOWN = 3
_MOST_RANKS = 100_000
"""Of a job whose missing ranks are counted."""

_TOGETHER = 1.0
"""Seconds within which lines of different logs are of one moment: clocks differ."""


def findings(sightings: Sequence[Sighting]) -> list[Finding]:
    """What to say of the logs of one job; nothing if no process failed.

    Args:
        sightings: Those of all of its logs.
    """
    runs = split(sightings)
    notes: dict[str, Finding] = {}
    for each in runs.last:
        if each.failure is not None and each.weight == Weight.NOTE and each.final:
            notes.setdefault(name_of(each), _note(each, each.failure))
    found = _of_run(runs.last)
    failed = any(each.severity == Severity.ERROR for each in found)
    if found:
        # Why the processes did not clean up is known.
        notes.pop("left-behind", None)
    earlier = [one for each in runs.earlier for one in _earlier(each, runs)]
    if failed:
        said = tuple(f"before: {each.message}" for each in earlier[:_SHOWN])
        found[0] = replace(found[0], evidence=(*found[0].evidence, *said))
    else:
        found = [*earlier, *found]
    return [*found, *notes.values()]


def _of_run(sightings: Sequence[Sighting]) -> list[Finding]:
    """What to say of one run."""
    sightings = with_ranks(sightings)
    candidates, certain = found_in(sightings)
    return [_verdict(candidates, certain, sightings)] if candidates else _caught(sightings)


def _earlier(sightings: Sequence[Sighting], runs: Runs) -> list[Finding]:
    """What to say of the run before the last one of a log."""
    source = sightings[0].source
    return [
        replace(
            each,
            severity=Severity.INFO,
            message=f"in an earlier run, which ends at {source}:{sightings[-1].last}, "
            f"{each.message}; the last run begins at line {runs.borders[source]}",
            evidence=tuple(line for line in each.evidence if line != _WHOSE),
        )
        for each in _of_run(sightings)
        if each.severity == Severity.ERROR
    ]


def _caught(sightings: Sequence[Sighting]) -> list[Finding]:
    """The last exceptions that a job went on after, or what it warned of at its end."""
    over = {
        (name_of(each), each.text.partition(":")[0], each.location): each
        for each in sightings
        if each.traceback and (each.weight >= Weight.CONSEQUENCE or each.ignored)
    }
    warned = [
        each
        for each in sightings
        if each.weight >= Weight.CONSEQUENCE and (each.is_warning or each.warned)
    ]
    return [
        replace(
            _verdict([each], True, [each]),
            severity=Severity.INFO,
            message=f"{_sentence(each, False)}, {why}",
        )
        for each, why in (
            *((each, "and the log goes on after it") for each in [*over.values()][-_SHOWN:]),
            *(
                (each, "which is a warning; the log shows no failure")
                for each in warned[: 0 if over else 1]
            ),
        )
    ]


def _note(each: Sighting, failure: Failure) -> Finding:
    return Finding(
        code=failure.code,
        severity=failure.severity,
        message=f"{_subject(each)} {failure.said(each.groups)}",
        ranks=() if each.rank is None else (each.rank,),
        evidence=(_printed(each),),
        fix=failure.fix,
    )


def _verdict(candidates: list[Sighting], certain: bool, all_: Sequence[Sighting]) -> Finding:
    first = _first(candidates)
    late = awaited(all_) if name_of(first) == "nccl-timeout" else None
    if late is not None and first.failure is not None:
        return _of_late(late, first, first.failure, all_)
    remarks = [each for each in all_ if each.weight == Weight.REMARK]
    if first.weight in (Weight.WRAPPER, Weight.REMARK) and remarks:
        return _not_understood(first, remarks)
    return _of_first(first, candidates, certain, all_)


def _of_first(
    first: Sighting, candidates: list[Sighting], certain: bool, all_: Sequence[Sighting]
) -> Finding:
    """The failure that came first, with what came of it."""
    other = _others(candidates, first)
    unordered = not is_timed(candidates) and any(each.source != first.source for each in other)
    failure = first.failure
    likely = not certain or unordered or (failure is not None and failure.likely)
    alike = [each for each in candidates if _alike(each, first)]
    failed = {each.rank for each in (first, *alike) if each.rank is not None}
    raised = _raised(first, alike)
    evidence = [
        _printed(first),
        *_as_well(failed, first),
        *(_later(each, first, "too") for each in other[:_SHOWN]),
        *_facts(first, all_),
        *_consequences(first, all_),
        *_doubts(first, all_, certain=certain, unordered=unordered),
    ]
    guilty = first.groups.get("rank")
    return Finding(
        code="DDP901" if failure is None else failure.code,
        severity=Severity.ERROR if failure is None else failure.severity,
        message=_sentence(first, likely),
        ranks=(int(guilty),) if guilty else tuple(sorted(failed)),
        location=raised.location,
        evidence=tuple(evidence),
        fix=_FIX if failure is None else failure.fix,
        traceback=raised.traceback,
    )


def _raised(first: Sighting, alike: Sequence[Sighting]) -> Sighting:
    """Where Python learned of a failure that another line shows: a GPU's own have no traceback."""
    own = (each for each in alike if each.location and each.rank in (None, first.rank))
    shown = first.traceback or first.weight != Weight.CAUSE
    return first if shown else next(own, first)


def _as_well(failed: Collection[int], first: Sighting) -> Iterator[str]:
    """The other ranks that failed on it."""
    others = [number for number in failed if number != first.rank]
    if others:
        yield f"{named(others)} failed on it, too"


def _of_late(late: Awaited, first: Sighting, failure: Failure, all_: Sequence[Sighting]) -> Finding:
    """A time-out of which it is known for whom the ranks waited."""
    code = "DDP803" if late.differ else failure.code
    own = [each for each in all_ if each.rank in late.ranks and name_of(each) == "nccl-timeout"]
    seen = dict.fromkeys((*map(_printed, own[:1]), _printed(first)))
    return Finding(
        code=code,
        severity=Severity.ERROR,
        message=f"{named(late.ranks)} likely held the job up: {late.said}",
        ranks=late.ranks,
        location=first.location,
        evidence=(*seen, *_facts(own[0] if own else first, all_)),
        fix="See what it did instead: a branch on the rank, batches of unequal number, a slow save "
        "or evaluation, a crash. `ddpdoctor run` names the line.",
        traceback=first.traceback,
    )


def _not_understood(first: Sighting, remarks: Sequence[Sighting]) -> Finding:
    """A job that failed, of which the log says nothing that is known."""
    failure = remarks[0].failure
    lines = dict.fromkeys(_printed(each) for each in (*remarks[:_SHOWN], *remarks[-_SHOWN:], first))
    return Finding(
        code="DDP900",
        severity=Severity.ERROR,
        message=f"{_subject(first)} likely failed first; why is not understood",
        ranks=() if first.rank is None else (first.rank,),
        evidence=tuple(lines),
        fix="" if failure is None else failure.fix,
    )


def _facts(first: Sighting, all_: Sequence[Sighting]) -> Iterator[str]:
    """What was printed before it, who else was in it, and what of its line is doubtful."""
    if first.doing:
        yield f"before it the log says: {shortened(first.doing, 120)}"
    all_in_it = together(all_) if name_of(first) == "nccl-timeout" else ()
    if all_in_it:
        yield (
            f"all ranks that the log shows, 0 to {all_in_it[-1]}, timed out in it: none of them "
            "was late; a rank that the log does not show may have been"
        )
    yield from _absent(first, all_)
    yield from _printed_before(first, [each for each in all_ if each.order < first.order])
    limits = (each for each in all_ if name_of(each) == "time-limit" and each.order > first.order)
    if name_of(first) != "time-limit":
        yield from (f"it came before the end of its time: {_printed(each)}" for each in limits)
    if first.context and first.context != first.text.partition("\n")[0]:
        yield f"it was raised while handling: {shortened(first.context)}"
    if first.woven:
        yield "tracebacks of several processes are mixed here: its line is not certain"
    if first.failure is not None and "nccl" in first.text.lower():
        warned = [each for each in all_ if name_of(each) == "nccl-warn"]
        yield from (f"before: {_printed(each)}" for each in warned[:_SHOWN])


def _printed_before(first: Sighting, before: Sequence[Sighting]) -> Iterator[str]:
    """What was printed before it: of what the job went on after, and of another process."""
    for each in reversed(before):
        if each.went_on or (not first.uncaught and _was_logged(each, first)):
            yield f"before it, and the log goes on after: {_printed(each)}"
            break
    for each in before:
        if each.uncaught and not (each.final or _alike(each, first)):
            yield f"before it another process ended: {_printed(each)}"
            break


def _was_logged(each: Sighting, first: Sighting) -> bool:
    """Whether a failure's rank had printed another one and gone on, as it may have after it."""
    of_rank = (each.rank, each.who) == (first.rank, first.who)
    printed = bool(each.traceback and first.traceback) and not (each.final or each.ignored)
    return of_rank and printed and not _alike(each, first)


def _absent(first: Sighting, all_: Sequence[Sighting]) -> Iterator[str]:
    """The ranks that did not come to a barrier of the store, if the log shows most that did."""
    if name_of(first) != "store-barrier":
        return
    came = {each.rank for each in all_ if name_of(each) == "store-barrier"} - {None}
    size = whole(first.groups["all"])
    missing = size - whole(first.groups["came"])
    absent = sorted({*range(min(size, _MOST_RANKS))} - came)
    if 0 < missing <= len(absent) <= 2 * missing and size <= _MOST_RANKS:
        of_them = "" if missing == len(absent) else f"{missing} of "
        yield f"{of_them}{named(absent)} did not come: see whether they started, and their output"


def _first(candidates: list[Sighting]) -> Sighting:
    """The first failure, said by the rank itself: NCCL's own lines do not say whose they are."""
    first = candidates[0]
    if first.rank is not None:
        return first
    return next((c for c in candidates if c.failure is first.failure and c.location), first)


def _others(candidates: list[Sighting], first: Sighting) -> list[Sighting]:
    """Other failures than the first one, each of a rank once."""
    found: dict[tuple[int | None, str], Sighting] = {}
    for each in candidates[1:]:
        found.setdefault((each.rank, each.failure.code if each.failure else ""), each)
    return [each for each in found.values() if not _alike(each, first)]


def _doubts(
    first: Sighting, all_: Sequence[Sighting], *, certain: bool, unordered: bool
) -> Iterator[str]:
    """Why the verdict is not certain."""
    if unordered:
        yield "the logs carry no times, so which of them was first is not known"
    if first.weight <= Weight.CONSEQUENCE and not first.ignored:
        yield "missing: the output of the rank that failed first"
    elif not first.text:
        yield "missing: the end of its traceback"
    elif not certain:
        yield _WHOSE
        ends = (e for e in all_ if e.weight == Weight.STOPPED and e.final and e.order > first.order)
        yield from (_later(each, first, "in the end") for each in islice(ends, 1))


def _alike(one: Sighting, other: Sighting) -> bool:
    if one.failure is None or other.failure is None:
        same_words = one.text.partition("\n")[0] == other.text.partition("\n")[0]
        return one.failure is other.failure and same_words
    causes = min(one.weight, other.weight) >= Weight.GENERIC
    return one.failure is other.failure or (causes and one.failure.code == other.failure.code)


def _sentence(first: Sighting, likely: bool) -> str:
    probably = "likely " if likely else ""
    subject = _subject(first)
    if first.failure is None and not first.text:
        return f"{subject} {probably}raised {_CUT}"
    if first.failure is None:
        return f"{subject} {probably}raised {shortened(first.text.partition(chr(10))[0], 200)}"
    return f"{subject} {probably}{first.failure.said(first.groups)}"


def _subject(each: Sighting) -> str:
    guilty = each.groups.get("rank") or each.groups.get("task")
    rank = guilty if guilty is not None else each.rank
    if rank is None and each.who.startswith("process "):
        return each.who
    if rank is None:
        return f"a process of {each.who}" if each.who else "a process of the job"
    return f"rank {rank}"


def _printed(each: Sighting) -> str:
    # The cause may stand earlier in a chain.
    all_ = f"{each.text}\n{each.traceback}"
    cut = each.traceback.rstrip().rpartition("\n")[2]
    text = matching_line(each.failure, all_) if each.text else cut
    return f"{each.source}:{each.line}: {shortened(text)}"


def _consequences(first: Sighting, all_: Sequence[Sighting]) -> Iterator[str]:
    """What other ranks say of it, each of them once."""
    by_rank: dict[int, Sighting] = {}
    for each in all_:
        lesser = Weight.CONSEQUENCE <= each.weight < first.weight and each.final
        if lesser and each.rank is not None and each.rank != first.rank:
            by_rank.setdefault(each.rank, each)
    lost = list(by_rank.values())
    yield from (_later(each, first, "as a consequence") for each in lost[:_SHOWN])
    if len(lost) > _SHOWN:
        yield f"{len(lost) - _SHOWN} more ranks failed after it"


def _later(each: Sighting, first: Sighting, why: str) -> str:
    delay = ""
    if each.time is not None and first.time is not None:
        seconds = each.time - first.time
        delay = f" {seconds:.0f} s later" if _TOGETHER <= seconds <= ONE_RUN else ""
    what = shortened(each.text.partition("\n")[0], 120) or _CUT
    if each.failure is not None:
        what = each.failure.said(each.groups)
        return f"{_subject(each)}{delay}, {why}: it {what}"
    return f"{_subject(each)} failed{delay}, {why}: {what}"

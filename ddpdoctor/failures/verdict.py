"""From what a log tells to findings: the first cause, its consequences, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.failures import Weight, telling_line
from ddpdoctor.failures.lines import shortened
from ddpdoctor.failures.log import Sighting

_SHOWN = 3
_TOGETHER = 1.0
"""Seconds within which lines of different logs are of one moment: clocks differ."""


def findings(sightings: Sequence[Sighting]) -> list[Finding]:
    """What to say of the logs of one job; nothing if no process failed.

    Args:
        sightings: Those of all of its logs.
    """
    found = [_note(each) for each in _first_of_code(sightings, Weight.NOTE)]
    candidates, certain = _candidates(sightings)
    if candidates:
        found.insert(0, _verdict(candidates, certain, sightings))
    return found


def causes(sightings: Sequence[Sighting]) -> list[Sighting]:
    """What may have ended the job, the likeliest first; empty if no process failed."""
    return _candidates(sightings)[0]


def _first_of_code(sightings: Sequence[Sighting], weight: Weight) -> Iterator[Sighting]:
    seen = set()
    for each in sightings:
        if each.failure is not None and each.weight == weight and each.failure.code not in seen:
            seen.add(each.failure.code)
            yield each


def _candidates(sightings: Sequence[Sighting]) -> tuple[list[Sighting], bool]:
    """What may be the cause, the first in time first, and whether it is known to be one."""
    failed = any(each.weight >= Weight.WRAPPER for each in sightings if each.final)
    if not failed:
        return [], False
    for weights in ((Weight.CAUSE,), (Weight.GENERIC,), (Weight.SYMPTOM,)):
        final = [each for each in sightings if each.weight in weights and each.final]
        if final:
            return _ordered(final), True
    # Plain lines came after it, which may be those of other ranks, if lines do not say whose.
    unsure = [each for each in sightings if each.weight >= Weight.SYMPTOM and each.rank is None]
    if unsure:
        return _ordered(unsure)[-1:], False
    lost = [each for each in sightings if each.weight == Weight.CONSEQUENCE]
    if lost:
        return _ordered(lost), False
    told = [each for each in sightings if each.weight == Weight.WRAPPER]
    return sorted(told, key=_wrapper_order), False


def _wrapper_order(each: Sighting) -> tuple[bool, bool, tuple[int, int]]:
    """Whose status is 1 comes before those that torchrun stopped, and before its own exception."""
    stopped = each.failure is not None and each.failure.name == "stopped-by-torchrun"
    return stopped, each.rank is None, each.order


def _ordered(sightings: list[Sighting]) -> list[Sighting]:
    """By time where it is known of all; else by their place in the log."""
    if _timed(sightings):
        return sorted(sightings, key=lambda each: (each.time or 0.0, each.order))
    return sorted(sightings, key=lambda each: each.order)


def _timed(sightings: Sequence[Sighting]) -> bool:
    """Whether their times order them: within a single log its lines do so better."""
    several = len({each.source for each in sightings}) > 1
    return several and all(each.time is not None for each in sightings)


def _note(each: Sighting) -> Finding:
    assert each.failure is not None
    failure = each.failure
    return Finding(
        code=failure.code,
        severity=failure.severity,
        message=f"{_subject(each)} {failure.said(each.groups)}",
        ranks=() if each.rank is None else (each.rank,),
        evidence=(_printed(each),),
        fix=failure.fix,
    )


def _verdict(candidates: list[Sighting], certain: bool, all_: Sequence[Sighting]) -> Finding:
    first = candidates[0]
    if first.rank is None:
        # The same failure, told by the rank itself: NCCL's own lines do not say whose they are.
        first = next((c for c in candidates if c.failure is first.failure and c.location), first)
    same = [each for each in candidates if _alike(each, first) and each.rank != first.rank]
    others = {(each.rank, each.failure and each.failure.code): each for each in candidates[:0:-1]}
    other = [each for each in reversed(others.values()) if not _alike(each, first)]
    rivals = {each.source for each in other} - {first.source}
    unordered = bool(rivals) and not _timed(candidates)
    failure = first.failure
    likely = not certain or unordered or (failure is not None and failure.likely)
    guilty = first.groups.get("rank")
    named = {each.rank for each in (first, *same) if each.rank is not None}
    evidence = [_printed(first)]
    if same:
        numbers = ", ".join(str(rank) for rank in sorted(named - {first.rank}))
        evidence.append(
            f"rank{'s' if len(named) > 2 else ''} {numbers} failed on it, too"
            if numbers
            else "another process failed on it, too"
        )
    evidence += [_later(each, first, "too") for each in other[:_SHOWN]]
    evidence += _consequences(first, all_)
    if unordered:
        evidence.append("the logs carry no times, so which of them was first is not known")
    if first.weight <= Weight.CONSEQUENCE:
        evidence.append("missing: the output of the rank that failed first")
    elif not certain:
        evidence.append("lines do not say whose they are, and the log goes on after it")
    return Finding(
        code="DDP901" if failure is None else failure.code,
        severity=Severity.ERROR if failure is None else failure.severity,
        message=_sentence(first, likely),
        ranks=(int(guilty),) if guilty else tuple(sorted(named)),
        location=first.location,
        evidence=tuple(evidence),
        fix=failure.fix
        if failure is not None
        else "Fix this exception first; failures of other ranks follow from it.",
        traceback=first.traceback,
    )


def _alike(one: Sighting, other: Sighting) -> bool:
    if one.failure is None or other.failure is None:
        same_words = one.text.partition("\n")[0] == other.text.partition("\n")[0]
        return one.failure is other.failure and same_words
    causes = min(one.weight, other.weight) >= Weight.GENERIC
    return one.failure is other.failure or (causes and one.failure.code == other.failure.code)


def _sentence(first: Sighting, likely: bool) -> str:
    probably = "likely " if likely else ""
    subject = _subject(first)
    if first.failure is None:
        return f"{subject} {probably}raised {shortened(first.text.partition(chr(10))[0], 200)}"
    return f"{subject} {probably}{first.failure.said(first.groups)}"


def _subject(each: Sighting) -> str:
    guilty = each.groups.get("rank") or each.groups.get("task")
    rank = guilty if guilty is not None else each.rank
    return "a process of the job" if rank is None else f"rank {rank}"


def _printed(each: Sighting) -> str:
    return f"{each.source}:{each.line}: {shortened(telling_line(each.failure, each.text))}"


def _consequences(first: Sighting, all_: Sequence[Sighting]) -> Iterator[str]:
    """What other ranks say of it, each of them once."""
    told = {first.rank}
    lost = []
    for each in all_:
        lesser = Weight.CONSEQUENCE <= each.weight < first.weight and each.final
        if lesser and each.rank is not None and each.rank not in told:
            told.add(each.rank)
            lost.append(each)
    yield from (_later(each, first, "as a consequence") for each in lost[:_SHOWN])
    if len(lost) > _SHOWN:
        yield f"{len(lost) - _SHOWN} more ranks failed after it"


def _later(each: Sighting, first: Sighting, why: str) -> str:
    delay = ""
    if each.time is not None and first.time is not None and each.time - first.time >= _TOGETHER:
        delay = f" {each.time - first.time:.0f} s later"
    what = shortened(each.text.partition("\n")[0], 120)
    if each.failure is not None:
        what = each.failure.said(each.groups)
        return f"{_subject(each)}{delay}, {why}: it {what}"
    return f"{_subject(each)} failed{delay}, {why}: {what}"

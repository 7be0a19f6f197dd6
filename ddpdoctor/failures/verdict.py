"""Choose the first cause among the failures in a job's logs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count, named
from ddpdoctor.core.opening import whole
from ddpdoctor.failures import advice, matching_line
from ddpdoctor.failures.entry import Failure, Weight
from ddpdoctor.failures.lines import shortened
from ddpdoctor.failures.occurrences import (
    LAST_WORDS,
    LATER,
    STATUS,
    Occurrence,
    Runs,
    likely,
    name_of,
    split,
)
from ddpdoctor.failures.table import PHRASES
from ddpdoctor.failures.tracebacks import is_handled

# -- Ranks of torchrun's report, for exceptions without a rank


_RAISED = re.compile(r"exitcode\s*: ?1\b")
_SUMMARY = re.compile(r"^\s*exitcode\s*:")
"""In torchrun's final report, which has global ranks. An earlier line has local ones."""


def with_ranks(occurrences: Sequence[Occurrence]) -> Sequence[Occurrence]:
    """Assign the ranks that ended with status 1 to a run's exceptions if these are equal."""
    raised = [
        each
        for each in occurrences
        if each.traceback and each.uncaught and each.weight in (Weight.CAUSE, Weight.GENERIC)
    ]
    ranks = _failed(occurrences)
    alike = len({each.text for each in raised}) == 1
    if not alike or not ranks or any(each.rank is not None or each.who for each in raised):
        return occurrences
    # An exception that plain lines follow is assigned last.
    raised.sort(key=lambda each: not each.final)
    given = {id(each): rank for each, rank in zip(raised, ranks, strict=False)}
    return [replace(e, rank=given[id(e)]) if id(e) in given else e for e in occurrences]


def _failed(occurrences: Sequence[Occurrence]) -> list[int]:
    """Return the ranks that ended with status 1, torchrun's first failure first."""
    status = [each for each in occurrences if STATUS.search(each.text) and each.rank is not None]
    status = [each for each in status if _SUMMARY.match(each.text)] or status
    if any(not _RAISED.search(each.text) and each.root for each in status):
        return []
    ordered = sorted(status, key=lambda each: (not each.root, each.order))
    failed = (each.rank for each in ordered if _RAISED.search(each.text))
    return list(dict.fromkeys(rank for rank in failed if rank is not None))


# -- Comparison of NCCL's timeouts on several ranks


_GROUP = re.compile(r"\bPG (?:ID )?(\d+)")
_SIZES = re.compile(r"NumelIn=(\d+), NumelOut=(\d+)")
_APART = 1_000
"""Maximum difference of two numbers in one group: NCCL enqueues no more ahead of the others."""

_ENOUGH = 3  # Minimum number of waiting ranks before one without a line is reported as missing


@dataclass(frozen=True)
class Place:
    """The collective in which a rank timed out."""

    number: int
    operation: str
    sizes: str

    def __str__(self) -> str:
        return f"{self.operation or 'collective'} #{self.number}{self.sizes}"

    def differs(self, other: Place) -> bool:
        """Return whether it is another collective. Parts that the log cut off match anything."""
        operations, sizes = {self.operation, other.operation}, {self.sizes, other.sizes}
        return len(operations - {""}) > 1 or len(sizes - {""}) > 1


@dataclass(frozen=True)
class Awaited:
    """The ranks that the others waited for, and the evidence."""

    ranks: tuple[int, ...]
    said: str
    differ: bool = False  # All ranks are at the same number, but some in another collective


def awaited(occurrences: Sequence[Occurrence]) -> Awaited | None:
    """Return the ranks that the others waited for, or None if their timeouts do not show it."""
    places: dict[str, dict[int, Place]] = defaultdict(dict)
    enqueued: dict[str, dict[int, int]] = defaultdict(dict)
    at: dict[tuple[int, int], str] = {}  # Groups by rank and number of the collective
    for each in occurrences:
        if each.rank is not None and "enqueued" in each.groups:
            group = _group_of(each)
            enqueued[group].setdefault(each.rank, int(each.groups["enqueued"]))
            if "at" in each.groups:
                at.setdefault((each.rank, int(each.groups["at"])), group)
    for each in occurrences:
        if each.rank is None or name_of(each) != "nccl-timeout" or "seq" not in each.groups:
            continue
        number = whole(each.groups["seq"])
        group = _group_of(each) or at.get((each.rank, number), "")
        sizes = _SIZES.search(each.text)
        words = f" of {sizes[1]} elements" if sizes else ""
        # Later timeouts of a rank follow from the first.
        place = Place(number, each.groups.get("op", ""), words)
        places[group].setdefault(each.rank, place)
    if not places:
        return None
    if len(places) == 2 and "" in places:
        # Some lines leave the group out.
        unnamed = places.pop("")
        (known,) = places.values()
        known.update({rank: unnamed[rank] for rank in unnamed.keys() - known.keys()})
    group = max(places, key=lambda name: len(places[name]))
    last = max((e for e in occurrences if "seq" in e.groups), key=lambda each: each.order)
    only = next(iter(enqueued)) if not group and len(enqueued) == 1 else group
    return _compared(places[group], enqueued[only], cut="ms" not in last.groups)


def _group_of(each: Occurrence) -> str:
    found = _GROUP.search(each.text)
    return found[1] if found else ""


def together(occurrences: Sequence[Occurrence]) -> tuple[int, ...]:
    """Return the ranks that timed out in one collective, if no lower rank is missing."""
    places: dict[int, tuple[str, Mapping[str, str]]] = {}
    for each in occurrences:
        if each.failure is None or each.rank is None or "seq" not in each.groups:
            continue
        if each.failure.known.name == "nccl-timeout":
            group = _group_of(each)
            facts = {name: each.groups.get(name, "") for name in ("seq", "op")}
            places.setdefault(each.rank, (group, facts))
    alike = len(places) > 1 and all(each == next(iter(places.values())) for each in places.values())
    ranks = tuple(sorted(places))
    return ranks if alike and ranks == tuple(range(len(ranks))) else ()


def _compared(places: dict[int, Place], enqueued: dict[int, int], *, cut: bool) -> Awaited | None:
    highest = max(place.number for place in places.values())
    lowest = min(place.number for place in places.values())
    at_highest = Counter(place for place in places.values() if place.number == highest)
    others = max(at_highest, key=lambda place: (at_highest[place], len(str(place))))
    if highest - lowest > _APART:
        return None
    if lowest < highest:
        behind = tuple(sorted(rank for rank, place in places.items() if place.number == lowest))
        count = f"{highest - lowest} behind the others, which waited in {others}"
        return Awaited(behind, f"{_was(behind)} in {places[behind[0]]}, {count}")
    late = {rank: number for rank, number in enqueued.items() if 0 <= number < highest}
    if late and len(late) < len({*places, *enqueued}):
        least = min(late.values())
        behind = tuple(sorted(rank for rank, number in late.items() if number == least))
        came = f"{_was(behind).split()[0]} had not called {others}, in which {named(places)} waited"
        return Awaited(behind, f"{came}; the last one that it had called is #{least}")
    odd = tuple(sorted(rank for rank, place in places.items() if place.differs(others)))
    if odd:
        where = f"{_was(odd)} in {places[odd[0]]}, where the others were in {others}"
        return Awaited(odd, where, True)
    # A log that ends among the timeouts shows nothing about the other ranks.
    return None if cut else _missing(places, others)


def _missing(places: dict[int, Place], others: Place) -> Awaited | None:
    """Return the few ranks without a timeout in the log, if all others have one."""
    missing = tuple(sorted({*range(max(places))} - {*places}))
    if len(places) >= _ENOUGH and 0 < len(missing) <= len(places) // 3:
        shows = f"the log shows no timeout of {'it' if len(missing) == 1 else 'them'}"
        return Awaited(missing, f"{shows}; the others waited in {others}")
    return None


def _was(ranks: tuple[int, ...]) -> str:
    return "it was" if len(ranks) == 1 else "they were"


# -- Candidates for the cause of a run's end


_OF_GPU = re.compile(r"(?i)cuda|nvidia|nccl|gpu|driver")
_STATUSES = ("exit-status", "crash-status", "illegal-instruction", "bus-error", "abort-status")
"""Ends of processes as their launcher reports them, which may follow from other ends."""

ONE_RUN = 7 * 86_400.0
"""Maximum seconds between times of one run. Larger differences come from a missing year or zone."""


def causes(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return what may have ended the job, the likeliest first. Empty if no process failed."""
    return found_in(occurrences)[0]


def found_in(occurrences: Sequence[Occurrence]) -> tuple[list[Occurrence], bool]:
    """Return the possible causes, the earliest first, and whether it is certain."""
    occurrences = _without_later_ends(_without_limits(_without_yielding(occurrences)))
    if not any(_may_have_ended_it(e) and name_of(e) != LAST_WORDS for e in occurrences):
        return [each for each in occurrences if name_of(each) == LAST_WORDS], False
    if causes := _explaining(occurrences):
        before = _raised_before(causes[0], occurrences)
        return _undefined_last(_ordered(before or causes)), not before
    return _lesser(occurrences)


def _lesser(occurrences: Sequence[Occurrence]) -> tuple[list[Occurrence], bool]:
    """Return what a run without a known cause says about its end, as `found_in` does."""
    lost = _not_of_wrappers(_lost(occurrences), occurrences)
    unsure = [each for each in occurrences if _is_unsure(each) and not (each.mention and lost)]
    if unsure:
        return _ordered(unsure)[-1:], False
    if said := _without_types(lost, occurrences):
        return _ordered(said), True
    if lost:
        return _ordered(lost), lost[0].weight == Weight.STOPPED
    mention = [each for each in occurrences if each.mention and each.behind < LATER]
    if mention:
        return _ordered(mention), False
    wrappers = [each for each in occurrences if each.weight == Weight.WRAPPER]
    remarks = [each for each in occurrences if each.weight == Weight.REMARK and each.final]
    return _wrappers_ordered(wrappers) or remarks, False


def _not_of_wrappers(cut: list[Occurrence], occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return exceptions without their messages, unless a command that failed explains them.

    A program that starts a launcher raises an exception after it, too.
    """
    failed = [e for e in occurrences if name_of(e) == "process-failed" and e.traceback]
    if any(each.text or each.rank is not None for each in cut) or not failed:
        return cut
    return [e for e in cut if e.source != failed[0].source or e.order < failed[0].order]


def _without_types(
    cut: Sequence[Occurrence], occurrences: Sequence[Occurrence]
) -> list[Occurrence]:
    """Return the known messages that follow exceptions whose types are cut off."""
    if not cut or any(each.text for each in cut):
        return []
    return [
        likely(each, each.failure, each.failure.severity)
        for each in occurrences
        if each.mention and each.failure and each.order > cut[0].order
    ]


def _may_have_ended_it(each: Occurrence) -> bool:
    warns = (each.is_warning and each.weight != Weight.WRAPPER) or each.warned
    return each.weight >= Weight.REMARK and not warns and (each.final or each.uncaught)


def _is_unsure(each: Occurrence) -> bool:
    """Return whether plain lines followed that may be those of other ranks."""
    near = each.rank is None and each.behind < LATER
    return each.weight >= Weight.SYMPTOM and (each.uncaught or near)


def _explaining(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return the ends of the greatest weight that may be a cause.

    A warning counts if nothing else does, or if an exception about the GPU confirms it.
    """
    weights = (Weight.DECISIVE, Weight.CAUSE, Weight.GENERIC, Weight.SYMPTOM)
    sure = _ending([each for each in occurrences if not each.warned], *weights)
    confirms = any(each.traceback and _OF_GPU.search(each.text) for each in sure)
    return sure if sure and not confirms else _ending(occurrences, *weights)


def _ending(occurrences: Sequence[Occurrence], *weights: Weight) -> list[Occurrence]:
    """Return what ended a process, of the first of these weights that occurs."""
    found = ([e for e in occurrences if e.weight == weight and e.final] for weight in weights)
    return next((each for each in found if each), [])


def _lost(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Return what followed from an unknown cause, or may have been only logged."""
    # A traceback without its end says less than a lost peer.
    uncut = [each for each in occurrences if each.text]
    lost = _ending(uncut, Weight.STOPPED, Weight.BARE, Weight.CONSEQUENCE)
    return lost or _ending(occurrences, Weight.BARE)


def _raised_before(first: Occurrence, all_: Sequence[Occurrence]) -> list[Occurrence]:
    """Return exceptions that ended a process before a launcher reported another end."""
    if name_of(first) not in _STATUSES:
        return []
    return [e for e in all_ if e.uncaught and e.weight == Weight.CAUSE and e.order < first.order]


_UNDEFINED = re.compile(r"(?:NameError|UnboundLocalError): ")
_AT_LINE = re.compile(r'^\s*File "([^"\n]+)", line (\d+), in <module>$', re.MULTILINE)


def _undefined_last(causes: list[Occurrence]) -> list[Occurrence]:
    """Move a name that is not defined behind an exception on an earlier line of the script.

    Code for cleaning up uses what the failed line should have defined.
    """
    place = _AT_LINE.search(causes[0].traceback)
    if place is None or not _UNDEFINED.match(causes[0].text):
        return causes

    def is_later(each: Occurrence) -> bool:
        own = _AT_LINE.search(each.traceback)
        return own is None or own[1] != place[1] or int(own[2]) >= int(place[2])

    return sorted(causes, key=is_later)


def _without_yielding(occurrences: Sequence[Occurrence]) -> list[Occurrence]:
    """Drop occurrences that another failure in the log explains."""
    # Failures that the job survived explain no end.
    names = {
        name_of(each) for each in occurrences if not each.traceback or each.final or each.uncaught
    }
    left, explained = [], set[str]()
    for each in occurrences:
        nearer = set[str]()
        if each.failure is not None:
            nearer = names & {*each.failure.yields_to}
            nearer |= {
                name_of(one)
                for one in occurrences
                if name_of(one) in each.failure.follows and one.order < each.order
            }
        if not nearer:
            left.append(each)
        elif each.final or each.uncaught:
            explained |= nearer
    # A failure that explains the end of a process ended it.
    return [
        replace(each, final=True, ignored=False) if name_of(each) in explained else each
        for each in left
    ]


def _without_limits(occurrences: list[Occurrence]) -> list[Occurrence]:
    """Drop time limits that came after a failure."""
    failed = [
        each.order
        for each in occurrences
        if each.final
        and (name_of(each) == "nccl-timeout" or (each.uncaught and each.weight == Weight.CAUSE))
    ]
    return [
        each
        for each in occurrences
        if name_of(each) != "time-limit" or not any(order < each.order for order in failed)
    ]


def _without_later_ends(occurrences: list[Occurrence]) -> list[Occurrence]:
    """Drop ends of processes that torchrun's report dates after the first, as it stops the rest."""
    first: dict[str, float] = {}
    for each in occurrences:
        if _is_dated(each) and each.time is not None:
            first[each.source] = min(each.time, first.get(each.source, each.time))
    return [
        each
        for each in occurrences
        if not _is_dated(each)
        or name_of(each) not in ("killed-status", *_STATUSES)
        or (each.time or 0.0) < first.get(each.source, 0.0) + _TOGETHER
    ]


def _is_dated(each: Occurrence) -> bool:
    return _SUMMARY.match(each.text) is not None and each.time is not None


def _wrappers_ordered(wrappers: Sequence[Occurrence]) -> list[Occurrence]:
    """Sort ranks with status 1 before those that torchrun stopped, and before its exception.

    Each node's torchrun reports a first failure. The earliest of them was first.
    """
    times = [each.time for each in wrappers if each.root]
    timed = None not in times

    def order(each: Occurrence) -> tuple[bool, bool, bool, float, tuple[int, int]]:
        stopped = name_of(each) == "stopped-by-torchrun"
        time = each.time if timed and each.root else None
        return stopped, not each.root, each.rank is None, time or 0.0, each.order

    return sorted(wrappers, key=order)


def _ordered(occurrences: list[Occurrence]) -> list[Occurrence]:
    """Sort by time if all have one, else by their place in the log.

    torchrun's report names the rank that failed first after the others.
    """
    if is_timed(occurrences):
        return sorted(occurrences, key=lambda each: (each.time or 0.0, each.order))
    others = {id(e) for e in occurrences if _SUMMARY.match(e.text) and not e.root}
    return sorted(occurrences, key=lambda each: (id(each) in others, each.order))


def is_timed(occurrences: Sequence[Occurrence]) -> bool:
    """Return whether to sort by time. Within a single log, the order of lines is better."""
    several = len({each.source for each in occurrences}) > 1
    times = [each.time for each in occurrences if each.time is not None]
    return several and len(times) == len(occurrences) and max(times) - min(times) <= ONE_RUN


# -- The verdict


_WHOSE = "lines do not say which process they come from, and the log goes on after it"
_ALONE = "it has no traceback, so it may only have been logged"
_CUT = "an exception whose message is cut off in the log"
_SHOWN = 3
_SOURCE_LINE = re.compile(r"\n +(?!File )(\w[^\n]*)(?:\n[ ^~]+)?\n\w+\s*\Z")
"""The last line of source code above an exception without a message."""

_WAITS, _REPEATED = "store-barrier-waits", 2
"""A rank's line, every 10 s while it waits, and how many show more than a slow start."""

_MEMBER = "lightning-member"  # A process that joins the process group of a Trainer

_MAX_RANKS = 100_000  # Maximum ranks of a job whose missing ranks are listed

_TOGETHER = 1.0
"""Seconds within which lines of different logs count as simultaneous, since clocks differ."""


def findings(occurrences: Sequence[Occurrence]) -> list[Finding]:
    """Return the findings of a job's logs. Empty if no process failed.

    Args:
        occurrences: The occurrences in all of its logs.
    """
    runs = split(occurrences)
    notes: dict[str, Finding] = {}
    for each in runs.last:
        waits = name_of(each) == _WAITS
        if each.failure is not None and each.weight == Weight.NOTE and each.final and not waits:
            notes.setdefault(name_of(each), _note(each, each.failure))
    found = _of_run(runs.last)
    failed = any(each.severity == Severity.ERROR for each in found)
    if found:
        # The failure explains why processes did not clean up.
        notes.pop("left-behind", None)
    elif (waiting := _waiting(runs.last)) is not None:
        found = [waiting]
    earlier = [one for each in runs.earlier for one in _earlier(each, runs)]
    if failed:
        said = tuple(f"before: {each.message}" for each in earlier[:_SHOWN])
        found[0] = replace(found[0], evidence=(*found[0].evidence, *said))
    else:
        found = [*earlier, *found]
    return [*found, *notes.values()]


def _waiting(occurrences: Sequence[Occurrence]) -> Finding | None:
    """Return the finding of a rank that waits in a barrier of the store until the log's end."""
    members = [each for each in occurrences if name_of(each) == _MEMBER]
    if members:
        return _absent_members(members)
    waits = [each for each in occurrences if name_of(each) == _WAITS]
    last = waits[-1] if waits else None
    if last is None or last.failure is None or last.plain_after:
        return None
    key = (last.groups["rank"], last.groups["key"])
    alike = [each for each in waits if (each.groups["rank"], each.groups["key"]) == key]
    came, size = whole(last.groups["came"]), whole(last.groups["all"])
    if not last.final or (len(alike) < _REPEATED and came <= size):
        return None
    note = _note(last, last.failure)
    if came <= size:
        return note
    return replace(
        note,
        message=f"{_subject(last)} waits in the setup of a process group of {size} ranks, "
        f"which {came} processes have joined: more than its world size",
        fix="Start as many processes as the world size. If there are as many, the store or the "
        "file:// file is from an earlier start: use a new port or file.",
    )


def _absent_members(members: Sequence[Occurrence]) -> Finding | None:
    """Return the finding of a Trainer that waits until the log's end for other processes."""
    last = members[-1]
    came = {int(each.groups["member"]) for each in members}
    size = int(last.groups["size"])
    if last.failure is None or last.plain_after or not last.final or len(came) >= size:
        return None
    message = f"{_subject(last)} {last.failure.said({})}: the log ends with {len(came)} of {size}"
    return replace(_note(last, last.failure), message=message)


def _of_run(occurrences: Sequence[Occurrence]) -> list[Finding]:
    """Return the findings of one run."""
    occurrences = with_ranks(occurrences)
    candidates, certain = found_in(occurrences)
    return [_verdict(candidates, certain, occurrences)] if candidates else _caught(occurrences)


def _earlier(occurrences: Sequence[Occurrence], runs: Runs) -> list[Finding]:
    """Return the findings of the last but one run of a log."""
    source = occurrences[0].source
    return [
        replace(
            each,
            severity=Severity.INFO,
            message=f"in an earlier run, which ends at {source}:{occurrences[-1].last}, "
            f"{each.message}; the last run begins at line {runs.borders[source]}",
            evidence=tuple(line for line in each.evidence if line != _WHOSE),
        )
        for each in _of_run(occurrences)
        if each.severity == Severity.ERROR
    ]


def _caught(occurrences: Sequence[Occurrence]) -> list[Finding]:
    """Return the last exceptions that a job survived, or its last warning."""
    over = {
        (name_of(each), each.text.partition(":")[0], each.location): each
        for each in occurrences
        if each.traceback and (each.weight >= Weight.CONSEQUENCE or each.ignored)
    }
    warned = [
        each
        for each in occurrences
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


def _note(each: Occurrence, failure: Failure) -> Finding:
    return Finding(
        code=failure.code,
        severity=failure.severity,
        message=f"{_subject(each)} {failure.said(each.groups)}",
        ranks=() if each.rank is None else (each.rank,),
        evidence=(_printed(each),),
        fix=failure.advised(each.groups),
    )


def _verdict(candidates: list[Occurrence], certain: bool, all_: Sequence[Occurrence]) -> Finding:
    first = candidates[0]
    if first.rank is None:
        # NCCL's own lines have no rank. Take the failure as the rank itself reported it.
        own = (each for each in candidates if each.failure is first.failure and each.location)
        first = next(own, first)
    late = awaited(all_) if name_of(first) == "nccl-timeout" else None
    if late is not None and first.failure is not None:
        return _of_late(late, first, first.failure, all_)
    remarks = [each for each in all_ if each.weight == Weight.REMARK]
    if first.weight == Weight.WRAPPER:
        remarks = [each for each in remarks if name_of(each) != LAST_WORDS]
    if first.weight in (Weight.WRAPPER, Weight.REMARK) and remarks:
        return _not_understood(first, remarks)
    return _of_first(first, candidates, certain, all_)


def _of_first(
    first: Occurrence, candidates: list[Occurrence], certain: bool, all_: Sequence[Occurrence]
) -> Finding:
    """Return the finding of the first failure, with its consequences."""
    other = _others(candidates, first)
    unordered = not is_timed(candidates) and any(each.source != first.source for each in other)
    failure = first.failure
    likely = not certain or unordered or (failure is not None and failure.likely)
    alike = [each for each in candidates if _alike(each, first)]
    failed = {each.rank for each in (first, *alike) if each.rank is not None}
    if len(failed) == 1 and failure is not None and not first.who:
        # Lines of CUDA and C++ stand without the rank that its launcher or torch names behind them.
        first = replace(first, rank=min(failed))
    raised = _raised(first, alike)
    too = failed - {first.rank}
    evidence = [
        _printed(first),
        *([f"{named(too)} failed on it, too"] if too else ()),
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
        fix=_fix(first, failed, all_),
        traceback=raised.traceback,
    )


def _raised(first: Occurrence, alike: Sequence[Occurrence]) -> Occurrence:
    """Return the exception of a failure that another line shows. GPU errors have no traceback."""
    own = (each for each in alike if each.location and each.rank in (None, first.rank))
    shown = first.traceback or first.weight != Weight.CAUSE
    return first if shown else next(own, first)


def _fix(first: Occurrence, failed: Collection[int], all_: Sequence[Occurrence]) -> str:
    if first.failure is None:
        return advice.for_exception(first, failed, all_)
    own = advice.for_memory(first) or advice.of_text(first.text, first.traceback, PHRASES)
    return own or advice.for_timeout(first, first.failure.advised(first.groups), all_)


def _of_late(
    late: Awaited, first: Occurrence, failure: Failure, all_: Sequence[Occurrence]
) -> Finding:
    """Return the finding of a timeout with known late ranks."""
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
        fix=advice.for_timeout(
            first,
            "Find out what it did instead: a branch on the rank, an unequal number of batches, a "
            "slow save or evaluation, or a crash. `ddpdoctor run` names the line.",
            all_,
        ),
        traceback=first.traceback,
    )


def _not_understood(first: Occurrence, remarks: Sequence[Occurrence]) -> Finding:
    """Return the finding of a failure that is not known."""
    failure = remarks[0].failure
    lines = dict.fromkeys(_printed(each) for each in (*remarks[:_SHOWN], *remarks[-_SHOWN:], first))
    alone = all(name_of(each) in ("nccl-warn", LAST_WORDS) for each in (first, *remarks))
    said = (
        f"{first.failure.said(first.groups)}, and the log ends" if alone and first.failure else ""
    )
    return Finding(
        code="DDP900",
        severity=Severity.WARNING if alone else Severity.ERROR,
        message=f"{_subject(first)} {said or 'likely failed first, for an unknown reason'}",
        ranks=() if first.rank is None else (first.rank,),
        evidence=tuple(lines),
        fix=f"{_fix_of_remarks(remarks)} {failure.fix if failure else ''}".strip(),
    )


def _fix_of_remarks(remarks: Sequence[Occurrence]) -> str:
    steps = (advice.of_text(each.text) for each in remarks)
    return next(filter(None, steps), "")


def _facts(first: Occurrence, all_: Sequence[Occurrence]) -> Iterator[str]:
    """Yield earlier lines, other affected ranks, and doubts about its line."""
    if first.failure is None:
        yield from advice.where(first)
    if first.doing:
        yield f"before it the log says: {shortened(first.doing, 120)}"
    yield from _scale_fell([each for each in all_ if each.order < first.order])
    all_in_it = together(all_) if name_of(first) == "nccl-timeout" else ()
    if all_in_it:
        yield (
            f"all ranks that the log shows, 0 to {all_in_it[-1]}, timed out in it: none of them "
            "was late; a rank that the log does not show may have been"
        )
    yield from _absent(first, all_)
    yield from _unsubmitted(first, all_)
    yield from _taken(first, all_)
    yield from _printed_before(first, [each for each in all_ if each.order < first.order])
    limits = (each for each in all_ if name_of(each) == "time-limit" and each.order > first.order)
    if name_of(first) != "time-limit":
        yield from (f"it came before the time limit: {_printed(each)}" for each in limits)
    if first.context and first.context != first.text.partition("\n")[0]:
        yield f"it was raised while handling: {shortened(first.context)}"
    if first.interleaved:
        yield "tracebacks of several processes are mixed here: its line is uncertain"
    yield from _warned(first, [each for each in all_ if each.order < first.order])


def _scale_fell(before: Sequence[Occurrence]) -> Iterator[str]:
    """Report that gradients overflowed again and again before a failure."""
    scales = [each for each in before if name_of(each) == "loss-scale-falls"]
    if len(scales) >= _SHOWN:
        fell = f"the loss scale fell {len(scales)} times, to {scales[-1].groups['scale']}"
        yield f"before it {fell}: the gradients overflowed"


def _warned(first: Occurrence, before: Sequence[Occurrence]) -> Iterator[str]:
    """Return earlier warnings that may explain it: the first ones of NCCL, or the last of any."""
    shown = []
    if not first.text or name_of(first) in ("killed-status", *_STATUSES):
        shown = [e for e in before if e.weight in (Weight.REMARK, Weight.BARE)][-_SHOWN:]
    elif first.weight != Weight.CAUSE or "nccl" in first.text.lower():
        shown = [each for each in before if name_of(each) == "nccl-warn"][:_SHOWN]
    yield from (f"before: {_printed(each)}" for each in shown)


def _printed_before(first: Occurrence, before: Sequence[Occurrence]) -> Iterator[str]:
    """Yield an earlier failure that the job survived, and one that ended another process."""
    for each in reversed(before):
        if each.went_on or (not first.uncaught and _was_logged(each, first)):
            yield f"before it, and the log goes on after: {_printed(each)}"
            break
    if name_of(first) == "killed-status":
        yield from (
            f"before it another process had failed, and launchers kill the rest: {_printed(each)}"
            for each in islice(filter(_is_exit, before), 1)
        )
    for each in before:
        if each.uncaught and not (each.final or _alike(each, first)):
            yield f"before it another process ended: {_printed(each)}"
            break


_ANNOUNCES = re.compile(r"(?:detected|noticed) that one or more processes")
"""The head of a launcher's report, whose next lines name the process that failed."""


def _is_exit(each: Occurrence) -> bool:
    """Return whether a launcher reports a process's exit, other than in torchrun's summary."""
    reports = name_of(each) in ("process-failed", "first-exit") and "xit" in each.text
    return reports and not STATUS.search(each.text) and not _ANNOUNCES.search(each.text)


def _was_logged(each: Occurrence, first: Occurrence) -> bool:
    """Return whether the rank had printed another failure and survived it."""
    of_rank = (each.rank, each.who) == (first.rank, first.who)
    printed = bool(each.traceback and first.traceback) and not (each.final or each.ignored)
    return of_rank and printed and not _alike(each, first)


def _absent(first: Occurrence, all_: Sequence[Occurrence]) -> Iterator[str]:
    """List the ranks missing at a barrier of the store, if the log shows most others."""
    if name_of(first) != "store-barrier":
        return
    came = {each.rank for each in all_ if name_of(each) == "store-barrier"} - {None}
    size = whole(first.groups["all"])
    missing = size - whole(first.groups["came"])
    absent = sorted({*range(min(size, _MAX_RANKS))} - came)
    if 0 < missing <= len(absent) <= 2 * missing and size <= _MAX_RANKS:
        of_them = "" if missing == len(absent) else f"{missing} of "
        yield f"{of_them}{named(absent)} did not join: check whether they started, and their output"


def _unsubmitted(first: Occurrence, all_: Sequence[Occurrence]) -> Iterator[str]:
    """Name the ranks that Horovod lists below a stall."""
    if name_of(first) == "horovod-stall":
        listed = [each for each in all_ if name_of(each) == "horovod-absent"]
        of = (each.groups.get("absent") or each.rank for each in listed)
        if ranks := sorted({int(rank) for rank in of if rank is not None}):
            yield f"{named(ranks)} had not submitted them"


def _taken(first: Occurrence, all_: Sequence[Occurrence]) -> Iterator[str]:
    """Yield the line that names the port which another process holds."""
    if first.failure is not None and first.failure.code == "DDP002":
        taken = (e for e in all_ if name_of(e) == "port-taken" and e.order < first.order)
        yield from (f"before: {_printed(each)}" for each in islice(taken, 1))


def _others(candidates: list[Occurrence], first: Occurrence) -> list[Occurrence]:
    """Return other failures than the first one, once for each rank."""
    found: dict[tuple[int | None, str], Occurrence] = {}
    for each in candidates[1:]:
        found.setdefault((each.rank, each.failure.code if each.failure else ""), each)
    return [each for each in found.values() if not _alike(each, first)]


def _doubts(
    first: Occurrence, all_: Sequence[Occurrence], *, certain: bool, unordered: bool
) -> Iterator[str]:
    """Yield the reasons why the verdict is not certain."""
    if unordered:
        yield "the logs have no timestamps, so it is not known which came first"
    if first.weight <= Weight.CONSEQUENCE and not first.ignored:
        yield "missing: the output of the rank that failed first"
    elif not first.text:
        yield "missing: the end of its traceback"
    elif not certain:
        yield _ALONE if first.bare and first.final else _WHOSE
        ends = (e for e in all_ if e.weight == Weight.STOPPED and e.final and e.order > first.order)
        yield from (_later(each, first, "in the end") for each in islice(ends, 1))


def _alike(one: Occurrence, other: Occurrence) -> bool:
    if one.failure is None or other.failure is None:
        same_words = one.text.partition("\n")[0] == other.text.partition("\n")[0]
        return one.failure is other.failure and same_words
    causes = min(one.weight, other.weight) >= Weight.GENERIC
    return one.failure is other.failure or (causes and one.failure.code == other.failure.code)


def _sentence(first: Occurrence, likely: bool) -> str:
    probably = "likely " if likely else ""
    subject = _subject(first)
    if first.failure is None and not first.text:
        known = advice.phase(first)
        return f"{subject} {probably}raised {_CUT}{f', as it {known.doing}' if known else ''}"
    if first.failure is None:
        lost = ", and then one that is cut off in the log" if is_handled(first.text) else ""
        return f"{subject} {probably}raised {shortened(_named(first), 200)}{lost}"
    return f"{subject} {probably}{first.failure.said(first.groups)}"


def _named(first: Occurrence) -> str:
    """Return an exception with its message. If it has none, with the line that raised it."""
    text = first.text.partition("\n")[0]
    source = _SOURCE_LINE.search(first.traceback)
    return f"{text.rstrip(':')} at `{source[1]}`" if source and text.isidentifier() else text


def _subject(each: Occurrence) -> str:
    guilty = each.groups.get("rank") or each.groups.get("task")
    rank = guilty if guilty is not None else each.rank
    if rank is None and each.who.startswith("process "):
        return each.who
    if rank is None:
        return f"a process of {each.who}" if each.who else "a process of the job"
    return f"rank {rank}"


def _printed(each: Occurrence) -> str:
    # The cause may be earlier in a chain.
    all_ = f"{each.text}\n{each.traceback}"
    cut = each.traceback.rstrip().rpartition("\n")[2]
    text = matching_line(each.failure, all_) if each.text else cut
    return f"{each.source}:{_line_of(each, text)}: {shortened(text)}"


def _line_of(each: Occurrence, text: str) -> int:
    """Return the number of the line of an occurrence that a text begins with."""
    lines = [line.strip() for line in each.traceback.split("\n")]
    found = (
        at for at, line in zip(each.numbers, lines, strict=False) if line and text.startswith(line)
    )
    return max(found, default=each.line)


def _consequences(first: Occurrence, all_: Sequence[Occurrence]) -> Iterator[str]:
    """Yield what other ranks report as consequences, once for each."""
    by_rank: dict[int, Occurrence] = {}
    for each in all_:
        lesser = Weight.CONSEQUENCE <= each.weight < first.weight and each.final
        if lesser and each.rank is not None and each.rank != first.rank:
            by_rank.setdefault(each.rank, each)
    alike: dict[str, list[Occurrence]] = defaultdict(list)
    for each in by_rank.values():
        alike[_said(each)].append(each)
    for said, several in [*alike.items()][:_SHOWN]:
        ranks = sorted(rank for rank, each in by_rank.items() if each in several)
        yield (
            _later(several[0], first, "too" if said == _CUT else "as a consequence")
            if len(ranks) == 1
            else f"{named(ranks)}, {'too' if said == _CUT else 'as a consequence'}: each {said}"
        )
    if more := sum(map(len, [*alike.values()][_SHOWN:])):
        yield f"{count(more, 'more rank')} failed after it"


def _later(each: Occurrence, first: Occurrence, why: str) -> str:
    delay = ""
    if each.time is not None and first.time is not None:
        seconds = each.time - first.time
        delay = f" {seconds:.0f} s later" if _TOGETHER <= seconds <= ONE_RUN else ""
    if each.failure is not None:
        return f"{_subject(each)}{delay}, {why}: it {_said(each)}"
    return f"{_subject(each)} failed{delay}, {why}: {_said(each)}"


def _said(each: Occurrence) -> str:
    """Return the predicate of the sentence about a failure."""
    if each.failure is None:
        return shortened(each.text.partition("\n")[0], 120) or _CUT
    return each.failure.said(each.groups)

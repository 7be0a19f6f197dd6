"""Findings about the end of an attempt, and the known failure (`ddpdoctor.failures`) if any.

Also about an exception that is delayed by a collective in a ``finally`` or ``__exit__``.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import duration, named
from ddpdoctor.core.relations import ABORT, END, LOST, MISPAIRED, MODELS, STANDSTILL
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.checkpoints.prefixes import refused_for_prefix
from ddpdoctor.diagnose.crashes.out_of_memory import GPU_MEMORY, gpu_facts
from ddpdoctor.diagnose.crashes.rank_endings import (
    Ending,
    endings,
    first_failure,
    in_short,
    is_consequence,
    mispaired,
)
from ddpdoctor.diagnose.crashes.resource_errors import (
    UNREADABLE,
    file_facts,
    path_fault,
    port_facts,
    torn,
)
from ddpdoctor.diagnose.gradients.reducer import is_explained
from ddpdoctor.diagnose.hangs.diagnosis import guilty
from ddpdoctor.diagnose.replicas.differences import is_refusal
from ddpdoctor.diagnose.source_files import brief, quoted
from ddpdoctor.failures import matching_line, recognise
from ddpdoctor.failures.entry import Failure, Weight
from ddpdoctor.failures.lines import shortened
from ddpdoctor.failures.log import read
from ddpdoctor.failures.occurrences import Occurrence
from ddpdoctor.failures.tracebacks import parse
from ddpdoctor.failures.verdict import causes
from ddpdoctor.run.records.process import ErrorRecord, PendingErrorRecord
from ddpdoctor.run.snapshot import Rank, Run

OF_ENDINGS = frozenset(
    {"DDP900", "DDP902", "DDP903", "DDP904", "DDP905", "DDP906", "DDP907", "DDP908"}
)
"""Codes of the ways in which a process ends, which a run shows without any message."""

_REFUSED = 2  # The exit status of argparse

_OF_PEERS = re.compile(r"\bpeers?\b|\b(?:other|another) (?:node|rank)")
"""Matches messages of failures that need two ranks."""

_NATIVE = re.compile(r"what\(\)|NCCL WARN|: error: unrecognized")


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, and how it ended."""

    run: Run
    restart: int
    endings: list[Ending]  # The failed processes, earliest first
    cause: Ending | None  # The first process that failed by itself

    @property
    def last(self) -> bool:
        """Whether this is the last attempt."""
        return self.restart == self.run.restarts[-1]

    @property
    def explained(self) -> bool:
        """Whether another rule names the cause with more than the exception's text."""
        cause = self.cause
        if cause is None or cause.kind != "exception" or not self.last:
            return False
        return is_explained(cause.text) or refused_for_prefix(self.run, cause)

    def finding(
        self,
        code: str,
        cause: Ending,
        message: str,
        fix: str,
        *,
        evidence: tuple[str, ...] = (),
        location: Location | None = None,
        traceback: str = "",
        lost: bool = False,
    ) -> Finding:
        """Make a finding about the attempt's end. It is a warning if another attempt followed.

        Location and traceback default to those of the cause. A rank that ``lost`` a peer is not the
        cause, so another finding may name the cause.
        """
        severity = Severity.ERROR
        # torchrun exits with 0 only if its last attempt succeeded on every rank.
        succeeded = self.run.exit_status == 0 and self.run.manifest.get("launcher") == "torchrun"
        if not self.last or succeeded:
            severity = Severity.WARNING
            message = f"attempt {self.restart + 1}: {message}"
            evidence += ("another attempt followed",)
        location = location or cause.location
        if location is None and cause.last_seen is not None:
            evidence = (f"the last line seen before it was {cause.last_seen}", *evidence)
        return Finding(
            code=code,
            severity=severity,
            message=message,
            ranks=() if cause.rank is None else (cause.rank,),
            location=location,
            evidence=evidence + cause.notes + tuple(self._consequences(cause)),
            fix=fix,
            traceback=traceback or cause.traceback,
            subjects=self._subjects(cause, lost=lost),
            moment=cause.time,
            restart=self.restart,
        )

    def _subjects(self, cause: Ending, *, lost: bool) -> frozenset[str]:
        """Return the subjects that other findings may explain. They exist for the last attempt."""
        kinds = {
            MISPAIRED: mispaired(self.run, cause),
            ABORT: cause.status == -signal.SIGABRT,
            MODELS: is_refusal(cause.text),
            LOST: lost,
        }
        known = (name for name, is_so in kinds.items() if is_so and self.last)
        return frozenset((f"{END}{self.restart + 1}", *known))

    @cached_property
    def _clock_errors(self) -> dict[int | None, int]:
        """The maximum error of other nodes' clocks by rank, in nanoseconds."""
        return {
            rank.rank: node.error for node in self.run.nodes for rank in self.run.ranks_on(node)
        }

    def _consequences(self, cause: Ending) -> Iterator[str]:
        # A victim may report its end before the end of the lost rank is noticed.
        later = [
            each
            for each in self.endings
            if each is not cause and (each.victim or each.time > cause.time)
        ]
        for each in later[:3]:
            delay = max(0.0, (each.time - cause.time) / 1e9)
            why = "as a consequence" if each.victim else "too"
            text = each.text.partition(". ")[0] if each.victim else truncated(each.text)
            when = f"{delay:.1f} s later"
            error = self._clock_errors.get(each.rank, 0) + self._clock_errors.get(cause.rank, 0)
            if error and not each.victim and each.time - cause.time <= error:
                when = f"at the same time, within the clocks' error of {duration(error / 1e9)}"
            yield f"{each.name} failed {when}, {why}: {text}"
        if len(later) > 3:
            yield f"{len(later) - 3} more ranks failed after it"


def attempts(run: Run) -> Iterator[Attempt]:
    """Yield the attempts of a run, earliest first."""
    for restart in run.restarts:
        yield Attempt(run, restart, endings(run, restart), first_failure(run, restart))


def truncated(text: str, width: int = 120) -> str:
    """Truncate a text to a maximum number of characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def moment(cause: Ending) -> str:
    """Describe the activity of a process when it ended, as the end of a sentence."""
    place = f" in {cause.where}" if cause.where else ""
    return place if cause.initialized else f"{place} before it joined the process group"


# -- the table of known failures


@dataclass(frozen=True)
class KnownFailure:
    """The table's entry for the failure that ended an attempt."""

    cause: Ending  # The end that it explains
    failure: Failure
    groups: Mapping[str, str]  # The matches of its pattern's groups
    line: str  # The matched line
    likely: bool = False  # Whether it is inferred from messages of other ranks
    lost: bool = False
    """Whether no rank failed by itself. If known, the reason for their wait is the cause."""


def known_failure(attempt: Attempt) -> KnownFailure | None:
    """Return the known failure that ended an attempt, if there is one."""
    cause, run = attempt.cause, attempt.run
    if cause is None:
        return _of_victims(attempt)
    if cause.kind == "exception":
        failure, groups = _known(cause)
        if failure is None or failure.weight <= Weight.CONSEQUENCE or failure.code in OF_ENDINGS:
            return None
        if attempt.explained or (run.world_size == 1 and _OF_PEERS.search(failure.says)):
            return None
        # NCCL's warnings contain details that its exception lacks.
        warned = (
            _in_stderr(run, cause, Weight.GENERIC) if failure.weight == Weight.GENERIC else None
        )
        line = matching_line(failure, cause.printed)
        return warned or KnownFailure(cause, failure, groups, line)
    if cause.oom or not attempt.last:
        return None
    if cause.kind == "exit":
        refused = cause.status == _REFUSED and not cause.initialized
        return _in_stderr(run, cause, Weight.CAUSE) if refused else None
    return _in_stderr(run, cause, Weight.SYMPTOM)


def _known(ending: Ending) -> tuple[Failure | None, Mapping[str, str]]:
    """Return the failure that an exception reports."""
    found = recognise(ending.printed, ending.traceback)
    printed = parse(ending.traceback)
    chained = printed.known if printed is not None else (None, {})
    if found is None:
        return chained
    better = chained[0] is found[0] and len(chained[1]) > len(found[1])
    heavier = chained[0] is not None and chained[0].weight > found[0].weight
    return chained if better or heavier else found


def _of_victims(attempt: Attempt) -> KnownFailure | None:
    """Return the failure that all ranks report if none of them names a cause."""
    if not attempt.run.exit_status or not attempt.last:
        return None
    victims = [each for each in attempt.endings if each.victim and each.kind == "exception"]
    for ending in victims:
        failure, groups = _known(ending)
        if failure is not None and failure.weight == Weight.SYMPTOM:
            if failure.code in OF_ENDINGS:
                return None
            line = matching_line(failure, ending.printed)
            return KnownFailure(ending, failure, groups, line, likely=True, lost=True)
    return None if attempt.endings else _without_rank(attempt.run)


def _without_rank(run: Run) -> KnownFailure | None:
    """Return the failure in stderr if no rank recorded one, such as a failure of the launcher."""
    for each in causes(_occurrences(run)):
        failure = each.failure
        if failure is None or failure.weight < Weight.SYMPTOM or failure.code in OF_ENDINGS:
            return None
        line = matching_line(failure, each.text)
        ending = Ending(
            rank=each.rank,
            time=run.taken,
            kind="exception",
            victim=False,
            text=line,
            location=each.location,
            traceback=each.traceback,
            message=each.text,
        )
        return KnownFailure(ending, failure, each.groups, line, lost=True)
    return None


def _in_stderr(run: Run, cause: Ending, least: Weight) -> KnownFailure | None:
    """Return the failure that native code or argparse printed for this rank or without a rank."""
    for each in _occurrences(run):
        failure = each.failure
        if failure is None or failure.weight < least or failure.code in OF_ENDINGS:
            continue
        if run.world_size == 1 and _OF_PEERS.search(failure.says):
            continue
        if each.rank in (None, cause.rank) and _NATIVE.search(each.text):
            return KnownFailure(cause, failure, each.groups, each.text)
    return None


def _occurrences(run: Run) -> list[Occurrence]:
    """Return the known failures in the job's stderr, which holds that of the last attempt."""
    return read("stderr", [run.every_stderr.encode("utf-8", "replace")])


def known_finding(attempt: Attempt, known: KnownFailure) -> Finding | None:
    """Make the finding about a known failure. None for a torn checkpoint, which DDP501 reports."""
    cause, failure = known.cause, known.failure
    if cause is attempt.cause and cause.kind == "exception" and torn(attempt.run) == cause:
        return None
    about_port = port_facts(attempt.run, cause, failure)
    facts = about_port if about_port.said else file_facts(cause, failure)
    if failure.code == GPU_MEMORY and attempt.last:
        facts = gpu_facts(attempt.run, cause)
    path = path_fault(attempt.run, cause) if failure.code in UNREADABLE and attempt.last else None
    said = (facts.said or failure.said(known.groups)) + (path.said if path is not None else "")
    fix = path.fix if path is not None else facts.fix or failure.advised(known.groups)
    likely = "likely " if known.likely or failure.likely else ""
    return attempt.finding(
        failure.code,
        cause,
        f"{cause.name} {likely}{said}",
        fix,
        evidence=(f"it says: {shortened(known.line)}", *facts.evidence),
        lost=known.lost,
    )


# -- an exception that a collective delays


def raised_before_a_wait(run: Run) -> Finding | None:
    """Report such an exception (DDP901) if the job certainly hangs or has failed."""
    found = _alone(run)
    if not found or len(run.last) < 2:
        return None
    rank, error = min(found, key=lambda each: each[1].time)
    restart = run.restarts[-1]
    cause = first_failure(run, restart)
    ends = endings(run, restart)
    if cause is not None and cause.time < error.time:
        return None
    own = cause is None or cause.rank == rank.rank or mispaired(run, cause)
    failed = bool(ends) and own and all(each.time >= error.time for each in ends)
    if not failed and not guilty(run):
        return None
    where = f" in step {error.step}" if error.step is not None else ""
    return Finding(
        code="DDP901",
        about=f"pending {rank.rank}",
        severity=Severity.ERROR,
        subjects=frozenset((STANDSTILL, MISPAIRED, ABORT)),
        message=f"{named([rank.rank])} raised {in_short(error)[:200]}{where}, and called "
        f"{error.collective} at {quoted(error.called_at)} while that was being handled: the other "
        "ranks do not come to this call",
        ranks=(rank.rank,),
        location=error.location,
        evidence=(f"the exception waits for {error.collective} at {brief(error.called_at)}",),
        fix="Fix this exception first. Call no collective in a `finally`, `except` or `__exit__` "
        "that an exception of one rank leads to.",
        traceback=error.traceback,
        moment=error.time,
    )


def _alone(run: Run) -> list[tuple[Rank, PendingErrorRecord]]:
    """Return the ranks that alone call a collective, while an exception is being handled."""
    found = [
        (rank, error)
        for rank in run.last
        if (error := _pending(rank)) is not None and not is_consequence(error)
    ]
    # Ranks that all handle the same exception call their collective together.
    places = {(error.exception, error.location) for _, error in found}
    if len(found) == len(run.last) and len(places) == 1:
        return []
    handling = {rank.rank for rank, _ in found}
    return [each for each in found if not _others_came(run, each[0], handling)]


def _pending(rank: Rank) -> PendingErrorRecord | None:
    """Return the exception that a rank was handling when it called its last collective."""
    pending, status = rank.records.of(PendingErrorRecord), rank.status
    if not pending or status is None or rank.ended is not None or rank.records.of(ErrorRecord):
        return None
    last = pending[-1]
    there = status.collective == last.collective and status.site == str(last.called_at)
    return last if there and status.step == last.step else None


def _others_came(run: Run, rank: Rank, handling: set[int]) -> bool:
    """Return whether ranks without an exception called this rank's collective as well."""
    calls = rank.ring.collectives if rank.ring is not None else ()
    if not calls:
        return False
    mine = calls[-1]
    return any(
        (each.group, each.sequence, each.site) == (mine.group, mine.sequence, mine.site)
        for other in run.last
        if other.rank not in handling and other.ring is not None
        for each in other.ring.collectives
    )

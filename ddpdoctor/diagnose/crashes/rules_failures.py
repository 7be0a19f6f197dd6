"""Rules for the table of known failures (`ddpdoctor.failures`), and findings about an attempt."""

from __future__ import annotations

import functools
import re
import signal
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ddpdoctor.core.finding import RULES, Detect, Finding, Rule, Severity
from ddpdoctor.core.relations import (
    ABORT,
    END,
    LOST,
    MISPAIRED,
    MODELS,
    ended_by,
    same_subject,
)
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose import APART, STANDSTILLS
from ddpdoctor.diagnose.checkpoints.rules import refused_for_prefix
from ddpdoctor.diagnose.crashes import resource_errors
from ddpdoctor.diagnose.crashes.rank_endings import Ending, endings, first_failure, mispaired
from ddpdoctor.diagnose.crashes.resource_errors import file_facts, torn
from ddpdoctor.diagnose.gradients.reducer import is_explained
from ddpdoctor.diagnose.replicas.rules_models import is_refusal
from ddpdoctor.failures import matching_line, recognise
from ddpdoctor.failures.entry import Failure, Weight
from ddpdoctor.failures.lines import shortened
from ddpdoctor.failures.log import read
from ddpdoctor.failures.occurrences import Occurrence
from ddpdoctor.failures.table import TABLE
from ddpdoctor.failures.tracebacks import parse
from ddpdoctor.failures.verdict import causes
from ddpdoctor.run.snapshot import Run

# -- findings about the end of an attempt: the cause, and what came of it on other ranks


EXPLAINED_BY = dict.fromkeys(sorted({*APART, *STANDSTILLS, "DDP707", "DDP801"}), ended_by)
"""The rules of which the end of an attempt may be the consequence."""


def attempt_finding(
    run: Run,
    code: str,
    restart: int,
    cause: Ending,
    message: str,
    fix: str,
    *,
    evidence: tuple[str, ...] = (),
    location: Location | None = None,
    traceback: str = "",
    lost: bool = False,
) -> Finding:
    """A finding about an attempt that failed; a warning if another attempt followed it.

    Of a rank that ``lost`` a peer the cause is elsewhere, and perhaps another finding names it.
    """
    severity = Severity.ERROR
    # torchrun ends with 0 only if its last attempt succeeded, on every rank.
    torchrun_succeeded = run.exit_status == 0 and run.manifest.get("launcher") == "torchrun"
    if restart != run.restarts[-1] or torchrun_succeeded:
        severity = Severity.WARNING
        message = f"attempt {restart + 1}: {message}"
        evidence += ("another attempt followed it",)
    location = location or cause.location
    if location is None and cause.last_seen is not None:
        evidence = (f"the last line seen before it was {cause.last_seen}", *evidence)
    return Finding(
        code=code,
        severity=severity,
        message=message,
        ranks=() if cause.rank is None else (cause.rank,),
        location=location,
        evidence=evidence + cause.notes + tuple(_consequences(run, restart, cause)),
        fix=fix,
        traceback=traceback,
        subjects=_subjects(run, restart, cause, lost=lost),
        moment=cause.time,
        restart=restart,
    )


def _subjects(run: Run, restart: int, cause: Ending, *, lost: bool) -> frozenset[str]:
    """What other findings may explain such an end; only those of the last attempt are known."""
    end = f"{END}{restart + 1}"
    if restart != run.restarts[-1]:
        return frozenset((end,))
    kinds = {
        MISPAIRED: mispaired(run, cause),
        ABORT: cause.status == -signal.SIGABRT,
        MODELS: is_refusal(cause.text),
        LOST: lost,
    }
    return frozenset((end, *(name for name, so in kinds.items() if so)))


def _consequences(run: Run, restart: int, cause: Ending) -> Iterator[str]:
    # A victim may report its end before the end of the rank that it lost was seen.
    later = [
        each
        for each in endings(run, restart)
        if each is not cause and (each.victim or each.time > cause.time)
    ]
    for each in later[:3]:
        delay = max(0.0, (each.time - cause.time) / 1e9)
        why = "as a consequence" if each.victim else "too"
        text = each.text.partition(". ")[0] if each.victim else truncated(each.text)
        yield f"{each.name} failed {delay:.1f} s later, {why}: {text}"
    if len(later) > 3:
        yield f"{len(later) - 3} more ranks failed after it"


def truncated(text: str, width: int = 120) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def moment(cause: Ending) -> str:
    """What it did at that moment, as the end of a sentence."""
    place = f" in {cause.where}" if cause.where else ""
    return place if cause.initialized else f"{place} before it joined the process group"


# -- failures


OF_ENDINGS = frozenset(
    {"DDP900", "DDP902", "DDP903", "DDP904", "DDP905", "DDP906", "DDP907", "DDP908"}
)
"""Codes of the ways in which a process ends: of a run they are known without any text."""


_REFUSED = 2
"""The exit status of argparse."""

_OF_PEERS = re.compile(r"\bpeers?\b|\b(?:other|another) (?:node|rank)")
"""What a failure says that takes two ranks."""

_NATIVE = re.compile(r"what\(\)|NCCL WARN|: error: unrecognized")


@dataclass(frozen=True)
class Diagnosis:
    """The known failure behind the end of an attempt.

    Attributes:
        restart: The attempt.
        cause: The end that it explains.
        failure: The table's row.
        groups: What its pattern's groups matched.
        line: The line by which it is known.
        likely: It follows from what others say.
        code: The code of a rule that knows more, if one does.
        lost: No rank failed by itself: what kept ranks waiting, if that is known, is the cause.
    """

    restart: int
    cause: Ending
    failure: Failure
    groups: Mapping[str, str]
    line: str
    likely: bool = False
    code: str = ""
    lost: bool = False


_last: tuple[weakref.ref[Run], tuple[Diagnosis, ...]] | None = None


def diagnoses(run: Run) -> tuple[Diagnosis, ...]:
    """The known failures of a run, one per attempt at most; made once for each snapshot."""
    global _last
    if _last is None or _last[0]() is not run:
        found = (_diagnosis(run, restart) for restart in run.restarts)
        _last = weakref.ref(run), tuple(each for each in found if each is not None)
    return _last[1]


def recognised(run: Run, restart: int) -> bool:
    """Whether one of the rules here says why an attempt failed."""
    return any(each.restart == restart for each in diagnoses(run))


def _diagnosis(run: Run, restart: int) -> Diagnosis | None:
    cause = first_failure(run, restart)
    if cause is None:
        return _of_victims(run, restart)
    if cause.kind == "exception":
        if restart == run.restarts[-1] and _named_elsewhere(run, cause):
            return None
        failure, groups = _known(cause)
        if failure is None or failure.weight <= Weight.CONSEQUENCE or failure.code in OF_ENDINGS:
            return None
        if run.world_size == 1 and _OF_PEERS.search(failure.says):
            return None
        if failure.weight == Weight.GENERIC:
            # NCCL's own warnings say what its exception leaves open.
            warned = next(_in_stderr(run, restart, cause, Weight.GENERIC), None)
            if warned is not None:
                return warned
        line = matching_line(failure, cause.printed)
        code = "DDP501" if torn(run) == cause else ""
        return Diagnosis(restart, cause, failure, groups, line, code=code)
    if cause.oom or restart != run.restarts[-1]:
        return None
    if cause.kind == "exit":
        refused = cause.status == _REFUSED and not cause.initialized
        return next(_in_stderr(run, restart, cause, Weight.CAUSE), None) if refused else None
    return next(_in_stderr(run, restart, cause, Weight.SYMPTOM), None)


def _named_elsewhere(run: Run, cause: Ending) -> bool:
    """Whether a rule that saw more than the exception's text names its cause."""
    return is_explained(cause.text) or refused_for_prefix(run, cause)


def _known(ending: Ending) -> tuple[Failure | None, Mapping[str, str]]:
    """The failure that an exception reports."""
    found = recognise(ending.printed, ending.traceback)
    printed = parse(ending.traceback)
    chained = printed.known if printed is not None else (None, {})
    if found is None:
        return chained
    better = chained[0] is found[0] and len(chained[1]) > len(found[1])
    heavier = chained[0] is not None and chained[0].weight > found[0].weight
    return chained if better or heavier else found


def _of_victims(run: Run, restart: int) -> Diagnosis | None:
    """What all ranks' complaints have in common, where none names a cause."""
    if not run.exit_status or restart != run.restarts[-1]:
        return None
    victims = [each for each in endings(run, restart) if each.victim and each.kind == "exception"]
    for ending in victims:
        failure, groups = _known(ending)
        if failure is not None and failure.weight == Weight.SYMPTOM:
            if failure.code in OF_ENDINGS:
                return None
            line = matching_line(failure, ending.printed)
            return Diagnosis(restart, ending, failure, groups, line, likely=True, lost=True)
    return None if victims else next(_without_rank(run, restart), None)


def _without_rank(run: Run, restart: int) -> Iterator[Diagnosis]:
    """What stands in stderr where no rank recorded anything: the launcher's own failure, say."""
    if endings(run, restart):
        return
    for each in causes(_sightings(run)):
        failure = each.failure
        if failure is None or failure.weight < Weight.SYMPTOM or failure.code in OF_ENDINGS:
            return
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
        yield Diagnosis(restart, ending, failure, each.groups, line, lost=True)


def _in_stderr(run: Run, restart: int, cause: Ending, least: Weight) -> Iterator[Diagnosis]:
    """What native code, or argparse, printed for the rank that ended, or for none."""
    for each in _sightings(run):
        failure = each.failure
        if failure is None or failure.weight < least or failure.code in OF_ENDINGS:
            continue
        if run.world_size == 1 and _OF_PEERS.search(failure.says):
            continue
        if each.rank in (None, cause.rank) and _NATIVE.search(each.text):
            yield Diagnosis(restart, cause, failure, each.groups, each.text)


def _sightings(run: Run) -> list[Occurrence]:
    """The known failures in the job's stderr, which belong to its last attempt."""
    return read("stderr", [run.stderr.encode("utf-8", "replace")])


def _table_findings(code: str, run: Run) -> Iterator[Finding]:
    for each in diagnoses(run):
        failure = each.failure
        if (each.code or failure.code) != code:
            continue
        about_port = resource_errors.port_facts(run, each.cause, failure)
        facts = about_port if about_port.said else file_facts(each.cause, failure)
        likely = "likely " if each.likely or failure.likely else ""
        said = facts.said or failure.said(each.groups)
        yield attempt_finding(
            run,
            code,
            each.restart,
            each.cause,
            f"{each.cause.name} {likely}{said}",
            facts.fix or failure.fix,
            evidence=(f"it says: {shortened(each.line)}", *facts.evidence),
            traceback=each.cause.traceback,
            lost=each.lost,
        )


def _beside(first: Detect, second: Detect, run: Run) -> Iterator[Finding]:
    found = list(first(run))
    yield from found
    # What the rule itself says of the same thing says more.
    yield from (each for each in second(run) if not any(same_subject(one, each) for one in found))


def register() -> None:
    """Add the table's codes to the rules; a code that a rule has already is found in both ways."""
    own = dict.fromkeys(failure.code for failure in TABLE)
    for code in own:
        rows = [failure for failure in TABLE if failure.code == code]
        page = next((str(each.page) for each in rows if each.page is not None), "")
        detect: Detect = functools.partial(_table_findings, code)
        known = RULES.get(code)
        if known is None:
            RULES[code] = Rule(
                code, rows[0].known.name, rows[0].severity, detect, page, yields_to=EXPLAINED_BY
            )
        elif code not in OF_ENDINGS:
            both = functools.partial(_beside, known.detect, detect)
            # Of two codes of the table neither may wait for the other.
            yields_to = {c: same for c, same in EXPLAINED_BY.items() if c not in own or c < code}
            yields_to = {**yields_to, **known.yields_to}
            RULES[code] = replace(known, detect=both, text=known.page, yields_to=yields_to)

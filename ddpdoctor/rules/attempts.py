"""Findings about the end of an attempt: the cause, and what came of it on other ranks."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from ddpdoctor.analysis.endings import Ending, endings, mispaired
from ddpdoctor.core.finding import Finding, Location, Severity
from ddpdoctor.core.relations import (
    ABORT,
    APART,
    END,
    LOST,
    MISPAIRED,
    MODELS,
    STANDSTILLS,
    ended_by,
)
from ddpdoctor.rules.models import refused
from ddpdoctor.run.snapshot import Run

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
        MODELS: refused(cause.text),
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
        text = each.text.partition(". ")[0] if each.victim else short(each.text)
        yield f"{each.name} failed {delay:.1f} s later, {why}: {text}"
    if len(later) > 3:
        yield f"{len(later) - 3} more ranks failed after it"


def short(text: str, width: int = 120) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= width else text[: width - 3] + "..."


def moment(cause: Ending) -> str:
    """What it did at that moment, as the end of a sentence."""
    place = f" in {cause.where}" if cause.where else ""
    return place if cause.initialized else f"{place} before it joined the process group"

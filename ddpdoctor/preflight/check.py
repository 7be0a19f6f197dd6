"""What a preflight check is, what it yields, and the registry of them all."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.preflight.situation import Situation

LIMIT = 10.0
"""Seconds that a check may take unless it says otherwise; never more than ``--timeout``."""


class Status(Enum):
    """How a check ended; the value is the word that is printed."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"
    COULD_NOT_RUN = "could not run"
    """The check broke or did not end in time: nothing is known, neither good nor bad."""


@dataclass(frozen=True)
class Outcome:
    """What a check found out.

    Attributes:
        status: How it ended.
        detail: One line: what was really tested ("8 of 8 ranks reduced correctly"), or why it was
            skipped or could not run.
        findings: What is wrong, each with its fix and, in `Finding.paste`, a line to type.
        check: The check's name; `ddpdoctor.preflight.running` fills it in.
        seconds: How long it took; filled in as well.
    """

    status: Status
    detail: str
    findings: tuple[Finding, ...] = ()
    check: str = ""
    seconds: float = 0.0


def passed(detail: str) -> Outcome:
    """Tested, and well."""
    return Outcome(Status.PASS, detail)


def skipped(reason: str) -> Outcome:
    """Not tested, for a reason such as ``no GPU``."""
    return Outcome(Status.SKIPPED, reason)


def could_not_run(reason: str) -> Outcome:
    """Not tested, though it should have been."""
    return Outcome(Status.COULD_NOT_RUN, reason)


def judged(detail: str, findings: Iterable[Finding]) -> Outcome:
    """Tested: the worst finding decides; information alone, or nothing, is a pass."""
    found = tuple(sorted(findings, key=lambda finding: -finding.severity))
    worst = max((finding.severity for finding in found), default=Severity.INFO)
    status = {Severity.ERROR: Status.FAIL, Severity.WARNING: Status.WARN}.get(worst, Status.PASS)
    return Outcome(status, detail, found)


Scope = Literal["machine", "nodes"]
Run = Callable[[Situation], Outcome]


@dataclass(frozen=True)
class Check:
    """One test of a machine, or of a set of nodes.

    Attributes:
        name: What ``--only`` and ``--skip`` take.
        code: The code of its findings; ``ddpdoctor explain`` prints its page. DDP001 to DDP049 are
            of a machine, DDP050 to DDP099 of several nodes.
        needs_torch: Whether it imports torch (in a process of its own, never in this one).
        scope: ``nodes`` checks run when there is more than one node.
        limit: Seconds it may take.
        run: The test. It never raises for a fault of the machine; an exception is a fault of the
            check, and is told as one.
    """

    name: str
    code: str
    needs_torch: bool
    scope: Scope
    limit: float
    run: Run

    @property
    def page(self) -> str:
        """The documentation page: the function's docstring."""
        return inspect.getdoc(self.run) or ""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]


CHECKS: dict[str, Check] = {}
"""All registered checks by name, in the order of the table; importing the package fills it."""


def check(
    name: str,
    code: str,
    *,
    needs_torch: bool = False,
    scope: Scope = "machine",
    limit: float = LIMIT,
) -> Callable[[Run], Run]:
    """Register a check.

    Raises:
        ValueError: The name or the code is taken.
    """

    def register(run: Run) -> Run:
        if name in CHECKS or any(other.code == code for other in CHECKS.values()):
            raise ValueError(f"{name} ({code}) is registered twice")
        CHECKS[name] = Check(name, code, needs_torch, scope, limit, run)
        return run

    return register


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """An outcome in the words of JSON."""
    return {
        "check": outcome.check,
        "code": CHECKS[outcome.check].code if outcome.check in CHECKS else None,
        "status": outcome.status.value,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
        "findings": [to_record(finding) for finding in outcome.findings],
    }

"""The registry of preflight checks, what a check yields, and how they run.

Findings that say the same of several GPUs become one: "GPUs 0-7 have ...".
"""

from __future__ import annotations

import inspect
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial, wraps
from typing import Any, Literal

from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.core.formatting import spans
from ddpdoctor.preflight.situation import Situation

# -- findings that say the same of several GPUs become one: "GPUs 0-7 have ..."


_GPU = re.compile(r"\bGPU (\d+)\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_CHOSEN = re.compile(r"(-i) \d+\b")

_PLURAL = {"has": "have", "is": "are", "does": "do", "waits": "wait"}
"""Verbs behind a GPU's number."""


def merge_gpu_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings of a check; those that differ in the GPU and in numbers alone are one."""
    groups: dict[object, list[Finding]] = {}
    for each in findings:
        start = _GPU.match(each.message)
        alike = (each.severity, _NUMBER.sub("#", each.message)) if start else id(each)
        groups.setdefault(alike, []).append(each)
    return tuple(each[0] if len(each) == 1 else _of_several_gpus(each) for each in groups.values())


def _of_several_gpus(group: Sequence[Finding]) -> Finding:
    first = group[0]
    numbers = sorted({int(_GPU.findall(each.message)[0]) for each in group})
    rest = _GPU.sub("", first.message, count=1)
    verb = rest.split(maxsplit=1)[0] if rest.startswith(" ") else ""
    if verb in _PLURAL:
        rest = rest.replace(verb, _PLURAL[verb], 1)
    own = _GPU.sub("GPU", first.message)
    same = all(_GPU.sub("GPU", each.message) == own for each in group)
    return replace(
        first,
        message=f"GPUs {spans(numbers)}{rest}",
        evidence=first.evidence if same else tuple(each.message for each in group[:16]),
        paste=_CHOSEN.sub(rf"\1 {','.join(map(str, numbers))}", first.paste),
    )


# -- what a preflight check is and what it yields, the registry of them all, and how they run


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
        exclude: The nodes that a job has to do without, by host name.
    """

    status: Status
    detail: str
    findings: tuple[Finding, ...] = ()
    check: str = ""
    seconds: float = 0.0
    exclude: tuple[str, ...] = ()


def passed(detail: str) -> Outcome:
    """Tested, and well."""
    return Outcome(Status.PASS, detail)


def skipped(reason: str) -> Outcome:
    """Not tested, for a reason such as ``no GPU``."""
    return Outcome(Status.SKIPPED, reason)


def could_not_run(reason: str) -> Outcome:
    """Not tested, though it should have been."""
    return Outcome(Status.COULD_NOT_RUN, reason)


def judged(detail: str, findings: Iterable[Finding], *, exclude: Iterable[str] = ()) -> Outcome:
    """Tested: the worst finding decides; information alone, or nothing, is a pass."""
    found = tuple(sorted(findings, key=lambda finding: -finding.severity))
    worst = max((finding.severity for finding in found), default=Severity.INFO)
    status = {Severity.ERROR: Status.FAIL, Severity.WARNING: Status.WARN}.get(worst, Status.PASS)
    return Outcome(status, detail, found, exclude=tuple(dict.fromkeys(exclude)))


class Skip(Exception):
    """What a check needs is not there: it is skipped, for this reason."""


def finding(severity: Severity, message: str, *, fix: str, paste: str, **more: Any) -> Finding:
    """A finding of a check, whose code the registry fills in.

    Args:
        severity: See :class:`Severity`.
        message: One sentence.
        fix: What to change.
        paste: A line to type that does it.
        more: Other fields of :class:`Finding`.
    """
    return Finding("", severity, message, fix=fix, paste=paste, **more)


def typed(line: str, *values: object) -> str:
    """A line to type: each value takes the place of a ``{}``, as one word of a shell.

    The one way by which a value comes into such a line, since a name, a path or a version may be
    anything, and may be another machine's.
    """
    return line.format(*(shlex.quote(str(value)) for value in values))


failure = partial(finding, Severity.ERROR)
warning = partial(finding, Severity.WARNING)
note = partial(finding, Severity.INFO, fix="", paste="")


Scope = Literal["machine", "nodes"]
Run = Callable[[Situation], Outcome]


@dataclass(frozen=True)
class Check:
    """One test of a machine, or of a set of nodes.

    Attributes:
        name: What ``--only`` and ``--skip`` take.
        code: The code of its findings; ``ddpdoctor explain`` prints its page. DDP001 to DDP049 are
            of a machine, DDP050 to DDP099 of several nodes.
        scope: ``nodes`` checks run when there is more than one node.
        limit: Seconds it may take.
        run: The test. It never raises for a fault of the machine; an exception is a fault of the
            check, and is reported as one.
    """

    name: str
    code: str
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
    name: str, code: str, *, scope: Scope = "machine", limit: float = LIMIT
) -> Callable[[Run], Run]:
    """Register a check. It may raise :class:`Skip`; its findings get its code.

    Raises:
        ValueError: The name or the code is taken.
    """

    def register(run: Run) -> Run:
        @wraps(run)
        def coded(situation: Situation) -> Outcome:
            try:
                outcome = run(situation)
            except Skip as reason:
                return skipped(str(reason))
            findings = tuple(
                replace(each, code=code) for each in merge_gpu_findings(outcome.findings)
            )
            return replace(outcome, findings=findings)

        if name in CHECKS or any(other.code == code for other in CHECKS.values()):
            raise ValueError(f"{name} ({code}) is registered twice")
        CHECKS[name] = Check(name, code, scope, limit, coded)
        return coded

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


LOOK_EVERY = 1.0
"""Most seconds between looks at the limits of the checks that run."""

GRACE = 1.0
"""Seconds that a check has after its limit to say what it found by then."""

CLEANUP = 3.0
"""Most seconds to wait, after Ctrl-C, for checks to end what they started."""


def run_checks(
    checks: Iterable[Check], situation: Situation, seen: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run checks in parallel threads, and wait for them.

    Args:
        checks: Which.
        situation: What they go by; its deadline is that of all of them.
        seen: Called on this thread with each outcome as it comes.

    Returns:
        An outcome for each check, in their order.

    Raises:
        KeyboardInterrupt: It was pressed; what the checks had started is ended.
    """
    wanted = list(checks)
    answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    threads = {}
    began = time.monotonic()
    for each in wanted:
        own = situation.within(each.limit * situation.options.scale)
        thread = threading.Thread(
            target=_run, args=(each, own, answers), name=f"check {each.name}", daemon=True
        )
        threads[each.name] = thread
    outcomes: dict[str, Outcome] = {}
    scale = situation.options.scale
    limits = {
        each.name: min(each.limit * scale, situation.deadline.left()) + GRACE for each in wanted
    }
    situation.verdicts.expect(each.name for each in wanted if each.scope == "machine")

    def ended(outcome: Outcome) -> None:
        outcomes[outcome.check] = outcome
        situation.verdicts.add(outcome.check, outcome)
        seen(outcome)

    try:
        for thread in threads.values():
            thread.start()
        while len(outcomes) < len(wanted):
            passed = time.monotonic() - began
            open_limits = [limit for name, limit in limits.items() if name not in outcomes]
            for outcome in _next(answers, max(0.05, min(open_limits) - passed)):
                if outcome.check not in outcomes:
                    ended(outcome)
            passed = time.monotonic() - began
            for name, limit in limits.items():
                if name not in outcomes and passed > limit:
                    late = could_not_run(f"no answer within {limit - GRACE:.0f} s")
                    ended(replace(late, check=name, seconds=passed))
    except BaseException:
        situation.deadline.cancel()
        until = time.monotonic() + CLEANUP
        for thread in threads.values():
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        raise
    return [outcomes[each.name] for each in wanted]


def _next(answers: queue.SimpleQueue[Outcome], seconds: float) -> list[Outcome]:
    """What comes next, within so many seconds; a signal interrupts the waiting."""
    found = []
    try:
        found.append(answers.get(timeout=min(seconds, LOOK_EVERY)))
        while True:
            found.append(answers.get_nowait())
    except queue.Empty:
        return found


def _run(check: Check, situation: Situation, answers: queue.SimpleQueue[Outcome]) -> None:
    began = time.monotonic()
    try:
        outcome = check.run(situation)
    except Exception as error:  # a fault of the check must not end the others, nor look like a pass
        text = " ".join(str(error).split())
        outcome = could_not_run(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    answers.put(replace(outcome, check=check.name, seconds=time.monotonic() - began))

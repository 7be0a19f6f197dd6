"""The registry of preflight checks, what a check returns, and how checks run."""

from __future__ import annotations

import contextlib
import inspect
import queue
import re
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial, wraps
from typing import Any, Literal

from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.core.formatting import spans
from ddpdoctor.core.relations import Same
from ddpdoctor.preflight.situation import Situation

# -- merged findings: "GPUs 0-7 have ..."


_GPU = re.compile(r"\bGPU (\d+)\b")
_NUMBER = re.compile(r"\d+(\.\d+)?")
_CHOSEN = re.compile(r"(-i) \d+\b")

_PLURAL = {"has": "have", "is": "are", "does": "do", "waits": "wait"}  # Verbs after a GPU's number


def merge_gpu_findings(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Merge findings of a check that differ only in the GPU and in numbers."""
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


# -- checks and their outcomes


LIMIT = 10.0  # Seconds that a check may take by default; never more than ``--timeout``


class Status(Enum):
    """How a check ended. The value is the word that is printed."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    SKIPPED = "skipped"
    COULD_NOT_RUN = "could not run"  # The check crashed or timed out, so nothing is known


@dataclass(frozen=True)
class Outcome:
    """The result of a check."""

    status: Status  # How it ended
    detail: str
    """One line: what was tested ("8 of 8 ranks reduced correctly"), or why it was skipped or could
    not run."""
    findings: tuple[Finding, ...] = ()  # The problems found, each with its fix and a line to paste
    check: str = ""  # The check's name. `run_checks` sets it, and ``seconds``.
    seconds: float = 0.0  # How long it took
    exclude: tuple[str, ...] = ()  # The host names of nodes to exclude from a job


def passed(detail: str) -> Outcome:
    """Return the outcome of a test that found nothing wrong."""
    return Outcome(Status.PASS, detail)


def skipped(reason: str) -> Outcome:
    """Return the outcome of a skipped check, with a reason such as ``no GPU``."""
    return Outcome(Status.SKIPPED, reason)


def could_not_run(reason: str) -> Outcome:
    """Return the outcome of a check that should have run, but could not."""
    return Outcome(Status.COULD_NOT_RUN, reason)


def judged(detail: str, findings: Iterable[Finding], *, exclude: Iterable[str] = ()) -> Outcome:
    """Return the result of a test. Its worst finding decides the status. Information passes."""
    found = tuple(sorted(findings, key=lambda finding: -finding.severity))
    worst = max((finding.severity for finding in found), default=Severity.INFO)
    status = {Severity.ERROR: Status.FAIL, Severity.WARNING: Status.WARN}.get(worst, Status.PASS)
    return Outcome(status, detail, found, exclude=tuple(dict.fromkeys(exclude)))


class Skip(Exception):
    """Raised to skip a check that lacks something it needs. The text is the reason."""


def finding(severity: Severity, message: str, *, fix: str, paste: str, **more: Any) -> Finding:
    """Return a finding without its code. ``paste`` is the line that applies its ``fix``."""
    return Finding("", severity, message, fix=fix, paste=paste, **more)


def typed(line: str, *values: object) -> str:
    """Return a line to paste. Each value replaces a ``{}`` as one quoted word of a shell.

    Insert values into such a line only this way: a name, a path or a version may contain anything,
    and may come from another machine.
    """
    return line.format(*(shlex.quote(str(value)) for value in values))


failure = partial(finding, Severity.ERROR)
warning = partial(finding, Severity.WARNING)
note = partial(finding, Severity.INFO, fix="", paste="")


Scope = Literal["machine", "nodes"]
Run = Callable[[Situation], Outcome]


@dataclass(frozen=True)
class Check:
    """A test of a machine, or of a set of nodes."""

    name: str  # The name that ``--only`` and ``--skip`` take
    code: str
    """The code of its findings. DDP001 to DDP049 are about a machine, DDP050 to DDP099 about
    several nodes. ``ddpdoctor explain`` prints its page."""
    scope: Scope  # ``nodes`` checks run if there is more than one node
    limit: float  # Seconds it may take
    run: Run
    """The test. It never raises for a fault of the machine. An exception is a defect of the check,
    and is reported as one."""
    yields_to: Mapping[str, Same] = field(default_factory=dict)
    """The checks whose findings may explain this one's, by code, each with the predicate that
    decides it."""
    group: str = "plug-ins"  # The name of the line of the screen that this check shares with others

    @property
    def page(self) -> str:
        """The documentation page: the function's docstring."""
        return inspect.getdoc(self.run) or ""

    @property
    def summary(self) -> str:
        """The page's first line."""
        return self.page.partition("\n")[0]


CHECKS: dict[str, Check] = {}
"""All registered checks by name, in the order of the table. Importing the package fills it."""


def check(
    name: str,
    code: str,
    *,
    scope: Scope = "machine",
    limit: float = LIMIT,
    yields_to: Mapping[str, Same] | None = None,
) -> Callable[[Run], Run]:
    """Register a check. It may raise :class:`Skip`. Findings without a code get the check's.

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
                replace(each, code=each.code or code)
                for each in merge_gpu_findings(outcome.findings)
            )
            return replace(outcome, findings=findings)

        if name in CHECKS or any(other.code == code for other in CHECKS.values()):
            raise ValueError(f"{name} ({code}) is registered twice")
        CHECKS[name] = Check(name, code, scope, limit, coded, yields_to or {})
        return coded

    return register


def causes_only(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Fold each finding into its cause, if the relations of the checks name one.

    The consequences become evidence of the cause, which becomes as severe as the worst of them. A
    check whose finding was folded keeps its status, since its test did fail.
    """
    yields_to = {each.code: each.yields_to for each in CHECKS.values()}
    found = [finding for outcome in outcomes for finding in outcome.findings]

    def first_cause(effect: Finding) -> Finding:
        related = yields_to.get(effect.code, {})
        for cause in found:
            same = related.get(cause.code) if cause.severity > Severity.INFO else None
            if cause is not effect and same is not None and same(cause, effect):
                return first_cause(cause)
        return effect

    effects: dict[int, list[Finding]] = {}
    for each in found:
        effects.setdefault(id(first_cause(each)), []).append(each)

    def settled(outcome: Outcome) -> Outcome:
        left = []
        for each in outcome.findings:
            if id(each) in effects:
                of_it = [effect for effect in effects[id(each)] if effect is not each]
                also = (f"also seen as {effect.code}: {effect.message}" for effect in of_it)
                worst = max(effect.severity for effect in effects[id(each)])
                left.append(replace(each, severity=worst, evidence=(*each.evidence, *also)))
        again = judged(outcome.detail, left)
        worse = outcome.status is Status.WARN and again.status is Status.FAIL
        status = again.status if worse else outcome.status
        return replace(outcome, findings=again.findings, status=status)

    return [settled(outcome) for outcome in outcomes]


def outcome_record(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON."""
    return {
        "check": outcome.check,
        "code": CHECKS[outcome.check].code if outcome.check in CHECKS else None,
        "status": outcome.status.value,
        "detail": outcome.detail,
        "seconds": round(outcome.seconds, 3),
        "findings": [to_record(finding) for finding in outcome.findings],
    }


GRACE = 1.0  # Seconds after its limit in which a check may still report what it found
CLEANUP = 3.0  # Seconds to wait, after Ctrl-C, for checks to end what they started


def run_checks(
    checks: Iterable[Check], situation: Situation, seen: Callable[[Outcome], None]
) -> list[Outcome]:
    """Run checks in parallel threads, wait for them, and return their outcomes in their order.

    ``seen`` is called on this thread with each outcome as it arrives.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed. Whatever the checks had started has been ended.
    """
    wanted = list(checks)
    answers: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    outcomes: dict[str, Outcome] = {}
    began, scale = time.monotonic(), situation.options.scale
    limits = {
        each.name: min(each.limit * scale, situation.deadline.left()) + GRACE for each in wanted
    }
    threads = [
        threading.Thread(
            target=_run,
            args=(each, situation.within(each.limit * scale), answers),
            name=f"check {each.name}",
            daemon=True,
        )
        for each in wanted
    ]
    situation.verdicts.expect(each.name for each in wanted if each.scope == "machine")

    def ended(outcome: Outcome) -> None:
        outcomes[outcome.check] = outcome
        situation.verdicts.add(outcome.check, outcome)
        seen(outcome)

    try:
        for thread in threads:
            thread.start()
        while len(outcomes) < len(wanted):
            next_limit = min(limit for name, limit in limits.items() if name not in outcomes)
            left = next_limit - (time.monotonic() - began)
            with contextlib.suppress(queue.Empty):
                # In short waits, which a signal can interrupt.
                outcome = answers.get(timeout=min(max(0.05, left), 1.0))
                if outcome.check not in outcomes:
                    ended(outcome)
                continue
            took = time.monotonic() - began
            for name, limit in limits.items():
                if name not in outcomes and took > limit:
                    late = could_not_run(f"no answer within {limit - GRACE:.0f} s")
                    ended(replace(late, check=name, seconds=took))
    except BaseException:
        situation.deadline.cancel()
        until = time.monotonic() + CLEANUP
        for thread in threads:
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))
        raise
    return [outcomes[each.name] for each in wanted]


def _run(check: Check, situation: Situation, answers: queue.SimpleQueue[Outcome]) -> None:
    began = time.monotonic()
    try:
        outcome = check.run(situation)
    except Exception as error:  # a defect must neither end the other checks nor look like a pass
        text = " ".join(str(error).split())
        outcome = could_not_run(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    answers.put(replace(outcome, check=check.name, seconds=time.monotonic() - began))

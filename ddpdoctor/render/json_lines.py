"""Write findings as JSON lines for machines (``ddpdoctor/schemas/findings.json``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ddpdoctor.core.finding import Finding, Severity, to_record
from ddpdoctor.core.formatting import json_text
from ddpdoctor.run.records.supervisor import FindingRecord
from ddpdoctor.run.reported import Withdrawn, from_journal

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

FORMAT = 1  # Version of the lines, raised when a key changes its meaning, not for new keys


def line(finding: Finding, head: dict[str, Any]) -> str:
    """Return a finding as one line, after the keys of :func:`head`.

    Its keys are ``id, code, severity, message, ranks, location, evidence, fix, restart``, and
    ``paste`` if there is a line to type. ``location`` is ``{"path": ..., "line": ...}`` or null.
    """
    return json_text({**head, **to_record(finding)})


def retraction(withdrawn: Withdrawn, head: dict[str, Any]) -> str:
    """Return a withdrawal as one line: ``retracts, id, code, ranks, why, by, reason``.

    ``retracts`` is the number of the finding's line, from 1. ``why`` is ``explained``,
    ``restated``, ``untrue`` or ``over``, and ``by`` the code that explains it, or null.
    """
    reported = withdrawn.reported
    return json_text(
        {
            **head,
            "retracts": reported.number,
            "id": reported.finding.id,
            "code": reported.finding.code,
            "ranks": list(reported.finding.ranks),
            "why": withdrawn.why,
            "by": withdrawn.by or None,
            "reason": withdrawn.reason,
        }
    )


def end(status: int, current: Iterable[Finding], head: dict[str, Any]) -> str:
    """Write the last line of ``run --json``: ``event, exit_status, findings``.

    ``status`` is the exit status of ``ddpdoctor run``, negative for the signal that ends it.
    ``current`` are the findings reported and not withdrawn.
    """
    counts = Counter(finding.severity for finding in current)
    findings = {each.label: counts[each] for each in reversed(Severity)}
    return json_text({**head, "event": "end", "exit_status": status, "findings": findings})


def head(run: Run | None = None, restart: int | None = None) -> dict[str, Any]:
    """Return the first keys of each line: ``format, time, run, step``.

    ``time`` is in Unix seconds, ``run`` the run's id, ``step`` the step that the ranks of attempt
    ``restart``, or of the last one, had reached. Unknown values are null, as for a log.
    """
    if run is None:
        return {"format": FORMAT, "time": None, "run": None, "step": None}
    return {
        "format": FORMAT,
        "time": round(run.taken / 1e9, 3) if run.taken else None,
        "run": run.id,
        "step": run.step if restart is None else run.reached(restart),
    }


def head_of(finding: Finding, run: Run) -> dict[str, Any]:
    """Return the first keys with which a finding was reported during the run."""
    time = step = None
    same = finding.code, finding.ranks, finding.location
    for record in run.supervisor.of(FindingRecord):
        said = from_journal(record)
        if said is not None and (said.code, said.ranks, said.location) == same:
            time, step = round(record.time / 1e9, 3), record.step
    return {**head(run), "time": time, "step": step}

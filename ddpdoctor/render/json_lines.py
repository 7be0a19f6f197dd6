"""Write findings as JSON lines for machines; ``docs/findings.schema.json`` is their schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddpdoctor.core.finding import Finding, to_record
from ddpdoctor.core.formatting import json_text
from ddpdoctor.run.records.supervisor import FindingRecord
from ddpdoctor.run.reported import Withdrawn, from_journal

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run

FORMAT = 1
"""Version of the lines. It is raised when a key changes its meaning, not for new keys."""


def line(finding: Finding, head: dict[str, Any]) -> str:
    """Return a finding as one line: ``code, severity, message, ranks, location, evidence, fix``.

    ``location`` is ``{"path": ..., "line": ...}`` or null.

    Args:
        finding: The finding.
        head: The first keys, see :func:`head`.
    """
    return json_text({**head, **to_record(finding)})


def retraction(withdrawn: Withdrawn, head: dict[str, Any]) -> str:
    """Return a withdrawal as one line: ``retracts, code, ranks, why, by, reason``.

    ``retracts`` is the number of the finding's line, from 1. ``why`` is ``explained``,
    ``restated``, ``untrue`` or ``over``, and ``by`` the code that explains it, or null.
    """
    reported = withdrawn.reported
    return json_text(
        {
            **head,
            "retracts": reported.number,
            "code": reported.finding.code,
            "ranks": list(reported.finding.ranks),
            "why": withdrawn.why,
            "by": withdrawn.by or None,
            "reason": withdrawn.reason,
        }
    )


def head(run: Run | None = None, restart: int | None = None) -> dict[str, Any]:
    """Return the first keys of each line: ``format, time, run, step``.

    ``time`` is Unix seconds, ``run`` the run's id, ``step`` how far the ranks of attempt
    ``restart`` were, or of the last one. What is unknown is null, as in a log.
    """
    if run is None:
        return {"format": FORMAT, "time": None, "run": None, "step": None}
    return {
        "format": FORMAT,
        "time": round(run.taken / 1e9, 3) if run.taken else None,
        "run": str(run.manifest.get("id") or run.path.name),
        "step": run.step if restart is None else run.reached(restart),
    }


def head_of(finding: Finding, run: Run) -> dict[str, Any]:
    """Return the first keys as a finding was reported with while the run lived."""
    time = step = None
    same = finding.code, finding.ranks, finding.location
    for record in run.supervisor.of(FindingRecord):
        said = from_journal(record)
        if said is not None and (said.code, said.ranks, said.location) == same:
            time, step = round(record.time / 1e9, 3), record.step
    return {**head(run), "time": time, "step": step}

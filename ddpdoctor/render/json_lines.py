"""Findings as JSON lines, for machines."""

from __future__ import annotations

from ddpdoctor.core.control_characters import json_text
from ddpdoctor.core.finding import Finding, to_record
from ddpdoctor.run.reported import Withdrawn


def line(finding: Finding) -> str:
    """One finding as one line: ``code, severity, message, ranks, location, evidence, fix``.

    ``location`` is ``{"path": ..., "line": ...}`` or null.
    """
    return json_text(to_record(finding))


def retraction(withdrawn: Withdrawn) -> str:
    """What stands no more, as one line: ``retracts, code, ranks, why, by, reason``.

    ``retracts`` is the number of the line that it is about, from 1; ``why`` is ``explained``,
    ``restated``, ``untrue`` or ``over``, and ``by`` the code that explains it, or null.
    """
    reported = withdrawn.reported
    return json_text(
        {
            "retracts": reported.number,
            "code": reported.finding.code,
            "ranks": list(reported.finding.ranks),
            "why": withdrawn.why,
            "by": withdrawn.by or None,
            "reason": withdrawn.reason,
        }
    )

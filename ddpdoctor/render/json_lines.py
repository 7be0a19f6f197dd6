"""Findings as JSON lines, for machines."""

from __future__ import annotations

import json

from ddpdoctor.finding import Finding


def line(finding: Finding) -> str:
    """One finding as one line: ``code, severity, message, ranks, location, evidence, fix``.

    ``location`` is ``{"path": ..., "line": ...}`` or null.
    """
    location = finding.location
    return json.dumps(
        {
            "code": finding.code,
            "severity": finding.severity.label,
            "message": finding.message,
            "ranks": list(finding.ranks),
            "location": None
            if location is None
            else {"path": location.path, "line": location.line},
            "evidence": list(finding.evidence),
            "fix": finding.fix,
        }
    )

"""Findings as JSON lines, for machines."""

from __future__ import annotations

import json

from ddpdoctor.finding import Finding, to_record


def line(finding: Finding) -> str:
    """One finding as one line: ``code, severity, message, ranks, location, evidence, fix``.

    ``location`` is ``{"path": ..., "line": ...}`` or null.
    """
    return json.dumps(to_record(finding))

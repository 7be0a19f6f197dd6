"""A finding as a line for an editor's problem matcher.

The line is ``path:line:col: severity CODE message``.
"""

from __future__ import annotations

from ddpdoctor.finding import Finding


def line(finding: Finding, script: str) -> str:
    """The line; a finding without a place of its own stands at the top of the ``script``."""
    place = finding.location
    where = f"{place.path}:{place.line}:1" if place is not None else f"{script}:1:1"
    text = " ".join(f"{finding.message}. {finding.fix}".split())
    return f"{where}: {finding.severity.label} {finding.code} {text}"

"""A finding as a line for an editor's problem matcher.

The line is ``path:line:col: severity CODE message``.
"""

from __future__ import annotations

from ddpdoctor.finding import Finding
from ddpdoctor.said import Withdrawn


def line(finding: Finding, script: str) -> str:
    """The line; a finding without a place of its own stands at the top of the ``script``."""
    text = " ".join(f"{finding.message}. {finding.fix}".split())
    return f"{_place(finding, script)}: {finding.severity.label} {finding.code} {text}"


def retraction(withdrawn: Withdrawn, script: str) -> str:
    """An info at the same place; an editor keeps the line that it is about until the next run."""
    finding = withdrawn.told.finding
    return f"{_place(finding, script)}: info {finding.code} {withdrawn.verb}: {withdrawn.reason}"


def _place(finding: Finding, script: str) -> str:
    place = finding.location
    return f"{place.path}:{place.line}:1" if place is not None else f"{script}:1:1"

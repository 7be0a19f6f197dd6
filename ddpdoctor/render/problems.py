"""A finding as a line for an editor's problem matcher.

The line is ``path:line:col: severity CODE message``.
"""

from __future__ import annotations

import re

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.finding import Finding, Location
from ddpdoctor.render.console import shown_path
from ddpdoctor.run.reported import Withdrawn


def line(finding: Finding, script: str) -> str:
    """The line; one of a finding without a place stands at the top of the ``script``."""
    message = _without_place(finding.message, finding.location)
    text = " ".join(f"{message}. {finding.fix}".split())
    return shown(f"{_place(finding, script)}: {finding.severity.label} {finding.code} {text}")


def retraction(withdrawn: Withdrawn, script: str) -> str:
    """An info at the same place; an editor keeps the line that it is about until the next run."""
    finding = withdrawn.reported.finding
    text = f"info {finding.code} {withdrawn.verb}: {withdrawn.reason}"
    return shown(f"{_place(finding, script)}: {text}")


def _without_place(message: str, place: Location | None) -> str:
    """The message without the line that it stands at, which an editor shows already."""
    if place is None:
        return message
    for path in {place.path, shown_path(place.path)}:
        own = rf"(?<![\w/.]){re.escape(path)}:{place.line}(?!\d)"
        message = re.sub(rf"\b(?:at|in) {own}", "here", message)
        message = re.sub(own, "this line", message)
    return message


def _place(finding: Finding, script: str) -> str:
    place = finding.location
    return f"{place.path}:{place.line}:1" if place is not None else f"{script}:1:1"

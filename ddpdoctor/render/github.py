"""A finding as an annotation of GitHub Actions: a command in the log of a step.

The format is GitHub's "workflow commands": ``::error file=F,line=L,title=T::message``, read from
stdout and stderr alike.
"""

from __future__ import annotations

import os

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.reported import Withdrawn

_KIND = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def line(finding: Finding, script: str) -> str:
    """The line; one of a finding without a place stands at the top of the ``script``."""
    text = [finding.message, *finding.evidence]
    text += [f"fix: {finding.fix}"] if finding.fix else []
    text += [f"paste: {finding.paste}"] if finding.paste else []
    return _command(_KIND[finding.severity], finding, script, finding.code, "\n".join(text))


def retraction(withdrawn: Withdrawn, script: str) -> str:
    """A notice at the same place: GitHub takes no annotation back."""
    finding = withdrawn.reported.finding
    title = f"{finding.code} {withdrawn.verb}"
    return _command("notice", finding, script, title, withdrawn.reason)


def _command(kind: str, finding: Finding, script: str, title: str, text: str) -> str:
    place = finding.location
    path, number = (script, 1) if place is None else (place.path, place.line)
    root = os.environ.get("GITHUB_WORKSPACE", "")
    if root and path.startswith(root.rstrip("/") + "/"):
        path = path[len(root.rstrip("/")) + 1 :]
    fields = {"file": path, "line": str(number), "title": title}
    said = ",".join(
        f"{name}={_escaped(value).replace(':', '%3A').replace(',', '%2C')}"
        for name, value in fields.items()
        if value
    )
    return f"::{kind} {said}::{_escaped(text)}"


def _escaped(text: str) -> str:
    return shown(text, "\n").replace("%", "%25").replace("\n", "%0A")

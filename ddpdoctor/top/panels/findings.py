"""``f``: the findings so far, the newest first, each with its evidence and its fix on demand."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.core.finding import Severity
from ddpdoctor.top import units
from ddpdoctor.top.groups import short_site
from ddpdoctor.top.line import Line, columns, fit, shortened
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import FindingRow, Snapshot
from ddpdoctor.top.wrapping import labelled, wrapped


@dataclass(frozen=True)
class Listed:
    """The lines of a list, and which of its entries each belongs to."""

    lines: list[Line]
    entries: dict[int, int]


def ordered(snapshot: Snapshot) -> list[FindingRow]:
    """The worst first, and of those the newest."""
    return sorted(snapshot.findings, key=lambda row: (-row.finding.severity, -(row.time or 0.0)))


def one_line(row: FindingRow, now: float, room: int, marks: Marks) -> Line:
    """A finding in a line: sign, code, message, age."""
    finding = row.finding
    age = "" if row.time is None else f" {units.age(max(now - row.time, 0.0))}"
    style = _style(finding.severity)
    head = f"{marks.level(style)} {finding.code} "
    left = max(room - columns(head) - columns(age), 0)
    text = fit(shortened(finding.message, left, marks.ellipsis), left)
    return ((head, style), (text, ""), (age, "dim"))


def _style(severity: Severity) -> str:
    return severity.label


def draw(
    snapshot: Snapshot, item: int, opened: bool, room: int, height: int, marks: Marks
) -> Listed:
    """The list around the selected finding; if it is open, with all it has to say."""
    found = ordered(snapshot)
    if not found:
        text = "no findings so far" if snapshot.live else "no findings"
        return Listed(wrapped(text, room, "dim"), {})
    item = min(item, len(found) - 1)
    body = _opened(found[item], snapshot.time, room, marks) if opened else []
    # The selected one and what it says come first; the list fills the rest around it.
    around = max(height - len(body) - 1, 1)
    first = max(0, min(item - around // 2, len(found) - around))
    lines: list[Line] = []
    entries: dict[int, int] = {}
    for number in range(first, min(len(found), first + around)):
        entries[len(lines)] = number
        line = one_line(found[number], snapshot.time, room - 2, marks)
        if number == item:
            text = fit(f"{marks.cursor} " + "".join(text for text, _ in line), room)
            lines.append(((text, "cursor"),))
            lines += body
        else:
            lines.append((("  ", ""), *line))
    if first + around < len(found):
        left = len(found) - first - around
        lines.append(((f"  {marks.ellipsis} {left} more", "dim"),))
    return Listed(lines, entries)


def _opened(row: FindingRow, now: float, room: int, marks: Marks) -> list[Line]:
    finding = row.finding
    lines = wrapped(finding.message, room, "bold", "    ")
    if finding.location is not None:
        lines += labelled("    at", short_site(str(finding.location)), room, 14)
    for each in finding.evidence:
        lines += labelled("    evidence", each, room, 14)
    if finding.fix:
        lines += labelled("    fix", finding.fix, room, 14, "ok")
    return [*lines, *labelled("    page", f"ddpdoctor explain {finding.code}", room, 14, "dim")]

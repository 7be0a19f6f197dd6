"""``d``: where the ranks are in the code, equal ones merged; or one rank and its processes."""

from __future__ import annotations

from collections.abc import Sequence

from ddpdoctor.core.ranks import bracketed
from ddpdoctor.top import groups, units
from ddpdoctor.top.line import Line, columns, shortened
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.wrapping import labelled


def one_line(group: groups.Group, room: int, marks: Marks) -> Line:
    """A group: ranks, what they do, where, and for how long."""
    ranks = shortened(bracketed(group.ranks), max(room // 3, 8), marks.ellipsis)
    since = "" if group.since is None else f" for {units.duration(group.since)}"
    site = f" {group.site}" if group.site else ""
    left = room - columns(ranks) - 1
    text = f"{group.doing}{site}{since}"
    for shorter in (f"{group.doing}{_name(site)}{since}", f"{group.doing}{_name(site)}"):
        if columns(text) <= left:
            break
        text = shorter
    return ((f"{ranks} ", "bold"), (shortened(text, max(left, 0), marks.ellipsis), ""))


def _name(site: str) -> str:
    """The file's name and the line."""
    return f" {site.rpartition('/')[2].strip()}" if site else ""


def everyone(snapshot: Snapshot, room: int, marks: Marks) -> list[Line]:
    """All ranks."""
    lines = [one_line(group, room, marks) for group in groups.merged(snapshot.ranks)]
    return lines or [(("no rank has started yet", "dim"),)]


def one(row: RankRow, children: Sequence[str], room: int) -> list[Line]:
    """One rank, and the processes below it."""
    lines = labelled("doing", groups.doing(row), room, 12)
    if row.site:
        lines += labelled("at", groups.short_site(row.site), room, 12)
    if row.since is not None:
        lines += labelled("for", units.duration(row.since), room, 12)
    if row.collective:
        lines += labelled("collective", row.collective, room, 12)
    if row.pid is not None:
        lines += labelled("process", str(row.pid), room, 12)
    for child in children:
        lines += labelled("below it", child, room, 12)
    return lines

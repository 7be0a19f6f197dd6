"""The lines around the board: the verdict above it, the status and the keys below it."""

from __future__ import annotations

from ddpdoctor.top import units
from ddpdoctor.top.keys import KEYS
from ddpdoctor.top.line import Line, Span, columns, shortened
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import View
from ddpdoctor.top.wrapping import wrapped


def verdict(snapshot: Snapshot, room: int, most: int, marks: Marks) -> list[Line]:
    """The verdict in at most ``most`` lines."""
    style = snapshot.verdict.level if snapshot.verdict.level in _LEVELS else "info"
    head = f"{marks.level(style)} "
    lines = wrapped(snapshot.verdict.text, room - len(head), "bold")
    if len(lines) > most:
        lines = lines[:most]
        text, look = lines[-1][0]
        cut = shortened(text + marks.ellipsis * 2, room - len(head), "")
        lines[-1] = ((cut.rstrip(marks.ellipsis) + marks.ellipsis, look),)
        if columns(lines[-1][0][0]) > room - len(head):
            lines[-1] = ((shortened(text, room - len(head), marks.ellipsis), look),)
    indent = " " * len(head)
    return [((head if n == 0 else indent, style), *line) for n, line in enumerate(lines)]


_LEVELS = ("ok", "info", "warning", "error")


def status(snapshot: Snapshot, view: View, room: int, marks: Marks) -> Line:
    """The state of the run and of the monitor; on a narrow screen the first facts alone."""
    state = _state(snapshot, view) + (", recording" if view.recording else "")
    facts = [state, *_facts(snapshot, view)]
    text = " "
    gap = f" {marks.dot} "
    for number, fact in enumerate(each for each in facts if each):
        more = fact if number == 0 else gap + fact
        if columns(text) + columns(more) > room - 1 and number > 0:
            # A shorter fact further on may still fit.
            continue
        text += more
    return ((shortened(text, room, marks.ellipsis).ljust(room), "status"),)


def _state(snapshot: Snapshot, view: View) -> str:
    if view.paused:
        return "PAUSED"
    if snapshot.kind == "demo":
        return "DEMO"
    if view.position is not None and (snapshot.live or view.position[0] + 1 < view.position[1]):
        return "REPLAY"
    if snapshot.kind == "machine":
        return "MACHINE"
    if snapshot.live:
        return "LIVE"
    if snapshot.gone:
        return "GONE"
    if snapshot.exit_status is None:
        return "ENDED"
    return f"ENDED, status {snapshot.exit_status}"


def _facts(snapshot: Snapshot, view: View) -> list[str]:
    beats = [
        row.heartbeat
        for row in snapshot.ranks
        if row.heartbeat is not None and row.state in ("running", "stale")
    ]
    dropped = sum(row.dropped for row in snapshot.ranks)
    worst = sum(1 for row in snapshot.findings if row.finding.severity >= 2)
    position = ""
    if view.position is not None:
        position = f"frame {view.position[0] + 1}/{view.position[1]}"
    order = "" if view.sort == "own" and not view.reverse else f"by {view.sort}"
    return [
        f"heartbeat {units.duration(max(beats))}" if beats and snapshot.live else "",
        position,
        f"{dropped} records dropped" if dropped else "",
        f"{worst} finding{'s' if worst != 1 else ''} (f)" if worst else "",
        f"filter {view.filter}" if view.filter and not view.typing else "",
        snapshot.nvml or ("nvml ok" if snapshot.gpus else "no GPU"),
        snapshot.run,
        f"to {view.recording}" if view.recording else "",
        order + (" reversed" if view.reverse else "") if order else "",
        f"{len(snapshot.ranks)} ranks" if snapshot.ranks else "",
        f"dropped {dropped}" if not dropped and snapshot.ranks else "",
    ]


def keys(view: View, room: int) -> Line:
    """The keys that fit, the most needed ones."""
    if view.typing:
        return (
            ("/", "key"),
            (view.filter, ""),
            (" ", "cursor"),
            ("  enter keeps it, esc drops it", "dim"),
        )
    left = room
    chosen = set()
    for key in sorted(KEYS, key=lambda key: -key.importance):
        if key.action == "signal" and view.readonly:
            continue
        need = len(key.shown) + len(key.short) + 3
        if need > left:
            break
        chosen.add(key)
        left -= need
    spans: list[Span] = []
    for key in KEYS:
        if key in chosen:
            spans += [(key.shown, "key"), (f" {key.short}  ", "dim")]
    return tuple(spans)


def message(snapshot: Snapshot, view: View, room: int, marks: Marks) -> Line | None:
    """What went wrong, what the last key has to say, or what the monitor could not read."""
    if view.trouble:
        text, style, sign = view.trouble, "error", marks.error
    elif view.message:
        text, style, sign = view.message, "info", marks.info
    elif snapshot.notes:
        more = f" (+{len(snapshot.notes) - 1}: e)" if len(snapshot.notes) > 1 else ""
        text, style, sign = snapshot.notes[0] + more, "warning", marks.warning
    else:
        return None
    return ((f"{sign} ", style), (shortened(text, max(room - 2, 0), marks.ellipsis), style))

"""The lines around the board: the verdict above it, the status and the keys below it."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core import units
from ddpdoctor.render.lines import Line, Span, columns, wrapped
from ddpdoctor.top.draw.marks import LEVELS
from ddpdoctor.top.draw.scene import Scene
from ddpdoctor.top.keys import KEYS
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.view import View


def verdict(scene: Scene, most: int) -> list[Line]:
    """The verdict in at most ``most`` lines."""
    level = scene.snapshot.verdict.level
    style = level if level in LEVELS else "info"
    head = f"{scene.marks.level(style)} "
    room = scene.room - len(head)
    rows = [line[0][0] for line in wrapped(scene.snapshot.verdict.text, room)]
    if len(rows) > most:
        # One that fits as it is gets an ellipsis all the same: there is more.
        rows[most - 1 :] = [scene.cut(rows[most - 1] + " " * room, room)]
    heads = [head, *[" " * len(head)] * (len(rows) - 1)]
    return [((each, style), (row, "bold")) for each, row in zip(heads, rows, strict=True)]


def status(scene: Scene) -> Line:
    """The state of the run and of the monitor; on a narrow screen the first facts alone."""
    snapshot, view = scene.snapshot, scene.view
    text = f" {_state(snapshot, view)}{', recording' if view.recording else ''}"
    for fact in _facts(snapshot, view):
        more = f" {scene.marks.dot} {fact}"
        # A shorter fact further on may still fit.
        if columns(text) + columns(more) <= scene.room - 1:
            text += more
    return ((scene.cut(text).ljust(scene.room), "status"),)


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
    return "ENDED" + ("" if snapshot.exit_status is None else f", status {snapshot.exit_status}")


def _facts(snapshot: Snapshot, view: View) -> Iterator[str]:
    """What there is to say, the most important first."""
    ranks = snapshot.ranks
    beats = [
        row.heartbeat
        for row in ranks
        if row.heartbeat is not None and row.state in ("running", "stale")
    ]
    if beats and snapshot.live:
        yield f"heartbeat {units.duration(max(beats))}"
    if view.position is not None:
        yield f"frame {view.position[0] + 1}/{view.position[1]}"
    dropped = sum(row.dropped for row in ranks)
    if dropped:
        yield f"{dropped} records dropped"
    serious = sum(row.finding.severity >= 2 for row in snapshot.findings)
    if serious:
        yield f"{units.count(serious, 'finding')} (f)"
    yield from _of_the_view(snapshot, view)
    if ranks:
        yield f"{len(ranks)} ranks"
        if not dropped:
            yield "dropped 0"


def _of_the_view(snapshot: Snapshot, view: View) -> Iterator[str]:
    """What is shown, and how."""
    if view.filter and not view.typing:
        yield f"filter {view.filter}"
    yield snapshot.nvml or ("nvml ok" if snapshot.gpus else "no GPU")
    if snapshot.run:
        yield snapshot.run
    if view.recording:
        yield f"to {view.recording}"
    if view.sort != "own" or view.reverse:
        yield f"by {view.sort}{' reversed' if view.reverse else ''}"


def keys(scene: Scene) -> Line:
    """The keys that fit, the most needed ones."""
    view = scene.view
    if view.typing:
        end: Line = ((" ", "cursor"), ("  enter keeps it, esc drops it", "dim"))
        return (("/", "key"), (view.filter, ""), *end)
    left = scene.room
    fitting = set()
    for key in sorted(KEYS, key=lambda key: -key.importance):
        if key.action == "signal" and view.readonly:
            continue
        left -= len(key.shown) + len(key.short) + 3
        if left < 0:
            break
        fitting.add(key)
    spans: list[Span] = []
    for key in KEYS:
        if key in fitting:
            spans += [(key.shown, "key"), (f" {key.short}  ", "dim")]
    return tuple(spans)


def message(scene: Scene) -> Line | None:
    """What went wrong, what the last key has to say, or what the monitor could not read."""
    view, notes = scene.view, scene.snapshot.notes
    if view.trouble:
        text, style = view.trouble, "error"
    elif view.message:
        text, style = view.message, "info"
    elif notes:
        more = f" (+{len(notes) - 1}: e)" if len(notes) > 1 else ""
        text, style = notes[0] + more, "warning"
    else:
        return None
    return ((f"{scene.marks.level(style)} ", style), (scene.cut(text, scene.room - 2), style))

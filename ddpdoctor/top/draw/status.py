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


def header(scene: Scene) -> Line:
    """What the job is, how far and how fast: the script, and as many facts as fit."""
    snapshot = scene.snapshot
    job, age = snapshot.job, ""
    if snapshot.started is not None:
        age = units.duration(max(0.0, snapshot.time - snapshot.started))
    script = job.script or snapshot.command
    least = min(columns(script), 24)
    facts, left = [], scene.room - least - 1
    for fact in (age, *_progress(snapshot)):
        if fact and columns(fact) + 2 <= left:
            facts.append(fact)
            left -= columns(fact) + 2
    script = scene.cut(script, least + left)
    spans: list[Span] = [(f" {script}", "bold")]
    for fact in facts:
        # Numbers stand out from what they are.
        spans += [("  ", ""), (fact, "")]
    return tuple(spans)


def _progress(snapshot: Snapshot) -> Iterator[str]:
    """How far the job is and how fast, the most needed first."""
    job = snapshot.job
    if job.step is not None:
        of = f"/{job.steps}" if job.steps is not None else ""
        yield f"step {job.step}{of}"
    if job.rate is not None:
        yield f"{units.figures(job.rate)} steps/s"
    if job.epoch is not None:
        of = f"/{job.epochs}" if job.epochs is not None else ""
        yield f"epoch {job.epoch}{of}"
    if job.samples_rate is not None:
        yield f"{units.figures(job.samples_rate)} samples/s"
    if job.left is not None and snapshot.live:
        yield f"ETA {units.duration(job.left)}"
    if job.loss is not None:
        yield f"loss {job.loss:.4g}"
    if job.attempt:
        of = f" of {job.attempts}" if job.attempts is not None else ""
        yield f"attempt {job.attempt + 1}{of}"


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
    loud = style if style in ("warning", "error") else "bold"
    return [((each, style), (row, loud)) for each, row in zip(heads, rows, strict=True)]


def status(scene: Scene) -> Line:
    """The state of the run and of the monitor; on a narrow screen the first facts alone."""
    snapshot, view = scene.snapshot, scene.view
    state = f" {_state(snapshot, view)}{', recording' if view.recording else ''} "
    text = ""
    for fact in _facts(snapshot, view):
        more = f"{scene.marks.dot} {fact} "
        # A shorter fact further on may still fit.
        if columns(state) + columns(text) + columns(more) <= scene.room:
            text += more
    state = scene.cut(state)
    rest = text.ljust(max(0, scene.room - columns(state)))
    return ((state, _STATE_STYLES.get(snapshot.state, "status")), (rest, "status"))


_STATE_STYLES = {
    "hung": "grave",
    "failing": "grave",
    "failed": "grave",
    "restarting": "warning meter",
    "starting": "info meter",
    "running": "good meter",
}


def _state(snapshot: Snapshot, view: View) -> str:
    if view.paused and not (view.position and snapshot.kind == "run" and not snapshot.live):
        return "PAUSED"
    if snapshot.kind == "demo":
        return "DEMO"
    if view.position is not None and (snapshot.live or view.position[0] + 1 < view.position[1]):
        return "REPLAY"
    if snapshot.kind == "machine":
        return "MACHINE"
    job, state = snapshot.job, snapshot.state
    if state == "running":
        return "LIVE"
    if state == "restarting":
        of = "" if job.attempts is None else f" of {job.attempts}"
        after = " after" if any(row.state == "dead" for row in snapshot.ranks) else ","
        return f"RESTARTING{after} attempt {job.attempt + 1}{of}"
    known = snapshot.exit_status is not None and state in ("ended", "failed")
    return state.upper() + (f", status {snapshot.exit_status}" if known else "")


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
        yield units.count(len(ranks), "rank")


def _of_the_view(snapshot: Snapshot, view: View) -> Iterator[str]:
    """What is shown, and how."""
    if view.filter and not view.typing:
        yield f"filter {view.filter}"
    if snapshot.nvml or not snapshot.gpus:
        yield snapshot.nvml or "no GPU"
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

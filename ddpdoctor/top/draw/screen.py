"""Draw a screen of any size: the lines around the board, the board, and the parts below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from ddpdoctor.core import formatting
from ddpdoctor.render.terminal import Line, Span, cleaned, fitted, text_width, wrapped
from ddpdoctor.top.draw import board, panels
from ddpdoctor.top.draw.drawing import LEVELS, Frame, Scene, ScreenData, scene_of
from ddpdoctor.top.snapshot import RankRow, Snapshot
from ddpdoctor.top.view import KEYS, View

# -- the lines around the board: job and verdict above it, status and keys below it


def header_line(scene: Scene) -> Line:
    """Draw the job: the script, and as many facts of its progress as fit."""
    snapshot = scene.snapshot
    script = snapshot.job.script or snapshot.command
    least = min(text_width(script), 24)
    facts, left = [], scene.room - least - 1
    for fact in _progress(snapshot):
        if text_width(fact) + 2 <= left:
            facts.append(fact)
            left -= text_width(fact) + 2
    spans: list[Span] = [(f" {scene.cut(script, least + left)}", "bold")]
    for fact in facts:
        spans += [("  ", ""), (fact, "")]
    return tuple(spans)


def _progress(snapshot: Snapshot) -> Iterator[str]:
    """Yield the progress and the speed of the job, the most important first."""
    job = snapshot.job
    if snapshot.started is not None:
        yield formatting.duration(max(0.0, snapshot.time - snapshot.started))
    if job.step is not None:
        of = f"/{job.steps}" if job.steps is not None else ""
        yield f"step {job.step}{of}"
    if job.rate is not None:
        yield f"{formatting.figures(job.rate)} steps/s"
    if job.epoch is not None:
        of = f"/{job.epochs}" if job.epochs is not None else ""
        yield f"epoch {job.epoch}{of}"
    if job.samples_rate is not None:
        yield f"{formatting.figures(job.samples_rate)} samples/s"
    if job.left is not None and snapshot.live:
        yield f"ETA {formatting.duration(job.left)}"
    if job.loss is not None:
        yield f"loss {job.loss:.4g}"
    if job.attempt:
        of = f" of {job.attempts}" if job.attempts is not None else ""
        yield f"attempt {job.attempt + 1}{of}"


def verdict_lines(scene: Scene, most: int) -> list[Line]:
    """Draw the verdict in at most ``most`` lines."""
    level = scene.snapshot.verdict.level
    style = level if level in LEVELS else "info"
    head = f"{scene.marks.level(style)} "
    room = scene.room - len(head)
    rows = [line[0][0] for line in wrapped(scene.snapshot.verdict.text, room)]
    if len(rows) > most:
        # A line that fits also gets an ellipsis, because there is more.
        rows[most - 1 :] = [scene.cut(rows[most - 1] + " " * room, room)]
    heads = [head, *[" " * len(head)] * (len(rows) - 1)]
    loud = style if style in ("warning", "error") else "bold"
    return [((each, style), (row, loud)) for each, row in zip(heads, rows, strict=True)]


_STATE_STYLES = {
    "hung": "grave",
    "failing": "grave",
    "failed": "grave",
    "restarting": "warning meter",
    "starting": "info meter",
    "running": "good meter",
}


def status_line(scene: Scene) -> Line:
    """Draw the state of the run and of the monitor, and as many facts as fit."""
    snapshot, view = scene.snapshot, scene.view
    state = f" {_state_text(snapshot, view)}{', recording' if view.recording else ''} "
    text = ""
    for fact in _facts(snapshot, view):
        more = f"{scene.marks.dot} {fact} "
        # A later, shorter fact may still fit.
        if text_width(state) + text_width(text) + text_width(more) <= scene.room:
            text += more
    state = scene.cut(state)
    rest = text.ljust(max(0, scene.room - text_width(state)))
    return ((state, _STATE_STYLES.get(snapshot.state, "status")), (rest, "status"))


def _state_text(snapshot: Snapshot, view: View) -> str:
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
    """Yield the facts of the status line, the most important first."""
    ranks = snapshot.ranks
    alive = [row.heartbeat for row in ranks if row.state in ("running", "stale")]
    beats = [beat for beat in alive if beat is not None]
    if beats and snapshot.live:
        yield f"heartbeat {formatting.duration(max(beats))}"
    if view.position is not None:
        yield f"frame {view.position[0] + 1}/{view.position[1]}"
    dropped = sum(row.dropped for row in ranks)
    if dropped:
        yield f"{dropped} records dropped"
    serious = sum(row.finding.severity >= 2 for row in snapshot.findings)
    if serious:
        yield f"{formatting.count(serious, 'finding')} (f)"
    yield from _view_facts(snapshot, view)
    if ranks:
        yield formatting.count(len(ranks), "rank")


def _view_facts(snapshot: Snapshot, view: View) -> Iterator[str]:
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


def keys_line(scene: Scene) -> Line:
    """Draw the most important keys that fit."""
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


def message_line(scene: Scene) -> Line | None:
    """Draw an error, the last key's message, or what the monitor could not read."""
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


# -- a whole screen

MIN_BELOW = 14  # Minimum lines for the parts below, if the board is longer than a tall screen

TALL = 40

TITLES = {
    "help": "keys",
    "findings": "findings",
    "stacks": "what the ranks do",
    "environment": "environment",
    "attach": "attach a debugger",
    "runs": "live runs",
    "signal": "send a signal",
}


def draw_screen(
    snapshot: Snapshot, view: View, room: int, height: int, material: ScreenData | None = None
) -> Frame:
    """Draw a screen of exactly ``height`` lines of exactly ``room`` columns."""
    if room <= 0 or height <= 0:
        return Frame(())
    scene = scene_of(snapshot, view, room, material)
    # The verdict is not cut while a few ranks still fit below it.
    head = verdict_lines(scene, 1 if height < 10 else height - 9)
    if height >= 10 and snapshot.kind != "machine":
        head.insert(0, header_line(scene))
    foot: list[Line] = []
    message = message_line(scene)
    if message is not None and height >= 4:
        foot.append(message)
    if height >= 3:
        foot.append(status_line(scene))
    if view.keys and (height >= 8 or view.typing):
        foot.append(keys_line(scene))
    body = _draw_body(scene, max(height - len(head) - len(foot), 0)).below(head)
    lines = [*body.lines, *[()] * (height - len(body.lines) - len(foot)), *foot]
    exact = tuple(_exact_line(line, view.ascii_only, room) for line in lines[:height])
    return replace(body, lines=exact)


@lru_cache(maxsize=256)
def _exact_line(line: Line, ascii_only: bool, room: int) -> Line:
    """Return a line of exactly ``room`` columns. Most lines are the same in the next frame."""
    return fitted(cleaned(line, ascii_only), room)


def _draw_body(scene: Scene, height: int) -> Frame:
    view, ranks = scene.view, scene.snapshot.ranks
    if view.panel == "signal":
        # As much of the board as fits stays above the question.
        space = height - len(scene.material.asked) - 1
        drawn = board.draw_board(scene, space if space >= 4 else 0)
        left = height - len(drawn.lines)
        title = [_title(f"{TITLES['signal']} (esc: no)", scene)] if left > 3 else []
        listed = panels.choices_panel(scene, left - len(title)).below([*drawn.lines, *title])
        return replace(listed, ranks=drawn.ranks, top=drawn.top)
    if view.panel:
        return _draw_panel(scene, height)
    if not ranks and scene.snapshot.kind == "machine":
        return Frame(tuple(panels.machine_panel(scene, height)))
    if view.expanded and scene.row is not None:
        return _draw_expanded(scene, scene.row, height)
    wanted = board.board_lines(scene)
    space = height if wanted <= height or height < TALL else height - MIN_BELOW
    drawn = board.draw_board(scene, min(space, wanted))
    left = height - len(drawn.lines) - 1
    shown = panels.draw_below(scene, left) if left >= 2 else []
    return _with_board(drawn, scene, [(), *shown] if shown else [])


def _with_board(drawn: Frame, scene: Scene, below: Sequence[Line], item: int = 0) -> Frame:
    seen = {*drawn.ranks.values(), *([scene.row.rank] if scene.row is not None else [])}
    return replace(drawn, lines=(*drawn.lines, *below), visible=frozenset(seen), item=item)


def _draw_expanded(scene: Scene, row: RankRow, height: int) -> Frame:
    text = board.full_rank(row, scene)
    wanted = board.board_lines(scene)
    least = min(wanted, max(height // 3, 5))
    space = max(least, height - len(text)) if height >= 12 else 0
    drawn = board.draw_board(scene, min(space, wanted))
    left = height - len(drawn.lines)
    item = max(0, min(scene.view.item, len(text) - left))
    shown = text[item : item + left]
    spare = left - len(shown) - 1
    if spare >= 5 and scene.room >= 60:
        shown += [(), *panels.charts_alone(scene, spare)]
    return _with_board(drawn, scene, shown, item)


def _draw_panel(scene: Scene, height: int) -> Frame:
    if height <= 0:
        return Frame(())
    view = scene.view
    title = TITLES[view.panel]
    if view.panel == "stacks" and not view.everyone and scene.row is not None:
        title = f"what rank {scene.row.rank} does"
    space = height - 1 if height >= 3 else height
    item = view.item
    if view.panel in ("findings", "runs"):
        draw_list = panels.findings_panel if view.panel == "findings" else panels.choices_panel
        listed = draw_list(scene, space)
    else:
        lines = panels.text_panel(scene)
        item = max(0, min(item, len(lines) - space))
        below = len(lines) - item - space
        lines = lines[item : item + space]
        if below > 0:
            lines[-1] = ((f"{scene.marks.ellipsis} {below + 1} more lines (j)", "dim"),)
        listed = Frame(tuple(lines))
    head = [_title(f"{title} (esc: back)", scene)] if space < height else []
    drawn = listed.below(head)
    return replace(drawn, lines=drawn.lines[:height], top=view.top, item=item)


def _title(text: str, scene: Scene) -> Line:
    if text_width(text) + 4 <= scene.room:
        return scene.rule(text)
    text = f"{text.partition(' (')[0]} "
    return ((text + scene.marks.rule * max(scene.room - text_width(text), 0), "bold"),)

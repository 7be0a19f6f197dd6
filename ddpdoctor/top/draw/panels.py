"""Draw the panels that open over the board, and the sections below it.

Panels open at a key or stand in the board's place while there is no run; below the board are
findings, what the ranks do, GPUs, charts and output, as far as there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ddpdoctor.core import formatting
from ddpdoctor.render.terminal import Line, fit, fitted, labelled, text_width, wrapped
from ddpdoctor.top.draw import board, drawing
from ddpdoctor.top.draw.board import activity_lines, group_line, rank_groups, short_site
from ddpdoctor.top.draw.drawing import Marks, Scene
from ddpdoctor.top.frames import Point
from ddpdoctor.top.headline import ordered_findings
from ddpdoctor.top.snapshot import FindingRow, Gpu, Times
from ddpdoctor.top.view import KEYS

if TYPE_CHECKING:
    from ddpdoctor.top.actions import TakenStacks


# -- what opens over the board at a key, and what stands in its place while there is no run


_READING = (
    ("OWN", "what a rank spent itself in a step: data, forward, backward, optimizer and the rest"),
    ("wait", "what it spent in waiting for other ranks; the slow rank is the one that waits least"),
    ("~", "not measured separately: the wait for others is in this number"),
    ("-", "not known"),
    ("util", "share of the last second in which any kernel ran; waiting in NCCL counts: see watt"),
    ("med, skew", "the median of all ranks; the largest OWN as a multiple of the median one"),
    ("bars", "steps, on one axis; memory from 80% yellow, from 95% red; util below 70%, 30%"),
)


@dataclass(frozen=True)
class ListLines:
    """The lines of a list, and which of its entries each belongs to."""

    lines: list[Line]
    entries: dict[int, int] = field(default_factory=dict)


def finding_line(row: FindingRow, scene: Scene, room: int) -> Line:
    """A finding in a line: sign, code, message, age."""
    finding, style = row.finding, row.finding.severity.label
    age = "" if row.time is None else f" {formatting.age(max(scene.snapshot.time - row.time, 0.0))}"
    head = f"{scene.marks.level(style)} {finding.code} "
    left = max(room - text_width(head) - text_width(age), 0)
    return ((head, style), (fit(scene.cut(finding.message, left), left), ""), (age, "dim"))


def findings_panel(scene: Scene, height: int) -> ListLines:
    """``f``: the list around the selected finding; if it is open, with evidence and fix."""
    found = ordered_findings(scene.snapshot.findings)
    if not found:
        text = "no findings so far" if scene.snapshot.live else "no findings"
        return ListLines(wrapped(text, scene.room, "dim"))
    item = min(scene.view.item, len(found) - 1)
    body = full_finding(found[item], scene.room) if scene.view.opened else []
    # The selected one and what it says come first; the list fills the rest around it.
    around = max(height - len(body) - 1, 1)
    first = max(0, min(item - around // 2, len(found) - around))
    listed = ListLines([])
    lines = listed.lines
    for number, row in enumerate(found[first : first + around], first):
        listed.entries[len(lines)] = number
        line = finding_line(row, scene, scene.room - 2)
        if number == item:
            text = f"{scene.marks.cursor} " + "".join(text for text, _ in line)
            lines += [((fit(text, scene.room), "cursor"),), *body]
        else:
            lines.append((("  ", ""), *line))
    left = len(found) - first - around
    if left > 0:
        lines.append(((f"  {scene.marks.ellipsis} {left} more", "dim"),))
    return listed


def full_finding(row: FindingRow, room: int) -> list[Line]:
    """A finding in full."""
    finding = row.finding
    lines = wrapped(finding.message, room, "bold", "    ")
    place = "" if finding.location is None else short_site(str(finding.location))
    for label, text, style in (
        ("at", place, ""),
        *(("evidence", each, "") for each in finding.evidence),
        ("fix", finding.fix, "ok"),
        ("page", f"ddpdoctor explain {finding.code}", "dim"),
    ):
        if text or label == "evidence":
            lines += labelled(f"    {label}", text, room, 14, style)
    return lines


def choices_panel(scene: Scene, height: int) -> ListLines:
    """The lines to choose from, around the selected one."""
    asked, item = scene.material.asked, scene.view.item
    listed = ListLines([])
    first = max(0, min(item - height // 2, len(asked) - height))
    for number in range(first, min(len(asked), first + height)):
        sign, style = (f"{scene.marks.cursor} ", "cursor") if number == item else ("  ", "")
        listed.entries[len(listed.lines)] = number
        listed.lines.append(((scene.cut(sign + asked[number]), style),))
    return listed


def text_panel(scene: Scene) -> list[Line]:
    """A panel of text that scrolls."""
    if scene.view.panel == "help":
        return _help_panel(scene)
    if scene.view.panel == "environment":
        return environment_panel(scene)
    if scene.view.panel == "stacks":
        return _stacks_panel(scene)
    return [line for text in scene.material.asked for line in wrapped(text, scene.room)]


def _help_panel(scene: Scene) -> list[Line]:
    """``?``: the keys, and how the board is to be read."""
    lines: list[Line] = []
    for key in KEYS:
        text = "off: --readonly" if key.action == "signal" and scene.view.readonly else key.text
        others = [name for name in key.keys if name in ("down", "up", "ctrl+c", "h")]
        arrows = f" ({', '.join(others)})" if others else ""
        lines += labelled(f" {key.shown}", text + arrows, scene.room, 8)
    lines += labelled(" ctrl+z", "suspend the monitor; fg brings it back", scene.room, 8)
    lines += labelled(" c", "the live runs, to choose one", scene.room, 8)
    lines += labelled(" ctrl+l", "redraw the whole screen", scene.room, 8)
    lines.append((("", ""),))
    for word, text in _READING:
        lines += labelled(f" {word}", text, scene.room, 12)
    marks = scene.marks
    signs = (
        f" {marks.blamed} the slowest rank   {marks.dead} dead   {marks.stale} stale   "
        f"{marks.debugger} in the debugger   {marks.starting} starting   {marks.ended} ended"
    )
    return [*lines, *wrapped(signs, scene.room)]


def environment_panel(scene: Scene) -> list[Line]:
    """``e``: versions, launch settings, and what the monitor itself has to say."""
    snapshot, room = scene.snapshot, scene.room
    facts = {
        "run": snapshot.run,
        "command": snapshot.command,
        "directory": snapshot.path,
        "ranks": "" if snapshot.world_size is None else str(snapshot.world_size),
    }
    if snapshot.started is not None:
        began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(snapshot.started))
        facts["started"] = f"{began}, {formatting.duration(snapshot.time - snapshot.started)} ago"
    if snapshot.exit_status is not None:
        facts["exit status"] = str(snapshot.exit_status)
    facts |= {"nvml": snapshot.nvml} if snapshot.nvml else {}
    facts |= snapshot.environment
    width = min(max(len(name) for name in facts) + 2, max(room // 3, 8))
    entries = [(name, text, "") for name, text in facts.items() if text]
    entries += [("note", note, "warning") for note in snapshot.notes]
    lines = [
        line for name, text, style in entries for line in labelled(name, text, room, width, style)
    ]
    return lines or [(("nothing is known of the launch", "dim"),)]


def _stacks_panel(scene: Scene) -> list[Line]:
    """``d``: where the ranks are in the code, or one of them, and their stacks."""
    row = None if scene.view.everyone else scene.row
    if row is not None:
        lines = activity_lines(row, scene.material.asked, scene.room)
    else:
        lines = [group_line(group, scene) for group in rank_groups(scene.snapshot.ranks)]
        lines = lines or [(("no rank has started yet", "dim"),)]
    lines.append(())
    taken = scene.material.taken
    if taken is None:
        return [*lines, (("taking the stacks ...", "dim"),)]
    if taken.trouble:
        return [*lines, *wrapped(taken.trouble, scene.room, "dim")]
    rank = None if row is None else row.rank
    return [*lines, *_drawn_stacks(taken, rank, scene.room, scene.view.ascii_only)]


@lru_cache(maxsize=8)
def _drawn_stacks(
    taken: TakenStacks, rank: int | None, room: int, ascii_only: bool
) -> tuple[Line, ...]:
    """The stacks; of one rank, with its other threads."""
    # Here, and not at the top: a first paint has no use for it.
    from ddpdoctor.render import stack_text as render
    from ddpdoctor.stacks.frames import merge

    stacks = tuple(each for each in taken.stacks if rank is None or each.rank == rank)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    head = f"stacks at {when}" if taken.live else f"the last stacks that were taken, at {when}"
    look, code = render.Look(room, ascii_only), taken.code or {}
    lines = wrapped(f"{head}: {render.stacks_summary(merge(stacks))}", room, "dim")
    lines += render.draw(stacks, look, code)
    return (*lines, *(render.draw_others(stacks, look, code) if rank is not None else ()))


def outlier_stacks(scene: Scene) -> list[Line]:
    """The stacks of the rank that is blamed."""
    taken = scene.material.outlier
    if taken is None or taken.trouble:
        return []
    from ddpdoctor.render import stack_text as render

    who = ", ".join(str(each.rank) for each in taken.stacks)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    look = render.Look(scene.room, scene.view.ascii_only)
    title = f"stack of rank {who} at {when} (d)"
    return [((title, "dim"),), *render.draw(taken.stacks, look, taken.code or {})]


def gpus_panel(scene: Scene) -> list[Line]:
    """Each GPU: power, temperature, what its links carry, and who holds its memory."""
    snapshot = scene.snapshot
    several = len({gpu.node for gpu in snapshot.gpus}) > 1
    ranks = {row.pid: row.rank for row in snapshot.ranks if row.pid is not None}
    lines: list[Line] = [(("GPUs: power, temperature, links, processes", "dim"),)]
    for gpu in snapshot.gpus:
        name = f"{gpu.node}:{gpu.index}" if several else f"gpu {gpu.index}"
        limit = f"/{formatting.watts(gpu.power_limit)}" if gpu.power_limit else ""
        facts = [f"{formatting.watts(gpu.power)}{limit}", formatting.degrees(gpu.temperature)]
        facts += [f"PCIe {formatting.size(gpu.pcie)}/s"] if gpu.pcie is not None else []
        facts += [f"NVLink {formatting.size(gpu.nvlink)}/s"] if gpu.nvlink is not None else []
        for pid, held in gpu.processes:
            who = f"rank {ranks[pid]}" if pid in ranks else f"pid {pid}"
            facts.append(f"{who} {formatting.size(held)}")
        facts += gpu.throttle
        text = "  ".join([*facts, gpu.problem] if gpu.problem else facts)
        style = "warning" if gpu.throttle or gpu.problem else ""
        head = f"{name} "
        lines.append(((head, "bold"), (scene.cut(text, scene.room - text_width(head)), style)))
    return lines


def machine_panel(scene: Scene, height: int) -> list[Line]:
    """The machine where there is no run: how to start one, processors, memory, each GPU."""
    snapshot = scene.snapshot
    start = scene.cut("start a run: ddpdoctor run --nproc-per-node 2 -- train.py")
    first: list[Line] = [((start, "dim"),)] if height > 2 else []
    height -= len(first)
    lines: list[Line] = []
    machine = snapshot.machine
    if machine is not None:
        cores = "" if machine.cores is None else f" of {machine.cores} cores"
        memory = (
            f"memory {formatting.size(machine.memory_used)}/{formatting.size(machine.memory_total)}"
        )
        lines.append(_meter_line(machine.node or "cpu", machine.cpu, f"cpu{cores}", scene))
        lines.append(_meter_line("", machine.memory_share, memory, scene))
    several = len({gpu.node for gpu in snapshot.gpus}) > 1
    for gpu in snapshot.gpus:
        name = f"{gpu.node}:{gpu.index}" if several else f"gpu {gpu.index}"
        lines.append(_meter_line(name, gpu.utilization, _gpu_text(gpu), scene))
    if len(lines) > height > 1:
        lines = [*lines[: height - 1], ((f"{scene.marks.ellipsis} more", "dim"),)]
    if not snapshot.gpus and len(lines) < height:
        lines.append(((snapshot.nvml or "no GPU", "dim"),))
    return [*first, *lines]


def _gpu_text(gpu: Gpu) -> str:
    memory = f"{formatting.size(gpu.memory_used)}/{formatting.size(gpu.memory_total)}"
    facts = [memory, formatting.watts(gpu.power), formatting.degrees(gpu.temperature)]
    facts += [*(["MIG"] if gpu.mig else []), *gpu.throttle]
    name = gpu.problem or gpu.name
    return " ".join(f"{fact:>5}" for fact in facts) + (f"  {name}" if name else "")


def _meter_line(name: str, share: float | None, text: str, scene: Scene) -> Line:
    """A name, a bar of how much is used, the number, and words."""
    room, marks = scene.room, scene.marks
    label = 12 if room >= 40 else 6
    bar = 20 if room >= 60 else 8 if room >= 40 else 0
    filled = 0 if share is None else round(max(0.0, min(share, 1.0)) * bar)
    drawn = marks.levels[-1] * filled + marks.dot * (bar - filled) + (" " if bar else "")
    number = f"{formatting.percent(share):>4} "
    left = room - label - text_width(drawn) - text_width(number)
    head = fit(name[-label + 1 :], label)
    return ((head, "bold"), (drawn, "bar"), (number, ""), (scene.cut(text, left), ""))


# -- what there is room for below the board: findings, what the ranks do, GPUs, charts, output


PANE_COLUMNS = 58
"""Columns from which on there is one pane more beside the others."""
PANE_GAP = 3

LEAST, MOST = 6, 20
"""Lines of a chart, its title among them."""
TALL = 30
"""Lines from which on the worst finding is shown with its evidence and its fix."""
ENOUGH = 4
"""Points from which a chart says something."""

_Section = list[Line]
_Chart = Callable[[int], _Section]
"""Draws a chart in so many lines."""


def draw_below(scene: Scene, height: int) -> list[Line]:
    """In as many panes beside each other as fit, at most ``height`` lines."""
    panes = max(1, min(3, scene.room // PANE_COLUMNS)) if height >= 8 else 1
    width = (scene.room - PANE_GAP * (panes - 1)) // panes
    last = scene.room - (width + PANE_GAP) * (panes - 1)
    subject = _chart_subject(scene, width)
    sides = _chart_panes(subject, panes - 1, height) if panes > 1 else ()
    if not sides:
        sections = _text_sections(scene, height)
        spare = height - sum(len(section) + 1 for section in sections)
        if spare >= LEAST and scene.room >= 50:
            sections += [each(min(spare, MOST)) for each in _charts(subject)[:1]]
        return _stacked_sections(sections, height)
    words = _stacked_sections(_text_sections(replace(scene, room=last), height), height)
    return _side_by_side([*((side, width) for side in sides), (words, last)])


def charts_alone(scene: Scene, height: int) -> list[Line]:
    """The charts of the selected rank."""
    charts = _charts(_chart_subject(scene, scene.room))
    return _pane(charts[: max(1, (height + 1) // (LEAST + 1))], height)


@lru_cache(maxsize=4)
def _chart_panes(subject: _ChartSubject, most: int, height: int) -> tuple[list[Line], ...]:
    """The panes of charts, which are drawn again when there is a point more."""
    charts = _charts(subject)
    half = (len(charts) + 1) // 2 if most > 1 else len(charts)
    return tuple(_pane(side, height) for side in (charts[:half], charts[half:]) if side)


def _pane(charts: Sequence[_Chart], height: int) -> list[Line]:
    """Charts one below the other that share the height."""
    count = max(1, min(len(charts), (height + 1) // (LEAST + 1)))
    each = min(MOST, (height + 1) // count - 1)
    return _stacked_sections([draw(each) for draw in charts[:count]], height)


def _stacked_sections(sections: Sequence[_Section], height: int) -> list[Line]:
    """Sections one below the other, a line between them, as far as they go."""
    lines: list[Line] = []
    for section in sections:
        if height - len(lines) < 2 + bool(lines):
            continue
        lines += [()] if lines else []
        lines += section[: height - len(lines)]
    return lines


def _side_by_side(panes: Sequence[tuple[list[Line], int]]) -> list[Line]:
    count = max(len(lines) for lines, _ in panes)
    rows = []
    for number in range(count):
        row: Line = ()
        for lines, width in panes:
            gap: Line = ((" " * PANE_GAP, ""),) if row else ()
            line = lines[number] if number < len(lines) else ()
            row = (*row, *gap, *fitted(line, width))
        rows.append(row)
    return rows


# -- words


def _text_sections(scene: Scene, height: int) -> list[_Section]:
    """What is said in words, each section with its title."""
    snapshot = scene.snapshot
    sections: list[_Section] = []
    most = max(height // 4, 1)
    found = ordered_findings(snapshot.findings)
    if found:
        lines = [finding_line(each, scene, scene.room) for each in found[:most]]
        if height >= TALL:
            lines[1:1] = full_finding(found[0], scene.room)[: height // 3]
        sections.append([((f"findings: {len(found)} (f)", "dim"),), *lines])
    groups = board.rank_groups(snapshot.ranks) if snapshot.live else []
    if groups:
        lines = [board.group_line(group, scene) for group in groups[:most]]
        if len(groups) > most:
            more = f"{scene.marks.ellipsis} {len(groups) - most} more groups"
            lines.append(((more, "dim"),))
        sections.append([(("what the ranks do (d)", "dim"),), *lines])
    if scene.material.outlier is not None:
        sections.append(outlier_stacks(scene)[: max(height // 3, 6)])
    if snapshot.gpus and height >= 24:
        gpus = gpus_panel(scene)
        sections.append(gpus[: max(height // 3, 6)])
    row, output, whose = scene.row, snapshot.output, "the job"
    if row is not None and row.output:
        output, whose = row.output, f"rank {row.rank}"
    if output:
        lines = [((text, ""),) for text in output[-max(height // 3, 2) :]]
        sections.append([((f"last output of {whose} (stderr)", "dim"),), *lines])
    return sections


# -- charts


@dataclass(frozen=True)
class _ChartSubject:
    """All that the charts depend on."""

    points: tuple[Point, ...]
    rank: int | None
    several: bool
    """Whether there are several ranks."""
    memory: int | None
    """Bytes of the rank's GPU."""
    watts: float | None
    """What all GPUs may draw."""
    room: int
    marks: Marks

    @property
    def span(self) -> str:
        """How much time they show."""
        return f"over {formatting.duration(self.points[-1].time - self.points[0].time)}"


def _chart_subject(scene: Scene, room: int) -> _ChartSubject:
    row = scene.row
    return _ChartSubject(
        scene.material.points,
        None if row is None else row.rank,
        len(scene.snapshot.ranks) > 1,
        None if row is None or row.gpu is None else row.gpu.memory_total,
        sum(gpu.power_limit or 0.0 for gpu in scene.snapshot.gpus) or None,
        room,
        scene.marks,
    )


def _charts(subject: _ChartSubject) -> list[_Chart]:
    """The run over time: steps by phase of a rank and of the median one, skew, loss and others."""
    return _step_charts(subject) + _number_charts(subject) if len(subject.points) >= ENOUGH else []


def _step_charts(subject: _ChartSubject) -> list[_Chart]:
    rank, points = subject.rank, subject.points
    series = []
    if rank is not None:
        own = [point.times[rank] for point in points if rank in point.times]
        series.append((f"step of rank {rank}", own))
    if subject.several:
        usual = [point.median for point in points if point.median is not None]
        series.append(("step of the median rank", usual))
    series = [(name, steps) for name, steps in series if len(steps) >= ENOUGH]
    top = drawing.axis_end_without_outlier([times.total for _, steps in series for times in steps])
    label = formatting.time(top)

    def chart(name: str, steps: Sequence[Times]) -> _Chart:
        def draw(height: int) -> _Section:
            size = subject.room - text_width(label) - 1, height - 1
            title = f"{name}, {subject.span}"
            return drawing.framed_chart(
                title, label, drawing.step_chart(steps, top, size, subject.marks)
            )

        return draw

    return [chart(name, steps) for name, steps in series]


def _number_charts(subject: _ChartSubject) -> list[_Chart]:
    points = subject.points
    number = -1 if subject.rank is None else subject.rank
    found: list[tuple[str, list[float | None], float | None, Callable[[float], str]]] = [
        ("skew, slowest to median", [each.skew for each in points], None, _time_text),
        ("loss", [each.loss for each in points], None, lambda value: f"{value:.3g}"),
        (
            f"memory of rank {number}",
            [each.memory.get(number) for each in points],
            subject.memory,
            lambda value: formatting.size(value),
        ),
        (
            "power of all GPUs",
            [each.power for each in points],
            subject.watts,
            lambda value: f"{formatting.figures(value)} W",
        ),
    ]
    return [_number_chart(subject, *each) for each in found if _known_values(each[1]) >= ENOUGH]


def _known_values(values: Sequence[float | None]) -> int:
    return sum(value is not None for value in values)


def _time_text(value: float) -> str:
    return f"{value:.3g}x"


def _number_chart(
    subject: _ChartSubject,
    name: str,
    values: Sequence[float | None],
    most: float | None,
    shown: Callable[[float], str],
) -> _Chart:
    def draw(height: int) -> _Section:
        known = [value for value in values if value is not None]
        top = most or drawing.axis_end(max(known))
        label = shown(top)
        size = subject.room - text_width(label) - 1, height - 1
        title = f"{name}, now {shown(known[-1])}, {subject.span}"
        return drawing.framed_chart(
            title, label, drawing.bar_chart(values, top, size, subject.marks)
        )

    return draw

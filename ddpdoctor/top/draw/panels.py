"""Draw the panels that open over the board, and the sections below it.

Panels open at a key, or take the board's place while there is no run. Below the board are
findings, the ranks' activities, GPUs, charts and output, if there is room.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ddpdoctor.core import formatting
from ddpdoctor.render.terminal import Line, fit, fitted, labelled, text_width, wrapped
from ddpdoctor.top.draw import drawing
from ddpdoctor.top.draw.board import activity_lines, group_line, link_facts, rank_groups, short_site
from ddpdoctor.top.draw.drawing import Frame, Marks, Scene
from ddpdoctor.top.frames import Point
from ddpdoctor.top.headline import ordered_findings
from ddpdoctor.top.snapshot import FindingRow, Snapshot, Times, memory_share
from ddpdoctor.top.view import KEYS

if TYPE_CHECKING:
    from ddpdoctor.top.actions import TakenStacks

_READING = (
    ("OWN", "the rank's own time in a step: data, forward, backward, optimizer and the rest"),
    ("wait", "its time waiting for other ranks; the slow rank is the one that waits least"),
    ("~", "not measured separately: the wait for others is in this number"),
    ("-", "not known"),
    ("util", "share of the last second in which any kernel ran; waiting in NCCL counts: see watt"),
    ("med, skew", "the median of all ranks; the largest OWN as a multiple of the median one"),
    ("bars", "steps, on one axis; memory from 80% yellow, from 95% red; util below 70%, 30%"),
)


# -- panels that open at a key


def finding_line(row: FindingRow, scene: Scene, room: int) -> Line:
    """Draw a finding in a line: sign, code, message, age."""
    finding, style = row.finding, row.finding.severity.label
    age = "" if row.time is None else f" {formatting.age(max(scene.snapshot.time - row.time, 0.0))}"
    head = f"{scene.marks.level(style)} {finding.code} "
    left = max(room - text_width(head) - text_width(age), 0)
    return ((head, style), (fit(scene.cut(finding.message, left), left), ""), (age, "dim"))


def findings_panel(scene: Scene, height: int) -> Frame:
    """Draw the findings around the selected one, in full if it is open."""
    found = ordered_findings(scene.snapshot.findings)
    if not found:
        text = "no findings so far" if scene.snapshot.live else "no findings"
        return Frame(tuple(wrapped(text, scene.room, "dim")))
    item = min(scene.view.item, len(found) - 1)
    body = full_finding(found[item], scene.room) if scene.view.opened else []
    # Draw the selected one with its text first, and fill the rest with the list around it.
    around = max(height - len(body) - 1, 1)
    first = max(0, min(item - around // 2, len(found) - around))
    lines: list[Line] = []
    entries = {}
    for number, row in enumerate(found[first : first + around], first):
        entries[len(lines)] = number
        line = finding_line(row, scene, scene.room - 2)
        if number == item:
            text = f"{scene.marks.cursor} " + "".join(text for text, _ in line)
            lines += [((fit(text, scene.room), "cursor"),), *body]
        else:
            lines.append((("  ", ""), *line))
    left = len(found) - first - around
    if left > 0:
        lines.append(((f"  {scene.marks.ellipsis} {left} more", "dim"),))
    return Frame(tuple(lines), entries=entries)


def full_finding(row: FindingRow, room: int) -> list[Line]:
    """Draw a finding in full."""
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


def choices_panel(scene: Scene, height: int) -> Frame:
    """Draw the choices around the selected one."""
    asked, item = scene.material.asked, scene.view.item
    first = max(0, min(item - height // 2, len(asked) - height))
    numbers = range(first, max(first, min(len(asked), first + height)))
    lines: list[Line] = []
    for number in numbers:
        sign, style = (f"{scene.marks.cursor} ", "cursor") if number == item else ("  ", "")
        lines.append(((scene.cut(sign + asked[number]), style),))
    return Frame(tuple(lines), entries=dict(enumerate(numbers)))


def text_panel(scene: Scene) -> list[Line]:
    """Draw a panel of text that scrolls."""
    panels = {"help": _help_panel, "environment": environment_panel, "stacks": _stacks_panel}
    draw = panels.get(scene.view.panel)
    if draw is not None:
        return draw(scene)
    return [line for text in scene.material.asked for line in wrapped(text, scene.room)]


def _help_panel(scene: Scene) -> list[Line]:
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
    """Draw versions, launch settings, and the monitor's notes."""
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
    return lines or [(("nothing is known about the launch", "dim"),)]


def _stacks_panel(scene: Scene) -> list[Line]:
    """Draw the positions of all ranks, or of one, in the code, and their stacks."""
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
    """Draw the stacks. For a single rank, include its other threads."""
    # Imported here, because the first screen does not need it.
    from ddpdoctor.render import stack_text as render
    from ddpdoctor.stacks.frames import merge

    stacks = tuple(each for each in taken.stacks if rank is None or each.rank == rank)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    head = f"stacks at {when}" if taken.live else f"the last stacks that were taken, at {when}"
    style, code = render.StackStyle(room, ascii_only), taken.code or {}
    lines = wrapped(f"{head}: {render.stacks_summary(merge(stacks))}", room, "dim")
    lines += render.draw(stacks, style, code)
    return (*lines, *(render.draw_others(stacks, style, code) if rank is not None else ()))


# -- the panel in place of the board while there is no run


def machine_panel(scene: Scene, height: int) -> list[Line]:
    """Draw the machine: how to start a run, processors, memory, each GPU."""
    snapshot, machine = scene.snapshot, scene.snapshot.machine
    start = scene.cut("start a run: ddpdoctor run --nproc-per-node 2 -- train.py")
    first: list[Line] = [((start, "dim"),)] if height > 2 else []
    height -= len(first)
    lines: list[Line] = []
    if machine is not None:
        cores = "" if machine.cores is None else f" of {machine.cores} cores"
        memory = f"memory {_of_size(machine.memory_used, machine.memory_total)}"
        lines.append(_meter_line(machine.node or "cpu", machine.cpu, f"cpu{cores}", scene))
        lines.append(_meter_line("", memory_share(machine), memory, scene))
    for gpu, name in zip(snapshot.gpus, _gpu_names(snapshot), strict=True):
        facts = [
            _of_size(gpu.memory_used, gpu.memory_total),
            formatting.watts(gpu.power),
            formatting.degrees(gpu.temperature),
            *(["MIG"] if gpu.mig else []),
            *gpu.throttle,
        ]
        words = gpu.problem or gpu.name
        text = " ".join(f"{fact:>5}" for fact in facts) + (f"  {words}" if words else "")
        lines.append(_meter_line(name, gpu.utilization, text, scene))
    if len(lines) > height > 1:
        lines = [*lines[: height - 1], ((f"{scene.marks.ellipsis} more", "dim"),)]
    if not snapshot.gpus and len(lines) < height:
        lines.append(((snapshot.nvml or "no GPU", "dim"),))
    return [*first, *lines]


def _of_size(used: int | None, total: int | None) -> str:
    return f"{formatting.size(used)}/{formatting.size(total)}"


def _gpu_names(snapshot: Snapshot) -> list[str]:
    several = len({gpu.node for gpu in snapshot.gpus}) > 1
    return [f"{gpu.node}:{gpu.index}" if several else f"gpu {gpu.index}" for gpu in snapshot.gpus]


def _meter_line(name: str, share: float | None, text: str, scene: Scene) -> Line:
    """Draw a name, a bar of the used share, the number, and words."""
    room, marks = scene.room, scene.marks
    label = 12 if room >= 40 else 6
    bar = 20 if room >= 60 else 8 if room >= 40 else 0
    filled = 0 if share is None else round(max(0.0, min(share, 1.0)) * bar)
    drawn = marks.levels[-1] * filled + marks.dot * (bar - filled) + (" " if bar else "")
    number = f"{formatting.percent(share):>4} "
    left = room - label - text_width(drawn) - text_width(number)
    head = fit(name[-label + 1 :], label)
    return ((head, "bold"), (drawn, "bar"), (number, ""), (scene.cut(text, left), ""))


# -- below the board

PANE_COLUMNS, PANE_GAP = 58, 3
"""Minimum width of a pane next to another one, and columns between two panes."""

MIN_CHART, MAX_CHART = 6, 20  # Lines of a chart with its title

TALL = 30  # Minimum lines for showing the worst finding in full
MIN_POINTS = 4  # Minimum number of points for a chart
_Chart = Callable[[int], list[Line]]  # Draws a chart with a number of lines


def draw_below(scene: Scene, height: int) -> list[Line]:
    """Draw at most ``height`` lines, in as many side-by-side panes as fit."""
    panes = max(1, min(3, scene.room // PANE_COLUMNS)) if height >= 8 else 1
    width = (scene.room - PANE_GAP * (panes - 1)) // panes
    last = scene.room - (width + PANE_GAP) * (panes - 1)
    subject = _chart_subject(scene, width)
    sides = _chart_panes(subject, panes - 1, height) if panes > 1 else ()
    if not sides:
        sections = _text_sections(scene, height)
        spare = height - sum(len(section) + 1 for section in sections)
        if spare >= MIN_CHART and scene.room >= 50:
            sections += [each(min(spare, MAX_CHART)) for each in _charts(subject)[:1]]
        return _stacked_sections(sections, height)
    words = _stacked_sections(_text_sections(replace(scene, room=last), height), height)
    columns = [*((side, width) for side in sides), (words, last)]
    rows = []
    for number in range(max(len(lines) for lines, _ in columns)):
        row: Line = ()
        for lines, room in columns:
            gap: Line = ((" " * PANE_GAP, ""),) if row else ()
            line = lines[number] if number < len(lines) else ()
            row = (*row, *gap, *fitted(line, room))
        rows.append(row)
    return rows


def charts_alone(scene: Scene, height: int) -> list[Line]:
    """Draw the charts of the selected rank."""
    charts = _charts(_chart_subject(scene, scene.room))
    return _pane(charts[: max(1, (height + 1) // (MIN_CHART + 1))], height)


@lru_cache(maxsize=4)
def _chart_panes(subject: _ChartSubject, most: int, height: int) -> tuple[list[Line], ...]:
    """Draw the panes of charts, once for each new point."""
    charts = _charts(subject)
    half = (len(charts) + 1) // 2 if most > 1 else len(charts)
    return tuple(_pane(side, height) for side in (charts[:half], charts[half:]) if side)


def _pane(charts: Sequence[_Chart], height: int) -> list[Line]:
    """Draw charts below each other that share the height."""
    count = max(1, min(len(charts), (height + 1) // (MIN_CHART + 1)))
    each = min(MAX_CHART, (height + 1) // count - 1)
    return _stacked_sections([draw(each) for draw in charts[:count]], height)


def _stacked_sections(sections: Sequence[list[Line]], height: int) -> list[Line]:
    """Stack as many sections as fit, with a line between them."""
    lines: list[Line] = []
    for section in sections:
        if height - len(lines) < 2 + bool(lines):
            continue
        lines += [()] if lines else []
        lines += section[: height - len(lines)]
    return lines


def _text_sections(scene: Scene, height: int) -> list[list[Line]]:
    """Draw the sections of text, each with its title."""
    snapshot = scene.snapshot
    sections: list[list[Line]] = []
    most = max(height // 4, 1)
    found = ordered_findings(snapshot.findings)
    if found:
        lines = [finding_line(each, scene, scene.room) for each in found[:most]]
        if height >= TALL:
            lines[1:1] = full_finding(found[0], scene.room)[: height // 3]
        sections.append([((f"findings: {len(found)} (f)", "dim"),), *lines])
    groups = rank_groups(snapshot.ranks) if snapshot.live else []
    if groups:
        lines = [group_line(group, scene) for group in groups[:most]]
        if len(groups) > most:
            more = f"{scene.marks.ellipsis} {len(groups) - most} more groups"
            lines.append(((more, "dim"),))
        sections.append([(("what the ranks do (d)", "dim"),), *lines])
    if scene.material.outlier is not None:
        sections.append(_outlier_stacks(scene.material.outlier, scene)[: max(height // 3, 6)])
    if snapshot.gpus and height >= 24:
        sections.append(_gpu_lines(scene)[: max(height // 3, 6)])
    row, output, whose = scene.row, snapshot.output, "the job"
    if row is not None and row.output:
        output, whose = row.output, f"rank {row.rank}"
    if output:
        lines = [((text, ""),) for text in output[-max(height // 3, 2) :]]
        sections.append([((f"last output of {whose} (stderr)", "dim"),), *lines])
    return sections


def _outlier_stacks(taken: TakenStacks, scene: Scene) -> list[Line]:
    """Draw the stacks of the blamed rank."""
    if taken.trouble:
        return []
    from ddpdoctor.render import stack_text as render

    who = ", ".join(str(each.rank) for each in taken.stacks)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    style = render.StackStyle(scene.room, scene.view.ascii_only)
    title = f"stack of rank {who} at {when} (d)"
    return [((title, "dim"),), *render.draw(taken.stacks, style, taken.code or {})]


def _gpu_lines(scene: Scene) -> list[Line]:
    """Draw each GPU: power, temperature, traffic on its links, and its processes."""
    snapshot = scene.snapshot
    ranks = {row.pid: row.rank for row in snapshot.ranks if row.pid is not None}
    lines: list[Line] = [(("GPUs: power, temperature, links, processes", "dim"),)]
    for gpu, name in zip(snapshot.gpus, _gpu_names(snapshot), strict=True):
        limit = f"/{formatting.watts(gpu.power_limit)}" if gpu.power_limit else ""
        facts = [f"{formatting.watts(gpu.power)}{limit}", formatting.degrees(gpu.temperature)]
        facts += link_facts(gpu)
        for pid, held in gpu.processes:
            who = f"rank {ranks[pid]}" if pid in ranks else f"pid {pid}"
            facts.append(f"{who} {formatting.size(held)}")
        facts += gpu.throttle
        text = "  ".join([*facts, gpu.problem] if gpu.problem else facts)
        style = "warning" if gpu.throttle or gpu.problem else ""
        head = f"{name} "
        lines.append(((head, "bold"), (scene.cut(text, scene.room - text_width(head)), style)))
    return lines


# -- charts


@dataclass(frozen=True)
class _ChartSubject:
    """Everything that the charts depend on."""

    points: tuple[Point, ...]
    rank: int | None
    several: bool  # Whether there are several ranks
    memory: int | None  # Total bytes of the rank's GPU
    watts: float | None  # The power limit of all GPUs
    room: int
    marks: Marks

    def draw(
        self, title: str, top: str, lines: Callable[[tuple[int, int]], list[Line]], height: int
    ) -> list[Line]:
        """Draw a chart with its title and the ends of its axis."""
        span = formatting.duration(self.points[-1].time - self.points[0].time)
        size = self.room - text_width(top) - 1, height - 1
        return drawing.framed_chart(f"{title}, over {span}", top, lines(size))


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
    """Return the charts of the run: steps by phase, skew, loss, memory and power over time."""
    if len(subject.points) < MIN_POINTS:
        return []
    return _step_charts(subject) + _number_charts(subject)


def _step_charts(subject: _ChartSubject) -> list[_Chart]:
    rank, points = subject.rank, subject.points
    series = []
    if rank is not None:
        own = [point.times[rank] for point in points if rank in point.times]
        series.append((f"step of rank {rank}", own))
    if subject.several:
        usual = [point.median for point in points if point.median is not None]
        series.append(("step of the median rank", usual))
    series = [(name, steps) for name, steps in series if len(steps) >= MIN_POINTS]
    top = drawing.axis_end_without_outlier([times.total for _, steps in series for times in steps])

    def chart(name: str, steps: Sequence[Times]) -> _Chart:
        def lines(size: tuple[int, int]) -> list[Line]:
            return drawing.step_chart(steps, top, size, subject.marks)

        return lambda height: subject.draw(name, formatting.time(top), lines, height)

    return [chart(name, steps) for name, steps in series]


def _number_charts(subject: _ChartSubject) -> list[_Chart]:
    points = subject.points
    number = -1 if subject.rank is None else subject.rank
    found: list[tuple[str, list[float | None], float | None, Callable[[float], str]]] = [
        ("skew, slowest to median", [each.skew for each in points], None, "{:.3g}x".format),
        ("loss", [each.loss for each in points], None, "{:.3g}".format),
        (
            f"memory of rank {number}",
            [each.memory.get(number) for each in points],
            subject.memory,
            formatting.size,
        ),
        (
            "power of all GPUs",
            [each.power for each in points],
            subject.watts,
            lambda value: f"{formatting.figures(value)} W",
        ),
    ]

    def chart(
        name: str, values: Sequence[float | None], most: float | None, shown: Callable[[float], str]
    ) -> _Chart:
        known = [value for value in values if value is not None]
        top = most or drawing.axis_end(max(known))
        title = f"{name}, now {shown(known[-1])}"

        def lines(size: tuple[int, int]) -> list[Line]:
            return drawing.bar_chart(values, top, size, subject.marks)

        return lambda height: subject.draw(title, shown(top), lines, height)

    return [
        chart(*each) for each in found if sum(value is not None for value in each[1]) >= MIN_POINTS
    ]

"""What opens over the board at a key, and what stands in its place while there is no run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ddpdoctor.core import units
from ddpdoctor.render.lines import Line, columns, fit, labelled, wrapped
from ddpdoctor.top.draw.rank import activity, group_line, groups, short_site
from ddpdoctor.top.draw.scene import Scene
from ddpdoctor.top.headline import ordered
from ddpdoctor.top.keys import KEYS
from ddpdoctor.top.snapshot import FindingRow, Gpu

if TYPE_CHECKING:
    from ddpdoctor.top.ask import Taken

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
class Listed:
    """The lines of a list, and which of its entries each belongs to."""

    lines: list[Line]
    entries: dict[int, int] = field(default_factory=dict)


def finding_line(row: FindingRow, scene: Scene, room: int) -> Line:
    """A finding in a line: sign, code, message, age."""
    finding, style = row.finding, row.finding.severity.label
    age = "" if row.time is None else f" {units.age(max(scene.snapshot.time - row.time, 0.0))}"
    head = f"{scene.marks.level(style)} {finding.code} "
    left = max(room - columns(head) - columns(age), 0)
    return ((head, style), (fit(scene.cut(finding.message, left), left), ""), (age, "dim"))


def findings(scene: Scene, height: int) -> Listed:
    """``f``: the list around the selected finding; if it is open, with evidence and fix."""
    found = ordered(scene.snapshot.findings)
    if not found:
        text = "no findings so far" if scene.snapshot.live else "no findings"
        return Listed(wrapped(text, scene.room, "dim"))
    item = min(scene.view.item, len(found) - 1)
    body = opened(found[item], scene.room) if scene.view.opened else []
    # The selected one and what it says come first; the list fills the rest around it.
    around = max(height - len(body) - 1, 1)
    first = max(0, min(item - around // 2, len(found) - around))
    listed = Listed([])
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


def opened(row: FindingRow, room: int) -> list[Line]:
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


def choices(scene: Scene, height: int) -> Listed:
    """The lines to choose from, around the selected one."""
    asked, item = scene.material.asked, scene.view.item
    listed = Listed([])
    first = max(0, min(item - height // 2, len(asked) - height))
    for number in range(first, min(len(asked), first + height)):
        sign, style = (f"{scene.marks.cursor} ", "cursor") if number == item else ("  ", "")
        listed.entries[len(listed.lines)] = number
        listed.lines.append(((scene.cut(sign + asked[number]), style),))
    return listed


def text(scene: Scene) -> list[Line]:
    """A panel of text that scrolls."""
    if scene.view.panel == "help":
        return _help(scene)
    if scene.view.panel == "environment":
        return environment(scene)
    if scene.view.panel == "stacks":
        return _stacks(scene)
    return [line for text in scene.material.asked for line in wrapped(text, scene.room)]


def _help(scene: Scene) -> list[Line]:
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


def environment(scene: Scene) -> list[Line]:
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
        facts["started"] = f"{began}, {units.duration(snapshot.time - snapshot.started)} ago"
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


def _stacks(scene: Scene) -> list[Line]:
    """``d``: where the ranks are in the code, or one of them, and their stacks."""
    row = None if scene.view.everyone else scene.row
    if row is not None:
        lines = activity(row, scene.material.asked, scene.room)
    else:
        lines = [group_line(group, scene) for group in groups(scene.snapshot.ranks)]
        lines = lines or [(("no rank has started yet", "dim"),)]
    lines.append(())
    taken = scene.material.taken
    if taken is None:
        return [*lines, (("taking the stacks ...", "dim"),)]
    if taken.trouble:
        return [*lines, *wrapped(taken.trouble, scene.room, "dim")]
    rank = None if row is None else row.rank
    return [*lines, *_drawn(taken, rank, scene.room, scene.view.ascii_only)]


@lru_cache(maxsize=8)
def _drawn(taken: Taken, rank: int | None, room: int, ascii_only: bool) -> tuple[Line, ...]:
    """The stacks; of one rank, with its other threads."""
    # Here, and not at the top: a first paint has no use for it.
    from ddpdoctor.render import stacks as render
    from ddpdoctor.stacks.merge import merge

    stacks = tuple(each for each in taken.stacks if rank is None or each.rank == rank)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    head = f"stacks at {when}" if taken.live else f"the last stacks that were taken, at {when}"
    look, code = render.Look(room, ascii_only), taken.code or {}
    lines = wrapped(f"{head}: {render.summary(merge(stacks))}", room, "dim")
    lines += render.draw(stacks, look, code)
    return (*lines, *(render.draw_others(stacks, look, code) if rank is not None else ()))


def outlier(scene: Scene) -> list[Line]:
    """The stacks of the rank that is blamed."""
    taken = scene.material.outlier
    if taken is None or taken.trouble:
        return []
    from ddpdoctor.render import stacks as render

    who = ", ".join(str(each.rank) for each in taken.stacks)
    when = time.strftime("%H:%M:%S", time.localtime(taken.time))
    look = render.Look(scene.room, scene.view.ascii_only)
    title = f"stack of rank {who} at {when} (d)"
    return [((title, "dim"),), *render.draw(taken.stacks, look, taken.code or {})]


def gpus(scene: Scene) -> list[Line]:
    """Each GPU: power, temperature, what its links carry, and who holds its memory."""
    snapshot = scene.snapshot
    several = len({gpu.node for gpu in snapshot.gpus}) > 1
    ranks = {row.pid: row.rank for row in snapshot.ranks if row.pid is not None}
    lines: list[Line] = [(("GPUs: power, temperature, links, processes", "dim"),)]
    for gpu in snapshot.gpus:
        name = f"{gpu.node}:{gpu.index}" if several else f"gpu {gpu.index}"
        limit = f"/{units.watts(gpu.power_limit)}" if gpu.power_limit else ""
        facts = [f"{units.watts(gpu.power)}{limit}", units.degrees(gpu.temperature)]
        facts += [f"PCIe {units.size(gpu.pcie)}/s"] if gpu.pcie is not None else []
        facts += [f"NVLink {units.size(gpu.nvlink)}/s"] if gpu.nvlink is not None else []
        for pid, held in gpu.processes:
            who = f"rank {ranks[pid]}" if pid in ranks else f"pid {pid}"
            facts.append(f"{who} {units.size(held)}")
        facts += gpu.throttle
        text = "  ".join([*facts, gpu.problem] if gpu.problem else facts)
        style = "warning" if gpu.throttle or gpu.problem else ""
        head = f"{name} "
        lines.append(((head, "bold"), (scene.cut(text, scene.room - columns(head)), style)))
    return lines


def machine(scene: Scene, height: int) -> list[Line]:
    """The machine where there is no run: how to start one, processors, memory, each GPU."""
    snapshot = scene.snapshot
    start = scene.cut("start a run: ddpdoctor run --nproc-per-node 2 -- train.py")
    first: list[Line] = [((start, "dim"),)] if height > 2 else []
    height -= len(first)
    lines: list[Line] = []
    machine = snapshot.machine
    if machine is not None:
        cores = "" if machine.cores is None else f" of {machine.cores} cores"
        memory = f"memory {units.size(machine.memory_used)}/{units.size(machine.memory_total)}"
        lines.append(_meter(machine.node or "cpu", machine.cpu, f"cpu{cores}", scene))
        lines.append(_meter("", machine.memory_share, memory, scene))
    several = len({gpu.node for gpu in snapshot.gpus}) > 1
    for gpu in snapshot.gpus:
        name = f"{gpu.node}:{gpu.index}" if several else f"gpu {gpu.index}"
        lines.append(_meter(name, gpu.utilization, _gpu(gpu), scene))
    if len(lines) > height > 1:
        lines = [*lines[: height - 1], ((f"{scene.marks.ellipsis} more", "dim"),)]
    if not snapshot.gpus and len(lines) < height:
        lines.append(((snapshot.nvml or "no GPU", "dim"),))
    return [*first, *lines]


def _gpu(gpu: Gpu) -> str:
    memory = f"{units.size(gpu.memory_used)}/{units.size(gpu.memory_total)}"
    facts = [memory, units.watts(gpu.power), units.degrees(gpu.temperature)]
    facts += [*(["MIG"] if gpu.mig else []), *gpu.throttle]
    name = gpu.problem or gpu.name
    return " ".join(f"{fact:>5}" for fact in facts) + (f"  {name}" if name else "")


def _meter(name: str, share: float | None, text: str, scene: Scene) -> Line:
    """A name, a bar of how much is used, the number, and words."""
    room, marks = scene.room, scene.marks
    label = 12 if room >= 40 else 6
    bar = 20 if room >= 60 else 8 if room >= 40 else 0
    filled = 0 if share is None else round(max(0.0, min(share, 1.0)) * bar)
    drawn = marks.levels[-1] * filled + marks.dot * (bar - filled) + (" " if bar else "")
    number = f"{units.percent(share):>4} "
    left = room - label - columns(drawn) - columns(number)
    head = fit(name[-label + 1 :], label)
    return ((head, "bold"), (drawn, "bar"), (number, ""), (scene.cut(text, left), ""))

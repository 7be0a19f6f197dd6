"""What ranks do, equal ones merged; and one rank in full."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ddpdoctor.core import units
from ddpdoctor.core.ranks import bracketed
from ddpdoctor.render.lines import Line, Span, columns, labelled
from ddpdoctor.top.draw import bars
from ddpdoctor.top.draw.columns import phase_cell
from ddpdoctor.top.draw.scene import Scene
from ddpdoctor.top.snapshot import PHASES, Gpu, RankRow

_LABEL = 9
_OVER = ("dead", "ended")


@dataclass(frozen=True)
class Group:
    """Ranks that do the same."""

    ranks: tuple[int, ...]
    doing: str
    """Phase or collective, or the state where the rank does nothing."""
    site: str
    since: float | None
    """Seconds that the longest of them has been at it."""


def groups(rows: Sequence[RankRow]) -> list[Group]:
    """The groups, those of few ranks first: the odd one out is what a person looks for."""
    found: dict[tuple[str, str], list[RankRow]] = {}
    for row in rows:
        found.setdefault((doing(row), short_site(row.site)), []).append(row)
    merged = []
    for (what, site), members in found.items():
        ages = [row.since for row in members if row.since is not None and row.state not in _OVER]
        ranks = tuple(sorted(row.rank for row in members))
        merged.append(Group(ranks, what, site, max(ages, default=None)))
    return sorted(merged, key=lambda group: (len(group.ranks), group.ranks))


def doing(row: RankRow) -> str:
    """What a rank does, in a few words."""
    if row.state in _OVER:
        return row.said or row.state
    what = f"{row.phase or 'unknown'} ({row.collective})" if row.collective else row.phase
    if row.state == "debugger":
        return f"in the debugger, {what}" if what else "in the debugger"
    return what or row.state


@lru_cache(maxsize=1024)
def short_site(site: str) -> str:
    """A place in the code, relative to the working directory if it lies below it."""
    path, colon, line = site.rpartition(":")
    if not path:
        return site
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return site
    return f"{path if relative.startswith('..') else relative}{colon}{line}"


def group_line(group: Group, scene: Scene) -> Line:
    """A group in a line, in shorter words where there is no room: ranks, what, where, how long."""
    ranks = scene.cut(bracketed(group.ranks), max(scene.room // 3, 8))
    since = "" if group.since is None else f" for {units.duration(group.since)}"
    site = f" {group.site}" if group.site else ""
    name = f" {site.rpartition('/')[2].strip()}" if site else ""
    left = scene.room - columns(ranks) - 1
    text = f"{group.doing}{site}{since}"
    for shorter in (f"{group.doing}{name}{since}", f"{group.doing}{name}"):
        if columns(text) <= left:
            break
        text = shorter
    return ((f"{ranks} ", "bold"), (scene.cut(text, left), ""))


def activity(row: RankRow, processes: Sequence[str], room: int) -> list[Line]:
    """What one rank does, and the processes below it."""
    facts = [
        ("doing", doing(row)),
        ("at", short_site(row.site)),
        ("for", "" if row.since is None else units.duration(row.since)),
        ("collective", row.collective),
        ("process", "" if row.pid is None else str(row.pid)),
        *(("below it", each) for each in processes),
    ]
    return [line for label, text in facts if text for line in labelled(label, text, room, 12)]


def full(row: RankRow, scene: Scene) -> list[Line]:
    """Everything that is known of a rank, the most important first."""
    facts = [f"rank {row.rank} on {row.node or 'this node'}"]
    facts += [f"stage {row.stage}"] if row.stage else []
    facts += [f"pid {row.pid}"] if row.pid is not None else []
    facts += [f"local rank {row.local_rank}"] if row.local_rank is not None else []
    facts += [f"restart {row.restart}"] if row.restart else []
    facts += [f"epoch {row.epoch}"] if row.epoch is not None else []
    lines = [scene.rule(", ".join(facts)), *_step(row, scene)]
    port = row.debug_port
    for label, text in (
        ("now", _now(row)),
        ("memory", _memory(row)),
        ("gpu", "" if row.gpu is None else _gpu(row.gpu)),
        ("cost", "" if row.cost is None else f"ddpdoctor takes {row.cost:.2%} of its time"),
        ("debugger", "" if port is None else f"attach to port {port} (a: how)"),
        ("records", f"{row.dropped} dropped: its journal has gaps" if row.dropped else ""),
    ):
        if text:
            lines += labelled(label, text, scene.room, _LABEL)
    if row.output:
        lines += [(("last output", "dim"),), *(((f" {text}", ""),) for text in row.output)]
    return lines


def _step(row: RankRow, scene: Scene) -> list[Line]:
    """The last steps of a rank and of the median rank as bars, with a legend."""
    room = scene.room
    if row.times is None:
        return labelled("step", "no step has ended yet", room, _LABEL)
    shown = [("step", row.times)]
    if scene.snapshot.median is not None and len(scene.snapshot.ranks) > 1:
        shown.append(("median", scene.snapshot.median))
    typical = scene.snapshot.median or row.times
    longest = bars.end(max(row.times.total, typical.total))
    width = max(room - _LABEL, 4)
    lines: list[Line] = [
        ((f"{label:<{_LABEL}}", "dim"), *bars.stacked(times, width, longest, scene.marks))
        for label, times in shown
    ]
    unit = units.unit_for(longest)
    legend = [
        (f"{bars.glyph(phase, scene.marks)} {phase} {phase_cell(row.times, phase, unit)}", phase)
        for phase in PHASES
    ]
    lines += _legend(
        [*legend, (f"= {units.time_in(row.times.total, unit)} {unit.name}", "bold")], room
    )
    if not row.times.split:
        text = "~ backward includes the wait for others: it is not measured separately"
        lines += labelled("", text, room, _LABEL, "dim")
    return lines


def _legend(spans: Sequence[Span], room: int) -> list[Line]:
    """The spans in as many lines as they need."""
    lines: list[list[Span]] = [[(" " * _LABEL, "")]]
    used = _LABEL
    for text, style in spans:
        if used + columns(text) + 2 * (style != "bold") > room and len(lines[-1]) > 1:
            lines.append([(" " * _LABEL, "")])
            used = _LABEL
        lines[-1] += [(text, style), ("  ", "")]
        used += columns(text) + 2
    return [tuple(line) for line in lines]


def _now(row: RankRow) -> str:
    text = doing(row)
    if row.since is not None and row.state not in _OVER:
        text += f" for {units.duration(row.since)}"
    if row.site:
        text += f", at {short_site(row.site)}"
    if row.state in ("running", *_OVER):
        return text
    return ", ".join(part for part in (row.state, row.said, text) if part)


def _memory(row: RankRow) -> str:
    sizes: list[tuple[str, int | None]] = [
        ("allocated", row.allocated),
        ("reserved", row.reserved),
        ("peak", row.peak),
        ("device", None if row.gpu is None else row.gpu.memory_used),
        ("host", row.rss),
    ]
    facts = {name: f"{name} {units.size(value)}" for name, value in sizes if value is not None}
    if "device" in facts and row.gpu is not None and row.gpu.memory_total:
        facts["device"] += f" of {units.size(row.gpu.memory_total)}"
    return ", ".join(facts.values())


def _gpu(gpu: Gpu) -> str:
    facts = [f"{gpu.index} {gpu.name}".strip() + (" (MIG)" if gpu.mig else "")]
    if gpu.utilization is not None:
        facts.append(f"util {units.percent(gpu.utilization)}")
    if gpu.power is not None:
        limit = f" of {units.watts(gpu.power_limit)}" if gpu.power_limit else ""
        facts.append(f"{units.watts(gpu.power)}{limit}")
    if gpu.temperature is not None:
        facts.append(units.degrees(gpu.temperature))
    if gpu.clock is not None:
        most = f" of {gpu.clock_max / 1e6:.0f}" if gpu.clock_max else ""
        facts.append(f"{gpu.clock / 1e6:.0f}{most} MHz")
    facts += [f"PCIe {units.size(gpu.pcie)}/s"] if gpu.pcie is not None else []
    facts += [f"NVLink {units.size(gpu.nvlink)}/s"] if gpu.nvlink is not None else []
    facts += [f"throttled: {reason}" for reason in gpu.throttle]
    facts += [f"{gpu.ecc_errors} ECC errors"] if gpu.ecc_errors else []
    return ", ".join([*facts, gpu.problem] if gpu.problem else facts)

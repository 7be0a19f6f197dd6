"""One rank in full: its step as a bar, its memory, its GPU, what it does and what it printed."""

from __future__ import annotations

from ddpdoctor.top import bars, groups, units
from ddpdoctor.top.board import phase_cell
from ddpdoctor.top.line import Line, Span, columns, joined
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import PHASES, RankRow, Snapshot
from ddpdoctor.top.wrapping import labelled

_LABEL = 9


def draw(snapshot: Snapshot, row: RankRow, room: int, marks: Marks) -> list[Line]:
    """Everything that is known of a rank, the most important first."""
    lines: list[Line] = [_head(row, room, marks)]
    lines += _step(snapshot, row, room, marks)
    for label, text in (
        ("now", _now(row)),
        ("memory", _memory(row)),
        ("gpu", _gpu(row)),
        ("debugger", _debugger(row)),
    ):
        if text:
            lines += labelled(label, text, room, _LABEL)
    if row.dropped:
        lines += labelled("records", f"{row.dropped} dropped: its journal has gaps", room, _LABEL)
    if row.output:
        lines.append((("last output", "dim"),))
        lines += [((f" {text}", ""),) for text in row.output]
    return lines


def _head(row: RankRow, room: int, marks: Marks) -> Line:
    facts = [f"rank {row.rank} on {row.node or 'this node'}"]
    facts += [f"pid {row.pid}"] if row.pid is not None else []
    facts += [f"local rank {row.local_rank}"] if row.local_rank is not None else []
    facts += [f"restart {row.restart}"] if row.restart else []
    facts += [f"epoch {row.epoch}"] if row.epoch is not None else []
    text = f"{marks.rule * 2} {', '.join(facts)} "
    return ((text + marks.rule * max(room - columns(text), 0), "bold"),)


def _step(snapshot: Snapshot, row: RankRow, room: int, marks: Marks) -> list[Line]:
    if row.times is None:
        return labelled("step", "no step has ended yet", room, _LABEL)
    typical = snapshot.median
    longest = max(row.times.total, typical.total if typical is not None else 0.0)
    width = max(room - _LABEL, 4)
    lines: list[Line] = [
        ((f"{'step':<{_LABEL}}", "dim"), *bars.stacked(row.times, width, longest, marks))
    ]
    if typical is not None and len(snapshot.ranks) > 1:
        lines.append(
            ((f"{'median':<{_LABEL}}", "dim"), *bars.stacked(typical, width, longest, marks))
        )
    unit = units.unit_for(longest)
    legend: list[Span] = [(" " * _LABEL, "")]
    for phase in PHASES:
        cell = phase_cell(row.times, phase, unit)
        text = f"{bars.LETTERS[phase]} {phase} {cell}"
        if sum(columns(t) for t, _ in legend) + columns(text) + 2 > room and len(legend) > 1:
            lines.append(tuple(legend))
            legend = [(" " * _LABEL, "")]
        legend += [(text, phase), ("  ", "")]
    total = f"= {units.time_in(row.times.total, unit)} {unit.name}"
    if sum(columns(t) for t, _ in legend) + columns(total) > room:
        lines.append(tuple(legend))
        legend = [(" " * _LABEL, "")]
    legend.append((total, "bold"))
    lines.append(tuple(legend))
    if not row.times.split:
        lines += labelled(
            "", "~ backward includes the wait for others: not measured apart", room, _LABEL, "dim"
        )
    return lines


def _now(row: RankRow) -> str:
    text = groups.doing(row)
    if row.since is not None and row.state not in ("dead", "ended"):
        text += f" for {units.duration(row.since)}"
    if row.site:
        text += f", at {groups.short_site(row.site)}"
    if row.state not in ("running", "dead", "ended"):
        text = joined([row.state, row.said, text], ", ")
    return text


def _memory(row: RankRow) -> str:
    facts = []
    for name, value in (
        ("allocated", row.allocated),
        ("reserved", row.reserved),
        ("peak", row.peak),
    ):
        if value is not None:
            facts.append(f"{name} {units.size(value)}")
    if row.gpu is not None and row.gpu.memory_used is not None:
        whole = f" of {units.size(row.gpu.memory_total)}" if row.gpu.memory_total else ""
        facts.append(f"device {units.size(row.gpu.memory_used)}{whole}")
    if row.rss is not None:
        facts.append(f"host {units.size(row.rss)}")
    return ", ".join(facts)


def _gpu(row: RankRow) -> str:
    gpu = row.gpu
    if gpu is None:
        return ""
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
    facts += [f"throttled: {reason}" for reason in gpu.throttle]
    if gpu.ecc_errors:
        facts.append(f"{gpu.ecc_errors} ECC errors")
    if gpu.problem:
        facts.append(gpu.problem)
    return ", ".join(facts)


def _debugger(row: RankRow) -> str:
    return "" if row.debug_port is None else f"attach to port {row.debug_port} (a: how)"

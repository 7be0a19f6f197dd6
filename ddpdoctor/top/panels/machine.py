"""The machine's GPUs, processors and memory, where there is no run to show."""

from __future__ import annotations

from ddpdoctor.top import units
from ddpdoctor.top.line import Line, columns, fit, joined, shortened
from ddpdoctor.top.marks import Marks
from ddpdoctor.top.snapshot import Gpu, Snapshot

_START = "start a run: ddpdoctor run --nproc-per-node 2 -- train.py"


def draw(snapshot: Snapshot, room: int, height: int, marks: Marks) -> list[Line]:
    """A line for each GPU and for the machine."""
    lines: list[Line] = []
    machine = snapshot.machine
    if machine is not None:
        cores = "" if machine.cores is None else f" of {machine.cores} cores"
        memory = joined([units.size(machine.memory_used), units.size(machine.memory_total)], "/")
        share = None
        if machine.memory_used is not None and machine.memory_total:
            share = machine.memory_used / machine.memory_total
        lines.append(_meter(machine.node or "cpu", machine.cpu, f"cpu{cores}", room, marks))
        lines.append(_meter("", share, f"memory {memory}", room, marks))
    several = len({gpu.node for gpu in snapshot.gpus}) > 1
    for gpu in snapshot.gpus:
        name = f"{gpu.node}:{gpu.index}" if several else f"gpu {gpu.index}"
        lines.append(_meter(name, gpu.utilization, _gpu(gpu), room, marks))
    if len(lines) > height > 1:
        lines = [*lines[: height - 1], ((f"{marks.ellipsis} more", "dim"),)]
    if not snapshot.gpus and len(lines) < height:
        lines.append(((snapshot.nvml or "no GPU", "dim"),))
    return lines


def _gpu(gpu: Gpu) -> str:
    memory = f"{units.size(gpu.memory_used)}/{units.size(gpu.memory_total)}"
    facts = [memory, units.watts(gpu.power), units.degrees(gpu.temperature)]
    facts += ["MIG"] if gpu.mig else []
    facts += list(gpu.throttle)
    return joined([" ".join(f"{fact:>5}" for fact in facts), gpu.problem or gpu.name], "  ")


def _meter(name: str, share: float | None, text: str, room: int, marks: Marks) -> Line:
    """A name, a bar of how much is used, the number, and words."""
    label = 12 if room >= 40 else 6
    bar = 20 if room >= 60 else 8 if room >= 40 else 0
    head = fit(name[-label + 1 :], label)
    number = f"{units.percent(share):>4} "
    filled = 0 if share is None else round(max(0.0, min(share, 1.0)) * bar)
    drawn = marks.levels[-1] * filled + marks.dot * (bar - filled) + (" " if bar else "")
    left = max(room - label - columns(drawn) - columns(number), 0)
    return (
        (head, "bold"),
        (drawn, "bar"),
        (number, ""),
        (shortened(text, left, marks.ellipsis), ""),
    )


def invitation(room: int, marks: Marks) -> Line:
    """How a run comes to be."""
    return ((shortened(_START, room, marks.ellipsis), "dim"),)

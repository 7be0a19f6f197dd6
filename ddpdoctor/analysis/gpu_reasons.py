"""Why the GPU of a slow rank is slower than those of others, as the driver reports it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from ddpdoctor.analysis.loader_waits import Reason
from ddpdoctor.analysis.pace import BORNE_OUT
from ddpdoctor.analysis.surplus import Lag
from ddpdoctor.core import units
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.supervisor import GpusRecord, GpuState
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.system.gpu.reader import same_uuid

SLOWED = 0.9
"""Part of the others' clock, or limit, below which that of a GPU counts as lower."""

ON_DEVICE = ("forward", "backward", "optimizer")
"""The phases that a slow GPU makes longer."""


def states(run: Run) -> dict[int, GpuState]:
    """How the GPUs that ranks train on fared when they were looked at last, by rank."""
    own = {
        rank.rank: {same_uuid(record.device_uuid) for record in rank.records.of(DdpRecord)}
        for rank in run.last
    }
    for record in reversed(run.supervisor.of(GpusRecord)):
        if record.states:
            return {
                each.rank: each
                for each in record.states
                if each.restart == run.restarts[-1]
                and same_uuid(each.device_uuid) in own.get(each.rank, ())
            }
    return {}


def may_be_sharing(run: Run, lag: Lag) -> bool:
    """Whether a surplus is no more than what processes make that share the GPUs of all ranks.

    They take turns there, as processes do on too few cores.
    """
    known = states(run)
    mine = known.get(lag.rank.rank)
    if mine is None or lag.phase not in ON_DEVICE or lag.gap >= lag.own[1]:
        return False
    devices = [same_uuid(each.device_uuid) for each in known.values()]
    return all(
        each.others or devices.count(same_uuid(each.device_uuid)) > 1 for each in known.values()
    )


def gpu_reason(run: Run, lag: Lag, usual: Sequence[Rank]) -> Reason | None:
    """Why the rank's GPU is slower, if that makes up for most of its surplus."""
    pair = _compared(run, lag, usual)
    if pair is None or lag.phase not in ON_DEVICE:
        return None
    mine, theirs = pair
    if mine.others and not any(each.others for each in theirs):
        facts = _evidence(mine, theirs)
        if lag.gap <= mine.others * lag.own[1]:
            return Reason(
                f", because {units.count(mine.others, 'other process', 'other processes')} "
                f"{'uses' if mine.others == 1 else 'use'} its GPU",
                evidence=tuple(facts),
                fix=f"See who computes on GPU {mine.gpu} (nvidia-smi), and give the rank one of "
                "its own.",
            )
    clocks = [each.clock for each in theirs if each.clock]
    if not (mine.clock and clocks) or mine.clock > SLOWED * median(clocks):
        return None
    if lag.own[1] * (median(clocks) / mine.clock - 1) < BORNE_OUT * lag.gap:
        return None
    held = _held_alone(mine, theirs)
    return Reason(
        f": its GPU runs at {_ghz(mine.clock)}, those of the others at {_ghz(median(clocks))}"
        f"{f' ({held})' if held else ''}",
        evidence=tuple(_evidence(mine, theirs)),
        fix="Look at its cooling and power supply (`nvidia-smi -q -d PERFORMANCE,POWER`), and "
        f"replace GPU {mine.gpu} in the job until it is as fast as the others.",
    )


def with_gpu_facts(reason: Reason, run: Run, lag: Lag, usual: Sequence[Rank]) -> Reason:
    """The reason, and in what else the rank's GPU differs from those of the others."""
    pair = _compared(run, lag, usual)
    if pair is None:
        return reason
    facts = [each for each in _evidence(*pair) if each not in reason.evidence]
    return replace(reason, evidence=(*reason.evidence, *facts))


def _compared(run: Run, lag: Lag, usual: Sequence[Rank]) -> tuple[GpuState, list[GpuState]] | None:
    """The state of the rank's GPU, and those of the others' that are other GPUs."""
    known = states(run)
    mine = known.get(lag.rank.rank)
    if mine is None:
        return None
    found = [known[rank.rank] for rank in usual if rank.rank in known]
    theirs = [each for each in found if each.device_uuid != mine.device_uuid]
    return (mine, theirs) if theirs and len(theirs) == len(found) else None


def _evidence(mine: GpuState, theirs: Sequence[GpuState]) -> Iterator[str]:
    """In what a GPU is worse than each of the others, a sentence each."""
    gpu = f"GPU {mine.gpu}"
    most = max(each.others for each in theirs)
    if mine.others > most:
        many = units.count(mine.others, "other process", "other processes")
        yield f"{gpu} is used by {many}; the others' by {most}"
    held = _held_alone(mine, theirs)
    if held:
        yield f"{gpu} is throttled: {held}; those of the others are not"
    limits = [each.power_limit for each in theirs if each.power_limit]
    if mine.power_limit and limits and mine.power_limit < SLOWED * min(limits):
        yield (
            f"{gpu} may take {mine.power_limit:.0f} W; those of the others {median(limits):.0f} W"
        )
    yield from _links(mine, theirs)
    if mine.remapping and not any(each.remapping for each in theirs):
        yield f"{gpu} has a faulty row of memory (nvidia-smi -q -d ROW_REMAPPER)"
    if (mine.uncorrected or 0) > max(each.uncorrected or 0 for each in theirs):
        errors = units.count(mine.uncorrected or 0, "memory error")
        yield f"{gpu} had {errors} that ECC could not correct"


def _links(mine: GpuState, theirs: Sequence[GpuState]) -> Iterator[str]:
    widths = [each.width for each in theirs if each.width]
    if mine.width and widths and mine.width < min(widths):
        lanes = f"{mine.width} PCIe lanes; those of the others {round(median(widths))}"
        yield f"GPU {mine.gpu} has {lanes}"
    down = mine.links - mine.links_up
    if down > max(each.links - each.links_up for each in theirs):
        yield f"{down} of {mine.links} NVLinks of GPU {mine.gpu} are down"


def _held_alone(mine: GpuState, theirs: Sequence[GpuState]) -> str:
    """What holds its clock down, and that of none of the others."""
    return ", ".join(
        sorted({*mine.throttled} - {word for each in theirs for word in each.throttled})
    )


def _ghz(hertz: float) -> str:
    return f"{hertz / 1e9:.2f} GHz"

"""Why a rank is slow: what it does at its line, its data, its GPU, or what keeps it waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ddpdoctor.core import formatting
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.speed.pace import BORNE_OUT
from ddpdoctor.diagnose.speed.stack_samples import ADVICE, Profile, Spot, awaited, profiles, spot
from ddpdoctor.diagnose.speed.surplus import Lag, Rhythm, ordinal
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.supervisor import GpusRecord, GpuState, ProfileRequestRecord
from ddpdoctor.run.records.training import PassRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.stacks.rank_stacks import Frame
from ddpdoctor.system.nvml import same_uuid

# -- why a rank waits for its data longer than others do, where loader workers prepare them


HEAVIER = 1.5
"""How many times the CPU time of the others' a rank's loader workers take if theirs is more work
and not a machine that is crowded."""

PERSISTENT = "Keep the workers from pass to pass: DataLoader(..., persistent_workers=True)."


@dataclass(frozen=True)
class Reason:
    """Why a rank is slow."""

    words: str = ""
    """The end of the sentence."""
    location: Location | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""


def loader_workers(rank: Rank) -> int:
    """How many worker processes the loader has that a rank trained on last; 0 without any."""
    passes = reversed(rank.records.of(PassRecord))
    return next((each.workers for each in passes if each.marks), 0)


def restarted(workers: int) -> str:
    """What is said of workers that do not stay."""
    return f"the loader's {formatting.count(workers, 'worker')} start again in each pass"


def for_workers(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> Reason | None:
    """What there is to say of loader workers that a rank waits for; None if it has none.

    Args:
        lag: A rank that waits for data.
        mine: Its samples.
        others: Those of ranks that do not.
    """
    count, rhythm = loader_workers(lag.rank), lag.rhythm or Rhythm()
    children = mine.record.children if mine is not None else 0
    if not (count or children):
        return None
    facts: list[str] = []
    if mine is not None and children:
        busy, usual = mine.share("children_ran"), [each.share("children_ran") for each in others]
        fact = f"its {children} child processes, workers among them, use {busy:.0%} of a core"
        facts.append(f"{fact}; those of the others {median(usual):.0%}" if usual else fact)
    if rhythm.of_passes and count:
        facts.append(restarted(count))
        words = ": it waits for its loader workers to start"
        return Reason(words, evidence=tuple(facts), fix=PERSISTENT)
    if rhythm.period == count > 1:
        facts.append(
            f"its loader has {count} workers, and each prepares every {ordinal(count)} batch: "
            "together they fall behind"
        )
    return Reason(
        ": it waits for its loader workers",
        evidence=tuple(facts),
        fix="Share the heavy samples out among the ranks, make them lighter, or use more loader "
        "workers (num_workers) on all ranks.",
    )


def workers_crowded(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> bool:
    """Whether it waits for loader workers that are slow only for want of cores, as far as known."""
    if lag.phase != "data":
        return False
    if mine is None or not others:
        has = any(each.workers for each in lag.rank.records.of(PassRecord))
        return has and not lag.cores_idle
    if not mine.record.children:
        return False
    ran, waited = mine.a_step("children_ran"), mine.a_step("children_waited")
    heavier = ran >= HEAVIER * median(each.a_step("children_ran") for each in others)
    return waited > BORNE_OUT * ran and not heavier


# -- why the GPU of a slow rank is slower than those of others, as the driver reports it


SLOW_GPU_CLOCK = 0.9
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
                f", because {formatting.count(mine.others, 'other process', 'other processes')} "
                f"{'uses' if mine.others == 1 else 'use'} its GPU",
                evidence=tuple(facts),
                fix=f"See who computes on GPU {mine.gpu} (nvidia-smi), and give the rank one of "
                "its own.",
            )
    clocks = [each.clock for each in theirs if each.clock]
    if not (mine.clock and clocks) or mine.clock > SLOW_GPU_CLOCK * median(clocks):
        return None
    if lag.own[1] * (median(clocks) / mine.clock - 1) < BORNE_OUT * lag.gap:
        return None
    held = _held_alone(mine, theirs)
    return Reason(
        f": its GPU runs at {_gpu_ghz(mine.clock)}, "
        f"those of the others at {_gpu_ghz(median(clocks))}"
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
        many = formatting.count(mine.others, "other process", "other processes")
        yield f"{gpu} is used by {many}; the others' by {most}"
    held = _held_alone(mine, theirs)
    if held:
        yield f"{gpu} is throttled: {held}; those of the others are not"
    limits = [each.power_limit for each in theirs if each.power_limit]
    if mine.power_limit and limits and mine.power_limit < SLOW_GPU_CLOCK * min(limits):
        yield (
            f"{gpu} may take {mine.power_limit:.0f} W; those of the others {median(limits):.0f} W"
        )
    yield from _links(mine, theirs)
    if mine.remapping and not any(each.remapping for each in theirs):
        yield f"{gpu} has a faulty row of memory (nvidia-smi -q -d ROW_REMAPPER)"
    if (mine.uncorrected or 0) > max(each.uncorrected or 0 for each in theirs):
        errors = formatting.count(mine.uncorrected or 0, "memory error")
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


def _gpu_ghz(hertz: float) -> str:
    return f"{hertz / 1e9:.2f} GHz"


# -- why a rank is slow: what it does at its line, or what keeps it from running


PATIENCE = 90.0
"""Seconds that samples are waited for: 48 of them, a second apart at most, on a machine on which
each may have to wait for a core. A rank that ends writes those that it has."""

FAULT, SLOW_FAULT = 250, 2_500
"""Nanoseconds that a page fault takes: at least, and where the kernel is seen to spend them, in a
virtual machine, say, at most."""

BLOCKED = 0.5
"""In what part of the samples a thread must sleep for its line to be one that waits."""

AT_DISK = 0.25
"""The same for the disk: it is not seen in each wait that it causes."""

SLOW_CORE_CLOCK = 0.85
"""Part of the others' clock below which a rank's core counts as slow."""

READINGS = 3
"""Times that the clock of a core must have been read to say anything."""


def asked_lately(run: Run) -> bool:
    """Whether samples are on their way: all ranks take them, whichever of them seems slow."""
    asked = _asked(run)
    if not asked or run.exit_status is not None:
        return False
    newest = asked[0]
    if run.taken - newest.time >= PATIENCE * 1e9:
        return False
    found = profiles(run.last, newest.asked)
    return not all(each.rank in found or each.ended for each in run.last)


def explain(run: Run, lag: Lag, usual: Sequence[Rank]) -> Reason | None:
    """Why a rank holds the others up.

    Args:
        run: The run.
        lag: The rank.
        usual: Ranks that do not.

    Returns:
        None where nothing shows that it is more than a crowded machine.
    """
    mine, others, place = _sampled(run, lag, usual)
    if (lag.few and place is None) or may_be_sharing(run, lag):
        return None
    device = gpu_reason(run, lag, usual)
    if device is not None:
        return device
    if lag.crowded:
        return _crowded(run, lag, mine, others)
    # CPU time is what it is; but what slept on a crowded machine may have waited for others.
    works = lag.cpu >= BORNE_OUT * lag.gap
    # Loader workers wait for cores, too, which a rank's own waits do not show.
    sure = lag.calm or (lag.sure and lag.phase != "data")
    if not (works or sure or (place is not None and place.blocked("SD") >= BLOCKED)):
        return None
    if not works and workers_crowded(lag, mine, others):
        return None
    reason = _reason(run, lag, mine, others, place, works)
    return with_gpu_facts(reason, run, lag, usual)


def _sampled(
    run: Run, lag: Lag, usual: Sequence[Rank]
) -> tuple[Profile | None, list[Profile], Spot | None]:
    """Samples of a rank, those of the others, and where it is that they are not."""
    mine: Profile | None = None
    others: list[Profile] = []
    # Those that were asked for its sake come first.
    for request in sorted(_asked(run), key=lambda each: each.rank != lag.rank.rank):
        # Samples between two epochs, say, with no step among them, say nothing of steps.
        found = {
            rank: each
            for rank, each in profiles(run.last, request.asked).items()
            if each.record.steps
        }
        if lag.rank.rank not in found:
            continue
        sampled = found[lag.rank.rank]
        beside = [found[each.rank] for each in usual if each.rank in found]
        place = spot(sampled, beside, BORNE_OUT * min(lag.gap / lag.wall, 1.0))
        if place is not None:
            return sampled, beside, place
        if mine is None:
            mine, others = sampled, beside
    return mine, others, None


def _reason(
    run: Run,
    lag: Lag,
    mine: Profile | None,
    others: Sequence[Profile],
    place: Spot | None,
    works: bool,
) -> Reason:
    if mine is not None and others:
        counted = _by_counters(run, lag, mine, others, place, works)
        if counted is not None:
            return counted
    if lag.phase == "data" and not works and (found := for_workers(lag, mine, others)):
        return _placed(place, found.words, *found.evidence, fix=found.fix)
    if place is not None and not works and place.blocked("SD") >= BLOCKED:
        return _waiting(mine, others, place)
    if place is not None:
        return _placed(place, f": it runs {place.function}()" if place.function else "")
    return _elsewhere(lag, mine, others, works)


def _by_counters(
    run: Run,
    lag: Lag,
    mine: Profile,
    others: Sequence[Profile],
    place: Spot | None,
    works: bool,
) -> Reason | None:
    """What the counters of Python and of the kernel say: garbage, threads, page faults, clocks."""
    alone = place is not None and not place.others
    if _more(mine, others, "gc") >= BORNE_OUT * lag.gap:
        return _placed(
            place,
            ": Python collects garbage",
            f"Python's collector takes {shown_ms(mine.a_step('gc'))} a step, "
            f"{shown_ms(_usual(others, 'gc'))} on the others",
            fix="Make fewer objects that refer to each other in the loop, call gc.freeze() "
            "after setting up, or raise gc.set_threshold(); do so on all ranks.",
        )
    threads = mine.record.threads
    most = min(each.record.threads for each in others)
    if 0 < threads < most and not alone:
        return Reason(
            f": it computes with {threads} thread{'s' if threads > 1 else ''}, the others "
            f"with {most}",
            _location(mine.calls("set_num_threads")),
            fix="Give all ranks as many threads: torch.set_num_threads() or OMP_NUM_THREADS.",
        )
    if works and _faults(mine, others) >= BORNE_OUT * lag.gap:
        return _placed(
            place,
            ": it touches new memory" + _within(place),
            f"{mine.a_step('minor'):.0f} page faults a step, "
            f"{_usual(others, 'minor'):.0f} on the others",
            fix="Keep large buffers from step to step instead of making new ones.",
        )
    return _slow_core(run, lag, mine, others) if works and not alone else None


def _waiting(mine: Profile | None, others: Sequence[Profile], place: Spot) -> Reason:
    what = awaited(place)
    if mine is not None and place.blocked("D") >= AT_DISK:
        what = "the disk"
    if what in ("", "a file") and mine is not None and _more(mine, others, "major") >= 1:
        what = "the disk"
    if what == "sleep":
        return _placed(place, ": it sleeps" + _within(place), fix=ADVICE[what])
    words = f": it waits for {what}" if what else ": it waits"
    evidence = []
    if what in ("a file", "the disk") and mine is not None:
        disk, moved = mine.a_step("disk"), mine.a_step("characters")
        evidence.append(f"it reads and writes {_bytes(moved)} a step, {_bytes(disk)} of it on disk")
    return _placed(place, words + _within(place), *evidence, fix=ADVICE.get(what, ""))


def _slow_core(run: Run, lag: Lag, mine: Profile, others: Sequence[Profile]) -> Reason | None:
    """That its core has a lower clock, if that makes up for most of its surplus."""
    clocks = _clocks(run, mine.record.asked)
    theirs = [clocks[each.rank] for each in others if each.rank in clocks]
    if mine.rank not in clocks or not theirs:
        return None
    clock, most = clocks[mine.rank]
    usual, their_most = (median(each) for each in zip(*theirs, strict=True))
    longer = _usual(others, "ran") * (usual / clock - 1)
    if clock > SLOW_CORE_CLOCK * usual or longer < BORNE_OUT * lag.gap:
        return None
    small = most < SLOW_CORE_CLOCK * their_most
    return Reason(
        f": its CPU core runs at {_core_ghz(clock)}, those of the others at {_core_ghz(usual)}",
        None,
        (
            f"its training thread runs {shown_ms(lag.cpu)} a step longer for the same work",
            f"the most that its core can do is {_core_ghz(most)}, "
            f"that of the others {_core_ghz(their_most)}",
        ),
        "Not all cores of this machine are alike: let the ranks run on the fast ones "
        "(os.sched_setaffinity, taskset, numactl)."
        if small
        else "Look at what slows the core down: its governor (`cpupower frequency-info`), a limit "
        "on power or heat (`turbostat`, `dmesg`).",
    )


def _clocks(run: Run, asked: int) -> dict[int, tuple[int, int]]:
    """By rank: the highest clock that its core was seen to have, and the highest there is, kHz."""
    found: dict[int, tuple[int, int]] = {}
    for record in run.supervisor.of(ProfileRequestRecord):
        if record.restart == run.restarts[-1] and record.asked == asked:
            for each in record.clocks:
                if each.clock > 0 and each.readings >= READINGS:
                    found[each.rank] = each.clock, each.most
    return found


def _core_ghz(kilohertz: float) -> str:
    return f"{kilohertz / 1e6:.1f} GHz"


def _elsewhere(lag: Lag, mine: Profile | None, others: Sequence[Profile], works: bool) -> Reason:
    """No line stands out: all that the rank does takes longer, or what is not Python does."""
    if mine is None or not others:
        return Reason()
    if works:
        return Reason(
            evidence=(
                f"its training thread runs {shown_ms(lag.cpu)} a step longer, at the same lines "
                "as the others: heavier data, or a slower core",
            )
        )
    return Reason()


def _crowded(run: Run, lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> Reason:
    """Others use its core, and only its core."""
    evidence = [
        f"it waits {shown_ms(lag.cores[0])} a step for a core to run on; the others "
        f"{shown_ms(lag.cores[1])}"
    ]
    fix = (
        "See what else runs on this machine, processes that the rank started included; run fewer "
        "ranks, loader workers or threads (OMP_NUM_THREADS) than it has cores."
    )
    words = ", because other processes take its CPU core"
    location = None
    cores = mine.record.affinity if mine is not None else ()
    if mine is not None and cores and any(cores != each.record.affinity for each in others):
        numbers = f"core {cores[0]}" if len(cores) == 1 else f"{len(cores)} cores"
        words += f": it is pinned to {numbers}"
        fix = (
            "Give the rank cores that nothing else uses, its own loader workers and threads "
            "included (os.sched_setaffinity, taskset, numactl), or do not pin it."
        )
        location = _location(mine.calls("sched_setaffinity") or mine.calls("cpu_affinity"))
    evidence += _neighbours(run, lag, cores)
    return Reason(words, location, tuple(evidence), fix)


def _neighbours(run: Run, lag: Lag, cores: Sequence[int]) -> list[str]:
    """Who was seen on the cores of a rank."""
    pids = {rank.status.pid for rank in run.last if rank.status is not None}
    own = lag.rank.status.pid if lag.rank.status is not None else 0
    found: list[str] = []
    for record in run.supervisor.of(ProfileRequestRecord):
        for each in record.busy if record.restart == run.restarts[-1] else ():
            if each.pid != own and (not cores or each.core in cores) and len(found) < 3:
                who = "another rank, " if each.pid in pids else ""
                used = f"{each.share:.0%} of a core"
                found.append(f"also on its core: {who}{each.command[:120]}, {used}")
    return found


def _placed(place: Spot | None, words: str, *evidence: str, fix: str = "") -> Reason:
    """A reason with the line that was seen, if one was."""
    if place is None:
        return Reason(words, None, evidence, fix)
    frame, branch = place.frame, place.by_rank
    seen = (
        f"{place.count} of {place.of} samples of its stack ({place.count / place.of:.0%}) are "
        f"{_at(place)}; of the others' {place.others} of {place.of_others}"
    )
    facts = [seen]
    at = frame
    if branch is not None:
        at = branch
        facts.append(f"{_name(branch)} stands in a branch that the rank decides on")
        fix = "Do this on the one rank less often, in a thread, or share it out among the ranks."
    elif len(place.chain) > 1 and place.chain[-2].function != "<module>":
        facts.append(f"called at {_name(place.chain[-2])}")
    return Reason(words, _location(at), (*facts, *evidence), fix)


def _location(frame: Frame | None) -> Location | None:
    return None if frame is None else Location(frame.path, frame.line)


def _at(place: Spot) -> str:
    if place.count > place.at:
        return f"in {place.function}(), {place.at} of them at {_name(place.frame)}"
    return f"at {_name(place.frame)}{_within(place)}"


def _name(frame: Frame) -> str:
    return f"{os.path.basename(frame.path)}:{frame.line}"


def _within(place: Spot | None) -> str:
    return f" in {place.function}()" if place is not None and place.function else ""


def _usual(others: Sequence[Profile], name: str) -> float:
    return median(each.a_step(name) for each in others)


def _more(mine: Profile, others: Sequence[Profile], name: str) -> float:
    """What was counted in a step beyond what it is on the others."""
    return mine.a_step(name) - _usual(others, name)


def _faults(mine: Profile, others: Sequence[Profile]) -> float:
    """Nanoseconds a step that page faults take beyond those of the others."""
    count, kernel = _more(mine, others, "minor"), _more(mine, others, "system")
    return max(FAULT * count, min(SLOW_FAULT * count, kernel))


def _asked(run: Run) -> list[ProfileRequestRecord]:
    """Each time that samples were asked for in the last attempt, newest first."""
    return [
        record
        for record in reversed(run.supervisor.of(ProfileRequestRecord))
        if record.rank is not None and record.restart == run.restarts[-1]
    ]


def _bytes(number: float) -> str:
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return f"{number:.0f} {unit}"
        number /= 1000
    return f"{number:.1f} GB"


def shown_ms(nanoseconds: float) -> str:
    """A duration in milliseconds."""
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"

"""Find the reason why a rank is slow: its line, its data, its GPU, or its waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from ddpdoctor.core import formatting
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import brief
from ddpdoctor.diagnose.speed.lag import Lag, Rhythm, ordinal
from ddpdoctor.diagnose.speed.pace import MIN_WAITED
from ddpdoctor.diagnose.speed.stack_samples import ADVICE, Profile, Spot, awaited, profiles, spot
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.supervisor import (
    BusyProcess,
    Frame,
    GpusRecord,
    GpuState,
    ProfileRequestRecord,
)
from ddpdoctor.run.records.training import PassRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.system.nvml import same_uuid


@dataclass(frozen=True)
class Reason:
    """The reason why a rank is slow."""

    words: str = ""  # The end of the finding's message
    location: Location | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""


# -- loader workers

MIN_WORKER_FACTOR = 1.5
"""Minimum CPU time of loader workers with more work, as a factor of the others'. Below it, the
machine may be crowded."""

PERSISTENT = "Keep the workers from pass to pass: DataLoader(..., persistent_workers=True)."


def loader_workers(rank: Rank) -> int:
    """Return the number of worker processes of the last loader that a rank trained on."""
    passes = reversed(rank.records.of(PassRecord))
    return next((each.workers for each in passes if each.marks), 0)


def restarted(workers: int) -> str:
    """Explain that workers are restarted."""
    return f"the loader's {formatting.count(workers, 'worker')} start again in each pass"


def _for_workers(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> Reason | None:
    """Explain a wait for data by loader workers. None if the rank has none."""
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


def _workers_crowded(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> bool:
    """Return whether its loader workers may be slow only because they lack cores."""
    if lag.phase != "data":
        return False
    if mine is None or not others:
        has = any(each.workers for each in lag.rank.records.of(PassRecord))
        return has and not lag.cores_idle
    if not mine.record.children:
        return False
    ran, waited = mine.a_step("children_ran"), mine.a_step("children_waited")
    return MIN_WAITED * ran < waited and ran < MIN_WORKER_FACTOR * _usual(others, "children_ran")


# -- GPUs, as the driver reports them

SLOW_GPU_CLOCK = 0.9  # Maximum ratio to the others' clock or power limit to count as lower
ON_DEVICE = ("forward", "backward", "optimizer")  # The phases that a slow GPU prolongs


def _gpu_states(run: Run) -> dict[int, GpuState]:
    """Return the newest states of the GPUs that ranks train on, by rank."""
    own = {
        rank.rank: {same_uuid(record.device_uuid) for record in rank.records.of(DdpRecord)}
        for rank in run.last
    }
    record = next((each for each in reversed(run.supervisor.of(GpusRecord)) if each.states), None)
    return {
        each.rank: each
        for each in (record.states if record is not None else ())
        if each.restart == run.restarts[-1]
        and same_uuid(each.device_uuid) in own.get(each.rank, ())
    }


def _may_be_sharing(run: Run, lag: Lag) -> bool:
    """Return whether other processes, which take turns on all GPUs, may cause the surplus."""
    known = _gpu_states(run)
    mine = known.get(lag.rank.rank)
    if mine is None or lag.phase not in ON_DEVICE or lag.gap >= lag.own[1]:
        return False
    devices = [same_uuid(each.device_uuid) for each in known.values()]
    return all(
        each.others or devices.count(same_uuid(each.device_uuid)) > 1 for each in known.values()
    )


def _for_gpu(run: Run, lag: Lag, usual: Sequence[Rank]) -> Reason | None:
    """Explain most of a surplus by the rank's GPU. None if the GPU does not explain it."""
    pair = _gpus(run, lag, usual)
    if pair is None or lag.phase not in ON_DEVICE:
        return None
    mine, theirs = pair
    facts = tuple(_gpu_evidence(mine, theirs))
    shared = mine.others and not any(each.others for each in theirs)
    if shared and lag.gap <= mine.others * lag.own[1]:
        return Reason(
            f", because {formatting.count(mine.others, 'other process', 'other processes')} "
            f"{'uses' if mine.others == 1 else 'use'} its GPU",
            evidence=facts,
            fix=f"See who computes on GPU {mine.gpu} (nvidia-smi), and give the rank its own GPU.",
        )
    clocks = [each.clock for each in theirs if each.clock]
    if not (mine.clock and clocks) or mine.clock > SLOW_GPU_CLOCK * median(clocks):
        return None
    if lag.own[1] * (median(clocks) / mine.clock - 1) < MIN_WAITED * lag.gap:
        return None
    throttled = _throttled_alone(mine, theirs)
    return Reason(
        f": its GPU runs at {mine.clock / 1e9:.2f} GHz, "
        f"those of the others at {median(clocks) / 1e9:.2f} GHz"
        f"{f' ({throttled})' if throttled else ''}",
        evidence=facts,
        fix="Look at its cooling and power supply (`nvidia-smi -q -d PERFORMANCE,POWER`), and "
        f"replace GPU {mine.gpu} in the job until it is as fast as the others.",
    )


def _gpus(run: Run, lag: Lag, usual: Sequence[Rank]) -> tuple[GpuState, list[GpuState]] | None:
    """Return the states of the rank's GPU and of the others' GPUs. None if they share one."""
    known = _gpu_states(run)
    mine = known.get(lag.rank.rank)
    if mine is None:
        return None
    found = [known[rank.rank] for rank in usual if rank.rank in known]
    theirs = [each for each in found if each.device_uuid != mine.device_uuid]
    return (mine, theirs) if theirs and len(theirs) == len(found) else None


def _gpu_evidence(mine: GpuState, theirs: Sequence[GpuState]) -> Iterator[str]:
    """Yield a sentence for each property in which a GPU is worse than all others."""
    gpu = f"GPU {mine.gpu}"
    most = max(each.others for each in theirs)
    if mine.others > most:
        many = formatting.count(mine.others, "other process", "other processes")
        yield f"{gpu} is used by {many}; the others' by {most}"
    throttled = _throttled_alone(mine, theirs)
    if throttled:
        yield f"{gpu} is throttled: {throttled}; those of the others are not"
    limits = [each.power_limit for each in theirs if each.power_limit]
    if mine.power_limit and limits and mine.power_limit < SLOW_GPU_CLOCK * min(limits):
        theirs_may = f"those of the others to {median(limits):.0f} W"
        yield f"{gpu} is limited to {mine.power_limit:.0f} W; {theirs_may}"
    yield from _link_evidence(mine, theirs)
    if mine.remapping and not any(each.remapping for each in theirs):
        yield f"{gpu} has a faulty row of memory (nvidia-smi -q -d ROW_REMAPPER)"
    if (mine.uncorrected or 0) > max(each.uncorrected or 0 for each in theirs):
        errors = formatting.count(mine.uncorrected or 0, "memory error")
        yield f"{gpu} had {errors} that ECC could not correct"


def _link_evidence(mine: GpuState, theirs: Sequence[GpuState]) -> Iterator[str]:
    widths = [each.width for each in theirs if each.width]
    if mine.width and widths and mine.width < min(widths):
        lanes = f"{mine.width} PCIe lanes; those of the others {round(median(widths))}"
        yield f"GPU {mine.gpu} has {lanes}"
    down = mine.links - mine.links_up
    if down > max(each.links - each.links_up for each in theirs):
        yield f"{down} of {mine.links} NVLinks of GPU {mine.gpu} are down"


def _throttled_alone(mine: GpuState, theirs: Sequence[GpuState]) -> str:
    """Return the reason for which a GPU is throttled and the others are not. Empty if none."""
    others = {word for each in theirs for word in each.throttled}
    return ", ".join(sorted({*mine.throttled} - others))


# -- samples of stacks, and the counters of Python and of the kernel

PATIENCE = 90.0
"""Seconds to wait for samples: 48 of them, at most a second apart, and each may have to wait for a
core. A rank that ends writes those that it has."""
FAULT, SLOW_FAULT = 250, 2_500
"""Nanoseconds of a page fault: the minimum, and the maximum if kernel time shows it, as in a
virtual machine."""
MIN_BLOCKED = 0.5  # Minimum fraction of samples in which a thread sleeps at a waiting line
MIN_AT_DISK = 0.25  # The same for waits for the disk, which not every sample shows
SLOW_CORE_CLOCK = 0.85  # Maximum clock of a slow core, relative to the others'
MIN_CORE_TAKEN = 0.25  # Minimum use of a core by a process that takes it from a rank
MIN_READINGS = 3  # Minimum number of readings of a core's clock


_SHARE = "Do this on the one rank less often, in a thread, or share it out among the ranks."
_LONGER = (
    "See why this line takes longer on this rank: larger inputs, more rounds, a slower device."
)


def asked_lately(run: Run) -> bool:
    """Return whether samples will arrive. All ranks take them, whichever seems slow."""
    asked = _requests(run)
    if not asked or run.exit_status is not None:
        return False
    newest = asked[0]
    if run.taken - newest.time >= PATIENCE * 1e9:
        return False
    found = profiles(run.last, newest.asked)
    return not all(each.rank in found or each.ended for each in run.last)


def explain(run: Run, lag: Lag, usual: Sequence[Rank]) -> Reason | None:
    """Explain why a rank holds the ``usual`` ones up. None if the machine may just be crowded."""
    mine, others, place = _sampled(run, lag, usual)
    if (lag.few and place is None) or _may_be_sharing(run, lag):
        return None
    device = _for_gpu(run, lag, usual)
    if device is not None:
        return device
    if lag.crowded:
        return _for_crowded_core(run, lag, mine, others)
    # CPU time is certain. But a thread that slept on a crowded machine may have waited for others,
    # and loader workers also wait for cores, which the rank's own waits do not show.
    works = lag.cpu >= MIN_WAITED * lag.gap
    sure = lag.calm or (lag.sure and lag.phase != "data")
    if not (works or sure or (place is not None and place.blocked("SD") >= MIN_BLOCKED)):
        return None
    if not works and _workers_crowded(lag, mine, others):
        return None
    if works and _allocators_differ(lag, mine, others, place):
        return None
    reason = _reason(run, lag, mine, others, place, works)
    pair = _gpus(run, lag, usual)
    facts = _gpu_evidence(*pair) if pair is not None else ()
    new = [each for each in facts if each not in reason.evidence]
    return replace(reason, evidence=(*reason.evidence, *new))


def _sampled(
    run: Run, lag: Lag, usual: Sequence[Rank]
) -> tuple[Profile | None, list[Profile], Spot | None]:
    """Return samples of a rank, those of the others, and the line with the rank's surplus."""
    mine: Profile | None = None
    others: list[Profile] = []
    # Prefer samples that were taken because of this rank.
    for request in sorted(_requests(run), key=lambda each: each.rank != lag.rank.rank):
        # Samples from between two epochs, without a step, do not describe steps.
        found = {
            rank: each
            for rank, each in profiles(run.last, request.asked).items()
            if each.record.steps
        }
        if lag.rank.rank not in found:
            continue
        sampled = found[lag.rank.rank]
        beside = [found[each.rank] for each in usual if each.rank in found]
        place = spot(sampled, beside, MIN_WAITED * min(lag.gap / lag.wall, 1.0))
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
        counted = _for_counters(run, lag, mine, others, place, works)
        if counted is not None:
            return counted
    if lag.phase == "data" and not works and (found := _for_workers(lag, mine, others)):
        return _placed(place, found.words, *found.evidence, fix=found.fix)
    if place is not None and not works and place.blocked("SD") >= MIN_BLOCKED:
        return _for_wait(mine, others, place)
    if place is not None:
        fix = _LONGER if place.others else _SHARE
        words = f": it runs {place.function}()" if place.function else ""
        return _placed(place, words, fix="" if lag.phase == "data" else fix)
    if mine is None or not others or not works:
        return Reason()
    # No line stands out: all lines take longer, or code outside of Python does.
    fact = (
        f"its training thread runs {shown_ms(lag.cpu)} a step longer, at the same lines "
        "as the others: heavier data, or a slower core"
    )
    return Reason(evidence=(fact,))


def _for_counters(
    run: Run, lag: Lag, mine: Profile, others: Sequence[Profile], place: Spot | None, works: bool
) -> Reason | None:
    """Explain a surplus by garbage collection, threads, page faults or the core's clock."""
    if _more(mine, others, "gc") >= MIN_WAITED * lag.gap:
        return _placed(
            place,
            ": Python collects garbage",
            f"Python's collector takes {shown_ms(mine.a_step('gc'))} a step, "
            f"{shown_ms(_usual(others, 'gc'))} on the others",
            fix="Create fewer objects that refer to each other in the loop, call gc.freeze() "
            "after setting up, or raise gc.set_threshold(); do so on all ranks.",
        )
    alone = place is not None and not place.others
    threads = mine.record.threads
    most = min(each.record.threads for each in others)
    if 0 < threads < most and not alone:
        return Reason(
            f": it computes with {formatting.count(threads, 'thread')}, the others with {most}",
            _location(mine.calls("set_num_threads")),
            fix="Give all ranks as many threads: torch.set_num_threads() or OMP_NUM_THREADS.",
        )
    if works and _allocates(lag, mine, others):
        return _placed(
            place,
            ": it touches new memory" + _within(place),
            f"{mine.a_step('minor'):.0f} page faults a step, "
            f"{_usual(others, 'minor'):.0f} on the others",
            fix="Keep large buffers from step to step instead of allocating new ones.",
        )
    return _for_slow_core(run, lag, mine, others) if works and not alone else None


def _allocators_differ(
    lag: Lag, mine: Profile | None, others: Sequence[Profile], place: Spot | None
) -> bool:
    """Return whether page faults of code that all ranks run explain a surplus.

    One rank's allocator returns its memory to the kernel, and those of the others keep theirs. On a
    crowded machine, this varies.
    """
    alone = place is not None and not place.others
    return not (lag.calm or alone) and _allocates(lag, mine, others)


def _allocates(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> bool:
    """Return whether page faults explain a surplus."""
    if mine is None or not others:
        return False
    faults, kernel = _more(mine, others, "minor"), _more(mine, others, "system")
    longer = max(FAULT * faults, min(SLOW_FAULT * faults, kernel))
    return longer >= MIN_WAITED * lag.gap


def _for_wait(mine: Profile | None, others: Sequence[Profile], place: Spot) -> Reason:
    """Explain a surplus by the wait of its line."""
    what = awaited(place)
    if mine is not None and place.blocked("D") >= MIN_AT_DISK:
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


def _for_slow_core(run: Run, lag: Lag, mine: Profile, others: Sequence[Profile]) -> Reason | None:
    """Explain most of a surplus by a lower clock of the core. None if it does not explain it."""
    # By rank, in kHz: the highest clock read from its core, and the highest possible one.
    clocks = {
        each.rank: (each.clock, each.most)
        for record in run.supervisor.of(ProfileRequestRecord)
        if record.restart == run.restarts[-1] and record.asked == mine.record.asked
        for each in record.clocks
        if each.clock > 0 and each.readings >= MIN_READINGS
    }
    theirs = [clocks[each.rank] for each in others if each.rank in clocks]
    if mine.rank not in clocks or not theirs:
        return None
    clock, most = clocks[mine.rank]
    usual, their_most = (median(each) for each in zip(*theirs, strict=True))
    longer = _usual(others, "ran") * (usual / clock - 1)
    if clock > SLOW_CORE_CLOCK * usual or longer < MIN_WAITED * lag.gap:
        return None
    return Reason(
        f": its CPU core runs at {_ghz(clock)}, those of the others at {_ghz(usual)}",
        None,
        (
            f"its training thread runs {shown_ms(lag.cpu)} a step longer for the same work",
            f"the most that its core can do is {_ghz(most)}, that of the others {_ghz(their_most)}",
        ),
        "Not all cores of this machine are alike: let the ranks run on the fast ones "
        "(os.sched_setaffinity, taskset, numactl)."
        if most < SLOW_CORE_CLOCK * their_most
        else "Look at what slows the core down: its governor (`cpupower frequency-info`), a limit "
        "on power or heat (`turbostat`, `dmesg`).",
    )


def _ghz(kilohertz: float) -> str:
    return f"{kilohertz / 1e6:.1f} GHz"


def _for_crowded_core(
    run: Run, lag: Lag, mine: Profile | None, others: Sequence[Profile]
) -> Reason | None:
    """Explain a surplus by known processes that use the rank's core, and only this core."""
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
    pinned = bool(cores) and any(cores != each.record.affinity for each in others)
    if mine is not None and pinned:
        numbers = f"core {cores[0]}" if len(cores) == 1 else f"{len(cores)} cores"
        words += f": it is pinned to {numbers}"
        fix = (
            "Give the rank cores that nothing else uses, not even its own loader workers and "
            "threads (os.sched_setaffinity, taskset, numactl), or do not pin it."
        )
        location = _location(mine.calls("sched_setaffinity") or mine.calls("cpu_affinity"))
    busy = _busy_processes(run, lag.rank)
    if not pinned and max((each.share for each in busy), default=0.0) < MIN_CORE_TAKEN:
        return None
    pids = {rank.status.pid for rank in run.last if rank.status is not None}
    beside = [
        f"also on its core: {'another rank, ' if each.pid in pids else ''}{each.command[:120]}, "
        f"{each.share:.0%} of a core"
        for each in busy
        if not cores or each.core in cores
    ]
    return Reason(words, location, (*evidence, *beside[:3]), fix)


def _busy_processes(run: Run, rank: Rank) -> list[BusyProcess]:
    """Return the other processes that used the machine while stacks were sampled."""
    own = rank.status.pid if rank.status is not None else 0
    return [
        each
        for record in run.supervisor.of(ProfileRequestRecord)
        if record.restart == run.restarts[-1]
        for each in record.busy
        if each.pid != own
    ]


def _placed(place: Spot | None, words: str, *evidence: str, fix: str = "") -> Reason:
    """Return a reason with the line of the surplus, if there is one."""
    if place is None:
        return Reason(words, None, evidence, fix)
    at, branch = _location(place.frame), place.by_rank
    where = f"at {brief(at)}{_within(place)}"
    if place.count > place.at:
        where = f"in {place.function}(), {place.at} of them at {brief(at)}"
    facts = [
        f"{place.count} of {place.of} samples of its stack ({place.count / place.of:.0%}) are "
        f"{where}; of the others' {place.others} of {place.of_others}"
    ]
    if branch is not None:
        at = _location(branch)
        facts.append(f"{brief(at)} is in a branch that depends on the rank")
        fix = _SHARE
    elif len(place.chain) > 1 and place.chain[-2].function != "<module>":
        facts.append(f"called at {brief(_location(place.chain[-2]))}")
    return Reason(words, at, (*facts, *evidence), fix)


def _location(frame: Frame | None) -> Location | None:
    return None if frame is None else Location(frame.path, frame.line)


def _within(place: Spot | None) -> str:
    return f" in {place.function}()" if place is not None and place.function else ""


def _usual(others: Sequence[Profile], name: str) -> float:
    return median(each.a_step(name) for each in others)


def _more(mine: Profile, others: Sequence[Profile], name: str) -> float:
    """Return the excess of a counter's mean over steps beyond that of the others."""
    return mine.a_step(name) - _usual(others, name)


def _requests(run: Run) -> list[ProfileRequestRecord]:
    """Return the requests for samples in the last attempt, newest first."""
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
    """Format a duration in milliseconds."""
    milliseconds = nanoseconds / 1e6
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.1f} ms"

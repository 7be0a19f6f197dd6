"""Why a rank is slow: what it does at its line, or what keeps it from running."""

from __future__ import annotations

import os
from collections.abc import Sequence
from statistics import median

from ddpdoctor.analysis.awaited import ADVICE, awaited
from ddpdoctor.analysis.gpu_reasons import gpu_reason, may_be_sharing, with_gpu_facts
from ddpdoctor.analysis.loader_waits import Reason, for_workers, workers_crowded
from ddpdoctor.analysis.pace import BORNE_OUT
from ddpdoctor.analysis.profiles import Profile, Spot, profiles, spot
from ddpdoctor.analysis.surplus import Lag
from ddpdoctor.core.finding import Location
from ddpdoctor.run.records.supervisor import ProfileRequestRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.stacks.model import Frame

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

SLOWED = 0.85
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
    if clock > SLOWED * usual or longer < BORNE_OUT * lag.gap:
        return None
    small = most < SLOWED * their_most
    return Reason(
        f": its CPU core runs at {_ghz(clock)}, those of the others at {_ghz(usual)}",
        None,
        (
            f"its training thread runs {shown_ms(lag.cpu)} a step longer for the same work",
            f"the most that its core can do is {_ghz(most)}, that of the others {_ghz(their_most)}",
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


def _ghz(kilohertz: float) -> str:
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

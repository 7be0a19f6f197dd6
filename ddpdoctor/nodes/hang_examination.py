"""Examine ranks that may be stuck, from outside: stacks, rings, activity and Flight Recorders.

An examination runs in its own thread and takes at most a few seconds, whatever the ranks do.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.diagnose.collectives.recorded_calls import first_pending, from_flight
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.diagnose.hangs.process_activity import with_steadiness
from ddpdoctor.nodes import asking
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import namespace, rank_stem
from ddpdoctor.run.records.supervisor import (
    FlightAnswer,
    FlightCall,
    ProcessActivity,
    ProcessExit,
    ProcessState,
    RankEvidence,
    RankStacks,
)
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.ring import read_ring
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import read_status
from ddpdoctor.stacks import capture as capture_module
from ddpdoctor.stacks.capture import capture
from ddpdoctor.system import process_activity
from ddpdoctor.system.proc import pause
from ddpdoctor.system.process_activity import CpuTimes, read_cpu_times

COMPARED_SECONDS = 1.0  # Seconds between two readings of CPU time and bytes

STACKS_TIMEOUT = 3.0
"""Seconds to wait for stacks, and, `COMPARED_SECONDS` later, for the Flight Recorders' answers."""

MAX_CALLS = 24  # Number of collectives of a ring to keep

PHASES = ("data", "forward", "backward", "optimizer")
"""Phases whose lines are kept, because they describe the work of a GPU."""

MAX_FRAMES = 48  # Number of innermost frames of a main thread to keep

MAX_OTHER_FRAMES = 8  # The same for any other thread

MAX_THREADS = 24
MAX_WORKERS = 4  # Maximum number of DataLoader workers of a rank whose stacks are captured

MAX_SUSPECTS = 16  # Maximum ranks whose stacks are captured twice, to tell a loop from a wait


class Seen(NamedTuple):
    """The last sample of a process."""

    pid: int
    when: float  # Monotonic seconds
    sample: process_activity.Sample


def examine(
    run: Run,
    number: int,
    waiting: Collection[int],
    before: Mapping[int, RankEvidence],
    seen: dict[int, Seen],
    launcher: int | None = None,
    lost: Mapping[int, float] = {},
) -> list[RankEvidence]:
    """Gather the evidence about each rank of this host.

    Args:
        run: A snapshot of the run.
        number: The number of the examination, which the answers of Flight Recorders name.
        waiting: Ranks that are in a collective and only wait.
        before: The evidence of the previous examination.
        seen: The samples of the ranks' processes then. Updated to the current ones.
        launcher: The pid of the job's command.
        lost: The seconds of its silence in which each rank had no core.
    """
    here = namespace()
    local = [rank for rank in run.last if rank.opened.namespace in (None, here)]
    looked = _look(run, local, waiting, launcher)
    found = {rank.rank: _of_rank(run, rank) for rank in run.last}
    # Ranks that answered late because they lacked a core get the same time again.
    least = time.monotonic() - STACKS_TIMEOUT / 2
    deadline = max(looked.began + COMPARED_SECONDS, least) + STACKS_TIMEOUT
    asked = [rank for rank in local if rank.exit is None]
    answers = flights(run, asked, number, deadline)
    kept = around({each: answers[each].entries or () for each in answers})
    for rank_number, answer in answers.items():
        found[rank_number] = replace(
            found[rank_number],
            flight=kept[rank_number] if answer.entries else answer.entries,
            flight_trouble=answer.trouble,
            device=answer.device,
            sends=any(each.point_to_point and not each.done for each in answer.entries or ()),
        )
    for rank_number, stacks in looked.stacks.items():
        unjoined = RankEvidence(rank=rank_number, restart=stacks.restart)
        each = found.get(rank_number, unjoined)
        known = before.get(rank_number)
        shown = _shortened(stacks)
        if not stacks.threads and known is not None and known.since == each.since and known.stacks:
            # The rank has not moved, so its earlier stack is still valid.
            shown = replace(shown, threads=known.stacks.threads)
        later = looked.later.get(rank_number)
        found[rank_number] = replace(
            each,
            pid=stacks.pid,
            stacks=shown,
            later=_shortened(later, 1) if later is not None else None,
            workers=_twice(looked.workers.get(rank_number, [])),
        )
    _watch(found, looked, before, seen, launcher, lost)
    return [found[each] for each in sorted(found)]


def of_other_nodes(run: Run, number: int) -> Callable[[], dict[int, RankEvidence]]:
    """Ask the other nodes for the evidence about their ranks.

    Returns:
        A function that waits for the evidence, and returns it by rank.
    """
    found: dict[int, RankEvidence] = {}

    def ask() -> None:
        # A node needs as long as this one, and the link takes more time.
        seconds = COMPARED_SECONDS + 3 * STACKS_TIMEOUT
        for answer in asking.ask(run.path, "examine", {"number": number}, seconds):
            for each in answer.found if isinstance(answer.found, list) else ():
                if isinstance(each, dict):
                    evidence = decoder(RankEvidence)(each)
                    found[evidence.rank] = evidence

    thread = threading.Thread(target=ask, name="ddpdoctor-ask", daemon=True)
    thread.start()

    def wait() -> dict[int, RankEvidence]:
        thread.join()
        here = {rank.rank for rank in run.last if not rank.elsewhere}
        return {rank: each for rank, each in found.items() if rank not in here}

    return wait


def _watch(
    found: dict[int, RankEvidence],
    looked: _Looked,
    before: Mapping[int, RankEvidence],
    seen: dict[int, Seen],
    launcher: int | None,
    lost: Mapping[int, float],
) -> None:
    """Add the activity of the processes since they were sampled, and whether it repeats."""
    now = time.monotonic()
    works = process_activity.works(
        looked.launcher, read_cpu_times(launcher or 0), now - looked.began
    )
    for rank_number, each in found.items():
        known = before.get(rank_number)
        activity = None
        if rank_number in looked.samples and each.pid:
            after = process_activity.sample(each.pid)
            activity = process_activity.compared(
                looked.samples[rank_number], after, now - looked.began
            )
            # Activity before the rank last moved is not activity in its silence.
            silent = known is not None and known.since == each.since
            last = seen.get(rank_number) if silent else None
            activity = _since(activity, last, each.pid, after, now)
            seen[rank_number] = Seen(each.pid, now, after)
        each = replace(
            each, launcher_works=works, activity=activity, lost=round(lost.get(rank_number, 0.0), 1)
        )
        earlier = RankState(known, 0) if known is not None else None
        found[rank_number] = with_steadiness(RankState(each, time.time_ns()), earlier)


class _Looked(NamedTuple):
    """Observations of the processes, by rank."""

    began: float
    launcher: CpuTimes
    samples: dict[int, process_activity.Sample]
    stacks: dict[int, RankStacks]
    later: dict[int, RankStacks]  # The second stacks of ranks that do not wait for others
    workers: dict[int, list[RankStacks]]


def _look(
    run: Run, local: Iterable[Rank], waiting: Collection[int], launcher: int | None
) -> _Looked:
    """Watch the processes of this host's ranks for at least a second."""
    began = time.monotonic()
    samples = {
        rank.rank: process_activity.sample(rank.status.pid)
        for rank in local
        if rank.status is not None
    }
    turns = read_cpu_times(launcher or 0)
    stacks = {each.rank: each for each in capture(run, patience=STACKS_TIMEOUT)}
    for each in stacks.values():
        if each.state.letter:
            # This process is not yet a rank. On another host its pid belongs to another process.
            samples.setdefault(each.rank, process_activity.sample(each.pid))
    pause(max(0.0, began + COMPARED_SECONDS - time.monotonic()))
    # A rank that has just not answered would cost the timeout once more.
    answered = [rank for rank, each in stacks.items() if each.threads and not each.note]
    suspects = [rank for rank in answered if rank not in waiting and not stacks[rank].gil_held]
    workers = {rank: _workers(stacks[rank]) for rank in answered}
    again = capture(run, suspects[:MAX_SUSPECTS], STACKS_TIMEOUT) if suspects else ()
    return _Looked(began, turns, samples, stacks, {each.rank: each for each in again}, workers)


def look_again(
    run: Run, evidence: MutableMapping[int, RankEvidence], seen: dict[int, Seen]
) -> None:
    """Update evidence and processes with a new snapshot, without sending requests to ranks."""
    for rank in run.last:
        if rank.rank in evidence:
            evidence[rank.rank] = _of_rank(run, rank, evidence[rank.rank])
    for number, before in list(seen.items()):
        if number not in evidence or evidence[number].pid != before.pid:
            continue
        now, after = time.monotonic(), process_activity.sample(before.pid)
        seconds = max(now - before.when, 0.001)
        activity = process_activity.compared(before.sample, after, seconds)
        activity = _since(activity, before, before.pid, after, now)
        # The rank got no request meanwhile, so all writes are its own.
        wrote = max(0, after.written - before.sample.written)
        activity = replace(activity, wrote=wrote)
        evidence[number] = replace(evidence[number], activity=activity)
        seen[number] = Seen(before.pid, now, after)


def _since(
    activity: ProcessActivity,
    before: Seen | None,
    pid: int,
    after: process_activity.Sample,
    now: float,
) -> ProcessActivity:
    """Add the activity of the main threads of a process and its children since ``before``."""
    if before is None or before.pid != pid or now <= before.when:
        return activity
    own, below = process_activity.main_cpu(before.sample, after, pid)
    seconds = now - before.when
    return replace(
        activity, since_cpu=round(own / seconds, 4), since_children_cpu=round(below / seconds, 4)
    )


def _workers(stacks: RankStacks) -> list[RankStacks]:
    """Return py-spy's stacks of the loader workers that a rank waits for, if it is installed."""
    main = stacks.main
    waits = main is not None and any(
        "torch/utils/data/dataloader.py" in frame.path and "get_data" in frame.function
        for frame in main.frames
    )
    if not waits or capture_module.find_py_spy() is None:
        return []
    children = [
        RankStacks(stacks.rank, stacks.restart, each.pid, stacks.host, state=ProcessState("S"))
        for each in stacks.state.children[:MAX_WORKERS]
        if "resource_tracker" not in each.command
    ]
    return capture_module.read_silent(children, STACKS_TIMEOUT)


def _twice(workers: list[RankStacks]) -> tuple[tuple[RankStacks, ...], ...]:
    """Pair the stacks of workers with their current ones."""
    blank = [replace(each, threads=()) for each in workers]
    now = capture_module.read_silent(blank, STACKS_TIMEOUT) if blank else []
    return tuple(
        tuple(_shortened(each, 1) for each in pair if each.threads)
        for pair in zip(workers, now, strict=True)
    )


def add_native(
    evidence: MutableMapping[int, RankEvidence],
    ranks: Collection[int],
    known: dict[int, RankStacks],
) -> None:
    """Add native frames to the stacks of some ranks. Each rank is paused for a second or two.

    A rank that has not moved since its ``known`` stack was captured is not paused again.
    """
    stacked = []
    for number, each in evidence.items():
        stacks, before = each.stacks, known.get(number)
        if number not in ranks or stacks is None:
            continue
        if before is not None and (before.pid, before.threads) == (stacks.pid, stacks.threads):
            stacks = replace(stacks, native=before.native, note=before.note)
            evidence[number] = replace(each, stacks=stacks)
        else:
            stacked.append(stacks)
    for found in capture_module.add_native(stacked, STACKS_TIMEOUT):
        known[found.rank] = found
        evidence[found.rank] = replace(evidence[found.rank], stacks=found)


def _of_rank(run: Run, rank: Rank, known: RankEvidence | None = None) -> RankEvidence:
    """Read the status page and the ring of a rank into its evidence."""
    found = known or RankEvidence(rank=rank.rank, restart=rank.restart)
    status = rank.status
    # Read the page again, because the snapshot is some seconds old.
    with contextlib.suppress(OSError, UnreadableError):
        status = read_status(str(run.path / f"{rank_stem(rank.rank, rank.restart)}.status"))
    now = time.time_ns()
    if rank.exit is not None:
        found = replace(found, exit=ProcessExit(time=rank.exit.time, status=rank.exit.status))
    if rank.ended is not None:
        found = replace(found, ended=True)
    if status is None:
        return found
    found = replace(
        found,
        pid=status.pid,
        host=rank.opened.host,
        backend=rank.opened.backend,
        world_size=status.world_size,
        phase=status.phase.label,
        since=status.since,
        step=status.step,
        armed=status.armed,
        reduced=status.reduced,
        collective=status.collective,
        site=status.site,
        sites={each: str(at) for each in PHASES if (at := rank.site(each)) is not None},
        silent=now - status.beat if status.beat is not None else None,
    )
    with contextlib.suppress(OSError, UnreadableError):
        if rank.ring_file is not None:
            ring = read_ring(str(rank.ring_file), MAX_CALLS)
            found = replace(found, waited=ring.waited, collectives=ring.collectives)
    return found


def _shortened(stacks: RankStacks, threads: int = MAX_THREADS) -> RankStacks:
    """Return stacks with only the frames that matter."""
    main = stacks.main
    kept = [replace(main, frames=main.frames[-MAX_FRAMES:])] if main is not None else []
    others = [thread for thread in stacks.threads if thread is not main]
    kept += [
        replace(thread, frames=thread.frames[-MAX_OTHER_FRAMES:])
        for thread in others[: threads - 1]
    ]
    return replace(stacks, threads=tuple(kept))


# -- Flight Recorders

CALLS_BEFORE, CALLS_AFTER = 24, 8
"""Number of a group's calls to keep before and after the first one that is not done everywhere."""

NEWEST_ENTRIES = 24  # Number of newest calls of a group to keep in any case

_NO_ANSWER = FlightAnswer(trouble="did not answer")


def flights(
    run: Run, ranks: Iterable[Rank], number: int, deadline: float
) -> dict[int, FlightAnswer]:
    """Wait until a monotonic deadline for live ranks of this host to write Flight Recorders."""
    found: dict[int, FlightAnswer] = {}
    paths = {
        rank.rank: run.path / f"{rank_stem(rank.rank, rank.restart)}.flight.json" for rank in ranks
    }
    while True:
        for rank, path in paths.items():
            if rank not in found:
                with contextlib.suppress(OSError, ValueError):
                    answer = opening.json_object(path, opening.MOST_RECORD)
                    read = decoder(FlightAnswer)(answer)
                    if read.asked >= number:
                        found[rank] = read
        if len(found) == len(paths) or time.monotonic() >= deadline:
            break
        pause(0.05)
    return {rank: found.get(rank, _NO_ANSWER) for rank in paths}


def around(recorded: Mapping[int, Sequence[FlightCall]]) -> dict[int, tuple[FlightCall, ...]]:
    """Keep each group's newest calls, and those around the first that is not done everywhere.

    A rank that skipped a call continues for dozens of calls, until its device's queue is full. The
    other ranks may not have reached its newest calls.
    """
    groups: dict[int, dict[tuple[str, str], list[FlightCall]]] = {}
    first: dict[tuple[str, str], int] = {}
    for rank, entries in recorded.items():
        # Each backend of a group numbers its own calls.
        by_numbering = groups.setdefault(rank, defaultdict(list))
        for each in entries:
            if not each.point_to_point:
                by_numbering[each.group, each.backend].append(each)
        for numbering, calls in by_numbering.items():
            pending = first_pending([from_flight(each) for each in calls])
            if pending is not None:
                first[numbering] = min(pending.sequence, first.get(numbering, pending.sequence))
    return {
        rank: tuple(
            each
            for numbering, calls in by_numbering.items()
            for each in _kept(calls, first.get(numbering))
        )
        for rank, by_numbering in groups.items()
    }


def _kept(calls: list[FlightCall], first: int | None) -> list[FlightCall]:
    older, newest = calls[:-NEWEST_ENTRIES], calls[-NEWEST_ENTRIES:]
    if first is None:
        return newest
    wanted = range(first - CALLS_BEFORE, first + CALLS_AFTER)
    return [*(each for each in older if each.sequence in wanted), *newest]

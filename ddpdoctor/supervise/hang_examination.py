"""Examine ranks that may be stuck, from outside: stacks, rings, activity and Flight Recorders.

Runs in its own thread and takes a few seconds at most, whatever the ranks do.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.diagnose.collectives.recorded_calls import first_pending, from_flight
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.diagnose.hangs.process_activity import steadiness
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import namespace, rank_stem
from ddpdoctor.run.records.base import JsonObject, as_json
from ddpdoctor.run.ring import read_ring
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import read_status
from ddpdoctor.stacks import capture as capture_module
from ddpdoctor.stacks.capture import capture
from ddpdoctor.stacks.rank_stacks import RankStacks, Thread, from_record, to_record
from ddpdoctor.system import process_activity
from ddpdoctor.system.proc import pause
from ddpdoctor.system.process_activity import ProcessState, Turns, read_turns

# -- what the Flight Recorders of the ranks hold: of each group the calls around what hangs


BEFORE, BEHIND = 24, 8
"""Calls of a group that are kept before and behind the first one that some rank has not done."""

NEWEST_ENTRIES = 24
"""Calls of a group that are kept in any case."""


def flights(run: Run, ranks: Iterable[Rank], number: int, deadline: float) -> dict[int, JsonObject]:
    """What the Flight Recorders hold, as far as they answer in time.

    Args:
        run: A snapshot of the run.
        ranks: The ranks of this host.
        number: What they were asked with.
        deadline: Monotonic seconds.
    """
    found: dict[int, JsonObject] = {}
    open_ = [rank for rank in ranks if rank.exit is None]
    while True:
        for rank in list(open_):
            answer = _read(run.path / f"{rank_stem(rank.rank, rank.restart)}.flight.json")
            if answer is not None and integer(answer, "asked") >= number:
                found[rank.rank] = {
                    "flight": answer.get("entries"),
                    "flight_trouble": answer.get("trouble", ""),
                    "device": answer.get("device"),
                    "sends": any(map(_sends, answer.get("entries") or ())),
                }
                open_.remove(rank)
        if not open_ or time.monotonic() >= deadline:
            break
        pause(0.05)
    for rank in open_:
        found[rank.rank] = {"flight": None, "flight_trouble": "did not answer"}
    answered = {rank: each["flight"] for rank, each in found.items() if each["flight"]}
    for number, entries in around(answered).items():
        found[number]["flight"] = entries
    return found


def _read(path: Path) -> JsonObject | None:
    with contextlib.suppress(OSError, ValueError):
        return opening.json_object(path, opening.MOST_RECORD)
    return None


def _sends(entry: JsonObject) -> bool:
    """Whether it is a send or a receive that is not done."""
    done = entry.get("retired") or entry.get("state") == "completed"
    return bool(entry.get("point_to_point")) and not done


_Numbering = tuple[str, str]
"""A group and its backend, each of which counts for itself."""


def around(recorded: Mapping[int, list[JsonObject]]) -> dict[int, list[JsonObject]]:
    """The calls around the first one of each group that some rank has not done, and the newest.

    A rank that skipped a call goes on as far as its device's queue reaches, dozens of calls: among
    its newest ones there may be none that the others know.

    Args:
        recorded: All calls of each rank, in their order.
    """
    groups = {rank: _by_numbering(entries) for rank, entries in recorded.items()}
    first: dict[_Numbering, int] = {}
    for of_rank in groups.values():
        for numbering, entries in of_rank.items():
            pending = first_pending([from_flight(each) for each in entries])
            if pending is not None:
                first[numbering] = min(pending.sequence, first.get(numbering, pending.sequence))
    return {
        rank: [
            each
            for numbering, entries in of_rank.items()
            for each in _kept(entries, first.get(numbering))
        ]
        for rank, of_rank in groups.items()
    }


def _by_numbering(entries: Iterable[JsonObject]) -> dict[_Numbering, list[JsonObject]]:
    found: dict[_Numbering, list[JsonObject]] = defaultdict(list)
    for each in entries:
        if not each.get("point_to_point"):
            found[str(each.get("group")), str(each.get("backend") or "")].append(each)
    return found


def _kept(entries: list[JsonObject], first: int | None) -> list[JsonObject]:
    older, newest = entries[:-NEWEST_ENTRIES], entries[-NEWEST_ENTRIES:]
    if first is None:
        return newest
    wanted = range(first - BEFORE, first + BEHIND)
    return [*(each for each in older if integer(each, "sequence") in wanted), *newest]


# -- gathers, from outside of ranks that may be stuck, what shows why a job makes no progress


BETWEEN = 1.0
"""Seconds over which CPU time and bytes are compared."""

PATIENCE = 3.0
"""Seconds that stacks are waited for, and the Flight Recorder's answer after that second."""

NEWEST = 24
"""Collectives of a ring that are kept."""

PHASES = ("data", "forward", "backward", "optimizer")
"""Those whose lines are written down: by them is said what a GPU works at."""

MOST_FRAMES = 48
"""Frames of a main thread that are kept, the innermost ones."""

OTHER_FRAMES = 8
"""Frames of any other thread."""

MOST_THREADS = 24
WORKERS = 4
"""Workers of a rank's DataLoader that are looked into."""

AGAIN = 16
"""Ranks whose stacks are taken twice, to distinguish a loop from a wait."""


class Seen(NamedTuple):
    """A process when it was looked at last."""

    pid: int
    when: float
    """Monotonic seconds."""
    sample: process_activity.Sample


def examine(
    run: Run,
    number: int,
    waiting: Collection[int],
    before: Mapping[int, JsonObject],
    seen: dict[int, Seen],
    launcher: int | None = None,
    lost: Mapping[int, float] = {},
) -> list[JsonObject]:
    """What each rank of this host is doing, one record a rank.

    Args:
        run: A snapshot of the run.
        number: What ranks were asked with: their Flight Recorder's answer names it.
        waiting: Ranks that are in a collective and only wait.
        before: What the examination before this one found of each rank.
        seen: The processes of the ranks as they were then; as they are now, on return.
        launcher: The process of the job's command.
        lost: For how many seconds of its silence each rank had no core.
    """
    here = namespace()
    local = [rank for rank in run.last if rank.opened.namespace in (None, here)]
    looked = _look(run, local, waiting, launcher)
    records = {rank.rank: _of_rank(run, rank) for rank in run.last}
    # Those that were slow to answer for want of a core are given as much time again.
    deadline = max(looked.began + BETWEEN, time.monotonic() - PATIENCE / 2) + PATIENCE
    for rank, flight in flights(run, local, number, deadline).items():
        records[rank].update(flight)
    for rank, stacks in looked.stacks.items():
        record = records.setdefault(rank, {"rank": rank, "restart": stacks.restart})
        record.update(_of_stacks(stacks, record, before.get(rank, {})))
        if rank in looked.later:
            record["later"] = to_record(_shortened(looked.later[rank], threads=1))
        if looked.workers.get(rank):
            record["workers"] = _twice(looked.workers[rank])
    now = time.monotonic()
    seconds = now - looked.began
    works = process_activity.works(looked.launcher, read_turns(launcher or 0), seconds)
    for rank, record in records.items():
        record["launcher_works"] = works
        if rank in looked.samples and "pid" in record:
            after = process_activity.sample(record["pid"])
            # What it did before it last moved is no life in its silence.
            silent = before.get(rank, {}).get("since") == record.get("since")
            record["activity"] = {
                **process_activity.compared(looked.samples[rank], after, seconds),
                **_since(seen.get(rank) if silent else None, record["pid"], after, now),
            }
            seen[rank] = Seen(record["pid"], now, after)
        record["lost"] = round((lost or {}).get(rank, 0.0), 1)
        known = before.get(rank)
        seen_before = RankState(known, 0) if known is not None else None
        record.update(steadiness(RankState(record, time.time_ns()), seen_before))
    return [records[rank] for rank in sorted(records)]


class _Looked(NamedTuple):
    """What was seen of the processes, by rank where it is of ranks."""

    began: float
    launcher: Turns
    samples: dict[int, process_activity.Sample]
    stacks: dict[int, RankStacks]
    later: dict[int, RankStacks]
    """The stacks of those that do not wait for others, taken a second time."""
    workers: dict[int, list[RankStacks]]


def _look(
    run: Run, local: Iterable[Rank], waiting: Collection[int], launcher: int | None
) -> _Looked:
    """Look at the processes of the ranks of this host, for a second and more."""
    began = time.monotonic()
    samples = {
        rank.rank: process_activity.sample(rank.status.pid)
        for rank in local
        if rank.status is not None
    }
    turns = read_turns(launcher or 0)
    stacks = {each.rank: each for each in capture(run, patience=PATIENCE)}
    for each in stacks.values():
        if each.state.letter:
            # A process that is not yet a rank; on another host the same pid is somebody else's.
            samples.setdefault(each.rank, process_activity.sample(each.pid))
    pause(max(0.0, began + BETWEEN - time.monotonic()))
    # Who did not answer by itself a moment ago would only be waited for once more.
    answered = [rank for rank, each in stacks.items() if each.threads and not each.note]
    suspects = [rank for rank in answered if rank not in waiting and not stacks[rank].gil_held]
    workers = {rank: _workers(stacks[rank]) for rank in answered}
    again = capture(run, suspects[:AGAIN], PATIENCE) if suspects else ()
    return _Looked(began, turns, samples, stacks, {each.rank: each for each in again}, workers)


def _of_stacks(stacks: RankStacks, record: JsonObject, known: JsonObject) -> JsonObject:
    """What the stacks of a rank say; ``known`` is what the examination before this one found."""
    found = to_record(_shortened(stacks))
    if not stacks.threads and known.get("since") == record.get("since"):
        # It has not moved, so that its stack of then is the one of now.
        found["threads"] = known.get("stacks", {}).get("threads", [])
    return {"stacks": found, "pid": stacks.pid}


def look_again(run: Run, records: Mapping[int, JsonObject], seen: dict[int, Seen]) -> None:
    """Bring up to date what can be without asking the ranks for anything.

    Args:
        run: A snapshot of the run, a new one.
        records: What an examination found, by rank.
        seen: The processes as they were then; as they are now, on return.
    """
    for rank in run.last:
        if rank.rank in records:
            records[rank.rank].update(_of_rank(run, rank))
    for rank_number, before in list(seen.items()):
        record = records.get(rank_number, {})
        if record.get("pid") != before.pid:
            continue
        now, after = time.monotonic(), process_activity.sample(before.pid)
        record["activity"] = {
            **process_activity.compared(before.sample, after, max(now - before.when, 0.001)),
            **_since(before, before.pid, after, now),
            # It was asked for nothing meanwhile.
            "wrote": max(0, after.written - before.sample.written),
        }
        seen[rank_number] = Seen(before.pid, now, after)


def _since(before: Seen | None, pid: int, after: process_activity.Sample, now: float) -> JsonObject:
    """What the main threads of a process and its children did since it was looked at before."""
    if before is None or before.pid != pid or now <= before.when:
        return {}
    own, below = process_activity.main_cpu(before.sample, after, pid)
    seconds = now - before.when
    return {
        "since_cpu": round(own / seconds, 4),
        "since_children_cpu": round(below / seconds, 4),
    }


def _workers(stacks: RankStacks) -> list[RankStacks]:
    """What py-spy sees of the workers of a DataLoader that the main thread waits for.

    None is held; without py-spy there are none.
    """
    main = stacks.main
    waits = main is not None and any(
        "torch/utils/data/dataloader.py" in frame.path and "get_data" in frame.function
        for frame in main.frames
    )
    if not waits or capture_module.find_py_spy() is None:
        return []
    children = [
        RankStacks(stacks.rank, stacks.restart, each.pid, stacks.host, state=ProcessState("S"))
        for each in stacks.state.children[:WORKERS]
        if "resource_tracker" not in each.command
    ]
    return capture_module.read_silent(children, PATIENCE)


def _twice(workers: list[RankStacks]) -> list[list[JsonObject]]:
    """The stacks of workers, and those of now."""
    blank = [replace(each, threads=()) for each in workers]
    return [
        [to_record(_shortened(each, threads=1)) for each in pair if each.threads]
        for pair in zip(workers, capture_module.read_silent(blank, PATIENCE), strict=True)
    ]


def add_native(
    records: Iterable[JsonObject], ranks: Collection[int], known: dict[int, JsonObject]
) -> None:
    """Put native frames into the records of some ranks; each is held for a second or two.

    Args:
        records: What was found out of all ranks.
        ranks: Those ranks.
        known: Their stacks when this was done before, by rank: one that still is where it was is
            not held again.
    """
    stacked = {}
    for record in records:
        rank, stacks = record["rank"], record.get("stacks")
        if rank not in ranks or stacks is None:
            continue
        before = known.get(rank, {})
        if before.get("pid") == stacks["pid"] and before["threads"] == stacks["threads"]:
            record["stacks"] = {**stacks, "native": before["native"], "note": before["note"]}
        else:
            stacked[rank] = record
    for each in capture_module.add_native(
        [from_record(record["stacks"]) for record in stacked.values()], PATIENCE
    ):
        known[each.rank] = stacked[each.rank]["stacks"] = to_record(each)


def _of_rank(run: Run, rank: Rank) -> JsonObject:
    record: JsonObject = {"rank": rank.rank, "restart": rank.restart}
    status = rank.status
    # As it is now: the snapshot is some seconds old.
    with contextlib.suppress(OSError, UnreadableError):
        status = read_status(str(run.path / f"{rank_stem(rank.rank, rank.restart)}.status"))
    now = time.time_ns()
    if rank.exit is not None:
        record["exit"] = as_json(rank.exit)
    if rank.ended is not None:
        record["ended"] = True
    if status is None:
        return record
    return {
        **record,
        "pid": status.pid,
        "host": rank.opened.host,
        "backend": rank.opened.backend,
        "world_size": status.world_size,
        "phase": status.phase.label,
        "since": status.since,
        "step": status.step,
        "armed": status.armed,
        "reduced": status.reduced,
        "collective": status.collective,
        "site": status.site,
        "sites": {each: str(at) for each in PHASES if (at := rank.site(each)) is not None},
        # How long ago its writing thread was last awake, in nanoseconds.
        "silent": now - status.beat if status.beat is not None else None,
        **ring_record(rank),
    }


def ring_record(rank: Rank) -> JsonObject:
    """The newest collectives that a rank called from Python."""
    if rank.ring_file is None:
        return {}
    try:
        ring = read_ring(str(rank.ring_file), NEWEST)
    except (OSError, UnreadableError):
        return {}
    return {
        "calls": ring.calls,
        "waited": ring.waited,
        "partial": ring.partial,
        "collectives": [each._asdict() for each in ring.collectives],
    }


def _shortened(stacks: RankStacks, threads: int = MOST_THREADS) -> RankStacks:
    """Stacks with the frames that matter."""
    main = stacks.main
    kept = [replace(main, frames=main.frames[-MOST_FRAMES:])] if main is not None else []
    others = [thread for thread in stacks.threads if thread is not main]
    kept += [_short(thread) for thread in others[: threads - 1]]
    return replace(stacks, threads=tuple(kept))


def _short(thread: Thread) -> Thread:
    return replace(thread, frames=thread.frames[-OTHER_FRAMES:])

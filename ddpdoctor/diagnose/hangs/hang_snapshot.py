"""What an examination of a hanging job saw of each rank, and which ranks wait for which."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ddpdoctor.core.opening import integer, whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.recorded_calls import (
    Call,
    first_pending,
    from_flight,
    from_ring,
)
from ddpdoctor.diagnose.source_files import location, only_sleeps
from ddpdoctor.run.names import BEFORE_FORWARD, MOST_WORLD
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.supervisor import HangRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import innermost, user_frames
from ddpdoctor.stacks.rank_stacks import Frame, RankStacks, from_record

# -- what an examination of a job without progress saw of each rank (`Run.hang`), as objects


BUSY = 0.2
"""Share of a core above which a process is at work; ranks may have to share their cores."""

SILENT = 2_000_000_000
"""Nanoseconds without a sign of a rank's writing thread, which is awake four times a second."""

QUEUED = 2_000_000_000
"""Nanoseconds after which a collective that a GPU has not done is one that does not end."""

_OURS = "/ddpdoctor/probe/"
_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
"""Where torch's Python code waits for other ranks."""
_DDP = ("/torch/nn/parallel/distributed.py", "/torch/distributed/utils.py")
"""Where DDP calls its native code: its constructor, and the way into its forward."""


@dataclass(frozen=True)
class RankState:
    """One rank of a job that makes no progress.

    Attributes:
        record: What was seen of it.
        taken: When, in Unix nanoseconds.
    """

    record: JsonObject
    taken: int

    @property
    def rank(self) -> int:
        """Its number."""
        return integer(self.record, "rank", -1)

    @property
    def joined(self) -> bool:
        """Whether it had joined a process group."""
        return "phase" in self.record

    @property
    def ended(self) -> bool:
        """Whether its script had come to its regular end."""
        return bool(self.record.get("ended"))

    @property
    def dead_for(self) -> float | None:
        """Seconds since its process ended, None if it lives or was not seen to end."""
        recorded = self.record.get("exit")
        return (
            (self.taken - integer(recorded, "time")) / 1e9 if isinstance(recorded, dict) else None
        )

    @property
    def phase(self) -> str:
        """What its training thread did, by its status page."""
        return str(self.record.get("phase") or "")

    @property
    def step(self) -> int:
        """Steps closed."""
        return integer(self.record, "step")

    @property
    def dump(self) -> str:
        """The Flight Recorder file that this was read from; empty for a rank that was examined."""
        return str(self.record.get("dump") or "")

    def forgot(self, group: str) -> bool:
        """Whether it may have called collectives of a group that its recorder has overwritten."""
        known = any(each.group == group for each in self.flight or ())
        return bool(self.record.get("forgets")) and not known

    @cached_property
    def stacks(self) -> RankStacks | None:
        """Its stacks, or why there are none."""
        recorded = self.record.get("stacks")
        return from_record(recorded) if isinstance(recorded, dict) else None

    @cached_property
    def later(self) -> RankStacks | None:
        """Its stacks a second later, if it did not wait in a collective."""
        recorded = self.record.get("later")
        return from_record(recorded) if isinstance(recorded, dict) else None

    @cached_property
    def frames(self) -> tuple[Frame, ...]:
        """The main thread's frames, outermost first."""
        return _main(self.stacks)

    @cached_property
    def later_frames(self) -> tuple[Frame, ...]:
        """The same, a second later."""
        return _main(self.later)

    @cached_property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return innermost(self.frames)

    @property
    def traceback(self) -> str:
        """The user's part of its stack, as a traceback is written."""
        frames = user_frames(self.frames)
        return "".join(f'  File "{f.path}", line {f.line}, in {f.function}\n' for f in frames)

    @property
    def site(self) -> Location | None:
        """The user's line that it is at, by its stack or, without one, by its status page."""
        if self.frame is not None:
            return Location(self.frame.path, self.frame.line)
        return location(str(self.record.get("site") or ""))

    @property
    def seconds(self) -> int:
        """For how long it has given no sign of life."""
        since = integer(self.record, "since")
        return max(0, round((self.taken - since) / 1e9)) if since else 0

    def activity(self, key: str) -> float:
        """A number of what it did within a second (`ddpdoctor.system.process_activity`)."""
        value = (self.record.get("activity") or {}).get(key)
        return float(value) if isinstance(value, (int, float)) else 0.0

    @property
    def letters(self) -> str:
        """Its process's state at two moments a second apart; empty if it was not looked at."""
        return str((self.record.get("activity") or {}).get("letters") or "")

    @property
    def busy(self) -> float:
        """Cores that it used, of those that it got: a process that is starved is busy all the same.

        Examinations of before knew CPU time alone.
        """
        return max(self.activity("busy"), self.activity("cpu"))

    @property
    def on_queue(self) -> bool:
        """Whether its main thread ran, or was ready to run, when it was seen last."""
        return self.letters.endswith("R")

    @property
    def lost(self) -> float:
        """Seconds of its silence in which it, or a child process of it, had no core."""
        value = self.record.get("lost")
        return float(value) if isinstance(value, (int, float)) else 0.0

    @property
    def steady(self) -> int:
        """Examinations in a row that saw the rank do the same."""
        return integer(self.record, "steady")

    @property
    def steadied(self) -> float:
        """Seconds that it had been silent, with a core, when the last of them was made."""
        value = self.record.get("steadied")
        return float(value) if isinstance(value, (int, float)) else 0.0

    @property
    def looked_at(self) -> bool:
        """Whether its process could be looked at."""
        return "activity" in self.record

    @property
    def silent(self) -> bool:
        """Whether no Python thread of it runs: its writing thread has not been awake."""
        silent = self.record.get("silent")
        return isinstance(silent, int) and silent > SILENT

    @cached_property
    def ring(self) -> tuple[Call, ...]:
        """Its newest collectives from Python in groups, oldest first."""
        recorded = self.record.get("collectives") or ()
        return tuple(from_ring(each) for each in recorded if not each.get("point_to_point"))

    @cached_property
    def flight(self) -> tuple[Call, ...] | None:
        """Its newest collectives, DDP's own among them; None if the recorder did not answer."""
        recorded = self.record.get("flight")
        if not isinstance(recorded, list):
            return None
        calls = [from_flight(each) for each in recorded if not each.get("point_to_point")]
        return tuple(sorted(calls, key=lambda each: each.order))

    @cached_property
    def under_way(self) -> Call | None:
        """The collective from Python that it is in or waits for."""
        recorded = self.record.get("collectives") or ()
        waited = integer(self.record, "waited")
        for each in reversed(recorded):
            if waited and each.get("order") == waited:
                return from_ring(each)
        if self.waits_for_gpu and self._queued is not None:
            return self._queued
        if recorded and not waited and self.phase == Phase.WAIT.label:
            last = recorded[-1]
            if not last.get("ended") and not last.get("asynchronous"):
                return from_ring(last)
        return None

    @cached_property
    def pending(self) -> Call | None:
        """The first collective that is not done, by its Flight Recorder."""
        return first_pending(self.flight or ())

    @property
    def _queued(self) -> Call | None:
        """The collective from Python that its GPU is in, if it is not one of DDP's own."""
        pending = self.pending
        if pending is None or pending.site is None:
            return None
        earlier = (each for each in reversed(self.ring) if each.began <= pending.began)
        last = next(earlier, None)
        return last if last is not None and last.chain == pending.chain else None

    @cached_property
    def blocked(self) -> Call | None:
        """The collective that it waits for by its Flight Recorder: the first that is not done."""
        if self.flight is None or not self.in_collective:
            return None
        found = self.pending
        # Of one that no line is known for (compiled, say): it waits where its main thread is.
        if found is None or found.site is not None:
            return found
        if self.under_way is not None:
            return replace(found, site=self.under_way.site, callers=self.under_way.callers)
        lines = [Location(each.path, each.line) for each in user_frames(self.frames)][::-1]
        return replace(found, site=lines[0] if lines else self.site, callers=tuple(lines[1:]))

    @property
    def waits_at(self) -> Location | None:
        """The line that called what it waits in; with NCCL its host may be further on."""
        called = self.blocked.site if self.waits_for_gpu and self.blocked else None
        return called or self.site

    @cached_property
    def waits_for_gpu(self) -> bool:
        """Whether its GPU is in a collective that does not end, and its main thread waits for it.

        With NCCL a collective returns once it is queued. The thread goes on to the first line that
        needs a result, or that finds the queue full, and spins or sleeps there.
        """
        pending = self.pending
        if pending is None or pending.backend != "nccl" or self.taken - pending.began < QUEUED:
            return False
        stays = not self.later_frames or self.later_frames == self.frames
        return stays and not (self.frame and only_sleeps(self.frame.path, self.frame.line))

    @cached_property
    def in_collective(self) -> bool:
        """Whether its training thread is in something that waits for other ranks."""
        if self.phase == Phase.WAIT.label or self.waits_for_gpu:
            return True
        inner = self._inner
        if inner is None:
            return self.phase == Phase.BACKWARD.label
        if self.flight is None:
            # Which of DDP's collectives are pending is not known: then idling where torch waits is
            # waiting. A backward also compiles: that idles in a process or behind a lock.
            places = _COLLECTIVES if self.phase == Phase.BACKWARD.label else _DDP
            idles = not (self.busy >= BUSY or self.on_queue)
            return idles and any(part in inner.path for part in places)
        # A backward that still computes does not wait, nor does one that only began a collective;
        # DDP's constructor and the way into its forward wait, too, and are no phase.
        pending = any(not each.done for each in self.flight or ())
        return pending and any(part in inner.path for part in _COLLECTIVES)

    @property
    def _inner(self) -> Frame | None:
        """The innermost frame of its main thread that is not the probe's."""
        return next((each for each in reversed(self.frames) if _OURS not in each.path), None)

    @property
    def waits_in(self) -> str:
        """What it waits in, in words."""
        call = self.under_way or self.blocked
        if call is not None and self.under_way is None and self.phase == Phase.BACKWARD.label:
            return f"DDP's {call.what}"
        if call is not None:
            return call.what
        if self.record.get("collective") in BEFORE_FORWARD:
            return str(self.record["collective"])
        if self.phase == Phase.BACKWARD.label:
            return "backward's all-reduce"
        if self.flight is None and self.phase != Phase.WAIT.label:
            inside = [each.function for each in self.frames if _DDP[0] in each.path]
            return "DDP's constructor" if "__init__" in inside else "DDP's forward"
        return str(self.record.get("collective") or self.phase)


def _main(stacks: RankStacks | None) -> tuple[Frame, ...]:
    main = stacks.main if stacks is not None else None
    return main.frames if main is not None else ()


@dataclass(frozen=True)
class HangSnapshot:
    """A job that makes no progress."""

    record: HangRecord
    ranks: tuple[RankState, ...]
    world_size: int

    @property
    def seconds(self) -> float:
        """For how long no rank had made progress."""
        return self.record.seconds


def hang_snapshot(run: Run) -> HangSnapshot | None:
    """The job's standstill, None if it moves or nothing is known of it."""
    record = run.hang
    if record is None:
        return None
    ranks = tuple(RankState(_sound(each), record.time) for each in record.ranks)
    recorded = max((integer(each.record, "world_size") for each in ranks), default=0)
    world = min(recorded, MOST_WORLD)
    return HangSnapshot(record, ranks, world or len(ranks))


_OBJECTS = ("activity", "sites", "stacks", "later", "exit")
_LISTS_OF_OBJECTS = ("collectives", "flight")
_LISTS = (*_LISTS_OF_OBJECTS, "workers", "device")


def _sound(recorded: JsonObject) -> JsonObject:
    """Return what was recorded of a rank, without values that no examination writes."""
    kinds = {**dict.fromkeys(_OBJECTS, dict), **dict.fromkeys(_LISTS, list)}
    found = {
        key: value
        for key, value in recorded.items()
        if key not in kinds or isinstance(value, kinds[key])
    }
    for key in _LISTS_OF_OBJECTS:
        if key in found:
            found[key] = [each for each in found[key] if isinstance(each, dict)]
    return found


def seen_waiting(run: Run, rank: int) -> bool:
    """Whether a rank was seen to wait for a collective of NCCL, whatever its host has come to."""
    still = hang_snapshot(run)
    return still is not None and any(
        each.rank == rank and each.waits_for_gpu for each in still.ranks
    )


# -- who waits for whom: a collective that some ranks are in and others never reached


@dataclass(frozen=True)
class Blocked:
    """A collective that does not end.

    Attributes:
        call: What it is, if it is known; as one of the waiting ranks sees it.
        waiting: Ranks that are in it.
        absent: Ranks that are not, though they belong to its group.
        unseen: Ranks of its group of which nothing is known here: those of other nodes.
        ahead: Ranks that wait in a later one of its group.
    """

    call: Call | None
    waiting: tuple[RankState, ...]
    absent: tuple[RankState, ...]
    unseen: tuple[int, ...]
    ahead: tuple[RankState, ...] = ()

    @property
    def what(self) -> str:
        """The collective, for a sentence."""
        return self.waiting[0].waits_in

    @property
    def launched_behind(self) -> dict[int, int]:
        """The collectives that waiting ranks have launched behind it, where that is known."""
        call = self.call
        return {
            rank.rank: _last(rank, call.numbering, flight=True) - call.sequence
            for rank in self.waiting
            if call is not None and rank.flight
        }


def find_blocked(still: HangSnapshot) -> list[Blocked]:
    """The collectives that ranks wait in, that with most of them first."""
    waiting = [rank for rank in still.ranks if rank.in_collective]
    if not waiting:
        return []
    if all(rank.blocked is not None for rank in waiting):
        found = list(_by_calls(still, waiting, {each.rank: each.blocked for each in waiting}, True))
    elif all(rank.under_way is not None for rank in waiting):
        own = {each.rank: each.under_way for each in waiting}
        found = list(_by_calls(still, waiting, own, False))
    else:
        found = list(_by_phase(still, waiting))
    return sorted(found, key=lambda each: -len(each.waiting))


def _by_calls(
    still: HangSnapshot,
    waiting: list[RankState],
    calls: dict[int, Call | None],
    flight: bool,
) -> Iterator[Blocked]:
    numberings = sorted({call.numbering for call in calls.values() if call is not None})
    for numbering in numberings:
        inside = [
            (rank, call)
            for rank in waiting
            if (call := calls[rank.rank]) is not None and call.numbering == numbering
        ]
        least = min(call.sequence for _, call in inside)
        members = _members(still, numbering[0], inside)
        here = [rank for rank, call in inside if call.sequence == least]
        present = {rank.rank for rank, _ in inside}
        seen = _knowing(still, numbering[0])
        absent = [
            rank
            for rank in seen
            if rank.rank in members
            and rank.rank not in present
            and _last(rank, numbering, flight) < least
        ]
        ahead = [rank for rank, call in inside if call.sequence > least]
        known = {rank.rank for rank in seen}
        call = next(call for rank, call in inside if call.sequence == least)
        unseen = sorted(members - known)
        yield Blocked(call, tuple(here), tuple(absent), tuple(unseen), tuple(ahead))


def _knowing(still: HangSnapshot, group: str) -> list[RankState]:
    """The ranks of which it is known what they called in a group, if anything."""
    return [rank for rank in still.ranks if not rank.forgot(group)]


def _members(
    still: HangSnapshot, group: str, inside: list[tuple[RankState, Call]]
) -> frozenset[int]:
    members = next((call.members for _, call in inside if call.members), "")
    for rank in still.ranks:
        members = members or next((call.members for call in rank.ring if call.group == group), "")
    if members:
        return parse_ranks(members)
    if group in ("", "0"):
        return frozenset(range(still.world_size))
    # A group that no rank described: those that ever used it.
    return frozenset(
        rank.rank
        for rank in still.ranks
        if any(call.group == group for call in (*(rank.flight or ()), *rank.ring))
    )


def parse_ranks(text: str) -> frozenset[int]:
    """Ranks from ``0-2,5``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = whole(first, -1), whole(last or first, -1)
        if 0 <= low <= high < MOST_WORLD:
            found.update(range(low, high + 1))
    return frozenset(found)


def _last(rank: RankState, numbering: tuple[str, str], flight: bool) -> int:
    """The number of its newest collective of a group, 0 if there is none or it is not known."""
    calls = (rank.flight or ()) if flight else rank.ring
    return max((call.sequence for call in calls if call.numbering == numbering), default=0)


def _by_phase(still: HangSnapshot, waiting: list[RankState]) -> Iterator[Blocked]:
    """By the status pages alone: all in one phase are taken to be in one collective."""
    kinds = sorted({(rank.phase, str(rank.record.get("collective"))) for rank in waiting})
    known = {rank.rank for rank in still.ranks}
    for kind in kinds:
        here = [r for r in waiting if (r.phase, str(r.record.get("collective"))) == kind]
        if kind[0] == Phase.BACKWARD.label:
            most = max(rank.record.get("reduced") or 0 for rank in here)
            here = [rank for rank in here if (rank.record.get("reduced") or 0) == most] or here
        present = {rank.rank for rank in here}
        absent = [rank for rank in still.ranks if rank.rank not in present]
        unseen = sorted(set(range(still.world_size)) - known)
        yield Blocked(here[0].under_way, tuple(here), tuple(absent), tuple(unseen))

"""The state of each rank in an examination of a hang, and the waits between ranks."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from ddpdoctor.core.opening import whole
from ddpdoctor.core.syntax import last_name
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.collectives.recorded_calls import (
    Call,
    first_pending,
    from_flight,
    from_ring,
)
from ddpdoctor.diagnose.crashes.resource_errors import unopened_store
from ddpdoctor.diagnose.hangs.job_nodes import JobNodes, job_nodes
from ddpdoctor.diagnose.source_files import covers, location, nodes_of, only_sleeps
from ddpdoctor.run.names import BEFORE_FORWARD, MAX_WORLD_SIZE
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import OwnStoreRecord
from ddpdoctor.run.records.supervisor import (
    Frame,
    HangRecord,
    ProcessActivity,
    RankEvidence,
    RankStacks,
)
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.frames import innermost, is_probe_path, user_frames
from ddpdoctor.system.process_activity import BUSY

MIN_SILENCE_NS = 2_000_000_000
"""Minimum nanoseconds without activity of a rank's writing thread, which wakes 4 times a second."""

MIN_PENDING_NS = 2_000_000_000
"""Nanoseconds after which a collective that a GPU has not finished counts as hanging."""

_COLLECTIVES = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
"""Files of torch's Python functions that wait for other ranks."""
_DDP = ("/torch/nn/parallel/distributed.py", "/torch/distributed/utils.py")
"""Files of DDP's functions that call native code: its constructor and the start of its forward."""

_OF_SOME_RANKS = ("send", "recv", "send_object_list", "recv_object_list", "Work.wait")
"""Calls that not every rank of a group has to make, or whose kind is unknown."""

_NO_ACTIVITY = ProcessActivity()


@dataclass(frozen=True)
class RankState:
    """A rank of a job that makes no progress, at some time in Unix nanoseconds."""

    evidence: RankEvidence
    taken: int

    @property
    def rank(self) -> int:
        """The rank's number."""
        return self.evidence.rank

    @property
    def step(self) -> int:
        """Number of closed steps. -1 if unknown."""
        return self.evidence.step

    @property
    def phase(self) -> str:
        """The phase on its status page. Empty if it has not joined a process group."""
        return self.evidence.phase or ""

    @property
    def probed(self) -> bool:
        """Whether it has a probe. Otherwise its steps and the numbers of its calls are unknown."""
        return self.step >= 0

    @property
    def joined(self) -> bool:
        """Whether it had joined a process group."""
        return self.evidence.phase is not None

    @property
    def watched(self) -> bool:
        """Whether its process could be watched."""
        return self.evidence.activity is not None

    @property
    def activity(self) -> ProcessActivity:
        """The activity of its process within a second. All zero if it could not be watched."""
        return self.evidence.activity or _NO_ACTIVITY

    @property
    def dead_for(self) -> float | None:
        """Seconds since its process ended. None if it is alive or its end was not seen."""
        ended = self.evidence.exit
        return (self.taken - ended.time) / 1e9 if ended is not None else None

    @property
    def seconds(self) -> int:
        """Seconds since its last sign of life."""
        since = self.evidence.since
        return max(0, round((self.taken - since) / 1e9)) if since else 0

    @property
    def silent(self) -> bool:
        """Whether none of its Python threads runs, judged by its writing thread."""
        return (self.evidence.silent or 0) > MIN_SILENCE_NS

    @property
    def busy(self) -> float:
        """The used fraction of its time on a core, so that a starved process counts as busy."""
        # Old records lack `busy`.
        return max(self.activity.busy, self.activity.cpu)

    @property
    def on_queue(self) -> bool:
        """Whether its main thread was running or ready to run when it was last observed."""
        return self.activity.letters.endswith("R")

    # -- where it is

    @property
    def stacks(self) -> RankStacks | None:
        """Its stacks, or the reason why they are missing. None if they were not requested."""
        return self.evidence.stacks

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The main thread's frames, outermost first."""
        return _main(self.stacks)

    @property
    def later_frames(self) -> tuple[Frame, ...]:
        """The main thread's frames a second later. Empty if it waited in a collective."""
        return _main(self.evidence.later)

    @cached_property
    def frame(self) -> Frame | None:
        """The innermost frame of the user's code."""
        return innermost(self.frames)

    @property
    def traceback(self) -> str:
        """The user's part of its stack, formatted as a traceback."""
        frames = user_frames(self.frames)
        return "".join(f'  File "{f.path}", line {f.line}, in {f.function}\n' for f in frames)

    @property
    def site(self) -> Location | None:
        """The user's current line, from its stack or else from its status page."""
        if self.frame is not None:
            return Location(self.frame.path, self.frame.line)
        return location(self.evidence.site)

    @property
    def user_lines(self) -> tuple[Location, ...]:
        """The lines of the user's code in its stack, innermost first."""
        return tuple(Location(f.path, f.line) for f in reversed(user_frames(self.frames)))

    # -- its collectives

    def forgot(self, group: str) -> bool:
        """Return whether its recorder may have overwritten all of its collectives in a group."""
        return self.evidence.forgets and all(each.group != group for each in self.flight or ())

    @cached_property
    def ring(self) -> tuple[Call, ...]:
        """Its newest collectives from Python, oldest first, without sends and receives."""
        return tuple(from_ring(e) for e in self.evidence.collectives if not e.point_to_point)

    @cached_property
    def flight(self) -> tuple[Call, ...] | None:
        """Its newest collectives, including DDP's. None if the recorder did not respond."""
        if self.evidence.flight is None:
            return None
        calls = [from_flight(each) for each in self.evidence.flight if not each.point_to_point]
        return tuple(sorted(calls, key=lambda each: each.order))

    @cached_property
    def under_way(self) -> Call | None:
        """The collective from Python that it is in or waits for."""
        recorded, waited = self.evidence.collectives, self.evidence.waited
        if not self.probed:
            return self._seen_call
        for each in reversed(recorded):
            if waited and each.order == waited:
                return from_ring(each)
        if self.waits_for_gpu and self._queued is not None:
            return self._queued
        if recorded and not waited and self.phase == Phase.WAIT.label:
            last = recorded[-1]
            if not last.ended and not last.asynchronous:
                return from_ring(last)
        return None

    @property
    def _seen_call(self) -> Call | None:
        """The collective that the stack of a rank without a probe shows, in the default group."""
        site, name = self.site, self.evidence.collective
        if site is None or self.phase != Phase.WAIT.label or name in _OF_SOME_RANKS:
            return None
        nodes = (each for each in nodes_of(site.path) if isinstance(each, ast.Call))
        calls = (each for each in nodes if covers(each, site.line) and last_name(each.func) == name)
        if any("group" in ast.unparse(each) for each in calls):
            return None
        lines = self.user_lines
        return Call("", "", -1, name, -1, "", "", -1, False, lines[0], callers=lines[1:])

    @cached_property
    def exchange(self) -> Call | None:
        """The send or recv that it is in. Its ``root`` is the peer."""
        last = self.evidence.collectives[-1] if self.evidence.collectives else None
        if last is None or not last.point_to_point or last.ended or last.asynchronous:
            return None
        return from_ring(last) if self.phase == Phase.WAIT.label else None

    @cached_property
    def pending(self) -> Call | None:
        """The first collective that is not done, according to its Flight Recorder."""
        return first_pending(self.flight or ())

    @property
    def _queued(self) -> Call | None:
        """The collective from Python that its GPU is in, unless it is one of DDP's."""
        pending = self.pending
        if pending is None or pending.site is None:
            return None
        earlier = (each for each in reversed(self.ring) if each.began <= pending.began)
        last = next(earlier, None)
        return last if last is not None and last.chain == pending.chain else None

    @cached_property
    def blocked(self) -> Call | None:
        """The collective that it waits for: the first pending one in its Flight Recorder."""
        if self.flight is None or not self.in_collective:
            return None
        found = self.pending
        # A compiled collective, for example, has no line. Use that of the main thread.
        if found is None or found.site is not None:
            return found
        if self.under_way is not None:
            return replace(found, site=self.under_way.site, callers=self.under_way.callers)
        lines = self.user_lines
        return replace(found, site=lines[0] if lines else self.site, callers=lines[1:])

    @property
    def waits_at(self) -> Location | None:
        """The line that called the awaited collective. With NCCL the host may be past it."""
        called = self.blocked.site if self.waits_for_gpu and self.blocked else None
        return called or self.site

    @cached_property
    def waits_for_gpu(self) -> bool:
        """Whether its main thread waits for its GPU, which is in a collective that does not end.

        With NCCL a collective returns once it is queued. The thread continues to the first line
        that needs a result or finds the queue full, and spins or sleeps there.
        """
        pending = self.pending
        if pending is None or pending.backend != "nccl":
            return False
        if self.taken - pending.began < MIN_PENDING_NS:
            return False
        stays = not self.later_frames or self.later_frames == self.frames
        return stays and not (self.frame and only_sleeps(self.frame.path, self.frame.line))

    @cached_property
    def in_collective(self) -> bool:
        """Whether its training thread waits for other ranks."""
        if self.phase == Phase.WAIT.label or self.waits_for_gpu:
            return True
        inner = next((each for each in reversed(self.frames) if not is_probe_path(each.path)), None)
        if inner is None:
            return self.phase == Phase.BACKWARD.label
        if self.flight is None:
            # It is unknown which of DDP's collectives are pending, so a thread that idles in one of
            # torch's waiting functions counts as waiting. A compiling backward idles elsewhere.
            places = _COLLECTIVES if self.phase == Phase.BACKWARD.label else _DDP
            idles = not (self.busy >= BUSY or self.on_queue)
            return idles and any(part in inner.path for part in places)
        # A backward that still computes does not wait, nor does one that only began a collective.
        # DDP's constructor and the start of its forward wait without a separate phase.
        pending = any(not each.done for each in self.flight)
        return pending and any(part in inner.path for part in _COLLECTIVES)

    @property
    def waits_in(self) -> str:
        """The call in which it waits, for a sentence."""
        call = self.under_way or self.blocked
        backward = self.phase == Phase.BACKWARD.label
        if call is not None:
            own = self.under_way is None and backward
            return f"DDP's {call.what}" if own else call.what
        if self.evidence.collective in BEFORE_FORWARD:
            return self.evidence.collective
        if backward:
            return "backward's all-reduce"
        if self.flight is None and self.phase != Phase.WAIT.label:
            inside = [each.function for each in self.frames if _DDP[0] in each.path]
            return "DDP's constructor" if "__init__" in inside else "DDP's forward"
        return self.evidence.collective or self.phase


def _main(stacks: RankStacks | None) -> tuple[Frame, ...]:
    main = stacks.main if stacks is not None else None
    return main.frames if main is not None else ()


@dataclass(frozen=True)
class HangSnapshot:
    """A job that makes no progress: the input of the diagnosis of a hang."""

    record: HangRecord
    ranks: tuple[RankState, ...]
    world_size: int  # The number of ranks of the job, on all nodes
    manifest: JsonObject = field(default_factory=dict)
    """The run's manifest, with the command of the job."""
    store: OwnStoreRecord | None = None  # A store that ranks wait for and that none of them opens
    stderr: str = ""
    nodes: JobNodes = field(default_factory=JobNodes)

    def by_node(self, ranks: Sequence[RankState]) -> tuple[str, ...]:
        """List the nodes of ranks, as evidence for a job of several nodes."""
        places = self.nodes.places([each.rank for each in ranks])
        return (f"by node: {places}",) if self.nodes.several else ()

    @property
    def dead_links(self) -> tuple[str, ...]:
        """Faults of this machine's interfaces, as evidence for a job of several nodes."""
        here = str(self.manifest.get("host") or "this machine")
        return tuple(f"on {here}, {each}" for each in self.record.links if self.nodes.several)


def hang_snapshot(run: Run) -> HangSnapshot | None:
    """Return the newest examination. None if the job makes progress or was not examined."""
    record = run.hang
    if record is None:
        return None
    ranks = tuple(RankState(each, record.time) for each in record.ranks)
    recorded = max((each.evidence.world_size for each in ranks), default=0)
    world = min(recorded, MAX_WORLD_SIZE) or len(ranks)
    store = unopened_store(run.strays, record.restart)
    return HangSnapshot(record, ranks, world, run.manifest, store, run.every_stderr, job_nodes(run))


def seen_waiting(run: Run, rank: int) -> bool:
    """Return whether a rank's host was seen waiting for a collective of its GPU (NCCL)."""
    record = run.hang
    return record is not None and any(
        each.rank == rank and RankState(each, record.time).waits_for_gpu for each in record.ranks
    )


# -- collectives that some ranks are in and others never reached


@dataclass(frozen=True)
class Blocked:
    """A collective that does not end."""

    call: Call | None  # The call of one of the waiting ranks, if known
    waiting: tuple[RankState, ...]  # Ranks that are in it
    absent: tuple[RankState, ...]  # Ranks that are not, though they belong to its group
    unseen: tuple[int, ...]  # Ranks of its group without evidence: those of other nodes
    ahead: tuple[RankState, ...] = ()  # Ranks that wait in a later collective of its group

    @property
    def what(self) -> str:
        """The collective, for a sentence."""
        return self.waiting[0].waits_in

    @property
    def launched_after(self) -> dict[int, int]:
        """The number of collectives that each waiting rank launched after it, if known."""
        call = self.call
        return {
            rank.rank: _last(rank.flight, call.numbering) - call.sequence
            for rank in self.waiting
            if call is not None and rank.flight
        }


def find_blocked(hang: HangSnapshot) -> list[Blocked]:
    """Return the collectives in which ranks wait, those with most waiting ranks first."""
    waiting = [rank for rank in hang.ranks if rank.in_collective]
    by_flight = {rank.rank: call for rank in waiting if (call := rank.blocked)}
    by_ring = {rank.rank: call for rank in waiting if rank.probed and (call := rank.under_way)}
    if len(by_flight) == len(waiting):
        found = list(_by_calls(hang, waiting, by_flight, True))
    elif len(by_ring) == len(waiting):
        found = list(_by_calls(hang, waiting, by_ring, False))
    else:
        found = list(_by_phase(hang, waiting))
    return sorted(found, key=lambda each: -len(each.waiting))


def _by_calls(
    hang: HangSnapshot, waiting: list[RankState], calls: Mapping[int, Call], flight: bool
) -> Iterator[Blocked]:
    for numbering in sorted({call.numbering for call in calls.values()}):
        inside = [rank for rank in waiting if calls[rank.rank].numbering == numbering]
        least = min(calls[rank.rank].sequence for rank in inside)
        here = [rank for rank in inside if calls[rank.rank].sequence == least]
        group, present = numbering[0], {rank.rank for rank in inside}
        members = _members(hang, group, [calls[rank.rank] for rank in inside])
        known = [rank for rank in hang.ranks if not rank.forgot(group)]
        yield Blocked(
            call=calls[here[0].rank],
            waiting=tuple(here),
            absent=tuple(
                rank
                for rank in known
                if rank.rank in members
                and rank.rank not in present
                and _last(rank.flight if flight else rank.ring, numbering) < least
            ),
            unseen=tuple(sorted(members - {rank.rank for rank in known})),
            ahead=tuple(rank for rank in inside if calls[rank.rank].sequence > least),
        )


def _members(hang: HangSnapshot, group: str, calls: list[Call]) -> frozenset[int]:
    """Return the ranks of a group, as its calls show them."""
    rings = (call for rank in hang.ranks for call in rank.ring if call.group == group)
    members = next((call.members for call in (*calls, *rings) if call.members), "")
    if members:
        return parse_ranks(members)
    if group in ("", "0"):
        return frozenset(range(hang.world_size))
    # No rank described the group. Use the ranks that called its collectives.
    return frozenset(
        rank.rank
        for rank in hang.ranks
        if any(call.group == group for call in (*(rank.flight or ()), *rank.ring))
    )


def parse_ranks(text: str) -> frozenset[int]:
    """Parse ranks such as ``0-2,5``. Skip damaged parts."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = whole(first, -1), whole(last or first, -1)
        if 0 <= low <= high < MAX_WORLD_SIZE:
            found.update(range(low, high + 1))
    return frozenset(found)


def _last(calls: tuple[Call, ...] | None, numbering: tuple[str, str]) -> int:
    """Return the number of a group's newest collective. 0 if there is none."""
    return max((call.sequence for call in calls or () if call.numbering == numbering), default=0)


def _by_phase(hang: HangSnapshot, waiting: list[RankState]) -> Iterator[Blocked]:
    """Assume one collective for all ranks in the same phase, if only status pages are known."""
    unseen = sorted(set(range(hang.world_size)) - {rank.rank for rank in hang.ranks})
    for kind in sorted({(rank.phase, rank.evidence.collective) for rank in waiting}):
        here = [r for r in waiting if (r.phase, r.evidence.collective) == kind]
        if kind[0] == Phase.BACKWARD.label:
            most = max(rank.evidence.reduced for rank in here)
            here = [rank for rank in here if rank.evidence.reduced == most]
        present = {rank.rank for rank in here}
        absent = tuple(rank for rank in hang.ranks if rank.rank not in present)
        call = here[0].under_way if here[0].probed else None
        yield Blocked(call, tuple(here), absent, tuple(unseen))

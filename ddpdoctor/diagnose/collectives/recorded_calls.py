"""Collectives of ranks, from torch's Flight Recorder, the probe's ring and NCCL."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import location
from ddpdoctor.run.records.supervisor import FlightCall, Ras, RasCommunicator, RasDifference
from ddpdoctor.run.ring import Collective

_WORDS = {
    "float32": "float", "float": "float", "float64": "double", "double": "double",
    "float16": "half", "half": "half", "bfloat16": "bfloat16", "int64": "long", "long": "long",
    "int32": "int", "int": "int", "int16": "short", "short": "short", "uint8": "byte",
    "byte": "byte", "int8": "char", "char": "char", "bool": "bool",
}  # fmt: skip

_MAX_NUMEL = 1 << 62  # Larger shapes are damaged


@dataclass(frozen=True)
class Call:
    """One collective of one rank, from torch's Flight Recorder or from the ring."""

    group: str  # Name of its process group: ``0`` is the default group
    members: str  # Ranks of the group, ``0-3``; empty if unknown
    sequence: int  # -1 if unknown
    name: str
    numel: int  # Number of elements, -1 without a tensor or if unknown
    dtype: str
    reduce: str
    root: int
    done: bool
    site: Location | None
    order: int = 0
    began: int = 0  # Unix nanoseconds
    backend: str = ""  # ``gloo``, where torch's Flight Recorder says so
    callers: tuple[Location, ...] = ()  # The lines that led to it, innermost first
    started: bool = False  # Whether a GPU has started it
    timed: bool = False
    """Whether its start was recorded on the GPU, as are the starts of later calls then."""
    above: tuple[Location, ...] = ()
    """The lines that led to the backward, innermost first, which calls from autograd lack."""

    @property
    def chain(self) -> tuple[Location, ...]:
        """The call's line and the lines that led to it, innermost first."""
        return (self.site, *self.callers) if self.site is not None else self.callers

    @property
    def lines(self) -> tuple[Location, ...]:
        """All lines that are known to have led to it, innermost first."""
        return (*self.chain, *self.above)

    @property
    def numbering(self) -> tuple[str, str]:
        """The group and the backend: each backend of a group numbers its own calls."""
        return self.group, self.backend

    @property
    def place(self) -> str:
        """Name of the group in a sentence."""
        if self.group in ("", "0"):
            return "default group"
        return f"group of ranks {self.members}" if self.members else f"group {self.group}"

    @property
    def what(self) -> str:
        """``all_reduce #9 (64 floats, default group)``."""
        if self.sequence < 0:
            return self.name
        facts = [amount(self.numel, self.dtype)] if self.numel >= 0 else []
        if self.reduce and self.reduce != "SUM":
            facts.append(self.reduce)
        if self.root >= 0:
            facts.append(f"root {self.root}")
        return f"{self.name} #{self.sequence} ({', '.join([*facts, self.place])})"


def amount(numel: int, dtype: str) -> str:
    """``64 floats``."""
    word = _WORDS.get(dtype.lower(), dtype or "element")
    if numel == 1:
        return f"1 {word}"
    return f"{numel:,} {'halves' if word == 'half' else word + 's'}"


def from_ring(recorded: Collective) -> Call:
    """Convert an entry of the ring."""
    group, _, members = recorded.group.partition("|")
    return Call(
        group=group,
        members=members,
        sequence=recorded.sequence,
        name=recorded.name,
        numel=recorded.numel,
        dtype=recorded.dtype,
        reduce=recorded.reduce,
        root=recorded.root,
        done=bool(recorded.ended),
        site=location(recorded.site),
        order=recorded.order,
        began=recorded.began,
        callers=_locations(recorded.callers),
    )


def from_flight(recorded: FlightCall) -> Call:
    """Convert an entry of torch's Flight Recorder."""
    lines = _locations(recorded.lines)
    numel = sum(map(math.prod, recorded.shapes)) if recorded.shapes else -1
    return Call(
        group=recorded.group,
        members=recorded.members,
        sequence=recorded.sequence,
        name=recorded.name.lstrip("_"),
        numel=numel if numel < _MAX_NUMEL else -1,
        dtype=recorded.dtypes[0] if recorded.dtypes else "",
        reduce="",
        root=-1,
        done=recorded.done,
        site=lines[0] if lines else None,
        order=recorded.id,
        began=recorded.created,
        backend=recorded.backend,
        callers=lines[1:],
        started=recorded.state == "started",
        timed=recorded.duration is not None,
    )


def _locations(lines: Iterable[str]) -> tuple[Location, ...]:
    return tuple(at for each in lines if (at := location(each)) is not None)


def first_pending(calls: Sequence[Call]) -> Call | None:
    """Return the first collective of a rank's Flight Recorder that is not done.

    NCCL completes the collectives of a communicator in order. An unmarked collective before a
    completed one is done, as in a captured graph.
    """
    done = {each.numbering: each.sequence for each in calls if each.done}
    for each in calls:
        unmarked = each.backend == "nccl" and done.get(each.numbering, -1) > each.sequence
        if not each.done and not unmarked:
            return each
    return None


# -- NCCL's RAS, which covers the ranks of a job on all nodes

NO_COUNTS = ("status", "error")  # Differences other than counts of operations


def unanswered_ranks(ras: Ras | None, world: int) -> frozenset[int]:
    """Return the ranks that do not respond to NCCL."""
    return frozenset(each.rank for every in _of_all(ras, world) for each in every.missing)


def ranks_behind(
    ras: Ras | None, world: int, ranks: Collection[int], ahead: Mapping[int, int]
) -> frozenset[int]:
    """Return the ranks that have not launched a collective in which others wait.

    With NCCL the waiting ranks continue. ``ahead`` is the number of operations that each has
    launched since, which do not count.
    """
    differing = [
        counts
        for communicator in _of_all(ras, world)
        if (counts := [each for each in communicator.differences if each.what not in NO_COUNTS])
    ]
    # With several communicators it is unknown which one belongs to the group that ranks wait in.
    if len(differing) != 1 or not ahead:
        return frozenset()
    return frozenset(
        rank
        for rank in ranks
        if all(_lag(differing[0], rank, other) > many for other, many in ahead.items())
    )


def _of_all(ras: Ras | None, world: int) -> Iterator[RasCommunicator]:
    """Yield the communicators of all ranks, in which ranks are numbered as in the job."""
    return (each for each in (ras.communicators if ras is not None else ()) if each.size == world)


def _lag(differences: Sequence[RasDifference], rank: int, other: int) -> int:
    """Return the number of operations by which a rank is behind another. 0 if unknown."""
    found = 0
    for each in differences:
        own, theirs = _launched(each, rank), _launched(each, other)
        if own is None or theirs is None or own > theirs:
            return 0
        found += theirs - own
    return found


def _launched(difference: RasDifference, rank: int) -> int | None:
    """Return the number of operations that a rank has launched. None if unknown."""
    for group in difference.groups:
        if rank in group.ranks:
            return whole(group.value, -1)
    unnamed = [each for each in difference.groups if not each.ranks]
    return whole(unnamed[0].value, -1) if len(unnamed) == 1 else None


# -- NCCL's messages about collectives of unequal size, as torch's watchdog prints them

UNEQUAL = (
    r"message truncated : receiving \d+ bytes instead of \d+"
    r"|collective mismatch error, local size \d+ remote size \d+"
)
"""Messages of NCCL's socket transport and of its InfiniBand transport."""

_SAID = re.compile(rf"\[rank(\d+)\]:|{UNEQUAL}")


def unequal_sizes(stderr: str) -> Iterator[str]:
    """Yield these messages as lines of evidence, one for each rank."""
    rank = ""
    said: set[str] = set()
    for match in _SAID.finditer(stderr):
        # The message does not name the rank. The line before it does.
        rank = match[1] or rank
        if match[1] is None and rank not in said:
            said.add(rank)
            words = match[0].replace(" : ", ": ")
            yield f"NCCL on rank {rank or '?'}: {words}: the ranks' collectives differ in size"

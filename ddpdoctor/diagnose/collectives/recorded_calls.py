"""Collectives that ranks called, as torch's Flight Recorder, our own ring and NCCL report them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.core.opening import integer, whole
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.source_files import location
from ddpdoctor.run.records.supervisor import Ras, RasCommunicator, RasDifference

# -- collectives that a rank called: by torch's Flight Recorder, or by our own ring


_WORDS = {
    "float32": "float", "float": "float", "float64": "double", "double": "double",
    "float16": "half", "half": "half", "bfloat16": "bfloat16", "int64": "long", "long": "long",
    "int32": "int", "int": "int", "int16": "short", "short": "short", "uint8": "byte",
    "byte": "byte", "int8": "char", "char": "char", "bool": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One collective of one rank, by torch's Flight Recorder or by our own ring."""

    group: str
    """Its name: ``0`` is the default group."""
    members: str
    """Ranks of the group, ``0-3``; empty if it is not known."""
    sequence: int
    name: str
    numel: int
    """Elements, -1 if there is no tensor or it is not known."""
    dtype: str
    reduce: str
    root: int
    done: bool
    site: Location | None
    order: int = 0
    began: int = 0
    """Unix nanoseconds."""
    backend: str = ""
    """``gloo``, where torch's Flight Recorder says so."""
    callers: tuple[Location, ...] = ()
    """The lines that led to it, the nearest first."""
    started: bool = False
    """A GPU was seen to have begun it."""
    timed: bool = False
    """Its start was recorded on the GPU, so that of later ones it would be, too."""

    @property
    def chain(self) -> tuple[Location, ...]:
        """Its line and those that led to it, innermost first."""
        return (self.site, *self.callers) if self.site is not None else self.callers

    @property
    def numbering(self) -> tuple[str, str]:
        """Whose numbers it is in: each backend of a group counts for itself."""
        return self.group, self.backend

    @property
    def place(self) -> str:
        """Which group, for a sentence."""
        if self.group in ("", "0"):
            return "default group"
        return f"group of ranks {self.members}" if self.members else f"group {self.group}"

    @property
    def what(self) -> str:
        """``all_reduce #9 (64 floats, default group)``."""
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


def from_ring(recorded: Mapping[str, Any]) -> Call:
    """A collective of the ring, read back from JSON or as it is in the file."""
    group, _, members = str(recorded.get("group") or "").partition("|")
    return Call(
        group=group,
        members=members,
        sequence=integer(recorded, "sequence"),
        name=str(recorded.get("name") or ""),
        numel=integer(recorded, "numel", -1),
        dtype=str(recorded.get("dtype") or ""),
        reduce=str(recorded.get("reduce") or ""),
        root=integer(recorded, "root", -1),
        done=bool(recorded.get("ended")),
        site=location(str(recorded.get("site") or "")),
        order=integer(recorded, "order"),
        began=integer(recorded, "began"),
        callers=tuple(at for each in _listed(recorded, "callers") if (at := location(str(each)))),
    )


def from_flight(recorded: Mapping[str, Any]) -> Call:
    """A collective of torch's Flight Recorder, as it was recorded."""
    dtypes = _listed(recorded, "dtypes") or [""]
    lines = [at for each in _listed(recorded, "lines") if (at := location(str(each))) is not None]
    return Call(
        group=str(recorded.get("group")),
        members=str(recorded.get("members") or ""),
        sequence=integer(recorded, "sequence"),
        name=str(recorded.get("name") or "").lstrip("_"),
        numel=_numel(_listed(recorded, "shapes")),
        dtype=str(dtypes[0]),
        reduce="",
        root=-1,
        done=bool(recorded.get("retired")) or recorded.get("state") == "completed",
        site=lines[0] if lines else None,
        order=integer(recorded, "id"),
        began=integer(recorded, "created"),
        backend=str(recorded.get("backend") or ""),
        callers=tuple(lines[1:]),
        started=recorded.get("state") == "started",
        timed=recorded.get("duration") is not None,
    )


def _listed(recorded: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list of a JSON object that may be damaged; an empty one if it is none."""
    found = recorded.get(key)
    return list(found) if isinstance(found, (list, tuple)) else []


def _numel(shapes: list[Any]) -> int:
    """Return how many elements tensors of these shapes have; -1 if that is not known."""
    try:
        return sum(math.prod(map(int, shape)) for shape in shapes) if shapes else -1
    except (TypeError, ValueError, OverflowError):
        return -1


def first_pending(calls: Sequence[Call]) -> Call | None:
    """The first collective of a Flight Recorder that is not done.

    NCCL does those of a communicator in their order: one that was followed by one that is done was
    forgotten, as those of a captured graph are.

    Args:
        calls: The collectives of one rank, in their order.
    """
    done = {each.numbering: each.sequence for each in calls if each.done}
    return next(
        (
            each
            for each in calls
            if not each.done
            and not (each.backend == "nccl" and done.get(each.numbering, -1) > each.sequence)
        ),
        None,
    )


# -- what NCCL's RAS knows of the ranks of a job, those of other nodes among them


NO_COUNTS = ("status", "error")
"""Differences that are not counts of operations."""


def unanswered_ranks(ras: Ras | None, world: int) -> frozenset[int]:
    """The ranks that do not answer."""
    return frozenset(
        each.rank for communicator in _of_all(ras, world) for each in communicator.missing
    )


def ranks_behind(
    ras: Ras | None, world: int, ranks: Collection[int], ahead: Mapping[int, int]
) -> frozenset[int]:
    """The ranks that have not launched a collective in which others wait.

    With NCCL these go on: what they have launched behind it does not count.

    Args:
        ras: What RAS said.
        world: The ranks of the job.
        ranks: Those that are asked about.
        ahead: The collectives that ranks which wait have launched behind that one, by rank.
    """
    differing = [
        [each for each in communicator.differences if each.what not in NO_COUNTS]
        for communicator in _of_all(ras, world)
    ]
    differing = [each for each in differing if each]
    # Of several communicators nothing says which one is the group that is waited in.
    if len(differing) != 1 or not ahead:
        return frozenset()
    return frozenset(
        rank
        for rank in ranks
        if all(_lag(differing[0], rank, other) > many for other, many in ahead.items())
    )


def _of_all(ras: Ras | None, world: int) -> Iterator[RasCommunicator]:
    """The communicators of all ranks, in which a rank has the number that it has in the job."""
    return (each for each in (ras.communicators if ras is not None else ()) if each.size == world)


def _lag(differences: Sequence[RasDifference], rank: int, other: int) -> int:
    """How many operations a rank has launched less than another; 0 if that is not known."""
    found = 0
    for each in differences:
        own, theirs = _launched(each, rank), _launched(each, other)
        if own is None or theirs is None or own > theirs:
            return 0
        found += theirs - own
    return found


def _launched(difference: RasDifference, rank: int) -> int | None:
    """How many operations a rank has launched, None if that is not known."""
    unnamed = [each for each in difference.groups if not each.ranks]
    for group in difference.groups:
        if rank in group.ranks:
            return whole(group.value, -1)
    return whole(unnamed[0].value, -1) if len(unnamed) == 1 else None


# -- what NCCL says of collectives of unequal size; torch's watchdog prints it


UNEQUAL = (
    r"message truncated : receiving \d+ bytes instead of \d+"
    r"|collective mismatch error, local size \d+ remote size \d+"
)
"""Of its socket transport, and of that for InfiniBand."""

_SAID = re.compile(rf"\[rank(\d+)\]:|{UNEQUAL}")


def unequal_sizes(stderr: str) -> Iterator[str]:
    """What it said, once for each rank, as lines of evidence."""
    rank = ""
    said: set[str] = set()
    for match in _SAID.finditer(stderr):
        # The line itself has no rank; the one that introduces it does.
        rank = match[1] or rank
        if match[1] is None and rank not in said:
            said.add(rank)
            words = match[0].replace(" : ", ": ")
            yield f"NCCL on rank {rank or '?'}: {words}: the ranks' collectives differ in size"

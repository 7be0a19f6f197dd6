"""Collectives that a rank called: by torch's Flight Recorder, or by our own ring."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.analysis.places import location
from ddpdoctor.core.finding import Location
from ddpdoctor.core.opening import integer

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

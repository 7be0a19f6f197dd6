"""Collectives that a rank called: by torch's Flight Recorder, or by our own ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpdoctor.analysis.places import location
from ddpdoctor.core.finding import Location

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
        sequence=int(recorded["sequence"]),
        name=str(recorded["name"]),
        numel=int(recorded["numel"]),
        dtype=str(recorded.get("dtype") or ""),
        reduce=str(recorded.get("reduce") or ""),
        root=int(recorded["root"]),
        done=bool(recorded["ended"]),
        site=location(str(recorded.get("site") or "")),
        order=int(recorded["order"]),
        began=int(recorded["began"]),
        callers=tuple(at for each in recorded.get("callers") or () if (at := location(str(each)))),
    )


def from_flight(recorded: Mapping[str, Any]) -> Call:
    """A collective of torch's Flight Recorder, as it was recorded."""
    shapes = recorded.get("shapes") or []
    numel = 0
    for shape in shapes:
        size = 1
        for dimension in shape:
            size *= int(dimension)
        numel += size
    dtypes = recorded.get("dtypes") or [""]
    lines = [at for each in recorded.get("lines") or () if (at := location(str(each))) is not None]
    return Call(
        group=str(recorded.get("group")),
        members=str(recorded.get("members") or ""),
        sequence=int(recorded.get("sequence") or 0),
        name=str(recorded.get("name") or "").lstrip("_"),
        numel=numel if shapes else -1,
        dtype=str(dtypes[0]),
        reduce="",
        root=-1,
        done=bool(recorded.get("retired")) or recorded.get("state") == "completed",
        site=lines[0] if lines else None,
        order=int(recorded.get("id") or 0),
        began=int(recorded.get("created") or 0),
        backend=str(recorded.get("backend") or ""),
        callers=tuple(lines[1:]),
    )


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

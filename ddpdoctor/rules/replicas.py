"""What the ranks' fingerprints say together: since when, where and how far replicas differ."""

from __future__ import annotations

import base64
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddpdoctor.finding import Location
from ddpdoctor.record import Record, integer
from ddpdoctor.run import Rank, Run

AVERAGED = "post_localSGD"
"""The communication hook under which replicas differ by design between two averagings."""


@dataclass(frozen=True)
class Difference:
    """Something that was equal on all ranks, or never, and differs from one step on.

    Attributes:
        equal: The last fingerprinted step after which it was equal, None if it never was.
        first: The first one after which it differs.
        seen: How many fingerprinted steps show it.
    """

    equal: int | None
    first: int
    seen: int

    def within(self, step: int) -> bool:
        """Whether what happened while a step was under way may be the cause."""
        return (self.equal is None or step > self.equal) and step <= self.first

    @property
    def since(self) -> str:
        """The bounds, in words."""
        if self.equal is None or self.first == self.equal + 1:
            return f"since step {self.first}"
        return f"since a step from {self.equal + 1} to {self.first}"


@dataclass(frozen=True)
class Replica:
    """A DDP module on the ranks that share it."""

    module: int
    type: str
    ranks: tuple[Rank, ...]
    names: tuple[str, ...]
    over: bool
    """No more will be written."""

    @cached_property
    def prints(self) -> dict[int, dict[int, Record]]:
        """Fingerprints by rank and step."""
        return {
            rank.rank: {
                integer(record, "step"): record
                for record in rank.of_kind("fingerprint")
                if record.get("module") == self.module
            }
            for rank in self.ranks
        }

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps of which all ranks have a fingerprint, after as many synchronized forwards."""
        prints = list(self.prints.values())
        common = set.intersection(*(set(each) for each in prints))
        return tuple(
            step
            for step in sorted(common)
            if len({integer(each[step], "armed") for each in prints}) == 1
        )

    def values(self, step: int, key: str) -> dict[int, object]:
        """What the ranks wrote under a key; empty unless all of them did."""
        found = {rank: each[step].get(key) for rank, each in self.prints.items()}
        return {} if any(value is None for value in found.values()) else found

    def difference(self, key: str, heals: bool = True) -> Difference | None:
        """Since when a value differs, if it still does and this is borne out by a second look.

        Replicas that become equal again (``heals``) are averaged on purpose.
        """
        compared = [
            (step, len({repr(value) for value in values.values()}) > 1)
            for step in self.steps
            if (values := self.values(step, key))
        ]
        first = next((index for index, (_, differs) in enumerate(compared) if differs), None)
        if first is None:
            return None
        later = [differs for _, differs in compared[first:]]
        if heals and not all(later):
            return None
        if sum(later) < 2 and not self.over:
            return None
        return Difference(compared[first - 1][0] if first else None, compared[first][0], sum(later))

    def odd(self, step: int, key: str) -> tuple[int, ...]:
        """The ranks that have another value than most; none where there is no majority."""
        return odd(self.values(step, key))

    def rich(self, since: int = 0) -> Iterator[tuple[int, dict[int, list[tuple[int, float]]]]]:
        """The rich fingerprints from a step on: per rank, hash and norm of each tensor."""
        for step in self.steps:
            if step >= since and (packed := self.values(step, "detail")):
                yield step, {rank: unpacked(str(text)) for rank, text in packed.items()}


def odd(values: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks that have another value than more than half of them."""
    counted = Counter(repr(value) for value in values.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(values):
        return ()
    return tuple(sorted(rank for rank, value in values.items() if repr(value) != counted[0][0]))


def unpacked(text: str) -> list[tuple[int, float]]:
    """The hashes and norms of a rich fingerprint."""
    try:
        return list(struct.iter_unpack("<If", base64.b64decode(text)))
    except (ValueError, struct.error):
        return []


def replicas(run: Run) -> Iterator[Replica]:
    """The DDP modules that several ranks of the last attempt share."""
    shared: dict[tuple[int, tuple[int, ...]], dict[int, tuple[Rank, Record]]] = {}
    for rank in run.last:
        told = {integer(record, "module"): record for record in rank.of_kind("tensors")}
        for module, record in told.items():
            group = group_of(record)
            if rank.rank in group and AVERAGED not in str(record.get("hook")):
                shared.setdefault((module, group), {})[rank.rank] = (rank, record)
    for (module, _), members in sorted(shared.items()):
        names = [tuple(map(str, list_of(record, "names"))) for _, record in members.values()]
        if len(members) < 2 or len(set(names)) > 1:
            continue
        first = next(iter(members.values()))[1]
        ranks = tuple(rank for rank, _ in members.values())
        over = run.exit_status is not None or all(rank.ended for rank in ranks)
        yield Replica(module, str(first.get("type", "")), ranks, names[0], over)


def group_of(record: Record) -> tuple[int, ...]:
    """The ranks that share what a record is about."""
    return tuple(each for each in list_of(record, "group") if isinstance(each, int))


def list_of(record: Record, key: str) -> list[Any]:
    """A list of a record that may be damaged."""
    value = record.get(key)
    return value if isinstance(value, list) else []


def site(rank: Rank, phase: str) -> Location | None:
    """The first line at which a rank entered a phase."""
    for record in rank.of_kind("site"):
        if record.get("phase") == phase and record.get("path"):
            return Location(str(record["path"]), integer(record, "line"))
    return None


def place(record: Record) -> Location | None:
    """The line that a record names."""
    path = record.get("path")
    return Location(str(path), integer(record, "line")) if path else None


def named(numbers: Sequence[int]) -> str:
    """Ranks in words: ``rank 1``, ``ranks 0 and 2``."""
    words = [str(number) for number in sorted(numbers)]
    if len(words) == 1:
        return f"rank {words[0]}"
    return f"ranks {', '.join(words[:-1])} and {words[-1]}"

"""The passes of the ranks over their loaders, side by side: what each of them drew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ddpdoctor.core.finding import Location
from ddpdoctor.run.record import Record, integer
from ddpdoctor.run.snapshot import Rank, Run

CLOSED = ("ended", "left")
"""States of a pass that draws no more."""

WHOLE = 0.9
"""The part of something that counts as all of it."""

SURE = 1e-6
"""Chance at most that other data would look the same by accident."""

FEW = 8
"""Samples below which an order or a split says nothing."""


@dataclass(frozen=True)
class Pass:
    """One pass of one rank over a loader, as it stood when it was last told."""

    rank: int
    record: Record
    before: tuple[Record, ...] = ()
    """The passes that the rank made over the same loader before."""

    def __getitem__(self, key: str) -> Any:
        return self.record.get(key)

    def number(self, key: str) -> int:
        """A number of the record; -1 if there is none."""
        return integer(self.record, key, -1)

    @property
    def place(self) -> tuple[object, ...]:
        """What tells the loader: where it is read, and where it was built."""
        return (self["path"], self["line"], tuple(self["made"] or ()))

    @property
    def made(self) -> Location:
        """The line that built the loader."""
        return location(self["made"]) or Location(str(self["path"]), self.number("line"))

    @property
    def trains(self) -> bool:
        """Whether its batches went into backward passes."""
        marks, fetched = self.number("marks"), self.number("fetched")
        only = marks == fetched == 1 and self["state"] == "ended"
        return (marks >= 2 or only) and 8 * marks >= fetched

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self["state"] in CLOSED

    @property
    def draws(self) -> int:
        """Samples drawn."""
        return self.number("draws")

    @property
    def length(self) -> int:
        """Samples in the data set, or in the part of it that the loader was given."""
        inner = self["subset_length"]
        return inner if isinstance(inner, int) else self.number("length")

    @cached_property
    def hits(self) -> frozenset[int]:
        """What it drew of the indices that all ranks follow."""
        return frozenset(self["hits"] or ())

    @cached_property
    def rows(self) -> dict[int, list[int]]:
        """Hashes of what samples held, by index, of this pass and those before it."""
        records = (*self.before, self.record)
        return {row[0]: row[1:] for record in records for row in record.get("rows") or ()}

    @property
    def indexed(self) -> bool:
        """Whether it drew whole numbers from an index space that is known."""
        return not self["iterable"] and not self["opaque"] and self.number("length") > 0

    @property
    def sampler(self) -> Record:
        """What the sampler says of itself."""
        said = self["sampler"]
        return said if isinstance(said, dict) else {}

    @property
    def shard(self) -> tuple[int, int] | None:
        """The sampler's own word: which of how many shards it draws; None if it has none."""
        rank, of = self.sampler.get("rank"), self.sampler.get("num_replicas")
        return (rank, of) if isinstance(rank, int) and isinstance(of, int) else None

    @property
    def at(self) -> Location:
        """The line that built the sampler, else the one that built the loader."""
        return location(self.sampler.get("made")) or self.made

    @property
    def head(self) -> tuple[int, int]:
        """How many draws at the beginning were hashed in their order, and the hash."""
        told = self["head"]
        return (told[0], told[1]) if isinstance(told, list) and len(told) == 2 else (0, 0)


Passes = dict[int, Pass]
"""The same pass on each rank of a DDP group."""


def location(place: object) -> Location | None:
    """A line of code from its record; None if there is none."""
    if isinstance(place, list) and len(place) == 2 and place[0]:
        return Location(str(place[0]), int(place[1]))
    return None


def passes_of(rank: Rank) -> list[Pass]:
    """A rank's passes, oldest first, each as it was last told."""
    told: dict[int, Record] = {}
    for record in rank.of_kind("pass"):
        number = integer(record, "pass", -1)
        told[number] = {**told.get(number, {}), **record}
    seen: dict[tuple[object, ...], tuple[Record, ...]] = {}
    found: list[Pass] = []
    for record in told.values():
        place = Pass(rank.rank, record).place
        found.append(Pass(rank.rank, record, seen.get(place, ())))
        seen[place] = (*seen.get(place, ()), record)
    return found


def groups(run: Run) -> list[tuple[Rank, ...]]:
    """The groups of ranks that DDP keeps equal; of ranks that share a model, say, only one each."""
    ranks = {rank.rank: rank for rank in run.last}
    found: dict[tuple[int, ...], None] = {}
    for rank in run.last:
        for record in rank.of_kind("ddp"):
            group = record.get("group_ranks")
            if isinstance(group, list) and len(group) > 1 and all(each in ranks for each in group):
                found[tuple(sorted(group))] = None
    return [tuple(ranks[number] for number in group) for group in found]


def matched(run: Run) -> Iterator[Passes]:
    """Passes that all ranks of a group made over the same loader after as many common steps."""
    for group in groups(run):
        by_rank: list[dict[tuple[object, ...], Pass]] = []
        for rank in group:
            count: Counter[tuple[object, ...]] = Counter()
            mine: dict[tuple[object, ...], Pass] = {}
            for each in passes_of(rank):
                key = (*each.place, each["armed"])
                counted = (*key, count[key])
                mine[counted] = each
                count[key] += 1
            by_rank.append(mine)
        for key, first in by_rank[0].items():
            if all(key in mine for mine in by_rank):
                yield {first.rank: first, **{mine[key].rank: mine[key] for mine in by_rank[1:]}}


def training(run: Run) -> Iterator[Passes]:
    """Those of them that trained on every rank, over index spaces of one length."""
    for passes in matched(run):
        each = list(passes.values())
        if (
            all(one.trains and one.indexed for one in each)
            and len({one.number("length") for one in each}) == 1
        ):
            yield passes


def same_data(passes: Passes) -> bool:
    """Whether equal indices held equal samples on all ranks, as far as ranks drew the same ones.

    Some part of the samples is enough (labels, where the images are augmented at random), if it
    varies so much that it cannot be equal by accident.
    """
    first, *others = passes.values()
    return all(_same(first, other) is True for other in others)


def other_data(passes: Passes) -> bool:
    """Whether equal indices held other samples on some rank."""
    first, *others = passes.values()
    return any(_same(first, other) is False for other in others)


def _same(one: Pass, other: Pass) -> bool | None:
    """Whether they are the same samples; None if that cannot be seen."""
    common = sorted(one.rows.keys() & other.rows.keys())
    if len(common) < 2:
        return None
    width = min(len(row) for each in (one, other) for row in each.rows.values())
    alike = False
    for column in range(width):
        if all(one.rows[index][column] == other.rows[index][column] for index in common):
            alike = True
            held = {**one.rows, **other.rows}.values()
            shares = [count / len(held) for count in Counter(row[column] for row in held).values()]
            if sum(share * share for share in shares) ** len(common) < SURE:
                return True
    return None if alike else False


def repeatable(one: Pass) -> bool | None:
    """Whether a sample that a rank drew again was the same; None if it drew none again.

    It is another one where samples are made up at random, as synthetic data are, and then two ranks
    with one seed hold the same although each has its own numbers.
    """
    held: dict[int, list[int]] = {}
    again = False
    for record in (*one.before, one.record):
        for index, *row in record.get("rows") or ():
            if held.setdefault(index, row) != row:
                return False
            again = again or row is not held[index]
    return again or None


def same_part(passes: Passes) -> bool:
    """Whether each rank was given the same subset, or none: only then are equal numbers equal."""
    return len({one["subset"] for one in passes.values()}) == 1


def same_order(passes: Passes) -> bool:
    """Whether all ranks began with the same numbers of samples in the same order."""
    heads = {each.head for each in passes.values()}
    return len(heads) == 1 and heads.pop()[0] >= FEW


def overlap(passes: Passes) -> tuple[int, int]:
    """Of the followed indices: how many draws were of those another rank drew, and all draws."""
    union = frozenset[int]().union(*(each.hits for each in passes.values()))
    total = sum(len(each.hits) for each in passes.values())
    return total - len(union), total

"""The passes of the ranks over their loaders, side by side: which samples each of them drew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import Head, PassRecord, SamplerFacts
from ddpdoctor.run.snapshot import Rank, Run

CLOSED = ("ended", "left")
"""States of a pass that draws no more."""

UNFOLLOWED = "unfollowed"
"""The state of a pass whose rest was not recorded: the overhead budget was spent."""

WHOLE = 0.9
"""The part of something that counts as all of it."""

SURE = 1e-6
"""Chance at most that other data would look the same by accident."""

NO_SAMPLER = SamplerFacts()

FEW = 8
"""Samples below which an order or a split says nothing."""


@dataclass(frozen=True)
class Pass:
    """One pass of one rank over a loader, by its newest record."""

    rank: int
    record: PassRecord
    before: tuple[PassRecord, ...] = ()
    """The passes that the rank made over the same loader before."""

    @property
    def read(self) -> Location:
        """The line that reads the loader."""
        return Location(self.record.path, self.record.line)

    @property
    def place(self) -> tuple[Location, Location | None]:
        """Which loader it is: where it is read, and where it was built."""
        return self.read, self.record.made

    @property
    def made(self) -> Location:
        """The line that built the loader."""
        return self.record.made or self.read

    @property
    def trains(self) -> bool:
        """Whether its batches went into backward passes."""
        marks, fetched = self.record.marks, self.record.fetched
        only = marks == fetched == 1 and self.record.state == "ended"
        return (marks >= 2 or only) and 8 * marks >= fetched

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self.record.state in CLOSED

    @property
    def length(self) -> int:
        """Samples in the data set, or in the part of it that the loader was given."""
        inner = self.record.subset_length
        return self.whole if inner is None else inner

    @property
    def whole(self) -> int:
        """Indices of the space that all ranks share; -1 if that is not known."""
        return -1 if self.record.length is None else self.record.length

    @cached_property
    def hits(self) -> frozenset[int]:
        """What it drew of the indices that all ranks follow."""
        return frozenset(self.record.hits)

    @cached_property
    def rows(self) -> dict[int | None, tuple[int | None, ...]]:
        """Hashes of what samples held, by index, of this pass and those before it."""
        return {row[0]: row[1:] for each in (*self.before, self.record) for row in each.rows}

    @property
    def indexed(self) -> bool:
        """Whether it drew whole numbers from an index space that is known."""
        return not self.record.iterable and not self.record.opaque and self.whole > 0

    @property
    def sampler(self) -> SamplerFacts:
        """The sampler's attributes."""
        return self.record.sampler or NO_SAMPLER

    @property
    def shard(self) -> tuple[int, int] | None:
        """Which of how many shards the sampler draws, by its attributes; None without them."""
        rank, of = self.sampler.rank, self.sampler.num_replicas
        return None if rank is None or of is None else (rank, of)

    @property
    def at(self) -> Location:
        """The line that built the sampler, else the one that built the loader."""
        return self.sampler.made or self.made

    @property
    def head(self) -> Head:
        """The draws at its beginning."""
        return self.record.head or Head(0, 0)


Passes = dict[int, Pass]
"""The same pass on each rank of a DDP group."""


def passes_of(rank: Rank) -> list[Pass]:
    """A rank's passes, oldest first, each by its newest record."""
    newest: dict[int, PassRecord] = {}
    for record in rank.records.of(PassRecord):
        older = newest.get(record.pass_)
        # Its loop is described in one of the records only.
        newest[record.pass_] = (
            record if older is None else replace(record, to_end=record.to_end or older.to_end)
        )
    seen: dict[object, tuple[PassRecord, ...]] = {}
    found: list[Pass] = []
    for record in newest.values():
        place = Pass(rank.rank, record).place
        found.append(Pass(rank.rank, record, seen.get(place, ())))
        seen[place] = (*seen.get(place, ()), record)
    return found


def groups(run: Run) -> list[tuple[Rank, ...]]:
    """The groups of ranks that DDP keeps equal; of ranks that share a model, say, only one each."""
    ranks = {rank.rank: rank for rank in run.last}
    found: dict[tuple[int, ...], None] = {}
    for rank in run.last:
        for record in rank.records.of(DdpRecord):
            group = record.group_ranks
            if len(group) > 1 and all(each in ranks for each in group):
                found[tuple(sorted(group))] = None
    return [tuple(ranks[number] for number in group) for group in found]


def matched(run: Run) -> Iterator[Passes]:
    """Passes that all ranks of a group made over the same loader after as many common steps."""
    for group in groups(run):
        # By its number: of the passes of one rank, others may not have been followed.
        by_rank = [
            {(each.place, each.record.armed, each.record.number): each for each in passes_of(rank)}
            for rank in group
        ]
        for which, first in by_rank[0].items():
            if all(which in mine for mine in by_rank):
                yield {first.rank: first, **{mine[which].rank: mine[which] for mine in by_rank[1:]}}


def training(run: Run) -> Iterator[Passes]:
    """Those of them that trained on every rank, over index spaces of one length."""
    for passes in matched(run):
        each = list(passes.values())
        if (
            all(one.trains and one.indexed for one in each)
            and len({one.whole for one in each}) == 1
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
    common = one.rows.keys() & other.rows.keys()
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
    held: dict[int | None, tuple[int | None, ...]] = {}
    again = False
    for record in (*one.before, one.record):
        for index, *row in record.rows:
            again = again or index in held
            if held.setdefault(index, tuple(row)) != tuple(row):
                return False
    return again or None


def same_part(passes: Passes) -> bool:
    """Whether each rank was given the same subset, or none: only then are equal numbers equal."""
    return len({one.record.subset for one in passes.values()}) == 1


def same_order(passes: Passes) -> bool:
    """Whether all ranks began with the same numbers of samples in the same order."""
    heads = {each.head for each in passes.values()}
    return len(heads) == 1 and heads.pop()[0] >= FEW


def overlap(passes: Passes) -> tuple[int, int]:
    """Of the followed indices: how many draws were of those another rank drew, and all draws."""
    union = frozenset[int]().union(*(each.hits for each in passes.values()))
    total = sum(len(each.hits) for each in passes.values())
    return total - len(union), total

"""Since when, where and how far replicas differ by their fingerprints, and what changed them."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ddpdoctor.run.records.model import (
    CutRecord,
    ElementsRecord,
    FingerprintRecord,
    IndexedTensor,
    LoadRecord,
    OutsideRecord,
    PackedTensor,
    ResumeRecord,
    TensorsRecord,
    TogetherRecord,
)
from ddpdoctor.run.records.supervisor import SuspicionRecord
from ddpdoctor.run.snapshot import Rank, Run

# -- what the ranks' fingerprints say together: since when, where and how far replicas differ


FINGERPRINT_PATIENCE = 2.5
"""Seconds that a finding waits for what ranks were asked for; they are asked twice at most."""

LOCAL = 1000
"""Steps without an all-reduce that a local SGD may take until its first averaging."""

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
    asked: bool = False
    """Ranks were asked a moment ago for elements of tensors that differ."""

    @cached_property
    def prints(self) -> dict[int, dict[int, FingerprintRecord]]:
        """Fingerprints by rank and step."""
        return {
            rank.rank: {
                record.step: record
                for record in rank.records.of(FingerprintRecord)
                if record.module == self.module
            }
            for rank in self.ranks
        }

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """The steps of which all ranks have a fingerprint, after as many synchronized forwards."""
        prints = list(self.prints.values())
        common = set.intersection(*(set(each) for each in prints))
        return tuple(
            step for step in sorted(common) if len({each[step].armed for each in prints}) == 1
        )

    def values(self, step: int, key: str) -> dict[int, object]:
        """What the ranks wrote in a field; empty unless all of them did."""
        found = {rank: getattr(each[step], key) for rank, each in self.prints.items()}
        return {} if any(value is None for value in found.values()) else found

    def difference(self, key: str, heals: bool = True) -> Difference | None:
        """Since when a value differs, if it still does and this is borne out by a second look.

        Replicas that become equal again (``heals``), be it between two steps, are averaged on
        purpose.
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
        if heals and (not all(later) or together(self.ranks, self.module, compared[first][0])):
            return None
        if sum(later) < 2 and not self.over:
            return None
        return Difference(compared[first - 1][0] if first else None, compared[first][0], sum(later))

    def lasts(self, difference: Difference) -> bool:
        """Whether a difference of a live job is no pause between two averagings.

        Without an all-reduce replicas differ at once; whoever means it so averages them later.
        """
        before = -1 if difference.equal is None else difference.equal
        armed = [
            each[difference.first].armed - (each[before].armed if before in each else 0)
            for each in self.prints.values()
        ]
        reduced = min(armed) >= difference.first - before
        return self.over or reduced or self.steps[-1] - difference.first >= LOCAL

    def odd(self, step: int, key: str) -> tuple[int, ...]:
        """The ranks that have another value than most; none where there is no majority."""
        return odd(self.values(step, key))

    def rich(self, since: int = 0) -> Iterator[tuple[int, dict[int, list[tuple[int, float]]]]]:
        """The rich fingerprints from a step on: per rank, hash and norm of each tensor."""
        for step in self.steps:
            if step >= since and (packed := self.values(step, "detail")):
                yield step, {rank: unpacked(str(text)) for rank, text in packed.items()}

    @cached_property
    def distances(self) -> tuple[Distance, ...]:
        """How far tensors differ, by the elements that all ranks wrote of the same step."""
        written = [
            {
                (record.step, record.armed): {each.place: each for each in record.tensors}
                for record in rank.records.of(ElementsRecord)
                if record.module == self.module
            }
            for rank in self.ranks
        ]
        common = set.intersection(*(set(each) for each in written))
        return tuple(
            distance
            for key in sorted(common)
            for distance in self._compared(key[0], [each[key] for each in written])
        )

    def _compared(self, step: int, written: list[dict[int, IndexedTensor]]) -> Iterator[Distance]:
        ranks = [rank.rank for rank in self.ranks]
        for place in sorted(set.intersection(*(set(each) for each in written))):
            tensors = [each[place] for each in written]
            values = [elements(each) for each in tensors]
            lengths, counts = {len(each) for each in values}, {each.elements for each in tensors}
            if 0 <= place < len(self.names) and len(lengths) == len(counts) == 1 and any(lengths):
                yield _distance(self.names[place], step, counts.pop(), values, ranks)


def together(ranks: Sequence[Rank], module: int, since: int) -> bool:
    """Whether a module's replicas were made equal by collectives after a step, or may have been."""
    if any(rank.lost for rank in ranks):
        return True
    seen = [
        {
            (record.step, record.armed): record.parameters
            for record in rank.records.of(TogetherRecord)
            if record.module == module and record.step >= since
        }
        for rank in ranks
    ]
    if not seen:
        return False
    common = set.intersection(*(set(each) for each in seen))
    # A rank that could not pay for the look has only said that there was something to see.
    return any(
        len(hashes) == 1 or None in hashes
        for hashes in ({each[key] for each in seen} for key in common)
    )


@dataclass(frozen=True)
class Distance:
    """How far a tensor differs between ranks.

    Attributes:
        name: The tensor.
        step: The step after which.
        most: The largest difference of two finite elements at the same place; 0 if none differ.
        ranks: The two ranks that it is between.
        looked: How many elements were looked at.
        count: How many the tensor has.
    """

    name: str
    step: int
    most: float
    ranks: tuple[int, int]
    looked: int
    count: int


def _distance(
    name: str, step: int, count: int, values: list[tuple[float, ...]], ranks: list[int]
) -> Distance:
    most, between = 0.0, (ranks[0], ranks[0])
    for place in zip(*values, strict=True):
        finite = [pair for pair in zip(place, ranks, strict=True) if math.isfinite(pair[0])]
        if len(finite) < 2:
            continue
        (low, below), (high, above) = min(finite), max(finite)
        if high - low > most:
            most, between = high - low, (min(below, above), max(below, above))
    return Distance(name, step, most, between, len(values[0]), count)


def elements(packed: PackedTensor | IndexedTensor) -> tuple[float, ...]:
    """The elements that a rank packed; empty if they are damaged."""
    size = {"f": 4, "d": 8}.get(packed.format)
    try:
        data = base64.b64decode(packed.data)
        return struct.unpack(f"<{len(data) // (size or 1)}{packed.format}", data) if size else ()
    except (ValueError, TypeError, struct.error):
        return ()


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
    shared: dict[tuple[int, tuple[int, ...]], dict[int, tuple[Rank, TensorsRecord]]] = {}
    for rank in run.last:
        newest = {record.module: record for record in rank.records.of(TensorsRecord)}
        for module, record in newest.items():
            if rank.rank in record.group and AVERAGED not in (record.hook or ""):
                shared.setdefault((module, record.group), {})[rank.rank] = (rank, record)
    for (module, _), members in sorted(shared.items()):
        first = next(iter(members.values()))[1]
        if len(members) < 2 or len({record.names for _, record in members.values()}) > 1:
            continue
        ranks = tuple(rank for rank, _ in members.values())
        over = run.exit_status is not None or all(rank.ended for rank in ranks)
        asked = not over and any(
            record.module == module
            and record.restart == run.restarts[-1]
            and run.taken - record.time < FINGERPRINT_PATIENCE * 1e9
            for record in run.supervisor.of(SuspicionRecord)
        )
        yield Replica(module, first.type, ranks, first.names, over, asked)


# -- what changed parameters, hyper-parameters or states between two fingerprints of the ranks


HYPER = ("lr", "momentum", "betas", "weight_decay")
"""The hyper-parameters of a parameter group, in the order of fingerprints."""

_Loaded = TypeVar("_Loaded", LoadRecord, ResumeRecord)


def is_between(record: OutsideRecord, replica: Replica, difference: Difference) -> bool:
    """Whether a record of changed parameters falls between the last equality and the difference."""
    return record.module == replica.module and difference.within(record.step + 1)


def awaits_distances(replica: Replica) -> bool:
    """Whether ranks are about to report how far they differ; a finding waits a little for it."""
    return replica.asked and not replica.distances


def gradients_since(replica: Replica, difference: Difference, step: int) -> dict[int, object]:
    """The hashes of the gradients in a step from the difference on, where they are known."""
    return replica.values(step, "gradients") if step >= difference.first else {}


def rank_only_changes(
    replica: Replica, difference: Difference
) -> Mapping[int, LoadRecord | OutsideRecord]:
    """The ranks that changed weights when the others did not, with the record that says so."""
    loads = {
        rank.rank: [
            record
            for record in rank.records.of(LoadRecord)
            if record.module == replica.module and difference.within(record.step)
        ]
        for rank in replica.ranks
    }
    loaded = _loaded_most(loads)
    if loaded:
        return loaded if len(loaded) < len(replica.ranks) else {}
    changed = {
        rank.rank: record
        for rank in replica.ranks
        for record in rank.records.of(OutsideRecord)
        if is_between(record, replica, difference)
    }
    # A rank sees such a change only behind a fingerprint, and ranks differ in their pace.
    looked = all(
        step < 0 or step in prints
        for step in {record.step for record in changed.values()}
        for prints in replica.prints.values()
    )
    return changed if looked and len(changed) < len(replica.ranks) else {}


def resumed_alone(replica: Replica) -> tuple[Difference, dict[int, ResumeRecord]] | None:
    """Since when the state differs, and which ranks alone had loaded one before."""
    difference = replica.difference("state")
    if difference is None:
        return None
    loads = {
        rank.rank: [
            record for record in rank.records.of(ResumeRecord) if difference.within(record.step)
        ]
        for rank in replica.ranks
    }
    loaded = _loaded_most(loads)
    return (difference, loaded) if loaded and len(loaded) < len(replica.ranks) else None


def _loaded_most(loads: Mapping[int, Sequence[_Loaded]]) -> dict[int, _Loaded]:
    """The ranks that loaded most often, with their last load; none if no rank loaded."""
    most = max(len(each) for each in loads.values())
    return {rank: each[-1] for rank, each in loads.items() if each and len(each) == most}


HyperPlace = tuple[int, int, int]
"""Optimizer, parameter group and index in `HYPER`."""


def hyper_difference(replica: Replica) -> tuple[Difference, HyperPlace] | None:
    """The first hyper-parameter that differs."""
    difference = replica.difference("hyper", heals=False)
    if difference is None:
        return None
    values = list(replica.values(difference.first, "hyper").values())
    for optimizer, group, index in _places(values[0]):
        found = [value_at(value, optimizer, group, index) for value in values]
        if None not in found and len({repr(each) for each in found}) > 1:
            return difference, (optimizer, group, index)
    return None


def _places(hyper: object) -> Iterator[HyperPlace]:
    for optimizer, groups in enumerate(hyper if isinstance(hyper, tuple) else ()):
        for group, _ in enumerate(groups):
            for index, _ in enumerate(HYPER):
                yield optimizer, group, index


def value_at(hyper: object, optimizer: int, group: int, index: int) -> object:
    """One of a fingerprint's hyper-parameters; None if it has no such one."""
    try:
        return hyper[optimizer][group][index]  # type: ignore[index]
    except (LookupError, TypeError):
        return None


def who_changed(
    replica: Replica, difference: Difference, optimizer: int, group: int, index: int
) -> tuple[int, ...]:
    """The ranks whose value is no more what it was on all of them."""
    if difference.equal is None:
        return ()
    before = replica.values(difference.equal, "hyper")
    after = replica.values(difference.first, "hyper")
    return tuple(
        rank
        for rank in sorted(after)
        if value_at(before.get(rank), optimizer, group, index)
        != value_at(after[rank], optimizer, group, index)
    )


def cuts(replica: Replica, difference: Difference) -> Iterator[tuple[int, CutRecord]]:
    """The learning rates that schedulers cut when they became different, each with its rank."""
    for rank in replica.ranks:
        for record in rank.records.of(CutRecord):
            if difference.within(record.step):
                yield rank.rank, record


def last_cut(replica: Replica, difference: Difference, guilty: tuple[int, ...]) -> CutRecord | None:
    """The moment in which a scheduler cut a guilty rank's learning rate."""
    found = [record for rank, record in cuts(replica, difference) if rank in guilty]
    return found[-1] if found else None

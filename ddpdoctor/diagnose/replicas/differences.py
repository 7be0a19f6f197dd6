"""Find the step from which replicas differ, the tensors, the distances, and the cause."""

from __future__ import annotations

import base64
import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from ddpdoctor.diagnose.source_operations import averaging_pending
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.model import (
    BuffersRecord,
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

FINGERPRINT_PATIENCE = 2.5
"""Seconds for which a finding waits for requested records. Ranks are asked at most twice."""
LOCAL_STEPS = 1000
"""Maximum number of steps without an all-reduce before the first averaging of local SGD."""

AVERAGED = "post_localSGD"
"""The communication hook under which replicas differ by design between two averagings."""

HYPER = ("lr", "momentum", "betas", "weight_decay")
"""The hyper-parameters of a parameter group, in the order of fingerprints."""

HyperPlace = tuple[int, int, int]  # Optimizer, parameter group and index in `HYPER`

_AtStep = TypeVar("_AtStep", TogetherRecord, ElementsRecord, BuffersRecord)
_Loaded = TypeVar("_Loaded", LoadRecord, ResumeRecord)


def common_records(
    ranks: Sequence[Rank], declared: type[_AtStep], module: int
) -> dict[tuple[int, int], list[_AtStep]]:
    """Return the records of all ranks about a module by time, oldest first.

    The time is the step and the number of synchronized forwards.
    """
    written = [
        {
            (record.step, record.armed): record
            for record in rank.records.of(declared)
            if record.module == module
        }
        for rank in ranks
    ]
    common = set.intersection(*map(set, written)) if written else set()
    return {key: [each[key] for each in written] for key in sorted(common)}


@dataclass(frozen=True)
class Difference:
    """A value that differs between ranks from one step on."""

    equal: int | None  # The last fingerprinted step after which it was equal; None if it never was
    first: int  # The first fingerprinted step after which it differs
    seen: int  # The number of fingerprinted steps that show it

    def within(self, step: int) -> bool:
        """Return whether an event in a step may be the cause."""
        return (self.equal is None or step > self.equal) and step <= self.first

    @property
    def since(self) -> str:
        """The start of the difference, in words."""
        if self.equal is None or self.first == self.equal + 1:
            return f"since step {self.first}"
        return f"since a step from {self.equal + 1} to {self.first}"


@dataclass(frozen=True)
class Distance:
    """The difference of a tensor between ranks."""

    name: str
    step: int
    most: float  # The largest difference of two finite elements at one index; 0 if none differ
    ranks: tuple[int, int]  # The two ranks with that difference
    looked: int  # The number of elements that were compared
    count: int  # The number of elements in the tensor


@dataclass(frozen=True)
class Replica:
    """A DDP module on the ranks that share it."""

    module: int
    type: str
    ranks: tuple[Rank, ...]
    names: tuple[str, ...]
    over: bool  # Whether the ranks have ended
    asked: bool = False  # Whether elements of differing tensors were just requested

    @cached_property
    def prints(self) -> dict[int, dict[int, FingerprintRecord]]:
        """The fingerprints by rank and step."""
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
        """Steps with a fingerprint of each rank after the same number of synchronized forwards."""
        prints = list(self.prints.values())
        common = set.intersection(*map(set, prints))
        return tuple(
            step for step in sorted(common) if len({each[step].armed for each in prints}) == 1
        )

    def values(self, step: int, key: str) -> dict[int, object]:
        """Return a field of the ranks' records by rank. Empty unless all ranks have it."""
        found = {rank: getattr(each[step], key) for rank, each in self.prints.items()}
        return {} if any(value is None for value in found.values()) else found

    def difference(self, key: str, heals: bool = True) -> Difference | None:
        """Return the difference of a value if it still exists and a second fingerprint shows it.

        With ``heals``, replicas that become equal again, even between two steps, count as averaged
        on purpose.
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
        """Return whether a difference lasts longer than the time between two averagings.

        Without an all-reduce, replicas differ at once, and the job may average them later.
        """
        before = -1 if difference.equal is None else difference.equal
        armed = [
            each[difference.first].armed - (each[before].armed if before in each else 0)
            for each in self.prints.values()
        ]
        reduced = min(armed) >= difference.first - before
        return self.over or reduced or self.steps[-1] - difference.first >= LOCAL_STEPS

    def odd(self, step: int, key: str) -> tuple[int, ...]:
        """Return the ranks whose value differs from that of the majority, if there is one."""
        return odd(self.values(step, key))

    def rich(self, since: int = 0) -> Iterator[tuple[int, dict[int, list[tuple[int, float]]]]]:
        """Yield steps with each rank's hash and norm of each tensor, where these were written."""
        for step in self.steps:
            if step >= since and (packed := self.values(step, "detail")):
                yield step, {rank: unpacked(str(text)) for rank, text in packed.items()}

    @cached_property
    def distances(self) -> tuple[Distance, ...]:
        """The differences of tensors, by elements that all ranks recorded in the same step."""
        found: list[Distance] = []
        for (step, _), records in common_records(self.ranks, ElementsRecord, self.module).items():
            written = [{each.place: each for each in record.tensors} for record in records]
            for place in sorted(set.intersection(*map(set, written))):
                values = [elements(each[place]) for each in written]
                counts = {each[place].elements for each in written}
                alike = len(counts) == len(set(map(len, values))) == 1 and values[0]
                if alike and 0 <= place < len(self.names):
                    found.append(self._distance(self.names[place], step, counts.pop(), values))
        return tuple(found)

    def _distance(
        self, name: str, step: int, count: int, values: list[tuple[float, ...]]
    ) -> Distance:
        ranks = [rank.rank for rank in self.ranks]
        most, between = 0.0, (ranks[0], ranks[0])
        for place in zip(*values, strict=True):
            finite = [pair for pair in zip(place, ranks, strict=True) if math.isfinite(pair[0])]
            if len(finite) < 2:
                continue
            (low, below), (high, above) = min(finite), max(finite)
            if high - low > most:
                most, between = high - low, (min(below, above), max(below, above))
        return Distance(name, step, most, between, len(values[0]), count)


def together(ranks: Sequence[Rank], module: int, since: int) -> bool:
    """Return whether collectives made replicas equal after a step, or may have done so."""
    if not all(rank.watched(TogetherRecord) for rank in ranks):
        return True
    hashes = (
        {record.parameters for record in records}
        for (step, _), records in common_records(ranks, TogetherRecord, module).items()
        if step >= since
    )
    # None means that a rank had no budget to compute the hash.
    return any(len(each) == 1 or None in each for each in hashes)


def elements(packed: PackedTensor | IndexedTensor) -> tuple[float, ...]:
    """Unpack the elements that a rank recorded. Empty if they are damaged."""
    size = {"f": 4, "d": 8}.get(packed.format)
    try:
        data = base64.b64decode(packed.data)
        return struct.unpack(f"<{len(data) // (size or 1)}{packed.format}", data) if size else ()
    except (ValueError, TypeError, struct.error):
        return ()


def odd(values: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks whose value differs from that of more than half of them."""
    counted = Counter(repr(value) for value in values.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(values):
        return ()
    return tuple(sorted(rank for rank, value in values.items() if repr(value) != counted[0][0]))


def unpacked(text: str) -> list[tuple[int, float]]:
    """Unpack the hashes and norms of a rich fingerprint. Empty if they are damaged."""
    try:
        return list(struct.iter_unpack("<If", base64.b64decode(text)))
    except (ValueError, struct.error):
        return []


def replicas(run: Run) -> Iterator[Replica]:
    """Yield the DDP modules that several ranks of the last attempt share."""
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


# -- changes between two fingerprints


def is_between(record: OutsideRecord, replica: Replica, difference: Difference) -> bool:
    """Return whether a change outside of steps falls between the last equality and a difference."""
    return record.module == replica.module and difference.within(record.step + 1)


def awaits_distances(replica: Replica) -> bool:
    """Return whether ranks will soon report their differences, which a finding waits for."""
    return replica.asked and not replica.distances


def lasting_difference(run: Run, replica: Replica) -> Difference | None:
    """Return the difference of parameters. None if it may be intended or is being examined."""
    difference = replica.difference("parameters")
    if difference is None or awaits_distances(replica):
        return None
    return difference if not averaging_pending(run) and replica.lasts(difference) else None


def rank_only_changes(
    replica: Replica, difference: Difference
) -> Mapping[int, LoadRecord | OutsideRecord]:
    """Return the ranks that changed weights while others did not, each with its record."""
    loads = {
        rank.rank: [
            record
            for record in rank.records.of(LoadRecord)
            if record.module == replica.module and difference.within(record.step)
        ]
        for rank in replica.ranks
    }
    loaded = _loaded_most(loads)
    if loaded or not _watched(replica, LoadRecord, OutsideRecord):
        return loaded if _alone(replica, LoadRecord, loaded) else {}
    changed = {
        rank.rank: record
        for rank in replica.ranks
        for record in rank.records.of(OutsideRecord)
        if is_between(record, replica, difference)
    }
    # A rank notices such a change only after a fingerprint, and ranks have different intervals.
    looked = all(
        step < 0 or step in prints
        for step in {record.step for record in changed.values()}
        for prints in replica.prints.values()
    )
    return changed if looked and len(changed) < len(replica.ranks) else {}


def resumed_alone(replica: Replica) -> tuple[Difference, dict[int, ResumeRecord]] | None:
    """Return the difference of the optimizer's state, and the ranks that alone loaded one."""
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
    return (difference, loaded) if _alone(replica, ResumeRecord, loaded) else None


def _watched(replica: Replica, *declared: type[Record]) -> bool:
    return all(rank.watched(*declared) for rank in replica.ranks)


def _alone(replica: Replica, declared: type[Record], who: Mapping[int, object]) -> bool:
    """Return whether some ranks did something that the others certainly did not do."""
    return 0 < len(who) < len(replica.ranks) and _watched(replica, declared)


def _loaded_most(loads: Mapping[int, Sequence[_Loaded]]) -> dict[int, _Loaded]:
    """Return the ranks that loaded most often, with their last load. Empty if no rank loaded."""
    most = max(len(each) for each in loads.values())
    return {rank: each[-1] for rank, each in loads.items() if each and len(each) == most}


def hyper_values(replica: Replica, step: int, place: HyperPlace) -> dict[int, object]:
    """Return one hyper-parameter after a step, by rank. None for ranks without it."""
    return {rank: _flat(value).get(place) for rank, value in replica.values(step, "hyper").items()}


def _flat(hyper: object) -> dict[HyperPlace, object]:
    return {
        (optimizer, group, index): value
        for optimizer, groups in enumerate(hyper if isinstance(hyper, tuple) else ())
        for group, values in enumerate(groups)
        for index, value in enumerate(values[: len(HYPER)])
    }


def hyper_difference(replica: Replica) -> tuple[Difference, HyperPlace] | None:
    """Return the first difference of a hyper-parameter, and its place."""
    difference = replica.difference("hyper", heals=False)
    if difference is None:
        return None
    for place in _flat(next(iter(replica.values(difference.first, "hyper").values()))):
        found = hyper_values(replica, difference.first, place).values()
        if None not in found and len({repr(each) for each in found}) > 1:
            return difference, place
    return None


def who_changed(replica: Replica, difference: Difference, place: HyperPlace) -> tuple[int, ...]:
    """Return the ranks whose hyper-parameter changed from the common value."""
    if difference.equal is None:
        return ()
    before = hyper_values(replica, difference.equal, place)
    after = hyper_values(replica, difference.first, place)
    return tuple(rank for rank in sorted(after) if before.get(rank) != after[rank])


def cuts(replica: Replica, difference: Difference) -> list[tuple[int, CutRecord]]:
    """Return the cuts by schedulers at the time when learning rates became different, by rank."""
    return [
        (rank.rank, record)
        for rank in replica.ranks
        for record in rank.records.of(CutRecord)
        if difference.within(record.step)
    ]


_REFUSALS = ("DDP expects same model across all ranks", "appears not to match")
"""DDP's messages about different numbers or shapes of parameters, raised on some ranks."""


def is_refusal(error: str) -> bool:
    """Return whether an exception is DDP's refusal of models that differ."""
    return any(each in error for each in _REFUSALS)

"""What changed parameters, hyper-parameters or states between two fingerprints of the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

from ddpdoctor.analysis.replicas import Difference, Replica
from ddpdoctor.run.records.replicas import CutRecord, LoadRecord, OutsideRecord, ResumeRecord

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


Place = tuple[int, int, int]
"""Optimizer, parameter group and index in `HYPER`."""


def hyper_difference(replica: Replica) -> tuple[Difference, Place] | None:
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


def _places(hyper: object) -> Iterator[Place]:
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

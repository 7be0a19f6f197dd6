"""Data (DDP103): epochs that repeat the order of the one before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ddpdoctor.analysis.draws import FEW, Pass, passes_of
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.run.snapshot import Run


@rule("DDP103", "missing-set-epoch", Severity.WARNING)
def order_repeated(run: Run) -> Iterator[Finding]:
    """Every epoch draws the same samples in the same order.

    What it finds
        A shuffling sampler with a `set_epoch` method that gave a training loader exactly the same
        samples in the same order in two consecutive passes.

    Why it is bad
        `DistributedSampler` derives the order from its seed and the epoch number only. If the
        number does not change, every epoch repeats the same batches, and no rank ever sees the
        other ranks' samples.

    How to fix it
        Call `set_epoch(epoch)` on the sampler that the loader uses, before the loop over the
        loader.

    Example
        Wrong:
            for epoch in range(9):
                train(loader)
        Right:
            for epoch in range(9):
                sampler.set_epoch(epoch)
                train(loader)

    When it stays silent
        With `shuffle=False`, for samples in ascending order, for samplers without `set_epoch`, in
        the first epoch, for evaluation loaders, and if the order changed in any other way.
    """
    compared: dict[object, dict[int, tuple[Pass, Pass] | None]] = {}
    for rank in run.last:
        loaders: dict[object, list[Pass]] = {}
        for one in passes_of(rank):
            loaders.setdefault(one.place, []).append(one)
        for place, passes in loaders.items():
            for pair in pairwise(passes):
                if _comparable(*pair):
                    compared.setdefault(place, {})[rank.rank] = pair if _repeats(*pair) else None
                    break
    for found in compared.values():
        sick = {number: pair for number, pair in found.items() if pair is not None}
        if len(found) < len(run.last) or not sick:
            continue
        before, again = sick[min(sick)]
        at, epoch, sampler = again.read, again.sampler.epoch, again.sampler.name or "no sampler"
        evidence = [
            f"passes {before.record.number + 1} and {again.record.number + 1} over it gave "
            f"the same {before.head[0]} samples first, in the same order",
            f"{sampler} built at {again.at}",
        ]
        if epoch is not None:
            evidence.append(f"its epoch was {before.sampler.epoch}, then {epoch}")
        whose = "every rank" if len(sick) == len(run.last) else named(sick)
        yield Finding(
            code="DDP103",
            about=str(at),
            severity=Severity.WARNING,
            message=f"{whose} draws the same samples in the same order in each epoch at {at}: "
            f"set_epoch does not reach the loader's {sampler}",
            ranks=tuple(sorted(sick)),
            location=at,
            evidence=tuple(evidence),
            fix="Call set_epoch(epoch) with the epoch's number, on the sampler of this loader, at "
            "the top of the epoch loop.",
        )


def _comparable(before: Pass, again: Pass) -> bool:
    """Whether two passes follow each other with one shuffling sampler."""
    sampler = before.sampler
    return (
        before.trains
        and again.trains
        and again.record.number == before.record.number + 1
        and sampler.id is not None
        and sampler.id == again.sampler.id
        and sampler.set_epoch
        and sampler.shuffle is not False
        and before.head[0] == again.head[0] >= FEW
        and 0.2 < before.record.falls / max(1, before.record.draws) < 0.9
    )


def _repeats(before: Pass, again: Pass) -> bool:
    one, other = before.record, again.record
    if one.state == other.state == "ended" and one.draws == other.draws:
        return one.order == other.order
    return before.head == again.head

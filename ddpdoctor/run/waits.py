"""How long ranks wait for each other in backwards that DDP did not time.

On a GPU, DDP times every hundredth backward; on a CPU, some of the short ones. In all of them the
rank that the others wait for does not wait itself: what their backward takes longer than the
shortest one is their wait. A rank whose backward itself is slow is not found this way; DDP's timers
have to show it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.records.training import StepRecord
from ddpdoctor.run.snapshot import Rank, Run


def on_gpu(rank: Rank) -> bool:
    """Whether the rank's steps were timed on a GPU."""
    return any(record.device.startswith("cuda") for record in rank.records.of(DdpRecord))


def together(ranks: Sequence[Rank]) -> list[tuple[Rank, ...]]:
    """The ranks whose backwards end together, by DDP group; groups of one are left out."""
    groups: dict[tuple[int, ...], list[Rank]] = {}
    for rank in ranks:
        reduced = {record.group_ranks for record in rank.records.of(DdpRecord)}
        if len(reduced) == 1:
            groups.setdefault(next(iter(reduced)), []).append(rank)
    return [
        tuple(found)
        for group, found in groups.items()
        if len(found) > 1 and {rank.rank for rank in found} <= set(group)
    ]


def split_steps(run: Run) -> dict[int, tuple[StepRecord, ...]]:
    """The newest steps of the ranks of the last attempt, split as far as possible."""
    return split(run.last, {rank.rank: rank.steps for rank in run.last})


def split(
    ranks: Sequence[Rank], steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split the backwards that DDP did not time into compute and wait.

    Args:
        ranks: The ranks.
        steps: Their steps by rank.
        lines: These are lines of the journals, which may stand for several steps.
    """
    found = {number: tuple(each) for number, each in steps.items()}
    for group in together(ranks):
        found |= compared({rank.rank: found[rank.rank] for rank in group}, lines=lines)
    return found


def compared(
    steps: Mapping[int, Sequence[StepRecord]], *, lines: bool = False
) -> dict[int, tuple[StepRecord, ...]]:
    """Split the backwards of ranks that reduce together, in the steps that all of them have.

    Args:
        steps: Steps by rank.
        lines: As :func:`split` has it.
    """
    took = {
        # How long the backward of each step took, waits included, where it was reduced.
        rank: {
            number: each.backward + each.wait
            for each in found
            if each.wait or not each.split
            for number in _numbers(each, lines)
        }
        for rank, found in steps.items()
    }
    common = set.intersection(*(set(each) for each in took.values()))
    least = {number: min(each[number] for each in took.values()) for number in common}
    return {
        rank: tuple(_waited(each, _numbers(each, lines), least) for each in found)
        for rank, found in steps.items()
    }


def _numbers(line: StepRecord, lines: bool) -> range:
    return range(max(0, line.step + 1 - (line.steps if lines else 1)), line.step + 1)


def _waited(line: StepRecord, numbers: range, least: Mapping[int, int]) -> StepRecord:
    if line.split or not all(number in least for number in numbers):
        return line
    compute = sum(least[number] for number in numbers) // len(numbers)
    wait = line.backward + line.wait - compute
    return replace(line, backward=compute, wait=wait, split=True)

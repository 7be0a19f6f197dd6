"""Which runs are made, in which order: sizes, variants of the job, repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpdoctor.core.units import count
from ddpdoctor.run.overrides import DDP, KNOWN


class Size(NamedTuple):
    """How many ranks, and where."""

    nodes: int
    local: int
    """Ranks on each node."""

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.nodes * self.local

    @property
    def words(self) -> str:
        """``4 ranks``, ``4 ranks on 2 nodes``."""
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{count(self.ranks, 'rank')}{on}"

    @property
    def short(self) -> str:
        """``4``, or ``2x8`` for two nodes with eight each."""
        return f"{self.nodes}x{self.local}" if self.nodes > 1 else str(self.local)

    @property
    def order(self) -> tuple[int, int]:
        """By ranks, and then by nodes."""
        return self.ranks, self.nodes


@dataclass(frozen=True)
class Variant:
    """The job as it is, or with arguments of torch's overridden."""

    name: str = ""
    """``bucket_cap_mb=25``; empty for the job as it is."""
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether it is about communication alone, of which one rank has none."""
        return all(KNOWN[name].owner == DDP for name in self.overrides)


AS_IT_IS = Variant()


class Planned(NamedTuple):
    """One run."""

    number: int
    """From 1, in order; the same on every node."""
    size: Size
    variant: Variant
    repeat: int
    """From 1."""

    @property
    def words(self) -> str:
        """``2 ranks, bucket_cap_mb=25``."""
        return f"{self.size.words}, {self.variant.name}" if self.variant.name else self.size.words

    @property
    def directory(self) -> str:
        """The name of its directory."""
        variant = f"-{self.variant.name}" if self.variant.name else ""
        return f"{self.number:03d}-ranks-{self.size.short}{variant}"


def sizes(nodes: Sequence[int], local: Sequence[int]) -> list[Size]:
    """All sizes, the smallest first."""
    return sorted((Size(n, each) for n in nodes for each in local), key=lambda size: size.order)


def variants(
    tried: Sequence[tuple[str, tuple[str, ...]]], compared: Sequence[str]
) -> list[Variant]:
    """The job as it is, and one variant for each value that is tried.

    Args:
        tried: Names of arguments, each with its values.
        compared: Implementations of DDP; ``torch`` is what the job has.
    """
    found = [AS_IT_IS]
    found += [Variant(name, {"ddp": name}) for name in compared if name != "torch"]
    for name, values in tried:
        found += [Variant(f"{name}={value}", {name: value}) for value in values]
    return found


def plan(sizes: Sequence[Size], variants: Sequence[Variant], repeats: int) -> Iterator[Planned]:
    """The runs in order: each repeat goes once through all sizes, the smallest first.

    So what changes on the machine meanwhile meets every size alike.
    """
    number = 0
    for repeat in range(1, repeats + 1):
        for size in sizes:
            for variant in variants:
                compares = "ddp" in variant.overrides
                if variant.overrides and variant.communicates and size.ranks == 1 and not compares:
                    continue
                number += 1
                yield Planned(number, size, variant, repeat)

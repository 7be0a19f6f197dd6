"""What came of each run, and of all runs of a size: the rows of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from ddpdoctor.core.finding import Finding
from ddpdoctor.scale.measured import Measured, middle
from ddpdoctor.scale.plan import AS_IT_IS, Planned, Size, Variant


@dataclass(frozen=True)
class Outcome:
    """One run that is over."""

    planned: Planned
    directory: Path
    """Its run directory."""
    log: Path
    """What the job printed."""
    status: int
    """The exit status of ``ddpdoctor run``."""
    measured: Measured | None
    failure: str = ""
    """Why there is nothing measured, in a clause; empty where there is."""
    findings: tuple[Finding, ...] = ()
    overrides: dict[str, str] = field(default_factory=dict)
    """What was overridden in it: by its variant, and for weak or strong scaling."""


@dataclass(frozen=True)
class Row:
    """All repeats of a size and a variant."""

    size: Size
    variant: Variant
    outcomes: tuple[Outcome, ...]
    efficiencies: tuple[float, ...] = ()
    """Of each repeat: throughput per rank, against that of the smallest size in the same repeat."""
    is_base: bool = False
    """It is what the others are compared with."""

    @property
    def measured(self) -> Measured | None:
        """The median repeat; None if there is none."""
        known = [each.measured for each in self.outcomes if each.measured is not None]
        return middle(known) if known else None

    @property
    def failure(self) -> Outcome | None:
        """A run of it that failed."""
        return next((each for each in self.outcomes if each.failure), None)

    @property
    def efficiency(self) -> float | None:
        """The median over the repeats; None if it is not known."""
        return median(self.efficiencies) if self.efficiencies else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest of several repeats."""
        if len(self.efficiencies) < 2:
            return None
        return min(self.efficiencies), max(self.efficiencies)


def rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row for each size and variant: the job as it is first, each by size."""
    grouped: dict[tuple[str, Size], list[Outcome]] = {}
    for each in outcomes:
        key = (each.planned.variant.name, each.planned.size)
        grouped.setdefault(key, []).append(each)
    measured = [each for each in outcomes if each.measured is not None]
    smallest = min(
        (each.planned.size for each in measured if each.planned.variant == AS_IT_IS),
        key=lambda size: size.order,
        default=None,
    )
    bases = {
        each.planned.repeat: each.measured
        for each in measured
        if each.planned.size == smallest and each.planned.variant == AS_IT_IS and each.measured
    }
    base = middle(list(bases.values())) if bases else None
    order = list(dict.fromkeys(each.planned.variant.name for each in outcomes))
    found = []
    for (name, size), group in grouped.items():
        efficiencies = tuple(
            efficiency(each.measured, bases.get(each.planned.repeat, base))
            for each in group
            if each.measured is not None and base is not None
        )
        known = tuple(value for value in efficiencies if value is not None)
        is_base = size == smallest and not name
        found.append(Row(size, group[0].planned.variant, tuple(group), known, is_base))
    return sorted(found, key=lambda row: (order.index(row.variant.name), row.size.order))


def efficiency(measured: Measured, base: Measured | None) -> float | None:
    """Throughput per rank against that of the base; None where the two do not compare."""
    if base is None or (measured.samples is None) != (base.samples is None):
        return None
    return (measured.rate / measured.ranks) / (base.rate / base.ranks)

"""Published figures to compare with: ResNet-50 on up to eight V100 GPUs, with torch 0.4.1.

Forward and backward of a batch of 128 images of 3x224x224 per GPU, V100-PCIE-32G, for
DistributedDataParallel of torch and of NVIDIA Apex. One GPU has no DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ddpdoctor.core import units
from ddpdoctor.scale.outcome import Row
from ddpdoctor.scale.plan import AS_IT_IS

SETTING = "ResNet-50, batch 128 a GPU, 3x224x224, V100-PCIE-32G, torch 0.4.1"


class Figure(NamedTuple):
    """One published measurement, in milliseconds."""

    gpus: int
    ddp: str
    total: int
    """As published: forward and backward, each rounded."""
    forward: int
    backward: int
    """With the communication in it."""


FIGURES = (
    Figure(1, "torch", 371, 119, 252),
    Figure(2, "torch", 433, 134, 291),
    Figure(2, "apex", 423, 131, 291),
    Figure(4, "torch", 438, 138, 301),
    Figure(4, "apex", 430, 131, 299),
    Figure(8, "torch", 450, 136, 313),
    Figure(8, "apex", 437, 131, 306),
)


def efficiency(figure: Figure) -> float:
    """Against one GPU."""
    return FIGURES[0].total / figure.total


def lines(rows: Sequence[Row]) -> list[str]:
    """The figures as a table, with what was measured at the same sizes beside them.

    Args:
        rows: What was measured; may be empty.
    """
    here = {
        row.size.ranks: row for row in rows if row.variant == AS_IT_IS and row.measured is not None
    }
    found = [
        f"published: {SETTING}",
        "forward + backward, in ms",
        "GPUs  DDP     total  forward  backward  efficiency"
        + ("   here: ms  efficiency" if here else ""),
    ]
    for each in FIGURES:
        text = (
            f"{each.gpus:>4}  {each.ddp:<5} {each.total:>7}  {each.forward:>7}  {each.backward:>8}"
            f"  {units.percent(efficiency(each)):>10}"
        )
        row = here.get(each.gpus)
        if row is not None and row.measured is not None and each.ddp == "torch":
            measured = row.measured
            total = measured.forward + measured.backward + (measured.exposed or 0.0)
            text += f"   {units.figures(total * 1e3):>8}  {units.percent(row.efficiency):>10}"
        found.append(text)
    return found

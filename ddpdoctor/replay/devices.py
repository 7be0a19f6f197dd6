"""Compute a kept step on several devices, twice on each, and tell one that computes wrongly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ddpdoctor.core.formatting import count
from ddpdoctor.replay.gradients import is_coarse, tolerance_of
from ddpdoctor.replay.steps import Outputs, local_gradients
from ddpdoctor.run.capsule import Capsule

Values = Mapping[str, Any]
"""Outputs and gradients by what they are, on the CPU."""


class Difference(NamedTuple):
    """How two computations of a step differ."""

    values: int  # Values with other bits
    first: str  # The first output or gradient with other bits
    largest: float  # Largest relative difference of an output or a gradient


class Computed(NamedTuple):
    """A step that was computed twice on a device."""

    device: str
    once: Values
    again: Values
    random: bool  # Whether it took random numbers, which devices of other kinds do not share


def unusable(device: str, torch: Any) -> str:
    """Return why a device cannot be used. Empty if it can."""
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:
        # torch raises RuntimeError, AssertionError, and what a driver finds.
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return ""


def compute(capsule: Capsule, device: str, torch: Any) -> Computed:
    """Compute a step twice on a device.

    Raises:
        Exception: What the module raises.
    """
    # TF32 would be another computation than that of a CPU.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    found = []
    for _ in range(2):
        outputs: Outputs = {}
        gradients = local_gradients(capsule, torch, returned=outputs, device=device)
        values = {f"output {at} of forward {n}": each.cpu() for (n, at), each in outputs.items()}
        values.update({f"the gradient of {name}": e.cpu() for name, e in gradients.items()})
        found.append(values)
    before = capsule.forwards[-1].generators
    drawn = not torch.equal(torch.get_rng_state(), before["torch"])
    if torch.device(device).type == "cuda" and "cuda" in before:
        drawn |= not torch.equal(torch.cuda.get_rng_state(device), before["cuda"])
    return Computed(device, found[0], found[1], drawn)


def differs(one: Values, other: Values, torch: Any) -> Difference | None:
    """Compare two computations. None if all bits are the same."""
    number, first, largest = 0, "", 0.0
    for name, value in one.items():
        beside = other[name]
        same = (value == beside) | (value.isnan() & beside.isnan())
        wrong = int((~same).sum())
        if not wrong:
            continue
        number, first = number + wrong, first or name
        size = float(value.double().norm())
        apart = float((value.double() - beside.double()).norm())
        relative = apart / size if size else math.inf
        largest = max(largest, math.inf if math.isnan(relative) else relative)
    return Difference(number, first, largest) if number else None


def report(capsule: Capsule, every: Sequence[Computed], torch: Any) -> tuple[list[str], bool]:
    """Return what the devices computed, in sentences, and whether one computes wrongly."""
    tolerance = tolerance_of(is_coarse(capsule))
    lines, bad = [], False
    for each in every:
        found = differs(each.once, each.again, torch)
        lines.append(f"{each.device}, twice: {_words(found, tolerance)}")
        if found is not None and (found.largest > tolerance or each.device == "cpu"):
            bad = True
            lines.append(f"{each.device} computes wrongly, or the model is not deterministic")
    apart: list[tuple[str, str]] = []
    for one, other in itertools.combinations(every, 2):
        if (one.random or other.random) and _kind(one) != _kind(other):
            lines.append(
                f"{one.device} and {other.device}: not compared, as the model draws random numbers"
            )
            continue
        found = differs(one.once, other.once, torch)
        lines.append(f"{one.device} and {other.device}: {_words(found, tolerance)}")
        if found is not None and (found.largest > tolerance or _kind(one) == _kind(other) == "cpu"):
            apart.append((one.device, other.device))
    if apart:
        lines.append(_blamed([each.device for each in every], apart))
    return lines, bad or bool(apart)


def _kind(computed: Computed) -> str:
    return computed.device.partition(":")[0]


def _words(found: Difference | None, tolerance: float) -> str:
    if found is None:
        return "the same bits"
    within = "within rounding" if found.largest <= tolerance else "more than rounding"
    return (
        f"{count(found.values, 'value')} with other bits, first in {found.first}, {within}: "
        f"relative difference {found.largest:.2g}"
    )


def _blamed(devices: Sequence[str], apart: Sequence[tuple[str, str]]) -> str:
    """Return which device differs from all others, which agree."""
    for each in devices:
        others = len(devices) - 1
        mine = sum(each in pair for pair in apart)
        if others > 1 and mine == others == len(apart):
            return f"{each} computes wrongly: the others agree"
    return "one of them computes wrongly; a third device tells which"

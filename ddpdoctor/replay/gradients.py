"""Compare the gradient that DDP reduced with the ranks' gradients, computed again.

Each rank's forward is computed again from its inputs, weights and generator states, and its
backward from the gradient with which the job's own backward began. So the loss need not be known.
DDP promises the average of these gradients. Run in the job's interpreter, since it imports the
model::

    python -m ddpdoctor.replay.gradients DIRECTORY
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpdoctor.replay.losses import NotFollowedError, NumberReturnedError
from ddpdoctor.replay.steps import Outputs, load, local_gradients
from ddpdoctor.replay.whole_batch import Steps, gradient_by_inputs, gradient_by_loss
from ddpdoctor.run.capsule import Capsule, row_sizes

TOLERANCE = 1e-3
"""Relative difference of two gradients that are equal within rounding (float32, other order)."""

COARSE_TOLERANCE = 3e-2  # The same in float16 or bfloat16
MIN_NORM = 1e-12
NUDGE = 1e-6  # Relative change of weights, some last bits of float32
AMPLIFIED = 3.0  # Ratio from which a difference is more than such a change makes
_COARSE = ("float16", "bfloat16")


@dataclass
class Difference:
    """A parameter whose reduced gradient is not the average."""

    name: str
    ratio: float  # Norm of the reduced gradient, as a multiple of the average's
    cosine: float


@dataclass
class Comparison:
    """The reduced gradient of a step against the average of the ranks' gradients.

    Attributes:
        ranks: Number of ranks whose step was computed again.
        forwards: Forwards of a rank in the step.
        parameters: Number of compared parameters.
        different: Those that differ, in the order of the model.
        scale: The factor by which all of them differ, if it is one and the same.
        used: The factor by which the optimizer's gradients differ from the reduced ones, such as by
            clipping. None if they differ otherwise.
        rows: Predictions of each rank that the loss counts: samples, tokens or pixels.
        whole: Relative difference of the average to the gradient of the whole batch, apart from
            ``whole_scale``. None if it is not known.
        whole_scale: The gradient of the whole batch, as a multiple of the average.
        whole_by: How it was computed: by the ``loss``'s own calls with all outputs, by the model
            with all ``inputs``, or as a mean over the ``predictions`` that the loss counts.
        whole_why: Why it was not computed by the loss or the model.
        apart: Largest relative difference between the replicas' reduced gradients.
        why_not: Why nothing was compared.
        remarks: What was not computed as in the job.
    """

    step: int = -1
    ranks: int = 0
    world_size: int = 0
    forwards: int = 0
    parameters: int = 0
    different: list[Difference] = field(default_factory=list)
    scale: float | None = None
    used: float | None = None
    rows: list[int] = field(default_factory=list)
    whole: float | None = None
    whole_scale: float | None = None
    whole_by: str = ""
    whole_why: str = ""
    apart: float = 0.0
    why_not: str = ""
    remarks: list[str] = field(default_factory=list)


def compare(directory: str) -> Comparison:
    """Compare the capsules of a run. Says why if that is not possible."""
    import torch

    torch.manual_seed(0)
    result = Comparison()
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), "capsule-*.pickle")))
    mean: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    reduced: list[dict[str, Any]] = []
    steps: list[tuple[Capsule, Outputs, dict[str, Any]]] = []
    coarse = False
    for path in paths:
        try:
            capsule = load(path, torch)
            outputs: Outputs = {}
            local = local_gradients(capsule, torch, returned=outputs)
        except Exception as error:
            # The model is the job's code.
            result.why_not = f"{os.path.basename(path)}: {type(error).__name__}: {error}"[:300]
            return result
        if capsule.carried:
            result.remarks.append(f"rank {capsule.rank} had gradients before the step")
        steps.append((capsule, outputs, local))
        result.step, result.world_size = capsule.step, capsule.world_size
        result.forwards = max(result.forwards, len(capsule.forwards))
        result.ranks += 1
        coarse |= is_coarse(capsule)
        reduced.append({name: each.double() for name, each in capsule.reduced.items()})
        result.used = _one_factor(capsule.used, capsule.reduced)
        result.rows.append(_rows(capsule))
        for name, gradient in local.items():
            mean[name] = mean.get(name, 0) + gradient / capsule.world_size
            whole[name] = whole.get(name, 0) + gradient * result.rows[-1]
    if not reduced:
        result.why_not = "no rank kept a step"
    elif result.ranks < result.world_size:
        result.why_not = f"{result.ranks} of {result.world_size} ranks kept the step"
    elif not any(reduced):
        result.why_not = "no backward was seen in the step"
    else:
        _judge(result, mean, reduced, tolerance_of(coarse))
        if result.different:
            _leave_out_rounding(result, steps, mean, reduced[0], torch)
        total, square = sum(result.rows), sum(float((each**2).sum()) for each in mean.values())
        if min(result.rows) and square:
            apart = sum(float(((each / total - mean[n]) ** 2).sum()) for n, each in whole.items())
            result.whole, result.whole_by = float((apart / square) ** 0.5), "predictions"
        _judge_whole(result, steps, mean, tolerance_of(coarse), torch)
    return result


def _judge_whole(
    result: Comparison, steps: Steps, mean: dict[str, Any], tolerance: float, torch: Any
) -> None:
    """Compare the average to the gradient of the loss, or the model, with all ranks' batches."""
    numbers: list[int | float] = []
    try:
        try:
            whole, numbers = gradient_by_loss(steps, tolerance, torch)
            result.whole_by = "loss"
        except NumberReturnedError:
            whole, numbers = gradient_by_inputs(steps, torch)
            result.whole_by = "inputs"
    except Exception as error:
        # The model is the job's code.
        known = isinstance(error, NotFollowedError)
        result.whole_why = str(error) if known else f"{type(error).__name__}: {error}"[:300]
        return
    # A loss that multiplies by the number of ranks, since DDP divides by it, would not with one.
    shares = [1, result.world_size] if result.world_size in numbers else [1]
    apart = {
        share: (_one_factor(whole, mean, tolerance), _distance(whole, mean, share))
        for share in shares
    }
    share = min(apart, key=lambda each: apart[each][1])
    factor, result.whole = apart[share]
    if factor is not None:
        result.whole_scale, result.whole = factor / share, 0.0


def _distance(these: dict[str, Any], those: dict[str, Any], share: float) -> float:
    """Return the relative difference of gradients, the first of them divided by a number."""
    square = sum(float(each.square().sum()) for each in those.values())
    apart = sum(float((e - these.get(n, 0) / share).square().sum()) for n, e in those.items())
    return float((apart / square) ** 0.5) if square else 0.0


def is_coarse(capsule: Capsule) -> bool:
    """Return whether gradients of outputs have half precision."""
    return any(
        str(gradient.dtype).removeprefix("torch.") in _COARSE
        for each in capsule.forwards
        for gradient in each.gradients.values()
    )


def tolerance_of(coarse: bool) -> float:
    """Return the relative difference of gradients that are equal within rounding."""
    return COARSE_TOLERANCE if coarse else TOLERANCE


def _rows(capsule: Capsule) -> int:
    """Return the predictions with a gradient, of the largest output of each forward."""
    found = 0
    for each in capsule.forwards:
        shown = [gradient for gradient in each.gradients.values() if gradient.dim()]
        if shown:
            largest = max(shown, key=lambda gradient: int(gradient.numel()))
            found += int((row_sizes(largest) > 0).sum())
    return found


def _judge(
    result: Comparison, mean: dict[str, Any], reduced: list[dict[str, Any]], tolerance: float
) -> None:
    first = reduced[0]
    for name, wanted in mean.items():
        got = first.get(name)
        size = float(wanted.norm())
        if got is None or size < MIN_NORM:
            continue
        result.parameters += 1
        for other in reduced[1:]:
            if name in other:
                result.apart = max(result.apart, float((other[name] - got).norm()) / size)
        if float((got - wanted).norm()) > tolerance * size:
            length = float(got.norm())
            cosine = float((got * wanted).sum()) / (length * size) if length else 0.0
            result.different.append(Difference(name, length / size, cosine))
    if len(result.different) == result.parameters:
        result.scale = _one_factor(first, mean, tolerance)


def _leave_out_rounding(
    result: Comparison, steps: Steps, mean: dict[str, Any], reduced: dict[str, Any], torch: Any
) -> None:
    """Leave out parameters whose gradient changes as much if weights change by their last bits.

    BatchNorm over a few values, for example, amplifies rounding a thousandfold.
    """
    nudged: dict[str, Any] = {}
    for capsule, _, _ in steps:
        for name, each in local_gradients(capsule, torch, nudge=NUDGE).items():
            nudged[name] = nudged.get(name, 0) + each / capsule.world_size
    kept = [
        each
        for each in result.different
        if float((reduced[each.name] - mean[each.name]).norm())
        > AMPLIFIED * float((nudged[each.name] - mean[each.name]).norm())
    ]
    if len(kept) < len(result.different):
        result.remarks.append("rounding alone changes gradients of other parameters as much")
        result.different, result.scale = kept, None


def _one_factor(
    these: dict[str, Any], those: dict[str, Any], tolerance: float = TOLERANCE
) -> float | None:
    """Return the factor between two sets of gradients, if all of these have the same."""
    both = [(these[name].double(), each.double()) for name, each in those.items() if name in these]
    square = sum(float((each * each).sum()) for _, each in both)
    if not square:
        return None
    factor = sum(float((one * other).sum()) for one, other in both) / square
    apart = sum(float(((one - factor * other) ** 2).sum()) for one, other in both)
    return factor if apart <= (tolerance * factor) ** 2 * square else None


def main(words: Sequence[str]) -> int:
    """Print the comparison of a run directory as a JSON object."""
    print(json.dumps(asdict(compare(words[0]))))
    return 0

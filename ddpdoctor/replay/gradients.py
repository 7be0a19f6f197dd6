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
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ddpdoctor.replay.definitions import Definitions
from ddpdoctor.run.capsule import Capsule, Forward, Source, read, row_sizes, tensors_of

TOLERANCE = 1e-3
"""Relative difference of two gradients that are equal within rounding (float32, other order)."""

COARSE_TOLERANCE = 3e-2  # The same in float16 or bfloat16
MIN_NORM = 1e-12
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
        whole: Relative difference of the average to the gradient of the whole batch, for a loss
            that is a mean over these predictions. None if the ranks have no such outputs.
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
    apart: float = 0.0
    why_not: str = ""
    remarks: list[str] = field(default_factory=list)


def load(path: str, torch: Any) -> Capsule:
    """Read a capsule with the classes of its script, and import as the rank did.

    Raises:
        Exception: What `read` raises.
    """

    def finder(source: Source) -> Callable[[str], Any]:
        for each in reversed(source.path):
            if each not in sys.path:
                sys.path.insert(0, each)
        return Definitions(source.script).find

    return read(path, torch, finder)


def forward(capsule: Capsule, each: Forward, torch: Any) -> Any:
    """Compute a forward again, from the state of the generators that it had."""
    states = each.generators
    torch.set_rng_state(states["torch"])
    if "numpy" in states:
        sys.modules["numpy"].random.set_state(states["numpy"])
    if "random" in states:
        import random

        random.setstate(states["random"])
    return capsule.module(*each.args, **each.kwargs)


def restore(capsule: Capsule, torch: Any) -> None:
    """Give the module the weights that it had before the step, on the CPU, and no gradients."""
    capsule.module.to("cpu")
    with torch.no_grad():
        own = dict(capsule.module.named_parameters()) | dict(capsule.module.named_buffers())
        for name, value in capsule.weights.items():
            if name in own:
                own[name].copy_(value)
    for parameter in capsule.module.parameters():
        parameter.grad = None


def local_gradients(capsule: Capsule, torch: Any) -> dict[str, Any]:
    """Compute the gradients that a rank had before they were reduced.

    Raises:
        ValueError: The backward of an output was not kept.
        Exception: What the module raises.
    """
    restore(capsule, torch)
    for each in capsule.forwards:
        outputs = list(tensors_of(forward(capsule, each, torch), torch))
        used = {at: each.gradients[at] for at in each.gradients if at < len(outputs)}
        if used:
            torch.autograd.backward(
                [outputs[at] for at in used],
                [used[at].to(outputs[at].dtype) for at in used],
            )
    return {
        name: each.grad.double()
        for name, each in capsule.module.named_parameters()
        if each.grad is not None
    }


def compare(directory: str) -> Comparison:
    """Compare the capsules of a run. Says why if that is not possible."""
    import torch

    torch.manual_seed(0)
    result = Comparison()
    paths = sorted(glob.glob(os.path.join(glob.escape(directory), "capsule-*.pickle")))
    mean: dict[str, Any] = {}
    whole: dict[str, Any] = {}
    reduced: list[dict[str, Any]] = []
    coarse = False
    for path in paths:
        try:
            capsule = load(path, torch)
            local = local_gradients(capsule, torch)
        except Exception as error:
            # The model is the job's code.
            result.why_not = f"{os.path.basename(path)}: {type(error).__name__}: {error}"[:300]
            return result
        if capsule.carried:
            result.remarks.append(f"rank {capsule.rank} had gradients before the step")
        result.step, result.world_size = capsule.step, capsule.world_size
        result.forwards = max(result.forwards, len(capsule.forwards))
        result.ranks += 1
        coarse |= any(
            str(gradient.dtype).removeprefix("torch.") in _COARSE
            for each in capsule.forwards
            for gradient in each.gradients.values()
        )
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
        _judge(result, mean, reduced, COARSE_TOLERANCE if coarse else TOLERANCE)
        total, square = sum(result.rows), sum(float((each**2).sum()) for each in mean.values())
        if min(result.rows) and square:
            apart = sum(float(((each / total - mean[n]) ** 2).sum()) for n, each in whole.items())
            result.whole = float((apart / square) ** 0.5)
    return result


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

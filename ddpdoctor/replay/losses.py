"""Compute a loss again by the calls of torch that made it: of one rank, or of all ranks at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpdoctor.run.capsule import ASSIGNED, Call, LossCalls, Ref, tensors_of

MODULES = (
    "torch", "torch.nn.functional", "torch.functional", "torch._C._nn", "torch.linalg",
    "torch.special", "torch.fft", "torch._C._linalg", "torch._C._special", "torch._C._fft",
)  # fmt: skip
"""Modules whose functions are called. A file may name others."""

Outputs = Mapping[tuple[int, int], Any]


class NotFollowedError(Exception):
    """The loss cannot be computed again. Its text says why."""


class NumberReturnedError(NotFollowedError):
    """The model returns a number for its batch, such as its loss."""


def total_loss(calls: LossCalls, outputs: Outputs, torch: Any) -> Any:
    """Return the sum of the losses of a step.

    Args:
        calls: What made them.
        outputs: The tensors that the forwards returned, by forward and position.
        torch: The torch module.

    Raises:
        NotFollowedError: A call cannot be made again.
    """
    calls = _needed(calls)
    return _computed(calls, calls.given, outputs, torch, True)


def _computed(
    calls: LossCalls, given: Mapping[int, Any], outputs: Outputs, torch: Any, assigns: bool
) -> Any:
    if calls.why_not or not calls.losses:
        raise NotFollowedError(calls.why_not or "no backward began with a loss")
    values = {number: outputs[place] for number, place in calls.outputs.items() if place in outputs}
    # Calls may change them in place.
    values.update({number: each.detach().clone() for number, each in given.items()})
    for each in calls.calls:
        if each.name == ASSIGNED:
            if assigns:
                values[each.results[0]] = each.args[0]
            continue
        try:
            function = _function(each.name, torch)
            result = function(*_filled(each.args, values), **_filled(each.kwargs, values))
        except NotFollowedError:
            raise
        except Exception as error:
            # Another shape than in the job may fail in any way.
            first = str(error).partition("\n")[0]
            raise NotFollowedError(f"{each.name}: {first}"[:200]) from None
        values.update(zip(each.results, tensors_of(result, torch), strict=False))
    try:
        return sum(values[number].sum() for number in calls.losses)
    except KeyError:
        raise NotFollowedError("a tensor of the loss is missing") from None


def whole_loss(
    every: Sequence[LossCalls],
    outputs: Sequence[Outputs],
    torch: Any,
    whole: Outputs | None = None,
) -> tuple[Any, list[int | float]]:
    """Return the loss that one rank has with the outputs of all ranks, and numbers in its calls.

    The tensors of the ranks are put behind each other along the first dimension.

    Args:
        every: The calls of each rank.
        outputs: The outputs of each rank.
        torch: The torch module.
        whole: The outputs of a forward with all inputs, in place of those of the ranks.

    Raises:
        NotFollowedError: It cannot be computed.
    """
    every = [_needed(each) for each in every]
    first = every[0]
    shapes = [_plain(each) for each in every]
    if any(each != shapes[0] for each in shapes):
        raise NotFollowedError("the ranks compute their losses by other calls, or other numbers")
    if whole is None:
        whole = _joined_outputs(first, outputs, torch)
    rows = [{int(each.shape[0]) for each in one.values() if each.dim()} for one in outputs]
    given = {
        number: _whole([each.given[number] for each in every], rows, torch)
        for number in first.given
    }
    try:
        loss = _computed(first, given, whole, torch, False)
    except NotFollowedError:
        # Sizes that a loss takes from a shape are numbers in its calls.
        sizes = {size for each in outputs[0].values() for size in _row_counts(each)}
        larger = {size: size * len(every) for size in sizes}
        calls = [
            each._replace(args=_resized(each.args, larger), kwargs=_resized(each.kwargs, larger))
            for each in first.calls
        ]
        loss = _computed(replace(first, calls=calls), given, whole, torch, False)
    return loss, [each for call in first.calls for each in _numbers((call.args, call.kwargs))]


def _joined_outputs(calls: LossCalls, outputs: Sequence[Outputs], torch: Any) -> Outputs:
    """Return the outputs that a loss is made of, of all ranks."""
    used = {*_refs([(each.args, each.kwargs) for each in calls.calls]), *calls.losses}
    places = [place for number, place in calls.outputs.items() if number in used]
    return {place: joined([each[place] for each in outputs], torch) for place in places}


def _whole(tensors: Sequence[Any], rows: Sequence[set[int]], torch: Any) -> Any:
    """Return a tensor of all ranks: of their samples, or the one that all of them have."""
    same = all(_equal(each, tensors[0], torch) for each in tensors)
    if not same and not tensors[0].dim():
        raise NotFollowedError("the loss uses a number that each rank has for itself")
    batched = all(e.dim() and e.shape[0] in known for e, known in zip(tensors, rows, strict=True))
    return joined(tensors, torch) if batched or not same else tensors[0]


def _row_counts(output: Any) -> set[int]:
    """Return the number of samples of an output, and of its tokens."""
    return {math.prod(output.shape[:dims]) for dims in range(1, max(2, output.dim()))}


def _resized(value: Any, sizes: Mapping[int, int]) -> Any:
    """Return arguments with other sizes in place of known ones."""
    if isinstance(value, Ref):
        return value
    if isinstance(value, dict):
        return {key: _resized(each, sizes) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resized(each, sizes) for each in value)
    if isinstance(value, slice):
        return slice(*_resized((value.start, value.stop, value.step), sizes))
    return sizes.get(value, value) if type(value) is int else value


def _plain(calls: LossCalls) -> list[Any]:
    return [(each.name, each.results) if each.name == ASSIGNED else each for each in calls.calls]


def joined(tensors: Sequence[Any], torch: Any) -> Any:
    """Put tensors of the ranks behind each other.

    Raises:
        NotFollowedError: They have no first dimension, or other ones do not agree.
    """
    if any(not each.dim() for each in tensors):
        raise NumberReturnedError("the model returns a number for its batch")
    try:
        return torch.cat(list(tensors))
    except RuntimeError:
        shapes = " and ".join(dict.fromkeys(str(list(each.shape)) for each in tensors))
        raise NotFollowedError(f"the ranks have other shapes: {shapes}") from None


def _equal(one: Any, other: Any, torch: Any) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other))


def _function(name: str, torch: Any) -> Any:
    module, _, last = name.rpartition(".")
    if module == "get":
        return lambda tensor: getattr(tensor, last)
    if module == "Tensor" and last in ("cuda", "cpu"):
        return lambda tensor, *_, **__: tensor
    if module == "Tensor" and last not in ("numpy", "share_memory_"):
        return getattr(torch.Tensor, last)
    if module in MODULES:
        owner = torch
        for part in module.split(".")[1:]:
            owner = getattr(owner, part, None)
        found = getattr(owner, last, None)
        # Others of torch itself load files, among others.
        known = {*dir(torch._C._VariableFunctions), *torch.functional.__all__} - {"from_file"}
        if callable(found) and (module != "torch" or last in known):
            return found
    raise NotFollowedError(f"{name} is not called again")


def _filled(value: Any, values: Mapping[int, Any]) -> Any:
    """Return arguments with tensors, all of them on the CPU."""
    if isinstance(value, Ref):
        return values[value.number]
    if isinstance(value, dict):
        return {key: _filled(each, values) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(each, values) for each in value)
    if isinstance(value, slice):
        return slice(*_filled((value.start, value.stop, value.step), values))
    if type(value).__name__ == "device" or (isinstance(value, str) and value.startswith("cuda")):
        return "cpu"
    return value


def _refs(value: Any) -> list[int]:
    """Return the numbers of the tensors among arguments, in their order."""
    if isinstance(value, Ref):
        return [value.number]
    if isinstance(value, slice):
        value = value.start, value.stop, value.step
    if isinstance(value, dict):
        value = list(value.values())
    parts = value if isinstance(value, (list, tuple)) else ()
    return [number for each in parts for number in _refs(each)]


def _needed(calls: LossCalls) -> LossCalls:
    """Leave out calls that the losses do not depend on, such as those of a log on one rank.

    Tensors are numbered in the order in which the other calls use them, as on every rank.
    """
    used = set(calls.losses)
    kept: list[Call] = []
    for each in reversed(calls.calls):
        if _changes(each) or not used.isdisjoint(each.results):
            used.update(_refs((each.args, each.kwargs)))
            kept.insert(0, each)
    order = [n for each in kept for n in (*_refs((each.args, each.kwargs)), *each.results)]
    new = {number: at for at, number in enumerate(dict.fromkeys([*order, *calls.losses]))}
    refs = {number: Ref(at) for number, at in new.items()}
    return replace(
        calls,
        calls=[
            Call(
                each.name,
                _filled(each.args, refs),
                _filled(each.kwargs, refs),
                tuple(new[number] for number in each.results),
            )
            for each in kept
        ],
        given={new[number]: each for number, each in calls.given.items() if number in new},
        outputs={new[number]: place for number, place in calls.outputs.items() if number in new},
        losses=[new[number] for number in calls.losses],
    )


def _changes(call: Call) -> bool:
    """Return whether a call may change a tensor in place, also one that another is a view of."""
    name = call.name.rpartition(".")[2]
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name.startswith(("__set", "__i"))
        or "out" in call.kwargs
        or call.kwargs.get("inplace") is True
    )


def _numbers(value: Any) -> list[int | float]:
    """Return the numbers among arguments, without those of tensors."""
    if isinstance(value, (Ref, bool)):
        return []
    if isinstance(value, (int, float)):
        return [value]
    if isinstance(value, dict):
        return _numbers(list(value.values()))
    if isinstance(value, (list, tuple)):
        return [number for each in value for number in _numbers(each)]
    return []

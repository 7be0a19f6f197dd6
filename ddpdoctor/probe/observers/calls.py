"""What a call of a collective is about: tensor, reduce operation, root and group.

For each function of ``torch.distributed`` a small one with the same parameters is made when it is
wrapped, so that Python itself binds the arguments: at every call, ``Signature.bind`` would take
several times as long.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

from ddpdoctor.run.ring import ASYNC, POINT_TO_POINT

Call: TypeAlias = "tuple[Any, Any, int | None, int | None, Any, int]"
"""What all ranks have to agree on; a plain tuple, for it is made at every call.

The tensor (None where there is none, or where ranks may differ in it), the reduce operation, the
root as a global rank, the root as a rank of the group, the group, and flags as in the ring.
"""

TENSORS: dict[str, str] = {
    "all_gather": "tensor",
    "all_gather_coalesced": "input_tensor_list[0]",
    "all_gather_into_tensor": "input_tensor",
    "all_gather_object": "None",
    "all_gather_single": "input_tensor",
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors[0]",
    # Each rank may send another number of elements.
    "all_to_all": "None",
    "all_to_all_single": "None",
    "barrier": "None",
    "broadcast": "tensor",
    "broadcast_object_list": "None",
    "gather": "tensor",
    "gather_into_tensor": "tensor",
    "gather_object": "None",
    "gather_single": "tensor",
    "monitored_barrier": "None",
    "recv": "tensor",
    "reduce": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "output",
    "reduce_scatter_tensor": "output",
    "scatter": "tensor",
    "scatter_object_list": "None",
    "send": "tensor",
}
"""The functions of ``torch.distributed`` that wait for other ranks, of all versions, and the tensor
whose shape and dtype all ranks share.

``all_gather_single`` and ``reduce_scatter_single`` are what ``all_gather_into_tensor`` and
``reduce_scatter_tensor`` call from 2.13 on; ``gather_single`` is in 2.15.
"""


PARAMETERS = (("op",), ("src", "dst"), ("group_src", "group_dst"), ("group",), ("async_op",))
"""Of the arguments but the tensor, what functions call them."""


def places(
    name: str, function: Callable[..., Any]
) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Names and positions of the tensor's parameter and those of `PARAMETERS`.

    The position is -1, and the name empty, where the function has none. None if the calls of that
    function are more than their tensor tells.
    """
    tensor = TENSORS[name].removesuffix("[0]")
    if tensor == "None" and not name.endswith("barrier"):
        return None
    names = list(inspect.signature(function).parameters)
    wanted = ((tensor,), *PARAMETERS)
    found = tuple(next((each for each in several if each in names), "") for several in wanted)
    return found, tuple(names.index(each) if each else -1 for each in found)


def binder(name: str, function: Callable[..., Any]) -> Callable[..., Call]:
    """What makes a `Call` of the arguments of a call of ``function``, one of `TENSORS`.

    It raises what such a call raises where the arguments are none of the function's: TypeError,
    and IndexError for an empty list.
    """
    parameters = inspect.signature(function).parameters.values()
    bare = [
        each.replace(
            annotation=each.empty, default=each.empty if each.default is each.empty else None
        )
        for each in parameters
    ]
    names = {each.name for each in bare}

    def first_of(*wanted: str) -> str:
        return next((each for each in wanted if each in names), "None")

    flags = f"{ASYNC} if async_op else 0" if "async_op" in names else "0"
    call = [
        TENSORS[name],
        *(first_of(*wanted) for wanted in PARAMETERS[:-1]),
        str(POINT_TO_POINT) if name in ("send", "recv") else flags,
    ]
    made: Callable[..., Call] = eval(  # as `dataclasses` makes an `__init__`
        f"lambda {str(inspect.Signature(bare))[1:-1]}: ({', '.join(call)})", {}
    )
    return made

"""What a call of a collective is about: tensor, reduce operation, root and group.

Each function takes what the one of ``torch.distributed`` with its name takes, so that Python itself
finds the arguments; what later versions add is left aside. They run at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ddpdoctor.run.ring import ASYNC, POINT_TO_POINT

Call: TypeAlias = "tuple[Any, Any, int | None, int | None, Any, int]"
"""What all ranks have to agree on; a plain tuple, for it is made at every call.

The tensor (None where there is none, or where ranks may differ in it), the reduce operation, the
root as a global rank, the root as a rank of the group, the group, and flags as in the ring.
"""


def _all_reduce(
    tensor: Any, op: Any = None, group: Any = None, async_op: Any = False, **_: Any
) -> Call:
    return tensor, op, None, None, group, ASYNC if async_op else 0


def _all_reduce_coalesced(
    tensors: Any, op: Any = None, group: Any = None, async_op: Any = False, **_: Any
) -> Call:
    return tensors[0], op, None, None, group, ASYNC if async_op else 0


def _all_gather(
    tensor_list: Any, tensor: Any, group: Any = None, async_op: Any = False, **_: Any
) -> Call:
    return tensor, None, None, None, group, ASYNC if async_op else 0


def _all_gather_into_tensor(
    output_tensor: Any, input_tensor: Any, group: Any = None, async_op: Any = False, **_: Any
) -> Call:
    return input_tensor, None, None, None, group, ASYNC if async_op else 0


def _all_gather_coalesced(
    output_tensor_lists: Any,
    input_tensor_list: Any,
    group: Any = None,
    async_op: Any = False,
    **_: Any,
) -> Call:
    return input_tensor_list[0], None, None, None, group, ASYNC if async_op else 0


def _all_gather_object(object_list: Any, obj: Any, group: Any = None, **_: Any) -> Call:
    return None, None, None, None, group, 0


def _all_to_all(
    output_tensor_list: Any,
    input_tensor_list: Any,
    group: Any = None,
    async_op: Any = False,
    **_: Any,
) -> Call:
    # Each rank may send another number of elements.
    return None, None, None, None, group, ASYNC if async_op else 0


def _all_to_all_single(
    output: Any,
    input: Any,  # noqa: A002
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: Any = False,
    **_: Any,
) -> Call:
    return None, None, None, None, group, ASYNC if async_op else 0


def _barrier(group: Any = None, async_op: Any = False, *_: Any, **__: Any) -> Call:
    return None, None, None, None, group, ASYNC if async_op else 0


def _monitored_barrier(group: Any = None, *_: Any, **__: Any) -> Call:
    return None, None, None, None, group, 0


def _broadcast(
    tensor: Any,
    src: Any = None,
    group: Any = None,
    async_op: Any = False,
    group_src: Any = None,
    **_: Any,
) -> Call:
    return tensor, None, src, group_src, group, ASYNC if async_op else 0


def _broadcast_object_list(
    object_list: Any,
    src: Any = None,
    group: Any = None,
    device: Any = None,
    group_src: Any = None,
    **_: Any,
) -> Call:
    return None, None, src, group_src, group, 0


def _gather(
    tensor: Any,
    gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: Any = False,
    group_dst: Any = None,
    **_: Any,
) -> Call:
    return tensor, None, dst, group_dst, group, ASYNC if async_op else 0


def _gather_single(
    tensor: Any,
    gather_tensor: Any = None,
    dst: Any = None,
    group: Any = None,
    async_op: Any = False,
    group_dst: Any = None,
    **_: Any,
) -> Call:
    return tensor, None, dst, group_dst, group, ASYNC if async_op else 0


def _gather_object(
    obj: Any,
    object_gather_list: Any = None,
    dst: Any = None,
    group: Any = None,
    group_dst: Any = None,
    **_: Any,
) -> Call:
    return None, None, dst, group_dst, group, 0


def _reduce(
    tensor: Any,
    dst: Any = None,
    op: Any = None,
    group: Any = None,
    async_op: Any = False,
    group_dst: Any = None,
    **_: Any,
) -> Call:
    return tensor, op, dst, group_dst, group, ASYNC if async_op else 0


def _reduce_scatter_tensor(
    output: Any,
    input: Any,  # noqa: A002
    op: Any = None,
    group: Any = None,
    async_op: Any = False,
    **_: Any,
) -> Call:
    return output, op, None, None, group, ASYNC if async_op else 0


def _reduce_scatter(
    output: Any, input_list: Any, op: Any = None, group: Any = None, async_op: Any = False, **_: Any
) -> Call:
    return output, op, None, None, group, ASYNC if async_op else 0


def _scatter(
    tensor: Any,
    scatter_list: Any = None,
    src: Any = None,
    group: Any = None,
    async_op: Any = False,
    group_src: Any = None,
    **_: Any,
) -> Call:
    return tensor, None, src, group_src, group, ASYNC if async_op else 0


def _scatter_object_list(
    scatter_object_output_list: Any,
    scatter_object_input_list: Any = None,
    src: Any = None,
    group: Any = None,
    group_src: Any = None,
    **_: Any,
) -> Call:
    return None, None, src, group_src, group, 0


def _send(
    tensor: Any, dst: Any = None, group: Any = None, tag: Any = 0, group_dst: Any = None, **_: Any
) -> Call:
    return tensor, None, dst, group_dst, group, POINT_TO_POINT


def _recv(
    tensor: Any, src: Any = None, group: Any = None, tag: Any = 0, group_src: Any = None, **_: Any
) -> Call:
    return tensor, None, src, group_src, group, POINT_TO_POINT


CALLS: dict[str, Callable[..., Call]] = {
    "all_gather": _all_gather,
    "all_gather_coalesced": _all_gather_coalesced,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_object": _all_gather_object,
    "all_gather_single": _all_gather_into_tensor,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _barrier,
    "broadcast": _broadcast,
    "broadcast_object_list": _broadcast_object_list,
    "gather": _gather,
    "gather_into_tensor": _gather_single,
    "gather_object": _gather_object,
    "gather_single": _gather_single,
    "monitored_barrier": _monitored_barrier,
    "recv": _recv,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_tensor,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "scatter": _scatter,
    "scatter_object_list": _scatter_object_list,
    "send": _send,
}
"""The functions of ``torch.distributed`` that wait for other ranks, of all versions.

``all_gather_single`` and ``reduce_scatter_single`` are what ``all_gather_into_tensor`` and
``reduce_scatter_tensor`` call from 2.13 on; ``gather_single`` is in 2.15.
"""

"""The ring of collectives: what a rank writes down of its calls, and what readers make of it."""

from __future__ import annotations

import datetime
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpdoctor.core.formatting import spans
from ddpdoctor.probe.observers import collective_calls
from ddpdoctor.probe.observers.collective_calls import DEFAULT_GROUP, Ledger, _GroupCalls
from ddpdoctor.probe.runtime import torch_groups
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.ring import (
    ASYNC,
    ENTRIES,
    POINT_TO_POINT,
    SIZE,
    RingWriter,
    chain_text,
    read_ring,
)
from tests.conftest import Doctor

JOB = """\
import inspect

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
tensor = torch.ones(2, 3)
dist.all_reduce(tensor)
dist.all_reduce(tensor, dist.ReduceOp.MAX, group=pair)
dist.broadcast(tensor, src=1)
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
work = dist.all_reduce(tensor, op=dist.ReduceOp.MIN, async_op=True)
work.wait()
pending = dist.all_reduce(tensor, async_op=True)
dist.barrier()
pending.wait()
if rank == 0:
    dist.send(tensor, 1)
else:
    dist.recv(tensor, 0)
# From torch 2.6 on a root can be named by its number in the group.
by_group = "group_src" in inspect.signature(dist.broadcast).parameters
dist.broadcast(tensor, group=pair, **{"group_src" if by_group else "src": 1})
refused = 0
for call in (lambda: dist.all_reduce(), lambda: dist.all_reduce([1], dist.ReduceOp.SUM)):
    try:
        call()
    except TypeError:
        refused += 1
other = dist.new_group([0])
if rank == 1:
    # Not of this group: torch warns and returns.
    dist.all_reduce(tensor, group=other)
assert refused == 2
if hasattr(dist, "all_gather_single"):
    flat, both = torch.ones(3), torch.ones(6)
    dist.all_gather_into_tensor(both, flat)
    dist.reduce_scatter_tensor(flat, both, dist.ReduceOp.MAX)
    dist.all_gather_single(both, flat)
    dist.reduce_scatter_single(flat, both, op=dist.ReduceOp.MAX)
dist.destroy_process_group()
"""

SINGLE = [
    ("all_gather_into_tensor", ""),
    ("reduce_scatter_tensor", "MAX"),
    ("all_gather_single", ""),
    ("reduce_scatter_single", "MAX"),
]
"""What the job calls at its end where torch has all of them, of which two call the others."""


def test_ranks_write_down_their_collectives(doctor: Doctor) -> None:
    script = doctor.write("train.py", JOB)
    result = doctor.run("--nproc-per-node", "2", "--", str(script))
    result.check_success()
    assert result.codes == []
    assert not [each for rank in result.run.ranks for each in rank.records.of(FaultRecord)]
    for rank in (0, 1):
        ring = read_ring(str(result.run_dir / f"rank-{rank:04d}.r0.collectives"))
        told = [
            (each.name, each.group, each.sequence, each.dtype, each.reduce, each.shape, each.root)
            for each in ring.collectives
        ]
        peer = ("send", 1) if rank == 0 else ("recv", 0)
        f = "float32"
        assert told == [
            ("all_reduce", "0|0-1", 1, f, "SUM", (2, 3), -1),
            ("all_reduce", "1|0-1", 1, f, "MAX", (2, 3), -1),
            ("broadcast", "0|0-1", 2, f, "", (2, 3), 1),
            ("all_gather_object", "0|0-1", 3, "", "", (), -1),
            ("all_reduce", "0|0-1", 4, f, "MIN", (2, 3), -1),
            ("all_reduce", "0|0-1", 5, f, "SUM", (2, 3), -1),
            ("barrier", "0|0-1", 6, "", "", (), -1),
            (peer[0], "0|0-1", 0, f, "", (2, 3), peer[1]),
            ("broadcast", "1|0-1", 2, f, "", (2, 3), 1),
            *(
                (name, "0|0-1", sequence, f, reduce, (3,), -1)
                for sequence, (name, reduce) in enumerate(SINGLE, 7)
                if hasattr(dist, "all_gather_single")
            ),
        ]
        count = len(told)
        assert [each.asynchronous for each in ring.collectives] == [
            index in (4, 5) for index in range(count)
        ]
        assert all(0 < each.began <= each.ended for each in ring.collectives)
        assert ring.collectives[0].site == f"{script}:10"
        assert (ring.calls, ring.waited, ring.partial) == (count, 0, False)
        assert ring.collectives[4].site == f"{script}:15"
        by_name = next(each for each in ring.collectives if each.root == 1)
        assert (by_name.site, by_name.callers) == (f"{script}:12", ())


@pytest.mark.parametrize("name", collective_calls.TENSORS)
def test_a_call_is_taken_apart_as_torch_takes_its_arguments(name: str) -> None:
    if not hasattr(dist, name):
        pytest.skip(f"this torch has no {name}")
    function = getattr(dist, name)
    # Each argument is a list of its own name, whose first element is that, too.
    given: dict[str, Any] = {each: [each] for each in inspect.signature(function).parameters}
    call = collective_calls.binder(name, function)
    taken = call(**given)
    assert call(*given.values()) == taken
    tensor, op, root, group_root, group, flags = taken
    agreed = collective_calls.TENSORS[name].partition("[")[0]
    assert tensor in ([agreed], agreed) or (tensor is None and agreed == "None")
    assert op == given.get("op")
    assert root == given.get("src", given.get("dst"))
    assert group_root == given.get("group_src", given.get("group_dst"))
    assert group == ["group"]
    assert flags == (POINT_TO_POINT if name in ("send", "recv") else ASYNC * ("async_op" in given))
    with pytest.raises(TypeError):
        call(*given.values(), 1)


def test_arguments_that_are_not_given_are_none() -> None:
    tensor = torch.ones(2)
    call = collective_calls.binder("reduce", dist.reduce)
    assert call(tensor, 1) == (tensor, None, 1, None, None, 0)
    assert call(tensor, dst=2, async_op=True) == (tensor, None, 2, None, None, ASYNC)
    if "group_dst" in inspect.signature(dist.reduce).parameters:
        assert call(tensor, group_dst=2) == (tensor, None, None, 2, None, 0)


def test_a_ring_keeps_the_newest(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    ring = RingWriter(path)
    name, group = ring.text("all_reduce"), ring.text("0|0-1")
    for number in range(1, 201):
        order = ring.begin(
            number, number, (name, group, 0, 0, 0), (number, 2, 3, 4, 5), number, -1, 0
        )
        if number % 2:
            ring.end(order, number + 1)
    ring.end(1, 77)
    read = read_ring(path)
    assert [each.order for each in read.collectives] == list(range(201 - ENTRIES, 201))
    assert read.collectives[0].shape == (201 - ENTRIES, 2, 3, 4)
    assert {each.name for each in read.collectives} == {"all_reduce"}
    assert [bool(each.ended) for each in read.collectives[-2:]] == [True, False]


def test_a_call_is_read_with_its_callers(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    ring = RingWriter(path)
    name, group = ring.text("all_reduce"), ring.text("0|0-1")
    lines = [ring.text(f"/job/train.py:{line}") for line in (5, 9, 30)]
    chain = ring.text(chain_text(lines))
    for place in (chain, lines[1]):
        ring.begin(1, 1, (name, group, 0, 0, place), (), 1, -1, 0)
    found = [(each.site, each.callers) for each in read_ring(path).collectives]
    assert found == [
        ("/job/train.py:5", ("/job/train.py:9", "/job/train.py:30")),
        ("/job/train.py:9", ()),
    ]


def test_callers_beyond_the_room_leave_the_line(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    ring = RingWriter(path)
    ledger = Ledger(ring, lambda: 0)
    ledger._groups[DEFAULT_GROUP] = _GroupCalls("0", ring.text("0|0-1"))
    inner, outer = Site("/job/comm.py", 5), Site("/job/train.py", 9)
    no_group = (None, None, None, None, None, 0)
    ledger.begin("barrier", no_group, (inner,))
    while ring.text("x" * 10):
        pass
    ledger.begin("barrier", no_group, (inner, outer))
    found = [(each.name, each.site, each.callers) for each in read_ring(path).collectives]
    assert found == [("barrier", "/job/comm.py:5", ())] * 2


@pytest.mark.slow
def test_calls_of_a_group_that_two_threads_use_have_no_known_numbers(doctor: Doctor) -> None:
    """As those of a communication hook, whose callbacks run wherever the call before ended."""
    script = doctor.write(
        "train.py",
        """
        import threading
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        group, rank = dist.new_group(), dist.get_rank()
        def elsewhere(mine):
            thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(9),), kwargs=mine)
            thread.start()
            thread.join()
        dist.all_reduce(torch.ones(3))
        elsewhere({"group": group})
        dist.barrier()
        dist.all_reduce(torch.ones(4))
        if rank == 0:
            dist.all_reduce(torch.ones(9), group=group)
        else:
            elsewhere({"group": group})
        for numel in (5, 6):
            dist.all_reduce(torch.ones(numel), group=group)
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--nproc-per-node", "2", "--", str(script))
    result.check_success()
    assert result.codes == []
    rings = [rank.ring for rank in result.run.ranks]
    assert all(ring is not None and ring.partial for ring in rings)


@pytest.mark.slow
def test_a_group_of_another_thread_alone_is_no_obstacle(doctor: Doctor) -> None:
    script = doctor.write(
        "train.py",
        """
        import threading
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        group = dist.new_group()
        words = {"target": dist.all_reduce, "args": (torch.ones(9),), "kwargs": {"group": group}}
        for _ in range(3):
            thread = threading.Thread(**words)
            thread.start()
            dist.all_reduce(torch.ones(3))
            thread.join()
        dist.destroy_process_group()
        """,
    )
    result = doctor.run("--nproc-per-node", "2", "--", str(script))
    result.check_success()
    rings = [rank.ring for rank in result.run.ranks]
    assert all(ring is not None and not ring.partial for ring in rings)


def test_texts_beyond_the_room_are_empty(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    ring = RingWriter(path)
    numbers = [ring.text("x" * 500) for _ in range(100)]
    assert numbers[0] == 1 and numbers[-1] == 0
    ring.begin(1, 1, (numbers[-1], numbers[0], 0, 0, 0), (), -1, -1, 0)
    (read,) = read_ring(path).collectives
    assert (read.name, read.group) == ("", "x" * 500)
    assert os.path.getsize(path) == SIZE


@pytest.mark.parametrize("content", [b"", b"x" * SIZE, bytes(SIZE)])
def test_what_is_no_ring_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "ring"
    path.write_bytes(content)
    with pytest.raises(UnreadableError):
        read_ring(str(path))


def test_ranges_of_ranks() -> None:
    assert spans([0, 1, 2, 5]) == "0-2,5"
    assert spans([7]) == "7"


def test_a_timeout_can_be_set_where_a_backend_takes_it(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    backend = dist.ProcessGroupGloo(store, 0, 1, datetime.timedelta(seconds=30))
    assert torch_groups.timeout_of(backend) == datetime.timedelta(seconds=30)
    torch_groups.set_timeout(backend, datetime.timedelta(days=7))
    assert torch_groups.timeout_of(backend) == datetime.timedelta(days=7)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_every_nccl_backend_has_a_setter_of_its_timeout() -> None:
    # Without a GPU none of them can be made.
    kinds = [each for name, each in vars(dist).items() if name.startswith("ProcessGroupNCCL")]
    assert kinds
    for kind in kinds:
        assert callable(getattr(kind, torch_groups.timeout_setter(kind)))


def test_a_backend_that_refuses_a_timeout_is_not_asked() -> None:
    fake = torch._C._distributed_c10d.FakeProcessGroup
    assert torch_groups.timeout_setter(fake) == ""

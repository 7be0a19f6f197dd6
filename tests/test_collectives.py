"""The ring of collectives: what a rank writes down of its calls, and what readers make of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.probe.ledger import ranges
from ddpdoctor.probe.ring import ENTRIES, SIZE, RingWriter, read_ring
from ddpdoctor.record import UnreadableError
from tests.conftest import Doctor

JOB = """\
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
dist.broadcast(tensor, group=pair, group_src=1)
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
dist.destroy_process_group()
"""


def test_ranks_write_down_their_collectives(doctor: Doctor) -> None:
    script = doctor.write("train.py", JOB)
    result = doctor.run("--nproc-per-node", "2", "--", str(script))
    result.check_success()
    assert result.codes == []
    assert not [each for rank in result.run.ranks for each in rank.of_kind("fault")]
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
        ]
        assert [each.asynchronous for each in ring.collectives] == [
            index in (4, 5) for index in range(9)
        ]
        assert all(0 < each.began <= each.ended for each in ring.collectives)
        assert ring.collectives[0].site == f"{script}:8"
        assert (ring.calls, ring.waited, ring.partial) == (9, 0, False)
        assert ring.collectives[4].site == f"{script}:13"


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
    assert ranges([0, 1, 2, 5]) == "0-2,5"
    assert ranges([7]) == "7"

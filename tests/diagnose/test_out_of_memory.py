"""DDP928, DDP903: what a rank held when memory ran out, and how it came to that."""

from __future__ import annotations

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.memory import (
    AllocatorFacts,
    Block,
    MemoryPoint,
    MemoryRecord,
    OutOfMemoryRecord,
)
from ddpdoctor.run.records.process import ErrorRecord
from tests.support.written import MS, T0, Written

GIB = 1 << 30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 4.00 GiB. GPU 0 has a total capacity of 79.18 GiB of "
    "which 1.10 GiB is free. Process 955 has 1.24 GiB memory in use. Including non-PyTorch memory, "
    "this process has {mine} GiB memory in use. Process 1113 has 1.24 GiB memory in use. Of the "
    "allocated memory 60.00 GiB is allocated by PyTorch, and {unused} GiB is reserved by PyTorch "
    "but unallocated."
)


def failed(mine: float = 69.22, unused: float = 0.01) -> ErrorRecord:
    """The error of a rank whose GPU is full."""
    return ErrorRecord(
        time=T0 + 1000 * MS,
        step=20,
        exception="torch.OutOfMemoryError",
        message=MESSAGE.format(mine=mine, unused=unused),
        path="/job/train.py",
        line=9,
    )


def said(written: Written, *records: Record) -> Finding:
    written.rank(0, [])
    written.rank(1, records)
    (finding,) = [each for each in written.findings(status=1) if each.code == "DDP928"]
    return finding


def test_the_message_says_who_held_the_gpu(written: Written) -> None:
    evidence = "\n".join(said(written, failed()).evidence)
    assert "it held 69.2 GiB of the GPU's 79.2 GiB" in evidence
    assert "2 other processes held 2.5 GiB" in evidence


def test_memory_that_is_reserved_and_unused_is_fragmented(written: Written) -> None:
    finding = said(written, failed(unused=12.5))
    assert any("fragmentation: 12.5 GiB" in each for each in finding.evidence)
    assert "expandable_segments" in finding.fix


@pytest.mark.parametrize("expandable", [False, True])
def test_fragmentation_names_the_largest_piece_and_what_is_left_to_set(
    written: Written, expandable: bool
) -> None:
    gpu = AllocatorFacts(
        allocated=60 * GIB, reserved=72 * GIB, largest_free=GIB // 4, expandable=expandable
    )
    finding = said(written, OutOfMemoryRecord(time=T0, step=20, gpu=gpu), failed(unused=12.5))
    assert any("not used, in pieces of at most 256 MiB" in each for each in finding.evidence)
    assert ("Set PYTORCH" in finding.fix) is not expandable


def test_growth_up_to_the_error_is_said(written: Written) -> None:
    points = tuple(
        MemoryPoint(step, T0 + step * 80 * MS, GIB, 4 * step * GIB, 4 * step * GIB)
        for step in range(1, 19)
    )
    finding = said(written, MemoryRecord(time=T0, points=points, total=79 * GIB), failed())
    assert any("it grew by 4 GiB in each step" in each for each in finding.evidence)
    assert ".item()" in finding.fix


def test_a_longer_batch_blocks_and_the_snapshot_are_said(written: Written) -> None:
    blocks = (Block(GIB, 12), Block(512, 7))
    gpu = AllocatorFacts(allocated=60 * GIB, reserved=61 * GIB, total=79 * GIB, blocks=blocks)
    record = OutOfMemoryRecord(
        time=T0, step=20, gpu=gpu, shape=(8, 4096), largest=(8, 1024), file="rank.memory.pickle"
    )
    finding = said(written, record, failed())
    evidence = "\n".join(finding.evidence)
    assert "12 blocks of 1 GiB" in evidence
    assert "its last batch was 8 x 4096, the largest before it 8 x 1024" in evidence
    assert f"memory_viz: {written.path / 'rank.memory.pickle'}" in evidence
    assert "bucket" in finding.fix


def test_a_batch_like_the_others_is_not_blamed(written: Written) -> None:
    record = OutOfMemoryRecord(time=T0, step=20, shape=(8, 1024), largest=(8, 1024))
    assert not any("its last batch" in each for each in said(written, record, failed()).evidence)

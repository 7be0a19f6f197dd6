"""Ranks that wait for each other in sends and receives, and in groups of the same ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.hanging_ranks import NOW, TRAIN, findings, rank, stacks, waiting

LOCATION = "/job/train.py:61"


def exchanging(number: int, name: str, peer: int, ended: int = 0) -> dict[str, Any]:
    call = [1, NOW - 40_000_000_000, ended, 0, name, "0|0-1", "float32", "", [4], 4, peer, False,
            True, LOCATION]  # fmt: skip
    return rank(
        number, "wait", collective=name, collectives=[call], stacks=stacks(number, TRAIN),
        world_size=2,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "verb"), [("recv", "send"), ("send", "receive")])
def test_both_do_the_same_first(tmp_path: Path, name: str, verb: str) -> None:
    (finding,) = findings(tmp_path, exchanging(0, name, 1), exchanging(1, name, 0))
    assert (finding.code, finding.ranks) == ("DDP803", (0, 1))
    assert finding.message == (
        f"rank 0 waits in {name} with rank 1 at train.py:61, and rank 1 in {name} with rank 0 at "
        "train.py:61: neither can end"
    )
    assert finding.fix.startswith(f"Let one of the two {verb} first")


def test_a_peer_in_a_collective(tmp_path: Path) -> None:
    other = {**waiting(1), "world_size": 2}
    (finding,) = findings(tmp_path, exchanging(0, "recv", 1), other)
    assert (finding.code, finding.ranks) == ("DDP803", (0, 1))
    assert "and rank 1 in DDP's all_reduce #9 (64 floats, default group)" in finding.message


def test_a_send_and_its_recv_are_no_standoff(tmp_path: Path) -> None:
    found = findings(tmp_path, exchanging(0, "recv", 1), exchanging(1, "send", 0))
    assert not any("neither can end" in each.message for each in found)

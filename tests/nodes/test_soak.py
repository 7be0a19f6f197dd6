"""``ddpdoctor check --soak`` across nodes: what only a burn-in finds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.lab.checking import Checks, Make, agreeing, silent

SOAK = ("--soak", "0.1", "--skip", "collectives")

WARM = """
import sys
if any(word.endswith("ranks.py") for word in sys.orig_argv):
    import torch.distributed as dist
    exact, calls = dist.all_reduce, 0
    def all_reduce(tensor, *args, **named):
        global calls
        calls += 1
        # The check's own results, not whether the burn-in goes on.
        if calls > 300 and tensor.numel() > 1:
            tensor[7] += 1
        return exact(tensor, *args, **named)
    dist.all_reduce = all_reduce
"""
"""A node that computes right for a while, then no longer."""


def rounds(checks: Checks, said: str) -> int:
    """How often the collectives were repeated."""
    match = re.search(r"(\d+) of (\d+) ranks? reduced correctly, (\d+) times", said)
    assert match is not None, said
    assert match[1] == match[2] == str(len(checks.lab.hosts))
    return int(match[3])


@pytest.mark.slow
def test_healthy_nodes_repeat_the_collectives_for_so_long(nodes: Make) -> None:
    checks = nodes(3)
    said = checks.run(*SOAK)
    silent(said)
    assert len({rounds(checks, each.outcome("gloo-nodes")["detail"]) for each in said}) == 1
    assert rounds(checks, said[0].outcome("gloo-nodes")["detail"]) > 1


@pytest.mark.slow
def test_a_node_that_computes_wrong_once_it_is_warm_is_found(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(2)
    (tmp_path / "warm").mkdir()
    (tmp_path / "warm" / "sitecustomize.py").write_text(WARM)
    env = {1: {"PYTHONPATH": str(tmp_path / "warm")}}
    silent(checks.run("--skip", "collectives", env=env))
    said = checks.run(*SOAK, env=env)
    told = "all_reduce gave a wrong result on node0 (node 0), node1 (node 1)"
    assert agreeing(said, "DDP060") == told
    assert all(each.status & 2 for each in said)

"""``ddpdoctor check`` across nodes, in a lab: two faults at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Make, agreeing


@pytest.mark.slow
def test_two_faults_at_once_are_both_named(nodes: Make, tmp_path: Path) -> None:
    checks = nodes(4)
    faults.firewall(checks.lab, checks.lab.hosts[1], ports=faults.EPHEMERAL)
    faults.clock_shifted(checks.lab.hosts[3], -20, tmp_path)
    said = checks.run()
    assert "no other node can open a connection to node1 (node 1)" in agreeing(said, "DDP053")
    assert "the clock of node3 (node 3) is 20.0 s behind" in agreeing(said, "DDP052")


@pytest.mark.slow
def test_two_faults_of_one_kind_are_both_named(nodes: Make) -> None:
    checks = nodes(4)
    faults.firewall(checks.lab, checks.lab.hosts[1], ports=faults.EPHEMERAL)
    faults.packet_size_limit(checks.lab, checks.lab.hosts[3], largest=1300)
    said = checks.run(*WITHOUT_TORCH)
    assert agreeing(said, "DDP053").startswith("no other node can open a connection to node1")
    assert "are lost to and from node3 (node 3)" in agreeing(said, "DDP054")

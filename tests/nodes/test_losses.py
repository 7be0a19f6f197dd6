"""``ddpdoctor check`` across nodes, in a lab: packets that are lost, links under any floor."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Make, agreeing

PATIENT = (*WITHOUT_TORCH, "--timeout", "240")


@pytest.mark.slow
def test_a_few_percent_of_lost_packets_are_named(nodes: Make) -> None:
    checks = nodes(3)
    faults.lossy_cable(checks.lab, checks.lab.hosts[1])
    said = checks.run(*PATIENT)
    told = agreeing(said, "DDP056")
    assert told.startswith("packets are lost ")
    assert "node1 (node 1)" in told
    for each in said:
        assert each.status & 4 == 0
        (finding, *_) = each.findings("link-speed")
        assert finding["paste"].startswith("ip -s link show dev eth0")


@pytest.mark.slow
def test_with_heavy_loss_all_nodes_say_the_same(nodes: Make) -> None:
    """Some connections do not open, others stall: whatever it is, it is the same on each node."""
    checks = nodes(3)
    faults.lossy_cable(checks.lab, checks.lab.hosts[1], heavy=True)
    said = checks.run(*PATIENT)
    met = [each for each in said if each.outcome("links")["status"] != "skipped"]
    assert len(met) >= 2
    for code in ("DDP053", "DDP054", "DDP056"):
        agreeing(met, code)
    assert all(each.status & 3 for each in met)
    for each in said:
        assert "Event loop" not in each.stderr and "Traceback" not in each.stderr


@pytest.mark.slow
def test_two_links_under_the_floor_are_slow_though_neither_is_the_other_s_outlier(
    nodes: Make,
) -> None:
    checks = nodes(2)
    for host in checks.lab.hosts:
        faults.slow_cable(checks.lab, host, megabits=9)
    said = checks.run(*PATIENT)
    told = agreeing(said, "DDP056")
    assert told.startswith("the link between node0 (node 0) and node1 (node 1) is slow: ")
    for each in said:
        (finding,) = each.findings("link-speed")
        assert finding["evidence"][0].startswith("less than a network of 100 Mbit/s carries")


@pytest.mark.slow
def test_a_limit_on_the_way_out_is_not_said_to_be_the_other_end_s(nodes: Make) -> None:
    checks = nodes(2)
    faults.slow_cable(checks.lab, checks.lab.hosts[1], megabits=20)
    (finding,) = checks.run(*PATIENT)[0].findings("link-speed")
    assert "node0 (on the way out) and of node1 (on the way in)" in finding["fix"]

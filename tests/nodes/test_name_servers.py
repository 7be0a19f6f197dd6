"""``ddpdoctor check`` across nodes, in a lab: names by name servers that are slow or away."""

from __future__ import annotations

import sys

import pytest

from tests.lab import faults
from tests.lab.checking import WITHOUT_TORCH, Checks, Make

AWAY = "10.77.0.250"


def by_name_servers(checks: Checks, *servers: str) -> None:
    """The hosts know each other's names by name servers alone; one host is such a server."""
    *_, holder = checks.lab.hosts
    names = [f"{host.name}={host.address}" for host in checks.lab.hosts]
    checks.start(holder, [sys.executable, "-c", faults.NAME_SERVER, *names])
    for host in checks.lab.hosts:
        host.write_hosts(["127.0.0.1 localhost"])
        # What is sent there arrives nowhere, and nothing says so.
        neighbour = ("ip", "neighbour", "replace", AWAY, "lladdr", "02:00:00:00:00:01")
        host.run(*neighbour, "dev", "eth0", "nud", "permanent")
    resolver = checks.lab.directory / "resolv.conf"
    resolver.write_text("".join(f"nameserver {each}\n" for each in servers))


@pytest.mark.slow
def test_a_first_name_server_that_is_away_is_no_unknown_name(nodes: Make) -> None:
    checks = nodes(3)
    holder = checks.lab.hosts[2]
    by_name_servers(checks, AWAY, holder.address)
    said = checks.run(*WITHOUT_TORCH, "--nnodes", "2", hosts=checks.lab.hosts[:2])
    for each in said:
        assert each.outcome("nodes")["detail"].startswith("2 of 2 nodes are here")
        assert each.codes == ["DDP008"]
        (finding,) = each.findings("lookups")
        assert finding["message"].startswith("name lookups are slow: ")
        assert finding["evidence"][-1] == (
            f"name server {AWAY}, the first one, in /etc/resolv.conf does not answer; "
            f"{holder.address} does"
        )
        assert each.status == 1


@pytest.mark.slow
def test_a_name_that_no_server_is_there_for(nodes: Make) -> None:
    checks = nodes(3)
    by_name_servers(checks, AWAY)
    (said,) = checks.run(*WITHOUT_TORCH, "--nnodes", "2", hosts=checks.lab.hosts[1:2])
    assert f"name server {AWAY} in /etc/resolv.conf does not answer" in str(said.document)
    assert "does not resolve" in said.findings("nodes")[0]["message"]
    assert said.status == 2


@pytest.mark.slow
def test_names_that_are_slow_are_no_error_of_the_reduction(nodes: Make) -> None:
    """torch looks up a name many times, and may need longer than the check has."""
    checks = nodes(3)
    by_name_servers(checks, AWAY, checks.lab.hosts[2].address)
    for each in checks.run("--nnodes", "2", hosts=checks.lab.hosts[:2]):
        outcome = each.outcome("gloo-nodes")
        assert outcome["findings"] == []
        assert each.codes == ["DDP008"]
        if outcome["status"] != "pass":
            assert "name lookups are slow on node0 (node 0" in outcome["detail"]
            assert each.status == 5

"""``ddpdoctor check`` across nodes, in a lab: after the line to paste, the check is green."""

from __future__ import annotations

import pytest

from tests.lab import faults
from tests.lab.checking import PORT, Make, silent

BY_ADDRESS = ("--rdzv-endpoint", f"192.168.77.1:{PORT}")
ABOVE_LOOPBACK = "192.168.77"


@pytest.mark.parametrize("stale", ["192.168.77.40", "127.0.1.1"])
def test_an_old_line_of_the_own_name(nodes: Make, stale: str) -> None:
    """The line is added before the old one, which would win."""
    checks = nodes(2, ABOVE_LOOPBACK)
    second = checks.lab.hosts[1]
    faults.name_wrong(second, second, stale)
    said = checks.run(*BY_ADDRESS)
    assert all(each.status & 2 for each in said)
    pasted = said[1].findings("host-name")[0]
    if "printf" in pasted["paste"]:
        checks.paste(second, pasted)
        silent(checks.run(*BY_ADDRESS))
        return
    # The variable that gloo goes by, in the environment of the job.
    name, _, value = pasted["paste"].split()[1].partition("=")
    said = checks.run(*BY_ADDRESS, env={1: {name: value}})
    assert {each.status for each in said} == {0}


@pytest.mark.slow
def test_packets_that_are_too_large(nodes: Make) -> None:
    checks = nodes(2)
    faults.packet_size_limit(checks.lab, checks.lab.hosts[1], largest=1400)
    (finding,) = checks.run()[0].findings("packet-size")
    for host in checks.lab.hosts:
        checks.paste(host, finding)
    silent(checks.run())


@pytest.mark.slow
def test_an_endpoint_that_is_another_node(nodes: Make) -> None:
    checks = nodes(2)
    there = ("--rdzv-endpoint", f"node1:{PORT}", "--timeout", "30")
    (finding,) = checks.run(*there)[0].findings("nodes")
    words = finding["paste"].split()
    silent(checks.run("--rdzv-endpoint", words[words.index("--rdzv-endpoint") + 1]))

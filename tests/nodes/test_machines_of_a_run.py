"""``ddpdoctor run`` on several hosts of which one is short of memory, slow or gone."""

from __future__ import annotations

import re

import pytest

from tests.lab import faults
from tests.lab.checking import Make
from tests.lab.network import LabError
from tests.lab.running import JobOnHosts
from tests.nodes.test_run_on_nodes import job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_rank_for_which_its_host_has_no_memory(nodes: Make, size: int) -> None:
    checks = nodes(size)
    keeps = "rank == world - 1 and step > 40 and kept.append(b'x' * (200 << 20))"
    path = job(checks, keeps, before="kept = []")
    try:
        with faults.memory_limit(checks.lab.hosts[-1], 1500):
            running = JobOnHosts(checks, path, nproc=2 // size or 1)
            running.wait()
    except LabError as error:
        pytest.skip(str(error))
    found = [(each["code"], each["severity"], each["ranks"]) for each in running.found()]
    assert found == [("DDP903", "error", [max(size, 2) - 1])], running.told(0)
    for number in range(1, size):
        assert running.found(number) == [], running.told(number)


@pytest.mark.parametrize(("size", "nproc"), [(2, 1), (2, 2), (3, 1)])
def test_a_slow_link_is_no_slow_rank(nodes: Make, size: int, nproc: int) -> None:
    checks = nodes(size)
    faults.slow_cable(checks.lab, checks.lab.hosts[-1], megabits=40)
    path = job(checks, steps=150, width=512)
    running = JobOnHosts(checks, path, nproc=nproc)
    assert running.wait() == [0] * size
    assert running.found() == [], running.told(0)
    last = checks.lab.hosts[-1].name
    named = re.findall(r"info DDP056: the link from (\w+) to (\w+) is full", running.told(0))
    # With several connections between two nodes, or at load, none may be seen to be full.
    assert len(named) <= 1 and all(to == last for _, to in named), running.told(0)
    assert f"{size * nproc} ranks, 150 steps; the job succeeded" in running.told(0)

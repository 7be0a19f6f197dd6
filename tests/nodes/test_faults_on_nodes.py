"""Each fault on several hosts, however the job is started: the verdict and line of one host."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Doctor
from tests.lab.checking import Checks, Make
from tests.lab.network import lab
from tests.lab.running import JobOnHosts
from tests.nodes.test_run_on_nodes import FAST, job

pytestmark = pytest.mark.slow

FAULTS = {
    "hang": "rank == world - 1 and step == 60 and time.sleep(1000)",
    "mismatch": "rank == 0 and step == 60 and dist.barrier()",
    "other size": "step == 60 and dist.all_reduce(torch.ones(8 + rank // (world - 1)))",
    "divergence": "rank == 1 and step == 40 and model.module.bias.data.add_(1)",
    "slow rank": "rank == world - 1 and time.sleep(0.2)",
    "exception": "assert rank < world - 1 or step < 60, 'a wrong label'",
    "kill": "rank == 1 and step == 60 and os.kill(os.getpid(), 9)",
}
WAYS = ("static", "c10d", "tasks", "hand")
LAYOUTS = ((2, 1), (2, 2), (3, 1), (3, 2))
BY_HAND = ", init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=int(sys.argv[3])"

# Each fault in each way and each layout, and each way in each layout.
CASES = [
    pytest.param(fault, way, *LAYOUTS[(row + column) % len(LAYOUTS)])
    for row, fault in enumerate(FAULTS)
    for column, way in enumerate(WAYS)
]

CASES += [
    pytest.param("hang", "spawn", 2, 2),
    pytest.param("exception", "spawn", 3, 1),
    pytest.param("slow rank", "spawn", 2, 1),
]

Verdict = set[tuple[str, str, tuple[int, ...], int | None]]


def verdict(checks: Checks, fault: str, way: str, nproc: int) -> Verdict:
    """What the first host reports: codes, severities, ranks and lines. The others are silent."""
    path = job(checks, FAULTS[fault], steps=150, how=BY_HAND if way == "hand" else "")
    running = JobOnHosts(checks, path, how=way, nproc=nproc, options=(*FAST, "--kill-on-hang"))
    running.wait()
    for number in range(1, len(running.processes)):
        assert running.found(number) == [], running.told(number)
    return {
        (each["code"], each["severity"], tuple(each["ranks"]), (each["location"] or {}).get("line"))
        for each in running.found()
    }


@pytest.fixture(scope="module")
def of_one_host() -> dict[tuple[str, int], Verdict]:
    """The verdicts of one host, by fault and number of ranks."""
    return {}


@pytest.mark.parametrize(("fault", "way", "size", "nproc"), CASES)
def test_a_fault_has_the_verdict_of_one_host(
    nodes: Make,
    doctor: Doctor,
    tmp_path: Path,
    of_one_host: dict[tuple[str, int], Verdict],
    fault: str,
    way: str,
    size: int,
    nproc: int,
) -> None:
    checks = nodes(size)
    world_size = size * nproc
    if (fault, world_size) not in of_one_host:
        alone = tmp_path / "alone"
        with lab(1, alone) as host:
            of_one_host[fault, world_size] = verdict(
                Checks(host, alone, doctor.environment()), fault, "static", world_size
            )
    expected = of_one_host[fault, world_size]
    assert len(expected) == 1
    assert verdict(checks, fault, way, nproc) == expected

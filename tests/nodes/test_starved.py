"""``ddpdoctor check`` across nodes, in a lab: lack of CPU time is no fault of the cluster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.lab.checking import Make
from tests.lab.network import Host
from tests.lab.starving import interrupted, throttled

SHARES = [
    (throttled, 0, 0.03),
    (throttled, 1, 0.03),
    (throttled, 1, 0.1),
    (interrupted, 1, 0.1),
    (interrupted, 0, 0.2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "rank", "share"), SHARES)
def test_a_node_without_cpu_time_is_no_fault(
    nodes: Make, how: Callable[[Host, float], AbstractContextManager[None]], rank: int, share: float
) -> None:
    """Nothing is found, unless the node comes too late for the others. What took too long could not
    run, and says what was slow."""
    checks = nodes(3)
    with how(checks.lab.hosts[rank], share):
        said = checks.run("--skip", "collectives")
    for each in said:
        late = each.host.rank != rank and "did not come within" in each.messages
        assert each.codes == (["DDP050"] if late else []), (each.host.name, each.document)
        statuses = {row["status"] for row in each.document["checks"]}
        assert late or each.status == (4 if "could not run" in statuses else 0)
        for row in each.document["checks"]:
            if row["status"] == "could not run":
                assert "CPU" in row["detail"] or "could not finish" in row["detail"], row

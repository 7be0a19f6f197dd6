"""What rules say of the nodes of a run: what differs, which is lost, whose clock is wrong."""

from __future__ import annotations

import json

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.status import Phase
from tests.support.written import MS, SECOND, T0, Written

SAME = {"torch": "2.13.0", "python": "3.11.7", "cuda": "12.8", "nccl": "2.28.9", "driver": "580.1"}


def differing(written: Written, **other: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """What is found if one of three nodes has other versions."""
    for rank in range(3):
        versions = {**SAME, **(other if rank == 1 else {})}
        written.rank(rank, [], opened={"host": f"node{rank}", "versions": versions})
    return [
        (each.severity.label, each.message, each.evidence)
        for each in written.findings()
        if each.code == "DDP057"
    ]


@pytest.mark.parametrize(
    ("name", "version", "severity", "what"),
    [
        ("torch", "2.12.0", "error", "torch"),
        ("torch", "2.13.1", "warning", "torch"),
        ("nccl", "2.27.3", "error", "NCCL"),
        ("cuda", "12.6", "warning", "CUDA"),
        ("driver", "570.2", "warning", "the NVIDIA driver"),
        ("python", "3.12.1", "warning", "Python"),
    ],
)
def test_another_version_on_one_node_is_named(
    written: Written, name: str, version: str, severity: str, what: str
) -> None:
    ((said, message, evidence),) = differing(written, **{name: version})
    assert (said, message) == (severity, f"{what} is not the same on all nodes: node1 differs")
    assert [each.rpartition(": ")[2] for each in evidence] in (
        ["node1", "node0, node2"],
        ["node0, node2", "node1"],
    )


def test_equal_versions_and_what_a_node_does_not_know_are_no_difference(written: Written) -> None:
    assert differing(written, python="3.11.2", nccl="", driver="") == []


@pytest.mark.parametrize(
    ("name", "differs"),
    [("NCCL_ALGO", True), ("NCCL_SOCKET_IFNAME", False), ("NCCL_IB_GID_INDEX", False)],
)
def test_variables_that_name_devices_may_differ(written: Written, name: str, differs: bool) -> None:
    for rank in range(3):
        variables = {name: "3" if rank == 1 else "1"}
        opened = {"host": f"node{rank}", "versions": SAME, "variables": variables}
        written.rank(rank, [], opened=opened)
    assert bool([each for each in written.findings() if each.code == "DDP057"]) is differs


def test_other_gpus_are_an_info(written: Written) -> None:
    for rank in range(3):
        model = DdpRecord(device_name="NVIDIA A100" if rank == 2 else "NVIDIA H100")
        opened = {"host": f"node{rank}", "versions": SAME}
        written.rank(rank, [model], opened=opened)
    (finding,) = (each for each in written.findings() if each.code == "DDP057")
    assert finding.severity is Severity.INFO and "node2 differs" in finding.message


def test_fewer_gpus_are_an_info(written: Written) -> None:
    for rank, gpus in enumerate((8, 8, 4)):
        host = f"node{rank}"
        written.rank(rank, [], opened={"host": host, "versions": SAME})
        file = {"format": 1, "host": host, "gpus": [{"index": at} for at in range(gpus)]}
        (written.path / f"gpus-{host}.json").write_text(json.dumps(file))
    (finding,) = (each for each in written.findings() if each.code == "DDP057")
    assert finding.severity is Severity.INFO
    assert finding.message == "the number of GPUs is not the same on all nodes: node2 differs"


def on_node(written: Written, rank: int, **more: object) -> None:
    """A rank of another node, of which these are facts."""
    node = {"kind": "node", "time": T0, "number": 1, "host": "node1", "place": "@n1"}
    written.supervisor.append({**node, **more})
    opened = {"host": "node1", "namespace": "7@n1"}
    written.rank(rank, [], phase=Phase.FORWARD, opened=opened)


@pytest.mark.parametrize(
    ("apart", "when"),
    [
        (5 * MS, "at the same time, within the clocks' error of 20.0 ms"),
        (200 * MS, "0.2 s later"),
    ],
)
def test_which_of_two_nodes_failed_first_may_be_within_the_error_of_their_clocks(
    written: Written, apart: int, when: str
) -> None:
    written.rank(0, [], phase=Phase.FORWARD)
    on_node(written, 1, state="clock", ahead=0, error=20 * MS)
    written.exit(0, 3, T0)
    written.exit(1, 3, T0 + apart)
    (finding,) = written.findings(status=1)
    assert finding.ranks == (0,)
    assert any(f"rank 1 failed {when}, too" in each for each in finding.evidence), finding


@pytest.mark.parametrize(
    ("seconds", "found"), [(0.9, []), (-3, ["3.0 s ahead of"]), (20, ["20.0 s behind"])]
)
def test_a_wrong_clock_is_named(written: Written, seconds: float, found: list[str]) -> None:
    written.rank(0, [])
    on_node(written, 1, state="clock", ahead=int(seconds * SECOND), error=MS)
    said = [each.message for each in written.findings() if each.code == "DDP052"]
    assert [f"the clock of node1 is {each} that of this node" for each in found] == said


def test_a_lost_node_is_the_reason_of_a_failure(written: Written) -> None:
    written.rank(0, [], phase=Phase.WAIT)
    on_node(written, 1, state="lost")
    (finding,) = (each for each in written.findings(status=1) if each.code == "DDP215")
    assert (finding.severity, finding.ranks) == (Severity.ERROR, (1,))

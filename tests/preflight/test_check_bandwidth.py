"""What links are built for, and the bus bandwidth of the collectives beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.preflight.check import Outcome, Status
from ddpdoctor.preflight.machine.network import Interface, interfaces
from ddpdoctor.preflight.nodes import attendance, reductions
from ddpdoctor.preflight.protocol import facts
from ddpdoctor.preflight.protocol.joining import Problem
from ddpdoctor.preflight.protocol.meet import Meeting, meet_or_fail, meeting_of
from ddpdoctor.preflight.protocol.messages import Facts, Node, Reduction, Report, Speeds
from ddpdoctor.preflight.situation import NodePlace, Once, Situation, gpu_facts, visible_gpus
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.system.nvml import Device, GpuFacts, Health

ETH0 = Interface("eth0", ("10.0.0.1",))


def machine(sys: Path, *gpus: Health, wired: bool = False, **env: str) -> Situation:
    once = Once()
    pairs = tuple((i, j) for i in range(len(gpus)) for j in range(i + 1, len(gpus)))
    once.put(gpu_facts, GpuFacts(gpus=gpus, nvlinked=pairs if wired else pairs[:1]))
    once.put(visible_gpus, len(gpus))
    here: tuple[Interface, ...] = (ETH0,)
    once.put(interfaces, here)
    return Situation(environ=env, sys=sys, once=once)


def gpu(index: int, **facts: Any) -> Health:
    device = Device(index, f"GPU-{index}", "H", mig=False, bus_id=f"00000000:0{index}:00.0")
    return Health(device, width=16, generation=1, generation_most=5, **facts)


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")


def card(sys: Path, name: str, driver: str, speed: str) -> None:
    """A network card as sysfs shows one."""
    write(sys / "class" / "net" / name, speed=speed)
    drivers = sys / "bus" / "pci" / "drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    device = sys / "devices" / name
    device.mkdir(parents=True)
    (device / "driver").symlink_to(drivers)
    (sys / "class" / "net" / name / "device").symlink_to(device)


# What the machine tells.


def test_gpus_on_nvlink_or_else_on_pcie(tmp_path: Path) -> None:
    all_wired = machine(tmp_path, *(gpu(i, links=(True,) * 18) for i in range(4)), wired=True)
    assert facts.intra_node_capacity(all_wired) == facts.LinkCapacity("18 NVLinks", 360e9)
    # Bridges of pairs: a ring through all four goes over PCIe, whose generation rests when idle.
    bridged = machine(tmp_path, *(gpu(i, links=(True,) * 4) for i in range(4)))
    found = facts.intra_node_capacity(bridged)
    assert (found.link, round(found.speed / 1e9)) == ("PCIe 5 x16", 63)
    assert facts.intra_node_capacity(machine(tmp_path, gpu(0))).speed == 0


def test_a_real_network_card_is_believed_and_a_virtual_one_is_not(tmp_path: Path) -> None:
    card(tmp_path, "eth0", "mlx5_core", "100000")
    found = facts.inter_node_capacity(machine(tmp_path))
    assert found == facts.LinkCapacity("eth0, 100 Gbit/s", 12.5e9)
    for name, driver, speed, why in (
        ("eth1", "virtio_net", "10000", "eth1 is virtual"),
        ("eth2", "hv_netvsc", "50000", "eth2 is virtual"),
        ("eth3", "ixgbe", "-1", "eth3 does not report its speed"),
    ):
        card(tmp_path, name, driver, speed)
        assert facts.interface_speed(tmp_path, name) == facts.LinkCapacity(why)
    write(tmp_path / "class" / "net" / "veth7", speed="10000")
    unknown = facts.interface_speed(tmp_path, "veth7")
    assert unknown == facts.LinkCapacity("veth7 is virtual")
    bond = tmp_path / "class" / "net" / "bond0"
    write(bond, speed="200000")
    write(bond / "bonding", slaves="eth0")
    assert facts.interface_speed(tmp_path, "bond0").speed == 25e9
    write(bond / "bonding", slaves="eth0 eth1")
    assert facts.interface_speed(tmp_path, "bond0").speed == 0


def test_the_slowest_active_port_of_infiniband(tmp_path: Path) -> None:
    card(tmp_path, "eth0", "mlx5_core", "10000")
    ports = tmp_path / "class" / "infiniband"
    write(ports / "mlx5_0" / "ports" / "1", state="4: ACTIVE", link_layer="InfiniBand",
          rate="400 Gb/sec (4X NDR)")  # fmt: skip
    write(ports / "mlx5_1" / "ports" / "1", state="4: ACTIVE", link_layer="InfiniBand",
          rate="200 Gb/sec (4X HDR)")  # fmt: skip
    write(ports / "mlx5_2" / "ports" / "1", state="1: DOWN", link_layer="InfiniBand",
          rate="10 Gb/sec (4X SDR)")  # fmt: skip
    write(ports / "rdmap0" / "ports" / "1", state="4: ACTIVE", link_layer="Unspecified",
          rate="100 Gb/sec")  # fmt: skip
    found = facts.inter_node_capacity(machine(tmp_path))
    assert found == facts.LinkCapacity("InfiniBand mlx5_1, 200 Gbit/s", 25e9)
    without = facts.inter_node_capacity(machine(tmp_path, NCCL_IB_DISABLE="1"))
    assert without == facts.LinkCapacity("eth0, 10 Gbit/s", 1.25e9)


# What came of the collectives.


def node(index: int, inside: tuple[str, float], outside: tuple[str, float]) -> Node:
    facts = Facts(
        host=f"node{index}", rank=index, nnodes=2, nproc=8,
        machine=str(index), gloo_address=f"10.0.1.{index + 1}", nccl_address="",
        gloo_why="node resolves to it", interfaces=(("eth0", 1500, (f"10.0.0.{index + 1}",)),),
        lookup=0.0, master="", others=(), down=(), networks=(), unplugged=(),
        pair_port=4000, reduces=True, gpus=8, no_nccl="", inside=inside, outside=outside,
        torch="", nccl="", driver="", python="", ddpdoctor="", variables={}, script="",
        script_hash="", commit="", changes="", folder="",
    )  # fmt: skip
    return Node(facts, f"10.0.0.{index + 1}")


NVLINK, IB = ("18 NVLinks", 360e9), ("InfiniBand mlx5_0, 400 Gbit/s", 50e9)


def meeting(reduction: dict[str, Any], outside: tuple[str, float] = IB) -> Situation:
    told = {"skipped": "", "world": 16, "correct": 16, "correct_nodes": 2, "limit": 20.0,
            "wrong": [], "bus": 0.0, "idle": 0.9, "nccl": None}  # fmt: skip
    report = Report(
        expected=2,
        nodes=(node(0, NVLINK, outside), node(1, NVLINK, outside)),
        reduction=decoder(Reduction)({**told, **reduction}),
        speed=Speeds(least=1.1e9, bandwidth=1.2e9),
    )
    came = Meeting(NodePlace(2, 0, "node0", 29500, "none"), own=0, report=report)
    once = Once()
    result: Meeting | Exception = came
    once.put(meet_or_fail, result)
    return Situation(once=once)


def test_ranks_without_an_answer_are_counted_and_their_node_is_named() -> None:
    told = meeting({"world": 2, "correct": 1, "correct_nodes": 1})
    came = meeting_of(told)
    nodes = (came.nodes[0], replace(came.nodes[1], lost="reducing"))
    gone = replace(came, report=replace(came.report, nodes=nodes))
    result: Meeting | Exception = gone
    told.once.put(meet_or_fail, result)
    (finding,) = reductions.gloo_reduction(told).findings
    assert finding.message == "1 rank did not reduce correctly, on node1 (node 1) within 20 s"


def test_torch_that_is_late_on_a_node_blames_no_node() -> None:
    late = meeting({"skipped": "not all ranks have torch", "unready": [[1, "late", 25.0]]})
    outcome = reductions.gloo_reduction(late)
    assert (outcome.status, outcome.findings) == (Status.COULD_NOT_RUN, ())
    assert outcome.detail.startswith(
        "not tested, for lack of CPU: torch was not imported within 25 s on node1 (node 1)"
    )
    assert reductions.nccl_reduction(late).status is Status.SKIPPED


def test_a_check_whose_time_is_over_blames_no_node() -> None:
    once = Once()
    over = Meeting(NodePlace(2, 0, "node0", 29500, "none"), problem=Problem("time"))
    result: Meeting | Exception = over
    once.put(meet_or_fail, result)
    outcome = attendance.attendance(Situation(once=once))
    assert (outcome.status, outcome.findings) == (Status.COULD_NOT_RUN, ())


def stage(name: str, errors: Any = (), sets: Any = ()) -> dict[str, Any]:
    """A stage as the coordinator sends it."""
    return {"name": name, "errors": list(errors), "sets": list(sets)}


def nccl(inside: float, between: float, outside: tuple[str, float] = IB) -> Outcome:
    stages = [
        stage("inside the node", sets=[[[1], inside], [[0], 250e9]]),
        stage("between nodes 1 apart", sets=[[[0, 1], between]]),
        stage("of all nodes", sets=[[[0, 1], between]]),
    ]
    told = meeting({"nccl": {"correct": 16, "stages": stages, "untested": ""}}, outside)
    return reductions.nccl_reduction(told)


def test_nccl_over_its_links_is_silent() -> None:
    outcome = nccl(240e9, 30e9)
    assert outcome.status is Status.PASS
    assert outcome.detail.startswith(
        "16 of 16 ranks reduced correctly; inside the node 240.0 GB/s of 360.0 GB/s (18 NVLinks); "
    )


def test_nccl_beside_its_links_is_told_with_the_stage_and_the_node() -> None:
    outcome = nccl(12e9, 30e9)
    (finding,) = outcome.findings
    assert outcome.status is Status.WARN
    assert finding.message == (
        "NCCL moves 12.0 GB/s inside the node (node1 (node 1)), far less than the link's "
        "360.0 GB/s (18 NVLinks)"
    )
    (finding,) = nccl(240e9, 1.1e9).findings
    assert finding.message.startswith("NCCL moves 1.1 GB/s between nodes 1 apart (node0 (node 0, ")
    assert finding.paste == "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET"


@pytest.mark.parametrize(
    ("again", "said"),
    [
        ([], "between nodes 1 apart fails: node0 (node 0, this one), node1 (node 1)"),
        (
            [[0, 1, True], [1, 0, False]],
            "between nodes 1 apart fails because of node1 (node 1)",
        ),
        (
            [[0, 1, True], [1, 0, True]],
            "fails between node0 (node 0, this one), node1 (node 1) alone",
        ),
    ],
)
def test_nccl_blames_a_node_only_if_it_fails_with_another_one_too(
    again: list[list[object]], said: str
) -> None:
    stages = [
        stage("inside the node"),
        stage("between nodes 1 apart", [[0, [0, 1], "timed out"], [1, [0, 1], "no device"]]),
    ]
    told = meeting({"nccl": {"correct": 0, "stages": stages, "again": again, "untested": ""}})
    (finding,) = reductions.nccl_reduction(told).findings
    assert finding.message == f"NCCL's all_reduce {said}"
    assert "node1: no device" in finding.evidence


def test_nccl_is_not_green_where_it_was_not_tested_or_ranks_did_not_end() -> None:
    stages = [stage("inside the node")]
    late = {"correct": 0, "stages": stages, "untested": "between nodes 1 apart"}
    outcome = reductions.nccl_reduction(meeting({"nccl": late}))
    assert outcome.status is Status.COULD_NOT_RUN
    assert "no time was left for NCCL between nodes 1 apart" in outcome.detail
    ended = {"correct": 15, "stages": stages, "untested": ""}
    outcome = reductions.nccl_reduction(meeting({"nccl": ended}))
    assert outcome.status is Status.FAIL
    assert "not finished by 1 of 16 ranks" in outcome.findings[0].message


def test_a_link_of_unknown_speed_is_said_and_not_compared() -> None:
    outcome = nccl(240e9, 0.2e9, ("eth0 is virtual", 0.0))
    assert outcome.status is Status.PASS
    assert outcome.detail.endswith("of all nodes 0.2 GB/s, not compared: eth0 is virtual")


@pytest.mark.parametrize(
    ("told", "status", "detail"),
    [
        ({"bus": 0.5e9}, Status.PASS, "bus bandwidth 0.5 GB/s, TCP has 1.1 GB/s"),
        ({"bus": 2.4e6}, Status.WARN, "bus bandwidth 2.4 MB/s, TCP has 1.1 GB/s"),
        ({"bus": 2.4e6, "idle": 0.1}, Status.PASS, "not compared: the cores were busy"),
        ({"bus": 2.4e6, "world": 128, "correct": 128}, Status.PASS, "not compared: over 64 ranks"),
    ],
)
def test_gloo_beside_one_connection_of_tcp(
    told: dict[str, Any], status: Status, detail: str
) -> None:
    outcome = reductions.gloo_reduction(meeting(told))
    assert outcome.status is status
    assert outcome.detail.endswith(detail)
    if status is Status.WARN:
        (finding,) = outcome.findings
        assert finding.paste == "export GLOO_SOCKET_IFNAME=eth0"
        assert "gloo 10.0.1.1 (node resolves to it), reached at 10.0.0.1" in finding.evidence[0]

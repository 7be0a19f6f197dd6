"""``ddpdoctor check`` on GPUs: the real binding on the stub of the driver's library."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.preflight.check import CHECKS, Status
from ddpdoctor.preflight.machine import (
    gpu_acs,
    gpu_count,
    gpu_driver,
    gpu_health,
    gpu_links,
    gpu_memory,
    gpu_peers,
    torch_files,
)
from ddpdoctor.preflight.machine.versions import Versions, judge
from ddpdoctor.preflight.situation import Once, Options, Situation, gpu_facts
from ddpdoctor.system.gpu.health import GpuFacts, Health
from ddpdoctor.system.gpu.reader import Device, Process
from tests.conftest import Doctor
from tests.nvml_stub import build

GPU_CHECKS = [name for name in CHECKS if name.startswith("gpu-") and name != "gpu-acs"]
"""Those that go by NVML."""
HEALTHY = ("ecc * 0", "throttle * 0", "memory * 80", "used * 0", "links * 18")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


class Gpus:
    """A machine with eight GPUs that have faults."""

    def __init__(self, doctor: Doctor, library: Path) -> None:
        self._doctor = doctor
        self._control = doctor.directory / "control"
        self._env = {"LD_LIBRARY_PATH": str(library), "NVML_STUB": str(self._control)}

    def check(self, *faults: str, words: tuple[str, ...] = (), **env: str) -> dict[str, Any]:
        """Each check's record, by name, with these faults before the healthy values."""
        self._control.write_text("".join(f"{line}\n" for line in (*faults, *HEALTHY)))
        only = ("--only", ",".join(GPU_CHECKS))
        result = self._doctor.cli("check", "--json", *only, *words, env={**self._env, **env})
        assert result.stderr == ""
        told = json.loads(result.stdout)
        assert told["exit_status"] == result.status
        return {each["check"]: each for each in told["checks"]}


@pytest.fixture
def gpus(doctor: Doctor, library: Path) -> Gpus:
    return Gpus(doctor, library)


def messages(told: dict[str, Any], check: str) -> list[str]:
    return [finding["message"] for finding in told[check]["findings"]]


def test_eight_healthy_gpus_are_silent(gpus: Gpus) -> None:
    told = gpus.check()
    assert {each["status"] for each in told.values()} == {"pass"}
    assert {name: each["detail"] for name, each in told.items()} | {"gpu-health": ""} == {
        "gpu-driver": "8 of 8 GPUs answer, driver 570.86.15",
        "gpu-count": "8 of 8 GPUs visible, for 8 ranks",
        "gpu-memory": "8 GPUs: 80 GiB free, or more",
        "gpu-health": "",
        "gpu-links": "8 GPUs: PCIe x16, 144 NVLinks up",
        "gpu-peers": "28 of 28 pairs of GPUs have peer-to-peer access",
    }
    assert all(not each["findings"] for each in told.values())


def test_faults_of_different_gpus_are_each_told_once(gpus: Gpus) -> None:
    told = gpus.check(
        "ecc 3 2", "rows 2 1", "rows 4 2", "throttle 6 64", "width 5 4", "generation 7 3",
        "links 1 17", "peers 0 0", "mode 5 2", "persistence 0 0",
        "used 1 30", f"process 1 {os.getpid()}", "fabric 3 2", "fabric 4 3",
    )  # fmt: skip
    assert messages(told, "gpu-health") == [
        "GPU 3: 2 memory errors that ECC could not correct since the driver was loaded",
        "GPU 4 has no spare memory rows left for a faulty one",
        "GPU 2 has a faulty memory row that waits for a reset to be replaced",
        "GPU 6 is held down at 66 degrees Celsius: hardware thermal slowdown",
    ]
    assert messages(told, "gpu-links") == [
        "GPU 1 has 17 of 18 NVLinks up, fewer than its peers",
        'the NVSwitch fabric of GPU 3 is not set up: CUDA may fail with "system not yet '
        'initialized"',
        "GPU 5 has 4 of 16 PCIe lanes: the slowest link sets the pace of all ranks",
        "GPU 7 runs PCIe generation 3 of 5 though it is busy: the slowest link sets the pace of "
        "all ranks",
    ]
    assert messages(told, "gpu-count") == [
        "GPU 5 is in compute mode Prohibited: no process may use it"
    ]
    assert messages(told, "gpu-memory") == [
        "30 GiB of 80 GiB of GPU 1 are in use before the job starts"
    ]
    (evidence,) = told["gpu-memory"]["findings"][0]["evidence"]
    assert evidence.endswith(" holds 30 GiB") and f"pid {os.getpid()}" in evidence
    assert told["gpu-peers"]["status"] == "pass"
    assert messages(told, "gpu-peers")[0].startswith(
        "7 of 28 pairs of GPUs have no peer-to-peer access: 0-1, 0-2"
    )
    assert messages(told, "gpu-driver") == [
        "persistence mode is off on GPU 0: after a pause the driver takes seconds to come back"
    ]
    for each in told.values():
        assert all(finding["paste"] for finding in each["findings"])


def test_what_cuda_visible_devices_leaves_out_is_not_blamed(gpus: Gpus) -> None:
    faults = ("ecc 3 2", "used 1 30", "width 5 4")
    told = gpus.check(*faults, CUDA_VISIBLE_DEVICES="6,7")
    assert {each["status"] for each in told.values()} == {"pass"}
    assert told["gpu-count"]["detail"] == "2 of 8 GPUs visible, for 2 ranks"


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ("0,9,1", "there is no GPU 9, so that CUDA sees 1 of 8 GPUs"),
        ("0,1,1", "1 stands there twice, so that CUDA sees 0 of 8 GPUs"),
        ("GPU-99", "this machine has no GPU-99, so that CUDA sees 0 of 8 GPUs"),
        ("0,one", "'one' is no number or UUID"),
    ],
)
def test_a_wrong_choice_of_gpus(gpus: Gpus, chosen: str, said: str) -> None:
    told = gpus.check(CUDA_VISIBLE_DEVICES=chosen)["gpu-count"]
    assert told["status"] == "fail"
    (finding,) = told["findings"]
    assert said in finding["message"]
    assert finding["paste"] == "export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7"


def test_more_ranks_than_gpus(gpus: Gpus) -> None:
    told = gpus.check("gpus 4", words=("--nproc-per-node", "8"))["gpu-count"]
    assert told["status"] == "warn"
    assert told["findings"][0]["paste"] == "ddpdoctor run --nproc-per-node 4 -- train.py"


def test_no_gpu_is_asked_for(gpus: Gpus) -> None:
    told = gpus.check(CUDA_VISIBLE_DEVICES="")["gpu-count"]
    assert told["status"] == "skipped"
    assert told["detail"] == "CUDA_VISIBLE_DEVICES hides all 8 GPUs"
    others = gpus.check(CUDA_VISIBLE_DEVICES="NoDevFiles")
    assert {each["status"] for name, each in others.items() if name != "gpu-driver"} == {"skipped"}


def test_numbers_are_those_of_the_gpus_that_may_be_used(gpus: Gpus) -> None:
    """A batch system gave the last two of four, which CUDA counts from 0."""
    forbidden = [f"nvmlDeviceGetHandleByIndex {index} 4" for index in (0, 1)]
    told = gpus.check("gpus 4", *forbidden, "used 3 30", CUDA_VISIBLE_DEVICES="0,1")
    assert told["gpu-count"]["detail"] == "2 of 2 GPUs visible, for 2 ranks"
    assert told["gpu-count"]["status"] == "pass"
    assert messages(told, "gpu-memory") == [
        "30 GiB of 80 GiB of GPU 3 are in use before the job starts"
    ]
    assert told["gpu-links"]["detail"].startswith("2 GPUs: ")


def test_compute_modes(gpus: Gpus) -> None:
    assert gpus.check("mode * 3")["gpu-count"]["status"] == "pass"
    taken = gpus.check("mode 5 3", "process 5 1")
    assert messages(taken, "gpu-count") == [
        "GPU 5 is in compute mode Exclusive, and another process has it"
    ]


def test_partitioned_gpus(gpus: Gpus) -> None:
    one = gpus.check("mig * 1", "instances * 2")["gpu-count"]
    assert (one["status"], one["detail"]) == (
        "pass", "one MIG instance visible, all that CUDA shows a process, for 1 rank",
    )  # fmt: skip
    told = gpus.check("mig * 1", "instances * 2", words=("--nproc-per-node", "8"))
    assert told["gpu-memory"]["status"] == "skipped"
    assert told["gpu-count"]["status"] == "warn"
    assert "a process sees one instance" in messages(told, "gpu-count")[0]
    empty = gpus.check("mig 0 1", words=("--nproc-per-node", "1"))
    assert "GPU 0 is partitioned (MIG) and has no instances" in messages(empty, "gpu-count")[0]
    instance = "MIG-00000001-0000-0000-0000-000000000001"
    one = gpus.check(
        "mig 0 1", "instances 0 2", words=("--nproc-per-node", "1"), CUDA_VISIBLE_DEVICES=instance
    )
    assert one["gpu-count"]["status"] == "pass"


@pytest.mark.parametrize(
    ("fault", "said", "paste"),
    [
        ("nvmlInit * 18", "its library and kernel module differ", "sudo reboot"),
        ("nvmlInit * 4", "no permission", "ls -l /dev/nvidia*; id"),
        ("nvmlDeviceGetCount * 999", "unknown error", "sudo dmesg | grep -i nvrm"),
    ],
)
def test_a_driver_that_does_not_answer(gpus: Gpus, fault: str, said: str, paste: str) -> None:
    told = gpus.check(fault)
    torch = torch_files.torch()
    assert told["gpu-driver"]["status"] == ("fail" if torch and torch.cuda else "warn")
    (finding,) = told["gpu-driver"]["findings"]
    assert said in finding["message"]
    assert finding["paste"] == paste
    others = [each for name, each in told.items() if name != "gpu-driver"]
    assert {each["status"] for each in others} == {"skipped"}
    assert all(said in each["detail"] for each in others)


def test_a_torch_without_cuda_has_no_nccl_to_test(doctor: Doctor, library: Path) -> None:
    torch = torch_files.torch()
    if torch is None or torch.cuda or torch.hip:
        pytest.skip("this torch has CUDA")
    (doctor.directory / "control").write_text("\n".join(HEALTHY))
    env = {"LD_LIBRARY_PATH": str(library), "NVML_STUB": str(doctor.directory / "control")}
    words = ("--nproc-per-node", "2", "--only", "collectives,versions", "--json")
    result = doctor.cli("check", *words, env=env)
    versions, collectives = json.loads(result.stdout)["checks"]
    assert "is built without CUDA, and 8 GPUs stay unused" in versions["findings"][0]["message"]
    assert collectives["detail"] == (
        "2 of 2 ranks reduced correctly with gloo; NCCL skipped: torch without CUDA"
    )
    assert result.status == 1


WITH_CUDA = """
import sys
from pathlib import Path
if "check" in sys.orig_argv:
    from ddpdoctor.preflight.machine import torch_files
    known = torch_files.torch()
    torch_files.torch = lambda: torch_files.Torch(known.folder, known.version, "12.8")
"""
"""The check takes this torch for one that has CUDA; its ranks find out."""


@pytest.mark.slow
def test_nccl_that_cannot_be_opened_is_not_told_as_gloos_failure(
    doctor: Doctor, library: Path
) -> None:
    """Two nodes on this machine, with a GPU each that only NVML knows."""
    (doctor.directory / "control").write_text("\n".join(("gpus 1", *HEALTHY)))
    (doctor.directory / "fault").mkdir()
    (doctor.directory / "fault" / "sitecustomize.py").write_text(WITH_CUDA)
    env = {
        "LD_LIBRARY_PATH": str(library),
        "NVML_STUB": str(doctor.directory / "control"),
        "PYTHONPATH": str(doctor.directory / "fault"),
    }
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    words = ("--nnodes", "2", "--only", "nodes,gloo-nodes,nccl-nodes", "--json")
    command = (sys.executable, "-m", "ddpdoctor", "check", *words, "--rdzv-endpoint", endpoint)
    running = [
        doctor.start(*command, "--node-rank", str(rank), env=env, watch=False) for rank in (0, 1)
    ]
    for each in running:
        result = each.finish(90)
        told = {check["check"]: check for check in json.loads(result.stdout)["checks"]}
        assert told["gloo-nodes"]["status"] == "pass", told
        assert "2 of 2 ranks reduced correctly" in told["gloo-nodes"]["detail"]
        assert result.status == 2
        (finding,) = told["nccl-nodes"]["findings"]
        assert finding["message"].startswith("NCCL's all_reduce inside the node fails: ")
        assert "NCCL" in finding["evidence"][0]


@pytest.mark.slow
def test_a_driver_that_hangs_holds_nothing_up(gpus: Gpus) -> None:
    told = gpus.check("nvmlDeviceGetCount * -60")
    said = "the NVIDIA driver does not answer within 6 s"
    assert messages(told, "gpu-driver") == [f"no GPU can be used: {said}"]
    others = {each["detail"] for name, each in told.items() if name != "gpu-driver"}
    assert others == {f"the GPUs cannot be read: {said}"}


@pytest.mark.slow
def test_gpus_that_wake_up_one_after_the_other_are_waited_for(gpus: Gpus) -> None:
    """Without persistence mode, eight of them take half a minute."""
    told = gpus.check("gpus 6", "nvmlDeviceGetHandleByIndex * -2")
    assert {each["status"] for each in told.values()} == {"pass"}
    assert told["gpu-driver"]["detail"] == "6 of 6 GPUs answer, driver 570.86.15"


def test_lost_gpus_are_named_and_the_others_are_tested(gpus: Gpus) -> None:
    told = gpus.check("nvmlDeviceGetHandleByIndex 2 15", "nvmlDeviceGetMemoryInfo_v2 5 15")
    assert told["gpu-driver"]["detail"] == "6 of 8 GPUs answer, driver 570.86.15"
    assert messages(told, "gpu-driver") == [
        "GPU 2 does not answer: the GPU is lost: it fell off the bus",
        "GPU 5 does not answer: the GPU is lost: it fell off the bus",
    ]
    assert told["gpu-links"]["status"] == "pass"
    forbidden = gpus.check("nvmlDeviceGetHandleByIndex 2 4")
    assert forbidden["gpu-driver"]["detail"] == "7 of 7 GPUs answer, driver 570.86.15"
    assert {each["status"] for each in forbidden.values()} == {"pass"}


@pytest.mark.parametrize("code", [3, 4, 13])
def test_what_a_gpu_does_not_tell_is_no_fault(gpus: Gpus, code: int) -> None:
    """Not supported, no permission, a driver that is too old: for all that may be asked."""
    asked = (
        "TotalEccErrors", "RemappedRows", "RetiredPagesPendingStatus", "CurrPcieLinkWidth",
        "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration", "NvLinkState",
        "PersistenceMode", "ComputeMode", "PerformanceState", "P2PStatus", "MemoryInfo_v2",
        "MemoryInfo", "ComputeRunningProcesses", "CurrentClocksEventReasons", "Temperature",
    )  # fmt: skip
    told = gpus.check(*(f"nvmlDeviceGet{each} * {code}" for each in asked))
    assert {each["status"] for each in told.values()} <= {"pass", "skipped"}
    assert all(not each["findings"] for each in told.values())
    assert told["gpu-memory"]["detail"] == "the driver does not say how much is in use"
    assert told["gpu-peers"]["detail"] == "the driver does not say"


def device(index: int, name: str = "NVIDIA H100") -> Device:
    return Device(index, f"GPU-{index}", name, f"00000000:{index:02X}:00.0", False)


def situation(root: Path, *gpus: Health, peers: bool = True) -> Situation:
    """A machine of which NVML tells this, with a file system below ``root``."""
    pairs = [(a.device.index, b.device.index, peers) for a in gpus for b in gpus if a is not b]
    once = Once()
    once.put(gpu_facts, GpuFacts(gpus=gpus, peers=tuple(p for p in pairs if p[0] < p[1])))
    return Situation(Options(), environ={}, proc=root / "proc", sys=root / "sys", once=once)


def test_gpus_of_several_kinds_have_two_orders(tmp_path: Path) -> None:
    gpus = (Health(device(0)), Health(device(1, "NVIDIA A40")))

    def about(**env: str) -> list[str]:
        outcome = gpu_count.gpu_count(replace(situation(tmp_path, *gpus), environ=env))
        assert outcome.status is Status.PASS
        return [finding.about for finding in outcome.findings]

    assert about(CUDA_VISIBLE_DEVICES="0") == ["order"]
    assert about(CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == []
    assert about(CUDA_VISIBLE_DEVICES="GPU-1") == about() == []


def test_bridges_of_some_gpus_are_no_fault(tmp_path: Path) -> None:
    pair = [Health(device(i), links=(True,) * 4) for i in (0, 1)]
    alone = Health(device(2), links=(False,) * 4)
    assert gpu_links.gpu_links(situation(tmp_path, *pair, alone)).status is Status.WARN
    without = [Health(device(i), links=(False,) * 4) for i in (2, 3)]
    assert gpu_links.gpu_links(situation(tmp_path, *pair, *without)).status is Status.PASS


def test_the_generation_of_an_idle_gpu_is_no_fault(tmp_path: Path) -> None:
    idle = Health(device(0), width=16, width_most=16, generation=1, generation_most=5, busy=False)
    assert gpu_links.gpu_links(situation(tmp_path, idle)).status is Status.PASS


def test_a_board_that_shares_its_lanes_is_no_fault(tmp_path: Path) -> None:
    def lanes(*widths: int) -> list[str]:
        gpus = [Health(device(i), width=each, width_most=16) for i, each in enumerate(widths)]
        outcome = gpu_links.gpu_links(situation(tmp_path, *gpus))
        assert all("PCIe lanes" in finding.message for finding in outcome.findings)
        return [outcome.status.value, *(finding.about for finding in outcome.findings)]

    assert lanes(16, 16) == ["pass"]
    assert lanes(8, 8) == ["pass", "lanes 0", "lanes 1"]
    assert lanes(8) == ["pass", "lanes 0"]
    assert lanes(16, 8) == ["warn", "lanes 1"]
    assert lanes(4) == ["warn", "lanes 0"]


def test_a_process_is_named_only_if_it_is_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a container the driver may tell the host's pids, which others have here."""
    folder = tmp_path / "proc/77"
    (folder / "fd").mkdir(parents=True)
    (folder / "cmdline").write_bytes(b"python\0train.py\0")
    holder = (Process(77, 30 << 30),)
    gpu = Health(device(0), memory_total=80 << 30, memory_used=30 << 30, processes=holder)

    def named() -> str:
        (finding,) = gpu_memory.gpu_memory(situation(tmp_path, gpu)).findings
        return finding.evidence[0]

    assert named() == "pid 77 of another container holds 30 GiB"
    (folder / "fd/5").symlink_to("/dev/nvidia0")
    assert named() == "python train.py (pid 77) holds 30 GiB"
    (folder / "fd/5").unlink()
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").write_text("")
    number = (tmp_path / "proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(gpu_memory, "_FIRST_NAMESPACE", number)
    assert named() == "python train.py (pid 77) holds 30 GiB"


def test_a_job_on_the_cpu_needs_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    switch(tmp_path, acs=None)
    once = Once()
    once.put(gpu_facts, GpuFacts(trouble="no NVIDIA driver", code=12))
    machine = Situation(Options(), environ={}, proc=tmp_path, sys=tmp_path / "sys", once=once)
    for cuda, hidden, status in (
        ("12.8", {}, Status.FAIL),
        ("", {}, Status.WARN),
        ("12.8", {"CUDA_VISIBLE_DEVICES": ""}, Status.PASS),
    ):
        found = torch_files.Torch(Path("torch"), "2.13.0", cuda)
        monkeypatch.setattr(torch_files, "torch", lambda found=found: found)
        assert gpu_driver.gpu_driver(replace(machine, environ=hidden)).status is status


def test_gpus_that_the_machine_keeps_for_virtual_ones_are_not_missed(tmp_path: Path) -> None:
    switch(tmp_path, acs=None)
    once = Once()
    once.put(gpu_facts, GpuFacts(trouble="no NVIDIA driver", code=12))
    machine = Situation(Options(), environ={}, proc=tmp_path, sys=tmp_path / "sys", once=once)
    assert gpu_driver.gpu_driver(machine).status is not Status.SKIPPED
    (tmp_path / "drivers/vfio-pci").mkdir(parents=True)
    for card in (tmp_path / "sys/bus/pci/devices").iterdir():
        (card.resolve() / "driver").symlink_to(tmp_path / "drivers/vfio-pci")
    assert gpu_driver.gpu_driver(machine).detail == "no GPU"
    # amdgpu's folder, where a process computes on GPUs of that maker.
    (tmp_path / "sys/class/kfd").mkdir(parents=True)
    assert gpu_driver.gpu_driver(machine).detail == "no NVIDIA GPU (AMD's are not tested)"


def test_an_iommu_between_gpus_without_nvlink(tmp_path: Path) -> None:
    gpus = [Health(device(i)) for i in (0, 1)]
    for mode, status in (("identity", Status.PASS), ("DMA-FQ", Status.WARN)):
        for index in (0, 1):
            group = tmp_path / f"sys/bus/pci/devices/0000:{index:02x}:00.0/iommu_group"
            group.mkdir(parents=True, exist_ok=True)
            (group / "type").write_text(f"{mode}\n")
        assert gpu_peers.gpu_peers(situation(tmp_path, *gpus)).status is status
    without = [Health(device(i), links=(False,) * 4) for i in (0, 1)]
    assert gpu_peers.gpu_peers(situation(tmp_path, *without)).status is Status.WARN
    linked = [Health(device(i), links=(True,) * 18) for i in (0, 1)]
    assert gpu_peers.gpu_peers(situation(tmp_path, *linked)).status is Status.PASS
    assert gpu_peers.gpu_peers(situation(tmp_path, *gpus, peers=False)).status is Status.PASS


# Access control on PCIe switches.

ROOT_PORT, UPSTREAM, DOWNSTREAM = 4, 5, 6


def configuration(kind: int, acs: int | None) -> bytes:
    """The 4 KiB of a PCIe bridge: power management and PCI Express; error reporting and ACS."""
    space = bytearray(4096)
    space[0x00:0x04] = bytes.fromhex("b5101097")  # PLX, 0x9710
    space[0x06:0x08] = (0x0010).to_bytes(2, "little")  # it has a list of capabilities
    space[0x0A:0x0C] = (0x0604).to_bytes(2, "little")  # bridge, PCI to PCI
    space[0x0E] = 0x01
    space[0x34] = 0x40
    space[0x40:0x44] = bytes.fromhex("0168c3c8")  # power management, next at 0x68
    space[0x68:0x6C] = bytes((0x10, 0x00)) + (0x0002 | kind << 4).to_bytes(2, "little")
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0xFB4 << 20).to_bytes(4, "little")
    if acs is not None:
        space[0xFB4:0xFB8] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0xFB8:0xFBA] = (0x001F).to_bytes(2, "little")  # what it can
        space[0xFBA:0xFBC] = acs.to_bytes(2, "little")
    return bytes(space)


def switch(root: Path, acs: int | None, *, size: int = 4096, gpus: int = 2) -> None:
    """A root port, a switch below it, and GPUs below that, as sysfs nests them."""
    upstream = root / "sys/devices/pci0000:00/0000:00:01.0/0000:01:00.0"
    listed = root / "sys/bus/pci/devices"
    listed.mkdir(parents=True, exist_ok=True)
    folders = {upstream.parent: (ROOT_PORT, 0x1D), upstream: (UPSTREAM, None)}
    for index in range(gpus):
        port = upstream / f"0000:02:{index:02x}.0"
        folders[port] = (DOWNSTREAM, acs)
        card = port / f"0000:{index + 3:02x}:00.0"
        card.mkdir(parents=True)
        (card / "vendor").write_text("0x10de\n")
        (card / "class").write_text("0x030200\n")
        (card / "config").write_bytes(b"\xde\x10" + bytes(size - 2))
        (listed / card.name).symlink_to(card)
    for folder, (kind, control) in folders.items():
        (folder / "config").write_bytes(configuration(kind, control)[:size])


def test_access_control_on_the_ports_of_a_switch(tmp_path: Path) -> None:
    switch(tmp_path, acs=0x1D)
    outcome = gpu_acs.gpu_acs(situation(tmp_path, *(Health(device(i)) for i in (0, 1))))
    assert outcome.detail == "2 switch ports above 2 GPUs, ACS redirects on 2"
    (finding,) = outcome.findings
    assert (finding.code, outcome.status) == ("DDP026", Status.WARN)
    assert finding.evidence == (
        "0000:02:00.0: ACS control 0x001d",
        "0000:02:01.0: ACS control 0x001d",
    )
    assert finding.paste == (
        "for port in 0000:02:00.0 0000:02:01.0; do sudo setpci -v -s $port ECAP_ACS+0x6.w=0000; "
        "done"
    )


@pytest.mark.parametrize(
    ("acs", "size", "gpus", "detail"),
    [
        (0x00, 4096, 2, "2 switch ports above 2 GPUs, ACS redirects on 0"),
        (0x01, 4096, 2, "2 switch ports above 2 GPUs, ACS redirects on 0"),
        (None, 4096, 2, "2 switch ports above 2 GPUs, ACS redirects on 0"),
        (0x1D, 64, 2, "only 64 bytes of PCI 0000:02:00.0 can be read: run it as root"),
        (0x1D, 256, 2, "the kernel shows 256 bytes of PCI 0000:02:00.0 and no extended "
         "capabilities"),
        (0x1D, 4096, 1, "a single GPU"),
    ],
)  # fmt: skip
def test_access_control_that_is_off_or_cannot_be_read(
    tmp_path: Path, acs: int | None, size: int, gpus: int, detail: str
) -> None:
    switch(tmp_path, acs, size=size, gpus=gpus)
    outcome = gpu_acs.gpu_acs(situation(tmp_path, *(Health(device(i)) for i in range(gpus))))
    assert outcome.detail == detail
    assert outcome.findings == ()
    read = "switch ports" in detail
    assert outcome.status is (Status.PASS if read else Status.SKIPPED)


def test_access_control_harms_nobody_in_a_virtual_machine_or_beside_nvlink(tmp_path: Path) -> None:
    switch(tmp_path, acs=0x1D)
    once = Once()
    gpus = tuple(Health(device(i)) for i in (0, 1))
    once.put(gpu_facts, GpuFacts(gpus=gpus, nvlinked=((0, 1),)))
    proc = tmp_path / "proc"
    machine = Situation(Options(), environ={}, proc=proc, sys=tmp_path / "sys", once=once)
    assert gpu_acs.gpu_acs(machine).status is Status.PASS
    # A network card that reads the GPUs' memory goes over PCIe whatever joins the GPUs.
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert gpu_acs.gpu_acs(machine).status is Status.WARN
    proc.mkdir()
    (proc / "cpuinfo").write_text("flags\t\t: fpu vme hypervisor lahf_lm\n")
    assert gpu_acs.gpu_acs(machine).detail == "a virtual machine: its host decides"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 4096, bytes(4096)])
def test_a_damaged_configuration_space_does_no_harm(tmp_path: Path, damage: bytes) -> None:
    switch(tmp_path, acs=0x1D)
    for config in tmp_path.glob("sys/devices/**/config"):
        config.write_bytes(damage)
    machine = situation(tmp_path, *(Health(device(i)) for i in (0, 1)))
    assert gpu_acs.gpu_acs(machine).status is Status.SKIPPED


RECORDS = """\
3,900,{now},-;NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus.
 SUBSYSTEM=pci
3,901,{now},-;NVRM: Xid (PCI:0000:00:00): 13, pid=77, Graphics Exception
3,904,{now},-;NVRM: Xid (PCI:0000:00:00): 63, pid='<unknown>', Row Remapper: New row marked
3,902,{now},-;NVRM: Xid (PCI:0000:07:00): 79, pid=1234, a GPU that is not this job's
6,903,{now},-;eth0: link up
"""


def test_hardware_errors_in_the_kernels_log(tmp_path: Path) -> None:
    import time

    (tmp_path / "dev").mkdir()
    log = tmp_path / "dev/kmsg"
    now = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    log.write_text(RECORDS.format(now=now))
    machine = situation(tmp_path, Health(device(0)), Health(device(1)))
    outcome = gpu_health.gpu_health(machine)
    assert [finding.message for finding in outcome.findings] == [
        "GPU 1 logged the GPU fell off the bus (XID 79) 0 min ago"
    ]
    log.unlink()
    assert gpu_health.gpu_health(machine).detail.endswith("the kernel log may not be read")


@pytest.mark.parametrize(
    ("cuda", "driver", "gpus", "codes"),
    [
        ("12.8", "12.4", 8, []),
        ("13.0", "12.4", 8, ["driver"]),
        ("13.0", "12.4", 0, []),
        ("11.8", "12.4", 8, []),
        ("", "12.4", 8, ["no CUDA"]),
        ("", "", 0, []),
    ],
)
def test_torch_and_the_driver(cuda: str, driver: str, gpus: int, codes: list[str]) -> None:
    found = Versions("3.11.7", "2.13.0", cuda, "", "550.54", driver, "")
    assert [finding.about for finding in judge(found, gpus)] == codes


@pytest.mark.parametrize(("version", "codes"), [("11.5.3", ["pynvml"]), ("13.0.1", []), ("", [])])
def test_the_deprecated_binding(version: str, codes: list[str]) -> None:
    found = Versions("3.11.7", "2.13.0", "12.8", "", "", "", version)
    assert [finding.about for finding in judge(found, 8)] == codes


def test_no_torch(tmp_path: Path) -> None:
    (finding,) = judge(Versions("3.11.7", "", "", "", "", "", ""), 0)
    assert finding.paste == "pip install torch"

"""``ddpdoctor check`` on the links between GPUs: PCIe, NVLink, peers, access control."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpdoctor.preflight.check import Status
from ddpdoctor.preflight.machine import gpus as gpus_module
from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.situation import Once, Options, Situation, gpu_facts
from ddpdoctor.system.nvml import GpuFacts, Health, Process
from tests.conftest import Doctor
from tests.nvml_stub import build
from tests.support.gpu_stub import Gpus, device


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(doctor: Doctor, library: Path) -> Gpus:
    return Gpus(doctor, library)


def situation(root: Path, *gpus: Health, peers: bool = True) -> Situation:
    """A machine of which NVML tells this, with a file system below ``root``."""
    pairs = [(a.device.index, b.device.index, peers) for a in gpus for b in gpus if a is not b]
    once = Once()
    once.put(gpu_facts, GpuFacts(gpus=gpus, peers=tuple(p for p in pairs if p[0] < p[1])))
    return Situation(Options(), environ={}, proc=root / "proc", sys=root / "sys", once=once)


def test_gpus_of_several_kinds_have_two_orders(tmp_path: Path) -> None:
    gpus = (Health(device(0)), Health(device(1, "NVIDIA A40")))

    def about(**env: str) -> list[str]:
        outcome = gpus_module.gpu_count(replace(situation(tmp_path, *gpus), environ=env))
        assert outcome.status is Status.PASS
        return [finding.about for finding in outcome.findings]

    assert about(CUDA_VISIBLE_DEVICES="0") == ["order"]
    assert about(CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == []
    assert about(CUDA_VISIBLE_DEVICES="GPU-1") == about() == []


def test_bridges_of_some_gpus_are_no_fault(tmp_path: Path) -> None:
    pair = [Health(device(i), links=(True,) * 4) for i in (0, 1)]
    alone = Health(device(2), links=(False,) * 4)
    assert gpus_module.gpu_links(situation(tmp_path, *pair, alone)).status is Status.WARN
    without = [Health(device(i), links=(False,) * 4) for i in (2, 3)]
    assert gpus_module.gpu_links(situation(tmp_path, *pair, *without)).status is Status.PASS


def test_the_generation_of_an_idle_gpu_is_no_fault(tmp_path: Path) -> None:
    idle = Health(device(0), width=16, width_most=16, generation=1, generation_most=5, busy=False)
    assert gpus_module.gpu_links(situation(tmp_path, idle)).status is Status.PASS


def test_a_board_that_shares_its_lanes_is_no_fault(tmp_path: Path) -> None:
    def lanes(*widths: int) -> list[str]:
        gpus = [Health(device(i), width=each, width_most=16) for i, each in enumerate(widths)]
        outcome = gpus_module.gpu_links(situation(tmp_path, *gpus))
        assert all("PCIe lanes" in finding.message for finding in outcome.findings)
        return [outcome.status.value, *(finding.about for finding in outcome.findings)]

    assert lanes(16, 16) == ["pass"]
    # Both alike, so that one finding says it.
    assert lanes(8, 8) == ["pass", "lanes 0"]
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
        (finding,) = gpus_module.gpu_memory(situation(tmp_path, gpu)).findings
        return finding.evidence[0]

    assert named() == "pid 77 of another container holds 30 GiB"
    (folder / "fd/5").symlink_to("/dev/nvidia0")
    assert named() == "python train.py (pid 77) holds 30 GiB"
    (folder / "fd/5").unlink()
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").write_text("")
    number = (tmp_path / "proc/self/ns/pid").stat().st_ino
    monkeypatch.setattr(gpus_module, "_FIRST_NAMESPACE", number)
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
        found = software.Torch(Path("torch"), "2.13.0", cuda)
        monkeypatch.setattr(software, "installed_torch", lambda found=found: found)
        assert gpus_module.gpu_driver(replace(machine, environ=hidden)).status is status


def test_gpus_that_the_machine_keeps_for_virtual_ones_are_not_missed(tmp_path: Path) -> None:
    switch(tmp_path, acs=None)
    once = Once()
    once.put(gpu_facts, GpuFacts(trouble="no NVIDIA driver", code=12))
    machine = Situation(Options(), environ={}, proc=tmp_path, sys=tmp_path / "sys", once=once)
    assert gpus_module.gpu_driver(machine).status is not Status.SKIPPED
    (tmp_path / "drivers/vfio-pci").mkdir(parents=True)
    for card in (tmp_path / "sys/bus/pci/devices").iterdir():
        (card.resolve() / "driver").symlink_to(tmp_path / "drivers/vfio-pci")
    assert gpus_module.gpu_driver(machine).detail == "no GPU"
    # amdgpu's folder, where a process computes on GPUs of that maker.
    (tmp_path / "sys/class/kfd").mkdir(parents=True)
    assert gpus_module.gpu_driver(machine).detail == "no NVIDIA GPU (AMD's are not tested)"


def test_an_iommu_between_gpus_without_nvlink(tmp_path: Path) -> None:
    gpus = [Health(device(i)) for i in (0, 1)]
    for mode, status in (("identity", Status.PASS), ("DMA-FQ", Status.WARN)):
        for index in (0, 1):
            group = tmp_path / f"sys/bus/pci/devices/0000:{index:02x}:00.0/iommu_group"
            group.mkdir(parents=True, exist_ok=True)
            (group / "type").write_text(f"{mode}\n")
        assert gpus_module.gpu_peers(situation(tmp_path, *gpus)).status is status
    without = [Health(device(i), links=(False,) * 4) for i in (0, 1)]
    assert gpus_module.gpu_peers(situation(tmp_path, *without)).status is Status.WARN
    linked = [Health(device(i), links=(True,) * 18) for i in (0, 1)]
    assert gpus_module.gpu_peers(situation(tmp_path, *linked)).status is Status.PASS
    assert gpus_module.gpu_peers(situation(tmp_path, *gpus, peers=False)).status is Status.PASS


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
    outcome = gpus_module.gpu_acs(situation(tmp_path, *(Health(device(i)) for i in (0, 1))))
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
    outcome = gpus_module.gpu_acs(situation(tmp_path, *(Health(device(i)) for i in range(gpus))))
    assert outcome.detail == detail
    assert outcome.findings == ()
    read = "switch ports" in detail
    assert outcome.status is (Status.PASS if read else Status.SKIPPED)


def test_access_control_is_harmless_in_a_virtual_machine_or_beside_nvlink(tmp_path: Path) -> None:
    switch(tmp_path, acs=0x1D)
    once = Once()
    gpus = tuple(Health(device(i)) for i in (0, 1))
    once.put(gpu_facts, GpuFacts(gpus=gpus, nvlinked=((0, 1),)))
    proc = tmp_path / "proc"
    machine = Situation(Options(), environ={}, proc=proc, sys=tmp_path / "sys", once=once)
    assert gpus_module.gpu_acs(machine).status is Status.PASS
    # A network card that reads the GPUs' memory goes over PCIe whatever joins the GPUs.
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert gpus_module.gpu_acs(machine).status is Status.WARN
    proc.mkdir()
    (proc / "cpuinfo").write_text("flags\t\t: fpu vme hypervisor lahf_lm\n")
    assert gpus_module.gpu_acs(machine).detail == "a virtual machine: its host decides"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 4096, bytes(4096)])
def test_a_damaged_configuration_space_does_no_harm(tmp_path: Path, damage: bytes) -> None:
    switch(tmp_path, acs=0x1D)
    for config in tmp_path.glob("sys/devices/**/config"):
        config.write_bytes(damage)
    machine = situation(tmp_path, *(Health(device(i)) for i in (0, 1)))
    assert gpus_module.gpu_acs(machine).status is Status.SKIPPED


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
    outcome = gpus_module.gpu_health(machine)
    assert [finding.message for finding in outcome.findings] == [
        "GPU 1 logged the GPU fell off the bus (XID 79) 0s ago"
    ]
    log.unlink()
    assert gpus_module.gpu_health(machine).detail.endswith("the kernel log is not readable")

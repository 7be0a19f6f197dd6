"""What the links of this machine are built for: NVLink or PCIe inside, the network outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ddpdoctor.preflight.machine.gpu_facts import chosen, no_gpu
from ddpdoctor.preflight.machine.interfaces import interfaces, nccl_choice
from ddpdoctor.preflight.situation import Situation, gpu_facts

NVLINK = 20e9
"""Bytes per second that one link of any NVLink generation carries one way, or more: 20 GB/s for the
first, 25 for the second to fourth, 50 for the fifth."""

PCIE_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of one lane, one way, by the PCIe generation."""

_SAYS_ANYTHING = frozenset(
    {"hv_netvsc", "virtio_net", "vmxnet3", "xen_netfront", "vif", "gve", "ena", "veth", "tun"}
)
"""Drivers of virtual network cards: what speed they name is not what they get."""

_GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Capacity:
    """What a link can carry one way.

    Attributes:
        link: What it is, or why its speed is not known.
        speed: Bytes per second; 0 where it is not known.
    """

    link: str
    speed: float = 0.0


def inside(situation: Situation) -> Capacity:
    """Between the GPUs of this machine: the slowest that a ring through all of them needs."""
    gpus = chosen(situation)
    if len(gpus) < 2:
        return Capacity("a single GPU" if gpus else no_gpu(situation))
    wired = set(situation.shared(gpu_facts).nvlinked)
    indices = sorted(gpu.device.index for gpu in gpus)
    if all(pair in wired for pair in combinations(indices, 2)):
        links = min(sum(gpu.links) for gpu in gpus)
        if links:
            return Capacity(f"{links} NVLinks", links * NVLINK)
    widths = [gpu.width for gpu in gpus]
    generations = [gpu.generation_most for gpu in gpus]
    width = min((each for each in widths if each), default=0)
    generation = min((each for each in generations if each), default=0)
    if not all(widths) or not all(generations) or generation not in PCIE_LANE:
        return Capacity("the driver does not report the PCIe link")
    return Capacity(f"PCIe {generation} x{width}", width * PCIE_LANE[generation])


def outside(situation: Situation) -> Capacity:
    """To the other nodes, as NCCL will go: InfiniBand or RoCE where there is any, else a socket."""
    if situation.environ.get("NCCL_IB_DISABLE", "0") in ("", "0"):
        ports = sorted(_fabric_ports(situation.sys), key=lambda port: port.speed)
        if ports:
            return ports[0]
    choice = nccl_choice(situation.environ, situation.shared(interfaces))
    if not choice.interfaces:
        return Capacity("no interface")
    return interface_speed(situation.sys, choice.interfaces[0].name)


def _fabric_ports(sys: Path) -> Iterator[Capacity]:
    """The active ports of InfiniBand and RoCE; not EFA, which NCCL uses by a plugin alone."""
    with contextlib.suppress(OSError):
        for port in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
            with contextlib.suppress(OSError, ValueError, IndexError):
                # "4: ACTIVE"; "200 Gb/sec (4X HDR)"
                if "ACTIVE" not in (port / "state").read_text():
                    continue
                layer = (port / "link_layer").read_text().strip()
                rate = float((port / "rate").read_text().split()[0])
                if layer in ("InfiniBand", "Ethernet") and rate > 0:
                    kind = "InfiniBand" if layer == "InfiniBand" else "RoCE"
                    device = port.parent.parent.name
                    yield Capacity(f"{kind} {device}, {rate:.0f} Gbit/s", rate * _GIGABIT)


def interface_speed(sys: Path, name: str) -> Capacity:
    """What a network interface says of its speed, if a real card says it."""
    folder = sys / "class" / "net" / name
    if (folder / "bonding").is_dir():
        slaves = _text(folder / "bonding" / "slaves").split()
        if not slaves or not all(_is_real(folder.parent / slave) for slave in slaves):
            return Capacity(f"{name} is virtual")
    elif not _is_real(folder):
        return Capacity(f"{name} is virtual")
    try:
        megabits = int(_text(folder / "speed"))
    except ValueError:
        megabits = -1
    if megabits <= 0:
        return Capacity(f"{name} does not report its speed")
    return Capacity(f"{name}, {megabits / 1000:g} Gbit/s", megabits * 1e6 / 8)


def _is_real(folder: Path) -> bool:
    """Whether a card is behind an interface, and its driver is none of a virtual machine's."""
    try:
        driver = (folder / "device" / "driver").resolve(strict=True).name
    except OSError:
        return False
    return driver not in _SAYS_ANYTHING


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        # The kernel refuses to tell of an interface that is down.
        return ""

"""What the links of this machine are built for: NVLink or PCIe inside, the network outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.preflight.machine.gpu_facts import chosen, no_gpu
from ddpdoctor.preflight.machine.interfaces import interfaces, nccl_choice
from ddpdoctor.preflight.situation import Situation, gpu_facts, text

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


class Capacity(NamedTuple):
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
    width = min(gpu.width or 0 for gpu in gpus)
    generation = min(gpu.generation_most or 0 for gpu in gpus)
    if not width or generation not in PCIE_LANE:
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
    for port in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        # "4: ACTIVE"; "200 Gb/sec (4X HDR)"
        kind = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}.get(text(port / "link_layer"))
        with contextlib.suppress(ValueError):
            rate = float(text(port / "rate").partition(" ")[0])
            if kind and rate > 0 and "ACTIVE" in text(port / "state"):
                device = port.parent.parent.name
                yield Capacity(f"{kind} {device}, {rate:.0f} Gbit/s", rate * _GIGABIT)


def interface_speed(sys: Path, name: str) -> Capacity:
    """What a network interface says of its speed, if a real card says it."""
    folder = sys / "class" / "net" / name
    behind = [folder]
    if (folder / "bonding").is_dir():
        behind = [folder.parent / each for each in text(folder / "bonding" / "slaves").split()]
    if not behind or not all(map(_is_real, behind)):
        return Capacity(f"{name} is virtual")
    # The kernel has no answer for an interface that is down, or -1.
    speed = text(folder / "speed")
    megabits = int(speed) if speed.isdigit() else 0
    if not megabits:
        return Capacity(f"{name} does not report its speed")
    return Capacity(f"{name}, {megabits / 1000:g} Gbit/s", megabits * 1e6 / 8)


def _is_real(folder: Path) -> bool:
    """Whether a card is behind an interface, and its driver is none of a virtual machine's."""
    try:
        driver = (folder / "device" / "driver").resolve(strict=True).name
    except OSError:
        return False
    return driver not in _SAYS_ANYTHING

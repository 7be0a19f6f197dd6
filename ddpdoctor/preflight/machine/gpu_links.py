"""Whether the GPUs reach each other at full speed: PCIe, NVLink, peer-to-peer access, ACS."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import listed
from ddpdoctor.preflight.check import Outcome, check, judged, note, skipped, typed, warning
from ddpdoctor.preflight.machine.gpus import bus_gpus, job_gpus, no_gpu
from ddpdoctor.preflight.situation import Situation, gpu_facts, names, text
from ddpdoctor.system.gpu_health import Health

# -- PCIe, NVLink and peer-to-peer access


FEW = 4  # No board is designed with so many times fewer lanes than possible


@check("gpu-links", "DDP024")
def gpu_links(situation: Situation) -> Outcome:
    """A GPU's PCIe or NVLink connection is slower than the GPU and its slot allow.

    What it finds
        Fewer PCIe lanes than both GPU and slot have, and either fewer than GPUs of the same kind or
        at most a quarter of them. An older PCIe generation than both support, while the GPU is
        busy. NVLinks that are down on one GPU and up on others. An NVSwitch fabric that is not set
        up.

    Why it is bad
        The slowest link sets the pace of every all-reduce, on all ranks.

    How to fix it
        Reset the GPU or reboot; if that does not help, reseat the card, its riser or its bridge.
        NVIDIA's fabric manager sets up the fabric; its version must match the driver's.

    Example
        Wrong: "GPU 5 has 4 of 16 PCIe lanes".
        Right: 16 of 16 lanes after the card was reseated.

    When it stays silent
        For the generation of an idle GPU, which lowers it to save power. For slots with fewer lanes
        than the card. For GPUs without NVLink. If all GPUs have half of their lanes it is
        information: many boards share lanes between two slots, and laptops have no more.
    """
    gpus = job_gpus(situation)
    widths = sorted({gpu.width for gpu in gpus if gpu.width})
    pcie = f"PCIe x{'/'.join(map(str, widths))}, " if widths else ""
    links = sum(sum(gpu.links) for gpu in gpus)
    detail = f"{len(gpus)} GPUs: {pcie}{f'{links} NVLinks up' if links else 'no NVLink'}"
    findings: list[Finding] = []
    for gpu in gpus:
        peers = [other for other in gpus if other.device.name == gpu.device.name]
        findings += [*_fabric(gpu), *_pcie(gpu, peers), *_nvlink(gpu, peers)]
    return judged(detail, findings)


def _fabric(gpu: Health) -> Iterator[Finding]:
    if gpu.fabric_ready is False:
        yield warning(
            f"the NVSwitch fabric of GPU {gpu.device.index} is not set up: CUDA may fail with "
            '"system not yet initialized"',
            fix="Start the fabric manager, in the same version as the driver.",
            paste="sudo systemctl restart nvidia-fabricmanager",
            about=f"fabric {gpu.device.index}",
        )


def _pcie(gpu: Health, peers: Sequence[Health]) -> Iterator[Finding]:
    index = gpu.device.index
    paste = typed("nvidia-smi -q -i {} | grep -A12 'GPU Link Info'", index)
    what, about = "", "lanes"
    if gpu.width and gpu.width_most and gpu.width < gpu.width_most:
        what = f"has {gpu.width} of {gpu.width_most} PCIe lanes"
        widest = max(other.width or 0 for other in peers)
        if gpu.width >= widest and gpu.width * FEW > gpu.width_most:
            yield note(
                f"GPU {index} {what}, as on boards whose slots share them",
                fix="Nothing, if the slot has no more; else reseat the card or its riser.",
                paste=paste,
                about=f"lanes {index}",
            )
            return
    elif gpu.busy and gpu.generation and gpu.generation < (gpu.generation_most or 0):
        what = f"runs PCIe generation {gpu.generation} of {gpu.generation_most} though it is busy"
        about = "generation"
    if what:
        yield warning(
            f"GPU {index} {what}: the slowest link sets the pace of all ranks",
            fix="Reset it, or reboot; else reseat the card or its riser.",
            paste=paste,
            about=f"{about} {index}",
        )


def _nvlink(gpu: Health, peers: Sequence[Health]) -> Iterator[Finding]:
    links = [sum(other.links) for other in peers]
    up, most = sum(gpu.links), max(links)
    # A GPU without links may have no bridge, unless most of its peers have links.
    if up < most and links.count(most) > len(peers) / 2:
        yield warning(
            f"GPU {gpu.device.index} has {up} of {most} NVLinks up, fewer than its peers",
            fix="Reset the GPUs, or reboot; check the bridge or the fabric manager.",
            paste=typed("nvidia-smi nvlink --status -i {}", gpu.device.index),
            about=f"nvlink {gpu.device.index}",
        )


@check("gpu-peers", "DDP025")
def gpu_peers(situation: Situation) -> Outcome:
    """The GPUs cannot access each other's memory directly, or an IOMMU is in between.

    What it finds
        Pairs of GPUs without peer-to-peer access while other pairs of the same machine have it.
        GPUs without NVLink whose PCIe transfers an IOMMU translates (not in passthrough mode).

    Why it is bad
        Such pairs exchange gradients through host memory, and all ranks wait for them. With an
        IOMMU or PCIe access control (ACS) in between, peer-to-peer transfers over PCIe are slow,
        hang, or give wrong data.

    How to fix it
        Boot the host with `iommu=pt`, and turn off ACS on its PCIe bridges (DDP026), as NCCL's
        troubleshooting guide says. Until then, set `NCCL_P2P_DISABLE=1`.

    Example
        Wrong: `intel_iommu=on` alone on the kernel's command line.
        Right: `intel_iommu=on iommu=pt`

    When it stays silent
        If no pair has peer-to-peer access, as with most GeForce cards: NCCL detects that itself.
        With a single GPU. In a virtual machine without a virtual IOMMU.
    """
    gpus = job_gpus(situation)
    if len(gpus) < 2:
        return skipped("a single GPU")
    indices = {gpu.device.index for gpu in gpus}
    known = situation.shared(gpu_facts).peers
    pairs = [each for each in known if each[0] in indices and each[1] in indices]
    if not pairs:
        return skipped("the driver does not report it")
    direct = sum(works for _, _, works in pairs)
    detail = f"{direct} of {len(pairs)} pairs of GPUs have peer-to-peer access"
    return judged(detail, _peers(situation.sys, gpus, pairs))


def _peers(
    sys: Path, gpus: Sequence[Health], pairs: Sequence[tuple[int, int, bool]]
) -> Iterator[Finding]:
    without = [f"{one}-{other}" for one, other, works in pairs if not works]
    if without and len(without) < len(pairs):
        yield note(
            f"{len(without)} of {len(pairs)} pairs of GPUs have no peer-to-peer access: "
            f"{listed(without)}",
            fix="Nothing, where they are on different sockets; else check ACS and the IOMMU.",
            paste="nvidia-smi topo -p2p r",
            about="pairs",
        )
    translated = [gpu for gpu in gpus if not any(gpu.links) and _is_translated(sys, gpu)]
    if len(translated) > 1 and len(without) < len(pairs):
        yield warning(
            f"an IOMMU translates the PCIe transfers of {len(translated)} GPUs: peer-to-peer "
            "transfers may hang or give wrong data",
            fix="Boot the host with iommu=pt; until then disable peer-to-peer transfers.",
            paste="export NCCL_P2P_DISABLE=1",
            about="iommu",
        )


def _is_translated(sys: Path, gpu: Health) -> bool:
    """Return whether the kernel maps a GPU's transfers by an IOMMU, page by page."""
    domain, _, rest = gpu.device.bus_id.lower().partition(":")
    folder = sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    return text(folder / "iommu_group" / "type").startswith("DMA")


# -- PCIe access control (ACS)


_BRIDGE = 0x0604
_STATUS, _HAS_LIST, _CLASS, _FIRST = 0x06, 0x10, 0x0A, 0x34
"""In the standard header: the status register, its bit for a list of capabilities, the class, and
the start of that list. (PCI Local Bus 3.0, chapter 6; PCI Express Base, chapter 7.)"""

_EXPRESS, _DOWNSTREAM = 0x10, 6
"""The capability with the kind of a port, and the kind of a switch's port to a device."""

_EXTENDED, _ACS = 0x100, 0x000D
_CONTROL = 6  # The offset of the control register in the ACS capability

REDIRECTS = 0x04 | 0x08 | 0x20
"""Request redirect, completion redirect, egress control. "Source validation" does no harm."""

_MAX_CAPABILITIES = 128  # So that the loop through a damaged list ends


class Unreadable(Exception):
    """The part of the configuration space that describes ACS cannot be read."""


@dataclass(frozen=True)
class BridgePort:
    """A port of a PCIe switch above a GPU, such as ``0000:05:08.0``.

    Attributes:
        control: Its ACS control register; None without ACS.
    """

    address: str
    control: int | None

    @property
    def redirects(self) -> bool:
        """Whether it sends transfers between devices of its switch up to the root."""
        return bool((self.control or 0) & REDIRECTS)


@check("gpu-acs", "DDP026")
def gpu_acs(situation: Situation) -> Outcome:
    """PCIe access control (ACS) routes transfers between GPUs through the root complex.

    What it finds
        With two or more GPUs: ports of PCIe switches above a GPU on which ACS redirects requests or
        completions. Reading the configuration space needs root.

    Why it is bad
        Transfers between GPUs of one switch, and to a network card with GPUDirect next to them,
        take the way through the CPU. NCCL is slow, hangs, or silently gives wrong data.

    How to fix it
        Turn ACS off with `setpci` at every boot, or in the BIOS. Leave it on where virtual machines
        have devices passed through, which ACS isolates.

    Example
        Wrong: `ACSCtl: SrcValid+ ReqRedir+ CmpltRedir+` in `lspci -vvv`.
        Right: `ACSCtl: SrcValid- ReqRedir- CmpltRedir-`

    When it stays silent
        For ports that only validate sources. For root ports, between which transfers go through the
        CPU anyway. If NVLink connects all GPUs and there is no InfiniBand. In virtual machines,
        where the host decides.
    """
    gpus = bus_gpus(situation.sys)
    if len(gpus) < 2:
        return skipped("a single GPU" if gpus else no_gpu(situation))
    if "hypervisor" in text(situation.proc / "cpuinfo").split():
        return skipped("a virtual machine: its host decides")
    try:
        ports = list(_ports(gpus))
    except Unreadable as error:
        return skipped(str(error))
    if not ports:
        return skipped("no PCIe switch above the GPUs")
    on = [port for port in ports if port.redirects]
    detail = f"{len(ports)} switch ports above {len(gpus)} GPUs, ACS redirects on {len(on)}"
    if not on or not _uses_pcie(situation):
        return judged(detail, [])
    line = f"for port in {' '.join(['{}'] * len(on))}; do "
    line += "sudo setpci -v -s $port ECAP_ACS+0x6.w=0000; done"
    redirecting = warning(
        f"PCIe access control (ACS) redirects on {len(on)} of {len(ports)} switch ports above "
        "GPUs: transfers between GPUs go by way of the processor",
        evidence=tuple(f"{port.address}: ACS control {port.control:#06x}" for port in on[:8]),
        fix="Turn it off until the next boot, or for good in the BIOS; not where virtual machines "
        "get devices of their own:",
        paste=typed(line, *(port.address for port in on)),
        about="acs",
    )
    return judged(detail, [redirecting])


def _uses_pcie(situation: Situation) -> bool:
    """Return whether GPUs reach each other, or a fabric, over PCIe."""
    facts = situation.shared(gpu_facts)
    indices = sorted(gpu.device.index for gpu in facts.gpus)
    wired = set(facts.nvlinked)
    if len(indices) < 2 or not all(pair in wired for pair in combinations(indices, 2)):
        return True
    return bool(names(situation.sys / "class" / "infiniband"))


def _ports(gpus: list[Path]) -> Iterator[BridgePort]:
    """Yield the downstream ports of switches that lead to a GPU.

    Raises:
        Unreadable: One of them cannot be read as far as needed.
    """
    seen = set()
    for gpu in gpus:
        # Every bridge is a directory around those of the devices below it.
        for folder in gpu.resolve().parents:
            if folder in seen or not (folder / "config").exists():
                continue
            seen.add(folder)
            try:
                space = (folder / "config").read_bytes()
            except OSError as error:
                raise Unreadable(f"PCI {folder.name} cannot be read: {error.strerror}") from None
            if _is_downstream(space, folder.name):
                yield BridgePort(folder.name, acs_control(space, folder.name))


def _is_downstream(space: bytes, name: str) -> bool:
    if len(space) < 64 or _word(space, _CLASS) != _BRIDGE:
        return False
    if not _word(space, _STATUS) & _HAS_LIST:
        return False
    at = space[_FIRST] & ~3
    for _ in range(_MAX_CAPABILITIES):
        if at < 0x40:
            return False
        if at + 4 > len(space):
            raise Unreadable(f"only {len(space)} bytes of PCI {name} can be read: run it as root")
        if space[at] == _EXPRESS:
            return _word(space, at + 2) >> 4 & 0xF == _DOWNSTREAM
        at = space[at + 1] & ~3
    return False


def acs_control(space: bytes, name: str) -> int | None:
    """Return the ACS control register in a port's configuration space; None if it has no ACS.

    Raises:
        Unreadable: The bytes end before the extended capabilities, at byte 256.
    """
    if len(space) <= _EXTENDED:
        raise Unreadable(
            f"only {len(space)} bytes of PCI {name} can be read: run it as root"
            if len(space) < _EXTENDED
            else f"the kernel shows 256 bytes of PCI {name} and no extended capabilities"
        )
    at = _EXTENDED
    for _ in range(_MAX_CAPABILITIES):
        if at < _EXTENDED or at + 8 > len(space):
            return None
        (head,) = struct.unpack_from("<I", space, at)
        if head & 0xFFFF == _ACS:
            return _word(space, at + _CONTROL)
        at = head >> 20 & ~3
    return None


def _word(space: bytes, at: int) -> int:
    return int.from_bytes(space[at : at + 2], "little")

"""Whether PCIe access control (ACS) detours the transfers between GPUs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ddpdoctor.preflight.check import Outcome, check, judged, skipped, typed, warning
from ddpdoctor.preflight.machine.gpus import bus_gpus, no_gpu
from ddpdoctor.preflight.situation import Situation, gpu_facts, names, text

_BRIDGE = 0x0604
_STATUS, _HAS_LIST, _CLASS, _FIRST = 0x06, 0x10, 0x0A, 0x34
"""In the standard header: the status register, its bit for a list of capabilities, the class, and
the start of that list. (PCI Local Bus 3.0, chapter 6; PCI Express Base, chapter 7.)"""

_EXPRESS, _DOWNSTREAM = 0x10, 6
"""The capability that holds a port's type, and the type of a switch's downstream port."""

_EXTENDED, _ACS = 0x100, 0x000D
_CONTROL = 6  # The offset of the control register in the ACS capability

REDIRECTS = 0x04 | 0x08 | 0x20
"""Request redirect, completion redirect, egress control. "Source validation" does no harm."""

_MAX_CAPABILITIES = 128  # So that the loop through a damaged list ends


class Unreadable(Exception):
    """The part of the configuration space that describes ACS cannot be read."""


@dataclass(frozen=True)
class BridgePort:
    """A port of a PCIe switch above a GPU, such as ``0000:05:08.0``."""

    address: str
    control: int | None  # Its ACS control register; None without ACS

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
        go through the CPU. NCCL is slow, hangs, or silently gives wrong data.

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
        fix="Turn it off until the next boot, or for good in the BIOS; not where devices "
        "are passed through to virtual machines:",
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
        Unreadable: A configuration space cannot be read as far as needed.
    """
    seen = set()
    for gpu in gpus:
        # The directory of a bridge contains those of the devices below it.
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

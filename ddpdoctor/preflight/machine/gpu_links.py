"""Whether the GPUs reach each other at full speed: PCIe, NVLink and peer-to-peer access."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, judged, note, skipped, typed, warning
from ddpdoctor.preflight.machine.gpu_facts import job_gpus
from ddpdoctor.preflight.situation import Situation, gpu_facts, text
from ddpdoctor.preflight.words import first
from ddpdoctor.system.gpu.health import Health

FEW = 4
"""So many times fewer lanes than there could be are no board's design."""


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
    return judged(detail, _findings(gpus))


def _findings(gpus: Sequence[Health]) -> Iterator[Finding]:
    for gpu in gpus:
        peers = [other for other in gpus if other.device.name == gpu.device.name]
        if gpu.fabric_ready is False:
            yield warning(
                f"the NVSwitch fabric of GPU {gpu.device.index} is not set up: CUDA may fail with "
                '"system not yet initialized"',
                fix="Start the fabric manager, in the same version as the driver.",
                paste="sudo systemctl restart nvidia-fabricmanager",
                about=f"fabric {gpu.device.index}",
            )
        yield from _pcie(gpu, peers)
        yield from _nvlink(gpu, peers)


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
    # A GPU without any may be one without a bridge; where most have links it is not.
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
        return skipped("the driver does not say")
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
            f"{first(without)}",
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
    """Whether the kernel maps a GPU's transfers by an IOMMU, page by page."""
    domain, _, rest = gpu.device.bus_id.lower().partition(":")
    folder = sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    return text(folder / "iommu_group" / "type").startswith("DMA")

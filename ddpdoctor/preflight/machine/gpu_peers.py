"""Whether the GPUs of this machine can read each other's memory, and nothing corrupts that."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.machine.gpu_facts import chosen, none_here
from ddpdoctor.preflight.situation import Situation, gpu_facts
from ddpdoctor.system.gpu.health import GpuFacts, Health


@check("gpu-peers", "DDP025")
def gpu_peers(situation: Situation) -> Outcome:
    """The GPUs cannot read each other's memory directly, or an IOMMU stands in between.

    What it finds
        Pairs of GPUs without peer-to-peer access where others of the same machine have it; GPUs
        without NVLink whose PCIe transfers an IOMMU translates (not in passthrough mode).

    Why it is bad
        Pairs without it exchange gradients through host memory, and all ranks wait for them. With
        an IOMMU or PCIe access control (ACS) in between, peer-to-peer transfers over PCIe become
        slow, hang, or give wrong data.

    How to fix it
        Boot the host with `iommu=pt`, and turn ACS off on its PCIe bridges (DDP026), as NCCL's
        troubleshooting guide says; until then `NCCL_P2P_DISABLE=1`.

    Example
        Wrong: `intel_iommu=on` alone, on the kernel's command line.
        Right: `intel_iommu=on iommu=pt`.

    When it stays silent
        When no pair has peer-to-peer access, as with most GeForce cards: NCCL knows that by itself.
        With a single GPU, and inside a virtual machine without an IOMMU of its own.

    Since
        0.1.0
    """
    reason = none_here(situation)
    if reason:
        return skipped(reason)
    gpus = chosen(situation)
    if len(gpus) < 2:
        return skipped("a single GPU")
    facts = situation.shared(gpu_facts)
    indices = {gpu.device.index for gpu in gpus}
    pairs = [each for each in facts.peers if each[0] in indices and each[1] in indices]
    if not pairs:
        return skipped("the driver does not say")
    direct = sum(works for _, _, works in pairs)
    detail = f"{direct} of {len(pairs)} pairs of GPUs have peer-to-peer access"
    return judged(detail, _findings(situation, facts, gpus, pairs))


def _findings(
    situation: Situation,
    facts: GpuFacts,
    gpus: tuple[Health, ...],
    pairs: list[tuple[int, int, bool]],
) -> Iterator[Finding]:
    without = [(one, other) for one, other, works in pairs if not works]
    if without and len(without) < len(pairs):
        listed = ", ".join(f"{one}-{other}" for one, other in without[:8])
        more = f" and {len(without) - 8} more" if len(without) > 8 else ""
        yield Finding(
            "DDP025",
            Severity.INFO,
            f"{len(without)} of {len(pairs)} pairs of GPUs have no peer-to-peer access: {listed}"
            f"{more}",
            fix="Nothing, where they hang on different sockets; else look after ACS and the IOMMU.",
            paste="nvidia-smi topo -p2p r",
            about="pairs",
        )
    translated = [gpu for gpu in gpus if not any(gpu.links) and _is_translated(situation.sys, gpu)]
    if len(translated) > 1 and any(works for _, _, works in pairs):
        yield Finding(
            "DDP025",
            Severity.WARNING,
            f"an IOMMU translates the PCIe transfers of {len(translated)} GPUs: peer-to-peer "
            "transfers may hang or give wrong data",
            fix="Boot the host with iommu=pt; until then let NCCL do without.",
            paste="export NCCL_P2P_DISABLE=1",
            about="iommu",
        )


def _is_translated(sys: Path, gpu: Health) -> bool:
    """Whether the kernel maps a GPU's transfers by an IOMMU, page by page."""
    domain, _, rest = gpu.device.bus_id.lower().partition(":")
    folder = sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    try:
        return (folder / "iommu_group" / "type").read_text().strip().startswith("DMA")
    except OSError:
        return False

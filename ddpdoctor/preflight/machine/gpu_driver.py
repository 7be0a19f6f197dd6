"""Whether the NVIDIA driver answers, and for every GPU of the machine."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import (
    Outcome,
    check,
    failure,
    finding,
    judged,
    note,
    skipped,
    typed,
)
from ddpdoctor.preflight.machine import container, versions
from ddpdoctor.preflight.machine.gpu_facts import NO_DRIVER, driverless, no_gpu, on_the_bus
from ddpdoctor.preflight.situation import Situation, gpu_facts
from ddpdoctor.system.gpu.health import GpuFacts
from ddpdoctor.system.gpu.visible import hides_all

_MISMATCH, _NO_PERMISSION = 18, 4


@check("gpu-driver", "DDP020")
def gpu_driver(situation: Situation) -> Outcome:
    """The NVIDIA driver does not work, or not for every GPU.

    What it finds
        A driver that is not loaded, whose library and kernel module have different versions, that
        this user may not use, or that fails. GPUs that fell off the bus or need a reset.

    Why it is bad
        torch sees no GPU or one GPU less: the job trains on the CPU, or the last rank fails with
        "CUDA error: invalid device ordinal".

    How to fix it
        Load the driver; reboot after a driver update; give the container the GPUs; reset or replace
        a lost GPU.

    Example
        Wrong: `docker run image torchrun ...`
        Right: `docker run --gpus all image torchrun ...`

    When it stays silent
        On machines without an NVIDIA GPU, or whose GPUs are reserved for virtual machines; the
        output says so. Without a working driver it is a warning if torch has no CUDA, and
        information if CUDA_VISIBLE_DEVICES hides the GPUs. Persistence mode that is off is
        information: the first job after a pause starts some seconds later.
    """
    facts = situation.shared(gpu_facts)
    on_bus = on_the_bus(situation)
    if driverless(situation):
        return skipped(no_gpu(situation))
    count = len(facts.gpus) + len(facts.absent)
    well = sum(not gpu.lost for gpu in facts.gpus)
    detail = f"{well} of {count} GPUs answer, driver {facts.driver or 'unknown'}"
    if facts.trouble:
        detail = facts.trouble
    return judged(detail, _findings(situation, facts, on_bus))


def _findings(situation: Situation, facts: GpuFacts, on_bus: int) -> Iterator[Finding]:
    if facts.trouble:
        inside = container.kind(situation)
        if facts.code == _MISMATCH:
            fix, paste = "Reboot, or unload the old kernel module.", "sudo reboot"
        elif facts.code == _NO_PERMISSION:
            fix, paste = "Give this user access to the devices.", "ls -l /dev/nvidia*; id"
        elif facts.code in NO_DRIVER and inside in ("docker", "podman"):
            fix, paste = "Give the container the GPUs.", typed("{} run --gpus all ...", inside)
        elif facts.code in NO_DRIVER:
            fix, paste = "Load the driver.", "sudo modprobe nvidia"
        else:
            fix, paste = "See what the kernel says; reboot.", "sudo dmesg | grep -i nvrm"
        yield finding(
            _severity(situation),
            f"no GPU can be used: {facts.trouble}",
            evidence=(f"the PCI bus has {on_bus} NVIDIA GPUs",) if on_bus else (),
            fix=fix,
            paste=paste,
            about="driver",
        )
    for index, why in facts.absent:
        yield _lost(index, why)
    for gpu in facts.gpus:
        if "lost" in gpu.problem or "reset" in gpu.problem or "unknown error" in gpu.problem:
            yield _lost(gpu.device.index, gpu.problem)
    off = [gpu.device.index for gpu in facts.gpus if gpu.persistent is False]
    if off:
        yield note(
            f"persistence mode is off on GPU {', '.join(map(str, off))}: after a pause the driver "
            "takes seconds to come back",
            fix="Turn it on.",
            paste="sudo nvidia-smi -pm 1",
            about="persistence",
        )


def _severity(situation: Situation) -> Severity:
    """How bad it is that no GPU can be used: a job on the CPU needs none."""
    if hides_all(situation.environ):
        return Severity.INFO
    torch = versions.installed_torch()
    return Severity.ERROR if torch is None or torch.cuda else Severity.WARNING


def _lost(index: int, why: str) -> Finding:
    return failure(
        f"GPU {index} does not answer: {why}",
        fix="Reset it, or reboot; if it comes back lost, it has to be replaced. Until then leave "
        "it out by CUDA_VISIBLE_DEVICES.",
        paste=typed("sudo nvidia-smi --gpu-reset -i {}", index),
        about=f"gpu {index}",
    )

"""Which GPUs a job would use, and why there are none."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.preflight.check import Skip
from ddpdoctor.preflight.situation import Situation, cuda_choice, gpu_facts, names, text
from ddpdoctor.system.gpu.health import Health
from ddpdoctor.system.gpu.visible import hides_all

NVIDIA = "0x10de"
NO_DRIVER = (0, 9, 12)
"""NVML's codes where there is no library, no kernel module, or no driver at all."""

_GIVEN_AWAY = ("vfio-pci", "pci-stub")

_DISPLAY = "0x03"
"""The PCI class of graphics cards and of GPUs without an output."""


def chosen(situation: Situation) -> tuple[Health, ...]:
    """The GPUs that answer and that a job would use, in CUDA's order.

    The numbers in ``CUDA_VISIBLE_DEVICES`` are CUDA's; where all GPUs are alike they are those of
    the PCI bus.
    """
    gpus = situation.shared(gpu_facts).gpus
    places = situation.shared(cuda_choice).places
    return tuple(gpus[place] for place in places if not gpus[place].lost)


def job_gpus(situation: Situation) -> tuple[Health, ...]:
    """As :func:`chosen`, for a check of them.

    Raises:
        Skip: There are none.
    """
    reason = none_here(situation)
    if reason:
        raise Skip(reason)
    return chosen(situation)


def bus_gpus(sys: Path) -> list[Path]:
    """The folders of the NVIDIA GPUs on the PCI bus, whatever the driver says.

    Less those that the machine keeps for its virtual machines.
    """
    folder = sys / "bus" / "pci" / "devices"
    return [
        device
        for device in (folder / name for name in names(folder))
        if text(device / "vendor") == NVIDIA
        and text(device / "class").startswith(_DISPLAY)
        and (device / "driver").resolve().name not in _GIVEN_AWAY
    ]


def on_the_bus(situation: Situation) -> int:
    """How many NVIDIA GPUs the PCI bus has, whatever the driver says."""
    return len(bus_gpus(situation.sys))


def none_here(situation: Situation) -> str:
    """Why GPU checks are skipped; empty if there are GPUs that answer."""
    facts = situation.shared(gpu_facts)
    if facts.gpus and hides_all(situation.environ):
        return f"CUDA_VISIBLE_DEVICES hides all {len(facts.gpus)} GPUs"
    if facts.gpus:
        return ""
    return (
        no_gpu(situation) if driverless(situation) else f"the GPUs cannot be read: {facts.trouble}"
    )


def no_gpu(situation: Situation) -> str:
    """What there is instead, in the words of a skipped check."""
    if (situation.sys / "class" / "kfd").exists():
        return "no NVIDIA GPU (AMD's are not tested)"
    return "no GPU"


def driverless(situation: Situation) -> bool:
    """Whether there is no driver because there is no GPU, or neither of it can be seen."""
    facts = situation.shared(gpu_facts)
    if not facts.trouble:
        return not facts.absent and not facts.gpus
    return facts.code in NO_DRIVER and not on_the_bus(situation)

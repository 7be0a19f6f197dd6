"""Which GPUs a job started here would see, without importing torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpdoctor.core.opening import whole
from ddpdoctor.system.gpu.reader import Device, same_uuid

HIDES_ALL = ("", "-1", "NoDevFiles")
"""Values of ``CUDA_VISIBLE_DEVICES`` by which a person, or Slurm, means that there be no GPU."""


@dataclass(frozen=True)
class Choice:
    """What CUDA makes of ``CUDA_VISIBLE_DEVICES``.

    Attributes:
        places: The chosen GPUs, in CUDA's order, by their place among those that answer: CUDA
            counts those that this process may use, whatever number the driver gives them.
        count: How many devices a process sees. It sees one MIG instance at most, and no whole GPU
            beside one.
        wrong: What is wrong with the entry at which CUDA stopped; empty if nothing is.
    """

    places: tuple[int, ...]
    count: int
    wrong: str = ""


def visible(environ: Mapping[str, str]) -> int:
    """How many NVIDIA GPUs a process sees; 0 without a driver."""
    if hides_all(environ):
        return 0
    from ddpdoctor.system.gpu.nvml import NvmlReader

    reader = NvmlReader()
    found = [(each, reader.instances(each)) for each in reader.devices()]
    reader.close()
    return choice(environ, found).count


def hides_all(environ: Mapping[str, str]) -> bool:
    """Whether ``CUDA_VISIBLE_DEVICES`` is meant to hide every GPU."""
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    return wanted is not None and wanted.strip() in HIDES_ALL


def choice(environ: Mapping[str, str], gpus: Sequence[tuple[Device, tuple[str, ...]]]) -> Choice:
    """What CUDA makes of ``CUDA_VISIBLE_DEVICES``, as torch's ``_parse_visible_devices`` has it.

    Args:
        environ: With the variable, or without: then all GPUs are chosen.
        gpus: Those that answer, in the driver's order, each with the UUIDs of its MIG instances.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    places: list[int] = list(range(len(gpus)))
    wrong = ""
    if hides_all(environ):
        return Choice((), 0)
    if wanted is not None:
        places, wrong = _entries(wanted, gpus)
    usable = [place for place in places if not gpus[place][0].mig or gpus[place][1]]
    count = 1 if any(gpus[place][0].mig for place in usable) else len(usable)
    return Choice(tuple(dict.fromkeys(places)), count, wrong)


def _entries(wanted: str, gpus: Sequence[tuple[Device, tuple[str, ...]]]) -> tuple[list[int], str]:
    """The place of each entry up to the first one that is wrong, and what is wrong with that."""
    by_uuid = wanted.strip().startswith(("GPU-", "MIG-"))
    found: list[int] = []
    seen: list[str | int] = []
    for entry in (each.strip() for each in wanted.split(",")):
        if not entry:
            return found, "an entry is empty"
        is_uuid = entry.startswith(("GPU-", "MIG-"))
        number = re.match(r"\+?(\d+)", entry)
        if is_uuid != by_uuid and (is_uuid or number):
            return found, "it mixes numbers and UUIDs"
        if is_uuid:
            owners = [place for place, gpu in enumerate(gpus) if _owns(gpu, entry)]
            if len(owners) != 1:
                return found, f"{entry} fits several GPUs" if owners else (
                    f"this machine has no {entry}"
                )
            place, name = owners[0], entry
        elif number:
            place, name = whole(number[1], len(gpus)), number[1]
            if place >= len(gpus):
                return found, f"there is no GPU {name}"
        else:
            return found, f"{entry!r} is no number or UUID"
        # Two instances of a GPU are two devices.
        key = entry if entry.startswith("MIG-") else place
        if key in seen:
            return [], f"{name} stands there twice"
        seen.append(key)
        found.append(place)
    return found, ""


def _owns(gpu: tuple[Device, tuple[str, ...]], entry: str) -> bool:
    """Whether an entry means a GPU, by the beginning of its UUID, or one of its instances."""
    device, instances = gpu
    if entry.startswith("GPU-"):
        return device.key.startswith(same_uuid(entry))
    # Before driver 470 an instance was MIG-GPU-<the GPU's UUID>/<numbers>.
    return entry in instances or same_uuid(entry.removeprefix("MIG-")).startswith(f"{device.key}/")

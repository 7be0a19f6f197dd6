"""How many GPUs a job started here would see, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping

from ddpdoctor.gpu.nvml import NvmlReader


def visible(environ: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs, less what ``CUDA_VISIBLE_DEVICES`` hides; 0 without a driver."""
    if environ.get("CUDA_VISIBLE_DEVICES", "0").strip() == "":
        return 0
    reader = NvmlReader()
    count = len(reader.devices())
    reader.close()
    return seen(environ, count)


def seen(environ: Mapping[str, str], count: int) -> int:
    """How many of ``count`` GPUs ``CUDA_VISIBLE_DEVICES`` leaves."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None or not count:
        return count
    found: list[str] = []
    for device in (part.strip() for part in chosen.split(",")):
        # CUDA stops at the first entry that is not valid, and at a repeated one.
        valid = (device.isdigit() and int(device) < count) or device.startswith(("GPU-", "MIG-"))
        if not valid or device in found:
            break
        found.append(device)
    return len(found)

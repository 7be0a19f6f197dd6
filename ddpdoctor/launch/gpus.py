"""How many GPUs a job started here would see, without importing torch."""

from __future__ import annotations

from collections.abc import Mapping


def visible(environ: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs, less what ``CUDA_VISIBLE_DEVICES`` hides; 0 without a driver."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and not chosen.strip():
        return 0
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # the binding raises many kinds for the many ways to have no driver
        return 0
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    except Exception:
        return 0
    finally:
        pynvml.nvmlShutdown()
    if chosen is None:
        return count
    seen: list[str] = []
    for device in (part.strip() for part in chosen.split(",")):
        # CUDA stops at the first entry that is not valid, and at a repeated one.
        valid = (device.isdigit() and int(device) < count) or device.startswith(("GPU-", "MIG-"))
        if not valid or device in seen:
            break
        seen.append(device)
    return len(seen)

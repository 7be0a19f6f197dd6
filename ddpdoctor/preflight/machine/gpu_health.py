"""Whether the NVIDIA driver responds for every GPU, and whether the GPUs have faults."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import age, count
from ddpdoctor.core.opening import whole
from ddpdoctor.preflight.check import (
    Outcome,
    check,
    failure,
    finding,
    judged,
    note,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.machine import container, software
from ddpdoctor.preflight.machine.gpu_use import NO_DRIVER, driverless, job_gpus, no_gpu, on_the_bus
from ddpdoctor.preflight.situation import Situation, gpu_facts
from ddpdoctor.system.gpu_health import GpuFacts, Health
from ddpdoctor.system.nvml import hides_all

# -- the driver


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
    return judged(detail, _driver_findings(situation, facts, on_bus))


def _driver_findings(situation: Situation, facts: GpuFacts, on_bus: int) -> Iterator[Finding]:
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
        torch = software.installed_torch()
        yield finding(
            # A job on the CPU needs no GPU.
            Severity.INFO
            if hides_all(situation.environ)
            else Severity.ERROR
            if torch is None or torch.cuda
            else Severity.WARNING,
            f"no GPU can be used: {facts.trouble}",
            evidence=(f"the PCI bus has {on_bus} NVIDIA GPUs",) if on_bus else (),
            fix=fix,
            paste=paste,
            about="driver",
        )
    lost = [*facts.absent, *((gpu.device.index, gpu.problem) for gpu in facts.gpus if gpu.lost)]
    for index, why in lost:
        yield failure(
            f"GPU {index} does not answer: {why}",
            fix="Reset it, or reboot; if it is lost again, it has to be replaced. Until then "
            "leave it out by CUDA_VISIBLE_DEVICES.",
            paste=typed("sudo nvidia-smi --gpu-reset -i {}", index),
            about=f"gpu {index}",
        )
    off = [str(gpu.device.index) for gpu in facts.gpus if gpu.persistent is False]
    if off:
        yield note(
            f"persistence mode is off on GPU {', '.join(off)}: after a pause the driver takes "
            "seconds to come back",
            fix="Turn it on.",
            paste="sudo nvidia-smi -pm 1",
            about="persistence",
        )


# -- faults: memory errors, overheating, errors that the driver logged


RECENT = 24 * 3600.0
"""Seconds for which the driver's log counts. Older errors were most likely dealt with."""

_HOT = ("hardware slowdown", "software thermal slowdown", "hardware thermal slowdown",
        "power brake")  # fmt: skip

_HARDWARE = {
    48: "an uncorrectable memory error",
    62: "the GPU's micro-controller halted",
    64: "a memory row could not be remapped",
    74: "an NVLink error",
    79: "the GPU fell off the bus",
    92: "many corrected memory errors",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "the GPU's system processor timed out",
    120: "the GPU's system processor failed",
    140: "an unrecovered ECC error",
}
"""XIDs that mean hardware, by NVIDIA's list. 13, 31, 43 and 45 are a program's own faults. The GPU
itself reports a remapped row (63) as long as it matters."""

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")


@dataclass(frozen=True)
class Xid:
    """An error that the driver logged. Its age is in seconds."""

    bus_id: str
    number: int
    age: float


@check("gpu-health", "DDP023")
def gpu_health(situation: Situation) -> Outcome:
    """A GPU has memory errors, is throttled by heat or power, or logged a hardware error.

    What it finds
        Memory errors that ECC could not correct. A memory row or page that waits for a reset to be
        replaced, or cannot be replaced. A GPU slowed down by its temperature or power supply.
        Hardware errors (XID) in the kernel's log of the last 24 hours, if this user may read it.

    Why it is bad
        The job fails with "CUDA error: uncorrectable ECC error encountered", perhaps days after its
        start. One throttled GPU slows all ranks down.

    How to fix it
        Reset the GPU or reboot while no job runs. If that does not help, have the GPU replaced.
        Check cooling and power.

    Example
        Wrong: "GPU 3: 2 memory errors that ECC could not correct".
        Right: the same machine after `nvidia-smi --gpu-reset -i 3`.

    When it stays silent
        For corrected errors, the usual power cap, errors caused by programs (XID 13, 31, 43, 45),
        and what a GPU does not report.
    """
    gpus = job_gpus(situation)
    log = read_log(situation.proc.parent / "dev" / "kmsg")
    detail = f"{len(gpus)} GPUs: ECC, rows, temperature"
    detail += ", kernel log" if log is not None else "; the kernel log is not readable"
    findings = [found for gpu in gpus for found in _memory(gpu)]
    findings += [found for gpu in gpus for found in _throttled(gpu)]
    findings += _logged(gpus, log or ())
    return judged(detail, findings)


def _memory(gpu: Health) -> Iterator[Finding]:
    index = gpu.device.index
    if gpu.rows_failed:
        yield failure(
            f"GPU {index} has no spare memory rows left for a faulty one",
            fix="It has to be replaced; leave it out by CUDA_VISIBLE_DEVICES until then.",
            paste=typed("nvidia-smi -q -i {} -d ROW_REMAPPER", index),
            about=f"rows {index}",
        )
    elif gpu.rows_pending:
        yield warning(
            f"GPU {index} has a faulty memory row that waits for a reset to be replaced",
            fix="Reset it, or reboot, before the job starts.",
            paste=typed("sudo nvidia-smi --gpu-reset -i {}", index),
            about=f"rows {index}",
        )
    if gpu.uncorrected:
        errors = count(gpu.uncorrected, "memory error")
        yield failure(
            f"GPU {index}: {errors} that ECC could not correct since the driver was loaded",
            fix="Reset it, or reboot; if they come back, it has to be replaced.",
            paste=typed("sudo nvidia-smi --gpu-reset -i {}", index),
            about=f"ecc {index}",
        )


def _throttled(gpu: Health) -> Iterator[Finding]:
    reasons = [each for each in gpu.throttled if each in _HOT]
    if reasons:
        degrees = f" at {gpu.temperature} degrees Celsius" if gpu.temperature else ""
        yield warning(
            f"GPU {gpu.device.index} is throttled{degrees}: {', '.join(reasons)}",
            fix="Check its cooling and power supply; all ranks wait for this one.",
            paste=typed("nvidia-smi -q -i {} -d PERFORMANCE,TEMPERATURE,POWER", gpu.device.index),
            about=f"throttled {gpu.device.index}",
        )


def _logged(gpus: Iterable[Health], log: Iterable[Xid]) -> list[Finding]:
    found = {}
    by_bus = {_short(gpu.device.bus_id): gpu.device.index for gpu in gpus}
    for xid in log:
        index = by_bus.get(_short(xid.bus_id))
        if index is None or xid.number not in _HARDWARE or xid.age > RECENT:
            continue
        found[index, xid.number] = warning(
            f"GPU {index} logged {_HARDWARE[xid.number]} (XID {xid.number}) {age(xid.age)} ago",
            fix="Reset it, or reboot; if it comes back, it has to be replaced.",
            paste="sudo dmesg -T | grep -i xid",
            about=f"xid {index} {xid.number}",
        )
    return list(found.values())


def _short(bus_id: str) -> str:
    """Shorten a PCI address such as 00000000:3B:00.0 to ``3b:00``."""
    parts = bus_id.lower().split(".")[0].split(":")
    domain = parts[0].lstrip("0") if len(parts) > 2 else ""
    return ":".join([domain, *parts[-2:]])


def read_log(path: Path) -> list[Xid] | None:
    """Return the driver's errors in the kernel's log; None if it may not be read.

    A record is "priority,sequence,microseconds since the boot,flags;text".
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    records = []
    try:
        while True:
            try:
                chunk = os.read(descriptor, 16384)
            except BlockingIOError:
                break
            except BrokenPipeError:
                # Overwritten while we read: the next one is the oldest now.
                continue
            if not chunk:
                break
            records += chunk.decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return list(_parsed(records, time.clock_gettime(time.CLOCK_MONOTONIC)))


def _parsed(records: Iterable[str], uptime: float) -> Iterator[Xid]:
    for record in records:
        match = _XID.search(record)
        stamp = record.partition(";")[0].split(",")
        if match and len(stamp) > 2 and stamp[2].isdigit():
            yield Xid(match[1], whole(match[2]), max(0.0, uptime - whole(stamp[2]) / 1e6))

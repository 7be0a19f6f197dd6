"""Whether somebody else holds memory of the GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.machine.gpu_facts import chosen, none_here
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.preflight.sizes import GIB, shown
from ddpdoctor.system.gpu.health import Health
from ddpdoctor.system.process_table import Listed, named

LEAST = 2 * GIB
"""Less than this is a desktop, or a context of a monitoring program."""

SHARE = 0.05

_DEVICES = ("/dev/nvidia", "/dev/dxg")
"""What a process has open that uses a GPU; the second one in WSL."""

_FIRST_NAMESPACE = 0xEFFFFFFC
"""The inode of the host's PID namespace (PROC_PID_INIT_INO of Linux)."""


@check("gpu-memory", "DDP022")
def gpu_memory(situation: Situation) -> Outcome:
    """Other processes hold memory of the GPUs that this job would use.

    What it finds
        A GPU of which over 2 GiB and 5 % is in use before the job has started, and by whom, as far
        as this user and this container may see.

    Why it is bad
        The rank on that GPU runs out of memory, or shares its kernels' time: it is slow, and all
        others wait for it.

    How to fix it
        End what is left over (`ddpdoctor check --kill-orphans`), or choose other GPUs.

    Example
        Wrong: two jobs that both take GPU 0.
        Right: `CUDA_VISIBLE_DEVICES=4,5,6,7` for the second.

    When it stays silent
        For GPUs that CUDA_VISIBLE_DEVICES leaves out, for partitioned ones (MIG), and where the
        driver does not tell.

    Since
        0.1.0
    """
    reason = none_here(situation)
    if reason:
        return skipped(reason)
    gpus = [gpu for gpu in chosen(situation) if not gpu.device.mig]
    free = [
        gpu.memory_total - gpu.memory_used
        for gpu in gpus
        if gpu.memory_total is not None and gpu.memory_used is not None
    ]
    if not free:
        return skipped("the driver does not say how much is in use")
    detail = f"{len(free)} GPUs: {shown(min(free))} free, or more"
    return judged(detail, (found for gpu in gpus for found in _findings(situation, gpu)))


def _findings(situation: Situation, gpu: Health) -> Iterator[Finding]:
    used, total = gpu.memory_used, gpu.memory_total
    if used is None or not total or used < LEAST or used < SHARE * total:
        return
    mine = [each for each in gpu.processes if each.pid != os.getpid()]
    holders = []
    for process in mine[:4]:
        known = _known(situation.proc, process.pid)
        who = known.described if known else f"pid {process.pid} of another container"
        held = f" holds {shown(process.memory)}" if process.memory else ""
        holders.append(f"{who}{held}")
    yield Finding(
        "DDP022",
        Severity.WARNING,
        f"{shown(used)} of {shown(total)} of GPU {gpu.device.index} are in use before the job "
        "starts",
        evidence=tuple(holders) or ("by processes that cannot be seen from here",),
        fix="End what holds it, if it is left over, or choose other GPUs.",
        paste="nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
        about=f"gpu {gpu.device.index}",
    )


def _known(proc: Path, pid: int) -> Listed | None:
    """The process of a pid that the driver told; None if it is not known here.

    To a container the driver may tell the host's pids, and another process may have that one here.
    """
    known = named(proc, pid)
    if known is None or _sees_all_processes(proc):
        return known
    with contextlib.suppress(OSError):
        for file in os.listdir(known.folder / "fd"):
            with contextlib.suppress(OSError):
                if any(each in os.readlink(known.folder / "fd" / file) for each in _DEVICES):
                    return known
    return None


def _sees_all_processes(proc: Path) -> bool:
    """Whether this process is in the host's own PID namespace."""
    try:
        return os.stat(proc / "self" / "ns" / "pid").st_ino == _FIRST_NAMESPACE
    except OSError:
        return False

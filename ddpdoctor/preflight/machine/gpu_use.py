"""Which GPUs the job would use, whether each rank has one, and who else holds their memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import GIB, binary_size, count
from ddpdoctor.preflight.check import (
    Outcome,
    Skip,
    check,
    failure,
    finding,
    judged,
    note,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.command_lines import corrected_line
from ddpdoctor.preflight.situation import (
    Situation,
    cuda_choice,
    gpu_facts,
    names,
    text,
    visible_gpus,
)
from ddpdoctor.system.gpu_health import Health
from ddpdoctor.system.nvml import hides_all
from ddpdoctor.system.proc import Listed, named

# -- the GPUs of the job


NVIDIA = "0x10de"
NO_DRIVER = (0, 9, 12)  # NVML's codes if there is no library, no kernel module, or no driver at all

_GIVEN_AWAY = ("vfio-pci", "pci-stub")

_DISPLAY = "0x03"  # The PCI class of graphics cards and of GPUs without an output


def chosen(situation: Situation) -> tuple[Health, ...]:
    """Return the GPUs that respond and that a job would use, in CUDA's order.

    The numbers in ``CUDA_VISIBLE_DEVICES`` are CUDA's. If all GPUs are alike they are those of the
    PCI bus.
    """
    gpus = situation.shared(gpu_facts).gpus
    places = situation.shared(cuda_choice).places
    return tuple(gpus[place] for place in places if not gpus[place].lost)


def job_gpus(situation: Situation) -> tuple[Health, ...]:
    """Return the same GPUs, for a check of them.

    Raises:
        Skip: There are none.
    """
    reason = none_here(situation)
    if reason:
        raise Skip(reason)
    return chosen(situation)


def bus_gpus(sys: Path) -> list[Path]:
    """Return the directories of the NVIDIA GPUs on the PCI bus, whatever the driver says.

    Leave out those that are reserved for virtual machines.
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
    """Count the NVIDIA GPUs on the PCI bus, whatever the driver says."""
    return len(bus_gpus(situation.sys))


def none_here(situation: Situation) -> str:
    """Return why GPU checks are skipped; empty if there are GPUs that respond."""
    facts = situation.shared(gpu_facts)
    if facts.gpus and hides_all(situation.environ):
        return f"CUDA_VISIBLE_DEVICES hides all {len(facts.gpus)} GPUs"
    if facts.gpus:
        return ""
    if driverless(situation):
        return no_gpu(situation)
    return f"the GPUs cannot be read: {facts.trouble}"


def no_gpu(situation: Situation) -> str:
    """Return why a check without a GPU is skipped."""
    if (situation.sys / "class" / "kfd").exists():
        return "no NVIDIA GPU (AMD's are not tested)"
    return "no GPU"


def driverless(situation: Situation) -> bool:
    """Return whether there is no driver because there is no GPU, or neither can be seen."""
    facts = situation.shared(gpu_facts)
    if not facts.trouble:
        return not facts.absent and not facts.gpus
    return facts.code in NO_DRIVER and not on_the_bus(situation)


# -- a GPU for each rank, and its memory


@check("gpu-count", "DDP021")
def gpu_count(situation: Situation) -> Outcome:
    """There is no GPU for each rank, or CUDA_VISIBLE_DEVICES is wrong.

    What it finds
        More ranks than visible GPUs. Numbers or UUIDs in CUDA_VISIBLE_DEVICES that this machine
        does not have, or that appear twice. Several ranks on partitioned (MIG) GPUs, or a
        partitioned GPU without instances. A GPU whose compute mode forbids its use, or reserves it
        for a process that already has it.

    Why it is bad
        CUDA silently ignores every entry from the first wrong one on, and all entries if one
        appears twice. Two ranks on one GPU end in NCCL's "Duplicate GPU detected", a rank without a
        GPU in "invalid device ordinal". CUDA shows a process at most one MIG instance, and NCCL
        does not connect instances.

    How to fix it
        Start as many ranks as there are GPUs, or correct the variable.

    Example
        Wrong: `CUDA_VISIBLE_DEVICES=0,0 torchrun --nproc-per-node 2 train.py`
        Right: `CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 train.py`

    When it stays silent
        With fewer ranks than GPUs. If CUDA_VISIBLE_DEVICES is empty, -1 or Slurm's NoDevFiles,
        which means to use the CPU. Without a GPU; the output says so.
    """
    mine = job_gpus(situation)
    gpus, seen = situation.shared(gpu_facts).gpus, situation.shared(visible_gpus)
    detail = f"{seen} of {len(gpus)} GPUs visible"
    if seen and any(gpu.device.mig for gpu in mine):
        detail = "one MIG instance visible, all that CUDA shows a process"
    detail = f"{detail}, for {count(situation.nproc, 'rank')}"
    findings = [
        *_count_findings(situation, gpus, mine, seen),
        *_order_findings(situation, gpus),
        *_mig_findings(situation, mine),
        *(_closed(gpu) for gpu in mine if gpu.closed),
    ]
    return judged(detail, findings)


def _count_findings(
    situation: Situation, gpus: Sequence[Health], mine: Sequence[Health], seen: int
) -> Iterator[Finding]:
    wanted = situation.environ.get("CUDA_VISIBLE_DEVICES")
    wrong = situation.shared(cuda_choice).wrong
    if wrong:
        yield failure(
            f"CUDA_VISIBLE_DEVICES={wanted}: {wrong}, so that CUDA sees {seen} of {len(gpus)} GPUs",
            fix="Correct the entry: CUDA ignores it and all that follow, and everything if one is "
            "listed twice.",
            paste=typed("export CUDA_VISIBLE_DEVICES={}", ",".join(map(str, range(len(gpus))))),
            about="CUDA_VISIBLE_DEVICES",
        )
    elif situation.nproc > seen and not any(gpu.device.mig for gpu in mine):
        yield warning(
            f"{situation.nproc} ranks for {count(seen, 'visible GPU')}: NCCL refuses two ranks on "
            "one",
            fix="Start one rank per GPU, or leave the GPUs out for a job on the CPU.",
            paste=corrected_line(situation, nproc=max(seen, 1)),
            about="ranks",
        )


def _order_findings(situation: Situation, gpus: Sequence[Health]) -> Iterator[Finding]:
    wanted = situation.environ.get("CUDA_VISIBLE_DEVICES", "")
    by_bus = situation.environ.get("CUDA_DEVICE_ORDER", "") == "PCI_BUS_ID"
    kinds = {gpu.device.name for gpu in gpus}
    if wanted.strip()[:1].isdigit() and not by_bus and len(kinds) > 1:
        yield note(
            "the GPUs are of several kinds: CUDA_VISIBLE_DEVICES numbers them with the fastest "
            "first, and nvidia-smi by the PCI bus",
            fix="Let CUDA number them as nvidia-smi does, and as the checks of this table do.",
            paste="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            about="order",
        )


def _mig_findings(situation: Situation, mine: Sequence[Health]) -> Iterator[Finding]:
    partitioned = [gpu for gpu in mine if gpu.device.mig]
    empty = [gpu for gpu in partitioned if not gpu.instances]
    if empty or (partitioned and situation.nproc > 1):
        indices = ", ".join(str(gpu.device.index) for gpu in empty or partitioned)
        yield finding(
            Severity.ERROR if empty else Severity.WARNING,
            f"GPU {indices} is partitioned (MIG) and has no instances: CUDA cannot use it"
            if empty
            else f"GPU {indices} is partitioned (MIG): a process sees one instance, and NCCL "
            "connects none",
            fix="Make an instance, or turn MIG off." if empty else "Turn MIG off for this job.",
            paste=typed("sudo nvidia-smi -i {} -mig 0", indices.replace(" ", "")),
            about="MIG",
        )


def _closed(gpu: Health) -> Finding:
    index = gpu.device.index
    return failure(
        f"GPU {index} is in compute mode Prohibited: no process may use it"
        if not gpu.processes
        else f"GPU {index} is in compute mode Exclusive, and another process has it",
        evidence=tuple(f"pid {process.pid}" for process in gpu.processes[:4]),
        fix="Set it back to the default.",
        paste=typed("sudo nvidia-smi -i {} -c 0", index),
        about=f"compute mode {index}",
    )


MIN_HELD = 2 * GIB  # A desktop, or a context of a monitoring program, holds less than this

MIN_HELD_SHARE = 0.05

_DEVICES = ("/dev/nvidia", "/dev/dxg")
"""Files that a process that uses a GPU has open; the second one in WSL."""

_FIRST_NAMESPACE = 0xEFFFFFFC  # The inode of the host's PID namespace (PROC_PID_INIT_INO of Linux)


@check("gpu-memory", "DDP022")
def gpu_memory(situation: Situation) -> Outcome:
    """Other processes hold memory on the GPUs that this job will use.

    What it finds
        A GPU with more than 2 GiB and more than 5 % in use before the job starts, and the processes
        that hold it, as far as this user and this container can see them.

    Why it is bad
        The rank on that GPU runs out of memory, or shares the GPU's time: it is slow, and all other
        ranks wait for it.

    How to fix it
        End left-over processes (`ddpdoctor check --kill-orphans`), or choose other GPUs.

    Example
        Wrong: two jobs that both use GPU 0.
        Right: `CUDA_VISIBLE_DEVICES=4,5,6,7` for the second job.

    When it stays silent
        For GPUs that CUDA_VISIBLE_DEVICES leaves out, for partitioned GPUs (MIG), and where the
        driver does not report memory.
    """
    known = [
        (gpu, gpu.memory_used, gpu.memory_total)
        for gpu in job_gpus(situation)
        if not gpu.device.mig and gpu.memory_used is not None and gpu.memory_total is not None
    ]
    if not known:
        return skipped("the driver does not report how much memory is in use")
    least = min(total - used for _, used, total in known)
    findings = []
    for gpu, used, total in known:
        if used < max(MIN_HELD, MIN_HELD_SHARE * total):
            continue
        holders = []
        for process in [each for each in gpu.processes if each.pid != os.getpid()][:4]:
            found = _known(situation.proc, process.pid)
            who = found.described if found else f"pid {process.pid} of another container"
            held = f" holds {binary_size(process.memory)}" if process.memory else ""
            holders.append(f"{who}{held}")
        taken = warning(
            f"{binary_size(used)} of {binary_size(total)} of GPU {gpu.device.index} are in use "
            "before the job starts",
            evidence=tuple(holders) or ("by processes that cannot be seen from here",),
            fix="End what holds it, if it is left over, or choose other GPUs.",
            paste="nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
            about=f"gpu {gpu.device.index}",
        )
        findings.append(taken)
    return judged(f"{len(known)} GPUs: {binary_size(least)} free, or more", findings)


def _known(proc: Path, pid: int) -> Listed | None:
    """Return the process of a pid that the driver reports; None if it is not known here.

    To a container it may report the host's pids, and here another process may have that pid.
    """
    known = named(proc, pid)
    with contextlib.suppress(OSError):
        if known is None or os.stat(proc / "self" / "ns" / "pid").st_ino == _FIRST_NAMESPACE:
            return known
    for file in names(known.folder / "fd") if known else ():
        with contextlib.suppress(OSError):
            if os.readlink(proc / str(pid) / "fd" / file).startswith(_DEVICES):
                return known
    return None

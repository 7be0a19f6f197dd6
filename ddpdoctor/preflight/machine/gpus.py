"""Whether the GPUs that the job will use are free, alike, healthy and well connected."""

from __future__ import annotations

import contextlib
import os
import re
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import GIB, age, binary_size, count, listed
from ddpdoctor.core.opening import whole
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
from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.situation import (
    DRIVER_TIMEOUT,
    Situation,
    bounded,
    container_kind,
    cuda_choice,
    gpu_facts,
    names,
    text,
    visible_gpus,
)
from ddpdoctor.system import amd
from ddpdoctor.system.nvml import GpuFacts, Health, choice, hides_all
from ddpdoctor.system.proc import Listed, named

# -- the GPUs of the job


NVIDIA = "0x10de"
NO_DRIVER = (0, 9, 12)  # NVML's codes if there is no library, no kernel module, or no driver at all

_GIVEN_AWAY = ("vfio-pci", "pci-stub")

_HIP_VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
"""The variables that choose among AMD's GPUs. HIP reads the last one, too."""

_DISPLAY = "0x03"  # The PCI class of graphics cards and of GPUs without an output


def chosen(situation: Situation) -> tuple[Health, ...]:
    """Return the GPUs that respond and that a job would use, in CUDA's order.

    Numbers in ``CUDA_VISIBLE_DEVICES`` follow CUDA's order, which is that of the PCI bus if all
    GPUs are alike.
    """
    gpus = situation.shared(gpu_facts).gpus
    places = situation.shared(cuda_choice).places
    return tuple(gpus[place] for place in places if not gpus[place].lost)


def job_gpus(situation: Situation) -> tuple[Health, ...]:
    """Return the GPUs that `chosen` returns, for a check that needs one.

    Raises:
        Skip: There are none.
    """
    if reason := none_here(situation):
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


def _has_amd(situation: Situation) -> bool:
    """Return whether the kernel has AMD's driver for computing."""
    return (situation.sys / "class" / "kfd").exists()


def no_gpu(situation: Situation) -> str:
    """Return why a check without a GPU is skipped."""
    if _has_amd(situation):
        return "no NVIDIA GPU (AMD's are not tested)"
    return "no GPU"


def driverless(situation: Situation) -> bool:
    """Return whether there is no driver because there is no GPU, or neither can be seen."""
    facts = situation.shared(gpu_facts)
    if not facts.trouble:
        return not facts.absent and not facts.gpus
    return facts.code in NO_DRIVER and not on_the_bus(situation)


def amd_gpus(situation: Situation) -> tuple[Health, ...]:
    """Read the AMD GPUs that a process of the job would see: memory in use, and its processes.

    Raises:
        Skip: They cannot be read.
    """

    def read() -> tuple[tuple[Health, ...], str]:
        reader = amd.AmdReader()
        found = []
        for device in reader.devices():
            brief, holders = reader.brief(device), reader.processes(device)
            used = brief.memory_used
            found.append(Health(device, brief.memory_total, used, processes=holders))
        reader.close()
        return tuple(found), reader.trouble

    try:
        gpus, trouble = bounded(read, min(DRIVER_TIMEOUT, situation.deadline.left()))
    except TimeoutError:
        gpus, trouble = (), f"AMD's driver does not answer within {DRIVER_TIMEOUT:.0f} s"
    if not gpus:
        raise Skip(trouble or "no GPU responds to amdsmi")
    name = next((each for each in _HIP_VISIBLE if each in situation.environ), "")
    environ = {"CUDA_VISIBLE_DEVICES": situation.environ[name]} if name else {}
    places = choice(environ, [(gpu.device, ()) for gpu in gpus]).places
    return tuple(gpus[place] for place in places)


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
    if wrong := situation.shared(cuda_choice).wrong:
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
"""Files that a process has open if it uses a GPU; the second one in WSL."""

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
        For GPUs that CUDA_VISIBLE_DEVICES (AMD: HIP_VISIBLE_DEVICES) leaves out, for partitioned
        GPUs (MIG), and where the driver does not report memory.
    """
    of_amd = driverless(situation) and _has_amd(situation)
    gpus = situation.shared(amd_gpus) if of_amd else job_gpus(situation)
    known = [
        (gpu, gpu.memory_used, gpu.memory_total)
        for gpu in gpus
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
            fix="End the processes that hold it if they are left over, or choose other GPUs.",
            paste="amd-smi process"
            if of_amd
            else "nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv",
            about=f"gpu {gpu.device.index}",
        )
        findings.append(taken)
    return judged(f"{len(known)} GPUs: {binary_size(least)} free, or more", findings)


def _known(proc: Path, pid: int) -> Listed | None:
    """Return the process of a pid that the driver reports; None if it is not known here.

    In a container the driver may report the host's pids, which other processes may have here.
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
        inside = container_kind(situation)
        if facts.code == _MISMATCH:
            fix, paste = "Reboot, or unload the old kernel module.", "sudo reboot"
        elif facts.code == _NO_PERMISSION:
            fix, paste = "Give this user access to the devices.", "ls -l /dev/nvidia*; id"
        elif facts.code in NO_DRIVER and inside in ("docker", "podman"):
            fix, paste = "Give the container the GPUs.", typed("{} run --gpus all ...", inside)
        elif facts.code in NO_DRIVER:
            fix, paste = "Load the driver.", "sudo modprobe nvidia"
        else:
            fix, paste = "Read the kernel's log, then reboot.", "sudo dmesg | grep -i nvrm"
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
            "leave it out of CUDA_VISIBLE_DEVICES.",
            paste=typed("sudo nvidia-smi --gpu-reset -i {}", index),
            about=f"gpu {index}",
        )
    if off := [str(gpu.device.index) for gpu in facts.gpus if gpu.persistent is False]:
        yield note(
            f"persistence mode is off on GPU {', '.join(off)}: after a pause the driver takes "
            "seconds to come back",
            fix="Turn it on.",
            paste="sudo nvidia-smi -pm 1",
            about="persistence",
        )


# -- faults: memory errors, overheating, errors that the driver logged


MAX_LOG_AGE = 24 * 3600.0
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
"""XIDs of hardware faults, by NVIDIA's list. Programs cause 13, 31, 43 and 45. The GPU itself
reports a remapped row (63) as long as it matters."""

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
            fix="Have it replaced; until then, leave it out of CUDA_VISIBLE_DEVICES.",
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
    if reasons := [each for each in gpu.throttled if each in _HOT]:
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
        if index is None or xid.number not in _HARDWARE or xid.age > MAX_LOG_AGE:
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
                # The record was overwritten while we read: the next one is now the oldest.
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


# -- PCIe, NVLink and peer-to-peer access


MIN_LANES_FACTOR = 4  # No board is designed with fewer lanes than possible by this factor


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
    findings: list[Finding] = []
    for gpu in gpus:
        peers = [other for other in gpus if other.device.name == gpu.device.name]
        findings += [*_fabric(gpu), *_pcie(gpu, peers), *_nvlink(gpu, peers)]
    return judged(detail, findings)


def _fabric(gpu: Health) -> Iterator[Finding]:
    if gpu.fabric_ready is False:
        yield warning(
            f"the NVSwitch fabric of GPU {gpu.device.index} is not set up: CUDA may fail with "
            '"system not yet initialized"',
            fix="Start the fabric manager, in the same version as the driver.",
            paste="sudo systemctl restart nvidia-fabricmanager",
            about=f"fabric {gpu.device.index}",
        )


def _pcie(gpu: Health, peers: Sequence[Health]) -> Iterator[Finding]:
    index = gpu.device.index
    paste = typed("nvidia-smi -q -i {} | grep -A12 'GPU Link Info'", index)
    what, about = "", "lanes"
    if gpu.width and gpu.width_most and gpu.width < gpu.width_most:
        what = f"has {gpu.width} of {gpu.width_most} PCIe lanes"
        widest = max(other.width or 0 for other in peers)
        if gpu.width >= widest and gpu.width * MIN_LANES_FACTOR > gpu.width_most:
            yield note(
                f"GPU {index} {what}, as on boards whose slots share them",
                fix="Do nothing if the slot has no more; otherwise reseat the card or its riser.",
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
            fix="Reset it, or reboot; if that does not help, reseat the card or its riser.",
            paste=paste,
            about=f"{about} {index}",
        )


def _nvlink(gpu: Health, peers: Sequence[Health]) -> Iterator[Finding]:
    links = [sum(other.links) for other in peers]
    up, most = sum(gpu.links), max(links)
    # A GPU without links may have no bridge, unless most of its peers have links.
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
        return skipped("the driver does not report it")
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
            f"{listed(without)}",
            fix="Do nothing if they are on different sockets; otherwise check ACS and the IOMMU.",
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
    """Return whether the kernel maps a GPU's transfers through an IOMMU, page by page."""
    domain, _, rest = gpu.device.bus_id.lower().partition(":")
    folder = sys / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}"
    return text(folder / "iommu_group" / "type").startswith("DMA")


# -- PCIe access control (ACS), which detours the transfers between GPUs


_BRIDGE = 0x0604
_STATUS, _HAS_LIST, _CLASS, _FIRST = 0x06, 0x10, 0x0A, 0x34
"""In the standard header: the status register, its bit for a list of capabilities, the class, and
the start of that list. (PCI Local Bus 3.0, chapter 6; PCI Express Base, chapter 7.)"""

_EXPRESS, _DOWNSTREAM = 0x10, 6
"""The capability that holds a port's type, and the type of a switch's downstream port."""

_EXTENDED, _ACS = 0x100, 0x000D
_CONTROL = 6  # The offset of the control register in the ACS capability

REDIRECTS = 0x04 | 0x08 | 0x20
"""Request redirect, completion redirect, egress control. "Source validation" does no harm."""

_MAX_CAPABILITIES = 128  # So that the loop through a damaged list ends


class Unreadable(Exception):
    """The part of the configuration space that describes ACS cannot be read."""


@dataclass(frozen=True)
class BridgePort:
    """A port of a PCIe switch above a GPU, such as ``0000:05:08.0``."""

    address: str
    control: int | None  # Its ACS control register; None without ACS

    @property
    def redirects(self) -> bool:
        """Whether it sends transfers between devices of its switch up to the root."""
        return bool((self.control or 0) & REDIRECTS)


@check("gpu-acs", "DDP026")
def gpu_acs(situation: Situation) -> Outcome:
    """PCIe access control (ACS) routes transfers between GPUs through the root complex.

    What it finds
        With two or more GPUs: ports of PCIe switches above a GPU on which ACS redirects requests or
        completions. Reading the configuration space needs root.

    Why it is bad
        Transfers between GPUs of one switch, and to a network card with GPUDirect next to them,
        go through the CPU. NCCL is slow, hangs, or silently gives wrong data.

    How to fix it
        Turn ACS off with `setpci` at every boot, or in the BIOS. Leave it on where virtual machines
        have devices passed through, which ACS isolates.

    Example
        Wrong: `ACSCtl: SrcValid+ ReqRedir+ CmpltRedir+` in `lspci -vvv`.
        Right: `ACSCtl: SrcValid- ReqRedir- CmpltRedir-`

    When it stays silent
        For ports that only validate sources. For root ports, between which transfers go through the
        CPU anyway. If NVLink connects all GPUs and there is no InfiniBand. In virtual machines,
        where the host decides.
    """
    gpus = bus_gpus(situation.sys)
    if len(gpus) < 2:
        return skipped("a single GPU" if gpus else no_gpu(situation))
    if "hypervisor" in text(situation.proc / "cpuinfo").split():
        return skipped("a virtual machine: its host decides")
    try:
        ports = list(_ports(gpus))
    except Unreadable as error:
        return skipped(str(error))
    if not ports:
        return skipped("no PCIe switch above the GPUs")
    on = [port for port in ports if port.redirects]
    detail = f"{len(ports)} switch ports above {len(gpus)} GPUs, ACS redirects on {len(on)}"
    if not on or not _uses_pcie(situation):
        return judged(detail, [])
    line = f"for port in {' '.join(['{}'] * len(on))}; do "
    line += "sudo setpci -v -s $port ECAP_ACS+0x6.w=0000; done"
    redirecting = warning(
        f"PCIe access control (ACS) redirects on {len(on)} of {len(ports)} switch ports above "
        "GPUs: transfers between GPUs go by way of the processor",
        evidence=tuple(f"{port.address}: ACS control {port.control:#06x}" for port in on[:8]),
        fix="Turn it off until the next boot, or for good in the BIOS; not where devices "
        "are passed through to virtual machines:",
        paste=typed(line, *(port.address for port in on)),
        about="acs",
    )
    return judged(detail, [redirecting])


def _uses_pcie(situation: Situation) -> bool:
    """Return whether GPUs reach each other, or a fabric, over PCIe."""
    facts = situation.shared(gpu_facts)
    indices = sorted(gpu.device.index for gpu in facts.gpus)
    wired = set(facts.nvlinked)
    if len(indices) < 2 or not all(pair in wired for pair in combinations(indices, 2)):
        return True
    return bool(names(situation.sys / "class" / "infiniband"))


def _ports(gpus: list[Path]) -> Iterator[BridgePort]:
    """Yield the downstream ports of switches that lead to a GPU.

    Raises:
        Unreadable: A configuration space cannot be read as far as needed.
    """
    seen = set()
    for gpu in gpus:
        # The directory of a bridge contains those of the devices below it.
        for folder in gpu.resolve().parents:
            if folder in seen or not (folder / "config").exists():
                continue
            seen.add(folder)
            try:
                space = (folder / "config").read_bytes()
            except OSError as error:
                raise Unreadable(f"PCI {folder.name} cannot be read: {error.strerror}") from None
            if _is_downstream(space, folder.name):
                yield BridgePort(folder.name, acs_control(space, folder.name))


def _is_downstream(space: bytes, name: str) -> bool:
    if len(space) < 64 or _word(space, _CLASS) != _BRIDGE:
        return False
    if not _word(space, _STATUS) & _HAS_LIST:
        return False
    at = space[_FIRST] & ~3
    for _ in range(_MAX_CAPABILITIES):
        if at < 0x40:
            return False
        if at + 4 > len(space):
            raise Unreadable(f"only {len(space)} bytes of PCI {name} can be read: run it as root")
        if space[at] == _EXPRESS:
            return _word(space, at + 2) >> 4 & 0xF == _DOWNSTREAM
        at = space[at + 1] & ~3
    return False


def acs_control(space: bytes, name: str) -> int | None:
    """Return the ACS control register in a port's configuration space; None if it has no ACS.

    Raises:
        Unreadable: The bytes end before the extended capabilities, at byte 256.
    """
    if len(space) <= _EXTENDED:
        raise Unreadable(
            f"only {len(space)} bytes of PCI {name} can be read: run it as root"
            if len(space) < _EXTENDED
            else f"the kernel shows 256 bytes of PCI {name} and no extended capabilities"
        )
    at = _EXTENDED
    for _ in range(_MAX_CAPABILITIES):
        if at < _EXTENDED or at + 8 > len(space):
            return None
        (head,) = struct.unpack_from("<I", space, at)
        if head & 0xFFFF == _ACS:
            return _word(space, at + _CONTROL)
        at = head >> 20 & ~3
    return None


def _word(space: bytes, at: int) -> int:
    return int.from_bytes(space[at : at + 2], "little")

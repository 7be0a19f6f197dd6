"""Whether there is a GPU for each rank of this node."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.command_lines import corrected_line
from ddpdoctor.preflight.machine.gpu_facts import chosen, none_here
from ddpdoctor.preflight.situation import Situation, cuda_choice, gpu_facts, visible_gpus
from ddpdoctor.system.gpu.health import Health


@check("gpu-count", "DDP021")
def gpu_count(situation: Situation) -> Outcome:
    """There is no GPU for each rank, or CUDA_VISIBLE_DEVICES is wrong.

    What it finds
        More ranks than visible GPUs; numbers or UUIDs in CUDA_VISIBLE_DEVICES that this machine
        does not have, or twice; several ranks on partitioned (MIG) GPUs, or a partitioned GPU
        without instances; a GPU whose compute mode forbids its use, or leaves it to a process that
        has it already.

    Why it is bad
        CUDA ignores everything from the first wrong entry on, and all if one stands there twice,
        without a word. Two ranks on one GPU
        end in NCCL's "Duplicate GPU detected", a rank without one in "invalid device ordinal". CUDA
        shows a process one MIG instance at most, and NCCL does not connect instances.

    How to fix it
        Start as many ranks as there are GPUs, or correct the variable.

    Example
        Wrong: `CUDA_VISIBLE_DEVICES=0,0 torchrun --nproc-per-node 2 train.py`.
        Right: `CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 train.py`.

    When it stays silent
        With fewer ranks than GPUs; when CUDA_VISIBLE_DEVICES is empty or -1 (or Slurm's
        NoDevFiles), which means to use the CPU; without a GPU, which is said.

    Since
        0.1.0
    """
    reason = none_here(situation)
    if reason:
        return skipped(reason)
    gpus, seen = situation.shared(gpu_facts).gpus, situation.shared(visible_gpus)
    ranks = f"{situation.nproc} rank{'s' if situation.nproc != 1 else ''}"
    detail = f"{seen} of {len(gpus)} GPUs visible, for {ranks}"
    if seen and any(gpu.device.mig for gpu in chosen(situation)):
        detail = f"one MIG instance visible, all that CUDA shows a process, for {ranks}"
    return judged(detail, _findings(situation, gpus, seen))


def _findings(situation: Situation, gpus: tuple[Health, ...], seen: int) -> Iterator[Finding]:
    wanted = situation.environ.get("CUDA_VISIBLE_DEVICES")
    entry = situation.shared(cuda_choice).wrong
    everything = ",".join(map(str, range(len(gpus))))
    mine = chosen(situation)
    parted = [gpu for gpu in mine if gpu.device.mig]
    if entry:
        yield Finding(
            "DDP021",
            Severity.ERROR,
            f"CUDA_VISIBLE_DEVICES={wanted}: {entry}, so that CUDA sees {seen} of {len(gpus)} GPUs",
            fix="Correct the entry: CUDA ignores it and all behind it, and everything where one "
            "stands there twice.",
            paste=f"export CUDA_VISIBLE_DEVICES={everything}",
            about="CUDA_VISIBLE_DEVICES",
        )
    elif situation.nproc > seen and not parted:
        yield Finding(
            "DDP021",
            Severity.WARNING,
            f"{situation.nproc} ranks for {seen} visible GPU{'s' if seen != 1 else ''}: NCCL "
            "refuses two ranks on one",
            fix="Start one rank per GPU, or leave the GPUs out for a job on the CPU.",
            paste=corrected_line(situation, nproc=max(seen, 1)),
            about="ranks",
        )
    if _numbered_otherwise(situation, gpus):
        yield Finding(
            "DDP021",
            Severity.INFO,
            "the GPUs are of several kinds: CUDA_VISIBLE_DEVICES numbers them with the fastest "
            "first, and nvidia-smi by the PCI bus",
            fix="Let CUDA number them as nvidia-smi does, and as the checks of this table do.",
            paste="export CUDA_DEVICE_ORDER=PCI_BUS_ID",
            about="order",
        )
    empty = [gpu for gpu in parted if not gpu.instances]
    if empty or (parted and situation.nproc > 1):
        indices = ", ".join(str(gpu.device.index) for gpu in empty or parted)
        yield Finding(
            "DDP021",
            Severity.ERROR if empty else Severity.WARNING,
            f"GPU {indices} is partitioned (MIG) and has no instances: CUDA cannot use it"
            if empty
            else f"GPU {indices} is partitioned (MIG): a process sees one instance, and NCCL "
            "connects none",
            fix="Make an instance, or turn MIG off." if empty else "Turn MIG off for this job.",
            paste=f"sudo nvidia-smi -i {indices.replace(' ', '')} -mig 0",
            about="MIG",
        )
    for gpu in mine:
        if gpu.closed:
            yield _closed(gpu)


def _numbered_otherwise(situation: Situation, gpus: tuple[Health, ...]) -> bool:
    """Whether a number in CUDA_VISIBLE_DEVICES may mean another GPU to CUDA than to us."""
    wanted = situation.environ.get("CUDA_VISIBLE_DEVICES", "")
    by_bus = situation.environ.get("CUDA_DEVICE_ORDER", "") == "PCI_BUS_ID"
    kinds = {gpu.device.name for gpu in gpus}
    return wanted.strip()[:1].isdigit() and not by_bus and len(kinds) > 1


def _closed(gpu: Health) -> Finding:
    index = gpu.device.index
    return Finding(
        "DDP021",
        Severity.ERROR,
        f"GPU {index} is in compute mode Prohibited: no process may use it"
        if not gpu.processes
        else f"GPU {index} is in compute mode Exclusive, and another process has it",
        evidence=tuple(f"pid {process.pid}" for process in gpu.processes[:4]),
        fix="Set it back to the default.",
        paste=f"sudo nvidia-smi -i {index} -c 0",
        about=f"compute mode {index}",
    )

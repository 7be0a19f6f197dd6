"""Whether there is a GPU for each rank of this node."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.gpu.health import Health
from ddpdoctor.gpu.reader import same_uuid
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.gpu_facts import chosen, none_here
from ddpdoctor.preflight.situation import Situation, gpu_facts, visible_gpus

_PROHIBITED = 2


@check("gpu-count", "DDP021")
def gpu_count(situation: Situation) -> Outcome:
    """There is no GPU for each rank, or CUDA_VISIBLE_DEVICES is wrong.

    What it finds
        More ranks than visible GPUs; numbers or UUIDs in CUDA_VISIBLE_DEVICES that this machine
        does not have, or twice; several ranks on partitioned (MIG) GPUs, or a partitioned GPU
        without instances; a GPU whose compute mode forbids its use.

    Why it is bad
        CUDA ignores everything from the first wrong entry on, without a word. Two ranks on one GPU
        end in NCCL's "Duplicate GPU detected", a rank without one in "invalid device ordinal". CUDA
        shows a process one MIG instance at most, and NCCL does not connect instances.

    How to fix it
        Start as many ranks as there are GPUs, or correct the variable.

    Example
        Wrong: `CUDA_VISIBLE_DEVICES=0,0 torchrun --nproc-per-node 2 train.py`.
        Right: `CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node 2 train.py`.

    When it stays silent
        With fewer ranks than GPUs; when CUDA_VISIBLE_DEVICES is empty or -1, which means to use the
        CPU; without a GPU, which is said.

    Since
        0.1.0
    """
    reason = none_here(situation)
    if reason:
        return skipped(reason)
    gpus, seen = situation.shared(gpu_facts).gpus, situation.shared(visible_gpus)
    hidden = situation.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    if hidden:
        return skipped(f"CUDA_VISIBLE_DEVICES hides all {len(gpus)} GPUs")
    ranks = f"{situation.nproc} rank{'s' if situation.nproc != 1 else ''}"
    detail = f"{seen} of {len(gpus)} GPUs visible, for {ranks}"
    return judged(detail, _findings(situation, gpus, seen))


def _findings(situation: Situation, gpus: tuple[Health, ...], seen: int) -> Iterator[Finding]:
    wanted = situation.environ.get("CUDA_VISIBLE_DEVICES")
    entry = None if wanted is None else _wrong_entry(wanted, gpus)
    everything = ",".join(str(gpu.device.index) for gpu in gpus)
    if entry is not None:
        yield Finding(
            "DDP021",
            Severity.ERROR,
            f"CUDA_VISIBLE_DEVICES={wanted}: {entry}, so that CUDA sees {seen} of {len(gpus)} GPUs",
            fix="Correct the entry: CUDA ignores it and all behind it.",
            paste=f"export CUDA_VISIBLE_DEVICES={everything}",
            about="CUDA_VISIBLE_DEVICES",
        )
    elif situation.nproc > seen:
        yield Finding(
            "DDP021",
            Severity.WARNING,
            f"{situation.nproc} ranks for {seen} visible GPU{'s' if seen != 1 else ''}: NCCL "
            "refuses two ranks on one",
            fix="Start one rank per GPU, or leave the GPUs out for a job on the CPU.",
            paste=f"ddpdoctor run --nproc-per-node {max(seen, 1)} ...",
            about="ranks",
        )
    mine = chosen(situation)
    parted = [gpu for gpu in mine if gpu.device.mig]
    if parted and (situation.nproc > 1 or not all(gpu.instances for gpu in parted)):
        indices = ", ".join(str(gpu.device.index) for gpu in parted)
        empty = not all(gpu.instances for gpu in parted)
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
        if gpu.compute_mode == _PROHIBITED:
            yield Finding(
                "DDP021",
                Severity.ERROR,
                f"GPU {gpu.device.index} is in compute mode Prohibited: no process may use it",
                fix="Set it back to the default.",
                paste=f"sudo nvidia-smi -i {gpu.device.index} -c 0",
                about=f"compute mode {gpu.device.index}",
            )


def _wrong_entry(wanted: str, gpus: tuple[Health, ...]) -> str | None:
    """What is wrong with the first entry that CUDA would stop at; None if all are right."""
    seen: list[str] = []
    for entry in (each.strip() for each in wanted.split(",")):
        if entry.isdigit():
            if int(entry) >= len(gpus):
                return f"there is no GPU {entry}"
        elif entry.startswith(("GPU-", "MIG-")):
            known = any(
                gpu.device.key.startswith(same_uuid(entry)) or entry in gpu.instances
                for gpu in gpus
            )
            if not known:
                return f"this machine has no {entry}"
        else:
            return f"{entry!r} is no number or UUID" if entry else "an entry is empty"
        if entry in seen:
            return f"{entry} stands there twice"
        seen.append(entry)
    return None

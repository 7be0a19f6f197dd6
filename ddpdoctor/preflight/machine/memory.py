"""Whether the ranks of this node have memory to start with, and enough of /dev/shm."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import (
    Outcome,
    check,
    failure,
    finding,
    judged,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.machine import container
from ddpdoctor.preflight.situation import Situation, visible_gpus
from ddpdoctor.preflight.words import GIB, KIB, MIB, shown

BARE = 300 * MIB
"""What a rank holds once torch is imported and a small model trains on the CPU, measured."""

WITH_CUDA = 2 * GIB
"""The same with CUDA's libraries and a context."""


@check("memory", "DDP011")
def memory(situation: Situation) -> Outcome:
    """There is not enough free memory for the ranks to start.

    What it finds
        Less free memory, on the machine or within the container's limit, than 300 MiB per rank, or
        2 GiB per rank with a GPU. That is what a rank needs before it loads any data.

    Why it is bad
        The kernel kills a rank with SIGKILL, without a message. The other ranks wait for it and
        report "Connection closed by peer".

    How to fix it
        Raise the container's limit, end the processes that hold the memory, or start fewer ranks.

    Example
        Wrong: `docker run --memory 1g ...` with eight ranks.
        Right: `docker run --memory 64g ...`

    When it stays silent
        If there is more memory than that. How much the model and the data need is not known in
        advance.
    """
    left, limit, source = available(situation)
    each = WITH_CUDA if situation.shared(visible_gpus) else BARE
    detail = f"{shown(left)} of {shown(limit)} left by {source}"
    return judged(detail, _findings(situation, left, limit, source, each * situation.nproc))


def available(situation: Situation) -> tuple[int, int, str]:
    """Bytes left, bytes allowed, and what allows them."""
    total = left = 0
    with contextlib.suppress(OSError):
        rows = (situation.proc / "meminfo").read_text().splitlines()
        values = {row.partition(":")[0]: row.partition(":")[2].split() for row in rows}
        total = int(values["MemTotal"][0]) * KIB
        left = int((values.get("MemAvailable") or values["MemFree"])[0]) * KIB
    if not total:
        import psutil

        facts = psutil.virtual_memory()
        total, left = facts.total, facts.available
    group = container.memory(situation)
    if group is not None and group[1] - group[0] < left:
        return max(0, group[1] - group[0]), group[1], "the container's limit"
    return left, total, "the machine"


def _findings(
    situation: Situation, left: int, limit: int, source: str, wanted: int
) -> Iterator[Finding]:
    if left >= wanted:
        return
    nproc = situation.nproc
    inside = container.kind(situation)
    paste = "ps aux --sort=-rss | head"
    if limit < wanted and source != "the machine":
        paste = (
            typed("{} run --memory {}g ...", inside, max(1, 2 * wanted // GIB))
            if inside in ("docker", "podman")
            else typed("#SBATCH --mem={}G", max(1, 2 * wanted // GIB))
            if "SLURM_JOB_ID" in situation.environ
            else paste
        )
    yield finding(
        Severity.ERROR if left < wanted // 2 else Severity.WARNING,
        f"{shown(left)} of memory are left by {source}, and {nproc} ranks need {shown(wanted)} to "
        "start",
        evidence=(f"the limit is {shown(limit)}",),
        fix="Raise the limit, end what holds the memory, or start fewer ranks.",
        paste=paste,
    )


PER_RANK = 64 * MIB
"""Below this the segments of NCCL and a DataLoader's batches do not fit side by side."""

LEAST = 128 * MIB


@check("shared-memory", "DDP005")
def shared_memory(situation: Situation) -> Outcome:
    """/dev/shm is too small for the ranks of this node, or cannot be written.

    What it finds
        A /dev/shm that is missing or cannot be written (error), or whose size or free space is
        below 64 MiB per rank or 128 MiB in total.

    Why it is bad
        DataLoader workers pass batches through shared memory, and NCCL connects the ranks of a node
        through it. When it is full, the job fails with "Bus error", "No space left on device" or
        "Error while creating shared memory segment". Containers have 64 MiB by default.

    How to fix it
        Give the container more: `docker run --shm-size=8g`, or in Kubernetes an `emptyDir` with
        `medium: Memory` mounted at /dev/shm. If it is full, remove the files that dead jobs left
        there.

    Example
        Wrong: `docker run --gpus all image torchrun train.py`
        Right: `docker run --gpus all --shm-size=8g image torchrun train.py`

    When it stays silent
        If there is enough space, and on systems without /dev/shm.
    """
    folder = situation.shm
    if not folder.is_dir():
        return skipped(f"no {folder} on this system")
    problem = _unwritable(folder)
    if problem:
        return judged(
            f"{folder} cannot be written",
            [
                failure(
                    f"{folder} cannot be written: {problem}",
                    fix="NCCL and DataLoader workers need it: mount a tmpfs there that this user "
                    "may write.",
                    paste=typed(
                        "sudo mount -t tmpfs -o rw,nosuid,nodev,mode=1777,size=8g tmpfs {}", folder
                    )
                    if problem != "it is full"
                    else typed("ls -lS {}", folder),
                )
            ],
        )
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    wanted = max(LEAST, PER_RANK * situation.nproc)
    detail = f"{shown(free)} of {shown(size)} free in {folder}, for {_ranks(situation.nproc)}"
    return judged(detail, _short(situation, size, free, wanted))


def _short(situation: Situation, size: int, free: int, wanted: int) -> Iterator[Finding]:
    folder = situation.shm
    ranks = _ranks(situation.nproc)
    # A file system without a size reports 0.
    if 0 < size < wanted:
        yield warning(
            f"{folder} has {shown(size)} for {ranks}: too small for DataLoader workers and NCCL",
            evidence=(f"{shown(wanted)} is the least that {ranks} get by with",),
            fix="Give it more room: what does not fit ends in a bus error during training.",
            paste=_larger(situation),
        )
    elif size and free < wanted:
        left = sorted(_left_behind(folder), reverse=True)
        largest = tuple(
            f"{shown(amount)} in {folder / name}, of user {owner}"
            for amount, name, owner in left[:3]
        )
        yield warning(
            f"{folder} is nearly full: {shown(free)} of {shown(size)} free for {ranks}",
            evidence=largest,
            fix="Remove what dead jobs left there (the largest files are named above), or give it "
            "more room.",
            paste=typed("ls -lS {}", folder),
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _larger(situation: Situation) -> str:
    where = container.kind(situation)
    if where == "kubernetes":
        return "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]"
    if where:
        return typed("{} run --shm-size=8g ...", where)
    return typed("sudo mount -o remount,size=8g {}", situation.shm)


def _unwritable(folder: Path) -> str:
    """Why a file of a page cannot be made there; empty if it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4 * KIB))
            file.flush()
    except OSError as error:
        import errno

        return "it is full" if error.errno == errno.ENOSPC else (error.strerror or str(error))
    return ""


def _left_behind(folder: Path) -> Iterator[tuple[int, str, int]]:
    """Size in bytes, name and owner of the files there."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False):
                    yield facts.st_blocks * 512, entry.name, facts.st_uid

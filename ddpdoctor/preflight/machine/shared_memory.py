"""Whether /dev/shm is large enough for the ranks of this node."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.machine import container
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.preflight.sizes import KIB, MIB, shown

PER_RANK = 64 * MIB
"""Below this the segments of NCCL and a DataLoader's batches do not fit side by side."""

LEAST = 128 * MIB


@check("shared-memory", "DDP005")
def shared_memory(situation: Situation) -> Outcome:
    """/dev/shm is too small for the ranks of this node, or cannot be written.

    What it finds
        A /dev/shm that is not there or cannot be written (error), or with less than 64 MiB per rank
        (128 MiB at least) in size or free.

    Why it is bad
        DataLoader workers hand their batches over in shared memory, and NCCL connects the ranks of
        a node by it. What does not fit ends in "Bus error", "No space left on device", or "Error
        while creating shared memory segment". A container has 64 MiB unless told otherwise.

    How to fix it
        Give the container more: `docker run --shm-size=8g`, or in Kubernetes an `emptyDir` with
        `medium: Memory` mounted at /dev/shm. If it is full, remove what dead jobs left.

    Example
        Wrong: `docker run --gpus all image torchrun train.py`.
        Right: `docker run --gpus all --shm-size=8g image torchrun train.py`.

    When it stays silent
        When there is room, and on systems without /dev/shm.

    Since
        0.1.0
    """
    folder = situation.shm
    if not folder.is_dir():
        return skipped(f"no {folder} on this system")
    problem = _unwritable(folder)
    if problem:
        return judged(
            f"{folder} cannot be written",
            [
                Finding(
                    "DDP005",
                    Severity.ERROR,
                    f"{folder} cannot be written: {problem}",
                    fix="NCCL and DataLoader workers need it: mount a tmpfs there that this user "
                    "may write.",
                    paste=f"sudo mount -t tmpfs -o rw,nosuid,nodev,mode=1777,size=8g tmpfs {folder}"
                    if problem != "it is full"
                    else f"ls -lS {folder}",
                )
            ],
        )
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    wanted = max(LEAST, PER_RANK * situation.nproc)
    detail = f"{shown(free)} of {shown(size)} free in {folder}, for {_ranks(situation.nproc)}"
    return judged(detail, _findings(situation, size, free, wanted))


def _findings(situation: Situation, size: int, free: int, wanted: int) -> Iterator[Finding]:
    folder = situation.shm
    ranks = _ranks(situation.nproc)
    # A file system without a size of its own tells 0.
    if 0 < size < wanted:
        yield Finding(
            "DDP005",
            Severity.WARNING,
            f"{folder} has {shown(size)} for {ranks}: too small for DataLoader workers and NCCL",
            evidence=(f"{shown(wanted)} is the least that {ranks} get by with",),
            fix="Give it more room; what does not fit ends in a bus error while it trains.",
            paste=_larger(situation),
        )
    elif size and free < wanted:
        left = sorted(_left_behind(folder), reverse=True)
        largest = tuple(
            f"{shown(amount)} in {folder / name}, of user {owner}"
            for amount, name, owner in left[:3]
        )
        yield Finding(
            "DDP005",
            Severity.WARNING,
            f"{folder} is nearly full: {shown(free)} of {shown(size)} free for {ranks}",
            evidence=largest,
            fix="Remove what dead jobs left there (the largest files are named above), or give it "
            "more room.",
            paste=f"ls -lS {folder}",
        )


def _ranks(count: int) -> str:
    return f"{count} rank{'s' if count != 1 else ''}"


def _larger(situation: Situation) -> str:
    where = container.kind(situation)
    if where == "kubernetes":
        return "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]"
    if where:
        return f"{where} run --shm-size=8g ..."
    return f"sudo mount -o remount,size=8g {situation.shm}"


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

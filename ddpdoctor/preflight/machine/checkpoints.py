"""Whether a checkpoint can be written where the job will write it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, skipped, typed, warning
from ddpdoctor.preflight.deadline import bounded
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.preflight.words import GIB, MIB, shown

LEAST = 1 * GIB
"""Free space under which not even a small model's checkpoint is safe."""

PATIENCE = 6.0
"""Seconds until a file system counts as one that does not answer."""

SAMPLE = 1 * MIB


@check("checkpoint-dir", "DDP010")
def checkpoint_dir(situation: Situation) -> Outcome:
    """The checkpoint directory cannot be written, has no space, or does not respond.

    What it finds
        A directory that does not exist or is not writable; where a file cannot be written, synced
        to disk and renamed over another one; with less than 1 GiB or no inodes free; or whose file
        system does not respond within 6 s.

    Why it is bad
        The job trains until its first checkpoint and then fails: rank 0 raises, or waits for a dead
        file server while the other ranks wait for rank 0.

    How to fix it
        As the message says: create the directory, free space, or choose another one.

    Example
        Wrong: `--checkpoint-dir /scratch/user/run` on a node where /scratch is not mounted.
        Right: a directory that every node has mounted.

    When it stays silent
        If a file could be written and renamed there. Without --checkpoint-dir nothing is tested,
        and the output says so.
    """
    folder = situation.options.checkpoint_dir
    if folder is None:
        return skipped("no folder named: --checkpoint-dir DIR tests it")
    try:
        problem, free, inodes = bounded(lambda: written_to(folder), PATIENCE)
    except TimeoutError:
        return judged(f"{folder} does not answer", [_dead(folder)])
    detail = f"wrote, synchronized and renamed {shown(SAMPLE)}; {shown(free)} free"
    return judged(problem or detail, _findings(folder, problem, free, inodes))


def written_to(folder: Path) -> tuple[str, int, int]:
    """Write a file and remove it: what went wrong, bytes free, inodes free (-1 if not known)."""
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return _words(error), 0, -1
    try:
        problem = _written(folder)
    except FileNotFoundError:
        # The folder is there: /proc and the like, or a mount that was taken away.
        problem = "no file can be made there"
    except OSError as error:
        problem = _words(error)
        if error.errno == errno.ENOSPC and facts.f_files and not facts.f_favail:
            problem = "its file system has no inodes left for another file"
    return problem, facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files else -1


def _written(folder: Path) -> str:
    """Write a file, and rename it over another; what was wrong with it, or empty."""
    name = folder / f".ddpdoctor-{secrets.token_hex(8)}"
    other = name.with_suffix(".renamed")
    # Not zeros, which some file systems do not store.
    content = os.urandom(SAMPLE)
    try:
        with open(name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        other.write_bytes(b"an older one")
        os.replace(name, other)
        return "" if other.read_bytes() == content else "what is read back is not what was written"
    finally:
        for path in (name, other):
            with contextlib.suppress(OSError):
                path.unlink()


_WORDS = {
    errno.ENOENT: "it does not exist",
    errno.ENOTDIR: "it is not a folder",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EROFS: "it is mounted read-only",
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "this user's quota is used up",
    errno.ESTALE: "its file server has lost it (stale file handle)",
}


def _words(error: OSError) -> str:
    return _WORDS.get(error.errno or 0, error.strerror or str(error))


def _dead(folder: Path) -> Finding:
    top = folder.parts[1] if len(folder.parts) > 1 else str(folder)
    return failure(
        f"{folder} does not answer: nothing came back within {PATIENCE:.0f} s",
        fix="Its file server is down or overloaded: ask its administrator, or choose another "
        "folder.",
        paste=typed("mount | grep -F -- {}", top),
    )


def _findings(folder: Path, problem: str, free: int, inodes: int) -> Iterator[Finding]:
    if problem:
        missing = problem == _WORDS[errno.ENOENT]
        yield failure(
            f"checkpoints cannot be written to {folder}: {problem}",
            fix="Make it, or choose another one." if missing else "Choose another folder.",
            paste=typed("mkdir -p {}", folder)
            if missing
            else typed("ls -ld {0}; df -h {0}; df -i {0}", folder),
        )
    elif free < LEAST or inodes == 0:
        without = "" if inodes else ", and no inodes for another file"
        yield warning(
            f"{folder} has {shown(free)} free{without}",
            fix="Free some space, or choose another folder, before the first checkpoint is due.",
            paste=typed("df -h {0}; df -i {0}", folder),
        )

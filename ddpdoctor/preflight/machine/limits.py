"""Whether the limits of this user and this container let the ranks work."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged, warning
from ddpdoctor.preflight.machine import container
from ddpdoctor.preflight.situation import Situation
from ddpdoctor.preflight.words import GIB, MIB, shown
from ddpdoctor.system.proc import listed

OPEN_FILES = 256
"""What a rank opens besides its connections: libraries, data files, pipes to DataLoader workers."""

THREADS = 64
"""What a rank starts: OpenMP, autograd, gloo, NCCL, DataLoader workers."""

PINNED = 64 * MIB
"""The least that RDMA has to lock in memory."""


@check("limits", "DDP006")
def limits(situation: Situation) -> Outcome:
    """A limit on open files, locked memory, processes or file sizes is too low for the ranks.

    What it finds
        A limit on open files below 256 plus two per rank of the job. Fewer processes and threads
        left, for this user or the container, than 64 per rank of this node. Less than 64 MiB of
        locked memory on a machine with InfiniBand. A limit on file sizes below 1 GiB, or on address
        space below 16 GiB per rank.

    Why it is bad
        The job fails with "Too many open files", "Resource temporarily unavailable" when a thread
        cannot start, "ibv_reg_mr failed: Cannot allocate memory", or SIGXFSZ when it writes a
        checkpoint. This usually happens hours into the job, on one rank, while the others wait.

    How to fix it
        Raise the limit for the shell that starts the job, in /etc/security/limits.conf, or in the
        container's options.

    Example
        Wrong: `docker run --pids-limit 100 ...` with eight ranks.
        Right: `docker run --pids-limit -1 --ulimit memlock=-1 ...`

    When it stays silent
        With the usual limits: 1024 open files are enough for 384 ranks. For locked memory on
        machines without InfiniBand, and for processes of root.
    """
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    left = _threads_left(situation)
    told = [f"{_number(files)} open files"]
    told.append(f"{_number(left)} more threads" if left is not None else "threads unlimited")
    return judged(", ".join(told), _findings(situation, left))


def _number(limit: int) -> str:
    return "unlimited" if limit in (resource.RLIM_INFINITY, -1) else str(limit)


def _findings(situation: Situation, threads_left: int | None) -> Iterator[Finding]:
    nproc, world = situation.nproc, situation.nproc * situation.options.nnodes
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES + 2 * world
    if files != resource.RLIM_INFINITY and files < wanted:
        free = most_files == resource.RLIM_INFINITY
        enough = free or most_files >= wanted
        goal = max(wanted, 65536 if free else min(65536, most_files))
        yield finding(
            Severity.ERROR if files < wanted // 2 else Severity.WARNING,
            f"a process may open {files} files, and a rank of {world} needs about {wanted}",
            fix="Raise the limit in the shell that starts the job."
            + ("" if enough else f" The hard limit is {most_files}: an administrator has to."),
            paste=f"ulimit -n {goal}"
            if enough
            else f"echo '* - nofile {max(65536, wanted)}' | sudo tee -a /etc/security/limits.conf",
            about="open files",
        )
    needed = THREADS * nproc
    if threads_left is not None and threads_left < needed:
        inside = container.kind(situation)
        yield finding(
            Severity.ERROR if threads_left < 16 * nproc else Severity.WARNING,
            f"{threads_left} more processes and threads may be started, and {nproc} ranks need "
            f"about {needed}",
            fix="Raise the limit of the container, or of the user.",
            paste=f"{inside} run --pids-limit -1 ..."
            if inside in ("docker", "podman")
            else "ulimit -u unlimited",
            about="threads",
        )
    locked, most_locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < PINNED and _has_infiniband(situation.sys):
        inside = container.kind(situation)
        free = most_locked == resource.RLIM_INFINITY
        yield warning(
            f"{shown(locked)} may be locked in memory, and RDMA over InfiniBand needs far more",
            fix="Allow unlimited locked memory, for the container or the user.",
            paste=f"{inside} run --ulimit memlock=-1 ..."
            if inside in ("docker", "podman")
            else "ulimit -l unlimited"
            if free
            else "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf",
            about="locked memory",
        )
    size = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if size != resource.RLIM_INFINITY and size < GIB:
        yield warning(
            f"a file may have {shown(size)}: writing a larger checkpoint ends the rank (SIGXFSZ)",
            fix="Raise the limit in the shell that starts the job.",
            paste="ulimit -f unlimited",
            about="file size",
        )
    space = resource.getrlimit(resource.RLIMIT_AS)[0]
    if space != resource.RLIM_INFINITY and space < 16 * GIB:
        yield warning(
            f"a process may have {shown(space)} of address space; torch maps more than it uses",
            fix="Raise the limit in the shell that starts the job.",
            paste="ulimit -v unlimited",
            about="address space",
        )


def _threads_left(situation: Situation) -> int | None:
    """How many processes and threads may still be started here; None if there is no limit."""
    left = []
    group = container.pids(situation)
    if group is not None:
        left.append(group[1] - group[0])
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most != resource.RLIM_INFINITY and os.getuid() != 0:
        mine = (each for each in listed(situation.proc) if each.uid == os.getuid())
        left.append(most - sum(_threads(each.folder) for each in mine))
    return max(0, min(left)) if left else None


def _threads(process: Path) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int((process / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[17])
    return 0


def _has_infiniband(sys: Path) -> bool:
    with contextlib.suppress(OSError):
        return any((sys / "class" / "infiniband").iterdir())
    return False

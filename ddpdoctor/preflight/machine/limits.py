"""Whether the limits of this user and this container let the ranks work."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from itertools import chain
from math import inf

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged, typed, warning
from ddpdoctor.preflight.machine import container
from ddpdoctor.preflight.situation import Situation, names, text
from ddpdoctor.preflight.words import GIB, MIB, shown
from ddpdoctor.system.proc import Listed, listed

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
    files, left = _limit(resource.RLIMIT_NOFILE)[0], _threads_left(situation)
    detail = "unlimited open files, " if files == inf else f"{files:.0f} open files, "
    detail += "threads unlimited" if left is None else f"{left} more threads"
    found = (_files(situation), _threads(situation, left), _locked(situation), _sizes())
    return judged(detail, chain(*found))


def _limit(kind: int) -> tuple[float, float]:
    """The soft and the hard limit; infinite where there is none."""
    soft, hard = resource.getrlimit(kind)
    return tuple(inf if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]


def _files(situation: Situation) -> Iterator[Finding]:
    world = situation.nproc * situation.options.nnodes
    wanted = OPEN_FILES + 2 * world
    files, most = _limit(resource.RLIMIT_NOFILE)
    if files >= wanted:
        return
    enough = most >= wanted
    goal = max(wanted, min(65536, most))
    yield finding(
        Severity.ERROR if files < wanted // 2 else Severity.WARNING,
        f"a process may open {files:.0f} files, and a rank of {world} needs about {wanted}",
        fix="Raise the limit in the shell that starts the job."
        + ("" if enough else f" The hard limit is {most:.0f}: only an administrator can raise it."),
        paste=typed("ulimit -n {}", f"{goal:.0f}")
        if enough
        else typed(
            "echo {} | sudo tee -a /etc/security/limits.conf", f"* - nofile {max(65536, wanted)}"
        ),
        about="open files",
    )


def _threads(situation: Situation, left: int | None) -> Iterator[Finding]:
    nproc = situation.nproc
    if left is not None and left < THREADS * nproc:
        yield finding(
            Severity.ERROR if left < 16 * nproc else Severity.WARNING,
            f"{left} more processes and threads may be started, and {nproc} ranks need about "
            f"{THREADS * nproc}",
            fix="Raise the limit of the container, or of the user.",
            paste=container.run_line(situation, "--pids-limit -1") or "ulimit -u unlimited",
            about="threads",
        )


def _locked(situation: Situation) -> Iterator[Finding]:
    locked, most = _limit(resource.RLIMIT_MEMLOCK)
    if locked < PINNED and names(situation.sys / "class" / "infiniband"):
        by_hand = (
            "ulimit -l unlimited"
            if most == inf
            else "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf"
        )
        yield warning(
            f"{shown(locked)} may be locked in memory, and RDMA over InfiniBand needs far more",
            fix="Allow unlimited locked memory, for the container or the user.",
            paste=container.run_line(situation, "--ulimit memlock=-1") or by_hand,
            about="locked memory",
        )


def _sizes() -> Iterator[Finding]:
    for kind, least, what, effect, flag, about in (
        (resource.RLIMIT_FSIZE, GIB, "a file may have {}",
         ": writing a larger checkpoint ends the rank (SIGXFSZ)", "-f", "file size"),
        (resource.RLIMIT_AS, 16 * GIB, "a process may have {} of address space",
         "; torch maps more than it uses", "-v", "address space"),
    ):  # fmt: skip
        size = _limit(kind)[0]
        if size < least:
            yield warning(
                what.format(shown(size)) + effect,
                fix="Raise the limit in the shell that starts the job.",
                paste=typed("ulimit {} unlimited", flag),
                about=about,
            )


def _threads_left(situation: Situation) -> int | None:
    """How many processes and threads may still be started here; None if there is no limit."""
    left = []
    group = container.pids(situation)
    if group is not None:
        left.append(group[1] - group[0])
    most = _limit(resource.RLIMIT_NPROC)[0]
    if most < inf and os.getuid() != 0:
        mine = (each for each in listed(situation.proc) if each.uid == os.getuid())
        left.append(int(most) - sum(_threads_of(each) for each in mine))
    return max(0, min(left)) if left else None


def _threads_of(process: Listed) -> int:
    fields = text(process.folder / "stat").rpartition(")")[2].split()
    return int(fields[17]) if len(fields) > 17 else 0

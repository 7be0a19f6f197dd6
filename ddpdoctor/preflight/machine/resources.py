"""Whether memory, disks, limits and cores suffice, and what earlier jobs left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import secrets
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import GIB, KIB, MIB, binary_size, count, duration
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
from ddpdoctor.preflight.command_lines import corrected_line
from ddpdoctor.preflight.situation import (
    Situation,
    bounded,
    container_cores,
    container_kind,
    container_memory,
    container_pids,
    container_run_line,
    gpu_facts,
    names,
    text,
    visible_gpus,
)
from ddpdoctor.system.proc import Listed, listed, listening, named, sockets

# -- cores


@check("cores", "DDP012")
def cores(situation: Situation) -> Outcome:
    """There are fewer cores than ranks, or the ranks start more threads than there are cores.

    What it finds
        Fewer cores than ranks, by CPU affinity and the container's quota. An OMP_NUM_THREADS with
        which the ranks start more than twice as many threads as there are cores.

    Why it is bad
        Ranks that share a core wait for each other in every collective, and the slowest one sets
        the pace. With more threads than cores, OpenMP's spinning barriers can make a step take ten
        times as long.

    How to fix it
        Start fewer ranks, give the container more cores, or set OMP_NUM_THREADS to cores / ranks.

    Example
        Wrong: `OMP_NUM_THREADS=64` with eight ranks on 64 cores.
        Right: `OMP_NUM_THREADS=8`. torchrun sets 1 if the variable is not set.

    When it stays silent
        With at least as many cores as ranks, and if OMP_NUM_THREADS is not set (torchrun then sets
        1). Two ranks on a single core without a GPU, as on small test machines, are reported as
        information.
    """
    have, nproc = available_cores(situation), situation.nproc
    given = situation.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    detail = f"{count(have, 'core')} for {count(nproc, 'rank')}"
    if given.isdigit():
        detail += f", OMP_NUM_THREADS={given}"
    threads = int(given) if given.isdigit() else 1
    return judged(detail, _core_findings(situation, have, threads))


def available_cores(situation: Situation) -> float:
    """Return how many cores this process and its children can use."""
    try:
        count = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):
        count = float(os.cpu_count() or 1)
    quota = container_cores(situation)
    return count if quota is None else min(count, quota)


def _core_findings(situation: Situation, have: float, threads: int) -> Iterator[Finding]:
    nproc = situation.nproc
    quota = container_cores(situation)
    where = "the quota of the container" if quota is not None and quota <= have else "the affinity"
    if have < nproc:
        # Two ranks are the default, even on a machine with a single core.
        small = (
            nproc == 2 and situation.options.nproc is None and not situation.shared(visible_gpus)
        )
        yield finding(
            Severity.INFO if small else Severity.WARNING,
            f"{nproc} ranks will share {count(have, 'core')} and wait for each other",
            evidence=(f"{count(have, 'core')} by {where}; this machine has {os.cpu_count()}",),
            fix="Give the container or the batch job more cores, or start fewer ranks.",
            paste=typed("#SBATCH --cpus-per-task={}", nproc)
            if "SLURM_JOB_ID" in situation.environ
            else container_run_line(situation, f"--cpus={nproc}")
            if quota is not None and container_kind(situation) in ("docker", "podman")
            else corrected_line(situation, nproc=max(1, int(have))),
            about="cores",
        )
    elif threads > 1 and threads * nproc > 2 * have:
        fair = max(1, int(have / nproc))
        yield warning(
            f"OMP_NUM_THREADS={threads} makes {threads * nproc} threads of {nproc} ranks, on "
            f"{count(have, 'core')}",
            fix=f"Give each rank {count(fair, 'thread')}.",
            paste=typed("export OMP_NUM_THREADS={}", fair),
            about="threads",
        )


# -- memory


MEMORY_PER_RANK = 300 * MIB
"""Bytes that a rank holds after importing torch and training a small model on the CPU, measured."""

MEMORY_PER_CUDA_RANK = 2 * GIB  # The same with CUDA's libraries and a context


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
    left, limit, source = available_memory(situation)
    each = MEMORY_PER_CUDA_RANK if situation.shared(visible_gpus) else MEMORY_PER_RANK
    wanted = each * situation.nproc
    detail = f"{binary_size(left)} of {binary_size(limit)} left by {source}"
    if left >= wanted:
        return judged(detail, [])
    inside = container_kind(situation)
    paste, gib = "ps aux --sort=-rss | head", max(1, 2 * wanted // GIB)
    if limit < wanted and source != "the machine":
        if inside in ("docker", "podman"):
            paste = typed("{} run --memory {}g ...", inside, gib)
        elif "SLURM_JOB_ID" in situation.environ:
            paste = typed("#SBATCH --mem={}G", gib)
    short = finding(
        Severity.ERROR if left < wanted // 2 else Severity.WARNING,
        f"{binary_size(left)} of memory are left by {source}, and {situation.nproc} ranks need "
        f"{binary_size(wanted)} to start",
        evidence=(f"the limit is {binary_size(limit)}",),
        fix="Raise the limit, end what holds the memory, or start fewer ranks.",
        paste=paste,
    )
    return judged(detail, [short])


def available_memory(situation: Situation) -> tuple[int, int, str]:
    """Return the bytes left, the bytes allowed, and what limits them."""
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
    group = container_memory(situation)
    if group is not None and group[1] - group[0] < left:
        return max(0, group[1] - group[0]), group[1], "the container's limit"
    return left, total, "the machine"


SHARED_MEMORY_PER_RANK = 64 * MIB
"""Below this, NCCL's segments and a DataLoader's batches do not fit side by side."""

MIN_SHARED_MEMORY = 128 * MIB


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
    folder, ranks = situation.shm, count(situation.nproc, "rank")
    if not folder.is_dir():
        return skipped(f"no {folder} on this system")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4 * KIB))
            file.flush()
    except OSError as error:
        full = error.errno == errno.ENOSPC
        problem = "it is full" if full else error.strerror or str(error)
        mount = "sudo mount -t tmpfs -o rw,nosuid,nodev,mode=1777,size=8g tmpfs {}"
        wrong = failure(
            f"{folder} cannot be written: {problem}",
            fix="NCCL and DataLoader workers need it: mount a tmpfs there that this user may "
            "write.",
            paste=typed("ls -lS {}", folder) if full else typed(mount, folder),
        )
        return judged(f"{folder} cannot be written", [wrong])
    facts = os.statvfs(folder)
    size, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    detail = f"{binary_size(free)} of {binary_size(size)} free in {folder}, for {ranks}"
    return judged(detail, _shared_memory_findings(situation, size, free))


def _shared_memory_findings(situation: Situation, size: int, free: int) -> Iterator[Finding]:
    folder, ranks = situation.shm, count(situation.nproc, "rank")
    wanted = max(MIN_SHARED_MEMORY, SHARED_MEMORY_PER_RANK * situation.nproc)
    # A file system without a size reports 0.
    if 0 < size < wanted:
        yield warning(
            f"{folder} has {binary_size(size)} for {ranks}: too small for DataLoader workers and "
            "NCCL",
            evidence=(f"{binary_size(wanted)} is the minimum for {ranks}",),
            fix="Give it more room: once it is full, training ends in a bus error.",
            paste=_larger_shared_memory(situation),
        )
    elif size and free < wanted:
        largest = sorted(_files_in(folder), reverse=True)[:3]
        yield warning(
            f"{folder} is nearly full: {binary_size(free)} of {binary_size(size)} free for {ranks}",
            evidence=tuple(
                f"{binary_size(amount)} in {folder / name}, of user {owner}"
                for amount, name, owner in largest
            ),
            fix="Remove what dead jobs left there (the largest files are named above), or give it "
            "more room.",
            paste=typed("ls -lS {}", folder),
        )


def _larger_shared_memory(situation: Situation) -> str:
    where = container_kind(situation)
    if where == "kubernetes":
        return "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 8Gi}}]"
    if where:
        return typed("{} run --shm-size=8g ...", where)
    return typed("sudo mount -o remount,size=8g {}", situation.shm)


def _files_in(folder: Path) -> Iterator[tuple[int, str, int]]:
    """Yield the size in bytes, the name and the owner of each file there."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            with contextlib.suppress(OSError):
                facts = entry.stat(follow_symlinks=False)
                if entry.is_file(follow_symlinks=False):
                    yield facts.st_blocks * 512, entry.name, facts.st_uid


# -- limits


OPEN_FILES = 256
"""Number of files that a rank opens besides connections: libraries, data, pipes to workers."""

THREADS = 64  # Threads that a rank starts: OpenMP, autograd, gloo, NCCL, DataLoader workers
MIN_LOCKED_MEMORY = 64 * MIB  # Minimum bytes that RDMA has to lock in memory


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
    found = (
        _open_files(situation),
        _thread_limit(situation, left),
        _locked_memory(situation),
        _sizes(),
    )
    return judged(detail, chain(*found))


def _limit(kind: int) -> tuple[float, float]:
    """Return the soft and the hard limit; infinite if there is none."""
    soft, hard = resource.getrlimit(kind)
    return tuple(inf if each == resource.RLIM_INFINITY else each for each in (soft, hard))  # type: ignore[return-value]


def _open_files(situation: Situation) -> Iterator[Finding]:
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


def _thread_limit(situation: Situation, left: int | None) -> Iterator[Finding]:
    nproc = situation.nproc
    wanted = THREADS * nproc
    if left is not None and left < wanted:
        yield finding(
            Severity.ERROR if left < 16 * nproc else Severity.WARNING,
            f"{left} more processes and threads may be started, and {nproc} ranks need about "
            f"{wanted}",
            fix="Raise the limit of the container, or of the user.",
            paste=container_run_line(situation, "--pids-limit -1") or "ulimit -u unlimited",
            about="threads",
        )


def _locked_memory(situation: Situation) -> Iterator[Finding]:
    locked, most = _limit(resource.RLIMIT_MEMLOCK)
    if locked < MIN_LOCKED_MEMORY and names(situation.sys / "class" / "infiniband"):
        by_hand = (
            "ulimit -l unlimited"
            if most == inf
            else "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.conf"
        )
        yield warning(
            f"{binary_size(locked)} may be locked in memory, and RDMA over InfiniBand needs far "
            "more",
            fix="Allow unlimited locked memory, for the container or the user.",
            paste=container_run_line(situation, "--ulimit memlock=-1") or by_hand,
            about="locked memory",
        )


def _sizes() -> Iterator[Finding]:
    for kind, least, message, flag, about in (
        (resource.RLIMIT_FSIZE, GIB,
         "a file may have {}: writing a larger checkpoint ends the rank (SIGXFSZ)",
         "-f", "file size"),
        (resource.RLIMIT_AS, 16 * GIB,
         "a process may have {} of address space; torch maps more than it uses",
         "-v", "address space"),
    ):  # fmt: skip
        size = _limit(kind)[0]
        if size < least:
            yield warning(
                message.format(binary_size(size)),
                fix="Raise the limit in the shell that starts the job.",
                paste=typed("ulimit {} unlimited", flag),
                about=about,
            )


def _threads_left(situation: Situation) -> int | None:
    """Return how many processes and threads may still be started; None if there is no limit."""
    left = []
    group = container_pids(situation)
    if group is not None:
        left.append(group[1] - group[0])
    most = _limit(resource.RLIMIT_NPROC)[0]
    if most < inf and os.getuid() != 0:
        mine = [each for each in listed(situation.proc) if each.uid == os.getuid()]
        fields = [text(each.folder / "stat").rpartition(")")[2].split() for each in mine]
        left.append(int(most) - sum(int(each[17]) for each in fields if len(each) > 17))
    return max(0, min(left)) if left else None


# -- room for files


MIN_CHECKPOINT_SPACE = 1 * GIB  # Free space below which not even a small model's checkpoint is safe
DISK_TIMEOUT = 6.0  # Seconds until a file system counts as one that does not respond

SAMPLE_BYTES = 1 * MIB


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
        problem, free, inodes = bounded(lambda: written_to(folder), DISK_TIMEOUT)
    except TimeoutError:
        hung = failure(
            f"{folder} does not answer: nothing came back within {DISK_TIMEOUT:.0f} s",
            fix="Its file server is down or overloaded: ask its administrator, or choose another "
            "folder.",
            paste=typed("mount | grep -F -- {}", [*folder.parts, folder][1]),
        )
        return judged(f"{folder} does not answer", [hung])
    sample = binary_size(SAMPLE_BYTES)
    detail = f"wrote, synchronized and renamed {sample}; {binary_size(free)} free"
    return judged(problem or detail, _checkpoint_findings(folder, problem, free, inodes))


def written_to(folder: Path) -> tuple[str, int, int]:
    """Write a file, rename it over another one, and remove it.

    Returns:
        The problem (empty if there is none), the bytes free, and the inodes free (-1 if unknown).
    """
    try:
        facts = os.statvfs(folder)
    except OSError as error:
        return _error_words(error), 0, -1
    problem = ""
    name = folder / f".ddpdoctor-{secrets.token_hex(8)}"
    other = name.with_suffix(".renamed")
    # Not zeros, which some file systems do not store.
    content = os.urandom(SAMPLE_BYTES)
    try:
        with open(name, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        other.write_bytes(b"an older one")
        os.replace(name, other)
        if other.read_bytes() != content:
            problem = "the data read back differ from the data written"
    except FileNotFoundError:
        # The directory exists, so this is /proc or the like, or a mount that was taken away.
        problem = "no file can be made there"
    except OSError as error:
        problem = _error_words(error)
        if error.errno == errno.ENOSPC and facts.f_files and not facts.f_favail:
            problem = "its file system has no inodes left for another file"
    finally:
        for path in (name, other):
            with contextlib.suppress(OSError):
                path.unlink()
    return problem, facts.f_bavail * facts.f_frsize, facts.f_favail if facts.f_files else -1


_ERROR_WORDS = {
    errno.ENOENT: "it does not exist",
    errno.ENOTDIR: "it is not a folder",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EROFS: "it is mounted read-only",
    errno.ENOSPC: "its file system is full",
    errno.EDQUOT: "this user's quota is used up",
    errno.ESTALE: "its file server has lost it (stale file handle)",
}


def _error_words(error: OSError) -> str:
    return _ERROR_WORDS.get(error.errno or 0, error.strerror or str(error))


def _checkpoint_findings(folder: Path, problem: str, free: int, inodes: int) -> Iterator[Finding]:
    if problem:
        missing = problem == _ERROR_WORDS[errno.ENOENT]
        yield failure(
            f"checkpoints cannot be written to {folder}: {problem}",
            fix="Make it, or choose another one." if missing else "Choose another folder.",
            paste=typed("mkdir -p {}", folder)
            if missing
            else typed("ls -ld {0}; df -h {0}; df -i {0}", folder),
        )
    elif free < MIN_CHECKPOINT_SPACE or inodes == 0:
        without = "" if inodes else ", and no inodes for another file"
        yield warning(
            f"{folder} has {binary_size(free)} free{without}",
            fix="Free some space, or choose another folder, before the first checkpoint is due.",
            paste=typed("df -h {0}; df -i {0}", folder),
        )


MIN_TEMPORARY_SPACE = 256 * MIB
"""Bytes that torch.compile, Triton and DataLoader workers need in any case."""


@check("temporary-dir", "DDP017")
def temporary_dir(situation: Situation) -> Outcome:
    """The directory for temporary files cannot be written, is full, or has no inodes left.

    What it finds
        A TMPDIR (or /tmp) in which no file can be made, or with less than 256 MiB or no inodes
        (`df -i`) free.

    Why it is bad
        torchrun, torch.compile, Triton and DataLoader workers write there. They fail with "No
        usable temporary directory found" or "No space left on device", on one node, when the job
        has already started.

    How to fix it
        Free some space, or set TMPDIR to another directory.

    Example
        Wrong: a /tmp of 1 GiB, filled by core dumps.
        Right: `export TMPDIR=/scratch/$USER`

    When it stays silent
        If a file could be written there and there is room.
    """
    named = situation.environ.get("TMPDIR", "")
    exists = bool(named) and Path(named).is_dir()
    try:
        folder = Path(named if exists else tempfile.gettempdir())
    except OSError:
        folder = Path("/tmp" if os.path.isdir("/tmp") else "/var/tmp")
    try:
        problem, free, inodes = bounded(lambda: written_to(folder), DISK_TIMEOUT)
    except TimeoutError:
        problem, free, inodes = f"nothing came back within {DISK_TIMEOUT:.0f} s", 0, -1
    lost = f"; TMPDIR={named} is not a directory" if named and not exists else ""
    detail = f"{problem or binary_size(free) + ' free'} in {folder}{lost}"
    paste = typed("df -h {0}; df -i {0}", folder)
    fix = "Free some space there, or set TMPDIR to another folder, on every node."
    findings = []
    if problem:
        message = f"temporary files cannot be written to {folder}: {problem}"
        findings = [failure(message, fix=fix, paste=paste)]
    elif free < MIN_TEMPORARY_SPACE or inodes == 0:
        without = "" if inodes else ", and no inodes for another file"
        message = f"{folder}, where temporary files go, has {binary_size(free)} free{without}"
        findings = [warning(message, fix=fix, paste=paste)]
    return judged(detail, findings)


# -- find ranks of an earlier job that live on without their launcher, and end them


YOUNG = 5.0  # Age in seconds below which a process may lack its parent because both are ending

_MARKS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_LAUNCHER = ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "DDPDOCTOR_RUN_ID")


_INITS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit")
"""Processes other than 1 that adopt orphans and start no ranks."""

_LAUNCHERS = ("python", "torchrun", "ddpdoctor", "accelerate", "deepspeed", "mpirun", "srun")
"""Words in the command line of a process 1 that may itself be a launcher."""


@dataclass(frozen=True)
class Orphan:
    """A rank without a launcher. Memory is in bytes."""

    process: Listed
    started: int  # As `Listed.started`. It distinguishes the process from a later one with its pid.
    rank: str
    memory: int
    gpu_memory: int
    age: float  # Seconds since it started
    ports: tuple[int, ...] = ()  # The ports on which it listens


@check("orphans", "DDP009")
def orphans(situation: Situation) -> Outcome:
    """Ranks of an earlier job are still running although their launcher has exited.

    What it finds
        Processes of this user that torchrun started as ranks (RANK, WORLD_SIZE and
        TORCHELASTIC_RUN_ID are in their environment), whose launcher has exited, so that init is
        their parent.

    Why it is bad
        They hold memory, GPU memory and ports, and often spin in a collective that no other rank
        will join. The next job runs out of memory or runs at half the speed.

    How to fix it
        End them: `ddpdoctor check --kill-orphans` asks first, then ends them.

    Example
        Wrong: `kill -9` of torchrun, which leaves its workers running.
        Right: `kill` of torchrun (SIGTERM), which ends them; or `ddpdoctor run`, which leaves no
        process behind whatever is killed.

    When it stays silent
        For jobs whose launcher is alive, and background processes of their ranks. For ranks started
        by hand, by mpirun, srun or nohup. For processes of other users, and for processes younger
        than 5 s.
    """
    if not (situation.proc / "self" / "stat").exists() and not (situation.proc / "1").exists():
        return skipped("no /proc on this system")
    found = find_orphans(situation)
    mine = sum(each.uid == os.getuid() for each in listed(situation.proc))
    return judged(f"{len(found)} among {mine} processes of this user", _orphan_findings(found))


def find_orphans(situation: Situation) -> list[Orphan]:
    """Return all orphan ranks of this user, the largest first."""
    on_gpus = situation.shared(gpu_facts).held_by
    ports = listening(situation.proc)
    marked = {each.pid: (each, environ) for each, environ in _marked(situation)}
    alive = {_job_of(environ) for each, environ in marked.values() if _attached(each, marked)}
    found = []
    for each, environ in marked.values():
        # A background process of a living job's rank belongs to that job.
        if _job_of(environ) in alive or not _abandoned(situation, each):
            continue
        age = 0.0
        with contextlib.suppress(OSError, ValueError):
            uptime = float((situation.proc / "uptime").read_text().split()[0])
            age = uptime - each.started / os.sysconf("SC_CLK_TCK")
        if age < YOUNG:
            continue
        found.append(
            Orphan(
                process=each,
                started=each.started,
                rank=environ["RANK"],
                memory=each.resident,
                gpu_memory=on_gpus.get(each.pid, 0),
                age=age,
                ports=tuple(sorted({ports[i] for i in sockets(each.folder) if i in ports})),
            )
        )
    return sorted(found, key=lambda orphan: (-orphan.gpu_memory, -orphan.memory))


def _marked(situation: Situation) -> Iterator[tuple[Listed, dict[str, str]]]:
    """Yield this user's processes that were started within a rank of a launcher."""
    for each in listed(situation.proc):
        if each.uid != os.getuid() or each.pid == os.getpid() or not each.alive:
            continue
        environ = each.environ
        if not all(name in environ for name in _MARKS):
            continue
        if any(name in environ for name in _LAUNCHER):
            yield each, environ


def _job_of(environ: dict[str, str]) -> tuple[str, ...]:
    """Return the variables that all ranks of one job on this machine share."""
    return tuple(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))


def _attached(process: Listed, marked: dict[int, tuple[Listed, dict[str, str]]]) -> bool:
    """Return whether a launcher, that is a parent outside the ranks, is still running."""
    top, seen = process, set()
    while top.parent in marked and top.pid not in seen:
        seen.add(top.pid)
        top = marked[top.parent][0]
    launcher = named(top.folder.parent, top.parent)
    return launcher is not None and not _takes_in(launcher)


def _abandoned(situation: Situation, process: Listed) -> bool:
    """Return whether the process that started a rank is gone.

    torchrun's workers are its children and lead their own sessions. When torchrun ends without
    them, init or a subreaper becomes their parent. A child of a worker, such as a DataLoader's,
    leads no session. A child of a Python process may be its worker: in a container torchrun itself
    can be process 1.
    """
    stat = process.stat
    if stat is None or stat.session != process.pid:
        return False
    adopter = named(situation.proc, stat.parent)
    return stat.parent <= 1 if adopter is None else _takes_in(adopter)


def _takes_in(process: Listed) -> bool:
    """Return whether a process adopts orphans."""
    words = process.words
    name = os.path.basename(words[0]) if words else ""
    if process.pid != 1:
        return name in _INITS
    return not any(each in word for word in words for each in _LAUNCHERS)


def _orphan_findings(found: list[Orphan]) -> Iterator[Finding]:
    if not found:
        return
    gpu_memory = sum(orphan.gpu_memory for orphan in found)
    holds = f"{binary_size(sum(orphan.memory for orphan in found))} of memory"
    if gpu_memory:
        holds += f" and {binary_size(gpu_memory)} of GPU memory"
    yield warning(
        f"{count(len(found), 'process', 'processes')} of an earlier job "
        f"{'are' if len(found) > 1 else 'is'} still alive without a launcher, with {holds}",
        evidence=tuple(describe_orphan(orphan) for orphan in found[:8]),
        fix="End them if they are not needed. This asks first, unless --yes is given.",
        paste="ddpdoctor check --kill-orphans",
    )


def describe_orphan(orphan: Orphan) -> str:
    """Describe an orphan in one line."""
    held = binary_size(orphan.memory)
    if orphan.gpu_memory:
        held += f", {binary_size(orphan.gpu_memory)} on GPUs"
    if orphan.ports:
        held += f", port {', '.join(map(str, orphan.ports[:4]))}"
    return f"rank {orphan.rank}: {orphan.process.described}, {held}, {duration(orphan.age)} old"


def kill_orphans(chosen: Iterable[Orphan], patience: float = 2.0) -> Collection[Orphan]:
    """End orphans that are still the same processes. Return those that are still alive."""
    left = list(chosen)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for orphan in left:
            if orphan.process.started == orphan.started:
                with contextlib.suppress(OSError):
                    # It leads a session, so its helpers end with it.
                    os.killpg(orphan.process.pid, number)
        until = time.monotonic() + patience
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = [
                orphan
                for orphan in left
                if orphan.process.alive and orphan.process.started == orphan.started
            ]
    return left

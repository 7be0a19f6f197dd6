"""Find ranks of an earlier job that live on without their launcher, and end them."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import binary_size, count, duration
from ddpdoctor.preflight.check import Outcome, check, judged, skipped, warning
from ddpdoctor.preflight.situation import Situation, gpu_facts
from ddpdoctor.system.proc import Listed, listed, listening, named, sockets

YOUNG = 5.0  # Seconds in which a process may have lost its parent because both are just ending

_MARKS = ("RANK", "WORLD_SIZE", "MASTER_PORT")
_LAUNCHER = ("TORCHELASTIC_RUN_ID", "LOCAL_WORLD_SIZE", "DDPDOCTOR_RUN_ID")


_INITS = ("systemd", "init", "tini", "dumb-init", "docker-init", "catatonit")
"""Processes other than 1 that adopt orphans and start no ranks."""

_LAUNCHERS = ("python", "torchrun", "ddpdoctor", "accelerate", "deepspeed", "mpirun", "srun")
"""Words in the command line of a process 1 that may itself be a launcher."""


@dataclass(frozen=True)
class Orphan:
    """A rank without a launcher. Memory is in bytes.

    Attributes:
        started: As `Listed.started`, so that no other process with the same pid is ever meant.
        age: Seconds since it started.
        ports: The ports on which it listens.
    """

    process: Listed
    started: int
    rank: str
    memory: int
    gpu_memory: int
    age: float
    ports: tuple[int, ...] = ()


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
    found = find(situation)
    mine = sum(each.uid == os.getuid() for each in listed(situation.proc))
    return judged(f"{len(found)} among {mine} processes of this user", _findings(found))


def find(situation: Situation) -> list[Orphan]:
    """Return all orphan ranks of this user, the largest first."""
    on_gpus = situation.shared(gpu_facts).held_by
    ports = listening(situation.proc)
    marked = {each.pid: (each, environ) for each, environ in _marked(situation)}
    alive = {_job(environ) for each, environ in marked.values() if _attached(each, marked)}
    found = []
    for each, environ in marked.values():
        # A background process of a living job's rank belongs to that job.
        if _job(environ) in alive or not _abandoned(situation, each):
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


def _job(environ: dict[str, str]) -> tuple[str, ...]:
    """Return what the ranks of one job on this machine have in common."""
    return tuple(environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))


def _attached(process: Listed, marked: dict[int, tuple[Listed, dict[str, str]]]) -> bool:
    """Return whether a launcher, that is a parent outside of the ranks, is still there."""
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
    """Return whether a process is one that adopts orphans."""
    words = process.words
    name = os.path.basename(words[0]) if words else ""
    if process.pid != 1:
        return name in _INITS
    return not any(each in word for word in words for each in _LAUNCHERS)


def _findings(found: list[Orphan]) -> Iterator[Finding]:
    if not found:
        return
    gpu_memory = sum(orphan.gpu_memory for orphan in found)
    holds = f"{binary_size(sum(orphan.memory for orphan in found))} of memory"
    if gpu_memory:
        holds += f" and {binary_size(gpu_memory)} of GPU memory"
    yield warning(
        f"{count(len(found), 'process', 'processes')} of an earlier job "
        f"{'are' if len(found) > 1 else 'is'} still alive without a launcher, with {holds}",
        evidence=tuple(describe(orphan) for orphan in found[:8]),
        fix="End them if they are not needed; this asks first (--yes: it does not).",
        paste="ddpdoctor check --kill-orphans",
    )


def describe(orphan: Orphan) -> str:
    """Describe an orphan in one line."""
    held = binary_size(orphan.memory)
    if orphan.gpu_memory:
        held += f", {binary_size(orphan.gpu_memory)} on GPUs"
    if orphan.ports:
        held += f", port {', '.join(map(str, orphan.ports[:4]))}"
    return f"rank {orphan.rank}: {orphan.process.described}, {held}, {duration(orphan.age)} old"


def kill(chosen: Iterable[Orphan], patience: float = 2.0) -> Collection[Orphan]:
    """End orphans and what they started. Return those that are still alive.

    Only processes that are still the same ones are signalled.
    """
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

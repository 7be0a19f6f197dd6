"""Watch the processes of ranks: their ends, their leftover children, and a missing probe.

The kernel's log and the cgroup's counter show whether the out-of-memory killer ended a process. The
``sitecustomize`` of a folder on PYTHONPATH loads the probe. It is not loaded with ``-S``, which
skips sitecustomize, with ``-I`` and ``-E``, which ignore that variable, if a wrapper starts the
ranks without the variable (``env -i``, ``sudo``), or before Python 3.10.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpdoctor.run.names import namespace
from ddpdoctor.run.records.supervisor import RankExitRecord, UnwatchedRecord
from ddpdoctor.system import proc

if TYPE_CHECKING:
    import psutil

    from ddpdoctor.run.snapshot import Run


# -- the out-of-memory killer

_KILLED = re.compile(r"Killed process (\d+)")


def _cgroup_counters() -> dict[str, int]:
    """Return the number of OOM kills in each memory cgroup of this process."""
    counters: dict[str, int] = {}
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return counters
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        relative = path.lstrip("/")
        roots: tuple[str, ...]
        if controllers == "":
            roots, name = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), "memory.events"
        elif "memory" in controllers.split(","):
            roots, name = ("/sys/fs/cgroup/memory",), "memory.oom_control"
        else:
            continue
        # In a container the path may be the host's. The mount is then the container's own root.
        for root in roots:
            for folder in (Path(root) / relative, Path(root)):
                with contextlib.suppress(OSError, ValueError):
                    for entry in (folder / name).read_text().splitlines():
                        key, _, value = entry.partition(" ")
                        if key == "oom_kill":
                            counters[str(folder / name)] = int(value)
    return counters


class OomWatch:
    """Compare the counters at the start of the job with those after a kill."""

    def __init__(self) -> None:
        self._before = _cgroup_counters()
        self._log = -1
        try:
            self._log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)
        except OSError:
            self._log = -1
        self._killed: set[int] = set()

    def verdict(self, pid: int) -> str:
        """Return the evidence that the killer ended ``pid``: ``kernel``, ``cgroup``, or empty."""
        if self.in_log(pid):
            return "kernel"
        after = _cgroup_counters()
        if any(count > self._before.get(name, count) for name, count in after.items()):
            self._before = after
            return "cgroup"
        return ""

    def in_log(self, pid: int) -> str:
        """Return ``kernel`` if the kernel's log shows that the killer ended ``pid``."""
        while self._log >= 0:
            try:
                line = os.read(self._log, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                # Some lines were overwritten, but the next ones can be read.
                continue
            except OSError:
                break
            if not line:
                # In some containers it is /dev/null.
                break
            if match := _KILLED.search(line):
                self._killed.add(int(match[1]))
        return "kernel" if pid in self._killed else ""


# -- rank processes


LEFTOVER_PATIENCE = 4.0
"""Seconds for a dead rank's DataLoader workers to end by themselves.

torch's workers check every 5 seconds, except stuck ones, and all must be gone after 10.
"""

LEFTOVER_GRACE = 2.0  # Seconds between SIGTERM and SIGKILL for those that do not


@dataclass
class _Watched:
    rank: int
    restart: int
    pid: int
    descriptor: int
    leads_session: bool
    children: set[int] = field(default_factory=set)


class RankWatch:
    """Follow the rank processes of a run by their pidfds.

    A rank is torchrun's child, not ours. So its exit status is read from its zombie, between its
    end and torchrun's ``wait``. If that fails, the status remains unknown.
    """

    def __init__(self) -> None:
        self._oom = OomWatch()
        self._namespace = namespace()
        self._watched: dict[int, _Watched] = {}
        self._known: set[tuple[int, int]] = set()
        self._dead: dict[int, set[int]] = {}
        self._leftovers: dict[int, tuple[float, psutil.Process, bool]] = {}

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when a rank ends."""
        return list(self._watched)

    def follow(self, run: Run) -> Iterator[RankExitRecord]:
        """Watch the new ranks in ``run``. Yield records of those that have ended."""
        for rank in run.ranks:
            key = (rank.rank, rank.restart)
            if key in self._known or rank.status is None:
                continue
            place = rank.opened.namespace
            if place not in (None, self._namespace):
                # Pids of another machine or container mean nothing here.
                self._known.add(key)
                continue
            self._known.add(key)
            pid = rank.status.pid
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead[pid] = set()
                yield _exit_record(rank.rank, rank.restart, pid, None, self._oom.in_log(pid))
                continue
            except (AttributeError, OSError):
                continue
            self._watched[descriptor] = _Watched(
                rank=rank.rank,
                restart=rank.restart,
                pid=pid,
                descriptor=descriptor,
                leads_session=proc.session_of(pid) == pid,
            )

    def note_children(self) -> None:
        """Remember the children of ranks that share their session with others.

        Under torchrun a rank leads its own session, which its workers keep when it dies.
        """
        for watched in self._watched.values():
            if not watched.leads_session:
                watched.children |= proc.children(watched.pid)

    def ended(self, descriptor: int) -> RankExitRecord:
        """Return the record of a rank's end, as soon as its descriptor is readable."""
        watched = self._watched.pop(descriptor)
        status = proc.zombie_status(watched.pid)
        os.close(descriptor)
        if status != 0:
            # Background processes of a rank that succeeded may finish while others train.
            self._dead[watched.pid] = watched.children
        oom = ""
        if status == -signal.SIGKILL:
            oom = self._oom.verdict(watched.pid)
        elif status is None:
            oom = self._oom.in_log(watched.pid)
        return _exit_record(watched.rank, watched.restart, watched.pid, status, oom)

    def end_leftovers(self, keepers: Iterable[int]) -> None:
        """End processes of dead ranks that have not ended in time.

        The keepers or the supervisor adopt them. A rank's worker keeps the rank's session. A
        program that the job starts in the background on purpose has its own session.
        """
        if not self._dead:
            return
        import psutil

        now = time.monotonic()
        adopted = set().union(*(proc.children(pid) for pid in (os.getpid(), *keepers)))
        for pid in adopted - self._leftovers.keys():
            session = proc.session_of(pid)
            if session in self._dead or any(pid in known for known in self._dead.values()):
                with contextlib.suppress(psutil.Error):
                    self._leftovers[pid] = (now + LEFTOVER_PATIENCE, psutil.Process(pid), False)
        for pid, (due, process, asked) in list(self._leftovers.items()):
            try:
                if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                    del self._leftovers[pid]
                elif now >= due and asked:
                    process.kill()
                elif now >= due:
                    process.terminate()
                    self._leftovers[pid] = (now + LEFTOVER_GRACE, process, True)
            except psutil.Error:
                del self._leftovers[pid]


def _exit_record(rank: int, restart: int, pid: int, status: int | None, oom: str) -> RankExitRecord:
    """Return the record of a rank's end. ``status`` is None if unknown."""
    return RankExitRecord(
        time=time.time_ns(), rank=rank, restart=restart, pid=pid, status=status, oom=oom
    )


# -- ranks without the probe

_PYTHON = re.compile(r"python(\d+(\.\d+)*t?)?$")
_OLD = re.compile(r"python(2|2\.\d+|3\.\d)$")  # The program of a Python before 3.10
_BARE_OPTIONS = "SIE"  # Options with which Python does not load the probe
_WITH_VALUE = "WX"
_NO_PYTHON = ("--no-python", "--no_python")
_LAST_OPTIONS = "cm"  # Options that are followed by the program
_MAX_PROCESSES = 4096  # Maximum number of processes of a job to examine


def bare_option(words: Sequence[str], through_torchrun: bool = False) -> str:
    """Return the option, such as ``-S``, with which a command's Python does not load the probe.

    torchrun starts its ranks without such options, unless their program is not Python.
    """
    if through_torchrun:
        programs = [place for place, word in enumerate(words) if word in _NO_PYTHON]
        words = words[programs[0] + 1 :] if programs else ()
    for place, word in enumerate(words):
        if _PYTHON.match(os.path.basename(word)):
            # Words after the script are its arguments.
            return _option(words[place + 1 :])
    return ""


def _option(words: Sequence[str]) -> str:
    """Return the first such option among the arguments of ``python``."""
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        if not word.startswith("-") or word == "-":
            return ""
        for place, letter in enumerate(word[1:], 1):
            if letter in _BARE_OPTIONS:
                return f"-{letter}"
            if letter in _LAST_OPTIONS:
                return ""
            if letter in _WITH_VALUE:
                if place + 1 == len(word):
                    next(rest, None)
                break
    return ""


def why_unwatched(option: str) -> str:
    """Return the reason why no rank can be watched."""
    return f"`python {option}` does not load ddpdoctor's probe"


class Unwatched:
    """Find ranks that run without the probe, as long as no rank has loaded it.

    ``entry`` is the folder on PYTHONPATH that loads it.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._reported = False

    def find(self, root: int) -> Iterator[UnwatchedRecord]:
        """Examine the processes below ``root``. Yield at most one record in a run."""
        why = "" if self._reported else next(filter(None, map(self._reason, _ranks(root))), "")
        if why:
            self._reported = True
            yield UnwatchedRecord(time=time.time_ns(), why=why)

    def _reason(self, pid: int) -> str:
        if option := bare_option(proc.words(pid)):
            return why_unwatched(option)
        program = ""
        with contextlib.suppress(OSError):
            program = os.readlink(f"/proc/{pid}/exe")
        if old := _OLD.search(program):
            return f"Python {old[1]} is too old for ddpdoctor's probe, which needs 3.10"
        paths = proc.environ(pid).get("PYTHONPATH", "").split(os.pathsep)
        if self._entry in paths:
            return ""
        return "PYTHONPATH, through which ddpdoctor's probe is loaded, was changed for the ranks"


def _ranks(root: int) -> Iterator[int]:
    """Yield the Python processes below ``root`` that were started as ranks, not their children."""
    waiting, seen = [(root, "")], 0
    while waiting and seen < _MAX_PROCESSES:
        pid, above = waiting.pop()
        seen += 1
        rank = proc.environ(pid).get("RANK", "")
        python = _PYTHON.match(os.path.basename(next(iter(proc.words(pid)), "")))
        if python and rank and rank != above:
            yield pid
        inside = rank if python and rank else above
        waiting += [(child, inside) for child in proc.children(pid)]

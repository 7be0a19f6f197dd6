"""Watch the processes of ranks: when each ended and how, what it left behind, which have no probe.

Whether the out-of-memory killer ended one, the kernel's log and the cgroup's counter know. The
probe comes by the ``sitecustomize`` of a folder on PYTHONPATH. ``-S`` imports none; ``-I`` and
``-E`` do not read that variable; a wrapper may start the ranks without it (``env -i``, ``sudo``);
and it needs Python 3.10.
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


# -- was it the out-of-memory killer? The kernel's log and the cgroup's counter know


_KILLED = re.compile(r"Killed process (\d+)")


def _cgroup_counters() -> dict[str, int]:
    """How many processes the OOM killer ended in each memory cgroup of this process."""
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
        # In a container the path may be the host's; the container's own root is then the mount.
        for root in roots:
            for folder in (Path(root) / relative, Path(root)):
                count = _count(folder / name)
                if count is not None:
                    counters[str(folder / name)] = count
    return counters


def _count(path: Path) -> int | None:
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    except (OSError, ValueError):
        return None
    return None


class OomWatch:
    """Remembers the counters at the start of the job and compares when a process was killed."""

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
        """Who says that the killer ended ``pid``: ``kernel``, ``cgroup``, or neither (empty)."""
        if self.kernel_says(pid):
            return "kernel"
        after = _cgroup_counters()
        if any(count > self._before.get(name, count) for name, count in after.items()):
            self._before = after
            return "cgroup"
        return ""

    def kernel_says(self, pid: int) -> str:
        """``kernel`` if its log says that the killer ended ``pid``, else empty."""
        self._read_log()
        return "kernel" if pid in self._killed else ""

    def _read_log(self) -> None:
        while self._log >= 0:
            try:
                line = os.read(self._log, 8192).decode("utf-8", "replace")
            except BrokenPipeError:
                # Some lines were overwritten before we came; the next ones are there.
                continue
            except OSError:
                return
            if not line:
                # In some containers it is /dev/null.
                return
            match = _KILLED.search(line)
            if match:
                self._killed.add(int(match[1]))


# -- watches rank processes: when each ended, how, and what it left behind


LEFTOVER_PATIENCE = 4.0
"""Seconds that a dead rank's DataLoader worker has to notice by itself.

torch's workers look every 5 seconds, one that is stuck never does, and all must be gone in 10.
"""

LEFTOVER_GRACE = 2.0
"""Seconds between SIGTERM and SIGKILL for one that did not."""


@dataclass
class _Watched:
    rank: int
    restart: int
    pid: int
    descriptor: int
    leads_session: bool
    children: set[int] = field(default_factory=set)


class RankWatch:
    """Knows the rank processes of a run by their pidfds.

    A rank is torchrun's child, not ours, so its exit status is read from its zombie, in the moment
    between its end and torchrun's ``wait``. Where that moment is missed the status stays unknown.
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
        """Start watching the ranks that are new in ``run``; the records of those already gone."""
        for rank in run.ranks:
            key = (rank.rank, rank.restart)
            if key in self._known or rank.status is None:
                continue
            place = rank.opened.namespace
            if place not in (None, self._namespace):
                # On another machine or in another container: its pids are not ours.
                self._known.add(key)
                continue
            self._known.add(key)
            pid = rank.status.pid
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._dead[pid] = set()
                yield _exit_record(rank.rank, rank.restart, pid, None, self._oom.kernel_says(pid))
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
        """A rank's end, as a record; call it as soon as its descriptor is readable."""
        watched = self._watched.pop(descriptor)
        status = proc.zombie_status(watched.pid)
        os.close(descriptor)
        if status != 0:
            # What a rank that ended well has put in the background may finish while others train.
            self._dead[watched.pid] = watched.children
        oom = ""
        if status == -signal.SIGKILL:
            oom = self._oom.verdict(watched.pid)
        elif status is None:
            oom = self._oom.kernel_says(watched.pid)
        return _exit_record(watched.rank, watched.restart, watched.pid, status, oom)

    def end_leftovers(self, keepers: Iterable[int]) -> None:
        """End the processes of dead ranks that had their time.

        The keepers adopt them, or the supervisor. A rank's worker keeps the rank's session; a
        program that the job put in the background on purpose has its own.
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
    """How a rank's process ended; ``status`` is None where it was not seen."""
    return RankExitRecord(
        time=time.time_ns(), rank=rank, restart=restart, pid=pid, status=status, oom=oom
    )


# -- interpreters that the probe cannot enter: by their options, environment or age


_PYTHON = re.compile(r"python(\d+(\.\d+)*t?)?$")
_OLD = re.compile(r"python(2|2\.\d+|3\.\d)$")
"""The program of a Python before 3.10."""
_BARE = "SIE"
"""Options of Python that keep the probe out."""
_WITH_VALUE = "WX"
_NO_PYTHON = ("--no-python", "--no_python")
_LAST = "cm"
"""What follows these is the program."""
_MOST = 4096
"""Processes of a job that are looked at."""


def bare_option(words: Sequence[str], through_torchrun: bool = False) -> str:
    """The option of a command's ``python`` that keeps the probe out, ``-S``; empty if none.

    torchrun starts its ranks without such options, unless it starts a program that is no script.
    """
    if through_torchrun:
        programs = [place for place, word in enumerate(words) if word in _NO_PYTHON]
        words = words[programs[0] + 1 :] if programs else ()
    for place, word in enumerate(words):
        if _PYTHON.match(os.path.basename(word)):
            # Words behind its script are the script's.
            return _option(words[place + 1 :])
    return ""


def _option(words: Sequence[str]) -> str:
    """The first such option among those of one ``python``."""
    rest = iter(words)
    for word in rest:
        if word.startswith("--"):
            if word == "--check-hash-based-pycs":
                next(rest, None)
            continue
        if not word.startswith("-") or word == "-":
            return ""
        for place, letter in enumerate(word[1:], 1):
            if letter in _BARE:
                return f"-{letter}"
            if letter in _LAST:
                return ""
            if letter in _WITH_VALUE:
                if place + 1 == len(word):
                    next(rest, None)
                break
    return ""


def why_unwatched(option: str) -> str:
    """Why no rank can be watched, for a sentence."""
    return f"`python {option}` does not load ddpdoctor's probe"


class Unwatched:
    """Looks for ranks that run without the probe, as long as no rank has come with it.

    Args:
        entry: The folder on PYTHONPATH by which the probe comes.
    """

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self._reported = False

    def look(self, root: int) -> Iterator[UnwatchedRecord]:
        """What is new of the processes below ``root``: at most one record in a run."""
        why = "" if self._reported else next(filter(None, map(self._reason, _ranks(root))), "")
        if why:
            self._reported = True
            yield UnwatchedRecord(time=time.time_ns(), why=why)

    def _reason(self, pid: int) -> str:
        option = bare_option(proc.words(pid))
        if option:
            return why_unwatched(option)
        old = _OLD.search(_program(pid))
        if old:
            return f"Python {old[1]} is too old for ddpdoctor's probe, which needs 3.10"
        paths = proc.environ(pid).get("PYTHONPATH", "").split(os.pathsep)
        if self._entry in paths:
            return ""
        return "PYTHONPATH, through which ddpdoctor's probe is loaded, was changed for the ranks"


def _program(pid: int) -> str:
    """Return the file that a process runs, or nothing if it has ended."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""


def _ranks(root: int) -> Iterator[int]:
    """Interpreters below a process that were started as ranks; not what these start in turn."""
    waiting, seen = [(root, "")], 0
    while waiting and seen < _MOST:
        pid, above = waiting.pop()
        seen += 1
        rank = proc.environ(pid).get("RANK", "")
        python = _PYTHON.match(os.path.basename(next(iter(proc.words(pid)), "")))
        if python and rank and rank != above:
            yield pid
        inside = rank if python and rank else above
        waiting += [(child, inside) for child in proc.children(pid)]

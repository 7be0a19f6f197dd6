"""Was it the out-of-memory killer? The kernel's log and the cgroup's counter know."""

from __future__ import annotations

import os
import re
from pathlib import Path

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

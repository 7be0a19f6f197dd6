"""Why a process of this machine gives no sign of life."""

from __future__ import annotations

import time

import psutil

from ddpdoctor.system.process_state import Turn, lacked, read_turn

GLANCE = 0.05
"""Seconds over which a process that gives no heartbeat is watched when that is seen first."""

_EVERY = 2.0
"""Seconds after which that is measured again."""

STOPPED = "its process is stopped (SIGSTOP)"
_WORDS = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: "its process is traced",
    psutil.STATUS_DISK_SLEEP: "its process waits for a disk",
}


class Silence:
    """Looks at processes, and remembers what they had had of the cores."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[float, Turn | None]] = {}
        """What the main threads had had of the cores at a moment, by pid."""

    def why(self, pid: int) -> tuple[str, str]:
        """The state of a rank whose process it is, and the words to it."""
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return "dead", "its process is gone"
        except (psutil.Error, OSError, ValueError, OverflowError):
            return "stale", ""
        if status == psutil.STATUS_ZOMBIE:
            return "dead", "its process has ended"
        if status == psutil.STATUS_RUNNING and self.lacks_core(pid):
            # It works, as far as it can; so does the thread that beats.
            return "running", "gets little CPU"
        return "stale", _WORDS.get(status, "")

    def lacks_core(self, pid: int) -> bool:
        """Whether a main thread that is ready to run has had no core for most of the time."""
        now, turn = time.monotonic(), read_turn(pid, pid)
        if pid not in self._turns:
            self._turns[pid] = (now, turn)
            time.sleep(GLANCE)
            now, turn = time.monotonic(), read_turn(pid, pid)
        when, before = self._turns[pid]
        if now - when >= _EVERY:
            self._turns[pid] = (now, turn)
        if before is None or turn is None:
            return False
        return lacked(before, turn, now - when) > (now - when) / 2

"""End the processes of a job whose supervisor and keepers were killed.

Run as a script, without the probe:

    python -I -S rescue.py RUN_ID PID

It ends those with the run's id in their environment, and the descendants of the rank ``PID`` that
called it. It works only on Linux, as it needs ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

GRACE = 3.0  # seconds between SIGTERM and SIGKILL


def _marked(run_id: str, rank: int) -> list[int]:
    """Return the pids to end."""
    wanted = b"DDPDOCTOR_RUN_ID=" + os.fsencode(run_id)
    parents: dict[int, int] = {}
    marked: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if fields[0] in b"ZX":
                continue
            parents[int(name)] = int(fields[1])
            with open(f"/proc/{name}/environ", "rb") as file:
                entries = file.read().split(b"\0")
        except (OSError, IndexError, ValueError):
            continue
        if any(entry == wanted or entry.startswith(wanted + b"/") for entry in entries):
            marked.add(int(name))
    for pid in parents:
        above, seen = pid, set()
        while above in parents and above not in seen:
            seen.add(above)
            above = parents[above]
            if above == rank:
                marked.add(pid)
    return sorted(marked - {os.getpid()})


def main(run_id: str, rank: int) -> None:
    """Send SIGTERM to all, and SIGKILL to those that are left after a grace period."""
    known = set(_marked(run_id, rank))
    for number, wait in ((signal.SIGTERM, GRACE), (signal.SIGKILL, 1.0)):
        for pid in known:
            with contextlib.suppress(OSError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            alive = {pid for pid in known if os.path.exists(f"/proc/{pid}/environ")}
            known = set(_marked(run_id, rank)) | alive
            if not known:
                return
            time.sleep(0.1)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""End the processes of a job whose supervisor and guards were killed; run as a script, bare.

    python -I -S rescue.py RUN_ID PID

They are those whose environment carries the run's mark, and the descendants of the rank ``PID``
that called. Linux only: elsewhere there is no ``/proc`` to find them in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""


def _marked(run_id: str, rank: int) -> list[int]:
    """The pids to end."""
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
    """SIGTERM to all, a grace period, SIGKILL to the rest."""
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

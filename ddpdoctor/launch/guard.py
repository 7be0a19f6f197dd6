"""A process that outlives the supervisor for one purpose: to end its job.

The supervisor holds the writing end of a pipe that is this process's standard input, and writes the
pid of the job's command into it. ``q`` means that the run is over; the end of the file without it
means that the supervisor was killed. Started as ``python -m ddpdoctor.launch.guard RUN_ID``, in a
session of its own. It is two processes, the second its child: whoever kills the supervisor and the
guard still meets the second.
"""

from __future__ import annotations

import os
import signal
import sys


def main(run_id: str) -> int:
    """Wait for the supervisor's word, or its death."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    words, over = os.pipe()
    if os.fork() == 0:
        # The second guard reads what the first passes on; the first's death alone says nothing.
        os.close(over)
        os.setsid()
        return _second(words, run_id)
    os.close(words)
    heard = b""
    while b"q" not in heard:
        chunk = os.read(0, 64)
        if not chunk:
            _end(run_id, heard)
            break
        heard += chunk
        os.write(over, chunk)
    return 0


def _second(words: int, run_id: str) -> int:
    supervisor = int(os.environ["DDPDOCTOR_GUARDED"])
    heard = b""
    while b"q" not in heard:
        chunk = os.read(words, 64)
        if not chunk:
            break
        heard += chunk
    if b"q" in heard or _lives(supervisor):
        # Over; or the first guard alone was killed, and the supervisor starts a new pair.
        return 0
    _end(run_id, heard)
    return 0


def _lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in b"ZX"
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _end(run_id: str, heard: bytes) -> None:
    # Imported only now: while the supervisor lives this process is a bare interpreter.
    from ddpdoctor.launch.processes import Job, end

    pid = heard.partition(b"\n")[0]
    job = Job(run_id, session=int(pid) if pid.isdigit() else None)
    end(job, soft=4.0)
    # Whoever was started by a process that we were just ending.
    end(job, soft=0.0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))

"""End this process when the supervisor and its keepers are gone.

The supervisor and two keepers (`ddpdoctor.supervise.keeper`) each end the job if the others are
gone. This thread of a rank does so if all three were killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time

from ddpdoctor.probe.runtime.shield import background
from ddpdoctor.run.names import KEEPERS, MARK, namespace

GRACE = 4.0  # seconds between SIGTERM and SIGKILL
POLL = 1.0  # seconds between two checks without a pidfd (before Linux 5.3, macOS)


def is_command() -> bool:
    """Return whether this process is the job's command itself."""
    return str(os.getppid()) in os.environ.get(KEEPERS, "").split(",")


def start() -> None:
    """Watch the supervisor from another thread, if it is on this machine."""
    place = os.environ.get("DDPDOCTOR_SUPERVISOR", "").partition("@")[2]
    pids = os.environ.get(KEEPERS, "").split(",")
    if place != namespace() or not all(pid.isdigit() for pid in pids):
        return
    background("watch", _watch, [int(pid) for pid in pids]).start()


def _watch(keepers: list[int]) -> None:
    try:
        for pid in keepers:
            _wait_for(pid)
    except OSError:
        return
    import subprocess

    # Another process, since SIGTERM may end this one before its children.
    rescue = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rescue.py")
    environment = {key: value for key, value in os.environ.items() if key != MARK}
    words = [sys.executable, "-I", "-S", rescue, os.environ[MARK], str(os.getpid())]
    with contextlib.suppress(OSError):
        subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for(pid: int) -> None:
    """Wait until process ``pid`` has ended.

    Raises:
        OSError: It cannot be watched.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):
        descriptor = -1
    if descriptor >= 0:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
        os.close(descriptor)
        return
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL)

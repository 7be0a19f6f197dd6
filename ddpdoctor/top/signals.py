"""Sending a signal to a run, after proving that the process is the run's own.

A pid in a file may be given away to another process by now. So it has to be of this machine and
this user, older than the record that names it, and marked as the run's; and it is looked at again
when the person has decided.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.run import rundir
from ddpdoctor.run.environment import MARK
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.reader import read_manifest
from ddpdoctor.run.status import read_status
from ddpdoctor.top.snapshot import RankRow, Snapshot

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

_TO_ALL = {
    signal.SIGINT: "like Ctrl-C, all ranks end",
    signal.SIGTERM: "asks all ranks to end",
    signal.SIGKILL: "all ranks end at once, unsaved",
}
_TO_ONE = "the others may hang"

_TOLERANCE = 2.0
"""Seconds by which a process's start, counted from the boot, may differ from the clock's."""


@dataclass(frozen=True)
class Target:
    """A process that was proven to be the run's."""

    process: psutil.Process
    words: str


@dataclass(frozen=True)
class Choice:
    """A line of the question; without a target it does nothing."""

    words: str
    target: Target | None = None
    number: int = 0


def choices(snapshot: Snapshot, row: RankRow | None) -> tuple[Choice, ...]:
    """What can be sent to whom; to do nothing comes first.

    Args:
        snapshot: The run.
        row: The selected rank, if a person selected one.

    Raises:
        DoctorError: There is nothing to signal, or it is not to be proven that it is the run's.
    """
    if not snapshot.live or not snapshot.path:
        raise DoctorError("no run is live here: there is nothing to signal")
    path = Path(snapshot.path)
    launcher = _launcher(path)
    found = [Choice("Cancel"), *_for(launcher, _TO_ALL)]
    if row is not None and row.pid is not None:
        rank = _rank(path, row, launcher.process.pid)
        words = _TO_ONE if len(snapshot.ranks) > 1 else "the job has no other rank"
        found += _for(rank, dict.fromkeys(SIGNALS, words))
    return tuple(found)


def _for(target: Target, words: Mapping[signal.Signals, str]) -> list[Choice]:
    return [
        Choice(f"{number.name} to {target.words}: {words[number]}", target, number)
        for number in SIGNALS
    ]


def _launcher(path: Path) -> Target:
    manifest = read_manifest(path, own=True)
    host, here = manifest.get("host"), socket.gethostname()
    if host != here:
        raise DoctorError(f"the run is on {host}, this is {here}: signal it there")
    if not rundir.is_live(path):
        raise DoctorError("the run has ended: there is nothing to signal")
    pid = integer(manifest, "supervisor", -1)
    process = _proven(pid, integer(manifest, "started") / 1e9)
    command: list[str] = []
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
    if not any("ddpdoctor" in word for word in command):
        raise DoctorError(f"process {pid} is not the launcher of this run: not signalled")
    return Target(process, f"the launcher (pid {pid})")


def _rank(path: Path, row: RankRow, launcher: int) -> Target:
    try:
        status = read_status(str(path / f"{rank_stem(row.rank, row.restart)}.status"))
    except (OSError, UnreadableError) as error:
        raise DoctorError(f"the process of rank {row.rank} is not known: {error}") from None
    process = _proven(status.pid, status.started / 1e9)
    environment: dict[str, str] = {}
    with contextlib.suppress(psutil.Error):
        environment = process.environ()
    supervisor = environment.get("DDPDOCTOR_SUPERVISOR", "").partition("@")[0]
    if status.pid != row.pid or MARK not in environment or supervisor != str(launcher):
        raise DoctorError(f"process {row.pid} is not rank {row.rank} of this run: not signalled")
    return Target(process, f"rank {row.rank} alone (pid {row.pid})")


def _proven(pid: int, recorded: float) -> psutil.Process:
    """The process with that pid, if it is this user's and began before the record was written."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            raise DoctorError(f"process {pid} belongs to another user: not signalled")
        if process.create_time() > recorded + _TOLERANCE:
            raise DoctorError(f"pid {pid} was given to another process: not signalled")
    except (psutil.Error, ValueError):
        raise DoctorError(f"there is no process {pid} any more") from None
    return process


def send(choice: Choice) -> str:
    """Send what a person chose; what was done, in words.

    Raises:
        DoctorError: The process is gone, or is another one by now.
    """
    if choice.target is None:
        return "nothing was sent"
    name = signal.Signals(choice.number).name
    try:
        # psutil compares the start time once more: a pid that was given away is not signalled.
        choice.target.process.send_signal(choice.number)
    except (psutil.Error, OSError):
        raise DoctorError(f"{name} was not sent: the process has ended") from None
    return f"{name} was sent to {choice.target.words}"

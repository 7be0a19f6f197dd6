"""Run actions on a run: take stacks, list processes, attach, send a signal.

They read files or ask processes, so the drawing thread does not call them. The pid in a file may
now belong to another process. So before a signal is sent, the process must be on this machine,
belong to this user, be older than the record that names it, and be marked as the run's. This is
checked again after the user has decided.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.debug import attach_points, vscode_configurations, vscode_files
from ddpdoctor.nodes.asking import capture_everywhere
from ddpdoctor.run import rundir
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.names import MARK, rank_stem
from ddpdoctor.run.reader import glance, read_manifest
from ddpdoctor.run.records.supervisor import RankStacks
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import read_status
from ddpdoctor.stacks import frames
from ddpdoctor.stacks.frames import Code, code_of_stacks
from ddpdoctor.top.snapshot import RankRow, Snapshot


@dataclass(frozen=True, eq=False)
class TakenStacks:
    """Stacks taken at one time, or the reason why there are none."""

    stacks: tuple[RankStacks, ...] = ()
    code: Code | None = None
    time: float = 0.0  # Unix seconds
    live: bool = True
    trouble: str = ""


def take_stacks(
    snapshot: Snapshot, replayed: bool, ranks: Collection[int] | None = None
) -> TakenStacks:
    """Take the stacks of the run that a snapshot shows, and wait for its ranks to respond."""
    if snapshot.kind != "run" or not snapshot.path:
        made_up = snapshot.kind == "demo"
        return TakenStacks(trouble="a made-up job has no stacks" if made_up else "no run is shown")
    path = Path(snapshot.path)

    def taken(stacks: tuple[RankStacks, ...], when: int, *, live: bool) -> TakenStacks:
        code = code_of_stacks(stacks, integer(read_manifest(path), "started"))
        return TakenStacks(stacks, code, when / 1e9, live)

    try:
        if replayed or not snapshot.live:
            kept = None if rundir.is_live(path) else frames.load_stacks(path)
            if kept is None:
                return TakenStacks(trouble="a replay has no stacks: none were taken during the run")
            stacks = tuple(each for each in kept.stacks if ranks is None or each.rank in ranks)
            return taken(stacks, kept.time, live=False)
        stacks = capture_everywhere(glance(path), ranks)
        now = time.time_ns()
        if ranks is None:
            with contextlib.suppress(OSError):
                frames.save_stacks(path, stacks, now)
        return taken(stacks, now, live=True)
    except (OSError, DoctorError) as error:
        return TakenStacks(trouble=f"no stacks can be taken: {error}")


def processes_below(row: RankRow) -> tuple[str, ...]:
    """List the processes below a rank, such as DataLoader workers, one per line."""
    if row.pid is None:
        return ()
    if row.node not in ("", socket.gethostname()):
        return (f"its processes are on {row.node}",)
    lines = []
    try:
        for process in psutil.Process(row.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline()) or process.name()
                lines.append(f"{process.pid} {process.status()}: {words}")
    except (psutil.Error, ValueError):
        return ("the process is gone",)
    return tuple(lines) or ("no processes",)


def attach_lines(snapshot: Snapshot) -> tuple[str, ...]:
    """Describe how to attach a debugger to the ranks, as ``ddpdoctor attach`` does.

    Raises:
        DoctorError: There is nothing to attach to.
    """
    run = _debugged(snapshot)
    points = attach_points.points(run)
    entry = vscode_configurations.root_name(attach_points.label(run))
    return (
        f'VS Code: F5 "{entry}"; w writes .vscode/launch.json',
        f"Neovim: ddpdoctor attach --rank N; elsewhere: {attach_points.tunnel(run)}",
        *(f"rank {each.rank}: port {each.port}, {each.trouble or each.state}" for each in points),
        *(() if points else ("no rank has started yet",)),
    )


def write_launch_json(snapshot: Snapshot) -> str:
    """Write the ranks into launch.json, as ``ddpdoctor attach --write`` does.

    Return a description.

    Raises:
        DoctorError: There is nothing to attach to, or the file cannot be edited.
    """
    run = _debugged(snapshot)
    own = attach_points.workspace(run)
    workspace = own or vscode_files.find_workspace(vscode_files.current_directory(), None)
    changed = attach_points.write([run], workspace)
    path = workspace / vscode_files.FOLDER / vscode_configurations.LAUNCH_FILE
    done = f"{'wrote' if changed else 'unchanged:'} {path}"
    return "; ".join((done, *attach_points.left_out(run)))


def _debugged(snapshot: Snapshot) -> Run:
    if not snapshot.live or not snapshot.path:
        raise DoctorError("no run is live here: there is nothing to attach to")
    run = attach_points.live_run(Path(snapshot.path))
    if not attach_points.is_debugged(run):
        raise DoctorError(f"{run.path.name} was started with --no-debug")
    return run


# -- signals

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)

_TO_ALL = {
    signal.SIGINT: "like Ctrl-C, all ranks end",
    signal.SIGTERM: "asks all ranks to end",
    signal.SIGKILL: "all ranks end at once, unsaved",
}
_TO_ONE = "the others may hang"

_TOLERANCE = 2.0
"""Maximum difference between a process's start, counted from the boot, and the clock, in
seconds."""


@dataclass(frozen=True)
class SignalTarget:
    """A process that certainly belongs to the run."""

    process: psutil.Process
    words: str


@dataclass(frozen=True)
class SignalChoice:
    """A line of the question. Without a target it does nothing."""

    words: str
    target: SignalTarget | None = None
    number: int = 0


def signal_choices(snapshot: Snapshot, row: RankRow | None) -> tuple[SignalChoice, ...]:
    """Return the signals and their processes. The first choice sends no signal.

    Raises:
        DoctorError: There is no process to signal, or it may not be the run's.
    """
    if not snapshot.live or not snapshot.path:
        raise DoctorError("no run is live here: there is nothing to signal")
    path = Path(snapshot.path)
    launcher = _launcher_target(path)
    found = [SignalChoice("Cancel"), *_choices_for(launcher, _TO_ALL)]
    if row is not None and row.pid is not None:
        rank = _rank_target(path, row, launcher.process.pid)
        words = _TO_ONE if len(snapshot.ranks) > 1 else "the job has no other rank"
        found += _choices_for(rank, dict.fromkeys(SIGNALS, words))
    return tuple(found)


def _choices_for(target: SignalTarget, words: Mapping[signal.Signals, str]) -> list[SignalChoice]:
    return [
        SignalChoice(f"{number.name} to {target.words}: {words[number]}", target, number)
        for number in SIGNALS
    ]


def _launcher_target(path: Path) -> SignalTarget:
    manifest = read_manifest(path, own=True)
    host, here = manifest.get("host"), socket.gethostname()
    if host != here:
        raise DoctorError(f"the run is on {host}, this is {here}: signal it there")
    if not rundir.is_live(path):
        raise DoctorError("the run has ended: there is nothing to signal")
    pid = integer(manifest, "supervisor", -1)
    process = _proven_process(pid, integer(manifest, "started") / 1e9)
    command: list[str] = []
    with contextlib.suppress(psutil.Error):
        command = process.cmdline()
    if not any("ddpdoctor" in word for word in command):
        raise DoctorError(f"process {pid} is not the launcher of this run: not signalled")
    return SignalTarget(process, f"the launcher (pid {pid})")


def _rank_target(path: Path, row: RankRow, launcher: int) -> SignalTarget:
    try:
        status = read_status(str(path / f"{rank_stem(row.rank, row.restart)}.status"))
    except (OSError, UnreadableError) as error:
        raise DoctorError(f"the process of rank {row.rank} is not known: {error}") from None
    process = _proven_process(status.pid, status.started / 1e9)
    environment: dict[str, str] = {}
    with contextlib.suppress(psutil.Error):
        environment = process.environ()
    supervisor = environment.get("DDPDOCTOR_SUPERVISOR", "").partition("@")[0]
    if status.pid != row.pid or MARK not in environment or supervisor != str(launcher):
        raise DoctorError(f"process {row.pid} is not rank {row.rank} of this run: not signalled")
    return SignalTarget(process, f"rank {row.rank} alone (pid {row.pid})")


def _proven_process(pid: int, recorded: float) -> psutil.Process:
    """Return the process with a pid, if it is this user's and older than its record."""
    try:
        process = psutil.Process(pid)
        if process.uids().real != os.getuid():
            raise DoctorError(f"process {pid} belongs to another user: not signalled")
        if process.create_time() > recorded + _TOLERANCE:
            raise DoctorError(f"pid {pid} was given to another process: not signalled")
    except (psutil.Error, ValueError):
        raise DoctorError(f"there is no process {pid} any more") from None
    return process


def send_signal(choice: SignalChoice) -> str:
    """Send the chosen signal. Return a description.

    Raises:
        DoctorError: The process is gone, or its pid now belongs to another one.
    """
    if choice.target is None:
        return "nothing was sent"
    name = signal.Signals(choice.number).name
    try:
        # psutil compares the start time once more, so a reused pid is not signalled.
        choice.target.process.send_signal(choice.number)
    except (psutil.Error, OSError):
        raise DoctorError(f"{name} was not sent: the process has ended") from None
    return f"{name} was sent to {choice.target.words}"

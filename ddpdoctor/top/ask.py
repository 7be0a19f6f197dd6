"""What a key asks for beyond the snapshot: stacks, processes below a rank, how to attach.

All of it looks at files or processes, so none of it is called in the thread that draws.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import psutil

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import integer
from ddpdoctor.debug import attach_points
from ddpdoctor.debug.vscode import files, launch_json
from ddpdoctor.run import rundir
from ddpdoctor.run.reader import glance, read_manifest
from ddpdoctor.run.snapshot import Run
from ddpdoctor.stacks import saved
from ddpdoctor.stacks.capture import capture
from ddpdoctor.stacks.code import Code, code_of
from ddpdoctor.stacks.model import RankStacks
from ddpdoctor.top.snapshot import RankRow, Snapshot


@dataclass(frozen=True, eq=False)
class Taken:
    """Stacks of one moment, or why there are none."""

    stacks: tuple[RankStacks, ...] = ()
    code: Code | None = None
    time: float = 0.0
    """Unix seconds."""
    live: bool = True
    trouble: str = ""


def take(snapshot: Snapshot, replayed: bool, ranks: Collection[int] | None = None) -> Taken:
    """The stacks of the run that a snapshot shows, as it is now; waits for ranks to answer.

    Args:
        snapshot: What is on the screen.
        replayed: Whether it is played back, from a recording or a run that is over.
        ranks: Only these.
    """
    if snapshot.kind != "run" or not snapshot.path:
        made_up = snapshot.kind == "demo"
        return Taken(trouble="a made-up job has no stacks" if made_up else "no run is shown")
    path = Path(snapshot.path)
    try:
        if replayed or not snapshot.live:
            return _kept(path, ranks)
        stacks = capture(glance(path), ranks)
        now = time.time_ns()
        if ranks is None:
            with contextlib.suppress(OSError):
                saved.save(path, stacks, now)
        return Taken(stacks, _code(path, stacks), now / 1e9)
    except (OSError, DoctorError) as error:
        return Taken(trouble=f"no stacks can be taken: {error}")


def _kept(path: Path, ranks: Collection[int] | None) -> Taken:
    kept = None if rundir.is_live(path) else saved.load(path)
    if kept is None:
        return Taken(trouble="what is played back has no stacks: none were taken while it ran")
    stacks = tuple(each for each in kept.stacks if ranks is None or each.rank in ranks)
    return Taken(stacks, _code(path, stacks), kept.time / 1e9, live=False)


def _code(path: Path, stacks: Collection[RankStacks]) -> Code:
    frames = [frame for each in stacks for thread in each.threads for frame in thread.frames]
    return code_of(frames, integer(read_manifest(path), "started"))


def processes_below(row: RankRow) -> tuple[str, ...]:
    """The processes below a rank, such as DataLoader workers, in a line each."""
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
    """How to attach a debugger to the ranks, as ``ddpdoctor attach`` says it.

    Raises:
        DoctorError: There is nothing to attach to.
    """
    run = _debugged(snapshot)
    points = attach_points.points(run)
    compound = launch_json.compound_name(attach_points.label(run))
    return (
        f'VS Code: F5 "{compound}"; w writes .vscode/launch.json',
        f"Neovim: ddpdoctor attach --rank N; elsewhere: {attach_points.tunnel(run)}",
        *(f"rank {each.rank}: port {each.port}, {each.trouble or each.state}" for each in points),
        *(() if points else ("no rank has started yet",)),
    )


def write_launch_json(snapshot: Snapshot) -> str:
    """Put the ranks into launch.json, as ``ddpdoctor attach --write`` does; what was done.

    Raises:
        DoctorError: There is nothing to attach to, or the file cannot be edited.
    """
    run = _debugged(snapshot)
    own = attach_points.workspace(run)
    workspace = own or files.find_workspace(files.current_directory(), None)
    changed = attach_points.write([run], workspace)
    path = workspace / files.FOLDER / launch_json.FILE
    done = f"{'wrote' if changed else 'unchanged:'} {path}"
    return "; ".join((done, *attach_points.left_out(run)))


def _debugged(snapshot: Snapshot) -> Run:
    if not snapshot.live or not snapshot.path:
        raise DoctorError("no run is live here: there is nothing to attach to")
    run = attach_points.live_run(Path(snapshot.path))
    if not attach_points.is_debugged(run):
        raise DoctorError(f"{run.path.name} was started with --no-debug")
    return run

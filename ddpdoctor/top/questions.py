"""What a key asks beyond the snapshot: processes below a rank, how to attach, which runs there are.

All of it looks at files or processes, so it is called in the reader's thread.
"""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run.snapshot import Run, RunReader
from ddpdoctor.top.snapshot import RankRow, Snapshot


def below(row: RankRow) -> tuple[str, ...]:
    """The processes below a rank, such as DataLoader workers, in a line each."""
    if row.pid is None:
        return ()
    if row.node not in ("", socket.gethostname()):
        return (f"its processes are on {row.node}",)
    lines = []
    try:
        for process in psutil.Process(row.pid).children(recursive=True):
            try:
                words = " ".join(process.cmdline()) or process.name()
                lines.append(f"{process.pid} {process.status()}: {words}")
            except psutil.Error:
                continue
    except (psutil.Error, ValueError):
        return ("the process is gone",)
    return tuple(lines) or ("no processes",)


def attach_lines(snapshot: Snapshot) -> tuple[str, ...]:
    """How to attach a debugger to the ranks, as ``ddpdoctor attach`` says it.

    Raises:
        DoctorError: There is nothing to attach to.
    """
    from ddpdoctor.debug import attach_points
    from ddpdoctor.debug.vscode import launch_json

    run = _debugged(snapshot)
    points = attach_points.points(run)
    lines = [
        f'VS Code: F5 "{launch_json.compound_name(attach_points.label(run))}"; '
        "w writes .vscode/launch.json",
        f"Neovim: ddpdoctor attach --rank N; elsewhere: {attach_points.tunnel(run)}",
    ]
    lines += [f"rank {point.rank}: port {point.port}, {point.state}" for point in points]
    return tuple(lines if points else [*lines, "no rank has started yet"])


def write_launch_json(snapshot: Snapshot) -> str:
    """Put the ranks into launch.json, as ``ddpdoctor attach --write`` does; what was done.

    Raises:
        DoctorError: There is nothing to attach to, or the file cannot be edited.
    """
    from ddpdoctor.debug import attach_points
    from ddpdoctor.debug.vscode import files, launch_json

    run = _debugged(snapshot)
    own = run.manifest["debug"].get("workspace")
    workspace = Path(own) if own else files.find_workspace(files.current_directory(), None)
    changed = attach_points.write([run], workspace)
    path = workspace / files.FOLDER / launch_json.FILE
    return f"{'wrote' if changed else 'unchanged:'} {path}"


def _debugged(snapshot: Snapshot) -> Run:
    from ddpdoctor.debug import attach_points

    if not snapshot.live or not snapshot.path:
        raise DoctorError("no run is live here: there is nothing to attach to")
    run = RunReader(Path(snapshot.path)).snapshot()
    if not attach_points.is_debugged(run):
        raise DoctorError(f"{run.path.name} was started with --no-debug")
    return run

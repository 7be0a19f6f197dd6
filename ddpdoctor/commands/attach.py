"""``ddpdoctor attach``: where to attach a debugger to the ranks of live runs."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import DEFAULT_PORT
from ddpdoctor.debug import attach_points, injection
from ddpdoctor.debug.vscode import launch_json
from ddpdoctor.debug.vscode.files import current_directory, find_workspace
from ddpdoctor.run import rundir
from ddpdoctor.run.environment import MARK
from ddpdoctor.run.record import integer
from ddpdoctor.run.snapshot import Run, RunReader

HELP = """\
Usage: ddpdoctor attach [OPTIONS] [RUN]

Show where a debugger attaches to the ranks of your live runs, and what each
rank does. RUN is a run's name or directory [default: all live runs].

Options:
  --write           Put the ranks into .vscode/launch.json, one attach
                    configuration each.
  --workspace DIR   The folder that VS Code opens, for --write
                    [default: the nearest with a .vscode or .git].
  --path-map LOCAL=REMOTE
                    Where the editor's folder LOCAL is in the job, for --write.
  --tunnel          For an editor on another machine: the ssh line that brings
                    the ports there, and with --write its ends.
  --rank N          Print the line that attaches Neovim (nvim-dap) to rank N.
  --gdb PID         Inject debugpy into a Python process that runs without
                    ddpdoctor, and hold a port for it until Ctrl-C; needs gdb.
  -h, --help        Show this text.

Exit status: 0; 2 if there is no such run, rank or process.
"""

_VALUES = ("--workspace", "--path-map", "--rank", "--gdb")
_FLAGS = ("--write", "--tunnel", "--help", "-h")


@dataclass
class _Options:
    flags: set[str] = field(default_factory=set)
    values: dict[str, list[str]] = field(default_factory=dict)
    run: str | None = None

    def last(self, name: str) -> str | None:
        return self.values[name][-1] if name in self.values else None

    def number(self, name: str) -> int | None:
        value = self.last(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()):
            raise DoctorError(f"option {name} needs a number, not {value!r}")
        return int(value)


def main(words: Sequence[str]) -> int:
    """Show, write or print the attach points of live runs.

    Raises:
        DoctorError: There is nothing to attach to.
    """
    options = _parse(words)
    if options.flags & {"-h", "--help"}:
        sys.stdout.write(HELP)
        return 0
    pid = options.number("--gdb")
    if pid is not None:
        return _inject(pid)
    runs = _runs(options.run)
    for name in ("--workspace", "--path-map"):
        if name in options.values and "--write" not in options.flags:
            raise DoctorError(f"{name} is for --write")
    rank = options.number("--rank")
    if rank is not None:
        return _one_line(runs, rank)
    if "--write" in options.flags:
        return _write(runs, options)
    if "--tunnel" in options.flags:
        for run in runs:
            _say(attach_points.tunnel(run))
        return 0
    for run in runs:
        _show(run)
    return 0


def _parse(words: Sequence[str]) -> _Options:
    options, queue = _Options(), list(words)
    while queue:
        word = queue.pop(0)
        name, equals, given = word.partition("=")
        if name in _VALUES:
            if not equals and not queue:
                raise DoctorError(f"option {name} needs a value")
            options.values.setdefault(name, []).append(given if equals else queue.pop(0))
        elif word in _FLAGS:
            options.flags.add(word)
        elif word.startswith("-"):
            import difflib

            close = difflib.get_close_matches(word, [*_VALUES, *_FLAGS], n=1)
            hint = f"did you mean {close[0]}?" if close else "`ddpdoctor attach --help` lists them"
            raise DoctorError(f"unknown option {word}", hint)
        elif options.run is None:
            options.run = word
        else:
            raise DoctorError(f"one run at a time: {options.run}, {word}")
    return options


def _runs(name: str | None) -> list[Run]:
    """Live runs with debug ports, the newest first."""
    paths = [rundir.find(name)] if name is not None else rundir.some_live()
    if name is not None and not rundir.is_live(paths[0]):
        raise DoctorError(f"{name} has ended", "`ddpdoctor attach` lists the live runs")
    runs = [RunReader(path).snapshot() for path in paths]
    debugged = [run for run in runs if attach_points.is_debugged(run)]
    if not debugged:
        raise DoctorError(f"{runs[0].path.name} was started with --no-debug")
    return debugged


def _say(text: str) -> None:
    """Print a line with words of the run directory, which may be anybody's."""
    print(shown(text))


def _show(run: Run) -> None:
    seconds = (time.time_ns() - integer(run.manifest, "started")) / 1e9
    _say(f"{run.path.name}: {_called(run)}, for {_age(seconds)}")
    points = attach_points.points(run)
    if not points:
        print("  no rank has started yet")
    else:
        print(f"  {'rank':<6}{'port':<7}{'pid':<9}state")
    for point in points:
        _say(f"  {point.rank:<6}{point.port:<7}{point.pid or '-':<9}{point.state}")
    _say(f'  VS Code: F5 "{launch_json.compound_name(attach_points.label(run))}"')
    print("  Neovim: ddpdoctor attach --rank N; another machine: ddpdoctor attach --tunnel")


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _called(run: Run) -> str:
    told = run.manifest.get("command")
    words = [str(word) for word in told] if isinstance(told, list) else []
    scripts = [word for word in words if word.endswith(".py")]
    return os.path.basename(scripts[0]) if scripts else shlex.join(words[:3])


def _one_line(runs: Sequence[Run], rank: int) -> int:
    for run in runs:
        for point in attach_points.points(run):
            if point.rank == rank:
                host = attach_points.host(run)
                print(
                    'lua require("dap").run({type = "python", request = "attach", '
                    f'name = "{launch_json.rank_name(rank)}", '
                    f'connect = {{host = "{host}", port = {point.port}}}}})'
                )
                print(f"any other client: attach to {host}:{point.port}", file=sys.stderr)
                return 0
    raise DoctorError(f"no live run has a rank {rank}", "`ddpdoctor attach` lists them")


def _write(runs: Sequence[Run], options: _Options) -> int:
    workspace = find_workspace(current_directory(), options.last("--workspace"))
    mappings = [_mapping(text) for text in options.values.get("--path-map", [])]
    if options.run is None:
        # Others have launch.json files of their own.
        mine = [run for run in runs if _is_in(run, workspace)]
        runs = mine or runs
    through_tunnel = "--tunnel" in options.flags
    if through_tunnel:
        for run in runs:
            _say(attach_points.tunnel(run))
    changed = attach_points.write(runs, workspace, mappings=mappings, through_tunnel=through_tunnel)
    path = os.path.join(workspace, ".vscode", launch_json.FILE)
    _say(f"{'wrote' if changed else 'unchanged:'} {attach_points.short(f'{path}:')[:-1]}")
    return 0


def _is_in(run: Run, workspace: Path) -> bool:
    """Whether a run was started from that workspace."""
    own = run.manifest["debug"].get("workspace")
    return own is not None and os.path.realpath(str(own)) == os.path.realpath(workspace)


def _mapping(text: str) -> launch_json.PathMapping:
    local, _, remote = text.partition("=")
    if not local or not remote:
        raise DoctorError(f"option --path-map needs LOCAL=REMOTE, not {text!r}")
    return launch_json.PathMapping(local, remote)


def _inject(pid: int) -> int:
    """Have debugpy inject itself into a process, by gdb."""
    try:
        process = psutil.Process(pid)
        name = process.name()
    except psutil.Error:
        raise DoctorError(f"there is no process {pid}") from None
    with contextlib.suppress(psutil.Error):
        if MARK in process.environ():
            raise DoctorError(
                f"process {pid} belongs to a run of ddpdoctor",
                "`ddpdoctor attach` shows the port of its rank",
            )
    if not _is_python(process):
        raise DoctorError(f"process {pid} ({name}) is no Python")
    if shutil.which("gdb") is None:
        raise DoctorError("gdb is not installed", "it is what injects debugpy; install gdb")
    if process.uids().effective != os.geteuid():
        raise DoctorError(
            f"process {pid} belongs to uid {process.uids().effective}",
            "run this command as that user: the port lets in only that user and root",
        )
    injection.serve(pid, DEFAULT_PORT, lambda text: print(shown(text), flush=True))
    return 0


def _is_python(process: psutil.Process) -> bool:
    try:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
    except OSError as error:
        raise DoctorError(f"process {process.pid} cannot be read: {error.strerror}") from None
    return "python" in maps

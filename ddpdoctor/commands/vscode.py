"""``ddpdoctor vscode``: write VS Code's entries to run a job and attach to all its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import shown
from ddpdoctor.core.job import DEFAULT_PORT, LOOPBACK
from ddpdoctor.core.options import DIRECTORY, PATH_MAP, Given, Parser, number
from ddpdoctor.debug import vscode_configurations, vscode_files
from ddpdoctor.debug.vscode_configurations import ALL, WORKSPACE_FOLDER, AttachPoint, PathMapping
from ddpdoctor.supervise import command

DEFAULT_RANKS = 2
_FOR_REMOVE = {"--workspace", "--remove"}
_LAST_PORT = 65535
_NPROC = ("--nproc-per-node", "--nproc_per_node")
_FILE = "${file}"  # VS Code's variable for the open file

PARSER = Parser(
    "vscode",
    """\
Usage: ddpdoctor vscode [OPTIONS] [COMMAND LINE OF ddpdoctor run]

Write the entries into .vscode/launch.json and .vscode/tasks.json with which
F5 starts the job and attaches the debugger to all its ranks. Everything else
in these files stays as it is, comments too.

The job is named as for `ddpdoctor run`: options of run and of torchrun, the
script and its arguments. Without a script the file that is open in VS Code is
run.

Options:
  --workspace DIR   The folder that VS Code opens
                    [default: the nearest with a .vscode or .git].
  --ranks N         How many ranks to attach to
                    [default: the number of --nproc-per-node, else 2].
  --debug-port PORT The port of rank 0; the others follow [default: 5678].
  --path-map LOCAL=REMOTE
                    The ranks see the folder LOCAL as REMOTE, as in a
                    container; may be given more than once.
  --remove          Remove the entries again.
  -h, --help        Show this text.
""",
    {
        "--workspace": DIRECTORY,
        "--ranks": number(1, 1024),
        "--debug-port": number(2, _LAST_PORT),
        "--path-map": PATH_MAP,
    },
    leading=True,
)


def main(words: Sequence[str]) -> int:
    """Write or remove the entries."""
    given = PARSER.read(words, command.PARSER.options)
    if given.separator and not given.rest:
        raise DoctorError("no script after --", "leave -- out to run the open file")
    if given.separator and not given.passed:
        # All words after it belong to the job, options of run and torchrun, too.
        job = Parser("vscode", "", leading=True).read(given.rest, command.PARSER.options)
        given.passed, given.rest, given.separator = job.passed, job.rest, job.separator
    here = vscode_files.current_directory()
    workspace = vscode_files.find_workspace(here, given.get("--workspace"))
    if "--remove" not in given:
        _install(workspace, here, given)
    elif given.passed or given.rest or set(given.options) - given.configured - _FOR_REMOVE:
        raise DoctorError("--remove goes with no other option than --workspace")
    else:
        _remove(workspace, here)
    return 0


def _install(workspace: Path, here: Path, given: Given) -> None:
    port = given.get("--debug-port", DEFAULT_PORT)
    nproc = given.last_passed(*_NPROC) or ""
    asked = int(nproc) if nproc.isascii() and nproc.isdigit() and len(nproc) < 10 else 0
    ranks = given.get("--ranks") or asked or DEFAULT_RANKS
    if port + ranks - 1 > _LAST_PORT:
        raise DoctorError(
            f"{ranks} ranks from port {port} on need ports beyond port {_LAST_PORT}",
            "choose a lower --debug-port",
        )
    points = [AttachPoint(ALL, LOOPBACK, port - 1)]
    points += [AttachPoint(rank, LOOPBACK, port + rank) for rank in range(ranks)]
    mappings = []
    for local, remote in given.get("--path-map", ()):
        if not local.startswith("$"):
            local = _in_files(Path(os.path.normpath(here / local)), workspace)
        mappings.append(PathMapping(local, remote))
    # The run updates launch.json, and has to write the same entries.
    own = ["--workspace", WORKSPACE_FOLDER]
    if port != DEFAULT_PORT:
        own += ["--debug-port", str(port)]
    for mapping in mappings:
        own += ["--path-map", f"{mapping.local}={mapping.remote}"]
    cwd = _in_files(here, workspace) if given.passed or given.rest else WORKSPACE_FOLDER
    changed = vscode_files.edit(
        workspace,
        {
            vscode_configurations.LAUNCH_FILE: partial(
                vscode_configurations.with_launch_entries,
                points=points,
                mappings=mappings or vscode_configurations.default_mappings(workspace),
            ),
            vscode_configurations.TASKS_FILE: partial(
                vscode_configurations.with_tasks, words=[*own, *_job(given, ranks)], cwd=cwd
            ),
        },
    )
    names = _shown(changed or _paths(workspace), here)
    done = f"wrote {names}" if changed else f"unchanged: {names}"
    press = "press F5 and choose" if given.rest else "open the script and press F5, then choose"
    print(f'{done}: {press} "{vscode_configurations.RUN_CONFIGURATION}"')


def _job(given: Given, ranks: int) -> list[str]:
    """Return the job's words for `ddpdoctor run`."""
    script = given.rest or [_FILE]
    separator = ["--"] if given.separator and given.passed else []
    job = [*given.typed(), *separator, *script]
    for_torchrun = script[0].endswith((".py", _FILE)) or (given.passed and not separator)
    if for_torchrun and not given.has_passed(*_NPROC):
        # Start one rank for each attach configuration.
        job = ["--nproc-per-node", str(ranks), *job]
    return job


def _remove(workspace: Path, here: Path) -> None:
    changed = vscode_files.edit(
        workspace,
        {
            vscode_configurations.LAUNCH_FILE: vscode_configurations.without_launch_entries,
            vscode_configurations.TASKS_FILE: vscode_configurations.without_tasks,
        },
    )
    deleted = [path for path in changed if not path.exists()]
    edited = [path for path in changed if path.exists()]
    if deleted:
        print(f"removed {_shown(deleted, here)}")
    if edited:
        print(f"removed the entries of ddpdoctor from {_shown(edited, here)}")
    if not changed:
        print(f"unchanged: no entries of ddpdoctor in {_shown(_paths(workspace), here)}")


def _in_files(path: Path, workspace: Path) -> str:
    """Return a path for VS Code's files, relative to the workspace folder if it is below it."""
    for root, place in ((workspace, path), (workspace.resolve(), path.resolve())):
        if place.is_relative_to(root):
            below = place.relative_to(root)
            return WORKSPACE_FOLDER if below == Path() else f"{WORKSPACE_FOLDER}/{below}"
    return str(path)


def _paths(workspace: Path) -> list[Path]:
    return [
        workspace / vscode_files.FOLDER / name
        for name in (vscode_configurations.LAUNCH_FILE, vscode_configurations.TASKS_FILE)
    ]


def _shown(paths: Sequence[Path], here: Path) -> str:
    names = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
    return shown(" and ".join(str(name) for name in names))

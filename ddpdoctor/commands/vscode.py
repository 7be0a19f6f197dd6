"""``ddpdoctor vscode``: write what VS Code needs to run a job and attach to all its ranks."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import DEFAULT_PORT
from ddpdoctor.debug.vscode import files, launch_json, tasks_json
from ddpdoctor.debug.vscode.launch_json import FOLDER, AttachPoint, PathMapping

HELP = """\
Usage: ddpdoctor vscode [OPTIONS] [COMMAND LINE OF ddpdoctor run]

Write the entries into .vscode/launch.json and .vscode/tasks.json with which
F5 starts the job and attaches the debugger to all its ranks. Everything else
in these files stays as it is, comments too.

The job is named as for `ddpdoctor run`: options of run and of torchrun, the
script and its arguments. Without a script the file that is open in VS Code is
run.

Options:
  --workspace DIR          The folder that VS Code opens
                           [default: the nearest with a .vscode or .git].
  --ranks N                How many ranks to attach to
                           [default: the number of --nproc-per-node, else 2].
  --debug-port PORT        The port of rank 0; the others follow
                           [default: 5678].
  --path-map LOCAL=REMOTE  The ranks see the folder LOCAL as REMOTE, as in a
                           container; may be given more than once.
  --remove                 Take the entries out again.
  -h, --help               Show this text.
"""

DEFAULT_RANKS = 2
MOST_RANKS = 1024
_HOST = "127.0.0.1"
_LAST_PORT = 65535
_NPROC = ("--nproc-per-node", "--nproc_per_node")
_WITH_VALUE = ("--workspace", "--ranks", "--debug-port", "--path-map")
_FLAGS = ("--remove", "--help")


@dataclass
class _Options:
    """The command line taken apart."""

    values: dict[str, list[str]] = field(default_factory=dict)
    job: list[str] = field(default_factory=list)
    remove: bool = False
    help: bool = False

    def last(self, name: str) -> str | None:
        return self.values[name][-1] if name in self.values else None

    def number(self, name: str, most: int) -> int | None:
        text = self.last(name)
        if text is None:
            return None
        number = _number(text)
        if number is None or not 1 <= number <= most:
            raise DoctorError(f"option {name} needs a number from 1 to {most}, not {text!r}")
        return number


def main(words: Sequence[str]) -> int:
    """Write or remove the entries.

    Raises:
        DoctorError: The command line cannot work, or a file cannot be changed.
    """
    options = _take_apart(words)
    if options.help:
        sys.stdout.write(HELP)
        return 0
    here = files.current_directory()
    workspace = files.find_workspace(here, options.last("--workspace"))
    if options.remove:
        _remove(workspace)
    else:
        _install(workspace, here, options)
    return 0


def _install(workspace: Path, here: Path, options: _Options) -> None:
    port = options.number("--debug-port", _LAST_PORT) or DEFAULT_PORT
    given = _nproc(options.job)
    ranks = options.number("--ranks", MOST_RANKS) or _number(given or "") or DEFAULT_RANKS
    if port + ranks - 1 > _LAST_PORT:
        raise DoctorError(
            f"{ranks} ranks from port {port} on go beyond port {_LAST_PORT}",
            "choose a lower --debug-port",
        )
    points = [AttachPoint(rank, _HOST, port + rank) for rank in range(ranks)]
    mappings = [_path_map(text, workspace, here) for text in options.values.get("--path-map", [])]
    job = options.job or ["${file}"]
    if given is None and _for_torchrun(job):
        # As many ranks as there are configurations to attach to them.
        job = ["--nproc-per-node", str(ranks), *job]
    # The run writes launch.json anew, and has to come to the same entries.
    own = ["--debug-port", str(port)] if port != DEFAULT_PORT else []
    if options.last("--workspace") is not None:
        own += ["--workspace", FOLDER]
    for mapping in mappings:
        own += ["--path-map", f"{mapping.local}={mapping.remote}"]
    cwd = _named(here, workspace) if options.job else FOLDER
    changed = files.edit(
        workspace,
        {
            launch_json.FILE: partial(
                launch_json.installed,
                points=points,
                mappings=mappings or launch_json.default_mappings(workspace),
            ),
            tasks_json.FILE: partial(
                tasks_json.installed, words=[*own, *job], cwd="" if cwd == FOLDER else cwd
            ),
        },
    )
    names = _shown(changed or _paths(workspace), here)
    done = f"wrote {names}" if changed else f"unchanged: {names}"
    print(f'{done}: press F5 and choose "{launch_json.RUN}"')


def _remove(workspace: Path) -> None:
    changed = files.edit(
        workspace, {launch_json.FILE: launch_json.removed, tasks_json.FILE: tasks_json.removed}
    )
    here = files.current_directory()
    deleted = [path for path in changed if not path.exists()]
    edited = [path for path in changed if path.exists()]
    if deleted:
        print(f"removed {_shown(deleted, here)}")
    if edited:
        print(f"removed the entries of ddpdoctor from {_shown(edited, here)}")
    if not changed:
        print(f"unchanged: no entries of ddpdoctor in {_shown(_paths(workspace), here)}")


def _take_apart(words: Sequence[str]) -> _Options:
    options = _Options()
    queue = list(words)
    of_run: list[str] = []
    script: list[str] = []
    while queue:
        word = queue.pop(0)
        if word == "--":
            script = ["--", *queue] if of_run else queue
            if not queue:
                raise DoctorError("no script behind --", "leave -- out to run the open file")
            break
        if not word.startswith("-") or word == "-":
            script = [word, *queue]
            break
        name, equals, value = word.partition("=")
        if name in _WITH_VALUE:
            if not equals:
                if not queue or queue[0].startswith("--"):
                    raise DoctorError(f"option {name} needs a value", "`--help` says more")
                value = queue.pop(0)
            options.values.setdefault(name, []).append(value)
        elif word == "--remove":
            options.remove = True
        elif word in ("-h", "--help"):
            options.help = True
        elif name in _FLAGS:
            raise DoctorError(f"option {name} takes no value")
        else:
            # Parsed only where there is one: torchrun's options are read from its source.
            from ddpdoctor.supervise import command

            if _close(name):
                raise DoctorError(f"unknown option {name}", f"did you mean {_close(name)}?")
            taken = command.taken_by_option([word, *queue])
            of_run += [word, *queue[: taken - 1]]
            del queue[: taken - 1]
    options.job = of_run + (script or (["${file}"] if of_run else []))
    if options.remove and (options.job or set(options.values) - {"--workspace"}):
        raise DoctorError("--remove goes with no other option than --workspace")
    return options


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _close(name: str) -> str:
    """The option of ours that was meant; not one of run's or torchrun's with a like name."""
    close = difflib.get_close_matches(name, [*_WITH_VALUE, *_FLAGS], n=1, cutoff=0.9)
    return close[0] if close else ""


def _nproc(job: Sequence[str]) -> str | None:
    """The value of ``--nproc-per-node`` in front of the script, or None."""
    found = None
    for place, word in enumerate(job):
        if word == "--" or word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name in _NPROC:
            found = value if equals else "".join(job[place + 1 : place + 2])
    return found


def _for_torchrun(job: Sequence[str]) -> bool:
    """Whether the job is surely one for torchrun, and no command that starts its own ranks."""
    first = job[0]
    if first.startswith("-") and "--" in job[:-1]:
        first = job[job.index("--") + 1]
    return first.endswith((".py", "${file}")) or (first.startswith("-") and "--" not in job)


def _path_map(text: str, workspace: Path, here: Path) -> PathMapping:
    local, equals, remote = text.partition("=")
    if not (local and equals and remote):
        raise DoctorError(
            f"option --path-map needs LOCAL=REMOTE, not {text!r}",
            "for example: --path-map .=/workspace",
        )
    if not local.startswith("$"):
        local = _named(Path(os.path.normpath(here / local)), workspace)
    return PathMapping(local, remote)


def _named(path: Path, workspace: Path) -> str:
    """A path as VS Code may have it in its files: below the workspace if it is."""
    for root, place in ((workspace, path), (workspace.resolve(), path.resolve())):
        if place.is_relative_to(root):
            below = place.relative_to(root)
            return FOLDER if below == Path() else f"{FOLDER}/{below}"
    return str(path)


def _paths(workspace: Path) -> list[Path]:
    return [workspace / files.FOLDER / name for name in (launch_json.FILE, tasks_json.FILE)]


def _shown(paths: Sequence[Path], here: Path) -> str:
    names = [path.relative_to(here) if path.is_relative_to(here) else path for path in paths]
    return shown(" and ".join(str(name) for name in names))

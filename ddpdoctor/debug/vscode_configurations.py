"""ddpdoctor's entries in VS Code's launch.json and tasks.json.

launch.json gets an attach configuration for all ranks, and one for each rank.
tasks.json gets the tasks that run a job, check a machine and the code, and watch a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.debug import vscode_files
from ddpdoctor.debug.vscode_files import PREFIX, Section, any_name

# -- launch.json


LAUNCH_FILE = vscode_files.LAUNCH
RUN_CONFIGURATION = f"{PREFIX}run + attach"
"""The configuration that F5 starts: runs the job in a task, then attaches to all ranks."""
RUN_TASK = f"{PREFIX}run"
REPORT_TASK = f"{PREFIX}report"  # The task whose problems stay listed after the job has ended

WORKSPACE_FOLDER = "${workspaceFolder}"
_IDENTITY = {"localRoot": WORKSPACE_FOLDER, "remoteRoot": WORKSPACE_FOLDER}

_LAUNCH_DEFAULTS = {"version": "0.2.0"}
_NAME = re.compile(
    # Call Stack shows only the beginning of a name.
    r"rank \d+(?: on [\w.-]+)? \(ddpdoctor(?:, (?P<label>.*))?\)|"
    rf"{PREFIX}attach all ranks(?: \((?P<all>.*)\))?",
    re.DOTALL,
)
ALL = -1
_HOST = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class AttachPoint:
    """The address at which a debugger reaches a rank, or all of them."""

    rank: int  # `ALL` for a session with all ranks
    host: str
    port: int
    node: str = ""  # The host of a rank of another node


@dataclass(frozen=True)
class PathMapping:
    """A folder as VS Code sees it, and as the ranks see it."""

    local: str
    remote: str


def update_launch(
    workspace: Path,
    points: Sequence[AttachPoint],
    *,
    label: str = "",
    others: Collection[str] = (),
    mappings: Sequence[PathMapping] = (),
) -> bool:
    """Write one attach configuration per point into launch.json, and one for all ranks.

    Args:
        workspace: The folder that VS Code has open.
        points: All ranks, and each rank.
        label: Part of the names that distinguishes this run from another live one in the workspace.
        others: The labels of the other live runs, whose entries stay. All others are stale.
        mappings: Used instead of the workspace itself.

    Returns:
        Whether the file changed.

    Raises:
        DoctorError: The file cannot be edited. It is unchanged.
    """
    shown = mappings or default_mappings(workspace)
    return bool(
        vscode_files.edit(
            workspace, {LAUNCH_FILE: lambda text: with_run(text, points, shown, label, others)}
        )
    )


def default_mappings(workspace: Path) -> list[PathMapping]:
    """Return the mapping of the workspace, and of its real path if that differs."""
    found = [PathMapping(WORKSPACE_FOLDER, WORKSPACE_FOLDER)]
    real = os.path.realpath(workspace)
    if real != os.path.abspath(workspace):
        found.append(PathMapping(WORKSPACE_FOLDER, real))
    return found


def with_run(
    text: str | None,
    points: Sequence[AttachPoint],
    mappings: Sequence[PathMapping],
    label: str = "",
    others: Collection[str] = (),
) -> str | None:
    """Return the text of launch.json for a run, with the arguments of :func:`update_launch`.

    "run + attach" belongs to the user. If it exists it stays, and gets the port of the run without
    a label.

    Raises:
        JsoncError: The text cannot be edited.
    """
    kept = set(others) - {label}
    document = vscode_files.parse_jsonc(text or "")
    found = (
        vscode_files.find(document, key, "name", RUN_CONFIGURATION)
        for key in ("configurations", "compounds")
    )
    runs = not label and any(found)

    def replaced(name: str) -> bool:
        if name == RUN_CONFIGURATION:
            return runs
        found = _NAME.fullmatch(name)
        return found is not None and (found["label"] or found["all"] or "") not in kept

    return _rewritten(text, _configurations(points, mappings, label, runs=runs), replaced)


def with_launch_entries(
    text: str | None, points: Sequence[AttachPoint], mappings: Sequence[PathMapping]
) -> str | None:
    """Return the text of launch.json with the unlabelled entries and "run + attach".

    Raises:
        JsoncError: The text cannot be edited.
    """

    def replaced(name: str) -> bool:
        found = _NAME.fullmatch(name)
        labels = {found["label"], found["all"]} if found is not None else set()
        return name == RUN_CONFIGURATION or labels == {None}

    return _rewritten(text, _configurations(points, mappings, "", runs=True), replaced)


def _rewritten(
    text: str | None, wanted: Sequence[Mapping[str, object]], replaced: Callable[[str], bool]
) -> str | None:
    sections = [
        Section("configurations", "name", wanted, replaced, _merged),
        # Earlier versions wrote compounds.
        Section("compounds", "name", [], replaced),
    ]
    return vscode_files.rewrite(text, sections, _LAUNCH_DEFAULTS)


def without_launch_entries(text: str | None) -> str | None:
    """Return the text of launch.json without ddpdoctor's entries. None if no entries are left.

    Raises:
        JsoncError: The text is damaged.
    """
    return _rewritten(text, [], any_name)


def rank_name(rank: int, label: str = "", node: str = "") -> str:
    """Return the name of a rank's configuration. ``node`` is the host of a rank of another node."""
    there = f" on {node}" if _HOST.fullmatch(node) else ""
    return f"rank {rank}{there} (ddpdoctor" + (f", {label})" if label else ")")


def root_name(label: str = "") -> str:
    """Return the name of the configuration of all ranks."""
    return f"{PREFIX}attach all ranks" + (f" ({label})" if label else "")


def _configurations(
    points: Sequence[AttachPoint], mappings: Sequence[PathMapping], label: str, *, runs: bool
) -> list[Mapping[str, object]]:
    """Return the attach configurations. With ``runs``, the first one starts the job."""

    def attach(name: str, point: AttachPoint, order: int, **more: str) -> Mapping[str, object]:
        return {
            "name": name,
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": point.host, "port": point.port},
            "pathMappings": [
                {"localRoot": mapping.local, "remoteRoot": mapping.remote} for mapping in mappings
            ],
            "justMyCode": True,
            "presentation": {"group": "ddpdoctor", "order": order},
            **more,
        }

    found = []
    for point in (each for each in points if each.rank == ALL):
        if runs:
            tasks = {"preLaunchTask": RUN_TASK, "postDebugTask": REPORT_TASK}
            found.append(attach(RUN_CONFIGURATION, point, 1, **tasks))
        found.append(attach(root_name(label), point, 2))
    ranks = sorted((each for each in points if each.rank != ALL), key=lambda point: point.rank)
    for order, point in enumerate(ranks, 3):
        found.append(attach(rank_name(point.rank, label, point.node), point, order))
    return found


def _merged(key: str, theirs: Any, ours: Any) -> Any:
    """Return the value of a key of an entry in the file, which the user may have changed."""
    if key == "pathMappings":
        return theirs if ours[0] == _IDENTITY and not _are_ours(theirs) else ours
    return ours if key in ("type", "request", "connect") else theirs


def _are_ours(mappings: Any) -> bool:
    """Return whether these may be the path mappings of a run without ``--path-map``."""
    return isinstance(mappings, list) and all(
        isinstance(each, dict)
        and each.get("localRoot") in (WORKSPACE_FOLDER, each.get("remoteRoot"))
        and mappings[0] == _IDENTITY
        for each in mappings
    )


# -- tasks.json


TASKS_FILE = "tasks.json"

_RUN_WORDS = ("run", "--wait-for-attach", "--stop-with-debugger", "--output", "problems")
_TASKS_DEFAULTS = {"version": "2.0.0"}
_MATCHER: Mapping[str, Any] = {
    "owner": "ddpdoctor",
    "source": "ddpdoctor",
    "fileLocation": ["autoDetect", WORKSPACE_FOLDER],
    "pattern": {
        "regexp": r"^(.+?):(\d+):(\d+): (error|warning|info) ([A-Z]+\d+) (.*)$",
        # Without a column VS Code underlines the whole line.
        "file": 1,
        "line": 2,
        "severity": 4,
        "code": 5,
        "message": 6,
    },
}
_BACKGROUND = {
    # Without an end pattern VS Code would wait for the end of the job before it attaches.
    "background": {
        "activeOnStart": True,
        "beginsPattern": "^ddpdoctor: waiting for the ranks to start",
        "endsPattern": "^ddpdoctor: all ranks listening",
    }
}
_LINT_WORDS = ("lint", "--watch", "--output", "problems", ".")
_CHECKING = {
    "pattern": {**_MATCHER["pattern"], "column": 3},
    "background": {
        "activeOnStart": True,
        "beginsPattern": "^ddpdoctor lint: checking",
        "endsPattern": "^ddpdoctor lint: done",
    },
}
_REPORT_WORDS = (
    *("report", "latest", "--workspace", WORKSPACE_FOLDER),
    *("--output", "problems", "--wait", "10", "--exit-zero"),
)
"""VS Code removes a background task's problems when the task ends. This task's problems stay.

The ranks, and with them the debugger, end shortly before the run has reported all findings.
"""


def with_tasks(text: str | None, words: Sequence[str], cwd: str = WORKSPACE_FOLDER) -> str | None:
    """Return the text of tasks.json with ddpdoctor's tasks.

    ``words`` are the options of torchrun, the script and its arguments.

    Raises:
        JsoncError: The text cannot be edited.
    """

    def process(label: str, words: Sequence[str]) -> Mapping[str, object]:
        return {
            "label": label,
            "type": "process",
            "command": "${command:python.interpreterPath}",
            "args": ["-m", "ddpdoctor", *words],
            "options": {"cwd": cwd},
        }

    tasks: list[Mapping[str, object]] = [
        {
            **process(RUN_TASK, [*_RUN_WORDS, *words]),
            "isBackground": True,
            "presentation": {"reveal": "always", "panel": "dedicated", "clear": True},
            "problemMatcher": {**_MATCHER, **_BACKGROUND},
        },
        {
            **process(REPORT_TASK, _REPORT_WORDS),
            "presentation": {"reveal": "silent", "panel": "dedicated", "clear": True},
            # With Stop on a compound, VS Code ends the focused session twice, and would then ask
            # which instance of the task to end.
            "runOptions": {"instancePolicy": "silent"},
            "problemMatcher": _MATCHER,
        },
        {**process(f"{PREFIX}check", ["check"]), "problemMatcher": []},
        {
            **process(f"{PREFIX}lint", _LINT_WORDS),
            "isBackground": True,
            "presentation": {"reveal": "never", "panel": "dedicated", "clear": True},
            "problemMatcher": {**_MATCHER, "owner": "ddpdoctor lint", **_CHECKING},
        },
        {
            **process(f"{PREFIX}top", ["top", "--workspace", WORKSPACE_FOLDER]),
            "presentation": {"reveal": "always", "panel": "dedicated", "focus": True},
            "problemMatcher": [],
        },
    ]
    section = Section("tasks", "label", tasks, any_name, _merged_task)
    return vscode_files.rewrite(text, [section], _TASKS_DEFAULTS)


def _merged_task(key: str, theirs: Any, ours: Any) -> Any:
    """Return the value of a key of a task in the file, as :func:`_merged` does."""
    if key == "options" and isinstance(theirs, dict):
        return {**theirs, **ours}
    return theirs if key in ("command", "presentation", "runOptions", "options") else ours


def without_tasks(text: str | None) -> str | None:
    """Return the text of tasks.json without ddpdoctor's tasks. None if it had no others.

    Raises:
        JsoncError: The text is damaged.
    """
    return vscode_files.rewrite(text, [Section("tasks", "label", [], any_name)], _TASKS_DEFAULTS)

"""ddpdoctor's entries in VS Code's launch.json and tasks.json.

launch.json gets an attach configuration for each rank, and the compounds that start them all.
tasks.json gets the tasks that run a job, check a machine and the code, and watch a run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpdoctor.debug import vscode_files
from ddpdoctor.debug.vscode_files import PREFIX, Section, any_name, is_ours

# -- launch.json


LAUNCH_FILE = vscode_files.LAUNCH
RUN_COMPOUND = f"{PREFIX}run + attach"
"""The compound that F5 starts: the task that runs the job, then all ranks."""
RUN_TASK = f"{PREFIX}run"
REPORT_TASK = f"{PREFIX}report"  # The task whose problems stay listed when the job has ended

WORKSPACE_FOLDER = "${workspaceFolder}"
_IDENTITY = {"localRoot": WORKSPACE_FOLDER, "remoteRoot": WORKSPACE_FOLDER}

_LAUNCH_DEFAULTS = {"version": "0.2.0"}
_NAME = re.compile(
    # Call Stack shows the beginning of a name alone.
    r"rank \d+(?: on [\w.-]+)? \(ddpdoctor(?:, (?P<label>.*))?\)|"
    rf"{PREFIX}attach all ranks(?: \((?P<all>.*)\))?",
    re.DOTALL,
)
_HOST = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class AttachPoint:
    """The address at which a debugger reaches a rank."""

    rank: int
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
    """Make launch.json hold one attach configuration per point, and the compound of them all.

    Args:
        workspace: The folder that VS Code has open.
        points: The ranks.
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
    """Return the workspace under its name, and under its real path if that differs."""
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

    The compound "run + attach" belongs to the user. If it is there it stays, and names the ranks of
    the run without a label, whatever else was changed in it.

    Raises:
        JsoncError: The text cannot be edited.
    """
    kept = set(others) - {label}
    document = vscode_files.parse_jsonc(text or "")
    if label and vscode_files.find(document, "compounds", "name", RUN_COMPOUND):
        # Keep the configurations that it names.
        kept.add("")

    def replaced(name: str) -> bool:
        found = _NAME.fullmatch(name)
        return found is not None and (found["label"] or found["all"] or "") not in kept

    points = sorted(points, key=lambda point: point.rank)
    names = [rank_name(point.rank, label, point.node) for point in points]
    configurations = document.root.members("configurations") if document.root else []
    # `ddpdoctor vscode` has written the task that the end of a session runs.
    reports = not label and any(
        isinstance(item.value, dict) and item.value.get("postDebugTask") == REPORT_TASK
        for node in configurations
        for item in node.items
    )
    wanted = _configurations(points, mappings, label, reports=reports)
    everyone = [_attach_all(names, label)] if names else []
    sections = [
        Section("configurations", "name", wanted, replaced, _merged),
        Section("compounds", "name", everyone, replaced, _merged),
    ]
    text = vscode_files.rewrite(text, sections, _LAUNCH_DEFAULTS)
    if label or text is None:
        return text
    document = vscode_files.parse_jsonc(text)
    run = vscode_files.find(document, "compounds", "name", RUN_COMPOUND)
    listed = run.members("configurations") if run else []
    both = _merged("configurations", listed[-1].value, names) if listed else []
    if not listed or listed[-1].value == both:
        return text
    return document.replace(listed[-1], both)


def with_launch_entries(
    text: str | None, points: Sequence[AttachPoint], mappings: Sequence[PathMapping]
) -> str | None:
    """Return the text of launch.json with the unlabelled entries and the compound "run + attach".

    Raises:
        JsoncError: The text cannot be edited.
    """

    def replaced(name: str) -> bool:
        found = _NAME.fullmatch(name)
        labels = {found["label"], found["all"]} if found is not None else set()
        return name == RUN_COMPOUND or labels == {None}

    names = [rank_name(point.rank) for point in points]
    run = {
        "name": RUN_COMPOUND,
        "configurations": names,
        "preLaunchTask": RUN_TASK,
        "stopAll": True,
        "presentation": _presentation(1),
    }
    wanted = _configurations(points, mappings, "", reports=True)
    compounds = [_attach_all(names, ""), run]
    sections = [
        Section("configurations", "name", wanted, replaced, _merged),
        Section("compounds", "name", compounds, replaced, _merged),
    ]
    return vscode_files.rewrite(text, sections, _LAUNCH_DEFAULTS)


def without_launch_entries(text: str | None) -> str | None:
    """Return the text of launch.json without ddpdoctor's entries; None if it had no others.

    Raises:
        JsoncError: The text is damaged.
    """
    keys = ("configurations", "compounds")
    sections = [Section(key, "name", [], any_name) for key in keys]
    return vscode_files.rewrite(text, sections, _LAUNCH_DEFAULTS)


def rank_name(rank: int, label: str = "", node: str = "") -> str:
    """Return the name of a rank's configuration.

    Args:
        rank: The rank.
        label: As for :func:`update_launch`.
        node: The host of a rank of another node.
    """
    there = f" on {node}" if _HOST.fullmatch(node) else ""
    return f"rank {rank}{there} (ddpdoctor" + (f", {label})" if label else ")")


def compound_name(label: str = "") -> str:
    """Return the name of the compound of all ranks."""
    return f"{PREFIX}attach all ranks" + (f" ({label})" if label else "")


def _presentation(order: int) -> dict[str, object]:
    return {"group": "ddpdoctor", "order": order}


def _configurations(
    points: Sequence[AttachPoint], mappings: Sequence[PathMapping], label: str, *, reports: bool
) -> list[Mapping[str, object]]:
    """Return the attach configurations.

    With ``reports``, the end of the first one's session runs the task `REPORT_TASK`.
    """
    return [
        {
            "name": rank_name(point.rank, label, point.node),
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": point.host, "port": point.port},
            "pathMappings": [
                {"localRoot": mapping.local, "remoteRoot": mapping.remote} for mapping in mappings
            ],
            "justMyCode": True,
            "presentation": _presentation(order),
            **({"postDebugTask": REPORT_TASK} if reports and order == 3 else {}),
        }
        for order, point in enumerate(points, 3)
    ]


def _merged(key: str, theirs: Any, ours: Any) -> Any:
    """Return the value of a key that an entry in the file has, which the user may have changed.

    Args:
        key: The key.
        theirs: The value in the file.
        ours: The value for this run.
    """
    if key == "configurations" and isinstance(theirs, list):
        return [*ours, *(name for name in theirs if not is_ours(name))]
    if key == "pathMappings":
        return theirs if ours[0] == _IDENTITY and not _are_ours(theirs) else ours
    return ours if key in ("type", "request", "connect", "configurations") else theirs


def _are_ours(mappings: Any) -> bool:
    """Return whether these may be the path mappings of a run without ``--path-map``."""
    return isinstance(mappings, list) and all(
        isinstance(each, dict)
        and each.get("localRoot") in (WORKSPACE_FOLDER, each.get("remoteRoot"))
        and mappings[0] == _IDENTITY
        for each in mappings
    )


def _attach_all(names: Sequence[str], label: str) -> Mapping[str, object]:
    return {
        "name": compound_name(label),
        "configurations": list(names),
        "stopAll": True,
        "presentation": _presentation(2),
    }


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
        # Without a column VS Code underlines the line from its first character on.
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
    },
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
"""VS Code removes a background task's problems when the task ends; those of this one stay.

The ranks, and with them the debugger, end shortly before the run has reported all findings.
"""


def with_tasks(text: str | None, words: Sequence[str], cwd: str = WORKSPACE_FOLDER) -> str | None:
    """Return the text of tasks.json with ddpdoctor's tasks.

    Args:
        text: The content of the file; None if there is no file.
        words: The arguments of the run: options of torchrun, the script and its arguments.
        cwd: The working directory of the run.

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
            # Stop on a compound ends the focused session twice for VS Code, which would then ask
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
    """Return the value of a key that a task in the file has, as :func:`_merged` does."""
    if key == "options" and isinstance(theirs, dict):
        return {**theirs, **ours}
    return theirs if key in ("command", "presentation", "runOptions", "options") else ours


def without_tasks(text: str | None) -> str | None:
    """Return the text of tasks.json without ddpdoctor's tasks; None if it had no others.

    Raises:
        JsoncError: The text is damaged.
    """
    return vscode_files.rewrite(text, [Section("tasks", "label", [], any_name)], _TASKS_DEFAULTS)

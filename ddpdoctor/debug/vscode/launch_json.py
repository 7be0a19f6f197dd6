"""launch.json: an attach configuration for each rank, and the compounds that start them all."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.debug.vscode import files, jsonc, owned
from ddpdoctor.debug.vscode.owned import PREFIX, Section

FILE = files.LAUNCH
RUN = f"{PREFIX}run + attach"
"""The compound that F5 starts: the task that runs the job, then all ranks."""
RUN_TASK = f"{PREFIX}run"
REPORT_TASK = f"{PREFIX}report"
"""The task whose problems stay when the job has ended."""

FOLDER = "${workspaceFolder}"

_DEFAULTS = {"version": "0.2.0"}
_NAME = re.compile(rf"{PREFIX}(?:rank \d+|attach all ranks)(?: \((?P<label>.*)\))?", re.DOTALL)


@dataclass(frozen=True)
class AttachPoint:
    """Where a rank can be reached by the debugger."""

    rank: int
    host: str
    port: int


@dataclass(frozen=True)
class PathMapping:
    """A folder as VS Code sees it, and as the ranks do."""

    local: str
    remote: str


def update(
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
        label: Tells this run from another live one in the same workspace; part of the names.
        others: The labels of the other live runs, whose entries stay; those of any other are stale.
        mappings: In place of the workspace itself.

    Returns:
        Whether the file changed.

    Raises:
        DoctorError: The file cannot be edited; it is as it was.
    """
    shown = mappings or default_mappings(workspace)
    return bool(
        files.edit(workspace, {FILE: lambda text: updated(text, points, shown, label, others)})
    )


def default_mappings(workspace: Path) -> list[PathMapping]:
    """The workspace as it was named, and under its real path if that is another one."""
    found = [PathMapping(FOLDER, FOLDER)]
    real = os.path.realpath(workspace)
    if real != os.path.abspath(workspace):
        found.append(PathMapping(FOLDER, real))
    return found


def updated(
    text: str | None,
    points: Sequence[AttachPoint],
    mappings: Sequence[PathMapping],
    label: str = "",
    others: Collection[str] = (),
) -> str | None:
    """The text of launch.json for a run; the arguments are those of :func:`update`.

    The compound "run + attach" is a person's to have: if it is there it stays, and names the ranks
    of the unlabelled run.

    Raises:
        JsoncError: The text cannot be edited.
    """
    kept = set(others) - {label}
    document = jsonc.parse(text or "")
    if label and owned.find(document, "compounds", "name", RUN):
        # What it names has to be there.
        kept.add("")

    def replaced(name: str) -> bool:
        found = _NAME.fullmatch(name)
        return found is not None and (found["label"] or "") not in kept

    points = sorted(points, key=lambda point: point.rank)
    names = [rank_name(point.rank, label) for point in points]
    wanted = _configurations(points, mappings, label, reports=not label and _has_report(document))
    sections = [
        Section("configurations", "name", wanted, replaced),
        Section("compounds", "name", [_attach_all(names, label)] if names else [], replaced),
    ]
    text = owned.rewrite(text, sections, _DEFAULTS)
    return text if label or text is None else _with_names_in_run(text, names)


def installed(
    text: str | None, points: Sequence[AttachPoint], mappings: Sequence[PathMapping]
) -> str | None:
    """The text of launch.json with the unlabelled entries and the compound "run + attach".

    Raises:
        JsoncError: The text cannot be edited.
    """

    def replaced(name: str) -> bool:
        found = _NAME.fullmatch(name)
        return name == RUN or (found is not None and found["label"] is None)

    names = [rank_name(point.rank) for point in points]
    run = {
        "name": RUN,
        "configurations": names,
        "preLaunchTask": RUN_TASK,
        "stopAll": True,
        "presentation": _presentation(1),
    }
    wanted = _configurations(points, mappings, "", reports=True)
    sections = [
        Section("configurations", "name", wanted, replaced),
        Section("compounds", "name", [_attach_all(names, ""), run], replaced),
    ]
    return owned.rewrite(text, sections, _DEFAULTS)


def removed(text: str | None) -> str | None:
    """The text of launch.json without anything of ours; None if nothing else was in it.

    Raises:
        JsoncError: The text is damaged.
    """
    keys = ("configurations", "compounds")
    sections = [Section(key, "name", [], owned.any_name) for key in keys]
    return owned.rewrite(text, sections, _DEFAULTS)


def rank_name(rank: int, label: str = "") -> str:
    """The name of a rank's configuration; ``label`` is that of :func:`update`."""
    return f"{PREFIX}rank {rank}{_suffix(label)}"


def compound_name(label: str = "") -> str:
    """The name of the compound of all ranks."""
    return f"{PREFIX}attach all ranks{_suffix(label)}"


def _suffix(label: str) -> str:
    return f" ({label})" if label else ""


def _presentation(order: int) -> dict[str, object]:
    return {"group": "ddpdoctor", "order": order}


def _configurations(
    points: Sequence[AttachPoint], mappings: Sequence[PathMapping], label: str, *, reports: bool
) -> list[Mapping[str, object]]:
    """The configurations; with ``reports`` the end of the first one's session runs that task."""
    return [
        {
            "name": rank_name(point.rank, label),
            "type": "debugpy",
            "request": "attach",
            "connect": {"host": point.host, "port": point.port},
            "pathMappings": [
                {"localRoot": mapping.local, "remoteRoot": mapping.remote} for mapping in mappings
            ],
            "justMyCode": False,
            "presentation": _presentation(order),
            **({"postDebugTask": REPORT_TASK} if reports and order == 3 else {}),
        }
        for order, point in enumerate(points, 3)
    ]


def _attach_all(names: Sequence[str], label: str) -> Mapping[str, object]:
    return {
        "name": compound_name(label),
        "configurations": list(names),
        "stopAll": True,
        "presentation": _presentation(2),
    }


def _has_report(document: jsonc.Document) -> bool:
    """Whether `ddpdoctor vscode` has made the task that the end of a session runs."""
    configurations = document.root.members("configurations") if document.root else []
    items = [item.node.value for node in configurations for item in node.items]
    return any(
        isinstance(each, dict) and each.get("postDebugTask") == REPORT_TASK for each in items
    )


def _with_names_in_run(text: str, names: Sequence[str]) -> str:
    """The text with these ranks in "run + attach", whatever else a person changed in it."""
    document = jsonc.parse(text)
    run = owned.find(document, "compounds", "name", RUN)
    listed = run.members("configurations") if run else []
    if not listed or listed[-1].value == list(names):
        return text
    return jsonc.replace(document, listed[-1], list(names))

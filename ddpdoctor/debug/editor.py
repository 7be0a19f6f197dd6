"""A run's entries in the editor's launch.json, which several live runs may share.

What edits the file is imported when there is something to write: the job has started by then.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import OwnOptions
from ddpdoctor.debug.debug_ports import reachable
from ddpdoctor.debug.vscode.files import (
    FOLDER,
    LAUNCH,
    current_directory,
    edit,
    find_workspace,
    locked,
)
from ddpdoctor.run import rundir


class Editor:
    """Writes the attach configurations of one run.

    The first live run of a workspace has the plain names; one that starts beside it has its script
    and port in its names.

    Args:
        own: ``no_vscode``, ``workspace`` and ``path_map`` are used.
        script: What the run is called.

    Raises:
        DoctorError: The workspace that was named is no directory.
    """

    def __init__(self, own: OwnOptions, script: str) -> None:
        self.workspace: Path | None = None
        if not own.no_vscode:
            self.workspace = find_workspace(current_directory(), own.workspace)
        self._tracked: bool | None = None
        self._before: str | None = None
        self._after: str | None = None
        self._path_map = own.path_map
        self._script = script
        self.label = ""
        """What distinguishes this run's names from another live run's; empty for the only one."""

    def configuration(self, rank: int) -> str:
        """The name of a rank's attach configuration."""
        from ddpdoctor.debug.vscode import launch_json

        return launch_json.rank_name(rank, self.label)

    @property
    def compound(self) -> str:
        """The name of the compound that attaches to all ranks."""
        from ddpdoctor.debug.vscode import launch_json

        return launch_json.compound_name(self.label)

    def claim(self, directory: Path, port: int) -> None:
        """Choose the label: the plain names belong to the first live run of the workspace."""
        if self.workspace is None:
            return
        try:
            with locked(self.workspace):
                claims = _claims(self.workspace)
                if any(claim["label"] == "" for claim in claims):
                    self.label = f"{self._script} :{port}"
                claims.append({"label": self.label, "directory": str(directory)})
                file = _claims_file(self.workspace)
                fresh = file.with_name(file.name + ".new")
                fresh.write_text(json.dumps(claims))
                os.replace(fresh, file)
        except (OSError, DoctorError):
            # Without a place to say so, the names are the plain ones.
            return

    def write(self, host: str, ports: dict[int, int]) -> str:
        """Make launch.json hold the configurations of these ranks.

        Args:
            host: Where the ports are.
            ports: Port by global rank.

        Returns:
            The file, if it was not there or held none of ddpdoctor's; else nothing.

        Raises:
            DoctorError: The file cannot be changed; it was left as it is.
        """
        if self.workspace is None:
            return ""
        from ddpdoctor.debug.vscode import launch_json
        from ddpdoctor.debug.vscode.owned import PREFIX

        points = [
            launch_json.AttachPoint(rank, reachable(host), port)
            for rank, port in sorted(ports.items())
        ]
        others = {claim["label"] for claim in _claims(self.workspace)} - {self.label}
        text = _text(self.workspace)
        if self._tracked is None:
            self._tracked = _tracked_by_git(self.workspace)
            self._before = text if self._tracked else None
        launch_json.update(
            self.workspace,
            points,
            label=self.label,
            others=others,
            mappings=[launch_json.PathMapping(*pair) for pair in self._path_map],
        )
        self._after = _text(self.workspace)
        fresh = text is None or PREFIX not in text
        return str(self.workspace / FOLDER / LAUNCH) if fresh else ""

    def restore(self) -> None:
        """Put back a launch.json that git tracks: a run leaves nothing to commit.

        One that was changed by others meanwhile stays as it is.

        Raises:
            DoctorError: The file cannot be changed; it was left as it is.
        """
        before, after = self._before, self._after
        if self.workspace is not None and before is not None:
            edit(self.workspace, {LAUNCH: lambda text: before if text == after else text})


def _text(workspace: Path) -> str | None:
    try:
        return (workspace / FOLDER / LAUNCH).read_bytes().decode()
    except (OSError, ValueError):
        return None


def _tracked_by_git(workspace: Path) -> bool:
    """Whether git has the workspace's launch.json."""
    path = Path(FOLDER, LAUNCH)
    if not (workspace / path).exists() or not (workspace / ".git").exists():
        return False
    command = ["git", "-C", str(workspace), "ls-files", "--error-unmatch", str(path)]
    try:
        return subprocess.run(command, capture_output=True, timeout=2).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _claims_file(workspace: Path) -> Path:
    name = hashlib.sha256(os.fsencode(workspace.resolve())).hexdigest()[:16]
    return rundir.private_base() / f"vscode-{name}.json"


def _claims(workspace: Path) -> list[dict[str, Any]]:
    """The live runs that have entries in this workspace's launch.json."""
    try:
        claims = json.loads(_claims_file(workspace).read_text())
        return [claim for claim in claims if rundir.is_live(Path(claim["directory"]))]
    except (OSError, ValueError, KeyError, TypeError):
        return []

"""Where a debugger attaches to the ranks of a live run, and what each of them does."""

from __future__ import annotations

import getpass
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.core.working_directory import relative_place
from ddpdoctor.debug import debug_ports
from ddpdoctor.debug.vscode import launch_json
from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.rundir import MANIFEST
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import Status

_ADDRESS = re.compile(r"[A-Za-z0-9._:%-]+")


@dataclass(frozen=True)
class Point:
    """A rank's port, and its state in a few words."""

    rank: int
    port: int
    pid: int | None
    state: str


def points(run: Run) -> list[Point]:
    """The points of a run, ascending by rank."""
    return [
        Point(rank, each.port or 0, each.pid or None, _state(run, rank, each))
        for rank, each in sorted(run.debug_states.items())
    ]


def _state(run: Run, rank: int, record: DebugRecord) -> str:
    """What a rank does, in a few words."""
    state, place = record.state, relative_place(record.at)
    if state == "gone":
        return "ended"
    if state == "waits":
        return f"waits for a debugger at {place}"
    if state == "stopped":
        return "held by the debugger" + (f" at {place}" if record.place else "")
    status = next((each.status for each in run.last if each.rank == rank), None)
    doing = _doing(status) if status is not None else "starting"
    return f"in the debugger, {doing}" if state in ("attached", "running") else doing


def _doing(status: Status) -> str:
    what = status.collective or status.phase.label
    return f"step {status.step}, {what}" + (
        f" ({relative_place(status.site)})" if status.site else ""
    )


def is_debugged(run: Run) -> bool:
    """Whether the run was started with debug ports."""
    return isinstance(run.manifest.get("debug"), dict)


def host(run: Run) -> str:
    """Where a debugger reaches the run's ports.

    Raises:
        DoctorError: What the run directory says is no address: it goes into lines to be pasted.
    """
    address = run.manifest["debug"].get("host")
    if not (isinstance(address, str) and _ADDRESS.fullmatch(address)):
        raise DoctorError(f"{run.path / MANIFEST} is damaged: {address!r} is no address")
    return debug_ports.reachable(address)


def label(run: Run) -> str:
    """What distinguishes the run's entries in launch.json from another live run's."""
    return str(run.manifest["debug"].get("label") or "")


def tunnel(run: Run) -> str:
    """The line that brings the run's ports to another machine."""
    node = str(run.manifest.get("host", "HOST"))
    there = host(run)
    there = f"[{there}]" if ":" in there else there
    forwards = " ".join(f"-L {near}:{there}:{far}" for near, far in _ends(run))
    return f"ssh -N {forwards} {getpass.getuser()}@{shlex.quote(node)}"


def _ends(run: Run) -> list[tuple[int, int]]:
    """Local and remote ports of a tunnel: ranks of several nodes do not share a local one."""
    listed = run.manifest["debug"].get("ports")
    ports = [port for port in listed if isinstance(port, int)] if isinstance(listed, list) else []
    found = points(run)
    if not found or not ports:
        return [(port, port) for port in ports]
    return [(ports[0] + point.rank, point.port) for point in found]


def write(
    runs: Sequence[Run],
    workspace: Path,
    *,
    mappings: Sequence[launch_json.PathMapping] = (),
    through_tunnel: bool = False,
) -> bool:
    """Put the ranks of runs into the workspace's launch.json; whether it changed.

    Raises:
        DoctorError: The file cannot be edited; it is as it was.
    """
    labels = [label(run) for run in runs]
    changed = False
    for run, own in zip(runs, labels, strict=True):
        near = LOOPBACK if through_tunnel else host(run)
        ports = {point.rank: point.port for point in points(run)}
        if through_tunnel:
            ports = dict(zip(ports, (end for end, _ in _ends(run)), strict=True))
        changed |= launch_json.update(
            workspace,
            [launch_json.AttachPoint(rank, near, port) for rank, port in ports.items()],
            label=own,
            others=set(labels) - {own},
            mappings=mappings,
        )
    return changed

"""What the job is given to find its run by, and what other commands find: run.json."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from ddpdoctor import __version__
from ddpdoctor.core import working_directory
from ddpdoctor.core.job import Command
from ddpdoctor.debug.debugging import Debugging
from ddpdoctor.run.environment import BUDGET, namespace
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject

ENTRY = str(Path(__file__).parents[1] / "probe" / "entry")
"""The folder on PYTHONPATH by which the probe comes."""


def environment(
    directory: Path | None, command: Command, debugging: Debugging | None
) -> dict[str, str]:
    """The environment of the job; without a run directory it is this process's own."""
    environment = dict(os.environ)
    if directory is None:
        return environment
    before = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{ENTRY}{os.pathsep}{before}" if before else ENTRY
    environment["DDPDOCTOR_RUN_DIR"] = str(directory)
    environment["DDPDOCTOR_JOURNAL_MB"] = str(command.own.journal_mb)
    environment[BUDGET] = str(command.own.overhead_budget)
    environment["DDPDOCTOR_SUPERVISOR"] = f"{os.getpid()}@{namespace()}"
    return environment | (debugging.environment() if debugging is not None else {})


def manifest(directory: Path, command: Command, debugging: Debugging | None) -> JsonObject:
    """The content of run.json."""
    from importlib import metadata

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {
        "format": FORMAT,
        "id": directory.name,
        "started": time.time_ns(),
        "command": list(command.argv),
        "launcher": "torchrun" if command.through_torchrun else "command",
        "cwd": working_directory.path(),
        "host": socket.gethostname(),
        "supervisor": os.getpid(),
        "debug": debugging.manifest() if debugging is not None else None,
        "versions": {
            "ddpdoctor": __version__,
            "python": ".".join(map(str, sys.version_info[:3])),
            "torch": torch,
        },
    }

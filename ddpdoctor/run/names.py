"""File names and environment variables that the supervisor, ranks and readers share.

Standard library only, since ranks and keepers load this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

FORMAT = 1
"""Version of every file in a run directory; raised when an old reader would misread a new file."""

MAX_WORLD_SIZE = 1 << 17  # Maximum number of ranks. A file with more is not trusted.
BUFFERS = "DDP's broadcast of buffers"  # The name shown for the broadcast before DDP's forward

BUCKETS = "DDP's broadcast of the order of buckets"
"""The name shown for the one before the first forward after a reduced backward."""

BEFORE_FORWARD = (BUFFERS, BUCKETS)

VITALS = "vitals.jsonl"
"""Memory of ranks and load of GPUs over time (`ddpdoctor.run.records.supervisor.VitalsRecord`)."""

PROFILES = "profiles"  # Directory with a directory for each call of `ddpdoctor profile`

CODE = "code.json"  # The code of the job (`ddpdoctor.run.code_version`)
LOCK = "lock"  # The file in a run directory that its supervisor holds
CONTROL = "control"  # The supervisor's socket for its ranks


def debug_socket(index: int) -> str:
    """Return the name of the socket that belongs to the debug port with this index."""
    return f"debug-{index}.sock"


STACKS_SUFFIX = ".txt"
"""Suffix of the file for a process's stacks (`ddpdoctor.probe.runtime.stacks`). Its first line is
JSON that says how to request them, and the process appends its responses."""


def of_node(name: str, node: int) -> str:
    """Return the name of another node's copy of a file: ``code-n1.json``."""
    stem, _, suffix = name.partition(".")
    return f"{stem}-n{node}.{suffix}"


def stacks_stem(pid: int, start: int) -> str:
    """Return the name of a process's stacks file without its suffix.

    The pid and the start, in the kernel's ticks, identify a process of this boot.
    """
    return f"stacks-{pid}-{start}"


def rank_stem(rank: int, restart: int) -> str:
    """Return the common prefix of a rank's file names: ``rank-0003.r0``."""
    return f"rank-{rank:04d}.r{restart}"


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """Give ``path`` a name that fits into a socket address: 107 bytes, 103 on macOS."""
    if len(os.fsencode(path)) < 100:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


# -- Environment variables of a job's processes


MARK = "DDPDOCTOR_RUN_ID"  # Marks a process of a job. ``outer/inner`` for a run within a run.
RUN_DIRECTORY = "DDPDOCTOR_RUN_DIR"
KEEPERS = "DDPDOCTOR_KEEPERS"  # The pids of the supervisor and its keepers: ``1,2,3``

BUDGET = "DDPDOCTOR_OVERHEAD_BUDGET"
"""Percent of the step time that diagnosis may take. 0 disables costly parts."""

TRAINED = "DDPDOCTOR_TRAINED"
"""Set if ranks record the data and settings of each step (`..records.training.TrainedRecord`)."""

CAPSULE = "DDPDOCTOR_CAPSULE"
"""The number of the step that ranks keep, or `FAILURE` for the one that fails."""

FAILURE = "failure"


def capsule_file(rank: int) -> str:
    """Return the name of the file with a rank's step (`ddpdoctor.run.capsule`)."""
    return f"capsule-{rank:04d}.pickle"


DEBUG = "DDPDOCTOR_DEBUG"
"""Options of the debugger: ``attach``, and with it ``gate``, ``lift`` and ``error``."""


def namespace() -> str:
    """Identify the boot and the pid namespace, in which a pid is valid."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename

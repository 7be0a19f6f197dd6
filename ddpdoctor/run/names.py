"""Names that the supervisor, the ranks and the readers agree on: files and environment variables.

Standard library only: ranks and keepers load this.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

# -- what both ends call things: the files of a run directory, and collectives of DDP's own


FORMAT = 1
"""Version of every file in a run directory; raised when an old reader would misread a new file."""

MOST_WORLD = 1 << 17
"""Ranks of a job; a file that tells of more is not believed."""

BUFFERS = "DDP's broadcast of buffers"
"""How the broadcast before DDP's forward is shown, next to the names of collectives."""

BUCKETS = "DDP's broadcast of the order of buckets"
"""The same of the one before the first forward in grad mode after a reduced backward."""

BEFORE_FORWARD = (BUFFERS, BUCKETS)

VITALS = "vitals.jsonl"
"""Memory of ranks and load of GPUs over time (`ddpdoctor.run.records.supervisor.VitalsRecord`)."""

CODE = "code.json"
"""What the job was started from (`ddpdoctor.run.code_version`)."""

CONTROL = "control"
"""The socket in the run directory where the supervisor and its ranks meet."""

STACKS_SUFFIX = ".txt"
"""Ends the name of the file in which a process says how it is asked for its stacks, in a first line
of JSON, and to which its answers are appended (`ddpdoctor.probe.runtime.stacks`)."""


def stacks_stem(pid: int, start: int) -> str:
    """The beginning of the name of that file.

    Args:
        pid: Its process id.
        start: When it started, in the kernel's ticks: together they name one process of this boot.
    """
    return f"stacks-{pid}-{start}"


def rank_stem(rank: int, restart: int) -> str:
    """The common beginning of a rank's file names: ``rank-0003.r0``."""
    return f"rank-{rank:04d}.r{restart}"


@contextlib.contextmanager
def short_path(path: str) -> Iterator[str]:
    """``path`` as the address of a socket, which has room for 107 bytes only (103 on macOS)."""
    if len(os.fsencode(path)) < 100:
        yield path
        return
    directory = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{os.path.basename(path)}"
    finally:
        os.close(directory)


# -- what a job's processes inherit from the supervisor, and what a pid is valid in


MARK = "DDPDOCTOR_RUN_ID"
"""The environment variable that marks a process of a job; ``outer/inner`` in a run within a run."""

KEEPERS = "DDPDOCTOR_KEEPERS"
"""That with the pids of the supervisor and the keepers: ``1,2,3``."""

BUDGET = "DDPDOCTOR_OVERHEAD_BUDGET"
"""That with the percent of the step time that diagnosis may take; 0 turns off what costs."""

DEBUG = "DDPDOCTOR_DEBUG"
"""That with the debugger's options: ``attach``, with it ``gate``, ``lift`` and ``error``."""


def namespace() -> str:
    """What a pid is valid in: this boot and this pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename

"""What a job's processes inherit from the supervisor, and what a pid is valid in.

Standard library only: ranks read this, too.
"""

from __future__ import annotations

import os

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

"""Keep ddpdoctor's file descriptors out of the way of a job's."""

from __future__ import annotations

import fcntl
import os
import resource

ROOM = 64
"""Descriptors at the end of what a process may open, or of the first 1,024, that are ours."""


def move_up(descriptor: int) -> int:
    """Return a descriptor with a high number in place of this one, which is closed.

    A job's first ``open`` has the number that it has without us. And where a job closes all
    descriptors, as a daemon does, and opens files then, none of these gets a number that we still
    write to.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if most == resource.RLIM_INFINITY or most > 1024:
        # `select` refuses descriptors of 1024 and above.
        most = 1024
    try:
        moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, max(most - ROOM, 3))
    except OSError:
        # None is free there.
        return descriptor
    os.close(descriptor)
    return moved

"""What a thread got of the CPU cores: how long it ran, and how long it was ready and had to wait.

On a machine that runs more than it has cores for, a rank may be slow without any fault in the job.
The kernel counts this wait by thread (``schedstat``, Linux). It is read once a step, in 2 us, from
a file that is kept open.
"""

from __future__ import annotations

import contextlib
import os
import time

from ddpdoctor.run.descriptors import move_up


def waited_for_core(descriptor: int) -> int:
    """Nanoseconds that a thread, or a process's first one, was ready to run and had to wait.

    Args:
        descriptor: Its ``schedstat``.

    Raises:
        OSError: It is gone.
        ValueError: This is no such file.
        IndexError: Likewise.
    """
    return int(os.pread(descriptor, 64, 0).split()[1])


class CoreClock:
    """The CPU time and the core waits of the thread that makes it, from one cut to the next."""

    def __init__(self) -> None:
        self._descriptor = -1
        # No Linux, or a kernel that does not count, or a sandbox: nothing is known then.
        with contextlib.suppress(OSError):
            self._descriptor = move_up(
                os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            )
        self._ran = self._waited = 0
        self.cut()

    def cut(self) -> tuple[int, int] | None:
        """Nanoseconds run and waited since the last cut; None if they cannot be known."""
        if self._descriptor < 0:
            return None
        try:
            waited = waited_for_core(self._descriptor)
        except (OSError, ValueError, IndexError):
            # The job has closed what is not its own. The number may be one of its files now.
            self._descriptor = -1
            return None
        ran = time.thread_time_ns()
        counted = ran - self._ran, waited - self._waited
        self._ran, self._waited = ran, waited
        # Of another thread, which closes a last step, they say nothing.
        return counted if min(counted) >= 0 else None

    def close(self) -> None:
        """Let go of the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Only if it is still ours.
                waited_for_core(descriptor)
                os.close(descriptor)

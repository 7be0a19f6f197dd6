"""``--log-to``: the process that sends the run to experiment trackers.

Their clients may hang, crash, or print. None of that reaches the job, and at its end the run waits
for them only for a while.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddpdoctor.core.commands import in_own_process
from ddpdoctor.supervise import processes
from ddpdoctor.system.proc import readable

END_TIMEOUT = 15.0  # Seconds to send the end of the run
OUTPUT = "trackers.log"  # File in the run directory with the clients' output


_RANKS = "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"


def is_first(environ: Mapping[str, str]) -> bool:
    """Return whether this is the first of the supervisors that srun or mpirun has started."""
    return all(environ.get(name, "0") == "0" for name in _RANKS)


class Tracking:
    """Starts and ends the process that sends the run.

    Args:
        directory: The run directory.
        targets: As on the command line.
        say: Prints a line for the user.
    """

    def __init__(self, directory: Path, targets: Sequence[str], say: Callable[[str], None]) -> None:
        self._say = say
        self._output = b""
        with open(directory / OUTPUT, "wb", buffering=0) as log:
            self._process = subprocess.Popen(
                in_own_process(str(directory), *targets, module="ddpdoctor.trackers.follow"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self._reading = self._process.stdout.fileno()
        os.set_blocking(self._reading, False)

    @property
    def pid(self) -> int:
        """The pid of the tracker's process, which is not part of the job."""
        return self._process.pid

    def poll(self) -> bool:
        """Print the messages of the process. Return False once it has ended."""
        try:
            data = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return True
        *lines, self._output = (self._output + data).split(b"\n")
        for line in lines:
            self._say(line.decode(errors="replace"))
        return data != b""

    def end(self) -> None:
        """Let the process send the end of the run, and end it if that takes too long."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + END_TIMEOUT
        alive = True
        while alive and (left := deadline - time.monotonic()) > 0:
            readable([self._reading], min(left, 0.2))
            alive = self.poll()
        if alive:
            self._say(f"warning: --log-to: not all was sent within {END_TIMEOUT:g} s; ending it")
            # Clients start helpers, some in a separate session.
            helpers = processes.Job("", frozenset({process.pid})).processes()
            process.kill()
            for each in helpers:
                processes.send(each, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()

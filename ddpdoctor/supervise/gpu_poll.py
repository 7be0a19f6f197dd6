"""The GPUs of this node, read once a second and shown in the run directory while the job lives."""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from pathlib import Path

from ddpdoctor.run import rundir
from ddpdoctor.system.gpu.poller import EVERY, Poller, file_name

LIBRARY = "libnvidia-ml.so.1"


class GpuPoll:
    """Its own thread, since the driver may take seconds to answer, or hang.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.failed: Exception | None = None
        """The fault of ours, or of the binding, that ended it."""

    def start(self) -> None:
        """Begin to read, if this machine has the driver's library."""
        try:
            # Loads it, and calls nothing.
            ctypes.CDLL(LIBRARY)
        except OSError:
            return
        threading.Thread(target=self._run, name="ddpdoctor-gpu-poll", daemon=True).start()

    def stop(self) -> None:
        """Read no more. Does not wait: the driver may not answer."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._poll()
        except Exception as error:
            # It costs the numbers and nothing else.
            self.failed = error

    def _poll(self) -> None:
        poller = Poller()
        due = time.monotonic()
        while not self._stop.is_set():
            gpus = poller.read()
            path = self._directory / file_name(str(gpus["host"]))
            with contextlib.suppress(OSError):
                rundir.put(path, json.dumps(gpus).encode())
            due = max(due + EVERY, time.monotonic() + EVERY / 4)
            self._stop.wait(due - time.monotonic())
        poller.close()

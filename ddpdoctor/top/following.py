"""The newest live run, whichever that is; the machine while there is none."""

from __future__ import annotations

from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.machine import MachineSource
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.top.source import Want


class FollowingSource:
    """Stays with a run until it is over, and with its end until another one starts.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._run: LiveSource | None = None
        self._machine: MachineSource | None = None

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._run is None or not self._run.live:
            self._look()
        if self._run is not None:
            return self._run.read(want)
        if self._machine is None:
            self._machine = MachineSource(self.interval)
        return self._machine.read(want)

    def _look(self) -> None:
        path = _newest()
        if path is None or (self._run is not None and path == self._run.path):
            return
        try:
            run = LiveSource(path, self.interval)
        except DoctorError:
            # Over, and gone, since it was listed; or of a newer version.
            return
        self.close()
        self._run = run

    def close(self) -> None:
        """Close the files, and let go of the driver."""
        for source in (self._run, self._machine):
            if source is not None:
                source.close()
        self._run = self._machine = None


def _newest() -> Path | None:
    try:
        return next(iter(rundir.live()), None)
    except OSError:
        return None

"""The machine that the monitor runs on, alone; and the newest run, whichever that is."""

from __future__ import annotations

import time

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.system.gpu.poller import Poller
from ddpdoctor.top import hardware
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.snapshot import Snapshot, Verdict
from ddpdoctor.top.source import Want


class MachineSource:
    """The machine alone, its GPUs polled here, since no supervisor does.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._meter = hardware.Meter()
        self._poller: Poller | None = None

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._poller is None:
            self._poller = Poller()
        record = self._poller.read()
        text = "no run of yours is live; the next one is shown when it starts"
        return Snapshot(
            time=time.time(),
            kind="machine",
            verdict=Verdict(text, "info"),
            gpus=hardware.gpus_of(record),
            machine=self._meter.read(),
            nvml=str(record["nvml"]),
        )

    def close(self) -> None:
        """Let go of the driver."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None


class FollowingSource:
    """The newest live run until it is over, and its end until another one starts.

    Before the first one, the machine.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._run: LiveSource | None = None
        self._machine = MachineSource(interval)

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._run is None or not self._run.live:
            self._look()
        return (self._run or self._machine).read(want)

    def _look(self) -> None:
        try:
            path = next(iter(rundir.live()), None)
            if path is None or (self._run is not None and path == self._run.path):
                return
            run = LiveSource(path, self.interval)
        except (OSError, DoctorError):
            # Over, and gone, since it was listed; or of a newer version.
            return
        self.close()
        self._run = run

    def close(self) -> None:
        """Close the files, and let go of the driver."""
        if self._run is not None:
            self._run.close()
        self._machine.close()
        self._run = None

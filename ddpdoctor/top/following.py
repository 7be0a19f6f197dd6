"""One run, alive or over; the newest run; and the machine while there is none."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir
from ddpdoctor.system.gpu.poller import Poller
from ddpdoctor.top import hardware
from ddpdoctor.top.finished import FinishedSource
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
        self.replay = None
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

    def history(self) -> Iterable[Snapshot]:
        """There is none of a machine."""
        return ()

    def close(self) -> None:
        """Let go of the driver."""
        if self._poller is not None:
            self._poller.close()
            self._poller = None


class RunSource:
    """One run: while it lives as it is, and then a replay of its steps.

    Args:
        path: The run directory.
        interval: Seconds between frames.

    Raises:
        DoctorError: It is no run directory, or of a newer version.
    """

    def __init__(self, path: Path, interval: float) -> None:
        self.interval = interval
        self.path = path
        self._live = LiveSource(path, interval)
        self._over = None if rundir.is_live(path) else self._replay()

    def _replay(self) -> FinishedSource:
        return FinishedSource(self.path, self.interval, self._live)

    @property
    def live(self) -> bool:
        """Whether the run lived when it was read last."""
        return self._over is None

    @property
    def replay(self) -> FinishedSource | None:
        """Its steps, once it is over."""
        return self._over

    def read(self, want: Want) -> Snapshot:
        """The present frame."""
        if self._over is not None:
            return self._over.read(want)
        snapshot = self._live.read(want)
        # Of a directory that was removed there is nothing to play.
        if not snapshot.live and snapshot.state != "gone":
            self._over = self._replay()
        return snapshot

    def history(self) -> Iterator[Snapshot]:
        """Frames from its beginning until now."""
        return (self._over or self._replay()).history()

    def close(self) -> None:
        """Close the files."""
        self._live.close()


class FollowingSource:
    """The newest live run until it is over, and its end until another one starts.

    Before the first one, the machine.

    Args:
        interval: Seconds between frames.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._run: RunSource | None = None
        self._machine = MachineSource(interval)

    @property
    def replay(self) -> FinishedSource | None:
        """The steps of a run that is over."""
        return None if self._run is None else self._run.replay

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
            run = RunSource(path, self.interval)
        except (OSError, DoctorError):
            # Over, and gone, since it was listed; or of a newer version.
            return
        self.close()
        self._run = run

    def history(self) -> Iterable[Snapshot]:
        """Of the run, where there is one."""
        return () if self._run is None else self._run.history()

    def close(self) -> None:
        """Close the files, and let go of the driver."""
        if self._run is not None:
            self._run.close()
        self._machine.close()
        self._run = None

"""Ends a job for its user: one that hangs, or whose debugger was stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.job import OwnOptions
from ddpdoctor.run.records.supervisor import SignalRecord
from ddpdoctor.supervise.keepers import Keepers
from ddpdoctor.supervise.signals import JobSignals

if TYPE_CHECKING:
    from ddpdoctor.run.snapshot import Run
    from ddpdoctor.supervise.hangs.watch import HangWatch

KILL_GRACE = 5.0
"""Most seconds that a job which hangs has to end."""


class Ending:
    """Ends the job once, if it still runs and was not asked to end.

    Args:
        own: What the user asked for.
        keepers: Hold the job's command.
        signals: Ends it.
        note: Says why, to people.
        write: Records it.
    """

    def __init__(
        self,
        own: OwnOptions,
        keepers: Keepers,
        signals: JobSignals,
        note: Callable[[str], object],
        write: Callable[[SignalRecord], object],
    ) -> None:
        self._own = own
        self._keepers = keepers
        self._signals = signals
        self._note = note
        self._write = write
        self.killed = False
        """The job hung and was ended for it."""

    def if_hung(
        self, hangs: HangWatch | None, found: Iterable[Finding], read: Callable[[], Run | None]
    ) -> bool:
        """With ``--kill-on-hang``: end a job that hangs for sure, all that is known being saved.

        Args:
            hangs: Watches for hangs.
            found: What the rules have just found.
            read: Reads the run as it is now.

        Returns:
            False where a rank may have moved or ended while the verdict was made: look again.
        """
        hung = hangs is not None and hangs.judged(found)
        if not (hung and self._own.kill_on_hang and self._may_end):
            return True
        run = read()
        if hangs is None or run is None or not hangs.confirmed(run):
            return False
        self.killed = True
        self._note("the job hangs: ending it (--kill-on-hang)")
        self._end(min(self._own.grace, KILL_GRACE), hang=True)
        return True

    def for_debugger(self) -> None:
        """With ``--stop-with-debugger``: end all ranks, since the person has stopped debugging."""
        if self._may_end:
            self._note("the debugger was stopped: ending the job")
            self._end(self._own.grace, debugger=True)

    @property
    def _may_end(self) -> bool:
        return self._keepers.status is None and self._signals.deadline is None

    def _end(self, grace: float, *, hang: bool = False, debugger: bool = False) -> None:
        self._write(
            SignalRecord(time=time.time_ns(), signal=signal.SIGTERM, hang=hang, debugger=debugger)
        )
        self._signals.end_job(grace)

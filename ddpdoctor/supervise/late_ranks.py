"""Start the probe in ranks that run already, and wait for their end.

It is the command of the run that ``ddpdoctor attach --probe`` makes. So the supervisor ends this
process where it would end a job, and signals no rank.

Run as ``python -m ddpdoctor.supervise.late_ranks RANK:PID...`` with the run directory in the
environment.
"""

from __future__ import annotations

import signal

if __name__ == "__main__":
    # It ends as a job that is interrupted, so findings stay.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count, named, shown
from ddpdoctor.debug import attach_points
from ddpdoctor.run import late_start
from ddpdoctor.run.late_start import RankStart
from ddpdoctor.run.names import RUN_DIRECTORY
from ddpdoctor.system.proc import pause, readable

POLL = 0.2  # Seconds between two looks at what the ranks have written
MIN_WATCH = 1.0  # Seconds over which the pace of their forwards is measured
RESERVE = 2  # Times this pace for all ranks to read the chosen beginning
PATIENCE = 30.0  # Seconds after which it is said what the start waits for

_ENTRY = str(Path(__file__).parents[1] / "probe" / "entry" / "ddpdoctor_entry.py")
_SCRIPT = """
names = {{"__name__": "ddpdoctor_entry", "__file__": {entry!r}}}
with open({entry!r}) as file:
    exec(compile(file.read(), {entry!r}, "exec"), names)
names["start_late"]({directory!r})
"""


class LateRanks:
    """Ranks of a running job, by number, in which the probe starts.

    Raises:
        DoctorError: A rank has ended.
    """

    def __init__(self, directory: str, pids: Mapping[int, int]) -> None:
        self._directory = directory
        self._pids = pids
        self._ends: dict[int, int] = {}
        for rank, pid in pids.items():
            try:
                self._ends[rank] = os.pidfd_open(pid)
            except OSError:
                raise DoctorError(f"rank {rank} has ended") from None

    def start(self) -> None:
        """Let all ranks begin in the same step.

        Raises:
            DoctorError: A rank refuses or has ended.
        """
        script = Path(self._directory, "late.py")
        script.write_text(_SCRIPT.format(entry=_ENTRY, directory=self._directory))
        for rank, pid in self._pids.items():
            try:
                attach_points.run_inside(pid, script)
            except DoctorError as error:
                raise DoctorError(f"rank {rank}: {error.message}", error.hint) from None
        earlier = self._forwards(0.0)
        later = self._forwards(MIN_WATCH)
        pace = max(later[rank] - earlier[rank] for rank in later)
        late_start.choose_beginning(self._directory, max(later.values()) + RESERVE * pace + 1)
        began = self._wait("begun", lambda each: each.state == "began")
        if len({each.calls for each in began.values()}) > 1:
            raise DoctorError("the ranks did not begin in the same step", "try again")

    def _forwards(self, after: float) -> dict[int, int]:
        """Return the collectives of each rank at its last forward, after some seconds."""
        pause(after)
        found = self._wait("come to a forward of DDP", lambda each: each.calls > 0)
        return {rank: each.calls for rank, each in found.items()}

    def _wait(self, what: str, holds: Callable[[RankStart], bool]) -> dict[int, RankStart]:
        """Wait until something holds for all ranks. Say so once it takes long."""
        due = time.monotonic() + PATIENCE
        while True:
            found = {rank: self._read(rank) for rank in self._pids}
            late = [rank for rank, each in found.items() if not holds(each)]
            if not late:
                return found
            if time.monotonic() >= due:
                due = float("inf")
                say(f"{named(late)} {'has' if len(late) == 1 else 'have'} not {what} yet")
            if ended := self.ended(POLL):
                raise DoctorError(f"{named(ended)} ended before the probe could begin")

    def _read(self, rank: int) -> RankStart:
        found = late_start.read_start(self._directory, self._pids[rank]) or RankStart("")
        if found.state == "refused":
            raise DoctorError(f"rank {rank}: {found.why}")
        return found

    def ended(self, timeout: float | None) -> list[int]:
        """Return the ranks that have ended, after some seconds at most."""
        ends = set(readable(self._ends.values(), timeout))
        return [rank for rank, descriptor in self._ends.items() if descriptor in ends]

    def wait(self) -> None:
        """Wait until all ranks have ended."""
        while self._ends:
            for rank in self.ended(None):
                os.close(self._ends.pop(rank))


def say(text: str) -> None:
    """Print a line for the user."""
    print(f"ddpdoctor: {shown(text)}", file=sys.stderr, flush=True)


def main() -> int:
    """Start the probe in the ranks of the command line."""
    pids = {int(rank): int(pid) for rank, pid in (word.split(":") for word in sys.argv[1:])}
    directory = os.environ.get(RUN_DIRECTORY, "")
    try:
        if not directory:
            raise DoctorError("there is no run directory")
        ranks = LateRanks(directory, pids)
        ranks.start()
        say(f"{count(len(pids), 'rank')} watched from now on; Ctrl-C ends the watch, not the job")
        ranks.wait()
    except DoctorError as error:
        say(f"the probe does not start: {error}")
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())

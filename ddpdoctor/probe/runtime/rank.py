"""The state of this process as a rank, if it is one (`ddpdoctor.probe.process`), and its end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddpdoctor.probe.runtime import budget, events, shield, sites
from ddpdoctor.probe.runtime.recorder import Recorder
from ddpdoctor.run.records.base import Record
from ddpdoctor.run.records.process import EndRecord, FaultRecord, LimitRecord, StoreRecord
from ddpdoctor.run.status import Phase

if TYPE_CHECKING:
    from ddpdoctor.probe.observers.collective_calls import Ledger
    from ddpdoctor.probe.observers.steps import StepTracker


class RankState:
    """The files, tracker and budget of this process, once it is a rank."""

    def __init__(self, recorder: Recorder, tracker: StepTracker, restart: int = 0) -> None:
        self.recorder = recorder
        self.tracker = tracker
        self.restart = restart  # the attempt that this rank's files belong to
        self.budget = budget.from_environment()
        self.ledger: Ledger | None = None  # of collectives; None if its file could not be made
        self.has_error = False  # whether the reason for the process's end was recorded
        self.closed = False
        self._written: dict[type[Record], int] = {}
        self._known: set[object] = set()

    def add(self, record: Record, most: int, once: object = None) -> bool:
        """Queue a record. Return False after ``most`` of its kind, or if ``once`` is known."""
        if not self.may_add(type(record), most, once):
            return False
        self.recorder.add(record)
        return True

    def may_add(self, kind: type[Record], most: int, once: object = None) -> bool:
        """Count a record. Return False after ``most`` of its kind, or if ``once`` is known."""
        count = self._written.get(kind, 0)
        if once is not None and once in self._known:
            return False
        self._written[kind] = count + 1
        if count >= most:
            if count == most:
                # Rules also draw conclusions from missing records.
                self.recorder.add(LimitRecord(time=time.time_ns(), of=kind.kind))
            return False
        self._known.add(once)
        return True


_early: list[tuple[Record, int, object]] = []  # records from before this process was a rank

_state: RankState | None = None
active: StepTracker | None = None
"""The step tracker of this process if it is a rank, which hooks read at every call."""

is_tracing: Callable[[], bool] = bool
"""``torch.compiler.is_dynamo_compiling`` once this process is a rank. Dynamo knows its result."""

directory = ""  # the run directory of a probe that started late
_warned = False
_MAX_EARLY = 256


def current() -> RankState | None:
    """Return the state of this process if it is a rank."""
    return _state


def enter(state: RankState, tracing: Callable[[], bool]) -> None:
    """Make this process a rank. ``tracing`` is ``torch.compiler.is_dynamo_compiling``."""
    global _state, active, is_tracing
    _state, active, is_tracing = state, state.tracker, tracing
    shield.report_to(_report)
    while _early:
        state.add(*_early.pop(0))


def add(record: Record, most: int, once: object = None) -> None:
    """Queue a record as `RankState.add` does, or keep it until the process is a rank."""
    if _state is not None:
        _state.add(record, most, once)
    elif len(_early) < _MAX_EARLY:
        _early.append((record, most, once))


def run_directory() -> str:
    """Return the run directory, which the supervisor has set in the environment."""
    return directory or os.environ["DDPDOCTOR_RUN_DIR"]


def warn(message: str) -> None:
    """Print one line on stderr, once per process and on one rank of each node."""
    global _warned
    if not _warned and (environment_int("LOCAL_RANK") or 0) == 0:
        _warned = True
        os.write(2, f"ddpdoctor: {message}; the job goes on unwatched\n".encode())


def environment_int(name: str) -> int | None:
    """Return an integer from the environment, or None."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def met_at(host: str, port: int, file: str = "") -> StoreRecord:
    """Return the record of the store at which the ranks of this job meet."""
    return StoreRecord(
        host=host,
        port=port,
        file=os.path.abspath(file) if file else "",
        job=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        local_world_size=environment_int("LOCAL_WORLD_SIZE") or 0,
    )


def _report(hook: str, error: str) -> None:
    if _state is not None:
        _state.tracker.reset()
        _state.recorder.add(FaultRecord(time=time.time_ns(), hook=hook, error=error))


def write_now(record: Record) -> None:
    """Write a record now, since the process may end at any moment."""
    if _state is not None:
        _state.recorder.add_now(record)
        _state.recorder.flush(0.2, last=True)


@shield.shielded
def end() -> None:
    """Write the rank's regular end and close its files."""
    state = _state
    if state is None or state.closed:
        return
    _settle(state)
    events.emit(events.Observer.rank_ends)
    _settle(state)
    state.closed = True
    steps = state.tracker.finish()
    spent, followed, over = state.budget.account()
    state.recorder.add(
        EndRecord(
            time=time.time_ns(),
            steps=steps,
            armed=state.tracker.armed,
            dropped=state.recorder.dropped,
            spent=spent,
            over=over,
            followed=followed,
        )
    )
    state.recorder.close(0.5)
    state.tracker.page_phase(Phase.ENDED)


def _settle(state: RankState) -> None:
    # A device that an error has broken raises at every call.
    with contextlib.suppress(RuntimeError):
        if state.tracker.device is not None:
            state.tracker.device.settle()


def forget() -> None:
    """Leave the parent's files to the parent in a forked child, which is not a rank."""
    global _state, _warned, active
    if _state is not None:
        # Keep it from being collected, which would close the files.
        _inherited.append(_state)
        _state.closed = True
    _state = active = None
    _warned = False
    _early.clear()
    sites.forget()
    events.forget()
    shield.report_to(None)


def leave() -> None:
    """End this rank while its process goes on, and close its files."""
    end()
    forget()
    _inherited.clear()


_inherited: list[RankState] = []

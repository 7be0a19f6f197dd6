"""A process becomes a rank: its files are opened and its hooks come alive.

That happens when ``init_process_group`` has succeeded, however the process was started. DataLoader
workers and other forked children inherit the hooks, asleep; a child that makes a process group of
its own becomes a rank of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from ddpdoctor.probe.observers.flight import Flight
from ddpdoctor.probe.observers.ledger import Ledger
from ddpdoctor.probe.observers.steps import StepTracker
from ddpdoctor.probe.runtime import budget, events, shield, sites, timeouts, watch
from ddpdoctor.probe.runtime.recorder import Recorder
from ddpdoctor.run.environment import namespace
from ddpdoctor.run.record import FORMAT, Journal, Phase, Record, StatusPage, rank_stem
from ddpdoctor.run.ring import RingWriter

MAX_ATTEMPTS = 1000


class RankState:
    """What this process writes to, once it is a rank."""

    def __init__(self, recorder: Recorder, tracker: StepTracker, restart: int = 0) -> None:
        self.recorder = recorder
        self.tracker = tracker
        self.restart = restart
        """The attempt that this rank's files belong to."""
        self.budget = budget.from_environment()
        self.ledger: Ledger | None = None
        """Where collectives are written down; None if the disk refused the file."""
        self.error_told = False
        self.closed = False


_state: RankState | None = None
active: StepTracker | None = None
"""The step tracker of this process if it is a rank, else None; hooks read it at every call."""

is_compiling: Callable[[], bool] = bool
"""``torch.compiler.is_compiling``, once this process is a rank; Dynamo knows its answer."""

_warned = False


def current() -> RankState | None:
    """The state of this process if it is a rank, else None."""
    return _state


def run_directory() -> str:
    """The run directory the supervisor named in the environment."""
    return os.environ["DDPDOCTOR_RUN_DIR"]


def warn(message: str) -> None:
    """One line on stderr, once per process and from one rank of each node."""
    global _warned
    if not _warned and (environment_int("LOCAL_RANK") or 0) == 0:
        _warned = True
        os.write(2, f"ddpdoctor: {message}; the job goes on unwatched\n".encode())


def environment_int(name: str) -> int | None:
    """An integer from the environment, None if absent or no integer."""
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None


def become(torch: Any) -> None:
    """Open this rank's files and start recording; does nothing if that happened before."""
    global _state, active, is_compiling
    if _state is not None:
        return
    distributed = torch.distributed
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    local_rank = environment_int("LOCAL_RANK")
    restart = environment_int("TORCHELASTIC_RESTART_COUNT") or 0
    started = time.time_ns()
    try:
        page, journal, restart = _open(rank, world_size, local_rank, restart, started)
    except OSError as error:
        warn(f"rank {rank} cannot write to the run directory: {error}")
        return
    recorder = Recorder(page, journal)
    from ddpdoctor.probe.hooks import errors, optimizer
    from ddpdoctor.probe.observers import sampling

    tracker = StepTracker(recorder, optimizer.any_made)
    _state = RankState(recorder, tracker, restart)
    is_compiling = torch.compiler.is_compiling
    active = tracker
    recorder.add(
        {
            "kind": "open",
            "format": FORMAT,
            "time": started,
            "rank": rank,
            "world_size": world_size,
            "local_rank": local_rank,
            "restart": restart,
            "pid": os.getpid(),
            "parent": os.getppid(),
            "host": socket.gethostname(),
            "namespace": namespace(),
            "backend": str(distributed.get_backend()),
            "kept_timeout": timeouts.kept(),
            "argv": list(sys.argv),
            "launcher": "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "other",
            "versions": {
                "python": platform.python_version(),
                "torch": str(torch.__version__),
                "cuda": str(torch.version.cuda or ""),
            },
        }
    )
    shield.report_to(_report)
    stem = os.path.join(run_directory(), rank_stem(rank, restart))
    ring = stem + ".collectives"
    try:
        _state.ledger = Ledger(RingWriter(ring))
        recorder.each_round.append(_state.ledger.look)
    except OSError as error:
        shield.fault("ring", error)
    # In a run directory of another version, nobody asks.
    with contextlib.suppress(OSError, ValueError):
        flight = Flight(run_directory(), stem + ".flight.json", ring, tracker.backwards)
        recorder.each_round.append(flight.look)
    with contextlib.suppress(OSError, ValueError):
        recorder.each_round.append(sampling.Profiles(_state, run_directory()).look)
    errors.watch_fatal_signals(stem + ".fault")
    tracker.page_phase(Phase.STARTING)
    recorder.start()
    watch.start()
    atexit.register(end)


def _open(
    rank: int, world_size: int, local_rank: int | None, restart: int, started: int
) -> tuple[StatusPage, Journal, int]:
    """The files of the first free attempt: two jobs in a row may share a run directory."""
    megabytes = environment_int("DDPDOCTOR_JOURNAL_MB") or 64
    while True:
        stem = os.path.join(run_directory(), rank_stem(rank, restart))
        try:
            page = StatusPage(
                stem + ".status",
                rank=rank,
                world_size=world_size,
                local_rank=-1 if local_rank is None else local_rank,
                restart=restart,
                started=started,
            )
            return page, Journal(stem + ".jsonl", megabytes << 20), restart
        except FileExistsError:
            restart += 1
            if restart >= MAX_ATTEMPTS:
                raise


def _report(hook: str, error: str) -> None:
    if _state is not None:
        _state.tracker.reset()
        _state.recorder.add({"kind": "fault", "time": time.time_ns(), "hook": hook, "error": error})


def tell(record: Record) -> None:
    """Write a record now rather than soon: the process may end the next moment."""
    if _state is not None:
        _state.recorder.add_now(record)
        _state.recorder.flush(0.2, last=True)


@shield.shielded
def end() -> None:
    """Write the rank's regular end and close its files."""
    state = _state
    if state is None or state.closed:
        return
    from ddpdoctor.probe.hooks import errors

    errors.at_exit(state)
    for tell_last in events.rank_ends:
        tell_last()
    state.closed = True
    steps = state.tracker.finish()
    spent, over = state.budget.account()
    state.recorder.add(
        {
            "kind": "end",
            "time": time.time_ns(),
            "steps": steps,
            "armed": state.tracker.armed,
            "dropped": state.recorder.dropped,
            # What diagnosis that has a budget cost, and over which time; nanoseconds.
            "spent": spent,
            "over": over,
        }
    )
    state.recorder.close(0.5)
    state.tracker.page_phase(Phase.ENDED)


def forget() -> None:
    """In a forked child: the parent's files are the parent's, this process is no rank."""
    global _state, _warned, active
    if _state is not None:
        # Not garbage-collected: closing the map or the file here is not this process's business.
        _inherited.append(_state)
    _state = active = None
    _warned = False
    sites.forget()
    shield.report_to(None)


_inherited: list[RankState] = []

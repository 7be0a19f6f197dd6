"""Takes the stacks of a live run's ranks, those of one host at a time and all in parallel."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from ddpdoctor.run.environment import namespace
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.stacks import py_spy
from ddpdoctor.stacks.asking import Asking
from ddpdoctor.stacks.declared import Declared, read_declared
from ddpdoctor.stacks.model import RankStacks
from ddpdoctor.system.process_state import (
    ENDED,
    ProcessState,
    Turn,
    lacked,
    read_stat,
    read_state,
    read_turn,
)
from ddpdoctor.system.waiting import pause

PATIENCE = 3.0
"""Seconds that all ranks together are waited for."""

_ANSWERS = 0.7
"""Share of that for ranks to answer in, where py-spy may look into those that do not."""

_MOST = 3.0
"""Times as long at most for ranks that have no core to answer on."""

_ANSWERED = object()
"""In place of what an asking yields while it goes on, which is None."""

_POLLS = (0.001, 0.02)
"""Seconds between two looks whether ranks have answered: at first, and at most."""


def capture(
    run: Run,
    ranks: Collection[int] | None = None,
    patience: float = PATIENCE,
    *,
    native: bool = False,
) -> tuple[RankStacks, ...]:
    """The stacks of the ranks of the newest attempt, ascending by rank.

    Processes that torchrun started, and those that are in ``init_process_group``, are among them:
    a rank that never gets so far is one that somebody looks for. A rank that cannot be asked
    (on another host, dead) says so in its ``trouble``; one that does not answer, being stopped, is
    looked into by py-spy if that is there and may. Nothing is raised.

    Args:
        run: A snapshot of the run.
        ranks: Only these.
        patience: Seconds for all of it, part of them for py-spy to look into ranks that did not
            answer. With ``native``, py-spy gets so much time again.
        native: Also ask py-spy for native frames. It stops the rank for a second or two.
    """
    began = time.monotonic()
    here = namespace()
    sought = [target for target in _targets(run) if ranks is None or target.rank in ranks]
    for target in sought:
        target.look(here)
        if target.declared is not None and not target.trouble:
            target.asking = Asking(target.declared)
    limit = patience * (_ANSWERS if py_spy.find_py_spy() is not None else 1.0)
    waited = _ask(sought, limit)
    found = [target.stacks(waited) for target in sought]
    left = max(began + patience - time.monotonic(), patience * (1.0 - _ANSWERS))
    found = py_spy.read_silent(found, left)
    if native:
        found = py_spy.add_native(found, patience)
    return tuple(found)


def _ask(targets: Sequence[_Target], limit: float) -> float:
    """Ask all at once, until they have answered; for how long they were waited for.

    For ranks that have no core to answer on, that is longer than ``limit`` seconds.
    """
    began = time.monotonic()
    asked = [
        (target, target.asking.turns(), _turns(target))
        for target in targets
        if target.asking is not None
    ]
    poll, slowest = _POLLS
    until = limit
    while True:
        asked = [each for each in asked if next(each[1], _ANSWERED) is None]
        waited = time.monotonic() - began
        if asked and waited >= until:
            lost = max(_without_core(before, each, waited) for each, _, before in asked)
            until = min(limit + lost, _MOST * limit)
        if not asked or waited >= until:
            break
        pause(poll)
        poll = min(poll * 1.5, slowest)
    for _, turns, _ in asked:
        turns.close()
    return until


def _turns(target: _Target) -> dict[int, Turn]:
    """What the threads of a process that an answer hangs on have had of the cores."""
    declared = target.declared
    threads = (declared.thread, declared.main_thread) if declared is not None else ()
    found = {thread: read_turn(target.pid, thread) for thread in threads}
    return {thread: turn for thread, turn in found.items() if turn is not None}


def _without_core(before: dict[int, Turn], target: _Target, seconds: float) -> float:
    after = _turns(target)
    lost = [lacked(before[each], after[each], seconds) for each in before if each in after]
    return max(lost, default=0.0)


@dataclass
class _Target:
    """A process that is a rank, or is to become one."""

    rank: int
    restart: int
    pid: int
    host: str
    namespace: str
    declared: Declared | None
    trouble: str = ""
    state: ProcessState = field(default_factory=ProcessState)
    asking: Asking | None = None

    def look(self, here: str) -> None:
        """See from outside whether it can be asked."""
        if self.namespace and self.namespace != here:
            self.trouble = f"on another host or in another container: {self.host or 'unknown'}"
            return
        stat = read_stat(self.pid)
        reused = (
            self.declared is not None and stat is not None and stat.start != self.declared.start
        )
        if stat is None or reused or stat.letter in ENDED:
            self.trouble = "has ended"
            return
        self.state = read_state(self.pid)
        if self.declared is None:
            self.trouble = "takes no stack requests: not on Linux, or without a free signal"

    def stacks(self, waited: float) -> RankStacks:
        """What is known after so many seconds."""
        asking = self.asking
        found = RankStacks(
            self.rank, self.restart, self.pid, self.host, state=self.state, trouble=self.trouble
        )
        if asking is None:
            return found
        trouble = asking.trouble
        if not trouble and not asking.threads:
            waits = ", in disk sleep" if self.state.letter == "D" else ""
            trouble = f"did not answer within {waited:.3g} s{waits}"
        return replace(
            found,
            threads=asking.threads,
            gil_held=asking.gil_held,
            world_size=asking.world_size,
            trouble=trouble,
        )


def _targets(run: Run) -> list[_Target]:
    """The processes of the newest attempt, ascending by rank."""
    every = read_declared(run.path)
    by_pid = {(declared.namespace, declared.pid): declared for declared in every}
    attempt = max([run.restarts[-1], *(declared.restart for declared in every)])
    found: dict[int, _Target] = {}
    for declared in every:
        # Not yet a rank: its environment says which one it is to be.
        if declared.rank is not None and declared.restart == attempt:
            found[declared.rank] = _Target(
                declared.rank,
                attempt,
                declared.pid,
                declared.host,
                declared.namespace,
                declared,
            )
    for rank in run.attempt(attempt):
        target = _of_rank(rank, by_pid)
        if target is not None:
            found[rank.rank] = target
    return [found[number] for number in sorted(found)]


def _of_rank(rank: Rank, by_pid: dict[tuple[str, int], Declared]) -> _Target | None:
    pid = rank.status.pid if rank.status is not None else rank.opened.pid
    if not pid:
        return None
    place, host = rank.opened.namespace or "", rank.opened.host
    declared = by_pid.get((place, pid))
    if declared is None and not place:
        # Its journal has not been written yet.
        declared = next((each for (_, known), each in by_pid.items() if known == pid), None)
    if declared is not None:
        place, host = declared.namespace, declared.host
    return _Target(rank.rank, rank.restart, pid, host, place, declared)

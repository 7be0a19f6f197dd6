"""Capture the stacks of a live run's ranks, through the probe or py-spy."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ddpdoctor.run.names import namespace
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.stacks.asking import Asking, Declared, at, read_declared
from ddpdoctor.stacks.frames import is_ours
from ddpdoctor.stacks.rank_stacks import MAIN, Frame, RankStacks, Thread
from ddpdoctor.system.proc import ENDED, pause, read_stat
from ddpdoctor.system.process_activity import ProcessState, Turn, lacked, read_state, read_turn

# -- py-spy, if it is installed and has the permission (ptrace)


MISSING = "py-spy is not installed (pip install py-spy)"
FORBIDDEN = "py-spy may not look into the process (ptrace is not permitted)"

MAX_PROCESSES = 16  # Maximum number of processes that py-spy examines at once
_KILLED = 0.3  # Seconds to wait for a killed py-spy, which may be blocked in the kernel

_NOT_HELD = ("T", "t", "D")
"""States of a process that cannot be paused: it is stopped already, or does not react."""

_Dump = list[dict[str, Any]]


def find_py_spy() -> str | None:
    """Find the program beside this interpreter, or on ``PATH``."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_silent(stacks: Sequence[RankStacks], patience: float) -> list[RankStacks]:
    """Add stacks from py-spy for living processes that did not respond.

    No process is paused, and those that responded are left alone.

    Args:
        stacks: Stacks of processes of this and other hosts.
        patience: Seconds for all of them together.
    """
    silent = [
        number
        for number, each in enumerate(stacks)
        if not each.threads and each.state.letter and each.state.letter not in ENDED
    ]
    found = list(stacks)
    for number, (dump, why) in _dump_each(stacks, silent, ["--nonblocking"], patience).items():
        each = stacks[number]
        threads = _threads(dump, each.pid) if dump is not None else ()
        if any(thread.name == MAIN for thread in threads):
            note = f"{each.trouble}; its stack was read by py-spy"
            found[number] = replace(each, threads=threads, trouble="", note=note)
        else:
            found[number] = replace(each, note=why or "py-spy saw no main thread")
    return found


def add_native(
    stacks: Sequence[RankStacks], patience: float, ranks: Collection[int] | None = None
) -> list[RankStacks]:
    """Add native frames from py-spy, or a note why they are missing.

    Pauses each process for a second or two, so it is for requested or hopeless ranks only.

    Args:
        stacks: Stacks of processes of this host. Those without a stack are left unchanged.
        patience: Seconds for all of them together.
        ranks: Only these ranks.
    """
    wanted = [
        number
        for number, each in enumerate(stacks)
        if each.threads
        and each.state.letter not in _NOT_HELD
        and (ranks is None or each.rank in ranks)
    ]
    found = list(stacks)
    for number, (dump, why) in _dump_each(stacks, wanted, ["--native"], patience).items():
        each = stacks[number]
        frames = native_frames(dump) if dump is not None else ()
        note = f"no native frames: {why}" if why else each.note
        found[number] = replace(each, native=frames, note=note)
    return found


def _dump_each(
    stacks: Sequence[RankStacks], numbers: Sequence[int], how: list[str], patience: float
) -> dict[int, tuple[_Dump | None, str]]:
    """Run py-spy on some of these. Return its output or the reason why there is none."""
    program = find_py_spy()
    if program is None:
        return dict.fromkeys(numbers, (None, MISSING))
    deadline = time.monotonic() + patience
    started: dict[int, subprocess.Popen[str]] = {}
    for number in numbers[:MAX_PROCESSES]:
        with contextlib.suppress(OSError):
            started[number] = _start(program, stacks[number].pid, how)
    outcomes: dict[int, tuple[_Dump | None, str]] = dict.fromkeys(
        numbers, (None, f"only {MAX_PROCESSES} processes were looked into")
    )
    for number, process in started.items():
        outcomes[number] = _outcome(process, max(deadline - time.monotonic(), 0.05), patience)
    return outcomes


def _start(program: str, pid: int, how: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, "dump", *how, "--json", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )


def _outcome(
    process: subprocess.Popen[str], left: float, patience: float
) -> tuple[_Dump | None, str]:
    try:
        out, errors = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        # The kernel resumes the process when its tracer ends.
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED)
        return None, f"py-spy took over {patience:.1f} s"
    # The exit status may be missing, because the supervisor reaps all its children.
    if not out.strip():
        return None, _reason(errors)
    try:
        return _checked(json.loads(out)), ""
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None, "the output of this py-spy is not understood"


def _reason(errors: str) -> str:
    if "ermission" in errors or "not permitted" in errors:
        return FORBIDDEN
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"py-spy says: {lines[0][:100]}" if lines else "py-spy failed without a message"


def _checked(dump: Any) -> _Dump:
    """Check the structure of a dump.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It is no dump.
    """
    for thread in dump:
        if not isinstance(thread["pid"], int):
            raise TypeError("no pid")
        for frame in thread["frames"]:
            frame["name"].startswith("")
            frame["filename"].startswith("")
            int(frame["line"])
    return list(dump)


def _is_main(thread: dict[str, Any]) -> bool:
    native = thread.get("os_thread_id")
    return native == thread["pid"] if native else thread.get("thread_name") == MAIN


def _threads(dump: _Dump, pid: int) -> tuple[Thread, ...]:
    """Return the Python stacks of a dump without ddpdoctor's threads, the main thread first."""
    try:
        cwd = os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        cwd = ""
    found = []
    for thread in dump:
        frames = tuple(
            Frame(at(each["filename"], cwd), int(each["line"]), each["name"].rpartition(".")[2])
            for each in reversed(thread["frames"])
            if not each.get("module")
        )
        main = _is_main(thread)
        if frames and (main or not is_ours(frames)):
            name = MAIN if main else str(thread.get("thread_name") or "")
            found.append(Thread(int(thread.get("thread_id") or 0), name, False, frames))
    return tuple(sorted(found, key=lambda each: each.name != MAIN))


def native_frames(dump: _Dump) -> tuple[str, ...]:
    """Return the native frames below the main thread's innermost Python frame, outermost first."""
    main = next((thread for thread in dump if _is_main(thread)), None)
    found: list[str] = []
    for frame in main["frames"] if main is not None else ():
        if not frame.get("module"):
            # The innermost Python frame.
            break
        # An address means nothing, and differs between ranks.
        name = "?" if frame["name"].startswith("0x") else frame["name"]
        found.append(f"{name} ({os.path.basename(frame['module'])})")
    return tuple(reversed(found))


# -- All ranks of this host, in parallel


PATIENCE = 3.0  # Seconds to wait for all ranks together
_ANSWERS = 0.7  # Share of that for responses, if py-spy can examine the ranks that do not respond
_MAX_STRETCH = 3.0  # Maximum factor by which the wait grows for ranks that lack a core
_ANSWERED = object()  # Marks an exhausted request. A pending one yields None.

_POLLS = (0.001, 0.02)
"""Seconds between two polls for responses: the first interval, and the longest."""


def capture(
    run: Run,
    ranks: Collection[int] | None = None,
    patience: float = PATIENCE,
    *,
    native: bool = False,
) -> tuple[RankStacks, ...]:
    """Return the stacks of the newest attempt's ranks, ascending by rank. Never raise.

    This includes processes that torchrun started but that have not become ranks, for example
    because they hang in ``init_process_group``. A rank that cannot be asked (on another host, dead)
    has a ``trouble``. py-spy examines ranks that do not respond, if it can.

    Args:
        run: A snapshot of the run.
        ranks: Only these ranks.
        patience: Seconds in total, including py-spy on ranks that do not respond. With ``native``,
            py-spy gets the same time again.
        native: Also get native frames from py-spy, which pauses each rank for a second or two.
    """
    began = time.monotonic()
    here = namespace()
    sought = [target for target in _targets(run) if ranks is None or target.rank in ranks]
    for target in sought:
        target.look(here)
        if target.declared is not None and not target.trouble:
            target.asking = Asking(target.declared)
    limit = patience * (_ANSWERS if find_py_spy() is not None else 1.0)
    waited = _ask(sought, limit)
    found = [target.stacks(waited) for target in sought]
    left = max(began + patience - time.monotonic(), patience * (1.0 - _ANSWERS))
    found = read_silent(found, left)
    if native:
        found = add_native(found, patience)
    return tuple(found)


def _ask(targets: Sequence[_Target], limit: float) -> float:
    """Ask all processes at once. Return the seconds that they were given.

    These are more than ``limit`` if ranks have no core on which to respond.
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
            until = min(limit + lost, _MAX_STRETCH * limit)
        if not asked or waited >= until:
            break
        pause(poll)
        poll = min(poll * 1.5, slowest)
    for _, turns, _ in asked:
        turns.close()
    return until


def _turns(target: _Target) -> dict[int, Turn]:
    """Return the CPU time used by the threads whose response we are waiting for."""
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
    """A process that is a rank, or will become one."""

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
        """Check from outside whether it can be asked."""
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
        """Return the result after so many seconds."""
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
    """Return the processes of the newest attempt, ascending by rank."""
    every = read_declared(run.path)
    by_pid = {(declared.namespace, declared.pid): declared for declared in every}
    attempt = max([run.restarts[-1], *(declared.restart for declared in every)])
    found: dict[int, _Target] = {}
    for declared in every:
        # Not yet a rank. Its environment says which one it will be.
        if declared.rank is not None and declared.restart == attempt:
            found[declared.rank] = _Target(
                declared.rank, attempt, declared.pid, declared.host, declared.namespace, declared
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
    if rank.elsewhere:
        return _Target(rank.rank, rank.restart, pid, host, place or "@", None)
    declared = by_pid.get((place, pid))
    if declared is None and not place:
        # Its journal is not written yet.
        declared = next((each for (_, known), each in by_pid.items() if known == pid), None)
    if declared is not None:
        place, host = declared.namespace, declared.host
    return _Target(rank.rank, rank.restart, pid, host, place, declared)

"""A rank whose script is over and whose process does not end: what it waits for."""

from __future__ import annotations

from ddpdoctor.analysis.hang_snapshot import RankState
from ddpdoctor.analysis.places import brief
from ddpdoctor.analysis.process_activity import computes, doing, waits_for_network, works
from ddpdoctor.analysis.rank_activity import Activity
from ddpdoctor.core.finding import Location, Severity
from ddpdoctor.stacks.model import ENDING, Thread
from ddpdoctor.stacks.user_frames import innermost, is_ours
from ddpdoctor.system.process_state import ENDED

PATIENCE = 300
"""Seconds that a rank may work at its end before that is said: results are saved, logs are sent."""

_JOINS_THREADS = ("threading.py", "_shutdown")
_JOINS_CHILDREN = ("multiprocessing/util.py", "_exit_function")
"""File and function that the interpreter calls at its end, by which it waits for others."""

_AT_THE_END = "at the end of the script"
NEVER_ENDS = "Python's own shutdown does not come to its end"

_THREADS = (
    "Let the thread end: an event that it looks at, a timeout on what it waits for, a `join` or "
    "`shutdown` before the end. Or start it with daemon=True, if it may be cut off."
)
_CHILDREN = (
    "Let the processes that the script started end, and `join` them before the end; those with "
    "daemon=True are ended with the script."
)
_CALLED = (
    "Something registered it for the end (`atexit`, `__del__`, `weakref.finalize`): call it in the "
    "script, with a limit on its time."
)
_LET_GO = (
    "Let go of what waits there while Python still runs: `del` the DDP model and the optimizer, "
    "`gc.collect()`, then `dist.destroy_process_group()`, as the last lines on every rank."
)


def exit_wait(rank: RankState) -> Activity | None:
    """What keeps the process of a rank that has come to the end of its script.

    None if it has not, or if it is at work there and has not been for long.

    The interpreter first waits for threads that are no daemons, then calls what was registered with
    ``atexit``, the end of multiprocessing among it, and then takes everything down.
    """
    if rank.dead_for is not None or any(letter in ENDED for letter in rank.letters):
        return None
    if rank.seconds < PATIENCE and (works(rank) or waits_for_network(rank)):
        return None
    outer = rank.frames[0] if rank.frames else None
    at = (outer.path, outer.function) if outer is not None else ("", "")
    since = f"{_AT_THE_END} for {rank.seconds} s"
    if at[0].endswith(_JOINS_THREADS[0]) and at[1] == _JOINS_THREADS[1]:
        return _threads(rank, since)
    if at[0].endswith(_JOINS_CHILDREN[0]) and at[1] == _JOINS_CHILDREN[1]:
        return _children(rank, since)
    stacks = rank.stacks
    shutting_down = stacks is not None and ENDING in (stacks.trouble + stacks.note)
    if not rank.looked_at or not (rank.ended or shutting_down):
        return None
    if outer is None:
        return _native(rank, f"is {since}, where {NEVER_ENDS}", None)
    frame = innermost(rank.frames) or rank.frames[-1]
    place = Location(frame.path, frame.line)
    called = f"`{frame.function.rpartition('.')[2]}` {brief(place)}"
    if shutting_down:
        return _native(rank, f"is {since}, where {NEVER_ENDS}, below {called}", place)
    return _found(f"is {since}, in {called}", place, _CALLED)


def _threads(rank: RankState, since: str) -> Activity:
    threads = rank.stacks.threads if rank.stacks is not None else ()
    others = [each for each in threads if each.awaited and not is_ours(each.frames)]
    thread = next((each for each in others if innermost(each.frames) is not None), None)
    thread = thread or (others[0] if others else None)
    if thread is None:
        return _found(f"is {since}, waiting for a thread", None, _THREADS)
    place = _site(thread)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    where = f", which is at {brief(place)}" if place is not None else ""
    return _found(
        f"is {since}, waiting for the thread {thread.name!r}{more}{where}",
        place,
        _THREADS,
        tuple(f"thread {each.name!r} is at {brief(_site(each))}" for each in others[1:5]),
    )


def _site(thread: Thread) -> Location | None:
    frame = innermost(thread.frames) or (thread.frames[-1] if thread.frames else None)
    return Location(frame.path, frame.line) if frame is not None else None


def _children(rank: RankState, since: str) -> Activity:
    children = [
        child
        for child in (rank.stacks.state.children if rank.stacks is not None else ())
        if "resource_tracker" not in child.command and child.letter not in ENDED
    ]
    who = f"the child process {children[0].pid}" if children else "a child process"
    who += f" and {len(children) - 1} more" if len(children) > 1 else ""
    return _found(
        f"is {since}, waiting for {who}",
        None,
        _CHILDREN,
        tuple(f"child {each.pid}, {each.letter}: {each.command}" for each in children[:4]),
    )


def _native(rank: RankState, text: str, place: Location | None) -> Activity:
    severity = Severity.WARNING if computes(rank) else Severity.ERROR
    return Activity("DDP815", f"{text} ({doing(rank)})", severity, place, _LET_GO)


def _found(text: str, place: Location | None, fix: str, evidence: tuple[str, ...] = ()) -> Activity:
    # It may be sending what was to be sent at the end.
    return Activity("DDP815", text, Severity.WARNING, place, fix, evidence)

"""What a rank does instead of the call that the others wait in, or at the end of its process."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.opening import integer
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs.hang_snapshot import BUSY, RankState
from ddpdoctor.diagnose.hangs.process_activity import (
    MOVING,
    STUCK_GPU,
    computes,
    doing,
    gpu_holds_host,
    gpu_work,
    is_seen,
    percent,
    shown_bytes,
    waits_for_network,
    workers_activity,
    workers_of,
    works,
)
from ddpdoctor.diagnose.source_files import brief, constant_while, quoted, statement
from ddpdoctor.stacks.frames import innermost, is_ours, is_user_path
from ddpdoctor.stacks.rank_stacks import ENDING, Frame, Thread, from_record
from ddpdoctor.system.proc import ENDED

# -- what a rank does instead of what the others wait for: read off its process and its stack


NOTICED = 5.0
"""Seconds within which a launcher notices that a rank has died."""

_LOADER = "torch/utils/data/dataloader.py"
_WORKER = "torch/utils/data/_utils/worker.py"
_GIVE_AN_END = "Nothing in the loop changes what its condition tests: give it a way to end."
_PROMPT = ("input(", "pdb.", "breakpoint(", "sys.stdin", "getpass(")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py", "/ipdb/", "/pudb/")
_JOINING = ("init_process_group", "new_group", "rendezvous", "_store_based_barrier")


@dataclass(frozen=True)
class Activity:
    """What a rank does.

    Attributes:
        code: The rule that it is the business of.
        text: What it does, as the end of a sentence that begins with the rank:
            ``is stopped (SIGSTOP)``.
        severity: An error if it does not go on by itself.
        location: Where.
        fix: What to do about it.
        evidence: More facts.
    """

    code: str
    text: str
    severity: Severity
    location: Location | None
    fix: str = ""
    evidence: tuple[str, ...] = ()


def state_of(rank: RankState) -> Activity | None:
    """What its process's state shows, whatever its code does; None if it may simply be at work."""
    letters = rank.letters
    unusual = letters == "DD" or "T" in letters or "t" in letters
    if rank.ended or not (unusual or rank.dead_for is not None or rank.silent):
        # The usual case, for which no stack needs to be read.
        return None
    place = rank.site
    if rank.dead_for is not None:
        return _dead(rank, place, rank.dead_for)
    at = f"at {quoted(place)}" if rank.frame is not None else f"last seen at {quoted(place)}"
    since = f"for {rank.seconds} s"
    if letters and set(letters) == {"T"}:
        return Activity(
            "DDP805",
            f"is stopped (SIGSTOP, SIGTSTP or Ctrl-Z) {since}, {at}",
            Severity.ERROR,
            place,
            f"Continue it with `kill -CONT {rank.record.get('pid')}`, and find out who stopped it.",
        )
    if letters and set(letters) == {"t"}:
        return Activity(
            "DDP805",
            f"is held by a tracer (gdb, strace) {since}, {at}",
            Severity.WARNING,
            place,
            "Let the tracer go on, or detach it.",
        )
    if letters == "DD":
        return _waits_for_device(rank, place, since, at)
    if rank.silent and rank.looked_at and _holds_the_gil(rank):
        return _native(rank, place, since, at)
    return None


def _dead(rank: RankState, place: Location | None, seconds: float) -> Activity | None:
    """Its process is gone, and whoever started it goes on all the same."""
    if seconds < NOTICED or rank.record.get("launcher_works"):
        return None
    return Activity(
        "DDP812",
        f"died at {brief(place)} and its launcher has not noticed",
        Severity.ERROR,
        place,
        "Start the ranks with torchrun, which ends a job when a rank dies; or join the "
        "processes and look at their exit codes.",
    )


def _waits_for_device(rank: RankState, place: Location | None, since: str, at: str) -> Activity:
    moved = rank.activity("disk")
    stacks = rank.stacks
    where = f" in {stacks.state.wchan}" if stacks is not None and stacks.state.wchan else ""
    return Activity(
        "DDP806",
        f"waits for a disk or device{where} {since}, {at}",
        Severity.WARNING if moved >= MOVING else Severity.ERROR,
        place,
        "Look at the file system that it reads or writes (a hanging NFS server, a full or "
        "failing disk): `dmesg`, `df`.",
        (f"moved {shown_bytes(moved)} to or from a device within a second",),
    )


def _holds_the_gil(rank: RankState) -> bool:
    """Whether a thread of ours was seen to wait for the GIL while nothing kept it from a core.

    A process that gets no core is as silent.
    """
    return rank.stacks is not None and rank.stacks.gil_held


def _native(rank: RankState, place: Location | None, since: str, at: str) -> Activity:
    cpu = rank.activity("cpu")
    doing = f"busy, {percent(cpu)} of a core" if rank.busy >= BUSY else "idle"
    return Activity(
        "DDP810",
        f"holds the GIL in native code {since}, {at} ({doing}), so that none of its Python threads "
        "can run",
        Severity.ERROR,
        place,
        "The extension that is called there has to release the GIL while it works or waits "
        "(Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release, ctypes.CDLL not PyDLL).",
        ()
        if rank.stacks is None or rank.stacks.native
        else (
            f"its native frames: `ddpdoctor stacks --native --rank {rank.rank}` (by py-spy, which "
            "holds it for a second or two)",
        ),
    )


def activity_of(rank: RankState, starting: bool) -> Activity:
    """What a rank does that is not in a collective.

    Args:
        rank: The rank.
        starting: Whether no rank has closed its first step yet.
    """
    known = state_of(rank)
    if known is not None:
        return known
    if rank.ended or rank.dead_for is not None:
        text = "has ended" if rank.ended else "has died"
        return Activity("DDP802", text, Severity.ERROR, rank.site)
    duration = f" for {rank.seconds} s" if rank.seconds else ""
    if _prompts(rank, rank.frames):
        return _prompt(rank, starting, duration)
    loop = _loop(rank)
    if any(_LOADER in frame.path for frame in rank.frames[-12:]):
        # Below the loader, and not the loop around it that draws the batches.
        inner = loop if loop is not None and _inside_loader(rank) else None
        return inner or _loop_of_worker(rank) or _loader(rank, rank.site, duration)
    return (
        _joining(rank)
        or (_starting(rank, duration) if starting and not rank.step else None)
        or _held(rank, duration)
        or loop
        or Activity(
            "DDP802",
            f"is in {_place(rank)}, {doing(rank)}{duration}",
            Severity.WARNING if works(rank) else Severity.ERROR,
            rank.site,
        )
    )


def _held(rank: RankState, duration: str) -> Activity | None:
    """Its host waits for its GPU, wherever that is: what the GPU works at is to blame."""
    if not gpu_holds_host(rank):
        return None
    text, place = gpu_work(rank)
    return Activity(
        "DDP802",
        f"waits{duration} at {quoted(rank.site)} for its GPU, which is still at {text}",
        Severity.WARNING,
        place or rank.site,
        STUCK_GPU,
    )


def last_call(rank: RankState) -> Activity:
    """What it called last, which is all that a file of torch's Flight Recorder says."""
    last = rank.flight[-1] if rank.flight else None
    if last is None:
        return Activity("DDP802", "called no collective", Severity.ERROR, None)
    text = f"last called {last.what} at {quoted(last.site)}"
    return Activity("DDP802", text, Severity.ERROR, last.site)


def _prompt(rank: RankState, starting: bool, duration: str) -> Activity:
    """It waits for somebody at the keyboard, or in pdb."""
    debugger = any(part in frame.path for frame in rank.frames for part in _DEBUGGERS)
    # Before the first step somebody may be asked at the terminal, and look for the answer.
    asked = starting and not rank.step and not debugger and is_seen(rank, "terminal")
    return Activity(
        "DDP808",
        f"waits for {'a command in the debugger (pdb)' if debugger else 'input'} at "
        f"{quoted(rank.site)}{duration}",
        Severity.INFO if asked else Severity.ERROR,
        rank.site,
        "Take it out, or use `breakpoint()` with the debugger attached: then the ranks wait "
        "for each other without timing out."
        if debugger
        else "Read answers on no rank, or on rank 0 and broadcast them; a job has no keyboard.",
    )


def _joining(rank: RankState) -> Activity | None:
    """It waits for other ranks in ``init_process_group`` and the like."""
    if rank.joined and integer(rank.record, "world_size") == 1:
        return None
    joining = next((f.function for f in reversed(rank.frames) if f.function in _JOINING), None)
    if joining is None and (not rank.frames or rank.joined or not _in_store(rank.frames)):
        return None
    where = f"{joining or 'rendezvous'} at {quoted(rank.site)}"
    return Activity(
        "DDP813", f"waits in {where} for ranks that have not come", Severity.ERROR, rank.site
    )


def _starting(rank: RankState, duration: str) -> Activity | None:
    """It is at work before its first step, or waits for the network there."""
    working = works(rank)
    if not working and not is_seen(rank, "network"):
        return None
    waits = not working and not _went_on(rank)
    action = doing(rank)
    if waits:
        action = f"waiting for the network, from which nothing comes{',' if duration else ''}"
    return Activity(
        "DDP811",
        f"is still starting up: in {_place(rank)}, {action}{duration}",
        Severity.WARNING,
        rank.site,
        "Fetch data and weights before the job starts, and give each request a timeout."
        if waits
        else "",
    )


def _place(rank: RankState) -> str:
    """``save_checkpoint` train.py:88``, or the line's own code where it stands in no function."""
    frame, site = rank.frame, rank.site
    if frame is None or site is None:
        return f"phase {rank.phase}, last seen at {brief(site)}" if site else "an unknown place"
    name = frame.function.rpartition(".")[2]
    if name in ("<module>", "main", "train", "<lambda>"):
        return quoted(site)
    return f"`{name}` {brief(site)}"


def came_since(rank: RankState) -> bool:
    """Whether it was seen to join the others at the second of two looks."""
    return any(frame.function in _JOINING for frame in rank.later_frames)


def _went_on(rank: RankState) -> bool:
    """Whether it was at another line of the job at the second of two looks."""
    later = innermost(rank.later_frames)
    return later is not None and rank.frame is not None and later != rank.frame


def _loop(rank: RankState) -> Activity | None:
    """An endless loop: at two moments within one ``while`` that cannot end."""
    found = _endless(rank.frames, rank.later_frames) if computes(rank) else None
    if found is None:
        return None
    place, lines = found
    return Activity(
        "DDP807",
        f"runs in an endless loop, {quoted(place)}, for {rank.seconds} s "
        f"({percent(rank.activity('cpu'))} of a core)",
        Severity.ERROR,
        place,
        _GIVE_AN_END,
        (lines,),
    )


def _endless(before: tuple[Frame, ...], after: tuple[Frame, ...]) -> tuple[Location, str] | None:
    """The loop that cannot end in which a stack is at two moments, and at which lines."""
    frame = innermost(before)
    head = constant_while(frame.path, frame.line) if frame is not None else None
    if frame is None or head is None:
        return None
    later = [each for each in after if each.path == frame.path]
    if not any(constant_while(each.path, each.line) == head for each in later):
        return None
    lines = sorted({frame.line, *(each.line for each in later if each.function == frame.function)})
    return Location(frame.path, head), f"seen at lines {', '.join(map(str, lines))} within a second"


def _inside_loader(rank: RankState) -> bool:
    """Whether the user's code that it is in was called by the loader: a data set, a collate."""
    paths = [frame.path for frame in rank.frames]
    loader = max(at for at, path in enumerate(paths) if _LOADER in path)
    return rank.frame is not None and any(is_user_path(path) for path in paths[loader + 1 :])


def _loop_of_worker(rank: RankState) -> Activity | None:
    """An endless loop in a worker of its DataLoader, where py-spy saw the worker's stack."""
    for seen in rank.record.get("workers") or ():
        stacks = [from_record(each) for each in seen if isinstance(each, dict)]
        mains = [each.main.frames if each.main is not None else () for each in stacks]
        if len(mains) == 2 and all(any(_WORKER in f.path for f in frames) for frames in mains):
            found = _endless(mains[0], mains[1])
            if found is not None:
                place, lines = found
                return Activity(
                    "DDP807",
                    f"waits for the worker {stacks[0].pid} of its DataLoader, which runs in an "
                    f"endless loop, {quoted(place)}, for {rank.seconds} s",
                    Severity.ERROR,
                    place,
                    _GIVE_AN_END,
                    (lines,),
                )
    return None


def _prompts(rank: RankState, frames: tuple[Frame, ...]) -> bool:
    if any(part in frame.path for frame in frames[-6:] for part in _DEBUGGERS):
        return True
    last = frames[-1] if frames else None
    asks = (
        last is not None
        and is_user_path(last.path)
        and any(word in statement(last.path, last.line) for word in _PROMPT)
    )
    return (is_seen(rank, "input") and not computes(rank)) or (asks and not works(rank))


def _in_store(frames: tuple[Frame, ...]) -> bool:
    return any("torch/distributed/" in frame.path for frame in frames[-6:])


def _loader(rank: RankState, place: Location | None, since: str) -> Activity:
    """It waits for a DataLoader, with or without workers."""
    children = workers_of(rank)
    waits_for_workers = any(
        frame.function in ("_try_get_data", "_get_data") for frame in rank.frames[-12:]
    )
    if not waits_for_workers:
        working = works(rank)
        return Activity(
            "DDP809",
            f"loads its data itself at {_place(rank)}, {doing(rank)}{since}",
            Severity.WARNING if working else Severity.ERROR,
            place,
        )
    workers = f"the {'worker' if len(children) == 1 else f'{len(children)} workers'}"
    what, severity, fix = workers_activity(rank, children)
    return Activity(
        "DDP809",
        f"waits for {workers} of its DataLoader at {quoted(place)}{since}, {what}",
        severity,
        place,
        fix,
        tuple(f"worker {each.pid} is in state {each.letter}" for each in children[:6]),
    )


# -- A rank whose script is over and whose process does not end: what it waits for


EXIT_PATIENCE = 300
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
    if rank.seconds < EXIT_PATIENCE and (works(rank) or waits_for_network(rank)):
        return None
    outer = rank.frames[0] if rank.frames else None
    at = (outer.path, outer.function) if outer is not None else ("", "")
    since = f"{_AT_THE_END} for {rank.seconds} s"
    if at[0].endswith(_JOINS_THREADS[0]) and at[1] == _JOINS_THREADS[1]:
        return _joined_threads(rank, since)
    if at[0].endswith(_JOINS_CHILDREN[0]) and at[1] == _JOINS_CHILDREN[1]:
        return _joined_children(rank, since)
    stacks = rank.stacks
    shutting_down = stacks is not None and ENDING in (stacks.trouble + stacks.note)
    if not rank.looked_at or not (rank.ended or shutting_down):
        return None
    if outer is None:
        return _native_exit_wait(rank, f"is {since}, where {NEVER_ENDS}", None)
    frame = innermost(rank.frames) or rank.frames[-1]
    place = Location(frame.path, frame.line)
    called = f"`{frame.function.rpartition('.')[2]}` {brief(place)}"
    if shutting_down:
        return _native_exit_wait(rank, f"is {since}, where {NEVER_ENDS}, below {called}", place)
    return _exit_activity(f"is {since}, in {called}", place, _CALLED)


def _joined_threads(rank: RankState, since: str) -> Activity:
    threads = rank.stacks.threads if rank.stacks is not None else ()
    others = [each for each in threads if each.awaited and not is_ours(each.frames)]
    thread = next((each for each in others if innermost(each.frames) is not None), None)
    thread = thread or (others[0] if others else None)
    if thread is None:
        return _exit_activity(f"is {since}, waiting for a thread", None, _THREADS)
    place = _thread_site(thread)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    where = f", which is at {brief(place)}" if place is not None else ""
    return _exit_activity(
        f"is {since}, waiting for the thread {thread.name!r}{more}{where}",
        place,
        _THREADS,
        tuple(f"thread {each.name!r} is at {brief(_thread_site(each))}" for each in others[1:5]),
    )


def _thread_site(thread: Thread) -> Location | None:
    frame = innermost(thread.frames) or (thread.frames[-1] if thread.frames else None)
    return Location(frame.path, frame.line) if frame is not None else None


def _joined_children(rank: RankState, since: str) -> Activity:
    children = [
        child
        for child in (rank.stacks.state.children if rank.stacks is not None else ())
        if "resource_tracker" not in child.command and child.letter not in ENDED
    ]
    who = f"the child process {children[0].pid}" if children else "a child process"
    who += f" and {len(children) - 1} more" if len(children) > 1 else ""
    return _exit_activity(
        f"is {since}, waiting for {who}",
        None,
        _CHILDREN,
        tuple(f"child {each.pid}, {each.letter}: {each.command}" for each in children[:4]),
    )


def _native_exit_wait(rank: RankState, text: str, place: Location | None) -> Activity:
    severity = Severity.WARNING if computes(rank) else Severity.ERROR
    return Activity("DDP815", f"{text} ({doing(rank)})", severity, place, _LET_GO)


def _exit_activity(
    text: str, place: Location | None, fix: str, evidence: tuple[str, ...] = ()
) -> Activity:
    # It may be sending what was to be sent at the end.
    return Activity("DDP815", text, Severity.WARNING, place, fix, evidence)

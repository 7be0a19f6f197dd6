"""Describe the activity of a rank that did not join the others' collective, or does not exit."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.diagnose.hangs.process_activity import (
    MIN_MOVED,
    STUCK_GPU,
    computes,
    doing,
    gpu_holds_host,
    gpu_work,
    percent,
    shown_bytes,
    waits_for_network,
    workers_activity,
    workers_of,
    works,
)
from ddpdoctor.diagnose.source_files import brief, constant_while, quoted, statement
from ddpdoctor.run.records.supervisor import Frame, Thread
from ddpdoctor.stacks.frames import ENDING, innermost, is_ours, is_user_path
from ddpdoctor.system.proc import ENDED
from ddpdoctor.system.process_activity import BUSY

LAUNCHER_TIMEOUT = 5.0  # Maximum seconds within which a launcher notices a dead rank

_LOADER = "torch/utils/data/dataloader.py"
_WORKER = "torch/utils/data/_utils/worker.py"
_GIVE_AN_END = "Nothing in the loop changes what its condition tests: give it a way to end."
_PROMPT = ("input(", "pdb.", "breakpoint(", "sys.stdin", "getpass(")
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/cmd.py", "/ipdb/", "/pudb/")
_JOINING = ("init_process_group", "new_group", "rendezvous", "_store_based_barrier")


@dataclass(frozen=True)
class Activity:
    """The activity of a rank."""

    code: str
    text: str  # The end of a sentence that begins with the rank: ``is stopped (SIGSTOP)``
    severity: Severity  # An error if the activity does not end without help
    location: Location | None
    fix: str = ""
    evidence: tuple[str, ...] = ()


def state_of(rank: RankState) -> Activity | None:
    """Return the activity that its process state shows. None if it may simply be at work."""
    letters = rank.activity.letters
    if rank.evidence.ended:
        return None
    if rank.dead_for is not None:
        return _dead(rank, rank.dead_for)
    if not (letters == "DD" or set(letters) in ({"T"}, {"t"}) or rank.silent):
        # The usual case, for which no stack needs to be read.
        return None
    at = (
        f"at {quoted(rank.site)}" if rank.frame is not None else f"last seen at {quoted(rank.site)}"
    )
    since = f"for {rank.seconds} s"
    if set(letters) == {"T"}:
        return Activity(
            "DDP805",
            f"has been stopped (SIGSTOP, SIGTSTP or Ctrl-Z) {since}, {at}",
            Severity.ERROR,
            rank.site,
            f"Continue it with `kill -CONT {rank.evidence.pid}`, and find out who stopped it.",
        )
    if set(letters) == {"t"}:
        return Activity(
            "DDP805",
            f"has been held by a tracer (gdb, strace) {since}, {at}",
            Severity.WARNING,
            rank.site,
            "Let the tracer go on, or detach it.",
        )
    if letters == "DD":
        moved, wchan = rank.activity.disk, rank.stacks.state.wchan if rank.stacks else ""
        return Activity(
            "DDP806",
            f"waits for a disk or device{f' in {wchan}' if wchan else ''} {since}, {at}",
            Severity.WARNING if moved >= MIN_MOVED else Severity.ERROR,
            rank.site,
            "Look at the file system that it reads or writes (a hanging NFS server, a full or "
            "failing disk): `dmesg`, `df`.",
            (f"moved {shown_bytes(moved)} to or from a device within a second",),
        )
    # A process without a core is as silent as one whose GIL is held.
    if rank.silent and rank.watched and rank.stacks is not None and rank.stacks.gil_held:
        return _holds_the_gil(rank, f"{since}, {at}", rank.stacks.native)
    return None


def _dead(rank: RankState, seconds: float) -> Activity | None:
    """Describe a rank whose process has ended while its launcher continues."""
    if seconds < LAUNCHER_TIMEOUT or rank.evidence.launcher_works:
        return None
    return Activity(
        "DDP812",
        f"died at {brief(rank.site)} and its launcher has not noticed",
        Severity.ERROR,
        rank.site,
        "Start the ranks with torchrun, which ends a job when a rank dies; or join the "
        "processes and check their exit codes.",
    )


def _holds_the_gil(rank: RankState, where: str, native: tuple[str, ...]) -> Activity:
    busy = f"busy, {percent(rank.activity.cpu)} of a core" if rank.busy >= BUSY else "idle"
    look = (
        f"its native frames: `ddpdoctor stacks --native --rank {rank.rank}` (by py-spy, which "
        "holds it for a second or two)"
    )
    return Activity(
        "DDP810",
        f"holds the GIL in native code {where} ({busy}), so that none of its Python threads can "
        "run",
        Severity.ERROR,
        rank.site,
        "The extension that is called there has to release the GIL while it works or waits "
        "(Py_BEGIN_ALLOW_THREADS, pybind11's gil_scoped_release, ctypes.CDLL not PyDLL).",
        () if native else (look,),
    )


def activity_of(rank: RankState, starting: bool) -> Activity:
    """Return the activity of a rank outside of collectives. ``starting`` before any closed step."""
    known = state_of(rank)
    if known is not None:
        return known
    if rank.evidence.ended or rank.dead_for is not None:
        text = "has ended" if rank.evidence.ended else "has died"
        return Activity("DDP802", text, Severity.ERROR, rank.site)
    duration = f" for {rank.seconds} s" if rank.seconds else ""
    if _prompts(rank):
        return _prompt(rank, starting, duration)
    loop = _loop(rank)
    if any(_LOADER in frame.path for frame in rank.frames[-12:]):
        # Find a loop inside the loader, not the loop that draws the batches.
        inner = loop if loop is not None and _inside_loader(rank) else None
        return inner or _loop_of_worker(rank) or _loader(rank, duration)
    starts = _starting(rank, duration) if starting and not rank.step else None
    return (
        _joining(rank)
        or starts
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
    """Describe a host that waits for its GPU. The GPU's work is to blame, not the host's line."""
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
    """Describe its last call, because a Flight Recorder's file shows nothing else."""
    if not rank.flight:
        return Activity("DDP802", "called no collective", Severity.ERROR, None)
    last = rank.flight[-1]
    text = f"last called {last.what} at {quoted(last.site)}"
    return Activity("DDP802", text, Severity.ERROR, last.site)


def _prompts(rank: RankState) -> bool:
    """Return whether the rank waits for keyboard input or in pdb."""
    frames = rank.frames
    if any(part in frame.path for frame in frames[-6:] for part in _DEBUGGERS):
        return True
    if rank.activity.input and not computes(rank):
        return True
    if not frames or works(rank) or not is_user_path(frames[-1].path):
        return False
    return any(word in statement(frames[-1].path, frames[-1].line) for word in _PROMPT)


def _prompt(rank: RankState, starting: bool, duration: str) -> Activity:
    debugger = any(part in frame.path for frame in rank.frames for part in _DEBUGGERS)
    # Before the first step, the user may be about to answer a question at the terminal.
    asked = starting and not rank.step and not debugger and rank.activity.terminal
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
    """Describe a wait for other ranks in ``init_process_group`` and the like."""
    if rank.joined and rank.evidence.world_size == 1:
        return None
    joining = next((f.function for f in reversed(rank.frames) if f.function in _JOINING), None)
    in_store = any("torch/distributed/" in frame.path for frame in rank.frames[-6:])
    if joining is None and (rank.joined or not in_store):
        return None
    where = f"{joining or 'rendezvous'} at {quoted(rank.site)}"
    return Activity(
        "DDP813", f"waits in {where} for ranks that have not come", Severity.ERROR, rank.site
    )


def _starting(rank: RankState, duration: str) -> Activity | None:
    """Describe a rank that works or waits for the network before its first step."""
    working = works(rank)
    if not working and not rank.activity.network:
        return None
    later = innermost(rank.later_frames)
    moved = later is not None and rank.frame is not None and later != rank.frame
    waits = not working and not moved
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
        else "Share the work among the ranks, or do it before the job starts. If one rank has to "
        "do it, give the group more time: `init_process_group(timeout=timedelta(...))`.",
    )


def _place(rank: RankState) -> str:
    """Name the function and line, or show the line's code if the function's name does not help."""
    frame, site = rank.frame, rank.site
    if frame is None or site is None:
        return f"phase {rank.phase}, last seen at {brief(site)}" if site else "an unknown place"
    name = frame.function.rpartition(".")[2]
    if name in ("<module>", "main", "train", "<lambda>"):
        return quoted(site)
    return f"`{name}` {brief(site)}"


def came_since(rank: RankState) -> bool:
    """Return whether its second stack shows that it joined the others."""
    return any(frame.function in _JOINING for frame in rank.later_frames)


def _loop(rank: RankState) -> Activity | None:
    """Describe an endless loop: both stacks are within one ``while`` that cannot end."""
    found = _endless(rank.frames, rank.later_frames) if computes(rank) else None
    if found is None:
        return None
    place, lines = found
    return Activity(
        "DDP807",
        f"runs in an endless loop, {quoted(place)}, for {rank.seconds} s "
        f"({percent(rank.activity.cpu)} of a core)",
        Severity.ERROR,
        place,
        _GIVE_AN_END,
        (lines,),
    )


def _endless(before: tuple[Frame, ...], after: tuple[Frame, ...]) -> tuple[Location, str] | None:
    """Return the endless loop around two stacks, and their lines."""
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
    """Return whether the loader called the user's code that is running, such as a data set."""
    paths = [frame.path for frame in rank.frames]
    loader = max(at for at, path in enumerate(paths) if _LOADER in path)
    return rank.frame is not None and any(is_user_path(path) for path in paths[loader + 1 :])


def _loop_of_worker(rank: RankState) -> Activity | None:
    """Describe an endless loop in a worker of its DataLoader, if py-spy read the worker's stack."""
    for stacks in rank.evidence.workers:
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


def _loader(rank: RankState, since: str) -> Activity:
    """Describe a wait for a DataLoader, with or without workers."""
    if not any(frame.function in ("_try_get_data", "_get_data") for frame in rank.frames[-12:]):
        return Activity(
            "DDP809",
            f"loads its data itself at {_place(rank)}, {doing(rank)}{since}",
            Severity.WARNING if works(rank) else Severity.ERROR,
            rank.site,
        )
    children = workers_of(rank)
    workers = f"the {'worker' if len(children) == 1 else f'{len(children)} workers'}"
    what, severity, fix = workers_activity(rank, children)
    return Activity(
        "DDP809",
        f"waits for {workers} of its DataLoader at {quoted(rank.site)}{since}, {what}",
        severity,
        rank.site,
        fix,
        tuple(f"worker {each.pid} is in state {each.letter}" for each in children[:6]),
    )


# -- a rank whose script is over and whose process does not end

EXIT_TIMEOUT = 300
"""Seconds for which a rank may work at its end, such as saving results, before it is reported."""

_JOINS_THREADS = ("threading.py", "_shutdown")
_JOINS_CHILDREN = ("multiprocessing/util.py", "_exit_function")
"""File and function in which the interpreter waits for child processes at its end."""

NEVER_ENDS = "Python's own shutdown does not come to its end"

_THREADS = (
    "Let the thread end: an event that it checks, a timeout on its wait, a `join` or `shutdown` "
    "before the end. Or start it with daemon=True, if it may be interrupted."
)
_CHILDREN = (
    "Let the processes that the script started end, and `join` them before the end; those with "
    "daemon=True are ended with the script."
)
_CALLED = (
    "Something registered it for the end (`atexit`, `__del__`, `weakref.finalize`): call it in the "
    "script, with a timeout."
)
_LET_GO = (
    "Release what waits there while Python still runs: `del` the DDP model and the optimizer, "
    "`gc.collect()`, then `dist.destroy_process_group()`, as the last lines on every rank."
)


def exit_wait(rank: RankState) -> Activity | None:
    """Describe what delays the exit of a rank that has reached the end of its script.

    Return None if it has not reached the end, or has worked there only briefly.

    The interpreter first waits for non-daemon threads. Then it calls functions registered with
    ``atexit``, such as multiprocessing's cleanup. Then it shuts down.
    """
    if rank.dead_for is not None or any(letter in ENDED for letter in rank.activity.letters):
        return None
    if rank.seconds < EXIT_TIMEOUT and (works(rank) or waits_for_network(rank)):
        return None
    outer = rank.frames[0] if rank.frames else Frame("", 0, "")
    since = f"has been at the end of the script for {rank.seconds} s"
    if outer.path.endswith(_JOINS_THREADS[0]) and outer.function == _JOINS_THREADS[1]:
        return _joined_threads(rank, since)
    if outer.path.endswith(_JOINS_CHILDREN[0]) and outer.function == _JOINS_CHILDREN[1]:
        return _joined_children(rank, since)
    stacks = rank.stacks
    shutting_down = stacks is not None and ENDING in (stacks.trouble + stacks.note)
    if not rank.watched or not (rank.evidence.ended or shutting_down):
        return None
    return _shuts_down(rank, since, shutting_down)


def _shuts_down(rank: RankState, since: str, shutting_down: bool) -> Activity:
    """Describe a rank in the interpreter's shutdown, or in a function called before it."""
    place, called = None, ""
    if rank.frames:
        frame = rank.frame or rank.frames[-1]
        place = Location(frame.path, frame.line)
        called = f"`{frame.function.rpartition('.')[2]}` {brief(place)}"
        if not shutting_down:
            return _exit_activity(f"{since}, in {called}", place, _CALLED)
    text = f"{since}, where {NEVER_ENDS}{f', below {called}' if called else ''} ({doing(rank)})"
    severity = Severity.WARNING if computes(rank) else Severity.ERROR
    return Activity("DDP815", text, severity, place, _LET_GO)


def _joined_threads(rank: RankState, since: str) -> Activity:
    threads = rank.stacks.threads if rank.stacks is not None else ()
    others = [each for each in threads if each.awaited and not is_ours(each.frames)]
    if not others:
        return _exit_activity(f"{since}, waiting for a thread", None, _THREADS)
    thread = next((each for each in others if innermost(each.frames) is not None), others[0])
    place = _thread_site(thread)
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    where = f", which is at {brief(place)}" if place is not None else ""
    return _exit_activity(
        f"{since}, waiting for the thread {thread.name!r}{more}{where}",
        place,
        _THREADS,
        tuple(f"thread {each.name!r} is at {brief(_thread_site(each))}" for each in others[1:5]),
    )


def _thread_site(thread: Thread) -> Location | None:
    frame = innermost(thread.frames) or (thread.frames[-1] if thread.frames else None)
    return Location(frame.path, frame.line) if frame is not None else None


def _joined_children(rank: RankState, since: str) -> Activity:
    children = [child for child in workers_of(rank) if child.letter not in ENDED]
    who = f"the child process {children[0].pid}" if children else "a child process"
    who += f" and {len(children) - 1} more" if len(children) > 1 else ""
    return _exit_activity(
        f"{since}, waiting for {who}",
        None,
        _CHILDREN,
        tuple(f"child {each.pid}, {each.letter}: {each.command}" for each in children[:4]),
    )


def _exit_activity(
    text: str, place: Location | None, fix: str, evidence: tuple[str, ...] = ()
) -> Activity:
    # A warning, because it may still be sending data.
    return Activity("DDP815", text, Severity.WARNING, place, fix, evidence)

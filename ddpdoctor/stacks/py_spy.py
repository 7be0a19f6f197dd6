"""What py-spy sees of a process from outside, if it is installed and may look (ptrace).

Two ways, of py-spy 0.4, which has no third one: ``--nonblocking`` reads the memory of a process
that goes on as it was, or is stopped, and has Python frames alone; ``--native`` holds the process
while it looks, 1.5 seconds with torch loaded, and refuses one that is stopped already
(``python benchmarks/py_spy.py``).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from ddpdoctor.stacks.model import MAIN, Frame, RankStacks, Thread
from ddpdoctor.stacks.parse import at
from ddpdoctor.stacks.user_frames import is_ours
from ddpdoctor.system.process_state import ENDED

MISSING = "py-spy is not installed (pip install py-spy)"
FORBIDDEN = "py-spy may not look into the process (ptrace is not permitted)"

MOST = 16
"""Processes that are looked into at once."""

_KILLED = 0.3
"""Seconds for a py-spy that was killed; one that waits in the kernel does not end before that."""

_NOT_HELD = ("T", "t", "D")
"""States of a process that cannot be held: it is already, or does not react."""

_Dump = list[dict[str, Any]]


def find_py_spy() -> str | None:
    """The program's path: beside this interpreter, or on ``PATH``."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def read_silent(stacks: Sequence[RankStacks], patience: float) -> list[RankStacks]:
    """The same, with the stacks of living processes that gave none themselves, as py-spy sees them.

    Those that answered are not touched, and no process is held.

    Args:
        stacks: Of processes of this host and of others.
        patience: Seconds for all of them together.
    """
    silent = [
        number
        for number, each in enumerate(stacks)
        if not each.threads and each.state.letter and each.state.letter not in ENDED
    ]
    found = list(stacks)
    for number, (dump, why) in _ask(stacks, silent, ["--nonblocking"], patience).items():
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
    """The same, with native frames where they can be had, else with a note why not.

    Each process is held for a second or two: for those that somebody asks for, or gave up.

    Args:
        stacks: Of processes of this host; those without a stack are left as they are.
        patience: Seconds for all of them together.
        ranks: Only these.
    """
    wanted = [
        number
        for number, each in enumerate(stacks)
        if each.threads
        and each.state.letter not in _NOT_HELD
        and (ranks is None or each.rank in ranks)
    ]
    found = list(stacks)
    for number, (dump, why) in _ask(stacks, wanted, ["--native"], patience).items():
        each = stacks[number]
        frames = native_frames(dump) if dump is not None else ()
        note = f"no native frames: {why}" if why else each.note
        found[number] = replace(each, native=frames, note=note)
    return found


def _ask(
    stacks: Sequence[RankStacks], numbers: Sequence[int], how: list[str], patience: float
) -> dict[int, tuple[_Dump | None, str]]:
    """What py-spy says of some of these, or why it says nothing."""
    program = find_py_spy()
    if program is None:
        return dict.fromkeys(numbers, (None, MISSING))
    deadline = time.monotonic() + patience
    started: dict[int, subprocess.Popen[str]] = {}
    for number in numbers[:MOST]:
        with contextlib.suppress(OSError):
            started[number] = _start(program, stacks[number].pid, how)
    outcomes: dict[int, tuple[_Dump | None, str]] = dict.fromkeys(
        numbers, (None, f"only {MOST} processes were looked into")
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
        # The kernel lets the process go on when its tracer ends.
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=_KILLED)
        return None, f"py-spy took over {patience:.1f} s"
    # The supervisor takes the exit statuses of all its children, so that there may be none here.
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
    """A dump, if it is one.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It is none.
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
    """The Python stacks of a dump, without those of ddpdoctor's threads, the main thread first."""
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
    """What the main thread does below its innermost frame of Python, outermost first."""
    main = next((thread for thread in dump if _is_main(thread)), None)
    found: list[str] = []
    for frame in main["frames"] if main is not None else ():
        if not frame.get("module"):
            # The innermost frame of Python.
            break
        # An address says nothing, and differs from rank to rank.
        name = "?" if frame["name"].startswith("0x") else frame["name"]
        found.append(f"{name} ({os.path.basename(frame['module'])})")
    return tuple(reversed(found))

"""Native frames of ranks, from py-spy if it is installed and may look: it needs ptrace.

py-spy stops the process while it reads (with ``--nonblocking`` it has no native frames), for some
ten to a hundred milliseconds, so this is done only when asked for. ``py-spy`` 0.4.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpdoctor.stacks.model import RankStacks

MISSING = "no native frames: py-spy is not installed (pip install py-spy)"


def find_py_spy() -> str | None:
    """The program's path: beside this interpreter, or on ``PATH``."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def added(stacks: Sequence[RankStacks], patience: float) -> list[RankStacks]:
    """The same stacks with native frames where they can be had, else with a note why not.

    Args:
        stacks: Of processes of this host; those without a stack are left as they are.
        patience: Seconds for all of them together.
    """
    program = find_py_spy()
    if program is None:
        return [each if each.trouble else replace(each, note=MISSING) for each in stacks]
    started: dict[int, subprocess.Popen[str]] = {}
    deadline = time.monotonic() + patience
    for number, each in enumerate(stacks):
        if not each.trouble:
            with contextlib.suppress(OSError):
                started[number] = _start(program, each.pid)
    found = list(stacks)
    for number, process in started.items():
        frames, note = _outcome(process, max(deadline - time.monotonic(), 0.05))
        found[number] = replace(found[number], native=frames, note=note)
    return found


def _start(program: str, pid: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [program, "dump", "--native", "--json", "--pid", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "RUST_BACKTRACE": "0"},
    )


def _outcome(process: subprocess.Popen[str], patience: float) -> tuple[tuple[str, ...], str]:
    """The native frames of the main thread, or why there are none."""
    try:
        out, errors = process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        # The kernel lets the rank go on when its tracer ends.
        process.kill()
        process.communicate()
        return (), f"no native frames: py-spy took over {patience:.1f} s"
    if process.returncode != 0:
        return (), f"no native frames: {_reason(errors)}"
    try:
        return native_frames(json.loads(out)), ""
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return (), "no native frames: the output of this py-spy is not understood"


def _reason(errors: str) -> str:
    if "ermission" in errors or "not permitted" in errors:
        return "py-spy may not look into the process (ptrace is not permitted)"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return f"py-spy says: {lines[0][:100]}" if lines else "py-spy failed without a word"


def native_frames(dump: list[dict[str, Any]]) -> tuple[str, ...]:
    """What the main thread of a ``py-spy dump --native --json`` does below Python, outermost first.

    Raises:
        TypeError, LookupError, AttributeError: It is no such dump.
    """
    main = {each["os_thread_id"] == each["pid"]: each for each in dump}[True]
    found: list[str] = []
    for frame in main["frames"]:
        if not frame.get("module"):
            # The innermost frame of Python.
            break
        # An address says nothing, and differs from rank to rank.
        name = "?" if frame["name"].startswith("0x") else frame["name"]
        found.append(f"{name} ({os.path.basename(frame['module'])})")
    return tuple(reversed(found))

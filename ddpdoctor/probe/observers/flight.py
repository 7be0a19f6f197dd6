"""What torch's Flight Recorder knows of this rank's collectives, DDP's own among them, when asked.

It is read in the writing thread, which needs the GIL and nothing of the training thread: 15 ms of a
full recorder, of 2,000 calls. A rank whose GIL is held by native code does not answer.

Without its stack traces: to put names to them torch imports its compiler, 822 modules (73 MB) in
torch 2.13, and a job that imports these at the same moment dies of it. Which line called what is
known from the rank's own ring and from its backward passes.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import json
import os
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from ddpdoctor.probe.runtime import torch_groups
from ddpdoctor.probe.runtime.phases import Backward
from ddpdoctor.run.mapped import UnreadableError
from ddpdoctor.run.requests import Asked
from ddpdoctor.run.ring import Collective, read_ring

if TYPE_CHECKING:
    from ddpdoctor.probe.observers.steps import StepTracker

GROUPS = 16
"""Groups that are reported, those used last."""

KEPT = 2000
"""Collectives that torch's Flight Recorder keeps, as later versions do by themselves, and that are
reported."""

LOOK, RAN = 0.25, 0.01
"""Seconds in which the training thread may show that it goes on, and for how many of them it has to
run, unless it sleeps: without a core it stays where it is, too."""

Place = Callable[["int | None"], tuple[str, ...]]
"""The user's lines, ``path:line``, that called the collective made at a Unix time in nanoseconds:
its own and those that led to it, innermost first; empty where that is not known."""


def install(distributed: ModuleType) -> None:
    """Turn the Flight Recorder on, unless the job has decided itself; torch reads this later."""
    if not {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} & os.environ.keys():
        torch: Any = sys.modules["torch"]
        c10d = torch._C._distributed_c10d
        switch = torch_groups.flight_recorder_switch(c10d, str(torch.__version__))
        if switch:
            os.environ[switch] = str(KEPT)


class Flight:
    """Answers with the Flight Recorder's entries, in a file of the run directory.

    With all of them: which one matters shows only beside those of the other ranks, and this rank
    may be many calls ahead of it.

    Args:
        directory: The run directory.
        path: The file to answer in.
        ring: The rank's ring of collectives.
        tracker: The rank's steps: its newest backward passes, and its device's clock.

    Raises:
        OSError: Nothing asks in that run directory.
        ValueError: Nothing does.
    """

    def __init__(self, directory: str, path: str, ring: str, tracker: StepTracker) -> None:
        self._asked = Asked(directory)
        self._path = path
        self._ring = ring
        self._tracker = tracker

    def look(self) -> None:
        """Answer if there is a new request; runs in the writing thread."""
        number = self._asked.news()
        if number:
            answer = {"asked": number, "time": time.time_ns(), **self._entries()}
            fresh = f"{self._path}.new"
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            # `dumps`, not `dump`, which would encode in Python.
            text = json.dumps(answer, separators=(",", ":"), default=str)
            with open(os.open(fresh, flags, 0o600), "w") as file:
                file.write(text)
            os.replace(fresh, self._path)

    def _entries(self) -> dict[str, Any]:
        dumps = torch_groups.flight_recorders(sys.modules["torch"])
        if not dumps:
            return {"trouble": "this torch has no Flight Recorder"}
        entries = [entry for dump in dumps for entry in _read(dump())]
        if not entries:
            # Off, or NCCL's alone: whether a collective of gloo is stuck it does not say.
            return {"trouble": "the Flight Recorder recorded nothing"}
        answer: dict[str, Any] = {"entries": reported(entries, self._place())}
        clock = self._tracker.device
        if clock is not None and not clock.captures and self._stands():
            answer["device"] = clock.standing()
        return answer

    def _stands(self) -> bool:
        """Return whether the training thread stays in one native call.

        It captures no graph then, which a query from this thread could break: a capture goes on.
        """

        def at() -> tuple[FrameType | None, int]:
            frame = sys._current_frames().get(thread)
            return frame, frame.f_lasti if frame is not None else -1

        thread = self._tracker.thread
        before = at()
        if before[0] is None:
            return False
        # Of a thread that has a frame: of one that has ended to ask would crash.
        clock = time.pthread_getcpuclockid(thread)
        ran = time.clock_gettime(clock)
        time.sleep(LOOK)
        if before != at():
            return False
        return time.clock_gettime(clock) - ran >= RAN or _sleeps(self._tracker.native)

    def _place(self) -> Place:
        try:
            collectives = read_ring(self._ring).collectives
        except (OSError, UnreadableError):
            collectives = ()
        return places(collectives, self._tracker.backwards)


def _sleeps(thread: int) -> bool:
    """Whether a thread of this process, by the kernel's number, waits for something but a core."""
    with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"
    return False


class _Plain(pickle.Unpickler):
    """Reads what is made of Python's own types, as a dump is: nothing else has to be imported."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} in a Flight Recorder's dump")


def _read(dump: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = _Plain(io.BytesIO(dump)).load().get("entries", [])
    return entries


def places(collectives: Sequence[Collective], backwards: Sequence[Backward]) -> Place:
    """Who called the collectives of a Flight Recorder, which are made while their callers run.

    Args:
        collectives: Those that were called from Python, oldest first.
        backwards: Backward passes, in which DDP calls its own.
    """
    begins = [each.began for each in collectives]
    begun: set[int] = set()

    def place(created: int | None) -> tuple[str, ...]:
        if created is None:
            return ()
        at = bisect.bisect_right(begins, created) - 1
        if at >= 0:
            call = collectives[at]
            # One that is waited for may be made of several; one that goes on is itself alone.
            if at not in begun if call.asynchronous else created <= (call.ended or created):
                begun.add(at)
                return call.site, *call.callers
        for passed in backwards:
            began, ended, site = passed
            if began <= created <= (ended or created):
                return (site.text,)
        return ()

    return place


def reported(entries: list[dict[str, Any]], place: Place) -> list[dict[str, Any]]:
    """The collectives of the groups used last, of all recorders, in the order of calls."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    # Each recorder counts for itself.
    for order, entry in enumerate(sorted(entries, key=_created)[-KEPT:]):
        each = _reported(order, entry, place)
        key = each["group"], each["backend"]
        calls = groups.pop(key, [])
        calls.append(each)
        # In the order of use, the last one at the end.
        groups[key] = calls
    return [each for last in list(groups.values())[-GROUPS:] for each in last]


def _created(entry: dict[str, Any]) -> int:
    return entry.get("time_created_ns") or 0


def _reported(order: int, entry: dict[str, Any], place: Place) -> dict[str, Any]:
    backend, _, name = str(entry.get("profiling_name", "")).rpartition(":")
    return {
        "id": order,
        "group": str(entry["process_group"][0]),
        "sequence": entry.get("collective_seq_id"),
        "point_to_point": bool(entry.get("is_p2p")),
        "backend": backend,
        "name": name,
        "shapes": (entry.get("input_sizes") or [])[:4],
        "dtypes": (entry.get("input_dtypes") or [])[:4],
        "created": entry.get("time_created_ns"),
        "retired": bool(entry.get("retired")),
        "state": entry.get("state"),
        # Known only where the starts of collectives are recorded, too.
        "duration": entry.get("duration_ms"),
        "lines": list(place(entry.get("time_created_ns"))),
    }

"""What torch's Flight Recorder knows of this rank's collectives, DDP's own among them, when asked.

It is read in the writing thread, which needs the GIL and nothing of the training thread: 2 ms while
a collective is stuck (measured on gloo). A rank whose GIL is held by native code does not answer.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections import defaultdict, deque
from typing import Any

from ddpdoctor.probe import sites, torch_private
from ddpdoctor.probe.asking import Asked

NEWEST = 24
"""Collectives of each group that are told."""

GROUPS = 16
"""Groups that are told, those used last."""

FRAMES = sites.CHAIN
"""Frames of the user's code that are told of each collective, innermost first."""


class Flight:
    """Answers with the Flight Recorder's newest entries, in a file of the run directory.

    Args:
        directory: The run directory.
        path: The file to answer in.

    Raises:
        OSError: Nobody asks in that run directory.
        ValueError: Nobody does.
    """

    def __init__(self, directory: str, path: str) -> None:
        self._asked = Asked(directory)
        self._path = path

    def look(self) -> None:
        """Answer if somebody has asked anew; runs in the writing thread."""
        number = self._asked.news()
        if number:
            told = {"asked": number, "time": time.time_ns(), **_entries()}
            fresh = f"{self._path}.new"
            with open(fresh, "w") as file:
                json.dump(told, file, separators=(",", ":"), default=str)
            os.replace(fresh, self._path)


def _entries() -> dict[str, Any]:
    dumps = torch_private.flight_recorders(sys.modules["torch"])
    if not dumps:
        return {"trouble": "this torch has no Flight Recorder"}
    entries = [entry for dump in dumps for entry in _read(dump())]
    if not entries:
        # Off, or NCCL's alone: whether a collective of gloo is stuck it does not say.
        return {"trouble": "the Flight Recorder recorded nothing"}
    return {"entries": newest(entries)}


def _read(dump: bytes) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = pickle.loads(dump).get("entries", [])
    return entries


def newest(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest collectives of the groups used last, of all recorders, in the order of calls."""
    groups: dict[tuple[str, str], deque[dict[str, Any]]] = defaultdict(lambda: deque(maxlen=NEWEST))
    # Each recorder counts for itself.
    for order, entry in enumerate(sorted(entries, key=_created)):
        told = _told(order, entry)
        key = told["group"], told["backend"]
        # In the order of use, the last one at the end.
        groups[key] = groups.pop(key, deque(maxlen=NEWEST))
        groups[key].append(told)
    return [told for last in list(groups.values())[-GROUPS:] for told in last]


def _created(entry: dict[str, Any]) -> int:
    return entry.get("time_created_ns") or 0


def _told(order: int, entry: dict[str, Any]) -> dict[str, Any]:
    frames = [
        [os.path.abspath(frame["filename"]), frame["line"], frame["name"]]
        for frame in entry.get("frames") or ()
        if sites.user_file(frame["filename"])
    ]
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
        "frames": frames[:FRAMES],
    }

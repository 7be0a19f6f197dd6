"""Rewrite the files of a node with the head's clock and its numbers of attempts."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run import ring, status
from ddpdoctor.run.records.base import JsonObject, json_line
from ddpdoctor.run.records.typed_json import RANK_RECORDS, SUPERVISOR_RECORDS

_TIMES = ("time", "start", "since", "closed")
"""Keys of records that hold Unix nanoseconds, or a step, which is a small number."""

_OF_ATTEMPTS = frozenset(
    kind
    for kind, declared in {**RANK_RECORDS, **SUPERVISOR_RECORDS}.items()
    if any(each.name == "restart" for each in fields(declared))
)
"""Kinds of records that name an attempt."""

_LEAST_TIME, _MOST_TIME = 10**18, 1 << 62  # Unix nanoseconds, from the year 2001 on

_START = re.compile(rb'"start":(\d{19})(?=[,}])')

# -- the clock


class Sample(NamedTuple):
    """One reading of the head's clock."""

    ahead: int  # Nanoseconds by which the head's clock is ahead
    error: int  # Maximum error of :attr:`ahead`, in nanoseconds


class HeadClock:
    """Estimates the lead of the head's clock, as NTP does, from the fastest of several pings."""

    MAX_SAMPLES = 64

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=self.MAX_SAMPLES)

    def add(self, sent: int, received: int, now: int) -> None:
        """Add a ping's answer. Only ``received`` is in the head's time."""
        if now >= sent:
            self._samples.append(Sample(received - (sent + now) // 2, (now - sent) // 2))

    @property
    def best(self) -> Sample | None:
        """The reading with the smallest error. None if there is none.

        If a clock was set, new readings that contradict the old ones replace them.
        """
        best = min(self._samples, key=lambda each: each.error, default=None)
        if best is None:
            return None
        newest = self._samples[-1]
        if abs(newest.ahead - best.ahead) > newest.error + best.error:
            recent = [
                each
                for each in self._samples
                if abs(each.ahead - newest.ahead) <= each.error + newest.error
            ]
            if len(recent) >= 3:
                return min(recent, key=lambda each: each.error)
        return best

    def __len__(self) -> int:
        return len(self._samples)


# -- files


def place_of(identity: bytes) -> str:
    """Return the suffix for the namespaces of a node's ranks in the head's run directory."""
    return f"@{identity.hex()[:12]}"


class Alignment(NamedTuple):
    """Converts a node's files for the head's run directory."""

    ahead: int  # Nanoseconds by which the head's clock is ahead
    attempts: Mapping[int, int]
    """The numbers of attempts in the head's run directory, by those of the node."""
    place: str  # Suffix of the namespace of a pid, which is valid only on the node

    def page(self, raw: bytes, restart: int) -> bytes:
        """Convert a status page of an attempt."""
        return status.moved(raw, self.attempts[restart], self.ahead)

    def ring(self, raw: bytes) -> bytes:
        """Convert a ring of collectives."""
        return ring.moved(raw, self.ahead)

    def step(self, line: bytes) -> bytes:
        """Convert the line of a step."""
        return _START.sub(lambda at: b'"start":%d' % (int(at[1]) + self.ahead), line, count=1)

    def record(self, line: bytes) -> bytes | None:
        """Convert the line of a record other than a step. None if it is damaged."""
        found = parsed(line)
        if found is None:
            return None
        for key in _TIMES:
            value: Any = found.get(key)
            if _is_time(value):
                found[key] = value + self.ahead
        if found.get("kind") in _OF_ATTEMPTS:
            # The first attempt is the default, which a line leaves out.
            found["restart"] = self._attempt(found.get("restart", 0))
        if "namespace" in found:
            found["namespace"] = f"{found['namespace']}{self.place}"
        return json_line(found)

    def document(self, value: Any) -> Any:
        """Convert the evidence of an examination, in which all large numbers are times."""
        if isinstance(value, dict):
            found = {key: self.document(each) for key, each in value.items()}
            if "rank" in value:
                found["restart"] = self._attempt(value.get("restart", 0))
            return found
        if isinstance(value, list):
            return [self.document(each) for each in value]
        return value + self.ahead if _is_time(value) else value

    def _attempt(self, restart: Any) -> Any:
        return self.attempts.get(restart, restart) if isinstance(restart, int) else restart


def _is_time(value: Any) -> bool:
    return type(value) is int and _LEAST_TIME <= value < _MOST_TIME


def parsed(line: bytes) -> JsonObject | None:
    """Return the JSON object of a line. None if it is damaged."""
    try:
        found = opening.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def dumped(value: Any) -> bytes:
    """Return a JSON document."""
    return json.dumps(value, separators=(",", ":")).encode()

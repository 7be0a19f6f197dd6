"""Snapshots as JSON, for machines and for recordings, and read back from it.

Numbers are numbers in base units. What is not known is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from ddpdoctor.core import opening
from ddpdoctor.core.control_characters import json_text
from ddpdoctor.core.finding import Finding, from_record, to_record
from ddpdoctor.top.snapshot import (
    FindingRow,
    Gpu,
    Machine,
    RankRow,
    Snapshot,
    Times,
    Verdict,
)
from ddpdoctor.top.source import ALL, Replay, Source

_MOST = 4 * opening.MOST_EXPANDED
"""Bytes of memory that a snapshot may take: of a thousand ranks it is half of that."""

FORMAT = 1
"""Version of the JSON; raised when a field changes its meaning."""


def line(snapshot: Snapshot) -> str:
    """A snapshot as one line of JSON."""
    return json_text({"format": FORMAT, **_plain(snapshot)}, separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return value
    if isinstance(value, FindingRow):
        told = {"time": value.time, **to_record(value.finding)}
        return {key: each for key, each in told.items() if each is not None}
    if isinstance(value, Times):
        # Own time is what everything is about, and not left to the reader's arithmetic.
        return {**vars(value), "own": value.own}
    return {
        key: _plain(each) for key, each in vars(value).items() if each is not None and each != ""
    }


def read(text: str | bytes) -> Snapshot:
    """The snapshot of a line.

    Raises:
        ValueError: It is none, is damaged, or of a newer format.
    """
    try:
        if opening.expanded(text if isinstance(text, bytes) else text.encode()) > _MOST:
            raise ValueError("too large")
        told = opening.loads(text)
        if told.pop("format") > FORMAT:
            raise ValueError("written by a newer ddpdoctor")
        gpus = tuple(_gpu(each) for each in told.pop("gpus", ()))
        return Snapshot(
            **{
                **told,
                "verdict": Verdict(**told["verdict"]),
                "ranks": tuple(_rank(each) for each in told.get("ranks", ())),
                "median": _times(told.get("median")),
                "gpus": gpus,
                "machine": Machine(**told["machine"]) if "machine" in told else None,
                "findings": tuple(_finding(each) for each in told.get("findings", ())),
                "output": tuple(told.get("output", ())),
                "notes": tuple(told.get("notes", ())),
            }
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no snapshot: {error}") from None


def _rank(told: Mapping[str, Any]) -> RankRow:
    return RankRow(
        **{
            **told,
            "times": _times(told.get("times")),
            "gpu": _gpu(told["gpu"]) if "gpu" in told else None,
            **{name: tuple(told.get(name, ())) for name in ("owns", "totals", "output")},
        }
    )


def _gpu(told: Mapping[str, Any]) -> Gpu:
    return Gpu(**{**told, "throttle": tuple(told.get("throttle", ()))})


def _times(told: Mapping[str, Any] | None) -> Times | None:
    if told is None:
        return None
    return Times(**{key: value for key, value in told.items() if key != "own"})


def _finding(told: Mapping[str, Any]) -> FindingRow:
    finding: Finding | None = from_record(told)
    if finding is None:
        raise ValueError("a finding is damaged")
    return FindingRow(finding, told.get("time"))


def once(source: Source, out: TextIO) -> None:
    """Write one snapshot, as one line.

    Raises:
        DoctorError: There is nothing to show.
    """
    out.write(f"{line(source.read(ALL))}\n")
    out.flush()


def watch(
    source: Source,
    out: TextIO,
    *,
    also: Callable[[Snapshot], None] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write one snapshot per interval, each flushed, until the run is over; a replay, to its end.

    Args:
        source: Where they come from. One that waits for runs never ends.
        out: Where they go.
        also: Called with each snapshot.
        sleep: Lets time pass.

    Raises:
        DoctorError: There is nothing to show.
    """
    replay = source if isinstance(source, Replay) else None
    if replay is not None:
        replay.seek(0)
    due = time.monotonic()
    while True:
        snapshot = source.read(ALL)
        out.write(f"{line(snapshot)}\n")
        out.flush()
        if also is not None:
            also(snapshot)
        if replay is not None:
            if replay.position >= replay.length - 1:
                return
            replay.seek(replay.position + 1)
            continue
        if snapshot.kind == "run" and not snapshot.live:
            return
        # A frame that came late does not make the next ones come in a rush.
        due = max(due + source.interval, time.monotonic())
        sleep(due - time.monotonic())

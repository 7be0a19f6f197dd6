"""Write snapshots as text (``--once``) and as JSON, and read the JSON back.

In JSON, numbers are in base units. Unknown values are absent.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TextIO

from ddpdoctor.core import opening
from ddpdoctor.core.finding import from_record, to_record
from ddpdoctor.core.formatting import json_text
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.top.frames import WANT_ALL, Source, Want
from ddpdoctor.top.snapshot import (
    FindingRow,
    Gpu,
    Job,
    Machine,
    RankRow,
    Snapshot,
    Times,
    Verdict,
)
from ddpdoctor.top.view import View

MAX_MEMORY = 4 * opening.MOST_EXPANDED
"""Bytes of memory that a snapshot may take: of a thousand ranks it is half of that."""

FORMAT = 1
"""Version of the JSON; raised when a field changes its meaning."""

Keep = Callable[[Snapshot], None]
"""What becomes of a snapshot besides."""


def picture(source: Source, view: View, out: TextIO, keep: Keep | None = None) -> None:
    """Write a frame of the terminal's size; with colour only on a terminal that wants it.

    Args:
        source: Where it comes from.
        view: How it is looked at.
        out: Where it goes.
        keep: Called with the snapshot, of which all ranks are then read.

    Raises:
        DoctorError: There is nothing to show.
    """
    # Here, and not at the top: JSON has no use for it.
    from ddpdoctor.render import terminal
    from ddpdoctor.render.terminal import merged, plain, style_of
    from ddpdoctor.top.draw import screen
    from ddpdoctor.top.draw.drawing import Material
    from ddpdoctor.top.frames import Past, point

    room, height = (max(each, 1) for each in shutil.get_terminal_size((80, 24)))
    # Which ranks are in sight is known once there is a frame; only theirs are read in full.
    first = source.read(Want(frozenset()))
    visible = screen.draw_screen(first, view, room, height).visible
    replay = source.replay
    if replay is not None:
        # What a recording ended with is what a person asks for.
        replay.seek(replay.length - 1)
        view = replace(view, position=(replay.position, replay.length))
    snapshot = source.read(Want(visible) if keep is None else WANT_ALL)
    if keep is not None:
        keep(snapshot)
    colour = terminal.wants_colour(1)
    past = Past()
    past.add(snapshot)
    past.before([point(each) for each in source.history()])
    material = Material(points=tuple(past.points))
    for line in screen.draw_screen(snapshot, view, room, height, material).lines:
        text = plain(line).rstrip()
        if colour:
            text = "".join(style_of(style).render(part) for part, style in merged(line))
        out.write(f"{text}\n")


def line(snapshot: Snapshot) -> str:
    """A snapshot as one line of JSON."""
    return json_text(record(snapshot), separators=(",", ":"))


def record(snapshot: Snapshot) -> JsonObject:
    """A snapshot as a JSON object."""
    return {"format": FORMAT, **_plain(snapshot)}


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, int, float, dict)):
        return value
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if isinstance(value, FindingRow):
        record = {"time": value.time, "attempt": value.attempt, **to_record(value.finding)}
        return {key: each for key, each in record.items() if each is not None}
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
        if opening.expanded(text if isinstance(text, bytes) else text.encode()) > MAX_MEMORY:
            raise ValueError("too large")
        return of_record(opening.loads(text))
    except RecursionError as error:
        raise ValueError(f"no snapshot: {error}") from None


def of_record(record: JsonObject) -> Snapshot:
    """The snapshot of a JSON object.

    Raises:
        ValueError: It is none, is damaged, or of a newer format.
    """
    try:
        if record["format"] > FORMAT:
            raise ValueError("written by a newer ddpdoctor")
        fields = {key: value for key, value in record.items() if key != "format"}
        return Snapshot(**{key: _READ.get(key, _same)(value) for key, value in fields.items()})
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no snapshot: {error}") from None


def _same(value: Any) -> Any:
    return value


def _rank(record: Mapping[str, Any]) -> RankRow:
    return RankRow(**{key: _READ.get(key, _same)(value) for key, value in record.items()})


def _gpu(record: Mapping[str, Any]) -> Gpu:
    held = tuple((pid, size) for pid, size in record.get("processes", ()))
    return Gpu(**{**record, "throttle": tuple(record.get("throttle", ())), "processes": held})


def _times(record: Mapping[str, Any]) -> Times:
    return Times(**{key: value for key, value in record.items() if key != "own"})


def _finding(record: Mapping[str, Any]) -> FindingRow:
    finding = from_record(record)
    if finding is None:
        raise ValueError("a finding is damaged")
    return FindingRow(finding, record.get("time"), record.get("attempt", 0))


_READ: Mapping[str, Callable[[Any], Any]] = {
    "verdict": lambda record: Verdict(**record),
    "machine": lambda record: Machine(**record),
    "job": lambda record: Job(**record),
    "median": _times,
    "times": _times,
    "gpu": _gpu,
    "gpus": lambda records: tuple(map(_gpu, records)),
    "ranks": lambda records: tuple(map(_rank, records)),
    "findings": lambda records: tuple(map(_finding, records)),
    **dict.fromkeys(("output", "notes"), tuple),
}
"""How the fields of a snapshot and of its ranks are read that are more than a value."""


def once(source: Source, out: TextIO, keep: Keep | None = None) -> Snapshot:
    """Write one snapshot, which it returns, as one line of JSON.

    Args:
        source: Where it comes from.
        out: Where it goes.
        keep: Called with the snapshot.

    Raises:
        DoctorError: There is nothing to show.
    """
    snapshot = source.read(WANT_ALL)
    out.write(f"{line(snapshot)}\n")
    out.flush()
    if keep is not None:
        keep(snapshot)
    return snapshot


def watch(
    source: Source,
    out: TextIO,
    keep: Keep | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Write one snapshot per interval, each flushed, until the run is over; a replay, to its end.

    Args:
        source: Where they come from. One that waits for runs never ends.
        out: Where they go.
        keep: Called with each snapshot.
        sleep: Lets time pass.

    Raises:
        DoctorError: There is nothing to show.
    """
    replay = source.replay
    if replay is not None:
        replay.seek(0)
    due = time.monotonic()
    while True:
        snapshot = once(source, out, keep)
        if replay is not None:
            if replay.position >= replay.length - 1:
                return
            replay.seek(replay.position + 1)
        elif snapshot.kind == "run" and not snapshot.live:
            return
        else:
            # A frame that came late does not make the next ones come in a rush.
            due = max(due + source.interval, time.monotonic())
            sleep(max(0.0, due - time.monotonic()))

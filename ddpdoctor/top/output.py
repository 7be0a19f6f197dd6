"""Write snapshots as text (``--once``) and as JSON, and read the JSON back.

In JSON, numbers are in base units. Unknown values are absent.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TextIO

from ddpdoctor.core import opening
from ddpdoctor.core.finding import from_record, to_record
from ddpdoctor.core.formatting import json_text
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.typed_json import required
from ddpdoctor.top.frames import WANT_ALL, Source, Visible
from ddpdoctor.top.snapshot import FindingRow, Snapshot, Times
from ddpdoctor.top.view import View

MAX_MEMORY = 4 * opening.MOST_EXPANDED
"""Maximum bytes of memory for a snapshot. A snapshot of a thousand ranks takes half of that."""

FORMAT = 1  # Version of the JSON, raised when a field changes its meaning
Keep = Callable[[Snapshot], None]  # Called with each snapshot, to record or export it


def picture(source: Source, view: View, out: TextIO, keep: Keep | None = None) -> None:
    """Write a frame of the terminal's size, with colour only on a terminal that supports it.

    ``keep`` is called with the snapshot, which then has all ranks in full.

    Raises:
        DoctorError: There is nothing to show.
    """
    # Imported here, because JSON does not need it.
    from ddpdoctor.render import terminal
    from ddpdoctor.top.draw import screen
    from ddpdoctor.top.draw.drawing import ScreenData
    from ddpdoctor.top.frames import History, point

    room, height = (max(each, 1) for each in shutil.get_terminal_size((80, 24)))
    # A first frame shows which ranks are visible. Only those are read in full.
    first = source.read(Visible(frozenset()))
    visible = screen.draw_screen(first, view, room, height).visible
    replay = source.replay
    if replay is not None:
        # Users want the end of a recording.
        replay.seek(replay.length - 1)
        view = replace(view, position=(replay.position, replay.length))
    snapshot = source.read(Visible(visible) if keep is None else WANT_ALL)
    if keep is not None:
        keep(snapshot)
    colour = terminal.wants_colour(1)
    past = History()
    past.add(snapshot)
    past.add_earlier([point(each) for each in source.history()])
    material = ScreenData(points=tuple(past.points))
    for line in screen.draw_screen(snapshot, view, room, height, material).lines:
        text = terminal.rendered(line, colour)
        out.write(f"{text if colour else text.rstrip()}\n")


def line(snapshot: Snapshot) -> str:
    """Return a snapshot as one line of JSON."""
    return json_text(record(snapshot), separators=(",", ":"))


def record(snapshot: Snapshot) -> JsonObject:
    """Return a snapshot as a JSON object."""
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
        # Own time is the main value, so spare readers computing it.
        return {**vars(value), "own": value.own}
    return {
        key: _plain(each) for key, each in vars(value).items() if each is not None and each != ""
    }


def loads(line: bytes) -> JsonObject:
    """Parse a line that may hold a snapshot.

    Raises:
        ValueError: It is not a JSON object, or too large.
    """
    if opening.expanded(line) > MAX_MEMORY:
        raise ValueError("too large")
    found = opening.loads(line)
    if not isinstance(found, dict):
        raise ValueError("no object")
    return found


def of_record(record: JsonObject) -> Snapshot:
    """Read the snapshot of a JSON object.

    Raises:
        ValueError: It is not a snapshot, is damaged, or of a newer format.
    """
    version, findings = record.get("format"), record.get("findings", [])
    if not isinstance(version, int) or not isinstance(findings, list):
        raise ValueError("no snapshot")
    if version > FORMAT:
        raise ValueError("written by a newer ddpdoctor")
    others = {key: value for key, value in record.items() if key != "findings"}
    rows = []
    for each in findings:
        finding = from_record(each) if isinstance(each, dict) else None
        if finding is None:
            raise ValueError("a finding is damaged")
        rows.append(FindingRow(finding, each.get("time"), each.get("attempt", 0)))
    return replace(required(Snapshot, others), findings=tuple(rows))


def once(source: Source, out: TextIO, keep: Keep | None = None) -> Snapshot:
    """Write one snapshot as one line of JSON.

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
    """Write one snapshot per interval, until the run is over or a replay has ended.

    A source that waits for runs never ends.

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
            # Avoid a burst of frames after a late one.
            due = max(due + source.interval, time.monotonic())
            sleep(max(0.0, due - time.monotonic()))

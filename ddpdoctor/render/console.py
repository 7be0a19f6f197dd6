"""Findings for a person at a terminal, in a pipe or in a log file."""

from __future__ import annotations

import io
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from ddpdoctor.core.control_characters import shown
from ddpdoctor.core.finding import Finding, Location, Severity
from ddpdoctor.failures.lines import users_file
from ddpdoctor.render.code_frames import CONTEXT, code_frame
from ddpdoctor.run.snapshot import Run

_STYLE = {
    Severity.ERROR: "bold red",
    Severity.WARNING: "bold yellow",
    Severity.INFO: "bold cyan",
}
_MAX_FRAMES = 6
_UNBOUNDED = 1 << 20
"""Columns of what has none."""

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+)(?:,? in (?P<name>.*))?$')
_CAUSE = (
    "The above exception was the direct cause",
    "During handling of the above exception",
)


def render(
    finding: Finding,
    *,
    colour: bool,
    width: int | None,
    written: float | None = None,
    kept: Path | None = None,
) -> str:
    """A finding as text: headline, code frame, evidence, fix, a line to paste.

    Args:
        finding: What to say.
        colour: Whether to use ANSI colours.
        width: Columns to wrap at; None: nothing is wrapped, as in a pipe.
        written: Unix seconds; a source file that was written after it is not shown, unless the
            traceback has the same line. None: files are as the job read them.
        kept: The file that has the whole traceback, if one has.
    """
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        force_terminal=colour,
        no_color=not colour,
        color_system="standard" if colour else None,
        width=width or _UNBOUNDED,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
    )
    style = _STYLE[finding.severity]
    head = Text()
    head.append(finding.severity.label, style)
    head.append(f" {shown(finding.code)}: ", "bold")
    head.append(shown(finding.message), "bold")
    _wrapped(console, head, console.width)
    if finding.location is not None:
        _code_frame(console, finding, finding.location, style, written)
    for frame in calls(finding):
        console.print(Text(f"  {shown(frame)}", "dim"), soft_wrap=True)
    for line in finding.evidence:
        _bullet(console, "evidence:", line)
    if kept is not None:
        _bullet(console, "in full:", shown_path(str(kept)))
    if finding.fix:
        _bullet(console, "fix:", finding.fix, "green")
    if finding.paste:
        # In one piece, however long: it is there to be copied.
        console.print(Text(f"  {'paste:':<10}{shown(finding.paste)}"), soft_wrap=True)
    return buffer.getvalue()


def _bullet(console: Console, label: str, text: str, style: str = "") -> None:
    indent = " " * 12
    lead = Text(f"  {label:<10}", style)
    _wrapped(console, Text(shown(text, "\n\t")), max(20, console.width - len(indent)), lead, indent)


def _wrapped(
    console: Console, text: Text, room: int, lead: Text | None = None, indent: str = ""
) -> None:
    """A text in lines of at most ``room`` columns; a longer word, such as a path, stays whole."""
    for number, line in enumerate(_folded(text, room)):
        line.rstrip()
        first = lead if number == 0 and lead is not None else Text(indent)
        console.print(first + line, soft_wrap=True)


def _folded(text: Text, room: int) -> Iterator[Text]:
    """Not rich's own: its lines either split long words or are cut."""
    for paragraph in text.split("\n", allow_blank=True):
        cuts: list[int] = []
        place = used = 0
        for word in paragraph.plain.split(" "):
            taken = cell_len(word)
            if place and used + 1 + taken > room:
                cuts.append(place)
                used = taken
            else:
                used += taken + (place > 0)
            place += len(word) + 1
        yield from paragraph.divide(cuts)


def written_before(run: Run) -> float:
    """When a source file must have been written for the run to have read it as it is now.

    Of a run on another machine no file here is known to be the same.
    """
    here = run.manifest.get("host") == socket.gethostname()
    started = run.manifest.get("started")
    return started / 1e9 if here and isinstance(started, int) else 0.0


def _code_frame(
    console: Console, finding: Finding, location: Location, style: str, written: float | None
) -> None:
    console.print(
        Text(f"  --> {shown_path(location.path)}:{location.line}", "cyan"), soft_wrap=True
    )
    digits = len(str(location.line + CONTEXT))
    for number, text, guilty in code_frame(finding, written):
        if text:
            mark, look = (">", style) if guilty else (" ", "dim")
            row = Text(f"  {mark} {number:>{digits}} | ", look)
            room = max(20, console.width - row.cell_len)
            text = text if len(text) <= room else text[: room - 3] + "..."
            row.append(text, "" if guilty else "dim")
            console.print(row, soft_wrap=True)


def calls(finding: Finding) -> list[str]:
    """The user's part of the traceback's calls, outermost first, if there is more than one."""
    text = finding.traceback
    for marker in _CAUSE:
        # The last exception of a chain is the one that ended the process.
        text = text.rpartition(marker)[2]
    newest_first = "most recent call first" in text
    if newest_first:
        text = text.partition("Current thread")[2].split("\n\n")[0]
    frames = []
    for row in text.splitlines():
        match = _FRAME.match(row)
        if match and users_file(match["path"]):
            name = f" in {match['name']}" if match["name"] else ""
            frames.append(f"{shown_path(match['path'])}:{match['line']}{name}")
    if newest_first:
        frames.reverse()
    if len(frames) < 2:
        return []
    if len(frames) > _MAX_FRAMES:
        frames = [*frames[:2], f"... {len(frames) - 4} more calls", *frames[-2:]]
    return [f"{'called from ' if number == 0 else '  then '}{f}" for number, f in enumerate(frames)]


def shown_path(path: str) -> str:
    """A path as a person would type it: relative if it lies below the working directory."""
    try:
        return shown(str(Path(path).relative_to(Path.cwd())))
    except (ValueError, OSError):
        return shown(path)

"""The source text of frames, where the file is still what the job runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.stacks.model import Frame
from ddpdoctor.stacks.user_frames import is_user_path

Code = Mapping[Frame, str]
"""A line of source for each frame of which it is known."""


def code_of(frames: Iterable[Frame], before: int) -> dict[Frame, str]:
    """The lines of the user's frames.

    Args:
        frames: Any frames.
        before: Unix nanoseconds. A file that was changed since is left out: its lines are not
            those that run.
    """
    found: dict[Frame, str] = {}
    files: dict[str, list[str]] = {}
    for frame in set(frames):
        if frame.line < 1 or not is_user_path(frame.path):
            continue
        if frame.path not in files:
            files[frame.path] = _lines(Path(frame.path), before)
        lines = files[frame.path]
        if frame.line <= len(lines):
            found[frame] = lines[frame.line - 1].strip()
    return found


def _lines(path: Path, before: int) -> list[str]:
    try:
        if opening.facts(path).st_mtime_ns > before:
            return []
        source = opening.contents(path, opening.MOST_SOURCE, links=True)
        return source.decode("utf-8", "replace").splitlines()
    except OSError:
        return []

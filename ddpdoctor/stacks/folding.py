"""A stack without what a person need not see: the libraries between and below their own code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ddpdoctor.stacks.model import CUT, Frame
from ddpdoctor.stacks.user_frames import is_probe_path, is_user_path, library

FOLDED = "(folded)"
"""The function of a frame that stands for several of libraries, whose names are its path."""


def fold(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """A stack as the user's frames, and one in place of each run of library frames between them.

    What started the script is left out, and so is what the innermost of the user's lines called
    (:func:`tail`). A stack that has no frame of the user's stays as it is.
    """
    mine = [number for number, frame in enumerate(frames) if is_user_path(frame.path)]
    if not mine:
        return tuple(frames)
    found: list[Frame] = [CUT] if frames[0] == CUT else []
    before = mine[0]
    for number in mine:
        if number > before + 1:
            names = libraries(frames[before + 1 : number])
            if names:
                found.append(Frame(names, 0, FOLDED))
        found.append(frames[number])
        before = number
    return tuple(found)


def tail(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """The library frames below the innermost of the user's lines, outermost first.

    Without those of our hooks, which are nobody's business.
    """
    end = len(frames)
    while end > 0 and not is_user_path(frames[end - 1].path):
        end -= 1
    return tuple(frame for frame in frames[end:] if not is_probe_path(frame.path)) if end else ()


def libraries(frames: Iterable[Frame]) -> str:
    """The libraries that frames belong to: ``torch``, or ``torch and Python``."""
    names = list(
        dict.fromkeys(library(frame.path) for frame in frames if not is_probe_path(frame.path))
    )
    return f"{names[0]} and others" if len(names) > 2 else " and ".join(names)

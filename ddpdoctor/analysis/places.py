"""Lines of the user's code: read from ``path:line``, and as sentences name them."""

from __future__ import annotations

import os

from ddpdoctor.analysis.guards import statement
from ddpdoctor.core.finding import Location
from ddpdoctor.core.opening import whole


def location(site: str) -> Location | None:
    """A place from ``path:line``."""
    path, _, line = site.rpartition(":")
    return Location(path, whole(line)) if path and line.isdigit() else None


def brief(at: Location | None) -> str:
    """A place in a sentence: ``train.py:61``."""
    return f"{os.path.basename(at.path)}:{at.line}" if at is not None else "an unknown line"


def quoted(at: Location | None) -> str:
    """A place with its code, where that is short: ```loss.backward()` train.py:61``."""
    text = statement(at.path, at.line).partition("  #")[0].rstrip() if at is not None else ""
    return f"`{text}` {brief(at)}" if 0 < len(text) <= 60 else brief(at)

"""What the styles look like: the sixteen colours of the terminal's own palette, on its background.

So a light background, a person's own colours and ``NO_COLOR`` are all respected, and nothing is
said by colour alone.
"""

from __future__ import annotations

from functools import lru_cache

from rich.style import Style

_LOOKS = {
    "": "",
    "dim": "dim",
    "bold": "bold",
    "head": "dim",
    "key": "bold",
    "cursor": "reverse",
    "ok": "green",
    "info": "cyan",
    "warning": "yellow",
    "error": "bold red",
    "status": "reverse",
    "data": "magenta",
    "forward": "cyan",
    "backward": "green",
    "optimizer": "yellow",
    "other": "dim",
    "wait": "red",
    "bar": "cyan",
}


@lru_cache(maxsize=64)
def look(name: str) -> Style:
    """The look of a style."""
    return Style.parse(_LOOKS[name])

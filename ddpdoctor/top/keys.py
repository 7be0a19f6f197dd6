"""The keys: plain letters, since editors that hold a terminal eat Ctrl and F keys."""

from __future__ import annotations

from typing import NamedTuple


class Key(NamedTuple):
    """A key, what it does in a word and in a line, and how long it stays on a narrow screen."""

    keys: tuple[str, ...]
    """As textual names them."""
    shown: str
    short: str
    text: str
    action: str
    importance: int


KEYS = (
    Key(("question_mark", "h"), "?", "help", "this help", "help", 100),
    Key(("q", "ctrl+c"), "q", "quit", "leave; the job goes on", "quit", 99),
    Key(("j", "down"), "j", "down", "to the next rank or line", "down", 40),
    Key(("k", "up"), "k", "up", "to the previous rank or line", "up", 39),
    Key(("enter",), "enter", "open", "the selected rank in full; in a list, its entry", "open", 90),
    Key(("f",), "f", "findings", "what is wrong with the job; enter shows the fix", "findings", 89),
    Key(
        ("d",),
        "d",
        "stacks",
        "what the ranks do and their stacks, equal ones merged; again: the selected rank alone",
        "stacks",
        88,
    ),
    Key(("s",), "s", "sort", "sort by the next column", "sort", 85),
    Key(("S", "upper_s"), "S", "turn", "sort the other way round", "turn", 30),
    Key(("slash",), "/", "filter", "ranks (0,2-7), node, state or phase", "filter", 84),
    Key(("t",), "t", "nodes", "group by node", "nodes", 70),
    Key(("space",), "space", "pause", "hold the picture; the job goes on", "pause", 80),
    Key(("comma",), ",", "back", "to the frame before", "back", 35),
    Key(("full_stop",), ".", "forth", "to the next frame", "forth", 34),
    Key(("a",), "a", "attach", "how to attach a debugger; w writes launch.json", "attach", 60),
    Key(("e",), "e", "env", "versions and launch settings", "environment", 50),
    Key(("r",), "r", "record", "write the frames to a file, or stop that", "record", 45),
    Key(("x",), "x", "signal", "send a signal to the job; asks first", "signal", 44),
)
"""All keys that do something, in the order of the help."""

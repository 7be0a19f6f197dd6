"""Foreign text on a terminal or in a log: what would steer it is shown, and never sent.

Text of a job, of a run directory, of a log, of a peer or of a file's name may hold escapes that
clear the screen, set the title or answer as if somebody typed, and marks that turn the order of
letters round. Every renderer passes what it prints through :func:`shown` before it adds its own
colours, or through :func:`json_text`.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

_JOINERS = "\u200c\u200d"
"""Invisible, but words and emoji are spelled with them, and they steer nothing."""

_FORMATTING = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")


def shown(text: str, keep: str = "") -> str:
    r"""A text that steers nothing: its control characters as ``\x1b``, ``\x9b``, ``\u202e``.

    Those are C0 and C1, the marks that turn the order of letters round, other invisible marks,
    separators of lines, and halves of characters, as names of files have them that are no UTF-8.

    Args:
        text: Any text.
        keep: Control characters that stay: newlines and tabs, where the caller lays out lines.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep or not _steers(each) else _escape(each)
        for each in text
    )


def _steers(character: str) -> bool:
    category = unicodedata.category(character)
    return category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in _JOINERS)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def without_formatting(text: str) -> str:
    """A text without the sequences that colour it and move the cursor, as a job's output has them.

    What is left of controls is for :func:`shown`.
    """
    return _FORMATTING.sub("", text) if "\x1b" in text else text


def json_text(value: Any, **options: Any) -> str:
    """JSON in ASCII without control characters; ``options`` are those of ``json.dumps``."""
    # JSON escapes all controls but this one.
    return json.dumps(value, **options).replace("\x7f", "\\u007f")

"""Format numbers, sizes, durations, ranks and untrusted text for people.

Sizes in memory and files are in binary units (KiB, MiB, GiB). Rates of networks and links are in
decimal units (MB/s, GB/s), as their vendors state them.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, NamedTuple

# -- Numbers with units


MISSING = "-"  # Shown instead of an unknown number


class TimeUnit(NamedTuple):
    """A unit that several times share, so that they can be compared at a glance."""

    name: str
    factor: float


_MICROSECONDS, _MILLISECONDS, _SECONDS = TimeUnit("us", 1e6), TimeUnit("ms", 1e3), TimeUnit("s", 1)


def unit_for(longest: float) -> TimeUnit:
    """Return the unit in which times up to ``longest`` seconds have few digits."""
    if longest < 1e-3:
        return _MICROSECONDS
    return _MILLISECONDS if longest < 10 else _SECONDS


def _if_known(show: Callable[[float], str]) -> Callable[[float | None], str]:
    @wraps(show)
    def shown(value: float | None) -> str:
        return MISSING if value is None or not math.isfinite(value) else show(value)

    return shown


@_if_known
def figures(value: float) -> str:
    """Format a number in at most four columns (five for a million and more)."""
    size = abs(value)
    if size < 0.005:
        return "0"
    for limit, digits in ((9.995, 2), (99.95, 1), (9999.5, 0)):
        if size < limit:
            return f"{value:.{digits}f}"
    return _scaled(value, 1000, "kMGTP")


def _scaled(value: float, base: int, letters: str) -> str:
    for letter in letters:
        value /= base
        if abs(value) < 9.95:
            return f"{value:.1f}{letter}"
        if abs(value) < 999.5:
            break
    return f"{value:.0f}{letter}"


def time_in(value: float | None, unit: TimeUnit) -> str:
    """Format seconds in a unit, without its name."""
    return figures(None if value is None else value * unit.factor)


def time(seconds: float) -> str:
    """Format a time with three digits and its unit: ``31.0 ms``, ``1.23 s``."""
    unit = unit_for(seconds if seconds < 1 else math.inf)
    return f"{time_in(seconds, unit)} {unit.name}"


@_if_known
def duration(seconds: float) -> str:
    """Format a time for a sentence: ``31.0 ms``, ``1.2 s``, ``5 min``."""
    seconds = max(seconds, 0.0)
    if seconds < 0.9995:
        return time(seconds)
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


@_if_known
def age(seconds: float) -> str:
    """Format a time in at most four columns: ``3s``, ``2m``, ``5h``, ``4d``."""
    for limit, size, letter in ((120, 1, "s"), (7200, 60, "m"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{max(seconds, 0) / size:.0f}{letter}"
    return f"{seconds / 86400:.0f}d"


@_if_known
def size(count: float) -> str:
    """Format bytes for a table, in at most four columns and binary units: ``640M``, ``9.5G``."""
    return f"{count:.0f}B" if count < 1000 else _scaled(count, 1024, "KMGTP")


KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@_if_known
def binary_size(size: float) -> str:
    """Format bytes for a sentence, in binary units: ``512 bytes``, ``64 MiB``, ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        # What would round to 1024 of a unit is 1 of the next one.
        if size >= unit * (1 - 0.05 / 1024):
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size:.0f} bytes"


@_if_known
def percent(ratio: float) -> str:
    """Format a ratio in at most four columns: ``87%``."""
    return f"{ratio * 100:.0f}%"


@_if_known
def watts(power: float) -> str:
    """Format a power in at most four columns: ``412W``."""
    return f"{power:.0f}W"


@_if_known
def degrees(celsius: float) -> str:
    """Format a temperature: ``61C``."""
    return f"{celsius:.0f}C"


def count(number: float, noun: str, plural: str = "") -> str:
    """Format a number with its noun: ``1 rank``, ``2 ranks``, ``1.5 cores``.

    ``plural`` is for nouns that do not simply take an s.
    """
    digits = f"{number:.1f}".removesuffix(".0")
    return f"{digits} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int = 8) -> str:
    """Join names: ``a, b``, or ``a, b and 7 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# -- Sets of ranks: ``0,2-3``, ``ranks 0, 2 and 3``


SHORT = 4  # Ranks that a sentence lists one by one

_SET = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")


def is_rank_set(text: str) -> bool:
    """Return whether a word is a set of ranks."""
    return _SET.fullmatch(text) is not None


def rank_set(text: str) -> frozenset[int]:
    """Parse a set of ranks.

    Raises:
        ValueError: The text is not a set of ranks, or contains a rank above 100,000.
    """
    if not is_rank_set(text):
        raise ValueError(text)
    ranks: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        low, high = int(first), int(last or first)
        if high < low or high > 100_000:
            raise ValueError(text)
        ranks.update(range(low, high + 1))
    return frozenset(ranks)


def spans(ranks: Iterable[int]) -> str:
    """Format ranks as ``0,2-7``."""
    found: list[list[int]] = []
    for number in sorted(set(ranks)):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def bracketed(ranks: Iterable[int]) -> str:
    """Format ranks as ``[0,2-7]``, as in headings of stacks."""
    return f"[{spans(ranks)}]"


def named(ranks: Iterable[int], noun: str = "rank") -> str:
    """Format numbered things for a sentence: ``rank 1``, ``ranks 0, 2 and 3``, ``ranks 0,2-7``."""
    chosen = sorted(set(ranks))
    words = [str(number) for number in chosen]
    if len(words) == 1:
        return f"{noun} {words[0]}"
    if len(words) > SHORT:
        return f"{noun}s {spans(chosen)}"
    return f"{noun}s {', '.join(words[:-1])} and {words[-1]}"


# -- Texts of ranks, grouped by what they have in common


_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


def grouped(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """Group ranks by equal texts, ascending by their first rank.

    Addresses of objects are ignored, since they differ between processes. A text that several ranks
    share omits addresses that differ.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in sorted(texts):
        groups[_ADDRESS.sub("0x...", texts[rank])].append(rank)
    return [
        (ranks, texts[ranks[0]] if len({texts[rank] for rank in ranks}) == 1 else text)
        for text, ranks in groups.items()
    ]


def grouped_lines(texts: Mapping[int, str]) -> Iterator[str]:
    """Yield lines for a terminal: ``ranks 0-6: 0.731``. Longer texts go below their ranks."""
    for ranks, text in grouped(texts):
        head = f"rank {ranks[0]}:" if len(ranks) == 1 else f"ranks {spans(ranks)}:"
        lines = [shown(line, "\t") for line in text.split("\n")]
        if len(lines) == 1:
            yield f"{head} {lines[0]}".rstrip()
        else:
            yield head
            yield from (f"  {line}".rstrip() for line in lines)


# -- Untrusted text on a terminal or in a log


_JOINERS = "\u200c\u200d"
"""Invisible characters that words and emoji are spelled with. They control nothing."""

_FORMATTING = re.compile(r"\x1b\[[0-9;:?]*[ -/]*[@-~]")


def shown(text: str, keep: str = "") -> str:
    r"""Escape control characters as ``\x1b``, ``\x9b`` or ``\u202e``.

    These are C0 and C1, marks that change the direction of text, other invisible marks, line
    separators, and lone surrogates, which stand for file names that are not UTF-8. Those in
    ``keep`` stay: newlines and tabs if the caller lays out lines.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep or not _is_control(each) else _escape(each)
        for each in text
    )


def _is_control(character: str) -> bool:
    category = unicodedata.category(character)
    return category in ("Cc", "Cs", "Zl", "Zp") or (category == "Cf" and character not in _JOINERS)


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character, f"\\x{code:02x}")
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def without_formatting(text: str) -> str:
    """Remove escape sequences that set colours or move the cursor.

    Other control characters remain. Pass the result to :func:`shown`.
    """
    return _FORMATTING.sub("", text) if "\x1b" in text else text


def shown_json(value: Any, keep: str) -> Any:
    """Escape control characters in JSON as `shown` does. Infinities and NaN become null."""
    if isinstance(value, str):
        return shown(value, keep)
    if isinstance(value, dict):
        return {shown(str(key)): shown_json(each, keep) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown_json(each, keep) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def json_text(value: Any, **options: Any) -> str:
    """Encode JSON in ASCII without control characters. ``options`` are those of ``json.dumps``."""
    # json.dumps escapes all control characters but this one.
    return json.dumps(value, **options).replace("\x7f", "\\u007f")

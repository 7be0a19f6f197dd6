"""Format numbers, sizes, durations and lists for people."""

from __future__ import annotations

from collections.abc import Sequence

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def shown(size: float) -> str:
    """Bytes in binary units: ``64 MiB``, ``1.5 GiB``."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size / unit:.1f}".removesuffix(".0") + f" {name}"
    return f"{size:.0f} bytes"


def counted(count: float, noun: str) -> str:
    """``1 node``, ``2 nodes``, ``1.5 cores``."""
    return f"{count:.1f}".removesuffix(".0") + f" {noun}{'' if count == 1 else 's'}"


def first(names: Sequence[str], most: int = 8) -> str:
    """``a, b``, or ``a, b and 7 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def duration(seconds: float) -> str:
    """``40 s``, ``5 min``, ``3 h 5 min``."""
    hours, minutes = divmod(int(seconds) // 60, 60)
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"

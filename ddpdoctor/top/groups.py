"""What the ranks do now, equal ones merged: ``[0,2-3] backward train.py:61``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ddpdoctor.top.snapshot import RankRow


@dataclass(frozen=True)
class Group:
    """Ranks that do the same."""

    ranks: tuple[int, ...]
    doing: str
    """Phase or collective, or the state where the rank does nothing."""
    site: str
    since: float | None
    """Seconds that the longest of them has been at it."""


def merged(rows: Sequence[RankRow]) -> list[Group]:
    """The groups, those of few ranks first: the odd one out is what a person looks for."""
    found: dict[tuple[str, str], list[RankRow]] = {}
    for row in rows:
        found.setdefault((doing(row), short_site(row.site)), []).append(row)
    groups = [
        Group(
            tuple(sorted(row.rank for row in members)),
            what,
            site,
            max(
                (row.since for row in members if row.since is not None and _runs(row)), default=None
            ),
        )
        for (what, site), members in found.items()
    ]
    return sorted(groups, key=lambda group: (len(group.ranks), group.ranks))


def _runs(row: RankRow) -> bool:
    return row.state not in ("dead", "ended")


def doing(row: RankRow) -> str:
    """What a rank does, in a few words."""
    if row.state in ("dead", "ended"):
        return row.said or row.state
    what = f"{row.phase or 'unknown'} ({row.collective})" if row.collective else row.phase
    if row.state == "debugger":
        return f"in the debugger, {what}" if what else "in the debugger"
    return what or row.state


@lru_cache(maxsize=1024)
def short_site(site: str) -> str:
    """A place in the code, relative to the working directory if it lies below it."""
    path, colon, line = site.rpartition(":")
    if not path:
        return site
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):
        return site
    return f"{path if relative.startswith('..') else relative}{colon}{line}"

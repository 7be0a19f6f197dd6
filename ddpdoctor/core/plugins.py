"""Load what other packages add to ddpdoctor: entry points of rules, checks and known failures.

An entry point is loaded where the built-in ones of its kind are registered, which happens in no
rank. A plug-in that fails is left out as a whole and reported in one line (docs/plugins.md).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

RULES = "ddpdoctor.rules"
CHECKS = "ddpdoctor.checks"
FAILURES = "ddpdoctor.failures"

OWNERS: dict[str, str] = {}  # Plug-ins by the codes that they registered, as ``name version``

_CODE = re.compile(r"(?!DDP)[A-Z]{2,6}\d{3}")
_MAX_ERROR = 200  # Characters of an exception that are shown

_failures: list[str] = []


class Coded(Protocol):
    """A rule, a check or a known failure."""

    @property
    def code(self) -> str:
        """The code of its findings."""


Entry = TypeVar("Entry", bound=Coded)


def load(
    group: str,
    registry: dict[str, Entry],
    take: Callable[[Any], None] | None = None,
    known: Collection[str] = (),
) -> None:
    """Import the plug-ins of an entry-point group.

    Args:
        group: The group.
        registry: The registry that importing a plug-in, or ``take``, adds to.
        take: Called with the object that an entry point names.
        known: Codes of ddpdoctor itself that a plug-in may use.
    """
    # Not at the top: ranks import this module by way of `errors`, and load no plug-in.
    from importlib.metadata import entry_points

    for entry in sorted(entry_points(group=group), key=lambda each: (each.name, each.value)):
        before = dict(registry)
        owner = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.name
        try:
            loaded = entry.load()
            if take is not None:
                take(loaded)
            codes = {each.code for name, each in registry.items() if name not in before}
            for code in codes.difference(known):
                if not _CODE.fullmatch(code):
                    raise ValueError(
                        f"{code} is not a valid code for a plug-in: 2 to 6 capital letters, "
                        "other than DDP, and 3 digits"
                    )
        except (Exception, SystemExit) as error:
            registry.clear()
            registry.update(before)
            _failures.append(
                f"the plug-in {owner} is left out: {entry.value} ({group}): "
                f"{repr(error)[:_MAX_ERROR]}"
            )
        else:
            OWNERS.update(dict.fromkeys(codes.difference(known), owner))


def take_failures() -> list[str]:
    """Return messages about plug-ins that failed since the last call."""
    taken = _failures[:]
    _failures.clear()
    return taken

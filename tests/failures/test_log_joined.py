"""A log that a later try was appended to: the last try is what is reported."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.failures.log import read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import BANNER

LOGS = {each.stem: each.read_bytes() for each in (Path(__file__).parents[1] / "logs").glob("*.log")}
CUT = {"port_in_use", "name_unresolved_in_python", "rendezvous_timeout"}
"""Those that do not show that their process ended: their tracebacks have lost their heads."""


def verdict(log: bytes) -> list[tuple[str, str]]:
    """The failure that is reported first."""
    found = findings(read("job.log", [log]))
    return [(each.code, each.message) for each in found if each.severity == Severity.ERROR][:1]


@cache
def tried(name: str) -> bytes:
    """A log as its launcher began it."""
    return BANNER.encode() + LOGS[name] + b"\n"


@cache
def alone(name: str) -> list[tuple[str, str]]:
    return verdict(tried(name))


FAILED = [name for name in sorted(LOGS) if alone(name)]


@pytest.mark.parametrize("earlier", [name for name in FAILED if name not in CUT])
def test_the_try_before_does_not_change_the_verdict(earlier: str) -> None:
    # Each as the later one of some, not of all: all pairs take ten times as long.
    later = FAILED[FAILED.index(earlier) % 10 :: 10]
    changed = [each for each in later if verdict(tried(earlier) + tried(each)) != alone(each)]
    assert changed == []

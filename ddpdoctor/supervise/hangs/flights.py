"""What the Flight Recorders of the ranks hold: of each group the calls around what hangs."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddpdoctor.analysis.calls import first_pending, from_flight
from ddpdoctor.core import opening
from ddpdoctor.core.opening import integer
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.system.waiting import pause

BEFORE, BEHIND = 24, 8
"""Calls of a group that are kept before and behind the first one that some rank has not done."""

NEWEST = 24
"""Calls of a group that are kept in any case."""


def flights(run: Run, ranks: Iterable[Rank], number: int, deadline: float) -> dict[int, JsonObject]:
    """What the Flight Recorders hold, as far as they answer in time.

    Args:
        run: A snapshot of the run.
        ranks: The ranks of this host.
        number: What they were asked with.
        deadline: Monotonic seconds.
    """
    found: dict[int, JsonObject] = {}
    open_ = [rank for rank in ranks if rank.exit is None]
    while True:
        for rank in list(open_):
            answer = _read(run.path / f"{rank_stem(rank.rank, rank.restart)}.flight.json")
            if answer is not None and integer(answer, "asked") >= number:
                found[rank.rank] = {
                    "flight": answer.get("entries"),
                    "flight_trouble": answer.get("trouble", ""),
                    "device": answer.get("device"),
                    "sends": any(map(_sends, answer.get("entries") or ())),
                }
                open_.remove(rank)
        if not open_ or time.monotonic() >= deadline:
            break
        pause(0.05)
    for rank in open_:
        found[rank.rank] = {"flight": None, "flight_trouble": "did not answer"}
    answered = {rank: each["flight"] for rank, each in found.items() if each["flight"]}
    for number, entries in around(answered).items():
        found[number]["flight"] = entries
    return found


def _read(path: Path) -> JsonObject | None:
    with contextlib.suppress(OSError, ValueError):
        return opening.json_object(path, opening.MOST_RECORD)
    return None


def _sends(entry: JsonObject) -> bool:
    """Whether it is a send or a receive that is not done."""
    done = entry.get("retired") or entry.get("state") == "completed"
    return bool(entry.get("point_to_point")) and not done


_Numbering = tuple[str, str]
"""A group and its backend, each of which counts for itself."""


def around(recorded: Mapping[int, list[JsonObject]]) -> dict[int, list[JsonObject]]:
    """The calls around the first one of each group that some rank has not done, and the newest.

    A rank that skipped a call goes on as far as its device's queue reaches, dozens of calls: among
    its newest ones there may be none that the others know.

    Args:
        recorded: All calls of each rank, in their order.
    """
    groups = {rank: _by_numbering(entries) for rank, entries in recorded.items()}
    first: dict[_Numbering, int] = {}
    for of_rank in groups.values():
        for numbering, entries in of_rank.items():
            pending = first_pending([from_flight(each) for each in entries])
            if pending is not None:
                first[numbering] = min(pending.sequence, first.get(numbering, pending.sequence))
    return {
        rank: [
            each
            for numbering, entries in of_rank.items()
            for each in _kept(entries, first.get(numbering))
        ]
        for rank, of_rank in groups.items()
    }


def _by_numbering(entries: Iterable[JsonObject]) -> dict[_Numbering, list[JsonObject]]:
    found: dict[_Numbering, list[JsonObject]] = defaultdict(list)
    for each in entries:
        if not each.get("point_to_point"):
            found[str(each.get("group")), str(each.get("backend") or "")].append(each)
    return found


def _kept(entries: list[JsonObject], first: int | None) -> list[JsonObject]:
    older, newest = entries[:-NEWEST], entries[-NEWEST:]
    if first is None:
        return newest
    wanted = range(first - BEFORE, first + BEHIND)
    return [*(each for each in older if integer(each, "sequence") in wanted), *newest]

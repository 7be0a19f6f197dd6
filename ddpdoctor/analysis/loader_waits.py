"""Why a rank waits for its data longer than others do, where loader workers prepare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ddpdoctor.analysis.pace import BORNE_OUT
from ddpdoctor.analysis.profiles import Profile
from ddpdoctor.analysis.stretches import Rhythm, ordinal
from ddpdoctor.analysis.surplus import Lag
from ddpdoctor.core import units
from ddpdoctor.core.finding import Location
from ddpdoctor.run.records.data import PassRecord
from ddpdoctor.run.snapshot import Rank

HEAVIER = 1.5
"""How many times the CPU time of the others' a rank's loader workers take if theirs is more work
and not a machine that is crowded."""

PERSISTENT = "Keep the workers from pass to pass: DataLoader(..., persistent_workers=True)."


@dataclass(frozen=True)
class Reason:
    """Why a rank is slow."""

    words: str = ""
    """The end of the sentence."""
    location: Location | None = None
    evidence: tuple[str, ...] = ()
    fix: str = ""


def loader_workers(rank: Rank) -> int:
    """How many worker processes the loader has that a rank trained on last; 0 without any."""
    passes = reversed(rank.records.of(PassRecord))
    return next((each.workers for each in passes if each.marks), 0)


def restarted(workers: int) -> str:
    """What is said of workers that do not stay."""
    return f"the loader's {units.count(workers, 'worker')} start again in each pass"


def for_workers(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> Reason | None:
    """What there is to say of loader workers that a rank waits for; None if it has none.

    Args:
        lag: A rank that waits for data.
        mine: Its samples.
        others: Those of ranks that do not.
    """
    count, rhythm = loader_workers(lag.rank), lag.rhythm or Rhythm()
    children = mine.record.children if mine is not None else 0
    if not (count or children):
        return None
    facts: list[str] = []
    if mine is not None and children:
        busy, usual = mine.share("children_ran"), [each.share("children_ran") for each in others]
        fact = f"its {children} child processes, workers among them, use {busy:.0%} of a core"
        facts.append(f"{fact}; those of the others {median(usual):.0%}" if usual else fact)
    if rhythm.of_passes and count:
        facts.append(restarted(count))
        words = ": it waits for its loader workers to start"
        return Reason(words, evidence=tuple(facts), fix=PERSISTENT)
    if rhythm.period == count > 1:
        facts.append(
            f"its loader has {count} workers, and each prepares every {ordinal(count)} batch: "
            "together they fall behind"
        )
    return Reason(
        ": it waits for its loader workers",
        evidence=tuple(facts),
        fix="Share the heavy samples out among the ranks, make them lighter, or use more loader "
        "workers (num_workers) on all ranks.",
    )


def workers_crowded(lag: Lag, mine: Profile | None, others: Sequence[Profile]) -> bool:
    """Whether it waits for loader workers that are slow only for want of cores, as far as known."""
    if lag.phase != "data":
        return False
    if mine is None or not others:
        has = any(each.workers for each in lag.rank.records.of(PassRecord))
        return has and not lag.cores_idle
    if not mine.record.children:
        return False
    ran, waited = mine.a_step("children_ran"), mine.a_step("children_waited")
    heavier = ran >= HEAVIER * median(each.a_step("children_ran") for each in others)
    return waited > BORNE_OUT * ran and not heavier

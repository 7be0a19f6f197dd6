"""Relations between rules: which findings are consequences of which, and when a finding lapses.

A rule names in its registration the rules whose findings follow from it, each with
one of the predicates here, which is given the cause and the possible consequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from ddpdoctor.core.finding import Finding
    from ddpdoctor.run.snapshot import Run

Same = Callable[["Finding", "Finding"], bool]
"""Whether a finding is about the fault that a second one is the consequence of."""


class Lapsed(NamedTuple):
    """What has become of a finding."""

    why: Literal["untrue", "over"]
    reason: str
    sure: bool = False
    """One look is enough; else it may come back in the next one."""


Lapse = Callable[["Finding", "Run"], Lapsed | None]
"""What has become of a finding that is not found any more; None if it stands all the same."""

STANDSTILL = "a standstill"
"""Subject of what an examination of a job that hangs saw, and of what explains that."""

MISPAIRED = "collectives that met others"
"""Subject of what makes the ranks' collectives differ, and of ends that only follow from that."""

ABORT = "an abort in a collective"
"""The same, of an abort whose last words, which say why, may not have been read."""

MODELS = "models that DDP refuses"
"""Subject of models that differ, and of DDP's word about them."""

LOST = "a lost peer"
"""Subject of an end that is the consequence of what is to blame for a standstill."""

END = "the end of attempt "
"""With its number: subject of what ended an attempt."""

PARAMETERS = "the parameters of module "
"""With its number: subject of parameters that differ between ranks, and of what explains that."""

LIKELY = "a likely cause"
"""Subject of what is taken for the cause because none is known for sure."""

STANDSTILLS = (
    "DDP401",
    *(f"DDP{number}" for number in range(802, 816)),
)
"""The rules of what an examination of a job that hangs saw."""

APART = ("DDP401", "DDP402", "DDP403", "DDP803", "DDP804")
"""The rules of what makes the ranks' collectives differ."""


# -- the same fault


def always(cause: Finding, effect: Finding) -> bool:
    """The one in whatever place explains the other."""
    return True


def certain(cause: Finding, effect: Finding) -> bool:
    """The cause is certain: a warning explains nothing."""
    return cause.severity.label == "error"


def of_likely(cause: Finding, effect: Finding) -> bool:
    """The cause is certain, and the other is only likely."""
    return certain(cause, effect) and LIKELY in effect.subjects


def same_subject(cause: Finding, effect: Finding) -> bool:
    """Both are about one and the same thing."""
    return not cause.subjects.isdisjoint(effect.subjects)


def afterwards(cause: Finding, effect: Finding) -> bool:
    """The cause has happened, and the other not before it."""
    return 0 < cause.moment <= effect.moment


def same_ranks_afterwards(cause: Finding, effect: Finding) -> bool:
    """The same, and the other blames none but ranks that the cause does."""
    return set(effect.ranks) <= set(cause.ranks) and afterwards(cause, effect)


def ended_by(cause: Finding, effect: Finding) -> bool:
    """The other is the end of a rank, and one that the cause brings about."""
    if not any(each.startswith(END) for each in effect.subjects):
        return False
    blamed = STANDSTILL in cause.subjects and cause.severity.label == "error"
    return same_subject(cause, effect) or (LOST in effect.subjects and blamed)


def brings_about(cause: Finding, effect: Finding) -> bool:
    """The other is what was seen of a standstill, or such an end, that the cause brings about."""
    standstill = STANDSTILL in cause.subjects and STANDSTILL in effect.subjects
    return standstill or ended_by(cause, effect)


def came_first(cause: Finding, effect: Finding) -> bool:
    """Both are about one line, or the other happened, or ended a rank, after the cause."""
    at = effect.location
    return (
        (at is not None and at == cause.location)
        or afterwards(cause, effect)
        or ended_by(cause, effect)
    )


# -- when it is not found any more


def fact(finding: Finding, run: Run) -> Lapsed | None:
    """It happened, or was not true: records stay, so that only more of them speak against it."""
    return Lapsed("untrue", "later records do not bear it out")


def pace(finding: Finding, run: Run) -> Lapsed | None:
    """It is about the newest steps, and was true of older ones."""
    return Lapsed("over", "the newest steps do not show it")


def hang(finding: Finding, run: Run) -> Lapsed | None:
    """It says why a job hangs, which one that goes on does not."""
    if run.hang is None:
        return Lapsed("untrue", "the job went on", sure=True)
    return Lapsed("untrue", "a later look does not show it")


def start(finding: Finding, run: Run) -> Lapsed | None:
    """It says what the start of a job waits for, which was true until the job went on.

    That its ranks are somewhere else now shows so, too: the job may have come to a stop again
    before it was seen that the first one was over.
    """
    since = [
        rank.status.since
        for rank in run.last
        if rank.rank in finding.ranks and rank.status is not None
    ]
    moved = min(since, default=0) > finding.moment
    if run.hang is not None and not moved:
        return hang(finding, run)
    later = max(run.went_on, default=0) - finding.moment
    seconds = later // 1_000_000_000
    after = f" {seconds} s later" if finding.moment and seconds > 0 else ""
    return Lapsed("over", f"the job went on{after}", sure=True)


def event(finding: Finding, run: Run) -> Lapsed | None:
    """It happened, and its evidence is kept for a while only; a standstill may have ended."""
    return hang(finding, run) if STANDSTILL in finding.subjects else None

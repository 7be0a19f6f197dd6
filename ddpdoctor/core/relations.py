"""Predicates that relate two findings: whether one is the consequence of the other.

A rule's registration names the rules whose findings follow from its own, each with one of these
predicates. A predicate takes the cause and its possible consequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from ddpdoctor.core.finding import Finding

Same = Callable[["Finding", "Finding"], bool]
"""Returns whether two findings are about the same fault: a cause and its consequence."""


class Lapsed(NamedTuple):
    """Why an earlier finding no longer holds."""

    why: Literal["untrue", "over"]
    reason: str
    sure: bool = False
    """One examination is enough. Otherwise the finding may come back in the next one."""


Lapse = Callable[["Finding", Any], Lapsed | None]
"""Takes an earlier finding and the run in which it is no longer found. None if it still holds."""


def fact(finding: Finding, run: object) -> Lapsed | None:
    """Lapse as disproved: records of what happened stay, so only more of them contradict it."""
    return Lapsed("untrue", "later records do not bear it out")


def pace(finding: Finding, run: object) -> Lapsed | None:
    """Lapse as over: the finding was true of older steps."""
    return Lapsed("over", "the newest steps do not show it")


# -- Codes and subjects of findings


STRAGGLERS = ("DDP610", "DDP612")
"""Findings about a rank, or a pipeline stage, that the others wait for."""

STANDSTILL = "a standstill"  # The result of examining a hanging job, and its explanation

MISPAIRED = "collectives that met others"
"""Causes of differing collectives between ranks, and the failures that result from them."""

ABORT = "an abort in a collective"
"""An abort whose last output, which states the reason, may not have been read."""

MODELS = "models that DDP refuses"  # Models that differ, and DDP's message about them
LOST = "a lost peer"  # An end that follows from the cause of a standstill
END = "the end of attempt "  # Followed by a number: the cause of the end of an attempt

PARAMETERS = "the parameters of module "
"""Followed by a number: parameters that differ between ranks, and their explanations."""

LIKELY = "a likely cause"  # The presumed cause, if none is certain

UNREDUCED = "no reduction"  # Ranks of several nodes that did not reduce, without a wrong result
NO_NETWORK = "no network here"  # This node has none, or reaches no other one
PORT = "the port of the rendezvous"  # It cannot be listened on
LOST_PACKETS = "lost packets "  # Followed by two nodes: packets that are lost between them

# -- Predicates


def always(cause: Finding, effect: Finding) -> bool:
    """Return True."""
    return True


def certain(cause: Finding, effect: Finding) -> bool:
    """Return whether the cause is an error. A warning explains nothing."""
    return cause.severity.label == "error"


def of_likely(cause: Finding, effect: Finding) -> bool:
    """Return whether the cause is certain and the effect only likely."""
    return certain(cause, effect) and LIKELY in effect.subjects


def same_subject(cause: Finding, effect: Finding) -> bool:
    """Return whether both share a subject."""
    return not cause.subjects.isdisjoint(effect.subjects)


def of_these(causes: str | tuple[str, ...], effects: str | tuple[str, ...]) -> Same:
    """Return a predicate: the subjects of cause and effect begin with these."""

    def related(cause: Finding, effect: Finding) -> bool:
        return cause.about.startswith(causes) and effect.about.startswith(effects)

    return related


def certain_and_unreduced(cause: Finding, effect: Finding) -> bool:
    """Return whether the cause is certain and the effect is ranks that did not reduce."""
    return certain(cause, effect) and UNREDUCED in effect.subjects


def loses_packets(cause: Finding, effect: Finding) -> bool:
    """Return whether the cause is lost packets, which may explain the effect."""
    lost = {each for each in cause.subjects if each.startswith(LOST_PACKETS)}
    return bool(lost) and (UNREDUCED in effect.subjects or bool(lost & effect.subjects))


def afterwards(cause: Finding, effect: Finding) -> bool:
    """Return whether the effect happened at or after the time of the cause."""
    return 0 < cause.moment <= effect.moment


def same_ranks_afterwards(cause: Finding, effect: Finding) -> bool:
    """Return whether the effect came afterwards and blames only ranks that the cause blames."""
    return set(effect.ranks) <= set(cause.ranks) and afterwards(cause, effect)


def ended_by(cause: Finding, effect: Finding) -> bool:
    """Return whether the effect is the end of a rank that follows from the cause."""
    if not any(each.startswith(END) for each in effect.subjects):
        return False
    blamed = STANDSTILL in cause.subjects and cause.severity.label == "error"
    return same_subject(cause, effect) or (LOST in effect.subjects and blamed)


def brings_about(cause: Finding, effect: Finding) -> bool:
    """Return whether the effect is a standstill, or the end of a rank, due to the cause."""
    standstill = STANDSTILL in cause.subjects and STANDSTILL in effect.subjects
    return standstill or ended_by(cause, effect)


def came_first(cause: Finding, effect: Finding) -> bool:
    """Return whether both are about one line, or the effect came after the cause."""
    at = effect.location
    return (
        (at is not None and at == cause.location)
        or afterwards(cause, effect)
        or ended_by(cause, effect)
    )

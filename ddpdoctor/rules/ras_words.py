"""What NCCL's RAS said of a job that makes no progress, as evidence."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from ddpdoctor.analysis.ras_facts import NO_COUNTS
from ddpdoctor.core.opening import whole
from ddpdoctor.core.ranks import named
from ddpdoctor.core.units import count
from ddpdoctor.run.records.ras import Ras, RasDifference, RasGroup, RasProcess

_LINES = 6


def ras_lines(ras: Ras | None, world: int) -> tuple[str, ...]:
    """What RAS said, in lines of evidence."""
    if ras is None:
        return ()
    if ras.trouble:
        return (f"NCCL's RAS gave no answer: {ras.trouble}",)
    found = tuple(islice(_lines(ras, world), _LINES))
    if not found and ras.total:
        return ("by NCCL's RAS all ranks answer and have launched as many collectives",)
    return tuple(f"by NCCL's RAS {each}" for each in found)


def _lines(ras: Ras, world: int) -> Iterator[str]:
    dead = {(each.pid, each.host) for each in ras.silent if each.dead}
    known = set()
    for communicator in ras.communicators:
        of = "" if communicator.size == world else f" of a communicator of {communicator.size}"
        for each in communicator.missing:
            known.add((each.pid, each.host))
            is_dead = each.dead or (each.pid, each.host) in dead
            yield f"{named([each.rank])}{of} {_silence(each, is_dead)}"
        for difference in communicator.differences:
            yield f"{_differ(difference)}{of.replace(' of', ', in', 1)}"
    for each in ras.silent:
        if (each.pid, each.host) not in known:
            yield f"a process {_silence(each, each.dead)}"


def _silence(process: RasProcess, dead: bool) -> str:
    where = f" (process {process.pid} on {process.host})" if process.pid > 0 else ""
    return f"{'is dead or cut off' if dead else 'does not answer'}{where}"


def _differ(difference: RasDifference) -> str:
    groups = difference.groups
    if difference.what in NO_COUNTS:
        verb = "reported" if difference.what == "error" else "in state"
        return ", ".join(f"{_who(each)} {verb} {each.value}" for each in groups[:4])
    ordered = sorted(groups, key=lambda each: whole(each.value, -1))
    listed = ", ".join(f"{_who(each)} {each.value}" for each in ordered[:4])
    return f"{difference.what} operations launched: {listed}"


def _who(group: RasGroup) -> str:
    return named(group.ranks) if group.ranks else count(group.many, "rank")

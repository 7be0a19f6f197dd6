"""Whether names are looked up fast enough."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import replace

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged
from ddpdoctor.preflight.machine.names import ALL, Lookup, endpoint_name, full_name, own_name
from ddpdoctor.preflight.situation import Situation

SLOW = 1.0
"""Seconds from which a lookup holds a start up that a person notices."""


@check("lookups", "DDP008", limit=ALL)
def lookups(situation: Situation) -> Outcome:
    """Name lookups take so long that they delay or break the start of a job.

    What it finds
        A lookup of this machine's name, of its address back to a name, or of the rendezvous' host
        that takes over 1 s, or, of the rendezvous' host, that fails.

    Why it is bad
        torchrun and every rank look these names up several times before the first step: a name
        server that does not answer costs 5 to 30 s each time, and the rendezvous runs out of time.

    How to fix it
        Put the names of the nodes into /etc/hosts, or repair the name server in /etc/resolv.conf.

    Example
        Wrong: a name server in /etc/resolv.conf that was switched off.
        Right: one that answers, or `10.0.0.5 node1` in /etc/hosts.

    When it stays silent
        When names resolve within 1 s; about a host name that does not resolve, which is DDP003;
        about a rendezvous' host that does not, where several nodes are checked: that is DDP050.

    Since
        0.1.0
    """
    # First what the other checks ask for last, so that slow ones are waited for side by side.
    endpoint = situation.shared(endpoint_name)
    asked = [situation.shared(own_name)]
    if endpoint is not None and endpoint.name != situation.hostname:
        asked.append(endpoint)
    full = situation.shared(full_name)
    if full is not asked[0]:
        asked.append(replace(full, name=f"the full name of {situation.hostname}"))
    slowest = max(asked, key=lambda each: each.seconds)
    detail = f"{len(asked)} lookups, the slowest ({slowest.name}) in {slowest.seconds:.2f} s"
    # The nodes cannot meet without it, as that check says.
    told_there = situation.attendance_told
    return judged(detail, _findings(asked, endpoint, told_there=told_there))


def _findings(
    asked: list[Lookup], endpoint: Lookup | None, *, told_there: bool
) -> Iterator[Finding]:
    if endpoint is not None and not endpoint.addresses and not told_there:
        yield Finding(
            "DDP008",
            Severity.ERROR,
            f"the rendezvous' host {endpoint.name} does not resolve: {endpoint.problem}",
            fix="Correct the name, give its address instead, or put it into /etc/hosts.",
            paste=f"getent hosts {shlex.quote(endpoint.name)}",
            about="endpoint",
        )
    slow = [each for each in asked if each.seconds > SLOW and (each.addresses or each != endpoint)]
    if slow:
        yield Finding(
            "DDP008",
            Severity.WARNING,
            "name lookups are slow: "
            + ", ".join(f"{each.name} takes {each.seconds:.1f} s" for each in slow),
            evidence=tuple(f"{each.name}: {each.problem}" for each in slow if each.problem),
            fix="Put the names of the nodes into /etc/hosts, or repair the name server.",
            paste="cat /etc/resolv.conf",
            about="slow",
        )

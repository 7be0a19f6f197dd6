"""Name lookups: what a name resolves to, how long that takes, and whether that is fast enough."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, typed, warning
from ddpdoctor.preflight.deadline import bounded
from ddpdoctor.preflight.situation import Situation

LIMIT = 4.0
"""Seconds that a lookup may take before it counts as one without an answer."""

ALL = 20.0
"""Seconds that a check may take which waits for several of them."""


@dataclass(frozen=True)
class Lookup:
    """The answer to a name.

    Attributes:
        name: What was asked for.
        addresses: What it resolves to, in the resolver's order.
        seconds: How long that took.
        problem: Why there is no answer; empty if there is one.
    """

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""


def lookup(name: str, limit: float = LIMIT) -> Lookup:
    """Resolve a name as the C library does, IPv4 and IPv6."""
    began = time.monotonic()
    try:
        found = bounded(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM), limit)
    except TimeoutError:
        return Lookup(name, (), time.monotonic() - began, f"no answer within {limit:.0f} s")
    except (OSError, UnicodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else str(error)
        return Lookup(name, (), time.monotonic() - began, problem or str(error))
    addresses = dict.fromkeys(str(each[4][0]).partition("%")[0] for each in found)
    return Lookup(name, tuple(addresses), time.monotonic() - began)


def own_name(situation: Situation) -> Lookup:
    """This machine's host name, looked up."""
    return lookup(situation.hostname)


def full_name(situation: Situation) -> Lookup:
    """This machine's full name, as torchrun takes it for MASTER_ADDR, looked up again.

    It comes from the name server or /etc/hosts by the machine's address, and need not resolve.
    The time is that of both lookups. Where the host name has no answer, neither has this.
    """
    own = situation.shared(own_name)
    if not own.addresses:
        return own
    began = time.monotonic()
    try:
        name = bounded(lambda: socket.getfqdn(situation.hostname), LIMIT)
    except TimeoutError:
        problem = f"no answer within {LIMIT:.0f} s"
        return Lookup(situation.hostname, (), time.monotonic() - began, problem)
    except (OSError, UnicodeError) as error:
        return Lookup(situation.hostname, (), time.monotonic() - began, str(error))
    found = own if name == situation.hostname else lookup(name)
    return replace(found, seconds=time.monotonic() - began)


def endpoint_name(situation: Situation) -> Lookup | None:
    """The rendezvous' host, looked up; None if none is known."""
    endpoint = situation.endpoint
    return None if endpoint is None else lookup(endpoint[0])


SLOW = 1.0
"""Seconds from which a lookup holds a start up that a person notices."""


@check("lookups", "DDP008", limit=ALL)
def lookups(situation: Situation) -> Outcome:
    """Name lookups are so slow that they delay or break the start of a job.

    What it finds
        A lookup of this machine's name, of its address (reverse lookup), or of the rendezvous host
        that takes more than 1 s. A rendezvous host that does not resolve.

    Why it is bad
        torchrun and every rank look up these names several times before the first step. A name
        server that does not answer costs 5 to 30 s each time, and the rendezvous times out.

    How to fix it
        Add the names of the nodes to /etc/hosts, or fix the name server in /etc/resolv.conf.

    Example
        Wrong: a name server in /etc/resolv.conf that was switched off.
        Right: a name server that answers, or `10.0.0.5 node1` in /etc/hosts.

    When it stays silent
        If names resolve within 1 s. A host name that does not resolve is DDP003. If several nodes
        are checked, a rendezvous host that does not resolve is DDP050.
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
    return judged(detail, _findings(asked, endpoint, elsewhere=situation.attendance_checked))


def _findings(
    asked: list[Lookup], endpoint: Lookup | None, *, elsewhere: bool
) -> Iterator[Finding]:
    if endpoint is not None and not endpoint.addresses and not elsewhere:
        yield failure(
            f"the rendezvous' host {endpoint.name} does not resolve: {endpoint.problem}",
            fix="Correct the name, give its address instead, or put it into /etc/hosts.",
            paste=typed("getent hosts {}", endpoint.name),
            about="endpoint",
        )
    slow = [each for each in asked if each.seconds > SLOW and (each.addresses or each != endpoint)]
    if slow:
        yield warning(
            "name lookups are slow: "
            + ", ".join(f"{each.name} takes {each.seconds:.1f} s" for each in slow),
            evidence=tuple(f"{each.name}: {each.problem}" for each in slow if each.problem),
            fix="Put the names of the nodes into /etc/hosts, or repair the name server.",
            paste="cat /etc/resolv.conf",
            about="slow",
        )

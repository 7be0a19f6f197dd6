"""Name lookups: what a name resolves to, how long that takes, and whether that is fast enough."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, typed, warning
from ddpdoctor.preflight.deadline import bounded, waited_for_core
from ddpdoctor.preflight.machine.name_servers import asked as ask_servers
from ddpdoctor.preflight.machine.name_servers import dead
from ddpdoctor.preflight.situation import Situation

LIMIT = 12.0
"""Seconds that a lookup may take before it counts as one without an answer: glibc waits 5 s for
each name server, and the third one may be the first that answers."""

ALL = 45.0
"""Seconds that a check may take which waits for several of them."""


@dataclass(frozen=True)
class Lookup:
    """The answer to a name.

    Attributes:
        name: What was asked for.
        addresses: What it resolves to, in the resolver's order.
        seconds: How long that took, without the time in which this process waited for a core.
        problem: Why there is no answer; empty if there is one.
    """

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""


def lookup(name: str, limit: float = LIMIT) -> Lookup:
    """Resolve a name as the C library does, IPv4 and IPv6; one that looks slow twice."""
    found = resolve(name, limit)
    if found.addresses and found.seconds > SLOW:
        # Other work makes a lookup slow once; a name server does each time.
        again = resolve(name, limit)
        found = min(found, again, key=lambda each: (not each.addresses, each.seconds))
    return found


def resolve(name: str, limit: float = LIMIT) -> Lookup:
    """Resolve a name as the C library does, IPv4 and IPv6, once: its time is not to be judged."""

    def ask() -> tuple[list[str], str, float]:
        began, before = time.monotonic(), waited_for_core()
        problem, addresses = "", []
        try:
            answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            addresses = [str(each[4][0]).partition("%")[0] for each in answer]
        except (OSError, UnicodeError) as error:
            words = error.strerror if isinstance(error, OSError) else str(error)
            problem = words or str(error)
        took = time.monotonic() - began
        return addresses, problem, max(0.0, took - (waited_for_core() - before))

    try:
        addresses, problem, seconds = bounded(ask, limit)
    except TimeoutError:
        return Lookup(name, (), limit, f"no answer within {limit:.0f} s")
    return Lookup(name, tuple(dict.fromkeys(addresses)), seconds, problem)


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

    def ask() -> tuple[str, float]:
        began, before = time.monotonic(), waited_for_core()
        name = socket.getfqdn(situation.hostname)
        return name, max(0.0, time.monotonic() - began - (waited_for_core() - before))

    try:
        name, seconds = bounded(ask, LIMIT)
        if seconds > SLOW:
            name, seconds = min((name, seconds), bounded(ask, LIMIT), key=lambda each: each[1])
    except TimeoutError:
        return Lookup(situation.hostname, (), LIMIT, f"no answer within {LIMIT:.0f} s")
    except (OSError, UnicodeError) as error:
        return Lookup(situation.hostname, (), 0.0, str(error))
    if name == situation.hostname:
        return replace(own, seconds=seconds)
    found = lookup(name)
    return replace(found, seconds=seconds + found.seconds)


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
        that takes more than 1 s, twice. A rendezvous host that does not resolve. Then each name
        server is asked, and one that does not answer is named: glibc waits 5 s for it, each time.

    Why it is bad
        torchrun and every rank look up these names several times before the first step. A name
        server that does not answer costs 5 to 30 s each time, and the rendezvous times out.

    How to fix it
        Add the names of the nodes to /etc/hosts, or fix the name server in /etc/resolv.conf.

    Example
        Wrong: a name server in /etc/resolv.conf that was switched off.
        Right: a name server that answers, or `10.0.0.5 node1` in /etc/hosts.

    When it stays silent
        If names resolve within 1 s, less the time in which this process waited for a core. A host
        name that does not resolve is DDP003. If several nodes are checked, a rendezvous host that
        does not resolve is DDP050.
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
    troubled = [each for each in asked if each.seconds > SLOW or not each.addresses]
    silent = dead(ask_servers(situation, troubled[0].name)) if troubled else ""
    elsewhere = situation.attendance_checked
    return judged(detail, _findings(asked, endpoint, silent, elsewhere=elsewhere))


def _findings(
    asked: list[Lookup], endpoint: Lookup | None, silent: str, *, elsewhere: bool
) -> Iterator[Finding]:
    if endpoint is not None and not endpoint.addresses and not elsewhere:
        yield failure(
            f"the rendezvous' host {endpoint.name} does not resolve: {endpoint.problem}",
            evidence=(silent,) if silent else (),
            fix="Repair the name server: the name may be right. Or give its address instead, or "
            "put it into /etc/hosts."
            if silent
            else "Correct the name, give its address instead, or put it into /etc/hosts.",
            paste="cat /etc/resolv.conf" if silent else typed("getent hosts {}", endpoint.name),
            about="endpoint",
        )
    slow = [each for each in asked if each.seconds > SLOW and (each.addresses or each != endpoint)]
    if slow:
        yield warning(
            "name lookups are slow: "
            + ", ".join(f"{each.name} takes {each.seconds:.1f} s" for each in slow),
            evidence=(
                *(f"{each.name}: {each.problem}" for each in slow if each.problem),
                *([silent] if silent else ()),
            ),
            fix="Take the name server that does not answer out of /etc/resolv.conf, or repair it."
            if silent
            else "Put the names of the nodes into /etc/hosts, or repair the name server.",
            paste="cat /etc/resolv.conf",
            about="slow",
        )

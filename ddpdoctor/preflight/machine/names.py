"""Name lookups: what a name resolves to, and how long that takes."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass, replace

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

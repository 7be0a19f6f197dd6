"""Whether another machine has this machine's address as well."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, check, failure, judged, skipped, typed
from ddpdoctor.preflight.machine.interfaces import Interface, best, gloo_choice, interfaces
from ddpdoctor.preflight.machine.lookups import ALL, endpoint_name, own_name
from ddpdoctor.preflight.situation import Situation

ATTEMPTS = 3
PATIENCE = 0.4
"""Seconds that an answer to one of them may take; on a local network it takes less than 1 ms."""

MOST_PACKETS = 1000
"""ARP packets of others that are read between two attempts."""

_ARP = 0x0806
_BROADCAST = b"\xff" * 6
_PACKET = struct.Struct("!HHBBH6s4s6s4s")
"""ARP for IPv4 over Ethernet (RFC 826): hardware, protocol, sizes, operation, sender, target."""
_REQUEST, _REPLY = 1, 2


@check("own-address", "DDP018", limit=ALL)
def own_address(situation: Situation) -> Outcome:
    """Another machine has this machine's IP address as well.

    What it finds
        An answer by ARP, from another network card, to the question who has this machine's address
        (RFC 5227, as the operating system asks before it takes an address). The addresses are those
        on the interfaces that lead to the endpoint and that gloo takes.

    Why it is bad
        What the other nodes send arrives at one of the two machines, now at this one and now at the
        other. Connections are never answered or break off, which looks like a firewall.

    How to fix it
        Give each machine its own address: a cloned virtual machine or disk image has the address of
        its model, and one that was typed in may be in the range that DHCP gives away.

    Example
        Wrong: node1 and node2, made from one image, both with 10.0.0.5 in their netplan.
        Right: 10.0.0.5 and 10.0.0.6

    When it stays silent
        In a job on one machine. It is skipped where raw sockets are not allowed (they need root, or
        CAP_NET_RAW in a container), and on a network that is no Ethernet. A machine in another
        network with the same address is found by gloo-addresses.
    """
    if situation.options.nnodes < 2:
        return skipped("one node")
    try:
        found = situation.shared(answers)
    except PermissionError:
        return skipped("raw sockets need root")
    except (OSError, AttributeError) as error:
        return skipped(f"no raw sockets for ARP here: {error}")
    if not found:
        return skipped("no interface with an IPv4 address on an Ethernet")
    return judged(f"asked by ARP for {', '.join(each.address for each in found)}", _findings(found))


@dataclass(frozen=True)
class Answer:
    """What came of asking for an address of this machine.

    Attributes:
        interface: Its name.
        address: The address.
        card: The Ethernet address of another machine that answers for it; empty if none does.
    """

    interface: str
    address: str
    card: str

    def __str__(self) -> str:
        return f"asked by ARP on {self.interface}, {self.card} answers for {self.address}"


def _findings(found: tuple[Answer, ...]) -> Iterator[Finding]:
    for each in found:
        if each.card:
            yield failure(
                f"another machine has this machine's address, {each.address}: packets for one "
                "arrive at the other",
                evidence=(str(each),),
                fix=FIX,
                paste=typed(PASTE, each.interface),
                about=each.interface,
            )


FIX = "Give each machine its own address. What this one has:"
PASTE = "ip address show dev {}"


def shared_address(situation: Situation) -> Answer | None:
    """The answer of another machine that has this one's address, if one is known to be there."""
    try:
        return next((each for each in situation.shared(answers) if each.card), None)
    except (OSError, AttributeError):
        return None


def answers(situation: Situation) -> tuple[Answer, ...]:
    """What came of asking for each address at which the other nodes reach this machine.

    Raises:
        OSError: Raw sockets are not allowed here.
        AttributeError: This system has none of this kind.
    """
    cards = _cards()
    return tuple(
        Answer(interface.name, address, card)
        for interface, address in _own(situation)
        if (card := _asked(interface.name, address, cards)) is not None
    )


def _own(situation: Situation) -> list[tuple[Interface, str]]:
    """The interfaces that the other nodes are reached by, with an IPv4 address of each."""
    here = situation.shared(interfaces)
    endpoint = situation.shared(endpoint_name)
    towards = best(here, endpoint.addresses[0] if endpoint and endpoint.addresses else "")
    gloo = gloo_choice(situation.environ, here, situation.shared(own_name).addresses).interfaces
    chosen = {each.name: each for each in (towards, *gloo) if each is not None and each.outward}
    # What belongs to the link itself (169.254) is chosen with ARP, and is nothing to dial.
    return [
        (each, address)
        for each in chosen.values()
        for address in each.addresses
        if ":" not in address and not address.startswith("169.254.")
    ]


def _cards() -> frozenset[bytes]:
    """The Ethernet addresses of this machine: it answers itself where two cards share a network."""
    import psutil

    return frozenset(
        bytes.fromhex(each.address.replace(":", ""))
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == psutil.AF_LINK and len(each.address) == 17
    )


def _asked(name: str, address: str, cards: frozenset[bytes]) -> str | None:
    """The card of another machine that answers for an address; None on what is no Ethernet."""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ARP)) as line:
        line.bind((name, _ARP))
        own = line.getsockname()[4]
        if len(own) != 6:
            return None
        # Without a sender's address: no machine learns from the question that it is here.
        question = _PACKET.pack(1, 0x0800, 6, 4, _REQUEST, own, bytes(4), bytes(6), wanted)
        for _ in range(ATTEMPTS):
            line.sendto(question, (name, _ARP, 0, 0, _BROADCAST))
            until = time.monotonic() + PATIENCE
            for _ in range(MOST_PACKETS):
                # What came while this process got no core is read as well.
                line.settimeout(max(0.001, until - time.monotonic()))
                try:
                    packet = line.recv(_PACKET.size)
                except TimeoutError:
                    break
                if len(packet) < _PACKET.size:
                    continue
                *_, operation, sender, said, _, _ = _PACKET.unpack(packet)
                if operation == _REPLY and said == wanted and sender not in cards:
                    return str(sender.hex(":"))
    return ""

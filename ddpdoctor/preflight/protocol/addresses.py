"""The addresses that gloo and NCCL give to the other nodes, and whose an address is."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from ddpdoctor.preflight.machine.interfaces import (
    Interface,
    best,
    gloo_choice,
    interfaces,
    nccl_choice,
    owner,
)
from ddpdoctor.preflight.machine.lookups import own_name
from ddpdoctor.preflight.protocol.report import Facts
from ddpdoctor.preflight.situation import Situation, visible_gpus

LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "0.0.0.0", "::")
"""Names and addresses that are another machine on every machine."""


def advertised(situation: Situation) -> tuple[str, str]:
    """The address that gloo has the other nodes dial, and how it comes to it.

    The address is empty if gloo would not start; then the second is why.
    """
    here = situation.shared(interfaces)
    own = situation.shared(own_name)
    choice = gloo_choice(situation.environ, here, own.addresses)
    if choice.problem:
        return "", f"{choice.reason}: {choice.problem}"
    given = situation.environ.get("GLOO_SOCKET_IFNAME", "")
    if not given:
        for address in own.addresses:
            if owner(address, here) is not None:
                return address, f"{own.name} resolves to it"
    addresses = choice.interfaces[0].addresses if choice.interfaces else ()
    if not addresses:
        return "", "no interface has an address"
    return addresses[0], f"GLOO_SOCKET_IFNAME={given}" if given else choice.reason


def nccl_address(situation: Situation) -> str:
    """The address at which NCCL's ranks find each other: of the first interface that it takes.

    Empty without a GPU, and where it takes none or the loopback, which another check reports.
    """
    if not situation.shared(visible_gpus):
        return ""
    chosen = nccl_choice(situation.environ, situation.shared(interfaces)).interfaces[:1]
    family = situation.environ.get("NCCL_SOCKET_FAMILY", "")
    addresses = [
        each
        for interface in chosen
        for each in interface.addresses
        if not is_loopback(each) and (family != "AF_INET6" or ":" in each)
    ]
    return addresses[0] if addresses else ""


def gloo_dials(own: str, other: str) -> bool:
    """Whether gloo at one address dials the other, or waits to be dialled by it.

    Of two addresses the higher one dials; of equal ones the ports decide, which are not known yet.
    (gloo/transport/tcp/pair.cc, Pair::connect.)
    """
    try:
        first, second = ipaddress.ip_address(own), ipaddress.ip_address(other)
    except ValueError:
        return True
    return first.version != second.version or first.packed >= second.packed


def dialled_at(here: Facts, there: Facts, route: str) -> dict[str, str]:
    """The addresses of ``there`` at which ``here`` dials it, by kind: the way's, gloo's, NCCL's.

    What carries most of a job's traffic comes last.
    """
    found = {"route": route}
    gloo = there.gloo_address
    if gloo and gloo != route and gloo_dials(here.gloo_address, gloo):
        found["gloo"] = gloo
    nccl = there.nccl_address
    if nccl and here.nccl_address and nccl not in found.values():
        found["nccl"] = nccl
    return found


def may_be_node(address: str, coordinator: str) -> bool:
    """Whether an address may be another node's, by the one at which node 0 was reached.

    Not this machine itself, the machine's own link (where clouds keep credentials), many at once,
    nor the Internet where node 0 is in a private network.
    """
    try:
        one, zero = ipaddress.ip_address(address), ipaddress.ip_address(coordinator)
    except ValueError:
        return False
    if one.is_multicast or one.is_unspecified:
        return False
    if zero.is_loopback:
        # Node 0 is on this very machine.
        return True
    if one.is_loopback or (one.is_link_local and not zero.is_link_local):
        return False
    return not (zero.is_private and one.is_global)


def is_loopback(address: str) -> bool:
    """Whether an address leads only to the machine itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def mine(addresses: Iterable[str], here: Iterable[Interface]) -> bool:
    """Whether one of these addresses is this machine's."""
    known = tuple(here)
    return any(is_loopback(each) or owner(each, known) is not None for each in addresses)


def is_local(host: str) -> bool:
    """Whether a name or an address, as it was typed, means the machine on which it is used."""
    return host.lower() in LOCAL_NAMES or is_loopback(host)


def own_host(situation: Situation) -> str:
    """What the other nodes may call this machine.

    Its name if that is one of its addresses, and not of the loopback only; else such an address.
    """
    here = situation.shared(interfaces)
    owners = [owner(each, here) for each in situation.shared(own_name).addresses]
    interface = best(here)
    if interface is None or any(each is not None and not each.loopback for each in owners):
        return situation.hostname
    return interface.addresses[0]

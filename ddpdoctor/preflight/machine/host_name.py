"""Whether this machine's own name leads back to it."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged, typed
from ddpdoctor.preflight.machine import versions
from ddpdoctor.preflight.machine.interfaces import (
    ADDRESSES,
    Interface,
    best,
    export_line,
    interfaces,
    owner,
)
from ddpdoctor.preflight.machine.lookups import ALL, Lookup, endpoint_name, full_name, own_name
from ddpdoctor.preflight.situation import Situation


@check("host-name", "DDP003", limit=ALL)
def host_name(situation: Situation) -> Outcome:
    """This machine's host name does not resolve to an address that other machines can reach.

    What it finds
        A host name that does not resolve, a full name (`hostname -f`) that does not resolve, or a
        name that resolves to an address of another machine. In a job of several nodes, also a name
        that resolves to 127.0.0.1 or 127.0.1.1.

    Why it is bad
        torchrun gives the first node's name to all ranks as MASTER_ADDR. If that name does not
        resolve, even a job on one machine never starts and repeats a warning. gloo listens on the
        name's address: with 127.0.1.1, which Debian and Ubuntu write to /etc/hosts, no other node
        can connect.

    How to fix it
        Add the machine's address and name to /etc/hosts, or choose the interface with
        GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME.

    Example
        Wrong, in /etc/hosts of node1: `127.0.1.1 node1`
        Right: `10.0.0.5 node1`

    When it stays silent
        For a loopback address in a job on one machine, and where GLOO_SOCKET_IFNAME names the
        interface.
    """
    found = situation.shared(own_name)
    is_ = f" is {', '.join(found.addresses[:3])}" if found.addresses else f": {found.problem}"
    detail = f"{found.name}{is_}"
    return judged(detail, _findings(situation, found, situation.shared(interfaces)))


def _findings(
    situation: Situation, found: Lookup, here: tuple[Interface, ...]
) -> Iterator[Finding]:
    many = situation.options.nnodes > 1
    endpoint = situation.shared(endpoint_name)
    interface = best(here, endpoint.addresses[0] if endpoint and endpoint.addresses else "")
    wanted = interface.addresses[0] if interface else "" if many else "127.0.0.1"
    unknown = [each for each in (found, situation.shared(full_name)) if not each.addresses]
    own = [each for each in (owner(address, here) for address in found.addresses) if each]
    if unknown:
        yield _unknown(unknown[0], wanted, many)
    elif not own:
        yield _foreign(found, here, wanted, many)
    elif many and own[0].loopback and not situation.environ.get("GLOO_SOCKET_IFNAME"):
        loopback = next(each for each in found.addresses if owner(each, here) is own[0])
        yield finding(
            _where_addresses_are_judged(situation),
            f"this machine's host name {found.name} resolves to {loopback}: gloo will listen where "
            "no other node can connect",
            fix="Choose the interface by its name, or correct the line in /etc/hosts: "
            f"{wanted or 'ADDRESS'} {found.name}",
            paste=export_line(interface) if interface else ADDRESSES,
        )


def _where_addresses_are_judged(situation: Situation) -> Severity:
    """How bad it is: with the other nodes' addresses known, that check says whether it matters."""
    judged_together = "gloo-addresses" in (situation.chosen or ())
    return Severity.WARNING if judged_together else Severity.ERROR


def _foreign(found: Lookup, here: tuple[Interface, ...], wanted: str, many: bool) -> Finding:
    mine = [each for other in here if not other.loopback for each in other.addresses]
    return finding(
        Severity.ERROR if many else Severity.WARNING,
        f"this machine's host name {found.name} resolves to {', '.join(found.addresses[:3])}, "
        "which is not an address of this machine",
        evidence=(f"it has {', '.join(mine) or 'no address'}",),
        fix="Correct the name in /etc/hosts or in the name server.",
        paste=_hosts_line(wanted, found.name),
    )


def _unknown(name: Lookup, wanted: str, many: bool) -> Finding:
    # Older versions of torchrun use 127.0.0.1 on one machine, unless --standalone is given.
    always = many or versions.torchrun_picks_a_port()
    return finding(
        Severity.ERROR if always else Severity.WARNING,
        f"this machine's host name {name.name} does not resolve: {name.problem}",
        evidence=(
            "torchrun gives it to the ranks as MASTER_ADDR, on one machine as well, and they wait "
            "for it",
        ),
        fix="Put the name into /etc/hosts.",
        paste=_hosts_line(wanted, name.name),
    )


def _hosts_line(address: str, name: str) -> str:
    if not address:
        return ADDRESSES
    return typed("echo {} | sudo tee -a /etc/hosts", f"{address} {name}")

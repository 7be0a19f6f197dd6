"""Whether this machine's name and address are its own, and its neighbour table has room."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import (
    Outcome,
    check,
    failure,
    finding,
    judged,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.machine import network, software
from ddpdoctor.preflight.situation import Situation

# -- the host name


@check(
    "host-name",
    "DDP003",
    limit=network.LOOKUPS_LIMIT,
    yields_to={"DDP018": relations.same_subject, "DDP055": relations.same_subject},
)
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
    found = situation.shared(network.own_name)
    is_ = f" is {', '.join(found.addresses[:3])}" if found.addresses else f": {found.problem}"
    return judged(f"{found.name}{is_}", _name_findings(situation, found))


def _name_findings(situation: Situation, found: network.Lookup) -> Iterator[Finding]:
    here, many = situation.shared(network.interfaces), situation.options.nnodes > 1
    interface = network.best(here, network.endpoint_address(situation))
    wanted = interface.addresses[0] if interface else "" if many else "127.0.0.1"
    own = [network.owner(address, here) for address in found.addresses]
    owners = [each for each in own if each]
    if not found.addresses or not owners or not situation.shared(network.full_name).addresses:
        yield _unknown_or_foreign(situation, found, wanted)
    elif many and owners[0].loopback and not situation.environ.get("GLOO_SOCKET_IFNAME"):
        # The check gloo-addresses knows the other nodes' addresses, and says whether it matters.
        judged_there = "gloo-addresses" in (situation.chosen or ())
        yield finding(
            Severity.WARNING if judged_there else Severity.ERROR,
            f"this machine's host name {found.name} resolves to "
            f"{found.addresses[own.index(owners[0])]}: gloo will listen where no other node can "
            "connect",
            fix="Choose the interface by its name, or correct the line in /etc/hosts: "
            f"{wanted or 'ADDRESS'} {found.name}",
            paste=network.export_line(interface) if interface else network.ADDRESSES,
            subjects=frozenset({f"gloo on {situation.hostname}"}),
        )


def _unknown_or_foreign(situation: Situation, found: network.Lookup, wanted: str) -> Finding:
    """Report a name that does not resolve, or not to this machine."""
    many = situation.options.nnodes > 1
    full = situation.shared(network.full_name)
    if found.addresses and full.addresses:
        here = situation.shared(network.interfaces)
        mine = [each for other in here if not other.loopback for each in other.addresses]
        return finding(
            Severity.ERROR if many else Severity.WARNING,
            f"this machine's host name {found.name} resolves to {', '.join(found.addresses[:3])}, "
            "which is not an address of this machine",
            evidence=(f"it has {', '.join(mine) or 'no address'}",),
            fix="Correct the name in /etc/hosts or in the name server.",
            paste=network.hosts_line(wanted, found.name) if wanted else network.ADDRESSES,
            # The name may be right, and the address another machine's.
            subjects=frozenset(f"name of {address}" for address in mine),
        )
    name = full if found.addresses else found
    # Older versions of torchrun use 127.0.0.1 on one machine, unless --standalone is given.
    always = many or software.torchrun_picks_a_port()
    return finding(
        Severity.ERROR if always else Severity.WARNING,
        f"this machine's host name {name.name} does not resolve: {name.problem}",
        evidence=(
            "torchrun gives it to the ranks as MASTER_ADDR, on one machine as well, and they wait "
            "for it",
        ),
        fix="Put the name into /etc/hosts.",
        paste=network.hosts_line(wanted, name.name) if wanted else network.ADDRESSES,
    )


# -- the address


ARP_ATTEMPTS = 3
ARP_TIMEOUT = 0.4  # Seconds for an answer. On a local network it takes less than 1 ms.
MAX_PACKETS = 1000  # Maximum number of other machines' ARP packets to read per attempt

_ARP = 0x0806
_BROADCAST = b"\xff" * 6
_ARP_PACKET = struct.Struct("!HHBBH6s4s6s4s")
"""ARP for IPv4 over Ethernet (RFC 826): hardware, protocol, sizes, operation, sender, target."""
_ARP_REQUEST, _ARP_REPLY = 1, 2


@check("own-address", "DDP018", limit=network.LOOKUPS_LIMIT)
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
        its model, and one that was typed in may be in the range that DHCP assigns.

    Example
        Wrong: node1 and node2, made from one image, both with 10.0.0.5 in their netplan.
        Right: 10.0.0.5 and 10.0.0.6

    When it stays silent
        In a job on one machine. It is skipped where raw sockets are not allowed (they need root, or
        CAP_NET_RAW in a container), and on a network that is not Ethernet. A machine in another
        network with the same address is found by gloo-addresses.
    """
    if situation.options.nnodes < 2:
        return skipped("one node")
    try:
        found = situation.shared(arp_answers)
    except PermissionError:
        return skipped("raw sockets need root")
    except (OSError, AttributeError) as error:
        return skipped(f"no raw sockets for ARP here: {error}")
    if not found:
        return skipped("no interface with an IPv4 address on an Ethernet")
    return judged(
        f"asked by ARP for {', '.join(each.address for each in found)}",
        [
            failure(
                f"another machine has this machine's address, {each.address}: packets for one "
                "arrive at the other",
                evidence=(str(each),),
                fix=SHARED_ADDRESS_FIX,
                paste=typed(SHARED_ADDRESS_PASTE, each.interface),
                about=each.interface,
                subjects=frozenset({f"address {each.address}", f"name of {each.address}"}),
            )
            for each in found
            if each.card
        ],
    )


@dataclass(frozen=True)
class ArpAnswer:
    """The result of asking for an address of this machine on one of its interfaces."""

    interface: str
    address: str
    card: str  # The Ethernet address of another machine that answers; empty if none does

    def __str__(self) -> str:
        return f"asked by ARP on {self.interface}, {self.card} answers for {self.address}"


SHARED_ADDRESS_FIX = "Give each machine its own address. What this one has:"
SHARED_ADDRESS_PASTE = "ip address show dev {}"


def shared_address(situation: Situation) -> ArpAnswer | None:
    """Return the answer of another machine that has this one's address, if there is one."""
    try:
        return next((each for each in situation.shared(arp_answers) if each.card), None)
    except (OSError, AttributeError):
        return None


def arp_answers(situation: Situation) -> tuple[ArpAnswer, ...]:
    """Ask for each address at which the other nodes reach this machine.

    Raises:
        OSError: Raw sockets are not allowed here.
        AttributeError: This system has no such sockets.
    """
    import psutil

    # This machine answers itself where two of its cards share a network.
    cards = frozenset(
        bytes.fromhex(each.address.replace(":", ""))
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == psutil.AF_LINK and len(each.address) == 17
    )
    here = situation.shared(network.interfaces)
    towards = network.best(here, network.endpoint_address(situation))
    gloo = network.gloo_choice(
        situation.environ, here, situation.shared(network.own_name).addresses
    ).interfaces
    chosen = {each.name: each for each in (towards, *gloo) if each is not None and each.outward}
    # Link-local addresses (169.254) are chosen by ARP anyway, and never dialled.
    return tuple(
        ArpAnswer(interface.name, address, card)
        for interface in chosen.values()
        for address in interface.addresses
        if ":" not in address and not address.startswith("169.254.")
        if (card := _asked(interface.name, address, cards)) is not None
    )


def _asked(name: str, address: str, cards: frozenset[bytes]) -> str | None:
    """Return the card of another machine that answers for an address; None without Ethernet."""
    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ARP)) as line:
        line.bind((name, _ARP))
        own = line.getsockname()[4]
        if len(own) != 6:
            return None
        # Leave out the sender's address, so that no machine learns this one's.
        question = _ARP_PACKET.pack(1, 0x0800, 6, 4, _ARP_REQUEST, own, bytes(4), bytes(6), wanted)
        for _ in range(ARP_ATTEMPTS):
            line.sendto(question, (name, _ARP, 0, 0, _BROADCAST))
            until = time.monotonic() + ARP_TIMEOUT
            for _ in range(MAX_PACKETS):
                # Also read packets that arrived while this process had no core.
                line.settimeout(max(0.001, until - time.monotonic()))
                try:
                    packet = line.recv(_ARP_PACKET.size)
                except TimeoutError:
                    break
                if len(packet) < _ARP_PACKET.size:
                    continue
                *_, operation, sender, said, _, _ = _ARP_PACKET.unpack(packet)
                if operation == _ARP_REPLY and said == wanted and sender not in cards:
                    return str(sender.hex(":"))
    return ""


# -- the neighbour table


NEARLY_FULL = 0.9  # Share of used entries from which the table counts as full


@check("neighbour-table", "DDP013")
def neighbour_table(situation: Situation) -> Outcome:
    """The kernel's neighbour (ARP) table is full or too small for the nodes of the job.

    What it finds
        An IPv4 neighbour table filled to 90 % of net.ipv4.neigh.default.gc_thresh3, or one that the
        nodes of this job would fill.

    Why it is bad
        The kernel drops packets to machines that are not in the table ("neighbour: arp_cache:
        neighbor table overflow!" in its log). Connections to some nodes hang now and then.

    How to fix it
        Raise gc_thresh1, gc_thresh2 and gc_thresh3 on every node.

    Example
        Wrong: 1,024 entries, the kernel's default, in a flat network of 2,000 nodes.
        Right: `sysctl -w net.ipv4.neigh.default.gc_thresh3=16384`

    When it stays silent
        Below these limits, and on systems that do not report the table.
    """
    limit = situation.proc / "sys" / "net" / "ipv4" / "neigh" / "default" / "gc_thresh3"
    if not limit.exists():
        return skipped("this kernel does not report it (inside a container's network)")
    most, entries = int(limit.read_text()), 0
    try:
        # The second row's first column, in hexadecimal: every row has the same value.
        row = (situation.proc / "net" / "stat" / "arp_cache").read_text().splitlines()[1]
        entries = int(row.split()[0], 16)
    except (OSError, ValueError, IndexError):
        with contextlib.suppress(OSError):
            entries = len((situation.proc / "net" / "arp").read_text().splitlines()) - 1
    detail, nodes = f"{entries} entries, room for {most}", situation.options.nnodes
    coming = entries + nodes if nodes > 1 else entries
    if most <= 0 or coming < NEARLY_FULL * most:
        return judged(detail, [])
    wanted = 1 << max(12, (4 * coming).bit_length())
    full = warning(
        f"the kernel's neighbour table holds {entries} of {most} entries"
        + (f", and the job has {nodes} nodes" if nodes > 1 else ""),
        fix="Raise its thresholds, on every node.",
        paste=typed(
            "sudo sysctl -w net.ipv4.neigh.default.gc_thresh1={} "
            "net.ipv4.neigh.default.gc_thresh2={} net.ipv4.neigh.default.gc_thresh3={}",
            wanted // 4,
            wanted // 2,
            wanted,
        ),
    )
    return judged(detail, [full])

"""Name lookups, and the network interfaces that gloo and NCCL choose."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.relations import NO_NETWORK
from ddpdoctor.preflight.check import Outcome, check, failure, finding, judged, typed, warning
from ddpdoctor.preflight.protocol.messages import Facts
from ddpdoctor.preflight.situation import Situation, bounded, text, visible_gpus, waited_for_core

T = TypeVar("T")

# -- name servers


MAX_SERVERS = 3  # Maximum number of name servers that glibc asks (MAXNS of resolv.h)

SERVER_TIMEOUT, SERVER_TRIES = 1.5, 2

_DNS_HEADER = struct.Struct("!6H")
_RECURSION, _ADDRESS, _INTERNET = 0x0100, 1, 1
"""RFC 1035: the flag "recursion desired", type A, class IN."""


@dataclass(frozen=True)
class NameServer:
    """A server of /etc/resolv.conf, and whether it answered."""

    address: str
    answers: bool


def ask_servers(situation: Situation, name: str) -> list[NameServer]:
    """Ask each server for a name. A reply that the name is unknown counts as an answer."""
    rows = text(situation.proc.parent / "etc" / "resolv.conf").splitlines()
    words = [row.split() for row in rows]
    listed = [each[1] for each in words if len(each) > 1 and each[0] == "nameserver"][:MAX_SERVERS]
    if not listed:
        return []
    with ThreadPoolExecutor(len(listed)) as pool:
        return list(pool.map(lambda each: NameServer(each, server_answers(each, name)), listed))


def dead_servers(servers: list[NameServer]) -> str:
    """Name the servers that do not answer; empty if all do."""
    silent = [each.address for each in servers if not each.answers]
    if not silent:
        return ""
    first = ", the first one," if silent[0] == servers[0].address and len(servers) > 1 else ""
    line = f"name server {', '.join(silent)}{first} in /etc/resolv.conf does not answer"
    well = [each.address for each in servers if each.answers]
    return f"{line}; {', '.join(well)} does" if well else line


def server_answers(server: str, name: str, *, port: int = 53) -> bool:
    """Return whether a name server sends any answer about a name."""
    labels = [each.encode("ascii", "replace")[:63] for each in name.strip(".").split(".")]
    question = _DNS_HEADER.pack(secrets.randbits(16), _RECURSION, 1, 0, 0, 0)
    question += b"".join(bytes([len(each)]) + each for each in labels if each)
    question += struct.pack("!BHH", 0, _ADDRESS, _INTERNET)
    with contextlib.suppress(OSError):
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            server, port, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
        )
        with socket.socket(family, kind) as asking:
            asking.settimeout(SERVER_TIMEOUT)
            asking.connect(address)
            for _ in range(SERVER_TRIES):
                asking.send(question)
                with contextlib.suppress(TimeoutError):
                    if asking.recv(512)[:2] == question[:2]:
                        return True
    return False


# -- lookups


LOOKUP_TIMEOUT = 12.0
"""Seconds until a lookup counts as unanswered. glibc waits 5 s for each name server, and the third
may be the first that answers."""

LOOKUPS_LIMIT = 45.0  # Seconds for a check that waits for several lookups


@dataclass(frozen=True)
class Lookup:
    """The addresses of a name in order, or why there are none. Waits for a core do not count."""

    name: str
    addresses: tuple[str, ...] = ()
    seconds: float = 0.0
    problem: str = ""


def lookup(name: str) -> Lookup:
    """Resolve a name as the C library does. Try a slow one again."""
    found = resolve(name)
    if found.addresses and found.seconds > SLOW:
        # Other work makes a lookup slow once, a name server makes it slow each time.
        found = min(found, resolve(name), key=lambda each: (not each.addresses, each.seconds))
    return found


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a lookup, and its seconds without waits for a core.

    Raises:
        TimeoutError: There was no answer in time.
    """

    def run() -> tuple[T, float]:
        began, waits = time.monotonic(), waited_for_core()
        result = call()
        return result, max(0.0, time.monotonic() - began - (waited_for_core() - waits))

    return bounded(run, LOOKUP_TIMEOUT)


def resolve(name: str) -> Lookup:
    """Resolve a name as the C library does, IPv4 and IPv6, once."""

    def ask() -> tuple[list[str], str]:
        try:
            answer = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            return [], getattr(error, "strerror", "") or str(error)
        return [str(each[4][0]).partition("%")[0] for each in answer], ""

    try:
        (addresses, problem), seconds = _timed(ask)
    except TimeoutError:
        return _unanswered(name)
    return Lookup(name, tuple(dict.fromkeys(addresses)), seconds, problem)


def _unanswered(name: str) -> Lookup:
    return Lookup(name, (), LOOKUP_TIMEOUT, f"no answer within {LOOKUP_TIMEOUT:.0f} s")


def own_name(situation: Situation) -> Lookup:
    """Look up this machine's host name."""
    return lookup(situation.hostname)


def full_name(situation: Situation) -> Lookup:
    """Look up this machine's full name, which torchrun uses as MASTER_ADDR.

    It comes from the name server or /etc/hosts by the machine's address, and may not resolve. The
    time includes both lookups. If the host name gets no answer, neither does this one.
    """
    own = situation.shared(own_name)
    if not own.addresses:
        return own
    try:
        name, seconds = _timed(partial(socket.getfqdn, situation.hostname))
        if seconds > SLOW:
            again = _timed(partial(socket.getfqdn, situation.hostname))
            name, seconds = min((name, seconds), again, key=lambda each: each[1])
    except TimeoutError:
        return _unanswered(situation.hostname)
    except (OSError, UnicodeError) as error:
        return Lookup(situation.hostname, (), 0.0, str(error))
    if name == situation.hostname:
        return replace(own, seconds=seconds)
    found = lookup(name)
    return replace(found, seconds=seconds + found.seconds)


def endpoint_name(situation: Situation) -> Lookup | None:
    """Look up the host of the rendezvous; None if it is unknown."""
    endpoint = situation.endpoint
    return None if endpoint is None else lookup(endpoint[0])


def endpoint_address(situation: Situation) -> str:
    """Return the first address of the rendezvous; empty if it is unknown."""
    found = situation.shared(endpoint_name)
    return found.addresses[0] if found and found.addresses else ""


SLOW = 1.0  # Seconds above which a lookup delays a start noticeably


@check("lookups", "DDP008", limit=LOOKUPS_LIMIT)
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
    # Begin with what other checks ask for last, so that slow lookups run side by side.
    endpoint = situation.shared(endpoint_name)
    asked = [situation.shared(own_name)]
    if endpoint is not None and endpoint.name != situation.hostname:
        asked.append(endpoint)
    full = situation.shared(full_name)
    if full is not asked[0]:
        asked.append(replace(full, name=f"the full name of {situation.hostname}"))
    slowest = max(asked, key=lambda each: each.seconds)
    detail = f"{len(asked)} lookups, the slowest ({slowest.name}) in {slowest.seconds:.2f} s"
    troubled = [each for each in asked if each.seconds > SLOW or not each.addresses]
    silent = dead_servers(ask_servers(situation, troubled[0].name)) if troubled else ""
    elsewhere = situation.attendance_checked
    return judged(detail, _lookup_findings(asked, endpoint, silent, elsewhere=elsewhere))


def _lookup_findings(
    asked: list[Lookup], endpoint: Lookup | None, silent: str, *, elsewhere: bool
) -> Iterator[Finding]:
    if endpoint is not None and not endpoint.addresses and not elsewhere:
        yield failure(
            f"the rendezvous host {endpoint.name} does not resolve: {endpoint.problem}",
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


# -- interfaces


ADDRESSES = "ip -brief address"  # The line to paste if no address can be named

VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxcbr", "lxdbr", "vmnet")
"""Prefixes of interfaces that lead to containers or virtual machines of this host."""


@dataclass(frozen=True)
class Interface:
    """A network interface. Its addresses are in the kernel's order, IPv4 before IPv6."""

    name: str
    addresses: tuple[str, ...] = ()
    running: bool = True  # Whether it is up and has a carrier (IFF_RUNNING)
    loopback: bool = False
    mtu: int = 1500
    networks: tuple[str, ...] = ()  # Those of its addresses, such as 10.0.0.0/24
    unplugged: bool = False  # Whether it is up and has no carrier

    def is_towards(self, address: str) -> bool:
        """Return whether an address is in one of its networks."""
        return any(is_within(address, network) for network in self.networks)

    @property
    def virtual(self) -> bool:
        """Whether it is a bridge or the like, which reaches no other machine."""
        return self.name.startswith(VIRTUAL)

    @property
    def outward(self) -> bool:
        """Whether it may reach another machine."""
        reaching = any(not ipaddress.ip_address(each).is_link_local for each in self.addresses)
        return self.running and reaching and not self.loopback and not self.virtual


def interfaces(situation: Situation) -> tuple[Interface, ...]:
    """Return all interfaces, in the order in which libraries see them."""
    import psutil

    stats, found = psutil.net_if_stats(), []
    for name, addresses in psutil.net_if_addrs().items():
        facts = stats.get(name)
        usable = tuple(
            each.address.partition("%")[0]
            for each in addresses
            if each.family in (socket.AF_INET, socket.AF_INET6)
        )
        flags = getattr(facts, "flags", "").split(",")
        loopback = name == "lo" or "loopback" in flags
        running, mtu = (facts.isup, facts.mtu) if facts is not None else (False, 0)
        networks = (_network(each.address, each.netmask) for each in addresses)
        known = tuple(dict.fromkeys(filter(None, networks)))
        unplugged = "up" in flags and not running
        found.append(Interface(name, usable, running, loopback, mtu, known, unplugged))
    return tuple(found)


def _network(address: str, netmask: str | None) -> str:
    """Return the network of an address; empty if it has none that other machines could be in."""
    try:
        own = ipaddress.ip_address(address.partition("%")[0])
        ones = bin(int(ipaddress.ip_address(netmask or ""))).count("1")
    except ValueError:
        return ""
    if own.is_link_local or own.is_loopback:
        return ""
    return str(ipaddress.ip_network(f"{own}/{ones}", strict=False))


def is_within(address: str, network: str) -> bool:
    """Return whether an address belongs to a network."""
    try:
        return ipaddress.ip_address(address) in ipaddress.ip_network(network)
    except ValueError:
        return False


def owner(address: str, among: Iterable[Interface]) -> Interface | None:
    """Return the interface that has an address. The loopback has all of 127.0.0.0/8."""
    has = (
        each
        for each in among
        if address in each.addresses or (each.loopback and address.startswith("127."))
    )
    return next(has, None)


@dataclass(frozen=True)
class Choice:
    """What a library will use: interfaces in its order, or why it will find none."""

    interfaces: tuple[Interface, ...] = ()
    problem: str = ""
    reason: str = ""  # What decided: a variable, the host name, a default


def gloo_choice(
    environ: Mapping[str, str], among: Iterable[Interface], own_addresses: Iterable[str]
) -> Choice:
    """Return the interface that torch's gloo binds to.

    ``GLOO_SOCKET_IFNAME`` is a comma-separated list of exact names. Without it, gloo uses the first
    of the host name's addresses that can be bound, or else the loopback, with a warning.
    (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice;
    gloo/transport/tcp/device.cc, lookupAddrForIface and lookupAddrForHostname.)
    """
    here = tuple(among)
    if chosen := environ.get("GLOO_SOCKET_IFNAME", ""):
        found = []
        for name in chosen.split(","):
            interface = next((each for each in here if each.name == name), None)
            if interface is None or not interface.addresses:
                what = "has no address" if interface else "does not exist"
                return Choice((), f"{name!r} {what}", "GLOO_SOCKET_IFNAME")
            found.append(interface)
        return Choice(tuple(found), "", "GLOO_SOCKET_IFNAME")
    for address in own_addresses:
        interface = owner(address, here)
        if interface is not None:
            return Choice((interface,), "", f"the host name is {address}")
    loopback = tuple(each for each in here if each.loopback)
    return Choice(loopback, "", "the host name resolves to no address of this machine")


def nccl_choice(environ: Mapping[str, str], among: Iterable[Interface]) -> Choice:
    """Return the interfaces that NCCL uses for its sockets. The first is that of its bootstrap.

    ``NCCL_SOCKET_IFNAME`` is a list of prefixes; after ``=`` of exact names, after ``^`` of what to
    leave out. Without it: ``ib*``; else all but ``docker*``, ``lo*`` and ``virbr*``; else
    ``docker*``; else ``lo*``; else ``virbr*``. Only running interfaces with an address count.
    (NCCL's src/misc/socket.cc, ncclFindInterfaces, and src/os/linux.cc, ncclOsFindInterfaces.)
    """
    here = [each for each in among if each.running and _usable(each, environ)]
    chosen = environ.get("NCCL_SOCKET_IFNAME", "")
    if len(chosen) > 1:
        found = tuple(each for each in here if _matches(each.name, chosen))
        problem = "" if found else f"{chosen!r} matches no running interface with an address"
        return Choice(found, problem, "NCCL_SOCKET_IFNAME")
    for wanted in ("ib", "^docker,lo,virbr", "docker", "lo", "virbr"):
        found = tuple(each for each in here if _matches(each.name, wanted))
        if found:
            return Choice(found, "", "NCCL's own order")
    return Choice((), "no running interface has an address", "NCCL's own order")


def _usable(interface: Interface, environ: Mapping[str, str]) -> bool:
    family = {"AF_INET": 4, "AF_INET6": 6}.get(environ.get("NCCL_SOCKET_FAMILY", ""))
    versions = [ipaddress.ip_address(each).version for each in interface.addresses if each != "::1"]
    return bool(versions) and (family is None or family in versions)


def _matches(name: str, wanted: str) -> bool:
    exclude = wanted.startswith("^")
    wanted = wanted.removeprefix("^")
    exact = wanted.startswith("=")
    # NCCL accepts a port after a colon, which does not matter here.
    parts = [each.partition(":")[0] for each in wanted.removeprefix("=").split(",") if each]
    hit = any(name == each if exact else name.startswith(each) for each in parts)
    return hit != exclude


def towards(address: str, among: Iterable[Interface]) -> Interface | None:
    """Return the interface through which the kernel would send to an address, without sending."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = probe.getsockname()[0]
    except OSError:
        return None
    return owner(source.partition("%")[0], among)


def best(among: Iterable[Interface], address: str = "") -> Interface | None:
    """Return the interface to name in a fix: towards ``address``, or else the first outward one."""
    here = tuple(among)
    routed = towards(address, here) if address else None
    if routed is not None and routed.outward:
        return routed
    return next((each for each in here if each.outward), None)


UP = "sudo ip link set dev {} up"


def bring_up(interface: Interface) -> tuple[str, str]:
    """Return what to do about an interface that is down or has no carrier, and the line to type."""
    if interface.unplugged:
        fix = "Check its cable and its switch port. Once it has a carrier, this shows LOWER_UP:"
        return fix, typed("ip link show dev {}", interface.name)
    return "Bring it up.", typed(UP, interface.name)


EXPORT = "export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}"


def export_line(interface: Interface) -> str:
    """Return the line that makes gloo and NCCL use an interface."""
    return typed(EXPORT, interface.name)


def hosts_line(address: str, name: str) -> str:
    """Return the line that puts an address and its name first in /etc/hosts.

    The first entry of a name wins. The file is written in place: a container's cannot be replaced.
    """
    put = """sudo sh -c 'printf "%s\\n" "$1" "$(cat /etc/hosts)" > /etc/hosts' - {}"""
    return typed(put, f"{address} {name}")


@check("network-interface", "DDP004", limit=LOOKUPS_LIMIT)
def network_interface(situation: Situation) -> Outcome:
    """The network interface that gloo or NCCL will use does not work for this job.

    What it finds
        A GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that names a missing interface, one that is down,
        or, in a job of several nodes, the loopback or a bridge of containers or virtual machines
        (docker0, virbr0). Such a bridge chosen by default. A loopback interface that is down.

    Why it is bad
        gloo fails with "Unable to find address for: eth1", NCCL with "Bootstrap : no socket
        interface found". On a bridge or the loopback, the nodes wait for each other until the
        timeout, 10 to 30 minutes later.

    How to fix it
        Set the variables to the interface that reaches the other nodes. Its name may differ between
        nodes.

    Example
        Wrong: `export NCCL_SOCKET_IFNAME=eth0` where the interface is called ens5.
        Right: `export GLOO_SOCKET_IFNAME=ens5 NCCL_SOCKET_IFNAME=ens5`

    When it stays silent
        On one machine, for any working interface. For NCCL's variable on a machine without a GPU.
    """
    here = situation.shared(interfaces)
    gloo = gloo_choice(situation.environ, here, situation.shared(own_name).addresses)
    nccl = nccl_choice(situation.environ, here)

    def named(choice: Choice) -> str:
        return ", ".join(each.name for each in choice.interfaces[:4]) or "none"

    detail = f"gloo will use {named(gloo)} ({gloo.reason}), NCCL {named(nccl)}"
    return judged(detail, _findings(situation, here, gloo, nccl))


def _findings(
    situation: Situation, here: tuple[Interface, ...], gloo: Choice, nccl: Choice
) -> Iterator[Finding]:
    many = situation.options.nnodes > 1
    down = next((each for each in here if each.loopback and not each.running), None)
    if down is not None:
        yield failure(
            f"the loopback interface {down.name} is down: the ranks of this machine cannot connect "
            "to each other",
            fix="Bring it up.",
            paste=typed(UP, down.name),
            about="loopback",
        )
    both = [("gloo", "GLOO_SOCKET_IFNAME", gloo)]
    if situation.shared(visible_gpus):
        both.append(("NCCL", "NCCL_SOCKET_IFNAME", nccl))
    for library, variable, choice in both:
        problem = _problem(library, variable, choice, many)
        if problem is not None:
            wrong = _wrong_choice(situation, here, variable, choice, problem)
            yield replace(wrong, about=library)


def _wrong_choice(
    situation: Situation,
    here: tuple[Interface, ...],
    variable: str,
    choice: Choice,
    problem: tuple[Severity, str],
) -> Finding:
    endpoint, first = endpoint_address(situation), next(iter(choice.interfaces), None)
    interface = best(here, endpoint)
    outward = ", ".join(each.name for each in here if each.outward)
    lost = first is not None and not first.running and first.is_towards(endpoint)
    if first is not None and (lost or not (outward or choice.reason == variable)):
        fix, paste = bring_up(first)
    elif interface is not None:
        fix, paste = "Name the interface that leads to the other nodes.", export_line(interface)
    else:
        fix = "Name the interface that leads to the other nodes."
        # Without the variable the library chooses itself, and may find one.
        paste = typed("unset {}", variable) if choice.reason == variable else ADDRESSES
    return finding(
        problem[0],
        problem[1],
        evidence=(f"running interfaces with an address, without bridges: {outward or 'none'}",),
        fix=fix if situation.options.nnodes > 1 else "Name an interface of this machine, or none.",
        paste=paste,
        # Without another interface, no other node is reached.
        subjects=frozenset({NO_NETWORK} if lost or not outward else ()),
    )


def _problem(
    library: str, variable: str, choice: Choice, many: bool
) -> tuple[Severity, str] | None:
    if choice.problem:
        named = variable == choice.reason
        hint = ""
        if named and library == "gloo" and choice.problem.startswith(("'^", "'=")):
            hint = "; gloo takes only exact names, not NCCL's ^ and ="
        what = f"{variable}: " if named else f"{library} will find no interface: "
        return Severity.ERROR, f"{what}{choice.problem}{hint}"
    if not choice.interfaces:
        return None
    first = choice.interfaces[0]
    # A loopback that is down has its own finding.
    if not first.running and not first.loopback:
        return Severity.ERROR, f"{library} will use {first.name}, which is down ({choice.reason})"
    # The check of the host name reports a name that leads to the loopback.
    if many and first.loopback and choice.reason == variable:
        return Severity.ERROR, f"{variable} is {first.name}, which reaches no other node"
    if many and first.virtual:
        return (
            Severity.ERROR if choice.reason == variable else Severity.WARNING,
            f"{library} will use {first.name} ({choice.reason}), a bridge of this machine, which "
            "no other node is likely to reach",
        )
    return None


# -- addresses


LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "0.0.0.0", "::")
"""Names and addresses that mean the machine on which they are used."""


def advertised_address(situation: Situation) -> tuple[str, str]:
    """Return the address at which other nodes dial gloo, and what chose it.

    The address is empty if gloo would not start. Then the second value is the reason.
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
    """Return the address at which NCCL's ranks find each other, of the first interface it uses.

    Return an empty text without a GPU, or if NCCL finds no interface or only the loopback, which
    another check reports.
    """
    return next(iter(_nccl_addresses(situation)[:1]), "")


def _nccl_addresses(situation: Situation) -> list[str]:
    """Return an address of each interface that NCCL uses, empty where it has only the loopback."""
    if not situation.shared(visible_gpus):
        return []
    family = situation.environ.get("NCCL_SOCKET_FAMILY", "")
    found = []
    for interface in nccl_choice(situation.environ, situation.shared(interfaces)).interfaces:
        fit = (
            each
            for each in interface.addresses
            if not is_loopback(each) and (family != "AF_INET6" or ":" in each)
        )
        found.append(next(fit, ""))
    return found


MAX_FURTHER = 8


def further_addresses(situation: Situation) -> tuple[str, ...]:
    """Return the addresses of the interfaces that gloo and NCCL use besides their first one."""
    here = situation.shared(interfaces)
    gloo = gloo_choice(situation.environ, here, situation.shared(own_name).addresses).interfaces
    found = [each.addresses[0] for each in gloo[1:] if each.addresses]
    found += _nccl_addresses(situation)[1:]
    # A link-local address is valid only with its interface.
    usable = (each for each in found if each and not ipaddress.ip_address(each).is_link_local)
    return tuple(dict.fromkeys(usable))[:MAX_FURTHER]


def gloo_dials(here: Facts, there: Facts) -> bool:
    """Return whether gloo on one node dials the other, or waits to be dialled by it.

    The higher address dials. If both are equal the ports decide, which are not known yet.
    (gloo/transport/tcp/pair.cc, Pair::connect.)
    """
    try:
        first, second = (ipaddress.ip_address(each.gloo_address) for each in (here, there))
    except ValueError:
        return True
    return first.version != second.version or first.packed >= second.packed


def dialled_at(here: Facts, there: Facts, route: str) -> dict[str, str]:
    """Return the addresses of ``there`` that ``here`` dials: others, the route's, gloo's, NCCL's.

    The one that carries most of a job's traffic comes last. gloo's is dialled in both directions,
    though gloo uses one: the other one (``gloo back``) shows which of the two ends is dead.
    """
    gloo = there.gloo_address
    found = {
        f"other {number}": address
        for number, address in enumerate(there.others if here.others or here.nccl_address else ())
        if address not in (route, gloo, there.nccl_address)
    }
    dials = gloo_dials(here, there)
    if gloo and gloo != route and not dials and not is_loopback(gloo):
        found["gloo back"] = gloo
    found["route"] = route
    if gloo and gloo != route and dials:
        found["gloo"] = gloo
    nccl = there.nccl_address
    if nccl and here.nccl_address and nccl not in found.values():
        found["nccl"] = nccl
    return found


def idle_addresses(here: Facts, there: Facts, route: str) -> list[str]:
    """Return the addresses of ``there`` in networks that both share and a job leaves idle."""
    dialled = {*dialled_at(here, there, route).values(), there.gloo_address, there.nccl_address}
    shared = {network for name, network in here.networks if name not in here.down}
    return [
        address
        for name, _, addresses in there.interfaces
        for address in addresses
        if address not in dialled and not name.startswith(VIRTUAL)
        if any(is_within(address, network) for network in shared)
    ][:MAX_FURTHER]


def may_be_node(address: str, coordinator: str) -> bool:
    """Return whether an address may be another node's, given the one at which node 0 was reached.

    Exclude this machine, link-local addresses (where clouds keep credentials), multicast, and the
    Internet if node 0 is in a private network.
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
    """Return whether an address leads only to the machine itself."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def is_own_address(addresses: Iterable[str], here: Iterable[Interface]) -> bool:
    """Return whether one of these addresses is this machine's."""
    known = tuple(here)
    return any(is_loopback(each) or owner(each, known) is not None for each in addresses)


def is_local(host: str) -> bool:
    """Return whether a name or an address means the machine on which it is used."""
    return host.lower() in LOCAL_NAMES or is_loopback(host)


def own_host(situation: Situation) -> str:
    """Return the name or address at which the other nodes may reach this machine.

    That is the host name if it resolves to an address of this machine other than the loopback, or
    else such an address.
    """
    here = situation.shared(interfaces)
    owners = [owner(each, here) for each in situation.shared(own_name).addresses]
    interface = best(here)
    if interface is None or any(each is not None and not each.loopback for each in owners):
        return situation.hostname
    return interface.addresses[0]

"""The network interfaces of this machine, and whether those that gloo and NCCL choose work."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, failure, finding, judged, typed
from ddpdoctor.preflight.machine.lookups import ALL, endpoint_name, own_name
from ddpdoctor.preflight.situation import Situation, visible_gpus

ADDRESSES = "ip -brief address"
"""The line to type where there is no address that could be named."""

VIRTUAL = ("docker", "virbr", "br-", "veth", "cni", "flannel", "podman", "lxcbr", "lxdbr", "vmnet")
"""How the names of interfaces begin that lead to containers or virtual machines of this host."""


@dataclass(frozen=True)
class Interface:
    """One interface; its addresses are in the kernel's order, IPv4 before IPv6."""

    name: str
    addresses: tuple[str, ...] = ()
    running: bool = True
    """Whether it is up and has a carrier (IFF_RUNNING)."""
    loopback: bool = False
    mtu: int = 1500

    @property
    def virtual(self) -> bool:
        """Whether it is a bridge or the like that no other machine is reached by."""
        return self.name.startswith(VIRTUAL)

    @property
    def outward(self) -> bool:
        """Whether another machine may be reached by it."""
        reaching = any(not ipaddress.ip_address(each).is_link_local for each in self.addresses)
        return self.running and reaching and not self.loopback and not self.virtual


def interfaces(situation: Situation) -> tuple[Interface, ...]:
    """All interfaces, in the order in which libraries see those that have an address."""
    import psutil

    stats = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        usable = [
            each.address.partition("%")[0]
            for each in addresses
            if each.family in (socket.AF_INET, socket.AF_INET6)
        ]
        facts = stats.get(name)
        flags = getattr(facts, "flags", "").split(",")
        found.append(
            Interface(
                name=name,
                addresses=tuple(usable),
                running=facts is not None and facts.isup,
                loopback="loopback" in flags or name == "lo",
                mtu=facts.mtu if facts is not None else 0,
            )
        )
    return tuple(found)


def owner(address: str, among: Iterable[Interface]) -> Interface | None:
    """The interface that has an address; all of 127.0.0.0/8 is the loopback's."""
    for each in among:
        if address in each.addresses or (each.loopback and address.startswith("127.")):
            return each
    return None


@dataclass(frozen=True)
class Choice:
    """What a library will take: interfaces in its order, or why it will find none."""

    interfaces: tuple[Interface, ...] = ()
    problem: str = ""
    reason: str = ""
    """What decided: a variable, the host name, a default."""


def gloo_choice(
    environ: Mapping[str, str], among: Iterable[Interface], own_addresses: Iterable[str]
) -> Choice:
    """The interface that torch's gloo binds to.

    ``GLOO_SOCKET_IFNAME`` is a comma-separated list of exact names. Without it, the first address
    of the machine's own host name that can be bound; if there is none, the loopback, with a
    warning. (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, createDefaultDevice;
    gloo/transport/tcp/device.cc, lookupAddrForIface and lookupAddrForHostname.)

    Args:
        environ: The job's environment.
        among: The machine's interfaces.
        own_addresses: What the host name resolves to, in the resolver's order.
    """
    here = tuple(among)
    chosen = environ.get("GLOO_SOCKET_IFNAME", "")
    if chosen:
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
    """The interfaces that NCCL uses for its sockets; the first is that of its bootstrap.

    ``NCCL_SOCKET_IFNAME`` is a list of prefixes; with ``=`` before it of exact names, with ``^`` of
    what to leave out. Without it: ``ib*``; else all but ``docker*``, ``lo*`` and ``virbr*``; else
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
    # NCCL takes a port behind a colon, which does not matter here.
    parts = [each.partition(":")[0] for each in wanted.removeprefix("=").split(",") if each]
    hit = any(name == each if exact else name.startswith(each) for each in parts)
    return hit != exclude


def towards(address: str, among: Iterable[Interface]) -> Interface | None:
    """The interface by which the kernel would send to an address; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            source = probe.getsockname()[0]
    except OSError:
        return None
    return owner(source.partition("%")[0], among)


def best(among: Iterable[Interface], address: str = "") -> Interface | None:
    """The interface to name in a fix: that towards ``address``, else the first outward one."""
    here = tuple(among)
    routed = towards(address, here) if address else None
    if routed is not None and routed.outward:
        return routed
    return next((each for each in here if each.outward), None)


def export_line(interface: Interface) -> str:
    """The line that makes gloo and NCCL use an interface."""
    return typed("export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}", interface.name)


@check("network-interface", "DDP004", limit=ALL)
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
    detail = f"gloo will use {_named(gloo)} ({gloo.reason}), NCCL {_named(nccl)}"
    return judged(detail, _findings(situation, here, gloo, nccl))


def _named(choice: Choice) -> str:
    return ", ".join(each.name for each in choice.interfaces[:4]) or "none"


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
            paste=typed("sudo ip link set {} up", down.name),
            about="loopback",
        )
    towards = situation.shared(endpoint_name)
    interface = best(here, towards.addresses[0] if towards and towards.addresses else "")
    both = [("gloo", "GLOO_SOCKET_IFNAME", gloo)]
    if situation.shared(visible_gpus):
        both.append(("NCCL", "NCCL_SOCKET_IFNAME", nccl))
    for library, variable, choice in both:
        problem = _problem(library, variable, choice, many)
        if problem is None:
            continue
        severity, message = problem
        listed = ", ".join(each.name for each in here if each.outward) or "none"
        # Without the variable the library chooses by itself, and may find one.
        otherwise = typed("unset {}", variable) if choice.reason == variable else ADDRESSES
        yield finding(
            severity,
            message,
            evidence=(f"running, with an address, and no bridge: {listed}",),
            fix="Name the interface that leads to the other nodes."
            if many
            else "Name an interface of this machine, or none.",
            paste=export_line(interface) if interface else otherwise,
            about=library,
        )


def _problem(
    library: str, variable: str, choice: Choice, many: bool
) -> tuple[Severity, str] | None:
    if choice.problem:
        named = variable == choice.reason
        hint = ""
        if named and library == "gloo" and choice.problem.startswith(("'^", "'=")):
            hint = "; gloo takes exact names alone, not NCCL's ^ and ="
        what = f"{variable}: " if named else f"{library} will find no interface: "
        return Severity.ERROR, f"{what}{choice.problem}{hint}"
    if not choice.interfaces:
        return None
    first = choice.interfaces[0]
    # A loopback that is down has its own finding.
    if not first.running and not first.loopback:
        return Severity.ERROR, f"{library} will use {first.name}, which is down ({choice.reason})"
    # A host name that leads to the loopback is reported by the check of the host name.
    if many and first.loopback and choice.reason == variable:
        return Severity.ERROR, f"{variable} is {first.name}, which reaches no other node"
    if many and first.virtual:
        return (
            Severity.ERROR if choice.reason == variable else Severity.WARNING,
            f"{library} will use {first.name} ({choice.reason}), a bridge of this machine, which "
            "no other node is likely to reach",
        )
    return None

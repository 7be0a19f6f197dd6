"""Which interface gloo and NCCL will use, and whether it can reach anybody."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged
from ddpdoctor.preflight.machine.interfaces import (
    ADDRESSES,
    Choice,
    Interface,
    best,
    export_line,
    gloo_choice,
    interfaces,
    nccl_choice,
)
from ddpdoctor.preflight.machine.names import ALL, endpoint_name, own_name
from ddpdoctor.preflight.situation import Situation, visible_gpus


@check("network-interface", "DDP004", limit=ALL)
def network_interface(situation: Situation) -> Outcome:
    """Gloo or NCCL will use a network interface that does not work for this job.

    What it finds
        A GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME that names no interface, one that is down, or, in
        a job of several nodes, the loopback or a bridge of containers or virtual machines
        (docker0, virbr0); such a bridge chosen by default; and a loopback interface that is down.

    Why it is bad
        gloo fails with "Unable to find address for: eth1", NCCL with "Bootstrap : no socket
        interface found"; on a bridge or the loopback the nodes wait for each other until the
        timeout, 10 to 30 minutes later.

    How to fix it
        Name the interface that leads to the other nodes, on each node its own.

    Example
        Wrong: `export NCCL_SOCKET_IFNAME=eth0` where the interface is called ens5.
        Right: `export GLOO_SOCKET_IFNAME=ens5 NCCL_SOCKET_IFNAME=ens5`.

    When it stays silent
        On one machine, whichever working interface is chosen; and about NCCL's variable where there
        is no GPU.

    Since
        0.1.0
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
        yield Finding(
            "DDP004",
            Severity.ERROR,
            f"the loopback interface {down.name} is down: the ranks of this machine cannot connect "
            "to each other",
            fix="Bring it up.",
            paste=f"sudo ip link set {down.name} up",
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
        otherwise = f"unset {variable}" if choice.reason == variable else ADDRESSES
        yield Finding(
            "DDP004",
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
    # Of a loopback that is down is told apart.
    if not first.running and not first.loopback:
        return Severity.ERROR, f"{library} will use {first.name}, which is down ({choice.reason})"
    # A host name that leads to the loopback is told by the check of the host name.
    if many and first.loopback and choice.reason == variable:
        return Severity.ERROR, f"{variable} is {first.name}, which reaches no other node"
    if many and first.virtual:
        return (
            Severity.ERROR if choice.reason == variable else Severity.WARNING,
            f"{library} will use {first.name} ({choice.reason}), a bridge of this machine, which "
            "no other node is likely to reach",
        )
    return None

"""Whether the addresses that gloo and NCCL give to the other nodes are ones they can reach."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, finding, judged, typed
from ddpdoctor.preflight.nodes.judging import (
    across_nodes,
    bad_ways,
    interface,
    short_of_files,
    with_address,
)
from ddpdoctor.preflight.protocol.addresses import gloo_dials, is_loopback
from ddpdoctor.preflight.protocol.meet import Meeting

LUCK = (
    "it works while no other node's gloo has a higher address, since the higher one dials: with a "
    "second node like this it hangs"
)


@across_nodes("gloo-addresses", "DDP055")
def gloo_addresses(meeting: Meeting) -> Outcome:
    """The address that gloo or NCCL gives to the other nodes does not lead back to this node.

    What it finds
        The address that torch's gloo will listen on, for every node: that of `GLOO_SOCKET_IFNAME`,
        or else what the node's host name resolves to. Reported if it is a loopback address while
        there are other nodes (Debian's `127.0.1.1` line), the same on several nodes (a container
        bridge), closed for the others while another address of the node is open, or missing because
        the interface does not exist. Where all nodes have GPUs, also the address of NCCL's first
        interface, if it is closed for the others.

    Why it is bad
        The other nodes connect to themselves or to no machine at all, time out after minutes, and
        name a peer that did nothing wrong.

    How to fix it
        On that node, name the interface that the nodes share (its name may differ between nodes):
        `export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0`. Or correct the host name's line in
        /etc/hosts.

    Example
        Wrong: `127.0.1.1 node1` in /etc/hosts of node1.
        Right: `10.0.0.12 node1`

    When it stays silent
        If the others reach every node at these addresses. Of two nodes, the one with the higher
        address connects, so a loopback address on the highest one is only a warning. A job that
        uses only NCCL does not need gloo, but most also make a gloo group (for barriers,
        checkpoints, objects).
    """
    findings = list(_findings(meeting))
    good = len(meeting.nodes) - len({each.about for each in findings})
    wrong = {each.about for each in findings if each.severity is Severity.ERROR}
    both = all(node.facts.nccl_address for node in meeting.nodes)
    return judged(
        f"{good} of {meeting.expected} nodes are reached where gloo "
        f"{'and NCCL listen' if both else 'listens'}",
        findings,
        exclude=[meeting.host(i) for i in range(len(meeting.nodes)) if f"node {i}" in wrong],
    )


def _findings(meeting: Meeting) -> Iterator[Finding]:
    closed, closed_for_nccl = _closed(meeting, "gloo"), _closed(meeting, "nccl")
    for index, node in enumerate(meeting.nodes):
        address, why = node.facts.gloo_address, node.facts.gloo_why
        name = meeting.name(index)
        others = [other for other in meeting.nodes if other.facts.machine != node.facts.machine]
        if not address:
            yield _wrong(meeting, index, f"gloo would not start on {name}: {why}")
        elif is_loopback(address) and others:
            dialled = any(gloo_dials(other.facts.gloo_address, address) for other in others)
            yield _wrong(
                meeting,
                index,
                f"gloo on {name} listens on {address}, where no other node reaches it",
                *((why,) if dialled else (why, LUCK)),
                severity=Severity.ERROR if dialled else Severity.WARNING,
            )
        elif index in closed:
            yield _not_reached(meeting, index, "gloo", address, why, closed[index])
        elif index in closed_for_nccl:
            why = node.facts.variables.get("NCCL_SOCKET_IFNAME", "")
            why = f"NCCL_SOCKET_IFNAME={why}" if why else "NCCL's own order of interfaces"
            at = node.facts.nccl_address
            yield _not_reached(meeting, index, "NCCL", at, why, closed_for_nccl[index])


def _closed(meeting: Meeting, kind: str) -> dict[int, list[int]]:
    """The nodes that are not reached at an address of theirs, and by which nodes.

    Those that a node does not reach anyway are left out, and those that may open no more files.
    """
    unreached, short = bad_ways(meeting, "route"), short_of_files(meeting)
    found: dict[int, list[int]] = {}
    for i, j in bad_ways(meeting, kind):
        if (i, j) not in unreached and not short & {i, j}:
            found.setdefault(j, []).append(i)
    return found


def _not_reached(
    meeting: Meeting, index: int, library: str, address: str, why: str, by: list[int]
) -> Finding:
    same = with_address(meeting, index, address)
    called = interface(meeting, index, address)[0]
    return _wrong(
        meeting,
        index,
        f"{library} on {meeting.name(index)} listens on {address}{f' ({called})' if called else ''}"
        ", where other nodes do not reach it",
        why,
        f"dialled from {meeting.hosts(by)}, twice",
        *([f"{meeting.hosts(same)} has the same address"] if same else ()),
    )


def _wrong(
    meeting: Meeting, index: int, message: str, *evidence: str, severity: Severity = Severity.ERROR
) -> Finding:
    host, reached = meeting.host(index), meeting.nodes[index].address
    name = interface(meeting, index)[0]
    at = f"the others do reach it at {reached}{f' ({name})' if name else ''}"
    return finding(
        severity,
        message,
        evidence=(*evidence, at),
        fix=f"Name the interface, or correct the line of {host} in /etc/hosts. On {host}, in the "
        "job's environment:",
        paste=typed("export GLOO_SOCKET_IFNAME={0} NCCL_SOCKET_IFNAME={0}", name)
        if name
        else typed("echo {} | sudo tee -a /etc/hosts", f"{reached} {host}"),
        about=f"node {index}",
    )

"""Whether the address that gloo gives to the other nodes is one they can reach."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, finding, judged, typed
from ddpdoctor.preflight.nodes.judging import across_nodes, bad_ways, interface
from ddpdoctor.preflight.protocol.addresses import gloo_dials, is_loopback
from ddpdoctor.preflight.protocol.meet import Meeting

LUCK = (
    "it works while no other node's gloo has a higher address, since the higher one dials: with a "
    "second node like this it hangs"
)


@across_nodes("gloo-addresses", "DDP055")
def gloo_addresses(meeting: Meeting) -> Outcome:
    """The address that gloo announces to the other nodes does not lead back to this node.

    What it finds
        The address that torch's gloo will listen on, for every node: that of `GLOO_SOCKET_IFNAME`,
        or else what the node's host name resolves to. Reported if it is a loopback address while
        there are other nodes (Debian's `127.0.1.1` line), the same on several nodes (a container
        bridge), closed for the others while another address of the node is open, or missing because
        the interface does not exist.

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
        If the others reach every node at gloo's address. Of two nodes, the one with the higher
        address connects, so a loopback address on the highest one is only a warning. A job that
        uses only NCCL does not need gloo, but most also make a gloo group (for barriers,
        checkpoints, objects).
    """
    findings = list(_findings(meeting))
    good = len(meeting.nodes) - len({each.about for each in findings})
    wrong = {each.about for each in findings if each.severity is Severity.ERROR}
    return judged(
        f"{good} of {meeting.expected} nodes are reached where gloo listens",
        findings,
        exclude=[meeting.host(i) for i in range(len(meeting.nodes)) if f"gloo {i}" in wrong],
    )


def _findings(meeting: Meeting) -> Iterator[Finding]:
    unreached = bad_ways(meeting, "route")
    closed: dict[int, list[int]] = {}
    for i, j in bad_ways(meeting, "gloo"):
        if (i, j) not in unreached:
            closed.setdefault(j, []).append(i)
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
            same = [
                other
                for other in range(len(meeting.nodes))
                if other != index and interface(meeting, other, address)[0]
            ]
            called = interface(meeting, index, address)[0]
            yield _wrong(
                meeting,
                index,
                f"gloo on {name} listens on {address}{f' ({called})' if called else ''}, where "
                "other nodes do not reach it",
                why,
                f"dialled from {meeting.hosts(closed[index])}, twice",
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
        about=f"gloo {index}",
    )

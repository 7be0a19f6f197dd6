"""Whether a link between nodes is slower than the others."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, could_not_run, judged, skipped, typed, warning
from ddpdoctor.preflight.nodes.judging import Blame, across_nodes, blame, interface
from ddpdoctor.preflight.protocol.addresses import dialled_at
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.report import (
    Speeds,
)
from ddpdoctor.preflight.protocol.speeds import FLOOR, LEAST_TO_COMPARE
from ddpdoctor.preflight.words import counted

MOST_FINDINGS = 6


@across_nodes("link-speed", "DDP056")
def link_speed(meeting: Meeting) -> Outcome:
    """A link between nodes is much slower than the others, or loses packets.

    What it finds
        A link with less than half the median bandwidth, or with more than twice the median round
        trip plus 1 ms, where there are three links or more; any link below 80 Mbit/s. A link on
        which 2 % of the small messages, and 3 at least, had to be sent again (the kernel's count).
        It is measured again, alone and several times, before it is reported. Up to eight nodes,
        every path is measured; with more, log2(n) paths from each node.

    Why it is bad
        An all_reduce is as fast as its slowest link: one cable at 1 Gbit/s slows down all nodes.

    How to fix it
        Check the link's speed (`ethtool eth0 | grep Speed`), its cable and switch port, limits on
        outgoing traffic (`tc qdisc`), and whether the node uses another interface than the others.

    Example
        Wrong: one node on the management network.
        Right: all nodes on the fast network, with `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`.

    When it stays silent
        If all links are similar. Time in which either end waited for a core does not count; where
        that was most of it, or torch could not be imported in time, nothing is judged, and the
        output says so. One TCP connection in Python finds slow links, not the network's capacity:
        links of 10 Gbit/s and more are not compared.
    """
    speed = meeting.report.speed
    if speed.untested:
        return could_not_run(speed.untested)
    if not speed.measured:
        return skipped("no link could be measured")
    detail = (
        f"{counted(speed.measured, 'link')}: median {shown(speed.bandwidth)}, round trip "
        f"{1e3 * speed.rtt:.2f} ms"
    )
    findings = [*_lossy(meeting, speed), *_findings(meeting, speed)][:MOST_FINDINGS]
    if speed.starved and not findings:
        return could_not_run(
            f"{detail}; for lack of CPU, {counted(speed.starved, 'link')} could not be judged"
        )
    return judged(detail, findings)


def _lossy(meeting: Meeting, speed: Speeds) -> Iterator[Finding]:
    lost = {(i, j): (sent, resent) for i, j, sent, resent in speed.lossy}
    for each in blame(lost, speed.cells):
        sent, resent = (sum(lost[way][place] for way in each.ways) for place in (0, 1))
        name, over = _interface(meeting, each)
        where = each.words(meeting, "on the way to", "on the way from", "to and from")
        yield warning(
            f"packets are lost {where}: {resent} of {sent} small messages were sent again "
            f"({100 * resent / sent:.0f} %)",
            evidence=("they were sent one at a time: no queue on the way was full", *over),
            fix=f"Check the cable, the switch port and the interface of {each.hosts(meeting)}: "
            "its errors and drops. There:",
            paste=typed("ip -s link show dev {}", name),
            about=f"lossy {each.about}",
        )


def _interface(meeting: Meeting, bad: Blame) -> tuple[str, tuple[str, ...]]:
    """The interface of the node to look at, and the evidence for it if gloo or NCCL chose it."""
    source, target = (meeting.nodes[index] for index in bad.ways[0])
    kind, address = list(dialled_at(source.facts, target.facts, target.address).items())[-1]
    if kind == "route":
        return interface(meeting, bad.node)[0] or "eth0", ()
    facts = meeting.nodes[bad.node].facts
    if bad.node == bad.ways[0][0]:
        address = facts.gloo_address if kind == "gloo" else facts.nccl_address
    where = f"{facts.host} {address}"
    taken = f"gloo takes: {where} ({facts.gloo_why})" if kind == "gloo" else f"NCCL takes: {where}"
    name = interface(meeting, bad.node, address)[0] or "eth0"
    return name, (f"it is the way that {taken}",)


def _findings(meeting: Meeting, speed: Speeds) -> Iterator[Finding]:
    slow = {(i, j): (rtt, bandwidth) for i, j, rtt, bandwidth in speed.slow}
    for each in blame(slow, speed.cells):
        name, over = _interface(meeting, each)
        rtt = min(slow[way][0] for way in each.ways)
        bandwidth = max(slow[way][1] for way in each.ways)
        link = "the link" if each.kind in ("way", "between") else "every link"
        ends = meeting.host(each.node)
        if each.kind == "way":
            # A limit on the way out of one end looks like one on the way into the other.
            ends = f"{meeting.host(each.ways[0][0])} (on the way out) and of {ends} (on the way in)"
        yield warning(
            f"{link} {each.words(meeting, 'to', 'from', 'of')} is slow: {shown(bandwidth)}, round "
            f"trip {1e3 * rtt:.2f} ms",
            evidence=(
                f"the median link has {shown(speed.bandwidth)} and {1e3 * speed.rtt:.2f} ms"
                if len(speed.cells) >= LEAST_TO_COMPARE
                else f"less than a network of 100 Mbit/s carries ({shown(FLOOR)})",
                "it was measured again alone, and the best counts",
                *over,
            ),
            fix=f"Check the cable, the switch port, the chosen interface and limits on traffic of "
            f"{ends}. There:",
            paste=typed("ethtool {0} | grep -E 'Speed|Duplex'; tc qdisc show dev {0}", name),
            about=each.about,
        )


def shown(bandwidth: float) -> str:
    """Bytes per second for a person, in the unit that links are sold in."""
    bits = bandwidth * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"

"""Whether a link between nodes is slower than the others."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, judged, skipped, warning
from ddpdoctor.preflight.nodes.judging import across_nodes, blame, interface
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.messages import Speeds
from ddpdoctor.preflight.words import counted

MOST_FINDINGS = 6


@across_nodes("link-speed", "DDP056")
def link_speed(meeting: Meeting) -> Outcome:
    """A link between nodes is much slower than the others.

    What it finds
        A link with less than half the median bandwidth, or with more than twice the median round
        trip plus 1 ms. It is measured again, alone and several times, before it is reported. Up to
        eight nodes, every path is measured; with more, log2(n) paths from each node.

    Why it is bad
        An all_reduce is as fast as its slowest link: one cable at 1 Gbit/s slows down all nodes.

    How to fix it
        Check the link's speed (`ethtool eth0 | grep Speed`), its cable and switch port, and whether
        the node uses another interface than the others.

    Example
        Wrong: one node on the management network.
        Right: all nodes on the fast network, with `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`.

    When it stays silent
        If all links are similar. The test uses one TCP connection in Python, which does not
        saturate the fastest links: it finds slow links, not the capacity of the network.
    """
    speed = meeting.report.speed
    if not speed.measured:
        return skipped("no link could be measured")
    detail = (
        f"{counted(speed.measured, 'link')}: median {shown(speed.bandwidth)}, round trip "
        f"{1e3 * speed.rtt:.2f} ms"
    )
    return judged(detail, list(_findings(meeting, speed))[:MOST_FINDINGS])


def _findings(meeting: Meeting, speed: Speeds) -> Iterator[Finding]:
    slow = {(i, j): (rtt, bandwidth) for i, j, rtt, bandwidth in speed.slow}
    for each in blame(slow, speed.cells):
        name = interface(meeting, each.node)[0] or "eth0"
        rtt = min(slow[way][0] for way in each.ways)
        bandwidth = max(slow[way][1] for way in each.ways)
        link = "the link" if each.kind in ("way", "between") else "every link"
        yield warning(
            f"{link} {each.words(meeting, 'to', 'from', 'of')} is slow: {shown(bandwidth)}, round "
            f"trip {1e3 * rtt:.2f} ms",
            evidence=(
                f"the median link has {shown(speed.bandwidth)} and {1e3 * speed.rtt:.2f} ms",
                "it was measured again alone, and the best counts",
            ),
            fix=f"Check the cable, the switch port and the chosen interface of "
            f"{meeting.host(each.node)}. There:",
            paste=f"ethtool {name} | grep -E 'Speed|Duplex'",
            about=each.about,
        )


def shown(bandwidth: float) -> str:
    """Bytes per second for a person, in the unit that links are sold in."""
    bits = bandwidth * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"

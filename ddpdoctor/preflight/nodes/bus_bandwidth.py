"""What a bus bandwidth is compared with, and when it is far below that.

Generous on purpose: the test's messages are smaller than those that fill the fastest links, and a
job that reaches a quarter of them may be as fast as its machines can be.
"""

from __future__ import annotations

from ddpdoctor.preflight.protocol.meet import Meeting

FAR_BELOW = 8
"""So many times slower than the link is worth a warning. Healthy machines are within two or three;
what goes by host memory in place of NVLink, or by a socket in place of InfiniBand, is 10 to 40
times slower."""

BELOW_TCP = 5
"""The same for gloo, against one connection of TCP between the same nodes."""

IDLE = 0.5
"""For which part of the time every rank must neither have run nor waited for a core: else the
machines were slow, not the network."""

MOST_RANKS = 64
"""With more ranks an all_reduce of a few MiB waits for the many steps of its ring."""


def capacity(meeting: Meeting, nodes: list[int]) -> tuple[str, float]:
    """The slowest link that a group of nodes reduces over, and its bytes per second; or 0, and why.

    Inside a node where it is a single one, else between the nodes.
    """
    facts = [meeting.nodes[index].facts for index in nodes]
    links = [each.inside if len(facts) == 1 else each.outside for each in facts]
    unknown = [what for what, speed in links if not speed]
    if unknown:
        return unknown[0], 0.0
    return min(links, key=lambda link: link[1])


def shown(speed: float) -> str:
    """Bytes per second for a person, in the unit of nccl-tests."""
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"

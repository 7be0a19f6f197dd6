"""Whether packets of full size arrive."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged
from ddpdoctor.preflight.nodes.judging import (
    LIMIT,
    Way,
    all_ways,
    bad_ways,
    blame,
    interface_name,
    judge,
    reached_at,
)
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.situation import Situation

CODE = "DDP054"


@check("packet-size", CODE, scope="nodes", limit=LIMIT)
def packet_size(situation: Situation) -> Outcome:
    """Packets of full size vanish between nodes, or the nodes' largest packets (MTU) differ.

    What it finds
        A way between nodes on which a connection opens and small messages pass, but 64 KiB do not
        arrive (error). It is tried again with smaller packets, to tell which size passes. Nodes
        whose interfaces have different MTUs (warning).

    Why it is bad
        The job connects, and stops at the first all_reduce of more than a packet. A tunnel (VPN,
        overlay network, jumbo frames on one side) takes less than the interface says, and the
        message that should tell so is filtered. Measured: 942 s until gloo gave up.

    How to fix it
        Give the interface of every node the size that passes: `sudo ip link set dev eth0 mtu 1400`,
        and make it last in the network's configuration. Or let ICMP "fragmentation needed" through.

    Example
        Wrong: MTU 1500 on hosts whose traffic goes through a tunnel of 1400.
        Right: MTU 1400 on those hosts.

    When it stays silent
        When 64 KiB arrived on every way that is open, and the MTUs are equal.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
    lossy: dict[Way, dict[str, object]] = {}
    closed: set[Way] = set()
    for way, result in bad_ways(meeting, "route"):
        if result["outcome"] == "forth":
            lossy[way] = result
        elif result["outcome"] == "back":
            lossy[way[1], way[0]] = result
        else:
            closed.add(way)
    ways = [way for way in all_ways(meeting) if way not in closed]
    passed = len([way for way in ways if way not in lossy])
    total = meeting.expected * (meeting.expected - 1)
    detail = f"64 KiB arrived on {passed} of {total} ways"
    return judged(detail, [*_losses(meeting, lossy, ways), *_differing(meeting)])


def _losses(
    meeting: Meeting, lossy: dict[Way, dict[str, object]], ways: list[Way]
) -> Iterator[Finding]:
    for each in blame(lossy, ways):
        source, target = each.ways[0]
        result = lossy[each.ways[0]]
        passes = int(str(result.get("passes", 0)))
        mtu = _mtu(meeting, source)
        size = f"packets of {mtu} bytes" if mtu else "packets of full size"
        between = {
            "into": f"on the way to {meeting.name(each.node)}",
            "out of": f"on the way from {meeting.name(each.node)}",
            "both": f"to and from {meeting.name(each.node)}",
            "between": f"between {meeting.name(source)} and {meeting.name(target)}",
            "way": f"from {meeting.name(source)} to {meeting.name(target)}",
        }[each.kind]
        host = meeting.nodes[each.node].facts.host
        if each.kind == "between":
            host = f"{meeting.nodes[source].facts.host} and {host}"
        interface = interface_name(meeting, each.node) or "eth0"
        what = f"{size} vanish {between}" if passes else f"64 KiB do not arrive {between}"
        yield Finding(
            CODE,
            Severity.ERROR,
            what,
            evidence=(
                "a connection opens there, and small messages pass",
                f"packets of {passes} bytes pass" if passes else "smaller packets fail as well",
            ),
            fix=f"Give the interface of {host} a smaller MTU, or let ICMP through on the way. On "
            f"{host}, and on every other node to be equal:"
            if passes
            else f"Look at the network of {host}: its cable, its driver, a rule by packet size. "
            "Its counters of errors:",
            paste=f"sudo ip link set dev {interface} mtu {passes}"
            if passes
            else f"ip -s link show dev {interface}",
            about=f"{each.kind} {each.ways[0]}",
        )


def _differing(meeting: Meeting) -> Iterator[Finding]:
    by_mtu: dict[int, list[int]] = {}
    for index in range(len(meeting.nodes)):
        mtu = _mtu(meeting, index)
        if mtu:
            by_mtu.setdefault(mtu, []).append(index)
    if len(by_mtu) < 2:
        return
    odd = min(by_mtu, key=lambda mtu: (len(by_mtu[mtu]), mtu))
    usual = max((mtu for mtu in by_mtu if mtu != odd), key=lambda mtu: len(by_mtu[mtu]))
    interface = interface_name(meeting, by_mtu[odd][0])
    yield Finding(
        CODE,
        Severity.WARNING,
        f"the largest packet (MTU) is {odd} bytes on {meeting.hosts(by_mtu[odd])} and {usual} "
        "bytes on others",
        evidence=tuple(
            f"MTU {mtu}: {meeting.hosts(indices)}" for mtu, indices in sorted(by_mtu.items())
        ),
        fix="Give the interfaces of all nodes one MTU.",
        paste=f"sudo ip link set dev {interface} mtu {min(by_mtu)}",
        about="mtu",
    )


def _mtu(meeting: Meeting, index: int) -> int:
    address = reached_at(meeting, index)
    for _, mtu, addresses in meeting.nodes[index].facts.interfaces:
        if address in addresses:
            return mtu
    return 0

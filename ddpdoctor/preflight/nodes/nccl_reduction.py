"""Whether the GPUs of all nodes reduce together, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, could_not_run, judged, skipped
from ddpdoctor.preflight.machine.nccl_words import advice
from ddpdoctor.preflight.nodes.bus_bandwidth import FAR_BELOW, capacity, shown
from ddpdoctor.preflight.nodes.judging import LIMIT, judge
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.situation import Situation

CODE = "DDP061"

OWN_WORDS = (
    "Try again with NCCL's own words; the first warning names the device or address.",
    "export NCCL_DEBUG=INFO",
)


@check("nccl-nodes", CODE, needs_torch=True, scope="nodes", limit=LIMIT)
def nccl_reduction(situation: Situation) -> Outcome:
    """An all_reduce by NCCL fails or hangs: inside a node, between two nodes, or over all.

    What it finds
        Where every node has a GPU per rank, with 3 GiB of its memory free: all_reduce with results
        compared, first inside each node, then between pairs of nodes in log2(n) rounds, then over
        all ranks, so that the first stage that fails names the node or the pair. The two of a pair
        that fails are tried with other nodes before one of them is blamed, or the link between
        them. A bus bandwidth, as nccl-tests define it, that is a small part of what the link is
        built for (warning): an eighth of the NVLinks or of PCIe inside a node, of InfiniBand, RoCE
        or the network card between nodes; of messages of 4 and 64 MiB, the best of several.

    Why it is bad
        NCCL's own message is "unhandled system error", on every rank, after half an hour.

    How to fix it
        Inside a node: shared memory, peer-to-peer (`NCCL_P2P_DISABLE=1` tells), the driver. Between
        nodes: `NCCL_SOCKET_IFNAME`, InfiniBand (`NCCL_IB_DISABLE=1` tells), the firewall.
        `NCCL_DEBUG=INFO` has the details.

    Example
        Wrong: `NCCL_SOCKET_IFNAME=eth0` where the interface is called ens3.
        Right: `NCCL_SOCKET_IFNAME=ens3` there.

    When it stays silent
        When all stages gave the right result; it is skipped without GPUs. A link whose speed nobody
        tells (a virtual network card, above all) is not compared, and that is said.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
    why_not: dict[str, list[int]] = {}
    for index, node in enumerate(meeting.nodes):
        if node.facts.no_nccl:
            why_not.setdefault(node.facts.no_nccl, []).append(index)
    if why_not:
        reason, on = next(iter(why_not.items()))
        return skipped(
            reason if len(on) == len(meeting.nodes) else f"{reason} on {meeting.hosts(on)}"
        )
    told = meeting.blob["reduction"]
    if told["skipped"]:
        return skipped(told["skipped"])
    nccl = told["nccl"]
    if nccl is None or (not nccl["stages"] and not nccl["untested"]):
        return skipped("gloo failed already")
    detail = f"{nccl['correct']} of {told['world']} ranks reduced correctly"
    for name, _, sets in nccl["stages"]:
        if sets:
            detail += f"; {name} {shown(sets[0][1])}{_of(capacity(meeting, sets[0][0]))}"
    found = [*_failures(meeting), *_slow(meeting)]
    if nccl["untested"] and not found:
        return could_not_run(
            f"{detail}; no time was left for NCCL {nccl['untested']}: give it more with --timeout"
        )
    return judged(detail, found)


def _of(link: tuple[str, float]) -> str:
    """With what a bus bandwidth is compared, for the table."""
    what, speed = link
    return f" of {shown(speed)} ({what})" if speed else f", not compared: {what}"


def _slow(meeting: Meeting) -> Iterator[Finding]:
    """The first stage that is far slower than its links; those after it go over the same ones."""
    for name, _, sets in meeting.blob["reduction"]["nccl"]["stages"]:
        slow = [
            (nodes, bus, link)
            for nodes, bus in sets
            if (link := capacity(meeting, nodes))[1] and bus < link[1] / FAR_BELOW
        ]
        if not slow:
            continue
        nodes, bus, (what, speed) = slow[0]
        inside = len(nodes) == 1
        yield Finding(
            CODE,
            Severity.WARNING,
            f"NCCL moves {shown(bus)} {name} ({meeting.hosts(nodes)}), far less than the link's "
            f"{shown(speed)} ({what})",
            evidence=tuple(
                f"{meeting.hosts(others)}: {shown(each)}" for others, each, _ in slow[1:9]
            ),
            fix="Look which way NCCL takes: where it is not peer-to-peer, an IOMMU or ACS may be "
            "in between. Its own words:"
            if inside
            else "Look which way NCCL takes: a socket in place of InfiniBand (no device in the "
            "container, no plugin), or another interface. Its own words:",
            paste="export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,GRAPH,P2P,SHM"
            if inside
            else "export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET",
            about="bus",
        )
        return


def _failures(meeting: Meeting) -> Iterator[Finding]:
    told = meeting.blob["reduction"]["nccl"]
    again = told.get("again", [])
    for name, errors, _ in told["stages"]:
        if not errors:
            continue
        chosen = sorted({index for _, nodes, _ in errors for index in nodes})
        where = f"{name} fails: {meeting.hosts(chosen)}"
        guilty = sorted({suspect for suspect, _, works in again if not works})
        if guilty:
            where = f"{name} fails because of {meeting.hosts(guilty)}"
        elif again:
            where = f"fails between {meeting.hosts(chosen)} alone"
        fix, paste = advice(" ".join(said for _, _, said in errors), OWN_WORDS)
        yield Finding(
            CODE,
            Severity.ERROR,
            f"NCCL's all_reduce {where}",
            evidence=(
                *(
                    f"{meeting.hosts([suspect])} with {meeting.hosts([other])}, which had not "
                    f"failed: {'works' if works else 'fails, too'}"
                    for suspect, other, works in again[:6]
                ),
                *dict.fromkeys(f"{meeting.nodes[at].facts.host}: {said}" for at, _, said in errors),
            )[:10],
            fix=fix,
            paste=paste,
            about=name,
        )
        return
    missing = meeting.blob["reduction"]["world"] - told["correct"]
    if missing and not told["untested"]:
        yield Finding(
            CODE,
            Severity.ERROR,
            f"NCCL's test was not ended by {missing} of {meeting.blob['reduction']['world']} ranks",
            fix="Try again with NCCL's own words.",
            paste="export NCCL_DEBUG=INFO",
            about="ranks",
        )

"""Whether the ranks of all nodes reduce together, by gloo and by NCCL, and how fast.

What a bus bandwidth is compared with is generous on purpose: the test's messages are smaller than
those that fill the fastest links, and a job that reaches a quarter of them may be as fast as its
machines can be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import Outcome, could_not_run, failure, judged, skipped, warning
from ddpdoctor.preflight.machine.nccl import advice
from ddpdoctor.preflight.nodes.judging import across_nodes, counted, interface_name
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.ranks import BROKEN

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


@across_nodes("gloo-nodes", "DDP060")
def gloo_reduction(meeting: Meeting) -> Outcome:
    """An all_reduce over all ranks of all nodes fails, hangs, or gives a wrong result.

    What it finds
        As many ranks as the job will have, on every node, with the real torch: a store at the
        rendezvous port, gloo in the environment as it is, all_reduce and broadcast with exact
        results, within 20 s. Skipped if another check already knows why it would hang. Also a bus
        bandwidth (as nccl-tests define it, the best of several sizes) below a fifth of what one TCP
        connection reached between the slowest pair of nodes while their cores were idle (warning):
        gloo then uses another path than that connection.

    Why it is bad
        What fails here fails in the job, later and with a longer error.

    How to fix it
        Follow the error of the first rank. "Connection refused" or "timed out" with a peer's
        address: that address is not on the network that the nodes share (`GLOO_SOCKET_IFNAME`). "No
        result": a rank hung.

    Example
        Wrong: a torch built without distributed support on one node.
        Right: the same environment on every node.

    When it stays silent
        If every rank got the right result. The bus bandwidth is not compared if a node's cores were
        busy or with more than 64 ranks; the output says so.
    """
    told = meeting.blob["reduction"]
    if told.get("unready"):
        return _unready(meeting, told["unready"])
    if told["skipped"]:
        return skipped(told["skipped"])
    if not told["world"]:
        return could_not_run("there were no ranks")
    detail = (
        f"{told['correct_nodes']} of {meeting.expected} nodes, {told['correct']} of "
        f"{counted(told['world'], 'rank')} reduced correctly"
    )
    bus, least = told["bus"], meeting.blob["speed"]["least"]
    if not bus:
        return judged(detail, _failed_gloo(meeting, told))
    why_not = _why_not_compared(told, least)
    detail += f"; bus bandwidth {shown(bus)}, "
    detail += f"not compared: {why_not}" if why_not else f"TCP has {shown(least)}"
    slow = [] if why_not else list(_slow_gloo(meeting, bus, least))
    return judged(detail, [*_failed_gloo(meeting, told), *slow])


def _unready(meeting: Meeting, told: list[tuple[int, str, float]]) -> Outcome:
    broken = [index for index, why, _ in told if why == BROKEN]
    if not broken:
        hosts = meeting.hosts([index for index, *_ in told])
        return could_not_run(
            f"torch was not imported within {told[0][2]:.0f} s on {hosts}: give it more time with "
            "--timeout"
        )
    finding = failure(
        f"torch cannot be imported on {meeting.hosts(broken)}",
        fix=f"See what Python says. On {meeting.nodes[broken[0]].facts.host}:",
        paste="python -c 'import torch.distributed'",
        about="import",
    )
    return judged("not tried: torch cannot be imported everywhere", [finding])


def _why_not_compared(told: dict[str, Any], least: float) -> str:
    """Why gloo's speed says nothing about the network; empty if it does."""
    if not least:
        return "no link was measured"
    if told["world"] > MOST_RANKS:
        return f"over {MOST_RANKS} ranks"
    return "" if told["idle"] >= IDLE else "the cores were busy"


def _slow_gloo(meeting: Meeting, bus: float, least: float) -> Iterator[Finding]:
    if bus >= least / BELOW_TCP:
        return
    ways = {
        f"{node.facts.host}: gloo {node.facts.gloo_address} ({node.facts.gloo_why}), reached at "
        f"{node.address}"
        for node in meeting.nodes
        if node.facts.gloo_address != node.address
    }
    name = next((interface_name(meeting, index) for index in range(len(meeting.nodes))), "")
    yield warning(
        f"gloo moves {shown(bus)} between the nodes, far less than the {shown(least)} of one "
        "connection of TCP",
        evidence=tuple(sorted(ways))[:8],
        fix="Let gloo use the interface that the nodes reach each other by, in the job's "
        "environment on every node (its name may differ):",
        paste=f"export GLOO_SOCKET_IFNAME={name or 'eth0'}",
        about="bus",
    )


def _failed_gloo(meeting: Meeting, told: dict[str, Any]) -> Iterator[Finding]:
    if told["correct"] == told["world"]:
        return
    wrong = told["wrong"]
    nodes = sorted({result["node"] for result in wrong})
    words = [str(result.get("error", "")) for result in wrong]
    answered = {result["node"] for result in wrong}
    silent = [
        index for index, node in enumerate(meeting.nodes) if node.lost and index not in answered
    ]
    failed = counted(told["world"] - told["correct"], "rank")
    message = (
        "no rank could reduce"
        if told["correct"] == 0
        else f"{failed} did not reduce correctly, on {meeting.hosts(sorted({*nodes, *silent}))}"
    )
    evidence = [
        f"rank {result['rank']} on {meeting.nodes[result['node']].facts.host}: {text}"
        for result, text in zip(wrong, words, strict=True)
        if text
    ][:4]
    if silent:
        evidence.append(f"no answer at all from {meeting.hosts(silent)}")
    yield failure(
        f"{message} within {told['limit']:.0f} s",
        evidence=tuple(evidence),
        fix="See the first error: a job would end with it. The other checks of the nodes found no "
        "reason. With gloo's own words, try again:",
        paste="export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO",
        about="reduction",
    )


OWN_WORDS = (
    "Try again with NCCL's own words; the first warning names the device or address.",
    "export NCCL_DEBUG=INFO",
)


@across_nodes("nccl-nodes", "DDP061")
def nccl_reduction(meeting: Meeting) -> Outcome:
    """An all_reduce with NCCL fails or hangs: inside a node, between two nodes, or over all ranks.

    What it finds
        If every rank has a GPU with 3 GiB free: all_reduce with results compared, first inside each
        node, then between pairs of nodes in log2(n) rounds, then over all ranks, so that the first
        failing stage shows the node or the pair. Both nodes of a failing pair are tried with other
        nodes before one node or their link is named. Also a bus bandwidth (as nccl-tests define it,
        for 4 and 64 MiB, best of several) below an eighth of what the link is built for (warning):
        NVLink or PCIe inside a node, InfiniBand, RoCE or the network card between nodes.

    Why it is bad
        NCCL's message is "unhandled system error", on every rank, after half an hour.

    How to fix it
        Inside a node, check shared memory, peer-to-peer (try `NCCL_P2P_DISABLE=1`) and the driver.
        Between nodes, check `NCCL_SOCKET_IFNAME`, InfiniBand (try `NCCL_IB_DISABLE=1`) and the
        firewall. `NCCL_DEBUG=INFO` prints the details.

    Example
        Wrong: `NCCL_SOCKET_IFNAME=eth0` where the interface is called ens3.
        Right: `NCCL_SOCKET_IFNAME=ens3`

    When it stays silent
        If all stages gave the right result. Skipped without GPUs. A link of unknown speed (such as
        a virtual network card) is not compared; the output says so.
    """
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
    found = [*_failed_nccl(meeting), *_slow_nccl(meeting)]
    if nccl["untested"] and not found:
        return could_not_run(
            f"{detail}; no time was left for NCCL {nccl['untested']}: give it more with --timeout"
        )
    return judged(detail, found)


def _of(link: tuple[str, float]) -> str:
    """With what a bus bandwidth is compared, for the table."""
    what, speed = link
    return f" of {shown(speed)} ({what})" if speed else f", not compared: {what}"


def _slow_nccl(meeting: Meeting) -> Iterator[Finding]:
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
        yield warning(
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


def _failed_nccl(meeting: Meeting) -> Iterator[Finding]:
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
        yield failure(
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
        yield failure(
            f"NCCL's test was not ended by {missing} of {meeting.blob['reduction']['world']} ranks",
            fix="Try again with NCCL's own words.",
            paste="export NCCL_DEBUG=INFO",
            about="ranks",
        )

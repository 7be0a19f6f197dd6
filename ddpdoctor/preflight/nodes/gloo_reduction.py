"""Whether the ranks of all nodes reduce together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, could_not_run, judged, skipped
from ddpdoctor.preflight.nodes.bus_bandwidth import BELOW_TCP, IDLE, MOST_RANKS, shown
from ddpdoctor.preflight.nodes.judging import LIMIT, counted, interface_name, judge
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.ranks import BROKEN
from ddpdoctor.preflight.situation import Situation

CODE = "DDP060"


@check("gloo-nodes", CODE, needs_torch=True, scope="nodes", limit=LIMIT)
def gloo_reduction(situation: Situation) -> Outcome:
    """An all_reduce over all ranks of all nodes fails, hangs, or gives a wrong result.

    What it finds
        As many ranks as the job will have, on every node, with the real torch: a store at the
        rendezvous port, gloo with the environment as it is, all_reduce and broadcast with results
        that are compared exactly. All of it has 20 s. It is left out while the other checks know
        why it would only hang. A bus bandwidth (as nccl-tests define it, best of several sizes)
        below a fifth of what one connection of TCP moved between the slowest pair of these nodes,
        though their cores were idle (warning): gloo goes another way than the connection did.

    Why it is bad
        What fails here fails in the job, later and in more words.

    How to fix it
        By the error of the first rank. "Connection refused" or "timed out" with a peer's address:
        the address is not the one the nodes share (`GLOO_SOCKET_IFNAME`). "No result": a rank hung.

    Example
        Wrong: a torch that was built without distributed on one node.
        Right: the same environment on every node.

    When it stays silent
        When every rank had the right result. The bus bandwidth is not compared, which is said, when
        a node's cores were busy, and with more than 64 ranks.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
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
        return judged(detail, _findings(meeting, told))
    why_not = _why_not_compared(told, least)
    detail += f"; bus bandwidth {shown(bus)}, "
    detail += f"not compared: {why_not}" if why_not else f"TCP has {shown(least)}"
    slow = [] if why_not else list(_slow(meeting, bus, least))
    return judged(detail, [*_findings(meeting, told), *slow])


def _unready(meeting: Meeting, told: list[tuple[int, str, float]]) -> Outcome:
    broken = [index for index, why, _ in told if why == BROKEN]
    if not broken:
        hosts = meeting.hosts([index for index, *_ in told])
        return could_not_run(
            f"torch was not imported within {told[0][2]:.0f} s on {hosts}: give it more time with "
            "--timeout"
        )
    finding = Finding(
        CODE,
        Severity.ERROR,
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


def _slow(meeting: Meeting, bus: float, least: float) -> Iterator[Finding]:
    if bus >= least / BELOW_TCP:
        return
    ways = {
        f"{node.facts.host}: gloo {node.facts.gloo_address} ({node.facts.gloo_why}), reached at "
        f"{node.address}"
        for node in meeting.nodes
        if node.facts.gloo_address != node.address
    }
    name = next((interface_name(meeting, index) for index in range(len(meeting.nodes))), "")
    yield Finding(
        CODE,
        Severity.WARNING,
        f"gloo moves {shown(bus)} between the nodes, far less than the {shown(least)} of one "
        "connection of TCP",
        evidence=tuple(sorted(ways))[:8],
        fix="Let gloo use the interface that the nodes reach each other by, in the job's "
        "environment on every node (its name may differ):",
        paste=f"export GLOO_SOCKET_IFNAME={name or 'eth0'}",
        about="bus",
    )


def _findings(meeting: Meeting, told: dict[str, Any]) -> Iterator[Finding]:
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
    yield Finding(
        CODE,
        Severity.ERROR,
        f"{message} within {told['limit']:.0f} s",
        evidence=tuple(evidence),
        fix="See the first error: a job would end with it. The other checks of the nodes found no "
        "reason. With gloo's own words, try again:",
        paste="export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO",
        about="reduction",
    )

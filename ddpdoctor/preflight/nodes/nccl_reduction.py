"""Whether the GPUs of all nodes reduce together, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged, skipped
from ddpdoctor.preflight.meeting.meet import Meeting
from ddpdoctor.preflight.nodes.judging import LIMIT, judge
from ddpdoctor.preflight.situation import Situation

CODE = "DDP061"


@check("nccl-nodes", CODE, needs_torch=True, scope="nodes", limit=LIMIT)
def nccl_reduction(situation: Situation) -> Outcome:
    """An all_reduce by NCCL fails or hangs: inside a node, between two nodes, or over all.

    What it finds
        Where every node has a GPU per rank: all_reduce with results compared, first inside each
        node, then between pairs of nodes in log2(n) rounds, then over all ranks, so that the first
        stage that fails names the node or the pair. The bus bandwidth of each stage is told.

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
        When all stages gave the right result; it is skipped without GPUs.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
    if any(node.facts.gpus == 0 for node in meeting.nodes):
        without = [index for index, node in enumerate(meeting.nodes) if node.facts.gpus == 0]
        if len(without) == len(meeting.nodes):
            return skipped("no GPU")
        return skipped(f"no GPU on {meeting.hosts(without)}")
    told = meeting.blob["reduction"]
    if told["skipped"]:
        return skipped(told["skipped"])
    nccl = told["nccl"]
    if nccl is None:
        return skipped("a node has fewer GPUs than ranks")
    if not nccl["stages"]:
        return skipped("gloo failed already")
    bus = next((speed for _, _, speed in reversed(nccl["stages"]) if speed), 0.0)
    detail = f"{nccl['correct']} of {told['world']} ranks reduced correctly"
    if bus:
        detail += f", bus bandwidth {bus / 1e9:.1f} GB/s"
    return judged(detail, _findings(meeting))


def _findings(meeting: Meeting) -> Iterator[Finding]:
    for name, errors, _ in meeting.blob["reduction"]["nccl"]["stages"]:
        if not errors:
            continue
        chosen = sorted({index for _, nodes, _ in errors for index in nodes})
        yield Finding(
            CODE,
            Severity.ERROR,
            f"NCCL's all_reduce {name} fails: {meeting.hosts(chosen)}",
            evidence=tuple(
                dict.fromkeys(f"{meeting.nodes[at].facts.host}: {words}" for at, _, words in errors)
            )[:4],
            fix="Try again with NCCL's own words; the first warning names the device or address.",
            paste="export NCCL_DEBUG=INFO",
            about=name,
        )
        return

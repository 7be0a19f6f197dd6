"""Whether the ranks of all nodes reduce together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, could_not_run, judged, skipped
from ddpdoctor.preflight.meeting.meet import Meeting
from ddpdoctor.preflight.nodes.judging import LIMIT, counted, judge
from ddpdoctor.preflight.situation import Situation

CODE = "DDP060"


@check("gloo-nodes", CODE, needs_torch=True, scope="nodes", limit=LIMIT)
def gloo_reduction(situation: Situation) -> Outcome:
    """An all_reduce over all ranks of all nodes fails, hangs, or gives a wrong result.

    What it finds
        As many ranks as the job will have, on every node, with the real torch: a store at the
        rendezvous port, gloo with the environment as it is, all_reduce and broadcast with results
        that are compared exactly. All of it has 20 s. It is left out while the other checks know
        why it would only hang.

    Why it is bad
        What fails here fails in the job, later and in more words.

    How to fix it
        By the error of the first rank. "Connection refused" or "timed out" with a peer's address:
        the address is not the one the nodes share (`GLOO_SOCKET_IFNAME`). "No result": a rank hung.

    Example
        Wrong: a torch that was built without distributed on one node.
        Right: the same environment on every node.

    When it stays silent
        When every rank had the right result.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
    told = meeting.blob["reduction"]
    if told["skipped"]:
        return skipped(told["skipped"])
    if not told["world"]:
        return could_not_run("there were no ranks")
    detail = (
        f"{told['correct_nodes']} of {meeting.expected} nodes, {told['correct']} of "
        f"{counted(told['world'], 'rank')} reduced correctly"
    )
    return judged(detail, _findings(meeting, told))


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
    who = "no rank" if told["correct"] == 0 else f"{counted(len(wrong), 'rank')} did not"
    message = (
        "no rank could reduce"
        if told["correct"] == 0
        else f"{who} reduce correctly, on {meeting.hosts(nodes)}"
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
        "reason.",
        about="reduction",
    )

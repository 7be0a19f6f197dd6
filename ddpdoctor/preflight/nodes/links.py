"""Whether every node can open a connection to every other."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged
from ddpdoctor.preflight.nodes.firewall import let_through
from ddpdoctor.preflight.nodes.judging import (
    LIMIT,
    Blame,
    Way,
    all_ways,
    bad_ways,
    blame,
    counted,
    judge,
    reached_at,
)
from ddpdoctor.preflight.protocol.addresses import gloo_dials
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.protocol.pairs import STALLS
from ddpdoctor.preflight.situation import Situation

CODE = "DDP053"
MOST_WAYS = 6

UNUSED = "gloo dials the other way round, from the higher address; NCCL would need this one"

SILENT_FIX = (
    "The port is open, so look for what stands in between (a proxy, a load balancer), and whether "
    "the machine is overloaded. The way to it, from the dialling node:"
)

_WORDS = {
    "dropped": "the packets are silently dropped",
    "refused": "the port is refused, though it is open there",
    "unreachable": "it is rejected on the way",
    "nobody": "no machine answers at that address",
    "silent": "the connection opens, and then nothing comes",
    "stranger": "something else answers there",
}


@check("links", CODE, scope="nodes", limit=LIMIT)
def links(situation: Situation) -> Outcome:
    """A node cannot open a connection to another, in one direction or in both.

    What it finds
        Every node dials every other, both ways round, on a port of the kernel's choice, as gloo and
        NCCL do. What failed is tried once more. A node that nobody reaches, or that reaches nobody,
        is named as a node; a single way that fails is named with its direction.

    Why it is bad
        gloo and NCCL do not use the rendezvous port: every rank listens on ports of the kernel's
        choice (32768 and up), and of two nodes the one with the higher address dials. A firewall
        that closes those ports leaves the listening side waiting without a limit; measured: 40
        minutes of silence.

    How to fix it
        Let the nodes of a job reach each other on all TCP ports: a rule for the addresses of the
        nodes in the firewall of the node that is named, or in the network's security group.

    Example
        Wrong: a security group that opens port 29500 alone.
        Right: one that lets its members reach each other on every port.

    When it stays silent
        When every ordered pair of nodes exchanged 64 KiB; where the packets were too large for the
        way, DDP054 tells it. It is a warning only where no node has a GPU and gloo does not dial
        that way round.

    Since
        0.1.0
    """
    return judge(situation, _judge)


def _judge(meeting: Meeting) -> Outcome:
    failed = {
        way: result for way, result in bad_ways(meeting, "route") if result["outcome"] not in STALLS
    }
    ways = all_ways(meeting)
    good = len([way for way in ways if way not in failed])
    detail = f"{good} of {meeting.expected * (meeting.expected - 1)} ways between nodes are open"
    return judged(detail, _findings(meeting, failed, ways))


def _findings(
    meeting: Meeting, failed: dict[Way, dict[str, object]], ways: list[Way]
) -> Iterator[Finding]:
    blames = blame(failed, ways)
    single = [each for each in blames if each.kind in ("way", "between")]
    for each in blames:
        if each in single[MOST_WAYS:]:
            continue
        outcome = str(failed[each.ways[0]]["outcome"])
        words, closed = _WORDS.get(outcome, "it fails"), outcome not in ("silent", "stranger")
        used = any(_is_used(meeting, way) for way in each.ways)
        evidence = tuple(_evidence(meeting, each, failed, ways))
        yield Finding(
            CODE,
            Severity.ERROR if used else Severity.WARNING,
            f"{_message(meeting, each, failed)}: {words}",
            evidence=evidence if used else (*evidence, UNUSED),
            fix=_fix(meeting, each) if closed else SILENT_FIX,
            paste=_paste(meeting, each)
            if closed
            else f"ip route get {reached_at(meeting, each.ways[0][1])}",
            about=f"{each.kind} {each.ways[0]}",
        )
    if len(single) > MOST_WAYS:
        yield Finding(
            CODE,
            Severity.ERROR,
            f"{len(single) - MOST_WAYS} more ways between nodes are closed",
            evidence=tuple(
                f"{meeting.name(each.ways[0][0])} to {meeting.name(each.node)}"
                for each in single[MOST_WAYS : MOST_WAYS + 16]
            ),
            fix="Let the nodes of the job reach each other on all TCP ports. For the first of "
            f"these, on {meeting.nodes[single[MOST_WAYS].node].facts.host}:",
            paste=_paste(meeting, single[MOST_WAYS]),
            about="more ways",
        )


def _is_used(meeting: Meeting, way: Way) -> bool:
    """Whether a job needs a connection that way round: gloo dials one way alone, NCCL both."""
    if any(node.facts.gpus for node in meeting.nodes):
        return True
    source, target = (meeting.nodes[index].facts for index in way)
    return gloo_dials(source.gloo_address, target.gloo_address)


def _message(meeting: Meeting, each: Blame, failed: dict[Way, dict[str, object]]) -> str:
    node = meeting.name(each.node)
    if each.kind == "both":
        return f"{node} reaches no other node, and none reaches it"
    if each.kind == "into":
        return f"no other node can open a connection to {node}"
    if each.kind == "out of":
        return f"{node} can open a connection to no other node"
    if each.kind == "between":
        other = meeting.name(each.ways[0][0])
        return f"{other} and {node} cannot open connections to each other"
    return f"{meeting.name(each.ways[0][0])} cannot open a connection to {node}"


def _evidence(
    meeting: Meeting, each: Blame, failed: dict[Way, dict[str, object]], ways: list[Way]
) -> Iterator[str]:
    source, target = each.ways[0]
    result = failed[source, target]
    port = meeting.nodes[target].facts.pair_port
    error = f" ({result['error']})" if result.get("error") else ""
    yield (
        f"{meeting.nodes[source].facts.host} dialled {reached_at(meeting, target)}, port {port}, "
        f"twice: {result['outcome']} after {float(str(result.get('seconds', 0))):.1f} s{error}"
    )
    back = (target, source)
    if each.kind == "way" and back in ways:
        state = "closed as well" if back in failed else "open"
        yield f"the way back, from {meeting.nodes[target].facts.host}, is {state}"
    if each.kind == "way" and len(meeting.nodes) > 2:
        into = [way for way in ways if way[1] == target and way not in failed]
        if into:
            yield f"{counted(len(into), 'other node')} can: {meeting.hosts([i for i, _ in into])}"


def _fix(meeting: Meeting, each: Blame) -> str:
    host = meeting.nodes[each.node].facts.host
    if each.kind == "out of":
        return (
            f"Let {host} out: its own firewall, or its security group, stops connections to the "
            "other nodes' ports 32768 and up."
        )
    if each.kind == "both":
        return f"Look at the network of {host}: its interface, its firewall, its security group."
    if each.kind == "between":
        host = f"{meeting.nodes[each.ways[0][0]].facts.host} and {host}"
        return (
            f"Open {host} for each other on all TCP ports, in their firewalls or their security "
            f"group. On {meeting.nodes[each.node].facts.host}, and the like on the other:"
        )
    return (
        f"Open {host} for the other nodes on all TCP ports, in its firewall or its security "
        f"group. On {host}:"
    )


def _paste(meeting: Meeting, each: Blame) -> str:
    if each.kind == "out of":
        peers = sorted({way[1] for way in each.ways})
        return let_through("OUTPUT", "-d", [reached_at(meeting, peer) for peer in peers[:16]])
    peers = sorted({i if j == each.node else j for i, j in each.ways})
    return let_through("INPUT", "-s", [reached_at(meeting, peer) for peer in peers[:16]])

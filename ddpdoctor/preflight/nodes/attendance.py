"""Whether all nodes come together at the rendezvous endpoint."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, judged
from ddpdoctor.preflight.meeting.caller import Problem
from ddpdoctor.preflight.meeting.meet import Meeting, meeting_of
from ddpdoctor.preflight.nodes.judging import LIMIT, counted
from ddpdoctor.preflight.situation import Situation

CODE = "DDP050"


@check("nodes", CODE, scope="nodes", limit=LIMIT)
def attendance(situation: Situation) -> Outcome:
    """A node does not come to the rendezvous endpoint, or cannot reach it.

    What it finds
        A node that is absent half a minute after the check began on node 0, by its rank and, under
        Slurm, by its name. On a node that cannot reach the endpoint: why not, whether the name is
        unknown, the port closed, the packets dropped, or something else answers there. A node with
        another rendezvous id, one too many, or one that went away in the middle.

    Why it is bad
        torchrun waits for the nodes in silence, for 10 minutes and more, on those nodes that did
        everything right.

    How to fix it
        Start the same command on every node. Where the endpoint cannot be reached, the check on
        that node has a line to type: a name for /etc/hosts, or a port to open.

    Example
        Wrong: `ddpdoctor check --nnodes 2 --rdzv-endpoint node0:29500` on node 0 alone.
        Right: the same on node 1 as well, with its own `--node-rank`.

    When it stays silent
        When as many nodes came as `--nnodes` says.

    Since
        0.1.0
    """
    meeting = meeting_of(situation)
    if meeting.problem is not None:
        return judged(
            f"not connected to {meeting.seat.host}:{meeting.seat.port}",
            [_own_problem(meeting, meeting.problem, situation)],
        )
    here = sum(not node.lost for node in meeting.nodes)
    seconds = meeting.blob["phases"].get("gather", 0.0)
    detail = f"{here} of {meeting.expected} nodes are here"
    return judged(detail, [*_absent(meeting, seconds), *_others(meeting)])


def _absent(meeting: Meeting, seconds: float) -> Iterator[Finding]:
    missing = meeting.expected - len(meeting.nodes)
    if missing <= len(meeting.blob["strangers"]):
        return
    ranks = [node.facts.rank for node in meeting.nodes]
    known = {rank for rank in ranks if rank is not None}
    names = [meeting.seat.name(rank) for rank in range(meeting.expected) if rank not in known]
    if None in ranks or len(names) != missing:
        who = f"{missing} of {counted(meeting.expected, 'node')}"
        if len(names) < 9 and None not in ranks:
            who += f" ({', '.join(names)})"
    else:
        who = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    evidence = [f"here: {meeting.hosts(list(range(len(meeting.nodes))))}"]
    if meeting.foreign:
        evidence.append(
            f"the others look for node rank 0 at {meeting.seat.host} "
            f"({', '.join(meeting.foreign)}), which is no address of this machine"
        )
    yield Finding(
        CODE,
        Severity.ERROR,
        f"{who} did not come within {seconds:.0f} s",
        evidence=tuple(evidence),
        fix="Start the same command there. If it runs there already, it says itself why it does "
        f"not reach {meeting.seat.host}:{meeting.seat.port}.",
        about="absent",
    )


def _others(meeting: Meeting) -> Iterator[Finding]:
    for stranger in meeting.blob["strangers"]:
        yield Finding(
            CODE,
            Severity.ERROR,
            f"{stranger['host']} ({stranger['address']}) came with another rendezvous id",
            fix="Give --rdzv-id the same value on every node, or leave it out on all of them.",
            about=f"stranger {stranger['address']}",
        )
    for extra in meeting.blob["surplus"]:
        yield Finding(
            CODE,
            Severity.ERROR,
            f"{extra['host']} ({extra['address']}) came as well, when all "
            f"{counted(meeting.expected, 'node')} were here",
            fix="Raise --nnodes on every node, or leave that one out.",
            about=f"surplus {extra['address']}",
        )
    for index, node in enumerate(meeting.nodes):
        if node.lost:
            yield Finding(
                CODE,
                Severity.ERROR,
                f"{meeting.name(index)} went away during {node.lost}",
                fix="Look what its own check says, and whether it was interrupted.",
                about=f"lost {index}",
            )


def _own_problem(meeting: Meeting, problem: Problem, situation: Situation) -> Finding:
    host, port = meeting.seat.host, meeting.seat.port
    where = f"{host}:{port}"
    at = f"{where} ({problem.address})" if problem.address not in ("", host) else where
    waited = min(30.0, situation.options.timeout / 2)
    open_port = f"sudo iptables -I INPUT -p tcp --dport {port} -j ACCEPT"

    def finding(message: str, fix: str, paste: str = "", *evidence: str) -> Finding:
        return Finding(
            CODE, Severity.ERROR, message, evidence=evidence, fix=fix, paste=paste, about="own"
        )

    if not host:
        return finding(
            "nobody said where the nodes meet",
            "Name node 0 and a free port of it, the same on every node.",
            "--rdzv-endpoint HOST:29500",
        )
    if meeting.holder:
        return finding(
            f"port {port} cannot be listened on here: {problem.words}",
            "Node rank 0 needs it: end what holds the port, or choose another one in "
            "--rdzv-endpoint on every node.",
            f"ss -tlnp 'sport = :{port}'",
        )
    if problem.kind == "unresolved":
        return finding(
            f"the name {host} is not known on this node",
            "Let --rdzv-endpoint be the address of node 0, or make the name known here.",
            f"echo '<address of {host}> {host}' | sudo tee -a /etc/hosts",
        )
    if problem.kind == "refused":
        return finding(
            f"{at} refuses connections: within {waited:.0f} s nobody listened there",
            f"Start the same command on node 0. If it runs there, a firewall rejects the port: "
            f"open it on {host}.",
            open_port,
        )
    if problem.kind == "dropped":
        return finding(
            f"{at} does not answer: packets to that port are dropped without a word",
            f"Open TCP port {port} in the firewall of {host}, or of the network (a security "
            "group).",
            open_port,
        )
    if problem.kind == "unreachable":
        return finding(
            f"{at} cannot be reached: {problem.words or 'no route'}",
            f"A router or a firewall on the way rejects it, or there is no route. Open TCP port "
            f"{port} on {host}, or choose an endpoint in a network that both have.",
            open_port,
            f"the route from here: ip route get {problem.address}",
        )
    if problem.kind == "nobody":
        return finding(
            f"no machine answers at {problem.address}, the address of {host} on this node",
            "Check the address: an old line in /etc/hosts, or a machine that is down.",
            f"getent ahosts {host}",
        )
    if problem.kind in ("silent", "other service"):
        return finding(
            f"something else answers at {at}: it is no `ddpdoctor check`",
            f"End what holds port {port} on {host} (a job that still runs?), or choose another "
            "port in --rdzv-endpoint on every node.",
            f"ss -tlnp 'sport = :{port}'",
        )
    if problem.kind == "other id":
        return finding(
            f"the check at {at} has another rendezvous id than {meeting.seat.rdzv_id!r}",
            "Give --rdzv-id the same value on every node, or leave it out on all of them.",
        )
    if problem.kind in ("late", "full"):
        late = problem.kind == "late"
        return finding(
            f"the check at {at} went on without this node"
            if late
            else f"the check at {at} had all its nodes already",
            "Start it on all nodes at about the same time."
            if late
            else "Give --nnodes the number of all nodes, on each of them.",
            "",
            problem.words,
        )
    return finding(
        f"the connection to node 0 at {where} was lost: {problem.words}",
        "See what the check on node 0 says; it may have been interrupted.",
    )

"""Which nodes met at the rendezvous endpoint, why others did not, and which are unfit for a job."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, repeat
from typing import Any

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count, listed
from ddpdoctor.preflight.check import (
    Outcome,
    Status,
    check,
    could_not_run,
    failure,
    finding,
    judged,
    note,
    typed,
)
from ddpdoctor.preflight.command_lines import (
    NO_ID,
    check_line,
    let_through,
    line_on_node_0,
    meeting_point,
    open_port,
    run_line,
    words,
)
from ddpdoctor.preflight.machine import network, own_address
from ddpdoctor.preflight.nodes.reductions import across_nodes
from ddpdoctor.preflight.protocol.joining import Problem
from ddpdoctor.preflight.protocol.meet import DOUBLE_ADDRESS, LOCAL_TIMEOUT, Meeting, meeting_of
from ddpdoctor.preflight.protocol.messages import Caller, Said, Verdict
from ddpdoctor.preflight.selftest.collectives import LIMIT
from ddpdoctor.preflight.situation import ATTENDANCE, Situation, node_place

# -- why this node did not meet the others


CLOSED = {
    "dropped": "the packets are silently dropped",
    "refused": "it is refused, though it is open there",
    "prohibited": "a firewall rejects it",
    "unreachable": "it is rejected on the way",
}
"""How a rendezvous port is closed, by the problem that a blocked node reports."""


def own_problem(meeting: Meeting, problem: Problem, situation: Situation) -> Finding:
    """Return the finding of a node that did not meet the others."""
    place, nproc = meeting.place, situation.nproc
    host, port, where = place.host, place.port, place.endpoint
    at, again = _at(meeting, problem), check_line(place, nproc)
    holds_port = typed("ss -tlnp {}", f"sport = :{port}")
    if not host:
        fix, paste = meeting_point(place, situation)
        return _unreached("no rendezvous endpoint is given (--rdzv-endpoint)", fix, paste)
    if problem.kind == "other id":
        # No line to paste omits the id: without one the meeting is open to anybody.
        return _unreached(
            f"the check at {at} is of another job: it has another rendezvous id",
            "If it is this job, give --rdzv-id the same value on every node. Otherwise choose "
            "another port, on every node; here:",
            check_line(place, nproc, port=port + 1 if port < 65535 else port - 1),
            f"the rendezvous id here is {place.rdzv_id!r}",
        )
    if meeting.holder:
        held = _unreached(
            f"port {port} cannot be listened on here: {problem.words}",
            "Node rank 0 needs it: stop what holds the port, or choose another one in "
            "--rdzv-endpoint on every node.",
            holds_port,
        )
        return replace(held, subjects=frozenset({relations.PORT}))
    if problem.kind in ("refused", "dropped", "prohibited", "unreachable", "no route", "no host"):
        nothing = f"within {problem.waited:.0f} s nothing listened there"
        if network.is_local(host):
            fix, paste = meeting_point(place, situation)
            return _unreached(
                f"node 0 is not at {where}: on every node that is the node itself",
                fix,
                paste,
                nothing,
            )
        other = own_address.shared_address(situation)
        shared = frozenset() if other is None else frozenset({f"address {other.address}"})
        if meeting.own_endpoint:
            not_here = _unreached(
                f"the endpoint {where} is this machine, which is node rank {place.rank}: node rank "
                "0 is not here",
                "Name the machine of node rank 0 in --rdzv-endpoint, on every node. There, this "
                "starts the check:",
                line_on_node_0(place, nproc),
                nothing,
            )
            return replace(not_here, subjects=shared)
        closed = _on_this_side(meeting, problem, situation)
        closed = closed or _closed_port(meeting, problem, situation)
        return replace(closed, subjects=shared | {relations.NO_NETWORK})
    if problem.kind == "unresolved":
        return _unreached(
            f"the name {host} does not resolve on this node",
            "If the name is right, add it to /etc/hosts here: typed on that machine, this prints "
            "the line. Or give its address in --rdzv-endpoint, on every node.",
            typed('echo "$(hostname -I | cut -d " " -f 1)" {}', host),
            problem.words,
        )
    if problem.kind == "no files":
        return _unreached(
            f"this node may open no more files: the connection to {at} could not be tested",
            "Raise the limit in the shell that starts the check and the job, here:",
            "ulimit -n 65536",
            problem.words,
        )
    if problem.kind == "silent":
        return _unreached(
            f"a program takes the connection at {at} and says nothing",
            f"Look at {host}: another program that holds port {port} (a job that still runs?), or "
            "a check that may open no more files or gets no CPU. There:",
            typed("ss -tlnp {}; ulimit -n", f"sport = :{port}"),
        )
    if problem.kind == "other service":
        return _unreached(
            f"another program answers at {at}, not `ddpdoctor check`",
            f"Stop what holds port {port} on {host} (a job that still runs?), or choose another "
            "port in --rdzv-endpoint on every node.",
            holds_port,
            problem.words,
        )
    if problem.kind == "late":
        return _unreached(
            f"the check at {at} went on without this node",
            "Start it on all nodes at about the same time.",
            again,
            problem.words,
        )
    if problem.kind == "full" and situation.hostname in problem.here:
        return _unreached(
            f"the check at {at} runs already, with {situation.hostname} among its nodes",
            "If it was started here a second time, wait for the first, or start it again on all "
            "nodes. If two nodes share this host name, give each its own. Then here:",
            again,
            problem.words,
        )
    if problem.kind == "full":
        return _unreached(
            f"the check at {at} had all its nodes already",
            "Give --nnodes the number of all nodes, on each of them:",
            check_line(place, nproc, nnodes=place.nnodes + 1),
            problem.words,
        )
    return _unreached(
        f"the connection to node 0 at {where} was lost: {problem.words}",
        "See what the check on node 0 says; it may have been interrupted. Then start it again:",
        again,
    )


def _at_spare(meeting: Meeting, problem: Problem) -> str:
    if problem.by_udp:
        return f"the check runs there: it answers at port {meeting.place.port} by UDP"
    return f"the check runs there: it answers at port {problem.spare}" if problem.spare else ""


def _on_this_side(meeting: Meeting, problem: Problem, situation: Situation) -> Finding | None:
    """Return the finding if neither node 0 nor its firewall is in the way."""
    at, port, spare = _at(meeting, problem), meeting.place.port, _at_spare(meeting, problem)
    down = _own_link_down(situation, problem)
    if down is not None:
        state = "has no carrier" if down.unplugged else "is down"
        fix, paste = network.bring_up(down)
        return _unreached(
            f"{at} cannot be reached: the interface {down.name} of this machine {state}", fix, paste
        )
    if problem.unheard:
        return _unreached(
            f"{at} hears this machine, but what it sends back does not arrive here",
            "A firewall of this machine, or on the way to it, drops it. Let in TCP from there:",
            let_through("INPUT", "-s", [problem.address]),
            spare,
        )
    if problem.behind:
        return _unreached(
            f"{at} is not the machine of node 0, but leads to it for other ports: {problem.behind}",
            f"An address is translated on the way (NAT, a load balancer, a container): forward TCP "
            f"port {port} as well, or name an address of node 0 itself in --rdzv-endpoint, on "
            "every node. gloo and NCCL need that in any case. Here:",
            check_line(meeting.place, situation.nproc, host=problem.behind),
            spare,
        )
    return None


def _closed_port(meeting: Meeting, problem: Problem, situation: Situation) -> Finding:
    """Return the finding that there is no connection to the endpoint."""
    host, port = meeting.place.host, meeting.place.port
    at = _at(meeting, problem)
    opened = open_port(port, problem.address or host)
    spare = _at_spare(meeting, problem)
    sender = f"{problem.sender} rejects it by ICMP" if problem.sender else ""
    in_firewall = f"Open TCP port {port} in the firewall of {host}, or of the network (a security "
    in_firewall += f"group). On {host}:"
    if problem.kind == "refused" and spare:
        return _unreached(
            f"{at} refuses connections, though the check listens there: a firewall rejects it",
            in_firewall,
            opened,
            spare,
            sender,
        )
    if problem.kind == "refused":
        return _unreached(
            f"{at} refuses connections: within {problem.waited:.0f} s nothing listened there",
            "Start the same command on node 0. If it runs there, a firewall rejects the port: open "
            f"it on {host}:",
            opened,
            sender,
        )
    if problem.kind == "dropped":
        other = own_address.shared_address(situation)
        if other is not None:
            return _unreached(
                f"{at} does not answer: another machine has this machine's address, "
                f"{other.address}, and gets what is sent to it",
                own_address.SHARED_ADDRESS_FIX,
                typed(own_address.SHARED_ADDRESS_PASTE, other.interface),
                str(other),
            )
        up = f"the machine is up: it answers at port {problem.answering}"
        if spare or problem.answering:
            what = "packets to that port are silently dropped"
            return _unreached(f"{at} does not answer: {what}", in_firewall, opened, spare or up)
        everywhere = f"{at} does not answer, at no port that was tried"
        everywhere += ": packets are silently dropped"
        if problem.echoes:
            return _unreached(
                everywhere, in_firewall, opened, "the machine is up: it answers a ping"
            )
        return _unreached(
            everywhere,
            f"See whether {host} is up and has that address. If it is, open TCP port {port} in its "
            "firewall, or in the network's (a security group). There:",
            opened,
        )
    if problem.kind == "no host":
        return _unreached(
            f"no machine answers at {problem.address}"
            + (f", the address of {host} on this node" if problem.address != host else ""),
            "Check the address: an old line in /etc/hosts, or a machine that is down or unplugged.",
            typed("getent ahosts {}", host),
        )
    if problem.kind == "no route":
        return _unreached(
            f"{at} cannot be reached: {problem.words}",
            "This machine has no route to it: name an endpoint in a network that both share.",
            typed("ip route get {}", problem.address),
        )
    if problem.kind == "prohibited":
        return _unreached(
            f"{at} cannot be reached: a firewall rejects it ({problem.words})",
            in_firewall,
            opened,
            sender or "it is rejected on this machine: see its routes and its outgoing rules",
            spare,
        )
    return _unreached(
        f"{at} cannot be reached: {problem.words}",
        f"A router or a firewall on the way rejects it, or {host} is down. Open TCP port {port} on "
        f"{host}, or choose an endpoint in a network that both have.",
        opened,
        sender,
        spare,
        f"the route from here: ip route get {problem.address}",
    )


def _own_link_down(situation: Situation, problem: Problem) -> network.Interface | None:
    """Return an interface that is down, if this machine has no other one to reach node 0 by."""
    if problem.kind == "refused":
        return None
    here = [
        each
        for each in situation.shared(network.interfaces)
        if not each.loopback and not each.virtual
    ]
    near = [each for each in here if each.is_towards(problem.address)]
    by = network.towards(problem.address, here)
    if near:
        return None if any(each.running for each in near) else near[0]
    if by is None and not any(each.outward for each in here):
        by = next((each for each in here if each.addresses and not each.running), None)
    return None if by is None or by.running else by


def _at(meeting: Meeting, problem: Problem) -> str:
    where = meeting.place.endpoint
    named = problem.address not in ("", meeting.place.host)
    return f"{where} ({problem.address})" if named else where


def _unreached(message: str, fix: str, paste: str, *evidence: str) -> Finding:
    return failure(
        message, evidence=tuple(filter(None, evidence)), fix=fix, paste=paste, about="own"
    )


# -- attendance


@check(
    "nodes",
    "DDP050",
    scope="nodes",
    limit=LIMIT,
    yields_to={
        "DDP002": relations.same_subject,
        "DDP004": relations.same_subject,
        "DDP018": relations.same_subject,
        "DDP053": relations.same_subject,
        "DDP051": relations.of_these("nnodes", ("absent", "surplus")),
    },
)
def attendance(situation: Situation) -> Outcome:
    """A node is missing at the rendezvous endpoint, or cannot reach it.

    What it finds
        A node that is missing half a minute after the check began on node 0, by its rank and, under
        Slurm, by its name. On a node that cannot reach the endpoint, the reason: unknown name,
        closed port, dropped packets, or another service at that port. This is reported within ten
        seconds, unless node 0 may simply start later. An endpoint that is not set or is on
        localhost. A node rank 0 that is not where the endpoint points. A node with a different
        rendezvous id, one node too many, or a node that left in the middle, with what it or node 0
        knows of the reason. A node that does not get through by TCP tells node 0 why by UDP.

    Why it is bad
        torchrun waits silently for 10 minutes or more, on the nodes that did everything right.

    How to fix it
        Start the same command on every node. If the endpoint cannot be reached, the check on that
        node prints a line to paste: a name for /etc/hosts, or a port to open.

    Example
        Wrong: `ddpdoctor check --nnodes 2 --rdzv-endpoint node0:29500` on node 0 only.
        Right: the same command on node 1 as well, with its `--node-rank`.

    When it stays silent
        If as many nodes came as `--nnodes` says.
    """
    meeting = meeting_of(situation)
    if meeting.problem is not None and meeting.problem.kind == "time":
        return could_not_run(unfinished(situation.options.timeout, meeting.took))
    if meeting.problem is not None:
        return judged(
            f"not connected to {meeting.place.endpoint}",
            [own_problem(meeting, meeting.problem, situation)],
        )
    if late := [index for index, node in enumerate(meeting.nodes) if node.late]:
        node = meeting.nodes[late[0]]
        return could_not_run(
            f"{meeting.hosts(late)} could not finish {node.lost} in time ({node.why}): give it "
            "more with --timeout"
        )
    here = sum(not node.lost for node in meeting.nodes)
    detail = f"{here} of {meeting.expected} nodes are here"
    names = meeting.place.names
    return judged(
        "; ".join([detail, *_rejected_calls(meeting)]),
        [*_absent(meeting, situation), *_caller_findings(meeting, situation)],
        # As far as the names of absent nodes are known.
        exclude=[
            *(names[rank] for rank in _absent_ranks(meeting) or () if rank < len(names)),
            *(node.facts.host for node in meeting.nodes if node.lost),
            *(each.host for each in meeting.report.blocked if each.host),
        ],
    )


def unfinished(seconds: float, took: Mapping[str, float]) -> str:
    """Say that the time ran out, and what took most of it."""
    slowest = sorted(took.items(), key=lambda each: -each[1])[:3]
    what = listed([f"{stage} {spent:.0f} s" for stage, spent in slowest if spent >= 1])
    took_most = f" (it took: {what})" if what else ""
    return (
        f"could not finish within {seconds:.0f} s{took_most}: give the nodes more time with "
        "--timeout"
    )


def _rejected_calls(meeting: Meeting) -> list[str]:
    """Return a line about callers without the rendezvous id. They change no verdict."""
    calls, rejected = meeting.report.rejected_calls, meeting.report.rejected
    if not rejected:
        return []
    who = listed([f"{each.host} {each.address}".strip() for each in rejected], 3)
    were = "was" if calls == 1 else "were"
    return [f"{count(calls, 'call')} with another rendezvous id, or none, {were} rejected: {who}"]


def _absent(meeting: Meeting, situation: Situation) -> Iterator[Finding]:
    seconds = meeting.report.gathered
    missing = meeting.expected - len(meeting.nodes) - len(meeting.report.blocked)
    if missing <= 0:
        return
    absent = _absent_ranks(meeting)
    if absent is None or len(absent) != missing:
        who = f"{missing} of {count(meeting.expected, 'node')}"
        if absent is not None and len(absent) < 9:
            who += f" ({', '.join(map(meeting.place.name, absent))})"
    else:
        who = listed([*map(meeting.place.name, absent)])
    absence = f"{who} did not come within {seconds:.0f} s"
    if others := sorted({each.host for each in meeting.report.rejected if each.host}):
        absence += f"; {listed(others, 3)} came with another rendezvous id"
    here = f"here: {meeting.hosts(list(range(len(meeting.nodes))))}"
    seen = (here, *_rejected_calls(meeting))
    if meeting.foreign and len(meeting.nodes) == 1:
        yield _elsewhere(meeting, situation, absence)
        return
    if network.is_local(meeting.place.host):
        fix, paste = meeting_point(meeting.place, situation)
        yield failure(
            f"{absence}: on every node, {meeting.place.endpoint} is that node itself",
            evidence=(*seen, f"nodes that share this machine have {LOCAL_TIMEOUT:.0f} s to come"),
            fix=fix,
            paste=paste,
            about="absent",
        )
        return
    doubled = _doubled(meeting, situation, absence, seen)
    if doubled is not None:
        yield doubled
        return
    numbers = sorted({node.facts.nnodes for node in meeting.nodes})
    severity = Severity.ERROR
    if len(numbers) > 1:
        # It was not waited for: all nodes have to be started again anyway.
        severity = Severity.WARNING
        absence = f"{who} had not come after {seconds:.0f} s, and was not waited for longer"
        fix = f"Give --nnodes the number of all nodes, on each of them; it is {numbers[0]} on some "
        fix += f"and {numbers[-1]} on others. If that one is missing, start there:"
    else:
        fix = "Start the same command there. If it already runs, its own output says why it does "
        fix += f"not reach {meeting.place.endpoint}. On that node:"
    yield finding(
        severity,
        absence,
        evidence=seen,
        fix=fix,
        paste=check_line(
            meeting.place,
            situation.nproc,
            nnodes=meeting.expected,
            rank=absent[0] if absent else None,
        ),
        about="absent",
        nodes=tuple(meeting.place.names[rank] for rank in absent or () if meeting.place.names),
        # Without a network here, no node can come.
        subjects=frozenset({relations.NO_NETWORK} if len(meeting.nodes) == 1 else ()),
    )


def _doubled(
    meeting: Meeting, situation: Situation, absence: str, seen: tuple[str, ...]
) -> Finding | None:
    """Return the finding that a node is absent while another one shares its address."""
    shared = [
        index
        for index, each in enumerate(meeting.report.verdicts)
        if any(said.code == "DDP018" for said in each.findings)
    ]
    if not shared:
        return None
    # What is sent to one of them arrives at the other.
    other = own_address.shared_address(situation) if meeting.own in shared else None
    addresses = {meeting.nodes[index].address for index in shared}
    addresses |= set() if other is None else {other.address}
    return failure(
        f"{absence}; another machine has the address of {meeting.hosts(shared)} as well",
        evidence=seen,
        fix="Give each machine its own address, and start the check on all nodes. What that one "
        "has:",
        paste=network.ADDRESSES,
        about="absent",
        nodes=tuple(map(meeting.host, shared)),
        subjects=frozenset(f"address {each}" for each in addresses),
    )


def _elsewhere(meeting: Meeting, situation: Situation, absence: str) -> Finding:
    """Return the finding that the endpoint names another machine than node rank 0."""
    host = meeting.place.host
    addresses = [address for address in meeting.foreign if address != host]
    at = f"{host} ({', '.join(addresses)})" if addresses else host
    return failure(
        f"the other nodes look for node rank 0 at {at}, which is not an address of this machine",
        evidence=(absence,),
        fix=f"Start node rank 0 on {host}, or name this machine in --rdzv-endpoint, on every node. "
        "Here:",
        paste=check_line(meeting.place, situation.nproc, host=network.own_host(situation)),
        about="absent",
        nodes=(situation.hostname,),
    )


def _absent_ranks(meeting: Meeting) -> list[int] | None:
    """Return the node ranks with which no node came; None if some came without one."""
    ranks = [node.facts.rank for node in meeting.nodes]
    ranks += [each.rank for each in meeting.report.blocked]
    if None in ranks:
        return None
    return [rank for rank in range(meeting.expected) if rank not in ranks]


def _caller_findings(meeting: Meeting, situation: Situation) -> Iterator[Finding]:
    blocked = meeting.report.blocked
    for kind in dict.fromkeys(each.kind for each in blocked):
        alike = [each for each in blocked if each.kind == kind]
        own = meeting.nodes[0].address
        if network.is_loopback(own):
            # No other node came that could report the address at which it reaches this one.
            towards_it = network.best(situation.shared(network.interfaces), alike[0].address)
            own = towards_it.addresses[0] if towards_it else alike[0].address
        yield _blocked(meeting, kind, alike, own)
    lost = {node.facts.host for node in meeting.nodes if node.lost}
    for extra in meeting.report.surplus:
        if extra.host in lost:
            # It went away, as reported below, and was started again too soon.
            continue
        yield failure(
            f"{extra.host} ({extra.address}) came when all "
            f"{count(meeting.expected, 'node')} were already here",
            fix="Leave that one out, or raise --nnodes on every node. Here:",
            paste=check_line(meeting.place, situation.nproc, nnodes=meeting.expected + 1),
            about=f"surplus {extra.address}",
            nodes=(extra.host,),
        )
    for index, node in enumerate(meeting.nodes):
        if node.lost:
            yield failure(
                f"{meeting.name(index)} went away during {node.lost}",
                evidence=(node.why,) if node.why else (),
                fix="See what its own check reports, and whether it was interrupted. Then start "
                "the check again on all nodes; here:",
                paste=check_line(meeting.place, situation.nproc),
                about=f"lost {index}",
                nodes=(node.facts.host,),
                subjects=frozenset({f"address {node.address}"}),
            )


def _blocked(meeting: Meeting, kind: str, callers: Sequence[Caller], node_0: str) -> Finding:
    """Return the finding of nodes that reported why they cannot connect to node 0's address."""
    ranks = ["" if each.rank is None else f"node {each.rank}, " for each in callers]
    who = listed(
        [f"{each.host} ({rank}{each.address})" for each, rank in zip(callers, ranks, strict=True)]
    )
    port, nodes = meeting.place.port, tuple(each.host for each in callers)
    if kind == DOUBLE_ADDRESS:
        message = f"another machine has the address of {who} as well: it cannot connect to node 0"
        fix, paste = own_address.SHARED_ADDRESS_FIX.replace("this one", "it"), network.ADDRESSES
    elif kind == "unanswered":
        message = f"{who} calls port {port} of node 0, and gets no answer: a firewall on its side, "
        message += "or on the way to it, drops what node 0 sends"
        fix = f"Let in TCP from node 0 there. On {callers[0].host}:"
        paste = let_through("INPUT", "-s", [node_0])
    else:
        message = f"{who} cannot connect to port {port} of node 0: "
        message += CLOSED.get(kind, "it is closed")
        fix = f"Open TCP port {port} in the firewall of node 0, or of the network (a security "
        fix += "group). On node 0:"
        paste, nodes = open_port(port, callers[0].address), (meeting.host(0),)
    return failure(
        message,
        evidence=("the check runs there, and reaches node 0 at another port",),
        fix=fix,
        paste=paste,
        about=f"blocked {kind}",
        nodes=nodes,
    )


def open_words(situation: Situation, outcomes: Sequence[Outcome]) -> str:
    """Propose a rendezvous id and say what lacking one means; empty if one was given."""
    here = next((outcome for outcome in outcomes if outcome.check == ATTENDANCE), None)
    if here is None or here.status is Status.COULD_NOT_RUN:
        return ""
    place = node_place(situation)
    if place.rdzv_id != NO_ID or not place.host or network.is_local(place.host):
        return ""
    # Only one node prints an id, because two ids would differ.
    if place.rank == 0 or meeting_of(situation).own == 0:
        give = f"on every node: --rdzv-id {secrets.token_hex(8)}"
    else:
        give = "on every node: the --rdzv-id that node 0 prints"
    return (
        f"no --rdzv-id: whoever reaches port {place.port} of node 0 could take part in this check\n"
        f"to admit only the nodes of this job, {give}"
    )


def next_line(situation: Situation, outcomes: Sequence[Outcome]) -> str:
    """Return the `ddpdoctor run` line for this node; empty unless all nodes reduced together."""
    if any(outcome.status in (Status.FAIL, Status.COULD_NOT_RUN) for outcome in outcomes):
        return ""
    ended = {outcome.check: outcome.status for outcome in outcomes}
    if ended.get(ATTENDANCE) is None or ended.get("gloo-nodes") not in (Status.PASS, Status.WARN):
        # Only a job that reduced between all nodes is known to start.
        return ""
    return run_line(situation, *words(node_place(situation), situation.nproc))


# -- the findings of the other machines, and the nodes to exclude


@across_nodes(
    "verdicts", "DDP062", dict.fromkeys(("DDP050", "DDP053", "DDP055"), relations.same_subject)
)
def verdicts(meeting: Meeting) -> Outcome:
    """What the checks of the other machines found, shown on every node.

    What it finds
        Nothing itself: each node sends the warnings and errors of the checks of its machine
        (DDP001 to DDP026) to node 0, which sends them to all. Each is shown here as information,
        with its node.

    Why it is bad
        A full disk on node 37 ends the job of all nodes, and is printed on node 37 alone.

    How to fix it
        Follow the finding: its line to paste is on the node that has it. Or leave the node out: the
        last line names the nodes that a job has to do without, as `--exclude` of Slurm takes them.

    Example
        Wrong: reading 64 outputs to find the one that says FAIL.
        Right: reading the output of node 0.

    When it stays silent
        If the other machines are healthy. What was found changes the exit status only on the node
        that has the fault.
    """
    known = list(enumerate(meeting.report.verdicts))
    faulty = [index for index, each in known if each.findings]
    detail = f"{meeting.hosts(faulty) or 'no node'} found faults in its own checks"
    if late := [index for index, each in known if each.untested]:
        detail += f"; not all was tested on {meeting.hosts(late)}"
    error = Severity.ERROR.label
    return judged(
        detail,
        _of_others(meeting),
        exclude=[
            meeting.host(index)
            for index, verdict in known
            if any(said.severity == error for said in verdict.findings)
        ],
    )


def _of_others(meeting: Meeting) -> Iterator[Finding]:
    """Report each finding of other machines once, with all nodes that have it."""
    groups: dict[tuple[str, str], dict[int, Said]] = {}
    for index, verdict in enumerate(meeting.report.verdicts):
        for said in verdict.findings if index != meeting.own else ():
            alike = re.sub(r"\d+(\.\d+)?", "#", said.message.replace(meeting.host(index), "@"))
            groups.setdefault((said.code, alike), {}).setdefault(index, said)
    for (code, _), nodes in groups.items():
        said, hosts = next(iter(nodes.values())), tuple(map(meeting.host, nodes))
        named = hosts if code == "DDP003" else ()
        shared = [meeting.nodes[index].address for index in nodes] if code == "DDP018" else []
        yield note(
            f"{meeting.hosts(list(nodes))}: {said.message}",
            evidence=(f"its check {said.check} ({code}): {said.severity}",),
            about=f"{min(nodes)} {code} {said.message}",
            nodes=hosts,
            subjects=frozenset(
                {
                    said.severity,
                    *(f"gloo on {host}" for host in named),
                    *(f"address {address}" for address in shared),
                }
            ),
        )


def excluded_nodes(outcomes: Iterable[Outcome]) -> list[str]:
    """Return the host names of the nodes to exclude from a job, each once."""
    return list(dict.fromkeys(name for outcome in outcomes for name in outcome.exclude))


def verdict_records(situation: Situation, outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """Return every node that came, with its findings, for JSON; empty if none met."""
    if not any(outcome.check == "verdicts" for outcome in outcomes):
        return []
    meeting = meeting_of(situation)
    without = set(excluded_nodes(outcomes))
    verdicts = chain(meeting.report.verdicts, repeat(Verdict()))
    return [
        {
            "host": node.facts.host,
            "node_rank": node.facts.rank,
            "address": node.address,
            "exclude": node.facts.host in without,
            "lost": node.lost or None,
            "untested": list(verdict.untested),
            "findings": [asdict(said) for said in verdict.findings],
        }
        for node, verdict in zip(meeting.nodes, verdicts, strict=False)
    ]

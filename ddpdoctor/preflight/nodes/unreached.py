"""Why this node did not come together with the others: what it saw of the endpoint, and the fix."""

from __future__ import annotations

from dataclasses import replace

from ddpdoctor.core.finding import Finding
from ddpdoctor.preflight.check import failure, typed
from ddpdoctor.preflight.command_lines import check_line, line_on_node_0, meeting_point, open_port
from ddpdoctor.preflight.machine import own_address
from ddpdoctor.preflight.protocol.addresses import is_local
from ddpdoctor.preflight.protocol.caller import Problem
from ddpdoctor.preflight.protocol.meet import Meeting
from ddpdoctor.preflight.situation import Situation

CLOSED = {
    "dropped": "the packets are silently dropped",
    "refused": "it is refused, though it is open there",
    "prohibited": "a firewall rejects it",
    "unreachable": "it is rejected on the way",
}
"""What a node that is blocked reports about the port, by the kind of its problem."""


def own_problem(meeting: Meeting, problem: Problem, situation: Situation) -> Finding:
    """The finding of a node that did not meet the others."""
    host, port = meeting.seat.host, meeting.seat.port
    if not host:
        fix, paste = meeting_point(meeting.seat, situation)
        return _finding("no rendezvous endpoint is given (--rdzv-endpoint)", fix, paste)
    if problem.kind == "other id":
        # No line to paste leaves the id out: without one the meeting is open to anybody.
        return _finding(
            f"the check at {_at(meeting, problem)} is of another job: it has another rendezvous id",
            "If it is this job's, give --rdzv-id the same value on every node. If it is another "
            "one's, choose another port, on every node; here:",
            check_line(replace(meeting.seat, port=_other_port(port)), situation.nproc),
            f"the rendezvous id here is {meeting.seat.rdzv_id!r}",
        )
    if meeting.holder:
        return _finding(
            f"port {port} cannot be listened on here: {problem.words}",
            "Node rank 0 needs it: stop what holds the port, or choose another one in "
            "--rdzv-endpoint on every node.",
            typed("ss -tlnp {}", f"sport = :{port}"),
        )
    if problem.kind in ("refused", "dropped", "prohibited", "unreachable", "no route", "no host"):
        if is_local(host):
            fix, paste = meeting_point(meeting.seat, situation)
            return _finding(
                f"node 0 is not at {meeting.seat.endpoint}: on every node that is the node itself",
                fix,
                paste,
                f"within {problem.waited:.0f} s nothing listened there",
            )
        if meeting.own_endpoint:
            return _finding(
                f"the endpoint {meeting.seat.endpoint} is this machine, which is node rank "
                f"{meeting.seat.rank}: node rank 0 is not here",
                "Name the machine of node rank 0 in --rdzv-endpoint, on every node. There, this "
                "starts the check:",
                line_on_node_0(meeting.seat, situation.nproc),
                f"within {problem.waited:.0f} s nothing listened there",
            )
        return _closed(meeting, problem, situation)
    where = meeting.seat.endpoint
    at = _at(meeting, problem)
    again = check_line(meeting.seat, situation.nproc)
    if problem.kind == "unresolved":
        return _finding(
            f"the name {host} does not resolve on this node",
            "If the name is right, add it to /etc/hosts here: typed on that machine, this prints "
            "the line. Or give its address in --rdzv-endpoint, on every node.",
            typed('echo "$(hostname -I | cut -d " " -f 1)" {}', host),
            problem.words,
        )
    if problem.kind == "no files":
        return _finding(
            f"this node may open no more files: the connection to {at} could not be tested",
            "Raise the limit in the shell that starts the check and the job, here:",
            "ulimit -n 65536",
            problem.words,
        )
    if problem.kind == "silent":
        return _finding(
            f"a program takes the connection at {at} and says nothing",
            f"Look at {host}: another program that holds port {port} (a job that still runs?), or "
            "a check that may open no more files or gets no CPU. There:",
            typed("ss -tlnp {}; ulimit -n", f"sport = :{port}"),
        )
    if problem.kind == "other service":
        return _finding(
            f"another program answers at {at}, not `ddpdoctor check`",
            f"Stop what holds port {port} on {host} (a job that still runs?), or choose another "
            "port in --rdzv-endpoint on every node.",
            typed("ss -tlnp {}", f"sport = :{port}"),
        )
    if problem.kind == "late":
        return _finding(
            f"the check at {at} went on without this node",
            "Start it on all nodes at about the same time.",
            again,
            problem.words,
        )
    if problem.kind == "full" and situation.hostname in problem.here:
        return _finding(
            f"the check at {at} runs already, with {situation.hostname} among its nodes",
            "If it was started here a second time, wait for the first, or start it again on all "
            "nodes. If two nodes share this host name, give each its own. Then here:",
            again,
            problem.words,
        )
    if problem.kind == "full":
        return _finding(
            f"the check at {at} had all its nodes already",
            "Give --nnodes the number of all nodes, on each of them:",
            check_line(meeting.seat, situation.nproc, nnodes=meeting.seat.nnodes + 1),
            problem.words,
        )
    return _finding(
        f"the connection to node 0 at {where} was lost: {problem.words}",
        "See what the check on node 0 says; it may have been interrupted. Then start it again:",
        again,
    )


def _other_port(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _closed(meeting: Meeting, problem: Problem, situation: Situation) -> Finding:
    """There is no connection to the endpoint."""
    host, port = meeting.seat.host, meeting.seat.port
    at = _at(meeting, problem)
    opened = open_port(port, problem.address or host)
    door = f"the check runs there: it answers at port {problem.door}" if problem.door else ""
    if problem.behind:
        return _finding(
            f"{at} is not the machine of node 0, but leads to it for other ports: {problem.behind}",
            f"An address is translated on the way (NAT, a load balancer, a container): forward TCP "
            f"port {port} as well, or name an address of node 0 itself in --rdzv-endpoint, on "
            "every node. gloo and NCCL need that in any case. Here:",
            check_line(meeting.seat, situation.nproc, host=problem.behind),
            door,
        )
    sender = f"{problem.sender} says so by ICMP" if problem.sender else ""
    in_firewall = f"Open TCP port {port} in the firewall of {host}, or of the network (a security "
    in_firewall += f"group). On {host}:"
    if problem.kind == "refused" and door:
        return _finding(
            f"{at} refuses connections, though the check listens there: a firewall rejects it",
            in_firewall,
            opened,
            door,
            sender,
        )
    if problem.kind == "refused":
        return _finding(
            f"{at} refuses connections: within {problem.waited:.0f} s nothing listened there",
            "Start the same command on node 0. If it runs there, a firewall rejects the port: open "
            f"it on {host}:",
            opened,
            sender,
        )
    if problem.kind == "dropped":
        other = own_address.shared_address(situation)
        if other is not None:
            return _finding(
                f"{at} does not answer: another machine has this machine's address, "
                f"{other.address}, and gets what is sent to it",
                own_address.FIX,
                typed(own_address.PASTE, other.interface),
                str(other),
            )
        up = f"the machine is up: it answers at port {problem.answering}"
        if door or problem.answering:
            what = "packets to that port are silently dropped"
            return _finding(f"{at} does not answer: {what}", in_firewall, opened, door or up)
        everywhere = f"{at} does not answer, at no port that was tried"
        everywhere += ": packets are silently dropped"
        if problem.echoes:
            return _finding(everywhere, in_firewall, opened, "the machine is up: it answers a ping")
        return _finding(
            everywhere,
            f"See whether {host} is up and has that address. If it is, open TCP port {port} in its "
            "firewall, or in the network's (a security group). There:",
            opened,
        )
    if problem.kind == "no host":
        return _finding(
            f"no machine answers at {problem.address}"
            + (f", the address of {host} on this node" if problem.address != host else ""),
            "Check the address: an old line in /etc/hosts, or a machine that is down.",
            typed("getent ahosts {}", host),
        )
    if problem.kind == "no route":
        return _finding(
            f"{at} cannot be reached: {problem.words}",
            "This machine has no route to it: name an endpoint in a network that both have.",
            typed("ip route get {}", problem.address),
        )
    if problem.kind == "prohibited":
        return _finding(
            f"{at} cannot be reached: a firewall rejects it ({problem.words})",
            in_firewall,
            opened,
            sender or "it is rejected on this machine: see its routes and its outgoing rules",
            door,
        )
    return _finding(
        f"{at} cannot be reached: {problem.words}",
        f"A router or a firewall on the way rejects it, or {host} is down. Open TCP port {port} on "
        f"{host}, or choose an endpoint in a network that both have.",
        opened,
        sender,
        door,
        f"the route from here: ip route get {problem.address}",
    )


def _at(meeting: Meeting, problem: Problem) -> str:
    where = meeting.seat.endpoint
    named = problem.address not in ("", meeting.seat.host)
    return f"{where} ({problem.address})" if named else where


def _finding(message: str, fix: str, paste: str, *evidence: str) -> Finding:
    return failure(
        message, evidence=tuple(filter(None, evidence)), fix=fix, paste=paste, about="own"
    )

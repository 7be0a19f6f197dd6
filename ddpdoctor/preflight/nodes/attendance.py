"""Whether all nodes come together at the rendezvous endpoint."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import (
    Outcome,
    Status,
    check,
    could_not_run,
    failure,
    finding,
    judged,
)
from ddpdoctor.preflight.command_lines import (
    NO_ID,
    check_line,
    meeting_point,
    open_port,
    run_line,
    words,
)
from ddpdoctor.preflight.nodes.judging import LIMIT
from ddpdoctor.preflight.nodes.unreached import CLOSED, own_problem
from ddpdoctor.preflight.place import seat
from ddpdoctor.preflight.protocol.addresses import is_local, own_host
from ddpdoctor.preflight.protocol.meet import LOCAL_LIMIT, Meeting, meeting_of
from ddpdoctor.preflight.protocol.report import (
    Caller,
)
from ddpdoctor.preflight.situation import ATTENDANCE, Situation
from ddpdoctor.preflight.words import counted, first


@check("nodes", "DDP050", scope="nodes", limit=LIMIT)
def attendance(situation: Situation) -> Outcome:
    """A node is missing at the rendezvous endpoint, or cannot reach it.

    What it finds
        A node that is missing half a minute after the check began on node 0, by its rank and, under
        Slurm, by its name. On a node that cannot reach the endpoint, the reason: unknown name,
        closed port, dropped packets, or another service at that port. This is reported within ten
        seconds, unless node 0 may simply start later. An endpoint that is not set or is on
        localhost. A node rank 0 that is not where the endpoint points. A node with a different
        rendezvous id, one node too many, or a node that left in the middle, with what it or node 0
        knows of the reason.

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
        seconds = situation.options.timeout
        return could_not_run(
            f"the nodes were not done within {seconds:.0f} s: give them more time with --timeout"
        )
    if meeting.problem is not None:
        return judged(
            f"not connected to {meeting.seat.endpoint}",
            [own_problem(meeting, meeting.problem, situation)],
        )
    here = sum(not node.lost for node in meeting.nodes)
    seconds = meeting.report.gathered
    detail = f"{here} of {meeting.expected} nodes are here"
    detail += "".join(f"; {each}" for each in _uninvited(meeting))
    findings = [*_absent(meeting, seconds, situation), *_others(meeting, situation)]
    return judged(detail, findings, exclude=_without(meeting))


def _without(meeting: Meeting) -> Iterator[str]:
    """The nodes that did not come, went away, or are blocked, as far as their names are known."""
    names = meeting.seat.names
    for rank in _absent_ranks(meeting) or ():
        if rank < len(names):
            yield names[rank]
    yield from (node.facts.host for node in meeting.nodes if node.lost)
    yield from (each.host for each in meeting.report.blocked if each.host)


def _uninvited(meeting: Meeting) -> list[str]:
    """A line about callers that did not prove the rendezvous id: they change no verdict."""
    count, strangers = meeting.report.uninvited, meeting.report.strangers
    if not strangers:
        return []
    who = first([f"{each.host} {each.address}".strip() for each in strangers], 3)
    calls = f"{counted(count, 'call')} with another rendezvous id, or none"
    return [f"{calls} {'was' if count == 1 else 'were'} turned away: {who}"]


def _absent(meeting: Meeting, seconds: float, situation: Situation) -> Iterator[Finding]:
    blocked = meeting.report.blocked
    missing = meeting.expected - len(meeting.nodes) - len(blocked)
    if missing <= 0:
        return
    absent = _absent_ranks(meeting)
    if absent is None or len(absent) != missing:
        who = f"{missing} of {counted(meeting.expected, 'node')}"
        if absent is not None and len(absent) < 9:
            who += f" ({', '.join(map(meeting.seat.name, absent))})"
    else:
        who = ", ".join(map(meeting.seat.name, absent[:8]))
        who += f" and {len(absent) - 8} more" if len(absent) > 8 else ""
    absence = f"{who} did not come within {seconds:.0f} s"
    here = f"here: {meeting.hosts(list(range(len(meeting.nodes))))}"
    seen = (here, *_uninvited(meeting))
    if meeting.foreign and len(meeting.nodes) == 1:
        yield _elsewhere(meeting, situation, absence)
        return
    if is_local(meeting.seat.host):
        fix, paste = meeting_point(meeting.seat, situation)
        yield failure(
            f"{absence}: on every node, {meeting.seat.endpoint} is that node itself",
            evidence=(*seen, f"nodes that share this machine have {LOCAL_LIMIT:.0f} s to come"),
            fix=fix,
            paste=paste,
            about="absent",
        )
        return
    numbers = sorted({node.facts.nnodes for node in meeting.nodes})
    severity = Severity.ERROR
    if len(numbers) > 1:
        # They were not waited for: all have to be started again in any case.
        severity = Severity.WARNING
        absence = f"{who} had not come after {seconds:.0f} s, and was not waited for longer"
        fix = f"Give --nnodes the number of all nodes, on each of them; it is {numbers[0]} on some "
        fix += f"and {numbers[-1]} on others. If that one is missing, start there:"
    else:
        fix = "Start the same command there. If it already runs, its own output says why it does "
        fix += f"not reach {meeting.seat.endpoint}. On that node:"
    yield finding(
        severity,
        absence,
        evidence=seen,
        fix=fix,
        paste=check_line(
            meeting.seat,
            situation.nproc,
            nnodes=meeting.expected,
            rank=absent[0] if absent else None,
        ),
        about="absent",
    )


def _elsewhere(meeting: Meeting, situation: Situation, absence: str) -> Finding:
    """Node rank 0 is at another machine than the endpoint says."""
    host = meeting.seat.host
    addresses = [address for address in meeting.foreign if address != host]
    at = f"{host} ({', '.join(addresses)})" if addresses else host
    return failure(
        f"the other nodes look for node rank 0 at {at}, which is not an address of this machine",
        evidence=(absence,),
        fix=f"Start node rank 0 on {host}, or name this machine in --rdzv-endpoint, on every node. "
        "Here:",
        paste=check_line(meeting.seat, situation.nproc, host=own_host(situation)),
        about="absent",
    )


def _absent_ranks(meeting: Meeting) -> list[int] | None:
    """The node ranks that no node came with; None where some came without one."""
    ranks = [node.facts.rank for node in meeting.nodes]
    ranks += [each.rank for each in meeting.report.blocked]
    if None in ranks:
        return None
    return [rank for rank in range(meeting.expected) if rank not in ranks]


def _others(meeting: Meeting, situation: Situation) -> Iterator[Finding]:
    yield from _blocked(meeting)
    lost = {node.facts.host for node in meeting.nodes if node.lost}
    for extra in meeting.report.surplus:
        if extra.host in lost:
            # It went away, as is reported below, and was started again too soon.
            continue
        yield failure(
            f"{extra.host} ({extra.address}) came when all "
            f"{counted(meeting.expected, 'node')} were already here",
            fix="Leave that one out, or raise --nnodes on every node. Here:",
            paste=check_line(meeting.seat, situation.nproc, nnodes=meeting.expected + 1),
            about=f"surplus {extra.address}",
        )
    for index, node in enumerate(meeting.nodes):
        if node.lost:
            yield failure(
                f"{meeting.name(index)} went away during {node.lost}",
                evidence=(node.why,) if node.why else (),
                fix="See what its own check reports, and whether it was interrupted. Then start "
                "the check again on all nodes; here:",
                paste=check_line(meeting.seat, situation.nproc),
                about=f"lost {index}",
            )


def _blocked(meeting: Meeting) -> Iterator[Finding]:
    blocked = meeting.report.blocked
    port = meeting.seat.port
    for kind in dict.fromkeys(each.kind for each in blocked):
        alike = [each for each in blocked if each.kind == kind]
        who = ", ".join(_caller(each) for each in alike[:8])
        who += f" and {len(alike) - 8} more" if len(alike) > 8 else ""
        yield failure(
            f"{who} cannot connect to port {port} of node 0: {CLOSED.get(kind, 'it is closed')}",
            evidence=("the check runs there, and reaches node 0 at another port",),
            fix=f"Open TCP port {port} in the firewall of node 0, or of the network (a security "
            "group). On node 0:",
            paste=open_port(port, alike[0].address),
            about=f"blocked {kind}",
        )


def _caller(caller: Caller) -> str:
    """A node that was not admitted, for a person."""
    rank = "" if caller.rank is None else f"node {caller.rank}, "
    return f"{caller.host} ({rank}{caller.address})"


def open_words(situation: Situation, outcomes: Sequence[Outcome]) -> str:
    """What it means that no rendezvous id was given, and one to give; empty if one was."""
    here = next((outcome for outcome in outcomes if outcome.check == ATTENDANCE), None)
    if here is None or here.status is Status.COULD_NOT_RUN:
        return ""
    place = seat(situation)
    if place.rdzv_id != NO_ID or not place.host or is_local(place.host):
        return ""
    # One node prints an id: those of two nodes differ, and the job would not meet.
    if place.rank == 0 or meeting_of(situation).own == 0:
        give = f"on every node: --rdzv-id {secrets.token_hex(8)}"
    else:
        give = "on every node: the --rdzv-id that node 0 prints"
    return (
        f"no --rdzv-id: whoever reaches port {place.port} of node 0 could take part in this check\n"
        f"to let in the job's nodes alone, {give}"
    )


def next_line(situation: Situation, outcomes: Sequence[Outcome]) -> str:
    """The `ddpdoctor run` line for this node; empty after a failure, or without other nodes."""
    if any(outcome.status in (Status.FAIL, Status.COULD_NOT_RUN) for outcome in outcomes):
        return ""
    if not any(outcome.check == "nodes" for outcome in outcomes):
        return ""
    meeting = meeting_of(situation)
    seat = meeting.seat
    if meeting.problem is not None or len(meeting.nodes) != seat.nnodes:
        return ""
    line = words(seat, situation.nproc)
    if seat.rank is None:
        line += ["--rdzv-backend", "c10d"]
    return run_line(situation, *line)

"""Judge a meeting: what all checks across nodes share, and whether all ranks reduce together."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Literal

from ddpdoctor.core import relations
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.formatting import count
from ddpdoctor.core.relations import LOST_PACKETS, UNREDUCED, Same
from ddpdoctor.preflight.check import (
    CHECKS,
    Outcome,
    Run,
    Status,
    check,
    could_not_run,
    failure,
    judged,
    skipped,
    typed,
    warning,
)
from ddpdoctor.preflight.command_lines import check_line
from ddpdoctor.preflight.machine.network import SLOW
from ddpdoctor.preflight.protocol.meet import REDUCING, Meeting, meeting_of
from ddpdoctor.preflight.protocol.messages import Facts, NcclReport, Reduction
from ddpdoctor.preflight.protocol.pairs import Dialled
from ddpdoctor.preflight.selftest.collectives import BROKEN, LIMIT, nccl_advice, starved
from ddpdoctor.preflight.situation import ATTENDANCE, Situation, node_place

# -- what all checks across nodes share


def across_nodes(
    name: str, code: str, yields_to: Mapping[str, Same] | None = None
) -> Callable[[Callable[[Meeting], Outcome]], Run]:
    """Register a check that judges the meeting of all nodes, and needs another node to be there.

    It passes only if everything that it counts was tested: ``3 of 4 ranks`` is not a pass.
    """

    def register(of: Callable[[Meeting], Outcome]) -> Run:
        @check(name, code, scope="nodes", limit=LIMIT, yields_to=yields_to)
        @wraps(of)
        def run(situation: Situation) -> Outcome:
            meeting = meeting_of(situation)
            # Without the check of attendance, a test of nothing would look like a pass.
            untested = skipped if _runs(situation, ATTENDANCE) else could_not_run
            if meeting.problem is not None:
                return untested("this node did not meet the others")
            if len(meeting.nodes) < 2:
                return untested("no other node is here")
            outcome = of(meeting)
            absent = len(meeting.nodes) < meeting.expected and untested is could_not_run
            if outcome.status is Status.PASS and (absent or _short(outcome.detail)):
                here = f"{len(meeting.nodes)} of {meeting.expected} nodes are here"
                return could_not_run(f"{here}: {outcome.detail}")
            test = meeting.report.reduction
            refused = outcome.status is Status.SKIPPED and outcome.detail == test.skipped
            if name in REDUCING and refused and test.reported:
                return _unless_reported(situation, outcome, test.reported)
            return outcome

        return run

    return register


def _runs(situation: Situation, name: str) -> bool:
    return situation.chosen is None or name in situation.chosen


def _short(detail: str) -> bool:
    return any(int(some) < int(all_) for some, all_ in re.findall(r"\b(\d+) of (\d+)\b", detail))


def _unless_reported(situation: Situation, outcome: Outcome, checks: Iterable[str]) -> Outcome:
    """Return a skipped outcome if one of these checks reports the reason. Otherwise report it."""
    for other in (CHECKS[name].run(situation) for name in checks if _runs(situation, name)):
        found = any(each.severity > Severity.INFO for each in other.findings)
        if found or other.status is Status.COULD_NOT_RUN:
            return outcome
    untold = failure(
        f"the job would hang: {outcome.detail}",
        fix="See which nodes it concerns, and why:",
        paste=check_line(node_place(situation), situation.nproc),
        about="reduction",
    )
    return judged(f"not tried: {outcome.detail}", [untold])


def of_all(meeting: Meeting) -> str:
    """Return the number of tested nodes in words."""
    return count(len(meeting.nodes), "node")


def grouped(meeting: Meeting, of: Callable[[Facts], str]) -> dict[str, list[int]]:
    """Group the nodes by a value. Leave out nodes for which it is empty."""
    found: dict[str, list[int]] = {}
    for index, node in enumerate(meeting.nodes):
        if value := of(node.facts):
            found.setdefault(value, []).append(index)
    return found


def usual_of(groups: Mapping[str, Sequence[int]]) -> str:
    """Return the most frequent value. Among equals, the first node decides."""
    return min(groups, key=lambda value: (-len(groups[value]), groups[value][0]))


Way = tuple[int, int]  # From one node to another, by index


@dataclass(frozen=True)
class Blame:
    """The common cause of a set of bad connections."""

    kind: Literal["into", "out of", "both", "way", "between"]
    """``into``: all connections to the node are bad; ``out of``: all from it; ``both``; ``way``:
    one connection; ``between``: both directions between two nodes."""
    node: int  # The node; for ``way`` and ``between`` the one that is dialled first
    ways: tuple[Way, ...]  # The bad connections that this explains

    @property
    def about(self) -> str:
        """The key that makes it the same finding on every node."""
        return f"{self.kind} {self.ways[0]}"

    def words(
        self,
        meeting: Meeting,
        into: str = "on the way to",
        out: str = "on the way from",
        both: str = "to and from",
    ) -> str:
        """Describe the connections. The words precede a node that they share."""
        node = meeting.name(self.node)
        source, target = (meeting.name(index) for index in self.ways[0])
        return {
            "into": f"{into} {node}",
            "out of": f"{out} {node}",
            "both": f"{both} {node}",
            "between": f"between {source} and {target}",
            "way": f"from {source} to {target}",
        }[self.kind]

    @property
    def guilty(self) -> bool:
        """Whether one node is at fault, and not a connection between two."""
        return self.kind in ("into", "out of", "both")

    def nodes(self, meeting: Meeting) -> tuple[str, ...]:
        """Return the host names of the nodes to examine."""
        ends = (self.ways[0][0], self.node) if self.kind == "between" else (self.node,)
        return tuple(meeting.host(index) for index in ends)

    def hosts(self, meeting: Meeting) -> str:
        """Return these host names in words."""
        return " and ".join(self.nodes(meeting))

    @property
    def losses(self) -> frozenset[str]:
        """The pairs of nodes between which packets are lost, as subjects of a finding."""
        return frozenset(f"{LOST_PACKETS}{min(way)} {max(way)}" for way in self.ways)


def blame(bad: Iterable[Way], tested: Iterable[Way]) -> list[Blame]:
    """Explain bad connections by nodes whose column or row is bad, and the others one by one.

    With two nodes a row, a column and a connection are the same. It is reported as a connection.
    """
    left = set(bad)
    into: dict[int, set[Way]] = {}
    out: dict[int, set[Way]] = {}
    for way in tested:
        out.setdefault(way[0], set()).add(way)
        into.setdefault(way[1], set()).add(way)
    all_bad = frozenset(left)
    found = []

    def take(kind: Literal["into", "out of", "both"], node: int, *sets: set[Way]) -> None:
        ways = set().union(*sets)
        if all(len(each) > 1 and each <= all_bad for each in sets) and ways & left:
            found.append(Blame(kind, node, tuple(sorted(ways & left))))
            left.difference_update(ways)

    for node in sorted(into):
        take("both", node, into[node], out.get(node, set()))
    # Columns first: a firewall usually blocks what comes in.
    for node in sorted(into):
        take("into", node, into[node])
    for node in sorted(out):
        take("out of", node, out[node])
    for i, j in sorted(left):
        if (j, i) not in left:
            found.append(Blame("way", j, ((i, j),)))
        elif i < j:
            found.append(Blame("between", j, ((i, j), (j, i))))
    return found


def with_address(meeting: Meeting, index: int, address: str) -> list[int]:
    """Return the other machines that report a node's address as their own."""
    return [
        other
        for other, node in enumerate(meeting.nodes)
        if node.facts.machine != meeting.nodes[index].facts.machine
        and interface(meeting, other, address)[0]
    ]


def bad_ways(meeting: Meeting, kind: str) -> dict[Way, Dialled]:
    """Return the connections that failed twice at an address of this kind, with their results."""
    return {(i, j): result for i, j, of, result in meeting.report.bad if of == kind}


def short_of_files(meeting: Meeting) -> set[int]:
    """Return the nodes that could not dial because they could open no more files."""
    return {i for i, _, _, result in meeting.report.bad if result.outcome == "no files"}


def all_ways(meeting: Meeting) -> list[Way]:
    """Return every ordered pair of nodes that stayed."""
    here = [place for place, node in enumerate(meeting.nodes) if not node.lost]
    return [(i, j) for i in here for j in here if i != j]


def interface(meeting: Meeting, index: int, address: str = "") -> tuple[str, int]:
    """Return the name and MTU of a node's interface that has an address; by default the one in use.

    Return an empty name and 0 if it is not known.
    """
    node = meeting.nodes[index]
    for name, mtu, addresses in node.facts.interfaces:
        if (address or node.address) in addresses:
            return name, mtu
    return "", 0


# -- reductions over all ranks


FAR_BELOW = 8
"""How many times slower than its link NCCL has to be for a warning. Healthy machines are within two
or three. Host memory in place of NVLink, or a socket in place of InfiniBand, is 10 to 40 times
slower."""

BELOW_TCP = 5  # The same for gloo, against one TCP connection between the same nodes
IDLE = 0.5  # The idle share of all ranks from which slowness is the network's, not the machines'
MAX_RANKS = 64  # With more ranks an all_reduce of a few MiB waits for the many steps of its ring


def capacity(meeting: Meeting, nodes: Sequence[int]) -> tuple[str, float]:
    """Return the slowest link that a group of nodes reduces over, and its bytes per second.

    For a single node that is a link inside it. Return the reason and 0 if the speed is unknown.
    """
    facts = [meeting.nodes[index].facts for index in nodes]
    links = [each.inside if len(facts) == 1 else each.outside for each in facts]
    if unknown := [what for what, speed in links if not speed]:
        return unknown[0], 0.0
    return min(links, key=lambda link: link[1])


def rate(speed: float) -> str:
    """Format bytes per second in the unit of nccl-tests."""
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e8 else f"{speed / 1e6:.1f} MB/s"


def _without_torch(cause: Finding, effect: Finding) -> bool:
    """Return whether ranks failed to reduce or to import torch because their torch differs."""
    hit = effect.about == "import" or UNREDUCED in effect.subjects
    return hit and cause.about == "torch" and relations.certain(cause, effect)


@across_nodes(
    "gloo-nodes",
    "DDP060",
    yields_to={
        "DDP053": relations.certain_and_unreduced,
        "DDP054": relations.loses_packets,
        "DDP055": relations.certain_and_unreduced,
        "DDP056": relations.loses_packets,
        "DDP057": _without_torch,
    },
)
def gloo_reduction(meeting: Meeting) -> Outcome:
    """An all_reduce over all ranks of all nodes fails, hangs, or gives a wrong result.

    What it finds
        Runs as many ranks as the job will have, on every node, with the real torch: a store at the
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
        result": a rank hung. A wrong sum: a node computes or copies wrong numbers; `--soak` on each
        node alone, then on half of them, shows which.

    Example
        Wrong: a torch built without distributed support on one node.
        Right: the same environment on every node.

    When it stays silent
        If every rank got the right result. If there was too little time, with busy cores or slow
        name lookups, the check could not run. The bus bandwidth is not compared if a
        node's cores were busy or there are more than 64 ranks; the output says so.
    """
    test = meeting.report.reduction
    if test.unready:
        return _unready(meeting, test)
    if test.skipped:
        return skipped(test.skipped)
    if not test.world:
        return could_not_run("there were no ranks")
    detail = (
        f"{test.correct_nodes} of {len(meeting.nodes)} nodes, {test.correct} of "
        f"{count(test.world, 'rank')} reduced correctly"
    )
    if why := _too_little_time(meeting, test):
        return could_not_run(f"{detail}: {why}; --timeout gives it more time")
    findings = list(_failed_gloo(meeting, test))
    if test.rounds:
        detail += f", {count(test.rounds, 'time')}"
    least = meeting.report.speed.least
    if test.bus:
        why_not = _why_not_compared(test, least)
        detail += f"; bus bandwidth {rate(test.bus)}, "
        detail += f"not compared: {why_not}" if why_not else f"TCP has {rate(least)}"
        apart = any(node.facts.gloo_address != node.address for node in meeting.nodes)
        if not why_not and test.bus < least / BELOW_TCP and apart:
            findings.append(_slow_gloo(meeting, test.bus, least))
    return judged(detail, findings)


def _unready(meeting: Meeting, test: Reduction) -> Outcome:
    broken = [index for index, why, _ in test.unready if why == BROKEN]
    if not broken:
        hosts = meeting.hosts([index for index, *_ in test.unready])
        return could_not_run(
            "not tested, for lack of CPU: torch was not imported within "
            f"{test.unready[0][2]:.0f} s on {hosts}; --timeout gives it more time"
        )
    wrong = failure(
        f"torch cannot be imported on {meeting.hosts(broken)}",
        fix=f"Read Python's error. On {meeting.host(broken[0])}:",
        paste="python -c 'import torch.distributed'",
        about="import",
        nodes=tuple(map(meeting.host, broken)),
    )
    return judged("not tried: torch cannot be imported on every node", [wrong])


def _too_little_time(meeting: Meeting, test: Reduction) -> str:
    """Return why the ranks that failed had too little time; empty if one had enough."""
    if slow := [node for node in meeting.nodes if node.late]:
        return f"{slow[0].facts.host} could not finish {slow[0].lost} in time"
    if not test.wrong or not all(result.late for result in test.wrong):
        return ""
    if test.limit < test.asked / 2:
        return f"only {test.limit:.0f} s were left for it"
    # torch looks up the names of its peers many times before it reduces.
    if names := [index for index, node in enumerate(meeting.nodes) if node.facts.lookup > SLOW]:
        return f"name lookups are slow on {meeting.hosts(names)}"
    if not starved(test.wrong):
        return ""
    most = max(each.waited for each in test.wrong)
    busy = sorted({each.node for each in test.wrong if each.waited > most / 2})
    return f"for lack of CPU on {meeting.hosts(busy)}"


def _why_not_compared(test: Reduction, least: float) -> str:
    """Return why gloo's speed does not show the network's; empty if it does."""
    if not least:
        return "no link was measured"
    if test.world > MAX_RANKS:
        return f"over {MAX_RANKS} ranks"
    return "" if test.idle >= IDLE else "the cores were busy"


def _slow_gloo(meeting: Meeting, bus: float, least: float) -> Finding:
    addresses = {
        f"{node.facts.host}: gloo {node.facts.gloo_address} ({node.facts.gloo_why}), reached at "
        f"{node.address}"
        for node in meeting.nodes
        if node.facts.gloo_address != node.address
    }
    return warning(
        f"gloo moves {rate(bus)} between the nodes, far less than the {rate(least)} of one "
        "TCP connection",
        evidence=tuple(sorted(addresses))[:8],
        fix="Let gloo use the interface by which the nodes reach each other, in the job's "
        "environment on every node (its name may differ):",
        paste=typed("export GLOO_SOCKET_IFNAME={}", interface(meeting, 0)[0] or "eth0"),
        about="bus",
    )


def _failed_gloo(meeting: Meeting, test: Reduction) -> Iterator[Finding]:
    if test.correct == test.world:
        return
    wrong = {result.node for result in test.wrong}
    silent = [index for index, node in enumerate(meeting.nodes) if node.lost and index not in wrong]
    evidence = [
        f"rank {result.rank} on {meeting.host(result.node)}: {result.error}"
        for result in test.wrong
        if result.error
    ][:4]
    if silent:
        evidence.append(f"no answer at all from {meeting.hosts(silent)}")
    if incorrect := [result for result in test.wrong if result.wrong]:
        on = sorted({result.node for result in incorrect})
        yield failure(
            f"{incorrect[0].wrong} gave a wrong result on {meeting.hosts(on)}",
            evidence=tuple(evidence),
            fix="One of these nodes computes or copies wrong numbers: its memory, its processor, "
            "its network card, or a library that was changed. Test each node alone, then half of "
            "them together, to find which:",
            paste="ddpdoctor check --soak 10",
            about="reduction",
            nodes=tuple(map(meeting.host, on)),
        )
        return
    failed = count(test.world - test.correct, "rank")
    message = f"{failed} did not reduce correctly, on {meeting.hosts(sorted({*wrong, *silent}))}"
    yield failure(
        (message if test.correct else "no rank could reduce")
        + (f" within {test.limit:.0f} s" if all(each.late for each in test.wrong) else ""),
        evidence=tuple(evidence),
        fix="See the first error: a job would end with it. gloo prints more about it with:",
        paste="export TORCH_CPP_LOG_LEVEL=INFO TORCH_DISTRIBUTED_DEBUG=INFO",
        about="reduction",
        subjects=frozenset({UNREDUCED}),
    )


OWN_WORDS = (
    "Try again with NCCL's own messages; the first warning names the device or address.",
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
    why_not = grouped(meeting, lambda facts: facts.no_nccl)
    for reason, on in why_not.items():
        everywhere = len(on) == len(meeting.nodes)
        return skipped(reason if everywhere else f"{reason} on {meeting.hosts(on)}")
    test = meeting.report.reduction
    if test.skipped:
        return skipped(test.skipped)
    nccl = test.nccl
    if nccl is None or (not nccl.stages and not nccl.untested):
        if bad_ways(meeting, "nccl"):
            return skipped("some nodes cannot reach others at the addresses where NCCL listens")
        return skipped("gloo failed already")
    detail = f"{nccl.correct} of {test.world} ranks reduced correctly"
    for stage in nccl.stages:
        for nodes, bus in stage.sets[:1]:
            link, speed = capacity(meeting, nodes)
            of = f" of {rate(speed)} ({link})" if speed else f", not compared: {link}"
            detail += f"; {stage.name} {rate(bus)}{of}"
    found = [*_failed_nccl(meeting, nccl, test.world), *_slow_nccl(meeting, nccl)]
    if nccl.untested and not found:
        return could_not_run(
            f"{detail}; no time was left for NCCL {nccl.untested}: give it more with --timeout"
        )
    return judged(detail, found)


def _slow_nccl(meeting: Meeting, nccl: NcclReport) -> Iterator[Finding]:
    """Report the first stage that is far slower than its links. Later stages use the same links."""
    for stage in nccl.stages:
        slow = [
            (nodes, bus, link)
            for nodes, bus in stage.sets
            if (link := capacity(meeting, nodes))[1] and bus < link[1] / FAR_BELOW
        ]
        if not slow:
            continue
        nodes, bus, (what, speed) = slow[0]
        inside = len(nodes) == 1
        yield warning(
            f"NCCL moves {rate(bus)} {stage.name} ({meeting.hosts(nodes)}), far less than the "
            f"link's {rate(speed)} ({what})",
            evidence=tuple(
                f"{meeting.hosts(others)}: {rate(each)}" for others, each, _ in slow[1:9]
            ),
            fix="See which transport NCCL uses: where it is not peer-to-peer, an IOMMU or ACS may "
            "be in between. NCCL reports it with:"
            if inside
            else "See which transport NCCL uses: a socket in place of InfiniBand (no device in the "
            "container, no plugin), or another interface. NCCL reports it with:",
            paste="export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS="
            + ("INIT,GRAPH,P2P,SHM" if inside else "INIT,NET"),
            about="bus",
        )
        return


def _failed_nccl(meeting: Meeting, nccl: NcclReport, world: int) -> Iterator[Finding]:
    failed = next((stage for stage in nccl.stages if stage.errors), None)
    missing = world - nccl.correct
    if failed is None:
        if missing and not nccl.untested:
            yield failure(
                f"NCCL's test was not finished by {missing} of {world} ranks",
                fix=OWN_WORDS[0],
                paste=OWN_WORDS[1],
                about="ranks",
            )
        return
    name = failed.name
    chosen = sorted({index for _, nodes, _ in failed.errors for index in nodes})
    guilty = sorted({suspect for suspect, _, works in nccl.again if not works})
    where = f"{name} fails: {meeting.hosts(chosen)}"
    if guilty:
        where = f"{name} fails because of {meeting.hosts(guilty)}"
    elif nccl.again:
        where = f"fails between {meeting.hosts(chosen)} alone"
    fix, paste = nccl_advice(" ".join(words for _, _, words in failed.errors), OWN_WORDS)
    again = [
        f"{meeting.name(suspect)} with {meeting.name(other)}, which had not failed: "
        f"{'works' if works else 'fails as well'}"
        for suspect, other, works in nccl.again[:6]
    ]
    errors = dict.fromkeys(f"{meeting.host(at)}: {words}" for at, _, words in failed.errors)
    yield failure(
        f"NCCL's all_reduce {where}",
        evidence=(*again, *errors)[:10],
        fix=fix,
        paste=paste,
        about=name,
        nodes=tuple(map(meeting.host, guilty)),
    )

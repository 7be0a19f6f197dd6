"""What the nodes send each other, and the parts of a report; each is declared once, here.

A message is JSON (:mod:`~ddpdoctor.preflight.protocol.wire`). The decoder of the journal makes
these of it, so a field holds what is declared here, whatever was sent. Numbers of nodes are their
indices in :attr:`Report.nodes`, in the order of the node ranks; times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpdoctor.preflight.protocol.pairs import Dialled, Target
from ddpdoctor.preflight.protocol.wire import (
    Address,
    Code,
    Count,
    Hexadecimal,
    Host,
    Index,
    Interface,
    Port,
    Printable,
    Rank,
    Variable,
    Version,
    Word,
    unpacked_whole,
)
from ddpdoctor.run.records.base import Part

# -- what the nodes know of each other and of what lies between them: the parts of a report


@dataclass(frozen=True, slots=True)
class Facts(Part):
    """What a node reports of itself.

    Attributes:
        host: Its host name.
        rank: Its ``--node-rank``; None if torchrun is to choose.
        nnodes: Nodes of the job, by its own options.
        nproc: Its ranks.
        machine: Equal for nodes that share a machine and a network.
        gloo_address: What gloo will give to the other nodes; empty if gloo would not start.
        gloo_why: How gloo comes to it, or why it would not start.
        nccl_address: What NCCL will give to them; empty where it will not start, or has no GPU.
        interfaces: Its interfaces without loopback: name, MTU, addresses.
        pair_port: Where its listener of this check is.
        reduces: Whether it takes part in the collective test.
        gpus: Visible GPUs.
        no_nccl: Why NCCL cannot be tested on it; empty if it can.
        inside: What connects them, and its bytes per second one way; 0 if that is not known.
        outside: The same of the network that NCCL will use.
        torch: Version; likewise the next four. Empty where there is none.
        variables: Of NCCL, gloo and torch's distributed part.
        script: Name of the script, if one was given; empty as are the next three if not.
        script_hash: Of its bytes.
        commit: The checked-out commit of its repository.
        changes: A hash of what was changed in tracked files since; empty when nothing was.
        folder: The checkpoint folder, if one was given.
    """

    host: Host
    rank: Rank
    nnodes: Count
    nproc: Count
    machine: str
    gloo_address: Address
    gloo_why: str
    nccl_address: Address
    interfaces: tuple[tuple[Interface, int, tuple[Address, ...]], ...]
    pair_port: Port
    reduces: bool
    gpus: Count
    no_nccl: str
    inside: tuple[str, float]
    outside: tuple[str, float]
    torch: Version
    nccl: Version
    driver: Version
    python: Version
    ddpdoctor: Version
    variables: dict[Variable, Printable]
    script: Printable
    script_hash: Hexadecimal
    commit: Hexadecimal
    changes: Hexadecimal
    folder: Printable


def unpack_facts(message: Mapping[str, object]) -> Facts:
    """The facts in a message of another node, which may have another ddpdoctor.

    Raises:
        ValueError: They are damaged.
    """
    return unpacked_whole(Facts, message)


@dataclass(frozen=True, slots=True)
class Stage(Part):
    """A stage of the NCCL test on one rank.

    Attributes:
        nodes: Whose ranks reduced.
        error: Empty if the result was right.
        bus: Bytes per second over each link; 0 if that was not measured.
    """

    name: str = ""
    nodes: tuple[Index, ...] = ()
    error: str = ""
    bus: float = 0.0


@dataclass(frozen=True, slots=True)
class Stages(Part):
    """The NCCL test on one rank.

    Attributes:
        untested: The first stage that there was no time for.
    """

    stages: tuple[Stage, ...] = ()
    ok: bool = False
    untested: str = ""


@dataclass(frozen=True, slots=True)
class RankResult(Part):
    """What one rank of the collective test found.

    Attributes:
        ok: Whether gloo reduced correctly.
        bus: Bytes per second over each link.
        idle: For which part of the time its cores had nothing to do.
        rounds: How often gloo's all_reduce was repeated.
        stages: By NCCL, where it was tested.
    """

    node: Index = -1
    rank: int = -1
    ok: bool = False
    error: str = ""
    bus: float = 0.0
    idle: float = 0.0
    rounds: int = 0
    stages: Stages | None = None


@dataclass(frozen=True, slots=True)
class Said(Part):
    """A finding of a check of one machine, as the others are shown it."""

    check: Word = ""
    code: Code = ""
    severity: Word = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Verdict(Part):
    """What the checks of one machine found.

    Attributes:
        findings: Above information, the worst first.
        untested: The checks that could not run, and those that had not ended.
    """

    findings: tuple[Said, ...] = ()
    untested: tuple[Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Node(Part):
    """A node that came.

    Attributes:
        address: Where it came from.
        offset: How far the coordinator's clock is ahead of the node's.
        uncertainty: Half a round trip of that estimate.
        lost: In which phase it went away; empty if it stayed.
        why: What was seen of that.
    """

    facts: Facts
    address: Address
    offset: float = 0.0
    uncertainty: float = 0.0
    lost: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class Caller(Part):
    """A node that called and is not among the others.

    Attributes:
        kind: Why the rendezvous port is closed for it, if it is.
    """

    host: Host = ""
    address: Address = ""
    rank: Rank = None
    kind: Word = ""


@dataclass(frozen=True, slots=True)
class Speeds(Part):
    """The links that were measured; bandwidths in bytes per second.

    Attributes:
        measured: How many.
        rtt: The median; likewise the bandwidth.
        least: The lowest bandwidth.
        slow: From, to, round trip, bandwidth.
        lossy: From, to, small messages, and how many of these were sent again.
        cells: From and to of all, where some are slow or lossy.
        starved: Those that looked slow while an end waited for a core most of the time.
        untested: Why none was measured.
    """

    measured: int = 0
    rtt: float = 0.0
    bandwidth: float = 0.0
    least: float = 0.0
    slow: tuple[tuple[Index, Index, float, float], ...] = ()
    lossy: tuple[tuple[Index, Index, int, int], ...] = ()
    cells: tuple[tuple[Index, Index], ...] = ()
    starved: Count = 0
    untested: str = ""


@dataclass(frozen=True, slots=True)
class Folder(Part):
    """The test of the checkpoint folder.

    Attributes:
        asked: The nodes that have one; the first one wrote a file.
        error: Why it could not.
        seen: The others that saw the file.
        listings: The hashes of what is in the folder.
    """

    asked: tuple[Index, ...] = ()
    error: str = ""
    seen: tuple[Index, ...] = ()
    listings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageReport(Part):
    """A stage of the NCCL test over all ranks.

    Attributes:
        errors: The node that reports it, the nodes that reduced, and the words.
        sets: Nodes that reduced, and bytes per second; the slowest first.
    """

    name: str = ""
    errors: tuple[tuple[Index, tuple[Index, ...], str], ...] = ()
    sets: tuple[tuple[tuple[Index, ...], float], ...] = ()


@dataclass(frozen=True, slots=True)
class NcclReport(Part):
    """The NCCL test over all ranks.

    Attributes:
        correct: Ranks that had the right result in all stages.
        again: A node of a pair that failed, one that did not, and whether these two work.
        untested: The first stage that there was no time for.
    """

    correct: int = 0
    stages: tuple[StageReport, ...] = ()
    again: tuple[tuple[Index, Index, bool], ...] = ()
    untested: str = ""


@dataclass(frozen=True, slots=True)
class Reduction(Part):
    """The collective test over all ranks.

    Attributes:
        skipped: Why there was none.
        unready: Nodes without torch: which, why, and how long they were waited for.
        world: Ranks.
        limit: Seconds that gloo had.
        correct: Ranks that gloo reduced correctly on.
        correct_nodes: Nodes on which it did on all ranks.
        bus: As in :class:`RankResult`, of the slowest rank.
        idle: As in :class:`RankResult`, of the busiest.
        rounds: As in :class:`RankResult`.
        wrong: The ranks on which gloo failed.
        nccl: None if it was not tested.
    """

    skipped: str = ""
    unready: tuple[tuple[Index, str, float], ...] = ()
    world: int = 0
    limit: float = 0.0
    correct: int = 0
    correct_nodes: int = 0
    bus: float = 0.0
    idle: float = 0.0
    rounds: int = 0
    wrong: tuple[RankResult, ...] = ()
    nccl: NcclReport | None = None


@dataclass(frozen=True, slots=True)
class Report(Part):
    """What came of a meeting; all nodes get the same.

    Attributes:
        expected: How many nodes were to come.
        strangers: Those that have another rendezvous id, or none.
        uninvited: How many calls came from such.
        surplus: Those that came when all were there.
        blocked: Those for which the rendezvous port is closed.
        bad: From, to, at which address (``route``, ``gloo``, ``nccl``), and what came of it twice.
        verdicts: Of the machines, in the order of the nodes.
        gathered: Seconds that the nodes were waited for.
    """

    expected: Count = 0
    nodes: tuple[Node, ...] = ()
    strangers: tuple[Caller, ...] = ()
    uninvited: int = 0
    surplus: tuple[Caller, ...] = ()
    blocked: tuple[Caller, ...] = ()
    bad: tuple[tuple[Index, Index, Word, Dialled], ...] = ()
    speed: Speeds = field(default_factory=Speeds)
    folder: Folder = field(default_factory=Folder)
    reduction: Reduction = field(default_factory=Reduction)
    verdicts: tuple[Verdict, ...] = ()
    gathered: float = 0.0


# -- what the nodes send each other; each message is declared once, here


@dataclass(frozen=True, slots=True)
class Knock(Part):
    """What a caller says to the coordinator: who it is, then questions, facts, or a problem.

    Attributes:
        blocked: Why the rendezvous port is closed for it; empty unless it came by the side door.
        offset: How far the coordinator's clock is ahead of the node's.
        uncertainty: Half a round trip of that estimate.
    """

    proof: Hexadecimal = ""
    nonce: Hexadecimal = ""
    host: Host = ""
    rank: Rank = None
    blocked: Word = ""
    offset: float = 0.0
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class Welcome(Part):
    """What the coordinator answers to a caller.

    Attributes:
        identity: Which coordinator it is.
        refused: ``id``, ``late`` or ``full``; empty if the caller may stay.
        here: The host names of the nodes that are there, if it is refused.
        nnodes: How many are expected.
        time: The coordinator's clock, in answer to a question.
        reached: The address of the coordinator's machine at which the connection ended.
    """

    proof: Hexadecimal = ""
    identity: Hexadecimal = ""
    refused: Word = ""
    here: tuple[Host, ...] = ()
    nnodes: Count = 0
    time: float = 0.0
    reached: Address = ""


@dataclass(frozen=True, slots=True)
class Answer(Part):
    """What a node answers to an order; what it was not asked for has its default.

    Attributes:
        dialled: In the order of the targets.
        unready: Why not all of its ranks have torch.
        error: Why the file in the checkpoint folder was not written.
        seen: Whether that file is in its checkpoint folder.
        listing: A hash of what is in that folder.
        ranks: Of the collective test.
        verdict: Of the checks of its machine.
        failed: Why it could not do what it was asked for.
        waited: For which part of the measurement either end waited for a core.
        sent: Small messages of the measurement, both ways.
        resent: Segments of these that were sent again.
    """

    dialled: tuple[Dialled, ...] = ()
    unready: str = ""
    rtt: float = 0.0
    bandwidth: float = 0.0
    error: str = ""
    seen: bool = False
    listing: Hexadecimal = ""
    ranks: tuple[RankResult, ...] = ()
    verdict: Verdict = field(default_factory=Verdict)
    failed: str = ""
    waited: float = 0.0
    sent: int = 0
    resent: int = 0


@dataclass(frozen=True, slots=True)
class Order(Part):
    """What the coordinator has a node do.

    Attributes:
        do: ``roster``, ``dial``, ``settle``, ``speed``, ``folder``, ``reduce``, ``verdict``,
            ``leave``, ``end``.
        index: The node's own, of a roster.
        token: Proves to its peers that they are of this check; names the file in the folder.
        targets: To dial; of ``speed`` one.
        needed: Whether the ranks have to import torch.
        limit: Seconds for what is asked for.
        action: In the folder: ``write``, ``look`` or ``remove``.
        port: Of the store; this and what follows is of the collective test.
        world: All ranks.
        first: The rank of the node's first process.
        stage_limit: Seconds for each stage of NCCL.
        patience: Seconds for all of it.
        nccl: Whether NCCL is tested.
        node_of: The node of each rank.
        soak: Seconds for which the all_reduce over all ranks is repeated.
        report: At the end.
    """

    do: Word = ""
    index: Index = -1
    token: Hexadecimal = ""
    targets: tuple[Target, ...] = ()
    needed: bool = False
    limit: float = 0.0
    action: Word = ""
    port: Port = 0
    world: Count = 0
    first: Count = 0
    stage_limit: float = 0.0
    patience: float = 0.0
    nccl: bool = False
    node_of: tuple[Index, ...] = ()
    soak: float = 0.0
    report: Report | None = None

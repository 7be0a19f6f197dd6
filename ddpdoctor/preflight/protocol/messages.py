"""What the nodes send each other; each message is declared once, here.

A message is JSON (:mod:`~ddpdoctor.preflight.protocol.wire`). The decoder of the journal makes
these of it, so a field holds what is declared here, whatever was sent. Numbers of nodes are their
indices in :attr:`Report.nodes`, in the order of the node ranks; times are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpdoctor.preflight.protocol.pairs import Dialled, Target
from ddpdoctor.run.records.base import Part
from ddpdoctor.run.records.decoder import required


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

    host: str
    rank: int | None
    nnodes: int
    nproc: int
    machine: str
    gloo_address: str
    gloo_why: str
    interfaces: tuple[tuple[str, int, tuple[str, ...]], ...]
    pair_port: int
    reduces: bool
    gpus: int
    no_nccl: str
    inside: tuple[str, float]
    outside: tuple[str, float]
    torch: str
    nccl: str
    driver: str
    python: str
    ddpdoctor: str
    variables: dict[str, str]
    script: str
    script_hash: str
    commit: str
    changes: str
    folder: str


def unpack(message: Mapping[str, object]) -> Facts:
    """The facts in a message of another node, which may have another ddpdoctor.

    Raises:
        ValueError: They are damaged.
    """
    return required(Facts, message)


@dataclass(frozen=True, slots=True)
class Knock(Part):
    """What a caller says to the coordinator: who it is, then questions, facts, or a problem.

    Attributes:
        blocked: Why the rendezvous port is closed for it; empty unless it came by the side door.
        offset: How far the coordinator's clock is ahead of the node's.
        uncertainty: Half a round trip of that estimate.
    """

    proof: str = ""
    nonce: str = ""
    host: str = ""
    rank: int | None = None
    blocked: str = ""
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
    """

    proof: str = ""
    identity: str = ""
    refused: str = ""
    here: tuple[str, ...] = ()
    nnodes: int = 0
    time: float = 0.0


@dataclass(frozen=True, slots=True)
class Stage(Part):
    """A stage of the NCCL test on one rank.

    Attributes:
        nodes: Whose ranks reduced.
        error: Empty if the result was right.
        bus: Bytes per second over each link; 0 if that was not measured.
    """

    name: str = ""
    nodes: tuple[int, ...] = ()
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
        stages: By NCCL, where it was tested.
    """

    node: int = -1
    rank: int = -1
    ok: bool = False
    error: str = ""
    bus: float = 0.0
    idle: float = 0.0
    stages: Stages | None = None


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
    """

    dialled: tuple[Dialled, ...] = ()
    unready: str = ""
    rtt: float = 0.0
    bandwidth: float = 0.0
    error: str = ""
    seen: bool = False
    listing: str = ""
    ranks: tuple[RankResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Node(Part):
    """A node that came.

    Attributes:
        address: Where it came from.
        offset: How far the coordinator's clock is ahead of the node's.
        uncertainty: Half a round trip of that estimate.
        lost: In which phase it went away; empty if it stayed.
    """

    facts: Facts
    address: str
    offset: float = 0.0
    uncertainty: float = 0.0
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Caller(Part):
    """A node that called and is not among the others.

    Attributes:
        kind: Why the rendezvous port is closed for it, if it is.
    """

    host: str = ""
    address: str = ""
    rank: int | None = None
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Speeds(Part):
    """The links that were measured; bandwidths in bytes per second.

    Attributes:
        measured: How many.
        rtt: The median; likewise the bandwidth.
        least: The lowest bandwidth.
        slow: From, to, round trip, bandwidth.
        cells: From and to of all, where some are slow.
    """

    measured: int = 0
    rtt: float = 0.0
    bandwidth: float = 0.0
    least: float = 0.0
    slow: tuple[tuple[int, int, float, float], ...] = ()
    cells: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Folder(Part):
    """The test of the checkpoint folder.

    Attributes:
        asked: The nodes that have one; the first one wrote a file.
        error: Why it could not.
        seen: The others that saw the file.
        listings: The hashes of what is in the folder.
    """

    asked: tuple[int, ...] = ()
    error: str = ""
    seen: tuple[int, ...] = ()
    listings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageReport(Part):
    """A stage of the NCCL test over all ranks.

    Attributes:
        errors: The node that reports it, the nodes that reduced, and the words.
        sets: Nodes that reduced, and bytes per second; the slowest first.
    """

    name: str = ""
    errors: tuple[tuple[int, tuple[int, ...], str], ...] = ()
    sets: tuple[tuple[tuple[int, ...], float], ...] = ()


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
    again: tuple[tuple[int, int, bool], ...] = ()
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
        wrong: The ranks on which gloo failed.
        nccl: None if it was not tested.
    """

    skipped: str = ""
    unready: tuple[tuple[int, str, float], ...] = ()
    world: int = 0
    limit: float = 0.0
    correct: int = 0
    correct_nodes: int = 0
    bus: float = 0.0
    idle: float = 0.0
    wrong: tuple[RankResult, ...] = ()
    nccl: NcclReport | None = None


@dataclass(frozen=True, slots=True)
class Report(Part):
    """What came of a meeting; all nodes get the same.

    Attributes:
        expected: How many nodes were to come.
        strangers: Those that have another rendezvous id.
        surplus: Those that came when all were there.
        blocked: Those for which the rendezvous port is closed.
        bad: From, to, at which address (``route`` or ``gloo``), and what came of it twice.
        gathered: Seconds that the nodes were waited for.
    """

    expected: int = 0
    nodes: tuple[Node, ...] = ()
    strangers: tuple[Caller, ...] = ()
    surplus: tuple[Caller, ...] = ()
    blocked: tuple[Caller, ...] = ()
    bad: tuple[tuple[int, int, str, Dialled], ...] = ()
    speed: Speeds = field(default_factory=Speeds)
    folder: Folder = field(default_factory=Folder)
    reduction: Reduction = field(default_factory=Reduction)
    gathered: float = 0.0


@dataclass(frozen=True, slots=True)
class Order(Part):
    """What the coordinator has a node do.

    Attributes:
        do: ``roster``, ``dial``, ``settle``, ``speed``, ``folder``, ``reduce``, ``leave``, ``end``.
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
        report: At the end.
    """

    do: str = ""
    index: int = -1
    token: str = ""
    targets: tuple[Target, ...] = ()
    needed: bool = False
    limit: float = 0.0
    action: str = ""
    port: int = 0
    world: int = 0
    first: int = 0
    stage_limit: float = 0.0
    patience: float = 0.0
    nccl: bool = False
    node_of: tuple[int, ...] = ()
    report: Report | None = None

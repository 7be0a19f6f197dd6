"""What the nodes send each other; each message is declared once, here.

A message is JSON (:mod:`~ddpdoctor.preflight.protocol.wire`). The decoder of the journal makes
these of it, so a field holds what is declared here, whatever was sent. Numbers of nodes are their
indices in :attr:`Report.nodes`, in the order of the node ranks; times are seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpdoctor.preflight.protocol.pairs import Dialled, Target
from ddpdoctor.preflight.protocol.report import RankResult, Report, Verdict
from ddpdoctor.preflight.protocol.validation import (
    Address,
    Count,
    Hexadecimal,
    Host,
    Index,
    Port,
    Rank,
    Word,
)
from ddpdoctor.run.records.base import Part


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

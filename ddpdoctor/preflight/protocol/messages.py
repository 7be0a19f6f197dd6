"""The messages of the nodes, and the parts of a report. Each is declared once, here.

A message is JSON (:mod:`~ddpdoctor.preflight.protocol.wire`). The decoder of the journal reads it,
so a field has its declared type, whatever was sent. Nodes are referred to by their index in
:attr:`Report.nodes`, which is ordered by node rank. Times are in seconds, bandwidths in bytes per
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpdoctor.preflight.protocol import wire
from ddpdoctor.preflight.protocol.pairs import Dialled, Speed, Target
from ddpdoctor.run.records.base import Part

# -- the parts of a report


@dataclass(frozen=True, slots=True)
class Facts(Part):
    """What a node reports about itself. Unknown texts are empty.

    Attributes:
        rank: Its ``--node-rank``; None if torchrun is to choose it.
        machine: Equal for nodes that share a machine and a network namespace.
        gloo_address: The address gloo gives to the other nodes; empty if gloo would not start.
        gloo_why: Why gloo chose it, or why gloo would not start.
        nccl_address: The same for NCCL; also empty without a GPU.
        lookup: Seconds that it takes to look up the name of this node.
        master: The MASTER_ADDR that torchrun would give to all ranks if it chose this node as its
            first; empty if that is the endpoint.
        others: Addresses of further interfaces that gloo or NCCL will use.
        interfaces: Its interfaces except loopback: name, MTU, addresses.
        down: Its interfaces that are down or have no carrier.
        unplugged: Those of them that are up but have no carrier.
        networks: The networks of each interface's addresses, up or down; a single empty one if it
            has no address.
        pair_port: The port of its listener.
        reduces: Whether it takes part in the collective test.
        no_nccl: Why NCCL cannot be tested on it.
        inside: The link between its GPUs, and its bandwidth one way; 0 if unknown.
        outside: The same for the network that NCCL will use.
        variables: Environment variables of NCCL, gloo and torch.distributed.
        commit: The checked-out commit of the script's repository.
        changes: A hash of the uncommitted changes in tracked files.
    """

    host: wire.Host
    rank: wire.Rank
    nnodes: wire.Count
    nproc: wire.Count
    machine: str
    gloo_address: wire.Address
    gloo_why: str
    nccl_address: wire.Address
    others: tuple[wire.Address, ...]
    lookup: float
    master: wire.Printable
    interfaces: tuple[tuple[wire.Interface, int, tuple[wire.Address, ...]], ...]
    down: tuple[wire.Interface, ...]
    unplugged: tuple[wire.Interface, ...]
    networks: tuple[tuple[wire.Interface, wire.Network], ...]
    pair_port: wire.Port
    reduces: bool
    gpus: wire.Count
    no_nccl: str
    inside: tuple[str, float]
    outside: tuple[str, float]
    torch: wire.Version
    nccl: wire.Version
    driver: wire.Version
    python: wire.Version
    ddpdoctor: wire.Version
    variables: dict[wire.Variable, wire.Printable]
    script: wire.Printable
    script_hash: wire.Hexadecimal
    commit: wire.Hexadecimal
    changes: wire.Hexadecimal
    folder: wire.Printable


def unpack_facts(message: Mapping[str, object]) -> Facts:
    """Decode the facts of another node, which may have another version of ddpdoctor.

    Raises:
        ValueError: They are damaged.
    """
    return wire.unpacked(Facts, message, whole=True)


@dataclass(frozen=True, slots=True)
class Stage(Part):
    """A stage of the NCCL test on one rank. Its bus bandwidth is 0 if it was not measured."""

    name: str = ""
    nodes: tuple[wire.Index, ...] = ()
    error: str = ""
    bus: float = 0.0


@dataclass(frozen=True, slots=True)
class Stages(Part):
    """The NCCL test on one rank, and the first stage for which no time was left."""

    stages: tuple[Stage, ...] = ()
    ok: bool = False
    untested: str = ""


@dataclass(frozen=True, slots=True)
class RankResult(Part):
    """The collective test on one rank.

    Attributes:
        ok: Whether gloo reduced correctly.
        did: The last collective that it did for the first time.
        wrong: The first collective with a wrong result.
        late: Whether it failed only for lack of time.
        waited: The share of the time in which it waited for a core; 1 if unknown.
        bus: Bandwidth of each link.
        idle: The share of the time in which its cores were idle.
        rounds: The number of rounds of gloo's all_reduce.
    """

    node: wire.Index = -1
    rank: int = -1
    ok: bool = False
    did: str = ""
    wrong: str = ""
    error: str = ""
    late: bool = False
    waited: float = 1.0
    bus: float = 0.0
    idle: float = 0.0
    rounds: int = 0
    stages: Stages | None = None


@dataclass(frozen=True, slots=True)
class Said(Part):
    """A finding of a check of one machine, as the other nodes show it."""

    check: wire.Word = ""
    code: wire.Code = ""
    severity: wire.Word = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Verdict(Part):
    """The outcomes of one machine's checks.

    Attributes:
        findings: Warnings and errors, the worst first.
        untested: The checks that could not run or had not ended.
    """

    findings: tuple[Said, ...] = ()
    untested: tuple[wire.Word, ...] = ()


@dataclass(frozen=True, slots=True)
class Node(Part):
    """A node that came.

    Attributes:
        address: The address at which the other nodes dial it. It belongs to the node.
        outside: The address it is seen at, if its own is translated on the way; else empty.
        offset: How far the coordinator's clock is ahead of the node's.
        uncertainty: Half a round trip of that estimate.
        lost: The phase in which it went away; empty if it stayed. ``why`` is the reason.
        late: Whether it only failed to answer in time, and is still connected.
    """

    facts: Facts
    address: wire.Address
    outside: wire.Address = ""
    offset: float = 0.0
    uncertainty: float = 0.0
    lost: str = ""
    why: str = ""
    late: bool = False


@dataclass(frozen=True, slots=True)
class Caller(Part):
    """A node that called and was not admitted. ``kind`` says why the rendezvous port is closed."""

    host: wire.Host = ""
    address: wire.Address = ""
    rank: wire.Rank = None
    kind: wire.Word = ""


@dataclass(frozen=True, slots=True)
class Speeds(Part):
    """The measured links: their number, median round trip and bandwidth, and lowest bandwidth.

    Attributes:
        slow: From, to, round trip, bandwidth.
        lossy: From, to, number of small messages, and of those that were sent again.
        cells: From and to of all measured links, if some are slow or lossy.
        starved: Links that looked slow while an end waited for a core most of the time.
        idle: From, to, an address that no library takes, and the bandwidth there, of links that are
            far slower where the job uses them.
        untested: Why no link was measured.
    """

    measured: int = 0
    rtt: float = 0.0
    bandwidth: float = 0.0
    least: float = 0.0
    slow: tuple[tuple[wire.Index, wire.Index, float, float], ...] = ()
    lossy: tuple[tuple[wire.Index, wire.Index, int, int], ...] = ()
    cells: tuple[tuple[wire.Index, wire.Index], ...] = ()
    starved: wire.Count = 0
    idle: tuple[tuple[wire.Index, wire.Index, wire.Address, float], ...] = ()
    untested: str = ""


@dataclass(frozen=True, slots=True)
class Folder(Part):
    """The test of the checkpoint directory.

    Attributes:
        asked: The nodes that have one. The first of them wrote a file.
        error: Why the file could not be written.
        seen: The other nodes that saw the file.
        listings: Hashes of the directory's contents.
    """

    asked: tuple[wire.Index, ...] = ()
    error: str = ""
    seen: tuple[wire.Index, ...] = ()
    listings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StageReport(Part):
    """A stage of the NCCL test over all ranks.

    Attributes:
        errors: The node that reports it, the nodes that reduced, and the message.
        sets: Sets of nodes that reduced, and their bandwidth, the slowest first.
    """

    name: str = ""
    errors: tuple[tuple[wire.Index, tuple[wire.Index, ...], str], ...] = ()
    sets: tuple[tuple[tuple[wire.Index, ...], float], ...] = ()


@dataclass(frozen=True, slots=True)
class NcclReport(Part):
    """The NCCL test over all ranks.

    Attributes:
        correct: Ranks with the right result in all stages.
        again: A node of a failed pair, a node that had not failed, and whether these two work.
        untested: The first stage for which no time was left.
    """

    correct: int = 0
    stages: tuple[StageReport, ...] = ()
    again: tuple[tuple[wire.Index, wire.Index, bool], ...] = ()
    untested: str = ""


@dataclass(frozen=True, slots=True)
class Reduction(Part):
    """The collective test over all ranks.

    Attributes:
        skipped: Why the test was skipped.
        reported: The checks that report this reason.
        unready: Nodes without torch: the node, the reason, and how long the others waited for it.
        limit: Seconds that gloo had; ``asked`` is what it should have had.
        correct: Ranks on which gloo reduced correctly.
        correct_nodes: Nodes on which it did so on all ranks.
        bus: The lowest value of all ranks, as are ``idle`` and ``rounds``.
        nccl: None if NCCL was not tested.
    """

    skipped: str = ""
    reported: tuple[wire.Word, ...] = ()
    unready: tuple[tuple[wire.Index, str, float], ...] = ()
    world: int = 0
    limit: float = 0.0
    asked: float = 0.0
    correct: int = 0
    correct_nodes: int = 0
    bus: float = 0.0
    idle: float = 0.0
    rounds: int = 0
    wrong: tuple[RankResult, ...] = ()
    nccl: NcclReport | None = None


@dataclass(frozen=True, slots=True)
class Report(Part):
    """The result of a meeting, the same on all nodes.

    Attributes:
        rejected: Callers with another rendezvous id, or none.
        rejected_calls: The number of their calls.
        surplus: Callers that came when all nodes were there.
        blocked: Callers for which the rendezvous port is closed.
        bad: Connections that failed twice: from, to, kind of address (``route``, ``gloo``,
            ``gloo back``, ``nccl``, ``other 0``), and the result.
        open: From, to, and another address at which the node is reached, though a connection above
            failed.
        lost_names: Nodes that do not find the first one by the name that torchrun gives them,
            the addresses of that name there, and why there are none.
        verdicts: By node.
        gathered: How long node 0 waited for the nodes.
    """

    expected: wire.Count = 0
    nodes: tuple[Node, ...] = ()
    rejected: tuple[Caller, ...] = ()
    rejected_calls: int = 0
    surplus: tuple[Caller, ...] = ()
    blocked: tuple[Caller, ...] = ()
    bad: tuple[tuple[wire.Index, wire.Index, wire.Word, Dialled], ...] = ()
    open: tuple[tuple[wire.Index, wire.Index, wire.Address], ...] = ()
    speed: Speeds = field(default_factory=Speeds)
    folder: Folder = field(default_factory=Folder)
    reduction: Reduction = field(default_factory=Reduction)
    lost_names: tuple[tuple[wire.Index, tuple[wire.Address, ...], str], ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    gathered: float = 0.0


# -- messages


@dataclass(frozen=True, slots=True)
class Hello(Part):
    """From a caller to the coordinator: first its proof, then clock questions, or a problem.

    Attributes:
        blocked: Why the rendezvous port is closed for a caller at the spare port.
        called: The address of the coordinator that was called.
        offset: How far the coordinator's clock is ahead of the node's.
        uncertainty: Half a round trip of that estimate.
    """

    proof: wire.Hexadecimal = ""
    nonce: wire.Hexadecimal = ""
    host: wire.Host = ""
    rank: wire.Rank = None
    blocked: wire.Word = ""
    called: wire.Address = ""
    offset: float = 0.0
    uncertainty: float = 0.0


@dataclass(frozen=True, slots=True)
class Welcome(Part):
    """From the coordinator to a caller.

    Attributes:
        identity: A random number of this coordinator.
        refused: ``id``, ``late`` or ``full``; empty if the caller may stay.
        here: The host names of the nodes that are there, if it is refused.
        reached: The address of the coordinator's machine at which the connection ended.
    """

    proof: wire.Hexadecimal = ""
    identity: wire.Hexadecimal = ""
    refused: wire.Word = ""
    here: tuple[wire.Host, ...] = ()
    nnodes: wire.Count = 0
    time: float = 0.0
    reached: wire.Address = ""


@dataclass(frozen=True, slots=True)
class Order(Part):
    """From the coordinator to a node: what to do.

    Attributes:
        do: ``roster``, ``resolve``, ``dial``, ``settle``, ``speed``, ``folder``, ``reduce``,
            ``verdict``, ``leave``, ``end``.
        index: The node's own index, for a roster.
        token: Proves to other nodes that it is part of this check. Names the file in the directory.
        host: The name to resolve.
        targets: The nodes to dial; a single one for ``speed``.
        needed: Whether the ranks have to import torch.
        limit: Seconds for the order.
        action: In the directory: ``write``, ``look`` or ``remove``.
        port: The port of the store. This and the fields up to ``soak`` are for ``reduce``.
        first: The rank of the node's first process.
        stage_limit: Seconds for each stage of NCCL.
        patience: Seconds for all stages.
        soak: Seconds for which the all_reduce over all ranks is repeated.
    """

    do: wire.Word = ""
    index: wire.Index = -1
    token: wire.Hexadecimal = ""
    host: wire.Printable = ""
    targets: tuple[Target, ...] = ()
    needed: bool = False
    limit: float = 0.0
    action: wire.Word = ""
    port: wire.Port = 0
    world: wire.Count = 0
    first: wire.Count = 0
    stage_limit: float = 0.0
    patience: float = 0.0
    nccl: bool = False
    node_of: tuple[wire.Index, ...] = ()
    soak: float = 0.0
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class Answer(Part):
    """From a node to the coordinator: the result of an order.

    Attributes:
        failed: Why it could not carry out the order.
        dialled: The results in the order of the targets.
        unready: Why not all of its ranks have imported torch.
        addresses: The addresses of the name.
        error: Why it has none, or why the file in the checkpoint directory was not written.
        seen: Whether that file is in its checkpoint directory.
        listing: A hash of that directory's contents.
    """

    failed: str = ""
    dialled: tuple[Dialled, ...] = ()
    unready: str = ""
    speed: Speed | None = None
    addresses: tuple[wire.Address, ...] = ()
    error: str = ""
    seen: bool = False
    listing: wire.Hexadecimal = ""
    ranks: tuple[RankResult, ...] = ()
    verdict: Verdict = field(default_factory=Verdict)

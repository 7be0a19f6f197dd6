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
    """What a node reports about itself. Unknown texts are empty."""

    host: wire.Host
    rank: wire.Rank  # Its ``--node-rank``; None if torchrun is to choose it
    nnodes: wire.Count
    nproc: wire.Count
    machine: str  # Equal for nodes that share a machine and a network namespace
    gloo_address: wire.Address
    """The address gloo gives to the other nodes; empty if gloo would not start."""
    gloo_why: str  # Why gloo chose it, or why gloo would not start
    nccl_address: wire.Address  # The same for NCCL; also empty without a GPU
    others: tuple[wire.Address, ...]  # Addresses of further interfaces that gloo or NCCL will use
    lookup: float  # Seconds that it takes to look up the name of this node
    master: wire.Printable
    """The MASTER_ADDR that torchrun would give to all ranks if it chose this node as its first;
    empty if that is the endpoint."""
    interfaces: tuple[tuple[wire.Interface, int, tuple[wire.Address, ...]], ...]
    """Its interfaces except loopback: name, MTU, addresses."""
    down: tuple[wire.Interface, ...]  # Its interfaces that are down or have no carrier
    unplugged: tuple[wire.Interface, ...]  # Those of them that are up but have no carrier
    networks: tuple[tuple[wire.Interface, wire.Network], ...]
    """The networks of each interface's addresses, up or down; a single empty one if it has no
    address."""
    pair_port: wire.Port  # The port of its listener
    reduces: bool  # Whether it takes part in the collective test
    gpus: wire.Count
    no_nccl: str  # Why NCCL cannot be tested on it
    inside: tuple[str, float]  # The link between its GPUs, and its bandwidth one way; 0 if unknown
    outside: tuple[str, float]  # The same for the network that NCCL will use
    torch: wire.Version
    nccl: wire.Version
    driver: wire.Version
    python: wire.Version
    ddpdoctor: wire.Version
    variables: dict[wire.Variable, wire.Printable]
    """Environment variables of NCCL, gloo and torch.distributed."""
    script: wire.Printable
    script_hash: wire.Hexadecimal
    commit: wire.Hexadecimal  # The checked-out commit of the script's repository
    changes: wire.Hexadecimal  # A hash of the uncommitted changes in tracked files
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
    """The collective test on one rank."""

    node: wire.Index = -1
    rank: int = -1
    ok: bool = False  # Whether gloo reduced correctly
    did: str = ""  # The last collective that it did for the first time
    wrong: str = ""  # The first collective with a wrong result
    error: str = ""
    late: bool = False  # Whether it failed only for lack of time
    waited: float = 1.0  # The share of the time in which it waited for a core; 1 if unknown
    bus: float = 0.0  # Bandwidth of each link
    idle: float = 0.0  # The share of the time in which its cores were idle
    rounds: int = 0  # The number of rounds of gloo's all_reduce
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
    """The outcomes of one machine's checks."""

    findings: tuple[Said, ...] = ()  # Warnings and errors, the worst first
    untested: tuple[wire.Word, ...] = ()  # The checks that could not run or had not ended


@dataclass(frozen=True, slots=True)
class Node(Part):
    """A node that came."""

    facts: Facts
    address: wire.Address  # The address at which the other nodes dial it. It belongs to the node.
    outside: wire.Address = ""
    """The address it is seen at, if its own is translated on the way; else empty."""
    offset: float = 0.0  # How far the coordinator's clock is ahead of the node's
    uncertainty: float = 0.0  # Half a round trip of that estimate
    lost: str = ""  # The phase in which it went away; empty if it stayed. ``why`` is the reason.
    why: str = ""
    late: bool = False  # Whether it only failed to answer in time, and is still connected


@dataclass(frozen=True, slots=True)
class Caller(Part):
    """A node that called and was not admitted. ``kind`` says why the rendezvous port is closed."""

    host: wire.Host = ""
    address: wire.Address = ""
    rank: wire.Rank = None
    kind: wire.Word = ""


@dataclass(frozen=True, slots=True)
class Speeds(Part):
    """The measured links: their number, median round trip and bandwidth, and lowest bandwidth."""

    measured: int = 0
    rtt: float = 0.0
    bandwidth: float = 0.0
    least: float = 0.0
    slow: tuple[tuple[wire.Index, wire.Index, float, float], ...] = ()
    """From, to, round trip, bandwidth."""
    lossy: tuple[tuple[wire.Index, wire.Index, int, int], ...] = ()
    """From, to, number of small messages, and of those that were sent again."""
    cells: tuple[tuple[wire.Index, wire.Index], ...] = ()
    """From and to of all measured links, if some are slow or lossy."""
    starved: wire.Count = 0
    """Links that looked slow while an end waited for a core most of the time."""
    idle: tuple[tuple[wire.Index, wire.Index, wire.Address, float], ...] = ()
    """From, to, an address that no library takes, and the bandwidth there, of links that are far
    slower where the job uses them."""
    untested: str = ""  # Why no link was measured


@dataclass(frozen=True, slots=True)
class Folder(Part):
    """The test of the checkpoint directory."""

    asked: tuple[wire.Index, ...] = ()  # The nodes that have one. The first of them wrote a file.
    error: str = ""  # Why the file could not be written
    seen: tuple[wire.Index, ...] = ()  # The other nodes that saw the file
    listings: tuple[str, ...] = ()  # Hashes of the directory's contents


@dataclass(frozen=True, slots=True)
class StageReport(Part):
    """A stage of the NCCL test over all ranks."""

    name: str = ""
    errors: tuple[tuple[wire.Index, tuple[wire.Index, ...], str], ...] = ()
    """The node that reports it, the nodes that reduced, and the message."""
    sets: tuple[tuple[tuple[wire.Index, ...], float], ...] = ()
    """Sets of nodes that reduced, and their bandwidth, the slowest first."""


@dataclass(frozen=True, slots=True)
class NcclReport(Part):
    """The NCCL test over all ranks."""

    correct: int = 0  # Ranks with the right result in all stages
    stages: tuple[StageReport, ...] = ()
    again: tuple[tuple[wire.Index, wire.Index, bool], ...] = ()
    """A node of a failed pair, a node that had not failed, and whether these two work."""
    untested: str = ""  # The first stage for which no time was left


@dataclass(frozen=True, slots=True)
class Reduction(Part):
    """The collective test over all ranks."""

    skipped: str = ""  # Why the test was skipped
    reported: tuple[wire.Word, ...] = ()  # The checks that report this reason
    unready: tuple[tuple[wire.Index, str, float], ...] = ()
    """Nodes without torch: the node, the reason, and how long the others waited for it."""
    world: int = 0
    limit: float = 0.0  # Seconds that gloo had; ``asked`` is what it should have had
    asked: float = 0.0
    correct: int = 0  # Ranks on which gloo reduced correctly
    correct_nodes: int = 0  # Nodes on which it did so on all ranks
    bus: float = 0.0  # The lowest value of all ranks, as are ``idle`` and ``rounds``
    idle: float = 0.0
    rounds: int = 0
    wrong: tuple[RankResult, ...] = ()
    nccl: NcclReport | None = None  # None if NCCL was not tested


@dataclass(frozen=True, slots=True)
class Report(Part):
    """The result of a meeting, the same on all nodes."""

    expected: wire.Count = 0
    nodes: tuple[Node, ...] = ()
    rejected: tuple[Caller, ...] = ()  # Callers with another rendezvous id, or none
    rejected_calls: int = 0  # The number of their calls
    surplus: tuple[Caller, ...] = ()  # Callers that came when all nodes were there
    blocked: tuple[Caller, ...] = ()  # Callers for which the rendezvous port is closed
    bad: tuple[tuple[wire.Index, wire.Index, wire.Word, Dialled], ...] = ()
    """Connections that failed twice: from, to, kind of address (``route``, ``gloo``, ``gloo back``,
    ``nccl``, ``other 0``), and the result."""
    open: tuple[tuple[wire.Index, wire.Index, wire.Address], ...] = ()
    """From, to, and another address at which the node is reached, though a connection above failed.
    """
    speed: Speeds = field(default_factory=Speeds)
    folder: Folder = field(default_factory=Folder)
    reduction: Reduction = field(default_factory=Reduction)
    lost_names: tuple[tuple[wire.Index, tuple[wire.Address, ...], str], ...] = ()
    """Nodes that do not find the first one by the name that torchrun gives them, the addresses of
    that name there, and why there are none."""
    verdicts: tuple[Verdict, ...] = ()  # By node
    gathered: float = 0.0  # How long node 0 waited for the nodes


# -- messages


@dataclass(frozen=True, slots=True)
class Hello(Part):
    """From a caller to the coordinator: first its proof, then clock questions, or a problem."""

    proof: wire.Hexadecimal = ""
    nonce: wire.Hexadecimal = ""
    host: wire.Host = ""
    rank: wire.Rank = None
    blocked: wire.Word = ""  # Why the rendezvous port is closed for a caller at the spare port
    called: wire.Address = ""  # The address of the coordinator that was called
    offset: float = 0.0  # How far the coordinator's clock is ahead of the node's
    uncertainty: float = 0.0  # Half a round trip of that estimate


@dataclass(frozen=True, slots=True)
class Welcome(Part):
    """From the coordinator to a caller."""

    proof: wire.Hexadecimal = ""
    identity: wire.Hexadecimal = ""  # A random number of this coordinator
    refused: wire.Word = ""  # ``id``, ``late`` or ``full``; empty if the caller may stay
    here: tuple[wire.Host, ...] = ()  # The host names of the nodes that are there, if it is refused
    nnodes: wire.Count = 0
    time: float = 0.0
    reached: wire.Address = ""
    """The address of the coordinator's machine at which the connection ended."""


@dataclass(frozen=True, slots=True)
class Order(Part):
    """From the coordinator to a node: what to do."""

    do: wire.Word = ""
    """``roster``, ``resolve``, ``dial``, ``settle``, ``speed``, ``folder``, ``reduce``,
    ``verdict``, ``leave``, ``end``."""
    index: wire.Index = -1  # The node's own index, for a roster
    token: wire.Hexadecimal = ""
    """Proves to other nodes that it is part of this check. Names the file in the directory."""
    host: wire.Printable = ""  # The name to resolve
    targets: tuple[Target, ...] = ()  # The nodes to dial; a single one for ``speed``
    needed: bool = False  # Whether the ranks have to import torch
    limit: float = 0.0  # Seconds for the order
    action: wire.Word = ""  # In the directory: ``write``, ``look`` or ``remove``
    port: wire.Port = 0
    """The port of the store. This and the fields up to ``soak`` are for ``reduce``."""
    world: wire.Count = 0
    first: wire.Count = 0  # The rank of the node's first process
    stage_limit: float = 0.0  # Seconds for each stage of NCCL
    patience: float = 0.0  # Seconds for all stages
    nccl: bool = False
    node_of: tuple[wire.Index, ...] = ()
    soak: float = 0.0  # Seconds for which the all_reduce over all ranks is repeated
    report: Report | None = None


@dataclass(frozen=True, slots=True)
class Answer(Part):
    """From a node to the coordinator: the result of an order."""

    failed: str = ""  # Why it could not carry out the order
    dialled: tuple[Dialled, ...] = ()  # The results in the order of the targets
    unready: str = ""  # Why not all of its ranks have imported torch
    speed: Speed | None = None
    addresses: tuple[wire.Address, ...] = ()  # The addresses of the name
    error: str = ""  # Why it has none, or why the file in the checkpoint directory was not written
    seen: bool = False  # Whether that file is in its checkpoint directory
    listing: wire.Hexadecimal = ""  # A hash of that directory's contents
    ranks: tuple[RankResult, ...] = ()
    verdict: Verdict = field(default_factory=Verdict)

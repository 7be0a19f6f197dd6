"""Plan the runs of ``ddpdoctor scale``: sizes, variants, repeats and command lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import count
from ddpdoctor.core.options import Given, Passed
from ddpdoctor.run.overrides import DDP, KNOWN


class Size(NamedTuple):
    """How many ranks, and where."""

    nodes: int
    local: int
    """Ranks on each node."""

    @property
    def ranks(self) -> int:
        """Ranks of all nodes."""
        return self.nodes * self.local

    @property
    def words(self) -> str:
        """The size in words: ``4 ranks on 2 nodes``."""
        on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{count(self.ranks, 'rank')}{on}"

    @property
    def short(self) -> str:
        """The size in a column: ``4``, or ``2x8`` for two nodes with eight ranks each."""
        return f"{self.nodes}x{self.local}" if self.nodes > 1 else str(self.local)

    @property
    def order(self) -> tuple[int, int]:
        """The key to sort by: ranks, then nodes."""
        return self.ranks, self.nodes


@dataclass(frozen=True)
class Variant:
    """The job as it is, or with arguments of torch's overridden."""

    name: str = ""
    """``bucket_cap_mb=25``. Empty for the job as it is."""
    overrides: dict[str, str] = field(default_factory=dict)

    @property
    def communicates(self) -> bool:
        """Whether it changes communication alone, which one rank does not have."""
        return all(KNOWN[name].owner == DDP for name in self.overrides)


AS_IT_IS = Variant()


class Planned(NamedTuple):
    """One run."""

    number: int
    """From 1, in order. It is the same on every node."""
    size: Size
    variant: Variant
    repeat: int
    """From 1."""

    @property
    def words(self) -> str:
        """The run in words: ``2 ranks, bucket_cap_mb=25``."""
        return f"{self.size.words}, {self.variant.name}" if self.variant.name else self.size.words

    @property
    def directory(self) -> str:
        """The name of the run directory."""
        variant = f"-{self.variant.name}" if self.variant.name else ""
        return f"{self.number:03d}-ranks-{self.size.short}{variant}"


def sizes(nodes: Sequence[int], local: Sequence[int]) -> list[Size]:
    """Return all sizes, the smallest first."""
    return sorted((Size(n, each) for n in nodes for each in local), key=lambda size: size.order)


def variants(
    tried: Sequence[tuple[str, tuple[str, ...]]], compared: Sequence[str]
) -> list[Variant]:
    """Return the job as it is, and a variant for each value to try.

    Args:
        tried: Names of arguments, each with its values.
        compared: Implementations of DDP. ``torch`` is the job as it is.
    """
    found = [AS_IT_IS]
    found += [Variant(name, {"ddp": name}) for name in compared if name != "torch"]
    for name, values in tried:
        found += [Variant(f"{name}={value}", {name: value}) for value in values]
    return found


def plan(sizes: Sequence[Size], variants: Sequence[Variant], repeats: int) -> Iterator[Planned]:
    """Yield the runs in order: each repeat goes once through all sizes, the smallest first.

    So changes on the machine affect every size alike.
    """
    number = 0
    for repeat in range(1, repeats + 1):
        for size in sizes:
            for variant in variants:
                compares = "ddp" in variant.overrides
                if variant.overrides and variant.communicates and size.ranks == 1 and not compares:
                    continue
                number += 1
                yield Planned(number, size, variant, repeat)


DEFAULT_PORT = 29500

MEETING_TIMEOUT = 3600
"""Seconds for which a node waits for the others, which may be in a run of fewer nodes."""

_SIZE_OPTIONS = ("--nproc-per-node", "--nnodes")
_RENDEZVOUS_OPTIONS = (
    "--node-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--master-addr",
    "--master-port", "--standalone",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How the job is started at any size.

    Attributes:
        typed: Options of ``ddpdoctor run`` and torchrun for every run.
        rest: The script and its arguments.
        alone: Whether a run on one node chooses a free port.
        node: The rank of this node.
        host: The host of node 0.
        port: The port of the first run. Each run has its own, since a node may still be in the run
            before.
    """

    typed: tuple[str, ...]
    rest: tuple[str, ...]
    alone: bool = True
    node: int = 0
    host: str = ""
    port: int = 0

    def takes_part(self, planned: Planned) -> bool:
        """Return whether a run needs this node."""
        return self.node < planned.size.nodes

    def words(self, planned: Planned) -> list[str]:
        """Return the arguments of ``ddpdoctor run`` for a run."""
        local = ["--nproc-per-node", str(planned.size.local)]
        rendezvous = ["--standalone"] if self.alone else []
        if planned.size.nodes > 1:
            rendezvous = [
                *("--nnodes", str(planned.size.nodes), "--node-rank", str(self.node)),
                *("--master-addr", self.host, "--master-port", str(self.port + planned.number - 1)),
            ]
        return [*self.typed, *rendezvous, *local, "--", *self.rest]


def launch_from(given: Given, nodes: Sequence[int]) -> Launch:
    """Read how the job is started from the command line.

    Args:
        given: The command line.
        nodes: The numbers of nodes to run on.

    Raises:
        DoctorError: An option is missing, or cannot be used with scale.
    """
    values = {_spelled_option(each): each.value or "" for each in given.passed}
    for name in _SIZE_OPTIONS:
        if name in values:
            raise DoctorError(f"{name} is what scale varies", "name the sizes: --nproc 1,2,4")
    if max(nodes) == 1:
        alone = not any(name in values for name in _RENDEZVOUS_OPTIONS)
        return Launch(_option_words(given.passed), tuple(given.rest), alone=alone)
    typed = _option_words(
        [each for each in given.passed if _spelled_option(each) not in _RENDEZVOUS_OPTIONS]
    )
    if "--rdzv-conf" not in values:
        typed += ("--rdzv-conf", f"timeout={MEETING_TIMEOUT}")
    node, host, port = _rendezvous(values)
    if node >= max(nodes):
        raise DoctorError(f"--node-rank {node} is none of {max(nodes)} nodes, which count from 0")
    return Launch(typed, tuple(given.rest), node=node, host=host, port=port)


def _option_words(options: Sequence[Passed]) -> tuple[str, ...]:
    return tuple(word for each in options for word in each.words)


def _rendezvous(values: Mapping[str, str]) -> tuple[int, str, int]:
    """Return the rank of this node, and the host and port of the rendezvous.

    Raises:
        DoctorError: An option is missing, or is no number.
    """
    parts = (values.get("--master-addr"), values.get("--master-port"))
    endpoint = values.get("--rdzv-endpoint") or ":".join(part for part in parts if part)
    host, _, port = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", "")
    node = values.get("--node-rank", "")
    if not host or not node.isdigit() or not (port or "0").isdigit():
        raise DoctorError(
            "several nodes need --node-rank and --rdzv-endpoint",
            "start it on each: --nnodes 1,2 --node-rank R --rdzv-endpoint node0:29500",
        )
    return int(node), host, int(port or DEFAULT_PORT)


def _spelled_option(option: Passed) -> str:
    return option.name.replace("_", "-")

"""The command line of each run, on one node or as one of several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.options import Given, Passed
from ddpdoctor.scale.plan import Planned

DEFAULT_PORT = 29500

PATIENCE = 3600
"""Seconds for which a node waits for the others: they may be in a run of fewer nodes."""

_SIZES = ("--nproc-per-node", "--nnodes")
_MEETING = (
    "--node-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--master-addr",
    "--master-port", "--standalone",
)  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """How the job is started at any size.

    Attributes:
        typed: Options of ``ddpdoctor run`` and torchrun for every run.
        rest: The script and its arguments.
        alone: Whether a run on one node chooses a free port to meet at.
        node: Which of several nodes this is.
        host: Where node 0 is.
        port: The port of the first run; each one has its own, since a node may still be in the one
            before when others are not.
    """

    typed: tuple[str, ...]
    rest: tuple[str, ...]
    alone: bool = True
    node: int = 0
    host: str = ""
    port: int = 0

    def takes_part(self, planned: Planned) -> bool:
        """Whether a run needs this node."""
        return self.node < planned.size.nodes

    def words(self, planned: Planned) -> list[str]:
        """What stands behind ``ddpdoctor run`` for a run."""
        local = ["--nproc-per-node", str(planned.size.local)]
        return [*self.typed, *self._meeting(planned), *local, "--", *self.rest]

    def _meeting(self, planned: Planned) -> list[str]:
        if planned.size.nodes == 1:
            return ["--standalone"] if self.alone else []
        return [
            *("--nnodes", str(planned.size.nodes), "--node-rank", str(self.node)),
            *("--master-addr", self.host, "--master-port", str(self.port + planned.number - 1)),
        ]


def launch(given: Given, nodes: Sequence[int]) -> Launch:
    """What a command line says of it.

    Args:
        given: The command line.
        nodes: The numbers of nodes to run on.

    Raises:
        DoctorError: An option is missing, or has no place here.
    """
    values = {_spelled(each): each.value or "" for each in given.passed}
    for name in _SIZES:
        if name in values:
            raise DoctorError(f"{name} is what scale varies", "name the sizes: --nproc 1,2,4")
    if max(nodes) == 1:
        alone = not any(name in values for name in _MEETING)
        return Launch(_words(given.passed), tuple(given.rest), alone=alone)
    typed = _words([each for each in given.passed if _spelled(each) not in _MEETING])
    if "--rdzv-conf" not in values:
        typed += ("--rdzv-conf", f"timeout={PATIENCE}")
    node, host, port = _meeting_point(values)
    if node >= max(nodes):
        raise DoctorError(f"--node-rank {node} is none of {max(nodes)} nodes, which count from 0")
    return Launch(typed, tuple(given.rest), node=node, host=host, port=port)


def _words(options: Sequence[Passed]) -> tuple[str, ...]:
    return tuple(word for each in options for word in each.words)


def _meeting_point(values: Mapping[str, str]) -> tuple[int, str, int]:
    """The rank of this node, and host and port at which it meets the others.

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


def _spelled(option: Passed) -> str:
    return option.name.replace("_", "-")

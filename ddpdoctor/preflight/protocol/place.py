"""Which node of which job this is: from the options, else from the launcher's variables."""

from __future__ import annotations

from dataclasses import dataclass

from ddpdoctor.preflight.machine.launchers import places
from ddpdoctor.preflight.situation import DEFAULT_PORT, Situation, joined_endpoint


@dataclass(frozen=True)
class Seat:
    """A node's place in the job.

    Attributes:
        nnodes: Nodes of the job.
        rank: This node's rank; None if torchrun is to choose.
        host: The rendezvous host; empty if nobody said.
        port: The rendezvous port.
        rdzv_id: The rendezvous id.
        names: The nodes' host names by rank, where the launcher tells them.
    """

    nnodes: int
    rank: int | None
    host: str
    port: int
    rdzv_id: str
    names: tuple[str, ...] = ()

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``, as ``--rdzv-endpoint`` takes it."""
        return joined_endpoint(self.host, self.port)

    def name(self, rank: int) -> str:
        """A node by its rank, and by its host name where that is known."""
        if 0 <= rank < len(self.names):
            return f"{self.names[rank]} (node rank {rank})"
        return f"node rank {rank}"


def seat(situation: Situation) -> Seat:
    """This node's place: what was typed counts, then what Slurm or MPI says."""
    options = situation.options
    nnodes, rank = options.nnodes, options.node_rank
    names: tuple[str, ...] = ()
    rdzv_id = options.rdzv_id
    for place in places(situation.environ):
        if place.launcher == "torchrun":
            continue
        if place.nnodes and nnodes == 1:
            nnodes = place.nnodes
        if rank is None and place.node_rank is not None:
            rank = place.node_rank
        if place.hosts and len(place.hosts) == nnodes:
            names = names or place.hosts
    if not rdzv_id:
        rdzv_id = situation.environ.get("SLURM_JOB_ID", "none")
    endpoint = situation.endpoint
    if endpoint is None and names:
        endpoint = (names[0], DEFAULT_PORT)
    host, port = endpoint or ("", DEFAULT_PORT)
    return Seat(nnodes, rank, host, port, rdzv_id, names)

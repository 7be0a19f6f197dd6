"""Which node of which job this is: by the options, else by the launcher's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ddpdoctor.preflight.situation import DEFAULT_PORT, Situation, joined_endpoint


@dataclass(frozen=True)
class Place:
    """What a launcher says of a process; None where it says nothing, or no number.

    Attributes:
        launcher: ``torchrun``, ``Slurm``, ``Open MPI``, ``MPICH`` or ``MVAPICH``.
        hosts: The nodes' names in the order of their ranks, if they are known.
    """

    launcher: str
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()


_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")

_VARIABLES = {
    "torchrun": _TORCH,
    "Slurm": (
        "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_NNODES",
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_NODE_RANK", "",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE", "", "",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "", ""),
}  # fmt: skip
"""By launcher: rank, world size, local rank, ranks of the node, node rank, nodes.

Sources: torchrun's documentation, "Environment Variables"; srun(1), "OUTPUT ENVIRONMENT VARIABLES";
Open MPI's FAQ on OMPI_COMM_WORLD_*; MPICH's Hydra and Intel MPI (PMI_*, MPI_LOCALRANKID).
Open MPI's NODE_RANK is a rank within the node across jobs, so it is not a node's rank.
"""


def number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable as a number; None if it is not there, or is none."""
    text = environ.get(name, "") if name else ""
    return int(text) if text.strip().isdigit() else None


def places(environ: Mapping[str, str]) -> tuple[Place, ...]:
    """What each launcher that left its variables says, torch's own first."""
    return tuple(
        _slurm(environ, place) if launcher == "Slurm" else place
        for launcher, names in _VARIABLES.items()
        # In a batch script or an `salloc` shell there is a job of Slurm, but no task yet.
        if any(name in environ for name in names[:2])
        and (launcher != "Slurm" or {"SLURM_PROCID", "SLURM_STEP_ID"} <= environ.keys())
        for place in [_place(environ, launcher, names)]
    )


def _place(environ: Mapping[str, str], launcher: str, names: Sequence[str]) -> Place:
    rank, world, local, size, node, nodes = (number(environ, name) for name in names)
    if launcher == "Open MPI":
        node = None
    if size == 1 and nodes is None and world is not None:
        # One process on each node: its rank is the node's.
        node, nodes = rank, world
    elif nodes is None and launcher != "torchrun" and size and world and world % size == 0:
        # As many on each node; which of them are on which only the launcher knows.
        nodes = world // size
    return Place(launcher, rank, world, local, size, node, nodes)


def _slurm(environ: Mapping[str, str], place: Place) -> Place:
    """With the step's own numbers, if they are there.

    The shell of `salloc` may be a step with one task, whose other variables are the job's.
    """
    world = number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = [number(environ, "SLURM_STEP_NUM_NODES"), place.nnodes]
    nodes.append(number(environ, "SLURM_JOB_NUM_NODES"))
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return replace(
        place,
        world_size=place.world_size if world is None else world,
        nnodes=next((each for each in nodes if each is not None), None),
        hosts=expand(listed),
    )


def expand(nodelist: str) -> tuple[str, ...]:
    """The names in a Slurm node list such as ``gpu[01-03,7],login``; empty if it is damaged."""
    names: list[str] = []
    if nodelist.count("[") != nodelist.count("]"):
        return ()
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            if not text and not ranges:
                continue
            choices = _choices(ranges) if ranges else [""]
            if choices is None or len(expanded) * len(choices) > 100_000:
                return ()
            expanded = [f"{head}{text}{tail}" for head in expanded for tail in choices]
        names += expanded
    return tuple(names)


def _choices(ranges: str) -> list[str] | None:
    choices: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return None
        end = int(last) if dash else int(first)
        if end - int(first) > 100_000:
            return None
        choices += [str(value).zfill(len(first)) for value in range(int(first), end + 1)]
    return choices


@dataclass(frozen=True)
class Seat:
    """A node's place in the job.

    Attributes:
        nnodes: Nodes of the job.
        rank: This node's rank; None if torchrun is to choose.
        host: The rendezvous host; empty if it was not given.
        port: The rendezvous port.
        rdzv_id: The rendezvous id.
        names: The nodes' host names by rank, where the launcher reports them.
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

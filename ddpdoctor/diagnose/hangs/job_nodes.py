"""The nodes of a job that makes no progress: host names, and the line that checks them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddpdoctor.core.formatting import listed, named
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import StoreRecord
from ddpdoctor.run.snapshot import Run

CHECK = "To see why, stop the job and check all nodes. On this one:"


@dataclass(frozen=True)
class JobNodes:
    """The nodes of a job, as far as one of them knows them.

    Attributes:
        number: How many there are.
        nproc: The ranks of each, as it was given; empty if it is not known.
        own: The rank of this node; empty if it is not known.
        endpoint: Where they meet; empty if it is not known.
        rdzv_id: The id of the job, if one was given.
        hosts: Host names by rank.
        rest: The host name of all other ranks, if they can be nowhere else.
    """

    number: int
    nproc: str = ""
    own: str = ""
    endpoint: str = ""
    rdzv_id: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    rest: str = ""

    @property
    def check_line(self) -> str:
        """The line that checks the nodes, for this one."""
        options = {
            "--node-rank": self.own,
            "--nproc-per-node": self.nproc,
            "--rdzv-endpoint": self.endpoint,
            "--rdzv-id": self.rdzv_id,
        }
        words = ["ddpdoctor", "check", "--nnodes", str(self.number)]
        words += [word for name, value in options.items() if value for word in (name, value)]
        return shlex.join(words)

    def places(self, ranks: Sequence[int]) -> str:
        """Name ranks by their nodes: ``ranks 2 and 3 (node1)``."""
        each = int(self.nproc) if self.nproc.isdigit() else 0
        nodes = [
            self.hosts.get(rank)
            or self.rest
            or (f"node rank {rank // each}" if each else "another node")
            for rank in ranks
        ]
        return f"{named(ranks)} ({listed(list(dict.fromkeys(nodes)), 4)})"


def job_nodes(run: Run) -> JobNodes | None:
    """Return the nodes of a job; None for a job of one node."""
    command = run.manifest
    nnodes = option(command, "--nnodes").rpartition(":")[2]
    stores = [record for rank in run.last for record in rank.records.of(StoreRecord)]
    store = next((each for each in stores if each.local_world_size), StoreRecord())
    world = max((rank.opened.world_size for rank in run.last), default=0)
    number = int(nnodes) if nnodes.isdigit() else 0
    if not nnodes and store.local_world_size:
        number = -(-world // store.local_world_size)
    if number < 2:
        return None
    here = [rank.rank for rank in run.last if not rank.elsewhere]
    own = option(command, "--node-rank")
    if not own and store.local_world_size and here:
        own = str(min(here) // store.local_world_size)
    host = option(command, "--master-addr")
    endpoint = option(command, "--rdzv-endpoint")
    if not endpoint and host:
        endpoint = f"{host}:{option(command, '--master-port') or 29500}"
    if not endpoint and store.host:
        endpoint = f"{store.host}:{store.port}"
    hosts = dict.fromkeys(here, str(command.get("host") or ""))
    unseen = []
    for node in run.nodes:
        there = [rank.rank for rank in run.ranks_on(node)]
        hosts |= dict.fromkeys(there, node.host)
        unseen += [] if there else [node.host]
    all_known = len(run.nodes) == number - 1 and len(unseen) == 1
    return JobNodes(
        number,
        option(command, "--nproc-per-node") or str(store.local_world_size or ""),
        own,
        endpoint,
        option(command, "--rdzv-id"),
        hosts,
        unseen[0] if all_known else "",
    )


def option(manifest: JsonObject, name: str) -> str:
    """Return the value of torchrun's option in a job's command, in either spelling."""
    command = manifest.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    for spelling in (name, name[:2] + name[2:].replace("-", "_")):
        for at, word in enumerate(words):
            if word == spelling and at + 1 < len(words):
                return words[at + 1]
            if word.startswith(f"{spelling}="):
                return word.partition("=")[2]
    return ""

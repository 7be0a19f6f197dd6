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

    number: int = 1
    nproc: str = ""
    own: str = ""
    endpoint: str = ""
    rdzv_id: str = ""
    hosts: Mapping[int, str] = field(default_factory=dict)
    rest: str = ""

    @property
    def several(self) -> bool:
        """Whether there are others than this one."""
        return self.number > 1

    @property
    def check_line(self) -> str:
        """The line that checks the nodes, for this one; empty for a single node."""
        options = {
            "--node-rank": self.own,
            "--nproc-per-node": self.nproc,
            "--rdzv-endpoint": self.endpoint,
            "--rdzv-id": self.rdzv_id,
        }
        words = ["ddpdoctor", "check", "--nnodes", str(self.number)]
        words += [word for name, value in options.items() if value for word in (name, value)]
        return shlex.join(words) if self.several else ""

    def and_check(self, fix: str) -> str:
        """Add to a fix that the line to paste is that of the check."""
        return f"{fix} {CHECK}" if self.several else fix

    def places(self, ranks: Sequence[int]) -> str:
        """Name ranks by their nodes: ``ranks 2 and 3 (node1)``."""
        each = _whole(self.nproc)
        nodes = [
            self.hosts.get(rank) or self.rest or (f"node rank {rank // each}" if each else "")
            for rank in ranks
        ]
        known = f"({listed(list(dict.fromkeys(nodes)), 4)})" if all(nodes) else "of other nodes"
        return f"{named(ranks)} {known}"


def job_nodes(run: Run) -> JobNodes:
    """Return the nodes of a job: by torchrun's options, else by what its ranks recorded."""
    given = run.manifest
    stores = filter(None, (rank.records.first(StoreRecord) for rank in run.last))
    store = next(stores, StoreRecord())
    local = store.local_world_size
    here = [rank.rank for rank in run.last if not rank.elsewhere]
    number = _whole(option(given, "--nnodes").rpartition(":")[2])
    if local and not number:
        number = -(-max(rank.opened.world_size for rank in run.last) // local)
    hosts, rest = _hosts(run, here, number)
    return JobNodes(
        number,
        option(given, "--nproc-per-node") or str(local or ""),
        option(given, "--node-rank") or (str(min(here) // local) if here and local else ""),
        _endpoint(given, store),
        option(given, "--rdzv-id"),
        hosts,
        rest,
    )


def _whole(text: str) -> int:
    return int(text) if text.isdigit() else 0


def _hosts(run: Run, here: Sequence[int], number: int) -> tuple[dict[int, str], str]:
    """Return the known host names by rank, and that of all other ranks, or nothing."""
    there = [(node.host, [rank.rank for rank in run.ranks_on(node)]) for node in run.nodes]
    hosts = dict.fromkeys(here, str(run.manifest.get("host") or ""))
    hosts |= {rank: host for host, ranks in there for rank in ranks}
    unseen = [host for host, ranks in there if not ranks]
    return hosts, unseen[0] if len(unseen) == 1 and len(there) == number - 1 else ""


def _endpoint(manifest: JsonObject, store: StoreRecord) -> str:
    """Return where the nodes meet; empty if it is not known."""
    endpoint, host = option(manifest, "--rdzv-endpoint"), option(manifest, "--master-addr")
    if endpoint or host:
        return endpoint or f"{host}:{option(manifest, '--master-port') or 29500}"
    return f"{store.host}:{store.port}" if store.host else ""


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

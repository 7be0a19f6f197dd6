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
    """The nodes of a job, as far as one of them knows."""

    number: int = 1  # Number of nodes
    nproc: str = ""  # Number of ranks on each, as given. Empty if unknown.
    own: str = ""  # The rank of this node. Empty if unknown.
    endpoint: str = ""  # The address at which they meet. Empty if unknown.
    rdzv_id: str = ""  # The id of the job, if given
    hosts: Mapping[int, str] = field(default_factory=dict)  # Host names by rank
    rest: str = ""  # The host name of all other ranks, if they can only be there

    @property
    def several(self) -> bool:
        """Whether there is more than one node."""
        return self.number > 1

    @property
    def check_line(self) -> str:
        """The command that checks the nodes, for this one. Empty for a single node."""
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
        """Add the sentence that introduces the check's command to a fix."""
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
    """Return the nodes of a job, from torchrun's options or else from the ranks' records."""
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
    """Return the known host names by rank, and that of all other ranks (empty if unknown)."""
    there = [(node.host, [rank.rank for rank in run.ranks_on(node)]) for node in run.nodes]
    hosts = dict.fromkeys(here, str(run.manifest.get("host") or ""))
    hosts |= {rank: host for host, ranks in there for rank in ranks}
    unseen = [host for host, ranks in there if not ranks]
    return hosts, unseen[0] if len(unseen) == 1 and len(there) == number - 1 else ""


def _endpoint(manifest: JsonObject, store: StoreRecord) -> str:
    """Return the address at which the nodes meet. Empty if unknown."""
    endpoint, host = option(manifest, "--rdzv-endpoint"), option(manifest, "--master-addr")
    if endpoint or host:
        return endpoint or f"{host}:{option(manifest, '--master-port') or 29500}"
    return f"{store.host}:{store.port}" if store.host else ""


def option(manifest: JsonObject, name: str) -> str:
    """Return the value of an option of torchrun in a job's command, in either spelling."""
    command = manifest.get("command")
    words = list(map(str, command)) if isinstance(command, list) else []
    for spelling in (name, name[:2] + name[2:].replace("-", "_")):
        for at, word in enumerate(words):
            if word == spelling and at + 1 < len(words):
                return words[at + 1]
            if word.startswith(f"{spelling}="):
                return word.partition("=")[2]
    return ""

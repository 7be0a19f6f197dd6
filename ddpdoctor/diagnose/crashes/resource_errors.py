"""Explain exceptions about a file or a port, such as a full disk or an unopened store."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ddpdoctor.diagnose.crashes.rank_endings import NOTHING, Ending, first_failure
from ddpdoctor.failures import recognise
from ddpdoctor.failures.entry import Failure
from ddpdoctor.failures.lines import shortened
from ddpdoctor.run.records.process import ErrorRecord, OwnStoreRecord, ResourceFacts
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Records, Run

# -- files: a full disk, a limit, several writers

DISK_FULL = "DDP935"
NO_NETWORK = "DDP936"
UNREADABLE = ("DDP944", "DDP945")
"""Codes of unreadable checkpoints. torch's message about a truncated file may match both."""

_MIN_FREE_RATIO = 0.002
"""Minimum free fraction of a file system. Below, it counts as full, because some of it is
reserved for root."""

_MIN_FREE = 1 << 20  # The same in bytes


@dataclass(frozen=True)
class FailureFacts:
    """The known facts about a failure besides its text. Empty if there are none."""

    said: str = ""
    fix: str = ""
    evidence: tuple[str, ...] = ()


def file_facts(cause: Ending, failure: Failure) -> FailureFacts:
    """Return the facts about the file of an exception."""
    path = cause.file.path
    if failure.code == DISK_FULL:
        return _unwritten(cause, path)
    url = shortened(cause.file.url)
    if failure.code == NO_NETWORK and url:
        return FailureFacts(f"has no network for a download from {url}")
    if failure.code in UNREADABLE and path:
        return FailureFacts(evidence=(f"the file is {path}, {_size(cause.file.size)}",))
    return FailureFacts()


def _unwritten(cause: Ending, path: str) -> FailureFacts:
    name = path or "a file"
    free, total = cause.file.free, cause.file.total
    limit, size = cause.file.limit, cause.file.size
    if limit is not None and size >= 0.9 * limit:
        return FailureFacts(
            f"could not write {name}: files may be {_size(limit)} at most (`ulimit -f`)",
            "Raise the limit in the shell or the scheduler's script that starts the job.",
            (f"{path} has {_size(size)}",),
        )
    if free is None or total is None:
        return FailureFacts(f"could not write {path}: no room is left for it" if path else "")
    room = f"{_size(free)} of {_size(total)} are free in {os.path.dirname(path) or '.'}"
    if free <= max(_MIN_FREE, _MIN_FREE_RATIO * total):
        return FailureFacts(f"could not write {name}: the disk is full", evidence=(room,))
    return FailureFacts(
        f"could not write {name}: a quota is reached, or the disk was full at that moment",
        evidence=(f"{room} now",),
    )


def torn(run: Run) -> Ending | None:
    """Return the end of a rank that could not read a checkpoint written by several ranks."""
    cause = first_failure(run, run.restarts[-1])
    if cause is None or cause.file.access != "read":
        return None
    known = recognise(cause.printed, cause.traceback)
    if known is None or known[0].code not in UNREADABLE:
        return None
    path = cause.file.path
    saves = [{record.file for record in rank.records.of(SaveRecord)} for rank in run.last]
    return cause if path and sum(path in files for files in saves) > 1 else None


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


# -- ports: a store that a process cannot open, or that no process opens

PORT_IN_USE = "DDP002"
UNREACHABLE = "DDP912"

_SPAWNED = (
    "torchrun has started every rank already: start the script with python, or call its main "
    "function without mp.spawn."
)
_OWN_RANK = (
    "Only rank 0 opens the port: give each process its own rank "
    '(rank=int(os.environ["RANK"])), or leave rank and init_method out under torchrun.'
)
_NO_ADDRESS = (
    'Leave init_method and MASTER_PORT out, or use init_method="env://": under torchrun no rank '
    "opens a port."
)


def port_facts(run: Run, cause: Ending, failure: Failure) -> FailureFacts:
    """Return the facts about the port of an exception."""
    if failure.code == PORT_IN_USE:
        return _taken(cause.file if cause.file.port is not None else _elsewhere(run))
    store = unopened_store(run.strays, run.restarts[-1])
    if failure.code == UNREACHABLE and store is not None and store.port in cause.text:
        return FailureFacts(
            f"waited for a store at {store_address(store)} that no rank opens", *store_advice(store)
        )
    return FailureFacts()


def unopened_store(strays: Records, restart: int) -> OwnStoreRecord | None:
    """Return a store that torchrun's ranks wait for and that none of them opens."""
    return next((each for each in strays.of(OwnStoreRecord) if each.restart == restart), None)


def store_address(store: OwnStoreRecord) -> str:
    """Return the host and port of the store."""
    return shortened(f"{store.host}:{store.port}")


def store_advice(store: OwnStoreRecord) -> tuple[str, tuple[str, ...]]:
    """Return the fix and the evidence about the store."""
    evidence = [f"torchrun keeps the job's store at {shortened(store.launcher)}"]
    if store.spawned:
        evidence.append("a worker of torchrun started this process")
        return _SPAWNED, tuple(evidence)
    return _NO_ADDRESS, tuple(evidence)


def _elsewhere(run: Run) -> ResourceFacts:
    """Return the facts that another process recorded, for a failure that only stderr reports."""
    here = (each for each in run.strays.of(ErrorRecord) if each.restart == run.restarts[-1])
    files = (each.file for each in here)
    return next((each for each in files if each and each.port is not None), NOTHING)


def _taken(facts: ResourceFacts) -> FailureFacts:
    holder = facts.holder
    if holder is None:
        return FailureFacts()
    failed = f"could not listen on port {facts.port}"
    who = f"pid {holder.pid}"
    name = shortened(holder.name, 100)
    evidence = (f"{who} holds it: {name}",) if name else ()
    if holder.itself:
        return FailureFacts(
            f"{failed}: this process holds it already",
            "Open the store once, and pass it on: init_process_group(store=...).",
        )
    if holder.ours:
        rank = holder.rank or ""
        known = f", started as rank {rank}" if rank.isdigit() else ""
        return FailureFacts(
            f"{failed}: another process of this job holds it ({who}{known})",
            _SPAWNED if facts.spawned else _OWN_RANK,
            evidence,
        )
    return FailureFacts(f"{failed}: a process of another job holds it ({who})", "", evidence)

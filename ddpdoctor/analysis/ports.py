"""What lies behind a store that cannot be opened, or that no process opens."""

from __future__ import annotations

from ddpdoctor.analysis.endings import NOTHING, Ending
from ddpdoctor.analysis.files import Facts
from ddpdoctor.failures import Failure
from ddpdoctor.failures.lines import shortened
from ddpdoctor.run.records.process import ErrorRecord, OwnStoreRecord, ResourceFacts
from ddpdoctor.run.snapshot import Run

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


def described(run: Run, cause: Ending, failure: Failure) -> Facts:
    """What is known of the port that an exception is about."""
    if failure.code == PORT_IN_USE:
        return _taken(cause.file if cause.file.port is not None else _elsewhere(run))
    store = unopened(run)
    if failure.code == UNREACHABLE and store is not None and store.port in cause.text:
        return Facts(f"waited for a store at {address(store)} that no rank opens", *advice(store))
    return Facts()


def unopened(run: Run) -> OwnStoreRecord | None:
    """The address of a store that ranks of torchrun's wait for, and none of them opens."""
    restart = run.restarts[-1]
    found = run.strays.of(OwnStoreRecord)
    return next((each for each in found if each.restart == restart), None)


def address(store: OwnStoreRecord) -> str:
    """Host and port of it."""
    return shortened(f"{store.host}:{store.port}")


def advice(store: OwnStoreRecord) -> tuple[str, tuple[str, ...]]:
    """The fix, and the evidence."""
    evidence = [f"torchrun keeps the job's store at {shortened(store.launcher)}"]
    if store.spawned:
        evidence.append("a worker of torchrun started this process")
        return _SPAWNED, tuple(evidence)
    return _NO_ADDRESS, tuple(evidence)


def _elsewhere(run: Run) -> ResourceFacts:
    """What a process that never was a rank saw of it, where stderr alone reports the failure."""
    here = (each for each in run.strays.of(ErrorRecord) if each.restart == run.restarts[-1])
    files = (each.file for each in here)
    return next((each for each in files if each and each.port is not None), NOTHING)


def _taken(facts: ResourceFacts) -> Facts:
    holder = facts.holder
    if holder is None:
        return Facts()
    failed = f"could not listen on port {facts.port}"
    who = f"pid {holder.pid}"
    name = shortened(holder.name, 100)
    evidence = (f"{who} holds it: {name}",) if name else ()
    if holder.itself:
        return Facts(
            f"{failed}: this process holds it already",
            "Open the store once, and hand it over: init_process_group(store=...).",
        )
    if holder.ours:
        rank = holder.rank or ""
        known = f", started as rank {rank}" if rank.isdigit() else ""
        return Facts(
            f"{failed}: another process of this job holds it ({who}{known})",
            _SPAWNED if facts.spawned else _OWN_RANK,
            evidence,
        )
    return Facts(f"{failed}: a process of another job holds it ({who})", "", evidence)

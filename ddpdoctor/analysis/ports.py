"""What lies behind a store that cannot be opened, or that nobody opens."""

from __future__ import annotations

from ddpdoctor.analysis.endings import Ending
from ddpdoctor.analysis.files import Facts
from ddpdoctor.failures import Failure
from ddpdoctor.failures.lines import shortened
from ddpdoctor.run.record import Record, integer
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
        return _taken(cause.file or _elsewhere(run))
    store = unopened(run)
    if failure.code == UNREACHABLE and store is not None and str(store["port"]) in cause.text:
        return Facts(f"waited for a store at {address(store)} that no rank opens", *advice(store))
    return Facts()


def unopened(run: Run) -> Record | None:
    """The address of a store that ranks of torchrun's wait for, and none of them opens."""
    restart = run.restarts[-1]
    found = (
        each
        for each in run.strays
        if each.get("kind") == "own_store" and integer(each, "restart") == restart
    )
    return next(found, None)


def address(store: Record) -> str:
    """Host and port of it."""
    return shortened(f"{store.get('host')}:{store.get('port')}")


def advice(store: Record) -> tuple[str, tuple[str, ...]]:
    """The fix, and the evidence."""
    evidence = [f"torchrun keeps the job's store at {shortened(str(store.get('launcher')))}"]
    if store.get("spawned"):
        evidence.append("a worker of torchrun started this process")
        return _SPAWNED, tuple(evidence)
    return _NO_ADDRESS, tuple(evidence)


def _elsewhere(run: Run) -> Record:
    """What a process that never was a rank saw of it, where stderr alone tells of the failure."""
    files = (each.get("file") for each in run.strays if each.get("kind") == "error")
    return next((each for each in files if isinstance(each, dict) and "port" in each), {})


def _taken(facts: Record) -> Facts:
    holder = facts.get("holder")
    if not isinstance(holder, dict):
        return Facts()
    told = f"could not listen on port {integer(facts, 'port')}"
    who = f"pid {integer(holder, 'pid')}"
    name = shortened(str(holder.get("name") or ""), 100)
    evidence = (f"{who} holds it: {name}",) if name else ()
    if holder.get("itself"):
        return Facts(
            f"{told}: this process holds it already",
            "Open the store once, and hand it over: init_process_group(store=...).",
        )
    if holder.get("ours"):
        rank = holder.get("rank")
        known = f", started as rank {rank}" if isinstance(rank, str) and rank.isdigit() else ""
        return Facts(
            f"{told}: another process of this job holds it ({who}{known})",
            _SPAWNED if facts.get("spawned") else _OWN_RANK,
            evidence,
        )
    return Facts(f"{told}: a process of another job holds it ({who})", "", evidence)

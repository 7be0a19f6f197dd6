"""Whether the launcher's variables are complete and agree with each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.preflight.check import Outcome, check, finding, judged, passed, typed
from ddpdoctor.preflight.command_lines import meeting_point, run_line
from ddpdoctor.preflight.place import Place, number, places, seat
from ddpdoctor.preflight.protocol.addresses import is_local
from ddpdoctor.preflight.situation import Situation

_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@check("launch-environment", "DDP001")
def launch_environment(situation: Situation) -> Outcome:
    """The variables that place a process in the job are incomplete or contradict each other.

    What it finds
        RANK, WORLD_SIZE, LOCAL_RANK or MASTER_PORT that is not a number or is out of range. RANK
        without WORLD_SIZE, or without MASTER_ADDR and MASTER_PORT. A RANK that differs from the one
        set by Slurm or MPI. Several Slurm tasks on a node that would each start torchrun. A job of
        several nodes whose rendezvous is on localhost or is not set.

    Why it is bad
        `init_process_group` raises, or waits for ranks that never come. In a batch script,
        `export RANK=$SLURM_PROCID` gives every task rank 0, and all of them wait until the timeout.
        With a rendezvous on localhost, each node waits for itself.

    How to fix it
        Let the launcher set the variables, or read all of them from the launcher inside the task.

    Example
        Wrong:
            export RANK=$SLURM_PROCID; srun python train.py
        Right:
            srun bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS python train.py'

    When it stays silent
        If none of these variables is set, if torchrun set them, or if only MASTER_ADDR and
        MASTER_PORT are set, as batch scripts do. If several nodes are checked, DDP050 tests the
        rendezvous.
    """
    environ = situation.environ
    findings = list(_findings(situation, environ))
    found = [name for name in _TORCH if environ.get(name)]
    launched = [place for place in places(environ) if place.launcher != "torchrun"]
    if not found and not launched and not findings:
        return passed("no launcher's variables: torchrun will set them")
    parts = [f"{name}={environ[name]}" for name in found]
    parts += [
        f"{place.launcher}: rank {place.rank} of {place.world_size}"
        for place in launched
        if place.rank is not None
    ]
    return judged(", ".join(parts) or "no launcher's variables", findings)


def _wrong(message: str, fix: str, paste: str, *, about: str, warning: bool = False) -> Finding:
    severity = Severity.WARNING if warning else Severity.ERROR
    return finding(severity, message, fix=fix, paste=paste, about=about)


def _findings(situation: Situation, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield from _numbers(environ)
    yield from _incomplete(environ)
    mine = [place for place in places(environ) if place.launcher != "torchrun"]
    if mine and "TORCHELASTIC_RUN_ID" not in environ:
        yield from _contradicting(environ, mine[0])
        yield from _launched_twice(situation, mine[0])
    yield from _rendezvous(situation)


def _numbers(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if environ.get(name) and number(environ, name) is None:
            yield _wrong(
                f"{name} is {environ[name]!r}, which is not a number",
                "Leave it to the launcher.",
                typed("unset {}", name),
                about=name,
            )
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, size = number(environ, name), number(environ, of)
        if rank is not None and size is not None and rank >= size:
            yield _wrong(
                f"{name} is {rank}, but {of} is {size}: ranks count from 0",
                "Leave them to the launcher.",
                typed("unset {} {}", name, of),
                about=f"{name} range",
            )
    port = number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        yield _wrong(
            f"MASTER_PORT is {port}, which is not a port",
            "Choose a port from 1024 to 65535.",
            "export MASTER_PORT=29500",
            about="MASTER_PORT",
        )
    address = environ.get("MASTER_ADDR", "")
    if "/" in address or address.count(":") == 1:
        yield _wrong(
            f"MASTER_ADDR is {address!r}: it takes a name or an address, without scheme and port",
            "Put the port into MASTER_PORT.",
            typed("export MASTER_ADDR={}", _host_in(address)),
            about="MASTER_ADDR",
        )


def _host_in(address: str) -> str:
    """The name in what is more than one: ``tcp://node0:29500``, ``node0:29500``, ``node0/``."""
    name = address.rpartition("//")[2].partition("/")[0]
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    return name or "NODE0"


def _incomplete(environ: Mapping[str, str]) -> Iterator[Finding]:
    has = {name for name in _TORCH if environ.get(name)}
    placed = {"RANK", "WORLD_SIZE"} & has
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
               if name not in has]  # fmt: skip
    if placed and missing:
        there = " and ".join(sorted(placed))
        yield _wrong(
            f"{there} {'are' if len(placed) > 1 else 'is'} set, but not {', '.join(missing)}",
            "init_process_group wants all of them. torchrun sets them itself; if a job is started "
            "without it, set the others, too.",
            "unset RANK WORLD_SIZE",
            about="incomplete",
            warning=True,
        )


def _contradicting(environ: Mapping[str, str], place: Place) -> Iterator[Finding]:
    rank, size = number(environ, "RANK"), number(environ, "WORLD_SIZE")
    several = (place.world_size or 1) > 1
    if rank is not None and place.rank is not None and rank != place.rank and several:
        if size is not None and size != place.world_size:
            return
        yield _wrong(
            f"RANK is {rank}, but {place.launcher} says that this is task {place.rank} of "
            f"{place.world_size}",
            "RANK was set before the tasks were started, so all have the same: set it within the "
            "task.",
            "unset RANK",
            about="contradicting",
        )


def _launched_twice(situation: Situation, place: Place) -> Iterator[Finding]:
    asked = situation.options.nproc
    tasks = place.local_size
    if tasks is None and place.launcher == "Slurm" and place.world_size != 1:
        tasks = number(situation.environ, "SLURM_NTASKS_PER_NODE")
    if tasks and tasks > 1 and asked and asked > 1:
        each = run_line(situation, "--nproc-per-node", str(asked))
        yield _wrong(
            f"{place.launcher} starts {tasks} tasks on this node, and each would start {asked} "
            "ranks",
            "Start torchrun once a node, or one rank a task.",
            "#SBATCH --ntasks-per-node=1"
            if place.launcher == "Slurm"
            else "mpirun --map-by ppr:1:node " + each,
            about="twice",
        )


def _rendezvous(situation: Situation) -> Iterator[Finding]:
    place = seat(situation)
    if place.nnodes < 2 or situation.attendance_checked:
        # That check sees whether the nodes meet there all the same.
        return
    nodes, alone = f"{place.nnodes} nodes", "each would wait for the others on its own"
    fix, paste = meeting_point(place, situation)
    if not place.host:
        message = f"{nodes}, but no rendezvous endpoint: {alone} localhost"
        yield _wrong(message, fix, paste, about="rendezvous")
    elif is_local(place.host):
        message = f"the rendezvous of {nodes} is on {place.host}: {alone}"
        yield _wrong(message, fix, paste, about="rendezvous")

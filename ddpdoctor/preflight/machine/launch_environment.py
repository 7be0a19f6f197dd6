"""How the job is launched: the launcher's variables, debug variables, the rendezvous port."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from itertools import product
from math import inf
from pathlib import Path
from typing import NamedTuple

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.relations import PORT
from ddpdoctor.nodes import store as job_store
from ddpdoctor.preflight.check import (
    Outcome,
    check,
    failure,
    finding,
    judged,
    note,
    passed,
    skipped,
    typed,
)
from ddpdoctor.preflight.command_lines import corrected_line, meeting_point, run_line
from ddpdoctor.preflight.machine import software
from ddpdoctor.preflight.machine.network import (
    LOOKUPS_LIMIT,
    endpoint_name,
    interfaces,
    is_local,
    owner,
)
from ddpdoctor.preflight.situation import (
    DEFAULT_PORT,
    Place,
    Situation,
    environment_number,
    names,
    node_place,
    places,
    text,
    visible_gpus,
)
from ddpdoctor.system.proc import Listed, listed, listening, sockets

# -- the launcher's variables


_NEEDED_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


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
    launched = [place for place in places(environ) if place.launcher != "torchrun"]
    findings = [*_numbers(environ), *_incomplete(environ)]
    if launched and "TORCHELASTIC_RUN_ID" not in environ:
        findings += _contradicting(environ, launched[0])
        findings += _launched_twice(situation, launched[0])
    findings += _rendezvous(situation)
    found = [name for name in _NEEDED_VARIABLES if environ.get(name)]
    if not found and not launched and not findings:
        return passed("no launcher's variables: torchrun will set them")
    parts = [f"{name}={environ[name]}" for name in found]
    parts += [
        f"{place.launcher}: rank {place.rank} of {place.world_size}"
        for place in launched
        if place.rank is not None
    ]
    return judged(", ".join(parts) or "no launcher's variables", findings)


def _wrong(
    message: str, fix: str, paste: str, *, about: str, severity: Severity = Severity.ERROR
) -> Finding:
    return finding(severity, message, fix=fix, paste=paste, about=about)


NUMBERS = {
    **dict.fromkeys(("RANK", "WORLD_SIZE"), "unset RANK WORLD_SIZE"),  # One alone is incomplete
    "LOCAL_RANK": "unset LOCAL_RANK",
    "MASTER_PORT": "export MASTER_PORT=29500",
}
"""Variables that hold a number, and the line that repairs each."""


def _numbers(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name in NUMBERS:
        if environ.get(name) and environment_number(environ, name) is None:
            yield _wrong(
                f"{name} is {environ[name]!r}, which is not a number",
                "Leave it to the launcher.",
                NUMBERS[name],
                about=name,
            )
    for name, of in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        rank, size = environment_number(environ, name), environment_number(environ, of)
        if rank is not None and size is not None and rank >= size:
            yield _wrong(
                f"{name} is {rank}, but {of} is {size}: ranks count from 0",
                "Leave them to the launcher.",
                typed("unset {} {}", name, of),
                about=f"{name} range",
            )
    port = environment_number(environ, "MASTER_PORT")
    if port is not None and not 0 < port < 65536:
        yield _wrong(
            f"MASTER_PORT is {port}, which is not a port",
            "Choose a port from 1024 to 65535.",
            NUMBERS["MASTER_PORT"],
            about="MASTER_PORT",
        )
    address = environ.get("MASTER_ADDR", "")
    if "/" in address or address.count(":") == 1:
        name = address.rpartition("//")[2].partition("/")[0]
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        yield _wrong(
            f"MASTER_ADDR is {address!r}: it takes a name or an address, without scheme and port",
            "Put the port into MASTER_PORT.",
            typed("export MASTER_ADDR={}", name or "NODE0"),
            about="MASTER_ADDR",
        )


def _incomplete(environ: Mapping[str, str]) -> Iterator[Finding]:
    placed = [name for name in ("RANK", "WORLD_SIZE") if environ.get(name)]
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not environ.get(name)]
    if placed and missing:
        yield _wrong(
            f"{' and '.join(placed)} {'are' if len(placed) > 1 else 'is'} set, but not "
            f"{', '.join(missing)}",
            "init_process_group needs all of them. torchrun sets them itself; if a job is started "
            "without it, set the others as well.",
            NUMBERS["RANK"],
            about="incomplete",
            severity=Severity.WARNING,
        )


def _contradicting(environ: Mapping[str, str], place: Place) -> Iterator[Finding]:
    rank, size = environment_number(environ, "RANK"), environment_number(environ, "WORLD_SIZE")
    several, same_job = (place.world_size or 1) > 1, size in (None, place.world_size)
    if several and same_job and None not in (rank, place.rank) and rank != place.rank:
        yield _wrong(
            f"RANK is {rank}, but {place.launcher} says that this is task {place.rank} of "
            f"{place.world_size}",
            "RANK was set before the tasks were started, so all have the same one: set it within "
            "the task.",
            "unset RANK",
            about="contradicting",
        )


def _launched_twice(situation: Situation, place: Place) -> Iterator[Finding]:
    asked = situation.options.nproc
    tasks = place.local_size
    if tasks is None and place.launcher == "Slurm" and place.world_size != 1:
        tasks = environment_number(situation.environ, "SLURM_NTASKS_PER_NODE")
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
    place = node_place(situation)
    if place.nnodes < 2 or situation.attendance_checked:
        # That check finds out whether the nodes meet there.
        return
    nodes, alone = f"{place.nnodes} nodes", "each would wait for the others on its own"
    if not place.host:
        message = f"{nodes}, but no rendezvous endpoint: {alone} localhost"
    elif is_local(place.host):
        message = f"the rendezvous of {nodes} is on {place.host}: {alone}"
    else:
        return
    fix, paste = meeting_point(place, situation)
    yield _wrong(message, fix, paste, about="rendezvous")


# -- variables that were set for debugging, and slow down or break every job


OFF = frozenset({"", "0", "false", "off", "no"})


class _Leftover(NamedTuple):
    """A variable, its effect, and where it hurts."""

    name: str
    effect: str
    gpus: tuple[float, float] = (1, inf)  # Minimum and maximum number of GPUs with which it hurts
    value: str = ""  # The value that hurts; empty for any that turns it on
    fabric: bool = False  # Whether it hurts only between nodes with InfiniBand
    severity: Severity = Severity.WARNING

    def _is_on(self, value: str) -> bool:
        value = value.strip()
        return value.upper() == self.value if self.value else value.lower() not in OFF

    def elsewhere(self, value: str, situation: Situation) -> bool:
        """Return whether it would hurt on a machine with GPUs, and this one has none."""
        return self.gpus[1] > 0 and self._is_on(value) and not situation.shared(visible_gpus)

    def hurts(self, value: str, situation: Situation) -> bool:
        """Return whether this value slows down or breaks jobs on this machine."""
        if self.fabric and situation.options.nnodes < 2:
            return False
        if self.fabric and not names(situation.sys / "class" / "infiniband"):
            return False
        least, most = self.gpus
        return self._is_on(value) and least <= situation.shared(visible_gpus) <= most


_HANGS = "a collective that fails or times out hangs forever instead of ending the job"

_LEFTOVERS = (
    _Leftover(
        "TORCH_DISTRIBUTED_DEBUG",
        "DDP over gloo crashes with a segmentation fault in its constructor (torch 2.8 to 2.15)",
        (0, 0),
        "DETAIL",
        severity=Severity.ERROR,
    ),
    _Leftover(
        "TORCH_DISTRIBUTED_DEBUG",
        "every collective is preceded by another that compares the ranks, and DDP over gloo "
        "crashes",
        value="DETAIL",
    ),
    _Leftover(
        "CUDA_LAUNCH_BLOCKING", "every kernel waits for the one before, so that nothing overlaps"
    ),
    _Leftover(
        "NCCL_P2P_DISABLE",
        "the GPUs of this machine exchange gradients through host memory, not NVLink or PCIe",
        (2, inf),
    ),
    _Leftover(
        "NCCL_SHM_DISABLE", "ranks of this machine communicate through the network", (2, inf)
    ),
    _Leftover(
        "NCCL_IB_DISABLE",
        "the nodes communicate over TCP although they have InfiniBand",
        fabric=True,
    ),
    _Leftover("TORCH_NCCL_ASYNC_ERROR_HANDLING", _HANGS, value="0"),
    _Leftover("NCCL_ASYNC_ERROR_HANDLING", _HANGS, value="0"),
    _Leftover(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "every tensor is allocated by the driver, which is slow and synchronizes",
    ),
)


@check("variables", "DDP007")
def variables(situation: Situation) -> Outcome:
    """An environment variable meant for debugging slows down or breaks every job.

    What it finds
        TORCH_DISTRIBUTED_DEBUG=DETAIL, CUDA_LAUNCH_BLOCKING, NCCL_P2P_DISABLE, NCCL_SHM_DISABLE,
        NCCL_IB_DISABLE, NCCL_ASYNC_ERROR_HANDLING=0 or PYTORCH_NO_CUDA_MEMORY_CACHING, where it has
        an effect on this machine; in the environment, in ~/.nccl.conf or in /etc/nccl.conf.

    Why it is bad
        These variables often stay in a .bashrc or an image long after they were needed, and the job
        takes three times as long for no visible reason. With TORCH_DISTRIBUTED_DEBUG=DETAIL and
        gloo, DDP ends in a segmentation fault without a traceback.

    How to fix it
        Remove them. Set them for a single run when you need them.

    Example
        Wrong: `export NCCL_P2P_DISABLE=1` in .bashrc.
        Right: `NCCL_P2P_DISABLE=1 torchrun ...` for one test.

    When it stays silent
        Where the variable has no effect: NCCL's variables with one GPU, NCCL_IB_DISABLE without
        InfiniBand or on one node. Without GPUs it is information.
    """
    sources = {"the environment": situation.environ, **_startup_files(situation)}
    known = len({each.name for each in _LEFTOVERS})
    findings = list(_leftover_findings(situation, sources))
    about = ", ".join(each.about for each in findings if each.severity > Severity.INFO)
    return judged(
        about or f"none of {known} known variables is set to a value that does harm", findings
    )


def _leftover_findings(
    situation: Situation, sources: Mapping[str, Mapping[str, str]]
) -> Iterator[Finding]:
    for each, (source, values) in product(_LEFTOVERS, sources.items()):
        value, where = values.get(each.name), (f"it is set in {source}",)
        if value is None:
            continue
        if each.elsewhere(value, situation):
            message = f"{each.name}={value} is set; where there are GPUs, {each.effect}"
            yield note(message, evidence=where, about=each.name)
        if not each.hurts(value, situation):
            continue
        inside = source == "the environment"
        yield finding(
            each.severity,
            f"{each.name}={value} is set: {each.effect}",
            evidence=() if inside else where,
            fix="Remove it, from the shell's start files and the image as well."
            if inside
            else f"Remove the line from {source}.",
            paste=typed("unset {}", each.name) if inside else _line_without(each.name, source),
            about=each.name,
        )


def _line_without(name: str, source: str) -> str:
    """Return the line that removes a variable from a file."""
    sudo = "sudo " if source.startswith("/etc/") else ""
    return typed(f"{sudo}sed -i {{}} {{}}", f"/^ *{name} *=/d", source)


def _startup_files(situation: Situation) -> dict[str, dict[str, str]]:
    """Read NCCL's configuration files, without variables that the environment overrides."""
    home = situation.environ.get("HOME", "")
    paths = [situation.proc.parent / "etc" / "nccl.conf"]
    if home:
        paths.insert(0, Path(home) / ".nccl.conf")
    found: dict[str, dict[str, str]] = {}
    for path in paths:
        rows = (row.strip() for row in text(path).splitlines())
        pairs = (row.partition("=") for row in rows if "=" in row and not row.startswith("#"))
        values = {name.strip(): value.strip() for name, _, value in pairs}
        found[str(path)] = {
            name: value for name, value in values.items() if name not in situation.environ
        }
    return found


# -- the rendezvous port


@check("port", "DDP002", limit=LOOKUPS_LIMIT)
def port(situation: Situation) -> Outcome:
    """The port on which rank 0 will listen is in use.

    What it finds
        A rendezvous port (--rdzv-endpoint, --master-port, MASTER_PORT, or 29500) that this user
        cannot listen on. Where it can be seen, the process that holds the port, and whether that is
        the store of another distributed job.

    Why it is bad
        torchrun fails with "The server socket has failed to listen on any local network address".
        If another job's store listens there, the ranks may even join that job and wait.

    How to fix it
        Choose another port, or end the process that holds it if it is left over.

    Example
        Wrong: two jobs on one machine, both with `--master-port 29500`.
        Right: `--master-port 29501` for the second job, or `--standalone`, which picks a free port.

    When it stays silent
        On nodes other than the first. Where torchrun picks a free port itself (one machine, no port
        given, torch 2.13 and later).
    """
    options, endpoint = situation.options, situation.endpoint
    if options.nnodes > 1 and not node_place(situation).host:
        return skipped("it is not known where the nodes meet")
    if options.nnodes > 1 and not _is_first_node(situation):
        return skipped("node 0 listens, not this one")
    number = endpoint[1] if endpoint else DEFAULT_PORT
    if endpoint is None and options.nnodes == 1 and software.torchrun_picks_a_port():
        return passed("torchrun picks a free one")
    # With several nodes this check listens there itself. Then only look for other processes.
    problem = _bind_error(number) if options.nnodes == 1 else 0
    if problem == errno.EACCES:
        reserved = failure(
            f"this user may not listen on port {number}",
            evidence=("ports below 1024 are reserved for root",),
            fix="Choose a port from 1024 on.",
            paste=_with_port(situation, DEFAULT_PORT),
        )
        return judged(f"{number} is reserved", [reserved])
    listeners = {inode for inode, at in listening(situation.proc).items() if at == number}
    holders = _others_with(situation, listeners)
    # A process that this user may not see may listen as well.
    if not problem and not holders and not listeners - sockets(situation.proc / "self"):
        return passed(f"{number} is free")
    return judged(f"{number} is taken", [_taken(situation, number, holders)])


def _is_first_node(situation: Situation) -> bool:
    """Return whether this is the node of the rendezvous, by its rank or by its addresses."""
    if situation.options.node_rank is not None:
        return situation.options.node_rank == 0
    found = situation.shared(endpoint_name)
    here = situation.shared(interfaces)
    return found is not None and any(owner(each, here) for each in found.addresses)


def _bind_error(number: int) -> int:
    """Listen as torch's store does. Return the error number; 0 if it works."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                server.bind((address, number))
                server.listen()
                return 0
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return error.errno
    return 0


def _others_with(situation: Situation, inodes: set[int]) -> list[Listed]:
    """Return the other processes with one of these sockets, as far as this user may see."""
    others = (each for each in listed(situation.proc) if each.pid != os.getpid())
    return [each for each in others if inodes & sockets(each.folder)] if inodes else []


def _taken(situation: Situation, number: int, holders: list[Listed]) -> Finding:
    who = "; ".join(each.described for each in holders[:3])
    store = job_store.responds(number)
    what = "the store of another distributed job" if store else "a process"
    owner = f"{what}: {who}" if who else f"{what} that this user may not see"
    free = next((each for each in range(number + 1, number + 100) if not _bind_error(each)), None)
    evidence = [f"it is held by {owner}"]
    if store:
        evidence.append("it answers in the protocol of torch's TCPStore")
    return failure(
        f"port {number}, on which rank 0 will listen, is taken",
        evidence=tuple(evidence),
        subjects=frozenset({PORT}),
        fix=f"Choose another port, the same on every node ({free} is free here), or end the "
        "process if it is a left-over.",
        paste=_with_port(situation, free) if free else typed("ss -tlnp {}", f"sport = :{number}"),
    )


def _with_port(situation: Situation, number: int) -> str:
    if situation.options.endpoint or situation.endpoint is None:
        return corrected_line(situation, port=number)
    return typed("export MASTER_PORT={}", number)

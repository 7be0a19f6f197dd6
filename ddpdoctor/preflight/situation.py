"""What the checks go by: options, environment, machine, time left, and the place of this node."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ddpdoctor.system.gpu_health import GpuFacts, read_health
from ddpdoctor.system.nvml import Choice, choice

# -- time limits: of a check, and of a call that may never come back


T = TypeVar("T")


class Deadline:
    """Until when a check may run, and whether it has been cancelled.

    Args:
        seconds: From now on.
        parent: What also ends this one when it is cancelled.
    """

    def __init__(self, seconds: float, parent: Deadline | None = None) -> None:
        self._until = time.monotonic() + seconds
        self._cancelled: threading.Event
        self._cancelled = threading.Event() if parent is None else parent._cancelled
        if parent is not None:
            self._until = min(self._until, parent._until)

    def left(self) -> float:
        """Seconds that are left; 0 when it is over or cancelled."""
        return 0.0 if self.cancelled else max(0.0, self._until - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether Ctrl-C was pressed, or the like."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Stop: this deadline and all that share its parent are over."""
        self._cancelled.set()

    def sleep(self, seconds: float) -> bool:
        """Let time pass; False once it is over or cancelled."""
        self._cancelled.wait(min(seconds, self.left()))
        return self.left() > 0


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """See to it that a process, and all that it started, does not outlive the block.

    It must have been started with ``start_new_session=True``.
    """
    try:
        yield
    finally:
        # The group may have members left when its leader has ended.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for file in (process.stdin, process.stdout, process.stderr):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()


def bounded(call: Callable[[], T], seconds: float) -> T:
    """What a call returns that cannot be interrupted: a name lookup, a file on a dead server.

    It runs on a thread that is left behind if it does not come back. The seconds are those of the
    time that this process gets.

    Raises:
        TimeoutError: It did not come back in time.
        Exception: Whatever the call raised.
    """
    return while_it_goes_on(lambda _: call(), seconds)


def while_it_goes_on(call: Callable[[Callable[[], None]], T], seconds: float) -> T:
    """The same for a call that may go on as long as it reports progress.

    Args:
        call: Takes a function to call whenever it came further.
        seconds: That may pass between two such calls.
    """
    answers: list[T] = []
    errors: list[BaseException] = []
    further = threading.Event()

    def run() -> None:
        try:
            answers.append(call(further.set))
        except BaseException as error:  # handed to the caller
            errors.append(error)
        further.set()

    threading.Thread(target=run, daemon=True).start()
    while _waited(further, seconds):
        further.clear()
        if answers:
            return answers[0]
        if errors:
            raise errors[0]
    raise TimeoutError


def waited_for_core() -> float:
    """For how long this thread has waited for a core so far, in seconds; 0 if nothing says so."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


TICK_S = 0.05


def _waited(event: threading.Event, seconds: float) -> bool:
    """Wait for an event for so many seconds of the time that this process gets.

    A tick that comes late, because others have the cores, counts as two at most.
    """
    had = 0.0
    while had < seconds:
        began = time.monotonic()
        if event.wait(min(TICK_S, seconds - had)):
            return True
        had += min(time.monotonic() - began, 2 * TICK_S)
    return event.is_set()


# -- what the checks go by: the options, the environment and the machine, gathered once


ATTENDANCE = "nodes"
"""The check that reports who is absent, and why this node did not meet the others."""

CPU_RANKS = 2
"""How many ranks `ddpdoctor run` starts where there is no GPU."""

DRIVER_PATIENCE = 6.0
"""Seconds that the NVIDIA driver has for each GPU: without persistence mode it takes one to four to
wake one up, one after the other."""

DEFAULT_PORT = 29500
"""torchrun's, for ``--rdzv-endpoint HOST`` and for ``MASTER_PORT``."""


USUAL_TIMEOUT = 60.0
"""Seconds for everything, unless ``--timeout`` gives more or less."""


@dataclass(frozen=True)
class Options:
    """What was asked for on the command line; None or empty where nothing was.

    Attributes:
        nproc: Ranks of this node.
        nnodes: Nodes of the job.
        node_rank: This node's number.
        endpoint: ``HOST[:PORT]`` of the rendezvous.
        rdzv_id: The rendezvous id.
        script: The script and its arguments.
        module: Whether the script is a module's name (``-m``).
        program: Whether it is no Python at all (``--no-python``).
        checkpoint_dir: Where the job writes checkpoints.
        timeout: Seconds that everything may take.
        soak: Seconds for which the collectives are repeated.
        kill_orphans: Whether orphan ranks are offered to be ended.
        yes: Whether they are ended without a question.
    """

    nproc: int | None = None
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str = ""
    rdzv_id: str = ""
    script: tuple[str, ...] = ()
    module: bool = False
    program: bool = False
    checkpoint_dir: Path | None = None
    timeout: float = USUAL_TIMEOUT
    soak: float = 0.0
    kill_orphans: bool = False
    yes: bool = False

    @property
    def most(self) -> float:
        """Seconds that everything may take, the repeated collectives included."""
        return self.timeout + self.soak

    @property
    def scale(self) -> float:
        """How much longer than usual every stage may take, by ``--timeout``; 1 at least."""
        return max(1.0, self.timeout / USUAL_TIMEOUT)


class Once:
    """Values that several checks need and that are gathered once, when the first one asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[object, threading.Lock] = {}
        self._values: dict[object, Any] = {}

    def get(self, gather: Callable[[Situation], T], situation: Situation) -> T:
        """What ``gather(situation)`` returns, from its first caller."""
        with self._lock:
            lock = self._locks.setdefault(gather, threading.Lock())
        with lock:
            if gather not in self._values:
                self._values[gather] = gather(situation)
            value: T = self._values[gather]
            return value

    def put(self, gather: Callable[[Situation], T], value: T) -> None:
        """Let ``gather`` have this value: for tests, and for what is known already."""
        self._values[gather] = value


class Verdicts:
    """What the checks of this machine found so far: the other nodes are shown it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: set[str] = set()
        self._outcomes: list[Any] = []

    def expect(self, names: Iterable[str]) -> None:
        """Begin: these checks of the machine run."""
        with self._lock:
            self._awaited = set(names)

    def add(self, name: str, outcome: Any) -> None:
        """A check ended; one of those across nodes is none of the machine's."""
        with self._lock:
            if name in self._awaited:
                self._awaited.discard(name)
                self._outcomes.append(outcome)

    def so_far(self) -> tuple[list[Any], list[str]]:
        """The outcomes, and the names of the checks that still run."""
        with self._lock:
            return list(self._outcomes), sorted(self._awaited)


@dataclass(frozen=True)
class Situation:
    """The facts that all checks share. Sources of facts can be replaced in tests.

    Attributes:
        options: The command line's.
        environ: The environment that the job would inherit.
        hostname: As the kernel has it.
        proc: Root of the process file system.
        sys: Root of sysfs.
        shm: Where POSIX shared memory is mounted.
        deadline: Until when the check that holds this may run.
        once: Facts that are gathered when they are first needed.
        verdicts: What the checks of this machine found so far.
        chosen: The names of the checks that run; None for all.
        say: Takes a line for a person who waits; it does not change any outcome.
    """

    options: Options = field(default_factory=Options)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hostname: str = field(default_factory=socket.gethostname)
    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    deadline: Deadline = field(default_factory=lambda: Deadline(60.0))
    once: Once = field(default_factory=Once)
    verdicts: Verdicts = field(default_factory=Verdicts)
    chosen: frozenset[str] | None = None
    say: Callable[[str], None] = lambda _: None

    def within(self, seconds: float) -> Situation:
        """The same for a check that may take so many seconds."""
        return replace(self, deadline=Deadline(seconds, self.deadline))

    def shared(self, gather: Callable[[Situation], T]) -> T:
        """What ``gather`` returns of this situation, gathered once for all checks."""
        return self.once.get(gather, self)

    @property
    def attendance_checked(self) -> bool:
        """Whether another check reports why the nodes did not meet."""
        return ATTENDANCE in (self.chosen or ())

    @property
    def nproc(self) -> int:
        """How many ranks this node will have: as asked for, else as `ddpdoctor run` would start."""
        if self.options.nproc is not None:
            return self.options.nproc
        return self.shared(default_ranks)

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of the rendezvous, from the options or ``MASTER_ADDR``; None if neither.

        A port of 0, or none, is torchrun's own default.
        """
        if self.options.endpoint:
            return split_endpoint(self.options.endpoint)
        address = self.environ.get("MASTER_ADDR", "")
        if not address:
            return None
        port = self.environ.get("MASTER_PORT", "")
        return address, int(port) if port.isdigit() and 0 < int(port) < 65536 else DEFAULT_PORT


def text(path: Path) -> str:
    """A small file of the kernel's, without the white space around it; empty if there is none."""
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return ""


def names(folder: Path) -> list[str]:
    """What is in a folder, sorted; empty if it cannot be listed."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def gpu_facts(situation: Situation) -> GpuFacts:
    """All that NVML reports about the GPUs of this machine."""
    try:
        return while_it_goes_on(read_health, min(DRIVER_PATIENCE, situation.deadline.left()))
    except TimeoutError:
        trouble = f"the NVIDIA driver does not answer within {DRIVER_PATIENCE:.0f} s"
        return GpuFacts(trouble=trouble, code=-1)


def cuda_choice(situation: Situation) -> Choice:
    """Which GPUs CUDA would show to a job."""
    gpus = situation.shared(gpu_facts).gpus
    return choice(situation.environ, [(gpu.device, gpu.instances) for gpu in gpus])


def visible_gpus(situation: Situation) -> int:
    """How many GPUs a process of a job would see."""
    return situation.shared(cuda_choice).count


def default_ranks(situation: Situation) -> int:
    """One rank per GPU that the job would see, or two without a GPU."""
    return situation.shared(visible_gpus) or CPU_RANKS


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT``, the port torchrun's by default.

    Raises:
        ValueError: It is none of these.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = endpoint, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(endpoint)
    return host, int(port) or DEFAULT_PORT


def joined_endpoint(host: str, port: int) -> str:
    """``HOST:PORT`` or ``[IPv6]:PORT``: what :func:`split_endpoint` splits."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- which node of which job this is: by the options, else by the launcher's variables


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


_TORCHRUN_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
)

_LAUNCHER_VARIABLES = {
    "torchrun": _TORCHRUN_VARIABLES,
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


def environment_number(environ: Mapping[str, str], name: str) -> int | None:
    """A variable as a number; None if it is not there, or is none."""
    text = environ.get(name, "") if name else ""
    return int(text) if text.strip().isdigit() else None


def places(environ: Mapping[str, str]) -> tuple[Place, ...]:
    """What each launcher that left its variables says, torch's own first."""
    return tuple(
        _slurm(environ, place) if launcher == "Slurm" else place
        for launcher, names in _LAUNCHER_VARIABLES.items()
        # In a batch script or an `salloc` shell there is a job of Slurm, but no task yet.
        if any(name in environ for name in names[:2])
        and (launcher != "Slurm" or {"SLURM_PROCID", "SLURM_STEP_ID"} <= environ.keys())
        for place in [_place(environ, launcher, names)]
    )


def _place(environ: Mapping[str, str], launcher: str, names: Sequence[str]) -> Place:
    rank, world, local, size, node, nodes = (environment_number(environ, name) for name in names)
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
    world = environment_number(environ, "SLURM_STEP_NUM_TASKS")
    nodes = [environment_number(environ, "SLURM_STEP_NUM_NODES"), place.nnodes]
    nodes.append(environment_number(environ, "SLURM_JOB_NUM_NODES"))
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return replace(
        place,
        world_size=place.world_size if world is None else world,
        nnodes=next((each for each in nodes if each is not None), None),
        hosts=expand_nodelist(listed),
    )


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
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

"""The inputs of the checks: options, environment, machine, time left, and this node's place."""

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
from typing import Any, Literal, TypeVar

from ddpdoctor.system.nvml import Choice, GpuFacts, choice, read_health

# -- time limits


T = TypeVar("T")

TICK_S = 0.05


class Deadline:
    """The time by which a check has to end, and whether it was cancelled.

    The end or cancellation of its parent applies to it as well.
    """

    def __init__(self, seconds: float, parent: Deadline | None = None) -> None:
        self._until = time.monotonic() + seconds
        self._cancelled: threading.Event = parent._cancelled if parent else threading.Event()
        if parent:
            self._until = min(self._until, parent._until)

    def left(self) -> float:
        """Return the seconds left; 0 if the time is over or the check was cancelled."""
        return 0.0 if self.cancelled else max(0.0, self._until - time.monotonic())

    @property
    def cancelled(self) -> bool:
        """Whether the check was cancelled, for example by Ctrl-C."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Cancel this deadline and all that share its parent."""
        self._cancelled.set()


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Kill a process that leads a session, with its process group, when the block ends."""
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
    """Run a call that cannot be interrupted, such as a name lookup, and return its result.

    It runs in a thread, which is left behind if the call does not return in time.

    Raises:
        TimeoutError: The call did not return in time.
        Exception: The call raised it.
    """
    return bounded_by_progress(lambda _: call(), seconds)


def bounded_by_progress(call: Callable[[Callable[[], None]], T], seconds: float) -> T:
    """Run a call that has to report progress every ``seconds``, and return its result.

    The call gets a function to report progress. A tick that is late because other processes have
    the cores counts as at most two ticks.

    Raises:
        TimeoutError: The call made no progress for too long.
        Exception: The call raised it.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    progress = threading.Event()

    def run() -> None:
        try:
            results.append(call(progress.set))
        except BaseException as error:  # handed to the caller
            errors.append(error)
        progress.set()

    threading.Thread(target=run, daemon=True).start()
    waited = 0.0
    while waited < seconds:
        began = time.monotonic()
        if not progress.wait(min(TICK_S, seconds - waited)):
            waited += min(time.monotonic() - began, 2 * TICK_S)
            continue
        waited = 0.0
        progress.clear()
        if results:
            return results[0]
        if errors:
            raise errors[0]
    raise TimeoutError


def waited_for_core() -> float:
    """Return the seconds this thread has waited for a core; 0 if not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0


# -- options, environment and machine


ATTENDANCE = "nodes"
"""The check that reports absent nodes, and why this node did not meet the others."""

CPU_RANKS = 2  # Ranks that `ddpdoctor run` starts on a machine without GPUs

DRIVER_TIMEOUT = 6.0
"""Seconds for the NVIDIA driver to answer, for each GPU. Without persistence mode it takes one to
four seconds to wake a GPU, one after the other."""

DEFAULT_PORT = 29500
"""torchrun's default port, for ``--rdzv-endpoint HOST`` and for ``MASTER_PORT``."""


DEFAULT_TIMEOUT = 60.0  # The default of ``--timeout``, in seconds


@dataclass(frozen=True)
class Options:
    """The options of the command line; None or empty where an option was not given."""

    nproc: int | None = None
    nnodes: int = 1
    node_rank: int | None = None
    endpoint: str = ""
    rdzv_id: str = ""
    script: tuple[str, ...] = ()
    module: bool = False  # Whether the script is a module's name (``-m``)
    program: bool = False  # Whether it is not a Python script (``--no-python``)
    checkpoint_dir: Path | None = None
    timeout: float = DEFAULT_TIMEOUT  # Seconds for all checks
    elastic: bool = False  # Whether ``--rdzv-backend`` is ``c10d`` or the like
    local_addr: str = ""
    soak: float = 0.0  # Seconds for which the collectives are repeated
    kill_orphans: bool = False  # Whether to offer to end orphan ranks
    yes: bool = False  # Whether to end them without asking

    @property
    def most(self) -> float:
        """Seconds for all checks, including the repeated collectives."""
        return self.timeout + self.soak

    @property
    def scale(self) -> float:
        """The factor by which ``--timeout`` extends every stage; at least 1."""
        return max(1.0, self.timeout / DEFAULT_TIMEOUT)


class Once:
    """Values that several checks need. Each is gathered once, when the first check asks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[object, threading.Lock] = {}
        self._values: dict[object, Any] = {}

    def get(self, gather: Callable[[Situation], T], situation: Situation) -> T:
        """Return what ``gather(situation)`` returned to its first caller."""
        with self._lock:
            lock = self._locks.setdefault(gather, threading.Lock())
        with lock:
            if gather not in self._values:
                self._values[gather] = gather(situation)
            value: T = self._values[gather]
            return value

    def put(self, gather: Callable[[Situation], T], value: T) -> None:
        """Set the value of ``gather``."""
        self._values[gather] = value


class Verdicts:
    """The outcomes of this machine's checks so far, which are sent to the other nodes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._awaited: set[str] = set()
        self._outcomes: list[Any] = []

    def expect(self, names: Iterable[str]) -> None:
        """Set the names of the machine's checks that run."""
        with self._lock:
            self._awaited = set(names)

    def add(self, name: str, outcome: Any) -> None:
        """Add the outcome of a check. Ignore checks across nodes."""
        with self._lock:
            if name in self._awaited:
                self._awaited.discard(name)
                self._outcomes.append(outcome)

    def so_far(self) -> tuple[list[Any], list[str]]:
        """Return the outcomes, and the names of the checks still running."""
        with self._lock:
            return list(self._outcomes), sorted(self._awaited)


@dataclass(frozen=True)
class Situation:
    """The facts that all checks share. Tests replace their sources."""

    options: Options = field(default_factory=Options)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """The environment that the job would inherit."""
    hostname: str = field(default_factory=socket.gethostname)
    proc: Path = Path("/proc")  # Root of the process file system; likewise ``sys`` and ``shm``
    sys: Path = Path("/sys")
    shm: Path = Path("/dev/shm")
    deadline: Deadline = field(default_factory=lambda: Deadline(60.0))
    """The deadline of the check that has this object."""
    once: Once = field(default_factory=Once)  # Facts that are gathered when they are first needed
    verdicts: Verdicts = field(default_factory=Verdicts)
    """The outcomes of this machine's checks so far."""
    chosen: frozenset[str] | None = None  # The names of the checks that run; None for all
    say: Callable[[str], None] = lambda _: None
    """Prints a progress line. It does not change any outcome."""

    def within(self, seconds: float) -> Situation:
        """Return the same situation with a deadline in ``seconds``."""
        return replace(self, deadline=Deadline(seconds, self.deadline))

    def shared(self, gather: Callable[[Situation], T]) -> T:
        """Return what ``gather`` returns for this situation. It is called once for all checks."""
        return self.once.get(gather, self)

    @property
    def attendance_checked(self) -> bool:
        """Whether another check reports why the nodes did not meet."""
        return ATTENDANCE in (self.chosen or ())

    @property
    def nproc(self) -> int:
        """The ranks of this node: as requested, or as many as `ddpdoctor run` would start."""
        if self.options.nproc is not None:
            return self.options.nproc
        return self.shared(visible_gpus) or CPU_RANKS

    @property
    def endpoint(self) -> tuple[str, int] | None:
        """Host and port of the rendezvous, from the options or ``MASTER_ADDR``; None if unknown.

        The port defaults to torchrun's.
        """
        if self.options.endpoint:
            return split_endpoint(self.options.endpoint)
        address, port = (self.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        if not address:
            return None
        return address, int(port) if port.isdigit() and 0 < int(port) < 65536 else DEFAULT_PORT


def text(path: Path) -> str:
    """Read a small file and strip it. Return an empty text if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text("utf-8", "replace").strip()
    return ""


def names(folder: Path) -> list[str]:
    """Return the sorted names in a directory; empty if it cannot be listed."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def gpu_facts(situation: Situation) -> GpuFacts:
    """Read everything that NVML reports about the GPUs of this machine."""
    try:
        return bounded_by_progress(read_health, min(DRIVER_TIMEOUT, situation.deadline.left()))
    except TimeoutError:
        trouble = f"the NVIDIA driver does not answer within {DRIVER_TIMEOUT:.0f} s"
        return GpuFacts(trouble=trouble, code=-1)


def cuda_choice(situation: Situation) -> Choice:
    """Return which GPUs CUDA would show to a job."""
    gpus = situation.shared(gpu_facts).gpus
    return choice(situation.environ, [(gpu.device, gpu.instances) for gpu in gpus])


def visible_gpus(situation: Situation) -> int:
    """Count the GPUs that a process of the job would see."""
    return situation.shared(cuda_choice).count


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``HOST``, ``HOST:PORT`` or ``[IPv6]:PORT``. The port defaults to torchrun's.

    Raises:
        ValueError: The endpoint has none of these forms.
    """
    host, colon, port = endpoint.rpartition(":")
    if not colon or endpoint.endswith("]") or (":" in host and not host.startswith("[")):
        host, port = endpoint, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(endpoint)
    return host, int(port) or DEFAULT_PORT


def joined_endpoint(host: str, port: int) -> str:
    """Return ``HOST:PORT`` or ``[IPv6]:PORT``, the reverse of :func:`split_endpoint`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# -- the place of this process and this node in the job


@dataclass(frozen=True)
class Place:
    """This process's place by a launcher's variables; None for values that they do not give."""

    launcher: str  # ``torchrun``, ``Slurm``, ``Open MPI``, ``MPICH`` or ``MVAPICH``
    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    node_rank: int | None = None
    nnodes: int | None = None
    hosts: tuple[str, ...] = ()  # The nodes' host names by node rank, if they are known


_LAUNCHER_VARIABLES = {
    "torchrun": (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    ),
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
"""Each launcher's variables: rank, world size, local rank, ranks of the node, node rank, nodes.

Sources: torchrun's documentation, "Environment Variables"; srun(1), "OUTPUT ENVIRONMENT VARIABLES";
Open MPI's FAQ on OMPI_COMM_WORLD_*; MPICH's Hydra and Intel MPI (PMI_*, MPI_LOCALRANKID).
Open MPI's NODE_RANK is not a node rank: it is a process's rank within the node.
"""


def environment_number(environ: Mapping[str, str], name: str) -> int | None:
    """Return a variable as a number; None if it is missing or not a number."""
    text = environ.get(name, "") if name else ""
    return int(text) if text.strip().isdigit() else None


def places(environ: Mapping[str, str]) -> tuple[Place, ...]:
    """Return the place given by each launcher whose variables are set, torchrun first."""
    return tuple(
        _slurm(environ, place) if launcher == "Slurm" else place
        for launcher, names in _LAUNCHER_VARIABLES.items()
        # A batch script or an `salloc` shell belongs to a Slurm job, but is not a task of it.
        if any(name in environ for name in names[:2])
        and (launcher != "Slurm" or {"SLURM_PROCID", "SLURM_STEP_ID"} <= environ.keys())
        for place in [_place(environ, launcher, names)]
    )


def _place(environ: Mapping[str, str], launcher: str, names: Sequence[str]) -> Place:
    rank, world, local, size, node, nodes = (environment_number(environ, name) for name in names)
    if launcher == "Open MPI":
        node = None
    if size == 1 and nodes is None and world is not None:
        # One process per node, so its rank is the node's rank.
        node, nodes = rank, world
    elif nodes is None and launcher != "torchrun" and size and world and world % size == 0:
        # All nodes have the same number of processes. Only the launcher knows which are where.
        nodes = world // size
    return Place(launcher, rank, world, local, size, node, nodes)


def _slurm(environ: Mapping[str, str], place: Place) -> Place:
    """Add the numbers of the Slurm step.

    The shell of `salloc` may be a step with one task, whose other variables are the job's.
    """
    world = environment_number(environ, "SLURM_STEP_NUM_TASKS")
    step_nodes = environment_number(environ, "SLURM_STEP_NUM_NODES")
    nodes = place.nnodes if step_nodes is None else step_nodes
    job_nodes = environment_number(environ, "SLURM_JOB_NUM_NODES")
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return replace(
        place,
        world_size=place.world_size if world is None else world,
        nnodes=job_nodes if nodes is None else nodes,
        hosts=expand_nodelist(listed),
    )


def expand_nodelist(nodelist: str) -> tuple[str, ...]:
    """Expand a Slurm node list such as ``gpu[01-03,7],login``; empty if it is malformed."""
    names: list[str] = []
    if nodelist.count("[") != nodelist.count("]"):
        return ()
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            choices = _choices(ranges) if ranges else [""]
            if choices is None or len(expanded) * len(choices) > 100_000:
                return ()
            expanded = [f"{head}{text}{tail}" for head in expanded for tail in choices]
        names += expanded
    return tuple(names)


def _choices(ranges: str) -> list[str] | None:
    """Expand ``01-03,7``; None if it is malformed or too long."""
    choices: list[str] = []
    for each in ranges.split(","):
        first, dash, last = each.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            return None
        numbers = range(int(first), int(last if dash else first) + 1)
        if len(numbers) > 100_000:
            return None
        choices += [str(value).zfill(len(first)) for value in numbers]
    return choices


@dataclass(frozen=True)
class NodePlace:
    """A node's place in the job, and the rendezvous."""

    nnodes: int
    rank: int | None  # This node's rank; None if torchrun is to choose it
    host: str  # The rendezvous host; empty if it was not given
    port: int
    rdzv_id: str
    names: tuple[str, ...] = ()  # The nodes' host names by rank, if the launcher reports them
    elastic: bool = False  # Whether torchrun chooses node 0, and gives its name to the ranks
    local_addr: str = ""  # The address it gives instead of the name; empty for the name

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``, as ``--rdzv-endpoint`` takes it."""
        return joined_endpoint(self.host, self.port)

    def name(self, rank: int) -> str:
        """Name a node by its rank, and by its host name if that is known."""
        if 0 <= rank < len(self.names):
            return f"{self.names[rank]} (node rank {rank})"
        return f"node rank {rank}"


def node_place(situation: Situation) -> NodePlace:
    """Return this node's place, from the options or else from Slurm's or MPI's variables."""
    options = situation.options
    nnodes, rank = options.nnodes, options.node_rank
    names: tuple[str, ...] = ()
    for place in places(situation.environ):
        if place.launcher == "torchrun":
            continue
        if place.nnodes and nnodes == 1:
            nnodes = place.nnodes
        if rank is None:
            rank = place.node_rank
        if place.hosts and len(place.hosts) == nnodes:
            names = names or place.hosts
    rdzv_id = options.rdzv_id or situation.environ.get("SLURM_JOB_ID", "none")
    host, port = situation.endpoint or (names[0] if names else "", DEFAULT_PORT)
    elastic = nnodes > 1 and (options.elastic or rank is None)
    return NodePlace(nnodes, rank, host, port, rdzv_id, names, elastic, options.local_addr)


# -- the container around this process: its kind, and what its control groups allow


DOCKERS_RESOLVER = "127.0.0.11"
"""The name server of Docker's own networks. Containers in the host's network have the host's."""

Kind = Literal["", "docker", "podman", "kubernetes"]


def container_kind(situation: Situation) -> Kind:
    """Return the kind of container around this process; empty if none is known."""
    root = situation.proc.parent
    if "KUBERNETES_SERVICE_HOST" in situation.environ:
        return "kubernetes"
    if (root / "run" / ".containerenv").exists():
        return "podman"
    if (root / ".dockerenv").exists():
        return "docker"
    return ""


def appears_when_started(situation: Situation) -> bool:
    """Return whether other nodes' names and addresses may appear only when they start."""
    inside = container_kind(situation)
    if inside != "docker":
        return bool(inside)
    lines = text(situation.proc.parent / "etc" / "resolv.conf").splitlines()
    return any(line.split() == ["nameserver", DOCKERS_RESOLVER] for line in lines)


def container_run_line(situation: Situation, option: str) -> str:
    """Return the line that starts this container with an option; empty if it is of another kind."""
    inside = container_kind(situation)
    return f"{inside} run {option} ..." if inside in ("docker", "podman") else ""


_UNLIMITED = 1 << 60  # Version 1 of control groups shows "no limit" as a number near 2**63


def _cgroup_folders(situation: Situation, controller: str) -> Iterator[Path]:
    """Yield the directories of a controller, from this process's own group up to the root.

    In a container the paths of /proc/self/cgroup are often the host's and do not exist. Then the
    root of the mount is the container's own group.
    """
    root = situation.sys / "fs" / "cgroup"
    for row in text(situation.proc / "self" / "cgroup").splitlines():
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mount = root if (root / "cgroup.controllers").exists() else root / "unified"
        elif controller in controllers.split(","):
            mount = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        folder = mount / path.strip("/")
        while True:
            if folder.is_dir():
                yield folder
            if folder in (mount, folder.parent):
                break
            folder = folder.parent


def _cgroup_number(path: Path) -> int | None:
    """Read the number in a file; None if there is none, or it means "no limit"."""
    digits = text(path)
    return int(digits) if digits.isdigit() and int(digits) < _UNLIMITED else None


def container_memory(situation: Situation) -> tuple[int, int] | None:
    """Return the bytes used and allowed of the tightest group; None if none has a limit."""
    found = []
    for folder in _cgroup_folders(situation, "memory"):
        for most, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _cgroup_number(folder / most)
            if limit is None:
                continue
            # The kernel frees page cache when memory is short.
            rows = (row.partition(" ") for row in text(folder / "memory.stat").splitlines())
            cache = ("inactive_file", "active_file")
            free = sum(int(value) for name, _, value in rows if name in cache and value.isdigit())
            found.append((max(0, (_cgroup_number(folder / used) or 0) - free), limit))
    return min(found, key=lambda each: each[1] - each[0], default=None)


def container_cores(situation: Situation) -> float | None:
    """Return how many cores the groups allow; None if there is no limit."""
    found = []
    for folder in _cgroup_folders(situation, "cpu"):
        quota, _, period = text(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            found.append(int(quota) / int(period))
        quota_us = _cgroup_number(folder / "cpu.cfs_quota_us")
        period_us = _cgroup_number(folder / "cpu.cfs_period_us")
        if quota_us and period_us:
            found.append(quota_us / period_us)
    return min(found, default=None)


def container_pids(situation: Situation) -> tuple[int, int] | None:
    """Return the current and maximum number of processes and threads in the tightest group."""
    found = []
    for folder in _cgroup_folders(situation, "pids"):
        most, now = _cgroup_number(folder / "pids.max"), _cgroup_number(folder / "pids.current")
        if most is not None:
            found.append((now or 0, most))
    return min(found, key=lambda each: each[1] - each[0], default=None)

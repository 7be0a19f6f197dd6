"""What the checks go by: the options, the environment and the machine, gathered once."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ddpdoctor.preflight.deadline import Deadline, while_it_goes_on
from ddpdoctor.system.gpu.health import GpuFacts, read_health
from ddpdoctor.system.gpu.visible import Choice, choice

T = TypeVar("T")

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

"""Define the snapshot: everything one frame of the monitor shows.

Live runs, finished runs, recordings, a machine without a run and the demonstration all become a
`Snapshot`. The drawing code takes one and does not know its source. Units are base units: seconds,
bytes, watts, hertz, degrees Celsius, and ratios from 0 to 1. An unknown value is None, never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpdoctor.core.finding import Finding
from ddpdoctor.run.records.base import Part

PHASES = ("data", "forward", "backward", "optimizer", "other", "wait")


@dataclass(frozen=True)
class Gpu(Part):
    """One GPU, by NVML's last report."""

    node: str
    index: int
    uuid: str
    name: str = ""
    utilization: float | None = None
    """Share of the last second in which any kernel ran, including waits in NCCL."""
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    clock: float | None = None
    clock_max: float | None = None
    throttle: tuple[str, ...] = ()
    ecc_errors: int | None = None
    pcie: float | None = None  # Bytes per second over PCIe, both directions
    nvlink: float | None = None  # Bytes per second over NVLink, both directions
    processes: tuple[tuple[int, int | None], ...] = ()
    """The processes that hold its memory: pid and bytes."""
    mig: bool = False
    problem: str = ""  # Why numbers are missing, in words


@dataclass(frozen=True)
class Times(Part):
    """The parts of a step: means over the last steps, in seconds."""

    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    wait: float
    total: float
    split: bool
    """Whether the backward is only compute. If not, it includes the wait and is marked ``~``."""
    lacked: float = 0.0
    """The part of ``own`` in which it was ready to run but had no CPU core. 0 if unknown."""

    @property
    def own(self) -> float:
        """The time of the rank itself: everything except the wait for others."""
        return self.total - self.wait


@dataclass(frozen=True)
class RankRow(Part):
    """One rank."""

    rank: int
    node: str
    local_rank: int | None = None
    restart: int = 0
    stage: str = ""  # The stages of a pipeline that it runs, from 0: ``1`` or ``0,2``
    pid: int | None = None
    state: str = "running"
    """``starting``, ``running``, ``stale``, ``debugger``, ``ended`` or ``dead``."""
    held: bool = False  # Whether it does not run because of the debugger
    said: str = ""  # The state in words: why the rank died, or what holds it
    phase: str = ""
    since: float | None = None  # Seconds in the phase
    site: str = ""  # ``path:line`` of the user's code that entered the phase
    collective: str = ""
    step: int | None = None
    epoch: int | None = None
    times: Times | None = None
    heartbeat: float | None = None  # Seconds since the rank's last sign of life
    dropped: int = 0
    rss: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None  # Bytes of torch's CUDA allocator
    cost: float | None = None  # Share of its time spent in ddpdoctor
    gpu: Gpu | None = None
    debug_port: int | None = None
    output: tuple[str, ...] = ()  # The last lines of its stderr that carry its prefix

    @property
    def memory(self) -> int | None:
        """Its GPU's memory, or its own without a GPU, in bytes."""
        if self.gpu is not None and self.gpu.memory_used is not None:
            return self.gpu.memory_used
        return self.reserved if self.reserved is not None else self.rss


@dataclass(frozen=True)
class Verdict(Part):
    """The line above the board."""

    text: str
    level: str = "ok"  # ``ok``, ``info``, ``warning`` or ``error``
    rank: int | None = None  # The rank that is blamed
    phase: str = ""  # The phase in which it is slow


@dataclass(frozen=True)
class Machine(Part):
    """The machine that the monitor runs on."""

    node: str
    cpu: float | None = None
    cores: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class FindingRow:
    """A finding, and the time of its report."""

    finding: Finding
    time: float | None = None  # Unix seconds
    attempt: int = 0  # The attempt of the job to which it applies


@dataclass(frozen=True)
class Job(Part):
    """The progress of the job, and its speed."""

    script: str = ""  # The script and its options
    step: int | None = None  # Steps done
    steps: int | None = None  # The expected number, if the command or the loaders show it
    epoch: int | None = None
    epochs: int | None = None
    rate: float | None = None  # Steps per second
    samples_rate: float | None = None  # Samples per second, of all ranks
    loss: float | None = None  # The mean over the first ranks
    left: float | None = None  # Seconds until the last step
    attempt: int = 0  # The number of the attempt, from 0
    attempts: int | None = None  # Maximum number that torchrun makes


STATES = ("starting", "running", "hung", "restarting", "failing", "ended", "failed", "gone")
"""The states of a run. ``failing``: ranks died, but the launcher has not ended yet."""


@dataclass(frozen=True)
class Snapshot(Part):
    """One frame."""

    time: float  # Unix seconds
    kind: str  # ``run``, ``machine`` or ``demo``
    verdict: Verdict
    run: str = ""  # The run's id
    path: str = ""
    command: str = ""
    started: float | None = None
    live: bool = False
    state: str = "running"
    """One of `STATES`. ``gone``: the run directory was removed, so the state is unknown."""
    exit_status: int | None = None
    world_size: int | None = None
    debug_port: int | None = None  # The port of a debug session with all ranks
    job: Job = Job()
    ranks: tuple[RankRow, ...] = ()
    """The blamed rank first, then by own time, descending. Ranks that do not run come last."""
    median: Times | None = None
    skew: float | None = None  # The largest own time, as a ratio to the median one
    gpus: tuple[Gpu, ...] = ()
    machine: Machine | None = None
    findings: tuple[FindingRow, ...] = ()
    output: tuple[str, ...] = ()
    nvml: str = ""  # The problem with NVML, in words
    notes: tuple[str, ...] = ()
    """Problems of the monitor itself: unreadable files, a run that is gone."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and launch settings for the environment panel."""


def memory_share(of: Gpu | Machine) -> float | None:
    """Return the used share of a memory. None if unknown."""
    if of.memory_used is None or not of.memory_total:
        return None
    return of.memory_used / of.memory_total

"""Define the snapshot: everything one frame of the monitor shows.

Live runs, finished runs, recordings, a machine without a run and the demonstration all become a
`Snapshot`; everything that draws takes one and does not know where it came from. Units are base
units: seconds, bytes, watts, hertz, degrees Celsius, and ratios from 0 to 1. An unknown value is
None and never 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpdoctor.core.finding import Finding

PHASES = ("data", "forward", "backward", "optimizer", "other", "wait")


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML reported it last."""

    node: str
    index: int
    uuid: str
    name: str = ""
    utilization: float | None = None
    """Share of the last second in which any kernel ran: NCCL's waiting counts, too."""
    memory_used: int | None = None
    memory_total: int | None = None
    power: float | None = None
    power_limit: float | None = None
    temperature: float | None = None
    clock: float | None = None
    clock_max: float | None = None
    throttle: tuple[str, ...] = ()
    ecc_errors: int | None = None
    pcie: float | None = None
    """Bytes a second over PCIe, both directions."""
    nvlink: float | None = None
    """Bytes a second over NVLink, both directions."""
    processes: tuple[tuple[int, int | None], ...] = ()
    """The processes that hold its memory: pid and bytes."""
    mig: bool = False
    problem: str = ""
    """Why numbers are missing, in words; empty if none are."""

    @property
    def memory_share(self) -> float | None:
        """The used share of its memory."""
        return _share(self.memory_used, self.memory_total)


@dataclass(frozen=True)
class Times:
    """Where a step goes: means over the last steps, in seconds."""

    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    wait: float
    total: float
    split: bool
    """Whether the backward is compute alone; if not, it holds the wait, and a ``~`` says so."""
    lacked: float = 0.0
    """How much of the rank's own time it was ready to run and had no CPU core; 0 if not known."""

    @property
    def own(self) -> float:
        """What the rank spent itself: everything but the wait for others."""
        return self.total - self.wait


@dataclass(frozen=True)
class RankRow:
    """One rank."""

    rank: int
    node: str
    local_rank: int | None = None
    restart: int = 0
    stage: str = ""
    """The stages of a pipeline that it runs, from 0: ``1``, ``0,2``; empty without one."""
    pid: int | None = None
    state: str = "running"
    """``starting``, ``running``, ``stale``, ``debugger``, ``ended`` or ``dead``."""
    said: str = ""
    """The state in words where there is more to say: how it died, who holds it."""
    phase: str = ""
    since: float | None = None
    """Seconds in the phase."""
    site: str = ""
    """``path:line`` of the user's code that entered the phase."""
    collective: str = ""
    step: int | None = None
    epoch: int | None = None
    times: Times | None = None
    heartbeat: float | None = None
    """Seconds since the rank was last seen to move."""
    dropped: int = 0
    rss: int | None = None
    allocated: int | None = None
    reserved: int | None = None
    peak: int | None = None
    """Bytes of torch's CUDA allocator."""
    cost: float | None = None
    """What ddpdoctor takes of its time, as a part of it."""
    gpu: Gpu | None = None
    debug_port: int | None = None
    output: tuple[str, ...] = ()
    """The last lines of its stderr, as far as they carry its mark."""

    @property
    def memory(self) -> int | None:
        """The memory that matters to it: its GPU's, or its own where it has none."""
        if self.gpu is not None and self.gpu.memory_used is not None:
            return self.gpu.memory_used
        return self.reserved if self.reserved is not None else self.rss


@dataclass(frozen=True)
class Verdict:
    """The line above the board."""

    text: str
    level: str = "ok"
    """``ok``, ``info``, ``warning`` or ``error``."""
    rank: int | None = None
    """The rank that is blamed."""
    phase: str = ""
    """The phase in which it is slow."""


@dataclass(frozen=True)
class Machine:
    """The machine that the monitor runs on."""

    node: str
    cpu: float | None = None
    cores: int | None = None
    memory_used: int | None = None
    memory_total: int | None = None

    @property
    def memory_share(self) -> float | None:
        """The used share of its memory."""
        return _share(self.memory_used, self.memory_total)


@dataclass(frozen=True)
class FindingRow:
    """A finding, and when it was said."""

    finding: Finding
    time: float | None = None
    """Unix seconds."""
    attempt: int = 0
    """In which attempt of the job."""


@dataclass(frozen=True)
class Job:
    """How far the job is, and how fast."""

    script: str = ""
    """The script and its options."""
    step: int | None = None
    """Steps done."""
    steps: int | None = None
    """How many there will be, where the command or the loaders tell."""
    epoch: int | None = None
    epochs: int | None = None
    rate: float | None = None
    """Steps a second."""
    samples_rate: float | None = None
    """Samples a second of all ranks."""
    loss: float | None = None
    """The mean over the first ranks."""
    left: float | None = None
    """Seconds until the last step."""
    attempt: int = 0
    """Which attempt it is, from 0."""
    attempts: int | None = None
    """How many torchrun makes at most."""


STATES = ("starting", "running", "hung", "restarting", "failing", "ended", "failed", "gone")
"""The states of a run. ``failing``: ranks died, and the launcher has yet to end."""


@dataclass(frozen=True)
class Snapshot:
    """One frame."""

    time: float
    """Unix seconds."""
    kind: str
    """``run``, ``machine`` or ``demo``."""
    verdict: Verdict
    run: str = ""
    """The run's id."""
    path: str = ""
    command: str = ""
    started: float | None = None
    live: bool = False
    state: str = "running"
    """One of `STATES`; ``gone`` if the run directory was removed, so that nothing is known."""
    exit_status: int | None = None
    world_size: int | None = None
    job: Job = Job()
    ranks: tuple[RankRow, ...] = ()
    """Blamed ones first: by own time, descending; ranks that run nothing, at the end."""
    median: Times | None = None
    skew: float | None = None
    """The largest own time, as a ratio to the median one."""
    gpus: tuple[Gpu, ...] = ()
    machine: Machine | None = None
    findings: tuple[FindingRow, ...] = ()
    output: tuple[str, ...] = ()
    nvml: str = ""
    """NVML's state in words; empty when all is well."""
    notes: tuple[str, ...] = ()
    """What the person should know of the monitor itself: unreadable files, a run that is gone."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and launch settings for the environment panel."""


def _share(used: int | None, total: int | None) -> float | None:
    return None if used is None or not total else used / total

"""Find and examine the ranks of a job that runs without ddpdoctor, from outside.

Nothing is loaded into a rank, and no rank is paused: py-spy reads the stacks, and ``/proc`` shows
the activity of the processes. Steps, and the numbers and groups of collectives, remain unknown.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import RULES, Finding, examine
from ddpdoctor.core.formatting import count
from ddpdoctor.core.formatting import named as named_ranks
from ddpdoctor.core.opening import ask_as, whole, whose
from ddpdoctor.diagnose.hangs import flight_dumps
from ddpdoctor.diagnose.hangs.diagnosis import diagnose
from ddpdoctor.diagnose.hangs.hang_snapshot import (
    Blocked,
    HangSnapshot,
    RankState,
    find_blocked,
    hang_snapshot,
)
from ddpdoctor.diagnose.hangs.process_activity import MIN_STIR, doing
from ddpdoctor.diagnose.source_files import brief, statement
from ddpdoctor.run import rundir
from ddpdoctor.run.names import MARK, MAX_WORLD_SIZE, RUN_DIRECTORY
from ddpdoctor.run.records.supervisor import Frame, HangRecord, RankEvidence, RankStacks
from ddpdoctor.run.snapshot import Records, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks import capture
from ddpdoctor.stacks.frames import innermost, tail, user_frames
from ddpdoctor.supervise import nccl_ras
from ddpdoctor.supervise.hang_watch import MIN_SILENCE
from ddpdoctor.system.proc import PROC, Listed, below, children, last_ran, listed, named, pause
from ddpdoctor.system.process_activity import compared, read_state, sample

# -- the processes of a job

_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""Variables with the rank and the world size, torchrun's first."""

_JOBS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_STEP_ID")
"""Variables whose values are equal in all ranks of a job."""

_TORCH = "libtorch_python"  # A library that a process with torch has mapped
_WORKER = "torch/utils/data/_utils/worker.py"


@dataclass(frozen=True)
class Job:
    """The ranks of one job on this machine."""

    ranks: Mapping[int, Listed]  # The processes by rank
    world_size: int  # The number of ranks on all nodes. 0 if unknown.
    name: str  # The script and the process that started the ranks, to print
    environ: Mapping[str, str]  # The environment of the first rank

    @property
    def started(self) -> int:
        """Time at which the first rank started, in Unix nanoseconds."""
        return min(each.began for each in self.ranks.values())

    @property
    def ended(self) -> frozenset[int]:
        """Ranks of this machine whose process is gone. torchrun ends a job if one has failed."""
        own, local, many = (
            whole(self.environ.get(name, ""), -1)
            for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        )
        if min(own, local, many) < 0 or many > MAX_WORLD_SIZE:
            return frozenset()
        return frozenset(range(own - local, own - local + many)) - self.ranks.keys()


def of_pid(pid: int) -> Listed:
    """Return a process of this user, or of any user for root.

    Raises:
        DoctorError: If it does not exist or belongs to another user.
    """
    found = named(PROC, pid)
    if found is None or not found.alive:
        raise DoctorError(f"there is no process {pid}")
    if os.geteuid() not in (0, found.uid):
        raise DoctorError(f"process {pid} belongs to {whose(found.uid)}", ask_as(found.uid))
    return found


def find(pid: int | None) -> Job:
    """Find the job that a process belongs to: a rank, its launcher, or a process of a rank.

    Without a process it is the newest job of this user.

    Raises:
        DoctorError: If there is none, or it belongs to another user or to a run of ddpdoctor.
    """
    chosen = of_pid(pid) if pid is not None else None
    uid = chosen.uid if chosen is not None else os.geteuid()
    processes = {each.pid: each for each in listed(PROC) if each.uid == uid and each.alive}
    jobs = _jobs(processes)
    if chosen is None:
        jobs = [each for each in jobs if MARK not in each.environ]
        if not jobs:
            raise DoctorError(
                "no job runs here without ddpdoctor", "name one of its processes: attach PID"
            )
    else:
        jobs = _of(chosen, jobs) or _spawned(chosen)
    newest = max(jobs, key=lambda job: max(each.started for each in job.ranks.values()))
    if MARK in newest.environ:
        # Name a chosen directory by its path.
        run = Path(newest.environ.get(RUN_DIRECTORY, ""))
        name = run.name if run.parent == rundir.base_directory() else str(run)
        raise DoctorError(
            f"process {pid} is of the run {name} of ddpdoctor",
            f"ddpdoctor stacks {shlex.quote(name)}",
        )
    return newest


def _jobs(processes: Mapping[int, Listed]) -> list[Job]:
    """Return the jobs whose ranks have the rank in their environment."""
    for rank_name, world_name in _RANKS:
        grouped: dict[tuple[str, ...], list[tuple[int, Listed, dict[str, str]]]] = defaultdict(list)
        for each in processes.values():
            environ = each.environ
            number, world = (whole(environ.get(name, ""), -1) for name in (rank_name, world_name))
            if 0 <= number < world <= MAX_WORLD_SIZE and maps(each, "python"):
                key = tuple(environ.get(name, "") for name in (*_JOBS, world_name))
                grouped[key].append((number, each, environ))
        if grouped:
            return [_job(found, processes, rank_name, world_name) for found in grouped.values()]
    return []


def _job(
    found: Sequence[tuple[int, Listed, dict[str, str]]],
    processes: Mapping[int, Listed],
    rank_name: str,
    world_name: str,
) -> Job:
    numbers = {process.pid: number for number, process, _ in found}
    ranks: dict[int, Listed] = {}
    for number, process, _ in sorted(found, key=lambda each: each[1].started):
        # A rank's environment is inherited by the processes that it starts.
        if all(numbers.get(above) != number for above in _above(process, processes)):
            ranks[number] = process
    first = min(ranks)
    environ = next(environ for number, _, environ in found if number == first)
    above = (processes[each] for each in _above(ranks[first], processes))
    launcher = next((each for each in above if rank_name not in each.environ), ranks[first])
    name = _name(ranks[first], launcher)
    return Job(dict(sorted(ranks.items())), whole(environ[world_name]), name, environ)


def _name(rank: Listed, launcher: Listed) -> str:
    scripts = [os.path.basename(word) for word in rank.words if word.endswith(".py")]
    return f"{scripts[0]} (pid {launcher.pid})" if scripts else launcher.described


def _above(process: Listed, processes: Mapping[int, Listed]) -> list[int]:
    """Return the ancestors of a process, nearest first."""
    found: list[int] = []
    above = processes.get(process.parent)
    while above is not None and above.pid not in found:
        found.append(above.pid)
        above = processes.get(above.parent)
    return found


def _of(chosen: Listed, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs that a process started, or else the job that it belongs to."""
    inside = {chosen.pid, *below({chosen.pid})}
    found = [job for job in jobs if not inside.isdisjoint(each.pid for each in job.ranks.values())]
    return found or [
        job for job in jobs if any(chosen.pid in below({each.pid}) for each in job.ranks.values())
    ]


def _spawned(chosen: Listed) -> list[Job]:
    """Return a job without ranks in its environment, such as one of ``mp.spawn``.

    Its ranks are the processes with torch that one process started, in the order of their start.
    """
    above = named(PROC, chosen.parent)
    for parent in (chosen.pid, *([above.pid] if above and maps(above, _TORCH) else [])):
        started = (named(PROC, each) for each in children(parent))
        ranks = [each for each in started if each is not None and maps(each, _TORCH)]
        stacks = read(enumerate(ranks))
        ranks = [
            process
            for process, seen in zip(ranks, stacks, strict=True)
            if not any(frame.path.endswith(_WORKER) for frame in _main(seen))
        ]
        if ranks and (parent == chosen.pid or chosen.pid in {each.pid for each in ranks}):
            ranks.sort(key=lambda each: (each.started, each.pid))
            break
    else:
        ranks = [chosen]
        if not maps(chosen, "python"):
            raise DoctorError(
                f"process {chosen.pid} is no rank of a job, and started none",
                "name the launcher (torchrun), or a Python process",
            )
    first = ranks[0]
    return [Job(dict(enumerate(ranks)), 0, _name(chosen, chosen), first.environ)]


def maps(process: Listed, library: str) -> bool:
    """Return whether a process has mapped a file whose name contains ``library``."""
    try:
        return library in (process.folder / "maps").read_text(errors="replace")
    except OSError:
        return False


# -- the activity of its ranks

BETWEEN = 1.5  # Seconds between two reads of the stacks
MIN_LOOKS = 4
MAX_WAKES = 3
"""Maximum wake-ups of a main thread within one wait. One that trains wakes up more often."""

_CALLS = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/nn/functional.py",
)
"""torch's files whose functions wait for other ranks."""
_NO_WAITS = ("new_group", "destroy_process_group")
_JOINS = "init_process_group"
_BACKWARD = "_engine_run_backward"


@dataclass(frozen=True)
class Look:
    """The result of watching a job."""

    job: Job  # The job
    seconds: float  # Time for which it was watched
    run: Run  # A run without a directory, whose ranks were examined
    moving: frozenset[int]  # The ranks that were seen at different places
    since: Mapping[int, int]
    """When each rank that does not move last ran, by rank, if the kernel tells."""

    @cached_property
    def still(self) -> HangSnapshot:
        """The examined ranks."""
        found = hang_snapshot(self.run)
        assert found is not None
        return found

    @property
    def stacks(self) -> tuple[RankStacks, ...]:
        """The stacks of the ranks."""
        return tuple(each.stacks for each in self.still.ranks if each.stacks is not None)

    @cached_property
    def waits(self) -> list[Blocked]:
        """The collectives in which ranks wait and make no progress."""
        return find_blocked(self.still)

    @cached_property
    def dumps(self) -> flight_dumps.Dumps | None:
        """The files that its Flight Recorders have written. None if there are none."""
        return _dumps(self.job)

    @property
    def stood(self) -> int:
        """Longest time in seconds for which a rank has not moved."""
        return max((each.seconds for each in self._fixed), default=0)

    @property
    def _fixed(self) -> list[RankState]:
        return [each for each in self.still.ranks if each.rank not in self.moving and each.frames]

    @cached_property
    def findings(self) -> list[Finding]:
        """Return why the job makes no progress. Empty if it does, or has stopped only briefly."""
        if self.stood < MIN_SILENCE:
            return []
        if self.dumps is not None:
            import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)

            run = self.dumps.run
            found = [each for each in examine(run, RULES.values()) if self.dumps.proves(each.code)]
            if found:
                return found
        if not self.job.world_size and not any(each.joined for each in self.still.ranks):
            # The number of ranks to wait for is unknown.
            return []
        return diagnose(self.still, False)


def look(job: Job, seconds: float) -> Look:
    """Watch the ranks of a job for at least some seconds.

    Raises:
        DoctorError: If the job has ended.
    """
    clock = time.time_ns()
    before = {rank: sample(each.pid) for rank, each in job.ranks.items()}
    looks, lasted = _looks(job, seconds)
    found, moving, since = [], set(), {}
    for rank, process in job.ranks.items():
        if not looks[-1][rank].state.letter:
            continue
        own = [each[rank] for each in looks]
        seen = [each for each in own if each.threads] or own
        activity = compared(before[rank], sample(process.pid), lasted)
        evidence = replace(_evidence(job, rank, seen), since=clock, activity=activity)
        if _moves(evidence, seen):
            moving.add(rank)
            evidence = replace(evidence, phase=evidence.phase and Phase.OTHER.label, collective="")
        elif (ago := last_ran(process.pid)) is not None and ago > lasted:
            since[rank] = time.time_ns() - int(ago * 1e9)
            evidence = replace(evidence, since=since[rank])
        found.append(evidence)
    if not found:
        raise DoctorError("the job has ended")
    still = not moving and (any(map(_waits, found)) or not any(map(_stirs, found)))
    record = _record(job, found, clock, everybody=still)
    run = Run(Path(), {}, (), supervisor=Records((record,)), taken=record.time)
    return Look(job, lasted, run, frozenset(moving), since)


def _record(job: Job, found: Sequence[RankEvidence], clock: int, *, everybody: bool) -> HangRecord:
    """Make the record of an examination from the evidence gathered since ``clock``."""
    if any(each.phase is None for each in found):
        # Ranks that do something else have not got that far.
        other = Phase.OTHER.label
        found = [replace(each, phase=None) if each.phase == other else each for each in found]
    pids = [each.pid for each in found if each.backend == "nccl"]
    gone = job.ended | (job.ranks.keys() - {each.rank for each in found})
    ended = [
        RankEvidence(rank=rank, ended=True, phase=Phase.OTHER.label, since=clock, step=-1)
        for rank in gone
    ]
    taken = time.time_ns()
    return HangRecord(
        time=taken,
        number=1,
        restart=0,
        seconds=round((taken - max(each.since for each in found)) / 1e9, 1),
        everybody=everybody,
        limit=MIN_SILENCE,
        ras=nccl_ras.status(pids, job.world_size or len(found)) if pids else None,
        ranks=tuple(sorted([*found, *ended], key=lambda each: each.rank)),
    )


def _looks(job: Job, seconds: float) -> tuple[list[dict[int, RankStacks]], float]:
    """Read the stacks of all ranks several times. Return them and the seconds that this took."""
    began = time.monotonic()
    found: list[dict[int, RankStacks]] = []
    while len(found) < MIN_LOOKS or time.monotonic() < began + seconds:
        if found:
            pause(min(BETWEEN, seconds / (MIN_LOOKS - 1)))
        found.append({each.rank: each for each in read(job.ranks.items())})
    return found, time.monotonic() - began


def _moves(evidence: RankEvidence, looks: Sequence[RankStacks]) -> bool:
    """Return whether a rank moved between looks, or woke up in what looks like a single wait."""
    if len({(_place(each), _where(_main(each))) for each in looks}) > 1:
        return True
    # Other waits may poll, and some of NCCL's do.
    one = _waits(evidence) and evidence.backend != "nccl"
    return one and evidence.activity is not None and evidence.activity.switches > MAX_WAKES


def _waits(evidence: RankEvidence) -> bool:
    return evidence.phase != Phase.OTHER.label


def _stirs(evidence: RankEvidence) -> bool:
    """Return whether any thread computes, because a script may not train in the main thread."""
    return evidence.activity is not None and evidence.activity.cpu >= MIN_STIR


def read(ranks: Iterable[tuple[int, Listed]]) -> list[RankStacks]:
    """Read the stacks of processes by py-spy, without pausing them."""
    host, trouble = socket.gethostname(), "it runs without ddpdoctor"
    asked = [
        RankStacks(rank, 0, each.pid, host, state=read_state(each.pid), trouble=trouble)
        for rank, each in ranks
    ]
    most = capture.MAX_PROCESSES
    found: list[RankStacks] = []
    for part in (asked[each : each + most] for each in range(0, len(asked), most)):
        seen = capture.read_silent(part, capture.CAPTURE_TIMEOUT)
        if any(each.note.startswith(capture.SAID) for each in seen):
            # A stack that changes while it is read is often damaged.
            seen = capture.read_silent(seen, capture.CAPTURE_TIMEOUT)
        found += seen
    return [replace(each, note="") if each.threads else each for each in found]


def _evidence(job: Job, rank: int, looks: Sequence[RankStacks]) -> RankEvidence:
    """Infer a rank's position from its stacks."""
    newest = looks[-1]
    phase, collective = _where(_main(newest))
    if phase is None:
        newest = replace(newest, world_size=job.world_size)
    return RankEvidence(
        rank=rank,
        pid=newest.pid,
        host=newest.host,
        backend="nccl" if _uses_nccl(newest.pid) else "",
        world_size=job.world_size or len(job.ranks),
        phase=phase,
        step=-1,
        collective=collective,
        stacks=newest,
        later=looks[-2] if len(looks) > 1 else None,
    )


def _where(frames: Sequence[Frame]) -> tuple[str | None, str]:
    """Return the phase that a stack shows, and the collective."""
    inner = tail(frames)
    names = [each.function for each in inner]
    if _JOINS in names:
        return None, ""
    calls = [each.function for each in inner if each.path.endswith(_CALLS)]
    if calls and inner[-1].path.endswith(_CALLS) and not set(_NO_WAITS) & set(calls):
        return Phase.WAIT.label, calls[0]
    if _BACKWARD in names:
        return Phase.BACKWARD.label, ""
    last = innermost(frames)
    if last is not None and last == frames[-1] and ".wait(" in statement(last.path, last.line):
        # A C++ method has no frame.
        return Phase.WAIT.label, "Work.wait"
    return Phase.OTHER.label, ""


def _place(stacks: RankStacks) -> tuple[Frame, ...]:
    frames = _main(stacks)
    return user_frames(frames) or frames


def _main(stacks: RankStacks) -> tuple[Frame, ...]:
    return stacks.main.frames if stacks.main is not None else ()


def _uses_nccl(pid: int) -> bool:
    """Return whether a process has an NCCL communicator, as the names of its threads show."""
    for path in (PROC / str(pid) / "task").glob("*/comm"):
        with contextlib.suppress(OSError):
            if path.read_text().startswith("pt_nccl"):
                return True
    return False


# -- files of torch's Flight Recorder

_DUMPS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


def _dumps(job: Job) -> flight_dumps.Dumps | None:
    """Read the files that the Flight Recorders of a job have written. None if there are none."""
    prefix = next((job.environ[name] for name in _DUMPS if job.environ.get(name)), "")
    files = []
    for rank, process in job.ranks.items():
        path = Path(f"{prefix}{rank}")
        with contextlib.suppress(OSError):
            # An earlier job's files have the same names.
            if prefix and path.stat().st_mtime_ns >= process.began:
                files.append(str(path))
    try:
        return flight_dumps.read(files) if files else None
    except DoctorError:
        return None


# -- descriptions


def lines(look: Look) -> Iterator[str]:
    """Describe the ranks, and which ranks they wait for."""
    job, ranks = look.job, look.still.ranks
    many = count(len(job.ranks), "rank")
    if job.world_size > len(job.ranks):
        many = f"{len(job.ranks)} of {job.world_size} ranks here"
    yield f"{job.name}: {many}, watched for {look.seconds:.0f} s from outside"
    yield f"  {'rank':<6}{'pid':<9}state"
    for rank in ranks:
        yield f"  {rank.rank:<6}{rank.evidence.pid or '-':<9}{_doing(look, rank)}"
    for one in look.waits:
        absent = sorted({*(rank.rank for rank in one.absent), *one.unseen})
        waiting = [rank.rank for rank in one.waiting]
        if absent:
            verb = "wait" if len(waiting) > 1 else "waits"
            yield f"  {named_ranks(waiting)} {verb} in {one.what} for {named_ranks(absent)}"


def _doing(seen: Look, rank: RankState) -> str:
    """Describe a rank in a few words."""
    at = brief(rank.site)
    if rank.stacks is None:
        return "its process has ended"
    if not rank.frames:
        return rank.stacks.note
    if rank.rank in seen.moving:
        return f"moves, last seen at {at}"
    if rank.in_collective:
        text = f"waits in {rank.waits_in} at {brief(rank.waits_at)}"
    else:
        joins = any(each.function == _JOINS for each in rank.frames)
        text = f"in {_JOINS} at {at}" if joins else f"at {at}, {doing(rank)}"
    return f"{text}, for {'' if rank.rank in seen.since else 'at least '}{rank.seconds} s"


def remarks(look: Look) -> Iterator[str]:
    """Describe what is unknown, and what to do about it."""
    notes = {each.note for each in look.stacks if not each.threads}
    if capture.FORBIDDEN in notes:
        yield (
            "run it with sudo, or allow ptrace: sudo sysctl kernel.yama.ptrace_scope=0; in a "
            "container: --cap-add SYS_PTRACE"
        )
    elif notes:
        yield f"without stacks a hang cannot be diagnosed: {', '.join(sorted(notes))}"
    elif look.dumps is not None:
        yield f"the Flight Recorders of {named_ranks(look.dumps.ranks)} left files, which were read"
    if look.findings or not look.stacks or notes:
        pass
    elif look.moving and not look.waits:
        yield "ranks move, and none waits for another one for long: no hang is seen"
    elif look.stood < MIN_SILENCE:
        yield (
            f"no verdict: it has stood still for {look.stood} s at most, and a hang is one of "
            f"{MIN_SILENCE:.0f} s and more; --for {MIN_SILENCE + 5:.0f} watches longer"
        )
    else:
        yield "no verdict: the stacks alone do not show the cause"
    yield (
        "from outside, steps and the numbers and groups of collectives are not known; "
        "`ddpdoctor run` records them"
    )

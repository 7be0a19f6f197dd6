"""Start the probe in a process, and turn the process into a rank.

Hooks are installed when the modules that they wrap are imported. The process becomes a rank when
``init_process_group`` succeeds, regardless of its launcher. DataLoader workers and other forked
children inherit the hooks in a disabled state. A child that makes a process group becomes a rank as
well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.hooks import collectives, ddp, exits, overrides, training
from ddpdoctor.probe.hooks.exits import Exits
from ddpdoctor.probe.observers import buffers, collective_calls, ddp_modules, files, optimizers
from ddpdoctor.probe.observers.collective_calls import Flight, Ledger
from ddpdoctor.probe.observers.ddp_modules import Changes, Models, Replicas, Stages
from ddpdoctor.probe.observers.failures import Checkpoints
from ddpdoctor.probe.observers.fingerprints import Fingerprints, Independent
from ddpdoctor.probe.observers.gradients import (
    ConstantLosses,
    Edits,
    Gradients,
    LossScale,
    Outside,
)
from ddpdoctor.probe.observers.job_launch import LaunchOptions
from ddpdoctor.probe.observers.loaders import Loops
from ddpdoctor.probe.observers.memory import Memory
from ddpdoctor.probe.observers.nonfinite import LocalGradients, Losses
from ddpdoctor.probe.observers.optimizers import Schedulers, Zeroing
from ddpdoctor.probe.observers.overhead import Pacing
from ddpdoctor.probe.observers.own_work import OwnWork
from ddpdoctor.probe.observers.random_numbers import RandomNumbers
from ddpdoctor.probe.observers.samples import COMPARED_INDICES, FOLLOWED_INDICES, Fed, Samples
from ddpdoctor.probe.observers.stack_sampling import Profiles
from ddpdoctor.probe.observers.steps import StepTracker
from ddpdoctor.probe.runtime import (
    debugger,
    events,
    hot,
    rank,
    shield,
    sites,
    stacks,
    torch_groups,
    watch,
)
from ddpdoctor.probe.runtime.budget import clock
from ddpdoctor.probe.runtime.events import subscribe
from ddpdoctor.probe.runtime.rank import RankState, environment_int, run_directory
from ddpdoctor.probe.runtime.recorder import Recorder
from ddpdoctor.probe.runtime.wrapping import when_imported
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import CAPSULE, FORMAT, TRAINED, namespace, rank_stem
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase, StatusPage

MAX_ATTEMPTS = 1000

_INSTALL: tuple[tuple[str, Callable[[ModuleType], None]], ...] = (
    ("torch.distributed.distributed_c10d", collectives.install_groups),
    ("torch.distributed.distributed_c10d", collectives.install_collectives),
    ("torch.distributed.distributed_c10d", collective_calls.install_flight_recorder),
    ("torch.nn.parallel.distributed", ddp.install),
    ("torch.nn.parallel.distributed", overrides.install_ddp),
    ("torch.utils.data.dataloader", training.install_dataloader),
    ("torch.utils.data.dataloader", overrides.install_loader),
    ("torch.utils.data.dataset", training.install_subset),
    ("torch.utils.data.distributed", training.install_distributed_sampler),
    ("torch.utils.data.distributed", overrides.install_sampler_seed),
    *((name, overrides.install_seed) for name in overrides.SEEDED),
    ("torch", overrides.install_first_seed),
    ("torch.autograd", training.install_backward),
    ("torch.distributed.pipelining.stage", ddp.install_stage_forwards),
    # The first path is for torch 2.6 and later, the second for 2.4 and 2.5.
    ("torch.distributed.fsdp._fully_shard._fully_shard", ddp.install_sharded),
    ("torch.distributed._composable.fsdp.fully_shard", ddp.install_sharded),
    ("torch.distributed.checkpoint.state_dict", training.install_state_dict),
    ("torch.optim.optimizer", training.install_optimizer),
    ("torch.amp.grad_scaler", training.install_scaler),
    ("torch.nn.utils.clip_grad", training.install_clipping),
    ("torch.serialization", training.install_serialization),
    ("torch.multiprocessing.spawn", exits.install_spawn),
)
"""Hooks that are installed once a module is imported."""


def start() -> None:
    """Install the probe, once per process and before it imports torch."""
    forgetting = rank.forget, stacks.forget, debugger.forget, files.forget, ddp_modules.forget_loads
    for forget in forgetting:
        os.register_at_fork(after_in_child=forget)
    events.group_joined.append(shield.shielded(become))
    shield.watch_forks()
    stacks.declare_worker()
    exits.install()
    for name, install in _INSTALL:
        when_imported(name, install)
    for name in dict.fromkeys(row[0] for row in training.WRAPPED):
        when_imported(name, training.install_wrapped)
    # Last, since this may wait for a debugger before the user's first line.
    debugger.install()


def _joining_line() -> Location | None:
    """Return the line of the user's code that joins the process group."""
    try:
        site = sites.caller()
    except Exception as error:
        # This line is not worth failing for.
        shield.fault("joined", error)
        return None
    return site.location if site.path else None


def _versions(torch: Any) -> dict[str, str]:
    """Return the versions that must be equal on all nodes of a job."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda or ""),
    }
    if "nccl" in str(torch.distributed.get_backend()):
        with contextlib.suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
            # NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.03  Release Build ...
            match = re.search(r"\s(\d+\.[\d.]+)\s", file.readline())
            if match is not None:
                found["driver"] = match[1]
    return found


def become(torch: Any) -> None:
    """Open this rank's files and start recording, once."""
    if rank.current() is not None:
        return
    restart = environment_int("TORCHELASTIC_RESTART_COUNT") or 0
    state = open_rank(torch, restart, joined=_joining_line())
    if state is None:
        return
    observe(state)
    stem = rank_stem(torch.distributed.get_rank(), state.restart)
    exits.watch_fatal_signals(os.path.join(run_directory(), stem + ".fault"))
    start_recording(state)
    watch.start()
    atexit.register(rank.end)


def open_rank(torch: Any, restart: int, *, joined: Location | None = None) -> RankState | None:
    """Open this rank's files and follow its steps and collectives.

    Args:
        torch: The module.
        restart: The attempt.
        joined: The line that joined the process group.

    Returns:
        The rank. None if its files cannot be written.
    """
    distributed = torch.distributed
    number, world_size = distributed.get_rank(), distributed.get_world_size()
    local_rank = environment_int("LOCAL_RANK")
    started = time.time_ns()
    try:
        page, journal, restart = _open(number, world_size, local_rank, restart, started)
    except OSError as error:
        rank.warn(f"rank {number} cannot write to the run directory: {error}")
        return None
    hot.use_torch(torch)
    recorder = Recorder(page, journal)
    tracker = StepTracker(recorder, lambda: optimizers.any_made)
    state = RankState(recorder, tracker, restart)
    tracker.detail.follow(state.budget)
    events.spending = state.budget.spending
    recorder.add(
        OpenRecord(
            format=FORMAT,
            time=started,
            rank=number,
            world_size=world_size,
            local_rank=local_rank,
            restart=restart,
            pid=os.getpid(),
            parent=os.getppid(),
            host=socket.gethostname(),
            namespace=namespace(),
            backend=str(distributed.get_backend()),
            kept_timeout=torch_groups.kept_timeout(),
            timeout=torch_groups.default_timeout(),
            joined=joined,
            argv=tuple(sys.argv),
            launcher="torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "other",
            versions=_versions(torch),
            variables={
                name: value[:200]
                for name, value in os.environ.items()
                if name.startswith(("NCCL_", "GLOO_", "TORCH_NCCL_"))
            },
        )
    )
    note_store(torch, recorder, world_size)
    rank.enter(state, torch.compiler.is_dynamo_compiling)

    def show_cost() -> None:
        if recorder.is_writing:
            state.budget.writing = clock()
        spent, followed, over = state.budget.account()
        page.set_cost((spent + followed) / max(over, 1))

    recorder.each_second.append(show_cost)
    recorder.each_second.append(OwnWork(state).look)
    stem = os.path.join(run_directory(), rank_stem(number, restart))
    ring = stem + ".collectives"
    try:
        state.ledger = tracker.calls = Ledger(RingWriter(ring), lambda: tracker.steps)
        recorder.each_second.append(state.ledger.look)
    except OSError as error:
        shield.fault("ring", error)
    # A supervisor of another version may send no requests.
    with contextlib.suppress(OSError, ValueError):
        flight = Flight(run_directory(), stem + ".flight.json", ring, tracker)
        recorder.each_round.append(flight.look)
    return state


def start_recording(state: RankState) -> None:
    """Start the thread that writes the records, once all observers have subscribed."""
    state.tracker.page_phase(Phase.STARTING)
    state.recorder.start()


@shield.shielded
def note_store(torch: Any, recorder: Recorder, world_size: int) -> None:
    """Record the store at which the ranks meet, if the job may have several nodes."""
    local = environment_int("LOCAL_WORLD_SIZE") or 0
    place = torch_groups.store_place(torch.distributed.distributed_c10d)
    if place is None or local == world_size or world_size == 1:
        return
    recorder.add(rank.met_at(*place))


@shield.shielded
def observe(state: RankState) -> None:
    """Let observers follow the rank. For each event they are called in this order."""
    replicas = Replicas(state)
    pacing = Pacing(state)
    # A loss is recorded before the fingerprint of its step.
    losses = Losses(state, replicas)
    subscribe(Exits(state))
    subscribe(Stages(state))
    subscribe(replicas)
    pacing.follow(Gradients(state, replicas, pacing))
    subscribe(optimizers.Optimizers(state, replicas))
    subscribe(Edits(state, replicas))
    subscribe(losses)
    subscribe(ConstantLosses(state))
    if state.budget.enabled:
        subscribe(LossScale(state, replicas))
        subscribe(Outside(state, replicas))
        subscribe(Zeroing(state))
        subscribe(LocalGradients(state, losses))
        subscribe(Fingerprints(state, replicas))
        pacing.follow(buffers.Buffers(state, replicas))
        subscribe(buffers.Statistics(state, replicas))
        subscribe(buffers.OtherModels(state, replicas))
        subscribe(Independent(state))
        subscribe(RandomNumbers(state))
    subscribe(buffers.Evaluations(state))
    subscribe(Loops(state))
    observe_speed(state)
    compared = bool(os.environ.get(TRAINED))
    subscribe(Samples(state, COMPARED_INDICES if compared else FOLLOWED_INDICES))
    subscribe(Fed(state))
    subscribe(Models(state))
    subscribe(Changes(state, replicas))
    subscribe(Checkpoints(state))
    subscribe(Schedulers(state, replicas))
    subscribe(LaunchOptions(state))
    # Both are imported only where they are asked for.
    if compared:
        from ddpdoctor.probe.observers import trained

        subscribe(trained.Trained(state))
        if trained.keeps_weights():
            subscribe(trained.KeptWeights(state))
    if os.environ.get(CAPSULE):
        from ddpdoctor.probe.observers import capsules

        subscribe(capsules.Capsules(state))
    # Last, after the observers that it paces.
    subscribe(pacing)


def observe_speed(state: RankState) -> None:
    """Let observers follow what needs no record of the job's beginning: stacks and memory."""
    with contextlib.suppress(OSError, ValueError):
        profiles = Profiles(state, run_directory())
        subscribe(profiles)
        state.recorder.each_round.append(profiles.look)
    memory = Memory(state)
    subscribe(memory)
    # Batch shapes explain only GPU memory. The observer wakes once it sees a GPU.
    memory.rest("batch_fetched")
    state.recorder.each_second.append(memory.write)


def _open(
    number: int, world_size: int, local_rank: int | None, restart: int, started: int
) -> tuple[StatusPage, Journal, int]:
    """Open the files of the first free attempt, since two jobs may share a run directory."""
    megabytes = environment_int("DDPDOCTOR_JOURNAL_MB") or 64
    while True:
        stem = os.path.join(run_directory(), rank_stem(number, restart))
        try:
            page = StatusPage(
                stem + ".status",
                rank=number,
                world_size=world_size,
                local_rank=-1 if local_rank is None else local_rank,
                restart=restart,
                started=started,
            )
            return page, Journal(stem + ".jsonl", megabytes << 20), restart
        except FileExistsError:
            restart += 1
            if restart >= MAX_ATTEMPTS:
                raise

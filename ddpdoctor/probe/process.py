"""The probe's start in a process: hooks that wait for the modules they watch."""

from __future__ import annotations

import os

from ddpdoctor.probe import joining
from ddpdoctor.probe.hooks import (
    amp,
    applied,
    backward,
    changes,
    checkpoints,
    clipping,
    collectives,
    dataloader,
    ddp,
    errors,
    joins,
    launch_words,
    loads,
    models,
    optimizer,
    process_group,
    samples,
)
from ddpdoctor.probe.observers import (
    batches,
    buffers,
    edits,
    evaluations,
    fingerprints,
    finite,
    flight,
    gradients,
    independent,
    local_gradients,
    optimizers,
    pacing,
    sampling,
    schedulers,
    statistics,
    zeroing,
)
from ddpdoctor.probe.runtime import debugger, events, forks, rank, shield, stacks
from ddpdoctor.probe.runtime.imports import when_imported


def start() -> None:
    """Called once per process, before it imports torch."""
    os.register_at_fork(after_in_child=rank.forget)
    os.register_at_fork(after_in_child=stacks.forget)
    os.register_at_fork(after_in_child=debugger.forget)
    os.register_at_fork(after_in_child=checkpoints.forget)
    os.register_at_fork(after_in_child=loads.forget)
    os.register_at_fork(after_in_child=applied.forget)
    os.register_at_fork(after_in_child=changes.forget)
    os.register_at_fork(after_in_child=samples.forget)
    os.register_at_fork(after_in_child=models.forget)
    os.register_at_fork(after_in_child=batches.forget)
    os.register_at_fork(after_in_child=pacing.forget)
    os.register_at_fork(after_in_child=sampling.forget)
    os.register_at_fork(after_in_child=independent.forget)
    os.register_at_fork(after_in_child=zeroing.forget)
    os.register_at_fork(after_in_child=edits.forget)
    os.register_at_fork(after_in_child=schedulers.forget)
    events.group_joined.append(shield.shielded(joining.become))
    forks.install()
    stacks.declare_worker()
    errors.install()
    gradients.install()
    optimizers.install()
    zeroing.install()
    edits.install()
    when_imported("torch.distributed.distributed_c10d", process_group.install)
    when_imported("torch.distributed.distributed_c10d", collectives.install)
    when_imported("torch.distributed.distributed_c10d", flight.install)
    when_imported("torch.nn.parallel.distributed", ddp.install)
    when_imported("torch.nn.parallel.distributed", models.install)
    when_imported("torch.utils.data.dataloader", dataloader.install)
    when_imported("torch.utils.data.dataloader", samples.install)
    when_imported("torch.utils.data.dataset", samples.install_subsets)
    when_imported("torch.utils.data.distributed", samples.install_distributed)
    when_imported("torch.autograd", backward.install)
    when_imported("torch.distributed.algorithms.join", joins.install)
    when_imported("torch.optim.optimizer", optimizer.install)
    when_imported("torch.amp.grad_scaler", amp.install)
    when_imported("torch.nn.modules.module", changes.install_module)
    when_imported("torch.nn.modules.module", applied.install)
    when_imported("torch.nn.utils.clip_grad", clipping.install)
    when_imported("torch.optim.lr_scheduler", changes.install_schedules)
    when_imported("torch.optim.lr_scheduler", schedulers.install)
    when_imported("torch.optim.optimizer", changes.install_optimizer)
    when_imported("torch.serialization", checkpoints.install)
    when_imported("torch.serialization", loads.install)
    when_imported("argparse", launch_words.install_argparse)
    when_imported("torch.nn.parallel.data_parallel", launch_words.install_data_parallel)
    when_imported("torch.multiprocessing.spawn", errors.install_spawn)
    # A loss is written before the fingerprint of its step.
    finite.install()
    local_gradients.install()
    fingerprints.install()
    buffers.install()
    evaluations.install()
    independent.install()
    statistics.install()
    batches.install()
    sampling.install()
    pacing.install()
    # Last, since this may wait for a debugger before the user's first line.
    debugger.install()

"""The probe's start in a process: hooks that wait for the modules they watch."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

from ddpdoctor.probe import joining
from ddpdoctor.probe.hooks import (
    collectives,
    ddp,
    exits,
    forwards,
    overrides,
    process_group,
    setup,
    training,
)
from ddpdoctor.probe.observers import flight, weights
from ddpdoctor.probe.runtime import debugger, events, rank, shield, stacks, threads
from ddpdoctor.probe.runtime.imports import when_imported

_INSTALL: tuple[tuple[str, Callable[[ModuleType], None]], ...] = (
    ("torch.distributed.distributed_c10d", process_group.install),
    ("torch.distributed.distributed_c10d", collectives.install),
    ("torch.distributed.distributed_c10d", flight.install),
    ("torch.nn.parallel.distributed", ddp.install),
    ("torch.nn.parallel.distributed", setup.install_verification),
    ("torch.nn.parallel.distributed", overrides.install_ddp),
    ("torch.utils.data.dataloader", training.install_loader),
    ("torch.utils.data.dataloader", setup.install_loader),
    ("torch.utils.data.dataloader", overrides.install_loader),
    ("torch.utils.data.dataset", setup.install_subset),
    ("torch.utils.data.distributed", setup.install_distributed_sampler),
    ("torch.autograd", training.install_backward),
    ("torch.distributed.pipelining.stage", setup.install_stages),
    ("torch.distributed.pipelining.stage", forwards.install_stages),
    # Where it is in 2.6 and later, and where in 2.4 and 2.5.
    ("torch.distributed.fsdp._fully_shard._fully_shard", forwards.install_sharded),
    ("torch.distributed._composable.fsdp.fully_shard", forwards.install_sharded),
    ("torch.distributed.checkpoint.state_dict", training.install_state_dict),
    ("torch.distributed.algorithms.join", setup.install_join),
    ("torch.optim.optimizer", training.install_optimizer),
    ("torch.amp.grad_scaler", training.install_scaler),
    ("torch.nn.modules.module", setup.install_module),
    ("torch.nn.utils.clip_grad", setup.install_clipping),
    ("torch.optim.lr_scheduler", setup.install_schedulers),
    ("torch.serialization", setup.install_serialization),
    ("argparse", setup.install_argparse),
    ("torch.nn.parallel.data_parallel", setup.install_data_parallel),
    ("torch.multiprocessing.spawn", exits.install_spawn),
)
"""What is installed once a module is imported."""


def start() -> None:
    """Called once per process, before it imports torch."""
    for forget in (rank.forget, stacks.forget, debugger.forget, weights.forget):
        os.register_at_fork(after_in_child=forget)
    events.group_joined.append(shield.shielded(joining.become))
    threads.watch_forks()
    stacks.declare_worker()
    exits.install()
    for name, install in _INSTALL:
        when_imported(name, install)
    # Last, since this may wait for a debugger before the user's first line.
    debugger.install()

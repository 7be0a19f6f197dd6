"""Start the probe in a process: install hooks once the modules that they wrap are imported."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType

from ddpdoctor.probe import joining
from ddpdoctor.probe.hooks import collectives, ddp, exits, overrides, training
from ddpdoctor.probe.observers import collective_calls, ddp_modules
from ddpdoctor.probe.runtime import debugger, events, rank, shield, stacks
from ddpdoctor.probe.runtime.wrapping import when_imported

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
    ("torch.autograd", training.install_backward),
    ("torch.distributed.pipelining.stage", ddp.install_stage_forwards),
    # The first is that of torch 2.6 and later, the second that of 2.4 and 2.5.
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
    for forget in (rank.forget, stacks.forget, debugger.forget, ddp_modules.forget_loads):
        os.register_at_fork(after_in_child=forget)
    events.group_joined.append(shield.shielded(joining.become))
    shield.watch_forks()
    stacks.declare_worker()
    exits.install()
    for name, install in _INSTALL:
        when_imported(name, install)
    for name in dict.fromkeys(row[0] for row in training.WRAPPED):
        when_imported(name, training.install_wrapped)
    # Last, since this may wait for a debugger before the user's first line.
    debugger.install()

"""Start the probe in a rank that has run for a while, until the reader ends.

``ddpdoctor attach --probe`` runs `start` on the main thread, between two lines (PEP 768). What only
sees objects as they are made is not wrapped, and what concludes from the beginning of a job does
not observe: `Rule.late` marks the rules that need neither. With the reader the records end, and
what stays wrapped calls nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from ddpdoctor.probe import process
from ddpdoctor.probe.hooks import collectives, ddp, training
from ddpdoctor.probe.hooks.exits import Exits
from ddpdoctor.probe.observers import ddp_modules, files, optimizers, steps
from ddpdoctor.probe.runtime import events, rank, shield, stacks, torch_groups, torch_private
from ddpdoctor.probe.runtime.wrapping import before, when_imported
from ddpdoctor.run import late_start
from ddpdoctor.run.journal import move_up
from ddpdoctor.run.late_start import RankStart

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.distributed"

_INSTALL: tuple[tuple[str, Callable[[ModuleType], None]], ...] = (
    (_C10D, collectives.install_collectives),
    (_DDP, ddp.install),
    ("torch.utils.data.dataloader", training.install_dataloader),
    ("torch.autograd", training.install_backward),
    ("torch.distributed.checkpoint.state_dict", training.install_state_dict),
    ("torch.optim.optimizer", training.install_optimizer),
    ("torch.amp.grad_scaler", training.install_scaler),
)

_installed = False
_start: Start | None = None


def start(directory: str) -> None:
    """Wait in this process for the forward in which all ranks begin.

    Raises:
        OSError: The run directory cannot be written.
    """
    global _start
    if not late_start.has_reader(directory):
        return
    path = late_start.rank_file(directory, os.getpid())
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = move_up(os.open(path, flags, 0o600))
    why = _refusal()
    if not why:
        _leave()
        _start = Start(directory, descriptor)
        _install()
    late_start.write_start(descriptor, RankStart("refused" if why else "waits", why=why))


def _refusal() -> str:
    """Return why the probe cannot start in this process. Empty if it can."""
    torch: Any = sys.modules.get("torch")
    if torch is None or _DDP not in sys.modules or not torch.distributed.is_initialized():
        return "it has not joined a process group for DDP yet"
    if rank.current() is not None and not rank.directory:
        return "it belongs to a run of ddpdoctor"
    if _start is not None and late_start.has_reader(_start.directory):
        return "another `ddpdoctor attach --probe` watches it"
    if torch_private.has_compiled():
        return "torch.compile has compiled code of it, which would be compiled again"
    if torch_groups.calls_begun(torch) is None:
        return "its process group does not count collectives"
    return ""


def _install() -> None:
    """Wrap what the probe needs, once per process."""
    global _installed
    if _installed:
        return
    _installed = True
    for forget in (rank.forget, stacks.forget, files.forget, ddp_modules.forget_loads, _forget):
        os.register_at_fork(after_in_child=forget)
    shield.watch_forks()
    bare = dict(vars(sys.modules[_C10D]))
    for name, install in _INSTALL:
        when_imported(name, install)
    _replace(bare)
    # Each optimizer of this process may have been made before.
    optimizers.any_made = True
    before(sys.modules[_DDP].DistributedDataParallel, torch_private.PRE_FORWARD, _forward_comes)
    atexit.register(rank.end)


def _replace(bare: dict[str, Any]) -> None:
    """Let modules that have imported the bare collectives call the wrapped ones."""
    # Attributes of some objects warn when they are read, and so does `isinstance`.
    now = vars(sys.modules[_C10D])
    functions = [name for name, each in bare.items() if type(each) is FunctionType]
    wrapped = {id(bare[name]): now[name] for name in functions if now[name] is not bare[name]}
    for module in list(sys.modules.values()):
        if issubclass(type(module), ModuleType):
            names = object.__getattribute__(module, "__dict__")
            for name, value in list(names.items()):
                if id(value) in wrapped:
                    names[name] = wrapped[id(value)]


def _forward_comes(module: Any, *args: Any, **kwargs: Any) -> None:
    """Look at a forward of DDP that is about to begin."""
    if _start is not None:
        _start.forward_comes(module)


class Start:
    """The probe of this process, from its start to the end of its reader."""

    def __init__(self, directory: str, descriptor: int) -> None:
        self.directory = directory
        self._descriptor = descriptor
        self._torch: Any = sys.modules["torch"]
        self._began = False
        self._is_alone = False  # the reader has ended

    def forward_comes(self, module: Any) -> None:
        """Begin, note a module that is new, or end."""
        if self._is_alone:
            _leave()
        elif self._began:
            ddp.note(module)
        elif self._torch.is_grad_enabled() and module.require_backward_grad_sync:
            self._wait(module)

    def _wait(self, module: Any) -> None:
        """Begin if this is the forward in which all ranks do."""
        if len(torch_groups.group_ranks(module)) != self._torch.distributed.get_world_size():
            self._refuse("its DDP module does not belong to all ranks")
            return
        calls = torch_groups.calls_begun(self._torch) or 0
        late_start.write_start(self._descriptor, RankStart("waits", calls))
        chosen = late_start.beginning(self.directory)
        if chosen and calls >= chosen:
            self._begin(module, calls)
        elif not late_start.has_reader(self.directory):
            self._is_alone = True

    def _begin(self, module: Any, calls: int) -> None:
        rank.directory = self.directory
        state = process.open_rank(self._torch, 0)
        if state is None:
            self._refuse("it cannot write to the run directory")
            return
        self._began = True
        if torch_private.joins(module):
            steps.uneven_inputs = True
        events.subscribe(Exits(state))
        process.observe_speed(state)
        state.recorder.each_second.append(self._look_for_reader)
        process.start_recording(state)
        ddp.note(module)
        late_start.write_start(self._descriptor, RankStart("began", calls))

    def _look_for_reader(self) -> None:
        self._is_alone = self._is_alone or not late_start.has_reader(self.directory)

    def _refuse(self, why: str) -> None:
        late_start.write_start(self._descriptor, RankStart("refused", why=why))
        _leave()

    def close(self) -> None:
        """Close the file of the start."""
        os.close(self._descriptor)


def _leave() -> None:
    """End the records. What is wrapped calls nothing from now on."""
    global _start
    ended, _start = _start, None
    if ended is not None:
        ended.close()
        rank.leave()
        ddp.forget()
    rank.directory = ""


def _forget() -> None:
    """Leave the start to the parent in a forked child."""
    global _start
    _start = None

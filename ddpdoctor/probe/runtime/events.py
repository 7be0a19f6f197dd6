"""Moments in a rank that several diagnoses want to know of; hooks call who has subscribed.

An `Observer` is made when the process becomes a rank, and overrides the methods of the moments that
it wants to know of. They are called on the training thread and return at once when there is nothing
to do; one that raises is not called again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddpdoctor.probe.runtime import shield

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.rank import RankState

Through = Callable[[Callable[..., None]], Callable[..., None]]


class Observer:
    """Follows one rank.

    Args:
        state: The rank.
    """

    def __init__(self, state: RankState) -> None:
        self.state = state

    def ddp_built(self, ddp: Any) -> None:
        """A DistributedDataParallel was built: the module."""

    def stage_built(self, stage: Any) -> None:
        """A stage of a pipeline was built."""

    def model_given(self, ddp: Any, process_group: Any, tensors: Any) -> None:
        """DDP's constructor is about to compare the parameters of its model between ranks."""

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """A DDP module's forward begins, in grad mode; ``armed``: its backward is reduced."""

    def evaluation_begins(self, ddp: Any) -> None:
        """A DDP module's forward begins without gradients."""

    def buffers_begin(self, ddp: Any) -> None:
        """DDP is about to broadcast its module's buffers before a forward."""

    def backward_begins(self) -> None:
        """A backward pass begins, before any gradient of it."""

    def backward_ended(self) -> None:
        """A backward pass ended, its all-reduces done."""

    def loss_began(self, loss: Any, value: Any) -> None:
        """A backward begins with a loss that is not finite, or on a GPU and to be read later.

        ``value`` is the loss as a number, or what reads it.
        """

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """A loader gave a batch: the loader's iterator, and the batch."""

    def indices_drawn(self, index: Any, iterator: Any) -> None:
        """A loader's sampler gave the index of a sample, or those of a batch."""

    def loader_exhausted(self, iterator: Any) -> None:
        """A loader came to its end: its iterator."""

    def collective_begins(self, name: str) -> None:
        """A collective is called from Python: its name."""

    def clips(self, name: str) -> None:
        """A function of torch is called that clips gradients: its name."""

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def step_ended(self, optimizer: Any, number: int) -> None:
        """An optimizer's step ended, part of the training step of that number."""

    def scheduler_made(self, scheduler: Any) -> None:
        """A learning rate scheduler was built."""

    def weights_loaded(self, module: Any) -> None:
        """A module's ``load_state_dict`` returned, the outermost one."""

    def optimizer_loaded(self, optimizer: Any) -> None:
        """An optimizer's ``load_state_dict`` returned."""

    def rate_cut(self) -> None:
        """ReduceLROnPlateau has cut the learning rate."""

    def saves(self, content: Any, file: Any) -> None:
        """``torch.save`` is called."""

    def rank_fails(self, error: BaseException) -> None:
        """An exception ends the process of the rank; its record is about to be written."""

    def rank_ends(self) -> None:
        """The rank comes to its regular end, its journal still open."""


ddp_built: list[Callable[[Any], None]] = []
stage_built: list[Callable[[Any], None]] = []
model_given: list[Callable[[Any, Any, Any], None]] = []
forward_begins: list[Callable[[Any, bool], None]] = []
evaluation_begins: list[Callable[[Any], None]] = []
buffers_begin: list[Callable[[Any], None]] = []
backward_begins: list[Callable[[], None]] = []
backward_ended: list[Callable[[], None]] = []
loss_began: list[Callable[[Any, Any], None]] = []
batch_fetched: list[Callable[[Any, Any], None]] = []
indices_drawn: list[Callable[[Any, Any], None]] = []
loader_exhausted: list[Callable[[Any], None]] = []
collective_begins: list[Callable[[str], None]] = []
clips: list[Callable[[str], None]] = []
step_begins: list[Callable[[Any], None]] = []
step_ended: list[Callable[[Any, int], None]] = []
scheduler_made: list[Callable[[Any], None]] = []
weights_loaded: list[Callable[[Any], None]] = []
optimizer_loaded: list[Callable[[Any], None]] = []
rate_cut: list[Callable[[], None]] = []
saves: list[Callable[[Any, Any], None]] = []
rank_fails: list[Callable[[BaseException], None]] = []
rank_ends: list[Callable[[], None]] = []

_MOMENTS: dict[str, list[Callable[..., None]]] = {
    name: value for name, value in globals().items() if isinstance(value, list)
}

group_joined: list[Callable[[Any], None]] = []
"""This process has joined the default process group: the torch module; of the process."""


def subscribe(observer: Observer, paced: Through = shield.shielded) -> None:
    """Call an observer at the moments that it has methods for.

    Args:
        observer: The observer.
        paced: What the methods of the moments of a step go through.
    """
    for name, subscribers in _MOMENTS.items():
        if getattr(type(observer), name) is not getattr(Observer, name):
            through = shield.shielded if name.startswith(("rank_", "ddp_")) else paced
            subscribers.append(through(getattr(observer, name)))


def forget() -> None:
    """In a forked child: the parent's observers are the parent's."""
    for subscribers in _MOMENTS.values():
        subscribers.clear()

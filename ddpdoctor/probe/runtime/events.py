"""Announce events in a rank to the observers that have subscribed; hooks do the calling.

An `Observer` is made when the process becomes a rank, and overrides the methods of the moments that
it wants to know of. They are called on the training thread and return at once when there is nothing
to do; one that raises is not called again. Of steps there may be a thousand a second, so an
observer that has nothing to do for a while rests, and is woken by another moment or by the number
of a step (`before_step`).
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddpdoctor.probe.runtime import shield

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.rank import RankState


class Observer:
    """Follows one rank.

    Args:
        state: The rank.
    """

    def __init__(self, state: RankState) -> None:
        self.state = state

    def rest(self, *moments: str) -> None:
        """Not be called at these moments until `wake`: what is never called costs nothing."""
        _turn(self, moments, False)

    def wake(self, *moments: str) -> None:
        """Be called at these moments from now on."""
        _turn(self, moments, True)

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

    def clips(self, name: str, frame: FrameType) -> None:
        """A function of torch is called that clips gradients: its name, and who calls it."""

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def step_ended(self, optimizer: Any, number: int) -> None:
        """An optimizer's step ended, part of the training step of that number."""

    def optimizer_made(self) -> None:
        """An optimizer is being made, its parameters not yet in it."""

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


ddp_built: tuple[Callable[[Any], None], ...] = ()
stage_built: tuple[Callable[[Any], None], ...] = ()
model_given: tuple[Callable[[Any, Any, Any], None], ...] = ()
forward_begins: tuple[Callable[[Any, bool], None], ...] = ()
evaluation_begins: tuple[Callable[[Any], None], ...] = ()
buffers_begin: tuple[Callable[[Any], None], ...] = ()
backward_begins: tuple[Callable[[], None], ...] = ()
backward_ended: tuple[Callable[[], None], ...] = ()
loss_began: tuple[Callable[[Any, Any], None], ...] = ()
batch_fetched: tuple[Callable[[Any, Any], None], ...] = ()
indices_drawn: tuple[Callable[[Any, Any], None], ...] = ()
loader_exhausted: tuple[Callable[[Any], None], ...] = ()
clips: tuple[Callable[[str, FrameType], None], ...] = ()
step_begins: tuple[Callable[[Any], None], ...] = ()
step_ended: tuple[Callable[[Any, int], None], ...] = ()
scheduler_made: tuple[Callable[[Any], None], ...] = ()
weights_loaded: tuple[Callable[[Any], None], ...] = ()
optimizer_loaded: tuple[Callable[[Any], None], ...] = ()
rate_cut: tuple[Callable[[], None], ...] = ()
saves: tuple[Callable[[Any, Any], None], ...] = ()
rank_fails: tuple[Callable[[BaseException], None], ...] = ()
rank_ends: tuple[Callable[[], None], ...] = ()
optimizer_made: tuple[Callable[[], None], ...] = ()

_MOMENTS = tuple(name for name, value in globals().items() if value == ())


class _Call:
    """A method of an observer, and whether it is called now."""

    __slots__ = ("awake", "function", "observer", "paused")

    def __init__(self, observer: Observer, function: Callable[..., None]) -> None:
        self.observer = observer
        self.function = function
        self.awake = True
        self.paused = False


_calls: dict[str, list[_Call]] = {name: [] for name in _MOMENTS}
"""Who has subscribed, by moment, in the order in which they are called."""

group_joined: list[Callable[[Any], None]] = []
"""This process has joined the default process group: the torch module; of the process."""

NEVER = 1 << 62
due = NEVER
"""The number of the training step before which somebody wants to be called; see `before_step`."""
_Alarm = tuple[int, int, Callable[[], None], bool]
_alarms: list[_Alarm] = []
"""A heap of numbers of steps, each with the order in which it was asked for, what to call, and
whether that comes last."""
_order = itertools.count()


shielded: Callable[[Callable[..., object]], Callable[..., None]] = shield.shielded
"""What keeps the exceptions of a subscriber; compiled, where that could be (`runtime.hot`)."""


def subscribe(observer: Observer) -> None:
    """Call an observer at the moments that it has methods for, without its exceptions."""
    for name in _MOMENTS:
        if getattr(type(observer), name) is not getattr(Observer, name):
            _calls[name].append(_Call(observer, shielded(getattr(observer, name))))
            _publish(name)


def _publish(name: str) -> None:
    """Put those that are awake where hooks find them; a hook that is at it goes on as it began."""
    globals()[name] = tuple(
        each.function for each in _calls[name] if each.awake and not each.paused
    )


def _turn(observer: Observer, moments: tuple[str, ...], awake: bool) -> None:
    for name in moments:
        for each in _calls[name]:
            if each.observer is observer and each.awake is not awake:
                each.awake = awake
                _publish(name)


def pause(observer: Observer, paused: bool) -> None:
    """Call an observer at no moment of a step while it is paused, whatever else it wants."""
    for name in _MOMENTS:
        if not name.startswith(("rank_", "ddp_")):
            for each in _calls[name]:
                if each.observer is observer and each.paused is not paused:
                    each.paused = paused
                    _publish(name)


spending: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""Within it what runs is paid for, once this process is a rank (`Budget.spending`)."""


def before_step(number: int, function: Callable[[], None], last: bool = False) -> None:
    """Call a function once, before a training step begins that has at least that number.

    Args:
        number: Of the step.
        function: What is called.
        last: It comes after all others, and once they are paid for: it begins to count.
    """
    global due
    heapq.heappush(_alarms, (number, next(_order), function, last))
    due = _alarms[0][0]


def ring(number: int) -> None:
    """The training step of that number begins, which was `due`."""
    global due
    now = next(_order)
    later: list[_Alarm] = []
    last: list[_Alarm] = []
    try:
        with spending():
            while _alarms and _alarms[0][0] <= number:
                alarm = heapq.heappop(_alarms)
                if alarm[1] > now:
                    # Asked for meanwhile: for the next step.
                    later.append(alarm)
                elif alarm[3]:
                    last.append(alarm)
                else:
                    shield.call(alarm[2])
        while last:
            shield.call(last.pop(0)[2])
    finally:
        # Also if Ctrl-C comes meanwhile.
        for alarm in (*later, *last):
            heapq.heappush(_alarms, alarm)
        due = _alarms[0][0] if _alarms else NEVER


def forget() -> None:
    """In a forked child: the parent's observers are the parent's."""
    global due, spending
    for name in _MOMENTS:
        _calls[name].clear()
        _publish(name)
    _alarms.clear()
    due, spending = NEVER, contextlib.nullcontext

"""Announce events in a rank to the observers that have subscribed.

Hooks call `emit`. An `Observer` is made when the process becomes a rank, and overrides the methods
of the events that it needs. They are called on the training thread and return at once if there is
nothing to do. A method that raises is not called again. There may be a thousand steps a second, so
an observer that has nothing to do for a while rests until another event, or an alarm
(`before_step`), wakes it.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from ddpdoctor.probe.runtime import shield

if TYPE_CHECKING:
    from ddpdoctor.probe.runtime.rank import RankState

    def __getattr__(name: str) -> tuple[Callable[..., None], ...]:
        """Return the subscribers of an event, in the order in which they are called."""


P = ParamSpec("P")


class Observer:
    """Follow one rank. Each method below, from `ddp_built` on, is an event."""

    def __init__(self, state: RankState) -> None:
        self.state = state

    def rest(self, *events: str) -> None:
        """Stop being called for these events until `wake`."""
        _set_awake(self, events, False)

    def wake(self, *events: str) -> None:
        """Be called for these events again."""
        _set_awake(self, events, True)

    def ddp_built(self, ddp: Any) -> None:
        """A DistributedDataParallel was built."""

    def stage_built(self, stage: Any) -> None:
        """A pipeline stage was built."""

    def model_given(self, ddp: Any, process_group: Any, tensors: Any) -> None:
        """DDP's constructor is about to compare the parameters of its model between ranks."""

    def forward_begins(self, ddp: Any, armed: bool) -> None:
        """A DDP module's forward begins in grad mode. ``armed``: its backward is reduced."""

    def inputs_given(self, inputs: Any) -> None:
        """A DDP module's forward has these inputs, and no loader gave a batch for this step."""

    def evaluation_begins(self, ddp: Any) -> None:
        """A DDP module's forward begins without gradients."""

    def buffers_begin(self, ddp: Any) -> None:
        """DDP is about to broadcast its module's buffers before a forward."""

    def backward_begins(self) -> None:
        """A backward pass begins. It has computed no gradient yet."""

    def graph_begins(self, loss: Any) -> None:
        """A backward is about to begin. ``loss`` is the one before a GradScaler scaled it."""

    def constant_backward(self) -> None:
        """A backward that is to be reduced begins with a loss that depends on no parameter."""

    def backward_ended(self) -> None:
        """A backward pass ended, and its all-reduces are done."""

    def loss_began(self, loss: Any, value: Any) -> None:
        """A backward begins with a loss that is not finite, or that a GPU has yet to compute.

        ``value`` is the loss as a number, or a function that reads it.
        """

    def batch_fetched(self, iterator: Any, data: Any) -> None:
        """A loader's iterator returned a batch."""

    def batch_evaluated(self, iterator: Any) -> None:
        """A loader's iterator returned a batch while gradients are off."""

    def loop_turns(self, iterator: Any) -> None:
        """A loader's iterator returned a batch that does more than continue its loop.

        It is the first one, or no backward began since the last one, or another loader was read in
        between. The tracker counts the others (`ddpdoctor.probe.runtime.phases.Phases.goes_on`).
        """

    def indices_drawn(self, index: Any, iterator: Any) -> None:
        """A loader's sampler returned the index of a sample, or those of a batch."""

    def loader_exhausted(self, iterator: Any) -> None:
        """A loader's iterator has no more batches."""

    def clips(self, name: str, frame: FrameType) -> None:
        """A torch function that clips gradients is called from that frame."""

    def loss_scaled(self) -> None:
        """A GradScaler has multiplied a loss by its scale."""

    def unscales(self) -> None:
        """A GradScaler divides gradients by its scale, at the latest in its step."""

    def step_begins(self, optimizer: Any) -> None:
        """An optimizer's step begins."""

    def step_ended(self, optimizer: Any, number: int) -> None:
        """An optimizer's step ended. It was part of the training step of that number."""

    def optimizer_made(self) -> None:
        """An optimizer is being made. It has no parameters yet."""

    def scheduler_made(self, scheduler: Any) -> None:
        """A learning rate scheduler was built."""

    def model_evaluates(self, module: Any) -> None:
        """The job has called ``eval()`` on a module."""

    def weights_loaded(self, module: Any) -> None:
        """The outermost ``load_state_dict`` of a module returned."""

    def optimizer_loaded(self, optimizer: Any) -> None:
        """An optimizer's ``load_state_dict`` returned."""

    def rate_cut(self) -> None:
        """ReduceLROnPlateau has cut the learning rate."""

    def saves(self, content: Any, file: Any) -> None:
        """``torch.save`` is called."""

    def rank_fails(self, error: BaseException) -> None:
        """An exception ends the process of the rank. Its record is about to be written."""

    def rank_ends(self) -> None:
        """The rank ends normally. Its journal is still open."""


_EVENTS = tuple(name for name in vars(Observer) if name[0] != "_" and name not in ("rest", "wake"))
# The subscribers of each event are a tuple in this module, where compiled code finds it, too.
globals().update(dict.fromkeys(_EVENTS, ()))


def emit(event: Callable[Concatenate[Any, P], None], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Call the subscribers of an event, which is a method of `Observer`.

    Hooks of every step loop over the tuple of this module themselves, which takes less time.
    """
    for subscriber in globals()[event.__name__]:
        subscriber(*args, **kwargs)


@dataclass(eq=False)
class _Subscription:
    """A method of an observer, and whether it is called now."""

    observer: Observer
    function: Callable[..., None]
    awake: bool = True
    paused: bool = False


_subscriptions: dict[str, list[_Subscription]] = {name: [] for name in _EVENTS}

group_joined: list[Callable[[Any], None]] = []
"""Called with the torch module when this process has joined the default process group."""

NEVER = 1 << 62
due = NEVER  # the number of the training step before which the next alarm is due (`before_step`)
_Alarm = tuple[int, int, Callable[[], None], bool]
_alarms: list[_Alarm] = []
"""A heap of alarms: step, serial number, function, and whether it is called last."""
_order = itertools.count()


shielded: Callable[[Callable[..., object]], Callable[..., None]] = shield.shielded
"""Wraps a subscriber so that it does not raise. `runtime.hot` puts the compiled one here."""


def subscribe(observer: Observer) -> None:
    """Call an observer for the events that it has methods for, without letting it raise."""
    for name in _EVENTS:
        if getattr(type(observer), name) is not getattr(Observer, name):
            _subscriptions[name].append(_Subscription(observer, shielded(getattr(observer, name))))
            _publish(name)


def _publish(name: str) -> None:
    """Store the subscribers that are awake. A loop over the former tuple is not disturbed."""
    globals()[name] = tuple(
        each.function for each in _subscriptions[name] if each.awake and not each.paused
    )


def _set_awake(observer: Observer, events: tuple[str, ...], awake: bool) -> None:
    for name in events:
        for each in _subscriptions[name]:
            if each.observer is observer and each.awake is not awake:
                each.awake = awake
                _publish(name)


def pause(observer: Observer, paused: bool) -> None:
    """Do not call an observer for events of a step while it is paused, even if it is awake."""
    for name in _EVENTS:
        if not name.startswith(("rank_", "ddp_")):
            for each in _subscriptions[name]:
                if each.observer is observer and each.paused is not paused:
                    each.paused = paused
                    _publish(name)


spending: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
"""`Budget.spending` once this process is a rank: charges the code within it to the budget."""


def before_step(number: int, function: Callable[[], None], last: bool = False) -> None:
    """Call a function once, before the first training step with at least that number.

    With ``last``, it is called after all others and once their cost is charged, to start a clock.
    """
    global due
    heapq.heappush(_alarms, (number, next(_order), function, last))
    due = _alarms[0][0]


def ring(number: int) -> None:
    """Call the alarms that are due as the training step of that number begins."""
    global due
    now = next(_order)
    later: list[_Alarm] = []
    last: list[_Alarm] = []
    try:
        with spending():
            while _alarms and _alarms[0][0] <= number:
                alarm = heapq.heappop(_alarms)
                if alarm[1] > now:
                    # It was set by one of these calls: it is for the next step.
                    later.append(alarm)
                elif alarm[3]:
                    last.append(alarm)
                else:
                    shield.call(alarm[2])
        while last:
            shield.call(last.pop(0)[2])
    finally:
        # Keep the remaining alarms even if Ctrl-C arrives now.
        for alarm in (*later, *last):
            heapq.heappush(_alarms, alarm)
        due = _alarms[0][0] if _alarms else NEVER


def forget() -> None:
    """Drop the parent's observers in a forked child."""
    global due, spending
    for name in _EVENTS:
        _subscriptions[name].clear()
        _publish(name)
    _alarms.clear()
    due, spending = NEVER, contextlib.nullcontext

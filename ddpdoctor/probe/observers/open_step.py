"""One step of training: what is known of it, and its line in the journal."""

from __future__ import annotations

import json
from typing import Any

from ddpdoctor.probe.runtime.clocks import Measured, Times
from ddpdoctor.probe.runtime.recorder import NotYet
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.probe.runtime.vitals import Vitals
from ddpdoctor.run.status import NO_EPOCH, Parts, Phase

ZERO: Times = [0] * len(Phase)


class Backward:
    """One backward pass of the training thread."""

    __slots__ = ("began", "ended", "site")

    def __init__(self, began: int, site: Site) -> None:
        self.began = began
        """Unix nanoseconds."""
        self.ended = 0
        """Unix nanoseconds; 0 while it is under way."""
        self.site = site


class OpenStep:
    """The step under way, and for one step longer, until DDP has its waits."""

    __slots__ = (
        "armed", "backwards", "cores", "epoch", "exposed", "fed", "fetched", "forwards", "loss",
        "measured", "norm", "number", "outside", "skipped", "start", "timed", "times", "total",
        "vitals",
    )  # fmt: skip

    def __init__(self, number: int, start: int, vitals: Vitals) -> None:
        self.number = number
        self.vitals = vitals
        self.start = start
        self.epoch = NO_EPOCH
        self.forwards = 0
        self.backwards = 0
        self.armed = 0
        """Forwards whose backward is all-reduced."""
        self.timed = 0
        """Of how many of the armed iterations DDP's logger gave the timing."""
        self.exposed = 0
        """Nanoseconds of all-reduce that no compute hid, as DDP's logger has it."""
        self.fetched = 0
        """Samples that loaders gave."""
        self.fed = 0
        """Samples that went into forwards, counted if no loader gave any."""
        self.loss: Any = None
        self.norm: Any = None
        self.skipped = False
        self.outside = 0
        self.total = 0
        self.times = ZERO
        self.measured: Measured | None = None
        self.cores: tuple[int, int] | None = None
        """Nanoseconds for which the training thread ran, and waited for a core."""

    def line(self, last: bool = False) -> bytes:
        """The line of its `ddpdoctor.run.records.training.StepRecord`; in the writing thread.

        Written out, as it is made for every step: to encode that record would take three times as
        long, in which the training thread may have to wait for the GIL.

        Raises:
            NotYet: The device is still busy with the step, and this is not the ``last`` call.
        """
        times = self.times
        if self.measured is not None:
            measured = self.measured()
            if measured is None and not last:
                raise NotYet
            # A device that never came to the step's end: what the host saw is all there is.
            times = times if measured is None else measured
        _, other, data, forward, backward, optimizer, wait, _ = times
        exposed = min(self.exposed, backward)
        split = self.timed >= self.armed
        # Waits of the host say nothing of times that a device took.
        cores = self.cores if self.cores is not None and self.measured is None else (0, 0)
        backward, wait = backward - exposed, wait + exposed
        self.vitals.wrote(
            Parts(self.number, data, forward, backward, optimizer, other, wait, split, *cores)
        )
        text = f'{{"kind":"step","step":{self.number},"start":{self.start}'
        if self.epoch != NO_EPOCH:
            text += f',"epoch":{self.epoch}'
        text += (
            f',"data":{data},"forward":{forward},"backward":{backward}'
            f',"optimizer":{optimizer},"other":{other},"wait":{wait}'
            f',"total":{data + forward + backward + optimizer + other + wait}'
            f',"split":{"true" if split else "false"}'
        )
        if self.cores is not None:
            text += f',"cpu":{self.cores[0]},"waited":{self.cores[1]}'
        if self.fetched or self.fed:
            text += f',"samples":{self.fetched or self.fed}'
        for name, given in (("loss", self.loss), ("norm", self.norm)):
            value = given() if callable(given) else given
            if value is not None:
                text += f',"{name}":{json.dumps(value)}'
        if self.backwards != 1:
            text += f',"backwards":{self.backwards}'
        if self.skipped:
            text += ',"skipped":true'
        if self.outside:
            text += f',"outside":{self.outside}'
        return text.encode() + b"}\n"

"""One step of training: what is known of it, and its line in the journal."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

from ddpdoctor.probe.runtime.clocks import Measured, Times
from ddpdoctor.probe.runtime.recorder import NotYet
from ddpdoctor.probe.runtime.vitals import Vitals
from ddpdoctor.run.status import NO_EPOCH, Parts, Phase

MOST_RUNS = 32
"""Numbers of backwards that are written of the steps of one line, one for those that are alike."""

ZERO: Times = [0] * len(Phase)


class OpenStep:
    """The step under way, and for one step longer, until DDP has its waits.

    Where steps are short it is several of them (`ddpdoctor.probe.observers.detail`), in one line.
    """

    # What a step has not is not stored either: one is made for each, and these are a dozen.
    epoch = NO_EPOCH
    armed = 0
    """Forwards whose backward is all-reduced."""
    timed = 0
    """Of how many of the armed iterations DDP's logger gave the timing."""
    exposed = 0
    """Nanoseconds of all-reduce that no compute hid, as DDP's logger has it."""
    looked = 0
    """Steps whose batches were looked at."""
    fetched = 0
    """Samples that loaders gave."""
    fed = 0
    """Samples that went into forwards, counted if no loader gave any."""
    loss: Any = None
    norm: Any = None
    skipped = False
    outside = 0
    last = 0
    """The number of the last of its steps."""
    times = ZERO
    measured: Measured | None = None
    cores: tuple[int, int] | None = None
    """Nanoseconds for which the training thread ran, and waited for a core."""

    def __init__(self, number: int, start: int, vitals: Vitals, passes: list[int]) -> None:
        self.number = number
        self.vitals = vitals
        self.start = start
        self.passes = passes
        """For each step that has ended, how many backwards there were until then."""

    def line(self, last: bool = False) -> bytes:
        """The line of its `ddpdoctor.run.records.training.StepRecord`; in the writing thread.

        Written out, as it is made for every step: to encode that record would take three times as
        long, in which the training thread may have to wait for the GIL.

        Raises:
            NotYet: The device is still busy with the step, and this is not the ``last`` call.
        """
        times = self.times if self.measured is None else self._on_device(self.measured, last)
        ran: Sequence[int] | None = self.cores
        count, number, backwards = len(self.passes), "", ""
        if count > 1:
            times, ran = _means(times, count), ran and _means(ran, count)
            number, backwards = f',"steps":{count}', _backwards_of_each(self.passes)
        elif self.passes[0] != 1:
            backwards = f',"backwards":{self.passes[0]}'
        _, other, data, forward, backward, optimizer, wait, _ = times
        # DDP's timers are those of some of the reduced backwards.
        exposed = self.exposed * self.armed // (self.timed * count) if self.timed else 0
        exposed = min(exposed, backward)
        split = self.timed >= self.armed or (count > 1 and self.timed > 0)
        # Waits of the host say nothing of times that a device took.
        cores = ran if ran is not None and self.measured is None else (0, 0)
        backward, wait = backward - exposed, wait + exposed
        self.vitals.wrote(
            Parts(self.last, data, forward, backward, optimizer, other, wait, split, *cores)
        )
        text = f'{{"kind":"step","step":{self.last},"start":{self.start}'
        if self.epoch != NO_EPOCH:
            text += f',"epoch":{self.epoch}'
        text += (
            f',"data":{data},"forward":{forward},"backward":{backward}'
            f',"optimizer":{optimizer},"other":{other},"wait":{wait}'
            f',"total":{data + forward + backward + optimizer + other + wait}'
            f',"split":{"true" if split else "false"}'
        )
        if ran is not None:
            text += f',"cpu":{ran[0]},"waited":{ran[1]}'
        text += number
        samples = self.fetched or self.fed
        if samples:
            text += f',"samples":{samples // max(1, self.looked)}'
        if self.loss is not None:
            text += _scalar("loss", self.loss)
        if self.norm is not None:
            text += _scalar("norm", self.norm)
        text += backwards
        if self.skipped:
            text += ',"skipped":true'
        if self.outside:
            text += f',"outside":{self.outside}'
        return text.encode() + b"}\n"

    def _on_device(self, measured: Measured, last: bool) -> Times:
        """What the device took; what the host saw, if it has not come to the step's end.

        The phases of the steps that were not seen in full are taken to be like those of the others;
        but a device waits no longer for data than the host does, which is known of all of them.
        """
        times = measured()
        if times is None and not last:
            raise NotYet
        if times is None:
            return self.times
        thinned, *phases = times
        seen = sum(phases)
        if not thinned:
            return times
        if not seen:
            return self.times
        whole, data = seen + thinned, phases[Phase.DATA - 1]
        waited = min(data * whole // seen, max(data, self.times[Phase.DATA]))
        rest = max(seen - data, 1)
        scaled = [0, *(each * (whole - waited) // rest for each in phases)]
        scaled[Phase.DATA] = waited
        scaled[Phase.BACKWARD] += whole - sum(scaled)
        return scaled


def _means(sums: Sequence[int], count: int) -> list[int]:
    return [each // count for each in sums]


def _scalar(name: str, given: Any) -> str:
    """The field of a loss or a norm, or of what gives it when it is due; empty without one."""
    value = given() if callable(given) else given
    return "" if value is None else f',"{name}":{json.dumps(value)}'


def _backwards_of_each(passes: Sequence[int]) -> str:
    """The field with the number of backwards, if it is not one in each of several steps."""
    counts = [b - a for a, b in itertools.pairwise((0, *passes))]
    if min(counts) == max(counts):
        return f',"backwards":{counts[0]}' if counts[0] != 1 else ""
    runs = [f"{passed},{len([*same])}" for passed, same in itertools.groupby(counts)]
    return f',"each":[{",".join(runs[:MOST_RUNS])}]'

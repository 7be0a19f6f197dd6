"""How far a job is, how fast, and how long it will take."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from ddpdoctor.core.opening import whole
from ddpdoctor.run.records.data import PassRecord
from ddpdoctor.top import events
from ddpdoctor.top.snapshot import Job
from ddpdoctor.top.steplog import StepLine

OVER = 30.0
"""Seconds over which the rate of steps is taken."""

LOOKED_AT = 4
"""Ranks whose newest step's loss and samples are read."""

_EPOCHS = re.compile(r"--(?:n|num|max|total)?[-_]?(?:train)?[-_]?epochs?$")
_STEPS = re.compile(r"--(?:n|num|max|total)?[-_]?(?:train)?[-_]?(?:steps|iters|iterations)$")
_RESTARTS = re.compile(r"--max[-_]restarts$")


class Progress:
    """Follows the steps of a run.

    Args:
        manifest: The run's.
    """

    def __init__(self, manifest: Mapping[str, object]) -> None:
        words = manifest.get("command")
        named = [str(word) for word in words] if isinstance(words, list) else []
        restarts = _number(named, _RESTARTS)
        self._job = Job(
            script=events.job(manifest),
            steps=_number(named, _STEPS),
            epochs=_number(named, _EPOCHS),
            attempts=None if restarts is None else restarts + 1,
        )
        self._seen: deque[tuple[float, int]] = deque()
        self._per_epoch: float | None = None

    def restarted(self) -> None:
        """Another attempt begins, from its step 0."""
        self._seen.clear()

    def loads(self, record: PassRecord | None, line: StepLine | None) -> None:
        """A pass over the loader says how long an epoch is."""
        if record is not None and record.batches:
            self._per_epoch = record.batches / max(1, line.backwards if line is not None else 1)

    def at(self, ticks: float, step: int | None, usual: float | None) -> float | None:
        """Steps a second at a moment, in seconds of any clock; first by their usual duration."""
        if step is None:
            return None
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        self._seen.append((ticks, step))
        while len(self._seen) > 2 and self._seen[1][0] <= ticks - OVER:
            self._seen.popleft()
        since, before = self._seen[0]
        # A step that is under way is no sign of a lower rate until it lasts long.
        long = max(5.0, 3 * usual) if usual else OVER
        if ticks - since < long:
            return 1 / usual if usual else None
        return (step - before) / (ticks - since)

    def job(
        self,
        attempt: int,
        step: int | None,
        epoch: int | None,
        rate: float | None,
        lines: Sequence[StepLine],
        world_size: int | None,
    ) -> Job:
        """How far it is.

        Args:
            attempt: Which one, from 0.
            step: Steps done.
            epoch: Of the newest step.
            rate: Steps a second.
            lines: The newest steps of some ranks.
            world_size: Ranks of the job.
        """
        losses = [line.loss for line in lines if line.loss is not None]
        samples = [line.samples for line in lines if line.samples]
        steps = self._steps(step, epoch)
        job = replace(self._job, attempt=attempt, step=step, epoch=epoch, rate=rate, steps=steps)
        if losses:
            job = replace(job, loss=sum(losses) / len(losses))
        if samples and rate is not None and world_size:
            each = sum(samples) / len(samples)
            job = replace(job, samples_rate=each * world_size * rate)
        if steps is not None and step is not None and rate:
            job = replace(job, left=max(0, steps - step) / rate)
        return job

    def _steps(self, step: int | None, epoch: int | None) -> int | None:
        """All steps of this attempt, as far as the command and the loader tell."""
        epochs, per_epoch = self._job.epochs, self._per_epoch
        if epochs is None:
            return self._job.steps
        if per_epoch is None or step is None:
            return None
        before = 0 if epoch is None else epoch - int(step / per_epoch)
        # One epoch ahead is a job that counts from 1; more, one that was resumed.
        done = before if before > 1 else 0
        steps = round(per_epoch * (epochs - done))
        return steps if steps >= step else None


def _number(words: Sequence[str], option: re.Pattern[str]) -> int | None:
    """The number that an option of the command has."""
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if option.match(name):
            number = whole(value if equals else following, -1)
            return number if number >= 0 else None
    return None

"""What was not measured, so that a gap in the report is not taken for good news."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.core.ranks import named
from ddpdoctor.core.units import count
from ddpdoctor.run.names import VITALS
from ddpdoctor.run.records.process import FaultRecord
from ddpdoctor.run.records.supervisor import UnwatchedRecord
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.step_series import Series


def gaps(run: Run, steps: Series) -> Iterator[str]:
    """What is not known of a run and why, a sentence each without a full stop."""
    for unwatched in run.supervisor.of(UnwatchedRecord):
        yield f"ranks were not watched: {unwatched.why}"
    yield from _of_ranks(run)
    yield from _of_steps(steps)
    yield from _of_machine(run)
    yield from _of_records(run)


def _of_ranks(run: Run) -> Iterator[str]:
    seen = {rank.rank for rank in run.last}
    absent = set(range(min(run.world_size, 1 << 17))) - seen
    if seen and absent:
        yield f"{named(absent)}: no records here; a run directory has the ranks of one node"
    if len(run.restarts) > 1:
        yield "steps of attempts before the last one: the charts show the last"


def _of_steps(steps: Series) -> Iterator[str]:
    if not steps.ranks:
        yield "steps: no rank closed one"
        return
    if steps.edges[0]:
        yield f"steps before {steps.edges[0]}: the journals have room for --journal-mb megabytes"
    if steps.sampled:
        yield "each step: of each column of the charts a few steps were read, as the run is long"
    read, split = (sum(getattr(each, name) for each in steps.ranks) for name in ("steps", "split"))
    unsplit = sum(len(each.unsplit) for each in steps.ranks)
    if len(steps.ranks) == 1:
        # It waits for none.
        pass
    elif unsplit == steps.columns * len(steps.ranks):
        yield "the wait for other ranks: it is part of backward, as DDP timed no step"
    elif split < read:
        yield (
            f"the wait for other ranks in {read - split} of {read} steps, which DDP did not time: "
            "columns without a timed one show how much longer a backward took than the shortest"
        )
    if not any(each == each for rank in steps.ranks for each in rank.loss):
        yield "the loss: no backward began with a tensor of one element"
    if not any(each == each for rank in steps.ranks for each in rank.norm):
        yield "gradient norms: they are known where the job calls clip_grad_norm_"


def _of_machine(run: Run) -> Iterator[str]:
    if not (run.path / VITALS).exists():
        yield "memory and GPUs over time: the run has no record of them"
    elif not any(run.path.glob("gpus-*.json")):
        yield "GPUs: no NVML on this machine"


def _of_records(run: Run) -> Iterator[str]:
    lost = sum(rank.status.dropped for rank in run.last if rank.status is not None)
    if lost:
        yield f"{count(lost, 'record')} that did not fit or could not be written"
    for line in run.unreadable:
        yield f"not read: {line}"
    faults = [each for rank in run.ranks for each in rank.records.of(FaultRecord)]
    for fault in (*faults, *run.supervisor.of(FaultRecord))[:10]:
        yield f"{fault.hook or fault.part} of ddpdoctor failed and was switched off: {fault.error}"

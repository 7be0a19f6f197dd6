"""Stages of a pipeline that take longer than the others (DDP612)."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.lag import stage_lags
from ddpdoctor.analysis.pace import BORNE_OUT, PHASE_NAMES, UNEVEN
from ddpdoctor.analysis.reasons import shown_ms
from ddpdoctor.analysis.stages import stages
from ddpdoctor.analysis.surplus import Lag
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.core.ranks import named
from ddpdoctor.core.relations import pace
from ddpdoctor.run.snapshot import Run

CROWDED = 1.5
"""By how much more a stage has to be slower where it waits longer for a core than it works: what is
left of its steps without these waits is not exact."""


@rule("DDP612", "uneven-stages", Severity.WARNING, lapses=pace)
def uneven_stages(run: Run) -> Iterator[Finding]:
    """A stage of a pipeline takes twice as long as the others, and they wait for it.

    What it finds
        A stage (torch.distributed.pipelining) whose own time (data, forward, backward compute,
        optimizer, and the code in between) is at least twice that of the others, which wait for it
        in each micro-batch. Of several replicas, the median rank of each stage is compared. A rank
        that is slower than the same stage of the other replicas is reported by DDP610.

    Why it is bad
        A pipeline runs at the pace of its slowest stage: all other devices idle for the rest.

    How to fix it
        Move the cut, so that the stage has fewer layers: time the layers, forward and backward, and
        cut where the largest sum is smallest, as `--split auto` of
        sample_jobs/hybrid_pipeline.py does. If it is the data, load it faster.

    Example
        Wrong: cut = 2  # stage 1 has the other 13 layers
        Right: cut = min(range(1, n), key=lambda c: max(sum(times[:c]), sum(times[c:])))

    When it stays silent
        In the first 30 steps (8 if it is plain to see), below twice the time (three times if the
        stage waits longer for a CPU core than it works), and for steps with a rank in the debugger.
    """
    over = run.exit_status is not None or all(rank.ended for rank in run.last)
    found = [each for each in stage_lags(run) if _counts(each[1], over)]
    if not found:
        return
    stage, lag = max(found, key=lambda each: each[1].own[0])
    others = [each for each in stages(run) if each.numbers != stage.numbers]
    theirs = named((number for each in others for number in each.numbers), "stage")
    compared = theirs if len(others) == 1 else "the others"
    ranks = tuple(rank.rank for rank in stage.ranks)
    is_data = lag.phase == "data"
    words = f", for its {PHASE_NAMES[lag.phase]}" if is_data else ""
    evidence: tuple[str, ...] = (
        f"own time {shown_ms(lag.own[0])} a step; {theirs} {shown_ms(lag.own[1])} "
        f"(medians of {lag.steps} steps)",
        f"{PHASE_NAMES[lag.phase]}: {shown_ms(lag.slow)} against {shown_ms(lag.usual)}",
        f"{theirs} {'waits' if theirs.startswith('stage ') else 'wait'} "
        f"{shown_ms(lag.wait[1])} a step, {stage.name} {shown_ms(lag.wait[0])}",
    )
    if not lag.calm:
        evidence += (
            f"not counted in its own time: {stage.name} waits {shown_ms(lag.cores[0])} a step for "
            f"a CPU core, {theirs} {shown_ms(lag.cores[1])}: the machine is crowded",
        )
    yield Finding(
        code="DDP612",
        about="stages",
        severity=Severity.WARNING,
        message=f"{stage.name} of {stage.of} ({named(ranks)}) "
        f"{'needs' if len(stage.numbers) == 1 else 'need'} {lag.own[0] / lag.own[1]:.1f}x the time "
        f"of {compared}{words}",
        ranks=ranks,
        location=lag.rank.site("data") if is_data else stage.record.location,
        evidence=evidence,
        fix="Load the data of this stage faster: more loader workers, or lighter samples."
        if is_data
        else f"Move the cut: give {stage.name} fewer layers. To find the cut, time the layers, as "
        "`--split auto` of sample_jobs/hybrid_pipeline.py does.",
    )


def _counts(lag: Lag, over: bool) -> bool:
    """Whether it is the stage's own time, and no matter of a crowded machine."""
    works = lag.cpu >= BORNE_OUT * lag.gap
    sure = lag.calm or (lag.sure and lag.phase != "data")
    enough = UNEVEN * (CROWDED if lag.cores[0] > lag.own[0] else 1)
    uneven = lag.own[0] >= enough * lag.own[1] > 0
    return uneven and not lag.crowded and (works or sure) and (over or not lag.few)

"""Data (DDP1xx) in evaluation: shards whose results never meet, and samples counted twice."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.draws import Passes, matched, passes_of, same_part
from ddpdoctor.core.finding import Finding, Severity, rule
from ddpdoctor.run.records.data import SaveRecord
from ddpdoctor.run.snapshot import Run

MOST_SAVES = 50
"""Saved files that a rank writes down; with that many, later ones are not known."""


def _evaluations(run: Run) -> Iterator[Passes]:
    """Passes that every rank finished over its shard of one data set without training on it."""
    for passes in matched(run):
        each = list(passes.values())
        if (
            all(
                one.record.state == "ended"
                and not one.record.marks
                and one.indexed
                and one.record.armed > 0
                and one.shard is not None
                and one.shard[1] == len(each)
                for one in each
            )
            and len({one.length for one in each}) == 1
            and same_part(passes)
            and len({one.shard for one in each}) == len(each)
        ):
            yield passes


@rule("DDP106", "eval-shard-not-reduced", Severity.INFO)
def not_reduced(run: Run) -> Iterator[Finding]:
    """Each rank evaluates its own shard, and the results are never combined.

    What it finds
        An evaluation in which a sampler gave every rank a shard, after which no rank called any
        collective before it continued training or ended.

    Why it is bad
        The metric is that of one shard. What rank 0 prints, and what selects the best checkpoint or
        stops early, is based on a part of the validation data.

    How to fix it
        Sum the counts over the ranks before you divide.

    Example
        Wrong:
            accuracy = right / seen
        Right:
            counts = torch.tensor([right, seen])
            dist.all_reduce(counts)
            accuracy = counts[0] / counts[1]

    When it stays silent
        If any collective is called from Python in between, for whatever purpose. If each rank then
        passes `torch.save` a separate file (predictions, say). For data that every rank reads in
        full, and before the first training step.
    """
    if len(run.last) < 2:
        return
    for passes in _evaluations(run):
        each = list(passes.values())
        if len(each) != len(run.last) or any(one.record.collectives != 0 for one in each):
            continue
        if _separate_files(run, passes):
            continue
        first = each[0]
        at = first.read
        yield Finding(
            code="DDP106",
            about=str(at),
            severity=Severity.INFO,
            message=f"each rank evaluates only its shard at {at}, and no collective brings the "
            f"results together",
            ranks=(),
            location=at,
            evidence=(
                *(
                    f"rank {one.rank}: {one.record.draws} of {one.length} samples"
                    for one in each[:4]
                ),
                "0 collectives from the loop's beginning to the next training step",
            ),
            fix="all_reduce the sums and counts of the metric before dividing them.",
        )
        return


def _separate_files(run: Run, passes: Passes) -> bool:
    """Whether each rank saved its own file before it went on, or may have.

    Then results are to stay separate. Of a file that is saved again only the first time is known.
    """
    files: list[str] = []
    for rank in run.last:
        one = passes[rank.rank]
        begun = one.record.time
        later = [each.record.time for each in passes_of(rank) if each.trains]
        until = min((time for time in later if time > begun), default=run.taken)
        saves = rank.records.of(SaveRecord)
        if rank.lost or len(saves) >= MOST_SAVES:
            return True
        saved = {record.file for record in saves if record.time <= until}
        if not saved:
            return False
        files += saved
    return len(set(files)) == len(files)


@rule("DDP107", "eval-padding-duplicates", Severity.WARNING)
def padded(run: Run) -> Iterator[Finding]:
    """The evaluation counts some samples twice.

    What it finds
        An evaluation over a sampler's shards that drew more samples than the data set has, because
        its length is not a multiple of the number of ranks. A warning if a metric is then reduced
        over the ranks; otherwise information, since gathered results can be cut.

    Why it is bad
        `DistributedSampler` repeats samples until all shards have the same length. This does no
        harm in training, but a reduced accuracy is slightly wrong and depends on the number of
        ranks.

    How to fix it
        Cut off the repeated samples after gathering, or give each rank a `Subset` instead of a
        sampler.

    Example
        Wrong: `DistributedSampler(validation, shuffle=False)` with 10,001 samples on 4 ranks.
        Right: `Subset(validation, range(rank, len(validation), world_size))`

    When it stays silent
        With `drop_last=True`, for lengths that divide evenly, for shards without padding, and in
        training.
    """
    for passes in _evaluations(run):
        each = list(passes.values())
        first = each[0]
        drawn = sum(one.record.draws for one in each)
        extra = drawn - first.length
        if first.sampler.drop_last or not 0 < extra < len(each):
            continue
        if any(one.record.collectives is None for one in each):
            # What becomes of the results is not known yet.
            continue
        reported = all(
            (one.record.reductions or 0) > 0 >= (one.record.gathers or 0) for one in each
        )
        yield Finding(
            code="DDP107",
            about=str(first.at),
            severity=Severity.WARNING if reported else Severity.INFO,
            message=f"the evaluation counts {extra} of {first.length} samples twice: the sampler "
            f"built at {first.at} pads its shards to equal length",
            location=first.at,
            evidence=(
                *(f"rank {one.rank}: {one.record.draws} samples" for one in each[:4]),
                f"together {drawn} of {first.length}",
                *(["numbers are reduced over the ranks afterwards"] if reported else []),
            ),
            fix="Drop the repeated samples after gathering, or shard the evaluation without "
            "padding.",
        )
        return

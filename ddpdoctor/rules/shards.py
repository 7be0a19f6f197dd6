"""Data (DDP1xx) in evaluation: shards whose results never meet, and samples counted twice."""

from __future__ import annotations

from collections.abc import Iterator

from ddpdoctor.analysis.draws import Passes, matched, passes_of, same_part
from ddpdoctor.core.finding import Finding, Location, Severity, rule
from ddpdoctor.run.record import integer
from ddpdoctor.run.snapshot import Run


def _evaluations(run: Run) -> Iterator[Passes]:
    """Passes that every rank finished over its shard of one data set without training on it."""
    for passes in matched(run):
        each = list(passes.values())
        if (
            all(
                one["state"] == "ended"
                and not one.number("marks")
                and one.indexed
                and one.number("armed") > 0
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
    """Each rank evaluates its own shard, and the ranks never put their results together.

    What it finds
        An evaluation in which a sampler gave every rank its shard, after which no rank called any
        collective before it went on to train, or came to its end.

    Why it is bad
        A metric of such a loop is that of one shard. What rank 0 prints, and what decides about
        the best checkpoint or early stopping, is of a part of the validation data.

    How to fix it
        Sum the counts over the ranks before dividing: `dist.all_reduce(torch.tensor([right, n]))`.

    Example
        Wrong: `print(right / len(loader.sampler))` on rank 0.
        Right: `counts = torch.tensor([right, seen]); dist.all_reduce(counts)`, then divide.

    When it stays silent
        If any collective is called from Python in between, whatever for; if each rank then gives
        `torch.save` a file of its own (predictions, say); for data that every rank reads in full;
        before the first training step.

    Since
        0.1.0
    """
    if len(run.last) < 2:
        return
    for passes in _evaluations(run):
        each = list(passes.values())
        if len(each) != len(run.last) or any(one["collectives"] != 0 for one in each):
            continue
        if _kept_apart(run, passes):
            continue
        first = each[0]
        at = Location(str(first["path"]), first.number("line"))
        yield Finding(
            code="DDP106",
            about=str(at),
            severity=Severity.INFO,
            message=f"each rank evaluates only its shard at {at}, and no collective brings the "
            f"results together",
            ranks=(),
            location=at,
            evidence=(
                *(f"rank {one.rank}: {one.draws} of {one.length} samples" for one in each[:4]),
                "0 collectives from the loop's beginning to the next training step",
            ),
            fix="all_reduce the sums and counts of the metric before dividing them.",
        )
        return


def _kept_apart(run: Run, passes: Passes) -> bool:
    """Whether each rank saved a file of its own before it went on: they are to stay apart."""
    files: list[str] = []
    for rank in run.last:
        one = passes[rank.rank]
        begun = one.number("time")
        later = [each.number("time") for each in passes_of(rank) if each.trains]
        until = min((time for time in later if time > begun), default=None)
        saved = {
            str(record.get("file"))
            for record in rank.of_kind("save")
            if begun <= integer(record, "time") and not (until and integer(record, "time") > until)
        }
        if not saved:
            return False
        files += saved
    return len(set(files)) == len(files)


@rule("DDP107", "eval-padding-duplicates", Severity.WARNING)
def padded(run: Run) -> Iterator[Finding]:
    """The evaluation counts some samples twice.

    What it finds
        An evaluation over a sampler's shards that together drew more samples than the data set
        has, since its length is no multiple of the number of ranks. A warning, if a metric is then
        reduced over the ranks; else information, as results that are gathered may be cut.

    Why it is bad
        `DistributedSampler` repeats samples until all shards are equally long. In training that
        does no harm; a reduced accuracy is slightly off, and changes with the number of ranks.

    How to fix it
        Cut the repeated ones off after gathering, or evaluate on all samples but the rest with
        `drop_last=True` and on the rest in a loader of its own.

    Example
        Wrong: `DistributedSampler(validation, shuffle=False)` with 10,001 samples on 4 ranks.
        Right: `Subset(validation, range(rank, len(validation), world))` without a sampler.

    When it stays silent
        With `drop_last=True`, for lengths that divide evenly, for unpadded shards, in training.

    Since
        0.1.0
    """
    for passes in _evaluations(run):
        each = list(passes.values())
        first = each[0]
        drawn = sum(one.draws for one in each)
        extra = drawn - first.length
        if first.sampler.get("drop_last") or not 0 < extra < len(each):
            continue
        if any(one["collectives"] is None for one in each):
            # What becomes of the results is not known yet.
            continue
        reported = all(one.number("reductions") > 0 >= one.number("gathers") for one in each)
        yield Finding(
            code="DDP107",
            about=str(first.at),
            severity=Severity.WARNING if reported else Severity.INFO,
            message=f"the evaluation counts {extra} of {first.length} samples twice: the sampler "
            f"built at {first.at} pads its shards to equal length",
            location=first.at,
            evidence=(
                *(f"rank {one.rank}: {one.draws} samples" for one in each[:4]),
                f"together {drawn} of {first.length}",
                *(["numbers are reduced over the ranks afterwards"] if reported else []),
            ),
            fix="Drop the repeated samples after gathering, or shard the evaluation without "
            "padding.",
        )
        return

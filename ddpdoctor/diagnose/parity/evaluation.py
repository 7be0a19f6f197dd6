"""How many samples and batches an evaluation of a run has."""

from __future__ import annotations

from typing import NamedTuple

from ddpdoctor.core.formatting import count
from ddpdoctor.core.user_code import Location
from ddpdoctor.diagnose.data.draws import Pass, passes_of
from ddpdoctor.run.snapshot import Rank, Run


class Evaluation(NamedTuple):
    """The first evaluation at a line, which all ranks read to its end."""

    made: Location  # The line that built its sampler, or its loader
    drawn: tuple[int, ...]  # Samples that each rank drew
    batches: tuple[int, ...] = ()  # In which it got them

    @property
    def uneven(self) -> bool:
        """Whether a rank's batches have different lengths."""
        return any(drawn % max(1, n) for drawn, n in zip(self.drawn, self.batches, strict=True))

    @property
    def words(self) -> str:
        """What each rank evaluated."""
        return ", ".join(
            f"{drawn} in {count(n, 'batch', 'batches')}"
            for drawn, n in list(zip(self.drawn, self.batches, strict=True))[:8]
        )


def evaluations_of(run: Run) -> dict[Location, Evaluation]:
    """Return the evaluations of a run by the line that reads the loader."""
    by_rank = [_first_passes(rank) for rank in run.last]
    if len(by_rank) < run.world_size:
        return {}
    return {
        at: Evaluation(
            first.at,
            tuple(mine[at].record.draws for mine in by_rank),
            tuple(mine[at].record.fetched for mine in by_rank),
        )
        for at, first in by_rank[0].items()
        if all(at in mine for mine in by_rank)
    }


def _first_passes(rank: Rank) -> dict[Location, Pass]:
    """Return the first pass without training over each loader with an index."""
    found: dict[Location, Pass] = {}
    trained = {each.read for each in passes_of(rank) if each.record.marks}
    for each in passes_of(rank):
        ended = each.record.state == "ended" and each.indexed
        if ended and each.read not in trained:
            found.setdefault(each.read, each)
    return found

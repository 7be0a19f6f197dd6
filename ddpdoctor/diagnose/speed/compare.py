"""Compare two runs: the change of each phase and rank, and differences that may explain it."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median

from ddpdoctor.diagnose.speed.pace import MIN_WAIT_NS, WARM_UP
from ddpdoctor.run import code_version
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import PHASES
from ddpdoctor.run.step_series import PARTS, RankSeries, Series, series
from ddpdoctor.run.vitals import read_vitals

NOTABLE = 0.03  # Minimum change of a rank's own time to name the rank, relative to the step
BLOCKS, MIN_BLOCK = 5, 4
"""Number of parts of a run whose variation is measured, and minimum steps of each."""
MAX_LINES = 60  # Maximum number of lines of the difference between two scripts

_COLUMNS = 400


@dataclass(frozen=True)
class Change:
    """A value in both runs, such as median nanoseconds a step. None if a run has none."""

    name: str
    before: float | None
    after: float | None
    noise: float | None = None
    """The variation of the values within the runs, relative to ``before``. None if unknown."""

    @property
    def difference(self) -> float:
        """The increase. 0 if unknown."""
        return 0.0 if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Fact:
    """A differing fact as text in both runs. Empty if a run lacks it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """The comparison of two runs."""

    names: tuple[str, str]
    total: Change  # The whole step
    phases: tuple[Change, ...]  # Its parts in order, as medians over ranks
    ranks: tuple[Change, ...]
    """The ranks whose own time changed most, largest change first. The rank is the name."""
    slowest_phase: dict[str, str]  # The phase that changed most on each of these ranks
    facts: tuple[Fact, ...]  # Command, versions, ranks and code
    script: tuple[str, ...]  # Lines of the difference between the scripts
    memory: Change  # Peak bytes of the rank with the highest peak
    unsplit: bool  # Whether backward includes the wait for others in only one of the runs


def compare(before: Run, after: Run) -> Comparison:
    """Compare the last attempts of two runs."""
    old, new = (_medians(run) for run in (before, after))
    ranks, slowest = _ranks(old, new)
    kept = code_version.read(before.path), code_version.read(after.path)
    return Comparison(
        names=(before.id, after.id),
        total=Change("step", _total(old), _total(new), _noise(old, new)),
        phases=tuple(
            Change(
                name,
                *(
                    (median(each.parts[at] for each in run.values()) if run else None)
                    for run in (old, new)
                ),
            )
            for at, name in enumerate(PARTS)
        ),
        ranks=ranks,
        slowest_phase=slowest,
        facts=tuple(each for each in _facts(before, after, *kept) if each.before != each.after),
        script=_script(*kept),
        memory=_memory(before, after),
        unsplit=bool(old and new)
        and any(each.split for each in old.values()) != any(each.split for each in new.values()),
    )


@dataclass(frozen=True)
class _MedianStep:
    """One rank's median step."""

    parts: tuple[float, ...]
    total: float
    split: bool
    blocks: tuple[float, ...]  # Medians of consecutive parts of the run. Empty for a short run.

    @property
    def own(self) -> float:
        return sum(self.parts[: len(PHASES)])


def _medians(run: Run) -> dict[int, _MedianStep]:
    found = series(run, run.last, _COLUMNS * max(1, len(run.last)), _COLUMNS)
    return {each.rank: step for each in found.ranks if (step := _median_step(each, found))}


def _median_step(rank: RankSeries, of: Series) -> _MedianStep | None:
    first = of.edges[0] + WARM_UP
    late = [at for at, edge in enumerate(of.edges[:-1]) if edge >= first]
    for columns in (late, range(of.columns)):
        rows = (tuple(values[at] for values in rank.parts) for at in columns)
        steps = [row for row in rows if not any(map(math.isnan, row))]
        if steps:
            medians = tuple(median(each) for each in zip(*steps, strict=True))
            totals = [sum(each) for each in steps]
            return _MedianStep(
                medians,
                median(totals),
                len(rank.unsplit) < of.columns,
                _blocks(totals) if columns is late else (),
            )
    return None


def _blocks(totals: Sequence[float]) -> tuple[float, ...]:
    """Return the medians of parts of a run that have the same length."""
    size = len(totals) // BLOCKS
    if size < MIN_BLOCK:
        return ()
    return tuple(median(totals[at * size : (at + 1) * size]) for at in range(BLOCKS))


def _total(ranks: Mapping[int, _MedianStep]) -> float | None:
    return median(each.total for each in ranks.values()) if ranks else None


def _noise(old: Mapping[int, _MedianStep], new: Mapping[int, _MedianStep]) -> float | None:
    """Return the variation of a step's duration within both runs, relative to the first run."""
    of_run = _total(old)
    spreads = []
    for ranks in (old, new):
        blocks = [
            median(each) for each in zip(*(each.blocks for each in ranks.values()), strict=False)
        ]
        if not blocks:
            return None
        spreads.append(max(blocks) - min(blocks))
    return max(spreads) / of_run if of_run else None


def _memory(before: Run, after: Run) -> Change:
    """Compare the memory of the GPU, or of the host if a run has no GPU."""
    old, new = (_peaks(run) for run in (before, after))
    for at, name in enumerate(("GPU memory", "host memory")):
        if old[at] and new[at]:
            return Change(name, old[at], new[at])
    return Change("memory", None, None)


def _peaks(run: Run) -> tuple[int, int]:
    """Return the peak bytes of any rank on its GPU, and on the host. 0 if unknown."""
    pages = [rank.status for rank in run.last if rank.status is not None]
    restarts = {each.restart for each in run.last}
    samples = [
        rank
        for sample in read_vitals(run.path)
        if sample.restart in restarts
        for rank in sample.ranks
    ]
    resident = [page.rss for page in pages]
    return (
        max((page.peak or 0 for page in pages), default=0),
        max((rss or 0 for rss in (*resident, *(each.rss for each in samples))), default=0),
    )


@dataclass(frozen=True)
class Judged:
    """A limit on a change, and whether it is exceeded."""

    name: str
    limit: float  # Largest allowed increase, relative to the first run
    share: float  # The increase. 0 if unknown.
    noise: float | None
    unknown: str  # The reason why the limit cannot be checked. Empty if it can.

    @property
    def exceeded(self) -> bool:
        """Whether the value increased by more than the limit, and by more than it varies."""
        return self.share > self.limit and self.share > (self.noise or 0.0)


def judge(name: str, change: Change, limit: float) -> Judged:
    """Compare a change with the largest allowed increase, relative to the first run.

    For times, the change needs its ``noise``.
    """
    unknown = ""
    if not change.before or not change.after:
        unknown = f"a run has no record of the {change.name}"
    elif change.name == "step" and change.noise is None:
        unknown = f"a run has fewer than {BLOCKS * MIN_BLOCK} steps after the first {WARM_UP}"
    share = 0.0 if unknown or not change.before else change.difference / change.before
    return Judged(name, limit, share, change.noise, unknown)


def _ranks(
    old: dict[int, _MedianStep], new: dict[int, _MedianStep]
) -> tuple[tuple[Change, ...], dict[str, str]]:
    """Return the ranks whose own time changed notably, and the phase of each that changed most."""
    both = sorted(old.keys() & new.keys())
    changes = [Change(str(rank), old[rank].own, new[rank].own) for rank in both]
    least = max(NOTABLE * (_total(old) or 0.0), MIN_WAIT_NS)
    notable = [each for each in changes if abs(each.difference) >= least]
    notable.sort(key=lambda each: -abs(each.difference))
    slowest: dict[str, str] = {}
    for each in notable:
        rank = int(each.name)
        by = [new[rank].parts[at] - old[rank].parts[at] for at in range(len(PHASES))]
        slowest[each.name] = PHASES[by.index(max(by) if each.difference > 0 else min(by))]
    return tuple(notable), slowest


def _facts(
    before: Run, after: Run, old: code_version.Code | None, new: code_version.Code | None
) -> Iterator[Fact]:
    """Yield facts of both runs, equal ones included."""
    facts = [_run_facts(run) for run in (before, after)]
    for name in facts[0]:
        yield Fact(name, *(each[name] for each in facts))
    versions = [_versions(run) for run in (before, after)]
    for name in sorted(versions[0].keys() | versions[1].keys()):
        yield Fact(name, *(each.get(name, "") for each in versions))
    if old is None or new is None:
        return
    yield Fact("commit", old.commit, new.commit)
    for name in sorted(old.files.keys() | new.files.keys()):
        # The script's difference is shown line by line instead.
        if PurePath(old.script).name == name and old.text and new.text:
            continue
        hashes = [code.files.get(name) for code in (old, new)]
        if None in hashes:
            yield Fact(name, *("absent" if each is None else "there" for each in hashes))
        else:
            yield Fact(name, "there", "there" if hashes[0] == hashes[1] else "changed")


def _run_facts(run: Run) -> dict[str, str]:
    return {
        "command": shlex.join(run.command),
        "directory": str(run.manifest.get("cwd", "")),
        "ranks": str(run.world_size or len(run.last)),
        "nodes": ", ".join(sorted({rank.opened.host for rank in run.last if rank.opened.host})),
    }


def _versions(run: Run) -> dict[str, str]:
    opened = next((rank.opened.versions for rank in run.last if rank.opened.versions), {})
    given = run.manifest.get("versions")
    return {**(given if isinstance(given, dict) else {}), **opened}


def _script(old: code_version.Code | None, new: code_version.Code | None) -> tuple[str, ...]:
    if old is None or new is None or not (old.text and new.text):
        return ()
    lines = list(
        difflib.unified_diff(
            old.text.splitlines(), new.text.splitlines(), old.script, new.script, lineterm="", n=1
        )
    )
    more = len(lines) - MAX_LINES
    return (*lines[:MAX_LINES], *([f"... {more} more lines"] if more > 0 else []))

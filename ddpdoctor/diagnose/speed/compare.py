"""Compare two runs: what got slower, in which phase and on which ranks, and what changed."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median

from ddpdoctor.diagnose.speed.pace import MIN_WAIT_NS, WARM_UP
from ddpdoctor.run import code_version
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import PHASES
from ddpdoctor.run.step_series import PARTS, RankSeries, Series, series

NOTABLE = 0.03
"""Minimum difference of a named rank's own time, relative to the step."""
MAX_LINES = 60  # Maximum number of lines of the difference between two scripts

_COLUMNS = 400


@dataclass(frozen=True)
class Change:
    """A time in both runs: median nanoseconds a step; None where a run has none."""

    name: str
    before: float | None
    after: float | None

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
    phases: tuple[Change, ...]  # Its parts, in their order; medians over ranks
    ranks: tuple[Change, ...]
    """The ranks whose own time changed most, the largest change first. Their number is the name."""
    slowest_phase: dict[str, str]  # The phase that changed most on each of these ranks
    facts: tuple[Fact, ...]  # Command, versions, ranks and code
    script: tuple[str, ...]  # Lines of the difference between the scripts
    unsplit: bool  # Whether backward includes the wait for others in only one of the runs


def compare(before: Run, after: Run) -> Comparison:
    """Compare the last attempts of two runs."""
    old, new = (_medians(run) for run in (before, after))
    ranks, slowest = _ranks(old, new)
    kept = code_version.read(before.path), code_version.read(after.path)
    return Comparison(
        names=(before.id, after.id),
        total=Change("step", _total(old), _total(new)),
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
        unsplit=bool(old and new)
        and any(each.split for each in old.values()) != any(each.split for each in new.values()),
    )


@dataclass(frozen=True)
class _MedianStep:
    """One rank's median step."""

    parts: tuple[float, ...]
    total: float
    split: bool

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
            return _MedianStep(medians, median(map(sum, steps)), len(rank.unsplit) < of.columns)
    return None


def _total(ranks: Mapping[int, _MedianStep]) -> float | None:
    return median(each.total for each in ranks.values()) if ranks else None


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
        # The script's difference is shown line by line.
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

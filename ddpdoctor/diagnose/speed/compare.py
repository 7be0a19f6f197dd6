"""Two runs side by side: what got slower, in which phase, on which ranks, and what was changed."""

from __future__ import annotations

import difflib
import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath
from statistics import median

from ddpdoctor.diagnose.speed.pace import NOTICEABLE
from ddpdoctor.run import code_version
from ddpdoctor.run.snapshot import Run
from ddpdoctor.run.status import PHASES
from ddpdoctor.run.step_series import PARTS, RankSeries, Series, series

WARM_UP = 10
"""Steps at the beginning of a run that are not compared, where there are more."""

NOTABLE = 0.03
"""A difference of a rank's own time, as a part of the step, from which on the rank is named."""

MOST_LINES = 60
"""Lines of the difference between two scripts."""

_COLUMNS = 400


@dataclass(frozen=True)
class Change:
    """A time in both runs: nanoseconds a step, medians; None where a run has none."""

    name: str
    before: float | None
    after: float | None

    @property
    def difference(self) -> float:
        """How much longer it is now; 0 if that is not known."""
        return 0.0 if self.before is None or self.after is None else self.after - self.before


@dataclass(frozen=True)
class Fact:
    """Something that is not the same: in both runs as text, empty where a run lacks it."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Comparison:
    """Two runs."""

    names: tuple[str, str]
    total: Change
    """The whole step."""
    phases: tuple[Change, ...]
    """Its parts, in their order; medians over ranks."""
    ranks: tuple[Change, ...]
    """The ranks whose own time changed most, the largest change first; named by their number."""
    slowest_phase: dict[str, str]
    """Of each of these the phase that changed most."""
    facts: tuple[Fact, ...]
    """Command, versions, ranks and code."""
    script: tuple[str, ...]
    """Lines of the difference between the scripts."""
    unsplit: bool
    """Whether the wait for others is part of backward in one of them, and not in the other."""


def compare(before: Run, after: Run) -> Comparison:
    """What differs from one run to the other, in their last attempts."""
    old, new = (_usual(run) for run in (before, after))
    phases = tuple(
        Change(name, _over_ranks(old, place), _over_ranks(new, place))
        for place, name in enumerate(PARTS)
    )
    ranks, slowest = _ranks(old, new)
    kept = code_version.read(before.path), code_version.read(after.path)
    return Comparison(
        names=(_name(before), _name(after)),
        total=Change("step", _total(old), _total(new)),
        phases=phases,
        ranks=ranks,
        slowest_phase=slowest,
        facts=tuple(each for each in _facts(before, after, *kept) if each.before != each.after),
        script=_script(*kept),
        unsplit=bool(old and new) and _split(old) != _split(new),
    )


def _name(run: Run) -> str:
    return str(run.manifest.get("id") or run.path.name)


# -- times


@dataclass(frozen=True)
class _Usual:
    """One rank's median step."""

    parts: tuple[float, ...]
    total: float
    split: bool

    @property
    def own(self) -> float:
        return sum(self.parts[: len(PHASES)])


def _usual(run: Run) -> dict[int, _Usual]:
    found = series(run, run.last, _COLUMNS * max(1, len(run.last)), _COLUMNS)
    return {each.rank: usual for each in found.ranks if (usual := _of_rank(each, found))}


def _of_rank(rank: RankSeries, of: Series) -> _Usual | None:
    first = of.edges[0] + WARM_UP
    late = [at for at, edge in enumerate(of.edges[:-1]) if edge >= first]
    for columns in (late, range(of.columns)):
        rows = (tuple(values[at] for values in rank.parts) for at in columns)
        steps = [row for row in rows if not any(map(math.isnan, row))]
        if steps:
            medians = tuple(median(each) for each in zip(*steps, strict=True))
            return _Usual(medians, median(map(sum, steps)), len(rank.unsplit) < of.columns)
    return None


def _over_ranks(ranks: dict[int, _Usual], place: int) -> float | None:
    return median(each.parts[place] for each in ranks.values()) if ranks else None


def _total(ranks: dict[int, _Usual]) -> float | None:
    return median(each.total for each in ranks.values()) if ranks else None


def _split(ranks: dict[int, _Usual]) -> bool:
    return any(each.split for each in ranks.values())


def _ranks(
    old: dict[int, _Usual], new: dict[int, _Usual]
) -> tuple[tuple[Change, ...], dict[str, str]]:
    """The ranks whose own time changed by more than is worth a word."""
    both = sorted(old.keys() & new.keys())
    changes = [Change(str(rank), old[rank].own, new[rank].own) for rank in both]
    step = _total(old) or 0.0
    notable = [c for c in changes if abs(c.difference) >= max(NOTABLE * step, NOTICEABLE)]
    notable.sort(key=lambda each: -abs(each.difference))
    slowest: dict[str, str] = {}
    for each in notable:
        rank, grew = int(each.name), each.difference > 0
        by = [new[rank].parts[at] - old[rank].parts[at] for at in range(len(PHASES))]
        slowest[each.name] = PHASES[by.index(max(by) if grew else min(by))]
    return tuple(notable), slowest


# -- what was changed


def _facts(
    before: Run, after: Run, old: code_version.Code | None, new: code_version.Code | None
) -> Iterator[Fact]:
    yield Fact("command", *(_command(run) for run in (before, after)))
    yield Fact("directory", *(str(run.manifest.get("cwd", "")) for run in (before, after)))
    yield Fact("ranks", *(str(run.world_size or len(run.last)) for run in (before, after)))
    yield Fact("nodes", *(_nodes(run) for run in (before, after)))
    versions = [_versions(run) for run in (before, after)]
    for name in sorted(versions[0].keys() | versions[1].keys()):
        yield Fact(name, *(each.get(name, "") for each in versions))
    if old is not None and new is not None:
        yield Fact("commit", old.commit, new.commit)
        for name in sorted(old.files.keys() | new.files.keys()):
            # The script's own difference is shown line by line.
            if PurePath(old.script).name != name or not (old.text and new.text):
                yield _file(name, old.files.get(name), new.files.get(name))


def _file(name: str, old: str | None, new: str | None) -> Fact:
    """A file in words: its hash means nothing to a person."""
    if old is None or new is None:
        return Fact(name, *("absent" if each is None else "there" for each in (old, new)))
    return Fact(name, "there", "there" if old == new else "changed")


def _command(run: Run) -> str:
    command = run.manifest.get("command")
    return shlex.join(map(str, command)) if isinstance(command, list) else ""


def _nodes(run: Run) -> str:
    return ", ".join(sorted({rank.opened.host for rank in run.last if rank.opened.host}))


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
    more = len(lines) - MOST_LINES
    return (*lines[:MOST_LINES], *([f"... {more} more lines"] if more > 0 else []))

"""The table of ranks: who it is, how it ended, where its steps went."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ddpdoctor.analysis.endings import endings
from ddpdoctor.analysis.pace import WARM_UP
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import PARTS, RankSeries, Series


def rows(
    run: Run, ranks: Sequence[Rank], findings: Sequence[Finding], steps: Series
) -> list[dict[str, Any]]:
    """A row for each rank; what is not known is absent. Times are seconds, means over the run."""
    blamed = {rank: each.code for each in reversed(findings) for rank in _guilty(each)}
    ended = {each.rank: each.text for each in reversed(endings(run, run.restarts[-1]))}
    series = {each.rank: each for each in steps.ranks}
    found = []
    for rank in ranks:
        status = rank.status
        row = {
            "rank": rank.rank,
            "node": rank.opened.host,
            "local": rank.opened.local_rank,
            "pid": status.pid if status is not None else rank.opened.pid,
            "state": ended.get(rank.rank) or _state(rank),
            "failed": rank.rank in ended or None,
            "finding": blamed.get(rank.rank),
            "steps": status.step if status is not None else None,
            "gpu": next((each.device_name for each in rank.records.of(DdpRecord)), ""),
            "rss": status.rss if status is not None else None,
            "peak": status.peak if status is not None else None,
            **_times(series.get(rank.rank), steps.edges),
        }
        found.append({key: value for key, value in row.items() if value or value == 0})
    return found


def _guilty(finding: Finding) -> tuple[int, ...]:
    return finding.ranks if finding.severity > Severity.INFO else ()


def _state(rank: Rank) -> str:
    if rank.ended:
        return "ended"
    if rank.exit is not None:
        return "exited"
    if rank.status is None:
        return ""
    where = f" at {rank.status.site.rpartition('/')[2]}" if rank.status.site else ""
    return f"{rank.status.phase.label}{where}"


def _times(series: RankSeries | None, edges: Sequence[int]) -> dict[str, Any]:
    if series is None or not series.steps:
        return {}
    steady = [place for place, edge in enumerate(edges[:-1]) if edge >= WARM_UP]
    means = [_mean(values, steady) / 1e9 for values in series.parts]
    longest = max(value for value in series.worst if value == value)
    return {
        "parts": [round(each, 7) for each in means],
        "own": round(sum(means[: PARTS.index("wait")]), 7),
        "longest": round(longest / 1e9, 7),
        "unsplit": len(series.unsplit) == len(series.worst) or None,
    }


def _mean(values: Sequence[float], steady: Sequence[int]) -> float:
    """Without those of the warm-up, if there are others, and without those that are not known."""
    known = [values[place] for place in steady if values[place] == values[place]]
    return fmean(known or [value for value in values if value == value] or [0.0])

"""The table of ranks: who it is, how it ended, where its steps went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from ddpdoctor.analysis.endings import endings
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.run.records.model import DdpRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.step_series import PARTS, RankSeries, Series


def rows(
    run: Run, ranks: Sequence[Rank], findings: Sequence[Finding], steps: Series
) -> list[dict[str, Any]]:
    """A row for each rank; what is not known is absent. Times are seconds, medians over the run."""
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
            **_times(series.get(rank.rank)),
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


def _times(series: RankSeries | None) -> dict[str, Any]:
    if series is None or not series.steps:
        return {}
    medians = [_median(values) / 1e9 for values in series.parts]
    longest = max(value for value in series.worst if value == value)
    return {
        "parts": [round(each, 7) for each in medians],
        "own": round(sum(medians[: PARTS.index("wait")]), 7),
        "longest": round(longest / 1e9, 7),
        "unsplit": not series.split or None,
    }


def _median(values: Iterable[float]) -> float:
    """Without those that are not known."""
    return median([value for value in values if value == value] or [0.0])

"""Write the comparison of several sizes as one HTML file, with the parts of the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ddpdoctor import __version__
from ddpdoctor.core.finding import Finding
from ddpdoctor.core.formatting import count
from ddpdoctor.diagnose.parity.curves import Curves
from ddpdoctor.render.html import page


def parity_page(
    *,
    title: str,
    verdict: str,
    differs: bool,
    remarks: Sequence[str],
    findings: Sequence[Finding],
    table: Sequence[Sequence[str]],
    curves: Curves | None,
    runs: Sequence[tuple[str, str]],
    written: float,
) -> str:
    """Return the page.

    Args:
        title: The command of the job.
        verdict: The first sentence.
        differs: Whether the sizes train differently.
        remarks: Lines below the verdict.
        findings: What differs.
        table: The rows of the table, the first with the names of the sizes.
        curves: The losses, if they are known.
        runs: A name and the run directory of each size.
        written: The time before which the source files were written (Unix seconds).
    """
    content: dict[str, Any] = {
        "command": "parity",
        "title": title,
        "verdict": {"level": "warning" if differs else "good", "text": verdict},
        "summary": list(remarks),
        "findings": [page.finding_content(each, written) for each in findings],
        "table": [list(row) for row in table],
        "curves": curves and _curves(curves),
        "ranks": [],
        "series": {"ranks": []},
        "vitals": {"times": []},
        "stacks": None,
        "environment": [list(each) for each in runs],
        "made": f"ddpdoctor {__version__}, {page.date_and_time(time.time_ns())}",
    }
    return page.page(content)


def _curves(curves: Curves) -> dict[str, object]:
    smallest = next(iter(curves.sizes))
    band = {
        "name": f"{curves.seeds} seeds of {count(smallest, 'rank')}",
        "low": curves.low,
        "high": curves.high,
    }
    return {
        "samples": curves.samples,
        "losses": [[count(ranks, "rank"), values] for ranks, values in curves.sizes.items()],
        "band": band if curves.low else None,
    }

"""What was measured as JSON: what ``--json`` prints, and what is kept after each run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ddpdoctor.core.control_characters import json_text
from ddpdoctor.core.finding import to_record
from ddpdoctor.scale import reference
from ddpdoctor.scale.measured import Measured
from ddpdoctor.scale.outcome import Outcome, Row, rows
from ddpdoctor.scale.table import cause_of

FORMAT = 1


def document(outcomes: Sequence[Outcome], facts: dict[str, Any], *, published: bool = False) -> str:
    """Everything as one JSON object: ``format``, the facts, ``rows`` and maybe ``reference``.

    A row is a size and a variant: ``ranks, nodes, variant, overrides, median, efficiency, spread,
    cause, try, runs``. Times are seconds; what is not known is null.

    Args:
        outcomes: The runs that are over.
        facts: What was asked for.
        published: Whether to add the published figures.
    """
    found = rows(outcomes)
    content: dict[str, Any] = {
        "format": FORMAT,
        **facts,
        "rows": [_row(each, found) for each in found],
    }
    if published:
        content["reference"] = {
            "setting": reference.SETTING,
            "figures": [
                {**each._asdict(), "efficiency": round(reference.efficiency(each), 4)}
                for each in reference.FIGURES
            ],
        }
    return json_text(content, indent=2)


def _row(row: Row, every: Sequence[Row]) -> dict[str, Any]:
    why = cause_of(row, every)
    return {
        "ranks": row.size.ranks,
        "nodes": row.size.nodes,
        "variant": row.variant.name,
        "overrides": row.variant.overrides,
        "base": row.is_base,
        "median": _measured(row.measured),
        "efficiency": row.efficiency,
        "spread": row.spread,
        "cause": None if why is None else why.name,
        "explanation": None if why is None else why.words,
        "try": [] if why is None else list(why.tries),
        "runs": [_run(each) for each in row.outcomes],
    }


def _run(outcome: Outcome) -> dict[str, Any]:
    return {
        "repeat": outcome.planned.repeat,
        "directory": str(outcome.directory),
        "log": str(outcome.log),
        "exit_status": outcome.status,
        "overrides": outcome.overrides,
        "failure": outcome.failure or None,
        "findings": [to_record(each) for each in outcome.findings],
        "measured": _measured(outcome.measured),
    }


def _measured(measured: Measured | None) -> dict[str, Any] | None:
    return None if measured is None else {**asdict(measured), "rate": measured.rate}

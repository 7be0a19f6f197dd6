"""Ranks of a job that makes no progress, as an examination sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import Finding
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.run.records.supervisor import FlightCall, RankEvidence
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase, Status
from tests.support.written import examined, supervisor_records

NOW = 1_800_000_000_000_000_000


def status(rank: int, phase: Phase, step: int = 3, since: int = 0) -> Status:
    return Status(
        1000 + rank, rank, 4, rank, 0, 1, phase, since, step, None, step, 10, 0, False, "", ""
    )


def job(*ranks: Status, line: bytes = b"") -> Run:
    told = tuple(
        Rank(each.rank, 0, each, step_lines=(line,) * 20 if line else ()) for each in ranks
    )
    return Run(Path("/data/run"), {}, told)


def rank(number: int, phase: str, **more: Any) -> dict[str, Any]:
    return {
        "rank": number,
        "restart": 0,
        "pid": 1000 + number,
        "world_size": 4,
        "phase": phase,
        "since": NOW - 41_000_000_000,
        "step": 3,
        "site": "/job/train.py:61",
        "activity": {"seconds": 1.0, "letters": "SS", "cpu": 0.0},
        **more,
    }


def state(recorded: dict[str, Any]) -> RankState:
    """A rank as it is read back from such a record."""
    return RankState(decoder(RankEvidence)(recorded), NOW)


def flight_call(recorded: dict[str, Any]) -> FlightCall:
    return decoder(FlightCall)(recorded)


def call(sequence: int, done: bool, name: str = "all_reduce") -> dict[str, Any]:
    return {
        "group": "0",
        "sequence": sequence,
        "id": sequence,
        "name": name,
        "shapes": [[64]],
        "dtypes": ["Float"],
        "created": sequence,
        "retired": done,
        "lines": ["/job/train.py:61"],
    }


def stacks(number: int, *frames: tuple[str, int, str], **more: Any) -> dict[str, Any]:
    told = [{"path": path, "line": line, "function": name} for path, line, name in frames]
    thread = {"ident": 1, "name": "MainThread", "current": True, "frames": told}
    return {"rank": number, "restart": 0, "pid": 1000 + number, "threads": [thread], **more}


IN_TORCH = ("/lib/python3.11/site-packages/torch/autograd/graph.py", 8, "_engine_run_backward")
TRAIN = ("/job/train.py", 61, "main")


def waiting(number: int, sequence: int = 9) -> dict[str, Any]:
    return rank(
        number,
        "backward",
        flight=[call(sequence - 1, True), call(sequence, False)],
        stacks=stacks(number, TRAIN, IN_TORCH),
    )


def hung(path: Path, *ranks: dict[str, Any], **more: Any) -> Run:
    """A run whose ranks make no progress."""
    told = {"kind": "hang", "time": NOW, "number": 1, "restart": 0, "seconds": 41.0, **more}
    (path / "hang-0001.json").write_text(json.dumps({**told, "ranks": ranks}))
    record = {**told, "file": "hang-0001.json"}
    return Run(path, {"launcher": "torchrun"}, (), supervisor=supervisor_records(record), taken=NOW)


def findings(path: Path, *ranks: dict[str, Any], **more: Any) -> list[Finding]:
    return examined(hung(path, *ranks, **more))

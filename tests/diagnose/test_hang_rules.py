"""Ranks that left while others wanted another step (DDP801)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase
from tests.support.crash_records import error
from tests.support.written import SECOND, T0, Written

END: JsonObject = {"kind": "end", "time": T0, "steps": 4, "armed": 4}
DRAWS: JsonObject = {"kind": "site", "phase": "data", "path": "/job/train.py", "line": 20}
FORWARD: JsonObject = {"kind": "site", "phase": "forward", "path": "/job/train.py", "line": 21}


def left(
    written: Written,
    records: list[JsonObject],
    theirs: Sequence[JsonObject] = (),
    *,
    status: int | None = None,
    **page: Any,
) -> list[Finding]:
    """What is said where rank 1 ended after four steps, and rank 0 is in this state."""
    known = {"phase": Phase.BACKWARD, "armed": 5, "steps": 4, "site": "/job/train.py:28", **page}
    written.rank(1, records, armed=4, steps=4)
    written.rank(0, theirs, **known)
    written.exit(1, 0, T0)
    return [each for each in written.findings(status=status) if each.code == "DDP801"]


def test_who_left_and_who_waits_for_it_are_reported(written: Written) -> None:
    (finding,) = left(written, [DRAWS, FORWARD, END])
    assert finding.ranks == (1,)
    assert finding.message == "rank 1 left after 4 synchronized steps while rank 0 wanted another"
    assert finding.location == Location("/job/train.py", 20)
    assert finding.evidence == (
        "rank 1 ended regularly after 4 synchronized steps",
        "rank 0 waits in backward of step 4 (/job/train.py:28)",
    )


def test_without_a_loader_the_forward_is_the_loop(written: Written) -> None:
    (finding,) = left(written, [FORWARD, {**END, "armed": 1}], site="", collective="all_reduce")
    assert finding.location == Location("/job/train.py", 21)
    assert finding.evidence == (
        "rank 1 ended regularly after 1 synchronized step",
        "rank 0 waits in all_reduce of step 4",
    )


def test_the_call_by_which_a_rank_left_is_the_place(written: Written) -> None:
    call = {"kind": "exit", "time": T0, "how": "sys.exit", "status": 0, "path": "/a.py", "line": 3}
    (finding,) = left(written, [DRAWS, call, END])
    assert finding.location == Location("/a.py", 3)
    assert finding.evidence[-1] == "rank 1 called sys.exit at /a.py:3"
    assert finding.fix.startswith("Exit on all ranks together")


LOOPS = {
    "for": ("def train():\n    for batch in shard(rank):\n        step(batch)\n", 3, 2),
    "while": ("while steps < limit[rank]:\n    step()\n", 2, 1),
    "caller": ("def step():\n    ddp(x)\nfor x in shard(rank):\n    step()\n", 2, 3),
    "two callers": ("def step():\n    ddp(x)\nstep()\nfor x in y:\n    step()\n", 2, 2),
    "next": ("while batches:\n    batch = next(batches)\n", 2, 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_the_loop_is_the_place_not_the_forward(written: Written, tmp_path: Path, name: str) -> None:
    text, forward, line = LOOPS[name]
    train = tmp_path / "train.py"
    train.write_text(text)
    (finding,) = left(written, [{**FORWARD, "path": str(train), "line": forward}, END])
    assert finding.location == Location(str(train), line)


@pytest.mark.parametrize(("guard", "code"), [("rank == 0", "DDP401"), ("debug", "DDP801")])
def test_a_collective_behind_the_loop_that_one_rank_calls(
    written: Written, tmp_path: Path, guard: str, code: str
) -> None:
    train = tmp_path / "train.py"
    train.write_text(f"for x in y:\n    step()\nif {guard}:\n    dist.barrier()\n")
    ring = RingWriter(f"{written.path}/{rank_stem(0, 0)}.collectives")
    texts = ("barrier", "0|0-1", "", "", f"{train}:4")
    ring.begin(T0, 1, tuple(map(ring.text, texts)), (), -1, -1, 0)  # type: ignore[arg-type]
    written.rank(1, [{**FORWARD, "path": str(train), "line": 2}, END], armed=4, steps=4)
    written.rank(0, [], phase=Phase.WAIT, armed=4, steps=4, collective="barrier", site=f"{train}:4")
    written.exit(1, 0, T0)
    (finding,) = written.findings()
    assert finding.code == code
    assert finding.location == Location(str(train), 4 if code == "DDP401" else 1)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ({"armed": 5}, 1),
        ({"armed": 4}, 0),
        ({"phase": Phase.WAIT, "armed": 4}, 1),
        ({"phase": Phase.WAIT, "armed": 3}, 0),
        ({"phase": Phase.FORWARD, "armed": 9}, 0),
        ({"phase": Phase.DATA, "armed": 9}, 0),
        # It has not waited for long.
        ({"armed": 5, "since": time.time_ns() + 3600 * SECOND}, 0),
    ],
)
def test_who_wants_another_step(written: Written, page: dict[str, Any], expected: int) -> None:
    assert len(left(written, [DRAWS, END], **page)) == expected


LOST = "Connection closed by peer [10.0.0.1]:1"


@pytest.mark.parametrize(
    ("phase", "armed", "expected"),
    [
        ("backward", 5, 1),
        ("backward", 4, 0),
        # In it DDP broadcasts buffers.
        ("forward", 4, 1),
        ("forward", 3, 0),
        ("wait", 4, 1),
        ("wait", 3, 0),
        ("data", 9, 0),
    ],
)
def test_who_failed_wanting_another_step(
    written: Written, phase: str, armed: int, expected: int
) -> None:
    """The status page has moved on; what counts is where the exception was raised."""
    lost = error("RuntimeError", LOST, T0 + SECOND, phase=phase, armed=armed, step=4)
    written.exit(0, 1, T0 + SECOND)
    found = left(written, [DRAWS, END], [lost], status=1, phase=Phase.OTHER, armed=0)
    assert len(found) == expected
    for each in found:
        assert each.evidence[1] == f"rank 0 failed in {phase} of step 4 (/job/train.py:7)"


@pytest.mark.parametrize(
    "records",
    [
        [END, {"kind": "exit", "time": T0, "how": "sys.exit", "status": 3}],
        [END, error("KeyError", "'dog'")],
        [],
    ],
    ids=["a status", "an exception", "no end"],
)
def test_who_did_not_end_well_did_not_leave(written: Written, records: list[JsonObject]) -> None:
    assert left(written, [DRAWS, *records]) == []


@pytest.mark.parametrize(("before", "expected"), [(1, 0), (0, 0), (-1, 1)])
def test_who_ended_once_the_job_was_stopped_did_not_leave(
    written: Written, before: int, expected: int
) -> None:
    written.supervisor.append({"kind": "signal", "time": T0 - before, "signal": 15})
    assert len(left(written, [DRAWS, END])) == expected


def test_a_rank_that_failed_by_itself_explains_the_others(written: Written) -> None:
    bad = error("ValueError", "bad", T0 + SECOND, phase="backward", armed=5)
    written.exit(0, 1, T0 + SECOND)
    assert left(written, [DRAWS, END], [bad], status=1) == []

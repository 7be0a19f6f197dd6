"""An exception of one rank that a collective in a ``finally`` keeps back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase
from tests.support.crash_records import error
from tests.support.written import SECOND, T0, Written


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def pending(message: str = "12,5", **more: Any) -> JsonObject:
    raised = error("ValueError", message, T0, step=20, collective="barrier")
    return {**raised, "kind": "pending_error", "called_at": ["/job/train.py", 30], **more}


def waiting(written: Written, rank: int, *records: JsonObject, **more: Any) -> None:
    there = {"collective": "barrier", "site": "/job/train.py:30", "steps": 20, **more}
    written.rank(rank, list(records), phase=Phase.WAIT, since=T0 + 1, **there)


def aborted(written: Written) -> None:
    for rank in (1, 0):
        written.exit(rank, -6, T0 + SECOND)


MISPAIRED = "  what():  op.preamble.length <= op.nbytes. 132 vs 4.\n"


def test_the_exception_is_the_cause(written: Written) -> None:
    waiting(written, 1, pending())
    written.rank(0, [], phase=Phase.BACKWARD, steps=20)
    aborted(written)
    (finding,) = written.findings(status=1, stderr=MISPAIRED)
    assert (finding.code, finding.ranks) == ("DDP901", (1,))
    assert finding.location == Location("/job/train.py", 7)
    assert finding.message == (
        "rank 1 raised ValueError: 12,5 in step 20, and called barrier at train.py:30 while that "
        "was being handled: the other ranks do not come to this call"
    )


@pytest.mark.parametrize("why", ["everywhere", "over", "lost peer", "job goes on"])
def test_exceptions_that_explain_nothing(written: Written, why: str) -> None:
    lost = pending("Connection closed by peer", exception="RuntimeError")
    waiting(
        written, 1, lost if why == "lost peer" else pending(),
        site=f"/job/train.py:{31 if why == 'over' else 30}",
    )  # fmt: skip
    if why == "everywhere":
        waiting(written, 0, pending())
    else:
        written.rank(0, [], phase=Phase.BACKWARD, steps=20)
    if why == "job goes on":
        assert not written.findings()
        return
    aborted(written)
    found = written.findings(status=1, stderr=MISPAIRED)
    assert "DDP901" not in [each.code for each in found]


@pytest.mark.parametrize("line", [30, 44])
def test_a_call_that_other_ranks_make_too(written: Written, line: int) -> None:
    waiting(written, 1, pending())
    waiting(written, 0)
    for rank, at in ((1, 30), (0, line)):
        ring = RingWriter(f"{written.path}/{rank_stem(rank, 0)}.collectives")
        texts = tuple(map(ring.text, ("barrier", "0|0-1", "", "", f"/job/train.py:{at}")))
        ring.begin(T0, 7, texts, (), -1, -1, 0)  # type: ignore[arg-type]
        ring.end(1, T0 + 1)
    aborted(written)
    found = written.findings(status=1, stderr=MISPAIRED)
    assert ("DDP901" in [each.code for each in found]) is (line == 44)

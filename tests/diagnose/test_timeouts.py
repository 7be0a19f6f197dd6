"""Ranks whose own work outlasts the timeout of a collective in which others wait."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ddpdoctor.core.user_code import Location
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.support.crash_records import error
from tests.support.written import SECOND, T0, Written

GAVE_UP = "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


def at(seconds: float, *lines: int, since: int = T0) -> JsonObject:
    frames = [["/job/train.py", line] for line in lines]
    return {"kind": "own_work", "time": since + int(seconds * SECOND), "since": since,
            "frames": frames}  # fmt: skip


def timed_out(written: Written, message: str = GAVE_UP) -> None:
    """Rank 1 waits in a barrier for six seconds."""
    failed = error("RuntimeError", message, T0 + 6 * SECOND, step=0, collective="barrier", pid=2)
    written.rank(1, [failed], phase=Phase.ENDED, since=T0 + 6 * SECOND)
    written.exit(1, 1, T0 + 7 * SECOND)
    written.exit(0, -15, T0 + 7 * SECOND)


def test_the_line_that_all_looks_have_in_common(written: Written) -> None:
    looks = [at(90, 5, 80, since=T0 - 99 * SECOND), at(2, 31, 41, 63), at(4, 29, 41, 63)]
    written.rank(0, looks, phase=Phase.OTHER)
    timed_out(written)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP802", (0,))
    assert finding.location == Location("/job/train.py", 41)
    assert finding.message == (
        "rank 0 was at train.py:41 for 6 s and never joined barrier, where rank 1 waited at "
        "train.py:7 until the timeout of 6 s"
    )


def test_a_launcher_that_took_the_exit_status_of_the_late_rank(written: Written) -> None:
    """What is known of its end is that torchrun stopped it. It is dated by its last change."""
    written.rank(0, [at(2, 41, 63)], phase=Phase.OTHER)
    timed_out(written)
    written.supervisor[-1] |= {"status": None}
    stderr = f"Sending process {os.getpid()} closing signal SIGTERM\n"
    (finding,) = written.findings(status=1, stderr=stderr)
    assert (finding.code, finding.ranks) == ("DDP802", (0,))


def test_a_loader_of_one_rank(written: Written) -> None:
    written.rank(0, [], phase=Phase.DATA, site="/job/train.py:12", since=T0 + SECOND)
    timed_out(written)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.location) == ("DDP802", Location("/job/train.py", 12))


@pytest.mark.parametrize("why", ["waits", "came late", "unseen", "lost", "other error"])
def test_ranks_of_which_that_is_not_known(written: Written, why: str) -> None:
    phase = Phase.WAIT if why == "waits" else Phase.OTHER
    since = T0 + (4 * SECOND if why == "came late" else 0)
    looks = [] if why == "unseen" else [at(2, 31, since=since)]
    fault: list[JsonObject] = [{"kind": "fault", "hook": "forward", "error": "X"}]
    written.rank(0, [*looks, *(fault if why == "lost" else [])], phase=phase, since=since)
    timed_out(written, "Connection closed by peer" if why == "other error" else GAVE_UP)
    assert [each.code for each in written.findings(status=1)] == ["DDP907"]

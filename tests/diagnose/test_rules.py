"""Rules on run directories written by the real writers: what no machine without a GPU can stage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

import ddpdoctor.diagnose.all_rules  # noqa: F401 (registers the rules)
from ddpdoctor.core.finding import Severity
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.names import FORMAT, rank_stem
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.status import Phase, StatusPage
from tests.support.written import MS, SECOND, T0, Written


def steps(own: int, wait: int, count: int, every: int) -> Iterable[JsonObject]:
    """``count`` steps of ``own`` + ``wait`` ms, of which every ``every``-th was split."""
    for number in range(count):
        split = number < 10 or number % every == 0
        parts = {"backward": own * MS, "wait": wait * MS}
        if not split:
            parts = {"backward": (own + wait) * MS, "wait": 0}
        yield {
            "kind": "step", "step": number, "start": T0, "total": (own + wait) * MS,
            "split": split, **parts,
        }  # fmt: skip


def error(exception: str, message: str, time: int, **more: object) -> JsonObject:
    return {
        "kind": "error", "time": time, "exception": exception, "message": message,
        "path": "/job/train.py", "line": 7, "traceback": "", **more,
    }  # fmt: skip


def test_a_straggler_on_gpus_is_found_in_the_steps_that_ddp_timed(written: Written) -> None:
    written.rank(0, steps(own=20, wait=30, count=1000, every=100))
    written.rank(1, steps(own=49, wait=1, count=1000, every=100))
    (finding,) = written.findings()
    assert (finding.code, finding.ranks) == ("DDP610", (1,))


@pytest.mark.parametrize(("own", "wait"), [(20, 30), (49, 1)])
def test_equal_ranks_are_no_stragglers(written: Written, own: int, wait: int) -> None:
    for rank in (0, 1):
        written.rank(rank, steps(own=own, wait=wait, count=1000, every=100))
    assert written.findings() == []


def test_a_slow_rank_that_nobody_waits_for_is_no_straggler(written: Written) -> None:
    written.rank(0, steps(own=20, wait=1, count=300, every=1))
    written.rank(1, steps(own=50, wait=1, count=300, every=1))
    assert written.findings() == []


WATCHDOG = (
    "[rank0]:[E1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9)\n",
    # That of torch 2.15.
    "[rank0]:[E1 ProcessGroupNCCL.cpp:871] [TC][rank=0][name=0] Aborting process on rank 0 due to "
    "timeout - timeout watchdog detected operation timeout\n",
    "[rank0]:[E1 ProcessGroupNCCL.cpp:871] [TC][rank=0][name=0] Aborting process on rank 0 due to "
    "error - nccl hit async error: remote process exited or there was a network error\n",
)


@pytest.mark.parametrize("said", WATCHDOG)
def test_nccls_watchdog_aborts_a_victim_not_the_cause(written: Written, said: str) -> None:
    """Rank 1 left after 4 steps; NCCL's watchdog ends rank 0 with SIGABRT ten minutes later."""
    written.rank(1, [{"kind": "end", "time": T0, "steps": 4, "armed": 4}], armed=4, steps=4)
    stuck = [{"kind": "site", "phase": "backward", "path": "/job/train.py", "line": 9}]
    written.rank(0, stuck, phase=Phase.BACKWARD, armed=5, steps=4)
    written.exit(1, 0, T0)
    written.exit(0, -6, T0 + 600 * SECOND)
    codes = [finding.code for finding in written.findings(status=1, stderr=said)]
    assert codes == ["DDP801"]


def test_who_is_interrupted_did_not_leave(written: Written) -> None:
    """Both ranks told of their interrupt, and the interpreter of rank 1 is nearly gone."""
    stop = {"kind": "signal", "time": T0, "signal": 2}
    written.supervisor.append(stop)
    ended = {"kind": "end", "time": T0 + SECOND, "steps": 4, "armed": 4}
    interrupt = error("KeyboardInterrupt", "", T0 + SECOND, phase="wait", armed=4)
    written.rank(0, [interrupt], armed=4, steps=4)
    written.rank(1, [{**interrupt, "phase": "other"}, ended], armed=4, steps=4)
    assert written.findings() == []


def test_who_ends_once_the_job_was_asked_to_did_not_leave(written: Written) -> None:
    written.supervisor.append({"kind": "signal", "time": T0, "signal": 15})
    ended = {"kind": "end", "time": T0 + SECOND, "steps": 4, "armed": 4}
    written.rank(0, [], phase=Phase.BACKWARD, armed=5, steps=4)
    written.rank(1, [ended], armed=4, steps=4)
    assert written.findings() == []


def test_a_hung_live_job_names_the_rank_that_left(written: Written) -> None:
    written.rank(1, [{"kind": "end", "time": T0, "steps": 4, "armed": 4}], armed=4, steps=4)
    written.rank(0, [], phase=Phase.BACKWARD, armed=5, steps=4)
    written.exit(1, 0, T0)
    (finding,) = written.findings()
    assert (finding.code, finding.ranks) == ("DDP801", (1,))


def test_a_rank_that_exits_with_a_status_did_not_leave_early(written: Written) -> None:
    """The supervisor has not yet seen the end of rank 1."""
    call = {"kind": "exit", "time": T0, "how": "sys.exit", "status": 4, "path": "/a.py", "line": 1}
    written.rank(1, [call, {"kind": "end", "time": T0, "steps": 4, "armed": 4}], armed=4, steps=4)
    written.rank(0, [], phase=Phase.BACKWARD, armed=5, steps=4)
    assert written.findings() == []


def test_a_failed_download_is_a_ranks_own_failure(written: Written) -> None:
    reset = error("ConnectionResetError", "[Errno 104] Connection reset by peer", T0)
    lost = error("RuntimeError", "Connection closed by peer [10.0.0.1]:99", T0 + SECOND)
    written.rank(0, [lost])
    written.rank(1, [reset])
    written.exit(0, 1, T0 + 2 * SECOND)
    written.exit(1, 1, T0 + SECOND)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.ranks) == ("DDP901", (1,))
    assert "10.0.0.1" not in " ".join([finding.message, *finding.evidence])


def test_a_victim_that_failed_first_in_time_is_not_the_cause(written: Written) -> None:
    late = "Timed out waiting 1800000ms for recv operation to complete"
    written.rank(0, [error("RuntimeError", late, T0)])
    written.rank(1, [error("ZeroDivisionError", "division by zero", T0 + SECOND)])
    written.exit(0, 1, T0 + SECOND)
    written.exit(1, 1, T0 + 2 * SECOND)
    (finding,) = written.findings(status=1)
    assert finding.ranks == (1,)


@pytest.mark.parametrize("leads_session", [False, True])
def test_a_failing_helper_program_is_no_failure_of_a_healthy_job(
    written: Written, leads_session: bool
) -> None:
    record = error("ModuleNotFoundError", "No module named 'flash_attn'", T0, rank=0, restart=0)
    (written.path / "process-7.jsonl").write_text(
        json.dumps({**record, "leads_session": leads_session}) + "\n"
    )
    # Live: only torchrun's own workers count, which lead their sessions.
    assert [each.code for each in written.findings()] == (["DDP901"] if leads_session else [])


def test_a_helper_says_nothing_about_a_job_that_succeeded(written: Written) -> None:
    record = error("ModuleNotFoundError", "no", T0, rank=0, restart=0, leads_session=True)
    (written.path / "process-7.jsonl").write_text(json.dumps(record) + "\n")
    assert written.findings(status=0) == []


def test_an_interrupted_job_has_no_cause(written: Written) -> None:
    written.supervisor.append({"kind": "signal", "time": T0, "signal": 2})
    written.rank(0, [error("KeyboardInterrupt", "", T0 + MS)])
    written.rank(1, [error("RuntimeError", "Connection closed by peer", T0 + 2 * MS)])
    assert written.findings(status=1) == []


def test_torchrun_ended_from_outside_is_no_lost_peer(written: Written) -> None:
    for rank in (0, 1):
        written.rank(rank, [], phase=Phase.BACKWARD, armed=5, steps=4)
        written.exit(rank, -15, T0)
    assert written.findings(status=1) == []


def test_abort_after_the_end_is_information(written: Written) -> None:
    end = {"kind": "end", "time": T0, "steps": 4, "armed": 4}
    for rank in (0, 1):
        written.rank(rank, [end], armed=4, steps=4)
    written.exit(0, 0, T0 + MS)
    written.exit(1, -6, T0 + MS)
    (finding,) = written.findings(status=1)
    assert (finding.code, finding.severity) == ("DDP906", Severity.INFO)


def data(share: float, count: int) -> Iterable[JsonObject]:
    """Steps of 100 ms that wait for data for ``share`` of it."""
    for number in range(count):
        wait = int(100 * share * MS)
        parts = {"data": wait, "backward": 100 * MS - wait, "split": True}
        yield {"kind": "step", "step": number, "start": T0, "total": 100 * MS, **parts}


def test_the_same_waits_for_data_are_one_finding_whichever_ranks_show_it(tmp_path: Path) -> None:
    identities = set()
    for attempt, shares in enumerate([(0.30, 0.30), (0.30, 0.25)]):
        (tmp_path / str(attempt)).mkdir()
        run = Written(tmp_path / str(attempt))
        for rank, share in enumerate(shares):
            run.rank(rank, data(share, 60))
        (finding,) = run.findings()
        identities.add(finding.identity)
    assert len(identities) == 1


def test_ranks_of_other_machines_are_not_watched_by_their_pids(written: Written) -> None:
    from ddpdoctor.supervise.rank_processes import RankWatch

    elsewhere = OpenRecord(format=FORMAT, rank=0, namespace="another machine")
    stem = written.path / rank_stem(0, 0)
    StatusPage(f"{stem}.status", rank=0, world_size=1, local_rank=0, restart=0, started=T0)
    journal = Journal(f"{stem}.jsonl", 1 << 20)
    journal.write([elsewhere])
    journal.close()
    (written.path / "run.json").write_text(json.dumps({"format": FORMAT}))
    watch = RankWatch()
    assert list(watch.follow(RunReader(written.path).snapshot())) == []
    assert watch.descriptors == []
    assert os.getpid() == RunReader(written.path).snapshot().ranks[0].status.pid  # type: ignore[union-attr]

"""What NCCL's RAS says of a job that hangs, by servers that speak as its versions do."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.diagnose.collectives.recorded_calls import ranks_behind, unanswered_ranks
from ddpdoctor.diagnose.hangs.diagnosis import ras_evidence
from ddpdoctor.nodes import hang_examination
from ddpdoctor.run.mapped import RequestWriter
from ddpdoctor.run.records.base import as_json, json_line
from ddpdoctor.run.records.process import OpenRecord
from ddpdoctor.run.records.supervisor import HangRecord, RankEvidence, Ras
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.supervise import nccl_ras
from ddpdoctor.supervise.hang_watch import HangWatch
from tests.conftest import LIMIT
from tests.support.hanging_ranks import call, findings, rank, stacks, status
from tests.support.ras_server import BY_OPERATION, JSON, NEWEST, TEXT, Communicator, running, text
from tests.support.starved import needs_linux
from tests.support.written import supervisor_records

VERSIONS = (TEXT, BY_OPERATION, JSON, NEWEST)

HEALTHY = Communicator({rank: {"AllReduce": 130} for rank in range(4)})
BEHIND = Communicator({rank: {"AllReduce": 129 if rank == 3 else 130} for rank in range(4)})
SILENT = Communicator({rank: {"AllReduce": 130} for rank in range(3)}, missing=(3,))
DEAD = Communicator({rank: {"AllReduce": 130} for rank in range(3)}, missing=(3,), dead=True)
FAILED = Communicator(HEALTHY.launched, errors={2: "Remote process error"})


def asked(kind: str, *communicators: Communicator) -> Ras:
    """What a job whose rank is such a process gets to hear."""
    with running(kind, *communicators) as (pid, _):
        found = nccl_ras.asked(job(pid))()
    assert found is not None
    return found


def job(pid: int, backend: str = "nccl") -> Run:
    page = status(0, Phase.OTHER)._replace(pid=pid)
    opened = OpenRecord(format=1, rank=0, backend=backend, world_size=4)
    return Run(Path("/data/run"), {}, (Rank(0, 0, page, opened=opened),))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_says_who_has_launched_less(version: str) -> None:
    found = asked(version, BEHIND)
    assert found.version.startswith(version)
    assert ranks_behind(found, 4, [2, 3], {0: 0, 1: 0}) == {3}
    # One that went on by a call is not behind of what the others wait in.
    assert ranks_behind(found, 4, [2, 3], {0: 1, 1: 1}) == frozenset()
    (line,) = ras_evidence(found, 4)
    kind = "collective" if version == TEXT else "AllReduce"
    assert line.startswith(f"by NCCL's RAS {kind} operations launched: rank 3 129, ")
    assert line.endswith(("3 ranks 130", "ranks 0, 1 and 2 130"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("communicator", [SILENT, DEAD])
def test_every_version_says_who_does_not_answer(version: str, communicator: Communicator) -> None:
    found = asked(version, communicator)
    assert unanswered_ranks(found, 4) == {3}
    (line, *more) = ras_evidence(found, 4)
    # NCCL 2.24 names the process apart from its rank.
    whole = (
        f"by NCCL's RAS rank 3 {'is dead or cut off' if communicator.dead else 'does not answer'}"
    )
    assert line.startswith("by NCCL's RAS rank 3 does not answer" if version == TEXT else whole)
    assert any("(process 103 on 10.0.0.2)" in each for each in (line, *more))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_says_which_rank_failed(version: str) -> None:
    assert ras_evidence(asked(version, FAILED), 4) == (
        "by NCCL's RAS rank 2 reported Remote process error",
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_where_all_is_well_that_is_said(version: str) -> None:
    assert ras_evidence(asked(version, HEALTHY, HEALTHY), 4) == (
        "by NCCL's RAS all ranks answer and have launched as many collectives",
    )


def test_a_rank_of_a_smaller_communicator_is_not_one_of_the_job() -> None:
    pair = Communicator({0: {"AllReduce": 7}, 1: {"AllReduce": 8}})
    found = asked(NEWEST, HEALTHY, pair)
    assert ranks_behind(found, 4, [0], {1: 0}) == frozenset()
    (line,) = ras_evidence(found, 4)
    assert line.endswith(
        "AllReduce operations launched: rank 0 7, rank 1 8, in a communicator of 2"
    )


def test_of_two_communicators_that_differ_none_is_known_to_be_the_group() -> None:
    found = asked(NEWEST, BEHIND, BEHIND)
    assert ranks_behind(found, 4, [3], {0: 0}) == frozenset()


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("endless", "larger than"),
        ("slow", "in time"),
        ("silent", "in time"),
        ("garbage", "not one of RAS"),
        ("closes", "not one of RAS"),
        ("stranger", "is not RAS"),
    ],
)
def test_a_hostile_server_costs_a_line(
    kind: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why == "in time":
        monkeypatch.setattr(nccl_ras, "RAS_TIMEOUT", 3.0)
    found = asked(kind)
    assert why in found.trouble and not found.communicators
    (line,) = ras_evidence(found, 4)
    assert line.startswith("NCCL's RAS gave no answer: ")


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    from ddpdoctor.render import console

    (finding,) = other_nodes(tmp_path, asked("control"))
    shown = console.render(finding, colour=False, width=100, written=0, kept=None)
    assert "\x1b" not in shown and "\x07" not in shown
    assert "reported" in shown


def test_another_job_that_answers_is_not_asked() -> None:
    with (
        running(NEWEST, BEHIND) as (_, port),
        running(NEWEST, BEHIND) as (other, _),
        pytest.raises(nccl_ras.RasError, match="another job"),
    ):
        nccl_ras.ask(("127.0.0.1", port), [other], 30.0, structured=True)


def test_without_nccl_and_where_nothing_listens_there_is_no_answer() -> None:
    with running(NEWEST, HEALTHY) as (pid, _):
        assert nccl_ras.asked(job(pid, "gloo"))() is None
        with pytest.raises(nccl_ras.RasError, match=r"^$"):
            nccl_ras.ask(("127.0.0.1", 1), [pid], 5.0, structured=True)
    assert nccl_ras.address({}) == ("localhost", 28028)
    assert nccl_ras.address({"NCCL_RAS_ADDR": "[::1]:9000"}) == ("::1", 9000)
    assert nccl_ras.address({"NCCL_RAS_ADDR": "nonsense"}) is None
    assert nccl_ras.address({"NCCL_RAS_ENABLE": "0"}) is None


def test_texts_of_any_kind_do_no_harm() -> None:
    whole = text(BY_OPERATION, [BEHIND, SILENT, FAILED])
    for cut in range(0, len(whole), 37):
        for odd in (whole[:cut], whole[:cut] + "9" * 5000 + whole[cut:]):
            if odd.startswith("NCCL version "):
                json_line(as_json(nccl_ras.from_text(odd)))
    for odd in ("{}", '{"communicators": [{"ranks": [{"rank": 1e400}], "size": "x"}, 3]}', "[]"):
        try:
            nccl_ras.from_json(odd)
        except ValueError:
            assert odd == "[]"


# -- findings


def other_nodes(path: Path, said: Ras | None, ahead: int = 0) -> list[Finding]:
    """What is said where ranks 0 and 1 of four, on this node, wait in the 130th collective."""
    calls = [call(129, True), *(call(130 + more, False) for more in range(ahead + 1))]
    ranks: list[dict[str, Any]] = [
        rank(number, "wait", flight=calls, stacks=stacks(number, ("/job/train.py", 61, "main")))
        for number in range(2)
    ]
    return findings(path, *ranks, ras=said and json.loads(json_line(as_json(said))))


def test_the_rank_of_another_node_that_is_late_is_named(tmp_path: Path) -> None:
    (finding,) = other_nodes(tmp_path, asked(BY_OPERATION, BEHIND))
    assert (finding.code, finding.ranks) == ("DDP802", (3,))
    assert finding.message == (
        "all ranks of this node wait in all_reduce #130 (64 floats, default group); rank 3 of "
        "other nodes did not join it: NCCL's RAS counts fewer collectives there"
    )
    assert any("rank 3 129, 3 ranks 130" in each for each in finding.evidence)


def test_who_may_have_joined_it_is_not_accused(tmp_path: Path) -> None:
    for said, ahead in ((asked(BY_OPERATION, BEHIND), 1), (None, 0)):
        (finding,) = other_nodes(tmp_path, said, ahead)
        assert finding.ranks == (2, 3)
        assert finding.message.endswith("did not join it, or cannot be reached")


def test_the_rank_of_another_node_that_does_not_answer_is_named(tmp_path: Path) -> None:
    (finding,) = other_nodes(tmp_path, asked(JSON, SILENT))
    assert finding.ranks == (3,)
    assert finding.message.endswith("rank 3 of other nodes does not answer NCCL's RAS")


@needs_linux
def test_an_examination_has_the_answer_in_its_record_and_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_examination, "examine", lambda *_: [RankEvidence(rank=0)])
    records: list[Any] = []
    with running(BY_OPERATION, BEHIND) as (pid, _):
        watch = HangWatch(
            tmp_path,
            RequestWriter(str(tmp_path)),
            0.1,
            records.append,
            lambda _: None,
            lambda: None,
        )
        deadline = time.monotonic() + LIMIT
        while not watch.look(replace(job(pid), path=tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        watch.close()
    (line,) = (json_line(as_json(each)) for each in records if each.kind == "hang")
    supervisor = supervisor_records(json.loads(line))
    for hang in (supervisor.of(HangRecord)[0], Run(tmp_path, {}, (), supervisor=supervisor).hang):
        assert hang is not None and ranks_behind(hang.ras, 4, [3], {0: 0, 1: 0}) == {3}

"""Ranks that look closely because the supervisor suspects something: the file, both its ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ddpdoctor.core.finding import RULES, examine
from ddpdoctor.diagnose.replicas.differences import elements
from ddpdoctor.probe.observers import fingerprints, overhead
from ddpdoctor.probe.observers.ddp_modules import Replicas
from ddpdoctor.probe.observers.fingerprints import Fingerprints
from ddpdoctor.probe.observers.readback import Elements
from ddpdoctor.probe.runtime import torch_groups
from ddpdoctor.run.mapped import (
    SUSPICION,
    Suspicion,
    SuspicionReader,
    SuspicionWriter,
    UnreadableError,
)
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject, Record
from ddpdoctor.run.records.supervisor import JobRecord, SuspicionRecord
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.supervise import slow_ranks
from ddpdoctor.supervise.slow_ranks import Suspicions
from tests.conftest import JOBS, Doctor
from tests.support.marks import sick
from tests.support.probed import Purse, a_rank
from tests.support.written import rank_records

FIRST = Suspicion(restart=0, step=5, steps=3, module=0, tensors=(0, 1))


# -- the file


def test_a_suspicion_is_news_once(tmp_path: Path) -> None:
    path = str(tmp_path / SUSPICION)
    writer = SuspicionWriter(path)
    reader, late = SuspicionReader(path), SuspicionReader(path)
    assert reader.news() is None
    writer.write(FIRST)
    assert reader.news() == FIRST
    assert reader.news() is None
    second = FIRST._replace(step=9, tensors=())
    writer.write(second)
    assert reader.news() == late.news() == second


def test_a_suspicion_half_written_is_no_news(tmp_path: Path) -> None:
    path = tmp_path / SUSPICION
    writer = SuspicionWriter(str(path))
    reader = SuspicionReader(str(path))
    writer.write(FIRST)
    page = path.read_bytes()
    with path.open("r+b") as file:
        file.write(page[:64] + (3).to_bytes(8, "little") + page[72:])
    assert reader.news() is None
    with path.open("r+b") as file:
        file.write(page[:64] + (4).to_bytes(8, "little") + page[72:])
    assert reader.news() == FIRST


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / SUSPICION
    SuspicionWriter(str(path))
    page = path.read_bytes()
    for damaged in (b"", page[:100], b"x" + page[1:], page[:8] + bytes([FORMAT + 1]) + page[9:]):
        path.write_bytes(damaged)
        with pytest.raises(UnreadableError):
            SuspicionReader(str(path))


# -- the rank's end


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DDPDOCTOR_RUN_DIR", str(tmp_path))
    monkeypatch.setattr(torch_groups, "group_ranks", lambda ddp: [0, 1])
    return tmp_path


def steps(
    purse: Purse, *told: tuple[int, SuspicionWriter, Suspicion], count: int = 12
) -> list[JsonObject]:
    """What a rank writes that looks at step 0 and then no more, unless it is told to."""
    records: list[JsonObject] = []
    state = a_rank(records, purse)
    tracker: Any = state.tracker
    ddp = torch.nn.Module()
    ddp.module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(ddp.module.parameters(), lr=0.1)
    replicas = Replicas(state)
    mine = Fingerprints(state, replicas)
    replicas.ddp_built(ddp)
    mine.ddp_built(ddp)
    for step in range(count):
        mine.pace.interval = 1 << 10
        for when, writer, suspicion in told:
            if when == step:
                writer.write(suspicion)
        optimizer.step()
        tracker.steps = tracker.armed = step + 1
        mine.step_ended(optimizer, step)
    return records


def looked_at(records: list[JsonObject]) -> list[int]:
    return [each["step"] for each in records if each["kind"] == "fingerprint"]


def test_a_rank_looks_where_it_is_told_to(directory: Path) -> None:
    writer = SuspicionWriter(str(directory / SUSPICION))
    records = steps(Purse(10**12), (3, writer, FIRST))
    assert looked_at(records) == [0, 5, 6, 7]
    assert all("detail" in each for each in records if each["kind"] == "fingerprint")
    (told,) = (each for each in records if each["kind"] == "elements")
    assert (told["step"], told["armed"], told["module"]) == (5, 6, 0)
    assert [each[:3] for each in told["tensors"]] == [[0, 6, "f"], [1, 2, "f"]]


def test_a_suspicion_brings_its_own_credit_twice(directory: Path) -> None:
    writer = SuspicionWriter(str(directory / SUSPICION))
    purse = Purse(-10)
    told = [(when, writer, Suspicion(0, when + 1, 1, 0, ())) for when in (1, 3, 5)]
    assert looked_at(steps(purse, *told)) == [2, 4]
    assert 0 < purse.granted <= 2 * overhead.MAX_GRANTED


@pytest.mark.parametrize(
    "other",
    [FIRST._replace(restart=1), FIRST._replace(step=2), FIRST._replace(module=7, steps=0)],
    ids=["another attempt", "too late", "no module"],
)
def test_what_is_not_for_this_rank_is_passed_over(directory: Path, other: Suspicion) -> None:
    writer = SuspicionWriter(str(directory / SUSPICION))
    records = steps(Purse(10**12), (3, writer, other))
    assert looked_at(records) == [0]
    assert not any(each["kind"] == "elements" for each in records)


@pytest.mark.parametrize(
    ("dtype", "letter"),
    [(torch.float32, "f"), (torch.bfloat16, "f"), (torch.float64, "d"), (torch.int64, "d"),
     (torch.complex64, "f")],
)  # fmt: skip
def test_elements_are_read_as_written(dtype: torch.dtype, letter: str) -> None:
    packed = Elements(torch.arange(10).to(dtype), most=5).packed()
    assert packed[:2] == (20 if dtype.is_complex else 10, letter)
    expected = [0.0, 2.0, 4.0, 6.0, 8.0]
    if dtype.is_complex:
        expected = [part for each in expected for part in (each, 0.0)]
    assert list(elements(packed)) == expected


def test_a_tensor_that_is_not_contiguous_is_read_in_its_order() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert list(elements(Elements(tensor).packed())) == tensor.reshape(-1).tolist()


# -- the supervisor's end


def printed(step: int, value: str, *hashes: int) -> JsonObject:
    record: JsonObject = {
        "kind": "fingerprint", "module": 0, "step": step, "armed": step + 1, "parameters": value,
    }  # fmt: skip
    if hashes:
        detail = fingerprints.packed((each << 32 for each in hashes), [0.0] * len(hashes))
        record["detail"] = detail
    return record


class Watched:
    """A supervisor that looks at records as they come."""

    def __init__(self, directory: Path, hook: str = "", group: tuple[int, ...] = (0, 1)) -> None:
        self.written: list[Record] = []
        self.suspicions = Suspicions(
            SuspicionWriter(str(directory / SUSPICION)), self.written.append
        )
        self.reader = SuspicionReader(str(directory / SUSPICION))
        self.path = directory
        told = {"kind": "tensors", "module": 0, "group": list(group), "hook": hook}
        self.records: list[list[JsonObject]] = [[told], [told]]
        self.restart = 0

    def look(self, *more: list[JsonObject]) -> bool:
        for mine, new in zip(self.records, more, strict=False):
            mine += new
        ranks = [
            Rank(rank, self.restart, None, records=rank_records(*each))
            for rank, each in enumerate(self.records)
        ]
        return self.suspicions.look(Run(self.path, {}, tuple(ranks)))


def test_ranks_are_asked_as_soon_as_it_is_known_what_for(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert not watched.look([printed(0, "a")], [printed(0, "a")])
    watched.look([printed(1, "a"), printed(2, "b")], [printed(1, "a")])
    assert watched.reader.news() is None
    watched.look([], [printed(2, "c")])
    first = watched.reader.news()
    assert first is not None
    assert (first.module, first.tensors, first.steps) == (0, (), slow_ranks.EXAMINED_STEPS)
    watched.look([printed(3, "b")], [printed(3, "c")])
    assert watched.reader.news() is None
    watched.look([printed(4, "b", 1, 2, 3)], [printed(4, "c", 1, 7, 9)])
    second = watched.reader.news()
    assert second is not None
    assert second.tensors == (1, 2)
    watched.look([printed(5, "b", 1, 2, 3)], [printed(5, "c", 6, 7, 9)])
    assert watched.reader.news() is None
    assert [each.tensors for each in watched.written if isinstance(each, SuspicionRecord)] == [
        (),
        (1, 2),
    ]
    told = {"kind": "elements", "module": 0, "step": 9}
    assert not watched.look([told])
    assert watched.look([], [told])
    assert not watched.look()


def test_ranks_that_do_not_answer_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_ranks, "FINGERPRINT_PATIENCE", 0)
    watched = Watched(tmp_path)
    assert watched.look([printed(0, "a", 1)], [printed(0, "b", 2)])
    assert not watched.look()


@pytest.mark.parametrize(
    ("hook", "group"), [("post_localSGD_hook", (0, 1)), ("", (0, 2))], ids=["averaged", "apart"]
)
def test_ranks_that_may_differ_are_not_asked(
    tmp_path: Path, hook: str, group: tuple[int, ...]
) -> None:
    watched = Watched(tmp_path, hook, group)
    assert not watched.look([printed(0, "a")], [printed(0, "b")])
    assert watched.reader.news() is None


def test_after_other_numbers_of_forwards_nothing_is_compared(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.look([printed(0, "a")], [{**printed(0, "b"), "armed": 7}])
    assert watched.reader.news() is None


def test_another_attempt_is_examined_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.look([printed(0, "a", 1)], [printed(0, "b", 2)])
    assert watched.reader.news() is not None
    watched.restart = 1
    watched.look()
    again = watched.reader.news()
    assert again is not None
    assert again.restart == 1


# -- both


@pytest.mark.slow
def test_ranks_of_a_live_job_tell_how_far_they_are_apart(doctor: Doctor) -> None:
    result = doctor.run("--nproc-per-node", "2", "--", str(JOBS / "diverges.py"))
    result.check_success()
    (finding,) = examine(result.run, [RULES["DDP701"]])
    evidence = "\n".join(finding.evidence)
    assert "1.bias: max difference 0.25 after step" in evidence
    assert "of all 4 elements" in evidence
    (job,) = result.run.supervisor.of(JobRecord)
    asked = result.run.supervisor.of(SuspicionRecord)
    assert 1 <= len(asked) <= 2
    assert all(each.time < job.time for each in asked)
    for rank in result.run.ranks:
        assert rank.ended is not None
        assert 0 < rank.ended.spent < rank.ended.over


@pytest.mark.slow
def test_without_a_budget_no_fingerprint_is_taken(doctor: Doctor) -> None:
    job = str(sick("ddp701_gradient_noise"))
    result = doctor.run("--nproc-per-node", "2", "--overhead-budget", "0", "--", job)
    result.check_success()
    kinds = {record.kind for rank in result.run.ranks for record in rank.records}
    assert kinds.isdisjoint({"fingerprint", "tensors", "elements", "buffers", "pass"})
    for rank in result.run.ranks:
        assert rank.ended is not None
        assert rank.ended.spent == 0

"""No rule takes what was not recorded for what did not happen."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ddpdoctor.core.finding import RULES, examine
from ddpdoctor.core.user_code import Location
from ddpdoctor.probe.observers import loaders, samples
from ddpdoctor.probe.observers.samples import Fed, Samples
from ddpdoctor.probe.runtime.sites import Site
from ddpdoctor.run.reader import MemoryBudget, RunReader
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.records.model import LoadRecord
from ddpdoctor.run.records.training import SaveRecord
from ddpdoctor.run.snapshot import Run
from tests.conftest import JOBS, Doctor
from tests.support.left_out import left_out
from tests.support.marks import HEALTHY, SICK, head, healed, judged, needed_gpus, options, read
from tests.support.probed import Purse, a_rank
from tests.support.replicas import prints
from tests.support.written import Written

SPENT = str(JOBS / "spent.py")
SAMPLE = {"data_cut_by_zip"}
"""Jobs that are run every time; the others are slow."""

FAMILIES = ("ddp1", "ddp3", "ddp402", "ddp403", "ddp5", "ddp6", "ddp7")
"""Rules that judge by what ranks wrote while they trained."""

TWINS = [healed(path) for path in SICK if path.stem.startswith(FAMILIES)]
QUIET = [path for path in (*HEALTHY, *TWINS) if not needed_gpus(path)]
CASES = [
    pytest.param(place, path, id=path.stem, marks=() if path.stem in SAMPLE else pytest.mark.slow)
    for place, path in enumerate(QUIET)
]


def codes(run: Run) -> set[str]:
    return {each.code for each in examine(run, RULES.values())}


@pytest.mark.slow
@pytest.mark.parametrize(("place", "path"), CASES)
def test_a_budget_that_is_spent_in_the_middle(doctor: Doctor, place: int, path: Path) -> None:
    step, ranks = (20, 4, 9, 1, 33)[place % 5], ("0,1", "0", "1")[place % 3]
    report = doctor.directory / "findings.json"
    report.touch()
    words = ["--json", str(report), "--quiet", *options(path)]
    words += ["--nproc-per-node", str(head(path, "ranks", 2)), "--", SPENT, str(step), ranks]
    result = doctor.run(*words, str(path), timeout=900)
    result.check_success()
    assert judged("healthy", path, read(report)).as_wanted, read(report)
    # Read later, as `ddpdoctor report` does.
    assert all(each.severity.name == "INFO" for each in examine(result.run, RULES.values()))


@pytest.mark.parametrize(("place", "path"), CASES)
def test_records_that_are_left_out(doctor: Doctor, place: int, path: Path) -> None:
    ranks = str(head(path, "ranks", 2))
    words = ["--quiet", *options(path), "--nproc-per-node", ranks, "--"]
    result = doctor.run(*words, str(path), timeout=900)
    result.check_success()
    known: dict[int, set[str]] = {}
    # Where it is run every time, a third of the ways in which records are left out will do.
    ways = islice(left_out(result.run), None, None, 3 if path.stem in SAMPLE else 1)
    for what, run, whole in ways:
        if id(whole) not in known:
            known[id(whole)] = codes(whole)
        assert codes(run) <= known[id(whole)], what


def test_what_ranks_have_lost(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    written.rank(0, [{"kind": "fault", "hook": "samples", "error": "ValueError"}])
    written.rank(1, [])
    written.rank(2, prints("a" * 200))
    written.findings()
    assert [rank.lost for rank in RunReader(written.path).snapshot().ranks] == [True, False, False]
    monkeypatch.setattr("ddpdoctor.run.reader.MemoryBudget", lambda: MemoryBudget(50_000))
    assert [rank.lost for rank in RunReader(written.path).snapshot().ranks] == [True, False, True]


def test_a_kind_of_which_there_were_too_many(
    written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[JsonObject] = []
    state = a_rank(lines)
    monkeypatch.setattr("time.time_ns", lambda: 7)
    for number in range(4):
        record = SaveRecord(time=number, file=f"/{number}", content="data")
        assert state.add(record, 2, once=number % 3) is (number < 2)
    assert [each["kind"] for each in lines] == ["save", "save", "limit"]
    written.rank(0, lines)
    written.findings()
    (rank,) = RunReader(written.path).snapshot().ranks
    assert not rank.watched(SaveRecord) and rank.watched(SaveRecord, until=6)
    assert rank.watched(LoadRecord) and not rank.lost


def test_a_sampler_is_in_use_though_its_pass_is_not_recorded() -> None:
    data = TensorDataset(torch.arange(8))
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(data, 2, 0)
    loaders.built_samplers.add(sampler, Site("/job/train.py", 3))
    iterator = iter(DataLoader(data, sampler=sampler))
    assert loaders.idle_samplers(data) == (Location("/job/train.py", 3),)
    Samples(a_rank([], Purse(-1))).indices_drawn(0, iterator)
    assert loaders.idle_samplers(data) == ()


def test_of_a_first_pass_content_is_hashed_after_the_budget_is_spent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    lines: list[JsonObject] = []
    purse = Purse(10**9)
    counts = dict.fromkeys(("armed", "collectives", "reductions", "gathers"), 0)
    seen = Samples(a_rank(lines, purse, **counts))
    data = TensorDataset(torch.arange(240))
    iterator: Any = iter(DataLoader(data, batch_size=4))
    followed: set[bool] = set()
    for number, batch in enumerate(iterator._sampler_iter):
        if number == 2:
            purse.held = samples.CONTENT_RESERVE_NS - 1
        elif number == 20:
            purse.held = 0
        seen.indices_drawn(batch, iterator)
        seen.batch_fetched(iterator, data[batch])
        followed.add(iterator._ddpdoctor_pass[1] is not None)
    assert followed == {True, False}, "until nothing is left for the next pass"
    first, last = lines
    assert first["state"] == last["state"] == "unfollowed"
    assert first["draws"] == last["draws"] == 12
    assert len(last["rows"]) > len(first["rows"]) > 0


@pytest.mark.parametrize(("left", "batches"), [(10**9, 3), (0, 0)])
def test_batches_without_a_loader_are_hashed_until_the_budget_ends(left: int, batches: int) -> None:
    lines: list[JsonObject] = []
    purse = Purse(left)
    fed = Fed(a_rank(lines, purse))
    for number in range(3):
        fed.inputs_given((torch.arange(8.0).view(4, 2) + number,))
    purse.held = 0
    fed.inputs_given((torch.zeros(4, 2),))
    fed.rank_ends()
    assert [len(each["batches"]) for each in lines] == [batches] * bool(batches)
    assert all(len(set(batch)) == 4 for each in lines for batch in each["batches"])

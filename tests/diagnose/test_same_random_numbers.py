"""DDP601: the same random numbers on all ranks, or in all workers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.data.seeds import seeds_of
from ddpdoctor.probe.observers import random_numbers
from ddpdoctor.run.journal import Journal
from ddpdoctor.run.reader import RunReader
from ddpdoctor.run.records.training import GeneratorState, RandomRecord, SiteRecord, StepRecord
from ddpdoctor.run.ring import RingWriter
from tests.support.probed import Purse, a_rank
from tests.support.written import Written

PLACES = ("forward", "backward", "batch")


def record(rank: int, draws: dict[str, int], *, seed: int = 0, **facts: Any) -> RandomRecord:
    """What a rank writes of six steps that draw so many numbers before each place."""
    at, states = 0, []
    for _ in range(6):
        for place in PLACES:
            at += draws.get(place, 0)
            states.append(GeneratorState("torch", place, seed + at // 624, at % 624))
    return RandomRecord(time=1, rank=rank, states=tuple(states), **facts)


def job(written: Written, source: str) -> list[SiteRecord]:
    """The site of the forward in a script."""
    path = written.path / "train.py"
    path.write_text(source)
    line = next(i for i, text in enumerate(source.splitlines(), 1) if "model(" in text)
    return [SiteRecord(phase="forward", path=str(path), line=line)]


LOOP = """import torch
torch.manual_seed(7)
for step in range(100):
    noise = torch.randn(64, 64)
    model(noise)
"""


@pytest.mark.parametrize(
    ("draws", "severity"),
    [
        ({"forward": 2000}, Severity.WARNING),
        ({"backward": 2000}, Severity.WARNING),
        ({"batch": 2000}, Severity.WARNING),
        ({"batch": 30}, Severity.INFO),
        ({"forward": 30}, None),
        ({}, None),
    ],
)
def test_ranks_that_draw_from_one_state(
    written: Written, draws: dict[str, int], severity: Severity | None
) -> None:
    sites = job(written, LOOP)
    for rank in range(2):
        written.rank(rank, [*sites, record(rank, draws)])
    found = written.findings()
    assert [each.severity for each in found] == ([severity] if severity else [])
    if severity:
        assert (found[0].code, found[0].ranks) == ("DDP601", (0, 1))
        assert str(found[0].location) == f"{written.path}/train.py:2"


@pytest.mark.parametrize(
    "other",
    [
        record(1, {"forward": 2000}, seed=99),
        replace(record(1, {"forward": 2000}), states=()),
        record(1, {"forward": 1000, "batch": 1000}),
    ],
)
def test_ranks_in_other_states(written: Written, other: RandomRecord) -> None:
    written.rank(0, [record(0, {"forward": 2000})])
    written.rank(1, [other])
    assert written.findings() == []


def test_a_rank_that_wrote_nothing_is_no_witness(written: Written) -> None:
    written.rank(0, [record(0, {"forward": 2000})])
    written.rank(1, [])
    assert written.findings() == []


@pytest.mark.parametrize(("drops", "name"), [(True, "noise"), (False, "dropout")])
def test_dropout(written: Written, drops: bool, name: str) -> None:
    sites = job(written, LOOP.replace("noise", name))
    for rank in range(2):
        written.rank(rank, [*sites, record(rank, {"backward": 2000}, drops=drops)])
    assert written.findings() == []


WORKERS = """import numpy as np
from torch.utils.data import DataLoader
def fresh(worker_id):
    np.random.seed(42)
loader = DataLoader(data, num_workers=2, worker_init_fn=fresh)
for batch in loader:
    model(batch)
"""


def worker(rank: int, number: int, seed: int, draws: int) -> RandomRecord:
    states = tuple(
        GeneratorState("numpy", place, seed, draws * index)
        for index, place in enumerate(["begin", *["batch"] * 3])
    )
    return RandomRecord(time=1, rank=rank, worker=number, dataset="Rows", states=states)


def put(written: Written, records: Iterable[RandomRecord]) -> None:
    for number, each in enumerate(records):
        journal = Journal(str(written.path / f"process-worker-{number}.jsonl"), 1 << 20)
        journal.write([each])
        journal.close()


@pytest.mark.parametrize(
    ("seeds", "draws", "severity"),
    [
        ((1, 1, 1, 1), 9, Severity.WARNING),
        ((1, 2, 1, 2), 9, Severity.INFO),
        ((1, 2, 3, 4), 9, None),
        ((1, 1, 3, 3), 9, None),
        ((1, 1, 1, 1), 0, None),
    ],
)
def test_workers(
    written: Written, seeds: tuple[int, ...], draws: int, severity: Severity | None
) -> None:
    sites = job(written, WORKERS)
    for rank in range(2):
        written.rank(rank, sites)
    put(written, (worker(i // 2, i % 2, seed, draws) for i, seed in enumerate(seeds)))
    found = written.findings()
    assert [each.severity for each in found] == ([severity] if severity else [])
    if severity:
        assert str(found[0].location) == f"{written.path}/train.py:4"


def test_workers_of_one_rank_show_nothing(written: Written) -> None:
    for rank in range(2):
        written.rank(rank, [])
    put(written, [worker(0, 0, 1, 9), worker(0, 1, 1, 9)])
    assert written.findings() == []


def with_losses(written: Written, source: str, losses: list[float], other: list[float]) -> None:
    sites = job(written, source)
    for rank, values in enumerate((losses, other)):
        RingWriter(f"{written.path}/rank-{rank:04d}.r0.collectives")
        steps = [StepRecord(step=i, loss=each, total=9) for i, each in enumerate(values)]
        written.rank(rank, [*sites, *steps])


ZIGZAG = [1.0 / (i + 1) + 0.1 * (i % 3) for i in range(40)]
OWN = LOOP.replace("torch.manual_seed(7)", "rng = np.random.default_rng(3)").replace(
    "torch.randn", "rng.normal"
)
INDEXED = "for step in range(100):\n    model(x[step])\n"


@pytest.mark.parametrize(
    ("source", "losses", "other", "code"),
    [
        (OWN, ZIGZAG, ZIGZAG, "DDP601"),
        (INDEXED, ZIGZAG, ZIGZAG, "DDP102"),
        (OWN, ZIGZAG, [*ZIGZAG[:-1], 0.5], ""),
        (OWN, ZIGZAG[:10], ZIGZAG[:10], ""),
        # The batch is always the same, as in a benchmark.
        (OWN, sorted(ZIGZAG, reverse=True), sorted(ZIGZAG, reverse=True), ""),
        (OWN, [1.0] * 40, [1.0] * 40, ""),
    ],
)
def test_losses(
    written: Written, source: str, losses: list[float], other: list[float], code: str
) -> None:
    with_losses(written, source, losses, other)
    found = written.findings()
    assert [(each.code, each.severity) for each in found] == (
        [(code, Severity.WARNING)] if code else []
    )
    if code:
        line = 2 if code == "DDP601" else 1
        assert str(found[0].location) == f"{written.path}/train.py:{line}"


def test_losses_that_may_be_reduced(written: Written) -> None:
    with_losses(written, OWN, ZIGZAG, ZIGZAG)
    (written.path / "rank-0001.r0.collectives").unlink()
    assert written.findings() == []


@pytest.mark.parametrize(
    ("call", "alike"),
    [
        ("np.random.seed(42)", True),
        ("set_seed(args.seed)", True),
        ("seed_everything(1)", True),
        ("np.random.default_rng(seed)", True),
        ("torch.manual_seed(seed + rank)", False),
        ("torch.manual_seed(mine)", False),
        ("np.random.seed(torch.initial_seed() % 2**32)", False),
        ("np.random.default_rng()", False),
        ("random.seed(time.time())", False),
    ],
)
def test_which_lines_seed_alike(written: Written, call: str, alike: bool) -> None:
    source = f"mine = 3 + dist.get_rank()\nseed = 3\n{call}\nmodel(x)\n"
    written.rank(0, job(written, source))
    written.findings()
    found = seeds_of(RunReader(written.path).snapshot())
    assert [each.location.line for each in found] == ([3] if alike else [])


@pytest.mark.parametrize(
    ("before", "lines"),
    [
        ("args.local = dist.get_rank()", [2]),
        ("args.device, args.local = device, dist.get_rank()", [2]),
        ("args.seed += dist.get_rank()", []),
        ("args.seed, args.local = 3 + dist.get_rank(), 0", []),
        ("args = parse(dist.get_rank())", []),
    ],
)
def test_other_attributes_of_the_options_do_not_matter(
    written: Written, before: str, lines: list[int]
) -> None:
    written.rank(0, job(written, f"{before}\ntorch.manual_seed(args.seed)\nmodel(x)\n"))
    written.findings()
    found = seeds_of(RunReader(written.path).snapshot())
    assert [each.location.line for each in found] == lines


@pytest.mark.parametrize(("passed", "lines"), [("3", [2, 3]), ("3 + dist.get_rank()", [])])
def test_a_seed_that_is_passed(written: Written, passed: str, lines: list[int]) -> None:
    source = f"def prepare(seed):\n    torch.manual_seed(seed)\nseed_all({passed})\n"
    written.rank(0, job(written, f"{source}prepare({passed})\nmodel(x)\n"))
    written.findings()
    found = seeds_of(RunReader(written.path).snapshot())
    assert [each.location.line for each in found] == lines
    assert [each.passed for each in found] == [True, False][: len(lines)]


class Model:
    def modules(self) -> list[object]:
        return []


def test_nothing_is_drawn_and_the_budget_may_end_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import random

    import torch

    lines: list[Any] = []
    before = torch.default_generator.get_state(), random.getstate()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3, raising=False)
    observer = random_numbers.RandomNumbers(a_rank(lines, Purse(1)))
    monkeypatch.setattr(observer, "rest", lambda *_: None)
    for _ in range(random_numbers.LAST_FORWARD):
        observer.batch_fetched(None, None)
        observer.forward_begins(Model(), True)
        observer.backward_begins()
    assert torch.equal(before[0], torch.default_generator.get_state())
    assert before[1] == random.getstate()
    (line,) = lines
    assert (line["kind"], line["rank"]) == ("random", 3)
    observer = random_numbers.RandomNumbers(a_rank(lines, purse := Purse(1)))
    monkeypatch.setattr(observer, "rest", lambda *_: None)
    for _ in range(random_numbers.FIRST_FORWARD):
        observer.forward_begins(Model(), True)
        observer.backward_begins()
    purse.held = 0
    observer.forward_begins(Model(), True)
    observer.rank_ends()
    assert len(lines) == 1

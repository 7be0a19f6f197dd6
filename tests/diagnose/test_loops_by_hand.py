"""Ranks that come out of a loop without a loader before the others (DDP109, DDP403)."""

from __future__ import annotations

import pytest

from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.training import LoopRecord
from ddpdoctor.run.ring import RingWriter
from ddpdoctor.run.status import Phase
from tests.support.written import SECOND, T0, Written

PLAIN = """\
def train(files):
    for file in files:
        loss = model(file)
        if False: pass
        loss.backward()
    dist.all_reduce(loss)
"""
BREAK = PLAIN.replace("if False: pass", "if loss < best: break")
SKIP = PLAIN.replace("if False: pass", "if loss.isnan(): continue")
BOTH = BREAK.replace("loss = model(file)", "loss = model(file) if file else skip()").replace(
    "loss.backward()", "\n        if loss > 9:\n            continue\n        loss.backward()"
)


class Hang:
    """Rank 0 waits in a backward of the loop, and rank 1 in a collective."""

    def __init__(self, written: Written, text: str) -> None:
        self.written = written
        self.path = f"{written.path}/train.py"
        lines = text.splitlines()
        (written.path / "train.py").write_text(text)
        self.backward = next(i for i, line in enumerate(lines, 1) if "backward" in line)
        self.behind = len(lines)

    def found(
        self, *, reduced: int = 12, at: int = 0, ended: bool = False, phase: Phase = Phase.BACKWARD,
        loops: bool = False, partial: bool = False,
    ) -> list[tuple[str, tuple[int, ...], int]]:  # fmt: skip
        records = [{"kind": "site", "phase": "backward", "path": self.path, "line": self.backward}]
        more = [LoopRecord(time=T0, loop=0, state="trains")] if loops else []
        self.written.rank(0, [*records, *more], phase=phase, reduced=13, armed=13, steps=12)
        self.written.rank(
            1, records, phase=Phase.WAIT, reduced=reduced, armed=reduced, steps=12,
            collective="all_reduce", site=f"{self.path}:{at or self.behind}",
        )  # fmt: skip
        ring = RingWriter(f"{self.written.path}/{rank_stem(1, 0)}.collectives")
        site = f"{self.path}:{at or self.behind}"
        texts = tuple(map(ring.text, ("all_reduce", "0|0-1", "float32", "SUM", site)))
        order = ring.begin(T0 + SECOND, 1, texts, (1,), 1, -1, 0)  # type: ignore[arg-type]
        if ended:
            ring.end(order, T0 + 2 * SECOND)
        if partial:
            ring.set_partial()
        self.findings = self.written.findings()
        return [
            (each.code, each.ranks, each.location.line if each.location else 0)
            for each in self.findings
        ]


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [(PLAIN, "DDP109", 2), (BREAK, "DDP403", 4), (SKIP, "DDP403", 4), (BOTH, "DDP403", 2)],
)
def test_why_a_rank_is_behind_the_loop(written: Written, text: str, code: str, line: int) -> None:
    assert Hang(written, text).found() == [(code, (1,), line)]


def called(hang: Hang, line: int) -> None:
    """Rank 0 called a collective at a line, after its last step began."""
    ring = RingWriter(f"{hang.written.path}/{rank_stem(0, 0)}.collectives")
    texts = ("all_reduce", "0|0-1", "float32", "SUM", f"{hang.path}:{line}")
    ring.end(ring.begin(T0, 1, tuple(map(ring.text, texts)), (1,), 1, -1, 0), T0)  # type: ignore[arg-type]


@pytest.mark.parametrize("inside", [False, True])
def test_join_does_not_make_up_for_the_jobs_own_collectives(written: Written, inside: bool) -> None:
    hang = Hang(written, PLAIN)
    if inside:
        called(hang, 4)
    assert hang.found() == [("DDP109", (1,), 2)]
    (finding,) = hang.findings
    assert ("model.join()" in finding.fix) is not inside


def test_a_rank_that_began_the_loop_again(written: Written) -> None:
    hang = Hang(written, PLAIN)
    called(hang, hang.behind)
    assert "DDP109" not in [code for code, _, _ in hang.found()]


def test_ranks_after_as_many_steps(written: Written) -> None:
    assert Hang(written, PLAIN).found(reduced=13) == []


def test_a_rank_that_is_still_in_the_loop(written: Written) -> None:
    assert Hang(written, PLAIN).found(at=4) == []


def test_a_collective_that_ended(written: Written) -> None:
    assert Hang(written, PLAIN).found(ended=True) == []


def test_a_rank_that_is_elsewhere(written: Written) -> None:
    assert Hang(written, PLAIN).found(phase=Phase.OTHER) == []


def test_loops_over_loaders_and_calls_that_may_be_missing(written: Written) -> None:
    assert Hang(written, PLAIN).found(loops=True) == []


def test_calls_that_may_be_missing(written: Written) -> None:
    assert Hang(written, PLAIN).found(partial=True) == []

"""Collectives that do not fit together, by the rings of jobs that failed or go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding
from ddpdoctor.run.names import rank_stem
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.ring import ASYNC, POINT_TO_POINT, RingWriter, chain_text
from ddpdoctor.run.status import Phase
from tests.support.crash_records import error
from tests.support.written import SECOND, T0, Written

MISPAIRED = "what(): [enforce fail] op.preamble.length <= op.nbytes. 40 vs 8"


class Ring:
    """The collectives that a rank called, in a script."""

    def __init__(self, written: Written, rank: int, script: Path) -> None:
        self.script = script
        self.writer = RingWriter(str(written.path / f"{rank_stem(rank, 0)}.collectives"))
        self.count = 0

    def call(
        self, *lines: int, name: str = "barrier", reduce: str = "", numel: int = -1, root: int = -1,
        done: bool = False, began: int = T0, flags: int = 0,
    ) -> Ring:  # fmt: skip
        text, self.count = self.writer.text, self.count + 1
        chain = text(chain_text([text(f"{self.script}:{line}") for line in lines]))
        facts = (text(name), text("0|0-2"), text("float32"), text(reduce), chain)
        sequence = 0 if flags & POINT_TO_POINT else self.count
        order = self.writer.begin(began, sequence, facts, (max(numel, 0),), numel, root, flags)
        if done:
            self.writer.end(order, began + 1)
        return self


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


GUARDED = """\
for x in loader:
    ddp(x).backward()
    if rank == 0:
        dist.barrier()
"""
BY_LOSS = GUARDED.replace("rank == 0", "loss < best")


def at(script: Path, phase: str, line: int) -> JsonObject:
    return {"kind": "site", "phase": phase, "path": str(script), "line": line}


def in_backward(
    written: Written,
    number: int,
    script: Path,
    phase: Phase = Phase.BACKWARD,
    records: Sequence[JsonObject] = (),
    opened: Mapping[str, Any] = {},
) -> None:
    """A rank in a collective of DDP's own, which has called none from Python."""
    Ring(written, number, script)
    written.rank(
        number, records, phase=phase, armed=5, reduced=5, site=f"{script}:2", opened=opened
    )


def in_barrier(written: Written, number: int, script: Path, line: int = 4) -> None:
    """A rank in a barrier that it alone may have called."""
    Ring(written, number, script).call(line)
    written.rank(number, [], phase=Phase.WAIT, armed=5, reduced=5, site=f"{script}:{line}")


def failed(written: Written, *, rank: int = 1, stderr: str = MISPAIRED) -> list[Finding]:
    """What is said once a rank aborted."""
    written.exit(rank, -6, T0 + SECOND)
    return written.findings(status=1, stderr=stderr)


def test_a_barrier_of_rank_0_that_met_ddps_all_reduce(written: Written, script: Path) -> None:
    script.write_text(GUARDED)
    in_barrier(written, 0, script)
    in_backward(written, 1, script)
    (finding,) = failed(written)
    assert (finding.code, finding.ranks) == ("DDP401", (0,))
    assert finding.location is not None and finding.location.line == 4
    assert "rank 0 alone called barrier" in finding.message
    assert finding.evidence == (
        "rank 0 called barrier #1 (default group) at train.py:4",
        "rank 1 was in a collective of DDP's own",
    )


def test_a_barrier_that_some_rank_called_by_its_loss(written: Written, script: Path) -> None:
    script.write_text(BY_LOSS)
    in_barrier(written, 0, script)
    in_backward(written, 1, script)
    (finding,) = failed(written)
    assert (finding.code, finding.ranks) == ("DDP803", (0, 1))
    assert finding.message == (
        "rank 0 called barrier #1 (default group) at `dist.barrier()` train.py:4, by `if loss < "
        "best:` train.py:3, while rank 1 was in DDP's own all-reduce, and the job failed"
    )


def test_the_smaller_part_of_the_ranks_is_out_of_line(written: Written, script: Path) -> None:
    script.write_text(BY_LOSS)
    in_backward(written, 0, script)
    for number in (1, 2):
        in_barrier(written, number, script)
    (finding,) = failed(written)
    assert (finding.code, finding.ranks) == ("DDP803", (0,))
    assert finding.message == (
        "rank 0 skipped barrier #1 (default group) at `dist.barrier()` train.py:4, by `if loss < "
        "best:` train.py:3; ranks 1 and 2 were in it when the job failed"
    )


def test_a_condition_counts_steps_and_compares_a_loss(written: Written, script: Path) -> None:
    script.write_text(BY_LOSS.replace("if loss < best", "if step % 50 == 0 and loss < best"))
    in_backward(written, 0, script)
    for number in (1, 2):
        in_barrier(written, number, script)
    (finding,) = failed(written)
    assert finding.location is not None and finding.location.line == 3
    assert "by `if step % 50 == 0 and loss < best:` train.py:3" in finding.message


def test_one_rank_of_three_that_called_it_is_out_of_line(written: Written, script: Path) -> None:
    script.write_text(BY_LOSS)
    in_barrier(written, 0, script)
    for number in (1, 2):
        in_backward(written, number, script)
    (finding,) = failed(written)
    assert finding.ranks == (0,)
    assert "while ranks 1 and 2 were in DDP's own all-reduce" in finding.message


def test_one_rank_that_a_condition_names_skipped_it(written: Written, script: Path) -> None:
    script.write_text(GUARDED.replace("rank == 0", "not (rank == 1 and step == 6)"))
    in_barrier(written, 0, script)
    in_backward(written, 1, script)
    (finding,) = failed(written)
    assert (finding.code, finding.ranks) == ("DDP803", (1,))
    assert finding.location is not None and finding.location.line == 3
    assert finding.message == (
        "rank 1 skipped barrier #1 (default group) at `dist.barrier()` train.py:4, by "
        "`if not (rank == 1 and step == 6):` train.py:3; rank 0 was in it when the job failed"
    )


@pytest.mark.parametrize("why", ["done", "counted", "computes", "another failure", "exit"])
def test_an_abort_that_no_call_explains(written: Written, script: Path, why: str) -> None:
    script.write_text(BY_LOSS)
    if why == "done":
        Ring(written, 0, script).call(4, done=True)
        written.rank(0, [], phase=Phase.WAIT)
    else:
        in_barrier(written, 0, script)
    if why == "counted":
        Ring(written, 1, script).call(4, done=True)
        written.rank(1, [], phase=Phase.BACKWARD, site=f"{script}:2")
    else:
        phase = Phase.DATA if why == "computes" else Phase.BACKWARD
        other = [error("ValueError", "bad")] if why == "another failure" else []
        in_backward(written, 1, script, phase, other)
    if why == "another failure":
        written.exit(1, 1, T0 + SECOND)
        found = written.findings(status=1)
    elif why == "exit":
        written.exit(1, 3, T0 + SECOND)
        found = written.findings(status=3)
    else:
        found = failed(written, stderr="")
    assert not {each.code for each in found} & {"DDP401", "DDP803"}


def test_an_exception_of_a_mispaired_collective(written: Written, script: Path) -> None:
    script.write_text(BY_LOSS)
    in_barrier(written, 0, script)
    Ring(written, 1, script)
    frames = [[str(script), 1, "main"], [str(script), 2, "main"]]
    record = error("RuntimeError", MISPAIRED, T0 + SECOND, phase="backward", frames=frames)
    written.rank(1, [record])
    written.exit(1, 1, T0 + SECOND)
    assert [each.code for each in written.findings(status=1)] == ["DDP803"]


PASSED_OVER = """\
for x in loader:
    loss = ddp(x)
    if loss < 9:
        loss.backward()
    dist.barrier()
"""


def passed_over(written: Written, script: Path, *, armed: int = 5, reduced: int = 4) -> None:
    """Rank 0 is in the barrier behind a backward, in which rank 1 is."""
    script.write_text(PASSED_OVER)
    sites = [at(script, "forward", 2), at(script, "backward", 4)]
    Ring(written, 0, script).call(5)
    place = f"{script}:5"
    written.rank(0, sites, phase=Phase.WAIT, armed=armed, reduced=reduced, site=place)
    Ring(written, 1, script)
    written.rank(1, sites, phase=Phase.BACKWARD, armed=5, reduced=5, site=f"{script}:4")


def test_a_backward_that_one_rank_passed_over(written: Written, script: Path) -> None:
    passed_over(written, script)
    (finding,) = failed(written)
    assert (finding.code, finding.ranks) == ("DDP803", (0,))
    assert finding.message.startswith("rank 0 skipped a backward at `loss.backward()`")
    assert finding.message.endswith(
        "train.py:4, and called barrier #1 (default group) at `dist.barrier()` train.py:5 while "
        "rank 1 was in DDP's own all-reduce: the job failed"
    )
    assert finding.evidence[:2] == (
        "rank 0 began 5 forwards and 4 backwards",
        "rank 1 began 5 forwards and 5 backwards",
    )


@pytest.mark.parametrize("reduced", [3, 5])
def test_ranks_that_are_level_passed_no_backward_over(
    written: Written, script: Path, reduced: int
) -> None:
    passed_over(written, script, reduced=reduced)
    (finding,) = failed(written)
    assert "skipped a backward" not in finding.message


# -- jobs that go on


def called(written: Written, script: Path, *calls: JsonObject) -> list[Finding]:
    """What is said while all ranks go on; each of them made one call, from one line."""
    script.write_text("dist.all_reduce(x, op)\n")
    for number, facts in enumerate(calls):
        Ring(written, number, script).call(1, done=True, **facts)
        written.rank(number, [], phase=Phase.FORWARD)
    return written.findings()


SUM = {"name": "all_reduce", "reduce": "SUM", "numel": 4}


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({**SUM, "reduce": "MAX"}, "all_reduce with MAX"),
        ({**SUM, "numel": 8}, "all_reduce of 8 floats"),
        ({**SUM, "name": "broadcast", "reduce": "", "root": 0}, "broadcast"),
    ],
)
def test_a_call_that_differs_and_went_unnoticed(
    written: Written, script: Path, other: JsonObject, what: str
) -> None:
    (finding,) = called(written, script, SUM, SUM, other)
    assert (finding.code, finding.ranks) == ("DDP803", (2,))
    said = (
        f"rank 2 called {what} as collective #1 of the default group, where ranks 0 and 1 called "
    )
    assert finding.message.startswith(said)
    assert finding.message.endswith("at `dist.all_reduce(x, op)` train.py:1")
    same = {"MAX": "reduce operation", "floats": "size", "broadcast": "operation"}
    (word,) = [word for name, word in same.items() if name in what]
    assert finding.fix.startswith(f"Make the {word} the same on every rank")


@pytest.mark.parametrize(
    "other",
    [SUM, {**SUM, "began": T0 + 9}, {**SUM, "reduce": "MAX", "flags": POINT_TO_POINT}],
    ids=["equal", "later", "point to point"],
)
def test_calls_that_fit_together(written: Written, script: Path, other: JsonObject) -> None:
    assert called(written, script, SUM, SUM, other) == []


def test_nccl_gathers_tensors_of_unequal_size(written: Written, script: Path) -> None:
    gathered = {"name": "all_gather", "numel": 4, "flags": ASYNC}
    assert called(written, script, gathered, {**gathered, "numel": 8}) == []


def test_a_ring_that_may_lack_calls_says_nothing(written: Written, script: Path) -> None:
    script.write_text("dist.all_reduce(x, op)\n")
    for number, reduce in enumerate(("SUM", "MAX")):
        Ring(written, number, script).call(1, done=True, name="all_reduce", reduce=reduce)
        fault = {"kind": "fault", "hook": "collectives", "error": "TypeError"}
        written.rank(number, [fault] if number else [], phase=Phase.FORWARD)
    assert written.findings() == []


def sizes_on_three_nodes(written: Written, script: Path, *known: int) -> list[Finding]:
    """All-reduces of three ranks, of which two on other nodes. The calls of some are not here."""
    script.write_text("dist.all_reduce(x)\n")
    for rank in range(3):
        ring = Ring(written, rank, script)
        if rank in known:
            ring.call(1, name="all_reduce", numel=9 if rank == 2 else 8)
        opened = {"namespace": f"7@n{rank}" if rank else "7", "host": f"node{rank}"}
        written.rank(rank, [], phase=Phase.WAIT, opened=opened)
    return [each for each in written.findings() if each.code == "DDP803"]


def test_sizes_are_compared_once_the_calls_of_other_nodes_are_here(
    written: Written, script: Path
) -> None:
    assert sizes_on_three_nodes(written, script, 0, 2) == []


def test_sizes_of_ranks_of_three_nodes(written: Written, script: Path) -> None:
    (finding,) = sizes_on_three_nodes(written, script, 0, 1, 2)
    assert finding.ranks == (2,)


def test_a_call_of_a_rank_that_has_ended_is_not_awaited(written: Written, script: Path) -> None:
    written.exit(2, -6, T0 + SECOND)
    written.exit(1, 1, T0 + SECOND)
    (finding,) = sizes_on_three_nodes(written, script, 0, 2)
    assert finding.ranks == (0, 2)


@pytest.mark.parametrize("ended", [False, True])
def test_a_rank_of_another_node_skipped_no_call_that_may_still_come(
    written: Written, script: Path, ended: bool
) -> None:
    script.write_text(GUARDED)
    in_barrier(written, 0, script)
    in_backward(written, 1, script, opened={"namespace": "7@n1"})
    written.exit(0, -6, T0 + SECOND)
    if ended:
        written.exit(1, 1, T0 + 2 * SECOND)
    (finding,) = written.findings(stderr=MISPAIRED)
    assert finding.code == ("DDP401" if ended else "DDP803"), finding

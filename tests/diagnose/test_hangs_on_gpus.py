"""Jobs that hang in NCCL: a rank's host goes on until it needs what its GPU has not done.

The records are those of real jobs (`tests/gpu/test_training.py`), shortened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.run.ring import RingWriter, chain_text
from ddpdoctor.run.status import Phase
from tests.support.hanging_ranks import NOW, findings, rank, stacks
from tests.support.loop_jobs import AHEAD, Job
from tests.support.written import T0, Written

LOG = """
def log(rank, loss):
    if rank != 0:
        return
    dist.all_reduce(loss)
    print(loss.item())
"""
CALLED, PRINTED = 5, 6

SPINS: dict[str, Any] = {"activity": {"seconds": 1.0, "letters": "RR", "cpu": 1.0, "busy": 1.0}}


def queued(
    sequence: int, name: str, numel: int, line: int = 0, done: bool = False, age: float = 41.0
) -> dict[str, Any]:
    """A collective of NCCL in the Flight Recorder; DDP's own have no line."""
    return {
        "group": "0", "sequence": sequence, "id": sequence, "name": name, "shapes": [[numel]],
        "dtypes": ["Float"], "created": NOW - int(age * 1e9), "retired": done,
        "state": "completed" if done else "scheduled", "backend": "nccl",
        "lines": [f"/job/train.py:{line}"] if line else [],
    }  # fmt: skip


def at(number: int, line: int, *flight: dict[str, Any], later: int = 0, **more: Any) -> Any:
    """A rank whose main thread is at a line, a second later perhaps at another one."""
    here, there = (
        stacks(number, ("/job/train.py", each, "main")) for each in (line, later or line)
    )
    return rank(number, "other", flight=[*flight], stacks=here, later=there, world_size=2, **more)


LAST = queued(21, "all_reduce", 68874, 117, done=True)
WAITED = queued(24, "all_reduce", 68874, 117)


def test_who_never_joined_is_named_and_who_spins_waits_for_it(tmp_path: Path) -> None:
    (finding,) = findings(tmp_path, at(0, 115, LAST, WAITED, **SPINS), at(1, 75, LAST))
    assert (finding.code, finding.ranks) == ("DDP802", (1,))
    assert finding.severity is Severity.ERROR
    assert finding.location == Location("/job/train.py", 75)
    assert finding.message.startswith(
        "rank 1 never joined all_reduce #24 (68,874 floats, default group), where rank 0 waits in "
        "train.py:117; rank 1 is in "
    )
    assert (
        "rank 0 waits in all_reduce #24 (68,874 floats, default group) at train.py:117 for 41 s; "
        "its host is at train.py:115"
    ) in finding.evidence


@pytest.mark.parametrize(
    ("line", "later", "age"),
    [
        # Its host works on, or its GPU has not had the time.
        (115, 116, 41.0),
        (115, 115, 0.5),
    ],
)
def test_who_works_on_does_not_wait(tmp_path: Path, line: int, later: int, age: float) -> None:
    waited = {**WAITED, "created": NOW - int(age * 1e9)}
    ranks = at(0, line, LAST, waited, later=later, **SPINS), at(1, 75, LAST, **SPINS)
    assert findings(tmp_path, *ranks) == []


def test_a_call_too_many_is_the_line_though_the_other_rank_is_further_on(tmp_path: Path) -> None:
    buffers = queued(22, "broadcast", 512, done=True)
    (finding,) = findings(
        tmp_path,
        at(0, 115, LAST, buffers, WAITED, **SPINS),
        at(1, 71, LAST, queued(22, "all_reduce", 8, 70), **SPINS),
    )
    assert (finding.code, finding.location) == ("DDP803", Location("/job/train.py", 70))
    assert finding.message == (
        "ranks 0 and 1 called different collectives as #22 of the default group: rank 0 broadcast "
        "at an unknown line and rank 1 all_reduce at train.py:70"
    )


def test_calls_that_ended_though_they_did_not_fit_are_the_reason(tmp_path: Path) -> None:
    """NCCL notices neither the operation nor the size."""
    (finding,) = findings(
        tmp_path,
        at(0, 115, LAST, queued(22, "broadcast", 512, done=True),
           queued(23, "broadcast", 1, done=True), WAITED, **SPINS),
        at(1, 115, LAST, queued(22, "all_reduce", 1 << 20, 73, done=True),
           queued(23, "broadcast", 512), queued(24, "broadcast", 1), **SPINS),
    )  # fmt: skip
    assert (finding.code, finding.location) == ("DDP803", Location("/job/train.py", 73))
    assert "as #22 of the default group" in finding.message


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "scatter"])
def test_shards_of_unequal_size_fit(tmp_path: Path, name: str) -> None:
    parts = [queued(22, name, size, 60, done=True) for size in (5, 6)]
    (finding,) = findings(
        tmp_path, at(0, 115, parts[0], WAITED, **SPINS), at(1, 115, parts[1], WAITED, **SPINS)
    )
    assert finding.code == "DDP814"


def test_a_collective_that_later_ones_have_passed_is_not_waited_for(tmp_path: Path) -> None:
    """As one that was captured in a graph: it is never seen to be done."""
    captured = queued(20, "all_reduce", 8, 60)
    ranks = (at(number, 115, captured, LAST, **SPINS) for number in (0, 1))
    assert findings(tmp_path, *ranks) == []


@pytest.mark.parametrize(("later", "expected"), [(115, [(1,)]), (116, [])])
def test_who_left_is_named_where_the_others_wait_for_their_gpus(
    tmp_path: Path, written: Written, later: int, expected: list[tuple[int, ...]]
) -> None:
    end = {"kind": "end", "time": T0, "steps": 4, "armed": 4}
    written.rank(1, [end], armed=4, steps=4)
    written.rank(0, [], phase=Phase.OTHER, armed=5, steps=5)
    written.exit(1, 0, T0)
    still = {"kind": "hang", "time": NOW, "number": 1, "seconds": 41.0, "file": "hang-0001.json"}
    written.supervisor.append(still)
    ranks = [at(0, 115, LAST, WAITED, later=later, **SPINS)]
    (tmp_path / "hang-0001.json").write_text(json.dumps({**still, "ranks": ranks}))
    assert [each.ranks for each in written.findings() if each.code == "DDP801"] == expected


def test_a_condition_on_the_rank_is_found_in_front_of_the_call(tmp_path: Path) -> None:
    """The call itself has returned: rank 0 is at the line that needs its result."""
    script = tmp_path / "train.py"
    script.write_text(LOG)
    made = {**queued(5, "all_reduce", 1), "lines": [f"{script}:{CALLED}"]}
    own = {
        "order": 1, "began": made["created"] - 1000, "ended": made["created"] + 1000,
        "sequence": 1, "name": "all_reduce", "group": "0|0-1", "dtype": "float32",
        "reduce": "SUM", "numel": 1, "root": -1, "asynchronous": False, "point_to_point": False,
        "site": f"{script}:{CALLED}", "callers": [],
    }  # fmt: skip
    here = stacks(0, (str(script), PRINTED, "log"))
    zero = rank(
        0, "other", flight=[made], stacks=here, later=here, collectives=[own], world_size=2, **SPINS
    )
    there = stacks(1, ("/job/train.py", 30, "main"))
    one = rank(1, "wait", flight=[queued(5, "broadcast", 3)], stacks=there, world_size=2)
    (finding,) = findings(tmp_path, zero, one)
    assert (finding.code, finding.ranks) == ("DDP401", (0,))
    assert finding.location == Location(str(script), CALLED)


MEAN = "    mean = lambda value: dist.all_reduce(value)\n"


@pytest.mark.parametrize(
    ("text", "chain", "site", "codes"),
    [
        (AHEAD, (8,), 8, ["DDP403"]),
        # A metric within the loop; one after an epoch before, which took from the same iterator.
        (AHEAD, (7,), 7, ["DDP803"]),
        (AHEAD, (8,), 6, ["DDP803"]),
        # By a function of one line, called within the loop.
        (AHEAD.replace("    for", f"{MEAN}    for", 1), (2, 8), 2, ["DDP803"]),
    ],
)
def test_who_left_the_loop_is_named_though_its_call_has_returned(
    tmp_path: Path,
    written: Written,
    text: str,
    chain: tuple[int, ...],
    site: int,
    codes: list[str],
) -> None:
    """Its iterator lives on, and its host is further on: what it called last came from behind."""
    job = Job(written, text, at=2 + text.count(MEAN))
    for number, reduced in ((0, 5), (1, 4)):
        at_line = f"{job.path}:{site}" if number else ""
        written.rank(
            number, [job.loop()], phase=Phase.OTHER, armed=5, steps=4, reduced=reduced, site=at_line
        )
    ring = RingWriter(str(tmp_path / "rank-0001.r0.collectives"))
    lines = [f"{job.path}:{line}" for line in chain]
    led = chain_text([ring.text(each) for each in lines])
    words = ("all_reduce", "0|0-1", "float32", "SUM", led)
    name, group, dtype, reduce, place = map(ring.text, words)
    ring.end(ring.begin(T0, 22, (name, group, dtype, reduce, place), (8,), 8, -1, 0), T0 + 2)
    still = {"kind": "hang", "time": NOW, "number": 1, "seconds": 41.0, "file": "hang-0001.json"}
    written.supervisor.append(still)
    called = {**queued(22, "all_reduce", 8), "lines": lines}
    ranks = [
        at(0, 6, LAST, queued(22, "all_reduce", 68), **SPINS), at(1, 9, LAST, called, **SPINS)
    ]  # fmt: skip
    (tmp_path / "hang-0001.json").write_text(json.dumps({**still, "ranks": ranks}))
    assert [each.code for each in written.findings() if each.code in ("DDP403", "DDP803")] == codes

"""What a rank waits for that others wait for: its loader, the end of its script, collectives."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.diagnose.collectives.recorded_calls import from_flight, from_ring
from ddpdoctor.diagnose.hangs.hang_snapshot import RankState
from ddpdoctor.diagnose.hangs.rank_activity import NEVER_ENDS, activity_of, exit_wait
from ddpdoctor.run.ring import Collective
from ddpdoctor.stacks.frames import ENDING
from tests.support.hanging_ranks import NOW, call, flight_call, stacks, state
from tests.support.seen_ranks import LOAD, LOADER, died, said, seen

# -- its DataLoader


def workers(*letters: str, **more: Any) -> RankState:
    """A rank that waits for the workers of its loader."""
    children = [
        {"pid": 900 + number, "letter": letter, "command": "python train.py"}
        for number, letter in enumerate(letters)
    ]
    tracker = {"pid": 899, "letter": "S", "command": "python -c resource_tracker"}
    state = {"children": [tracker, *children]}
    known = stacks(1, LOAD, (LOADER, 9, "_try_get_data"), state=state)
    return seen(stacks=known, **more)


@pytest.mark.parametrize(
    ("letters", "facts", "severity", "words"),
    [
        ("S", {}, Severity.ERROR, "the worker of its DataLoader|which sleeps, too: deadlocked"),
        ("SS", {}, Severity.ERROR, "the 2 workers of its DataLoader|which sleep, too: deadlocked"),
        ("", {}, Severity.ERROR, "the 0 workers of its DataLoader|which are gone"),
        ("Z", {}, Severity.ERROR, "the worker|which died"),
        ("SX", {}, Severity.ERROR, "the 2 workers|one of which died"),
        ("XZS", {}, Severity.ERROR, "the 3 workers|2 of which died"),
        ("T", {}, Severity.ERROR, "the worker|which is stopped (SIGSTOP)"),
        ("St", {}, Severity.ERROR, "the 2 workers|one of which is stopped (SIGSTOP)"),
        ("TtS", {}, Severity.ERROR, "the 3 workers|2 of which are stopped (SIGSTOP)"),
        ("S", {"children_network": True}, Severity.WARNING, "|which waits for the network"),
        ("SS", {"children_network": True}, Severity.WARNING, "|one of which waits for the network"),
        ("R", {"children_cpu": 0.9}, Severity.WARNING, "|which is computing (90 % of a core)"),
        ("RS", {"children_cpu": 0.9}, Severity.WARNING, "|which are computing (90 % of a core)"),
        ("S", {"since_children_cpu": 0.1}, Severity.WARNING, "|which works now and then"),
        ("SS", {"since_children_cpu": 0.1}, Severity.WARNING, "|which work now and then"),
    ],
)
def test_what_workers_of_a_loader_do(
    letters: str, facts: dict[str, Any], severity: Severity, words: str
) -> None:
    found = activity_of(workers(*letters, **facts), False)
    assert said(found)[:2] == ("DDP809", severity)
    head, tail = words.split("|")
    assert found.text.startswith(f"waits for {head}")
    assert found.text.endswith(f"at train.py:88 for 41 s, {tail}")
    assert found.evidence == tuple(
        f"worker {900 + number} is in state {letter}" for number, letter in enumerate(letters)
    )


@pytest.mark.parametrize(("cpu", "severity"), [(0.9, Severity.WARNING), (0.0, Severity.ERROR)])
def test_who_has_no_workers_loads_its_data_itself(cpu: float, severity: Severity) -> None:
    reads = ("/job/data.py", 5, "__getitem__")
    found = activity_of(seen(LOAD, (LOADER, 9, "_next_data"), reads, cpu=cpu), False)
    assert said(found)[:2] == ("DDP809", severity)
    assert found.text.startswith("loads its data itself at `__getitem__` data.py:5, ")


def test_an_endless_loop_around_the_loader_is_not_the_loaders(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("while True:\n    batch = next(loader)\n")
    draws, after = (str(script), 2, "main"), stacks(1, (str(script), 2, "main"))
    below = (LOADER, 9, "_next_data")
    assert activity_of(seen(draws, below, cpu=0.9, later=after), False).code == "DDP809"
    collates = (str(script), 2, "collate")
    found = activity_of(seen(LOAD, below, collates, cpu=0.9, later=after), False)
    assert found.code == "DDP807"


def test_an_endless_loop_of_a_worker(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text("while True:\n    look()\n")
    worker = ("/lib/site-packages/torch/utils/data/_utils/worker.py", 9, "_worker_loop")
    looks = [stacks(1, worker, (str(script), 2, "get"), pid=900) for _ in (0, 1)]
    found = activity_of(workers("R", children_cpu=0.9, workers=[looks]), False)
    assert said(found)[:2] == ("DDP807", Severity.ERROR)
    assert found.text == (
        "waits for the worker 900 of its DataLoader, which runs in an endless loop, `while True:` "
        "data.py:1, for 41 s"
    )
    plain = stacks(1, (str(script), 2, "get"))
    for less in ([looks[:1]], [[*looks, looks[0]]], [[looks[0], plain]], [[plain, plain]], []):
        assert activity_of(workers("R", children_cpu=0.9, workers=less), False).code == "DDP809"


# -- the end of the script


JOINS = ("/lib/python3.11/threading.py", 1590, "_shutdown")


def threads(*each: tuple[str, int], frames: tuple[tuple[str, int, str], ...] = (JOINS,)) -> Any:
    """The stacks of a rank whose end waits for threads."""
    known = stacks(1, *frames)
    known["threads"] += [
        {"ident": 2 + number, "name": name, "awaited": True,
         "frames": [{"path": "/job/log.py", "line": line, "function": "send"}]}
        for number, (name, line) in enumerate(each)
    ]  # fmt: skip
    return known


def test_the_end_waits_for_threads() -> None:
    found = exit_wait(seen(stacks=threads(("sender", 5))))
    assert said(found) == (
        "DDP815",
        Severity.WARNING,
        "has been at the end of the script for 41 s, waiting for the thread 'sender', which is at "
        "log.py:5",
    )
    found = exit_wait(seen(stacks=threads(("sender", 5), ("saver", 6), ("third", 7))))
    assert found is not None
    assert "the thread 'sender' and 2 more" in found.text
    assert found.evidence == ("thread 'saver' is at log.py:6", "thread 'third' is at log.py:7")
    assert said(exit_wait(seen(stacks=threads())))[2].endswith("waiting for a thread")


def test_the_end_is_given_a_while_if_it_works() -> None:
    """It may be sending what was to be sent."""
    known = threads(("sender", 5))
    for facts in ({"cpu": 0.9}, {"network": True}, {"children_network": True}):
        assert exit_wait(seen(stacks=known, **facts)) is None
    assert exit_wait(seen(stacks=known, exit=died(1))) is None
    assert exit_wait(seen(stacks=known, letters="ZZ")) is None
    assert exit_wait(seen()) is None


CHILDREN = ("/lib/python3.11/multiprocessing/util.py", 360, "_exit_function")


@pytest.mark.parametrize(
    ("letters", "words", "evidence"),
    [
        ("", "waiting for a child process", 0),
        ("S", "waiting for the child process 900", 1),
        ("SR", "waiting for the child process 900 and 1 more", 2),
        # Who has ended is waited for no more.
        ("ZS", "waiting for the child process 901", 1),
    ],
)
def test_the_end_waits_for_processes(letters: str, words: str, evidence: int) -> None:
    children = [
        {"pid": 900 + number, "letter": letter, "command": "python train.py"}
        for number, letter in enumerate(letters)
    ]
    tracker = {"pid": 899, "letter": "S", "command": "python -c resource_tracker"}
    known = stacks(1, CHILDREN, state={"children": [tracker, *children]})
    found = exit_wait(seen(stacks=known))
    assert said(found)[:2] == ("DDP815", Severity.WARNING)
    assert said(found)[2] == f"has been at the end of the script for 41 s, {words}"
    assert found is not None and len(found.evidence) == evidence


@pytest.mark.parametrize(
    ("ended", "frames", "facts", "severity", "words"),
    [
        (True, (LOAD,), {}, Severity.WARNING, "in `load` train.py:88"),
        (True, (), {}, Severity.ERROR, f"where {NEVER_ENDS} (idle)"),
        (True, (), {"cpu": 0.9}, Severity.WARNING, f"where {NEVER_ENDS} (computing (90 % of a"),
        (False, (LOAD,), {}, Severity.ERROR, f"where {NEVER_ENDS}, below `load` train.py:88"),
    ],
)
def test_what_is_called_at_the_end_or_never_comes_back(
    ended: bool,
    frames: tuple[tuple[str, int, str], ...],
    facts: dict[str, Any],
    severity: Severity,
    words: str,
) -> None:
    known = stacks(1, *frames) if frames else {**stacks(1), "threads": []}
    known = {**known, **({} if ended else {"trouble": ENDING})}
    # It has been there for long enough to say so, even if it is at work.
    found = exit_wait(seen(ended=ended, stacks=known, since=NOW - 300 * 10**9, **facts))
    assert said(found)[:2] == ("DDP815", severity)
    assert said(found)[2].startswith(f"has been at the end of the script for 300 s, {words}")
    if facts:
        assert exit_wait(seen(ended=ended, stacks=known, since=NOW - 299 * 10**9, **facts)) is None
    hidden = seen(ended=ended, stacks=known)
    hidden = replace(hidden, evidence=replace(hidden.evidence, activity=None))
    assert exit_wait(hidden) is None


# -- collectives, in words


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"shapes": [[2, 3], [4]], "dtypes": ["Float"]},
            "all_reduce #9 (10 floats, default group)",
        ),
        ({"shapes": [[1]], "dtypes": ["Half"]}, "all_reduce #9 (1 half, default group)"),
        ({"shapes": [[2]], "dtypes": ["Half"]}, "all_reduce #9 (2 halves, default group)"),
        ({"shapes": [[2_000]], "dtypes": []}, "all_reduce #9 (2,000 elements, default group)"),
        ({"shapes": []}, "all_reduce #9 (default group)"),
        ({"shapes": [], "group": "5"}, "all_reduce #9 (group 5)"),
        ({"shapes": [], "name": "_all_gather_base"}, "all_gather_base #9 (default group)"),
    ],
)
def test_collectives_of_the_flight_recorder(facts: dict[str, Any], words: str) -> None:
    assert from_flight(flight_call({**call(9, False), **facts})).what == words


@pytest.mark.parametrize(
    ("facts", "done"), [({}, False), ({"retired": True}, True), ({"state": "completed"}, True)]
)
def test_collectives_that_are_done(facts: dict[str, Any], done: bool) -> None:
    assert from_flight(flight_call({**call(9, False), **facts})).done is done


RING: dict[str, Any] = {
    "group": "3|0-1", "sequence": 2, "name": "reduce", "numel": 4, "dtype": "int64",
    "reduce": "MAX", "root": 0, "ended": 0, "site": "/job/a.py:3", "order": 7, "began": 5,
    "callers": ["/job/b.py:4", ""],
}  # fmt: skip


def ring_call(more: dict[str, Any]) -> Collective:
    """The call, as former versions wrote it."""
    (found,) = state({"collectives": [{**RING, **more}]}).evidence.collectives
    return found


def test_collectives_of_the_ring() -> None:
    found = from_ring(ring_call({}))
    assert found.what == "reduce #2 (4 longs, MAX, root 0, group of ranks 0-1)"
    assert [str(each) for each in found.chain] == ["/job/a.py:3", "/job/b.py:4"]
    assert (found.done, found.order, found.began) == (False, 7, 5)
    plain = from_ring(ring_call({"numel": -1, "reduce": "SUM", "root": -1, "site": "", "ended": 9}))
    assert plain.what == "reduce #2 (group of ranks 0-1)"
    assert [str(each) for each in plain.chain] == ["/job/b.py:4"]
    assert plain.done

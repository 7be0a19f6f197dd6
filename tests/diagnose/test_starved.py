"""Ranks that lack CPU are neither idle nor hung."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Severity
from ddpdoctor.run.snapshot import Rank, Run
from ddpdoctor.run.status import Phase
from ddpdoctor.stacks.capture import GIL_TIMEOUT, _Stopwatch
from ddpdoctor.stacks.frames import ENDING
from ddpdoctor.supervise.hang_watch import CoreWaits, SignsOfLife
from ddpdoctor.system import process_activity
from ddpdoctor.system.process_activity import CpuTime, lacked, read_cpu_time, share
from tests.conftest import LIMIT
from tests.support.hanging_ranks import TRAIN, findings, job, rank, stacks, status, waiting
from tests.support.starved import late, needs_linux
from tests.support.written import supervisor_records

STARVED = {"seconds": 1.0, "letters": "RR", "cpu": 0.03, "busy": 1.0}
SLEEPS = {"seconds": 1.0, "letters": "SS", "cpu": 0.0, "busy": 0.0}
LOADER = "/srv/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
WORKER = "/srv/lib/python3.11/site-packages/torch/utils/data/_utils/worker.py"
INIT = ("/srv/lib/python3.11/site-packages/torch/distributed/c.py", 9, "init_process_group")


# -- what a thread has had of the cores


@pytest.mark.parametrize(
    ("before", "after", "used", "without"),
    [
        # It gets 3 %, and would take all.
        (CpuTime("R", 0.0, 0.0, 5), CpuTime("R", 0.03, 0.2, 5), 1.0, 0.97),
        # The same, seen between two sleeps.
        (CpuTime("S", 0.0, 0.0, 5), CpuTime("S", 0.03, 0.93, 6), 0.03 / 0.07, 0.93),
        # Never once on a core, and the kernel has not counted its wait yet.
        (CpuTime("R", 2.0, 1.0, 5), CpuTime("R", 2.0, 1.0, 5), 1.0, 1.0),
        # It wakes up often, finds nothing to do, and has to wait for a core each time.
        (CpuTime("S", 0.0, 0.0, 5), CpuTime("R", 0.001, 0.6, 60), 0.001 / 0.4, 0.6),
        # It sleeps; it computes and has its core.
        (CpuTime("S", 1.0, 1.0, 5), CpuTime("S", 1.0, 1.0, 5), 0.0, 0.0),
        (CpuTime("R", 1.0, 1.0, 5), CpuTime("R", 1.98, 1.0, 5), 1.0, 0.02),
        # It is stopped.
        (CpuTime("T", 1.0, 1.0, 5), CpuTime("T", 1.0, 1.0, 5), 0.0, 0.0),
    ],
)
def test_the_share_that_counts(
    before: CpuTime, after: CpuTime, used: float, without: float
) -> None:
    assert share(before, after, 1.0) == pytest.approx(used)
    assert lacked(before, after, 1.0) == pytest.approx(without)


SPIN = "while True: pass"


@contextmanager
def one_core_for(*niceness: int) -> Iterator[list[int]]:
    """Endless loops on one core."""
    core = min(os.sched_getaffinity(0))

    def begin(nice: int) -> None:
        os.sched_setaffinity(0, {core})
        os.nice(nice)

    spins = [
        subprocess.Popen([sys.executable, "-c", SPIN], preexec_fn=partial(begin, nice))
        for nice in niceness
    ]
    try:
        yield [spin.pid for spin in spins]
    finally:
        for spin in spins:
            spin.kill()
            spin.wait()


@needs_linux
def test_a_real_process_that_gets_next_to_nothing() -> None:
    with one_core_for(0, 19) as (_, starved):
        # Its start reads files, and takes long on a machine that has other work.
        deadline = time.monotonic() + LIMIT
        earlier, turn = None, read_cpu_time(starved, starved)
        while (earlier is None or turn is None or turn.sleeps != earlier.sleeps) and (
            time.monotonic() < deadline
        ):
            time.sleep(0.3)
            earlier, turn = turn, read_cpu_time(starved, starved)
        cores, began = CoreWaits(), time.monotonic()
        cores.lost(starved, 1, began)
        before, patience = process_activity.sample(starved), _Stopwatch(starved)
        time.sleep(1.2)
        now = time.monotonic()
        told = process_activity.compared(before, process_activity.sample(starved), now - began)
        lost = cores.lost(starved, 1, now)
        assert told.busy > 0.9, told
        assert lost > 0.5 * (now - began), (lost, told)
        # Who had no core cannot have held the GIL for so long.
        assert not patience.over(GIL_TIMEOUT)
        run = job(status(0, Phase.OTHER, since=1)._replace(pid=starved))
        assert [each.lost for each in cores.records(run)] == [round(lost * 1e9)]
        assert [*cores.records(run)] == []
        # Its next silence begins at nothing.
        assert cores.lost(starved, 2, now + 1.0) == 0.0


@needs_linux
def test_a_child_counts_for_its_parent() -> None:
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}], timeout=300)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + LIMIT
        while (
            not process_activity.sample(parent.pid).children_turns and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        time.sleep(0.3)
        before, began = process_activity.sample(parent.pid), time.monotonic()
        time.sleep(0.5)
        told = process_activity.compared(
            before, process_activity.sample(parent.pid), time.monotonic() - began
        )
        assert told.children_busy > 0.5 and told.busy < 0.2, told
    finally:
        for child in process_activity.sample(parent.pid).children_turns:
            os.kill(child, 9)
        parent.kill()
        parent.wait()


# -- when


def test_patience_counts_the_time_that_a_rank_got() -> None:
    gets = 0.03

    def lost(rank: Rank, now: float) -> float:
        return now * (1 - gets) if rank.rank == 1 else 0.0

    signs = SignsOfLife(5.0, lost)
    still = job(status(0, Phase.WAIT), status(1, Phase.FORWARD))
    signs.look(still, 0.0)
    assert signs.look(still, 19.0) is None
    # The one that waits has waited long; the one that is starved is not taken to stand still.
    found = signs.look(still, 21.0)
    assert found is not None and (found.everybody, found.ranks) == (False, (0,))
    assert found.lost[1] == pytest.approx(21 * 0.97)
    # But not for ever.
    found = signs.look(still, 51.0)
    assert found is not None and found.everybody


def test_a_wait_without_a_core_is_none(tmp_path: Path) -> None:
    waits = Rank(0, 0, status(0, Phase.WAIT, since=1_000))
    late = {"kind": "no_core", "rank": 0, "restart": 0, "since": 1_000, "lost": 4_000}
    run = Run(tmp_path, {}, (waits,), supervisor=supervisor_records(late), taken=6_000)
    assert run.waits_for(waits) == 1_000
    # Of another phase.
    run = Run(
        tmp_path, {}, (waits,), supervisor=supervisor_records({**late, "since": 7}), taken=6_000
    )
    assert run.waits_for(waits) == 5_000


STEP = ("/job/train.py", 70, "forward")


def test_a_starved_rank_is_not_blamed_for_being_late(tmp_path: Path) -> None:
    starved = late(STEP, STARVED, lost=39.0)
    assert findings(tmp_path, waiting(0), starved, limit=5.0) == []
    assert findings(tmp_path, waiting(0), starved, limit=5.0, everybody=False) == []
    # It has had its time.
    (found,) = findings(tmp_path, waiting(0), {**starved, "lost": 25.0}, limit=5.0)
    assert (found.code, found.severity) == ("DDP802", Severity.WARNING)
    assert "rank 1 is in `forward` train.py:70, short of CPU (gets 3 % of a core)" in found.message
    # Asleep, it waits for something else, load or not.
    (found,) = findings(tmp_path, waiting(0), late(STEP, SLEEPS, lost=39.0), limit=5.0)
    assert (found.code, found.severity) == ("DDP802", Severity.ERROR)


def test_a_rank_on_the_run_queue_is_not_idle(tmp_path: Path) -> None:
    """DDP814, "idle", was said of ranks in their forward."""
    waking = {**SLEEPS, "letters": "SR"}
    for seen in (STARVED, waking):
        both = [{**late(STEP, seen), "rank": number} for number in (0, 1)]
        assert findings(tmp_path, *both) == []
    both = [{**late(STEP, SLEEPS), "rank": number} for number in (0, 1)]
    assert [each.code for each in findings(tmp_path, *both)] == ["DDP814"]


def test_all_in_one_collective_that_has_no_core(tmp_path: Path) -> None:
    carried = {"activity": {**SLEEPS, "busy": 0.8, "cpu": 0.02}}
    ranks = [waiting(number) for number in range(4)]
    assert findings(tmp_path, *ranks[:3], {**ranks[3], **carried}) == []


def test_ranks_that_import_within_init_process_group_have_come(tmp_path: Path) -> None:
    def joins(number: int, seen: dict[str, Any], world: int) -> dict[str, Any]:
        told = stacks(number, TRAIN, INIT, world_size=world)
        return {"rank": number, "pid": number + 1, "stacks": told, "activity": seen}

    assert findings(tmp_path, joins(0, STARVED, 2), joins(1, STARVED, 2)) == []
    assert findings(tmp_path, joins(0, SLEEPS, 2), joins(1, STARVED, 2)) == []
    # The launcher, which keeps the store, has no core.
    both = joins(0, SLEEPS, 3), joins(1, SLEEPS, 3)
    assert findings(tmp_path, *both, launcher_works=True) == []
    (found,) = findings(tmp_path, *both)
    assert (found.code, found.severity) == ("DDP813", Severity.ERROR)
    # All have come, so that none is missing.
    (found,) = findings(tmp_path, joins(0, SLEEPS, 2), joins(1, SLEEPS, 2))
    assert (found.code, found.severity) == ("DDP814", Severity.WARNING)
    # One does not say where it is: it may be on its way.
    silent = {"rank": 1, "pid": 2, "stacks": {**stacks(1), "threads": []}, "activity": STARVED}
    assert findings(tmp_path, joins(0, SLEEPS, 2), silent) == []


def test_who_had_less_of_the_cores_than_the_others_needed_is_not_late(tmp_path: Path) -> None:
    """Nothing but its CPU time tells so: before it is a rank it writes no status."""
    came = {"stacks": stacks(0, TRAIN, INIT), "activity": {**SLEEPS, "ran": 6.2}}
    waits = {"rank": 0, "pid": 1, **came}

    def starting(ran: float, seen: dict[str, Any] = STARVED) -> dict[str, Any]:
        told = stacks(1, ("/job/train.py", 1, "<module>"))
        return {"rank": 1, "pid": 2, "stacks": told, "activity": {**seen, "ran": ran}}

    assert findings(tmp_path, waits, starting(5.9)) == []
    assert findings(tmp_path, waits, starting(9.2)) == []
    (found,) = findings(tmp_path, waits, starting(70.0))
    assert (found.code, found.ranks) == ("DDP811", (1,))
    # It has a core.
    (found,) = findings(tmp_path, waits, starting(5.9, {**STARVED, "cpu": 0.9}))
    assert (found.code, found.ranks) == ("DDP811", (1,))


def test_a_rank_that_joins_between_two_looks_is_not_late(tmp_path: Path) -> None:
    """It took long to import torch, and at the first look it happened to wait in a poll."""
    waits = {"rank": 0, "pid": 1, "stacks": stacks(0, TRAIN, INIT), "activity": SLEEPS}
    imports = {
        "rank": 1, "pid": 2, "stacks": stacks(1, ("/job/train.py", 1, "<module>")),
        "activity": {**SLEEPS, "network": True},
    }  # fmt: skip
    (found,) = findings(tmp_path, waits, imports)
    assert (found.code, found.ranks) == ("DDP811", (1,))
    assert "waiting for the network" in found.message
    came = {**imports, "later": stacks(1, TRAIN, INIT)}
    assert findings(tmp_path, waits, came) == []
    (found,) = findings(
        tmp_path, waits, {**imports, "later": stacks(1, ("/job/train.py", 2, "<module>"))}
    )
    assert "waiting for the network" not in found.message


@pytest.mark.parametrize(
    "more",
    [
        {"children_cpu": 0.02, "children_busy": 0.9},
        {"children_letters": "R"},
        {"since_children_cpu": 0.05},
    ],
)
def test_a_starved_worker_is_not_deadlocked(tmp_path: Path, more: dict[str, Any]) -> None:
    worker = {"pid": 9, "letter": "R", "cpu_seconds": 0.0, "command": "python train.py"}
    told = stacks(1, TRAIN, (LOADER, 9, "_try_get_data"), state={"children": [worker]})
    absent = rank(1, "data", flight=[], stacks=told, activity={**SLEEPS, **more})
    (found,) = findings(tmp_path, waiting(0), absent, limit=5.0)
    assert (found.code, found.severity) == ("DDP809", Severity.WARNING)
    assert "sleep" not in found.message
    assert findings(tmp_path, waiting(0), {**absent, "lost": 39.0}, limit=5.0) == []


def test_a_writing_thread_without_a_core_is_no_gil_held(tmp_path: Path) -> None:
    silent = late(STEP, STARVED, lost=39.0, silent=5_000_000_000)
    assert findings(tmp_path, waiting(0), silent, limit=5.0) == []
    held = {**silent, "stacks": stacks(1, TRAIN, STEP, gil_held=True)}
    assert [each.code for each in findings(tmp_path, waiting(0), held)] == ["DDP810"]


def test_a_slow_end_is_no_hang(tmp_path: Path) -> None:
    told = {**stacks(0), "threads": [], "trouble": ENDING}
    for seen in (STARVED, {**SLEEPS, "letters": "SR"}, {**SLEEPS, "busy": 0.5, "cpu": 0.01}):
        assert findings(tmp_path, rank(0, "ended", ended=True, stacks=told, activity=seen)) == []


def test_a_launcher_without_a_core_notices_late(tmp_path: Path) -> None:
    died = rank(1, "other", exit={"time": 1_800_000_000_000_000_000 - 20_000_000_000})
    assert [each.code for each in findings(tmp_path, waiting(0), died)] == ["DDP812"]
    codes = [each.code for each in findings(tmp_path, waiting(0), {**died, "launcher_works": True})]
    assert "DDP812" not in codes


# -- endless loops


@pytest.fixture
def endless(tmp_path: Path) -> str:
    path = tmp_path / "data.py"
    path.write_text("def __getitem__(self, index):\n    while True:\n        index += 1\n")
    return str(path)


def test_an_endless_loop_without_a_core_is_one(tmp_path: Path, endless: str) -> None:
    frame = (endless, 3, "poll")
    there = late(frame, STARVED, lost=39.0, later=stacks(1, TRAIN, frame))
    (found,) = findings(tmp_path, waiting(0), there, limit=5.0)
    assert (found.code, found.severity) == ("DDP807", Severity.ERROR)


def test_an_endless_loop_in_a_data_set(tmp_path: Path, endless: str) -> None:
    inner = (endless, 3, "__getitem__")
    frames = (TRAIN, (LOADER, 700, "_next_data"), inner)
    told = {"stacks": stacks(1, *frames), "later": stacks(1, *frames)}
    for seen in ({**SLEEPS, "letters": "RR", "cpu": 1.0}, STARVED):
        (found,) = findings(tmp_path, waiting(0), {**late(STEP, seen), **told})
        assert (found.code, found.severity) == ("DDP807", Severity.ERROR)
        assert str(found.location) == f"{endless}:2"
    # The loop around the loader draws its batches.
    outer = ((endless, 3, "main"), (LOADER, 700, "_next_data"))
    told = {"stacks": stacks(1, *outer), "later": stacks(1, *outer)}
    (found,) = findings(tmp_path, waiting(0), {**late(STEP, STARVED), **told})
    assert (found.code, found.severity) == ("DDP809", Severity.WARNING)


def test_an_endless_loop_in_a_worker(tmp_path: Path, endless: str) -> None:
    frames = ((WORKER, 300, "_worker_loop"), (endless, 3, "__getitem__"))
    seen = stacks(1, *frames, pid=9)
    worker = {"pid": 9, "letter": "R", "cpu_seconds": 9.0, "command": "python train.py"}
    waits = stacks(1, TRAIN, (LOADER, 9, "_try_get_data"), state={"children": [worker]})
    busy = {**SLEEPS, "children_cpu": 1.0, "children_busy": 1.0}
    absent = rank(1, "data", flight=[], stacks=waits, activity=busy, workers=[[seen, seen]])
    (found,) = findings(tmp_path, waiting(0), absent)
    assert (found.code, found.severity) == ("DDP807", Severity.ERROR)
    assert "waits for the worker 9 of its DataLoader, which runs in an endless loop" in (
        found.message
    )
    # At one of the two moments it was elsewhere.
    elsewhere = stacks(1, frames[0], ("/job/other.py", 3, "read"), pid=9)
    absent["workers"] = [[seen, elsewhere]]
    (found,) = findings(tmp_path, waiting(0), absent)
    assert (found.code, found.severity) == ("DDP809", Severity.WARNING)

"""A rank that skipped a batch or an epoch (DDP403)."""

from __future__ import annotations

import ast
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpdoctor.diagnose.source_files import source_of
from ddpdoctor.probe.observers.loaders import Loops
from ddpdoctor.probe.runtime import events
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.run.status import Phase
from tests.support.loop_jobs import ABORTED, BACKWARD, SKIP, STOP, Job
from tests.support.probed import a_rank
from tests.support.written import SECOND, T0, Written

COUNTED = """\
def train(loader, steps):
    step = 0
    while step < steps:
        for batch in loader:
            if broken(batch):
                continue
            loss = model(batch).backward()
            step += 1
            if step >= steps:
                break
"""


@pytest.fixture
def job(written: Written) -> Job:
    return Job(written)


# -- a batch that was skipped


def test_a_batch_that_one_rank_skipped(job: Job) -> None:
    skipped = job.over("ended", 20, 19, idle=[[5, 5, False]], idled=1)
    job.waits(0, [job.loop()], reduced=20)
    job.ends(1, [job.loop(), *job.sites(), skipped], reduced=19)
    assert job.decided() == ((1,), SKIP)


def test_a_batch_that_was_skipped_right_before_native_code_ended_the_rank(job: Job) -> None:
    """The end of its loop was never written; the status page outlived it."""
    lost = {
        "kind": "error", "time": T0, "exception": "RuntimeError", "traceback": "",
        "message": "Connection closed by peer", "path": job.path, "line": BACKWARD, "step": 8,
        "armed": 8, "phase": "backward", "user_frames": [[job.path, BACKWARD, "train"]],
    }  # fmt: skip
    job.written.rank(0, [job.loop(), job.over("failed", 8, 8), lost], reduced=8)
    job.written.exit(0, 1, T0)
    skips = {
        "kind": "loop",
        "loop": 0,
        "time": T0,
        "state": "skips",
        "step": 3,
        "idle": [[3, 3, True]],
    }
    job.written.rank(
        1, [job.loop(), *job.sites(), skips], phase=Phase.WAIT, armed=8, steps=7, reduced=7
    )
    job.written.exit(1, -6, T0 - SECOND)
    words = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  "
    words += "[enforce fail at pair.cc:452] op.preamble.length <= op.nbytes. 68 vs 4. "
    (finding,) = job.written.findings(status=1, stderr=f"[rank1]:{words}\n")
    assert (finding.code, finding.ranks) == ("DDP403", (1,))
    assert "rank 1 took 8 batches and began 7 reduced backwards in it" in finding.evidence


def test_peers_that_were_ended_before_they_told_of_their_failure(job: Job) -> None:
    """The rank that is ahead aborts, and at once its launcher ends the others."""
    job.written.rank(0, [job.loop()], phase=Phase.OTHER, armed=20, steps=19, reduced=20)
    job.written.exit(0, -15, T0 + SECOND // 10)
    skipped = job.over("ended", 20, 19, idle=[[3, 3, False]], idled=1)
    records = [job.loop(), *job.sites(), skipped]
    job.written.rank(1, records, phase=Phase.WAIT, armed=19, steps=19, reduced=19)
    job.written.exit(1, -6, T0)
    (finding,) = job.written.findings(status=1, stderr=ABORTED)
    assert (finding.code, finding.ranks) == ("DDP403", (1,))
    assert "rank 0 took 20 batches and began 20 reduced backwards in it" in finding.evidence


@pytest.mark.parametrize(("line", "codes"), [(BACKWARD, ["DDP403"]), (SKIP, ["DDP803"])])
def test_a_loop_that_an_exception_left_before_it_was_written_was_not_left(
    job: Job, line: int, codes: list[str]
) -> None:
    """The rank that skipped aborts; the other's backward raises, and it is ended before it says."""
    left = job.over("left", 8, 8, left_at=line)
    job.written.rank(
        0, [job.loop(), *job.sites(), left], phase=Phase.OTHER, armed=8, steps=7, reduced=8,
        site=f"{job.path}:{BACKWARD}",
    )  # fmt: skip
    job.written.exit(0, -15, T0 + SECOND)
    skips = {
        "kind": "loop", "loop": 0, "time": T0, "state": "skips", "step": 3, "idle": [[3, 3, True]],
    }  # fmt: skip
    job.written.rank(
        1, [job.loop(), *job.sites(), skips], phase=Phase.WAIT, armed=8, steps=7, reduced=7
    )
    job.written.exit(1, -6, T0)
    found = job.written.findings(status=1, stderr=ABORTED)
    assert [each.code for each in found] == codes
    assert all(each.ranks == (1,) for each in found)


def test_ranks_whose_exit_status_only_mp_spawn_tells(job: Job) -> None:
    job.written.rank(0, [job.loop()], phase=Phase.OTHER, armed=20, steps=19, reduced=20)
    skipped = job.over("ended", 20, 19, idle=[[3, 3, False]], idled=1)
    records = [job.loop(), *job.sites(), skipped]
    job.written.rank(1, records, phase=Phase.WAIT, armed=19, steps=19, reduced=19)
    for rank in (0, 1):
        job.written.exit(rank, 0, T0 + (1 - rank) * SECOND // 10)
        job.written.supervisor[-1]["status"] = None
        with open(job.written.path / f"rank-000{rank}.r0.status", "r+b") as page:
            page.seek(16)
            page.write(struct.pack("<q", 700 + rank))
    words = (
        "W0102 torch/multiprocessing/spawn.py:165] Terminating process 700 via signal SIGTERM\n"
        "torch.multiprocessing.spawn.ProcessExitedException: "
        "process 1 terminated with signal SIGABRT\n"
    )
    (finding,) = job.written.findings(status=1, stderr=ABORTED + words)
    assert (finding.code, finding.ranks) == ("DDP403", (1,))


def test_ranks_that_were_ended_for_another_reason_had_not_come_apart(job: Job) -> None:
    """Rank 0 trains on a batch that rank 1, a moment later, may yet pass over as well."""
    job.written.rank(0, [job.loop()], phase=Phase.BACKWARD, armed=5, steps=4, reduced=5)
    skips = {
        "kind": "loop", "loop": 0, "time": T0, "state": "skips", "step": 3, "idle": [[3, 3, False]],
    }  # fmt: skip
    records = [job.loop(), *job.sites(), skips]
    job.written.rank(1, records, phase=Phase.BACKWARD, armed=4, steps=3, reduced=4)
    for rank in (0, 1):
        job.written.exit(rank, -15, T0 + SECOND // 10)
    assert job.codes() == []


CAUGHT = """\
def train(loader):
    for epoch in range(2):
        for number, batch in enumerate(loader):
            try:
                loss = model(batch)
            except RuntimeError:
                continue
            loss.backward()
"""


def test_a_batch_whose_forward_failed_and_was_passed_over(written: Written) -> None:
    """Behind the forward stands the `continue`, and yet there was none."""
    job = Job(written, CAUGHT)
    sites = [
        {"kind": "site", "phase": phase, "path": job.path, "line": line}
        for phase, line in (("forward", 5), ("backward", 8))
    ]
    skipped = job.over("ended", 20, 19, idle=[[5, 5, False]], idled=1)
    job.waits(0, [job.loop()], reduced=20)
    job.ends(1, [job.loop(), *sites, skipped], reduced=19)
    assert job.decided() == ((1,), 7)


RETURNS = """\
def train(loader):
    for batch in loader:
        step(batch)


def step(batch):
    if broken(batch):
        return
    loss = model(batch)
    if loss > 9:
        return
    loss.backward()
"""


@pytest.mark.parametrize(
    ("skipped_at", "forward", "line"), [((5, 5, False), False, 8), ((5, 5, True), True, 11)]
)
def test_a_batch_that_a_function_returned_from(
    written: Written, skipped_at: tuple[int, int, bool], forward: bool, line: int
) -> None:
    job = Job(written, RETURNS, 2)
    sites = [
        {"kind": "site", "phase": phase, "path": job.path, "line": at}
        for phase, at in (("forward", 9), ("backward", 12))
    ]
    skipped = job.over("ended", 20, 19, idle=[list(skipped_at)], idled=1)
    job.waits(0, [job.loop()], reduced=20)
    job.ends(1, [job.loop(), *sites, skipped], reduced=19)
    assert job.decided() == ((1,), line)


def test_a_function_with_two_ways_out_leaves_the_loop(written: Written) -> None:
    text = RETURNS.replace(
        "    loss = model", "    if batch.late:\n        return\n    loss = model"
    )
    job = Job(written, text, 2)
    site = {"kind": "site", "phase": "backward", "path": job.path, "line": 14}
    skipped = job.over("ended", 20, 19, idle=[[5, 5, False]], idled=1)
    job.waits(0, [job.loop()], reduced=20)
    job.ends(1, [job.loop(), site, skipped], reduced=19)
    assert job.decided() == ((1,), 2)


def test_a_batch_that_all_ranks_skipped(job: Job) -> None:
    for rank in (0, 1):
        skipped = job.over("ended", 20, 19, idle=[[5, 5, False]], idled=1)
        job.ends(rank, [job.loop(), *job.sites(), skipped], reduced=19)
    assert job.codes() == []


def test_a_batch_more_that_was_left_out(job: Job) -> None:
    skipped = job.over("ended", 21, 20, idle=[[20, 20, False]], idled=1)
    job.ends(0, [job.loop(), job.over("ended", 20, 20)], reduced=20)
    job.ends(1, [job.loop(), skipped], reduced=20)
    assert job.codes() == []


def test_a_rank_that_lacks_more_than_it_skipped_has_fewer_batches(job: Job) -> None:
    skipped = job.over("ended", 18, 17, idle=[[5, 5, False]], idled=1)
    job.waits(0, [job.loop()], reduced=20)
    job.ends(1, [job.loop(), *job.sites(), skipped], reduced=17)
    assert job.codes() == ["DDP109"]


@pytest.mark.parametrize(("status", "expected"), [(None, []), (1, ["DDP403"])])
def test_a_loop_that_counts_its_steps_may_make_up_for_it(
    written: Written, status: int | None, expected: list[str]
) -> None:
    job = Job(written, COUNTED, 4)
    skipped = job.over("ended", 20, 19, idle=[[5, 5, False]], idled=1)
    begun = [job.loop(), job.over("ended", 20, 20)]
    if status is None:
        written.rank(0, begun, phase=Phase.FORWARD, reduced=20)
        written.rank(1, [job.loop(), skipped], phase=Phase.FORWARD, reduced=19)
    else:
        job.waits(0, begun, reduced=21)
        job.ends(1, [job.loop(), skipped], reduced=19)
    assert [each.code for each in written.findings(status=status)] == expected


def test_a_loop_that_cannot_make_up_for_it_is_told_at_once(written: Written) -> None:
    plain = "for epoch in range(9):\n    for batch in loader:\n        if model(batch):\n"
    job = Job(written, plain + "            loss.backward()\n", 2)
    site = {"kind": "site", "phase": "backward", "path": job.path, "line": 4}
    skipped = job.over("ended", 20, 19, idle=[[5, 5, True]], idled=1)
    written.rank(0, [job.loop(), job.over("ended", 20, 20)], phase=Phase.FORWARD, reduced=20)
    written.rank(1, [job.loop(), site, skipped], phase=Phase.FORWARD, reduced=19)
    (finding,) = written.findings()
    assert finding.code == "DDP403"
    assert finding.location is not None
    assert finding.location.line == 3


# -- an epoch that was not begun


def epochs(job: Job, count: int) -> list[JsonObject]:
    return [
        record
        for number in range(count)
        for record in (
            job.loop(number, before=10 * number),
            job.over("ended", 10, 10 * number + 10, number=number),
        )
    ]


def test_a_rank_that_began_no_further_epoch(job: Job) -> None:
    job.waits(0, [*epochs(job, 2), job.loop(2, before=20)], reduced=21)
    job.ends(1, epochs(job, 2), reduced=20)
    assert job.decided() == ((1,), STOP)


def test_within_join_a_rank_may_begin_no_further_epoch(job: Job) -> None:
    further = job.loop(2, before=20, joins=True)
    job.waits(0, [*epochs(job, 2), further], reduced=21)
    job.ends(1, epochs(job, 2), reduced=20)
    assert "DDP403" not in job.codes()


def test_a_further_epoch_that_has_not_trained_yet_wants_no_rank(job: Job) -> None:
    job.waits(0, [*epochs(job, 2), job.loop(2, before=20)], reduced=20)
    job.ends(1, epochs(job, 2), reduced=20)
    assert "DDP403" not in job.codes()


CALLED = """\
def epoch(loader):
    for batch in loader:
        model(batch).backward()


def main(loader):
    for number in range(9):
        epoch(loader)
        if evaluate() > best:
            break
"""


def test_an_epoch_is_begun_by_the_caller_of_the_loop(written: Written) -> None:
    job = Job(written, CALLED, 2)
    frames = {"frames": [[job.path, 2], [job.path, 8]]}
    each = [{**record, **frames} if "frames" in record else record for record in epochs(job, 2)]
    job.waits(0, [*each, {**job.loop(2, before=20), **frames}], reduced=21)
    job.ends(1, each, reduced=20)
    assert job.decided() == ((1,), 10)


def test_a_rank_with_fewer_epochs_by_count_took_no_decision(written: Written) -> None:
    text = "for epoch in range(epochs):\n    for batch in loader:\n        step(batch)\n"
    job = Job(written, text, 2)
    job.waits(0, [*epochs(job, 2), job.loop(2, before=20)], reduced=21)
    job.ends(1, epochs(job, 2), reduced=20)
    assert job.codes() == ["DDP801"]


# -- what the source says


@pytest.mark.parametrize(
    ("condition", "counts"),
    [
        ("number >= 10", True),
        ("number >= limit and done == 3", True),
        ("steps >= args.steps", True),
        ("number + 1 == len(loader)", True),
        ("bad >= patience", False),
        ("loss < 0.1", False),
        ("loss.item() < 0.1 and number > 3", False),
        ("number > 3 and rank == 1", False),
        ("stopper.stop", False),
        ("total > number", False),
    ],
)
def test_conditions_that_only_count(tmp_path: Path, condition: str, counts: bool) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "def train():\n"
        "    for number, batch in enumerate(loader):\n"
        "        loss = total = step(batch)\n"
        "        steps += 1\n"
        "        if loss > best:\n"
        "            bad += 1\n"
        f"        if {condition}:\n"
        "            break\n"
    )
    source = source_of(str(path))
    assert source is not None
    loop = source.driven_at(2)
    assert loop is not None
    (leaves,) = source.exits(loop)
    assert isinstance(leaves, ast.Break)
    assert source.counts(leaves) is counts


def test_a_break_belongs_to_its_own_loop(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "for a in b:\n"
        "    while True:\n"
        "        break\n"
        "    else:\n"
        "        break\n"
        "    def f():\n"
        "        return 1\n"
        "    if a: break\n"
    )
    source = source_of(str(path))
    assert source is not None
    loop = source.driven_at(1)
    assert loop is not None
    assert sorted(each.lineno for each in source.exits(loop)) == [5, 8]
    assert source.leaves(8, loop) and not source.leaves(3, loop)


# -- what the probe sees


class Asked:
    """A loader's iterator."""

    _num_yielded = 0


@pytest.fixture
def no_subscribers() -> Iterator[None]:
    """Nobody has subscribed to a moment, before the test and after it."""
    events.forget()
    yield
    events.forget()


@pytest.mark.usefixtures("no_subscribers")
def test_a_loop_that_trains_only_after_another_one_has_trained_is_recorded() -> None:
    told: list[JsonObject] = []
    state = a_rank(told, forwards=0, backward_count=0, reduced=0)
    loops = Loops(state)
    events.subscribe(loops)

    def train() -> None:
        state.tracker.backward_count += 1
        for each in events.forward_begins:
            each(None, True)

    outer, inner = Asked(), Asked()
    for number in range(2):
        loops.loop_turns(outer)
        outer._num_yielded += 1
        if number:
            train()
        else:
            loops.loop_turns(inner)
            train()
            loops.loader_exhausted(inner)
    assert [(each["loop"], each["state"]) for each in told] == [
        (0, "trains"), (0, "ended"), (1, "trains"),
    ]  # fmt: skip
    assert not events.forward_begins, "nothing more is to be seen of it"

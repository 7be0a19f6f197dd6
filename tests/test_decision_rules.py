"""What ranks did with their batches, and what is said of it, on run directories written by hand."""

from __future__ import annotations

import ast
import struct
from pathlib import Path

import pytest

from ddpdoctor.analysis.sources import source_of
from ddpdoctor.core.finding import Finding
from ddpdoctor.run.record import BEFORE_FORWARD, Phase, Record
from ddpdoctor.run.ring import RingWriter
from tests.written import SECOND, T0, Written

JOB = """\
def train(loader, epochs):
    for epoch in range(epochs):
        for number, batch in enumerate(loader):
            if broken(batch):
                continue
            loss = model(batch)
            loss.backward()
            if loss.item() < 0.1:
                break
        if evaluate() > best:
            break
"""
HEADER, SKIP, FORWARD, BACKWARD, BREAK, STOP = 3, 5, 6, 7, 9, 11
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


ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  "
    "[enforce fail at pair.cc:452] op.preamble.length <= op.nbytes. 68 vs 4. \n"
)


class Job:
    """Two ranks of a run, and the script that they ran."""

    def __init__(self, written: Written, text: str = JOB, at: int = HEADER) -> None:
        self.written = written
        self.path = str(written.path / "train.py")
        self.at = at
        Path(self.path).write_text(text)

    def loop(self, number: int = 0, before: int = 0, **facts: object) -> Record:
        """A loop that begins to train."""
        return {
            "kind": "loop", "loop": number, "time": T0, "state": "trains", "step": before,
            "frames": [[self.path, self.at]], "before": before, "joins": False, "idle": [], **facts,
        }  # fmt: skip

    def over(
        self, state: str, fetched: int, after: int, *, number: int = 0, left_at: int = 0,
        **facts: object,
    ) -> Record:  # fmt: skip
        """The end of a loop."""
        where = {"left_at": [[self.path, left_at]]} if left_at else {}
        return {
            "kind": "loop", "loop": number, "time": T0, "state": state, "step": after,
            "fetched": fetched, "after": after, **where, **facts,
        }  # fmt: skip

    def sites(self) -> list[Record]:
        lines = (("forward", FORWARD), ("backward", BACKWARD))
        return [
            {"kind": "site", "phase": name, "path": self.path, "line": line} for name, line in lines
        ]

    def waits(self, rank: int, records: list[Record], reduced: int, seconds: int = 60) -> None:
        """A rank in a backward since that long when it is killed."""
        self.written.rank(
            rank, records, phase=Phase.BACKWARD, armed=reduced, steps=reduced - 1, reduced=reduced
        )
        self.written.exit(rank, -9, T0 + seconds * SECOND)
        self.written.supervisor[-1]["status"] = -15

    def ends(self, rank: int, records: list[Record], reduced: int) -> None:
        """A rank that comes to its regular end."""
        end = {"kind": "end", "time": T0, "steps": reduced, "armed": reduced}
        self.written.rank(rank, [*records, end], armed=reduced, steps=reduced, reduced=reduced)
        self.written.exit(rank, 0, T0)

    def findings(self) -> list[Finding]:
        return self.written.findings(status=1)

    def codes(self) -> list[str]:
        return [each.code for each in self.findings()]

    def decided(self) -> tuple[tuple[int, ...], int]:
        """The ranks and the line of the only finding."""
        (finding,) = self.findings()
        assert finding.code == "DDP403"
        assert finding.location is not None
        assert finding.location.path == self.path
        return finding.ranks, finding.location.line


@pytest.fixture
def job(written: Written) -> Job:
    return Job(written)


# -- a loop that was left


def test_a_rank_that_left_its_loop_while_another_waits(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert job.decided() == ((1,), BREAK)


def test_a_rank_that_had_ended_and_was_stopped_before_it_had_a_core_to_exit(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    # Its launcher stops it once rank 0 has failed.
    job.written.supervisor[-1].update(status=-15, time=T0 + 61 * SECOND)
    assert job.decided() == ((1,), BREAK)


def test_the_same_in_a_job_that_still_runs(job: Job) -> None:
    job.written.rank(0, [job.loop()], phase=Phase.BACKWARD, armed=13, steps=12, reduced=13)
    left = [job.loop(), job.over("left", 12, 12, left_at=BREAK)]
    job.written.rank(1, left, phase=Phase.WAIT, armed=12, steps=12, reduced=12)
    (finding,) = job.written.findings()
    assert (finding.code, finding.ranks) == ("DDP403", (1,))
    assert "in step 12, after 12 batches" in finding.message


def test_an_iterator_that_outlived_its_loop_leaves_the_statement_to_the_source(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12)], reduced=12)
    assert job.decided() == ((1,), BREAK)


def test_all_ranks_left_after_the_same_step(job: Job) -> None:
    for rank in (0, 1):
        job.ends(rank, [job.loop(), job.over("left", 12 + rank, 12, left_at=BREAK)], reduced=12)
    assert job.codes() == []


@pytest.mark.parametrize("left_at", [HEADER, 1])
def test_a_loop_that_no_statement_of_its_own_left(job: Job, left_at: int) -> None:
    """``islice`` or ``zip`` came to their end, or an exception flew and was caught."""
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=left_at)], reduced=12)
    assert job.codes() == ["DDP801"]


def test_within_join_anybody_may_leave(job: Job) -> None:
    loop = job.loop(joins=True)
    job.waits(0, [loop], reduced=13)
    job.ends(1, [loop, job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert "DDP403" not in job.codes()


def test_loops_begun_after_different_steps_are_not_compared(job: Job) -> None:
    job.waits(0, [job.loop(before=3)], reduced=16)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert "DDP403" not in job.codes()


def test_batches_taken_by_hand(written: Written) -> None:
    job = Job(written, "batches = iter(loader)\nwhile True:\n    step(next(batches))\n", 3)
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12)], reduced=12)
    assert job.codes() == ["DDP801"]


def test_without_the_source_nothing_is_claimed(job: Job) -> None:
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    Path(job.path).unlink()
    assert job.codes() == ["DDP801"]


def test_a_rank_that_failed_in_its_loop_decided_nothing(job: Job) -> None:
    failed = {
        "kind": "error", "time": T0, "exception": "ValueError", "message": "no", "traceback": "",
        "path": job.path, "line": FORWARD, "user_frames": [[job.path, FORWARD, "train"]],
    }  # fmt: skip
    job.waits(0, [job.loop()], reduced=13)
    job.written.rank(1, [job.loop(), job.over("failed", 13, 12), failed], reduced=12)
    job.written.exit(1, 1, T0)
    assert job.codes() == ["DDP901"]


def test_an_exception_lets_go_of_the_iterator_before_it_is_told(job: Job) -> None:
    failed = {
        "kind": "error", "time": T0 + 1, "exception": "ValueError", "message": "", "traceback": "",
        "path": "/job/loss.py", "line": 2,
        "user_frames": [[job.path, BREAK, "train"], ["/job/loss.py", 2, "loss"]],
    }  # fmt: skip
    job.waits(0, [job.loop()], reduced=13)
    left = job.over("left", 13, 12, left_at=BREAK)
    job.written.rank(1, [job.loop(), left, failed], reduced=12)
    job.written.exit(1, 1, T0 + 1)
    assert job.codes() == ["DDP901"]


def test_an_exit_within_the_loop_is_told_by_its_call(job: Job) -> None:
    call = {"kind": "exit", "time": T0, "how": "sys.exit", "status": 0, "path": job.path, "line": 4}
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 13, 12), call], reduced=12)
    (finding,) = job.findings()
    assert (finding.code, finding.location and finding.location.line) == ("DDP801", 4)


def test_a_job_that_was_asked_to_stop(job: Job) -> None:
    job.written.supervisor.append({"kind": "signal", "time": T0 - SECOND, "signal": 2})
    job.waits(0, [job.loop()], reduced=13)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert "DDP403" not in job.codes()


def test_a_rank_that_was_only_slower_when_another_node_failed(job: Job) -> None:
    """Rank 0 is in the next epoch, and has not been there for long enough to wait."""
    left = [job.loop(), job.over("left", 12, 12, left_at=BREAK)]
    later = job.loop(number=1, before=12)
    job.written.rank(0, [*left, later], phase=Phase.BACKWARD, armed=13, steps=12, reduced=13)
    job.written.exit(0, -15, T0 + SECOND // 10)
    job.written.rank(1, left, phase=Phase.OTHER, armed=12, steps=12, reduced=12)
    job.written.exit(1, -15, T0 + SECOND // 10)
    assert job.codes() == []


@pytest.mark.parametrize("name", BEFORE_FORWARD)
def test_a_rank_that_waits_in_front_of_its_next_forward(job: Job, name: str) -> None:
    """That forward's own backward need not be a reduced one: gradients are accumulated."""
    job.written.rank(
        0, [job.loop()], phase=Phase.WAIT, armed=12, steps=12, reduced=12, collective=name
    )
    job.written.exit(0, -9, T0 + 60 * SECOND)
    job.written.supervisor[-1]["status"] = -15
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert job.decided() == ((1,), BREAK)


@pytest.mark.parametrize("name", BEFORE_FORWARD)
def test_a_rank_that_is_missed_in_front_of_a_forward(job: Job, name: str) -> None:
    lost = {
        "kind": "error", "time": T0, "exception": "RuntimeError", "traceback": "",
        "message": "Connection closed by peer", "path": job.path, "line": FORWARD, "step": 12,
        "armed": 12, "phase": "wait", "collective": name,
        "user_frames": [[job.path, FORWARD, "train"]],
    }  # fmt: skip
    job.written.rank(0, [job.loop(), job.over("failed", 13, 12), lost], reduced=12)
    job.written.exit(0, 1, T0)
    job.ends(1, [job.loop(), job.over("left", 12, 12, left_at=BREAK)], reduced=12)
    assert job.decided() == ((1,), BREAK)


AHEAD = """\
def train(pairs, persistent):
    for number, batch in enumerate(pairs):
        loss = model(batch)
        if loss.isnan():
            break
        loss.backward()
        dist.all_reduce(number)
    dist.all_reduce(loss)
"""


@pytest.mark.parametrize(("line", "codes"), [(8, ["DDP403"]), (7, [])])
def test_an_iterator_that_outlives_the_rank(written: Written, line: int, codes: list[str]) -> None:
    """It was not let go of; the call that the rank died in says where it had got to."""
    job = Job(written, AHEAD, at=2)
    job.written.rank(0, [job.loop()], phase=Phase.OTHER, armed=5, steps=4, reduced=5)
    job.written.exit(0, -15, T0 + SECOND // 10)
    job.written.rank(1, [job.loop()], phase=Phase.WAIT, armed=5, steps=4, reduced=4)
    job.written.exit(1, -6, T0)
    ring = RingWriter(str(written.path / "rank-0001.r0.collectives"))
    words = ("all_reduce", "0|0-1", "float32", "SUM", f"{job.path}:{line}")
    name, group, dtype, reduce, site = map(ring.text, words)
    ring.begin(T0 - SECOND, 1, (name, group, dtype, reduce, site), (1,), 1, -1, 0)
    found = job.written.findings(status=1, stderr=ABORTED)
    assert [each.code for each in found if each.code == "DDP403"] == codes
    assert [each.location.line for each in found if each.code == "DDP403" and each.location] == [
        5 for _ in codes
    ]


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
    assert job.codes() == ["DDP801"]


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


def epochs(job: Job, count: int) -> list[Record]:
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

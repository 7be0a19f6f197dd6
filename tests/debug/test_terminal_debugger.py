"""``ddpdoctor debug`` and ``ddpdoctor eval`` on real jobs."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable

import pytest

from ddpdoctor.run.records.supervisor import DebugRecord
from ddpdoctor.run.snapshot import Run
from tests.conftest import LIMIT, Doctor, Live, Result
from tests.debug.test_debugger import JOB, PAUSING, mark
from tests.support.pseudo_terminal import Terminal
from tests.support.schemas import check_schema


class Job:
    """A job and the commands that are run on it."""

    def __init__(self, doctor: Doctor) -> None:
        self.doctor = doctor
        self.live: Live

    def start(self, *words: str, options: tuple[str, ...] = (), job: str = str(JOB)) -> None:
        self.live = self.doctor.start(
            "--no-vscode", "--nproc-per-node", "2", *options, "--", job, *words
        )

    def debug(self, *commands: str, options: tuple[str, ...] = ()) -> Result:
        words = [word for command in commands for word in ("-c", command)]
        return self.doctor.run(
            *(sys.executable, "-m", "ddpdoctor", "debug", *options, *words),
            str(self.live.run_dir),
            watch=False,
            timeout=3 * LIMIT,
        )

    def eval(self, expression: str, *options: str) -> Result:
        return self.doctor.cli("eval", *options, expression, str(self.live.run_dir))

    def end(self) -> Result:
        (self.doctor.directory / "stop").touch()
        return self.live.finish()


@pytest.fixture
def job(doctor: Doctor) -> Job:
    return Job(doctor)


def has(state: str) -> Callable[[Run], bool]:
    """A condition: the gateway has reported that state."""
    return lambda run: any(each.state == state for each in run.supervisor.of(DebugRecord))


def places(result: Result) -> list[str]:
    """Where ranks stopped: their ranks and lines."""
    lines = result.stdout.splitlines()
    return [
        f"{head} {line.split(' in ')[0].split(' at ')[-1].rsplit(':', 1)[-1]}"
        for head, line in itertools.pairwise(lines)
        if head.startswith("rank") and " at " in line
    ]


@pytest.mark.slow
def test_both_ranks_at_once(job: Job) -> None:
    job.start("--how", "none")
    job.live.wait_for_steps(2)
    found = job.eval("rank, type(optimizer).__name__, options.how")
    assert found.stdout == "rank 0: (0, 'SGD', 'none')\nrank 1: (1, 'SGD', 'none')\n"
    line = mark("all_reduce")
    # A rank may have passed the line when it is set, and waits for the other one in that step.
    seen = job.debug(
        f"b debugged.py:{line}", "c", "c", "p 6 * 7", "p rank", "rank = 5", "p rank", "n", "up", "q"
    )
    seen.check_success()
    assert places(seen)[-2:] == [f"ranks 0-1: {line}", f"ranks 0-1: {mark('after all_reduce')}"]
    assert "ranks 0-1: 42\nrank 0: 0\nrank 1: 1\nranks 0-1: 5\n" in seen.stdout
    assert "-> train(options)" in seen.stdout
    job.end().check_success()


@pytest.mark.slow
def test_eval_answers_with_json_and_status(job: Job) -> None:
    job.start()
    job.live.wait_for_steps(2)
    found = job.eval("nosuch if rank else total.shape", "--json")
    assert found.status == 1
    document = json.loads(found.stdout)
    check_schema("eval", document)
    assert [each["value"] for each in document["ranks"]] == ["torch.Size([1])", None]
    assert document["ranks"][1]["error"] == "NameError: name 'nosuch' is not defined"
    assert document["groups"] == [[0], [1]]
    assert job.eval("rank", "--ranks", "1").stdout == "rank 1: 1\n"
    assert job.eval("rank", "--ranks", "7").status == 2
    ended = job.end()
    ended.check_success()
    assert "debugger" not in ended.ours
    assert "has ended" in job.eval("rank").stderr


@pytest.mark.slow
def test_eval_says_which_rank_ends_no_step(job: Job) -> None:
    job.start("--how", "away", "--at", "3", "--seconds", "100000")
    job.live.wait_for_steps(3)
    found = job.eval("rank", "--within", "1")
    assert found.status == 1
    assert found.stdout == "ranks 0-1: *** did not end a step within 1 s\n"


@pytest.mark.slow
def test_breakpoints_of_one_rank(job: Job) -> None:
    job.start()
    job.live.wait_for_steps(2)
    line = mark("after all_reduce")
    seen = job.debug(
        "ranks 1", "pause", f"tbreak debugged.py:{line}, rank == 1", "b", "c", "b", "p rank",
        "ranks", "c", "pause", "bt", "ranks all", "q",
    )  # fmt: skip
    assert f"rank 1: {line}" in places(seen)
    once = f"breakpoint at {JOB}:{line} if rank == 1 (temporary, rank 1)"
    assert seen.stdout.count(once) == 2  # As it is set, and listed
    assert "rank 0: runs: step" in seen.stdout
    job.end().check_success()


@pytest.mark.slow
def test_ranks_that_are_held_at_the_start(job: Job) -> None:
    job.start(options=("--wait-for-attach",))
    first = mark("first")
    job.live.wait_for(has("listening"))
    seen = job.debug(f"b debugged.py:{first}", "c", "args", "n", "q")
    seen.check_success()
    assert places(seen)[0] == f"ranks 0-1: {first}"
    assert "no arguments" in seen.stdout
    job.end().check_success()


@pytest.mark.slow
def test_a_rank_that_waits_at_breakpoint(job: Job) -> None:
    job.start(job=str(PAUSING))
    job.live.wait_for(has("waits"))
    seen = job.debug("ranks", "p total", "c", "q")
    after, second = mark("after breakpoint", PAUSING), mark("after second", PAUSING)
    assert places(seen)[0] == f"rank 1: {after}" and f"rank 1: {second}" in places(seen)
    assert "rank 1: tensor([2.])" in seen.stdout
    job.live.finish().check_success()


@pytest.mark.slow
def test_the_exception_that_ends_a_rank(job: Job) -> None:
    job.start("--how", "error", "--at", "2", options=("--debug-on-error",))
    job.live.wait_for(has("waits"))
    seen = job.debug("p wrong", "up", "p options.at", "q", options=("--ranks", "1"))
    seen.check_success()
    assert "ValueError: a bad value: -9" in seen.stdout
    assert places(seen)[0] == f"rank 1: {mark('error')}"
    assert "rank 1: 2\n" in seen.stdout
    assert job.live.finish().status == 1


@pytest.mark.slow
def test_a_prompt_on_a_terminal(job: Job) -> None:
    job.start()
    job.live.wait_for_steps(2)
    words = (sys.executable, "-m", "ddpdoctor", "debug", str(job.live.run_dir))
    with contextlib.closing(Terminal(job.doctor, *words, columns=200)) as terminal:
        terminal.wait_for(b"(ddp) ")
        # Nothing is stopped, so Ctrl-C pauses.
        terminal.interrupt()
        terminal.wait_for(b" in train")
        terminal.type(b"p 6 * 7\r")
        terminal.wait_for(b"42")
        terminal.type(b"q\r")
        assert terminal.finish() == 0
    job.end().check_success()


@pytest.mark.slow
def test_breakpoint_opens_the_prompt_in_the_jobs_terminal(job: Job) -> None:
    options = ("--wait-in-terminal", "--no-vscode", "--debug-port", "0", "--nproc-per-node", "2")
    words = (sys.executable, "-m", "ddpdoctor", "run", *options, "--", str(PAUSING))
    with contextlib.closing(Terminal(job.doctor, *words, columns=200)) as terminal:
        terminal.wait_for(b"(ddp) ")
        terminal.type(b"p total\r")
        terminal.wait_for(b"tensor([2.])\r\n(ddp) ")
        terminal.seen = b""
        # It reaches the prompt, and not the job.
        terminal.interrupt()
        terminal.wait_for(b"(ddp) ")
        terminal.type(b"p total + 40\r")
        terminal.wait_for(b"tensor([42.])")
        terminal.type(b"c\r")
        terminal.wait_for(b"mark: after second")
        terminal.type(b"q\r")
        assert terminal.finish() == 0
        assert b"rank 0 has" in terminal.seen


@pytest.mark.slow
def test_a_run_without_debug_ports(doctor: Doctor) -> None:
    job = Job(doctor)
    job.start(options=("--no-debug",))
    job.live.wait_for(lambda run: bool(run.ranks))
    for words in (("debug", "-c", "q"), ("eval", "1")):
        refused = doctor.cli(*words, str(job.live.run_dir))
        assert (refused.status, refused.stdout) == (2, "")
        assert "was started with --no-debug" in refused.stderr
    refused = doctor.run("--no-debug", "--wait-in-terminal", "--nproc-per-node", "2", "x.py")
    assert "--wait-in-terminal needs the debugger" in refused.stderr
    job.end().check_success()

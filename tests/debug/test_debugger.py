"""Attaching to running ranks, with Microsoft's test client of the Debug Adapter Protocol."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import ProcessGroupGloo

import ddpdoctor
from ddpdoctor.run.records.supervisor import DebugRecord
from tests.conftest import JOBS, LIMIT, ROOT, Doctor
from tests.support.dap_client import DapClient, DapError
from tests.support.debugged import Debugged

JOB = JOBS / "debugged.py"
PACKAGE = Path(ddpdoctor.__file__).parent
PAUSING = JOBS / "pausing.py"

KEEPS_TIMEOUT = not hasattr(ProcessGroupGloo, "set_timeout")
"""gloo keeps the timeout that a group was made with, whatever it is told later (torch 2.4, 2.8)."""

HUGE = b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n"


def mark(name: str, job: Path = JOB) -> int:
    """The line of a job that ends with this mark."""
    lines = job.read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.endswith(f"# mark: {name}"))


def unwrapped(text: str) -> str:
    """What was said, in one line."""
    lines = (line.removeprefix("ddpdoctor: ") for line in text.splitlines())
    return " ".join(" ".join(lines).split())


class Job(Debugged):
    """A job under debugging, and the clients that were attached to it."""

    def start(self, *words: str, options: tuple[str, ...] = (), job: Path = JOB) -> None:
        self.live = self.doctor.start(
            "--debug-port", "0", "--nproc-per-node", "2", *options, "--", str(job), *words
        )

    @property
    def ports(self) -> list[int]:
        ports: list[int] = self.live.wait_for(lambda run: True).manifest["debug"]["ports"]
        return ports

    def client(self, rank: int) -> DapClient:
        client = DapClient(self.modules, self.ports[rank], env=self.doctor.environment())
        self.clients.append(client)
        return client

    def attach(self, rank: int, *marks: str) -> DapClient:
        client = self.client(rank)
        client.attach({JOB: [mark(name) for name in marks]} if marks else None)
        return client

    def wait_for_state(self, state: str, rank: int | None = None, times: int = 1) -> None:
        self.live.wait_for(
            lambda run: (
                times
                <= sum(
                    record.state == state and record.rank in (rank, None)
                    if rank is not None
                    else record.state == state
                    for record in run.supervisor.of(DebugRecord)
                )
            )
        )

    def wait_for_words(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT
        while words not in unwrapped(self.live.err.read_text()):
            assert time.monotonic() < deadline, self.live.err.read_text()
            time.sleep(0.1)

    def pid(self, rank: int) -> int:
        status = self.live.snapshot().ranks[rank].status
        assert status is not None
        return status.pid

    def has_debugpy(self, rank: int) -> bool:
        return "pydevd" in Path(f"/proc/{self.pid(rank)}/maps").read_text()


@pytest.fixture
def job(doctor: Doctor, modules: Path) -> Iterator[Job]:
    job = Job(doctor, modules)
    yield job
    for client in job.clients:
        client.close()


def place(client: DapClient, timeout: float = LIMIT) -> int:
    """The line of the job at which a rank has stopped."""
    return client.stack(client.wait_for_stop(timeout))[0].line


def stop_together(clients: list[DapClient]) -> None:
    """Let the first rank to stop go once more if the last had passed the line by then."""
    deadline = time.monotonic() + LIMIT
    while not all(client.stopped_now() for client in clients) and time.monotonic() < deadline:
        time.sleep(0.1)
    for client in clients:
        if client.stopped_now() and not all(each.stopped_now() for each in clients):
            client.continue_(client.wait_for_stop())


def states_in_top(job: Job) -> list[str]:
    """What ``ddpdoctor top`` shows of each rank."""
    command = [sys.executable, "-m", "ddpdoctor", "top", str(job.live.run_dir), "--json"]
    shown = subprocess.run(
        command, env=job.doctor.environment(), capture_output=True, text=True, check=True
    )
    ranks = sorted(json.loads(shown.stdout)["ranks"], key=lambda row: int(row["rank"]))
    return [str(row["state"]) for row in ranks]


@pytest.mark.slow
def test_two_ranks_from_attach_to_attach_again(job: Job) -> None:
    job.start()
    job.live.wait_for_steps(5)
    assert not job.has_debugpy(0)
    both = [job.attach(0), job.attach(1)]
    assert job.has_debugpy(0)
    for client in both:
        client.set_breakpoints(JOB, [mark("all_reduce")])
    stop_together(both)
    for rank, client in enumerate(both):
        thread = client.wait_for_stop()
        frame = client.stack(thread)[0]
        assert (frame.path, frame.line) == (str(JOB), mark("all_reduce"))
        assert client.evaluate("rank", frame) == str(rank)
        assert client.locals(frame)["rank"] == str(rank)
        # Ours are none of a person's threads.
        assert not any("ddpdoctor" in name for name in client.threads().values())
    assert states_in_top(job) == ["debugger", "debugger"]
    # Over a collective: one rank alone waits for the other.
    both[0].next(1)
    time.sleep(0.5)
    assert not both[0].stopped_now()
    both[1].next(1)
    assert [place(client) for client in both] == [mark("after all_reduce")] * 2
    with pytest.raises(DapError, match="in a debugger already"):
        job.client(0).attach()
    for client in both:
        client.set_breakpoints(JOB, [])
        client.continue_(1)
    both[1].disconnect()
    both[0].set_breakpoints(JOB, [mark("after all_reduce")])
    assert place(both[0]) == mark("after all_reduce")
    both[0].disconnect()  # while it stands there
    moved = job.pid(0)
    again = job.attach(0, "after all_reduce")
    frame = again.stack(again.wait_for_stop())[0]
    assert again.evaluate("__import__('os').getpid()", frame) == str(moved)
    again.disconnect()
    result = job.end()
    result.check_success()
    # On Python 3.11 debugpy itself would leave tracing on.
    assert result.stdout.count("traced False") == 2
    assert result.codes == []


@pytest.mark.slow
def test_a_rank_that_waits_for_another(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    # The compiled core has no frames here.
    monkeypatch.setenv("DDPDOCTOR_PURE_PYTHON", "1")
    job.start("--at", "3", "--how", "away", "--seconds", "30")
    job.live.wait_for_steps(3)
    client = job.attach(0)
    main = next(number for number, name in client.threads().items() if name.endswith("MainThread"))
    lines = [frame.line for frame in client.stack(main) if frame.path == str(JOB)]
    assert lines[0] in (mark("all_reduce"), mark("all_reduce") - 2), lines
    frames = client.request("stackTrace", {"threadId": main})["stackFrames"]
    ours = [frame for frame in frames if frame["source"]["path"].startswith(f"{PACKAGE}/")]
    # Else VS Code opens these, instead of the line of the user.
    assert ours
    assert all(frame.get("presentationHint") == "subtle" for frame in ours)
    away = job.attach(1)
    main = next(number for number, name in away.threads().items() if name.endswith("MainThread"))
    assert mark("away") in [frame.line for frame in away.stack(main)]
    client.disconnect()
    away.disconnect()
    job.end().check_success()


@pytest.mark.slow
def test_a_rank_that_holds_the_lock_of_python(job: Job) -> None:
    job.start("--at", "3", "--how", "gil", "--seconds", "30")
    job.live.wait_for_steps(3)
    time.sleep(0.5)
    with pytest.raises(DapError, match=r"rank 1 .*does not answer: .*`ddpdoctor stacks`"):
        job.attach(1)
    job.end().check_success()


@pytest.mark.slow
def test_every_rank_is_held_until_one_is_attached(job: Job) -> None:
    job.start("--steps", "3", options=("--wait-for-attach", "1"))
    job.wait_for_state("listening")
    time.sleep(1.0)
    assert job.live.snapshot().ranks == ()
    client = job.attach(1, "first", "loop")
    assert place(client) == mark("first")
    client.continue_(1)
    assert place(client) == mark("loop")
    client.disconnect()
    result = job.end()
    result.check_success()
    assert "all ranks listening on 127.0.0.1:" in result.stderr
    assert result.ours.count("waits for") <= 1


@pytest.mark.slow
def test_ranks_that_wait_for_one_in_the_debugger(job: Job) -> None:
    job.start("--timeout", "3")
    job.live.wait_for_steps(3)
    client = job.attach(1, "loop")
    assert place(client) == mark("loop")
    job.wait_for_words("rank 1 is held by the debugger at")
    job.wait_for_words("rank 0 waits for it in")
    if KEEPS_TIMEOUT:
        result = job.live.finish()
        assert result.status == 1
        words = "this torch's gloo keeps its timeout of 3 s, after which they fail"
        assert words in unwrapped(result.ours)
        return
    other = job.attach(0, "loop")
    # Longer than the timeout of the group.
    time.sleep(5)
    client.set_breakpoints(JOB, [])
    client.continue_(1)
    assert place(other) == mark("loop")
    other.disconnect()
    client.disconnect()
    result = job.end()
    result.check_success()
    assert result.stdout.count("timeout 3,") == 2
    assert result.ours.count("held by the debugger") == 1


@pytest.mark.slow
@pytest.mark.skipif(KEEPS_TIMEOUT, reason="gloo keeps the timeout that its group was made with")
def test_a_pause_of_90_seconds(job: Job) -> None:
    job.start("--timeout", "10")
    job.live.wait_for_steps(3)
    client = job.attach(1, "loop")
    assert place(client) == mark("loop")
    time.sleep(90)
    client.disconnect()
    time.sleep(2)
    result = job.end()
    result.check_success()
    assert result.stdout.count("timeout 10,") == 2


@pytest.mark.slow
def test_all_of_eight_ranks(job: Job) -> None:
    job.start(options=("--nproc-per-node", "8", "--wait-for-attach"))
    job.wait_for_state("listening")
    clients = [job.attach(rank, "loop") for rank in range(8)]
    assert [place(client, 120) for client in clients] == [mark("loop")] * 8
    for client in clients:
        client.disconnect()
    job.end().check_success()


@pytest.mark.slow
def test_a_client_that_vanishes_and_a_rank_that_does(job: Job) -> None:
    job.start()
    job.live.wait_for_steps(3)
    client = job.attach(1, "loop")
    assert place(client) == mark("loop")
    client.kill()
    job.wait_for_state("detached")
    before = job.live.snapshot().ranks[1].status
    assert before is not None
    job.live.wait_for_steps(before.step + 10)
    client = job.attach(1, "loop")
    assert place(client) == mark("loop")
    os.kill(job.pid(1), signal.SIGKILL)
    client.wait_for_event("terminated", 5)
    result = job.live.finish()
    assert result.status == 1
    assert result.codes == ["DDP902"]


@pytest.mark.slow
def test_a_rank_that_torchrun_starts_again(job: Job) -> None:
    job.start("--how", "restart", "--steps", "5", options=("--max-restarts", "1"))
    job.wait_for_state("ready", times=2)
    client = job.attach(1, "first attempt")
    frame = client.stack(client.wait_for_stop())[0]
    first = client.evaluate("first", frame)
    client.disconnect()
    (job.doctor.directory / "restart").touch()
    job.wait_for_state("gone", times=2)
    again = job.attach(1, "loop")
    frame = again.stack(again.wait_for_stop())[0]
    assert again.evaluate("__import__('os').getpid()", frame) != first
    again.disconnect()
    job.end().check_success()


@pytest.mark.slow
@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_data_loader_workers_are_left_alone(job: Job, context: str) -> None:
    words = ["--steps", "4", "--workers", "2", "--context", context]
    job.start(*words, options=("--wait-for-attach",))
    job.wait_for_state("listening")
    clients = [job.attach(0, "worker"), job.attach(1, "worker", "loop")]
    assert place(clients[1], 60) == mark("loop")
    # Verified before the first batch; no debugger is in the workers that run it.
    changed = clients[1].wait_for_event("breakpoint")["breakpoint"]
    assert (changed["verified"], changed["line"]) == (False, mark("worker"))
    with pytest.raises(DapError, match="num_workers=0"):
        clients[1].set_breakpoints(JOB, [mark("worker"), mark("loop")])
    clients[1].disconnect()
    result = job.live.finish()
    result.check_success()


@pytest.mark.slow
def test_breakpoint_in_the_code_waits_for_a_client(job: Job) -> None:
    job.start(job=PAUSING)
    line = mark("breakpoint", PAUSING)
    job.wait_for_words(f'pausing.py:{line}; attach with F5 "rank 1 (ddpdoctor)"')
    # Rank 0 waits in its all_reduce meanwhile, for longer than the timeout of the group.
    time.sleep(5)
    client = job.attach(1)
    assert place(client) == mark("after breakpoint", PAUSING)
    client.continue_(1)
    assert place(client) == mark("after second", PAUSING)
    client.disconnect()
    result = job.live.finish()
    result.check_success()
    assert "rank 0 has 6" in result.stdout
    assert result.ours.count("attach with F5") == 1


@pytest.mark.slow
def test_breakpoint_is_pythons_own_without_the_debugger(doctor: Doctor) -> None:
    words = ("--nproc-per-node", "2", "--", str(PAUSING))
    result = doctor.run("--no-debug", *words)
    assert "BdbQuit" in result.stderr or "EOFError" in result.stderr
    assert result.status == doctor.torchrun(*words).status == 1
    chosen = doctor.run("--debug-port", "0", *words, env={"PYTHONBREAKPOINT": "0"})
    chosen.check_success()


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_at_a_breakpoint(job: Job) -> None:
    job.start(job=PAUSING)
    job.wait_for_words("attach with F5")
    job.live.process.send_signal(signal.SIGINT)
    result = job.live.finish()
    assert result.status == 1
    assert "KeyboardInterrupt" in result.stderr


@pytest.mark.slow
def test_an_uncaught_exception_is_held(job: Job) -> None:
    job.start("--at", "3", "--how", "error", "--timeout", "3", options=("--debug-on-error",))
    job.wait_for_words("rank 1 is held by an uncaught exception at")
    assert "ValueError: a bad value" in job.live.err.read_text()
    time.sleep(5)
    client = job.attach(1)
    frame = client.stack(client.wait_for_stop())[0]
    assert frame.line == mark("error")
    assert client.locals(frame)["wrong"].startswith("-")
    client.continue_(1)
    client.wait_for_event("terminated")
    result = job.live.finish()
    assert result.status == 1
    assert result.codes == ["DDP901"]


@pytest.mark.slow
def test_what_is_no_debugger_starts_none(job: Job) -> None:
    job.start()
    job.live.wait_for_steps(3)
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 300, HUGE):
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", job.ports[0])) as connection,
        ):
            connection.sendall(words)
    time.sleep(1.0)
    assert not job.has_debugpy(0)
    client = job.attach(0)
    client.disconnect()
    result = job.end()
    result.check_success()
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_taken_port_moves_the_block(doctor: Doctor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ("--nproc-per-node", "2", "--", str(JOB), "--steps", "2")
        result = doctor.run("--debug-port", str(port), *words)
    result.check_success()
    said = unwrapped(result.ours)
    assert f"not all of ports {port}-{port + 1} are free; debuggers attach at {port + 2}-" in said
    launch = json.loads(
        "\n".join(
            line.partition("//")[0]
            for line in (doctor.directory / ".vscode" / "launch.json").read_text().splitlines()
        )
    )
    ports = [each["connect"]["port"] for each in launch["configurations"]]
    assert ports[1:] == [port + 2, port + 3]


@pytest.mark.slow
def test_f5_in_this_repository(job: Job) -> None:
    """The repository's own task starts ResNet-50, and its configurations stand in the loop."""
    tasks, launch = (
        json.loads(re.sub(r"// \S.*", "", (ROOT / ".vscode" / f"{name}.json").read_text()))
        for name in ("tasks", "launch")
    )
    run, _, *ranks = launch["configurations"]
    assert run["name"] == "ddpdoctor: run + attach"
    task = next(t for t in tasks["tasks"] if t["label"] == run["preLaunchTask"])
    assert task["args"][:3] == ["-m", "ddpdoctor", "run"]
    *options, script, break_at, first = task["args"][3:]
    more = ("--iterations", "3", "--batch-size", "1", "--image-size", "33")
    path = ROOT / script
    job.live = job.doctor.start(
        *options, "--debug-port", "0", "--no-vscode", str(path), break_at, first, *more
    )
    job.wait_for_state("listening")
    background = task["problemMatcher"]["background"]
    said = job.live.err.read_text().splitlines()
    for pattern in (background["beginsPattern"], background["endsPattern"]):
        assert any(re.search(pattern, line) for line in said), (pattern, said)
    assert [each["name"] for each in ranks] == ["rank 0 (ddpdoctor)", "rank 1 (ddpdoctor)"]
    clients = [job.attach(rank) for rank in range(len(ranks))]
    for rank, client in enumerate(clients):
        frame = client.stack(client.wait_for_stop())[0]
        assert (frame.name, frame.path) == ("train", str(path))
        assert client.evaluate("world.rank, iteration", frame) == f"({rank}, 1)"
        assert client.evaluate("sum(p.numel() for p in model.parameters())", frame) == "25557032"
    # VS Code's Stop: the focused session, then its siblings.
    for client in clients:
        client.leave(terminate=client is not clients[0])
    result = job.live.finish()
    assert "the job was ended by the debugger" in unwrapped(result.ours)
    assert result.codes == []


@pytest.mark.slow
def test_nothing_listens_after_the_run(job: Job) -> None:
    job.start("--steps", "3")
    job.live.wait_for(lambda run: True)
    ports = job.ports
    job.end().check_success()
    listening = {
        each.laddr.port
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr
    }
    assert not listening & set(ports)

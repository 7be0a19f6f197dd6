"""`ddpdoctor run --notify`: what a webhook and a command are sent; the job waits for none."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.job import Command, OwnOptions
from ddpdoctor.core.relations import STANDSTILL
from ddpdoctor.run.reported import Reported, Withdrawn
from ddpdoctor.run.snapshot import Run
from ddpdoctor.supervise import notify
from ddpdoctor.supervise.notify import Notifications
from tests.conftest import Doctor
from tests.support.launching import PYTHON, wait_until

HUNG = Finding(
    "DDP802", Severity.ERROR, "rank 1 <!channel> never joined", (1,), fix="Let it join.",
    subjects=frozenset((STANDSTILL,)),
)  # fmt: skip
RAISED = Finding("DDP901", Severity.ERROR, "rank 1 raised", (1,))
SLOW = Finding("DDP610", Severity.WARNING, "rank 1 is slow", (1,))
RUN = Run(Path("/runs/20261122-140203-9f31c2"), {"id": "20261122-140203-9f31c2"}, (), taken=10**18)


class Hook:
    """A webhook that answers as it is told to."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []
        self.answers = [200]
        self.free = threading.Event()
        self.free.set()
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                size = int(self.headers["Content-Length"])
                assert self.headers["Content-Type"] == "application/json"
                hook.bodies.append(json.loads(self.rfile.read(size)))
                hook.free.wait()
                self.send_response(
                    hook.answers.pop(0) if len(hook.answers) > 1 else hook.answers[0]
                )
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/services/secret"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(notify, "RETRY_DELAY", 0.01)
    hook = Hook()
    yield hook
    hook.free.set()
    hook.server.shutdown()
    hook.server.server_close()
    hook.thread.join()


def notifications(said: list[str], *targets: str) -> Notifications:
    own = OwnOptions(notify=targets)
    return Notifications(Command(("x",), own, "", False, script="train.py"), said.append)


def test_a_webhook_gets_what_matters_in_slacks_words(hook: Hook) -> None:
    said: list[str] = []
    sent = notifications(said, hook.url)
    events = [Reported(1, HUNG, 0), Reported(2, SLOW, 0), Reported(3, RAISED, 0)]
    sent.news(RUN, [*events, Withdrawn(4, events[0], "over", "the job goes on")])
    wait_until(lambda: len(hook.bodies) == 3)
    sent.end(RUN, 1, [RAISED])
    wait_until(lambda: len(hook.bodies) == 4)
    assert [each["event"] for each in hook.bodies] == ["hang", "crash", "withdrawn", "end"]
    first, last = hook.bodies[0], hook.bodies[3]
    assert "train.py on " in first["text"]
    assert "error DDP802: rank 1 &lt;!channel&gt; never joined\nfix: Let it join." in first["text"]
    assert (first["format"], first["run"]) == (1, "20261122-140203-9f31c2")
    assert first["finding"]["message"] == HUNG.message
    assert (last["status"], last["finding"]) == (1, None)
    assert last["text"].endswith("findings: 1 error")
    assert said == []


def test_a_failure_is_tried_once_more_and_said_once_without_the_secret(hook: Hook) -> None:
    said: list[str] = []
    hook.answers = [500, 200, 404]
    sent = notifications(said, hook.url)
    sent.news(RUN, [Reported(1, HUNG, 0)])
    wait_until(lambda: len(hook.bodies) == 2)
    sent.news(RUN, [Reported(2, RAISED, 0), Reported(3, RAISED, 0)])
    wait_until(lambda: len(hook.bodies) == 6)
    wait_until(lambda: bool(said))
    sent.end(RUN, 0, [])
    assert said == ["warning: --notify 127.0.0.1: HTTP 404 Not Found; the job goes on"]


def test_an_answer_that_never_comes_holds_nothing(hook: Hook) -> None:
    hook.free.clear()
    sent = notifications([], hook.url)
    sent.news(RUN, [Reported(1, HUNG, 0)])
    sent.end(RUN, 0, [])
    wait_until(lambda: len(hook.bodies) == 1)
    assert not hook.free.is_set()


def test_nothing_that_listens_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_DELAY", 0.01)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    said: list[str] = []
    sent = notifications(said, "http://127.0.0.1:1/x", "exit 7")
    sent.news(RUN, [Reported(1, HUNG, 0)])
    wait_until(lambda: len(said) == 2)
    assert any("Connection refused" in line for line in said)
    assert "warning: --notify exit: exit status 7; the job goes on" in said


def test_a_command_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_DELAY", 0.01)
    monkeypatch.setattr(notify, "SEND_TIMEOUT", 0.2)
    said: list[str] = []
    sent = notifications(said, "sleep 600")
    sent.news(RUN, [Reported(1, HUNG, 0)])
    wait_until(lambda: bool(said))
    assert said == ["warning: --notify sleep: not over after 0.2 s, and ended; the job goes on"]
    assert sent.pids == set()


@pytest.mark.slow
def test_a_job_that_fails_is_sent_to_a_command_and_ends_as_it_would(doctor: Doctor) -> None:
    source = "import torch.distributed as d\nd.init_process_group('gloo')\n1/0\n"
    doctor.write("fails.py", source)
    options = ("--nproc-per-node", "1", "--no-vscode", "--notify", "cat >> sent.jsonl")
    result = doctor.run(*options, "fails.py")
    assert result.status == 1
    assert "left behind" not in result.ours
    sent = doctor.directory / "sent.jsonl"
    wait_until(lambda: sent.exists() and len(sent.read_text().splitlines()) == 2)
    crash, end = map(json.loads, sent.read_text().splitlines())
    assert (crash["event"], crash["finding"]["code"]) == ("crash", "DDP901")
    assert (end["event"], end["status"]) == ("end", 1)
    assert "failed with exit status 1; findings: 1 error" in end["text"]
    assert end["run"] == result.run.manifest["id"]


def test_a_slow_command_is_no_process_of_the_job(doctor: Doctor) -> None:
    doctor.write("waits.py", "import time\n")
    options = ("--no-vscode", "--notify", "sleep 3; cat > sent.json")
    result = doctor.run(*options, "--", PYTHON, "waits.py")
    assert result.status == 0
    assert "left behind" not in result.ours
    sent = doctor.directory / "sent.json"
    wait_until(lambda: sent.exists() and bool(sent.read_text()))
    assert json.loads(sent.read_text())["event"] == "end"

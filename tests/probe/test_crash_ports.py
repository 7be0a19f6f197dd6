"""Ports and addresses that a store could not open."""

from __future__ import annotations

import json
import os
import socket

import pytest

from ddpdoctor.probe.observers import job_launch
from ddpdoctor.probe.runtime.sites import NOWHERE
from ddpdoctor.run.records.base import JsonObject
from tests.support.crash_records import error
from tests.support.written import T0, Written

# -- ports


TAKEN = (
    "The server socket has failed to listen on any local network address. port: 29501, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
)


@pytest.mark.parametrize(
    ("facts", "said", "fix"),
    [
        ({"ours": True, "rank": "1"}, "another process of this job holds it (pid 9, started as "
         "rank 1)", "its own rank"),
        ({"ours": True, "spawned": True}, "another process of this job", "mp.spawn"),
        ({"ours": False}, "a process of another job holds it (pid 9)", "--master-port"),
        ({"ours": True, "itself": True}, "this process holds it already", "Open the store once"),
        (None, "another process holds the port", "--master-port"),
    ],
)  # fmt: skip
def test_who_holds_a_port(written: Written, facts: JsonObject | None, said: str, fix: str) -> None:
    file: JsonObject = {"port": 29501}
    if facts is not None:
        file |= {"holder": {"pid": 9, "name": "python a.py", **facts}, **facts}
    written.rank(0, [error("torch.distributed.DistNetworkError", TAKEN, file=file)])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=1)
    assert finding.code == "DDP002"
    assert said in finding.message
    assert fix in finding.fix


def test_a_long_name_of_a_holder_is_cut(written: Written) -> None:
    holder = {"pid": 9, "name": "x" * 101, "ours": False}
    file = {"port": 29501, "holder": holder}
    written.rank(0, [error("torch.distributed.DistNetworkError", TAKEN, file=file)])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=1)
    (line,) = [each for each in finding.evidence if each.startswith("pid 9 holds it: ")]
    assert len(line.removeprefix("pid 9 holds it: ")) == 100


def test_a_port_that_no_rank_opens(written: Written) -> None:
    words = "The client socket has timed out after 6000ms while trying to connect to (h, 23457)."
    store = {
        "kind": "own_store", "time": T0, "restart": 0, "rank": 0, "host": "h", "port": "23457",
        "launcher": "localhost:37481", "spawned": False,
    }  # fmt: skip
    (written.path / "process-7.jsonl").write_text(json.dumps(store) + "\n")
    written.rank(0, [error("torch.distributed.DistNetworkError", words)])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=1)
    assert finding.message == "rank 0 waited for a store at h:23457 that no rank opens"
    assert "torchrun keeps the job's store at localhost:37481" in finding.evidence
    assert "env://" in finding.fix


def test_a_process_that_a_worker_started_opens_no_store(written: Written) -> None:
    words = "The client socket has timed out after 2000ms while trying to connect to (h, 23457)."
    store = {
        "kind": "own_store", "time": T0, "restart": 0, "rank": 0, "host": "h", "port": "23457",
        "launcher": "localhost:37481", "spawned": True,
    }  # fmt: skip
    (written.path / "process-7.jsonl").write_text(json.dumps(store) + "\n")
    written.rank(0, [error("torch.distributed.DistNetworkError", words)])
    written.exit(0, 1, T0)
    (finding,) = written.findings(status=1)
    assert "a worker of torchrun started this process" in finding.evidence
    assert "env://" not in finding.fix


def test_the_holder_of_a_port_is_found() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        found = job_launch.port_facts(TAKEN.replace("29501", str(port)))
    assert found is not None and found.holder is not None
    assert found.holder.pid == os.getpid()
    assert found.holder.itself
    assert job_launch.port_facts("Connection refused") is None


@pytest.mark.parametrize(
    ("method", "agent", "opened"),
    [
        ("tcp://127.0.0.1:23456", "True", False),
        ("tcp://127.0.0.1:29400", "True", True),
        ("tcp://127.0.0.1:23456", "False", True),
        ("env://", "True", True),
        (None, "True", True),
        ("file:///tmp/store", "True", True),
    ],
)
def test_an_address_that_no_rank_opens(
    monkeypatch: pytest.MonkeyPatch, method: str | None, agent: str, opened: bool
) -> None:
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    monkeypatch.setattr(job_launch, "_initial_environment", lambda: given)
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": agent}.items():
        monkeypatch.setenv(name, value)
    assert (job_launch.unopened_store({"init_method": method}, NOWHERE) is None) == opened
    assert job_launch.unopened_store({"init_method": method, "store": object()}, NOWHERE) is None

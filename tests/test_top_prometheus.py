"""The run in Prometheus' text format, as a real client reads it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.top import demo
from ddpdoctor.top.prometheus import Exporter, address
from ddpdoctor.top.snapshot import Snapshot, Verdict
from ddpdoctor.top.source import ALL
from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor


def scrape(port: int) -> dict[str, list[Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        text = answer.read().decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


@pytest.fixture
def shown() -> list[Snapshot | None]:
    return [demo.at(700, 1000, ALL)]


@pytest.fixture
def exporter(shown: list[Snapshot | None]) -> Iterator[Exporter]:
    exporter = Exporter((LOOPBACK, 0), lambda: shown[0])
    yield exporter
    exporter.close()


def test_what_dcgm_lacks_with_its_labels(exporter: Exporter, shown: list[Snapshot | None]) -> None:
    found = scrape(exporter.port)
    snapshot = shown[0]
    assert snapshot is not None
    phases = found["ddpdoctor_rank_phase_seconds"]
    assert len(phases) == 8 * 6
    (data,) = (
        each for each in phases if each.labels["rank"] == "5" and each.labels["phase"] == "data"
    )
    row = snapshot.ranks[0]
    assert row.times is not None and data.value == pytest.approx(row.times.data)
    assert data.labels == {
        "rank": "5",
        "local_rank": "1",
        "run": "demo",
        "Hostname": "node-b",
        "gpu": "1",
        "UUID": "GPU-00000000-0000-4000-8000-000000000005",
        "device": "nvidia1",
        "modelName": "NVIDIA H100 80GB HBM3",
        "phase": "data",
        "split": "true",
    }
    assert {each.value for each in found["ddpdoctor_rank_steps"]} == {3153.0}
    assert {each.name for each in found["ddpdoctor_rank_steps"]} == {"ddpdoctor_rank_steps_total"}
    assert found["ddpdoctor_restarts"][0].name == "ddpdoctor_restarts_total"
    (samples,) = found["ddpdoctor_samples_per_second"]
    assert samples.value == pytest.approx(8 * 64 / 0.222)
    assert len(found["ddpdoctor_rank_heartbeat_age_seconds"]) == 8
    (step,) = found["ddpdoctor_step_seconds"]
    assert step.value == pytest.approx(0.221, abs=0.01)
    (finding,) = found["ddpdoctor_findings"]
    assert (finding.labels["code"], finding.labels["severity"], finding.value) == (
        "DDP610",
        "warning",
        1.0,
    )
    assert found["ddpdoctor_run_up"][0].value == 1.0


def test_what_is_not_known_has_no_sample(exporter: Exporter, shown: list[Snapshot | None]) -> None:
    snapshot = shown[0]
    assert snapshot is not None
    bare = [replace(row, times=None, gpu=None, heartbeat=None, rss=None) for row in snapshot.ranks]
    shown[0] = replace(snapshot, ranks=tuple(bare), median=None)
    found = scrape(exporter.port)
    for name in ("rank_phase_seconds", "rank_heartbeat_age_seconds", "step_seconds"):
        assert found[f"ddpdoctor_{name}"] == []
    assert found["ddpdoctor_rank_steps"][0].labels["UUID"] == ""
    shown[0] = None
    assert scrape(exporter.port) == {}
    shown[0] = Snapshot(1.0, "machine", Verdict("no run"))
    assert scrape(exporter.port) == {}
    shown[0] = replace(snapshot, live=False, state="ended")
    assert scrape(exporter.port) == {}, "the series of a run that is over go away"


def test_the_dashboard_shows_what_there_is(exporter: Exporter) -> None:
    text = (Path(__file__).parents[1] / "docs" / "grafana.json").read_text()
    queries = [
        target["expr"]
        for panel in json.loads(text)["panels"]
        for target in panel.get("targets", ())
    ]
    assert len(queries) > 8
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics") as answer:
        names = set(re.findall(r"^(ddpdoctor_\w+)", answer.read().decode(), re.MULTILINE))
    asked = {name for query in queries for name in re.findall(r"ddpdoctor_\w+", query)}
    assert asked and asked <= names


def test_it_serves_without_a_terminal(doctor: Doctor) -> None:
    command = [sys.executable, "-m", "ddpdoctor", "top", "--demo", "--prometheus", "0"]
    with subprocess.Popen(
        command, env=doctor.environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            port = int(process.stderr.readline().rpartition(":")[2].partition("/")[0])
            deadline = time.monotonic() + LIMIT
            while "ddpdoctor_run_up" not in scrape(port):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) in (0, 130)


def test_only_this_machine_may_ask(exporter: Exporter) -> None:
    assert exporter._server.server_address[0] == "127.0.0.1"


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(DoctorError, match="cannot serve metrics at"):
            Exporter(taken.getsockname(), lambda: None)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("9400", ("127.0.0.1", 9400)),
        ("0.0.0.0:9400", ("0.0.0.0", 9400)),
        ("[::]:1", ("::", 1)),
        ("host:0", ("host", 0)),
    ],
)
def test_addresses(text: str, place: tuple[str, int]) -> None:
    assert address(text) == place


@pytest.mark.parametrize("text", ["", "x", "host:", ":9400", "70000", "-1", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(DoctorError, match="PORT or HOST:PORT"):
        address(text)

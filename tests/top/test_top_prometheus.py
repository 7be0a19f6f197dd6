"""The run in Prometheus' text format, as a real client reads it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
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
from ddpdoctor.top import prometheus, recording
from ddpdoctor.top.prometheus import Exporter, address
from ddpdoctor.top.snapshot import Snapshot, Verdict
from tests.conftest import LIMIT

if TYPE_CHECKING:
    from tests.conftest import Doctor

DOCS = Path(__file__).parents[2] / "docs"

PROMQL = {"sum", "quantile", "topk", "rate", "by", "on", "and"}
"""The words of the query language that the dashboard uses."""

SELECTOR = re.compile(r"([A-Za-z_]\w*)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|on|without|ignoring)\s*\(([^)]*)\)")


def scrape(port: int) -> dict[str, list[Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT) as answer:
        text = answer.read().decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


@pytest.fixture
def shown() -> list[Snapshot | None]:
    return [recording.at(700, 1000)]


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


def labels(port: int) -> dict[str, set[str]]:
    """The labels of each series that is served."""
    found: dict[str, set[str]] = {}
    for samples in scrape(port).values():
        for sample in samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def dashboard() -> dict[str, Any]:
    return dict(json.loads((DOCS / "grafana.json").read_text()))


def targets() -> list[tuple[str, str]]:
    """The queries of the dashboard, each with what its series are called."""
    return [
        (target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    ]


def listed(text: str) -> set[str]:
    return {each.strip() for each in text.split(",") if each.strip()}


def misnamed(query: str, legend: str, served: dict[str, set[str]]) -> set[str]:
    """Series, labels and variables in a query and its legend that do not exist."""
    variables = {each["name"] for each in dashboard()["templating"]["list"]}
    wrong = {f"${each}" for each in re.findall(r"\$\{?(\w+)", query)} - {
        f"${each}" for each in variables
    }
    grouped = [listed(each) for each in GROUPING.findall(query)]
    rest = SELECTOR.sub(r"\1", GROUPING.sub("", query))
    names = re.findall(r"[A-Za-z_]\w*", re.sub(r"\[\w+\]", "", rest))
    series = [each for each in names if each not in PROMQL]
    wrong |= {*series} - {*served}
    known: list[set[str]] = [served.get(each, set()) for each in series]
    for group in grouped:
        wrong |= {each for each in group if not all(each in of_one for of_one in known)}
    for name, inside in SELECTOR.findall(query):
        wrong |= {*re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", inside)} - served.get(name, set())
    # Of an aggregation the labels are left that it is made by.
    aggregated = re.match(r"(?:sum|quantile)\b", query) is not None
    left = grouped[0] if aggregated and grouped else set() if aggregated else known[0]
    return wrong | {*re.findall(r"\{\{\s*(\w+)\s*\}\}", legend)} - left


def test_the_dashboard_asks_for_what_there_is(exporter: Exporter) -> None:
    served = labels(exporter.port)
    assert len(targets()) > 8
    for query, legend in targets():
        assert not misnamed(query, legend, served), query
    queries = [each["query"] for each in dashboard()["templating"]["list"]]
    (values,) = [each for each in queries if each != "prometheus"]
    found = re.fullmatch(r"label_values\((\w+), (\w+)\)", values)
    assert found is not None and found[2] in served[found[1]]


@pytest.mark.parametrize(
    ("query", "legend", "wrong"),
    [
        ("ddpdoctor_steps", "", {"ddpdoctor_steps"}),
        ("ddpdoctor_rank_steps", "", {"ddpdoctor_rank_steps"}),
        ('rate(DCGM_FI_DEV_GPU_UTIL{gpu="0"}[1m])', "", {"DCGM_FI_DEV_GPU_UTIL", "gpu"}),
        ('ddpdoctor_loss{rank="0"}', "{{run}}", {"rank"}),
        ('ddpdoctor_loss{run=~"$job"}', "", {"$job"}),
        ("sum by (phase) (ddpdoctor_rank_own_seconds)", "", {"phase"}),
        ("sum by (run) (ddpdoctor_rank_own_seconds)", "{{run}}, rank {{rank}}", {"rank"}),
        ("ddpdoctor_skew_ratio and on (run, rank) ddpdoctor_rank_own_seconds", "", {"rank"}),
    ],
)
def test_what_a_dashboard_may_not_ask_for(
    exporter: Exporter, query: str, legend: str, wrong: set[str]
) -> None:
    assert misnamed(query, legend, labels(exporter.port)) == wrong


def test_grafana_can_import_the_dashboard() -> None:
    """What Grafana wants of a dashboard's JSON model; without ``id`` it is a new one."""
    found = dashboard()
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}", found["uid"]) and found["title"]
    # 36 is the first version in which a panel names its data source by type and uid.
    assert found["schemaVersion"] >= 36 and found.get("id") is None
    (source,) = [each for each in found["templating"]["list"] if each["type"] == "datasource"]
    assert source["query"] == "prometheus"
    panels = found["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    wanted = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["title"] and panel["type"] in ("stat", "timeseries")
        assert panel["datasource"] == wanted
        assert panel["targets"]
        references = [target["refId"] for target in panel["targets"]]
        assert len({*references}) == len(references)
        at = panel["gridPos"]
        place = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert place and max(x for x, _ in place) < 24 and not place & taken
        taken |= place
    assert all(
        each["datasource"] == wanted
        for each in found["templating"]["list"]
        if each["type"] == "query"
    )


def test_the_documented_metrics_are_those_that_are_served(exporter: Exporter) -> None:
    named = re.findall(r"`(ddpdoctor_\w+)`", (DOCS / "monitor.md").read_text())
    assert {*named} == {*labels(exporter.port)}


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


def test_a_request_that_does_not_arrive_is_cut_off(
    exporter: Exporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "REQUEST_TIMEOUT", 0.5)
    for start in (b"", b"GET /metrics HTTP/1.1\r\nHost: "):
        with socket.create_connection((LOOPBACK, exporter.port), LIMIT) as slow:
            slow.sendall(start)
            assert slow.recv(1000) == b""
    assert scrape(exporter.port)


def test_a_response_that_is_not_taken_is_cut_off(
    exporter: Exporter, shown: list[Snapshot | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prometheus, "RESPONSE_TIMEOUT", 0.5)
    snapshot = shown[0]
    assert snapshot is not None
    # More than what fits into the buffers of a connection.
    shown[0] = replace(snapshot, ranks=snapshot.ranks * 500)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect((LOOPBACK, exporter.port))
        slow.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        deadline = time.monotonic() + LIMIT
        for served in (True, False):
            while (threads() > 0) != served:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    shown[0] = snapshot
    assert scrape(exporter.port)


def threads() -> int:
    """How many connections are being served."""
    return sum("process_request_thread" in each.name for each in threading.enumerate())


def test_of_many_clients_the_oldest_go(exporter: Exporter) -> None:
    with contextlib.ExitStack() as opened:
        idle = [
            opened.enter_context(socket.create_connection((LOOPBACK, exporter.port), LIMIT))
            for _ in range(prometheus.MAX_CONNECTIONS + 2)
        ]
        assert scrape(exporter.port)
        # Two went for the last two, and one for the scrape.
        for client in idle[:3]:
            assert client.recv(1000) == b""


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

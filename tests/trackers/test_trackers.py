"""`--log-to`: what TensorBoard, MLflow, W&B and a collector of OpenTelemetry receive."""

from __future__ import annotations

import gzip
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.core.user_code import Location
from ddpdoctor.supervise.notify import is_first
from ddpdoctor.supervise.processes import Job
from ddpdoctor.trackers import follow
from ddpdoctor.trackers.base import file_name, open_tracker, text_of
from ddpdoctor.trackers.follow import send_finished
from tests.conftest import Doctor
from tests.support.drawn_runs import write_run

RAISES = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
model = DDP(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(60):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).mean().backward()
    optimizer.step()
    time.sleep(0.2)
    if step == 40 and dist.get_rank() == 1:
        raise KeyError("label")
"""


def said() -> tuple[list[str], Any]:
    lines: list[str] = []
    return lines, lines.append


def scalars(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_shows_the_steps_of_a_finished_run(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run = write_run(tmp_path / "run", 2, 40)
    lines, say = said()
    send_finished(run, [f"tensorboard:{tmp_path / 'board'}"], say)
    assert lines == [f"sent to tensorboard: tensorboard --logdir {tmp_path / 'board'}"]
    events = scalars(tmp_path / "board" / "ddpdoctor-run")
    steps = events.Scalars("ddpdoctor/step_seconds")
    assert [each.step for each in steps] == list(range(1, 41))
    assert steps[-1].value == pytest.approx(0.231, rel=0.1)
    # The steps have the times at which they ended.
    assert steps[-1].wall_time - steps[0].wall_time == pytest.approx(39 * 0.231, rel=0.01)
    waits = [events.Scalars(f"ddpdoctor/rank{rank}/wait_seconds")[-1].value for rank in (0, 1)]
    assert waits[0] > waits[1], "rank 1 is slow, so rank 0 waits"


class Collector:
    """Takes OTLP over HTTP, or lets its clients wait."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.logs: list[tuple[str, dict[str, Any]]] = []
        self.free = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.free.wait()
                collector.take(self.path, body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *words: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def take(self, path: str, body: bytes) -> None:
        from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )

        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in (each for scope in resource.scope_metrics for each in scope.metrics):
                    points = [each.as_double for each in metric.gauge.data_points]
                    self.metrics[metric.name] = points
        elif path == "/v1/logs":
            for resource in ExportLogsServiceRequest.FromString(body).resource_logs:
                for each in (one for scope in resource.scope_logs for one in scope.log_records):
                    found = {pair.key: pair.value for pair in each.attributes}
                    self.logs.append((each.body.string_value, found))

    def close(self) -> None:
        self.free.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
    one = Collector()
    yield one
    one.close()


def test_a_collector_gets_the_last_numbers_of_a_finished_run(
    tmp_path: Path, collector: Collector
) -> None:
    """Gauges have the time at which they are sent, so earlier steps are left out."""
    collector.free.set()
    run = write_run(tmp_path / "run", 2, 40)
    lines, say = said()
    send_finished(run, [f"otlp:{collector.url}"], say)
    assert lines == [f"sent to otlp: {collector.url}"]
    assert collector.metrics["ddpdoctor.step"] == [40]
    assert len(collector.metrics["ddpdoctor.rank.wait_seconds"]) == 2


def test_mlflow_has_the_history_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run = write_run(tmp_path / "run", 2, 20)
    store = (tmp_path / "store").as_uri()
    lines, say = said()
    send_finished(run, [f"mlflow:{store}"], say)
    client = mlflow.MlflowClient(store)
    experiment = client.get_experiment_by_name("ddpdoctor")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.status == "FINISHED"
    assert found.info.run_id in lines[0]
    history = client.get_metric_history(found.info.run_id, "ddpdoctor/step_seconds")
    assert [each.step for each in history] == list(range(1, 21))


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    lines, say = said()
    send_finished(write_run(tmp_path / "run", 2, 20), ["wandb:project"], say)
    assert lines[0].startswith("sent to wandb: wandb sync ")
    (file,) = tmp_path.rglob("*.wandb")
    assert b"ddpdoctor/step_seconds" in file.read_bytes()


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, True),
        ({"OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, True),
        ({"OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}, False),
        ({"PMI_RANK": "1"}, False),
        ({"SLURM_PROCID": "1"}, False),
    ],
)
def test_one_of_several_supervisors_sends_the_run(environ: dict[str, str], first: bool) -> None:
    assert is_first(environ) is first


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "ddpdoctor.trackers.mlflow", raising=False)
    with pytest.raises(DoctorError) as raised:
        open_tracker("mlflow", None)  # type: ignore[arg-type]
    assert raised.value.hint == "pip install 'ddpdoctor[mlflow]'"
    lines, say = said()
    send_finished(write_run(tmp_path / "run", 2, 20), ["mlflow"], say)
    (line,) = lines
    assert line.startswith("warning: --log-to mlflow: ")
    assert line.endswith("; nothing more is sent")


def test_a_tracker_that_fails_is_tried_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def fail(target: str, run: object) -> Any:
        tries.append(target)
        raise ConnectionError("refused\nby the server")

    monkeypatch.setattr(follow, "open_tracker", fail)
    lines, say = said()
    send_finished(write_run(tmp_path / "run", 2, 20), ["wandb"], say)
    assert tries == ["wandb"]
    assert lines == [
        "warning: --log-to wandb: ConnectionError: refused by the server; nothing more is sent"
    ]


def test_a_tracker_that_hangs_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()

    class Client:
        has_past = False
        place = "there"

        def numbers(self, *_: object) -> None:
            pass

        finding = close = numbers

    def connect(target: str, run: object) -> Any:
        if target == "wandb":
            held.wait()
        return Client()

    monkeypatch.setattr(follow, "open_tracker", connect)
    monkeypatch.setattr(follow, "CLOSE_TIMEOUT", 3.0)
    monkeypatch.setattr("select.select", lambda *_: ([0], [], []))
    lines, say = said()
    follow.follow(write_run(tmp_path / "run", 2, 20), ["wandb", "mlflow"], say)
    assert lines == ["sent to mlflow: there"]
    held.set()


def test_processes_of_a_tracker_are_not_of_the_job() -> None:
    tracker = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE)
    try:
        assert tracker.stdout is not None
        child = int(tracker.stdout.readline())
        job = Job("none", ancestors=frozenset({os.getpid()}))
        assert {tracker.pid, child} <= {each.pid for each in job.processes()}
        spared = job._replace(helpers=frozenset({tracker.pid}))
        assert not {tracker.pid, child} & {each.pid for each in spared.processes()}
        os.kill(child, 9)
    finally:
        tracker.kill()
        tracker.communicate()


def test_a_name_in_a_run_directory_leads_to_no_other_directory() -> None:
    assert file_name("20261128-063119-426206") == "20261128-063119-426206"
    assert file_name("x/../../home\0" + "y" * 300) == "x_.._.._home_" + "y" * 87


def test_text_of_a_finding_has_no_control_characters() -> None:
    message = "rank 1 raised\x1b[31m \x07"
    place = Location("train.py", 7)
    finding = Finding("DDP901", Severity.ERROR, message, (1,), place, fix="Fix it.")
    text = text_of(finding)
    assert text.startswith("error DDP901: rank 1 raised ")
    assert text.endswith("at train.py:7\nfix: Fix it.")
    assert "\x1b" not in text
    assert "\x07" not in text


@pytest.mark.slow
def test_a_live_job_is_sent_to_a_collector(doctor: Doctor, collector: Collector) -> None:
    collector.free.set()
    job = str(doctor.write("train.py", RAISES))
    done = doctor.run("--log-to", f"otlp:{collector.url}", "--nproc-per-node", "2", "--", job)
    assert done.status == 1
    assert f"ddpdoctor: sent to otlp: {collector.url}" in done.stderr
    assert collector.metrics["ddpdoctor.step_seconds"][0] > 0.1
    assert len(collector.metrics["ddpdoctor.rank.memory_bytes"]) == 2
    (text, about), *_ = [each for each in collector.logs if "DDP901" in each[0]]
    assert "KeyError" in text
    assert about["ddpdoctor.ranks"].array_value.values[0].int_value == 1
    assert about["code.lineno"].int_value > 1


@pytest.mark.slow
def test_a_collector_that_never_answers_delays_the_end_only_for_a_while(
    doctor: Doctor, collector: Collector
) -> None:
    job = str(doctor.write("train.py", RAISES))
    done = doctor.run("--log-to", f"otlp:{collector.url}", "--nproc-per-node", "2", "--", job)
    assert done.status == 1
    assert "--log-to otlp: " in done.stderr or "--log-to: not all was sent" in done.stderr
    assert "error DDP901" in done.stderr

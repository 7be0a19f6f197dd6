"""Export the run in Prometheus' text format, complementing NVIDIA's DCGM exporter.

``docs/grafana.json`` is a dashboard for it. Labels have that exporter's names (``gpu``, ``UUID``,
``device``, ``modelName``, ``Hostname``), so both can be joined. Unknown values have no sample.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import shown
from ddpdoctor.core.job import LOOPBACK
from ddpdoctor.core.opening import whole
from ddpdoctor.top.snapshot import PHASES, RankRow, Snapshot
from ddpdoctor.top.view import rank_value

MAX_CONNECTIONS = 16  # Maximum number of connections. Another one replaces the oldest.
MIN_GAP = 0.01  # Seconds between two connections

REQUEST_TIMEOUT, RESPONSE_TIMEOUT = 5.0, 30.0
"""Seconds for a request to arrive, and for its response to be read."""

_RANK = ("rank", "local_rank", "run", "Hostname", "gpu", "UUID", "device", "modelName")


def address(text: str) -> tuple[str, int]:
    """Parse ``PORT`` on loopback, or ``HOST:PORT`` with an IPv6 address in brackets.

    Raises:
        DoctorError: The text has neither form.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    number = whole(port, -1) if port.isascii() and port.isdigit() else -1
    if not 0 <= number <= 65535 or (colon and not host):
        raise DoctorError(f"--prometheus needs PORT or HOST:PORT, not {text!r}")
    return host or LOOPBACK, number


class Exporter:
    """Serves the newest snapshot. Port 0 takes any port.

    Raises:
        DoctorError: The port is taken.
    """

    def __init__(self, place: tuple[str, int], latest: Callable[[], Snapshot | None]) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(latest))
        host, port = place
        try:
            self._server = _Server(host, port)
        except OSError as error:
            raise DoctorError(
                f"cannot serve metrics at {host}:{port}: {error.strerror}",
                "name another port with --prometheus",
            ) from None
        self._server.set_app(make_wsgi_app(registry))
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port = int(self._server.server_address[1])
        self.place = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        """Its address."""

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


class _Server(ThreadingWSGIServer):
    """An HTTP server with a limited number and duration of connections."""

    request_queue_size = 128

    def __init__(self, host: str, port: int) -> None:
        self._until: dict[socket.socket, float] = {}
        """The time at which each connection is closed, the oldest first."""
        self._lock = threading.Lock()
        kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=kind, flags=flags)[0]
        super().__init__((str(address[0]), port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection, on a thread."""
        time.sleep(MIN_GAP)
        with self._lock:
            if len(self._until) >= MAX_CONNECTIONS:
                self._cut(next(iter(self._until)))
            self._until[request] = time.monotonic() + REQUEST_TIMEOUT
        super().process_request(request, client_address)

    def arrived(self, request: socket.socket) -> None:
        """Start the time limit for reading the response."""
        with self._lock:
            if request in self._until:
                self._until[request] = time.monotonic() + RESPONSE_TIMEOUT

    def service_actions(self) -> None:
        """Close connections that have exceeded their time limit."""
        now = time.monotonic()
        with self._lock:
            for request in [each for each, until in self._until.items() if now > until]:
                self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        """Wake the thread of a connection that waits for the client."""
        del self._until[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that has been served."""
        with self._lock:
            self._until.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing if a client has disconnected."""


class _Handler(WSGIRequestHandler):
    server: _Server

    def parse_request(self) -> bool:
        """Read the head of a request. The rest does not matter."""
        is_valid = super().parse_request()
        self.server.arrived(self.request)
        return is_valid

    def log_message(self, *words: Any) -> None:
        """Log nothing."""


class _Collector(Collector):
    def __init__(self, latest: Callable[[], Snapshot | None]) -> None:
        self._latest = latest

    def collect(self) -> Iterator[Metric]:
        snapshot = self._latest()
        return families(snapshot) if snapshot is not None else iter(())

    def describe(self) -> Iterator[Metric]:
        return iter(())


_NUMBERS: Mapping[str, tuple[str, str]] = {
    "rank_own_seconds": ("own", "Own time of a rank in a step, without waits for others."),
    "rank_step_seconds": ("total", "A step of a rank, waits included."),
    "rank_heartbeat_age_seconds": ("heartbeat", "Time since a rank's last sign of life."),
    "rank_resident_memory_bytes": ("rss", "Memory of a rank's process."),
    "rank_cuda_allocated_bytes": ("allocated", "Memory allocated by torch's CUDA allocator."),
    "rank_cuda_reserved_bytes": ("reserved", "Memory reserved by torch's CUDA allocator."),
}
"""Gauges of a rank: the name for `ddpdoctor.top.view.rank_value`, and a description."""

_COUNTERS: Mapping[str, tuple[str, str]] = {
    "rank_steps": ("step", "Steps that a rank has done in this attempt."),
    "rank_dropped_records": ("dropped", "Records that could not be written."),
}
"""Counters of a rank. Prometheus appends ``_total`` to their names."""


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Yield the metrics of a snapshot. A finished run has none."""
    if snapshot.kind == "machine" or not snapshot.live:
        return
    rows = []
    for row in snapshot.ranks:
        gpu = ["", "", "", ""]
        if row.gpu is not None:
            gpu = [str(row.gpu.index), row.gpu.uuid, f"nvidia{row.gpu.index}", row.gpu.name]
        local = "" if row.local_rank is None else str(row.local_rank)
        labels = [str(row.rank), local, snapshot.run, row.node, *gpu]
        rows.append((row, [shown(label) for label in labels]))
    yield from _rank_families(rows)
    yield from _run_families(snapshot)


def _rank_families(rows: Sequence[tuple[RankRow, list[str]]]) -> Iterator[Metric]:
    phase = _gauge(
        "rank_phase_seconds",
        "The parts of a step: means over the last steps.",
        (*_RANK, "phase", "split"),
    )
    state = _gauge("rank_state", "1 for the state of a rank.", (*_RANK, "state"))
    for row, labels in rows:
        state.add_metric([*labels, row.state], 1)
        if row.times is not None:
            # A backward that was not split includes the wait, so neither is known.
            split = "true" if row.times.split else "false"
            for name in PHASES:
                phase.add_metric([*labels, name, split], getattr(row.times, name))
    yield phase
    for make, numbers in ((_gauge, _NUMBERS), (_counter, _COUNTERS)):
        for name, (field, what) in numbers.items():
            family = make(name, what, _RANK)
            for row, labels in rows:
                value = rank_value(row, field)
                if value is not None:
                    family.add_metric(labels, value)
            yield family
    yield state


def _run_families(snapshot: Snapshot) -> Iterator[Metric]:
    run, job = snapshot.run, snapshot.job
    median = None if snapshot.median is None else snapshot.median.total
    for name, what, value in (
        ("steps_per_second", "Steps per second.", job.rate),
        ("samples_per_second", "Samples per second of all ranks.", job.samples_rate),
        ("loss", "The mean of the first ranks' losses.", job.loss),
        ("seconds_left", "Time until the last step, if the length is known.", job.left),
        ("step_seconds", "A step of the median rank.", median),
        ("skew_ratio", "The largest own time, as a ratio to the median one.", snapshot.skew),
    ):
        family = _gauge(name, what, ("run",))
        if value is not None:
            family.add_metric([run], value)
        yield family
    restarts = _counter("restarts", "Failed attempts of the job.", ("run",))
    restarts.add_metric([run], job.attempt)
    yield restarts
    # A gauge, since findings can be withdrawn.
    found = _gauge("findings", "Findings that stand.", ("run", "code", "severity"))
    counts = Counter((row.finding.code, row.finding.severity.label) for row in snapshot.findings)
    for (code, severity), count in sorted(counts.items()):
        found.add_metric([run, code, severity], count)
    yield found
    state = _gauge("run_state", "1 for the state of the run.", ("run", "state"))
    state.add_metric([run, snapshot.state], 1)
    yield state
    up = _gauge("run_up", "1 while the run is live.", ("run",))
    up.add_metric([run], 1)
    yield up


def _gauge(name: str, what: str, labels: Sequence[str]) -> Any:
    return GaugeMetricFamily(f"ddpdoctor_{name}", what, labels=labels)


def _counter(name: str, what: str, labels: Sequence[str]) -> Any:
    return CounterMetricFamily(f"ddpdoctor_{name}", what, labels=labels)

"""OpenTelemetry: metrics and log records, sent by OTLP over HTTP."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource

from ddpdoctor.core.finding import Finding, Severity
from ddpdoctor.top.snapshot import Snapshot
from ddpdoctor.trackers.base import text_of

_TIMEOUT = 5.0  # Seconds for a request
_LEVELS = {
    Severity.INFO: SeverityNumber.INFO,
    Severity.WARNING: SeverityNumber.WARN,
    Severity.ERROR: SeverityNumber.ERROR,
}
_RANK = re.compile(r"ddpdoctor/rank(\d+)/")


class Client:
    """Sends metrics and logs. ``OTEL_EXPORTER_OTLP_*`` variables apply.

    Args:
        place: The collector's base URL [default: as OpenTelemetry chooses, http://localhost:4318].
        run: The run.
    """

    has_past = False

    def __init__(self, place: str, run: Snapshot) -> None:
        # This client reports failures by exceptions.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        base = place.rstrip("/")
        resource = Resource.create({"service.name": "ddpdoctor", "ddpdoctor.run": run.run})
        exporter: Any = OTLPMetricExporter(f"{base}/v1/metrics" if base else None, timeout=_TIMEOUT)
        export, self._failed = exporter.export, False

        def checked(*args: Any, **options: Any) -> Any:
            # OpenTelemetry only logs a failure.
            result = export(*args, **options)
            self._failed = result is not MetricExportResult.SUCCESS
            return result

        exporter.export = checked
        # This client exports each time it gets numbers, so the period only has to be long.
        reader = PeriodicExportingMetricReader(exporter, 3_600_000, _TIMEOUT * 1000)
        self._metrics = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._metrics.get_meter("ddpdoctor")
        self._gauges: dict[str, Any] = {}
        logs = OTLPLogExporter(f"{base}/v1/logs" if base else None, timeout=_TIMEOUT)
        self._logs = LoggerProvider(resource, shutdown_on_exit=False)
        self._logs.add_log_record_processor(BatchLogRecordProcessor(logs))
        self._logger = self._logs.get_logger("ddpdoctor")
        self.place = base or "OpenTelemetry's collector"

    def numbers(self, values: Mapping[str, float], step: int, time: float) -> None:
        """Export gauges. A rank's gauges have the attribute ``rank``."""
        for name, value in {**values, "ddpdoctor/step": float(step)}.items():
            rank = _RANK.match(name)
            plain = "ddpdoctor.rank." + name[rank.end() :] if rank else name.replace("/", ".")
            if plain not in self._gauges:
                self._gauges[plain] = self._meter.create_gauge(plain)
            self._gauges[plain].set(value, {"rank": rank[1]} if rank else {})
        self._metrics.force_flush(int(_TIMEOUT * 1000))
        if self._failed:
            raise OSError(f"{self.place} does not take metrics")

    def finding(self, finding: Finding, step: int, time: float) -> None:
        """Export a log record."""
        self._logger.emit(
            LogRecord(
                timestamp=int(time * 1e9),
                severity_number=_LEVELS[finding.severity],
                severity_text=finding.severity.label,
                body=text_of(finding),
                attributes={
                    "ddpdoctor.code": finding.code,
                    "ddpdoctor.ranks": list(finding.ranks),
                    "ddpdoctor.step": step,
                    "code.filepath": finding.location.path if finding.location else "",
                    "code.lineno": finding.location.line if finding.location else 0,
                },
            )
        )
        self._logs.force_flush(int(_TIMEOUT * 1000))

    def close(self, how: str, succeeded: bool) -> None:
        """Export how the run ended."""
        level = SeverityNumber.INFO if succeeded else SeverityNumber.ERROR
        self._logger.emit(LogRecord(severity_number=level, body=how))
        self._logs.shutdown()
        self._metrics.shutdown()

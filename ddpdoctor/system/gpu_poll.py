"""Sample the GPUs of this machine, for the run directory and the monitor."""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpdoctor.run import rundir
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.system import amd
from ddpdoctor.system.amd import AmdReader
from ddpdoctor.system.nvml import Device, NvmlReader, Reading

POLL_INTERVAL = 1.0  # Seconds between two samples of values that change fast
SLOW_POLL_INTERVAL = 5.0  # Seconds between two samples of the other values


def file_name(host: str) -> str:
    """Return the name of a node's file in the run directory."""
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in host)
    return f"gpus-{safe}.json"


class Poller:
    """Samples all GPUs of this machine. For one thread at a time. Never raises."""

    def __init__(
        self,
        reader: NvmlReader | AmdReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._reader = amd.reader() if reader is None else reader
        self._clock = clock
        self._host = socket.gethostname()
        self._known: dict[str, Device] = {}
        self._rest: dict[str, Reading] = {}
        self._slow_due = float("-inf")
        self._carried: dict[str, tuple[float, int, float | None]] = {}
        """By GPU: time and NVLink bytes of the last slow sample, and the rate."""

    def read(self) -> JsonObject:
        """Return a sample as JSON: ``format, time, host, nvml, gpus``.

        ``nvml`` says why GPUs cannot be read. A GPU that disappeared stays in the list, with a
        ``problem`` instead of numbers.
        """
        devices = {device.uuid: device for device in self._reader.devices()}
        self._known.update(devices)
        now = self._clock()
        slow = now >= self._slow_due
        if slow:
            self._slow_due = now + SLOW_POLL_INTERVAL
        gpus = []
        for device in sorted(self._known.values(), key=lambda each: each.index):
            if device.uuid in devices:
                brief = self._reader.brief(device)
                if slow or device.uuid not in self._rest:
                    self._rest[device.uuid] = self._reader.rest(device)
                problem = self._reader.problem(device) or self._reader.trouble
                rest = self._rest[device.uuid]
                links = self._nvlink(device, rest, now)
                gpus.append(_record(device, brief, rest, links, problem))
            else:
                self._rest.pop(device.uuid, None)
                trouble = self._reader.trouble or "not there any more"
                gpus.append(_record(device, Reading(), Reading(), None, trouble))
        return {
            "format": FORMAT,
            "time": time.time_ns(),
            "host": self._host,
            "nvml": self._reader.trouble,
            "gpus": gpus,
        }

    def _nvlink(self, device: Device, rest: Reading, now: float) -> float | None:
        """Return bytes per second over NVLink, between the last two slow samples."""
        if rest.nvlink is None:
            self._carried.pop(device.uuid, None)
            return None
        since, before, rate = self._carried.get(device.uuid, (now, rest.nvlink, None))
        if now > since and rest.nvlink >= before and now == self._slow_due - SLOW_POLL_INTERVAL:
            rate = (rest.nvlink - before) / (now - since)
            since, before = now, rest.nvlink
        self._carried[device.uuid] = since, before, rate
        return rate

    def close(self) -> None:
        """Close the driver."""
        self._reader.close()


def _record(
    device: Device, brief: Reading, rest: Reading, nvlink: float | None, problem: str
) -> JsonObject:
    silent = brief == Reading()
    numbers: dict[str, Any] = {
        "utilization": None if brief.utilization is None else brief.utilization / 100,
        "memory_used": brief.memory_used,
        "memory_total": brief.memory_total,
        "power": brief.power,
    }
    if not silent:
        # The slow values of a GPU that does not respond any more are outdated as well.
        numbers |= {
            "power_limit": rest.power_limit,
            "temperature": rest.temperature,
            "clock": _hertz(rest.clock),
            "clock_max": _hertz(rest.clock_max),
            "ecc_errors": rest.ecc_errors,
            "throttle": list(rest.throttled) if rest.throttled else None,
            "pcie": rest.pcie,
            "nvlink": nvlink,
            "processes": [[each.pid, each.memory] for each in rest.processes] or None,
        }
    words: dict[str, Any] = {
        "index": device.index,
        "uuid": device.uuid,
        "name": device.name,
        "bus_id": device.bus_id,
        "mig": device.mig or None,
        "problem": problem or None,
    }
    return {key: value for key, value in (words | numbers).items() if value is not None}


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6


LIBRARY = "libnvidia-ml.so.1"


class GpuPoll:
    """Polls in a thread, since the driver may take seconds to respond, or hang."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stop = threading.Event()
        self.failed: Exception | None = None  # The error in ddpdoctor or the binding that ended it

    def start(self) -> None:
        """Start, if this machine has the driver's library, or AMD's driver."""
        try:
            # This does not call the driver.
            ctypes.CDLL(LIBRARY)
        except OSError:
            if not amd.is_here():
                return
        threading.Thread(target=self._run, name="ddpdoctor-gpu-poll", daemon=True).start()

    def stop(self) -> None:
        """Stop. Does not wait, since the driver may not respond."""
        self._stop.set()

    def _run(self) -> None:
        try:
            poller, due = Poller(), time.monotonic()
            while not self._stop.is_set():
                gpus = poller.read()
                path = self._directory / file_name(str(gpus["host"]))
                with contextlib.suppress(OSError):
                    rundir.put(path, json.dumps(gpus).encode())
                due = max(due + POLL_INTERVAL, time.monotonic() + POLL_INTERVAL / 4)
                self._stop.wait(due - time.monotonic())
            poller.close()
        except Exception as error:
            # Without this thread, only the GPUs' numbers are missing.
            self.failed = error

"""The GPUs of this machine, read again and again, as a JSON object for the run directory.

In tiers: what changes within a second is asked every second, the rest every five, and what never
changes once. Numbers are in base units: bytes, watts, hertz, degrees Celsius, ratios from 0 to 1.
What is not known is absent.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.system.gpu.nvml import NvmlReader
from ddpdoctor.system.gpu.reader import Device, Reading

EVERY = 1.0
"""Seconds between two readings of what changes fast."""

SLOWLY = 5.0
"""Seconds between two readings of the rest."""


def file_name(host: str) -> str:
    """Where the GPUs of a node are, in the run directory."""
    safe = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in host)
    return f"gpus-{safe}.json"


class Poller:
    """Reads all GPUs of this machine. One thread at a time; nothing raises.

    Args:
        reader: Reads a GPU.
        clock: Seconds.
    """

    def __init__(
        self, reader: NvmlReader | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._reader = NvmlReader() if reader is None else reader
        self._clock = clock
        self._host = socket.gethostname()
        self._known: dict[str, Device] = {}
        self._rest: dict[str, Reading] = {}
        self._slow_due = float("-inf")
        self._carried: dict[str, tuple[float, int, float | None]] = {}
        """What the NVLinks of a GPU had carried, when, and how much a second."""

    def read(self) -> JsonObject:
        """What they do now: ``format, time, host, nvml, gpus``.

        ``nvml`` says in words why they cannot be read. A GPU that was there stays in the list, with
        its ``problem`` instead of numbers.
        """
        devices = {device.uuid: device for device in self._reader.devices()}
        self._known.update(devices)
        now = self._clock()
        slow = now >= self._slow_due
        if slow:
            self._slow_due = now + SLOWLY
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
        """Bytes a second over NVLink, between the last two readings of the rest."""
        if rest.nvlink is None:
            self._carried.pop(device.uuid, None)
            return None
        since, before, rate = self._carried.get(device.uuid, (now, rest.nvlink, None))
        if now > since and rest.nvlink >= before and now == self._slow_due - SLOWLY:
            rate = (rest.nvlink - before) / (now - since)
            since, before = now, rest.nvlink
        self._carried[device.uuid] = since, before, rate
        return rate

    def close(self) -> None:
        """Let go of the driver."""
        self._reader.close()


def _record(
    device: Device, brief: Reading, rest: Reading, nvlink: float | None, problem: str
) -> JsonObject:
    silent = brief == Reading()
    numbers: dict[str, Any] = {
        "utilization": _ratio(brief.utilization),
        "memory_used": brief.memory_used,
        "memory_total": brief.memory_total,
        "power": brief.power,
    }
    if not silent:
        # Of a GPU that does not answer any more, what it said seconds ago is no news either.
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


def _ratio(percent: int | None) -> float | None:
    return None if percent is None else percent / 100


def _hertz(megahertz: int | None) -> float | None:
    return None if megahertz is None else megahertz * 1e6

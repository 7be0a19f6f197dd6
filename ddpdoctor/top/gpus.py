"""The GPUs that a poller told of, as the monitor shows them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpdoctor.core import opening
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.base import JsonObject
from ddpdoctor.system.gpu.reader import same_uuid
from ddpdoctor.top.snapshot import Gpu

_REAL = frozenset(("utilization", "power", "power_limit", "temperature", "clock", "clock_max"))
_WHOLE = frozenset(("memory_used", "memory_total", "ecc_errors"))

OLD = 10.0
"""Seconds after which a poller's last words say nothing about the present."""


MANY = 8
"""Nodes from which on their files are read every other time."""


MOST_NODES = 1024
"""Nodes whose files are read."""

_MOST = 8 << 20
"""Bytes of the files of all nodes, of which one has some hundred for each GPU."""


def told_of(told: Mapping[str, Any]) -> tuple[Gpu, ...]:
    """The GPUs of one node from what `ddpdoctor.system.gpu.poller` wrote, without damaged ones."""
    listed = told.get("gpus")
    node = str(told.get("host") or "")
    found = []
    for each in listed if isinstance(listed, list) else ():
        try:
            found.append(_gpu(node, each))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            continue
    return tuple(found)


def _gpu(node: str, told: Mapping[str, Any]) -> Gpu:
    get = told.get
    numbers: dict[str, Any] = {name: float(told[name]) for name in _REAL & told.keys()}
    numbers |= {name: int(told[name]) for name in _WHOLE & told.keys()}
    return Gpu(
        node=node,
        index=int(told["index"]),
        uuid=str(told["uuid"]),
        name=str(get("name") or ""),
        **numbers,
        throttle=tuple(str(word) for word in get("throttle") or ()),
        mig=bool(get("mig")),
        problem=str(get("problem") or ""),
    )


def silent(gpu: Gpu, problem: str) -> Gpu:
    """A GPU of which only that is known which does not change."""
    still = Gpu(node=gpu.node, index=gpu.index, uuid=gpu.uuid, name=gpu.name, mig=gpu.mig)
    return replace(still, memory_total=gpu.memory_total, problem=problem)


def by_uuid(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """GPUs by the UUID that ranks report."""
    return {same_uuid(gpu.uuid): gpu for gpu in gpus}


class GpuFiles:
    """The files that the pollers of all nodes keep in a run directory.

    Args:
        directory: The run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._names: tuple[str, ...] = ()
        self._seen: dict[str, tuple[int, int]] = {}
        self._changed: dict[str, float] = {}
        self._gpus: dict[str, tuple[Gpu, ...]] = {}
        self._trouble: dict[str, str] = {}
        self._turn = False
        self._left_out = 0

    def look(self) -> None:
        """List the directory anew."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return
        ours = [name for name in names if name.startswith("gpus-") and name.endswith(".json")]
        self._names = tuple(ours[:MOST_NODES])
        self._left_out = len(ours[MOST_NODES:])

    def read(self, live: bool) -> tuple[tuple[Gpu, ...], str]:
        """The GPUs of all nodes, and in words why some cannot be read; old numbers are left out."""
        found: list[Gpu] = []
        trouble: list[str] = []
        if self._left_out:
            trouble.append(f"more than {MOST_NODES} nodes: {self._left_out} others are left out")
        now = time.monotonic()
        # Of many nodes only half are read anew each time.
        self._turn = not self._turn
        many = len(self._names) > MANY
        for number, name in enumerate(self._names):
            if not many or name not in self._seen or number % 2 == self._turn:
                self._take(name, now)
            age = now - self._changed.get(name, now)
            gpus = self._gpus.get(name, ())
            if not live:
                gpus = tuple(silent(gpu, "") for gpu in gpus)
            elif age > OLD:
                gpus = tuple(silent(gpu, f"not read for {age:.0f} s") for gpu in gpus)
                trouble.append(f"GPUs not read for {age:.0f} s")
            found += gpus
            if self._trouble.get(name):
                trouble.append(self._trouble[name])
        return tuple(found), "; ".join(dict.fromkeys(trouble))

    def _take(self, name: str, now: float) -> None:
        path = self._directory / name
        try:
            facts = path.lstat()
            key = (facts.st_mtime_ns, facts.st_ino)
            if self._seen.get(name) == key:
                return
            told: JsonObject = opening.json_object(path, _MOST // len(self._names))
            if int(told.get("format", 0)) > FORMAT:
                raise ValueError
        except OSError:
            return
        except (ValueError, TypeError, OverflowError):
            self._trouble[name] = f"{name} is damaged"
            return
        # Of the first look only the clock of the file system says how old it is.
        age = 0.0 if name in self._seen else max(0.0, time.time() - facts.st_mtime)
        self._seen[name], self._changed[name] = key, now - age
        self._gpus[name] = told_of(told)
        self._trouble[name] = str(told.get("nvml") or "")

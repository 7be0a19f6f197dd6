"""Read GPUs, CPU and memory of the machines, and why a process shows no sign of life.

GPU readings come from the files that the pollers of all nodes write; CPU, memory and the states
of processes are those of this machine.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from ddpdoctor.core import opening
from ddpdoctor.run.names import FORMAT
from ddpdoctor.system.nvml import same_uuid
from ddpdoctor.system.process_activity import Turn, lacked, read_turn
from ddpdoctor.top.snapshot import Gpu, Machine

# -- the GPUs that pollers report, as the monitor shows them; this machine's CPU and memory


_REAL = frozenset(
    ("utilization", "power", "power_limit", "temperature", "clock", "clock_max", "pcie", "nvlink")
)
_WHOLE = frozenset(("memory_used", "memory_total", "ecc_errors"))

STALE_READING = 10.0
"""Seconds after which what a poller reported last says nothing about the present."""

MANY, MOST_NODES = 8, 1024
"""Nodes from which on their files are read every other time; and whose files are read."""

_MOST_BYTES = 8 << 20
"""Bytes of the files of all nodes, of which one has some hundred for each GPU."""


@dataclass
class _Node:
    """What is known of the GPUs of a node."""

    seen: tuple[int, int] | None = None
    """Modification time and inode of the file that was read."""
    changed: float = 0.0
    """When it changed, on the monotonic clock."""
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


def gpus_of(record: Mapping[str, Any]) -> tuple[Gpu, ...]:
    """The GPUs of one node from what `ddpdoctor.system.gpu_health` wrote, without damaged ones."""
    listed = record.get("gpus")
    node = str(record.get("host") or "")
    found = []
    for each in listed if isinstance(listed, list) else ():
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
            found.append(_gpu(node, each))
    return tuple(found)


def _gpu(node: str, record: Mapping[str, Any]) -> Gpu:
    numbers: dict[str, Any] = {name: float(record[name]) for name in _REAL & record.keys()}
    numbers |= {name: int(record[name]) for name in _WHOLE & record.keys()}
    return Gpu(
        node=node,
        index=int(record["index"]),
        uuid=str(record["uuid"]),
        name=str(record.get("name") or ""),
        throttle=tuple(str(word) for word in record.get("throttle") or ()),
        processes=tuple((int(pid), _bytes(held)) for pid, held in record.get("processes") or ()),
        mig=bool(record.get("mig")),
        problem=str(record.get("problem") or ""),
        **numbers,
    )


def _bytes(value: object) -> int | None:
    return value if isinstance(value, int) else None


def without_readings(gpu: Gpu, problem: str) -> Gpu:
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
        self._nodes: dict[str, _Node] = {}
        """By the names of their files."""
        self._turn = False
        self._left_out = 0

    def refresh(self) -> None:
        """List the directory again."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return
        ours = [name for name in names if name.startswith("gpus-") and name.endswith(".json")]
        self._nodes = {name: self._nodes.get(name, _Node()) for name in ours[:MOST_NODES]}
        self._left_out = len(ours[MOST_NODES:])

    def read(self, live: bool) -> tuple[tuple[Gpu, ...], str]:
        """The GPUs of all nodes, and in words why some cannot be read; old numbers are left out."""
        found: list[Gpu] = []
        trouble: list[str] = []
        if self._left_out:
            trouble.append(f"more than {MOST_NODES} nodes: {self._left_out} others are left out")
        now = time.monotonic()
        # Of many nodes only half are read each time.
        self._turn = not self._turn
        many = len(self._nodes) > MANY
        for number, (name, node) in enumerate(self._nodes.items()):
            if not many or node.seen is None or number % 2 == self._turn:
                self._read(name, node, now)
            age = now - node.changed
            if not live or node.seen is None:
                found += [without_readings(gpu, "") for gpu in node.gpus]
            elif age > STALE_READING:
                problem = f"not read for {age:.0f} s"
                found += [without_readings(gpu, problem) for gpu in node.gpus]
                trouble.append(f"GPUs {problem}")
            else:
                found += node.gpus
            trouble += [node.trouble] if node.trouble else []
        return tuple(found), "; ".join(dict.fromkeys(trouble))

    def _read(self, name: str, node: _Node, now: float) -> None:
        path = self._directory / name
        try:
            facts = path.lstat()
            key = (facts.st_mtime_ns, facts.st_ino)
            if node.seen == key:
                return
            record = opening.json_object(path, _MOST_BYTES // len(self._nodes))
            if int(record.get("format", 0)) > FORMAT:
                raise ValueError
        except OSError:
            return
        except (ValueError, TypeError, OverflowError):
            node.trouble = f"{name} is damaged"
            return
        # Of the first look only the clock of the file system says how old it is.
        age = max(0.0, time.time() - facts.st_mtime) if node.seen is None else 0.0
        node.seen, node.changed = key, now - age
        node.gpus, node.trouble = gpus_of(record), str(record.get("nvml") or "")


SHORTEST_INTERVAL = 0.1
"""Seconds between two looks at the CPU: its counters are in hundredths."""


class MachineMeter:
    """Reads CPU and memory of this machine."""

    def __init__(self) -> None:
        self._node = socket.gethostname()
        self._cores = psutil.cpu_count()
        self._read = 0.0
        self._cpu: float | None = None

    def read(self) -> Machine:
        """What they do; the CPU's load since the last reading, once there is one."""
        used = total = None
        # Without /proc nothing is known.
        with contextlib.suppress(OSError, RuntimeError):
            now = time.monotonic()
            if now - self._read >= SHORTEST_INTERVAL:
                busy = psutil.cpu_percent() / 100
                # The first call has nothing to compare with.
                self._cpu = busy if self._read else None
                self._read = now
            memory = psutil.virtual_memory()
            used, total = memory.total - memory.available, memory.total
        return Machine(self._node, self._cpu, self._cores, used, total)


# -- why a process of this machine gives no sign of life


SAMPLE_SECONDS = 0.05
"""Seconds over which a process that gives no heartbeat is watched when that is seen first."""

_LOOK_INTERVAL = 2.0
"""Seconds after which that is measured again."""

STOPPED = "its process is stopped (SIGSTOP)"
_STATE_TEXTS = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: "its process is traced",
    psutil.STATUS_DISK_SLEEP: "its process waits for a disk",
}


class ProcessStates:
    """Looks at processes, and remembers what they had had of the cores."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[float, Turn | None]] = {}
        """What the main threads had had of the cores at a moment, by pid."""

    def state(self, pid: int) -> tuple[str, str]:
        """The state of a rank whose process it is, and the words to it."""
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return "dead", "its process is gone"
        except (psutil.Error, OSError, ValueError, OverflowError):
            return "stale", ""
        if status == psutil.STATUS_ZOMBIE:
            return "dead", "its process has ended"
        if status == psutil.STATUS_RUNNING and self.lacks_core(pid):
            # It works, as far as it can; so does the thread that beats.
            return "running", "gets little CPU"
        return "stale", _STATE_TEXTS.get(status, "")

    def lacks_core(self, pid: int) -> bool:
        """Whether a main thread that is ready to run has had no core for most of the time."""
        now, turn = time.monotonic(), read_turn(pid, pid)
        if pid not in self._turns:
            self._turns[pid] = (now, turn)
            time.sleep(SAMPLE_SECONDS)
            now, turn = time.monotonic(), read_turn(pid, pid)
        when, before = self._turns[pid]
        if now - when >= _LOOK_INTERVAL:
            self._turns[pid] = (now, turn)
        if before is None or turn is None:
            return False
        return lacked(before, turn, now - when) > (now - when) / 2

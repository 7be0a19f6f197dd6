"""Read GPUs, CPU and memory of the machines, and why a process shows no sign of life.

GPU readings come from the files that the pollers of all nodes write. CPU, memory and the states
of processes are those of this machine.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from ddpdoctor.core import opening
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.records.typed_json import decoder
from ddpdoctor.system.nvml import same_uuid
from ddpdoctor.system.process_activity import Turn, lacked, read_turn
from ddpdoctor.top.snapshot import Gpu, Machine

STALE_READING = 10.0  # Seconds after which a poller's last reading says nothing about the present

MANY_NODES, MAX_NODES = 8, 1024
"""With more nodes, their files are read every other time; and how many are read at all."""

_MAX_BYTES = 8 << 20  # Size of the files of all nodes. One has some hundred bytes for each GPU.


@dataclass
class _Node:
    """What is known of the GPUs of a node."""

    seen: tuple[int, int] | None = None  # Modification time and inode of the file that was read
    changed: float = 0.0  # When it changed, on the monotonic clock
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""


def gpus_of(record: Mapping[str, object]) -> tuple[Gpu, ...]:
    """Return the GPUs of a node from what its poller wrote. Skip damaged ones."""
    listed = record.get("gpus")
    node = str(record.get("host") or "")
    found = [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []
    gpus = (decoder(Gpu)({**each, "node": node}) for each in found if "index" in each)
    return tuple(gpu for gpu in gpus if gpu.uuid)


def without_readings(gpu: Gpu, problem: str) -> Gpu:
    """Return a GPU with only those facts that do not change."""
    still = Gpu(node=gpu.node, index=gpu.index, uuid=gpu.uuid, name=gpu.name, mig=gpu.mig)
    return replace(still, memory_total=gpu.memory_total, problem=problem)


def by_uuid(gpus: Iterable[Gpu]) -> dict[str, Gpu]:
    """Return GPUs by the UUID that ranks report."""
    return {same_uuid(gpu.uuid): gpu for gpu in gpus}


class GpuFiles:
    """The files that the pollers of all nodes keep in a run directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._nodes: dict[str, _Node] = {}  # By the names of their files
        self._odd_turn = False
        self._left_out = 0

    def refresh(self) -> None:
        """List the directory again."""
        try:
            names = opening.names(self._directory)
        except OSError:
            return
        ours = [name for name in names if name.startswith("gpus-") and name.endswith(".json")]
        self._nodes = {name: self._nodes.get(name, _Node()) for name in ours[:MAX_NODES]}
        self._left_out = len(ours[MAX_NODES:])

    def read(self, live: bool) -> tuple[tuple[Gpu, ...], str]:
        """Return the GPUs of all nodes without old numbers, and why some cannot be read."""
        found: list[Gpu] = []
        trouble: list[str] = []
        if self._left_out:
            trouble.append(f"more than {MAX_NODES} nodes: {self._left_out} others are left out")
        now = time.monotonic()
        self._odd_turn = not self._odd_turn
        many = len(self._nodes) > MANY_NODES
        for number, (name, node) in enumerate(self._nodes.items()):
            if not many or node.seen is None or number % 2 == self._odd_turn:
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
            record = opening.json_object(path, _MAX_BYTES // len(self._nodes))
            if int(record.get("format", 0)) > FORMAT:
                raise ValueError
        except OSError:
            return
        except (ValueError, TypeError, OverflowError):
            node.trouble = f"{name} is damaged"
            return
        # At first only the clock of the file system says how old it is.
        age = max(0.0, time.time() - facts.st_mtime) if node.seen is None else 0.0
        node.seen, node.changed = key, now - age
        node.gpus, node.trouble = gpus_of(record), str(record.get("nvml") or "")


MIN_CPU_INTERVAL = 0.1  # Seconds between two readings of the CPU, whose counters are in hundredths


class MachineMeter:
    """Reads CPU and memory of this machine."""

    def __init__(self) -> None:
        self._node = socket.gethostname()
        self._cores = psutil.cpu_count()
        self._read = 0.0
        self._cpu: float | None = None

    def read(self) -> Machine:
        """Return memory, and the CPU's load since the last reading once there was one."""
        used = total = None
        # Without /proc nothing is known.
        with contextlib.suppress(OSError, RuntimeError):
            now = time.monotonic()
            if now - self._read >= MIN_CPU_INTERVAL:
                busy = psutil.cpu_percent() / 100
                # The first call has nothing to compare with.
                self._cpu = busy if self._read else None
                self._read = now
            memory = psutil.virtual_memory()
            used, total = memory.total - memory.available, memory.total
        return Machine(self._node, self._cpu, self._cores, used, total)


FIRST_SAMPLE = 0.05  # Seconds for which a process without a heartbeat is watched the first time
_SAMPLE_INTERVAL = 2.0  # Seconds after which its CPU time is sampled again

STOPPED = "its process is stopped (SIGSTOP)"
_STATE_TEXTS = {
    psutil.STATUS_STOPPED: STOPPED,
    psutil.STATUS_TRACING_STOP: "its process is traced",
    psutil.STATUS_DISK_SLEEP: "its process waits for a disk",
}


class ProcessStates:
    """Finds out why processes of this machine show no sign of life."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[float, Turn | None]] = {}
        """CPU time of main threads, by pid, with the time of the sample."""

    def state(self, pid: int) -> tuple[str, str]:
        """Return the state of the rank whose process it is, and why."""
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            return "dead", "its process is gone"
        except (psutil.Error, OSError, ValueError, OverflowError):
            return "stale", ""
        if status == psutil.STATUS_ZOMBIE:
            return "dead", "its process has ended"
        if status == psutil.STATUS_RUNNING and self.lacks_core(pid):
            # It works as far as it can, and so does the thread that writes the heartbeat.
            return "running", "gets little CPU"
        return "stale", _STATE_TEXTS.get(status, "")

    def lacks_core(self, pid: int) -> bool:
        """Return whether a main thread was ready to run, but had no core for most of the time."""
        now, turn = time.monotonic(), read_turn(pid, pid)
        if pid not in self._turns:
            self._turns[pid] = (now, turn)
            time.sleep(FIRST_SAMPLE)
            now, turn = time.monotonic(), read_turn(pid, pid)
        when, before = self._turns[pid]
        if now - when >= _SAMPLE_INTERVAL:
            self._turns[pid] = (now, turn)
        if before is None or turn is None:
            return False
        return lacked(before, turn, now - when) > (now - when) / 2

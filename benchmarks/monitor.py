"""What the monitor costs: frames of generated run directories that go on living meanwhile.

    python benchmarks/monitor.py [data app ...]

``data`` is the side without a terminal: CPU seconds a minute and memory, at 8 and at 256 ranks, of
a process that makes a frame a second and draws nothing. Ten steps a second of each rank are written
by another process. ``app`` is the whole monitor on a pseudo-terminal once it has been up for three
seconds, with the bytes a second that it writes there, and the time to its first paint.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import os
import platform
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

HERE = Path(__file__).parent
PACE = 10
SETTLED = 3.0
"""Seconds of a monitor's life that are its start."""

_WRITER = """
import sys, time
from pathlib import Path
from tests.support.generated import Generated
path, ranks, pace, seconds = Path(sys.argv[1]), *map(float, sys.argv[2:])
run = Generated(path, int(ranks), slow={1: ("data", 10)}, gpus=True)
run.start()
run.steps(200)
run.poll()
print("ready", flush=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    due = time.monotonic() + 1
    # Spread over the second, as real ranks do.
    for first in range(0, int(ranks), 32):
        run.steps(int(pace), range(first, min(first + 32, int(ranks))))
    run.poll()
    time.sleep(max(0, due - time.monotonic()))
"""

_READER = """
import json, resource, sys, time
def memory():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
bare = memory()
began = time.perf_counter()
from pathlib import Path
from ddpdoctor.top.live import LiveSource
from ddpdoctor.top.frames import Want
path, seconds, seen = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
source = LiveSource(path, 1.0)
want = Want(frozenset(range(seen)))
snapshot = source.read(want)
first = time.perf_counter() - began
assert len(snapshot.ranks)
start, used, frames = time.monotonic(), time.process_time(), 0
while time.monotonic() - start < seconds:
    due = time.monotonic() + 1
    snapshot = source.read(want)
    frames += 1
    time.sleep(max(0, due - time.monotonic()))
assert snapshot.live and snapshot.verdict.rank == 1, snapshot.verdict
used = (time.process_time() - used) * 60 / (time.monotonic() - start)
print(json.dumps({"cpu": used, "memory": memory() - bare, "first": first, "frames": frames}))
"""


def data(ranks: int, seen: int, seconds: float) -> None:
    """The side of the data alone, with so many of the ranks looked at."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "run")
        words = [path, str(ranks), str(PACE), str(seconds + 20)]
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, *words], env=environment, stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            done = subprocess.run(
                [sys.executable, "-c", _READER, path, str(seconds), str(seen)],
                env=environment,
                stdout=subprocess.PIPE,
                check=True,
            )
        finally:
            writer.kill()
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
    told = json.loads(done.stdout)
    print(
        f"data, {ranks} ranks, {seen} of them looked at: {told['cpu']:.2f} CPU s a minute, "
        f"{told['memory'] / 2**20:.1f} MiB above Python, first frame {told['first']:.2f} s; "
        f"{told['frames']} frames, {PACE} steps a second"
    )


@dataclass
class Drawn:
    """What a monitor under a pseudo-terminal cost, start-up aside."""

    cpu: float
    """Seconds a minute."""
    written: float
    """Bytes a second."""
    memory: int
    first: float
    """Seconds to the first paint."""
    first_cpu: float
    """Seconds of CPU until then, which other load on the machine does not stretch."""


def watched(words: list[str], seconds: float, size: tuple[int, int] = (80, 24)) -> Drawn:
    """Run the monitor on a terminal of that size, and look at it from outside."""
    master, slave = os.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    environment = {
        **os.environ, "PYTHONPATH": str(HERE.parent), "TERM": "xterm-256color",
        "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "top", *words],
        env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    seen, first, first_cpu = b"", math.nan, math.nan
    written, used, since = 0, 0.0, math.nan
    facts = psutil.Process(process.pid)
    try:
        while not time.monotonic() > since + seconds:
            if select.select([master], [], [], 0.01)[0]:
                chunk = os.read(master, 1 << 16)
                written += len(chunk)
                if math.isnan(first):
                    seen += chunk
                    if b"reading" in seen or b"OWN" in seen:
                        first, first_cpu = time.monotonic() - began, _cpu(facts)
            # On a machine that is busy the start takes long.
            if math.isnan(since) and time.monotonic() - began > first + SETTLED:
                since, written, used = time.monotonic(), 0, _cpu(facts)
        lasted = time.monotonic() - since
        return Drawn(
            (_cpu(facts) - used) * 60 / lasted,
            written / lasted,
            facts.memory_info().rss,
            first,
            first_cpu,
        )
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def app(ranks: int, seconds: float, size: tuple[int, int]) -> None:
    """The whole monitor, on a run of so many ranks."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory) / "run")
        words = [path, str(ranks), str(PACE), str(seconds + 40)]
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, *words], env=environment, stdout=subprocess.PIPE
        )
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            starts = [watched([path], 0.0, size) for _ in range(3)]
            firsts = sorted(start.first for start in starts)
            cpus = sorted(start.first_cpu for start in starts)
            drawn = watched([path], seconds, size)
        finally:
            writer.kill()
            writer.wait()
            if writer.stdout is not None:
                writer.stdout.close()
    print(
        f"app, {ranks} ranks, {size[0]}x{size[1]}: {drawn.cpu:.2f} CPU s a minute, "
        f"{drawn.written / 1000:.1f} KB/s to the terminal, {drawn.memory / 2**20:.0f} MiB, first "
        f"paint {firsts[1]:.2f} s (from {firsts[0]:.2f} to {firsts[2]:.2f}), {cpus[1]:.2f} CPU s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="*", default=["data"])
    parser.add_argument("--seconds", type=float, default=60)
    options = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{time.strftime('%Y-%m-%d')}"
    )
    if "data" in options.what:
        data(8, 8, options.seconds)
        data(256, 40, options.seconds)
        data(256, 256, options.seconds)
    if "app" in options.what:
        app(8, options.seconds, (80, 24))
        app(8, options.seconds, (200, 60))
        app(256, options.seconds, (80, 24))
        app(256, options.seconds, (200, 60))


if __name__ == "__main__":
    main()

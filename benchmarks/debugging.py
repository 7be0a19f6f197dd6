"""What the debugger costs: one rank before, while and after a debugger is attached.

    python benchmarks/debugging.py [--rounds 7]

The job is the tiny one, whose step of about a millisecond is mostly Python, which is what tracing
slows down. Each figure is a ratio within one process; the median over the rounds is quoted. Needs
node and npm for the test client (`tests/dap`).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from ddpdoctor.run.reader import RunReader  # noqa: E402
from ddpdoctor.run.snapshot import Run  # noqa: E402
from tests.support.dap_client import DapClient, install_modules  # noqa: E402

JOB = HERE / "jobs" / "tiny.py"
SECONDS = 4.0
"""Length of a phase."""


def snapshot(directory: Path) -> Run:
    """The run with all of its steps."""
    return RunReader(directory, window=1_000_000).snapshot()


def wait_for_steps(directory: Path, steps: int) -> None:
    """Until the rank is past its warm-up."""
    while True:
        if (directory / "run.json").exists():
            ranks = snapshot(directory).ranks
            if ranks and ranks[0].status is not None and ranks[0].status.step >= steps:
                return
        time.sleep(0.2)


def phase(directory: Path) -> float:
    """The median step of the next few seconds, in milliseconds."""
    start = time.time_ns()
    time.sleep(SECONDS)
    time.sleep(0.5)
    end = start + int(SECONDS * 1e9)
    steps = [each.total for each in snapshot(directory).ranks[0].steps if start < each.start < end]
    return median(steps) / 1e6


def round_of(modules: Path, directory: Path) -> dict[str, float]:
    """One job: its step times in milliseconds, delays in seconds, memory in MiB."""
    options = ["--quiet", "--no-vscode", "--debug-port", "0", "--run-dir", str(directory)]
    words = ["--nproc-per-node", "1", str(JOB), "--iterations", "100000000"]
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "ddpdoctor", "run", *options, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_steps(directory, 1000)
        run = snapshot(directory)
        port = run.manifest["debug"]["ports"][0]
        assert run.ranks[0].status is not None
        rank, parent = psutil.Process(run.ranks[0].status.pid), psutil.Process(supervisor.pid)
        found = {"before": phase(directory), "rank before": memory(rank)}
        found["supervisor before"] = memory(parent)
        line = 1 + JOB.read_text().splitlines().index("        optimizer.zero_grad()")
        began = time.monotonic()
        with DapClient(modules, port) as client:
            client.attach({JOB: [line]})
            thread = client.wait_for_stop()
            found["to first stop"] = time.monotonic() - began
            client.set_breakpoints(JOB, [])
            client.continue_(thread)
            found["attached"] = phase(directory)
            found["rank attached"] = memory(rank)
            found["supervisor attached"] = memory(parent)
            client.disconnect()
        time.sleep(1.0)
        found["after"] = phase(directory)
        return found
    finally:
        supervisor.terminate()
        supervisor.wait(60)


def memory(process: psutil.Process) -> float:
    """Resident memory in MiB."""
    return float(process.memory_info().rss / 2**20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        modules = install_modules(Path(folder) / "dap")
        rounds = [
            round_of(modules, Path(folder) / f"run{number}") for number in range(options.rounds)
        ]
    print(f"step before any attach: {median(each['before'] for each in rounds):.3f} ms")
    for name in ("attached", "after"):
        ratios = [each[name] / each["before"] for each in rounds]
        print(f"{name}: ratio {median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f})")
    stops = [each["to first stop"] for each in rounds]
    print(f"attach to first stop: {median(stops):.2f} s (to {max(stops):.2f})")
    for who in ("rank", "supervisor"):
        more = [each[f"{who} attached"] - each[f"{who} before"] for each in rounds]
        base = median(each[f"{who} before"] for each in rounds)
        print(f"{who}: {base:.0f} MiB, {median(more):+.0f} MiB once attached")
    print(f"{options.rounds} rounds")


if __name__ == "__main__":
    main()

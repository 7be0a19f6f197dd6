"""What py-spy does to a healthy job, in the two ways in which ddpdoctor may ask it.

python benchmarks/py_spy.py [--dumps 200]

ResNet-50 on two ranks, without it and while rank 1 is looked into again and again: in the way of an
examination (``--nonblocking``), and in that of ``ddpdoctor stacks --native``, which holds the rank.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

from ddpdoctor.stacks.capture import find_py_spy

JOB = Path(__file__).parent.parent / "sample_jobs" / "resnet50_synthetic.py"
_LINE = re.compile(r"^iteration \d+/\d+ time ([\d.]+) .* loss (\S+)$", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--dumps", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args()
    bare = job(options.iterations, "", 0)
    for how in ("--nonblocking", "--native"):
        losses = job(options.iterations, how, options.dumps)
        print(f"{how}: losses {'are the same, bit for bit' if losses == bare else 'DIFFER'}")


def job(iterations: int, how: str, dumps: int) -> list[str]:
    """Run the job to its end; its losses."""
    words = ["--standalone", "--nproc-per-node", "2", str(JOB), "--iterations", str(iterations)]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        while not first.startswith("iteration"):
            first = process.stdout.readline()
        seconds = look(rank_one(process.pid), how, dumps) if how else []
        printed = _LINE.findall(first + process.stdout.read())
    assert process.returncode == 0
    steps = statistics.median(float(step) for step, _ in printed[3:])
    text = f"{how or 'without'}: median step {steps:.3f} s"
    if seconds:
        text += f"; {len(seconds)} dumps in {statistics.median(seconds) * 1e3:.0f} ms each (median)"
        text += f", {max(seconds) * 1e3:.0f} ms at most"
    print(text)
    return [loss for _, loss in printed]


def rank_one(launcher: int) -> int:
    for child in psutil.Process(launcher).children():
        if child.environ().get("RANK") == "1":
            return child.pid
    raise AssertionError("no rank 1")


def look(pid: int, how: str, dumps: int) -> list[float]:
    """Seconds that each dump took, as long as the rank lives."""
    program = find_py_spy()
    assert program is not None, "py-spy is not installed"
    seconds = []
    for _ in range(dumps):
        began = time.perf_counter()
        command = [program, "dump", how, "--json", "--pid", str(pid)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()

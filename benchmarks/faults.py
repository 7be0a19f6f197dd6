"""Random faults in random ranks at random steps: is the right rank named, and the right line?

    python benchmarks/faults.py --count 200 --healthy 50

The seed is fixed, so that the first runs are the same whatever the count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
JOB = HERE / "jobs" / "faulty.py"
FAULTS = ("stop", "kill", "sleep", "missing", "shape", "op", "exception", "exit", "loop")
KINDS = ("plain", "batchnorm", "accumulating")
HEALTHY = ("", "checkpoint", "first-step", "validation")
RANKS = 3
HANG_AFTER = {"": "4", "checkpoint": "8", "first-step": "3", "validation": "30"}
"""What a person would choose for each of the healthy jobs; the last one is the default."""

UNASKED = ("stop", "kill")
"""Faults whose process cannot be asked where it is: the last line that the probe saw counts."""


@dataclass
class Row:
    """What came out for one kind of fault."""

    runs: int = 0
    ranks: int = 0
    lines: int = 0
    codes: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)


def lines_of(fault: str) -> set[int]:
    """The lines of the job that may be named for a fault."""
    source = JOB.read_text().splitlines()
    marked = {
        number
        for number, line in enumerate(source, 1)
        if re.search(rf"# fault:.*\b{fault}\b", line)
    }
    if fault in UNASKED:
        start = next(number for number, line in enumerate(source, 1) if "for step in" in line)
        marked |= set(range(start, len(source)))
    return marked


def findings(options: list[str], words: list[str], directory: Path) -> list[dict[str, object]]:
    """What ddpdoctor says of a run, infos left out, in the order it was said."""
    report = directory / "findings.json"
    command = [sys.executable, "-m", "ddpdoctor", "run", "--no-vscode", "--debug-port", "0"]
    command += ["--run-dir", str(directory / "run"), "--json", str(report), "--quiet", *options]
    command += ["--nproc-per-node", str(RANKS), "--", str(JOB), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
    subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        timeout=180,
    )
    told = [json.loads(line) for line in report.read_text().splitlines()]
    return [each for each in told if each["severity"] != "info" and each["code"] != "DDP610"]


def sick(count: int, deadline: float) -> dict[str, Row]:
    """Run jobs with random faults."""
    draw = random.Random(0)
    rows: dict[str, Row] = defaultdict(Row)
    for _ in range(count):
        fault, kind = draw.choice(FAULTS), draw.choice(KINDS)
        rank, step = draw.randrange(RANKS), draw.randrange(2, 12)
        if time.monotonic() > deadline:
            break
        words = ["--fault", fault, "--rank", str(rank), "--at", str(step), "--kind", kind]
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            found = findings(["--hang-after", "4", "--kill-on-hang"], words, Path(directory))
        row = rows[fault]
        row.runs += 1
        row.seconds.append(time.monotonic() - began)
        first = found[0] if found else {}
        row.codes.add(str(first.get("code", "nothing")))
        right = first.get("ranks") == [rank]
        place = first.get("location")
        line = place.get("line") if isinstance(place, dict) else None
        at = right and (line in lines_of(fault) or (fault == "kill" and line is None))
        row.ranks += right
        row.lines += bool(at)
        if not at:
            print(f"  {' '.join(words)}: {first.get('message', 'nothing was said')} ({line})")
        sys.stdout.flush()
    return rows


def healthy(count: int, deadline: float) -> tuple[int, int]:
    """Run healthy jobs; how many, and of how many something was said."""
    runs = alarms = 0
    for index in range(count):
        if time.monotonic() > deadline:
            break
        kind = HEALTHY[index % len(HEALTHY)]
        words = ["--healthy", kind] if kind else []
        words += ["--kind", KINDS[index % len(KINDS)]]
        with tempfile.TemporaryDirectory() as directory:
            found = findings(["--hang-after", HANG_AFTER[kind]], words, Path(directory))
        runs += 1
        alarms += bool(found)
        for each in found:
            print(f"  false alarm, {' '.join(words)}: {each['code']} {each['message']}")
        sys.stdout.flush()
    return runs, alarms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=40, help="jobs with a fault")
    parser.add_argument("--healthy", type=int, default=8, help="healthy jobs")
    parser.add_argument("--minutes", type=float, default=120, help="stop after so long")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    rows = sick(options.count, deadline)
    print("| fault | runs | right rank | right line | said as |\n| --- | --- | --- | --- | --- |")
    for fault, row in sorted(rows.items()):
        codes = ", ".join(sorted(row.codes))
        print(f"| {fault} | {row.runs} | {row.ranks} | {row.lines} | {codes} |")
    total = sum(row.runs for row in rows.values())
    ranks = sum(row.ranks for row in rows.values())
    lines = sum(row.lines for row in rows.values())
    print(f"| all | {total} | {ranks} | {lines} | |")
    runs, alarms = healthy(options.healthy, deadline)
    print(f"healthy: {runs} runs, false alarms in {alarms}")


if __name__ == "__main__":
    main()

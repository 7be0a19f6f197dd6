"""What ddpdoctor costs: the same job under torchrun and under ``ddpdoctor run``, in turn.

    python benchmarks/overhead.py [tiny|hooks|resnet|child|startup|supervisor|fingerprints|delay]

Each figure is a ratio or a difference within a pair of runs that follow each other, so that a
machine that gets faster or slower meanwhile does not show; the median over the pairs is quoted.
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parent
RANKS = ("--nproc-per-node", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *RANKS)
DOCTOR = (sys.executable, "-m", "ddpdoctor", "run", "--quiet", "--no-vscode", *RANKS)


def run(command: Sequence[str], directory: str) -> tuple[float, str]:
    """Run a command to its end: the Unix time of its start, and its standard output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory}
    start = time.time()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    if not done.stdout:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return start, done.stdout


def number(pattern: str, text: str) -> float:
    """The number that the pattern's group finds in the text."""
    match = re.search(pattern, text)
    if match is None:
        raise SystemExit(f"no {pattern} in:\n{text}")
    return float(match[1])


def paired(
    name: str, job: Sequence[str], patterns: Mapping[str, str], pairs: int, directory: str
) -> None:
    """Step times of both launchers, in turn, the first one alternating."""
    outputs: list[dict[bool, str]] = []
    for index in range(pairs):
        found: dict[bool, str] = {}
        for watched in (False, True) if index % 2 == 0 else (True, False):
            command = [*(DOCTOR if watched else TORCHRUN), *job]
            found[watched] = run(command, directory)[1]
        outputs.append(found)
    for what, pattern in patterns.items():
        plain = [number(pattern, found[False]) for found in outputs]
        watched_times = [number(pattern, found[True]) for found in outputs]
        ratios = [b / a for a, b in zip(plain, watched_times, strict=True)]
        extra = [b - a for a, b in zip(plain, watched_times, strict=True)]
        print(
            f"{name}, {what}: {median(plain) * 1e3:.3f} ms under torchrun; "
            f"ratio {median(ratios):.4f} (from {min(ratios):.4f} to {max(ratios):.4f}); "
            f"{median(extra) * 1e6:+.1f} us a step; {pairs} pairs"
        )


def hooks(directory: str, runs: int = 5) -> None:
    """The hooks of one step alone: steps with them and without in turn, in one process."""
    command = [
        sys.executable,
        "-m",
        "ddpdoctor",
        "run",
        "--quiet",
        "--no-vscode",
        "--nproc-per-node",
        "1",
    ]
    job = str(HERE / "jobs" / "hooks.py")
    outputs = [run([*command, job], directory)[1] for _ in range(runs)]
    for what, pattern in (("a step", r"extra ([\d.-]+)"), ("a collective", r"ctive ([\d.-]+)")):
        found = [number(pattern, output) for output in outputs]
        print(
            f"hooks: {median(found):.1f} us {what} (from {min(found):.1f} to {max(found):.1f}); "
            f"{runs} runs"
        )


def fingerprints(pairs: int, directory: str) -> None:
    """Looking for wrong results: the tiny job with the default budget and with none, in turn.

    The share that ranks themselves say they spent does not scatter as step times do.
    """
    job = str(HERE / "jobs" / "tiny.py")
    off = ("--overhead-budget", "0")
    shares: list[float] = []
    spent: list[float] = []
    ratios: dict[str, list[float]] = {"median step": [], "CPU time of a step": []}
    patterns = {"median step": r"median ([\d.]+)", "CPU time of a step": r"cpu ([\d.]+)"}
    for index in range(pairs):
        found: dict[bool, str] = {}
        for looks in (False, True) if index % 2 == 0 else (True, False):
            record = Path(directory) / f"fingerprints{index}{looks:d}"
            options = ("--run-dir", str(record), *(() if looks else off))
            found[looks] = run([*DOCTOR[:4], *options, *DOCTOR[4:], job], directory)[1]
            if looks:
                ends = list(accounts(record))
                spent += [nanoseconds for nanoseconds, _ in ends]
                shares += [nanoseconds / over for nanoseconds, over in ends]
        for what, pattern in patterns.items():
            ratios[what].append(number(pattern, found[True]) / number(pattern, found[False]))
    for what, values in ratios.items():
        print(
            f"fingerprints, {what}: ratio {median(values):.4f} with the default budget to none "
            f"(from {min(values):.4f} to {max(values):.4f}); {pairs} pairs"
        )
    print(
        f"fingerprints, as ranks tell: median {100 * median(shares):.2f} % of their time "
        f"({median(spent) / 1e6:.0f} ms), most {100 * max(shares):.2f} %; {len(shares)} ranks"
    )


def accounts(record: Path) -> Iterator[tuple[float, float]]:
    """What the ranks of a run spent on diagnosis, and over which time, in nanoseconds."""
    for journal in sorted(record.glob("rank-*.jsonl")):
        for line in journal.read_text().splitlines():
            if line.startswith('{"kind":"end"'):
                end = json.loads(line)
                yield end["spent"], end["over"]


def delay(directory: str, runs: int = 6, iterations: int = 3000) -> None:
    """Steps from a divergence at a random step to the first fingerprints that show it."""
    draw = random.Random(0)
    job = str(HERE / "jobs" / "diverging.py")
    delays = []
    for index in range(runs):
        at = draw.randrange(iterations * 9 // 10)
        record = Path(directory) / f"diverging{index}"
        words = ("--run-dir", str(record), *DOCTOR[4:], job, "--at", str(at))
        run([*DOCTOR[:4], *words, "--iterations", str(iterations)], directory)
        prints = []
        for journal in sorted(record.glob("rank-*.jsonl")):
            records = map(json.loads, journal.read_text().splitlines())
            prints.append(
                {each["step"]: each["parameters"] for each in records if "parameters" in each
                 and each["kind"] == "fingerprint"}
            )  # fmt: skip
        shared = sorted(set(prints[0]) & set(prints[1]))
        seen = [step for step in shared if prints[0][step] != prints[1][step]]
        delays.append((seen[0] - at) if seen else iterations - at)
        print(f"diverged after step {at}: seen {delays[-1]} steps later")
    print(f"detection delay: median {median(delays):.0f} steps, most {max(delays)}; {runs} runs")


def startup(pairs: int, directory: str) -> None:
    """From the launch to the end of the first step."""
    extra, plain_times = [], []
    job = str(HERE / "jobs" / "first_step.py")
    for index in range(pairs):
        found: dict[bool, float] = {}
        for watched in (False, True) if index % 2 == 0 else (True, False):
            start, output = run([*(DOCTOR if watched else TORCHRUN), job], directory)
            found[watched] = number(r"first ([\d.]+)", output) - start
        extra.append(found[True] - found[False])
        plain_times.append(found[False])
    print(
        f"start-up: {median(plain_times):.2f} s under torchrun; {median(extra):+.3f} s "
        f"(from {min(extra):+.3f} to {max(extra):+.3f}); {pairs} pairs"
    )


def child(pairs: int, directory: str) -> None:
    """What a Python that imports no torch pays for being a child of the job: ``python -c pass``."""
    entry = HERE.parent / "ddpdoctor" / "probe" / "entry"
    # The interpreter may write the entry's bytecode, as an installer does.
    plain = {name: each for name, each in os.environ.items() if "BYTECODE" not in name}
    ours = {**plain, "DDPDOCTOR_RUN_DIR": directory, "PYTHONPATH": str(entry)}
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for index in range(pairs + 1):
        for watched in (False, True) if index % 2 == 0 else (True, False):
            start = time.perf_counter()
            environment = ours if watched else plain
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], environment)
            used = os.wait4(pid, 0)[2]
            seconds[watched].append((time.perf_counter() - start, used.ru_utime + used.ru_stime))
    both = list(zip(seconds[False][1:], seconds[True][1:], strict=True))
    for place, name in enumerate(("wall", "CPU")):
        extra = [1000 * (b[place] - a[place]) for a, b in both]
        print(
            f"python -c pass, {name}: {1000 * median(a[place] for a, _ in both):.1f} ms; "
            f"{median(extra):+.2f} ms as a child of a job (middle half from "
            f"{sorted(extra)[pairs // 4]:+.2f} to {sorted(extra)[3 * pairs // 4]:+.2f}); "
            f"{pairs} pairs"
        )


def supervisor(directory: str, seconds: float = 20.0) -> None:
    """CPU and memory of the supervisor and its keepers while the tiny job runs."""
    job = [str(HERE / "jobs" / "tiny.py"), "--iterations", "100000000"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory}
    process = subprocess.Popen(
        [*DOCTOR, *job], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        time.sleep(10)
        watched = psutil.Process(process.pid)
        (above,) = watched.children()
        keepers = [above, *above.children()]
        before = [each.cpu_times() for each in (watched, *keepers)]
        time.sleep(seconds)
        after = [each.cpu_times() for each in (watched, *keepers)]
        used = sum(
            b.user + b.system - a.user - a.system for a, b in zip(before, after, strict=True)
        )
        memory = [each.memory_info().rss / 2**20 for each in (watched, *keepers)]
    finally:
        process.terminate()
        process.wait(60)
    print(
        f"supervisor: {100 * used / seconds:.2f} % of a core, {memory[0]:.0f} MiB; "
        f"keepers {sum(memory[1:]):.0f} MiB; over {seconds:.0f} s of the tiny job"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "what", nargs="*", default=["tiny", "hooks", "resnet", "child", "startup", "supervisor"]
    )
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as directory:
        if "tiny" in options.what:
            job = [str(HERE / "jobs" / "tiny.py")]
            patterns = {"step": r"median ([\d.]+)", "CPU time of a step": r"cpu ([\d.]+)"}
            paired("tiny", job, patterns, options.pairs, directory)
        if "hooks" in options.what:
            hooks(directory)
        if "resnet" in options.what:
            sample = HERE.parent / "sample_jobs" / "resnet50_synthetic.py"
            paired(
                "ResNet-50",
                [str(sample), "--iterations", "60", "--warmup", "10"],
                {"step": r"time median ([\d.]+)"},
                options.pairs,
                directory,
            )
        if "child" in options.what:
            child(10 * options.pairs, directory)
        if "startup" in options.what:
            startup(options.pairs, directory)
        if "fingerprints" in options.what:
            fingerprints(options.pairs, directory)
        if "delay" in options.what:
            delay(directory)
        if "supervisor" in options.what:
            supervisor(directory)


if __name__ == "__main__":
    main()

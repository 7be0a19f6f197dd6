"""What ddpdoctor costs: the same job under torchrun and under ``ddpdoctor run``, in turn.

    python benchmarks/overhead.py [hooks|within|instructions|steps|short|peers|resnet|child|
                                   startup|supervisor|threads]

Each figure is a ratio or a difference within a pair, so that a machine that gets faster or slower
meanwhile does not show, as the median over the pairs with its 95 % interval: for ``hooks`` and
``within`` pairs of blocks within one process, for whole jobs pairs of runs that follow each other.
CPU time stands beside wall time, since only the former is the job's own on a machine that does
other work.
The exit status is 1 where an interval is too wide to tell, or where a bar is missed beyond doubt.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.intervals import LEAST, Verdicts, interval, ratio_of_sums

T = TypeVar("T")

HERE = Path(__file__).parent
RANKS = ("--nproc-per-node", "2")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *RANKS)
DOCTOR = (sys.executable, "-m", "ddpdoctor", "run", "--quiet", "--no-vscode", *RANKS)
ONE = ("--nproc-per-node", "1")
"""A later option of torchrun's replaces the earlier."""
MOST_MILLISECONDS = 600_000
"""Of the blocks of one length, within a job."""

TELLING = {"cpu": 0.005, "wall": 0.02}
"""Half the width that the interval of a ratio may have to say anything."""


def run(command: Sequence[str], directory: str) -> tuple[float, str]:
    """Run a command to its end: the Unix time of its start, and its standard output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory}
    start = time.time()
    done = subprocess.run(
        command,
        env=environment,
        # Python takes a package of the working directory before any other.
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
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


def alternately(index: int) -> tuple[bool, bool]:
    """Whether the first and the second of a pair are watched: ABBA, so that a drift cancels out."""
    return (False, True) if index % 2 == 0 else (True, False)


def rounds(
    commands: dict[str, list[str]], count: int, measure: Callable[[list[str]], T]
) -> list[dict[str, T]]:
    """What is measured of several commands in turn, the order turned round each time."""
    return [
        {name: measure(commands[name]) for name in list(commands)[:: 1 if index % 2 else -1]}
        for index in range(count)
    ]


def in_turn(
    plain: Sequence[str], other: Sequence[str], pairs: int, directory: str
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """What a job prints as JSON under either of two commands, pair by pair."""

    def measure(command: list[str]) -> dict[str, float]:
        found: dict[str, float] = json.loads(run(command, directory)[1].splitlines()[-1])
        return found

    found = rounds({"plain": [*plain], "other": [*other]}, pairs, measure)
    return [(each["plain"], each["other"]) for each in found]


def older(directory: str) -> list[str]:
    """The command of another checkout's ddpdoctor."""
    return ["env", f"PYTHONPATH={Path(directory).resolve()}", *DOCTOR]


def compare(
    name: str,
    outputs: Sequence[tuple[dict[str, float], dict[str, float]]],
    verdicts: Verdicts,
    bar: float | None,
) -> None:
    """Tell what the second of each pair takes, by the first."""
    for what, most in (("cpu", bar), ("wall", None)):
        if what not in outputs[0][0]:
            continue
        plain = median(before[what] for before, _ in outputs)
        ratios = interval([after[what] / before[what] for before, after in outputs])
        extra = interval([1e6 * (after[what] - before[what]) for before, after in outputs])
        title = f"{name}, {what} {plain * 1e3:.2f} ms a step"
        verdicts.tell(f"{title}, ratio", ratios, "", digits=4, widest=TELLING[what], most=most)
        print(f"    {extra.text(' us', 1)} a step more")


def work_for(milliseconds: float, directory: str, ranks: Sequence[str] = RANKS) -> int:
    """How many products of matrices make a step of the tiny job that long, in CPU time."""
    job = str(HERE / "jobs" / "tiny.py")
    found = []
    for work in (0, 40):
        command = [
            *TORCHRUN,
            *ranks,
            job,
            "--iterations",
            "200",
            "--warmup",
            "50",
            "--work",
            str(work),
        ]
        found.append(float(json.loads(run(command, directory)[1])["cpu"]))
    each = max((found[1] - found[0]) / 40, 1e-6)
    return max(0, round((milliseconds / 1e3 - found[0]) / each))


def steps(
    lengths: Sequence[float], pairs: int, seconds: float, directory: str, verdicts: Verdicts
) -> None:
    """Whole jobs with steps of these milliseconds; each run takes about so many seconds."""
    job = str(HERE / "jobs" / "tiny.py")
    for length in lengths:
        count = max(60, int(seconds * 1e3 / length))
        words = ["--iterations", str(count), "--warmup", str(count // 3)]
        words += ["--work", str(work_for(length, directory))]
        outputs = in_turn([*TORCHRUN, job, *words], [*DOCTOR, job, *words], pairs, directory)
        bar = 1.02 if length < 5 else 1.005
        compare(f"steps of {length:g} ms", outputs, verdicts, bar)


def short(pairs: int, iterations: int, directory: str, verdicts: Verdicts) -> None:
    """Whole jobs on a GPU, whose steps are as short as the host can launch them."""
    words = [*ONE, str(HERE / "jobs" / "tiny.py"), "--device", "cuda"]
    words += ["--iterations", str(iterations), "--warmup", str(iterations // 3)]
    outputs = in_turn([*TORCHRUN, *words], [*DOCTOR, *words], pairs, directory)
    compare("steps on a GPU", outputs, verdicts, 1.02)


def peers(
    lengths: Sequence[float], pairs: int, against: str, directory: str, verdicts: Verdicts
) -> None:
    """Steps under torchrun, ddpdoctor, ``torch.profiler`` (waiting, recording) and TraceML.

    Of one rank: two on the cores of a small machine wait for each other now and then, which costs
    CPU time, too, and more than anything here. TraceML is ``traceml-ai``, if it is installed; with
    ``--against`` an older ddpdoctor, too, with what is compiled of it there.
    """
    job = str(HERE / "jobs" / "tiny.py")

    def measure(command: list[str]) -> dict[str, float]:
        lines = run(command, directory)[1].splitlines()
        found = json.loads(next(each for each in lines if each.startswith('{"wall"')))
        # Of all steps: a lower quartile would hide what comes in one of five blocks.
        return {what: found[f"mean {what}"] for what in ("cpu", "wall")}

    for length in lengths:
        count = max(300, int(2500 / length))
        words = [job, "--iterations", str(count), "--warmup", str(count // 3)]
        words += ["--work", str(work_for(length, directory, ONE))]
        commands = {
            "torchrun": [*TORCHRUN, *ONE, *words],
            "ddpdoctor": [*DOCTOR, *ONE, *words],
            "torch.profiler, waiting": [*TORCHRUN, *ONE, *words, "--peer", "profiler-off"],
            "torch.profiler, recording": [*TORCHRUN, *ONE, *words, "--peer", "profiler-on"],
        }
        if against:
            commands["ddpdoctor before"] = [*older(against), *ONE, *words]
        if importlib.util.find_spec("traceml_ai") is not None:
            start = "from traceml_ai.launcher.cli import main; main()"
            logs = ["--logs-dir", directory, "--no-save-training-output"]
            options = ["--args", *words[1:], "--peer", "traceml"]
            commands["TraceML"] = [sys.executable, "-c", start, "run", *logs, *ONE, job, *options]
        found = rounds(commands, pairs, measure)
        for name in list(commands)[1:]:
            outputs = [(each["torchrun"], each[name]) for each in found]
            compare(f"{name}, steps of {length:g} ms", outputs, verdicts, None)


def hooks(pairs: int, device: str, directory: str, verdicts: Verdicts) -> None:
    """The hooks alone: blocks of steps with them and without in turn, in one process.

    At full detail, every step seen in full with a line of its own, and as thinned by the default
    budget, which bounds the diagnoses in both.
    """
    job = [str(HERE / "jobs" / "hooks.py"), "--pairs", str(pairs), "--device", device]
    for name, options, bars in (
        ("full detail", ["--full"], {"step": 20.0, "collective": 2.0}),
        ("default budget", [], {"step": 5.0, "collective": 2.0}),
    ):
        output = run([*DOCTOR, *ONE, *job, *options], directory)[1]
        found: dict[str, list[tuple[float, float]]] = {}
        for line in output.splitlines():
            what, *blocks = json.loads(line)
            cpu, wall, no_cpu, no_wall = (quartile(each) / 1e3 for each in blocks)
            found.setdefault(what, []).append((cpu - no_cpu, wall - no_wall))
        for what, extra in found.items():
            title = f"hooks on {device}, {name}, a {what}"
            bar = bars[what]
            cpu_time = interval([each for each, _ in extra])
            verdicts.tell(f"{title}, CPU", cpu_time, " us", widest=max(1.0, bar / 4), most=bar)
            print(f"    wall {interval([each for _, each in extra]).text(' us', 1)}")


def within(
    lengths: Sequence[float], pairs: int, device: str, directory: str, verdicts: Verdicts
) -> None:
    """All that a step takes by the default budget, in short blocks within one job, in turn.

    What whole jobs show as well, without their scatter, but for the wrappers that stay in sleeping
    steps: some attribute lookups and calls. Sums over all blocks, for what is rare counts, too.
    """
    job = [str(HERE / "jobs" / "hooks.py"), "--device", device]
    for length in lengths:
        # A shared machine is slower for tenths of a second: both of a pair are to see it.
        steps_of_block = next((each for each in (4, 16) if each * length >= 20), 32)
        count = min(pairs * 64, int(MOST_MILLISECONDS / (2 * length))) // steps_of_block
        words = ["--work", str(work_for(length, directory, ONE)), "--whole", str(steps_of_block)]
        words += ["--pairs", str(max(LEAST, count))]
        output = run([*DOCTOR, *ONE, *job, *words], directory)[1]
        blocks = together([json.loads(line)[1:] for line in output.splitlines()], pairs)
        for place, what, bar in ((0, "cpu", 1.02 if length < 5 else 1.005), (1, "wall", None)):
            awake, asleep = ([each[place + at] / 1e3 for each in blocks] for at in (0, 2))
            title = f"within a job, {what} {sum(asleep) / len(asleep) / 1e3:.2f} ms a step"
            ratio = ratio_of_sums(awake, asleep)
            verdicts.tell(f"{title}, ratio", ratio, "", digits=4, widest=TELLING[what], most=bar)
            more = (ratio.middle - 1) * sum(asleep) / len(asleep)
            print(f"    {more:.1f} us a step more")


def together(blocks: list[list[float]], runs: int) -> list[list[float]]:
    """The means of runs of blocks that followed each other, about so many."""
    length = max(1, len(blocks) // runs)
    return [
        [sum(each) / length for each in zip(*blocks[at : at + length], strict=True)]
        for at in range(0, len(blocks) - length + 1, length)
    ]


def quartile(values: Sequence[float]) -> float:
    """The lower quartile: of the steps of a block, one that nothing else has disturbed."""
    return sorted(values)[len(values) // 4]


def instructions() -> None:
    """What the hooks of a light step execute, counted by valgrind: alike on any machine."""
    job = str(HERE / "jobs" / "light_step.py")
    for name, pure in (("compiled", ""), ("Python", "1")):
        took = {mode: executed(job, mode, pure) for mode in ("awake", "asleep")}
        print(f"hooks, {name}, a light step: {took['awake'] - took['asleep']:,.0f} instructions")


def executed(job: str, mode: str, pure: str, few: int = 100, many: int = 1100) -> float:
    """Instructions that each of the steps takes of which ``many`` makes more than ``few``."""
    counts = []
    for steps in (few, many):
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        done = subprocess.run(
            [*command, sys.executable, job, str(steps), mode],
            env={**os.environ, "PYTHONHASHSEED": "0", "DDPDOCTOR_PURE_PYTHON": pure},
            capture_output=True,
            text=True,
            check=True,
        )
        counts.append(number(r"Collected : (\d+)", done.stderr))
    return (counts[1] - counts[0]) / (many - few)


def startup(pairs: int, against: str, directory: str, verdicts: Verdicts) -> None:
    """From the launch to the end of the first step; with ``--against`` of an older one, too."""
    job = str(HERE / "jobs" / "first_step.py")
    commands = {"torchrun": [*TORCHRUN, job], "ddpdoctor": [*DOCTOR, job]}
    if against:
        commands["ddpdoctor before"] = [*older(against), job]

    def measure(command: list[str]) -> float:
        start, output = run(command, directory)
        return number(r"first ([\d.]+)", output) - start

    found = rounds(commands, pairs, measure)
    plain = median(each["torchrun"] for each in found)
    for name, most in (("ddpdoctor", 0.2), ("ddpdoctor before", None)):
        if name in commands:
            extra = interval([each[name] - each["torchrun"] for each in found])
            title = f"start-up, {plain:.2f} s under torchrun, {name} more"
            verdicts.tell(title, extra, " s", digits=3, widest=0.1, most=most)


def child(pairs: int, directory: str, verdicts: Verdicts) -> None:
    """What a Python that imports no torch pays for being a child of the job: ``python -c pass``."""
    entry = HERE.parent / "ddpdoctor" / "probe" / "entry"
    # The interpreter may write the entry's bytecode, as an installer does.
    plain = {name: each for name, each in os.environ.items() if "BYTECODE" not in name}
    ours = {**plain, "DDPDOCTOR_RUN_DIR": directory, "PYTHONPATH": str(entry)}
    seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for index in range(pairs + 1):
        for watched in alternately(index):
            start = time.perf_counter()
            environment = ours if watched else plain
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], environment)
            used = os.wait4(pid, 0)[2]
            seconds[watched].append((time.perf_counter() - start, used.ru_utime + used.ru_stime))
    both = list(zip(seconds[False][1:], seconds[True][1:], strict=True))
    for place, name, most in ((1, "CPU", 3.0), (0, "wall", None)):
        extra = interval([1000 * (b[place] - a[place]) for a, b in both])
        title = f"python -c pass, {name}, {1000 * median(a[place] for a, _ in both):.1f} ms, more"
        verdicts.tell(title, extra, " ms", digits=2, widest=1.0 if most else 10.0, most=most)


def threads(directory: str) -> None:
    """The probe's own threads in a rank that trains, whose stacks are asked for meanwhile."""
    record = Path(directory) / "threads"
    job = str(HERE / "jobs" / "threads.py")
    process = subprocess.Popen(
        [*DOCTOR[:4], "--run-dir", str(record), *DOCTOR[4:], job],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory},
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        while not any(record.glob("rank-*.jsonl")) and process.poll() is None:
            time.sleep(0.2)
        command = [sys.executable, "-m", "ddpdoctor", "stacks", str(record)]
        while process.poll() is None:
            subprocess.run(command, capture_output=True, check=False)
        assert process.stdout is not None
        found = json.loads(process.stdout.read().splitlines()[-1])
    finally:
        process.terminate()
        process.wait(60)
    answers = found["answers"]
    print(
        f"threads: the writing thread wakes {found['wakes']:.1f} times a second and held the GIL "
        f"for {', '.join(f'{each:.2f}' for each in found['held'])} ms at most; "
        f"{len(answers)} answers of {median(answers):.2f} ms (most {answers[-1]:.2f})"
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    usual = ["hooks", "within", "steps", "child", "startup", "supervisor"]
    parser.add_argument("what", nargs="*", default=usual)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--blocks", type=int, default=300, help="pairs of blocks, for hooks")
    parser.add_argument("--lengths", type=float, nargs="+", help="milliseconds of steps")
    parser.add_argument("--seconds", type=float, default=6.0, help="of steps in a run, for steps")
    parser.add_argument("--against", default="", help="an older checkout, for startup and peers")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="cuda: one rank with NCCL, for hooks, short and resnet",
    )
    options = parser.parse_args()
    if min(options.pairs, options.blocks) < LEAST:
        parser.error(f"a median with an interval takes {LEAST} pairs")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"load {os.getloadavg()[0]:.0f}")  # fmt: skip
    lengths = options.lengths or [1, 5, 20, 300]
    verdicts = Verdicts()
    with tempfile.TemporaryDirectory() as directory:
        if "hooks" in options.what:
            hooks(options.blocks, options.device, directory, verdicts)
        if "instructions" in options.what:
            instructions()
        if "within" in options.what:
            within(lengths, options.blocks, options.device, directory, verdicts)
        if "steps" in options.what:
            steps(lengths, options.pairs, options.seconds, directory, verdicts)
        if "short" in options.what:
            short(options.pairs, int(options.seconds * 1000), directory, verdicts)
        if "peers" in options.what:
            peers(options.lengths or [1, 5], options.pairs, options.against, directory, verdicts)
        if "resnet" in options.what:
            job = [str(HERE.parent / "sample_jobs" / "resnet50_synthetic.py")]
            job += ["--iterations", "60", "--warmup", "10"]
            if options.device == "cuda":
                job = [*ONE, *job, "--batch-size", "64"]
            ratios = []
            for index in range(options.pairs):
                found = {
                    watched: number(
                        r"time median ([\d.]+)",
                        run([*(DOCTOR if watched else TORCHRUN), *job], directory)[1],
                    )
                    for watched in alternately(index)
                }
                ratios.append(found[True] / found[False])
            verdicts.tell("ResNet-50, wall, ratio", interval(ratios), "", digits=4, widest=0.02)
        if "child" in options.what:
            child(10 * options.pairs, directory, verdicts)
        if "startup" in options.what:
            startup(options.pairs, options.against, directory, verdicts)
        if "threads" in options.what:
            threads(directory)
        if "supervisor" in options.what:
            supervisor(directory)
    return verdicts.status()


if __name__ == "__main__":
    sys.exit(main())

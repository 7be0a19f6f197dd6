"""All sick and healthy sample jobs beside busy processes: are the verdicts those of a calm machine?

    python benchmarks/load.py --busy 20 --at-once 4

The order of the jobs is always the same, so that `--skip` goes on where `--minutes` or Ctrl-C
ended: no more jobs are started, and those that run are waited for. Jobs that are sick only where
cores are free, as they say in their heads, are left out.

Every job runs with ``--kill-on-hang``. Of a sick job its marks say what is to be found; a healthy
one and a healed twin must stay without a finding above info, and must not be ended. "As the tests
want" is what ``tests/test_sick_jobs.py`` asserts of the same job: nothing said beside the marks, of
a twin nothing at all, not even withdrawn, and the exit status that the job states.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ddpdoctor.core.errors import HANG
from tests.conftest import SPURIOUS_ABORT
from tests.marks import (
    HEALTHY,
    SICK,
    Kind,
    head,
    healed,
    judged,
    marks,
    needed_gpus,
    needs_free_cores,
    options,
    read,
)

BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100000))"


@dataclass(frozen=True)
class Outcome:
    """What came of one job."""

    kind: Kind
    path: Path
    named: bool
    false_errors: tuple[str, ...]
    false_warnings: tuple[str, ...]
    killed: bool
    exact: bool
    trouble: str
    seconds: float


@dataclass
class Row:
    """The outcomes of one kind of job."""

    runs: list[Outcome] = field(default_factory=list)

    def count(self, what: str) -> int:
        """How many of them have something."""
        return sum(bool(getattr(each, what)) for each in self.runs)


@contextlib.contextmanager
def busy(number: int, nice: int) -> Iterator[None]:
    """So many processes that compute."""
    command = ["nice", "-n", str(nice), sys.executable, "-c", BUSY, str(os.getpid())]
    others = [subprocess.Popen(command, start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
        for each in others:
            each.wait()


def outcome(kind: Kind, path: Path, limit: float) -> Outcome:
    """Run one job and judge what is said of it."""
    expected = marks(path) if kind == "sick" else []
    wanted = head(path, "status", 0)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="load") as directory:
        report = Path(directory) / "findings.json"
        report.touch()
        command = [sys.executable, "-m", "ddpdoctor", "run", "--no-vscode", "--debug-port", "0"]
        command += ["--run-dir", f"{directory}/run", "--json", str(report), "--kill-on-hang"]
        command += [*options(path), "--nproc-per-node", str(head(path, "ranks", 2))]
        trouble = ""
        with open(Path(directory) / "err", "w+") as errors:
            job = subprocess.Popen(
                [*command, "--", str(path)],
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": directory},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
            try:
                status = job.wait(limit)
            except subprocess.TimeoutExpired:
                job.terminate()
                status, trouble = job.wait(), f"not over after {limit:.0f} s"
            errors.seek(0)
            printed = list(errors)
        ours = [line for line in printed if line.startswith("ddpdoctor: ")]
        aborted = wanted == 0 and any(SPURIOUS_ABORT in line for line in printed)
        if any("Traceback" in line or "internal error" in line for line in ours):
            trouble = "an internal error"
        lines = read(report)
    verdict = judged(kind, path, lines)
    codes = {mark.code for places in expected for mark in places}
    words = [
        (str(each["severity"]), f"{each['code']} {each['message']}") for each in verdict.others
    ]
    killed = status == HANG and not any(code.startswith(("DDP4", "DDP8")) for code in codes)
    ended = status in (wanted, HANG) or aborted
    return Outcome(
        kind,
        path,
        bool(expected) and not verdict.missing,
        tuple(text for severity, text in words if severity == "error"),
        tuple(text for severity, text in words if severity == "warning"),
        killed=killed,
        exact=verdict.as_wanted and not trouble and ended and not killed,
        trouble=trouble,
        seconds=time.monotonic() - began,
    )


def chosen(options: argparse.Namespace) -> list[tuple[Kind, Path]]:
    """The jobs to run, in an order that does not favour any kind."""
    jobs: list[tuple[Kind, Path]] = [("sick", path) for path in SICK]
    jobs += [("healed", healed(path)) for path in SICK]
    jobs += [("healthy", path) for path in HEALTHY]
    jobs = [
        (kind, path)
        for kind, path in jobs
        if options.only in path.stem and not needed_gpus(path) and not needs_free_cores(path)
    ]
    random.Random(0).shuffle(jobs)
    return jobs[options.skip :][: options.count or None]


WRONG = ("false_errors", "false_warnings", "killed", "exact")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--busy", type=int, default=20, help="processes that compute meanwhile")
    parser.add_argument("--nice", type=int, default=0, help="their niceness")
    parser.add_argument("--at-once", type=int, default=4, help="jobs at the same time")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a job may take")
    parser.add_argument("--only", default="", help="jobs whose name contains this")
    parser.add_argument("--count", type=int, default=0, help="as many jobs at most")
    parser.add_argument("--skip", type=int, default=0, help="leave out the first ones")
    parser.add_argument("--minutes", type=float, default=240, help="start no job after so long")
    asked = parser.parse_args()
    jobs, deadline = chosen(asked), time.monotonic() + 60 * asked.minutes
    rows: dict[str, Row] = {kind: Row() for kind in ("sick", "healed", "healthy")}
    load: list[float] = []

    stopped = threading.Event()
    signal.signal(signal.SIGINT, lambda *_: stopped.set())

    def one(job: tuple[Kind, Path]) -> Outcome | None:
        late = stopped.is_set() or time.monotonic() >= deadline
        return None if late else outcome(*job, asked.limit)

    with (
        busy(asked.busy, asked.nice),
        concurrent.futures.ThreadPoolExecutor(asked.at_once) as pool,
    ):
        for each in concurrent.futures.as_completed([pool.submit(one, job) for job in jobs]):
            result = each.result()
            if result is None:
                continue
            load.append(os.getloadavg()[0])
            rows[result.kind].runs.append(result)
            problems = [f"false error: {text}" for text in result.false_errors]
            problems += [f"false warning: {text}" for text in result.false_warnings]
            problems += ["not named"] * (result.kind == "sick" and not result.named)
            problems += ["ended as hung"] * result.killed
            problems += ["not as the tests want"] * (not problems and not result.exact)
            problems += [result.trouble] * bool(result.trouble)
            for problem in problems:
                print(f"  {result.kind} {result.path.stem} ({result.seconds:.0f} s): {problem}")
            sys.stdout.flush()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
        f"load {min(load, default=0):.0f} to {max(load, default=0):.0f}"
    )
    if len(load) < len(jobs):
        print(f"{len(jobs) - len(load)} jobs were not started: --skip {asked.skip + len(load)}")
    print(
        "| jobs | runs | named | with a false error | with a false warning | ended wrongly "
        "| as the tests want |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind, row in rows.items():
        named = str(row.count("named")) if kind == "sick" else ""
        counts = [row.count(what) for what in WRONG]
        print(f"| {kind} | {len(row.runs)} | {named} | {' | '.join(map(str, counts))} |")


if __name__ == "__main__":
    main()

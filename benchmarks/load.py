"""All sick and healthy sample jobs beside busy processes: are the verdicts those of a calm machine?

    python benchmarks/load.py --busy 20 --at-once 10

It runs ``tests/diagnose/test_sick_jobs.py`` as a whole beside them and prints its table, so what is
wanted of a job stands in one place, there. "As the tests want" counts the tests that passed: of a
sick job exactly the findings of its marks, of a healed twin nothing at all, not even withdrawn, of
a healthy job nothing above info, and of each the exit status that it states. Jobs that are sick
only where cores are free, as they say in their heads, are left out.

Exit status: 0 if every test passed, else pytest's own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent / "tests" / "diagnose" / "test_sick_jobs.py"
BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(100000))"
KINDS = {
    "test_a_sick_job_is_named": "sick",
    "test_its_healed_twin_is_left_alone": "healed",
    "test_a_healthy_job_is_left_alone": "healthy",
}


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


class Table:
    """What came of each job, from the tests' reports (a pytest plugin)."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS.values()}
        self.load: list[float] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a job, and print what is wrong with it as soon as it is known."""
        kind = KINDS.get(report.location[2].split("[", 1)[0])
        if kind is None or report.skipped or (report.when != "call" and report.passed):
            return
        noted = dict(report.user_properties)
        others = [str(each) for each in noted.get("others", [])]  # type: ignore[attr-defined]
        row = self.counts[kind]
        if report.when == "call":
            self.load.append(os.getloadavg()[0])
            row["runs"] += 1
            row["named"] += bool(noted.get("named"))
            row["errors"] += any(each.startswith("error") for each in others)
            row["warnings"] += any(each.startswith("warning") for each in others)
            row["killed"] += bool(noted.get("killed"))
        row["exact"] += 1 if report.passed else -(report.when == "teardown")
        if report.failed:
            name = report.location[2].partition("[")[2].rstrip("]")
            print(f"\n{kind} {name} ({report.duration:.0f} s, {report.when}): {noted}", flush=True)

    def __str__(self) -> str:
        lines = [
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
            f"load {min(self.load, default=0):.0f} to {max(self.load, default=0):.0f}",
            "| jobs | runs | named | with a false error | with a false warning | ended wrongly "
            "| as the tests want |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for kind, row in self.counts.items():
            counts = [row[what] for what in ("errors", "warnings", "killed", "exact")]
            named = row["named"] if kind == "sick" else ""
            lines.append(f"| {kind} | {row['runs']} | {named} | {' | '.join(map(str, counts))} |")
        return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--busy", type=int, default=20, help="processes that compute meanwhile")
    parser.add_argument("--nice", type=int, default=0, help="their niceness")
    parser.add_argument("--at-once", type=int, default=4, help="jobs at the same time")
    parser.add_argument("--only", default="test_", help="jobs whose name matches this (pytest -k)")
    asked = parser.parse_args()
    words = [str(TESTS), "-q", "-m", "slow or not slow", "-k", asked.only, "-p", "no:cacheprovider"]
    words += ["-n", str(asked.at_once), "--maxschedchunk", "1"]
    table = Table()
    with busy(asked.busy, asked.nice):
        status = pytest.main(words, plugins=[table])
    print(table)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())

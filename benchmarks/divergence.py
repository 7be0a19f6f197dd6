"""What looking for divergence costs, and how soon it sees one.

python benchmarks/divergence.py [fingerprints|delay]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.overhead import DOCTOR, HERE, alternately, run


def fingerprints(pairs: int, directory: str) -> None:
    """Looking for wrong results: the tiny job with the default budget and with none, in turn.

    The share that ranks themselves say they spent does not scatter as step times do.
    """
    job = str(HERE / "jobs" / "tiny.py")
    off = ("--overhead-budget", "0")
    shares: list[float] = []
    spent: list[float] = []
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    for index in range(pairs):
        found: dict[bool, dict[str, float]] = {}
        for looks in alternately(index):
            record = Path(directory) / f"fingerprints{index}{looks:d}"
            options = ("--run-dir", str(record), *(() if looks else off))
            found[looks] = json.loads(run([*DOCTOR[:4], *options, *DOCTOR[4:], job], directory)[1])
            if looks:
                ends = list(accounts(record))
                spent += [nanoseconds for nanoseconds, _ in ends]
                shares += [nanoseconds / over for nanoseconds, over in ends]
        for what, values in ratios.items():
            values.append(found[True][what] / found[False][what])
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("what", choices=("fingerprints", "delay"))
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.what == "delay":
            delay(directory)
        else:
            fingerprints(options.pairs, directory)


if __name__ == "__main__":
    main()

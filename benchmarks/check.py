"""How long ``ddpdoctor check`` takes on this machine, from the command line to its end.

    python benchmarks/check.py [--rounds 9]

Each row is the whole command in a process of its own: without the self-test, and with the self-test
of two, eight and sixteen ranks.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from statistics import median

ROWS = {
    "without the self-test": ("--skip", "collectives"),
    "2 ranks": ("--nproc-per-node", "2"),
    "8 ranks": ("--nproc-per-node", "8"),
    "16 ranks": ("--nproc-per-node", "16"),
}


def once(words: tuple[str, ...]) -> float:
    """Seconds of one check."""
    began = time.monotonic()
    command = [sys.executable, "-m", "ddpdoctor", "check", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    # 1: more ranks than cores is worth a warning.
    if done.returncode not in (0, 1):
        sys.exit(f"the check itself failed:\n{done.stdout}")
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    load = os.getloadavg()[0]
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores, load {load:.1f}")
    for name, words in ROWS.items():
        seconds = sorted(once(words) for _ in range(rounds))
        print(
            f"| {name} | {median(seconds):.2f} s (from {seconds[0]:.2f} to {seconds[-1]:.2f}, "
            f"{rounds} runs) |"
        )


if __name__ == "__main__":
    main()

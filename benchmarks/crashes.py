"""How soon a crash is named, and how fast logs are read.

``python benchmarks/crashes.py live [--ranks 8] [--rounds 5]`` starts jobs of which one rank raises,
is killed, or aborts, while all others hang and ignore SIGTERM; it prints the time from the crash to
the sentence on stderr. ``python benchmarks/crashes.py log [--megabytes 100]`` reads large logs.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ddpdoctor.failures.log import read

JOB = """
import ctypes, os, signal, sys, time
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1:
    time.sleep(1)
    with open(sys.argv[2], "w") as file:
        file.write(repr(time.time()))
    if sys.argv[1] == "raise":
        raise ValueError("the crash")
    if sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "exit":
        os._exit(7)
    ctypes.string_at(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""
KINDS = {"raise": "DDP901", "kill": "DDP902", "segfault": "DDP904", "exit": "DDP905"}


def live(ranks: int, rounds: int) -> None:
    for kind, code in KINDS.items():
        delays = [_delay(kind, code, ranks) for _ in range(rounds)]
        print(
            f"{kind:>9}: median {statistics.median(delays):.2f} s, most {max(delays):.2f} s "
            f"({ranks} ranks, {rounds} rounds)"
        )


def _delay(kind: str, code: str, ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script, moment = Path(folder, "job.py"), Path(folder, "moment")
        script.write_text(JOB)
        process = subprocess.Popen(
            [
                sys.executable, "-m", "ddpdoctor", "run", "--quiet", "--grace", "1",
                "--debug-port", "0", "--nproc-per-node", str(ranks), str(script), kind, str(moment),
            ],
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
        )  # fmt: skip
        assert process.stderr is not None
        said = re.compile(rf"ddpdoctor: error {code}: rank 1 ".encode())
        seen = 0.0
        for line in process.stderr:
            if said.match(line):
                seen = time.time()
                process.send_signal(signal.SIGTERM)
                break
        process.stderr.read()
        process.wait()
        if not seen:
            raise SystemExit(f"{kind} was not named")
        return seen - float(moment.read_text())


def log(megabytes: int) -> None:
    step = b"[default%d]:2026-11-22 03:08:%02d,123 INFO train.py:88 epoch 3 step %07d loss 0.1234\n"
    bar = b"\rEpoch 3:  %02d%%|######    | %07d/9999999 [01:02<03:04, 12.3it/s, loss=0.123]"
    hard = b"[rank%d]: validation Error: 0.%02d at step %07d, timeout=1800, Connection kept\n"
    sick = (Path(__file__).parent.parent / "tests" / "logs" / "exception.log").read_bytes()
    for name, form in (("plain lines", step), ("progress bars", bar), ("every line a hit", hard)):
        size = megabytes << 20
        lines = [form % ((n % 8, n % 60, n) if form is not bar else (n % 100, n)) for n in
                 range(size // len(form))]  # fmt: skip
        data = b"".join(lines) + b"\n" + sick
        started = time.perf_counter()
        sightings = read(name, [data[at : at + (1 << 20)] for at in range(0, len(data), 1 << 20)])
        seconds = time.perf_counter() - started
        assert any("wrong sort of batch" in each.text for each in sightings)
        print(f"{name:>18}: {len(data) / seconds / 1e6:.0f} MB/s ({len(data) / 1e6:.0f} MB)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["live", "log"])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=100)
    options = parser.parse_args()
    if options.what == "live":
        live(options.ranks, options.rounds)
    else:
        log(options.megabytes)


if __name__ == "__main__":
    main()

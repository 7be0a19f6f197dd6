"""What stacks cost, and what the process survives that is asked for them.

    python benchmarks/stacks.py [merge ask declare survive ...] [--python PATH]

``merge``: the stacks of 1,024 ranks, generated, become a tree and lines of text. ``ask``: 8
processes are asked, with a torch-free Python each. ``declare``: what the start of a process costs.
``survive``: a process whose threads run ordinary Python code all the time is asked for its stacks
again and again for 20 seconds, in our way and by ``faulthandler``'s signal alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import ddpdoctor.probe
from ddpdoctor.render.stack_text import StackStyle, draw
from ddpdoctor.run.names import FORMAT
from ddpdoctor.run.reader import glance
from ddpdoctor.run.records.supervisor import MAIN, Frame, RankStacks, Thread
from ddpdoctor.stacks.capture import capture
from ddpdoctor.stacks.frames import fold, merge

ENTRY = Path(ddpdoctor.probe.__file__).parent / "entry"
SECONDS = 20

_HOT = """
import faulthandler, os, signal, sys, threading, time

def deep(depth):
    return deep(depth - 1) if depth else sum(n for n in range(20))

def hot():
    while True: deep(10)

def short():
    while True:
        thread = threading.Thread(target=deep, args=(5,))
        thread.start()
        thread.join()

if len(sys.argv) > 1:
    file = open(os.devnull, "w")
    faulthandler.register(signal.SIGRTMAX - 1, file, sys.argv[1] == "all", False)
for target in (hot, hot, short, short):
    threading.Thread(target=target, daemon=True).start()
print("ready", flush=True)
hot()
"""

_SLEEPING = "import time; print('ready', flush=True); time.sleep(600)"

_DECLARE = """
import time
from ddpdoctor.probe.runtime import control, stacks
started = time.perf_counter_ns()
stacks.declare()
print(time.perf_counter_ns() - started)
"""


@contextlib.contextmanager
def run_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "run.json").write_text(json.dumps({"format": FORMAT}))
        yield path


def start(python: str, code: str, run: Path, rank: int, *words: str) -> subprocess.Popen[str]:
    """A process as torchrun starts it; it has said that it is ready."""
    process = subprocess.Popen(
        [python, "-c", code, *words],
        env={
            **os.environ, "PYTHONPATH": str(ENTRY), "DDPDOCTOR_RUN_DIR": str(run),
            "TORCHELASTIC_RUN_ID": "none", "RANK": str(rank), "LOCAL_RANK": str(rank),
        },
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.readline()
    return process


def merge_a_thousand() -> None:
    torch = "/srv/env/lib/python3.12/site-packages/torch"
    outer = [(f"/job/part{n}.py", 10 * n, f"f{n}") for n in range(20)]
    inner = [(f"{torch}/nn/modules/part{n}.py", n, "_call_impl") for n in range(60)]

    def one(rank: int) -> RankStacks:
        own = ("/job/model.py", 100 + (rank % 100 == 3), "forward")
        below = (f"{torch}/autograd/graph.py", 800 + rank % 3, "wait")
        # As from the ranks' own files: nothing is shared between them.
        frames = tuple(Frame(*each) for each in (*outer, *inner, own, below))
        return RankStacks(rank, 0, 1000 + rank, "node", (Thread(1, MAIN, False, frames),))

    stacks = [one(rank) for rank in range(1024)]
    for what, do in (
        ("merged, every frame", lambda: merge(stacks)),
        ("merged, libraries folded", lambda: merge(stacks, fold)),
        ("merged and drawn", lambda: draw(stacks, StackStyle(), {})),
    ):
        times = []
        for _ in range(7):
            started = time.perf_counter()
            do()
            times.append(time.perf_counter() - started)
        print(
            f"1,024 ranks of 82 frames, {what}: {1000 * statistics.median(times):.0f} ms, "
            f"most {1000 * max(times):.0f} ms"
        )


def ask(python: str) -> None:
    with run_directory() as run:
        processes = [start(python, _SLEEPING, run, rank) for rank in range(8)]
        times = []
        for _ in range(50):
            started = time.perf_counter()
            found = capture(glance(run))
            times.append(time.perf_counter() - started)
            assert all(each.main is not None for each in found), found
        for process in processes:
            process.kill()
            process.wait()
        print(
            f"8 processes asked: {1000 * statistics.median(times):.1f} ms, "
            f"most {1000 * max(times):.1f} ms of 50"
        )


def declare(python: str) -> None:
    times = []
    for _ in range(15):
        with run_directory() as run:
            environment = {
                **os.environ,
                "PYTHONPATH": str(Path(ddpdoctor.probe.__file__).parent.parent.parent),
                "DDPDOCTOR_RUN_DIR": str(run),
            }
            done = subprocess.run(
                [python, "-c", _DECLARE], env=environment, capture_output=True, check=True
            )
            times.append(int(done.stdout) / 1e6)
    print(f"a process declares itself: {statistics.median(times):.2f} ms, most {max(times):.2f} ms")


def survive(python: str) -> None:
    for words in ((), ("one",), ("all",)):
        with run_directory() as run:
            process = start(python, _HOT, run, 0, *words)
            asked = answers = 0
            end = time.monotonic() + SECONDS
            while process.poll() is None and time.monotonic() < end:
                asked += 1
                if words:
                    process.send_signal(signal.SIGRTMAX - 1)
                    time.sleep(0.002)
                else:
                    answers += capture(glance(run))[0].main is not None
            status = process.poll()
            process.kill()
            process.wait()
        how = {
            (): f"asked in our way, {answers} answers",
            ("one",): "faulthandler, the signalled thread alone",
            ("all",): "faulthandler, all threads",
        }[words]
        fate = "lives" if status is None else f"ended by {signal.Signals(-status).name}"
        print(f"{how}: {fate} after {asked}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["merge", "ask", "declare"])
    parser.add_argument("--python", default=sys.executable)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    for part in options.parts:
        if part == "merge":
            merge_a_thousand()
        else:
            {"ask": ask, "declare": declare, "survive": survive}[part](options.python)


if __name__ == "__main__":
    main()

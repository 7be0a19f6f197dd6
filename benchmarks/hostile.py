r"""Mutated run directories through `report`, `top --once` and `stacks`: what hostile ones can do.

    python benchmarks/hostile.py [--count N] [--seed N] DIRECTORY...

Each DIRECTORY is a run directory to mutate; runs of `tests/jobs/sick` are good ones. A mutated
copy has one to five of: bytes changed, cut or repeated in a file; a value of a JSON record
replaced, removed or nested; a number of a status page replaced; escapes put into texts; a file
replaced by a FIFO, a link to `/dev/zero`, a sparse file of a terabyte, a socket, a directory, or
one long line.

The commands run in worker processes, 50 directories each. What is counted: exceptions that leave a
command, directories that take longer than `HANG_S`, the most memory of a worker, and control
characters in what was printed. One in 50 runs in processes of their own as well.

Seeds are made by a few jobs, for instance:

    for job in ddp401_barrier_on_rank_0 ddp901_in_a_worker ddp610_heavier_samples; do
        ddpdoctor run --nproc-per-node 2 --hang-after 5 --kill-on-hang --run-dir seeds/$job \
            -- $(find . -name $job.py)
    done
    python benchmarks/hostile.py seeds/*
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import os
import random
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BATCH = 50
HANG_S = 120.0
"""Seconds, on a machine that other work shares."""

COMMANDS = (["report"], ["top", "--once"], ["stacks"])
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
ESCAPES = "\x1b[2J\x9b1m\x07\x7f\u202e\u2066\u2028\x00\r\x1b]0;title\x1b\\\ud800"
VALUES: tuple[Any, ...] = (
    *(None, True, "", ESCAPES, "x" * 100_000, [], {}, [[]], -1, 0, 1 << 31, 1 << 63, -(1 << 63)),
    *(10**400, 1e308, -0.0, math.nan, math.inf, -math.inf, "/dev/zero", "/proc/self/mem", "\0"),
    *([None] * 1_000, {"": {"": []}}, "../../etc/passwd", "rank", [ESCAPES], 0.5, "9" * 4_000),
)


# -- mutations


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a JSON value: its container and its key."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield value, key
        yield from places(inner)


def changed_json(text: bytes, rng: random.Random) -> bytes:
    value = json.loads(text)
    for _ in range(rng.choice((1, 1, 2, 5))):
        found = list(places(value))
        if not found:
            break
        container, key = rng.choice(found)
        if rng.random() < 0.2:
            del container[key]
        elif rng.random() < 0.2 and isinstance(container[key], str):
            at = rng.randrange(len(container[key]) + 1)
            container[key] = container[key][:at] + ESCAPES + container[key][at:]
        elif rng.random() < 0.1:
            other, place = rng.choice(found)
            container[key] = json.loads(json.dumps(other[place]))
        else:
            # A copy: what is put into a value here must not be in the next directory.
            container[key] = copy.deepcopy(rng.choice(VALUES))
    return json.dumps(value).encode()


def change_record(path: Path, rng: random.Random) -> None:
    if path.suffix == ".json":
        path.write_bytes(changed_json(path.read_bytes(), rng))
        return
    lines = path.read_bytes().split(b"\n")
    for _ in range(rng.choice((1, 1, 3, 10))):
        at = rng.randrange(len(lines))
        with contextlib.suppress(ValueError):
            lines[at] = changed_json(lines[at], rng)
    if rng.random() < 0.2:
        rng.shuffle(lines)
    if rng.random() < 0.1:
        lines += lines
    path.write_bytes(b"\n".join(lines))


def change_bytes(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 4, 32))):
        if data:
            data[rng.randrange(len(data))] = rng.randrange(256)
    path.write_bytes(data)


def change_number(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 10))):
        if len(data) >= 16:
            at = rng.randrange(min(len(data), 1024) // 8) * 8
            number = rng.choice((0, 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, rng.getrandbits(64)))
            data[at : at + 8] = number.to_bytes(8, "little")
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def repeat(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    begin = rng.randrange(len(data) + 1)
    part = data[begin : begin + rng.randrange(4_096)]
    path.write_bytes(data[:begin] + part * rng.choice((2, 100)) + data[begin:])


def insert(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    path.write_bytes(data[:at] + ESCAPES.encode("utf-8", "surrogatepass") + data[at:])


def swap(path: Path, rng: random.Random) -> None:
    other = rng.choice(sorted(each for each in path.parent.iterdir() if each.is_file()))
    shutil.copy(other, path.with_name("swapped"))
    path.with_name("swapped").replace(path)


def special(path: Path, rng: random.Random) -> None:
    path.unlink()
    kind = rng.choice(("fifo", "zeros", "sparse", "socket", "directory", "long", "nothing", "loop"))
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zeros":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, contextlib.suppress(OSError):
            made.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    elif kind == "long":
        piece = rng.choice((b"x", b"[", b'{"kind":', b"Error: ", b"[rank0]: ", b"\x1b[31m", b"\0"))
        path.write_bytes(piece * ((4 << 20) // len(piece)))


MUTATIONS: tuple[tuple[Callable[[Path, random.Random], None], int], ...] = (
    *((change_record, 12), (change_bytes, 3), (change_number, 4), (cut, 2)),
    *((repeat, 2), (insert, 3), (swap, 1), (special, 1)),
)


def mutate(directory: Path, rng: random.Random) -> list[str]:
    """Mutate a copy; what was done, in words."""
    done = []
    for _ in range(rng.randint(1, 5)):
        (change,) = rng.choices(*zip(*MUTATIONS, strict=True))
        wanted = {change_record: (".json", ".jsonl", ".1"), change_number: (".status",)}
        suffixes = wanted.get(change)
        files = sorted(
            path
            for path in directory.iterdir()
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 22
        )
        files = [path for path in files if suffixes is None or path.suffix in suffixes] or files
        if not files:
            break
        path = rng.choice(files)
        done.append(f"{change.__name__} {path.name}")
        with contextlib.suppress(ValueError, RecursionError):
            change(path, rng)
    return done


# -- commands


@dataclass
class Outcome:
    """What a number of directories did."""

    directories: int = 0
    commands: int = 0
    tracebacks: int = 0
    hangs: int = 0
    controls: int = 0
    faults: int = 0
    """Rules that failed, each said in a line: the others were applied."""
    memory: int = 0
    """Bytes, the most of a process."""
    slowest: float = 0.0
    """Seconds of CPU of a command."""
    examples: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take in what other directories did."""
        for name in ("directories", "commands", "tracebacks", "hangs", "controls", "faults"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.memory = max(self.memory, other.memory)
        self.slowest = max(self.slowest, other.slowest)
        self.examples += other.examples


def called(words: list[str]) -> tuple[str, str]:
    """What a command prints in this process; and its traceback, if an exception leaves it."""
    from ddpdoctor.cli import main

    out = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True)
    failure = ""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as direct:
        os.dup2(direct.fileno(), 2)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                main(words)
        except BaseException:
            failure = traceback.format_exc()
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        direct.seek(0)
        text = b"".join(each.buffer.getvalue() for each in (out, err))
        return (text + direct.read()).decode("utf-8", "replace"), failure


def judge(outcome: Outcome, text: str, failure: str, words: list[str], where: str) -> None:
    outcome.commands += 1
    if failure or "Traceback (most recent call last)" in failure:
        outcome.tracebacks += 1
        outcome.examples.append(f"{where}: {' '.join(words)}\n{failure}")
    match = RAW.search(text)
    if match:
        outcome.controls += 1
        near = text[max(0, match.start() - 60) : match.end() + 20]
        outcome.examples.append(f"{where}: {' '.join(words)}: control in {near!r}")
    lines = [line for line in text.splitlines() if "internal error in" in line]
    outcome.faults += len(lines)
    outcome.examples += [f"{where}: {line}" for line in lines]


def work(numbers: range, seeds: list[str], base: int) -> None:
    """Take some directories through all commands: the body of a worker process.

    It writes a line of JSON to stdout with the number of each before it begins, and a last one with
    the outcome.
    """
    results = os.fdopen(os.dup(1), "w", buffering=1)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
    outcome = Outcome()
    for number in numbers:
        results.write(f"{number}\n")
        rng = random.Random(base * 1_000_003 + number)
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            directory = Path(folder) / "run"
            shutil.copytree(rng.choice(seeds), directory, symlinks=True)
            for path in directory.iterdir():
                path.chmod(0o700)
            done = mutate(directory, rng)
            where = f"directory {number} ({', '.join(done)})"
            outcome.directories += 1
            for words in COMMANDS:
                began = time.process_time()
                text, failure = called([*words, str(directory)])
                outcome.slowest = max(outcome.slowest, time.process_time() - began)
                judge(outcome, text, failure, words, where)
                if number % BATCH == 0:
                    judge_process(outcome, [*words, str(directory)], where)
    outcome.memory = max(outcome.memory, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10)
    results.write(f"{json.dumps(asdict(outcome))}\n")


def judge_process(outcome: Outcome, words: list[str], where: str) -> None:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "ddpdoctor", *words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        text = process.communicate(timeout=HANG_S)[0].decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        outcome.hangs += 1
        outcome.examples.append(f"{where}: {' '.join(words)} hangs")
        return
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss << 10
    outcome.memory = max(outcome.memory, used)
    failure = text if process.returncode not in (0, 1, 2, 3) else ""
    judge(outcome, text, failure, words, where)


def batch(numbers: range, seeds: list[str], base: int) -> Outcome:
    """A worker process's directories; one that hangs ends it, and the rest gets another worker."""
    whole = Outcome()
    while numbers:
        words = ["--worker", "--first", str(numbers.start), "--count", str(len(numbers))]
        # A process of its own from its first instruction on: it inherits no lock.
        worker = subprocess.Popen(
            [sys.executable, __file__, *words, "--seed", str(base), "--", *seeds],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        last, told = numbers.start, None
        for told in heard(worker):
            last = told if isinstance(told, int) else last
        if isinstance(told, dict):
            whole.add(Outcome(**told))
            numbers = range(0)
        else:
            ended = worker.returncode is not None
            what = f"ends with status {worker.returncode}" if ended else "hangs"
            whole.tracebacks += ended
            whole.hangs += not ended
            whole.examples.append(f"directory {last} {what}")
            numbers = range(last + 1, numbers.stop)
        worker.kill()
        worker.wait()
    return whole


def heard(worker: subprocess.Popen[bytes]) -> Iterator[Any]:
    """The lines of a worker, until it ends or says nothing for too long."""
    assert worker.stdout is not None
    with worker.stdout as pipe:
        text = b""
        while select.select([pipe], [], [], HANG_S * len(COMMANDS))[0]:
            data = os.read(pipe.fileno(), 1 << 16)
            if not data:
                worker.wait()
                return
            *lines, text = (text + data).split(b"\n")
            yield from map(json.loads, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directories", nargs="+", metavar="DIRECTORY")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first directory")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        numbers = range(options.first, options.first + options.count)
        work(numbers, options.directories, options.seed)
        return 0
    whole = Outcome()
    began = time.monotonic()
    for begin in range(options.first, options.first + options.count, BATCH):
        numbers = range(begin, min(begin + BATCH, options.first + options.count))
        found = batch(numbers, options.directories, options.seed)
        whole.add(found)
        for example in found.examples:
            print(example, flush=True)
        print(
            f"{whole.directories} directories, {whole.commands} commands in "
            f"{time.monotonic() - began:.0f} s: {whole.tracebacks} tracebacks, "
            f"{whole.hangs} hangs, {whole.controls} control characters, "
            f"{whole.faults} rules that failed, "
            f"{whole.memory / 1e6:.0f} MB, slowest {whole.slowest:.1f} s of CPU",
            flush=True,
        )
    return int(bool(whole.tracebacks or whole.hangs or whole.controls))


if __name__ == "__main__":
    sys.exit(main())

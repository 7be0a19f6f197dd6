"""What it takes to read a long log: CPU time a gigabyte, and memory.

    python benchmarks/logs.py --megabytes 300

Two logs that nothing failed in: one repeats itself but for its numbers, as training does, and one
whose lines are all different.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Callable, Iterator

from ddpdoctor.failures.log import LogReader

CHUNK = 1 << 20
STEP = (
    b"epoch %d step %d loss %.3f lr 0.001 time %.2f s/it eta 1:02:33 INFO train.py:77 all is well\n"
)


def repeated(number: int, chance: random.Random) -> bytes:
    """A line of a step."""
    return STEP % (number // 1000, number, chance.random(), chance.random())


def different(number: int, chance: random.Random) -> bytes:
    """A line of made-up words."""
    words = ("".join(chance.choices("abcdilmotux", k=8)) for _ in range(11))
    return " ".join(words).encode() + b"\n"


def chunks(line: Callable[[int, random.Random], bytes]) -> Iterator[bytes]:
    """Pieces of such lines, for ever; a few thousand numbers further each time."""
    chance = random.Random(0)
    number = 0
    while True:
        made = bytearray()
        while len(made) < CHUNK:
            made += line(number, chance)
            number += 1
        yield bytes(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--megabytes", type=int, default=100, help="of each log")
    asked = parser.parse_args()
    for name, line in (("repeated", repeated), ("different", different)):
        reader, spent = LogReader("train.log"), 0.0
        pieces = chunks(line)
        for _ in range(asked.megabytes):
            piece = next(pieces)
            began = time.thread_time()
            reader.feed(piece)
            spent += time.thread_time() - began
        found = len(reader.close())
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        each = spent / asked.megabytes * 1e9 / CHUNK
        print(f"{name} lines: {each:.1f} s of CPU a GB, {memory:.0f} MiB, {found} found")


if __name__ == "__main__":
    main()

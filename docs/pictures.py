"""Makes the pictures of the README: ``python docs/pictures.py``, or only ``... hang``."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from itertools import chain, repeat
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ddpdoctor.top.app import TopApp
from ddpdoctor.top.recording import DemoSource
from ddpdoctor.top.view import View

HERE = Path(__file__).parent
NOON = 1_800_014_400.0
"""The demonstration's clock stands still, so that a picture changes only when the monitor does."""


async def top() -> None:
    """``ddpdoctor top --demo``, with the slow rank in full."""
    # Begun a moment ago: the age of what it shows is not zero.
    clock = chain([NOON - 0.1], repeat(NOON))
    app = TopApp(lambda: DemoSource(1.0, clock=lambda: next(clock)), View())
    async with app.run_test(size=(110, 28)) as pilot:
        while not app.drawn.ranks:
            await pilot.pause(0.05)
        await pilot.press("enter")
        while "rank 5 on" not in str(app.drawn.lines):
            await pilot.pause(0.05)
        await pilot.pause(0.3)
        picture = app.export_screenshot(title="ddpdoctor top")
    (HERE / "top.svg").write_text(without_fonts(picture))


HANG = HERE.parent / "sample_jobs" / "sick" / "ddp802_no_answer.py"
"""Rank 1 asks a server that does not answer."""


def hang() -> str:
    """What ``ddpdoctor run`` prints of a real job that hangs, on a terminal of 88 columns."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--no-debug", "--run-dir", "run", "--nproc-per-node", "2"]
        words += ["--hang-after", "3", "--kill-on-hang", "train.py"]
        source = re.sub("  # expect: .*", "", HANG.read_text())
        Path(folder, "train.py").write_text(source)
        leader, follower = os.openpty()
        fcntl.ioctl(leader, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 88, 0, 0))
        child = subprocess.Popen(
            [sys.executable, "-m", "ddpdoctor", "run", *words],
            cwd=folder, stdin=subprocess.DEVNULL, stdout=follower, stderr=follower,
            env={**os.environ, "TERM": "xterm"},
        )  # fmt: skip
        os.close(follower)
        seen = b""
        try:
            while chunk := os.read(leader, 1 << 16):
                seen += chunk
        except OSError:
            # Linux ends a pseudo-terminal so.
            pass
        child.wait()
        os.close(leader)
    text = seen.decode().replace("\r\n", "\n")
    lines = [line.split("\r")[-1] for line in text.split("\n")]
    plain = [Text.from_ansi(line).plain for line in lines]
    first = next(number for number, line in enumerate(plain) if "error DDP802" in line)
    found = [line for line in lines[first:] if line.startswith("ddpdoctor: ")]
    last = next(number for number, line in enumerate(found) if "fix: " in line) + 1
    while found[last].startswith("ddpdoctor:    "):
        last += 1
    return "\n".join(["$ ddpdoctor run --nproc-per-node 2 -- train.py", "...", *found[:last]])


def drawn(text: str) -> str:
    """A picture of a terminal with this text."""
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi(text), soft_wrap=True)
    return without_fonts(console.export_svg(title="ddpdoctor run", unique_id="hang"))


def without_fonts(picture: str) -> str:
    """The fonts of the viewer, rather than ones that it would have to fetch."""
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, monospace", "font-family: monospace", picture)


if __name__ == "__main__":
    (HERE / "hang.svg").write_text(drawn(hang()))
    if sys.argv[1:] != ["hang"]:
        asyncio.run(top())

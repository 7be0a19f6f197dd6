"""Logs as people post them: quoted, numbered, without indentation, changed by editors and pages."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpdoctor.failures.lines import unwrapped
from ddpdoctor.failures.log import LogReader, read
from ddpdoctor.failures.verdict import findings
from tests.support.log_lines import STEPS, one

LOGS = Path(__file__).parents[1] / "logs"

POSTED: dict[str, Callable[[str], str]] = {
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()),
    "indented": lambda text: "".join(f"    {line}\n" for line in text.splitlines()),
    "fenced": lambda text: f"```python\n{text}\n```\n",
    "numbered": lambda text: "".join(f"{n:6}\t{s}\n" for n, s in enumerate(text.split("\n"), 1)),
    "double spaced": lambda text: text.replace("\n", "\n\n"),
    "escaped": html.escape,
    "typeset": lambda text: re.sub(r"'([^'\n]*)'", "\u2018\\1\u2019", text),
    "emphasized": lambda text: re.sub(r"(?m)^(\w+Error: .*)$", r"**\1**", text),
    "without indentation": lambda text: re.sub(r"(?m)^ +", "", text),
    "cut short": lambda text: f"...\n{text}\n...\n",
    "joined": lambda text: " ".join(line.strip() for line in text.splitlines()),
    "wrapped": lambda text: re.sub(r"([^\n]{100})(?=[^\n])", r"\1\n", text),
    "logged": lambda text: "".join(f"ERROR:root:{line}\n" for line in text.splitlines()),
}


@pytest.mark.parametrize("how", POSTED)
@pytest.mark.parametrize(
    "name", ["exception", "no_network_hub", "unpicklable", "cuda_of_cpu_wheel", "worker_exception"]
)
def test_a_posted_log_says_the_same(name: str, how: str) -> None:
    text = (LOGS / f"{name}.log").read_text()
    as_printed, posted = one(text), one(POSTED[how](text))
    assert posted.code == as_printed.code
    # Of joined lines, what follows may be taken for the end of the message.
    said = as_printed.message.partition(" raised ")[2] or as_printed.message.split()[-1]
    assert said in posted.message


@pytest.mark.parametrize("how", ["fenced", "double spaced", "without indentation", "cut short"])
def test_a_traceback_without_its_ends_is_told(how: str) -> None:
    frames = "".join(
        f'  File "/job/{name}.py", line 7, in {name}\n    x = {name}()\n' for name in "abc"
    )
    found = one(POSTED[how](frames))
    assert "cut off" in found.message


def test_the_margin_is_taken_off_each_piece() -> None:
    text = POSTED["indented"](STEPS * 20 + (LOGS / "exception.log").read_text())
    reader = LogReader("job.log")
    for start in range(0, len(text), 1000):
        reader.feed(text[start : start + 1000].encode())
    (found,) = findings(reader.close())
    assert found.code == "DDP901"


def test_numbers_of_steps_are_no_margin() -> None:
    steps = "".join(f"{step} loss 0.{step}\n" for step in range(3, 90, 3))
    assert not findings(read("job.log", [steps.encode()]))


def test_the_message_that_follows_a_cut_exception_is_likely_its_own() -> None:
    frames = 'Traceback (most recent call last):\n  File "/job/a.py", line 7, in a\n    x()\n'
    found = one(f"{frames}Expected to mark a variable ready only once.\n")
    assert found.code == "DDP323"
    assert "likely" in found.message


def test_frames_without_a_head_end_with_an_exception_of_any_name() -> None:
    frames = "".join(f'  File "/job/{name}.py", line 7, in {name}\n    x()\n' for name in "ab")
    found = one(f"{frames}socket.gaierror: [Errno -2] Name or service not known\n")
    assert "raised socket.gaierror" in found.message


def test_joined_lines_keep_their_numbers() -> None:
    text = (LOGS / "no_network_hub.log").read_text()
    (found,) = findings(read("job.log", [POSTED["wrapped"](text + "KeyError: 1\n").encode()]))
    number = int(found.evidence[0].split(":")[1])
    assert "OSError: We couldn't connect" in POSTED["wrapped"](text).split("\n")[number - 1]


def test_lines_that_a_terminal_filled_up_are_not_joined() -> None:
    words = ("alpha", "gamma", "delta", "kappa")
    lines = [f"{each} is a line whose text is longer than a terminal is widened" for each in words]
    pieces = [piece.ljust(60) for each in lines for piece in (each[:60], each[60:])]
    posted = "\n".join([*pieces, "done".ljust(60), "frame \\#5: clone"])
    joined = [line.rstrip() for line in unwrapped(posted.encode()).decode().split("\n")]
    assert [line for line in joined if line] == [*lines, "done", "frame #5: clone"]


def test_lines_of_equal_length_were_not_broken_by_a_terminal() -> None:
    steps = "".join(f"{name} step {n:04} {'x' * 70} loss\n" for n in range(9) for name in "abc")
    assert unwrapped(steps.encode()) == steps.encode()

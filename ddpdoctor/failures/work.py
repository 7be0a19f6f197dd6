"""What a job at work prints, and what is written where one ends."""

from __future__ import annotations

import re
from itertools import takewhile

from ddpdoctor.failures.lines import HEAD, clean
from ddpdoctor.failures.prefixes import split_line
from ddpdoctor.failures.printed import Kind, kind_of
from ddpdoctor.failures.sightings import ALIKE

_BEGINNING = 20
"""Lines at the beginning of a log that are compared with those behind an end."""

_NEUTRAL = re.compile(r"^\s|^$|^[=\-]{4}|^\s*[|+*]|^\.\.\.|^\[\d+\]:$")
"""What a job at work prints as well as one that ends: of tables and of frames."""

COMPLAINT = re.compile(
    r"[Ee]rror|[Ww]arn|[Ff]ailed|[Ff]ailure|Traceback|Exception|terminate called|srun|slurm"
    r"|destroy_process_group|resource_tracker|[Kk]illed|[Aa]bort|core dumped"
    r"|Root Cause|FAILED|^\[?[IWEF](?:\d{3,4} | \S+\.cpp)|SIG[A-Z]{3}"
    r"|^wandb: |HYDRA_FULL_ERROR"
    r"|exited|Current thread|^Thread 0x|\(most recent call first\)|no Python frame"
    r"|frame #|leaked|^<NO_OTHER|^Failures:|^terminate"
)
"""What is written where a job ends, beside what a healthy one writes."""

PROGRESS = re.compile(r"(?i)step|epoch|iter|loss|\bit/s|\bs/it|\d/\d+ ")
_STEP = re.compile(r"(?i)\b(?:step|epoch|iter\w*)\W{1,3}\d|\d/\d+ .*\d\s?(?:it/s|s/it)")
_VARYING = re.compile(r"[\d.,:]+|[ █▏▎▍▌▋▊▉#\ufffd]{2,}")
WORDS = re.compile(r"[A-Za-z]{3}")


def is_plain(text: str) -> bool:
    """Whether a line reports no failure, and is none of a frame or a table."""
    return _NEUTRAL.search(text) is None and COMPLAINT.search(text) is None


def is_step(text: str) -> bool:
    """Whether a line says how far a job has come."""
    return _STEP.search(text) is not None and COMPLAINT.search(text) is None


def shape_of(text: str) -> str:
    """The beginning of a line without its numbers and bars: steps look alike."""
    return _VARYING.sub("", text)[:ALIKE]


def beginning_of(data: bytes) -> frozenset[str]:
    """The shapes of the lines that a log begins with, up to its first step or exception.

    If it begins with an exception, those behind that.
    """
    most = 3 * _BEGINNING
    lines = [split_line(clean(raw)).text for raw in data.split(b"\n", most)[:most]]
    if HEAD in lines[0]:
        ends = (number for number, text in enumerate(lines, 1) if kind_of(text) is Kind.EXCEPTION)
        lines = lines[next(ends, most) :]
    begin = lines[:_BEGINNING]
    start = takewhile(lambda text: HEAD not in text and not _STEP.search(text), begin)
    return frozenset(shape_of(text) for text in start if WORDS.search(text))

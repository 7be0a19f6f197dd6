"""Tell lines of a working job from those of one that ends."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile

from ddpdoctor.failures import recognise
from ddpdoctor.failures.lines import HEAD, clean, split_line, time_of
from ddpdoctor.failures.occurrences import ALIKE, is_mention
from ddpdoctor.failures.table import TABLE
from ddpdoctor.failures.tracebacks import Kind, kind_of

_BEGINNING = 20  # Lines at the beginning of a log that are compared with those after an end

_NEUTRAL = re.compile(
    r"\s|$|[=\-]{3}|[|+*│╭╰]|\.\.\.|\[\d+\]:$"
    r"|<ipython-input|(?:~?/|[A-Z]:\\)\S+ in |(?:File|Cell) \S+(?::\d+, |\[\d+\], )"
)
"""Lines of tables, frames and NCCL, which a working job prints as well as one that ends."""

COMPLAINT = re.compile(
    r"[Ee]rror|[Ww]arn|[Ff]ailed|[Ff]ailure|Traceback|Exception|terminate called|srun|slurm"
    r"|destroy_process_group|resource_tracker|[Kk]illed|[Aa]bort|core dumped"
    r"|Root Cause|FAILED|^\[?[IWEF](?:\d{3,4} | \S+\.cpp)|SIG[A-Z]{3}"
    r"|^wandb: |HYDRA_FULL_ERROR"
    r"|exited|Current thread|^Thread 0x|\(most recent call first\)|no Python frame"
    r"|frame #|leaked|^<NO_OTHER|^Failures:|^terminate"
)
"""Lines that are typical for the end of a job."""

_LAST_WORDS = re.compile(
    r"(?i)(?<![\w/.=-])(?:\w*error(?:s|ed)?|\w*exception|(?<!\w)(?:\w+\.)*remotetraceback|fail(?:ed|ure|s)?|fatal|abort(?:ed|ing)?"
    r"|crash(?:ed)?|killed|died|segfault|out of memory|no space left|broken pipe|soft lockup"
    r"|not responding|(?:closed|reset) by (?:remote|peer)|link (?:is )?down|unexpected (?:eof|end)"
    r"|(?:nan|loss)\W+(?:exploded|stopping)|refused|denied|unreachable|unhealthy|evicted|exhausted"
    r"|timed? ?out|fallen off|unable to|cannot|could not|couldn't|can't|not found|no such"
    r"|went wrong|podfailed|signal (?!15)\d+ \(sig\w+\)|ended prematurely"
    r"|exited abnormally|lost connection|unrecognized|usage(?=: \S+ (?:\[-|<)))"
    r"(?![\w/-]|\.\w|[^\w\n]{0,4}(?:rate|loss)?[^\w\n]{0,4}\.?\d[\d.]*(?:\W|$))"
    # What a terminal, torchrun, kubectl and gdb print of an end.
    r"|^(?:\^C)+$|^Failures:$|^\s*Last State: +Terminated$"
    r"|^#\d{1,3} +(?:0x[0-9a-f]{6,} in |\S[^\n]{0,300} \([^\n]{0,300}\) (?:at|from) \S)"
)
"""Words for a failure in any line. A number after them is a measure of a working job."""

_HARMLESS = re.compile(
    r"(?i)\b(?:no|without|any|0|ignor\w+|skip\w*) (?:\w+ )?(?:error|exception|fail)|warn|deprecat"
    r"|NCCL INFO |^-\w*sh: |cgroup|/proc/\d|^Exception raised from|^frame #"
)
ERROR_LINE = next(each for each in TABLE if each.known.name == "error-line")

DONE = re.compile(
    r"(?i)\b(?:train(?:ing)?|job|run|experiment|fine-?tuning)\b[^\n]{0,40}\b"
    r"(?:done|finished|completed?|succeeded|success\w*)\b|^done\W*$|\"success\""
    r"|\b(?:done|finished|completed) (?:with )?training\b|`max_\w+=\S+` reached|'train_runtime'"
    r"|^\s*reason: +completed$"
)
"""The normal end of a job, after which only its clean-up may complain."""

PROGRESS = re.compile(r"(?i)step|epoch|iter|loss|\bit/s|\bs/it|\d/\d+ ")
_STEP = re.compile(r"(?i)\b(?:step|epoch|iter\w*)\W{1,3}\d|\d/\d+ .*\d\s?(?:it/s|s/it)")
_VARYING = re.compile(r"[\d.,:]+|[ █▏▎▍▌▋▊▉#\ufffd]{2,}")
WORDS = re.compile(r"[A-Za-z]{3}")


def is_plain(text: str) -> bool:
    """Return whether a line reports no failure, and is not part of a frame or table."""
    neutral = _NEUTRAL.match(text) is not None or "NCCL INFO " in text
    return not neutral and COMPLAINT.search(text) is None


def is_step(text: str) -> bool:
    """Return whether a line reports progress."""
    return _STEP.search(text) is not None and COMPLAINT.search(text) is None


def tells_of_failure(text: str) -> bool:
    """Return whether a line has words for a failure, but does not report a known one."""
    harmless = _HARMLESS.search(text) or re.search(ERROR_LINE.unless, text)
    known = recognise(text)
    is_new = known is None or is_mention(text, known[0])
    return bool(_LAST_WORDS.search(text) and not harmless) and is_new


def shape_of(text: str) -> str:
    """Return the beginning of a line without numbers and bars, which is equal for all steps."""
    return _VARYING.sub("", text)[:ALIKE]


def beginning_of(data: bytes) -> frozenset[str]:
    """Return the shapes of a log's first lines, up to its first step or exception.

    If it begins with an exception, those after that.
    """
    most = 3 * _BEGINNING
    lines = [split_line(clean(raw)).text for raw in data.split(b"\n", most)[:most]]
    if HEAD in lines[0]:
        ends = (number for number, text in enumerate(lines, 1) if kind_of(text) is Kind.EXCEPTION)
        lines = lines[next(ends, most) :]
    begin = lines[:_BEGINNING]
    start = takewhile(lambda text: HEAD not in text and not _STEP.search(text), begin)
    return frozenset(shape_of(text) for text in start if WORDS.search(text))


_SAMPLED = 400  # Lines of a log's beginning whose order is looked at
_MIN_FALLING = 4  # Minimum pairs of lines whose times fall


def is_newest_first(data: bytes) -> bool:
    """Return whether the lines of a log are in reverse order, as some viewers export them."""
    lines = [split_line(clean(raw)).text for raw in data.split(b"\n", _SAMPLED)[:_SAMPLED]]
    heads = [at for at, text in enumerate(lines) if HEAD in text]
    if heads:
        return all(_is_above(lines[:at]) for at in heads)
    times = [time_of(clean(raw)) for raw in data.split(b"\n", _SAMPLED)[:_SAMPLED]]
    pairs = [(one, other) for one, other in pairwise(times) if one and other and one != other]
    falling = sum(one > other for one, other in pairs)
    return falling >= _MIN_FALLING and falling == len(pairs)


def _is_above(lines: Sequence[str]) -> bool:
    """Return whether an exception and its frames end with the first of these lines' successor."""
    frames = [*takewhile(lambda text: kind_of(text) in (Kind.FRAME, Kind.SOURCE), reversed(lines))]
    above = lines[len(lines) - len(frames) - 1 :][:1]
    raised = bool(above) and kind_of(above[0]) is Kind.EXCEPTION
    return raised and kind_of(frames[0]) is Kind.FRAME if frames else False

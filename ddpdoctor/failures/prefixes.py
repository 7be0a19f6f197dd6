"""What launchers, containers and people put before the lines of a log: found, read and stripped."""

from __future__ import annotations

import re
from typing import NamedTuple

from ddpdoctor.core.opening import whole

_WHO = "|".join(
    (
        r"\[pod/(?P<pod>[^\]\s]+)\] ",  # kubectl logs --prefix
        r"(?P<service>(?=\S*[\d_-])\w[\w.@-]*) +\| ?",  # docker compose
        r"(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}(?:\.\d+)? )?"
        r"(?P<host>[\w.-]+) (?P<unit>[\w./@-]+\[\d+\]): ",  # journald, syslog
        r"\((?P<actor>[\w.:-]+ (?:\w+=\d+, )?pid=\d+(?:, ip=[\d.a-f:]+)?)\) ",  # Ray
        # pdsh; urllib3.exceptions.MaxRetryError is no host.
        r"(?P<node>(?=[\w.-]*\d)(?![\w.]*\.(?:[A-Z]|error: ))[a-z][\w.-]*|\d+\.\d+\.\d+\.\d+): ",
    )
)
"""Prefixes that say which process or node it is."""

_NUMBER = "|".join(
    (
        r"\[[A-Za-z_]+(?P<role>\d+)\]:[ ]?",  # torchrun --tee: role and local rank
        r"\[\d+,(?:mpirank:)?(?P<mpi>\d+)(?:,[\w.-]+)?\]<std(?:err|out|diag)>:[ ]?",  # mpirun
        r" {0,3}(?P<task>\d{1,5}): ",  # srun --label, which aligns the numbers
        r"\[rank: (?P<lightning>\d+)\] ",
        r"\[(?P<bare>\d{1,4})\]: ",
    )
)

_PREFIX = re.compile(
    r"\[rank(?P<rank>\d+)\]:[ ]?"  # torch's own, of an uncaught exception or a log line
    rf"|{_NUMBER}|{_WHO}"
    r"|\[?\d{4}[-/]\d\d[-/]\d\d[T _]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?"
    r"(?: std(?:err|out) [FP])?[ \t]"  # a time; of CRI with the stream
    r"|\[?\d\d:\d\d:\d\d(?:[.,]\d+)?\]? "
    r"|(?:stderr|stdout|STDERR|STDOUT)\s?[:|] ?"  # accelerate
    r"|> ?"  # mail and issues
    # A comment, as people post logs.
    r"|# (?=\[?rank|\s*File \"|Traceback|[\w.]+(?:Error|Exception|Interrupt)\b|[EW]\d{3,4} "
    r"|\[\d|\s|=|-)"
    # The number of a line, as editors and `cat -n` show it.
    r"| {0,6}\d{1,6}(?:\t| {1,2})(?=\[rank\d|Traceback \(|slurmstepd: |srun: |[EW]\d{4} "
    r"|[\w.]{3,80}(?:Error|Exception|Interrupt)(?::|$)| {2,4}File \")"
)
TASK = "task "
"""Before the number of a task in ``Line.who``."""

_NAMES = ("pod", "service", "host", "actor", "node")
_LOWEST = ("role", "mpi", "task", "lightning", "bare")
_RANK_WORD = re.compile(r"\[(?:[\w ()-]{0,80} )?Rank (\d+)\]")

_BAR = re.compile(
    r"\d+%\|[^|\n]{0,400}\|[^\]\n]{0,400}\]|\d+%\|[█▏▎▍▌▋▊▉#\ufffd ]*|\d+it \[[^\]\n]{0,200}\]"
)
"""A progress bar of tqdm."""

_ANY_NUMBER = re.compile(r"\d+")


class Line(NamedTuple):
    """A line of output, split.

    Attributes:
        rank: Whose it is, None if it does not say.
        uncaught: torch's own mark stands before it, as before each line of an uncaught exception.
        text: What is left without marks and control characters.
        who: The process or node that a prefix names besides, or the task whose number is taken for
            the rank; empty if none does.
    """

    rank: int | None
    uncaught: bool
    text: str
    who: str = ""


def split_line(text: str) -> Line:
    """A clean line without what torch, torchrun, srun, mpirun, containers and so on put before."""
    rank: int | None = None
    who = ""
    while (mark := _PREFIX.match(text)) is not None and mark.end():
        text = text[mark.end() :]
        if mark["rank"] is not None:
            # The global rank; the others may count per node.
            return Line(whole(mark["rank"]), True, text, "" if who.startswith(TASK) else who)
        if mark.lastgroup in _LOWEST and rank is None:
            rank = whole(mark[mark.lastgroup])
            who = who or (f"{TASK}{rank}" if mark.lastgroup == "task" else "")
        elif mark.lastgroup == "role" and who.startswith(TASK):
            who = f"{who}, local rank {whole(mark['role'])}"
        who = who or next((mark[name] for name in _NAMES if mark[name]), "")
    if rank is None and "Rank " in text and (word := _RANK_WORD.search(text)) is not None:
        rank = whole(word[1])
    return Line(rank, False, text, who.removeprefix("slurmstepd-"))


def without_bar(text: str) -> str:
    """A line without the progress bar that it was printed behind."""
    if "%|" not in text and "it [" not in text:
        return text
    end = max((bar.end() for bar in _BAR.finditer(text)), default=0)
    return text[end:] if text[end:].strip() else text


def shape(prefix: str) -> re.Pattern[str]:
    """What matches a prefix whose numbers may change from line to line."""
    parts = _ANY_NUMBER.split(prefix)
    return re.compile(r"\d+".join(map(re.escape, parts)))

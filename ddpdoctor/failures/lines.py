"""Read the lines of a log: remove prefixes of launchers, and redact secrets."""

from __future__ import annotations

import contextlib
import functools
import html
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import PurePath
from typing import Any, NamedTuple

from ddpdoctor.core.finding import Finding
from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import Location, user_file

# -- Prefixes


_WHO = "|".join(
    (
        r"\[pod/(?P<pod>[^\]\s]+)\] ",  # kubectl logs --prefix
        r"<\w*> +\[[\d: -]{19}Z?\] (?P<allocation>[0-9a-f]{6,12}) \|\| ?",  # Determined AI
        r"(?P<service>(?=\S*[\d_-])\w[\w.@-]*) +\| ?",  # docker compose
        r"(?:[A-Z][a-z]{2} [ \d]\d [\d:]{8}(?:\.\d+)? )?"
        r"(?P<host>[\w.-]+) (?P<unit>[\w./@-]+\[\d+\]): ",  # journald, syslog
        r"\((?P<actor>(?:[\w.:-]+,? )?(?:\w+=\d+, )*pid=\d+(?:, ip=[\w.:-]+)?"
        r"|Worker[\w -]{0,20})\) ",  # Ray, SkyPilot, vLLM
        # pdsh; urllib3.exceptions.MaxRetryError is no host, and train_2d.py neither.
        r"(?P<node>(?=[\w.-]*\d)(?!python|[\w.-]*\.(?:[A-Z]|so\b|error: |py: ))[a-z][\w.-]*"
        r"|\d+\.\d+\.\d+\.\d+): ",
    )
)
"""Prefixes with a process or node."""

_NUMBER = "|".join(
    (
        r"\[[A-Za-z_]+(?P<role>\d+)\]:[ ]?",  # torchrun --tee: role and local rank
        r"\[\d+,(?:mpirank:)?(?P<mpi>\d+)(?:,[\w.-]+)?\]<std(?:err|out|diag)>:[ ]?",  # mpirun
        r"\[(?P<horovod>\d+)\]<std(?:err|out)>:[ ]?",
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
    r"| {0,20}\| (?=\[rank\d|Traceback \(| {2,4}File \")"  # A tree of rich
    # The level of a logger before each line of a traceback.
    r"|(?:\[(?:ERROR|CRITICAL)\] {1,2}|(?:ERROR|CRITICAL|FATAL|INFO|WARNING):[\w.-]{1,60}:)"
    r'(?=  File "| {4}|Traceback \(|[\w.]+(?:Error|Exception)\b)'
    # A comment, as people post logs.
    r"|# (?=\[?rank|\s*File \"|Traceback|[\w.]+(?:Error|Exception|Interrupt)\b|[EW]\d{3,4} "
    r"|\[\d|\s|=|-)"
    # The number of a line, as editors and `cat -n` show it.
    r"| {0,6}\d{1,6}(?:\t| {1,2})(?=\[rank\d|Traceback \(|slurmstepd: |srun: |[EW]\d{4} "
    r"|[\w.]{3,80}(?:Error|Exception|Interrupt)(?::|$)| {2,4}File \")"
)
TASK = "task "  # Prefix of a task's number in ``Line.who``

_NAMES = ("pod", "allocation", "service", "host", "actor", "node")
_LOWEST = ("role", "mpi", "horovod", "task", "lightning", "bare")
_RANK_WORD = re.compile(r"\[(?:[\w ()-]{0,80} )?Rank (\d+)\]")

_BAR = re.compile(
    r"\d+%\|[^|\n]{0,400}\|[^\]\n]{0,400}\]|\d+%\|[█▏▎▍▌▋▊▉#\ufffd ]*|\d+it \[[^\]\n]{0,200}\]"
)
"""A progress bar of tqdm."""

_ANY_NUMBER = re.compile(r"\d+")


class Line(NamedTuple):
    """A line of output, split.

    Attributes:
        rank: The rank in its prefix, or None.
        uncaught: It has torch's prefix, as each line of an uncaught exception has.
        text: The line without prefixes and control characters.
        who: The process or node in its prefix, or the task whose number is taken as the rank.
            Empty without one.
    """

    rank: int | None
    uncaught: bool
    text: str
    who: str = ""


def split_line(text: str) -> Line:
    """Split off the prefixes of torch, torchrun, srun, mpirun, containers and so on."""
    rank: int | None = None
    who = ""
    while (mark := _PREFIX.match(text)) is not None and mark.end():
        text = text[mark.end() :]
        if mark["rank"] is not None:
            # The global rank. Other prefixes may count per node.
            return Line(whole(mark["rank"]), True, text, "" if who.startswith(TASK) else who)
        if mark.lastgroup in _LOWEST and rank is None:
            rank = whole(mark[mark.lastgroup])
            who = who or (f"{TASK}{rank}" if mark.lastgroup == "task" else "")
        elif mark.lastgroup == "role" and who.startswith(TASK):
            who = f"{who}, local rank {whole(mark['role'])}"
        who = who or next((mark[name] for name in _NAMES if mark[name]), "")
    if rank is None and "Rank " in text and (word := _RANK_WORD.search(text)) is not None:
        rank = whole(word[1])
    if who.startswith("pid="):
        who = f"process {who[4:]}"
    return Line(rank, False, text, who.removeprefix("slurmstepd-"))


def split_bar(text: str) -> list[str]:
    """Return a progress bar in a line, and the text after it."""
    if "%|" not in text and "it [" not in text:
        return [text]
    end = max((bar.end() for bar in _BAR.finditer(text)), default=0)
    return [text[:end], text[end:]] if end and text[end:].strip() else [text]


def shape(prefix: str) -> re.Pattern[str]:
    """Return a pattern for a prefix whose numbers may change."""
    parts = _ANY_NUMBER.split(prefix)
    return re.compile(r"\d+".join(map(re.escape, parts)))


# -- Lines


LONGEST = 1 << 16  # Maximum bytes of a line that are read, since searching megabytes takes seconds

HEAD = "Traceback (most recent call last)"
_GLUED = re.compile(rf'(?<=\S)(?=  File "|{re.escape(HEAD)})')
_BEGINS = re.compile(
    r"(?<=\S)(?<!Original) +(?=\[rank\d+\]: |\[20\d\d-\d\d-\d\d |[EWIF]\d{4} \d\d:\d\d:\d\d\."
    rf"|(?:Original )?{re.escape(HEAD)}|(?:ERROR|WARNING):torch\.|File \S+ ?, line \d+, in "
    r"|[\w.]+(?:Error|Exception): |(?:srun|slurmstepd): |\S+ NCCL (?:INFO|WARN) |exitcode  : )"
)
"""Where lines begin in a post that lost its line breaks."""

_MIN_JOINED = 3  # Minimum number of such places in a line that is split
_PADDED = re.compile(r"(?<=\S) {16,}(?=\S)")  # Between lines that were copied from a terminal
_ITEMS = re.compile(r"\\n['\"](?:, ['\"]|\]\s*$)")
"""Separates the lines of a traceback that was printed as a list, and ends it."""

_OF_LIST = re.compile(r"  File \"|\\n['\"]\]\s*$")  # In a piece of such a list, which srun cuts

_SAID = (
    *("log", "data", "jsonPayload", "message", "@message", "msg", "line", "event", "body"),
    *("text", "textPayload", "exc_info", "exc_text", "exception", "error", "err"),
    *("stack_trace", "stacktrace", "stack", "traceback"),
)
"""Keys of the texts in a record in JSON, as docker and structured loggers write a line."""

_EVENT = "torchelastic.worker.status."

_MAX_NESTED = 3  # Maximum depth of records within a record

_ELEMENT = re.compile(r'\s*"((?:[^"\\]|\\.)*?)(?:\\n)?",?\s*$')
"""A line as an element of an array in JSON, as notebooks keep their output."""

_REPORTED = re.compile(
    r'\s*"message": "([\w.]+(?:Error|Exception|Interrupt)\b(?:[^"\\]|\\.)*)"?,?\s*$'
)
"""The exception in torch's report of one in JSON, which has a line for each key."""

_FIRST = 100  # Texts read at each end of a line whose parts overwrote each other
_REDRAWN = 5  # Times that a redrawn progress bar is read

_OF_BARS = b"0123456789.,:%|/<>#=? " + "█▏▎▍▌▋▊▉".encode()
"""Characters that change when a bar is redrawn."""

_ENTITY = re.compile(r"&(?:quot|apos|lt|gt|amp|#x27|#39);")
_TYPED = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
_BOLD = re.compile(r"^\*\*([^\s*][^\n]{0,2000}[^\s*])\*\*$")
"""Typographic quotes of web pages and editors, and bold marks around a line that posters add."""

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[@-_]|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_GLOG = re.compile(r"\b[IWEF](\d{1,2})(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,9})")
_ISO = re.compile(r"\b(\d{4})-(\d\d)-(\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")
_OF_FILE = re.compile(
    r"(?:^|(?<!\blow)(?<!_low)(?<!lora)(?<!full)(?<!max)[^a-z])rank[-_ ]?(\d{1,5})(?!\d)",
    re.IGNORECASE,
)
"""Not the rank of a matrix: ``low_rank8.log``, ``lora-rank-16.out``."""

_TORCHRUN_FILE = re.compile(r"^(?:stderr|stdout)\.log$|^error\.json$")
_LIBRARY = re.compile(
    r"[/\\]lib(?:64)?[/\\]python\d|[/\\](?:site|dist)-packages[/\\]"
    r"|[/\\]bin[/\\][\w-]+$"  # A console script
    r"|[/\\]torch[/\\](?:distributed|cuda|nn|utils|autograd|optim)[/\\]"
    r"|[/\\](?:Python\d\w*|\w+conda\d?|envs[/\\][^/\\]+)[/\\][Ll]ib[/\\]"
)
_SOURCE = re.compile(
    r"\[enforce fail at [^\]]*\][\s.]*|"
    r"\[/[^\]]*\.(?:cc|cpp|h):\d+\]\s*"
    r"|\[?[IWEF](?:\d{3,4} [\d:.]+ (?:\d+ )?| )\S+\]\s*"
)
_PORT = re.compile(
    r"(?<!\b(?:to|on))(?<!\b(?:to|on) )(\s*\[(?=[^\]]*[.:])[\da-fA-F.:]+\]):\d+(?=[\s.:]|$)"
)
"""A port behind an address, which gloo prints byte-swapped. Those of c10d follow "to"."""


def clean(raw: bytes) -> str:
    """Return a raw line as a terminal shows it: without colours, with the last state of a bar.

    Invalid UTF-8 becomes replacement characters. A line that is too long keeps both ends.
    """
    return _text(raw.rstrip(b"\r\n").rpartition(b"\r")[2])


def segments(raw: bytes) -> list[str]:
    """Return the texts of a raw line, including those that a terminal overwrites.

    Progress bars redraw themselves after a carriage return. Errors appear before and after them.
    A bar and the text after it are separate, and so is each line of a quoted text.
    """
    parts = raw.rstrip(b"\r\n").split(b"\r")
    if len(parts) > _REDRAWN:
        parts = _drawn(parts)
    read = parts[:_FIRST] + parts[_FIRST:][-_FIRST:]
    texts = [text for part in read for text in split_bar(_text(part))]
    if len(parts) > 1:
        mark = _mark_of(_text(parts[0]))
        marked = (text if text.startswith(mark) else mark + text for text in texts if text)
        texts = [*marked] or [""]
    return [line for text in texts for line in _unquoted(text)]


def _drawn(parts: list[bytes]) -> list[bytes]:
    """Return the texts that overwrote each other, of each bar only the first ones."""
    seen = Counter[bytes]()
    drawn = []
    for part in parts:
        shape = part.translate(None, _OF_BARS)
        seen[shape] += 1
        if seen[shape] <= _REDRAWN:
            drawn.append(part)
    return drawn


def _mark_of(text: str) -> str:
    """Return the prefix of a line, which is printed only once before several texts."""
    return text[: len(text) - len(split_line(text).text)]


def _unquoted(text: str) -> list[str]:
    """Return the lines in one: of a traceback in JSON or a ``repr``, and of joined lines."""
    if text.startswith("{") and _EVENT in text:
        return (_of_record(text) or text).split("\n")
    if text.startswith("{") and "py_callstack" not in text:
        text = _of_record(text) or text
    if (reported := _REPORTED.match(text)) is not None:
        return reported[1].replace('\\"', '"').split("\\n")
    if (element := _ELEMENT.match(text)) is not None:
        text = element[1].replace('\\"', '"')
    if "\\n" in text and (HEAD in text or (_ITEMS.search(text) and _OF_LIST.search(text))):
        mark = _mark_of(text)
        parts = _ITEMS.sub("\n", text).replace("\\n", "\n").replace('\\"', '"').split("\n")
        return [part if part.startswith(mark) else mark + part for part in parts]
    if "tKeyboardInterrupt" in text:
        text = text.replace("tKeyboardInterrupt", "t\nKeyboardInterrupt")
    elif len(_BEGINS.findall(text)) >= _MIN_JOINED - ("exitcode: " in text):
        text = _BEGINS.sub("\n", text)
    elif text.count(HEAD) > 1 or text.count('  File "') > 1:
        text = _GLUED.sub("\n", _PADDED.sub("\n  ", text))
    return text.split("\n")


def _of_record(text: str) -> str:
    """Return the texts of a record in JSON. Empty if it has none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    if _EVENT in str(record.get("name")):
        return _of_event(record)
    return "\n".join(_texts(record, _MAX_NESTED)).rstrip()


def _of_event(event: dict[str, Any]) -> str:
    """Return the lines of an event of a worker in torch: its traceback, or its status."""
    metadata = event.get("metadata")
    if not isinstance(metadata, dict):
        return str(event["name"])
    lines = [event["name"]]
    with contextlib.suppress(ValueError, TypeError, KeyError):
        error = json.loads(metadata["raw_error"])["message"]
        lines = error["extraInfo"]["py_callstack"].splitlines()
    return "\n".join(f"[rank{metadata.get('global_rank')}]: {each}" for each in lines)


def _texts(value: object, depth: int) -> Iterator[str]:
    if isinstance(value, str):
        yield value.rstrip()
    elif isinstance(value, list) and all(isinstance(each, str) for each in value):
        yield from map(str.rstrip, value)
    elif isinstance(value, dict) and depth:
        for key in _SAID:
            yield from _texts(value.get(key), depth - 1)


def _text(raw: bytes) -> str:
    if len(raw) > LONGEST:
        raw = raw[: LONGEST // 2] + b" ... " + raw[-LONGEST // 2 :]
    text = _CONTROL.sub("", raw.decode("utf-8", "replace"))
    if b"&" in raw and _ENTITY.search(text):
        text = html.unescape(text)
    if b"\xe2\x80" in raw:
        text = text.translate(_TYPED)
    return _BOLD.sub(r"\1", text) if text.endswith("**") else text


_SAMPLED = 40  # Number of first lines that are read to find a log's margin
_MIN_MARGIN = 4
"""Minimum width of a margin, in blanks. Frames of a traceback are indented by fewer."""

_NUMBERED = re.compile(rb"(?m)^ {0,6}(\d{1,6})(?:\t| {1,2}| ?\| ?)")


def margin_of(first: bytes) -> re.Pattern[bytes] | None:
    """Return what each line of a log begins with: blanks, as in a post, or its number. Else None.

    Args:
        first: The beginning of the log.
    """
    lines = first[:LONGEST].split(b"\n", _SAMPLED)[:_SAMPLED]
    numbers = [whole(found[1]) for found in map(_NUMBERED.match, lines) if found]
    full = [line for line in lines if line.strip()]
    if len(full) < 3:
        return None
    if numbers[:1] and numbers == [*range(numbers[0], numbers[0] + len(full))]:
        return _NUMBERED
    blanks = min(len(line) - len(line.lstrip(b" ")) for line in full)
    return re.compile(rb"(?m)^ {%d}" % blanks) if blanks >= _MIN_MARGIN else None


_MIN_WRAPPED = 3  # Minimum lines that a terminal broke, in a log that was copied from one
_NARROWEST = 60  # Minimum columns of a terminal
_MAX_WRAPPED = 20  # Maximum pieces of a line
_PADDING = b"  "  # At the end of a line that a terminal filled up
_GOES_ON = re.compile(rb"[a-z]|/\w|__\.py")  # The rest of a word or a path


def unwrapped(data: bytes) -> bytes:
    """Join the lines of a log that a terminal broke at its width, if it was copied from one.

    As many empty lines follow a joined one as it had breaks, so that the lines keep their numbers.
    """
    # Posts escape what Markdown would read.
    data = data.replace(rb"frame \#", b"frame #")
    lines = data[: 2 * LONGEST].split(b"\n")
    width = max(map(len, lines))
    full = [
        (line, behind)
        for line, behind in pairwise(lines)
        if len(line) == width
        and not line.endswith(_PADDING)
        and line[:1] not in b"|+-=*#"
        and behind[:1] not in (b"", b" ", b"[")
    ]
    begin = {_ANY_NUMBER.sub("", line[:12].decode("utf-8", "replace")) for line, _ in full}
    # In a log whose lines just have equal lengths, no line continues the one before.
    broken = sum(
        line[-1:].isalnum() and _GOES_ON.match(behind) is not None and len(behind.rstrip()) < width
        for line, behind in full
    )
    if width < _NARROWEST or broken < _MIN_WRAPPED or len(begin) < _MIN_WRAPPED:
        return data
    pattern = rb"(?m)^((?:[^\n|+=*-][^\n]{%d}(?<!  )\n){1,%d})([^\n]*)$" % (width - 1, _MAX_WRAPPED)
    return re.sub(pattern, _rejoined, data)


def _rejoined(found: re.Match[bytes]) -> bytes:
    return found[1].replace(b"\n", b"") + found[2] + b"\n" * found[1].count(b"\n")


def rank_of_file(path: str) -> int | None:
    """Return the rank in a file name: ``rank3.log``, or torchrun's ``attempt_0/3/stderr.log``."""
    parts = PurePath(path).parts
    if len(parts) > 1 and _TORCHRUN_FILE.match(parts[-1]) and parts[-2].isdigit():
        return whole(parts[-2])
    match = _OF_FILE.search(os.path.basename(path))
    return whole(match[1]) if match else None


@functools.lru_cache(maxsize=64)
def time_of(text: str) -> float | None:
    """Return a line's time in seconds. Only differences count, since time zones are not known."""
    iso = _ISO.search(text)
    if iso is not None:
        year, month, day, hour, minute, second = (int(each) for each in iso.groups()[:6])
        return _seconds((year, month, day, hour, minute, second), iso[7])
    glog = _GLOG.search(text)
    if glog is None:
        return None
    month, day, hour, minute, second = (int(each) for each in glog.groups()[:5])
    # It has no year, and a log is from the past.
    now = time.gmtime()
    year = now.tm_year if month <= now.tm_mon + 1 else now.tm_year - 1
    return _seconds((year, month, day, hour, minute, second), glog[6])


def _seconds(moment: tuple[int, int, int, int, int, int], fraction: str | None) -> float | None:
    try:
        whole = time.mktime((*moment, 0, 0, -1))
    except (ValueError, OverflowError):
        return None
    return whole + (float(f"0.{fraction}") if fraction else 0.0)


def users_file(path: str) -> bool:
    """Return whether a traceback's file is the user's, also if it is from another machine."""
    return user_file(path) and _LIBRARY.search(path) is None


def shortened(text: str, width: int = 160) -> str:
    """Return a line as evidence: without C++ source lines and gloo's ports, and not too long."""
    text = _PORT.sub(r"\1", _SOURCE.sub("", _CONTROL.sub("", text))).strip()
    return text if len(text) <= width else text[: width - 3] + "..."


# -- Redaction of names, addresses and secrets, so that findings can be posted


_SECRET = re.compile(
    r"\b(?:hf_|sk-|gh[pousr]_|github_pat_|glpat-|xox[abp]-|AKIA|wandb_v1_)[\w-]{12,}"
    r"|\beyJ[\w-]{8,}\.[\w-]+\.[\w-]+|\b[0-9a-f]{40}\b"
)
_ASSIGNED = re.compile(
    r"(?i)(\b\w{0,40}(?:token|api_?key|secret|passw(?:or)?d|authorization)\w{0,40}[\"']?\s*[=:]\s*[\"']?"
    r"(?:Bearer )?)[^\s\"',;&]{4,}|(?<=://)[^\s/@:]+:[^\s/@]+(?=@)"
)
_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+\b")
_USER = re.compile(
    r"(?i)(?<=[/\\])(?P<folder>(?:home|users?|scratch)"
    # Clusters sort their users: /home/users/d/a/name, /users/9/name, /home/userexternal/name.
    r"(?:[/\\]+(?:home|users?|userexternal|scratch|students?|staff|grads?|\w|\d+)"
    r"(?=[/\\]+[^/\\\s\"':,]+[/\\]))*)"
    r"(?P<sign>[/\\]+)(?P<name>[^/\\\s\"':,]+)(?P<below>(?:[/\\][^/\\\s\"':,()]{1,255}){0,40}[/\\])?"
)
_ACCOUNTS = frozenset(
    (
        *("admin", "coder", "ec2-user", "jovyan", "root", "runner", "ubuntu", "user", "vscode"),
        *("data", "project", "projects", "public", "share", "shared", "work", "workspace"),
    )
)
"""Accounts and folders that are not named after a person."""

_PATH = re.compile(
    r"(?<![\w.:/<>\\-])(?=/)"
    r"(?!/(?:usr|opt|lib|lib64|bin|etc|proc|sys|dev|pytorch|home|[Uu]sers?|\.\.\.)/)"
    r"(?![^\s\"':,()]{0,300}<)(?P<below>(?:/[^/\s\"':,()]{1,255}){2,40}/)(?=[^/\s\"':,()])"
)
"""Other folders, which may contain a name: /nfs/data/alice/job/train.py."""

_DEEP = 3
"""Minimum depth of a path whose first folders are hidden, as they may name a group and a user."""

_ADDRESS = re.compile(
    r"(?<![\w.])(?!127\.|0\.0\.0\.0)\d{1,3}(?:\.\d{1,3}){3}(?![\w.]*\w)"
    r"|(?<![\w:])(?:[0-9a-f]{1,4}:){3,7}:?[0-9a-f]{0,4}(?:%\w+)?(?![\w:])|\bfe80::[0-9a-f:]+"
)
_HOST = re.compile(
    r"\b(?:srun: error: |task \d+ on |Node failure on |slurmstepd-| ON |host\s+: |hostname[=: ]+"
    r"|[Hh]ost |ssh |client_addr=|connect to (?:any network address of )?\(?"
    r"|addresses of \(|a process of )"
    r"(?P<after>(?!any\b|the\b|host\b)[A-Za-z][\w.-]*)"
    r"|^(?P<before>[A-Za-z][\w.-]*)(?=:\d+:\d+ \[\d+\] )"
    r"|(?<![\w.@/-])"
    r"(?P<full>[a-z][\w-]*(?:\.[\w-]+)*\.(?:internal|local|lan|cluster|edu|corp|svc))\b"
)
_KEPT = frozenset(("localhost", "pod"))


class Redactor:
    """Replaces names consistently.

    Args:
        texts: Other texts to collect names from.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        for text in texts:
            self.text(text)

    def finding(self, finding: Finding) -> Finding:
        """Return a finding without names, addresses and secrets."""
        place = finding.location
        # First read everything, since another line may show that a word is a name.
        for text in (finding.message, *finding.evidence, finding.traceback):
            self.text(text)
        return replace(
            finding,
            message=self.text(finding.message),
            evidence=tuple(map(self.text, finding.evidence)),
            fix=self.text(finding.fix),
            paste=self.text(finding.paste),
            traceback=self.text(finding.traceback),
            location=None if place is None else Location(self.text(place.path), place.line),
        )

    def text(self, text: str) -> str:
        """Return a text without names, addresses and secrets."""
        text = _SECRET.sub("<secret>", text)
        text = _ASSIGNED.sub(lambda found: f"{found[1] or ''}<secret>", text)
        text = _MAIL.sub(self._by("mail"), text)
        text = _PATH.sub(lambda found: _shortened(found["below"]), _USER.sub(self._home, text))
        text = _ADDRESS.sub(self._by("address"), text)
        for found in _HOST.finditer(text):
            name = next(each for each in found.groups() if each is not None)
            if name.lower() not in _KEPT:
                self._name("host", name)
        for name, shown in self._names.items():
            if name in text:
                text = re.sub(rf"(?<![\w<]){re.escape(name)}(?![\w>])", shown, text)
        return text

    def _home(self, found: re.Match[str]) -> str:
        name = found["name"]
        if name.lower() not in _ACCOUNTS:
            name = self._name("user", name)
        below = _shortened(found["below"]) if found["below"] else ""
        return f"{found['folder']}{found['sign']}{name}{below}"

    def _by(self, kind: str) -> Callable[[re.Match[str]], str]:
        return lambda found: self._name(kind, found[0])

    def _name(self, kind: str, name: str) -> str:
        if name.startswith("<"):
            return name
        if name not in self._names:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._names[name] = f"<{kind}-{self._counts[kind]}>"
        return self._names[name]


def _shortened(folders: str) -> str:
    """Return the end of a path, which shows the place but not the owner."""
    sign = folders[-1]
    each = [one for one in re.split(r"[/\\]", folders) if one]
    if "..." in each:
        return folders
    packages = [at for at, one in enumerate(each) if one in ("site-packages", "dist-packages")]
    first = packages[0] if packages else len(each) - (len(each) >= _DEEP)
    return sign.join(("", *(["..."] if first else []), *each[first:], ""))

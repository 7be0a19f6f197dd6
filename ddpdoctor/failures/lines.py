"""Lines of a job's output: when they were written, what they say."""

from __future__ import annotations

import functools
import os
import re
import time
from collections import Counter
from pathlib import PurePath

from ddpdoctor.core.opening import whole
from ddpdoctor.core.user_code import user_file
from ddpdoctor.failures.prefixes import split_line, without_bar

LONGEST = 1 << 16
"""Bytes of a line that are looked at: to search one of megabytes takes seconds."""

HEAD = "Traceback (most recent call last)"
_GLUED = re.compile(rf'(?<=\S)(?=  File "|{re.escape(HEAD)})')
_ITEMS = re.compile(r"\\n['\"](?:, ['\"]|\]\s*$)")
"""Between the lines of a traceback that was printed as a list, and at its end."""

_OF_LIST = re.compile(r"  File \"|\\n['\"]\]\s*$")
"""In a piece of it, of which srun makes several."""

_DOCKER = re.compile(r'\{"log":\s?"(.*?)(?:\\[rn])*",\s?"stream"')
_FIRST = 100
"""Texts of a line that overwrote each other: of more, those in the middle are not looked at."""

_REDRAWN = 5
"""Times that a bar is looked at which redraws itself."""

_OF_BARS = b"0123456789.,:%|/<>#=? " + "█▏▎▍▌▋▊▉".encode()
"""What changes from one time to the next."""

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
    r"|[/\\]bin[/\\](?:torchrun|accelerate|deepspeed)$"
    r"|[/\\]torch[/\\](?:distributed|cuda|nn|utils|autograd|optim)[/\\]"
    r"|[/\\](?:Python\d\w*|\w+conda\d?|envs[/\\][^/\\]+)[/\\][Ll]ib[/\\]"
)
_SOURCE = re.compile(
    r"\[enforce fail at [^\]]*\][\s.]*|"
    r"\[/[^\]]*\.(?:cc|cpp|h):\d+\]\s*|\s*\[(?=[^\]]*[.:])[\da-fA-F.:]+\](?::\d+)?(?=[\s.:]|$)"
    r"|\[?[IWEF](?:\d{3,4} [\d:.]+ (?:\d+ )?| )\S+\]\s*"
)


def clean(raw: bytes) -> str:
    """A raw line as a terminal would leave it: without colours, and what a progress bar drew last.

    Invalid UTF-8 becomes replacement characters. Of a line that is too long both ends are left.
    """
    return _text(raw.rstrip(b"\r\n").rpartition(b"\r")[2])


def segments(raw: bytes) -> list[str]:
    """The texts of a raw line that a terminal would have shown, one over the other or not.

    Bars redraw themselves behind a carriage return; errors stand before and after them. What was
    printed behind a bar is a text by itself, and so is each line of
    one that was quoted.
    """
    parts = raw.rstrip(b"\r\n").split(b"\r")
    if len(parts) > _REDRAWN:
        parts = _drawn(parts)
    texts = [without_bar(_text(part)) for part in parts[:_FIRST] + parts[_FIRST:][-_FIRST:]]
    if len(parts) > 1:
        mark = _mark_of(_text(parts[0]))
        marked = (text if text.startswith(mark) else mark + text for text in texts if text)
        texts = [*marked] or [""]
    return [line for text in texts for line in _unquoted(text)]


def _drawn(parts: list[bytes]) -> list[bytes]:
    """The texts that overwrote each other, of each bar the first ones."""
    seen = Counter[bytes]()
    drawn = []
    for part in parts:
        shape = part.translate(None, _OF_BARS)
        seen[shape] += 1
        if seen[shape] <= _REDRAWN:
            drawn.append(part)
    return drawn


def _mark_of(text: str) -> str:
    """What a launcher or a container put before a line: once, however many texts it holds."""
    return text[: len(text) - len(split_line(text).text)]


def _unquoted(text: str) -> list[str]:
    """The lines within one: of a traceback in JSON or a ``repr``, and of those glued together."""
    if (docker := _DOCKER.match(text)) is not None:
        return [docker[1].replace('\\"', '"')]
    if "\\n" in text and (HEAD in text or (_ITEMS.search(text) and _OF_LIST.search(text))):
        mark = _mark_of(text)
        parts = _ITEMS.sub("\n", text).replace("\\n", "\n").replace('\\"', '"').split("\n")
        return [parts[0], *(mark + part for part in parts[1:])]
    if "tKeyboardInterrupt" in text:
        text = text.replace("tKeyboardInterrupt", "t\nKeyboardInterrupt")
    elif text.count(HEAD) > 1 or text.count('  File "') > 1:
        text = _GLUED.sub("\n", text)
    return text.split("\n")


def _text(raw: bytes) -> str:
    if len(raw) > LONGEST:
        raw = raw[: LONGEST // 2] + b" ... " + raw[-LONGEST // 2 :]
    return _CONTROL.sub("", raw.decode("utf-8", "replace"))


def rank_of_file(path: str) -> int | None:
    """The rank in a file name: ``rank3.log``, or torchrun's ``attempt_0/3/stderr.log``."""
    parts = PurePath(path).parts
    if len(parts) > 1 and _TORCHRUN_FILE.match(parts[-1]) and parts[-2].isdigit():
        return whole(parts[-2])
    match = _OF_FILE.search(os.path.basename(path))
    return whole(match[1]) if match else None


@functools.lru_cache(maxsize=64)
def time_of(text: str) -> float | None:
    """When a line was written, in seconds; only differences count, as zones are not known."""
    iso = _ISO.search(text)
    if iso is not None:
        year, month, day, hour, minute, second = (int(each) for each in iso.groups()[:6])
        return _seconds((year, month, day, hour, minute, second), iso[7])
    glog = _GLOG.search(text)
    if glog is None:
        return None
    month, day, hour, minute, second = (int(each) for each in glog.groups()[:5])
    # It names no year, and a log is of the past.
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
    """Whether a file of a traceback is the user's, also where it was printed elsewhere."""
    return user_file(path) and _LIBRARY.search(path) is None


def shortened(text: str, width: int = 160) -> str:
    """A line as evidence: without C++ source lines and socket addresses, and not too long.

    The addresses are wrong besides: gloo prints ports byte-swapped.
    """
    text = _SOURCE.sub("", _CONTROL.sub("", text)).strip()
    return text if len(text) <= width else text[: width - 3] + "..."

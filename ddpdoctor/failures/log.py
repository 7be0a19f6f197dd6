"""Read logs: their files, the lines that are worth reading, and the failures in them.

A long log repeats itself: most lines differ from earlier ones only in their numbers. Therefore a
block is searched only if it has a line of a new shape (a line without its numbers).

C code (``_present.c``) determines which texts a block contains, if it was compiled.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import fnmatch
import gzip
import importlib
import io
import lzma
import os
import re
import stat
import sys
import tarfile
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import IO, Any, cast

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.opening import whole
from ddpdoctor.failures import recognise
from ddpdoctor.failures.entry import Weight
from ddpdoctor.failures.lines import (
    HEAD,
    TASK,
    Line,
    clean,
    rank_of_file,
    segments,
    split_line,
    time_of,
)
from ddpdoctor.failures.occurrences import (
    ENDED,
    LAST_WORDS,
    LAUNCHER,
    STATUS,
    Occurrence,
    corrected,
    is_mention,
)
from ddpdoctor.failures.table import TABLE
from ddpdoctor.failures.tracebacks import (
    SUMMARY_RANK,
    Printed,
    Tracebacks,
    cut_off,
    says_more,
)
from ddpdoctor.failures.work import (
    COMPLAINT,
    DONE,
    ERROR_LINE,
    PROGRESS,
    WORDS,
    beginning_of,
    is_newest_first,
    is_plain,
    is_step,
    shape_of,
    tells_of_failure,
)

# -- read logs from files, archives, directories of launchers and standard input


# -- Compressed logs and archives


_ZSTD = b"\x28\xb5\x2f\xfd"
_ZIP = b"PK\x03\x04"
_PACKED = (_ZIP, _ZSTD, b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
_TAR_AT, _TAR = 257, b"ustar"
_PEEK = 512
_MAX_MEMBERS = 4_096

_NO_TEXT = re.compile(
    r"\.(?:pt|pth|ckpt|bin|safetensors|pkl|pickle|npy|npz|h5|png|jpg|jpeg|gif|mp4|so|whl|parquet"
    r"|arrow|wandb|pdf|pyc|onnx|nsys-rep|qdrep|sqlite|db)$",
    re.IGNORECASE,
)
"""Suffixes of files that are no logs."""

DAMAGED = (EOFError, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


class _Peekable(io.RawIOBase):
    """A stream whose first bytes have been read."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        data = self._head[: len(view)] or self._rest.read(len(view))
        self._head = self._head[len(data) :]
        view[: len(data)] = data
        return len(data)


def unpacked(name: str, file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the decompressed logs of an archive with their names, or the file if it is none.

    Read each before requesting the next one.

    Raises:
        DoctorError: It needs a package that is not installed, or a seekable file.
    """
    head = file.read(_PEEK)
    if head.startswith(_ZIP):
        yield from _of_zip(name, file)
        return
    stream = cast("IO[bytes]", io.BufferedReader(_Peekable(head, file)))
    packed = _decompressed(name, head, stream)
    if packed is not None:
        head = packed.read(_PEEK)
        stream = cast("IO[bytes]", io.BufferedReader(_Peekable(head, packed)))
    if head[_TAR_AT:].startswith(_TAR):
        yield from _of_tar(name, stream)
    else:
        yield name, stream


def is_packed(head: bytes) -> bool:
    """Return whether a file is compressed, so that it has to be read from its beginning."""
    return head.startswith(_PACKED)


def _decompressed(name: str, head: bytes, stream: IO[bytes]) -> IO[bytes] | None:
    if head.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    if head.startswith(b"BZh"):
        return bz2.BZ2File(stream)
    if head.startswith(b"\xfd7zXZ\x00"):
        return lzma.LZMAFile(stream)
    return _of_zstd(name, stream) if head.startswith(_ZSTD) else None


def _of_zstd(name: str, stream: IO[bytes]) -> IO[bytes]:
    for module in ("compression.zstd", "zstandard"):
        try:
            return cast("IO[bytes]", importlib.import_module(module).open(stream, "rb"))
        except ImportError:
            continue
    raise DoctorError(
        f"{name} is compressed with zstd, for which a package is missing",
        f"pip install zstandard, or: zstd -dc {name} | ddpdoctor report --log -",
    )


def _of_zip(name: str, file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    if not file.seekable():
        raise DoctorError(f"{name} is a zip archive, which has to be a file", "save it first")
    with zipfile.ZipFile(file) as archive:
        for member in sorted(archive.infolist(), key=lambda each: each.filename)[:_MAX_MEMBERS]:
            if not member.is_dir() and _is_log(member.filename):
                with archive.open(member) as inside:
                    yield from unpacked(f"{name}:{member.filename}", inside)


def _of_tar(name: str, stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for count, member in enumerate(archive):
            inside = archive.extractfile(member) if member.isreg() else None
            if inside is not None and _is_log(member.name) and count < _MAX_MEMBERS:
                yield from unpacked(f"{name}:{member.name}", inside)


def _is_log(name: str) -> bool:
    return _NO_TEXT.search(name) is None


def recoded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Yield a text as UTF-8. Its byte order mark, or its zeros, tell the encoding."""
    first = next(chunks, b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        coding = "utf-16"
    elif first[1:40:2].count(0) > 15 and not first[:40:2].count(0):
        coding = "utf-16-le"
    elif first[:40:2].count(0) > 15 and not first[1:40:2].count(0):
        coding = "utf-16-be"
    else:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(coding)("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace")


# -- Files and directories


MAX_BYTES = 2 << 30  # Maximum bytes of a decompressed log. Of a larger file the last ones are read.

_CHUNK = 1 << 20
_PIPE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)$")
"""The shell's replacement of ``<(command)``: a descriptor that is open already."""

_NAMES = (
    *("*.log", "*.log.*", "*.err", "*.out", "*.txt", "*.stderr", "*.stdout", "error.json"),
    *("stdout", "stderr", "*.e[0-9]*", "*.o[0-9]*"),
)
_OF_THE_TRACKER = ("debug.log", "debug-internal.log", "debug-cli.log")
"""Logs of wandb about itself, including its own errors."""

_MAX_LOGS = 4_096  # Maximum number of files of a directory
_MAX_ELASTIC = 16 << 20  # Maximum bytes of the file that torchrun's ``@record`` writes

_HINT = "name the job's log files, torchrun's --log-dir, or - for standard input"


def log_names(names: Sequence[str]) -> list[str]:
    """Return the named files, and those in named directories.

    Args:
        names: Files, directories, ``-``.

    Raises:
        DoctorError: There is no such file, or a directory without a log.
    """
    found: list[str] = []
    for name in names:
        path = Path(name)
        if name == "-" or (path.exists() and not path.is_dir()):
            found.append(name)
        elif path.is_dir():
            inside = sorted(map(str, logs_inside(path)))
            if not inside:
                raise DoctorError(f"{name} has no log files ({', '.join(_NAMES)})", _HINT)
            found += inside[:_MAX_LOGS]
        else:
            raise DoctorError(f"no such file: {name}", _HINT)
    return list(dict.fromkeys(found))


def logs_inside(folder: Path) -> Iterator[Path]:
    """Yield the logs of a directory: regular files only, since it may contain anything."""
    named = re.compile("|".join(map(fnmatch.translate, _NAMES)))
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root, name)
            with contextlib.suppress(OSError):
                is_log = named.match(name) and name not in _OF_THE_TRACKER
                if is_log and stat.S_ISREG(path.lstat().st_mode):
                    yield path


def texts_of(name: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    """Yield the log in a file, or those in an archive, with names, decompressed and in pieces.

    Read each before requesting the next one. At most `MAX_BYTES` bytes of each are read.

    Raises:
        DoctorError: It cannot be read, or not to its end.
    """
    try:
        with _opened_log(name) as file:
            for shown, stream in unpacked(name, file):
                yield shown, recoded(_text_pieces(shown, stream))
    except (*DAMAGED, zlib.error, gzip.BadGzipFile):
        # Truncated, as copies of a failing job's logs often are. The beginning was read.
        return
    except OSError as error:
        raise DoctorError(f"cannot read {name}: {error.strerror or error}", _HINT) from None


def _text_pieces(name: str, stream: IO[bytes]) -> Iterator[bytes]:
    if PurePath(name).name == "error.json":
        yield _of_elastic(stream.read(_MAX_ELASTIC))
        return
    left = MAX_BYTES
    # One system call at a time, to read as much as possible of a damaged file.
    read = getattr(stream, "read1", stream.read)
    with contextlib.suppress(*DAMAGED, zlib.error, gzip.BadGzipFile):
        while left > 0 and (data := read(min(_CHUNK, left))):
            left -= len(data)
            yield data


def _opened_log(name: str) -> IO[bytes]:
    pipe = _PIPE.match(name)
    if name == "-" or pipe is not None:
        descriptor = sys.stdin.fileno() if pipe is None else int(pipe[1])
        return io.BufferedReader(io.FileIO(descriptor, closefd=False), _CHUNK)
    # A person's own files may be links. Other kinds of files have to be piped.
    file = io.BufferedReader(io.FileIO(opening.opened(name, links=True)), _CHUNK)
    size = os.fstat(file.fileno()).st_size
    if size > MAX_BYTES and not is_packed(file.peek(8)):
        file.seek(size - MAX_BYTES)
    return file


def _of_elastic(data: bytes) -> bytes:
    """Return the traceback in the file that torchrun's ``@record`` writes."""
    try:
        message = opening.loads(data)["message"]
        stack = message["extraInfo"]["py_callstack"]
        return str(stack).encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError):
        return data


# -- read a log: the lines that are worth reading, and the failures in them


# -- find the lines of a log that are worth reading, at hundreds of megabytes a second


_compiled: Any = None
if not os.environ.get("DDPDOCTOR_PURE_PYTHON"):
    with contextlib.suppress(ImportError):
        _compiled = importlib.import_module("ddpdoctor.failures._present")

COMMON = (
    HEAD, "rror", "ERROR", "FATAL", "ailed", "xception", "NCCL WARN", "atchdog", "exitcode",
    "exit code", "return code", "ignal", "nterrupt", "Killed", "core dumped", "Segmentation fault",
    "what():", "terminate called", "out of memory", ": line ",
)  # fmt: skip
"""Texts of most failures."""

MAX_LINES = 500
"""Maximum lines read because of one text. A log that repeats itself for hours has nothing new."""

LATER = 4  # Lines of each later block that are still read because of it, the last ones
_NOISE = 20_000  # Maximum number of shapes that are known to be irrelevant
_AT_ONCE = 300  # Maximum lines of a block that are tried per text
_REST = 15  # Blocks until it is checked again whether lines repeat themselves
_LONG = 200  # Letters of each end of a shape that identify it

_OF_STATUS = (b" code", b"status", b"exitcode", b"ignal", b"rrno", b"Xid")
"""Precede a number that tells whether a process failed, so equal shapes differ in meaning."""

_FEW = 50  # Maximum number of new shapes in a block of a log that repeats itself

_NUMBERS = b"0123456789."


_AT_THE_END = ("left-behind", "store-barrier-waits", "lightning-member")
"""Entries of little weight that count only if nothing follows."""


def _anchors() -> tuple[bytes, ...]:
    """Return the common texts, and a text for each entry of the table that has none of them."""
    found = dict.fromkeys(COMMON)
    for failure in TABLE:
        if failure.known.name in _AT_THE_END:
            continue
        for example in failure.examples:
            if not any(text in example for text in found):
                found[max((each for each in failure.literals if each in example), key=len)] = None
    return tuple(text.encode() for text in found)


ANCHORS = _anchors()  # Lines outside of tracebacks are read only if they contain one of these

_TEXTS = tuple({*ANCHORS, *(text.encode() for each in TABLE for text in each.literals)})
"""Texts that are searched at the ends of a log."""

_SHAPES = {anchor: anchor.translate(None, _NUMBERS) for anchor in ANCHORS}
"""The anchors without numbers, as in a shape."""


class Scan:
    """Finds the relevant lines of a log."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(ANCHORS, 0)
        self._noise: set[bytes] = set()
        self._plain: set[bytes] = set()
        self._rest = 0
        """Blocks to search without a check for new shapes, after one whose lines all differ."""

    def is_nothing(self, line: bytes) -> None:
        """Remember that lines of this shape are irrelevant."""
        if len(self._noise) < _NOISE and not any(word in line for word in _OF_STATUS):
            self._noise.add(_shape(line))

    def starts(self, block: bytes, first: int) -> Iterator[int]:
        """Yield the offsets of a block's lines with an anchor, from an offset on."""
        found: dict[int, bytes] = {}
        for anchor in self._anchors(block, first):
            at = block.find(anchor, first)
            tries = 0
            while at >= 0 and self._counts[anchor] < MAX_LINES and tries < _AT_ONCE:
                at = block.find(anchor, self._add(block, at, anchor, found))
                tries += 1
            end = len(block)
            for _ in range(_AT_ONCE if at >= 0 else 0):
                # The end of a job comes last.
                last = block.rfind(anchor, at, end)
                if last < 0 or tries >= _AT_ONCE + LATER:
                    break
                end = block.rfind(b"\n", 0, last) + 1
                before = len(found)
                self._add(block, last, anchor, found)
                tries += len(found) - before
        for start in sorted(found):
            # Its shape may have become irrelevant meanwhile.
            if _shape(block[start : _line_around(block, start)[1]]) not in self._noise:
                self._counts[found[start]] += 1
                yield start

    def candidates(self, block: bytes, first: int) -> Iterator[int]:
        """Yield the offsets of a short block's lines that may match any entry of the table."""
        found = set[int]()
        for text in _held(block, first, _TEXTS):
            at = block.find(text, first)
            while at >= 0:
                start, end = _line_around(block, at)
                found.add(start)
                at = block.find(text, end)
        for start in sorted(found):
            if _shape(block[start : _line_around(block, start)[1]]) not in self._noise:
                yield start

    def _anchors(self, block: bytes, first: int) -> Sequence[bytes]:
        """Return the anchors that may be in lines of new shapes."""
        held = _held(block, first, ANCHORS)
        if self._rest or not held:
            self._rest = max(0, self._rest - 1)
            return held
        lines = block[first:]
        shapes = set(lines.translate(None, _NUMBERS).split(b"\n")) - self._plain
        shapes = {each for each in shapes if _ends(each) not in self._noise}
        if len(shapes) > max(_FEW, lines.count(b"\n") // 2):
            self._rest = _REST
        new = b"\n".join(shapes)
        held = [anchor for anchor in held if _SHAPES[anchor] in new]
        if not held and len(self._plain) < _NOISE:
            self._plain |= shapes
        return held

    def _add(self, block: bytes, at: int, anchor: bytes, found: dict[int, bytes]) -> int:
        start, end = _line_around(block, at)
        if _shape(block[start:end]) not in self._noise:
            found.setdefault(start, anchor)
        return end


def _held(block: bytes, first: int, texts: tuple[bytes, ...]) -> Sequence[bytes]:
    """Return the texts that a block contains. All of them without the C code."""
    if _compiled is None:
        return texts
    held: list[bytes] = _compiled.present(block, first, texts)
    return held


def _line_around(block: bytes, at: int) -> tuple[int, int]:
    end = block.find(b"\n", at)
    return block.rfind(b"\n", 0, at) + 1, end if end >= 0 else len(block)


def _shape(line: bytes) -> bytes:
    return _ends(line.rstrip(b"\r\n").translate(None, _NUMBERS))


def _ends(shape: bytes) -> bytes:
    """Return both ends of a shape, since text after a progress bar stands last."""
    return shape if len(shape) <= 2 * _LONG else shape[:_LONG] + shape[-_LONG:]


# -- search a plain log for known failures and tracebacks, at tens of megabytes a second


# -- The reader


WENT_ON = 3  # Plain lines of the same rank after a failure that prove that it was caught
PATIENCE = 3_000  # Maximum number of lines that are read one by one to decide that
AT_WORK = 5  # Plain lines that differ only in their numbers and prove that a job works
_FOLLOWS = 300  # Lines after a launcher's end that are read to decide that
_MANY = 1_000  # Lines after an end that always belong to a later run

_HELD_BACK = 1 << 14
"""Bytes that Python's stdout may buffer until its process ends, if it is no terminal."""

_BLOCK = 1 << 18
_MAX_TURNED = 1 << 28  # Maximum bytes of a log whose lines are put into the opposite order
_LONGEST = 1 << 22  # Maximum bytes of a line. A longer one is cut.
_ENDS = 16_000  # Bytes at both ends of a log that are searched for all failures
_EARLIER = 4_000  # Bytes before a line that are searched for its time and rank

_ROOT = "Root Cause (first observed failure)"
_UNSTARTED = re.compile(r", in (?:_initialize_workers|_find_and_load)$", re.MULTILINE)
"""In tracebacks of launchers without ranks, and of imports, whose stdout buffers nothing."""

_NOTICED = next(each for each in TABLE if each.known.name == "child-failed")
"""What a launcher's traceback says whose end is missing."""

_ENDS_WITH = replace(
    ERROR_LINE,
    known=ERROR_LINE.known._replace(name=LAST_WORDS),
    says="printed a line that tells of a failure",
)
"""What is said of a log that shows no known failure, but ends with words for one."""

_LOCAL_RANK = re.compile(r"local_rank: (\d+)")


class LogReader:
    """Reads a log piece by piece.

    Args:
        source: The log's name, for people.
        place: Its index among the logs of a job.
    """

    def __init__(self, source: str, place: int = 0) -> None:
        self.source = source
        self._place = place
        self._rank = rank_of_file(source)
        self._occurrences: list[Occurrence] = []
        self._undecided: list[Occurrence] = []
        self._end: Occurrence | None = None
        """The last end of a process, until it is known whether another run follows."""
        self._work = Counter[str]()
        self._head: frozenset[str] = frozenset()
        """Shapes of the log's first lines, with which each run begins."""
        self._begins = False  # Whether such a line came after the end
        self._tracebacks = Tracebacks()
        self._scan = Scan()
        self._before: deque[str] = deque(maxlen=40)
        self._earlier = b""
        self._rest = b""
        self._offset = 0
        self._number = 1
        self._newest_first: list[bytes] = []
        """The pieces of a log whose newest line comes first, which is read when it is complete."""

    def feed(self, data: bytes) -> None:
        """Read a piece of any size."""
        if self._newest_first or (not self.size and is_newest_first(data)):
            self._newest_first.append(data)
            if self.size < _MAX_TURNED:
                return
            data, self._newest_first = b"".join(self._newest_first), []
        data = self._rest + data
        end = data.rfind(b"\n", 0, max(0, len(data) - _ENDS)) + 1
        if not end and len(data) > _LONGEST:
            end = len(data)
        self._rest = data[end:]
        start = 0
        while start < end:
            is_head = self._offset < _ENDS
            if not self._offset:
                self._head = beginning_of(data[:_ENDS])
            stop = data.find(b"\n", start + (_ENDS if is_head else _BLOCK), end) + 1 or end
            self._block(data[start:stop], is_end=is_head)
            start = stop

    @property
    def size(self) -> int:
        """Number of bytes that were read."""
        return self._offset + len(self._rest) + sum(map(len, self._newest_first))

    def close(self) -> list[Occurrence]:
        """Finish the log. Return everything that was found, in the order of the lines."""
        if self._newest_first:
            lines = b"".join(self._newest_first).removesuffix(b"\n").split(b"\n")
            found = read(self.source, [b"\n".join(reversed(lines))], self._place)
            end = len(lines) + 1
            return [replace(each, line=end - each.line, last=end - each.last) for each in found]
        if self._rest:
            self._head = self._head or beginning_of(self._rest[:_ENDS])
            self._block(self._rest.removesuffix(b"\n") + b"\n", is_end=True)
            self._rest = b""
        open_ = self._tracebacks.rest()
        if not open_:
            cut = cut_off([split_line(each) for each in self._past], self._number)
            open_ = [] if cut is None else [cut]
        for printed in open_:
            earlier = len(self._undecided)
            self._exception(printed)
            del self._undecided[:earlier]
            after = self._number - printed.last - 1
            for text in list(self._past)[-after:] if after > 0 else ():
                self._went_on(split_line(text))
        self._cut_report()
        found = corrected(sorted(self._occurrences, key=lambda each: each.order))
        self._count_behind(found)
        # What follows from another failure says less than a line that tells of one.
        reported = any(
            (each.final or each.uncaught)
            and (each.weight > Weight.CONSEQUENCE or each.weight == Weight.REMARK)
            for each in found
        )
        known = max((each.last for each in found if each.traceback), default=0)
        return found if reported else [*found, *self._last_words(known)]

    def _cut_report(self) -> None:
        """Add the first failure of torchrun's report if the log is cut off before its status."""
        last = [split_line(each).text for each in list(self._past)[-5:]]
        roots = [at for at, text in enumerate(last) if _ROOT in text]
        named = [*filter(None, map(SUMMARY_RANK.match, last[roots[-1] :]))] if roots else []
        if named and not any(map(STATUS.search, last)):
            number = self._number - 1
            self._add(
                Occurrence(
                    failure=_NOTICED,
                    groups={},
                    text=named[-1][0].strip(),
                    source=self.source,
                    line=number,
                    last=number,
                    order=(self._place, self._offset),
                    rank=whole(named[-1][1]),
                    root=True,
                )
            )

    def _last_words(self, after: int) -> list[Occurrence]:
        """Return the last lines that tell of a failure, unless the job goes on or was done.

        Args:
            after: The last line of the exceptions, which are known.
        """
        found: list[Occurrence] = []
        plain, offset = 0, self._offset
        for back, text in enumerate(reversed(list(self._past))):
            line, number = split_line(text), self._number - back - 1
            offset -= len(text.encode()) + 1
            if number <= after or plain >= WENT_ON:
                break
            if DONE.search(line.text):
                return []
            plain += is_plain(line.text) and WORDS.search(line.text) is not None
            if tells_of_failure(line.text):
                plain = 0
                found.append(
                    Occurrence(
                        failure=_ENDS_WITH,
                        groups={},
                        text=line.text.strip(),
                        source=self.source,
                        line=number,
                        last=number,
                        order=(self._place, offset),
                        rank=self._rank if line.rank is None else line.rank,
                        time=self._time(text),
                        who=line.who,
                    )
                )
        return found

    def _count_behind(self, found: Sequence[Occurrence]) -> None:
        """Count the lines after each occurrence until the next end."""
        ends = [each for each in found if each.final or each.uncaught]
        end = max(ends, key=lambda each: each.last, default=None)
        goes_on = end and (self._number > end.last + _MANY or self._goes_on(end))
        next_ = self._number if goes_on else 0
        size, is_last = self._offset, True
        named = _named_later(found)
        for each in reversed(found):
            behind = size - each.order[1] - len(each.traceback)
            held_back = _may_hold_back(each) and behind < _HELD_BACK
            each.behind = 0 if held_back else max(0, next_ - each.last - 1)
            of_rank = each.rank is not None and each.weight not in ENDED
            if of_rank and ((not is_last and each.behind < _MANY) or id(each) in named):
                # Other ranks of its run ended long after it.
                each.behind = 0
            if each.final or each.uncaught:
                next_, size, is_last = each.line, each.order[1], False

    def _goes_on(self, end: Occurrence) -> bool:
        """Return whether the last lines after an end are those of a working job."""
        past = list(self._past)
        behind = past[max(0, len(past) - (self._number - end.last - 1)) :]
        times = [when for each in behind if (when := time_of(each)) is not None]
        if end.time is not None and times and max(times) < end.time:
            # The log was joined from several ones, and the lines after it were written before.
            return False
        last = [split_line(each).text for each in behind]
        plain = sum(is_plain(each) or is_step(each) for each in last)
        complaints = sum(COMPLAINT.search(each) is not None for each in last)
        return plain > complaints or not complaints

    def _block(self, block: bytes, is_end: bool) -> None:
        """Read a piece of whole lines. Most of them are skipped by the scan."""
        size = len(block)
        at, number = 0, self._number
        starts: Iterator[int] | None = None
        while at < size:
            if not self._under_way:
                if starts is None:
                    look = self._scan.candidates if is_end else self._scan.starts
                    starts = look(block, at)
                start = next((each for each in starts if each >= at), None)
                if start is None:
                    break
                number += block.count(b"\n", at, start)
                self._skipped(block[max(at, start - _EARLIER) : start])
                at = start
            # Line by line until nothing is pending.
            end = block.find(b"\n", at) + 1 or size
            self._raw_line(block[at:end], self._offset + at, number)
            at, number = end, number + 1
        self._skipped(block[max(at, size - _EARLIER) :])
        self._number = number + block.count(b"\n", at)
        self._offset += size

    def _skipped(self, lines: bytes) -> None:
        """Remember the last skipped lines, which may add to the next line."""
        if len(lines) >= _EARLIER:
            self._before.clear()
            self._earlier = b""
        self._earlier += lines

    @property
    def _past(self) -> deque[str]:
        """The lines before this one. They are decoded on demand."""
        if self._earlier:
            self._before.extend(clean(each) for each in self._earlier.split(b"\n")[:-1])
            self._earlier = b""
        return self._before

    @property
    def _under_way(self) -> bool:
        return bool(self._tracebacks or self._undecided or self._end is not None)

    def _raw_line(self, raw: bytes, offset: int, number: int) -> None:
        said = [self._line(text, offset, number) for text in segments(raw)]
        if not any(said):
            self._scan.is_nothing(raw)

    def _line(self, text: str, offset: int, number: int) -> bool:
        """Read a line. Return whether it says anything about a failure."""
        line = split_line(text)
        belongs, ended = self._tracebacks.take(
            line, offset, number, self._time, lambda: [split_line(each).text for each in self._past]
        )
        for printed in ended:
            self._exception(printed)
        known = None if belongs else recognise(line.text)
        if known is not None:
            failure, groups = known
            is_status = STATUS.search(text) is not None
            rank = self._rank_in_summary(text) if is_status else line.rank
            mention = is_mention(line.text, failure)
            self._add(
                Occurrence(
                    failure=failure,
                    groups=groups,
                    text=line.text.strip(),
                    source=self.source,
                    line=number,
                    last=number,
                    order=(self._place, offset),
                    rank=self._rank if rank is None else rank,
                    time=self._time(text),
                    final=not mention,
                    mention=mention,
                    root=is_status and any(_ROOT in each for each in list(self._past)[-5:]),
                    who=line.who,
                    doing=self._activity() if failure.weight == Weight.SYMPTOM else "",
                )
            )
        elif not belongs:
            self._went_on(line)
            self._works(line, number)
        if text.strip():
            self._past.append(text)
        return belongs or known is not None

    def _went_on(self, line: Line) -> None:
        """Read a line without failure. After enough of them, earlier exceptions were caught."""
        plain = is_plain(line.text) and not says_more(line.text)
        for each in self._undecided:
            each.lines_after += 1
            # A line without a rank may be of any rank, but not if others have one.
            same = each.rank in (line.rank, self._rank) and each.who == line.who
            # An uncaught exception of a Ray worker is raised again in the driver.
            each.plain_after += plain and (same or "pid=" in each.who)
            if each.plain_after >= WENT_ON or each.lines_after > PATIENCE:
                each.final = each.lines_after > PATIENCE and each.plain_after == 0
                each.lines_after = -1
        self._undecided = [each for each in self._undecided if each.lines_after >= 0]

    def _works(self, line: Line, number: int) -> None:
        """Decide by a plain line after an end whether another run works there.

        After a rank's exception, buffered lines and progress bars of other ranks may follow. So
        the beginning of another run has to be seen first.
        """
        if self._end is None:
            return
        text = line.text
        task = line.who.partition(",")[0]
        if task.startswith(TASK) and task != TASK + self._end.groups.get("task", task[len(TASK) :]):
            # Other tasks of the same run still work.
            return
        shape = shape_of(text)
        self._begins = self._begins or shape in self._head
        at_work = is_plain(text) and PROGRESS.search(text)
        if at_work or (self._begins and is_step(text)):
            self._work[shape] += 1
            is_work = self._work[shape] >= AT_WORK
            self._end.followed = is_work and (self._begins or not _may_hold_back(self._end))
        if self._end.followed or number > self._end.last + _FOLLOWS:
            self._end = None

    def _exception(self, printed: Printed) -> None:
        """Add a complete traceback."""
        message = printed.message
        if not message and not printed.frames:
            return
        failure, groups = printed.known
        if not message and LAUNCHER.search(printed.text):
            failure = _NOTICED
        self._add(
            Occurrence(
                failure=failure,
                groups=groups,
                text=message,
                source=self.source,
                line=printed.number,
                last=printed.last,
                order=(self._place, printed.start),
                rank=printed.rank if printed.rank is not None else self._rank,
                time=printed.time,
                ignored=printed.survived and not message.startswith("KeyboardInterrupt"),
                location=printed.location,
                traceback=printed.text if printed.frames else "",
                context=printed.context,
                who=printed.who,
                bare=printed.of_thread or not (printed.frames and message),
                interleaved=printed.interleaved,
                uncaught=printed.ended_it and printed.frames and bool(message),
            ),
            decided=printed.uncaught and printed.frames,
        )

    def _survived(self, occurrence: Occurrence) -> None:
        """Mark exceptions that a process printed and survived, if this one ended it."""
        for each in self._undecided:
            printed = each.traceback and not each.uncaught and each.text != occurrence.text
            same = (each.rank, each.who) == (occurrence.rank, occurrence.who)
            if printed and each.plain_after and same:
                each.final, each.went_on = False, True

    def _add(self, occurrence: Occurrence, decided: bool = False) -> None:
        if occurrence.uncaught and occurrence.weight == Weight.CAUSE:
            self._survived(occurrence)
        self._occurrences.append(occurrence)
        alone = occurrence.uncaught and occurrence.rank is None
        if alone or (occurrence.weight == Weight.WRAPPER and occurrence.final):
            self._end, self._begins = occurrence, False
            self._work.clear()
        if (
            not decided
            and occurrence.final
            and occurrence.weight not in (Weight.STOPPED, Weight.DECISIVE)
            and (
                occurrence.weight >= Weight.BARE
                or occurrence.weight == Weight.REMARK
                or occurrence.traceback
                or (occurrence.failure is not None and occurrence.failure.known.name in _AT_THE_END)
            )
            and not STATUS.search(occurrence.text)
        ):
            self._undecided.append(occurrence)

    def _activity(self) -> str:
        """Return the last earlier line in which the job says what it does."""
        for each in reversed(self._past):
            text = split_line(each).text
            if WORDS.search(text) and is_plain(text) and recognise(text) is None:
                return text.strip()
        return ""

    def _rank_in_summary(self, text: str) -> int | None:
        """Return the rank whose exit torchrun reports, from some lines before the status."""
        for each in list(self._past)[-4:]:
            match = SUMMARY_RANK.match(split_line(each).text)
            if match:
                return whole(match[1])
        local = _LOCAL_RANK.search(text)
        return whole(local[1]) if local else None

    def _time(self, *texts: str) -> float | None:
        times = (time_of(each) for each in (*texts, *reversed(self._past)))
        return next((each for each in times if each is not None), None)


def read(source: str, chunks: Iterable[bytes], place: int = 0) -> list[Occurrence]:
    """Return all failures in a log, in the order of its lines."""
    reader = LogReader(source, place)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.close()


def _named_later(found: Sequence[Occurrence]) -> set[int]:
    """Return the ids of exceptions whose rank a launcher reports later in the same run."""
    later, ranks = set[int](), set[int | None]()
    for each in reversed(found):
        if STATUS.search(each.text):
            ranks.add(each.rank)
        elif each.uncaught and each.rank in ranks:
            later.add(id(each))
            ranks.remove(each.rank)
        elif each.failure is not None and each.failure.known.name == "launch":
            ranks.clear()
    return later


def _may_hold_back(occurrence: Occurrence) -> bool:
    """Return whether the process may print buffered output after this exception."""
    return bool(occurrence.traceback) and not _UNSTARTED.search(occurrence.traceback)

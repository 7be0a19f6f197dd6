"""Open logs: files, archives, directories of launchers, and standard input."""

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
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import IO, cast

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError

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
        f"{name} is compressed with zstd, and no package that reads it is installed",
        f"pip install zstandard, or: zstd -dc {name} | ddpdoctor report --log -",
    )


def _of_zip(name: str, file: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    if not file.seekable():
        raise DoctorError(
            f"{name} is a zip archive, which cannot be read from a pipe", "save it to a file first"
        )
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


def is_no_text(first: bytes) -> bool:
    """Return whether a file that begins so is no log. Its encoding may not be UTF-8."""
    head = first[:_PEEK]
    return b"\0" in head or head.decode("utf-8", "replace").count("\ufffd") > len(head) // 4


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

"""Compressed logs and archives, read as they are, one member after the other."""

from __future__ import annotations

import bz2
import codecs
import gzip
import importlib
import io
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterator
from typing import IO, cast

from ddpdoctor.core.errors import DoctorError

_ZSTD = b"\x28\xb5\x2f\xfd"
_ZIP = b"PK\x03\x04"
_PACKED = (_ZIP, _ZSTD, b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00")
_TAR_AT, _TAR = 257, b"ustar"
_PEEK = 512
_MOST_MEMBERS = 4_096

_NO_TEXT = re.compile(
    r"\.(?:pt|pth|ckpt|bin|safetensors|pkl|pickle|npy|npz|h5|png|jpg|jpeg|gif|mp4|so|whl|parquet"
    r"|arrow|wandb|pdf|pyc|onnx|nsys-rep|qdrep|sqlite|db)$",
    re.IGNORECASE,
)
"""Endings of files that are no logs."""

DAMAGED = (EOFError, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


class _Peekable(io.RawIOBase):
    """A stream whose first bytes were read already."""

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
    """The logs in a file, decompressed, with their names; the file itself if it is no archive.

    Each is to be read before the next one is asked for.

    Raises:
        DoctorError: It needs a package that is not installed, or a file that can be searched.
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
    """Whether a file has to be read from its beginning."""
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
        for member in sorted(archive.infolist(), key=lambda each: each.filename)[:_MOST_MEMBERS]:
            if not member.is_dir() and _is_log(member.filename):
                with archive.open(member) as inside:
                    yield from unpacked(f"{name}:{member.filename}", inside)


def _of_tar(name: str, stream: IO[bytes]) -> Iterator[tuple[str, IO[bytes]]]:
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for count, member in enumerate(archive):
            inside = archive.extractfile(member) if member.isreg() else None
            if inside is not None and _is_log(member.name) and count < _MOST_MEMBERS:
                yield from unpacked(f"{name}:{member.name}", inside)


def _is_log(name: str) -> bool:
    return _NO_TEXT.search(name) is None


def recoded(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """A text as UTF-8, whatever its byte order mark says it is."""
    first = next(chunks, b"")
    if first.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        coding = "utf-16"
    elif first[1:40:2].count(0) > 15 and not first[:40:2].count(0):
        coding = "utf-16-le"
    else:
        yield first.removeprefix(codecs.BOM_UTF8)
        yield from chunks
        return
    decoder = codecs.getincrementaldecoder(coding)("replace")
    yield decoder.decode(first).encode("utf-8", "replace")
    for chunk in chunks:
        yield decoder.decode(chunk).encode("utf-8", "replace")

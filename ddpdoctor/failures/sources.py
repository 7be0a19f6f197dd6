"""Where logs come from: files, archives, directories of launchers, standard input."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath
from typing import IO

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.failures.unpacking import DAMAGED, is_packed, recoded, unpacked

MOST = 2 << 30
"""Bytes of a log that are read, decompressed; of a larger file the last ones."""

_CHUNK = 1 << 20
_PIPE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)$")
"""What the shell writes in place of ``<(command)``: a descriptor that is open already."""

_NAMES = (
    *("*.log", "*.log.*", "*.err", "*.out", "*.txt", "*.stderr", "*.stdout", "error.json"),
    *("stdout", "stderr", "*.e[0-9]*", "*.o[0-9]*"),
)
_OF_THE_TRACKER = ("debug.log", "debug-internal.log", "debug-cli.log")
"""What wandb writes about itself, its own errors among it."""

_MOST = 4_096
"""Files of a directory."""

_MOST_ELASTIC = 16 << 20
"""Bytes of the file that torchrun's ``@record`` writes."""

_HINT = "name the job's log files, torchrun's --log-dir, or - for standard input"


def logs(names: Sequence[str]) -> list[str]:
    """The files that a person named, those of directories among them.

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
            inside = sorted({str(each) for each in _inside(path)})
            if not inside:
                raise DoctorError(f"{name} has no log files ({', '.join(_NAMES)})", _HINT)
            found += inside[:_MOST]
        else:
            raise DoctorError(f"no such file: {name}", _HINT)
    return list(dict.fromkeys(found))


def _inside(folder: Path) -> Iterator[Path]:
    """The logs of a directory: regular files, for whoever made it may have put anything there."""
    for pattern in _NAMES:
        for path in folder.rglob(pattern):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.lstat().st_mode) and path.name not in _OF_THE_TRACKER:
                    yield path


def logs_of(name: str) -> Iterator[tuple[str, Iterator[bytes]]]:
    """The log in a file, or those in an archive: each with its name, in pieces, decompressed.

    Each is to be read before the next one; `MOST` bytes of each are.

    Raises:
        DoctorError: It cannot be read; what could be was given before.
    """
    try:
        with _opened(name) as file:
            for shown, stream in unpacked(name, file):
                yield shown, recoded(_pieces(shown, stream))
    except (*DAMAGED, zlib.error, gzip.BadGzipFile):
        # Cut short, as copies of a failing job's logs are: what was there is read.
        return
    except OSError as error:
        raise DoctorError(f"cannot read {name}: {error.strerror or error}", _HINT) from None


def _pieces(name: str, stream: IO[bytes]) -> Iterator[bytes]:
    if PurePath(name).name == "error.json":
        yield _of_elastic(stream.read(_MOST_ELASTIC))
        return
    left = MOST
    # One call of the system at a time: what can be read of a torn file is.
    read = getattr(stream, "read1", stream.read)
    with contextlib.suppress(*DAMAGED, zlib.error, gzip.BadGzipFile):
        while left > 0 and (data := read(min(_CHUNK, left))):
            left -= len(data)
            yield data


def _opened(name: str) -> IO[bytes]:
    pipe = _PIPE.match(name)
    if name == "-" or pipe is not None:
        descriptor = sys.stdin.fileno() if pipe is None else int(pipe[1])
        return io.BufferedReader(io.FileIO(descriptor, closefd=False), _CHUNK)
    # A person's own files may be links; whatever else they are is for standard input.
    file = io.BufferedReader(io.FileIO(opening.opened(name, links=True)), _CHUNK)
    size = os.fstat(file.fileno()).st_size
    if size > MOST and not is_packed(file.peek(8)):
        file.seek(size - MOST)
    return file


def _of_elastic(data: bytes) -> bytes:
    """The traceback in the file that torchrun's ``@record`` writes."""
    try:
        message = opening.loads(data)["message"]
        stack = message["extraInfo"]["py_callstack"]
        return str(stack).encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError):
        return data

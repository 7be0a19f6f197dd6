"""Where logs come from: files, compressed ones, directories of torchrun, standard input."""

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
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError

MOST = 2 << 30
"""Bytes of a log that are read, decompressed; of a larger file the last ones."""

_CHUNK = 1 << 20
_PIPE = re.compile(r"/(?:dev|proc/self)/fd/(\d+)$")
"""What the shell writes in place of ``<(command)``: a descriptor that is open already."""

_GZIP = b"\x1f\x8b"
_NAMES = ("*.log", "*.log.gz", "*.err", "*.out", "*.txt", "*.stderr", "*.stdout", "error.json")
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
                if stat.S_ISREG(path.lstat().st_mode):
                    yield path


def chunks(name: str) -> Iterator[bytes]:
    """A log in pieces, decompressed, `MOST` bytes of it.

    Raises:
        DoctorError: It cannot be read; what could be was given before.
    """
    left = MOST
    try:
        with contextlib.ExitStack() as stack:
            file = _opened(name, stack)
            if os.path.basename(name) == "error.json":
                yield _of_elastic(file.read(_MOST_ELASTIC))
                return
            # One call of the system at a time: what can be read of a torn file is.
            while left > 0 and (data := file.read1(min(_CHUNK, left))):
                left -= len(data)
                yield data
    except (EOFError, zlib.error, gzip.BadGzipFile):
        # Cut short, as copies of a failing job's logs are: what was there is read.
        return
    except OSError as error:
        raise DoctorError(f"cannot read {name}: {error.strerror}", _HINT) from None


def _opened(name: str, stack: contextlib.ExitStack) -> io.BufferedReader[io.FileIO] | gzip.GzipFile:
    pipe = _PIPE.match(name)
    if name == "-" or pipe is not None:
        descriptor = sys.stdin.fileno() if pipe is None else int(pipe[1])
        raw = io.FileIO(descriptor, closefd=False)
    else:
        # A person's own files may be links; whatever else they are is for standard input.
        raw = io.FileIO(opening.opened(name, links=True))
    file = stack.enter_context(io.BufferedReader(raw, _CHUNK))
    if file.peek(2)[:2] == _GZIP:
        return stack.enter_context(gzip.GzipFile(fileobj=file))
    if raw.seekable() and (size := os.fstat(raw.fileno()).st_size) > MOST:
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

"""Where logs come from: files, compressed ones, directories of torchrun, standard input."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpdoctor.errors import DoctorError

_CHUNK = 1 << 20
_GZIP = b"\x1f\x8b"
_NAMES = ("*.log", "*.log.gz", "*.err", "*.out", "*.txt", "*.stderr", "*.stdout", "error.json")
_MOST = 4_096
"""Files of a directory."""

_HINT = "name the job's log files, torchrun's --log-dir, or - for standard input"


def logs(names: Sequence[str], status: int) -> list[str]:
    """The files that a person named, those of directories among them.

    Args:
        names: Files, directories, ``-``.
        status: Exit status of a name that cannot be.

    Raises:
        DoctorError: There is no such file, or a directory without a log.
    """
    found: list[str] = []
    for name in names:
        path = Path(name)
        if name == "-" or path.is_file() or (path.exists() and not path.is_dir()):
            found.append(name)
        elif path.is_dir():
            inside = sorted({str(each) for pattern in _NAMES for each in path.rglob(pattern)})
            if not inside:
                raise DoctorError(f"{name} has no log files ({', '.join(_NAMES)})", _HINT, status)
            found += inside[:_MOST]
        else:
            raise DoctorError(f"no such file: {name}", _HINT, status)
    return list(dict.fromkeys(found))


def chunks(name: str, status: int) -> Iterator[bytes]:
    """A log in pieces, decompressed.

    Raises:
        DoctorError: It cannot be read; what could be was given before.
    """
    try:
        with contextlib.ExitStack() as stack:
            file = _opened(name, stack)
            if os.path.basename(name) == "error.json":
                yield _of_elastic(file.read())
                return
            # One call of the system at a time: what can be read of a torn file is.
            while data := file.read1(_CHUNK):
                yield data
    except (EOFError, zlib.error, gzip.BadGzipFile):
        # Cut short, as copies of a failing job's logs are: what was there is read.
        return
    except OSError as error:
        raise DoctorError(f"cannot read {name}: {error.strerror}", _HINT, status) from None


def _opened(name: str, stack: contextlib.ExitStack) -> io.BufferedReader[io.FileIO] | gzip.GzipFile:
    raw = io.FileIO(sys.stdin.fileno() if name == "-" else name, closefd=name != "-")
    file = stack.enter_context(io.BufferedReader(raw, _CHUNK))
    if file.peek(2)[:2] == _GZIP:
        return stack.enter_context(gzip.GzipFile(fileobj=file))
    return file


def _of_elastic(data: bytes) -> bytes:
    """The traceback in the file that torchrun's ``@record`` writes."""
    try:
        message = json.loads(data)["message"]
        stack = message["extraInfo"]["py_callstack"]
        return str(stack).encode("utf-8", "replace")
    except (ValueError, KeyError, TypeError):
        return data

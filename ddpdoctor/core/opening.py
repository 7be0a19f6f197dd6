"""Open files safely that others may have written, and find the working directory.

A run directory may be a copy from anywhere, and what it names may be anything. Therefore:

- Only regular files are opened: no FIFO that blocks, no device that reacts to being opened.
- Links inside a run directory are not followed.
- Reads are limited by the size that the file had when it was opened (files in ``/proc`` and
  ``/dev`` may never end) and by the caller's limit.
- In a directory of this user that others can write to, only files of this user and of root are
  read.

This module also names other users for messages. Ranks import it, so it needs the standard library
alone.

A shell stays in a directory that was removed and re-created, by ``git clone`` for example. torch
does not start there: "Intel oneMKL FATAL ERROR: Cannot load libtorch_cpu.so".
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import re
import stat
from collections.abc import Collection, Mapping
from typing import Any

# -- Owners of run directories and ports


_UNMAPPED_USER = 65534  # Stands for users that NFS or a user namespace does not map


def stranger(path: os.PathLike[str]) -> int | None:
    """Return the owner of a directory if it is another user. None if it is ours or gone."""
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return None
    return None if uid == os.getuid() else uid


def whose(uid: int) -> str:
    """Name another user."""
    if uid == 0:
        return "root"
    if uid == _UNMAPPED_USER:
        return f"an unknown user (uid {uid}: NFS with root_squash, or another user's container)"
    return f"another user (uid {uid})"


def ask_as(uid: int) -> str:
    """Say how to reach a job of that user."""
    return f"run this command {'with sudo' if uid == 0 else 'as the user whose job it is'}"


def as_copy(path: os.PathLike[str]) -> str:
    """Say that another user's run is read as a copy. Empty for a run of this user."""
    uid = stranger(path)
    if uid is None:
        return ""
    copy = f"{os.fspath(path)} belongs to {whose(uid)} and is read as a copy"
    return f"{copy}; to see it live, {ask_as(uid)}"


# -- Opening files


MOST_MANIFEST = 4 << 20  # Maximum bytes of ``run.json``, which holds the command line

MOST_RECORD = 16 << 20
"""Maximum bytes of a file with one JSON object: stacks, an examination of a hang, GPUs."""

MOST_TEXT = 1 << 20  # Bytes read from the end of a text: stderr, the output of ``faulthandler``
MOST_SOURCE = 2 << 20  # Maximum bytes of a source file

MOST_PARSED = 160 << 10
"""Maximum bytes of a source file that is parsed. A syntax tree takes up to 800 times as much."""

MOST_EXPANDED = 24 << 20
"""Maximum bytes of memory that the JSON of a file may take (:func:`expanded`)."""

MOST_NAMES = 1 << 16  # Maximum number of files of a directory that are examined

Path = str | os.PathLike[str]

Owners = Collection[int] | None
"""The uids that may own a file. None applies the rule of :func:`opened`."""


class ForeignError(OSError):
    """A file belongs to a user whose files are not read there."""


def facts(path: Path, *, links: bool = True) -> os.stat_result:
    """Return the ``stat`` of a path.

    Raises:
        OSError: There is no such file, or the text cannot be a path.
    """
    try:
        return os.stat(path, follow_symlinks=links)
    except ValueError:
        # A null byte or a lone surrogate.
        raise OSError(errno.EINVAL, "is no path", repr(path)) from None


def opened(
    path: Path, flags: int = os.O_RDONLY, *, links: bool = False, owners: Owners = None
) -> int:
    """Open a regular file and return its descriptor.

    Args:
        path: The file.
        flags: ``O_RDONLY`` or ``O_RDWR``. Never one that creates a file.
        links: Follow a link at the end of the path, as for files that a person named.
        owners: The users whose file it has to be. None means this user and root in a directory of
            this user that others can write to, and any user elsewhere or with ``links``.

    Raises:
        ForeignError: It belongs to another user.
        OSError: There is no such file, or it is not a regular one.
    """
    # Checked before opening: a device may react to being opened.
    _require_regular(facts(path, links=links), path)
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        _require_regular(found, path)
        if owners is None and not links:
            directory = facts(os.path.dirname(path) or os.curdir)
            if directory.st_uid == os.getuid() and directory.st_mode & 0o022:
                owners = (directory.st_uid, 0)
        if owners is not None and found.st_uid not in owners:
            raise ForeignError(errno.EPERM, f"belongs to {whose(found.st_uid)}", os.fspath(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _require_regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "is a link, which is not followed", os.fspath(path))
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))


def file(
    path: Path, flags: int = os.O_RDONLY, *, links: bool = False, owners: Owners = None
) -> io.FileIO:
    """Open a file as :func:`opened` does. Return it unbuffered."""
    descriptor = opened(path, flags, links=links, owners=owners)
    return io.FileIO(descriptor, "r" if flags == os.O_RDONLY else "r+")


def contents(path: Path, most: int, *, links: bool = False, owners: Owners = None) -> bytes:
    """Read a whole file.

    Raises:
        OSError: It cannot be opened (:func:`opened`), or is larger than ``most`` bytes.
    """
    with file(path, links=links, owners=owners) as opened_file:
        size = os.fstat(opened_file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB", os.fspath(path))
        return opened_file.read(size)


def ending(path: Path, most: int) -> bytes:
    """Read the last ``most`` bytes of a file.

    Raises:
        OSError: It cannot be opened (:func:`opened`).
    """
    with file(path) as opened_file:
        size = os.fstat(opened_file.fileno()).st_size
        opened_file.seek(max(0, size - most))
        return opened_file.read(min(size, most))


def names(directory: Path) -> list[str]:
    """List the names in a run directory, sorted, at most `MOST_NAMES` of them.

    Raises:
        OSError: It cannot be listed.
    """
    with os.scandir(directory) as entries:
        # ddpdoctor's names are ASCII. A single other letter may quadruple the memory of a name.
        ours = (entry.name for entry in entries if entry.name.isascii())
        return sorted(itertools.islice(ours, MOST_NAMES))


# -- JSON that may be damaged or hostile


_LONG_NUMBER = re.compile(rb"[0-9]{21}")
_WORD = 1 << 63

_SIZES = ((b"{", 100), (b"[", 72), (b",", 48), (b":", 40), (b'"', 30))
"""Bytes of CPython's objects on 64-bit machines: containers, their slots, half of a string."""


def loads(data: bytes | str) -> Any:
    """Parse JSON and refuse very long integers, since arithmetic with them takes forever.

    Raises:
        ValueError: It is not JSON, is nested too deeply, or has an integer of more than 20 digits.
    """
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    try:
        # Only a hint: a string may also contain that many digits.
        return json.loads(data, parse_int=_short_integer if _LONG_NUMBER.search(raw) else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _short_integer(digits: str) -> int:
    if len(digits) > 21:
        raise ValueError("a number is too long")
    return int(digits)


def integer(found: Mapping[str, object], key: str, default: int = 0) -> int:
    """Return a 64-bit number of a JSON object. ``default`` if it is missing or something else."""
    value = found.get(key)
    return value if isinstance(value, int) and -_WORD <= value < _WORD else default


def whole(text: str | bytes, default: int = 0) -> int:
    """Parse an integer. Return ``default`` if the text is not one, or is too long."""
    try:
        return int(text) if len(text) < 20 else default
    except ValueError:
        return default


def expanded(data: bytes) -> int:
    """Estimate the maximum bytes of memory that JSON takes once it is parsed, without parsing it.

    An empty list of three bytes takes seventy, so a small file could exhaust the memory.
    """
    # A single letter beyond ASCII makes each letter of its string take up to four bytes.
    letters = 1 if data.isascii() and b"\\u" not in data else 4
    return len(data) * letters + sum(data.count(mark) * size for mark, size in _SIZES)


def json_object(path: Path, most: int, *, owners: Owners = None) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: It cannot be opened, or is too large (:func:`contents`).
        ValueError: It holds something else.
    """
    data = contents(path, most, owners=owners)
    if expanded(data) > MOST_EXPANDED:
        raise OSError(errno.EFBIG, f"takes more than {MOST_EXPANDED >> 20} MiB", os.fspath(path))
    found = loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} is not a JSON object")
    return found


# -- the working directory of a command, which may have been removed since the shell entered it


DIRECTORY_GONE = "the working directory was removed"
GO_THERE = 'cd "$PWD"   # into the one that has its name now'


def working_directory() -> str:
    """Return the working directory, or its former name if it was removed."""
    return os.environ.get("PWD", "") if working_directory_is_gone() else os.getcwd()


def relative_path(path: str) -> str:
    """Shorten a path below the working directory to a relative one."""
    short = os.path.relpath(path) if path else ""
    return path if short.startswith("..") else short


def relative_place(place: str) -> str:
    """Shorten the path of ``path:line`` as :func:`relative` does."""
    path, colon, line = place.rpartition(":")
    return f"{relative_path(path)}{colon}{line}"


def working_directory_is_gone() -> bool:
    """Return whether the working directory was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False

"""Open files safely that others may have written: run directories, logs, sources that records name.

A run directory may be a copy from anywhere, and what it names may be anything. So a file is opened
only if it is a regular one: no FIFO that never answers, no device whose opening does something. Of
a run directory no link is followed. And nothing is read without a limit: not beyond the size that
the file had when it was opened (`/proc` and `/dev` hold files that never end), and not more than
the reader says.

In a directory of this user that others may write to, only files of this user and of root are read.

Also names the other users to whom files and ports belong. Every reader of such a file uses this
module, in the ranks, too, so it imports next to nothing.
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

# -- whose a run directory or a port is, and what is said of other users


_UNMAPPED_USER = 65534
"""In the place of users that NFS or a user namespace does not map."""


def stranger(path: os.PathLike[str]) -> int | None:
    """The other user whose directory it is; None if it is this user's, or gone."""
    try:
        uid = os.stat(path).st_uid
    except OSError:
        return None
    return None if uid == os.getuid() else uid


def whose(uid: int) -> str:
    """Name a user who is not this one."""
    if uid == 0:
        return "root"
    if uid == _UNMAPPED_USER:
        return f"an unknown user (uid {uid}: NFS with root_squash, or another user's container)"
    return f"another user (uid {uid})"


def ask_as(uid: int) -> str:
    """Say how a job of that user is reached."""
    return f"run this command {'with sudo' if uid == 0 else 'as the user whose job it is'}"


def as_copy(path: os.PathLike[str]) -> str:
    """Say that a run of another user is read as a copy; empty for one of this user."""
    uid = stranger(path)
    if uid is None:
        return ""
    copy = f"{os.fspath(path)} belongs to {whose(uid)} and is read as a copy"
    return f"{copy}; to see it live, {ask_as(uid)}"


# -- opening


MOST_MANIFEST = 4 << 20
"""Bytes of ``run.json``: the command line is in it."""

MOST_RECORD = 16 << 20
"""Bytes of a file that holds one JSON object: stacks, an examination of a hang, GPUs."""

MOST_TEXT = 1 << 20
"""Bytes of a text, of which the end is read: stderr, what ``faulthandler`` wrote."""

MOST_SOURCE = 2 << 20
"""Bytes of a source file."""

MOST_PARSED = 160 << 10
"""Bytes of one whose syntax is looked at: a dense one takes 800 times as much once it is parsed."""

MOST_EXPANDED = 24 << 20
"""Bytes of memory that the JSON of a file may take (`expanded`)."""

MOST_NAMES = 1 << 16
"""Files of a directory that are looked at."""

Path = str | os.PathLike[str]


Owners = Collection[int] | None
"""Uids of the users whose file it has to be; None for any that `opened` takes."""


class ForeignError(OSError):
    """A file belongs to a user whose files are not read there."""


def facts(path: Path, *, links: bool = True) -> os.stat_result:
    """What the file system knows of a path.

    Raises:
        OSError: There is nothing, or the text cannot be a path.
    """
    try:
        return os.stat(path, follow_symlinks=links)
    except ValueError:
        # A zero byte, or half a character.
        raise OSError(errno.EINVAL, "is no path", repr(path)) from None


def opened(
    path: Path, flags: int = os.O_RDONLY, *, links: bool = False, owners: Owners = None
) -> int:
    """A descriptor of a regular file.

    Args:
        path: The file.
        flags: ``O_RDONLY`` or ``O_RDWR``; never one that creates.
        links: Follow a link at the end of the path, as a person's own files may be one.
        owners: The users whose file it has to be. None for this user and root where others may have
            put it into this user's run directory, and for any user elsewhere and with ``links``.

    Raises:
        ForeignError: It belongs to another user.
        OSError: There is no such file, or it is not a regular one.
    """
    # Looked at first: to open a device may be enough to do something.
    _regular(facts(path, links=links), path)
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if links else os.O_NOFOLLOW)
    descriptor = os.open(path, flags)
    try:
        found = os.fstat(descriptor)
        _regular(found, path)
        if owners is None and not links:
            owners = _owners(path)
        if owners is not None and found.st_uid not in owners:
            raise ForeignError(errno.EPERM, f"belongs to {whose(found.st_uid)}", os.fspath(path))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _owners(path: Path) -> Owners:
    """Whose files are read in the directory of a file; None for any user's."""
    directory = facts(os.path.dirname(path) or os.curdir)
    shared = directory.st_uid == os.getuid() and directory.st_mode & 0o022
    return (directory.st_uid, 0) if shared else None


def _regular(found: os.stat_result, path: Path) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(errno.ELOOP, "is a link, which is not followed", os.fspath(path))
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))


def file(
    path: Path, flags: int = os.O_RDONLY, *, links: bool = False, owners: Owners = None
) -> io.FileIO:
    """As :func:`opened`, as a file without a buffer."""
    descriptor = opened(path, flags, links=links, owners=owners)
    return io.FileIO(descriptor, "r" if flags == os.O_RDONLY else "r+")


def contents(path: Path, most: int, *, links: bool = False, owners: Owners = None) -> bytes:
    """A whole file.

    Raises:
        OSError: It cannot be opened (:func:`opened`), or is larger than ``most`` bytes.
    """
    with file(path, links=links, owners=owners) as opened_file:
        size = os.fstat(opened_file.fileno()).st_size
        if size > most:
            words = f"is larger than {most >> 20} MB"
            raise OSError(errno.EFBIG, words, os.fspath(path))
        return opened_file.read(size)


def ending(path: Path, most: int) -> bytes:
    """The last ``most`` bytes of a file.

    Raises:
        OSError: It cannot be opened (:func:`opened`).
    """
    with file(path) as opened_file:
        size = os.fstat(opened_file.fileno()).st_size
        opened_file.seek(max(0, size - most))
        return opened_file.read(min(size, most))


def loads(data: bytes | str) -> Any:
    """JSON, of which a number that no writer has is an error: no sum or product of it ends.

    Raises:
        ValueError: It is none, is nested too deeply, or has an integer of more than 20 digits.
    """
    raw = data.encode("utf-8", "replace") if isinstance(data, str) else data
    try:
        # So many digits may also be in a text, where they are no number.
        return json.loads(data, parse_int=_short if _LONG_NUMBER.search(raw) else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


_LONG_NUMBER = re.compile(rb"[0-9]{21}")


def _short(digits: str) -> int:
    if len(digits) > 21:
        raise ValueError("a number is too long")
    return int(digits)


_WORD = 1 << 63


def integer(found: Mapping[str, object], key: str, default: int = 0) -> int:
    """A number of a JSON object that may be damaged; ``default`` if it is missing or no number.

    Nor is one that no writer has: with more than 64 bits it could not even be divided.
    """
    value = found.get(key)
    return value if isinstance(value, int) and -_WORD <= value < _WORD else default


def whole(text: str | bytes, default: int = 0) -> int:
    """A number out of a text that may be damaged; ``default`` if it is none, or is too long."""
    try:
        return int(text) if len(text) < 20 else default
    except ValueError:
        return default


def names(directory: Path) -> list[str]:
    """The names in a run directory, sorted, of which there may be more than anybody made.

    Raises:
        OSError: It cannot be listed.
    """
    with os.scandir(directory) as entries:
        # Not those that are none of ddpdoctor's: a single letter may quadruple what one takes.
        ours = (entry.name for entry in entries if entry.name.isascii())
        return sorted(itertools.islice(ours, MOST_NAMES))


def expanded(data: bytes) -> int:
    """Bytes of memory that JSON takes once it is parsed, at most about; as it is, nothing is.

    Three bytes make an empty list of seventy, so a small file may take all memory.
    """
    # Of a text with one letter beyond ASCII each letter may take four bytes.
    letters = 1 if data.isascii() and b"\\u" not in data else 4
    return len(data) * letters + sum(data.count(mark) * size for mark, size in _SIZES)


_SIZES = ((b"{", 100), (b"[", 72), (b",", 48), (b":", 40), (b'"', 30))
"""What objects of CPython take on 64-bit machines: containers, a place in one, half of a text."""


def json_object(path: Path, most: int, *, owners: Owners = None) -> dict[str, Any]:
    """A file that holds one JSON object.

    Raises:
        OSError: It cannot be opened, or is too large (:func:`contents`).
        ValueError: It holds something else.
    """
    data = contents(path, most, owners=owners)
    if expanded(data) > MOST_EXPANDED:
        raise OSError(errno.EFBIG, f"takes more than {MOST_EXPANDED >> 20} MB", os.fspath(path))
    found = loads(data)
    if not isinstance(found, dict):
        raise ValueError(f"{os.fspath(path)} is no JSON object")
    return found

"""Files that one process maps into its memory and others read while it writes.

Standard library only. A writer takes no lock; a reader reads until two readings in a row are equal.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct

from ddpdoctor.core import opening

_HEAD = struct.Struct("<8sI")


class UnreadableError(Exception):
    """A file of a run directory that this version cannot read; the text is for a person."""


def create(path: str, size: int) -> mmap.mmap:
    """A new file of so many zeros, mapped.

    Raises:
        OSError: It exists, or there is no room for all of it; then there is none of it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Real blocks, not a sparse file: a store into a hole on a full disk is a SIGBUS.
        if os.write(descriptor, bytes(size)) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return mmap.mmap(descriptor, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def read(path: str, size: int) -> bytes:
    """What a file holds, live or left behind, at most ``size`` bytes.

    Raises:
        OSError: The file cannot be opened.
    """
    with opening.file(path) as file:
        found = file.read(size)
        # Two equal readings in a row cannot be a torn one.
        for _ in range(4):
            file.seek(0)
            again = file.read(size)
            if again == found:
                break
            found = again
    return found


def check(data: bytes, path: str, what: str, magic: bytes, newest: int, size: int) -> None:
    """Look at the head of a file: eight bytes of magic, and the version of its format.

    Args:
        data: What was read of it.
        path: The file.
        what: What it should be, with its article.
        magic: How it begins.
        newest: The newest version that can be read.
        size: The least number of bytes.

    Raises:
        UnreadableError: It is something else, cut short, or of a newer format.
    """
    if len(data) < size or not data.startswith(magic):
        raise UnreadableError(f"{path} is not {what}, or was cut short")
    version = _HEAD.unpack_from(data)[1]
    if version > newest:
        raise UnreadableError(
            f"{path} has format {version}; this ddpdoctor reads up to format {newest}"
        )

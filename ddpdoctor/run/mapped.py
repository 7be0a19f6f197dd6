"""Memory-mapped files that one process writes while others read, and the requests to ranks in them.

A writer takes no lock; a reader reads until two readings in a row are equal. To look at a request
of the supervisor costs a rank a tenth of a microsecond and needs no socket. Standard library only:
ranks load this.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run.names import FORMAT

# -- files that one process maps into its memory and others read while it writes


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


# -- what the supervisor asks of the ranks of its node: files that it writes and they map


EXAMINATION = "examination"
"""The file in the run directory by which an examination of a hang is asked for."""

PROFILE = "profile"
"""That by which samples of the training thread's stack are."""

MOST_PROFILES = 4
"""Profiles that a rank takes in its life."""

_NUMBER = struct.Struct("<q")


class Asking:
    """The supervisor's end.

    Args:
        directory: The run directory.
        name: The file in it: what is asked for.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, directory: str, name: str = EXAMINATION) -> None:
        self._memory = create(os.path.join(directory, name), _NUMBER.size)

    def ask(self, number: int) -> None:
        """Ask; who answers names the number, greater than all before."""
        _NUMBER.pack_into(self._memory, 0, number)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._memory.close()


class Asked:
    """A rank's end.

    Args:
        directory: The run directory.
        name: The file in it: what is asked for.

    Raises:
        OSError: There is no such file.
        ValueError: It is empty.
    """

    def __init__(self, directory: str, name: str = EXAMINATION) -> None:
        with opening.file(os.path.join(directory, name)) as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size, access=mmap.ACCESS_READ)
        self._seen = 0

    def news(self) -> int:
        """The number, if it is a new one, else 0."""
        (number,) = _NUMBER.unpack_from(self._memory)
        if number == self._seen:
            return 0
        self._seen = number
        return int(number)


SUSPICION = "suspicion"
"""The file in the run directory that says where ranks look closely."""

_SUSPECT_MAGIC = b"DDPSUSP\0"
_SUSPECT_HEAD = struct.Struct("<8sII")
_SEQUENCE = struct.Struct("<q")
_SEQUENCE_AT = 64
_SUSPECT = struct.Struct("<qqqqq8q")
_SUSPECT_AT = 128
_SUSPECT_SIZE = 256
MOST_SUSPECTS = 8
"""Tensors that a suspicion can name."""


class Suspicion(NamedTuple):
    """Look at every step from ``step`` on, ``steps`` times; after the first, write out tensors."""

    restart: int
    """The attempt that is meant: ranks of another one do not look."""
    step: int
    steps: int
    module: int
    tensors: tuple[int, ...]
    """Places among the names that the ranks reported for the module."""


class SuspicionWriter:
    """The supervisor's end of a suspicion.

    Args:
        path: The file, which must not exist.

    Raises:
        OSError: The file cannot be made.
    """

    def __init__(self, path: str) -> None:
        self._memory = create(path, _SUSPECT_SIZE)
        _SUSPECT_HEAD.pack_into(self._memory, 0, _SUSPECT_MAGIC, FORMAT, _SUSPECT_SIZE)
        self._sequence = 0

    def write(self, suspicion: Suspicion) -> None:
        """Ask the ranks; what was asked before no longer holds."""
        tensors = suspicion.tensors[:MOST_SUSPECTS]
        padded = (*tensors, *(0,) * (MOST_SUSPECTS - len(tensors)))
        # Odd while the rest is being written, and another number afterwards.
        _SEQUENCE.pack_into(self._memory, _SEQUENCE_AT, self._sequence + 1)
        _SUSPECT.pack_into(
            self._memory, _SUSPECT_AT,
            suspicion.restart, suspicion.step, suspicion.steps, suspicion.module, len(tensors),
            *padded,
        )  # fmt: skip
        self._sequence += 2
        _SEQUENCE.pack_into(self._memory, _SEQUENCE_AT, self._sequence)

    def close(self) -> None:
        """Let go of the file, which stays."""
        self._memory.close()


class SuspicionReader:
    """A rank's end of a suspicion.

    Args:
        path: The file.

    Raises:
        UnreadableError: It is no suspicion, or has a newer format.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        with opening.file(path) as file:
            head = file.read(_SUSPECT_SIZE)
            check(head, path, "a suspicion", _SUSPECT_MAGIC, FORMAT, _SUSPECT_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SUSPECT_SIZE, access=mmap.ACCESS_READ)
        self.sequence = self._memory, _SEQUENCE_AT
        """Where eight bytes change when something is written: the memory, and the place in it."""
        self._read: Callable[[], tuple[int]] = partial(
            _SEQUENCE.unpack_from, self._memory, _SEQUENCE_AT
        )
        self._seen = 0

    def news(self) -> Suspicion | None:
        """What was written since the last call, if it is written to its end; 0.2 us if nothing."""
        (sequence,) = self._read()
        if sequence == self._seen or sequence & 1:
            return None
        restart, step, steps, module, count, *tensors = _SUSPECT.unpack_from(
            self._memory, _SUSPECT_AT
        )
        if self._read()[0] != sequence:
            # Torn: the next call will see it whole.
            return None
        self._seen = sequence
        return Suspicion(restart, step, steps, module, tuple(tensors[:count]))

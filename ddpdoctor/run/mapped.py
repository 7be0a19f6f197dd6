"""Memory-mapped files that one process writes while others read, and the requests to ranks in them.

Writers take no lock. Readers repeat until two readings in a row are equal. A rank checks for a
request of the supervisor in a tenth of a microsecond, without a socket. Standard library only,
since ranks load this.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from ddpdoctor.core import opening
from ddpdoctor.run.names import FORMAT

_HEAD = struct.Struct("<8sI")


class UnreadableError(Exception):
    """A file of a run directory that this version cannot read."""


def create(path: str, size: int) -> mmap.mmap:
    """Create a file of ``size`` zero bytes and map it.

    Raises:
        OSError: It exists, or the disk has no room. Then no file is left.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Real blocks, since a store into a sparse file on a full disk raises SIGBUS.
        if os.write(descriptor, bytes(size)) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return mmap.mmap(descriptor, size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def read(path: str, size: int) -> bytes:
    """Read at most ``size`` bytes of a file, of a live process or not.

    Raises:
        OSError: The file cannot be opened.
    """
    with opening.file(path) as file:
        return steady(lambda: os.pread(file.fileno(), size, 0))


def steady(read: Callable[[], bytes]) -> bytes:
    """Read at most five times, until two readings in a row are equal. Neither is torn then."""
    found = read()
    for _ in range(4):
        before, found = found, read()
        if found == before:
            break
    return found


def check(data: bytes, path: str, what: str, magic: bytes, newest: int, size: int) -> None:
    """Check the head of a file: eight bytes of magic, and the version of its format.

    Raises:
        UnreadableError: It is another file, truncated, or of a newer format.
    """
    if len(data) < size or not data.startswith(magic):
        raise UnreadableError(f"{path} is not {what}, or was cut short")
    version = _HEAD.unpack_from(data)[1]
    if version > newest:
        raise UnreadableError(
            f"{path} has format {version}; this ddpdoctor reads up to format {newest}"
        )


# -- Requests of the supervisor to the ranks of its node


EXAMINATION = "examination"  # File that requests an examination of a hang
PROFILE = "profile"  # File that requests samples of the training thread's stack
MAX_PROFILES = 4  # Maximum number of profiles of a rank

_NUMBER = struct.Struct("<q")


class RequestWriter:
    """The supervisor's end of a request. The file's name says what is requested.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, directory: str, name: str = EXAMINATION) -> None:
        self._memory = create(os.path.join(directory, name), _NUMBER.size)

    def ask(self, number: int) -> None:
        """Send a request. Responses include its number, which must increase."""
        _NUMBER.pack_into(self._memory, 0, number)

    def close(self) -> None:
        """Unmap the file, which stays."""
        self._memory.close()


class RequestReader:
    """A rank's end of a request.

    Raises:
        OSError: There is no such file.
        ValueError: It is empty.
    """

    def __init__(self, directory: str, name: str = EXAMINATION) -> None:
        with opening.file(os.path.join(directory, name)) as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBER.size, access=mmap.ACCESS_READ)
        self._seen = 0

    def news(self) -> int:
        """Return the number of a new request, or 0."""
        (number,) = _NUMBER.unpack_from(self._memory)
        if number == self._seen:
            return 0
        self._seen = number
        return int(number)


SUSPICION = "suspicion"  # File that names the tensors to examine

_SUSPECT_MAGIC = b"DDPSUSP\0"
_SUSPECT_HEAD = struct.Struct("<8sII")
_SEQUENCE_AT = 64
_SUSPECT = struct.Struct("<qqqqq8q")
_SUSPECT_AT = 128
_SUSPECT_SIZE = 256
MAX_SUSPECTS = 8  # Maximum number of tensors in a suspicion


class Suspicion(NamedTuple):
    """A request to fingerprint ``steps`` steps from ``step`` on, and write out tensors once."""

    restart: int  # The attempt. Ranks of other attempts ignore the request.
    step: int
    steps: int
    module: int
    tensors: tuple[int, ...]  # Indices into the names that the ranks reported for the module


class SuspicionWriter:
    """The supervisor's end of a suspicion, in a file which must not exist.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, path: str) -> None:
        self._memory = create(path, _SUSPECT_SIZE)
        _SUSPECT_HEAD.pack_into(self._memory, 0, _SUSPECT_MAGIC, FORMAT, _SUSPECT_SIZE)
        self._sequence = 0

    def write(self, suspicion: Suspicion) -> None:
        """Replace the current request."""
        tensors = suspicion.tensors[:MAX_SUSPECTS]
        padded = (*tensors, *(0,) * (MAX_SUSPECTS - len(tensors)))
        # A sequence lock: odd while the rest is being written.
        _NUMBER.pack_into(self._memory, _SEQUENCE_AT, self._sequence + 1)
        _SUSPECT.pack_into(
            self._memory, _SUSPECT_AT,
            suspicion.restart, suspicion.step, suspicion.steps, suspicion.module, len(tensors),
            *padded,
        )  # fmt: skip
        self._sequence += 2
        _NUMBER.pack_into(self._memory, _SEQUENCE_AT, self._sequence)

    def close(self) -> None:
        """Unmap the file, which stays."""
        self._memory.close()


def moved_suspicion(content: bytes, attempts: Mapping[int, int]) -> bytes:
    """Return the content of another node's file with this node's number of the attempt.

    Raises:
        ValueError: It is cut short.
    """
    if len(content) != _SUSPECT_SIZE:
        raise ValueError("a suspicion is cut short")
    copy = bytearray(content)
    (restart,) = _NUMBER.unpack_from(copy, _SUSPECT_AT)
    _NUMBER.pack_into(copy, _SUSPECT_AT, attempts.get(restart, restart))
    return bytes(copy)


class SuspicionReader:
    """A rank's end of a suspicion.

    Raises:
        UnreadableError: It is another file, or has a newer format.
        OSError: It cannot be opened.
    """

    def __init__(self, path: str) -> None:
        with opening.file(path) as file:
            head = file.read(_SUSPECT_SIZE)
            check(head, path, "a suspicion", _SUSPECT_MAGIC, FORMAT, _SUSPECT_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SUSPECT_SIZE, access=mmap.ACCESS_READ)
        self.sequence = self._memory, _SEQUENCE_AT
        """The memory and the offset of eight bytes that change with each request."""
        self._read: Callable[[], tuple[int]] = partial(
            _NUMBER.unpack_from, self._memory, _SEQUENCE_AT
        )
        self._seen = 0

    def news(self) -> Suspicion | None:
        """Return a new, complete request. Takes 0.2 us if there is none."""
        (sequence,) = self._read()
        if sequence == self._seen or sequence & 1:
            return None
        restart, step, steps, module, count, *tensors = _SUSPECT.unpack_from(
            self._memory, _SUSPECT_AT
        )
        if self._read()[0] != sequence:
            # Torn. The next call will read it.
            return None
        self._seen = sequence
        return Suspicion(restart, step, steps, module, tuple(tensors[:count]))

"""The supervisor asks all ranks of its node for what they know of themselves, by one number.

A file of eight bytes that it writes and they map: looking at it costs a tenth of a microsecond and
needs no socket, so it works without a debugger and in containers, too.
"""

from __future__ import annotations

import mmap
import os
import struct

from ddpdoctor.core import opening
from ddpdoctor.run.record import mapped

NAME = "examination"
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

    def __init__(self, directory: str, name: str = NAME) -> None:
        self._memory = mapped(os.path.join(directory, name), _NUMBER.size)

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

    def __init__(self, directory: str, name: str = NAME) -> None:
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

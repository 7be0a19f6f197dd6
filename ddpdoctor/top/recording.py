"""Snapshots kept in a file, one a line, and played again."""

from __future__ import annotations

import os
import time
from array import array
from typing import BinaryIO

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.top import output
from ddpdoctor.top.snapshot import Snapshot, Verdict
from ddpdoctor.top.source import Want

_CHUNK = 1 << 20

MOST_FRAMES = 1 << 20
"""Frames that are played, the first ones: twelve days of one a second."""


class Recording:
    """Writes snapshots to a file.

    Args:
        path: The file; it must not exist.

    Raises:
        DoctorError: It cannot be written.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._last: float | None = None
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise DoctorError(f"{path} is there already", "name a new file for --record") from None
        except OSError as error:
            raise DoctorError(f"cannot write {path}: {error.strerror}") from None
        self._file: BinaryIO = os.fdopen(descriptor, "wb", buffering=0)

    def add(self, snapshot: Snapshot) -> None:
        """Keep a snapshot; the same one only once.

        Raises:
            DoctorError: It cannot be written.
        """
        if snapshot.time == self._last:
            return
        self._last = snapshot.time
        try:
            self._file.write(f"{output.line(snapshot)}\n".encode())
        except (OSError, ValueError) as error:
            raise DoctorError(f"cannot write {self.path}: {error}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RecordingSource:
    """Plays a recording; it opens at the first frame.

    Args:
        path: The file.

    Raises:
        DoctorError: It is no recording.
    """

    def __init__(self, path: str) -> None:
        try:
            self._file = opening.file(path, links=True)
        except OSError as error:
            raise DoctorError(f"cannot read {path}: {error.strerror}") from None
        self._path = path
        self._places = self._index()
        self._position = 0
        try:
            first = self._frame(0)
            self.interval = self._pace(first)
        except (ValueError, IndexError) as error:
            self._file.close()
            why = f": {error}" if isinstance(error, ValueError) else ""
            raise DoctorError(
                f"{path} is no recording{why}", "make one with `ddpdoctor top --record FILE`"
            ) from None

    def _index(self) -> array[int]:
        """Where the lines begin, and behind the last whole one."""
        places, at = array("Q", [0]), 0
        while len(places) <= MOST_FRAMES and (chunk := self._file.read(_CHUNK)):
            newline = chunk.find(b"\n")
            while newline >= 0 and len(places) <= MOST_FRAMES:
                places.append(at + newline + 1)
                newline = chunk.find(b"\n", newline + 1)
            at += len(chunk)
        return places

    def _frame(self, position: int) -> Snapshot:
        begin, end = self._places[position], self._places[position + 1]
        if end - begin > opening.MOST_RECORD:
            raise ValueError(f"frame {position + 1} is larger than {opening.MOST_RECORD >> 20} MB")
        return output.read(os.pread(self._file.fileno(), end - begin, begin))

    def _pace(self, first: Snapshot) -> float:
        """Seconds between the first two frames."""
        if self.length < 2:
            return 1.0
        try:
            return min(60.0, max(0.1, self._frame(1).time - first.time))
        except ValueError:
            return 1.0

    @property
    def length(self) -> int:
        """How many frames there are."""
        return len(self._places) - 1

    @property
    def position(self) -> int:
        """The frame that is read."""
        return self._position

    def seek(self, position: int) -> None:
        """Go to a frame; beyond the ends, to the nearest."""
        self._position = min(max(position, 0), self.length - 1)

    def read(self, want: Want) -> Snapshot:
        """The frame at the position; of one that is damaged, only that."""
        try:
            return self._frame(self._position)
        except (ValueError, OSError) as error:
            text = f"frame {self._position + 1} of {self._path} is damaged"
            return Snapshot(
                time=time.time(), kind="run", verdict=Verdict(text, "warning"), notes=(str(error),)
            )

    def close(self) -> None:
        """Close the file."""
        self._file.close()

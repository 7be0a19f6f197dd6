"""The files by which ranks that run already begin at the same step (`ddpdoctor attach --probe`).

Steps and collectives are compared between ranks by their numbers, so all ranks have to begin in the
same forward. Before each forward a rank writes how many collectives its process group has begun,
which is equal on all ranks there. The reader chooses a number that no rank has reached, and each
rank begins in the first forward with at least this number.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.run.names import LOCK

_BEGINNING = "late"
_SIZE = 256  # bytes of a rank's file


@dataclass(frozen=True)
class RankStart:
    """What a rank has written."""

    state: str  # ``waits`` for a forward, ``began``, or ``refused``
    calls: int = 0  # The number of collectives in the last forward. 0 before the first one.
    why: str = ""  # Why it refused


def rank_file(directory: str, pid: int) -> str:
    """Return the path of a rank's file."""
    return os.path.join(directory, f"{_BEGINNING}-{pid}")


def write_start(descriptor: int, start: RankStart) -> None:
    """Replace what a rank has written."""
    text = f"{start.state} {start.calls} {start.why}".encode("utf-8", "replace")
    os.pwrite(descriptor, text[: _SIZE - 1].ljust(_SIZE - 1) + b"\n", 0)


def read_start(directory: str, pid: int) -> RankStart | None:
    """Return what a rank has written. None if it has not started."""
    with contextlib.suppress(OSError, ValueError):
        content = opening.contents(Path(rank_file(directory, pid)), _SIZE)
        state, calls, why = content.decode("utf-8", "replace").split(" ", 2)
        return RankStart(state, int(calls), why.strip())
    return None


def choose_beginning(directory: str, calls: int) -> None:
    """Let all ranks begin in the first forward with at least this many collectives."""
    path = os.path.join(directory, _BEGINNING)
    with open(f"{path}.new", "w") as file:
        file.write(str(calls))
    os.replace(f"{path}.new", path)


def beginning(directory: str) -> int:
    """Return the chosen number of collectives. 0 if none is chosen yet."""
    with contextlib.suppress(OSError, ValueError):
        return int(opening.contents(Path(directory, _BEGINNING), 32))
    return 0


def has_reader(directory: str) -> bool:
    """Return whether the reader of a run directory lives."""
    try:
        with opening.file(Path(directory, LOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False

"""The processes of this machine, read from a process file system."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Listed:
    """A process as ``/proc`` shows it to this user."""

    pid: int
    folder: Path
    uid: int

    @property
    def words(self) -> list[str]:
        """Its command line; empty if it may not be seen, or there is none."""
        with contextlib.suppress(OSError):
            text = (self.folder / "cmdline").read_bytes().rstrip(b"\0")
            return [word.decode("utf-8", "replace") for word in text.split(b"\0") if word]
        return []

    @property
    def environ(self) -> dict[str, str] | None:
        """The environment it was started with; None if this user may not see it."""
        try:
            text = (self.folder / "environ").read_bytes()
        except OSError:
            return None
        pairs = (part.decode("utf-8", "replace").partition("=") for part in text.split(b"\0"))
        return {name: value for name, equals, value in pairs if equals}

    @property
    def fields(self) -> list[str]:
        """Its ``stat`` from the state on: state, parent's pid, process group, session..."""
        with contextlib.suppress(OSError):
            return (self.folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return []

    @property
    def alive(self) -> bool:
        """Whether it still runs, and is no zombie."""
        return bool(self.fields) and self.fields[0] not in "ZX"

    @property
    def parent(self) -> int:
        """Its parent's pid; 0 if it has ended."""
        fields = self.fields
        return int(fields[1]) if len(fields) > 1 else 0

    @property
    def started(self) -> int:
        """When it started, in clock ticks since the boot; with the pid it names it for ever."""
        fields = self.fields
        return int(fields[19]) if len(fields) > 19 else 0

    @property
    def resident(self) -> int:
        """Bytes of memory that it holds."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int((self.folder / "statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE")
        return 0

    @property
    def described(self) -> str:
        """For a person: ``python train.py --lr 0.1 (pid 4711)``."""
        words = self.words
        if words:
            words = [os.path.basename(words[0]), *words[1:]]
        text = " ".join(" ".join(words).split()) or "a process"
        return f"{text[:60]}{'...' if len(text) > 60 else ''} (pid {self.pid})"


def listed(proc: Path) -> Iterator[Listed]:
    """All processes, in no order."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(proc):
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    yield Listed(int(entry.name), Path(entry.path), entry.stat().st_uid)


def named(proc: Path, pid: int) -> Listed | None:
    """A process by its pid; None if there is none."""
    folder = proc / str(pid)
    try:
        return Listed(pid, folder, folder.stat().st_uid)
    except OSError:
        return None

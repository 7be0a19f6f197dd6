"""Where runs live on disk: making, finding and pruning run directories.

The base directory is shared with nobody: mode 0700 and owned by this user, or it is refused, since
on a machine with several users ``/tmp`` is where somebody else can plant a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from pathlib import Path

from ddpdoctor.errors import DoctorError

KEEP = 20
"""How many runs of the base directory stay; the oldest finished ones go first."""

MANIFEST = "run.json"
LATEST = "latest"


def base_directory() -> Path:
    """The directory that holds this user's runs: ``<tmp>/ddpdoctor-<uid>``."""
    return Path(tempfile.gettempdir()) / f"ddpdoctor-{os.getuid()}"


def _private(path: Path) -> None:
    """Make ``path`` a directory of this user alone, or refuse.

    Raises:
        DoctorError: It is a link, not a directory, or somebody else's.
        OSError: It cannot be made.
    """
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    facts = path.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise DoctorError(
            f"{path} is a link or a file, not a directory: refused",
            "remove it, or choose another place with --run-dir DIR",
        )
    if facts.st_uid != os.getuid():
        raise DoctorError(
            f"{path} belongs to another user (uid {facts.st_uid}): refused",
            "choose another place with --run-dir DIR",
        )
    if facts.st_mode & 0o077:
        path.chmod(0o700)


def create(chosen: str | None) -> Path:
    """Make the directory of a new run.

    Args:
        chosen: The directory a person named with ``--run-dir``: it must be empty or not exist.
            Without one, a fresh directory below :func:`base_directory`.

    Raises:
        DoctorError: The directory cannot be made private, or is not empty.
        OSError: The disk says no: full, read-only, not permitted.
    """
    if chosen is not None:
        path = Path(chosen).absolute()
        if path.is_dir() and any(path.iterdir()):
            raise DoctorError(
                f"the run directory {chosen} is not empty", "name a new or an empty directory"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        _private(path)
        return path
    base = base_directory()
    _private(base)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    path = base / name
    _private(path)
    return path


def publish(path: Path) -> None:
    """The run in ``path`` has started: ``latest`` points to it, and the oldest runs go.

    Does nothing for a directory that a person chose.

    Raises:
        OSError: The disk says no.
    """
    base = base_directory()
    if path.parent != base:
        return
    link = base / f".{LATEST}-{path.name}"
    link.symlink_to(path.name)
    os.replace(link, base / LATEST)
    _prune(base, path)


def _supervisor_alive(path: Path) -> bool:
    """Whether the run's supervisor still holds its lock (see :class:`Lock`)."""
    try:
        with open(path / "lock", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class Lock:
    """Held by a supervisor while its run lives, so that no other run prunes the directory."""

    def __init__(self, path: Path) -> None:
        self._file = open(path / "lock", "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Let go of the run."""
        self._file.close()


def _prune(base: Path, current: Path) -> None:
    runs = sorted(
        entry
        for entry in base.iterdir()
        if entry.is_dir() and not entry.is_symlink() and (entry / MANIFEST).exists()
    )
    surplus = len(runs) - KEEP
    for old in runs:
        if surplus <= 0:
            return
        if old != current and not _supervisor_alive(old):
            shutil.rmtree(old, ignore_errors=True)
            surplus -= 1


def find(name: str) -> Path:
    """The directory of a run that a person named: a path, a run id, or ``latest``.

    Raises:
        DoctorError: There is no such run.
    """
    for candidate in (Path(name), base_directory() / name):
        if (candidate / MANIFEST).is_file():
            return candidate.resolve()
    if Path(name).is_dir():
        raise DoctorError(
            f"{name} is not a run directory: it has no {MANIFEST}",
            "name a directory that `ddpdoctor run` printed",
        )
    raise DoctorError(f"no run named {name}", f"runs are kept in {base_directory()}")

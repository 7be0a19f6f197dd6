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
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.errors import DoctorError

KEEP = 20
"""How many runs of the base directory stay; the oldest finished ones go first."""

MANIFEST = "run.json"
LATEST = "latest"

STDERR = "stderr.log"
"""The end of the job's stderr; only once the job has ended."""

STDERR_SO_FAR = "stderr-so-far.log"
"""The end of the job's stderr while the job lives."""


def base_directory() -> Path:
    """The directory that holds this user's runs: ``<tmp>/ddpdoctor-<uid>``."""
    return Path(tempfile.gettempdir()) / f"ddpdoctor-{os.getuid()}"


def private_base() -> Path:
    """The base directory, made if it is not there, and private.

    Raises:
        DoctorError: It is a link, not a directory, or somebody else's.
        OSError: It cannot be made.
    """
    base = base_directory()
    _private(base)
    return base


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


def _fresh_name() -> str:
    """A name for a run, which sorts by age."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


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
    base = private_base()
    path = base / _fresh_name()
    _private(path)
    return path


def publish(path: Path) -> None:
    """The run in ``path`` has started: others can find it, and the oldest runs go.

    ``latest`` points to it; a directory that a person chose gets a link beside the others instead.

    Raises:
        OSError: The disk says no.
        DoctorError: The base directory is not this user's own.
    """
    base = private_base()
    if path.parent == base:
        link = base / f".{LATEST}-{path.name}"
        link.symlink_to(path.name)
        os.replace(link, base / LATEST)
    else:
        (base / _fresh_name()).symlink_to(path)
    _prune(base, path)


def live() -> list[Path]:
    """The directories of this user's live runs, the newest first.

    Raises:
        DoctorError: The base directory is not this user's own.
        OSError: It cannot be read.
    """
    entries = sorted(_entries(private_base()), reverse=True)
    return [entry.resolve() for entry in entries if is_live(entry)]


def some_live() -> list[Path]:
    """As :func:`live`, for a command that needs one.

    Raises:
        DoctorError: There is none, or they cannot be listed.
    """
    try:
        paths = live()
    except OSError as error:
        raise DoctorError(f"the runs cannot be listed: {error}") from None
    if not paths:
        raise DoctorError(
            "no run is live", "start one: ddpdoctor run --nproc-per-node 2 -- train.py"
        )
    return paths


def finished() -> list[Path]:
    """The directories of this user's runs that are over, the newest first.

    Raises:
        DoctorError: The base directory is not this user's own.
        OSError: It cannot be read.
    """
    entries = sorted(_entries(private_base()), reverse=True)
    return [entry.resolve() for entry in entries if not is_live(entry)]


def _entries(base: Path) -> Iterator[Path]:
    """Runs in the base directory, and links to those elsewhere."""
    for entry in base.iterdir():
        if entry.name != LATEST and (entry / MANIFEST).exists():
            yield entry


def put(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, and never half of it.

    Raises:
        OSError: The disk says no.
    """
    fresh = path.with_name(f".{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
    os.replace(fresh, path)


def is_live(path: Path) -> bool:
    """Whether the run in ``path`` lives: its supervisor holds its lock (see :class:`Lock`)."""
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
    entries = sorted(_entries(base))
    for link in base.iterdir():
        if link.is_symlink() and link.name != LATEST and not is_live(link):
            link.unlink(missing_ok=True)
    runs = [entry for entry in entries if not entry.is_symlink()]
    surplus = len(runs) - KEEP
    for old in runs:
        if surplus <= 0:
            return
        if old != current and not is_live(old):
            shutil.rmtree(old, ignore_errors=True)
            surplus -= 1


def find(name: str) -> Path:
    """The directory of a run that a person named: a path, a run id, or ``latest``.

    Raises:
        DoctorError: There is no such run, or it may not be read.
    """
    for candidate in (Path(name), base_directory() / name):
        try:
            if (candidate / MANIFEST).is_file():
                with open(candidate / MANIFEST, "rb"):
                    return candidate.resolve()
        except PermissionError:
            raise DoctorError(
                f"{name} may not be read: permission denied", "ask as the user whose job it is"
            ) from None
    if Path(name).is_dir():
        raise DoctorError(
            f"{name} is not a run directory: it has no {MANIFEST}",
            "name a directory that `ddpdoctor run` printed",
        )
    raise DoctorError(f"no run named {name}", f"runs are kept in {base_directory()}")

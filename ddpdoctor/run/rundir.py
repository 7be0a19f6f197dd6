"""Create, find and prune run directories.

The base directory must have mode 0700 and belong to this user, since others can plant a link in
``/tmp``. Otherwise the user's own directories take its place. A directory that a person chose keeps
its mode, but its files are readable by this user only.

A run of another user is never treated as live, not even by root. It is read as a copy: nothing
attaches to it, signals it or sends requests to its ranks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ddpdoctor.core import opening
from ddpdoctor.core.errors import DoctorError
from ddpdoctor.core.formatting import shown
from ddpdoctor.core.opening import ask_as, stranger, whose
from ddpdoctor.run.names import LOCK

MAX_RUNS = 20
"""Maximum number of runs in the base directory. The oldest finished ones are removed first."""

MAX_SERIES = 5  # Maximum number of directories of `ddpdoctor scale`, each with many runs

MANIFEST = "run.json"
LATEST = "latest"

STDERR = "stderr.log"  # The end of the job's stderr, written once the job has ended
STDERR_SO_FAR = "stderr-so-far.log"  # The end of the job's stderr while the job runs


def base_directory(uid: int | None = None) -> Path:
    """Return the directory of a user's runs, by default ours: ``<tmp>/ddpdoctor-<uid>``."""
    return Path(tempfile.gettempdir()) / f"ddpdoctor-{os.getuid() if uid is None else uid}"


def _fallbacks() -> list[Path]:
    """Return alternative directories that no other user can write to."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    state = os.environ.get("XDG_STATE_HOME", "")
    places = [runtime, state if os.path.isabs(state) else os.path.expanduser("~/.local/state")]
    # The XDG standard ignores relative paths.
    return [Path(place) / "ddpdoctor" for place in places if os.path.isabs(place)]


_remarked: set[Path] = set()


def private_base() -> Path:
    """Return the base directory. Create it if missing and make it private.

    If :func:`base_directory` is not usable, print a line and use one of the user's own directories.

    Raises:
        DoctorError: Each of them is a link, not a directory, or another user's.
        OSError: It cannot be created.
    """
    base = base_directory()
    try:
        _private(base)
        return base
    except DoctorError as error:
        refusal = error
    for place in _fallbacks():
        with contextlib.suppress(DoctorError, OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _private(place)
            if place not in _remarked:
                _remarked.add(place)
                text = f"ddpdoctor: {refusal.message}; runs are kept in {place}\n"
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    sys.stderr.write(shown(text, "\n"))
            return place
    raise refusal


def _bases() -> list[Path]:
    """Return the directories with runs of this user: the base directory, then fallbacks."""
    first = private_base()
    others = [base_directory(), *_fallbacks()]
    return [first, *(each for each in others if each != first and _is_own(each))]


def _is_own(path: Path) -> bool:
    """Return whether a path is a directory of this user, and not a link."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()


def _private(path: Path) -> None:
    """Create a directory that only this user can enter, as :func:`_own`."""
    if _own(path).st_mode & 0o077:
        path.chmod(0o700)


def _own(path: Path) -> os.stat_result:
    """Create a directory of this user. An existing one keeps its mode.

    Raises:
        DoctorError: It is a link, not a directory, or another user's.
        OSError: It cannot be created.
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
            f"{path} belongs to {whose(facts.st_uid)}: refused",
            "choose another place with --run-dir DIR",
        )
    return facts


def _fresh_name() -> str:
    """Return a name for a run that sorts by age."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def create(chosen: str | None) -> Path:
    """Create the directory of a new run.

    Args:
        chosen: The directory of ``--run-dir``, which must be empty or not exist. If a live run has
            it, such as that of another node on a shared file system, the new one is below it.
            Without it, a new directory in :func:`base_directory`.

    Raises:
        DoctorError: The directory cannot be made private, or is not empty.
        OSError: The disk is full, read-only, or not permitted.
    """
    if chosen is None:
        path = private_base() / _fresh_name()
        _private(path)
        return path
    path = _chosen(chosen)
    found = {each.name for each in path.iterdir()}
    if not found:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path / LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            return path
    elif found != {LOCK} and not is_live(path):
        raise _not_empty(chosen)
    path /= f"{socket.gethostname()}-{os.getpid()}"
    _own(path)
    return path


def _chosen(name: str) -> Path:
    """Return the directory that a person chose. Create it if it is missing, as :func:`_own`."""
    path = Path(name).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    _own(path)
    return path


def _not_empty(name: str) -> DoctorError:
    return DoctorError(f"the run directory {name} is not empty", "name a new or an empty directory")


def discard(path: Path) -> None:
    """Remove the directory of a run that could not start, unless live runs are in it."""
    if not any(map(is_live, path.iterdir())):
        shutil.rmtree(path, ignore_errors=True)


def create_series(chosen: str | None) -> Path:
    """Create a directory for several runs. Without a chosen one, remove the oldest ones.

    Raises:
        DoctorError: The directory cannot be made private, or is not empty.
        OSError: The disk is full, read-only, or not permitted.
    """
    if chosen is not None:
        path = _chosen(chosen)
        if any(path.iterdir()):
            raise _not_empty(chosen)
        return path
    base = private_base()
    for old in sorted(base.glob("scale-*"))[: 1 - MAX_SERIES]:
        if not any(map(is_live, old.iterdir())):
            shutil.rmtree(old, ignore_errors=True)
    path = base / f"scale-{_fresh_name()}"
    _private(path)
    return path


def publish(path: Path) -> None:
    """Make a run that has started findable, and remove the oldest runs.

    ``latest`` points to it. A directory that a person chose gets a link next to the other runs.

    Raises:
        OSError: The disk refuses it.
        DoctorError: The base directory belongs to another user.
    """
    base, name = private_base(), path.name
    if path.parent in _bases():
        base = path.parent
    else:
        name = _fresh_name()
        (base / name).symlink_to(path)
    link = base / f".{LATEST}-{name}"
    link.symlink_to(name)
    os.replace(link, base / LATEST)
    _prune(base, path)


def live(folder: str | None = None) -> list[Path]:
    """Return the directories of this user's live runs, or those of a folder, the newest first.

    Raises:
        DoctorError: The base directory belongs to another user.
        OSError: It cannot be read.
    """
    return [entry.resolve() for entry in newest_first(folder) if is_live(entry)]


def some_live() -> list[Path]:
    """Return the live runs, newest first, for a command that needs one.

    Raises:
        DoctorError: There is none, or they cannot be listed.
    """
    try:
        paths = live()
    except OSError as error:
        raise DoctorError(f"the runs cannot be listed: {error}") from None
    if not paths:
        start = "start one: ddpdoctor run --nproc-per-node 2 -- train.py"
        if stranger(base_directory(0)) == 0:
            start += "; use sudo for a job that sudo started"
        elif os.getuid() == 0 and "SUDO_UID" in os.environ:
            start += "; use no sudo for a job of your own"
        raise DoctorError("no run is live", start)
    return paths


def newest_first(folder: str | None = None) -> list[Path]:
    """Return this user's runs, or those of a folder (:func:`belongs`), the newest first.

    Links refer to directories that were chosen.

    Raises:
        DoctorError: The base directory belongs to another user.
        OSError: It cannot be read.
    """
    entries = [entry for base in _bases() for entry in _entries(base)]
    if folder is not None:
        entries = [entry for entry in entries if belongs(entry, folder)]
    return sorted(entries, key=lambda entry: entry.name, reverse=True)


def belongs(path: Path, folder: str) -> bool:
    """Return whether a run was started for a folder that an editor has open, or below it.

    The workspace of a run that was started in a terminal is a guess. It may lie above the folder in
    which the run was started.
    """
    try:
        manifest = opening.json_object(path / MANIFEST, opening.MOST_MANIFEST)
    except (OSError, ValueError):
        return False
    here = Path(os.path.realpath(folder))
    started = _real(manifest.get("cwd"))
    workspace = _real(manifest.get("workspace")) or started
    if workspace is None:
        return False
    below = started is not None and started.is_relative_to(here)
    return workspace.is_relative_to(here) or (below and here.is_relative_to(workspace))


def _real(name: object) -> Path | None:
    """Return a path without links. None if it is not an absolute path."""
    if isinstance(name, str) and os.path.isabs(name) and "\0" not in name:
        return Path(os.path.realpath(name))
    return None


def _entries(base: Path) -> Iterator[Path]:
    """Yield this user's runs in the base directory, and links to those elsewhere."""
    for entry in base.iterdir():
        with contextlib.suppress(OSError):
            if stranger(entry) is None and entry.name != LATEST and (entry / MANIFEST).exists():
                yield entry


def put(path: Path, content: bytes) -> None:
    """Write a file atomically: a reader sees the old content or the new.

    Raises:
        OSError: The disk refuses it.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    # Never an existing file, which may be a link that others planted.
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def is_live(path: Path) -> bool:
    """Return whether a path is a live run of this user: its supervisor holds the :class:`Lock`."""
    try:
        with opening.file(path / LOCK, owners=(os.getuid(),)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return stranger(path) is None
    except OSError:
        return False
    return False


class Lock:
    """Marks a run as live, so that no other run prunes the directory."""

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = open(os.open(path / LOCK, flags, 0o600), "wb")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Release the run."""
        self._file.close()


def _prune(base: Path, current: Path) -> None:
    entries = sorted(_entries(base))
    kept = LATEST, os.readlink(base / LATEST)
    for link in base.iterdir():
        if link.is_symlink() and link.name not in kept and not is_live(link):
            link.unlink(missing_ok=True)
    runs = [entry for entry in entries if not entry.is_symlink()]
    surplus = len(runs) - MAX_RUNS
    for old in runs:
        if surplus <= 0:
            return
        if old != current and not is_live(old):
            shutil.rmtree(old, ignore_errors=True)
            surplus -= 1


def find(name: str) -> Path:
    """Return the directory of a named run: a path, a run id, or ``latest``.

    Raises:
        DoctorError: There is no such run, or it may not be read.
    """
    for candidate in places(name):
        try:
            os.close(opening.opened(candidate / MANIFEST))
            return candidate.resolve()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except PermissionError:
            raise unreadable(candidate) from None
        except OSError as error:
            raise DoctorError(f"{candidate / MANIFEST} {error.strerror}") from None
    if name != LATEST and Path(name).is_dir():
        raise DoctorError(
            f"{name} is not a run directory: it has no {MANIFEST}",
            "name a directory that `ddpdoctor run` printed",
        )
    raise DoctorError(f"no run named {name}", f"runs are kept in {base_directory()}")


def unreadable(path: Path) -> DoctorError:
    """Make the error for a run that this user may not read."""
    for place in (path / MANIFEST, path, *path.absolute().parents):
        with contextlib.suppress(OSError):
            uid = place.stat().st_uid
            if uid == os.getuid():
                break
            return DoctorError(f"{path} may not be read: it belongs to {whose(uid)}", ask_as(uid))
    return DoctorError(f"{path} may not be read: permission denied")


def places(name: str) -> Iterator[Path]:
    """Yield possible directories of a named run: a path, or a run id among this user's runs.

    ``latest`` is not taken as a path, since anyone may have created it in the working directory.

    Raises:
        DoctorError: It is not a path, and the base directory belongs to another user.
    """
    if name != LATEST:
        yield Path(name)
    if os.path.basename(name) == name and name not in ("", os.curdir, os.pardir):
        with contextlib.suppress(OSError):
            yield from (base / name for base in _bases())

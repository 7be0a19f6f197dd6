"""The files in a workspace's ``.vscode``: which workspace, and changing them without damage."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.run import rundir

FOLDER = ".vscode"
LAUNCH = "launch.json"
LOCK_SECONDS = 10.0
"""How long to wait for another process that edits the same workspace."""

Edit = Callable[["str | None"], "str | None"]
"""From the text of a file to the new one; None is for a file that is not, or shall not be, there.

Raises :class:`~ddpdoctor.debug.vscode.jsonc.JsoncError` if the text cannot be edited.
"""


def current_directory() -> Path:
    """The working directory under the name that the shell has for it, links included.

    VS Code names files as its folder was opened, which may be through a link.
    """
    here, named = Path.cwd(), os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, here):
            return Path(named)
    return here


def find_workspace(start: Path, chosen: str | None) -> Path:
    """The folder that VS Code has open: the one a person named, or a guess.

    The guess is the nearest of ``start`` and its parents with a ``.vscode`` or ``.git``, else
    ``start``. The home directory is passed over: its ``.vscode`` holds VS Code's extensions.

    Raises:
        DoctorError: The named one is no directory.
    """
    if chosen is not None:
        named = start / chosen
        if not named.is_dir():
            raise DoctorError(
                f"the workspace {chosen} is not a directory", "name the folder that VS Code opens"
            )
        return Path(os.path.normpath(named))
    start = start.absolute()
    home = os.path.realpath(os.path.expanduser("~"))
    for folder in (start, *start.parents):
        has_one = (folder / FOLDER).is_dir() or (folder / ".git").exists()
        if has_one and os.path.realpath(folder) != home:
            return folder
    return start


@contextlib.contextmanager
def locked(workspace: Path) -> Iterator[None]:
    """Keep other processes of this user from editing the same workspace.

    Raises:
        DoctorError: Another one holds it for too long, or there is no place for the lock.
    """
    key = hashlib.sha256(os.fsencode(os.path.realpath(workspace))).hexdigest()[:16]
    try:
        descriptor = os.open(
            rundir.private_base() / f"vscode-{key}.lock",
            os.O_RDWR | os.O_CREAT,
            0o600,
        )
    except OSError as error:
        raise DoctorError(f"no lock for {workspace / FOLDER}: {error}") from None
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DoctorError(
                        f"another ddpdoctor is changing {workspace / FOLDER}", "try again"
                    ) from None
            time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


def edit(workspace: Path, edits: Mapping[str, Edit]) -> list[Path]:
    """Change files in the workspace's ``.vscode``, all or none of them.

    None is written before all edits are known to work, and none whose content stays the same.

    Returns:
        Those that changed.

    Raises:
        DoctorError: A file cannot be read, understood or written, said in one line; then all are
            as they were, unless the disk gave up between two of them.
    """
    from ddpdoctor.debug.vscode.jsonc import JsoncError

    with locked(workspace):
        files = {name: _File(workspace, name) for name in edits}
        changed: list[tuple[_File, str | None]] = []
        for name, file in files.items():
            before = file.read()
            try:
                after = edits[name](before)
            except JsoncError as error:
                raise DoctorError(
                    f"{file.path}:{error.line}: {error.message}",
                    "the file is unchanged; fix it or move it away, then try again",
                ) from None
            if after != before:
                file.check_writable()
                changed.append((file, after))
        for file, after in changed:
            if after is None:
                file.delete()
            else:
                file.write(after)
        return [file.path for file, _ in changed]


class _File:
    """A file in ``.vscode``; if it is a link, what the link leads to.

    Raises:
        DoctorError: The link leads out of the workspace.
    """

    def __init__(self, workspace: Path, name: str) -> None:
        self.path = workspace / FOLDER / name
        self.target = Path(os.path.realpath(self.path))
        root = Path(os.path.realpath(workspace))
        if root not in self.target.parents:
            raise DoctorError(
                f"{self.path} links to {self.target}, outside the workspace; it is unchanged",
                "make it a regular file, or name the other workspace with --workspace DIR",
            )

    def read(self) -> str | None:
        """The text, with the line ends and the byte order mark that it has."""
        with self._one_line("read"):
            try:
                if not stat.S_ISREG(self.target.stat().st_mode):
                    raise DoctorError(f"{self.path} is not a file; it is unchanged")
                content = self.target.read_bytes()
            except FileNotFoundError:
                return None
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            line = content.count(b"\n", 0, error.start) + 1
            raise DoctorError(
                f"{self.path}:{line}: not UTF-8", "the file is unchanged; save it as UTF-8"
            ) from None

    def check_writable(self) -> None:
        with self._one_line("written"):
            try:
                mode = self.target.stat().st_mode
            except FileNotFoundError:
                return
            # The superuser may write to it all the same, but somebody wanted it to stay.
            if not mode & 0o222 or not os.access(self.target, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only")

    def write(self, text: str) -> None:
        """Replace the content at once, so that no reader sees half of it."""
        temporary = self.target.with_name(f".{self.target.name}.{secrets.token_hex(4)}.tmp")
        with self._one_line("written"):
            self.target.parent.mkdir(exist_ok=True)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(temporary, flags, 0o666), "wb") as file:
                    with contextlib.suppress(FileNotFoundError):
                        self._like_before(file.fileno())
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.target)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()

    def _like_before(self, descriptor: int) -> None:
        facts = self.target.stat()
        # Root in a container edits files of the person outside, whose they must stay.
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, facts.st_uid, facts.st_gid)
        os.fchmod(descriptor, stat.S_IMODE(facts.st_mode))

    def delete(self) -> None:
        """Remove the file, and ``.vscode`` if nothing else is in it."""
        with self._one_line("removed"):
            self.target.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()

    @contextlib.contextmanager
    def _one_line(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise DoctorError(
                f"{self.path} cannot be {done}: {error.strerror or error}",
                "nothing was changed in it",
            ) from None

"""Edit files of ``.vscode``, and keep what others wrote there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpdoctor.core.errors import DoctorError
from ddpdoctor.debug import jsonc
from ddpdoctor.debug.jsonc import BLANKS, BOM, INDENT, Comment, Document, JsoncError, Node
from ddpdoctor.run import rundir

# -- ddpdoctor's entries in a file of the user


PREFIX = "ddpdoctor: "
MADE = "// made by ddpdoctor"
MADE_FILE = "// file made by ddpdoctor"


def any_name(_: str) -> bool:
    """Accept every name, for :attr:`Section.replaced`."""
    return True


@dataclass(frozen=True)
class Section:
    """A list in the root object, and ddpdoctor's entries in it.

    Attributes:
        key: The key of the list.
        naming: The property of an element that holds its name.
        wanted: The entries to write, in order.
        replaced: Whether an existing entry of ddpdoctor with this name is removed.
    """

    key: str
    naming: str
    wanted: Sequence[Mapping[str, object]]
    replaced: Callable[[str], bool]

    def arrays(self, document: Document) -> list[Node]:
        """Return all lists of this key. VS Code reads the last one."""
        found = document.root.members(self.key) if document.root is not None else []
        return [node for node in found if isinstance(node.value, list)]

    def ours(self, array: Node, *, replaced: bool = True) -> list[Node]:
        """Return ddpdoctor's entries in a list: those to remove, or all of them."""
        found = []
        for item in array.items:
            name = item.value.get(self.naming) if isinstance(item.value, dict) else None
            name = name if isinstance(name, str) else ""
            if name.startswith(PREFIX) and (not replaced or self.replaced(name)):
                found.append(item)
        return found

    def is_present(self, document: Document) -> bool:
        """Return whether any entry of ddpdoctor is in a list of this key."""
        return any(self.ours(array, replaced=False) for array in self.arrays(document))

    def is_done(self, document: Document) -> bool:
        """Return whether the entries are as wanted, in the list that VS Code reads."""
        now = [item for array in self.arrays(document) for item in self.ours(array)]
        if [item.value for item in now] != list(self.wanted):
            return False
        root = document.root
        return not now or root is None or root.members(self.key)[-1].start < now[0].start


def rewrite(
    text: str | None, sections: Sequence[Section], defaults: Mapping[str, object]
) -> str | None:
    """Write the wanted entries, remove the replaced ones, and leave the rest as it is.

    Args:
        text: The content of the file; None if there is no file.
        sections: Its lists, no two with the same key.
        defaults: Other members of a root object that has to be created.

    Returns:
        The new text, which is the same if nothing has to change. None if the file is not needed.

    Raises:
        JsoncError: The text is damaged, or has something else where a list is required.
    """
    document = jsonc.parse(text or "")
    pending = [section for section in sections if not section.is_done(document)]
    for section in pending:
        if section.wanted:
            # Check before anything moves, so that the error names a line of the user's file.
            _list(document, section.key)
    for section in pending:
        gone = [(array, section.ours(array)) for array in section.arrays(document)]
        document = jsonc.parse(document.cut(gone))
    if document.root is None:
        if not any(section.wanted for section in pending):
            return text
        document = jsonc.parse(_with_root(document, defaults, MADE_FILE if text is None else MADE))
    # Each is put first, so the first section comes last.
    for section in reversed(pending):
        if section.wanted:
            document = jsonc.parse(_with_list(document, section.key))
            array = _list(document, section.key)
            assert array is not None
            at = _after_marker(document, array)
            document = jsonc.parse(document.insert(array, at, section.wanted))
    for section in sections:
        if not section.is_present(document):
            document = jsonc.parse(_without_list(document, section.key))
    if any(section.is_present(document) for section in sections):
        return document.text
    return _without_root(document, defaults)


def find(document: Document, key: str, naming: str, name: str) -> Node | None:
    """Return the element with this name in a list of the root object, or None.

    Raises:
        JsoncError: The root is not an object, or its member of this key is not a list.
    """
    array = _list(document, key)
    for item in array.items if array else ():
        if isinstance(item.value, dict) and item.value.get(naming) == name:
            return item
    return None


def _list(document: Document, key: str) -> Node | None:
    """Return the list that VS Code reads, which is the last one of this key."""
    root = document.root
    if root is None:
        return None
    if not isinstance(root.value, dict):
        raise JsoncError("the file must hold an object { }", document.line(root.start))
    found = root.members(key)
    if found and not isinstance(found[-1].value, list):
        raise JsoncError(f'"{key}" must be a list [ ]', document.line(found[-1].start))
    return found[-1] if found else None


def _markers(document: Document, node: Node) -> list[Comment]:
    return [c for c in document.comments_of(node) if c.text in (MADE, MADE_FILE)]


def _after_marker(document: Document, node: Node) -> int:
    """Return the position after the opening bracket, or after our comment that follows it."""
    for marker in _markers(document, node):
        if not document.text[node.start + 1 : marker.start].strip(BLANKS):
            return marker.end
    return node.start + 1


def _with_root(document: Document, defaults: Mapping[str, object], marker: str) -> str:
    """Return the text with an object after the comments, on a new line."""
    text, eol = document.text, document.eol
    members = ",".join(
        f"{eol}{INDENT}{document.render(key, '')}: {document.render(value, INDENT)}"
        for key, value in defaults.items()
    )
    separator = eol if text.removeprefix(BOM) else ""
    return f"{text}{separator}{{ {marker}{members}{eol}}}{eol}"


def _without_root(document: Document, defaults: Mapping[str, object]) -> str | None:
    """Return the text without the object that ddpdoctor made, or at least without its comment."""
    text, root = document.text, document.root
    markers = _markers(document, root) if root is not None else []
    if root is None or not markers:
        return text
    only_defaults = all((item.key, item.value) in defaults.items() for item in root.items)
    if not only_defaults or len(document.comments_of(root)) > len(markers):
        return document.cut([], markers)
    # Remove only the line end that we wrote: half a line end of the user may come before it.
    eol = jsonc.line_end(text, markers[0].end)
    left = text[: root.start].removesuffix(eol) + text[root.end :].removeprefix(eol)
    return None if markers[0].text == MADE_FILE and not left.removeprefix(BOM) else left


def _with_list(document: Document, key: str) -> str:
    """Return the text with the list in its root: an empty one with our comment if it had none."""
    root = document.root
    if root is None or _list(document, key) is not None:
        return document.text
    # VS Code begins its files with comments about the file, so insert after those.
    first = root.items[0].first if root.items else root.end
    header = [comment.end for comment in document.comments_of(root) if comment.start < first]
    at = max([_after_marker(document, root), *header])
    text, lead = document.text, document.eol + document.member_indent
    made = f"{lead}{document.render(key, '')}: [ {MADE}{lead}]"
    return text[:at] + made + ("," if root.items else "") + text[at:]


def _without_list(document: Document, key: str) -> str:
    """Return the text without the list if we made it and it is empty, else without our comment."""
    root = document.root
    if root is None:
        return document.text
    left: list[Comment] = []
    gone: list[Node] = []
    for item in root.members(key):
        markers = _markers(document, item)
        if markers and not item.items and document.comments_of(item) == markers:
            gone.append(item)
        else:
            left += markers
    return document.cut([(root, gone)], left)


# -- the files in a workspace's ``.vscode``


FOLDER = ".vscode"
LAUNCH = "launch.json"
LOCK_SECONDS = 10.0  # How long to wait for another process that edits the same workspace

Edit = Callable[["str | None"], "str | None"]
"""From the text of a file to the new text; None stands for no file.

Raises :class:`~ddpdoctor.debug.jsonc.JsoncError` if the text cannot be edited.
"""


def current_directory() -> Path:
    """Return the working directory under the shell's name for it, links included.

    VS Code names files by the path that its folder was opened with, which may be a link.
    """
    here, named = Path.cwd(), os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(named) and os.path.samefile(named, here):
            return Path(named)
    return here


def find_workspace(start: Path, chosen: str | None) -> Path:
    """Return the folder that VS Code has open: the chosen one, or a guess.

    The guess is the nearest of ``start`` and its parents with a ``.vscode`` or ``.git``, else
    ``start``. The home directory does not count: its ``.vscode`` holds VS Code's extensions.

    Raises:
        DoctorError: The chosen one is not a directory.
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
        marked = (folder / FOLDER).is_dir() or (folder / ".git").exists()
        if marked and os.path.realpath(folder) != home:
            return folder
    return start


@contextlib.contextmanager
def locked(workspace: Path) -> Iterator[None]:
    """Keep other processes of this user from editing the same workspace.

    Raises:
        DoctorError: Another process holds the lock for too long, or it cannot be created.
    """
    key = hashlib.sha256(os.fsencode(os.path.realpath(workspace))).hexdigest()[:16]
    try:
        path = rundir.private_base() / f"vscode-{key}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
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

    Nothing is written until all edits are known to work. Unchanged files are not written.

    Returns:
        The files that changed.

    Raises:
        DoctorError: A file cannot be read, parsed or written. All files are as they were, unless
            the disk failed between two of them.
    """
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
    """A file in ``.vscode``, or the target of a link there.

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
        """Return the text, with its line ends and its byte order mark."""
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
            # Root could write to it all the same, but the owner wanted it to stay.
            if not mode & 0o222 or not os.access(self.target, os.W_OK):
                raise PermissionError(errno.EACCES, "it is read-only")

    def write(self, text: str) -> None:
        """Replace the content atomically, with the owner and mode of the old file."""
        temporary = self.target.with_name(f".{self.target.name}.{secrets.token_hex(4)}.tmp")
        with self._one_line("written"):
            self.target.parent.mkdir(exist_ok=True)
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with open(os.open(temporary, flags, 0o666), "wb") as file:
                    with contextlib.suppress(FileNotFoundError):
                        facts = self.target.stat()
                        # Root in a container edits files of the user outside, who keeps them.
                        with contextlib.suppress(PermissionError):
                            os.fchown(file.fileno(), facts.st_uid, facts.st_gid)
                        os.fchmod(file.fileno(), stat.S_IMODE(facts.st_mode))
                    file.write(text.encode())
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(temporary, self.target)
            finally:
                with contextlib.suppress(OSError):
                    temporary.unlink()

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
